"""The forward pass of `TorchStep` in plain torch: this rank's part of a model, over pages of keys and values.

Everything but attention works on one packed axis of ``t`` tokens. The residual stream and the norms are float32
whatever the dtype of the weights; matrix products and attention run in that dtype.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from nemo_style_aligner.generation.embedded.batch import Batch
from nemo_style_aligner.generation.embedded.choose_attention import choose_attention
from nemo_style_aligner.generation.embedded.gathered_attention import Attend
from nemo_style_aligner.generation.embedded.rotary import apply_rotary, rotary_tables
from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.embedded.torch_weights import LayerWeights, Matrix, TorchWeights


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What all layers of one pass share."""

    places: torch.Tensor  # of the batch
    cos: torch.Tensor  # float32 [t, 1, 1, rotary size / 2]
    sin: torch.Tensor
    attend: Attend


class TorchModel:
    """Computes logits from a `Batch`, reading weights and reading and writing pages; its only state are tables."""

    def __init__(self, shape: EngineShape, weights: TorchWeights, pages: list[torch.Tensor]) -> None:
        """``pages``: per layer [pages, PAGE_TOKENS, 2 * groups, kv_channels], keys and then values."""
        self._a = shape.architecture
        self._dtype = shape.dtype
        self._shard = shape.shard
        self._heads_per_group = self._shard.num_heads // self._shard.num_groups
        self._tensor_parallel = shape.tensor_parallel
        self._weights = weights
        self._paging = choose_attention(shape, weights.embedding.device)
        self._pages = pages
        self._cos, self._sin = rotary_tables(self._a, shape.max_sequence_length, weights.embedding.device)
        self._norm_offset = 1.0 if self._a.normalization == "layernorm1p" else 0.0

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [o, vocab_size], of `logits_dtype`. Collective over the tensor-parallel ranks."""
        hidden = self._embed(batch.token_ids)
        shared = _Shared(
            places=batch.places,
            cos=self._cos[batch.positions][:, None, None],
            sin=self._sin[batch.positions][:, None, None],
            attend=self._paging.of_pass(batch),
        )
        for layer, pages in zip(self._weights.layers, self._pages, strict=True):
            normed = self._norm(hidden, layer.input_norm, layer.input_norm_bias)
            attended = self._attention(layer, pages, normed, shared)
            self._add_product(hidden, attended, layer.output, layer.output_bias)
            normed = self._norm(hidden, layer.mlp_norm, layer.mlp_norm_bias)
            active = self._activate(layer.fc1.product(normed, layer.fc1_bias))
            self._add_product(hidden, active, layer.fc2, layer.fc2_bias)
        if batch.output_rows is not None:
            hidden = hidden[batch.output_rows]
        last = self._norm(hidden, self._weights.final_norm, self._weights.final_norm_bias)
        return self._logits(last)

    # ---- what tensor parallelism cuts -------------------------------------------------------

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [t, hidden]; each rank looks up the ids it holds."""
        if self._tensor_parallel.size == 1:
            return F.embedding(token_ids, self._weights.embedding).float()
        rows = token_ids - self._shard.vocab_start
        elsewhere = (rows < 0) | (rows >= self._shard.vocab_rows)
        hidden = F.embedding(rows.masked_fill(elsewhere, 0), self._weights.embedding).float()
        hidden = hidden.masked_fill(elsewhere[:, None], 0.0)
        self._tensor_parallel.all_reduce(hidden)
        return hidden

    def _add_product(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> None:
        """Add the ranks' sum of ``x`` times their columns of ``matrix`` to ``hidden``, and the bias once."""
        product = matrix.product(x)
        self._tensor_parallel.all_reduce(product)
        hidden += product
        if bias is not None:
            hidden += bias

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """[o, vocab_size], the ranks' columns side by side."""
        logits = self._weights.head.logits(last, logits_dtype(self._dtype, last.device))
        if self._tensor_parallel.size == 1:
            return logits
        return torch.cat(self._tensor_parallel.all_gather(logits), dim=-1)[:, : self._a.vocab_size]

    # ---- parts of a layer -------------------------------------------------------------------

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Normalised ``hidden`` [t, h], float32 -> the engine's dtype."""
        shape, epsilon = (hidden.shape[-1],), self._a.layernorm_epsilon
        if bias is None:
            return F.rms_norm(hidden, shape, weight, epsilon).to(self._dtype)
        return F.layer_norm(hidden, shape, weight + self._norm_offset, bias, epsilon).to(self._dtype)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's non-linearity on [t, fc1 rows]."""
        gate, value = x.chunk(2, dim=-1) if self._a.gated else (x, None)
        if self._a.activation == "silu":
            active = F.silu(gate)
        elif self._a.activation == "gelu":
            active = F.gelu(gate)
        else:
            active = F.relu(gate).square()
        return active if value is None else active * value

    def _attention(
        self, layer: LayerWeights, pages: torch.Tensor, normed: torch.Tensor, shared: _Shared
    ) -> torch.Tensor:
        """Self-attention of all tokens, [t, heads * kv_channels], before the output projection."""
        groups, heads = self._shard.num_groups, self._heads_per_group
        channels, epsilon = self._a.kv_channels, self._a.layernorm_epsilon
        # Of each group its query heads, its key head, its value head.
        qkv = layer.qkv.product(normed, layer.qkv_bias).view(-1, groups, heads + 2, channels)
        turning = qkv[:, :, : heads + 1]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turning.float().split([heads, 1], dim=2)
            query = F.rms_norm(query, (channels,), layer.query_norm, epsilon)
            key = F.rms_norm(key, (channels,), layer.key_norm, epsilon)
            turning.copy_(apply_rotary(torch.cat((query, key), dim=2), shared.cos, shared.sin))
        else:
            turning.copy_(apply_rotary(turning, shared.cos, shared.sin))
        query, key_value = qkv[:, :, :heads], qkv[:, :, heads:].transpose(1, 2)
        pages.view(-1, 2, groups, channels).index_copy_(0, shared.places, key_value)
        return shared.attend(pages, query, key_value)


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of a model that computes in ``dtype``: GPUs add up in float32, and can leave it at that."""
    return torch.float32 if device.type == "cuda" else dtype
