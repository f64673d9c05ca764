"""What `ppo_step.py` and `grpo_step.py` report.

Phases against the shortest time this machine could need for them, ratios, tables.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from common import MachineRates, generation_floor, print_table, spread
from ppo_contenders import BESIDE, EngineLogprobs, OwnJobs, Step, Trl
from ppo_models import Workload

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.wording import counted

# TRL's phases, in terms of ours. It has no pass for log-probs, so that training has a forward pass of its own.
TRL_FLOORS = {
    "generate": ("generate",),
    "score": ("score",),
    "init_logprobs": ("init_logprobs",),
    "train": ("logprobs", "train_policy", "train_critic"),
}
ORDER = (
    *("refit", "generate", "score", "logprobs", "init_logprobs", "wait_for_scores"),
    *("train_policy", "train_critic", "train", "wait_for_critic"),
)
_ADAM_NUMBERS = 7  # per parameter, 4 bytes each: weight, gradient and two moments read; weight and moments written


def phase_floors(
    a: ModelArchitecture, prompts: list[list[int]], new_lengths: list[int], rates: MachineRates, dtype: str
) -> dict[str, float]:
    """Seconds per phase for these rollouts, policy, initial policy, critic and reward model of one shape.

    A phase takes the time of its floating-point operations at the measured rate of square matrix products in ``dtype``,
    or that of reading its weights, whichever is longer. Only what is needed counts: no padding, each sequence attends
    to itself alone, a prompt of several rollouts is computed once, the output layer serves the response's tokens only,
    a backward pass is twice a forward pass, nothing is computed again: training's forward passes are those for
    log-probs and for values (in ``score``). Generation's floor is `generation_floor`.
    """
    num_bytes = (2 if dtype == "bfloat16" else 4) * a.num_parameters
    prompt_lengths = list(map(len, prompts))
    lengths = [p + n for p, n in zip(prompt_lengths, new_lengths, strict=True)]
    distinct = list(map(len, set(map(tuple, prompts))))
    again = sum(a.forward_operations(n, 0) for n in prompt_lengths) - sum(a.forward_operations(n, 0) for n in distinct)

    def forward(num_outputs: list[int]) -> float:
        operations = sum(a.forward_operations(*row) for row in zip(lengths, num_outputs, strict=True)) - again
        return max(operations / rates.gemm_of(dtype), num_bytes / rates.memory)

    update = 4 * _ADAM_NUMBERS * a.num_parameters / rates.memory
    logprobs, values = forward(new_lengths), forward([0] * len(lengths))
    return {
        "refit": 2 * num_bytes / rates.memory,
        "generate": generation_floor(a, prompt_lengths, new_lengths, rates, dtype, distinct).seconds,
        "score": 2 * values,
        "logprobs": logprobs,
        "init_logprobs": logprobs,
        "train_policy": 2 * logprobs + update,
        "train_critic": 2 * values + update,
    }


@dataclasses.dataclass
class Figures:
    """One contender's figures on one workload.

    Attributes:
        warm_up_steps: those that do not count.
        steps, busy_steps: by round: quiet ones, and those beside a busy process.
        peak_bytes: by process, and ``together``.
        facts: what it computed with.
        gave_up: settings for which there was not enough memory.
    """

    warm_up_steps: list[Step] = dataclasses.field(default_factory=list)
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    busy_steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    gave_up: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def restart(self) -> None:
        """Forget everything measured with settings that were given up."""
        for made in (self.warm_up_steps, self.steps, self.busy_steps, self.peak_bytes):
            made.clear()


def summarise(workload: Workload, figures: dict[str, Figures], floors: dict[str, float]) -> dict[str, Any]:
    """The figures of one workload, as they go into the JSON."""
    rows: dict[str, Any] = {}
    for name, mine in figures.items():
        if not mine.steps:
            continue
        parts = TRL_FLOORS if name == Trl.name else {phase: (phase,) for phase in floors}
        if name == EngineLogprobs.name:
            parts["train_policy"] += parts.pop("logprobs")
        sums = {phase: sum(floors.get(part, 0.0) for part in parts_) for phase, parts_ in parts.items()}
        rows[name] = side_figures(workload, mine, {phase: floor for phase, floor in sums.items() if floor})
        if name != Trl.name and (trl := figures.get(Trl.name)) is not None:
            for end, our, their in (
                ("", mine.steps, trl.steps),
                ("_with_cores_shared", mine.busy_steps, trl.busy_steps),
            ):
                if our.keys() & their.keys():
                    rows[f"{name}_is_times_faster{end}"] = ratios(our, their)
                    rows[f"{name}_takes_times_less_cpu{end}"] = ratios(our, their, "cpu_seconds")
    lengths = workload.sequence_lengths
    padded = len(lengths) * (max(map(len, workload.prompts)) + max(workload.lengths))
    return {
        "name": workload.name,
        "group": workload.group,
        "rollouts": len(lengths),
        "prompt_tokens": workload.prompt_tokens,
        "new_tokens": workload.new_tokens,
        "floor_seconds": floors,
        # Share of real tokens if rows are padded to the longest: on the right, or, as in TRL, prompts on the left.
        "padding_efficiency_if_padded": sum(lengths) / (len(lengths) * max(lengths)),
        "padding_efficiency_of_trl": sum(lengths) / padded,
        **rows,
    }


def side_figures(workload: Workload, mine: Figures, floors: dict[str, float]) -> dict[str, Any]:
    """One contender's figures; ``floors`` by its own phases."""
    steps, rollouts = list(mine.steps.values()), len(workload.prompts)
    seconds = [step.seconds for step in steps]
    names = [p for p in ORDER if p in steps[0].phases] + [p for p in steps[0].phases if p not in ORDER]
    phases = {}
    for name in names:
        times = [step.phases.get(name, 0.0) for step in steps]
        phases[name] = {"seconds": spread(times)}
        if name in floors and (seconds_taken := statistics.median(times)):
            phases[name]["fraction_of_floor"] = floors[name] / seconds_taken
    waiting = [sum(s for phase, s in step.phases.items() if "wait" in phase) / step.seconds for step in steps]
    figures: dict[str, Any] = {
        "rounds": len(steps),
        "tokens": steps[0].new_tokens,
        "seconds": spread(seconds),
        "cpu_seconds": spread([step.cpu_seconds for step in steps]),
        "warm_up_seconds": [step.seconds for step in mine.warm_up_steps],
        "samples_per_second": spread([rollouts / s for s in seconds]),
        "new_tokens_per_second": spread([workload.new_tokens / s for s in seconds]),
        "generation_tokens_per_second": workload.new_tokens / phases["generate"]["seconds"]["median"],
        "phases": phases,
        "floor_seconds": sum(floors.values()),
        "fraction_of_floor": sum(floors.values()) / statistics.median(seconds),
        "share_of_waiting": statistics.median(waiting),
        "peak_bytes": mine.peak_bytes,
        "computed_with": mine.facts,
        "gave_up_for_lack_of_memory": mine.gave_up,
        "metrics": steps[-1].metrics,
    }
    if mine.busy_steps:
        busy = [step.seconds for step in mine.busy_steps.values()]
        figures["seconds_with_cores_shared"] = spread(busy)
        figures["slower_with_cores_shared"] = statistics.median(busy) / statistics.median(seconds)
    return figures


def ratios(ours: Mapping[int, Step], theirs: Mapping[int, Step], what: str = "seconds") -> dict[str, float]:
    """How many times less of ``what``, a field of `Step`, ours takes, round by round."""
    rounds = ours.keys() & theirs.keys()
    return spread([getattr(theirs[round_], what) / getattr(ours[round_], what) for round_ in rounds])


def print_workload(result: dict[str, Any]) -> None:
    names = (OwnJobs.name, EngineLogprobs.name, Trl.name)
    sides = {name: result[name] for name in names if name in result}
    print(
        f"\n{result['name']}: {counted(result['rollouts'], 'rollouts')}, "
        f"{counted(result['prompt_tokens'], 'prompt tokens')}, {counted(result['new_tokens'], 'response tokens')}; "
        "seconds per step"
    )
    for name, side in sides.items():
        print(f"{name}: {in_words(side['computed_with'])}")
        for setting in side["gave_up_for_lack_of_memory"]:
            print(f"{name}: not enough memory for {in_words(setting)}")
    phases = list(dict.fromkeys(phase for side in sides.values() for phase in side["phases"]))
    phases = [p for p in ORDER if p in phases] + [p for p in phases if p not in ORDER]
    beside = [phase for phase in BESIDE if phase in sides.get(OwnJobs.name, {"phases": ()})["phases"]]
    rows = []
    for phase in phases:
        row = [phase + (" *" if phase in beside else "")]
        for side in sides.values():
            row += phase_cells(side["phases"].get(phase))
        rows.append(row)
    rows.append(["step", *(cell for side in sides.values() for cell in phase_cells(side))])
    header = ["", *(cell for name in sides for cell in (name, "rounds", "of floor"))]
    print_table(header, rows)
    if beside:
        print("* of ours: in the critic job, while the actor's phases go on")
    print(
        f"padded rows would hold {result['padding_efficiency_if_padded']:.0%} real tokens, TRL's hold "
        f"{result['padding_efficiency_of_trl']:.0%}\n"
    )
    for name, side in sides.items():
        if (packed := side["metrics"].get("padding_efficiency")) is not None:
            print(f"{name}: of the tokens that the policy's training computes, {packed:.0%} are real\n")
    table = []
    for name, side in sides.items():
        rate = side["samples_per_second"]
        parts = [f"{value / 2**30:.1f}" for process, value in side["peak_bytes"].items() if process != "together"]
        memory = f"{side['peak_bytes'].get('together', 0) / 2**30:.1f}" + (
            f" ({', '.join(parts)})" if parts[1:] else ""
        )
        shared = f"{side['slower_with_cores_shared']:.2f} x" if "slower_with_cores_shared" in side else ""
        table.append(
            (
                name,
                f"{rate['median']:.3f}",
                f"{rate['min']:.3f}-{rate['max']:.3f}",
                f"{side['new_tokens_per_second']['median']:.1f}",
                f"{side['generation_tokens_per_second']:.1f}",
                f"{side['fraction_of_floor']:.1%}",
                f"{side['share_of_waiting']:.1%}",
                f"{side['cpu_seconds']['median']:.1f}",
                memory,
                shared,
            )
        )
    columns = (
        "",
        "samples/s",
        "rounds",
        "tokens/s",
        "generating",
        "of floor",
        "waiting",
        "CPU s",
        "peak GiB",
        "cores shared",
    )
    print_table(columns, table)
    for name in sides:
        for end, where in (("", ""), ("_with_cores_shared", " with the cores shared")):
            if (ratio := result.get(f"{name}_is_times_faster{end}")) is not None:
                cpu = result[f"{name}_takes_times_less_cpu{end}"]
                print(
                    f"{name} is {ratio['median']:.2f} x as fast as TRL{where} ({ratio['min']:.2f}-{ratio['max']:.2f}); "
                    f"TRL takes {cpu['median']:.2f} x the processor time ({cpu['min']:.2f}-{cpu['max']:.2f})"
                )
    for name, reason in result.get("failed", {}).items():
        print(f"{name} FAILED: {reason}")
    sys.stdout.flush()


def in_words(setting: Mapping[str, Any]) -> str:
    """What a contender computes with, as the report says it; what is not set is left out."""
    words = []
    for what, value in setting.items():
        if isinstance(value, Mapping):  # by process
            value = " and ".join(f"{one} ({process})" for process, one in value.items())
        if value is not None:
            words.append(f"{what.replace('_', ' ')} {value}")
    return ", ".join(words)


def phase_cells(entry: dict[str, Any] | None) -> tuple[str, str, str]:
    """Median, range and fraction of the floor."""
    if entry is None:
        return "", "", ""
    seconds = entry["seconds"]
    fraction = f"{entry['fraction_of_floor']:.0%}" if "fraction_of_floor" in entry else ""
    return f"{seconds['median']:.2f}", f"{seconds['min']:.2f}-{seconds['max']:.2f}", fraction
