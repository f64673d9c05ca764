"""Progress of a loop: a bar on a terminal, now and then a plain line in a log file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NoReturn, TextIO

from tqdm import tqdm

from nemo_style_aligner.telemetry import activity


class ProgressBar:
    """Shows how far a loop is. Rank 0 only; silent on the other ranks.

    On a terminal this is a tqdm bar. Elsewhere (a batch job's log, a container's terminal that nobody has given a size)
    it is one plain line per ``interval`` seconds, and one at the end. Within a ``with`` statement lines also appear in
    the course of a unit that takes longer; they then name the phase (`activity`)::

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
        if self._enabled and self._bar is None:
            activity.listen(self._note_activity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity.listen(None)
        self.close()

    def _note_activity(self) -> None:
        if self._clock() - self._last_line >= self._interval:
            phase = activity.current().phase
            self._print_line("" if phase == activity.STARTING else f", in {phase}")

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


def _has_room(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with a size: in one of 0 lines tqdm would show nothing."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0
