"""The index of a Megatron distributed checkpoint (`torch_dist`): which part of which tensor lies where.

The format keeps it in ``.metadata``, a pickle of torch's classes. It is read as data, and no class, function or other
object of this process can be reached from the file: Python's own interpreter of pickles looks names up in a table of
known ones, and gets for each a class that was made for this file alone (`StandIn`), whose instances note what they are
made and filled with. Other names are refused. Everything is checked before it is used: nothing that the file says is
trusted because torch would have written it so.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, FileSource, safe_name
from nemo_style_aligner.trainer.checkpoints.manifest import read_patiently

Numbers = tuple[int, ...]

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)  # of tensors in checkpoints


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the place of its bytes.

    Attributes:
        offsets, sizes: of the box, per dimension.
        file: name within the checkpoint's source.
        start, length: bytes of the file.
    """

    offsets: Numbers
    sizes: Numbers
    file: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor, in chunks that have as many elements together as it has."""

    shape: Numbers
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


Index = Mapping[str, StoredTensor]
"""Key -> tensor, of all tensors of a checkpoint. The files have at least as many bytes as these elements take."""

_Places = dict[tuple[str, Numbers], tuple[str, int, int]]  # key and offsets of a chunk -> file, start, length

_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_FILES, _MEGATRON = "torch.distributed.checkpoint.filesystem", "megatron.core.dist_checkpointing.strategies.torch"
_TENSOR, _OBJECT = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"
_TABLE: dict[str, Any] = {
    **{str(dtype): dtype for dtype in _DTYPES},
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    "builtins.set": list,
    "builtins.frozenset": list,
    **dict.fromkeys(
        (
            *(_TENSOR, _OBJECT, "torch.serialization._get_layout"),
            *(f"{_FILES}._StorageInfo", f"{_FILES}._StoragePrefix"),
            *(f"{_METADATA}.{name}" for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
            *(f"{_METADATA}.TensorProperties", f"{_METADATA}._MEM_FORMAT_ENCODING"),
            # megatron-core adds the plans of all ranks.
            *(f"{_PLANNER}.{name}" for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")),
            *(f"{_PLANNER}.WriteItemType", f"{_MEGATRON}.MCoreMetadata", f"{_MEGATRON}.MCoreSavePlan"),
            # Python 3.11.0 to 3.11.3 pickle members of enumerations by the first.
            *("builtins.getattr", "builtins.slice"),
            *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
            *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),  # of Python 3.13
        )
    ),  # stand-ins
}
_LIMIT = 1 << 48  # elements or bytes
_MAX_NAME = 500  # characters of a key or file name


def read_index(source: FileSource, folder: str) -> Index:
    """The index of the distributed checkpoint in ``folder``.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: it cannot be read, chunks do not make up their tensor, or files are too short.
        UnsafeCheckpointError: it refers to something that the format does not have.
    """
    name = f"{folder}/.metadata"
    what = f"{source.location}/{name}"

    def read() -> bytes:
        with source.open(name) as stream:
            return stream.read(MAX_BYTES + 1)

    value = read_pickle(read_patiently(source.location / name, read), what, _TABLE)
    try:
        index = _index(value, folder)
        read_patiently(source.location / folder, lambda: _check_places(index, source))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error
    return index


def _index(value: Any, folder: str) -> Index:
    places: _Places = {}
    for index, info in value.storage_data.items():
        if getattr(index, "offset", None) is None:  # an object's
            continue
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its tensors are encoded in a way that cannot be read here")
        file = safe_name(f"{folder}/{safe_name(_text(info.relative_path))}")
        start, length = _numbers((info.offset, info.length))
        places[_text(index.fqn), _numbers(index.offset)] = file, start, length
    return {
        _text(key): _tensor(key, entry, places)
        for key, entry in value.state_dict_metadata.items()
        if not is_a(entry, _OBJECT)  # pickled, so not read
    }


def _tensor(key: str, entry: Any, places: _Places) -> StoredTensor:
    dtype, shape = entry.properties.state[0], _numbers(entry.size)
    if not is_a(entry, _TENSOR) or type(dtype) is not torch.dtype:
        raise ValueError(f"{key} is no tensor")
    boxes = [(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise ValueError(f"the chunks of {key} do not cover each of its elements exactly once")
    chunks = tuple(Chunk(offsets, sizes, *places[key, offsets]) for offsets, sizes in boxes)
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError(f"a chunk of {key} has other dimensions than the tensor")
        if math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
            raise ValueError(f"a chunk of {key} has fewer bytes than elements")
    return StoredTensor(shape, dtype, chunks)


def _check_places(index: Index, source: FileSource) -> None:
    """Check that chunks lie within their files and take no more bytes: else the files could hold any number."""
    chunks = sorted((chunk for tensor in index.values() for chunk in tensor.chunks), key=lambda chunk: chunk.file)
    for file, group in itertools.groupby(chunks, key=lambda chunk: chunk.file):
        of_file = list(group)
        with source.open(file) as stream:
            size = stream.seek(0, io.SEEK_END)
        if max(chunk.start + chunk.length for chunk in of_file) > size or sum(c.length for c in of_file) > size:
            raise ValueError(f"it names more bytes of {file} than the {size} that it has")


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or len(value) > _MAX_NAME:
        raise ValueError("a name is no plain text")
    return value


def _numbers(value: Any) -> Numbers:
    """The numbers in a ``torch.Size``, or another tuple."""
    if type(value) is not tuple or not all(type(number) is int and 0 <= number < _LIMIT for number in value):
        raise ValueError("a number is out of range")
    return value


# ---- a pickle as data -------------------------------------------------------------------------

MAX_BYTES = 64 << 20
"""Size of the largest pickle that is read: a tensor's chunk takes some hundreds of bytes."""


class UnsafeCheckpointError(UserError, ValueError):
    """A pickle in a checkpoint refers to something that has no place in a checkpoint."""


class StandIn:
    """What stands in the place of an object.

    Attributes:
        arguments: that would have made it.
        state: what it would have been filled with; if that is a dictionary, its items are attributes as well.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)


def is_a(value: Any, name: str) -> bool:
    """Whether ``value`` stands in the place of what the name, such as ``torch.Size``, would have made."""
    return isinstance(value, StandIn) and type(value).__name__ == name


def read_pickle(content: bytes, what: str, table: Mapping[str, Any]) -> Any:
    """The value in a pickle, of plain values and of instances of `StandIn`.

    It may refer to itself, and to one part from many places: walk it along known fields only.

    Args:
        what: the file, for messages.
        table: all names that may occur, such as ``torch.Size``, and what they stand for; None: a class of stand-ins.

    Raises:
        UnsafeCheckpointError: another name.
        DamagedCheckpointError: not a whole pickle, or too large a one.
    """
    if len(content) > MAX_BYTES:
        raise DamagedCheckpointError(f"{what} is larger than {MAX_BYTES >> 20} MiB, which no checkpoint needs")
    try:
        return _Unpickler(content, what, table).load()
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # opcodes make Python raise anything
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, without anything that could break a line or move a terminal's cursor."""
    return ascii(str(error) if type(error) is ValueError else repr(error))[1:-1][:200]


# Of objects that some package has registered, which are not looked up by name; and of memory of any size.
_REFUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)


class _Unpickler(pickle._Unpickler):
    """The interpreter in Python: that in C gives a memo as much memory as the file says."""

    dispatch: ClassVar = {code: do for code, do in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED}

    def __init__(self, content: bytes, what: str, table: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False)
        self._what = what
        self._table = {name: type(name, (StandIn,), {}) if to is None else to for name, to in table.items()}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        if (found := self._table.get(f"{module}.{name}")) is None:
            raise UnsafeCheckpointError(
                f"{self._what} refers to {ascii(f'{module}.{name}')[1:-1][:100]}, which a checkpoint has no use for: "
                "do not load it unless you trust its origin, and then convert it with megatron-core first"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        """A reference to something beside the pickle, such as a tensor's bytes: as it is."""
        return pid
