"""Ends a job that makes no progress, and says which rank, phase and collective held it up.

Every rank has a thread that writes what the rank does to ``<log_dir>/watchdog/rank_<n>.json``. When no rank of the job
has made progress for longer than the limit, the rank that notices first raises the alarm (a file as well), every rank
writes the stacks of all its threads beside it, and the job ends with status `EXIT_STUCK`. Files, because they need
nobody to answer: a rank that is stopped or gone is known by what it wrote last.

Wall clocks, which may be set and differ between machines, decide nothing: a rank writes for how long it has made no
progress, and a reader adds the time for which it has seen this state unchanged.

While C code holds the GIL, the thread cannot run: then a timer of `faulthandler`, which does not need the GIL, writes
the stacks and ends the process.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.stacks import main_thread_location
from nemo_style_aligner.trusted_paths import unless_planted

EXIT_STUCK = 124
"""Exit status of a job that the watchdog ended, as that of the command ``timeout``."""

WATCHDOG_FOLDER = "watchdog"
"""Folder in the log directory where ranks write what they do."""

FAILED_FILE = "failed"
"""File in the log directory in which failing ranks leave a line: a SIGTERM to the others is then no request to stop.

Every job that works, or tries to work, in the directory writes it; ranks heed that of their own run, `failed_file_of`.
"""

_logger = logging.getLogger(__name__)

_GATHER_SECONDS = 5.0  # for the other ranks to notice the alarm and to write their stacks
_SILENT_BEATS = 3.0  # a rank that has missed so many beats is stopped, starved or gone
# Only ranks without progress read the others' states, and at first only some of them: N ranks have N * N files to read.
_QUIET_SHARE = 0.1  # of the limit: a few ranks begin to read
_NUM_READERS = 8  # how many, about
_LATE_SHARE = 0.9  # of the limit: all ranks begin to read
_KEPT_RUNS = 10  # newest runs whose files are kept: ranks of the last ones may still be on their way out


def failed_file_of(log_dir: Path, run: str) -> Path:
    """File in which only the ranks of ``run`` say that they failed."""
    return log_dir / WATCHDOG_FOLDER / f"{FAILED_FILE}_{run}"


def remove_old_runs(log_dir: Path) -> None:
    """Delete the failure and alarm files of earlier runs, but for the newest `_KEPT_RUNS` of each."""
    for pattern in (f"{FAILED_FILE}_*", "alarm_*.json"):
        with _tolerated():
            by_age = sorted((log_dir / WATCHDOG_FOLDER).glob(pattern), key=lambda path: path.stat().st_mtime)
            for path in by_age[:-_KEPT_RUNS]:
                path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class RankState:
    """What a rank last wrote about itself.

    Attributes:
        rank, host, pid: which process wrote it.
        job: names the run: the same on all of its ranks, and on no other.
        time: when this was written, by `time.time()`.
        phase, bound: see `activity.Activity`.
        since: when the innermost phase began, by `time.time()`.
        idle: seconds without progress until ``time``.
        line, collective: see `stacks.Location`.
    """

    rank: int
    host: str
    pid: int
    job: str
    time: float
    phase: str
    since: float
    idle: float
    bound: float
    line: str
    collective: str | None

    def is_stuck(self, limit: float, silence: float) -> bool:
        """Whether the rank, after ``silence`` more seconds in this state, has been without progress for too long."""
        return self.idle + silence > max(limit, self.bound)


@dataclasses.dataclass(frozen=True)
class Sighting:
    """A state that some rank has written, and `time.monotonic()` when this process first read it."""

    state: RankState
    at: float


class Watchdog:
    """Watches over this rank and, with the other ranks' watchdogs, over the job. Started by `start`.

    Args:
        log_dir: the job's log directory, which all ranks see.
        rank, world_size: this rank's place.
        limit: seconds without progress that end the job.
        job: names this job's run, the same on all ranks.
        end: ends the job with the given exit status; must not return.
    """

    def __init__(
        self, log_dir: Path, rank: int, world_size: int, limit: float, job: str, end: Callable[[int], object]
    ) -> None:
        self._folder = log_dir / WATCHDOG_FOLDER
        self._rank, self._world_size = rank, world_size
        self._limit = limit
        self._job = job
        self._end = end
        self._beat = min(10.0, max(0.2, limit / 10))
        self._alarm = self._folder / f"alarm_{job}.json"
        self._is_reader = rank % max(1, world_size // _NUM_READERS) == 0
        self._failed = failed_file_of(log_dir, job)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._backstop: TextIO | None = None
        self._sightings: dict[int, Sighting] = {}

    def start(self) -> None:
        """Begin to watch."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stack_file(self._rank).unlink(missing_ok=True)
        activity.progress()
        self._backstop = self._open(f"backstop_rank_{self._rank}.txt")
        self._put_off_backstop(self._limit + 6 * self._beat)
        self._write_state(self._state())
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the job is done."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        faulthandler.cancel_dump_traceback_later()

    # ---- the thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self._beat):
            try:
                self._tick()
            except Exception:  # whatever it is, the watch goes on
                _logger.exception("watchdog: unexpected error; still watching")

    def _tick(self) -> None:
        self._put_off_backstop(self._limit + 6 * self._beat)
        late = _LATE_SHARE * self._limit
        state = self._state()
        self._sightings[self._rank] = Sighting(state, time.monotonic())
        self._write_state(state)
        if _exists(self._alarm):
            self._put_off_backstop(6 * _GATHER_SECONDS)
            self._write_stacks()
            if not self._stop.wait(4 * _GATHER_SECONDS):  # time for the rank that raised it to end the job
                self._end(EXIT_STUCK)
        elif _exists(self._failed):
            # Some launchers do not end the other ranks: srun by default, if the failed rank's container has no scancel.
            if not self._stop.wait(_GATHER_SECONDS):
                _logger.error("another rank has failed, as %s says: ending this one", self._failed)
                self._end(1)
        elif state.idle > _QUIET_SHARE * self._limit and (self._is_reader or state.is_stuck(late, 0.0)):
            self._read_states()
            if state.is_stuck(self._limit, 0.0) and self._others_are_stuck():
                self._raise_alarm()

    def _put_off_backstop(self, seconds: float) -> None:
        """Restart `faulthandler`'s timer; done at every beat, so that it goes off only if this thread cannot run."""
        if self._backstop is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._backstop)

    def _state(self) -> RankState:
        now, where, clock = activity.current(), main_thread_location(), time.time()
        return RankState(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=self._job,
            time=clock,
            phase=now.phase,
            since=clock - (time.monotonic() - now.since),
            idle=time.monotonic() - now.progress,
            bound=now.bound,
            line=where.line,
            collective=where.collective,
        )

    def _write_state(self, state: RankState) -> None:
        path = self._folder / f"rank_{self._rank}.json"
        unfinished = path.with_suffix(".tmp")
        with _tolerated():
            with self._open(unfinished.name) as file:
                json.dump(dataclasses.asdict(state), file)
            unfinished.replace(path)

    def _read_states(self) -> None:
        """Read what all ranks have written in this run, and note when it changed."""
        for rank in range(self._world_size):
            with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or left by another version
                state = RankState(**json.loads((self._folder / f"rank_{rank}.json").read_text(encoding="utf-8")))
                known = self._sightings.get(rank)
                if state.job == self._job and (known is None or state != known.state):
                    self._sightings[rank] = Sighting(state, time.monotonic())

    def _others_are_stuck(self) -> bool:
        """Whether all other ranks are stuck, as those count that cannot write their state or never did."""
        now = time.monotonic()
        others = [seen for rank, seen in self._sightings.items() if rank != self._rank]
        return all(seen.state.is_stuck(self._limit, now - seen.at) for seen in others)

    def _raise_alarm(self) -> None:
        try:
            with self._alarm.open("x", encoding="utf-8") as file:
                json.dump({"raised_by": self._rank, "time": time.time()}, file)
        except FileExistsError:
            return  # another rank was first; the next beat sees its alarm
        except OSError as error:  # the others have to notice by themselves
            _logger.warning("watchdog: %s", error)
        self._put_off_backstop(6 * _GATHER_SECONDS)
        self._write_stacks()
        deadline = time.monotonic() + _GATHER_SECONDS + self._beat
        ranks = range(self._world_size)
        while time.monotonic() < deadline and not all(_exists(self._stack_file(rank)) for rank in ranks):
            time.sleep(0.1)
        self._read_states()
        silent_after = _SILENT_BEATS * self._beat + _GATHER_SECONDS
        report = describe([self._sightings.get(rank) for rank in ranks], self._limit, time.monotonic(), silent_after)
        report += f"\nstacks of all ranks that could write them: {self._folder}/stacks_rank_*.txt"
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone
            sys.stderr.write("".join(f"[rank {self._rank}] watchdog: {line}\n" for line in report.splitlines()))
            sys.stderr.flush()
        with _tolerated(), self._open("report.txt") as file:
            file.write(report + "\n")
        self._end(EXIT_STUCK)

    def _open(self, name: str) -> TextIO:
        return open(self._folder / name, "w", encoding="utf-8", opener=unless_planted)

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks_rank_{rank}.txt"

    def _write_stacks(self) -> None:
        path = self._stack_file(self._rank)
        unfinished = path.with_suffix(".tmp")
        with _tolerated():
            with self._open(unfinished.name) as file:
                faulthandler.dump_traceback(file, all_threads=True)
            unfinished.replace(path)


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    """Turn an OSError of the body, such as a full disk, into a warning: the watch goes on all the same."""
    try:
        yield
    except OSError as error:
        _logger.warning("watchdog: %s", error)


def _exists(path: Path) -> bool:
    """Whether ``path`` exists; False where that cannot be found out."""
    try:
        return path.exists()
    except OSError:
        return False


# ---- the report ---------------------------------------------------------------------------------


def describe(sightings: Sequence[Sighting | None], limit: float, now: float, silent_after: float) -> str:
    """Who holds up whom, one line per rank or group of ranks in the same place.

    A rank is behind when it is silent, or when others wait in a collective and it does not.

    Args:
        sightings: of the ranks in order, None for one that has never been seen.
        now: `time.monotonic()`.
        silent_after: seconds after which an unchanged state means that its rank no longer runs.
    """
    silences = {seen.state.rank: now - seen.at for seen in sightings if seen is not None}
    states = [seen.state for seen in sightings if seen is not None]
    silent = [s for s in states if silences[s.rank] > silent_after]
    known = [s for s in states if s not in silent]
    waiting = [s for s in known if s.collective is not None]
    behind = silent + ([s for s in known if s.collective is None] if waiting else [])
    lines = [f"no rank has made progress for {limit:g} s (exp_manager.watchdog_minutes); ending the job"]
    lines += [f"rank {rank} has never reported" for rank, seen in enumerate(sightings) if seen is None]
    for state in behind:
        silence = f", silent for {silences[state.rank]:.0f} s (stopped, starved or gone)" if state in silent else ""
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
