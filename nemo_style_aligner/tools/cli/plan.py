"""``nsa plan``: which placements of a run fit, and how long a step takes in each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from nemo_style_aligner.tools.cli.main import SETTINGS, writable

_EXAMPLES = """\b
Examples:
  nsa plan --model 8b --cluster 2x8xh100
  nsa plan --model 70b --cluster 12x8xh100 --rollouts 1024 --write plan.yaml
  nsa plan --model policy.nemo --cluster 1x8xh200 --estimator grpo --group 8 --lengths lengths.jsonl
  nsa plan --model policy.nemo --cluster 4x8xh100 --as-in results/actor
"""

_JOBS = "A critic with ranks of its own: in the actor's job, or in one of its own, on whole nodes, over HTTP."
_STALENESS = "Steps ahead to try. They may cost learning, so that 0 is written if it is among them."
_LENGTHS = "lognormal:mean=330,sigma=1,max=2048"

_positive, _path = click.IntRange(min=1), click.Path(path_type=Path)
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_strategy = click.Choice(("flatten", "interleave", "separate"))


@click.command(epilog=_EXAMPLES, context_settings=SETTINGS)
@click.option("--model", required=True, help="The policy: 1b, 7b ... 405b, a .nemo archive, or a Hugging Face folder.")
@click.option("--critic-model", metavar="MODEL", help="Critic and reward model.  [default: as the policy]")
@click.option("--cluster", required=True, metavar="NxDxTYPE", help="Nodes x devices x type, such as 12x8xh100.")
@click.option(
    "--estimator", type=click.Choice(("gae", "grpo")), default="gae", help="grpo: no critic, no reward model."
)
@click.option("--rollouts", type=_positive, default=512, help="Responses per step.")
@click.option("--group", type=_positive, default=1, help="Responses to each prompt.")
@click.option("--global-batch-size", type=_positive, default=128, help="Responses per update.")
@click.option("--prompts", default="256", metavar="LENGTHS", help="Tokens of prompts, as --lengths.")
@click.option("--lengths", default=_LENGTHS, help="Tokens of responses: a number, such a text, or a file of lengths.")
@click.option("--precision", type=click.Choice(("bf16", "32")), default="bf16", help="Of training and generation.")
@click.option("--micro-batch-tokens", type=_positive, default=8192, help="Of a pass, at most.")
@click.option("--strategy", "strategies", multiple=True, type=_strategy, help="To try; several times: several.")
@click.option("--jobs", type=click.Choice(("one", "two")), default="one", help=_JOBS)
@click.option("--staleness", type=click.IntRange(0), multiple=True, default=(0, 1), help=_STALENESS)
@click.option("--steps", type=_positive, default=3, help="Steps to simulate.")
@click.option("--seed", type=int, default=0, help="Of the lengths drawn.")
@click.option("--as-in", type=_folder, metavar="LOG_DIR", help="Take rates from this actor's run of the same model.")
@click.option(
    "--write",
    type=_path,
    callback=writable,
    metavar="PLAN.yaml",
    help="Write the fastest plan, of staleness 0 if that is tried.",
)
@click.option("--results-dir", default="/results", help="Of the plan: where its jobs write.")
@click.option("--json", is_flag=True, help="Print all plans as JSON.")
def command(**options: Any) -> None:
    """Plan a run of reinforcement learning before it is paid for.

    Says which placements fit, and how long a step takes in each. Every number is predicted, from the model's shape, the
    device's rates and lengths that are drawn: docs/scaling.md says how well that has been checked.
    """
    from nemo_style_aligner.tools.placement.planner import make_plan

    make_plan(SimpleNamespace(**options))
