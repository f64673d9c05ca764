"""A reward of GSM8K beside right answers: the form in which they are asked for."""

from __future__ import annotations

import re


def marked(prompt: str, response: str, line: dict) -> float:
    """1 where the response ends with a line `#### NUMBER`, as the worked answers do."""
    return float(re.search(r"\n#### -?[\d,.]+\s*$", response) is not None)
