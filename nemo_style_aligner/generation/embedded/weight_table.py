"""Refit: writes a stream of named full tensors to their destinations on this rank, and checks them.

The destinations belong to a `ModelStep`, which lays weights out as its kernels want them; none is allocated here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from nemo_style_aligner.generation.engine import WeightStream
from nemo_style_aligner.generation.shard import ModelShard
from nemo_style_aligner.weights.checked import checked
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

RefitCheck = Literal["off", "sampled", "full"]

_SAMPLED_ROWS = 4  # checked of each tensor, about, under refit_check=sampled
_INT8_LIMIT = 127
_FINGERPRINT_CHUNK = 1 << 20  # values hashed at a time: bounds the temporary memory of a full check


class Destination(Protocol):
    """Where this rank's part of one tensor is stored."""

    def write(self, part: torch.Tensor) -> None:
        """Store ``part``, any float dtype and any strides, in the layout of the step."""

    def read(self, rows: slice) -> torch.Tensor:
        """What is stored in ``rows`` (of the first dimension) of the part."""

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """What `read` returns once rows ``part`` are written: cast, or quantised row by row and dequantised."""


@dataclasses.dataclass(frozen=True)
class ViewDestination:
    """A view into a buffer of the step; its leading ``row_dims`` dimensions together are the rows of the part."""

    view: torch.Tensor
    row_dims: int = 1

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        self.view.copy_(part.reshape(self.view.shape))

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        if self.row_dims == 1:
            return self.view[rows]
        sizes = self.view.shape[: self.row_dims]
        return self.view[torch.unravel_index(torch.arange(math.prod(sizes), device=self.view.device)[rows], sizes)]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        return part.to(self.view.device, self.view.dtype)


@dataclasses.dataclass(frozen=True)
class TiedDestination:
    """An embedding, and the int8 output layer that is made of the same tensor."""

    embedding: Destination
    head: Destination

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        self.embedding.write(part)
        self.head.write(part)

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`; the embedding's rows, then the output layer's, in float32."""
        return torch.cat((self.embedding.read(rows).float(), self.head.read(rows)))

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        return torch.cat((self.embedding.as_stored(part).float(), self.head.as_stored(part)))


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``weight`` [rows, in] to integers in [-127, 127], as float32 [rows, in], and float32 scales [rows].

    Symmetric: the largest magnitude of a row becomes 127. A row with NaN or Inf becomes zeros with a scale of NaN; one
    whose scale would be subnormal, and its quotients inexact, becomes zeros.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / _INT8_LIMIT
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    integers = (weight / torch.where(scale == 0, 1.0, scale)[:, None]).round()
    finite = scale.isfinite()
    return integers.masked_fill_(~finite[:, None], 0.0), torch.where(finite, scale, torch.nan)


class LentMatrices(Protocol):
    """Tensors that a refit's stream leaves out: the step copies this rank's parts from the trainer's memory."""

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of these tensors."""

    def write(self) -> None:
        """Copy all of them to their destinations."""

    def num_rows(self, name: str) -> int:
        """Rows of this rank's part of tensor ``name``."""

    def part(self, name: str, rows: slice) -> torch.Tensor:
        """A copy of what `write` reads for ``rows`` of the part of tensor ``name``."""


class WeightTable:
    """The tensors that a refit's stream must bring, those that it must leave out, and their destinations on this rank.

    Attributes:
        shapes: name and full shape of every tensor to bring, in the stream's order.
        destinations: name -> where this rank's part goes.
        lent: tensors that the step reads in the trainer's memory: a stream must leave them out.
    """

    def __init__(
        self,
        shard: ModelShard,
        destinations: Mapping[str, Destination],
        *,
        viewed: frozenset[str] = frozenset(),
        copied: LentMatrices | None = None,
    ) -> None:
        """``viewed`` tensors, which the step uses in place, have no destinations; ``copied`` ones have.

        Raises:
            ValueError: ``destinations`` and ``viewed`` are not exactly the architecture's tensors.
        """
        self._shard = shard
        self._copied = copied
        self.destinations = destinations
        self.lent = viewed if copied is None else viewed | copied.names
        tensors = hf_tensors(weight_layout(shard.architecture))
        known = destinations.keys() | viewed
        if tensors.keys() != known or destinations.keys() & viewed:
            raise ValueError(f"a step and the layout table disagree on {sorted(tensors.keys() ^ known)[:5]}")
        self.shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in self.lent}

    def copy_from(self, stream: WeightStream, check: RefitCheck) -> None:
        """Write the whole stream, and the tensors copied from the trainer, to the destinations.

        With ``check``, the bits of each part (or of a few of its rows) are hashed before it is written, and compared
        with those that its destination holds after the last write.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or of the wrong shape, or the check failed.
                The content is then undefined.
        """
        expected: dict[str, int] = {}
        rows: dict[str, slice] = {}

        def note(name: str, checked_rows: torch.Tensor) -> None:
            expected[name] = _fingerprint(self.destinations[name].as_stored(checked_rows))

        for name, tensor in checked(stream, self.shapes, self._why_unexpected):
            part = self._shard.take(name, tensor.detach())
            if check != "off":
                rows[name] = _checked_rows(len(part), check)
                note(name, part[rows[name]])
            self.destinations[name].write(part)
        if self._copied is not None:
            if check != "off":
                for name in self._copied.names:
                    rows[name] = _checked_rows(self._copied.num_rows(name), check)
                    note(name, self._copied.part(name, rows[name]))
            self._copied.write()
        for name, value in expected.items():
            if _fingerprint(self.destinations[name].read(rows[name])) != value:
                raise ValueError(f"refit: check failed, tensor {name!r} changed while or after it was copied")

    def _why_unexpected(self, name: str) -> str:
        """A hint on why the stream must not bring ``name``."""
        if name in self.lent:
            return "the engine reads it in the trainer's memory: export without the engine's viewed_weights"
        if name == "lm_head.weight":
            return "the engine was built with tied embeddings, so the stream must not bring an output layer"
        if name.endswith(".bias") and name.removesuffix("bias") + "weight" in self.destinations:
            return "the engine was built for an architecture without this bias"
        return "the engine was built for another architecture"


def _checked_rows(num_rows: int, check: RefitCheck) -> slice:
    """All rows, or a few evenly spaced ones with the first among them."""
    return slice(None) if check == "full" else slice(None, None, max(1, num_rows // _SAMPLED_ROWS))


def _fingerprint(tensor: torch.Tensor) -> int:
    """Position-dependent 64-bit hash of all values' bits."""
    flat = tensor.reshape(-1)
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    total = 0
    for start in range(0, bits.numel(), _FINGERPRINT_CHUNK):
        chunk = bits[start : start + _FINGERPRINT_CHUNK].long()
        weight = torch.arange(start, start + chunk.numel(), device=chunk.device) * 2654435761 + 1
        total = (total + int((chunk * weight).sum())) & ((1 << 64) - 1)
    return total


def release(buffers: list[torch.Tensor]) -> None:
    """Free the memory behind ``buffers``; the tensors and their views stay valid objects."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def acquire(buffers: list[torch.Tensor]) -> None:
    """Allocate the memory of released ``buffers`` again; the content is undefined."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
