"""Training checkpoints: everything a job needs to continue as if it had never stopped.

One directory per checkpoint below ``<log_dir>/checkpoints/``, named as ``filename`` says, the newest with
``-last`` at its end; `contents` says what is in it. It is written as ``<name>.unfinished``, read back and compared with
its checksums, and renamed; then older ones are pruned. A checkpoint whose files have changed when a job resumes is put
aside as ``<name>.damaged``, and the one before it is used.

With ``async_save``, a checkpoint is written in another thread, from a copy of the state in host memory, while the job
goes on. At most one checkpoint is being written at a time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.engine.parallel.groups import all_reduce_max
from nemo_style_aligner.engine.parallel.machine import available_memory
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.errors import NotWrittenError, UserError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.checkpoints.background import BackgroundWriter, OnEnd
from nemo_style_aligner.trainer.checkpoints.contents import (
    Beside,
    CheckState,
    Contents,
    restore,
    restore_model,
    take,
    write_contents,
)
from nemo_style_aligner.trainer.checkpoints.directory import (
    CheckpointDirectory,
    had_resumed_from,
    no_checkpoint,
    origin_in,
    present_name,
    put_aside,
    staging_of,
)
from nemo_style_aligner.trainer.checkpoints.manifest import Manifest, find_damage
from nemo_style_aligner.trainer.checkpoints.nemo_archive import write_nemo
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import HEAD_PREFIX, MODEL_PREFIX, Part
from nemo_style_aligner.trainer.checkpoints.sharded_writing import bytes_of_snapshot, own_parts, snapshot
from nemo_style_aligner.wording import some_of

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.gpt import MegatronModel
    from nemo_style_aligner.trainer.models.optimizer import Optimizer

logger = logging.getLogger(__name__)

MayPublish = Callable[[float], bool]
"""Waits at most the given number of seconds until a checkpoint may be published; returns whether it may."""

RUN_SETTINGS = "run_settings"
"""Key in ``trainer_state`` of the settings that the job which wrote the checkpoint was started with."""

_SNAPSHOT_SHARE = 0.5  # share of the free memory that a copy of the state may take
_PUBLISH_POLL_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class NemoExport:
    """What a .nemo archive needs besides the weights: ``model_config.yaml`` and a tokenizer.

    ``is_adapter``: of a model with adapters, the archive has these alone; otherwise its weights are merged with them.
    """

    model_config: Mapping[str, Any]
    tokenizer: Tokenizer | None
    is_adapter: bool = False


class NoCheckpointError(UserError, FileNotFoundError):
    """There is no checkpoint where one is asked for."""

    exit_status = 1


class CheckpointManager:
    """Saves, prunes, finds and loads the checkpoints of one job.

    Constructing it is collective, and so are its methods, unless they say otherwise.

    Args:
        directory: ``<log_dir>/checkpoints``, on a file system that all ranks share.
        settings: see `CheckpointSettings`.
        nemo: what to put into .nemo archives; None writes none.
        run_settings: what the job was started with, written into ``trainer_state`` under `RUN_SETTINGS`; None: nothing.

    Attributes:
        beside: models that are trained beside the job's own, and saved and resumed with it.
    """

    beside: Beside

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
        self.beside = {}
        self._files = CheckpointDirectory(directory, settings)
        named = settings.resume_from_checkpoint
        self._named = Path(named).expanduser() if named else None
        self._resumed_from = origin_in(directory, self._named) if self._named else None
        self._writer = BackgroundWriter()
        self._verified: Path | None = None  # last found undamaged: `load` does not check it again
        self._current: Path | None = None  # saved or loaded last: at the end, it has the model's weights
        self._is_archived = False  # whether the .nemo archive has the weights of `_current`
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

        Waits for the previous save first. Under ``always_save_nemo`` the archive follows, from the same copy. With
        ``async_save`` off, or if the copy does not fit into memory, this returns once everything is written.

        Args:
            trainer_state: what `resume` will return; JSON values with string keys; only rank 0's is kept.
            metrics: numbers for ``filename`` and ``monitor``; ``step`` is here or in ``trainer_state``.
            protected: checkpoints that are not pruned this time, whatever the settings say.
            before_publishing: called by rank 0's writer once all files are verified, again and again until it returns
                True; then the checkpoint is renamed into place. What it raises fails the save.
                It has a time limit of its own.
            on_end: called in the main thread of every rank once the checkpoint and its archive are complete, by
                `finish`, `poll` or the next save, or by this one if it does not write in the background.

        Returns:
            A future that is done when the checkpoint is complete on this rank, before its archive is. `finish` and
            `poll` cover both, and raise the error of either.

        Raises:
            OSError: it does not fit on the disk, or it or the previous one could not be written; earlier ones are
                untouched.
            TypeError: ``trainer_state`` is not JSON.
            ValueError: ``filename`` has a format specification that does not fit its value.
            NonFiniteError: weights or optimizer hold NaN or Inf; nothing is written.
        """
        started = time.monotonic()
        self.finish()
        monitor = self.settings.monitor
        values = {**{k: v for k, v in trainer_state.items() if isinstance(v, int | float)}, **metrics}
        step = int(values.get("step", 0))
        if self.run_settings is not None:
            trainer_state = {**trainer_state, RUN_SETTINGS: dict(self.run_settings)}
        contents = take(model, optimizer, trainer_state, step, self.beside)
        try:
            target, sequence = on_first_rank(lambda: self._files.prepare(values, contents.size))
        except OSError as error:
            raise NotWrittenError(
                f"step {step} was not saved: {error}. The earlier checkpoints are intact; start again once the cause "
                "is fixed"
            ) from error
        in_background = self.settings.async_save and self._has_memory_for(contents)
        manifest = Manifest(sequence, step, _finite(values.get(monitor or "")), {}, self._resumed_from, monitor)
        contents = contents.copied() if in_background else contents
        archived = self._archived(model, contents) if self.settings.always_save_nemo else []
        write = functools.partial(self._write, target, manifest, contents, archived, protected, before_publishing)
        written = self._writer.run(write, started, on_end or (lambda _: None), in_background=in_background)
        self._current, self._is_archived = target, self.settings.always_save_nemo
        return written

    def finish(self) -> None:
        """Wait for the checkpoint that is being written and its archive, if there are any.

        Raises:
            OSError: one of them could not be written; earlier checkpoints are untouched.
        """
        self._writer.finish()

    def poll(self) -> None:
        """`finish`, if the save has ended on all ranks, or failed on one. Call it now and then."""
        self._writer.poll()

    def last_chance(self) -> contextlib.AbstractContextManager[None]:
        """If the body fails, give a checkpoint that is being written another minute to become complete."""
        return self._writer.last_chance()

    def _has_memory_for(self, contents: Contents) -> bool:
        """Whether every machine has memory for its ranks' copies of their tensors."""
        own = socket.gethostname(), bytes_of_snapshot(contents.tensors)
        everywhere: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        needed = sum(size for host, size in everywhere if host == own[0])
        suffices = needed <= _SNAPSHOT_SHARE * available_memory()
        if not suffices and not self._is_short_of_memory:
            logger.warning(
                "training waits while checkpoints are written: a copy of the state takes %.1f GiB on this machine, "
                "more than %.0f%% of the free memory",
                needed / 2**30,
                100 * _SNAPSHOT_SHARE,
            )
        self._is_short_of_memory = not suffices
        return not all_reduce_max(int(not suffices))

    def _write(
        self,
        target: Path,
        manifest: Manifest,
        contents: Contents,
        archived: Sequence[Part],
        protected: Collection[Path],
        before_publishing: MayPublish | None,
        group: dist.ProcessGroup | None,
        is_whole: Callable[[], None],
    ) -> None:
        """Write, verify, rename, prune, archive. Collective in ``group``, in any thread.

        Args:
            target: the checkpoint's path once it is complete.
            manifest: without its files.
            archived: what the archive gets, if there is to be one.
            protected, before_publishing: see `save`.
            is_whole: called once the checkpoint is complete, before the archive is written.
        """
        with self._given_up_on_failure(target, contents.size, group):
            write_contents(contents, manifest, staging_of(target), group)
        if before_publishing is not None:
            # Polled, so that no rank waits in one collective for long, however long it takes.
            # For the watchdog it is progress that all of them are there: the wait has a limit of its own.
            while not on_first_rank(functools.partial(before_publishing, _PUBLISH_POLL_SECONDS), group):
                activity.progress()
        with self._given_up_on_failure(target, contents.size, group):
            on_first_rank(lambda: self._files.publish(target, protected), group)
        is_whole()
        if self.settings.always_save_nemo:
            self._export(archived, group)

    def _archived(self, model: MegatronModel, contents: Contents) -> list[Part]:
        """What an archive beside a checkpoint gets: copies, but for weights that are never trained."""
        if not self._merges(model):
            return [part for part in contents.tensors if part.key.startswith(MODEL_PREFIX)]
        parts = own_parts(model.merged_parts())
        heads = snapshot(part for part in parts if part.key.startswith(HEAD_PREFIX))
        return [part for part in parts if not part.key.startswith(HEAD_PREFIX)] + heads

    def _merges(self, model: MegatronModel) -> bool:
        return bool(model.adapters) and self.nemo is not None and not self.nemo.is_adapter

    @contextlib.contextmanager
    def _given_up_on_failure(self, target: Path, size: int, group: dist.ProcessGroup | None) -> Iterator[None]:
        """If the body fails, delete what was written, and say so with the cause. Collective in ``group``."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            free = on_first_rank(lambda: self._files.give_up(target), group)
            if isinstance(error, OSError):
                raise NotWrittenError(
                    f"saving the checkpoint {target} failed: {error}. It needs a little more than {size:,} bytes; "
                    f"{free:,} bytes are free now that its partial files are deleted. The earlier checkpoints are "
                    "intact; start again once the cause is fixed"
                ) from error
            raise

    def newest(self) -> Path | None:
        """The newest finished checkpoint, whose files may be damaged; None if there is none. Not collective."""
        entries = self._files.entries()
        return entries[0].path if entries else None

    # ---- archives ---------------------------------------------------------------------------

    @property
    def exports_at_end(self) -> bool:
        """Whether the settings want an archive when training is over."""
        return (self.settings.save_nemo_on_train_end or self.settings.always_save_nemo) and self.nemo is not None

    def export_at_end(self, model: MegatronModel) -> None:
        """Write the .nemo archive, if the settings want one, after training, when the model's state has been saved.

        Under ``save_best_model`` it has the weights of the best undamaged checkpoint, if this run has saved or loaded
        any. Afterwards, the model has its own again.
        """
        self.finish()
        if not self.exports_at_end:
            return
        current = self._current
        # Without one, any checkpoint that is there is another run's.
        best = self._better_than_current() if self.settings.save_best_model and current is not None else None
        if best is not None:
            logger.info("the best checkpoint is %s", best)
            restore_model(best, model)
        elif self._is_archived:
            return
        trained = [part for _, parts in model.trained_parts() for part in parts]
        self._export(own_parts(model.merged_parts() if self._merges(model) else trained), self._writer.group)
        if best is not None and current is not None:
            restore_model(current, model)

    def _better_than_current(self) -> Path | None:
        """The best undamaged checkpoint; None if none ranks above the one with the model's weights."""
        ranked = self._files.rank(on_first_rank(self._files.entries))
        if not ranked and dist.get_rank() == 0:
            logger.warning(
                "save_best_model=True, but no checkpoint has a value of monitor=%s (is nothing validated?): the "
                "archive has the newest weights",
                self.settings.monitor,
            )
        for entry in ranked:
            if entry.path == self._current:
                return None
            if self.is_whole(entry.path):
                return entry.path
        return None

    def _export(self, tensors: Sequence[Part], group: dist.ProcessGroup | None) -> None:
        """Write the .nemo archive. Collective in ``group``."""
        if self.nemo is None:
            return
        path = self.directory / f"{self.settings.nemo_name}.nemo"
        try:
            write_nemo(path, tensors, self.nemo.model_config, self.nemo.tokenizer, group=group)
        except OSError as error:
            raise NotWrittenError(f"writing the archive {path} failed: {error}. The checkpoints are intact") from error
        logger.info("saved %s", path)

    # ---- resuming ---------------------------------------------------------------------------

    def resume(
        self, model: MegatronModel, optimizer: Optimizer | None, check: CheckState | None = None
    ) -> dict[str, Any] | None:
        """Resume from where the settings say. Returns the trainer's state, or None to start from the beginning.

        ``check`` is called before anything is loaded.

        Raises:
            NoCheckpointError: there is no checkpoint, and the settings ask for one.
            DamagedCheckpointError: the one that the settings name is damaged, or all that exist are.
        """
        if (named := self._named) is not None:
            start = self._latest_resumed() or on_first_rank(lambda: present_name(named))
            self._warn_of_rivals(start)
            return self.load(start, model, optimizer, check)
        if not self.settings.resume_if_exists:
            self._warn_of_rivals(None)
            return None
        if (path := self.latest()) is not None:
            return self.load(path, model, optimizer, check)
        if damaged := on_first_rank(self._files.damaged):
            raise DamagedCheckpointError(
                f"every checkpoint in {self.directory} is damaged (the log says how): {', '.join(damaged)}. Put an "
                "intact copy of one there if you have one; to start from the beginning anyway, move them away or set "
                "exp_manager.resume_if_exists=False"
            )
        if not self.settings.resume_ignore_no_checkpoint:
            raise NoCheckpointError(no_checkpoint(self.directory))
        return None

    def latest(self) -> Path | None:
        """The newest undamaged checkpoint, None if there is none.

        Damaged ones are reported and renamed to ``<name>.damaged``; unfinished ones are deleted.
        """
        self.finish()
        on_first_rank(self._files.remove_unfinished)
        return self._newest_whole(lambda _: True)

    def _latest_resumed(self) -> Path | None:
        """The newest undamaged checkpoint, if its run had resumed from the one that ``resume_from_checkpoint`` names.

        A job that is requeued then goes on from it, instead of going back again.
        """
        newest = self._newest_whole(lambda newest: had_resumed_from(newest, self._resumed_from))
        if newest is not None:
            logger.warning(
                "continuing from %s, written by a run that resumed from %s: to start from the latter again, move away "
                "the former and all other checkpoints of such runs",
                newest,
                self.settings.resume_from_checkpoint,
            )
        return newest

    def _newest_whole(self, is_wanted: Callable[[Manifest], bool]) -> Path | None:
        """The newest undamaged checkpoint, if it is wanted, and no newer one is not. Damaged ones are put aside."""
        while (entries := on_first_rank(self._files.entries)) and is_wanted(entries[0].manifest):
            if self.is_whole(entries[0].path):
                return entries[0].path
        return None

    def _warn_of_rivals(self, start: Path | None) -> None:
        """Warn of checkpoints that are no part of this run's past, which ``start`` ends, and that may beat its own."""
        settings = self.settings
        if settings.monitor is None or not (settings.save_top_k > 0 or settings.save_best_model):
            return
        entries = on_first_rank(self._files.entries)
        newer = itertools.takewhile(lambda e: start is None or e.path.resolve() != start.resolve(), entries)
        if rivals := [entry.path.name for entry in self._files.rank(list(newer))]:
            warn_for_all_ranks(
                logger,
                "%s has checkpoints of another run, or another course of this one: %s. They are ranked by monitor=%s "
                "together with this run's, and the best may be one of them. Move them away, or give another "
                "exp_manager.explicit_log_dir",
                self.directory,
                some_of(rivals),
                settings.monitor,
            )

    def is_whole(self, path: Path) -> bool:
        """Whether a checkpoint's files are what was written. A damaged checkpoint is reported and put aside."""
        problems = find_damage(path)
        if problems:
            on_first_rank(lambda: put_aside(path, problems))
            return False
        self._verified = path
        return True

    def trainer_states(self) -> dict[Path, dict[str, Any]]:
        """What `load` would return for each finished checkpoint, by path, newest first, without damaged ones."""
        self.finish()
        return on_first_rank(self._files.trainer_states)

    def load(
        self, path: Path, model: MegatronModel, optimizer: Optimizer | None, check: CheckState | None = None
    ) -> dict[str, Any]:
        """Restore the model, the optimizer (None: leave it out) and random streams; returns the trainer's state.

        The random streams are restored only if the parallel layout is the one that was saved.

        Raises:
            NoCheckpointError: there is no checkpoint at ``path``.
            DamagedCheckpointError: its files are not what was written.
            CheckpointMismatchError: it is another model's.
            ValueError: it was saved without an optimizer, and one is given.
        """
        self.finish()
        if not path.is_dir():
            raise NoCheckpointError(f"there is no checkpoint at {path}")
        if path != self._verified and (problems := find_damage(path)):
            raise DamagedCheckpointError(f"{path} cannot be loaded: {'; '.join(problems)}")
        state = restore(path, model, optimizer, check, self.beside)
        logger.info("resumed from %s", path)
        self._current, self._is_archived = path, False
        return state


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
