"""Texts with a teacher's top-k logits: lines of ``compute_topk_logits.py``, this project's or NeMo-Aligner's.

    {"tokens": [...], "labels": [...], "loss_mask": [...], "topk_token_ids": [[...], ...], "topk_logits": [[...], ...]}

Position t is of the prediction of ``labels[t]``, the token after ``tokens[t]``, which is learnt where ``loss_mask[t]``
is 1. There the teacher's k most likely tokens have their logits, up to a constant. Lines of this project's script also
name their ``tokenizer``; other keys are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_aligner.engine.text.encoding import Lines, Ragged, Samples
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record, seen
from nemo_style_aligner.engine.text.texts import TextDataset, TextEncoder, longer_than, report_dropped
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.data.sft import SFTItem

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DistillationItem(SFTItem):
    """One text, and what the teacher thought of it.

    Attributes:
        candidates, logits: at each of the m tokens to be learnt the teacher's k most likely ones: m * k numbers each.
    """

    candidates: list[int]
    logits: list[float]


class DistillationDataset(TextDataset[DistillationItem]):
    """Texts with a teacher's logits; for the settings see `DistillationEncoder`."""

    def __init__(self, paths: Sequence[str | Path], tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        super().__init__(paths, DistillationEncoder(tokenizer, {"add_bos": None, **settings}), DistillationItem)

    @property
    def top_k(self) -> int:
        """How many tokens of the teacher there are at each position."""
        return int(seen(self.counts, "candidates")[0][0])


class DistillationEncoder(TextEncoder):
    """Lines as columns ``tokens``, ``targets``, ``candidates`` and ``logits``, see `DistillationItem`.

    Its settings are those of `TextEncoder`, ``vocab_size`` (the student's), ``seq_length`` and ``top_k`` (of the
    teacher's tokens, use so many; None: all). ``counts``: texts, of which too "long" or with "nothing" to learn; how
    many "candidates" there are.
    """

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        columns = {"tokens": Ragged(), "targets": Ragged("b"), "candidates": Ragged(), "logits": Ragged("f")}
        samples, fingerprint = Samples(columns, Counts()), self.tokenizer.fingerprint()
        for record in lines.records():
            if record.fields.get("tokenizer", fingerprint) != fingerprint:
                record.fail("'tokenizer' is another than the student's, which would read these tokens as other texts")
            text, learnt = self._text(record)
            candidates, logits = self._teacher(record, learnt)
            samples.counts["texts"] += 1
            samples.counts["candidates", candidates.shape[1]] += 1
            if not len(learnt):
                samples.counts["nothing"] += 1
            elif len(text) > self.settings["seq_length"]:
                samples.counts["long"] += 1
            else:
                targets = np.zeros(len(text), np.int8)
                targets[learnt + 1] = 1
                for column, values in zip(columns.values(), (text, targets, candidates, logits), strict=True):
                    column.append(values.ravel().tolist())
        return samples

    def _text(self, record: Record) -> tuple[Array, Array]:
        """The ids of a line's text as far as any is learnt, and the positions whose prediction is."""
        tokens = _numbers(record, "tokens", "i", 1)
        labels, mask = (_numbers(record, key, kinds, 1, len(tokens)) for key, kinds in _BESIDE_TOKENS)
        if not np.isin(mask, (0, 1)).all():
            record.fail("'loss_mask' should be made of zeros and ones")
        learnt = mask.nonzero()[0]
        end = learnt[-1] + 1 if len(learnt) else 0  # what follows pads the line
        if end and (others := (labels[: end - 1] != tokens[1:end]).nonzero()[0]).size:
            t = others[0]
            record.fail(
                f"labels[{t}] is {labels[t]} and tokens[{t + 1}] {tokens[t + 1]}: they should be the same token"
            )
        text = np.append(tokens[:end], labels[end - 1 : end])
        self._check_ids(record, "tokens", text)
        return text, learnt

    def _teacher(self, record: Record, learnt: Array) -> tuple[Array, Array]:
        """The teacher's most likely tokens where something is learnt, the most likely ones first, and their logits."""
        count = len(record.fields["tokens"])
        ids, logits = (_numbers(record, key, kinds, 2, count) for key, kinds in _OF_TEACHER)
        if ids.shape != logits.shape:
            record.fail(f"'topk_token_ids' and 'topk_logits' have {ids.shape[1]} and {logits.shape[1]} at a position")
        if (asked := self.settings["top_k"]) is not None and ids.shape[1] < asked:
            record.fail(f"'topk_logits' has {ids.shape[1]} at a position, fewer than model.data.top_k={asked}")
        with np.errstate(over="ignore"):
            ids, logits = ids[learnt], logits[learnt].astype(np.float32)
        if not np.isfinite(logits).all():
            record.fail("'topk_logits' should be finite numbers")
        self._check_ids(record, "topk_token_ids", ids)
        if (np.diff(np.sort(ids)) == 0).any():
            record.fail("'topk_token_ids' has a token twice at a position")
        best = np.argsort(-logits, axis=1, kind="stable")[:, :asked]
        return np.take_along_axis(ids, best, 1), np.take_along_axis(logits, best, 1)

    def _check_ids(self, record: Record, key: str, ids: Array) -> None:
        size = self.settings["vocab_size"]
        if (strange := ids[(ids < 0) | (ids >= size)]).size:
            record.fail(
                f"{key!r} has {strange[0]}, which is not in the student's vocabulary of {size}: are these the logits "
                "of a teacher with its tokenizer?"
            )

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        if len(found := sorted(k for (k,) in seen(counts, "candidates"))) > 1:
            raise DataError(
                f"{', '.join(map(str, paths))}: lines have {found[0]} to {found[-1]} logits at a position: set "
                f"model.data.top_k={found[0]} to use as many of each"
            )
        report_dropped(counts["nothing"], counts["texts"], "texts", "without a token to learn", paths)
        left = counts["texts"] - counts["nothing"]
        report_dropped(counts["long"], left, "texts", longer_than(self.settings["seq_length"]), paths)


_BESIDE_TOKENS = (("labels", "i"), ("loss_mask", "ifb"))
_OF_TEACHER = (("topk_token_ids", "i"), ("topk_logits", "if"))


def _numbers(record: Record, key: str, kinds: str, dimensions: int, length: int | None = None) -> Array:
    """Numbers of a line, of numpy's ``kinds``: a list, or a list of lists of the same length. Raises DataError."""
    meaning = f"a list of {'lists of ' if dimensions > 1 else ''}{'integers' if kinds == 'i' else 'numbers'}"
    given = record.require(key, list, meaning)
    try:
        numbers = np.asarray(given)
    except ValueError:  # lists of several lengths
        numbers = np.empty(0)
    if not numbers.size or numbers.dtype.kind not in kinds or numbers.ndim != dimensions:
        record.fail(f"{key!r} should be {meaning}{', as long as each other' if dimensions > 1 else ''}")
    if length is not None and len(numbers) != length:
        record.fail(f"{key!r} is of {len(numbers)} positions, and 'tokens' of {length}")
    return numbers
