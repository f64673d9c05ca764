"""Lines of data files made into samples, in batches that several processes share.

What a `LineEncoder` makes of a batch depends on nothing but its lines, the tokenizer and the settings. Therefore it
does not matter which process does so, or when: `tokenized` keeps the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import socket
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nemo_style_aligner.data import chat_templates
from nemo_style_aligner.data.jsonl import DataError, Record, parse_line, read_lines
from nemo_style_aligner.data.text_format import TextFormat
from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer, write_files
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.temporary import temporary_folder

logger = logging.getLogger(__name__)

_LINES = 256  # of a batch; an even number, since two lines may be a pair
_SECONDS = 900.0  # for a batch, whatever its template does

Stream = BinaryIO | io.BufferedRWPair
"""A file, or a connection."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, EOFError)
"""What `Samples.read` raises of bytes that `Samples.write` has not written."""


class Ragged:
    """Many short lists of numbers in one array: 4 bytes per token where Python lists take 36."""

    def __init__(self, typecode: str = "i") -> None:
        """``typecode``: of the standard library's `array`."""
        self._values = array(typecode)
        self._ends = array("q", [0])

    def append(self, numbers: Iterable[Any]) -> None:
        """Add a list at the end."""
        self._values.extend(numbers)
        self._ends.append(len(self._values))

    def extend(self, other: Ragged) -> None:
        """Add another's lists at the end."""
        start = len(self._values)
        self._values.extend(other._values)
        self._ends.extend(start + end for end in other._ends[1:])

    @property
    def arrays(self) -> tuple[array[Any], array[int]]:
        """All numbers, and where each list ends, behind a 0."""
        return self._values, self._ends

    @classmethod
    def of(cls, values: array[Any], ends: array[int]) -> Ragged:
        """The lists of these `arrays`."""
        made = cls()
        made._values, made._ends = values, ends
        return made

    def length(self, index: int) -> int:
        """Length of a list."""
        return self._ends[index + 1] - self._ends[index]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._values[self._ends[index] : self._ends[index + 1]].tolist()


@dataclass
class Notes:
    """What is worth telling of lines, in a form that can be added up.

    Attributes:
        counts: how many there were, by what they are.
        seen: what was seen, by subject, in order; each with the value that came first, as JSON has it.
    """

    counts: Counter[str] = field(default_factory=Counter)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def see(self, subject: str, what: str, value: Any = None) -> None:
        """Note ``what``, unless it has been seen before."""
        self.seen.setdefault(subject, {}).setdefault(what, value)

    def extend(self, other: Notes) -> None:
        """Add the notes of later lines."""
        self.counts.update(other.counts)
        for subject, entries in other.seen.items():
            for what, value in entries.items():
                self.see(subject, what, value)


@dataclass
class Samples:
    """What lines became: columns with a list for each sample, and notes."""

    columns: dict[str, Ragged]
    notes: Notes = field(default_factory=Notes)

    def extend(self, other: Samples) -> None:
        """Add the samples of later lines."""
        for name, column in other.columns.items():
            self.columns[name].extend(column)
        self.notes.extend(other.notes)

    def write(self, file: Stream) -> None:
        """Write them so that `read` can tell whether they are whole."""
        arrays = {name: column.arrays for name, column in self.columns.items()}
        described = {name: [[part.typecode, len(part)] for part in parts] for name, parts in arrays.items()}
        digest = _digest(itertools.chain.from_iterable(arrays.values()))
        header = json.dumps([described, digest, self.notes.counts, self.notes.seen]).encode()
        file.write(b"%s %s\n" % (hashlib.sha256(header).hexdigest().encode(), header))
        for part in itertools.chain.from_iterable(arrays.values()):
            part.tofile(file)

    @classmethod
    def read(cls, file: Stream) -> Samples:
        """What was written. Raises one of `UNREADABLE` if it is not whole."""
        digest, _, header = file.readline().rstrip(b"\n").partition(b" ")
        if digest != hashlib.sha256(header).hexdigest().encode():
            raise ValueError("its first line is damaged")
        described, digest_of_arrays, counts, seen = json.loads(header)
        arrays = {name: [array(typecode) for typecode, _ in parts] for name, parts in described.items()}
        for name, parts in described.items():
            for part, (_, length) in zip(arrays[name], parts, strict=True):
                part.fromfile(file, length)
        if digest_of_arrays != _digest(itertools.chain.from_iterable(arrays.values())):
            raise ValueError("its numbers are damaged")
        columns = {name: Ragged.of(values, ends) for name, (values, ends) in arrays.items()}
        return cls(columns, Notes(Counter(counts), seen))


def _digest(arrays: Iterable[array[Any]]) -> str:
    digest = hashlib.sha256()
    for part in arrays:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of a file.

    Attributes:
        path, file: the file, and its number among all files.
        start: how many of the file's lines are before these; blank ones do not count.
        first: the file's first line.
        lines: each with its number, counted from 1.
    """

    path: Path
    file: int
    start: int
    first: tuple[int, bytes]
    lines: Sequence[tuple[int, bytes]]

    def records(self) -> list[Record]:
        """The lines, parsed. Raises DataError."""
        return [parse_line(self.path, *line) for line in self.lines]

    def first_record(self) -> Record:
        """The file's first line, parsed. Raises DataError."""
        return parse_line(self.path, *self.first)

    @property
    def are_first(self) -> bool:
        """Whether no others are before them."""
        return self.file == self.start == 0

    def write(self, file: Stream) -> None:
        """Write them for `read`."""
        lines = [self.first, *self.lines]
        sizes = [(number, len(raw)) for number, raw in lines]
        file.write(json.dumps([str(self.path), self.file, self.start, sizes]).encode() + b"\n")
        file.writelines(raw for _, raw in lines)

    @classmethod
    def read(cls, file: Stream) -> Lines | None:
        """What was written next; None at the end."""
        if not (header := file.readline()):
            return None
        path, number, start, sizes = json.loads(header)
        first, *lines = [(line, file.read(size)) for line, size in sizes]
        return cls(Path(path), number, start, first, lines)


class LineEncoder(ABC):
    """Makes samples of lines.

    Args:
        settings: all that it depends on beside the tokenizer, as JSON has it.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self.tokenizer, self.settings = tokenizer, settings

    @abstractmethod
    def encode(self, lines: Lines) -> Samples:
        """The samples of these lines, with notes on them.

        Raises:
            DataError: a line is not as it should be.
        """

    def described(self) -> dict[str, Any]:
        """What it is made of, except for the tokenizer's files; as JSON has it."""
        tokenizer = self.tokenizer
        return {
            "encoder": [type(self).__module__, type(self).__name__],
            "settings": self.settings,
            "chat_template": tokenizer.chat_template,
            "generation_config": tokenizer.generation_config,
            "format": tokenizer.format.to_config(),
        }


def encode_files(
    paths: Sequence[str | Path], encoder: LineEncoder, processes: int, tell: Callable[[int], None]
) -> Samples:
    """The samples of files, one after the other.

    Args:
        processes: that encode beside this one; with fewer than two, this one does.
        tell: is called after each batch, with the number of bytes of its lines.

    Raises:
        DataError: a file or a line is not as it should be; the first such line counts.
        NotWrittenError: there is no folder for temporary files.
    """
    made: list[Samples] = []
    pending: deque[tuple[_Process | None, Lines]] = deque()

    def finish() -> None:
        process, lines = pending.popleft()
        # Errors are raised here: a process that has met one only ends.
        samples = (process and process.samples()) or encoder.encode(lines)
        made[0].extend(samples) if made else made.append(samples)
        tell(sum(len(raw) for _, raw in lines.lines))

    with _started(encoder, processes) as started:
        try:
            for lines, process in zip(_batches(paths), itertools.cycle(started or [None])):
                if len(pending) == max(1, len(started)):
                    finish()
                if process is not None:
                    process.send(lines)
                pending.append((process, lines))
        except DataError:
            while pending:  # an earlier line may have an error of its own
                finish()
            raise
        while pending:
            finish()
    return made[0]


def _batches(paths: Sequence[str | Path]) -> Iterator[Lines]:
    for file, path in enumerate(map(Path, paths)):
        first, start, lines = None, 0, read_lines(path)
        while batch := list(itertools.islice(lines, _LINES)):
            first = first or batch[0]
            yield Lines(path, file, start, first, batch)
            start += len(batch)


class _Process:
    """A process that encodes batches; one at a time."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self._connection = chat_templates.fork_process(__name__)
        self._connection.settimeout(_SECONDS)
        self._stream = self._connection.makefile("rwb")
        self._is_alive = self._try(lambda: self._stream.write(json.dumps(described).encode() + b"\n"))

    def _try(self, talk: Callable[[], Any]) -> bool:
        with contextlib.suppress(*UNREADABLE), activity.bounded(_SECONDS):
            talk()
            self._stream.flush()
            return True
        return False

    def send(self, lines: Lines) -> None:
        """Have it encode these."""
        self._is_alive = self._is_alive and self._try(lambda: lines.write(self._stream))

    def samples(self) -> Samples | None:
        """What became of the batch that was sent; None if the process has ended, or is silent."""
        read: list[Samples] = []
        self._is_alive = self._is_alive and self._try(lambda: read.append(Samples.read(self._stream)))
        return read[0] if read else None

    def close(self) -> None:
        """End the process, as soon as it has done its batch."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


@contextlib.contextmanager
def _started(encoder: LineEncoder, number: int) -> Iterator[list[_Process]]:
    if number < 2:
        yield []
        return
    with temporary_folder("the tokenizer, for the processes that use it,") as folder:
        write_files(folder, encoder.tokenizer.files)
        described = {**encoder.described(), "folder": str(folder)}
        processes = [_Process(described) for _ in range(number)]
        try:
            yield processes
        finally:
            for process in processes:
                process.close()


def serve(connection: socket.socket) -> None:
    """Encode batches in a process of its own (`chat_templates.fork_process`), until the other end is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the processes has a core
    with connection.makefile("rwb") as stream:
        described = json.loads(stream.readline())
        tokenizer = load_tokenizer(described["folder"])
        tokenizer.chat_template = described["chat_template"]
        tokenizer.generation_config = described["generation_config"]
        tokenizer.format = TextFormat.from_config(described["format"], "text_format")
        module, name = described["encoder"]
        encoder: LineEncoder = getattr(importlib.import_module(module), name)(tokenizer, described["settings"])
        while (lines := Lines.read(stream)) is not None:
            encoder.encode(lines).write(stream)
            stream.flush()
