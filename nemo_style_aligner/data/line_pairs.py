"""Whether lines look like pairs of responses to the same prompt: comparisons should, and prompts should not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.wording import common_start

logger = logging.getLogger(__name__)

_FEWEST_PAIRS = 8  # with fewer, the result would be left to chance


def count_strangers(texts: Sequence[str]) -> Counter[str]:
    """How many pairs do not look like pairs, the good text before the bad one, for `warn_of_strangers`.

    Both texts of a pair begin with its prompt. Since all texts may begin alike, the common start of a pair's texts is
    compared with that of its first text and one of another pair. For texts that are not pairs, it is no longer in about
    half of the comparisons.
    """
    return _count(texts, lambda good, bad, other: _start(good, bad) <= _start(good, other))


def warn_of_strangers(counts: Counter[str], paths: Sequence[str | Path]) -> None:
    """Warn if few texts look like pairs: it is a file of prompts, or a line is missing."""
    pairs, strangers = counts["pairs looked at"], counts["that are so"]
    if strangers > pairs / 4:
        warn_for_all_ranks(
            logger,
            "%s: in %d of %d pairs, the two texts share no longer a prefix than texts of different pairs do. Both "
            "should begin with the same prompt, the good response on one line and the bad one on the next: are these "
            "comparisons, and is no line missing?",
            ", ".join(map(str, paths)),
            strangers,
            pairs,
        )


def count_pairs(texts: Sequence[str]) -> Counter[str]:
    """How many pairs of lines look like comparisons: the two texts begin alike, and end differently."""
    return _count(
        texts, lambda good, bad, other: max(_start(good, other), 1) < _start(good, bad) < min(len(good), len(bad))
    )


def warn_of_pairs(counts: Counter[str], paths: Sequence[str | Path]) -> None:
    """Warn if prompts look like comparisons."""
    pairs, alike = counts["pairs looked at"], counts["that are so"]
    if alike > 0.9 * pairs:
        warn_for_all_ranks(
            logger,
            "%s: in %d of %d pairs of lines, the second text begins as the first and ends otherwise, as in "
            "comparisons: a prompt ends where its response begins. Are these prompts?",
            ", ".join(map(str, paths)),
            alike,
            pairs,
        )


def _count(texts: Sequence[str], is_so: Callable[[str, str, str], bool]) -> Counter[str]:
    """``is_so`` is given a pair's two texts, and one of another pair."""
    pairs = len(texts) // 2
    if pairs < _FEWEST_PAIRS:
        return Counter()
    others = [2 * ((pair + pairs // 2) % pairs) for pair in range(pairs)]
    found = [is_so(texts[2 * n], texts[2 * n + 1], texts[m]) for n, m in enumerate(others)]
    return Counter({"pairs looked at": len(found), "that are so": sum(found)})


def _start(one: str, other: str) -> int:
    return len(common_start(one, other))
