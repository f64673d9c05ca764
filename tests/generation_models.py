"""Tiny random Hugging Face models and embedded engines of the same shape, for the generation tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as attention_with_sinks

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest
from nemo_style_aligner.engine.embedded import engine as engine_module
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.step import EngineShape, ModelStep
from nemo_style_aligner.engine.embedded.torch_step import TorchStep
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.rope import RopeScaling

VOCAB = 96
EOS = 1

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_GPT_OSS_ROPE = _YARN_ROPE | {"truncate": False}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 1.5}
_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-3.1": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "llama-geglu-bias": lambda: LlamaConfig(
        **_SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "llama-tanh": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False, hidden_act="gelu_pytorch_tanh"),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, tie_word_embeddings=False, head_dim=16),
    "smollm3": lambda: SmolLM3Config(**_SIZES, no_rope_layer_interval=2, rope_parameters=_YARN_ROPE),
    "granite": lambda: GraniteConfig(**_SIZES, tie_word_embeddings=True, **_MULTIPLIERS, attention_multiplier=0.05),
    "nemotron": lambda: NemotronConfig(
        **_SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, partial_rotary_factor=0.5
    ),
    "mistral-sinks": lambda: MistralConfig(**_SIZES, sliding_window=21, attn_implementation="sinks"),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, head_dim=16, query_pre_attn_scalar=64, attn_logit_softcapping=3.0, final_logit_softcapping=5.0,
        attn_implementation="eager",
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_SIZES, head_dim=8, n_routed_experts=40, num_experts_per_tok=3, moe_intermediate_size=24,
        n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=1.5,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES | {"intermediate_size": 24}, head_dim=16, num_local_experts=40,
        num_experts_per_tok=3, sliding_window=21, rope_parameters=_GPT_OSS_ROPE,
    ),
}  # fmt: skip
_FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied_embeddings": True},
    "llama-3.1": {"rope_scaling": RopeScaling("llama3", 8.0, 64), "rotary_base": 500000.0},
    "llama-geglu-bias": {"bias": True, "activation": "gelu"},
    "llama-tanh": {"activation": "gelu-tanh"},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_layernorm": True, "kv_channels": 16},
    "smollm3": {"no_rope_layers": (1,), "rope_scaling": RopeScaling("yarn", 4.0, 32), "tied_embeddings": True},
    "granite": {"softmax_scale": 0.05, "tied_embeddings": True, **_MULTIPLIERS},
    "nemotron": {
        "normalization": "layernorm1p",
        "activation": "squared-relu",
        "gated": False,
        "bias": True,
        "rotary_percentage": 0.5,
    },
    "mistral-sinks": {"sliding_window": 21, "windowed_layers": (0, 1, 2), "attention_sinks": True},
    "olmo2": {"layer_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True},
    "gemma2": {
        "layer_norms": "both",
        "normalization": "rmsnorm1p",
        "activation": "gelu-tanh",
        "kv_channels": 16,
        "softmax_scale": 0.125,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "embedding_multiplier": 48**0.5,
        "tied_embeddings": True,
    },
    "glm4-moe": {
        "rotary_percentage": 0.5,
        "dense_layers": (0,),
        "experts": Experts(
            number=40, per_token=3, ffn_hidden_size=24, scores="sigmoid", scaling=1.5, has_bias=True,
            shared_ffn_hidden_size=48,
        ),
    },
    "gpt-oss": {
        "kv_channels": 16,
        "bias": True,
        "clamped_swiglu": True,
        "attention_sinks": True,
        "sliding_window": 21,
        "windowed_layers": (0, 2),
        "rope_scaling": RopeScaling("yarn", 4.0, 32, truncate=False),
        "experts": Experts(number=40, per_token=3, ffn_hidden_size=24),
    },
}  # fmt: skip
FAMILIES = list(_CONFIGS)

AttentionInterface.register("sinks", attention_with_sinks)
AttentionMaskInterface.register("sinks", eager_mask)

ENGINE_DEFAULTS: dict[str, Any] = {"dtype": torch.float32, "num_slots": 4, "max_sequence_length": 160, "eos_id": EOS}


def hf_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random float32 model; norms and biases are random too, so that none of them can be forgotten.

    Those of GPT-OSS' experts are so large that its activation is clamped.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[family]()).float().eval()
    if family == "mistral-sinks":  # as GPT-OSS has them
        for layer in model.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(_SIZES["num_attention_heads"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.0 if name.endswith("weight") and family not in ("nemotron", "gemma2") else 0.0
                parameter.copy_(center + 0.2 * torch.randn_like(parameter))
            elif name.endswith("_bias"):
                parameter.copy_((4.0 if "gate_up" in name else 0.2) * torch.randn_like(parameter))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn_like(bias))
    return model


def architecture(family: str = "llama") -> ModelArchitecture:
    """The shape of `hf_model`'s models."""
    epsilon = 1e-5 if family in ("nemotron", "olmo2", "glm4-moe", "gpt-oss") else 1e-6
    return ModelArchitecture(
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=80,
        num_attention_heads=6,
        num_query_groups=2,
        vocab_size=VOCAB,
        layernorm_epsilon=epsilon,
        **_FEATURES[family],
    )


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weight stream: each tied tensor once, and a tensor for each expert."""
    transposed = model.config.model_type == "gpt_oss"
    tensors = model.state_dict().items()
    state = dict(part for name, tensor in tensors for part in _apart(name, tensor.detach(), transposed))
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _apart(name: str, tensor: torch.Tensor, transposed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """``transposed``: as GPT-OSS has experts, whose gate and up projections are interleaved, too."""
    layer, stacked, kind = name.partition(".mlp.experts.")
    kind, _, bias = kind.partition("_proj")
    halves = kind.split("_")
    for number, expert in enumerate(tensor if stacked else ()):
        parts = [expert.t()[i :: len(halves)] for i in range(len(halves))] if transposed else expert.chunk(len(halves))
        for half, part in zip(halves, parts, strict=True):
            yield f"{layer}.mlp.experts.{number}.{half}_proj.{'bias' if bias else 'weight'}", part
    if not stacked:
        yield name.replace(".mlp.router.", ".mlp.gate."), tensor


def engine_for(family: str = "llama", model: PreTrainedModel | None = None, **options: Any) -> EmbeddedEngine:
    """A built engine, refitted with ``model`` as version 0 if one is given."""
    engine = EmbeddedEngine(architecture(family), **(ENGINE_DEFAULTS | options))
    engine.build()
    if model is not None:
        engine.refit(weights_of(model).items(), version=0)
    return engine


def have_graphs(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """Engines decode in padded buckets, from graphs on a GPU and in the same way but without them elsewhere; or not."""

    def choose(choice: str, shape: EngineShape, device: torch.device, trainer: TrainerWeights) -> ModelStep:
        step = TorchStep(shape, device, trainer, graphs=graphs)
        step.build()
        return step

    monkeypatch.setattr(engine_module, "choose_step", choose)


def ragged_requests(count: int, longest: int = 60, seed: int = 0) -> list[GenerationRequest]:
    """Random prompts of 1 to ``longest`` tokens."""
    generator = random.Random(seed)
    return [
        GenerationRequest(i, [generator.randrange(2, VOCAB) for _ in range(generator.randint(1, longest))], seed=i)
        for i in range(count)
    ]


@torch.no_grad()
def hf_logits(model: PreTrainedModel, prompt_token_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """Float32 logits [len(token_ids), vocab] that predict each response token, without any cache."""
    logits = model(torch.tensor([prompt_token_ids + token_ids]), use_cache=False).logits
    return logits[0, len(prompt_token_ids) - 1 : -1].float()
