"""A worker's side of the work queue: leases with a look-ahead, completions, heartbeats."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nemo_style_aligner.rl.rollouts.work_queue import DRAINED
from nemo_style_aligner.rl.rollouts.work_server import (
    MAX_IDS_PER_REQUEST,
    MAX_IDS_WITH_LEASE,
    REFUSED_HEADER,
    SHARE_HEADER,
    STATE_HEADER,
    UNFINISHED_HEADER,
    WorkQueueServer,
)
from nemo_style_aligner.servers.http_client import (
    ClientLimits,
    HttpAnswer,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.servers.http_connection import server_url
from nemo_style_aligner.servers.protocol import JSON_TYPE

logger = logging.getLogger(__name__)

CLIENT_LIMITS = ClientLimits(connect_s=5.0, read_s=30.0, total_s=300.0, first_backoff_s=0.05, max_backoff_s=2.0)
_BEATS_PER_LEASE = 4  # so that a beat or two may be lost
_POLL_GROWTH = 1.5


@dataclasses.dataclass(frozen=True)
class WorkerLimits:
    """Time limits of a worker, in seconds.

    Attributes:
        lease_seconds: the queue's: a worker that gives no sign of life for this long loses its ids.
        stall_seconds: a worker whose engine makes no progress for this long gives no sign of life any more.
        wait_seconds: the longest wait for other workers while not one of them completes anything.
    """

    lease_seconds: float
    stall_seconds: float
    wait_seconds: float


@dataclasses.dataclass(eq=False)
class _Completion:
    """Ids that are done, and which of them the queue ``accepted``; None until it has answered."""

    round_number: int | None
    ids: list[int]
    accepted: list[int] | None = None


class WorkQueueClient:
    """A worker's side of the queue (a `WorkSource`); call it from a single thread.

    Leases and completions go out one after the other on a thread and a connection of their own; a lease request carries
    waiting completions along. While ids are held, a second thread renews the worker's lease every quarter of
    ``lease_seconds``, as long as the worker makes progress: it leases, completes, or ``progress()`` changes.

    A worker that was silent for longer than its lease may be served again ids that its caller is still working on. The
    worker then holds them once more, and the caller does not get them a second time.

    ``slots``: ids that the worker works on at the same time. A quarter as many are leased ahead, as long as enough ids
    are left to fill the slots of all workers. 0: no look-ahead.
    ``server``: on rank 0, the server itself, for `start_round`; `close` stops it. All ranks call
    `start_round`; put a barrier after it, so that no rank asks for a round that rank 0 has not begun.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: WorkerLimits,
        *,
        token: str | None = None,
        worker: str | None = None,
        server: WorkQueueServer | None = None,
        slots: int = 0,
        progress: Callable[[], object] = lambda: None,
        http_limits: ClientLimits = CLIENT_LIMITS,
        poll_seconds: float = 0.5,
    ) -> None:
        self.worker = worker or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._http = HttpClient(server_url(host, port), token=token)
        self._server = server
        self._slots = slots
        self._limits = limits
        self._http_limits = http_limits
        self._poll_seconds = poll_seconds
        self._round: int | None = None
        self._request_number = 0
        self._drained = False
        self._share = self._unfinished = 0  # as of the queue's last answer
        self._total = 0
        self._backlog: collections.deque[int] = collections.deque()
        self._ahead: concurrent.futures.Future[list[int]] | None = None
        self._completed: collections.deque[_Completion] = collections.deque()  # to be reported
        # One thread: a lease whose answer was lost is repeated before the next one is asked for.
        self._sender = concurrent.futures.ThreadPoolExecutor(1, "work-queue")
        self._heartbeat = _Heartbeat(self._renew, progress, self._limits)

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """See `WorkSource.start_round`, and `WorkQueueClient` for the barrier after it."""
        if self._server is not None:
            self._server.queue.start_round(round_number, ids, expected_lengths)
        self._round = round_number
        self._total = self._unfinished = len(ids)
        self._drained = False
        self._share = 0
        self._backlog.clear()
        self._ahead = None
        self._heartbeat.forget()

    def lease(self, n: int, wait: bool = False) -> list[int]:
        """Lease up to ``n`` ids; waits for other workers only with ``wait``.

        With ``wait``, which is for a worker that holds no ids itself, the list is empty only if the round is complete:
        until then the ids of a lost worker may be served again. Raises TimeoutError, which names the ids and their
        holders, if nobody completes anything for ``wait_seconds``.
        """
        if self._ahead is not None and not self._backlog:
            self._backlog.extend(self._ahead.result())
            self._ahead = None
        ids = [self._backlog.popleft() for _ in range(min(n, len(self._backlog)))]
        if not ids:
            ids = self._lease_now(n)
        if not ids and wait and not self._drained:
            ids = self._wait_for_ids(n)
        if self._slots and not self._backlog and self._ahead is None and self._share >= self._slots:
            self._ahead = self._sender.submit(self._ask, self._round, max(1, self._slots // 4))
        return ids

    def complete_async(self, ids: Sequence[int]) -> concurrent.futures.Future[list[int]]:
        """See `WorkSource.complete_async`."""
        completion = _Completion(self._round, list(ids))
        self._completed.append(completion)
        return self._sender.submit(self._complete, completion)

    def close(self) -> None:
        """Close the connections, and on rank 0 the server."""
        self._heartbeat.request_stop()
        self._http.close()  # breaks off requests of the sender and the heartbeat
        self._heartbeat.join()
        self._sender.shutdown(cancel_futures=True)
        if self._server is not None:
            self._server.stop()

    def _lease_now(self, n: int) -> list[int]:
        return self._sender.submit(self._ask, self._round, n).result()

    def _wait_for_ids(self, n: int) -> list[int]:
        """Poll, less and less often, until there are ids or the round is complete."""
        pause = 0.02
        waiting_since, unfinished = time.monotonic(), self._unfinished
        while True:
            time.sleep(min(pause, self._poll_seconds))
            pause *= _POLL_GROWTH
            ids = self._lease_now(n)
            if ids or self._drained:
                return ids
            if self._unfinished != unfinished:
                waiting_since, unfinished = time.monotonic(), self._unfinished
            if time.monotonic() - waiting_since > self._limits.wait_seconds:
                raise TimeoutError(
                    f"round {self._round} of the work queue at {self._http.base_url} waits for {unfinished} ids, and "
                    f"none was completed for {self._limits.wait_seconds:g} s: {self._holders()}. Check these ranks; "
                    "if responses do take that long, raise trainer.ppo.batch_iterator.wait_seconds"
                )

    def _holders(self) -> str:
        status = self._http.request("GET", "/status", limits=self._http_limits).json()
        return "; ".join(
            f"ids {', '.join(map(str, holder['ids']))}{' and more' if holder['count'] > len(holder['ids']) else ''} "
            f"are held by {worker}, last heard from {holder['silent_seconds']} s ago"
            for worker, holder in status["holders"].items()
        )

    # -------------------------------------------------------------- in the sender's and the heartbeat's thread

    def _ask(self, round_number: int | None, n: int) -> list[int]:
        while True:
            leased = self._request_lease(round_number, min(n, MAX_IDS_PER_REQUEST))
            ids = self._heartbeat.hold(round_number, leased)
            if ids or not leased:
                return ids

    def progress(self) -> tuple[int, int]:
        """See `WorkSource.progress`; of all workers: up to date beside the queue, else as of its last answer."""
        unfinished = self._unfinished if self._server is None else self._server.queue.unfinished
        return self._total - unfinished, self._total

    def _request_lease(self, round_number: int | None, n: int) -> list[int]:
        self._request_number += 1
        content: dict[str, Any] = {"batch_size": n, "request": self._request_number}
        done = self._waiting(round_number, MAX_IDS_WITH_LEASE)
        if done:
            content["completed"] = [item_id for completion in done for item_id in completion.ids]
        response = self._put("/get_idx", round_number, content)
        if done:
            self._note_completed(done, map(int, filter(None, response.headers.get(REFUSED_HEADER, "").split(","))))
        ids: list[int] = response.json()
        self._drained = not ids and response.headers.get(STATE_HEADER) == DRAINED
        self._share = int(response.headers.get(SHARE_HEADER, 0))
        self._unfinished = int(response.headers.get(UNFINISHED_HEADER, 0))
        return ids

    def _complete(self, completion: _Completion) -> list[int]:
        """Report a completion and all others that wait: the slower the queue, the fewer requests it gets."""
        if completion.accepted is None:
            done = self._waiting(completion.round_number, MAX_IDS_PER_REQUEST)
            ids = [item_id for other in done for item_id in other.ids]
            self._note_completed(done, self._put("/complete", completion.round_number, {"ids": ids}).json()["refused"])
        return completion.accepted or []

    def _waiting(self, round_number: int | None, limit: int) -> list[_Completion]:
        """The round's unreported completions, as many as fit into ``limit`` ids together."""
        waiting: list[_Completion] = []
        for completion in tuple(self._completed):
            if completion.round_number == round_number and len(completion.ids) <= limit:
                limit -= len(completion.ids)
                waiting.append(completion)
        return waiting

    def _note_completed(self, done: list[_Completion], refused: Iterable[int]) -> None:
        refused = set(refused)
        for completion in done:
            completion.accepted = [item_id for item_id in completion.ids if item_id not in refused]
            held = self._heartbeat.let_go(completion.round_number, completion.ids)
            self._completed.remove(completion)
            # No warning about ids that the worker never held: it reports those only to end an abandoned round.
            if late := held & refused:
                logger.warning(
                    "worker %s was too late: its responses for ids %s are refused", self.worker, sorted(late)
                )

    def _renew(self) -> None:
        self._put("/renew", self._round, {})

    def _put(self, path: str, round_number: int | None, content: dict[str, Any]) -> HttpAnswer:
        body = json.dumps({**content, "worker": self.worker, "round": round_number}).encode()
        return self._http.request("PUT", path, limits=self._http_limits, body=body, headers={"Content-Type": JSON_TYPE})


class _Heartbeat:
    """Calls ``renew`` from a daemon thread while ids are held and the worker makes progress."""

    def __init__(self, renew: Callable[[], None], progress: Callable[[], object], limits: WorkerLimits) -> None:
        self._renew = renew
        self._progress = progress
        self._limits = limits
        self._lock = threading.Lock()
        self._held: set[tuple[int | None, int]] = set()  # round and id
        self._moves = 0  # leases and completions so far
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="work-queue-heartbeat", daemon=True)
        self._thread.start()

    def hold(self, round_number: int | None, ids: Sequence[int]) -> list[int]:
        """Note that the worker holds ``ids``; return those that it did not hold already."""
        with self._lock:
            new = [item_id for item_id in ids if (round_number, item_id) not in self._held]
            self._held.update((round_number, item_id) for item_id in new)
            self._moves += 1
        return new

    def let_go(self, round_number: int | None, ids: Sequence[int]) -> set[int]:
        """Note that the worker is done with ``ids``; return those that it held."""
        with self._lock:
            held = {item_id for item_id in ids if (round_number, item_id) in self._held}
            self._held.difference_update((round_number, item_id) for item_id in held)
            self._moves += 1
        return held

    def forget(self) -> None:
        """Hold nothing any more: a new round begins."""
        with self._lock:
            self._held.clear()

    def request_stop(self) -> None:
        """Have the thread end, after a beat that is under way."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join(self._limits.lease_seconds)

    def _run(self) -> None:
        last_seen: object = None
        moved = time.monotonic()
        stalled = False
        while not self._stopping.wait(self._limits.lease_seconds / _BEATS_PER_LEASE):
            with self._lock:
                holds, seen = bool(self._held), (self._moves, self._progress())
            now = time.monotonic()
            if not holds or seen != last_seen:
                last_seen, moved, stalled = seen, now, False
            if now - moved > self._limits.stall_seconds:
                if not stalled:
                    logger.warning(
                        "this rank's engine has made no progress for %.0f s: other ranks will get its prompts",
                        now - moved,
                    )
                stalled = True
            elif holds:
                self._beat()

    def _beat(self) -> None:
        try:
            self._renew()
        except (ServerUnavailableError, RequestRefusedError) as error:
            if not self._stopping.is_set():  # the next lease or completion fails likewise, and raises
                logger.warning("heartbeat failed: %s", error)
