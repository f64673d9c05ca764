"""When each rank began and ended each phase: a file for each rank, for the dashboard, reports and Perfetto."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_style_aligner import activity
from nemo_style_aligner.trainer.telemetry.log_files import (
    METRICS_FILE,
    NoRunError,
    newest_lines,
    open_for_append,
    read_json_lines,
    write_line,
)
from nemo_style_aligner.trainer.telemetry.metric_table import phase_title

FOLDER = "timeline"
_LOGGED_LAST = ("timers/step", "train/train_step_time")  # of a step
_STEPS = ("step", "train_step_time")
_LINES = 256  # of each rank's file, for the last steps


def record(log_dir: Path, rank: int) -> None:
    """Append this rank's phases to ``timeline/rank_N.jsonl``, a line for each outermost phase, until the process ends.

    A line is a list of [phase, seconds since the epoch at its begin, seconds that it took], the inner ones first.
    """
    folder = log_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = open_for_append(folder / f"rank_{rank}.jsonl")
    inner: list[tuple[str, float, float]] = []

    def note(path: str, began: float, seconds: float) -> None:
        inner.append((path, round(began, 6), round(seconds, 6)))
        if "/" not in path:
            write_line(file, inner)
            inner.clear()

    activity.record(note)


def last_phases(log_dir: Path, steps: int = 3) -> dict[int, list[tuple[str, float, float]]]:
    """The innermost phases since the last steps began, by rank: name in words, and when it began and ended."""
    paths = sorted((log_dir / FOLDER).glob("rank_*.jsonl"), key=_rank)
    groups = {_rank(path): [line for _, line in itertools.islice(newest_lines(path), _LINES)][::-1] for path in paths}
    began = [group[-1][1] for group in groups.get(0, []) if group[-1][0] in _STEPS][-steps:]
    return {
        rank: [event for group in of_rank for event in _leaves(group) if began and event[1] >= began[0]]
        for rank, of_rank in groups.items()
    }


def _leaves(group: list[Any]) -> Iterator[tuple[str, float, float]]:
    names = [name for name, _, _ in group]
    for name, began, seconds in group:
        if not any(other.startswith(f"{name}/") for other in names):
            yield phase_title(name.rpartition("/")[2]), began, began + seconds


def _rank(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def write_trace(log_dir: Path, output: Path, first: int, last: int) -> int:
    """Write the phases of some steps as a Chrome trace, which Perfetto opens; return how many there are.

    Args:
        first, last: steps, as they are logged.

    Raises:
        NoRunError: the job has noted no phases, or none in these steps.
    """
    ends = [r for r in read_json_lines(log_dir / METRICS_FILE) if any(name in r for name in _LOGGED_LAST)]
    before = max((record["time"] for record in ends if record["step"] < first), default=0.0)
    until = max((record["time"] for record in ends if record["step"] <= last), default=0.0)
    events: list[dict[str, Any]] = []
    for path in sorted((log_dir / FOLDER).glob("rank_*.jsonl"), key=_rank):
        rank = _rank(path)
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X", "name": name.rpartition("/")[2], "cat": "phase", "pid": rank, "tid": 0,
                "ts": began * 1e6, "dur": seconds * 1e6, "args": {"path": name},
            }
            for line in read_json_lines(path)
            for name, began, seconds in line
            if before <= began <= until
        ]  # fmt: skip
    phases = sum(event["ph"] == "X" for event in events)
    if not phases:
        raise NoRunError(
            f"{log_dir} has no phases of these steps in {FOLDER}/: start the job with exp_manager.timeline=True"
        )
    output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return phases
