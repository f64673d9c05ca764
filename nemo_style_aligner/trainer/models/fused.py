"""RMSNorm and SwiGLU with backward passes of our own: fewer passes over memory and fewer saved tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from nemo_style_aligner.engine.architecture import GATE_LIMIT, GATE_SLOPE
from nemo_style_aligner.engine.softcaps import clamped_swiglu
from nemo_style_aligner.trainer.models.gpu_kernels import elementwise_kernels_for
from nemo_style_aligner.trainer.models.layer_kernels import kernels_for
from nemo_style_aligner.trainer.models.recompute import computed_again, recomputes_inputs

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.attention import LayerConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`RMSNorm` of x [..., h] with a weight [h] of any dtype. On GPUs torch's if dtypes match: one kernel each way."""
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    out: torch.Tensor = RMSNorm.apply(x, weight.float(), eps)
    return out


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension, computed in fp32 (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., h] of any dtype, weight fp32 [h] -> x's shape and dtype."""
        if kernels := kernels_for(x):
            out, scale = kernels.rms_norm(x.contiguous(), weight, eps)
        else:
            wide = x.float()
            scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = (wide * scale).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        """Gradients of x, in its shape and dtype, and of the weight, fp32."""
        x, weight, scale = ctx.saved_tensors
        if kernels := kernels_for(x):
            return *kernels.rms_norm_backward(x.contiguous(), weight, scale, grad.contiguous()), None
        h = x.shape[-1]
        normed, grad = x.float().mul(scale).view(-1, h), grad.float().reshape(-1, h)
        product = grad * normed
        grad_weight = product.sum(0)
        # The output does not depend on the length of x, so the gradient has no component along x.
        along = torch.mv(product, weight).div_(h)[:, None]
        grad_x = (grad * weight).addcmul_(normed, along, value=-1).mul_(scale.view(-1, 1))
        return grad_x.view(x.shape).to(x.dtype), grad_weight, None


class SwiGLU(MegatronModule):
    """silu(first half) * second half of the last dimension (arXiv:2002.05202): [..., 2 f] -> [..., f].

    Or the clamped form of it, in models that have that (`architecture.GATE_SLOPE`).
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config=config)
        is_clamped = config.layers[0].clamped_swiglu
        self.function: type[torch.autograd.Function] = _ClampedSwiGLU if is_clamped else _SwiGLU
        self.compute = _clamped_swiglu if is_clamped else _swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What `MLP` calls between its two linear layers."""
        out: torch.Tensor = self.function.apply(x)
        if recomputes_inputs(self.config) and out.requires_grad:
            kept, compute = x.detach(), self.compute
            computed_again(out, lambda: compute(kept))
        return out


class _SwiGLU(torch.autograd.Function):
    """Saves its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _swiglu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if kernels := elementwise_kernels_for(x):
            return kernels.swiglu_backward(x.contiguous(), grad.contiguous())
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    if kernels := elementwise_kernels_for(x):
        return kernels.swiglu(x.contiguous())
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _ClampedSwiGLU(torch.autograd.Function):
    """Saves its input and nothing else; computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _clamped_swiglu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        whole, grad = x.float(), grad.float()
        whole_gate, whole_up = whole.chunk(2, dim=-1)
        gate, up = whole_gate.clamp(max=GATE_LIMIT), whole_up.clamp(-GATE_LIMIT, GATE_LIMIT)
        open_by = (GATE_SLOPE * gate).sigmoid_()
        grad_x = torch.empty_like(whole)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(gate * open_by, grad, out=grad_up).masked_fill_(whole_up != up, 0)
        # d g s(a g) / d g = s (1 + a g (1 - s)), with s = sigmoid(a g)
        slope = (1 - open_by).mul_(gate).mul_(GATE_SLOPE).add_(1).mul_(open_by)
        torch.mul(slope, (up + 1).mul_(grad), out=grad_gate).masked_fill_(whole_gate != gate, 0)
        return grad_x.to(x.dtype)


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    return clamped_swiglu(*x.float().chunk(2, dim=-1)).to(x.dtype)
