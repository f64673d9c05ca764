"""Responses that outlive a round: a step takes the first groups to finish, and the others go on with newer weights.

Nothing here depends on a clock. Each engine has a fixed share of the groups. It runs passes until as many of them have
finished as its share of the step, hands these over in the order of passes and numbers, and stops; what is unfinished is
plain data (`Carried`). In the next round, with weights that may be newer, it goes on from its tokens, whose keys and
values are computed again: so a response continues in a resumed job, or beside others, to the same bits.

The ranks that train say what is admitted (`Admissions`), rollout ranks carry it out (`EngineShare`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from nemo_style_aligner.engine.contract import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, Task
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config.schema import ActorLoop
from nemo_style_aligner.trainer.rl.sample import Prompt


def in_flight(ppo: ActorLoop) -> str:
    """What becomes of responses under way when weights are replaced: as asked for, else what episodes allow."""
    return ppo.in_flight or ("keep" if ppo.environment is None else "wait")


Hand = Callable[[int, GenerationResult], None]
"""Takes a sample's number and its response, whose request_id is its place in the step."""


# ---- what passes between training and rollout ranks ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Admission:
    """A step's prompts, one for each sample, which get the numbers from ``first`` on. Samples of a group are in a row.

    ``seed``: of the step's random streams.
    """

    first: int
    seed: int
    prompts: Sequence[Prompt]


@dataclasses.dataclass(frozen=True)
class Order:
    """A round: as many groups are to finish as there are among ``count`` samples from number ``first`` on.

    Attributes:
        admissions: what is new.
        first, count: of the step whose round this is; which of all groups it gets is another matter.
        group_size: samples of a group.
        restarts: responses that the round before left unfinished begin again, if the weights are others now.
    """

    admissions: Sequence[Admission]
    first: int
    count: int
    group_size: int
    restarts: bool


@dataclasses.dataclass
class Carried:
    """A sample that was admitted and is not in any step yet.

    Attributes:
        number: over the whole run.
        prompt_token_ids, seed: of its request.
        token_ids, logprobs: of the response so far.
        versions: [version, how many tokens] of the weights that sampled them, in order.
        finish_reason: None: it goes on.
        routes: of a finished one, see `GenerationResult`: of the weights that sampled its last token.
    """

    number: int
    prompt_token_ids: list[int]
    seed: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[list[int]] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    routes: str = ""

    def note(self, sequence: ScheduledSequence, version: int) -> None:
        """Take over what an engine with weights of this version has made of it."""
        if new := len(sequence.token_ids) - len(self.token_ids):
            self.versions.append([version, new])
        self.token_ids, self.logprobs = sequence.token_ids, sequence.logprobs
        self.finish_reason, self.routes = sequence.finish_reason, sequence.routes

    def restart(self) -> None:
        """Forget the response."""
        self.token_ids, self.logprobs, self.versions = [], [], []

    def result(self, place: int) -> GenerationResult:
        """The finished response, of the sample at this place in its step."""
        assert self.finish_reason is not None
        return GenerationResult(
            request_id=place,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            weight_version=self.versions[-1][0],
            routes=self.routes,
            versions=self.versions,
        )


def pack_order(order: Order) -> bytes:
    """Pack what a round is to do."""
    admissions = [[a.first, a.seed, [list(vars(prompt).values()) for prompt in a.prompts]] for a in order.admissions]
    return json.dumps([admissions, order.first, order.count, order.group_size, order.restarts]).encode()


def unpack_order(content: bytes) -> Order:
    """Inverse of `pack_order`."""
    packed, *others = json.loads(content)
    admissions = [Admission(first, seed, [Prompt(*fields) for fields in prompts]) for first, seed, prompts in packed]
    return Order(admissions, *others)


def pack_carried(samples: Iterable[Carried]) -> bytes:
    """Pack samples that are under way."""
    return json.dumps([vars(sample) for sample in samples]).encode()


def unpack_carried(content: bytes | str) -> list[Carried]:
    """Inverse of `pack_carried`, to the last bit."""
    return [Carried(**fields) for fields in json.loads(content)]


# ---- rollout ranks -------------------------------------------------------------------------------


class EngineShare:
    """The samples under way of one engine, on each of the ranks that share it.

    Args:
        engine: generates them.
        sampling: sampling parameters.
        index, count: the engine's number, and how many there are: it has every ``count``-th group.
    """

    def __init__(self, engine: EmbeddedEngine, sampling: SamplingParams, index: int, count: int) -> None:
        self.carried: dict[int, Carried] = {}  # by number
        self._engine = engine
        self._sampling = sampling
        self._index = index
        self._count = count
        self._num_done = self._quota = 0

    def restore(self, samples: Sequence[Carried], group_size: int, steps: Iterable[tuple[int, int]]) -> None:
        """Take this engine's share of what another run's engines had under way; there may have been more or fewer.

        Args:
            samples: all that were, in whole groups.
            steps: first number and count of the steps whose rounds are to come: for these an engine has as many groups.
        """
        due = [first // group_size + group for first, count in steps for group in range(count // group_size)]
        wanted = collections.Counter(group % self._count for group in due)
        owners = {group: group % self._count for group in sorted({each.number // group_size for each in samples})}
        have = collections.Counter(owners.values())
        for group, owner in owners.items():
            if have[owner] > wanted[owner]:
                owners[group] = next(other for other in range(self._count) if have[other] < wanted[other])
                have[owner], have[owners[group]] = have[owner] - 1, have[owners[group]] + 1
        self.carried = {each.number: each for each in samples if owners[each.number // group_size] == self._index}

    def progress(self) -> tuple[int, int]:
        """How many groups of this round have finished, and of how many; for any thread."""
        return self._num_done, self._quota

    def run(self, order: Order, hand: Hand) -> None:
        """Generate a round. All ranks of the engine run it alike."""
        for admission in order.admissions:
            self._admit(admission, order.group_size)
        if order.restarts:
            self._restart()
        first, groups = order.first // order.group_size, order.count // order.group_size
        places = [group for group in range(groups) if self._has(first + group)]
        self._num_done, self._quota = 0, len(places)
        with contextlib.closing(self._passes()) as passes:
            while True:
                for group in self._finished(order.group_size)[: len(places) - self._num_done]:
                    self._hand_over(group, places[self._num_done], order.group_size, hand)
                    self._num_done += 1
                if self._num_done == len(places):
                    return
                next(passes)

    def _has(self, group: int) -> bool:
        return group % self._count == self._index

    def _admit(self, admission: Admission, group_size: int) -> None:
        for sample, prompt in enumerate(admission.prompts):
            if self._has((number := admission.first + sample) // group_size):
                seed = derive_seed(admission.seed, sample)
                self.carried[number] = Carried(number, prompt.token_ids, seed)

    def _restart(self) -> None:
        for sample in self.carried.values():
            if sample.finish_reason is None and sample.versions[-1:] and sample.versions[-1][0] != self._version:
                sample.restart()

    @property
    def _version(self) -> int:
        return self._engine.weight_version

    def _passes(self) -> Generator[None, None, None]:
        """Forward passes over what is unfinished, older numbers first: up to the next ones that finish something.

        ``carried`` is up to date when it is closed.
        """
        waiting = iter(sorted((s for s in self.carried.values() if s.finish_reason is None), key=lambda s: s.number))
        begun: dict[int, ScheduledSequence] = {}

        def pull() -> Task | None:
            if (sample := next(waiting, None)) is None:
                return None
            request = GenerationRequest(sample.number, sample.prompt_token_ids, sample.seed)
            return self._engine.task(request, self._sampling, begun=(sample.token_ids, sample.logprobs))

        try:
            with contextlib.closing(self._engine.serve(pull)) as passes:
                for advanced in passes:
                    begun |= {sequence.request.request_id: sequence for sequence in advanced}
                    if finished := [sequence for sequence in advanced if sequence.finish_reason is not None]:
                        for sequence in finished:
                            self.carried[sequence.request.request_id].note(sequence, self._version)
                        yield
        finally:
            for number, sequence in begun.items():
                if sequence.finish_reason is None:
                    self.carried[number].note(sequence, self._version)
        raise RuntimeError("the samples under way are fewer than the step takes")

    def _finished(self, group_size: int) -> list[int]:
        """The groups that are finished and not handed over, in their order."""
        done = collections.Counter(
            sample.number // group_size for sample in self.carried.values() if sample.finish_reason is not None
        )
        return sorted(group for group, count in done.items() if count == group_size)

    def _hand_over(self, group: int, place: int, group_size: int, hand: Hand) -> None:
        for sample in range(group_size):
            carried = self.carried.pop(group * group_size + sample)
            hand(carried.number, carried.result(place * group_size + sample))


# ---- training ranks ------------------------------------------------------------------------------


class Admissions:
    """Which prompts are admitted when: with a step's round those of the steps after it, so that no engine runs dry.

    The same on every rank that trains.

    Args:
        group_size: samples of a group.
        restarts: see `Order`.

    Attributes:
        prompts: of samples that were admitted and are in no step yet, by number.
    """

    def __init__(self, group_size: int, *, restarts: bool) -> None:
        self.prompts: dict[int, Prompt] = {}
        self.group_size = group_size
        self._restarts = restarts
        self._next = 0
        self._steps: dict[int, tuple[int, int]] = {}  # first number and count of the steps that are admitted

    def has(self, step: int) -> bool:
        """Whether a step, whose round has not begun, is admitted."""
        return step in self._steps

    def order(self, step: int, batches: Mapping[int, tuple[int, Sequence[Prompt]]]) -> Order:
        """The round of ``step``; ``batches``: seed and prompts of steps that are admitted with it, in order."""
        admissions = []
        for number, (seed, prompts) in batches.items():
            self._steps[number] = self._next, len(prompts)
            admissions.append(Admission(self._next, seed, prompts))
            self.prompts.update(enumerate(prompts, self._next))
            self._next += len(prompts)
        return Order(admissions, *self._steps.pop(step), self.group_size, self._restarts)

    @property
    def due(self) -> list[tuple[int, int]]:
        """First number and count of the steps that are admitted and whose rounds have not begun."""
        return [*self._steps.values()]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the samples themselves."""
        prompt_ids = [[number, prompt.prompt_id] for number, prompt in self.prompts.items()]
        return {"next": self._next, "steps": [[s, *of] for s, of in self._steps.items()], "prompts": prompt_ids}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[int], Prompt]) -> None:
        """Continue where `state_dict` was taken. ``prompt``: the prompt of an index in the dataset."""
        self._next = int(state["next"])
        self._steps = {step: (first, count) for step, first, count in state["steps"]}
        self.prompts = {number: prompt(index) for number, index in state["prompts"]}
