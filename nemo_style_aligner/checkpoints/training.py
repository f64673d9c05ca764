"""Training checkpoints: everything a job needs to go on as if it had never stopped.

One directory per checkpoint below ``<log_dir>/checkpoints/``, named as ``filename`` says, the newest with
``-last`` at its end:

    manifest.json         what the checkpoint is; size and SHA-256 of every file
    trainer_state.json    counters, sampler positions, the layout
    random/<rank>.pt      random streams of each rank
    state/                model and optimizer, a Megatron distributed checkpoint

It is written as ``<name>.unfinished``, read back and compared with its checksums, and renamed; older ones are pruned
after that. One whose files have changed since is put aside as ``<name>.damaged``, and the one before it is used.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from nemo_style_aligner.checkpoints.durable import (
    UNFINISHED,
    on_every_rank,
    on_first_rank,
    publish,
    remove_path,
    require_space,
    sync_file,
    sync_tree,
)
from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError, open_source
from nemo_style_aligner.checkpoints.manifest import (
    Manifest,
    describe_files,
    find_damage,
    verify_on_disk,
)
from nemo_style_aligner.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.checkpoints.optimizer_state import load_optimizer, optimizer_counters, optimizer_tensors
from nemo_style_aligner.checkpoints.random_states import load_random_states, save_random_states
from nemo_style_aligner.checkpoints.sharded_tensors import (
    bytes_to_write,
    load_sharded_tensors,
    model_tensors,
    nonfinite_tensors,
    save_sharded_tensors,
)
from nemo_style_aligner.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nemo_style_aligner.models.gpt import MegatronModel
    from nemo_style_aligner.models.optimizer import Optimizer

logger = logging.getLogger(__name__)

_LAST = "-last"
_DAMAGED = ".damaged"
_STATE = "state"
_TRAINER_STATE = "trainer_state.json"
_PREFIX = "model."
_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """``exp_manager.checkpoint_callback_params`` and the resume keys of ``exp_manager``.

    Attributes:
        filename: name of a checkpoint; ``{step}`` becomes ``step=7``, ``{val_loss:.3f}`` ``val_loss=0.123``.
        monitor: metric that ranks checkpoints; None ranks the newer above the older.
        mode: whether a small or a large metric is good.
        save_top_k: keep the best k; 0 keeps none for its metric, -1 keeps all.
        save_last_n: keep the newest n whatever their metric. Two, so that there is one to fall back on.
        save_nemo_on_train_end: write ``<nemo_name>.nemo`` when training ends.
        always_save_nemo: write it with every checkpoint.
        save_best_model: what is written at the end is the best checkpoint's model instead of the last.
        nemo_name: see above [exp_manager.name].
        resume_if_exists: go on from the newest checkpoint.
        resume_ignore_no_checkpoint: start anew if there is none, instead of raising an error.
        resume_from_checkpoint: go on from this checkpoint, whatever there is besides.
    """

    filename: str = "megatron_gpt-{step}"
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    save_top_k: int = 1
    save_last_n: int = 2
    save_nemo_on_train_end: bool = True
    always_save_nemo: bool = False
    save_best_model: bool = False
    nemo_name: str = "megatron_gpt"
    resume_if_exists: bool = True
    resume_ignore_no_checkpoint: bool = True
    resume_from_checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"exp_manager.checkpoint_callback_params.mode={self.mode!r}: choose min or max")
        if self.save_top_k < -1:
            raise ValueError(f"exp_manager.checkpoint_callback_params.save_top_k={self.save_top_k}: -1 keeps all")
        if self.save_last_n < 1:
            raise ValueError("exp_manager.checkpoint_callback_params.save_last_n must be at least 1")

    @classmethod
    def from_config(cls, exp_manager: Mapping[str, Any]) -> CheckpointSettings:
        """Read the ``exp_manager`` section. Keys that are absent or null take the defaults."""
        fields = {field.name for field in dataclasses.fields(cls)}
        keys = {**(exp_manager.get("checkpoint_callback_params") or {})}
        keys |= {key: exp_manager.get(key) for key in fields if key.startswith("resume_")}
        keys["nemo_name"] = exp_manager.get("name")
        return cls(**{key: value for key, value in keys.items() if key in fields and value is not None})


@dataclasses.dataclass(frozen=True)
class NemoExport:
    """What a .nemo archive needs besides the weights: ``model_config.yaml`` and a tokenizer."""

    model_config: Mapping[str, Any]
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    manifest: Manifest


class CheckpointManager:
    """Saves, prunes, finds and loads the checkpoints of one job. Its methods are collective.

    Args:
        directory: ``<log_dir>/checkpoints``, on a file system that all ranks share.
        settings: see `CheckpointSettings`.
        nemo: what to put into .nemo archives; None writes none.
    """

    def __init__(self, directory: Path, settings: CheckpointSettings, nemo: NemoExport | None = None) -> None:
        self.directory = Path(directory)
        self.settings = settings
        self.nemo = nemo
        self._verified: Path | None = None
        self._saved_step: int | None = None

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
    ) -> None:
        """Write a checkpoint, then prune; write the .nemo archive if it is time.

        Args:
            trainer_state: what `resume` gives back; JSON values with string keys; only rank 0's is kept.
            metrics: numbers for ``filename`` and ``monitor``; ``step`` is one of them, or of ``trainer_state``.
            is_train_end: nothing follows.
            protected: checkpoints that are not pruned this time, whatever the settings say.

        Raises:
            OSError: it could not be written or does not fit on the disk; the earlier ones are untouched.
            TypeError: ``trainer_state`` is not JSON.
            FloatingPointError: weights or optimizer hold NaN or Inf, which no checkpoint shall.
        """
        values = {**{k: v for k, v in trainer_state.items() if isinstance(v, int | float)}, **metrics}
        step = int(values.get("step", 0))
        # Training may end right after a step that was saved anyway.
        if not (is_train_end and self._saved_step == step):
            self._write(model, optimizer, trainer_state, values, step, protected)
            self._saved_step = step
        if self.settings.always_save_nemo or (is_train_end and self.settings.save_nemo_on_train_end):
            self._export(model, best=is_train_end and self.settings.save_best_model)

    def _write(
        self,
        model: MegatronModel,
        optimizer: Optimizer | None,
        trainer_state: Mapping[str, Any],
        values: Mapping[str, Any],
        step: int,
        protected: Collection[Path],
    ) -> None:
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
        size = bytes_to_write(tensors)
        target, sequence = on_first_rank(lambda: self._prepare(values, size))
        staging = target.with_name(target.name + UNFINISHED)
        value = _finite(values.get(self.settings.monitor or ""))
        try:
            on_first_rank(lambda: _write_json(staging / _TRAINER_STATE, state))
            save_sharded_tensors(tensors, staging / _STATE)
            on_every_rank(lambda: save_random_states(_random_file(staging)))
            files = describe_files(staging)
            on_first_rank(lambda: _seal(staging, Manifest(sequence, step, value, files)))
            if problems := verify_on_disk(staging):
                raise OSError(f"what was written is not what came back from disk: {'; '.join(problems)}")
        except (OSError, ValueError, TypeError) as error:
            free = on_first_rank(lambda: self._give_up(staging))
            if isinstance(error, OSError):
                raise OSError(
                    f"the checkpoint {target} was not saved: {error}. It needs {size:,} bytes and some more, "
                    f"{free:,} bytes are free now that what was written of it is gone. The earlier checkpoints are "
                    "whole; start again when the cause is removed"
                ) from error
            raise
        on_first_rank(lambda: self._publish(staging, target, protected))

    def _prepare(self, values: Mapping[str, Any], size: int) -> tuple[Path, int]:
        """Rank 0: clear leftovers, choose the name, make the directory to write into."""
        self._remove_unfinished()
        self.directory.mkdir(parents=True, exist_ok=True)
        require_space(self.directory, size)
        name = checkpoint_name(self.settings.filename, values)
        taken = {p.name.removesuffix(_DAMAGED).removesuffix(_LAST) for p in self.directory.iterdir()}
        versions = (name if v == 0 else f"{name}-v{v}" for v in range(len(taken) + 1))
        target = self.directory / (next(n for n in versions if n not in taken) + _LAST)
        (self.directory / (target.name + UNFINISHED) / _STATE).mkdir(parents=True)
        return target, max((entry.manifest.sequence for entry in self._entries()), default=0) + 1

    def _give_up(self, staging: Path) -> int:
        """Rank 0: give a full disk its room back; the bytes that are free then."""
        remove_path(staging)
        return shutil.disk_usage(self.directory).free

    def _publish(self, staging: Path, target: Path, protected: Collection[Path]) -> None:
        """Rank 0: rename the verified checkpoint into place, and only then prune."""
        publish(staging, target)
        logger.info("saved %s", target)
        self._prune(protected)

    def _prune(self, protected: Collection[Path]) -> None:
        """Rank 0: delete what is neither among the best nor among the newest; only the newest keeps its ``-last``."""
        entries = self._entries()
        kept = self._best(entries) + entries[: self.settings.save_last_n]
        for entry in entries:
            if entry not in kept and entry.path not in protected:
                remove_path(entry.path)
        for entry in entries[1:]:
            if entry.path.name.endswith(_LAST) and entry.path.exists():
                os.rename(entry.path, entry.path.with_name(entry.path.name.removesuffix(_LAST)))
        sync_file(self.directory)

    def _best(self, entries: list[_Entry]) -> list[_Entry]:
        """The ``save_top_k`` best of ``entries`` (newest first), best first."""
        if self.settings.monitor is None:
            ranked = entries
        else:
            sign = 1 if self.settings.mode == "min" else -1
            measured = [entry for entry in entries if entry.manifest.value is not None]
            ranked = sorted(measured, key=lambda entry: sign * (entry.manifest.value or 0.0))
        return entries if self.settings.save_top_k == -1 else ranked[: self.settings.save_top_k]

    def _export(self, model: MegatronModel, *, best: bool) -> None:
        """Write the .nemo archive, of the best checkpoint's weights or of the model's."""
        if self.nemo is None:
            return
        current, chosen = on_first_rank(lambda: self._current_and_best() if best else (None, None))
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

    def _current_and_best(self) -> tuple[Path | None, Path | None]:
        entries = self._entries()
        best = self._best(entries)
        return entries[0].path, best[0].path if best and self.settings.save_top_k > 0 else entries[0].path

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
        damaged = on_first_rank(lambda: sorted(p.name for p in self.directory.glob(f"*{_DAMAGED}")))
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
        on_first_rank(self._remove_unfinished)
        while True:
            path = on_first_rank(self._newest)
            if path is None or self.is_whole(path):
                return path

    def is_whole(self, path: Path) -> bool:
        """Whether the files of a checkpoint are what was written. A damaged one is reported and put aside."""
        problems = find_damage(path)
        if problems:
            on_first_rank(lambda: _put_aside(path, problems))
            return False
        self._verified = path
        return True

    def trainer_states(self) -> dict[Path, dict[str, Any]]:
        """What each finished checkpoint gives back on `load`, by path, newest first. Unreadable ones are left out."""
        return on_first_rank(self._trainer_states)

    def load(self, path: Path, model: MegatronModel, optimizer: Optimizer | None) -> dict[str, Any]:
        """Restore the model, the optimizer (None: leave it out) and random streams; returns the trainer's state.

        The random streams are restored if the layout is the one that was saved: others have other streams.

        Raises:
            FileNotFoundError: there is no checkpoint at ``path``.
            DamagedCheckpointError: its files are not what was written.
            CheckpointMismatchError: it is another model's.
        """
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        if path != self._verified and (problems := find_damage(path)):
            raise DamagedCheckpointError(f"{path} cannot be loaded: {'; '.join(problems)}")
        state = json.loads((path / _TRAINER_STATE).read_text(encoding="utf-8"))
        self._load_model(path, model)
        if optimizer is not None:
            if "optimizer" not in state:
                raise ValueError(f"{path} was saved without an optimizer: it cannot resume training")
            with open_source(path) as source:
                load_optimizer(optimizer, model, state["optimizer"], source, _STATE, _PREFIX)
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
            load_sharded_tensors(model_tensors(model.gpt, _PREFIX), source, _STATE, ignored=("optimizer.",))

    # ---- the directory (rank 0) -------------------------------------------------------------

    def _entries(self) -> list[_Entry]:
        """The finished checkpoints, newest first. One without a readable manifest is put aside."""
        entries = []
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else []:
            if not (path / _STATE).is_dir() or path.name.endswith((UNFINISHED, _DAMAGED)):
                continue
            try:
                entries.append(_Entry(path, Manifest.read(path)))
            except DamagedCheckpointError as error:
                _put_aside(path, [str(error)])
        return sorted(entries, key=lambda entry: -entry.manifest.sequence)

    def _trainer_states(self) -> dict[Path, dict[str, Any]]:
        states = {}
        for entry in self._entries():
            try:
                content = (entry.path / _TRAINER_STATE).read_text(encoding="utf-8")
                states[entry.path] = json.loads(content)["trainer"]
            except (OSError, ValueError, KeyError) as error:
                logger.error("%s is damaged and not considered: %s", entry.path, error)
        return states

    def _newest(self) -> Path | None:
        entries = self._entries()
        return entries[0].path if entries else None

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(f"*{UNFINISHED}"):
            logger.warning("removing %s: its writer did not finish", path)
            remove_path(path)


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """``filename`` with its fields filled in, as Lightning does: ``{step}`` becomes ``step=7``.

    Raises:
        ValueError: a format specification that does not fit its value.
    """

    def fill(match: re.Match[str]) -> str:
        name, specification = match.group(1), (match.group(2) or ":")[1:]
        value = values.get(name)
        if value is None:
            return f"{name}=none"
        if isinstance(value, float) and value.is_integer() and not specification:
            value = int(value)
        try:
            return f"{name}={value:{specification}}"
        except (ValueError, TypeError) as error:
            raise ValueError(f"checkpoint_callback_params.filename: {match.group(0)} of {value!r}: {error}") from error

    return _FIELD.sub(fill, template).replace("/", "_")


def _put_aside(path: Path, problems: list[str]) -> None:
    aside = path.with_name(path.name + _DAMAGED)
    logger.error("%s is damaged and put aside as %s: %s", path, aside.name, "; ".join(problems))
    remove_path(aside)
    os.rename(path, aside)


def _seal(staging: Path, manifest: Manifest) -> None:
    manifest.write(staging)
    sync_tree(staging)


def _layout(model: MegatronModel) -> dict[str, int]:
    layout = model.layout
    return {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "dp_size": layout.dp_size}


def _random_file(directory: Path) -> Path:
    return directory / "random" / f"{dist.get_rank():05d}.pt"


def _write_json(path: Path, content: Any) -> None:
    _check_keys(content, "trainer_state")
    path.write_text(json.dumps(content), encoding="utf-8")


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
