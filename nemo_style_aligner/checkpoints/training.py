"""Training checkpoints: everything a job needs to go on as if it had never stopped.

One directory per checkpoint below ``<log_dir>/checkpoints/``, named as ``filename`` says, the newest with
``-last`` at its end:

    manifest.json         what the checkpoint is; size and SHA-256 of every file
    trainer_state.json    counters, sampler positions, the layout
    random/<rank>.pt      random streams of each rank
    state/                model and optimizer, a Megatron distributed checkpoint

It is written as ``<name>.unfinished``, read back and compared with its checksums, and renamed; older ones are pruned
after that. One whose files have changed since is put aside as ``<name>.damaged``, and the one before it is used.

All of that happens in another thread, from a copy of the state in host memory, while the job goes on
(``async_save``). At most one checkpoint is being written at a time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import math
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nemo_style_aligner.checkpoints.background import BackgroundWriter, OnEnd, WorkTimes
from nemo_style_aligner.checkpoints.directory import (
    STATE,
    TRAINER_STATE,
    CheckpointDirectory,
    put_aside,
    staging_of,
)
from nemo_style_aligner.checkpoints.durable import on_every_rank, on_first_rank, sync_file, sync_tree
from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError, open_source
from nemo_style_aligner.checkpoints.manifest import (
    Manifest,
    describe_files,
    find_damage,
    verify_on_disk,
)
from nemo_style_aligner.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.checkpoints.optimizer_state import (
    load_optimizer,
    makes_copies,
    optimizer_counters,
    optimizer_tensors,
)
from nemo_style_aligner.checkpoints.random_states import encoded_random_states, load_random_states
from nemo_style_aligner.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.checkpoints.sharded_tensors import load_sharded_tensors, model_tensors
from nemo_style_aligner.checkpoints.sharded_writing import (
    PreparedTensors,
    bytes_to_write,
    nonfinite_tensors,
    prepare,
    snapshot,
    write_tensors,
)
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.parallel.groups import all_reduce_max
from nemo_style_aligner.parallel.machine import available_memory

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel
    from nemo_style_aligner.models.optimizer import Optimizer

logger = logging.getLogger(__name__)

_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_SNAPSHOT_SHARE = 0.5  # of the memory that is free, which a copy of the state may take


@dataclasses.dataclass(frozen=True)
class NemoExport:
    """What a .nemo archive needs besides the weights: ``model_config.yaml`` and a tokenizer."""

    model_config: Mapping[str, Any]
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class _Content:
    """All that goes into a checkpoint, apart from the job that goes on.

    Attributes:
        target: where it will be.
        manifest: without its files.
        size: bytes of its tensors, over all ranks.
        tensors, random_states: this rank's.
        trainer_state: rank 0's is written.
        protected: checkpoints that are not pruned.
        before_publishing: see `CheckpointManager.save`.
    """

    target: Path
    manifest: Manifest
    size: int
    tensors: PreparedTensors
    random_states: bytes
    trainer_state: str
    protected: Collection[Path]
    before_publishing: Callable[[], None] | None


class CheckpointManager:
    """Saves, prunes, finds and loads the checkpoints of one job. Its methods are collective.

    Args:
        directory: ``<log_dir>/checkpoints``, on a file system that all ranks share.
        settings: see `CheckpointSettings`.
        nemo: what to put into .nemo archives; None writes none.
        timeout: of collectives while a checkpoint is written in the background; torch's own unless given.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointSettings,
        nemo: NemoExport | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.settings = settings
        self.nemo = nemo
        self._files = CheckpointDirectory(directory, settings)
        self._writer = BackgroundWriter(timeout)
        self._verified: Path | None = None
        self._saved_step: int | None = None
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
        is_train_end: bool = False,
        protected: Collection[Path] = (),
        before_publishing: Callable[[], None] | None = None,
        on_end: OnEnd | None = None,
    ) -> concurrent.futures.Future[WorkTimes]:
        """Take a copy of the state; write it as a checkpoint, then prune, while the caller goes on.

        Waits for the checkpoint before this one first. The .nemo archive, if it is time for one, is written before this
        returns. With ``async_save`` off, or where the copy does not fit into memory, so is the checkpoint.

        Args:
            trainer_state: what `resume` gives back; JSON values with string keys; only rank 0's is kept.
            metrics: numbers for ``filename`` and ``monitor``; ``step`` is one of them, or of ``trainer_state``.
            is_train_end: nothing follows.
            protected: checkpoints that are not pruned this time, whatever the settings say.
            before_publishing: called by rank 0's writer when all files are verified, before they get their name; what
                it raises fails the save.
            on_end: called in the main thread of every rank once the checkpoint is whole, by `finish`, `poll` or the
                next save.

        Returns:
            Done when the checkpoint is whole, on this rank. `finish` and `poll` raise its error, if there is one.

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
        on_end = on_end or (lambda _: None)
        # Training may end right after a step that was saved anyway.
        if is_train_end and self._saved_step == step:
            work = functools.partial(_only, before_publishing)
            written = self._writer.run(work, started, on_end, in_background=True)
        else:
            content = self._settle(model, optimizer, trainer_state, values, step, protected, before_publishing)
            in_background = self.settings.async_save and self._has_memory_for(content.tensors, optimizer)
            if in_background:
                copies = snapshot(content.tensors, _copies(optimizer))
                content = dataclasses.replace(content, tensors=copies)
            work = functools.partial(self._write, content)
            written = self._writer.run(work, started, on_end, in_background=in_background)
            self._saved_step = step
        if is_train_end:
            self.finish()
        if self.settings.always_save_nemo or (is_train_end and self.settings.save_nemo_on_train_end):
            self._export(model, best=is_train_end and self.settings.save_best_model)
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

    @property
    def is_writing(self) -> bool:
        """Whether there is a checkpoint for which `finish` or `poll` have not seen the end."""
        return self._writer.is_busy

    def last_chance(self) -> contextlib.AbstractContextManager[None]:
        """When the body fails, a checkpoint that is being written still gets a minute to become whole."""
        return self._writer.last_chance()

    def _settle(
        self,
        model: MegatronModel,
        optimizer: Optimizer | None,
        trainer_state: Mapping[str, Any],
        values: Mapping[str, Any],
        step: int,
        protected: Collection[Path],
        before_publishing: Callable[[], None] | None,
    ) -> _Content:
        """All that needs the state as it is now; the tensors are the live ones."""
        state: dict[str, Any] = {"trainer": dict(trainer_state), "layout": _layout(model)}
        tensors = model_tensors(model.gpt, _PREFIX)
        if optimizer is not None:
            state["optimizer"] = optimizer_counters(optimizer)
            tensors |= optimizer_tensors(optimizer, model, _PREFIX)
        if spoilt := nonfinite_tensors(tensors):
            raise FloatingPointError(
                f"step {step} is not saved: NaN or Inf in {', '.join(spoilt[:5])}{' and others' * (len(spoilt) > 5)}. "
                "The earlier checkpoints are as they were; start from one of them, with a lower model.optim.lr"
            )
        prepared = prepare(tensors)
        size = bytes_to_write(prepared)
        text = _encode(state)
        target, sequence = on_first_rank(lambda: self._files.prepare(values, size))
        manifest = Manifest(sequence, step, _finite(values.get(self.settings.monitor or "")), {})
        random_states = encoded_random_states()
        return _Content(target, manifest, size, prepared, random_states, text, protected, before_publishing)

    def _has_memory_for(self, tensors: PreparedTensors, optimizer: Optimizer | None) -> bool:
        """Whether the ranks of every machine can hold copies of their tensors."""
        own = (socket.gethostname(), tensors.num_bytes(_copies(optimizer)))
        everywhere: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        needed = sum(size for host, size in everywhere if host == own[0])
        suffices = needed <= _SNAPSHOT_SHARE * available_memory()
        if not suffices and not self._is_short_of_memory:
            logger.warning(
                "checkpoints are written before training goes on: a copy of the state takes %.1f GiB on this machine, "
                "more than %.0f%% of the memory that is free",
                needed / 2**30,
                100 * _SNAPSHOT_SHARE,
            )
        self._is_short_of_memory = not suffices
        return not all_reduce_max(int(not suffices))

    def _write(self, content: _Content, group: dist.ProcessGroup | None) -> None:
        """Write, verify, rename, prune. Collective in ``group``; in the main thread or another one."""
        staging = staging_of(content.target)
        try:
            on_first_rank(lambda: (staging / TRAINER_STATE).write_text(content.trainer_state, encoding="utf-8"), group)
            write_tensors(content.tensors, staging / STATE, group)
            on_every_rank(lambda: _write_synced(_random_file(staging), content.random_states), group)
            files = describe_files(staging, group)
            on_first_rank(lambda: _seal(staging, dataclasses.replace(content.manifest, files=files)), group)
            if problems := verify_on_disk(staging, group):
                raise OSError(f"what was written is not what came back from disk: {'; '.join(problems)}")
        except (OSError, ValueError, TypeError) as error:
            free = on_first_rank(lambda: self._files.give_up(content.target), group)
            if isinstance(error, OSError):
                raise OSError(
                    f"the checkpoint {content.target} was not saved: {error}. It needs {content.size:,} bytes and some "
                    f"more, {free:,} bytes are free now that what was written of it is gone. The earlier checkpoints "
                    "are whole; start again when the cause is removed"
                ) from error
            raise
        _only(content.before_publishing, group)
        on_first_rank(lambda: self._files.publish(content.target, content.protected), group)

    def _export(self, model: MegatronModel, *, best: bool) -> None:
        """Write the .nemo archive, of the best checkpoint's weights or of the model's."""
        if self.nemo is None:
            return
        current, chosen = on_first_rank(lambda: self._files.newest_and_best() if best else (None, None))
        if chosen != current:
            self._load_model(chosen, model)
        with tempfile.TemporaryDirectory(prefix="nemo_tokenizer_") as folder:
            tokenizer_dir = Path(folder) if self.nemo.tokenizer is not None else None
            if self.nemo.tokenizer is not None and dist.get_rank() == 0:
                self.nemo.tokenizer.save(Path(folder))
            path = self.directory / f"{self.settings.nemo_name}.nemo"
            save_nemo(path, model, self.nemo.model_config, tokenizer_dir)
        logger.info("saved %s", path)
        if chosen != current:
            self._load_model(current, model)

    # ---- resuming ---------------------------------------------------------------------------

    def resume(self, model: MegatronModel, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """Go on from where the settings say. Returns the trainer's state, or None to start from the beginning.

        Raises:
            FileNotFoundError: there is no checkpoint, and the settings ask for one.
            DamagedCheckpointError: the one that was asked for by name is damaged, or all that there are.
        """
        if self.settings.resume_from_checkpoint:
            return self.load(Path(self.settings.resume_from_checkpoint), model, optimizer)
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
        state = json.loads((path / TRAINER_STATE).read_text(encoding="utf-8"))
        self._load_model(path, model)
        if optimizer is not None:
            if "optimizer" not in state:
                raise ValueError(f"{path} was saved without an optimizer: it cannot resume training")
            with open_source(path) as source:
                load_optimizer(optimizer, model, state["optimizer"], source, STATE, _PREFIX)
        if state["layout"] == _layout(model):
            load_random_states(_random_file(path))
        else:
            logger.warning("%s was saved with %s: random streams start anew", path, state["layout"])
        logger.info("resumed from %s", path)
        self._saved_step = state["trainer"].get("step")
        return state["trainer"]

    def _load_model(self, path: Path | None, model: MegatronModel) -> None:
        if path is None:
            raise FileNotFoundError(f"{self.directory} has no checkpoint")
        with open_source(path) as source:
            load_sharded_tensors(model_tensors(model.gpt, _PREFIX), source, STATE, ignored=("optimizer.",))


def _copies(optimizer: Optimizer | None) -> tuple[str, ...]:
    """Beginnings of the keys of tensors that nobody else holds."""
    return (_OPTIMIZER_PREFIX,) if optimizer is not None and makes_copies(optimizer) else ()


def _only(action: Callable[[], None] | None, group: dist.ProcessGroup | None) -> None:
    """Rank 0 does this, if there is anything to do, and the others wait for it."""
    on_first_rank(action or (lambda: None), group)


def _write_synced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync_file(path)


def _seal(staging: Path, manifest: Manifest) -> None:
    manifest.write(staging)
    sync_tree(staging)


def _layout(model: MegatronModel) -> dict[str, int]:
    layout = model.layout
    return {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "dp_size": layout.dp_size}


def _random_file(directory: Path) -> Path:
    return directory / "random" / f"{dist.get_rank():05d}.pt"


def _encode(content: Any) -> str:
    _check_keys(content, "trainer_state")
    return json.dumps(content)


def _check_keys(value: Any, where: str) -> None:
    """JSON would turn other keys into strings without a word."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: only strings come back from JSON as they were")
            _check_keys(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, f"{where}[{index}]")


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
