"""Gradients of weight matrices, added straight to megatron-core's ``main_grad``, the sum over micro batches.

As separate tensors, gradients would be allocated or cleared, written and added in every micro batch. That is a waste
for matrices as large as the vocabulary: a micro batch changes few rows of the embedding's gradient, and sums the output
layer's over chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding

_IN_PLACE = "_gradient_is_added_in_place"


def add_in_place(gpt: GPTModel) -> None:
    """Let our own backward functions add gradients to ``main_grad`` themselves.

    Only for a model whose DDP does not exchange gradients during the backward pass: it would wait for each parameter's
    own gradient. The output layer does so (`logprobs`) and, on CPUs, linear layers (`linear`) and, without tensor
    parallelism, the embedding.
    """
    for parameter in gpt.parameters():
        setattr(parameter, _IN_PLACE, True)
    if gpt.pre_process:
        # `LanguageModelEmbedding` constructs this module itself; only `forward` differs.
        gpt.embedding.word_embeddings.__class__ = _Embedding


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The fp32 sum to which a function may add the gradient of ``weight``; None: it must return the gradient."""
    return getattr(weight, "main_grad", None) if getattr(weight, _IN_PLACE, False) else None


class _Embedding(VocabParallelEmbedding):
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """int64 [b, s] -> [b, s, h], as the base class."""
        # `index_add_` sums in a fixed order on CPUs; on GPUs it adds atomically, in any order.
        can = self.weight.device.type == "cpu" and self.tp_group.size() == 1 and torch.is_grad_enabled()
        if not can or main_grad_of(self.weight) is None:
            return super().forward(input_)
        return _Rows.apply(self.weight, input_)


class _Rows(torch.autograd.Function):
    """Rows of a weight [v, h] whose gradient is added to its ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.main_grad = main_grad_of(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        ctx.main_grad.index_add_(0, ids.flatten(), grad.flatten(0, -2).float())
        return None, None
