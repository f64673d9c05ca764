"""The contents of a training checkpoint's directory: taken from a job, written, restored to a job.

    manifest.json         what the checkpoint is; size and SHA-256 of every file
    trainer_state.json    counters, sampler positions, the layout
    random/<rank>.json    random streams of each rank
    state/                model and optimizer, a Megatron distributed checkpoint

Taking, writing and restoring are collective.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nemo_style_aligner.durable import sync_file, sync_tree
from nemo_style_aligner.engine.parallel.agreement import on_every_rank, on_first_rank
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, open_source
from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.checkpoints.directory import STATE, TRAINER_STATE
from nemo_style_aligner.trainer.checkpoints.manifest import Manifest, describe_files, read_patiently, verify_on_disk
from nemo_style_aligner.trainer.checkpoints.optimizer_state import load_optimizer, optimizer_counters, optimizer_parts
from nemo_style_aligner.trainer.checkpoints.random_states import encoded_random_states, load_random_states
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import (
    BESIDE_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    Part,
    below,
    load_sharded_tensors,
)
from nemo_style_aligner.trainer.checkpoints.sharded_writing import (
    bytes_to_write,
    nonfinite_tensors,
    own_parts,
    snapshot,
    write_tensors,
)

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.gpt import MegatronModel
    from nemo_style_aligner.trainer.models.optimizer import Optimizer

logger = logging.getLogger(__name__)

Beside = Mapping[str, "tuple[MegatronModel, Optimizer]"]
"""Models that are trained beside a job's own, and saved with it, by name."""

CheckState = Callable[[Path, Mapping[str, Any]], None]
"""Given a checkpoint and the trainer's state in it, raises if a job must not continue from it."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint's contents, still in memory.

    Attributes:
        tensors, random_states: what this rank writes. The tensors are the live ones, unless `copied`.
        trainer_state: JSON; rank 0's is written.
        size: bytes of the tensors, over all ranks.
    """

    tensors: Sequence[Part]
    random_states: str
    trainer_state: str
    size: int

    def copied(self) -> Contents:
        """The same with copies of the live tensors, which stay as they are while training goes on."""
        return dataclasses.replace(self, tensors=snapshot(self.tensors))


def take(
    model: MegatronModel,
    optimizer: Optimizer | None,
    trainer_state: Mapping[str, Any],
    step: int,
    beside: Beside | None = None,
) -> Contents:
    """The contents of a checkpoint of the state as it is now.

    Raises:
        NonFiniteError: weights or optimizer hold NaN or Inf.
        TypeError: ``trainer_state`` is not JSON.
    """
    state: dict[str, Any] = {"trainer": dict(trainer_state), "layout": _layout(model)}
    weights, moments = _weights(model), []
    if optimizer is not None:
        state["optimizer"] = optimizer_counters(optimizer)
        moments = optimizer_parts(optimizer, model)
    for name, (other, its_optimizer) in (beside or {}).items():
        weights += below(f"{BESIDE_PREFIX}{name}.", _weights(other))
        moments += below(f"{BESIDE_PREFIX}{name}.", optimizer_parts(its_optimizer, other))
        state.setdefault("beside", {})[name] = optimizer_counters(its_optimizer)
    if spoilt := nonfinite_tensors([*weights, *moments]):
        raise NonFiniteError(
            f"step {step} is not saved: NaN or Inf in {', '.join(spoilt[:5])}{' and others' * (len(spoilt) > 5)}. "
            "The earlier checkpoints are unaffected; resume from one of them, with a lower model.optim.lr"
        )
    tensors = [*own_parts(weights), *moments]
    return Contents(tensors, encoded_random_states(), json.dumps(state), bytes_to_write(tensors))


def write_contents(contents: Contents, manifest: Manifest, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write everything into ``directory``, sync it, and compare what is read back from disk.

    Args:
        manifest: its ``files`` are filled in here.
        directory: with empty folders, as `CheckpointDirectory.prepare` makes it.
        group: of all ranks; the default group where it is None.

    Raises:
        OSError: it could not be written, or what was read back differs.
    """
    state = contents.trainer_state
    on_first_rank(lambda: (directory / TRAINER_STATE).write_text(state, encoding="utf-8"), group)
    write_tensors(contents.tensors, directory / STATE, group)
    on_every_rank(lambda: _write_synced(_random_file(directory), contents.random_states), group)
    files = describe_files(directory, group)
    on_first_rank(lambda: _seal(directory, dataclasses.replace(manifest, files=files)), group)
    if problems := verify_on_disk(directory, group):
        raise OSError(f"what was read back from disk differs from what was written: {'; '.join(problems)}")


def restore(
    directory: Path,
    model: MegatronModel,
    optimizer: Optimizer | None,
    check: CheckState | None = None,
    beside: Beside | None = None,
) -> dict[str, Any]:
    """Restore a checkpoint's contents to a job; returns the trainer's state. See `CheckpointManager.load`."""
    path = directory / TRAINER_STATE
    content = read_patiently(path, functools.partial(path.read_text, encoding="utf-8"))
    try:
        state = parse_json(content)
        _ = state["trainer"].keys(), state["layout"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is not a trainer's state: {error!r}") from error
    if check is not None:
        check(directory, state["trainer"])
    restore_model(directory, model)
    if optimizer is not None:
        if "optimizer" not in state:
            raise ValueError(f"{directory} was saved without an optimizer: it cannot resume training")
        with open_source(directory) as source:
            load_optimizer(optimizer, model, state["optimizer"], source, STATE)
    for name, (other, its_optimizer) in (beside or {}).items():
        prefix = f"{BESIDE_PREFIX}{name}."
        with open_source(directory) as source:
            ignored = (MODEL_PREFIX, OPTIMIZER_PREFIX, prefix + OPTIMIZER_PREFIX)
            load_sharded_tensors(below(prefix, _weights(other)), source, STATE, ignored=ignored)
            load_optimizer(its_optimizer, other, state["beside"][name], source, STATE, prefix)
    if state["layout"] != _layout(model):
        warn_for_all_ranks(logger, "%s was saved with %s: random streams start anew", directory, state["layout"])
    else:
        load_random_states(_random_file(directory))
    return state["trainer"]


def restore_model(directory: Path, model: MegatronModel) -> None:
    """Load a checkpoint's weights, or those of its adapters, and nothing else."""
    with open_source(directory) as source:
        load_sharded_tensors(_weights(model), source, STATE, ignored=(OPTIMIZER_PREFIX, BESIDE_PREFIX))


def _weights(model: MegatronModel) -> list[Part]:
    return [part for _, parts in model.trained_parts() for part in parts]


def _write_synced(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
    sync_file(path)


def _seal(directory: Path, manifest: Manifest) -> None:
    manifest.write(directory)
    sync_tree(directory)


def _layout(model: MegatronModel) -> dict[str, int]:
    layout = model.layout
    sizes = {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "dp_size": layout.dp_size}
    return sizes | ({"cp_size": layout.cp_size} if layout.cp_size > 1 else {})


def _random_file(directory: Path) -> Path:
    return directory / "random" / f"{dist.get_rank():05d}.json"
