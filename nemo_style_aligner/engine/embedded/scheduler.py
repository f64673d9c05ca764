"""In-flight batching: which sequence sits in which slot, and what the next pass computes.

Bookkeeping on the host only: no model, no clock. Ranks that share a model each run it on the same
requests and tokens, and so agree. Each pass decodes one token of every sequence whose prompt is done and, in the same
forward pass, prefills prompt chunks of waiting ones up to a token budget, so that the weights are read once for both.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from nemo_style_aligner.engine.contract import FinishReason, GenerationRequest, SamplingParams, StopCondition
from nemo_style_aligner.engine.embedded.block_table import BlockTable
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, SCORED_ROWS, StepInput

_WAITING = -1


@dataclasses.dataclass(kw_only=True)
class Task:
    """A request with its own way of being served.

    Attributes:
        num_top: log-probs are wanted of each token and of this many likeliest ones in its place; None: of none.
        scores_prompt: also of the prompt's tokens, for which no page of another sequence is shared.
        begun: tokens that the response has already, and their log-probs: it goes on as if it had never been stopped.
        is_abandoned: nobody waits for the rest: its slot is free after the next token. May be set by any thread.
    """

    request: GenerationRequest
    sampling: SamplingParams
    stop: StopCondition
    num_top: int | None = None
    scores_prompt: bool = False
    begun: tuple[Sequence[int], Sequence[float]] = ((), ())
    is_abandoned: bool = False

    @functools.cached_property
    def limit(self) -> int:  # asked for after each token
        """The most tokens that the response may have."""
        return self.request.limit(self.sampling)


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Of a token, by log-softmax(logits) over the whole vocabulary, whatever the sampling parameters."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids and their log-probs, the best first


@dataclasses.dataclass
class ScheduledSequence:
    """A task and its response so far, in a slot or waiting for one."""

    task: Task
    number: int  # of arrival: the lower, the older
    longest: int  # positions that it may need: the last token of a response is never fed to the model
    prefill_ids: list[int]  # to compute before the next token: the prompt and, after a preemption, the response so far
    slot: int = _WAITING
    prefilled: int = 0  # how many of them are in KV memory, the planned pass included
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_scores: list[TokenScores] = dataclasses.field(default_factory=list)  # from the prompt's second token on
    scores: list[TokenScores] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: it goes on
    routes: str = ""  # see `GenerationResult`; of a finished one
    failure: str | None = None  # why its end is none of its grammar

    @property
    def request(self) -> GenerationRequest:
        """What is asked for."""
        return self.task.request

    @property
    def is_in_slot(self) -> bool:
        """Whether it is being generated: neither finished nor waiting."""
        return self.slot != _WAITING

    @property
    def computed(self) -> list[int]:
        """The tokens whose keys and values are in KV memory: the newest is not, once it decodes."""
        if not self.is_decoding:
            return self.prefill_ids[: self.prefilled]
        return self.request.prompt_token_ids + self.token_ids[:-1]

    @property
    def lacks_prompt_scores(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.task.scores_prompt and len(self.prompt_scores) < len(self.request.prompt_token_ids) - 1

    @property
    def is_decoding(self) -> bool:
        """Whether its prefill is done, so that each pass decodes one token of it."""
        return self.prefilled == len(self.prefill_ids)


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """``length`` of the ``prefill_ids`` of ``sequence``, from position ``start`` on.

    The logits of its last ``num_outputs`` tokens are wanted; ``first_output`` is the first's row among the pass's.
    """

    sequence: ScheduledSequence
    start: int
    length: int
    first_output: int
    num_outputs: int

    @property
    def completes_prompt(self) -> bool:
        """Whether the next response token can be sampled after this chunk."""
        return self.start + self.length == len(self.sequence.prefill_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt are scored by its logits, beside the choice of the next one."""
        return self.num_outputs > self.completes_prompt


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One forward pass: tokens that decode, a row each, then the chunks in ``prefill``.

    A sequence has one row, of its newest token, and may have further ones, of guesses of those that follow.
    """

    decode: list[ScheduledSequence]  # of each row
    decode_slots: np.ndarray  # int32, of the sequences in ``decode``, ascending
    prefill: list[PrefillChunk]
    ahead: np.ndarray  # int32, of each row: how far behind the newest token its guess is; 0: that token itself
    guesses: np.ndarray  # int32, of each row: the token guessed; undefined where ``ahead`` is 0

    def sampled(self) -> tuple[list[ScheduledSequence], np.ndarray]:
        """The sequences that get a token from this pass, in the order of the logits' rows, and their slots."""
        completed = [chunk.sequence for chunk in self.prefill if chunk.completes_prompt]
        if not completed:
            return self.decode, self.decode_slots
        slots = np.array([sequence.slot for sequence in completed], dtype=np.int32)
        return self.decode + completed, np.concatenate((self.decode_slots, slots))

    def sampled_ahead(self) -> np.ndarray:
        """How many tokens further each of `sampled` is than the next one of its sequence."""
        num_completed = sum(chunk.completes_prompt for chunk in self.prefill)
        return np.concatenate((self.ahead, np.zeros(num_completed, dtype=np.int32)))

    def sampled_rows(self) -> list[int]:
        """Rows of logits from which `sampled` get their tokens."""
        completed = [chunk for chunk in self.prefill if chunk.completes_prompt]
        return [*range(len(self.decode)), *(chunk.first_output + chunk.num_outputs - 1 for chunk in completed)]


Guess = Callable[[list[ScheduledSequence], Callable[[ScheduledSequence], int]], list[list[int]]]
"""Given sequences, and what tells for how many tokens more one has room: guesses of the next ones of each; or none."""


class Scheduler:
    """Fills slots with tasks, which it pulls whenever a slot is free, and plans passes.

    Sequences enter slots and prefill in order of arrival, and those in slots are older than those that wait. So a
    sequence that shares pages of an older one is never computed in an earlier pass than those pages.

    Attributes:
        newest: int32 [num_slots], newest token of each decoding slot.
        positions: int32 [num_slots], that token's position in its sequence.
        num_preemptions, num_shared_tokens: counts so far.
    """

    def __init__(
        self,
        pull: Callable[[], Task | None],
        blocks: BlockTable,
        *,
        prefill_chunk_tokens: int,
        max_step_tokens: int,
        reach: int | None = None,
        guess: Guess | None = None,
    ) -> None:
        """Begin with empty slots.

        Args:
            pull: returns the next task, or None if there is none at the moment.
            blocks: must have room for the longest sequence, else it could never finish.
            prefill_chunk_tokens: the most prompt tokens of a pass that also decodes.
            max_step_tokens: the most tokens of a pass that only prefills.
            reach: positions that a token sees, its own included: pages before them are given back; None: all.
            guess: guesses the next tokens in passes that only decode; None: nobody does. See `lookup`.
        """
        num_slots = len(blocks.table)
        self.newest = np.zeros(num_slots, dtype=np.int32)
        self.positions = np.zeros(num_slots, dtype=np.int32)
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        self._next_task = pull
        self._blocks = blocks
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._max_step_tokens = max_step_tokens
        self._reach = reach
        self._guess = guess
        self._free_slots = list(range(num_slots))  # a heap: low slots first
        self._active: dict[int, ScheduledSequence] = {}  # by slot
        self._waiting: collections.deque[ScheduledSequence] = collections.deque()  # for memory; the oldest first
        self._prefilling: collections.deque[ScheduledSequence] = collections.deque()  # the oldest first
        self._decoding: tuple[list[ScheduledSequence], np.ndarray] | None = None  # see `_decode_rows`; None: outdated
        self._growing: set[int] = set()  # slots whose sequences may need another page
        self._num_pulled = 0
        self._rows = np.arange(num_slots, dtype=np.int32)
        self._none = np.zeros(num_slots, dtype=np.int32)
        self._single = np.stack((self._rows, np.ones_like(self._rows)), axis=1)  # segments of one token

    @property
    def num_active(self) -> int:
        """Occupied slots."""
        return len(self._active)

    @property
    def longest_running(self) -> int:
        """Sampled tokens of the sequence that has been in a slot longest; 0 if none is."""
        first = next(iter(self._active.values()), None)
        return 0 if first is None else len(first.token_ids)

    def refill(self) -> list[ScheduledSequence]:
        """Fill free slots with waiting sequences, then new requests, while memory allows; returns the newcomers."""
        newcomers: list[ScheduledSequence] = []
        while self._free_slots:
            if not self._waiting and not self._pull():
                break
            sequence, slot = self._waiting[0], self._free_slots[0]
            # Pages are left for all sequences that may need another one, or one of them would soon be preempted.
            grows = -(-len(sequence.prefill_ids) // PAGE_TOKENS) * PAGE_TOKENS < sequence.longest
            most_shared = len(sequence.prompt_scores) if sequence.lacks_prompt_scores else None
            shared = self._blocks.enter(slot, sequence.prefill_ids, len(self._growing) + grows, most_shared)
            if shared is None:
                break
            self._waiting.popleft()
            sequence.slot, sequence.prefilled = heapq.heappop(self._free_slots), shared
            self.num_shared_tokens += shared
            self._active[slot] = sequence
            if grows:
                self._growing.add(slot)
            self._prefilling.append(sequence)
            newcomers.append(sequence)
        return newcomers

    def plan(self) -> StepPlan:
        """Plan the next pass: take the pages that it needs and mark its chunks as prefilled."""
        self._grow()
        decode, slots = self._decode_rows()
        prefill = self._plan_prefill(len(decode))
        if self._guess is not None and not prefill and any(guesses := self._guess(decode, self._room)):
            return self._with_guesses(decode, guesses)
        none = self._none[: len(decode)]
        return StepPlan(decode, slots, prefill, none, none)

    def arrays(self, plan: StepPlan) -> StepInput:
        """What ``plan`` computes, decode tokens first."""
        slots, num_decode = plan.decode_slots, len(plan.decode)
        token_ids = [np.where(plan.ahead == 0, self.newest[slots], plan.guesses)]
        positions = [self.positions[slots] + plan.ahead]
        all_slots, segments, output_rows = [slots], [self._single[:num_decode]], [self._rows[:num_decode]]
        first = num_decode
        for chunk in plan.prefill:
            end = chunk.start + chunk.length
            token_ids.append(np.array(chunk.sequence.prefill_ids[chunk.start : end], dtype=np.int32))
            positions.append(np.arange(chunk.start, end, dtype=np.int32))
            all_slots.append(np.full(chunk.length, chunk.sequence.slot, dtype=np.int32))
            segments.append(np.array([[first, chunk.length]], dtype=np.int32))
            first += chunk.length
            if chunk.num_outputs:
                output_rows.append(np.arange(first - chunk.num_outputs, first, dtype=np.int32))
        return StepInput(
            token_ids=_joined(token_ids),
            positions=_joined(positions),
            slots=_joined(all_slots),
            segments=_joined(segments),
            num_decode=num_decode,
            output_rows=_joined(output_rows),
            block_table=self._blocks.table,
        )

    def record(self, plan: StepPlan, tokens: list[int], logprobs: list[float]) -> list[int]:
        """Add to each sequence the tokens sampled for it, as far as guesses held and the response goes on.

        Args:
            plan: of the pass.
            tokens, logprobs: one for each of `StepPlan.sampled`.

        Returns:
            Those of them that were added, ascending.
        """
        sequences, slots = plan.sampled()
        added: list[int] = []
        for row, (sequence, token, logprob, ahead) in enumerate(
            zip(sequences, tokens, logprobs, plan.sampled_ahead().tolist(), strict=True)
        ):
            if ahead:
                was_added = bool(added) and added[-1] == row - 1
                if not was_added or sequence.finish_reason is not None or tokens[row - 1] != plan.guesses[row]:
                    continue
            added.append(row)
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish_reason = sequence.task.stop.check(sequence.token_ids, sequence.task.limit)
        self.newest[slots[added]] = [tokens[row] for row in added]  # of several of a slot the last one stays
        np.add.at(self.positions, slots[added], 1)
        return added

    def _pull(self) -> bool:
        """Append the next request to those that wait; False if there is none."""
        task = self._next_task()
        if task is None:
            return False
        prompt, (token_ids, logprobs) = task.request.prompt_token_ids, task.begun
        longest, so_far = len(prompt) + task.limit - 1, prompt + [*token_ids]
        sequence = ScheduledSequence(
            task, self._num_pulled, longest, so_far, token_ids=[*token_ids], logprobs=[*logprobs]
        )
        self._waiting.append(sequence)
        self._num_pulled += 1
        return True

    def _grow(self) -> None:
        """Give a page to every sequence whose newest token begins one, oldest first; may preempt the youngest."""
        decode, slots = self._decode_rows()
        starved = np.flatnonzero(self.positions[slots] % PAGE_TOKENS == 0)
        for row in starved:
            self._give_back(decode[row].slot, int(self.positions[decode[row].slot]))
        for sequence in sorted((decode[row] for row in starved), key=lambda sequence: sequence.number):
            while sequence.slot != _WAITING and not self._blocks.grow(sequence.slot):
                self._preempt(max(self._active.values(), key=lambda candidate: candidate.number))
            if sequence.slot != _WAITING and self._blocks.held(sequence.slot) * PAGE_TOKENS >= sequence.longest:
                self._growing.discard(sequence.slot)

    def _give_back(self, slot: int, position: int) -> None:
        """Give pages back that no token of ``slot`` from ``position`` on sees."""
        if self._reach is not None:
            self._blocks.give_back(slot, position - self._reach + 1)

    def _preempt(self, sequence: ScheduledSequence) -> None:
        """Take the memory of ``sequence``; it will compute prompt and response again, then go on as before."""
        if not sequence.is_decoding:
            self._prefilling.remove(sequence)
        self.leave(sequence)
        sequence.prefill_ids = sequence.request.prompt_token_ids + sequence.token_ids
        sequence.prefilled = 0
        self._waiting.appendleft(sequence)  # the youngest of all that were in slots, older than all that wait
        self.num_preemptions += 1

    def leave(self, sequence: ScheduledSequence) -> None:
        """Free the slot and the pages of ``sequence``."""
        self._blocks.release(sequence.slot, sequence.computed)
        del self._active[sequence.slot]
        self._growing.discard(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = _WAITING
        self._decoding = None

    def _room(self, sequence: ScheduledSequence) -> int:
        """How many tokens behind the newest one could be computed in this pass: there is memory, and they may count."""
        task = sequence.task
        if not task.sampling.chooses_alone:
            return 0
        in_memory = self._blocks.held(sequence.slot) * PAGE_TOKENS - 1 - int(self.positions[sequence.slot])
        return min(in_memory, task.limit - len(sequence.token_ids) - 1)

    def _with_guesses(self, decode: list[ScheduledSequence], guesses: list[list[int]]) -> StepPlan:
        """A pass that decodes, with a row for each guess behind that of its sequence."""
        rows = [(sequence, *row) for sequence, own in zip(decode, guesses, strict=True) for row in enumerate([0, *own])]
        sequences, ahead, tokens = ([*column] for column in zip(*rows, strict=True))
        slots = [sequence.slot for sequence in sequences]
        return StepPlan(sequences, _int32(slots), [], _int32(ahead), _int32(tokens))

    def _decode_rows(self) -> tuple[list[ScheduledSequence], np.ndarray]:
        """The decoding sequences and their slots, ascending."""
        if self._decoding is None:
            slots = sorted(slot for slot, sequence in self._active.items() if sequence.is_decoding)
            self._decoding = [self._active[slot] for slot in slots], np.array(slots, dtype=np.int32)
        return self._decoding

    def _plan_prefill(self, num_decode: int) -> list[PrefillChunk]:
        """The prefill chunks of a pass that also decodes so many tokens."""
        budget = self._prefill_chunk_tokens if num_decode else self._max_step_tokens
        rows, output = SCORED_ROWS, num_decode
        chunks: list[PrefillChunk] = []
        while self._prefilling and budget > 0 and rows > 0:
            sequence = self._prefilling[0]
            start, length = sequence.prefilled, min(budget, len(sequence.prefill_ids) - sequence.prefilled)
            num_outputs = int(start + length == len(sequence.prefill_ids))
            if sequence.lacks_prompt_scores:
                # A row's logits score the next token; the scores that there are belong to the rows before.
                first = max(start, len(sequence.prompt_scores))
                length = min(length, first - start + rows)
                num_outputs = max(0, start + length - first)
                rows -= num_outputs
            self._give_back(sequence.slot, start)
            chunks.append(PrefillChunk(sequence, start, length, output, num_outputs))
            output += num_outputs
            sequence.prefilled += length
            budget -= length
            if sequence.is_decoding:
                self._prefilling.popleft()
                self.positions[sequence.slot] = sequence.prefilled - 1
                self._decoding = None
        return chunks


def _int32(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
