"""Whether a response's answer is mathematically the right one, by the package ``math-verify``, within limits.

It is computed in processes of its own: what a model writes may keep computer algebra busy for ever or fill the memory,
and the package's own limits are signals, which need a process's main thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from nemo_style_aligner.data.answers import EXTRACTION, find_answer, is_right, right_answers
from nemo_style_aligner.errors import UserError

logger = logging.getLogger(__name__)

_SECONDS = 5  # for a response; usual ones take hundredths
_KILL_SECONDS = 10.0  # for one in which a signal is not noticed
_START_SECONDS = 120.0  # importing sympy
_MEMORY_BYTES = 4 << 30
MAX_SECONDS = _START_SECONDS + 2 * _KILL_SECONDS
"""What verifying a response may take at most."""

_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH")  # of the variables, those that a process gets
_START = "import sys; sys.path[:] = {path!r}; from {module} import _serve; _serve()"


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
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

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
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process()
        if process.send(question) and (verdict := process.answer(_KILL_SECONDS)) is not None:
            self._idle.put(process)
            return verdict if "right" in verdict or "problem" in verdict else None
        process.kill()
        return None

    def close(self) -> None:
        """End the processes that are idle. Others end with this one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().kill()


class _Process:
    """A process that answers one question at a time. It ends with its standard input, and so with this process."""

    def __init__(self) -> None:
        start = _START.format(path=sys.path, module=__name__)
        # -I and the path: nothing is imported from the folder that the job was started in.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the job
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        if self.answer(_START_SECONDS) is None:
            self.kill()
            raise MathVerifyError(f"a process that imports math-verify did not start within {_START_SECONDS:g} s")

    def send(self, question: Mapping[str, Any]) -> bool:
        """Whether the process took a question."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended
            return False
        return True

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its answer; None if it has ended, or gives none in time."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if is_there else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close() if stream is not None else None
        self._process.wait()


# ---- in a process of its own --------------------------------------------------------------------


class _TooLongError(BaseException):
    """The time for a response is up. No error of Python's own, lest computer algebra catch it."""


def _serve() -> None:
    """Answer questions, until the job has ended, in whatever way."""
    import math_verify

    logging.disable()  # of limits that are switched off, and of each expression that cannot be read
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _raise_too_long)
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(_SECONDS)
        try:
            verdict = _verdict(math_verify, **json.loads(line))
        except (_TooLongError, MemoryError, RecursionError):
            verdict = {}
        finally:
            signal.alarm(0)
        print(json.dumps(verdict), file=answers, flush=True)


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
