"""How the contenders of `ppo_step.py` and `grpo_step.py` are measured.

Their turns, what happens when one fails, TRL's best settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ppo_contenders import ContenderFailed, OwnJobs, Setting, Step, Trl, TrlSetting, busy_core
from ppo_memory import ResidentPeak, cpu_seconds, largest
from ppo_models import Workload
from ppo_report import Figures, in_words

MAX_HALVINGS = 2
Kind = type[OwnJobs] | type[Trl]


class Side:
    """One contender on one workload: its processes while they run, its figures, and why it takes part no longer.

    Attributes:
        name: the contender's.
        figures: those so far.
        failure: why it takes part no longer; None while it can go on.
        may_halve: if TRL runs out of memory, it goes on with smaller batches; its steps so far are discarded.
    """

    def __init__(self, kind: Kind, workload: Workload, setting: Setting, warm_up: int, folder: Path) -> None:
        self.name = kind.name
        self.figures = Figures()
        self.failure: str | None = None
        self.may_halve = True
        self._kind, self._workload, self._setting = kind, workload, setting
        self._warm_up, self._folder = warm_up, folder
        self._jobs: OwnJobs | Trl | None = None
        self._resident = ResidentPeak()
        self._starts = 0

    def start(self) -> None:
        """Start the processes."""
        self._guarded(self._start)

    def warm_up(self) -> None:
        """Wait until they can make steps, and make those that do not count."""
        self._guarded(self._make_ready)

    def step(self, round_: int, steps: dict[int, Step], what: str) -> None:
        """One step, kept in ``steps`` under its round."""

        def make() -> None:
            steps[round_] = self._step(what)

        self._guarded(make)

    def stop(self) -> None:
        """End the processes; another `start` may follow."""
        if self._jobs is None:
            return
        jobs, self._jobs = self._jobs, None
        try:
            self._resident.stop()
            peaks = jobs.device_peaks() if self._setting.device == "cuda" else self._resident.peak
            self.figures.peak_bytes = largest([self.figures.peak_bytes, peaks])
            self.figures.facts = jobs.facts()
        finally:
            jobs.stop()

    def _start(self) -> None:
        folder = self._folder / f"{self.name}_{self._starts}"
        folder.mkdir()
        self._starts += 1
        self._resident = ResidentPeak()
        self._jobs = self._kind(self._workload, self._setting, folder)

    def _make_ready(self) -> None:
        assert self._jobs is not None, "not started"
        self._jobs.wait_until_ready()
        self._resident.start(self._jobs.roots())
        for number in range(self._warm_up):
            self.figures.warm_up_steps.append(self._step(f"warm-up {number + 1} of {self._warm_up}"))

    def _step(self, what: str) -> Step:
        assert self._jobs is not None, "not started"
        pids = self._jobs.roots().values()
        before = cpu_seconds(pids)
        made = self._jobs.step()
        made = dataclasses.replace(made, cpu_seconds=cpu_seconds(pids) - before)
        made.check_counts(self.name, self._workload)
        say(f"{self._workload.name}, {what}: {self.name} {made.seconds:.1f} s")
        return made

    def _guarded(self, action: Callable[[], None]) -> None:
        """Call ``action`` unless this side has failed; a failure is this side's alone."""
        while self.failure is None:
            try:
                action()
                return
            except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
                is_known = isinstance(error, ContenderFailed)
                lacks_memory = isinstance(error, ContenderFailed) and error.ran_out_of_memory
                reason = str(error) if is_known else "".join(traceback.format_exception(error))
                say(f"{self._workload.name}: {self.name} failed: {reason}")
                self.stop()
                if not (lacks_memory and self._halve()):
                    self.failure = reason
                    return
            self.figures.restart()
            if action not in (self._start, self._make_ready):
                self._guarded(self._start)
                self._guarded(self._make_ready)
            elif action == self._make_ready:
                self._guarded(self._start)

    def _halve(self) -> bool:
        """Choose smaller batches to go on with; False if there are none."""
        trl = self._setting.trl
        if (
            not issubclass(self._kind, Trl)
            or trl is None
            or not self.may_halve
            or len(self.figures.gave_up) == MAX_HALVINGS
        ):
            return False
        smaller = trl.halved(len(self._workload.prompts))
        if smaller is None:
            return False
        self._setting = dataclasses.replace(self._setting, trl=smaller)
        self.figures.gave_up.append(trl.described())
        say(f"{self._workload.name}: {self.name} ran out of memory and goes on with {in_words(smaller.described())}")
        return True


def measure(
    kinds: Sequence[Kind], workload: Workload, setting: Setting, args: argparse.Namespace, folder: Path
) -> list[Side]:
    """Let the contenders take turns: step by step, or in blocks in which the others' processes do not run."""
    sides = [Side(kind, workload, setting, args.warm_up, folder) for kind in kinds]
    rounds = list(range(args.rounds))
    if args.one_at_a_time:
        size = args.one_at_a_time
        blocks = [(rounds[i : i + size], [side]) for i in range(0, len(rounds), size) for side in sides]
    else:
        blocks = [(rounds, sides)]
    try:
        for block, together in blocks:
            play(block, together, args)
    finally:
        for side in sides:
            side.stop()
    return sides


def play(block: Sequence[int], sides: Sequence[Side], args: argparse.Namespace) -> None:
    """Play some rounds, with ``--busy`` as many again beside a process that keeps a core busy."""
    for side in sides:
        side.start()
    for side in sides:
        side.warm_up()
    for round_ in block:
        for side in sides:
            side.step(round_, side.figures.steps, f"round {round_ + 1} of {args.rounds}")
    if args.busy:
        for side in sides:
            side.may_halve = False  # it would discard the quiet rounds, which busy ones are compared with
        with busy_core():
            for round_ in block:
                for side in sides:
                    side.step(round_, side.figures.busy_steps, f"cores shared, round {round_ + 1} of {args.rounds}")
    for side in sides:
        side.may_halve = True
        side.stop()


def tune(kind: Kind, workload: Workload, setting: Setting, folder: Path) -> tuple[Setting, list[dict[str, Any]]]:
    """TRL's fastest setting among a few, by one step of each, and what was tried.

    One setting after the other changes, from the best so far. Nothing else runs meanwhile. On a GPU each warms up for a
    step, and the wait policy of the CPU's threads does not change.
    """
    assert setting.trl is not None, "TRL takes no part"
    on_gpu = setting.device == "cuda"
    best, best_seconds = setting.trl, float("inf")
    tried: list[dict[str, Any]] = []
    for number, make in enumerate(variants(len(workload.prompts), () if on_gpu else ("PASSIVE", "ACTIVE"))):
        candidate = make(best)
        if candidate is None or candidate.described() in [one["setting"] for one in tried]:
            continue
        where = folder / str(number)
        where.mkdir(parents=True)
        side = Side(kind, workload, dataclasses.replace(setting, trl=candidate), int(on_gpu), where)
        side.may_halve = False  # smaller batches are settings of their own here
        try:
            side.start()
            side.warm_up()
            side.step(0, side.figures.steps, f"trying {in_words(candidate.described())}")
        finally:
            side.stop()
        entry: dict[str, Any] = {"setting": candidate.described()}
        if side.failure is None:
            entry["seconds"] = seconds = side.figures.steps[0].seconds
            if seconds < best_seconds:
                best, best_seconds = candidate, seconds
        else:
            entry["failed"] = side.failure
        tried.append(entry)
    return dataclasses.replace(setting, trl=best), tried


def variants(rollouts: int, wait_policies: Sequence[str]) -> Iterator[Callable[[TrlSetting], TrlSetting | None]]:
    """What `tune` tries, each made of the best so far; None where there is no such setting."""
    yield lambda best: best
    for policy in wait_policies:
        yield lambda best, policy=policy: dataclasses.replace(best, wait_policy=policy)  # type: ignore[misc]

    def half(best: TrlSetting) -> TrlSetting | None:
        size = best.rollout_batch
        return None if size is None else dataclasses.replace(best, rollout_batch=max(1, size // 2))

    yield half
    for factor in (0.5, 2.0):

        def other(best: TrlSetting, factor: float = factor) -> TrlSetting | None:
            size = int(best.micro_batch * factor)
            return dataclasses.replace(best, micro_batch=size) if size and rollouts % size == 0 else None

        yield other


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
