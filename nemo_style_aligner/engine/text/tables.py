"""Data files of other forms than JSON lines: JSON arrays, CSV, Parquet, folders that the ``datasets`` library saves.

Row by row they become lines of JSON, so that what is behind reads one form. The number of a row is the line where it
begins or, where there are no lines, its own, counted from 1.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.parsing import MAX_BYTES, read_json

Row = tuple[int, bytes]

STATE_FILE = "state.json"
"""In a folder that ``Dataset.save_to_disk`` has written."""

_SPLITS_FILE = "dataset_dict.json"
_MOST_TEXT = 1 << 30  # bytes of an array, which is held whole
_ROWS = 256  # that are read at once
_PACKED = {".gz": 4, ".parquet": 4}  # times as much text is in such a file
# Columns whose cells are not text: tables without types have them as JSON.
_OF_JSON = frozenset(("messages", "conversations", "tools", "history", "label", "chosen_reward", "rejected_reward"))


class DataError(UserError, ValueError):
    """A data file does not hold what it should."""


def opened(path: Path) -> IO[bytes]:
    """A file's bytes; one whose name ends with ``.gz`` is decompressed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def why_no_data(path: Path) -> str | None:
    """Why a path can be no data file, in words that follow it; None if it may be one."""
    if path.is_file() or (path / STATE_FILE).is_file():
        return None
    if (path / _SPLITS_FILE).is_file():
        splits = ", ".join(sorted(str(part.parent) for part in path.glob(f"*/{STATE_FILE}")))
        return f"this folder holds splits: name one of {splits}"
    if path.is_dir():
        tables = sorted(str(file) for file in path.glob("*.parquet"))[:2]
        return "this is a folder" + (f": name its files, such as {', '.join(tables)}" if tables else "")
    return "no such data file"


def bytes_of_text(path: Path) -> int:
    """About how much text a data file holds."""
    files = path.glob("*.arrow") if path.is_dir() else [path]
    return sum(os.path.getsize(file) * _PACKED.get(file.suffix, 1) for file in files if file.is_file())


def rows_of(path: Path) -> Iterator[Row] | None:
    """The rows of a file that holds no JSON lines, each as an object in JSON; None: it may hold lines.

    Raises:
        DataError: when iterated: the file cannot be read as what it is; file and row are named.
    """
    if path.is_dir():
        return _dataset_rows(path)
    name = path.name.removesuffix(".gz").lower()
    if name.endswith((".csv", ".tsv")):
        return _told(path, _csv_rows(path, "\t" if name.endswith(".tsv") else ","))
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    with contextlib.suppress(OSError, EOFError, zlib.error), opened(path) as file:  # damage is told by who reads on
        start = file.read(_ROWS).removeprefix(codecs.BOM_UTF8).lstrip()
        return _told(path, _array_rows(path)) if start.startswith(b"[") else None
    return None


def _told(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged: {error}") from error


# ---- a JSON array -------------------------------------------------------------------------------


def _array_rows(path: Path) -> Iterator[Row]:
    with opened(path) as file:
        raw = file.read(_MOST_TEXT + 1)
    if len(raw) > _MOST_TEXT:
        raise DataError(f"{path}: a JSON array of more than {_MOST_TEXT:,} bytes: write one object per line")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{1 + raw[: error.start].count(10)}: not UTF-8: {error}") from error
    at, line, counted = text.index("[") + 1, 1, 0
    decoder, is_first = json.JSONDecoder(), True
    while True:
        at = _next(text, at)
        if text[at : at + 1] == "]":
            break
        if not is_first:
            _require(path, text, at, ",")
            at = _next(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _not_json(path, error) from error
        except RecursionError as error:
            raise DataError(f"{path}:{line}: nested too deeply") from error
        if end - at > MAX_BYTES:
            raise DataError(f"{path}:{line}: the entry has more than {MAX_BYTES:,} characters")
        yield line, text[at:end].encode("utf-8", "surrogatepass")
        at, is_first = end, False
    rest = _next(text, at + 1)
    if rest < len(text):
        raise _not_json(path, json.JSONDecodeError("Extra data after the array", text, rest))


def _next(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _require(path: Path, text: str, at: int, sign: str) -> None:
    if text[at : at + 1] != sign:
        raise _not_json(path, json.JSONDecodeError(f"Expecting '{sign}'", text, at))


def _not_json(path: Path, error: json.JSONDecodeError) -> DataError:
    return DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}")


# ---- tables -------------------------------------------------------------------------------------


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Each row with the header's names. Cells are text, but those of columns that hold lists or numbers."""
    csv.field_size_limit(MAX_BYTES)
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader, line = csv.reader(text, delimiter=delimiter, strict=True), 1
        names: list[str] = []
        try:
            for cells in reader:
                if not names:
                    names = _header(path, cells)
                elif cells:
                    if len(cells) != len(names):
                        raise DataError(f"{path}:{line}: {len(cells)} cells, where the header has {len(names)}")
                    yield line, _as_json(dict(zip(names, map(_cell, names, cells), strict=True)), path, line)
                line = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{line}: not UTF-8, here or in the lines behind: {error}") from error
        except csv.Error as error:
            raise DataError(f"{path}:{line}: not valid CSV: {error}") from error


def _header(path: Path, names: list[str]) -> list[str]:
    twice = [name for name in names if names.count(name) > 1 or not name.strip()]
    if twice:
        raise DataError(f"{path}:1: the header names the columns; {twice[0]!r} is none, or there twice")
    return names


def _cell(name: str, text: str) -> Any:
    if name in _OF_JSON:
        if not text:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    return _batched(path, lambda: pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS))


def _dataset_rows(path: Path) -> Iterator[Row]:
    """Of a folder that ``Dataset.save_to_disk`` has written: Arrow files, in the order of its ``state.json``."""
    import pyarrow

    try:
        state = read_json(path / STATE_FILE)
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_files"):
            raise DataError(f"{path}: rows were chosen or sorted: save what flatten_indices() returns")
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path / STATE_FILE} is not what Dataset.save_to_disk writes: {error!r}") from error
    if strange := [name for name in names if Path(name).name != name]:
        raise DataError(f"{path / STATE_FILE} names {strange[0]!r}, which is no file of this folder")

    def batches() -> Iterator[Any]:
        for name in names:
            with pyarrow.memory_map(str(path / name)) as file:
                for batch in pyarrow.ipc.open_stream(file):
                    yield from (batch.slice(start, _ROWS) for start in range(0, len(batch), _ROWS))

    return _batched(path, batches)


def _batched(path: Path, batches: Callable[[], Iterator[Any]]) -> Iterator[Row]:
    """Rows of Arrow's record batches."""
    import pyarrow

    number = 0
    try:
        for batch in batches():
            for row in batch.to_pylist():
                number += 1
                yield number, _as_json(row, path, number)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged after row {number}: {error}") from error


def _as_json(row: dict[str, Any], path: Path, number: int) -> bytes:
    def refuse(value: Any) -> Any:
        name = next((name for name, given in row.items() if given is value), "a column")
        raise DataError(f"{path}:{number}: {name!r} holds {type(value).__name__}, which is no text, number or list")

    return json.dumps(row, ensure_ascii=False, default=refuse).encode("utf-8", "surrogatepass")
