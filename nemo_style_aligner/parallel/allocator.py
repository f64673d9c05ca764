"""How this process's memory allocator gets memory and what it does when it is freed, for tensors on CPUs."""

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
_STRICT = "2"  # of vm.overcommit_memory: what is reserved counts as used


@functools.cache
def keep_freed_memory() -> bool:
    """Have freed memory kept for the next tensors, in place of 64 MiB of it, and come in huge pages from now on.

    A training pass allocates the same activations again and again. Memory that was given back comes as new pages, each
    of which the kernel clears when it is first touched: huge ones several times faster, where the system lets programs
    ask for them (``/sys/kernel/mm/transparent_hugepage/enabled``). Tensors larger than 32 MiB get new pages as ever.

    Once per process. No effect without glibc, or where its own variables are set. Returns whether freed memory is kept.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name.startswith("MALLOC_") for name in os.environ):
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


def _may_reserve() -> bool:
    """Whether addresses cost nothing as long as nothing is written there."""
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        with open("/proc/sys/vm/overcommit_memory", encoding="ascii") as file:
            return file.read().strip() != _STRICT
    except OSError:
        return False


def _reserve(libc: ctypes.CDLL, size: int) -> None:
    """Let the heap grow by ``size`` bytes, ask for huge pages there, and leave them to the allocator.

    The heap is one block of addresses that never shrinks, so that what tensors get later comes from there.
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
