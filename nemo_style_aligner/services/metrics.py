"""Prometheus metrics of a service, in a registry of its own (several services may live in one process)."""

from __future__ import annotations

from typing import Any

import prometheus_client as prometheus

_PREFIX = "aligner_server_"
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS, label: str = "") -> Any:
            labels = [label] if label else []
            return prometheus.Histogram(_PREFIX + name, what, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Any:
            return prometheus.Counter(_PREFIX + name, what, labels, registry=self.registry)

        self.requests = counter("requests", "Inference-protocol requests answered", "model", "status")
        self.latency = histogram("request_seconds", "Time from a request's arrival to its answer", label="model")
        self.queue_time = histogram("queue_seconds", "Time a job waited for the model")
        self.batch_rows = histogram("batch_rows", "Rows in a merged inference batch", _ROWS)
        self.command_time = histogram("command_seconds", "Time the model took for one command", label="command")
        self.training_steps = counter("training_steps", "Training requests applied")
        self.training_repeats = counter("training_repeats", "Training requests answered from the ledger")
        self.outstanding = prometheus.Gauge(
            f"{_PREFIX}outstanding_requests", "Requests accepted and not yet answered", registry=self.registry
        )

    def exposition(self) -> tuple[bytes, str]:
        """The text for Prometheus, and its content type."""
        return prometheus.generate_latest(self.registry), prometheus.CONTENT_TYPE_LATEST
