"""Right answers: where a response has its answer, by the rule of its prompt's own line, and whether it is right.

A line's ``answer`` is the right one, or a list of right ones. Its ``answer_extraction`` says which part of a response
is compared with it:

    "whole"          all of it
    "after MARKER"   what stands in the line after the last MARKER ("after ####" for GSM8K)
    "boxed"          the content of the last \\boxed{...}
    "last number"    the last number in it

Without that key, a response is right if all of it is, or what it marks by ``####`` or ``\\boxed{}`` as its answer.

Numbers are compared by their values: 7, 7.0, $7, "7." and "7 apples" are the same, and so are 1,000 and 1000. Two units
must be the same; one alone is ignored. Other answers are compared as texts, without white space and a full stop at
their ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANSWER, EXTRACTION = "answer", "answer_extraction"
"""Keys of a prompt's line."""

_MARKED = ("after ####", "boxed")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_BRACE = re.compile(r"(\\f?boxed\s*)?\{|\}")
_LAST_NUMBER = re.compile(rf"(?:(?<![\w.])[-−])?(?:{_DIGITS})")
_WORD = r"[^\W\d_][^\s\d=]*"
_QUANTITY = re.compile(
    r"(?P<minus>[-−+]?)\s*[$€£¥]?\s*(?P<inner>[-−]?)"
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?\d{{1,3}})?(?:\s*/\s*(?P<divisor>\d+))?"
    rf"\s*(?P<unit>[%°]?(?:{_WORD}(?:\s{_WORD}){{0,2}})?)\s*\.?"
)
_LONGEST_NUMBER = 100  # characters; what is longer is compared as a text
_LATEX = (
    (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2"),
    (r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}", r"\1"),
    (r"\{,\}|,\\!", ","),
    (r"\\[,;! ]|~", " "),
    (r"\\([$%])", r"\1"),
)  # what TeX writes around the same number


def is_right(response: str, line: Mapping[str, Any]) -> bool:
    """Whether a response has the right answer of its prompt's ``line``, by the line's own rule.

    Raises:
        ValueError: the line has no answer, or another rule than those of this module.
    """
    if (problem := problem_of(line)) is not None:
        raise ValueError(problem)
    rule = line.get(EXTRACTION)
    rules = ("whole", *_MARKED) if rule is None else (rule,)
    return any(
        given is not None and _same(given, found if (found := find_answer(right, rule)) is not None else right)
        for rule in rules
        for given in (find_answer(response, rule),)
        for right in right_answers(line)
    )


def problem_of(line: Mapping[str, Any]) -> str | None:
    """Why responses to this line cannot be compared, None if they can."""
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


def right_answers(line: Mapping[str, Any]) -> list[str]:
    """The right answers of a line of which `problem_of` knows no problem, as texts."""
    answers = line[ANSWER]
    return [str(answer) for answer in (answers if isinstance(answers, list) else [answers])]


def find_answer(text: str, rule: str | None = None) -> str | None:
    """The part of ``text`` that a rule takes for its answer; None if it has none.

    Without a rule: what is marked, else all of it.
    """
    if rule is None:
        marked = (find_answer(text, rule) for rule in _MARKED)
        return next((found for found in marked if found is not None), text.strip())
    if rule == "whole":
        return text.strip()
    if rule == "boxed":
        return _boxed(text)
    if rule == "last number":
        numbers = _LAST_NUMBER.findall(text)
        return numbers[-1] if numbers else None
    _, marker, rest = text.rpartition(_marker(rule))
    return next(iter(rest.strip().splitlines()), "").strip() if marker else None


def _boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` whose braces are closed, in one pass: models may repeat it for ever."""
    opened: list[int | None] = []  # of each brace that is not closed, where a box's content begins
    last, content = -1, None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[1] is None else brace.end())
        elif opened and (begin := opened.pop()) is not None and begin > last:
            last, content = begin, text[begin : brace.start()].strip()
    return content


def _same(given: str, right: str) -> bool:
    given, right = _tidy(given), _tidy(right)
    one, other = _quantity(given), _quantity(right)
    if one is None or other is None:
        return given.removesuffix(".").rstrip() == right.removesuffix(".").rstrip()
    return one[0] == other[0] and (one[1] == other[1] or not one[1] or not other[1])


def _tidy(text: str) -> str:
    """Without the marks of Markdown and TeX that surround an answer."""
    text = text.strip().strip("*`").strip()
    for pattern, plain in _LATEX:
        text = re.sub(pattern, plain, text)
    for begin, end in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            text = text[len(begin) : -len(end)]
    return " ".join(text.split())


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """The value and the unit ("" for none) of a text that is a number; None for others."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None or (match["divisor"] is not None and not int(match["divisor"])):
        return None
    value = Fraction(match["digits"].replace(",", "") + (match["exponent"] or ""))
    value /= int(match["divisor"] or 1)
    is_negative = (match["minus"] in ("-", "−")) != bool(match["inner"])
    return -value if is_negative else value, match["unit"].rstrip(".").casefold()
