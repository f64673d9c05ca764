"""What a service counts and times."""

from __future__ import annotations

from functools import partial
from typing import Any

import prometheus_client as prometheus

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """What `/metrics` shows, in a registry of its own: several services may live in one process."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        of: Any = {"namespace": "aligner", "subsystem": "server", "registry": self.registry}
        counter: Any = partial(prometheus.Counter, **of)
        histogram: Any = partial(prometheus.Histogram, buckets=_SECONDS, **of)
        self.requests = counter("requests", "Inference-protocol requests answered", ["model", "status"])
        self.latency = histogram("request_seconds", "Time from a request's arrival to its answer", ["model"])
        self.queue_time = histogram("queue_seconds", "Time a job waited for the model")
        self.batch_rows = histogram("batch_rows", "Rows in a merged inference batch", buckets=_ROWS)
        self.command_time = histogram("command_seconds", "Time the model took for one command", ["command"])
        self.training_steps = counter("training_steps", "Training requests applied")
        self.training_repeats = counter("training_repeats", "Training requests answered from the ledger")
        self.outstanding = prometheus.Gauge("outstanding_requests", "Requests accepted and not yet answered", **of)
