"""A model sharded over tensor- and pipeline-parallel ranks: its layout table and this rank's parameters in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.weights.layout import LayoutEntry, weight_layout
from nemo_style_aligner.wording import some_of

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel

_HEAD_DTYPES = (torch.float32, torch.bfloat16)


def layout_table(model: MegatronModel) -> tuple[tuple[LayoutEntry, ...], torch.dtype]:
    """The model's layout table and the dtype of its head. Collective over pipeline stages for a reward model."""
    attributes, head_dtype = _head_facts(model) if model.has_reward_head else (0, model.config.params_dtype)
    entries = weight_layout(model.architecture, padded_vocab_size=model.gpt.vocab_size, num_attributes=attributes)
    return entries, head_dtype


def is_head(entry: LayoutEntry) -> bool:
    """Whether the entry belongs to a reward head, which has a dtype of its own."""
    return entry.megatron_names[0].startswith("rm_head.")


def local_parameters(model: MegatronModel, entries: tuple[LayoutEntry, ...]) -> dict[LayoutEntry, torch.nn.Parameter]:
    """The table's entries that this rank holds, with their parameters.

    Raises:
        ValueError: the model has a parameter that the table does not know, lacks one or has another shape.
    """
    layout, num_layers = model.layout, model.architecture.num_layers
    first_layer = layout.pp_rank * (num_layers // layout.pp_size)
    named = {_global_name(name, first_layer): parameter for name, parameter in model.named_parameters()}
    found: dict[LayoutEntry, torch.nn.Parameter] = {}
    for entry in entries:
        name = next((name for name in entry.megatron_names if name in named), None)
        if name is None:
            if entry.stage(num_layers, layout.pp_size) == layout.pp_rank and not entry.is_copy:
                raise ValueError(f"the model has no parameter {' or '.join(entry.megatron_names)}")
            continue
        parameter = named.pop(name)
        if tuple(parameter.shape) != entry.shard_shape(layout.tp_size):
            raise ValueError(
                f"{name} has shape {list(parameter.shape)} on this rank, the layout table says "
                f"{list(entry.shard_shape(layout.tp_size))}"
            )
        found[entry] = parameter
    if named:
        raise ValueError(f"the layout table has no entry for the model's {some_of(sorted(named))}")
    return found


def _global_name(name: str, first_layer: int) -> str:
    """``name`` with the layer's number in the whole model: each pipeline stage counts its layers from 0."""
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)


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
