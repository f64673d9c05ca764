"""From the actor's config to a TensorRT-LLM engine."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from nemo_style_aligner.generation.engine import GenerationEngine
from nemo_style_aligner.generation.trtllm.versions import (
    Installation,
    TensorRTLLMUnavailable,
    find_installation,
    install_command,
)
from nemo_style_aligner.models.gpt import MegatronModel


def find_trtllm(cfg: DictConfig) -> Installation:
    """The TensorRT-LLM that ``trainer.ppo.trt_llm`` means.

    Raises:
        TensorRTLLMUnavailable, TensorRTLLMMismatch: see `find_installation`; also where there is no GPU.
    """
    section = cfg.trainer.ppo.trt_llm
    found = find_installation(section.backend, section.sidecar_python)
    if not torch.cuda.is_available():
        raise TensorRTLLMUnavailable(f"TensorRT-LLM {found.version} is installed, but there is no CUDA device for it")
    return found


def trtllm_engine(cfg: DictConfig, model: MegatronModel, **options: Any) -> GenerationEngine:
    """The engine for this rank, not built yet. ``options`` are those of every engine (see `MegatronEngine`)."""
    found = find_trtllm(cfg)
    raise TensorRTLLMUnavailable(f"the {found.backend} backend is not here yet; {install_command(found.backend)}")
