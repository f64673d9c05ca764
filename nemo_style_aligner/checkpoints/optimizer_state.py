"""An optimizer's main weights and Adam moments as tensors of the model's shapes.

Each parameter ``<key>`` of the model has ``optimizer.state.{param,exp_avg,exp_avg_sq}.<key>`` in fp32, whatever
the optimizer: plain fp32, bf16 with fp32 main weights, or sharded over data-parallel ranks. That is
megatron-core's ``fully_reshardable`` form, which resumes exactly in the same layout and in any other one.
Hyperparameters are not saved: those of the resumed job's config apply.

A distributed optimizer's shards may end anywhere within a parameter. For writing, the shards of each parameter are
gathered on one data-parallel rank, with the parameters divided evenly over the ranks. For loading, each rank reads the
parameters of which it has a shard. megatron-core itself gathers everything on the first rank, and loads everything on
every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_style_aligner.checkpoints.file_source import FileSource
from nemo_style_aligner.checkpoints.sharded_tensors import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    ShardedTensors,
    check_sharded_tensors,
    load_sharded_tensors,
    model_tensors,
)
from nemo_style_aligner.parallel.groups import all_reduce_max, device
from nemo_style_aligner.telemetry import activity

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel
    from nemo_style_aligner.models.optimizer import Optimizer

_IGNORED = (MODEL_PREFIX, OPTIMIZER_PREFIX)  # prefixes of keys that an inner optimizer need not ask for
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = ("param", *_MOMENTS)
# Memory on each rank: for what it sends, or receives, at once; for what it loads at once, which is at least one tensor.
_EXCHANGE_BYTES = 64 << 20
_LOAD_BYTES = 256 << 20


def optimizer_tensors(optimizer: Optimizer, model: MegatronModel) -> ShardedTensors:
    """The optimizer's tensors, for writing. Collective if the optimizer is distributed."""
    tensors: ShardedTensors = {}
    for index, inner in enumerate(optimizer.parts()):
        _make_ready(inner)
        if _is_sharded(inner):
            named = _gathered_tensors(inner, model)
        else:
            named = _whole_tensors(inner, model)
        tensors |= {f"{OPTIMIZER_PREFIX}{index}.{name}": tensor for name, tensor in named.items()}
    return tensors


def makes_copies(optimizer: Optimizer) -> bool:
    """Whether `optimizer_tensors` returns copies that nobody else holds, rather than the live tensors."""
    return all(_is_sharded(inner) for inner in optimizer.parts())


def optimizer_counters(optimizer: Optimizer) -> dict[str, int]:
    """The state that is not in tensors: updates made and skipped, and the step of Adam's bias correction."""
    steps = {int(g["step"]) for g in optimizer.megatron.param_groups if g["params"] and g.get("step") is not None}
    if len(steps) > 1:
        raise RuntimeError(f"parameter groups have made different numbers of steps: {sorted(steps)}")
    return {
        "step_count": optimizer.step_count,
        "adam_step": steps.pop() if steps else 0,
        "skipped_updates": optimizer.skips.total,
        "consecutive_skips": optimizer.skips.consecutive,
    }


def load_optimizer(
    optimizer: Optimizer, model: MegatronModel, counters: dict[str, int], source: FileSource, folder: str
) -> None:
    """Restore the optimizer from the distributed checkpoint in ``folder``. Load the model first. Collective.

    Raises:
        CheckpointMismatchError: the checkpoint has no optimizer, or another model's.
    """
    for inner in optimizer.parts():
        _make_ready(inner)
        if _is_sharded(inner):
            _load_shards(inner, model, source, folder)
            # Main weights of fp32 parameters are parts of them. A checkpoint in bf16 has rounded the other parts.
            for chunk in inner.model_chunks:
                chunk.start_param_sync(force_sync=True)
        else:
            load_sharded_tensors(_whole_tensors(inner, model), source, folder, ignored=_IGNORED)
    for group in optimizer.megatron.param_groups:
        group["step"] = counters["adam_step"]
    optimizer.step_count = counters["step_count"]
    optimizer.skips.total = counters["skipped_updates"]
    optimizer.skips.consecutive = counters["consecutive_skips"]


def _make_ready(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments, which are not there before the first update, and correct megatron-core's indices of them.

    A distributed optimizer puts a group's fp32 parameters before its bf16 ones, but records their positions in the
    order of the model: a bf16 model's fp32 reward head would get another parameter's moments.
    """
    if optimizer.init_state_fn is not None:  # SGD has no state
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if not isinstance(optimizer, DistributedOptimizer):
        return
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group_index, (fp32_parameters, bf16_parameters) in enumerate(groups):
        for order, parameter in enumerate([*fp32_parameters, *bf16_parameters]):
            optimizer.model_param_group_index_map[parameter] = (group_index, order)


def _is_sharded(optimizer: MegatronOptimizer) -> bool:
    """Whether the state is sharded over several data-parallel ranks."""
    return isinstance(optimizer, DistributedOptimizer) and optimizer.data_parallel_group.size() > 1


def _states(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The live main weight and Adam's moments of a parameter: whole, or a distributed optimizer's flat shards."""
    if isinstance(optimizer, DistributedOptimizer):
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
    else:
        # bf16 parameters have an fp32 main copy; fp32 parameters are their own.
        main = getattr(parameter, "main_param", parameter)
    moments = optimizer.optimizer.state[main]
    return [main.detach(), *(moments[key] for key in _MOMENTS if key in moments)]


def _whole_tensors(optimizer: MegatronOptimizer, model: MegatronModel) -> ShardedTensors:
    """The live tensors of an optimizer that is not sharded.

    megatron-core's own function confuses parameters if a bf16 model has an fp32 head, and copies everything several
    times if the optimizer is distributed over one rank.
    """
    named: ShardedTensors = {}
    for name, sharded in _parameters(model):
        for key, value in zip(_KEYS, _states(optimizer, sharded.data), strict=False):  # of SGD the weight alone
            named[f"{key}.{name}"] = _like(sharded, key, value.view(sharded.data.shape))
    return named


def _parameters(model: MegatronModel) -> Iterator[tuple[str, Any]]:
    return ((name, t) for name, t in model_tensors(model.gpt).items() if t.data.requires_grad)


def _like(sharded: Any, key: str, data: torch.Tensor) -> Any:
    """``data``, a parameter's main weight or moment, at the place in the global tensor that ``sharded`` has."""
    key = f"{OPTIMIZER_PREFIX}state.{key}.{sharded.key}"
    if isinstance(sharded, ShardedTensorFactory):
        return dataclasses.replace(sharded, key=key, data=data)
    return dataclasses.replace(sharded, key=key, data=data, dtype=data.dtype)


# ---- shards over data-parallel ranks ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``stop`` of a flattened parameter, given by its index. One rank has all of them."""

    parameter: int
    start: int
    stop: int


def _own_ranges(optimizer: DistributedOptimizer) -> dict[torch.Tensor, tuple[int, int]]:
    """Parameter -> first and end element of this rank's shard, for each parameter of which it has one."""
    return {
        parameter: (ranges["param"].start, ranges["param"].end)
        for maps in optimizer.gbuf_ranges
        for buckets in maps.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }


def _gathered_tensors(optimizer: DistributedOptimizer, model: MegatronModel) -> ShardedTensors:
    """Copies, in host memory, of the whole tensors of those parameters that this rank writes. Collective.

    Parameters that another tensor- or pipeline-parallel rank writes are left out.
    """
    group = optimizer.data_parallel_group_gloo
    written = [(name, t) for name, t in _parameters(model) if not any(t.replica_id[:-1])]
    sizes, own = [t.data.numel() for _, t in written], _own_ranges(optimizer)
    ranges: list[Any] = [None] * group.size()  # [rank][parameter]
    dist.all_gather_object(ranges, [own.get(t.data, (0, 0)) for _, t in written], group=group)
    if device().type == "cuda":
        group = optimizer.data_parallel_group  # NCCL: many times as fast as gloo
    owners = _share_out(sizes, group.size())
    live = [_states(optimizer, t.data) if t.data in own else [] for _, t in written]
    whole = [[torch.empty(size) for _ in _KEYS] if owners[n] == group.rank() else [] for n, size in enumerate(sizes)]
    for batch in _batches(ranges, _EXCHANGE_BYTES // (4 * len(_KEYS))):
        _exchange(batch, owners, ranges, live, whole, group)
    named: ShardedTensors = {}
    for (name, sharded), tensors in zip(written, whole, strict=True):
        ours = dataclasses.replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))
        for key, value in zip(_KEYS, tensors, strict=False):
            named[f"{key}.{name}"] = _like(ours, key, value.view(sharded.data.shape))
    return named


def _share_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that writes each parameter: largest first, each goes to the rank with the fewest elements so far."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def _batches(ranges: Sequence[Sequence[tuple[int, int]]], limit: int) -> Iterator[list[_Piece]]:
    """All elements of all parameters in batches of at most ``limit``, each with some of every rank, so that all send.

    Args:
        ranges: [rank][parameter]: the elements that the rank has.
    """
    share = max(1, limit // len(ranges))
    for batch in itertools.zip_longest(*(_parts_of(own, share) for own in ranges), fillvalue=()):
        yield [piece for part in batch for piece in part]


def _parts_of(ranges: Iterable[tuple[int, int]], limit: int) -> Iterator[list[_Piece]]:
    """One rank's elements in parts of at most ``limit``."""
    part: list[_Piece] = []
    room = limit
    for number, (start, end) in enumerate(ranges):
        while start < end:
            stop = min(end, start + room)
            part.append(_Piece(number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield part
                part, room = [], limit
    if part:
        yield part


def _exchange(
    batch: Sequence[_Piece],
    owners: Sequence[int],
    ranges: Sequence[Sequence[tuple[int, int]]],
    live: Sequence[Sequence[torch.Tensor]],
    whole: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
) -> None:
    """Send this rank's pieces to the owners of their parameters, and receive those of its own parameters. Collective.

    What one rank sends to another is ordered by piece: the elements of the main weight, then those of both moments.

    Args:
        owners: [parameter]: the rank that writes it.
        ranges: [rank][parameter]: the elements that the rank has.
        live: [parameter]: this rank's shards, flat fp32, on any device.
        whole: [parameter]: the flat fp32 tensors to fill if this rank is the owner, else none.
    """
    me, ranks = group.rank(), range(group.size())

    def part(rank: int, piece: _Piece) -> tuple[int, int]:
        start, stop = ranges[rank][piece.parameter]
        start, stop = max(start, piece.start), min(stop, piece.stop)
        return start, max(start, stop)

    def parts(rank: int, owner: int) -> list[tuple[int, int, int]]:
        found = ((piece.parameter, *part(rank, piece)) for piece in batch if owners[piece.parameter] == owner)
        return [(number, start, stop) for number, start, stop in found if stop > start]

    outgoing, incoming = [parts(me, owner) for owner in ranks], [parts(rank, me) for rank in ranks]
    sizes_out, sizes_in = (
        [len(_KEYS) * sum(stop - start for _, start, stop in found) for found in direction]
        for direction in (outgoing, incoming)
    )
    where = device() if dist.get_backend(group) == "nccl" else "cpu"
    sent, received = torch.empty(sum(sizes_out), device=where), torch.empty(sum(sizes_in), device=where)
    position = 0
    for number, start, stop in (one for found in outgoing for one in found):
        first = ranges[me][number][0]
        for shard in live[number]:
            sent[position : position + stop - start].copy_(shard.view(-1)[start - first : stop - first])
            position += stop - start
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    activity.progress()
    received = received.cpu()
    position = 0
    for number, start, stop in (one for found in incoming for one in found):
        for tensor in whole[number]:
            tensor[start:stop] = received[position : position + stop - start]
            position += stop - start


def _load_shards(optimizer: DistributedOptimizer, model: MegatronModel, source: FileSource, folder: str) -> None:
    """Load the parameters of which this rank has a shard, a few at a time, and copy out the shards. Collective."""
    own = _own_ranges(optimizer)
    parameters = list(_parameters(model))
    # All are checked first, so that an error names everything that does not fit.
    expected = {
        f"{key}.{name}": _like(t, key, torch.empty(t.data.shape, device="meta"))
        for name, t in parameters
        for key in _KEYS
    }
    index = check_sharded_tensors(expected, source, folder, ignored=_IGNORED)
    wanted = [
        (t, key, shard)
        for _, t in parameters
        if t.data in own
        for key, shard in zip(_KEYS, _states(optimizer, t.data), strict=True)
    ]
    rounds: list[list[tuple[Any, str, torch.Tensor]]] = []
    room = 0
    for item in wanted:
        size = 4 * item[0].data.numel()
        if not rounds or size > room:
            rounds.append([])
            room = _LOAD_BYTES
        rounds[-1].append(item)
        room -= size
    for number in range(all_reduce_max(len(rounds))):  # each round is collective
        items = rounds[number] if number < len(rounds) else []
        tensors = {str(i): _like(t, key, torch.empty(t.data.shape)) for i, (t, key, _) in enumerate(items)}
        load_sharded_tensors(tensors, source, folder, checked=index)
        for (sharded, _, shard), loaded in zip(items, tensors.values(), strict=True):
            start, stop = own[sharded.data]
            shard.view(-1).copy_(loaded.data.view(-1)[start:stop])
