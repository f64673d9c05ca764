"""A model in TensorRT-LLM's terms: its config, and its weights under TensorRT-LLM's names, cut for one rank.

One table serves building and refitting, so both use the same names. What TensorRT-LLM (<= 1.2.1) wants:

- q, k and v of the rank's heads are rows of one matrix ``attention.qkv``: all q, then all k, then all v. Where there
  are fewer k/v heads than ranks, ranks share copies of a head.
- A gated MLP computes ``proj(act(fc(x)) * gate(x))``: ``fc`` is Hugging Face's ``gate_proj``, ``gate`` its ``up_proj``.
- Column-parallel matrices are cut by rows, row-parallel ones by columns; the biases of the latter are added once,
  after the ranks' sum, and every rank holds them whole.
- The embedding is whole on every rank. ``lm_head`` is padded with zero rows to a multiple of the ranks and cut by rows.
- Norm weights are plain factors: to those of ``layernorm1p``, stored as offsets, one is added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.engine import WeightStream
from nemo_style_aligner.generation.shard import ModelShard
from nemo_style_aligner.weights.checked import checked
from nemo_style_aligner.weights.layout import HFTensor, hf_tensors, weight_layout

Rule = Literal["share", "whole", "vocabulary", "norm"]

_LAYER_MODULES: dict[str, tuple[str, int, Rule]] = {
    # Hugging Face module: TensorRT-LLM's module, row block in it, how its weight is cut ("share": as by `ModelShard`)
    "self_attn.q_proj": ("attention.qkv", 0, "share"),
    "self_attn.k_proj": ("attention.qkv", 1, "share"),
    "self_attn.v_proj": ("attention.qkv", 2, "share"),
    "self_attn.o_proj": ("attention.dense", 0, "share"),
    "mlp.gate_proj": ("mlp.fc", 0, "share"),
    "mlp.up_proj": ("mlp.gate", 0, "share"),  # mlp.fc where there is no gate_proj
    "mlp.down_proj": ("mlp.proj", 0, "share"),
    "input_layernorm": ("input_layernorm", 0, "norm"),
    "post_attention_layernorm": ("post_layernorm", 0, "norm"),
}
_OUTER_MODULES: dict[str, tuple[str, int, Rule]] = {
    "model.embed_tokens": ("transformer.vocab_embedding", 0, "whole"),
    "model.norm": ("transformer.ln_f", 0, "norm"),
    "lm_head": ("lm_head", 0, "vocabulary"),
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)$")


class _Part(NamedTuple):
    """Where a Hugging Face tensor goes: to which TensorRT-LLM tensor, which of its row blocks, cut how."""

    target: str
    block: int
    rule: Rule


# ---- the model's config ---------------------------------------------------------------------------


class EngineModel(NamedTuple):
    """A model in TensorRT-LLM's API: names of classes in ``tensorrt_llm.models``, and the config class's arguments."""

    model_class: str
    config_class: str
    config: dict[str, Any]


def engine_model(architecture: ModelArchitecture, model_type: str, dtype: torch.dtype) -> EngineModel:
    """The classes and the config of ``model_type`` (NeMo-Aligner's ``trt_llm.model_type``).

    Raises:
        ValueError: TensorRT-LLM's model of this type cannot express the architecture, or there is no such type here.
    """
    a = architecture
    require_told(a)
    if a.qk_layernorm:
        raise ValueError(
            "TensorRT engines of models with qk_layernorm (Qwen3) are not supported: set "
            "trainer.ppo.trt_llm.backend=pytorch or trainer.ppo.generation.engine=embedded"
        )
    config: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "logits_dtype": "float32",
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_size": a.kv_channels,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "position_embedding_type": "rope_gpt_neox",
        "norm_epsilon": a.layernorm_epsilon,
        "rotary_base": a.rotary_base,
        "rotary_scaling": None if a.rope_scaling is None else a.rope_scaling.to_mapping(),
        "use_parallel_embedding": False,
    }
    if model_type == "llama":
        _require(a.normalization == "rmsnorm" and a.gated and a.rotary_percentage == 1.0, model_type, a)
        config |= {
            "architecture": "LlamaForCausalLM",
            "hidden_act": a.activation,
            # TensorRT-LLM's attention has biases on all of q, k, v and o or on none; an o without one gets zeros.
            "attn_bias": a.bias or a.qkv_bias,
            "mlp_bias": a.bias,
        }
        return EngineModel("LLaMAForCausalLM", "LLaMAConfig", config)
    if model_type in ("gpt", "gptnext"):
        _require(a.normalization != "rmsnorm" and not a.qkv_bias, model_type, a)
        gated = {"silu": "swiglu", "gelu": "geglu"}
        config |= {
            "architecture": "GPTForCausalLM",
            "hidden_act": gated[a.activation] if a.gated else a.activation,
            "bias": a.bias,
            "rotary_pct": a.rotary_percentage,
        }
        return EngineModel("GPTForCausalLM", "GPTConfig", config)
    raise ValueError(
        f"trainer.ppo.trt_llm.model_type={model_type!r} is not supported for TensorRT engines: choose llama, gpt or "
        "gptnext, or trainer.ppo.generation.engine=embedded"
    )


def _require(fits: bool, model_type: str, a: ModelArchitecture) -> None:
    if not fits:
        other = "gptnext" if a.normalization != "rmsnorm" else "llama"
        raise ValueError(
            f"trainer.ppo.trt_llm.model_type={model_type} does not fit a model with normalization={a.normalization}, "
            f"gated={a.gated}, qkv_bias={a.qkv_bias}, rotary_percentage={a.rotary_percentage}: set it to {other} if "
            "that is what the model is, else use trainer.ppo.generation.engine=embedded"
        )


def require_told(a: ModelArchitecture) -> None:
    """Refuse what TensorRT-LLM is not told of here, or has another formula for.

    Raises:
        ValueError: the model has such a feature.
    """
    features = {
        f"rope_type={a.rope_scaling.rope_type}" if a.rope_scaling else "": a.rope_scaling is not None
        and a.rope_scaling.rope_type != "llama3",
        "layers without a rotary embedding": bool(a.no_rope_layers),
        "multipliers of embeddings, attention, residual stream or logits": a.has_multipliers,
    }
    if untold := [name for name, has in features.items() if has]:
        raise ValueError(
            f"TensorRT-LLM cannot be used for models with {' and '.join(untold)}: use "
            "trainer.ppo.generation.engine=embedded"
        )


# ---- weights --------------------------------------------------------------------------------------


class EngineWeights:
    """Converts streams of Hugging Face tensors to one tensor-parallel rank's TensorRT-LLM tensors.

    Attributes:
        shapes: TensorRT-LLM's name and this rank's shape of every tensor of the model.
        optional: names that an engine need not have: a tied ``lm_head``, which shares the embedding's memory.
    """

    def __init__(self, architecture: ModelArchitecture, *, dtype: torch.dtype, tp_size: int, tp_rank: int) -> None:
        """Raises ValueError where heads or MLP cannot be cut into ``tp_size`` shares."""
        self._architecture = a = architecture
        self._shard = ModelShard(architecture, tp_rank, tp_size)
        self._dtype = dtype
        self._sources: dict[str, HFTensor] = hf_tensors(weight_layout(a))
        self._parts = {name: self._places(name) for name in self._sources}
        self._blocks: dict[str, int] = {}
        for parts in self._parts.values():
            for part in parts:
                self._blocks[part.target] = self._blocks.get(part.target, 0) + 1
        self.shapes: dict[str, tuple[int, ...]] = self._shapes()
        self.optional = frozenset({"lm_head.weight"} if a.tied_embeddings else ())

    def convert(self, weights: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (TensorRT-LLM's name, this rank's tensor), each as soon as all of its parts have arrived.

        Tensors are contiguous, of the engine's dtype and on the stream's device. They may share memory with the
        stream's tensors where nothing had to be changed.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or misshapen; the message names it.
        """
        waiting: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in checked(weights, {name: source.shape for name, source in self._sources.items()}):
            for part in self._parts[name]:
                blocks = waiting.setdefault(part.target, {})
                blocks[part.block] = self._cut(name, tensor, part.rule)
                if len(blocks) == self._blocks[part.target]:
                    ordered = [blocks[i] for i in sorted(blocks)]
                    whole = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
                    del waiting[part.target]
                    yield part.target, whole.to(self._dtype).contiguous()
        for target in self._zero_biases():
            yield target, torch.zeros(self.shapes[target], dtype=self._dtype)

    def _places(self, name: str) -> tuple[_Part, ...]:
        """Where a Hugging Face tensor goes: one place, two for a tied embedding."""
        layer = _LAYER_NAME.match(name)
        module, kind = (layer[2], layer[3]) if layer else name.rsplit(".", 1)
        target, index, rule = _LAYER_MODULES[module] if layer else _OUTER_MODULES[module]
        if module == "mlp.up_proj" and not self._architecture.gated:
            target = "mlp.fc"
        if kind == "bias" and rule == "norm":
            rule = "whole"
        prefix = f"transformer.layers.{layer[1]}." if layer else ""
        places: tuple[_Part, ...] = (_Part(f"{prefix}{target}.{kind}", index, rule),)
        if module == "model.embed_tokens" and self._architecture.tied_embeddings:
            places += (_Part("lm_head.weight", 0, "vocabulary"),)
        return places

    def _cut(self, name: str, tensor: torch.Tensor, rule: Rule) -> torch.Tensor:
        """This rank's share; a view where possible."""
        if rule == "norm":
            return tensor + 1 if self._architecture.normalization == "layernorm1p" else tensor
        if rule == "whole":
            return tensor
        share = self._shard.take(name, tensor)
        if rule == "vocabulary":
            share = torch.nn.functional.pad(share, (0, 0, 0, self._shard.vocab_rows - share.shape[0]))
        return share

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, source in self._sources.items():
            for part in self._parts[name]:
                share = self._cut(name, torch.empty(source.shape, device="meta"), part.rule).shape
                before = shapes.get(part.target, (0,))[0]
                shapes[part.target] = (before + share[0], *share[1:])
        for target in self._zero_biases():
            shapes[target] = (self._architecture.hidden_size,)
        return shapes

    def _zero_biases(self) -> list[str]:
        """Biases that TensorRT-LLM's model has and ours lacks (Qwen2 has them on q, k and v only)."""
        if not self._architecture.qkv_bias or self._architecture.bias:
            return []
        return [f"transformer.layers.{i}.attention.dense.bias" for i in range(self._architecture.num_layers)]
