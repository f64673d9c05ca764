"""One forward pass of the model over any mix of decode tokens and prompt chunks, in plain torch.

Everything but attention works on one packed axis of ``t`` tokens. The residual stream and the norms
are float32 whatever the dtype of the weights; matrix products and attention run in that dtype.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.embedded.kv_cache import KVCache
from nemo_style_aligner.generation.embedded.rotary import apply_rotary, rotary_tables
from nemo_style_aligner.generation.embedded.weights import LayerWeights, ModelWeights

_LENGTH_BUCKET = 64  # decode attends to a multiple of this many positions


@dataclasses.dataclass(frozen=True)
class Segment:
    """A prompt chunk: ``length`` tokens at positions ``start``... of ``slot``, at rows ``row``..."""

    slot: int
    start: int
    length: int
    row: int


@dataclasses.dataclass(frozen=True)
class StepInput:
    """Tokens of one forward pass: first one per decoding slot, slots ascending, then the segments."""

    token_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t]
    slots: torch.Tensor  # int64 [t]
    output_rows: torch.Tensor  # int64 [o]: rows of the token axis whose logits are wanted
    num_decode: int  # leading rows that are decode tokens
    slot_extent: int  # 1 + highest decoding slot; 0 without any
    attended_length: int  # 1 + highest decode position; 0 without any
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What all layers of one pass share."""

    step: StepInput
    cos: torch.Tensor  # float32 [t, 1, rotary size / 2]
    sin: torch.Tensor
    decode_mask: torch.Tensor | None  # additive, see `_decode_mask`; None without decode tokens
    segment_masks: list[torch.Tensor | None]  # bool [length, end] of each segment; None: plain causal


def bucket_length(length: int, limit: int) -> int:
    """``length`` rounded up to the bucket that attention runs over, at most ``limit``."""
    return min(limit, -(-length // _LENGTH_BUCKET) * _LENGTH_BUCKET)


class ModelStep:
    """Computes logits from `StepInput`, reading weights and reading and writing the KV cache.

    Holds no state of its own but the rotary tables, so it can be swapped for a native step.
    """

    def __init__(self, architecture: ModelArchitecture, weights: ModelWeights, cache: KVCache, dtype: torch.dtype):
        self._a = architecture
        self._weights = weights
        self._cache = cache
        self._dtype = dtype
        device = weights.embedding.device
        self._cos, self._sin = rotary_tables(architecture, cache.max_length, device)
        self._norm_offset = 1.0 if architecture.normalization == "layernorm1p" else 0.0

    @torch.inference_mode()
    def __call__(self, step: StepInput) -> torch.Tensor:
        """Logits [o, vocab_size] in the engine's dtype."""
        weights = self._weights
        hidden = F.embedding(step.token_ids, weights.embedding).float()
        shared = _Shared(
            step=step,
            cos=self._cos[step.positions].unsqueeze(1),
            sin=self._sin[step.positions].unsqueeze(1),
            decode_mask=self._decode_mask(step),
            segment_masks=[_segment_mask(segment, hidden.device) for segment in step.segments],
        )
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.input_norm, layer.input_norm_bias)
            attended = self._attention(index, layer, normed, shared)
            hidden += F.linear(attended, layer.output, layer.output_bias)
            normed = self._norm(hidden, layer.mlp_norm, layer.mlp_norm_bias)
            hidden += F.linear(self._activate(F.linear(normed, layer.fc1, layer.fc1_bias)), layer.fc2, layer.fc2_bias)
        last = self._norm(hidden[step.output_rows], weights.final_norm, weights.final_norm_bias)
        return F.linear(last, weights.head)

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

    def _attention(self, index: int, layer: LayerWeights, normed: torch.Tensor, shared: _Shared) -> torch.Tensor:
        """Self-attention of all tokens, [t, heads * kv_channels], before the output projection."""
        a, step, cos, sin = self._a, shared.step, shared.cos, shared.sin
        heads, groups = a.num_attention_heads, a.num_query_groups
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * groups, a.kv_channels)
        query, key, value = qkv.split([heads, groups, groups], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = F.rms_norm(query.float(), (a.kv_channels,), layer.query_norm, a.layernorm_epsilon)
            key = F.rms_norm(key.float(), (a.kv_channels,), layer.key_norm, a.layernorm_epsilon)
            rotated = apply_rotary(torch.cat((query, key), dim=1), cos, sin).to(self._dtype)
        else:
            rotated = apply_rotary(qkv[:, : heads + groups], cos, sin).to(self._dtype)
        query, key = rotated.split([heads, groups], dim=1)
        self._cache.write(index, step.slots, step.positions, key, value)
        attended = [self._decode_attention(index, query[: step.num_decode], step, shared.decode_mask)]
        attended += [
            self._prefill_attention(index, query[segment.row : segment.row + segment.length], segment, mask)
            for segment, mask in zip(step.segments, shared.segment_masks, strict=True)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _decode_attention(
        self, index: int, query: torch.Tensor, step: StepInput, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one token per slot: ``query`` [n, heads, d] -> [n, heads * d].

        The query heads that share a key head become the rows of one small product with it, so the
        cache is read once per group and never expanded.
        """
        if mask is None:
            return query.flatten(1)
        a = self._a
        n, extent = step.num_decode, step.slot_extent
        per_group = a.num_attention_heads // a.num_query_groups
        if n < extent:  # slots in between are free or still prefilling: their rows are computed for nothing
            slots = step.slots[:n]
            query = query.new_zeros((extent, *query.shape[1:])).index_copy_(0, slots, query)
        length = mask.shape[-1]
        out = F.scaled_dot_product_attention(
            query.reshape(extent, a.num_query_groups, per_group, a.kv_channels),
            self._cache.keys[index][:extent, :, :length],
            self._cache.values[index][:extent, :, :length],
            attn_mask=mask,
        ).reshape(extent, -1)
        return out if n == extent else out[slots]

    def _prefill_attention(
        self, index: int, query: torch.Tensor, segment: Segment, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal attention of one chunk over its slot: ``query`` [s, heads, d] -> [s, heads * d]."""
        end = segment.start + segment.length
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self._cache.keys[index][None, segment.slot, :, :end],
            self._cache.values[index][None, segment.slot, :, :end],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _decode_mask(self, step: StepInput) -> torch.Tensor | None:
        """Additive mask [extent, 1, heads per group, length] over cached positions; None: no decode."""
        if step.num_decode == 0:
            return None
        device = step.slots.device
        # Rows of slots that do not decode attend to position 0, so that their softmax is finite.
        last = torch.zeros(step.slot_extent, dtype=torch.int64, device=device)
        last[step.slots[: step.num_decode]] = step.positions[: step.num_decode]
        length = bucket_length(step.attended_length, self._cache.max_length)
        hidden = torch.arange(length, device=device) > last[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device).masked_fill_(hidden, -torch.inf)
        per_group = self._a.num_attention_heads // self._a.num_query_groups
        return mask[:, None, None, :].expand(-1, 1, per_group, -1)


def _segment_mask(segment: Segment, device: torch.device) -> torch.Tensor | None:
    """Which cached positions each token of a chunk sees; None for a chunk that starts its prompt."""
    if segment.start == 0:
        return None
    end = segment.start + segment.length
    return torch.ones(segment.length, end, dtype=torch.bool, device=device).tril_(segment.start)
