"""Weights: logits equal transformers', round trips are exact, mistakes are named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import safetensors.torch
import sentencepiece
import torch
import transformers
import yaml
from safetensors.torch import save_file
from small_models import TensorSource
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import ParallelLayout
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer, train_character_tokenizer
from nemo_style_aligner.engine.weights import stream
from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint, copy_tokenizer_files, write_checkpoint
from nemo_style_aligner.engine.weights.huggingface_config import read_architecture
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.kinds import StepChoice
from nemo_style_aligner.tools.placement.workload import MODELS
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    load_nemo_config,
    load_nemo_tokenizer,
    load_nemo_weights,
    save_nemo,
)
from nemo_style_aligner.trainer.models.conversion import hf_to_nemo, nemo_to_hf
from nemo_style_aligner.trainer.models.files import kind_of
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, train_step

pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = 101
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FREQUENCIES = [1.0 + i / 2 for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": FREQUENCIES,
    "long_factor": [2 * factor for factor in FREQUENCIES],
}
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GPT_OSS: dict[str, Any] = SIZES | {
    "intermediate_size": 48, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 37,
}  # fmt: skip
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 32.0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=24),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3.1": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 16384}, rope_theta=5e5, rope_scaling=LLAMA3_ROPE
    ),
    "llama 3.2, short": lambda: transformers.LlamaConfig(
        **SIZES, rope_scaling={**LLAMA3_ROPE, "original_max_position_embeddings": 128, "high_freq_factor": 6.0}
    ),
    "llama linear": lambda: transformers.LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama dynamic": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 256}, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "llama longrope": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 1024}, rope_scaling=LONGROPE
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "mistral 0.1": lambda: transformers.MistralConfig(**SIZES, sliding_window=37),
    "ministral": lambda: transformers.MinistralConfig(
        **SIZES, head_dim=24, sliding_window=20, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, head_dim=24, rope_theta=1e6),
    "qwen2 windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=50, max_window_layers=1
    ),
    "qwen2.5 tied": lambda: transformers.Qwen2Config(
        **{**SIZES, "num_key_value_heads": 1}, rope_theta=1e6, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "qwen2.5 yarn": lambda: transformers.Qwen2Config(
        **SIZES, rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ),
    "qwen3 yarn": lambda: transformers.Qwen3Config(
        **SIZES,
        head_dim=32,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, rope_theta=1e6, tie_word_embeddings=True),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "phi3 4k": lambda: transformers.Phi3Config(**SIZES, sliding_window=31),
    "phi3, part turned": lambda: transformers.Phi3Config(
        **{**SIZES, "max_position_embeddings": 1024},
        tie_word_embeddings=True,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=256,
        rope_scaling={**LONGROPE, "short_factor": FREQUENCIES[:4], "long_factor": [2.0] * 4},
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "granite": lambda: transformers.GraniteConfig(
        **{**SIZES, "initializer_range": 0.1},
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=8,
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3 moe, some layers": lambda: transformers.Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=48,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "glm4 moe": lambda: transformers.Glm4MoeConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS, rope_scaling=GPT_OSS_ROPE),
    "gpt-oss, unscaled": lambda: transformers.GptOssConfig(
        **GPT_OSS | {"layer_types": ["full_attention"] * 2}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "nemotron": lambda: transformers.NemotronConfig(**SIZES, norm_eps=1e-6),
    "olmo2": lambda: transformers.Olmo2Config(**{**SIZES, "initializer_range": 0.1}),
    "olmo3": lambda: transformers.Olmo3Config(
        **{**SIZES, "initializer_range": 0.1},
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**SIZES, "initializer_range": 0.1},
        head_dim=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        sliding_window=30,
        attn_implementation="eager",
    ),
    "gemma2, short": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=SIZES["max_position_embeddings"], attn_implementation="eager"
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "initializer_range": 0.1},
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}
# One of each kind of layers: how a native step is compiled.
GENERATED = ["llama", "mistral 0.1", "qwen2", "qwen3", "smollm3", "granite", "nemotron", "olmo3", "gemma2", "gemma3"]
WITH_EXPERTS = [name for name in FAMILIES if "moe" in name or name in ("mixtral", "gpt-oss")]
TINY = ModelArchitecture(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCAB,
    max_position_embeddings=64,
)


def random_hf_model(config: transformers.PretrainedConfig, kind: Any = None) -> transformers.PreTrainedModel:
    """Norms and biases random too, so that none of them can be forgotten unseen; experts' so that they are clamped."""
    torch.manual_seed(0)
    model = (kind or transformers.AutoModelForCausalLM).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.data += torch.randn_like(parameter) * (3.0 if "gate_up" in name else 0.3)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias += torch.randn_like(bias) * 0.3
    return model


def build(architecture: ModelArchitecture, **options: Any) -> MegatronModel:
    return build_model(architecture, {"make_vocab_size_divisible_by": 16}, torch.float32, trainable=False, **options)


def random_source(architecture: ModelArchitecture, num_attributes: int = 0) -> dict[str, torch.Tensor]:
    tensors = hf_tensors(weight_layout(architecture, num_attributes=num_attributes))
    return {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}


@torch.no_grad()
def logits_of(model: MegatronModel, tokens: torch.Tensor) -> torch.Tensor:
    return model.module(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


def test_layers_that_predict_further_tokens_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As GLM-4.5's files have one behind the last layer."""
    reference = random_hf_model(FAMILIES["glm4 moe"]())
    reference.save_pretrained(tmp_path)
    whole = HuggingFaceCheckpoint(tmp_path).shapes()
    further = {
        f"model.layers.3.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.gate.weight", "enorm.weight")
    }
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    save_file(weights | further, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("WARNING"):
        assert HuggingFaceCheckpoint(tmp_path).shapes() == whole
    assert "model.layers.3. predict further tokens and are left out" in caplog.text


# ---- Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_family_has_transformers_logits_and_comes_back_exactly(name: str, tmp_path: Path) -> None:
    reference = random_hf_model(FAMILIES[name]())
    reference.save_pretrained(tmp_path / "in")
    architecture = read_architecture(tmp_path / "in")
    model = build(architecture)
    import_weights(model, HuggingFaceCheckpoint(tmp_path / "in"))

    tokens = torch.randint(0, VOCAB, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    actual = logits_of(model, tokens)[..., :VOCAB]
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()

    write_checkpoint(tmp_path / "out", architecture, export_weights(model))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(again) is type(reference)
    written = again.state_dict()
    for key, tensor in reference.state_dict().items():
        assert torch.equal(written[key], tensor), key
    assert read_architecture(tmp_path / "out") == architecture


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for name in [*GENERATED, *WITH_EXPERTS] for step in get_args(StepChoice)[1:]]
)
def test_family_generates_as_transformers_after_a_refit(name: str, step: StepChoice, tmp_path: Path) -> None:
    """Greedily, token by token and in chunks of the prompt, with transformers' log-probs."""
    reference = random_hf_model(FAMILIES[name]())
    reference.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    model = build(architecture)
    import_weights(model, HuggingFaceCheckpoint(tmp_path))
    engine = EmbeddedEngine(
        architecture, dtype=torch.float32, num_slots=2, max_sequence_length=128, eos_id=VOCAB - 1, step=step,
        prefill_chunk_tokens=16,
    )  # fmt: skip
    engine.build()
    engine.refit(export_weights(model), version=0)
    params = SamplingParams(max_new_tokens=40, min_new_tokens=40, use_greedy=True)
    requests = [GenerationRequest(i, [1 + (5 * i + 7 * j) % 99 for j in range(1 + 40 * i)], i) for i in range(3)]
    for result in engine.generate(requests, params):
        start = len(result.prompt_token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([result.prompt_token_ids + result.token_ids])).logits[0, start - 1 : -1]
        chosen = logits.clone()
        chosen[:, VOCAB - 1] = -torch.inf
        assert len(result.token_ids) == 40 and result.token_ids == chosen.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert (torch.tensor(result.logprobs) - expected).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    "name",
    ["llama", "mistral 0.1", "granite", "smollm3", "qwen3 yarn", "phi3, part turned", "olmo3", "gemma2", "gemma3"]
    + WITH_EXPERTS,
)
def test_gradients_are_transformers(name: str, tmp_path: Path) -> None:
    """Of the mean log-prob of a packed row's tokens, by every layer's compiled or own backward pass."""
    reference = random_hf_model(FAMILIES[name]())
    reference.save_pretrained(tmp_path)
    model = build_model(read_architecture(tmp_path), {"optim": {"name": "adam"}}, torch.float32)
    import_weights(model, HuggingFaceCheckpoint(tmp_path))
    tokens = torch.randint(1, VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))  # 0 is padding there
    logprobs = reference(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    (-logprobs.mean()).backward()

    wanted = torch.ones(2, 89, dtype=torch.bool)

    def loss(out: torch.Tensor, _: Tokens) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return -out.sum(), torch.tensor(out.numel()), {}

    train_step(model, Tokens(tokens), wanted, MicroBatching(2), loss, scoring=Scoring())
    for parameter in model.gpt.parameters():
        parameter.data.copy_(parameter.main_grad)
    write_checkpoint(tmp_path / "gradients", model.architecture, export_weights(model))
    gradients = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gradients").state_dict()
    for key, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert (gradients[key] - parameter.grad).abs().max() < 1e-4 * parameter.grad.abs().max(), key


def test_llama31_scaling_matters_in_this_test() -> None:
    config = FAMILIES["llama 3.1"]()
    plain = FAMILIES["llama 3.1"]()
    plain.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    tokens = torch.arange(200)[None] % VOCAB
    with torch.no_grad():
        difference = random_hf_model(config)(tokens).logits - random_hf_model(plain)(tokens).logits
    assert difference.abs().max() > 1e-2


def test_sequence_classifier_becomes_a_reward_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, num_labels=3)
    reference = random_hf_model(config, transformers.AutoModelForSequenceClassification)
    reference.save_pretrained(tmp_path / "in")
    source = HuggingFaceCheckpoint(tmp_path / "in")
    assert source.num_attributes == 3
    architecture = read_architecture(tmp_path / "in")
    model = build(architecture, head=RewardHeadConfig(num_attributes=3))
    import_weights(model, source)
    tokens = torch.randint(1, VOCAB, (2, 20))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert torch.allclose(logits_of(model, tokens)[:, -1], expected, atol=1e-4)

    write_checkpoint(tmp_path / "out", architecture, export_weights(model), num_attributes=3)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.score.weight, reference.score.weight)


def test_checkpoint_is_written_in_shards_and_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_source(TINY)
    write_checkpoint(tmp_path / "out", TINY, iter(weights.items()), max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(weights)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert len(set(index["weight_map"].values())) > 3
    source = HuggingFaceCheckpoint(tmp_path / "out")
    shapes = source.shapes()
    for name, tensor in weights.items():
        assert torch.equal(source.read(name, 0, 0, shapes[name][0]), tensor)
    with pytest.raises(FileExistsError, match="not empty"):
        write_checkpoint(tmp_path / "out", TINY, iter(weights.items()))

    synced = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        write_checkpoint(tmp_path / "again", TINY, iter(weights.items()))
    work = tmp_path / ".again.incomplete"  # before it gets its name, and the name last
    assert sorted(synced[:-1]) == [str(work), *(str(work / name) for name in sorted(os.listdir(tmp_path / "again")))]
    assert synced[-1] == str(tmp_path)

    inside = tmp_path / "existing" / ".existing.incomplete"
    inside.mkdir(parents=True)  # left behind by a conversion that was killed
    (tmp_path / "link").symlink_to(tmp_path / "existing")
    number = (tmp_path / "existing").stat().st_ino
    write_checkpoint(tmp_path / "link", TINY, iter(weights.items()))  # not replaced: it may be a mount point
    assert os.listdir(tmp_path / "link") and not inside.exists() and (tmp_path / "existing").stat().st_ino == number
    assert HuggingFaceCheckpoint(tmp_path / "existing").shapes() == shapes

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", torch.zeros(2, 2)
        raise RuntimeError("lost a rank")

    with pytest.raises(RuntimeError, match="lost a rank"):
        write_checkpoint(tmp_path / "broken", TINY, broken())
    assert not (tmp_path / "broken").exists()


def test_files_of_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out", TINY, iter(random_source(TINY).items()))
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    for content, complaint in (
        (whole[:-100], "copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "'s pointer .*git lfs pull"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"model\.safetensors is not a whole safetensors file: .*{complaint}"):
            HuggingFaceCheckpoint(tmp_path / "out")
    for content in ("{", "{}", "[]"):
        (tmp_path / "out" / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is not an index of safetensors files"):
            HuggingFaceCheckpoint(tmp_path / "out")


def test_a_folder_that_says_two_things_is_refused(tmp_path: Path) -> None:
    """New weights beside the shards or the index of older ones: which are the model's nobody can know."""
    write_checkpoint(tmp_path / "one", TINY, iter(random_source(TINY).items()))
    write_checkpoint(tmp_path / "shards", TINY, iter(random_source(TINY).items()), max_shard_bytes=50_000)
    single, shards = tmp_path / "one" / "model.safetensors", sorted((tmp_path / "shards").glob("*.safetensors"))
    index = (tmp_path / "shards" / "model.safetensors.index.json").read_text()
    assert len(shards) > 1

    def folder(name: str, *files: Path, indexed: bool) -> Path:
        (tmp_path / name).mkdir()
        shutil.copyfile(tmp_path / "one" / "config.json", tmp_path / name / "config.json")
        for file in files:
            shutil.copyfile(file, tmp_path / name / file.name)
        if indexed:
            (tmp_path / name / "model.safetensors.index.json").write_text(index)
        return tmp_path / name

    both = folder("both", single, *shards, indexed=True)
    with pytest.raises(ValueError, match=r"both has model\.safetensors, but model\.safetensors\.index\.json names"):
        HuggingFaceCheckpoint(both)
    with pytest.raises(ValueError, match=r"has model\.safetensors, but model\.safetensors\.index\.json names"):
        HuggingFaceCheckpoint(folder("index of none", single, indexed=True))
    with pytest.raises(ValueError, match=r"has model-00001-of-.*, but there is no model\.safetensors\.index\.json"):
        HuggingFaceCheckpoint(folder("no index", single, *shards, indexed=False))
    stale = both / "model-00009-of-00009.safetensors"
    (both / "model.safetensors").rename(stale)
    with pytest.raises(ValueError, match="has model-00009-of-00009"):
        HuggingFaceCheckpoint(both)
    stale.rename(both / "consolidated.safetensors")  # the same weights in Mistral's form, as its repositories have
    assert HuggingFaceCheckpoint(both).shapes()
    with pytest.raises(FileNotFoundError, match="lacks model-00001"):
        HuggingFaceCheckpoint(folder("no shards", indexed=True))
    with pytest.raises(UserError, match="has weights alone: give the folder"):
        kind_of(single)


def test_a_folder_of_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(UserError, match=rf"holds models: name one, such as .*{name}"):
            kind_of(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", None])
def test_the_dtype_that_a_config_names_is_not_heeded(dtype: str | None, tmp_path: Path) -> None:
    """The tensors have theirs: "auto", which transformers does not take, is in files of some."""
    config = {"model_type": "llama", "rope_theta": 1e4, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": dtype, "torch_dtype": dtype}))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == read_architecture(plain)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_bias_of_zeros_is_left_out_of_a_classifier(bias: float, tmp_path: Path) -> None:
    """Other loaders refuse a tensor that they do not know."""
    archive = reward_archive(tmp_path, train_character_tokenizer("abc", tmp_path / "tokenizer"), bias)
    nemo_to_hf(archive, tmp_path / "out", torch.float32)
    assert ("score.bias" in HuggingFaceCheckpoint(tmp_path / "out").shapes()) == (bias != 0)
    hf_to_nemo(tmp_path / "out", tmp_path / "again.nemo", torch.float32)
    model = build_model(read_architecture(tmp_path / "out"), {}, torch.float32, head=RewardHeadConfig())
    load_nemo_weights(tmp_path / "again.nemo", model)
    assert model.gpt.rm_head.bias.item() == bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"sliding_window": 32}, "sliding_window=32, which transformers ignores in llama models"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "layer_types: chunked_attention is not"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "rope_parameters of sliding_attention with rope_type 'linear'",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type 'proportional' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor of rope_type 'linear' must be above 0"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "1 frequencies, the model has 8"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"config\.json: Missing required keys"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which transformers ignores in llama"),
        ({"model_type": "qwen3", "rope_parameters": HALF_ROPE}, "partial_rotary_factor=0.5"),
        ({"rms_norm_eps": 1}, r"config\.json: .*'rms_norm_eps' expected float"),
        ({"hidden_size": 66}, r"config\.json: .*66\) is not a multiple"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights are quantized .*gptq"),
        ({"quantization_config": "fp8"}, "weights are quantized .*unnamed"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "weights are quantized .*mxfp4"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}}, "weights are quantized .*fp8"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias=False, but the experts of gpt_oss always"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, r"'swiglu_limit': 5.0.*only an activation with"),
        ({"architectures": ["LlamaForTokenClassification"], "num_labels": 2}, "LlamaForTokenClassification is neither"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForQuestionAnswering is neither"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, r"code of its own \(own\.Model\)"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which transformers ignores"),
    ],
)
def test_unsupported_models_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "rope_theta": 1e4, **SIZES, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_architecture(tmp_path)


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    """As transformers takes it."""
    layers = ["full_attention", "sliding_attention"]
    config = {"model_type": "mistral", "rope_theta": 1e4, **SIZES, "layer_types": layers, "sliding_window": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(tmp_path)
    assert (architecture.family, architecture.sliding_window, architecture.windowed_layers) == ("ministral", 32, (1,))


def test_a_window_as_long_as_sequences_is_none(tmp_path: Path) -> None:
    """All fast code remains in use where a job's sequences are short; what is exported keeps the window."""
    long = dataclasses.replace(TINY, sliding_window=32, windowed_layers=(0, 1))
    short = dataclasses.replace(long, max_position_embeddings=32)
    assert (long.reach, short.reach) == (32, None) and short.layers == TINY.layers
    write_checkpoint(tmp_path / "out", short, iter(random_source(short).items()))
    assert read_architecture(tmp_path / "out") == dataclasses.replace(short, family="mistral")


def test_a_model_no_family_can_express_is_refused(tmp_path: Path) -> None:
    odd = ModelArchitecture(2, 32, 48, 4, 2, VOCAB, normalization="layernorm", gated=True)
    with pytest.raises(ValueError, match="no Hugging Face family"):
        write_checkpoint(tmp_path / "out", odd, iter(()))


# ---- GPT-OSS as it is published -------------------------------------------------------------------

STACK = "model.layers.1.mlp.experts.down_proj"
PUBLISHED = {  # openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip


def mxfp4_folder(folder: Path) -> None:
    """Random weights of a small model, in the form of the published ones."""
    config = transformers.GptOssConfig(**GPT_OSS | {"intermediate_size": 96}, rope_scaling=GPT_OSS_ROPE)
    random_hf_model(config).bfloat16().save_pretrained(folder)
    weights, draw = safetensors.torch.load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        number, columns, rows = weights.pop(name).shape
        size = number, rows, columns // 32
        weights[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=draw)
        weights[f"{name}_scales"] = torch.randint(250, size, dtype=torch.uint8, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    quantized = written | {"quantization_config": PUBLISHED["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(quantized))


def test_the_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    a = read_architecture(tmp_path)
    assert a == MODELS["gpt-oss-20b"] and a.num_parameters == 20_914_757_184


def test_mxfp4_files_are_read_as_by_transformers_and_written_in_bf16(tmp_path: Path) -> None:
    mxfp4_folder(tmp_path / "in")
    source = HuggingFaceCheckpoint(tmp_path / "in")
    assert set(source.dtypes()) == {"BF16", "MXFP4"}
    model = build_model(source.architecture, {}, torch.bfloat16, trainable=False)
    import_weights(model, source)
    write_checkpoint(tmp_path / "out", source.architecture, export_weights(model))
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        expected = convert_moe_packed_tensors(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales"))
        assert torch.equal(found.pop(name), expected)
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16 and again.config.num_local_experts == source.architecture.experts.number


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda w: w.pop(f"{STACK}_scales"), "down_proj_blocks is there, but not .*down_proj_scales"),
        (lambda w: w.pop(f"{STACK}_blocks"), "down_proj_scales is there, but not .*down_proj_blocks"),
        (lambda w: w.update({STACK: torch.zeros(6, 96, 64)}), "down_proj is there twice"),
        (lambda w: w.update({f"{STACK}_scales": torch.zeros(6, 64, 2).byte()}), r"U8 \[6, 64, 2\], which is not MXFP4"),
        (lambda w: w.update({f"{STACK}_bias": torch.zeros(10**12, 0)}), r"_bias has shape \[1000000000000, 0\]"),
        (lambda w: w.update({f"{STACK}_bias": torch.zeros(6)}), r"down_proj_bias has shape \[6\]"),
        (
            lambda w: w.update({f"{STACK}_bias": torch.zeros(5, 64)}),
            r"lack model\.layers\.1\.mlp\.experts\.5\.down_proj",
        ),
        (lambda w: w[f"{STACK}_scales"].fill_(255), r"experts\.0\.down_proj\.weight has values that are NaN"),
    ],
)
def test_what_is_wrong_with_files_of_all_experts_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any], error: str, tmp_path: Path
) -> None:
    mxfp4_folder(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=error):
        source = HuggingFaceCheckpoint(tmp_path)
        import_weights(build(source.architecture), source)


# ---- the stream -----------------------------------------------------------------------------------


def test_export_on_one_rank_is_views_of_the_parameters() -> None:
    model = build(TINY)
    stored = {p.untyped_storage().data_ptr() for _, p in model.named_parameters()}
    copied = {n for n, t in export_weights(model) if t.untyped_storage().data_ptr() not in stored}
    assert {name.split(".")[-2] for name in copied} == {"q_proj", "k_proj", "v_proj"}


def test_padded_vocabulary_is_zero_after_import() -> None:
    model = build(TINY)
    import_weights(model, TensorSource(random_source(TINY)))
    for weight in (model.gpt.embedding.word_embeddings.weight, model.gpt.output_layer.weight):
        assert weight.shape[0] == 112
        assert not weight[VOCAB:].any()
        assert weight[:VOCAB].any(1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    weights = random_source(TINY)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are NaN"):
        import_weights(build(TINY), TensorSource(weights))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_tensors_without_a_word_in_the_config_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_source(TINY)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight is of type [FIU]8"):
        HuggingFaceCheckpoint(tmp_path)


def test_a_config_that_lies_about_sizes_takes_no_memory(tmp_path: Path) -> None:
    """Layers and rows of which the weights know nothing."""
    tiny_tokenizer(tmp_path / "in")
    random_hf_model(FAMILIES["llama"]()).save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    for lie, message in (
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: must be in \[0, 10000\]"),
        ({"num_hidden_layers": 1000}, "too few for 1000 layers"),
        ({"vocab_size": 10**12}, r"has shape \[101, 64\]"),
    ):
        file.write_text(json.dumps(config | lie))
        with pytest.raises(ValueError, match=message):
            hf_to_nemo(tmp_path / "in", tmp_path / "model.nemo", torch.bfloat16)


@pytest.mark.parametrize("names", [("context/io.json", "weights/metadata.json"), ("iter_0000001/run_config.yaml",)])
def test_directories_of_nemo_2_are_named(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    message = "is a (NeMo 2.0|Megatron-Bridge) checkpoint .*export it as a Hugging Face directory"
    for read in (read_architecture, load_nemo_config, load_nemo_tokenizer):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


def test_faulty_weights_are_named() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    good = random_source(TINY)
    cases = {
        f"lack {name}": {k: v for k, v in good.items() if k != name},
        "have model.layers.2.mlp.up_proj.weight": good | {"model.layers.2.mlp.up_proj.weight": good[name]},
        rf"{name} has shape \[32, 48\], the model needs \[48, 32\]": good | {name: good[name].T},
    }
    for message, weights in cases.items():
        model = build(TINY)
        before = [p.clone() for p in model.gpt.parameters()]
        with pytest.raises(ValueError, match=message):
            import_weights(model, TensorSource(weights))
        assert all(torch.equal(a, b) for a, b in zip(before, model.gpt.parameters(), strict=True))


def test_an_output_layer_of_its_own_in_a_tied_model_is_refused() -> None:
    """As merged adapters have it that were trained with the output layer (PEFT's modules_to_save)."""
    tied = dataclasses.replace(TINY, tied_embeddings=True, vocab_size=2500)
    weights = random_source(tied)
    head = weights["model.embed_tokens.weight"].clone()
    import_weights(build(tied), TensorSource(weights | {"lm_head.weight": head}))
    head[-1, 0] += 1
    for other in (head, head[:-1]):
        with pytest.raises(ValueError, match="Set tie_word_embeddings=false"):
            import_weights(build(tied), TensorSource(weights | {"lm_head.weight": other}))
    scored = random_source(tied, num_attributes=1) | {"lm_head.weight": head}  # which a reward model does not compute
    import_weights(build(tied, head=RewardHeadConfig()), TensorSource(scored))


def test_a_language_models_weights_are_no_reward_models() -> None:
    with pytest.raises(ValueError, match=r"lack score\.weight"):
        import_weights(build(TINY, head=RewardHeadConfig()), TensorSource(random_source(TINY)))


def test_table_knows_transformer_engines_names() -> None:
    names = {name for entry in weight_layout(TINY) for name in entry.megatron_names}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names


def test_round_trips_at_every_parallel_layout() -> None:
    """TP 1, 2, 4 (more ranks than KV groups), PP 4, TP 2 x PP 2, engines of 1, 2, 4; see `multirank_weights.py`."""
    script = Path(__file__).with_name("multirank_weights.py")
    command = [sys.executable, str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])}
    layouts = ["4x1", "2x2", "1x4", *(["1x1", "2x1", "1x2"] if os.environ.get("TEST_LONG") else [])]
    done = subprocess.run(command + layouts, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ok tp") == len(layouts)


def test_ranks_gather_buckets_of_bounded_size() -> None:
    """An entry that is larger gets one of its own; no bucket has entries of two stages."""
    layout, config = ParallelLayout(2, 2, 1, 0, 0, 0), SimpleNamespace(params_dtype=torch.float32)
    model: Any = SimpleNamespace(architecture=TINY, layout=layout, config=config)
    entries, limit = weight_layout(TINY, padded_vocab_size=112), 10_000
    buckets = list(stream._buckets(model, entries, torch.float32, limit))
    assert [entry for bucket in buckets for entry in bucket.entries] == list(entries)
    assert all(bucket.num_bytes <= limit or len(bucket.entries) == 1 for bucket in buckets)
    assert [bucket.stage for bucket in buckets] == [0] * 5 + [1] * 5 and len(entries) == 15


def test_weights_that_are_pushed_arrive() -> None:
    """What the receivers get is what was sent; a stream of other tensors is refused, not sent under wrong names."""
    weights, sent = random_source(TINY), []
    stream.send_weights(weights.items(), TINY, torch.float32, lambda tensor: sent.append(tensor.clone()))
    tensors = iter(sent)
    received = dict(stream.receive_weights(TINY, torch.float32, lambda tensor: tensor.copy_(next(tensors))))
    assert list(received) == list(weights) and all(torch.equal(received[name], weights[name]) for name in weights)
    first, second, *others = weights.items()
    for message, wrong in {
        f"nothing .* in the place of {others[-1][0]}": [first, second, *others[:-1]],
        f"{second[0]} .* in the place of {first[0]}": [second, first, *others],
        "have another, which the model has no place for": [first, second, *others, ("another", first[1])],
    }.items():
        with pytest.raises(ValueError, match=message):
            stream.send_weights(wrong, TINY, torch.float32, lambda tensor: None)


# ---- conversion -----------------------------------------------------------------------------------


def tiny_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    vocab = {f"t{i}": i for i in range(97)} | {"<s>": 97, "</s>": 98, "<unk>": 99}
    fast = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ messages }}"
    )
    tokenizer.save_pretrained(directory)


def test_a_tokenizers_files_are_copied_whole(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "in")
    (tmp_path / "in" / "additional_chat_templates").mkdir()
    for name in ("additional_chat_templates/tool_use.jinja", "tekken.json", "generation_config.json"):
        (tmp_path / "in" / name).write_text("{}")
    (tmp_path / "in" / "model.safetensors").write_bytes(b"weights")
    copy_tokenizer_files(tmp_path / "in", tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert names > {"additional_chat_templates/tool_use.jinja", "tekken.json", "generation_config.json"}
    assert "tokenizer.json" in names and "model.safetensors" not in names


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", None, r"DIR: transformers cannot load this tokenizer"),
        ("tokenizer.json", "version of git-lfs", r"DIR/tokenizer\.json cannot be used"),
        ("tokenizer_config.json", "[]", r"DIR/tokenizer_config\.json cannot be read"),
        ("generation_config.json", "{", r"generation_config\.json cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named_by_its_directory(
    name: str, content: str | None, complaint: str, tmp_path: Path
) -> None:
    directory = tmp_path / "in"
    random_hf_model(FAMILIES["llama"]()).save_pretrained(directory)
    tiny_tokenizer(directory)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(TokenizerError, match=complaint.replace("DIR", str(directory))):
        hf_to_nemo(directory, tmp_path / "model.nemo", torch.bfloat16)


def test_a_tokenizers_own_code_is_neither_needed_nor_asked_about(tmp_path: Path) -> None:
    """`auto_map` in tokenizer_config.json, beside a tokenizer.json."""
    tiny_tokenizer(tmp_path / "in")
    file = tmp_path / "in" / "tokenizer_config.json"
    custom = {"tokenizer_class": "OtherTokenizer", "auto_map": {"AutoTokenizer": ["code.OtherTokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | custom))
    (tmp_path / "in" / "code.py").write_text("raise SystemExit")
    assert load_tokenizer(tmp_path / "in").eos_id == 98
    write_checkpoint(tmp_path / "out", TINY, iter(random_source(TINY).items()), tokenizer_dir=tmp_path / "in")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 98


def test_a_place_where_no_archive_can_be_is_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_hf_model(FAMILIES["llama"]()).save_pretrained(tmp_path / "in")
    tiny_tokenizer(tmp_path / "in")
    monkeypatch.setattr("nemo_style_aligner.trainer.models.conversion.import_weights", None)
    with pytest.raises(ValueError, match=r"in is a directory, .* give a path that ends in \.nemo"):
        hf_to_nemo(tmp_path / "in", tmp_path / "in", torch.bfloat16)
    with pytest.raises(FileExistsError):
        hf_to_nemo(tmp_path / "in", tmp_path / "in" / "config.json" / "model.nemo", torch.bfloat16)


@pytest.mark.parametrize("classifier", [False, True])
def test_hugging_face_to_nemo_and_back_is_exact(classifier: bool, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification if classifier else transformers.AutoModelForCausalLM
    config = transformers.Qwen2Config(**SIZES, num_labels=2, tie_word_embeddings=not classifier)
    reference = random_hf_model(config, kind).bfloat16()
    reference.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink(missing_ok=True)  # so that config.json decides
    tiny_tokenizer(tmp_path / "in")

    hf_to_nemo(tmp_path / "in", tmp_path / "model.nemo", torch.bfloat16)
    assert load_nemo_tokenizer(tmp_path / "model.nemo").stop_ids == (98, 2)  # the tokenizer's own, and config.json's
    with pytest.raises(FileExistsError, match="not empty"):  # before anything is read: there is no such archive
        nemo_to_hf(tmp_path / "missing.nemo", tmp_path / "in", torch.bfloat16)
    nemo_to_hf(tmp_path / "model.nemo", tmp_path / "out", torch.bfloat16)

    again = kind.from_pretrained(tmp_path / "out")
    written = again.state_dict()
    for key, tensor in reference.state_dict().items():
        assert torch.equal(written[key], tensor), key
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == "{{ messages }}"
    if classifier:
        assert tokenizer.pad_token == "<s>" and again.config.pad_token_id == 97
    else:
        assert again.generation_config.eos_token_id == [98, 2] and tokenizer.eos_token_id == 98


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8, "windowed_layers": (1,), "local_rotary_base": 50.0, "attention_sinks": True},
        {"sliding_window": 8, "windowed_layers": (0, 1)},
    ],
)
def test_windows_and_sinks_come_back_from_an_archive(changes: dict[str, Any], tmp_path: Path) -> None:
    """Under Megatron-Core's names."""
    architecture = dataclasses.replace(TINY, **changes)
    model, again = (build(architecture) for _ in range(2))
    import_weights(model, TensorSource(random_source(architecture)))
    save_nemo(tmp_path / "model.nemo", model, architecture.to_nemo_config(), None)
    config = load_nemo_config(tmp_path / "model.nemo")
    assert (config["window_size"], config.get("softmax_type")) == ([7, 0], "learnable" if len(changes) == 4 else None)
    assert ModelArchitecture.from_nemo_config(config) == architecture
    load_nemo_weights(tmp_path / "model.nemo", again)
    for (name, parameter), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert any("core_attention.softmax_offset" in name for name, _ in model.named_parameters()) == (len(changes) == 4)


def reward_archive(folder: Path, tokenizer: Tokenizer, bias: float = 0.5, **standardization: float) -> Path:
    """A reward model of random weights."""
    architecture = ModelArchitecture(2, 32, 64, 4, 2, tokenizer.vocab_size, max_position_embeddings=64)
    model = build_model(architecture, {}, torch.float32, head=RewardHeadConfig(), trainable=False)
    model.gpt.rm_head.bias.data.fill_(bias)
    tokenizer.save(folder / "files")
    config = {"reward_model_type": "binary_ranking", "reward_standardization": standardization}
    save_nemo(folder / "rm.nemo", model, architecture.to_nemo_config() | config, folder / "files")
    return folder / "rm.nemo"


def test_classifiers_take_batches_and_pad_with_another_token_than_eos(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = train_character_tokenizer("abc", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<|endoftext|>"}))
    archive = reward_archive(tmp_path, load_tokenizer(tmp_path / "tokenizer"), enable=True, mean=3, std=2)
    nemo_to_hf(archive, tmp_path / "out", torch.float32)
    assert "no bias in the head: add 0.5 to their rewards" in caplog.text and "to pad with" not in caplog.text
    assert "do not standardise: subtract 3 from their rewards and divide by 2" in caplog.text

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.pad_token == "<|pad|>"
    texts = ["ab<|endoftext|>", "cabcabc<|endoftext|>"]
    with torch.no_grad():
        together = classifier(**theirs(texts, return_tensors="pt", padding=True)).logits
        alone = torch.cat([classifier(**theirs(text, return_tensors="pt")).logits for text in texts])
        ours = build(read_architecture(tmp_path / "out"), head=RewardHeadConfig())
        load_nemo_weights(archive, ours)
        rewards = [logits_of(ours, torch.tensor([tokenizer.text_to_ids(text)]))[0, -1] for text in texts]
    assert torch.allclose(together, alone, atol=1e-6) and (alone[0] - alone[1]).abs() > 1e-3
    assert torch.allclose(alone + 0.5, torch.stack(rewards), atol=1e-5)


def test_a_classifier_that_has_nothing_to_pad_with_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = reward_archive(tmp_path, train_bpe_tokenizer(["ab"], 300, tmp_path / "tokenizer"))
    nemo_to_hf(archive, tmp_path / "out", torch.float32)
    assert "no token to pad with but EOS" in caplog.text and "transformers takes one text at a time" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None


@pytest.mark.parametrize("num_attributes", [0, 1])
def test_a_padding_token_that_the_model_lacks_is_not_named(num_attributes: int, tmp_path: Path) -> None:
    """As of tokenizers to which "[PAD]" was added while the embedding stayed as it was."""
    tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    architecture = dataclasses.replace(TINY, vocab_size=tokenizer.pad_token_id)
    weights = iter(random_source(architecture, num_attributes).items())
    write_checkpoint(
        tmp_path / "out", architecture, weights, num_attributes=num_attributes, tokenizer_dir=tmp_path / "tokenizer"
    )
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification)
    model = kinds[num_attributes].from_pretrained(tmp_path / "out")
    pad = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").pad_token
    assert (model.config.pad_token_id, pad) == [(None, "[PAD]"), (97, "<s>")][num_attributes]


def test_an_archive_whose_tokenizer_is_a_name_says_so(tmp_path: Path) -> None:
    """As NeMo's Llama 3: the size of the vocabulary is the tokenizer's, which is on the Hub."""
    (tmp_path / "model").mkdir()
    config = "num_layers: 1\nhidden_size: 8\nnum_attention_heads: 2\ntokenizer: {library: huggingface, type: a/b}\n"
    (tmp_path / "model" / "model_config.yaml").write_text(config)
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.*put a Hugging Face tokenizer's files into"):
        nemo_to_hf(tmp_path / "model", tmp_path / "out", torch.bfloat16)


def test_a_sentencepiece_model_becomes_a_tokenizer_of_hugging_faces(tmp_path: Path) -> None:
    """As NeMo's own archives carry one, under a name of NeMo's."""
    random_hf_model(FAMILIES["llama"]()).bfloat16().save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").unlink(missing_ok=True)
    tiny_tokenizer(tmp_path / "in")
    archive = tmp_path / "model.nemo"
    hf_to_nemo(tmp_path / "in", tmp_path / "model.tar", torch.bfloat16)
    shutil.unpack_archive(tmp_path / "model.tar", archive, filter="data")
    for unwanted in [*(archive / "tokenizer").iterdir(), archive / "checksums.json"]:
        unwanted.unlink()
    (archive / "tokenizer").rmdir()
    (tmp_path / "corpus.txt").write_text("What is it? It is fine, is it not?\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(archive / "ab12_tokenizer"), vocab_size=60,
        model_type="bpe", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    config = yaml.safe_load((archive / "model_config.yaml").read_text())
    config["tokenizer"] = {"library": "sentencepiece", "model": "nemo:ab12_tokenizer.model"}
    (archive / "model_config.yaml").write_text(yaml.safe_dump(config))

    nemo_to_hf(archive, tmp_path / "out", torch.bfloat16)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(archive / "ab12_tokenizer.model"))
    for text in ("What  is it?", "fine   is it\n  not"):
        assert theirs.encode(text, add_special_tokens=False) == reference.encode(text)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert written.generation_config.eos_token_id == written.config.eos_token_id == theirs.eos_token_id == 2
    assert load_tokenizer(tmp_path / "out").fingerprint() == load_nemo_tokenizer(archive).fingerprint()


@pytest.mark.long
def test_conversion_script_ends_with_one_line_about_a_mistake(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "examples/nlp/gpt/convert_hf_to_nemo.py"), "--input-dir", str(tmp_path)]
        + ["--output", str(tmp_path / "model.nemo")],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "is no model" in done.stderr
    assert "Traceback" not in done.stderr
