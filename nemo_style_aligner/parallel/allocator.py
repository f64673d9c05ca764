"""How this process's memory allocator treats memory that is freed, for tensors on CPUs."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 2**25  # that glibc accepts
_KEPT_BYTES = 2**30
_LARGEST_TRIM_THRESHOLD = 2**31 - 1  # an int; -1: memory is never given back


def keep_freed_memory(more: int = 0) -> bool:
    """Have up to 1 GiB (and ``more`` bytes) of freed memory kept for the next tensors, in place of 64 MiB.

    No effect without glibc; whether there is one is returned.

    A training pass allocates the same activations again and again. Memory that was given back comes as new pages, each
    of which the kernel clears when it is first touched. Tensors larger than 32 MiB get new pages as ever. Who sets
    glibc's own variables is left alone.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = _KEPT_BYTES + more
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, kept if kept <= _LARGEST_TRIM_THRESHOLD else -1)
    return True
