"""Chooses the `ModelStep` of an engine."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from nemo_style_aligner.generation.embedded.lent_weights import LentWeights
from nemo_style_aligner.generation.embedded.native.native_step import NativeStep
from nemo_style_aligner.generation.embedded.step import EngineShape, ModelStep
from nemo_style_aligner.generation.embedded.torch_step import TorchStep
from nemo_style_aligner.native.compilation import NativeUnavailable

logger = logging.getLogger(__name__)

StepChoice = Literal["auto", "native", "torch"]


def choose_step(choice: StepChoice, shape: EngineShape, device: torch.device, lent: LentWeights) -> ModelStep:
    """The step that ``choice`` asks for, built.

    On a CPU "auto" is the native step or, where that is unavailable, the torch step; on a GPU it is the torch step with
    Triton's kernels where they work. "torch" never uses these kernels.

    Of ``lent`` the torch step takes what it can compute with in place, the native step what it packs at each refit.

    Collective over the tensor-parallel ranks.

    Raises:
        ValueError: there is no such step on this device.
        NativeUnavailable: the native step was asked for and cannot be had; the message says why.
    """
    if choice == "native" and device.type != "cpu":
        raise ValueError(f"step=native runs on the CPU, not on {device}; choose auto or torch")
    if choice != "torch" and device.type == "cpu":
        native, error = _try_native(shape, lent)
        # Ranks that share a model must run the same step: if one cannot run the native step, none does.
        everywhere = shape.tensor_parallel.all_agree(native is not None)
        if native is not None and everywhere:
            return native
        error = error or NativeUnavailable("another rank of the tensor-parallel group cannot run the native step")
        if choice == "native":
            raise error
        logger.warning("generation falls back to the slower torch step: %s", error)
        lent.give_back()
    fallback = TorchStep(shape, device, lent, use_kernels=choice != "torch")
    fallback.build()
    return fallback


def _try_native(shape: EngineShape, lent: LentWeights) -> tuple[NativeStep | None, NativeUnavailable | None]:
    """The native step, or why there is none."""
    try:
        native = NativeStep(shape, lent)
        native.build()
    except NativeUnavailable as error:
        return None, error
    return native, None
