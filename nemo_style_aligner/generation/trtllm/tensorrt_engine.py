"""The ``engine`` backend: a TensorRT engine inside the trainer's ranks, built once and refitted in every step."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_style_aligner.generation.engine import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    SamplingParams,
    WeightStream,
)
from nemo_style_aligner.generation.stopping import Detokenize, StopCondition, TokenToId
from nemo_style_aligner.generation.trtllm.engine_weights import EngineWeights
from nemo_style_aligner.generation.trtllm.group import EngineGroup
from nemo_style_aligner.generation.trtllm.step_sampler import StepSampler
from nemo_style_aligner.generation.trtllm.tensorrt_library import LogitsProcessor

logger = logging.getLogger(__name__)

_NO_WEIGHTS = -1


class Library(Protocol):
    """What the engine needs of TensorRT-LLM (`TensorRTLibrary`)."""

    def build(self, weights: dict[str, torch.Tensor], engine_dir: Path) -> None: ...

    def load(self, engine_dir: Path) -> Any: ...

    def refit(
        self,
        runner: Any,
        weights: Iterable[tuple[str, torch.Tensor]],
        engine_dir: Path,
        optional: frozenset[str],
    ) -> None: ...

    def decode(
        self,
        runner: Any,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        logits_processor: LogitsProcessor,
    ) -> torch.Tensor: ...

    def free(self) -> None: ...


class TensorRTEngine(GenerationEngine):
    """Generates static batches with a TensorRT engine.

    The ranks of a tensor-parallel group share one engine: they must pass the same requests in the same order. The
    engine itself never pipelines; under pipeline parallelism every stage's tensor-parallel group has an engine with
    all layers.
    """

    def __init__(
        self,
        library: Library,
        weights: EngineWeights,
        initial_weights: Callable[[], WeightStream],
        *,
        num_slots: int,
        max_input_length: int,
        max_sequence_length: int,
        vocab_size: int,
        eos_id: int,
        vocab_limit: int | None = None,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
        group: EngineGroup | None = None,
        engine_dir: Path | None = None,
    ) -> None:
        """Describe the engine; `build` compiles it.

        Args:
            library: TensorRT-LLM.
            weights: converter to its names and this rank's share.
            initial_weights: gives the weights to build with.
            num_slots: sequences per batch.
            max_input_length: longest prompt.
            max_sequence_length: prompt plus response tokens, at most.
            vocab_size: the model's vocabulary.
            eos_id, vocab_limit, detokenize, token_to_id: as for every engine.
            group: the ranks that share the engine.
            engine_dir: where the compiled engine is kept; None: a temporary directory.
        """
        self._library = library
        self._weights = weights
        self._initial_weights = initial_weights
        self._num_slots = num_slots
        self._max_input_length = max_input_length
        self._max_sequence_length = max_sequence_length
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._vocab_limit = vocab_size if vocab_limit is None else vocab_limit
        self._detokenize = detokenize
        self._token_to_id = token_to_id
        self._group = group or EngineGroup()
        self._given_dir = engine_dir
        self._dir: Path | None = None
        self._runner: Any = None
        self._version = _NO_WEIGHTS
        self._num_compilations = 0
        self._statistics = GenerationStatistics()

    def build(self) -> None:
        """Compile a refittable engine from the model's weights, save it and load it. Collective."""
        if self._num_compilations:
            raise RuntimeError("the engine is built already; build() comes once, reload() takes memory back")
        self._dir = Path(self._group.share(str(self._make_directory()) if self._group.is_leader else None))
        weights = {name: tensor.cpu() for name, tensor in self._weights.convert(self._initial_weights())}
        logger.info("building a TensorRT engine in %s", self._dir)
        self._library.build(weights, self._dir)
        self._group.gather(None)  # the leader has written the config that all read
        self._num_compilations = 1
        self._runner = self._library.load(self._dir)

    def refit(self, weights: WeightStream, version: int) -> None:
        if version < 0:
            raise ValueError(f"weight version must not be negative, got {version}")
        runner, directory = self._loaded("refit")
        self._version = _NO_WEIGHTS  # until all are in
        self._library.refit(runner, self._weights.convert(weights), directory, self._weights.optional)
        self._version = version

    def unload(self) -> None:
        """Drop the loaded engine; the compiled one stays on disk. A second call does nothing."""
        if self._runner is None:
            return
        self._runner = None
        self._version = _NO_WEIGHTS
        self._library.free()

    def reload(self) -> None:
        """Load the compiled engine from disk. Its weights are those of the build: refit before generating."""
        if self._runner is not None:
            return
        if self._dir is None:
            raise RuntimeError("reload() before build(): call build() once at start")
        self._runner = self._library.load(self._dir)

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        self._loaded("generate")
        if self._version == _NO_WEIGHTS:
            raise RuntimeError(
                "generate() without whole weights: a refit must succeed after build, reload or a failed one"
            )
        stop = StopCondition(sampling, self._eos_id, self._detokenize, self._token_to_id)
        self._statistics = GenerationStatistics()
        return self._run(iter(requests), sampling, stop)

    def _run(
        self, source: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        while batch := list(itertools.islice(source, self._num_slots)):
            for request in batch:
                request.check(sampling, self._max_sequence_length, self._vocab_size)
                if len(request.prompt_ids) > self._max_input_length:
                    raise ValueError(
                        f"request {request.request_id}: prompt of {len(request.prompt_ids)} tokens, above the "
                        f"trainer.ppo.trt_llm.max_input_len={self._max_input_length} the engine was built for"
                    )
            yield from self._decode(batch, sampling, stop)

    def _decode(
        self, batch: list[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> list[GenerationResult]:
        runner, _ = self._loaded("generate")
        sampler = StepSampler(
            batch,
            sampling,
            stop,
            vocab_size=self._vocab_size,
            vocab_limit=self._vocab_limit,
            statistics=self._statistics,
            agree=self._group.agree,
        )
        prompts = [request.prompt_ids for request in batch]
        ids = self._library.decode(
            runner,
            prompts,
            max_new_tokens=max(request.limit(sampling) for request in batch),
            stop_ids=stop.stop_ids,
            logits_processor=sampler,
        )
        self._statistics.prefill_tokens += sum(map(len, prompts))
        results = sampler.results(self._version)
        for row, result in enumerate(results):
            start = len(result.prompt_ids)
            decoded = ids[row, start : start + len(result.token_ids)].tolist()
            if decoded != result.token_ids:
                raise RuntimeError(
                    f"request {result.request_id}: TensorRT-LLM decoded {decoded[:8]}... where "
                    f"{result.token_ids[:8]}... was sampled: its logits processor was not obeyed"
                )
        return results

    def _make_directory(self) -> Path:
        if self._given_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="trtllm_engine_")  # removed when this process ends
            return Path(self._temporary.name)
        directory = self._given_dir / f"group{self._group.index}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _loaded(self, what: str) -> tuple[Any, Path]:
        if self._dir is None:
            raise RuntimeError(f"{what}() before build(): call build() once at start")
        if self._runner is None:
            raise RuntimeError(f"{what}() while the engine is unloaded: call reload() first")
        return self._runner, self._dir

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_compilations(self) -> int:
        return self._num_compilations

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def statistics(self) -> GenerationStatistics:
        return self._statistics
