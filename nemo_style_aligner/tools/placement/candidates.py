"""Plans that could be: which roles on which ranks, with which layouts; what fits, and how long a step takes.

Strategies, as in arXiv:2312.11819: *flatten* has all models on all ranks; *interleave* gives the critic (with the
reward model) ranks of its own, in the job of the actor (policy, initial policy, engine) or in another one; *separate*
sets ranks of the actor apart for generation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.tools.placement.costs import PASSES_PER_STAGE, Model, Sample
from nemo_style_aligner.tools.placement.rates import Device
from nemo_style_aligner.tools.placement.simulator import Engines, SimulatedJob, StepCosts, simulate
from nemo_style_aligner.tools.placement.workload import mean_context
from nemo_style_aligner.trainer.models.sizes import Layout

STRATEGIES = ("flatten", "interleave", "separate")
SLOTS = (256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1)
_ENOUGH_SLOTS = 16
_KV_RESERVE = 1.25  # of the cache, for what is held on average: lengths vary


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines of equal devices; with ``two_jobs``, a critic with ranks of its own has whole ones, in another job."""

    nodes: int
    devices: int
    device: Device
    two_jobs: bool = False

    @property
    def room(self) -> float:
        """Bytes of a device that models get."""
        return self.device.memory - self.device.reserved


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be computed in each step.

    Attributes:
        critic: the shape of critic and reward model; None: the estimator needs no critic, and rewards are functions.
        steps: samples of the steps that are simulated.
        update: samples of an update.
        group: responses to a prompt.
        micro_batch: tokens of a pass, at most (``max_tokens_per_micro_batch``).
        itemsize: bytes of a weight.
        most: the longest prompt and response that there may be; None: those of ``steps``.
    """

    policy: ModelArchitecture
    critic: ModelArchitecture | None
    steps: Sequence[Sequence[Sample]]
    update: int
    group: int = 1
    micro_batch: int = 8192
    itemsize: int = 2
    most: Sample | None = None

    def model(self, shape: ModelArchitecture, device: Device) -> Model:
        """The bytes and seconds of one of its models, which remembers what it has computed."""
        if (shape, device) not in self._models:
            self._models[shape, device] = Model(shape, self.itemsize, device=device, group=self.group)
        return self._models[shape, device]

    @functools.cached_property
    def _models(self) -> dict[tuple[ModelArchitecture, Device], Model]:
        return {}

    @property
    def value_shape(self) -> ModelArchitecture:
        """Of critic and reward model, where there are any."""
        return self.critic or self.policy

    @functools.cached_property
    def longest(self) -> Sample:
        """The longest prompt and response."""
        drawn = [sample for step in self.steps for sample in step]
        return self.most or Sample(max(s.prompt for s in drawn), max(s.response for s in drawn))

    @functools.cached_property
    def held_tokens(self) -> float:
        """Tokens of the cache that a slot needs on average, with a reserve."""
        return _KV_RESERVE * statistics.fmean(map(mean_context, self.steps))


@dataclasses.dataclass(frozen=True)
class Savings:
    """What a job gives up for memory, in the order of docs/performance.md.

    Attributes:
        offload: optimizer's states in host memory while they are not in use.
        granularity: which activations are recomputed.
        swap: the frozen model in host memory while not in use.
        unload: the engine's memory is given back while training.
    """

    offload: bool = False
    granularity: str | None = None
    swap: bool = False
    unload: bool = False


LADDER = (
    Savings(),
    Savings(True),
    Savings(True, "selective"),
    Savings(True, "selective", swap=True),
    Savings(True, "selective", swap=True, unload=True),
    Savings(True, "full", swap=True, unload=True),
)


class DoesNotFitError(Exception):
    """Memory does not suffice, or no layout divides the model; the message says for what."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """A layout that fits: what is given up for it, the engine's slots, and the bytes of a rank by use."""

    layout: Layout
    saved: Savings
    slots: int
    used: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that fits.

    Attributes:
        actor, critic: of ranks that train; the same where these train both.
        generating: ranks set apart for generation; 0: those that train generate.
        engine_tp, slots: of an engine.
        engine_used: bytes of a rank set apart, by use.
    """

    strategy: str
    actor: Fit
    critic: Fit | None
    generating: int
    engine_tp: int
    slots: int
    staleness: int
    engine_used: Mapping[str, float]

    @property
    def critic_apart(self) -> Fit | None:
        """The critic, if it has ranks of its own."""
        return None if self.critic is self.actor else self.critic

    @property
    def actor_ranks(self) -> int:
        """Those that train the policy or generate."""
        return self.actor.layout.ranks + self.generating

    @property
    def critic_ranks(self) -> int:
        """Those that have the critic for themselves."""
        return self.critic_apart.layout.ranks if self.critic_apart else 0

    @property
    def in_flight(self) -> str | None:
        """With staleness, what becomes of responses under way when weights are replaced (``trainer.ppo.in_flight``)."""
        return "keep" if self.staleness else None

    @property
    def engines(self) -> int:
        """How many."""
        return (self.generating or self.actor.layout.ranks) // self.engine_tp


def predicted(run: Run, cluster: Cluster, plan: Candidate) -> dict[str, float]:
    """Mean seconds of a step and its phases; with staleness, without the first and the last steps."""
    found = simulate(simulated_job(run, cluster, plan), run.steps)
    age = plan.staleness
    counted = found[age:-age] if age and len(found) > 2 * age else found
    names = dict.fromkeys(name for phases in counted for name in phases)
    return {name: statistics.fmean(phases.get(name, 0.0) for phases in counted) for name in names}


def simulated_job(run: Run, cluster: Cluster, plan: Candidate) -> SimulatedJob:
    """A plan as the simulator wants it."""
    policy = run.model(run.policy, cluster.device)
    value = run.model(run.value_shape, cluster.device)
    scoring = (plan.critic or plan.actor).layout
    engines = Engines(
        plan.engines,
        plan.slots,
        decode=lambda batch, tokens: policy.decode(plan.engine_tp, batch, tokens),
        prefill=lambda tokens: policy.prefill(plan.engine_tp, tokens),
        samples_per_prompt=run.group,
    )

    def score(samples: Sequence[Sample]) -> float:
        return 2 * value.forward(scoring, samples, run.micro_batch) if plan.critic else 0.0  # and the reward model

    def costs(samples: Sequence[Sample]) -> StepCosts:
        layout, saved = plan.actor.layout, plan.actor.saved
        forward = policy.forward(layout, samples, run.micro_batch)
        refit = policy.refit(layout, plan.engine_tp, is_apart=plan.generating > 0)
        swapped = 2 * policy.weights(layout) / cluster.device.host if saved.swap else 0.0
        return StepCosts(
            refit=refit + (policy.weights(Layout(plan.engine_tp)) / cluster.device.host if saved.unload else 0.0),
            score=0.0 if plan.critic_apart else score(samples),
            logprobs=forward,
            init_logprobs=forward + swapped,
            train=_training(run, policy, plan.actor, samples),
            train_critic=_training(run, value, plan.critic, samples) if plan.critic else 0.0,
        )

    batch = scored_together(plan.critic.layout) if plan.critic else 1
    service = score if plan.critic_apart else None
    return SimulatedJob(engines, costs, service, batch, plan.staleness, keeps=plan.in_flight == "keep")


def scored_together(layout: Layout) -> int:
    """Samples that the service scores at once, at most."""
    return 8 * layout.pp * layout.dp


def pass_tokens(run: Run, layout: Layout, samples: int) -> int:
    """``max_tokens_per_micro_batch`` of passes over so many samples: a pipeline needs several passes."""
    if layout.pp == 1:
        return run.micro_batch
    tokens = statistics.fmean(sample.tokens for step in run.steps for sample in step)
    passes = min(samples / layout.dp, PASSES_PER_STAGE * layout.pp)
    return min(run.micro_batch, math.ceil(tokens * max(1.0, samples / layout.dp / passes)))


def _training(run: Run, model: Model, fit: Fit, samples: Sequence[Sample]) -> float:
    """Seconds of a step's updates, with what saving memory costs: fully recomputed, three passes' work becomes four."""
    seconds = model.training(fit.layout, samples, run.micro_batch, run.update)
    seconds *= {None: 1.0, "selective": 1.03, "full": 4 / 3}[fit.saved.granularity]
    return seconds + (2 * model.optimizer(fit.layout) / model.device.host if fit.saved.offload else 0.0)


# ---- which there are ----------------------------------------------------------------------------


def candidates(run: Run, cluster: Cluster, strategy: str, staleness: Sequence[int] = (0, 1)) -> list[Candidate]:
    """Plans of a strategy that fit: for every split of the ranks and every engine, the fastest layouts.

    Raises:
        DoesNotFitError: none does.
    """
    found: list[Candidate] = []
    reasons = ["it needs more machines, or more devices in each"]
    search = _Search(run, cluster, strategy, cluster.devices if cluster.two_jobs or cluster.nodes > 1 else 1)
    for split in search.splits():
        try:
            plan = search.fastest(split)
        except DoesNotFitError as reason:
            reasons.append(str(reason))
        else:
            found += [dataclasses.replace(plan, staleness=age) for age in (staleness if split.generating else (0,))]
    if not found:
        raise DoesNotFitError(reasons[-1])
    return found


class _Split(NamedTuple):
    """Ranks that train the policy, have only the critic, and only generate; the engines' tensor-parallel size."""

    training: int
    critic: int
    generating: int
    engine_tp: int


class _Kind(NamedTuple):
    """Ranks that train: a ``critic``'s, or an ``actor``'s with or without the critic, and engines (of TP 0: none)."""

    who: str
    has_critic: bool = False
    engine_tp: int = 0


@dataclasses.dataclass(frozen=True)
class _Search:
    """Plans of a strategy, and what they take of a device's memory.

    Attributes:
        unit: ranks are dealt out in so many: machines, or the devices of a single one.
        _found: what `_fitting` has found; splits ask for the same again and again.
    """

    run: Run
    cluster: Cluster
    strategy: str
    unit: int
    _found: dict[tuple[_Kind, int], tuple[list[Fit], str]] = dataclasses.field(default_factory=dict)

    def model(self, shape: ModelArchitecture) -> Model:
        """The bytes and seconds of a model here."""
        return self.run.model(shape, self.cluster.device)

    # ---- who is where -----------------------------------------------------------------------

    def splits(self) -> Iterator[_Split]:
        """All that are tried."""
        run, all_ranks = self.run, self.cluster.nodes * self.cluster.devices
        critics = [0] if run.critic is None or self.strategy != "interleave" else []
        if run.critic is not None and self.strategy != "flatten":
            critics += self._parts(run.critic, all_ranks, self.unit)
        for critic, tp in itertools.product(critics, (1, 2, 4, 8)):
            ranks = all_ranks - critic
            for training in self._training(ranks):
                generating = ranks - training if self.strategy == "separate" else 0
                divides = self.cluster.devices % tp == 0 and (generating or training) % tp == 0
                if divides and not run.policy.layout_problems(tp, engine_key="engine"):
                    yield _Split(training, critic, generating, tp)

    def _layouts(self, shape: ModelArchitecture, ranks: int, cp: int = 1) -> Iterator[Layout]:
        """Layouts of a model over so many ranks: those that divide model, machines and updates."""
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
            dp, rest = divmod(ranks, tp * pp * cp)
            divides = self.cluster.devices % (tp * cp) == 0 and rest == 0 and dp > 0
            if not divides or self.run.update % dp or shape.layout_problems(tp, pp):
                continue
            yield from _with_experts(shape, Layout(tp, pp, dp, cp), self.cluster.devices)

    def _training(self, ranks: int) -> list[int]:
        """How many of the actor's ranks could train: the most over which the policy can be laid out, or some."""
        if self.strategy == "separate":
            return self._parts(self.run.policy, ranks, self.cluster.devices if ranks > self.cluster.devices else 1)
        whole = range(ranks // self.unit * self.unit, 0, -self.unit)
        return [n for n in whole if any(self._layouts(self.run.policy, n))][:1]

    def _parts(self, shape: ModelArchitecture, ranks: int, unit: int) -> list[int]:
        """About an eighth to five eighths of the ranks, in units, over which the model can be laid out."""
        possible = [n for n in range(unit, ranks, unit) if any(self._layouts(shape, n))]
        wanted = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8)
        return sorted({min(possible, key=lambda n: abs(n - ranks * share)) for share in wanted if possible})

    def fastest(self, split: _Split) -> Candidate:
        """The plan of a split with the layouts that take least time.

        Raises:
            DoesNotFitError: there is none; the message is about each kind of rank that lacks memory.
        """
        run, tp, lacking = self.run, split.engine_tp, list[str]()
        policy, samples = self.model(run.policy), run.steps[0]
        critics, slots, used = list[Fit](), 0, dict[str, float]()
        if split.critic:
            critics = self._fitting(_Kind("critic"), split.critic, lacking)
        if split.generating:
            slots, used = self._engine_apart(split, lacking)
        has_critic = run.critic is not None and not split.critic
        fits = self._fitting(_Kind("actor", has_critic, 0 if split.generating else tp), split.training, lacking)
        if lacking:
            raise DoesNotFitError("; ".join(lacking))

        def seconds(fit: Fit) -> float:
            passes = 2 * policy.forward(fit.layout, samples, run.micro_batch)
            return passes + _training(run, policy, fit, samples) + policy.refit(fit.layout, tp)

        most = max(fit.slots for fit in fits)
        actor = min((fit for fit in fits if fit.slots >= min(most, _ENOUGH_SLOTS)), key=seconds)
        critic = None if run.critic is None else actor
        if critics:
            critic = min(critics, key=lambda fit: _training(run, self.model(run.value_shape), fit, samples))
        return Candidate(self.strategy, actor, critic, split.generating, tp, slots or actor.slots, 0, used)

    def _engine_apart(self, split: _Split, lacking: list[str]) -> tuple[int, dict[str, float]]:
        """Slots of an engine on ranks that only generate, and the bytes of each of these; adds to ``lacking``."""
        sizes, tp = self.model(self.run.policy), split.engine_tp
        used = {"weights": sizes.weights(Layout(tp))}
        slots = self._slots(tp, split.generating // tp, self.cluster.room - used["weights"])
        if not slots:
            lacking.append(self._shortage("a rank that generates", Layout(tp), used, 0))
        return slots, used | {"keys and values": slots * self.run.held_tokens * sizes.kv_bytes(tp)}

    # ---- memory -----------------------------------------------------------------------------

    def _fitting(self, kind: _Kind, ranks: int, lacking: list[str]) -> list[Fit]:
        """Layouts over so many ranks that fit, each with as little given up as leaves enough slots.

        If none does, what the one needs that lacks least is added to ``lacking``.
        """
        if (kind, ranks) not in self._found:
            self._found[kind, ranks] = self._try_layouts(kind, ranks)
        found, problem = self._found[kind, ranks]
        lacking += [] if found else [problem]
        return found

    def _try_layouts(self, kind: _Kind, ranks: int) -> tuple[list[Fit], str]:
        """See `_fitting`; and what is lacking."""
        shape = self.run.policy if kind.who == "actor" else self.run.value_shape
        use = self._actor_use if kind.who == "actor" else self._critic_use
        found: list[Fit] = []
        short: list[tuple[float, Layout, Mapping[str, float], int]] = []
        # Sequences are divided only where nothing else fits.
        for layout in itertools.chain.from_iterable(self._layouts(shape, ranks, cp) for cp in (1, 2, 4, 8)):
            if found and layout.cp > found[-1].layout.cp:
                break
            best: Fit | None = None
            for saved in LADDER:
                used, slots = use(kind, layout, saved)
                if (total := sum(used.values())) > self.cluster.room or not slots:
                    short.append((total, layout, used, slots))
                elif best is None or slots > best.slots:
                    best = Fit(layout, saved, slots, used)
                    if slots >= _ENOUGH_SLOTS:
                        break
            found += [best] if best is not None else []
        if short and not found:
            least = min(total for total, *_ in short)
            nearest = [(layout, used, slots) for total, layout, used, slots in short if total == least]
            return [], min(self._shortage(kind.who, *what) for what in nearest)
        update = f"updates of {self.run.update} samples"
        return found, f"no layout of the {kind.who} over {ranks} ranks divides {update}, layers and heads"

    def _shortage(self, who: str, layout: Layout, used: Mapping[str, float], slots: int) -> str:
        device = self.cluster.device
        total, memory = sum(used.values()) + device.reserved, device.memory
        parts = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in used.items() if size >= 5e8)
        more = "" if slots or total > memory else " and more for an engine"
        return f"{who}, {layout}: a rank needs {total / 1e9:.0f} GB of {memory / 1e9:.0f} ({parts}){more}"

    def _trained(self, shape: ModelArchitecture, layout: Layout, saved: Savings) -> dict[str, float]:
        """Bytes of a rank that trains a model."""
        sizes, tokens = self.model(shape), max(self.run.micro_batch, self.run.longest.tokens)
        return {
            "weights": sizes.weights(layout),
            "gradients": sizes.gradients(layout),
            "Adam": sizes.optimizer(layout),
            "activations": sizes.activations(layout, tokens, saved.granularity) + self.cluster.device.logits,
        }

    def _frozen(self, shape: ModelArchitecture, layout: Layout, saved: Savings) -> float:
        """Bytes of a model that is not trained, while another one trains."""
        return 0.0 if saved.swap else self.model(shape).weights(layout)

    def _slots(self, engine_tp: int, engines: int, free: float) -> int:
        """Responses that an engine with so many free bytes on each rank can generate at the same time."""
        run, of_token = self.run, self.model(self.run.policy).kv_bytes(engine_tp)
        if free < max(run.held_tokens, run.longest.tokens) * of_token:
            return 0
        wanted, held = -(-len(run.steps[0]) // engines), run.held_tokens * of_token
        return next(slots for slots in SLOTS if (slots <= wanted and slots * held <= free) or slots == 1)

    def _critic_use(self, kind: _Kind, layout: Layout, saved: Savings) -> tuple[dict[str, float], int]:
        """Bytes by use of a rank that has only the critic and its reward model, which lacks no slots."""
        used = self._trained(self.run.value_shape, layout, saved)
        return used | {"reward model": self._frozen(self.run.value_shape, layout, saved)}, _ENOUGH_SLOTS

    def _actor_use(self, kind: _Kind, layout: Layout, saved: Savings) -> tuple[dict[str, float], int]:
        """Bytes by use of a rank that trains the policy, and its engine's slots. It may train the critic, in turns."""
        run, sizes, engine_tp = self.run, self.model(self.run.policy), kind.engine_tp
        trained = self._trained(run.policy, layout, saved)
        used = trained | {"initial policy": self._frozen(run.policy, layout, saved)}
        if run.critic is not None and kind.has_critic:
            value = self._trained(run.critic, layout, saved)
            more = max(0.0, _in_turn(value, saved) - _in_turn(trained, saved))
            used["critic"] = sum(value.values()) - _in_turn(value, saved) + more
            used["reward model"] = self._frozen(run.critic, layout, saved)
        if not engine_tp:
            return used, _ENOUGH_SLOTS
        engine = 0.0 if layout.pp == 1 and layout.tp == engine_tp else sizes.weights(Layout(engine_tp))
        beside = sum(used.values()) - (_in_turn(trained, saved) if saved.unload else 0.0)
        slots = self._slots(engine_tp, layout.ranks // engine_tp, self.cluster.room - engine - beside)
        if not saved.unload:
            used["engine"] = engine + slots * run.held_tokens * sizes.kv_bytes(engine_tp)
        return used, slots


def _in_turn(trained: Mapping[str, float], saved: Savings) -> float:
    """Bytes of these that are there only while the model trains."""
    return trained["activations"] + (trained["gradients"] + trained["Adam"] if saved.offload else 0.0)


def _with_experts(shape: ModelArchitecture, layout: Layout, devices: int) -> Iterator[Layout]:
    """A layout and, of a model with experts, those that divide whole experts over a machine, and over more ranks."""
    if not shape.expert_layout_problems(1, layout.tp):
        yield layout
    possible = [
        ep
        for ep in ((2, 4, 8, 16, 32, 64) if shape.experts is not None else ())
        if layout.tp * layout.cp * layout.dp % ep == 0 and not shape.expert_layout_problems(ep, 1)
    ]
    for ep in sorted({*possible[-1:], *[ep for ep in possible if ep <= devices][-1:]}):
        yield dataclasses.replace(layout, ep=ep, etp=1)
