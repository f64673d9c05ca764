"""Attention straight from the pages of keys and values: two Triton kernels, for NVIDIA GPUs.

A program of the first kernel computes some tokens of one sequence, for the query heads that share one key head, over
one part of the positions that the tokens attend to. Decoding tokens have few queries and many positions: with few
sequences the division into parts keeps the GPU busy, and the second kernel combines the parts. The running softmax is
that of arXiv:2205.14135, the parts are those of https://pytorch.org/blog/flash-decoding.

Import this module where Triton is installed only; `choose_operations` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS
from nemo_style_aligner.engine.embedded.torch_operations import Batch
from nemo_style_aligner.engine.transfers import moved

_LEAST_ROWS = 16  # of a product on tensor cores: the heads of one decoding token are padded to it
_LEAST_WIDTH = 16  # the same for channels
_BLOCK_BYTES = 2**13  # of keys that a program loads at a time, and as many of values
_MOST_POSITIONS = 64  # upper limit of these loads in positions
_MANY_RESULTS = 2**14  # rows times channels of a program that need the registers of 8 warps
_STAGES = 5  # that Triton needs to load a block while another is multiplied: the block's page numbers come first
_PROGRAMS_PER_PROCESSOR = 4  # wanted at least when tokens decode
_POSITIONS_PER_PART = 256  # at least, a multiple of every block size: shorter parts cost more to combine than they gain
_MOST_POSITIONS_PER_PART = 1024  # at most, about: else one long sequence would hold up many short ones
_MOST_PARTS = 32
_ALL = 1 << 30  # a window longer than any sequence
_LOG2_E = math.log2(math.e)  # the kernels compute powers of two
LOG2_E = tl.constexpr(_LOG2_E)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The tokens that each program along the first axis of the grid computes.

    Attributes:
        tables: int64 [n, p], rows contiguous: the pages of each sequence's positions.
        chunks: int64 [b, 3]: a program's first token in the pass, number of tokens, and row of ``tables``. None:
            program i computes decoding token i, whose pages are in row i.
    """

    tables: torch.Tensor
    chunks: torch.Tensor | None = None

    @property
    def num_programs(self) -> int:
        return len(self.tables) if self.chunks is None else len(self.chunks)


class PagedAttention:
    """The kernels for one shape of heads; each is compiled at its first call, for passes of all sizes."""

    def __init__(self, groups: int, heads_per_group: int, channels: int, scale: float, num_processors: int) -> None:
        """``scale``: factor of the scores. ``num_processors``: of the GPU (streaming multiprocessors)."""
        self._scale = scale
        self._groups = groups
        self._heads = heads_per_group
        self._channels = channels
        self._wanted_programs = _PROGRAMS_PER_PROCESSOR * num_processors
        self._width = max(_LEAST_WIDTH, triton.next_power_of_2(channels))
        self._decode_rows = max(_LEAST_ROWS, triton.next_power_of_2(heads_per_group))
        # Rows of a program for chunks, heads times tokens. At 128 channels Triton divides 64 of them badly.
        self._chunk_rows = max(128 if self._width == 128 else 64, self._decode_rows)

    def of_pass(self, batch: Batch) -> Callable[..., torch.Tensor]:
        """The attention function for all layers of the pass ``batch``: [t, heads * d], before the output projection.

        Called with the layer's pages [pages, PAGE_TOKENS, 2 * groups, d], which hold the pass's keys and values
        already, and with queries [t, groups, heads per group, d]; where the layer has them, with a window (positions
        that a token sees, its own included), sinks (scores of nothing, float32 [groups * heads per group]) and a soft
        cap of scores.
        """
        blocks = [_Blocks(batch.tables)] if len(batch.tables) else []
        if batch.segments:
            blocks.append(self._chunk_blocks(batch))
        positions = batch.positions

        def attend(
            pages: torch.Tensor,
            query: torch.Tensor,
            window: int | None = None,
            sinks: torch.Tensor | None = None,
            cap: float | None = None,
        ) -> torch.Tensor:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            for part in blocks:
                self._attend(query, pages, positions, part, out, window, sinks, cap)
            return out.flatten(1)

        return attend

    def num_parts(self, n: int, p: int, window: int | None = None) -> int:
        """Number of parts into which the positions of ``n`` decoding sequences of up to ``p`` pages are divided."""
        positions = p * PAGE_TOKENS if window is None else min(p * PAGE_TOKENS, window)
        wanted = triton.cdiv(self._wanted_programs, n * self._groups)
        wanted = max(wanted, triton.cdiv(positions, _MOST_POSITIONS_PER_PART))
        return min(_MOST_PARTS, wanted, triton.cdiv(positions, _POSITIONS_PER_PART))

    def _chunk_blocks(self, batch: Batch) -> _Blocks:
        tokens = self._chunk_rows // self._heads
        tables = np.zeros((len(batch.segments), max(len(s.pages) for s in batch.segments)), dtype=np.int64)
        chunks = []
        for row, segment in enumerate(batch.segments):
            tables[row, : len(segment.pages)] = segment.pages
            end = segment.first + segment.length
            chunks += [(first, min(tokens, end - first), row) for first in range(segment.first, end, tokens)]
        device = batch.positions.device
        return _Blocks(moved(torch.from_numpy(tables), device), moved(torch.tensor(chunks), device))

    def _attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        positions: torch.Tensor,
        blocks: _Blocks,
        out: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None,
        cap: float | None,
    ) -> None:
        """Compute the rows of ``out``, of the shape of ``query``, that belong to the tokens of ``blocks``."""
        decodes = blocks.chunks is None
        n, p = blocks.tables.shape
        rows = self._decode_rows if decodes else self._chunk_rows
        parts = self.num_parts(n, p, window) if decodes else 1
        partial, log_sums = out, out  # not touched
        if parts > 1:
            heads = self._groups * self._heads
            partial = torch.empty(n, heads, parts, self._channels, dtype=torch.float32, device=out.device)
            log_sums = torch.empty(n, heads, parts, dtype=torch.float32, device=out.device)
        attend_kernel[blocks.num_programs, self._groups, parts](
            *(query, pages, blocks.tables, positions, positions if decodes else blocks.chunks),
            *(out, partial, log_sums, positions if sinks is None else sinks),
            self._scale * _LOG2_E if cap is None else 2 * self._scale / cap,
            (cap or 0.0) * _LOG2_E,
            window or _ALL,
            # Strides in heads, so that Triton sees that a head's channels can be loaded side by side.
            *(query.stride(0) // self._channels, query.stride(1) // self._channels),
            *(blocks.tables.stride(0), positions.stride(0)),
            GROUPS=self._groups,
            HEADS=self._heads,
            CHANNELS=self._channels,
            PAGE=PAGE_TOKENS,
            ROWS=rows,
            WIDTH=self._width,
            BLOCK=_block(self._width * query.element_size()),
            LEAST=_POSITIONS_PER_PART,
            IN_CHUNKS=not decodes,
            IN_PARTS=parts > 1,
            HAS_SINKS=sinks is not None,
            HAS_CAP=cap is not None,
            num_warps=8 if rows * self._width >= _MANY_RESULTS else 4,
            num_stages=_STAGES,
            enable_fp_fusion=True,
        )
        if parts > 1:
            add_parts_kernel[n, self._groups * self._heads](
                *(partial, log_sums, out, parts),
                CHANNELS=self._channels,
                WIDTH=self._width,
                MOST_PARTS=_MOST_PARTS,
                enable_fp_fusion=True,
            )


def _block(bytes_per_position: int) -> int:
    """Positions that a program loads at a time: a power of two."""
    return max(_LEAST_ROWS, min(_MOST_POSITIONS, _BLOCK_BYTES // bytes_per_position))


@triton.jit
def load_heads(place, channels, is_there, is_channel, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys and values of a head, whose first numbers are at ``place``, those of values ``VALUES`` numbers later."""
    places, is_stored = place[:, None] + channels[None, :], is_there[:, None] & is_channel[None, :]
    return tl.load(places, mask=is_stored, other=0.0), tl.load(places + VALUES, mask=is_stored, other=0.0)


# What differs between calls must not make Triton compile anew: neither values nor the alignment of views.
@triton.jit(
    do_not_specialize=["window", "query_stride", "group_stride", "table_stride", "position_stride"],
    do_not_specialize_on_alignment=["tables", "positions", "chunks", "sinks"],
)
def attend_kernel(  # type: ignore[no-untyped-def]  # Triton looks annotations up
    query,
    pages,
    tables,
    positions,
    chunks,
    out,
    partial,
    log_sums,
    sinks,
    scale,
    cap,
    window,
    query_stride,
    group_stride,
    table_stride,
    position_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attention of one program: its place in the grid is a block of tokens (see `_Blocks`), a group and a part.

    Without ``IN_PARTS`` the result goes to ``out`` [t, groups, heads, channels]; with it, in float32, to ``partial``
    [t, groups, heads, parts, channels], and the logarithm of the sum of its weights to ``log_sums`` [t, groups, heads,
    parts]. Logarithms are of base 2, and ``scale`` includes the factor log2(e). With a soft cap it does not: there
    ``scale`` is that of the scores times 2 / cap, and ``cap`` includes the factor.

    A part has at least ``LEAST`` positions, so the last parts of a short sequence are empty. With a window, positions
    before that of the first token are in none. Sinks belong to the first part.

    Row i of a program's ``ROWS`` is head i % HEADS of token i // HEADS; ``WIDTH`` is ``CHANNELS`` padded.
    """
    block = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part, num_parts = tl.program_id(2), tl.num_programs(2)
    first_token, num_tokens, sequence = block, 1, block
    if IN_CHUNKS:
        first_token = tl.load(chunks + 3 * block)
        num_tokens = tl.load(chunks + 3 * block + 1).to(tl.int32)
        sequence = tl.load(chunks + 3 * block + 2)
    rows, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    tokens, heads = rows // HEADS, rows % HEADS
    is_row, is_channel = tokens < num_tokens, channels < CHANNELS
    is_real = is_row[:, None] & is_channel[None, :]
    result = ((first_token + tokens) * GROUPS + group) * HEADS + heads

    first_position = tl.load(positions + first_token * position_stride).to(tl.int32)
    own_positions = first_position + tokens
    end = first_position + num_tokens
    low = tl.maximum(first_position - window + 1, 0)
    per_part = tl.maximum(tl.cdiv(tl.cdiv(end - low, BLOCK), num_parts) * BLOCK, LEAST)
    begin = low + part * per_part
    end = tl.minimum(begin + per_part, end)
    if IN_PARTS:
        result = result * num_parts + part
        if begin >= end:  # an empty part: its weight in the whole is 0
            tl.store(log_sums + result, float("-inf"), mask=is_row)
            return

    own = (first_token + tokens) * query_stride + group * group_stride + heads
    q = tl.load(query + own[:, None] * CHANNELS + channels[None, :], mask=is_real, other=0.0)
    nothing = tl.full([ROWS], float("-inf"), tl.float32)
    sink = tl.load(sinks + group * HEADS + heads) * LOG2_E if HAS_SINKS else nothing
    highest = tl.where(part == 0, sink, nothing)
    total = tl.where(highest > float("-inf"), 1.0, 0.0)
    attended = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, BLOCK):
        seen = start + tl.arange(0, BLOCK)
        is_there = seen < end
        page = tl.load(tables + sequence * table_stride + seen // PAGE, mask=is_there, other=0).to(tl.int64)
        place = pages + (page * PAGE + seen % PAGE) * (2 * GROUPS * CHANNELS) + group * CHANNELS
        key, value = load_heads(place, channels, is_there, is_channel, GROUPS * CHANNELS)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = cap * (2.0 * tl.sigmoid(scores) - 1.0) if HAS_CAP else scores  # cap tanh(scores / 2)
        behind = own_positions[:, None] - seen[None, :]
        scores = tl.where(is_there[None, :] & (behind >= 0) & (behind < window), scores, float("-inf"))
        now_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(now_highest == float("-inf"), 0.0, now_highest)  # a token's window begins after the block
        shrunk = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        attended = attended * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = now_highest

    attended = attended / total[:, None]
    if IN_PARTS:
        tl.store(partial + result[:, None] * CHANNELS + channels[None, :], attended, mask=is_real)
        tl.store(log_sums + result, highest + tl.log2(total), mask=is_row)
    else:
        places = out + result[:, None] * CHANNELS + channels[None, :]
        tl.store(places, attended.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_parts"])
def add_parts_kernel(  # type: ignore[no-untyped-def]
    partial,
    log_sums,
    out,
    num_parts,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Combine the parts of one token and head, the program's place in the grid: their mean, weighted by their sums."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts, channels = tl.arange(0, MOST_PARTS), tl.arange(0, WIDTH)
    is_channel = channels < CHANNELS
    sums = tl.load(log_sums + head * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    saw_something = sums != float("-inf")  # empty parts have written no result
    places = (head * num_parts + parts)[:, None] * CHANNELS + channels[None, :]
    values = tl.load(partial + places, mask=saw_something[:, None] & is_channel[None, :], other=0.0)
    mean = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + head * CHANNELS + channels, mean.to(out.dtype.element_ty), mask=is_channel)
