"""What generating ahead gains (`trainer.ppo.staleness`): PPO steps of ranks that share their work in several ways.

    python benchmarks/off_policy.py [--model 30m] [--lengths 8 512] [--rounds 5] [--json FILE]

Only our own critic and actor jobs take part, started as users start them (see `ppo_step.py`). The critic is small, so
that the actor's ranks have the cores to themselves. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import (
    SHAPES,
    Bounds,
    at_least,
    available_cores,
    in_seconds,
    json_path,
    long_tailed,
    positive_int,
    print_table,
    spread,
    work_folder,
    write_json,
)
from ppo_contenders import OwnJobs, Step, own_steps, typical_phases
from ppo_models import Models, Workload, cut_prompts, make_models

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.wording import counted

PROMPT_TOKENS = 32
ARRANGEMENTS = {
    "together": "staleness 0, every rank generates and trains",
    "apart": "staleness 0, ranks set apart for generation",
    "ahead": "staleness 1, ranks set apart for generation; responses are finished before weights are replaced",
    **{
        f"in-flight-{k}": f"staleness {k}: weights are replaced under responses (trainer.ppo.in_flight=keep)"
        for k in (1, 2, 4)
    },
}
# Waiting for responses is `generate` if the step itself starts their generation, `rollout_wait` if an earlier one did.
PHASES = ("generate", "rollout_wait", "logprobs", "init_logprobs", "train_policy")


class InFlight(OwnJobs):
    """Ours, whose steps take the responses that finish first, of this step's and of the next one's."""

    takes_all = False


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    with work_folder(args.work_dir) as folder:
        models = make_models(args.model, folder / "policy")
        critic = make_models(args.critic_model, folder / "critic")
        models = dataclasses.replace(
            models, reward_model=critic.reward_model, reward_model_nemo=critic.reward_model_nemo
        )
        workload = make_workload(args, models)
        steps: dict[str, list[Step]] = {arrangement: [] for arrangement in args.arrangements}
        for repeat in range(args.repeats):
            for arrangement, made in steps.items():
                where = folder / f"{arrangement}_{repeat}"
                where.mkdir()
                made += run(workload, models, args, arrangement, where)
                seconds = in_seconds([step.seconds for step in made[-args.rounds :]])
                print(f"{arrangement}, run {repeat + 1} of {args.repeats}: {seconds}", file=sys.stderr, flush=True)
    first = steps[args.arrangements[0]]
    report = {arrangement: figures(made, first) for arrangement, made in steps.items()}
    print_report(report, workload, args)
    write_json(args.json, {"settings": {k: str(v) for k, v in vars(args).items()}, "arrangements": report})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="30m", help="the policy's shape")
    parser.add_argument("--critic-model", choices=SHAPES, default="tiny", help="the critic's and reward model's shape")
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS))
    parser.add_argument("--rollouts", type=positive_int, default=16, help="per step, with one update of each model")
    parser.add_argument(
        "--lengths", action=Bounds, default=(8, 512), metavar=("LOW", "HIGH"), help="tokens of responses"
    )
    parser.add_argument("--ranks", type=positive_int, default=2, help="of the actor job")
    parser.add_argument("--rollout-ranks", type=positive_int, default=1, help="how many of them are set apart")
    parser.add_argument("--micro-batch", type=positive_int, default=4)
    parser.add_argument("--warm-up", type=at_least(0), default=2, help="first steps of each run, not counted")
    parser.add_argument("--rounds", type=positive_int, default=5, help="steps of each run, one after the other")
    parser.add_argument("--repeats", type=positive_int, default=1, help="runs of each arrangement, taking turns")
    parser.add_argument("--work-dir", type=output_folder_argument, help="folder for models and logs during the run")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    if not 0 < args.rollout_ranks < args.ranks:
        parser.error(f"--rollout-ranks {args.rollout_ranks}: of --ranks {args.ranks}, some must train and some not")
    return args


def make_workload(args: argparse.Namespace, models: Models) -> Workload:
    """Responses of long-tailed lengths, the same in every step."""
    lengths = long_tailed(args.rollouts, args.lengths, random.Random(1))
    prompts, texts = cut_prompts(models.tokenizer, [PROMPT_TOKENS] * args.rollouts)
    return Workload("off-policy", prompts, texts, lengths)


def run(workload: Workload, models: Models, args: argparse.Namespace, arrangement: str, folder: Path) -> list[Step]:
    """Steps of one run, without pauses in between, during which rollout ranks would go on."""
    actor = [f"trainer.devices={args.ranks}"]
    if arrangement != "together":
        actor.append(f"trainer.ppo.rollout_devices={args.rollout_ranks}")
        # Room for the responses that are under way beside a step's own; the same for all.
        actor.append(f"trainer.ppo.generation.num_slots={2 * args.rollouts}")
    if arrangement == "ahead":
        actor += ["trainer.ppo.staleness=1", "trainer.ppo.in_flight=wait"]
    if arrangement.startswith("in-flight"):
        actor += [f"trainer.ppo.staleness={arrangement.rpartition('-')[2]}", "trainer.ppo.in_flight=keep"]
    return own_steps(
        workload,
        models,
        folder,
        actor=actor,
        micro_batch=args.micro_batch,
        warm_up=args.warm_up,
        rounds=args.rounds,
        kind=InFlight if arrangement.startswith("in-flight") else OwnJobs,
    )


def figures(steps: list[Step], first: list[Step]) -> dict[str, Any]:
    """One line of the report; ``first``: the arrangement's that the others are compared with."""
    seconds = spread([step.seconds for step in steps])
    return {
        "seconds": seconds,
        "tokens_per_second": _rate(steps),
        "times_faster": _rate(steps) / _rate(first),
        "phases": typical_phases(steps),
        "staleness": statistics.fmean(step.metrics["staleness_mean"] for step in steps),
        "oldest": max(step.metrics["staleness_max"] for step in steps),
    }


def _rate(steps: list[Step]) -> float:
    """Tokens per second over all steps: single ones differ where responses are in flight."""
    return sum(step.prompt_tokens + step.new_tokens for step in steps) / sum(step.seconds for step in steps)


def print_report(report: dict[str, dict[str, Any]], workload: Workload, args: argparse.Namespace) -> None:
    print(
        f"one PPO step of {counted(args.rollouts, 'rollouts')}, {workload.new_tokens} response tokens, longest "
        f"{max(workload.lengths)}; {args.ranks} ranks, of them set apart for generation {args.rollout_ranks}; "
        f"{counted(available_cores(), 'cores')}\n"
    )
    for arrangement in report:
        print(f"{arrangement}: {ARRANGEMENTS[arrangement]}")
    rows = []
    for arrangement, line in report.items():
        seconds = line["seconds"]
        rows.append(
            (
                arrangement,
                f"{seconds['median']:.2f}",
                f"{seconds['min']:.2f}-{seconds['max']:.2f}",
                f"{line['tokens_per_second']:.0f}",
                f"{line['times_faster']:.2f} x",
                f"{line['staleness']:.1f}",
                f"{line['oldest']:.0f}",
                *(f"{line['phases'].get(phase, 0.0):.2f}" for phase in PHASES),
            )
        )
    print()
    print_table(("", "seconds", "rounds", "tokens/s", "faster", "age", "oldest", *PHASES), rows)


if __name__ == "__main__":
    main()
