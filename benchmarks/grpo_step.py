"""One GRPO step, phase by phase, against TRL's GRPO trainer in the same run, and against what this machine could do.

    python benchmarks/grpo_step.py [--workloads fixed ragged] [--rollouts 32] [--group 4] [--kl 0.02] [--json FILE]

Ours is the actor job that users start, with a Python function as the reward and no critic; TRL is a process of its own.
They take turns as in `ppo_step.py`, with the same weights, prompts, groups, response lengths, reward function and
dtype. docs/performance.md explains settings and columns.
"""

from __future__ import annotations

import argparse
import math

from ppo_contenders import BENCHMARKS, KL_COEF, OwnJobs, Trl
from ppo_match import Kind
from ppo_step import Floors, add_arguments, check_arguments, compare

from nemo_style_aligner.arguments import HelpFormatter


class OwnJob(OwnJobs):
    """The actor job alone."""

    has_critic = False
    options = (
        "trainer.ppo.estimator=grpo",
        f"trainer.ppo.rewards=[{{name: vowels, source: {BENCHMARKS / 'grpo_reward.py'}:reward}}]",
        *("trainer.ppo.kl_in=loss", "trainer.ppo.kl_estimator=k3"),
    )


class TrlGrpo(Trl):
    """TRL's GRPO trainer."""

    script = "grpo_trl.py"
    version = "1.16.0"
    install = "pip install -e '.[bench-trl-grpo]'"


CONTENDERS: dict[str, Kind] = {"own": OwnJob, "trl": TrlGrpo}


def main() -> None:
    args = parse_arguments()
    absent = {"score", "train_critic", *(() if args.kl else ("init_logprobs",))}

    def needed(floors: Floors) -> Floors:
        return {phase: seconds for phase, seconds in floors.items() if phase not in absent}

    compare(args, CONTENDERS, needed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=("own", "trl"))
    parser.add_argument("--group", type=int, default=4, help="rollouts per prompt, at least 2")
    parser.add_argument("--kl", type=float, default=KL_COEF, help="weight of the KL penalty in the loss; 0: none")
    add_arguments(parser, TrlGrpo)
    args = parser.parse_args()
    check_arguments(parser, args)
    if args.group < 2 or args.rollouts % args.group:
        parser.error(f"--group {args.group}: give at least 2, and --rollouts that are a multiple of it")
    if not 0 <= args.kl < math.inf:
        parser.error(f"--kl {args.kl}: give 0 or more")
    args.critic, args.trl_rollout_batch = (), None
    return args


if __name__ == "__main__":
    main()
