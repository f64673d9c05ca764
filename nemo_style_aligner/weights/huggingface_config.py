"""The ``config.json`` of Hugging Face model directories: which of our architectures it describes, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.architecture import LLAMA3_ROPE, Activation, ModelArchitecture, Normalization
from nemo_style_aligner.wording import download_hint

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "relu2": "squared-relu"}


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
}


def read_architecture(directory: str | Path) -> ModelArchitecture:
    """The architecture that a directory's ``config.json`` describes.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: a family or feature this project does not build; the message names it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(directory)
    file = path / "config.json"
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory{download_hint(str(directory))}")
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json: not a Hugging Face model directory")
    try:
        written = json.loads(file.read_text())
        if not isinstance(written, dict):
            raise ValueError("not a JSON object")
        _family_name(written)
        _refuse_quantization(written)
        return architecture_from_config(AutoConfig.from_pretrained(path).to_dict())  # fills in the family's defaults
    except (ValueError, KeyError, TypeError, ZeroDivisionError, StrictDataclassError) as error:  # transformers' own
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
    heads = config["num_attention_heads"]
    return ModelArchitecture(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=config["max_position_embeddings"],
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
        rope_scaling_factor=_rope_scaling_factor(rope),
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


def _refuse_quantization(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed"
        raise ValueError(
            f"the weights are quantized (quantization_config: {method}), which is not supported: take the model's "
            "unquantized weights (bf16, fp16 or fp32)"
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


def _rope_scaling_factor(rope: Mapping[str, Any]) -> float | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported: only 'default' and 'llama3' (Llama 3.1) are")
    for key, value in LLAMA3_ROPE.items():
        if rope[key] != value:
            raise ValueError(f"rope scaling with {key}={rope[key]} is not supported: megatron-core has {value}")
    return float(rope["factor"])


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
        f"{architecture.rotary_percentage}"
    )


def _can_express(family: Family, a: ModelArchitecture) -> bool:
    return (
        family.gated == a.gated
        and family.normalization == a.normalization
        and family.qkv_bias == a.qkv_bias
        and family.qk_layernorm == a.qk_layernorm
        and (not a.bias or (family.attention_bias_key and family.mlp_bias_key))
        and (family.partial_rotary or a.rotary_percentage == 1.0)
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
    activation = {value: key for key, value in _ACTIVATIONS.items()}[a.activation]
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
        "max_position_embeddings": a.max_position_embeddings,
        "hidden_act": activation,
        family.norm_eps_key: a.layernorm_epsilon,
        "initializer_range": a.init_method_std,
        "tie_word_embeddings": a.tied_embeddings,
        "rope_theta": a.rotary_base,
        "rope_scaling": None,
        "use_cache": True,
        **(token_ids or {}),
    }
    if a.rope_scaling_factor is not None:
        config["rope_scaling"] = {"rope_type": "llama3", "factor": a.rope_scaling_factor, **LLAMA3_ROPE}
    if family.attention_bias_key:
        config["attention_bias"] = a.bias
    if family.mlp_bias_key:
        config["mlp_bias"] = a.bias
    if family.partial_rotary:
        config["partial_rotary_factor"] = a.rotary_percentage
    if model_type in ("mistral", "qwen2", "qwen3"):
        config["sliding_window"] = None
    if num_attributes:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_attributes)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(num_attributes)}
    return config
