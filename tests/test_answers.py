"""Right answers: the lines' own rules decide what a response says, numbers are compared by value."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from nemo_style_aligner.trainer.data.answers import find_answer, is_right, problem_of

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


SAME = [
    ("10 000", "10000"),
    (r"10\,000", "10000"),
    ("10{,}000", "10000"),
    ("10'000", "10000"),
    ("10\u202f000", "10000"),
    ("12,34,567", "1234567"),  # India
    ("1.234.567,8", "1234567.8"),  # Germany
    ("5,000,000", "5 million"),
    ("$5 million", "5000000"),
    ("2 dozen", "24"),
    ("11/2", r"5\frac{1}{2}"),
    ("1.5", r"1\frac{1}{2}"),
    (r"1\dfrac12", "3/2"),
    ("3½", "3.5"),
    ("1 and 1/2", "1 1/2"),
    ("-½", "-0.5"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"\frac1{2}", "0.5"),
    ("7²", "49"),
    ("2^{10}", "1024"),
    ("10^5", "100,000"),
    (r"2\times10^{3}", "2000"),
    ("2 x 10^3", "2e3"),
    ("2·10⁻³", "0.002"),
    (r"\sqrt{9}", "3"),
    ("√(9/4)", "√(9/4)"),
    (r"2\sqrt{3}", "2√3"),
    (r"3\pi", "3π"),
    (r"\left( 1, 2 \right)", "( 1, 2 )"),
    ("50%", "0.5"),
    (r"50\%", "50 percent"),
    ("$5", "US$5"),
    (r"\$5", "5 dollars"),
    ("$5 dollars", "5"),
    ("5 cents", "$0.05"),
    ("$5/day", "5 dollars per day"),
    ("7 km", "7000 m"),
    ("7 km", "7"),
    ("90 km/h", "25 m/s"),
    ("3 square meters", "3 m²"),
    (r"5\text{ cm}^2", "5 cm^2"),
    ("5 lb", "5 pounds"),
    (r"60^\circ", "60 degrees"),
    ("20°C", "20 degrees Celsius"),
    ("2m", "2 m"),
]
DIFFERENT = [
    *[("5i", "5"), ("2x", "2"), ("2m", "2"), ("2t", "2"), ("3π", "3"), ("5!", "5"), ("2√3", "2"), ("5th", "5")],
    *[("5 million", "5"), ("5 lakh", "5"), ("5k", "5"), ("5 foo", "5"), ("5 hundredths", "5"), ("3 halves", "3")],
    *[("7²", "7"), ("7 squared", "7"), ("2^x", "2"), ("101_2", "101"), ("3½", "3"), ("11/2", r"1\frac{1}{2}")],
    *[("2\\cdot 3", "2"), ("12*7", "84"), ("2 3", "23"), ("1 100/200", "1.5"), ("1,00", "100"), ("10, 000", "10000")],
    *[("50%", "50"), ("$7", "€7"), ("7 km", "7 m"), ("5 cm^2", "5 cm"), ("5 apples", "5 oranges"), ("5-6", "5")],
    *[("~5", "5"), ("x*", "x"), ("**", "``"), ("$C$5", "5"), ("1/3", "0.333333"), ("<=5", "5"), ("±5", "5")],
    *[("7:30", "7"), ("5 or 6", "5"), ("0^-1", "0"), ("1e999", "1"), ("9^999", "9"), ("x + 1", "x - 1")],
    (r"\frac{1}{2}x", r"\frac{1}{2x}"),
]


@pytest.mark.parametrize("one, other", SAME)
def test_a_value_is_the_same_in_all_its_notations(one: str, other: str) -> None:
    assert is_right(one, line(other, None)) and is_right(f"\\boxed{{{other}}}", line(one, None))


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_nothing_behind_a_number_is_ignored(one: str, other: str) -> None:
    assert not is_right(one, line(other, None)) and not is_right(other, line(one, None))


@pytest.mark.parametrize(
    "response, found",
    [
        *[("I have 4", "4"), ("so -3/4", "-3/4"), ("it is 10^5.", "10^5"), (r"so $-\frac34$.", "-3/4")],
        *[("10 - 7", "7"), ("x = - 5", "- 5"), ("5–6", "6"), ("it is -$3", "-$3"), ("(-3)", "-3"), ("f(7)", "7")],
        *[("It is **7**.", "7"), ("It is 5!", "5"), ("x is 2x", "2x"), ("a 7-year-old", "7"), ("3:4", "3:4")],
        *[("5 million people", "5 million people"), ("1½ cups", "1 1/2 cups"), ("7 apples left", "7 apples")],
        *[("12/25/2024", "12/25/2024"), ("3,14", "3,14"), ("3, 4", "4"), ("H2O", None), ("2√3", "2√3")],
    ],
)
def test_the_last_number_is_taken_with_all_that_belongs_to_it(response: str, found: str | None) -> None:
    assert find_answer(response, "last number") == found


def test_the_right_answer_is_read_whole() -> None:
    answer = line("3/4", "last number")
    assert [is_right(text, answer) for text in ("I have 4", "so -3/4", "it is 0.75")] == [False, False, True]
    assert not is_right("it is 5", line("10^5", "last number")) and is_right("100000", line("10^5", "last number"))
    assert is_right("so: 3", line("3", "after :")) and problem_of(line("3", "after :")) is None
    for unreachable, rule in (("3:4", "after :"), ("Paris", "last number"), ("1 {", "boxed"), ("<think>", None)):
        assert "which no response can have" in str(problem_of(line(unreachable, rule))), unreachable
    assert problem_of(line(["seven", "7"], "last number")) is None


@pytest.mark.parametrize("rule", [None, "boxed"])
def test_only_what_is_said_after_the_thought_counts(rule: str | None) -> None:
    three = line("3", rule)
    for tags in ("<think>{}</think>", "<thinking>{}</thinking>", "[THINK]{}[/THINK]", "◁think▷{}◁/think▷"):
        thought = tags.format(r"\boxed{4}")
        assert is_right(thought + r"\boxed{3}", three) and not is_right(thought, three)
        assert not is_right(tags.partition("{}")[0] + r"\boxed{3}", three)  # cut off
    begun = {**three, "text": "What is 1+2?<think>\n"}  # by the chat template
    assert is_right(r"hm</think>\boxed{3}", begun) and not is_right(r"\boxed{3}", begun)
    assert is_right(r"\boxed{3}", {**three, "text": "Put your thought between <think> and </think>."})


def test_the_last_complete_mark_counts() -> None:
    for response, answer in (
        (r"#### 5, so \boxed{6}", "6"),
        ("\\boxed{6}\n#### 5", "5"),
        (r"\boxed{6} or \boxed{7", "6"),
        ("#### 5\n####", "5"),
        (r"#### \boxed{5}", "5"),
    ):
        assert is_right(response, line(answer, None)), response
    assert not is_right(r"#### 5, so \boxed{6}", line("5", None))


@pytest.mark.parametrize("part", ["½", "1 ", "1,", "1 000", r"\frac{", r"\text{", "^{", "####", "<think>", "(1^"])
def test_any_response_is_read_in_linear_time(part: str) -> None:
    began = time.monotonic()
    for rule in (None, "last number"):
        is_right(part * 20_000, line("7", rule))
    assert time.monotonic() - began < 20


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
