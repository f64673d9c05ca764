"""``nsa launch``: start the jobs of a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_style_aligner.tools.cli.main import SETTINGS

if TYPE_CHECKING:
    from nemo_style_aligner.tools.placement.plan import FindProblems

_EXAMPLES = """\b
Examples:
  nsa launch plan.yaml --dry-run
  nsa launch plan.yaml --restarts 3
  nsa launch plan.yaml --with ray --wait-minutes 60
  nsa launch plan.yaml --with slurm --sbatch "-A ACCOUNT -p PARTITION --gpus-per-node=8"
  nsa launch plan.yaml --with mpirun --hosts n1,n2,n3 | bash
"""

_IN_VAIN = {"restarts": "local, ray, slurm", "wait_minutes": "ray", "hosts": "mpirun", "sbatch": "slurm"}


@click.command(epilog=_EXAMPLES, context_settings=SETTINGS)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--with", "launcher", type=click.Choice(("local", "ray", "slurm", "mpirun")), default="local")
@click.option("--dry-run", is_flag=True, help="Check the plan as its jobs would, and print what would start.")
@click.option(
    "--restarts", type=click.IntRange(min=0), help="Of jobs that failed (0); slurm: of a service that died (2)."
)
@click.option("--wait-minutes", type=float, help="ray: for the cluster to have what is needed (30).")
@click.option("--hosts", metavar="HOST,...", help="mpirun: one for each node, in the order of the jobs.")
@click.option("--sbatch", metavar="OPTIONS", help="slurm: sbatch's, for all components.")
def command(plan: Path, launcher: str, **options: Any) -> None:
    """Start the jobs of a plan, watch over them, and end them together (docs/launching.md).

    local: on this machine. ray: on a Ray cluster. slurm: writes a batch script and submits it. mpirun: prints a script.
    The jobs are the same entry scripts with the same settings whichever it is. Each writes to results_dir/NAME, and
    what it prints goes to output-NODE.log there.
    """
    for name, launchers in _IN_VAIN.items():
        if options[name] is not None and launcher not in launchers.split(", "):
            raise click.UsageError(
                f"--{name.replace('_', '-')} has a meaning with {launchers} alone, not with {launcher}"
            )

    from nemo_style_aligner.tools.placement.launch import launch_plan

    find_problems: FindProblems | None = None
    if options["dry_run"]:  # else the jobs look themselves: only their machines may see models and data
        from nemo_style_aligner.trainer.jobs import config_checks

        find_problems = config_checks.find_problems
    sys.exit(launch_plan(plan, launcher, **options, find_problems=find_problems))
