"""Checks of the paths that a config names on this machine: data, log directory, checkpoint, secret.

Every rank that will use them runs them before the job starts. They create nothing and open no file that may be large.
Each function yields one line per problem.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo_style_aligner.arguments import may_not_read, why_unwritable
from nemo_style_aligner.durable import UNFINISHED
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError
from nemo_style_aligner.guard.secret import (
    AUTO,
    NONE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    SecretError,
    cannot_be_made,
    find_secret,
    user_secret_path,
)
from nemo_style_aligner.guard.trusted_paths import why_untrusted
from nemo_style_aligner.trainer.checkpoints.directory import (
    DAMAGED,
    had_resumed_from,
    no_checkpoint,
    origin_in,
    present_name,
)
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, Manifest
from nemo_style_aligner.trainer.config.loading import log_directory
from nemo_style_aligner.trainer.config.schema import Data, ExpManager, SFTData
from nemo_style_aligner.trainer.data.datasets import data_source, load_data_prefix
from nemo_style_aligner.trainer.jobs.log_lock import untrusted_log_directory
from nemo_style_aligner.trainer.telemetry.watchdog import WATCHDOG_FOLDER


def data_problems(data: SFTData | Data) -> Iterator[str]:
    """Problems of the files that ``model.data`` names: some to train on, for SFT perhaps none to validate."""
    if isinstance(data, Data):
        yield from _unreadable(lambda: load_data_prefix(data.data_prefix))
        return
    yield from _unreadable(lambda: data_source(data.train_ds.file_path, "model.data.train_ds.file_path"))
    if data.validation_ds.file_path:
        yield from _unreadable(lambda: data_source(data.validation_ds.file_path, "model.data.validation_ds.file_path"))


def _unreadable(read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except DataError as error:
        yield str(error)


def log_directory_problems(exp_manager: ExpManager) -> Iterator[str]:
    """Problems if the log directory, or the watchdog's in it, is no folder to write to, and cannot be made one."""
    keys = [name for name in ("explicit_log_dir", "exp_dir") if getattr(exp_manager, name)] or ["explicit_log_dir"]
    given = f"exp_manager.{keys[0]}={getattr(exp_manager, keys[0])}"
    try:
        log_dir = log_directory(exp_manager).absolute()
    except RuntimeError as error:  # `~` or `~user` has no home directory
        yield f"{given}: {error}"
        return
    if (reason := why_unwritable(log_dir)) is not None:
        yield (
            f"{given}: the log directory {log_dir} cannot be written to ({reason}): give a folder that you may write to"
        )
    elif (reason := why_untrusted(log_dir)) is not None:
        yield f"{given}: {untrusted_log_directory(log_dir, reason)}"
    yield from _problems_in_place_of(log_dir / WATCHDOG_FOLDER, "the watchdog cannot write")
    try:
        str(log_dir).encode()
    except UnicodeEncodeError:
        yield f"{given}: TensorBoard cannot write to {log_dir}, whose name is not UTF-8: give another folder"


def checkpoint_directory_problems(exp_manager: ExpManager) -> Iterator[str]:
    """A problem if what is in the place of the directory of checkpoints is none that can be written to."""
    with contextlib.suppress(RuntimeError):  # `log_directory_problems` reports it
        yield from _problems_in_place_of(_checkpoint_directory(exp_manager), "checkpoints cannot be written")


def resume_problems(exp_manager: ExpManager) -> Iterator[str]:
    """A problem if there must be a checkpoint and there is nothing. What there is is judged when it is loaded.

    Or if ``resume_from_checkpoint`` is no checkpoint, and the newest here is not of a run resumed from it.
    """
    named = exp_manager.resume_from_checkpoint
    if not named:
        with contextlib.suppress(OSError, RuntimeError):  # which other checks and the job itself report
            directory = _checkpoint_directory(exp_manager)
            is_empty = not os.path.isdir(directory) or not os.listdir(directory)
            if is_empty and exp_manager.resume_if_exists and not exp_manager.resume_ignore_no_checkpoint:
                yield no_checkpoint(directory)
        return
    path = Path(os.path.expanduser(str(named)))
    wanted = present_name(path) / MANIFEST
    if os.path.isfile(wanted):
        return
    with contextlib.suppress(OSError, RuntimeError):
        directory = _checkpoint_directory(exp_manager)
        own = filter(None, map(_manifest, directory.iterdir()))
        newest = max(own, key=lambda manifest: manifest.sequence, default=None)
        if newest is not None and had_resumed_from(newest, origin_in(directory, path)):
            return
    if may_not_read(wanted):
        yield f"exp_manager.resume_from_checkpoint={named}: this user may not read it"
        return
    reason = f"it has no {MANIFEST}" if os.path.isdir(path) else "there is no such folder"
    yield (
        f"exp_manager.resume_from_checkpoint={named} is not a checkpoint: {reason}; give one of the folders in "
        "<log directory>/checkpoints"
    )


def _checkpoint_directory(exp_manager: ExpManager) -> Path:
    return log_directory(exp_manager).absolute() / "checkpoints"


def _problems_in_place_of(folder: Path, problem: str) -> Iterator[str]:
    """A problem if what is in the folder's place cannot be written to. The job makes one where there is nothing."""
    if os.path.lexists(folder) and (reason := why_unwritable(folder) or why_untrusted(folder)) is not None:
        yield f"{problem} to {folder} ({reason}): make it a folder of your own, or remove it"


def _manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a finished checkpoint, None if it has none that can be read."""
    if checkpoint.name.endswith((UNFINISHED, DAMAGED)):
        return None
    try:
        return Manifest.read(checkpoint)
    except DamagedCheckpointError:  # reported when it is loaded, if it is a checkpoint
        return None


def secret_problems(token: object, key: str) -> Iterator[str]:
    """A problem if the shared secret cannot be used. The user's own may be missing: a job that needs it makes it."""
    if token is None or str(token).lower() == NONE:
        return
    try:
        is_given = str(token).lower() != AUTO or any(map(os.environ.get, (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)))
        if not is_given and not os.path.exists(path := user_secret_path()):
            if (reason := why_unwritable(path.parent)) is not None:
                yield f"{key}={AUTO}: {cannot_be_made(path, reason)}"
            return
        find_secret(str(token), key)
    except SecretError as error:
        yield str(error) if str(error).startswith(key) else f"{key}={AUTO}: {error}"
