"""The index of a Megatron distributed checkpoint (`torch_dist`): which part of which tensor lies where.

The format keeps it in ``.metadata``, a pickle of torch's classes. It is read as data (`inert_pickle`), and everything
in it is checked before it is used: nothing that the file says is trusted because torch would have written it so.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError, FileSource, safe_name
from nemo_style_aligner.checkpoints.inert_pickle import MAX_BYTES, Name, Pairs, Record, items, one_line, read_pickle
from nemo_style_aligner.checkpoints.manifest import read_patiently
from nemo_style_aligner.checkpoints.torch_file import DTYPES

Numbers = tuple[int, ...]


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
    """A tensor whose chunks cover it completely, each element once."""

    shape: Numbers
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Index = Mapping[str, StoredTensor]
"""Key -> tensor, of all tensors of a checkpoint. No two chunks share bytes of a file, and all lie within the files."""

_Places = dict[tuple[str, Numbers], tuple[str, int, int]]  # key and offsets of a chunk -> file, start, length

_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_FILES, _MEGATRON = "torch.distributed.checkpoint.filesystem", "megatron.core.dist_checkpointing.strategies.torch"
_SIZE, _PATHS = "torch.Size", ("pathlib", "pathlib._local")  # the latter is where Python 3.13 keeps them
_ENUMERATIONS = {f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_PLANNER}.WriteItemType"}
_NAMES = {
    *_ENUMERATIONS,
    *DTYPES,
    _SIZE,
    "torch.serialization._get_layout",
    f"{_METADATA}.BytesStorageMetadata",
    f"{_METADATA}.ChunkStorageMetadata",
    f"{_METADATA}.Metadata",
    f"{_METADATA}.MetadataIndex",
    f"{_METADATA}.StorageMeta",
    f"{_METADATA}.TensorProperties",
    f"{_METADATA}.TensorStorageMetadata",
    f"{_FILES}._StorageInfo",
    f"{_FILES}._StoragePrefix",
    # megatron-core adds the plans of all ranks.
    f"{_PLANNER}.BytesIOWriteData",
    f"{_PLANNER}.SavePlan",
    f"{_PLANNER}.TensorWriteData",
    f"{_PLANNER}.WriteItem",
    f"{_MEGATRON}.MCoreMetadata",
    f"{_MEGATRON}.MCoreSavePlan",
    "collections.OrderedDict",
    "builtins.getattr",
    "builtins.set",
    "builtins.frozenset",
    "builtins.slice",
    *(f"{module}.{name}" for module in _PATHS for name in ("PosixPath", "PurePosixPath", "Path")),
}

_MAX_DIMENSIONS = 5
_LIMIT = 1 << 48  # elements or bytes
_MAX_NAME = 500  # characters of a key or file name


def read_index(source: FileSource, folder: str) -> Index:
    """The index of the distributed checkpoint in ``folder``.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: it cannot be read, chunks do not cover their tensor or overlap, or files are too short.
        UnsafeCheckpointError: it refers to something that the format does not have.
    """
    name = f"{folder}/.metadata"
    what = f"{source.location}/{name}"

    def read() -> bytes:
        with source.open(name) as stream:
            return stream.read(MAX_BYTES + 1)

    content = read_patiently(source.location / name, read)
    value = read_pickle(content, what, _NAMES, _ENUMERATIONS)
    try:
        index = _index(value, folder)
        read_patiently(source.location / folder, lambda: _check_places(index, source))
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error
    return index


def _index(value: Any, folder: str) -> Index:
    content = _fields(value, f"{_METADATA}.Metadata")
    places = _places(content["storage_data"], folder)
    stored = {
        _text(key): _fields(entry, f"{_METADATA}.TensorStorageMetadata")
        for key, entry in items(content["state_dict_metadata"]).items()
        if type(entry) is not Record or entry.name != f"{_METADATA}.BytesStorageMetadata"  # pickled, so not read
    }
    if sum(len(_list(entry["chunks"])) for entry in stored.values()) > len(places):
        raise ValueError("it has more chunks than places")
    return {key: _tensor(key, entry, places) for key, entry in stored.items()}


def _tensor(key: str, entry: dict[str, Any], places: _Places) -> StoredTensor:
    properties = entry["properties"]
    if type(properties) is not Record or properties.name != f"{_METADATA}.TensorProperties":
        raise ValueError(f"{key} has no properties")
    dtype, shape = properties.state[0], _numbers(entry["size"])
    if type(dtype) is not Name or dtype.text not in DTYPES:
        raise ValueError(f"{key} has no dtype")
    tensor = StoredTensor(
        shape, DTYPES[dtype.text], tuple(_chunk(key, chunk, places) for chunk in _list(entry["chunks"]))
    )
    if not covers(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
        raise ValueError(f"the chunks of {key} do not cover each of its elements exactly once")
    for chunk in tensor.chunks:
        if math.prod(chunk.sizes) * tensor.dtype.itemsize > chunk.length:
            raise ValueError(f"a chunk of {key} has fewer bytes than elements")
    return tensor


def _chunk(key: str, chunk: Any, places: _Places) -> Chunk:
    fields = _fields(chunk, f"{_METADATA}.ChunkStorageMetadata")
    offsets, sizes = _numbers(fields["offsets"]), _numbers(fields["sizes"])
    if (place := places.get((key, offsets))) is None:
        raise ValueError(f"a chunk of {key} is in no file")
    return Chunk(offsets, sizes, *place)


def _places(pairs: Any, folder: str) -> _Places:
    places: _Places = {}
    files: dict[str, str] = {}  # there are few
    for index, info in pairs if type(pairs) is Pairs else ():
        where, what = _fields(index, f"{_METADATA}.MetadataIndex"), _fields(info, f"{_FILES}._StorageInfo")
        if where.get("offset") is None:  # an object's
            continue
        if what.get("transform_descriptors"):
            raise ValueError("its tensors are encoded in a way that cannot be read here")
        place = _text(where["fqn"]), _numbers(where["offset"])
        if place in places:
            raise ValueError(f"a chunk of {place[0]} is in two places")
        name = _text(what["relative_path"])
        if name not in files:
            files[name] = safe_name(f"{folder}/{safe_name(name)}")
        places[place] = files[name], _number(what["offset"]), _number(what["length"])
    return places


def covers(shape: Numbers, boxes: Iterable[tuple[Numbers, Numbers]]) -> bool:
    """Whether boxes, each given by offsets and sizes, cover each element of ``shape`` exactly once, and none outside.

    A function that counts how many boxes an element is in is determined by its differences along all dimensions.
    Those of one box are +1 or -1 at its corners, and 0 elsewhere: so the corners' sums decide, in linear time.
    """
    signs = [math.prod(corner) for corner in itertools.product((1, -1), repeat=len(shape))]
    sums: collections.Counter[Numbers] = collections.Counter()
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        for corner, sign in zip(_corners(offsets, sizes), signs, strict=True):
            sums[corner] += sign
    for corner, sign in zip(_corners((0,) * len(shape), shape), signs, strict=True):
        sums[corner] -= sign
    return not any(sums.values())


def _corners(offsets: Numbers, sizes: Numbers) -> Iterable[Numbers]:
    return itertools.product(*((start, start + size) for start, size in zip(offsets, sizes, strict=True)))


def _check_places(index: Index, source: FileSource) -> None:
    """Check that chunks lie within their files, and that no two share bytes: else the files could hold any number."""
    places = sorted((chunk.file, chunk.start, chunk.length) for tensor in index.values() for chunk in tensor.chunks)
    for file, group in itertools.groupby(places, key=lambda place: place[0]):
        with source.open(file) as stream:
            size = stream.seek(0, io.SEEK_END)
        end = 0
        for _, start, length in group:
            if start < end or start + length > size:
                raise DamagedCheckpointError(
                    f"{source.location}: the index names bytes {start} to {start + length} of {file}, which has {size} "
                    "bytes, or other tensors in them"
                )
            end = start + length


def _fields(record: Any, name: str) -> dict[str, Any]:
    if type(record) is not Record or record.name != name:
        raise ValueError(f"it lacks a {name.rpartition('.')[2]}")
    return items(record.state)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list is expected")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or len(value) > _MAX_NAME:
        raise ValueError("a name is no plain text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError("a number is out of range")
    return value


def _numbers(size: Any) -> Numbers:
    """The numbers in a ``torch.Size``."""
    if type(size) is not Record or size.name != _SIZE or type(size.arguments[0]) is not tuple:
        raise ValueError("a shape is none")
    if len(size.arguments[0]) > _MAX_DIMENSIONS:
        raise ValueError("a shape has too many dimensions")
    return tuple(_number(value) for value in size.arguments[0])
