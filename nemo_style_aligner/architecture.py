"""The shape of a model: one dataclass that every part of the project reads.

`ModelArchitecture` is what NeMo's ``model_config.yaml``, a Hugging Face ``config.json`` and
megatron-core's ``TransformerConfig`` have in common. Training models, the weight layout table,
checkpoints and the generation engine are all built from it, so a fact about a model's shape is
written down once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from nemo_style_aligner.rope import RopeScaling, inverse_frequencies

Normalization = Literal["rmsnorm", "layernorm", "layernorm1p"]
Activation = Literal["silu", "gelu", "squared-relu"]

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

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads", "num_query_groups")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")  # 1: none
_POSITIVE = (
    *("layernorm_epsilon", "rotary_base", "rotary_percentage", "init_method_std", "softmax_scale"),
    *MULTIPLIERS,
)

_OFF = (None, False)
_ZERO_CENTERED = "layernorm_zero_centered_gamma"
NEMO_FEATURES_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": _OFF,
    "window_size": (None, [-1, -1]),
    "num_moe_experts": _OFF,
    "transformer_block_type": (None, "pre_ln"),
    "attention_type": (None, "multihead"),
    "multi_latent_attention": _OFF,
    "normalize_attention_scores": (None, True),
    "headscale": _OFF,
    "openai_gelu": _OFF,  # the tanh approximation
    "apply_embedding_scaling": _OFF,  # Gemma
    "mcore_customization_config": (None, {}),  # Gemma 2
    "drop_layers": (None, []),
    _ZERO_CENTERED: _OFF,  # except with LayerNorm, which it turns into layernorm1p
}
"""Keys of NeMo that change what a model computes, and the values with which it can be built here."""


@dataclasses.dataclass(frozen=True)
class ModelArchitecture:
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
    normalization: Normalization = "rmsnorm"
    layernorm_epsilon: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True  # SwiGLU when activation is silu
    bias: bool = False  # biases on all linear layers (and LayerNorm has its own always)
    qkv_bias: bool = False  # biases on the q, k and v projections only (Qwen2)
    qk_layernorm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    tied_embeddings: bool = False
    rotary_base: float = 10000.0
    rotary_percentage: float = 1.0
    rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] = ()  # layers (0-based) that do not rotate (SmolLM3)
    softmax_scale: float | None = None  # factor of attention scores; None: 1 / sqrt(kv_channels)
    embedding_multiplier: float = 1.0  # of embeddings (this and the next two: Granite)
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # what logits are divided by
    init_method_std: float = 0.02
    family: str = "llama"  # the Hugging Face `model_type` written on export

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in _POSITIVE:
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field} must be a number above 0, got {value}")
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
        if not set(self.no_rope_layers) <= set(range(self.num_layers)):
            raise ValueError(f"no_rope_layers {self.no_rope_layers} are not among the {self.num_layers} layers")
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        if self.qk_layernorm and self.normalization != "rmsnorm":
            raise ValueError(
                f"qk_layernorm with normalization={self.normalization!r}: only RMSNorm can normalise queries and keys"
            )

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
            ValueError: a size that cannot be defaulted is missing, or the model has a feature this project does not
                build.
        """
        missing = [k for k in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size") if cfg.get(k) is None]
        if missing == ["vocab_size"]:
            raise ValueError(
                "model config lacks vocab_size, which NeMo leaves to the tokenizer, and the archive has no tokenizer "
                "that can be read: unpack it (tar -xf) and put a Hugging Face tokenizer's files into tokenizer/"
            )
        if missing:
            raise ValueError(f"model config lacks {', '.join(missing)}: not a complete model_config.yaml")
        activation = cfg.get("activation", "gelu")
        if activation not in _NEMO_ACTIVATIONS:
            raise ValueError(f"model.activation={activation!r} is not one of {sorted(_NEMO_ACTIVATIONS)}")
        position = cfg.get("position_embedding_type", "rope")
        if position != "rope":
            raise ValueError(f"model.position_embedding_type={position!r}: only 'rope' models are supported")
        said = cfg.get("normalization", "layernorm")  # NeMo's own default
        normalization: Any = said.lower() if isinstance(said, str) else said  # megatron writes RMSNorm
        if normalization not in ("rmsnorm", "layernorm", "layernorm1p"):
            raise ValueError(f"model.normalization={said!r} is not rmsnorm, layernorm or layernorm1p")
        foreign = {key: cfg[key] for key, plain in NEMO_FEATURES_NOT_BUILT.items() if cfg.get(key) not in plain}
        if _ZERO_CENTERED in foreign and normalization != "rmsnorm":
            normalization = "layernorm1p"
            del foreign[_ZERO_CENTERED]
        if foreign:
            named = ", ".join(f"model.{key}={value}" for key, value in foreign.items())
            raise ValueError(f"models with {named} are not supported: their results would be wrong")
        act, gated = _NEMO_ACTIVATIONS[activation]
        qkv_bias = cfg.get("add_qkv_bias") if cfg.get("qkv_bias") is None else cfg["qkv_bias"]  # NeMo's and megatron's
        return cls(
            num_layers=int(cfg["num_layers"]),
            hidden_size=int(cfg["hidden_size"]),
            ffn_hidden_size=int(cfg.get("ffn_hidden_size") or 4 * cfg["hidden_size"]),
            num_attention_heads=int(cfg["num_attention_heads"]),
            num_query_groups=int(cfg.get("num_query_groups") or cfg["num_attention_heads"]),
            vocab_size=int(cfg["vocab_size"]),
            kv_channels=int(cfg.get("kv_channels") or 0),
            max_position_embeddings=int(cfg.get("max_position_embeddings") or cfg.get("encoder_seq_length") or 4096),
            normalization=normalization,
            layernorm_epsilon=float(cfg.get("layernorm_epsilon", 1e-5)),
            activation=act,
            gated=gated,
            bias=bool(cfg.get("bias", False)),
            qkv_bias=bool(qkv_bias),
            qk_layernorm=bool(cfg.get("qk_layernorm", False)),
            tied_embeddings=bool(cfg.get("share_embeddings_and_output_weights", False)),
            rotary_base=float(cfg.get("rotary_base", 10000.0)),
            rotary_percentage=float(cfg.get("rotary_percentage", 1.0)),
            rope_scaling=RopeScaling.from_nemo_config(cfg),
            no_rope_layers=_no_rope_layers(cfg.get("no_rope_freq"), int(cfg["num_layers"])),
            softmax_scale=None if cfg.get("softmax_scale") is None else float(cfg["softmax_scale"]),
            **{key: float(cfg[key]) for key in MULTIPLIERS if cfg.get(key) is not None},
            init_method_std=float(cfg.get("init_method_std", 0.02)),
            family=str(cfg.get("hf_model_type", "llama")),
        )

    def to_nemo_config(self) -> dict[str, Any]:
        """The keys of ``model_config.yaml`` that describe this architecture (NeMo's names)."""
        activation = {
            (act, gated): name for name, (act, gated) in _NEMO_ACTIVATIONS.items() if not name.startswith("fast-")
        }
        config: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "normalization": self.normalization,
            "layernorm_epsilon": self.layernorm_epsilon,
            "activation": activation[(self.activation, self.gated)],
            "bias": self.bias,
            "qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_layernorm,
            "share_embeddings_and_output_weights": self.tied_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.rotary_base,
            "rotary_percentage": self.rotary_percentage,
            "init_method_std": self.init_method_std,
            "hf_model_type": self.family,
        }
        if self.rope_scaling is not None:
            config |= self.rope_scaling.to_nemo_config()
        if self.no_rope_layers:
            config["no_rope_freq"] = [int(layer in self.no_rope_layers) for layer in range(self.num_layers)]
        config |= {key: getattr(self, key) for key in MULTIPLIERS if getattr(self, key) != 1}
        return config if self.softmax_scale is None else config | {"softmax_scale": self.softmax_scale}

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
    def has_multipliers(self) -> bool:
        """Whether embeddings, attention scores, residual stream or logits are scaled otherwise than in most models."""
        return self.softmax_scale is not None or any(getattr(self, key) != 1 for key in MULTIPLIERS)

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return self.kv_channels**-0.5 if self.softmax_scale is None else self.softmax_scale

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Of the rotary embedding: radians per position, fp32 [turned channels / 2]; factor of cosines and sines."""
        return inverse_frequencies(self.rotary_base, self.rotary_size, self.rope_scaling)

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model; tied embeddings count once."""
        h, d = self.hidden_size, self.kv_channels
        qkv_out = d * (self.num_attention_heads + 2 * self.num_query_groups)
        attention = h * qkv_out + h * d * self.num_attention_heads
        attention += qkv_out if self.bias or self.qkv_bias else 0
        attention += h if self.bias else 0
        attention += 2 * d if self.qk_layernorm else 0
        fc1_out = self.ffn_hidden_size * (2 if self.gated else 1)
        mlp = h * fc1_out + h * self.ffn_hidden_size + (fc1_out + h if self.bias else 0)
        norm = h if self.normalization == "rmsnorm" else 2 * h
        embeddings = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * norm) + norm + embeddings

    @property
    def output_parameters(self) -> int:
        """Weights of the output layer, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of the layers and the final norm, without embedding and output layer."""
        return self.num_parameters - self.output_parameters * (1 if self.tied_embeddings else 2)

    @property
    def attention_operations(self) -> int:
        """Floating-point operations of attention, in all layers, for each pair of a query and a key."""
        return 4 * self.num_layers * self.num_attention_heads * self.kv_channels

    def forward_operations(self, num_tokens: int, num_outputs: int) -> int:
        """Floating-point operations of matrix products in the forward pass of one sequence.

        Two per weight and token, and four per channel of a head and pair of a query and a key, of which causal
        attention has n (n + 1) / 2. The last layer counts for all tokens, though its MLP needs only the positions whose
        outputs are wanted: with 30 layers up to 2.5% too many.

        Args:
            num_tokens: of the sequence.
            num_outputs: positions with logits.
        """
        weights = self.layer_parameters * num_tokens + self.output_parameters * num_outputs
        return 2 * weights + self.attention_operations * (num_tokens * (num_tokens + 1) // 2)

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
        if self.ffn_hidden_size % tp_size:
            problems.append(f"{tp}: the model's ffn_hidden_size={self.ffn_hidden_size} is not a multiple of it")
        if self.num_layers % pp_size:
            problems.append(f"{pp}: the model's num_layers={self.num_layers} is not a multiple of it")
        return problems


def _no_rope_layers(frequency: Any, num_layers: int) -> tuple[int, ...]:
    """The layers that Megatron-Core's ``no_rope_freq`` names: every n-th, or those with a 1 in a list."""
    if not frequency:
        return ()
    if isinstance(frequency, int):
        return tuple(range(frequency - 1, num_layers, frequency))
    if len(frequency) != num_layers:
        raise ValueError(f"no_rope_freq has {len(frequency)} numbers for {num_layers} layers")
    return tuple(layer for layer, skips in enumerate(frequency) if skips)
