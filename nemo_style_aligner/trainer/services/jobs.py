"""Work that HTTP threads hand on: a bounded queue of jobs, which says what can be taken together."""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import os
import threading
import time

from nemo_style_aligner.guard.protocol import ProtocolError
from nemo_style_aligner.trainer.services.endpoints import QueuedRequest

logger = logging.getLogger(__name__)


class QueueState(enum.Enum):
    """The service's state, which decides whether jobs are accepted; its value tells clients why not."""

    STARTING = "the models are still being loaded"
    SERVING = "serving"
    DRAINING = "the service is shutting down"
    FAILED = "the service has failed and is shutting down"


class RequestQueue:
    """Jobs in order of arrival, at most ``limit`` accepted and not yet answered.

    The limit counts jobs from `put` to `release`, not only those waiting: each holds an HTTP thread,
    and the server has just enough of these that health routes are always answered.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: collections.deque[QueuedRequest] = collections.deque()
        self._outstanding = 0
        self._state = QueueState.STARTING
        self._changed = threading.Condition()

    @property
    def state(self) -> QueueState:
        """The service's state; see `set_state`."""
        return self._state

    @property
    def outstanding(self) -> int:
        """Jobs accepted and not yet released."""
        return self._outstanding

    @property
    def waiting(self) -> int:
        """Jobs accepted and not yet taken by the model server."""
        return len(self._jobs)

    def set_state(self, state: QueueState) -> None:
        """Change `state`, and wake the model server, which may be waiting for a job."""
        if state is QueueState.SERVING:
            logger.info("ready: requests are answered from now on; to end, kill -SIGINT %d", os.getpid())
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def put(self, job: QueuedRequest) -> None:
        """Accept a job. Raises `ProtocolError`: 503 when not serving, 429 when full."""
        with self._changed:
            if self._state is not QueueState.SERVING:
                raise ProtocolError(503, self._state.value, {"Retry-After": "1"})
            if self._outstanding >= self.limit:
                raise ProtocolError(
                    429,
                    f"{self.limit} requests are already waiting, which is the limit: try again later",
                    {"Retry-After": "1"},
                )
            self._outstanding += 1
            self._jobs.append(job)
            self._changed.notify_all()

    def release(self) -> None:
        """Note that one accepted job has been answered or given up by its HTTP thread."""
        with self._changed:
            self._outstanding -= 1

    def take(self, timeout_s: float, max_rows: int, max_delay_s: float) -> list[QueuedRequest]:
        """Take the next job, merged with those of its endpoint right behind it; empty after ``timeout_s`` without any.

        Jobs whose endpoint `merges` them are taken together up to ``max_rows`` rows, and no further than the next job
        of another endpoint, so that this keeps its place. While the rows are fewer, `take` waits for more until the
        first job is ``max_delay_s`` old. A job with more than ``max_rows`` rows is taken alone.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._jobs, timeout_s):
                return []
            delay_s = self._jobs[0].arrived + max_delay_s - time.monotonic()
            self._changed.wait_for(lambda: self._is_full(max_rows), max(0.0, delay_s))
            taken = [self._jobs.popleft() for _ in self._next(max_rows)]
        return [job for job in taken if job.future.set_running_or_notify_cancel()]  # else its caller has given it up

    def _next(self, max_rows: int) -> list[QueuedRequest]:
        """The jobs to take together, as of now."""
        together: list[QueuedRequest] = []
        for job in self._jobs:
            is_of_kind = job.endpoint.merges and job.endpoint is self._jobs[0].endpoint
            if together and not (is_of_kind and sum(other.rows for other in together) + job.rows <= max_rows):
                break
            together.append(job)
        return together

    def _is_full(self, max_rows: int) -> bool:
        """Whether nothing that may still come could be taken together with the next job."""
        together = self._next(max_rows)
        if not together or len(together) < len(self._jobs) or self._state is not QueueState.SERVING:
            return True
        return not together[0].endpoint.merges or sum(job.rows for job in together) >= max_rows

    def discard(self, job: QueuedRequest) -> None:
        """Forget a job whose caller has given it up; no effect on one that was taken already."""
        with self._changed, contextlib.suppress(ValueError):
            self._jobs.remove(job)

    def refuse_waiting(self, error: ProtocolError) -> None:
        """Answer every job that was not taken yet with ``error``."""
        with self._changed:
            jobs, self._jobs = list(self._jobs), collections.deque()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
