"""Which sequences are computed together: shares of data-parallel ranks, micro batches, packed rows.

A model computes a micro batch as one row of tokens, sequence after sequence, without padding; attention stays inside
each sequence. A sequence is computed up to its last position whose output is wanted, no further.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import torch

from nemo_style_aligner.trainer.models.spans import PackedSequences, Spans


@dataclasses.dataclass(frozen=True)
class MicroBatching:
    """How many sequences go through the model at a time.

    Attributes:
        num_rows: rows per micro batch, where there is no token budget.
        max_tokens: token budget of a micro batch; a longer sequence gets one to itself. None: ``num_rows`` applies.
        group: rows that stay together (2 for pairs that are compared).
    """

    num_rows: int
    max_tokens: int | None = None
    group: int = 1


@dataclasses.dataclass(frozen=True)
class Sequences:
    """What is asked of a model about some sequences, whether they come from a padded batch or not. On the CPU.

    Attributes:
        tokens: of each sequence, integers; padding may follow.
        wanted: of each sequence, bool [u]: u of its tokens go through the model, and where True, the output is wanted.
            The last of them is True; where nothing is wanted, u is 0.
        candidates: of each sequence, integers [w, c]: at each position, tokens of which something is asked, too; None:
            nothing is.
    """

    tokens: Sequence[torch.Tensor]
    wanted: Sequence[torch.Tensor]
    candidates: Sequence[torch.Tensor] | None = None

    @classmethod
    def padded(cls, tokens: torch.Tensor, wanted: torch.Tensor, candidates: torch.Tensor | None = None) -> Sequences:
        """The rows of ``tokens`` [n, s]; ``wanted`` bool [n, w], w up to s. Both are moved to the CPU.

        ``candidates``: integers [n, w, c].
        """
        wanted = wanted.cpu()
        rows = [row[:length] for row, length in zip(wanted, used_lengths(wanted), strict=True)]
        return cls(list(tokens.cpu()), rows, None if candidates is None else list(candidates.cpu()))

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Sequence[int]) -> Sequences:
        """Some of the sequences."""
        candidates = None if self.candidates is None else [self.candidates[i] for i in index]
        return Sequences([self.tokens[i] for i in index], [self.wanted[i] for i in index], candidates)

    @functools.cached_property
    def used(self) -> list[int]:
        """How many tokens of each sequence its wanted outputs depend on."""
        return [len(row) for row in self.wanted]

    @functools.cached_property
    def num_outputs(self) -> list[int]:
        """How many outputs of each sequence are wanted."""
        return [int(row.count_nonzero()) for row in self.wanted]

    def inputs(self) -> torch.Tensor:
        """The used tokens, sequence after sequence: int64 [t]."""
        return _joined([row[:length] for row, length in zip(self.tokens, self.used, strict=True)], torch.int64)

    def targets(self) -> torch.Tensor:
        """The tokens that follow the wanted positions: int64 [k]."""
        following = [row[1 : length + 1] for row, length in zip(self.tokens, self.used, strict=True)]
        return _joined(following, torch.int64)[self.all_wanted()]

    def wanted_candidates(self) -> torch.Tensor | None:
        """The candidates at the wanted positions: int64 [k, c]; None if there are none, or no position."""
        if not self.candidates:
            return None
        rows = zip(self.candidates, self.wanted, strict=True)
        return torch.cat([row[: len(wanted)][wanted] for row, wanted in rows]).long()

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
        outputs: int64 [k], places in the row whose outputs are wanted.
    """

    tokens: torch.Tensor
    sequences: PackedSequences
    outputs: torch.Tensor


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
    num_tokens = sum(asked.used)
    filling = -num_tokens % multiple if num_tokens else multiple
    row = torch.nn.functional.pad(asked.inputs(), (0, filling))
    # The filling is a sequence of its own, which no other token sees.
    lengths = [length for length in (*asked.used, filling) if length]
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequences = PackedSequences.of(Spans.whole(lengths), positions)
    return PackedRow(tokens=row[None], sequences=sequences, outputs=asked.all_wanted().nonzero()[:, 0])


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


def shares(work: Sequence[int], num_ranks: int, group: int = 1) -> list[list[int]]:
    """Divide rows over the data-parallel ranks, with about as much work for each. Rows without work are left out.

    Args:
        work: the work of each row, in any unit.
        group: rows that stay together.
    """
    sums = _group_sums(work, group)
    present = [index for index, tokens in enumerate(sums) if tokens]
    parts = divide_evenly([sums[index] for index in present], num_ranks)
    return [[present[i] * group + row for i in part for row in range(group)] for part in parts]


def micro_batches(used: Sequence[int], batching: MicroBatching) -> list[list[int]]:
    """Divide rows of ``used`` tokens each into micro batches; at least one, which may be empty. Rows of 0 are left out.

    Under a token budget by first fit, longest first; otherwise in their order.
    """
    group = batching.group
    sums = _group_sums(used, group)
    present = [index for index, tokens in enumerate(sums) if tokens]
    bins: list[list[int]] = []
    if batching.max_tokens is None:
        per_bin = max(1, batching.num_rows // group)
        bins = [present[start : start + per_bin] for start in range(0, len(present), per_bin)]
    else:
        room: list[int] = []
        for index in sorted(present, key=lambda i: (-sums[i], i)):
            place = next((b for b, free in enumerate(room) if free >= sums[index]), None)
            if place is None:
                place = len(bins)
                bins.append([])
                room.append(batching.max_tokens)
            bins[place].append(index)
            room[place] -= sums[index]
    return [[index * group + row for index in sorted(part) for row in range(group)] for part in bins] or [[]]


def _group_sums(used: Sequence[int], group: int) -> list[int]:
    if len(used) % group:
        raise ValueError(f"{len(used)} rows cannot be divided into groups of {group}")
    return [sum(used[start : start + group]) for start in range(0, len(used), group)]
