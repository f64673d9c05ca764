"""Prompts, and texts that reward models score: from a line, text or conversation, to the tokens that a model gets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_style_aligner.data.chat_rendering import ChatRenderer, is_in_chat_template
from nemo_style_aligner.data.chats import Conversation, is_conversation, read_conversation
from nemo_style_aligner.data.jsonl import Record, read_records
from nemo_style_aligner.data.text_format import ChatForm, TextFormat
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks

logger = logging.getLogger(__name__)

_TOKENIZE_AT_ONCE = 1024  # texts; bounds memory, and is plenty for the tokenizer's own threads

CONTEXT_KEYS = ("system", "instruction", "question", "query", "prompt", "context", "history", "input")
"""Keys that hold a part of the question in well-known data."""


class ScoredText(NamedTuple):
    """A prompt and its response.

    Attributes:
        record: where they are from.
        prompt: empty where the data do not tell where the response begins.
        response: all of the text then.
        is_chat: whether it is a conversation, rendered up to the end of its last answer.
    """

    record: Record
    prompt: str
    response: str
    is_chat: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return self.prompt + self.response


def scored_text(record: Record, chats: ChatRenderer) -> ScoredText:
    """A line's ``text``, or its conversation.

    Raises:
        DataError: the line has none, or one that does not end with an answer.
    """
    if "text" in record.fields or not is_conversation(record):
        return ScoredText(record, "", record.text("text"))
    return rendered_text(record, "the conversation", read_conversation(record), chats)


def rendered_text(record: Record, what: str, conversation: Conversation, chats: ChatRenderer) -> ScoredText:
    """A conversation that ends with an answer; ``what`` it is, for errors.

    Raises:
        DataError: it ends otherwise, or cannot be rendered whole.
    """
    last = conversation.turns[-1]
    if last.kind != "assistant":
        record.fail(f"{what} ends with a turn of {last.role!r}: what is scored is an answer of the assistant")
    return ScoredText(record, *chats.prompt_and_answer(record, conversation), is_chat=True)


def warn_of_unused_context(records: Sequence[Record], used: Sequence[str], setting: str) -> None:
    """Warn of pairs with a key that holds a part of the question in well-known data, and that no template names."""
    pairs = [record for record in records if not is_conversation(record)]
    unused = [key for key in CONTEXT_KEYS if key not in used and any(record.fields.get(key) for record in pairs)]
    if unused:
        warn_for_all_ranks(
            logger,
            "%s:%d: the lines have %s, which %s does not name: it is no part of what is learnt",
            pairs[0].path,
            pairs[0].line,
            " and ".join(map(repr, unused)),
            setting,
        )


def _tokenize(texts: Sequence[ScoredText], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of texts, many at once; prompt and response of a text apart, as in PPO."""
    for start in range(0, len(texts), _TOKENIZE_AT_ONCE):
        activity.progress()
        chunk = texts[start : start + _TOKENIZE_AT_ONCE]
        whole = iter(tokenizer.texts_to_ids([text.response for text in chunk if not text.prompt]))
        for text in chunk:
            parts = tokenizer.parts_to_ids([text.prompt, text.response]) if text.prompt else [next(whole)]
            ids = list(itertools.chain.from_iterable(parts))
            if not ids:
                text.record.fail("'text' is empty")
            yield ids


class TextEncoder:
    """Prompts, and texts that a reward model scores, as the tokens that a model gets.

    Attributes:
        chats: renders those that are conversations.
    """

    def __init__(
        self, tokenizer: Tokenizer, add_bos: bool | None, key: str = "model.data.add_bos", append_eod: bool = False
    ) -> None:
        """``add_bos``: whether texts begin with BOS, see `Tokenizer.begins_with_bos`; ``append_eod``: end with EOS."""
        self.chats = ChatRenderer(tokenizer)
        self._tokenizer, self._append_eod = tokenizer, append_eod
        self._chats_begin, self._texts_begin = (
            self.chats.begins_with_bos(add_bos),
            tokenizer.begins_with_bos(add_bos, key),
        )

    def encode(self, texts: Sequence[ScoredText]) -> Iterator[list[int]]:
        """Ids of each text: with one BOS token, or none, and one end, or none. A chat has its own end."""
        for text, ids in zip(texts, _tokenize(texts, self._tokenizer), strict=True):
            ended = self._tokenizer.with_end(ids) if self._append_eod and not text.is_chat else ids
            yield self._tokenizer.with_bos(ended, self._chats_begin if text.is_chat else self._texts_begin)

    def written(self, text: ScoredText, ids: Sequence[int], append_eod: bool | None = None) -> TextFormat:
        """The format of texts, of which this is one, encoded."""
        chat: ChatForm | None = None
        if text.is_chat:
            chat = "template" if self.chats.markers is None else "markers"
        elif text.prompt:
            chat = "template" if is_in_chat_template(text.prompt, self._tokenizer) else "text"
        markers = self.chats.markers if chat == "markers" else None
        return TextFormat(chat, markers, tuple(self.chats.end_strings), ids[0] == self._tokenizer.bos_id, append_eod)


def read_prompts(paths: Sequence[str | Path], encoder: TextEncoder) -> Iterator[tuple[Record, list[int]]]:
    """The lines of prompt files with their ``text``, to which conversations are rendered, and its tokens.

    Raises:
        DataError: a file or a line is not as it should be.
    """
    records = read_records(paths)
    texts = [_prompt(record, encoder.chats) for record in records]
    encoder.chats.log()
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        yield text.record, ids


def _prompt(record: Record, chats: ChatRenderer) -> ScoredText:
    is_chat = "text" not in record.fields and is_conversation(record)
    if is_chat:
        text = chats.prompt(record, read_conversation(record))
        record = Record(record.path, record.line, {**record.fields, "text": text})
    return ScoredText(record, "", record.text("text"), is_chat)
