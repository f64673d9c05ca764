"""Episodes beside an engine: coroutines in an event loop of their own, whose replies are requests to the scheduler.

An episode is work as a prompt is, and begins whenever the engine would have a slot to spare; one that waits for its
environment takes none. A reply's random numbers depend on step, sample and number of the reply, so an episode is
generated again to the last bit wherever its environment is a function of what it is given.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import dataclasses
import hashlib
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from nemo_style_aligner import activity
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.route_memory import joined
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, Task
from nemo_style_aligner.engine.lockstep import Lockstep
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.user_code import UserCodeError, describe, load_function
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.rl.episodes.journal import EpisodeJournal
from nemo_style_aligner.trainer.rl.episodes.policy import Ask, EpisodeError, EpisodeLimitError, Policy, Wanted
from nemo_style_aligner.trainer.rl.episodes.programs import Program, ProgramError, program_of
from nemo_style_aligner.trainer.rl.episodes.turns import Turns
from nemo_style_aligner.trainer.rl.reward_functions import as_number
from nemo_style_aligner.trainer.rl.sample import Prompt

logger = logging.getLogger(__name__)

EpisodeFunction = Callable[[Policy, dict[str, Any]], Awaitable[Any]]
"""``async def episode(policy, line) -> reward``: a number, named parts of one, or None where reward sources score."""

SUMS = ("replies", "rows", "inserted_tokens", "environment_seconds", "failed_episodes", "cut_episodes")
"""What `Environment.generate` counts."""

_BEAT_SECONDS = 0.25
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0
_OF_EPISODE = 1 << 20  # ids of requests: more replies than an episode may have


class EnvironmentBlocksError(UserError, RuntimeError):
    """An environment holds the event loop; the message says where."""

    exit_status = 1


@dataclasses.dataclass(frozen=True)
class Episode(GenerationResult):
    """A finished episode, in a response's place: ``token_ids`` are all tokens after the prompt.

    Attributes:
        mask: which of them the policy has sampled; ``logprobs`` has one number for each of these.
        outcome: what the environment returned.
        problem: why the episode counts as failed; None: it does not.
        num_replies: of the policy.
        seconds: in the environment.
        is_cut: it wanted another reply than it may have.
        further_rows: lengths of the rows but the first, if there are several (`Policy.fork`): sequences of their own,
            with prompts that are no part of ``mask``, and with the reward of the one episode.
    """

    mask: list[bool] = dataclasses.field(default_factory=list)
    outcome: Any = None
    problem: str | None = None
    num_replies: int = 1
    seconds: float = 0.0
    is_cut: bool = False
    further_rows: list[int] = dataclasses.field(default_factory=list)

    @property
    def sampled(self) -> list[bool]:
        """See `GenerationResult.sampled`."""
        return self.mask

    @property
    def row_lengths(self) -> list[int]:
        """See `GenerationResult.row_lengths`."""
        (whole,) = super().row_lengths
        return [whole - sum(self.further_rows), *self.further_rows]


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may take.

    Attributes:
        max_replies: of the policy.
        seconds: in the environment, replies not counted.
        blocked_seconds: for which a coroutine may hold the event loop.
        limit_reward: what one gets whose environment wanted another reply than it may have; None: it has failed.
        max_running: how many an engine has under way at once; None: as many as it can begin.
    """

    max_replies: int = 16
    seconds: float = 300.0
    blocked_seconds: float = 60.0
    limit_reward: float | None = 0.0
    max_running: int | None = None


@dataclasses.dataclass(eq=False)
class _Running:
    """An episode that has begun."""

    request: GenerationRequest
    prompt: Prompt
    policy: Policy | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False
    is_cut: bool = False  # at a limit of replies or tokens
    seconds: float = 0.0
    entered: float = 0.0  # the environment, last
    num_asking: int = 0  # replies that it waits for


class Environment:
    """Runs a function of the user's, or a program, for each prompt.

    Args:
        function: see `EpisodeFunction`.
        name: of it, for messages.
        tokenizer: the policy's.
        decode: gives a reply's text.
        journal: keeps finished episodes, for those of programs; None: they can be generated again.

    Attributes:
        weights: tells the engine's weights from all others of the run.
    """

    def __init__(
        self,
        function: EpisodeFunction,
        name: str,
        tokenizer: Tokenizer,
        decode: Callable[[Sequence[int]], str],
        limits: EpisodeLimits,
        journal: EpisodeJournal | None = None,
    ) -> None:
        self.name, self.weights = name, ""
        self._function, self._limits, self._decode, self._journal = function, limits, decode, journal
        self._turns, self._eos_id = Turns(tokenizer), tokenizer.eos_id

    def generate(
        self,
        engine: EmbeddedEngine,
        group: EngineGroup,
        requests: Iterator[GenerationRequest],
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        take: Callable[[Episode], None],
    ) -> dict[str, float]:
        """Run an episode for each request. On the leader of the engine's ranks; the others `Lockstep.follow`.

        Args:
            group: these ranks.
            requests: prompts in the order of the work; pulled when there is room.
            prompts: by the requests' ids.
            take: gets the episodes as they end.

        Returns:
            Sums over the episodes: of replies, inserted tokens, seconds in environments, failures.

        Raises:
            EnvironmentBlocksError: a coroutine does not give the event loop back.
            For the others see `GenerationEngine.generate`.
        """
        with contextlib.closing(_Round(self, engine, group, requests, sampling, prompts, take)) as round_:
            round_.run()
        return round_.sums

    def close(self) -> None:
        """Close what programs have reached."""
        if isinstance(self._function, Program):
            self._function.close()

    def kept(self, request: GenerationRequest) -> Episode | None:
        """The episode of a request that an earlier start of the run has finished, if it is kept."""
        fields = None if self._journal is None else self._journal.read(request.seed, self._origin(request))
        return None if fields is None else Episode(**fields)

    def keep(self, request: GenerationRequest, episode: Episode) -> None:
        """Keep a finished episode, where they are kept. One that has failed is run again."""
        if self._journal is not None and episode.problem is None:
            self._journal.write(request.seed, self._origin(request), vars(episode))

    def _origin(self, request: GenerationRequest) -> str:
        of = (self.name, self.weights, request.request_id, request.prompt_token_ids)
        return hashlib.sha256(repr(of).encode()).hexdigest()

    def policy(self, running: _Running, engine: EmbeddedEngine, sampling: SamplingParams, ask: Ask) -> Policy:
        """The policy of an episode."""
        return Policy(
            ask,
            running.prompt.token_ids,
            self._turns,
            self._decode,
            sampling,
            max_length=engine.max_sequence_length,
            max_replies=self._limits.max_replies,
            name=f"{running.request.seed:016x}",
        )

    async def outcome(self, running: _Running) -> tuple[Any, str | None]:
        """What the environment returns, and why the episode has failed, if it has."""
        assert running.policy is not None
        line = copy.deepcopy(dict(running.prompt.line))
        of_line = f"the environment {self.name}, {running.prompt.place or 'prompt ' + str(running.prompt.prompt_id)}"
        try:
            returned = await self._function(running.policy, line)
        except asyncio.CancelledError:
            if not running.is_late:
                raise
            return None, f"{of_line}: took more than {self._limits.seconds:g} s (trainer.ppo.episodes.seconds)"
        except EpisodeLimitError as error:
            running.is_cut = True
            is_failed = self._limits.limit_reward is None or not running.policy.num_replies
            return self._limits.limit_reward, f"{of_line}: {error}" if is_failed else None
        except EpisodeError as error:
            return None, f"{of_line}: {error}"
        except Exception as error:
            logger.error("%s raised an error", of_line, exc_info=error)
            return None, f"{of_line} raised {describe(error)}"
        if not running.policy.num_replies:
            return None, f"{of_line}: it ended before the policy had replied"
        return _plain(returned), None

    def episode(self, running: _Running, outcome: Any, problem: str | None, version: int) -> Episode:
        """The finished episode. One without a reply gets an end, since a sample has a token: it counts nowhere."""
        assert running.policy is not None
        last, (first, *others) = running.policy.last, running.policy.rows
        rows = [row for row in (first, *others) if row.last is not None] or [first]
        none = last is None
        tokens = [token for row in rows for token in row.ids][len(rows[0].prompt) :]
        mask = [of for row in rows for of in [False] * len(row.prompt) + row.sampled][len(rows[0].prompt) :]
        return Episode(
            request_id=running.request.request_id,
            prompt_token_ids=rows[0].prompt,
            token_ids=[self._eos_id] if none else tokens,
            logprobs=[0.0] if none else [logprob for row in rows for logprob in row.logprobs],
            finish_reason="stop" if last is not None and last.ended and not running.is_cut else "length",
            weight_version=version,
            routes="" if none else joined([(row.routes, len(row.ids)) for row in rows]),
            mask=[True] if none else mask,
            outcome=outcome,
            problem=problem,
            num_replies=running.policy.num_replies,
            seconds=running.seconds,
            is_cut=running.is_cut and problem is None,
            further_rows=[len(row.ids) for row in rows[1:]],
        )


class _Round:
    """The episodes of one call of `Environment.generate`: an engine in this thread, environments in another."""

    def __init__(
        self,
        environment: Environment,
        engine: EmbeddedEngine,
        group: EngineGroup,
        requests: Iterator[GenerationRequest],
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        take: Callable[[Episode], None],
    ) -> None:
        self.sums = dict.fromkeys(SUMS, 0.0)
        self._environment, self._engine, self._sampling = environment, engine, sampling
        self._lockstep = Lockstep(engine, group)
        self._requests: Iterator[GenerationRequest] | None = requests
        self._prompts, self._take = prompts, take
        self._changed = threading.Condition()
        self._queue = collections.deque[Task]()
        self._asked: dict[int, asyncio.Future[ScheduledSequence]] = {}  # by the request's id
        self._beginning = set[_Running]()  # that have asked for nothing yet
        self._running = set[_Running]()
        self._ended = collections.deque[tuple[_Running, Any, str | None]]()
        self._in_engine = 0
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run_loop, name="environments", daemon=True)
        self._thread.start()

    # ---- the thread of the engine -----------------------------------------------------------

    def run(self) -> None:
        """Run all episodes."""
        with contextlib.closing(self._lockstep.serve(self._pull)) as passes:
            for advanced in passes:
                for sequence in advanced:
                    if not sequence.is_in_slot:
                        self._answer(sequence)
                self._hand_out()
        self._hand_out()

    def _pull(self) -> Task | None:
        """The next reply to generate; waits for the environments where the engine has nothing else to do."""
        while True:
            self._begin()
            self._hand_out()
            with self._changed:
                if self._queue:
                    self._in_engine += 1
                    return self._queue.popleft()
                if self._in_engine or not (self._running or self._ended or self._requests):
                    return None
                if not self._ended:
                    self._changed.wait(_POLL_SECONDS)
            activity.progress()  # these waits have limits of their own
            self._check_loop()

    def _begin(self) -> None:
        """Begin episodes while the engine would have slots to spare."""
        most = self._environment._limits.max_running
        while self._requests is not None:
            with self._changed:
                is_busy = self._in_engine + len(self._queue) + len(self._beginning) >= self._engine.num_slots
                if is_busy or (most is not None and len(self._running) >= most):
                    return
            request = next(self._requests, None)
            if request is None:
                self._requests = None
                return
            if (kept := self._environment.kept(request)) is not None:
                self._count(kept)
                continue
            running = _Running(request, self._prompts[request.request_id])
            with self._changed:
                self._beginning.add(running)
                self._running.add(running)
            self._loop.call_soon_threadsafe(self._start, running)

    def _answer(self, sequence: ScheduledSequence) -> None:
        with self._changed:
            self._in_engine -= 1
            answer = self._asked.pop(sequence.request.request_id, None)
        if answer is not None:
            self._loop.call_soon_threadsafe(_give, answer, sequence)

    def _hand_out(self) -> None:
        while True:
            with self._changed:
                if not self._ended:
                    return
                running, outcome, problem = self._ended.popleft()
            episode = self._environment.episode(running, outcome, problem, self._engine.weight_version)
            self._environment.keep(running.request, episode)
            self._count(episode)

    def _count(self, episode: Episode) -> None:
        self.sums["replies"] += episode.num_replies
        self.sums["rows"] += len(episode.row_lengths)
        self.sums["inserted_tokens"] += len(episode.mask) - sum(episode.mask)
        self.sums["environment_seconds"] += episode.seconds
        self.sums["failed_episodes"] += episode.problem is not None
        self.sums["cut_episodes"] += episode.is_cut
        self._take(episode)

    def _check_loop(self) -> None:
        """Raise where a coroutine holds the event loop."""
        limit = self._environment._limits.blocked_seconds
        if time.monotonic() - self._beat > limit:
            frame = sys._current_frames().get(self._thread.ident or 0)
            where = (
                "".join(traceback.format_list(traceback.extract_stack(frame)[-1:])).strip() if frame else "somewhere"
            )
            raise EnvironmentBlocksError(
                f"the environment {self._environment.name} has held its event loop for more than {limit:g} s, so that "
                f"all other episodes wait: {where}. Use await (asyncio.to_thread for what blocks), or give it more "
                "time: trainer.ppo.episodes.blocked_seconds"
            )

    def close(self) -> None:
        """Cancel what is under way, and end the event loop."""

        def cancel() -> None:
            for running in list(self._running):
                if running.task is not None:
                    running.task.cancel()
            self._loop.call_soon(self._loop.call_soon, self._loop.stop)

        self._loop.call_soon_threadsafe(cancel)
        self._thread.join(_END_SECONDS)

    # ---- the thread of the environments -----------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._note_beat)
        try:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.close()

    def _note_beat(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_SECONDS, self._note_beat)

    def _start(self, running: _Running) -> None:
        running.task = self._loop.create_task(self._run(running))

    async def _run(self, running: _Running) -> None:
        async def ask(ids: list[int], number: int, wanted: Wanted) -> ScheduledSequence:
            return await self._ask(running, ids, number, wanted)

        outcome, problem = None, None
        try:
            running.policy = self._environment.policy(running, self._engine, self._sampling, ask)
            self._enter(running)
            outcome, problem = await self._environment.outcome(running)
            self._leave(running)
        finally:
            with self._changed:
                self._running.discard(running)
                self._beginning.discard(running)
                self._ended.append((running, outcome, problem))
                self._changed.notify_all()

    async def _ask(self, running: _Running, ids: list[int], number: int, wanted: Wanted) -> ScheduledSequence:
        sample, seed = running.request.request_id, running.request.seed
        of_reply = derive_seed(seed, number) if number else seed  # one reply is what a response without environment is
        request = GenerationRequest(sample * _OF_EPISODE + number, ids, of_reply, wanted.max_tokens)
        task = self._engine.task(request, wanted.sampling, num_top=wanted.num_top)
        answer: asyncio.Future[ScheduledSequence] = self._loop.create_future()
        if not running.num_asking:
            self._leave(running)
        running.num_asking += 1
        with self._changed:
            self._asked[request.request_id] = answer
            self._beginning.discard(running)
            self._queue.append(task)
            self._changed.notify_all()
        try:
            return await answer
        finally:
            task.is_abandoned = True
            running.num_asking -= 1
            self._enter(running)

    def _enter(self, running: _Running) -> None:
        """Its time in the environment goes on, unless it waits for another reply."""
        if running.num_asking:
            return
        running.entered = time.monotonic()
        left = max(0.0, self._environment._limits.seconds - running.seconds)
        running.timer = self._loop.call_later(left, self._is_late, running)

    def _leave(self, running: _Running) -> None:
        running.seconds += time.monotonic() - running.entered
        if running.timer is not None:
            running.timer.cancel()

    def _is_late(self, running: _Running) -> None:
        running.is_late = True
        if running.task is not None:
            running.task.cancel()


def _plain(returned: Any) -> Any:
    """What an environment has returned as JSON has it, for other ranks and checkpoints: what is no number as text."""
    if returned is None:
        return None
    if isinstance(returned, Mapping) and all(isinstance(part, str) for part in returned):
        return {part: _plain(value) for part, value in returned.items()}
    number = as_number(returned)
    return repr(returned) if number is None else number


def _give(future: asyncio.Future[ScheduledSequence], sequence: ScheduledSequence) -> None:
    if not future.done():
        future.set_result(sequence)


def build_environment(
    named: str | schema.Program,
    key: str,
    engine: EmbeddedEngine,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    decode: Callable[[Sequence[int]], str],
    section: schema.Episodes,
    journal: EpisodeJournal | None = None,
) -> Environment:
    """The environment that a config or a command line names.

    Args:
        named: ``FILE.py:NAME``, or a program; ``key`` is where it is named, for messages.
        engine: that generates the replies.
        sampling: of replies; ``decode`` gives their texts.
        section: limits, and where programs reach the policy.
        journal: keeps episodes of programs.

    Raises:
        UserCodeError, ProgramError: there is no such function or program.
    """
    limits = EpisodeLimits(**{name: value for name, value in vars(section).items() if name != "host"})
    if isinstance(named, str):
        return Environment(load_environment(named, key), named, tokenizer, decode, limits)
    # Here, because it loads Flask: other jobs need not.
    from nemo_style_aligner.trainer.rl.episodes.endpoint import EpisodeEndpoint

    tell, endpoint = program_of(named, key, section.seconds), EpisodeEndpoint(engine, tokenizer, sampling, section.host)
    name = named.url or " ".join(named.command or ())
    return Environment(Program(tell, endpoint), name, tokenizer, decode, limits, journal)


def named_environment(text: str) -> str | schema.Program:
    """What a command line names: ``FILE.py:NAME``, a program's ``http://...``, or ``{command: [...]}`` as configs do.

    Raises:
        ProgramError: it begins as a section does, and is none.
    """
    if text.startswith(("http://", "https://")):
        return schema.Program(url=text)
    if not text.startswith("{"):
        return text
    try:
        return schema.Program(**yaml.safe_load(text))
    except (yaml.YAMLError, TypeError) as error:
        raise ProgramError(f"--environment {text}: give {{command: [...]}} or {{url: ...}} ({error})") from error


def check_environment(named: str | schema.Program, key: str) -> None:
    """Make sure that there is such an environment, named by ``key``. Raises UserCodeError, ProgramError."""
    if isinstance(named, str):
        load_environment(named, key)
    else:
        program_of(named, key, 0)


def load_environment(named: str, key: str) -> EpisodeFunction:
    """The function ``FILE.py:NAME``; ``key`` is where it is named, for messages. Raises `UserCodeError`."""
    function = load_function(named, key, ["policy", "line"])
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise UserCodeError(f"{key}={named}: an environment awaits the policy's replies: write `async def`")
    return function
