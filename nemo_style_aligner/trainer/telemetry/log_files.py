"""The files of a log directory: whole lines are appended, and read from the newest on."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from nemo_style_aligner.errors import NO_ROOM, NotWrittenError, UserError
from nemo_style_aligner.guard.trusted_paths import unless_planted

METRICS_FILE = "metrics.jsonl"
TABLES_FILE = "tables.jsonl"
SAMPLES_FILE = "samples.jsonl"
HYPERPARAMETERS_FILE = "hyperparameters.yaml"
LENGTH_FILE = "length.json"


class NoRunError(UserError):
    """A folder holds nothing that a job has logged."""


class DamagedLogError(UserError, ValueError):
    """A file that a job has logged to holds something else."""


def read_json_lines(path: Path) -> list[Any]:
    """The values of a JSON-lines file, the oldest first; see `newest_lines`."""
    return [value for _, value in newest_lines(path)][::-1]


def newest_lines(path: Path, before: int | None = None) -> Iterator[tuple[int, Any]]:
    """The values of a JSON-lines file, the newest first, each with the byte where its line begins.

    A last line without its newline is left out: its writer was killed in the middle of it, or is writing. A file that
    does not exist has none.

    Args:
        before: a byte where a line begins: only those before it.

    Raises:
        DamagedLogError: a line is not JSON.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n", 0, len(content) if before is None else max(0, min(before, len(content)))) + 1
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            try:
                value = json.loads(content[start:end])
            except ValueError as error:
                place = f"the line that begins at byte {start}"
                raise DamagedLogError(f"{path}: {place} is not JSON ({error}); repair or remove it") from error
            yield start, value
            end = start


def open_for_append(path: Path) -> TextIO:
    """Open for appending whole lines, flushed one by one; half a line that a killed run left is cut off first."""
    with explained(str(path)):
        if path.exists() and path.stat().st_size:
            with open(path, "r+b", opener=unless_planted) as file:
                with mmap.mmap(file.fileno(), 0) as content:
                    end = content.rfind(b"\n") + 1
                file.truncate(end)
        return open(path, "a", encoding="utf-8", buffering=1, opener=unless_planted)


def write_line(file: TextIO, record: Any) -> None:
    """Append a value to a JSON-lines file. Raises `NotWrittenError`."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with explained(file.name):
        file.write(line)


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step: a process that is killed, or finds the disk full, leaves the old one."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with explained(str(path)):
        with open(unfinished, "w", encoding="utf-8", opener=unless_planted) as file:
            file.write(text)
        unfinished.replace(path)


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Give an OSError of the body the name of its file, which it may lack, and a remedy if the disk is full."""
    try:
        yield
    except OSError as error:
        remedy = "; make room and start the job again" if error.errno in NO_ROOM else ""
        raise NotWrittenError(error.errno, f"{error.strerror}{remedy}", path) from error


def json_number(value: float) -> float | str:
    """A number, or what JSON cannot spell, NaN and infinity, as a string that ``float`` reads back."""
    return value if math.isfinite(value) else str(value)


def json_numbers(values: Sequence[float]) -> list[float | str]:
    """Numbers of six digits; see `json_number`."""
    return [json_number(float(f"{value:.6g}")) for value in values]
