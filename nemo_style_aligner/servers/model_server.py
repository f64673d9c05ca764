"""Serve a model on all ranks of a job: HTTP on rank 0 and the dispatcher everywhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nemo_style_aligner.servers.channel import CommandChannel
from nemo_style_aligner.servers.dispatcher import Dispatcher, DispatchSettings, ModelBackend
from nemo_style_aligner.servers.endpoints import Endpoint
from nemo_style_aligner.servers.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.servers.http_server import WsgiServer
from nemo_style_aligner.servers.jobs import JobQueue
from nemo_style_aligner.servers.metrics import ServiceMetrics
from nemo_style_aligner.servers.routes import HttpSettings, start_http_server

logger = logging.getLogger(__name__)


class ModelServer:
    """A service on all ranks. Create it on every rank, early: rank 0 listens at once, and is ready in `run`.

    Attributes:
        ledger: what was trained; the backend keeps it in its checkpoints.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        http: HttpSettings,
        dispatch: DispatchSettings,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ledger = TrainingLedger()
        channel, queue, metrics = CommandChannel(device), JobQueue(http.max_outstanding_requests), ServiceMetrics()
        self._dispatcher = Dispatcher(dispatch, channel=channel, queue=queue, ledger=self.ledger, metrics=metrics)
        self._http: WsgiServer | None = None
        if channel.rank == 0:
            self._http = start_http_server(endpoints, queue, http, dispatch, metrics)

    @property
    def port(self) -> int:
        """The port that rank 0 listens on; 0 on other ranks."""
        return self._http.port if self._http is not None else 0

    def request_stop(self) -> None:
        """End `run` on all ranks as SIGTERM does. May be called on any rank, from any thread or a signal handler."""
        self._dispatcher.request_stop()

    def run(self, backend: ModelBackend) -> None:
        """Serve ``backend`` until SIGTERM, SIGINT or `request_stop`; returns after a graceful end.

        Raises on all ranks if one of them fails, after the waiting clients were answered.
        """
        try:
            self._dispatcher.run(backend)
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening, after open answers were sent. `run` does it itself."""
        if self._http is not None:
            self._http.stop()
            self._http = None
