"""A Python function of the user's as a source of rewards, in the process that asks for them."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import logging
import math
import os
import reprlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from nemo_style_aligner.guard.user_code import describe, has_parameter, load_function, require_arguments
from nemo_style_aligner.trainer.rl.math_verifier import MAX_SECONDS, MathVerifier
from nemo_style_aligner.trainer.rl.rewards import Reward, RewardError, Rewards, RewardSource, fits_fp32, when_all
from nemo_style_aligner.trainer.rl.sample import Sample

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""``(prompt, response, line) -> reward``, ``def`` or ``async def``: two texts, and the prompt's line with all its keys;
a number, or named parts of one: the reward is their sum, or the part ``reward`` where there is one. A parameter
``step`` gets the run's step, from 1."""

_ARGUMENTS, _STEP = ("prompt", "response", "line"), "step"
DEFAULT_SECONDS = 60.0
_COROUTINES = 64  # at once
_FRAMES = 5  # the innermost ones, which tell kinds of failures apart
_PROCESSES = 2  # that verify mathematics, of each rank


class FunctionRewards(RewardSource):
    """Calls a function for each response, several at once in threads of its own or in an event loop.

    A call over its limit is a failed reward. A coroutine is cancelled then; a thread cannot be ended, so the call goes
    on in it, beside later ones.

    Args:
        function: see `RewardFunction`.
        name: of the function, for messages.
        seconds: limit of a call.
        max_parallel: calls at once; with more than 1 a function that is no coroutine function must be thread-safe.
            None: 1, or `_COROUTINES` for those.

    Raises:
        UserCodeError: the function does not take three arguments.

    Attributes:
        max_parallel: calls at once.
    """

    def __init__(
        self,
        function: RewardFunction,
        name: str,
        *,
        seconds: float = DEFAULT_SECONDS,
        max_parallel: int | None = None,
    ) -> None:
        require_arguments(function, _ARGUMENTS, f"the reward function {name}", [_STEP])
        self._function, self._name, self._seconds = function, name, seconds
        self._takes_step = has_parameter(function, _STEP)
        self._loop: asyncio.AbstractEventLoop | None = None
        if _is_coroutine_function(function):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
        self.max_parallel = max_parallel or (1 if self._loop is None else _COROUTINES)
        self._waiting = concurrent.futures.ThreadPoolExecutor(self.max_parallel, "reward-function")
        self._closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failures: collections.Counter[object] = collections.Counter()  # by kind
        self._lock = threading.Lock()

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`."""
        calls = [self._waiting.submit(self._reward, response) for response in responses]
        return when_all(calls, lambda: [call.result() for call in calls])

    def close(self) -> None:
        """See `RewardSource.close`. Calls that are under way go on, but nobody waits for them."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._waiting.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- in the threads that wait for calls

    def _reward(self, response: Sample) -> Reward:
        line = copy.deepcopy(dict(response.line))
        call: concurrent.futures.Future[Any] = concurrent.futures.Future()
        function = functools.partial(self._function, step=response.step) if self._takes_step else self._function
        cancel = self._begin(call, function, response.prompt, response.response, line)
        concurrent.futures.wait([call, self._closed], self._seconds, concurrent.futures.FIRST_COMPLETED)
        if not call.done():
            if self._closed.done():
                raise RewardError(f"the reward function {self._name} was closed")
            cancel()
            hangs = "; the call goes on, for a thread cannot be ended" if self._loop is None else ""
            problem = f"the reward function {self._name} took more than {self._seconds:g} s for {response}{hangs}"
            return self._failed("too slow", problem)
        if (error := call.exception()) is not None:  # also sys.exit(), and a panic in a library's Rust code
            trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame that calls the function
            where = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)][-_FRAMES:]
            problem = f"the reward function {self._name} raised {describe(error)} for {response}"
            self._failed((type(error), *where), problem, (type(error), error, trace))
            return Reward.failed(f"{problem}; the traceback is in the log")
        try:
            return self._as_reward(call.result(), response)
        except BaseException as raised:  # noqa: BLE001 - by what was returned, which is the user's code as well
            problem = f"the reward function {self._name} returned what raises {describe(raised)} for {response}"
            return self._failed(type(raised), problem)

    def _failed(self, kind: object, problem: str, exc_info: Any = None) -> Reward:
        """Log the first failure of its kind, and how many there are now and then: a mistake is every response's."""
        with self._lock:
            self._failures[kind] += 1
            count = self._failures[kind]
        if count == 1:
            logger.error(problem, exc_info=exc_info)
        elif str(count).strip("0") == "1":  # 10, 100, ...
            logger.error("%d responses have failed like this one now: %s", count, problem)
        return Reward.failed(problem)

    def _begin(
        self, call: concurrent.futures.Future[Any], function: RewardFunction, *args: Any
    ) -> Callable[[], object]:
        """Begin a call whose result goes to ``call``; returns what cancels it, if it can be."""
        if self._loop is not None:
            coroutine = asyncio.run_coroutine_threadsafe(_await(call, function(*args)), self._loop)
            return coroutine.cancel
        thread = threading.Thread(target=_run, args=(call, function, *args), name="reward-call", daemon=True)
        thread.start()
        return lambda: None

    def _as_reward(self, returned: Any, response: Sample) -> Reward:
        reward = as_reward(returned, f"the reward function {self._name}", response)
        if reward.problem is not None:
            return self._failed(("returned", type(returned)), reward.problem)
        return reward


class EnvironmentRewards(RewardSource):
    """What the environment of an episode has returned."""

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`."""
        result: Rewards = concurrent.futures.Future()
        result.set_result([as_reward(sample.outcome, "the environment", sample) for sample in responses])
        return result


def as_reward(returned: Any, who: str, response: Sample) -> Reward:
    """What a function of the user's has returned as a reward: a number, or named parts; failed if it is neither."""
    parts = returned if isinstance(returned, Mapping) else {"reward": returned}
    known = {part: n for part, v in parts.items() if isinstance(part, str) and (n := as_number(v)) is not None}
    if known and len(known) == len(parts):  # all are named numbers
        value = known.pop("reward") if "reward" in known else math.fsum(known.values())
        if fits_fp32(value):
            return Reward(value, known)
    wanted = "is not a finite number" if parts is not returned else "are not named numbers with a finite sum"
    return Reward.failed(f"{who} returned {reprlib.repr(returned)}, which {wanted}, for {response}")


class MathRewards(FunctionRewards):
    """1 for the right answer of the prompt's line, by `data.answers` or ``math-verify``, else 0: see `MathVerifier`.

    Args:
        max_parallel: processes that verify.

    Raises:
        MathVerifyError: the package is not installed.
    """

    def __init__(self, max_parallel: int | None = None) -> None:
        self._verifier = MathVerifier()
        super().__init__(self._verifier, "math_verify", seconds=MAX_SECONDS, max_parallel=max_parallel or _PROCESSES)

    def problem_of(self, line: Mapping[str, Any]) -> str | None:
        """See `RewardSource.problem_of`."""
        return self._verifier.problem_of(line)

    def close(self) -> None:
        """See `RewardSource.close`."""
        super().close()
        self._verifier.close()


async def _await(call: concurrent.futures.Future[Any], awaitable: Awaitable[Any]) -> None:
    try:
        with _no_return_of_forks():
            returned = await awaitable
        call.set_result(returned)
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it; cancelling it as well
        call.set_exception(error)


def _run(call: concurrent.futures.Future[Any], function: RewardFunction, *args: Any) -> None:
    try:
        with _no_return_of_forks():
            returned = function(*args)
        call.set_result(returned)
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        call.set_exception(error)


@contextlib.contextmanager
def _no_return_of_forks() -> Iterator[None]:
    """A child that the user's code has forked ends where it would come back: it is no second job."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)


def load_reward_function(named: str, what: str) -> RewardFunction:
    """The function ``FILE.py:NAME``; ``what`` names it, for messages. Raises `UserCodeError`."""
    return load_function(named, what, _ARGUMENTS, [_STEP])


def _is_coroutine_function(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_number(reward: Any) -> float | None:
    """A reward as a finite float within fp32's range, else None; numbers of numpy and torch count, strings do not."""
    if isinstance(reward, str | bytes):
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return None
    return number if fits_fp32(number) else None
