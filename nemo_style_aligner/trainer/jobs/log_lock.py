"""One job at a time in a log directory: two would delete or overwrite each other's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from nemo_style_aligner.errors import NO_ROOM, NotWrittenError
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, own_folder, unless_planted
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.launch.stop_signals import REQUEUE_FILE

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""Name of the lock file in the log directory. Its content says who holds the lock, or did last."""

_WAIT_SECONDS = 15.0  # for a killed predecessor to be gone: freeing much memory takes the kernel some seconds
_POLL_SECONDS = 0.2
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # ENOSYS: Lustre that is mounted without flock


def hold_log_directory(log_dir: Path, name: str, wait_seconds: float = _WAIT_SECONDS) -> None:
    """Keep other jobs out of ``log_dir`` until this process ends, however it does. For rank 0.

    This is a POSIX record lock: the kernel releases it when the process ends, child processes do not inherit it, and
    network file systems support it. Closing any descriptor of the file releases it as well, so nothing else in this
    process may open the file. Only who may write in the directory may open it: a reader's lock would keep jobs out.

    Args:
        name: the job's, for the error message of the next one.
        wait_seconds: how long to wait for a predecessor that is still exiting.

    Raises:
        ConfigError: another job holds the lock, nothing may be written there, or a neighbour could replace what is.
        NotWrittenError: there is no room.
    """
    path = log_dir / LOCK_FILE
    with writing_to(log_dir):
        make_log_directory(log_dir)
        descriptor = _open_lock(path)  # stays open; Python's descriptors close on exec
    deadline = time.monotonic() + wait_seconds
    while not _is_taken(descriptor, path):
        if time.monotonic() >= deadline:
            holder = os.read(descriptor, 1000).decode("utf-8", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"another job is using {log_dir} ({holder}), and the two would delete or overwrite each other's files: "
                f"end it, or give this one a directory of its own with exp_manager.explicit_log_dir. If its machine is "
                f"gone but the file system still holds the lock, delete {path}"
            )
        time.sleep(_POLL_SECONDS)
    (log_dir / REQUEUE_FILE).unlink(missing_ok=True)  # that the predecessor has left meanwhile
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{name} on host {socket.gethostname()}, process {os.getpid()}\n".encode())
    except OSError as error:  # a full disk: the lock counts all the same
        logger.warning("could not write to %s which job holds the lock: %s", path, error)


@contextlib.contextmanager
def writing_to(log_dir: Path) -> Iterator[None]:
    """Turn an OSError of the body into a ConfigError or a NotWrittenError that says that the directory is at fault."""
    try:
        yield
    except OSError as error:
        problem = f"the log directory {log_dir} cannot be written to ({error.filename}: {error.strerror})"
        if error.errno in NO_ROOM:
            raise NotWrittenError(f"{problem}: make room and start the job again") from error
        raise ConfigError(f"{problem}: set exp_manager.explicit_log_dir to a folder that you may write to") from error


def make_log_directory(log_dir: Path) -> None:
    """Make the directory, unless it is there; never one that everybody may write to.

    Raises:
        ConfigError: a neighbour may have put something in it, or could.
        OSError: it cannot be made.
    """
    try:
        own_folder(log_dir, make=0o775)
    except UntrustedPathError as error:
        raise ConfigError(untrusted_log_directory(log_dir, str(error))) from error


def untrusted_log_directory(log_dir: Path, reason: str) -> str:
    """The error message for a log directory in which others can plant or replace files (docs/jobs.md)."""
    return (
        f"what lies in the log directory {log_dir} would not be safe from others: {reason}; or set "
        "exp_manager.explicit_log_dir to a folder of your own, which the job makes. To go on from another user's run, "
        "name its checkpoint in exp_manager.resume_from_checkpoint"
    )


def _open_lock(path: Path) -> int:
    """Open the lock for those who may write in its directory, and close it to all others, who could lock it as well."""
    descriptor = unless_planted(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    with contextlib.suppress(PermissionError):  # it is a colleague's, who has seen to that
        os.fchmod(descriptor, 0o660 if path.parent.stat().st_mode & 0o020 else 0o600)
    return descriptor


def _is_taken(descriptor: int, path: Path) -> bool:
    """Try to take the lock; whether this process has it now. On a file system without locks it counts as taken."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning(
            "%s cannot be locked (%s): make sure that no other job uses this directory", path, error.strerror
        )
    return True
