"""``nsa eval``: how good a model is, alone and beside another one. The script ``evaluate_gpt.py`` is the same."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.seeds import LARGEST_SEED
from nemo_style_aligner.tools.cli.main import SETTINGS, announce, run, writable
from nemo_style_aligner.wording import distinct_names, download_hint, unescaped

if TYPE_CHECKING:
    from nemo_style_aligner.tools.evaluation.evaluation import Results
    from nemo_style_aligner.tools.reports.comparison import Table

_EXAMPLES = """\b
Examples:
  nsa eval policy.nemo --prompts test_prompts.jsonl
  nsa eval policy.nemo --prompts test_prompts.jsonl --samples 16 -k 1 -k 8 --temperature 0.7
  nsa eval policy.nemo --against sft.nemo --prompts test_prompts.jsonl --reward-model rm.nemo \\
      --output results.json --sheet sheet.html
  nsa eval policy.nemo --prompts test_prompts.jsonl --environment my_env.py:episode
  nsa eval policy.nemo --against ~/models/Qwen3-0.6B --texts wiki.jsonl
  nsa eval rm.nemo --comparisons test_comparisons.jsonl --category subset
"""


def _model(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.exists():
        raise click.BadParameter(f"{value} does not exist{download_hint(str(value))}")
    return value


_path: Any = click.Path(path_type=Path)
_positive: Any = click.FloatRange(min=0, min_open=True)
_data: Any = click.Path(exists=True, dir_okay=False, path_type=Path)
_file: Any = click.Path(dir_okay=False, path_type=Path)
_count = click.IntRange(min=1)


@click.command(epilog=_EXAMPLES)
@click.argument("model", type=_path, callback=_model)
@click.option("--against", type=_path, callback=_model, help="What MODEL is compared with, such as what it began as.")
@click.option("--prompts", type=_data, help="Prompts to respond to, with right answers or without.")
@click.option("--texts", type=_data, help="Texts or conversations; measured is their perplexity.")
@click.option("--comparisons", type=_data, help="Pairs of texts; MODEL is a reward model.")
@click.option("--category", metavar="KEY", help="Of a pair's line: accuracy also for each value of it.")
@click.option("--reward-model", type=_path, callback=_model, help="Scores the responses; with --against, who wins.")
@click.option(
    "--environment", metavar="ENVIRONMENT", help="FILE.py:NAME, http://... or '{command: [...]}': gives rewards."
)
@click.option("--samples", type=_count, default=1, help="Responses to each prompt.")
@click.option("-k", type=_count, multiple=True, help="pass@K; may be given again.  [default: --samples]")
@click.option("--math", is_flag=True, help="An answer is also right if math-verify says so.")
@click.option("--greedy", is_flag=True, help="Take the most likely tokens instead of sampling.")
@click.option("--temperature", type=_positive, default=1.0, help="Of sampling; lower is closer to --greedy.")
@click.option("--max-length", type=_count, help="Of a response, in tokens.  [default: 128, or half of the positions]")
@click.option("--end-strings", multiple=True, help="Ends a response, besides what the model has learnt.")
@click.option("--add-bos/--no-add-bos", default=None, help="BOS before each text.  [default: as the model was trained]")
@click.option("--limit", type=_count, help="Use the first lines only.  [default: all]")
@click.option("--num-slots", type=_count, default=32, help="Responses generated at the same time.")
@click.option("--precision", type=click.Choice(["bf16", "32"]), default="bf16", help="Of weights and computation.")
@click.option("--seed", type=click.IntRange(0, LARGEST_SEED), default=1234, help="Of sampling.")
@click.option("--output", type=_file, callback=writable, help="Results and all responses, as JSON.")
@click.option("--sheet", type=_file, callback=writable, help="What to read, as HTML; as JSONL if it ends with .jsonl.")
def command(output: Path | None, sheet: Path | None, **options: Any) -> None:
    """Measure MODEL, a policy or a reward model: a .nemo archive, a Hugging Face directory or a GGUF file.

    Of a policy with --prompts: accuracy, pass@K, reward, length; with --texts: perplexity. With --against also the
    changes from that model to MODEL: win rate, KL, length and the others. Of a reward model with --comparisons: how
    often it prefers the chosen text. Intervals are of 95%, over prompts: Wilson's of shares, a bootstrap's of others.
    """
    _check(sheet=sheet, **options)
    options["end_strings"] = tuple(map(unescaped, options["end_strings"]))
    announce(f"torch and megatron-core, then {options['model']}")
    from nemo_style_aligner.engine.parallel.groups import single_process
    from nemo_style_aligner.tools.evaluation.evaluation import (
        EvaluationSettings,
        evaluate_policies,
        evaluate_reward_model,
    )
    from nemo_style_aligner.tools.reports.report import write_sheet
    from nemo_style_aligner.tools.reports.samples import sheet as sheet_of
    from nemo_style_aligner.trainer.telemetry.log_lines import warn_plainly

    warn_plainly()
    settings = EvaluationSettings(**options)
    found: list[Results] = []

    def tell(results: Results) -> None:
        found.append(results)
        if output is not None:  # also before rewards are known, in case scoring fails
            (name, first), *others = results.items()
            content = {"settings": dataclasses.asdict(settings), "measured": name, **first, "others": dict(others)}
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(content, indent=1, default=str))

    with single_process(settings.seed):
        (evaluate_policies if settings.comparisons is None else evaluate_reward_model)(settings, tell)
    models = [path for path in (settings.model, settings.against) if path is not None]
    names = dict(zip(map(str, models), distinct_names(models), strict=True))
    results = {names.get(what, what): part for what, part in found[-1].items()}
    table = _table(results, by_measure=settings.comparisons is None)
    click.echo("\n".join(_lines(table)))
    if sheet is not None:
        sections = sheet_of({what: part["responses"] for what, part in results.items() if "responses" in part})
        facts = list(zip(("MODEL", "AGAINST"), models, strict=False))
        click.echo(write_sheet(sheet, f"Evaluation of {settings.model.name}", facts, table, sections))


def _check(**given: Any) -> None:
    """Refuse options that contradict each other, or would have no effect."""
    if not any(given[name] for name in ("prompts", "texts", "comparisons")):
        raise click.UsageError("say what to measure by: --prompts, --texts or --comparisons")
    needs = {"category": "comparisons"} | dict.fromkeys(("reward_model", "environment", "k", "math"), "prompts")
    for option, other in needs.items():
        if given[option] and not given[other]:
            raise click.UsageError(f"--{option.replace('_', '-')} needs --{other}".replace("--k ", "-k "))
    if given["comparisons"] and (given["prompts"] or given["texts"] or given["against"]):
        raise click.UsageError("--comparisons is for a reward model: measure a policy, or two, by a command of its own")
    if given["against"] is not None and given["against"].resolve() == given["model"].resolve():
        raise click.UsageError("--against is MODEL itself")
    if given["sheet"] and not (given["prompts"] or given["comparisons"]):
        raise click.UsageError("--sheet needs --prompts or --comparisons")
    if max(given["k"], default=1) > given["samples"]:
        raise click.UsageError(f"-k {max(given['k'])} needs at least as many --samples, not {given['samples']}")
    if given["environment"] and given["reward_model"]:
        raise click.UsageError("--environment gives the rewards of its episodes: leave out --reward-model")
    if given["greedy"] and given["samples"] > 1:
        raise click.UsageError("--greedy gives the same response each time: leave out --samples")


def _lines(table: Table) -> Iterator[str]:
    """A table for a terminal: columns beneath each other, the last ones ragged."""
    columns, rows = table
    cells = [["", *columns], *([name, *map("  ".join, texts)] for name, texts in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _cell(part: dict[str, Any], name: str) -> tuple[str, ...]:
    """A measure's value, and its interval if it has one; empty if it was not measured."""
    if name not in part["summary"]:
        return ()
    value, *interval = (f"{round(x, 12):.4g}" for x in (part["summary"][name], *part["intervals"].get(name, ())))
    return (value, f"({interval[0]} to {interval[1]})") if interval else (value,)


def _table(results: Results, by_measure: bool) -> Table:
    """A row for each measure and a column for each of what was measured, or the other way round."""
    measures = list(dict.fromkeys(name for part in results.values() for name in part["summary"]))
    if by_measure:
        return list(results), {name: [_cell(part, name) for part in results.values()] for name in measures}
    return measures, {what: [_cell(part, name) for name in measures] for what, part in results.items()}


def script(description: str | None) -> None:
    """Run the script ``evaluate_gpt.py``: MODEL is ``--model``, ``--end-strings`` takes several."""
    model = click.Option(["--model"], type=_path, callback=_model, required=True, help="The policy.")
    sys.argv[1:] = _one_by_one(sys.argv[1:])
    text = "\n\n".join(f"\b\n{paragraph}" for paragraph in (description or "").split("\n\n"))

    def evaluate(**options: Any) -> None:
        try:
            command.callback(**options)  # type: ignore[misc]
        except (UserError, OSError) as error:
            raise click.UsageError(str(error)) from error

    same = click.Command("evaluate", SETTINGS, evaluate, [model, *command.params[1:]], help=text)
    run(same, Path(sys.argv[0]).name)


def _one_by_one(arguments: Sequence[str]) -> Iterator[str]:
    """``--end-strings a b`` as ``--end-strings a --end-strings b``."""
    is_end = False
    for argument in arguments:
        is_end = argument == "--end-strings" or (is_end and not argument.startswith("--"))
        if argument != "--end-strings":
            yield from ("--end-strings", argument) if is_end else (argument,)
