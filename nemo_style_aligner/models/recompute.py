"""Cheap activations that are computed again in the backward pass instead of being kept (selective recomputation).

megatron-core's ``core_attn`` recomputes attention for the sake of its scores, which `scaled_dot_product_attention`
never stores. What is large and cheap here are the inputs of linear layers that come straight out of a norm or a gated
activation: those two keep what they were computed from anyway.

Transformer Engine's linear layers know nothing of this. Its norms are parts of them, its attention stores no scores
either: megatron-core's ``mlp`` is what saves memory there, at the price of the MLP's products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

_AGAIN = "_compute_again"


def recomputes_inputs(config: TransformerConfig) -> bool:
    """Whether inputs of linear layers are computed again, rather than modules of megatron-core's choice."""
    return config.recompute_granularity == "selective" and not config.recompute_modules


def recomputes_mlp(config: TransformerConfig) -> bool:
    """Whether megatron-core computes the whole MLP of a layer again, of which nothing but its input is kept."""
    return config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ())


def computed_again(x: torch.Tensor, again: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``x``, with the way to compute it again, bit for bit. The linear layer that takes it next will not keep it."""
    setattr(x, _AGAIN, again)
    return x


def not_keeping(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """While inside, autograd keeps the way to compute ``x`` in place of ``x``, where there is one."""
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
