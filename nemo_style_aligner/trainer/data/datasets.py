"""Prompts, comparisons and labelled texts from JSONL files; and how files are named, blended and padded.

A dataset reads and tokenizes its files when it is built, so that a bad line or an overlong text
shows up before training starts. ``dataset[i]`` is the same sample on every rank and in every run.
Supervised fine-tuning data has a module of its own, `sft`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_style_aligner.arguments import may_not_read
from nemo_style_aligner.engine.text.jsonl import DataError, Record, read_jsonl
from nemo_style_aligner.engine.text.tables import why_no_data
from nemo_style_aligner.engine.text.text_format import TextFormat, joined
from nemo_style_aligner.engine.text.texts import LabelledEncoder, PromptEncoder, TextDataset
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.data.preferences import ComparisonEncoder, JudgedEncoder, PreferenceEncoder
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """What samplers and loops require of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T_co: ...


# ---- which files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSource:
    """Files of one split, read one after the other, or blended when there are weights."""

    paths: tuple[Path, ...]
    weights: tuple[float, ...] | None = None  # one per path, any scale

    def build(self, make: Callable[[Sequence[Path]], TextDataset[T]]) -> tuple[Dataset[T], TextFormat]:
        """The dataset of all files, and how their texts are written.

        It is ``make(paths)``, or a `BlendedDataset` of ``make([path])`` for each.
        """
        names = [str(path) for path in self.paths]
        logger.info("reading and tokenizing %s", some_of(names))
        if self.weights is None:
            made = make(self.paths)
            return made, made.written
        parts = [make([path]) for path in self.paths]
        written = joined([part.written for part in parts], some_of(names))
        return BlendedDataset(parts, self.weights, names), written


@dataclass(frozen=True)
class DataPrefix:
    """``model.data.data_prefix``, read and checked."""

    train: DataSource
    validation: DataSource | None  # None: not given


CHUNK = "CHUNK_ID"
_PREFIX_KEY = "model.data.data_prefix"


def load_data_prefix(data_prefix: Any) -> DataPrefix:
    """Read ``model.data.data_prefix``: ``{train: [...], validation: [...], test: [...]}``, each a file or a list.

    No file is opened, and ``test`` is not looked at.

    A list is either files, ``[a, b]``, which are read one after the other, or weights and files in
    turn, ``[0.3, a, 0.7, b]``, which are blended.

    Raises:
        DataError: another shape, an unknown split, no training data, or a file that is not there or may not be read.
    """
    expected = f"{_PREFIX_KEY} should be {{train: [FILE, ...], validation: [FILE, ...], test: [FILE, ...]}}"
    if not isinstance(data_prefix, Mapping):
        given = "it is not set; --data FILE does so, too" if data_prefix is None else f"not {data_prefix!r}"
        raise DataError(f"{expected}, {given}")
    unknown = [key for key in data_prefix if key not in ("train", "validation", "test")]
    if unknown:
        raise DataError(f"{expected}; it has the unknown split {unknown[0]!r}")
    train, validation = (
        None if data_prefix.get(split) is None else data_source(data_prefix[split], f"{_PREFIX_KEY}.{split}")
        for split in ("train", "validation")
    )
    if train is None:
        raise DataError(f"{_PREFIX_KEY} names no training data: give {{train: [FILE], validation: [FILE]}}")
    return DataPrefix(train, validation)


def data_source(entry: Any, key: str) -> DataSource:
    """Read the files of one split: ``a``, ``[a, b]`` or ``[0.3, a, 0.7, b]``. None is opened.

    A name with ``CHUNK_ID`` stands for several files, see `chunks`, but in a blend.

    Args:
        entry: the config's value.
        key: the config's key, for messages.

    Raises:
        DataError: another shape, or a file that is not there or may not be read.
    """
    is_list = isinstance(entry, Sequence) and not isinstance(entry, str)
    if not is_list and not isinstance(entry, str | Path):
        given = f"{key} is not set" if entry is None else f"{key}={entry}"
        raise DataError(f"{given}: give a file, or a list of files")
    entries = list(entry) if is_list else [entry]
    numbers = [_as_number(item) for item in entries]
    weights: tuple[float, ...] | None = None
    if any(number is not None for number in numbers):
        weights = tuple(number for number in numbers[::2] if number is not None)
        files = entries[1::2]
        alternate = all(number is None for number in numbers[1::2])
        if len(weights) != len(files) or 2 * len(files) != len(entries) or not alternate:
            raise DataError(f"{key}: a blend should be weights and files in turn, [0.3, a, 0.7, b], not {entries}")
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise DataError(f"{key}: the weights of a blend should be positive, got {list(weights)}")
        entries = files
    if not entries:
        raise DataError(f"{key} names no file; leave it out or give it one")
    if not all(isinstance(item, str | Path) for item in entries):
        raise DataError(f"{key}={entries}: give a file, or a list of files")
    names = [os.path.expanduser(item) for item in entries]
    paths = tuple(map(Path, names if weights else [chunk for name in names for chunk in chunks(name)]))
    for path in paths:
        if may_not_read(path):
            raise DataError(f"{key} names {path}: this user may not read it")
        if reason := why_no_data(path):
            raise DataError(f"{key} names {path}: {reason}")
    return DataSource(paths, weights)


def chunks(name: str) -> list[str]:
    """The files that a name with NeMo-Aligner's ``CHUNK_ID`` stands for: those with 0, 1, ... in its place, 0 at least.

    Another name stands for itself.
    """
    if CHUNK not in name:
        return [name]
    numbered = (name.replace(CHUNK, str(number)) for number in itertools.count(1))
    return [name.replace(CHUNK, "0"), *itertools.takewhile(os.path.isfile, numbered)]


def _as_number(entry: Any) -> float | None:
    """``entry`` as a number, None if it is none. A weight from the command line may be a string."""
    try:
        return float(str(entry))
    except ValueError:
        return None


class BlendedDataset(Generic[T]):
    """Samples of several datasets in fixed proportions, spread evenly.

    It has as many samples as all parts together. At every prefix of the order, each part's share is within two samples
    or so of its weight. A part that is too small for its weight is repeated; of one that is too large, only the first
    samples are used, which is logged with its entry of ``names``.
    """

    def __init__(self, parts: Sequence[Dataset[T]], weights: Sequence[float], names: Sequence[str]) -> None:
        self._parts = list(parts)
        shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        size = sum(len(part) for part in parts)
        self._part = np.empty(size, dtype=np.int32)
        self._index = np.empty(size, dtype=np.int64)
        taken = np.zeros(len(self._parts), dtype=np.int64)
        for position in range(size):
            # The part that is furthest behind its share goes next.
            part = int(np.argmax(shares * (position + 1) - taken))
            self._part[position], self._index[position] = part, taken[part] % len(parts[part])
            taken[part] += 1
        for name, samples, count in zip(names, self._parts, taken.tolist(), strict=True):
            if not count and len(samples):
                warn_for_all_ranks(
                    logger,
                    "blend: none of the %d samples of %s is used: all files have %d samples together, of which its "
                    "weight is less than one",
                    len(samples),
                    name,
                    size,
                )
            elif count < len(samples):
                logger.info("blend: the first %d of %d samples of %s are used", count, len(samples), name)

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> T:
        return self._parts[self._part[index]][int(self._index[index])]


# ---- batches -----------------------------------------------------------------------------------


def pad_rows(
    sequences: Sequence[Sequence[float]], value: int, width: int | None = None, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Sequences padded on the right to ``width``, or to the longest one's length: [b, width]."""
    width = max(map(len, sequences)) if width is None else width
    padded = torch.full((len(sequences), width), value, dtype=dtype)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.tensor(sequence, dtype=dtype)
    return padded


def lengths_of(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Length of each sequence: int64 [b]."""
    return torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)


# ---- prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptItem:
    """A prompt to respond to."""

    token_ids: list[int]
    line: Mapping[str, Any]  # all its fields, such as the right answer; ``text`` is the prompt
    place: str = ""  # where the line is, for messages


class PromptDataset(TextDataset[PromptItem]):
    """RLHF prompts: ``{"text": "User: ...\\nAssistant:"}`` on each line, other keys are kept.

    Or conversations that wait for an answer, in the forms of `sft`. Prompts of more than ``max_prompt_length`` tokens
    are dropped, with a count in the log that names ``limited_by`` as the reason. An index means the same prompt on
    every rank and in every run with the same files and limit.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        max_prompt_length: int,
        limited_by: str = "max_prompt_length",
        add_bos: bool | None = None,
        bos_key: str = "add_bos",
    ) -> None:
        """``add_bos``: whether prompts begin with BOS, see `Tokenizer.begins_with_bos`; ``bos_key`` says so."""
        encoder = PromptEncoder(tokenizer, {"add_bos": add_bos, "max_length": max_prompt_length}, bos_key=bos_key)
        encoder.limited_by = limited_by
        super().__init__(paths, encoder, self._prompt)
        self._records = [read_jsonl(path) for path in paths]

    def _prompt(self, token_ids: list[int], text: list[int], place: list[int]) -> PromptItem:
        record = self._record(text, place)
        return PromptItem(token_ids, record.fields, f"{record.path}:{record.line}")

    def record(self, index: int) -> Record:
        """The line of a prompt, which can say where it stands; ``text`` is a conversation's rendering."""
        _, text, place = (column[index] for column in self._columns)
        return self._record(text, place)

    def _record(self, text: list[int], place: list[int]) -> Record:
        file, number = place
        record = self._records[file][number]
        return Record(record.path, record.line, {**record.fields, "text": bytes(text).decode()}) if text else record


# ---- comparisons ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonItem:
    """Two texts, prompt and response each, of which the first is the better one."""

    chosen_ids: list[int]
    rejected_ids: list[int]


class ComparisonDataset(TextDataset[ComparisonItem]):
    """Reward model data: ``{"text": prompt + response}`` lines, the good one before the bad one of each pair.

    Or ``{"prompt": ..., "chosen": ..., "rejected": ...}`` lines, a pair each: see `preferences`. Left out, with a count
    in the log, are pairs with a text of more than ``seq_length`` tokens, and pairs of the same text twice, of which
    nothing can be learnt. ``append_eod`` ends each text with the EOS token, like a response that PPO generates; a chat
    ends as its template ends answers.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        seq_length: int,
        append_eod: bool = False,
        add_bos: bool | None = None,
    ) -> None:
        settings = {"add_bos": add_bos, "append_eod": append_eod, "seq_length": seq_length}
        super().__init__(
            paths, ComparisonEncoder(tokenizer, settings), lambda chosen, bad, *_: ComparisonItem(chosen, bad)
        )


@dataclass(frozen=True)
class PreferenceItem:
    """Two texts, prompt and response each: the chosen and the rejected one; or as `MismatchedDataset` has them.

    Attributes:
        token_ids: of each text.
        prompt_lengths: how many of them are the prompt's.
        labels: what each response is worth.
        reference: the reference's log-probs of the responses, summed; None: not known.
        names: what the texts are, for people.
    """

    token_ids: tuple[list[int], list[int]]
    prompt_lengths: tuple[int, int]
    labels: tuple[float, float]
    reference: tuple[float, float] | None = None
    names: tuple[str, str] = ("chosen", "rejected")


class PreferenceDataset(TextDataset[PreferenceItem]):
    """The pairs of a `ComparisonDataset`, of which the responses are learnt.

    ``default_rewards``: what a chosen and a rejected response are worth where the line does not say, in
    ``chosen_reward`` and ``rejected_reward``.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        default_rewards: tuple[float, float],
    ) -> None:
        """``settings``: see `ComparisonEncoder`."""

        def item(
            chosen: list[int], rejected: list[int], prompts: list[int], given: list[float], _: list[int]
        ) -> PreferenceItem:
            good, bad = (
                default if math.isnan(reward) else reward
                for reward, default in zip(given, default_rewards, strict=True)
            )
            return PreferenceItem((chosen, rejected), (prompts[0], prompts[1]), (good, bad))

        super().__init__(paths, PreferenceEncoder(tokenizer, settings), item)


@dataclass(frozen=True)
class JudgedItem:
    """A prompt and its response, which is a good or a bad one."""

    token_ids: list[int]
    prompt_length: int
    is_good: bool


class JudgedDataset(TextDataset[JudgedItem]):
    """Single responses with a verdict; ``settings`` and the kinds of line: see `JudgedEncoder`."""

    def __init__(self, paths: Sequence[str | Path], tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        super().__init__(
            paths,
            JudgedEncoder(tokenizer, settings),
            lambda ids, prompt, good: JudgedItem(ids, prompt[0], bool(good[0])),
        )


class MismatchedDataset:
    """Each response of a `JudgedDataset`, and beside it its prompt with the response to another prompt.

    Which other one depends on the seed and on the data, not on batches or ranks: in a random order of all, the next one
    of another prompt. The first label is 1 for a good response, 0 for a bad one. What is longer than ``seq_length``
    tokens is cut off.
    """

    def __init__(self, judged: Dataset[JudgedItem], seed: int, seq_length: int) -> None:
        items = (judged[index] for index in range(len(judged)))
        numbers: dict[tuple[int, ...], int] = {}
        prompts = [numbers.setdefault(tuple(i.token_ids[: i.prompt_length]), len(numbers)) for i in items]
        if len(numbers) < 2:
            raise DataError(
                "KTO needs two responses at least, to different prompts: each is compared with what another prompt got"
            )
        self._judged, self._seq_length = judged, seq_length
        self._other = _next_of_another(np.random.default_rng(seed).permutation(len(judged)), np.array(prompts))

    def __len__(self) -> int:
        return len(self._judged)

    def __getitem__(self, index: int) -> PreferenceItem:
        own, other = self._judged[index], self._judged[int(self._other[index])]
        mismatched = own.token_ids[: own.prompt_length] + other.token_ids[other.prompt_length :]
        return PreferenceItem(
            (own.token_ids, mismatched[: self._seq_length]),
            (own.prompt_length, own.prompt_length),
            (float(own.is_good), 0.0),
            names=("good" if own.is_good else "bad", "response to another prompt"),
        )


def _next_of_another(order: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each item the one that follows it in a circular order and is of another group."""
    ordered = groups[order]
    begins = np.flatnonzero(ordered != np.roll(ordered, 1))  # runs of one group each
    following = np.searchsorted(begins, np.arange(len(order)), side="right") % len(begins)
    others = np.empty_like(order)
    others[order] = order[begins[following]]
    return others


# ---- labelled texts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RegressionItem:
    """A text and the value of each of its attributes."""

    token_ids: list[int]
    labels: list[float]


class RegressionDataset(TextDataset[RegressionItem]):
    """Reward model data with labels: ``{"text": ..., "label": 3.5}`` or ``"label": [4, 2, -100]``.

    Or conversations in place of the text, as in `sft`. All lines have the same number of attributes. A missing label is
    ``ignored`` (``model.regression.loss_mask_val``). Left out, with a count in the log, are texts of more than
    ``seq_length`` tokens, and those without any label. ``append_eod`` and ``add_bos`` as in `ComparisonDataset`.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        seq_length: int,
        append_eod: bool = False,
        num_attributes: int | None = None,
        add_bos: bool | None = None,
        ignored: float = -100.0,
    ) -> None:
        """``num_attributes``: what the model expects; None: as many as a file's first line has."""
        settings = {"add_bos": add_bos, "append_eod": append_eod, "seq_length": seq_length, "ignored": ignored}
        encoder = LabelledEncoder(tokenizer, {**settings, "num_attributes": num_attributes})
        super().__init__(paths, encoder, RegressionItem)
