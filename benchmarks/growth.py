"""How the time of a PPO step grows with its samples, response length, model size and number of ranks.

    python benchmarks/growth.py [--model 30m] [--rounds 5] [--plot FILE.svg] [--json FILE]

One setting changes at a time. Only our own critic and actor jobs take part, started as users start them (see
`ppo_step.py`). docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import (
    SHAPES,
    available_cores,
    in_seconds,
    json_path,
    plot_path,
    positive_int,
    print_table,
    spread,
    work_folder,
    write_json,
)
from ppo_contenders import own_steps, typical_phases
from ppo_models import Models, Workload, cut_prompts, make_models

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.wording import counted

PROMPT_TOKENS = 32
# Those shown; the rest of a step is short.
PHASES = ("generate", "logprobs", "init_logprobs", "wait_for_scores", "train_policy", "wait_for_critic")


@dataclasses.dataclass(frozen=True)
class Point:
    """The settings of a measured step.

    Attributes:
        rollouts: per step, one update of each model.
        length: tokens of each response.
        model: the name of a shape.
        ranks: of the actor job, data-parallel.
    """

    rollouts: int
    length: int
    model: str
    ranks: int

    def __str__(self) -> str:
        rollouts, tokens = counted(self.rollouts, "rollouts"), counted(self.length, "tokens")
        return f"{self.model}, {rollouts} of {tokens}, {counted(self.ranks, 'ranks')}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point's figures: seconds of each round and of its phases, and the model's parameters."""

    seconds: list[float]
    phases: dict[str, float]
    parameters: int


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    series = {name: list(points) for name, points in make_series(args)}
    results: dict[Point, Measured] = {}
    with work_folder(args.work_dir) as work:
        for point in dict.fromkeys(point for points in series.values() for point in points):
            folder = work / f"{point.model}_{point.rollouts}_{point.length}_{point.ranks}"
            folder.mkdir()
            models = make_models(point.model, work / point.model)
            results[point] = measure(point, models, args, folder)
            print(f"{point}: {in_seconds(results[point].seconds)}", file=sys.stderr, flush=True)
            report = [figures(name, p, results[p]) for name, points in series.items() for p in points if p in results]
            # What comes later may fail.
            write_json(args.json, {"settings": {k: str(v) for k, v in vars(args).items()}, "points": report})
    print_report(series, report)
    if args.plot:
        plot(series, report, args.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="30m", help="the shape while other settings change")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=("30m", "135m", "360m"))
    parser.add_argument(
        "--rollouts", nargs="+", type=positive_int, default=(8, 16, 32), help="the middle one is the base"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=positive_int, default=(32, 64, 128), help="the middle one is the base"
    )
    parser.add_argument("--ranks", nargs="+", type=positive_int, default=(1, 2, 4), help="the first one is the base")
    parser.add_argument("--micro-batch", type=positive_int, default=4)
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="steps of each setting, after two that do not count"
    )
    parser.add_argument("--work-dir", type=output_folder_argument, help="folder for models and logs during the run")
    parser.add_argument("--plot", type=plot_path, help="write the curves here; the name's ending chooses the format")
    parser.add_argument("--json", type=json_path)
    return parser.parse_args()


def make_series(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[Point]]]:
    """The name of each setting that grows, and the points measured for it."""
    rollouts, lengths = (sorted(values)[len(values) // 2] for values in (args.rollouts, args.lengths))
    base = Point(rollouts, lengths, args.model, args.ranks[0])
    yield "rollouts", (dataclasses.replace(base, rollouts=value) for value in args.rollouts)
    yield "length", (dataclasses.replace(base, length=value) for value in args.lengths)
    yield "model", (dataclasses.replace(base, model=value) for value in args.models)
    yield "ranks", (dataclasses.replace(base, ranks=value) for value in args.ranks)


def measure(point: Point, models: Models, args: argparse.Namespace, folder: Path) -> Measured:
    """Measure some steps at one point."""
    prompts, texts = cut_prompts(models.tokenizer, [PROMPT_TOKENS] * point.rollouts)
    workload = Workload("growth", prompts, texts, [point.length] * point.rollouts)
    steps = own_steps(
        workload,
        models,
        folder,
        actor=[f"trainer.devices={point.ranks}"],
        micro_batch=args.micro_batch,
        warm_up=2,
        rounds=args.rounds,
    )
    return Measured([step.seconds for step in steps], typical_phases(steps), models.architecture.num_parameters)


def size(name: str, point: Point, measured: Measured) -> float:
    """The setting that grows in the series ``name``, as a number."""
    return {
        "rollouts": point.rollouts,
        "length": PROMPT_TOKENS + point.length,  # what a step computes on
        "model": measured.parameters,
        "ranks": point.ranks,
    }[name]


def figures(name: str, point: Point, measured: Measured) -> dict[str, Any]:
    """One line of the report."""
    seconds = spread(measured.seconds)
    return {
        "series": name,
        **dataclasses.asdict(point),
        "size": size(name, point, measured),
        "seconds": seconds,
        "tokens_per_second": point.rollouts * (PROMPT_TOKENS + point.length) / seconds["median"],
        "phases": measured.phases,
    }


def exponents(lines: Sequence[dict[str, Any]]) -> list[float | None]:
    """For each line, e such that seconds grew like size ** e from the line before; 1 is linear.

    None for the first line, and for one of the same size as the line before.
    """
    found: list[float | None] = [None]
    for before, line in itertools.pairwise(lines):
        growth = math.log(line["seconds"]["median"] / before["seconds"]["median"])
        ratio = math.log(line["size"] / before["size"])
        found.append(growth / ratio if ratio else None)
    return found


def print_report(series: dict[str, list[Point]], report: list[dict[str, Any]]) -> None:
    print(f"one PPO step, {PROMPT_TOKENS} prompt tokens, {counted(available_cores(), 'cores')}\n")
    header = ("", "seconds", "rounds", "tokens/s", "exponent", *PHASES)
    for name in series:
        lines = [line for line in report if line["series"] == name]
        rows = []
        for line, exponent in zip(lines, exponents(lines), strict=True):
            seconds = line["seconds"]
            what = f"{line['model']} ({line['size'] / 1e6:.0f}M)" if name == "model" else str(line[name])
            rows.append(
                (
                    f"{name} {what}",
                    f"{seconds['median']:.2f}",
                    f"{seconds['min']:.2f}-{seconds['max']:.2f}",
                    f"{line['tokens_per_second']:.0f}",
                    "" if exponent is None else f"{exponent:.2f}",
                    *(f"{line['phases'].get(phase, 0.0):.2f}" for phase in PHASES),
                )
            )
        print_table(header, rows)


def plot(series: dict[str, list[Point]], report: list[dict[str, Any]], path: Path) -> None:
    """One panel for each setting that grows, both axes logarithmic; the dotted line is linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(series), figsize=(3.2 * len(series), 2.8), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], series, strict=True):
        lines = [line for line in report if line["series"] == name]
        sizes, medians = [line["size"] for line in lines], [line["seconds"]["median"] for line in lines]
        bars = [
            [m - line["seconds"]["min"], line["seconds"]["max"] - m] for m, line in zip(medians, lines, strict=True)
        ]
        axis.errorbar(sizes, medians, yerr=list(zip(*bars, strict=True)), marker="o", capsize=3)
        axis.plot(sizes, [medians[0] * s / sizes[0] for s in sizes], ":", color="grey")
        label = {"model": "parameters", "length": "prompt + response"}.get(name, name)
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.set_xticks(sizes, [f"{s / 1e6:.0f}M" if name == "model" else str(s) for s in sizes])
        axis.minorticks_off()
    axes[0][0].set_ylabel("seconds per step")
    low, high = axes[0][0].get_ylim()
    ticks = [t for t in (m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5)) if low <= t <= high]
    axes[0][0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
