"""Prompts, and texts that reward models score: from a line, text or conversation, to the tokens that a model gets."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_style_aligner.data.chat_rendering import ChatRenderer, is_in_chat_template
from nemo_style_aligner.data.chats import Conversation, is_conversation, read_conversation
from nemo_style_aligner.data.encoding import LineEncoder, Lines, Notes, Ragged, Samples
from nemo_style_aligner.data.jsonl import Record
from nemo_style_aligner.data.line_pairs import count_pairs
from nemo_style_aligner.data.text_format import ChatForm, TextFormat
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks

logger = logging.getLogger(__name__)

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


def note_unused_context(notes: Notes, lines: Lines, records: Sequence[Record], used: Sequence[str]) -> None:
    """Note keys of pairs that hold a part of the question in well-known data, and that no template names."""
    for record in records:
        if not is_conversation(record):
            notes.see("pairs", "first", [lines.file, record.line])
            for key in CONTEXT_KEYS:
                if key not in used and record.fields.get(key):
                    notes.see("unused", key)


def warn_of_unused_context(notes: Notes, paths: Sequence[str | Path], setting: str) -> None:
    """Warn of such keys; ``setting`` is the template."""
    if unused := notes.seen.get("unused"):
        file, line = notes.seen["pairs"]["first"]
        warn_for_all_ranks(
            logger,
            "%s:%d: the lines have %s, which %s does not name: it is no part of what is learnt",
            paths[file],
            line,
            " and ".join(repr(key) for key in CONTEXT_KEYS if key in unused),
            setting,
        )


def take_notes(chats: ChatRenderer, lines: Lines, first_prompt: str) -> Notes:
    """Notes on lines that have been rendered; the prompt of the first one, if there is one, shows who wrote it."""
    notes, chats.notes = chats.notes, Notes()
    if lines.are_first and first_prompt and not notes.counts["conversations"]:
        chat: ChatForm = "template" if is_in_chat_template(first_prompt, chats.tokenizer) else "text"
        notes.see("prompts", "chat", chat)
    return notes


def written(chats: ChatRenderer, notes: Notes, ids: Sequence[int], append_eod: bool | None = None) -> TextFormat:
    """How texts are written on which these are all notes; ``ids`` are the tokens of one."""
    chat: ChatForm | None = notes.seen["prompts"]["chat"] if "prompts" in notes.seen else None
    if notes.counts["conversations"]:
        chat = "template" if chats.markers is None else "markers"
    markers = chats.markers if chat == "markers" else None
    return TextFormat(chat, markers, tuple(notes.seen.get("ends", ())), ids[0] == chats.tokenizer.bos_id, append_eod)


class TextEncoder(LineEncoder):
    """Makes samples of prompts, or of texts that a reward model scores.

    Its settings are ``add_bos``, whether texts begin with BOS (see `Tokenizer.begins_with_bos`), and ``append_eod``,
    whether they end with EOS.

    Attributes:
        chats: renders those that are conversations.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, settings)
        self.chats = ChatRenderer(tokenizer)
        add_bos = settings["add_bos"]
        self._begin_with_bos = {
            True: self.chats.begins_with_bos(add_bos),
            False: tokenizer.begins_with_bos(add_bos, "add_bos"),
        }

    def tokenize(self, texts: Sequence[ScoredText]) -> Iterator[list[int]]:
        """Ids of each text: with one BOS token, or none, and one end, or none. A chat has its own end.

        Prompt and response are tokenized apart, as in PPO.
        """
        whole = iter(self.tokenizer.texts_to_ids([text.response for text in texts if not text.prompt]))
        for text in texts:
            parts = self.tokenizer.parts_to_ids([text.prompt, text.response]) if text.prompt else [next(whole)]
            ids = list(itertools.chain.from_iterable(parts))
            if not ids:
                text.record.fail("'text' is empty")
            ended = self.tokenizer.with_end(ids) if self.settings["append_eod"] and not text.is_chat else ids
            yield self.tokenizer.with_bos(ended, self._begin_with_bos[text.is_chat])


class PromptEncoder(TextEncoder):
    """Prompts as columns ``tokens``, empty for those that are too long, and ``text``, UTF-8, of conversations alone.

    Its settings are those of `TextEncoder`, and ``max_length``.
    """

    def encode(self, lines: Lines) -> Samples:
        """See `LineEncoder`."""
        prompts = [_prompt(record, self.chats) for record in lines.records()]
        notes = take_notes(self.chats, lines, prompts[0].response)
        notes.counts.update(count_pairs([prompt.response for prompt in prompts]))
        samples = Samples({"tokens": Ragged(), "text": Ragged("B")}, notes)
        for prompt, ids in zip(prompts, self.tokenize(prompts), strict=True):
            samples.columns["tokens"].append(ids if len(ids) <= self.settings["max_length"] else [])
            samples.columns["text"].append(prompt.response.encode() if prompt.is_chat else b"")
        return samples


def _prompt(record: Record, chats: ChatRenderer) -> ScoredText:
    if "text" in record.fields or not is_conversation(record):
        return ScoredText(record, "", record.text("text"))
    return ScoredText(record, "", chats.prompt(record, read_conversation(record)), is_chat=True)


class LabelledEncoder(TextEncoder):
    """Labelled texts as columns ``tokens`` and ``labels``.

    Its settings are those of `TextEncoder`, and ``seq_length``, ``num_attributes`` and ``ignored``. ``counts``: texts,
    of which "unlabelled", or too "long".
    """

    def encode(self, lines: Lines) -> Samples:
        """See `LineEncoder`."""
        settings = self.settings
        texts = [scored_text(record, self.chats) for record in lines.records()]
        samples = Samples({"tokens": Ragged(), "labels": Ragged("d")}, take_notes(self.chats, lines, texts[0].prompt))
        counts = samples.notes.counts
        for text, ids in zip(texts, self.tokenize(texts), strict=True):
            labels = labels_of(text.record)
            if len(labels) != settings["num_attributes"]:
                expected = settings["num_attributes"]
                text.record.fail(f"'label' has {len(labels)} attributes where {expected} are expected")
            counts["texts"] += 1
            if all(label == settings["ignored"] for label in labels):
                counts["unlabelled"] += 1
            elif len(ids) > settings["seq_length"]:
                counts["long"] += 1
            else:
                samples.columns["tokens"].append(ids)
                samples.columns["labels"].append(labels)
        return samples


def labels_of(record: Record) -> list[float]:
    """A line's ``label``: a number, or one per attribute. Raises DataError."""
    label = record.require("label", (int, float, list), "a number or a list of numbers")
    values = label if isinstance(label, list) else [label]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    try:
        is_finite = numeric and all(math.isfinite(value) for value in values)
    except OverflowError:  # an integer of hundreds of digits
        is_finite = False
    if not values or not is_finite:
        record.fail(f"'label' should be a finite number or a list of them, not {label}")
    return [float(value) for value in values]
