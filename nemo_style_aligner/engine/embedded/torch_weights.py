"""Weights of `TorchStep`: the trainer's own memory where that holds just what is wanted, else buffers, filled by name.

Matrices are laid out as Megatron's (see `weight_table.layer_rows`), so that a trainer with the same tensor parallelism
can share its own.
"""

from __future__ import annotations

import torch

from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.embedded.weight_table import Rows, Write, layer_rows


class TorchWeights:
    """All weights of this rank's shard.

    Attributes:
        buffers: the engine's own tensors.
        writes: Hugging Face name -> what stores this rank's part of the tensor in them.
    """

    def __init__(self, shape: EngineShape, device: torch.device, trainer: TrainerWeights) -> None:
        self.shape = shape
        self.buffers: list[torch.Tensor] = []
        self.writes: dict[str, Write] = {}
        self._device = device
        self._trainer = trainer
        a, shard = shape.architecture, shape.shard
        vocabulary, size = Rows(0, shard.held_vocab_rows), (shard.vocab_rows, a.hidden_size)
        self.embedding = self.tensor({"model.embed_tokens.weight": vocabulary}, size, shape.dtype)
        self.head = self.embedding
        if not a.tied_embeddings:
            self.head = self.tensor({"lm_head.weight": vocabulary}, size, shape.dtype)
        self.layers = [LayerWeights(self, f"model.layers.{index}.") for index in range(a.num_layers)]
        self.final_norm, self.final_norm_bias = self.norm("model.norm")

    def linear(self, parts: dict[str, Rows], columns: int, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix [all rows of ``parts``, ``columns``] and its bias; ``parts``: module names and their rows."""
        rows, dtype = Rows.total(parts), self.shape.dtype
        weight = self.tensor({f"{name}.weight": part for name, part in parts.items()}, (rows, columns), dtype)
        if not has_bias:
            return weight, None
        return weight, self.tensor({f"{name}.bias": part for name, part in parts.items()}, (rows,), dtype)

    def norm(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a norm. They work on the float32 residual stream, so they are float32 in every dtype."""
        a = self.shape.architecture
        names = [f"{name}.weight"] if a.normalization == "rmsnorm" else [f"{name}.weight", f"{name}.bias"]
        found = [self.tensor({each: Rows(0, a.hidden_size)}, (a.hidden_size,), torch.float32) for each in names]
        return found[0], found[1] if len(found) > 1 else None

    def tensor(self, parts: dict[str, Rows], size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that ``parts`` make up; they cover all rows but those that pad the vocabulary."""
        names = tuple(parts)
        viewed = self._trainer.find(names, size, (dtype,), self._device)
        if viewed is not None:
            self._trainer.viewed[names] = viewed
            return viewed
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        self.buffers.append(tensor)
        self.writes |= {name: _writing(rows.of(tensor)) for name, rows in parts.items()}
        return tensor


class LayerWeights:
    """Weights of this rank's part of one layer; q, k, v are fused, so are gate and up."""

    def __init__(self, weights: TorchWeights, prefix: str) -> None:
        a, shard = weights.shape.architecture, weights.shape.shard
        matrices = layer_rows(shard, prefix)
        self.qkv, self.qkv_bias = weights.linear(matrices["qkv"], a.hidden_size, a.bias or a.qkv_bias)
        self.output, self.output_bias = weights.linear(matrices["output"], shard.query_size, a.bias)
        self.fc1, self.fc1_bias = weights.linear(matrices["fc1"], a.hidden_size, a.bias)
        self.fc2, self.fc2_bias = weights.linear(matrices["fc2"], shard.ffn_size, a.bias)
        self.input_norm, self.input_norm_bias = weights.norm(f"{prefix}input_layernorm")
        self.mlp_norm, self.mlp_norm_bias = weights.norm(f"{prefix}post_attention_layernorm")
        self.head_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # of queries, of keys
        if a.qk_layernorm:
            names, d = (f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight"), a.kv_channels
            query, key = (weights.tensor({name: Rows(0, d)}, (d,), torch.float32) for name in names)
            self.head_norms = query, key


def _writing(view: torch.Tensor) -> Write:
    """Stores a part in ``view``, whose leading dimensions may divide the part's rows."""
    return lambda part: view.copy_(part.reshape(view.shape))
