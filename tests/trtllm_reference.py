"""TensorRT-LLM's decoder in plain torch: what its checkpoint tensors of all tensor-parallel ranks compute together.

Written from TensorRT-LLM's layers (attention with fused qkv, ``proj(act(fc(x)) * gate(x))``, row-parallel biases after
the sum), not from this project's models, so that it can judge the converter and play the engine in contract tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]


def forward(config: Mapping[str, Any], ranks: Sequence[Weights], ids: list[int]) -> torch.Tensor:
    """Float32 logits [len(ids), vocabulary with padding] of one sequence.

    Args:
        config: arguments of TensorRT-LLM's config class.
        ranks: each rank's tensors under TensorRT-LLM's names.
        ids: the tokens.
    """
    x = ranks[0]["transformer.vocab_embedding.weight"][torch.tensor(ids)]
    for layer in range(config["num_hidden_layers"]):
        shards = [_below(weights, f"transformer.layers.{layer}.") for weights in ranks]
        x = x + _attention(config, shards, _norm(config, shards[0], "input_layernorm", x))
        x = x + _mlp(config, shards, _norm(config, shards[0], "post_layernorm", x))
    x = _norm(config, _below(ranks[0], "transformer."), "ln_f", x)
    return torch.cat([x @ weights["lm_head.weight"].T for weights in ranks], dim=-1)


def _attention(config: Mapping[str, Any], shards: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    head, size, length = config["head_size"], len(shards), x.shape[0]
    heads, groups = config["num_attention_heads"] // size, max(1, config["num_key_value_heads"] // size)
    causal = torch.full((length, length), -torch.inf).triu(1)
    outputs = []
    for shard in shards:
        qkv = _linear(shard, "attention.qkv", x)
        q, k, v = qkv.split([heads * head, groups * head, groups * head], dim=-1)
        q = _rotate(config, q.view(length, heads, head))
        k = _rotate(config, k.view(length, groups, head)).repeat_interleave(heads // groups, dim=1)
        v = v.view(length, groups, head).repeat_interleave(heads // groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head) + causal
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, heads * head)
        outputs.append(mixed @ shard["attention.dense.weight"].T)
    return sum(outputs) + shards[0].get("attention.dense.bias", torch.zeros(1))


def _mlp(config: Mapping[str, Any], shards: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    outputs = []
    for shard in shards:
        inner = _activation(config["hidden_act"])(_linear(shard, "mlp.fc", x))
        if "mlp.gate.weight" in shard:
            inner = inner * _linear(shard, "mlp.gate", x)
        outputs.append(inner @ shard["mlp.proj.weight"].T)
    return sum(outputs) + shards[0].get("mlp.proj.bias", torch.zeros(1))


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    gelu = torch.nn.functional.gelu
    return {
        "silu": torch.nn.functional.silu,
        "swiglu": torch.nn.functional.silu,
        "gelu": gelu,
        "geglu": gelu,
        "squared-relu": lambda x: torch.relu(x) ** 2,
    }[name]


def _norm(config: Mapping[str, Any], weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if bias is not None:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, config["norm_epsilon"])
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, config["norm_epsilon"])


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _rotate(config: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """rope_gpt_neox: halves of the rotated part are paired. ``x``: [length, heads, head size]."""
    rotated = int(x.shape[-1] * config.get("rotary_pct", 1.0))
    frequencies = config["rotary_base"] ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    frequencies = _scale(frequencies, config["rotary_scaling"])
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (part.float()[:, None].repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
    turn, rest = x[..., :rotated], x[..., rotated:]
    first, second = turn.chunk(2, dim=-1)
    return torch.cat([turn * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def _scale(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Llama 3.1's frequency scaling."""
    if scaling is None:
        return frequencies
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies


def _below(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
