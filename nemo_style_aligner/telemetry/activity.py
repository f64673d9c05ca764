"""What this process is doing right now, for the watchdog: the phase it is in, and when it last got on.

`ScopedTimer` scopes are phases, and every number logged is progress, so that loops need not think of it. A wait that
has a limit of its own says so (`bounded`). Only the main thread reports: what other threads do helps it or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Activity:
    """A reading of the state. Times are `time.monotonic()`, which nobody sets.

    Attributes:
        phase: names of the open phases, joined by ``/``.
        since: when the innermost one began.
        progress: when something last began, ended or was counted.
        bound: the longest wait in seconds that an open phase has announced; 0 for none.
    """

    phase: str
    since: float
    progress: float
    bound: float


STARTING = "starting"
"""The phase before the first."""

_phases: list[tuple[str, float]] = []
_bounds: list[float] = []
_started = _progress = time.monotonic()
_listener: Callable[[], None] | None = None


def progress() -> None:
    """Something was done: the process is not stuck. Cheap; any thread."""
    global _progress
    _progress = time.monotonic()
    if _listener is not None:
        _listener()


def listen(listener: Callable[[], None] | None) -> None:
    """From now on ``listener`` is called at each `progress`, in its thread; None: nobody is. It must be cheap."""
    global _listener
    _listener = listener


def enter(name: str) -> None:
    """The main thread begins a phase; calls of other threads do nothing."""
    if threading.current_thread() is threading.main_thread():
        _phases.append((name, time.monotonic()))
        progress()


def leave() -> None:
    """The main thread ends its innermost phase."""
    if threading.current_thread() is threading.main_thread():
        progress()
        if _phases:
            _phases.pop()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """`enter` and `leave` around the body of a ``with`` statement."""
    enter(name)
    try:
        yield
    finally:
        leave()


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """The body may wait this long in silence and ends by itself then; main thread."""
    progress()
    _bounds.append(seconds)
    try:
        yield
    finally:
        _bounds.remove(seconds)
        progress()


def current() -> Activity:
    """The state now; any thread."""
    phases = list(_phases)
    return Activity(
        phase="/".join(name for name, _ in phases) or STARTING,
        since=phases[-1][1] if phases else _started,
        progress=_progress,
        bound=max([*_bounds, 0.0]),
    )
