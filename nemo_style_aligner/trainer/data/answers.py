"""Right answers: where a response has its answer, by the rule of its prompt's own line, and whether it is right.

A line's ``answer`` is the right one, or a list of right ones. It is read whole, or by its own mark (``####`` or
``\\boxed{}``) where it is a worked answer. Its ``answer_extraction`` says which part of a response is compared with it:

    "whole"          all of it
    "after MARKER"   what stands in the line after the last MARKER ("after ####" for GSM8K)
    "boxed"          the content of the last \\boxed{...}
    "last number"    the last number in it, with all that belongs to it

Without that key it is what the response marks last, by ``####`` or ``\\boxed{}``, or all of it if nothing is marked.
Only what comes after the last thought (``<think>...</think>``) counts: a response that ends in a thought has no answer.

Numbers are compared by their values and units (`quantities`), other answers as texts, without white space and a full
stop at their ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nemo_style_aligner.trainer.data.quantities import last_quantity, plain, quantity

ANSWER, EXTRACTION = "answer", "answer_extraction"
"""Keys of a prompt's line."""

_HASHES = "####"
_BRACE = re.compile(r"(\\f?boxed\s*)?\{|\}")
_THOUGHT = re.compile(
    r"[<◁]/?(?:seed:)?(?:think(?:ing)?|thoughts?|reasoning)[>▷]|\[/?think\]|<\|(?:begin|end)_of_thought\|>",
    re.IGNORECASE,
)


def is_right(response: str, line: Mapping[str, Any]) -> bool:
    """Whether a response has the right answer of its prompt's ``line``, by the line's own rule.

    Raises:
        ValueError: the line has no answer, or another rule than those of this module.
    """
    if (problem := _problem_of_form(line)) is not None:
        raise ValueError(problem)
    given = given_answer(response, line)
    return given is not None and any(verdict(given, right) for right in right_answers(line))


def problem_of(line: Mapping[str, Any]) -> str | None:
    """Why responses to this line cannot be compared, None if they can."""
    if (problem := _problem_of_form(line)) is not None:
        return problem
    if any(is_right(_said(right, line.get(EXTRACTION)), {**line, "text": ""}) for right in right_answers(line)):
        return None
    rule = f" by {EXTRACTION}={line[EXTRACTION]!r}" if line.get(EXTRACTION) is not None else ""
    return f"{ANSWER!r} is {line[ANSWER]!r:.60}, which no response can have{rule}: give what the rule would find"


def _problem_of_form(line: Mapping[str, Any]) -> str | None:
    if ANSWER not in line:
        return f"key {ANSWER!r} is missing (a text, a number or a list of them); the keys are {', '.join(line)}"
    answers = line[ANSWER] if isinstance(line.get(ANSWER), list) else [line.get(ANSWER)]
    if not answers or not all(map(_is_answer, answers)):
        return f"{ANSWER!r} should be a text, a number or a list of them, not {line.get(ANSWER)!r:.60}"
    rule = line.get(EXTRACTION)
    is_known = isinstance(rule, str) and (rule in ("whole", "boxed", "last number") or bool(_marker(rule)))
    if rule is not None and not is_known:
        return f"{EXTRACTION!r} should be 'whole', 'after MARKER', 'boxed' or 'last number', not {rule!r:.60}"
    return None


def _is_answer(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else type(value) in (int, float) and abs(value) < math.inf


def _marker(rule: str) -> str:
    return rule.removeprefix("after ").strip() if rule.startswith("after ") else ""


def _said(answer: str, rule: str | None) -> str:
    """A response that says just this answer."""
    if rule == "boxed":
        return f"\\boxed{{{answer}}}"
    return f"{_marker(rule or '')} {answer}"


def right_answers(line: Mapping[str, Any]) -> list[str]:
    """The right answers of a line of which `problem_of` knows no problem, as texts."""
    answers = line[ANSWER]
    texts = map(str, answers if isinstance(answers, list) else [answers])
    return [text.strip() if (marked := last_marked(text)) is None else marked for text in texts]


# ---- in a response -------------------------------------------------------------------------------


def given_answer(response: str, line: Mapping[str, Any]) -> str | None:
    """What a response to a prompt's line gives as its answer, by the line's rule; None if it has none.

    A thought may have begun in the prompt, the line's ``text``.
    """
    tags = list(_THOUGHT.finditer(str(line.get("text", ""))))
    is_thinking = tags and not _is_end(tags[-1]) and not tags[-1].string[tags[-1].end() :].strip()
    return find_answer((tags[-1][0] if is_thinking else "") + response, line.get(EXTRACTION))


def find_answer(text: str, rule: str | None = None) -> str | None:
    """The part of a response that a rule takes for its answer; None if it has none.

    Without a rule: what is marked last, else all of it.
    """
    text = after_thoughts(text)
    if not text:
        return None
    if rule is None:
        return text if (marked := last_marked(text)) is None else marked
    if rule == "whole":
        return text
    if rule == "boxed":
        return _boxed(text)[1]
    return last_quantity(plain(text)) if rule == "last number" else _after(text, _marker(rule))[1]


def after_thoughts(text: str) -> str:
    """What a response says after its last thought; nothing if it ends in one."""
    last = None
    for last in _THOUGHT.finditer(text):  # noqa: B007
        pass
    if last is None:
        return text.strip()
    return text[last.end() :].strip() if _is_end(last) else ""


def _is_end(tag: re.Match[str]) -> bool:
    return "/" in tag[0] or "end_" in tag[0]


def last_marked(text: str) -> str | None:
    """The last whole answer that is marked by ``####`` or ``\\boxed{}``; None if there is none."""
    return max(_after(text, _HASHES), _boxed(text), key=lambda found: found[0])[1]


def _after(text: str, marker: str) -> tuple[int, str | None]:
    """Where the last marker is that something stands behind, and the first line of that."""
    begin = text.rstrip().removesuffix(marker).rfind(marker)
    rest = text[begin + len(marker) :].strip()
    return (begin, rest.splitlines()[0].rstrip()) if begin >= 0 and rest else (-1, None)


def _boxed(text: str) -> tuple[int, str | None]:
    """Where the last ``\\boxed{...}`` is whose braces are closed, and its content, in one pass: models may repeat it
    for ever.
    """
    opened: list[int | None] = []  # of each brace that is not closed, where a box's content begins
    last, content = -1, None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[1] is None else brace.end())
        elif opened and (begin := opened.pop()) is not None and begin > last:
            last, content = begin, text[begin : brace.start()].strip()
    return last, content


# ---- compared ------------------------------------------------------------------------------------


def verdict(given: str, right: str) -> bool | None:
    """Whether two answers say the same; None if they may, being other texts that are not both quantities."""
    given, right = ((plain(text) or text).removesuffix(".").rstrip() for text in (given, right))
    one, other = quantity(given), quantity(right)
    if one is not None and other is not None:
        return one.equals(other)
    return True if given == right else None
