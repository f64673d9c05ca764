"""Products of matrices, where nearly all of a training pass goes: on CPUs in the way that suits the processor.

- In bf16 on processors without bf16 arithmetic, which torch emulates, matrices are `widened` to fp32.
- In fp32 on AMD's processors numpy multiplies, with the OpenBLAS of its wheels, instead of the MKL of torch's, in
  a few threads of ours, which sleep while they wait: docs/decisions/0005-products.md has the reasons and the figures.
- In bf16 on processors with bf16 arithmetic torch's library rearranges weights for each product. Those of frozen models
  stay rearranged, where memory has room for it: `PackedWeight`.
- Gradients of weights in bf16 are added up in fp32 by code of ours where the processor has dot products of bf16, but no
  tiles: torch would round each micro batch's to bf16 first, which takes longer.
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

from nemo_style_aligner.models.layer_kernels import LayerKernels, best_kernels
from nemo_style_aligner.native.compilation import usable_kernels
from nemo_style_aligner.parallel.machine import (
    available_memory,
    computes_in_bf16,
    processor_model,
    ranks_on_this_machine,
)

_AMD = ("AuthenticAMD", "HygonGenuine")
_MOST_THREADS = 8
"""Of ours. Python hands out parts one after the other: many threads would wait for theirs longer than they compute."""
_SHARED_OPERATIONS = 2**23
"""Multiplications that are worth the waking of a thread: 0.1 ms of them."""
_PARTS_PER_THREAD = 2
"""So that a thread whose core another process takes gets less to do."""
_SMALLEST_PART = 256
"""Rows or columns of a result. For each part the other factor is packed anew."""
_ELEMENTS_ADDED = 2**20
"""What is added to a sum at a time: it is small beside it, and stays in the caches."""
_PACKED_SHARE = 1 / 16
"""Of the memory that is free before the first weight is packed, for all of a rank's packed weights."""
_ROWS = 1024  # that packed weights are laid out for; they serve any number
_ELEMENTS_ADDED_ON_GPU = 2**25
"""The same on a GPU: 128 MiB, and enough for all of its cores."""


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` as products of matrices take it: in fp32 if it is bf16 on a processor without bf16 arithmetic, else itself.

    Products of bf16 matrices are exact in fp32 and summed in it either way. Torch emulates them there, five to
    eight times slower than fp32 products, and far slower where a factor is transposed.
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
        return torch.matmul(a, b, out=out)
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


class PackedWeight:
    """A frozen weight as torch's library multiplies with it, besides the weight itself. Results have the same bits."""

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None
        self._packed_of: tuple[int, int] | None = None  # where the weight was, and its version

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """For `product_of_packed`: weight [n, k], packed as it is now; None where that cannot be."""
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _packs_weights():
            return None
        now = (weight.data_ptr(), weight._version)
        if self._packed_of != now:
            self._packed_of, is_new = now, self._packed is None
            self._packed = _packed(weight) if not is_new or _takes_memory(weight.nbytes) else None
        return self._packed


def product_of_packed(a: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """a [..., k], of at least one row, @ weight.T -> [..., n]. Not differentiable."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")
    return out


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


@functools.cache
def _packs_weights() -> bool:
    """Whether torch has here what its compiler packs frozen weights with, and it computes what it should."""
    if not _has_bf16_arithmetic() or not torch.backends.mkldnn.is_available():
        return False
    draw = torch.Generator().manual_seed(1)
    weight, *factors = (torch.randn(n, 4100, generator=draw).bfloat16() for n in (96, 1, 33, 300))
    try:
        packed = _packed(weight)
        return all(torch.equal(product_of_packed(a, packed), a @ weight.t()) for a in factors)
    except (AttributeError, RuntimeError):
        return False


_room_for_packed: float | None = None


def _takes_memory(size: int) -> bool:
    """Whether there is room for ``size`` bytes more of packed weights; if so, they are taken."""
    global _room_for_packed
    if _room_for_packed is None:
        _room_for_packed = _PACKED_SHARE * available_memory() / ranks_on_this_machine()
    if size > _room_for_packed:
        return False
    _room_for_packed -= size
    return True


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
    """`add_product` of bf16."""
    if total.is_cuda and _adds_in_one_call():
        torch.addmm(total, columns.t(), rows, out_dtype=total.dtype, out=total)
        return
    if not total.is_cuda and (kernels := _kernels_that_add()) is not None:
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
    """The same memory, if OpenBLAS can read it as it lies: numpy has a slow loop of its own for everything else."""
    if not (matrix.stride(1) == 1 or matrix.stride(0) == 1):
        matrix = matrix.contiguous()
    return np.asarray(_Memory(matrix)) if matrix.numel() else np.empty(matrix.shape, np.float32)


class _Memory:
    """An fp32 tensor's, by numpy's array interface. After ``Tensor.numpy`` its storage could never be resized again."""

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
    """work(begin, end) of parts of 0..size, on as many threads as torch has.

    OpenBLAS's own threads wait for each other by yielding, which gives a core to no process of another session or
    control group; beside such a process (the critic beside the actor) they were slower than MKL's.
    """
    threads = torch.get_num_threads()
    if threads == 1 or operations < _SHARED_OPERATIONS:
        work(0, size)
        return
    parts = max(threads, min(_PARTS_PER_THREAD * threads, size // _SMALLEST_PART))
    bounds = [size * i // parts for i in range(parts + 1)]
    todo = iter(list(itertools.pairwise(bounds)))  # threads take the next under Python's lock

    def take() -> None:
        for begin, end in todo:
            work(begin, end)

    helpers = [_helpers(threads - 1).submit(take) for _ in range(threads - 1)]
    take()
    for helper in helpers:
        helper.result()


@functools.cache
def _kernels_that_add() -> LayerKernels | None:
    """Ours, where they are faster than torch's library: it has tiles to itself."""
    kernels = best_kernels()
    if kernels is None or not kernels.adds_products or "amx" in usable_kernels(torch.bfloat16):
        return None
    return kernels


@functools.cache
def _adds_in_one_call() -> bool:
    """Whether torch on this GPU adds a product of bf16 to a sum in fp32: up to 2.9 it wants one of bf16."""
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
    """Whether this is an AMD processor, torch has MKL for it, and numpy OpenBLAS, which then computes in one thread."""
    if not any(name in processor_model() for name in _AMD) or not torch.backends.mkl.is_available():
        return False
    openblas = threadpoolctl.ThreadpoolController().select(internal_api="openblas")
    openblas.limit(limits=1)
    return bool(openblas.lib_controllers)


@functools.lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "products", initializer=_leave_first_core, initargs=(count + 1,))


def _leave_first_core(threads: int) -> None:
    """Where OpenMP has bound the process's first thread to a core, which this one has inherited."""
    is_bound = any(name in os.environ for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))
    if is_bound and len(os.sched_getaffinity(0)) < threads:
        os.sched_setaffinity(0, range(os.cpu_count() or threads))  # the system leaves those that this process may use
