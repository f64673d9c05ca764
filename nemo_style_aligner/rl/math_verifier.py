"""Whether a response's answer is mathematically the right one, by the package ``math-verify``, within limits.

It is computed in processes of its own: what a model writes may keep computer algebra busy for ever or fill the memory,
and the package's own limits are signals, which need a process's main thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

from nemo_style_aligner.data.answers import EXTRACTION, find_answer, is_right, right_answers
from nemo_style_aligner.data.helper_process import HelperProcess
from nemo_style_aligner.errors import UserError

logger = logging.getLogger(__name__)

_SECONDS = 5  # for a response; usual ones take hundredths
_KILL_SECONDS = 10.0  # for one in which a signal is not noticed
_START_SECONDS = 120.0  # importing sympy
_MEMORY_BYTES = 4 << 30
MAX_SECONDS = _START_SECONDS + 2 * _KILL_SECONDS
"""What verifying a response may take at most."""


class MathVerifyError(UserError, RuntimeError):
    """``math-verify`` cannot be used; the message says why."""


class MathVerifier:
    """Rewards of responses to mathematical questions: 1 for the right answer of the prompt's line, else 0.

    An answer is right if `data.answers` or ``math-verify`` says so. A response that ``math-verify`` cannot decide on
    within its limits is not right; the part ``undecided`` counts such responses.

    Raises:
        MathVerifyError: the package is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathVerifyError("math_verify needs the package of that name: pip install 'math-verify==0.9.*'")
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()

    def __call__(self, prompt: str, response: str, line: Mapping[str, Any]) -> dict[str, float]:
        """The reward of a response, as a reward function gives it; thread-safe.

        Raises:
            ValueError: the line has no right answer, or it is nothing mathematical.
            MathVerifyError: a process cannot be started.
        """
        if is_right(response, line):
            return {"reward": 1.0, "undecided": 0.0}
        rule = line.get(EXTRACTION)
        given = response if rule is None else find_answer(response, rule)
        if not given:
            return {"reward": 0.0, "undecided": 0.0}
        right = [find_answer(answer) for answer in right_answers(line)]
        verdict = self._ask({"right": right, "given": given, "is_answer": rule is not None})
        if verdict is None:
            logger.warning("math-verify could not decide within its limits; it counts as wrong: %.200r", given)
        elif "problem" in verdict:
            raise ValueError(verdict["problem"])
        return {"reward": float(verdict is not None and verdict["right"]), "undecided": float(verdict is None)}

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The verdict; None if the process has ended, is silent or gave up. Only the last of these is asked again."""
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _started()
        process.send(question)
        verdict: dict[str, Any] | None = process.answer(_KILL_SECONDS)
        if verdict is not None:
            self._idle.put(process)
        return verdict or None

    def close(self) -> None:
        """End the processes that are idle. Others end with this one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def _started() -> HelperProcess:
    process = HelperProcess(__name__)
    process.send({"right": ["1"], "given": "1", "is_answer": True})
    if process.answer(_START_SECONDS) is None:
        raise MathVerifyError(f"a process that imports math-verify did not start within {_START_SECONDS:g} s")
    return process


# ---- in a process of its own --------------------------------------------------------------------


class _TooLongError(BaseException):
    """The time for a response is up. No error of Python's own, lest computer algebra catch it."""


def answerer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Limit this process, and return what finds a verdict; an empty one where it gives up."""
    import math_verify

    logging.disable()  # of limits that are switched off, and of each expression that cannot be read
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _raise_too_long)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        signal.alarm(_SECONDS)
        try:
            return _verdict(math_verify, **question)
        except (_TooLongError, MemoryError, RecursionError):
            return {}
        finally:
            signal.alarm(0)

    return answer


def _raise_too_long(*_: object) -> None:
    raise _TooLongError


def _verdict(math_verify: Any, right: list[str], given: str, is_answer: bool) -> dict[str, Any]:
    found = [math_verify.parse(_as_math(answer), parsing_timeout=0) for answer in right]
    if not all(found):
        return {"problem": f"the right answer {right[found.index([])]!r} cannot be read as mathematics"}
    answer = math_verify.parse(_as_math(given) if is_answer else given, parsing_timeout=0)
    return {"right": any(math_verify.verify(gold, answer, timeout_seconds=0) for gold in found)}


def _as_math(answer: str) -> str:
    """An answer as ``math-verify`` finds it in a text."""
    return answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
