"""The ``engine`` backend: a TensorRT engine inside the trainer's ranks, built once and refitted in every step."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_style_aligner.generation.engine import GenerationRequest, GenerationResult, SamplingParams, WeightStream
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.generation.lifecycle import EngineLifecycle
from nemo_style_aligner.generation.stopping import StopCondition
from nemo_style_aligner.generation.trtllm.engine_weights import EngineWeights
from nemo_style_aligner.generation.trtllm.step_sampler import StepSampler
from nemo_style_aligner.generation.trtllm.tensorrt_library import LogitsProcessor
from nemo_style_aligner.trusted_paths import own_folder, temporary_base

logger = logging.getLogger(__name__)


class Library(Protocol):
    """What the engine needs of TensorRT-LLM (`TensorRTLibrary`)."""

    def build(self, weights: dict[str, torch.Tensor], engine_dir: Path) -> None:
        """Compile a refittable engine and save this rank's part of it in ``engine_dir``.

        Args:
            weights: this rank's parts of all `EngineWeights.shapes`, of the engine's dtype, contiguous, on the CPU.
            engine_dir: exists; the same on every rank of the group.

        Raises:
            RuntimeError: the engine cannot be built.
        """
        ...

    def load(self, engine_dir: Path) -> Any:
        """Load the engine that `build` saved; returns a runner for `refit` and `decode`."""
        ...

    def refit(
        self,
        runner: Any,
        weights: Iterable[tuple[str, torch.Tensor]],
        engine_dir: Path,
        optional: frozenset[str],
    ) -> None:
        """Replace all weights of a loaded engine. ``weights`` is read to its end before the engine is touched.

        Args:
            runner: from `load`.
            weights: what `EngineWeights.convert` yields, on any device.
            engine_dir: where `build` saved the engine.
            optional: names of weights that the engine may lack.

        Raises:
            ValueError: the engine has a weight that is not given, or lacks a given one that is not optional.
            RuntimeError: a tensor, or the refit, was refused, or the engine cannot be refitted.
        """
        ...

    def decode(
        self,
        runner: Any,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        logits_processor: LogitsProcessor,
    ) -> torch.Tensor:
        """Decode one batch greedily from the logits that ``logits_processor`` returns.

        Args:
            runner: from `load`.
            prompts: one for each row of the batch.
            max_new_tokens: limit of the longest response.
            stop_ids: a row ends with any of them; decoding ends early when all rows have ended.
            logits_processor: called once per step, with the number of tokens chosen before, the ids (unused) and the
                logits [batch, vocabulary with padding] of any float dtype; returns the logits to choose from. See
                `StepSampler.__call__`.

        Returns:
            ids, integers [batch, prompt and response]: row i's response starts at ``len(prompts[i])``, stop token
            included.

        Raises:
            RuntimeError: TensorRT-LLM returned no ids.
            Exception: what ``logits_processor`` raises.
        """
        ...

    def free(self) -> None:
        """Release the memory of what is no longer referenced, such as a runner that was dropped."""
        ...


class TensorRTEngine(EngineLifecycle):
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
        max_input_length: int,
        vocab_size: int,
        group: EngineGroup | None = None,
        engine_dir: Path | None = None,
        **options: Any,
    ) -> None:
        """Describe the engine; `build` compiles it.

        Args:
            library: TensorRT-LLM.
            weights: converts streams to TensorRT-LLM's names and this rank's share.
            initial_weights: gives the weights to build with.
            max_input_length: longest prompt.
            vocab_size: the model's vocabulary.
            group: the ranks that share the engine.
            engine_dir: where the compiled engine is kept; None: a temporary directory.
            options: those common to all engines, see `EngineLifecycle`; ``num_slots`` is the size of a batch.
        """
        super().__init__(vocab_size, **options)
        self._library = library
        self._weights = weights
        self._initial_weights = initial_weights
        self._max_input_length = max_input_length
        self._group = group or EngineGroup()
        self._given_dir = engine_dir
        self._dir: Path
        self._runner: Any = None

    def _build(self) -> None:
        """Compile a refittable engine from the model's weights, save it and load it. Collective."""
        self._dir = Path(self._group.share(str(self._make_directory()) if self._group.is_leader else None))
        weights = {name: tensor.cpu() for name, tensor in self._weights.convert(self._initial_weights())}
        logger.info("building a TensorRT engine in %s", self._dir)
        self._library.build(weights, self._dir)
        self._group.gather(None)  # wait until the leader has written the config that all ranks read
        self._num_compilations = 1
        self._reload()

    def _refit(self, weights: WeightStream) -> None:
        self._library.refit(self._runner, self._weights.convert(weights), self._dir, self._weights.optional)

    def _unload(self) -> None:
        """Drop the loaded engine; the compiled one stays on disk."""
        self._runner = None
        self._library.free()

    def _reload(self) -> None:
        """Load the compiled engine from disk, with the weights of the build."""
        self._runner = self._library.load(self._dir)

    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        while batch := list(itertools.islice(requests, self._num_slots)):
            for request in batch:
                self._check(request, sampling)
                if len(request.prompt_token_ids) > self._max_input_length:
                    raise ValueError(
                        f"request {request.request_id}: prompt of {len(request.prompt_token_ids)} tokens, above the "
                        f"trainer.ppo.trt_llm.max_input_len={self._max_input_length} the engine was built for"
                    )
            for part in self._fitting(batch, sampling):
                yield from self._decode(part, sampling, stop)

    def _fitting(self, batch: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[GenerationRequest]]:
        """Split ``batch``: TensorRT-LLM wants room for the longest prompt plus the longest response of each part."""
        part: list[GenerationRequest] = []
        for request in batch:
            grown = [*part, request]
            room = max(len(r.prompt_token_ids) for r in grown) + max(r.limit(sampling) for r in grown)
            if part and room > self._max_sequence_length:
                yield part
                grown = [request]
            part = grown
        yield part

    def _decode(
        self, batch: list[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> list[GenerationResult]:
        sampler = StepSampler(
            batch,
            sampling,
            stop,
            vocab_size=self._vocab_size,
            vocab_limit=self._vocab_limit,
            statistics=self._statistics,
            agree=self._group.agree,
        )
        prompts = [request.prompt_token_ids for request in batch]
        ids = self._library.decode(
            self._runner,
            prompts,
            max_new_tokens=max(request.limit(sampling) for request in batch),
            stop_ids=stop.stop_ids,
            logits_processor=sampler,
        )
        self._statistics.prefill_tokens += sum(map(len, prompts))
        results = sampler.results(self._weight_version)
        for row, result in enumerate(results):
            start = len(result.prompt_token_ids)
            decoded = ids[row, start : start + len(result.token_ids)].tolist()
            if decoded != result.token_ids:
                raise RuntimeError(
                    f"request {result.request_id}: TensorRT-LLM decoded {decoded[:8]}... where "
                    f"{result.token_ids[:8]}... was sampled: it ignored its logits processor"
                )
        return results

    def _make_directory(self) -> Path:
        if self._given_dir is None:
            # Removed when this process ends.
            self._temporary = tempfile.TemporaryDirectory(prefix="trtllm_engine_", dir=temporary_base())
            return Path(self._temporary.name)
        directory = self._given_dir / f"group{self._group.index}"
        os.close(own_folder(directory, make=0o775))  # what lies in it is loaded
        return directory
