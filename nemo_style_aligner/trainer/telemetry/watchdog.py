"""Ends a job that makes no progress, and says what each rank was doing.

Every rank has a thread that looks every few seconds whether the rank has made progress, and if so touches a file that
the ranks share. When neither this rank nor the file has moved for longer than the limit, all ranks write the stacks of
all their threads to ``<log_dir>/watchdog/``, one of them puts a report together, and the job ends with status
`EXIT_STUCK`. Files, because they need nobody to answer: a rank that is stopped or gone is known by the stacks that it
does not write. Clocks of machines, which may be set and differ, decide nothing: only that the file has changed counts.

While C code holds the GIL, the thread cannot run: then a timer of `faulthandler`, which does not need the GIL, writes
the stacks and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import linecache
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from nemo_style_aligner import activity
from nemo_style_aligner.guard.trusted_paths import unless_planted

EXIT_STUCK = 124
"""Exit status of a job that the watchdog ended, as that of the command ``timeout``."""

WATCHDOG_FOLDER = "watchdog"
"""Folder in the log directory that the watchdogs share."""

_logger = logging.getLogger(__name__)

_GATHER_SECONDS = 5.0  # for the other ranks to notice the alarm and to write their stacks
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen")
_COLLECTIVES = "torch.distributed.distributed_c10d"


class Watchdog:
    """Watches over this rank and, with the other ranks' watchdogs, over the job. Started by `start`.

    Args:
        log_dir: the job's log directory, which all ranks see.
        rank, world_size: this rank's place.
        limit: seconds without progress that end the job.
        job: names this job's run, the same on all ranks.
        end: ends the job with the given exit status; must not return.
        failure: the line of a rank of the job that has failed, if one has.
    """

    def __init__(
        self,
        log_dir: Path,
        rank: int,
        world_size: int,
        limit: float,
        job: str,
        end: Callable[[int], object],
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._folder = log_dir / WATCHDOG_FOLDER
        self._rank, self._world_size = rank, world_size
        self._limit = limit
        self._job = job
        self._end = end
        self._failure = failure
        self._beat = min(10.0, max(0.2, limit / 10))
        self._progress_file = self._folder / "progress"
        self._alarm = self._folder / f"alarm_{job}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._backstop: TextIO | None = None
        self._own_progress = 0.0
        self._touched = 0.0  # when somebody last did that to the file, by its clock
        self._last = time.monotonic()  # when this rank, or another as far as it has seen, last made progress

    def start(self) -> None:
        """Begin to watch."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            for left in (*self._folder.glob("alarm_*"), self._folder / "report.txt"):  # by earlier runs
                left.unlink(missing_ok=True)
        activity.progress()
        self._backstop = self._open(f"backstop_rank_{self._rank}.txt")
        self._put_off_backstop(self._limit + 6 * self._beat)
        self._write_stacks(None)
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
        self._look_for_progress()
        if time.monotonic() - self._last > self._limit or os.path.exists(self._alarm):
            self._put_off_backstop(6 * _GATHER_SECONDS)
            self._report()
        elif (line := self._failure()) and not self._stop.wait(_GATHER_SECONDS):
            _logger.error("ending this rank, as another has failed: %s", line)  # srun would not
            self._end(1)

    def _put_off_backstop(self, seconds: float) -> None:
        """Restart `faulthandler`'s timer; done at every beat, so that it goes off only if this thread cannot run."""
        if self._backstop is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._backstop)

    def _look_for_progress(self) -> None:
        now, own = time.monotonic(), activity.current()
        touched = self._touched
        with contextlib.suppress(OSError):
            touched = self._progress_file.stat().st_mtime
        has_moved, waits = own.progress != self._own_progress, now - own.progress < own.bound
        if has_moved or waits:
            self._last = now if waits else own.progress
            if touched == self._touched:  # nobody else has told the others
                self._touch(self._progress_file)
        elif touched != self._touched:
            self._last = now
        self._own_progress, self._touched = own.progress, touched

    # ---- the report -------------------------------------------------------------------------

    def _report(self) -> None:
        """Write this rank's stacks, wait for the others', and end the job; the first rank that has any says whose."""
        self._touch(self._alarm)
        place = where()
        self._write_stacks(place)
        deadline = time.monotonic() + _GATHER_SECONDS + self._beat
        while True:
            written = [self._stack_lines(rank) for rank in range(self._world_size)]
            places = [lines[1] if len(lines) > 1 else None for lines in written]
            places[self._rank] = place
            if None not in places or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if next(rank for rank, found in enumerate(places) if found is not None) == self._rank:
            names = [lines[0] if lines else f"rank {rank}" for rank, lines in enumerate(written)]
            report = describe(places, names, self._limit)
            report += f"\nstacks of all ranks that could write them: {self._folder}/stacks_rank_*.txt"
            with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone
                sys.stderr.write("".join(f"[rank {self._rank}] watchdog: {line}\n" for line in report.splitlines()))
                sys.stderr.flush()
            with _tolerated(), self._open("report.txt") as file:
                file.write(report + "\n")
        elif self._stop.wait(4 * _GATHER_SECONDS):  # the rank that reports ends the job
            return
        self._end(EXIT_STUCK)

    def _stack_lines(self, rank: int) -> list[str]:
        """What a rank has written in this run: who it is and, once it is stuck, where, and its stacks."""
        with contextlib.suppress(OSError):
            lines = (self._folder / f"stacks_rank_{rank}.txt").read_text(encoding="utf-8").splitlines()
            if lines and self._job in lines[0]:
                return lines
        return []

    def _write_stacks(self, place: str | None) -> None:
        """Write who this rank is and, if it is stuck, its ``place`` and the stacks of its threads."""
        name = f"stacks_rank_{self._rank}"
        with _tolerated():
            with self._open(f"{name}.tmp") as file:
                file.write(f"rank {self._rank} (host {socket.gethostname()}, process {os.getpid()}, run {self._job})\n")
                if place is not None:
                    file.write(f"{place}\n\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            (self._folder / f"{name}.tmp").replace(self._folder / f"{name}.txt")

    def _touch(self, path: Path) -> None:
        with _tolerated(), self._open(path.name) as file:
            file.write(f"{self._rank}\n")

    def _open(self, name: str) -> TextIO:
        return open(self._folder / name, "w", encoding="utf-8", opener=unless_planted)


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    """Turn an OSError of the body, such as a full disk, into a warning: the watch goes on all the same."""
    try:
        yield
    except OSError as error:
        _logger.warning("watchdog: %s", error)


def describe(places: Sequence[str | None], names: Sequence[str], limit: float) -> str:
    """Where the ranks are, one line for those in the same place; fewest first, as the others mostly wait for them.

    Args:
        places: of the ranks in order; None for one that does not say where it is.
        names: with which a rank appears that is alone in its place.
    """
    lines = [f"no rank has made progress for {limit:g} s (exp_manager.watchdog_minutes); ending the job"]
    groups: dict[str | None, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(place, []).append(rank)
    for place, ranks in sorted(groups.items(), key=lambda group: len(group[1])):
        who = names[ranks[0]] if len(ranks) == 1 else f"each of the ranks {', '.join(map(str, ranks))}"
        lines.append(f"{who} {place or 'has written no stacks: it is stopped, starved or gone'}")
    return "\n".join(lines)


# ---- where a rank is ----------------------------------------------------------------------------


def where() -> str:
    """What this rank's main thread is doing, and at which line; to be called from another thread."""
    line, collective = main_thread_location()
    doing = "is stuck" if collective is None else f"waits in {collective}:"
    return f"{doing} in phase {activity.current().phase}, at {line}"


def main_thread_location() -> tuple[str, str | None]:
    """Where the main thread is now; to be called from another thread.

    Returns:
        ``file:number in function: source``, its innermost line outside of libraries, and ``all_reduce of the default
        group``, or None outside of torch.distributed's collectives. A wait for a transfer begun earlier shows in the
        line only.
    """
    identifier = threading.main_thread().ident
    # CPython 3.11 deadlocks if the garbage collector runs in this call and frees a threading.local (gh-106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    frame = innermost = frames.get(identifier) if identifier is not None else None
    collective: FrameType | None = None
    ours: FrameType | None = None
    while frame is not None and ours is None:
        if frame.f_globals.get("__name__") == _COLLECTIVES:
            collective = frame  # the outermost: broadcast_object_list rather than the broadcast in it
        elif not any(part in frame.f_code.co_filename for part in _LIBRARIES):
            ours = frame
        frame = frame.f_back
    return _line(ours or innermost), _collective(collective) if collective is not None else None


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "nowhere"
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number} in {frame.f_code.co_name}: {linecache.getline(name, number).strip()}"


def _collective(frame: FrameType) -> str:
    import torch.distributed as dist

    group = frame.f_locals.get("group")
    where = "the default group"
    if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
        where = f"the group of ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"
    return f"{frame.f_code.co_name} of {where}"
