"""The forward pass of `TorchStep`: this rank's part of a model, over pages of keys and values.

Everything but attention works on one packed axis of ``t`` tokens. The residual stream and the norms are float32
whatever the dtype of the weights; matrix products and attention run in that dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.torch_operations import Batch, TorchOperations
from nemo_style_aligner.engine.embedded.torch_weights import TorchWeights


class TorchModel:
    """Computes logits from a `Batch`, reading weights and reading and writing pages; it has no state of its own."""

    def __init__(
        self, shape: EngineShape, weights: TorchWeights, pages: list[torch.Tensor], operations: TorchOperations
    ) -> None:
        """``pages``: per layer [pages, PAGE_TOKENS, 2 * groups, kv_channels], keys and then values."""
        self._a = shape.architecture
        self._dtype = shape.dtype
        self._shard = shape.shard
        self._tensor_parallel = shape.tensor_parallel
        self._weights = weights
        self._pages = pages
        self._operations = operations

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [o, vocab_size], of `logits_dtype`. Collective over the tensor-parallel ranks."""
        ops, weights, reduce = self._operations, self._weights, self._tensor_parallel.all_reduce
        attention = ops.attention_of(batch)
        hidden = self._embed(batch.token_ids)
        if self._a.embedding_multiplier != 1:
            hidden *= self._a.embedding_multiplier
        product, bias = None, None  # not yet added to the hidden states
        for index, (layer, pages) in enumerate(zip(weights.layers, self._pages, strict=True)):
            rotates = index not in self._a.no_rope_layers
            normed = ops.add_and_norm(hidden, product, bias, layer.input_norm, layer.input_norm_bias)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            product = F.linear(attention(qkv, layer.head_norms, pages, rotates), layer.output)
            reduce(product)  # each rank has multiplied its columns of the matrix
            normed = ops.add_and_norm(hidden, product, layer.output_bias, layer.mlp_norm, layer.mlp_norm_bias)
            product = F.linear(ops.activate(F.linear(normed, layer.fc1, layer.fc1_bias)), layer.fc2)
            reduce(product)
            bias = layer.fc2_bias
        if batch.output_rows is not None:
            hidden = hidden[batch.output_rows]
            product = None if product is None else product[batch.output_rows]
        last = ops.add_and_norm(hidden, product, bias, weights.final_norm, weights.final_norm_bias)
        return self._logits(last)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings, float32 [t, hidden]: each rank looks up the ids it holds, and the ranks' results are summed."""
        if self._tensor_parallel.size == 1:
            return F.embedding(token_ids, self._weights.embedding).float()
        rows = token_ids - self._shard.vocab_start
        elsewhere = (rows < 0) | (rows >= self._shard.vocab_rows)
        hidden = F.embedding(rows.masked_fill(elsewhere, 0), self._weights.embedding).float()
        hidden = hidden.masked_fill(elsewhere[:, None], 0.0)
        self._tensor_parallel.all_reduce(hidden)
        return hidden

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [o, vocab_size], joined from the ranks' columns."""
        dtype, weight = logits_dtype(self._dtype, last.device), self._weights.head
        # On a GPU without rounding in between.
        logits = F.linear(last, weight) if dtype == last.dtype else torch.mm(last, weight.t(), out_dtype=dtype)
        if self._a.logits_scaling != 1:
            logits /= self._a.logits_scaling
        if self._tensor_parallel.size == 1:
            return logits
        return torch.cat(self._tensor_parallel.all_gather(logits), dim=-1)[:, : self._a.vocab_size]


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of the logits of a model that computes in ``dtype``: GPUs accumulate in float32 and need not round it."""
    return torch.float32 if device.type == "cuda" else dtype
