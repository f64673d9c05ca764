"""megatron-core's linear layers, computed on CPUs by `products`, with weights' gradients summed in place in fp32.

As separate tensors, gradients would be allocated or cleared, written and added to megatron-core's ``main_grad`` in
every micro batch. That is a waste for matrices as large as the vocabulary: a micro batch changes few rows of the
embedding's gradient, and sums the output layer's over chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from nemo_style_aligner.trainer.models.packed_weights import PackedWeight, weight_product
from nemo_style_aligner.trainer.models.products import add_product, product, widened
from nemo_style_aligner.trainer.models.recompute import not_keeping

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


class _SummingInPlace:
    """Mixin for both kinds of layers: inputs that can be `computed_again` are not kept, and `_Linear` computes.

    On CPUs, frozen weights in bf16 are multiplied as `PackedWeight`. On GPUs megatron-core's functions compute what is
    frozen, and under tensor parallelism everything: they overlap communication in ways that were not compared here.
    """

    tp_group: dist.ProcessGroup

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packed_weight = PackedWeight()

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the base class."""
        with not_keeping(input_):
            return super().forward(input_, *args, **kwargs)  # type: ignore[misc]

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        allreduce, is_shared, group = (options[name] for name in ("allreduce_dgrad", "sequence_parallel", "tp_group"))
        if input.device.type != "cpu" and (self.tp_group.size() > 1 or main_grad_of(weight) is None):
            return super()._forward_impl(input, weight, bias, **options)  # type: ignore[misc]
        out: torch.Tensor
        if not weight.requires_grad and not input.requires_grad:
            out = self.multiply(_gathered(input, group if is_shared else None), weight)
        else:
            out = linear(input, weight, group, allreduce_dgrad=allreduce, sequence_parallel=is_shared)
        return out if bias is None else out + bias

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., k] @ weight.T -> [..., n] on a CPU, with this layer's weight. Not differentiable."""
        is_packed = not weight.requires_grad and x.dtype == weight.dtype == torch.bfloat16 and widened(x) is x
        return self._packed_weight.multiply(x, weight) if is_packed else multiplied(x, weight)


class ColumnLinear(_SummingInPlace, ColumnParallelLinear):
    """megatron-core's `ColumnParallelLinear` with `_SummingInPlace`."""


class RowLinear(_SummingInPlace, RowParallelLinear):
    """megatron-core's `RowParallelLinear` with `_SummingInPlace`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Ranks' sums over an expert are its dispatcher's. One rank's "sum" here would be a view, and megatron-core adds
        # experts' biases in place.
        self.explicit_expert_comm = self.is_expert


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., k] @ weight.T -> [..., n], of their dtype. Not differentiable: see the next two functions."""
    if x.dtype != weight.dtype:  # where both are widened, the mistake would go unnoticed
        raise TypeError(f"a linear layer of {weight.dtype} cannot take {x.dtype}")
    return weight_product(widened(x), widened(weight), transposed=True).to(x.dtype)


def input_gradient(grad: torch.Tensor, weight: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of `multiplied` with respect to x, in the weight's dtype.

    Args:
        grad: the gradient of its result, `widened`.
        unused: a tensor like x, contiguous, whose memory the result takes where it can.
    """
    if unused is None or unused.dtype != grad.dtype:
        return weight_product(grad, widened(weight), transposed=False).to(weight.dtype)
    weight_product(grad.flatten(0, -2), weight, transposed=False, out=unused.flatten(0, -2))
    return unused


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of `multiplied` with respect to the weight, or None, if it was added to ``main_grad`` instead.

    Args:
        grad: the gradient of its result, `widened`.
        dtype: of the weight.
    """
    columns, rows = grad.flatten(0, -2), widened(x).flatten(0, -2)
    if main_grad is None:
        return product(columns.t(), rows).to(dtype)
    add_product(main_grad, columns, rows)
    return None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """x [..., k] @ weight.T -> [..., n], of their dtype, differentiable in both.

    Args:
        weight: [n, k]; its gradient is added straight to its ``main_grad`` where it may be.
        group: the tensor-parallel ranks.
        allreduce_dgrad: the gradient of x is the sum of those that the ranks' shares of n give.
        sequence_parallel: the same, but x is this rank's share of the first dimension, and the result covers all of it.
    """
    result: torch.Tensor = _Linear.apply(x, weight, allreduce_dgrad, sequence_parallel, group)
    return result


class _Linear(torch.autograd.Function):
    """See `linear`; as megatron-core's functions on GPUs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.allreduce_dgrad, ctx.group = allreduce_dgrad, group
        ctx.gathered_by = group if sequence_parallel else None
        ctx.main_grad = main_grad_of(weight)
        return multiplied(_gathered(x, ctx.gathered_by), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = widened(grad)
        grad_x, grad_weight, exchange = None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad, weight)
            if ctx.allreduce_dgrad:
                exchange = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
            elif ctx.gathered_by is not None:
                whole, grad_x = grad_x, grad_x.new_empty(len(grad_x) // ctx.group.size(), *grad_x.shape[1:])
                exchange = dist.reduce_scatter_tensor(grad_x, whole, group=ctx.gathered_by, async_op=True)
        if ctx.needs_input_grad[1]:  # while the ranks exchange grad_x
            grad_weight = weight_gradient(grad, _gathered(x, ctx.gathered_by), weight.dtype, ctx.main_grad)
        if exchange is not None:
            exchange.wait()
        return grad_x, grad_weight, None, None, None


def _gathered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' ``x``, concatenated along the first dimension; ``x`` itself without a group."""
    if group is None:
        return x
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


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
