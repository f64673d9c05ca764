"""Which experts compute a token, and their sum, with torch's functions; as megatron-core's router in training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_style_aligner.engine.architecture import Experts


def routed(
    logits: torch.Tensor, experts: Experts, bias: torch.Tensor | None = None, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int64 [t, k], and their weights, float32 [t, k].

    Args:
        logits: float32 [t, experts], of the router.
        bias: float32 [experts], added to the scores for the choice alone.
        chosen: int64 [t, k], experts that are chosen already; None: those with the largest scores.
    """
    if experts.scores == "softmax":
        scores = logits if experts.normalized else logits.softmax(-1)
        chosen = scores.topk(experts.per_token, -1).indices if chosen is None else chosen
        top = scores.gather(-1, chosen)
        weights = top.softmax(-1) if experts.normalized else top
    else:
        scores = logits.sigmoid()
        if chosen is None:
            chosen = (scores if bias is None else scores + bias).topk(experts.per_token, -1).indices
        top = scores.gather(-1, chosen)
        weights = top / (top.sum(-1, keepdim=True) + 1e-20) if experts.per_token > 1 else top
    return chosen, weights * experts.scaling


def computed_by_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """The weighted sums of what experts compute: [t, h] of the dtype of ``x`` [t, h], added in float32.

    Each expert that any token has is computed once, for all that have it.

    Args:
        chosen, weights: see `routed`.
        compute: (rows [n, h], expert) -> [n, h].
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, tokens, compute(x[tokens], expert).float() * weights[tokens, place, None])
    return out.to(x.dtype)
