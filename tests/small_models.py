"""The shape of small models that are trained in tests, as arguments of `ModelArchitecture`."""

from __future__ import annotations

from typing import Any

VOCAB = 53
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "init_method_std": 0.2,
}
