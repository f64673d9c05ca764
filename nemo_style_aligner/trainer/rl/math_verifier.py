"""Whether a response's answer is mathematically the right one, by the package ``math-verify``, within limits.

It is computed in processes of its own: what a model writes may keep computer algebra busy for ever or fill the memory,
and the package's own limits are signals, which need a process's main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import queue
import re
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from nemo_style_aligner.engine.text.helper_process import HelperProcess
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.data.answers import EXTRACTION, given_answer, is_right, right_answers, verdict
from nemo_style_aligner.trainer.data.answers import problem_of as problem_of_answer
from nemo_style_aligner.trainer.data.quantities import Unit, extension, last_quantity, plain, quantity, unit

logger = logging.getLogger(__name__)

_SECONDS = 5  # for a response; usual ones take hundredths
_KILL_SECONDS = 10.0  # for one in which a signal is not noticed
_START_SECONDS = 120.0  # importing sympy
_MEMORY_BYTES = 4 << 30
_MOST_PLACES = 50  # of a decimal
_UNREADABLE = "the right answer {!r:.60} cannot be read as mathematics"
MAX_SECONDS = _START_SECONDS + 2 * _KILL_SECONDS
"""What verifying a response may take at most."""


class MathVerifyError(UserError, RuntimeError):
    """``math-verify`` cannot be used; the message says why."""


class MathVerifier:
    """Rewards of responses to mathematical questions: 1 for the right answer of the prompt's line, else 0.

    `data.answers` decides where it knows both values, ``math-verify`` on all other expressions. Where neither a rule
    nor a mark says what a response's answer is, it is the last formula, or else the last number. A response that
    ``math-verify`` cannot decide on within its limits is not right; the part ``undecided`` counts such responses.

    Raises:
        MathVerifyError: the package is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathVerifyError("math_verify needs the package of that name: pip install 'math-verify==0.9.*'")
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        self._readable: set[str] = set()

    def problem_of(self, line: Mapping[str, Any]) -> str | None:
        """Why responses to this line cannot be verified, None if they can. Raises `MathVerifyError`."""
        if (problem := problem_of_answer(line)) is not None:
            return problem
        return next((problem for right in right_answers(line) if (problem := self._problem_of_answer(right))), None)

    def _problem_of_answer(self, right: str) -> str | None:
        if right in self._readable or quantity(plain(right)) is not None:
            return None
        formula = _formula(right)
        found = {"unread": 0} if formula is None else self._ask([formula.latex], "")
        if found is None:
            return f"the right answer {right!r:.60} takes math-verify too long"
        if "unread" in found:
            return _UNREADABLE.format(right)
        self._readable.add(right)
        return None

    def __call__(self, prompt: str, response: str, line: Mapping[str, Any]) -> dict[str, float]:
        """The reward of a response, as a reward function gives it; thread-safe.

        Raises:
            ValueError: the line has no right answer, or it is nothing mathematical.
            MathVerifyError: a process cannot be started.
        """
        if is_right(response, line):
            return {"reward": 1.0, "undecided": 0.0}
        given = _answer_in(response, line)
        formula = None if given is None else _formula(given)
        verdicts = {} if given is None else {right: verdict(given, right) for right in right_answers(line)}
        if any(verdicts.values()):
            return {"reward": 1.0, "undecided": 0.0}
        golds = {right: self._gold(right) for right in verdicts}
        asked = [] if formula is None else [right for right, gold in golds.items() if gold.may_equal(formula)]
        if formula is None or not asked:
            return {"reward": 0.0, "undecided": 0.0}
        found = self._ask([golds[right].latex for right in asked], formula.latex)
        if found is None:
            logger.warning("math-verify could not decide within its limits; it counts as wrong: %.200r", given)
        elif "unread" in found:
            raise ValueError(_UNREADABLE.format(asked[found["unread"]]))
        return {"reward": float(found is not None and found["right"]), "undecided": float(found is None)}

    def _gold(self, right: str) -> _Formula:
        if (formula := _formula(right)) is None:
            raise ValueError(_UNREADABLE.format(right))
        return formula

    def _ask(self, right: Sequence[str], given: str) -> dict[str, Any] | None:
        """The verdict; None if the process has ended, is silent or gave up. Only the last of these is asked again."""
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _started()
        process.send({"right": list(right), "given": given})
        found: dict[str, Any] | None = process.answer(_KILL_SECONDS)
        if found is not None:
            self._idle.put(process)
        return found or None

    def close(self) -> None:
        """End the processes that are idle. Others end with this one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def _started() -> HelperProcess:
    process = HelperProcess(__name__)
    process.send({"right": ["1"], "given": "1"})
    if process.answer(_START_SECONDS) is None:
        raise MathVerifyError(f"a process that imports math-verify did not start within {_START_SECONDS:g} s")
    return process


# ---- formulas ------------------------------------------------------------------------------------

_SPAN = re.compile(r"(?<!\\)\$\$?([^$]+)\$\$?|\\\(((?:(?!\\[()]).)*)\\\)|\\\[((?:(?!\\[\[\]]).)*)\\\]", re.DOTALL)
_WITH_WORDS = re.compile(r"(.*\S)\s*\\(?:text|mathrm)\s*\{([^{}]*)\}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Formula:
    latex: str
    unit: Unit
    is_decimal: bool = False

    def may_equal(self, other: _Formula) -> bool:
        """Whether ``math-verify`` can tell: not for two decimals, whose difference is known, nor for other units."""
        has_both = self.unit.dimensions and other.unit.dimensions
        is_known = self.is_decimal and other.is_decimal
        return not is_known and self.unit.agrees(other.unit) and (not has_both or self.unit.factor == other.unit.factor)


def _answer_in(response: str, line: Mapping[str, Any]) -> str | None:
    """What a response says is the answer: by the line's rule, else what is marked, else the last formula or number."""
    given, everything = given_answer(response, line), given_answer(response, {**line, EXTRACTION: "whole"})
    if line.get(EXTRACTION) is not None or given is None or given != everything:
        return given
    last = None
    for last in _SPAN.finditer(given):  # noqa: B007
        pass
    if last is None:
        return last_quantity(plain(given))
    return last[0] + extension(given[last.end() :])


def _formula(text: str) -> _Formula | None:
    """An answer as LaTeX without its unit; None if it is no formula, or one that ``math-verify`` reads as another."""
    text = text.strip().removesuffix(".").rstrip()
    if (number := quantity(plain(text))) is not None:
        decimal = _as_decimal(number.value)
        fraction = f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"
        return _Formula(decimal or fraction, number.unit, decimal is not None)
    if (span := _SPAN.match(text)) is not None and "$" not in text[span.end() :]:
        counted = unit(text[span.end() :])
        return None if counted is None else _formula_of(next(filter(None, span.groups())), counted)
    if (words := _WITH_WORDS.fullmatch(text)) is not None and (counted := unit(f" {words[2]}")) is not None:
        return _formula_of(words[1], counted)
    return _formula_of(text, Unit())


def _as_decimal(value: Fraction) -> str | None:
    """All digits of a number; None if they have no end. ``math-verify`` compares roots and thirds with rounded ones."""
    places = next((n for n in range(_MOST_PLACES) if 10**n % value.denominator == 0), None)
    if places is None:
        return None
    digits = str(abs(value.numerator) * 10**places // value.denominator).zfill(places + 1)
    point = len(digits) - places
    return "-" * (value < 0) + digits[:point] + ("." + digits[point:] if places else "")


def _formula_of(latex: str, counted: Unit) -> _Formula | None:
    """``math-verify`` leaves out a number's index, such as its base, primes, and the ending of an ordinal number."""
    is_cut = re.search(r"\d\s*_|['\"]|\\mathrm\s*\{\s*th\b", latex)
    return None if is_cut else _Formula(re.sub(r"(?<!\\)\$", "", latex), counted)


# ---- in a process of its own --------------------------------------------------------------------


class _TooLongError(BaseException):
    """The time for a response is up. No error of Python's own, lest computer algebra catch it."""


def answerer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Limit this process, and return what finds a verdict; an empty one where it gives up."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # Its own way with units is to drop letters: 2m would be 2.
    normalization = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True)
    config = [math_verify.LatexExtractionConfig(normalization_config=normalization)]
    logging.disable()  # of limits that are switched off, and of each expression that cannot be read
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _raise_too_long)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        signal.alarm(_SECONDS)
        try:
            return _verdict(math_verify, config, **question)
        except (_TooLongError, MemoryError, RecursionError):
            return {}
        finally:
            signal.alarm(0)

    return answer


def _raise_too_long(*_: object) -> None:
    raise _TooLongError


def _verdict(math_verify: Any, config: list[Any], right: list[str], given: str) -> dict[str, Any]:
    def parsed(latex: str) -> Any:
        return math_verify.parse(f"\\boxed{{{latex}}}", extraction_config=config, parsing_timeout=0)

    golds = [parsed(latex) for latex in right]
    unread = [number for number, gold in enumerate(golds) if all(isinstance(one, str) for one in gold)]
    if unread:
        return {"unread": unread[0]}
    answer = parsed(given) if given else []
    return {"right": any(math_verify.verify(gold, answer, timeout_seconds=0) for gold in golds)}
