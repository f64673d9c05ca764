"""Which samples an engine generates: those that the work queue on rank 0 hands out, or a fixed share.

The queue is a Flask server. Each id of a round (one rollout phase) is handed out once, to whichever engine has room for
it; the ranks meet at the end of the round. An id needs no looking after: a rank that dies ends the job, and all wait
for one that stands still, in the queue's rounds as in everything else that they do together.
"""

from __future__ import annotations

import collections
import json
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_style_aligner.guard.http_client import ClientLimits, HttpClient, server_url
from nemo_style_aligner.guard.http_server import WsgiServer
from nemo_style_aligner.guard.protocol import JSON_TYPE, LIVE_PATH, is_int

if TYPE_CHECKING:
    from flask import Flask, Response

logger = logging.getLogger(__name__)

SHARE_HEADER = "X-Work-Queue-Share"  # ids that are left, per worker
CLIENT_LIMITS = ClientLimits(connect_s=5.0, read_s=30.0, total_s=300.0, first_backoff_s=0.05, max_backoff_s=2.0)
_MAX_IDS = 65536  # in one answer
_MAX_BODY_BYTES = 2**16
_OPEN_PATHS = ("/health", LIVE_PATH)


class WorkSource(Protocol):
    """Ids of samples for an engine, round by round."""

    def start_round(self, ids: Sequence[int], expected_lengths: Sequence[float] | None = None) -> None:
        """Begin a round. Every rank calls it with the same arguments; a barrier must follow."""
        ...

    def take(self, n: int) -> list[int]:
        """Up to ``n`` ids for this engine; an empty list: the round has no more."""
        ...

    def left(self) -> int:
        """About how many ids this engine will still get in this round; for any thread."""
        ...

    def close(self) -> None:
        """Close connections and servers."""
        ...


class StaticPartition:
    """A `WorkSource` without a server: a fixed share for each of ``count`` engines, of which this is number ``index``.

    It is every ``count``-th id from position ``index`` on, in the given order, or, with expected lengths, longest
    first, so that all engines get a similar mix. Samples of one prompt stay together where the shares come out even:
    an engine computes their prompt once.

    Args:
        samples_per_prompt: so many ids in a row are of one prompt.
    """

    def __init__(self, index: int, count: int, samples_per_prompt: int = 1) -> None:
        self._index = index
        self._count = count
        self._samples_per_prompt = samples_per_prompt
        self._ids: list[int] = []

    def start_round(self, ids: Sequence[int], expected_lengths: Sequence[float] | None = None) -> None:
        """Take this engine's share."""
        size = self._samples_per_prompt if len(ids) % (self._samples_per_prompt * self._count) == 0 else 1
        positions = list(range(0, len(ids), size))
        if expected_lengths is not None:
            positions.sort(key=lambda position: -expected_lengths[position])
        mine = positions[self._index :: self._count]
        self._ids = [each for position in mine for each in ids[position : position + size]]

    def take(self, n: int) -> list[int]:
        """See `WorkSource.take`."""
        taken, self._ids = self._ids[:n], self._ids[n:]
        return taken

    def left(self) -> int:
        """See `WorkSource.left`."""
        return len(self._ids)

    def close(self) -> None:
        """Nothing is open."""


# ---- the queue, on rank 0 ------------------------------------------------------------------------


class WorkQueue:
    """The ids of one round at a time, in memory. Thread-safe.

    A worker gets at most half its share of what is left (guided self-scheduling): many ids at first, single ones at
    the end of a round, so that nobody sits on a backlog while others have nothing to do.

    Attributes:
        workers: how many will ask; may still be set before the first round.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._lock = threading.Lock()
        self._pending: collections.deque[int] = collections.deque()
        self._answers: dict[str, tuple[int, list[int]]] = {}  # by worker: its last request's number, and what it got

    def __len__(self) -> int:
        """Ids that are left."""
        return len(self._pending)

    def start_round(self, ids: Sequence[int], expected_lengths: Sequence[float] | None = None) -> None:
        """Replace the content by ``ids``, handed out in this order, or longest expected response first."""
        order = list(range(len(ids)))
        if expected_lengths is not None:
            order.sort(key=lambda position: -expected_lengths[position])
        with self._lock:
            self._pending = collections.deque(ids[position] for position in order)

    def take(self, n: int, worker: str | None = None, number: int = 0) -> list[int]:
        """Hand out up to ``n`` ids.

        Without ``worker`` they are exactly ``n``, if that many are left (NeMo-Aligner's protocol). A repeat of a
        worker's request, known by its ``number``, gets the ids of the last one: neither a lost answer loses any, nor a
        try that was given up and arrives late.
        """
        with self._lock:
            if worker is None:
                return self._pop(n)
            last, ids = self._answers.get(worker, (-1, []))
            if number > last:
                ids = self._pop(min(n, self._guided_size()))
                self._answers[worker] = (number, ids)
            return ids

    def share(self) -> int:
        """Ids that are left, per worker, rounded down."""
        return len(self._pending) // self.workers

    def _pop(self, n: int) -> list[int]:
        return [self._pending.popleft() for _ in range(min(n, len(self._pending)))]

    def _guided_size(self) -> int:
        return len(self._pending) if self.workers == 1 else -(-len(self._pending) // (2 * self.workers))


def create_app(queue: WorkQueue) -> Flask:
    """The queue's routes.

    ``PUT /get_idx {"batch_size": n}`` answers a JSON list of ids, empty when there are none (as in NeMo-Aligner). The
    optional ``worker`` and ``request`` (its number) make it a request of a worker, see `WorkQueue.take`; the header
    ``X-Work-Queue-Share`` tells workers how many ids are left for each. ``GET /status`` answers ``{"left": n}``.
    ``GET /health`` and `LIVE_PATH`, at which clients have the server prove that it knows the token, need none.
    """
    # Here, because only the rank with the queue needs it: it takes a fortieth of the time to start a rank.
    from flask import Flask, Response, request
    from werkzeug.exceptions import BadRequest, HTTPException

    app = Flask("nemo_style_aligner.work_queue")

    def answer(content: Any, status: int | None = 200, headers: dict[str, str] | None = None) -> Response:
        return Response(json.dumps(content), status, headers, content_type=JSON_TYPE)

    def get_idx() -> Response:
        try:
            size, worker, number = _asked(request.get_data(cache=False))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        ids = queue.take(min(size, _MAX_IDS), worker, number)
        return answer(ids, headers={SHARE_HEADER: str(queue.share())})

    app.register_error_handler(
        HTTPException, lambda error: answer({"error": f"{error.name}: {error.description}"}, error.code)
    )
    app.add_url_rule("/get_idx", view_func=get_idx, methods=["PUT"])
    app.add_url_rule("/status", "status", lambda: answer({"left": len(queue)}))
    for path in _OPEN_PATHS:
        app.add_url_rule(path, path, lambda: Response(status=200))
    return app


def _asked(content: bytes) -> tuple[int, str | None, int]:
    """How many ids, by which worker, in which of its requests. Raises ValueError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    size, worker = _integer(body, "batch_size", 1), body.get("worker")
    if worker is None:
        return size, None, 0
    if not isinstance(worker, str) or not 0 < len(worker) <= 256:
        raise ValueError("'worker' must be a string of 1 to 256 characters")
    return size, worker, _integer(body, "request", 0)


def _integer(body: dict[str, Any], name: str, low: int) -> int:
    value = body.get(name)
    if not is_int(value) or not low <= value < 2**63:
        raise ValueError(f"'{name}' must be a whole number of at least {low}")
    return int(value)


class WorkQueueServer:
    """A work queue behind HTTP, served from daemon threads of rank 0. ``port`` 0 takes a free one.

    ``host``: loopback unless workers run on other nodes; then an address of rank 0's machine, with a token.
    ``section``: the config section that has the keys host and port, for errors.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None, section: str | None = None
    ) -> None:
        self.queue = WorkQueue()
        self._server = WsgiServer(
            create_app(self.queue),
            host,
            port,
            max_body_bytes=_MAX_BODY_BYTES,
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


# ---- a worker's side -----------------------------------------------------------------------------


class WorkTaker:
    """Takes ids of a round from a queue, a few ahead.

    Args:
        ask: up to so many ids from the queue, and how many are left per worker.
        slots: ids that the engine works on at the same time. A quarter as many are taken ahead, as long as enough ids
            are left to fill the slots of all engines: so the engine waits for the queue less often.
    """

    def __init__(self, ask: Callable[[int], tuple[list[int], int]], slots: int) -> None:
        self._ask = ask
        self._slots = slots
        self.begin()

    def begin(self) -> None:
        """A new round: nothing is left of the last one."""
        self._share = 0  # as of the queue's last answer
        self._taken: collections.deque[int] = collections.deque()

    def take(self, n: int) -> list[int]:
        """See `WorkSource.take`."""
        if not self._taken:
            ahead = self._slots // 4 if self._share >= self._slots else 0
            ids, self._share = self._ask(n + ahead)
            self._taken.extend(ids)
        return [self._taken.popleft() for _ in range(min(n, len(self._taken)))]

    def left(self) -> int:
        """See `WorkSource.left`; as of the queue's last answer."""
        return len(self._taken) + self._share


class WorkQueueClient:
    """A `WorkSource` that asks the queue on rank 0.

    Args:
        host, port, token: of the server.
        server: on rank 0 the server itself, for `start_round`; `close` stops it.
        slots: see `WorkTaker`.
        limits: of a request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        server: WorkQueueServer | None = None,
        slots: int = 0,
        limits: ClientLimits = CLIENT_LIMITS,
    ) -> None:
        self._http = HttpClient(server_url(host, port), token=token)
        self._limits = limits
        self._name = uuid.uuid4().hex
        self._server = server
        self._num_requests = 0
        self._taker = WorkTaker(self._ask, slots)

    def start_round(self, ids: Sequence[int], expected_lengths: Sequence[float] | None = None) -> None:
        """See `WorkSource.start_round`."""
        if self._server is not None:
            self._server.queue.start_round(ids, expected_lengths)
        self._taker.begin()

    def take(self, n: int) -> list[int]:
        """See `WorkSource.take`.

        Raises:
            ServerUnavailableError: the queue does not answer.
        """
        return self._taker.take(n)

    def left(self) -> int:
        """See `WorkSource.left`; as of the queue's last answer."""
        return self._taker.left()

    def close(self) -> None:
        """Close the connection, and on rank 0 the server."""
        self._http.close()
        if self._server is not None:
            self._server.stop()

    def _ask(self, n: int) -> tuple[list[int], int]:
        self._num_requests += 1
        body = json.dumps({"batch_size": n, "worker": self._name, "request": self._num_requests}).encode()
        headers = {"Content-Type": JSON_TYPE}
        answer = self._http.request("PUT", "/get_idx", limits=self._limits, body=body, headers=headers)
        ids: list[int] = answer.json()
        return ids, int(answer.headers.get(SHARE_HEADER, 0))
