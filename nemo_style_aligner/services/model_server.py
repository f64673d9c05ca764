"""Serve models on all ranks of a job: HTTP on rank 0, and the loop that does the work on every rank.

Rank 0 takes jobs from the queue that the HTTP threads fill, merges inference jobs, and tells all other
ranks what to do; every rank then calls the same method of its backend with the same arguments. A rank that fails ends,
and with it the job (`launch.ending`): clients send what was under way again, to the job's next start.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from nemo_style_aligner.services.endpoints import Endpoint
from nemo_style_aligner.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.services.jobs import (
    InferJob,
    Job,
    JobQueue,
    QueueState,
    RestoreJob,
    SaveJob,
    TrainJob,
    merge,
    split,
)
from nemo_style_aligner.services.protocol import ProtocolError
from nemo_style_aligner.services.routes import HttpSettings, ServiceMetrics, start_http_server
from nemo_style_aligner.telemetry import activity

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # how soon a stop request is noticed
_MEET, _END = "meet", "end"  # what rank 0 says beside the names of the backend's methods


class ScoringBackend(Protocol):
    """The models behind a service. Collective: called on every rank, in the same order, with equal arguments."""

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Score a batch.

        ``tokens`` int64 [b, s] and ``lengths`` int64 [b] are on the CPU. Returns ``values`` [b, s-1], ``rewards``
        [b, n] or both, or ``logprobs`` [b, s-1]; only rank 0's answer is used.
        """
        ...


class CriticBackend(ScoringBackend, Protocol):
    """Models of which one learns: behind the endpoints that train, save and restore."""

    def train(
        self, tokens: torch.Tensor, returns: torch.Tensor, prev_values: torch.Tensor, mask: torch.Tensor
    ) -> float:
        """Train on one batch: ``tokens`` int64 [b, s], the others float32 [b, s-1]. Returns the mean loss.

        The loss must be the same on every rank: each keeps it in its ledger.
        """
        ...

    def save(self, keep_history: str | None = None) -> Future[Any]:
        """Write a checkpoint of the present state. The newest checkpoint with history ``keep_history`` is not pruned.

        Returns a future that is done when the checkpoint is complete. A save waits for the previous one, and so does
        `restore`.
        """
        ...

    def restore(self, run_id: str, histories: Sequence[str]) -> int | None:
        """Go to one of ``histories``, ledger included; `endpoints.RestoreEndpoint` says which.

        Returns its index, the same on every rank, or None if none can be reached.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DispatchSettings:
    """How inference requests are merged, and the server's times. Rows are those of all data-parallel ranks."""

    max_batch_rows: int
    max_queue_delay_microseconds: int = 2000
    strip_sequence_length_to_multiple: int | None = None
    max_sequence_length: int | None = None  # lengths are not rounded up beyond it
    heartbeat_seconds: float = 5.0  # the collective in which idle ranks wait must not time out
    drain_seconds: float = 60.0  # after a stop request; jobs not begun by then are refused


@dataclasses.dataclass
class _Save:
    """A checkpoint that is being written.

    Attributes:
        written: done when it is complete.
        asked: on rank 0: the critic's history and ``keep_history``, by which a repeat of the request is recognised.
        jobs: on rank 0: the requests that wait for it; a client that got no answer in time sends its request again.
    """

    written: Future[Any]
    asked: tuple[str, str | None] | None = None
    jobs: list[SaveJob] = dataclasses.field(default_factory=list)


class ModelServer:
    """A service on all ranks. Create it on every rank, early: rank 0 listens at once, and is ready in `run`.

    Attributes:
        ledger: what was trained; the backend keeps it in its checkpoints.
        queue: the jobs that rank 0 has to do.
        metrics: rank 0's.
    """

    _backend: ScoringBackend  # from `run` on

    def __init__(self, endpoints: Sequence[Endpoint], http: HttpSettings, dispatch: DispatchSettings) -> None:
        self.ledger = TrainingLedger()
        self.queue = JobQueue(http.max_outstanding_requests)
        self.metrics = ServiceMetrics()
        self._settings = dispatch
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._stop_requested = False  # a plain bool: set from a signal handler, where no lock may be taken
        self._last_meeting = time.monotonic()
        self._saves: list[_Save] = []  # being written
        self._last_saved: tuple[str, str | None] | None = None  # `asked` of the newest complete checkpoint
        self._http = None if self._rank else start_http_server(endpoints, self.queue, http, self.metrics)

    @property
    def port(self) -> int:
        """The port that rank 0 listens on; 0 on other ranks."""
        return self._http.port if self._http is not None else 0

    def request_stop(self) -> None:
        """Have `run` finish the accepted jobs and return, on all ranks.

        May be called on any rank, at any time, from any thread or a signal handler.
        """
        self._stop_requested = True

    def run(self, backend: ScoringBackend, *, heeds_signals: bool = True) -> None:
        """Serve ``backend`` until `request_stop` (if it ``heeds_signals``, SIGTERM and SIGINT do that).

        Raises what the backend raised; before that the waiting clients are answered.
        """
        self._backend = backend
        try:
            with _stop_on_signals(self.request_stop) if heeds_signals else contextlib.nullcontext():
                if self._rank == 0:
                    self._lead()
                else:
                    self._follow()
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening, after open answers were sent. `run` does it itself."""
        if self._http is not None:
            self._http.stop()
            self._http = None

    # -------------------------------------------------------------- rank 0

    def _lead(self) -> None:
        self.queue.set_state(QueueState.SERVING)
        try:
            while not self._stop_requested:
                activity.progress()  # an idle service is not stuck
                self._note_saves()
                self._work()
                self._meet()
            self._drain()
            while self._saves:
                time.sleep(_POLL_SECONDS)
                self._note_saves()
                self._meet()
            self._tell(_END)
        except BaseException as error:
            self.queue.set_state(QueueState.FAILED)
            _fail([job for save in self._saves for job in save.jobs], error)
            self.queue.refuse_waiting(_failure(error))
            raise

    def _drain(self) -> None:
        logger.info("shutting down: finishing %d jobs", self.queue.waiting)
        self.queue.set_state(QueueState.DRAINING)
        deadline = time.monotonic() + self._settings.drain_seconds
        while self.queue.waiting and time.monotonic() < deadline:
            self._work()
        self.queue.refuse_waiting(ProtocolError(503, QueueState.DRAINING.value, {"Retry-After": "5"}))

    def _work(self) -> None:
        """Wait briefly for the next jobs, and do them."""
        settings = self._settings
        delay_s = settings.max_queue_delay_microseconds / 1e6
        jobs = self.queue.take(_POLL_SECONDS, settings.max_batch_rows, delay_s)
        if not jobs:
            return
        now = time.monotonic()
        for job in jobs:
            job.taken = now
            self.metrics.queue_time.observe(now - job.arrived)
        try:
            self._do(jobs)
        except BaseException as error:
            logger.error("failed while working on request_id=%s", ",".join(job.request_id for job in jobs))
            _fail(jobs, error)
            raise

    def _do(self, jobs: list[Job]) -> None:
        accepted: list[InferJob] = []
        for job in jobs:
            try:
                if isinstance(job, InferJob):
                    self._check_position(job, "critic_infer")
                    accepted.append(job)
                elif isinstance(job, TrainJob):
                    self._train(job)
                elif isinstance(job, SaveJob):
                    self._check_position(job, "critic_save")
                    self._save_or_join(job)
                elif isinstance(job, RestoreJob):
                    self._restore(job)
            except ProtocolError as refusal:
                job.future.set_exception(refusal)
        if accepted:
            self._infer(accepted)

    def _check_position(self, job: InferJob | SaveJob, what: str) -> None:
        """Refuse the job unless the critic is where its client believes it to be."""
        if job.position is not None:
            self.ledger.check(job.position, what)

    def _save_or_join(self, job: SaveJob) -> None:
        """Start a save, or join the one that the same request, sent earlier, has started: another would take longer."""
        asked = self.ledger.history, job.keep_history
        being_written = next((save for save in self._saves if save.asked == asked), None)
        if being_written is not None:
            being_written.jobs.append(job)
        elif asked == self._last_saved:
            _answer_save(job)
        else:
            self._command("save", keep_history=job.keep_history)
            self._saves[-1].asked, self._saves[-1].jobs = asked, [job]
        self._note_saves()

    def _infer(self, jobs: list[InferJob]) -> None:
        settings = self._settings
        tokens, lengths = merge(
            jobs,
            length_multiple=settings.strip_sequence_length_to_multiple or 1,
            max_length=settings.max_sequence_length,
        )
        self.metrics.batch_rows.observe(len(tokens))
        outputs = self._command("infer", tokens=torch.tensor(tokens), lengths=torch.tensor(lengths))
        for job, result in zip(jobs, split(jobs, tokens.shape, outputs), strict=True):
            job.batch_rows = len(tokens)
            job.future.set_result(result)

    def _train(self, job: TrainJob) -> None:
        loss: float | None = None
        applied: dict[str, Any] = {"run_id": None, "sequence_number": 0, "digest": job.digest}
        if job.position is not None:
            applied |= {"run_id": job.position.run_id, "sequence_number": job.position.next_number}
            loss = self.ledger.stored_answer(job.position, job.digest)
        if loss is None:
            batch = {name: torch.tensor(array) for name, array in job.batch.items()}
            loss = self._command("train", applied=applied, batch=batch)
            self.metrics.training_steps.inc()
        else:
            self.metrics.training_repeats.inc()
        job.future.set_result({"loss_mean": np.array([loss], dtype=np.float32)})

    def _restore(self, job: RestoreJob) -> None:
        self._last_saved = None  # a damaged checkpoint may be put aside now
        position = self._command("restore", run_id=job.run_id, histories=job.histories)
        if position is not None:
            job.future.set_result({"position": np.array([position], dtype=np.int64)})
            return
        expected = self.ledger.expected(job.run_id)
        raise ProtocolError(
            409,
            f"critic_restore: run '{job.run_id}' cannot continue from any of the {len(job.histories)} points it gave: "
            "the critic has no checkpoint there, or going back would undo what other runs have trained since. The "
            f"critic has made {self.ledger.steps} training steps and expects number {expected} of this run",
            self.ledger.where(job.run_id),
        )

    def _command(self, name: str, **arguments: Any) -> Any:
        """Have all ranks do something; returns this rank's result."""
        started = time.monotonic()
        self._tell(name, **arguments)
        result = self._act(name, arguments)
        self.metrics.command_time.labels(name).observe(time.monotonic() - started)
        return result

    def _tell(self, name: str, **arguments: Any) -> None:
        if self._size > 1:
            dist.broadcast_object_list([name, arguments], src=0)

    def _meet(self) -> None:
        """Now and then, meet the other ranks, of which one may have been told to stop."""
        if time.monotonic() - self._last_meeting >= self._settings.heartbeat_seconds:
            self._last_meeting = time.monotonic()
            self._tell(_MEET)
            self._agree_on_stop()

    # -------------------------------------------------------------- all ranks

    def _follow(self) -> None:
        """Do what rank 0 says. Raises RuntimeError when it is gone."""
        said: list[Any] = [None, None]
        while True:
            dist.broadcast_object_list(said, src=0)
            name, arguments = said
            activity.progress()
            if name == _END:
                concurrent.futures.wait([save.written for save in self._saves])
            self._note_saves()
            if name == _END:
                return
            if name == _MEET:
                self._agree_on_stop()
            else:
                self._act(name, arguments)

    def _agree_on_stop(self) -> None:
        """Collective. A stop signal that has reached any rank counts on all."""
        if self._size > 1:
            requests = [False] * self._size
            dist.all_gather_object(requests, self._stop_requested)
            self._stop_requested = any(requests)

    def _act(self, name: str, arguments: dict[str, Any]) -> Any:
        with activity.phase("service"), activity.phase(name):
            if name == "infer":
                return self._backend.infer(**arguments)
            critic = cast(CriticBackend, self._backend)  # else no endpoint would have led here
            if name == "restore":
                return critic.restore(**arguments)
            if name == "save":
                self._saves.append(_Save(critic.save(**arguments)))
                return None
            loss = float(critic.train(**arguments["batch"]))
        self.ledger.record(**arguments["applied"], loss=loss)
        return loss

    def _note_saves(self) -> None:
        """Answer the requests whose checkpoints are complete. Raises the error if one could not be written."""
        while self._saves and self._saves[0].written.done():
            save = self._saves[0]
            save.written.result()
            self._saves.pop(0)
            self._last_saved = save.asked
            for job in save.jobs:
                _answer_save(job)


def _answer_save(job: SaveJob) -> None:
    job.future.set_result({"status": np.zeros(1, dtype=np.int64)})


def _failure(error: BaseException) -> ProtocolError:
    return ProtocolError(500, f"the service failed: {type(error).__name__}: {error}")


def _fail(jobs: Sequence[Job], error: BaseException) -> None:
    """Tell those that still wait."""
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(_failure(error))


@contextlib.contextmanager
def _stop_on_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Call ``handler`` on SIGTERM and SIGINT while inside; outside of the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: handler()) for number in signals}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
