"""Products of linear layers in bf16 on CPUs where our kernels are faster than torch's library (`products.own_kernels`).

They want weights rearranged. A weight that is trained is rearranged once for all micro batches of a pass
(`constant_weights`), a frozen model's once and for all (`PackedWeight`), both only where memory has room for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.parallel.machine import available_memory, ranks_on_this_machine
from nemo_style_aligner.trainer.models.layer_kernels import LayerKernels
from nemo_style_aligner.trainer.models.products import own_kernels, product

_PACKED_SHARE = 1 / 16
"""Share of the memory free before the first weight is packed, for packed weights of all ranks on this machine: those of
frozen models together, and those of each pass."""
_FEWEST_ROWS = 32
"""With fewer, torch's library multiplies: rearranging a weight would take longer than the product."""


def weight_product(
    a: torch.Tensor, weight: torch.Tensor, *, transposed: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a [..., k] @ weight.T -> [..., n] (``transposed``), or a [..., n] @ weight -> [..., k]. Not differentiable.

    Args:
        weight: [n, k], of a's dtype.
        out: contiguous; where the result goes.
    """
    kernels = _kernels_for(a, weight, transposed)
    if kernels is None:
        return product(a, weight.t() if transposed else weight, out=out)
    packed = None if _pass is None else _pass.packed(kernels, weight, transposed)
    if packed is None:
        packed = kernels.packed(weight, transposed)
    return kernels.multiply_packed(a, packed, weight.shape[0 if transposed else 1], out)


class PackedWeight:
    """A copy of a frozen weight as our kernels want it. Results have the same bits as those of `weight_product`."""

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None
        self._packed_of: tuple[int, int] | None = None  # address and version of the weight that was packed

    def multiply(self, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """a [..., k] @ weight.T -> [..., n], of their dtype. Not differentiable."""
        kernels = _kernels_for(a, weight, transposed=True)
        if kernels is None:
            return product(a, weight.t())
        now = (weight.data_ptr(), weight._version)
        if self._packed_of != now:
            if self._packed is not None or _takes_memory(weight.nbytes):
                self._packed = kernels.packed(weight, True)
            self._packed_of = now
        if self._packed is None:
            return weight_product(a, weight, transposed=True)
        return kernels.multiply_packed(a, self._packed, len(weight))


# ---- weights that are trained -------------------------------------------------------------------


@dataclasses.dataclass
class _Pass:
    """Weights rearranged since a pass began, by address, shape and whether they are transposed."""

    room: float  # bytes
    weights: dict[tuple[int, torch.Size, bool], torch.Tensor] = dataclasses.field(default_factory=dict)

    def packed(self, kernels: LayerKernels, weight: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """None where memory has no room for one more."""
        key = (weight.data_ptr(), weight.shape, transposed)
        if key not in self.weights:
            if weight.nbytes > self.room:
                return None
            self.room -= weight.nbytes
            self.weights[key] = kernels.packed(weight, transposed)
        return self.weights[key]


_pass: _Pass | None = None


@contextlib.contextmanager
def constant_weights(num_micro_batches: int) -> Iterator[None]:
    """A pass that changes no weight: each one is rearranged once for all of its micro batches, if there are several."""
    global _pass
    if _pass is not None or num_micro_batches < 2 or device().type != "cpu" or own_kernels() is None:
        yield
        return
    _pass = _Pass(_room())
    try:
        yield
    finally:
        _pass = None


# ---- who multiplies -----------------------------------------------------------------------------


def _kernels_for(a: torch.Tensor, weight: torch.Tensor, transposed: bool) -> LayerKernels | None:
    """The kernels that multiply these; None where torch does."""
    is_bf16 = all(x.device.type == "cpu" and x.dtype == torch.bfloat16 for x in (a, weight))
    depth = weight.shape[1 if transposed else 0]
    if not is_bf16 or a.numel() < _FEWEST_ROWS * depth or not weight.is_contiguous():
        return None
    kernels = own_kernels()
    return kernels if kernels is not None and depth % kernels.depth_step == 0 else None


def _room() -> float:
    """Bytes of the memory that is free now which a rank may fill with packed weights."""
    return _PACKED_SHARE * available_memory() / ranks_on_this_machine()


_room_for_packed: float | None = None


def _takes_memory(size: int) -> bool:
    """Whether there is room for ``size`` more bytes of packed frozen weights; if so, reserve them."""
    global _room_for_packed
    if _room_for_packed is None:
        _room_for_packed = _room()
    if size > _room_for_packed:
        return False
    _room_for_packed -= size
    return True
