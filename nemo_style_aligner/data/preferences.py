"""Comparisons with both responses on one line, ``chosen`` and ``rejected``: the form of TRL, OpenRLHF and NeMo-RL.

The prompt may have a key of its own, ``prompt``. Prompt and responses are texts, which are joined as they are, or
conversations in OpenAI's format, which the tokenizer's chat template renders.
"""

from __future__ import annotations

from typing import Any

from nemo_style_aligner.data.jsonl import Record
from nemo_style_aligner.data.tokenizer import Tokenizer, TokenizerError

PREFERENCE_KEYS = ("chosen", "rejected")

_KINDS = "a string, or a list of messages"
_END = 64  # characters at a rendered chat's end that hold the template's end-of-turn token


class EndedText(Record):
    """A ``text`` that already ends with its chat template's end-of-turn token and needs no EOS token."""


def preference_texts(record: Record, tokenizer: Tokenizer) -> list[Record]:
    """The chosen and the rejected text of a line, each with its prompt, as records that have a ``text``.

    Raises:
        DataError: the line has neither texts nor conversations, or conversations that cannot be rendered.
    """
    return [_text(record, key, tokenizer) for key in PREFERENCE_KEYS]


def _text(record: Record, key: str, tokenizer: Tokenizer) -> Record:
    response = record.require(key, (str, list), _KINDS)
    prompt = "" if record.fields.get("prompt") is None else record.require("prompt", (str, list), _KINDS)
    if isinstance(response, str):
        if not isinstance(prompt, str):
            record.fail(f"'prompt' is a list of messages, but {key!r} is a string: give both in the same form")
        text = (record.text("prompt") if prompt else "") + record.text(key)
        return Record(record.path, record.line, {"text": text})
    text = _rendered(record, key, _conversation(record, key, prompt, response), tokenizer)
    # After the end-of-turn token, templates write a line break, which is never generated.
    ids = tokenizer.text_to_ids(text.rstrip()[-_END:])
    if ids and ids[-1] in tokenizer.markup_ids:
        return EndedText(record.path, record.line, {"text": text.rstrip()})
    return Record(record.path, record.line, {"text": text})


def _conversation(record: Record, key: str, prompt: str | list[Any], response: list[Any]) -> list[Record]:
    """Prompt and response as messages, the prompt once if ``response`` repeats it. A prompt of text is the user's."""
    turns = _messages(record, key, response)
    if isinstance(prompt, list):
        asked = _messages(record, "prompt", prompt)
        is_repeated = [turn.fields for turn in turns[: len(asked)]] == [turn.fields for turn in asked]
        return turns if is_repeated else asked + turns
    # What the assistant says may equal the prompt: it is no repetition of it.
    asks = (turn.fields["content"] for turn in turns if turn.fields["role"] != "assistant")
    if not prompt or prompt in asks:
        return turns
    if turns[0].fields["role"] != "assistant":
        record.fail(f"'prompt' is none of the messages of {key!r}: remove it, or the messages before the response")
    return [Record(record.path, record.line, {"role": "user", "content": record.text("prompt")}), *turns]


def _messages(record: Record, key: str, messages: list[Any]) -> list[Record]:
    if not messages or not all(isinstance(message, dict) for message in messages):
        record.fail(f"{key!r} should be {_KINDS}, each an object with 'role' and 'content'")
    turns = [Record(record.path, record.line, {k: v for k, v in m.items() if v is not None}) for m in messages]
    for turn in turns:
        turn.text("role"), turn.text("content")
    return turns


def _rendered(record: Record, key: str, turns: list[Record], tokenizer: Tokenizer) -> str:
    try:
        text = tokenizer.apply_chat_template([turn.fields for turn in turns], add_generation_prompt=False)
    except TokenizerError as error:
        record.fail(str(error))
    if "".join(turns[-1].fields["content"].split()) not in "".join(text.split()):
        record.fail(f"the tokenizer's chat template leaves out a part of the last message of {key!r}")
    return text
