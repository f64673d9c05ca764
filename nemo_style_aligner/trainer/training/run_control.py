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

from nemo_style_aligner.engine.parallel.groups import all_reduce_max
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE, StopEarlyError, stops

logger = logging.getLogger(__name__)


def parse_duration(text: str | None) -> float | None:
    """``"DD:HH:MM:SS"`` (NeMo's form of ``max_time_per_run``) -> seconds; None -> None.

    Raises:
        ValueError: the text has another form, or no time is left to do anything.
    """
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 4 or not all(p.isdecimal() for p in parts):
        # YAML reads 1:00:00:00, without quotes, as a number in base 60.
        hint = "; in a YAML file it needs quotes" if str(text).isdecimal() else ""
        raise ValueError(f"exp_manager.max_time_per_run={text} is not of the form DD:HH:MM:SS{hint}")
    days, hours, minutes, seconds = map(int, parts)
    total = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if total == 0.0:
        raise ValueError(
            f"exp_manager.max_time_per_run={text}: every start would end before its first step; null means no limit"
        )
    return total


class RunControl:
    """Decides at the loop's stop points whether the run stops there. All ranks get the same answer.

    A stop signal counts whichever rank it reached. Rank 0's clock decides about the time limit, and the run stops
    early enough to keep it: see `check`.

    Args:
        max_seconds: time limit of this run; None: no limit.

    Attributes:
        status: the job's exit status: 0, or `EXIT_REQUEUE` after `stop_early`. A service's is set by `service_status`.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._longest: dict[str, float] = {}
        self._is_saving = False
        self._time_is_up = False  # of a service only
        self.status = 0

    def begin(self) -> None:
        """The loop starts: signals wait for its stop points from now on."""
        stops.hold()
        # What was imported and built stays until the end. Python's garbage collector, which the objects of each pass
        # trigger, would scan all of it again and again, which takes a twentieth of a small model's training pass.
        gc.collect()
        gc.freeze()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time the body and keep the longest time under this name; a body that raises does not count."""
        started = time.monotonic()
        yield
        self._longest[name] = max(self._longest.get(name, 0.0), time.monotonic() - started)

    def save_began(self) -> None:
        """A save is under way from now on, in the background too."""
        self._is_saving = True

    def save_ended(self, seconds: float) -> None:
        """The save is whole on disk, ``seconds`` after it began."""
        self._is_saving = False
        self._longest[_SAVING] = max(self._longest.get(_SAVING, 0.0), seconds)

    def check(self, ahead: str | None = None) -> None:
        """A stop point: the run goes on if the section ``ahead`` and a save still fit into the time limit. Collective.

        While a save is under way two must fit, as it has to end first.

        Args:
            ahead: the `section` that follows; the longest time that it took in this run counts.

        Raises:
            StopEarlyError: a rank got a stop signal, or the time is up; on every rank.
        """
        saves = 2 if self._is_saving else 1
        seconds = self._longest.get(ahead or "", 0.0) + self._longest.get(STATE, 0.0)
        seconds += saves * self._longest.get(_SAVING, 0.0)
        is_up = self._deadline is not None and time.monotonic() + seconds >= self._deadline
        agreed = stops.agree(_TIME_IS_UP if is_up and dist.get_rank() == 0 else 0)
        if agreed:
            raise StopEarlyError(_describe(agreed))

    def stop_early(self, step: int, reason: StopEarlyError) -> None:
        """Log that the run stops before its end, with its state on disk, and set the status."""
        if dist.get_rank() == 0:
            logger.warning("stopping at step %d: %s", step, reason)
        self.status = EXIT_REQUEUE

    def watch_service(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` (from a signal handler or another thread) on a stop signal and when the time is up."""
        stops.on_request(stop)
        if self._deadline is not None:

            def end() -> None:
                self._time_is_up = True
                stop()

            timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), end)
            timer.daemon = True
            timer.start()

    def service_status(self) -> int:
        """Set a service's status at its end. Collective. SIGUSR1, SIGHUP and the time limit ask for another start."""
        again = self._time_is_up or not {signal.SIGUSR1, signal.SIGHUP}.isdisjoint(stops.received)
        self.status = EXIT_REQUEUE if all_reduce_max(int(again)) else 0
        return self.status


_SAVING = "saving"  # must fit into the time limit after every section
STATE = "state"  # the `RunControl.section` in which a save puts the trainer's state together: must fit as well

_TIME_IS_UP = 1000  # in the place of a signal's number


def _describe(code: int) -> str:
    if code == _TIME_IS_UP:
        return "the time limit exp_manager.max_time_per_run is reached, or would be before the next stop point"
    return f"received {signal.Signals(code).name}"
