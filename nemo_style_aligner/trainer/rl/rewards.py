"""Rewards: what scores finished responses, one source or several of them.

A source never blocks: it gives futures, so that responses are scored while others are generated. What cannot be scored
has the reward NaN and a text that says why; ``on_nonfinite`` decides what becomes of it, and it is never a silent 0.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.data.answers import is_right
from nemo_style_aligner.trainer.data.answers import problem_of as problem_of_answer
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.services.score_client import SequencesToScore
from nemo_style_aligner.wording import counted, some_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_PROBLEMS = 5  # lines that one error names


class RewardError(UserError, RuntimeError):
    """A source of rewards cannot go on; the message says why, and what to do."""

    exit_status = 1


@dataclasses.dataclass(frozen=True)
class Reward:
    """The reward of one response.

    Attributes:
        value: NaN where there is none.
        parts: what it is made of, by name, for the log.
        problem: why there is none.
    """

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def failed(cls, problem: str) -> Reward:
        """No reward, for a reason."""
        return cls(math.nan, {}, problem)


Rewards = concurrent.futures.Future[list[Reward]]
"""One for each response, in their order."""


class RewardSource(abc.ABC):
    """Scores responses."""

    @abc.abstractmethod
    def score(self, responses: Sequence[Sample]) -> Rewards:
        """Begin to score responses, and return at once.

        The future raises `UserError` if the source cannot go on; responses that it cannot score are `Reward.failed`.
        """

    def problem_of(self, line: Mapping[str, Any]) -> str | None:
        """Why responses to this line of a prompt file cannot be scored; None if they can, as far as is known here."""
        return None

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:  # noqa: B027  (most are)
        """Wait until responses can be scored, and make sure that these ``sequences`` can be. Raises `UserError`."""

    def close(self) -> None:  # noqa: B027  (most have nothing open)
        """Abandon what is under way."""


class ExactMatch(RewardSource):
    """1 for the right answer of the prompt's line, by the line's own rule, else 0; see `data.answers`."""

    def problem_of(self, line: Mapping[str, Any]) -> str | None:
        """See `RewardSource.problem_of`."""
        return problem_of_answer(line)

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`."""
        result: Rewards = concurrent.futures.Future()
        result.set_result([Reward(float(is_right(r.response, r.line))) for r in responses])
        return result


@dataclasses.dataclass(frozen=True)
class WeightedSource:
    """One of several sources.

    Attributes:
        name: of its part in the log.
        source: what scores.
        weight: of its rewards in the sum.
        only: fields of a prompt's line and the values, any of several, that they must have for this source to count.
    """

    name: str
    source: RewardSource
    weight: float = 1.0
    only: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def takes(self, line: Mapping[str, Any]) -> bool:
        """Whether it scores responses to this line."""
        return all(any(_same(line.get(field), value) for value in values) for field, values in self.only.items())


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)  # True is 1 in Python alone


class RewardSum(RewardSource):
    """The weighted sum of several sources, each for all prompts or for some.

    Every source's rewards are a part of their own, unweighted; their parts are called ``NAME/PART``. Where one source
    fails, so does the sum, unless its weight is 0. Without any source, all rewards are 0.
    """

    def __init__(self, sources: Sequence[WeightedSource]) -> None:
        self.sources = sources

    def problem_of(self, line: Mapping[str, Any]) -> str | None:
        """See `RewardSource.problem_of`."""
        chosen = [source for source in self.sources if source.takes(line)]
        if not chosen and self.sources:
            fields = {field: line.get(field) for source in self.sources for field in source.only}
            return f"no source of rewards takes it: none has an `only` that fits {fields}"
        problems = ((source.name, source.source.problem_of(line)) for source in chosen)
        return next((f"reward {name}: {problem}" for name, problem in problems if problem is not None), None)

    def check(self, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Make sure that responses to all prompts can be scored, and that each source is for some of them.

        Args:
            lines: of training and validation, by their places, such as ``train.jsonl:7``.

        Raises:
            DataError: the message names the first such lines, and how many there are.
        """
        for source in self.sources:
            if not any(source.takes(line) for line in lines.values()):
                raise DataError(f"no line of the prompts is for reward {source.name}: {_misfit(source, lines)}")
        problems = [
            f"{place}: {problem}" for place, line in lines.items() if (problem := self.problem_of(line)) is not None
        ]
        if problems:
            more = len(problems) - _MOST_PROBLEMS
            problems[_MOST_PROBLEMS:] = [f"... and {counted(more, 'more lines')}"] if more > 0 else []
            raise DataError("\n".join(problems))

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:
        """See `RewardSource.wait_until_ready`."""
        for source in self.sources:
            source.source.wait_until_ready(timeout_s, sequences)

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`."""
        asked: list[tuple[WeightedSource, list[int], Rewards]] = []
        for source in self.sources:
            rows = [row for row, response in enumerate(responses) if source.takes(response.line)]
            if rows:
                asked.append((source, rows, source.source.score([responses[row] for row in rows])))

        def total() -> list[Reward]:
            found: list[list[tuple[WeightedSource, Reward]]] = [[] for _ in responses]
            for source, rows, rewards in asked:
                for row, reward in zip(rows, rewards.result(), strict=True):
                    found[row].append((source, reward))
            if not self.sources:
                return [Reward(0.0) for _ in responses]
            return [_sum(rewards, response) for rewards, response in zip(found, responses, strict=True)]

        return when_all([rewards for _, _, rewards in asked], total)

    def close(self) -> None:
        """See `RewardSource.close`."""
        for source in self.sources:
            source.source.close()


def _misfit(source: WeightedSource, lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Which field of `only` fits no line, or that they do not fit together."""
    for field, wanted in source.only.items():
        there = {repr(line[field]): None for line in lines.values() if field in line}
        if not there:
            keys = sorted({key for line in lines.values() for key in line})
            return f"none has the field {field!r} of its `only`; their fields are {some_of(keys, 20)}"
        if not any(_same(line.get(field), value) for line in lines.values() for value in wanted):
            return f"{field!r} is never {' or '.join(map(repr, wanted))}, but {some_of([*there])}"
    return f"none has all that its `only` wants, {dict(source.only)}"


def _sum(rewards: Sequence[tuple[WeightedSource, Reward]], response: Sample) -> Reward:
    parts: dict[str, float] = {}
    for source, reward in rewards:
        parts |= {f"{source.name}/{part}": value for part, value in reward.parts.items()}
        parts[source.name] = reward.value
        if reward.problem is not None and source.weight == 0:
            logger.warning("reward %s, which is only logged: %s", source.name, reward.problem)
        elif reward.problem is not None:
            return Reward(math.nan, parts, f"reward {source.name}: {reward.problem}")
    weighted = [source.weight * reward.value for source, reward in rewards if source.weight]
    total = math.fsum(weighted) if rewards else math.nan
    if not fits_fp32(total):
        return Reward(math.nan, parts, f"the sum of the rewards {parts} is {total} for {response}")
    return Reward(total, parts)


def fits_fp32(number: float) -> bool:
    """Whether a number is finite, and stays so in fp32."""
    return math.isfinite(number) and abs(number) <= float(np.finfo(np.float32).max)


def when_all(futures: Sequence[concurrent.futures.Future[Any]], make: Callable[[], T]) -> concurrent.futures.Future[T]:
    """A future of what ``make`` returns, once all ``futures`` are done, in the thread of the last of them."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    missing, lock = len(futures), threading.Lock()

    def finish() -> None:
        try:
            result.set_result(make())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            result.set_exception(error)

    def count(_: object) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            finish()

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        finish()
    return result
