"""Sets how this process's memory allocator (glibc's) takes and gives back memory, for tensors on CPUs."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource

import psutil

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 2**25  # that glibc accepts
_MOST_MAPPINGS = 65536  # glibc's own choice
_HUGE_PAGE = 2**21
_STRICT = "2"  # value of vm.overcommit_memory: reserved memory counts as used


@functools.cache
def keep_freed_memory() -> bool:
    """Keep all freed memory for later tensors, instead of at most 64 MiB, and use huge pages from now on.

    A training pass allocates the same activations again and again. Memory that was given back returns as new pages,
    each of which the kernel clears on first touch. Huge pages make that several times faster, where the system lets
    programs request them (``/sys/kernel/mm/transparent_hugepage/enabled``). Where no heap can be reserved
    (`_may_reserve`), tensors larger than 32 MiB still get new pages each time.

    Once per process. No effect without glibc's allocator, or if its own variables are set. Returns whether freed memory
    is kept.
    """
    is_tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    is_replaced = "malloc" in os.environ.get("LD_PRELOAD", "")  # tcmalloc, jemalloc, mimalloc
    if is_tuned or is_replaced or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    if _may_reserve():
        _reserve(libc, psutil.virtual_memory().total // 2)
    return True


class _AllocatorState(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def unused_memory() -> int:
    """Bytes of this process's memory that nothing uses: freed, and kept for later tensors.

    Objects of Python that have memory of their own count as unused. 0 where the allocator gives no account (glibc
    before 2.33).
    """
    account = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if account is None:
        return 0
    account.restype = _AllocatorState
    state, memory = account(), psutil.Process().memory_info()
    return max(0, int(memory.rss - memory.shared - state.uordblks - state.hblkhd))


def _may_reserve() -> bool:
    """Whether reserving addresses costs nothing as long as nothing is written there."""
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as file:
            return file.read().strip() != _STRICT
    except OSError:
        return False


def _reserve(libc: ctypes.CDLL, size: int) -> None:
    """Grow the heap by ``size`` bytes, request huge pages for them, and hand them to the allocator.

    The heap is one range of addresses and never shrinks (`keep_freed_memory`), so later tensors lie in it.
    """
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_MMAP_MAX, 0)  # from the heap, not by a mapping of its own
    block = libc.malloc(size)
    libc.mallopt(_MMAP_MAX, _MOST_MAPPINGS)
    if block:
        begin = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(begin, (block + size) // _HUGE_PAGE * _HUGE_PAGE - begin, mmap.MADV_HUGEPAGE)
        libc.free(block)
