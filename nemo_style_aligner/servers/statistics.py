"""Counts and times per model in the form of Triton's *statistics* extension."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from nemo_style_aligner.servers.jobs import Job


@dataclasses.dataclass
class _Total:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += int(seconds * 1e9)

    def describe(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class ModelStatistics:
    """What one model has done. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._success, self._fail, self._queue, self._compute = _Total(), _Total(), _Total(), _Total()
        self._rows = 0
        self._batches: dict[int, _Total] = {}
        self._last_ms = 0

    def failed(self, seconds: float) -> None:
        """Count a request that was refused or could not be answered."""
        with self._lock:
            self._fail.add(seconds)

    def answered(self, job: Job, rows: int, seconds: float) -> None:
        """Count an answered request of ``rows`` rows; ``job`` has the times of its computation."""
        compute = job.finished - job.taken
        with self._lock:
            self._last_ms = int(time.time() * 1000)
            self._success.add(seconds)
            self._queue.add(job.taken - job.arrived)
            self._compute.add(compute)
            self._rows += rows
            if job.leads_batch:
                self._batches.setdefault(job.batch_rows, _Total()).add(compute)

    def describe(self, name: str, version: str) -> dict[str, Any]:
        """An element of the extension's ``model_stats``."""
        with self._lock:
            nothing = _Total().describe()
            return {
                "name": name,
                "version": version,
                "last_inference": self._last_ms,
                "inference_count": self._rows,
                "execution_count": sum(total.count for total in self._batches.values()),
                "inference_stats": {
                    "success": self._success.describe(),
                    "fail": self._fail.describe(),
                    "queue": self._queue.describe(),
                    "compute_input": nothing,
                    "compute_infer": self._compute.describe(),
                    "compute_output": nothing,
                    "cache_hit": nothing,
                    "cache_miss": nothing,
                },
                "batch_stats": [
                    {
                        "batch_size": rows,
                        "compute_input": nothing,
                        "compute_infer": total.describe(),
                        "compute_output": nothing,
                    }
                    for rows, total in sorted(self._batches.items())
                ],
            }
