"""Where a rollout worker gets its sample ids from, and the source that needs no server."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Protocol


class WorkSource(Protocol):
    """Ids of samples for a rollout worker, round by round."""

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """Begin a round. Every rank calls it with the same arguments; see the implementations for barriers."""
        ...

    def lease(self, n: int, wait: bool = False) -> list[int]:
        """Lease up to ``n`` ids. An empty list: there are none now, or, with ``wait``, none any more in this round."""
        ...

    def complete_async(self, ids: Sequence[int]) -> concurrent.futures.Future[list[int]]:
        """Report ids as done. The future gives those that were accepted; drop the results of the others."""
        ...

    def progress(self) -> tuple[int, int]:
        """How many samples of the round are done, and of how many, as far as this worker knows; for any thread."""
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
        self._done = self._total = 0

    def start_round(
        self, round_number: int, ids: Sequence[int], expected_lengths: Sequence[float] | None = None
    ) -> None:
        """Take this engine's share."""
        size = self._samples_per_prompt if len(ids) % (self._samples_per_prompt * self._count) == 0 else 1
        positions = list(range(0, len(ids), size))
        if expected_lengths is not None:
            positions.sort(key=lambda position: -expected_lengths[position])
        mine = positions[self._index :: self._count]
        self._ids = [each for position in mine for each in ids[position : position + size]]
        self._done, self._total = 0, len(self._ids)

    def lease(self, n: int, wait: bool = False) -> list[int]:
        """See `WorkSource.lease`."""
        taken, self._ids = self._ids[:n], self._ids[n:]
        return taken

    def complete_async(self, ids: Sequence[int]) -> concurrent.futures.Future[list[int]]:
        """See `WorkSource.complete_async`; all are accepted."""
        answer: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
        answer.set_result(list(ids))
        self._done += len(ids)
        return answer

    def progress(self) -> tuple[int, int]:
        """See `WorkSource.progress`; of this engine's share."""
        return self._done, self._total

    def close(self) -> None:
        """Nothing is open."""
