"""Self-attention for padded batches and packed rows; on CPUs, packed rows use compiled kernels where available."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from nemo_style_aligner.engine.architecture import EVERY_FEATURE, Layer
from nemo_style_aligner.engine.softcaps import stored_attention
from nemo_style_aligner.trainer.models.context import all_keys
from nemo_style_aligner.trainer.models.gpu_kernels import gpu_kernels
from nemo_style_aligner.trainer.models.layer_kernels import AttentionRow, LayerKernels, kernels_for
from nemo_style_aligner.trainer.models.spans import PackedSequences, Spans, rotary_angles, taken
from nemo_style_aligner.trainer.models.varlen_attention import has_varlen_attention, varlen_attention

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.triton_kernels import TritonKernels

_BLOCK = 1024  # queries that are computed together where all their scores, or which they are, are stored


@dataclasses.dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's config of a model's layers, with what it has no words for.

    Attributes:
        layers: what each of the model's layers computes.
        attention_factor: what cosines and sines of the rotary embedding are multiplied by.
        local_frequencies: radians per position of layers that rotate otherwise than the others (`Layer.local_rope`).
    """

    layers: tuple[Layer, ...] = ()
    attention_factor: float = 1.0
    local_frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_factor != 1:
            # megatron-core's own attention computes it from these: 0.1 * mscale * log(scaling factor) + 1.
            self.yarn_rotary_scaling_factor = math.e
            self.yarn_mscale, self.yarn_mscale_all_dim = 10 * (self.attention_factor - 1), 0.0
            self.apply_rope_fusion = False  # fused, packed rows would be turned without it

    def layer(self, layer_number: int) -> Layer:
        """What a layer (1-based) computes."""
        return self.layers[layer_number - 1]


class LocalSelfAttention(SelfAttention):
    """megatron-core's `SelfAttention`, with the rotary angles of packed rows computed once for all layers."""

    config: LayerConfig

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> [s, b, h] and the bias yet to be added; b = 1 for packed rows."""
        if packed_seq_params is None:
            if self.config.layer(self.layer_number).local_rope:
                return self._attend_padded(hidden_states)
            return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        layer, drops_out = self.config.layer(self.layer_number), self.training and self.core_attention.dropout > 0
        is_foreign = drops_out or layer.unknown(EVERY_FEATURE) or packed_seq_params.context
        kernels = None if is_foreign else kernels_for(hidden_states)
        in_fp32 = kernels or _rotating_kernels(hidden_states)
        dtype = torch.float32 if in_fp32 else hidden_states.dtype
        rotary = rotary_of(self.config, self.layer_number, packed_seq_params, rotary_pos_emb, dtype)
        if kernels:
            return self.linear_proj(self._attend_compiled(kernels, hidden_states, rotary, packed_seq_params.spans))
        return self._attend_rotated(self.core_attention, hidden_states, rotary, packed_seq_params)

    def _attend_rotated(
        self,
        core_attention: torch.nn.Module,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        packed: PackedSequences,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
        if rotary is not None:
            tables = [table[:, None] for table in rotary]
            query, key = _Rotation.apply(query, *tables), _Rotation.apply(key, *tables)
        if packed.context is not None:
            key, value = all_keys(torch.stack([key, value], 1), packed.context).unbind(1)
        return self.linear_proj(core_attention(query, key, value, packed_seq_params=packed))

    def _attend_padded(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> [s, b, h] and a bias, with rotary embedding of its own: megatron-core has one for all layers."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        positions = torch.arange(len(query), device=query.device)
        angles = rotary_angles(positions, self.config.local_frequencies)[:, None, None]
        angles = angles.expand(-1, query.shape[1], 1, -1).flatten(0, 1)
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        query, key = (_Rotation.apply(x.flatten(0, 1), cos, sin).view(x.shape) for x in (query, key))
        return self.linear_proj(self.core_attention(query, key, value))

    def _attend_compiled(
        self,
        kernels: LayerKernels,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        spans: Spans,
    ) -> torch.Tensor:
        """[t, 1, h] -> [t, 1, heads * d]: rotary embedding and attention on ``linear_qkv``'s output as it lies."""
        d = self.hidden_size_per_attention_head
        if not self.config.qk_layernorm and self.config.num_query_groups >= self.world_size:
            mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
        else:  # q and k are normalised first, or a group's query heads are on several ranks
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            mixed = torch.cat([query.reshape(*key.shape[:3], -1), key, value], -1)
        t, _, groups, _ = mixed.shape
        layer = self.config.layer(self.layer_number)
        row = AttentionRow(rotary, spans, layer.softmax_scale or d**-0.5, layer.attn_logit_softcapping, layer.window)
        out = _Attention.apply(mixed.reshape(t, groups, -1, d), self.core_attention.softmax_offset, row, kernels)
        return out.view(t, 1, -1)


class EngineSelfAttention(LocalSelfAttention):
    """megatron-core's, with Transformer Engine's parts; rows in which sequences share what they begin with are ours.

    Theirs turns each span from its own first token on, as if that were a sequence's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans_attention = CausalAttention(self.config, self.layer_number)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LocalSelfAttention.forward`."""
        packed = packed_seq_params
        if packed is None or (packed.spans.are_whole and packed.context is None):
            options = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed, **kwargs}
            return SelfAttention.forward(self, hidden_states, attention_mask, *args, **options)
        dtype = torch.float32 if _rotating_kernels(hidden_states) else hidden_states.dtype
        rotary = rotary_of(self.config, self.layer_number, packed, rotary_pos_emb, dtype)
        return self._attend_rotated(self.spans_attention, hidden_states, rotary, packed)


class CausalAttention(MegatronModule):
    """Causal core attention with grouped queries, on `scaled_dot_product_attention`.

    Padded batches are padded on the right, so causality already hides the padding from every real token and no
    other mask is needed. A packed row takes one call of torch's varlen attention where it is available, otherwise one
    call for each sequence.

    Attributes:
        softmax_offset: the scores of sinks, of this rank's heads, under megatron-core's name; None: there are none.
    """

    def __init__(self, config: LayerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        layer = config.layer(layer_number)
        self.dropout = config.attention_dropout
        self.scale = layer.softmax_scale  # None: torch's own, 1 / sqrt(d)
        self.softcap, self.window = layer.attn_logit_softcapping, layer.window
        self.softmax_offset: torch.nn.Parameter | None = None
        if layer.attention_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As megatron-core's core attention has it."""
        own = self.state_dict(prefix="", keep_vars=True)
        return cast(
            dict[str, Any], make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """``query`` [s, b, heads, d], ``key``/``value`` [s, b, groups, d] -> [s, b, heads * d].

        For a packed row: [t, heads, d], [t, groups, d] -> [t, 1, heads * d].
        """
        if attention_bias is not None:
            raise NotImplementedError("attention biases need Transformer Engine")
        if packed_seq_params is not None:
            return self._attend_packed(query, key, value, packed_seq_params)
        return self._attend(query, key, value)

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        drops_out = self.training and self.dropout > 0
        can = len(packed.spans.spans) > 1 and not drops_out and not self._stores_scores
        if can and has_varlen_attention(query, key, self.window):
            return varlen_attention(query, key, value, packed, self.scale, self.window).flatten(1)[:, None]
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        attended = [
            self._attend(taken(query, [span.queries]), taken(key, span.keys), taken(value, span.keys))
            for span in packed.spans
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Of as many keys as queries, or more: the last query sees all of them."""
        s, b, heads, _ = query.shape
        has_groups = heads != key.shape[2]
        if has_groups and query.device.type == "cuda" and query.dtype == torch.float32:
            # Flash attention takes no fp32, and in most torch versions the memory-efficient kernel takes no grouped
            # queries: the kernel left for fp32 with groups would store all scores.
            key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
            has_groups = False
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank drops out weights of its own heads. Under sequence parallelism megatron-core has
        # chosen the rank's own random stream for whole layers already.
        has_own_stream = not dropout or self.config.sequence_parallel
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with contextlib.nullcontext() if has_own_stream else get_cuda_rng_tracker().fork():
            is_whole = s == key.shape[2] and (self.window is None or self.window >= s)
            if is_whole and not self._stores_scores:
                out = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, dropout_p=dropout, scale=self.scale, enable_gqa=has_groups
                )
            else:
                blocks = _blocks(query, key, value, self.window)
                attended = [self._attend_block(*block, dropout, has_groups) for block in blocks]
                out = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)

    @property
    def _stores_scores(self) -> bool:
        """Whether `scaled_dot_product_attention` does not know what is done with scores."""
        return self.softcap is not None or self.softmax_offset is not None

    def _attend_block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, has_groups: bool
    ) -> torch.Tensor:
        """[b, heads, n, d], of [b, groups, m, d]. Scores that are stored are computed again in the backward pass,
        unless some are dropped out.
        """
        if not self._stores_scores:
            hidden = _hidden(query, key, self.window)
            return F.scaled_dot_product_attention(
                query, key, value, hidden, dropout_p=dropout, scale=self.scale, enable_gqa=has_groups
            )
        mask = _visible(query.shape[2], key.shape[2], self.window, query.device)
        sinks = None if self.softmax_offset is None else self.softmax_offset[:, None, None]
        arguments = query, key, value, mask, self.scale or query.shape[-1] ** -0.5, self.softcap, sinks
        if dropout or not torch.is_grad_enabled():
            return stored_attention(*arguments, dropout)
        return cast(torch.Tensor, checkpoint(stored_attention, *arguments, use_reentrant=False))


def _blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some queries [b, heads, n, d] at a time, with the keys and values [b, groups, m, d] that they see.

    Masks and stored scores then take memory in proportion to a sequence's length, not to its square.
    """
    before = key.shape[2] - query.shape[2]  # keys that all queries see
    for begin in range(0, query.shape[2], _BLOCK):
        end = min(begin + _BLOCK, query.shape[2])
        first = 0 if window is None else max(0, before + begin - window + 1)
        yield query[:, :, begin:end], key[:, :, first : before + end], value[:, :, first : before + end]


def _visible(n: int, m: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of m keys each of n queries sees, the last one the last ones: bool [n, m]."""
    mask = torch.ones(n, m, dtype=torch.bool, device=device).tril_(m - n)
    return mask if window is None else mask.triu_(m - n - window + 1)


def _hidden(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """What is added to scores so that each query [b, heads, n, d] sees its keys [b, groups, m, d] alone: [n, m].

    A view: masks of shorter blocks are the last rows and columns of those of longer ones, and what every block and
    layer keeps for its backward pass are the same numbers.
    """
    n, m = query.shape[2], key.shape[2]
    columns = 1 << (m - 1).bit_length()
    return _all_hidden(columns, window, query.dtype, query.device)[_BLOCK - n :, columns - m :]


@functools.lru_cache(maxsize=2)  # a model has one window, or one and none
def _all_hidden(columns: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # passes with and without gradients have the same
        seen = _visible(_BLOCK, columns, window, device)
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def rotary_of(
    config: LayerConfig, layer_number: int, packed: PackedSequences, angles: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines [t, r] by which a layer (1-based) rotates the tokens of a row; None: it does not.

    Args:
        angles: of all positions [s, 1, 1, r], of layers without a rotary embedding of their own.
    """
    layer = config.layer(layer_number)
    if layer.local_rope:
        return packed.rotate_locally(config.local_frequencies, dtype)
    return packed.rotate_by(angles if layer.rotates else None, dtype, config.attention_factor)


class _Attention(torch.autograd.Function):
    """`LayerKernels.attention`: saves its input and the log-sum-exp of the scores, not its output."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, sinks: torch.Tensor | None, row: AttentionRow, kernels: LayerKernels
    ) -> torch.Tensor:
        qkv, row = qkv.contiguous(), row if sinks is None else row._replace(sinks=sinks.detach().float().contiguous())
        out, lse = kernels.attention(qkv, row)
        ctx.save_for_backward(qkv, lse)
        ctx.row, ctx.kernels, ctx.dtype = row, kernels, None if sinks is None else sinks.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        qkv, lse = ctx.saved_tensors
        sinks = ctx.row.sinks
        products = None if sinks is None else torch.empty_like(lse)
        grad_qkv = ctx.kernels.attention_backward(grad.contiguous(), lse, qkv, ctx.row, products=products)
        if sinks is None or products is None:
            return grad_qkv, None, None, None
        # A sink's weight takes from what all keys give: of its score the gradient is -weight * output * its gradient.
        return grad_qkv, -((sinks - lse).exp() * products).sum(0).to(ctx.dtype), None, None


class _Rotation(torch.autograd.Function):
    """Rotary embedding (arXiv:2104.09864) of x [t, heads, d], by cosines and sines [t, 1, r] of the angles, r <= d."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def _rotating_kernels(x: torch.Tensor) -> TritonKernels | None:
    """Kernels that rotate tensors like ``x``, by cosines and sines in fp32; None: torch does, by those in its dtype."""
    return gpu_kernels(x.dtype, x.device) if x.is_cuda else None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    """Rotate pairs of components i and i + r / 2, backwards for ``direction`` -1; copy components from r on."""
    if kernels := _rotating_kernels(x):
        return kernels.rotate(x if x.stride(-1) == 1 else x.contiguous(), cos, sin, direction)
    r = cos.shape[-1]
    half = r // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half:r]
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half], value=-direction)
    torch.mul(second, cos[..., :half], out=out[..., half:r]).addcmul_(first, sin[..., :half], value=direction)
    if r < x.shape[-1]:
        out[..., r:] = x[..., r:]
    return out
