"""Training checkpoints: everything a job needs to go on as if it had never stopped.

One directory per checkpoint below ``<log_dir>/checkpoints/``, named as ``filename`` says, the newest with
``-last`` at its end; `contents` says what is in it. It is written as ``<name>.unfinished``, read back and compared with
its checksums, and renamed; older ones are pruned after that. One whose files have changed since is put aside as
``<name>.damaged``, and the one before it is used.

All of that happens in another thread, from a copy of the state in host memory, while the job goes on
(``async_save``). At most one checkpoint is being written at a time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nemo_style_aligner.checkpoints.background import BackgroundWriter, OnEnd
from nemo_style_aligner.checkpoints.contents import Contents, restore, restore_model, take, write_contents
from nemo_style_aligner.checkpoints.directory import CheckpointDirectory, put_aside, staging_of
from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.checkpoints.manifest import Manifest, find_damage
from nemo_style_aligner.checkpoints.nemo_archive import write_nemo
from nemo_style_aligner.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.checkpoints.sharded_tensors import model_tensors
from nemo_style_aligner.checkpoints.sharded_writing import PreparedTensors, prepare
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.parallel.agreement import on_first_rank
from nemo_style_aligner.parallel.groups import all_reduce_max
from nemo_style_aligner.parallel.machine import available_memory

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel
    from nemo_style_aligner.models.optimizer import Optimizer

logger = logging.getLogger(__name__)

MayPublish = Callable[[float], bool]
"""Waits until a checkpoint may be published, for at most so many seconds; whether it may."""

RUN_SETTINGS = "run_settings"
"""Key of a checkpoint's ``trainer_state``: the settings of the start that wrote it."""

_SNAPSHOT_SHARE = 0.5  # of the memory that is free, which a copy of the state may take
_PUBLISH_POLL_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class NemoExport:
    """What a .nemo archive needs besides the weights: ``model_config.yaml`` and a tokenizer."""

    model_config: Mapping[str, Any]
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class _Save:
    """A checkpoint to be written.

    Attributes:
        target: where it will be.
        manifest: without its files.
        contents: what is in it, apart from the job that goes on if it is written in the background.
        is_archived: whether the .nemo archive is written after it.
        tokenizer_folder: the archive's; on rank 0, if there is one.
        protected, before_publishing: see `CheckpointManager.save`.
    """

    target: Path
    manifest: Manifest
    contents: Contents
    is_archived: bool
    tokenizer_folder: tempfile.TemporaryDirectory[str] | None
    protected: Collection[Path]
    before_publishing: MayPublish | None


class CheckpointManager:
    """Saves, prunes, finds and loads the checkpoints of one job. Making it is collective, and so are its methods.

    Args:
        directory: ``<log_dir>/checkpoints``, on a file system that all ranks share.
        settings: see `CheckpointSettings`.
        nemo: what to put into .nemo archives; None writes none.
        run_settings: what the job was started with, written into ``trainer_state`` under `RUN_SETTINGS`; None: nothing.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointSettings,
        nemo: NemoExport | None = None,
        run_settings: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.nemo = nemo
        self.run_settings = run_settings
        self._files = CheckpointDirectory(directory, settings)
        named = settings.resume_from_checkpoint
        self._named = Path(named).expanduser() if named else None
        self._resumed_from = str(self._named.resolve()) if self._named else None
        self._writer = BackgroundWriter()
        self._verified: Path | None = None
        self._current: Path | None = None  # what was saved or loaded last: it has the weights that the model has
        self._is_archived = False  # so has the .nemo archive
        self._is_short_of_memory = False

    @property
    def directory(self) -> Path:
        """``<log_dir>/checkpoints``."""
        return self._files.path

    # ---- saving -----------------------------------------------------------------------------

    def save(
        self,
        model: MegatronModel,
        optimizer: Optimizer | None,
        trainer_state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        *,
        protected: Collection[Path] = (),
        before_publishing: MayPublish | None = None,
        on_end: OnEnd | None = None,
    ) -> concurrent.futures.Future[None]:
        """Take a copy of the state; write it as a checkpoint, then prune, while the caller goes on.

        Waits for the checkpoint before this one first. Under ``always_save_nemo`` the archive follows, from the same
        copy. With ``async_save`` off, or where the copy does not fit into memory, this returns when all is written.

        Args:
            trainer_state: what `resume` gives back; JSON values with string keys; only rank 0's is kept.
            metrics: numbers for ``filename`` and ``monitor``; ``step`` is one of them, or of ``trainer_state``.
            protected: checkpoints that are not pruned this time, whatever the settings say.
            before_publishing: called by rank 0's writer when all files are verified, until it says that they may get
                their name; what it raises fails the save.
            on_end: called in the main thread of every rank once the checkpoint is whole, by `finish`, `poll` or the
                next save.

        Returns:
            Done when the checkpoint is whole, on this rank: before its archive is. `finish` and `poll` are for both,
            and raise the error of either.

        Raises:
            OSError: it does not fit on the disk; the earlier ones are untouched. The same, where this save or the one
                before it could not be written.
            TypeError: ``trainer_state`` is not JSON.
            FloatingPointError: weights or optimizer hold NaN or Inf, which no checkpoint shall.
        """
        started = time.monotonic()
        self.finish()
        values = {**{k: v for k, v in trainer_state.items() if isinstance(v, int | float)}, **metrics}
        step = int(values.get("step", 0))
        if self.run_settings is not None:
            trainer_state = {**trainer_state, RUN_SETTINGS: dict(self.run_settings)}
        contents = take(model, optimizer, trainer_state, step)
        target, sequence = on_first_rank(lambda: self._files.prepare(values, contents.size))
        in_background = self.settings.async_save and self._has_memory_for(contents)
        save = _Save(
            target,
            Manifest(sequence, step, _finite(values.get(self.settings.monitor or "")), {}, self._resumed_from),
            contents.copied() if in_background else contents,
            self.settings.always_save_nemo,
            self._save_tokenizer() if self.settings.always_save_nemo else None,
            protected,
            before_publishing,
        )
        on_end = on_end or (lambda _: None)
        written = self._writer.run(functools.partial(self._write, save), started, on_end, in_background=in_background)
        self._current, self._is_archived = target, save.is_archived
        return written

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole, if there is one.

        Raises:
            OSError: it could not be written; the earlier ones are untouched.
        """
        self._writer.finish()

    def poll(self) -> None:
        """`finish`, if the checkpoint is whole by now on all ranks, or failed on one. Call it now and then."""
        self._writer.poll()

    def last_chance(self) -> contextlib.AbstractContextManager[None]:
        """When the body fails, a checkpoint that is being written still gets a minute to become whole."""
        return self._writer.last_chance()

    def _has_memory_for(self, contents: Contents) -> bool:
        """Whether the ranks of every machine can hold copies of their tensors."""
        own = (socket.gethostname(), contents.bytes_of_copy(), contents.bytes_copied())
        everywhere: list[tuple[str, int, int]] = [("", 0, 0)] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        needed = sum(size for host, size, _ in everywhere if host == own[0])
        taken = sum(size for host, _, size in everywhere if host == own[0])
        suffices = needed <= _SNAPSHOT_SHARE * (available_memory() + taken)  # of what was free before the save
        if not suffices and not self._is_short_of_memory:
            logger.warning(
                "checkpoints are written before training goes on: a copy of the state takes %.1f GiB on this machine, "
                "more than %.0f%% of the memory that is free",
                needed / 2**30,
                100 * _SNAPSHOT_SHARE,
            )
        self._is_short_of_memory = not suffices
        return not all_reduce_max(int(not suffices))

    def _write(self, save: _Save, group: dist.ProcessGroup | None, is_whole: Callable[[], None]) -> None:
        """Write, verify, rename, prune, archive. Collective in ``group``; in the main thread or another one.

        Args:
            is_whole: called before the archive.
        """
        with save.tokenizer_folder or contextlib.nullcontext() as tokenizer_dir:
            try:
                write_contents(save.contents, save.manifest, staging_of(save.target), group)
            except (OSError, ValueError, TypeError) as error:
                free = on_first_rank(lambda: self._files.give_up(save.target), group)
                if isinstance(error, OSError):
                    raise OSError(
                        f"the checkpoint {save.target} was not saved: {error}. It needs {save.contents.size:,} bytes "
                        f"and some more, {free:,} bytes are free now that what was written of it is gone. The earlier "
                        "checkpoints are whole; start again when the cause is removed"
                    ) from error
                raise
            if may_publish := save.before_publishing:
                # However long it takes, no rank waits in a collective for long.
                while not on_first_rank(functools.partial(may_publish, _PUBLISH_POLL_SECONDS), group):
                    pass
            on_first_rank(lambda: self._files.publish(save.target, save.protected), group)
            is_whole()
            if save.is_archived:
                self._export(save.contents.model(), tokenizer_dir, group)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole. Not collective."""
        return self._files.newest()

    # ---- archives ---------------------------------------------------------------------------

    @property
    def exports_at_end(self) -> bool:
        """Whether the settings want an archive when training is over."""
        return (self.settings.save_nemo_on_train_end or self.settings.always_save_nemo) and self.nemo is not None

    def export_at_end(self, model: MegatronModel) -> None:
        """Training is over, and the model's state is saved: write the .nemo archive that the settings want.

        Under ``save_best_model`` it has the best checkpoint's weights: of those whose files are what was written. The
        model has its own again afterwards.
        """
        self.finish()
        if not self.exports_at_end:
            return
        best = self._better_than_current() if self.settings.save_best_model else None
        if best is not None:
            logger.info("the best checkpoint is %s", best)
            restore_model(best, model)
        elif self._is_archived:
            return
        with self._save_tokenizer() or contextlib.nullcontext() as tokenizer_dir:
            self._export(prepare(model_tensors(model.gpt)), tokenizer_dir, self._writer.group)
        if best is not None and self._current is not None:
            restore_model(self._current, model)

    def _better_than_current(self) -> Path | None:
        """The best checkpoint that is whole, None where none ranks above what the model has."""
        ranked = on_first_rank(self._files.ranked)
        if not ranked and dist.get_rank() == 0:
            logger.warning(
                "save_best_model=True, but no checkpoint has a value of monitor=%s (is nothing validated?): the "
                "archive has the newest weights",
                self.settings.monitor,
            )
        for path in ranked:
            if path == self._current:
                return None
            if self.is_whole(path):
                return path
        return None

    def _save_tokenizer(self) -> tempfile.TemporaryDirectory[str] | None:
        """Rank 0's files for the archive, in the main thread: elsewhere it would meet those that use the tokenizer.

        Anew for each archive: whoever cleans up temporary files may remove old ones.
        """
        tokenizer = self.nemo.tokenizer if self.nemo is not None else None
        if tokenizer is None or dist.get_rank() != 0:
            return None
        folder = tempfile.TemporaryDirectory(prefix="nemo_tokenizer_")
        tokenizer.save(Path(folder.name))
        return folder

    def _export(self, tensors: PreparedTensors, tokenizer_dir: str | None, group: dist.ProcessGroup | None) -> None:
        """Write the .nemo archive. Collective in ``group``."""
        if self.nemo is None:
            return
        path = self.directory / f"{self.settings.nemo_name}.nemo"
        try:
            write_nemo(
                path, tensors, self.nemo.model_config, Path(tokenizer_dir) if tokenizer_dir else None, group=group
            )
        except OSError as error:
            raise OSError(f"the archive {path} was not written: {error}. The checkpoints are whole") from error
        logger.info("saved %s", path)

    # ---- resuming ---------------------------------------------------------------------------

    def resume(self, model: MegatronModel, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """Go on from where the settings say. Returns the trainer's state, or None to start from the beginning.

        Raises:
            FileNotFoundError: there is no checkpoint, and the settings ask for one.
            DamagedCheckpointError: the one that was asked for by name is damaged, or all that there are.
        """
        if self._named is not None:
            return self.load(self._latest_resumed() or self._named, model, optimizer)
        if not self.settings.resume_if_exists:
            return None
        path = self.latest()
        damaged = on_first_rank(self._files.damaged)
        if path is None and damaged:
            raise DamagedCheckpointError(
                f"every checkpoint in {self.directory} is damaged (the log says how): {', '.join(damaged)}. Put a copy "
                "of one there, if there is any; to start from the beginning all the same, move them away or set "
                "exp_manager.resume_if_exists=False"
            )
        if path is None:
            if not self.settings.resume_ignore_no_checkpoint:
                raise FileNotFoundError(
                    f"{self.directory} has no checkpoint to resume from: set "
                    "exp_manager.resume_ignore_no_checkpoint=True to start from the beginning"
                )
            return None
        return self.load(path, model, optimizer)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are what was written, None if there is none.

        Damaged ones are reported and renamed to ``<name>.damaged``; unfinished ones are deleted.
        """
        self.finish()
        on_first_rank(self._files.remove_unfinished)
        while True:
            path = on_first_rank(self._files.newest)
            if path is None or self.is_whole(path):
                return path

    def _latest_resumed(self) -> Path | None:
        """The newest checkpoint, if a run like this one has written it: one that had resumed from the same checkpoint.

        So that a job which is requeued goes on instead of back.
        """
        while True:
            newest = on_first_rank(lambda: self._files.newest_resumed_from(self._resumed_from))
            if newest is None or self.is_whole(newest):
                break
        if newest is not None:
            logger.warning(
                "going on from %s, of a run that resumed from %s: move it away, with those before it that have, to go "
                "back once more",
                newest,
                self.settings.resume_from_checkpoint,
            )
        return newest

    def is_whole(self, path: Path) -> bool:
        """Whether the files of a checkpoint are what was written. A damaged one is reported and put aside."""
        problems = find_damage(path)
        if problems:
            on_first_rank(lambda: put_aside(path, problems))
            return False
        self._verified = path
        return True

    def trainer_states(self) -> dict[Path, dict[str, Any]]:
        """What each finished checkpoint gives back on `load`, by path, newest first. Unreadable ones are left out."""
        self.finish()
        return on_first_rank(self._files.trainer_states)

    def load(self, path: Path, model: MegatronModel, optimizer: Optimizer | None) -> dict[str, Any]:
        """Restore the model, the optimizer (None: leave it out) and random streams; returns the trainer's state.

        The random streams are restored if the layout is the one that was saved: others have other streams.

        Raises:
            FileNotFoundError: there is no checkpoint at ``path``.
            DamagedCheckpointError: its files are not what was written.
            CheckpointMismatchError: it is another model's.
        """
        self.finish()
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        if path != self._verified and (problems := find_damage(path)):
            raise DamagedCheckpointError(f"{path} cannot be loaded: {'; '.join(problems)}")
        state = restore(path, model, optimizer)
        logger.info("resumed from %s", path)
        self._current, self._is_archived = path, False
        return state


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
