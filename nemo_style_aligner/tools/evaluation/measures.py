"""Numbers of an evaluation with their 95% intervals: shares, means, pass@k, win rates. Pure.

The unit is a prompt (a pair, a text): several responses to one prompt are no independent trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_Z = 1.959963984540054  # of a normal distribution, 97.5% are below
_RESAMPLES = 2000


class Measure(NamedTuple):
    """A value with its 95% interval; without one, where a single unit tells nothing of the spread."""

    value: float
    low: float | None = None
    high: float | None = None


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that one of k responses is right, from n >= k of which c are: 1 - C(n-c, k) / C(n, k), unbiased.

    Equation 1 of arXiv:2107.03374.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The share of all pairs of our response and theirs, to one prompt, in which ours is better; a tie counts half."""
    return float(np.mean(np.sign(np.subtract.outer(ours, theirs)) / 2 + 0.5))


def share(values: Sequence[float]) -> Measure:
    """The mean of numbers in [0, 1], with Wilson's score interval, which stays honest where all are 0 or 1.

    Where some are between, as pass@k of a prompt, it is too wide: their variance is less than p (1 - p).
    """
    n, p = len(values), float(np.mean(values))
    center, spread = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + (_Z / (2 * n)) ** 2)
    return Measure(p, *(min(1.0, max(0.0, bound / (1 + _Z**2 / n))) for bound in (center - spread, center + spread)))


def mean(values: ArrayLike, weights: ArrayLike | None = None) -> Measure:
    """sum(values) / sum(weights), by default the mean, with the percentile interval of a bootstrap over units."""
    above = np.asarray(values, np.float64)
    below = np.ones_like(above) if weights is None else np.asarray(weights, np.float64)
    value = float(above.sum() / below.sum())
    if len(above) < 2:
        return Measure(value)
    rng = np.random.default_rng(0)
    chosen = (rng.integers(len(above), size=len(above)) for _ in range(_RESAMPLES))
    low, high = np.percentile([above[rows].sum() / below[rows].sum() for rows in chosen], [2.5, 97.5])
    return Measure(value, float(low), float(high))


def exponential(measure: Measure) -> Measure:
    """e to the power of a measure and of its bounds."""
    return Measure(*(None if x is None else math.exp(min(x, 700.0)) for x in measure))  # type: ignore[arg-type]


def as_json(measures: Mapping[str, Measure | int]) -> dict[str, Any]:
    """``summary``: values by name; ``intervals``: of those that have one."""
    known = {name: measure for name, measure in measures.items() if isinstance(measure, Measure)}
    return {
        "summary": {name: known[name].value if name in known else count for name, count in measures.items()},
        "intervals": {name: [low, high] for name, (_, low, high) in known.items() if low is not None},
    }
