"""Nested timers for the phases of a step, and the peak memory of each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nemo_style_aligner import activity

TakePeak = Callable[[], int]
"""Returns the most bytes of memory held at once since its last call."""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ScopedTimer:
    """Sums up wall-clock time by nested scopes.

    A scope entered inside another one is reported under both names joined by ``/``::

        timer = ScopedTimer()
        with timer("rollout"):
            with timer("generate"):
                ...
        timer.consume_durations()   # {"rollout": 3.1, "rollout/generate": 2.8}

    A GPU is synchronised before the clock is read: its work counts in the scope that queued it.
    Scopes nest per thread, so that work that overlaps in another thread has its own names. All methods
    may be called from any thread. The main thread's scopes are the phases that the watchdog reports.

    Args:
        clock: seconds, monotonic.
        take_peak: measures the peak of each of the main thread's scopes; None: peaks are not measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, take_peak: TakePeak | None = None) -> None:
        # The device by its number: threads have a current device of their own.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._clock = clock
        self._take_peak = take_peak
        self._open_peaks: list[int] = []  # bytes, of the main thread's open scopes
        self._peaks: dict[str, int] = {}
        self._open_scopes = threading.local()
        self._lock = threading.Lock()
        self._durations: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement, even if it raises."""
        scopes: list[str] = self._open_scopes.__dict__.setdefault("names", [])
        scopes.append(name)
        path = "/".join(scopes)
        is_metered = self._take_peak is not None and threading.current_thread() is threading.main_thread()
        with activity.phase(name), torch.profiler.record_function(name):
            if is_metered:
                self._note_peak()
                self._open_peaks.append(0)
            started = self._read_clock()
            try:
                yield
            finally:
                elapsed = self._read_clock() - started
                scopes.pop()
                if is_metered:
                    self._note_peak()
                    self._peaks[path] = max(self._peaks.get(path, 0), self._open_peaks.pop())
                self.record(path, elapsed)

    def record(self, name: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        with self._lock:
            self._durations[name] = self._durations.get(name, 0.0) + seconds

    def consume_durations(self) -> dict[str, float]:
        """Seconds spent in each scope that has closed since the last call, in order of first closing."""
        with self._lock:
            durations, self._durations = self._durations, {}
        return durations

    def consume_peaks(self) -> dict[str, float]:
        """``<scope>_peak_gib``: the most memory in GiB in each scope that has closed since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"{path}_peak_gib": size / 2**30 for path, size in peaks.items()}

    def _note_peak(self) -> None:
        """Count the peak since the last call for every scope that is open."""
        if self._take_peak is not None:
            peak = self._take_peak()
            self._open_peaks = [max(size, peak) for size in self._open_peaks]

    def _read_clock(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return self._clock()


def peak_meter() -> TakePeak | None:
    """What measures this rank's peaks: of its GPU's tensors or, without a GPU, of its resident set.

    None where the system does not count the latter, as Linux does.
    """
    if torch.cuda.is_available():
        return _device_peak
    try:
        _resident_peak()  # begins the first interval
    except OSError:
        return None
    return _resident_peak


def _device_peak() -> int:
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _resident_peak() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            _RESET.write_text("5")  # the high-water mark goes down to the present size
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no VmHWM")
