"""Triton's kernels where they can be had: one place decides for the engine and for training passes."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, own_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")


def with_triton(make: Callable[[], T], gpu: torch.device, what: str) -> T | None:
    """What ``make`` makes with Triton's kernels, with ``gpu`` current; None, and a warning, where it cannot be had.

    Args:
        make: compiles and checks kernels; may import modules that import Triton. May raise anything.
        what: runs without Triton's kernels then, in the warning's words.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: torch's functions would fail, too: no memory is left, or the GPU
            computes nothing any more.
    """
    try:
        if importlib.util.find_spec("triton") is None:
            raise ImportError("Triton is not installed")
        _require_own_cache()
        with torch.cuda.device(gpu):
            capability = torch.cuda.get_device_capability(gpu)
            if capability < (8, 0):
                raise RuntimeError(f"compute capability {capability[0]}.{capability[1]} has no bf16 on tensor cores")
            return make()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever Triton, its compilers and the driver come up with
        torch.cuda.synchronize(gpu)  # raises the error that an aborted kernel has left behind
        _warn(f"{what} without Triton's kernels: {type(error).__name__}: {error}")
        return None


@functools.cache
def _require_own_cache() -> None:
    """Make sure that the compiled code that Triton finds on disk, and executes, is this user's or root's.

    Raises:
        UntrustedPathError: others could have put it there.
    """
    from triton import knobs

    try:
        own_folder(knobs.cache.dir, strict=True, make=0o700)
    except UntrustedPathError as error:
        raise UntrustedPathError(
            f"code in {knobs.cache.dir} would be executed, but {error}; or set TRITON_CACHE_DIR to a folder that only "
            "you and root can change, as those above it"
        ) from error


@functools.cache
def _warn(message: str) -> None:
    """Once for all dtypes and engines."""
    logger.warning(message)
