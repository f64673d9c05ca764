"""The shape of a model: one dataclass that every part of the project reads.

`ModelArchitecture` is what NeMo's ``model_config.yaml``, a Hugging Face ``config.json`` and
megatron-core's ``TransformerConfig`` have in common. Training models, the weight layout table,
checkpoints and the generation engine are all built from it, so a fact about a model's shape is
written down once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from nemo_style_aligner.engine.rope import RopeScaling, inverse_frequencies

if TYPE_CHECKING:
    import torch

# Those with 1p store their weights less one.
Normalization = Literal["rmsnorm", "rmsnorm1p", "layernorm", "layernorm1p"]
NormPlaces = Literal["before", "after", "both"]
RouterScores = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu-tanh", "squared-relu"]  # gelu-tanh: its approximation by tanh

# NeMo's `activation` strings -> (activation, gated). "fast-" variants name fused kernels of old
# NeMo versions; the function is the same.
_NEMO_ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "gelu": ("gelu", False),
    "squared-relu": ("squared-relu", False),
}

GATE_SLOPE, GATE_LIMIT = 1.702, 7.0
"""Of a clamped SwiGLU: g sigmoid(slope g) (u + 1), where g is the gate, at most the limit, and u the other half, cut to
[-limit, limit]."""

LARGEST_LENGTH = 1 << 24
"""Positions that a model may have at most; the most of any that is known are 10 million."""

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads", "num_query_groups")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")  # 1: none
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_POSITIVE = (
    *("layernorm_epsilon", "rotary_base", "rotary_percentage", "init_method_std", "softmax_scale"),
    *(*MULTIPLIERS, *_SOFTCAPS),
)
_WINDOWS = ("sliding_window", "local_rotary_base")

# Fields that are keys of NeMo's config; and its names of others.
_OF_NEMO = (
    *(*_SIZES, "kv_channels", "max_position_embeddings", "normalization", "bias", "qkv_bias", "qk_layernorm"),
    *("layernorm_epsilon", "rotary_base", "rotary_percentage", "init_method_std"),
)
_TIED, _FAMILY = "share_embeddings_and_output_weights", "hf_model_type"
_SCALING = "moe_router_topk_scaling_factor"

_LEEWAY = 4  # how many times as many weights a model may seem to have as there are

# The most that is built: beyond it a file is mistaken or hostile, which is found before memory is taken.
_LARGEST = {
    "num_layers": 1000,
    "max_position_embeddings": LARGEST_LENGTH,
    "kv_channels": 1 << 16,
    "rotary_percentage": 100,
}
_LARGEST_OF_EXPERTS = {"number": 10_000, "per_token": 10_000, "ffn_hidden_size": 1 << 24}

_OFF = (None, False)
_ZERO_CENTERED = "layernorm_zero_centered_gamma"
NEMO_FEATURES_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": _OFF,
    "transformer_block_type": (None, "pre_ln"),
    "attention_type": (None, "multihead"),
    "multi_latent_attention": _OFF,
    "normalize_attention_scores": (None, True),
    "headscale": _OFF,
    "apply_embedding_scaling": _OFF,  # Gemma
    "mcore_customization_config": (None, {}),  # Gemma 2
    "drop_layers": (None, []),
    "moe_router_num_groups": (None, 1),  # DeepSeek
    "moe_router_group_topk": (None, 1),
    "moe_shared_expert_gate": _OFF,  # Qwen2-MoE
    "moe_expert_capacity_factor": (None,),  # tokens would be dropped
    "moe_apply_probs_on_input": _OFF,  # Llama 4
    "moe_input_jitter_eps": (None, 0),
    "glu_linear_offset": (None, 0),  # GPT-OSS in Megatron-Core's words; here its activation has a name
    "activation_func_clamp_value": (None,),
}
"""Keys of NeMo that change what a model computes, and the values with which it can be built here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFeatures:
    """What layers compute, beside their sizes. The defaults are Llama's."""

    layer_norms: NormPlaces = "before"  # of inputs of attention and MLP, of what these add (OLMo 2), of both (Gemma 2)
    normalization: Normalization = "rmsnorm"
    activation: Activation = "silu"
    gated: bool = True  # SwiGLU when activation is silu
    clamped_swiglu: bool = False  # that of GPT-OSS, see `GATE_SLOPE`
    bias: bool = False  # biases on all linear layers, routers and experts too (and LayerNorm has its own always)
    qkv_bias: bool = False  # biases on the q, k and v projections only (Qwen2)
    qk_layernorm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    qk_norm_over_heads: bool = False  # over all of a token's heads together instead (OLMo 2)
    softmax_scale: float | None = None  # factor of attention scores; None: 1 / sqrt(kv_channels)
    attn_logit_softcapping: float | None = None  # c: scores are c tanh(score / c) (Gemma 2); None: as they are
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream (Granite)
    attention_sinks: bool = False  # a learned score of each head, of nothing, beside those of the keys (GPT-OSS)

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms are LayerNorms."""
        return self.normalization.startswith("layernorm")

    @property
    def norm_offset(self) -> float:
        """What is added to the stored weights of norms."""
        return 1.0 if self.normalization.endswith("1p") else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """What a layer has in place of an MLP: experts, of which each token's output is a weighted sum of a few.

    A token's scores are those of a linear layer, the router, in fp32. The experts with the largest scores, and bias if
    there is one, are chosen; their scores, without bias, are their weights. Sigmoids are divided by their sum. Whether
    router and experts, as linear layers, have biases is the model's `LayerFeatures.bias`.
    """

    number: int
    per_token: int
    ffn_hidden_size: int  # of each
    scores: RouterScores = "softmax"
    normalized: bool = True  # softmax over the chosen alone; False: over all experts
    scaling: float = 1.0  # of the weights (GLM-4.5)
    has_bias: bool = False  # of the choice
    shared_ffn_hidden_size: int = 0  # of an MLP that computes every token and is added; 0: there is none

    def __post_init__(self) -> None:
        for field in ("number", "per_token", "ffn_hidden_size"):
            if not 1 <= getattr(self, field) <= _LARGEST_OF_EXPERTS[field]:
                raise ValueError(
                    f"experts: {field} must be in [1, {_LARGEST_OF_EXPERTS[field]:,}], got {getattr(self, field)}"
                )
        if self.per_token > self.number:
            raise ValueError(f"a token cannot have {self.per_token} of {self.number} experts")
        if self.scores not in get_args(RouterScores):
            raise ValueError(f"scores={self.scores!r} of experts are not one of {', '.join(get_args(RouterScores))}")
        if self.scores == "softmax" and self.normalized and self.per_token == 1:
            raise ValueError("one expert per token, whose weight is normalized to 1: its router could not learn")
        if self.scores == "sigmoid" and not self.normalized:
            raise ValueError("experts with sigmoid scores that are not normalized are not supported")
        if self.has_bias and self.scores != "sigmoid":
            raise ValueError("experts with a bias and softmax scores are not supported")
        if not 0 < self.scaling < math.inf or self.shared_ffn_hidden_size < 0:
            raise ValueError("experts: scaling must be above 0, and shared_ffn_hidden_size not below")

    @classmethod
    def from_nemo_config(cls, cfg: Mapping[str, Any], ffn_hidden_size: int) -> Experts | None:
        """Those of a ``model_config.yaml``, in megatron-core's words; None: there are none.

        Args:
            ffn_hidden_size: of an expert, where the config does not say.
        """
        number = _whole(cfg, "num_moe_experts")
        if not number:
            return None
        sigmoid = cfg.get("moe_router_score_function") == "sigmoid"
        return cls(
            number=number,
            per_token=_whole(cfg, "moe_router_topk") or 2,  # megatron-core's own default
            ffn_hidden_size=_whole(cfg, "moe_ffn_hidden_size") or ffn_hidden_size,
            scores=cfg.get("moe_router_score_function") or "softmax",
            normalized=sigmoid or not _flag(cfg, "moe_router_pre_softmax"),
            scaling=_number(cfg, _SCALING) if cfg.get(_SCALING) is not None else 1.0,
            has_bias=_flag(cfg, "moe_router_enable_expert_bias"),
            shared_ffn_hidden_size=_whole(cfg, "moe_shared_expert_intermediate_size"),
        )

    def to_nemo_config(self) -> dict[str, Any]:
        """The keys of a ``model_config.yaml``, which are megatron-core's arguments, too."""
        return {
            "num_moe_experts": self.number,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_router_score_function": self.scores,
            "moe_router_pre_softmax": self.scores == "softmax" and not self.normalized,
            _SCALING: self.scaling if self.scaling != 1 else None,
            "moe_router_enable_expert_bias": self.has_bias,
            "moe_shared_expert_intermediate_size": self.shared_ffn_hidden_size or None,
        }

    def parameters(self, hidden_size: int, matrices: int, bias: bool, *, active: bool = False) -> int:
        """Parameters of one layer's experts and router.

        Args:
            matrices: of each expert.
            bias: whether linear layers have one.
            active: only those that a token's output depends on.
        """
        experts = (self.per_token if active else self.number) * self.parameters_of_one(hidden_size, matrices, bias)
        router = self.number * (hidden_size + bias + self.has_bias)
        return experts + router + hidden_size * matrices * self.shared_ffn_hidden_size

    def parameters_of_one(self, hidden_size: int, matrices: int, bias: bool) -> int:
        """Parameters of one expert; see `parameters`."""
        biases = (matrices - 1) * self.ffn_hidden_size + hidden_size if bias else 0
        return matrices * hidden_size * self.ffn_hidden_size + biases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(LayerFeatures):
    """What one layer computes: what all have in common, and what differs from layer to layer.

    Everything that computes layers reads this. What does not know all of it names what it knows (`unknown`), so that it
    steps aside for a field that is added later.
    """

    no_rope: bool = False  # no rotary embedding (SmolLM3)
    local_rope: bool = False  # one of its own, of `local_rotary_base` (Gemma 3)
    window: int | None = None  # w: a query sees its own position and w - 1 before it (Mistral); None: all before it
    experts: Experts | None = None  # in place of an MLP

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated."""
        return not self.no_rope

    def unknown(self, known: Collection[str]) -> list[str]:
        """Fields in which the layer differs from Llama's, but for those that are ``known``."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in known)
        return [name for name in names if getattr(self, name) != getattr(_PLAIN, name)]


_PLAIN = Layer()
ENDS = ("embedding_multiplier", "logits_scaling", "final_logit_softcapping")
"""Features of a model before and behind its layers."""

EVERY_FEATURE = frozenset(
    ("layer_norms", "normalization", "activation", "gated", "bias", "qkv_bias", "qk_layernorm", "qk_norm_over_heads")
    + ("clamped_swiglu", "softmax_scale", "attn_logit_softcapping", "residual_multiplier", "attention_sinks")
    + ("no_rope", "local_rope", "window", "experts")
)
"""All that there is today, spelled out: who knows it does not know what is added to `Layer` tomorrow."""


@dataclasses.dataclass(frozen=True)
class ModelArchitecture(LayerFeatures):
    """Shape of a decoder-only transformer. All sizes are global (not per rank).

    ``vocab_size`` is the number of rows of the embedding in the Hugging Face sense: without the
    padding that tensor parallelism adds. It may exceed the tokenizer's number of tokens.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    kv_channels: int = 0  # size of one head; 0 means hidden_size / num_attention_heads
    max_position_embeddings: int = 4096
    layernorm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    rotary_base: float = 10000.0
    rotary_percentage: float = 1.0
    rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] = ()  # layers (0-based) that do not rotate (SmolLM3)
    sliding_window: int | None = None  # positions that a query sees, its own included, in `windowed_layers`
    windowed_layers: tuple[int, ...] = ()  # layers (0-based) with that window (Mistral: all; Gemma: some)
    local_rotary_base: float | None = None  # of these, unscaled; None: they rotate as the others (Gemma 3, OLMo 3)
    experts: Experts | None = None  # of layers that have them in place of an MLP
    dense_layers: tuple[int, ...] = ()  # layers (0-based) that have an MLP in a model with experts (GLM-4.5)
    embedding_multiplier: float = 1.0  # of embeddings (Granite; Gemma 2: the root of hidden_size)
    logits_scaling: float = 1.0  # what logits are divided by (Granite)
    final_logit_softcapping: float | None = None  # c: logits are c tanh(logit / c) (Gemma 2)
    init_method_std: float = 0.02
    family: str = "llama"  # the Hugging Face `model_type` written on export

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in (*_POSITIVE, *_WINDOWS):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field} must be a number above 0, got {value}")
        for field, most in _LARGEST.items():
            if getattr(self, field) > most:
                raise ValueError(f"{field} must be at most {most:,}, got {getattr(self, field):,}")
        if self.kv_channels == 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; set kv_channels to the size of one head"
                )
            object.__setattr__(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.kv_channels < 1:
            raise ValueError(f"kv_channels must be at least 1, got {self.kv_channels}")
        if self.turned_channels > self.kv_channels:
            raise ValueError(
                f"kv_channels={self.kv_channels}, rotary_percentage={self.rotary_percentage}: {self.turned_channels} "
                "channels of each head would be rotated (an even number), more than it has; lower rotary_percentage"
            )
        self._check_layers()
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        self._check_features()

    def _check_features(self) -> None:
        if self.experts is not None and not self.gated:
            raise ValueError("experts in a model without gates are not supported")
        if self.experts is not None and self.experts.shared_ffn_hidden_size and self.bias:
            raise ValueError("a shared expert in a model with biases on all linear layers is not supported")
        if self.clamped_swiglu and not (self.gated and self.activation == "silu"):
            raise ValueError(f"clamped_swiglu with activation={self.activation!r}, gated={self.gated}: it is a SwiGLU")
        if self.qk_layernorm and self.norm_has_bias:
            raise ValueError(
                f"qk_layernorm with normalization={self.normalization!r}: only RMSNorm can normalise queries and keys"
            )
        if self.qk_norm_over_heads and not self.qk_layernorm:
            raise ValueError("qk_norm_over_heads says which norm of queries and keys: set qk_layernorm, too")
        if self.layer_norms not in get_args(NormPlaces):
            raise ValueError(f"layer_norms={self.layer_norms!r} is not one of {', '.join(get_args(NormPlaces))}")

    def _check_layers(self) -> None:
        for field in ("no_rope_layers", "windowed_layers", "dense_layers"):
            if not set(getattr(self, field)) <= set(range(self.num_layers)):
                raise ValueError(f"{field} {getattr(self, field)} are not among the {self.num_layers} layers")
        if (self.sliding_window is None) != (not self.windowed_layers):
            raise ValueError(
                f"sliding_window={self.sliding_window}, windowed_layers={self.windowed_layers}: give both or neither"
            )
        if self.local_rotary_base is not None and not self.windowed_layers:
            raise ValueError(f"local_rotary_base={self.local_rotary_base} is of windowed_layers, and there are none")

    def _check_scaling(self, scaling: RopeScaling) -> None:
        if scaling.limit is not None and self.max_position_embeddings > scaling.limit:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings}: in sequences of more than {scaling.limit} "
                f"tokens rope_type {scaling.rope_type!r} turns all tokens otherwise than in shorter ones: a response "
                f"would change what comes before it as it grows. Set it (in a job: model.encoder_seq_length) to "
                f"{scaling.limit} or less"
            )
        if scaling.short_factor and len(scaling.short_factor) != self.turned_channels // 2:
            raise ValueError(
                f"rope scaling has factors for {len(scaling.short_factor)} frequencies, the model has "
                f"{self.turned_channels // 2} (half of the channels of a head that are rotated)"
            )

    # ---- NeMo model_config.yaml -------------------------------------------------------------

    @classmethod
    def from_nemo_config(cls, cfg: Mapping[str, Any]) -> ModelArchitecture:
        """Read the architecture keys of a NeMo ``model_config.yaml`` (the ``model`` section).

        Raises:
            ValueError: a size that cannot be defaulted is missing, a value is of another type, or the model has a
                feature this project does not build.
        """
        missing = [k for k in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size") if cfg.get(k) is None]
        if missing == ["vocab_size"]:
            raise ValueError(
                "model config lacks vocab_size, which NeMo leaves to the tokenizer, and the archive has no tokenizer "
                "that can be read: unpack it (tar -xf) and put a Hugging Face tokenizer's files into tokenizer/"
            )
        if missing:
            raise ValueError(f"model config lacks {', '.join(missing)}: not a complete model_config.yaml")
        activation = cfg.get("activation") or "gelu"
        if not isinstance(activation, str) or activation not in _NEMO_ACTIVATIONS:
            raise ValueError(f"model.activation={activation!r} is not one of {sorted(_NEMO_ACTIVATIONS)}")
        position = cfg.get("position_embedding_type", "rope")
        if position != "rope":
            raise ValueError(f"model.position_embedding_type={position!r}: only 'rope' models are supported")
        said = cfg.get("normalization", "layernorm")  # NeMo's own default
        normalization: Any = said.lower() if isinstance(said, str) else said  # megatron writes RMSNorm
        if normalization not in ("rmsnorm", "layernorm", "layernorm1p"):
            raise ValueError(f"model.normalization={said!r} is not rmsnorm, layernorm or layernorm1p")
        if _flag(cfg, _ZERO_CENTERED):
            normalization = normalization.removesuffix("1p") + "1p"
        foreign = {key: cfg[key] for key, plain in NEMO_FEATURES_NOT_BUILT.items() if cfg.get(key) not in plain}
        if foreign:
            named = ", ".join(f"model.{key}={value}" for key, value in foreign.items())
            raise ValueError(f"models with {named} are not supported: their results would be wrong")
        act, gated = _NEMO_ACTIVATIONS[activation]
        if act == "gelu" and _is_by_tanh(cfg, gated):
            act = "gelu-tanh"
        sizes: dict[str, Any] = {key: _whole(cfg, key) for key in (*_SIZES, "kv_channels")}
        sizes["ffn_hidden_size"] = sizes["ffn_hidden_size"] or 4 * sizes["hidden_size"]
        sizes["num_query_groups"] = sizes["num_query_groups"] or sizes["num_attention_heads"]
        numbers: dict[str, Any] = {key: _number(cfg, key) for key in _POSITIVE if key in cfg}
        qkv_bias = "add_qkv_bias" if cfg.get("qkv_bias") is None else "qkv_bias"  # megatron's name and NeMo's
        return cls(
            **sizes,
            **numbers,
            max_position_embeddings=_whole(cfg, "max_position_embeddings") or _whole(cfg, "encoder_seq_length") or 4096,
            normalization=normalization,
            activation=act,
            gated=gated,
            bias=_flag(cfg, "bias"),
            qkv_bias=_flag(cfg, qkv_bias),
            qk_layernorm=_flag(cfg, "qk_layernorm"),
            qk_norm_over_heads=_flag(cfg, "qk_norm_over_heads"),
            clamped_swiglu=_flag(cfg, "clamped_swiglu"),
            layer_norms=cfg.get("layer_norms") or "before",
            tied_embeddings=_flag(cfg, _TIED),
            rope_scaling=RopeScaling.from_nemo_config(_rope_keys(cfg)),
            no_rope_layers=_marked_layers(cfg.get("no_rope_freq"), sizes["num_layers"], "no_rope_freq"),
            attention_sinks=_has_sinks(cfg),
            **_windows(cfg, sizes["num_layers"]),
            experts=Experts.from_nemo_config(cfg, sizes["ffn_hidden_size"]),
            dense_layers=_dense_layers(cfg, sizes["num_layers"]),
            family=str(cfg.get(_FAMILY, "llama")),
        )

    def to_nemo_config(self) -> dict[str, Any]:
        """The keys of ``model_config.yaml`` that describe this architecture (NeMo's names)."""
        is_tanh = self.activation == "gelu-tanh"
        kind = ("gelu" if is_tanh else self.activation, self.gated)
        activation = next(name for name, of in _NEMO_ACTIVATIONS.items() if of == kind)
        config: dict[str, Any] = {key: getattr(self, key) for key in _OF_NEMO} | {
            "activation": activation,
            _TIED: self.tied_embeddings,
            "position_embedding_type": "rope",
            _FAMILY: self.family,
        }
        if self.rope_scaling is not None:
            config |= self.rope_scaling.to_nemo_config()
        if self.no_rope_layers:
            config["no_rope_freq"] = [int(layer in self.no_rope_layers) for layer in range(self.num_layers)]
        if self.experts is not None:
            config |= self.experts.to_nemo_config() | {"moe_layer_freq": self.expert_layers}
        if self.normalization == "rmsnorm1p":  # NeMo has no name for it
            config |= {"normalization": "rmsnorm", _ZERO_CENTERED: True}
        if self.attention_sinks:
            config["softmax_type"] = "learnable"
        if self.sliding_window is not None:
            config["window_size"] = [self.sliding_window - 1, 0]
            config["window_attn_skip_freq"] = [int(i in self.windowed_layers) for i in range(self.num_layers)]
        own: tuple[str, ...] = (
            "layer_norms",
            "qk_norm_over_heads",
            "softmax_scale",
            "local_rotary_base",
            "clamped_swiglu",
        )
        own += MULTIPLIERS + _SOFTCAPS
        config |= {key: getattr(self, key) for key in own if getattr(self, key) != DEFAULTS[key]}
        if kind[0] == "gelu":
            config |= {"openai_gelu": is_tanh, "bias_activation_fusion": False}
        return config

    # ---- layers -----------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer computes. A window as long as the longest sequence is none."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(LayerFeatures)}
        window, no_rope = self.sliding_window, self.no_rope_layers
        window = None if window is None or window >= self.max_position_embeddings else window

        @functools.cache
        def layer(no_rope: bool, windowed: bool, has_experts: int) -> Layer:
            return Layer(
                **common,
                no_rope=no_rope,
                local_rope=windowed and not no_rope and self.local_rotary_base is not None,
                window=window if windowed else None,
                experts=self.experts if has_experts else None,
            )

        kinds = enumerate(self.expert_layers)
        return tuple(layer(i in no_rope, i in self.windowed_layers, has_experts) for i, has_experts in kinds)

    @functools.cached_property
    def expert_layers(self) -> list[int]:
        """Of each layer, 1 if it has experts, 0 if it has an MLP; megatron-core's ``moe_layer_freq``."""
        return [int(self.experts is not None and i not in self.dense_layers) for i in range(self.num_layers)]

    @property
    def reach(self) -> int | None:
        """How many positions, its own included, any layer's query sees at most; None: all before it."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    def unknown(self, known: Collection[str]) -> list[str]:
        """Features of any layer, or of the model's ends, that are not as in Llama and not among the ``known``."""
        named = [name for layer in dict.fromkeys(self.layers) for name in layer.unknown(known)]
        named += [name for name in ENDS if name not in known and getattr(self, name) != DEFAULTS[name]]
        return list(dict.fromkeys(named))

    # ---- sizes ------------------------------------------------------------------------------

    @property
    def rotary_size(self) -> int:
        """Channels of a head to rotate, as configured; the spacing of the rotary frequencies depends on it."""
        return int(self.kv_channels * self.rotary_percentage)

    @property
    def turned_channels(self) -> int:
        """Channels of a head that are rotated: `rotary_size`, and one more if that is odd, as in Megatron."""
        return (self.rotary_size + 1) // 2 * 2

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return self.kv_channels**-0.5 if self.softmax_scale is None else self.softmax_scale

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Of the rotary embedding: radians per position, fp32 [turned channels / 2]; factor of cosines and sines."""
        return inverse_frequencies(self.rotary_base, self.rotary_size, self.rope_scaling)

    def local_frequencies(self) -> torch.Tensor | None:
        """`frequencies` of layers with a base of their own, which have no factor; None: there are none."""
        base = self.local_rotary_base
        return None if base is None else inverse_frequencies(base, self.rotary_size, None)[0]

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model; tied embeddings count once."""
        return self._num_parameters(active=False)

    def _num_parameters(self, *, active: bool) -> int:
        """Parameters; if ``active``, of each layer's experts as many as a token has."""
        h, d = self.hidden_size, self.kv_channels
        qkv_out = d * (self.num_attention_heads + 2 * self.num_query_groups)
        attention = h * qkv_out + h * d * self.num_attention_heads
        attention += qkv_out if self.bias or self.qkv_bias else 0
        attention += h if self.bias else 0
        attention += sum(self.qk_norm_sizes) + self.num_attention_heads * self.attention_sinks
        matrices = 3 if self.gated else 2
        fc1_out = self.ffn_hidden_size * (matrices - 1)
        mlp = h * fc1_out + h * self.ffn_hidden_size + (fc1_out + h if self.bias else 0)
        with_experts = sum(self.expert_layers)
        mlps = (self.num_layers - with_experts) * mlp
        if self.experts is not None:
            mlps += with_experts * self.experts.parameters(h, matrices, self.bias, active=active)
        norm = 2 * h if self.norm_has_bias else h
        norms = norm * (4 if self.layer_norms == "both" else 2)
        embeddings = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + norms) + mlps + norm + embeddings

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Weights of a layer's norms of queries and of keys; empty: there are none."""
        heads = (self.num_attention_heads, self.num_query_groups) if self.qk_norm_over_heads else (1, 1)
        return tuple(self.kv_channels * n for n in heads) if self.qk_layernorm else ()

    def require_weights(self, shapes: Iterable[Sequence[int]], where: object) -> None:
        """Check, before memory is taken for this model, that the weights to load could be its own.

        If they only lack some, loading them says which.

        Args:
            shapes: of the tensors.
            where: they are, for the message.

        Raises:
            ValueError: they are far too few: the config is not that of these weights.
        """
        stored, needed = sum(math.prod(shape) for shape in shapes), self.layer_parameters + self.output_parameters
        if needed > _LEEWAY * stored:
            raise ValueError(
                f"{where} holds {stored:,} weights, but its config describes a model of {needed:,}: it is damaged, or "
                "the config is another model's"
            )

    @property
    def output_parameters(self) -> int:
        """Weights of the output layer, tied or not."""
        return self.vocab_size * self.hidden_size

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of the layers and the final norm, without embedding and output layer."""
        return self.num_parameters - self.output_parameters * (1 if self.tied_embeddings else 2)

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Those of `layer_parameters` that belong to experts of which a token has only some."""
        if self.experts is None:
            return 0
        of_one = self.experts.parameters_of_one(self.hidden_size, 3 if self.gated else 2, self.bias)
        return sum(self.expert_layers) * self.experts.number * of_one

    def layer_parameters_read(self, num_tokens: float) -> float:
        """Those of `layer_parameters` that a pass of so many tokens reads, if all experts are equally likely."""
        if self.experts is None:
            return self.layer_parameters
        missed = (1 - self.experts.per_token / self.experts.number) ** num_tokens  # share of experts that no token has
        return self.layer_parameters - missed * self.expert_parameters

    @functools.cached_property
    def active_layer_parameters(self) -> int:
        """Those of `layer_parameters` that a token's output depends on: of all experts those that it has."""
        return self._num_parameters(active=True) - self.output_parameters * (1 if self.tied_embeddings else 2)

    @property
    def pair_operations(self) -> int:
        """Floating-point operations of attention, in one layer, for each pair of a query and a key."""
        return 4 * self.num_attention_heads * self.kv_channels

    def attention_pairs(self, num_tokens: int) -> int:
        """Pairs of a query and a key that it sees in a sequence, in all layers."""
        pairs = 0
        for window, count in self._num_by_window.items():
            reach = min(num_tokens, window or num_tokens)
            pairs += count * (reach * (reach + 1) // 2 + (num_tokens - reach) * reach)
        return pairs

    def keys_read(self, num_sequences: float, num_tokens: float) -> float:
        """Of so many tokens of some equal sequences, those whose keys the next queries see, on average over layers."""
        if not self.windowed_layers:
            return num_tokens
        seen = (n * min(num_tokens, (w or math.inf) * num_sequences) for w, n in self._num_by_window.items())
        return sum(seen) / self.num_layers

    @functools.cached_property
    def _num_by_window(self) -> collections.Counter[int | None]:
        """How many layers have each window."""
        return collections.Counter(layer.window for layer in self.layers)

    def forward_operations(self, num_tokens: int, num_outputs: int) -> int:
        """Floating-point operations of matrix products in the forward pass of one sequence.

        Two per token and weight, of experts' weights those of the token's; and four per channel of a head and pair of a
        query and a key, of which causal attention has n (n + 1) / 2, or less with a window. The last layer counts for
        all tokens, though its MLP needs only those whose outputs are wanted: with 30 layers up to 2.5% too many.

        Args:
            num_tokens: of the sequence.
            num_outputs: positions with logits.
        """
        weights = self.active_layer_parameters * num_tokens + self.output_parameters * num_outputs
        return 2 * weights + self.pair_operations * self.attention_pairs(num_tokens)

    # ---- layouts ----------------------------------------------------------------------------

    def layout_problems(self, tp_size: int, pp_size: int = 1, *, engine_key: str | None = None) -> list[str]:
        """Why the model cannot be divided into these sizes, one line for each reason; empty if it can.

        Args:
            tp_size: ranks that share each layer.
            pp_size: pipeline stages.
            engine_key: what ``tp_size`` is called in messages, where it divides a generation engine; None: training.
        """
        tp = f"{engine_key or 'model.tensor_model_parallel_size'}={tp_size}"
        pp = f"model.pipeline_model_parallel_size={pp_size}"
        heads, groups = self.num_attention_heads, self.num_query_groups
        problems = []
        if heads % tp_size:
            problems.append(f"{tp}: the model's num_attention_heads={heads} is not a multiple of it")
        if groups % tp_size and tp_size % groups:
            problems.append(f"{tp}: the model's num_query_groups={groups} neither divides nor is a multiple of it")
        # With more ranks than key heads, megatron-core cuts the matrix of q, k and v wherever a rank's rows end.
        qkv_rows = (heads + 2 * groups) * self.kv_channels
        if engine_key is None and not problems and qkv_rows % tp_size:
            problems.append(
                f"{tp}: with more ranks than num_query_groups={groups}, the model's (num_attention_heads + 2 * "
                f"num_query_groups) * kv_channels={qkv_rows} must be a multiple of it"
            )
        problems += [
            f"{tp}: the model's {name}={size} is not a multiple of it"
            for name, size in self._ffn_sizes(engine_key is not None).items()
            if size % tp_size
        ]
        if self.num_layers % pp_size:
            problems.append(f"{pp}: the model's num_layers={self.num_layers} is not a multiple of it")
        return problems

    def expert_layout_problems(self, ep_size: int, etp_size: int) -> list[str]:
        """Why the experts cannot be divided, one line for each reason; empty if they can, or if there are none.

        Args:
            ep_size: groups of ranks that have different experts.
            etp_size: ranks that share each expert.
        """
        if self.experts is None:
            return []
        sizes = (
            ("expert_model_parallel_size", ep_size, "num_moe_experts", self.experts.number),
            ("expert_tensor_parallel_size", etp_size, "moe_ffn_hidden_size", self.experts.ffn_hidden_size),
        )
        problems = [
            f"model.{key}={ranks}: the model's {name}={size} is not a multiple of it"
            for key, ranks, name, size in sizes
            if size % ranks
        ]
        if self.bias and etp_size > 1:  # each rank would add the whole bias
            problems.append(
                f"model.expert_tensor_parallel_size={etp_size}: ranks cannot share experts with biases; set it to 1 "
                "(null: tensor_model_parallel_size) and divide them by model.expert_model_parallel_size, or divide "
                "layers into pipeline stages (nsa convert: --pipeline-parallel)"
            )
        return problems

    def _ffn_sizes(self, with_experts: bool) -> dict[str, int]:
        """The sizes of MLPs that tensor-parallel ranks share, by their names in NeMo's config."""
        sizes = {"ffn_hidden_size": self.ffn_hidden_size} if 0 in self.expert_layers else {}
        if self.experts is not None and self.experts.shared_ffn_hidden_size:
            sizes["moe_shared_expert_intermediate_size"] = self.experts.shared_ffn_hidden_size
        if self.experts is not None and with_experts:
            sizes["moe_ffn_hidden_size"] = self.experts.ffn_hidden_size
        return sizes


DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelArchitecture)}
"""Llama's values of an architecture's fields; sizes have none."""


def _marked_layers(frequency: Any, num_layers: int, key: str) -> tuple[int, ...]:
    """The layers that a key of Megatron-Core like ``no_rope_freq`` names: every n-th, or those with a 1 in a list."""
    if not frequency:
        return ()
    if isinstance(frequency, int):
        return tuple(range(frequency - 1, num_layers, frequency))
    if len(frequency) != num_layers:
        raise ValueError(f"{key} has {len(frequency)} numbers for {num_layers} layers")
    return tuple(layer for layer, marked in enumerate(frequency) if marked)


def _windows(cfg: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of windows: Megatron-Core's ``window_size`` counts the positions before and after a query's own."""
    size, skipped, base = cfg.get("window_size"), cfg.get("window_attn_skip_freq"), cfg.get("local_rotary_base")
    if size is None or list(size) == [-1, -1]:
        return {}
    if len(size) != 2 or size[0] < 0 or size[1] != 0:
        raise ValueError(f"model.window_size={size}: must be [positions before a token's own, 0]")
    every = range(num_layers)
    if isinstance(skipped, int) and skipped:  # every n-th layer has none
        windowed = tuple(layer for layer in every if (layer + 1) % skipped)
    else:
        windowed = _marked_layers(skipped, num_layers, "window_attn_skip_freq") if skipped else tuple(every)
    if not windowed:
        return {}
    own = {} if base is None else {"local_rotary_base": _number(cfg, "local_rotary_base")}
    return {"sliding_window": size[0] + 1, "windowed_layers": windowed, **own}


def _has_sinks(cfg: Mapping[str, Any]) -> bool:
    """Whether the softmax has a learned score of nothing, by Megatron-Core's name for it."""
    kind = cfg.get("softmax_type") or "vanilla"
    if kind not in ("vanilla", "learnable"):
        raise ValueError(f"model.softmax_type={kind!r} is not vanilla or learnable")
    return bool(kind == "learnable")


def _dense_layers(cfg: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers without experts that Megatron-Core's ``moe_layer_freq`` names: all but every n-th, or with a 0."""
    frequency = cfg.get("moe_layer_freq") or 1
    if not cfg.get("num_moe_experts"):
        return ()
    if isinstance(frequency, int):
        return tuple(layer for layer in range(num_layers) if layer % frequency)
    if isinstance(frequency, str) or len(frequency) != num_layers:
        raise ValueError(f"moe_layer_freq={frequency!r}: must be a whole number, or one number for each layer")
    return tuple(layer for layer, has in enumerate(frequency) if not has)


# ---- values of a model_config.yaml ------------------------------------------------------------------


def _number(cfg: Mapping[str, Any], key: str) -> float:
    """A key's number. YAML takes 1e-5 for text."""
    value = cfg[key]
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"model.{key}={repr(value)[:80]}: must be a number")


def _whole(cfg: Mapping[str, Any], key: str) -> int:
    """A key's whole number; 0 where it is missing or null."""
    number = 0.0 if cfg.get(key) is None else _number(cfg, key)
    if not number.is_integer():
        raise ValueError(f"model.{key}={repr(cfg[key])[:80]}: must be a whole number")
    return int(number)


def _flag(cfg: Mapping[str, Any], key: str) -> bool:
    """Whether a key is true; False where it is missing or null."""
    value = cfg.get(key)
    if value not in (None, False, True):
        raise ValueError(f"model.{key}={repr(value)[:80]}: must be true or false")
    return bool(value)


def _is_by_tanh(cfg: Mapping[str, Any], gated: bool) -> bool:
    """Whether NeMo computes GELU by its approximation: its kernel fused with biases, the default, does."""
    is_fused = cfg.get("bias_activation_fusion") is None or _flag(cfg, "bias_activation_fusion")
    return _flag(cfg, "openai_gelu") or (is_fused and (gated or _flag(cfg, "bias")))


_ROPE_NUMBERS = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len", "rope_scaling_factor")


def _rope_keys(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of rotary scaling in NeMo 1's words. NeMo 2 and Megatron-Bridge have a flag, ``rope_scaling``."""
    numbers = {
        key: _number(cfg, key) for key in (*_ROPE_NUMBERS, "seq_len_interpolation_factor") if cfg.get(key) is not None
    }
    keys: dict[str, Any] = {**cfg, **numbers, "scale_positional_embedding": _flag(cfg, "scale_positional_embedding")}
    if isinstance(cfg.get("rope_scaling"), bool):
        del keys["rope_scaling"]
        if cfg["rope_scaling"]:
            factor = keys.get("scale_factor") or keys.get("rope_scaling_factor")
            keys |= {"scale_positional_embedding": True, "scale_factor": factor}
    return keys
