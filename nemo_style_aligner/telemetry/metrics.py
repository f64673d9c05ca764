"""Where a job's numbers go: TensorBoard, a JSON-lines file and, if asked for, Weights & Biases.

``metrics.jsonl`` holds one object per call of `MetricsLogger.log_metrics`::

    {"step": 12, "time": 1760000000.5, "train/loss": 0.25}

and ``tables.jsonl`` one per table. Both are only ever appended to. A run that resumes from a checkpoint
repeats the steps since then: readers take the last line of a step (`read_metrics` does). In Weights & Biases it
continues the same run, whose id is in ``wandb_run_id``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.config.loading import without_secrets
from nemo_style_aligner.config.section_names import given
from nemo_style_aligner.errors import NO_ROOM, NotWrittenError, UserError, excepthook_kept
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.trusted_paths import unless_planted

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TABLES_FILE = "tables.jsonl"
SAMPLES_FILE = "samples.jsonl"
HYPERPARAMETERS_FILE = "hyperparameters.yaml"
WANDB_ID_FILE = "wandb_run_id"


class WandbError(UserError):
    """Weights & Biases cannot be logged to: nobody is logged in, its server is out of reach, or the like."""

    exit_status = 1


class DamagedLogError(UserError, ValueError):
    """A file that a job has logged to holds something else."""


class MetricsLogger:
    """Logs scalars, tables and hyperparameters from rank 0; does nothing on the other ranks.

    Args:
        log_dir: the job's directory; ``metrics.jsonl``, ``tables.jsonl`` and ``tensorboard/`` are made in it.
        rank: this process's rank.
        wandb_kwargs: arguments of ``wandb.init`` (project, name, ...); ``None`` leaves Weights & Biases out.

    Raises:
        ImportError: ``wandb_kwargs`` is given and wandb is not installed.
        WandbError: it does not start.
    """

    def __init__(self, log_dir: str | Path, rank: int = 0, wandb_kwargs: Mapping[str, Any] | None = None) -> None:
        self.log_dir = Path(log_dir)
        self.rank = rank
        self._enabled = rank == 0
        if not self._enabled:
            return
        # Slow to import, and not needed by the ranks that log nothing.
        from torch.utils.tensorboard import SummaryWriter

        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._wandb = _start_wandb(self.log_dir, wandb_kwargs) if wandb_kwargs is not None else None
        # Flushed every 10 seconds, not 120: the last steps before a crash are those of interest.
        with self._to_tensorboard():
            self._tensorboard = SummaryWriter(str(self.log_dir / "tensorboard"), flush_secs=10)
        self._metrics_file = open_for_append(self.log_dir / METRICS_FILE)
        self._tables_file = open_for_append(self.log_dir / TABLES_FILE)
        self._samples_file: TextIO | None = None  # most runs keep none

    @classmethod
    def from_config(cls, exp_manager: DictConfig, log_dir: str | Path, rank: int) -> MetricsLogger:
        """Build it from the config section ``exp_manager`` (``create_wandb_logger``, ``wandb_logger_kwargs``)."""
        wandb_kwargs: Any = None
        if exp_manager.create_wandb_logger:
            wandb_kwargs = OmegaConf.to_container(exp_manager.wandb_logger_kwargs, resolve=True)
        return cls(log_dir, rank, wandb_kwargs)

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Log scalars (numbers or one-element tensors) under ``prefix + name`` (``prefix="train/"``), if there are any.

        Raises:
            OSError: they cannot be written.
        """
        activity.progress()  # on every rank
        if not self._enabled or not metrics:
            return
        scalars = {prefix + name: _to_float(prefix + name, value) for name, value in metrics.items()}
        write_line(self._metrics_file, {"step": int(step), "time": time.time(), **_json_safe(scalars)})
        with self._to_tensorboard():
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
        self._tell_wandb(lambda run: run.log({**scalars, "step": step}))

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table, such as prompts with their responses and rewards.

        Raises:
            ValueError: a row has more or fewer cells than there are columns.
            OSError: it cannot be written.
        """
        if not self._enabled:
            return
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"table {key!r}: a row has {len(row)} cells for the {len(columns)} columns {columns}")
        plain_rows = [[_plain_cell(cell) for cell in row] for row in rows]
        write_line(
            self._tables_file,
            {"step": int(step), "time": time.time(), "key": key, "columns": list(columns), "rows": plain_rows},
        )
        with self._to_tensorboard():
            self._tensorboard.add_text(key, _markdown_table(columns, plain_rows), step)

        def log(run: Any) -> None:
            import wandb

            run.log({key: wandb.Table(columns=list(columns), data=plain_rows), "step": step})

        self._tell_wandb(log)

    def log_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append whole samples to ``samples.jsonl``.

        Raises:
            OSError: they cannot be written.
        """
        if not self._enabled or not records:
            return
        if self._samples_file is None:
            self._samples_file = open_for_append(self.log_dir / SAMPLES_FILE)
        for record in records:
            write_line(self._samples_file, record)

    def log_hyperparameters(self, config: DictConfig) -> None:
        """Keep the job's whole config, secrets masked: ``hyperparameters.yaml`` and a text in TensorBoard.

        Raises:
            OSError: it cannot be written; the file of an earlier start is left as it was.
        """
        if not self._enabled:
            return
        container = without_secrets(given(config))
        text = OmegaConf.to_yaml(container, resolve=True)
        _write_whole(self.log_dir / HYPERPARAMETERS_FILE, text)
        with self._to_tensorboard():
            self._tensorboard.add_text("hyperparameters", f"```yaml\n{text}\n```")
        plain = OmegaConf.to_container(container, resolve=True)
        self._tell_wandb(lambda run: run.config.update(plain, allow_val_change=True))

    def _tell_wandb(self, tell: Callable[[Any], object]) -> None:
        """Call ``tell`` with the run in Weights & Biases, if there is one.

        If that fails, the run there ends, and the job goes on: wandb sends by a process of its own, which may die.
        """
        if self._wandb is None:
            return
        try:
            tell(self._wandb)
        except Exception as error:  # noqa: BLE001  # whatever it is: the log directory has everything
            logger.warning(
                "logging to Weights & Biases failed (%s: %s), and ends here: %s and TensorBoard go on. To send what "
                "there is: wandb sync %s",
                type(error).__name__,
                error,
                METRICS_FILE,
                _wandb_folder(self._wandb),
            )
            self._wandb = None

    def _to_tensorboard(self) -> contextlib.AbstractContextManager[None]:
        """For each call of TensorBoard's writer: any of them may raise what its thread could not write before."""
        return _explained(str(self.log_dir / "tensorboard"))

    def close(self, wandb_seconds: float = 60.0) -> None:
        """Write out what is left. Calling it twice does nothing; logging afterwards does nothing.

        Args:
            wandb_seconds: limit for Weights & Biases: a job must neither fail nor hang because its server is out of
                reach.

        Raises:
            OSError: it cannot be written.
        """
        if not self._enabled:
            return
        self._enabled = False
        with self._to_tensorboard():
            self._tensorboard.close()
        self._metrics_file.close()
        self._tables_file.close()
        if self._samples_file is not None:
            self._samples_file.close()
        if self._wandb is not None:
            _finish_wandb(self._wandb, wandb_seconds)


def read_metrics(log_dir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """All curves in a job's ``metrics.jsonl``; see `curves_of`."""
    return curves_of(read_json_lines(Path(log_dir) / METRICS_FILE))


def curves_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Curves in lines of ``metrics.jsonl``: name -> [(step, value)], by step; the last value of a step counts."""
    curves: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time"):
                curves.setdefault(name, {})[int(record["step"])] = float(value)
    return {name: sorted(points.items()) for name, points in curves.items()}


def read_tables(log_dir: str | Path) -> list[dict[str, Any]]:
    """All tables in a job's ``tables.jsonl``: dicts of step, time, key, columns, rows, in the order written."""
    return read_json_lines(Path(log_dir) / TABLES_FILE)


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[Any]:
    """The values of a JSON-lines file, or of its last ``last_bytes``; none when it does not exist.

    A last line without its newline is left out: its writer was killed in the middle of it, or is writing.

    Raises:
        DamagedLogError: another line is not JSON.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(0, path.stat().st_size - last_bytes)
        file.seek(start)
        lines = file.read().split(b"\n")[1 if start else 0 : -1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            place = "line" if not start else f"behind byte {start}, line"
            raise DamagedLogError(f"{path}, {place} {number} is not JSON ({error}); repair or remove it") from error
    return records


def _start_wandb(log_dir: Path, kwargs: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "exp_manager.create_wandb_logger=True needs the package wandb: pip install -e '.[wandb]', "
            "or set exp_manager.create_wandb_logger=False"
        ) from error
    settings = {"dir": str(log_dir), **wandb_settings(kwargs)}
    id_file = log_dir / WANDB_ID_FILE
    known = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
    if known and not settings.keys() & {"id", "resume"}:
        settings |= {"id": known, "resume": "allow"}
    try:
        with excepthook_kept():
            run = wandb.init(**settings)
    except Exception as error:
        raise WandbError(
            "Weights & Biases does not start. Do without it (exp_manager.create_wandb_logger=False), or keep the run "
            f"on disk for `wandb sync` (WANDB_MODE=offline in the environment). Its error: {error}"
        ) from error
    if run.id != known:
        _write_whole(id_file, f"{run.id}\n")
    run.define_metric("*", step_metric="step")
    return run


def _finish_wandb(run: Any, seconds: float) -> None:
    """Send what is left, for at most ``seconds``: wandb has no limit of its own."""
    folder = _wandb_folder(run)
    errors: list[Exception] = []

    def finish() -> None:
        try:
            run.finish()
        except Exception as error:  # noqa: BLE001  # whatever it is: the run is on disk
            errors.append(error)

    thread = threading.Thread(target=finish, name="wandb-finish", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() or errors:
        reason = f"failed: {errors[0]}" if errors else f"takes more than {seconds:g} s"
        logger.warning(
            "sending the run to Weights & Biases %s. It is complete on disk; send it with: wandb sync %s",
            reason,
            folder,
        )


def _wandb_folder(run: Any) -> Path:
    """What ``wandb sync`` takes."""
    return Path(run.dir).parent


def wandb_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``wandb.init``, from such or from those of Lightning's ``WandbLogger``, which NeMo's configs have.

    Raises:
        ValueError: an argument has no counterpart.
    """
    settings = {key: value for key, value in kwargs.items() if value is not None}
    if settings.pop("offline", False):
        settings["mode"] = "offline"
    for lightnings, name in (("save_dir", "dir"), ("version", "id")):
        if lightnings in settings:
            settings[name] = settings.pop(lightnings)
    for name in ("log_model", "prefix"):
        if settings.pop(name, None):
            raise ValueError(
                f"exp_manager.wandb_logger_kwargs.{name} is an option of Lightning's logger, not of this one: "
                "leave it out"
            )
    return settings


def open_for_append(path: Path) -> TextIO:
    """Open for appending whole lines, flushed one by one; half a line that a killed run left is cut off first."""
    with _explained(str(path)):
        if path.exists() and path.stat().st_size:
            with open(path, "r+b", opener=unless_planted) as file:
                with mmap.mmap(file.fileno(), 0) as content:
                    end = content.rfind(b"\n") + 1
                file.truncate(end)
        return open(path, "a", encoding="utf-8", buffering=1, opener=unless_planted)


def write_line(file: TextIO, record: Any) -> None:
    """Append a value to a JSON-lines file. Raises `NotWrittenError`."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with _explained(file.name):
        file.write(line)


def _write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a process that is killed, or finds the disk full, leaves the old one."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with _explained(str(path)):
        with open(unfinished, "w", encoding="utf-8", opener=unless_planted) as file:
            file.write(text)
        unfinished.replace(path)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Give an OSError of the body the name of its file, which it may lack, and a remedy if the disk is full."""
    try:
        yield
    except OSError as error:
        remedy = "; make room and start the job again" if error.errno in NO_ROOM else ""
        raise NotWrittenError(error.errno, f"{error.strerror}{remedy}", path) from error


def _to_float(name: str, value: Any) -> float:
    if isinstance(value, Real):
        return float(value)
    if hasattr(value, "item") and all(size == 1 for size in value.shape):  # a tensor or an array
        return float(value.item())
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(f"metric {name!r} is a {type(value).__name__}{shape}, not a number or a one-element tensor")


def _json_safe(scalars: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no NaN and no infinity: they become the strings that ``float`` reads back."""
    return {name: value if math.isfinite(value) else str(value) for name, value in scalars.items()}


def json_numbers(values: Sequence[float], digits: int = 6) -> list[float | str]:
    """Numbers of so many digits; what JSON cannot spell as strings that ``float`` reads back."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else str(value) for value in values]


def _plain_cell(cell: Any) -> str | float | int | bool | None:
    if cell is None or isinstance(cell, (str, bool, int)):
        return cell
    if isinstance(cell, Real):
        value = float(cell)
        return value if math.isfinite(value) else str(value)
    return str(cell)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        escaped = (str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])
