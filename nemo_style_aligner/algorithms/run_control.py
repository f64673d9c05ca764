"""When a run must stop early: its time is up, or somebody asked it to."""

from __future__ import annotations

import signal
import time
from types import FrameType

from nemo_style_aligner.parallel.groups import broadcast_object


def parse_duration(text: str | None) -> float | None:
    """``"DD:HH:MM:SS"`` (NeMo's form of ``max_time_per_run``) -> seconds; None -> None.

    Raises:
        ValueError: the text has another form.
    """
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 4 or not all(p.isdigit() for p in parts):
        raise ValueError(f"exp_manager.max_time_per_run={text!r} is not of the form DD:HH:MM:SS")
    days, hours, minutes, seconds = map(int, parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class RunControl:
    """Asked once per step whether to checkpoint and stop. Rank 0 decides, all ranks get the same answer.

    SIGUSR1 and SIGTERM ask for a stop; a second SIGTERM does nothing more.

    Args:
        max_seconds: time limit of this run, None for none.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.reason: str | None = None

    def install_signal_handlers(self) -> None:
        """Turn SIGUSR1 and SIGTERM into requests to stop after the present step."""

        def ask(number: int, frame: FrameType | None) -> None:
            self.reason = self.reason or f"received {signal.Signals(number).name}"

        signal.signal(signal.SIGUSR1, ask)
        signal.signal(signal.SIGTERM, ask)

    def should_stop(self) -> bool:
        """Collective: every rank must call it."""
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "the time limit exp_manager.max_time_per_run is reached"
        self.reason = broadcast_object(self.reason)
        return self.reason is not None
