"""How long a step takes on clusters that are not here, as predicted, and how far off that was where others measured.

    python benchmarks/scaling.py [--parts tutorial verl areal two-jobs design mechanisms limits queue] [--json FILE]

Nothing is timed: every figure comes from the planner's costs and its simulator, and is the same on every machine.
docs/scaling.md explains the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import cpu_only  # noqa: F401 (nothing here needs a GPU)
from common import json_path, print_table, write_json

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.tools.placement.candidates import (
    Candidate,
    Cluster,
    Fit,
    Run,
    Savings,
    predicted,
    simulated_job,
)
from nemo_style_aligner.tools.placement.costs import Model, Sample
from nemo_style_aligner.tools.placement.planner import plans
from nemo_style_aligner.tools.placement.rates import DEVICES
from nemo_style_aligner.tools.placement.simulator import Engines, SimulatedJob, StepCosts, simulate
from nemo_style_aligner.tools.placement.workload import MODELS, Lengths, draw_steps
from nemo_style_aligner.trainer.models.sizes import Layout

H100, H20 = DEVICES["h100"], DEVICES["h20"]
PROMPTS = Lengths(256.0, 0.0, 256)
# NeMo-Aligner's tutorial: actor and critic nodes, mean tokens of responses, seconds, rollout_micro_batch_size.
TUTORIAL = ((8, 4, 350.7, 366.7, 8), (16, 8, 323.3, 190.4, 8), (32, 16, 331.7, 108.0, 8), (64, 32, 334.0, 56.9, 16))
TUTORIAL_LENGTHS = Lengths(334.0, 1.0, 2048)
# Its earlier table: Llama 2 70B, lengths not stated.
EARLIER = ((8, 8, 334.0, 253.8, 8), (16, 16, 334.0, 143.4, 8), (32, 32, 334.0, 81.2, 8))
REST = 5.0  # seconds of a step of theirs that nothing below describes
# verl, docs/advance/fully_async.md (FSDP2, 28K): GPUs, and seconds of a step over the first 100: later on lengths of
# its runs drift apart. Asynchronous ones: GPUs that train, GPUs that generate, staleness.
VERL_SYNC = ((32, 494.4), (64, 373.2), (128, 309.6))
VERL_ASYNC = ((16, 16, 1, 286.8), (32, 32, 1, 178.2), (64, 64, 1, 115.8), (64, 64, 0, 159.0))
# verl, docs/advance/one_step_off.md, on 16 GPUs: seconds of generation and of updates, then of a step with 12 + 4.
ONE_STEP_OFF = {"FSDP2, 20K": (321.0, 286.0, 520.0), "Megatron, 8K": (207.0, 344.0, 566.0)}
# AReaL, arXiv:2505.24298 and blog/AReaL_v0_3.md: nodes, hours of 250 steps, synchronous and asynchronous.
AREAL = {"1.5B": (16, 41.0, 14.8), "7B": (24, 57.7, 25.4)}
AREAL_TOKENS = 128.7e3 * 41.0 * 3600 / 250 / 8192  # of a sequence: 1.5B's synchronous run had 128,700 tokens/s
RECOMPUTED = 4 / 3  # of training's passes: both recompute all activations unless told otherwise
SEEDS = range(8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.parts:
        begun = time.perf_counter()
        results[name] = PARTS[name]()
        print(f"({time.perf_counter() - begun:.1f} s)\n", file=sys.stderr)
    write_json(args.json, results)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    print(f"{title}\n")
    print_table(header, [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows])
    return [dict(zip(header, row, strict=True)) for row in rows]


# ---- others' tables -----------------------------------------------------------------------------


def theirs(nodes: int, mean: float, micro_batch: int, factor: float, seed: int) -> float:
    """Seconds of a step of NeMo-Aligner's: micro batches from a queue, each until its longest response ends."""
    model = Model(MODELS["70b"], device=H100)
    lengths = dataclasses.replace(TUTORIAL_LENGTHS, mean=mean)
    samples = draw_steps(PROMPTS, lengths, 1024, 1, 1, seed)[0]
    layout = Layout(8, 4, nodes // 4)
    beside = 2 * model.forward(layout, samples, 8192) + model.training(layout, samples, 8192, 128) + REST
    engines = Engines(
        nodes,
        micro_batch,
        decode=lambda batch, tokens: factor * model.decode(8, batch, tokens),
        prefill=lambda tokens: model.prefill(8, tokens),
        in_flight=False,
    )
    return simulate(SimulatedJob(engines, lambda _: StepCosts(train=beside)), [samples])[0]["step"]


def theirs_typical(row: Sequence[float], factor: float) -> float:
    return statistics.fmean(theirs(int(row[0]), row[2], int(row[4]), factor, seed) for seed in SEEDS)


def fitted_factor() -> float:
    """Of the decode step, so that the first row is met; the only number that is fitted."""
    return fitted(lambda factor: theirs_typical(TUTORIAL[0], factor), TUTORIAL[0][3], 1.0, 8.0)


def fitted(found: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a function that rises is what is wanted, by bisection."""
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return low


def off(found: float, published: float) -> str:
    return f"{found / published - 1:+.0%}"


def tutorial() -> Any:
    factor = fitted_factor()
    rows = []
    for table, what in ((TUTORIAL, "Llama 3 70B"), (EARLIER, "Llama 2 70B, held out")):
        for row in table:
            found = theirs_typical(row, factor)
            rows.append((f"{what}, {row[0]}+{row[1]} nodes", row[3], found, off(found, row[3])))
    title = f"NeMo-Aligner's tables, decode step x {factor:.2f} fitted to the first row ({TUTORIAL_LENGTHS})"
    return show(title, ("", "published", "predicted", "off"), [*rows, large(factor)])


def large(factor: float) -> tuple[str, float, float, str]:
    """Llama 3.1 405B without resharding: a token passes 21 stages of TP 8; DP 4, micro batches of 8."""
    model = Model(MODELS["405b"], device=H100)
    samples = draw_steps(PROMPTS, Lengths(915.6, 1.0, 2048), 128, 1, 1)[0]
    layout = Layout(8, 21, 4)
    engines = Engines(
        16, 8, lambda b, kv: factor * model.decode(8, b, kv), lambda t: model.prefill(8, t), in_flight=False
    )
    beside = 2 * model.forward(layout, samples, 8192) + model.training(layout, samples, 8192, 128) + REST
    found = simulate(SimulatedJob(engines, lambda _: StepCosts(train=beside)), [samples])[0]["step"]
    return "Llama 3.1 405B, 84+42 nodes, held out", 164.6, found, off(found, 164.6)


@dataclasses.dataclass(frozen=True)
class Others:
    """A run of another project's, as far as it is published.

    Attributes:
        responses: a step has so many tokens of these; their mean may have to be fitted.
        group: responses to a prompt.
        update: responses of an update.
        replica: the layout of one data-parallel rank.
        slots: of an engine.
        is_balanced: each update's responses are dealt evenly to ranks; else only the step's are, as verl does
            (`_balance_batch` in its ray_trainer.py), and each update waits for the rank that happens to have most.
        scores: the policy's log-probs are computed before it trains, in a pass of their own.
        beside: seconds that a pass of an engine takes beyond its kernels; to be fitted.
    """

    model: Model
    responses: Lengths
    rollouts: int
    group: int
    update: int
    replica: Layout
    engine_tp: int
    slots: int
    is_balanced: bool = False
    scores: bool = True
    beside: float = 0.0

    def draw(self, steps: int = 1) -> list[list[Sample]]:
        return draw_steps(PROMPTS, self.responses, self.rollouts, self.group, steps)

    def with_mean(self, mean: float) -> Others:
        return dataclasses.replace(self, responses=dataclasses.replace(self.responses, mean=mean))

    def taking(self, beside: float) -> Others:
        return dataclasses.replace(self, beside=beside)

    @property
    def fit(self) -> str:
        return f"mean {self.responses.mean:.0f} tokens, {1e3 * self.beside:.1f} ms of a pass beside its kernels"

    def training(self, gpus: int, samples: Sequence[Sample]) -> float:
        """Seconds of the updates."""
        model, alone = self.model, self.replica
        layout = dataclasses.replace(alone, dp=gpus // alone.ranks)
        own, updates = self.update // layout.dp, len(samples) // self.update
        meeting = updates * model.update(layout)
        if self.is_balanced:
            return RECOMPUTED * (model.training(layout, samples, 32768, self.update) - meeting) + meeting
        slowest = 0.0
        for begin in range(0, len(samples), self.update):
            shares = [samples[first : first + own] for first in range(begin, begin + own * layout.dp, own)]
            slowest += max(model.training(alone, share, 32768, own) for share in shares) - model.update(alone)
        return RECOMPUTED * slowest + meeting

    def generation(self, gpus: int) -> float:
        """Seconds until a step's responses are there."""
        return simulate(SimulatedJob(self.engines(gpus), lambda _: StepCosts()), self.draw())[0]["generate"]

    def engines(self, gpus: int, *, is_one: bool = False) -> Engines:
        """On so many GPUs; ``is_one``: as one with all slots, whose work is spread evenly at all times."""
        count = gpus // self.engine_tp
        parts = count if is_one else 1
        return Engines(
            count // parts,
            self.slots * parts,
            decode=lambda batch, kv: self.model.decode(self.engine_tp, batch / parts, kv / parts) + self.beside,
            prefill=lambda tokens: self.model.prefill(self.engine_tp, tokens / parts),
            samples_per_prompt=self.group,
            queue=False,
        )

    def step(self, training: int, generating: int, job: SimulatedJob | None = None, steps: int = 1) -> float:
        """Seconds of a step on these GPUs, the same or others; of ``steps`` the middle half, if not one.

        Args:
            job: its staleness and rules; None: in turn.
        """
        layout = dataclasses.replace(self.replica, dp=training // self.replica.ranks)

        def costs(samples: Sequence[Sample]) -> StepCosts:
            scoring = self.model.forward(layout, samples, 32768) if self.scores else 0.0
            return StepCosts(logprobs=scoring, train=self.training(training, samples))

        job = job or SimulatedJob(self.engines(generating), costs)
        found = simulate(dataclasses.replace(job, costs=costs), self.draw(steps))
        return statistics.fmean(each["step"] for each in found[steps // 4 : -(steps // 4) or None])

    def asynchronous(self, training: int, generating: int, staleness: int) -> float:
        """Seconds of a step whose responses outlive it, by whichever engine has a slot."""
        engines = self.engines(generating, is_one=True)
        job = SimulatedJob(engines, lambda _: StepCosts(), staleness=staleness, keeps=True)
        return self.step(training, generating, job, 16)


_HEADER = ("", "published", "predicted", "off")


def verl() -> Any:
    """Mean length and seconds beside a pass are fitted to synchronous rows; asynchronous ones are predictions."""
    responses = Lengths(1000.0, 1.0, 28 << 10)
    start = Others(Model(MODELS["7b"], device=H20), responses, 8192, 16, 512, Layout(4), 4, 1024)
    (first, longest), (second, shorter), _ = VERL_SYNC

    def in_turn(mean: float) -> Others:
        """With the step of the second row."""
        run = start.with_mean(mean)
        return run.taking(fitted(lambda beside: run.taking(beside).step(second, second), shorter, 0.0, 0.05))

    run = in_turn(fitted(lambda mean: in_turn(mean).step(first, first), longest, 200.0, 1500.0))
    rows = [(f"synchronous, {gpus} GPUs", seconds, run.step(gpus, gpus)) for gpus, seconds in VERL_SYNC]
    apart = dataclasses.replace(run, slots=256, scores=False)
    for training, generating, staleness, seconds in VERL_ASYNC:
        found = apart.asynchronous(training, generating, staleness)
        rows.append((f"fully async, {training}+{generating} GPUs, staleness {staleness}", seconds, found))
    for name, (*_, seconds) in ONE_STEP_OFF.items():
        one = one_step_off(name)
        job = SimulatedJob(one.engines(4), lambda _: StepCosts(), staleness=1)
        rows.append((f"one step off, {name}, 12+4 GPUs", seconds, one.step(12, 4, job, 8)))
    title = f"verl, 7B on H20; fitted to the first two rows: {run.fit}"
    return show(title, _HEADER, [(*row, off(row[2], row[1])) for row in rows])


def one_step_off(name: str) -> Others:
    """With the updates and the generation of the synchronous run on 16 GPUs."""
    most, replica = (20 << 10, Layout(4)) if "FSDP2" in name else (8 << 10, Layout(2, 2))
    start = Others(Model(MODELS["7b"], device=H20), Lengths(1000.0, 1.0, most), 6144, 12, 384, replica, 2, 1024)
    generation, updates, _ = ONE_STEP_OFF[name]

    def seconds(mean: float) -> float:
        return start.training(16, start.with_mean(mean).draw()[0])

    run = start.with_mean(fitted(seconds, updates, 200.0, 4000.0))
    return run.taking(fitted(lambda beside: run.taking(beside).generation(16), generation, 0.0, 0.05))


def areal() -> Any:
    """Seconds beside a pass are fitted to the synchronous 1.5B, whose lengths are known; 7B's mean to the other."""
    hours = {name: [each * 3600 / 250 for each in both] for name, (_, *both) in AREAL.items()}
    gpus = {name: 8 * nodes for name, (nodes, *_) in AREAL.items()}

    def in_turn(name: str, mean: float, beside: float) -> float:
        return of_areal(name, mean, beside).step(gpus[name], gpus[name])

    known = AREAL_TOKENS - PROMPTS.mean
    beside = fitted(lambda each: in_turn("1.5B", known, each), hours["1.5B"][0], 0.0, 0.05)
    means = {"1.5B": known, "7B": fitted(lambda mean: in_turn("7B", mean, beside), hours["7B"][0], 1000.0, 27000.0)}
    rows = list[tuple[Any, ...]]()
    for name, mean in means.items():
        run, training = of_areal(name, mean, beside), gpus[name] // 4
        generating, published = gpus[name] - training, hours[name][1]
        found = run.asynchronous(training, generating, staleness=4)
        rows.append((f"{name}, {training}+{generating} GPUs; {run.fit}", published, found, off(found, published)))
        ours = SimulatedJob(run.engines(generating), lambda _: StepCosts(), staleness=4, keeps=True)
        rows.append(("  by our rules: engines' shares fixed", "", run.step(training, generating, ours, 16), ""))
    return show("AReaL, staleness 4, on H800 (as H100)", _HEADER, rows)


def of_areal(name: str, mean: float, beside: float) -> Others:
    small = dataclasses.replace(
        MODELS["7b"], hidden_size=1536, ffn_hidden_size=8960, num_attention_heads=12, num_query_groups=2,
        vocab_size=151936, kv_channels=128,
    )  # fmt: skip
    shape, replica = {"1.5B": (small, Layout(1, 2)), "7B": (MODELS["7b"], Layout(1, 4))}[name]
    model, responses = Model(shape, device=H100), Lengths(mean, 1.0, 27 << 10)
    slots = int((0.8 * H100.memory - model.weights(Layout())) / model.kv_bytes(1) / mean)
    return Others(model, responses, 8192, 16, 2048, replica, 1, slots, is_balanced=True, beside=beside)


# ---- our design ---------------------------------------------------------------------------------


def run_of(model: str, rollouts: int, lengths: Lengths, steps: int = 3, update: int = 128) -> Run:
    shape = MODELS[model]
    return Run(shape, shape, draw_steps(PROMPTS, lengths, rollouts, 1, steps), update)


def tail_bound(run: Run) -> float:
    """Seconds to decode the longest response of a step alone with TP 8, on average over the steps."""
    model = Model(run.policy, device=H100)
    longest = [max(sample.response for sample in step) for step in run.steps]
    return statistics.fmean(n * model.decode(8, 1, 256 + n / 2) for n in longest)


def fastest(
    run: Run, nodes: tuple[int, int], staleness: int, strategy: str
) -> tuple[dict[str, float], Candidate] | None:
    """The fastest plan of a strategy on so many nodes in all."""
    found, _ = plans(run, Cluster(sum(nodes), 8, H100), [strategy], [staleness])
    return next((each for each in found if each[1].staleness == staleness), None)


def design() -> Any:
    rows = []
    cases = [("70b", row[:2], 1024, TUTORIAL_LENGTHS, row[3]) for row in TUTORIAL]
    cases.append(("405b", (84, 42), 128, Lengths(915.6, 1.0, 2048), 164.6))
    for model, nodes, rollouts, lengths, published in cases:
        run = run_of(model, rollouts, lengths)
        bound = tail_bound(run)
        for strategy, age in (("flatten", 0), ("interleave", 0), ("separate", 0), ("separate", 1)):
            best = fastest(run, nodes, age, strategy)
            if best is None:
                rows.append((f"{model}, {nodes[0]}+{nodes[1]}", strategy, age, "-", "-", "-", "-", "-", f"{published}"))
                continue
            seconds, plan = best
            kinds = f"{plan.actor.layout}; {plan.engines} engines TP {plan.engine_tp}"
            step = seconds["step"]
            rows.append((f"{model}, {nodes[0]}+{nodes[1]}", strategy, age, kinds, step, seconds["generate"],
                         seconds["train"], f"{step / bound:.2f}", f"{published}"))  # fmt: skip
    header = (
        "model, nodes",
        "strategy",
        "staleness",
        "actor",
        "step",
        "generate",
        "train",
        "of tail bound",
        "published",
    )
    return show("Our design, seconds (predicted; bound: longest response x step of batch 1 at TP 8)", header, rows)


def plain_plan(run: Run, nodes: tuple[int, int], tp: int = 8) -> Candidate:
    """A fixed plan, to change one mechanism at a time: two jobs, TP 8, PP 4."""
    actor, critic = (Fit(Layout(8, 4, n // 4), Savings(True, "selective", True, True), 0, {}) for n in nodes)
    engines = nodes[0] * 8 // tp
    return Candidate("interleave", actor, critic, 0, tp, min(256, -(-len(run.steps[0]) // engines)), 0, {})


def two_jobs() -> Any:
    """The tutorial's rows with one plan, whatever the planner would find."""
    rows = []
    for nodes in (row[:2] for row in TUTORIAL):
        run = run_of("70b", 1024, TUTORIAL_LENGTHS)
        seconds = predicted(run, Cluster(sum(nodes), 8, H100), plain_plan(run, nodes))
        cells = [
            seconds[name] for name in ("generate", "logprobs", "init_logprobs", "train", "critic_train_wait", "refit")
        ]
        rows.append((f"{nodes[0]}+{nodes[1]}", seconds["step"], *cells, f"{seconds['step'] / tail_bound(run):.2f}"))
    header = ("nodes", "step", "generate", "log-probs", "initial", "train", "wait: critic", "refit", "of tail bound")
    return show("Our design at the tutorial's rows: two jobs, TP 8 x PP 4, staleness 0", header, rows)


def mechanisms() -> Any:
    rows = []
    for row in (TUTORIAL[0], TUTORIAL[3]):
        nodes = (row[0], row[1])
        run = run_of("70b", 1024, TUTORIAL_LENGTHS)
        cluster = Cluster(sum(nodes), 8, H100)
        plan = plain_plan(run, nodes)
        job = simulated_job(run, cluster, plan)
        base = predicted(run, cluster, plan)["step"]

        def changed(name: str, other: SimulatedJob, base: float = base, run: Run = run, nodes: Any = nodes) -> None:
            found = statistics.fmean(step["step"] for step in simulate(other, run.steps))
            rows.append((f"{nodes[0]}+{nodes[1]}", name, found, f"{found / base - 1:+.0%}"))

        rows.append((f"{nodes[0]}+{nodes[1]}", "all", base, ""))
        engines = job.engines
        changed("without the work queue", dataclasses.replace(job, engines=dataclasses.replace(engines, queue=False)))
        small = dataclasses.replace(engines, slots=8)
        changed("with 8 slots", dataclasses.replace(job, engines=small))
        changed(
            "with 8 slots, without in-flight batching",
            dataclasses.replace(job, engines=dataclasses.replace(small, in_flight=False)),
        )
        late = lambda samples, job=job: dataclasses.replace(job.costs(samples), score=job.score(samples))  # noqa: E731
        changed("scores after generation, not beside it", dataclasses.replace(job, costs=late, score=None))
        changed("longest first, lengths known", dataclasses.replace(job, foresight=True))
        changed(
            "an engine at half speed", dataclasses.replace(job, engines=dataclasses.replace(engines, slowness=(2.0,)))
        )
        padded = lambda samples, job=job: job.costs([Sample(256, max(s.response for s in samples))] * len(samples))  # noqa: E731
        changed("padded, not packed", dataclasses.replace(job, costs=padded))
        changed("engines of TP 4", simulated_job(run, cluster, plain_plan(run, nodes, 4)))
        more = run_of("70b", 4096, TUTORIAL_LENGTHS)
        found = predicted(more, cluster, plain_plan(more, nodes))["step"] / 4
        rows.append(
            (f"{nodes[0]}+{nodes[1]}", "4,096 responses per step, per 1,024", found, f"{found / base - 1:+.0%}")
        )
    return show(
        "What each mechanism buys: two jobs, TP 8 x PP 4, 70B, staleness 0", ("nodes", "", "step", "against all"), rows
    )


def limits() -> Any:
    """Phases of a step on more and more nodes: what stops shrinking."""
    rows = []
    cases = ((64, 1024, 128), (256, 1024, 128), (512, 1024, 128), (512, 16384, 128), (512, 16384, 2048))
    for nodes, rollouts, update in cases:
        run = run_of("70b", rollouts, TUTORIAL_LENGTHS, 1, update)
        sizes = (nodes, nodes // 2)
        seconds = predicted(run, Cluster(sum(sizes), 8, H100), plain_plan(run, sizes))
        logprobs, waits = (
            seconds["logprobs"] + seconds["init_logprobs"],
            seconds["critic_wait"] + seconds["critic_train_wait"],
        )
        cells = (seconds["step"], seconds["generate"], logprobs, seconds["train"], waits)
        rows.append((f"{sizes[0]}+{sizes[1]}", rollouts, update, *cells, f"{rollouts / seconds['step']:.0f}"))
    header = ("nodes", "responses", "update", "step", "generate", "log-probs", "train", "critic", "responses/s")
    return show("To 768 nodes of 8 H100: 70B, two jobs, TP 8 x PP 4, staleness 0", header, rows)


def queue() -> Any:
    """Makespan over max(work / workers, longest), workers of one slot, lengths as in the tutorial."""
    rows = []
    for workers in (2, 8, 32, 128, 512, 1024):
        cells = []
        for each in (2, 8, 32, 128):
            lengths = TUTORIAL_LENGTHS.draw(workers * each, random.Random(workers))
            samples = [Sample(0, length) for length in lengths]
            bound = max(sum(lengths) / workers, max(lengths))
            engines = Engines(workers, 1, lambda b, kv: 1.0, lambda t: 0.0)
            for foresight in (False, True):
                job = SimulatedJob(engines, lambda _: StepCosts(), foresight=foresight)
                cells.append(f"{simulate(job, [samples])[0]['generate'] / bound - 1:+.1%}")
        rows.append((workers, *cells))
    header = ("workers", *(f"{n} each, {how}" for n in (2, 8, 32, 128) for how in ("in order", "longest first")))
    return show("The queue's makespan over the lower bound, by items for each worker", header, rows)


PARTS: dict[str, Callable[[], Any]] = {
    "tutorial": tutorial,
    "verl": verl,
    "areal": areal,
    "two-jobs": two_jobs,
    "design": design,
    "mechanisms": mechanisms,
    "limits": limits,
    "queue": queue,
}

if __name__ == "__main__":
    main()
