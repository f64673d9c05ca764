"""Prompts, and texts that reward models score: from a line, text or conversation, to the tokens that a model gets."""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nemo_style_aligner.engine.text.chat_rendering import ChatRenderer, is_in_chat_template
from nemo_style_aligner.engine.text.chats import Conversation, is_conversation, meant_for, read_conversation
from nemo_style_aligner.engine.text.encoding import Lines, Ragged, Samples, encode_files
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record, seen
from nemo_style_aligner.engine.text.text_format import ChatForm, ChatPromptTokens, TextFormat
from nemo_style_aligner.engine.text.tokenizer import BREAK, Tokenizer
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
    if "text" in record.fields:
        return ScoredText(record, "", record.text("text"))
    if not is_conversation(record):
        present = ", ".join(map(repr, record.fields)) or "none"
        record.fail(
            "there is neither a 'text', nor a conversation, nor 'chosen' and 'rejected'; the keys present are: "
            f"{present}{meant_for(record)}"
        )
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


class TextEncoder(ABC):
    """Makes samples of lines.

    Args:
        settings: all that it depends on beside the tokenizer, as JSON has it. ``add_bos`` says whether texts begin with
            BOS (see `Tokenizer.begins_with_bos`).
        markers: see `ChatRenderer`.
        bos_key: what the setting is called in errors.

    Attributes:
        chats: renders conversations.

    Raises:
        TokenizerError: BOS is asked for, and there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        markers: ChatPromptTokens | None = None,
        bos_key: str = "model.data.add_bos",
    ) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.chats = ChatRenderer(tokenizer, markers)
        add_bos = settings["add_bos"]
        self.begin_with_bos = {
            False: tokenizer.begins_with_bos(add_bos, bos_key),
            True: self.chats.begins_with_bos(add_bos),
        }  # whether texts do, and conversations

    @abstractmethod
    def encode(self, lines: Lines) -> Samples:
        """The samples of these lines, with counts of them.

        Raises:
            DataError: a line is not as it should be.
        """

    @abstractmethod
    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """Warn of what was left out of files.

        Raises:
            DataError: it is all.
        """

    def take_counts(self, lines: Lines, first_prompt: str) -> Counts:
        """Of lines that have been rendered; the prompt of the first one, if there is one, shows who wrote it."""
        counts, self.chats.counts = self.chats.counts, Counter()
        if lines.are_first and first_prompt and not counts["conversations"]:
            chat: ChatForm = "template" if is_in_chat_template(first_prompt, self.tokenizer) else "text"
            counts["chat", chat] += 1
        return counts

    def written(self, counts: Counts, ids: Sequence[int]) -> TextFormat:
        """How all the texts are written that were counted; ``ids`` are the tokens of one."""
        chat: ChatForm | None = next((form for (form,) in seen(counts, "chat")), None)
        if counts["conversations"]:
            chat = "template" if self.chats.markers is None else "markers"
        return TextFormat(
            chat,
            self.chats.markers if chat == "markers" else None,
            tuple(end for (end,) in seen(counts, "end")),
            ids[0] == self.tokenizer.bos_id,
            self.settings.get("append_eod"),
        )

    def tokenize(self, texts: Sequence[ScoredText]) -> Iterator[list[int]]:
        """Ids of each text; see `tokenize_apart`."""
        return (ids for ids, _ in self.tokenize_apart(texts))

    def tokenize_apart(self, texts: Sequence[ScoredText]) -> Iterator[tuple[list[int], int]]:
        """Ids of each text, and how many of them are its prompt's (0 where the data do not tell).

        With one BOS token, or none, and with one end where ``append_eod`` is set. A chat has its own end. Prompt and
        response are tokenized apart, as in PPO.
        """
        whole = iter(self.tokenizer.texts_to_ids([text.response for text in texts if not text.prompt]))
        for text in texts:
            parts = self.tokenizer.parts_to_ids([text.prompt, text.response]) if text.prompt else [next(whole)]
            ids = list(itertools.chain.from_iterable(parts))
            if not ids:
                text.record.fail("'text' is empty")
            ended = self.tokenizer.with_end(ids) if self.settings.get("append_eod") and not text.is_chat else ids
            whole_ids = self.tokenizer.with_bos(ended, self.begin_with_bos[text.is_chat])
            prompt = len(parts[0]) + len(whole_ids) - len(ended) if text.prompt else 0
            yield whole_ids, max(0, prompt)


class TextDataset(Generic[T]):
    """What an encoder makes of files.

    Attributes:
        encoder: made the samples.
        counts: of what there was, see the encoder.
        written: how the texts are written.
    """

    def __init__(self, paths: Sequence[str | Path], encoder: TextEncoder, item: Callable[..., T]) -> None:
        """``item`` makes a sample of the values in the encoder's columns."""
        samples = encode_files(paths, encoder)
        self.encoder, self.counts, self._item = encoder, samples.counts, item
        self._columns = list(samples.columns.values())
        encoder.chats.log(self.counts, paths)
        encoder.report(self.counts, paths)
        if self.counts["blank"]:
            warn_for_all_ranks(
                logger,
                "%s: %d responses are empty: leave their lines out, unless the model should learn to say nothing there",
                some_of([str(path) for path in paths]),
                self.counts["blank"],
            )
        self.written = encoder.written(self.counts, self._columns[0][0])

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> T:
        return self._item(*(column[index] for column in self._columns))

    def of_lines(self, lines: Lines) -> tuple[list[T], Counts]:
        """The samples of some lines alone, and counts of them."""
        samples = self.encoder.encode(lines)
        columns = (map(column.__getitem__, range(len(column))) for column in samples.columns.values())
        return [self._item(*values) for values in zip(*columns, strict=True)], samples.counts


def report_dropped(dropped: int, total: int, what: str, limit: str, paths: Sequence[str | Path]) -> None:
    """Warn of how many samples were dropped; a `DataError` if all were."""
    files = ", ".join(str(path) for path in paths)
    if dropped == total:
        raise DataError(f"{files}: all {total} {what} are {limit}; change the limit or the data")
    if dropped:
        warn_for_all_ranks(logger, "%s: dropped %d of %d %s: %s", files, dropped, total, what, limit)


def report_unused(counts: Counts, paths: Sequence[str | Path], where: str) -> None:
    """Warn of keys that may be a part of the question, counted as "unused KEY"; ``where`` they are missing."""
    if unused := [key for key in CONTEXT_KEYS if counts[f"unused {key}"]]:
        warn_for_all_ranks(
            logger,
            "%s: lines have %s, which %s: it is no part of what is learnt",
            ", ".join(map(str, paths)),
            " and ".join(f"{key!r} ({counts[f'unused {key}']} of them)" for key in unused),
            where,
        )


def longer_than(limit: int, setting: str = "model.data.seq_length") -> str:
    """Why texts are left out."""
    return f"longer than {limit} tokens ({setting})"


class PromptEncoder(TextEncoder):
    """Prompts as columns ``tokens``, ``text`` (UTF-8, of conversations alone) and ``place``: file, number of the line.

    Its settings are those of `TextEncoder`, and ``max_length``. ``counts``: prompts, of which too "long".

    Attributes:
        limited_by: the setting that says ``max_length``.
    """

    limited_by = "max_prompt_length"

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        prompts = [_prompt(record, self.chats) for record in lines.records()]
        counts = self.take_counts(lines, prompts[0].response)
        samples = Samples({"tokens": Ragged(), "text": Ragged("B"), "place": Ragged("q")}, counts)
        for number, (prompt, ids) in enumerate(zip(prompts, self.tokenize(prompts), strict=True), start=lines.start):
            counts["prompts"] += 1
            if len(ids) > self.settings["max_length"]:
                counts["long"] += 1
            else:
                samples.columns["tokens"].append(ids)
                samples.columns["text"].append(prompt.response.replace(BREAK, "").encode() if prompt.is_chat else b"")
                samples.columns["place"].append((lines.file, number))
        return samples

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        limit = longer_than(self.settings["max_length"], self.limited_by)
        report_dropped(counts["long"], counts["prompts"], "prompts", limit, paths)


def _prompt(record: Record, chats: ChatRenderer) -> ScoredText:
    if not ("text" in record.fields or is_conversation(record)):
        question = next((key for key in CONTEXT_KEYS if isinstance(record.fields.get(key), str)), None)
        instead = f", such as [{{'role': 'user', 'content': what is in {question!r}}}]" if question else ""
        present = ", ".join(map(repr, record.fields)) or "none"
        record.fail(
            f"key 'text' is missing (a prompt as the model gets it), and so is 'messages', a conversation{instead}"
            f"; the keys present are: {present}{meant_for(record)}"
        )
    if "text" in record.fields:
        return ScoredText(record, "", record.text("text"))
    return ScoredText(record, "", chats.prompt(record, read_conversation(record, as_prompt=True)), is_chat=True)


class PlainEncoder(TextEncoder):
    """Texts as columns ``tokens`` and ``prompt``: how many of them are before the last answer of a conversation.

    Its settings are those of `TextEncoder`, and ``seq_length``. ``counts``: texts, of which too "long", or of a
    "single" token, which leaves nothing to predict.
    """

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        texts = [scored_text(record, self.chats) for record in lines.records()]
        samples = Samples({"tokens": Ragged(), "prompt": Ragged()}, self.take_counts(lines, texts[0].prompt))
        for ids, prompt in self.tokenize_apart(texts):
            samples.counts["texts"] += 1
            if len(ids) > self.settings["seq_length"]:
                samples.counts["long"] += 1
            elif len(ids) == 1:
                samples.counts["single"] += 1
            else:
                samples.columns["tokens"].append(ids)
                samples.columns["prompt"].append([prompt])
        return samples

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        report_dropped(counts["single"], counts["texts"], "texts", "of a single token", paths)
        limit = longer_than(self.settings["seq_length"], "the model's positions")
        report_dropped(counts["long"], counts["texts"] - counts["single"], "texts", limit, paths)


class LabelledEncoder(TextEncoder):
    """Labelled texts as columns ``tokens`` and ``labels``.

    Its settings are those of `TextEncoder`, and ``append_eod``, ``seq_length``, ``ignored`` and ``num_attributes``
    (None: as many as the file's first line has). ``counts``: texts, of which "unlabelled", or too "long".
    """

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        settings = self.settings
        texts = [scored_text(record, self.chats) for record in lines.records()]
        samples = Samples({"tokens": Ragged(), "labels": Ragged("d")}, self.take_counts(lines, texts[0].prompt))
        counts = samples.counts
        expected = settings["num_attributes"] or len(_labels(lines.first_record()))
        for text, ids in zip(texts, self.tokenize(texts), strict=True):
            labels = _labels(text.record)
            if len(labels) != expected:
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

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        report_dropped(counts["unlabelled"], counts["texts"], "texts", "without any label", paths)
        labelled = counts["texts"] - counts["unlabelled"]
        report_dropped(counts["long"], labelled, "texts", longer_than(self.settings["seq_length"]), paths)


def _labels(record: Record) -> list[float]:
    """A line's ``label``: a number, or one per attribute. Raises DataError."""
    label = record.require("label", (int, float, list), "a number or a list of numbers")
    values = label if isinstance(label, list) else [label]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    try:
        is_finite = numeric and all(math.isfinite(value) for value in values)
    except OverflowError:  # an integer of hundreds of digits
        is_finite = False
    if not values or not is_finite:
        record.fail(f"'label' should be a finite number or a list of them, not {str(label)[:60]}")
    return [float(value) for value in values]
