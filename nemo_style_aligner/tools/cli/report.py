"""``nsa report``: what a run has learnt, as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

_EXAMPLES = """\b
Examples:
  nsa report results/actor
  nsa report results/demo --output demo.html
  nsa report results/lr_1e-6 results/lr_3e-6
  nsa report results/actor --compare SFT=sft.json --compare PPO=ppo.json
  nsa report results/actor --trace trace.json --steps 3-5

\b
The files to compare are what nsa eval --output writes, for the same prompts.
"""


def _named_files(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    files = dict[str, Path]()
    for value in values:
        name, is_named, file = value.partition("=")
        if not (name and is_named and file):
            raise click.BadParameter(f"{value!r}: say NAME=FILE")
        files[name] = Path(file)
    return files


def _steps(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int]:
    if value is None:
        return 0, sys.maxsize
    first, _, last = value.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise click.BadParameter(f"{value!r}: say a step, or FIRST-LAST")
    return int(first), int(last or first)


@click.command(epilog=_EXAMPLES)
@click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="[default: RUN/report.html; of several, report.html here]",
)
@click.option("--title", help="Heading of the page.  [default: the runs' names]")
@click.option(
    "--compare", multiple=True, metavar="NAME=FILE", callback=_named_files, help="Responses to show side by side."
)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Also write a Chrome trace, which Perfetto opens."
)
@click.option("--steps", callback=_steps, metavar="A-B", help="Steps of the trace.  [default: all]")
def command(
    runs: tuple[Path, ...],
    output: Path | None,
    title: str | None,
    compare: dict[str, Path],
    trace: Path | None,
    steps: tuple[int, int],
) -> None:
    """Write a page about RUN, a job's log directory, or a folder of them: outcome, samples, charts.

    Several runs of one kind are also shown side by side: in one chart, and in a table of what differs in their configs.
    The page is one file that needs nothing else, and may be written while the job runs. A trace has the phases of each
    rank of a job with exp_manager.timeline or a dashboard.
    """
    from nemo_style_aligner.tools.reports.report import find_runs, write_report
    from nemo_style_aligner.trainer.telemetry.timeline import write_trace

    if trace is not None and len(runs) > 1:
        raise click.UsageError("--trace is of one RUN")
    found = find_runs(*runs)
    if trace is not None:
        print(f"{trace}: {write_trace(runs[0], trace, *steps)} phases")
    of_all = Path("report.html") if len(runs) > 1 else runs[0] / "report.html"
    names = ", ".join(run.resolve().name for run in runs)
    page = write_report(output or of_all, title or names, found, compare=compare)
    print(page)
