"""Which `ModelStep` runs an engine."""

from __future__ import annotations

from typing import Literal

import torch

from nemo_style_aligner.generation.embedded.step import EngineShape, ModelStep
from nemo_style_aligner.generation.embedded.torch_step import TorchStep

StepChoice = Literal["auto", "native", "torch"]


def choose_step(choice: StepChoice, shape: EngineShape, device: torch.device) -> ModelStep:
    """The step that ``choice`` asks for, not built yet.

    Raises:
        ValueError: there is no such step, or not here.
    """
    if choice in ("auto", "torch"):
        return TorchStep(shape, device)
    raise ValueError(f"trainer.ppo.generation.step={choice!r} is not available here; choose auto or torch")
