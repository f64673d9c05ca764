"""Words that messages of several parts have in common."""

from __future__ import annotations

from collections.abc import Sequence


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """The first of ``names``, and how many more there are: a message is to stay readable, whatever is wrong."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
