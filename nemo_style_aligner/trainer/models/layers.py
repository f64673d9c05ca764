"""The transformer layer: Transformer Engine's where it can be used, else our own ("local" in megatron-core's terms).

Ours use compiled C++ kernels on CPUs (`layer_kernels`) where available, else torch's functions. Transformer Engine's
layers and ours have the same parameters. Transformer Engine fuses the norm into the linear layer that follows it
(``linear_qkv.layer_norm_weight``); megatron-core's key map stores ours under the same names, so that
checkpoints are interchangeable between the two.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from nemo_style_aligner.engine.architecture import EVERY_FEATURE, Layer
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.weights.layout import LAYER_NORMS
from nemo_style_aligner.trainer.models.attention import (
    CausalAttention,
    EngineSelfAttention,
    LayerConfig,
    LocalSelfAttention,
)
from nemo_style_aligner.trainer.models.fused import SwiGLU, rms_norm
from nemo_style_aligner.trainer.models.layer_kernels import kernels_for
from nemo_style_aligner.trainer.models.linear import ColumnLinear, RowLinear
from nemo_style_aligner.trainer.models.recompute import computed_again, recomputes_inputs, recomputes_mlp
from nemo_style_aligner.trainer.models.routes import ExpertRouter, LayerTokens
from nemo_style_aligner.trainer.models.spans import PackedSequences
from nemo_style_aligner.trainer.models.whole_layer import is_one_function, whole_layer

logger = logging.getLogger(__name__)


_KNOWN_TO_TE = EVERY_FEATURE - {"layer_norms", "qk_norm_over_heads", "attn_logit_softcapping"}
_KNOWN_TO_TE -= {"attention_sinks", "local_rope", "window", "experts"}


@functools.cache
def uses_transformer_engine(dtype: torch.dtype, layers: tuple[Layer, ...] = ()) -> bool:
    """Whether a model of ``dtype`` has Transformer Engine's layers; call it when this process has its device.

    Where Transformer Engine is installed but not used, the log says why.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return False
    reason = _why_own_layers(dtype, layers)
    if reason is not None:
        logger.info("using this project's own layers, not Transformer Engine's: %s", reason)
    return reason is None


def uses_torch_attention(dtype: torch.dtype, layers: tuple[Layer, ...] = ()) -> bool:
    """Whether a model of ``dtype`` has torch's attention: neither Transformer Engine's nor the compiled function."""
    has_kernels = kernels_for(torch.empty(0, dtype=dtype, device=device())) is not None
    return not uses_transformer_engine(dtype, layers) and not has_kernels


def _why_own_layers(dtype: torch.dtype, layers: tuple[Layer, ...]) -> str | None:
    """Why Transformer Engine, which is installed, cannot compute a model of ``dtype``; None: it can."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not gpt_layer_specs.HAVE_TE:
        return "it cannot be imported (python -c 'import transformer_engine.pytorch' says why)"
    if foreign := dict.fromkeys(name for layer in dict.fromkeys(layers) for name in layer.unknown(_KNOWN_TO_TE)):
        return f"its layers have no {', '.join(foreign)}"
    if dtype != torch.bfloat16:
        return "in fp32 it has no attention for packed rows, and multiplies in TF32"
    major, minor = torch.cuda.get_device_capability()
    # Without flash-attn it has cuDNN's attention, which takes packed rows on these GPUs alone.
    if major not in (9, 10) and importlib.util.find_spec("flash_attn") is None:
        return f"on a GPU of compute capability {major}.{minor} it needs flash-attn, which is not installed"
    return None


class Norm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450), or a form of these that stores its weights less one.

    Input and output ``[..., hidden_size]``. Computed in fp32 whatever the dtype of the input.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.is_recomputed = recomputes_inputs(config)
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization != "RMSNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees part of the tokens: megatron sums these gradients.
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        weight = self.weight.float() + 1 if self.zero_centered else self.weight
        if self.bias is None:
            out = rms_norm(x, weight, self.eps)
            if self.is_recomputed and out.requires_grad:
                kept, scale = x.detach(), weight.detach()
                computed_again(out, lambda: rms_norm(kept, scale, self.eps))
            return out
        return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), self.bias.float(), self.eps).to(x.dtype)


class NormOverHeads(Norm):
    """RMSNorm over all of a token's query heads, or key heads, together: [..., this rank's heads, d] (OLMo 2).

    Each rank has the weights of all heads. Ranks that share a key head have a copy each, which counts as a head.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(config, num_heads * hidden_size, **options)
        self.num_heads, self.tp_size = num_heads, config.tensor_model_parallel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last two dimensions. Collective over the tensor-parallel ranks."""
        if self.tp_size == 1:
            return super().forward(x.flatten(-2)).view(x.shape)
        heads, d = x.shape[-2:]
        first = get_tensor_model_parallel_rank() * self.num_heads // self.tp_size
        weight = self.weight.float().view(-1, d)[first : first + heads] + self.zero_centered
        wide = x.float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum((-2, -1), keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)  # which sums its gradient
        scale = (squares / (self.tp_size * heads * d) + self.eps).rsqrt()
        return (wide * scale * weight).to(x.dtype)


class TrainedLayer(TransformerLayer):
    """megatron-core's layer. After its attention, the model's last one computes only the wanted positions.

    Nothing depends on the others from there on: prompt tokens when log-probs of responses are wanted, all but the last
    token when a reward is.
    """

    def __init__(self, config: LayerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.is_one_function = is_one_function(config)
        self.expert_layer = sum(layer.experts is not None for layer in config.layers[: self.layer_number - 1])
        for kind, add in (("attention_out_norm", "self_attn_bda"), ("mlp_out_norm", "mlp_bda")):
            if kind in _norms_of(config.layer(self.layer_number)):
                norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
                setattr(self, kind, norm)
                setattr(self, add, _with_change(getattr(self, add), functools.partial(_normed, norm)))
        if recomputes_mlp(config) and config.add_bias_linear:
            self.mlp.register_forward_hook(_copy_bias)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> [s, b, h], or [k, 1, h] at `PackedSequences.outputs`, and no context."""
        packed, outputs = kwargs.get("packed_seq_params"), None
        if isinstance(packed, PackedSequences):
            outputs = packed.outputs if self.layer_number == self.config.num_layers else None
            if self.is_one_function and outputs is None and packed.context is None:
                computed = whole_layer(self, kwargs["hidden_states"], kwargs.get("rotary_pos_emb"), packed)
                if computed is not None:
                    return computed, None
        hidden_states, context = self._forward_attention(*args, **kwargs)
        if outputs is not None:
            hidden_states = hidden_states.index_select(0, outputs)
        if isinstance(self.mlp, MoELayer):
            experts = packed.experts if isinstance(packed, PackedSequences) else None
            self.mlp.router.tokens = None if experts is None else LayerTokens(experts, self.expert_layer, outputs)
        return self._forward_mlp(hidden_states, kwargs.get("inference_context")), context


def _copy_bias(
    mlp: torch.nn.Module, _: Any, results: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make an MLP return a copy of its bias, which is added later.

    megatron-core recomputes the whole MLP. A parameter that a recomputed function returns would become its result, no
    longer a leaf, and the parameter's gradient would need the function again, without end.
    """
    output, bias = results
    return output, None if bias is None else bias.clone()


_Added = tuple[torch.Tensor, torch.Tensor | None]  # to the residual stream; the second is a bias
_GetAdd = Callable[[bool, bool], Callable[..., torch.Tensor]]


def _with_change(get: _GetAdd, change: Callable[[_Added], _Added]) -> _GetAdd:
    """As ``get`` (`get_bias_dropout_add`), with a change of what is added to the residual stream."""

    def changed(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = get(training, fused)
        return lambda added, residual, dropout: add(change(added), residual, dropout)

    return changed


def _normed(norm: Norm, added: _Added) -> _Added:
    x, bias = added
    return norm(x if bias is None else x + bias), None


def _scaled(multiplier: float, added: _Added) -> _Added:
    x, bias = added
    return x * multiplier, None if bias is None else bias * multiplier


def _norms_of(layer: Layer) -> Collection[str]:
    return LAYER_NORMS[layer.layer_norms]


# As in NeMo's checkpoints, the last two in those of Gemma 2.
_STORED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "attention_out_norm.": "self_attention.linear_proj.post_layernorm.",
    "mlp_out_norm.": "mlp.linear_fc2.post_layernorm.",
}


def block_spec(config: LayerConfig, *, separate_norms: bool = False) -> TransformerBlockSubmodules | ModuleSpec:
    """The specification of one transformer block for megatron-core's `GPTModel`.

    Args:
        separate_norms: Transformer Engine's norms are not fused into the linear layers that follow them.
    """
    if uses_transformer_engine(config.params_dtype, config.layers):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        spec.module = TrainedLayer
        spec.submodules.self_attention.module = EngineSelfAttention
        spec.submodules.self_attn_bda = spec.submodules.mlp_bda = _add(config.layers[0])
        if separate_norms:
            _separate_norms(spec.submodules)
        if config.use_te_activation_func:
            # megatron-core's, unfused, keeps 5 numbers per token and unit for the backward pass; ours keeps 3.
            spec.submodules.mlp.submodules.activation_func = SwiGLU
        return spec
    first = get_transformer_layer_offset(config)
    own = config.layers[first : first + get_num_layers_to_build(config)]
    return TransformerBlockSubmodules(layer_specs=[_layer_spec(config, layer) for layer in own], layer_norm=Norm)


def _add(layer: Layer) -> _GetAdd:
    """How a layer adds to the residual stream, but for norms."""
    multiplier = layer.residual_multiplier
    return (
        get_bias_dropout_add
        if multiplier == 1
        else _with_change(get_bias_dropout_add, functools.partial(_scaled, multiplier))
    )


def _head_norms(config: LayerConfig, layer: Layer) -> dict[str, ModuleSpec | type]:
    """The norms of queries and keys."""
    heads = {"q_layernorm": config.num_attention_heads, "k_layernorm": config.num_query_groups}
    if layer.qk_norm_over_heads:
        return {name: ModuleSpec(NormOverHeads, params={"num_heads": number}) for name, number in heads.items()}
    return dict.fromkeys(heads, Norm if layer.qk_layernorm else IdentityOp)


def _layer_spec(config: LayerConfig, layer: Layer) -> ModuleSpec:
    """A layer of our own modules."""
    norms = _norms_of(layer)
    return ModuleSpec(
        module=TrainedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm if "input_norm" in norms else IdentityOp,
            self_attention=ModuleSpec(
                module=LocalSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowLinear,
                    **_head_norms(config, layer),
                ),
            ),
            self_attn_bda=_add(layer),
            pre_mlp_layernorm=Norm if "mlp_norm" in norms else IdentityOp,
            mlp=_mlp_spec(config, layer),
            mlp_bda=_add(layer),
            sharded_state_dict_keys_map=_stored_norms(layer),
        ),
    )


def _mlp_spec(config: LayerConfig, layer: Layer) -> ModuleSpec:
    """An MLP, or experts: megatron-core's, which compute their tokens one expert after the other."""
    matrices = MLPSubmodules(
        linear_fc1=ColumnLinear,
        activation_func=SwiGLU if config.use_te_activation_func else None,
        linear_fc2=RowLinear,
    )
    if layer.experts is None:
        return ModuleSpec(module=MLP, submodules=matrices)
    experts, shared = (ModuleSpec(module=kind, submodules=matrices) for kind in (SequentialMLP, SharedExpertMLP))
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts, shared, ExpertRouter))


def _stored_norms(layer: Layer) -> dict[str, str]:
    """Experts have no first linear layer that their norm would be a part of."""
    kept = "pre_mlp_layernorm." if layer.experts is not None else None
    return {ours: stored for ours, stored in _STORED_NORMS.items() if ours != kept}


def _separate_norms(layer: TransformerLayerSubmodules) -> None:
    """Give Transformer Engine's layer norms of their own: an adapter beside a linear layer needs its normed input."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    layer.sharded_state_dict_keys_map = _STORED_NORMS
