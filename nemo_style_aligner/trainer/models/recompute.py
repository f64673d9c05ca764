"""Selective recomputation: cheap activations are computed again in the backward pass instead of being kept.

megatron-core's ``core_attn`` recomputes attention for the sake of its scores, which `scaled_dot_product_attention`
never stores. What is large and cheap here are the inputs of linear layers that come straight out of a norm or a gated
activation: norm and activation keep their own inputs anyway, from which these are computed.

Transformer Engine's linear layers do not support this. Its norms are parts of them, and its attention stores no scores
either: there, megatron-core's ``mlp`` saves memory, at the price of computing the MLP's products again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

_AGAIN = "_compute_again"


def recomputes_inputs(config: TransformerConfig) -> bool:
    """Whether inputs of linear layers are computed again, rather than modules by megatron-core."""
    return config.recompute_granularity == "selective" and not config.recompute_modules


def recomputes_mlp(config: TransformerConfig) -> bool:
    """Whether megatron-core computes the whole MLP of each layer again, keeping only its input."""
    return config.recompute_granularity == "selective" and "mlp" in config.recompute_modules


def computed_again(x: torch.Tensor, again: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Attach to ``x`` how to compute it again, bit for bit; the linear layer it goes to will not keep it."""
    setattr(x, _AGAIN, again)
    return x


def not_keeping(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which autograd saves how to compute ``x`` again instead of ``x``, where that is known."""
    again = getattr(x, _AGAIN, None)
    if again is None:
        return contextlib.nullcontext()

    known = x.data_ptr(), x.numel()  # not x itself: autograd keeps these functions, and what they hold

    def pack(saved: torch.Tensor) -> Any:
        return (again, saved.shape) if (saved.data_ptr(), saved.numel()) == known else saved

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        compute, shape = kept
        with torch.no_grad():
            return compute().view(shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
