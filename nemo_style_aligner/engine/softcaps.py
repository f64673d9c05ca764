"""Numbers that are kept within bounds: soft caps (Gemma 2), attention that has them, or sinks; GPT-OSS' activation."""

from __future__ import annotations

import torch

from nemo_style_aligner.engine.architecture import GATE_LIMIT, GATE_SLOPE


def capped(x: torch.Tensor, cap: float | None, *, in_place: bool = False) -> torch.Tensor:
    """c tanh(x / c), which never leaves (-c, c); ``x`` itself where c is None. Differentiable unless ``in_place``."""
    if cap is None:
        return x
    return x.div_(cap).tanh_().mul_(cap) if in_place else torch.tanh(x / cap) * cap


def stored_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`scaled_dot_product_attention` that stores all scores, to change them; fp32 from the scores to their softmax.

    Args:
        query: [..., heads, s, d].
        key, value: [..., groups, n, d], where ``heads`` is a multiple of ``groups``.
        mask: bool, True where a query sees a key, or added to the scores.
        cap: of the scores; None: as they are.
        sinks: scores of nothing beside those of the keys: weights of keys add up to less than 1; as [..., heads, s, 1].

    Returns:
        [..., heads, s, d].
    """
    shared = query.shape[-3] // key.shape[-3]
    key, value = (x if shared == 1 else x.repeat_interleave(shared, -3) for x in (key, value))
    scores = capped((query @ key.transpose(-1, -2)).float() * scale, cap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    weights = torch.nn.functional.dropout(scores.softmax(-1)[..., : key.shape[-2]], dropout)
    return weights.to(value.dtype) @ value


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The clamped SwiGLU (`architecture.GATE_SLOPE`) of two tensors of one shape, in their dtype."""
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate * torch.sigmoid(GATE_SLOPE * gate) * (up + 1)
