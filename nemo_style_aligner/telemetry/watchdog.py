"""Ends a job that makes no progress, and says which rank, phase and collective held it up.

Every rank has a thread that writes what the rank does to ``<log_dir>/watchdog/rank_<n>.json``. When no rank of the job
has made progress for longer than the limit, the rank that notices first raises the alarm (a file as well), every rank
writes the stacks of all its threads beside it, and the job ends with status `EXIT_STUCK`. Files, because they need
nobody to answer: a rank that is stopped or gone is known by what it wrote last.

A rank that holds Python's lock in C code cannot run the thread: then a timer of `faulthandler`, which needs no
lock, writes the stacks and ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.stacks import main_thread_location

EXIT_STUCK = 124
"""Exit status of a job that the watchdog ended, the one of `timeout`."""

_logger = logging.getLogger(__name__)

_GATHER_SECONDS = 5.0  # for the other ranks to notice the alarm and to write their stacks
_SILENT_BEATS = 3.0  # a rank that has missed so many beats is stopped, starved or gone


@dataclasses.dataclass(frozen=True)
class RankState:
    """What a rank last wrote about itself. Times are `time.time()`.

    Attributes:
        rank, host, pid: who.
        job: the same on all ranks of a job and of nobody else.
        time: when this was written.
        phase, since, progress, bound: see `activity.Activity`.
        line, collective: see `stacks.Location`.
    """

    rank: int
    host: str
    pid: int
    job: str
    time: float
    phase: str
    since: float
    progress: float
    bound: float
    line: str
    collective: str | None

    def is_stuck(self, limit: float, now: float) -> bool:
        """Whether this rank, as far as is known, has got nowhere for longer than it may."""
        return now - self.progress > max(limit, self.bound)


class Watchdog:
    """Watches over this rank, and with the others over the job. Started by `start`.

    Args:
        log_dir: of the job, seen by all ranks.
        rank, world_size: this rank's place.
        limit: seconds without progress that end the job.
        job: names this job's run, the same on all ranks.
        end: ends the job with the given exit status; must not return.
    """

    def __init__(
        self, log_dir: Path, rank: int, world_size: int, limit: float, job: str, end: Callable[[int], object]
    ) -> None:
        self._folder = log_dir / "watchdog"
        self._rank, self._world_size = rank, world_size
        self._limit = limit
        self._job = job
        self._end = end
        self._beat = min(10.0, max(0.2, limit / 10))
        self._alarm = self._folder / f"alarm_{job}.json"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._backstop: TextIO | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stack_file(self._rank).unlink(missing_ok=True)
        activity.progress()
        self._backstop = (self._folder / f"backstop_rank_{self._rank}.txt").open("w", encoding="utf-8")
        self._put_off_backstop(self._limit + 6 * self._beat)
        self._write_state()
        self._thread.start()

    def stop(self) -> None:
        """The job is done: watch no longer."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        faulthandler.cancel_dump_traceback_later()

    # ---- the thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self._beat):
            try:
                self._tick()
            except OSError as error:  # a full disk must not end the watch
                _logger.warning("watchdog: %s", error)

    def _tick(self) -> None:
        self._put_off_backstop(self._limit + 6 * self._beat)
        state = self._write_state()
        if self._alarm.exists():
            self._put_off_backstop(6 * _GATHER_SECONDS)
            self._write_stacks()
            if not self._stop.wait(4 * _GATHER_SECONDS):  # who raised it ends the job; if not:
                self._end(EXIT_STUCK)
        elif state.is_stuck(self._limit, time.time()) and self._all_stuck():
            self._raise_alarm()

    def _put_off_backstop(self, seconds: float) -> None:
        """At every beat: it goes off only if this thread cannot run."""
        if self._backstop is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._backstop)

    def _write_state(self) -> RankState:
        now, where = activity.current(), main_thread_location()
        state = RankState(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=self._job,
            time=time.time(),
            line=where.line,
            collective=where.collective,
            **dataclasses.asdict(now),
        )
        path = self._folder / f"rank_{self._rank}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
        unfinished.replace(path)
        return state

    def _states(self) -> list[RankState | None]:
        """All ranks' states, None for a rank that has not written any in this run."""
        states: list[RankState | None] = []
        for rank in range(self._world_size):
            state = None
            with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or left by another version
                state = RankState(**json.loads((self._folder / f"rank_{rank}.json").read_text(encoding="utf-8")))
            states.append(state if state is not None and state.job == self._job else None)
        return states

    def _all_stuck(self) -> bool:
        now = time.time()
        return all(state is None or state.is_stuck(self._limit, now) for state in self._states())

    def _raise_alarm(self) -> None:
        try:
            with self._alarm.open("x", encoding="utf-8") as file:
                json.dump({"raised_by": self._rank, "time": time.time()}, file)
        except FileExistsError:
            return  # another rank was first; the next beat sees its alarm
        self._put_off_backstop(6 * _GATHER_SECONDS)
        self._write_stacks()
        deadline = time.monotonic() + _GATHER_SECONDS + self._beat
        ranks = range(self._world_size)
        while time.monotonic() < deadline and not all(self._stack_file(rank).exists() for rank in ranks):
            time.sleep(0.1)
        report = describe(self._states(), self._limit, time.time(), _SILENT_BEATS * self._beat + _GATHER_SECONDS)
        report += f"\nstacks of all ranks that could write them: {self._folder}/stacks_rank_*.txt"
        (self._folder / "report.txt").write_text(report + "\n", encoding="utf-8")
        sys.stderr.write("".join(f"[rank {self._rank}] watchdog: {line}\n" for line in report.splitlines()))
        sys.stderr.flush()
        self._end(EXIT_STUCK)

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks_rank_{rank}.txt"

    def _write_stacks(self) -> None:
        path = self._stack_file(self._rank)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        unfinished.replace(path)


# ---- the report ---------------------------------------------------------------------------------


def describe(states: Sequence[RankState | None], limit: float, now: float, silent_after: float) -> str:
    """Who holds up whom, one line per rank or group of ranks in the same place.

    A rank is behind when it is silent, or when others wait in a collective and it does not.
    """
    silent = [s for s in states if s is not None and now - s.time > silent_after]
    known = [s for s in states if s is not None and s not in silent]
    waiting = [s for s in known if s.collective is not None]
    behind = silent + ([s for s in known if s.collective is None] if waiting else [])
    lines = [f"no rank has made progress for {limit:g} s (exp_manager.watchdog_minutes); ending the job"]
    lines += [f"rank {rank} has never reported" for rank, state in enumerate(states) if state is None]
    for state in behind:
        silence = f", silent for {now - state.time:.0f} s (stopped, starved or gone)" if state in silent else ""
        doing = f" in {state.collective}" if state.collective else ""
        lines.append(f"{_who([state])} is behind: {_where(state)}{doing}{silence}")
    others = [s for s in known if s not in behind]
    for place in dict.fromkeys((s.phase, s.collective, s.line) for s in others):
        there = [s for s in others if (s.phase, s.collective, s.line) == place]
        if there[0].collective:
            lines.append(f"{_who(there)} waits in {there[0].collective}: {_where(there[0])}")
        else:
            lines.append(f"{_who(there)} is stuck: {_where(there[0])}")
    return "\n".join(lines)


def _who(states: Sequence[RankState]) -> str:
    if len(states) == 1:
        return f"rank {states[0].rank} (host {states[0].host}, process {states[0].pid})"
    return f"each of the ranks {', '.join(str(state.rank) for state in states)}"


def _where(state: RankState) -> str:
    since = datetime.fromtimestamp(state.since).strftime("%H:%M:%S")
    return f"in phase {state.phase} since {since}, at {state.line}"
