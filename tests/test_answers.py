"""Right answers: the lines' own rules decide what a response says, numbers are compared by value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nemo_style_aligner.data.answers import find_answer, is_right, problem_of

AFTER = "after ####"


def line(answer: Any, rule: str | None) -> dict[str, Any]:
    return {"text": "Q", "answer": answer} | ({} if rule is None else {"answer_extraction": rule})


@pytest.mark.parametrize(
    "response, answer, rule",
    [
        ("2 + 5 = 7\n#### 7", "7", AFTER),
        ("2 + 5 = 7\n#### 7", "7", None),
        ("#### 5, no:\n#### 1,234", "1234", AFTER),
        ("#### 7.", 7, AFTER),
        ("#### -$7.00", "-7", AFTER),
        ("#### $-7", "-7", AFTER),
        ("#### \\$1,000", "1000", AFTER),
        ("#### **7**", "7", AFTER),
        ("####\n7 apples\nThat is it.", "7.0", AFTER),
        ("a\n#### 72", "He sold 7 and 65.\n#### 72", AFTER),  # the worked answer itself
        ("so $x = \\boxed{7}$", "7", "boxed"),
        ("\\boxed{6} or rather \\boxed{\\frac{7}{2}}", "3.5", None),
        ("\\boxed{7\\text{ cm}}", "7", "boxed"),
        ("\\boxed{1{,}000}", "1000", "boxed"),
        ("\\boxed{x^{2}}", "x^{2}", "boxed"),
        ("The answer is 1,000.", "1000", "last number"),
        ("4 degrees, falling by 9: it is −5", "-5", "last number"),
        ("Thus the answer is: 7 dollars", "$7", "after answer is:"),
        (" 43", "43", "whole"),
        ("Paris.", "Paris", "whole"),
        ("seven", ["7", "seven"], None),
        ("50%", "50%", None),
    ],
)
def test_right(response: str, answer: Any, rule: str | None) -> None:
    assert is_right(response, line(answer, rule))


@pytest.mark.parametrize(
    "response, answer, rule",
    [
        ("7\n#### 8", "7", AFTER),
        ("2 + 5 = 7", "7", AFTER),
        ("2 + 5 = 7", "7", None),  # only a rule may look for a last number
        ("so it is 7", "7", "whole"),
        ("#### 7 or 8", "7", AFTER),
        ("#### 7 + 1 = 8", "7", AFTER),
        ("#### 77", "7", AFTER),
        ("#### ", "7", AFTER),
        ("", "7", None),
        ("-7", "7", None),
        ("7 km", "7 miles", None),
        ("7,5", "75", None),
        ("3.14", "314", None),
        ("paris", "Paris", None),
        ("page-5", "-5", "last number"),
        ("\\boxed{7", "7", "boxed"),
        pytest.param("\\boxed{" * 50_000, "7", "boxed", id="repeated"),  # as a model may: looked through once
        ("1/0", "1", None),
        ("1" * 5000, "1", None),
    ],
)
def test_wrong(response: str, answer: Any, rule: str | None) -> None:
    assert not is_right(response, line(answer, rule))


def test_what_cannot_be_compared_is_said() -> None:
    for answer in (None, True, [], {"a": 1}, [None], " ", math.nan):
        assert "'answer' should be a text, a number or a list" in str(problem_of(line(answer, None)))
    for rule in ("regex", "after ", "Boxed"):
        assert "'answer_extraction' should be 'whole', 'after MARKER'" in str(problem_of(line("7", rule)))
        with pytest.raises(ValueError, match="answer_extraction"):
            is_right("7", line("7", rule))
    assert problem_of(line("7", AFTER)) is None
    assert find_answer("a\n#### 7 apples") == "7 apples" and find_answer(" 7 ") == "7"
    assert find_answer("7", AFTER) is None
