"""Frozen weights beside those of a model in training: the initial policy, the reward model beside the critic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.kinds import Placement
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.offload import WeightOffload

_RESIDENT_SHARE = 1 / 16  # of a device's memory that `auto` spends on a second set of weights


def choose_placement(model: MegatronModel) -> Placement:
    """What ``auto`` means for a second set of ``model``'s weights; the same on every rank."""
    size, layout = model.architecture.num_parameters * model.config.params_dtype.itemsize, model.layout
    return placement_of(size // (layout.tp_size * layout.pp_size))


def placement_of(weights: int) -> Placement:
    """``resident`` or ``swap`` for weights that take so many bytes on a rank.

    On a CPU always ``resident``: swapping keeps two more copies in the same memory. On a GPU ``resident`` where the
    weights take at most a sixteenth of its memory.
    """
    if device().type == "cpu":
        return "resident"
    memory = torch.cuda.get_device_properties(device()).total_memory
    return "resident" if weights <= memory * _RESIDENT_SHARE else "swap"


class FrozenWeights:
    """A model's weights as they were when this was made, ready to be computed with at any time.

    ``swap`` keeps them in CPU memory and exchanges them with the model's own while they are in use. It takes no device
    memory, but each exchange copies weights to the device, and first copies the model's own to the CPU if they may have
    changed. ``resident`` keeps a second model on the device: more memory, no copies. ``auto`` is ``resident`` where
    that costs little (see `choose_placement`).

    Of a model with adapters only these (and a reward head) change: the frozen ones are kept beside them on the device,
    whatever the placement, and take their place without being copied.

    `active` is for occasional use. A caller that uses both sets in turn, like the critic job, calls `enter` and
    `leave` instead, and must call `leave` before anything reads or changes the model's own weights.

    Attributes:
        is_in_place: the model computes with the frozen weights; its own are in CPU memory.
        num_swaps: how often the frozen weights took the place of the model's own.
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
        self._beside: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._second: MegatronModel | None = None
        self._frozen: dict[str, torch.Tensor] = {}
        self._stash: dict[str, torch.Tensor] = {}
        self.num_swaps = 0
        self.is_in_place = False
        self._is_stashed = False  # whether the stash has the model's own weights as they are now
        if model.adapters:
            self._beside = {parameter: parameter.detach().clone() for parameter in model.trained_parameters()}
        elif placement == "resident":
            self._second = build()
            source = dict(model.named_weights())
            with torch.no_grad():
                for name, weight in self._second.named_weights():
                    weight.copy_(source[name])
        else:
            pin = torch.cuda.is_available()
            for name, weight in model.named_weights():
                cpu = torch.empty_like(weight, device="cpu", pin_memory=pin)
                self._frozen[name] = cpu.copy_(weight.detach())
                self._stash[name] = torch.empty_like(cpu, pin_memory=pin)

    @property
    def swaps(self) -> bool:
        """Whether the frozen weights are copied over the model's own, rather than being beside them."""
        return self._second is None and not self._beside

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
        if self._beside:
            if not self.is_in_place:
                self._exchange()
            return self._model
        if not self._is_stashed:
            _copy(dict(self._model.named_weights()), self._stash)
            if device().type == "cuda":
                torch.cuda.current_stream().synchronize()  # from here on the stash is complete, whatever happens next
            self._is_stashed = True
        if not self.is_in_place:
            self.is_in_place = True  # set before copying: `leave` then also undoes a copy that fails half-way
            self._load(self._frozen)
            self.num_swaps += 1
        return self._model

    def leave(self, *, to_change: bool = False) -> None:
        """Bring the model's own weights back, bit for bit, if the frozen ones are in their place.

        Args:
            to_change: the model's own weights may change from now on (by training, or by loading a checkpoint), so the
                next `enter` must copy them again.
        """
        if self.is_in_place and self._beside:
            self._exchange()
        elif self.is_in_place:
            self._load(self._stash)
            self.is_in_place = False
        if to_change:
            self._is_stashed = False

    def _exchange(self) -> None:
        for parameter, other in self._beside.items():
            # Without copies: kept activations still know the values that the parameter has now.
            self._beside[parameter], parameter.data = parameter.data, other
        self.is_in_place = not self.is_in_place

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        # In place: the parameters are views into megatron's contiguous buffers.
        _copy(weights, dict(self._model.named_weights()))


class FrozenModel:
    """A model that is never trained, of any shape, and in use now and then: a reward model, a teacher.

    Args:
        placement: ``swap`` keeps the weights in CPU memory while they are not in use; ``auto``: see `choose_placement`.
    """

    def __init__(self, model: MegatronModel, placement: Placement) -> None:
        self._model = model
        swaps = (choose_placement(model) if placement == "auto" else placement) == "swap"
        self._weights = WeightOffload(model.module, is_frozen=True) if swaps else None
        if self._weights is not None:
            self._weights.offload()

    @property
    def computes_together(self) -> bool:
        """See `MegatronModel.computes_together`."""
        return self._model.computes_together

    @contextlib.contextmanager
    def active(self) -> Iterator[MegatronModel]:
        """The model, on the device until the end of the context."""
        if self._weights is not None:
            self._weights.bring_back()
        yield self._model
        if self._weights is not None:
            self._weights.offload()


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> None:
    """Copy between pinned memory and the device, queued after the device's other work, without waiting for it."""
    for name, values in source.items():
        destination[name].copy_(values, non_blocking=True)
