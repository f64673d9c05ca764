"""How fast devices are: tables of GPUs, with their source, and what a machine's own trial gave.

The rates of H100 and H200 are fits to kernels that NVIDIA measured with TensorRT-LLM 1.3.0rc20 (the package
aiconfigurator-core 0.12.0, Apache-2.0): of 19,584 products in bf16, ``max(bytes / bandwidth, operations / products) +
kernel`` is off by 9% on average; all-reduces are those of 8 GPUs. The shares of that rate that whole passes reach are
this project's own, measured on one H100 (docs/performance.md).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemo_style_aligner.engine.parallel.detection import LOOPBACK
from nemo_style_aligner.wording import counted

Curve = tuple[tuple[float, float], ...]
"""Points (bytes, seconds), ascending."""

_NVLINK: Curve = ((1 << 10, 3.4e-6), (1 << 17, 10e-6), (1 << 20, 35e-6), (1 << 22, 79e-6), (1 << 24, 197e-6))
_NVLINK += ((1 << 26, 575e-6), (1 << 28, 2.1e-3))
_SUMMED = (1 << 10, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes that ranks of a CPU add up in a trial


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: a GPU, or a process's share of a CPU.

    Attributes:
        source: of the numbers, for reports.
        memory: bytes.
        bandwidth: bytes per second, reading weights and keys in decoding.
        products: floating-point operations per second of large products of matrices.
        kernel: seconds that a kernel takes at least, beyond its reading or computing.
        forward_share, training_share: of ``products``, what passes forward, and forward and backward, reach.
        decoding_factor: times the seconds of a pass in decoding that follow from these; on a CPU without computing.
        all_reduce: seconds by bytes, between devices of one machine.
        network: bytes per second of each device, between machines.
        host: bytes per second between device and host memory.
        reserved: bytes that no model gets: the driver's, libraries', fragments.
        logits: bytes of a chunk of logits (docs/performance.md, Memory).
        is_cpu: cores, which do not compute while they wait for memory.
    """

    name: str
    source: str
    memory: float
    bandwidth: float
    products: float
    kernel: float
    forward_share: float = 0.63
    training_share: float = 0.61
    decoding_factor: float = 1.0
    all_reduce: Curve = _NVLINK
    network: float = 50e9
    host: float = 55e9
    reserved: float = 4e9
    logits: float = 768 << 20
    is_cpu: bool = False

    def all_reduce_seconds(self, size: float) -> float:
        """Seconds to add up ``size`` bytes over the devices of a tensor-parallel group, along the curve."""
        at = min(max(bisect.bisect(self.all_reduce, (size, math.inf)), 1), len(self.all_reduce) - 1)
        (x0, y0), (x1, y1) = self.all_reduce[at - 1 : at + 1]
        return max(self.all_reduce[0][1], y0 + (y1 - y0) * (size - x0) / (x1 - x0))


_TABLE = "fit to aiconfigurator-core 0.12.0's measured kernels, and docs/performance.md"
_SHEET = "data sheet, times the shares of it that an H100 reaches (0.81 of the bandwidth, 0.77 of the operations)"

DEVICES = {
    device.name: device
    for device in (
        Device("h100", _TABLE, memory=83.7e9, bandwidth=2.72e12, products=766e12, kernel=3.8e-6),
        Device("h200", _TABLE, memory=149e9, bandwidth=3.83e12, products=781e12, kernel=4.2e-6),
        Device("h20", _SHEET, memory=96e9, bandwidth=0.81 * 4.0e12, products=0.77 * 148e12, kernel=3.8e-6),
        Device("a100", _SHEET, memory=80e9, bandwidth=0.81 * 2.04e12, products=0.77 * 312e12, kernel=3.8e-6),
    )
}


def measured_here(itemsize: int, ranks: int = 1) -> Device:
    """This machine's first GPU, or a rank's share of all cores: large products, and reading far beyond the caches.

    Args:
        itemsize: bytes of the numbers that a GPU multiplies, 2 or 4; a CPU's have 4.
        ranks: that share the cores and their memory.
    """
    import torch

    from nemo_style_aligner.engine.parallel.machine import available_memory

    is_gpu = torch.cuda.is_available()
    where, dtype = "cuda" if is_gpu else "cpu", torch.bfloat16 if is_gpu and itemsize == 2 else torch.float32
    numbers = torch.ones(2**27, device=where)
    matrix = torch.randn(2**13 if is_gpu else 2**10, 2**13 if is_gpu else 2**10, device=where).to(dtype)
    bandwidth = numbers.nbytes / _best(numbers.sum, is_gpu)
    products = 2 * len(matrix) ** 3 / _best(lambda: matrix @ matrix, is_gpu)
    if is_gpu:
        return Device("here", "measured on this machine", torch.cuda.mem_get_info()[1], bandwidth, products, 4e-6)
    source = f"measured on this machine, shared by {counted(ranks, 'ranks')}"
    rates = (available_memory() / ranks, bandwidth / ranks, products / ranks)
    return Device("here", source, *rates, 0.0, all_reduce=_sums_here(), reserved=5e8, logits=64 << 20, is_cpu=True)


def _sums_here() -> Curve:
    """What it takes two ranks of this machine to add up over gloo; two threads stand for them."""
    import torch
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo  # much of which has no types
    store = dist.HashStore()

    def times(rank: int) -> Curve:
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        group = gloo(store, rank, 2, options)
        found = []
        for size in _SUMMED:
            numbers, seconds = torch.ones(size // 4), []
            for _ in range(9):
                begun = time.perf_counter()
                group.allreduce([numbers]).wait()
                seconds.append(time.perf_counter() - begun)
            found.append((size, statistics.median(seconds)))
        return tuple(found)

    with ThreadPoolExecutor(2) as pool:
        return next(iter(pool.map(times, range(2))))


def _best(action: Callable[[], object], is_gpu: bool) -> float:
    import torch

    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        action()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
