"""Examples of data as a person reads them: the text that the tokens stand for, with what is learnt marked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_style_aligner.engine.text.chat_marks import without_spaces
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.data.datasets import (
    ComparisonItem,
    JudgedItem,
    PreferenceItem,
    PromptItem,
    RegressionItem,
)
from nemo_style_aligner.trainer.data.sft import SFTItem
from nemo_style_aligner.wording import spelt

FIRST_EXAMPLE = "the first training example, what is learnt in double brackets:\n%s"
"""The jobs' line of log that `for_log` fills."""

_CLIPPED = 600  # characters of each end of a text that a log shows
# Keys whose values are not text of their own; tools and calls are proved to be in the text as it is rendered.
_NO_TEXT = ("role", "from", "type", "mask", "tools", "tool_calls", "functions", "function_call", "tokenizer", "teacher")
_MOST_STRINGS = 2000  # that are looked for
_LONG = 20  # characters of a text that does not stand somewhere twice by chance


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
        return [_response(name, ids, prompt) for name, ids, prompt in texts]
    if isinstance(item, JudgedItem):
        return [_response("good" if item.is_good else "bad", item.token_ids, item.prompt_length)]
    if isinstance(item, RegressionItem):
        return [Example(f"text labelled {', '.join(f'{label:g}' for label in item.labels)}", item.token_ids)]
    assert isinstance(item, PromptItem)
    return [Example("prompt", item.token_ids)]


def _response(name: str, token_ids: Sequence[int], prompt_length: int) -> Example:
    return Example(name, token_ids, [place >= prompt_length for place in range(len(token_ids))])


class Piece(NamedTuple):
    """A piece of a text; special tokens, which are markup and no text, are pieces of their own."""

    text: str
    is_learnt: bool
    is_special: bool


def _pieces(example: Example, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text in pieces; special tokens are spelt out."""
    learnt = example.learnt or [False] * len(example.token_ids)
    special = [i in tokenizer.markup_ids for i in example.token_ids]
    done, start = "", 0
    for (is_learnt, is_special), run in itertools.groupby(zip(learnt, special, strict=True)):
        start += len(list(run))
        # Of all tokens so far: a sentencepiece tokenizer drops the space in front of what it is given.
        text = tokenizer.ids_to_text(example.token_ids[:start], keep_special=True)
        yield Piece(text[len(done) :], is_learnt, is_special)
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


def shown(example: Example, tokenizer: Tokenizer, paint: Callable[[Piece], str] = lambda piece: piece.text) -> str:
    """The text, with marks around what is learnt; ``paint`` may colour pieces."""
    marked = []
    pieces = (piece._replace(text=spelt(piece.text)) for piece in _pieces(example, tokenizer))
    for is_learnt, run in itertools.groupby(pieces, lambda piece: piece.is_learnt):
        text = "".join(map(paint, run))
        marked.append(f"⟦{text}⟧" if is_learnt else text)
    return "".join(marked)


def changes(lines: Sequence[Mapping[str, Any]], examples: Sequence[Example], tokenizer: Tokenizer) -> list[str]:
    """What of lines of a file is not in the texts that were made of them, and what is in them twice; in words."""
    given = [string for line in lines for string in _strings("", line)]
    if len(given) > _MOST_STRINGS:
        return [f"{len(given):,} texts are too many to look for each of them in what was made of them"]
    texts = [without_spaces(tokenizer.ids_to_text(example.token_ids, keep_special=True)) for example in examples]
    flat = [(name, without_spaces(string)) for name, string in given]
    missing = dict.fromkeys(name for name, string in flat if not any(string in text for text in texts))
    found = [f"not in the text, or not as it stands there: {', '.join(missing)}"] if missing else []
    whole = "\0".join(string for _, string in flat)
    for name, string in dict.fromkeys(flat):
        times = max(text.count(string) for text in texts) if len(string) >= _LONG else 0
        if times > whole.count(string):
            found.append(f"{name} stands in the text {times} times")
    markup = () if tokenizer.format.special_tokens_as_text else sorted(tokenizer.markup_ids)
    special = [tokenizer.ids_to_text([i], keep_special=True) for i in markup]
    for name, string in given:
        if "[" in name and (own := [token for token in special if token in string]):
            found.append(f"{name} has special tokens of its own ({', '.join(own)}): was a template applied before?")
    for example in examples:
        pairs = itertools.pairwise(example.token_ids)
        twice = {first for first, second in pairs if first == second and first in tokenizer.markup_ids}
        found += (f"{tokenizer.ids_to_text([i], keep_special=True)} stands twice in a row" for i in sorted(twice))
    return list(dict.fromkeys(found))


def _strings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The texts in a line's value, with names such as ``messages[0].content``."""
    if isinstance(value, str) and value.strip():
        yield name, value
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _strings(f"{name}[{i}]", entry)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if key not in _NO_TEXT:
                yield from _strings(f"{name}.{key}".lstrip("."), entry)


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
