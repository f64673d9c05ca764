"""Megatron-Core on machines without CUDA.

megatron-core allocates on ``torch.cuda.current_device()`` in hundreds of places. Where CUDA is
absent, its source is rewritten *as it is imported*, by the few rules below, and only inside the package
``megatron.core``: neither torch nor any other module is patched, so no other code can notice. Where CUDA
is present nothing here does anything.

The rules turn CUDA devices, tensor types, streams' synchronisation and random states into their CPU
counterparts, and create each group of a single rank only once. Some modules get functions of ours (`_REPLACED`).
`tests/test_cpu_support.py` fails when an upgrade of megatron-core moves one of them.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import marshal
import os
import re
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# (name, pattern, replacement). Order matters: the first rule's result is what the fourth looks for.
SOURCE_RULES: list[tuple[str, re.Pattern[str], str]] = [
    (name, re.compile(pattern), replacement)
    for name, pattern, replacement in [
        ("current device", r"torch\.cuda\.current_device\(\)", "torch.device('cpu')"),
        ("device keyword", r"""(device\s*=\s*)(['"])cuda\2""", r"\1'cpu'"),
        ("tensor type", r"""'torch\.cuda\.(Float|Half|BFloat16)Tensor'""", r"'torch.\1Tensor'"),
        ("move to current device", r"\.cuda\(\s*(torch\.device\('cpu'\))?\s*\)", ".cpu()"),
        ("asynchronous move", r"\.cuda\(non_blocking=True\)", ".cpu()"),
        # Versions from 0.19 on ask for it in every reduction of gradients, to let it wait for graphs if there are any.
        ("current stream", r"(\b\w+ = )torch\.cuda\.current_stream\(\)", r"\1None"),
        ("synchronise", r"torch\.cuda\.(synchronize|empty_cache)\([^()]*\)", "None"),
        ("seed", r"torch\.cuda\.manual_seed\(", "torch.manual_seed("),
        ("random state", r"torch\.cuda\.(get_rng_state|set_rng_state)\(", r"torch.\1("),
        ("autocast of custom functions", r"torch\.cuda\.amp\.custom_(fwd|bwd)", r"torch.amp.custom_\1"),
        # Fused element-wise functions that our layers do not use on a CPU; decorating them would load torch's compiler.
        ("compiled functions", r"jit_fuser = torch\.compile\b", "jit_fuser = noop_decorator"),
        # Each of gloo's groups has a thread that wakes a hundred times a second, and megatron-core makes twenty groups.
        (
            "groups",
            r"(group = )torch\.distributed\.new_group\(",
            rf"\1__import__('sys').modules['{__name__}'].new_group(",
        ),
    ]
]

# Parts that only make sense with CUDA and are never imported on a CPU.
_LEFT_ALONE = (
    "megatron.core.distributed.fsdp",
    "megatron.core.resharding.nvshmem",
    "megatron.core.inference.unified_memory",
)

rule_hits: Counter[str] = Counter()
"""How often each rule matched in the modules imported so far (for the test that guards upgrades)."""


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from rewritten source; modules that no rule matches load as usual."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode("utf-8")
        changed = False
        for name, pattern, replacement in SOURCE_RULES:
            source, count = pattern.subn(replacement, source)
            rule_hits[name] += count
            changed |= count > 0
        if not changed:
            return super().get_code(fullname)
        return _compiled(source, path)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if replace := _REPLACED.get(module.__name__):
            replace(module)


def _compiled(source: str, path: str) -> types.CodeType:
    """Compile rewritten source, cached beside Python's ``.pyc`` files so that not every rank compiles it each time."""
    cache = Path(importlib.util.cache_from_source(path, optimization=f"cpu{sys.flags.optimize}"))
    key = importlib.util.MAGIC_NUMBER + importlib.util.source_hash(source.encode())
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):  # missing or incomplete
        kept = cache.read_bytes()
        if kept.startswith(key):
            code = marshal.loads(kept[len(key) :])
            if isinstance(code, types.CodeType):
                return code
    code = compile(source, path, "exec", dont_inherit=True)
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):  # another user installed the package
            cache.parent.mkdir(exist_ok=True)
            whole = cache.with_name(f"{cache.name}.{os.getpid()}")
            whole.write_bytes(key + marshal.dumps(code))
            whole.replace(cache)
    return code


class _Finder(importlib.abc.MetaPathFinder):
    """Claims ``megatron.core`` modules where CUDA is absent, which it asks torch once."""

    cuda_is_available: bool | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core") or name.startswith(_LEFT_ALONE):
            return None
        if self.cuda_is_available is None:
            import torch

            self.cuda_is_available = torch.cuda.is_available()
        if self.cuda_is_available:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _RewritingLoader(spec.loader.name, spec.loader.path)
        return spec


def install_import_hook() -> None:
    """Make later imports of ``megatron.core`` work where CUDA is absent. Cheap; safe to call twice.

    Raises:
        ImportError: megatron.core was imported before, in its unchanged form, on a machine without CUDA.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("import nemo_style_aligner before megatron.core: it prepares megatron.core for the CPU")
        return
    sys.meta_path.insert(0, _Finder())


def new_group(ranks: list[int], backend: str | None = None, **options: Any) -> Any:
    """`torch.distributed.new_group`, but a group of a single rank is created once and reused: it exchanges nothing.

    Collective like the original. Whether a group exists already depends on the arguments alone, so that ranks agree.
    """
    import torch.distributed as dist

    if len(ranks) > 1 or backend is not None:
        return dist.new_group(ranks, backend=backend, **options)
    known = _groups_of_one.setdefault(dist.group.WORLD, {})
    if ranks[0] not in known:
        known[ranks[0]] = dist.new_group(ranks, **options)
    return known[ranks[0]]


_groups_of_one: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Groups of a single rank by that rank, for the default group under which they were created."""


def _use_cpu_random_states(module: types.ModuleType) -> None:
    """Point the tensor-parallel random state tracker at torch's CPU generator."""
    import torch

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        if not hasattr(module, name):
            raise ImportError(f"megatron.core.tensor_parallel.random has no {name}: unsupported megatron-core version")
    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    # Each use of the tracker would warn that torch's CPU generator has moved: here that is the one it switches.
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _use_torch_routers(module: types.ModuleType) -> None:
    """Bind a function of Transformer Engine's that routers ask for, which old versions do not where it is missing."""
    module.__dict__.setdefault("te_general_gemm", None)


def _use_no_streams(module: types.ModuleType) -> None:
    """Let experts' tokens be exchanged without a stream that brings their numbers to the CPU: they are there."""
    import torch

    def as_numpy(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(split := getattr(self, name), torch.Tensor):
                    setattr(self, name, split.numpy())
        return tokens_per_expert

    dispatcher = module.MoEAlltoAllTokenDispatcher
    if not hasattr(dispatcher, "_maybe_dtoh_and_synchronize") or not hasattr(dispatcher, "cuda_dtoh_stream"):
        raise ImportError(f"{module.__name__} has no _maybe_dtoh_and_synchronize: unsupported megatron-core version")
    dispatcher._maybe_dtoh_and_synchronize = as_numpy
    dispatcher.cuda_dtoh_stream = object()  # else it makes one


def _use_even_exchanges(module: types.ModuleType) -> None:
    """Let tensor-parallel ranks exchange parts of different sizes, as experts do: over gloo they must be even."""
    import torch
    import torch.distributed as dist

    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gathered(x: torch.Tensor, group: Any, output_split_sizes: Any = None, *options: Any) -> torch.Tensor:
        if output_split_sizes is None:
            return gather(x, group, None, *options)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scattered(x: torch.Tensor, group: Any, input_split_sizes: Any = None, *options: Any) -> torch.Tensor:
        if input_split_sizes is None:
            return scatter(x, group, None, *options)
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gathered, scattered  # type: ignore[attr-defined]


_REPLACED: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.tensor_parallel.random": _use_cpu_random_states,
    "megatron.core.tensor_parallel.mappings": _use_even_exchanges,
    "megatron.core.transformer.moe.moe_utils": _use_torch_routers,
    "megatron.core.transformer.moe.token_dispatcher": _use_no_streams,
}
"""What is done with a module once it is loaded."""
