"""`TorchOperations` with Triton kernels, for NVIDIA GPUs: one kernel where torch's functions need three to ten.

When few sequences decode, a GPU waits less for its memory than for the next kernel to start.

Import this module where Triton is installed only; `choose_operations` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemo_style_aligner.engine.architecture import Layer
from nemo_style_aligner.engine.embedded.paged_attention import PagedAttention
from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.torch_operations import (
    Attention,
    Batch,
    ExpertMatrices,
    HeadWeights,
    Norm,
    TorchOperations,
)
from nemo_style_aligner.engine.embedded.triton_experts import TritonExperts, activated, activation_number, gated

_ACTIVE_BLOCK = 1024  # results per program of `activate_kernel`


class TritonOperations(TorchOperations):
    """The kernels for one shape of models; each is compiled at its first call, for passes of all sizes."""

    name = "Triton's kernels"

    def __init__(self, shape: EngineShape, device: torch.device, num_processors: int) -> None:
        """``num_processors``: of the GPU (streaming multiprocessors)."""
        super().__init__(shape, device)
        a = self.architecture
        self._activation = activation_number(a)
        self._rows = triton.next_power_of_2(self.heads + 1)
        self._width = triton.next_power_of_2(a.kv_channels)
        self._paged = PagedAttention(self.groups, self.heads, a.kv_channels, a.attention_scale, num_processors)
        self._experts: TritonExperts | None = None
        if a.experts is not None:
            self._experts = TritonExperts(a.experts, self._activation, adds_bias=shape.tensor_parallel.rank == 0)

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        product: torch.Tensor | None,
        product_bias: torch.Tensor | None,
        product_norm: Norm | None,
        norm: Norm | None,
    ) -> torch.Tensor:
        """As `TorchOperations.add_and_norm`."""
        t, size = hidden.shape
        out = torch.empty(t, size, dtype=self.dtype, device=hidden.device)
        block = triton.next_power_of_2(size)
        norms = [part for each in (product_norm, norm) for part in each or (None, None)]
        add_and_norm_kernel[(t,)](
            hidden,
            *(hidden if each is None else each for each in (product, product_bias, *norms)),  # not touched
            out,
            self.architecture.layernorm_epsilon,
            SIZE=size,
            BLOCK=block,
            OFFSET=self.architecture.norm_offset,
            MULTIPLIER=self.architecture.residual_multiplier,
            HAS_PRODUCT=product is not None,
            HAS_PRODUCT_BIAS=product_bias is not None,
            HAS_PRODUCT_NORM=product_norm is not None and product is not None,
            HAS_NORM=norm is not None,
            IS_LAYER_NORM=self.architecture.norm_has_bias,
            num_warps=_warps(block),
            enable_fp_fusion=True,
        )
        return out

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """As `TorchOperations.activate`, without intermediate rounding."""
        t, width = x.shape
        is_gated = self.architecture.gated
        size = width // 2 if is_gated else width
        out = torch.empty(t, size, dtype=x.dtype, device=x.device)
        activate_kernel[(t, triton.cdiv(size, _ACTIVE_BLOCK))](
            *(x, out),
            SIZE=size,
            BLOCK=_ACTIVE_BLOCK,
            ACTIVATION=self._activation,
            IS_GATED=is_gated,
            enable_fp_fusion=True,
        )
        return out

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TorchOperations.route`."""
        assert self._experts is not None
        return self._experts.route(logits, bias)

    def experts(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, matrices: ExpertMatrices
    ) -> torch.Tensor:
        """As `TorchOperations.experts`."""
        assert self._experts is not None
        return self._experts(x, chosen, weights, matrices)

    def attention_of(self, batch: Batch) -> Attention:
        """As `TorchOperations.attention_of`."""
        attend = self._paged.of_pass(batch)

        def attention(qkv: torch.Tensor, weights: HeadWeights, pages: torch.Tensor, layer: Layer) -> torch.Tensor:
            channels, turned, norms = self.architecture.kv_channels, self.cos.shape[1], weights.norms
            cos, sin = self.rotary(layer)
            qkv = qkv.view(len(qkv), self.groups, self.heads + 2, channels)
            query_norm, key_norm = map(self.scales, norms or (self.cos, self.cos))  # not touched where there are none
            over_heads = self.architecture.qk_norm_over_heads
            means = self.mean_squares(qkv[:, :, : self.heads + 1]) if over_heads else cos
            rotate_and_store_kernel[len(qkv), self.groups](
                *(qkv, cos, sin, query_norm, key_norm, means, batch.positions, batch.places, pages),
                self.architecture.layernorm_epsilon,
                batch.positions.stride(0),
                GROUPS=self.groups,
                HEADS=self.heads,
                CHANNELS=channels,
                TURNED=turned,
                ROWS=self._rows,
                WIDTH=self._width,
                HAS_NORMS=norms is not None,
                OVER_HEADS=over_heads,
                ROTATES=layer.rotates,
                num_warps=_warps(self._rows * self._width),
                enable_fp_fusion=True,
            )
            return attend(pages, qkv[:, :, : self.heads], layer.window, weights.sinks, layer.attn_logit_softcapping)

        return attention


def _warps(elements: int) -> int:
    """Warps for a program of ``elements``, both powers of two: 16 elements per thread."""
    return min(16, max(1, elements // 512))


@triton.jit
def add_and_norm_kernel(  # type: ignore[no-untyped-def]  # Triton looks annotations up
    hidden,
    product,
    product_bias,
    product_norm,
    product_norm_bias,
    norm,
    norm_bias,
    out,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    HAS_PRODUCT_BIAS: tl.constexpr,
    HAS_PRODUCT_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
):
    """`TorchOperations.add_and_norm` of one token, the program's place in the grid."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(hidden + places, mask=is_column, other=0.0)
    if HAS_PRODUCT or HAS_PRODUCT_BIAS:
        added = tl.zeros([BLOCK], tl.float32)
        if HAS_PRODUCT:
            added += tl.load(product + places, mask=is_column, other=0.0).to(tl.float32)
        if HAS_PRODUCT_BIAS:
            added += tl.load(product_bias + columns, mask=is_column, other=0.0).to(tl.float32)
        if HAS_PRODUCT_NORM:
            added = normed(
                added, product_norm, product_norm_bias, columns, is_column, epsilon, SIZE, OFFSET, IS_LAYER_NORM
            )
        x += added * MULTIPLIER
        tl.store(hidden + places, x, mask=is_column)
    if HAS_NORM:
        x = normed(x, norm, norm_bias, columns, is_column, epsilon, SIZE, OFFSET, IS_LAYER_NORM)
    tl.store(out + places, x.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def normed(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    columns,
    is_column,
    epsilon,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
):
    """The norm of one token's numbers, zeros behind the last of its ``SIZE`` columns."""
    if IS_LAYER_NORM:
        x = tl.where(is_column, x - tl.sum(x, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    x = x * scale * (tl.load(weight + columns, mask=is_column, other=0.0) + OFFSET)
    if IS_LAYER_NORM:
        x += tl.load(bias + columns, mask=is_column, other=0.0)
    return x


@triton.jit
def activate_kernel(  # type: ignore[no-untyped-def]
    x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr
):
    """`TorchOperations.activate` of one token and block of columns, the program's place in the grid."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    row = x + token * (2 * SIZE if IS_GATED else SIZE)
    gate = tl.load(row + columns, mask=is_column, other=0.0).to(tl.float32)
    if IS_GATED:
        active = gated(gate, tl.load(row + SIZE + columns, mask=is_column, other=0.0).to(tl.float32), ACTIVATION)
    else:
        active = activated(gate, ACTIVATION)
    tl.store(out + token * SIZE + columns, active.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["position_stride"], do_not_specialize_on_alignment=["positions", "places"])
def rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    means,
    positions,
    places,
    pages,
    epsilon,
    position_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Norm, rotate and store one token's heads of one group; token and group are the program's place in the grid.

    Query heads and key head are normed and rotated in place; then key and value are stored at their place in ``pages``.
    For i < TURNED channels i and i + TURNED are rotated by one angle; channels from 2 * TURNED on stay as they are, and
    all do unless ROTATES. Norms OVER_HEADS have `TorchOperations.mean_squares`, and weights for each head.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = qkv + (token * GROUPS + group) * ((HEADS + 2) * CHANNELS)
    is_channel = channels < CHANNELS
    is_real = (heads <= HEADS)[:, None] & is_channel[None, :]
    is_turned = channels < 2 * TURNED
    other_channels = tl.where(is_turned, (channels + TURNED) % (2 * TURNED), channels)
    x = tl.load(own + heads[:, None] * CHANNELS + channels[None, :], mask=is_real, other=0.0).to(tl.float32)
    other = tl.load(own + heads[:, None] * CHANNELS + other_channels[None, :], mask=is_real, other=0.0).to(tl.float32)
    value = tl.load(own + (HEADS + 1) * CHANNELS + channels, mask=is_channel, other=0.0)
    if HAS_NORMS:
        mean = tl.sum(x * x, 1) / CHANNELS
        if OVER_HEADS:
            mean = tl.load(means + (heads == HEADS).to(tl.int32) * tl.num_programs(0) + token)
        scale = tl.rsqrt(mean + epsilon)[:, None]
        x *= scale * head_weights(query_norm, key_norm, group, heads, channels, is_real, HEADS, CHANNELS, OVER_HEADS)
        other *= scale * head_weights(
            query_norm, key_norm, group, heads, other_channels, is_real, HEADS, CHANNELS, OVER_HEADS
        )
    if ROTATES:
        angles = tl.load(positions + token * position_stride) * TURNED + channels % TURNED
        cosines = tl.load(cos + angles, mask=is_turned, other=1.0)[None, :]
        sines = tl.load(sin + angles, mask=is_turned, other=0.0)[None, :]
        x = x * cosines + tl.where(channels < TURNED, -1.0, 1.0)[None, :] * other * sines
    turned = x.to(qkv.dtype.element_ty)
    tl.debug_barrier()  # all threads have read what is overwritten now
    tl.store(own + heads[:, None] * CHANNELS + channels[None, :], turned, mask=is_real)
    place = pages + tl.load(places + token) * (2 * GROUPS * CHANNELS) + group * CHANNELS
    key_places = place + (heads - HEADS)[:, None] * CHANNELS + channels[None, :]
    tl.store(key_places, turned, mask=is_real & (heads == HEADS)[:, None])
    tl.store(place + GROUPS * CHANNELS + channels, value, mask=is_channel)


@triton.jit
def head_weights(  # type: ignore[no-untyped-def]
    query_norm,
    key_norm,
    group,
    heads,
    channels,
    is_real,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVER_HEADS: tl.constexpr,
):
    """What norms multiply some channels of a group's heads by: all alike, or by weights of each head's own."""
    of_head = CHANNELS if OVER_HEADS else 0
    is_query = (heads < HEADS)[:, None]
    query_places = query_norm + (group * HEADS + heads)[:, None] * of_head + channels[None, :]
    of_query = tl.load(query_places, mask=is_real & is_query, other=0.0)
    of_key = tl.load(key_norm + group * of_head + channels, mask=channels < CHANNELS, other=0.0)
    return tl.where(is_query, of_query, of_key[None, :])
