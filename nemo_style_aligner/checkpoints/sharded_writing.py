"""Writing Megatron distributed checkpoints (`torch_dist`), by all ranks.

The format is megatron-core's, so that its tools and NeMo read what is written here. Two things differ from
``dist_checkpointing.save``:

- Writing happens in this process. megatron-core's writer starts a manager process and forks one writer per
  file, for the sake of asynchronous saving; that costs seconds and forks processes that have threads.
- What needs the live tensors (`prepare`, `snapshot`) is separate from writing (`write_tensors`), whose collectives are
  in a group of the caller's choice: a snapshot can be written in another thread while training goes on.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from nemo_style_aligner.checkpoints.sharded_tensors import ShardedTensors, build_factories, describe_failures
from nemo_style_aligner.errors import OtherRankError
from nemo_style_aligner.parallel.agreement import on_every_rank, on_first_rank
from nemo_style_aligner.telemetry import activity

_FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclasses.dataclass(frozen=True)
class PreparedTensors:
    """What this rank writes.

    Attributes:
        tensors: those of which this rank has the main replica; their ``data`` are the live tensors, or a `snapshot`.
    """

    tensors: tuple[ShardedTensor, ...]

    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(_bytes(t) for t in self.tensors)

    def below(self, prefix: str) -> PreparedTensors:
        """The tensors whose keys begin with ``prefix``."""
        return PreparedTensors(tuple(t for t in self.tensors if t.key.startswith(prefix)))

    def num_bytes_of_snapshot(self) -> int:
        """Host memory that a `snapshot` takes. torch rounds pinned memory up to powers of two."""
        return sum(1 << (_bytes(t) - 1).bit_length() if t.data.is_cuda else _bytes(t) for t in self.tensors)


def prepare(tensors: ShardedTensors) -> PreparedTensors:
    """Decide what each rank writes, and check that together they write everything exactly once. Collective.

    Tensors that several data-parallel ranks hold are divided among them, so that all write about as much.
    """
    built = {str(number): tensor for number, tensor in enumerate(build_factories(tensors.values()))}
    replicas = parallel_state.get_data_parallel_group()
    shares = determine_main_replica_uniform_distribution(built, replicas)
    distribute_main_replicas_with_precomputed_distribution(built, replicas, shares)
    sharded, _ = save_preprocess(built)
    return PreparedTensors(tuple(t for t in sharded.values() if is_main_replica(t.replica_id)))


def snapshot(prepared: PreparedTensors, already_copies: tuple[str, ...] = ()) -> PreparedTensors:
    """Copy the tensors as they are now to host memory (pinned, if they come from a GPU).

    Args:
        already_copies: key prefixes of tensors that nobody else holds: these are taken as they are.
    """
    copies = tuple(
        t if t.key.startswith(already_copies) else dataclasses.replace(t, data=_host_copy(t.data.detach()))
        for t in prepared.tensors
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies are asynchronous
    return PreparedTensors(copies)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def write_tensors(prepared: PreparedTensors, directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write into an existing, empty directory, one synced file per rank. Collective in ``group``.

    Raises:
        OtherRankError: a rank could not write; the same on every rank.
        OSError: rank 0 could not write the small files; `OtherRankError` on the others.
    """
    # By number, since several tensors may share a key (the layers of one stage).
    numbered = {str(number): tensor for number, tensor in enumerate(prepared.tensors)}
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(numbered, keep_only_main_replica=True)
    on_first_rank(lambda: _write_common(directory), group)
    try:
        dcp.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=_Writer(directory, prepared.num_bytes()),
            planner=_SavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:  # a BaseException, which handlers of Exception would miss
        raise OtherRankError(f"writing {directory}: {describe_failures(error)}") from error
    on_first_rank(lambda: save_config(_FORMAT, str(directory)), group)


class _Writer(dcp.FileSystemWriter):
    """Writes one synced file per rank, slightly larger than ``num_bytes``."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        # Without copying ahead: for a snapshot in host memory, it would only wait for a GPU's stream, in this thread.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0)
        self._num_bytes = num_bytes

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """As torch's, but raise the system's error (a quota, a file-size limit) instead of one about positions."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if cause := _system_error(error):
                raise OSError(cause.errno, cause.strerror, str(self.path)) from error
            free = shutil.disk_usage(self.path).free  # beside what has been written
            if free >= self._num_bytes:
                raise
            message = f"{os.strerror(errno.ENOSPC)} ({free:,} bytes are free)"
            raise OSError(errno.ENOSPC, message, str(self.path)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError that caused ``error``, if any: torch's archive writer fails a second time when it closes the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class _SavePlanner(MCoreSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        """As megatron-core's. Each tensor that is written counts as progress for the watchdog, however slow it is."""
        activity.progress()
        return super().resolve_data(write_item)


def _write_common(directory: Path) -> None:
    """Write the file for what is not a tensor, which the format requires: it is empty."""
    content = io.BytesIO()
    torch.save({}, content)
    (directory / COMMON_STATE_FNAME).write_bytes(content.getvalue())


def bytes_to_write(prepared: PreparedTensors, group: dist.ProcessGroup | None = None) -> int:
    """Bytes of the whole checkpoint, over all ranks. Collective in ``group``."""
    return sum(on_every_rank(prepared.num_bytes, group))


def _bytes(tensor: Any) -> int:
    return tensor.data.numel() * tensor.data.element_size()


def nonfinite_tensors(tensors: ShardedTensors) -> list[str]:
    """Keys of tensors that hold NaN or Inf on some rank, sorted, the same on every rank. Collective."""
    built = build_factories(tensors.values())
    own = {t.key for t in built if t.data.is_floating_point() and not _is_finite(t.data)}
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return sorted(set().union(*everywhere))


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    least, greatest = torch.aminmax(tensor.detach())  # both NaN if there is one; needs no memory, unlike isfinite
    return bool(least.isfinite() and greatest.isfinite())
