"""What the layers of `TorchModel` compute between their matrix products, on any device that torch supports.

Each sequence's pages are gathered for torch's `scaled_dot_product_attention`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.architecture import Layer
from nemo_style_aligner.engine.embedded.routing import computed_by_experts, routed
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape
from nemo_style_aligner.engine.softcaps import clamped_swiglu, stored_attention
from nemo_style_aligner.engine.transfers import moved

_MOST_QUERIES = 1024  # of a chunk at a time: masks, and scores where they are stored, have as many rows


@dataclasses.dataclass(frozen=True)
class ChunkSegment:
    """A prompt chunk: ``length`` tokens of one sequence, from token ``first`` of the pass on, at position ``start``."""

    first: int
    length: int
    start: int
    pages: np.ndarray  # int32, on the host: of all positions that the chunk attends to

    def pieces(self, most: int) -> Iterator[ChunkSegment]:
        """The same tokens, at most so many at a time."""
        for begin in range(0, self.length, most):
            length = min(most, self.length - begin)
            end = self.start + begin + length
            yield ChunkSegment(self.first + begin, length, self.start + begin, self.pages[: -(-end // PAGE_TOKENS)])


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of one pass on the device: one decoding token for each row of ``tables``, then the segments."""

    token_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t]
    places: torch.Tensor  # int64 [t]: page * PAGE_TOKENS + offset, where keys and values go
    tables: torch.Tensor  # int64 [n, p]: pages that each decoding token attends to
    segments: tuple[ChunkSegment, ...] = ()
    output_rows: torch.Tensor | None = None  # int64 [o]: tokens whose logits are wanted; None: all
    # Filled in: of each layer with experts those of each token, int64 [t, k].
    routes: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def stacked_routes(self) -> torch.Tensor:
        """``routes``, int16 [t, layers with experts, k]; without any layer [t, 0, 0]."""
        if not self.routes:
            return torch.empty(len(self.positions), 0, 0, dtype=torch.int16)
        return torch.stack(self.routes, 1).to(torch.int16)


class HeadWeights(NamedTuple):
    """What a layer's attention has beside its matrices, where models have it, float32.

    Attributes:
        norms: weights of the norms of queries and of keys, [d] each, or [this rank's heads * d].
        sinks: scores [this rank's heads].
    """

    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    sinks: torch.Tensor | None = None


Norm: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""Weight and bias of a norm of the residual stream, float32 [h] each; only RMSNorm has no bias."""

LOADED_BYTES = 16
"""What kernels load at a time: matrices begin at multiples of it."""


@dataclasses.dataclass(frozen=True)
class ExpertMatrices:
    """This rank's part of a layer's experts, whose matrices lie anywhere: in the engine's memory or the trainer's.

    Attributes:
        fc1: of each [2 f, h], gate over up.
        fc2: of each [h, f].
        fc1_bias, fc2_bias: of each [2 f] and [h]; empty: there are none.
        places: int64 [4, experts], on the device: how far behind that of the first expert these of each begin, in
            multiples of `LOADED_BYTES`.
    """

    fc1: tuple[torch.Tensor, ...]
    fc2: tuple[torch.Tensor, ...]
    fc1_bias: tuple[torch.Tensor, ...] = ()
    fc2_bias: tuple[torch.Tensor, ...] = ()
    places: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        places = torch.zeros(4, len(self.fc1), dtype=torch.int64, device=self.fc1[0].device)
        object.__setattr__(self, "places", places)
        self.locate()

    def locate(self) -> None:
        """Fill in ``places``; to be called again when memory has been moved."""
        for row, kind in zip(self.places, (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias), strict=True):
            if kind:
                row.copy_(torch.tensor([each.data_ptr() - kind[0].data_ptr() for each in kind]) // LOADED_BYTES)


Attention: TypeAlias = Callable[[torch.Tensor, HeadWeights, torch.Tensor, Layer], torch.Tensor]
"""Attention of one pass in one layer: [t, heads * d], before the output projection.

Called with the output of the qkv projection [t, groups * (heads per group + 2) * d] (for each group its query heads,
its key head and its value head), which it may overwrite; with the weights of the heads; with the layer's pages
[pages, PAGE_TOKENS, 2 * groups, d], into which it writes the pass's keys and values; and with what the layer computes.
"""


class TorchOperations:
    """These operations with torch's functions. Residual stream and norms are float32, whatever the engine's dtype."""

    name = "torch's functions"

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self.architecture = shape.architecture
        self.groups = shape.shard.num_groups
        self.heads = shape.shard.num_heads // self.groups
        self.dtype = shape.dtype
        self.cos, self.sin = (table.to(device) for table in shape.rotary_tables())
        self.local_cos, self.local_sin = self.cos, self.sin
        if shape.architecture.local_rotary_base is not None:
            self.local_cos, self.local_sin = (table.to(device) for table in shape.rotary_tables(local=True))
        self.tensor_parallel = shape.tensor_parallel

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        product: torch.Tensor | None,
        product_bias: torch.Tensor | None,
        product_norm: Norm | None,
        norm: Norm | None,
    ) -> torch.Tensor:
        """Add ``product`` and its bias to ``hidden``, float32 [t, h], in place; return its norm in the engine's dtype.

        What is added is multiplied by the model's ``residual_multiplier``.

        Args:
            product: [t, h], the output of the preceding projection; None: there is none.
            product_norm: not these two are added, but the norm of their sum.
            norm: None: the sum itself is returned.
        """
        multiplier = self.architecture.residual_multiplier
        if product is not None and product_norm is not None:
            product = self._normed(product if product_bias is None else product + product_bias, product_norm)
            product_bias = None
        if product is not None:
            hidden.add_(product, alpha=multiplier)
        if product_bias is not None:
            hidden.add_(product_bias, alpha=multiplier)
        return (hidden if norm is None else self._normed(hidden, norm)).to(self.dtype)

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of ``x`` [t, h], float32."""
        a, shape, (weight, bias) = self.architecture, (x.shape[-1],), norm
        if bias is None:
            return F.rms_norm(x.float(), shape, self.scales(weight), a.layernorm_epsilon)
        return F.layer_norm(x.float(), shape, self.scales(weight), bias, a.layernorm_epsilon)

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """What a norm multiplies by, of its stored weight."""
        return weight + self.architecture.norm_offset if self.architecture.norm_offset else weight

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's non-linearity on [t, fc1 rows]: gate and value side by side where it is gated."""
        gate, value = x.chunk(2, dim=-1) if self.architecture.gated else (x, None)
        if self.architecture.clamped_swiglu and value is not None:
            return clamped_swiglu(gate.float(), value.float()).to(x.dtype)
        if self.architecture.activation == "silu":
            active = F.silu(gate)
        elif self.architecture.activation == "gelu":
            active = F.gelu(gate)
        elif self.architecture.activation == "gelu-tanh":
            active = F.gelu(gate, approximate="tanh")
        else:
            active = F.relu(gate).square()
        return active if value is None else active * value

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token and their weights, see `routing.routed`."""
        assert self.architecture.experts is not None
        return routed(logits, self.architecture.experts, bias)

    def experts(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, matrices: ExpertMatrices
    ) -> torch.Tensor:
        """What this rank's part of experts adds to the sum over ranks, [t, h] of ``x`` [t, h].

        Args:
            chosen, weights: see `routing.routed`.
        """

        def compute(rows: torch.Tensor, expert: int) -> torch.Tensor:
            bias = matrices.fc1_bias[expert] if matrices.fc1_bias else None
            out = F.linear(self.activate(F.linear(rows, matrices.fc1[expert], bias)), matrices.fc2[expert])
            # Weighted as the rest is, so it is not for all to add; of ranks that share an expert the first adds it.
            return out + matrices.fc2_bias[expert] if matrices.fc2_bias and not self.tensor_parallel.rank else out

        return computed_by_experts(x, chosen, weights, compute)

    def rotary(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions by which a layer rotates."""
        return (self.local_cos, self.local_sin) if layer.local_rope else (self.cos, self.sin)

    def attention_of(self, batch: Batch) -> Attention:
        """The attention function for all layers of the pass ``batch``, whose tables and masks are made once."""
        scale, num_decode, device = self.architecture.attention_scale, len(batch.tables), batch.positions.device
        segments = [piece for segment in batch.segments for piece in segment.pieces(_MOST_QUERIES)]

        @functools.cache
        def angles(layer: Layer) -> list[torch.Tensor]:
            return [table[batch.positions][:, None, None] for table in self.rotary(layer)]

        @functools.cache
        def seen(window: int | None) -> tuple[_Seen, list[_Seen]]:
            return self._seen_decoding(batch, window), [_seen_by(segment, window, device) for segment in segments]

        def attention(qkv: torch.Tensor, weights: HeadWeights, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
            heads, channels, cap = self.heads, self.architecture.kv_channels, layer.attn_logit_softcapping
            qkv = qkv.view(len(qkv), self.groups, heads + 2, channels)
            turning, norms = qkv[:, :, : heads + 1], weights.norms
            normed = turning if norms is None else self._heads_normed(turning, norms)
            if norms is not None or layer.rotates:
                turning.copy_(_rotated(normed, *angles(layer)) if layer.rotates else normed)
            query, key_value = qkv[:, :, :heads], qkv[:, :, heads:].transpose(1, 2)
            pages.view(-1, 2, self.groups, channels).index_copy_(0, batch.places, key_value)
            sinks = None if weights.sinks is None else weights.sinks.view(self.groups, heads, 1)
            way, (by_decoding, by_chunks) = _Way(scale, cap, sinks), seen(layer.window)
            attended = [_attend_decoding(pages, query[:num_decode], by_decoding, way)] if num_decode else []
            chunks = zip(segments, by_chunks, strict=True)
            attended += [_attend_chunk(pages, query, chunk, by_chunk, way) for chunk, by_chunk in chunks]
            return attended[0] if len(attended) == 1 else torch.cat(attended)

        return attention

    def mean_squares(self, turning: torch.Tensor) -> torch.Tensor:
        """Of each token's queries, and of its keys, over all heads: float32 [2, t].

        Args:
            turning: queries and keys [t, groups, heads per group + 1, d].

        Collective over the ranks that share the model.
        """
        parts = turning.float().split([self.heads, 1], dim=2)
        # Ranks that share a key head count it once each, above and below.
        sums = [part.square().sum((1, 2, 3)) / (self.tensor_parallel.size * part[0].numel()) for part in parts]
        means = torch.stack(sums)
        self.tensor_parallel.all_reduce(means)
        return means

    def _heads_normed(self, turning: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Norms of queries and keys [t, groups, heads per group + 1, d], float32. Collective if over all heads."""
        a, parts = self.architecture, turning.float().split([self.heads, 1], dim=2)
        scaled = zip(parts, map(self.scales, norms), strict=True)
        if not a.qk_norm_over_heads:
            each = [F.rms_norm(part, (a.kv_channels,), weight, a.layernorm_epsilon) for part, weight in scaled]
            return torch.cat(each, dim=2)
        factors = (self.mean_squares(turning) + a.layernorm_epsilon).rsqrt()[..., None, None, None]
        normed = [
            part * factor * weight.view(part.shape[1:]) for (part, weight), factor in zip(scaled, factors, strict=True)
        ]
        return torch.cat(normed, dim=2)

    def _seen_decoding(self, batch: Batch, window: int | None) -> _Seen:
        """What decoding tokens see: pages [n * p], those of each token's window alone where there is one.

        The mask is added to scores: [n, 1, heads per group, positions of these pages].
        """
        rows, num_pages = batch.tables.shape
        device, own = batch.tables.device, batch.positions[:rows, None]
        columns, pages = torch.arange(num_pages, device=device), batch.tables
        if window is not None and (most := (window - 2) // PAGE_TOKENS + 2) < num_pages:
            columns = (own - window + 1).clamp_(min=0) // PAGE_TOKENS + columns[:most]
            pages = pages.gather(1, columns.clamp(max=num_pages - 1))
        positions = (columns[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)).flatten(-2)
        hidden = positions > own
        if window is not None:
            hidden |= positions <= own - window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, -torch.inf)
        return _Seen(pages.flatten(), mask[:, None, None, :].expand(-1, 1, self.heads, -1))


class _Seen(NamedTuple):
    """What some tokens of a pass attend to in layers with a window of one size, or without.

    Attributes:
        pages: int64, flat.
        mask: of the positions in these; see `_attend_decoding` and `_attend_chunk`.
    """

    pages: torch.Tensor
    mask: torch.Tensor


class _Way(NamedTuple):
    """How a layer's scores become weights: their factor, their soft cap, sinks [groups, heads per group, 1]."""

    scale: float
    cap: float | None
    sinks: torch.Tensor | None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first ``2 * cos.shape[-1]`` channels of ``x`` [t, ..., d] rotated, float32; tables are [t, 1..., r / 2].

    The two halves of the rotated part pair up (Hugging Face's order, not interleaved).
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest.float()) if rest.shape[-1] else rotated, dim=-1)


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, way: _Way
) -> torch.Tensor:
    """Attention of [..., heads, s, d] to [..., groups, n, d]; the way's sinks as [..., heads, s, 1]."""
    if way.cap is not None or way.sinks is not None:
        return stored_attention(query, keys, values, mask, way.scale, way.cap, way.sinks)
    has_groups = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=way.scale, enable_gqa=has_groups)


def _attend_decoding(pages: torch.Tensor, query: torch.Tensor, seen: _Seen, way: _Way) -> torch.Tensor:
    """One token per sequence: ``query`` [n, groups, heads per group, d] -> [n, heads * d].

    The query heads that share a key head become the rows of one product with it, so keys are never expanded.
    """
    n, groups, _, channels = query.shape
    read = pages.index_select(0, seen.pages).view(n, -1, 2 * groups, channels).transpose(1, 2)
    keys, values = read[:, :groups], read[:, groups:]
    return _attended(query, keys, values, seen.mask, way).reshape(n, -1)


def _attend_chunk(
    pages: torch.Tensor, query: torch.Tensor, segment: ChunkSegment, seen: _Seen, way: _Way
) -> torch.Tensor:
    """Attention of one chunk, [length, heads * d]; ``query`` is that of the whole pass."""
    read = pages.index_select(0, seen.pages).flatten(0, 1)[: seen.mask.shape[1]].unflatten(1, (2, -1))
    keys, values = read.permute(1, 2, 0, 3)[:, :, None]  # each [groups, 1, end, d]: groups are the batch dimension
    own = query[segment.first : segment.first + segment.length].permute(1, 2, 0, 3)
    sinks = None if way.sinks is None else way.sinks[..., None]
    out = _attended(own, keys, values, seen.mask, way._replace(sinks=sinks))
    return out.permute(2, 0, 1, 3).flatten(1)


def _seen_by(segment: ChunkSegment, window: int | None, device: torch.device) -> _Seen:
    """What a chunk attends to, and its mask, bool [length, positions from the first of these pages on]."""
    first = 0 if window is None else max(0, segment.start - window + 1) // PAGE_TOKENS
    pages = moved(torch.from_numpy(segment.pages[first:]).long(), device)
    start = segment.start - first * PAGE_TOKENS
    mask = torch.ones(segment.length, start + segment.length, dtype=torch.bool, device=device).tril_(start)
    return _Seen(pages, mask if window is None else mask.triu_(start - window + 1))
