"""Prometheus metrics of a service, in a registry of its own (several services may live in one process)."""

from __future__ import annotations

import prometheus_client as prometheus

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        prefix = "aligner_server"
        self.requests = prometheus.Counter(
            f"{prefix}_requests", "Inference-protocol requests answered", ["model", "status"], registry=self.registry
        )
        self.latency = prometheus.Histogram(
            f"{prefix}_request_seconds",
            "Time from the arrival of a request to its answer",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_time = prometheus.Histogram(
            f"{prefix}_queue_seconds", "Time a job waited for the model", buckets=_SECONDS, registry=self.registry
        )
        self.batch_rows = prometheus.Histogram(
            f"{prefix}_batch_rows", "Rows in a merged inference batch", buckets=_ROWS, registry=self.registry
        )
        self.command_time = prometheus.Histogram(
            f"{prefix}_command_seconds",
            "Time the model took for one command",
            ["command"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.training_steps = prometheus.Counter(
            f"{prefix}_training_steps", "Training requests applied", registry=self.registry
        )
        self.training_repeats = prometheus.Counter(
            f"{prefix}_training_repeats", "Training requests answered from the ledger", registry=self.registry
        )
        self.outstanding = prometheus.Gauge(
            f"{prefix}_outstanding_requests", "Requests accepted and not yet answered", registry=self.registry
        )

    def exposition(self) -> tuple[bytes, str]:
        """The text for Prometheus, and its content type."""
        return prometheus.generate_latest(self.registry), prometheus.CONTENT_TYPE_LATEST
