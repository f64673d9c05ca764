"""The directory of a job's training checkpoints: names, order, pruning. For rank 0; nothing here is collective.

The layout of a checkpoint is in `contents`; what happens to damaged and unfinished ones, in `training`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nemo_style_aligner.durable import (
    UNFINISHED,
    discard,
    publish,
    remove_path,
    require_space,
    sync_file,
)
from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError
from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, NOT_THERE, Manifest, read_patiently
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings, monitored_name

logger = logging.getLogger(__name__)

LAST = "-last"
DAMAGED = ".damaged"
STATE = "state"
TRAINER_STATE = "trainer_state.json"
_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A finished checkpoint."""

    path: Path
    manifest: Manifest


class CheckpointDirectory:
    """The checkpoints in ``path``; see `CheckpointSettings` for which are kept."""

    def __init__(self, path: Path, settings: CheckpointSettings) -> None:
        self.path = path
        self.settings = settings

    # ---- writing ----------------------------------------------------------------------------

    def prepare(self, values: Mapping[str, Any], size: int) -> tuple[Path, int]:
        """Clear leftovers, choose the next checkpoint's name, make the directory to write it into.

        Returns:
            Its path once it is complete, and its sequence number.

        Raises:
            NotWrittenError: there is no room for ``size`` bytes.
        """
        self.remove_unfinished()
        self.path.mkdir(parents=True, exist_ok=True)
        require_space(self.path, size)
        name = checkpoint_name(self.settings.filename, values)
        suffixes = re.compile(f"({re.escape(UNFINISHED)}|{re.escape(DAMAGED)}|{LAST})+$")
        taken = {suffixes.sub("", p.name) for p in self.path.iterdir()}
        versions = (name if v == 0 else f"{name}-v{v}" for v in range(len(taken) + 1))
        target = self.path / (next(n for n in versions if n not in taken) + LAST)
        (staging_of(target) / STATE).mkdir(parents=True)
        (staging_of(target) / "random").mkdir()
        return target, max((entry.manifest.sequence for entry in self.entries()), default=0) + 1

    def give_up(self, target: Path) -> int:
        """Delete what was written of a checkpoint; returns the bytes that are free then."""
        discard(staging_of(target))
        return shutil.disk_usage(self.path).free

    def publish(self, target: Path, protected: Collection[Path]) -> None:
        """Rename the verified checkpoint into place, then prune; if pruning fails, the next save makes up for it."""
        publish(staging_of(target), target)
        logger.info("saved %s", target)
        try:
            self._prune(protected)
        except OSError as error:
            logger.warning("older checkpoints could not be pruned; the next save tries again: %s", error)

    def _prune(self, protected: Collection[Path]) -> None:
        """Delete what is not among the best, the newest or ``protected``; only the newest keeps its ``-last``."""
        entries, top = self.entries(), self.settings.save_top_k
        kept = entries if top == -1 else self.rank(entries)[:top] + entries[: self.settings.save_last_n]
        for entry in entries:
            if entry not in kept and entry.path not in protected:
                discard(entry.path)
        for entry in entries[1:]:
            if entry.path.name.endswith(LAST) and entry.path.exists():
                os.rename(entry.path, entry.path.with_name(entry.path.name.removesuffix(LAST)))
        sync_file(self.path)

    def rank(self, entries: list[Entry]) -> list[Entry]:
        """Those of ``entries`` (newest first) that have a ``monitor`` value, best first; without ``monitor``, all."""
        monitor = self.settings.monitor
        if monitor is None:
            return entries
        sign = 1 if self.settings.mode == "min" else -1
        # The run may have had another monitor before, whose values compare with nothing.
        alike = [entry for entry in entries if entry.manifest.monitor == monitor]
        measured = [entry for entry in alike if entry.manifest.value is not None]
        return sorted(measured, key=lambda entry: sign * (entry.manifest.value or 0.0))

    # ---- reading ----------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The finished checkpoints, newest first. One without a readable manifest is put aside.

        Raises:
            OSError: something cannot be read now.
        """
        entries = []
        for path in read_patiently(self.path, lambda: sorted(self.path.iterdir()) if self.path.is_dir() else []):
            if path.name.endswith((UNFINISHED, DAMAGED)):
                continue
            if not read_patiently(path, functools.partial(is_training_checkpoint, path)):
                continue
            try:
                entries.append(Entry(path, Manifest.read(path)))
            except DamagedCheckpointError as error:
                put_aside(path, [str(error)])
        return sorted(entries, key=lambda entry: -entry.manifest.sequence)

    def trainer_states(self) -> dict[Path, dict[str, Any]]:
        """What each finished checkpoint keeps for the trainer, by path, newest first. Damaged ones are left out.

        Raises:
            OSError: one cannot be read now; without it, what a run needs would count as gone, and be pruned.
        """
        states = {}
        for entry in self.entries():
            path = entry.path / TRAINER_STATE
            try:
                content = read_patiently(path, functools.partial(path.read_text, encoding="utf-8"))
                states[entry.path] = parse_json(content)["trainer"]
            except (*NOT_THERE, ValueError, KeyError, TypeError) as error:
                logger.error("%s is damaged and is ignored: %s", entry.path, error)
        return states

    def damaged(self) -> list[str]:
        """Names of the checkpoints that were put aside, sorted."""
        return sorted(p.name for p in self.path.glob(f"*{DAMAGED}"))

    def remove_unfinished(self) -> None:
        """Delete what jobs were writing or deleting when they died."""
        for path in self.path.glob(f"*{UNFINISHED}"):
            logger.warning("removing %s: it was not finished", path)
            discard(path)


def is_training_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a training checkpoint, be it damaged or unfinished."""
    # One of the two suffices: a checkpoint that has lost the other is reported as damaged, not overlooked.
    return (path / STATE).is_dir() or (path / MANIFEST).is_file()


def present_name(path: Path) -> Path:
    """The path of a checkpoint that is named as it was once: it loses its ``-last`` when a newer one is saved."""
    if os.path.exists(path) or not path.name.endswith(LAST):
        return path
    return path.with_name(path.name.removesuffix(LAST))


def no_checkpoint(directory: Path) -> str:
    """What to say where `CheckpointSettings.resume_ignore_no_checkpoint` is off and there is none."""
    return (
        f"{directory} has no checkpoint to resume from: set exp_manager.resume_ignore_no_checkpoint=True to start from "
        "the beginning"
    )


def origin_in(directory: Path, named: Path) -> str:
    """How manifests in ``directory`` record a checkpoint: by its name if it is there, as the log directory may move."""
    path = named.resolve()
    return path.name if path.parent == directory.resolve() else str(path)


def had_resumed_from(manifest: Manifest, origin: str | None) -> bool:
    """Whether the run of a checkpoint had resumed from ``origin`` (`origin_in`), ``-last`` or not."""
    if manifest.resumed_from is None or origin is None:
        return False
    return manifest.resumed_from.removesuffix(LAST) == origin.removesuffix(LAST)


def staging_of(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(target.name + UNFINISHED)


def put_aside(path: Path, problems: list[str]) -> None:
    """Report a damaged checkpoint and rename it out of the way.

    Raises:
        NotWrittenError: it cannot be renamed.
    """
    aside = path.with_name(path.name + DAMAGED)
    logger.error("%s is damaged and put aside as %s: %s", path, aside.name, "; ".join(problems))
    try:
        remove_path(aside)
        os.rename(path, aside)
    except OSError as error:
        raise NotWrittenError(
            f"{path}, which is damaged, cannot be put aside: {error}. To go on from the checkpoint before, move it away"
        ) from error


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """``filename`` with its fields filled in, as Lightning does: ``{step}`` becomes ``step=7``.

    Raises:
        ValueError: a format specification that does not fit its value.
    """

    def fill(match: re.Match[str]) -> str:
        name, specification = match.group(1), (match.group(2) or ":")[1:]
        value = values.get(monitored_name(name))
        if value is None:
            return f"{name}=none"
        if isinstance(value, float) and value.is_integer() and not specification:
            value = int(value)
        try:
            return f"{name}={value:{specification}}"
        except (ValueError, TypeError) as error:
            raise ValueError(f"checkpoint_callback_params.filename: {match.group(0)} of {value!r}: {error}") from error

    template = re.sub(r"\{None(:[^{}]*)?\}-?", "", template)  # ${.monitor}, if there is none
    return _FIELD.sub(fill, template).replace("/", "_")
