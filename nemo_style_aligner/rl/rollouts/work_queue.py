"""The rollout work queue in memory: sample ids handed to whichever data-parallel rank has room for them.

An id is *leased* to a worker. A worker that gives no sign of life for ``lease_seconds`` loses its ids: they are
served again, and its late answers are refused, so that each id is completed exactly once. Time in which no worker at
all was heard of does not count: then the queue's own process stood still (SIGSTOP, gang scheduling), and signs of life
are waiting to be read. A *round* is one rollout phase, with a number of its own, which keeps a straggler of the last
round off the ids of the next.

`work_server` serves the queue over HTTP on rank 0; `work_client` is a worker's side.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

DRAINED = "drained"  # every id of the round is completed (or was handed out without a lease)
WAITING = "waiting"  # nothing to hand out now, but a lease may still run out
SERVING = "serving"

_NAMED_IDS = 20  # of a worker, in a status
_MOST_LOSSES = 5  # of one id in a round: a sixth worker would lose it as well


class RoundMismatchError(RuntimeError):
    """A request for a round that has not begun."""


class SampleLostError(RuntimeError):
    """Worker after worker lost the same id: the round cannot be completed."""


class Lease(NamedTuple):
    """What a worker gets: the ids, and how the round stands after that.

    Attributes:
        ids: to work on.
        state: `SERVING`, `WAITING` or `DRAINED`.
        share: ids that are not leased yet, per worker, rounded down.
        unfinished: ids that are not completed.
    """

    ids: list[int]
    state: str
    share: int
    unfinished: int


@dataclasses.dataclass
class _Item:
    """An id of the current round. ``key`` orders the serving: longest expected first, then as given."""

    key: tuple[float, int]
    worker: str | None = None
    done: bool = False
    losses: int = 0  # how often a worker was lost that held it


@dataclasses.dataclass
class _Worker:
    expires: float
    held: set[int] = dataclasses.field(default_factory=set)
    last_request: int = -1
    last_answer: list[int] = dataclasses.field(default_factory=list)


class WorkQueue:
    """The ids of one round at a time. Thread-safe; ``clock`` gives seconds.

    With ``workers``, the number of workers that will ask, a lease is at most half a worker's share of what is left
    (guided self-scheduling): large at first, single ids at the end of a round, so that nobody sits on a backlog
    while others have nothing to do.

    Attributes:
        workers: may still be set before the first round, if it is not known earlier.
    """

    def __init__(
        self,
        lease_seconds: float,
        *,
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if lease_seconds <= 0:
            raise ValueError(f"lease_seconds must be positive, got {lease_seconds}")
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.lease_seconds = lease_seconds
        self.workers = workers
        self._clock = clock
        self._lock = threading.Lock()
        self._round = -1  # before the first
        self._items: dict[int, _Item] = {}
        self._pending: list[tuple[tuple[float, int], int]] = []  # heap of (key, id)
        self._workers: dict[str, _Worker] = {}
        self._nothing_expires_before = 0.0  # by the clock
        self._last_asked = clock()
        self._unfinished = 0
        self._lost: int | None = None  # an id that was lost too often to complete the round
        self._counts = {"served": 0, "expired": 0, "completed": 0, "refused": 0}

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
            self._lost = None

    @property
    def unfinished(self) -> int:
        """Ids of the round that are not completed."""
        return self._unfinished

    def lease(
        self, n: int, worker: str | None = None, *, round_number: int | None = None, request_number: int | None = None
    ) -> Lease:
        """Hand out up to ``n`` ids.

        Without ``worker`` they are exactly ``n``, if that many are left, and count as completed at once (NeMo-Aligner's
        protocol). A repeat of the worker's last ``request_number`` gets the same ids again, as far as they are still
        held, so that a lost answer loses none. A request for an earlier round gets nothing; one for a later round
        raises `RoundMismatchError`. Raises `SampleLostError` if an id of the round was lost too often.
        """
        with self._lock:
            if round_number is not None and round_number < self._round:
                return Lease([], DRAINED, 0, 0)
            self._check_round(round_number)
            self._expire()
            if self._lost is not None:
                raise SampleLostError(
                    f"id {self._lost} of round {self._round} was lost {_MOST_LOSSES} times by workers that gave no "
                    f"sign of life for {self.lease_seconds:g} s: check the ranks that warn of no progress; if they "
                    "are only slow, raise trainer.ppo.batch_iterator.stall_seconds and lease_seconds"
                )
            if worker is None:
                ids = self._pop(n)
                for item_id in ids:
                    self._finish(item_id)
                return self._lease(ids)
            entry = self._touch(worker)
            if request_number is not None and request_number == entry.last_request:
                return self._lease([item_id for item_id in entry.last_answer if item_id in entry.held])
            ids = self._pop(min(n, self._guided_size()))
            for item_id in ids:
                self._items[item_id].worker = worker
            entry.held.update(ids)
            if request_number is not None:
                entry.last_request, entry.last_answer = request_number, ids
            return self._lease(ids)

    def complete(
        self, ids: Iterable[int], worker: str, *, round_number: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Mark ids as done. Returns (accepted, refused); refused are those this worker does not hold.

        A completion that was accepted is accepted again. For an earlier round all ids are refused; a later round raises
        `RoundMismatchError`.
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
        """How the round stands: pending, leased and completed ids, counts since the start, and who holds what.

        ``holders`` maps each worker with ids to ``{"count", "ids" (the first of them), "silent_seconds"}``.
        """
        with self._lock:
            self._expire()
            now = self._clock()
            holders = {
                worker: {
                    "count": len(entry.held),
                    "ids": sorted(entry.held)[:_NAMED_IDS],
                    "silent_seconds": round(self.lease_seconds - (entry.expires - now), 1),
                }
                for worker, entry in self._workers.items()
                if entry.held
            }
            return {
                "round": self._round,
                "state": self._state(),
                "pending": len(self._pending),
                "leased": sum(holder["count"] for holder in holders.values()),
                "done": len(self._items) - self._unfinished,
                "total": dict(self._counts),
                "holders": holders,
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

    def _lease(self, ids: list[int]) -> Lease:
        share = len(self._pending) // max(self.workers or 1, len(self._workers))
        return Lease(ids, self._state(), share, self._unfinished)

    def _guided_size(self) -> int:
        """The most ids that one lease may have."""
        if self.workers in (None, 1):
            return len(self._pending)
        return -(-len(self._pending) // (2 * max(self.workers, len(self._workers))))

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
        """Take the ids away from workers that were silent for too long."""
        now = self._clock()
        self._forgive_standstill(now)
        if now < self._nothing_expires_before:
            return  # with hundreds of workers, looking at each of them would be most of a request's work
        for worker in [name for name, entry in self._workers.items() if entry.expires <= now and entry.held]:
            held = self._workers.pop(worker).held
            for item_id in held:
                item = self._items[item_id]
                item.worker = None
                item.losses += 1
                if item.losses == _MOST_LOSSES:
                    self._lost = item_id
                heapq.heappush(self._pending, (item.key, item_id))
            self._counts["expired"] += len(held)
            logger.warning(
                "worker %s was not heard from for %g s: its %d ids of round %d are handed out again",
                worker,
                self.lease_seconds,
                len(held),
                self._round,
            )
        # No lease can run out before that: a sign of life only prolongs one, and a new one has its whole time left.
        self._nothing_expires_before = min(
            (entry.expires for entry in self._workers.values() if entry.held), default=now + self.lease_seconds
        )

    def _forgive_standstill(self, now: float) -> None:
        """Prolong all leases by the time since any worker was heard of, if that is too long for living workers.

        Workers with ids give several signs of life per lease, and workers without ids keep asking for some.
        """
        gap, self._last_asked = now - self._last_asked, now
        if gap <= self.lease_seconds / 2:
            return
        for entry in self._workers.values():
            entry.expires += gap
        self._nothing_expires_before += gap
        if any(entry.held for entry in self._workers.values()):
            logger.info("no worker was heard from for %.0f s: all leases are extended by that time", gap)
