"""``report.html``: one or several runs on one page for a reader, in one file that needs nothing else."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nemo_style_aligner.tools.reports.comparison import Table, side_by_side
from nemo_style_aligner.tools.reports.run_view import QUESTIONS, RunView, number
from nemo_style_aligner.tools.reports.samples import Section, Shown, compared, samples_of
from nemo_style_aligner.trainer.telemetry.log_files import METRICS_FILE, NoRunError
from nemo_style_aligner.wording import distinct_names

_PAGES = Path(__file__).with_name("pages")
_ORDER = ("actor", "policy", "ppo", "grpo", "reinforce", "dpo", "sft", "reward_model", "critic", "base")
"""Names of runs in the order in which a reader wants them; others come last."""


def write_report(
    output: str | Path,
    title: str,
    runs: Mapping[str, str | Path],
    summary: Sequence[tuple[str, Any]] = (),
    note: str = "",
    compare: Mapping[str, Path] | None = None,
) -> Path:
    """Write the report and return its path.

    Args:
        output: the HTML file to write; its directory is made.
        title: heading of the page.
        runs: name of each job -> its log directory, the most interesting first.
        summary: rows (what, value) at the top.
        note: a paragraph below them.
        compare: by the model's name, files that ``evaluate_gpt.py`` has written for the same prompts.

    Raises:
        NoRunError: nothing was logged in one of the directories.
        ComparisonError: a file to compare is something else.
    """
    views = [RunView(name, Path(log_dir)) for name, log_dir in runs.items()]
    return _written(Path(output), render(title, views, summary, note, compared(compare) if compare else ()))


def write_sheet(
    output: Path, title: str, facts: Sequence[tuple[str, Any]], table: Table, sections: Sequence[Section]
) -> Path:
    """Write samples of no run: as a page, or where ``output`` ends with ``.jsonl``, a line each. Returns the path.

    ``facts`` and ``table`` are at the top of the page.
    """
    if output.suffix != ".jsonl":
        return _written(output, render(title, [], facts=facts, table=table, sections=sections))
    lines = [{"section": heading, **dataclasses.asdict(shown)} for heading, _, group in sections for shown in group]
    return _written(output, "".join(json.dumps(line) + "\n" for line in lines))


def _written(output: Path, page: str) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    # A model's bytes may be no text: what UTF-8 cannot hold becomes a reference, which browsers show as a sign.
    output.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return output


def render(
    title: str,
    runs: Sequence[RunView],
    summary: Iterable[tuple[str, Any]] = (),
    note: str = "",
    comparison: Sequence[Shown] = (),
    live: bool = False,
    facts: Sequence[tuple[str, Any]] = (),
    table: Table = ((), {}),
    sections: Sequence[Section] = (),
) -> str:
    """The page. ``live``: it asks the server that it came from for what is new. ``sections``: samples of no run.

    Whatever runs have written is text to it: templates escape it, and the page's policy lets no script run but its own.
    """
    script = _asset("charts.js") + (_asset("live.js") if live else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=title,
            runs=runs,
            comparisons=side_by_side(runs),
            summary=list(summary),
            note=note,
            comparison=comparison,
            facts=facts,
            table=table,
            sections=sections,
            questions=QUESTIONS,
            samples_of=samples_of,
            live=live,
            style=Markup(_asset("report.css")),
            script=Markup(script),
            script_digest=digest,
        )
    )


def render_samples(shown: Sequence[Shown]) -> str:
    """Samples as they are in a page."""
    return str(_environment().get_template("samples.html").module.samples(shown))  # type: ignore[attr-defined]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["number"] = number
    return environment


def find_runs(*folders: Path) -> dict[str, Path]:
    """The log directories among the folders, and those in them, by names that tell them apart.

    Raises:
        NoRunError: a folder is none, and holds none.
    """
    found = list(dict.fromkeys(path for folder in folders for path in _runs_in(folder)))
    names = distinct_names(found)
    rank = {name: place for place, name in enumerate(_ORDER)}
    order = sorted(range(len(found)), key=lambda i: rank.get(found[i].name, len(rank)))
    return {names[i]: found[i] for i in order}


def _runs_in(folder: Path) -> list[Path]:
    if (folder / METRICS_FILE).exists():
        return [folder.resolve()]
    found = [path.parent for path in sorted(folder.resolve().glob(f"*/{METRICS_FILE}")) if path.stat().st_size]
    if not found:
        raise NoRunError(
            f"{folder} is no run's log directory and holds none: give the job's exp_manager.explicit_log_dir, the "
            f"folder with {METRICS_FILE}"
        )
    return found


def _asset(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")
