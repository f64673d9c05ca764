"""One engine for many requests: a thread that generates for all who wait, in one batch."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import prometheus_client as prometheus

from nemo_style_aligner.engine.contract import FinishReason, GenerationRequest
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, Task
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.serving.bodies import Asked, RequestError

logger = logging.getLogger(__name__)

_PREFIX = "aligner_generation_"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()

        def gauge(name: str, what: str) -> prometheus.Gauge:
            return prometheus.Gauge(_PREFIX + name, what, registry=registry)

        def histogram(name: str, what: str) -> prometheus.Histogram:
            return prometheus.Histogram(_PREFIX + name, what, buckets=_SECONDS, registry=registry)

        def counter(name: str, what: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(_PREFIX + name, what, labels, registry=registry)

        self.requests = counter("requests", "Requests answered", "path", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.tokens = counter("tokens", "Tokens generated")
        self.abandoned = counter("abandoned_responses", "Responses whose client was gone or too slow")
        self.waiting = gauge("waiting_responses", "Responses that wait for a slot")
        self.running = gauge("running_responses", "Responses in slots")
        self.weight_version = gauge("weight_version", "Version of the weights")
        self.request_seconds = histogram("request_seconds", "From a request's arrival to the end of its answer")
        self.first_token_seconds = histogram("first_token_seconds", "From a request's arrival to its first token")


@dataclasses.dataclass(eq=False)
class Choice:
    """A response that is made for a request.

    ``ready`` is how many tokens of ``sequence`` may be read, and why it has ended; the thread that generates sets it.
    """

    task: Task
    ticket: Ticket
    sequence: ScheduledSequence | None = None
    ready: tuple[int, FinishReason | None] = (0, None)


class Ticket:
    """The choices of one request, and where its thread waits for them."""

    def __init__(self, streams: bool) -> None:
        self.choices: list[Choice] = []
        self.streams = streams
        self.unfinished = 0
        self.weight_version = -1
        self.error: RequestError | None = None
        self.arrived = time.monotonic()
        self._news = threading.Event()

    def tell(self) -> None:
        """Wake the request's thread."""
        self._news.set()

    def wait(self, seconds: float) -> bool:
        """Wait for news; whether there are some. Raises the error that has ended the request."""
        if not self._news.wait(seconds):
            return False
        self._news.clear()
        if self.error is not None:
            raise self.error
        return True


class Generation:
    """Generates for all requests at once, in the slots of an engine that has its weights.

    Args:
        max_outstanding: the most responses that wait or are generated; requests for more are answered 429.
    """

    def __init__(self, engine: EmbeddedEngine, max_outstanding: int, metrics: Metrics) -> None:
        self._engine = engine
        self._max_outstanding = max_outstanding
        self._metrics = metrics
        self._changed = threading.Condition()
        self._waiting: deque[Choice] = deque()
        self._running: dict[int, Choice] = {}
        self._numbers = itertools.count()
        self._is_closed = False
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.running.set_function(lambda: len(self._running))
        metrics.weight_version.set_function(lambda: engine.weight_version)
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # ---- for the requests' threads ----------------------------------------------------------

    def submit(self, asked: Asked) -> Ticket:
        """Queue the responses of a request.

        Raises:
            RequestError: there are too many already (429); or the service ends (503).
        """
        ticket = Ticket(asked.streams)
        for prompt in asked.prompts:
            for number in range(asked.num_choices):
                seed = asked.seed if number == 0 else derive_seed(asked.seed, number)
                request = GenerationRequest(next(self._numbers), prompt.token_ids, seed)
                scores_prompt = asked.echo and asked.num_top is not None
                task = self._engine.task(request, asked.sampling, num_top=asked.num_top, scores_prompt=scores_prompt)
                ticket.choices.append(Choice(task, ticket))
        ticket.unfinished = len(ticket.choices)
        with self._changed:
            if self._is_closed:
                raise RequestError(503, "the service is ending", **{"Retry-After": "5"})
            outstanding = len(self._waiting) + len(self._running)
            if outstanding + len(ticket.choices) > self._max_outstanding:
                raise RequestError(
                    429, f"{outstanding} responses are waiting or being made: try again", **{"Retry-After": "1"}
                )
            self._waiting += ticket.choices
            self._changed.notify_all()
        self._metrics.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in asked.prompts))
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this request: give its slots to others."""
        with self._changed:
            for choice in ticket.choices:
                choice.task.is_abandoned = True
            gone = [choice for choice in self._waiting if choice.ticket is ticket]
            for choice in gone:
                self._waiting.remove(choice)
            self._metrics.abandoned.inc(ticket.unfinished)
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Take no more requests, and finish those that are there within ``seconds``; whether they are."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread that generates ----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
            try:
                for advanced in self._engine.serve(self._pull):
                    self._publish(advanced)
            except Exception as error:
                logger.exception("generation failed; the requests that were in it are refused")
                self._refuse_running(RequestError(500, f"generation failed: {type(error).__name__}: {error}"))

    def _pull(self) -> Task | None:
        with self._changed:
            if not self._waiting:
                return None
            choice = self._waiting.popleft()
            choice.ticket.weight_version = self._engine.weight_version
            self._running[choice.task.request.request_id] = choice
            return choice.task

    def _publish(self, advanced: Sequence[ScheduledSequence]) -> None:
        """Show the requests' threads what a pass has brought."""
        self._metrics.tokens.inc(len(advanced))
        for sequence in advanced:
            choice = self._running[sequence.request.request_id]
            ticket = choice.ticket
            if choice.sequence is None:
                self._metrics.first_token_seconds.observe(time.monotonic() - ticket.arrived)
            choice.sequence = sequence
            choice.ready = len(sequence.token_ids), sequence.finish_reason
            if sequence.finish_reason is not None or sequence.task.is_abandoned:
                del self._running[sequence.request.request_id]
                ticket.unfinished -= 1
            if ticket.streams or not ticket.unfinished:
                ticket.tell()

    def _refuse_running(self, error: RequestError) -> None:
        with self._changed:
            for choice in self._running.values():
                choice.ticket.error = error
                choice.ticket.tell()
            self._running.clear()
