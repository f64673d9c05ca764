"""Work that HTTP threads hand on: the jobs, the bounded queue, and how inference jobs share a batch."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.services.exactly_once.ledger import CriticPosition
from nemo_style_aligner.services.protocol import ProtocolError

logger = logging.getLogger(__name__)

_PER_TOKEN = {"values", "logprobs"}

ResultFuture = concurrent.futures.Future[dict[str, np.ndarray]]
"""Of the outputs by name."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """Something the model server has to do."""

    future: ResultFuture = dataclasses.field(default_factory=ResultFuture)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    request_id: str = ""
    taken: float = 0.0  # when work on it began, as `arrived` by the monotonic clock
    batch_rows: int = 1  # of the batch that it was merged into

    @property
    def rows(self) -> int:
        """Sequences of the request, as far as they may be merged with others'."""
        return 1


@dataclasses.dataclass(kw_only=True, eq=False)
class InferJob(Job):
    """tokens: int64 [b, s]; lengths: int64 [b], true length of each row, 1 <= length <= s.

    ``position``: where the critic must be to answer; None: anywhere. ``lines``: each row's prompt with all keys of its
    line, ``prompt_lengths``: int64 [b], its tokens, ``steps``: int64 [b], the run's; None where requests do not say.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    position: CriticPosition | None = None
    lines: list[dict[str, Any]] | None = None
    prompt_lengths: np.ndarray | None = None
    steps: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Sequences of the request."""
        return len(self.tokens)


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainJob(Job):
    """``batch``: tokens, int64 [b, s]; returns, prev_values, mask, float32 [b, s-1]. ``digest``: its, see `ledger`.

    ``position``: where the critic must be; None: anywhere, for a request without a number.
    """

    batch: dict[str, np.ndarray]
    digest: str
    position: CriticPosition | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class SaveJob(Job):
    """Write a checkpoint, of a critic at ``position`` if one is given.

    ``keep_history``: the newest checkpoint with this history is not pruned.
    """

    position: CriticPosition | None = None
    keep_history: str | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class RestoreJob(Job):
    """Bring the critic to one of ``histories`` of run ``run_id``, oldest first: see `endpoints.RestoreEndpoint`."""

    run_id: str
    histories: list[str]


class QueueState(enum.Enum):
    """The service's state, which decides whether jobs are accepted; its value tells clients why not."""

    STARTING = "the models are still being loaded"
    SERVING = "serving"
    DRAINING = "the service is shutting down"
    FAILED = "the service has failed and is shutting down"


class JobQueue:
    """Jobs in order of arrival, at most ``limit`` accepted and not yet answered.

    The limit counts jobs from `put` to `release`, not only those waiting: each holds an HTTP thread,
    and the server has just enough of these that health routes are always answered.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: collections.deque[Job] = collections.deque()
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

    def put(self, job: Job) -> None:
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

    def take(self, timeout_s: float, max_rows: int, max_delay_s: float) -> list[Job]:
        """Take the next job, merged with the inference jobs right behind it; empty after ``timeout_s`` without any.

        Inference jobs are merged up to ``max_rows`` rows, and no further than the next job of another kind, so that
        this keeps its place. While the rows are fewer, `take` waits for more until the first job is ``max_delay_s``
        old. A job with more than ``max_rows`` rows is taken alone.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._jobs, timeout_s):
                return []
            delay_s = self._jobs[0].arrived + max_delay_s - time.monotonic()
            self._changed.wait_for(lambda: self._is_full(max_rows), max(0.0, delay_s))
            taken = [self._jobs.popleft() for _ in self._next(max_rows)]
        return [job for job in taken if job.future.set_running_or_notify_cancel()]  # else its caller has given it up

    def _next(self, max_rows: int) -> list[Job]:
        """The jobs to take together, as of now."""
        together: list[Job] = []
        for job in self._jobs:
            is_merged = isinstance(job, InferJob) and sum(other.rows for other in together) + job.rows <= max_rows
            if together and not is_merged:
                break
            together.append(job)
            if not isinstance(job, InferJob):
                break
        return together

    def _is_full(self, max_rows: int) -> bool:
        """Whether nothing that may still come could be taken together with the next job."""
        together = self._next(max_rows)
        if not together or len(together) < len(self._jobs) or self._state is not QueueState.SERVING:
            return True
        return not isinstance(together[0], InferJob) or sum(job.rows for job in together) >= max_rows

    def discard(self, job: Job) -> None:
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


def merge(
    jobs: Sequence[InferJob], *, length_multiple: int, max_length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all jobs, one job after the other: their tokens [rows, width] and lengths [rows], int64.

    The width is the longest true length (at least 2, so that there is a value to compute), rounded up to
    ``length_multiple`` but not beyond ``max_length``. Tokens beyond a row's true length are set to 0: they cannot
    affect the answer, and the batch must not depend on what a caller left there.
    """
    lengths = np.concatenate([job.lengths for job in jobs]).astype(np.int64)
    width = -(-max(2, int(lengths.max())) // length_multiple) * length_multiple
    if max_length is not None:
        width = min(width, max_length)
    tokens = np.concatenate([_with_width(job.tokens, width) for job in jobs])
    tokens[np.arange(width) >= lengths[:, None]] = 0
    return tokens, lengths


def split(
    jobs: Sequence[InferJob], batch_shape: tuple[int, ...], outputs: Mapping[str, torch.Tensor]
) -> list[dict[str, np.ndarray]]:
    """The outputs for a batch of shape [rows, width], split into those of each job, as float32.

    ``values`` and ``logprobs`` [rows, width-1] come back as [b, s-1] for the caller's own s, zero from position
    (true length - 1) on: column t belongs to the step that chooses token t+1, and the last true token
    is followed by none. So the answer does not depend on what the request was merged with. Other
    outputs keep their columns. Raises ValueError when an output has another shape.
    """
    arrays = {name: tensor.detach().to("cpu", torch.float32).numpy() for name, tensor in outputs.items()}
    rows, width = batch_shape
    for name, array in arrays.items():
        expected = f"[{rows}, {width - 1}]" if name in _PER_TOKEN else f"[{rows}, n]"
        fits = array.ndim == 2 and len(array) == rows and (name not in _PER_TOKEN or array.shape[1] == width - 1)
        if not fits:
            raise ValueError(f"the model returned '{name}' of shape {list(array.shape)}, expected {expected}")
    results: list[dict[str, np.ndarray]] = []
    row = 0
    for job in jobs:
        part = {name: array[row : row + job.rows] for name, array in arrays.items()}
        for name in _PER_TOKEN & part.keys():
            part[name] = _with_width(part[name], job.tokens.shape[1] - 1)
            part[name][np.arange(job.tokens.shape[1] - 1) >= job.lengths[:, None] - 1] = 0.0
        results.append(part)
        row += job.rows
    return results


def _with_width(rows: np.ndarray, width: int) -> np.ndarray:
    """A copy of ``rows`` [n, any], cut or padded with zeros to ``width`` columns."""
    fitted = np.zeros((len(rows), width), dtype=rows.dtype)
    columns = min(width, rows.shape[1])
    fitted[:, :columns] = rows[:, :columns]
    return fitted
