"""Read and write data files. Every error about a line names the file, the line and what is wrong.

Files hold JSON lines; others are read as if they did, see `tables`.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nemo_style_aligner.engine.text.tables import DataError as DataError
from nemo_style_aligner.engine.text.tables import opened, rows_of, why_no_data
from nemo_style_aligner.errors import LFS_POINTER, is_lfs_pointer
from nemo_style_aligner.guard.parsing import MAX_BYTES, parse_json
from nemo_style_aligner.guard.trusted_paths import unless_planted

Counts = Counter[Any]
"""How many lines, turns, texts ... there were, by what they are: a word, or a tuple of a word and what was seen."""


def seen(counts: Counts, what: str) -> list[Any]:
    """What was seen of a kind, in order."""
    return [key[1:] for key in counts if key[0] == what]


@dataclass(frozen=True)
class Record:
    """One line of a JSONL file: an object, and where it stands."""

    path: Path
    line: int  # counted from 1
    fields: Mapping[str, Any]

    def fail(self, problem: str) -> NoReturn:
        """Raise a `DataError` about this line."""
        raise DataError(f"{self.path}:{self.line}: {problem}")

    def require(self, key: str, kind: type | tuple[type, ...], meaning: str) -> Any:
        """The value under ``key``; a `DataError` if it is missing or not of this ``kind``.

        ``meaning`` describes the kind in the error message, for instance ``"a string"``.
        """
        if key not in self.fields:
            present = ", ".join(map(repr, self.fields)) or "none"
            self.fail(f"key {key!r} is missing (it should be {meaning}); the keys present are: {present}")
        value = self.fields[key]
        # A bool is an int in Python, but `true` is no number in a data file.
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"{key!r} should be {meaning}, not {_excerpt(value)}")
        return value

    def text(self, key: str) -> str:
        """The string under ``key``."""
        value: str = self.require(key, str, "a string")
        self.check_characters(key, value)
        return value

    def check_characters(self, key: str, text: str) -> None:
        """Raise a `DataError` if ``text`` has half of a surrogate pair, which JSON can spell and no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self.fail(f"{key!r} holds an unpaired surrogate, {text[error.start]!a}, which is not a valid character")


def _excerpt(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a data file with their numbers; the rows of other files than JSON lines are lines, too (`tables`).

    Raises:
        DataError: the file is missing, empty, damaged or a pointer of Git LFS, or a line is too long.
    """
    path = Path(path)
    if reason := why_no_data(path):
        raise DataError(f"{path}: {reason}")
    if path.is_file() and is_lfs_pointer(path):
        raise DataError(f"{path} {LFS_POINTER}")
    count = 0
    for number, raw in rows_of(path) or _lines(path):
        count += 1
        yield number, raw
    if not count:
        raise DataError(f"{path}: the file holds no records")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Of a file of JSON lines; blank ones are skipped."""
    number = 0
    with opened(path) as file:
        try:
            for number, raw in enumerate(iter(functools.partial(file.readline, MAX_BYTES + 1), b""), start=1):
                if len(raw) > MAX_BYTES:
                    raise DataError(f"{path}:{number}: the line has more than {MAX_BYTES:,} bytes")
                if number == 1:  # a byte order mark, which some editors put before the first line, is not data
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if raw.strip():
                    yield number, raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged after line {number}: {error}") from error


def read_jsonl(path: str | Path) -> list[Record]:
    """All records of a file, in order.

    Raises:
        DataError: as `read_lines`, or a line is not a JSON object in UTF-8.
    """
    return [parse_line(Path(path), number, raw) for number, raw in read_lines(path)]


def parse_line(path: Path, number: int, raw: bytes) -> Record:
    """A line of a file as a record. Raises DataError: it is no JSON object in UTF-8."""
    try:
        fields = parse_json(raw.decode().rstrip("\r\n"), unique=True)  # else the place after its end is column 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        hint = "; each line should be an object of its own" if number == 1 else ""
        raise DataError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}{hint}") from error
    except ValueError as error:
        raise DataError(f"{path}:{number}: cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f'{path}:{number}: should be an object such as {{"text": "..."}}, not {_excerpt(fields)}')
    return Record(path, number, fields)


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one object per line, all of them or none; returns how many."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(unfinished, "w", encoding="utf-8", opener=unless_planted) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
