"""What a forward pass keeps for the backward pass, in bytes: a formula that needs neither torch nor a model."""

from __future__ import annotations

import dataclasses

from nemo_style_aligner.engine.architecture import ModelArchitecture


def activation_bytes(
    architecture: ModelArchitecture,
    itemsize: int,
    granularity: str | None = None,
    tp_size: int = 1,
    recomputes_mlp: bool = False,
    recomputed_layers: int | None = None,
    fused_norms: bool = False,
    torch_attention: bool = False,
) -> int:
    """Bytes of activations per packed token that the backward pass needs; docs/architecture.md has the formula.

    Args:
        itemsize: bytes per number.
        granularity: which activations are recomputed: None, ``selective`` or ``full``.
        tp_size: ranks that share each layer. Each is taken to hold all hidden states (no sequence parallelism).
        recomputes_mlp: ``selective`` recomputes the whole MLP, as with Transformer Engine's layers.
        recomputed_layers: as many layers are recomputed by ``full``, the others keep everything; None: all.
        fused_norms: LayerNorm keeps its input as it is (Transformer Engine's), not in fp32 (our own).
        torch_attention: attention keeps rotated copies of queries and keys; see `layers.uses_torch_attention`.
    """
    a = architecture
    h, inner = a.hidden_size, _Inner(a, granularity, tp_size)
    query, key = (heads * a.kv_channels // tp_size for heads in (a.num_attention_heads, a.num_query_groups))
    layer = (6 if a.layer_norms == "both" else 4) * h + (3 if torch_attention else 2) * (query + key)
    if a.norm_has_bias and not fused_norms:
        layer += 2 * h * (4 - itemsize) // itemsize
    if a.qk_layernorm:  # queries and keys before and behind their norms; for compiled functions, values beside either
        layer += query + (1 if torch_attention else 2) * key
        if query != key:  # a group's queries do not lie as their norm needs them: a copy
            layer += query
    of_mlp, of_experts = layer + inner.numbers(a.ffn_hidden_size), layer + inner.of_experts(itemsize)
    if granularity == "selective":
        are_inputs = not a.norm_has_bias and a.layer_norms != "after"  # what comes out of norms, of linear layers
        of_mlp -= h + inner.numbers(a.ffn_hidden_size) if recomputes_mlp else 2 * h * are_inputs
        of_experts -= h * are_inputs  # a router keeps its input
    num_recomputed = 0
    if granularity == "full":
        num_recomputed = a.num_layers if recomputed_layers is None else recomputed_layers
    kept = a.expert_layers[num_recomputed:]
    return itemsize * (num_recomputed * h + sum(of_experts if has else of_mlp for has in kept))


@dataclasses.dataclass(frozen=True)
class _Inner:
    """What MLPs and experts keep beside their input, in numbers per token; see `activation_bytes`."""

    a: ModelArchitecture
    granularity: str | None
    tp_size: int

    def numbers(self, size: int) -> int:
        """Of an MLP of an inner ``size``: inputs of its activation and of its second layer, or what is between."""
        f, a = size // self.tp_size, self.a
        if not (a.gated and a.activation == "silu"):
            return 5 * f if a.gated else 2 * f  # several functions
        return 2 * f if self.granularity == "selective" else 3 * f  # see `models.recompute`

    def of_experts(self, itemsize: int) -> int:
        """Of a router and its experts: each keeps its tokens, and what its activation gave before it is weighted.

        Indices, weights and the router's scores do not depend on the dtype.
        """
        if (experts := self.a.experts) is None:
            return 0
        size = experts.ffn_hidden_size // self.tp_size
        each = self.a.hidden_size + dataclasses.replace(self, granularity=None, tp_size=1).numbers(size) + size
        beside = 24 * experts.per_token + 5 * experts.number + 28
        return experts.per_token * each + beside // itemsize + self.numbers(experts.shared_ffn_hidden_size)
