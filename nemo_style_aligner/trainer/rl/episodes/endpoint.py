"""Where programs reach the policy: OpenAI's API of the engine that generates rollouts, with a key for each episode.

What is asked for with a key is a reply of that key's episode: recorded as tokens, with the random numbers of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import math
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from flask import request

from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence
from nemo_style_aligner.engine.parallel.machine import own_address
from nemo_style_aligner.engine.serving.answers import message_of
from nemo_style_aligner.engine.serving.app import ServedModel
from nemo_style_aligner.engine.serving.bodies import Asked
from nemo_style_aligner.engine.serving.fields import RequestError
from nemo_style_aligner.engine.serving.generation import Response, Ticket
from nemo_style_aligner.engine.text.chats import Turn, read_turn
from nemo_style_aligner.engine.text.jsonl import Record
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.guard.http_client import server_url
from nemo_style_aligner.guard.http_server import shown_token
from nemo_style_aligner.trainer.rl.episodes.policy import EpisodeLimitError, Policy, Wanted
from nemo_style_aligner.trainer.rl.episodes.programs import MODEL

_WILDCARDS = ("0.0.0.0", "::")
_SECTION = "trainer.ppo.episodes"
_KEY_BYTES = 32
# Of a request, under the names of its fields; what ends a reply is the program's to say.
_OF_THE_JOB = {
    "temperature": ("use_greedy", "temperature"),
    **{name: (name,) for name in ("top_k", "top_p", "min_p")},
    **{name: (name,) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")},
    "ignore_eos": ("ignore_eos",),
}
_OF_CHANCE = ("temperature", "top_k", "top_p", "min_p")  # without effect where the likeliest token is taken


@dataclasses.dataclass(eq=False)
class Access:
    """A program's access to the policy, in one episode.

    Attributes:
        url: the base URL, as OpenAI's clients take it.
        key: the API key.
        limit: why the program's last request was refused, if for the episode's limits.
    """

    url: str
    key: str
    policy: Policy
    loop: asyncio.AbstractEventLoop
    limit: EpisodeLimitError | None = None
    replies: dict[Ticket, asyncio.Task[None]] = dataclasses.field(default_factory=dict)


class EpisodeEndpoint:
    """Answers programs' requests with the policy's replies; see `serving.generation.Generates`.

    It listens from the first episode on.

    Args:
        engine: that generates the replies.
        sampling: the job's.
        host: address to listen on.
    """

    def __init__(self, engine: EmbeddedEngine, tokenizer: Tokenizer, sampling: SamplingParams, host: str) -> None:
        self._engine, self._tokenizer, self._sampling, self._host = engine, tokenizer, sampling, host
        self._accesses: dict[bytes, Access] = {}  # by digests of keys: how long a look-up takes tells nothing of them
        self._served: ServedModel | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open(self, policy: Policy) -> Iterator[Access]:
        """Let a program that knows the key reach the policy, in the ``with`` statement. In the environments' loop.

        Raises:
            PlaceTakenError: nothing can listen there.
        """
        url, key = self._url(), secrets.token_urlsafe(_KEY_BYTES)
        access = Access(url, key, policy, asyncio.get_running_loop())
        self._accesses[_digest(key)] = access
        try:
            yield access
        finally:
            del self._accesses[_digest(key)]
            for reply in access.replies.values():
                reply.cancel()

    def _url(self) -> str:
        with self._lock:
            if self._served is None:
                self._served = ServedModel(
                    self._engine,
                    self._tokenizer,
                    MODEL,
                    host=self._host,
                    port=0,
                    token=None,
                    section=_SECTION,
                    request_seconds=math.inf,  # episodes have limits of their own
                    generation=self,
                    is_key=lambda key: _digest(key) in self._accesses,
                    defaults=self._sampling,
                )
            host = own_address() if self._host in _WILDCARDS else self._host
            return f"{server_url(host, self._served.server.port)}/v1"

    def stop(self) -> None:
        """Listen no more."""
        if self._served is not None:
            self._served.close(1)

    # ---- for the requests' threads ----------------------------------------------------------

    def submit(self, asked: Asked) -> Ticket:
        """Have the policy of the request's key reply.

        Raises:
            RequestError: the episode has ended; or the request asks for what the job does not allow.
        """
        shown = {name[5:]: value for name, value in request.environ.items() if name.startswith("HTTP_")}
        access = self._accesses.get(_digest(shown_token(shown)))
        if access is None:
            raise RequestError(401, "this episode has ended")
        wanted = Wanted(self._fitting(asked), asked.sampling.max_new_tokens, asked.num_top)
        ticket, response = Ticket(streams=False), Response(weight_version=self._engine.weight_version)
        ticket.choices, ticket.unfinished = [response], 1
        try:
            access.loop.call_soon_threadsafe(self._begin, access, asked, wanted, ticket, response)
        except RuntimeError as error:  # the loop is closed
            raise RequestError(401, "this episode has ended") from error
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """The program does not wait for this reply any more: it is no part of the episode."""
        for access in list(self._accesses.values()):
            if (reply := access.replies.get(ticket)) is not None:
                with contextlib.suppress(RuntimeError):
                    access.loop.call_soon_threadsafe(reply.cancel)

    def close(self, seconds: float) -> bool:
        """Nothing is under way when an endpoint is closed."""
        return True

    def _fitting(self, asked: Asked) -> SamplingParams:
        """The job's sampling parameters, with the ends that a request asks for. Raises `RequestError`."""
        job, given = self._sampling, asked.sampling
        if len(asked.prompts) * asked.num_choices > 1:
            raise RequestError(400, "an episode is one conversation: ask for one response", "n")
        for name, is_asked in {"echo": asked.echo, "seed": asked.seed is not None}.items():
            if is_asked:
                raise RequestError(400, f"'{name}' is not supported in an episode: leave it out", name)
        for name, fields in _OF_THE_JOB.items():
            is_void = job.use_greedy and given.use_greedy and name in _OF_CHANCE
            if not is_void and any(getattr(job, field) != getattr(given, field) for field in fields):
                value = "0" if name == "temperature" and job.use_greedy else getattr(job, fields[-1])
                raise RequestError(
                    400, f"'{name}' is the training job's, {value} (model.ppo.sampling_params): leave it out", name
                )
        if given.grammar is not None:
            message = "the form of replies is not forced in an episode, as the policy would not be what says it: leave"
            raise RequestError(400, f"{message} 'response_format' and the like, and a forced 'tool_choice', out")
        if given.min_new_tokens != min(job.min_new_tokens, given.max_new_tokens):
            raise RequestError(400, "'min_tokens' is the training job's: leave it out", "min_tokens")
        ends = tuple(dict.fromkeys([*job.stop_strings, *given.stop_strings]))
        return dataclasses.replace(job, stop_strings=ends, stop_token_ids=given.stop_token_ids)

    # ---- in the environments' loop ----------------------------------------------------------

    def _begin(self, access: Access, asked: Asked, wanted: Wanted, ticket: Ticket, response: Response) -> None:
        access.replies[ticket] = access.loop.create_task(self._reply(access, asked, wanted, ticket, response))

    async def _reply(self, access: Access, asked: Asked, wanted: Wanted, ticket: Ticket, response: Response) -> None:
        def finish(sequence: ScheduledSequence) -> None:
            response.sequence, response.ready = sequence, (len(sequence.token_ids), sequence.finish_reason)

        def as_turn(sequence: ScheduledSequence) -> Turn:
            finish(sequence)
            return read_turn(Record(Path("reply"), 1, message_of(asked, response, self._tokenizer)))

        (prompt,) = asked.prompts
        ticket.error = RequestError(401, "this episode has ended")
        try:
            finish(await access.policy.answer(prompt.token_ids, prompt.conversation, wanted, as_turn))
            ticket.error, access.limit = None, None
        except EpisodeLimitError as error:
            access.limit, ticket.error = error, RequestError(400, str(error), "messages", "context_length_exceeded")
        finally:
            access.replies.pop(ticket, None)
            ticket.unfinished = 0
            ticket.tell()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
