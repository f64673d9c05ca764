"""An engine that several ranks share and one of them is asked: it tells the others before each pass."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Literal, cast

from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, Task
from nemo_style_aligner.engine.shard import EngineGroup

Word = Literal["serve", "idle", "end"]
"""What a leader says when it is not serving."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """What is new before a pass: tasks as `EmbeddedEngine.task` takes them, and ids of those that nobody waits for.

    ``is_over``: the leader's iterator ends here.
    """

    tasks: list[tuple[GenerationRequest, SamplingParams, dict[str, Any]]]
    abandoned: list[int]
    is_over: bool = False


class Lockstep:
    """Serves what the leader of a group is asked, on all ranks of the group.

    Args:
        engine: this rank's.
        group: the ranks that share it.
    """

    def __init__(self, engine: EmbeddedEngine, group: EngineGroup) -> None:
        self._engine, self._group = engine, group

    def serve(self, pull: Callable[[], Task | None]) -> Generator[list[ScheduledSequence], None, None]:
        """On the leader: see `EmbeddedEngine.serve`; ``pull`` may wait where the engine has nothing else to do.

        The other ranks run `follow` meanwhile, which ends when this does.
        """
        if self._group.control is None:
            yield from self._engine.serve(pull, keeps_idle=True)
            return
        asked: dict[int, Task] = {}  # in the engine, by the request's id
        told = set[int]()  # of these, those that the others know to be abandoned

        def change() -> _Change:
            new: list[Task] = []
            while len(asked) < self._engine.num_slots and (task := pull()) is not None:
                asked[task.request.request_id] = task
                new.append(task)
            gone = [number for number, task in asked.items() if task.is_abandoned and number not in told]
            told.update(gone)
            return _Change(
                [(t.request, t.sampling, {"num_top": t.num_top, "scores_prompt": t.scores_prompt}) for t in new],
                gone,
                is_over=not asked,
            )

        is_over = False
        try:
            for advanced in self._passes(lambda: self._group.share(change())):
                for sequence in advanced:
                    if not sequence.is_in_slot:
                        del asked[sequence.request.request_id]
                        told.discard(sequence.request.request_id)
                yield advanced
            is_over = True
        finally:
            if not is_over:  # closed early, or failed
                self._group.share(_Change([], [], is_over=True))

    def say(self, word: Word) -> None:
        """On the leader, between two calls of `serve`, to the ranks that `attend`; "idle" now and then: it is there."""
        self._group.share(word)

    def attend(self) -> None:
        """On the other ranks: take part when the leader says so, until the end. Raises RuntimeError if it is gone."""
        while (word := self._group.share(cast(Word, None))) != "end":
            if word == "serve":
                self.follow()

    def follow(self) -> None:
        """On the other ranks: compute what the leader's `serve` does, until it ends."""
        with contextlib.closing(self._passes(lambda: self._group.share(None))) as passes:
            for _ in passes:
                pass

    def _passes(self, next_change: Callable[[], _Change]) -> Generator[list[ScheduledSequence], None, None]:
        waiting, tasks = collections.deque[Task](), dict[int, Task]()
        change = next_change()
        pull = lambda: waiting.popleft() if waiting else None  # noqa: E731
        with contextlib.closing(self._engine.serve(pull, keeps_idle=True)) as passes:
            while not change.is_over:
                for request, sampling, options in change.tasks:
                    tasks[request.request_id] = self._engine.task(request, sampling, **options)
                    waiting.append(tasks[request.request_id])
                for number in change.abandoned:
                    tasks[number].is_abandoned = True
                advanced = next(passes)  # there is something to do, else it would be over
                for sequence in advanced:
                    if not sequence.is_in_slot:
                        del tasks[sequence.request.request_id]
                yield advanced
                change = next_change()
