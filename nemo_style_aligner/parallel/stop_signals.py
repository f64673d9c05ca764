"""Requests to stop: SIGUSR1 and SIGTERM, from a user, a launcher or Slurm, and SIGHUP, from a terminal that is gone.

`install` makes them mean "write a checkpoint and end with status `EXIT_REQUEUE`". What that means depends on what
the process is doing; docs/jobs.md has the whole picture:

- While a job starts there is nothing to save: the signal ends the process at once.
- After `hold` the loop asks `received` at its stop points.
- Inside `interruptible` nothing is done that must be completed: the signal ends the block.

Signal handlers belong to the process, and so this module's state is global.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from nemo_style_aligner.trusted_paths import unless_planted

_logger = logging.getLogger(__name__)

EXIT_REQUEUE = os.EX_TEMPFAIL
"""Exit status (75) of a job that stopped early with its state on disk: start it again and it goes on."""

REQUEUE_FILE = "requeue"
"""File in the log directory that says the same as `EXIT_REQUEUE`, for launchers that hide exit statuses."""

STOPPED_EARLY = "stopped early, with a checkpoint where there was something to save"
"""The reason that `REQUEUE_FILE` gives for a job that had begun."""

_STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
_DEAF_SECONDS = 2.0  # for the main thread to handle a signal, which it does at once unless it is in C code


class StopDuringStartError(SystemExit):
    """A stop was asked for before there was anything to save."""


class _InterruptedError(BaseException):
    """Ends an `interruptible` block."""


_received: list[signal.Signals] = []
_callbacks: list[Callable[[], None]] = []
_diversion: Callable[[signal.Signals], bool] | None = None
_end_start: Callable[[], object] | None = None
_starting = True
_interruptible = False


def install(end_start: Callable[[], object] | None = None) -> None:
    """Take over SIGUSR1, SIGTERM and, unless it is ignored, SIGHUP. Main thread only.

    Args:
        end_start: ends a process that is still starting; called in another thread if the main thread does not get to
            handle a signal, because it waits for other ranks in C code, and in the handler in the middle of an import.
    """
    global _end_start
    _end_start = end_start
    for number in taken(_STOPPING):
        signal.signal(number, _on_signal)
    if end_start is not None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)  # written to at once, by the C handler
        threading.Thread(target=_listen, args=(reader, writer, end_start), name="stop-signals", daemon=True).start()


def taken(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that a job takes over: all but SIGHUP where it is ignored, as under nohup."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _listen(reader: socket.socket, writer: socket.socket, end_start: Callable[[], object]) -> None:
    while numbers := reader.recv(64):
        if not set(_STOPPING).isdisjoint(numbers):
            time.sleep(_DEAF_SECONDS)
            if _starting and not _received:
                end_start()
    writer.close()  # this thread's reference has kept it open until here


def received() -> tuple[signal.Signals, ...]:
    """The stop signals that this process got, in order. Repeated ones change nothing."""
    return tuple(_received)


def hold() -> None:
    """From now on there is something to save: a signal no longer ends the process by itself."""
    global _starting
    _starting = False
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


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


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """SIGINT and SIGTERM take effect at the end of the block: within it, nobody could end the process that it starts.

    They are not blocked, since the new process would inherit that. For scripts that are no jobs. Main thread only.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handled:
            signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def is_importing_at_start(frame: FrameType | None) -> bool:
    """Whether this process is still starting, and the code that ``frame`` belongs to is being imported.

    An error that a handler raises there may be swallowed, as torch does while it loads numpy; the process would go on,
    with half a module.
    """
    while _starting and frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def on_request(callback: Callable[[], None]) -> None:
    """Call ``callback`` in the signal handler (it must not take locks), and now if a signal came already."""
    _callbacks.append(callback)
    if _received:
        callback()


def divert(take: Callable[[signal.Signals], bool]) -> None:
    """From now on the signal handler calls ``take`` first: where it returns True, the signal has no other effect."""
    global _diversion
    _diversion = take


class interruptible:
    """A block that a stop signal ends at once, wherever it is; execution goes on after the block.

    For work of this rank alone: an interrupted collective would leave the other ranks waiting. Afterwards ask
    `received`, together with the other ranks (`stop_points`).
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        global _interruptible
        _interruptible = self._enabled

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> bool:
        global _interruptible
        _interruptible = False
        return kind is _InterruptedError


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _interruptible
    if _diversion is not None and _diversion(signal.Signals(number)):
        return
    first = not _received
    _received.append(signal.Signals(number))
    for callback in _callbacks:
        callback()
    if _starting and first:
        if _end_start is not None and is_importing_at_start(frame):
            _end_start()
        raise StopDuringStartError(EXIT_REQUEUE)
    # In `__exit__` it would be too late: nobody would catch it.
    if _interruptible and frame is not None and frame.f_code is not interruptible.__exit__.__code__:
        _interruptible = False
        raise _InterruptedError


def write_requeue_file(log_dir: Path, reason: str) -> None:
    """Leave `REQUEUE_FILE` with the reason in it. If that fails (a full disk), the exit status says the same."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with open(log_dir / REQUEUE_FILE, "w", encoding="utf-8", opener=unless_planted) as file:
            file.write(f"{reason}\n")
    except OSError as error:
        _logger.warning("%s cannot be written: %s", log_dir / REQUEUE_FILE, error)


def remove_requeue_file(log_dir: Path) -> None:
    """Remove the `REQUEUE_FILE` of an earlier run."""
    (log_dir / REQUEUE_FILE).unlink(missing_ok=True)
