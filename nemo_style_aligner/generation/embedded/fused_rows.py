"""Which rows of Megatron's matrices are those of which Hugging Face tensor.

Megatron fuses q, k and v by query groups, and all of the gate with the up projection. Who computes with a trainer's
parameters, or copies from them, has to know.
"""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.generation.shard import ModelShard


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a fused matrix that are a tensor's, in order: ``count`` from ``start`` on in each of ``groups`` equal
    runs of rows."""

    start: int
    count: int
    groups: int = 1

    def numbers(self, num_rows: int) -> torch.Tensor:
        """int64: these rows' numbers in a matrix of ``num_rows``."""
        return torch.arange(num_rows).view(self.groups, -1).narrow(1, self.start, self.count).flatten()

    @staticmethod
    def total(parts: dict[str, Rows]) -> int:
        """Rows of the matrix that consists of ``parts``."""
        return sum(part.count * part.groups for part in parts.values())


def layer_rows(shard: ModelShard, prefix: str) -> dict[str, dict[str, Rows]]:
    """The matrices qkv, output, fc1 and fc2 of this rank's part of the layer whose modules' names begin with
    ``prefix``: these modules, in order, and their rows."""
    groups, d, ffn = shard.num_groups, shard.architecture.kv_channels, shard.ffn_size
    query = shard.query_size // groups  # rows of a group
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
