"""The HTTP half of a service: Open Inference Protocol v2 routes that queue work and wait for the answer.

`create_app` builds the Flask app, `start_http_server` serves it on rank 0. The work is done by `ModelServer`, which
gets it through a shared `RequestQueue`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from flask import Flask, Response, request

import nemo_style_aligner
from nemo_style_aligner.guard.flask_app import note, service_app
from nemo_style_aligner.guard.http_client import server_url
from nemo_style_aligner.guard.http_server import ConnectionLimits, WsgiServer
from nemo_style_aligner.guard.protocol import (
    HEADER_LENGTH_FIELD,
    LIVE_PATH,
    READY_PATH,
    InferRequest,
    ProtocolError,
    decode_infer_request,
    encode_infer_response,
    is_int,
)
from nemo_style_aligner.guard.request_log import REQUEST_ID_HEADER, request_id
from nemo_style_aligner.trainer.services.endpoints import MODEL_VERSION, Endpoint, QueuedRequest
from nemo_style_aligner.trainer.services.exactly_once.ledger import INSTANCE_HEADER
from nemo_style_aligner.trainer.services.jobs import QueueState, RequestQueue
from nemo_style_aligner.trainer.services.service_metrics import ServiceMetrics

logger = logging.getLogger(__name__)

SERVER_NAME = "nemo_style_aligner"
EXTENSIONS = ["binary_tensor_data", "model_configuration"]
# PyTriton's clients request these two without their token; they show names of tensors, and nothing that is computed.
_OPEN_MODEL_ROUTE = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/(ready|config)")


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """Where the service listens and what it lets in."""

    port: int
    host: str = "127.0.0.1"
    section: str | None = None  # of the config that these keys are from, for errors
    token: str | None = dataclasses.field(default=None, repr=False)  # the shared secret; None: no authentication
    known_as: tuple[str, ...] = ()  # further host:port at which clients may reach the service
    max_body_bytes: int = 2**30
    max_outstanding_requests: int = 128  # more are answered 429
    infer_timeout_s: float = 600.0  # until an inference request is answered 504; twice that if being computed
    command_timeout_s: float = 3600.0  # until training, saving or restoring is answered 504
    connections: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)


def create_app(
    endpoints: Sequence[Endpoint], queue: RequestQueue, settings: HttpSettings, metrics: ServiceMetrics
) -> Flask:
    """The Flask app of a service with these endpoints."""
    app = service_app("nemo_style_aligner.service", metrics.registry)
    metrics.outstanding.set_function(lambda: queue.outstanding)
    routes = _Routes({endpoint.name: endpoint for endpoint in endpoints}, queue, settings, metrics)
    app.add_url_rule("/v2", view_func=routes.server_metadata)
    app.add_url_rule(LIVE_PATH, view_func=routes.live)
    app.add_url_rule(READY_PATH, view_func=routes.ready)
    for prefix in ("/v2/models/<model>", "/v2/models/<model>/versions/<version>"):
        app.add_url_rule(prefix, view_func=routes.model_metadata)
        app.add_url_rule(f"{prefix}/ready", view_func=routes.model_ready)
        app.add_url_rule(f"{prefix}/config", view_func=routes.model_config)
        app.add_url_rule(f"{prefix}/infer", view_func=routes.infer, methods=["POST"])
    return app


def start_http_server(
    endpoints: Sequence[Endpoint], queue: RequestQueue, settings: HttpSettings, metrics: ServiceMetrics
) -> WsgiServer:
    """Serve in threads of this process; returns at once, listening. Answers 503 until the queue is serving."""
    server = WsgiServer(
        create_app(endpoints, queue, settings, metrics),
        settings.host,
        settings.port,
        max_body_bytes=settings.max_body_bytes,
        name="inference service",
        section=settings.section,
        limits=settings.connections,
        token=settings.token,
        is_open=lambda path: path in (LIVE_PATH, READY_PATH) or bool(_OPEN_MODEL_ROUTE.fullmatch(path)),
        known_as=settings.known_as,
    )
    names = ", ".join(endpoint.name for endpoint in endpoints)
    logger.info("listening on %s, not ready yet: %s", server_url(server.host, server.port), names)
    return server


class _Routes:
    """The view functions."""

    def __init__(
        self, endpoints: dict[str, Endpoint], queue: RequestQueue, settings: HttpSettings, metrics: ServiceMetrics
    ) -> None:
        self._endpoints = endpoints
        self._queue = queue
        self._settings = settings
        self._metrics = metrics
        self._instance = uuid.uuid4().hex

    def server_metadata(self) -> dict[str, Any]:
        return {"name": SERVER_NAME, "version": nemo_style_aligner.__version__, "extensions": EXTENSIONS}

    def live(self) -> Response:
        return Response(status=503 if self._queue.state is QueueState.FAILED else 200)

    def ready(self) -> Response:
        status = 200 if self._queue.state is QueueState.SERVING else 503
        return Response(status=status, headers={INSTANCE_HEADER: self._instance})  # tells a restart from a pause

    def model_metadata(self, model: str, version: str = MODEL_VERSION) -> dict[str, Any]:
        return self._endpoint(model, version).metadata()

    def model_ready(self, model: str, version: str = MODEL_VERSION) -> Response:
        self._endpoint(model, version)
        return self.ready()

    def model_config(self, model: str, version: str = MODEL_VERSION) -> dict[str, Any]:
        return self._endpoint(model, version).config()

    def infer(self, model: str, version: str = MODEL_VERSION) -> Response:
        endpoint = self._endpoint(model, version)
        started = time.monotonic()
        status = 500
        try:
            decoded = decode_infer_request(request.get_data(cache=False), request.headers.get(HEADER_LENGTH_FIELD))
            job = endpoint.make_job(decoded)
            job.request_id = request_id(request.headers.get(REQUEST_ID_HEADER, ""), decoded.id)
            note(request_id=job.request_id)
            outputs = self._wait(job, decoded)
            body, headers = encode_infer_response(model, MODEL_VERSION, outputs, decoded)
            status = 200
        except ProtocolError as error:
            status = error.status
            raise
        finally:
            self._metrics.requests.labels(model, str(status)).inc()
            self._metrics.latency.labels(model).observe(time.monotonic() - started)
        note(
            model=model,
            rows=job.rows,
            batch_rows=job.batch_rows,
            queue_ms=round(1000 * (job.taken - job.arrived), 1),
        )
        return Response(body, 200, headers)

    def _endpoint(self, model: str, version: str) -> Endpoint:
        endpoint = self._endpoints.get(model)
        if endpoint is None:
            raise ProtocolError(404, f"unknown model '{model}', this service has {', '.join(self._endpoints)}")
        if version != MODEL_VERSION:
            raise ProtocolError(404, f"model '{model}' has only version {MODEL_VERSION}, not '{version}'")
        return endpoint

    def _wait(self, job: QueuedRequest, decoded: InferRequest) -> dict[str, np.ndarray]:
        """Queue the job and wait for its outputs. Inference under way may take twice the service's time limit."""
        limit = self._settings.infer_timeout_s if job.endpoint.merges else self._settings.command_timeout_s
        asked = decoded.parameters.get("timeout")  # Triton's request parameter, microseconds
        if asked is not None:
            if not is_int(asked) or not 0 <= asked < 2**63:
                raise ProtocolError(400, "parameter 'timeout' must be a whole number of microseconds, below 2^63")
            limit = min(limit, asked / 1e6) if asked else limit
        self._queue.put(job)
        try:
            done, _ = concurrent.futures.wait([job.future], limit)
            if not done and not job.future.cancel() and job.endpoint.merges and not asked:
                # It is being computed; after a 504 the client would send it again, to be computed again.
                done, _ = concurrent.futures.wait([job.future], limit)
                limit *= 2
            if done:
                return job.future.result()
            self._queue.discard(job)  # frees its tensors: only outstanding jobs may take memory
            raise ProtocolError(
                504, f"{job.endpoint.name}: no answer within {limit:g} s, {self._queue.waiting} jobs are waiting"
            )
        finally:
            self._queue.release()
