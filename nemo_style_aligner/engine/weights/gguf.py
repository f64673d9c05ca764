"""GGUF files (llama.cpp's format): quantised weights read tensor by tensor, with config and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.rope import RopeScaling, inverse_frequencies
from nemo_style_aligner.engine.weights.expert_families import EXPERT_FAMILIES
from nemo_style_aligner.engine.weights.gguf_file import GGUFFile
from nemo_style_aligner.engine.weights.gguf_tokenizer import TOKENIZER_KEYS, write_tokenizer
from nemo_style_aligner.engine.weights.huggingface_config import FAMILIES
from nemo_style_aligner.engine.weights.layout import ROUTER_BIAS
from nemo_style_aligner.engine.weights.stream import check_shapes

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
    "ffn_gate_inp": "model.layers.{}.mlp.gate",
}
"""Hugging Face's names by llama.cpp's; `{}` is the layer."""
_OF_EXPERTS = {f"ffn_{part}_exps": f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
"""The same of what is one tensor for all experts there; the second `{}` is the expert."""
_MOST_EXPERTS = 10_000
_NORMS_OF_GEMMA = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_OF_GLM = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    **{f"ffn_{part}_shexp": f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "exp_probs_b.bias": f"model.layers.{{}}.mlp.gate.{ROUTER_BIAS}",
}
_OF_GPT_OSS = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "attn_sinks.weight": "model.layers.{}.self_attn.sinks",
}
_OWN_NAMES = {"gemma2": _NORMS_OF_GEMMA, "gemma3": _NORMS_OF_GEMMA, "glm4moe": _OF_GLM, "gpt-oss": _OF_GPT_OSS}
"""What some architectures have in place of these, or beside them; with a dot, whole names on both sides."""

# GGUF architectures and Hugging Face's families. llama.cpp reorders the rows of q and k of "llama" (which is Mistral's
# too) for its own form of rotary embedding; the others it leaves as they are. Gemma's norms it stores plus one.
_ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma2")}
_ARCHITECTURES |= {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss"}
# Families of files that have any.
_WITH_EXPERTS = {"llama": "mixtral", "qwen3moe": "qwen3_moe", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss"}
# What llama.cpp knows of Gemma without a key: of how many layers the last has no window, and the number of layers of
# which models the square of what scores are divided by is not the size of a head but this share of the hidden size.
_PERIODS, _SHARED_SCALES = {"gemma2": 2, "gemma3": 6}, {"gemma2": 46, "gemma3": 62}

# Every key of a file must match one of these, or one of `TOKENIZER_KEYS`; ARCH is the architecture's name.
_USED = (
    "split.count",
    "ARCH.block_count",
    "ARCH.context_length",
    "ARCH.embedding_length",
    "ARCH.feed_forward_length",
    "ARCH.vocab_size",
    "ARCH.attention.head_count",
    "ARCH.attention.head_count_kv",
    "ARCH.attention.key_length",
    "ARCH.attention.value_length",
    "ARCH.attention.layer_norm_rms_epsilon",
    "ARCH.rope.dimension_count",
    "ARCH.rope.freq_base",
    "ARCH.rope.scale_linear",
    "ARCH.rope.scaling.type",
    "ARCH.rope.scaling.factor",
    "ARCH.rope.scaling.original_context_length",
    "ARCH.rope.scaling.yarn_beta_fast",
    "ARCH.rope.scaling.yarn_beta_slow",
)
_EXPERTS = ("ARCH.expert_count", "ARCH.expert_used_count", "ARCH.expert_feed_forward_length")
_USED_BY = {
    **dict.fromkeys(_WITH_EXPERTS, _EXPERTS),
    "glm4moe": (
        *_EXPERTS, "ARCH.expert_shared_count", "ARCH.expert_weights_norm", "ARCH.expert_weights_scale",
        "ARCH.expert_group_count", "ARCH.expert_group_used_count", "ARCH.leading_dense_block_count",
        "ARCH.nextn_predict_layers",
    ),
    "gpt-oss": (*_EXPERTS, "ARCH.attention.sliding_window"),
    "gemma2": ("ARCH.attention.sliding_window", "ARCH.attn_logit_softcapping", "ARCH.final_logit_softcapping"),
    "gemma3": (
        "ARCH.attention.sliding_window", "ARCH.attention.sliding_window_pattern", "ARCH.rope.freq_base_swa",
        "ARCH.final_logit_softcapping",
    ),
}  # fmt: skip
_IRRELEVANT = (
    "general.*", "split.*", "quantize.*", "mradermacher.*", "ARCH.tensor_data_layout", "ARCH.rope.scaling.finetuned",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),  # else an adapter, a projector of images, a vocabulary
    "general.quantization_version": (2,),  # before it, blocks were laid out otherwise
    "ARCH.expert_count": (0,),
    "ARCH.expert_used_count": (0,),
    "ARCH.expert_gating_func": (2,),  # sigmoids, as GLM has them
    "ARCH.attention.sliding_window": (0,),
    "ARCH.attention.causal": (True,),
    "ARCH.attention.scale": (0.0,),
    "ARCH.attention.clamp_kqv": (0.0,),
    "ARCH.attention.max_alibi_bias": (0.0,),
    "ARCH.attn_logit_softcapping": (0.0,),
    "ARCH.final_logit_softcapping": (0.0,),
    "ARCH.logit_scale": (0.0, 1.0),
    "ARCH.embedding_scale": (0.0, 1.0),
    "ARCH.residual_scale": (0.0, 1.0),
    "ARCH.use_parallel_residual": (False,),
    "ARCH.pooling_type": (0,),
    "ARCH.rope.scaling.attn_factor": (1.0,),
    "ARCH.rope.scaling.yarn_log_multiplier": (0.0,),
    "ARCH.rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "ARCH.rope.scaling.yarn_attn_factor": (1.0,),
}  # and the values with which these mean nothing
_ROPE_FACTORS = "rope_freqs.weight"  # by which each rotary frequency is divided (Llama 3.1 and later)


class GGUFCheckpoint:
    """A GGUF file as a `WeightSource`: tensors are dequantised to fp32 when they are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, or has a model or a feature this project does not build.
    """

    num_attributes = 0  # outputs of a reward head

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is not a file")
        self._file = GGUFFile(self.path)
        if (parts := self._file.value("split.count", int, 1)) > 1:
            raise ValueError(f"{self.path} is one of {parts} parts: make one file of them (llama-gguf-split --merge)")
        self._kind = self._file.value("general.architecture", str)
        if self._kind not in _ARCHITECTURES:
            raise ValueError(f"{self.path}: GGUF architecture {self._kind!r} is not one of {', '.join(_ARCHITECTURES)}")
        self._check_keys()
        self._num_layers = self._read_num_layers()
        self._names = {
            hf: (name, expert)
            for name in self._file.tensors
            if name != _ROPE_FACTORS and not self._is_behind_the_last_layer(name)
            for hf, expert in self._hf_names(name)
        }
        try:
            self.architecture = self._read_architecture()
            check_shapes(self.architecture, self.shapes())
        except ValueError as error:
            raise ValueError(f"{self.path}: {str(error).removeprefix(f'{self.path}: ')}") from error
        self._last: tuple[str, torch.Tensor] | None = None  # one parameter is read in several slices

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's Hugging Face name and shape."""
        whole = {name: (self._file.tensors[own].shape, expert) for name, (own, expert) in self._names.items()}
        return {name: shape if expert is None else shape[1:] for name, (shape, expert) in whole.items()}

    def dtypes(self) -> list[str]:
        """Every tensor's type, by GGML's name for it."""
        return [tensor.kind.name for tensor in self._file.tensors.values()]

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A slice of a tensor, fp32, rows in Hugging Face's order."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._dequantize(name))
        return self._last[1].narrow(dim, start, length)

    def save_tokenizer(self, directory: str | Path) -> None:
        """Write the file's tokenizer and chat template as a tokenizer directory.

        Raises:
            ValueError: it is incomplete, or of a kind that cannot be built.
        """
        write_tokenizer(self._file, self.architecture.vocab_size, Path(directory))

    def _check_keys(self) -> None:
        """Refuse keys that are not known, which may change what the model computes, and values that do."""
        for key, value in self._file.metadata.items():
            own = f"ARCH{key.removeprefix(self._kind)}" if key.startswith(f"{self._kind}.") else key
            given = value.tolist() if isinstance(value, np.ndarray) else [value]
            if own in _USED_BY.get(self._kind, ()):
                continue
            if own in _NEUTRAL and any(one not in _NEUTRAL[own] for one in given):
                raise ValueError(f"{self.path}: models with {key}={value} are not supported")
            known = own in _NEUTRAL or any(fnmatchcase(own, name) for name in (*_USED, *_IRRELEVANT, *TOKENIZER_KEYS))
            if not known:
                raise ValueError(
                    f"{self.path}: the key {key} is not known here, and may change what the model computes. If it "
                    f"does not, remove it (gguf-new-metadata --remove-metadata {key} IN OUT)"
                )

    def _read_num_layers(self) -> int:
        """Those that compute the next token; llama.cpp counts GLM's that predict further ones, too."""
        further = self._file.value("glm4moe.nextn_predict_layers", int, 0) if self._kind == "glm4moe" else 0
        return self._file.value(f"{self._kind}.block_count", int) - further

    def _is_behind_the_last_layer(self, name: str) -> bool:
        """Whether a tensor is of layers that predict further tokens, which are left out."""
        match = re.match(r"blk\.(\d+)\.", name)
        return self._kind == "glm4moe" and match is not None and int(match[1]) >= self._num_layers

    def _hf_names(self, name: str) -> Iterator[tuple[str, int | None]]:
        """Of the tensors that one of the file is: Hugging Face's name, and which expert's it is, if all have one."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
        names = HF_NAMES | _OWN_NAMES.get(self._kind, {})
        if match is not None and (whole := names.get(f"{match[2]}.{match[3]}")) is not None:
            yield whole.format(match[1]), None
            return
        if match is not None and match[2] in _OF_EXPERTS and self._kind in _WITH_EXPERTS:
            for expert in range(min(self._file.tensors[name].shape[0], _MOST_EXPERTS)):
                yield f"{_OF_EXPERTS[match[2]].format(match[1], expert)}.{match[3]}", expert
            return
        if match is None or match[2] not in names:
            hint = " (experts)" if "exp" in name else " (scaled rotary embedding)" if "rope" in name else ""
            raise ValueError(f"{self.path}: tensor {name} is not supported{hint}")
        yield f"{names[match[2]].format(match[1])}.{match[3]}", None

    def _read_architecture(self) -> ModelArchitecture:
        def whole(key: str, *default: int) -> int:
            return self._file.value(f"{self._kind}.{key}", int, *default)

        def number(key: str, *default: float) -> float:
            return self._file.value(f"{self._kind}.{key}", float, *default)

        heads, hidden_size = whole("attention.head_count"), whole("embedding_length")
        head_size = whole("attention.key_length", hidden_size // max(heads, 1))
        rotary_size = whole("rope.dimension_count", head_size)
        if whole("attention.value_length", head_size) != head_size:
            raise ValueError(f"{self._kind}.attention.value_length differs from that of keys, {head_size}")
        if rotary_size != head_size and self._kind == "llama":
            raise ValueError(f"llama.rope.dimension_count={rotary_size}, of heads of {head_size}, is not supported")
        rows = self.shapes().get("model.embed_tokens.weight", (0,))[0]
        if whole("vocab_size", rows) != rows:
            raise ValueError(f"{self._kind}.vocab_size={whole('vocab_size')}, but the embedding has {rows} rows")
        base, family, own = number("rope.freq_base", 10000.0), _ARCHITECTURES[self._kind], dict[str, Any]()
        if self._kind in _PERIODS:
            own = self._features_of_gemma(hidden_size, heads, head_size)
        elif self._kind == "glm4moe":
            own = self._features_of_glm()
        elif self._kind in _WITH_EXPERTS and whole("expert_count", 0):
            family = _WITH_EXPERTS[self._kind]
            size = whole("expert_feed_forward_length", whole("feed_forward_length"))
            experts = Experts(number=whole("expert_count"), per_token=whole("expert_used_count"), ffn_hidden_size=size)
            own = {"experts": experts}
            if family == "gpt_oss":
                windowed = tuple(range(0, self._num_layers, 2))
                own |= {"bias": True, "sliding_window": whole("attention.sliding_window"), "windowed_layers": windowed}
        return ModelArchitecture(
            num_layers=self._num_layers,
            hidden_size=hidden_size,
            ffn_hidden_size=whole("feed_forward_length"),
            num_attention_heads=heads,
            num_query_groups=whole("attention.head_count_kv", heads),
            vocab_size=rows,
            kv_channels=head_size,
            max_position_embeddings=whole("context_length"),
            # Stored as float32: 9.99999974e-06 was 1e-05.
            layernorm_epsilon=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
            **FAMILIES[family].fixed,
            **own,
            tied_embeddings="lm_head.weight" not in self._names,
            rotary_base=base,
            rotary_percentage=rotary_size / max(head_size, 1),
            rope_scaling=self._rope_scaling(base, rotary_size),
            family=family,
        )

    def _features_of_gemma(self, hidden_size: int, heads: int, head_size: int) -> dict[str, Any]:
        """What differs from model to model, or is not said, as llama.cpp has it."""

        def value(key: str, kind: type[Any], *default: Any) -> Any:
            return self._file.value(f"{self._kind}.{key}", kind, *default)

        num_layers, is_third = value("block_count", int), self._kind == "gemma3"
        period = value("attention.sliding_window_pattern", int, 6) if is_third else _PERIODS["gemma2"]
        windowed = tuple(layer for layer in range(num_layers) if (layer + 1) % period)
        square = hidden_size // heads if num_layers == _SHARED_SCALES[self._kind] else head_size
        window = value("attention.sliding_window", int, *(() if is_third else (4096,)))
        features = {
            "activation": "gelu-tanh",
            "embedding_multiplier": hidden_size**0.5,
            "softmax_scale": float(square) ** -0.5,
            "final_logit_softcapping": value("final_logit_softcapping", float, 0.0 if is_third else 30.0) or None,
        }
        if windowed:
            features |= {"sliding_window": window, "windowed_layers": windowed}
        if is_third:
            return features | ({"local_rotary_base": value("rope.freq_base_swa", float, 10000.0)} if windowed else {})
        return features | {"attn_logit_softcapping": value("attn_logit_softcapping", float, 50.0) or None}

    def _features_of_glm(self) -> dict[str, Any]:
        """What differs from model to model: as llama.cpp does, by the tensors that there are."""

        def value(key: str, kind: type[Any], *default: Any) -> Any:
            return self._file.value(f"glm4moe.{key}", kind, *default)

        experts, dense = EXPERT_FAMILIES["glm4_moe"].read(
            {
                "num_hidden_layers": self._num_layers,
                "n_routed_experts": value("expert_count", int),
                "num_experts_per_tok": value("expert_used_count", int),
                "moe_intermediate_size": value("expert_feed_forward_length", int),
                "n_shared_experts": value("expert_shared_count", int, 0),
                "first_k_dense_replace": value("leading_dense_block_count", int, 0),
                "norm_topk_prob": value("expert_weights_norm", bool, False),
                "routed_scaling_factor": value("expert_weights_scale", float, 0.0) or 1.0,
                "n_group": value("expert_group_count", int, 1),
                "topk_group": value("expert_group_used_count", int, 1),
            }
        )
        return {
            "experts": experts,
            "dense_layers": dense,
            "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in self._names,
            "qk_layernorm": "model.layers.0.self_attn.q_norm.weight" in self._names,
        }

    def _rope_scaling(self, base: float, rotary_size: int) -> RopeScaling | None:
        """As llama.cpp reads it: of a type that is not given, a factor is linear."""

        def number(key: str, default: float) -> float:
            return self._file.value(f"{self._kind}.rope.{key}", float, default)

        positions = self._file.value(f"{self._kind}.context_length", int)
        kind = self._file.value(f"{self._kind}.rope.scaling.type", str, "linear")
        factor = number("scaling.factor", number("scale_linear", 0.0)) or 1.0
        scaling: RopeScaling | None = None
        if kind == "yarn":
            original = self._file.value(f"{self._kind}.rope.scaling.original_context_length", int, 0) or positions
            fast, slow = number("scaling.yarn_beta_fast", 32.0), number("scaling.yarn_beta_slow", 1.0)
            rounds = self._kind != "gpt-oss"  # llama.cpp does in all models, OpenAI's own code does not
            scaling = RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, truncate=rounds)
        elif kind == "linear":
            scaling = RopeScaling("linear", factor) if factor != 1 else None
        elif kind != "none":
            raise ValueError(f"rotary scaling {kind!r} is not supported")
        if _ROPE_FACTORS not in self._file.tensors:
            return scaling
        factors = torch.from_numpy(self._file.values(_ROPE_FACTORS))
        if scaling is not None or factors.shape != (rotary_size // 2,):
            raise ValueError(
                f"tensor {_ROPE_FACTORS} has {factors.numel()} factors beside rotary scaling {scaling and kind!r}: "
                f"only {rotary_size // 2} factors, without another scaling, are supported"
            )
        return _scaling_by(factors, base, rotary_size, positions)

    def _dequantize(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(self._file.values(*self._names[name]))
        if self._kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            architecture = self.architecture
            heads = architecture.num_attention_heads if ".q_proj." in name else architecture.num_query_groups
            return _undo_rotary_permutation(values, heads)
        return values - 1 if self._kind in _PERIODS and name.endswith("norm.weight") else values


def _scaling_by(factors: torch.Tensor, base: float, rotary_size: int, positions: int) -> RopeScaling | None:
    """The scaling that divides each frequency by its factor: Llama 3.1's, which made them, or these very factors."""
    if bool((factors == 1).all()):
        return None
    plain, _ = inverse_frequencies(base, rotary_size, None)
    largest = float(f"{factors.max():.6g}")
    for original in (8192, *(1 << exponent for exponent in range(4, 21))) if largest >= 1 else ():
        scaling = RopeScaling("llama3", largest, original)
        scaled, _ = inverse_frequencies(base, rotary_size, scaling)
        if torch.allclose(plain / scaled, factors, rtol=1e-4):
            return scaling
    return RopeScaling.by_frequency(factors.tolist(), positions)


def _undo_rotary_permutation(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from interleaved pairs (0, d/2, 1, d/2 + 1, ...) to Hugging Face's two halves."""
    shape = values.shape
    pairs = values.view(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return pairs.transpose(1, 2).reshape(shape)
