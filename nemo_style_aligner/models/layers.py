"""The transformer layer: Transformer Engine's where it is installed, plain torch's where it is not.

Both have the same parameters. Transformer Engine fuses the norm into the linear layer that follows it
(``linear_qkv.layer_norm_weight``); megatron-core's key map stores ours under the same names, so that
checkpoints are interchangeable between the two.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers can be used: it is installed and there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class Norm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450) or its zero-centred form (``layernorm1p``).

    Input and output ``[..., hidden_size]``. Computed in fp32 whatever the dtype of the input.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
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
        weight = self.weight.float() + 1 if self.zero_centered else self.weight.float()
        shape = (x.shape[-1],)
        if self.bias is None:
            return F.rms_norm(x.float(), shape, weight, self.eps).to(x.dtype)
        return F.layer_norm(x.float(), shape, weight, self.bias.float(), self.eps).to(x.dtype)


class CausalAttention(MegatronModule):
    """Core attention on `scaled_dot_product_attention`: causal, with grouped queries.

    Sequences are padded on the right, so causality already hides the padding from every real token and no
    other mask is wanted.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """``query`` [s, b, heads, d], ``key``/``value`` [s, b, groups, d] -> [s, b, heads * d]."""
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("packed sequences and attention biases need Transformer Engine")
        s, b, heads, _ = query.shape
        if s not in (1, key.shape[0]):
            raise NotImplementedError("a KV cache is filled from its start and then extended token by token")
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=s > 1,  # a single new token sees all that went before
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=heads != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules | ModuleSpec:
    """The specification of one transformer block for megatron-core's `GPTModel`."""
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    head_norm = Norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * _layers_on_this_stage(config), layer_norm=Norm)


def _layers_on_this_stage(config: TransformerConfig) -> int:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    return get_num_layers_to_build(config)
