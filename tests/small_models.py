"""Small models of tests: the shape of those that are trained, a chat template, and weights in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer

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


def chatml_tokenizer(folder: Path, more: str = "", *, ends_turns: bool = True) -> Tokenizer:
    """One token per printable ASCII character (so that lengths are easy to see), and ChatML with its markers.

    Args:
        more: characters.
        ends_turns: the end of a turn is EOS.
    """
    train_character_tokenizer([*map(chr, range(32, 127)), "\n", *more], folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in ("<|im_start|>", "<|im_end|>"):
        entry = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": token}
        content["model"]["vocab"][token] = entry["id"]
        content["added_tokens"].append(entry)
    file.write_text(json.dumps(content))
    if ends_turns:
        settings = folder / "tokenizer_config.json"
        known = json.loads(settings.read_text()) if settings.exists() else {}
        settings.write_text(json.dumps(known | {"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return load_tokenizer(folder)
