"""Which sequences are computed together: shares of data-parallel ranks, micro batches, packed rows.

A model computes a micro batch as one row of tokens, sequence after sequence, without padding; attention stays inside
each sequence. What several sequences begin with, such as the prompt of a group, is there once. A sequence is computed
up to its last position whose output is wanted, no further.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from nemo_style_aligner.trainer.models.sharing import Beginnings, Costs
from nemo_style_aligner.trainer.models.spans import PackedSequences, Run, Span, Spans


@dataclasses.dataclass(frozen=True)
class MicroBatching:
    """How many sequences go through the model at a time.

    Attributes:
        num_rows: rows per micro batch, where there is no token budget.
        max_tokens: token budget of a micro batch; a longer sequence gets one to itself. None: ``num_rows`` applies.
        group: rows that stay together (2 for pairs that are compared).
        shares_prompts: what rows begin with is computed once.
    """

    num_rows: int
    max_tokens: int | None = None
    group: int = 1
    shares_prompts: bool = True


@dataclasses.dataclass(frozen=True)
class Sequences:
    """What is asked of a model about some sequences, whether they come from a padded batch or not. On the CPU.

    Attributes:
        tokens: of each sequence, integers; padding may follow.
        wanted: of each sequence, bool [u]: u of its tokens go through the model, and where True, the output is wanted.
            The last of them is True; where nothing is wanted, u is 0.
        candidates: integers [sequences, w, c]: at each position, tokens of which something is asked, too; None: nothing
            is.
        beginnings: which of them share what they begin with; None: none does.
        routes: of each sequence, uint8 [tokens, bytes], see `routes`; None: none are known.
    """

    tokens: Sequence[torch.Tensor]
    wanted: Sequence[torch.Tensor]
    candidates: torch.Tensor | None = None
    beginnings: Beginnings | None = None
    routes: Sequence[torch.Tensor] | None = None

    @classmethod
    def padded(cls, tokens: torch.Tensor, wanted: torch.Tensor, candidates: torch.Tensor | None = None) -> Sequences:
        """The rows of ``tokens`` [n, s]; ``wanted`` bool [n, w], w up to s. Both are moved to the CPU.

        ``candidates``: integers [n, w, c].
        """
        wanted = wanted.cpu()
        rows = [row[:length] for row, length in zip(wanted, used_lengths(wanted), strict=True)]
        return cls(list(tokens.cpu()), rows, None if candidates is None else candidates.cpu())

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Sequence[int]) -> Sequences:
        """Some of the sequences."""
        candidates = None if self.candidates is None else self.candidates[torch.tensor(index, dtype=torch.int64)]
        beginnings = None if self.beginnings is None else self.beginnings.rows(index)
        routes = None if self.routes is None else [self.routes[i] for i in index]
        tokens, wanted = [self.tokens[i] for i in index], [self.wanted[i] for i in index]
        return Sequences(tokens, wanted, candidates, beginnings, routes)

    def sharing(self, prompt_lengths: Sequence[int] | None) -> Sequences:
        """The same, where a prompt of several sequences is computed once; None: what they are found to begin with."""
        used = [row[:length] for row, length in zip(self.tokens, self.used, strict=True)]
        if prompt_lengths is None:
            return dataclasses.replace(self, beginnings=Beginnings.found_in(used))
        prompts = [min(sizes) for sizes in zip(prompt_lengths, self.used, strict=True)]
        return dataclasses.replace(self, beginnings=Beginnings.of_prompts(used, prompts))

    def prompt_lengths(self) -> list[int]:
        """Tokens of each sequence up to the first wanted output, whose own token is the last of them."""
        return [1 + int(row.long().argmax()) if len(row) else 0 for row in self.wanted]

    @functools.cached_property
    def used(self) -> list[int]:
        """How many tokens of each sequence its wanted outputs depend on."""
        return [len(row) for row in self.wanted]

    @functools.cached_property
    def num_outputs(self) -> list[int]:
        """How many outputs of each sequence are wanted."""
        return [int(row.count_nonzero()) for row in self.wanted]

    def costs(self, of: Callable[[int, int], int] = lambda tokens, outputs: tokens) -> Costs:
        """What the sequences cost; ``of``: as many tokens with as many outputs, by default the tokens themselves."""
        whole = [of(*row) for row in zip(self.used, self.num_outputs, strict=True)]
        if self.beginnings is None:
            return Costs.apart(whole)
        return Costs(whole, [of(size, 0) for size in self.beginnings.sizes], self.beginnings.families)

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.costs().of(range(len(self)))

    def targets(self) -> torch.Tensor:
        """The tokens that follow the wanted positions: int64 [k]."""
        following = [row[1 : length + 1] for row, length in zip(self.tokens, self.used, strict=True)]
        return _joined(following, torch.int64)[self.all_wanted()]

    def wanted_candidates(self) -> torch.Tensor | None:
        """The candidates at the wanted positions: int64 [k, c]; None if nothing is asked of any."""
        if self.candidates is None:
            return None
        rows = zip(self.candidates, self.wanted, strict=True)
        chosen = [row[: len(wanted)][wanted] for row, wanted in rows]
        return torch.cat([self.candidates.new_empty(0, self.candidates.shape[-1]), *chosen]).long()

    def all_wanted(self) -> torch.Tensor:
        """``wanted``, sequence after sequence: bool [t]."""
        return _joined(self.wanted, torch.bool)


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *(part.to(dtype) for part in parts)])


@dataclasses.dataclass
class PackedRow:
    """A micro batch of sequences as one row of t tokens.

    Attributes:
        tokens: int64 [1, t].
        sequences: where each sequence begins and ends.
        outputs: int64 [k], places in the row whose outputs are wanted, of one sequence after the other. A place that
            several sequences share may be there several times.
        routes: uint8 [t, bytes]; None: they are not known.
        are_known: bool [t], tokens whose routes these are: all but what fills up the row.
        repeats: int64 [k], the places of these among the outputs of the model's last layer, if it computes only these
            and each once (`PackedSequences.outputs`); None: they are these.
    """

    tokens: torch.Tensor
    sequences: PackedSequences
    outputs: torch.Tensor
    repeats: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    are_known: torch.Tensor | None = None

    def compute_outputs_alone(self) -> None:
        """Let the model's last layer compute nothing but the wanted outputs, each once."""
        places, repeats = self.outputs.unique(return_inverse=True)
        is_each_once = len(places) == len(self.outputs)
        self.sequences.outputs, self.repeats = (self.outputs, None) if is_each_once else (places, repeats)

    @property
    def chosen(self) -> torch.Tensor | None:
        """The wanted ones' places among the outputs of the last layer: int64 [k]; None: they are all of them."""
        return self.outputs if self.sequences.outputs is None else self.repeats


@dataclasses.dataclass
class Padding:
    """The way from the outputs that are wanted of a packed row to those of a padded batch.

    Attributes:
        places: int64 [k], the outputs' places in the b * w padded ones.
        shape: (b, w).
    """

    places: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, sequences: Sequences, width: int) -> Padding:
        """For outputs of ``sequences`` in rows of ``width``."""
        places = [row.nonzero()[:, 0] + width * i for i, row in enumerate(sequences.wanted)]
        return cls(_joined(places, torch.int64), (len(sequences), width))

    def pad(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [k, ...] -> [b, w, ...], zero where nothing is wanted. Differentiable."""
        b, w = self.shape
        padded = outputs.new_zeros(b * w, *outputs.shape[1:]).index_copy(0, self.places, outputs)
        return padded.view(b, w, *outputs.shape[1:])


def used_lengths(wanted: torch.Tensor) -> list[int]:
    """How many tokens of each sequence its wanted outputs depend on; ``wanted`` bool [n, w], on the CPU."""
    positions = torch.arange(1, wanted.shape[1] + 1)
    return (wanted * positions).amax(1).tolist() if wanted.numel() else [0] * wanted.shape[0]


def pack_row(asked: Sequences, multiple: int) -> PackedRow:
    """Pack the sequences of a micro batch.

    Args:
        multiple: the row is filled up with zeros to a multiple of it (sequence parallelism), and to one token at least.
    """
    row = _Row()
    places: dict[int, torch.Tensor] = {}  # of each sequence's tokens
    for members in (asked.beginnings or Beginnings.apart(len(asked))).members():
        rows = [asked.tokens[member][: asked.used[member]] for member in members]
        size = asked.beginnings.sizes[members[0]] if asked.beginnings is not None and len(members) > 1 else 0
        head = row.add(rows[0][:size], 0)
        for member, tokens in zip(members, rows, strict=True):
            own = row.add(tokens[size:], size, *([head] if size else []))
            places[member] = torch.cat([torch.arange(*head), torch.arange(*own)])
    # The filling is a sequence of its own, which no other token sees.
    filling = -row.end % multiple if row.end else multiple
    row.add(torch.zeros(filling), 0)
    outputs = _joined([places[i][wanted] for i, wanted in enumerate(asked.wanted)], torch.int64)
    sequences = PackedSequences.of(Spans(tuple(row.spans)), torch.cat(row.positions))
    packed = PackedRow(_joined(row.tokens, torch.int64)[None], sequences, outputs)
    if asked.routes:
        packed.routes = asked.routes[0].new_zeros(row.end, asked.routes[0].shape[1])
        packed.are_known = torch.zeros(row.end, dtype=torch.bool)
        for member in reversed(range(len(asked))):  # of what several share, those of the first
            packed.routes[places[member]] = asked.routes[member][: asked.used[member]]
            packed.are_known[places[member]] = True
    return packed


class _Row:
    """A packed row while it is made."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.spans: list[Span] = []
        self.end = 0

    def add(self, tokens: torch.Tensor, position: int, *seen: Run) -> Run:
        """Add tokens from a ``position`` of their sequence on, which see themselves behind runs of earlier ones."""
        own = Run(self.end, self.end + len(tokens))
        if len(tokens):
            self.tokens.append(tokens)
            self.positions.append(torch.arange(position, position + len(tokens)))
            self.spans.append(Span(own, (*seen, own)))
            self.end = own.end
        return own


# ---- who computes what --------------------------------------------------------------------------


_EVEN = 1.005
"""Largest sum over mean that is even enough: exchanges end there."""


def divide_evenly(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide items over parts so that the largest of the parts' sums of weights is small.

    By Karmarkar and Karp's largest differencing. It leaves parts of few items apart, where exchanges bring them closer.
    Depends on nothing but its arguments. Returns each part's items, in order; parts may be empty.
    """
    parts = _largest_differencing(weights, num_parts)
    _exchange(weights, parts)
    return [sorted(part) for part in parts]


def _largest_differencing(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    # A state is (sums, largest first; their items). The two states whose sums differ most are merged, the large sums of
    # one with the small sums of the other, so that their differences cancel.
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts - 1)]
    heap = [(-weight, index, [(weight, [index]), *empty]) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(num_parts)]
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, other_tie, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(tie, other_tie), merged))
    return [items for _, items in heap[0][2]]


def _exchange(weights: Sequence[int], parts: list[list[int]]) -> None:
    """Give items of the part with the largest sum to others, against smaller ones or none, while its sum falls."""
    weight = [*weights, 0]  # of no item: index -1
    sums = [sum(weight[item] for item in part) for part in parts]
    even = _EVEN * sum(sums) / len(sums)
    for _ in range(2 * len(parts)):  # the first few change most
        most = max(range(len(parts)), key=sums.__getitem__)
        if sums[most] <= even:
            return
        options = (
            (max(sums[most] - less, sums[other] + less), other, item, back)
            for other, part in enumerate(parts)
            for item in parts[most]
            for back in (-1, *part)
            if 0 < (less := weight[item] - weight[back]) < sums[most] - sums[other]
        )
        if (best := min(options, default=None)) is None:
            return
        _, other, item, back = best
        for giver, taker, given in ((most, other, item), (other, most, back)):
            if given >= 0:
                parts[giver].remove(given)
                parts[taker].append(given)
                sums[giver] -= weight[given]
                sums[taker] += weight[given]


def shares(work: Costs, num_ranks: int, group: int = 1) -> list[list[int]]:
    """Divide rows over the data-parallel ranks, with about as much work for each. Rows without work are left out.

    Rows that begin alike stay together, or in as few pieces as the ranks' work can be made even with.

    Args:
        work: in any unit.
        group: rows that stay together.

    Raises:
        ValueError: the rows cannot be divided into such groups.
    """
    units = work.units(group)
    even = _EVEN * sum(work.of(_together(unit)) for unit in units) / num_ranks
    found: list[tuple[int, list[list[int]]]] = []
    for limit in (math.inf, even, even / 2, even / 4, even / 8, 0):
        pieces = [piece for unit in units for piece in work.cut(unit, limit)]
        parts = divide_evenly([work.of(piece) for piece in pieces], num_ranks)
        rows = [[row for i in part for row in pieces[i]] for part in parts]
        found.append((max(map(work.of, rows)), rows))
        if found[-1][0] <= even or all(len(unit) == 1 for unit in units):
            break
    return min(found, key=lambda each: each[0])[1]


def micro_batches(used: Costs, batching: MicroBatching) -> list[list[int]]:
    """Divide rows, which cost tokens, into micro batches; at least one, which may be empty. Rows of 0 are left out.

    Under a token budget by first fit, longest first; otherwise in their order. Rows that begin alike stay together as
    far as they fit.
    """
    units, group = used.units(batching.group), batching.group
    bins: list[list[int]] = []
    room: list[int] = []
    if batching.max_tokens is None:
        limit = max(1, batching.num_rows // group) * group
        sizes = [(len(piece), piece) for unit in units for piece in _chunks(_together(unit), limit)]
    else:
        limit = batching.max_tokens
        sizes = [(used.of(piece), piece) for unit in units for piece in used.cut(unit, limit)]
        sizes.sort(key=lambda each: (-each[0], each[1]))
    for size, piece in sizes:
        first = 0 if batching.max_tokens is not None else max(0, len(bins) - 1)
        place = next((b for b in range(first, len(bins)) if room[b] >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(limit)
        bins[place] += piece
        room[place] -= size
    return [sorted(part) for part in bins] or [[]]


def _together(unit: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain(*unit))


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
