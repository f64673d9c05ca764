"""Megatron distributed checkpoints (`torch_dist`): a model's tensors, and reading them at any parallel layout.

The format is megatron-core's, so that what its tools and NeMo write can be read here; `sharded_writing` writes it.
Reading uses neither ``dist_checkpointing.load`` nor torch's planners, which act on objects that the file has made: it
reads a checked index (`sharded_index`), and from the files tensors alone (`torch_file`). ``common.pt`` and pickled
objects (fp8 states) are not read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError, FileSource
from nemo_style_aligner.checkpoints.manifest import read_patiently
from nemo_style_aligner.checkpoints.sharded_index import Chunk, Index, StoredTensor, read_index
from nemo_style_aligner.checkpoints.torch_file import TorchFile
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.parallel.agreement import on_every_rank
from nemo_style_aligner.wording import some_of

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


def stored_shapes(source: FileSource, folder: str) -> dict[str, tuple[int, ...]]:
    """Key -> global shape of every tensor in the distributed checkpoint in ``folder``.

    Raises:
        FileNotFoundError, UnsupportedFormatError: there is none.
        DamagedCheckpointError, UnsafeCheckpointError: see `read_index`.
    """
    return {key: tensor.shape for key, tensor in _read_index(source, folder).items()}


def _read_index(source: FileSource, folder: str) -> Index:
    try:
        return read_index(source, folder)
    except FileNotFoundError:
        _refuse_other_formats(source, folder)
        raise


def load_sharded_tensors(
    tensors: ShardedTensors,
    source: FileSource,
    folder: str,
    *,
    optional: Iterable[str] = (),
    ignored: Iterable[str] = (),
    checked: Index | None = None,
) -> None:
    """Fill the live tensors from the distributed checkpoint in ``folder`` of ``source``. Collective.

    Dtypes may differ. Where a tensor allows another global shape (the padded vocabulary), rows that the
    checkpoint lacks become zero.

    Args:
        optional: prefixes of keys that may be missing from the checkpoint; those tensors keep their values.
        ignored: prefixes of the checkpoint's keys that no tensor needs to ask for.
        checked: what `check_sharded_tensors` returned for tensors that include these; None: they are checked here.

    Raises:
        CheckpointMismatchError: missing or unexpected keys, or other shapes: named, on every rank.
        DamagedCheckpointError: the files cannot be read; `OtherRankError` on the other ranks.
    """
    index = checked or check_sharded_tensors(tensors, source, folder, optional=optional, ignored=ignored)
    present = [tensor for tensor in build_factories(tensors.values()) if tensor.key in index]
    reads = [read for tensor in present for read in _reads(tensor, index[tensor.key])]

    def fill() -> None:
        with torch.no_grad():
            for tensor in present:
                if tensor.allow_shape_mismatch:
                    tensor.data.detach().zero_()
            _read(reads, source)

    on_every_rank(fill, None)


@dataclasses.dataclass(frozen=True)
class _Read:
    """Part of a chunk that goes to a part of a live tensor, of the same shape."""

    chunk: Chunk
    dtype: torch.dtype
    part: tuple[slice, ...]
    target: torch.Tensor


def _reads(tensor: ShardedTensor, stored: StoredTensor) -> Iterable[_Read]:
    """What to read to fill this rank's part of a global tensor."""
    data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
    for chunk in stored.chunks:
        both = list(zip(tensor.global_offset, data.shape, chunk.offsets, chunk.sizes, strict=True))
        starts = [max(ours, theirs) for ours, _, theirs, _ in both]
        ends = [min(ours + size, theirs + length) for ours, size, theirs, length in both]
        if all(start < end for start, end in zip(starts, ends, strict=True)):
            part, target = (
                tuple(slice(s - origin, e - origin) for s, e, origin in zip(starts, ends, origins, strict=True))
                for origins in (chunk.offsets, tensor.global_offset)
            )
            yield _Read(chunk, stored.dtype, part, data[target])


def _read(reads: Sequence[_Read], source: FileSource) -> None:
    """Read each chunk once, in the order of the files. A file is tried again if the system cannot read it now."""
    ordered = sorted(reads, key=lambda read: (read.chunk.file, read.chunk.start))
    for file, group in itertools.groupby(ordered, key=lambda read: read.chunk.file):
        of_file = list(group)

        def read_file(file: str = file, of_file: Sequence[_Read] = of_file) -> None:
            with source.open(file) as stream:
                for _, same in itertools.groupby(of_file, key=lambda read: read.chunk.start):
                    _fill(list(same), stream, f"{source.location}/{file}")

        read_patiently(source.location / file, read_file)


def _fill(reads: Sequence[_Read], stream: IO[bytes], what: str) -> None:
    """Read one chunk and copy its parts to where they belong."""
    chunk, dtype = reads[0].chunk, reads[0].dtype
    what = f"{what}, bytes {chunk.start} to {chunk.start + chunk.length}"
    file = TorchFile(stream, chunk.start, chunk.length, what)
    content = file.tensor(file.value)
    if content.dtype != dtype or tuple(content.shape) != chunk.sizes:
        raise DamagedCheckpointError(f"{what}: {content.dtype} {tuple(content.shape)} is not what the index says")
    for read in reads:
        read.target.copy_(content[read.part])


def check_sharded_tensors(
    tensors: ShardedTensors,
    source: FileSource,
    folder: str,
    *,
    optional: Iterable[str] = (),
    ignored: Iterable[str] = (),
) -> Index:
    """Check that the distributed checkpoint in ``folder`` has exactly what all ranks together need. Collective.

    For the arguments and errors see `load_sharded_tensors`; the tensors' data may be on the ``meta`` device.

    Returns:
        The checkpoint's index.
    """
    index = _read_index(source, folder)
    built = build_factories(tensors.values())
    wanted = {t.key: (tuple(t.global_shape), t.allow_shape_mismatch) for t in built}
    everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, wanted)
    all_wanted = {key: value for part in everywhere for key, value in part.items()}
    location = f"{source.location}/{folder}"
    stored = {key: tensor.shape for key, tensor in index.items()}
    _check_keys(all_wanted, stored, location, tuple(optional), tuple(ignored))
    return index


_NAMED = 20  # keys that an error names


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
        problems.append(f"missing from the checkpoint: {some_of(missing, _NAMED)}")
    if unexpected:
        problems.append(f"in the checkpoint, but not in the model: {some_of(unexpected, _NAMED)}")
    if shapes:
        problems.append(f"different shapes: {some_of(shapes, _NAMED)}")
    if problems:
        raise CheckpointMismatchError(f"{location} does not fit the model. " + ". ".join(problems))
