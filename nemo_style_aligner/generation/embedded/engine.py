"""The embedded engine: scheduler, KV cache, model step and sampler under the engine contract."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.embedded.kv_cache import KVCache
from nemo_style_aligner.generation.embedded.model_step import ModelStep, Segment, StepInput
from nemo_style_aligner.generation.embedded.scheduler import Scheduler, Sequence, StepPlan
from nemo_style_aligner.generation.embedded.weights import ModelWeights, RefitCheck, acquire, release
from nemo_style_aligner.generation.engine import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    SamplingParams,
    WeightStream,
)
from nemo_style_aligner.generation.sampling import SamplingRows, request_key, sample
from nemo_style_aligner.generation.stopping import Detokenize, StopCondition, TokenToId

_NO_WEIGHTS = -1


class EmbeddedEngine(GenerationEngine):
    """Generates inside the trainer's process, on any device torch supports.

    Memory: the weights once, plus 2 * num_layers * num_slots * max_sequence_length *
    num_query_groups * kv_channels values of KV cache.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_sequence_length: int,
        eos_id: int,
        vocab_limit: int | None = None,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
        device: torch.device | str = "cpu",
        prefill_chunk_tokens: int = 512,
        refit_check: RefitCheck = "off",
    ) -> None:
        """Describe the engine; `build` allocates.

        Args:
            architecture: the model's shape.
            dtype: of weights, KV cache and matrix products: float32 or bfloat16.
            num_slots: sequences generated at the same time.
            max_sequence_length: prompt plus response tokens, at most.
            eos_id: token that ends every response.
            vocab_limit: ids at and above it are never sampled; the tokenizer's size, where the
                model's vocabulary is larger. None: the model's.
            detokenize: ids to text, special tokens left out; needed for textual stop strings.
            token_to_id: id of a string that is one token, else None; needed for stop strings that
                are special tokens.
            device: where to run.
            prefill_chunk_tokens: prompt tokens computed per forward pass, at most.
            refit_check: compare the buffers with the stream after each refit: "off", "sampled"
                (about a thousand values per tensor) or "full".
        """
        limit = architecture.vocab_size if vocab_limit is None else vocab_limit
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the embedded engine runs in float32 or bfloat16, not {dtype}")
        if num_slots < 1 or max_sequence_length < 2 or prefill_chunk_tokens < 1:
            raise ValueError(
                f"num_slots={num_slots} and prefill_chunk_tokens={prefill_chunk_tokens} must be at least 1 and "
                f"max_sequence_length={max_sequence_length} at least 2"
            )
        if not 0 < limit <= architecture.vocab_size:
            raise ValueError(f"vocab_limit={limit} must lie in [1, {architecture.vocab_size}], the model's vocabulary")
        if not 0 <= eos_id < limit:
            raise ValueError(f"eos_id={eos_id} is outside the vocabulary of {limit}")
        if refit_check not in ("off", "sampled", "full"):
            raise ValueError(f"refit_check={refit_check!r} is not off, sampled or full")
        self._architecture = architecture
        self._dtype = dtype
        self._device = torch.device(device)
        self._num_slots = num_slots
        self._max_sequence_length = max_sequence_length
        self._eos_id = eos_id
        self._vocab_limit = limit
        self._detokenize = detokenize
        self._token_to_id = token_to_id
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._refit_check: RefitCheck = refit_check
        self._statistics = GenerationStatistics()
        self._weight_version = _NO_WEIGHTS
        self._num_compilations = 0
        self._loaded = False
        self._generating = False

    # ---- life cycle -------------------------------------------------------------------------

    def build(self) -> None:
        """Allocate weights and KV cache. Once per engine."""
        if self._num_compilations:
            raise RuntimeError("the engine is built already; build() comes once, reload() takes memory back")
        self._weights = ModelWeights(self._architecture, self._dtype, self._device)
        self._cache = KVCache(self._architecture, self._num_slots, self._max_sequence_length, self._dtype, self._device)
        self._model_step = ModelStep(self._architecture, self._weights, self._cache, self._dtype)
        self._num_compilations = 1
        self._loaded = True

    @torch.no_grad()
    def refit(self, weights: WeightStream, version: int) -> None:
        """Copy the stream into the engine's buffers; see `GenerationEngine.refit`."""
        self._require_loaded("refit")
        if version < 0:
            raise ValueError(f"weight version must not be negative, got {version}")
        self._weight_version = _NO_WEIGHTS  # until the whole stream is in
        self._weights.copy_from(weights, self._refit_check)
        self._weight_version = version

    def unload(self) -> None:
        """Free weights and KV cache; a second call does nothing."""
        if not self._loaded:
            return
        self._require_loaded("unload")
        release(self._weights.buffers + self._cache.buffers)
        self._weight_version = _NO_WEIGHTS
        self._loaded = False

    def reload(self) -> None:
        """Allocate the same buffers again; a second call does nothing."""
        if self._loaded:
            return
        if not self._num_compilations:
            raise RuntimeError("reload() before build(): call build() once at start")
        acquire(self._weights.buffers + self._cache.buffers)
        self._cache.clear()
        self._loaded = True

    @property
    def weight_version(self) -> int:
        """Version of the last whole refit; -1 while there is none."""
        return self._weight_version

    @property
    def num_compilations(self) -> int:
        """1 after `build`."""
        return self._num_compilations

    @property
    def num_slots(self) -> int:
        """Sequences generated at the same time."""
        return self._num_slots

    @property
    def statistics(self) -> GenerationStatistics:
        """Counters of the latest `generate`."""
        return self._statistics

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor a refit must bring."""
        self._require_loaded("weight_shapes")
        return self._weights.shapes

    # ---- generation -------------------------------------------------------------------------

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        """See `GenerationEngine.generate`. One call at a time; closing the iterator abandons the rest."""
        self._require_loaded("generate")
        if self._weight_version == _NO_WEIGHTS:
            raise RuntimeError(
                "generate() without whole weights: a refit must succeed after build, reload or a failed one"
            )
        stop = StopCondition(sampling, self._eos_id, self._detokenize, self._token_to_id)
        return self._run(requests, sampling, stop)

    def _run(
        self, requests: Iterable[GenerationRequest], params: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        """The generation loop: refill slots, plan, compute, sample, hand out what is finished."""
        self._require_loaded("generate")  # again: time may have passed since generate() was called
        sampler = _Sampler(
            params, stop, self._num_slots, self._architecture.vocab_size, self._vocab_limit, self._device
        )
        scheduler = Scheduler(
            requests, self._num_slots, self._prefill_chunk_tokens, lambda request: self._admit(request, params)
        )
        self._statistics = statistics = GenerationStatistics()
        self._generating = True
        try:
            while True:
                sampler.enter(scheduler.refill())
                for sequence, source in scheduler.compact():
                    self._cache.move(source, sequence.slot, sequence.cached_length)
                    sampler.move(source, sequence.slot)
                if not scheduler.num_active:
                    return
                _count(statistics, plan := scheduler.plan(), scheduler.num_active)
                for sequence in self._advance(plan, sampler):
                    reason = stop.check(sequence.token_ids)
                    if reason is not None:
                        scheduler.finish(sequence)
                        yield GenerationResult(
                            request_id=sequence.request.request_id,
                            prompt_ids=sequence.request.prompt_ids,
                            token_ids=sequence.token_ids,
                            logprobs=sequence.logprobs,
                            finish_reason=reason,
                            weight_version=self._weight_version,
                        )
        finally:
            self._generating = False

    def _advance(self, plan: StepPlan, sampler: _Sampler) -> list[Sequence]:
        """One forward pass; appends a token to each sequence it returns."""
        step, sequences = _step_input(plan, self._device)
        logits = self._model_step(step)
        if not sequences:  # only chunks in the middle of long prompts
            return sequences
        tokens, logprobs = sampler.sample(logits, sequences)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._cache.clear()  # or the non-finite keys would outlive this generation
                raise FloatingPointError(
                    f"request {sequence.request.request_id}: logits at response token {len(sequence.token_ids)} are "
                    f"not finite with weights of version {self._weight_version}; the weights have diverged"
                )
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
        return sequences

    def _admit(self, request: GenerationRequest, params: SamplingParams) -> int:
        request.check(params.max_new_tokens, self._max_sequence_length, self._architecture.vocab_size)
        return request_key(params.seed, request.seed)

    def _require_loaded(self, action: str) -> None:
        if not self._num_compilations:
            raise RuntimeError(f"{action} before build(): call build() once at start")
        if not self._loaded:
            raise RuntimeError(f"{action} while the engine is unloaded: call reload() and refit() first")
        if self._generating:
            raise RuntimeError(f"{action} while a generate() is under way: exhaust or close its iterator first")


class _Sampler:
    """Applies `sample` to sequences: gathers per-row values, keeps what the repetition penalty needs."""

    def __init__(
        self,
        params: SamplingParams,
        stop: StopCondition,
        num_slots: int,
        vocab_size: int,
        vocab_limit: int,
        device: torch.device,
    ) -> None:
        self._params = params
        self._device = device
        self._vocab_limit = vocab_limit
        known = [token for token in stop.stop_ids if token < vocab_limit]
        self._stop_ids = torch.tensor(known, dtype=torch.int64, device=device)
        self._seen: torch.Tensor | None = None  # bool [num_slots, vocab]: ids in each slot's prompt and response
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)

    def enter(self, newcomers: list[Sequence]) -> None:
        """Note the prompts of sequences new to their slots."""
        if self._seen is not None:
            for sequence in newcomers:
                self._seen[sequence.slot] = False
                self._seen[sequence.slot, torch.tensor(sequence.request.prompt_ids, device=self._device)] = True

    def move(self, source: int, target: int) -> None:
        """Follow a sequence to another slot."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each row of ``logits`` [len(sequences), vocab]."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        suppress = [length < self._params.min_new_tokens for length in lengths]
        slots = torch.tensor([sequence.slot for sequence in sequences], device=self._device)
        rows = SamplingRows(
            keys=torch.tensor([sequence.key for sequence in sequences], dtype=torch.int64, device=self._device),
            positions=torch.tensor(lengths, dtype=torch.int64, device=self._device),
            suppress_stop=torch.tensor(suppress, device=self._device) if any(suppress) else None,
            seen=None if self._seen is None else self._seen[slots],
        )
        tokens, logprobs = sample(logits, self._params, rows, self._stop_ids, self._vocab_limit)
        if self._seen is not None:
            self._seen[slots, tokens] = True
        return tokens.tolist(), logprobs.tolist()


def _step_input(plan: StepPlan, device: torch.device) -> tuple[StepInput, list[Sequence]]:
    """The tensors of one forward pass, and the sequences that get a token from it, in row order."""
    token_ids = [sequence.token_ids[-1] for sequence in plan.decode]
    positions = [sequence.cached_length for sequence in plan.decode]
    slots = [sequence.slot for sequence in plan.decode]
    sequences = list(plan.decode)
    output_rows = list(range(len(sequences)))
    attended_length = 1 + max(positions, default=-1)
    segments: list[Segment] = []
    for chunk in plan.prefill:
        slot = chunk.sequence.slot
        segments.append(Segment(slot=slot, start=chunk.start, length=chunk.length, row=len(token_ids)))
        token_ids += chunk.sequence.request.prompt_ids[chunk.start : chunk.start + chunk.length]
        positions += range(chunk.start, chunk.start + chunk.length)
        slots += [slot] * chunk.length
        if chunk.completes_prompt:
            sequences.append(chunk.sequence)
            output_rows.append(len(token_ids) - 1)
    packed = torch.tensor([token_ids, positions, slots], dtype=torch.int64).to(device)
    step = StepInput(
        token_ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        output_rows=torch.tensor(output_rows, dtype=torch.int64).to(device),
        num_decode=len(plan.decode),
        slot_extent=1 + max((sequence.slot for sequence in plan.decode), default=-1),
        attended_length=attended_length,
        segments=tuple(segments),
    )
    return step, sequences


def _count(statistics: GenerationStatistics, plan: StepPlan, num_active: int) -> None:
    """Add one forward pass to ``statistics``."""
    statistics.steps += 1
    statistics.decode_steps += bool(plan.decode)
    statistics.active_slot_steps += num_active
    statistics.prefill_tokens += sum(chunk.length for chunk in plan.prefill)
    statistics.generated_tokens += len(plan.decode) + sum(chunk.completes_prompt for chunk in plan.prefill)
