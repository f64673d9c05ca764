"""CUDA devices in software: torch's CUDA interface and NCCL's groups, for CUDA code paths on machines without a GPU.

`install` makes torch, built for the CPU, believe in ``SOFTWARE_CUDA_DEVICES`` devices (1 unless set). See
`software_tensors` for what their tensors do. NCCL's groups are gloo's and take tensors of devices only. **Not**
simulated: kernels that exist for GPUs only (Transformer Engine, Triton), two streams at the same time, a limit of
memory, speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

_backend = ctypes.CDLL(os.environ["SOFTWARE_CUDA_BACKEND"], ctypes.RTLD_GLOBAL)  # before torch: see backend.cpp
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would be Triton's

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from software_tensors import CPU, DeviceTensor, Graph, Memory, aten, generators, memory_of, number, wait_for_device  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

TOTAL_MEMORY = 8 << 30
_registered: list[torch.library.Library] = []  # their end would take the operations with them


def install() -> None:
    """Once per process, before any other code asks torch for CUDA."""
    count = int(os.environ.get("SOFTWARE_CUDA_DEVICES", "1"))
    generators[:] = [torch.Generator().manual_seed(index) for index in range(count)]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    library.impl("_local_scalar_dense", lambda t: memory_of(t).item(), "CUDA")  # of torch.tensor([device tensors])
    _registered.append(library)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a CPU Parameter cannot become a DeviceTensor
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) makes it on the CPU and copies it
    for name, value in _cuda_functions(count).items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = (
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
    )
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    # As in torch 2.9 and 2.10, the oldest that are supported: they have no public name for it.
    vars(torch.accelerator).pop("empty_host_cache", None)
    torch._C._host_emptyCache = lambda: None
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.to(
        torch.device("cuda", number(device)), non_blocking=non_blocking
    )
    _install_nccl()


def _empty(size: Any, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> DeviceTensor:
    memory = aten.empty.memory_format(size, dtype=dtype, device=CPU, memory_format=memory_format)
    return DeviceTensor(memory, number(device))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> DeviceTensor:
    return DeviceTensor(aten.empty_strided.default(size, stride, dtype=dtype, device=CPU), number(device))


class _Stream:
    """A stream. There is one order of work, that of the program."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", number(device))
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        wait_for_device()

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait_for_device()


@contextlib.contextmanager
def _capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def _cuda_functions(count: int) -> dict[str, Any]:
    """What replaces ``torch.cuda``'s."""

    def set_device(device: Any) -> None:
        if not 0 <= number(device) < count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        _backend.software_cuda_exchange(number(device))

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return generators[number(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        generators[number(device)].set_state(state)

    def manual_seed(seed: int) -> None:
        generators[torch.cuda.current_device()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="software", total_memory=TOTAL_MEMORY, major=9, minor=0, multi_processor_count=1, uuid=number(device)
        )

    def reset_peak_memory_stats(device: Any = None) -> None:
        Memory.peak = Memory.allocated

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "current_device": lambda: _backend.software_cuda_exchange(-1),
        "set_device": set_device,
        "_exchange_device": _backend.software_cuda_exchange,
        "_maybe_exchange_device": _backend.software_cuda_exchange,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "software",
        "synchronize": lambda device=None: wait_for_device(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: Memory.allocated,
        "memory_reserved": lambda device=None: Memory.allocated,
        "max_memory_allocated": lambda device=None: Memory.peak,
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - Memory.allocated, TOTAL_MEMORY),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "CUDAGraph": Graph,
        "graph": _capture,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: Graph.capturing is not None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "default_generators": generators,
    }


# ---- NCCL ----------------------------------------------------------------------------------------

_COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce",
    "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class _ProcessGroupNCCL:
    """``dist.ProcessGroupNCCL``, of a group made by hand."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        _check_on_device("broadcast", tensor)
        return self._gloo.broadcast(memory_of(tensor), root)


def _check_on_device(name: str, values: Any) -> None:
    if any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in tree_flatten(values)[0]):
        raise RuntimeError(f"{name}: No backend type associated with device type cpu")


def _is_nccl(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER and str(dist.get_backend_config(group)) == "cuda:gloo"


def _install_nccl() -> None:
    """Groups that are asked for as NCCL's are gloo's for devices."""
    c10d = dist.distributed_c10d
    init_process_group, new_group, get_backend = dist.init_process_group, dist.new_group, dist.get_backend
    object_device = c10d._get_object_coll_device

    def serve(group: Any) -> Any:
        """Operations are computed on memory of the CPU, which the group's backend must take too."""
        if _is_nccl(group):
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, group._get_backend(torch.device("cuda")))
        return group

    @functools.wraps(init_process_group)
    def begin(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init_process_group("cuda:gloo" if backend == "nccl" else backend, *args, **kwargs)
        serve(dist.group.WORLD)

    @functools.wraps(new_group)
    def make(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        backend = "cuda:gloo" if (backend or backend_of()) == "nccl" else backend
        return serve(new_group(ranks, timeout, backend, *args, **kwargs))

    @functools.wraps(get_backend)
    def backend_of(group: Any = None) -> str:
        return "nccl" if _is_nccl(group or dist.group.WORLD) else get_backend(group)

    def device_of_objects(group: Any = None) -> Any:
        group = group or dist.group.WORLD
        return torch.device("cuda", torch.cuda.current_device()) if _is_nccl(group) else object_device(group)

    def for_devices(name: str) -> Callable[..., Any]:
        collective = getattr(dist.ProcessGroup, name)

        @functools.wraps(collective)
        def checked(group: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_nccl(group):
                _check_on_device(name, (args, kwargs))
            return collective(group, *args, **kwargs)

        return checked

    for name in _COLLECTIVES:
        setattr(dist.ProcessGroup, name, for_devices(name))
    dist.init_process_group, dist.new_group, dist.get_backend = begin, make, backend_of
    c10d.new_group, c10d.get_backend, c10d._get_object_coll_device = make, backend_of, device_of_objects
    dist.ProcessGroupNCCL = _ProcessGroupNCCL
