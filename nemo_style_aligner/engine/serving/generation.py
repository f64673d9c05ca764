"""One engine for many requests: a thread that generates for all who wait, in one batch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import prometheus_client as prometheus

from nemo_style_aligner.engine.contract import NO_WEIGHTS, FinishReason, GenerationRequest
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, Task
from nemo_style_aligner.engine.lockstep import Lockstep
from nemo_style_aligner.engine.serving.bodies import LARGEST_SEED, Asked
from nemo_style_aligner.engine.serving.fields import RequestError
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.errors import end_process
from nemo_style_aligner.seeds import derive_seed

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 300.0
_IDLE_SECONDS = 5.0  # after which ranks that share an engine hear that its leader is there
_LAST_PASS_SECONDS = 5.0
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        of: Any = {"namespace": "aligner", "subsystem": "generation", "registry": self.registry}
        counter: Any = partial(prometheus.Counter, **of)
        gauge: Any = partial(prometheus.Gauge, **of)
        histogram: Any = partial(prometheus.Histogram, buckets=_SECONDS, **of)
        self.requests = counter("requests", "Requests answered", ["path", "status"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.tokens = counter("tokens", "Tokens generated")
        self.abandoned = counter("abandoned_responses", "Responses whose client was gone or too slow")
        self.waiting = gauge("waiting_responses", "Responses that wait for a slot")
        self.running = gauge("running_responses", "Responses in slots")
        self.weight_version = gauge("weight_version", "Version of the weights")
        self.request_seconds = histogram("request_seconds", "From a request's arrival to the end of its answer")
        self.first_token_seconds = histogram("first_token_seconds", "From a request's arrival to its first token")


@dataclasses.dataclass(eq=False, kw_only=True)
class Response:
    """A response that is made for a request.

    ``ready`` is how many tokens of ``sequence`` may be read, and why it has ended; the thread that generates sets it.
    """

    sequence: ScheduledSequence | None = None
    ready: tuple[int, FinishReason | None] = (0, None)
    weight_version: int = NO_WEIGHTS


@dataclasses.dataclass(eq=False, kw_only=True)
class Choice(Response):
    """A response that `Generation` makes."""

    task: Task
    ticket: Ticket


class Ticket:
    """The choices of one request, and where its thread waits for them."""

    def __init__(self, streams: bool) -> None:
        self.choices: Sequence[Response] = ()
        self.streams = streams
        self.unfinished = 0
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


class Generates(Protocol):
    """What makes the responses that requests ask for. Its methods are called by the requests' threads."""

    def submit(self, asked: Asked) -> Ticket:
        """Have the responses of a request made. Raises `RequestError`."""
        ...

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more."""
        ...

    def close(self, seconds: float) -> bool:
        """Take no more requests, and finish those that are there within ``seconds``; whether they are."""
        ...


class Generation:
    """Generates for all requests at once, in the slots of an engine. While that has no weights, requests wait.

    Args:
        max_outstanding: the most responses that wait or are generated; requests for more are answered 429.
        group: the ranks that share the engine, of which this is the first; the others `Lockstep.attend`.
    """

    def __init__(
        self, engine: EmbeddedEngine, max_outstanding: int, metrics: Metrics, group: EngineGroup | None = None
    ) -> None:
        self._engine = engine
        self._is_shared = group is not None and group.control is not None
        self._lockstep = Lockstep(engine, group or EngineGroup())
        self._max_outstanding = max_outstanding
        self._metrics = metrics
        self._changed = threading.Condition()
        self._waiting: deque[Choice] = deque()
        self._running: dict[int, Choice] = {}
        self._numbers = itertools.count()
        self._is_closed = self._is_paused = self._is_generating = False
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
        ticket, choices = Ticket(asked.streams), list[Choice]()
        first = secrets.randbelow(LARGEST_SEED) if asked.seed is None else asked.seed
        for prompt in asked.prompts:
            for number in range(asked.num_choices):
                seed = first if number == 0 else derive_seed(first, number)
                limit = 0 if asked.echoes_alone else None
                request = GenerationRequest(next(self._numbers), prompt.token_ids, seed, limit)
                scores_prompt = asked.echo and asked.num_top is not None
                task = self._engine.task(request, asked.sampling, num_top=asked.num_top, scores_prompt=scores_prompt)
                choices.append(Choice(task=task, ticket=ticket))
        ticket.choices, ticket.unfinished = choices, len(choices)
        with self._changed:
            if self._is_closed:
                raise RequestError(503, "the service is ending", **{"Retry-After": "5"})
            outstanding = len(self._waiting) + len(self._running)
            if outstanding + len(choices) > self._max_outstanding:
                raise RequestError(
                    429, f"{outstanding} responses are waiting or being made: try again", **{"Retry-After": "1"}
                )
            self._waiting += choices
            self._changed.notify_all()
        self._metrics.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in asked.prompts))
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this request: give its slots to others."""
        with self._changed:
            gone = [choice for choice in self._waiting if choice.ticket is ticket]
            for choice in (*gone, *self._running.values()):
                choice.task.is_abandoned |= choice.ticket is ticket
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
        if not self._thread.is_alive():
            return True
        with self._changed:  # the process may end now: no thread should be inside the engine
            self._is_paused = True
            self._changed.wait_for(lambda: not self._is_generating, _LAST_PASS_SECONDS)
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is generated in the body of the ``with`` statement, in which the engine may get new weights.

        Responses that were under way begin again; streams of which a part has been sent end with an error.
        """
        self._is_paused = True
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._is_generating, _PAUSE_SECONDS):
                    raise TimeoutError(f"a pass of the engine that serves has taken more than {_PAUSE_SECONDS:g} s")
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    # ---- the thread that generates ----------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._begin():
                self._lockstep.say("serve")
                self._generate()
            self._lockstep.say("end")
        except Exception as error:
            if not self._is_shared:
                raise
            end_process(error)  # another rank is gone: nothing can be generated any more

    def _generate(self) -> None:
        """Generate until nobody waits, or a pause."""
        try:
            with contextlib.closing(self._lockstep.serve(self._pull)) as passes:
                for advanced in passes:
                    self._publish(advanced)
                    if self._is_paused:
                        break
        except Exception as error:
            if self._is_shared:
                raise
            logger.exception("generation failed; the requests that were in it are refused")
            self._refuse(list(self._running.values()), 500, f"generation failed: {type(error).__name__}: {error}")
        with self._changed:
            self._begin_again()
            self._is_generating = False
            self._changed.notify_all()

    def _begin(self) -> bool:
        """Wait for something to do; False: the service ends."""

        def is_ready() -> bool:
            return bool(self._waiting) and not self._is_paused and self._engine.weight_version != NO_WEIGHTS

        def is_over() -> bool:
            return self._is_closed and (self._is_paused or not self._waiting)

        while True:
            with self._changed:
                if self._changed.wait_for(lambda: is_ready() or is_over(), _IDLE_SECONDS):
                    self._is_generating = not is_over()
                    return self._is_generating
            self._lockstep.say("idle")

    def _begin_again(self) -> None:
        """Put what a pause has interrupted back, or refuse it where a part of the response has been sent."""
        interrupted = [choice for choice in self._running.values() if not choice.task.is_abandoned]
        sent = [choice for choice in interrupted if choice.ticket.streams and choice.sequence is not None]
        self._refuse(sent, 503, "generation was interrupted, for new weights or the end of the service: ask again")
        for choice in reversed([choice for choice in interrupted if choice not in sent]):
            choice.sequence, choice.ready = None, (0, None)
            self._waiting.appendleft(choice)
        self._running.clear()

    def _pull(self) -> Task | None:
        with self._changed:
            if not self._waiting or self._is_paused:
                return None
            choice = self._waiting.popleft()
            choice.weight_version = self._engine.weight_version
            self._running[choice.task.request.request_id] = choice
            return choice.task

    def _publish(self, advanced: Sequence[ScheduledSequence]) -> None:
        """Show the requests' threads what a pass has brought."""
        for sequence in advanced:
            choice = self._running[sequence.request.request_id]
            self._metrics.tokens.inc(len(sequence.token_ids) - choice.ready[0])
            ticket = choice.ticket
            if choice.sequence is None:
                self._metrics.first_token_seconds.observe(time.monotonic() - ticket.arrived)
            choice.sequence = sequence
            if sequence.failure is not None and not sequence.is_in_slot:
                self._refuse([choice], 400, f"the response cannot be held to its grammar: {sequence.failure}")
                ticket.unfinished -= 1
                continue
            if not sequence.is_in_slot:
                del self._running[sequence.request.request_id]
                ticket.unfinished -= 1
            choice.ready = len(sequence.token_ids), sequence.finish_reason  # last: its thread may go when it sees this
            if ticket.streams or not ticket.unfinished:
                ticket.tell()

    def _refuse(self, choices: Sequence[Choice], status: int, message: str) -> None:
        for choice in choices:
            self._running.pop(choice.task.request.request_id)
            choice.ticket.error = RequestError(status, message)
            choice.ticket.tell()
