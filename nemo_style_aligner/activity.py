"""What this process is doing, for the watchdog and the progress line: its phase, what it counts, its last progress.

`ScopedTimer` scopes are phases, and every call that logs metrics is progress, so that most loops need not report any.
A wait that has a limit of its own announces it (`bounded`). Phases and such waits are the main thread's; any thread may
report progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Activity:
    """A snapshot. Times are of `time.monotonic()`, which is never set.

    Attributes:
        phase: names of the open phases, joined by ``/``.
        progress: when something last began, ended or was counted.
        bound: the longest wait in seconds that is announced (`bounded`) at the moment; 0 for none.
    """

    phase: str
    progress: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Count:
    """How far a phase is.

    Attributes:
        what: is counted, in the plural.
        done, total: how many of them.
        tokens: that were made meanwhile; None where none are.
        seconds: since the counting began.
        longest: tokens of what has been running longest; None where nothing is known of it.
    """

    what: str
    done: int
    total: int
    tokens: int | None
    seconds: float
    longest: int | None = None


STARTING = "starting"
"""Name of the phase while none is open."""

_phases: list[str] = []
_bounds: list[float] = []
_counters: list[Callable[[], Count]] = []
_progress = time.monotonic()
_listener: Callable[[], None] | None = None
_recorder: Callable[[str, float, float], None] | None = None


def progress() -> None:
    """Report that something was done: the process is not stuck. Cheap; for any thread."""
    global _progress
    _progress = time.monotonic()
    if _listener is not None:
        _listener()


def listen(listener: Callable[[], None] | None) -> None:
    """Have ``listener`` called at each `progress`, in the reporting thread; None: nothing is. It must be cheap."""
    global _listener
    _listener = listener


def record(recorder: Callable[[str, float, float], None] | None) -> None:
    """Have ``recorder`` called at the end of each phase: its path, when it began (`time.time()`), its seconds.

    None: nothing is.
    """
    global _recorder
    _recorder = recorder


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Make the body of a ``with`` statement a phase of the main thread; does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _phases.append(name)
    progress()
    began, began_at = time.monotonic(), time.time()
    try:
        yield
    finally:
        progress()
        if _recorder is not None:
            _recorder("/".join(_phases), began_at, time.monotonic() - began)
        _phases.pop()


@contextlib.contextmanager
def counting(
    what: str,
    measure: Callable[[], tuple[int, int]],
    tokens: Callable[[], int] | None = None,
    longest: Callable[[], int] | None = None,
) -> Iterator[None]:
    """Count what the body does, within its phase; does nothing in other threads than the main one.

    Args:
        what: is counted, in the plural.
        measure: how many are done, and of how many; cheap, and for any thread.
        tokens: how many were made in the body, if any are.
        longest: how many of them belong to what has been running longest, if that is known.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()

    def count() -> Count:
        made, running = (None if of is None else of() for of in (tokens, longest))
        return Count(what, *measure(), made, time.monotonic() - began, running)

    _counters.append(count)
    try:
        yield
    finally:
        _counters.remove(count)


def counts() -> list[Count]:
    """What is being counted now, the innermost last; for any thread."""
    return [count() for count in list(_counters)]


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Announce that the body may make no progress for ``seconds``, and then ends by itself; for the main thread."""
    progress()
    _bounds.append(seconds)
    try:
        yield
    finally:
        _bounds.remove(seconds)
        progress()


def current() -> Activity:
    """The state now; for any thread."""
    return Activity(phase="/".join(_phases) or STARTING, progress=_progress, bound=max([*_bounds, 0.0]))
