"""Compiled kernels for training passes on CPUs: attention over packed rows, SwiGLU, RMSNorm, softmax of logits, and
products of matrices in bf16.

Each makes one pass over memory where torch makes several. They compute in fp32 whatever the dtype of their arguments,
except for bf16 products on processors that have them. Where the kernels are not available (without a compiler, for
example), the layers compute the same in torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.native.compilation import (
    AMX,
    FMA,
    INCLUDES,
    KERNELS,
    NativeUnavailable,
    NothingCompiles,
    compiler_flags,
    find_compiler,
    find_or_compile,
    prepare,
    usable_kernels,
)
from nemo_style_aligner.trainer.models.spans import Spans

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "native"
_NAMES = (
    "layer_kernels.cpp",
    "attention.h",
    "attention_products.h",
    "elementwise.h",
    "logits.h",
    "packed_products.h",
    "rows.h",
    "weight_gradients.h",
)
_SOURCES = [*(_FOLDER / name for name in _NAMES), *(INCLUDES / name for name in ("threads.h", "tiles.h", "vectors.h"))]
_PANEL = 32  # columns of a panel of packed weights, as in ``packed_products.h``
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative error in the check, by dtype: several times the rounding error."""
_Pointer = ctypes.c_void_p
_ALL = 1 << 30  # a window longer than any sequence


class _Attention(ctypes.Structure):
    """The struct `Attention` of ``attention.h``."""

    _fields_ = [
        *[(name, _Pointer) for name in ("qkv", "out", "grad_out", "grad_qkv", "lse", "sinks", "products")],
        *[(name, _Pointer) for name in ("cos", "sin", "spans", "runs")],
        *[(name, ctypes.c_int32) for name in ("num_spans", "groups", "per_group", "channels", "rotary")],
        *[(name, ctypes.c_int32) for name in ("is_bf16", "threads", "window")],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
    ]


class AttentionRow(NamedTuple):
    """What attention of the spans of a packed row of t tokens depends on beside queries, keys and values.

    Attributes:
        rotary: cosines and sines, fp32 [t, r], of the angles that rotate queries and keys; None: no rotation.
        spans: what each token sees.
        scale: factor of the scores, the products of queries and keys.
        softcap: c, where scores x are c tanh(x / c) after that.
        window: keys that a query sees at most, its own included; None: all of its span up to its own.
        sinks: fp32 [heads], scores of nothing beside those of the keys: weights of keys add up to less than 1.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None
    spans: Spans
    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None


class LayerKernels:
    """The compiled functions. Tensors are contiguous, on the CPU and, unless stated, of one dtype: fp32 or bf16.

    Attributes:
        kernel: the name of the instructions they are compiled for, one of `compilation.KERNELS`.
    """

    def __init__(self, library: ctypes.CDLL, kernel: str) -> None:
        self._library = library
        self.kernel = kernel

    @property
    def multiplies(self) -> bool:
        """Whether there are products of matrices (the next three methods): they need bf16 dot products."""
        return KERNELS[self.kernel].number != FMA

    @property
    def depth_step(self) -> int:
        """Products with weights need a depth that is a multiple of this: a pair of numbers, or a tile's."""
        return 32 if KERNELS[self.kernel].number == AMX else 2

    def packed(self, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        """``weight`` (bf16 [n, k]) rearranged for `multiply_packed` by it or, ``transposed``, by its transpose.

        The products' depth, n or k if transposed, must be a multiple of `depth_step`.
        """
        n, k = weight.shape
        columns, depth = (n, k) if transposed else (k, n)
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or depth % self.depth_step:
            raise ValueError(f"products by a {weight.dtype} {list(weight.shape)} with a depth of {depth}")
        out = weight.new_empty(-(-columns // _PANEL), depth, _PANEL)
        pointers = [_Pointer(x.data_ptr()) for x in (weight, out)]
        self._library.layer_pack(*pointers, n, k, int(transposed), torch.get_num_threads())
        return out

    def multiply_packed(
        self, a: torch.Tensor, packed: torch.Tensor, columns: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bf16 a [..., depth] times a matrix [depth, columns] that was `packed` -> [..., columns].

        Sums are in fp32 and rounded once. A row's result does not depend on the rows it is computed with.
        """
        depth = packed.shape[1]
        if a.dtype != torch.bfloat16 or a.shape[-1] != depth or -(-columns // _PANEL) != len(packed):
            raise ValueError(f"{a.dtype} {list(a.shape)} times a matrix of {columns} columns in {list(packed.shape)}")
        a = a.contiguous()
        if out is None:
            out = a.new_empty(*a.shape[:-1], columns)
        pointers = [_Pointer(x.data_ptr()) for x in (a, packed, out)]
        self._library.layer_multiply_packed(*pointers, a.numel() // depth, depth, columns, torch.get_num_threads())
        return out

    def add_product(self, total: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """total += columns.T @ rows: fp32 [v, h], bf16 [n, v] and [n, h]. The sums are in fp32 throughout."""
        (n, v), h = columns.shape, rows.shape[1]
        if (total.dtype, columns.dtype, rows.dtype) != (torch.float32, torch.bfloat16, torch.bfloat16):
            raise TypeError(
                f"add_product does fp32 += bf16 @ bf16, not {total.dtype} += {columns.dtype} @ {rows.dtype}"
            )
        if total.shape != (v, h) or len(rows) != n or not total.is_contiguous():
            raise ValueError(f"{list(columns.shape)}.T @ {list(rows.shape)} cannot be added to {list(total.shape)}")
        columns, rows = columns.contiguous(), rows.contiguous()
        pointers = [_Pointer(x.data_ptr()) for x in (total, columns, rows)]
        self._check(self._library.layer_add_product(*pointers, n, v, h, torch.get_num_threads()))

    def attention(self, qkv: torch.Tensor, row: AttentionRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of each span of a packed row of t tokens.

        Args:
            qkv: [t, groups, heads per group + 2, d], for each group its query heads, its key and its value.

        Returns:
            [t, heads, d], and fp32 [t, heads], the log-sum-exp of each query's scores, for the backward pass.
        """
        t, groups, parts, d = qkv.shape
        heads = groups * (parts - 2)
        out, lse = qkv.new_empty(t, heads, d), qkv.new_empty(t, heads, dtype=torch.float32)
        call = self._attention(qkv, row)
        call.out, call.lse = out.data_ptr(), lse.data_ptr()
        self._check(self._library.layer_attention(ctypes.byref(call)))
        return out, lse

    def attention_backward(
        self,
        grad: torch.Tensor,
        lse: torch.Tensor,
        qkv: torch.Tensor,
        row: AttentionRow,
        out: torch.Tensor | None = None,
        products: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradient with respect to ``qkv`` from that of the output; ``out``, where it goes, may be ``qkv``.

        ``products``, fp32 [t, heads], receives each query's output times its gradient.
        """
        grad_qkv = torch.empty_like(qkv) if out is None else out
        call = self._attention(qkv, row)
        call.products = None if products is None else products.data_ptr()
        call.grad_out, call.grad_qkv, call.lse = grad.data_ptr(), grad_qkv.data_ptr(), lse.data_ptr()
        self._check(self._library.layer_attention_backward(ctypes.byref(call)))
        return grad_qkv

    def _attention(self, qkv: torch.Tensor, row: AttentionRow) -> _Attention:
        t, groups, parts, d = qkv.shape
        cos, sin = row.rotary or (None, None)
        if row.spans.num_queries != t:
            raise ValueError(f"spans of {row.spans.num_queries} tokens in a row of {t}")
        spans, runs = row.spans.table
        if cos is not None and cos.shape[-1] > d:
            raise ValueError(f"rotary embedding of {cos.shape[-1]} channels, but heads have {d}")
        return _Attention(
            qkv=qkv.data_ptr(),
            cos=None if cos is None else cos.data_ptr(),
            sin=None if sin is None else sin.data_ptr(),
            spans=spans.data_ptr(),
            runs=runs.data_ptr(),
            num_spans=len(spans),
            groups=groups,
            per_group=parts - 2,
            channels=d,
            rotary=0 if cos is None else cos.shape[-1],
            is_bf16=_is_bf16(qkv),
            threads=torch.get_num_threads(),
            window=_ALL if row.window is None else row.window,
            sinks=None if row.sinks is None else row.sinks.data_ptr(),
            scale=row.scale,
            softcap=row.softcap or 0.0,
        )

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the last dimension: [..., 2 f] -> [..., f]."""
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        self._call("layer_swiglu", (x, out), _rows(out))
        return out

    def swiglu_backward(self, x: torch.Tensor, grad: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient with respect to x; ``out``, where it goes, may be x itself."""
        grad_x = torch.empty_like(x) if out is None else out
        self._call("layer_swiglu_backward", (x, grad, grad_x), _rows(grad))
        return grad_x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., h] / rms(x) * weight (fp32 [h]) over the last dimension, and 1 / rms(x), fp32 [..., 1]."""
        out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        self._call("layer_rms_norm", (x, None, weight, None, out, scale), _rows(x), ctypes.c_float(eps))
        return out, scale

    def add_and_rms_norm(
        self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x + added, which replaces ``added``, and `rms_norm` of it."""
        out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        self._call("layer_rms_norm", (x, added, weight, added, out, scale), _rows(x), ctypes.c_float(eps))
        return added, out, scale

    def rms_norm_backward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        grad: torch.Tensor,
        added: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients with respect to x, plus ``added``, and, in fp32, to the weight.

        ``out``, where the former goes, may be ``grad`` itself.
        """
        grad_x = torch.empty_like(x) if out is None else out
        grad_weight = torch.empty(torch.get_num_threads(), x.shape[-1], dtype=torch.float32)
        self._call("layer_rms_norm_backward", (x, weight, scale, grad, added, grad_x, grad_weight), _rows(x))
        return grad_x, grad_weight.sum(0)

    def measure_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The log-sum-exp, the target's logit and the entropy of each row x = scale * logits.

        Args:
            logits: [k, v].
            targets: int64 [k], an index into each row; negative: the target is not in this row.
            scale: what the logits are multiplied by.
            entropy: whether the entropy is wanted.

        Returns:
            fp32 [k] each: the log-sum-exp; x at the target, 0 without one; the entropy of softmax(x), or None.
        """
        normalizer, at_target = torch.empty(2, len(logits), dtype=torch.float32)
        entropies = torch.empty_like(normalizer) if entropy else None
        tensors = (logits, targets, normalizer, at_target, entropies)
        self._call("layer_measure_logits", tensors, _rows(logits), ctypes.c_float(scale))
        return normalizer, at_target, entropies

    def logits_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        normalizer: torch.Tensor,
        grad: torch.Tensor,
        entropy: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
    ) -> None:
        """The gradient with respect to x of `measure_logits`; its rows may be slices of longer rows (split vocabulary).

        Args:
            normalizer: fp32 [k], the log-sum-exp of whole rows.
            grad: fp32 [k], of the target's log-prob.
            entropy: fp32 [k] each, the entropy of whole rows and its gradient; None: nothing depends on it.
            out: receives the gradient, in the shape and dtype of the logits; may be their memory.
        """
        tensors = (logits, targets, normalizer, entropy and entropy[0], grad, entropy and entropy[1], out)
        self._call("layer_logits_gradient", tensors, _rows(logits), ctypes.c_float(scale))

    def _call(
        self, name: str, tensors: Sequence[torch.Tensor | None], rows: tuple[int, int], *numbers: ctypes.c_float
    ) -> None:
        assert tensors[0] is not None
        pointers = [_Pointer(None if x is None else x.data_ptr()) for x in tensors]
        function = getattr(self._library, name)
        self._check(function(*pointers, *rows, *numbers, _is_bf16(tensors[0]), torch.get_num_threads()))

    @staticmethod
    def _check(is_short_of_memory: int) -> None:
        if is_short_of_memory:
            raise MemoryError(
                "a layer kernel ran out of memory: use smaller micro batches (max_tokens_per_micro_batch)"
            )


def kernels_for(x: torch.Tensor) -> LayerKernels | None:
    """The functions for tensors like ``x``; None where torch computes."""
    return best_kernels() if x.device.type == "cpu" and x.dtype in _TOLERANCES else None


def load(kernel: str) -> LayerKernels:
    """Load the functions compiled for ``kernel``, a name of `compilation.KERNELS`, and check their results.

    Raises:
        NativeUnavailable: they cannot be compiled, the system refuses the instructions, or results differ from torch's.
    """
    command = [*find_compiler(), *compiler_flags(kernel), "-O3"]
    library = find_or_compile(command, _SOURCES)
    prepare(library, kernel)
    kernels = LayerKernels(library, kernel)
    for dtype, tolerance in _TOLERANCES.items():
        error = _largest_error(kernels, dtype)
        if not error < tolerance:
            raise NativeUnavailable(
                f"the {kernel} kernels differ from torch by {error:.1e} in {dtype} on this processor"
            )
    return kernels


@functools.cache
def best_kernels() -> LayerKernels | None:
    """The best functions for this processor, compiled if no process has done so yet; None, with a warning, without."""
    problem = NativeUnavailable("they need an x86-64 processor with AVX2 and FMA")
    for name in usable_kernels(torch.bfloat16):  # the best multiply bf16, where processor and compiler do
        try:
            return load(name)
        except NativeUnavailable as error:
            problem = error
            if isinstance(error, NothingCompiles):
                break
    logger.warning("training passes run without compiled layer kernels: %s", problem)
    return None


def _largest_error(kernels: LayerKernels, dtype: torch.dtype) -> float:
    """Relative, against torch in fp32, on a few numbers: guards against a faulty compiler or processor.

    All functions in a chain, and back: a norm, attention with two query heads per group, SwiGLU, softmax of logits.
    """
    draw = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        """fp32 numbers that ``dtype`` represents exactly."""
        return torch.randn(*shape, generator=draw).to(dtype).float()

    spans, targets = Spans.whole([19, 1, 40]), torch.arange(60) % 48
    x, weight, angles = numbers(60, 192).requires_grad_(), numbers(192).requires_grad_(), 3 * numbers(60, 10)
    rotary = torch.cat([angles.cos(), angles.cos()], -1), torch.cat([angles.sin(), angles.sin()], -1)
    grad, grad_entropy = numbers(60), numbers(60)
    with torch.enable_grad():
        qkv = F.rms_norm(x, (192,), weight, 1e-5).view(60, 2, 4, 24)
        gate, up = _attention_in_torch(qkv, rotary, [19, 1, 40]).flatten(1).chunk(2, -1)
        logprobs = F.log_softmax(F.silu(gate) * up / 2, -1)
        picked, entropy = logprobs[torch.arange(60), targets], -(logprobs.exp() * logprobs).sum(-1)
        exact = torch.autograd.grad((picked * grad + entropy * grad_entropy).sum(), (x, weight))

    half, norm = (x.detach() / 2).to(dtype), weight.detach()
    whole, normed, scale = kernels.add_and_rms_norm(half, half.clone(), norm, 1e-5)
    row = AttentionRow(rotary, spans, 24**-0.5)
    attended, lse = kernels.attention(normed.view(60, 2, 4, 24), row)
    gated = kernels.swiglu(attended.view(60, 96))
    normalizer, at_target, entropies = kernels.measure_logits(gated, targets, 0.5, entropy=True)
    assert entropies is not None
    found = torch.empty_like(gated)
    kernels.logits_gradient(gated, targets, 0.5, normalizer, grad, (entropies, grad_entropy), found)
    found = kernels.swiglu_backward(attended.view(60, 96), found / 2).view(60, 4, 24)
    found = kernels.attention_backward(found, lse, normed.view(60, 2, 4, 24), row)
    gradients = kernels.rms_norm_backward(whole, norm, scale, found.view(60, 192))
    pairs = [(at_target - normalizer, picked), (entropies, entropy), *zip(gradients, exact, strict=True)]

    if kernels.multiplies and dtype == torch.bfloat16:
        rows, columns, total = numbers(61, 46), numbers(61, 70), numbers(70, 46)
        a, b = rows.to(dtype), columns.to(dtype)
        for matrix, transposed in ((numbers(70, 64), True), (numbers(64, 70), False)):
            left, right = numbers(61, 64), matrix.t() if transposed else matrix
            packed = kernels.packed(matrix.to(dtype), transposed)
            pairs.append((kernels.multiply_packed(left.to(dtype), packed, 70), left @ right))
        expected = total + columns.t() @ rows
        kernels.add_product(total, b, a)
        pairs.append((total, expected))
    errors = [((found.float() - exact).norm() / exact.norm()).item() for found, exact in pairs]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _attention_in_torch(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """As `LayerKernels.attention`, with two query heads per group."""
    cos, sin = (table[:, None, None] for table in rotary)
    turned, rest = x[:, :, :3].split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    x = torch.cat([torch.cat([turned, rest], -1), x[:, :, 3:]], 2)
    query, key, value = (y.expand(-1, -1, 2, -1).flatten(1, 2) for y in x.split([2, 1, 1], 2))
    sequences = zip(*(y.transpose(0, 1).split(lengths, 1) for y in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1) for q, k, v in sequences])


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Number and length of rows."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype == torch.bfloat16)
