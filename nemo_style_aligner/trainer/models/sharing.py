"""Which sequences begin alike, so that a pass computes the beginning once, and what they cost together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

_LEAST = 16
"""Tokens that sequences have in common at least, where nobody says what their prompts are: as a page of the engine."""


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """What some sequences begin with.

    Attributes:
        families: of each sequence a number; those with the same begin alike.
        sizes: of each sequence, how many of its first tokens it has in common with all of its family.
    """

    families: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def apart(cls, count: int) -> Beginnings:
        """Of sequences that share nothing."""
        return cls(tuple(range(count)), (0,) * count)

    @classmethod
    def of_prompts(cls, tokens: Sequence[torch.Tensor], lengths: Sequence[int]) -> Beginnings:
        """Sequences with the same prompt, the first ``lengths`` of their ``tokens``, share it."""
        known: dict[bytes, int] = {}
        rows = zip(tokens, lengths, strict=True)
        prompts = [row[:length].to(torch.int32).numpy().tobytes() for row, length in rows]
        families = [known.setdefault(prompt, place) if prompt else place for place, prompt in enumerate(prompts)]
        return cls(tuple(families), tuple(lengths))

    @classmethod
    def found_in(cls, tokens: Sequence[torch.Tensor]) -> Beginnings:
        """Sequences are divided into families so that they share the most tokens, and 16 at least."""
        rows = [row.to(torch.int32).numpy() for row in tokens]
        order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
        common = [_common(rows[one], rows[other]) for one, other in itertools.pairwise(order)]
        families, sizes = list(range(len(rows))), [0] * len(rows)
        for begin, end in _best_cuts(common, len(rows)):
            for row in order[begin:end] if end - begin > 1 else []:
                families[row], sizes[row] = order[begin], min(common[begin : end - 1])
        return cls(tuple(families), tuple(sizes))

    def rows(self, index: Sequence[int]) -> Beginnings:
        """Those of some of the sequences."""
        return Beginnings(tuple(self.families[i] for i in index), tuple(self.sizes[i] for i in index))

    def members(self) -> list[list[int]]:
        """The sequences of each family, in their order."""
        members: dict[int, list[int]] = {}
        for row, family in enumerate(self.families):
            members.setdefault(family, []).append(row)
        return list(members.values())


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


def _best_cuts(common: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut ``count`` sequences, of which neighbours have ``common`` tokens, where parts save the most: [begin, end)."""
    saved, starts = [0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        options, least = [(saved[end - 1], end - 1)], 2**62
        for begin in range(end - 2, -1, -1):
            least = min(least, common[begin])
            if least < _LEAST:
                break
            options.append((saved[begin] + (end - begin - 1) * least, begin))
        saved[end], starts[end] = max(options)
    cuts, end = [], count
    while end:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts


@dataclasses.dataclass(frozen=True)
class Costs:
    """What rows cost (tokens, operations) by themselves and together, where what they begin with counts once.

    Attributes:
        whole: of each row.
        common: of what the row begins with, as its family does.
        families: of each row, as `Beginnings` has them.
    """

    whole: Sequence[int]
    common: Sequence[int]
    families: Sequence[int]

    @classmethod
    def apart(cls, whole: Sequence[int]) -> Costs:
        """Of rows that have nothing in common."""
        return cls(whole, [0] * len(whole), range(len(whole)))

    def of(self, rows: Sequence[int]) -> int:
        """What some rows cost together."""
        total, seen = 0, set()
        for row in rows:
            total += self.whole[row] - (self.common[row] if self.families[row] in seen else 0)
            if self.whole[row]:
                seen.add(self.families[row])
        return total

    def rows(self, index: Sequence[int]) -> Costs:
        """Of some of the rows."""
        whole, common, families = ([x[i] for i in index] for x in (self.whole, self.common, self.families))
        return Costs(whole, common, families)

    def without(self, rows: set[int]) -> Costs:
        """The same where some rows cost nothing."""
        whole, common = ([0 if i in rows else x for i, x in enumerate(costs)] for costs in (self.whole, self.common))
        return Costs(whole, common, self.families)

    def units(self, group: int) -> list[list[list[int]]]:
        """The rows that cost something, in ``group`` neighbours that stay together: those that share are one unit.

        Raises:
            ValueError: the rows cannot be divided into such groups.
        """
        count = len(self.whole)
        if count % group:
            raise ValueError(f"{count} rows cannot be divided into groups of {group}")
        every = [list(range(start, start + group)) for start in range(0, count, group)]
        present = [rows for rows in every if any(self.whole[row] for row in rows)]
        roots = list(range(len(present)))
        first: dict[int, int] = {}  # rows of each family

        def root(place: int) -> int:
            while roots[place] != place:
                place = roots[place]
            return place

        for place, rows in enumerate(present):
            for family in {self.families[row] for row in rows if self.common[row]}:
                one, other = sorted((root(place), root(first.setdefault(family, place))))
                roots[other] = one
        units: dict[int, list[list[int]]] = {}
        for place, rows in enumerate(present):
            units.setdefault(root(place), []).append(rows)
        return list(units.values())

    def cut(self, unit: Sequence[list[int]], limit: float) -> list[list[int]]:
        """A unit's rows in pieces that cost up to ``limit``, or are one group."""
        pieces: list[list[int]] = []
        for rows in unit:
            if pieces and self.of([*pieces[-1], *rows]) <= limit:
                pieces[-1] += rows
            else:
                pieces.append(list(rows))
        return pieces
