"""Every call into ``tensorrt_llm`` (<= 1.2.1) and ``tensorrt``: build, load, refit, decode.

Neither is imported before a `TensorRTLibrary` is created. The signatures these calls were written against are in
``tests/data/trtllm_signatures.json``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.generation.trtllm.engine_weights import EngineModel

DISABLED_ID = -1  # an end or padding id that no token has

LogitsProcessor = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

_CONSTANTS_FILE = "constants_rank{rank}.json"
_TRT_DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildShape:
    """What an engine is compiled for.

    Attributes:
        model: TensorRT-LLM's names for the model.
        max_batch_size: sequences decoded at the same time.
        max_input_len: longest prompt.
        max_seq_len: longest prompt plus response.
        tp_size, tp_rank: tensor-parallel ranks of the engine and this one's number among them.
        gpus_per_node: GPUs of this machine.
        group_index: number of this tensor-parallel group among all of the job.
    """

    model: EngineModel
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    tp_size: int = 1
    tp_rank: int = 0
    gpus_per_node: int = 1
    group_index: int = 0


class TensorRTLibrary:
    """Implements `tensorrt_engine.Library` for one rank.

    At most one per process: it splits TensorRT-LLM's MPI communicators by tensor-parallel group.
    """

    def __init__(self, shape: BuildShape, world_size: int = 1) -> None:
        """Import the library.

        Args:
            shape: what to compile for.
            world_size: ranks of the job.

        Raises:
            RuntimeError: tensor parallelism or MPI is in use, but MPI does not span all ranks of the job.
        """
        # The job has chosen each rank's GPU; TensorRT-LLM would choose by its own rank.
        os.environ["DISABLE_TORCH_DEVICE_SET"] = "1"
        import tensorrt
        import tensorrt_llm

        self._trt = tensorrt
        self._llm = tensorrt_llm
        self._shape = shape
        self._split_communicators(world_size)

    def build(self, weights: Mapping[str, torch.Tensor], engine_dir: Path) -> None:
        """See `Library.build`."""
        from tensorrt_llm.builder import BuildConfig, build
        from tensorrt_llm.plugin import PluginConfig

        shape = self._shape
        config = getattr(self._llm.models, shape.model.config_class)(mapping=self._mapping(), **shape.model.config)
        model = getattr(self._llm.models, shape.model.model_class).from_config(config)
        model.load(dict(weights))
        plugins = PluginConfig()
        plugins.gpt_attention_plugin = "auto"
        plugins.gemm_plugin = "auto"
        plugins.paged_kv_cache = False  # the Python runtime calls its paged cache experimental
        plugins.use_paged_context_fmha = False
        plugins.use_fused_mlp = False  # keeps mlp.fc and mlp.gate apart, under the names a refit gives
        build_config = BuildConfig(
            max_input_len=shape.max_input_len,
            max_seq_len=shape.max_seq_len,
            max_batch_size=shape.max_batch_size,
            max_beam_width=1,
            max_num_tokens=shape.max_batch_size * shape.max_input_len,  # all prompts of a batch at once
            use_refit=True,
            output_timing_cache=str(engine_dir / "timing.cache"),  # else in the directory in which the job was started
            plugin_config=plugins,
        )
        # Tables that TensorRT-LLM computes from the config (rotary embeddings) are refittable like weights; nobody
        # trains them, and they stay as they were built.
        constants = sorted(name for name, parameter in model.named_parameters() if parameter.is_buffer)
        engine = build(model, build_config)
        if engine.engine is None:
            raise RuntimeError("TensorRT could not build the engine; its log above says why")
        engine.save(str(engine_dir))
        (engine_dir / _CONSTANTS_FILE.format(rank=shape.tp_rank)).write_text(json.dumps(constants))

    def load(self, engine_dir: Path) -> Any:
        """See `Library.load`: a ``ModelRunner``, on the current device."""
        from tensorrt_llm.builder import Engine
        from tensorrt_llm.runtime import ModelRunner

        engine = Engine.from_dir(str(engine_dir), self._shape.tp_rank)
        return ModelRunner.from_engine(
            engine,
            max_output_len=None,
            lora_dir=None,
            rank=self._shape.tp_rank,
            debug_mode=False,
            lora_ckpt_source="hf",
            medusa_choices=None,
            # Given none, TensorRT-LLM makes a stream and leaves it set as this process's current one.
            stream=torch.cuda.current_stream() if torch.cuda.is_available() else None,
            gpu_weights_percent=1.0,
            enable_context_fmha_fp32_acc=None,
            multi_block_mode=None,
        )

    def refit(
        self,
        runner: Any,
        weights: Iterable[tuple[str, torch.Tensor]],
        engine_dir: Path,
        optional: frozenset[str] = frozenset(),
    ) -> None:
        """See `Library.refit`. Tensors are collected on the CPU: TensorRT reads them when the last one is there."""
        from tensorrt_llm.logger import logger

        trt = self._trt
        engine = runner.session.runtime.engine
        if not engine.refittable:
            raise RuntimeError("the TensorRT engine was not built for refitting")
        constants = json.loads((engine_dir / _CONSTANTS_FILE.format(rank=self._shape.tp_rank)).read_text())
        refitter = trt.Refitter(engine, logger.trt_logger)
        required = set(refitter.get_all_weights()) - set(constants)
        held: dict[str, torch.Tensor] = {}  # alive until the refit is done: TensorRT keeps pointers only
        for name, tensor in weights:
            held[name] = tensor.detach().to("cpu")
        missing = sorted(required - held.keys())
        unknown = sorted(held.keys() - required - optional)
        if missing or unknown:
            raise ValueError(
                f"refit: the TensorRT engine and the weights do not match. Only in the engine: {missing[:5]} "
                f"({len(missing)}); only in the weights: {unknown[:5]} ({len(unknown)})"
            )
        for name in sorted(required):
            tensor = held[name]
            data = trt.Weights(getattr(trt.DataType, _TRT_DTYPES[tensor.dtype]), tensor.data_ptr(), tensor.numel())
            if not refitter.set_named_weights(name, data, trt.TensorLocation.HOST):
                raise RuntimeError(
                    f"refit: TensorRT refused {name} of shape {tuple(tensor.shape)} and {tensor.dtype}: not what the "
                    "engine was built with"
                )
        unset = sorted(set(refitter.get_missing_weights()) - set(constants))
        if unset:
            raise RuntimeError(f"refit: TensorRT still has no weights for {unset[:5]} ({len(unset)})")
        if not refitter.refit_cuda_engine():
            raise RuntimeError("refit: TensorRT refused to refit the engine; its log above says why")

    def decode(
        self,
        runner: Any,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        logits_processor: LogitsProcessor,
    ) -> torch.Tensor:
        """See `Library.decode`.

        The end id is disabled and stop tokens are passed as stop words: only then does TensorRT-LLM count them in a
        response's length.
        """
        from tensorrt_llm.runtime import SamplingConfig

        sampling = SamplingConfig(
            end_id=DISABLED_ID,
            pad_id=DISABLED_ID,
            max_new_tokens=max_new_tokens,
            top_k=1,
            stop_words_list=stop_words(stop_ids, len(prompts)) if stop_ids else None,
            return_dict=True,
            output_sequence_lengths=True,
        )
        outputs = runner.generate(
            batch_input_ids=[torch.tensor(prompt, dtype=torch.int32) for prompt in prompts],
            sampling_config=sampling,
            streaming=False,
            logits_processor=logits_processor,
        )
        if not outputs or outputs.get("output_ids") is None:
            raise RuntimeError("TensorRT-LLM returned no tokens: engines with pipeline parallelism are not supported")
        ids: torch.Tensor = outputs["output_ids"]
        return ids[:, 0].cpu()  # beam 0 of 1

    @staticmethod
    def free() -> None:
        """See `Library.free`."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _mapping(self) -> Any:
        shape = self._shape
        return self._llm.Mapping(
            world_size=shape.tp_size,
            rank=shape.tp_rank,
            gpus_per_node=shape.gpus_per_node,
            tp_size=shape.tp_size,
            pp_size=1,
        )

    def _split_communicators(self, world_size: int) -> None:
        """One MPI communicator per tensor-parallel group, in C++ (the plugins' collectives) and in Python."""
        from tensorrt_llm import _utils, bindings

        found = _utils.mpi_world_size()
        if found == self._shape.tp_size == 1:
            return  # launched without MPI, and the engine has this rank alone
        if found != world_size:
            raise RuntimeError(
                f"TensorRT engines need MPI over all {world_size} ranks of the job, but it has {found}: start it with "
                "mpirun or srun --mpi=pmix"
            )
        bindings.MpiComm.split(self._shape.group_index, self._shape.tp_rank)
        _utils.set_mpi_comm(_utils.mpi_comm().Split(color=self._shape.group_index, key=self._shape.tp_rank))


def stop_words(stop_ids: tuple[int, ...], batch_size: int) -> np.ndarray:
    """TensorRT-LLM's list of one-token words, int32 [batch, 2, n]: first the ids, then the words' ends (1 to n)."""
    ends = range(1, len(stop_ids) + 1)
    return np.tile(np.array([stop_ids, ends], dtype=np.int32), (batch_size, 1, 1))
