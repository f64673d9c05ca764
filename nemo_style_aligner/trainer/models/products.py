"""Matrix products, which take nearly all the time of a training pass: on CPUs in the way that suits the processor.

- In bf16 on processors without bf16 arithmetic, which torch emulates, matrices are `widened` to fp32.
- In fp32 on AMD's processors, numpy's OpenBLAS multiplies in place of torch's MKL, in a few threads of our own, which
  sleep while they wait: docs/decisions/0005-products.md has the reasons and the figures.
- In bf16 on processors that multiply it, our own kernels compute linear layers: products with weights
  (`packed_weights`) and the weights' gradients, which are summed in fp32. Torch would first round each micro batch's
  gradient to bf16, which takes longer.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import threadpoolctl
import torch
from numpy.typing import NDArray

from nemo_style_aligner.engine.parallel.machine import computes_in_bf16, processor_model
from nemo_style_aligner.trainer.models.layer_kernels import LayerKernels, best_kernels

_AMD = ("AuthenticAMD", "HygonGenuine")
_MOST_THREADS = 8
"""With more, torch multiplies: Python hands out parts one by one, and threads would wait longer than they compute."""
_SHARED_OPERATIONS = 2**23
"""Multiplications from which on a product is worth waking threads: 0.1 ms."""
_PARTS_PER_THREAD = 2
"""Several, so that a thread whose core another process uses gets less to do."""
_SMALLEST_PART = 256
"""Rows or columns of a result, before a thread gets a second part: the other factor is packed anew for each part."""
_ELEMENTS_ADDED = 2**20
"""Numbers of a product that are added to a sum at a time: few beside the sum, and they stay in the caches."""
_ELEMENTS_ADDED_ON_GPU = 2**25
"""`_ELEMENTS_ADDED` on a GPU: 128 MiB, and enough for all of its cores."""


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` as products of matrices take it: in fp32 if it is bf16 on a processor without bf16 arithmetic, else itself.

    Products of bf16 numbers are exact in fp32 and summed in it either way. Without bf16 arithmetic torch emulates them,
    five to eight times slower than fp32 products, and far slower where a factor is transposed.
    """
    is_emulated = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _has_bf16_arithmetic()
    return x.float() if is_emulated else x


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [..., k] @ b [k, n] -> [..., n], of their dtype. Not differentiable.

    Args:
        out: contiguous; where the result goes. On GPUs it may be in fp32 whatever the factors are in.
    """
    if out is not None and out.dtype != a.dtype:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    if not _go_to_openblas(a, b):
        # A size of 1 before k may have any stride: matmul would make a batch of the rows. A view has one that fits.
        return torch.matmul(a.view(a.shape), b, out=out)
    if out is None:
        out = a.new_empty(*a.shape[:-1], b.shape[1])
    left, right, result = _array(a.flatten(0, -2)), _array(b), _array(out.flatten(0, -2))
    is_tall = result.shape[0] >= result.shape[1]

    def multiply(begin: int, end: int) -> None:
        if is_tall:
            np.matmul(left[begin:end], right, out=result[begin:end])
        else:
            np.matmul(left, right[:, begin:end], out=result[:, begin:end])

    _share_out(max(result.shape), left.size * right.shape[1], multiply)
    return out


@functools.cache
def own_kernels() -> LayerKernels | None:
    """Our kernels for bf16, where the processor multiplies it."""
    kernels = best_kernels()
    return kernels if kernels is not None and kernels.multiplies else None


def add_product(total: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
    """total += columns.T @ rows: fp32 [v, h], [n, v] and [n, h] of one dtype."""
    if total.dtype != rows.dtype:
        _add_to_wider(total, columns, rows)
        return
    if not _go_to_openblas(columns, rows):
        total.addmm_(columns.t(), rows)
        return
    left, right, result = _array(columns.t()), _array(rows), _array(total)
    step = max(1, _ELEMENTS_ADDED // total.shape[1])

    def add(begin: int, end: int) -> None:
        for first in range(begin, end, step):
            some = slice(first, min(first + step, end))
            result[some] += left[some] @ right

    _share_out(len(result), left.size * right.shape[1], add)


def _add_to_wider(total: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
    """`add_product` of bf16 factors to a sum in fp32."""
    if total.is_cuda and _adds_in_one_call():
        torch.addmm(total, columns.t(), rows, out_dtype=total.dtype, out=total)
        return
    if not total.is_cuda and (kernels := own_kernels()) is not None:
        kernels.add_product(total, columns, rows)
        return
    step = max(1, (_ELEMENTS_ADDED_ON_GPU if total.is_cuda else _ELEMENTS_ADDED) // total.shape[1])
    wider: dict[str, Any] = {"out_dtype": total.dtype} if total.is_cuda else {}  # which torch has for GPUs alone
    for some, part in zip(total.split(step), columns.split(step, 1), strict=True):
        some.add_(torch.mm(part.t(), rows, **wider))


def _go_to_openblas(*factors: torch.Tensor) -> bool:
    is_fp32 = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in factors)
    return is_fp32 and torch.get_num_threads() <= _MOST_THREADS and _prefers_openblas()


def _array(matrix: torch.Tensor) -> NDArray[Any]:
    """An array on the matrix's memory, or on a copy where OpenBLAS could not read it: numpy would use a slow loop."""
    if not (matrix.stride(1) == 1 or matrix.stride(0) == 1):
        matrix = matrix.contiguous()
    return np.asarray(_Memory(matrix)) if matrix.numel() else np.empty(matrix.shape, np.float32)


class _Memory:
    """An fp32 tensor's memory by numpy's array interface. After ``Tensor.numpy`` it could never be resized again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # the array keeps this object, and with it the memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(np.float32).str,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(tensor.element_size() * stride for stride in tensor.stride()),
        }


def _share_out(size: int, operations: int, work: Callable[[int, int], None]) -> None:
    """Call work(begin, end) for parts of 0..size, on as many threads as torch has.

    OpenBLAS's own threads wait for each other by yielding, which never gives a core to a process of another session or
    control group; beside such a process (the critic beside the actor) they were slower than MKL's.
    """
    threads = torch.get_num_threads()
    if threads == 1 or operations < _SHARED_OPERATIONS:
        work(0, size)
        return
    parts = max(threads, min(_PARTS_PER_THREAD * threads, size // _SMALLEST_PART))
    bounds = [size * i // parts for i in range(parts + 1)]
    todo = iter(list(itertools.pairwise(bounds)))  # Python's lock lets one thread at a time take the next

    def take() -> None:
        for begin, end in todo:
            work(begin, end)

    helpers = [_helpers(threads - 1).submit(take) for _ in range(threads - 1)]
    take()
    for helper in helpers:
        helper.result()


@functools.cache
def _adds_in_one_call() -> bool:
    """Whether torch on this GPU can add a bf16 product to an fp32 sum in one call: up to 2.9 the sum must be bf16."""
    total, factor = torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda")
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


@functools.cache
def _has_bf16_arithmetic() -> bool:
    return computes_in_bf16()


@functools.cache
def _prefers_openblas() -> bool:
    """Whether this is an AMD processor, torch has MKL and numpy OpenBLAS, which is then limited to one thread."""
    if not any(name in processor_model() for name in _AMD) or not torch.backends.mkl.is_available():
        return False
    openblas = threadpoolctl.ThreadpoolController().select(internal_api="openblas")
    openblas.limit(limits=1)
    return bool(openblas.lib_controllers)


@functools.lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "products", initializer=_leave_first_core, initargs=(count + 1,))


def _leave_first_core(threads: int) -> None:
    """Undo the affinity inherited from the first thread, where OpenMP has bound it to fewer cores than ``threads``."""
    is_bound = any(name in os.environ for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
    if is_bound and len(os.sched_getaffinity(0)) < threads:
        os.sched_setaffinity(0, range(os.cpu_count() or threads))  # the system keeps those that this process may use
