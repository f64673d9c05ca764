"""GPT-OSS' files: all experts of a layer in one tensor, gate and up interleaved, perhaps quantised (MXFP4).

=========================== ============================================================================
``gate_up_proj``            [experts, h, 2 f]: as a row times a matrix needs it; gate, up, gate, up, ...
``gate_up_proj_bias``       [experts, 2 f]
``down_proj``               [experts, f, h]
``down_proj_bias``          [experts, h]
``..._blocks``, ``_scales`` uint8 [experts, rows, columns / 32, 16] and [experts, rows, columns / 32], in place of
                            a matrix and transposed: 32 numbers of a row in 16 bytes, and their common factor
=========================== ============================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

_EXPERTS = r"(?P<experts>model\.layers\.\d+\.mlp\.experts)"
_TENSOR = re.compile(_EXPERTS + r"\.(?P<of>gate_up|down)_proj(?P<kind>_bias|_blocks|_scales|)")
_PART = re.compile(_EXPERTS + r"\.(?P<number>\d+)\.(?P<of>gate|up|down)_proj\.(?P<kind>weight|bias)")
_STEPS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}  # where each lies in its tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign
_BLOCK = 32  # numbers with a common factor
_MOST_EXPERTS = 10_000

QUANTIZED = "MXFP4"
"""What is read of it is bfloat16."""


class Stored(NamedTuple):
    """A tensor of a file: the file, and the tensor's name there."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """Its dtype, by safetensors' name for it."""
        dtype: str = self.file.get_slice(self.name).get_dtype()
        return dtype

    def at(self, *index: int | slice) -> torch.Tensor:
        """A part of it; the rest is not read."""
        part: torch.Tensor = self.file.get_slice(self.name)[index]
        return part


class ExpertTensor(NamedTuple):
    """A tensor of one expert, among those of a file that has all of them together.

    Attributes:
        stored: where it lies; with the blocks' scales, if it is quantised.
        number: of the expert.
        step: which of the rows are its own.
        shape: of the tensor itself.
        dtype: of the file's numbers, in safetensors' words, or `QUANTIZED`.
    """

    stored: tuple[Stored, ...]
    number: int
    step: slice
    shape: tuple[int, ...]
    dtype: str

    def read(self, dim: int, start: int, length: int) -> torch.Tensor:
        """``length`` rows (``dim`` 0) or columns (``dim`` 1) from ``start`` on."""
        width = self.step.step or 1
        rows = slice(width * start, width * (start + length)) if dim == 0 else slice(None)
        if len(self.stored) == 2:
            blocks, scales = (stored.at(self.number, rows)[self.step] for stored in self.stored)
            numbers = dequantized(blocks, scales)
            return numbers if dim == 0 else numbers.narrow(1, start, length)
        (tensor,) = self.stored
        if len(self.shape) == 1:
            return tensor.at(self.number, rows)[self.step]
        columns = slice(None) if dim == 0 else slice(start, start + length)
        return tensor.at(self.number, columns, rows)[:, self.step].t()


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of MXFP4 tensors (OCP Microscaling 1.0), which bfloat16 has exactly.

    Args:
        blocks: uint8 [..., n, 16], two numbers of type E2M1 in each byte, the lower bits' first.
        scales: uint8 [..., n], of type E8M0: powers of two, or NaN.

    Returns:
        bfloat16 [..., 32 n].
    """
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)  # by byte
    numbers = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, _BLOCK)
    factors = scales.view(torch.float8_e8m0fnu).float()
    return (numbers * factors[..., None]).flatten(-2).to(torch.bfloat16)


def is_stack(name: str) -> bool:
    """Whether a file's tensor is of all experts of a layer."""
    return _TENSOR.fullmatch(name) is not None


def apart(tensors: Mapping[str, Stored]) -> dict[str, ExpertTensor]:
    """The experts' tensors, by this project's names, of those for which `is_stack` holds.

    Raises:
        ValueError: a tensor has no such shape or dtype, or one half of a quantised tensor is missing.
    """
    found: dict[str, ExpertTensor] = {}
    for name, stored in tensors.items():
        parts = _TENSOR.fullmatch(name)
        assert parts is not None
        kind, module = parts["kind"], name.removesuffix(parts["kind"])
        if kind == "_scales":
            if f"{module}_blocks" not in tensors:
                raise ValueError(f"{name} is there, but not {module}_blocks: copy the files again")
            continue
        if kind == "_blocks" and module in tensors:
            raise ValueError(f"{module} is there twice, quantised and not: leave in the files what is the model's")
        lies_in: tuple[Stored, ...] = (stored,)
        shape, dtype = stored.shape, stored.dtype
        if kind == "_blocks":
            lies_in = (stored, _scales_of(stored, module, tensors))
            shape, dtype = (*shape[:2], _BLOCK * shape[2]), QUANTIZED
        elif kind == "":
            shape = (shape[0], *reversed(shape[1:]))
        own = parts["of"].split("_")
        if len(shape) != (2 if kind == "_bias" else 3) or shape[1] % len(own) or shape[0] > _MOST_EXPERTS:
            raise ValueError(f"{name} has shape {list(stored.shape)}, which no tensor of experts has")
        of_one = shape[1] // len(own), *shape[2:]
        for number in range(shape[0]):
            for part in own:
                own_name = f"{parts['experts']}.{number}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
                found[own_name] = ExpertTensor(lies_in, number, _STEPS[part], of_one, dtype)
    return found


def _scales_of(blocks: Stored, module: str, tensors: Mapping[str, Stored]) -> Stored:
    name = f"{module}_scales"
    if name not in tensors:
        raise ValueError(f"{module}_blocks is there, but not {name}: copy the files again")
    scales, shape = tensors[name], blocks.shape
    are_bytes = blocks.dtype == scales.dtype == "U8"
    if not are_bytes or len(shape) != 4 or shape[3] != _BLOCK // 2 or scales.shape != shape[:3]:
        found = f"{blocks.dtype} {list(shape)} and {scales.dtype} {list(scales.shape)}"
        raise ValueError(f"{module}_blocks and {name} are {found}, which is not MXFP4")
    return scales


def together(weights: Iterable[tuple[str, torch.Tensor]], number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of weights under this project's names with the tensors of files, on the CPU, in place of experts'.

    Each layer's are held until all of its ``number`` experts have come, which follow each other.
    """
    stacks: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        parts = _PART.fullmatch(name)
        if parts is None:
            yield name, tensor
            continue
        is_bias, of, expert = parts["kind"] == "bias", parts["of"], int(parts["number"])
        stack = f"{parts['experts']}.{'down' if of == 'down' else 'gate_up'}_proj{'_bias' if is_bias else ''}"
        if stack not in stacks:
            shape = tuple(tensor.shape[::-1])
            size = shape if of == "down" else (*shape[:-1], 2 * shape[-1])
            stacks[stack] = torch.empty(number, *size, dtype=tensor.dtype)
        stacks[stack][expert][..., _STEPS[of]] = tensor if is_bias else tensor.t()
        if expert == number - 1 and of == "down" and is_bias:  # the last one
            yield from stacks.items()
            stacks = {}
    if stacks:
        raise ValueError(f"the stream of weights ends amid the experts of {next(iter(stacks))}")
