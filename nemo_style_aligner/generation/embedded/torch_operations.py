"""What the layers of `TorchModel` compute between their matrix products, on any device that torch supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from nemo_style_aligner.generation.embedded.batch import Batch
from nemo_style_aligner.generation.embedded.gathered_attention import GatheredAttention
from nemo_style_aligner.generation.embedded.rotary import apply_rotary, rotary_tables
from nemo_style_aligner.generation.embedded.step import EngineShape

HeadNorms: TypeAlias = "tuple[torch.Tensor, torch.Tensor] | None"
"""Weights of the norms of query and key heads, float32 [d] each, of models that have them."""

Attention: TypeAlias = Callable[[torch.Tensor, HeadNorms, torch.Tensor, bool], torch.Tensor]
"""Attention of one pass in one layer: [t, heads * d], before the output projection.

Called with the output of the qkv projection [t, groups * (heads per group + 2) * d] (for each group its query heads,
its key head and its value head), which it may overwrite; with the weights of the head norms; with the layer's pages
[pages, PAGE_TOKENS, 2 * groups, d], into which it writes the pass's keys and values; and with whether the layer rotates
queries and keys.
"""


class TorchOperations:
    """These operations with torch's functions. Residual stream and norms are float32, whatever the engine's dtype."""

    name = "torch's functions"
    computes_padding = True
    """Whether attention takes longer where `Batch.tables` has more columns than a sequence has pages."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self.architecture = a = shape.architecture
        self.groups = shape.shard.num_groups
        self.heads = shape.shard.num_heads // self.groups
        self.dtype = shape.dtype
        self.cos, self.sin = rotary_tables(a, shape.max_sequence_length, device)
        self.norm_offset = 1.0 if a.normalization == "layernorm1p" else 0.0
        self._gathered = GatheredAttention(self.heads, shape.dtype, a.attention_scale)

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        product: torch.Tensor | None,
        product_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add ``product`` and its bias to ``hidden``, float32 [t, h], in place; return its norm in the engine's dtype.

        What is added is multiplied by the model's ``residual_multiplier``.

        Args:
            product: [t, h] in the engine's dtype, the output of the preceding projection; None: there is none.
            weight, bias: float32 [h], of the norm; only RMSNorm has no bias.
        """
        multiplier = self.architecture.residual_multiplier
        if product is not None:
            hidden.add_(product, alpha=multiplier)
        if product_bias is not None:
            hidden.add_(product_bias, alpha=multiplier)
        shape, epsilon = (hidden.shape[-1],), self.architecture.layernorm_epsilon
        if bias is None:
            return F.rms_norm(hidden, shape, weight, epsilon).to(self.dtype)
        return F.layer_norm(hidden, shape, weight + self.norm_offset, bias, epsilon).to(self.dtype)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's non-linearity on [t, fc1 rows]: gate and value side by side where it is gated."""
        gate, value = x.chunk(2, dim=-1) if self.architecture.gated else (x, None)
        if self.architecture.activation == "silu":
            active = F.silu(gate)
        elif self.architecture.activation == "gelu":
            active = F.gelu(gate)
        else:
            active = F.relu(gate).square()
        return active if value is None else active * value

    def attention_of(self, batch: Batch) -> Attention:
        """The attention function for all layers of the pass ``batch``."""
        cos, sin = self.cos[batch.positions][:, None, None], self.sin[batch.positions][:, None, None]
        attend = self._gathered.of_pass(batch)

        def attention(qkv: torch.Tensor, norms: HeadNorms, pages: torch.Tensor, rotates: bool) -> torch.Tensor:
            heads, channels = self.heads, self.architecture.kv_channels
            qkv = qkv.view(len(qkv), self.groups, heads + 2, channels)
            turning = qkv[:, :, : heads + 1]
            if norms is None:
                normed = turning
            else:
                parts = zip(turning.float().split([heads, 1], dim=2), norms, strict=True)
                epsilon = self.architecture.layernorm_epsilon
                normed = torch.cat([F.rms_norm(part, (channels,), weight, epsilon) for part, weight in parts], dim=2)
            if norms is not None or rotates:
                turning.copy_(apply_rotary(normed, cos, sin) if rotates else normed)
            query, key_value = qkv[:, :, :heads], qkv[:, :, heads:].transpose(1, 2)
            pages.view(-1, 2, self.groups, channels).index_copy_(0, batch.places, key_value)
            return attend(pages, query, key_value)

        return attention
