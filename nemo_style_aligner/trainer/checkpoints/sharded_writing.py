"""Writing Megatron distributed checkpoints (`torch_dist`), by all ranks.

The format is megatron-core's, so that its tools and NeMo read what is written here. ``dist_checkpointing.save`` itself
would start a manager process and fork one writer per file, for the sake of asynchronous saving. Here, what needs the
live tensors (`own_parts`, `snapshot`) is separate from writing (`write_tensors`), whose collectives are in a group of
the caller's choice: a snapshot can be written in another thread while training goes on.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_every_rank, on_first_rank
from nemo_style_aligner.errors import OtherRankError
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import Part

_FORMAT = CheckpointingConfig("torch_dist", 1)


def own_parts(parts: Iterable[Part]) -> list[Part]:
    """The parts that this rank writes, of those that every replica's rank has, or each with the same experts."""
    every = list(parts)
    others = _dealt((part for part in every if not part.is_of_expert), _replicas())
    of_experts = (part for part in every if part.is_of_expert)
    return others + _dealt(of_experts, parallel_state.get_expert_data_parallel_group())


def _replicas() -> dist.ProcessGroup:
    """The ranks that have the same weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _dealt(parts: Iterable[Part], group: dist.ProcessGroup) -> list[Part]:
    """This rank's share of the parts, of which every rank of the group has a copy.

    All of these ranks write about as much: the largest part first, each goes to the rank with the least so far.
    """
    loads, own = [0] * dist.get_world_size(group), []
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        owner = loads.index(min(loads))
        if part.is_main:
            loads[owner] += part.num_bytes
            if owner == dist.get_rank(group):
                own.append(part)
    return own


def snapshot(parts: Iterable[Part]) -> list[Part]:
    """Copies of the parts as they are now, in host memory (pinned, if they come from a GPU)."""
    copies = [dataclasses.replace(part, data=_host_copy(part.data)) for part in parts]
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the copies are asynchronous
    return copies


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def bytes_of_snapshot(parts: Iterable[Part]) -> int:
    """Host memory that a `snapshot` takes. torch rounds pinned memory up to powers of two."""
    return sum(1 << (part.num_bytes - 1).bit_length() if part.data.is_cuda else part.num_bytes for part in parts)


def write_tensors(parts: Sequence[Part], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write into an existing, empty directory, one synced file per rank. Collective in ``group``.

    Args:
        parts: those that this rank writes; all ranks' together are whole tensors.

    Raises:
        OtherRankError: a rank could not write; the same on every rank.
        OSError: rank 0 could not write the small files; `OtherRankError` on the others.
    """
    on_first_rank(lambda: _write_common(directory), group)
    try:
        writer = _Writer(directory, sum(part.num_bytes for part in parts))
        dcp.save({}, storage_writer=writer, planner=_Planner(parts), process_group=group)
    except CheckpointException as error:  # a BaseException, which handlers of Exception would miss
        failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise OtherRankError(f"writing {directory}: {failures}") from error
    on_first_rank(lambda: save_config(_FORMAT, str(directory)), group)


class _Planner(dcp.DefaultSavePlanner):
    """Has this rank's parts written; torch checks that all ranks' parts together are whole tensors."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {(part.key, torch.Size(part.offsets)): part for part in parts}

    def create_local_plan(self) -> dcp.SavePlan:
        self.plan = dcp.SavePlan([_item(part) for part in self._parts.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        activity.progress()  # each tensor that is written, however slow it is
        index = write_item.index
        return self._parts[index.fqn, index.offset].data  # type: ignore[index]


def _item(part: Part) -> WriteItem:
    offsets, size = torch.Size(part.offsets), torch.Size(part.shape)
    chunk = ChunkStorageMetadata(offsets, part.data.size())
    data = TensorWriteData(chunk, TensorProperties(part.data.dtype), size)
    return WriteItem(MetadataIndex(part.key, offsets), WriteItemType.SHARD, tensor_data=data)


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


def _write_common(directory: Path) -> None:
    """Write the file for what is not a tensor, which the format requires: it is empty."""
    content = io.BytesIO()
    torch.save({}, content)
    (directory / COMMON_STATE_FNAME).write_bytes(content.getvalue())


def bytes_to_write(parts: Iterable[Part], group: dist.ProcessGroup | None = None) -> int:
    """Bytes of the whole checkpoint, over all ranks. Collective in ``group``."""
    return sum(on_every_rank(lambda: sum(part.num_bytes for part in parts), group))


def nonfinite_tensors(parts: Iterable[Part]) -> list[str]:
    """Keys of tensors that hold NaN or Inf on some rank, sorted, the same on every rank. Collective."""
    own = {part.key for part in parts if part.data.is_floating_point() and not _is_finite(part.data)}
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return sorted(set().union(*everywhere))


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    least, greatest = torch.aminmax(tensor)  # both NaN if there is one; needs no memory, unlike isfinite
    return bool(least.isfinite() and greatest.isfinite())
