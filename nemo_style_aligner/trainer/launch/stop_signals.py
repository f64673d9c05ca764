"""Requests to stop: SIGUSR1 and SIGTERM, from a user, a launcher or Slurm, and SIGHUP, from a terminal that is gone.

They mean "write a checkpoint and end with status `EXIT_REQUEUE`". What that is depends on what the process is doing;
docs/jobs.md has the whole picture:

- While a job starts there is nothing to save: the signal ends the process at once.
- After `StopSignals.hold` all ranks agree at the loop's stop points (`StopSignals.check`).
- Inside `StopSignals.interruptible` nothing is done that must be completed: the signal ends the block.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType

from nemo_style_aligner.guard.trusted_paths import unless_planted

_logger = logging.getLogger(__name__)

EXIT_REQUEUE = os.EX_TEMPFAIL
"""Exit status (75) of a job that stopped early with its state on disk: start it again and it goes on."""

REQUEUE_FILE = "requeue"
"""File in the log directory that says the same as `EXIT_REQUEUE`, for launchers that hide exit statuses."""

STOPPED_EARLY = "stopped early, with a checkpoint where there was something to save"
"""The reason that `REQUEUE_FILE` gives for a job that had begun."""

_STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)


class StopEarlyError(Exception):
    """All ranks have agreed to stop here. What was not finished is not part of the job's state."""


class _InterruptedError(BaseException):
    """Ends an `interruptible` block."""


class StopSignals:
    """The stop signals of this process, and what they do.

    Attributes:
        received: those that came, in order. Repeated ones change nothing.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._callbacks: list[Callable[[], None]] = []
        self._diversion: Callable[[signal.Signals], bool] | None = None
        self._is_starting = True
        self.is_interruptible = False

    def install(self, end_start: Callable[[signal.Signals], object] | None = None) -> None:
        """Take over SIGUSR1, SIGTERM and, unless it is ignored, SIGHUP. Main thread only.

        Args:
            end_start: ends a process that is still starting. Called in another thread: the main one may be waiting for
                other ranks in C code, where no handler runs, or importing, where exceptions may be swallowed.
        """
        for number in taken(_STOPPING):
            signal.signal(number, self._on_signal)
        if end_start is not None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # written to at once, by the C handler
            listen = threading.Thread(target=self._listen, args=(reader, writer, end_start), daemon=True)
            listen.start()

    def _listen(
        self, reader: socket.socket, writer: socket.socket, end_start: Callable[[signal.Signals], object]
    ) -> None:
        while numbers := reader.recv(64):
            for number in _STOPPING:
                if self._is_starting and number in numbers:
                    end_start(number)
        writer.close()  # this thread's reference has kept it open until here

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._diversion is not None and self._diversion(signal.Signals(number)):
            return
        self.received.append(signal.Signals(number))
        for callback in self._callbacks:
            callback()
        # In `__exit__` it would be too late: nobody would catch it.
        if self.is_interruptible and frame is not None and frame.f_code is not _Interruptible.__exit__.__code__:
            self.is_interruptible = False
            raise _InterruptedError

    def hold(self) -> None:
        """From now on there is something to save: a signal no longer ends the process by itself."""
        self._is_starting = False
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def on_request(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the signal handler (it must not take locks), and now if a signal came already."""
        self._callbacks.append(callback)
        if self.received:
            callback()

    def divert(self, take: Callable[[signal.Signals], bool]) -> None:
        """From now on the handler calls ``take`` first: where it returns True, the signal has no other effect."""
        self._diversion = take

    def interruptible(self, enabled: bool = True) -> _Interruptible:
        """A block that a stop signal ends at once, wherever it is; execution goes on after the block.

        For work of this rank alone: an interrupted collective would leave the other ranks waiting. Afterwards look at
        `received`, together with the other ranks (`check`).
        """
        return _Interruptible(self, enabled)

    def agree(self, reason: int = 0) -> int:
        """Agree with all ranks whether to stop. Collective.

        Returns:
            On every rank the largest of all ranks' ``reason`` and of the numbers of the stop signals that any of them
            got; 0: go on.
        """
        from nemo_style_aligner.engine.parallel.groups import all_reduce_max  # torch: the supervisor does without

        return all_reduce_max(max(reason, int(self.received[0]) if self.received else 0))

    def check(self) -> None:
        """Stop point: raise `StopEarlyError` on every rank if one of them got a stop signal. Collective."""
        if number := self.agree():
            raise StopEarlyError(f"received {signal.Signals(number).name}")


class _Interruptible:
    """See `StopSignals.interruptible`."""

    def __init__(self, signals: StopSignals, enabled: bool) -> None:
        self._signals = signals
        self._enabled = enabled

    def __enter__(self) -> None:
        self._signals.is_interruptible = self._enabled

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> bool:
        self._signals.is_interruptible = False
        return kind is _InterruptedError


stops = StopSignals()
"""This process's: signal handlers belong to the process."""


def taken(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that a job takes over: all but SIGHUP where it is ignored, as under nohup."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def ignore() -> None:
    """From now on stop signals have no effect: the process is ending, and its status is known. Main thread only.

    Python gives handled signals their default effect back while it still takes modules apart, which lasts a second with
    torch: they would then kill the process. Ignored ones stay ignored.
    """
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def exit_on_sigterm() -> None:
    """Make SIGTERM end this process by `SystemExit`, so that child processes end and temporary files are removed.

    For scripts that are no jobs. Main thread only.
    """

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one, as `timeout` sends it, must not stop cleaning up
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


def write_requeue_file(log_dir: Path, reason: str) -> None:
    """Leave `REQUEUE_FILE` with the reason in it. If that fails (a full disk), the exit status says the same."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with open(log_dir / REQUEUE_FILE, "w", encoding="utf-8", opener=unless_planted) as file:
            file.write(f"{reason}\n")
    except OSError as error:
        _logger.warning("%s cannot be written: %s", log_dir / REQUEUE_FILE, error)
