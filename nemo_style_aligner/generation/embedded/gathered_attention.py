"""Paged attention on any device: each sequence's pages are gathered for torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from nemo_style_aligner.generation.embedded.batch import Batch, ChunkSegment
from nemo_style_aligner.generation.embedded.step import PAGE_TOKENS
from nemo_style_aligner.transfers import moved

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one pass in one layer, before the output projection: [t, heads * d].

Called with the layer's pages [pages, PAGE_TOKENS, 2 * groups, d], which hold the pass's keys and values already, and
with queries [t, groups, heads per group, d] and keys and values [t, 2, groups, d] of the pass.
"""


class GatheredAttention:
    """Attention by `scaled_dot_product_attention`: one call for all decoding tokens, and one for each chunk."""

    def __init__(self, heads_per_group: int, dtype: torch.dtype, scale: float) -> None:
        """``scale``: factor of the scores."""
        self._scale = scale
        self._heads = heads_per_group
        self._dtype = dtype

    def of_pass(self, batch: Batch) -> Attend:
        """The attention function for all layers of the pass ``batch``, whose masks are made once."""
        device = batch.positions.device
        tables = batch.tables.flatten()
        mask = self._decode_mask(batch)
        chunks = [(segment, *_chunk(segment, device)) for segment in batch.segments]

        def attend(pages: torch.Tensor, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
            num_decode = len(mask)
            attended = [_attend_decoding(pages, query[:num_decode], tables, mask, self._scale)] if num_decode else []
            attended += [_attend_chunk(pages, query, key_value, *chunk, self._scale) for chunk in chunks]
            return attended[0] if len(attended) == 1 else torch.cat(attended)

        return attend

    def _decode_mask(self, batch: Batch) -> torch.Tensor:
        """Additive mask [n, 1, heads per group, positions of ``tables``] that hides what comes after each token."""
        rows, num_pages = batch.tables.shape
        device = batch.tables.device
        hidden = torch.arange(num_pages * PAGE_TOKENS, device=device) > batch.positions[:rows, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None, :].expand(-1, 1, self._heads, -1)


def _attend_decoding(
    pages: torch.Tensor, query: torch.Tensor, tables: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One token per sequence: ``query`` [n, groups, heads per group, d] -> [n, heads * d]. ``tables`` [n * p] is flat.

    The query heads that share a key head become the rows of one product with it, so keys are never expanded.
    """
    n, groups, _, channels = query.shape
    seen = pages.index_select(0, tables).view(n, -1, 2 * groups, channels).transpose(1, 2)
    keys, values = seen[:, :groups], seen[:, groups:]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).reshape(n, -1)


def _attend_chunk(
    pages: torch.Tensor,
    query: torch.Tensor,
    key_value: torch.Tensor,
    segment: ChunkSegment,
    seen_pages: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one chunk, [length, heads * d]; ``query`` and ``key_value`` are those of the whole pass."""
    tokens = slice(segment.first, segment.first + segment.length)
    if seen_pages is None:
        seen = key_value[tokens]
    else:
        seen = pages.index_select(0, seen_pages).flatten(0, 1)[: segment.start + segment.length]
        seen = seen.unflatten(1, (2, -1))
    keys, values = seen.permute(1, 2, 0, 3)[:, :, None]  # each [groups, 1, end, d]: groups are the batch dimension
    out = F.scaled_dot_product_attention(
        query[tokens].permute(1, 2, 0, 3),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.permute(2, 0, 1, 3).flatten(1)


def _chunk(segment: ChunkSegment, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The pages that a chunk attends to, and its mask; None for a chunk that starts its sequence.

    All that such a chunk attends to is in the pass, and causality is its only mask.
    """
    if segment.start == 0:
        return None, None
    pages = moved(torch.from_numpy(segment.pages).long(), device)
    end = segment.start + segment.length
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which takes a second or two

        return pages, causal_lower_right(segment.length, end)  # flash attention, which takes no masks, knows this one
    return pages, torch.ones(segment.length, end, dtype=torch.bool, device=device).tril_(segment.start)
