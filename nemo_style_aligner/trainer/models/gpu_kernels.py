"""Chooses what computes a training pass's element-by-element functions: compiled kernels, or torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.native.with_triton import with_triton
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.trainer.models.layer_kernels import LayerKernels, best_kernels, kernels_for

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.triton_kernels import TritonKernels

# Largest error, relative to the largest magnitude of the exact result.
_TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


def elementwise_kernels_for(x: torch.Tensor) -> LayerKernels | TritonKernels | None:
    """Kernels for tensors like ``x``, on a CPU or a GPU; None where torch's functions compute."""
    if x.device.type != "cuda":
        return kernels_for(x)
    return gpu_kernels(x.dtype, x.device)


def prepare_kernels(dtype: torch.dtype) -> None:
    """Compile what passes of a model of ``dtype`` compute with on this rank's device, if no process has done so yet."""
    if device().type == "cpu":
        best_kernels()
        return
    for each in {dtype, torch.float32}:  # logits are in fp32
        gpu_kernels(each, device())


@functools.cache
def gpu_kernels(dtype: torch.dtype, gpu: torch.device) -> TritonKernels | None:
    """Triton's kernels, if they compile for this GPU and pass `check`; None otherwise, with a line in the log."""

    def make() -> TritonKernels:
        from nemo_style_aligner.trainer.models.triton_kernels import TritonKernels

        kernels = TritonKernels()
        check(kernels, dtype, gpu)
        return kernels

    return with_triton(make, gpu, "training passes run") if dtype in _TOLERANCES else None


@torch.inference_mode(False)
@torch.no_grad()
def check(kernels: TritonKernels, dtype: torch.dtype, target: torch.device) -> None:
    """Compile all kernels for ``dtype``, and compare their results with torch's in fp32.

    Raises:
        ArithmeticError: they differ by more than the dtype explains.
    """
    draw = torch.Generator().manual_seed(1)

    def random(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(target, of)

    def compare(name: str, computed: torch.Tensor, exact: torch.Tensor) -> None:
        error = ((computed.float() - exact).abs().max() / exact.abs().max()).item()
        if not error < _TOLERANCES[dtype]:
            raise ArithmeticError(f"{name} by Triton in {dtype}: relative error {error:.2g}")

    x, grad = random(3, 2 * 1040), random(3, 1040)
    with torch.enable_grad():
        wide = x.float().requires_grad_()
        gate, up = wide.chunk(2, -1)
        exact = F.silu(gate) * up
        (exact_grad,) = torch.autograd.grad(exact, wide, grad.float())
    compare("SwiGLU", kernels.swiglu(x), exact.detach())
    compare("SwiGLU's gradient", kernels.swiglu_backward(x, grad), exact_grad)

    heads = random(5, 4, 40)[:, 1:]
    angles = random(5, 1, 12, of=torch.float32).repeat(1, 1, 2)
    first, second, rest = heads.float().split([12, 12, 16], -1)
    cos, sin = angles.cos(), angles.sin()
    c, s = cos[..., :12], sin[..., :12]
    exact = torch.cat([first * c - second * s, second * c + first * s, rest], -1)
    turned = kernels.rotate(heads, cos, sin, 1.0)
    compare("rotary embedding", turned, exact)
    compare("rotary embedding's gradient", kernels.rotate(turned, cos, sin, -1.0), heads.float())

    for has_entropy in (False, True):
        logits, scale = 3 * random(4, 5000, of=torch.float32), 0.8
        targets = torch.tensor([7, -1, 4999, 0], device=target)
        probabilities = (logits * scale).softmax(-1)
        logprobs = (logits * scale).log_softmax(-1)
        entropy = -(probabilities * logprobs).sum(-1)
        normalizer, at_target, entropies = kernels.measure_logits(logits, targets, scale, has_entropy)
        compare("log-sum-exp", normalizer, (logits * scale).logsumexp(-1))
        is_here = targets >= 0
        compare("logits of targets", at_target, logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] * scale * is_here)
        if entropies is not None:
            compare("entropy", entropies, entropy)
        grad_logprob, grad_entropy = random(2, 4, of=torch.float32)
        exact = -grad_logprob[:, None] * probabilities
        exact.scatter_add_(1, targets.clamp(min=0)[:, None], (grad_logprob * is_here)[:, None])
        of_entropy = None
        if has_entropy:
            of_entropy = entropy, grad_entropy
            exact -= grad_entropy[:, None] * probabilities * (logprobs + entropy[:, None])
        out = torch.empty(logits.shape, dtype=dtype, device=target)
        kernels.logits_gradient(logits, targets, scale, normalizer, grad_logprob, of_entropy, out)
        compare("logits' gradient", out, exact)
