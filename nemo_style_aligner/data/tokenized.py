"""Data files as samples of tokens: made once per machine, by several processes if they are large, and kept.

What is kept lies in the user's cache folder under a fingerprint of all that it depends on: the contents of the files,
the tokenizer with its chat template, the settings, and the code. It is found again at the next start, by any job.
Whatever is wrong with the folder or with what lies in it, only the time is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_style_aligner.data.encoding import UNREADABLE, LineEncoder, Samples, encode_files
from nemo_style_aligner.data.jsonl import DataError
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.parallel.machine import available_cores, ranks_on_this_machine
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.trusted_paths import UntrustedPathError, cache_folder, private_folder
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

SIZE_VARIABLE = "NEMO_STYLE_ALIGNER_TOKENS_GB"
"""Environment variable: how many GB of samples are kept at most; 0: none."""

LARGE = 1 << 20
"""Bytes of text. Less is tokenized within a second or two, and not kept; and a process gets no less."""

_GB = 20.0
_PACKED = 4  # times as much text is in a compressed file
_UNFINISHED = ".unfinished"
_SILENT_SECONDS = 1200.0  # the process that tokenizes is waited for, unless it does nothing for so long
_DEAD_SECONDS = 2 * 86400.0  # an unfinished file that is older has been left behind
_POLL_SECONDS = 0.2
_TOLD_SECONDS = 30.0
_AT_ONCE = 16 << 20  # bytes
_DIGITS = 16  # of what is said there
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "sentencepiece")


def tokenized(paths: Sequence[str | Path], encoder: LineEncoder) -> Samples:
    """What an encoder makes of files, one after the other; of large ones, what is kept of an earlier time.

    One process of a machine makes it, and the others wait.

    Raises:
        DataError: a file or a line is not as it should be.
        NotWrittenError: there is no folder for temporary files.
    """
    progress = _Progress(paths)
    processes = min(available_cores(), progress.total // LARGE)
    folder = _folder() if progress.total >= LARGE else None
    entry = folder and folder / _fingerprint(paths, encoder)
    while entry is not None:
        if (kept := _read(entry)) is not None:
            logger.info("%s: tokenized before, and kept in %s", progress.files, entry)
            return kept
        unfinished = entry.with_name(entry.name + _UNFINISHED)
        try:
            held = _hold(unfinished, progress)
        except OSError as error:
            logger.warning("tokenized data are not kept for the next start: %s: %s", unfinished, error)
            break
        try:
            if _is_at(held, unfinished):  # else another process has finished it
                progress.note_in(held)
                samples = encode_files(paths, encoder, processes, progress.add)
                _keep(samples, held, entry)
                return samples
        finally:
            os.close(held)
    return encode_files(paths, encoder, processes // ranks_on_this_machine(), progress.add)


def report_dropped(dropped: int, total: int, what: str, limit: str, paths: Sequence[str | Path]) -> None:
    """Warn of how many samples were dropped; a `DataError` if all were."""
    files = ", ".join(str(path) for path in paths)
    if dropped == total:
        raise DataError(f"{files}: all {total} {what} are {limit}; change the limit or the data")
    if dropped:
        warn_for_all_ranks(logger, "%s: dropped %d of %d %s: %s", files, dropped, total, what, limit)


class _Progress:
    """How far tokenizing is, with a line in the log now and then."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.files = some_of([str(path) for path in paths])
        sizes = [(path, os.path.getsize(path)) for path in map(Path, paths) if path.is_file()]
        self.total = sum(size * (_PACKED if path.suffix == ".gz" else 1) for path, size in sizes)
        self.done = 0
        self._said_in: int | None = None
        self._began = self._told = time.monotonic()

    def note_in(self, descriptor: int) -> None:
        """From now on also write it to a file, for those who wait."""
        self._said_in = descriptor

    def add(self, size: int) -> None:
        """So many bytes more are done."""
        self.tell(self.done + size)
        if self._said_in is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._said_in, b"%0*d" % (_DIGITS, self.done), 0)

    def tell(self, done: int) -> None:
        """So many bytes are done now, of this process or of the one that is waited for."""
        activity.progress()
        self.done, now = done, time.monotonic()
        if now - self._told > _TOLD_SECONDS:
            self._told, share = now, min(done / self.total, 0.99)
            logger.info("tokenizing %s: %.0f%% after %.0f s", self.files, 100 * share, now - self._began)


def _folder() -> Path | None:
    """The folder of what is kept; None if nothing is to be, or can be."""
    if not _most_bytes():
        return None
    try:
        folder = cache_folder("tokens")
        private_folder(folder)
    except (RuntimeError, UntrustedPathError, OSError) as error:
        warn_for_all_ranks(
            logger,
            "tokenized data are not kept for the next start (%s): set NEMO_STYLE_ALIGNER_CACHE to a folder of your own",
            error,
        )
        return None
    return folder


def _most_bytes() -> int:
    given = os.environ.get(SIZE_VARIABLE) or _GB
    with contextlib.suppress(ValueError, OverflowError):
        if (most := int(float(given) * 1e9)) >= 0:
            return most
    raise UserError(f"{SIZE_VARIABLE}={given}: give a number of GB, 0 to keep nothing")


def _fingerprint(paths: Sequence[str | Path], encoder: LineEncoder) -> str:
    """Hash of all that samples depend on."""
    files = {name: hashlib.sha256(content).hexdigest() for name, content in encoder.tokenizer.files.items()}
    data = []
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while content := file.read(_AT_ONCE):
                activity.progress()
                digest.update(content)
        data.append([Path(path).suffix == ".gz", digest.hexdigest()])
    parts = [_code(), encoder.described(), sorted(files.items()), data]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _code() -> list[str]:
    """Hashes of the modules that make samples, and the versions of the libraries that they use."""
    package = Path(__file__).parents[1]
    modules = [*sorted((package / "data").glob("*.py")), package / "parsing.py"]
    versions = [importlib.metadata.version(name) for name in _LIBRARIES]
    return [*versions, *(hashlib.sha256(module.read_bytes()).hexdigest() for module in modules)]


def _hold(unfinished: Path, progress: _Progress) -> int:
    """Lock an entry that is to be made, or that the process before has made; returns its descriptor.

    The file is the lock, which the kernel releases when its process ends. Meanwhile it says how far that process is.

    Raises:
        OSError: there cannot be a file, or no lock, or its process does nothing.
    """
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    said, changed = b"", time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if (now := os.pread(descriptor, _DIGITS, 0)) != said:
                    said, changed = now, time.monotonic()
                elif time.monotonic() - changed > _SILENT_SECONDS:
                    raise TimeoutError(f"its process has done nothing for {_SILENT_SECONDS:.0f} s") from None
            progress.tell(int(said) if said.isdigit() else progress.done)
            time.sleep(_POLL_SECONDS)
    except OSError:
        os.close(descriptor)
        raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _read(entry: Path) -> Samples | None:
    """What is kept; None if there is nothing whole."""
    try:
        with open(entry, "rb") as file:
            if file.readline() != _first_line(entry):
                raise ValueError("it is another's")
            samples = Samples.read(file)
        os.utime(entry)  # those that are used last are kept
        return samples
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.warning("%s is made anew, since it cannot be read: %s", entry, error)
        with contextlib.suppress(OSError):
            entry.unlink()
        return None


def _first_line(entry: Path) -> bytes:
    return f"nemo_style_aligner tokens {entry.name}\n".encode()


def _keep(samples: Samples, held: int, entry: Path) -> None:
    """Write samples into the unfinished entry and give it its name, then remove what is too much."""
    unfinished = entry.with_name(entry.name + _UNFINISHED)
    try:
        os.ftruncate(held, 0)
        with open(held, "wb", closefd=False) as file:
            file.seek(0)
            file.write(_first_line(entry))
            samples.write(file)
        os.fsync(held)
        os.replace(unfinished, entry)
    except OSError as error:
        logger.warning("tokenized data are not kept for the next start: %s: %s", entry, error.strerror)
        with contextlib.suppress(OSError):
            unfinished.unlink()
    with contextlib.suppress(OSError):  # another process removes the same
        _remove_old(entry.parent)


def _remove_old(folder: Path) -> None:
    """Remove what has not been used for longest, until the rest is small enough; and what will not be finished."""
    found = sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    total = 0
    for modified, path in found:
        total += path.stat().st_size
        is_dead = path.suffix == _UNFINISHED and time.time() - modified > _DEAD_SECONDS
        if is_dead or (total > _most_bytes() and path.suffix != _UNFINISHED):
            logger.info("removing %s (%s=%g)", path, SIZE_VARIABLE, _most_bytes() / 1e9)
            path.unlink(missing_ok=True)
