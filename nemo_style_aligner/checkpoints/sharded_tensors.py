"""Megatron distributed checkpoints (`torch_dist`): a model's tensors, and reading them at any parallel layout.

The format is megatron-core's, so that what its tools and NeMo write can be read here; `sharded_writing` writes it.
Unlike ``dist_checkpointing.load``, reading executes nothing. ``.metadata`` is a pickle: it is read by an unpickler that
knows only the classes of this format; ``common.pt`` and pickled objects (fp8 states) are not read.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError, FileSource, safe_name
from nemo_style_aligner.checkpoints.manifest import read_patiently
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.telemetry import activity

Sharded = Any  # ShardedTensor | ShardedTensorFactory, which have no types that checkers can see
ShardedTensors = dict[str, Any]
"""Local name -> this rank's part of a global tensor, whose ``data`` is the live tensor."""

MODEL_PREFIX = "model."
"""Prefix of the keys of a model's tensors, in training checkpoints and in archives."""

OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the keys of an optimizer's tensors, in training checkpoints."""


class CheckpointMismatchError(UserError, ValueError):
    """A checkpoint does not hold what the model needs."""


class UnsupportedFormatError(UserError, ValueError):
    """A checkpoint is in a format that cannot be read here; the message says what to do."""


class UnsafeCheckpointError(UserError, ValueError):
    """A checkpoint's metadata refers to something that has no place in a checkpoint."""


def model_tensors(gpt: Any, *, per_layer_keys: bool = False) -> ShardedTensors:
    """What this rank holds of a megatron-core model's parameters, with keys under `MODEL_PREFIX`.

    Args:
        gpt: a `GPTModel`.
        per_layer_keys: one tensor per layer (``layers.0.mlp...``) instead of one for all. megatron-core reads both.
    """
    metadata = {"non_homogeneous_layers": True} if per_layer_keys else None
    states = gpt.sharded_state_dict(prefix=MODEL_PREFIX, metadata=metadata)
    # Transformer Engine adds pickled objects.
    return {name: state for name, state in states.items() if isinstance(state, ShardedTensor | ShardedTensorFactory)}


def build_factories(tensors: Iterable[Sharded]) -> list[ShardedTensor]:
    """Replace factories (gate and up projections in one parameter) by the tensors they make, views of the data."""
    built: list[ShardedTensor] = []
    for tensor in tensors:
        if isinstance(tensor, ShardedTensorFactory):
            parts = tensor.build()
            built.extend(parts.values() if isinstance(parts, dict) else parts)
        else:
            built.append(tensor)
    return built


def describe_failures(error: CheckpointException) -> str:
    """What went wrong on which rank."""
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())


# ---- reading --------------------------------------------------------------------------------

_ALLOWED_GLOBALS: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset({"MCoreMetadata", "MCoreSavePlan"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset(
        {"Size"} | {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    ),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"set", "frozenset", "slice"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "Path"}),  # where Python 3.13 keeps them
}


def _unsafe(name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the checkpoint's .metadata refers to {name}, which a checkpoint has no use for: do not load it unless you "
        "trust its origin, and then convert it with megatron-core first"
    )


def _member(owner: Any, name: str) -> enum.Enum:
    """A member of an enumeration, and ``getattr`` of nothing else."""
    if not isinstance(owner, enum.EnumMeta):
        raise _unsafe("builtins.getattr")
    member: enum.Enum = owner[name]
    return member


class _MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata`` and nothing else: any other class or function is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enumerations by it
            return _member
        if name not in _ALLOWED_GLOBALS.get(module, ()):
            raise _unsafe(f"{module}.{name}")
        return super().find_class(module, name)


def _refuse_other_formats(source: FileSource, folder: str) -> None:
    """Raise an error if the weights are in another of NeMo's formats. It names the format and how to convert it."""
    names = source.names()
    if any(name.startswith(f"{folder}/") and name.endswith("/.zarray") for name in names):
        raise UnsupportedFormatError(
            f"{source.location}: {folder}/ is a distributed checkpoint in the zarr format; only torch_dist is "
            "supported. Load it with NeMo and save it with model.dist_ckpt_format=torch_dist"
        )
    old = [name for name in names if name.endswith(".ckpt") or name.startswith(("mp_rank_", "tp_rank_"))]
    if old:
        raise UnsupportedFormatError(
            f"{source.location}: {old[0]} is not a megatron-core checkpoint, the only kind supported. Convert it with "
            "NeMo's scripts/checkpoint_converters/convert_gpt_nemo_to_mcore.py"
        )


def _read_metadata(source: FileSource, folder: str) -> Metadata:
    def read() -> io.BytesIO:
        with source.open(f"{folder}/.metadata") as stream:
            return io.BytesIO(stream.read())

    try:
        content = read_patiently(source.location / folder / ".metadata", read)
    except FileNotFoundError:
        _refuse_other_formats(source, folder)
        raise
    try:
        metadata = _MetadataUnpickler(content).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{source.location}: {folder}/.metadata is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpointError(f"{source.location}: {folder}/.metadata is not a distributed checkpoint's")
    return metadata


class _SourceFileSystem(FileSystem):
    """Lets torch's reader open files of a `FileSource`."""

    def __init__(self, source: FileSource) -> None:
        self._source = source

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with self._source.open(str(path)) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: Any, suffix: str) -> str:
        return safe_name(f"{path}/{safe_name(suffix)}")


class _LoadPlanner(MCoreLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        """As megatron-core's. Each piece that is read counts as progress for the watchdog, however slow reading is."""
        activity.progress()
        return super().resolve_tensor(read_item)


class _SafeReader(dcp.FileSystemReader):
    """torch's reader over a `FileSource`, with metadata that was read safely."""

    def __init__(self, source: FileSource, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self.fs = _SourceFileSystem(source)
        self._metadata = metadata
        self._location = source.location / folder

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """As torch's, but tried again if the system cannot read a file at the moment."""
        return read_patiently(self._location, lambda: super(_SafeReader, self).read_data(plan, planner))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def stored_shapes(source: FileSource, folder: str) -> dict[str, tuple[int, ...]]:
    """Key -> global shape of every tensor in the distributed checkpoint in ``folder``.

    Raises:
        FileNotFoundError, UnsupportedFormatError: there is none.
        DamagedCheckpointError: its metadata cannot be read.
    """
    return _shapes(_read_metadata(source, folder))


def _shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(value.size) for key, value in entries if isinstance(value, TensorStorageMetadata)}


def load_sharded_tensors(
    tensors: ShardedTensors,
    source: FileSource,
    folder: str,
    *,
    optional: Iterable[str] = (),
    ignored: Iterable[str] = (),
    checked: Metadata | None = None,
) -> None:
    """Fill the live tensors from the distributed checkpoint in ``folder`` of ``source``. Collective.

    Dtypes may differ. Where a tensor allows another global shape (the padded vocabulary), rows that the
    checkpoint lacks become zero.

    Args:
        optional: prefixes of keys that may be missing from the checkpoint; those tensors keep their values.
        ignored: prefixes of the checkpoint's keys that no tensor needs to ask for.
        checked: what `check_sharded_tensors` returned for tensors that include these; None: they are checked here.

    Raises:
        CheckpointMismatchError: missing or unexpected keys, or other shapes: all named, on every rank.
        DamagedCheckpointError: the files cannot be read.
    """
    metadata = checked or check_sharded_tensors(tensors, source, folder, optional=optional, ignored=ignored)
    built, stored = build_factories(tensors.values()), _shapes(metadata)
    present = [t for t in built if t.key in stored]
    targets = [t.data for t in present]
    # By number, since several tensors may share a key (the layers of one stage).
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys({str(i): t for i, t in enumerate(present)})
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[t for t in present if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={t.key: t for t in present if t.allow_shape_mismatch},
        flatten_state_dict=False,
    )
    try:
        state_dict = mcore_to_pyt_state_dict(by_key, is_loading=True)
        dcp.load(state_dict, storage_reader=_SafeReader(source, folder, metadata), planner=planner)
    except CheckpointException as error:
        raise DamagedCheckpointError(f"reading {source.location}/{folder}: {describe_failures(error)}") from error
    with torch.no_grad():
        for tensor, target in zip(present, targets, strict=True):
            # torch fills in place, except where a tensor was not contiguous and megatron-core copied it.
            if tensor.data.data_ptr() != target.data_ptr():
                target.copy_(tensor.data.view_as(target))


def check_sharded_tensors(
    tensors: ShardedTensors,
    source: FileSource,
    folder: str,
    *,
    optional: Iterable[str] = (),
    ignored: Iterable[str] = (),
) -> Metadata:
    """Check that the distributed checkpoint in ``folder`` has exactly what all ranks together need. Collective.

    For the arguments and errors see `load_sharded_tensors`; the tensors' data may be on the ``meta`` device.

    Returns:
        The checkpoint's metadata.
    """
    metadata = _read_metadata(source, folder)
    built = build_factories(tensors.values())
    wanted = {t.key: (tuple(t.global_shape), t.allow_shape_mismatch) for t in built}
    everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, wanted)
    all_wanted = {key: value for part in everywhere for key, value in part.items()}
    location = f"{source.location}/{folder}"
    _check_keys(all_wanted, _shapes(metadata), location, tuple(optional), tuple(ignored))
    return metadata


def _check_keys(
    wanted: Mapping[str, tuple[tuple[int, ...], bool]],
    stored: Mapping[str, tuple[int, ...]],
    location: str,
    optional: tuple[str, ...],
    ignored: tuple[str, ...],
) -> None:
    missing = sorted(key for key in wanted if key not in stored and not key.startswith(optional))
    unexpected = sorted(key for key in stored if key not in wanted and not key.startswith(ignored))
    shapes = [
        f"{key}: checkpoint {list(stored[key])}, model {list(shape)}"
        for key, (shape, flexible) in sorted(wanted.items())
        if key in stored and stored[key] != shape and not (flexible and stored[key][1:] == shape[1:])
    ]
    problems = []
    if missing:
        problems.append(f"missing from the checkpoint: {', '.join(missing)}")
    if unexpected:
        problems.append(f"in the checkpoint, but not in the model: {', '.join(unexpected)}")
    if shapes:
        problems.append(f"different shapes: {'; '.join(shapes)}")
    if problems:
        raise CheckpointMismatchError(f"{location} does not fit the model. " + ". ".join(problems))
