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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_style_aligner.data.encoding import Samples, encode_files
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.parallel.machine import available_cores, ranks_on_this_machine
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.trusted_paths import UntrustedPathError, cache_folder, private_folder
from nemo_style_aligner.wording import some_of

if TYPE_CHECKING:
    from nemo_style_aligner.data.texts import TextEncoder

logger = logging.getLogger(__name__)

SIZE_VARIABLE = "NEMO_STYLE_ALIGNER_TOKENS_GB"
"""Environment variable: how many GB of samples are kept at most; 0: none."""

LARGE = 1 << 20
"""Bytes of text. Less is tokenized within a second or two, and not kept; and a process gets no less."""

_GB = 20.0
_PACKED = 4  # times as much text is in a compressed file
_UNFINISHED = ".unfinished"
_WAIT_SECONDS = 3600.0  # for the process that tokenizes the same
_POLL_SECONDS = 0.2
_TOLD_SECONDS = 30.0
_AT_ONCE = 16 << 20  # bytes
_LIBRARIES = ("tokenizers", "transformers", "jinja2", "sentencepiece")


def tokenized(paths: Sequence[str | Path], encoder: TextEncoder) -> Samples:
    """What an encoder makes of files, one after the other; of large ones, what is kept of an earlier time.

    One process of a machine makes it, and the others wait.

    Raises:
        DataError: a file or a line is not as it should be.
    """
    files = some_of([str(path) for path in paths])
    sizes = [(path, os.path.getsize(path)) for path in map(Path, paths) if path.is_file()]
    total = sum(size * (_PACKED if path.suffix == ".gz" else 1) for path, size in sizes)
    processes, tell = min(available_cores(), total // LARGE), _progress(files, total)
    if (folder := _folder() if total >= LARGE else None) is not None:
        entry = folder / _fingerprint(paths, encoder)
        with contextlib.ExitStack() as stack:
            samples = _read(entry)
            if samples is None and (held := _hold(entry, files)) is not None:
                stack.callback(os.close, held)
                samples = _read(entry)  # another process may have made it meanwhile
                if samples is None:
                    samples = encode_files(paths, encoder, processes, tell)
                    _keep(samples, held, entry)
                    return samples
        if samples is not None:
            logger.info("%s: tokenized before, and kept in %s", files, entry)
            return samples
    return encode_files(paths, encoder, processes // ranks_on_this_machine(), tell)


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


def _fingerprint(paths: Sequence[str | Path], encoder: TextEncoder) -> str:
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


def _hold(entry: Path, files: str) -> int | None:
    """The locked file of an entry that is to be made, or that another process has just made; None if there is none.

    The kernel releases the lock when the process ends, in whatever way.
    """
    unfinished, descriptor = entry.with_name(entry.name + _UNFINISHED), None
    try:
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        waited = 0.0
        while waited < _WAIT_SECONDS:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            if not waited:
                logger.info("%s: waiting for the process that tokenizes it", files)
            activity.progress()
            time.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        raise TimeoutError(f"the process that makes it has not done so within {_WAIT_SECONDS:.0f} s")
    except OSError as error:
        logger.warning("tokenized data are not kept for the next start: %s: %s", unfinished, error)
        if descriptor is not None:
            os.close(descriptor)
        return None


def _read(entry: Path) -> Samples | None:
    """What is kept; None if there is nothing whole."""
    try:
        with open(entry, "rb") as file:
            samples = Samples.load(file)
        os.utime(entry)  # those that are used last are kept
        return samples
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - damaged files raise many kinds
        logger.warning("%s is made anew, since it cannot be read: %s", entry, error)
        with contextlib.suppress(OSError):
            entry.unlink()
        return None


def _keep(samples: Samples, held: int, entry: Path) -> None:
    """Write samples into the unfinished entry and give it its name, then remove what is too much."""
    unfinished = entry.with_name(entry.name + _UNFINISHED)
    try:
        os.ftruncate(held, 0)
        with open(held, "wb", closefd=False) as file:
            samples.save(file)
        os.fsync(held)
        os.replace(unfinished, entry)
    except OSError as error:
        logger.warning("tokenized data are not kept for the next start: %s: %s", entry, error.strerror)
        with contextlib.suppress(OSError):
            unfinished.unlink()
    with contextlib.suppress(OSError):  # another process removes the same
        _remove_old(entry.parent)


def _remove_old(folder: Path) -> None:
    """Remove what has not been used for longest, until the rest is small enough."""
    found = sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    total = 0
    for _, path in found:
        total += path.stat().st_size
        if total > _most_bytes():
            logger.info("removing %s (%s=%g)", path, SIZE_VARIABLE, _most_bytes() / 1e9)
            path.unlink(missing_ok=True)
