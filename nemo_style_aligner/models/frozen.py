"""A second, frozen set of weights for a model.

The initial policy beside the actor, the reward model beside the critic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import device

Placement = Literal["auto", "swap", "resident"]

_RESIDENT_SHARE = 1 / 16  # of a device's memory that `auto` spends on a second set of weights


def choose_placement(model: MegatronModel) -> Placement:
    """``resident`` or ``swap`` for a second set of ``model``'s weights; the same on every rank.

    On a CPU always ``resident``: swapping keeps two more copies in the same memory. On a GPU ``resident`` where the
    weights of a rank take at most a sixteenth of its memory.
    """
    if device().type == "cpu":
        return "resident"
    layout = model.layout
    weights = (
        model.architecture.num_parameters * model.config.params_dtype.itemsize // (layout.tp_size * layout.pp_size)
    )
    memory = torch.cuda.get_device_properties(device()).total_memory
    return "resident" if weights <= memory * _RESIDENT_SHARE else "swap"


class FrozenWeights:
    """The weights a model had when this was made, usable whenever they are wanted.

    ``swap`` keeps them in CPU memory and exchanges them with the model's own while they are in use: no
    device memory, two copies per use. ``resident`` keeps a second model on the device: its memory, no copies.
    ``auto`` is ``resident`` where that costs little (see `choose_placement`).
    """

    def __init__(self, model: MegatronModel, placement: Placement, build: Callable[[], MegatronModel]) -> None:
        """Freeze ``model``'s present weights.

        Args:
            model: the model whose weights go on changing.
            placement: see above.
            build: makes a second model of the same shape, without training state (for ``resident``).
        """
        if placement not in ("auto", "swap", "resident"):
            raise ValueError(f"placement {placement!r}: choose auto, swap or resident")
        if placement == "auto":
            placement = choose_placement(model)
        self._model = model
        self._second: MegatronModel | None = None
        self._frozen: dict[str, torch.Tensor] = {}
        self._stash: dict[str, torch.Tensor] = {}
        self.num_swaps = 0
        if placement == "resident":
            self._second = build()
            source = dict(model.named_parameters())
            with torch.no_grad():
                for name, parameter in self._second.named_parameters():
                    parameter.copy_(source[name])
        else:
            pin = torch.cuda.is_available()
            for name, parameter in model.named_parameters():
                cpu = torch.empty_like(parameter, device="cpu", pin_memory=pin)
                self._frozen[name] = cpu.copy_(parameter.detach())
                self._stash[name] = torch.empty_like(cpu, pin_memory=pin)

    @contextlib.contextmanager
    def active(self) -> Iterator[MegatronModel]:
        """A model that computes with the frozen weights; the model's own are back, bit for bit, afterwards."""
        if self._second is not None:
            yield self._second
            return
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            # Copy in place: the parameters are views into megatron's contiguous buffers.
            for name, parameter in parameters.items():
                self._stash[name].copy_(parameter)
                parameter.copy_(self._frozen[name])
        self.num_swaps += 1
        try:
            yield self._model
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(self._stash[name])
