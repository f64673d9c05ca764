"""Causal attention of each span of a packed row: torch's flash attention, where GPU and torch have it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nemo_style_aligner.trainer.models.spans import PackedSequences, Run, Span, Spans, gathered, taken

logger = logging.getLogger(__name__)

_SEVERAL_CALLS = "attention over packed sequences takes several calls, not one of torch's varlen attention"
_TOLERANCE = 0.03  # for bf16 and fp16, relative to the largest number of each result


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each token to the keys that its span sees, up to its own. Differentiable.

    Call it only where `has_varlen_attention` is true.

    Args:
        query: [t, heads, d].
        key, value: [t, groups, d]; ``heads`` is a multiple of ``groups``.
        packed: what the row's tokens see, on its device.
        scale: factor of the scores; None: 1 / sqrt(d).
        window: keys that each token sees, its own included; None: all up to its own.

    Returns:
        [t, heads, d].
    """
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, which takes a second or two

    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such argument
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if packed.key_index is not None:
        key, value = gathered(key, packed.key_index), gathered(value, packed.key_index)
    boundaries, longest = (packed.cu_seqlens_q, packed.cu_seqlens_kv), (packed.max_seqlen_q, packed.max_seqlen_kv)
    seen = (
        -1 if window is None else window - 1,
        0,
    )  # before and after a token's own; aligned at the end of a span's keys
    out = varlen_attn(query, key, value, *boundaries, *longest, window_size=seen, **options)
    assert isinstance(out, torch.Tensor)  # nothing else was asked for
    return out


def has_varlen_attention(query: torch.Tensor, key: torch.Tensor, window: int | None = None) -> bool:
    """Whether `varlen_attention` works, with correct outputs and gradients, for heads of these shapes and dtype."""
    if query.device.type != "cuda" or query.dtype.itemsize != 2:  # flash attention takes no fp32
        return False
    return _works(query.shape[1], key.shape[1], query.shape[2], query.dtype, query.device, window is not None)


@functools.cache
def _works(
    heads: int, groups: int, channels: int, dtype: torch.dtype, device: torch.device, has_window: bool = False
) -> bool:
    try:
        error = _largest_error(heads, groups, channels, dtype, device, 40 if has_window else None)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # says nothing of varlen attention
    except (ImportError, TypeError, RuntimeError) as failure:  # older versions of torch, older GPUs, odd sizes
        torch.cuda.synchronize(device)  # raises if a kernel has failed meanwhile
        logger.info("%s: %s: %s", _SEVERAL_CALLS, type(failure).__name__, failure)
        return False
    if error < _TOLERANCE:
        return True
    logger.warning("%s: the relative error of its results is %.2g", _SEVERAL_CALLS, error)
    return False


@torch.inference_mode(False)
@torch.enable_grad()
def _largest_error(
    heads: int, groups: int, channels: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> float:
    """Relative, of outputs and gradients, against `scaled_dot_product_attention` of each span in fp32."""
    first, second, third = (Run(*ends) for ends in ((1, 131), (131, 138), (138, 202)))
    others = (Span(first, (first,)), Span(second, (first, second)), Span(third, (first, third)))
    spans = Spans((*Spans.whole([1]), *others))
    packed = PackedSequences.of(spans, torch.arange(202))
    on_device = (getattr(packed, name).to(device) for name in ("cu_seqlens_q", "cu_seqlens_kv", "key_index"))
    packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.key_index = on_device
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(202, n, channels, generator=draw).to(device, dtype) for n in (heads, groups, groups)]
    gradient = torch.randn(202, heads, channels, generator=draw).to(device)

    def results(
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        inputs = [part.detach().to(dtype, copy=True).requires_grad_() for part in parts]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient.to(dtype))]

    def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        outputs = []
        for span in spans:
            seen = taken(query, [span.queries]), taken(key, span.keys), taken(value, span.keys)
            q, k, v = (x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0) for x in seen)
            visible = torch.ones(len(seen[0]), len(seen[1]), dtype=torch.bool, device=device)
            mask = visible.tril_(len(seen[1]) - len(seen[0]))
            if window is not None:
                mask.triu_(len(seen[1]) - len(seen[0]) - window + 1)
            outputs.append(F.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0].transpose(0, 1))
        return torch.cat(outputs)

    computed = results(lambda q, k, v: varlen_attention(q, k, v, packed, window=window), dtype)
    expected = results(one_by_one, torch.float32)
    errors = [(a.float() - b).abs().max() / b.abs().max() for a, b in zip(computed, expected, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one is
