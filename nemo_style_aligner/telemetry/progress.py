"""Progress of a loop: a bar on a terminal, now and then a plain line in a log file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, TextIO

from tqdm import tqdm

from nemo_style_aligner.telemetry import activity

_BAR_SECONDS = 1.0  # between changes of what a bar says of the present phase


class ProgressBar:
    """Shows how far a loop is. Rank 0 only; silent on the other ranks.

    On a terminal this is a tqdm bar. Elsewhere (a batch job's log, a container's terminal that nobody has given a size)
    it is one plain line per ``interval`` seconds, and one at the end. Within a ``with`` statement both also say how far
    a unit is that takes longer: its phase, what of it is done, and how long the rest will take (`activity`)::

        with ProgressBar(total=100, description="PPO", rank=rank) as progress:
            for step in range(100):
                progress.update(1, {"reward": 0.3})

    Args:
        total: number of units.
        description: what is going on, in one or two words.
        rank: this process's rank.
        initial: units done before this run (after resuming).
        interval: seconds between plain lines.
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
        interval: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._description = description
        self._total = total
        self._done = initial
        self._initial = initial
        self._metrics: dict[str, float] = {}
        self._interval = interval
        self._clock = clock
        self._started = self._last_line = clock()
        self._shown_done: int | None = None
        self._enabled = rank == 0
        self._bar: tqdm[NoReturn] | None = None
        if self._enabled and _has_room(self._stream):
            self._bar = tqdm(
                total=total, initial=initial, desc=description, file=self._stream, dynamic_ncols=True, leave=True
            )

    def update(self, units: int = 1, metrics: Mapping[str, float] | None = None) -> None:
        """Count ``units`` more as done and show ``metrics`` beside the count (the latest values are kept)."""
        self._done += units
        self._metrics.update(metrics or {})
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in self._metrics.items()}, refresh=False)
            self._bar.update(units)
        elif self._clock() - self._last_line >= self._interval:
            self._print_line()

    def close(self) -> None:
        """Show the final state. Calling it twice does nothing."""
        if not self._enabled:
            return
        self._enabled = False
        if self._bar is not None:
            self._bar.close()
        elif self._shown_done != self._done:
            self._print_line()

    def __enter__(self) -> ProgressBar:
        if self._enabled:
            activity.listen(self._note_activity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.listen(None)
        self.close()

    def _note_activity(self) -> None:
        interval = self._interval if self._bar is None else _BAR_SECONDS
        if self._clock() - self._last_line < interval:
            return
        phase, far = activity.current().phase, how_far(activity.counts())
        where = "" if phase == activity.STARTING else f"in {phase}"
        where = ": ".join(filter(None, (where, far)))
        if self._bar is None:
            self._print_line(where and f", {where}")
        elif where:
            self._last_line = self._clock()
            self._bar.set_postfix_str(where)

    def _print_line(self, where: str = "") -> None:
        now = self._clock()
        self._last_line = now
        if not where:
            self._shown_done = self._done
        elapsed = now - self._started
        done_here = self._done - self._initial
        rate = f", {elapsed / done_here:.3g} s each" if done_here > 0 else ""
        metrics = "".join(f", {k} {v:.4g}" for k, v in self._metrics.items())
        line = f"{self._description}: {self._done}/{self._total} after {elapsed:.0f} s{rate}{metrics}{where}"
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone, a full disk: the loop goes on
            print(line, file=self._stream, flush=True)


def how_far(counts: Sequence[activity.Count]) -> str:
    """What is done of what is counted, the rate of tokens, and how long the rest will take at the rate so far."""
    known = [count for count in counts if count.total > 0]
    parts = [f"{count.done} of {count.total} {count.what}" for count in known]
    parts += [f"{c.tokens / max(c.seconds, 1e-9):.3g} tokens/s" for c in known[-1:] if c.tokens is not None]
    share = 0.0
    for count in reversed(known):
        share = (count.done + share) / count.total
    if 0 < share < 1:
        parts.append(f"{_duration(known[0].seconds * (1 - share) / share)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _has_room(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with a size: in one of 0 lines tqdm would show nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0
