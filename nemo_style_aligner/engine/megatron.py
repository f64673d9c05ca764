"""The un-accelerated baseline: generation with the training model itself.

Static batches through megatron-core's own KV cache, as NeMo-Aligner generates with TensorRT-LLM switched
off: a batch lasts as long as its longest response, and rows with shorter prompts start to sample while longer
prompts are still read. It needs no second copy of the weights, so a refit only notes the version. Kept as a
baseline for the embedded engine's speed and as an independent check of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext

from nemo_style_aligner.engine.contract import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    StopCondition,
    WeightStream,
)
from nemo_style_aligner.engine.sampling import SamplingRows, request_key, sample
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.telemetry import activity


class MegatronEngine(GenerationEngine):
    """Generates with a `MegatronModel` in place.

    The ranks of a tensor-parallel group generate together: they must pass the same requests in the same order.

    Args:
        model: the model in training; pipeline-parallel size 1.
        options: those common to all engines, see `GenerationEngine`; ``num_slots`` is the size of a static batch.
    """

    def __init__(self, model: MegatronModel, **options: Any) -> None:
        super().__init__(model.architecture.vocab_size, **options)
        if model.layout.pp_size > 1:
            raise ValueError(
                "trainer.ppo.generation.engine=megatron cannot generate with pipeline_model_parallel_size="
                f"{model.layout.pp_size}: use the embedded engine"
            )
        self._model = model

    def _build(self) -> None:
        """Nothing is compiled, and the engine holds no memory of its own between calls."""

    def _refit(self, weights: WeightStream) -> None:
        """The model's own weights are used; the stream is not read."""

    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        was_training = self._model.module.training
        try:
            while batch := list(itertools.islice(requests, self._num_slots)):
                for request in batch:
                    self._check(request, sampling)
                self._model.module.eval()
                yield from self._generate_batch(batch, sampling, stop)
        finally:
            self._model.module.train(was_training)

    @torch.no_grad()
    def _generate_batch(
        self, batch: list[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        """Advance all rows position by position: within its prompt a row's token is given, after it sampled."""
        where, statistics = device(), self._statistics
        prompt_lengths = [len(r.prompt_token_ids) for r in batch]
        shortest, longest = min(prompt_lengths), max(prompt_lengths)
        tokens = torch.zeros(
            len(batch), longest + max(r.limit(sampling) for r in batch), dtype=torch.int64, device=where
        )
        for row, request in enumerate(batch):
            tokens[row, : prompt_lengths[row]] = torch.tensor(request.prompt_token_ids, device=where)
        context = StaticInferenceContext(len(batch), tokens.shape[1])
        keys = torch.tensor([request_key(sampling.seed, r.seed) for r in batch], dtype=torch.int64, device=where)
        stop_ids = torch.tensor(stop.stop_ids, dtype=torch.int64, device=where)
        responses: list[list[int]] = [[] for _ in batch]
        logprobs: list[list[float]] = [[] for _ in batch]
        alive = set(range(len(batch)))
        start, end = 0, shortest
        while alive:
            logits = self._step(tokens[:, start:end], start, context)
            activity.progress()
            statistics.steps += 1
            statistics.active_slot_steps += len(alive)
            statistics.prefill_tokens += sum(max(0, min(end, length) - start) for length in prompt_lengths)
            made = torch.tensor([max(0, end - length) for length in prompt_lengths], device=where)
            rows = SamplingRows(keys, made, made < sampling.min_new_tokens, self._seen(tokens, end, sampling))
            chosen, chosen_logprobs = sample(logits, sampling, rows, stop_ids, self._vocab_limit)
            for row in sorted(alive):
                if end < prompt_lengths[row]:
                    continue
                request, response = batch[row], responses[row]
                logprob = float(chosen_logprobs[row])
                if not math.isfinite(logprob):
                    raise self._diverged(request, len(response))
                tokens[row, end] = chosen[row]
                response.append(int(chosen[row]))
                logprobs[row].append(logprob)
                statistics.generated_tokens += 1
                if reason := stop.check(response, request.limit(sampling)):
                    alive.discard(row)
                    yield GenerationResult(
                        request.request_id,
                        request.prompt_token_ids,
                        response,
                        logprobs[row],
                        reason,
                        self._weight_version,
                    )
            start, end = end, end + 1

    def _step(self, tokens: torch.Tensor, start: int, context: StaticInferenceContext) -> torch.Tensor:
        """Logits [b, vocabulary] after the last of ``tokens``, int64 [b, n]; the first has position ``start``."""
        context.sequence_len_offset = start
        if start > 0:
            context.enable_decode_mode()
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = self._model.gpt(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # Logits may round differently on each rank: all sample from one rank's, so that their tokens agree.
            dist.broadcast(
                logits,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        return logits[:, -1, : self._model.architecture.vocab_size]

    def _seen(self, tokens: torch.Tensor, end: int, sampling: SamplingParams) -> torch.Tensor | None:
        """bool [b, vocabulary]: ids before position ``end``; None without a repetition penalty."""
        if sampling.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(tokens.shape[0], self._model.architecture.vocab_size, dtype=torch.bool, device=tokens.device)
        return seen.scatter_(1, tokens[:, :end], True)
