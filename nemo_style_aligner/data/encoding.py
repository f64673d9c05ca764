"""Lines of data files made into samples, in batches that several processes share.

What a `LineEncoder` makes of a batch depends on nothing but its lines, the tokenizer and the settings. Therefore it
does not matter which process does so, or when: `tokenized` keeps the result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedRWPair
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nemo_style_aligner.data.helper_process import HelperProcess
from nemo_style_aligner.data.jsonl import DataError, Record, parse_line, read_lines
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.telemetry import activity

_LINES = 256  # of a batch; an even number, since two lines may be a pair
_SECONDS = 900.0  # for a batch, whatever its template does


class Ragged:
    """Many short lists of numbers in one array: 4 bytes per token where Python lists take 36.

    Attributes:
        values, ends: all numbers, and where each list ends, behind a 0.
    """

    def __init__(self, typecode: str = "i") -> None:
        """``typecode``: of the standard library's `array`."""
        self.values: Any = array(typecode)
        self.ends: Any = array("q", [0])

    def append(self, numbers: Iterable[Any]) -> None:
        """Add a list at the end."""
        self.values.extend(numbers)
        self.ends.append(len(self.values))

    def extend(self, other: Ragged) -> None:
        """Add another's lists at the end."""
        start = len(self.values)
        self.values.extend(other.values)
        self.ends.extend(start + end for end in other.ends[1:])

    def length(self, index: int) -> int:
        """Length of a list."""
        return int(self.ends[index + 1] - self.ends[index])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        numbers: list[Any] = self.values[self.ends[index] : self.ends[index + 1]].tolist()
        return numbers


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

    def save(self, file: BinaryIO) -> None:
        """Write them as numpy's ``.npz``, which has checksums."""
        notes = json.dumps([self.notes.counts, self.notes.seen]).encode()
        arrays: dict[str, Any] = {
            f"{name}.{part}": np.asarray(getattr(column, part))
            for name, column in self.columns.items()
            for part in ("values", "ends")
        }
        np.savez(file, notes=np.frombuffer(notes, np.uint8), **arrays)

    @classmethod
    def load(cls, file: BinaryIO) -> Samples:
        """What was saved; raises an error of any kind if it is damaged. They cannot be extended."""
        columns: dict[str, Ragged] = {}
        with np.load(file, allow_pickle=False) as arrays:
            counts, seen = json.loads(bytes(arrays["notes"]))
            for name in arrays.files:
                column, _, part = name.partition(".")
                if part:
                    setattr(columns.setdefault(column, Ragged()), part, arrays[name])
        return cls(columns, Notes(Counter(counts), seen))


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
    """
    made: list[Samples] = []
    pending: deque[tuple[_Process | None, Lines]] = deque()

    def finish() -> None:
        process, lines = pending.popleft()
        try:  # errors are raised here: a process that has met one only ends
            samples = (process and process.samples()) or encoder.encode(lines)
        except DataError:
            pending.clear()  # what comes later does not count
            raise
        made[0].extend(samples) if made else made.append(samples)
        tell(sum(len(raw) for _, raw in lines.lines))

    started = [_Process(encoder) for _ in range(processes)] if processes > 1 else []
    try:
        for lines, process in zip(_batches(paths), itertools.cycle(started or [None])):
            if len(pending) == max(1, len(started)):
                finish()
            if process is not None:
                process.send(lines)
            pending.append((process, lines))
        while pending:
            finish()
    except DataError:
        while pending:  # a line before what cannot be read may have an error of its own
            finish()
        raise
    finally:
        for process in started:
            process.close()
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

    def __init__(self, encoder: LineEncoder) -> None:
        self._helper = HelperProcess(__name__, _SECONDS)
        self.send(encoder)

    def send(self, what: LineEncoder | Lines) -> None:
        """Give it the encoder, or a batch."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, which `samples` will show
            pickle.dump(what, self._helper.stream)
            self._helper.stream.flush()

    def samples(self) -> Samples | None:
        """What became of the batch that was sent; None if the process has ended, or is silent."""
        with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError), activity.bounded(_SECONDS):
            made: Samples = pickle.load(self._helper.stream)
            return made
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        self._helper.close()


def serve(stream: BufferedRWPair) -> None:
    """Encode batches in a process of its own, until the other end is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the processes has a core
    encoder: LineEncoder = pickle.load(stream)
    while True:
        pickle.dump(encoder.encode(pickle.load(stream)), stream)
        stream.flush()
