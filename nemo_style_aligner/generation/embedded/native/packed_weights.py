"""Where a refit's tensors go in the native step: panels of matrices, lanes of biases."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from nemo_style_aligner.generation.embedded.fused_rows import Rows
from nemo_style_aligner.generation.embedded.native.structures import Context, Matrix, PackArguments
from nemo_style_aligner.generation.embedded.weight_table import quantize_rows

PANEL = 32  # output features per panel, as in panels.h
WHOLE, GATE, UP = 0, 1, 2  # `Half` in panels.h
SOURCE_DTYPES = (torch.float32, torch.bfloat16)  # that can be packed


@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """Panels of one matrix: ``data`` [panels, padded columns, 32] with pairs interleaved as in panels.h."""

    data: torch.Tensor
    scales: torch.Tensor | None  # fp32 [panels * 32], of int8 panels
    columns: int

    @property
    def pointers(self) -> Matrix:
        """The matrix as the library takes it."""
        return Matrix(self.data.data_ptr(), None if self.scales is None else self.scales.data_ptr())


def lane_places(num_rows: int, first_row: int, half: int) -> torch.Tensor:
    """panel * 32 + lane of each of ``num_rows`` features from ``first_row`` on, int64; as `place_of` in panels.h."""
    row = torch.arange(first_row, first_row + num_rows)
    if half == WHOLE:
        return row
    return row // 16 * PANEL + row % 16 + (16 if half == UP else 0)


class PackedDestination:
    """``rows`` rows of a packed matrix from ``first_row`` on, filled by the library."""

    def __init__(
        self, context: Context, matrix: PackedMatrix, rows: int, first_row: int = 0, half: int = WHOLE
    ) -> None:
        self._context = context
        self._matrix = matrix
        self._first_row, self._half = first_row, half
        self._places = lane_places(rows, first_row, half)

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        if part.dtype not in SOURCE_DTYPES or part.stride(-1) != 1 or part.device.type != "cpu":
            part = part.to("cpu", torch.float32 if part.dtype != torch.bfloat16 else part.dtype).contiguous()
        self._context.call("step_pack", self.arguments(part, Rows(0, len(part))), 1)

    def arguments(self, source: torch.Tensor, rows: Rows) -> PackArguments:
        """Arguments to pack ``rows`` of ``source`` [all rows, columns], float32 or bfloat16, columns contiguous."""
        matrix, stride = self._matrix, source.stride(0)
        return PackArguments(
            data=matrix.data.data_ptr(),
            scales=None if matrix.scales is None else matrix.scales.data_ptr(),
            source=source.data_ptr() + rows.start * stride * source.itemsize,
            source_stride=stride,
            run_stride=len(source) // rows.groups * stride,
            run_rows=rows.count,
            source_is_f32=int(source.dtype == torch.float32),
            rows=rows.count * rows.groups,
            columns=source.shape[1],
            padded_columns=matrix.data.shape[1],
            first_row=self._first_row,
            half=self._half,
        )

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        matrix, places = self._matrix, self._places[rows]
        panels, lanes = places // PANEL, places % PANEL
        if matrix.data.dtype == torch.float32:
            return matrix.data[panels, :, lanes][:, : matrix.columns]
        pairs = matrix.data.view(matrix.data.shape[0], -1, PANEL, 2)
        values = pairs[panels, :, lanes].flatten(1)[:, : matrix.columns]
        return values if matrix.scales is None else values.float() * matrix.scales[places, None]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        if self._matrix.scales is None:
            return part.to("cpu", self._matrix.data.dtype)
        integers, scales = quantize_rows(part.cpu())
        return integers.to(torch.int8) * scales[:, None]


@dataclasses.dataclass(frozen=True)
class LaneDestination:
    """Some lanes of a bias, which is laid out like the panels of its matrix."""

    lanes: torch.Tensor  # fp32 [panels * 32]
    places: torch.Tensor

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        self.lanes[self.places] = part.to("cpu", torch.float32)

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        return self.lanes[self.places[rows]]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        return part.to("cpu", torch.float32)


class PackedFromTrainer:
    """`LentMatrices` of the native step: `write` packs them all in one call of the library."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._parts: dict[str, tuple[PackedDestination, torch.Tensor, Rows]] = {}

    def add(self, name: str, destination: PackedDestination, source: torch.Tensor, rows: Rows) -> None:
        """Have ``rows`` of the trainer's ``source``, which never moves, packed as tensor ``name``."""
        self._parts[name] = (destination, source, rows)

    @property
    def names(self) -> frozenset[str]:
        """See `LentMatrices.names`."""
        return frozenset(self._parts)

    def write(self) -> None:
        """See `LentMatrices.write`."""
        self._context.call("step_pack", self._arguments, len(self._arguments))

    def num_rows(self, name: str) -> int:
        """See `LentMatrices.num_rows`."""
        _, _, rows = self._parts[name]
        return rows.count * rows.groups

    def part(self, name: str, rows: slice) -> torch.Tensor:
        """See `LentMatrices.part`."""
        _, source, all_rows = self._parts[name]
        return source[all_rows.numbers(len(source))[rows]]

    @functools.cached_property
    def _arguments(self) -> ctypes.Array[PackArguments]:
        arguments = [destination.arguments(source, rows) for destination, source, rows in self._parts.values()]
        return (PackArguments * len(arguments))(*arguments)
