"""The token ids of messages that follow a reply. What came before is never rendered or tokenized again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_style_aligner.engine.text.chat_marks import mark
from nemo_style_aligner.engine.text.chat_rendering import ChatRenderer
from nemo_style_aligner.engine.text.chats import Conversation, Turn, read_turn
from nemo_style_aligner.engine.text.jsonl import DataError, Record
from nemo_style_aligner.engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""In OpenAI's form: ``{"role": "tool", "content": "4"}``."""

_TAIL = 64  # tokens of a reply in which a part of what the template writes behind it may be


class TurnsError(DataError):
    """Messages cannot be put behind a reply; the message says why."""


class Turns:
    """Renders the messages of an episode with the chat template (or NeMo's markers), each of them once.

    A template may be used if what it writes behind an answer does not depend on what came before: that is proved for
    every sequence of roles, with conversations of several lengths in which only marks differ.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self._proved = set[str]()

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation up to where the answer begins.

        Raises:
            DataError: a part of it would be left out, or it cannot be rendered.
        """
        text = self._renderer.prompt(_record(len(conversation.turns)), conversation)
        return self._tokenizer.with_bos(self._tokenizer.text_to_ids(text), self._renderer.begins_with_bos(None))

    def after_reply(self, new: Conversation, reply: Sequence[int]) -> list[int]:
        """The ids of new turns alone, up to where the next reply begins.

        Args:
            new: at least one turn; tools and variables are the conversation's.
            reply: the ids that were sampled before; of what the template writes behind an answer, they may have a part.

        Raises:
            TurnsError: the template does not allow it.
            DataError: as `prompt`.
        """
        follows = self._following(new, 1)
        roles = tuple(turn.role for turn in new.turns)
        of_template = json.dumps([roles, new.tools, new.variables], default=dict)
        if of_template not in self._proved:
            if any(self._following(new, length, other) != follows for length, other in ((1, 1), (2, 0), (3, 1))):
                raise TurnsError(
                    f"what the chat template writes behind an answer, for messages of {', '.join(roles)}, depends on "
                    "the conversation before: an episode of several replies cannot be continued token by token. Change "
                    "the template (chat_template.jinja beside the tokenizer), give the prompt's messages to the first "
                    "policy.reply, so that each reply can have a row of its own, or use policy.sample with your own ids"
                )
            self._proved.add(of_template)
        said = self._tokenizer.ids_to_text(reply[-_TAIL:], keep_special=True)
        there = next(n for n in range(min(len(said), len(follows)), -1, -1) if said.endswith(follows[:n]))
        return self.text(follows[there:], reply)

    def text(self, text: str, before: Sequence[int]) -> list[int]:
        """The ids of a text behind other ids."""
        return self._tokenizer.parts_to_ids([self._tokenizer.ids_to_text(before[-_TAIL:], keep_special=True), text])[1]

    def _following(self, new: Conversation, length: int, number: int = 0) -> str:
        """What is written behind the last answer of a conversation of so many questions and answers."""
        answer, before = mark(100 + number), list[Turn]()
        for place in range(length):
            before.append(Turn("user", "user", mark(200 + number + place), is_target=False))
            text = answer if place == length - 1 else mark(300 + number + place)
            before.append(Turn("assistant", "assistant", text, is_target=False))
        whole = dataclasses.replace(new, turns=[*before, *new.turns])
        text = self._renderer.prompt(_record(len(new.turns)), whole)
        parts = text.split(answer)
        if len(parts) != 2:
            raise TurnsError(f"the chat template writes an answer {len(parts) - 1} times: it cannot be continued")
        return parts[1]


def _record(count: int) -> Record:
    return Record(Path("messages"), count, {})


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Messages as the renderer takes them. Raises DataError."""
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise TurnsError('give messages, such as {"role": "user", "content": "..."}')
    return [read_turn(Record(Path("messages"), number, message)) for number, message in enumerate(messages, 1)]
