"""Lines of data files made into samples, in batches that several processes share.

What a `TextEncoder` of `texts` makes of a batch depends on nothing but its lines, the tokenizer and the settings.
Therefore it does not matter which process does so.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.machine import available_cores, ranks_on_this_machine
from nemo_style_aligner.engine.text.helper_process import HelperProcess
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record, parse_line, read_lines
from nemo_style_aligner.engine.text.tables import bytes_of_text
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from nemo_style_aligner.engine.text.texts import TextEncoder

LARGE = 1 << 20
"""Bytes of text. Less is tokenized within a second or two, and a process gets no less."""

_TOLD_SECONDS = 30.0
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
class Samples:
    """What lines became: columns with a list for each sample, and what there is to tell of them."""

    columns: dict[str, Ragged]
    counts: Counts

    def extend(self, other: Samples) -> None:
        """Add the samples of later lines."""
        for name, column in other.columns.items():
            self.columns[name].extend(column)
        self.counts.update(other.counts)


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


def encode_files(paths: Sequence[str | Path], encoder: TextEncoder) -> Samples:
    """The samples of files, one after the other; those of large files are made by several processes.

    Raises:
        DataError: a file or a line is not as it should be; the first such line counts.
    """
    total = sum(map(bytes_of_text, map(Path, paths)))
    processes = min(available_cores() // ranks_on_this_machine(), total // LARGE)
    tell = _progress(some_of([str(path) for path in paths]), total)
    made: list[Samples] = []
    pending: deque[tuple[HelperProcess | None, Lines]] = deque()

    def finish() -> None:
        process, lines = pending.popleft()
        with activity.bounded(_SECONDS):
            samples = None if process is None else process.answer(_SECONDS)
        try:  # errors are raised here: a process that has met one only ends
            samples = samples or encoder.encode(lines)
        except DataError:
            pending.clear()  # what comes later does not count
            raise
        made[0].extend(samples) if made else made.append(samples)
        tell(sum(len(raw) for _, raw in lines.lines))

    started: list[HelperProcess] = []
    if processes > 1:
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:  # each takes its encoder once it has started
            started += pool.map(lambda _: HelperProcess(__name__, encoder), range(processes))
    try:
        for lines, process in zip(batches(paths), itertools.cycle(started or [None])):
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


def _progress(files: str, total: int) -> Callable[[int], None]:
    """What is to be told how many bytes more are done: there is a line in the log now and then."""
    began = told = time.monotonic()
    done = 0

    def tell(size: int) -> None:
        nonlocal told, done
        activity.progress()
        done, now = done + size, time.monotonic()
        if now - told > _TOLD_SECONDS:
            told = now
            logger.info("tokenizing %s: %.0f%% after %.0f s", files, 100 * min(done / total, 0.99), now - began)

    return tell


def batches(paths: Sequence[str | Path], size: int = _LINES) -> Iterator[Lines]:
    """The lines of files, ``size`` at a time."""
    for file, path in enumerate(map(Path, paths)):
        first, start, lines = None, 0, read_lines(path)
        while batch := list(itertools.islice(lines, size)):
            first = first or batch[0]
            yield Lines(path, file, start, first, batch)
            start += len(batch)


def answerer(encoder: TextEncoder) -> Callable[[Lines], Samples]:
    """What encodes batches, in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of the processes has a core
    return encoder.encode
