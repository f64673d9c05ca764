"""Dialogues as the lines that the scripts in ``examples/nlp/data`` write: plain text, or what a chat template makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nemo_style_aligner.data.tokenizer import Message, Tokenizer


class DialogueStyle(Protocol):
    """How dialogues become text.

    ``turns`` are the texts of the user and the assistant by turns; the last one is the user's.
    """

    def prompt(self, turns: Sequence[str]) -> str:
        """The prompt that asks for the next answer."""
        ...

    def text(self, turns: Sequence[str], answer: str) -> str:
        """The prompt with this answer, up to the token that ends it, if the style has one."""
        ...

    def demonstration(self, turns: Sequence[str], answer: str) -> dict[str, Any]:
        """A line to fine-tune on, in which ``answer`` alone is learnt."""
        ...


class PlainStyle:
    """``User: ...``, ``Assistant: ...``, with ``separator`` between turns. See `DialogueStyle`."""

    def __init__(self, separator: str) -> None:
        self._separator = separator

    def prompt(self, turns: Sequence[str]) -> str:
        """See `DialogueStyle.prompt`; ends with ``Assistant:``."""
        said = [f"{('User', 'Assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns)]
        return self._separator.join([*said, "Assistant:"])

    def text(self, turns: Sequence[str], answer: str) -> str:
        """See `DialogueStyle.text`."""
        return f"{self.prompt(turns)} {answer}"

    def demonstration(self, turns: Sequence[str], answer: str) -> dict[str, Any]:
        """See `DialogueStyle.demonstration`."""
        return {"input": self.prompt(turns), "output": answer}


class ChatStyle:
    """What a tokenizer's chat template makes of dialogues. See `DialogueStyle`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, turns: Sequence[str]) -> str:
        """See `DialogueStyle.prompt`."""
        return self._tokenizer.apply_chat_template(_messages(turns))

    def text(self, turns: Sequence[str], answer: str) -> str:
        """See `DialogueStyle.text`."""
        # Without the template's line break after the end token, which responses in PPO do not have.
        return self._tokenizer.apply_chat_template(_messages([*turns, answer]), False).rstrip("\n")

    def demonstration(self, turns: Sequence[str], answer: str) -> dict[str, Any]:
        """See `DialogueStyle.demonstration`."""
        context = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in _messages(turns)]
        return {"messages": [*context, {"role": "assistant", "content": answer}]}


def _messages(turns: Sequence[str]) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def dialogue_style(tokenizer: Tokenizer | None, separator: str) -> DialogueStyle:
    """`ChatStyle` of a tokenizer, or `PlainStyle` without one."""
    return PlainStyle(separator) if tokenizer is None else ChatStyle(tokenizer)
