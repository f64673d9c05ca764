"""Tensors in files that ``torch.save`` wrote, a zip of a pickle and of each tensor's bytes, read as data."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import IO, Any, cast

import torch

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.checkpoints.inert_pickle import MAX_BYTES, UnsafeCheckpointError, is_a, one_line, read_pickle
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
_OTHERS = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)

DTYPES: dict[str, torch.dtype] = {str(dtype): dtype for dtype in (*_STORAGES.values(), *_OTHERS)}
"""The dtypes of tensors in checkpoints, by their names in pickles, such as ``torch.float32``."""

_TENSOR, _TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_TABLE: dict[str, Any] = {
    **DTYPES,
    **_STORAGES,
    "torch.storage.UntypedStorage": torch.uint8,  # of the other dtypes
    _TENSOR: None,
    _TENSOR_OF_DTYPE: None,
    "collections.OrderedDict": None,
}
_READ_AT_ONCE = 16 << 20  # bytes
_PICKLE = "data.pkl"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of the zip; its name and extra field, of these lengths, follow


class _Window(io.RawIOBase):
    """Part of a stream. Each piece that is read counts as progress for the watchdog, however slow reading is."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._start, self.length, self._position = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise ValueError("it is too short")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, min(_READ_AT_ONCE, self.length - self._position))]
        self._stream.seek(self._start + self._position)
        count = cast(io.BufferedReader, self._stream).readinto(view)
        self._position += count
        activity.progress()
        return count


def read_tensor(stream: IO[bytes], start: int, length: int, what: str) -> torch.Tensor:
    """The one tensor in ``length`` bytes of a seekable stream, on the CPU; ``what`` names them in messages.

    Raises:
        DamagedCheckpointError: they are not what ``torch.save`` writes of a tensor.
        UnsafeCheckpointError: there is something else in it.
        OSError: they cannot be read now.
    """
    try:
        return _read_tensor(_Window(stream, start, length), what)
    except (DamagedCheckpointError, UnsafeCheckpointError):
        raise
    except Exception as error:  # what zipfile, torch and Python raise about contents, arguments and types
        if isinstance(error, OSError) and error.errno is not None:  # the system's
            raise
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error


def _read_tensor(window: _Window, what: str) -> torch.Tensor:
    archive = zipfile.ZipFile(cast(IO[bytes], window))
    (folder,) = (name.removesuffix(_PICKLE) for name in archive.namelist() if name.endswith(_PICKLE))

    def member(name: str) -> torch.Tensor:
        return _bytes_of(archive.getinfo(folder + name), window)

    if folder + "byteorder" in archive.namelist() and bytes(member("byteorder").tolist()) != b"little":
        raise ValueError("its numbers are big-endian")
    if archive.getinfo(folder + _PICKLE).file_size > MAX_BYTES:
        raise ValueError(f"{_PICKLE} is too large")
    value = read_pickle(member(_PICKLE).numpy().tobytes(), f"{what}: {_PICKLE}", _TABLE)
    if not is_a(value, _TENSOR) and not is_a(value, _TENSOR_OF_DTYPE):
        raise ValueError("a tensor is expected")
    (_, dtype, key, *_), offset, shape, strides = value.arguments[:4]
    if is_a(value, _TENSOR_OF_DTYPE):
        dtype = value.arguments[6]
    if type(key) is not str or not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor's place or shape is none")
    data = member(f"data/{key}").view(dtype)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) > len(data) or (0 not in shape and last >= len(data)):
        raise ValueError("a tensor is larger than its bytes")
    return data.as_strided(shape, strides, offset)


def _bytes_of(info: zipfile.ZipInfo, window: _Window) -> torch.Tensor:
    """A member's bytes, straight from the file: torch may have left out the zip's checksums."""
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER.size) or b""
    start = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > window.length:
        raise ValueError(f"{info.filename} is compressed, or larger than the file")
    window.seek(start)
    data = torch.empty(info.file_size, dtype=torch.uint8)
    view = data.numpy().data
    while view:
        if not (count := window.readinto(view)):
            raise ValueError("it is cut short")
        view = view[count:]
    return data
