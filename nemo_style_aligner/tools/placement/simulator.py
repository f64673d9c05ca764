"""Steps of a run, event by event, in the time of a clock that jumps from one event to the next.

What waits for what is as in `rl.loop`: engines with in-flight batching take samples from the real work queue
(`rl.rollouts.work_queue`), finished samples are scored beside generation, the service that scores also trains the
critic, and with staleness the next rounds are generated during training, in which responses may outlive their round
(`rl.rollouts.in_flight`). How long things take is told from outside (`costs`). No wall clock and no chance are
involved: equal arguments give equal times.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

from nemo_style_aligner.tools.placement.costs import Sample
from nemo_style_aligner.trainer.rl.rollouts.work_queue import StaticPartition, WorkQueue, WorkTaker

# ---- time ---------------------------------------------------------------------------------------


class Signal:
    """Something that happens once; processes wait for it by yielding it."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Process] = []


Process = Iterator["float | Signal"]
"""Yields the seconds that something takes, or a `Signal` to wait for."""


class Clock:
    """Runs processes in the order of their times; at equal times, in the order in which they were due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Process]] = []
        self._numbers = itertools.count()

    def start(self, process: Process) -> Signal:
        """Begin a process now; returns the signal of its end."""
        ended = Signal()
        self._after(0.0, self._with_end(process, ended))
        return ended

    def set(self, signal: Signal) -> None:
        """Let those go on that wait for it."""
        signal.is_set = True
        for process in signal.waiting:
            self._after(0.0, process)
        signal.waiting = []

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, process = heapq.heappop(self._due)
            for wish in process:
                if isinstance(wish, Signal):
                    if wish.is_set:
                        continue
                    wish.waiting.append(process)
                else:
                    self._after(wish, process)
                break

    def _after(self, seconds: float, process: Process) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), process))

    def _with_end(self, process: Process, ended: Signal) -> Process:
        yield from process
        self.set(ended)


# ---- generation ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Engines:
    """Engines of a job, all alike.

    Attributes:
        slots: responses that each generates at the same time.
        decode: seconds of a pass, from its responses and the tokens before them in all.
        prefill: seconds, from prompts' tokens.
        slowness: factors of the first engines' times: stragglers.
        in_flight: a slot is filled again as soon as its response ends; else with all others, when the longest has.
        queue: the work queue deals out samples; else each has a fixed share.
        samples_per_prompt: so many follow each other; an engine computes the prompt for the first of them.
    """

    count: int
    slots: int
    decode: Callable[[int, float], float]
    prefill: Callable[[float], float]
    slowness: tuple[float, ...] = ()
    in_flight: bool = True
    queue: bool = True
    samples_per_prompt: int = 1

    def slowed(self, index: int) -> float:
        """The factor of an engine's times."""
        return self.slowness[index] if index < len(self.slowness) else 1.0

    def takers(self, num_samples: int, expected: Sequence[float] | None) -> list[Callable[[int], list[int]]]:
        """For each engine, what it takes samples with."""
        ids = range(num_samples)
        if not self.queue:
            shares = [StaticPartition(index, self.count, self.samples_per_prompt) for index in range(self.count)]
            for share in shares:
                share.start_round(ids, expected)
            return [share.take for share in shares]
        queue, numbers = WorkQueue(self.count), itertools.count()
        queue.start_round(ids, expected)
        if not self.in_flight:
            return [queue.take] * self.count  # NeMo-Aligner's protocol: a micro batch, as long as there is one

        def asking(worker: str) -> Callable[[int], tuple[list[int], int]]:
            return lambda n: (queue.take(n, worker, next(numbers)), queue.share())

        return [WorkTaker(asking(str(index)), self.slots).take for index in range(self.count)]


@dataclasses.dataclass
class Round:
    """A round of generation under way.

    Attributes:
        begun, ended: seconds of the clock; ``ended`` is that of the last response so far.
        busy: seconds that engines had responses under way, summed over engines.
    """

    samples: Sequence[Sample]
    begun: float
    ended: float = 0.0
    busy: float = 0.0
    done: Signal = dataclasses.field(default_factory=Signal)


def start_round(
    clock: Clock,
    engines: Engines,
    samples: Sequence[Sample],
    expected: Sequence[float] | None,
    on_end: Callable[[int], None],
) -> Round:
    """Begin to generate ``samples``; ``on_end`` is called with the number of each that ends."""
    this = Round(samples, clock.now)
    takers = engines.takers(len(samples), expected)

    def engine(index: int) -> Process:
        yield from _engine(clock, engines, index, this, lambda n: [(0, number) for number in takers[index](n)], on_end)

    return _start(clock, engines, this, engine)


def _start(clock: Clock, engines: Engines, this: Round, engine: Callable[[int], Process]) -> Round:
    """The round, begun, which is done when all of its engines are."""
    ends = [clock.start(engine(index)) for index in range(engines.count)]

    def all_ended() -> Process:
        yield from ends
        clock.set(this.done)

    clock.start(all_ended())
    return this


_UnderWay = tuple[int, int]
"""Tokens that a response has, and its sample's number."""


def _engine(
    clock: Clock,
    engines: Engines,
    index: int,
    this: Round,
    take: Callable[[int], Sequence[_UnderWay]],
    on_end: Callable[[int], None],
    is_full: Callable[[], bool] = lambda: False,
) -> Generator[float | Signal, None, list[_UnderWay]]:
    """An engine's round, until it is full or nothing is left; returns what is under way, by number.

    Between two ends of responses all passes are alike, so they are one event. Begun responses are computed again first.
    """
    running: list[tuple[int, int, int]] = []  # (pass after which it ends, number, pass before its first token)
    passes, before, last_prompt = 0, 0, -1  # `before`: tokens before pass 0, of all that run, as if they ran since then
    while not is_full():
        seconds = 0.0
        if len(running) < (engines.slots if engines.in_flight else 1):
            for made, number in take(engines.slots - len(running)):
                sample, prompt = this.samples[number], number // engines.samples_per_prompt
                heapq.heappush(running, (passes + sample.response - made, number, passes - made))
                before += sample.prompt - (passes - made)
                seconds += engines.prefill(made + (sample.prompt if prompt != last_prompt else 0))
                last_prompt = prompt
        if not running:
            break
        ahead, batch = running[0][0] - passes, len(running)
        seconds += ahead * engines.decode(batch, before + batch * (passes + ahead / 2))
        seconds *= engines.slowed(index)
        passes += ahead
        this.busy += seconds
        yield seconds
        this.ended = clock.now
        while running and running[0][0] == passes:
            _, number, first = heapq.heappop(running)
            before -= this.samples[number].prompt - first
            on_end(number)
    return sorted(((passes - first, number) for _, number, first in running), key=lambda of: of[1])


@dataclasses.dataclass
class _Share:
    """An engine's samples that are under way beyond a round, the oldest first.

    ``spare``: groups that have ended beyond what the rounds so far take.
    """

    under_way: list[_UnderWay] = dataclasses.field(default_factory=list)
    spare: int = 0


def go_on(
    clock: Clock,
    engines: Engines,
    shares: Sequence[_Share],
    samples: Sequence[Sample],
    new: Sequence[int],
    own: range,
    on_end: Callable[[int], None],
) -> Round:
    """Begin a round that ends once as many samples have as there are ``own``, in whole groups, of all under way.

    Args:
        shares: of the engines; ``new`` numbers are dealt to them, groups as a whole.
        samples: of the whole run, by number.
    """
    this, group = Round(samples, clock.now), engines.samples_per_prompt
    for number in new:
        shares[number // group % engines.count].under_way.append((0, number))
    quotas = collections.Counter(number // group % engines.count for number in own[::group])

    def engine(index: int) -> Process:
        share, quota = shares[index], quotas[index]
        left = collections.Counter(number // group for _, number in share.under_way)
        waiting = collections.deque(share.under_way)

        def take(n: int) -> list[_UnderWay]:
            return [waiting.popleft() for _ in range(min(n, len(waiting)))]

        def ended(number: int) -> None:
            left[number // group] -= 1
            share.spare += not left[number // group]
            on_end(number)

        going_on = yield from _engine(clock, engines, index, this, take, ended, lambda: share.spare >= quota)
        share.spare -= quota
        share.under_way = [*going_on, *waiting]

    return _start(clock, engines, this, engine)


# ---- the service --------------------------------------------------------------------------------


class Service:
    """The critic and reward service: one thing after the other, in the order of arrival.

    Args:
        score: seconds to score some samples at once.
        batch: samples that it scores at once, at most.
    """

    def __init__(self, clock: Clock, score: Callable[[Sequence[Sample]], float], batch: int) -> None:
        self._clock = clock
        self._score = score
        self._batch = batch
        self._waiting: collections.deque[tuple[Sample | None, float, Signal]] = collections.deque()
        self._is_working = False

    def ask(self, sample: Sample | None, seconds: float = 0.0) -> Signal:
        """Have a sample scored or, with None, the critic trained for so long; returns the signal that it is done."""
        done = Signal()
        self._waiting.append((sample, seconds, done))
        if not self._is_working:
            self._is_working = True
            self._clock.start(self._work())
        return done

    def _work(self) -> Process:
        while self._waiting:
            asked = [self._waiting.popleft()]
            scored = [sample for sample, _, _ in asked if sample is not None]
            while scored and self._waiting and (sample := self._waiting[0][0]) and len(scored) < self._batch:
                asked.append(self._waiting.popleft())
                scored.append(sample)
            yield self._score(scored) if scored else asked[0][1]
            for _, _, done in asked:
                self._clock.set(done)
        self._is_working = False


# ---- steps --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of what a step does beside generation, for its samples.

    Attributes:
        refit: bringing weights to the engines, and making room for them.
        score: scores computed in the job itself, after generation.
        logprobs, init_logprobs: passes of the policy and the initial policy.
        train: the policy's updates.
        train_critic: the critic's: beside the policy's in the service, after it in the job itself.
    """

    refit: float = 0.0
    score: float = 0.0
    logprobs: float = 0.0
    init_logprobs: float = 0.0
    train: float = 0.0
    train_critic: float = 0.0


@dataclasses.dataclass(frozen=True)
class SimulatedJob:
    """What is simulated.

    Attributes:
        costs: of a step, from its samples.
        score: of the service, see `Service`; None: no service.
        score_batch: samples that the service scores at once.
        staleness: k: a step's samples are generated on ranks of their own while the k steps before train.
        keeps: with staleness, responses outlive the rounds in which they began, and prompts of so many steps are
            admitted beyond a round's own; else a round waits for its longest.
        foresight: the queue knows how long responses will be, as it learns over the epochs; else it goes in order.
    """

    engines: Engines
    costs: Callable[[Sequence[Sample]], StepCosts]
    score: Callable[[Sequence[Sample]], float] | None = None
    score_batch: int = 64
    staleness: int = 0
    keeps: bool = False
    foresight: bool = False


def simulate(job: SimulatedJob, steps: Sequence[Sequence[Sample]]) -> list[dict[str, float]]:
    """Simulate a run whose steps have these samples.

    Returns:
        Of each step, seconds by phase, ``step`` (the whole) and ``idle`` (the share of engines' time in generation
        without a response under way). Phases are those that metrics call ``timers/step/...``; ``generate`` is what the
        step waited for.
    """
    clock, found = Clock(), list[dict[str, float]]()
    clock.start(_run(clock, job, steps, found))
    clock.run()
    return found


class _Generating:
    """The rounds of a run, each of which begins when those before are complete and its weights are there."""

    def __init__(
        self, clock: Clock, job: SimulatedJob, steps: Sequence[Sequence[Sample]], service: Service | None
    ) -> None:
        self._clock, self._job, self._steps, self._service = clock, job, steps, service
        self._samples = list(itertools.chain.from_iterable(steps))
        self._firsts = [0, *itertools.accumulate(map(len, steps))]
        self._shares = [_Share() for _ in range(job.engines.count)]
        self.pushed = [Signal() for _ in steps]  # the weights that each step trains, at the engines' disposal
        self.begun = [Signal() for _ in steps]
        self.rounds: list[Round] = []
        self.scores: list[list[Signal]] = [[] for _ in steps]

    def process(self) -> Process:
        """Generate the rounds of all steps."""
        for step in range(len(self._steps)):
            yield self.pushed[max(0, step - self._job.staleness)]
            this = self._begin(step)
            self.rounds.append(this)
            self._clock.set(self.begun[step])
            yield this.done

    def _begin(self, step: int) -> Round:
        job, samples, scores = self._job, self._steps[step], self.scores[step]
        first, whole = self._firsts[step], self._samples

        def on_end(number: int) -> None:
            if self._service is not None:
                scores.append(self._service.ask(whole[number]))

        if not (job.keeps and job.staleness):
            expected = [float(sample.response) for sample in samples] if job.foresight else None
            return start_round(self._clock, job.engines, samples, expected, lambda number: on_end(first + number))
        begin, end = (min(each + job.staleness, len(self._steps)) for each in (step, step + 1))
        new = range(self._firsts[begin] if step else 0, self._firsts[end])
        own = range(first, self._firsts[step + 1])
        return go_on(self._clock, job.engines, self._shares, whole, new, own, on_end)


def _run(clock: Clock, job: SimulatedJob, steps: Sequence[Sequence[Sample]], found: list[dict[str, float]]) -> Process:
    service = None if job.score is None else Service(clock, job.score, job.score_batch)
    generating = _Generating(clock, job, steps, service)
    clock.start(generating.process())
    for number, samples in enumerate(steps):
        costs, phases, begun = job.costs(samples), dict[str, float](), clock.now

        def spent(name: str, since: float, phases: dict[str, float] = phases) -> None:
            phases[name] = phases.get(name, 0.0) + clock.now - since

        def push(
            number: int = number, costs: StepCosts = costs, spent: Callable[[str, float], None] = spent
        ) -> Process:
            since = clock.now
            yield costs.refit
            spent("refit", since)
            clock.set(generating.pushed[number])

        if not job.staleness or not number:
            yield from push()
        since = clock.now
        yield generating.begun[number]
        this = generating.rounds[number]
        yield this.done
        spent("generate", since)
        if job.staleness and number and number + job.staleness < len(steps):
            yield from push()
        for name in ("score", "logprobs", "init_logprobs"):
            phases[name] = getattr(costs, name)
            yield phases[name]
        since = clock.now
        yield from generating.scores[number]
        spent("critic_wait", since)
        critic = service.ask(None, costs.train_critic) if service and costs.train_critic else None
        yield costs.train
        phases["train"] = costs.train
        since = clock.now
        if critic is not None:
            yield critic
        elif not service:
            yield costs.train_critic
        spent("critic_train_wait", since)
        phases["step"] = clock.now - begun
        phases["idle"] = max(0.0, 1 - this.busy / (job.engines.count * max(this.ended - this.begun, 1e-9)))
        found.append(phases)
