"""Temporary folders that do not outlive their process for long, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.trusted_paths import temporary_base

_PREFIX = "nemo_style_aligner.temporary."  # nobody else's: what it names is removed


@contextlib.contextmanager
def temporary_folder(contents: str) -> Iterator[Path]:
    """A folder of this user's alone, in ``TMPDIR`` or ``/tmp``, that is removed at the end.

    Each is locked by the process that uses it. A process that is killed takes its lock with it, and leaves the folder
    to the next call of the same user.

    Args:
        contents: what is put there, for the message.

    Raises:
        NotWrittenError: it cannot be made.
        UntrustedPathError: others can replace what lies there.
    """
    try:
        base = temporary_base()
        _remove_left_behind(base)
        folder, lock = _make(base)
    except OSError as error:  # Python says which folders it has tried
        raise NotWrittenError(
            f"{contents} cannot be unpacked ({error.strerror}): name a folder for temporary files, with room in it, in "
            "TMPDIR"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(base: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(None, _PREFIX, base))
        # Until it is locked, another process may take it for one left behind.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_left_behind(base: str) -> None:
    for folder in Path(base).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, or another user's
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
