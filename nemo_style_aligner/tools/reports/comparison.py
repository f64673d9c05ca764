"""Runs of one kind beside each other: what came of them, what differs in their configs, their curves in one chart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nemo_style_aligner.tools.reports.run_view import Chart, RunView, axis_of, number, thinned
from nemo_style_aligner.trainer.telemetry.metric_table import LEARNS, STABLE, TIME, Metric, Question

Table: TypeAlias = tuple[Sequence[str], Mapping[str, Sequence[Sequence[str]]]]
"""Names of the columns, and a row's cells by its name: texts, the first of which matters most."""

_STEP = Metric("timers/step", "A step", "s", "What rank 0 spent on each step.", TIME)
_PLACES = ("exp_manager.explicit_log_dir", "exp_manager.exp_dir", "exp_manager.name", "name")
"""Keys that say where a run has written: they always differ, and explain nothing."""


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Runs of one kind, by their names in the order of the page."""

    kind: str
    runs: Sequence[RunView]

    def table(self) -> Table:
        """A column for each run; rows: what came of it, then the keys of the configs that differ."""
        rows: dict[str, list[tuple[str, ...]]] = {"steps": [(str(run.last_step),) for run in self.runs]}
        changes = [{(c.metric.title, c.series): c for group in run.outcome() for c in group} for run in self.runs]
        for title, series in dict.fromkeys(key for of_run in changes for key in of_run):
            found = [of_run.get((title, series)) for of_run in changes]
            rows[f"{title}, {series}"] = [(number(c.after), f"from {number(c.before)}") if c else () for c in found]
        configs = [dict(_leaves(run.config)) for run in self.runs]
        for key in dict.fromkeys(key for config in configs for key in config):
            texts = [config.get(key) for config in configs]
            if len(set(texts)) > 1 and key not in _PLACES:
                rows[key] = [() if text is None else (text,) for text in texts]
        return [run.name for run in self.runs], rows

    def charts(self) -> Iterator[Chart]:
        """The curves that several runs have, in one chart for each metric, in the order of a run's own charts."""
        for question in (LEARNS, STABLE):
            yield from self._of_question(question)
        if any(_STEP.name in run.curves for run in self.runs):
            steps = {run.name: thinned(run.curves[_STEP.name]) for run in self.runs if _STEP.name in run.curves}
            yield Chart(_STEP, steps)

    def _of_question(self, question: Question) -> Iterator[Chart]:
        by_run = [dict(run.grouped(question)) for run in self.runs]
        for metric in dict.fromkeys(metric for groups in by_run for metric in groups):
            found = [groups.get(metric, {}) for groups in by_run]
            has_parts = len({part for names in found for part in names}) > 1
            series = {
                f"{run.name}, {part}" if has_parts else run.name: thinned(run.curves[name])
                for run, names in zip(self.runs, found, strict=True)
                for part, name in names.items()
            }
            values = {value for _, of_series in series.values() for value in of_series}
            if sum(map(bool, found)) > 1 and len(values) > 1:
                yield Chart(metric, series, x=axis_of(name for names in found for name in names.values()))


def side_by_side(runs: Sequence[RunView]) -> list[SideBySide]:
    """The kinds of jobs of which there are several runs."""
    kinds: dict[str, list[RunView]] = {}
    for run in runs:
        kinds.setdefault(run.kind, []).append(run)
    return [SideBySide(kind, of_kind) for kind, of_kind in kinds.items() if len(of_kind) > 1]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values in words."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
