"""The un-accelerated baseline: generation with the training model itself.

Static batches through megatron-core's own KV cache, as NeMo-Aligner generates with TensorRT-LLM switched
off: a batch is as long as its longest response, and prompts shorter than others wait for nobody. It needs
no second copy of the weights, so a refit only notes the version. Kept to measure the embedded engine
against and as an independent check of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext

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
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import device

_NO_WEIGHTS = -1


class MegatronEngine(GenerationEngine):
    """Generates with a `MegatronModel` in place.

    The ranks of a tensor-parallel group generate together: they must pass the same requests in the same order.

    Args:
        model: the model in training; pipeline-parallel size 1.
        num_slots: sequences per static batch.
        max_sequence_length: prompt plus response tokens, at most.
        eos_id: token that ends every response.
        vocab_limit: ids at and above it are never sampled.
        detokenize, token_to_id: for stop strings, see `StopCondition`.
    """

    def __init__(
        self,
        model: MegatronModel,
        *,
        num_slots: int,
        max_sequence_length: int,
        eos_id: int,
        vocab_limit: int | None = None,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
    ) -> None:
        if model.layout.pp_size > 1:
            raise ValueError(
                "trainer.ppo.generation.engine=megatron cannot generate with pipeline_model_parallel_size="
                f"{model.layout.pp_size}: use the embedded engine"
            )
        self._model = model
        self._num_slots = num_slots
        self._max_sequence_length = max_sequence_length
        self._eos_id = eos_id
        self._vocab_limit = vocab_limit
        self._detokenize = detokenize
        self._token_to_id = token_to_id
        self._version = _NO_WEIGHTS
        self._statistics = GenerationStatistics()

    def build(self) -> None:
        """Nothing is compiled."""

    def refit(self, weights: WeightStream, version: int) -> None:
        """The model's own weights are used; the stream is not read."""
        self._version = version

    def unload(self) -> None:
        """There is no memory of its own between calls."""

    def reload(self) -> None:
        """See `unload`."""

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_compilations(self) -> int:
        return 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def statistics(self) -> GenerationStatistics:
        return self._statistics

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        if self._version == _NO_WEIGHTS:
            raise RuntimeError("the engine has no weights: call refit before generate")
        self._statistics = GenerationStatistics()
        stop = StopCondition(sampling, self._eos_id, self._detokenize, self._token_to_id)
        source = iter(requests)
        was_training = self._model.module.training
        while batch := list(itertools.islice(source, self._num_slots)):
            for request in batch:
                request.check(sampling, self._max_sequence_length, self._model.architecture.vocab_size)
            self._model.module.eval()
            yield from self._generate_batch(batch, sampling, stop)
        self._model.module.train(was_training)

    @torch.no_grad()
    def _generate_batch(
        self, batch: list[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        """Step through positions together: a prompt's own tokens are forced, everything after is sampled."""
        where = device()
        prompt_lengths = [len(r.prompt_ids) for r in batch]
        shortest, longest = min(prompt_lengths), max(prompt_lengths)
        tokens = torch.zeros(
            len(batch), longest + max(r.limit(sampling) for r in batch), dtype=torch.int64, device=where
        )
        for row, request in enumerate(batch):
            tokens[row, : prompt_lengths[row]] = torch.tensor(request.prompt_ids, device=where)
        context = StaticInferenceContext(len(batch), tokens.shape[1])
        keys = torch.tensor([request_key(sampling.seed, r.seed) for r in batch], dtype=torch.int64, device=where)
        stop_ids = torch.tensor(stop.stop_ids, dtype=torch.int64, device=where)
        responses: list[list[int]] = [[] for _ in batch]
        logprobs: list[list[float]] = [[] for _ in batch]
        alive = set(range(len(batch)))
        start, end = 0, shortest
        while alive:
            logits = self._step(tokens[:, start:end], start, context)
            self._statistics.steps += 1
            self._statistics.active_slot_steps += len(alive)
            made = torch.tensor([max(0, end - length) for length in prompt_lengths], device=where)
            rows = SamplingRows(keys, made, made < sampling.min_new_tokens, self._seen(tokens, end, sampling))
            chosen, chosen_logprobs = sample(logits, sampling, rows, stop_ids, self._vocab_limit)
            for row in sorted(alive):
                if end < prompt_lengths[row]:
                    continue
                tokens[row, end] = chosen[row]
                responses[row].append(int(chosen[row]))
                logprobs[row].append(float(chosen_logprobs[row]))
                self._statistics.generated_tokens += 1
                if reason := stop.check(responses[row], batch[row].max_new_tokens):
                    alive.discard(row)
                    request = batch[row]
                    yield GenerationResult(
                        request.request_id, request.prompt_ids, responses[row], logprobs[row], reason, self._version
                    )
            start, end = end, end + 1

    def _step(self, tokens: torch.Tensor, start: int, context: StaticInferenceContext) -> torch.Tensor:
        """Logits [b, vocabulary] after int64 [b, n] tokens that begin at position ``start``."""
        context.sequence_len_offset = start
        if start > 0:
            context.enable_decode_mode()
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = self._model.gpt(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # One rank's rounding decides for all, or the ranks' tokens could part.
            dist.broadcast(
                logits,
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        return logits[:, -1, : self._model.architecture.vocab_size]

    def _seen(self, tokens: torch.Tensor, end: int, sampling: SamplingParams) -> torch.Tensor | None:
        """bool [b, vocabulary]: ids before position ``end``, for the repetition penalty."""
        if sampling.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(tokens.shape[0], self._model.architecture.vocab_size, dtype=torch.bool, device=tokens.device)
        return seen.scatter_(1, tokens[:, :end], True)
