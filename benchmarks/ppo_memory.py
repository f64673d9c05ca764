"""Memory and processor time of the contenders of `ppo_step.py`, measured from outside in the same way for all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

_SECONDS = 0.2


class ResidentPeak:
    """The most memory that trees of processes had resident: each tree by itself, and together at the same instant.

    Pages that several processes share count for each of them. The kernel's own high-water mark is no use here: our jobs
    reset theirs at each phase.
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, roots: Mapping[str, int]) -> None:
        """Watch the process of each name and all below it, until `stop`; peaks of earlier watches still count."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, args=(roots,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _watch(self, roots: Mapping[str, int]) -> None:
        is_last = False
        while not is_last:  # look once more after `stop`, which may come before the first interval is over
            is_last = self._stopping.wait(_SECONDS)
            sizes = {name: resident_bytes(pid) for name, pid in roots.items()}
            for name, size in {**sizes, "together": sum(sizes.values())}.items():
                self.peak[name] = max(self.peak.get(name, 0), size)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += each.memory_info().rss
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of some processes and all below them so far; of children that have ended, too."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    times = each.cpu_times()
                    total += times.user + times.system + times.children_user + times.children_system
    return total


def logged_peaks(folders: Mapping[str, Path]) -> dict[str, int]:
    """Peak memory of our jobs from their metrics ``memory/*_peak_gib``, on a GPU that of rank 0's allocator.

    ``together`` is their sum: the jobs need not hold their most at the same moment.
    """
    peaks = {}
    for name, folder in folders.items():
        curves = read_metrics(folder)
        sizes = (value for curve, points in curves.items() if is_memory(curve) for _, value in points)
        peaks[name] = int(max(sizes, default=0.0) * 2**30)
    return {**peaks, "together": sum(peaks.values())}


def is_memory(curve: str) -> bool:
    """Whether a curve has the peaks of one of a job's phases."""
    return curve.startswith("memory/") and curve.endswith("_peak_gib")


def largest(peaks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The largest size of each name."""
    found: dict[str, int] = {}
    for peak in peaks:
        for name, size in peak.items():
            found[name] = max(found.get(name, 0), size)
    return found
