"""Dialogues as the lines that the scripts beside this file write: plain text, or what a chat template makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_style_aligner.engine.text.tokenizer import Message, Tokenizer


class DialogueStyle:
    """How dialogues become text: by a tokenizer's chat template; without one, as ``User: ...`` and ``Assistant: ...``.

    Dialogues are given as the texts of the user and the assistant by turns, of which the last is the user's.
    """

    def __init__(self, tokenizer: Tokenizer | None, separator: str) -> None:
        """``separator``: between turns of plain text."""
        self._tokenizer, self._separator = tokenizer, separator

    def prompt(self, turns: Sequence[str]) -> str:
        """The prompt that asks for the next answer."""
        if self._tokenizer is not None:
            return self._tokenizer.apply_chat_template(_messages(turns))
        return self._separator.join(
            [*(f"{('User', 'Assistant')[i % 2]}: {t}" for i, t in enumerate(turns)), "Assistant:"]
        )

    def text(self, turns: Sequence[str], answer: str) -> str:
        """The prompt with this answer, up to the token that ends it, if the style has one."""
        if self._tokenizer is None:
            return f"{self.prompt(turns)} {answer}"
        # Without the template's line break after the end token, which responses in PPO do not have.
        return self._tokenizer.apply_chat_template(_messages([*turns, answer]), False).rstrip("\n")

    def demonstration(self, turns: Sequence[str], answer: str) -> dict[str, Any]:
        """A line to fine-tune on, in which ``answer`` alone is learnt."""
        if self._tokenizer is None:
            return {"input": self.prompt(turns), "output": answer}
        context = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in _messages(turns)]
        return {"messages": [*context, {"role": "assistant", "content": answer}]}


def _messages(turns: Sequence[str]) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
