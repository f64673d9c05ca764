"""What the tokens of a packed row see: the row is a list of spans, each with the keys that it sees.

A sequence by itself is one span, which sees itself. Where several sequences begin alike, the beginning is a span, and
what follows in each is another, which sees the beginning and itself. Attention knows of nothing else, not of sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams


class Run(NamedTuple):
    """Neighbouring tokens of a row, from ``begin`` up to ``end``."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.begin


class Span(NamedTuple):
    """Tokens of a row that are computed together, and the keys that they see.

    Causality is aligned at the end: the last query sees all keys, the one before it all but the last, and so on.

    Attributes:
        queries: what is computed.
        keys: runs of tokens, in the order of their positions, at least as many as queries.
    """

    queries: Run
    keys: tuple[Run, ...]

    @property
    def num_keys(self) -> int:
        """Keys that the last query sees."""
        return sum(run.size for run in self.keys)


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of a row. Their queries are its tokens, in order; those that see common keys are neighbours.

    Attributes:
        spans: each has a query at least.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> Spans:
        """Sequences of so many tokens, one after the other, each of which sees itself."""
        ends = [0, *itertools.accumulate(lengths)]
        runs = [Run(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]
        return cls(tuple(Span(run, (run,)) for run in runs))

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @property
    def num_queries(self) -> int:
        """Tokens of the row."""
        return self.spans[-1].queries.end if self.spans else 0

    @functools.cached_property
    def are_whole(self) -> bool:
        """Whether each span sees itself alone."""
        return all(span.keys == (span.queries,) for span in self.spans)

    @functools.cached_property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As compiled kernels take them, on the CPU: int32 [n, 4] of each span its first query, its queries, its first
        run and its runs; int32 [m, 2] of each run its first token and its tokens.
        """
        runs = [(run.begin, run.size) for span in self.spans for run in span.keys]
        ends = itertools.accumulate(len(span.keys) for span in self.spans)
        spans = [
            (span.queries.begin, span.queries.size, end - len(span.keys), len(span.keys))
            for span, end in zip(self.spans, ends, strict=True)
        ]
        return torch.tensor(spans, dtype=torch.int32).view(-1, 4), torch.tensor(runs, dtype=torch.int32).view(-1, 2)

    def key_index(self) -> torch.Tensor:
        """The keys that each span sees, span after span: int64 [k], places in the row."""
        runs = [torch.arange(run.begin, run.end) for span in self.spans for run in span.keys]
        return torch.cat([torch.empty(0, dtype=torch.int64), *runs])


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rank's part of a row has to know of the other parts, where several ranks compute one row.

    Attributes:
        keys: int64, of each token of the whole row, and then of what fills the parts, its place among the tokens of all
            parts, one part after the other: runs of keys are runs of these.
        outputs: int64 [k], of each wanted output its place among those of all parts.
        most_outputs: wanted outputs of a part, filled up to the largest number.
    """

    keys: torch.Tensor
    outputs: torch.Tensor
    most_outputs: int


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """What attention has to know about a packed row of t tokens, for Transformer Engine and for our own layers.

    ``cu_seqlens_q`` and ``max_seqlen_q`` are of the spans' queries, ``cu_seqlens_kv`` and ``max_seqlen_kv`` of the keys
    that they see, span after span.

    Attributes:
        spans: what each token sees.
        positions: int64 [t], each token's place in its sequence.
        key_index: int64 [k], those keys' places in the row; None: they are the row.
        context: of a part of a row, what the other parts are; None: this rank computes whole rows.
        outputs: int64 [k], the only positions that the model's last layer computes after its attention; None: all.
        rotary: cosines and sines of the row's positions [t, r], stored by the first layer for the others.
        local_rotary: the same of layers with frequencies of their own.
        experts: a `routes.RowExperts`, of a model with experts.
    """

    spans: Spans = Spans()
    positions: torch.Tensor | None = None
    key_index: torch.Tensor | None = None
    context: Context | None = None
    outputs: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    local_rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    experts: Any = None

    @classmethod
    def of(cls, spans: Spans, positions: torch.Tensor, context: Context | None = None) -> PackedSequences:
        """A row of ``spans`` with the tokens' ``positions``, or a part of it in a ``context``, on the CPU."""
        queries, keys = [span.queries.size for span in spans], [span.num_keys for span in spans]
        boundaries = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries[0],
            cu_seqlens_kv=boundaries[1],
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            spans=spans,
            positions=positions,
            key_index=None if spans.are_whole and context is None else spans.key_index(),
            context=context,
        )

    def rotate_by(
        self, angles: torch.Tensor | None, dtype: torch.dtype, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``rotary`` in ``dtype``, computed if no layer has yet; None for a layer without rotation.

        Args:
            angles: of all positions [s, 1, 1, r]; None: no rotation.
            factor: of cosines and sines.
        """
        if angles is None:
            return None
        if self.rotary is None:
            angles = angles[self.positions, 0, 0].float()
            self.rotary = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return self.rotary

    def rotate_locally(self, frequencies: Sequence[float], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``local_rotary`` in ``dtype``, by radians per position of each pair of channels."""
        if self.local_rotary is None:
            assert self.positions is not None
            angles = rotary_angles(self.positions, frequencies)
            self.local_rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        return self.local_rotary


def rotary_angles(positions: torch.Tensor, frequencies: Sequence[float]) -> torch.Tensor:
    """Angles of a rotary embedding, fp32 [t, 2 * frequencies]: channel i and its partner have the same."""
    radians = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    return torch.outer(positions.float(), radians).repeat(1, 2)


def taken(x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The rows of ``x`` [t, ...] in some runs, one after the other."""
    parts = [x[run.begin : run.end] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x.index_select(0, index)`` for an index (int64 [k]) that has rows several times. Differentiable.

    Gradients of a row are added in fp32 and, on any device, in the same order each time.
    """
    rows: torch.Tensor = _Gathered.apply(x, index)
    return rows


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.size, *grad.shape[1:], dtype=dtype)
        if grad.is_cuda:  # index_add_ adds in any order there, and this sorts
            total.index_put_((index,), grad.to(dtype), accumulate=True)
        else:
            total.index_add_(0, index, grad.to(dtype))
        return total.to(grad.dtype), None
