"""From the actor's config to a TensorRT-LLM engine."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from packaging.version import Version

from nemo_style_aligner.generation.engine import GenerationEngine
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.generation.trtllm.engine_weights import EngineWeights, engine_model
from nemo_style_aligner.generation.trtllm.sidecar.process import sidecar_environment
from nemo_style_aligner.generation.trtllm.sidecar_engine import SidecarEngine, SidecarSettings
from nemo_style_aligner.generation.trtllm.tensorrt_engine import TensorRTEngine
from nemo_style_aligner.generation.trtllm.tensorrt_library import BuildShape, TensorRTLibrary
from nemo_style_aligner.generation.trtllm.versions import (
    PYTORCH_PIN,
    Installation,
    TensorRTLLMUnavailable,
    find_installation,
)
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.weights.stream import export_weights

logger = logging.getLogger(__name__)

_MEBIBYTE = 2**20
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def find_trtllm(cfg: DictConfig) -> Installation:
    """The TensorRT-LLM installation that ``trainer.ppo.trt_llm`` selects.

    Raises:
        TensorRTLLMUnavailable: there is none (see `find_installation`), or no GPU for it.
        TensorRTLLMMismatch: see `find_installation`.
    """
    section = cfg.trainer.ppo.trt_llm
    found = find_installation(section.backend, section.sidecar_python)
    if not torch.cuda.is_available():
        raise TensorRTLLMUnavailable(f"TensorRT-LLM {found.version} is installed, but there is no CUDA device for it")
    return found


def trtllm_engine(cfg: DictConfig, model: MegatronModel, group: EngineGroup, **options: Any) -> GenerationEngine:
    """The engine of this rank's tensor-parallel group, not built yet. Collective.

    Args:
        cfg: the actor's config.
        model: the policy.
        group: the tensor-parallel group.
        options: those common to all engines, see `EngineLifecycle`.

    Raises:
        TensorRTLLMUnavailable, TensorRTLLMMismatch: see `find_trtllm`.
        ValueError: the model, the layout or a setting is not supported; the message says what to change.
    """
    found = find_trtllm(cfg)
    layout = model.layout
    if layout.pp_size > 1:
        logger.warning(
            "TensorRT-LLM runs without pipeline parallelism here: each of the %d tensor-parallel groups generates with "
            "all layers, whether trainer.ppo.trt_llm.reshard is set or not; a GPU holds %d times the weights of its "
            "stage",
            layout.dp_size * layout.pp_size,
            layout.pp_size,
        )
    hosts = set(group.gather(socket.gethostname()))
    if len(hosts) > 1:
        raise ValueError(
            f"a tensor-parallel group is on {sorted(hosts)}: TensorRT-LLM needs each group on one machine; "
            "lower model.tensor_model_parallel_size or set trainer.ppo.generation.engine=embedded"
        )
    if found.backend == "engine":
        return _tensorrt_engine(cfg, model, group, options)
    return _sidecar_engine(cfg, model, group, found, options)


def _tensorrt_engine(
    cfg: DictConfig, model: MegatronModel, group: EngineGroup, options: dict[str, Any]
) -> TensorRTEngine:
    section = cfg.trainer.ppo.trt_llm
    a, dtype, ranks = model.architecture, model.config.params_dtype, group.tensor_parallel
    visible = torch.cuda.device_count()
    if visible < ranks.size:
        # Each rank asks CUDA whether devices 0 to size - 1 reach each other, and fails where it does not have them.
        raise ValueError(
            f"this rank sees {visible} of the {ranks.size} GPUs of its engine, and TensorRT-LLM needs all: have each "
            "rank see all GPUs of the node (srun without --gpus-per-task), or set "
            "trainer.ppo.generation.engine=embedded"
        )
    max_input_length = min(int(section.max_input_len), options["max_sequence_length"] - 1)
    shape = BuildShape(
        model=engine_model(a, str(section.model_type), dtype),
        max_batch_size=options["num_slots"],
        max_input_len=max_input_length,
        max_seq_len=options["max_sequence_length"],
        tp_size=ranks.size,
        tp_rank=ranks.rank,
        gpus_per_node=visible,
        group_index=group.index,
    )
    weights = EngineWeights(a, dtype=dtype, tp_size=ranks.size, tp_rank=ranks.rank)
    return TensorRTEngine(
        TensorRTLibrary(shape, world_size=dist.get_world_size()),
        weights,
        lambda: export_weights(model),
        max_input_length=max_input_length,
        vocab_size=a.vocab_size,
        group=group,
        engine_dir=Path(section.engine_dir) if section.engine_dir else None,
        **options,
    )


def _check_what_the_sidecar_can(cfg: DictConfig, version: str) -> None:
    """Refuse settings that the sidecar cannot honour.

    Its log-probs are of the logits at temperature 1, after the bias that holds stop tokens back at first.

    Raises:
        ValueError: settings that need other log-probs, or a repetition penalty, which this version silently ignores.
    """
    ppo, backend = cfg.trainer.ppo, "trainer.ppo.trt_llm.backend=pytorch"
    asked = [key for key in ("importance_weight_cap", "importance_sequence_bounds") if ppo.get(key) is not None]
    if ppo.policy_logprobs == "engine":
        asked.append("policy_logprobs=engine")
    if asked:
        names = ", ".join(f"trainer.ppo.{name}" for name in asked)
        raise ValueError(
            f"{names} cannot be used with {backend}: its log-probs are not those of the policy as it samples"
        )
    if float(cfg.model.ppo.sampling_params.repetition_penalty) != 1.0 and Version(version) < Version(PYTORCH_PIN):
        raise ValueError(
            f"model.ppo.sampling_params.repetition_penalty: TensorRT-LLM {version} ignores it with {backend}; "
            f"install {PYTORCH_PIN} or newer"
        )


def _sidecar_engine(
    cfg: DictConfig, model: MegatronModel, group: EngineGroup, found: Installation, options: dict[str, Any]
) -> SidecarEngine:
    section = cfg.trainer.ppo.trt_llm
    _check_what_the_sidecar_can(cfg, found.version)
    for variable in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise ValueError(
                f"{variable} turns expandable segments on, whose memory cannot be shared with another process: remove "
                "expandable_segments from it to use trainer.ppo.trt_llm.backend=pytorch"
            )
    device = torch.cuda.current_device()
    devices = group.gather((_visible_device(device), f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    entries = [entry for entry, _ in devices]
    if len(set(entries)) < len({uuid for _, uuid in devices}):
        raise ValueError(
            f"the ranks of an engine see their GPUs as {', '.join(entries)}, each in a numbering of its own, by which "
            "the sidecar cannot find them: have each rank see all GPUs of the node (srun without --gpus-per-task)"
        )
    settings = SidecarSettings(
        python=found.python,
        environment=sidecar_environment(os.environ, entries),
        device_uuids=tuple(uuid for _, uuid in devices),
        sleep=bool(section.unload_engine_train),
        kv_cache_memory_fraction=float(section.kv_cache_memory_fraction),
        bucket_bytes=int(section.refit_bucket_mebibytes) * _MEBIBYTE,
        max_restarts=int(section.max_restarts),
        start_seconds=float(section.timeouts.start_seconds),
        refit_seconds=float(section.timeouts.refit_seconds),
        request_seconds=float(section.timeouts.request_seconds),
        ping_seconds=float(section.timeouts.ping_seconds),
    )
    # Under pipeline parallelism other groups take part in an export, and do not know that this one lost its sidecar.
    recoverable = model.layout.pp_size == 1
    return SidecarEngine(
        model.architecture,
        settings,
        dtype=model.config.params_dtype,
        group=group,
        recover_weights=(lambda: export_weights(model)) if recoverable else None,
        **options,
    )


def _visible_device(index: int) -> str:
    """This process's device number ``index`` as an entry of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    entry = visible.split(",")[index].strip() if visible else str(index)
    if not entry.isdigit():
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible} names devices by {entry}: TensorRT-LLM's workers need numbers there"
        )
    return entry
