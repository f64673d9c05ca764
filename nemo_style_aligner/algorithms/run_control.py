"""When a run must stop early: its time is up, or somebody asked it to."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from nemo_style_aligner.parallel import stop_points, stop_signals
from nemo_style_aligner.parallel.groups import all_reduce_max
from nemo_style_aligner.parallel.stop_points import StopEarlyError
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

    A stop signal counts whichever rank it reached; rank 0's clock decides about the time limit, which is kept with
    what comes next in mind: see `check`.

    Args:
        max_seconds: time limit of this run, None for none.

    Attributes:
        status: the job's exit status: 0, or `EXIT_REQUEUE` after `stop_early`; a service's after `service_status`.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._longest: dict[str, float] = {}
        self._is_saving = False
        self._time_is_up = False  # of a service
        self.status = 0

    def begin(self) -> None:
        """The loop starts: signals wait for its stop points from now on."""
        stop_signals.hold()
        # What was imported and built stays until the end. Python's collector would look at all of it again and again,
        # set off by the objects of each pass: a twentieth of a training pass of a small model.
        gc.collect()
        gc.freeze()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Remember how long the body takes at most in this run, if it comes to its end."""
        started = time.monotonic()
        yield
        self._longest[name] = max(self._longest.get(name, 0.0), time.monotonic() - started)

    def save_began(self) -> None:
        """A save is under way from now on, in the background too."""
        self._is_saving = True

    def save_ended(self, seconds: float) -> None:
        """It is whole on disk, after so long."""
        self._is_saving = False
        self._longest[_SAVING] = max(self._longest.get(_SAVING, 0.0), seconds)

    def check(self, ahead: str | None = None) -> None:
        """Collective: a stop point. What is ``ahead`` until the next one, and a save, still fit into the time limit.

        A save that is under way has to end first: then two must fit.

        Args:
            ahead: a `section`; the longest that this run has seen counts.

        Raises:
            StopEarlyError: on every rank.
        """
        saves = 2 if self._is_saving else 1
        seconds = self._longest.get(ahead or "", 0.0) + self._longest.get(STATE, 0.0)
        seconds += saves * self._longest.get(_SAVING, 0.0)
        is_up = self._deadline is not None and time.monotonic() + seconds >= self._deadline
        agreed = stop_points.agree(_TIME_IS_UP if is_up and dist.get_rank() == 0 else 0)
        if agreed:
            raise StopEarlyError(_describe(agreed))

    def stop_early(self, step: int, reason: StopEarlyError) -> None:
        """The run is not done, and its state is on disk: say so and set the status."""
        if dist.get_rank() == 0:
            logger.warning("stopping at step %d: %s", step, reason)
        self.status = EXIT_REQUEUE

    def watch_service(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` (from a signal handler or another thread) on a stop signal and when the time is up."""
        stop_signals.on_request(stop)
        if self._deadline is not None:

            def end() -> None:
                self._time_is_up = True
                stop()

            timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), end)
            timer.daemon = True
            timer.start()

    def service_status(self) -> int:
        """Collective: a service has ended; sets its status. SIGTERM is its regular end, all else asks for a start."""
        again = self._time_is_up or not {signal.SIGUSR1, signal.SIGHUP}.isdisjoint(stop_signals.received())
        self.status = EXIT_REQUEUE if all_reduce_max(int(again)) else 0
        return self.status


_SAVING = "saving"  # must fit behind every section
STATE = "state"  # the `RunControl.section` in which a save puts the trainer's state together: must fit as well

_TIME_IS_UP = 1000  # in the place of a signal's number


def _describe(code: int) -> str:
    if code == _TIME_IS_UP:
        return "the time limit exp_manager.max_time_per_run is reached, or would be before the next stop point"
    return f"received {signal.Signals(code).name}"
