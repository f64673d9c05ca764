"""An optimizer's main weights and Adam moments as tensors of the model's shapes.

Each parameter ``<key>`` of the model has ``optimizer.state.{param,exp_avg,exp_avg_sq}.<key>`` in fp32, whatever
the optimizer: plain fp32, bf16 with fp32 main weights, or sharded over data-parallel ranks. That is
megatron-core's ``fully_reshardable`` form, which resumes exactly in the same layout and in any other one.
Hyperparameters are not saved: those of the resumed job's config hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_style_aligner.checkpoints.file_source import FileSource
from nemo_style_aligner.checkpoints.sharded_tensors import ShardedTensors, load_sharded_tensors, model_tensors

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel
    from nemo_style_aligner.models.optimizer import Optimizer

_PREFIX = "optimizer."
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Memory efficient: gathered on the first data-parallel rank, in host memory, not on all and in the GPU's.
_FULLY_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def optimizer_tensors(optimizer: Optimizer, model: MegatronModel, prefix: str) -> ShardedTensors:
    """The optimizer's tensors, to be written. Collective where the optimizer is distributed.

    Args:
        prefix: of the model's keys.
    """
    tensors: ShardedTensors = {}
    for index, inner in enumerate(_inner(optimizer.megatron)):
        inner.init_state_fn(inner.optimizer, inner.config)  # before the first update there are no moments yet
        if _is_sharded(inner):
            state = _distributed_state(inner, model, prefix, is_loading=False)
            named = {f"{number}.{key}": t for number, entry in state.items() for key, t in entry.items()}
        else:
            named = _whole_tensors(inner, model, prefix)
        tensors |= {f"{_PREFIX}{index}.{name}": tensor for name, tensor in named.items()}
    return tensors


def makes_copies(optimizer: Optimizer) -> bool:
    """Whether the data of `optimizer_tensors` are copies that nobody else holds; the live tensors if not."""
    return all(_is_sharded(inner) for inner in _inner(optimizer.megatron))


def optimizer_counters(optimizer: Optimizer) -> dict[str, int]:
    """What is not a tensor: updates made, and the step of Adam's bias correction."""
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
    optimizer: Optimizer, model: MegatronModel, counters: dict[str, int], source: FileSource, folder: str, prefix: str
) -> None:
    """Restore the optimizer from the distributed checkpoint in ``folder``; the model was loaded before. Collective.

    Raises:
        CheckpointMismatchError: the checkpoint has no optimizer, or another model's.
    """
    for inner in _inner(optimizer.megatron):
        if _is_sharded(inner):
            state = _distributed_state(inner, model, prefix, is_loading=True)
            named = {f"{number}.{key}": t for number, entry in state.items() for key, t in entry.items()}
            values = {number: {key: t.data for key, t in entry.items()} for number, entry in state.items()}
            load_sharded_tensors(named, source, folder, ignored=(prefix, _PREFIX))
            inner.load_parameter_state_from_fully_reshardable(values)
        else:
            inner.init_state_fn(inner.optimizer, inner.config)
            load_sharded_tensors(_whole_tensors(inner, model, prefix), source, folder, ignored=(prefix, _PREFIX))
    for group in optimizer.megatron.param_groups:
        group["step"] = counters["adam_step"]
    optimizer.step_count = counters["step_count"]
    optimizer.skips.total = counters.get("skipped_updates", 0)
    optimizer.skips.consecutive = counters.get("consecutive_skips", 0)


def _inner(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def _distributed_state(
    optimizer: DistributedOptimizer, model: MegatronModel, prefix: str, *, is_loading: bool
) -> dict[int, dict[str, Any]]:
    """Parameter number -> {"param", "exp_avg", "exp_avg_sq"} -> tensor of the parameter's shape.

    To be written they are on the first data-parallel rank; the others have none.
    """
    _correct_parameter_order(optimizer)
    tensors = model_tensors(model.gpt, prefix)
    return optimizer.sharded_state_dict(tensors, is_loading, metadata=_FULLY_RESHARDABLE)["param_state"] or {}


def _correct_parameter_order(optimizer: DistributedOptimizer) -> None:
    """Set right where megatron-core looks for a parameter's state within its group.

    It puts a group's fp32 parameters before its bf16 ones, but remembers their place in the order of the model: a
    bf16 model's fp32 reward head would get another parameter's moments.
    """
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group_index, (fp32_parameters, bf16_parameters) in enumerate(groups):
        for order, parameter in enumerate([*fp32_parameters, *bf16_parameters]):
            optimizer.model_param_group_index_map[parameter] = (group_index, order)


def _is_sharded(optimizer: MegatronOptimizer) -> bool:
    """Whether no rank has the whole of a parameter's state."""
    return isinstance(optimizer, DistributedOptimizer) and optimizer.data_parallel_group.size() > 1


def _whole_tensors(optimizer: MegatronOptimizer, model: MegatronModel, prefix: str) -> ShardedTensors:
    """The live tensors of an optimizer that does not share them with other ranks.

    megatron-core's own way mistakes one parameter for another where a bf16 model has an fp32 head, or copies everything
    several times where it is distributed over one rank.
    """
    if isinstance(optimizer, DistributedOptimizer):
        _correct_parameter_order(optimizer)
    named: ShardedTensors = {}
    for name, sharded in _parameters(model, prefix):
        parameter = sharded.data
        if isinstance(optimizer, DistributedOptimizer):  # its only shard is the flattened parameter
            group, order = optimizer.model_param_group_index_map[parameter]
            main = optimizer.optimizer.param_groups[group]["params"][order]
        else:
            # bf16 parameters have an fp32 main copy; others are their own.
            main = getattr(parameter, "main_param", parameter)
        moments = optimizer.optimizer.state[main]
        for key, value in {"param": main.detach(), **{key: moments[key] for key in _MOMENTS}}.items():
            value = value.view(parameter.shape)
            named[f"{key}.{name}"] = _like(sharded, f"{_PREFIX}state.{key}.{sharded.key}", value)
    return named


def _parameters(model: MegatronModel, prefix: str) -> Iterator[tuple[str, Any]]:
    return ((name, t) for name, t in model_tensors(model.gpt, prefix).items() if t.data.requires_grad)


def _like(sharded: Any, key: str, data: torch.Tensor) -> Any:
    """``data`` with the place in the global tensor that ``sharded`` has."""
    if isinstance(sharded, ShardedTensorFactory):
        return dataclasses.replace(sharded, key=key, data=data)
    return dataclasses.replace(sharded, key=key, data=data, dtype=data.dtype)
