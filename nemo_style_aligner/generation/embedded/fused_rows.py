"""Which rows of Megatron's fused matrices hold which Hugging Face tensor.

Megatron interleaves q, k and v by query group, and stacks the gate on the up projection. Code that computes with a
trainer's parameters, or copies from them, needs these rows.
"""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.generation.shard import ModelShard


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a fused matrix that hold one tensor, in order: ``count`` rows from ``start`` on in each of the
    ``groups`` equal runs of rows that make up the matrix."""

    start: int
    count: int
    groups: int = 1

    def numbers(self, num_rows: int) -> torch.Tensor:
        """Indices of these rows in a matrix of ``num_rows`` rows, int64."""
        return torch.arange(num_rows).view(self.groups, -1).narrow(1, self.start, self.count).flatten()

    @staticmethod
    def total(parts: dict[str, Rows]) -> int:
        """Number of rows of the matrix that consists of ``parts``."""
        return sum(part.count * part.groups for part in parts.values())


def layer_rows(shard: ModelShard, prefix: str) -> dict[str, dict[str, Rows]]:
    """A layer's matrices qkv, output, fc1 and fc2 on this rank -> the modules in each, in order -> their rows.

    ``prefix`` begins the names of the layer's modules.
    """
    groups, d, ffn = shard.num_groups, shard.architecture.kv_channels, shard.ffn_size
    query = shard.query_size // groups  # query rows per group
    attention, mlp, hidden = f"{prefix}self_attn.", f"{prefix}mlp.", Rows(0, shard.architecture.hidden_size)
    fc1 = {f"{mlp}up_proj": Rows(0, ffn)}
    if shard.architecture.gated:
        fc1 = {f"{mlp}gate_proj": Rows(0, ffn), f"{mlp}up_proj": Rows(ffn, ffn)}
    return {
        "qkv": {
            f"{attention}q_proj": Rows(0, query, groups),
            f"{attention}k_proj": Rows(query, d, groups),
            f"{attention}v_proj": Rows(query + d, d, groups),
        },
        "output": {f"{attention}o_proj": hidden},
        "fc1": fc1,
        "fc2": {f"{mlp}down_proj": hidden},
    }
