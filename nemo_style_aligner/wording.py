"""Wording that the messages of several modules share."""

from __future__ import annotations

from collections.abc import Sequence


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """The first of ``names``, and how many more there are, so that a message stays readable."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
