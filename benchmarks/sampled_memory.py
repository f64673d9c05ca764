"""The most memory that a piece of code needs while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

import psutil
import torch
import torch.distributed as dist


def peak_extra_bytes(action: Callable[[], None]) -> int:
    """The most memory that this process holds during ``action`` beyond what it held before; on a GPU, its tensors.

    Collective on a CPU, where ranks begin together.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator kept from before would hide what is needed
    dist.barrier()
    with sampled_memory() as peak:
        before = peak[0]
        action()
    return max(0, peak[0] - before)


@contextlib.contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """A list of one number, the highest resident memory seen since, which a thread updates every millisecond."""
    process, done = psutil.Process(), threading.Event()
    peak = [process.memory_info().rss]

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
