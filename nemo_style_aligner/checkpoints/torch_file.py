"""What ``torch.save`` wrote, read as data: a zip of a pickle and of the bytes of each tensor.

``torch.load`` is not used: with ``weights_only=True`` it makes objects of all classes that some package has declared
safe for it (megatron-core declares paths, optimizer settings and more), and fills them from the file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import IO, Any, cast

import torch

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.checkpoints.inert_pickle import PERSISTENT_ID, Name, Record, one_line, read_pickle
from nemo_style_aligner.telemetry import activity

_STORAGES: dict[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_UNTYPED = "torch.storage.UntypedStorage"  # of the other dtypes
_OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)

DTYPES: dict[str, torch.dtype] = {str(dtype): dtype for dtype in (*_STORAGES.values(), *_OTHERS)}
"""The dtypes of tensors in checkpoints, by their names in pickles, such as ``torch.float32``."""

_TENSOR, _TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_NAMES = {*DTYPES, *_STORAGES, _UNTYPED, _TENSOR, _TENSOR_OF_DTYPE, PERSISTENT_ID, "collections.OrderedDict"}

_READ_AT_ONCE = 16 << 20  # bytes
_MAX_SMALL = 16 << 20  # bytes of the zip's directory, and of the pickle, which holds no tensors' bytes
_PICKLE = "data.pkl"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of the zip; its name and extra field, of these lengths, follow

# What zipfile and torch raise about contents, and Python about arguments of the wrong number or type.
_DAMAGE = (
    zipfile.BadZipFile,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    EOFError,
    OSError,
    RuntimeError,
    struct.error,
)


class _Window:
    """Part of a stream, as much of a stream as zipfile needs.

    Attributes:
        allowance: bytes that may still be read; None: any number.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._position = 0
        self.allowance: int | None = _MAX_SMALL

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError("it is too short")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        size = left if size < 0 else min(size, left)
        if self.allowance is not None:
            self.allowance -= size
            if self.allowance < 0:
                raise ValueError("its directory is too large")
        self._stream.seek(self._start + self._position)
        content = self._stream.read(size)
        self._position += len(content)
        return content

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view``, from ``start`` on; each piece counts as progress for the watchdog, however slow reading is."""
        self._stream.seek(self._start + start)
        while view:
            if not (count := cast(io.BufferedReader, self._stream).readinto(view[:_READ_AT_ONCE])):
                raise ValueError("it is cut short")
            view = view[count:]
            activity.progress()


class TorchFile:
    """A value that was saved, and its tensors, which are read when they are asked for.

    Attributes:
        value: see `read_pickle`; a tensor is a `Record`, for `tensor`.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int, what: str) -> None:
        """Read the value from ``length`` bytes of a seekable stream; ``what`` names them in messages.

        Raises:
            DamagedCheckpointError: they are not what ``torch.save`` writes.
            UnsafeCheckpointError: there is more than tensors, numbers and text in it.
            OSError: they cannot be read now.
        """
        self._what, self._length = what, length
        try:
            self._window = _Window(stream, start, length)
            self._zip = zipfile.ZipFile(cast(IO[bytes], self._window))
            self._window.allowance = None
            (self._folder,) = (name.removesuffix(_PICKLE) for name in self._zip.namelist() if name.endswith(_PICKLE))
            if self._folder + "byteorder" in self._zip.namelist() and self._small("byteorder") != b"little":
                raise ValueError("its numbers are big-endian")
            content = self._small(_PICKLE)
        except _DAMAGE as error:
            raise self._damaged(error) from error
        self.value = read_pickle(content, f"{what}: {_PICKLE}", _NAMES)

    def tensor(self, record: Any) -> torch.Tensor:
        """The tensor that a record in the value stands for, on the CPU.

        Raises:
            DamagedCheckpointError: the record is no tensor's, or the tensor's bytes are not there.
            OSError: they cannot be read now.
        """
        try:
            return self._tensor(record)
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def _tensor(self, record: Any) -> torch.Tensor:
        if type(record) is not Record or record.name not in (_TENSOR, _TENSOR_OF_DTYPE):
            raise ValueError("a tensor is expected")
        reference, offset, shape, strides = record.arguments[:4]
        if type(reference) is not Record or reference.name != PERSISTENT_ID:
            raise ValueError("a tensor has no bytes")
        _, storage, key, *_ = reference.arguments
        dtype = _dtype(storage, _STORAGES) if record.name == _TENSOR else _dtype(record.arguments[6], DTYPES)
        if type(key) is not str or not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *strides)):
            raise ValueError("a tensor's place or shape is none")
        data = self._bytes(f"data/{key}").view(dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) > len(data) or (0 not in shape and last >= len(data)):
            raise ValueError("a tensor is larger than its bytes")
        return data.as_strided(shape, strides, offset)

    def _bytes(self, name: str) -> torch.Tensor:
        """A member's bytes, straight from the file. As in torch, the zip's checksums are not compared."""
        info = self._member(name)
        self._window.seek(info.header_offset)
        header = self._window.read(_LOCAL_HEADER.size)
        start = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        if start + info.file_size > self._length:
            raise ValueError(f"{name} is cut short")
        data = torch.empty(info.file_size, dtype=torch.uint8)
        self._window.read_into(start, data.numpy().data)
        return data

    def _small(self, name: str) -> bytes:
        if self._member(name).file_size > _MAX_SMALL:
            raise ValueError(f"{name} is too large")
        return self._bytes(name).numpy().tobytes()

    def _member(self, name: str) -> zipfile.ZipInfo:
        info = self._zip.getinfo(self._folder + name)
        if info.compress_type != zipfile.ZIP_STORED or not info.file_size == info.compress_size <= self._length:
            raise ValueError(f"{name} is compressed, or larger than the file")
        return info

    def _damaged(self, error: Exception) -> DamagedCheckpointError | OSError:
        if isinstance(error, OSError) and error.errno is not None:  # the system's
            return error
        return DamagedCheckpointError(f"{self._what} is damaged: {one_line(error)}")


def _dtype(name: Any, known: dict[str, torch.dtype]) -> torch.dtype:
    if type(name) is not Name or name.text not in known:
        raise ValueError("a tensor has no dtype")
    return known[name.text]
