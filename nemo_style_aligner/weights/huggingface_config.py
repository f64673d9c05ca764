"""The ``config.json`` of Hugging Face model directories: which of our architectures it describes, and back."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.architecture import MULTIPLIERS, Activation, ModelArchitecture, Normalization
from nemo_style_aligner.checkpoints.foreign import refuse_nemo_2
from nemo_style_aligner.parsing import read_json
from nemo_style_aligner.rope import RopeScaling
from nemo_style_aligner.wording import download_hint

logger = logging.getLogger(__name__)

_MOST_OF_ANYTHING = 10_000  # layers, heads, experts, labels
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "relu2": "squared-relu",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one Hugging Face ``model_type`` have in common, beyond Llama's tensor names."""

    class_prefix: str
    gated: bool = True
    normalization: Normalization = "rmsnorm"
    norm_eps_key: str = "rms_norm_eps"
    qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_bias_key: bool = False  # has the key attention_bias: biases on q, k, v and o
    mlp_bias_key: bool = False
    partial_rotary: bool = False
    scalings: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    fused: bool = False  # q, k and v are one tensor, gate and up another
    no_rope_layers: bool = False
    multipliers: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", attention_bias_key=True, mlp_bias_key=True),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_layernorm=True, attention_bias_key=True),
    "nemotron": Family(
        "Nemotron",
        gated=False,
        normalization="layernorm1p",
        norm_eps_key="norm_eps",
        attention_bias_key=True,
        mlp_bias_key=True,
        partial_rotary=True,
    ),
    "phi3": Family("Phi3", partial_rotary=True, scalings=("longrope",), fused=True),
    "smollm3": Family("SmolLM3", attention_bias_key=True, mlp_bias_key=True, no_rope_layers=True),
    "granite": Family("Granite", attention_bias_key=True, mlp_bias_key=True, multipliers=True),
}

_OF_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "clip_qkv": (None,),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "alibi": (None, False),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "rope_interleaved": (None, False),
    "scale_emb": (None, 1),
    "scale_depth": (None, 1),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
}
"""Keys that change what models of other families compute, and the values with which they mean nothing."""


def read_architecture(directory: str | Path) -> ModelArchitecture:
    """The architecture that a directory's ``config.json`` describes.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: a family or feature this project does not build; the message names it.
    """
    from transformers import CONFIG_MAPPING

    path = Path(directory)
    file = path / "config.json"
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory{download_hint(str(directory))}")
    if not file.is_file():
        refuse_nemo_2(path)
        raise FileNotFoundError(f"{path} has no config.json: not a Hugging Face model directory")
    try:
        written = read_json(file)
        if not isinstance(written, dict):
            raise ValueError("not a JSON object")
        _refuse_absurd_counts(written)
        _family_name(written)
        _refuse_quantization(written)
        _refuse_other_models(written)
        # The weights have their own; "auto", as some files have it, is none that transformers takes.
        described = {key: value for key, value in written.items() if key not in ("dtype", "torch_dtype")}
        config = CONFIG_MAPPING[written["model_type"]].from_dict(described)  # fills in the family's defaults
        return architecture_from_config(config.to_dict())
    except Exception as error:  # values of other types make transformers raise anything
        text = str(error.args[0] if isinstance(error, KeyError) else error)
        raise ValueError(f"{file}: {' '.join(text.split())}") from error


def architecture_from_config(config: Mapping[str, Any]) -> ModelArchitecture:
    """As `read_architecture`, from a complete config in transformers' current form (with ``rope_parameters``)."""
    name = _family_name(config)
    family = FAMILIES[name]
    _refuse_sliding_window(config)
    if config["hidden_act"] not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not one of {', '.join(_ACTIVATIONS)}")
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention_bias != mlp_bias:
        raise ValueError("attention_bias and mlp_bias differ: biases on some linear layers only are not supported")
    rope = config["rope_parameters"]
    turned = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if turned != 1.0 and not family.partial_rotary:
        raise ValueError(
            f"partial_rotary_factor={turned}, which transformers ignores in {name} models: it rotates all "
            "channels. If this one was trained that way, remove the key"
        )
    heads, scaling = config["num_attention_heads"], _rope_scaling(config)
    return ModelArchitecture(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=_positions(config, scaling),
        normalization=family.normalization,
        layernorm_epsilon=config[family.norm_eps_key],
        activation=_ACTIVATIONS[config["hidden_act"]],
        gated=family.gated,
        bias=attention_bias,
        qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_layernorm,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        rotary_base=rope["rope_theta"],
        rotary_percentage=turned,
        rope_scaling=scaling,
        no_rope_layers=_no_rope_layers(config) if family.no_rope_layers else (),
        softmax_scale=float(config["attention_multiplier"]) if family.multipliers else None,
        **{key: float(config[key]) for key in MULTIPLIERS if family.multipliers},
        init_method_std=config["initializer_range"],
        family=name,
    )


def _family_name(config: Mapping[str, Any]) -> str:
    """The config's key in `FAMILIES`. transformers calls Mistral's models with ``layer_types`` "ministral"."""
    model_type = config.get("model_type")
    name = "mistral" if model_type == "ministral" else model_type
    if name not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    return str(name)


def _refuse_absurd_counts(config: Mapping[str, Any]) -> None:
    """transformers makes lists of as many entries as some keys say (``num_hidden_layers``, ``num_labels``)."""
    for key, value in config.items():
        if key.startswith("num_") and isinstance(value, int | float) and not 0 <= value <= _MOST_OF_ANYTHING:
            raise ValueError(f"{key}={value}: must be in [0, {_MOST_OF_ANYTHING}]")


def _refuse_quantization(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        named = quantization if isinstance(quantization, Mapping) else {}
        method = named.get("quant_method") or named.get("quant_algo") or "unnamed"
        raise ValueError(
            f"the weights are quantized (quantization_config: {method}), which is not supported: take the model's "
            "unquantized weights (bf16, fp16 or fp32)"
        )


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    """Refuse what a config names and transformers' class of the model does not compute."""
    for name in config.get("architectures") or ():
        if not str(name).endswith(("ForCausalLM", "ForSequenceClassification")):
            raise ValueError(
                f"architectures: {name} is neither a language model (...ForCausalLM) nor a classifier of whole texts "
                "(...ForSequenceClassification, a reward model): its outputs have no meaning here"
            )
    if code := (config.get("auto_map") or {}).get("AutoModelForCausalLM"):
        raise ValueError(
            f"auto_map: the model has code of its own ({code}), which is not run here. If transformers' class of its "
            "model_type computes the same, remove the key"
        )
    for key, plain in _OF_OTHER_MODELS.items():
        if config.get(key) not in plain:
            raise ValueError(
                f"{key}={config[key]}, which transformers ignores in {config['model_type']} models. If this one was "
                "trained with it, it cannot be computed here; else remove the key"
            )


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window")
    if config.get("layer_types") is not None:
        used = "sliding_attention" in config["layer_types"]
    else:
        used = window is not None and config.get("use_sliding_window", True)
    if used and window is not None and window < config["max_position_embeddings"]:
        raise ValueError(
            f"attention with a sliding window of {window} tokens is not supported. If no sequence of yours is "
            f"longer, set max_position_embeddings to {window}: then the window makes no difference"
        )


def _no_rope_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    rotates = config["no_rope_layers"][: config["num_hidden_layers"]]
    return tuple(layer for layer, does in enumerate(rotates) if not does)


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling, with the values that transformers takes from the rest of the config."""
    rope, positions = dict(config["rope_parameters"]), config["max_position_embeddings"]
    if rope.get("rope_type") == "dynamic":
        rope["original_max_position_embeddings"] = positions
    elif "original_max_position_embeddings" in rope and rope.get("factor") is None:
        rope["factor"] = positions / rope["original_max_position_embeddings"]
    return RopeScaling.from_mapping(rope)


def _positions(config: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    positions: int = config["max_position_embeddings"]
    if scaling is None or scaling.limit is None or positions <= scaling.limit:
        return positions
    logger.warning(
        "max_position_embeddings is %d here, not %d: in longer sequences rope_type %r turns all tokens otherwise than "
        "in shorter ones, and a response would change what comes before it as it grows",
        *(scaling.limit, positions, scaling.rope_type),
    )
    return scaling.limit


def hf_family(architecture: ModelArchitecture) -> str:
    """The Hugging Face ``model_type`` to write: the architecture's own, or the first that can express it.

    Raises:
        ValueError: no family can.
    """
    for name in dict.fromkeys((architecture.family, *FAMILIES)):
        if name in FAMILIES and _can_express(FAMILIES[name], architecture):
            return name
    raise ValueError(
        f"no Hugging Face family ({', '.join(FAMILIES)}) combines this model's normalization="
        f"{architecture.normalization}, gated={architecture.gated}, bias={architecture.bias}, qkv_bias="
        f"{architecture.qkv_bias}, qk_layernorm={architecture.qk_layernorm}, rotary_percentage="
        f"{architecture.rotary_percentage}, rope_scaling={architecture.rope_scaling}, no_rope_layers="
        f"{architecture.no_rope_layers}, multipliers={architecture.has_multipliers}"
    )


def _can_express(family: Family, a: ModelArchitecture) -> bool:
    return (
        family.gated == a.gated
        and family.normalization == a.normalization
        and family.qkv_bias == a.qkv_bias
        and family.qk_layernorm == a.qk_layernorm
        and (not a.bias or (family.attention_bias_key and family.mlp_bias_key))
        and (family.partial_rotary or a.rotary_percentage == 1.0)
        and (a.rope_scaling is None or a.rope_scaling.rope_type in family.scalings)
        and (family.no_rope_layers or not a.no_rope_layers)
        and (family.multipliers or not a.has_multipliers)
        and not (family.fused and a.kv_channels * a.num_attention_heads != a.hidden_size)
    )


def _exported_positions(a: ModelArchitecture) -> int:
    """What ``max_position_embeddings`` was before `_positions` or a job limited it, where the scaling depends on it."""
    scaling = a.rope_scaling
    if scaling is None or scaling.limit is None:
        return a.max_position_embeddings
    if scaling.rope_type == "dynamic":
        return scaling.limit
    return (
        round(scaling.factor * scaling.limit)
        if a.max_position_embeddings == scaling.limit
        else a.max_position_embeddings
    )


def hf_config(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    *,
    num_attributes: int = 0,
    token_ids: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """The contents of ``config.json``, in the form that old and new versions of transformers read.

    Args:
        architecture: the model's shape.
        dtype: the weights' dtype.
        num_attributes: outputs of a reward head (written as a sequence classifier); 0 for a language model.
        token_ids: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.

    Raises:
        ValueError: no Hugging Face family can express the architecture.
    """
    a = architecture
    model_type = hf_family(a)
    family = FAMILIES[model_type]
    activation = next(key for key, value in _ACTIVATIONS.items() if value == a.activation)
    config: dict[str, Any] = {
        "architectures": [family.class_prefix + ("ForSequenceClassification" if num_attributes else "ForCausalLM")],
        "model_type": model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.kv_channels,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": _exported_positions(a),
        "hidden_act": activation,
        family.norm_eps_key: a.layernorm_epsilon,
        "initializer_range": a.init_method_std,
        "tie_word_embeddings": a.tied_embeddings,
        "rope_theta": a.rotary_base,
        "rope_scaling": None,
        "use_cache": True,
        "pad_token_id": None,  # some families' default lies beyond small vocabularies
        **(token_ids or {}),
    }
    if a.rope_scaling is not None:
        config["rope_scaling"] = a.rope_scaling.to_mapping()
    if a.rope_scaling is not None and a.rope_scaling.rope_type == "longrope":
        config["original_max_position_embeddings"] = a.rope_scaling.original_max_position_embeddings
    if family.attention_bias_key:
        config["attention_bias"] = a.bias
    if family.mlp_bias_key:
        config["mlp_bias"] = a.bias
    if family.partial_rotary:
        config["partial_rotary_factor"] = a.rotary_percentage
    if family.no_rope_layers:
        config["no_rope_layers"] = [int(layer not in a.no_rope_layers) for layer in range(a.num_layers)]
    if family.multipliers:
        config |= {key: getattr(a, key) for key in MULTIPLIERS} | {"attention_multiplier": a.attention_scale}
    if model_type in ("mistral", "qwen2", "qwen3", "phi3", "smollm3"):
        config["sliding_window"] = None
    if num_attributes:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_attributes)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(num_attributes)}
    return config
