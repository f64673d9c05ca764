"""The ``config.json`` of Hugging Face model directories: which of our architectures it describes, and back."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_style_aligner.engine.architecture import (
    DEFAULTS,
    ENDS,
    MULTIPLIERS,
    Activation,
    LayerFeatures,
    ModelArchitecture,
)
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.engine.weights.expert_families import EXPERT_FAMILIES, can_express
from nemo_style_aligner.engine.weights.foreign import refuse_nemo_2
from nemo_style_aligner.guard.parsing import read_json
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
    """What the models of one Hugging Face ``model_type`` have in common, beyond Llama's tensor names.

    Attributes:
        class_prefix: of its classes' names in transformers.
        classifier_prefix: of the sequence classifier's, where that differs.
        fixed: fields of the architecture that are the same in all its models, and not Llama's.
        keys: further fields that its configs say, or say under another key than Llama's -> the key.
        bias_keys: which of ``attention_bias`` (on q, k, v and o) and ``mlp_bias`` it has.
        biased_mlp: MLPs, or routers and experts, have biases always.
        scales_embeddings: by the root of the hidden size.
        fused: q, k and v are one tensor, gate and up another.
        windows: which layers can have a sliding window: none, all if one has, or any (``layer_types``).
        window_flag: ``use_sliding_window`` says whether any has.
        local_rope: layers with a window have a rotary base of their own.
        scaled: a config that says nothing of rotary scaling means one.
    """

    class_prefix: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bias_keys: tuple[str, ...] = ("attention_bias",)
    biased_mlp: bool = False
    scales_embeddings: bool = False
    partial_rotary: bool = False
    scalings: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    fused: bool = False
    no_rope_layers: bool = False
    windows: Literal["none", "all", "any"] = "none"
    window_flag: bool = False
    local_rope: bool = False
    scaled: bool = False
    classifier_prefix: str = ""

    def key(self, field: str) -> str | None:
        """Under which key a config of the family says a field of the architecture; None: it does not."""
        return self.keys.get(field) or _KEYS.get(field)

    def fixed_value(self, field: str, hidden_size: int) -> Any:
        """The value of a field that configs do not say."""
        if field == "embedding_multiplier" and self.scales_embeddings:
            return hidden_size**0.5
        return self.fixed.get(field, DEFAULTS[field])


_KEYS = {"layernorm_epsilon": "rms_norm_eps", "activation": "hidden_act"}  # Llama's
_FEATURES = [*(field.name for field in dataclasses.fields(LayerFeatures) if field.name != "bias"), *ENDS]
_BOTH_BIASES = ("attention_bias", "mlp_bias")

_OLMO = {"layer_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True}
_GEMMA = {"layer_norms": "both", "normalization": "rmsnorm1p"}
_GEMMA_KEYS = {
    "activation": "hidden_activation",
    "softmax_scale": "query_pre_attn_scalar",
    "final_logit_softcapping": "final_logit_softcapping",
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", bias_keys=_BOTH_BIASES),
    "mistral": Family("Mistral", bias_keys=(), windows="all"),
    "ministral": Family("Ministral", bias_keys=(), windows="any"),
    "qwen2": Family("Qwen2", {"qkv_bias": True}, bias_keys=(), windows="any", window_flag=True),
    "qwen3": Family("Qwen3", {"qk_layernorm": True}, windows="any", window_flag=True),
    "qwen3_moe": Family("Qwen3Moe", {"qk_layernorm": True}, windows="all", window_flag=True),
    "mixtral": Family("Mixtral", bias_keys=(), windows="all"),
    "glm4_moe": Family(
        "Glm4Moe",
        keys={"qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"},
        bias_keys=(),
        partial_rotary=True,
    ),
    "gpt_oss": Family(
        "GptOss", {"clamped_swiglu": True, "attention_sinks": True}, biased_mlp=True, windows="any", scaled=True
    ),
    "nemotron": Family(
        "Nemotron",
        {"gated": False, "normalization": "layernorm1p"},
        {"layernorm_epsilon": "norm_eps"},
        bias_keys=_BOTH_BIASES,
        partial_rotary=True,
    ),
    "phi3": Family("Phi3", bias_keys=(), partial_rotary=True, scalings=("longrope",), fused=True, windows="all"),
    "smollm3": Family("SmolLM3", bias_keys=_BOTH_BIASES, no_rope_layers=True, windows="any", window_flag=True),
    "granite": Family(
        "Granite",
        keys={"softmax_scale": "attention_multiplier", **{multiplier: multiplier for multiplier in MULTIPLIERS}},
        bias_keys=_BOTH_BIASES,
    ),
    "olmo2": Family("Olmo2", _OLMO),
    "olmo3": Family("Olmo3", _OLMO, windows="any", local_rope=True),
    "gemma2": Family(
        "Gemma2",
        _GEMMA,
        {**_GEMMA_KEYS, "attn_logit_softcapping": "attn_logit_softcapping"},
        scales_embeddings=True,
        windows="any",
    ),
    "gemma3_text": Family(
        "Gemma3",
        {**_GEMMA, "qk_layernorm": True},
        _GEMMA_KEYS,
        scales_embeddings=True,
        windows="any",
        local_rope=True,
        classifier_prefix="Gemma3Text",
    ),
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
        if written["model_type"] == "mistral" and written.get("layer_types") is not None:
            written["model_type"] = "ministral"  # as transformers takes it
        # As some files have it, and as transformers does not take it: the weights have their own.
        is_auto = {"dtype", "torch_dtype"} & {key for key, value in written.items() if value == "auto"}
        described = {key: value for key, value in written.items() if key not in is_auto}
        config = CONFIG_MAPPING[written["model_type"]].from_dict(described)  # fills in the family's defaults
        return architecture_from_config(config.to_dict())
    except Exception as error:  # values of other types make transformers raise anything
        text = str(error.args[0] if isinstance(error, KeyError) else error)
        raise ValueError(f"{file}: {' '.join(text.split())}") from error


def architecture_from_config(config: Mapping[str, Any]) -> ModelArchitecture:
    """As `read_architecture`, from a complete config in transformers' current form (with ``rope_parameters``)."""
    name = _family_name(config)
    family = FAMILIES[name]
    attention_bias, mlp_bias = bool(config.get("attention_bias")), family.biased_mlp or bool(config.get("mlp_bias"))
    if family.key("qkv_bias") == "attention_bias":
        attention_bias = False
    if attention_bias != mlp_bias:
        differ = "attention_bias and mlp_bias differ"
        if family.biased_mlp:
            differ = f"attention_bias=False, but the experts of {name} always have biases"
        raise ValueError(f"{differ}: biases on some linear layers only are not supported")
    rope = _full_rope(family, config)
    turned = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if turned != 1.0 and not family.partial_rotary:
        raise ValueError(
            f"partial_rotary_factor={turned}, which transformers ignores in {name} models: it rotates all "
            "channels. If this one was trained that way, remove the key"
        )
    heads, scaling = config["num_attention_heads"], _rope_scaling(rope, config["max_position_embeddings"])
    experts, dense_layers = EXPERT_FAMILIES[name].read(config) if name in EXPERT_FAMILIES else (None, ())
    return ModelArchitecture(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=_positions(config, scaling),
        bias=attention_bias,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        rotary_base=rope["rope_theta"],
        rotary_percentage=turned,
        rope_scaling=scaling,
        no_rope_layers=_no_rope_layers(config) if family.no_rope_layers else (),
        **_windows(family, config),
        **{field: _value(family, field, config) for field in (*_FEATURES, "layernorm_epsilon")},
        experts=experts,
        dense_layers=dense_layers,
        init_method_std=config["initializer_range"],
        family=name,
    )


_INVERSE = "query_pre_attn_scalar"  # of which the root is what attention scores are divided by


def _value(family: Family, field: str, config: Mapping[str, Any]) -> Any:
    """The value of a field of the architecture."""
    key = family.key(field)
    if key is None:
        return family.fixed_value(field, config["hidden_size"])
    value = config[key]
    if field == "activation":
        if value not in _ACTIVATIONS:
            raise ValueError(f"{key} {value!r} is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]
    if value is None or isinstance(value, bool):
        return value
    return float(value) ** -0.5 if key == _INVERSE else float(value)


def _said(family: Family, field: str, a: ModelArchitecture) -> Any:
    """What a config says of a field of the architecture that the family has a key for."""
    if field == "activation":
        return next(name for name, value in _ACTIVATIONS.items() if value == a.activation)
    if field == "softmax_scale":
        return round(a.attention_scale**-2) if family.key(field) == _INVERSE else a.attention_scale
    return getattr(a, field)


def _family_name(config: Mapping[str, Any]) -> str:
    """The config's key in `FAMILIES`."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    return str(model_type)


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
        experts = EXPERT_FAMILIES.get(config["model_type"])
        if method == "mxfp4" and experts is not None and experts.is_stacked:
            return  # see `stacked_experts`
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
    own = FAMILIES[_family_name(config)].keys.values()
    for key, plain in _OF_OTHER_MODELS.items():
        if key not in own and config.get(key) not in plain:
            raise ValueError(
                f"{key}={config[key]}, which transformers ignores in {config['model_type']} models. If this one was "
                "trained with it, it cannot be computed here; else remove the key"
            )


_WINDOWED, _FULL = "sliding_attention", "full_attention"


def _windows(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture's fields of windows."""
    window, every = config.get("sliding_window"), config["num_hidden_layers"]
    if family.windows == "none" and window is not None and window < config["max_position_embeddings"]:
        raise ValueError(
            f"sliding_window={window}, which transformers ignores in {config['model_type']} models. If this one was "
            "trained with it, it cannot be computed here; else remove the key"
        )
    types = config["layer_types"] if family.windows == "any" else [_WINDOWED] * every
    if others := sorted({*types} - {_WINDOWED, _FULL}):
        raise ValueError(f"layer_types: {', '.join(others)} is not supported")
    windowed = tuple(layer for layer in range(every) if types[layer] == _WINDOWED)
    if family.windows == "none" or window is None or not windowed:
        return {}
    return {"sliding_window": window, "windowed_layers": windowed, **_local_rope(family, config)}


def _full_rope(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary parameters of layers without a window, which most families' other layers have, too."""
    rope: Mapping[str, Any] = config["rope_parameters"]
    return rope[_FULL] if family.local_rope else rope


def _local_rope(family: Family, config: Mapping[str, Any]) -> dict[str, float]:
    """The rotary base of layers with a window, if it is their own."""
    if not family.local_rope:
        return {}
    rope = config["rope_parameters"]
    own, scaling = rope[_WINDOWED], RopeScaling.from_mapping(rope[_WINDOWED])
    if scaling is not None:
        raise ValueError(
            f"rope_parameters of {_WINDOWED} with rope_type {scaling.rope_type!r}: only 'default' is known"
        )
    same = own["rope_theta"] == rope[_FULL]["rope_theta"] and RopeScaling.from_mapping(rope[_FULL]) is None
    return {} if same else {"local_rotary_base": own["rope_theta"]}


def _no_rope_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    rotates = config["no_rope_layers"][: config["num_hidden_layers"]]
    return tuple(layer for layer, does in enumerate(rotates) if not does)


def _rope_scaling(parameters: Mapping[str, Any], positions: int) -> RopeScaling | None:
    """The scaling, with the values that transformers takes from ``positions``, the config's longest sequence."""
    rope = dict(parameters)
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
        if name in FAMILIES and _can_express(FAMILIES[name], architecture) and can_express(name, architecture):
            return name
    named = (*_FEATURES, "bias", "rotary_percentage", "rope_scaling", "no_rope_layers", "sliding_window")
    named += ("windowed_layers", "local_rotary_base", "experts", "dense_layers")
    has = [f"{name}={getattr(architecture, name)}" for name in named if getattr(architecture, name) != DEFAULTS[name]]
    raise ValueError(f"no Hugging Face family ({', '.join(FAMILIES)}) combines this model's {', '.join(has)}")


def _can_express(family: Family, a: ModelArchitecture) -> bool:
    fixed = [field for field in _FEATURES if family.key(field) is None]
    scale = a.attention_scale
    return (
        all(getattr(a, field) == family.fixed_value(field, a.hidden_size) for field in fixed)
        and (family.key("softmax_scale") != _INVERSE or math.isclose(round(scale**-2) ** -0.5, scale))
        and (a.bias if family.biased_mlp else not a.bias or family.bias_keys == _BOTH_BIASES)
        and (family.partial_rotary or a.rotary_percentage == 1.0)
        and (a.rope_scaling is None or a.rope_scaling.rope_type in family.scalings)
        and (family.no_rope_layers or not a.no_rope_layers)
        and (family.windows == "any" or len(a.windowed_layers) in (0, *[a.num_layers] * (family.windows == "all")))
        and (a.local_rotary_base is None if not family.local_rope else _has_local_rope(a))
        and not (family.fused and a.kv_channels * a.num_attention_heads != a.hidden_size)
    )


def _has_local_rope(a: ModelArchitecture) -> bool:
    """Whether layers with a window, if there are any, rotate without the scaling that others may have."""
    return a.local_rotary_base is not None or a.rope_scaling is None or not a.windowed_layers


def _said_of_windows(family: Family, a: ModelArchitecture) -> dict[str, Any]:
    """What a config says of windows, and of the rotary embeddings of layers with and without one."""
    if family.windows == "none":
        return {}
    always = family.windows == "any" and not family.window_flag  # transformers makes both masks, whatever the layers
    said: dict[str, Any] = {"sliding_window": a.sliding_window or (a.max_position_embeddings if always else None)}
    if family.windows == "any":
        said["layer_types"] = [_WINDOWED if layer in a.windowed_layers else _FULL for layer in range(a.num_layers)]
    if family.window_flag:
        first = a.num_layers - len(a.windowed_layers)  # older readers know no other order: full layers come first
        said |= {"use_sliding_window": a.sliding_window is not None, "max_window_layers": first}
    if family.local_rope:
        base = a.rotary_base if a.local_rotary_base is None else a.local_rotary_base
        scaling = {"rope_type": "default"} if a.rope_scaling is None else a.rope_scaling.to_mapping()
        own = {"rope_type": "default", "rope_theta": base}
        said["rope_parameters"] = {_FULL: {**scaling, "rope_theta": a.rotary_base}, _WINDOWED: own}
        said["rope_local_base_freq"] = base
    return said


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
    classifier = (family.classifier_prefix or family.class_prefix) + "ForSequenceClassification"
    config: dict[str, Any] = {
        "architectures": [classifier if num_attributes else f"{family.class_prefix}ForCausalLM"],
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
        **{str(family.key(field)): _said(family, field, a) for field in dict.fromkeys((*_KEYS, *family.keys))},
        "initializer_range": a.init_method_std,
        "tie_word_embeddings": a.tied_embeddings,
        "rope_theta": a.rotary_base,
        "rope_scaling": {"rope_type": "default"} if family.scaled else None,
        "use_cache": True,
        "pad_token_id": None,  # some families' default lies beyond small vocabularies
        **(token_ids or {}),
    }
    if a.rope_scaling is not None:
        config["rope_scaling"] = a.rope_scaling.to_mapping()
    if a.rope_scaling is not None and a.rope_scaling.rope_type == "longrope":
        config["original_max_position_embeddings"] = a.rope_scaling.original_max_position_embeddings
    if a.experts is not None:
        config |= EXPERT_FAMILIES[model_type].write(a)
    config |= dict.fromkeys(family.bias_keys, a.bias)
    if family.partial_rotary:
        config["partial_rotary_factor"] = a.rotary_percentage
    if family.no_rope_layers:
        config["no_rope_layers"] = [int(layer not in a.no_rope_layers) for layer in range(a.num_layers)]
    config |= _said_of_windows(family, a)
    if num_attributes:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_attributes)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(num_attributes)}
    return config
