"""Memory that the processes of one host share: what a rank writes, the others of its group read without any copy."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import broadcast_object

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedBuckets | None] = weakref.WeakKeyDictionary()


class _Address(NamedTuple):
    """Where other processes under the same kernel find an anonymous file, and how they recognise it."""

    boot_id: str
    path: str
    file_id: tuple[int, int]


class SharedBuckets:
    """Two buckets, used in turn: while one is read the other is written, so there is one barrier per bucket.

    The memory is an anonymous file: it is freed with the last process that maps it, however that process ends, and does
    not count against the size of /dev/shm.
    """

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap) -> None:
        self.num_bytes = len(memory) // 2
        self._group = group
        self._buckets = torch.frombuffer(memory, dtype=torch.uint8).split(self.num_bytes)
        self._turn = 0

    def next(self) -> torch.Tensor:
        """The bucket to write now, uint8 [num_bytes], shared by all ranks; all have read what it held before."""
        self._turn = 1 - self._turn
        return self._buckets[self._turn]

    def publish(self) -> None:
        """Wait until all ranks have written; the bucket can be read until the next one is published. Collective."""
        dist.barrier(self._group)


def shared_buckets(group: dist.ProcessGroup, num_bytes: int) -> SharedBuckets | None:
    """The group's buckets, each of at least ``num_bytes``; None unless all ranks run on one host. Collective.

    They are created once per group, and again when larger ones are asked for.
    """
    found = _opened.get(group)
    if group not in _opened or (found is not None and found.num_bytes < num_bytes):
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _opened[group] = found = _open(group, 2 * num_bytes)
    return found


def _open(group: dist.ProcessGroup, num_bytes: int) -> SharedBuckets | None:
    leader = dist.get_global_rank(group, 0)
    file: int | None = None
    if dist.get_rank() == leader:
        file = _create(num_bytes)
    address: _Address | None = broadcast_object(None if file is None else _address(file), leader, group)
    if dist.get_rank() != leader and address is not None:
        file = _find(address)
    memory = None if file is None else _map(file, num_bytes)
    everybody = torch.tensor(int(memory is not None))
    dist.all_reduce(everybody, dist.ReduceOp.MIN, group=group)
    if file is not None:
        os.close(file)  # the leader's only now, as the others open it through its process; the mapping stays
    return SharedBuckets(group, memory) if memory is not None and everybody else None


def _create(num_bytes: int) -> int | None:
    """A new anonymous file in memory, of zeros; None where the system has no such thing."""
    try:
        file = os.memfd_create("weights")
        os.ftruncate(file, num_bytes)
    except (AttributeError, OSError):  # not Linux; or forbidden in this container
        return None
    return file


def _address(file: int) -> _Address | None:
    status = os.fstat(file)
    try:
        return _Address(_BOOT_ID.read_text(), f"/proc/{os.getpid()}/fd/{file}", (status.st_dev, status.st_ino))
    except OSError:
        return None


def _map(file: int, num_bytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(file, num_bytes)
    except OSError:  # no room for it here; this rank must not fail by itself, as the others wait for its answer
        return None


def _find(address: _Address) -> int | None:
    """Open the file, if this process runs on the same host and may."""
    try:
        if _BOOT_ID.read_text() != address.boot_id:
            return None
        status = os.stat(address.path)  # in another PID namespace this path leads to another file
        if (status.st_dev, status.st_ino) != address.file_id:
            return None
        return os.open(address.path, os.O_RDWR)
    except OSError:
        return None
