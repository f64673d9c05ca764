"""Whether lines look like pairs of responses to the same prompt: comparisons should, and prompts should not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.wording import common_start

logger = logging.getLogger(__name__)

_PAIRS_LOOKED_AT = 1000  # at most, spread over the files: quick
_FEWEST_PAIRS_LOOKED_AT = 8  # with fewer, the result would be left to chance


def warn_of_strangers(texts: Sequence[str], paths: Sequence[str | Path]) -> None:
    """Warn if texts do not look like pairs, the good one before the bad one: a file of prompts, or a line is missing.

    Both texts of a pair begin with its prompt. Since all texts may begin alike, the common start of a pair's texts is
    compared with that of its first text and one of another pair. For texts that are not pairs, it is no longer in about
    half of the comparisons.
    """
    pairs, strangers = _look_at_pairs(texts, lambda good, bad, other: _start(good, bad) <= _start(good, other))
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


def warn_of_pairs(texts: Sequence[str], paths: Sequence[str | Path]) -> None:
    """Warn if prompts look like comparisons: the two texts of each pair of lines begin alike, and end differently."""
    pairs, alike = _look_at_pairs(
        texts, lambda good, bad, other: max(_start(good, other), 1) < _start(good, bad) < min(len(good), len(bad))
    )
    if alike > 0.9 * pairs:
        warn_for_all_ranks(
            logger,
            "%s: in %d of %d pairs of lines, the second text begins as the first and ends otherwise, as in "
            "comparisons: a prompt ends where its response begins. Are these prompts?",
            ", ".join(map(str, paths)),
            alike,
            pairs,
        )


def _look_at_pairs(texts: Sequence[str], is_so: Callable[[str, str, str], bool]) -> tuple[int, int]:
    """How many pairs of lines were looked at, and of how many it is so; none where there are too few to tell.

    ``is_so`` is given a pair's two texts, and one of another pair.
    """
    pairs = len(texts) // 2
    if pairs < _FEWEST_PAIRS_LOOKED_AT:
        return 0, 0
    looked_at = range(0, pairs, -(-pairs // _PAIRS_LOOKED_AT))
    others = [2 * ((pair + pairs // 2) % pairs) for pair in looked_at]
    found = [is_so(texts[2 * n], texts[2 * n + 1], texts[m]) for n, m in zip(looked_at, others, strict=True)]
    return len(found), sum(found)


def _start(one: str, other: str) -> int:
    return len(common_start(one, other))
