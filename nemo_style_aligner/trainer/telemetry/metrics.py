"""Where a job's numbers go: TensorBoard, JSON-lines files and, if asked for, trackers.

``metrics.jsonl`` holds one object per call of `MetricsLogger.log_metrics`::

    {"step": 12, "time": 1760000000.5, "train/loss": 0.25}

and ``tables.jsonl`` one per table. Both are only ever appended to. A run that resumes from a checkpoint
repeats the steps since then: readers take the last line of a step (`read_metrics` does).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_style_aligner import activity
from nemo_style_aligner.trainer.telemetry.log_files import (
    HYPERPARAMETERS_FILE,
    LENGTH_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    TABLES_FILE,
    DamagedLogError,
    explained,
    json_number,
    open_for_append,
    read_json_lines,
    replace_text,
    write_line,
)
from nemo_style_aligner.trainer.telemetry.trackers import Service, Tracker


class MetricsLogger:
    """Logs scalars, tables and hyperparameters from rank 0; does nothing on the other ranks.

    Args:
        log_dir: the job's directory; ``metrics.jsonl``, ``tables.jsonl`` and ``tensorboard/`` are made in it.
        rank: this process's rank.
        trackers: are told everything as well.
    """

    def __init__(self, log_dir: str | Path, rank: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        self.log_dir = Path(log_dir)
        self.rank = rank
        self._enabled = rank == 0
        if not self._enabled:
            return
        # Slow to import, and not needed by the ranks that log nothing.
        from torch.utils.tensorboard import SummaryWriter

        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._trackers = trackers
        # Flushed every 10 seconds, not 120: the last steps before a crash are those of interest.
        with self._to_tensorboard():
            self._tensorboard = SummaryWriter(str(self.log_dir / "tensorboard"), flush_secs=10)
        self._files = {name: open_for_append(self.log_dir / name) for name in (METRICS_FILE, TABLES_FILE)}

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Log scalars (numbers or one-element tensors) under ``prefix + name`` (``prefix="train/"``), if there are any.

        Raises:
            OSError: they cannot be written.
        """
        activity.progress()  # on every rank
        if not self._enabled or not metrics:
            return
        scalars = {prefix + name: _to_float(prefix + name, value) for name, value in metrics.items()}
        numbers = {name: json_number(value) for name, value in scalars.items()}
        write_line(self._files[METRICS_FILE], {"step": int(step), "time": time.time(), **numbers})
        with self._to_tensorboard():
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
        self._tell(lambda service: service.metrics(scalars, step))

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table of texts and numbers, such as prompts with their responses and rewards.

        Raises:
            OSError: it cannot be written.
        """
        if not self._enabled:
            return
        plain_rows = [[json_number(cell) if isinstance(cell, float) else cell for cell in row] for row in rows]
        write_line(
            self._files[TABLES_FILE],
            {"step": int(step), "time": time.time(), "key": key, "columns": list(columns), "rows": plain_rows},
        )
        with self._to_tensorboard():
            self._tensorboard.add_text(key, _markdown_table(columns, plain_rows), step)
        self._tell(lambda service: service.table(key, list(columns), plain_rows, step))

    def log_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append whole samples to ``samples.jsonl``.

        Raises:
            OSError: they cannot be written.
        """
        if not self._enabled or not records:
            return
        if SAMPLES_FILE not in self._files:  # most runs keep none
            self._files[SAMPLES_FILE] = open_for_append(self.log_dir / SAMPLES_FILE)
        for record in records:
            write_line(self._files[SAMPLES_FILE], record)

    def log_hyperparameters(self, config: dict[str, Any], text: str) -> None:
        """Keep the job's whole config, also given as YAML: ``hyperparameters.yaml`` and a text in TensorBoard.

        Raises:
            OSError: it cannot be written; the file of an earlier start is left as it was.
        """
        if not self._enabled:
            return
        replace_text(self.log_dir / HYPERPARAMETERS_FILE, text)
        with self._to_tensorboard():
            self._tensorboard.add_text("hyperparameters", f"```yaml\n{text}\n```")
        self._tell(lambda service: service.config(config, text))

    def log_length(self, max_steps: int) -> None:
        """Keep how many steps the run will have.

        Raises:
            OSError: it cannot be written.
        """
        if self._enabled:
            replace_text(self.log_dir / LENGTH_FILE, json.dumps({"max_steps": max_steps}) + "\n")

    def _tell(self, call: Callable[[Service], object]) -> None:
        for tracker in self._trackers:
            tracker.tell(call)

    def _to_tensorboard(self) -> contextlib.AbstractContextManager[None]:
        """For each call of TensorBoard's writer: any of them may raise what its thread could not write before."""
        return explained(str(self.log_dir / "tensorboard"))

    def close(self, seconds: float = 60.0) -> None:
        """Write out what is left. Calling it twice does nothing; logging afterwards does nothing.

        Args:
            seconds: limit for trackers: a job must neither fail nor hang because a server is out of reach.

        Raises:
            OSError: it cannot be written.
        """
        if not self._enabled:
            return
        self._enabled = False
        with self._to_tensorboard():
            self._tensorboard.close()
        for file in self._files.values():
            file.close()
        until = time.monotonic() + seconds
        for tracker in self._trackers:
            tracker.finish()
        for tracker in self._trackers:
            tracker.wait(until)


def read_metrics(log_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """All curves in a job's ``metrics.jsonl``; see `curves_of`."""
    return curves_of(read_json_lines(Path(log_dir) / METRICS_FILE))


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Curves in lines of ``metrics.jsonl``: name -> [(step, value)], by step; the last value of a step counts.

    Raises:
        DamagedLogError: a line is no object of numbers with a step.
    """
    curves: dict[str, dict[int, float]] = {}
    for record in records:
        try:
            step = int(record["step"])
            for name, value in record.items():
                if name not in ("step", "time"):
                    curves.setdefault(name, {})[step] = float(value)
        except (TypeError, ValueError, LookupError) as error:
            found = f"a line that is not a step's numbers, {record!r:.80}"
            raise DamagedLogError(f"{METRICS_FILE} has {found}: repair or remove it") from error
    return {name: sorted(points.items()) for name, points in curves.items()}


def read_tables(log_dir: str | Path) -> list[dict[str, Any]]:
    """All tables in a job's ``tables.jsonl``: dicts of step, time, key, columns, rows, in the order written."""
    return read_json_lines(Path(log_dir) / TABLES_FILE)


def _to_float(name: str, value: Any) -> float:
    if isinstance(value, Real):
        return float(value)
    if hasattr(value, "item") and all(size == 1 for size in value.shape):  # a tensor or an array
        return float(value.item())
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(f"metric {name!r} is a {type(value).__name__}{shape}, not a number or a one-element tensor")


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        escaped = (str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])
