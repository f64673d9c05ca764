"""Megatron distributed checkpoints (`torch_dist`): a model's tensors, and reading them at any parallel layout.

The format is megatron-core's, so that what its tools and NeMo write can be read here; `sharded_writing` writes it.
Reading uses neither ``dist_checkpointing.load`` nor torch's planners, which act on objects that the file has made: it
reads a checked index (`sharded_index`), and from the files tensors alone (``torch.load(weights_only=True)``).
``common.pt`` and pickled objects (fp8 states) are not read.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_every_rank
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, FileSource
from nemo_style_aligner.trainer.checkpoints.manifest import read_patiently
from nemo_style_aligner.trainer.checkpoints.sharded_index import Chunk, Index, StoredTensor, one_line, read_index
from nemo_style_aligner.wording import some_of

MODEL_PREFIX = "model."
"""Prefix of the keys of a model's tensors, in training checkpoints and in archives."""

HEAD_PREFIX = MODEL_PREFIX + "rm_head."
"""Prefix of the keys of a reward head."""

ADAPTER_PREFIX = MODEL_PREFIX + "adapter."
"""Prefix of the keys of a model's adapters; then come PEFT's names."""

OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the keys of an optimizer's tensors, in training checkpoints."""

BESIDE_PREFIX = "beside."
"""Prefix of the keys of models that are trained beside the job's own, and of their optimizers: beside.NAME.model..."""


class CheckpointMismatchError(UserError, ValueError):
    """A checkpoint does not hold what the model needs."""


class UnsupportedFormatError(UserError, ValueError):
    """A checkpoint is in a format that cannot be read here; the message says what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A box of a global tensor, which this rank has.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        offsets: of the box in it.
        data: the live values, of the box's shape; or a copy, to be written later.
        is_main: whether no other tensor- or pipeline-parallel rank writes it; each data-parallel rank may have it, or
            each that has the same experts.
        may_grow: whether the tensor may have more rows than are stored (the padded vocabulary); they become zero.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor
    is_main: bool = True
    may_grow: bool = False

    @property
    def is_of_expert(self) -> bool:
        """Whether it belongs to experts, which ranks may divide otherwise than other weights."""
        return ".mlp.experts." in self.key

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.data.numel() * self.data.element_size()


def model_parts(gpt: Any, *, per_layer_keys: bool = False) -> list[Part]:
    """What this rank holds of a megatron-core model's parameters; keys are under `MODEL_PREFIX`.

    Args:
        gpt: a `GPTModel`.
        per_layer_keys: one tensor per layer (``layers.0.mlp...``) instead of one for all. megatron-core reads both.
    """
    return [part for _, parts in parameter_parts(gpt, per_layer_keys=per_layer_keys) for part in parts]


def below(prefix: str, parts: Iterable[Part]) -> list[Part]:
    """The parts with a prefix before their keys."""
    return [dataclasses.replace(part, key=prefix + part.key) for part in parts]


def parameter_parts(gpt: Any, *, per_layer_keys: bool = False) -> list[tuple[torch.Tensor, list[Part]]]:
    """`model_parts` by parameter, which has several if it is stored as several (gate and up projections).

    Adapters describe their own.
    """
    metadata = {"non_homogeneous_layers": True} if per_layer_keys else None
    states = gpt.sharded_state_dict(prefix=MODEL_PREFIX, metadata=metadata).values()
    # Transformer Engine adds pickled objects.
    tensors = (s for s in states if isinstance(s, ShardedTensor | ShardedTensorFactory))
    return [(s.data, _parts(s)) for s in tensors if ".adapter." not in s.key]


def _parts(state: Any) -> list[Part]:
    """The parts that megatron-core's description of a parameter stands for."""
    if isinstance(state, ShardedTensorFactory):
        built = state.build()
        return [part for one in (built.values() if isinstance(built, dict) else built) for part in _parts(one)]
    return [part_of(state)]


def part_of(state: ShardedTensor) -> Part:
    """megatron-core's description of a tensor in our words."""
    replica = state.replica_id if isinstance(state.replica_id, tuple) else (state.replica_id,)
    data = state.data.detach()[(None,) * state.prepend_axis_num]
    place = tuple(state.global_shape), tuple(state.global_offset)
    return Part(state.key, *place, data, not any(replica[:-1]), state.allow_shape_mismatch)


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
    return {key: tensor.shape for key, tensor in stored_index(source, folder).items()}


def stored_index(source: FileSource, folder: str) -> Index:
    """Key -> every tensor in the distributed checkpoint in ``folder``. For the errors see `stored_shapes`."""
    try:
        return read_index(source, folder)
    except FileNotFoundError:
        _refuse_other_formats(source, folder)
        raise


def load_sharded_tensors(
    parts: Sequence[Part],
    source: FileSource,
    folder: str,
    *,
    optional: Iterable[str] = (),
    ignored: Iterable[str] = (),
) -> None:
    """Fill the live tensors from the distributed checkpoint in ``folder`` of ``source``. Collective.

    Dtypes may differ.

    Args:
        parts: what all ranks together have of the tensors that they need.
        optional: prefixes of keys that may be missing from the checkpoint; those tensors keep their values.
        ignored: prefixes of the checkpoint's keys that no part needs to ask for.

    Raises:
        CheckpointMismatchError: missing or unexpected keys, or other shapes: named, on every rank.
        DamagedCheckpointError: the files cannot be read; `OtherRankError` on the other ranks.
    """
    index = stored_index(source, folder)
    everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, {part.key: (part.shape, part.may_grow) for part in parts})
    wanted = {key: value for some in everywhere for key, value in some.items()}
    stored = {key: tensor.shape for key, tensor in index.items()}
    _check_keys(wanted, stored, f"{source.location}/{folder}", tuple(optional), tuple(ignored))
    on_every_rank(lambda: _fill(parts, index, source), None)


@dataclasses.dataclass(frozen=True)
class _Read:
    """Part of a chunk that goes to a part of a live tensor, of the same shape."""

    chunk: Chunk
    dtype: torch.dtype
    box: tuple[slice, ...]
    target: torch.Tensor


def _reads(part: Part, stored: StoredTensor) -> Iterator[_Read]:
    """What to read to fill a part; rows that are not stored become zero."""
    there = part.data
    if part.may_grow:
        there = there[: max(0, stored.shape[0] - part.offsets[0])]
        part.data[len(there) :].zero_()
    missing = there.numel()
    for chunk in stored.chunks:
        both = list(zip(part.offsets, there.shape, chunk.offsets, chunk.sizes, strict=True))
        starts = [max(ours, theirs) for ours, _, theirs, _ in both]
        ends = [min(ours + size, theirs + length) for ours, size, theirs, length in both]
        if all(start < end for start, end in zip(starts, ends, strict=True)):
            box, target = (
                tuple(slice(s - origin, e - origin) for s, e, origin in zip(starts, ends, origins, strict=True))
                for origins in (chunk.offsets, part.offsets)
            )
            missing -= there[target].numel()
            yield _Read(chunk, stored.dtype, box, there[target])
    if missing:
        raise DamagedCheckpointError(f"the chunks of {part.key} do not cover each of its elements exactly once")


def _fill(parts: Iterable[Part], index: Index, source: FileSource) -> None:
    """Read each chunk once, in the order of the files."""
    reads = [read for part in parts if part.key in index for read in _reads(part, index[part.key])]
    reads.sort(key=lambda read: (read.chunk.file, read.chunk.start))
    for chunk, group in itertools.groupby(reads, key=lambda read: read.chunk):
        path = source.location / chunk.file
        read_patiently(path, functools.partial(_read, chunk, list(group), source, str(path)))


def _read(chunk: Chunk, reads: Sequence[_Read], source: FileSource, path: str) -> None:
    """Read one chunk and copy its parts to where they belong."""
    what = f"{path}, bytes {chunk.start} to {chunk.start + chunk.length}"
    activity.progress()
    try:
        with source.open(chunk.file) as stream:
            stream.seek(chunk.start)
            stored = io.BytesIO(stream.read(chunk.length))
        content = torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:  # what zipfile, torch and Python raise about contents
        if isinstance(error, OSError) and error.errno is not None:  # the system's: it cannot be read now
            raise
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error
    if type(content) is not torch.Tensor or content.layout != torch.strided:
        raise DamagedCheckpointError(f"{what} is damaged: a tensor is expected")
    for read in reads:
        if content.dtype != read.dtype or tuple(content.shape) != chunk.sizes:
            raise DamagedCheckpointError(f"{what}: {content.dtype} {tuple(content.shape)} is not what the index says")
        read.target.copy_(content[read.box])


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
