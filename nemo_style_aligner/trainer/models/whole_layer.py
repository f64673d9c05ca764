"""A whole transformer layer as one function, for packed rows on CPUs.

A layer's parts are some ten modules and as many nodes of autograd's graph, and in a small model Python takes a share of
a pass that shows (docs/decisions/0004-layer-kernels.md). Here a layer is one node, which computes the same numbers, bit
for bit, and keeps the same tensors for the backward pass.

Layers that differ from Llama's in more than window and rotation, dropout, recomputed activations and tensor parallelism
are computed module by module (`layers.Layer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_style_aligner.trainer.models.attention import LayerConfig, rotary_of
from nemo_style_aligner.trainer.models.layer_kernels import AttentionRow, LayerKernels, kernels_for
from nemo_style_aligner.trainer.models.linear import input_gradient, main_grad_of, multiplied, weight_gradient
from nemo_style_aligner.trainer.models.products import widened
from nemo_style_aligner.trainer.models.spans import PackedSequences

_KNOWN = ("no_rope", "local_rope", "window")  # in which layers may differ from Llama's


def is_one_function(config: LayerConfig) -> bool:
    """Whether layers of a model can be computed as a whole."""
    return (
        not any(layer.unknown(_KNOWN) for layer in config.layers)
        and config.tensor_model_parallel_size == 1
        and config.recompute_granularity != "selective"
    )


def whole_layer(
    layer: TransformerLayer, x: torch.Tensor, angles: torch.Tensor | None, packed: PackedSequences
) -> torch.Tensor | None:
    """x [t, 1, h] -> [t, 1, h]; None where the layer has to be computed module by module.

    Args:
        layer: a layer of a model for which `is_one_function` holds.
        angles: rotary angles of all positions [s, 1, 1, r]; None: no rotation.
        packed: what the row's tokens see.
    """
    config, kernels = layer.config, kernels_for(x)
    if kernels is None or (layer.training and (config.hidden_dropout or config.attention_dropout)):
        return None  # without kernels it may be a layer of Transformer Engine, which has other modules
    weights = _Weights(
        layer.input_layernorm.weight,
        layer.self_attention.linear_qkv.weight,
        layer.self_attention.linear_proj.weight,
        layer.pre_mlp_layernorm.weight,
        layer.mlp.linear_fc1.weight,
        layer.mlp.linear_fc2.weight,
    )
    if x.dtype != weights.qkv.dtype:
        return None
    rotary = rotary_of(config, layer.layer_number, packed, angles, torch.float32)
    channels = layer.self_attention.hidden_size_per_attention_head
    window = config.layer(layer.layer_number).window
    attention = AttentionRow(rotary, packed.spans, channels**-0.5, window=window)
    row = _Row(kernels, attention, config.num_query_groups, channels, config.layernorm_epsilon)
    if not torch.is_grad_enabled():
        products = _Products(
            layer.self_attention.linear_qkv.multiply,
            layer.self_attention.linear_proj.multiply,
            layer.mlp.linear_fc1.multiply,
            layer.mlp.linear_fc2.multiply,
        )
        return _forward(row, x, weights, products)[0]
    if not all(weight.requires_grad for weight in weights):
        return None
    computed: torch.Tensor = _WholeLayer.apply(row, x, *weights)
    return computed


class _Weights(NamedTuple):
    """A layer's weights: [h], [groups * (heads per group + 2) * d, h], [h, heads * d], [h], [2 f, h], [h, f]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    proj: torch.Tensor
    mlp_norm: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor


class _Products(NamedTuple):
    """How to multiply by each of the four matrices: f(x, weight)."""

    qkv: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    proj: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    fc1: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    fc2: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_WITH_GRADIENT = _Products(*[multiplied] * 4)


@dataclasses.dataclass(frozen=True)
class _Row:
    """What all layers need to know of a packed row: the arguments of `LayerKernels`."""

    kernels: LayerKernels
    attention: AttentionRow
    groups: int
    channels: int
    epsilon: float


class _Kept(NamedTuple):
    """What the backward pass needs: inputs and outputs of the products, what the norms divided by, log-sum-exps."""

    x: torch.Tensor  # [t, 1, h]
    scale: torch.Tensor  # [t, 1, 1]
    normed: torch.Tensor  # [t, 1, h]
    qkv: torch.Tensor  # [t, groups, heads per group + 2, d]
    lse: torch.Tensor  # [t, heads]
    attended: torch.Tensor  # [t, 1, heads * d]
    middle: torch.Tensor  # [t, 1, h]
    mlp_scale: torch.Tensor  # [t, 1, 1]
    mlp_normed: torch.Tensor  # [t, 1, h]
    gate_and_up: torch.Tensor  # [t, 1, 2 f]
    gated: torch.Tensor  # [t, 1, f]


def _forward(row: _Row, x: torch.Tensor, weights: _Weights, products: _Products) -> tuple[torch.Tensor, _Kept]:
    kernels, epsilon = row.kernels, row.epsilon
    x = x.contiguous()
    normed, scale = kernels.rms_norm(x, weights.norm.float(), epsilon)
    qkv = products.qkv(normed, weights.qkv).view(len(x), row.groups, -1, row.channels)
    attended, lse = kernels.attention(qkv, row.attention)
    attended = attended.view(*x.shape[:-1], -1)
    added = products.proj(attended, weights.proj)
    middle, mlp_normed, mlp_scale = kernels.add_and_rms_norm(x, added, weights.mlp_norm.float(), epsilon)
    gate_and_up = products.fc1(mlp_normed, weights.fc1)
    gated = kernels.swiglu(gate_and_up)
    out = products.fc2(gated, weights.fc2).add_(middle)
    kept = _Kept(x, scale, normed, qkv, lse, attended, middle, mlp_scale, mlp_normed, gate_and_up, gated)
    return out, kept


class _WholeLayer(torch.autograd.Function):
    """`_forward` with gradients; those of the four matrices are added to ``main_grad`` where they may be."""

    @staticmethod
    def forward(ctx: Any, row: _Row, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out, kept = _forward(row, x, _Weights(*weights), _WITH_GRADIENT)
        ctx.save_for_backward(*kept, *weights)
        ctx.row = row
        ctx.main_grads = [main_grad_of(weight) for weight in weights]
        return out  # not a view, or megatron-core could not free a pipeline stage's output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Overwrites what was kept: gradients take the memory of what is used for the last time."""
        if ctx.row is None:
            raise RuntimeError("a layer's gradients can be computed only once: its activations have been overwritten")
        saved = ctx.saved_tensors
        kept, weights = _Kept(*saved[: len(_Kept._fields)]), _Weights(*saved[len(_Kept._fields) :])
        main, row, kernels = _Weights(*ctx.main_grads), ctx.row, ctx.row.kernels
        ctx.row = None
        grad = grad.contiguous()

        above = widened(grad)
        grad_fc2 = weight_gradient(above, kept.gated, weights.fc2.dtype, main.fc2)
        above = input_gradient(above, weights.fc2, kept.gated)
        above = widened(kernels.swiglu_backward(kept.gate_and_up, above, out=kept.gate_and_up))
        grad_fc1 = weight_gradient(above, kept.mlp_normed, weights.fc1.dtype, main.fc1)
        above = input_gradient(above, weights.fc1, kept.mlp_normed)
        grad, grad_mlp_norm = kernels.rms_norm_backward(
            kept.middle, weights.mlp_norm.float(), kept.mlp_scale, above, added=grad, out=above
        )

        above = widened(grad)
        grad_proj = weight_gradient(above, kept.attended, weights.proj.dtype, main.proj)
        above = input_gradient(above, weights.proj, kept.attended)
        above = kernels.attention_backward(above, kept.lse, kept.qkv, row.attention, out=kept.qkv)
        above = widened(above.view(*grad.shape[:-1], -1))
        grad_qkv = weight_gradient(above, kept.normed, weights.qkv.dtype, main.qkv)
        above = input_gradient(above, weights.qkv, kept.normed)
        grad, grad_norm = kernels.rms_norm_backward(
            kept.x, weights.norm.float(), kept.scale, above, added=grad, out=above
        )

        norms = grad_norm.to(weights.norm.dtype), grad_mlp_norm.to(weights.mlp_norm.dtype)
        return None, grad, norms[0], grad_qkv, grad_proj, norms[1], grad_fc1, grad_fc2
