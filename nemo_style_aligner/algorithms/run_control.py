"""When a run must stop early: its time is up, or somebody asked it to."""

from __future__ import annotations

import logging
import signal
import time

import torch.distributed as dist

from nemo_style_aligner.parallel import stop_signals
from nemo_style_aligner.parallel.groups import all_reduce_max
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE

logger = logging.getLogger(__name__)


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
    """Asked at the loop's stop points whether to stop. All ranks get the same answer.

    A stop signal counts whichever rank it reached; rank 0's clock decides about the time limit.

    Args:
        max_seconds: time limit of this run, None for none.

    Attributes:
        reason: why the run stops; None while it goes on.
        status: the job's exit status: 0, or `EXIT_REQUEUE` after `stop_early`.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self.reason: str | None = None
        self.status = 0

    def begin(self) -> None:
        """The loop starts: signals wait for its stop points from now on."""
        stop_signals.hold()

    def should_stop(self) -> bool:
        """Collective: every rank must call it."""
        received = stop_signals.received()
        mine = int(received[0]) if received else 0
        if not mine and self._deadline is not None and dist.get_rank() == 0 and time.monotonic() >= self._deadline:
            mine = _TIME_IS_UP
        agreed = all_reduce_max(mine)
        if agreed:
            self.reason = self.reason or _describe(agreed)
        return agreed != 0

    def stop_early(self, step: int) -> None:
        """The state is on disk as far as it is worth it, and the run is not done: say so and set the status."""
        logger.warning("stopping at step %d: %s", step, self.reason)
        self.status = EXIT_REQUEUE

    def service_status(self) -> int:
        """Collective: a service's exit status. SIGTERM is its regular end, SIGUSR1 wants it to be started again."""
        return EXIT_REQUEUE if all_reduce_max(int(signal.SIGUSR1 in stop_signals.received())) else 0


_TIME_IS_UP = 1000  # in the place of a signal's number


def _describe(code: int) -> str:
    if code == _TIME_IS_UP:
        return "the time limit exp_manager.max_time_per_run is reached"
    return f"received {signal.Signals(code).name}"
