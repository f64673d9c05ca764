"""The reward of `grpo_step.py`, as each side calls it: the share of vowels in a response.

Imports nothing of this project: TRL may live in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def reward(prompt: str, response: str, line: dict[str, Any]) -> float:
    """For our actor job (`trainer.ppo.rewards`)."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))


def rewards(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """For TRL's trainer."""
    return [reward(*pair, {}) for pair in zip(prompts, completions, strict=True)]
