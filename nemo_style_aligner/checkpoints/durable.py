"""Files that are whole or not there: write beside, sync to disk, rename into place."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from nemo_style_aligner.parallel.groups import PATIENCE_SECONDS, broadcast_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNFINISHED = ".unfinished"
"""Suffix of what is still being written or already being deleted. A leftover of a killed process; never read."""


_REPLACED = ".replaced"  # suffix of a directory that has made room for its successor, behind a dot before its name


class OtherRankError(OSError):
    """Another rank could not read or write; says which, and why."""


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 and give every rank its result, or an error if it failed. Collective.

    Args:
        group: of all ranks; the default group unless given.

    Raises:
        OSError, ValueError, TypeError: what ``action`` raised, on rank 0; `OtherRankError` on the others.
    """
    result, failure = _attempt(action) if dist.get_rank() == 0 else (None, None)
    result, message = broadcast_object((result, str(failure) if failure else None), group=group)
    if failure is not None:
        raise failure
    if message is not None:
        raise OtherRankError(f"rank 0: {message}")
    return result  # type: ignore[return-value]


def patiently_on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """`on_first_rank` of what may take long: however long it does, no rank waits in a collective for more than seconds.

    ``action`` runs in a thread of its own and takes part in no collective.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "first-rank") as thread:
        future = thread.submit(action) if dist.get_rank() == 0 else None

        def has_ended() -> bool:
            assert future is not None
            return bool(concurrent.futures.wait([future], PATIENCE_SECONDS).done)

        while not on_first_rank(has_ended, group):
            pass
        return on_first_rank(lambda: future.result(), group)  # type: ignore[union-attr]


def patiently_on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """`on_every_rank` of what may take long, and on one rank longer than on others: as `patiently_on_first_rank`."""
    thread = concurrent.futures.ThreadPoolExecutor(1, "every-rank")
    try:
        future = thread.submit(action)
        while not all(on_every_rank(lambda: not concurrent.futures.wait([future], PATIENCE_SECONDS).not_done, group)):
            pass
        return on_every_rank(future.result, group)
    finally:
        thread.shutdown(wait=False)  # an error of another rank need not wait for this one's action


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``action`` on every rank and give every rank all results, or an error if one failed. Collective.

    Args:
        group: of all ranks; the default group unless given.

    Raises:
        OSError, ValueError, TypeError: what ``action`` raised on this rank; `OtherRankError` on the others.
    """
    result, failure = _attempt(action)
    gathered: list[tuple[T | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, str(failure) if failure else None), group=group)
    if failure is not None:
        raise failure
    messages = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(gathered) if message is not None]
    if messages:
        raise OtherRankError("; ".join(messages))
    return [value for value, _ in gathered]  # type: ignore[misc]


def _attempt(action: Callable[[], T]) -> tuple[T | None, OSError | ValueError | TypeError | None]:
    """What can go wrong with files and their contents; any other error is one of the program's."""
    try:
        return action(), None
    except (OSError, ValueError, TypeError) as error:
        return None, error


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
    """Rename into place, for good. An existing file is replaced in the same instant.

    An existing directory cannot be replaced in one step: it is moved aside first and deleted after. Whoever is killed
    in between leaves nothing at ``target``; `put_back` makes up for it.
    """
    put_back(target)
    aside = target.with_name(f".{target.name}{_REPLACED}")
    if target.is_dir():
        os.rename(target, aside)
    try:
        os.replace(finished, target)
    except OSError:
        put_back(target)
        raise
    sync_file(target.parent)
    if aside.exists():
        discard(aside)


def put_back(target: Path) -> None:
    """Undo, or complete, what a `publish` that was killed has left of replacing ``target``."""
    aside = target.with_name(f".{target.name}{_REPLACED}")
    if not aside.exists():
        return
    if target.exists():
        discard(aside)
    else:
        logger.warning("%s is put back: whoever was replacing it was killed", target)
        os.rename(aside, target)
        sync_file(target.parent)


def put_all_back(folder: Path) -> None:
    """`put_back` of everything in a folder."""
    for aside in folder.glob(f".*{_REPLACED}"):
        put_back(aside.with_name(aside.name[1:].removesuffix(_REPLACED)))


def remove_path(path: Path) -> None:
    """Delete a file or a directory tree, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete what nobody needs any more, if it exists. It loses its name first: nothing is left of it that looks whole.

    What cannot be deleted is logged. It is no reason to fail: others may hold or delete the same files.
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
        OSError: it has not.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise OSError(
            f"a checkpoint of {num_bytes:,} bytes does not fit: {free:,} bytes are free at "
            f"{directory}; make room, or keep fewer with exp_manager.checkpoint_callback_params.save_top_k"
        )
