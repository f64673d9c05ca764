"""What a forward pass keeps for the backward pass, in bytes: a formula that needs neither torch nor a model."""

from __future__ import annotations

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
    h, f = a.hidden_size, a.ffn_hidden_size // tp_size
    query, key = (heads * a.kv_channels // tp_size for heads in (a.num_attention_heads, a.num_query_groups))
    is_rms_norm, is_swiglu = not a.norm_has_bias, a.gated and a.activation == "silu"
    # In the MLP, inputs of its activation and of its second layer; where these are several functions, what is between.
    mlp = 3 * f if is_swiglu else 5 * f if a.gated else 2 * f
    layer = (6 if a.layer_norms == "both" else 4) * h + (3 if torch_attention else 2) * (query + key) + mlp
    if not is_rms_norm and not fused_norms:
        layer += 2 * h * (4 - itemsize) // itemsize
    if a.qk_layernorm:  # queries and keys before and behind their norms; for compiled functions, values beside either
        layer += query + (1 if torch_attention else 2) * key
        if query != key:  # a group's queries do not lie as their norm needs them: a copy
            layer += query
    if granularity == "selective":
        are_inputs = is_rms_norm and a.layer_norms != "after"  # what comes out of norms, of linear layers
        recomputed = 2 * h * are_inputs + f * is_swiglu  # see `models.recompute`
        layer -= h + mlp if recomputes_mlp else recomputed
    num_recomputed = 0
    if granularity == "full":
        num_recomputed = a.num_layers if recomputed_layers is None else recomputed_layers
    return itemsize * (num_recomputed * h + (a.num_layers - num_recomputed) * layer)
