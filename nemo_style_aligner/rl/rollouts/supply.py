"""What the generation engine works on next: samples leased from the work source as slots become free."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterator, Sequence

from nemo_style_aligner.generation.engine import GenerationRequest
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.parallel import stop_signals
from nemo_style_aligner.parallel.agreement import result_on_every_rank
from nemo_style_aligner.rl.rollouts.work_source import WorkSource
from nemo_style_aligner.rl.sample import Prompt
from nemo_style_aligner.seeds import derive_seed


class RequestSupply:
    """Requests for an engine's `generate`, an iterable that can be iterated again after each `wait`.

    Attributes:
        num_running: requests handed out whose results have not come; the caller decrements it for each result.
    """

    def __init__(
        self, work: WorkSource, group: EngineGroup, num_slots: int, prompts: Sequence[Prompt], seed: int
    ) -> None:
        self.num_running = 0
        self._work = work
        self._group = group
        self._num_slots = num_slots
        self._prompts = prompts
        self._seed = seed
        self._ids: collections.deque[int] = collections.deque()

    def wait(self) -> bool:
        """Wait for work; False if the round is complete, or after a stop signal. Call it when nothing is running."""
        self._lease(wait=True)
        return bool(self._ids)

    def __iter__(self) -> Iterator[GenerationRequest]:
        """Yield requests as long as there are ids to lease; the engine pulls one whenever a slot is free."""
        while self._ids:
            sample_id = self._ids.popleft()
            self.num_running += 1
            yield GenerationRequest(sample_id, self._prompts[sample_id].token_ids, derive_seed(self._seed, sample_id))
            if not self._ids:
                self._lease()

    def _lease(self, wait: bool = False) -> None:
        """Lease as many ids as there are free slots, and share them with all ranks of the group."""
        n = max(1, self._num_slots - self.num_running)
        # A stop signal interrupts a round, but not if it came before the round, nor if several ranks share the engine:
        # then nothing more is leased.
        is_asking = self._group.is_leader and not stop_signals.received()
        if wait and self._group.control is not None:
            self._ids.extend(self._wait_together(n, is_asking))
        else:
            self._ids.extend(self._group.share(self._work.lease(n, wait=wait) if is_asking else []))

    def _wait_together(self, n: int, is_asking: bool) -> list[int]:
        """Have the leader wait for ids, as long as others complete some; its group hears from it every few seconds."""
        group, lease = self._group, None
        thread = concurrent.futures.ThreadPoolExecutor(1, "lease")
        try:
            if group.is_leader:
                lease = thread.submit(self._work.lease, n, wait=True) if is_asking else thread.submit(list)
            return result_on_every_rank(lease, group.control, group.leader)
        finally:
            thread.shutdown(wait=False)  # an error must not wait for other workers' completions
