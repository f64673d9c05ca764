"""The work queue behind HTTP, on rank 0: its routes, and the server that answers them."""

from __future__ import annotations

import json
import logging
from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from nemo_style_aligner.rl.rollouts.work_queue import RoundMismatchError, SampleLostError, WorkQueue
from nemo_style_aligner.servers.http_connection import server_url
from nemo_style_aligner.servers.http_server import WsgiServer
from nemo_style_aligner.servers.protocol import JSON_TYPE, LIVE_PATH, is_int

logger = logging.getLogger(__name__)

STATE_HEADER = "X-Work-Queue-State"
SHARE_HEADER = "X-Work-Queue-Share"  # ids that are not leased yet, per worker
UNFINISHED_HEADER = "X-Work-Queue-Unfinished"  # ids not completed
REFUSED_HEADER = "X-Work-Queue-Refused"  # those of "completed" that the worker does not hold
MAX_IDS_PER_REQUEST = 65536
MAX_IDS_WITH_LEASE = 512  # in "completed": if all of them are refused, they still fit into a header
MAX_BODY_BYTES = 2**22
_OPEN_PATHS = ("/health", LIVE_PATH)


class _BadRequestError(Exception):
    """A malformed request; answered with 400."""


def create_app(queue: WorkQueue) -> Flask:
    """The queue's routes.

    ``PUT /get_idx {"batch_size": n}`` answers a JSON list of ids, empty when there are none (as in
    NeMo-Aligner); the optional ``worker``, ``round`` and ``request`` make it a lease. Headers hold the other
    fields of `Lease`: ``X-Work-Queue-State``, ``-Share`` and ``-Unfinished``. ``completed``, a list of ids, saves a
    worker the request to ``/complete``; ``X-Work-Queue-Refused`` lists the refused ones, separated by commas.
    ``PUT /complete {"ids": [...], "worker": w}`` answers ``{"accepted": [...], "refused": [...]}``,
    ``PUT /renew {"worker": w}`` answers ``{"held": [...]}``, and ``GET /status`` answers `WorkQueue.status`.
    ``GET /health`` and `LIVE_PATH`, at which clients have the server prove that it knows the token, need none.
    """
    app = Flask("nemo_style_aligner.work_queue")
    app.register_error_handler(_BadRequestError, lambda error: _answer({"error": str(error)}, 400))
    app.register_error_handler(RoundMismatchError, lambda error: _answer({"error": str(error)}, 409))
    app.register_error_handler(SampleLostError, lambda error: _answer({"error": str(error)}, 409))
    app.register_error_handler(
        HTTPException, lambda error: _answer({"error": f"{error.name}: {error.description}"}, error.code)
    )

    def get_idx() -> Response:
        body = _body()
        size = _integer(body, "batch_size", 1, MAX_IDS_PER_REQUEST)
        round_number = _integer(body, "round", optional=True)
        request_number = _integer(body, "request", 0, optional=True)
        worker = None if body.get("worker") is None and "completed" not in body else _worker(body)
        refused: list[int] = []
        if worker is not None and "completed" in body:
            _, refused = queue.complete(_ids(body, "completed", MAX_IDS_WITH_LEASE), worker, round_number=round_number)
        lease = queue.lease(size, worker, round_number=round_number, request_number=request_number)
        headers = {
            STATE_HEADER: lease.state,
            SHARE_HEADER: str(lease.share),
            UNFINISHED_HEADER: str(lease.unfinished),
        }
        if refused:
            headers[REFUSED_HEADER] = ",".join(map(str, refused))
        return _answer(lease.ids, headers=headers)

    def complete() -> Response:
        body = _body()
        ids = _ids(body, "ids", MAX_IDS_PER_REQUEST)
        accepted, refused = queue.complete(ids, _worker(body), round_number=_integer(body, "round", optional=True))
        return _answer({"accepted": accepted, "refused": refused})

    def renew() -> Response:
        body = _body()
        return _answer({"held": queue.renew(_worker(body), round_number=_integer(body, "round", optional=True))})

    app.add_url_rule("/get_idx", view_func=get_idx, methods=["PUT"])
    app.add_url_rule("/complete", view_func=complete, methods=["PUT"])
    app.add_url_rule("/renew", view_func=renew, methods=["PUT"])
    app.add_url_rule("/status", "status", lambda: _answer(queue.status()))
    for path in _OPEN_PATHS:
        app.add_url_rule(path, path, lambda: Response(status=200))
    return app


def _answer(content: Any, status: int | None = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, content_type=JSON_TYPE)


def _body() -> dict[str, Any]:
    try:
        body = json.loads(request.get_data(cache=False))
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequestError("the body must be a JSON object")
    return body


def _ids(body: dict[str, Any], name: str, limit: int) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or len(ids) > limit or not all(map(is_int, ids)):
        raise _BadRequestError(f"'{name}' must be a list of at most {limit} whole numbers")
    return ids


def _integer(
    body: dict[str, Any], name: str, low: int = -(2**63), high: int = 2**63 - 1, *, optional: bool = False
) -> Any:
    value = body.get(name)
    if value is None and optional:
        return None
    if not is_int(value) or not low <= value <= high:
        raise _BadRequestError(f"'{name}' must be a whole number from {low} to {high}")
    return value


def _worker(body: dict[str, Any]) -> str:
    worker = body.get("worker")
    if not isinstance(worker, str) or not 0 < len(worker) <= 256:
        raise _BadRequestError("'worker' must be a string of 1 to 256 characters")
    return worker


class WorkQueueServer:
    """Serves a `WorkQueue` over HTTP from daemon threads of rank 0. ``port`` 0 takes a free one.

    ``host``: loopback unless workers run on other nodes; then an address of rank 0's machine, with a token.
    ``section``: the config section that has the keys host and port, for errors.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        queue: WorkQueue,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        section: str | None = None,
    ) -> None:
        self.queue = queue
        self._server = WsgiServer(
            create_app(queue),
            host,
            port,
            max_body_bytes=MAX_BODY_BYTES,
            name="rollout work queue",
            section=section,
            token=token,
            is_open=lambda path: path in _OPEN_PATHS,
        )
        self.host, self.port = host, self._server.port
        logger.info("rollout work queue on %s", server_url(self.host, self.port))

    def stop(self) -> None:
        """Stop listening and free the port."""
        self._server.stop(flush_seconds=1.0)
