"""Gradients of matrices as large as the vocabulary, added up where they belong.

Of these a micro batch changes few rows (the embedding), or they are summed over chunks (the output layer, see
`logprobs`). As gradients of their own they would be written, cleared and added several times in every micro batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding

_ADDS_ITSELF = "_adds_to_main_grad"


def add_to_main_grad(gpt: GPTModel) -> None:
    """Let backward passes of the embedding and the output layer add to megatron-core's ``main_grad`` themselves.

    For a model whose DDP does not exchange gradients during the backward pass: that waits for every parameter's own.
    """
    if gpt.pre_process:
        embedding = gpt.embedding.word_embeddings
        setattr(embedding.weight, _ADDS_ITSELF, True)
        embedding.__class__ = _Embedding  # `LanguageModelEmbedding` makes its own; nothing but `forward` differs
    if gpt.post_process and hasattr(gpt, "output_layer"):
        tied = gpt.share_embeddings_and_output_weights
        setattr(gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight, _ADDS_ITSELF, True)


def own_sum(weight: torch.Tensor) -> torch.Tensor | None:
    """Where a backward pass adds the gradient of ``weight``, in fp32; None where it returns it, as autograd expects."""
    return weight.main_grad if getattr(weight, _ADDS_ITSELF, False) else None  # type: ignore[attr-defined, no-any-return]


class _Embedding(VocabParallelEmbedding):
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """int64 [b, s] -> [b, s, h], as the base class."""
        weight = self.weight
        # Sums in a fixed order on CPUs; atomic additions on GPUs have none.
        if self.tp_group.size() > 1 or weight.device.type != "cpu" or not torch.is_grad_enabled():
            return super().forward(input_)
        return _Rows.apply(weight, input_)


class _Rows(torch.autograd.Function):
    """Rows of a weight [v, h] whose gradient is added to its ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.sum = own_sum(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        ctx.sum.index_add_(0, ids.flatten(), grad.flatten(0, -2).float())
        return None, None
