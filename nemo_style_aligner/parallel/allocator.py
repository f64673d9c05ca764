"""How this process's memory allocator treats memory that is freed, for tensors on CPUs."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 2**25  # that glibc accepts
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Have up to 1 GiB of freed memory kept for the next tensors, in place of 64 MiB; no effect without glibc.

    A training pass allocates the same activations again and again. Memory that was given back comes as new pages, each
    of which the kernel clears when it is first touched. Tensors larger than 32 MiB get new pages as ever. Who sets
    glibc's own variables is left alone.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
