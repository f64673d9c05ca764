"""Real steps on this machine beside what the planner says about them: rates from one run, then other sizes.

    python benchmarks/timelines.py [--base 30m:16:64] [--points 30m:32:96 135m:16:64] [--rounds 3] [--json FILE]

A point is MODEL:ROLLOUTS:TOKENS; responses have long-tailed lengths of an eighth of TOKENS to twice as many. Each is
one actor job of one rank with GRPO and two updates per step, started as users start it. The rates come from the base's
metrics (the planner's --as-in). Figures move with whatever else the machine does: keep it idle.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import json_path, long_tailed, positive_int, print_table, work_folder, write_json
from grpo_step import OwnJob
from ppo_contenders import own_steps
from ppo_models import Models, Workload, cut_prompts, make_models

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.parallel.machine import computes_in_bf16
from nemo_style_aligner.placement.costs import Layout, Model, Sample
from nemo_style_aligner.placement.rates import Device, as_in_run, measured_here
from nemo_style_aligner.placement.simulator import Engines, Job, StepCosts, simulate

PROMPT_TOKENS, GROUP, MICRO_BATCH = 32, 4, 4
PHASES = {"generate": "generate", "logprobs": "logprobs", "init_logprobs": "init_logprobs", "train": "train_policy"}


def point(text: str) -> tuple[str, int, int]:
    """MODEL:ROLLOUTS:TOKENS."""
    model, rollouts, tokens = text.split(":")
    return model, int(rollouts), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--base", type=point, default=("30m", 16, 64), help="whose metrics give the rates")
    parser.add_argument("--points", nargs="+", type=point, default=[("30m", 32, 96), ("135m", 16, 64)])
    parser.add_argument("--rounds", type=positive_int, default=3, help="steps of each, after one that does not count")
    parser.add_argument("--work-dir", type=output_folder_argument)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    found: list[dict[str, Any]] = []
    with work_folder(args.work_dir) as work:
        device = None
        for number, each in enumerate((args.base, *args.points)):
            folder = work / str(number)
            folder.mkdir()
            models = make_models(each[0], work / each[0])
            measured, samples = run(each, models, folder, args.rounds)
            if device is None:
                itemsize = 2 if computes_in_bf16() else 4
                device = as_in_run(measured_here(itemsize), folder / "actor", models.architecture, 1, itemsize)
            said = predicted(models, device, samples)
            found.append({"point": ":".join(map(str, each)), "measured": measured, "predicted": said})
            report(found[-1])
    write_json(args.json, {"points": found})


def run(each: tuple[str, int, int], models: Models, folder: Path, rounds: int) -> tuple[dict[str, float], list[Sample]]:
    """Median seconds of each phase, and the samples of a step."""
    _, rollouts, tokens = each
    prompts, texts = cut_prompts(models.tokenizer, [PROMPT_TOKENS] * (rollouts // GROUP))
    prompts = [prompt for prompt in prompts for _ in range(GROUP)]
    lengths = long_tailed(rollouts, (tokens // 8, 2 * tokens), random.Random(1))
    workload = Workload("timelines", prompts, texts, lengths, group=GROUP)
    steps = own_steps(
        workload,
        models,
        folder,
        actor=["trainer.devices=1", f"model.global_batch_size={rollouts // 2}"],
        micro_batch=MICRO_BATCH,
        warm_up=1,
        rounds=rounds,
        kind=OwnJob,
    )
    phases = {name: statistics.median(step.phases[timer] for step in steps) for name, timer in PHASES.items()}
    samples = [Sample(PROMPT_TOKENS, length) for length in lengths]
    return phases | {"step": statistics.median(step.seconds for step in steps)}, samples


def predicted(models: Models, device: Device, samples: list[Sample]) -> dict[str, float]:
    """The same phases, from the planner's costs and its simulator."""
    model, one = Model(models.architecture, 2 if computes_in_bf16() else 4, device=device), Layout()
    forward = model.forward(one, samples, 10**9)
    train = model.training(one, samples, 10**9, len(samples) // 2)
    engines = Engines(
        1,
        len(samples),
        lambda batch, tokens: model.decode(1, batch, tokens),
        lambda tokens: model.prefill(1, tokens),
        samples_per_prompt=GROUP,
    )
    costs = StepCosts(logprobs=forward, init_logprobs=forward, train=train)
    (step,) = simulate(Job(engines, lambda _: costs), [samples])
    return {name: step[name] for name in (*PHASES, "step")}


def report(line: dict[str, Any]) -> None:
    rows = []
    for name, seconds in line["measured"].items():
        said = line["predicted"][name]
        rows.append((name, f"{seconds:.2f}", f"{said:.2f}", f"{said / seconds - 1:+.0%}"))
    print(f"{line['point']}\n")
    print_table(("seconds", "measured", "predicted", "off"), rows)


if __name__ == "__main__":
    main()
