"""Peak memory of this process, interval by interval."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

import psutil
import torch


class PeakMeter(Protocol):
    """Measures peaks, one interval after the other."""

    def take(self) -> int:
        """Return the most bytes held at once since the last call, and begin a new interval."""
        ...


class DevicePeak:
    """Peak memory of tensors on this rank's GPU, as torch's allocator counts it."""

    def take(self) -> int:
        """See `PeakMeter.take`."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class ResidentPeak:
    """Peak of the process's resident set, as Linux counts it: exact, and without cost between calls."""

    _STATUS = Path("/proc/self/status")
    _RESET = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self._reset()

    def take(self) -> int:
        """See `PeakMeter.take`."""
        for line in self._STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                self._reset()
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._STATUS} has no VmHWM")

    def _reset(self) -> None:
        self._RESET.write_text("5")  # the high-water mark goes down to the present size


class SampledPeak:
    """Peak of the resident set, sampled 50 times a second, for systems that do not keep it."""

    _SECONDS = 0.02

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        threading.Thread(target=self._watch, name="memory-peak", daemon=True).start()

    def take(self) -> int:
        """See `PeakMeter.take`."""
        peak, self._peak = max(self._peak, self._process.memory_info().rss), 0
        return peak

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(self._SECONDS)


def peak_meter() -> PeakMeter:
    """The meter for this rank: of its GPU's memory or, without a GPU, of its resident set."""
    if torch.cuda.is_available():
        return DevicePeak()
    try:
        return ResidentPeak()
    except OSError:  # another system, or one that does not allow it
        return SampledPeak()
