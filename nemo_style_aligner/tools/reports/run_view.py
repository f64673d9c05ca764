"""What a person wants to know of a run, from what it wrote into its log directory: see `RunView`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.parsing import parse_yaml, read_json
from nemo_style_aligner.trainer.telemetry.log_files import (
    HYPERPARAMETERS_FILE,
    LENGTH_FILE,
    METRICS_FILE,
    NoRunError,
    read_json_lines,
)
from nemo_style_aligner.trainer.telemetry.metric_table import (
    LEARNS,
    METRICS,
    STABLE,
    TIME,
    WARM_UP,
    Metric,
    find_metric,
    phase_title,
)
from nemo_style_aligner.trainer.telemetry.metrics import curves_of, read_tables
from nemo_style_aligner.wording import duration

Point = tuple[int, float]
Curves = Mapping[str, Sequence[Point]]

QUESTIONS = {
    LEARNS: ("Does it learn?", "Reward, loss and accuracy should move; KL and length say at what price."),
    STABLE: ("Is it stable?", "What should stay calm, whatever is learnt."),
    TIME: ("Where does the time go?", "Of rank 0, by phase; memory and how evenly the ranks are loaded."),
}
_KINDS = {  # of jobs, by the config's section for each; an actor has model.ppo as well
    "trainer.sft": "supervised fine-tuning",
    "trainer.rm": "reward model",
    "trainer.dpo": "direct preferences (DPO)",
    "trainer.kto": "direct preferences (KTO)",
    "trainer.knowledge_distillation": "knowledge distillation",
    "trainer.ppo": "critic",
}
_OUTCOME = (  # rows of the metrics that sum up a run, in this order
    "*_rollouts/rewards",
    "*/accuracy",
    "*/loss",
    "*_rollouts/init_policy_kl",
    "*_rollouts/generation_length",
    "*_rollouts/fraction_of_samples_properly_ended",
)
_MOST_POINTS = 600  # of a curve: more than a drawing shows
_STEP = "timers/step"
_LEAST_SHARE = 0.01  # of a step's time, for a phase to be shown by itself
_LAST_STEPS = 11  # whose pace is that of the steps to come
_LEAST_STEPS = 6  # before anything is said about progress


@dataclasses.dataclass(frozen=True)
class Change:
    """A metric before and after: means over the first and the last tenth of its values."""

    metric: Metric
    series: str
    since: int  # the step of the first value
    before: float
    after: float

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or "" (neither, or unknown)."""
        if self.metric.goal is None or self.before == self.after:
            return ""
        return "better" if (self.after > self.before) == (self.metric.goal == "up") else "worse"


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves of one row of the metrics' table.

    Attributes:
        series: name -> (steps, values); a value that is not finite is None.
        kind: ``line``, or ``stack``: parts of a whole.
    """

    metric: Metric
    series: dict[str, tuple[list[int], list[float | None]]]
    kind: str = "line"
    x: str = "step"

    @property
    def data(self) -> dict[str, Any]:
        """What draws it in the browser."""
        low, high = (None if math.isinf(bound) else bound for bound in (self.metric.low, self.metric.high))
        # A name may hold what is no text (half of a surrogate pair), on which a browser ends.
        series = [[name.encode("utf-8", "replace").decode(), *points] for name, points in self.series.items()]
        of_metric = {"title": self.metric.title, "unit": self.metric.unit, "low": low, "high": high}
        return of_metric | {"series": series, "kind": self.kind, "x": self.x}


class RunView:
    """A run as its log directory has it now. Cheap to make again: files are read once, in the constructor.

    Attributes:
        name: for headings.
        log_dir: of the run.
        curves: name -> [(step, value)].
        config: the job's config, resolved; empty where there is none.
        max_steps: of the whole run; None where it is not known.

    Raises:
        NoRunError: nothing was logged there.
    """

    def __init__(self, name: str, log_dir: Path) -> None:
        self.name, self.log_dir = name, log_dir
        records = read_json_lines(log_dir / METRICS_FILE)
        self.curves: Curves = curves_of(records)
        self.tables = read_tables(log_dir)
        if not self.curves and not self.tables:
            raise NoRunError(f"{log_dir}: no job has logged anything there ({METRICS_FILE} is empty or missing)")
        config = log_dir / HYPERPARAMETERS_FILE
        self.config_text = config.read_text(encoding="utf-8") if config.exists() else ""
        try:
            self.config: dict[str, Any] = parse_yaml(self.config_text) or {}
        except ValueError as error:
            raise UserError(f"{config} cannot be read: {error}") from error
        self.times = [record["time"] for record in records if "time" in record]
        self._times_of_steps = {record["step"]: record["time"] for record in records if "time" in record}
        length = log_dir / LENGTH_FILE
        self.max_steps: int | None = read_json(length)["max_steps"] if length.exists() else None

    # ---- what it is -------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        """The config's value of a dotted key; None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def kind(self) -> str:
        """What the job does, in two or three words."""
        if self.get("model.ppo"):
            estimator = str(self.get("trainer.ppo.estimator") or "gae")
            return "PPO" if estimator == "gae" else estimator.replace("_", " ").upper()
        return _KINDS.get(self._section, "run")

    @property
    def _section(self) -> str:
        """The section of the config for this kind of job; "" if there is none."""
        return next((section for section in _KINDS if self.get(section)), "")

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was trained on what, for how long: label and text."""
        base = self.get("model.restore_from_path") or self.get("pretrained_checkpoint.restore_from_path")
        data = self.get("model.data.train_ds.file_path") or self.get("model.data.data_prefix.train")
        steps = f"{self.last_step}" + (f" of {self.max_steps}" if self.max_steps else "")
        ranks = (self.get("trainer.devices") or 1) * (self.get("trainer.num_nodes") or 1)
        known = {
            "Job": self.kind,
            "Trained from": base,
            "On": ", ".join(map(str, data)) if isinstance(data, list) else data,
            "Steps": steps if self.last_step or self.max_steps else None,
            "Left": self._left(),
            "Ranks": ranks if self.config else None,
            "Precision": self.get("trainer.precision"),
            "Took": duration(self.times[-1] - self.times[0]) if self.times else None,
            "Last logged": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.times[-1])) if self.times else None,
        }
        return [(label, str(value)) for label, value in known.items() if value not in (None, "")]

    def _left(self) -> str | None:
        """How long the steps that are left will take, at the pace of the last ones; None if there are none."""
        steps = [step for step in sorted(self._times_of_steps) if step <= self.last_step][-_LAST_STEPS:]
        left = (self.max_steps or 0) - self.last_step
        if left <= 0 or len(steps) < 2:
            return None
        times = [self._times_of_steps[step] for step in steps]
        pairs = zip(itertools.pairwise(times), itertools.pairwise(steps), strict=True)
        return f"about {duration(left * median((after - before) / (b - a) for (before, after), (a, b) in pairs))}"

    @property
    def last_step(self) -> int:
        """The newest step that was logged; of an actor, not that of its updates."""
        names = [name for name in self.curves if not name.startswith((WARM_UP, "train_optim/"))]
        return max((self.curves[name][-1][0] for name in names), default=0)

    # ---- the outcome ------------------------------------------------------------------------

    def outcome(self) -> list[list[Change]]:
        """The metrics that sum up the run, before and after, each in training and in validation."""
        groups: dict[str, list[Change]] = {}
        for name in sorted(self.curves, key=lambda name: name.startswith("val")):
            values, metric = _finite(self.curves[name]), find_metric(name)
            if metric is not None and metric.name in _OUTCOME and values and not name.startswith(WARM_UP):
                part = max(1, len(values) // 10)
                before, after, since = fmean(values[:part]), fmean(values[-part:]), self.curves[name][0][0]
                groups.setdefault(metric.name, []).append(Change(metric, _series(name, metric), since, before, after))
        return [groups[row] for row in _OUTCOME if row in groups]

    def alerts(self) -> list[str]:
        """What is wrong, in words."""
        said: dict[str, list[str]] = {}
        for name, points in self.curves.items():
            metric = find_metric(name)
            if metric is None or name.startswith(WARM_UP):
                continue
            newest = [value for _, value in points[-3:]]
            troubles = [metric.trouble(value) for value in newest]
            if trouble := troubles[-1] if all(troubles) else "":
                where = f"{metric.title}, {_series(name, metric)}: {number(newest[-1])} {metric.unit}".rstrip()
                said.setdefault(trouble, []).append(where + (f", healthy: {metric.healthy}" if metric.healthy else ""))
        alerts = [f"{trouble[0].upper()}{trouble[1:]} ({'; '.join(where)})." for trouble, where in said.items()]
        return alerts + self._no_progress()

    def _no_progress(self) -> list[str]:
        """Whether the reward has stayed where it was, beyond its noise."""
        values = _finite(self.curves.get("train_rollouts/rewards", []))
        if len(values) < _LEAST_STEPS:
            return []
        third = len(values) // 3
        first, last = values[:third], values[-third:]
        gain, noise = fmean(last) - fmean(first), math.hypot(stdev(first), stdev(last)) / math.sqrt(third)
        if gain > noise:
            return []
        what = "fell" if gain < -2 * noise else "did not rise"
        return [
            f"The reward {what}: from {number(fmean(first))} to {number(fmean(last))} (means of the first and last "
            "third of the steps). Do rewards differ between samples of a prompt, and is the learning rate high enough?"
        ]

    # ---- charts -----------------------------------------------------------------------------

    def grouped(self, question: str) -> list[tuple[Metric, dict[str, str]]]:
        """The metrics that answer a question, in the table's order: names of their curves by what tells these apart."""
        groups: dict[str, list[str]] = {}
        for name in self.curves:
            metric = find_metric(name)
            if question == (STABLE if metric is None else metric.question) and not self._is_inner(name):
                groups.setdefault(metric.title if metric else name, []).append(name)
        grouped = []
        for _, names in sorted(groups.items(), key=lambda group: _place(group[1][0])):
            metric = find_metric(names[0]) or Metric(names[0], names[0], "", "Of your own policy loss.", STABLE)
            grouped.append((metric, {_series(name, metric): name for name in names}))
        return grouped

    def charts(self, question: str) -> tuple[list[Chart], list[tuple[Metric, float]]]:
        """The charts that answer a question, and the metrics that never changed, of which a number says it all."""
        charts = [self._phases()] if question == TIME and _STEP in self.curves else []
        constants: list[tuple[Metric, float]] = []
        for metric, names in self.grouped(question):
            values = {value for name in names.values() for _, value in self.curves[name]}
            if len(values) == 1:
                constants.append((metric, values.pop()))
            else:
                series = {part: thinned(self.curves[name]) for part, name in names.items()}
                charts.append(Chart(metric, series, x=axis_of(names.values())))
        return charts, constants

    def _is_inner(self, name: str) -> bool:
        """Whether it is of the critic's warm-up, whose timers are at step 0, or a phase within a phase."""
        of_warm_up = name.startswith(("timers/", "memory/")) and self.curves[name][-1][0] == 0
        inside = name.count("/") > 1 and find_metric(name) is not None and not name.endswith("*")
        is_phase = name.startswith(("timers/", "memory/", "train/save_time/"))
        return name.startswith(WARM_UP) or of_warm_up or (inside and is_phase) or name == _STEP

    def _phases(self) -> Chart:
        """Seconds of each step by phase, the phases that take hardly any together."""
        whole = dict(self.curves[_STEP])
        inner = [name for name in self.curves if name.startswith(f"{_STEP}/")]
        leaves = [name for name in inner if not any(other.startswith(f"{name}/") for other in inner)]
        total = sum(whole.values())
        shown = {
            name: dict(self.curves[name])
            for name in leaves
            if sum(value for _, value in self.curves[name]) >= _LEAST_SHARE * total
        }
        rest = {step: max(0.0, s - sum(of.get(step, 0.0) for of in shown.values())) for step, s in whole.items()}
        steps = sorted(whole)[-_MOST_POINTS:]
        series: dict[str, tuple[list[int], list[float | None]]] = {
            phase_title(name): (steps, [points.get(step, 0.0) for step in steps])
            for name, points in {**shown, f"{_STEP}/everything else": rest}.items()
        }
        metric = Metric(_STEP, "A step, by phase", "s", "What rank 0 spent each step on.", TIME)
        return Chart(metric, series, kind="stack")

    def every_metric(self) -> list[tuple[str, Metric | None, Sequence[float]]]:
        """Name, row of the table, and first, smallest, largest and last value of all that was logged."""
        rows: list[tuple[str, Metric | None, Sequence[float]]] = []
        for name, points in self.curves.items():
            values = _finite(points) or [math.nan]
            rows.append((name, find_metric(name), (values[0], min(values), max(values), values[-1])))
        return rows


def number(value: float) -> str:
    """Four significant digits, without powers of ten where they are few."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    text = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _place(name: str) -> int:
    """Where a metric stands in the table; what a user's own loss reports comes last."""
    metric = find_metric(name)
    return len(METRICS) if metric is None else METRICS.index(metric)


def _finite(points: Iterable[Point]) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def _series(name: str, metric: Metric) -> str:
    """What tells a curve from the others of its row: training or validation, and what stands for the last ``*``."""
    side = "validation" if name.startswith("val") else "training"
    if not metric.name.endswith("*") and not metric.name.startswith("memory/"):
        return side
    part = name.split("/", 2)[-1] if metric.name.endswith("*") else phase_title(name.removesuffix("_peak_gib"))
    return f"{part}, {side}" if metric.name.endswith("*") else part


def axis_of(names: Iterable[str]) -> str:
    """What curves run over, by their names: an actor's steps have several updates."""
    return "update" if all(name.startswith("train_optim/") for name in names) else "step"


def thinned(points: Sequence[Point]) -> tuple[list[int], list[float | None]]:
    """At most `_MOST_POINTS` of a curve, the smallest and the largest of each stretch: no peak is lost."""
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    if len(points) > _MOST_POINTS:
        stretches = (points[i : i + size] for i in range(0, len(points), size))
        key = [sorted({min(s, key=_value), max(s, key=_value)}) for s in stretches]
        points = [point for stretch in key for point in stretch]
    return [step for step, _ in points], [
        float(f"{value:.6g}") if math.isfinite(value) else None for _, value in points
    ]


def _value(point: Point) -> float:
    return point[1] if math.isfinite(point[1]) else -math.inf
