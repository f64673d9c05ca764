"""What layers and log-probs compute element by element on GPUs, by Triton kernels: one pass over memory each.

Torch's functions need two to five, each of which reads and writes everything. Import this module where Triton is
installed only; `gpu_kernels` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # of SwiGLU, per program
_LOGITS = 4096  # of a row, at a time


class TritonKernels:
    """The functions for tensors in fp32, bf16 or fp16 on the current GPU; all compute in fp32."""

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the last dimension: [..., 2 f], contiguous -> [..., f]."""
        size = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        swiglu_kernel[out.numel() // size, triton.cdiv(size, _COLUMNS)](
            x, out, SIZE=size, BLOCK=_COLUMNS, enable_fp_fusion=True
        )
        return out

    def swiglu_backward(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `swiglu` with respect to x, in its shape; both contiguous."""
        size = grad.shape[-1]
        out = torch.empty_like(x)
        grid = grad.numel() // size, triton.cdiv(size, _COLUMNS)
        swiglu_backward_kernel[grid](x, grad, out, SIZE=size, BLOCK=_COLUMNS, enable_fp_fusion=True)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
        """Rotary embedding (arXiv:2104.09864), backwards for ``direction`` -1.

        Args:
            x: [t, heads, d], contiguous in d.
            cos, sin: fp32 [t, ..., r], r <= d, of the angles; channels i and i + r / 2 have the same. Those from r on
                stay as they are.

        Returns:
            [t, heads, d], contiguous.
        """
        t, heads, d = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, width = triton.next_power_of_2(heads), triton.next_power_of_2(d)
        rotate_kernel[t,](
            *(x, cos, sin, out),
            direction,
            *x.stride()[:2],
            HEADS=heads,
            CHANNELS=d,
            TURNED=cos.shape[-1] // 2,
            ROWS=rows,
            WIDTH=width,
            num_warps=min(8, max(1, rows * width // 512)),
            enable_fp_fusion=True,
        )
        return out

    def measure_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `LayerKernels.measure_logits`."""
        normalizer, at_target, entropies = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
        measure_logits_kernel[len(logits),](
            *(logits, targets, normalizer, at_target, entropies),
            scale,
            logits.shape[1],
            BLOCK=_LOGITS,
            HAS_ENTROPY=entropy,
            num_warps=8,
            enable_fp_fusion=True,
        )
        return normalizer, at_target, entropies if entropy else None

    def logits_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        normalizer: torch.Tensor,
        grad: torch.Tensor,
        entropy: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
    ) -> None:
        """As `LayerKernels.logits_gradient`; ``out`` may have another dtype than the logits."""
        logits_gradient_kernel[len(logits), triton.cdiv(logits.shape[1], _LOGITS)](
            *(logits, targets, normalizer, grad),
            *(entropy or (grad, grad)),  # not touched where there is none
            out,
            scale,
            logits.shape[1],
            BLOCK=_LOGITS,
            HAS_ENTROPY=entropy is not None,
            num_warps=8,
            enable_fp_fusion=True,
        )


@triton.jit
def swiglu_kernel(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row and block of columns, the program's place in the grid."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(x + row * (2 * SIZE) + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def swiglu_backward_kernel(x, grad, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `swiglu_kernel`. d silu(g) / d g = s (1 + g (1 - s)) with s = sigmoid(g)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(x + row * (2 * SIZE) + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    of_out = tl.load(grad + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = of_out * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + row * (2 * SIZE) + columns, of_gate.to(out.dtype.element_ty), mask=is_column)
    of_up = of_out * gate * sigmoid
    tl.store(out + row * (2 * SIZE) + SIZE + columns, of_up.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["direction"])
def rotate_kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    direction,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All heads of one token, the program's place in the grid; channels i and i + TURNED turn by one angle."""
    token = tl.program_id(0).to(tl.int64)
    heads, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    is_real = (heads < HEADS) & (channels < CHANNELS)
    is_turned = channels < 2 * TURNED
    other_channels = tl.where(is_turned, (channels + TURNED) % (2 * TURNED), channels)
    own = x + token * token_stride + heads * head_stride
    value = tl.load(own + channels, mask=is_real, other=0.0).to(tl.float32)
    other = tl.load(own + other_channels, mask=is_real, other=0.0).to(tl.float32)
    angles = token * (2 * TURNED) + channels
    cosine = tl.load(cos + angles, mask=is_turned, other=1.0)
    sine = tl.load(sin + angles, mask=is_turned, other=0.0) * direction
    turned = value * cosine + tl.where(channels < TURNED, -1.0, 1.0) * other * sine
    places = out + (token * HEADS + heads) * CHANNELS + channels
    tl.store(places, turned.to(out.dtype.element_ty), mask=is_real)


# Numbers of rows are slices, which do not always begin at a multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["targets", "normalizer", "at_target", "entropies"])
def measure_logits_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalizer,
    at_target,
    entropies,
    scale,
    size,
    BLOCK: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """One row, the program's place in the grid.

    Each of BLOCK lanes has its own peak, sum of exp(x - peak) and, for the entropy, sum of exp(x - peak) (x - peak), so
    that lanes are put together once and not for every block.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * size
    lanes = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), -1e30, tl.float32)  # finite, or a lane without an element would give a NaN
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        is_column = start + lanes < size
        x = tl.load(begin + start + lanes, mask=is_column, other=-1e30).to(tl.float32) * scale
        higher = tl.maximum(peak, x)
        fading, weight = tl.exp(peak - higher), tl.where(is_column, tl.exp(x - higher), 0.0)
        if HAS_ENTROPY:
            moment = fading * (moment + total * (peak - higher)) + weight * (x - higher)
        total = fading * total + weight
        peak = higher
    highest = tl.max(peak, 0)
    fading = tl.exp(peak - highest)
    whole = tl.sum(fading * total, 0)
    log_whole = tl.log(whole)
    tl.store(normalizer + row, highest + log_whole)
    target = tl.load(targets + row)
    chosen = tl.load(begin + target, mask=target >= 0, other=0.0).to(tl.float32) * scale
    tl.store(at_target + row, chosen)
    if HAS_ENTROPY:
        mean = tl.sum(fading * (moment + total * (peak - highest)), 0) / whole
        tl.store(entropies + row, log_whole - mean)


@triton.jit(do_not_specialize_on_alignment=["targets", "normalizer", "grad", "entropies", "grad_entropy"])
def logits_gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalizer,
    grad,
    entropies,
    grad_entropy,
    out,
    scale,
    size,
    BLOCK: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """One row and block of columns, the program's place in the grid."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    x = tl.load(logits + row * size + columns, mask=is_column, other=0.0).to(tl.float32) * scale
    logprob = x - tl.load(normalizer + row)
    of_target = tl.load(grad + row)
    of_each = of_target
    if HAS_ENTROPY:
        of_each += (logprob + tl.load(entropies + row)) * tl.load(grad_entropy + row)
    of_x = tl.where(columns == tl.load(targets + row), of_target, 0.0) - of_each * tl.exp(logprob)
    tl.store(out + row * size + columns, of_x.to(out.dtype.element_ty), mask=is_column)
