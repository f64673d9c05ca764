"""Refit: writes a stream of named full tensors to where a step has this rank's parts of them.

The places belong to a `ModelStep`, which lays weights out as its kernels want them; none is allocated here. Steps lay
rows out as Megatron's fused matrices do, or copy from these, so which rows hold which tensor stands here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from nemo_style_aligner.engine.contract import WeightStream
from nemo_style_aligner.engine.shard import ModelShard
from nemo_style_aligner.engine.weights.layout import checked_stream, hf_tensors, weight_layout

Write = Callable[[torch.Tensor], object]
"""Stores this rank's part of one tensor, of any float dtype and any strides, in the layout of the step."""


class WeightTable:
    """The tensors that a refit's stream must bring, those that it must leave out, and where this rank's parts go.

    Attributes:
        shapes: name and full shape of every tensor to bring, in the stream's order.
        in_trainer: tensors that the step reads in the trainer's memory: a stream must leave them out.
    """

    def __init__(
        self,
        shard: ModelShard,
        writes: Mapping[str, Write],
        *,
        viewed: frozenset[str] = frozenset(),
        copied: frozenset[str] = frozenset(),
        copy: Callable[[], None] | None = None,
    ) -> None:
        """``viewed`` tensors, which the step uses in place, have no place of their own; ``copied`` ones have.

        ``copy`` copies all of the latter from the trainer's memory.

        Raises:
            ValueError: ``writes`` and ``viewed`` are not exactly the architecture's tensors.
        """
        self._shard = shard
        self._writes = writes
        self._copy = copy
        self.in_trainer = viewed | copied
        tensors = hf_tensors(weight_layout(shard.architecture))
        if tensors.keys() != writes.keys() | viewed or writes.keys() & viewed:
            wrong = sorted(tensors.keys() ^ (writes.keys() | viewed))[:5]
            raise ValueError(f"a step and the layout table disagree on {wrong}")
        self.shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in self.in_trainer}

    def copy_from(self, stream: WeightStream) -> None:
        """Write the whole stream, and the tensors copied from the trainer, to their places.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or of the wrong shape. The content is then undefined.
        """
        for name, tensor in checked_stream(stream, self.shapes, self._why_unexpected):
            self._writes[name](self._shard.take(name, tensor.detach()))
        if self._copy is not None:
            self._copy()

    def _why_unexpected(self, name: str) -> str:
        """A hint on why the stream must not bring ``name``."""
        if name in self.in_trainer:
            return "the engine reads it in the trainer's memory: export without the engine's viewed_weights"
        if name == "lm_head.weight":
            return "the engine was built with tied embeddings, so the stream must not bring an output layer"
        if name.endswith(".bias") and name.removesuffix("bias") + "weight" in self._writes:
            return "the engine was built for an architecture without this bias"
        return "the engine was built for another architecture"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a fused matrix that hold one tensor, in order: ``count`` rows from ``start`` on in each of the
    ``groups`` equal runs of rows that make up the matrix."""

    start: int
    count: int
    groups: int = 1

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """A view of these rows: [count, ...], or [groups, count, ...] of several groups."""
        if self.groups == 1:
            return matrix.narrow(0, self.start, self.count)
        return matrix.unflatten(0, (self.groups, -1)).narrow(1, self.start, self.count)

    @staticmethod
    def total(parts: dict[str, Rows]) -> int:
        """Number of rows of the matrix that consists of ``parts``."""
        return sum(part.count * part.groups for part in parts.values())


def layer_rows(shard: ModelShard, prefix: str) -> dict[str, dict[str, Rows]]:
    """A layer's matrices qkv, output, fc1 and fc2 on this rank -> the modules in each, in order -> their rows.

    Megatron interleaves q, k and v by query group, and stacks the gate on the up projection. ``prefix`` begins the
    names of the layer's modules.
    """
    groups, d = shard.num_groups, shard.architecture.kv_channels
    query = shard.query_size // groups  # query rows per group
    attention = f"{prefix}self_attn."
    return {
        "qkv": {
            f"{attention}q_proj": Rows(0, query, groups),
            f"{attention}k_proj": Rows(query, d, groups),
            f"{attention}v_proj": Rows(query + d, d, groups),
        },
        "output": {f"{attention}o_proj": Rows(0, shard.architecture.hidden_size)},
        **mlp_rows(shard, f"{prefix}mlp.", shard.ffn_size),
    }


def mlp_rows(shard: ModelShard, prefix: str, size: int) -> dict[str, dict[str, Rows]]:
    """`layer_rows` fc1 and fc2, of an MLP or an expert of which this rank has an inner ``size``."""
    fc1 = {f"{prefix}up_proj": Rows(0, size)}
    if shard.architecture.gated:
        fc1 = {f"{prefix}gate_proj": Rows(0, size), f"{prefix}up_proj": Rows(size, size)}
    return {"fc1": fc1, "fc2": {f"{prefix}down_proj": Rows(0, shard.architecture.hidden_size)}}
