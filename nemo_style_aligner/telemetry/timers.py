"""Nested timers for the phases of a step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from nemo_style_aligner.telemetry import activity


class ScopedTimer:
    """Sums up wall-clock time by nested scopes.

    A scope entered inside another one is reported under both names joined by ``/``::

        timer = ScopedTimer(synchronize=torch.cuda.synchronize)
        with timer("rollout"):
            with timer("generate"):
                ...
        timer.consume_durations()   # {"rollout": 3.1, "rollout/generate": 2.8}

    Scopes nest per thread, so that work that overlaps in another thread has its own names. All methods
    may be called from any thread. The main thread's scopes are the phases that the watchdog reports.

    Args:
        synchronize: called before each reading of the clock, so that work queued on a device counts where
            it was queued. ``None`` on a CPU.
        clock: seconds, monotonic.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._open_scopes = threading.local()
        self._lock = threading.Lock()
        self._durations: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement, also when it raises."""
        scopes: list[str] = self._open_scopes.__dict__.setdefault("names", [])
        scopes.append(name)
        activity.enter(name)
        path = "/".join(scopes)
        started = self._read_clock()
        try:
            yield
        finally:
            elapsed = self._read_clock() - started
            scopes.pop()
            activity.leave()
            with self._lock:
                self._durations[path] = self._durations.get(path, 0.0) + elapsed

    def record(self, name: str, seconds: float) -> None:
        """Add what was measured elsewhere, under a name of its own."""
        with self._lock:
            self._durations[name] = self._durations.get(name, 0.0) + seconds

    def consume_durations(self) -> dict[str, float]:
        """Seconds spent in each scope that has closed since the last call, in order of first closing."""
        with self._lock:
            durations, self._durations = self._durations, {}
        return durations

    def _read_clock(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
