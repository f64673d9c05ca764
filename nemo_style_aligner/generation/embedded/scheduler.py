"""In-flight batching: which sequence sits in which slot, and what the next step computes.

Pure bookkeeping on Python integers; no tensors, no model. Each step decodes one token of every
sequence whose prompt is done and, in the same forward pass, prefills prompt chunks of waiting ones
up to a token budget, so that the weights are read once for both.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator

from nemo_style_aligner.generation.engine import GenerationRequest


@dataclasses.dataclass
class Sequence:
    """A request in a slot and its response so far."""

    request: GenerationRequest
    slot: int
    key: int  # of the random numbers, see `sampling.request_key`
    prefilled: int = 0  # prompt tokens in the KV cache
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.prefilled == self.prompt_length

    @property
    def cached_length(self) -> int:
        """Positions of the slot's cache that are filled (the newest token's is not)."""
        return self.prefilled + max(0, len(self.token_ids) - 1)


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """``length`` prompt tokens of ``sequence`` from position ``start`` on."""

    sequence: Sequence
    start: int
    length: int

    @property
    def completes_prompt(self) -> bool:
        """Whether the first response token can be sampled after this chunk."""
        return self.start + self.length == self.sequence.prompt_length


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One forward pass: a token of each of ``decode`` (by ascending slot), then the chunks."""

    decode: list[Sequence]
    prefill: list[PrefillChunk]


class Scheduler:
    """Fills slots from a lazy iterator of requests and plans steps."""

    def __init__(
        self,
        requests: Iterable[GenerationRequest],
        num_slots: int,
        prefill_chunk_tokens: int,
        admit: Callable[[GenerationRequest], int],
    ) -> None:
        """``admit`` checks a request as it is pulled (raises ValueError) and returns its random key."""
        self._requests: Iterator[GenerationRequest] = iter(requests)
        self._admit = admit
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._free_slots = list(range(num_slots))  # a heap: low slots first, so the used ones stay dense
        self._active: dict[int, Sequence] = {}  # by slot
        self._prefilling: list[Sequence] = []  # first come, first served
        self._exhausted = False

    @property
    def num_active(self) -> int:
        """Occupied slots."""
        return len(self._active)

    def refill(self) -> list[Sequence]:
        """Pull a request for every free slot, as far as there are any; returns the newcomers."""
        newcomers: list[Sequence] = []
        while self._free_slots and not self._exhausted:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                break
            key = self._admit(request)
            sequence = Sequence(request, heapq.heappop(self._free_slots), key)
            self._active[sequence.slot] = sequence
            self._prefilling.append(sequence)
            newcomers.append(sequence)
        return newcomers

    def plan(self) -> StepPlan:
        """What the next forward pass computes; marks the chunks' prompt tokens as prefilled."""
        decode = [self._active[slot] for slot in sorted(self._active) if self._active[slot].is_decoding]
        chunks: list[PrefillChunk] = []
        budget = self._prefill_chunk_tokens
        while self._prefilling and budget > 0:
            sequence = self._prefilling[0]
            length = min(budget, sequence.prompt_length - sequence.prefilled)
            chunks.append(PrefillChunk(sequence, sequence.prefilled, length))
            sequence.prefilled += length
            budget -= length
            if sequence.is_decoding:
                self._prefilling.pop(0)
        return StepPlan(decode, chunks)

    def finish(self, sequence: Sequence) -> None:
        """Free the slot of ``sequence``."""
        del self._active[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)

    def compact(self) -> list[tuple[Sequence, int]]:
        """Close holes once no requests are left to fill them, so that steps shrink with the batch.

        Returns (sequence, the slot it left) for each move; ``sequence.slot`` is its new slot. The
        cache content must be moved in this order.
        """
        moves: list[tuple[Sequence, int]] = []
        if not self._exhausted:
            return moves
        while self._active and self._free_slots and self._free_slots[0] < max(self._active):
            source = max(self._active)
            sequence = self._active.pop(source)
            sequence.slot = heapq.heapreplace(self._free_slots, source)
            self._active[sequence.slot] = sequence
            moves.append((sequence, source))
        return moves
