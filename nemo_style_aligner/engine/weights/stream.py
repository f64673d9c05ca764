"""Weights in and out of a sharded model, as full tensors under Hugging Face's names.

Both directions follow the table in `layout` and handle a bounded number of bytes at a time. Both are called
by every rank of the model-parallel group.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.weights.layout import (
    EMBEDDING,
    OUTPUT,
    PADDING,
    HFTensor,
    LayoutEntry,
    Piece,
    check_shapes,
    dtype_of,
    hf_tensors,
    weight_layout,
)
from nemo_style_aligner.engine.weights.shared_buckets import SharedBuckets, shared_buckets
from nemo_style_aligner.wording import some_of

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.gpt import MegatronModel

DEFAULT_BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 64  # bytes, of tensors in shared memory
_COMPARED_ROWS = 1024
_HEAD_DTYPES = (torch.float32, torch.bfloat16)


class WeightSource(Protocol):
    """Tensors under Hugging Face's names that can be read one by one, and in slices."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, without reading any."""

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """``length`` rows (``dim`` 0) or columns (``dim`` 1) from ``start`` on, any dtype, on the CPU or a GPU."""


# ---- export ------------------------------------------------------------------------------------


def export_weights(
    model: MegatronModel,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    without: Collection[str] = (),
    transient: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (Hugging Face name, full tensor), on every rank in the same order: the table's, unless ``transient``.

    Collective over the tensor- and pipeline-parallel group: every rank of it must run the iterator to its end.
    Data-parallel replicas run theirs independently, unless the model `computes_together`: then all do it together.
    Weights are merged with their adapters, one at a time.
    Tensors have the parameters' dtype, on this rank's device.
    With one rank per replica nothing is communicated and tensors are views of the live parameters (q, k and v,
    which Megatron interleaves, are copies): clone what must outlive the next training step.

    Args:
        model: the model.
        bucket_bytes: size of what one round of communication gathers. Memory in use is about twice that, or
            twice the largest parameter if that is larger.
        without: tensors to leave out, the same on every rank: a parameter is skipped if all of its tensors are named.
        transient: tensors need not outlive the iteration that yields them. CPU ranks of one host then exchange
            through shared memory, which they keep; the size given above is then that of all of them together.
    """
    layout = model.layout
    entries, head_dtype = _layout_table(model)
    parameters = _local_parameters(model, entries)
    entries = tuple(entry for entry in entries if not all(part.name in without for part in entry.parts))
    if layout.tp_size == layout.pp_size == 1 and not model.cuts_experts:
        scratch: dict[int, torch.Tensor] | None = {} if transient else None
        for entry in entries:
            if not entry.is_copy:
                yield from _hf_parts(entry, [model.merged(parameters[entry])], scratch)
        return
    if transient and entries and device().type == "cpu" and not model.cuts_experts:
        rounds = _rounds(_buckets(model, entries, head_dtype, bucket_bytes // layout.pp_size))
        most = max(sum(bucket.num_bytes for bucket in buckets) for buckets in rounds)
        shared = shared_buckets(parallel_state.get_model_parallel_group(), most)
        if shared is not None:
            for buckets in rounds:
                yield from _share(model, buckets, parameters, shared)
            return
    for bucket in _buckets(model, entries, head_dtype, bucket_bytes):
        yield from _exchange(model, bucket, parameters)


def lendable_weights(model: MegatronModel, rank: int, size: int) -> dict[tuple[str, ...], torch.Tensor]:
    """Live parameters that an engine on ``rank`` of ``size`` tensor-parallel ranks may compute with in place.

    Empty unless training cuts the model as the engine does: no pipeline stages, as many tensor-parallel ranks, and this
    rank's number among them. Each value is a view of a parameter: this rank's part, in Megatron's order, of the Hugging
    Face tensors that the key names. On a single rank the rows that pad the vocabulary are left out. On several they are
    kept, so that the shape is the engine's only if its rank holds the same rows. Weights with adapters are left out.
    """
    layout = model.layout
    if layout.pp_size > 1 or (layout.tp_rank, layout.tp_size) != (rank, size):
        return {}
    entries, _ = _layout_table(model)
    found = {}
    for entry, parameter in _local_parameters(model, entries).items():
        if parameter in model.adapters or (entry.expert is not None and layout.cuts_experts):
            continue
        length = entry.parts[0].shape[0] if entry.order == "vocabulary" and size == 1 else len(parameter)
        found[tuple(part.name for part in entry.parts)] = parameter.detach()[:length]
    return found


@dataclasses.dataclass
class _Bucket:
    """Parameters of one pipeline stage and dtype, and of experts of one ``owner`` (see `LayoutEntry`) or of none."""

    stage: int
    dtype: torch.dtype
    owner: int | None
    entries: list[LayoutEntry]

    def continues(self, other: _Bucket) -> bool:
        """Whether entries of ``other`` may be among these."""
        return (self.stage, self.dtype, self.owner) == (other.stage, other.dtype, other.owner)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensors, without padding; each rounded up, so that a tensor of any dtype can follow."""
        return sum(map(self.tensor_bytes, (part for entry in self.entries for part in entry.parts)))

    def tensor_bytes(self, tensor: HFTensor) -> int:
        """Bytes of one of the tensors, rounded up."""
        return -(-math.prod(tensor.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _buckets(
    model: MegatronModel, entries: tuple[LayoutEntry, ...], head_dtype: torch.dtype, bucket_bytes: int
) -> Iterator[_Bucket]:
    """Runs of entries of one stage, dtype and owner, of at most ``bucket_bytes``; a larger entry is one by itself."""
    bucket: _Bucket | None = None
    size = 0
    for entry in entries:
        if entry.is_copy:
            continue
        dtype = head_dtype if _is_head(entry) else dtype_of(entry.parts[0].name, model.config.params_dtype)
        stage = entry.stage(model.architecture.num_layers, model.layout.pp_size)
        begun = _Bucket(stage, dtype, _owner(model, entry), [])
        ranks, _ = entry.cut(model.layout)
        nbytes = math.prod(entry.shard_shape(ranks)) * ranks * dtype.itemsize
        if bucket is None or not bucket.continues(begun) or size + nbytes > bucket_bytes:
            if bucket is not None:
                yield bucket
            bucket, size = begun, 0
        bucket.entries.append(entry)
        size += nbytes
    if bucket is not None:
        yield bucket


def _rounds(buckets: Iterator[_Bucket]) -> list[list[_Bucket]]:
    """Group the buckets into rounds, each of one bucket per stage that has any left: all stages write at once."""
    by_stage: dict[int, list[_Bucket]] = {}
    for bucket in buckets:
        by_stage.setdefault(bucket.stage, []).append(bucket)
    rounds = itertools.zip_longest(*by_stage.values())
    return [[bucket for bucket in buckets if bucket is not None] for buckets in rounds]


def _exchange(
    model: MegatronModel, bucket: _Bucket, parameters: Mapping[LayoutEntry, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """One round: the owning stage's shards go to the other stages, then every tensor-parallel group gathers.

    Shards of experts go from the owner to its expert-parallel group in between.
    """
    layout, stage, dtype, entries = model.layout, bucket.stage, bucket.dtype, bucket.entries
    ranks, _ = entries[0].cut(layout)
    shapes = [entry.shard_shape(ranks) for entry in entries]
    is_owner = bucket.owner in (None, layout.ep_rank)
    if stage == layout.pp_rank and is_owner:
        flat = torch.cat([model.merged(parameters[entry]).reshape(-1).to(dtype) for entry in entries])
    else:
        flat = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device())
    if layout.pp_size > 1 and is_owner:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, src=dist.get_global_rank(group, stage), group=group)
    if bucket.owner is not None and layout.ep_size > 1:
        group = parallel_state.get_expert_model_parallel_group()
        dist.broadcast(flat, src=dist.get_global_rank(group, bucket.owner), group=group)
    gathered = [flat]
    if ranks > 1:
        # New memory in each round: tensors yielded before stay as they are.
        gathered = list(flat.new_empty(ranks, flat.numel()))
        is_expert = bucket.owner is not None
        groups = parallel_state.get_tensor_model_parallel_group, parallel_state.get_expert_tensor_parallel_group
        dist.all_gather(gathered, flat, group=groups[is_expert]())
    offset = 0
    for entry, shape in zip(entries, shapes, strict=True):
        end = offset + math.prod(shape)
        yield from _hf_parts(entry, [shard[offset:end].view(shape) for shard in gathered])
        offset = end


def _share(
    model: MegatronModel,
    buckets: list[_Bucket],
    parameters: Mapping[LayoutEntry, torch.Tensor],
    shared: SharedBuckets,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One round in shared memory: every rank writes its pieces of the full tensors of its stage's bucket."""
    layout, memory = model.layout, shared.next()
    tensors: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        for entry in bucket.entries:
            for part in entry.parts:
                own, memory = memory.tensor_split([bucket.tensor_bytes(part)])
                tensors[part.name] = own.view(bucket.dtype)[: math.prod(part.shape)].view(part.shape)
            if bucket.stage != layout.pp_rank:
                continue
            parameter, dim = model.merged(parameters[entry]), entry.split_dim or 0
            for piece in entry.pieces(layout.tp_size):
                if piece.rank == layout.tp_rank and piece.part != PADDING:
                    target = tensors[entry.parts[piece.part].name].narrow(dim, piece.start, piece.length)
                    target.copy_(parameter.narrow(dim, piece.offset, piece.length))
    shared.publish()
    yield from tensors.items()


def _hf_parts(
    entry: LayoutEntry, shards: list[torch.Tensor], scratch: dict[int, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors of a parameter, from all ranks' shards; a view where a tensor is a single piece.

    Others are copies: in new memory or, given ``scratch`` (by part), in memory that the next parameter overwrites.
    """
    dim = entry.split_dim or 0
    pieces = entry.pieces(len(shards))
    for part, tensor in enumerate(entry.parts):
        views = [shards[p.rank].narrow(dim, p.offset, p.length) for p in pieces if p.part == part]
        # Resized to nothing, a tensor keeps its memory, and `cat` may resize it again.
        memory = None if scratch is None else scratch.setdefault(part, views[0].new_empty(0)).resize_(0)
        yield tensor.name, views[0] if len(views) == 1 else torch.cat(views, dim, out=memory)


# ---- import ------------------------------------------------------------------------------------


def import_weights(model: MegatronModel, source: WeightSource, progress: Callable[[], None] = lambda: None) -> None:
    """Copy full tensors into this rank's shards, one tensor at a time, converted to the parameters' dtype.

    Every rank of the model calls it and reads its own slices. Rows of the padded vocabulary become zero. An
    optimizer that keeps fp32 main weights must be told to reload them afterwards.

    Args:
        model: the model.
        source: is checked before anything is written.
        progress: called after each tensor that this rank has read.

    Raises:
        ValueError: a tensor is missing, superfluous, of the wrong shape or not finite, or the model is tied and the
            source has an output layer that differs from the embedding; the message names it.
    """
    entries, _ = _layout_table(model)
    present, head = source.shapes(), hf_tensors(entries).get("score.weight")
    is_tied = model.architecture.tied_embeddings
    check_shapes(model.architecture, present, head.shape[0] if head else 0)
    if is_tied and OUTPUT in present and not model.has_reward_head:
        _check_tie(present, source)
    places: dict[str, list[tuple[torch.Tensor, int, Piece]]] = {}
    for entry, parameter in _local_parameters(model, entries).items():
        ranks, own_rank = entry.cut(model.layout)
        dim, rank = (0, 0) if entry.split_dim is None else (entry.split_dim, own_rank)
        is_absent = entry.optional and entry.parts[0].name not in present
        for part in () if is_absent else entry.parts:
            places.setdefault(part.name, [])
        for piece in entry.pieces(ranks):
            if piece.rank == rank:
                place = parameter.detach().narrow(dim, piece.offset, piece.length)
                if piece.part == PADDING or is_absent:
                    place.zero_()
                else:
                    places[entry.parts[piece.part].name].append((place, dim, piece))
    for name, own in places.items():
        for place, dim, piece in own:
            place.copy_(source.read(name, dim, piece.start, piece.length))
            if not place.isfinite().all():
                raise ValueError(f"{name} has values that are NaN or infinite: the weights are damaged")
        progress()


def _check_tie(shapes: Mapping[str, tuple[int, ...]], source: WeightSource) -> None:
    """Raise if the output layer of a tied language model's source differs from the embedding.

    Every rank compares all rows, some at a time, so that every rank finds the fault.
    """
    num_rows = shapes[EMBEDDING][0]
    same = shapes[OUTPUT] == shapes[EMBEDDING]
    for start in range(0, num_rows if same else 0, _COMPARED_ROWS):
        length = min(_COMPARED_ROWS, num_rows - start)
        embedding = source.read(EMBEDDING, 0, start, length)
        same = torch.equal(source.read(OUTPUT, 0, start, length).to(embedding.dtype), embedding)
        if not same:
            break
    if not same:
        raise ValueError(
            f"embedding and output layer are tied, but {OUTPUT} differs from {EMBEDDING}: it was trained "
            "separately (PEFT's modules_to_save does that). Set tie_word_embeddings=false in config.json"
        )


# ---- to ranks that only generate ---------------------------------------------------------------

Broadcast = Callable[[torch.Tensor], None]


def send_weights(
    stream: Iterable[tuple[str, torch.Tensor]],
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    broadcast: Broadcast,
) -> None:
    """Send the stream of `export_weights` to the ranks that call `receive_weights`, tensor by tensor.

    Both sides know the layout table, so nothing but the tensors' bytes goes over the wire.

    Args:
        dtype: of the tensors.
        broadcast: sends a tensor.

    Raises:
        ValueError: the stream is not the architecture's.
    """
    tensors = iter(stream)
    for expected in hf_tensors(weight_layout(architecture)).values():
        name, tensor = next(tensors, ("nothing", torch.empty(0)))
        if (name, tuple(tensor.shape)) != expected:
            raise ValueError(f"the weights have {name} {list(tensor.shape)} in the place of {expected.name}")
        broadcast(tensor.to(dtype_of(name, dtype)).contiguous())
    if (extra := next(tensors, None)) is not None:
        raise ValueError(f"the weights have {extra[0]}, which the model has no place for")


def receive_weights(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    broadcast: Broadcast,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_weights` sends, as the stream that an engine's `refit` takes; tensors on this rank's device."""
    for name, shape in hf_tensors(weight_layout(architecture)).values():
        tensor = torch.empty(shape, dtype=dtype_of(name, dtype), device=device())
        broadcast(tensor)
        yield name, tensor


# ---- a sharded model ---------------------------------------------------------------------------


def _layout_table(model: MegatronModel) -> tuple[tuple[LayoutEntry, ...], torch.dtype]:
    """The model's layout table and the dtype of its head. Collective over pipeline stages for a reward model."""
    attributes, head_dtype = _head_facts(model) if model.has_reward_head else (0, model.config.params_dtype)
    entries = weight_layout(model.architecture, padded_vocab_size=model.gpt.vocab_size, num_attributes=attributes)
    return entries, head_dtype


def _is_head(entry: LayoutEntry) -> bool:
    """Whether the entry belongs to a reward head, which has a dtype of its own."""
    return entry.megatron_names[0].startswith("rm_head.")


def _local_parameters(model: MegatronModel, entries: tuple[LayoutEntry, ...]) -> dict[LayoutEntry, torch.Tensor]:
    """The table's entries that this rank holds, with their parameters.

    Raises:
        ValueError: the model has a parameter that the table does not know, lacks one or has another shape.
    """
    layout, num_layers, experts = model.layout, model.architecture.num_layers, model.architecture.experts
    first_layer = layout.pp_rank * (num_layers // layout.pp_size)
    first_expert = layout.ep_rank * (experts.number // layout.ep_size) if experts is not None else 0
    named = {
        _global_name(name, first_layer, first_expert): parameter
        for name, parameter in model.named_weights()
        if ".adapter." not in name
    }
    found: dict[LayoutEntry, torch.Tensor] = {}
    for entry in entries:
        name = next((name for name in entry.megatron_names if name in named), None)
        if name is None:
            is_here = _owner(model, entry) in (None, layout.ep_rank) and not entry.is_copy
            if is_here and entry.stage(num_layers, layout.pp_size) == layout.pp_rank:
                raise ValueError(f"the model has no parameter {' or '.join(entry.megatron_names)}")
            continue
        parameter = named.pop(name)
        expected = entry.shard_shape(entry.cut(layout)[0])
        if tuple(parameter.shape) != expected:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)} on this rank, the layout table says {list(expected)}"
            )
        found[entry] = parameter
    if named:
        raise ValueError(f"the layout table has no entry for the model's {some_of(sorted(named))}")
    return found


def _global_name(name: str, first_layer: int, first_expert: int) -> str:
    """``name`` with the numbers of layer and expert in the whole model: ranks count those that they have from 0."""
    for where, first in ((r"^(decoder\.layers\.)(\d+)\.", first_layer), (r"(\.local_experts\.)(\d+)\.", first_expert)):
        name = re.sub(where, lambda m: f"{m[1]}{int(m[2]) + first}.", name)  # noqa: B023 (called at once)
    return name


def _owner(model: MegatronModel, entry: LayoutEntry) -> int | None:
    """See `LayoutEntry.owner`."""
    experts = model.architecture.experts
    return None if experts is None else entry.owner(experts.number, model.layout.ep_size)


def _head_facts(model: MegatronModel) -> tuple[int, torch.dtype]:
    """The reward head's outputs and dtype, which only the last stage knows."""
    facts = torch.zeros(2, dtype=torch.int64, device=device())
    if model.layout.is_last_stage:
        weight = model.gpt.rm_head.weight
        facts = torch.tensor([weight.shape[0], _HEAD_DTYPES.index(weight.dtype)], dtype=torch.int64, device=device())
    if model.layout.pp_size > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(facts, src=dist.get_global_rank(group, model.layout.pp_size - 1), group=group)
    attributes, dtype = facts.tolist()
    return attributes, _HEAD_DTYPES[dtype]
