"""Causal attention within each sequence of a packed row: torch's flash attention, where GPU and torch have it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_SEVERAL_CALLS = "attention over packed sequences takes several calls, not one of torch's varlen attention"
_TOLERANCE = 0.03  # for bf16 and fp16, relative to the largest number of each result


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each token to its own and all earlier tokens of its sequence. Differentiable.

    Call it only where `has_varlen_attention` is true.

    Args:
        query: [t, heads, d].
        key, value: [t, groups, d]; ``heads`` is a multiple of ``groups``.
        boundaries: int32 [n + 1], where each of the n sequences begins, and t.
        longest: tokens of the longest sequence, at least.
        scale: factor of the scores; None: 1 / sqrt(d).

    Returns:
        [t, heads, d].
    """
    from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler, which takes a second or two

    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such argument
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    causal = (-1, 0)
    out = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, window_size=causal, **options)
    assert isinstance(out, torch.Tensor)  # nothing else was asked for
    return out


def has_varlen_attention(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether `varlen_attention` works, with correct outputs and gradients, for heads of these shapes and dtype."""
    if query.device.type != "cuda" or query.dtype.itemsize != 2:  # flash attention takes no fp32
        return False
    return _works(query.shape[1], key.shape[1], query.shape[2], query.dtype, query.device)


@functools.cache
def _works(heads: int, groups: int, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    try:
        error = _largest_error(heads, groups, channels, dtype, device)
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
def _largest_error(heads: int, groups: int, channels: int, dtype: torch.dtype, device: torch.device) -> float:
    """Relative, of outputs and gradients, against `scaled_dot_product_attention` of each sequence in fp32."""
    lengths = [1, 130, 7, 64]
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(sum(lengths), n, channels, generator=draw).to(device, dtype) for n in (heads, groups, groups)]
    gradient = torch.randn(sum(lengths), heads, channels, generator=draw).to(device)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int().to(device)

    def results(
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        inputs = [part.detach().to(dtype, copy=True).requires_grad_() for part in parts]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient.to(dtype))]

    def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        outputs = []
        for sequence in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0) for x in sequence)
            outputs.append(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1))
        return torch.cat(outputs)

    computed = results(lambda q, k, v: varlen_attention(q, k, v, boundaries, max(lengths)), dtype)
    expected = results(one_by_one, torch.float32)
    errors = [(a.float() - b).abs().max() / b.abs().max() for a, b in zip(computed, expected, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one is
