"""Real steps on this machine beside what the planner says about them, with rates from one run.

    python benchmarks/timelines.py [--base 30m:16:64] [--points 30m:32:96 135m:16:64] [--placements ...] [--json FILE]

A point is MODEL:ROLLOUTS:TOKENS; responses have long-tailed lengths of an eighth of TOKENS to twice as many. Those of
``--points`` are one actor job of one rank with GRPO and two updates per step; those of ``--placements`` are PPO on two
ranks that share the cores, as the best plan of each placement says: flatten, interleave in one job and in two,
separate. All are started as users start them. The rates come from the base's metrics (the planner's --as-in), and for
placements from those of the first one that runs. Figures move with whatever else the machine does: keep it idle.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import json_path, long_tailed, positive_int, print_table, work_folder, write_json
from grpo_step import OwnJob
from ppo_contenders import OwnJobs, Step, own_steps
from ppo_models import Models, Workload, cut_prompts, make_models

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.engine.parallel.machine import available_cores, computes_in_bf16
from nemo_style_aligner.tools.placement.candidates import Cluster, Run, predicted
from nemo_style_aligner.tools.placement.costs import Sample
from nemo_style_aligner.tools.placement.plan import literal
from nemo_style_aligner.tools.placement.planner import Prediction, plans, written_plan
from nemo_style_aligner.tools.placement.rates import Device, measured_here
from nemo_style_aligner.tools.placement.run_rates import as_in_run
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm

PROMPT_TOKENS, GROUP, PASS_TOKENS, RANKS = 32, 4, 512, 2
PHASES = {
    "generate": ("generate", "rollout_wait"),
    "logprobs": ("logprobs",),
    "init_logprobs": ("init_logprobs",),
    "train": ("train_policy",),
}
ITEMSIZE = 2 if computes_in_bf16() else 4
PLACEMENTS = {  # and in how many jobs
    "flatten": ("flatten", 1),
    "interleave, one job": ("interleave", 1),
    "interleave, two jobs": ("interleave", 2),
    "separate": ("separate", 1),
}


def point(text: str) -> tuple[str, int, int]:
    """MODEL:ROLLOUTS:TOKENS."""
    model, rollouts, tokens = text.split(":")
    return model, int(rollouts), int(tokens)


class InOneJob(OwnJobs):
    """PPO whose critic is in the actor's job."""

    has_critic = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--base", type=point, default=("30m", 16, 64), help="whose metrics give the rates")
    parser.add_argument("--points", nargs="*", type=point, default=[("30m", 32, 96), ("135m", 16, 64)])
    parser.add_argument("--placements", nargs="*", type=point, default=[("30m", 16, 64), ("135m", 8, 64)])
    parser.add_argument("--rounds", type=positive_int, default=3, help="steps of each, after one that does not count")
    parser.add_argument("--work-dir", type=output_folder_argument)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    results: dict[str, Any] = {"points": [], "placements": []}
    with work_folder(args.work_dir) as work:
        sizes(args, work, results["points"])
        placements(args, work, results["placements"])
    write_json(args.json, results)


# ---- sizes --------------------------------------------------------------------------------------


def sizes(args: argparse.Namespace, work: Path, found: list[dict[str, Any]]) -> None:
    """GRPO steps of several sizes on one rank, predicted from the first."""
    device = None
    for number, each in enumerate((args.base, *args.points) if args.points else ()):
        folder = work / f"point_{number}"
        folder.mkdir()
        models = make_models(each[0], work / each[0])
        workload, samples = make_workload(each, models, GROUP)
        actor = ["trainer.devices=1", f"model.global_batch_size={each[1] // 2}"]
        actor += [f"model.max_tokens_per_micro_batch={PASS_TOKENS}"]
        steps = own_steps(
            workload, models, folder, actor=actor, micro_batch=4, warm_up=1, rounds=args.rounds, kind=OwnJob
        )
        if device is None:
            device = as_in_run(measured_here(ITEMSIZE), folder / "actor", models.architecture, ITEMSIZE)
        run = Run(models.architecture, None, [samples], each[1] // 2, GROUP, PASS_TOKENS, ITEMSIZE)
        one = plans(run, Cluster(1, 1, device), ["flatten"], [0])[0][0]
        found.append({"point": ":".join(map(str, each)), "measured": typical(steps), "predicted": phases_of(one[0])})
        report(found[-1]["point"], found[-1])


def make_workload(each: tuple[str, int, int], models: Models, group: int) -> tuple[Workload, list[Sample]]:
    """The rollouts of a step, and what the planner needs to know of them."""
    _, rollouts, tokens = each
    prompts, texts = cut_prompts(models.tokenizer, [PROMPT_TOKENS] * (rollouts // group))
    prompts = [prompt for prompt in prompts for _ in range(group)]
    lengths = long_tailed(rollouts, (tokens // 8, 2 * tokens), random.Random(1))
    samples = [Sample(PROMPT_TOKENS, length) for length in lengths]
    return Workload("timelines", prompts, texts, lengths, group=group), samples


def typical(steps: list[Step]) -> dict[str, float]:
    """Median seconds of each phase and of the whole step."""
    found = {
        name: statistics.median(sum(step.phases.get(timer, 0.0) for timer in timers) for step in steps)
        for name, timers in PHASES.items()
    }
    found["step"] = statistics.median(step.seconds for step in steps)
    return found | {"rest": found["step"] - sum(value for name, value in found.items() if name != "step")}


def phases_of(said: dict[str, float]) -> dict[str, float]:
    """The same of a prediction."""
    found = {name: said[name] for name in (*PHASES, "step")}
    return found | {"rest": found["step"] - sum(said[name] for name in PHASES)}


def report(title: str, line: dict[str, Any]) -> None:
    rows = []
    for name, seconds in line["measured"].items():
        said = line["predicted"][name]
        rows.append((name, f"{seconds:.2f}", f"{said:.2f}", f"{said / seconds - 1:+.0%}" if seconds > 0 else ""))
    print(f"{title}\n")
    print_table(("seconds", "measured", "predicted", "off"), rows)


# ---- placements ---------------------------------------------------------------------------------


def placements(args: argparse.Namespace, work: Path, found: list[dict[str, Any]]) -> None:
    """PPO steps as the best plan of each placement says; and whether the one that was recommended is the fastest."""
    device = None
    for each in args.placements:
        models = make_models(each[0], work / each[0])
        workload, samples = make_workload(each, models, 1)
        shape = models.architecture
        run = Run(shape, shape, [samples], each[1] // 2, 1, PASS_TOKENS, ITEMSIZE)
        lines = []
        for name, (strategy, jobs) in PLACEMENTS.items():
            folder = work / f"{each[0]}_{strategy}_{jobs}"
            folder.mkdir()
            known = device or measured_here(ITEMSIZE, RANKS)
            planned = run, cluster_of(known, jobs), best(run, known, strategy, jobs)
            steps = started(planned, workload, models, folder, args.rounds)
            if device is None:
                device = as_in_run(known, folder / "actor", shape, ITEMSIZE)
            said = predicted(run, cluster_of(device, jobs), planned[2][1])
            lines.append({"placement": name, "measured": typical(steps), "predicted": phases_of(said)})
            report(f"{each[0]}, {name}", lines[-1])
        fastest, recommended = (
            min(lines, key=lambda line: line[of]["step"])["placement"] for of in ("measured", "predicted")
        )
        print(f"recommended: {recommended}; fastest: {fastest}\n")
        found.append(
            {"point": ":".join(map(str, each)), "tried": lines, "recommended": recommended, "fastest": fastest}
        )


def cluster_of(device: Device, jobs: int) -> Cluster:
    """Two ranks of this machine; two jobs have one each."""
    return Cluster(jobs, RANKS // jobs, device, jobs == 2)


def best(run: Run, device: Device, strategy: str, jobs: int) -> Prediction:
    """The fastest plan of a placement."""
    found, reasons = plans(run, cluster_of(device, jobs), [strategy], [0])
    if not found:
        raise SystemExit(f"{strategy}: {reasons}")
    return found[0]


def started(
    planned: tuple[Run, Cluster, Prediction], workload: Workload, models: Models, folder: Path, rounds: int
) -> list[Step]:
    """Steps of a plan's jobs, with the keys that ``nsa plan --write`` gives them."""
    run, cluster, prediction = planned
    options = SimpleNamespace(cluster="here", estimator="gae", results_dir=folder)
    written, _ = written_plan(run, cluster, options, prediction)
    keys = {
        name: [f"{key}={literal(value)}" for key, value in job.overrides.items()] for name, job in written.jobs.items()
    }
    actor = [*keys["actor"], f"trainer.devices={written.jobs['actor'].devices}"]
    if "critic" not in keys:
        actor += [f"critic.pretrained_checkpoint.restore_from_path={models.reward_model_nemo}"]
    return own_steps(
        workload,
        models,
        folder,
        actor=actor,
        critic=keys.get("critic", ()),
        micro_batch=4,
        warm_up=1,
        rounds=rounds,
        kind=OwnJobs if "critic" in keys else InOneJob,
        threads=available_cores() // RANKS,
    )


if __name__ == "__main__":
    main()
