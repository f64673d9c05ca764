"""GGUF files (llama.cpp's format): quantised weights read tensor by tensor, with config and tokenizer."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.data.tokenizer import save_made

logger = logging.getLogger(__name__)

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
}
"""Hugging Face's names by llama.cpp's; `{}` is the layer."""

# GGUF architectures with Llama's tensors. llama.cpp reorders the rows of q and k of "llama" (which is Mistral's
# too) for its own form of rotary embedding; the others it leaves as they are.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KNOWN_SPLITTINGS = ("gpt-2", "smollm")  # beside those that transformers knows


class GGUFCheckpoint:
    """A GGUF file as a `WeightSource`: tensors are dequantised to fp32 when they are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, or has a model or a feature this project does not build.
    """

    def __init__(self, path: str | Path) -> None:
        from gguf import GGUFReader

        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is not a file")
        try:
            self._reader = GGUFReader(self.path)  # memory-mapped
        except (ValueError, LookupError) as error:
            raise ValueError(f"{self.path} is not a whole GGUF file: {error}") from error
        if (parts := int(self._value("split.count", 1))) > 1:
            raise ValueError(f"{self.path} is one of {parts} parts: make one file of them (llama-gguf-split --merge)")
        self._kind = self._value("general.architecture")
        if self._kind not in _ARCHITECTURES:
            raise ValueError(f"{self.path}: GGUF architecture {self._kind!r} is not one of {', '.join(_ARCHITECTURES)}")
        self._tensors = {self._hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.architecture = self._read_architecture()
        self._last: tuple[str, torch.Tensor] | None = None  # one parameter is read in several slices

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's Hugging Face name and shape."""
        # GGUF lists the fastest-varying dimension first.
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A slice of a tensor, fp32, rows in Hugging Face's order."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._dequantize(name))
        return self._last[1].narrow(dim, start, length)

    def save_tokenizer(self, directory: str | Path) -> None:
        """Write the file's tokenizer and chat template as a Hugging Face tokenizer directory."""
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer

        self.check_splitting()
        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        if self._value("tokenizer.ggml.pre", None) == "smollm":
            # transformers does not know this one and builds GPT-2's splitting; SmolLM splits off every digit first.
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        save_made(tokenizer, directory)

    def check_splitting(self) -> None:
        """Raise ValueError if the splitting of texts before merges apply, ``tokenizer.ggml.pre``, is not known here.

        For any that it does not know, transformers builds GPT-2's, which may give other ids.
        """
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        if self._value("tokenizer.ggml.model", None) != "gpt2":
            return  # sentencepiece's vocabularies need no splitting
        splitting = self._value("tokenizer.ggml.pre", None)
        if splitting in (None, "default"):
            logger.warning("%s does not name its pre-tokenizer (tokenizer.ggml.pre): assuming GPT-2's", self.path)
        elif splitting not in (*GGUF_PRE_TOKENIZER_SPLITS, *_KNOWN_SPLITTINGS):
            raise ValueError(
                f"{self.path}: its pre-tokenizer, tokenizer.ggml.pre={splitting!r}, is not supported: "
                "convert the model's Hugging Face directory instead (convert_hf_to_nemo.py)"
            )

    def _value(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the key {key}: not a complete GGUF model")

    def _hf_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
        if match is None or match[2] not in HF_NAMES:
            hint = " (experts)" if "exp" in name else " (scaled rotary embedding)" if "rope" in name else ""
            raise ValueError(f"{self.path}: tensor {name} is not supported{hint}")
        return f"{HF_NAMES[match[2]].format(match[1])}.{match[3]}"

    def _read_architecture(self) -> ModelArchitecture:
        def value(key: str, *default: Any) -> Any:
            return self._value(f"{self._kind}.{key}", *default)

        scaling = value("rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"{self.path}: rotary scaling {scaling!r} is not supported in GGUF files")
        heads, hidden_size = int(value("attention.head_count")), int(value("embedding_length"))
        head_size = int(value("attention.key_length", hidden_size // heads))
        rotary_size = int(value("rope.dimension_count", head_size))
        return ModelArchitecture(
            num_layers=int(value("block_count")),
            hidden_size=hidden_size,
            ffn_hidden_size=int(value("feed_forward_length")),
            num_attention_heads=heads,
            num_query_groups=int(value("attention.head_count_kv", heads)),
            vocab_size=self.shapes()["model.embed_tokens.weight"][0],
            kv_channels=head_size,
            max_position_embeddings=int(value("context_length")),
            # Stored as float32: 9.99999974e-06 was 1e-05.
            layernorm_epsilon=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
            qkv_bias=self._kind == "qwen2",
            qk_layernorm=self._kind == "qwen3",
            tied_embeddings="lm_head.weight" not in self._tensors,
            rotary_base=float(value("rope.freq_base", 10000.0)),
            rotary_percentage=rotary_size / head_size,
            family=self._kind,
        )

    def _dequantize(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        array = dequantize(tensor.data, tensor.tensor_type)
        # What needs no dequantising is a view of the mapped file, which is read-only.
        values = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self._kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            architecture = self.architecture
            heads = architecture.num_attention_heads if ".q_proj." in name else architecture.num_query_groups
            return _undo_rotary_permutation(values, heads)
        return values


def _undo_rotary_permutation(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from interleaved pairs (0, d/2, 1, d/2 + 1, ...) to Hugging Face's two halves."""
    shape = values.shape
    pairs = values.view(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
    return pairs.transpose(1, 2).reshape(shape)
