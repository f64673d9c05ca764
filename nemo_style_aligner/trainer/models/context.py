"""Context parallelism: a packed row over several ranks, each of which computes two pieces of every span.

One piece is early in the span and one late, so that all ranks have equal work: what is late sees more. Keys and values
are gathered over the group, and their gradients summed back; what the model says of the wanted positions is gathered,
too, so that losses and all that is above them see whole sequences and know nothing of this.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from nemo_style_aligner.trainer.models.packing import PackedRow
from nemo_style_aligner.trainer.models.spans import Context, PackedSequences, Run, Span, Spans, gathered


def part_of_row(row: PackedRow, size: int, rank: int, multiple: int) -> tuple[PackedRow, torch.Tensor]:
    """The part of a packed row that a rank of a context-parallel group computes.

    Args:
        row: whole, each span's own tokens the last run of its keys.
        size, rank: of the group, and this one's place in it.
        multiple: all ranks' parts are filled up to the same number of tokens, a multiple of it.

    Returns:
        The part, and which of the row's wanted outputs are in it: int64, places among ``row.outputs``.
    """
    spans = row.sequences.spans
    pieces = [[piece for span in spans for piece in _pieces(span, size, each)] for each in range(size)]
    counts = [sum(piece.queries.size for piece in of_rank) for of_rank in pieces]
    length = max(1, -(-max(counts) // multiple)) * multiple
    tokens = [_tokens(of_rank) for of_rank in pieces]
    # Gathered tokens lie rank after rank. Keys are seen in the row's order; what fills the parts comes behind.
    place = torch.empty(spans.num_queries, dtype=torch.int64)
    for each, own in enumerate(tokens):
        place[own] = each * length + torch.arange(len(own))
    filling = [torch.arange(each * length + count, (each + 1) * length) for each, count in enumerate(counts)]
    mine = torch.nn.functional.pad(tokens[rank], (0, length - counts[rank]))
    own_spans = _spans(pieces[rank], spans.num_queries + sum(map(len, filling[:rank])), length)
    positions = row.sequences.positions
    assert positions is not None
    outputs, own, most, wanted = _outputs(row.outputs, place, length, size, rank)
    context = Context(torch.cat([place, *filling]), outputs, most)
    sequences = PackedSequences.of(own_spans, positions[mine], context)
    part = PackedRow(row.tokens[:, mine], sequences, wanted)
    if row.routes is not None and row.are_known is not None:
        part.routes, part.are_known = row.routes[mine], row.are_known[mine]
        part.are_known[counts[rank] :] = False
    return part, own


def _pieces(span: Span, size: int, rank: int) -> list[Span]:
    """Two of a span's 2 ``size`` pieces, as they lie in the whole row; those without tokens are left out."""
    own = span.queries
    bounds = [own.begin + own.size * place // (2 * size) for place in range(2 * size + 1)]
    runs = [Run(bounds[place], bounds[place + 1]) for place in (rank, 2 * size - 1 - rank)]
    return [Span(run, (*span.keys[:-1], Run(own.begin, run.end))) for run in runs if run.size]


def _tokens(pieces: list[Span]) -> torch.Tensor:
    runs = [torch.arange(*piece.queries) for piece in pieces]
    return torch.cat([torch.empty(0, dtype=torch.int64), *runs])


def _spans(pieces: list[Span], filling: int, length: int) -> Spans:
    """The pieces as spans of a part of ``length`` tokens, and what fills it, whose keys begin at ``filling``."""
    spans, begin = [], 0
    for piece in pieces:
        spans.append(Span(Run(begin, begin + piece.queries.size), piece.keys))
        begin += piece.queries.size
    if begin < length:
        spans.append(Span(Run(begin, length), (Run(filling, filling + length - begin),)))
    return Spans(tuple(spans))


def _outputs(
    wanted: torch.Tensor, place: torch.Tensor, length: int, size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Where each wanted output is among all ranks', filled up to the most of a rank; this rank's; that most; and this
    rank's places in its part.
    """
    owners = place[wanted] // length
    of_rank = [(owners == each).nonzero()[:, 0] for each in range(size)]
    most = max(1, *map(len, of_rank))
    where = torch.empty_like(wanted)
    for each, own in enumerate(of_rank):
        where[own] = each * most + torch.arange(len(own))
    return where, of_rank[rank], most, place[wanted[of_rank[rank]]] - rank * length


def all_keys(x: torch.Tensor, context: Context) -> torch.Tensor:
    """The part's keys [t, ...] of all ranks, as the spans see them. Differentiable; collective."""
    group = parallel_state.get_context_parallel_group()
    every = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=group)
    return every.index_select(0, context.keys)


def all_outputs(x: torch.Tensor, context: Context) -> torch.Tensor:
    """The wanted outputs [k, ...] of all ranks, from this rank's own. Differentiable; collective.

    All ranks compute the same loss from them: each takes the gradients of its own.
    """
    group = parallel_state.get_context_parallel_group()
    filled = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, context.most_outputs - len(x)))
    every = gather_from_sequence_parallel_region(filled, tensor_parallel_output_grad=False, group=group)
    return gathered(every, context.outputs)
