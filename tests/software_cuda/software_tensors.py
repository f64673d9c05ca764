"""Tensors of a CUDA device in software: memory of the CPU under a device's name, with a device's rules.

What a GPU refuses is refused: tensors of different devices in one operation (0-dimensional ones in element-wise
operations and CPU indices aside), ``numpy()`` on device memory, and whatever waits for the device while a graph is
captured. What a GPU does later is done later: copies with ``non_blocking=True`` to the CPU arrive when somebody waits
for the device, and memory of the CPU must stay as it is until then. Graphs are recorded operation by operation and
replayed on the memory they were captured with.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
CPU = torch.device("cpu")
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default}

generators: list[torch.Generator] = []
"""Random states, one per device."""


class DeviceTensor(torch.Tensor):
    """An ordinary CPU tensor that says it is on device ``index``. Autograd, views and storages are torch's own."""

    _index: int | None  # None: its ``data`` was set to a tensor of the CPU

    @staticmethod
    def __new__(cls, memory: torch.Tensor, index: int) -> DeviceTensor:
        tensor = torch.Tensor._make_subclass(
            cls,
            memory,
            memory.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=torch.device("cuda", index),
        )
        tensor._index = index
        Memory.hold(memory)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CPU if args[0]._index is None else torch.device("cuda", args[0]._index)
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self._index = getattr(value, "_index", None)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self._index is None or force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:
        return f"{memory_of(self)!r} on {self.device}"

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.dim() == 0 else object.__format__(self, form)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_index"})
        memo[id(self)] = copy
        return copy


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(tensor.is_inference()):
        plain = torch.empty(0, dtype=tensor.dtype)
        return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what the operation says of devices."""
    flat, spec = tree_flatten((args, kwargs))
    flat = [memory_of(v) if isinstance(v, DeviceTensor) and v._index is None else v for v in flat]
    args, kwargs = tree_unflatten(flat, spec)
    index = _device_of(func, flat, args, kwargs)
    is_late = _is_late(func, args, kwargs)
    if func in _WAITS or (index is None and not is_late):
        wait_for_device(str(func))
    elif _waits_for_sizes_or_memory(func, args, is_late):
        Transfers.num_waits += 1

    originals: dict[int, tuple[torch.Tensor, DeviceTensor]] = {}

    def on_cpu(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            plain = memory_of(value)
            originals[id(plain)] = plain, value
            return plain
        return CPU if isinstance(value, torch.device) else value

    plain_args, plain_kwargs = tree_unflatten([on_cpu(value) for value in flat], spec)
    if plain_kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False  # torch of this build has no such memory
    if index is not None and plain_kwargs.get("generator") is None and _takes_generator(func):
        plain_kwargs["generator"] = generators[index]
    func = _VARLEN[func.__name__] if func.namespace == "torch_attn" else _OF_GPUS_ALONE.get(func, func)
    result = func(*plain_args, **plain_kwargs)
    if is_late and index is None:
        Transfers.to_cpu(result)
    elif is_late:
        Transfers.to_device(next(v for v in plain_args if isinstance(v, torch.Tensor) and id(v) not in originals))
    if index is None:
        return result

    for plain, original in originals.values():
        if plain.shape != original.shape or plain.data_ptr() != original.data_ptr():  # resized
            original.data = DeviceTensor(plain, index)
    if Graph.capturing is not None:
        Graph.capturing.record(func, plain_args, plain_kwargs, result)
    return tree_map_only(
        torch.Tensor, lambda t: originals[id(t)][1] if id(t) in originals else DeviceTensor(t, index), result
    )


def _mm_fp32(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def _addmm_fp32(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    return torch.addmm(total, a.to(dtype), b.to(dtype), out=out)


# Operations that torch has for GPUs only: products in a wider dtype than their factors'.
_OF_GPUS_ALONE = {
    aten.mm.dtype: _mm_fp32,
    aten.mm.dtype_out: _mm_fp32,
    aten.addmm.dtype_out: _addmm_fp32,
}


def _varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool,
    scale: float | None,
    window: list[int],
    grouped: bool,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ``torch.nn.attention.varlen``: causal, and with the sizes that flash attention takes."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not (is_causal and window == [-1, 0] and starts.dtype == key_starts.dtype == torch.int32):
        raise RuntimeError("not what the software device can do")
    sizes = int(starts.diff().max()), int(key_starts.diff().max())
    if (longest, longest_keys) != sizes or grouped != (query.shape[1] != key.shape[1]):
        raise RuntimeError("arguments contradict each other")
    out = torch.empty_like(query)
    for rows, seen in zip(_slices(starts), _slices(key_starts), strict=True):
        weights, _, values = _varlen_weights(query[rows], key[seen], value[seen], scale)
        out[rows] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _varlen_attn_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = rest[4]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    heads, (groups, channels) = query.shape[1], key.shape[1:]
    for rows, seen in zip(_slices(starts), _slices(key_starts), strict=True):
        weights, keys, values = _varlen_weights(query[rows], key[seen], value[seen], scale)
        above = grad[rows].float().transpose(0, 1)
        of_weights = above @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * (scale or channels**-0.5)
        parts = (
            of_scores @ keys,
            of_scores.transpose(1, 2) @ query[rows].float().transpose(0, 1),
            weights.transpose(1, 2) @ above,
        )
        for whole, part in zip(grads, parts, strict=True):
            part = part if whole is grads[0] else part.unflatten(0, (groups, heads // groups)).sum(1)
            whole[rows if whole is grads[0] else seen] = part.transpose(0, 1).to(whole.dtype)
    return grads


def _slices(starts: torch.Tensor) -> list[slice]:
    return list(map(slice, starts.tolist(), starts.tolist()[1:]))


def _varlen_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of one sequence [heads, n, m], and keys and values of each head [heads, m, d], in fp32."""
    key, value = (x.float().transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0) for x in (key, value))
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(key[0]) - len(query))
    return scores.masked_fill(hidden, -torch.inf).softmax(-1), key, value


_VARLEN = {"_varlen_attn.default": _varlen_attn, "_varlen_attn_backward.default": _varlen_attn_backward}


def _device_of(func: Any, flat: list[Any], args: Any, kwargs: Any) -> int | None:
    """Where the result is: the device's index, or None for the CPU.

    Raises:
        RuntimeError: the tensors are not all on one device.
    """
    devices = {v._index for v in flat if isinstance(v, DeviceTensor)}
    strangers = [v for v in flat if isinstance(v, torch.Tensor) and not isinstance(v, DeviceTensor)]
    if func is aten.copy_.default:
        return args[0]._index if isinstance(args[0], DeviceTensor) else None
    if (asked := kwargs.get("device")) is not None:
        return None if asked.type == "cpu" else number(asked)
    if func in _INDEXED:
        strangers = [v for v in strangers if not any(v is place for place in args[1])]
    if torch.Tag.pointwise in func.tags or func in _INDEXED or func is aten.fill_.Tensor or func.namespace == "c10d":
        strangers = [v for v in strangers if v.dim() > 0]
    if len(devices) > 1 or (devices and strangers):
        found = sorted({str(v.device) for v in flat if isinstance(v, torch.Tensor)})
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {found}")
    return devices.pop() if devices else None


def _is_late(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a copy between a device and the CPU that nobody waits for."""
    if func is aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return bool(non_blocking) and args[0].device.type != args[1].device.type
    asked = kwargs.get("device")
    return func is aten._to_copy.default and kwargs.get("non_blocking", False) and asked is not None and asked == CPU


def _waits_for_sizes_or_memory(func: Any, args: Any, is_late: bool) -> bool:
    """Whether the program waits though the result is on a device: copies of pageable memory, masks as indices."""
    if func is aten.copy_.default:
        return not is_late and args[1].device.type == "cpu"
    return func is aten.index.Tensor and any(i is not None and i.is_cuda and i.dtype == torch.bool for i in args[1])


@functools.cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def number(device: Any) -> int:
    """A device's index; that of the thread's current device for none."""
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return torch.cuda.current_device() if device.index is None else int(device.index)


def wait_for_device(what: str = "synchronize") -> None:
    """The device has done all it was given.

    Raises:
        RuntimeError: a graph is being captured, or memory of the CPU changed while it was to be copied.
    """
    if Graph.capturing is not None:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
    Transfers.num_waits += 1
    Transfers.finish()


class Transfers:
    """Copies that are under way, and how often the program waited for a device."""

    num_waits = 0

    _arriving: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []
    _leaving: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    @classmethod
    def to_cpu(cls, destination: torch.Tensor) -> None:
        """What is there already arrives later; until then there is something else."""
        cls._arriving.append((destination, destination.clone()))
        destination.fill_(123)

    @classmethod
    def to_device(cls, source: torch.Tensor) -> None:
        """Remember what is to be copied."""
        cls._leaving.append((source, source.clone()))

    @classmethod
    def finish(cls) -> None:
        """Everything arrives.

        Raises:
            RuntimeError: memory of the CPU is no longer what was to be copied.
        """
        arriving, cls._arriving = cls._arriving, []
        for destination, value in arriving:
            destination.copy_(value)
        leaving, cls._leaving = cls._leaving, []
        for source, value in leaving:
            if not torch.equal(source.nan_to_num(), value.nan_to_num()):
                raise RuntimeError(f"CPU memory {tuple(source.shape)} was written before it was copied to the device")


class Memory:
    """Bytes of device memory in use, by storage, of all devices of this process together."""

    allocated = 0
    peak = 0
    _held: ClassVar[set[int]] = set()

    @classmethod
    def hold(cls, memory: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted, until nobody has it."""
        storage = memory.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in cls._held:
            cls._held.add(key)
            cls.allocated += size
            cls.peak = max(cls.peak, cls.allocated)
            weakref.finalize(storage, cls._release, key, size)

    @classmethod
    def _release(cls, key: int, size: int) -> None:
        cls._held.discard(key)
        cls.allocated -= size


class Graph:
    """``torch.cuda.CUDAGraph``."""

    capturing: Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operation on memory of the CPU."""
        self._operations.append((func, args, kwargs, result))

    def capture_begin(self, *_: Any, **__: Any) -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        """A GPU computes nothing while it captures: what was computed here is overwritten."""
        Graph.capturing = None
        for _, args, kwargs, result in self._operations:
            inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            for made in _tensors(result):
                if made.is_floating_point() and made.untyped_storage()._cdata not in inputs:
                    made.fill_(float("nan"))

    def replay(self) -> None:
        """Each operation again, its results to where they were."""
        if not self._operations:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for func, args, kwargs, result in self._operations:
            again = func(*args, **kwargs)
            for value in tree_flatten(again)[0]:
                if isinstance(value, torch.ScriptObject):  # a collective under way
                    dist.Work.unbox(value).wait()
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self._operations.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
