"""Serve models on all ranks of a job: HTTP on rank 0, and the loop that does the work on every rank.

Rank 0 takes jobs from the queue that the HTTP threads fill and asks their endpoint for the answer, which tells all
ranks what to do; every rank then calls the same method of its backend with the same arguments. A rank that fails ends,
and with it the job (`launch.ending`): clients send what was under way again, to the job's next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.guard.protocol import ProtocolError
from nemo_style_aligner.trainer.services.endpoints import Endpoint, QueuedRequest
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.services.exactly_once.saves import Answer, Saves
from nemo_style_aligner.trainer.services.jobs import QueueState, RequestQueue
from nemo_style_aligner.trainer.services.routes import HttpSettings, start_http_server
from nemo_style_aligner.trainer.services.service_metrics import ServiceMetrics

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # how soon a stop request is noticed
_MEET, _END = "meet", "end"  # what rank 0 says beside the names of endpoints


@dataclasses.dataclass(frozen=True)
class DispatchSettings:
    """How many requests are merged, and the server's times. Rows are those of all data-parallel ranks."""

    max_batch_rows: int
    max_queue_delay_microseconds: int = 2000
    heartbeat_seconds: float = 5.0  # the collective in which idle ranks wait must not time out
    drain_seconds: float = 60.0  # after a stop request; jobs not begun by then are refused


class ModelServer:
    """A service on all ranks. Create it on every rank, early: rank 0 listens at once, and is ready in `run`.

    Attributes:
        backend: the models, from `run` on.
        ledger: what was trained; the backend keeps it in its checkpoints.
        queue: the jobs that rank 0 has to do.
        metrics: rank 0's.
        saves: checkpoints that this rank is writing.
    """

    backend: Any

    def __init__(self, endpoints: Sequence[Endpoint], http: HttpSettings, dispatch: DispatchSettings) -> None:
        self.ledger = TrainingLedger()
        self.queue = RequestQueue(http.max_outstanding_requests)
        self.metrics = ServiceMetrics()
        self.saves = Saves()
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._settings = dispatch
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._stop_requested = False  # a plain bool: set from a signal handler, where no lock may be taken
        self._last_meeting = time.monotonic()
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

    def run(self, backend: Any, *, heeds_signals: bool = True) -> None:
        """Serve ``backend``, which has the endpoints' methods, until `request_stop`.

        If it ``heeds_signals``, SIGTERM and SIGINT do that. Raises what the backend raised; before that the waiting
        clients are answered.
        """
        self.backend = backend
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
                self._turn()
            self._drain()
            while self.saves:
                time.sleep(_POLL_SECONDS)
                self.saves.poll()
                self._meet()
            self._tell(_END)
        except BaseException as error:
            self.queue.set_state(QueueState.FAILED)
            _fail(self.saves.waiting, error)
            self.queue.refuse_waiting(_failure(error))
            raise

    def _drain(self) -> None:
        logger.info("shutting down: finishing %d jobs", self.queue.outstanding)
        self.queue.set_state(QueueState.DRAINING)
        deadline = time.monotonic() + self._settings.drain_seconds
        while self.queue.outstanding and time.monotonic() < deadline:
            self._turn()
        self.queue.refuse_waiting(ProtocolError(503, QueueState.DRAINING.value, {"Retry-After": "5"}))

    def _turn(self) -> None:
        activity.progress()  # an idle service is not stuck
        self.saves.poll()
        self._work()
        self._meet()

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
            _fail([job.future for job in jobs], error)
            raise

    def _do(self, jobs: list[QueuedRequest]) -> None:
        """Have jobs of one endpoint answered, unless the critic is elsewhere than their clients believe."""
        accepted = []
        for job in jobs:
            try:
                if job.position is not None:
                    self.ledger.check(job.position, job.endpoint.name)
                accepted.append(job)
            except ProtocolError as refusal:
                job.future.set_exception(refusal)
        try:
            if accepted:
                accepted[0].endpoint.answer(accepted, self)
        except ProtocolError as refusal:
            for job in accepted:
                job.future.set_exception(refusal)

    def command(self, endpoint: Endpoint, **arguments: Any) -> Any:
        """See `Service.command`."""
        started = time.monotonic()
        self._tell(endpoint.name, **arguments)
        result = self._act(endpoint, arguments)
        self.metrics.command_time.labels(endpoint.method).observe(time.monotonic() - started)
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
                self.saves.wait()
            self.saves.poll()
            if name == _END:
                return
            if name == _MEET:
                self._agree_on_stop()
            else:
                self._act(self._endpoints[name], arguments)

    def _agree_on_stop(self) -> None:
        """Collective. A stop signal that has reached any rank counts on all."""
        if self._size > 1:
            requests = [False] * self._size
            dist.all_gather_object(requests, self._stop_requested)
            self._stop_requested = any(requests)

    def _act(self, endpoint: Endpoint, arguments: dict[str, Any]) -> Any:
        with activity.phase("service"), activity.phase(endpoint.method):
            return endpoint.act(self, arguments)


def _failure(error: BaseException) -> ProtocolError:
    return ProtocolError(500, f"the service failed: {type(error).__name__}: {error}")


def _fail(answers: Sequence[Answer], error: BaseException) -> None:
    """Tell those that still wait."""
    for answer in answers:
        if not answer.done():
            answer.set_exception(_failure(error))


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
