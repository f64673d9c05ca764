"""Memory that can be given back to the system and taken again without a pointer changing."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping

import torch

_ALIGNMENT = 4096
# MAP_NORESERVE: Linux counts memory only as it is touched, and refuses no mapping for its size (unless
# vm.overcommit_memory is 2).
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class Arena:
    """Named tensors in one private memory mapping, zero at first.

    Physical memory is taken page by page as it is touched. `release` returns it and keeps the addresses; what is
    touched afterwards is zero again.
    """

    def __init__(self, regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, huge_pages: bool = False) -> None:
        """Map the tensors of ``regions``: name -> (shape, dtype)."""
        offsets, size = {}, 0
        for name, (shape, dtype) in regions.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._map = mmap.mmap(-1, max(size, _ALIGNMENT), flags=flags)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {size / 2**30:.1f} GiB for the generation engine ({error}); "
                "lower kv_cache_tokens to shrink its KV cache"
            ) from error
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # gigabytes read front to back: fewer page table walks
        self._tensors = {
            name: torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offsets[name]).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in regions.items()
        }
        self.num_bytes = size

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def release(self) -> None:
        """Give the memory back; everything reads as zero afterwards."""
        self._map.madvise(mmap.MADV_DONTNEED)
