"""Which `ModelStep` runs an engine."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from nemo_style_aligner.generation.embedded.native.library import NativeUnavailable
from nemo_style_aligner.generation.embedded.native.native_step import NativeStep
from nemo_style_aligner.generation.embedded.step import EngineShape, ModelStep
from nemo_style_aligner.generation.embedded.torch_step import TorchStep

logger = logging.getLogger(__name__)

StepChoice = Literal["auto", "native", "torch"]


def choose_step(choice: StepChoice, shape: EngineShape, device: torch.device) -> ModelStep:
    """The step that ``choice`` asks for, built. "auto" on a CPU is the native step, or torch where that cannot be had.

    Raises:
        ValueError: there is no such step, or not on this device.
        NativeUnavailable: the native step was asked for and cannot be had; the message says why.
    """
    if choice not in ("auto", "native", "torch"):
        raise ValueError(f"trainer.ppo.generation.step={choice!r} is not auto, native or torch")
    if choice == "native" and device.type != "cpu":
        raise ValueError(f"trainer.ppo.generation.step=native runs on the CPU, not on {device}; choose auto or torch")
    if choice != "torch" and device.type == "cpu":
        try:
            native = NativeStep(shape)
            native.build()
            return native
        except NativeUnavailable as error:
            if choice == "native":
                raise
            logger.warning("generation falls back to the slower torch step: %s", error)
    fallback = TorchStep(shape, device)
    fallback.build()
    return fallback
