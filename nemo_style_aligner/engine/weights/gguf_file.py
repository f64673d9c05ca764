"""The GGUF format: metadata and the places of tensors, with nothing in the file believed before it is checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is mapped, so that tensors cost nothing
until they are read; counts, lengths, types and offsets are compared with the file's size before memory is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from nemo_style_aligner.errors import LFS_POINTER, is_lfs_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_ENTRIES = 1 << 16  # metadata, and tensors; the largest models have some thousands
_MAX_HEADER = 1 << 28  # bytes
_MAX_STRINGS = 1 << 22  # in all; vocabularies and merges have less than a tenth
_DEFAULT_ALIGNMENT = 32
_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PLAIN = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
}

T = TypeVar("T", int, float, bool, str)


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: as in torch, the slowest-varying dimension first.
        offset, size: bytes, in the file.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GGUFFile:
    """A GGUF file's metadata, by key, and its tensors, by name.

    Numbers are Python's, arrays of numbers are numpy's, arrays of strings are lists.

    Raises:
        ValueError: the file is none, not whole, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if is_lfs_pointer(path):
            raise self._broken(f"it {LFS_POINTER}")
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file
                raise self._broken("it is empty") from error
        self._place = self._num_strings = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_header()

    def values(self, name: str, part: int | None = None) -> npt.NDArray[np.float32]:
        """A tensor's values in fp32, dequantised, in memory of its own; or those of one ``part`` of its first
        dimension.
        """
        tensor, shape = self.tensors[name], self.tensors[name].shape
        size, offset = tensor.size, tensor.offset
        if part is not None:
            size, shape = size // shape[0], shape[1:]
            offset += part * size
        data = np.frombuffer(self._data, np.uint8, size, offset)
        if tensor.kind in _PLAIN:
            return data.view(_PLAIN[tensor.kind]).astype(np.float32).reshape(shape)
        return dequantize(data.reshape(*shape[:-1], -1), tensor.kind)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A key's value: ``int``, ``float``, ``bool`` or ``str``; an array of equal numbers (by layer) is one of them.

        Raises:
            ValueError: it is of another type, or not there and has no default.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.path} lacks the key {key}: not a complete GGUF model")
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.path}: {key} is {_shown(value)}, not {_NAMES[kind]}")
        return value

    def values_of(self, key: str, kind: type[T]) -> list[T]:
        """A key's list of ``str``, ``int`` or ``float``; empty if it is not there.

        Raises:
            ValueError: it is something else.
        """
        value = self.metadata.get(key, [])
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(listed, list) or not all(type(element) is kind for element in listed):
            raise ValueError(f"{self.path}: {key} is {_shown(value)}, not a list of {_NAMES[kind]}")
        return listed

    # ---- the header ------------------------------------------------------------------------------

    def _read_header(self) -> None:
        if self._take(4) != _MAGIC:
            raise self._broken("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._broken(f"its version is {version}, which is none of {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if max(num_tensors, num_keys) > _MAX_ENTRIES:
            raise self._broken(f"its header says {num_tensors} tensors and {num_keys} keys")
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise self._broken(f"it has the key {key} twice")
            self.metadata[key] = self._value(key, self._number("I"))
        places = [self._read_tensor() for _ in range(num_tensors)]
        self._place_tensors(places)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._code(key, kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._num_strings += count
            if self._num_strings > _MAX_STRINGS:
                raise self._broken(f"{key} has {count} strings")
            return [self._string() for _ in range(count)]
        dtype = np.dtype(self._code(key, kind)).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _code(self, key: str, kind: int) -> str:
        """Python's letter for a type of scalars."""
        if kind not in _SCALARS:
            raise self._broken(f"{key} is {'an array of arrays' if kind == _ARRAY else f'of an unknown type, {kind}'}")
        return _SCALARS[kind]

    def _read_tensor(self) -> tuple[str, GGUFTensor]:
        """The next tensor's name and place, its offset still from the start of the data."""
        name, num_dimensions = self._string(), self._number("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]  # the fastest-varying one comes first
        number, offset = self._number("I"), self._number("Q")
        kind = _readable_kind(number)
        if kind is None:
            raise ValueError(f"{self.path}: tensor {name} is of type {_name_of(number)}, which is not supported")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._broken(f"tensor {name} of type {kind.name} has the shape {list(shape)}")
        return name, GGUFTensor(shape, kind, offset, math.prod(shape) // block * block_bytes)

    def _place_tensors(self, tensors: list[tuple[str, GGUFTensor]]) -> None:
        """Add where the data begin; tensors follow each other without gaps or overlaps, as llama.cpp demands."""
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}, not a power of two")
        start, end = -(-self._place // alignment) * alignment, 0
        for name, tensor in tensors:
            if name in self.tensors:
                raise self._broken(f"it has tensor {name} twice")
            if tensor.offset != end:
                raise self._broken(f"tensor {name} lies at {tensor.offset}, not behind the one before it, at {end}")
            if start + tensor.offset + tensor.size > len(self._data):
                raise self._broken(f"the data of tensor {name} end behind the file's end: copy it again")
            self.tensors[name] = dataclasses.replace(tensor, offset=start + tensor.offset)
            end = -(-(tensor.offset + tensor.size) // alignment) * alignment

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"it has a string that is not UTF-8, before byte {self._place}") from error

    def _take(self, size: int) -> bytes:
        start, self._place = self._place, self._place + size
        if self._place > min(len(self._data), _MAX_HEADER):
            raise self._broken("it ends within its header, or the header is too large: copy it again")
        return self._data[start : self._place]

    def _broken(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is not a whole GGUF file: {reason}")


def _shown(value: Any) -> str:
    if isinstance(value, list | np.ndarray):
        return "a list"
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"


@functools.cache
def _readable_kind(number: int) -> GGMLQuantizationType | None:
    """The type of a tensor, or None if its values cannot be had."""
    try:
        kind = GGMLQuantizationType(number)
        if kind not in _PLAIN:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return kind


def _name_of(number: int) -> str:
    return next((kind.name for kind in GGMLQuantizationType if kind == number), str(number))
