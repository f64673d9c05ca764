"""Pages of KV memory: which of them hold which positions of which sequence, and which prefixes are in memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS

_NO_PREFIX = 0

_PrefixKey = tuple[int, tuple[int, ...]]
"""Number of the prefix before a page (`_NO_PREFIX`: none), and the page's own tokens: compared exactly."""


class BlockTable:
    """Allocates pages to slots and shares full pages of equal prefixes.

    A page is *free*, *owned* by one or more slots, or *idle*: without an owner, but its content is known and kept
    until the memory is needed. Pages that several slots own are full, so nobody writes to them.

    Attributes:
        table: int32 [num_slots, pages_per_sequence]: page of each 16 positions of a slot. Unused entries, and those of
            pages given back, repeat the slot's first page, so that a step which reads and masks them sees no other
            sequence's numbers.
        keeps_idle: idle pages will be asked for: they are evicted only where no page is free.
    """

    def __init__(self, num_slots: int, pages_per_sequence: int, num_pages: int) -> None:
        self.num_pages = num_pages
        self.keeps_idle = False
        self.table = np.zeros((num_slots, pages_per_sequence), dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Take all pages from all slots and forget all content."""
        self.table.fill(0)
        # A heap: low pages first, so the memory touched grows with the tokens held.
        self._free = list(range(self.num_pages))
        self._owners = [0] * self.num_pages
        self._held = [0] * len(self.table)  # pages of each slot, with those given back
        self._given_back = [0] * len(self.table)  # of these, from the first on
        self._pages: dict[_PrefixKey, int] = {}  # the last page of each known prefix
        self._prefixes: dict[int, tuple[int, _PrefixKey]] = {}  # page -> number and key of the prefix it ends
        self._idle: dict[int, None] = {}  # least recently used first; later pages of a prefix before earlier ones
        self._next_prefix = _NO_PREFIX + 1  # numbers are never used twice
        self._touched = 0  # pages from this number on were never taken
        self._most_in_use = 0

    @property
    def available(self) -> int:
        """Number of pages that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Number of pages that have an owner."""
        return self.num_pages - self.available

    def held(self, slot: int) -> int:
        """Number of pages that the positions of ``slot`` have, or had."""
        return self._held[slot]

    def enter(self, slot: int, token_ids: Sequence[int], watermark: int, most_shared: int | None = None) -> int | None:
        """Give the empty ``slot`` pages for ``token_ids``, shared ones as far as possible.

        The full pages that this slot has yet to fill count as holding these tokens from now on: a later `enter` may
        share them, and that sequence's tokens must then be computed in the same pass as this one's or a later one.

        Returns:
            The number of leading tokens in shared pages, at most all but one (the last token's logits are wanted),
            and at most ``most_shared``.
            None, with nothing changed, if fewer than ``watermark`` pages would be left available.
        """
        chunks = [
            tuple(token_ids[start : start + PAGE_TOKENS])
            for start in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS)
        ]
        most = len(token_ids) - 1 if most_shared is None else min(len(token_ids) - 1, most_shared)
        shared, prefix = self._match(chunks[: most // PAGE_TOKENS])
        total = -(-len(token_ids) // PAGE_TOKENS)
        revived = sum(not self._owners[page] for page in shared)
        if self.available - revived - (total - len(shared)) < watermark:
            return None
        for page in shared:
            self._idle.pop(page, None)
        pages = shared + [self._take() for _ in range(total - len(shared))]
        for page in pages:
            self._owners[page] += 1
        for chunk, page in zip(chunks[len(shared) :], pages[len(shared) :], strict=False):  # the last may not be full
            prefix = self._learn((prefix, chunk), page)
        self._held[slot] = total
        self.table[slot] = pages[0]
        self.table[slot, :total] = pages
        return len(shared) * PAGE_TOKENS

    def grow(self, slot: int) -> bool:
        """Give ``slot`` one more page; False if there is none."""
        if not self.available:
            return False
        page = self._take()
        self._owners[page] = 1
        self.table[slot, self._held[slot]] = page
        self._held[slot] += 1
        return True

    def give_back(self, slot: int, position: int) -> None:
        """Take from ``slot`` the pages of which it reads nothing any more: all that end before ``position``.

        All of their positions have been computed.
        """
        first, last = self._given_back[slot], min(position // PAGE_TOKENS, self._held[slot] - 1)
        if last <= first:
            return
        for page in self.table[slot, first:last].tolist():
            self._disown(page, is_computed=True)
        self.table[slot, :last] = self.table[slot, self._held[slot] :] = self.table[slot, last]
        self._given_back[slot] = last

    def release(self, slot: int, token_ids: Sequence[int]) -> None:
        """Take all pages from ``slot``, whose first positions hold these tokens, for longer prompts."""
        prefix, computed, first = _NO_PREFIX, len(token_ids), self._given_back[slot]
        for index in range(computed // PAGE_TOKENS if first == 0 else 0):  # else what comes before is not known
            chunk = tuple(token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
            prefix = self._learn((prefix, chunk), int(self.table[slot, index]))
        for index in reversed(range(first, self._held[slot])):  # so that eviction takes a prefix from its end
            self._disown(int(self.table[slot, index]), (index + 1) * PAGE_TOKENS <= computed)
        self._held[slot] = self._given_back[slot] = 0

    def _disown(self, page: int, is_computed: bool) -> None:
        """Take an owner from ``page``. Without another it is idle, if it ends a prefix that is computed, else free."""
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._prefixes and is_computed:
            self._idle[page] = None
        else:
            self._forget(page)
            heapq.heappush(self._free, page)

    def _match(self, chunks: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
        """Pages of the longest known prefix of ``chunks``, and that prefix's number."""
        pages: list[int] = []
        prefix = _NO_PREFIX
        for chunk in chunks:
            page = self._pages.get((prefix, chunk))
            if page is None:
                break
            pages.append(page)
            prefix = self._prefixes[page][0]
        return pages, prefix

    def _learn(self, key: _PrefixKey, page: int) -> int:
        """Register ``page`` under ``key``, unless another page holds the same; returns the prefix's number."""
        known = self._pages.get(key)
        if known is not None:
            return self._prefixes[known][0]
        number, self._next_prefix = self._next_prefix, self._next_prefix + 1
        self._pages[key] = page
        self._prefixes[page] = (number, key)
        return number

    def _forget(self, page: int) -> None:
        if page in self._prefixes:
            _, key = self._prefixes.pop(page)
            del self._pages[key]

    def _take(self) -> int:
        """A page without owner or content; there must be one.

        Unless idle ones are kept, pages that were never touched are taken only while no more pages are idle than ever
        had an owner at once; beyond that an idle page is evicted. Otherwise new prompts would touch all memory before
        any is evicted.
        """
        self._most_in_use = max(self._most_in_use, self.in_use)
        may_touch = self.keeps_idle or len(self._idle) <= self._most_in_use
        if self._free and (self._free[0] < self._touched or may_touch):
            page = heapq.heappop(self._free)
            self._touched = max(self._touched, page + 1)
            return page
        page = next(iter(self._idle))
        del self._idle[page]
        self._forget(page)
        return page
