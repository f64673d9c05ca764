"""Where a refit's tensors go in the native step: panels of matrices, lanes of biases."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from nemo_style_aligner.engine.embedded.native.structures import Context, PackArguments
from nemo_style_aligner.engine.embedded.weight_table import Rows

PANEL = 32  # output features per panel, as in panels.h
WHOLE, GATE, UP = 0, 1, 2  # `Half` in panels.h
SOURCE_DTYPES = (torch.float32, torch.bfloat16)  # that can be packed


def lane_places(num_rows: int, first_row: int, half: int) -> torch.Tensor:
    """panel * 32 + lane of each of ``num_rows`` features from ``first_row`` on, int64; as `place_of` in panels.h."""
    row = torch.arange(first_row, first_row + num_rows)
    if half == WHOLE:
        return row
    return row // 16 * PANEL + row % 16 + (16 if half == UP else 0)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Some rows of a packed matrix from ``first_row`` on, filled by the library.

    Attributes:
        data: the matrix, [panels, padded columns, 32] with pairs interleaved as in panels.h.
    """

    context: Context
    data: torch.Tensor
    first_row: int = 0
    half: int = WHOLE

    def write(self, part: torch.Tensor) -> None:
        """See `weight_table.Write`."""
        if part.dtype not in SOURCE_DTYPES or part.stride(-1) != 1 or part.device.type != "cpu":
            part = part.to("cpu", torch.float32 if part.dtype != torch.bfloat16 else part.dtype).contiguous()
        self.context.call("step_pack", self.arguments(part, Rows(0, len(part))), 1)

    def arguments(self, source: torch.Tensor, rows: Rows) -> PackArguments:
        """Arguments to pack ``rows`` of ``source`` [all rows, columns], float32 or bfloat16, columns contiguous."""
        stride = source.stride(0)
        return PackArguments(
            data=self.data.data_ptr(),
            source=source.data_ptr() + rows.start * stride * source.itemsize,
            source_stride=stride,
            run_stride=len(source) // rows.groups * stride,
            run_rows=rows.count,
            source_is_f32=int(source.dtype == torch.float32),
            rows=rows.count * rows.groups,
            columns=source.shape[1],
            padded_columns=self.data.shape[1],
            first_row=self.first_row,
            half=self.half,
        )


class PackedFromTrainer:
    """Tensors that a refit's stream leaves out: `write` packs them all in one call of the library."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._parts: dict[str, tuple[PackedRows, torch.Tensor, Rows]] = {}

    def add(self, name: str, to: PackedRows, source: torch.Tensor, rows: Rows) -> None:
        """Have ``rows`` of the trainer's ``source``, which never moves, packed as tensor ``name``."""
        self._parts[name] = (to, source, rows)

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of these tensors."""
        return frozenset(self._parts)

    def write(self) -> None:
        """Pack all of them."""
        self._context.call("step_pack", self._arguments, len(self._arguments))

    @functools.cached_property
    def _arguments(self) -> ctypes.Array[PackArguments]:
        arguments = [to.arguments(source, rows) for to, source, rows in self._parts.values()]
        return (PackArguments * len(arguments))(*arguments)
