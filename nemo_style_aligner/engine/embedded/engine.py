"""The embedded engine under the engine contract: the loop around scheduler, pages of KV memory and model step."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_style_aligner import activity
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    GrammarError,
    SamplingParams,
    StopCondition,
    WeightStream,
)
from nemo_style_aligner.engine.embedded.block_table import BlockTable
from nemo_style_aligner.engine.embedded.lookup import Lookup
from nemo_style_aligner.engine.embedded.native.native_step import NativeStep
from nemo_style_aligner.engine.embedded.route_memory import RouteMemory
from nemo_style_aligner.engine.embedded.scheduler import (
    PrefillChunk,
    ScheduledSequence,
    Scheduler,
    StepPlan,
    Task,
    TokenScores,
)
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape, ModelStep
from nemo_style_aligner.engine.embedded.torch_step import TorchStep
from nemo_style_aligner.engine.embedded.trainer_weights import Offer, TrainerWeights
from nemo_style_aligner.engine.native.compilation import NativeUnavailable, ahead
from nemo_style_aligner.engine.sampling import SamplingRows, request_key
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.kinds import StepChoice

if TYPE_CHECKING:
    from nemo_style_aligner.engine.grammar import Grammars, Matcher  # which knows tokenizers

logger = logging.getLogger(__name__)

# Prompt tokens in a pass that also decodes. Such a pass runs without a graph: on a GPU a few large ones cost less.
_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
_ROW_COST = 0.12  # of a token more in a pass over one: benchmarks/generation.py, passes of 1 and of 8 rows on a CPU
_IDLE_CHUNKS = 4  # a pass that decodes nothing may prefill this many chunks' worth of prompt tokens


class EmbeddedEngine(GenerationEngine):
    """Generates inside the trainer's process, on any device torch supports.

    Memory of a rank: its shard of the weights once, less what it uses in place in the trainer's memory, plus 2 *
    num_layers * kv_cache_tokens * (the rank's key heads) * kv_channels values of KV pages. The ranks of a
    tensor-parallel group must make the same calls with the same requests in the same order; all get the same results.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_cache_tokens: int | None = None,
        prefill_chunk_tokens: int | None = None,
        tensor_parallel: TensorParallel | None = None,
        step: StepChoice = "auto",
        lookup_decoding: bool | None = None,
        trainer_weights: Offer | None = None,
        is_watched: bool = True,
        records_routes: bool = False,
        **options: Any,
    ) -> None:
        """Describe the engine; `build` allocates.

        Args:
            architecture: the model's shape.
            dtype: of weights, KV cache and matrix products: float32 or bfloat16.
            device: where to run.
            kv_cache_tokens: tokens that KV memory holds; if they are too few, sequences wait, or are preempted and
                computed again. None: enough for num_slots sequences of max_sequence_length.
            prefill_chunk_tokens: the most prompt tokens in a forward pass that also decodes. None: 512 on a CPU, 4096
                on a GPU, which passes of fewer tokens do not fill.
            tensor_parallel: the ranks that share the model; None: this one alone.
            step: what computes: "native", "torch", or "auto": the fastest that runs here.
            lookup_decoding: where slots are free, guess tokens and have passes check them; see `lookup`. None: where it
                was seen to pay, by the native step.
            trainer_weights: returns live parameters that may be read in place; `viewed_weights` names those that are.
            is_watched: passes are signs of life of this process, for its watchdog.
            records_routes: responses come with their ``routes``, if the model has experts.
            options: what every engine is told, see `GenerationEngine`.

        Raises:
            ValueError: a value is out of its range, or the model cannot be divided over the ranks.
        """
        super().__init__(architecture.vocab_size, **options)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the embedded engine runs in float32 or bfloat16, not {dtype}")
        self._device = torch.device(device)
        if prefill_chunk_tokens is None:
            prefill_chunk_tokens = _CHUNK_TOKENS.get(self._device.type, _CHUNK_TOKENS["cpu"])
        if prefill_chunk_tokens < 1:
            raise ValueError(f"prefill_chunk_tokens={prefill_chunk_tokens} must be at least 1")
        self._shape = EngineShape(
            architecture=architecture,
            dtype=dtype,
            num_slots=self._num_slots,
            max_sequence_length=self.max_sequence_length,
            num_pages=num_pages(kv_cache_tokens, self._num_slots, self.max_sequence_length),
            max_step_tokens=self._num_slots + _IDLE_CHUNKS * prefill_chunk_tokens,
            tensor_parallel=tensor_parallel or TensorParallel(),
        )
        self._shape.shard  # noqa: B018  raises where the model cannot be divided
        self._step_choice: StepChoice = step
        self._looks_up = lookup_decoding
        self._lookup: Lookup | None = None  # `_build` knows
        self._is_watched = is_watched
        records = records_routes and architecture.experts is not None
        self._routes = RouteMemory(self._shape) if records else None
        self._blocks = BlockTable(self._num_slots, self._shape.pages_per_sequence, self._shape.num_pages)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._trainer = TrainerWeights(trainer_weights)

    # ---- life cycle -------------------------------------------------------------------------

    def _build(self) -> None:
        self._step = choose_step(self._step_choice, self._shape, self._device, self._trainer)
        self._num_compilations = self._step.num_compilations
        if isinstance(self._step, NativeStep) if self._looks_up is None else self._looks_up:
            self._lookup = Lookup(self._num_slots, _row_cost(self._shape.architecture))
        logger.info("embedded engine: %s", self._step.description)

    @torch.no_grad()
    def _refit(self, weights: WeightStream) -> None:
        """Copy the stream into the step's buffers. Raises RuntimeError if the trainer's weights have moved."""
        self._blocks.reset()  # cached keys and values belong to the old weights
        self._trainer.require_in_place()
        self._step.weights.copy_from(weights)

    def _unload(self) -> None:
        self._step.release()
        self._blocks.reset()

    def _reload(self) -> None:
        self._step.acquire()

    def close(self) -> None:
        """See `GenerationEngine.close`. NCCL groups cannot end before the graphs that captured their collectives."""
        if self._built and self._loaded:
            self._unload()
            self._loaded = False

    @property
    def viewed_weights(self) -> frozenset[str]:
        """See `GenerationEngine.viewed_weights`; known from `build` on."""
        return self._trainer.names

    # ---- generation -------------------------------------------------------------------------

    def task(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        *,
        num_top: int | None = None,
        scores_prompt: bool = False,
        begun: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> Task:
        """A request for `serve`; for the arguments see `Task`. Any thread may call this.

        A request for no token gets one, for which there need not be room.

        Raises:
            ValueError: this engine cannot serve it.
        """
        request.check(sampling, self.max_sequence_length, self.vocab_size, least=0)
        return Task(
            request=request,
            sampling=sampling,
            stop=self._stop_condition(sampling),
            num_top=num_top,
            scores_prompt=scores_prompt,
            begun=begun,
        )

    def serve(
        self, pull: Callable[[], Task | None], keeps_idle: bool = False
    ) -> Generator[list[ScheduledSequence], None, None]:
        """Generate responses to tasks that come while others are generated, each sampled in its own way.

        Args:
            pull: returns the next task, or None if there is none at the moment; called whenever a slot is free.
            keeps_idle: later prompts begin with earlier prompts and responses; see `BlockTable`.

        Yields:
            After each forward pass, the sequences that got a token from it; those not ``is_in_slot`` have left.
            Ends when nothing is left to do. Closing the iterator abandons the rest.

        For the errors see `generate`.
        """
        return self._run(lambda: self._passes(pull, keeps_idle))

    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        def pull() -> Task | None:
            if (request := next(requests, None)) is None:
                return None
            self._check(request, sampling)
            return Task(request=request, sampling=sampling, stop=stop)

        with contextlib.closing(self._passes(pull)) as passes:
            for sequence in itertools.chain.from_iterable(passes):
                if sequence.failure is not None:
                    raise GrammarError(f"request {sequence.request.request_id}: {sequence.failure}")
                if sequence.finish_reason is not None:
                    yield GenerationResult(
                        request_id=sequence.request.request_id,
                        prompt_token_ids=sequence.request.prompt_token_ids,
                        token_ids=sequence.token_ids,
                        logprobs=sequence.logprobs,
                        finish_reason=sequence.finish_reason,
                        weight_version=self._weight_version,
                        routes=sequence.routes,
                    )

    def _passes(
        self, pull: Callable[[], Task | None], keeps_idle: bool = False
    ) -> Generator[list[ScheduledSequence], None, None]:
        """The generation loop: refill slots, plan, compute, sample, free the slots of what is finished."""
        self._blocks.keeps_idle = keeps_idle
        sampler = SlotSampler(self._step, self._shape, self._vocab_limit, self._device, self.grammars)
        scheduler = Scheduler(
            pull,
            self._blocks,
            prefill_chunk_tokens=self._prefill_chunk_tokens,
            max_step_tokens=self._shape.max_step_tokens,
            # Pages that no token sees any more still have their tokens' routes.
            reach=self._shape.architecture.reach if self._routes is None else None,
            guess=None if self._lookup is None else self._lookup.guess,
        )
        if self._lookup is not None:
            self._lookup.begin()
        statistics = self._statistics
        statistics.num_pages = self._shape.num_pages
        try:
            while True:
                for sequence in scheduler.refill():
                    sampler.enter(sequence)
                if not scheduler.num_active:
                    return
                plan = scheduler.plan()
                added = self._advance(plan, scheduler, sampler)
                self._count(statistics, plan, scheduler, len(added))
                # Of several rows of a sequence, which follow each other, once.
                advanced = [next(rows) for _, rows in itertools.groupby(added, key=lambda sequence: sequence.number)]
                for sequence in advanced:
                    if sequence.finish_reason is not None or sequence.task.is_abandoned:
                        if self._lookup is not None:
                            self._lookup.finished(sequence)
                        if self._routes is not None:
                            sequence.routes = self._routes.of(self._blocks.table[sequence.slot], len(sequence.computed))
                        scheduler.leave(sequence)
                yield advanced
        finally:
            if scheduler.num_active:  # ended early: the pages' content is unknown and may not be finite
                self._blocks.reset()
                self._step.clear_pages()  # 0 times NaN is NaN, so masking would not hide it

    def _advance(self, plan: StepPlan, scheduler: Scheduler, sampler: SlotSampler) -> list[ScheduledSequence]:
        """Run one forward pass; returns the sequences that got tokens from it, each as often as it got one."""
        step = scheduler.arrays(plan)
        if self._routes is not None:
            step = self._routes.wanting(step)
        try:
            logits = self._step.forward(step)
        except torch.OutOfMemoryError as error:
            prompts = sum(chunk.length for chunk in plan.prefill)
            raise torch.OutOfMemoryError(
                f"memory ran out in a pass over {prompts} prompt tokens and {len(plan.decode)} responses: lower "
                f"trainer.ppo.generation.prefill_chunk_tokens, now {self._prefill_chunk_tokens} (a pass without "
                f"responses takes up to {_IDLE_CHUNKS} times as many), num_slots or kv_cache_tokens"
            ) from error
        if self._routes is not None:
            self._routes.note(step)
        for chunk in plan.prefill:
            if chunk.scores_prompt:
                self._score_prompt(chunk, logits[chunk.first_output :][: chunk.num_outputs])
        sequences, slots = plan.sampled()
        if not sequences:  # only chunks in the middle of long prompts
            return sequences
        if len(sequences) != len(logits):
            logits = logits[plan.sampled_rows()]
        tokens, logprobs = sampler.sample(logits, slots, plan.sampled_ahead())
        if not all(map(math.isfinite, logprobs)):
            first = next(row for row, logprob in enumerate(logprobs) if not math.isfinite(logprob))
            raise self._diverged(sequences[first].request, len(sequences[first].token_ids))
        added = scheduler.record(plan, tokens, logprobs)
        sampler.take(slots[added], [tokens[row] for row in added])
        if self._lookup is not None:
            self._lookup.learn(collections.Counter(sequences[row].number for row in added))
        if scored := [row for row in added if sequences[row].task.num_top is not None]:
            wanted = [sequences[row] for row in scored]
            num_top = max(sequence.task.num_top or 0 for sequence in wanted)
            scores = token_scores(logits[scored], [tokens[row] for row in scored], num_top, self._vocab_limit)
            for sequence, score in zip(wanted, scores, strict=True):
                sequence.scores.append(score)
        return [sequences[row] for row in added]

    def _score_prompt(self, chunk: PrefillChunk, logits: torch.Tensor) -> None:
        """Score the tokens that follow those of ``chunk`` whose logits were wanted."""
        sequence = chunk.sequence
        first = len(sequence.prompt_scores) + 1
        tokens = sequence.request.prompt_token_ids[first : first + len(logits)]
        num_top = sequence.task.num_top or 0
        sequence.prompt_scores += token_scores(logits[: len(tokens)], tokens, num_top, self._vocab_limit)

    def _count(self, statistics: GenerationStatistics, plan: StepPlan, scheduler: Scheduler, advanced: int) -> None:
        """Add one forward pass to ``statistics``."""
        if self._is_watched:
            activity.progress()
        statistics.steps += 1
        statistics.active_slot_steps += scheduler.num_active
        statistics.prefill_tokens += sum(chunk.length for chunk in plan.prefill)
        statistics.generated_tokens += advanced
        statistics.longest_running = scheduler.longest_running
        statistics.shared_prefix_tokens = scheduler.num_shared_tokens
        statistics.preemptions = scheduler.num_preemptions
        if self._lookup is not None:
            statistics.guessed_tokens, statistics.guesses_held = self._lookup.num_guessed, self._lookup.num_held
        statistics.peak_pages = max(statistics.peak_pages, self._blocks.in_use)


def num_pages(kv_cache_tokens: int | None, num_slots: int, max_sequence_length: int) -> int:
    """Pages of KV memory; ValueError if they cannot hold one sequence of the greatest length."""
    per_sequence = -(-max_sequence_length // PAGE_TOKENS)
    if kv_cache_tokens is None:
        return num_slots * per_sequence
    if kv_cache_tokens // PAGE_TOKENS < per_sequence:
        raise ValueError(
            f"kv_cache_tokens={kv_cache_tokens} cannot hold one sequence of {max_sequence_length} tokens; set it to "
            f"{per_sequence * PAGE_TOKENS} or more"
        )
    return kv_cache_tokens // PAGE_TOKENS


def _row_cost(architecture: ModelArchitecture) -> float:
    """What one token more costs a pass over one, as a share of it: measured, or the experts that it brings with it."""
    one, two = (architecture.layer_parameters_read(n) for n in (1, 2))
    return max(_ROW_COST, (two - one) / one)


@torch.inference_mode()
def token_scores(logits: torch.Tensor, tokens: list[int], num_top: int, vocab_limit: int) -> list[TokenScores]:
    """Scores of ``tokens``, one for each row of ``logits`` [n, vocab]; of the likeliest ids below ``vocab_limit``."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs[:, :vocab_limit].topk(min(num_top, vocab_limit), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenScores(logprob, list(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(chosen, tops, strict=True)
    ]


class SlotSampler:
    """Chooses tokens for slots; ranks that share a model all get those that the first one chooses."""

    def __init__(
        self,
        step: ModelStep,
        shape: EngineShape,
        vocab_limit: int,
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        self._step = step
        self._grammars = grammars
        self._held: dict[int, tuple[ScheduledSequence, Matcher]] = {}  # by slot: what the first rank holds to grammars
        self._device = device
        self._vocab_limit = vocab_limit
        self._tensor_parallel = shape.tensor_parallel
        self._keys = np.zeros(shape.num_slots, dtype=np.int64)
        self._lengths = np.zeros(shape.num_slots, dtype=np.int64)  # of the responses
        self._min_lengths = np.zeros(shape.num_slots, dtype=np.int64)
        # Slots whose tokens are chosen in the same way have the same number.
        self._ways = np.zeros(shape.num_slots, dtype=np.int64)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._params: dict[int, tuple[SamplingParams, torch.Tensor]] = {}  # and ids that end a response, of each way
        self._per_id = (shape.num_slots, shape.architecture.vocab_size)
        self._seen: torch.Tensor | None = None  # bool [num_slots, vocab]: ids in each slot's prompt and response
        self._counts: torch.Tensor | None = None  # float [num_slots, vocab]: how often an id is in each slot's response

    def enter(self, sequence: ScheduledSequence) -> None:
        """Take over a sequence that is new to its slot."""
        slot, params = sequence.slot, sequence.task.sampling
        self._keys[slot] = request_key(params.seed, sequence.request.seed)
        self._lengths[slot] = len(sequence.token_ids)
        self._min_lengths[slot] = params.min_new_tokens
        self._ways[slot] = self._way(params, sequence.task.stop.stop_ids)
        self._held.pop(slot, None)
        if params.grammar is not None and self._tensor_parallel.rank == 0:
            assert self._grammars is not None, "checked when the task was made"
            self._held[slot] = sequence, self._grammars.matcher(params.grammar, sequence.token_ids)
        if params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(self._per_id, dtype=torch.bool, device=self._device)
            self._seen[slot] = False
            self._seen[slot, torch.tensor(sequence.prefill_ids, device=self._device)] = True
        if params.counts_tokens:
            if self._counts is None:
                self._counts = torch.zeros(self._per_id, device=self._device)
            made = torch.tensor(sequence.token_ids, dtype=torch.int64, device=self._device)
            self._counts[slot] = torch.bincount(made, minlength=self._per_id[1])

    def _way(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> int:
        held_back = stop_ids if params.min_new_tokens else ()
        key = (params.logprob_temperature, params.use_greedy, params.filters, held_back)
        if key not in self._numbers:
            used = set(self._ways.tolist())  # clients may think of any number of ways
            self._numbers = {known: number for known, number in self._numbers.items() if number in used}
            self._params = {number: self._params[number] for number in self._numbers.values()}
            number = max(self._params, default=-1) + 1
            self._numbers[key] = number
            self._params[number] = params, torch.tensor(stop_ids, dtype=torch.int64, device=self._device)
        return self._numbers[key]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: np.ndarray, ahead: np.ndarray) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each of ``slots``, from ``logits`` [len(slots), vocab]. Collective.

        ``ahead``: how many tokens further than the slot's next one that is. `take` says which of them the slots got.
        """
        if self._tensor_parallel.size == 1:
            tokens, logprobs = self._sample(logits, slots, ahead)
        else:
            # One message; float64 holds every token id exactly.
            message = torch.empty(2, len(slots), dtype=torch.float64, device=self._device)
            if self._tensor_parallel.rank == 0:
                torch.stack([part.double() for part in self._sample(logits, slots, ahead)], out=message)
            self._tensor_parallel.broadcast(message)
            tokens, logprobs = message[0].long(), message[1]
        if self._device.type == "cuda":  # one copy back, one wait; float64 holds every token id exactly
            tokens, logprobs = torch.stack((tokens.double(), logprobs.double())).cpu()
        return tokens.long().tolist(), logprobs.tolist()

    def take(self, slots: np.ndarray, tokens: list[int]) -> None:
        """The responses of ``slots`` go on with ``tokens``; a slot may be there several times."""
        np.add.at(self._lengths, slots, 1)
        if self._seen is not None or self._counts is not None:
            where, ids = moved(torch.from_numpy(slots), self._device), torch.tensor(tokens, device=self._device)
            if self._seen is not None:
                self._seen[where, ids] = True
            if self._counts is not None:
                self._counts.index_put_((where, ids), torch.ones(()).to(self._counts), accumulate=True)
        for slot, token in zip(slots.tolist(), tokens, strict=True) if self._held else ():
            if slot in self._held:
                self._held[slot][1].take([token])

    def _sample(self, logits: torch.Tensor, slots: np.ndarray, ahead: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._params) == 1 or (self._ways[slots] == self._ways[slots[0]]).all():
            return self._sample_alike(logits, slots, ahead)
        ways = self._ways[slots]
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        logprobs = torch.empty(len(slots), device=self._device)
        for way in np.unique(ways):
            (rows,) = np.nonzero(ways == way)
            where = moved(torch.from_numpy(rows), self._device)
            tokens[where], logprobs[where] = self._sample_alike(logits[where], slots[rows], ahead[rows])
        return tokens, logprobs

    def _sample_alike(
        self, logits: torch.Tensor, slots: np.ndarray, ahead: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params, stop_ids = self._params[self._ways[slots[0]]]
        lengths = self._lengths[slots] + ahead
        suppress = lengths < self._min_lengths[slots]
        seen = self._seen if params.repetition_penalty != 1.0 else None
        counts = self._counts if params.counts_tokens else None
        rows = SamplingRows(
            keys=moved(torch.from_numpy(self._keys[slots]), self._device),
            positions=moved(torch.from_numpy(lengths), self._device),
            suppress_stop=moved(torch.from_numpy(suppress), self._device) if suppress.any() else None,
            seen=None if seen is None else seen[moved(torch.from_numpy(slots), self._device)],
            counts=None if counts is None else counts[moved(torch.from_numpy(slots), self._device)],
            allowed=None if params.grammar is None else moved(torch.from_numpy(self._allowed(slots)), self._device),
        )
        return self._step.sample(logits, params, rows, stop_ids, self._vocab_limit)

    def _allowed(self, slots: np.ndarray) -> np.ndarray:
        """The ids that the grammars of ``slots`` allow next: uint8 [len(slots), bytes]; see `SamplingRows`.

        Where a grammar cannot be followed any further these are ends alone, and the sequence has its ``failure``.
        """
        held = [self._held[slot] for slot in slots.tolist()]
        masks = np.empty((len(held), held[0][1].num_bytes), dtype=np.uint8)
        for mask, (sequence, matcher) in zip(masks, held, strict=True):
            matcher.fill(mask)
            sequence.failure = matcher.failure
        return masks


def compile_ahead(
    choice: StepChoice, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device, num_ranks: int = 1
) -> None:
    """Begin to compile what an engine like this needs, while its weights are still being read; see `choose_step`.

    Args:
        num_ranks: that will share the engine.
    """
    if choice != "torch" and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        # Nothing is compiled for the other sizes.
        sizes = {"num_slots": 1, "max_sequence_length": 1, "num_pages": 1, "max_step_tokens": 1}
        shape = EngineShape(architecture, dtype, tensor_parallel=TensorParallel(size=num_ranks), **sizes)
        ahead(lambda: NativeStep(shape, TrainerWeights(None)).load())


def choose_step(choice: StepChoice, shape: EngineShape, device: torch.device, trainer: TrainerWeights) -> ModelStep:
    """The step that ``choice`` asks for, built.

    On a CPU "auto" is the native step or, where that is unavailable, the torch step; on a GPU it is the torch step with
    Triton's kernels where they work. "torch" never uses these kernels.

    Of ``trainer`` the torch step uses in place what it can, the native step packs its matrices at each refit.

    Collective over the tensor-parallel ranks.

    Raises:
        ValueError: there is no such step on this device.
        NativeUnavailable: the native step was asked for and cannot be had; the message says why.
    """
    if choice == "native" and device.type != "cpu":
        raise ValueError(f"step=native runs on the CPU, not on {device}; choose auto or torch")
    if choice != "torch" and device.type == "cpu":
        native: NativeStep | None = None
        error = NativeUnavailable("another rank of the tensor-parallel group cannot run the native step")
        try:
            native = NativeStep(shape, trainer)
            native.build()
        except NativeUnavailable as why:
            native, error = None, why
        # Ranks that share a model must run the same step: if one cannot run the native step, none does.
        if shape.tensor_parallel.all_agree(native is not None) and native is not None:
            return native
        if choice == "native":
            raise error
        logger.warning("generation falls back to the slower torch step: %s", error)
        trainer.copied.clear()
    fallback = TorchStep(shape, device, trainer, use_kernels=choice != "torch")
    fallback.build()
    return fallback
