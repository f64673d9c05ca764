"""Small models of tests: the shape of those that are trained, a chat template, and weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

VOCAB = 53
SHAPE: dict[str, Any] = {  # arguments of `ModelArchitecture`
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "init_method_std": 0.2,
}
CHATML = (  # template of chats
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TensorSource:
    """A `WeightSource` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self.tensors[name].narrow(dim, start, length)
