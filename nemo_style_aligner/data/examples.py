"""Examples of data as a person reads them: the text that the tokens stand for, with what is learnt marked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_style_aligner.data.datasets import ComparisonItem, PreferenceItem, PromptItem, RegressionItem
from nemo_style_aligner.data.sft import SFTItem
from nemo_style_aligner.data.tokenizer import Tokenizer

FIRST_EXAMPLE = "the first training example, what is learnt in double brackets:\n%s"
"""The jobs' line of log that `for_log` fills."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_CLIPPED = 600  # characters of each end of a text that a log shows


@dataclass(frozen=True)
class Example:
    """A text of a dataset's item.

    Attributes:
        name: what it is: prompt, example, chosen, rejected, labelled text.
        token_ids: its tokens.
        learnt: whether each token is learnt; None where nothing is, or where all of the text is scored.
    """

    name: str
    token_ids: Sequence[int]
    learnt: Sequence[bool] | None = None


def texts_of(item: Any) -> list[Example]:
    """The texts of an item of any of the datasets."""
    if isinstance(item, SFTItem):
        return [Example("example", item.token_ids, [bool(target) for target in item.targets])]
    if isinstance(item, ComparisonItem):
        return [Example("chosen", item.chosen_ids), Example("rejected", item.rejected_ids)]
    if isinstance(item, PreferenceItem):
        texts = zip(item.names, item.token_ids, item.prompt_lengths, strict=True)
        return [Example(name, ids, [place >= prompt for place in range(len(ids))]) for name, ids, prompt in texts]
    if isinstance(item, RegressionItem):
        return [Example(f"text labelled {', '.join(f'{label:g}' for label in item.labels)}", item.token_ids)]
    assert isinstance(item, PromptItem)
    return [Example("prompt", item.token_ids)]


def _pieces(example: Example, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is learnt; special tokens are spelt out."""
    learnt = example.learnt or [False] * len(example.token_ids)
    done, start = "", 0
    for is_learnt, run in itertools.groupby(learnt):
        start += len(list(run))
        # Of all tokens so far: a sentencepiece tokenizer drops the space in front of what it is given.
        text = tokenizer.ids_to_text(example.token_ids[:start], keep_special=True)
        yield text[len(done) :], is_learnt
        done = text


def summary(example: Example, tokenizer: Tokenizer) -> str:
    """Lengths, and how the text begins and ends."""
    ids = example.token_ids
    said = [f"{len(ids)} tokens"]
    if example.learnt is not None:
        said.append(f"{sum(example.learnt)} learnt")
    said.append("begins with BOS" if ids[0] == tokenizer.bos_id else "no BOS")
    learnt_ids = [i for i, is_learnt in zip(ids, example.learnt or [True] * len(ids), strict=True) if is_learnt]
    last = (learnt_ids or ids)[-1]
    token = tokenizer.ids_to_text([last], keep_special=True)
    of = "ends with" if example.learnt is None else "the last that is learnt is"
    said.append(f"{of} {token!r}{', which ends responses' if last in tokenizer.stop_ids else ''}")
    return ", ".join(said)


def shown(example: Example, tokenizer: Tokenizer) -> str:
    """The text, with marks around what is learnt; control characters, which a terminal would obey, are spelt."""
    marked = (f"⟦{text}⟧" if is_learnt else text for text, is_learnt in _pieces(example, tokenizer))
    return _CONTROL.sub(lambda character: f"\\x{ord(character[0]):02x}", "".join(marked))


def has_end(example: Example, tokenizer: Tokenizer, end_strings: Sequence[str]) -> bool:
    """Whether the last token that is learnt, or of a text that is scored, is one at which generation stops."""
    ids = [i for i, learnt in zip(example.token_ids, example.learnt or itertools.repeat(True)) if learnt]  # noqa: B905
    if not ids:  # an empty response
        return False
    return ids[-1] in tokenizer.stop_ids or tokenizer.ids_to_text(ids, keep_special=True).endswith(tuple(end_strings))


def for_log(item: Any, tokenizer: Tokenizer) -> str:
    """A few lines on an item: each of its texts on one line, long ones clipped."""
    lines = []
    for example in texts_of(item):
        text = shown(example, tokenizer).replace("\n", "\\n")
        if len(text) > 2 * _CLIPPED:
            text = f"{text[:_CLIPPED]} ... {text[-_CLIPPED:]}"
        lines.append(f"{example.name} ({summary(example, tokenizer)}): {text}")
    return "\n".join(lines)
