"""How many attacks there were, by kind, said at the end of `pytest tests/attack`."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable

import pytest

ROUNDS = int(os.environ.get("ATTACK_ROUNDS", "1"))
"""How many times as much is tried as in the test suite; `make attack` sets it."""


_PROPERTY = "attack"


@pytest.fixture
def attack_count(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``attack_count("hostile files", tried=1200, refused=1200)``: what a test tried. The rest did no harm.

    May be called several times, also by one test. Counts of the same kind are added up.
    """

    def count(kind: str, *, tried: int, refused: int) -> None:
        assert 0 <= refused <= tried > 0, "nothing was tried, or more was refused"
        request.node.user_properties.append((_PROPERTY, [kind, tried, refused]))  # which xdist's workers send as well

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The counts, and how the tests that ran with them ended."""
    tried: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    stats = terminalreporter.stats
    calls = [report for kind in ("passed", "failed") for report in stats.get(kind, ()) if report.when == "call"]
    for report in calls:
        for kind, number, rejections in (content for name, content in report.user_properties if name == _PROPERTY):
            tried[kind] += number
            refused[kind] += rejections
    if not tried:
        return
    terminalreporter.section("attacks")
    for kind in sorted(tried):
        harmless = tried[kind] - refused[kind]
        terminalreporter.line(f"{kind:40} {tried[kind]:>9,} tried {refused[kind]:>9,} refused {harmless:>9,} harmless")
    ends = {end: len(stats.get(end, ())) for end in ("passed", "skipped", "failed", "error")}
    total = f"{sum(tried.values()):>9,} tried {sum(refused.values()):>9,} refused"
    terminalreporter.line(f"{'in all':40} {total}; tests: {', '.join(f'{n} {end}' for end, n in ends.items())}")
