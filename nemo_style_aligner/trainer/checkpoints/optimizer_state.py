"""An optimizer's main weights and Adam moments as parts of tensors of the model's shapes.

Each parameter ``<key>`` of the model has ``optimizer.state.{param,exp_avg,exp_avg_sq}.<key>`` in fp32, whatever
the optimizer: plain fp32, bf16 with fp32 main weights, or sharded over data-parallel ranks. A run can so resume exactly
in the same layout, and in any other one. Hyperparameters are not saved: those of the resumed job's config apply.

A distributed optimizer's shards may end anywhere within a parameter. Whatever lies between two elements of a tensor is
a few boxes of it: part of a row, whole rows, part of a row. So every rank writes and reads its own shards, and nothing
is gathered. megatron-core itself gathers everything on the first rank, and loads everything on every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_style_aligner.guard.file_source import FileSource
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import (
    BESIDE_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    Part,
    below,
    load_sharded_tensors,
)
from nemo_style_aligner.trainer.checkpoints.sharded_writing import own_parts

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.gpt import MegatronModel
    from nemo_style_aligner.trainer.models.optimizer import Optimizer

_IGNORED = (MODEL_PREFIX, OPTIMIZER_PREFIX, BESIDE_PREFIX)  # prefixes of keys that an inner optimizer need not ask for
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = ("param", *_MOMENTS)


def optimizer_parts(optimizer: Optimizer, model: MegatronModel) -> list[Part]:
    """What this rank writes of the optimizer's tensors."""
    parts: list[Part] = []
    for inner in optimizer.parts():
        found = list(_state_parts(inner, model))
        parts += [part for part in found if part.is_main] if _is_sharded(inner) else own_parts(found)
    return parts


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
    optimizer: Optimizer,
    model: MegatronModel,
    counters: Mapping[str, int],
    source: FileSource,
    folder: str,
    prefix: str = "",
) -> None:
    """Restore the optimizer from the distributed checkpoint in ``folder``. Load the model first. Collective.

    ``prefix``: before its keys there.

    Raises:
        CheckpointMismatchError: the checkpoint has no optimizer, or another model's.
    """
    for inner in optimizer.parts():
        load_sharded_tensors(below(prefix, _state_parts(inner, model)), source, folder, ignored=_IGNORED)
        if _is_sharded(inner):
            # Main weights of fp32 parameters are parts of them. A checkpoint in bf16 has rounded the other parts.
            for chunk in inner.model_chunks:
                chunk.start_param_sync(force_sync=True)
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
        main = _main(parameter)
    moments = optimizer.optimizer.state[main]
    return [main.detach(), *(moments[key] for key in _MOMENTS if key in moments)]


def _main(parameter: torch.Tensor) -> torch.Tensor:
    """What an optimizer that is not distributed changes: bf16 parameters have an fp32 copy, fp32 ones are their own."""
    main: torch.Tensor = getattr(parameter, "main_param", parameter)
    return main


def _own_ranges(optimizer: DistributedOptimizer) -> dict[torch.Tensor, tuple[int, int]]:
    """Parameter -> first and end element of this rank's shard, for each parameter of which it has one."""
    return {
        parameter: (ranges["param"].start, ranges["param"].end)
        for maps in optimizer.gbuf_ranges
        for buckets in maps.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }


def _state_parts(optimizer: MegatronOptimizer, model: MegatronModel) -> Iterator[Part]:
    """The live tensors that this rank has of an optimizer.

    megatron-core's own functions confuse parameters if a bf16 model has an fp32 head, and copy everything several times
    if the optimizer is distributed over one rank.
    """
    _make_ready(optimizer)
    shards = _own_ranges(optimizer) if isinstance(optimizer, DistributedOptimizer) else None
    own = {main for group in optimizer.param_groups for main in group["params"]}
    for parameter, parts in model.trained_parts():
        if not parameter.requires_grad or (shards is not None and parameter not in shards):
            continue
        if shards is None and _main(parameter) not in own:  # another inner optimizer's
            continue
        start, stop = (0, parameter.numel()) if shards is None else shards[parameter]
        for key, state in zip(_KEYS, _states(optimizer, parameter), strict=False):  # of SGD the weight alone
            first = 0  # number of the part's first element in the parameter
            for part in parts:
                size = part.data.numel()
                begin, end = max(start, first), min(stop, first + size)
                yield from _boxes(part, key, begin - first, state.view(-1)[begin - start : max(begin, end) - start])
                first += size


def _boxes(part: Part, key: str, start: int, values: torch.Tensor) -> Iterator[Part]:
    """The boxes of a parameter's part that ``values``, those of its elements from ``start`` on, make up."""
    for offsets, sizes in boxes(part.data.shape, start, start + len(values)):
        own, values = values.tensor_split([math.prod(sizes)])
        place = tuple(map(sum, zip(part.offsets, offsets, strict=True)))
        name = f"{OPTIMIZER_PREFIX}state.{key}.{part.key}"
        yield dataclasses.replace(part, key=name, offsets=place, data=own.view(sizes))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that elements ``start`` to ``stop`` of a tensor make up, in their order."""
    if not shape and start < stop:
        yield (), ()
    row_size = math.prod(shape[1:])
    while shape and start < stop:
        row, column = divmod(start, row_size)
        end = start + (stop - start) // row_size * row_size  # of whole rows
        if not column and end > start:
            yield (row, *(0 for _ in shape[1:])), ((end - start) // row_size, *shape[1:])
        else:
            end = min(stop, start - column + row_size)  # of this row
            for offsets, sizes in boxes(shape[1:], column, column + end - start):
                yield (row, *offsets), (1, *sizes)
        start = end
