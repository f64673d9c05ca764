"""The rollout work queue: prompt ids handed to whichever data-parallel rank has room for them.

`WorkQueue` is the queue itself, in memory. `WorkQueueServer` puts it behind HTTP on rank 0 and
`WorkQueueClient` is its counterpart on every rank; `StaticPartition` deals the ids out beforehand instead
(``use_flask: False``). The last two are a `WorkSource`, so that the collector does not care.

An id is *leased* to a worker. A worker that is not heard of for ``lease_seconds`` loses its ids: they are
served again, and its late answers are refused, so that each id is completed exactly once. A *round* (one
rollout phase, with a number of its own) keeps a straggler of the last round off the ids of the next.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from nemo_style_aligner.servers.http_client import ClientLimits, HttpClient
from nemo_style_aligner.servers.http_server import JSON_TYPE, WsgiServer, require_token

logger = logging.getLogger(__name__)

STATE_HEADER = "X-Work-Queue-State"
DRAINED = "drained"  # every id of the round is completed (or was handed out without a lease)
WAITING = "waiting"  # nothing to hand out now, but a lease may still run out
SERVING = "serving"

MAX_IDS_PER_REQUEST = 65536
MAX_BODY_BYTES = 2**22
HTTP_THREADS = 8
CLIENT_LIMITS = ClientLimits(connect_s=5.0, read_s=30.0, total_s=300.0, first_backoff_s=0.05, max_backoff_s=2.0)


class WorkSource(Protocol):
    """Where a rollout worker gets its prompt ids from, round by round."""

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """Begin a round. Every rank calls it with the same arguments; see the implementations for barriers."""
        ...

    def lease(self, n: int, wait: bool = False) -> list[int]:
        """Up to ``n`` ids to work on. Empty: there are none now (``wait`` False), or none any more (True)."""
        ...

    def complete(self, ids: Sequence[int]) -> list[int]:
        """Report ids as done. Returns those that were accepted; drop the results of the others."""
        ...

    def renew(self) -> None:
        """Say that this worker is alive, when it has neither leased nor completed anything for a while."""
        ...

    @property
    def drained(self) -> bool:
        """Whether the last `lease` saw the round complete."""
        ...

    def close(self) -> None:
        """Give up connections and servers."""
        ...


class RoundMismatchError(RuntimeError):
    """A request for a round that has not begun, or for one that is over."""


@dataclasses.dataclass
class _Item:
    """An id of the current round. ``key`` orders the serving: longest expected first, then as given."""

    key: tuple[float, int]
    worker: str | None = None
    done: bool = False


@dataclasses.dataclass
class _Worker:
    expires: float
    held: set[int] = dataclasses.field(default_factory=set)
    last_request: int = -1
    last_answer: list[int] = dataclasses.field(default_factory=list)


class WorkQueue:
    """The ids of one round at a time. Thread-safe; ``clock`` gives seconds."""

    def __init__(self, lease_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        if lease_seconds <= 0:
            raise ValueError(f"lease_seconds must be positive, got {lease_seconds}")
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._round = -1
        self._items: dict[int, _Item] = {}
        self._pending: list[tuple[tuple[float, int], int]] = []  # heap of (key, id)
        self._workers: dict[str, _Worker] = {}
        self._unfinished = 0
        self._counts = {"served": 0, "expired": 0, "completed": 0, "refused": 0}

    @property
    def round_number(self) -> int:
        """The current round; -1 before the first."""
        return self._round

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """Replace the queue's content by ``ids``, served in this order, or longest expected length first.

        Raises ValueError when ids repeat, lengths do not match, or the round number does not grow.
        """
        if len(set(ids)) != len(ids):
            raise ValueError("the ids of a round must differ: number the samples, not the prompts")
        if expected_lengths is not None and len(expected_lengths) != len(ids):
            raise ValueError(f"{len(ids)} ids, but {len(expected_lengths)} expected lengths")
        lengths = expected_lengths if expected_lengths is not None else [0.0] * len(ids)
        with self._lock:
            if round_number <= self._round:
                raise ValueError(f"round {round_number} cannot begin: round {self._round} has begun already")
            self._round = round_number
            self._items = {
                item_id: _Item((-float(length), position))
                for position, (item_id, length) in enumerate(zip(ids, lengths, strict=True))
            }
            self._pending = sorted((item.key, item_id) for item_id, item in self._items.items())
            self._workers = {}
            self._unfinished = len(self._items)

    def lease(
        self, n: int, worker: str | None = None, *, round_number: int | None = None, request_number: int | None = None
    ) -> tuple[list[int], str]:
        """Hand out up to ``n`` ids; returns them and the queue's state (`SERVING`, `WAITING`, `DRAINED`).

        Without ``worker`` they count as completed at once (NeMo-Aligner's protocol). A repeat of the
        worker's last ``request_number`` gets the same ids again, so that a lost answer loses none. A
        worker of an earlier round gets nothing; a later round raises `RoundMismatchError`.
        """
        with self._lock:
            if round_number is not None and round_number < self._round:
                return [], DRAINED
            self._check_round(round_number)
            self._expire()
            if worker is None:
                ids = self._pop(n)
                for item_id in ids:
                    self._finish(item_id)
                return ids, self._state()
            entry = self._touch(worker)
            if request_number is not None and request_number == entry.last_request:
                return [item_id for item_id in entry.last_answer if item_id in entry.held], self._state()
            ids = self._pop(n)
            for item_id in ids:
                self._items[item_id].worker = worker
            entry.held.update(ids)
            if request_number is not None:
                entry.last_request, entry.last_answer = request_number, ids
            return ids, self._state()

    def complete(
        self, ids: Iterable[int], worker: str, *, round_number: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Mark ids as done. Returns (accepted, refused); refused are those this worker does not hold.

        Repeating a completion that was accepted is accepted again. In another round all are refused.
        """
        ids = list(ids)
        with self._lock:
            if round_number is not None and round_number < self._round:
                self._counts["refused"] += len(ids)
                return [], ids
            self._check_round(round_number)
            self._expire()
            accepted: list[int] = []
            refused: list[int] = []
            for item_id in ids:
                item = self._items.get(item_id)
                if item is None or item.worker != worker:
                    refused.append(item_id)
                    continue
                if not item.done:
                    self._workers[worker].held.discard(item_id)
                    self._finish(item_id)
                accepted.append(item_id)
            if worker in self._workers:
                self._touch(worker)
            self._counts["refused"] += len(refused)
            return accepted, refused

    def renew(self, worker: str, *, round_number: int | None = None) -> list[int]:
        """Prolong the worker's leases; returns the ids that it still holds."""
        with self._lock:
            self._expire()
            if round_number not in (None, self._round) or worker not in self._workers:
                return []
            return sorted(self._touch(worker).held)

    def status(self) -> dict[str, Any]:
        """Numbers for a progress line: round, pending, leased, completed ids, and counts since the start."""
        with self._lock:
            self._expire()
            leased = sum(len(entry.held) for entry in self._workers.values())
            return {
                "round": self._round,
                "state": self._state(),
                "pending": len(self._pending),
                "leased": leased,
                "done": len(self._items) - self._unfinished,
                "total": dict(self._counts),
            }

    def _check_round(self, round_number: int | None) -> None:
        if round_number is not None and round_number > self._round:
            raise RoundMismatchError(
                f"round {round_number} has not begun, the queue is at round {self._round}: "
                "let all ranks wait for rank 0's start_round()"
            )

    def _state(self) -> str:
        if self._pending:
            return SERVING
        return WAITING if self._unfinished else DRAINED

    def _pop(self, n: int) -> list[int]:
        ids = [heapq.heappop(self._pending)[1] for _ in range(min(n, len(self._pending)))]
        self._counts["served"] += len(ids)
        return ids

    def _finish(self, item_id: int) -> None:
        self._items[item_id].done = True
        self._unfinished -= 1
        self._counts["completed"] += 1

    def _touch(self, worker: str) -> _Worker:
        expires = self._clock() + self.lease_seconds
        entry = self._workers.setdefault(worker, _Worker(expires))
        entry.expires = expires
        return entry

    def _expire(self) -> None:
        """Take their ids from workers not heard of for too long."""
        now = self._clock()
        for worker in [name for name, entry in self._workers.items() if entry.expires <= now and entry.held]:
            held = self._workers.pop(worker).held
            for item_id in held:
                self._items[item_id].worker = None
                heapq.heappush(self._pending, (self._items[item_id].key, item_id))
            self._counts["expired"] += len(held)
            logger.warning(
                "worker %s was not heard of for %g s: its %d ids of round %d are served again",
                worker,
                self.lease_seconds,
                len(held),
                self._round,
            )


# ------------------------------------------------------------------ HTTP


class _BadRequestError(Exception):
    """A malformed request; answered with 400."""


def create_app(queue: WorkQueue, token: str | None = None) -> Flask:
    """The queue's routes.

    ``PUT /get_idx {"batch_size": n}`` answers a JSON list of ids, empty when there are none (as
    NeMo-Aligner); optional ``worker``, ``round`` and ``request`` make it a lease, and the header
    ``X-Work-Queue-State`` tells whether more may come. ``PUT /complete {"ids": [...], "worker": w}``
    answers ``{"accepted": [...], "refused": [...]}``. ``PUT /renew {"worker": w}``; ``GET /status``;
    ``GET /health``.
    """
    app = Flask("nemo_style_aligner.work_queue")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    require_token(app, token, lambda path: path == "/health", lambda message: _error_body(message))
    app.register_error_handler(_BadRequestError, lambda error: _answer({"error": str(error)}, 400))
    app.register_error_handler(RoundMismatchError, lambda error: _answer({"error": str(error)}, 409))
    app.register_error_handler(
        HTTPException, lambda error: _answer({"error": f"{error.name}: {error.description}"}, error.code)
    )

    def get_idx() -> Response:
        body = _body()
        ids, state = queue.lease(
            _integer(body, "batch_size", 1, MAX_IDS_PER_REQUEST),
            _worker(body, required=False),
            round_number=_integer(body, "round", default=None),
            request_number=_integer(body, "request", 0, default=None),
        )
        return _answer(ids, headers={STATE_HEADER: state})

    def complete() -> Response:
        body = _body()
        ids = body.get("ids")
        if not isinstance(ids, list) or len(ids) > MAX_IDS_PER_REQUEST or not all(map(_is_int, ids)):
            raise _BadRequestError(f"'ids' must be a list of at most {MAX_IDS_PER_REQUEST} whole numbers")
        worker = _worker(body, required=True)
        assert worker is not None
        accepted, refused = queue.complete(ids, worker, round_number=_integer(body, "round", default=None))
        return _answer({"accepted": accepted, "refused": refused})

    def renew() -> Response:
        body = _body()
        worker = _worker(body, required=True)
        assert worker is not None
        return _answer({"held": queue.renew(worker, round_number=_integer(body, "round", default=None))})

    app.add_url_rule("/get_idx", view_func=get_idx, methods=["PUT"])
    app.add_url_rule("/complete", view_func=complete, methods=["PUT"])
    app.add_url_rule("/renew", view_func=renew, methods=["PUT"])
    app.add_url_rule("/status", "status", lambda: _answer(queue.status()))
    app.add_url_rule("/health", "health", lambda: Response(status=200))
    return app


def _answer(content: Any, status: int | None = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, content_type=JSON_TYPE)


def _error_body(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def _body() -> dict[str, Any]:
    try:
        body = json.loads(request.get_data(cache=False))
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequestError("the body must be a JSON object")
    return body


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_REQUIRED: Any = object()


def _integer(
    body: dict[str, Any], name: str, low: int = -(2**63), high: int = 2**63 - 1, default: Any = _REQUIRED
) -> Any:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _BadRequestError(f"'{name}' must be a whole number from {low} to {high}")
    return value


def _worker(body: dict[str, Any], required: bool) -> str | None:
    worker = body.get("worker")
    if worker is None and not required:
        return None
    if not isinstance(worker, str) or not 0 < len(worker) <= 256:
        raise _BadRequestError("'worker' must be a string of 1 to 256 characters")
    return worker


class WorkQueueServer:
    """Serves a `WorkQueue` over HTTP from a daemon thread of rank 0. ``port`` 0 takes a free one.

    ``host``: loopback unless workers run on other nodes; then rank 0's host name, and a token.
    """

    def __init__(self, queue: WorkQueue, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.queue = queue
        self._server = WsgiServer(
            create_app(queue, token),
            host,
            port,
            threads=HTTP_THREADS,
            max_body_bytes=2 * MAX_BODY_BYTES,
            name="rollout work queue",
        )
        self.host, self.port = host, self._server.port
        logger.info("rollout work queue on http://%s:%d", self.host, self.port)

    def stop(self) -> None:
        """Stop listening and free the port."""
        self._server.stop(flush_seconds=1.0)


class WorkQueueClient:
    """A worker's side of the queue (a `WorkSource`). One worker, one thread at a time.

    ``server``: on rank 0, the server itself, for `start_round`; `close` stops it. All ranks call
    `start_round`; put a barrier behind it, so that no rank asks for a round that rank 0 has not begun.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        worker: str | None = None,
        server: WorkQueueServer | None = None,
        limits: ClientLimits = CLIENT_LIMITS,
        poll_seconds: float = 0.2,
        wait_limit_seconds: float = 7200.0,
    ) -> None:
        self.worker = worker or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._http = HttpClient(f"http://{host}:{port}", token=token, error_text=_error_text)
        self._server = server
        self._limits = limits
        self._poll_seconds = poll_seconds
        self._wait_limit_seconds = wait_limit_seconds
        self._round: int | None = None
        self._request_number = 0
        self._drained = False

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        if self._server is not None:
            self._server.queue.start_round(round_number, ids, expected_lengths)
        self._round = round_number
        self._drained = False

    def lease(self, n: int, wait: bool = False) -> list[int]:
        """Up to ``n`` ids; never waits unless ``wait``.

        With ``wait``, which is for a worker that holds no ids itself, it returns empty only when the
        round is complete: until then ids of a lost worker may come. Raises TimeoutError when that takes
        longer than ``wait_limit_seconds``.
        """
        deadline = time.monotonic() + self._wait_limit_seconds
        while True:
            self._request_number += 1
            response = self._put("/get_idx", {"batch_size": n, "request": self._request_number})
            ids: list[int] = response.json()
            self._drained = not ids and response.headers.get(STATE_HEADER) == DRAINED
            if ids or not wait or self._drained:
                return ids
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"round {self._round} of the work queue at {self._http.base_url} was not complete within "
                    f"{self._wait_limit_seconds:g} s: another worker hangs, or lease_seconds is too long"
                )
            time.sleep(self._poll_seconds)

    def complete(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            return []
        answer = self._put("/complete", {"ids": list(ids)}).json()
        if answer["refused"]:
            logger.warning("worker %s was too late: its answers to ids %s are refused", self.worker, answer["refused"])
        return answer["accepted"]

    def renew(self) -> None:
        self._put("/renew", {})

    @property
    def drained(self) -> bool:
        return self._drained

    def close(self) -> None:
        """Close the connections, and on rank 0 the server."""
        self._http.close()
        if self._server is not None:
            self._server.stop()

    def _put(self, path: str, content: dict[str, Any]) -> Any:
        body = json.dumps({**content, "worker": self.worker, "round": self._round}).encode()
        return self._http.request("PUT", path, limits=self._limits, body=body, headers={"Content-Type": JSON_TYPE})


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


class StaticPartition:
    """Every ``world_size``-th id, from position ``rank`` on (a `WorkSource` without a server)."""

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within a world of {world_size}")
        self._rank = rank
        self._world_size = world_size
        self._ids: list[int] = []

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """Take this rank's share; within it, longest expected length first."""
        positions = list(range(self._rank, len(ids), self._world_size))
        if expected_lengths is not None:
            positions.sort(key=lambda position: -expected_lengths[position])
        self._ids = [ids[position] for position in positions]

    def lease(self, n: int, wait: bool = False) -> list[int]:
        taken, self._ids = self._ids[:n], self._ids[n:]
        return taken

    def complete(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def renew(self) -> None:
        """Nothing to do: nobody can take this rank's ids."""

    @property
    def drained(self) -> bool:
        return not self._ids

    def close(self) -> None:
        """Nothing is open."""
