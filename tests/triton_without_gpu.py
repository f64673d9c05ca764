"""Compiles Triton's kernels for a GPU that is not there: they are compiled where they would be started."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SHARED_MEMORY = 101_376
"""Bytes that a block of threads may have on GPUs of compute capability 8.6, 8.9 and 12.0; others have more."""


class Compiled:
    """A kernel that is compiled when it is called."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel, self._capability = kernel, capability

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._kernel.run, grid=grid, warmup=True)

    def variants(self) -> list[Any]:
        """What was compiled so far."""
        return list(self._kernel.device_caches[self._capability][0].values())


def compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: int, cache: Path, names: Mapping[ModuleType, Sequence[str]]
) -> dict[str, Compiled]:
    """Replace kernels of modules, named without ``_kernel``, by such that are compiled for ``capability`` (90: 9.0)."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        """Of a GPU that nothing is started on."""

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(driver, "_active", Driver())
    kernels = {}
    for module, some in names.items():
        for name in some:
            kernels[name] = Compiled(getattr(module, f"{name}_kernel"), capability)
            monkeypatch.setattr(module, f"{name}_kernel", kernels[name])
    return kernels


def check_machine_code(compiled: Any, directory: Path) -> None:
    """There is some, it fits into a multiprocessor, and its threads need no memory in place of registers."""
    from triton import knobs

    assert compiled.metadata.shared <= SHARED_MEMORY
    path = directory / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.findall(r"STACK:(\d+)", usage.stdout) == ["0"], compiled.src.constants
