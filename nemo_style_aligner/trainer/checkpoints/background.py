"""Write one checkpoint at a time in a background thread, whose collectives have a process group of their own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import all_reduce_max, background_group

logger = logging.getLogger(__name__)

Work = Callable[[dist.ProcessGroup | None, Callable[[], None]], None]
"""Called with the process group for its collectives, and with what it must call once the checkpoint is complete."""

_LAST_CHANCE_SECONDS = 60.0
# Ranks wait for the slowest disk in one collective, for which training's timeout is too short. When a peer dies, its
# sockets close and the wait ends at once all the same; the watchdog finds what hangs.
_TIMEOUT = timedelta(hours=12)
_WRITTEN, _RUNNING, _FAILED = range(3)


@dataclasses.dataclass(frozen=True)
class WorkTimes:
    """Durations in seconds.

    Attributes:
        background: of the work in the thread; 0 if it was done at once.
        total: from ``started`` (see `BackgroundWriter.run`) to the end of the work.
    """

    background: float
    total: float


OnEnd = Callable[[WorkTimes], None]


@dataclasses.dataclass(frozen=True)
class _Pending:
    future: concurrent.futures.Future[WorkTimes]  # of all of the work
    whole: concurrent.futures.Future[None]  # of the checkpoint
    on_end: OnEnd


class BackgroundWriter:
    """Runs work in a thread. All ranks use their writers in step; constructing one is collective.

    The caller must follow up with `finish` or `poll`, in which the main thread takes note of the work's end.

    Attributes:
        group: for the work's collectives; None stands for the default group, of one rank.
    """

    def __init__(self) -> None:
        self.group = background_group(_TIMEOUT)
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: _Pending | None = None

    def run(self, work: Work, started: float, on_end: OnEnd, *, in_background: bool) -> concurrent.futures.Future[None]:
        """Do the work, in the thread or at once. Collective: every rank does its part. Finish earlier work first.

        Args:
            started: `time.monotonic()` at the beginning of the save that the work belongs to.
            on_end: called in the main thread of every rank once the work has succeeded.

        Returns:
            A future that is done when the checkpoint is complete on this rank, even if the work goes on after that.
        """
        if self._pending is not None:
            raise RuntimeError("the background writer is still at work: call finish() first")
        group = self.group
        whole: concurrent.futures.Future[None] = concurrent.futures.Future()
        if not in_background:
            work(group, lambda: whole.set_result(None))
            on_end(WorkTimes(0.0, time.monotonic() - started))
            return whole
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-writer")
        submitted = time.monotonic()

        def part() -> WorkTimes:
            try:
                work(group, lambda: whole.set_result(None))
            except BaseException as error:
                if not whole.done():
                    whole.set_exception(error)
                raise
            ended = time.monotonic()
            return WorkTimes(ended - submitted, ended - started)

        self._pending = _Pending(self._thread.submit(part), whole, on_end)
        return whole

    def finish(self) -> None:
        """Wait for the end of the work, if there is any. Collective.

        Raises:
            Exception: what the work raised.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            times = pending.future.result()
            if torch.cuda.is_available():
                _empty_host_cache()  # torch would keep the pinned memory of what was written
            pending.on_end(times)

    def poll(self) -> None:
        """`finish` if the work has ended on all ranks, or failed on one. Collective."""
        if self._pending is None:
            return
        future, state = self._pending.future, _RUNNING
        if future.done():
            state = _WRITTEN if future.exception() is None else _FAILED
        if all_reduce_max(state) != _RUNNING:
            self.finish()

    @contextlib.contextmanager
    def last_chance(self) -> Iterator[None]:
        """If the body fails, give work under way another minute to end: a restart will need what it writes."""
        try:
            yield
        finally:
            if self._pending is not None:
                pending, self._pending = self._pending, None
                done, _ = concurrent.futures.wait([pending.future], _LAST_CHANCE_SECONDS)
                missing = "an archive" if pending.whole.done() and not pending.whole.exception() else "a checkpoint"
                if not done:
                    logger.error("%s was given up: it was not complete after %.0f s", missing, _LAST_CHANCE_SECONDS)
                elif error := pending.future.exception():
                    logger.error("%s was not written: %s", missing, error)


def _empty_host_cache() -> None:
    """Return unused pinned memory to the system. torch before 2.11 has no public function for this."""
    public = getattr(torch.accelerator, "empty_host_cache", None)
    empty = public if public is not None else torch._C._host_emptyCache  # type: ignore[attr-defined]
    empty()
