"""Files that are complete or absent: write beside the target, sync to disk, rename into place."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from nemo_style_aligner.errors import NotWrittenError

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""Suffix of what is still being written or already being deleted, or was when its process died. Never read."""


def sync_file(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Force a directory with all it contains to disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync_file(Path(folder) / name)
        sync_file(Path(folder))


def publish(finished: Path, target: Path) -> None:
    """Rename ``finished`` to ``target`` and sync the rename. A file that is there is replaced atomically.

    Raises:
        OSError: it is not there; or it is, as the message then says, but a crash of the machine may undo that.
    """
    os.replace(finished, target)
    try:
        sync_file(target.parent)
    except OSError as error:
        reason = f"it is whole and has its name, which may be lost if the machine fails ({error.strerror})"
        raise OSError(error.errno, reason, str(target)) from error


def remove_path(path: Path) -> None:
    """Delete a file or a directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete what is no longer needed, if it exists. It is renamed first, so that no remainder looks complete.

    A failure is only logged: other processes may hold or delete the same files.
    """
    doomed = path if path.name.endswith(UNFINISHED) else path.with_name(path.name + UNFINISHED)
    try:
        if doomed != path:
            remove_path(doomed)  # of an earlier attempt
            os.rename(path, doomed)
        remove_path(doomed)
    except OSError as error:
        logger.warning("%s cannot be deleted now: %s", path, error)


def require_space(directory: Path, num_bytes: int) -> None:
    """Check that the file system of ``directory`` has room for ``num_bytes``.

    Raises:
        NotWrittenError: it does not.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise NotWrittenError(
            f"a checkpoint of {num_bytes:,} bytes does not fit: {free:,} bytes are free at "
            f"{directory}; make room, or keep fewer with exp_manager.checkpoint_callback_params.save_top_k"
        )
