"""A second, frozen set of weights for a model.

The initial policy beside the actor, the reward model beside the critic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
    device memory, a copy to the device for each exchange, and one of the model's own weights to the CPU where they may
    have changed. ``resident`` keeps a second model on the device: its memory, no copies. ``auto`` is ``resident`` where
    that costs little (see `choose_placement`).

    `active` is for who uses them now and then. Who uses both sets in turn, as the critic job, calls `enter` and
    `leave`, and leaves before anything reads or changes the model's own weights.

    Attributes:
        is_in_place: the model computes with the frozen weights; its own are in CPU memory.
        num_swaps: how often they took the place of the model's own.
    """

    def __init__(self, model: MegatronModel, placement: Placement, build: Callable[[], MegatronModel]) -> None:
        """Freeze ``model``'s present weights.

        Args:
            model: the model whose weights go on changing.
            placement: see above.
            build: makes a second model of the same shape, without training state (for ``resident``).
        """
        if placement == "auto":
            placement = choose_placement(model)
        self._model = model
        self._second: MegatronModel | None = None
        self._frozen: dict[str, torch.Tensor] = {}
        self._stash: dict[str, torch.Tensor] = {}
        self.num_swaps = 0
        self.is_in_place = False
        self._is_stashed = False  # whether the stash has the model's own weights as they are now
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

    @property
    def swaps(self) -> bool:
        """Whether the frozen weights take the place of the model's own, rather than having one of their own."""
        return self._second is None

    @contextlib.contextmanager
    def active(self) -> Iterator[MegatronModel]:
        """A model that computes with the frozen weights; the model's own are back, bit for bit, afterwards."""
        try:
            yield self.enter()
        finally:
            self.leave(to_change=True)

    def enter(self) -> MegatronModel:
        """A model that computes with the frozen weights, until `leave`."""
        if self._second is not None:
            return self._second
        if not self._is_stashed:
            _copy(dict(self._model.named_parameters()), self._stash)
            if device().type == "cuda":
                torch.cuda.current_stream().synchronize()  # all of the stash is there, whatever comes next
            self._is_stashed = True
        if not self.is_in_place:
            self.is_in_place = True  # from the first parameter on: an error in between is undone by `leave`
            self._load(self._frozen)
            self.num_swaps += 1
        return self._model

    def leave(self, *, to_change: bool = False) -> None:
        """Bring the model's own weights back, bit for bit, if they are not in their place.

        Args:
            to_change: they may change from now on (training, a checkpoint), so that the next `enter` copies them again.
        """
        if self.is_in_place:
            self._load(self._stash)
            self.is_in_place = False
        if to_change:
            self._is_stashed = False

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        # In place: the parameters are views into megatron's contiguous buffers.
        _copy(weights, dict(self._model.named_parameters()))


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> None:
    """Between pinned memory and the device, in the order of the device's work, which nobody waits for here."""
    for name, values in source.items():
        destination[name].copy_(values, non_blocking=True)
