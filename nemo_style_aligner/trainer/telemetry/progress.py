"""Progress of a loop: now and then a plain line."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from nemo_style_aligner import activity
from nemo_style_aligner.wording import duration

SECONDS_VARIABLE = "NEMO_STYLE_ALIGNER_PROGRESS_SECONDS"
"""Seconds between lines, for who shows them to a person beside the job's log."""

_LINE = re.compile(rb"[^\r\n:]*: \d+/\d+ after \d+ s[^\r\n]*")
_TAIL_BYTES = 2**16  # of a log


class Progress:
    """Shows how far a loop is: one line per ``interval`` seconds, and one at the end. Silent on other ranks than 0.

    Within a ``with`` statement it also says how far a unit is that takes longer: its phase, what of it is done, and how
    long the rest will take (`activity`)::

        with Progress(total=100, description="PPO", rank=rank) as progress:
            for step in range(100):
                progress.update(1, {"reward": 0.3})

    Args:
        total: number of units.
        description: what is going on, in one or two words.
        rank: this process's rank.
        initial: units done before this run (after resuming).
        interval: seconds between lines; None: those of `SECONDS_VARIABLE`, else 5 on a terminal, elsewhere 30.
        stream: where it is shown; None: standard error.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        description: str,
        rank: int = 0,
        *,
        initial: int = 0,
        interval: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._description = description
        self._total = total
        self._done = initial
        self._initial = initial
        self._metrics: dict[str, float] = {}
        usual = float(os.environ.get(SECONDS_VARIABLE) or (5.0 if self._stream.isatty() else 30.0))
        self._interval = usual if interval is None else interval
        self._clock = clock
        self._started = self._last_line = self._counted = clock()
        self._shown_done: int | None = None
        self._enabled = rank == 0

    def update(self, units: int = 1, metrics: Mapping[str, float] | None = None) -> None:
        """Count ``units`` more as done and show ``metrics`` beside the count (the latest values are kept)."""
        self._done += units
        self._counted = self._clock()
        self._metrics.update(metrics or {})
        if self._enabled and self._clock() - self._last_line >= self._interval:
            self._print_line()

    def __enter__(self) -> Progress:
        if self._enabled:
            activity.listen(self._note_activity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.listen(None)
        if self._enabled and self._shown_done != self._done:
            self._print_line()

    def _note_activity(self) -> None:
        if self._clock() - self._last_line < self._interval:
            return
        phase, far = activity.current().phase, how_far(activity.counts())
        where = "" if phase == activity.STARTING else f"in {phase}"
        where = ": ".join(filter(None, (where, far)))
        self._print_line(where and f", {where}")

    def _print_line(self, where: str = "") -> None:
        now = self._clock()
        self._last_line = now
        if not where:
            self._shown_done = self._done
        rate, elapsed = "", now - self._started
        if done_here := self._done - self._initial:
            # Of units so far or, if the present one takes longer, with it.
            each = max((self._counted - self._started) / done_here, elapsed / (done_here + 1))
            rate = f", {each:.3g} s each"
            rate += f", {duration(each * (self._total - self._done))} left" if self._done < self._total else ""
        metrics = "".join(f", {k} {v:.4g}" for k, v in self._metrics.items())
        line = f"{self._description}: {self._done}/{self._total} after {elapsed:.0f} s{rate}{metrics}{where}"
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone, a full disk: the loop goes on
            print(line, file=self._stream, flush=True)


def newest_line(log: Path) -> str | None:
    """The newest line of a `Progress` near the end of a log; None if there is none, or no log."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = _LINE.findall(file.read())
        return lines[-1].decode(errors="replace").strip() if lines else None
    return None


def how_far(counts: Sequence[activity.Count]) -> str:
    """What is done of what is counted, the rate of tokens, and how long the rest will take at the rate so far."""
    known = [count for count in counts if count.total > 0]
    parts = [f"{count.done} of {count.total} {count.what}" for count in known]
    parts += [f"{c.tokens / max(c.seconds, 1e-9):.3g} tokens/s" for c in known[-1:] if c.tokens is not None]
    parts += [f"the longest running has {c.longest} tokens" for c in known[-1:] if c.longest]
    share = 0.0
    for count in reversed(known):
        share = (count.done + share) / count.total
    if 0 < share < 1:
        parts.append(f"{duration(known[0].seconds * (1 - share) / share)} left")
    return ", ".join(parts)
