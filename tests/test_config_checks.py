"""Impossible settings: found before any weight is read, all at once, each with its key and the way out."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from job_processes import Job, script
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from omegaconf import OmegaConf
from test_config import COMMANDS, composed

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.guard.http_server import PlaceTakenError
from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from nemo_style_aligner.places import CONFIGS
from nemo_style_aligner.trainer.checkpoints.directory import checkpoint_name
from nemo_style_aligner.trainer.checkpoints.manifest import Manifest
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.config import command_line
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import (
    ConfigError,
    check_config,
    complete_config,
    load_defaults,
    required_keys,
)
from nemo_style_aligner.trainer.config.schema import JOBS, Critic, ExpManager, PPOActor
from nemo_style_aligner.trainer.config.section_names import names_of
from nemo_style_aligner.trainer.jobs.config_checks import check_job, find_problems
from nemo_style_aligner.trainer.jobs.job_view import JobView
from nemo_style_aligner.trainer.jobs.log_lock import hold_log_directory
from nemo_style_aligner.trainer.jobs.path_checks import log_directory_problems, resume_problems
from nemo_style_aligner.trainer.jobs.settings_in_vain import settings_in_vain
from nemo_style_aligner.trainer.models.restore import lay_over
from nemo_style_aligner.trainer.rl.rollouts.setup import engine_size
from nemo_style_aligner.wording import unescaped

PATH_KEYS = {"gpt_sft": "model.restore_from_path", "inference_rm": "rm_model_file"}
DATA = str(Path(__file__))  # whose being there is all that is looked at
PREFIX = f"model.data.data_prefix={{train: ['{DATA}']}}"
SFT_FILES = (f"model.data.train_ds.file_path={DATA}", "model.data.validation_ds.file_path=null")
GIVEN = {"gpt_sft": SFT_FILES} | dict.fromkeys(
    ("training_rm", "gpt_dpo", "gpt_kto", "gpt_ppo_actor", "gpt_reinforce_actor", "gpt_rs_actor"), (PREFIX,)
)
GIVEN["gpt_knowledge_distillation"] = (PREFIX,)
GIVEN["compute_topk_logits"] = (f"data.data.file_path={DATA}", "output_path=/tmp/logits.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with a config and nothing else: whatever reads weights or a tokenizer from it fails."""
    folder = tmp_path_factory.mktemp("archive") / "model.nemo"
    folder.mkdir()
    config = {
        "num_layers": 6,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 61,
        "max_position_embeddings": 4096,
        "encoder_seq_length": 4096,
        "activation": "swiglu",
        "normalization": "rmsnorm",
    }
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for job, key in (
            ("gpt_ppo_critic", "trainer.ppo.port"),
            ("inference_rm", "inference.port"),
            ("gpt_sft", "exp_manager.dashboard_port"),
        ):
            cfg = load_defaults(job)
            OmegaConf.update(cfg, PATH_KEYS.get(job, "pretrained_checkpoint.restore_from_path"), str(model))
            OmegaConf.update(cfg, key, port)
            OmegaConf.update(cfg, "exp_manager.explicit_log_dir", str(tmp_path))
            for argument in GIVEN.get(job, ()):
                name, _, value = argument.partition("=")
                OmegaConf.update(cfg, name, OmegaConf.create(f"x: {value}").x)
            with pytest.raises(PlaceTakenError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*{key}"):
                check_job(job, JOBS[job].sections.read(cfg), 1)


def problems(model: Path, job: str, line: str, ranks: int = 1) -> list[str]:
    path = f"{PATH_KEYS.get(job, 'pretrained_checkpoint.restore_from_path')}={model}"
    log_dir = f"exp_manager.explicit_log_dir={model.parent / 'log'}"
    cfg = load_defaults(job)
    for argument in [path, log_dir, *GIVEN.get(job, ()), *shlex.split(line)]:
        key, _, value = argument.partition("=")
        OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, merge=False)  # much faster than hydra
    try:
        check_config(cfg, job)
    except ConfigError as error:
        return str(error).splitlines()
    return find_problems(job, JOBS[job].sections.read(cfg), ranks)


def read(job: str, *arguments: str) -> JobConfig:
    return JOBS[job].sections.read(composed(job, *arguments))


@pytest.mark.parametrize(
    "setting",
    [
        "transformer_block_type: normformer", "moe_router_num_groups: 8",
        "rotary_interleaved: true", "apply_embedding_scaling: true",
        "mcore_customization_config: {final_logit_softcapping: 30.0}",
    ],
)  # fmt: skip
def test_an_archive_of_another_kind_of_model_is_refused(model: Path, setting: str, tmp_path: Path) -> None:
    """What would silently compute other numbers than the model was trained with."""
    config = (model / "model_config.yaml").read_text()
    (tmp_path / "model_config.yaml").write_text(f"{config}{setting}\n")
    key = setting.split(":")[0]
    assert any(
        f"model.{key}=" in problem and "not supported" in problem for problem in problems(tmp_path, "gpt_sft", "")
    )


def test_archives_as_nemo_writes_them(model: Path) -> None:
    """Every such key with its usual value; biases and Llama 3.1's scaling by NeMo's names; our own read back."""
    config = yaml.safe_load((model / "model_config.yaml").read_text())
    usual = {"window_size": None, "transformer_block_type": "pre_ln", "openai_gelu": False,
             "normalize_attention_scores": True, "rotary_interleaved": False, "num_moe_experts": None}  # fmt: skip
    plain = ModelArchitecture.from_nemo_config(config)
    del (unnamed := dict(config))["normalization"]
    assert ModelArchitecture.from_nemo_config(unnamed).normalization == "layernorm"  # as NeMo builds it
    assert ModelArchitecture.from_nemo_config(config | usual) == plain
    assert ModelArchitecture.from_nemo_config(config | {"normalization": "RMSNorm"}) == plain  # as megatron writes it
    scaled = ModelArchitecture.from_nemo_config(config | {"scale_positional_embedding": True, "qkv_bias": True})
    assert scaled == dataclasses.replace(plain, qkv_bias=True, rope_scaling=RopeScaling("llama3", 8.0, 8192))
    bridge = config | {"rope_scaling": True, "rope_scaling_factor": 32.0}  # NeMo 2's and Megatron-Bridge's flag
    assert ModelArchitecture.from_nemo_config(bridge).rope_scaling == RopeScaling("llama3", 32.0, 8192)
    assert ModelArchitecture.from_nemo_config(bridge | {"rope_scaling": False}) == plain
    assert ModelArchitecture.from_nemo_config(config | {"add_qkv_bias": True}).qkv_bias
    assert ModelArchitecture.from_nemo_config(lay_over(config | {"qkv_bias": False}, {"add_qkv_bias": True})).qkv_bias
    named = {"old_context_len": 4096, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "scale_factor": 32.0}
    scalings = {
        RopeScaling("llama3", 32.0, 4096, 2.0, 8.0): {"scale_positional_embedding": True, **named},
        RopeScaling("linear", 4.0): {"seq_len_interpolation_factor": 4},
        RopeScaling("yarn", 4.0, 32768, attention_factor=1.5, truncate=False): {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                             "attention_factor": 1.5, "truncate": False}
        },
        RopeScaling.by_frequency([1.0] * (plain.rotary_size // 2), 64): {},
    }  # fmt: skip
    for scaling, keys in scalings.items():
        scaled = dataclasses.replace(plain, rope_scaling=scaling)
        assert ModelArchitecture.from_nemo_config(scaled.to_nemo_config()) == scaled
        assert not keys or ModelArchitecture.from_nemo_config(config | keys) == scaled


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("rotary_base: null", "model.rotary_base=None: must be a number"),
        ("rotary_percentage: null", "model.rotary_percentage=None: must be a number"),
        ("init_method_std: null", "model.init_method_std=None: must be a number"),
        ("layernorm_epsilon: small", "model.layernorm_epsilon='small': must be a number"),
        ("ffn_hidden_size: [64, 64]", r"model.ffn_hidden_size=\[64, 64\]: must be a number"),
        ("num_layers: 2.5", "model.num_layers=2.5: must be a whole number"),
        ("hidden_size: true", "model.hidden_size=True: must be a number"),
        ("bias: sometimes", "model.bias='sometimes': must be true or false"),
        ("activation: [swiglu]", r"model.activation=\['swiglu'\] is not one of"),
        ("scale_positional_embedding: {a: 1}", "model.scale_positional_embedding={'a': 1}: must be true or false"),
        ("seq_len_interpolation_factor: [2]", r"model.seq_len_interpolation_factor=\[2\]: must be a number"),
    ],
)
def test_values_of_an_archives_config_have_types(model: Path, setting: str, complaint: str) -> None:
    config = yaml.safe_load((model / "model_config.yaml").read_text()) | yaml.safe_load(setting)
    with pytest.raises(ValueError, match=complaint):
        ModelArchitecture.from_nemo_config(config)


def test_gelu_is_by_tanh_where_nemo_computes_it_so(model: Path) -> None:
    """Its kernel fused with biases, its default, is megatron-core's `bias_gelu`; so is the gated one."""
    config = yaml.safe_load((model / "model_config.yaml").read_text()) | {"activation": "gelu"}
    config.pop("hf_model_type", None)
    for setting, activation in (
        ({"bias": True}, "gelu-tanh"),
        ({"bias": True, "bias_activation_fusion": False}, "gelu"),
        ({"bias": False}, "gelu"),  # megatron-core does not fuse it
        ({"bias": False, "activation": "geglu"}, "gelu-tanh"),
        ({"bias": False, "activation": "geglu", "bias_activation_fusion": False}, "gelu"),
        ({"bias_activation_fusion": False, "openai_gelu": True}, "gelu-tanh"),
        ({"bias": True, "activation": "squared-relu"}, "squared-relu"),
    ):
        read = ModelArchitecture.from_nemo_config(config | setting)
        assert read.activation == activation
        assert ModelArchitecture.from_nemo_config(read.to_nemo_config()) == read
    x = torch.linspace(-6, 6, 101)
    by_megatron = bias_gelu(torch.zeros(1), x)
    assert (torch.nn.functional.gelu(x, approximate="tanh") - by_megatron).abs().max() < 1e-6


def test_training_cuts_q_k_and_v_as_one_matrix() -> None:
    """With more ranks than key heads; an engine gives each rank a copy of its key head instead."""
    odd = ModelArchitecture(
        num_layers=1, hidden_size=48, ffn_hidden_size=48, num_attention_heads=3, num_query_groups=1, vocab_size=9
    )
    (problem,) = odd.layout_problems(3)
    assert "model.tensor_model_parallel_size=3: with more ranks than num_query_groups=1" in problem and "=80" in problem
    assert not odd.layout_problems(3, engine_key="tensor_parallel_size")
    assert not dataclasses.replace(odd, kv_channels=24).layout_problems(3)


def test_zero_centered_norms_are_those_with_1p(model: Path) -> None:
    config = yaml.safe_load((model / "model_config.yaml").read_text()) | {"layernorm_zero_centered_gamma": True}
    for name in ("LayerNorm", "layernorm1p"):
        assert ModelArchitecture.from_nemo_config(config | {"normalization": name}).normalization == "layernorm1p"
    assert ModelArchitecture.from_nemo_config(config | {"normalization": "rmsnorm"}).normalization == "rmsnorm1p"
    plain = config | {"layernorm_zero_centered_gamma": False, "normalization": "layernorm"}
    assert ModelArchitecture.from_nemo_config(plain).normalization == "layernorm"


def test_llama31_as_nemo_2s_converter_wrote_it_can_be_gone_on_with(model: Path, tmp_path: Path) -> None:
    """It interpolates positions beside scaling frequencies, of which training may have done only the latter."""
    config = (model / "model_config.yaml").read_text()
    both = "seq_len_interpolation_factor: 8.0\nscale_positional_embedding: true\n"
    (tmp_path / "model_config.yaml").write_text(config + both)
    (problem,) = problems(tmp_path, "gpt_sft", "")
    assert "seq_len_interpolation_factor=8.0: a rotary embedding is scaled in one way only" in problem
    assert "set model.seq_len_interpolation_factor=1 in a job" in problem
    assert not problems(tmp_path, "gpt_sft", "model.seq_len_interpolation_factor=1")


@pytest.mark.parametrize("missing, hint", [("vocab_size", "into tokenizer/"), ("num_layers", "not a complete")])
def test_archives_without_a_size_are_refused(model: Path, missing: str, hint: str) -> None:
    config = yaml.safe_load((model / "model_config.yaml").read_text())
    del config[missing]
    with pytest.raises(ValueError, match=f"lacks {missing}.*{hint}"):
        ModelArchitecture.from_nemo_config(config)


def test_a_monitor_as_nemo_aligners_guides_have_it(model: Path) -> None:
    line = "exp_manager.checkpoint_callback_params.monitor="
    assert not problems(model, "gpt_sft", f"{line}validation_loss")
    assert not problems(model, "gpt_sft", f"{line}null")  # its name is in the checkpoints' names by default
    (problem,) = problems(model, "gpt_sft", f"{line}loss")
    assert "measures no such thing" in problem
    settings = CheckpointSettings.from_config(ExpManager(checkpoint_callback_params={"monitor": "validation_loss"}))
    assert settings.monitor == "val_loss"
    assert (
        checkpoint_name("{step}-{validation_loss:.2f}", {"step": 7, "val_loss": 0.5}) == "step=7-validation_loss=0.50"
    )


def test_whole_numbers_may_be_typed_as_floats() -> None:
    key = "exp_manager.checkpoint_callback_params"
    cfg = composed("gpt_ppo_critic", f"{key}.save_top_k=2.0", f"{key}.save_last_n=1e1")
    check_config(cfg, "gpt_ppo_critic")
    settings = CheckpointSettings.from_config(Critic.read(cfg).exp_manager)
    assert [(type(value), value) for value in (settings.save_top_k, settings.save_last_n)] == [(int, 2), (int, 10)]


def test_templates_are_unescaped_as_typed_on_a_command_line() -> None:
    assert unescaped(r"Q: {input}\n\nA:\t\\n é") == "Q: {input}\n\nA:\t\\n é"
    typed = r"\x00System\n\x11User\n{input}\n\u0011Assistant\21\n{output}"
    assert unescaped(typed) == "\x00System\n\x11User\n{input}\n\x11Assistant\x11\n{output}"


def test_key_norms_other_than_rmsnorm_are_refused(model: Path) -> None:
    (line,) = problems(model, "gpt_sft", "model.qk_layernorm=True model.normalization=layernorm1p")
    assert "only RMSNorm can normalise" in line


# job, ranks, what is typed, what the message must say (a part of one line each)
LORA, SMALL = "model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"
WRONG: dict[str, tuple[str, int, str, tuple[str, ...]]] = {
    "rollouts": (
        "gpt_ppo_actor", 1, "model.ppo.num_rollout_samples=100",
        ("model.ppo.num_rollout_samples=100 is not a multiple of model.global_batch_size=64",),
    ),
    "no batch size": (
        "training_rm", 1, "model.micro_batch_size=null model.global_batch_size=null",
        ("model.micro_batch_size is not set", "model.global_batch_size is not set"),
    ),
    "ranks": (
        "gpt_ppo_critic", 3, "model.tensor_model_parallel_size=2",
        ("3 ranks (trainer.devices x trainer.num_nodes) are not a multiple of 2",),
    ),
    "heads": (
        "inference_rm", 8, "model.tensor_model_parallel_size=8",
        ("model.tensor_model_parallel_size=8: the model's num_attention_heads=4 is not a multiple of it",),
    ),
    "groups and ffn": (
        "training_rm", 3, "model.tensor_model_parallel_size=3",
        ("num_query_groups=2 neither divides", "ffn_hidden_size=64 is not a multiple", "num_attention_heads=4"),
    ),
    "layers": (
        "gpt_sft", 4, "model.pipeline_model_parallel_size=4",
        ("model.pipeline_model_parallel_size=4: the model's num_layers=6 is not a multiple of it",),
    ),
    "engine ranks": (
        "gpt_ppo_actor", 2, "trainer.ppo.generation.tensor_parallel_size=8",
        (
            "trainer.ppo.generation.tensor_parallel_size=8: 2 ranks cannot be divided",
            "trainer.ppo.generation.tensor_parallel_size=8: the model's num_attention_heads=4",
        ),
    ),
    "positions": (
        "training_rm", 1, "model.encoder_seq_length=128 model.max_position_embeddings=64",
        ("model.encoder_seq_length=128 is longer than model.max_position_embeddings=64",),
    ),
    "data length": (
        "training_rm", 1, "model.encoder_seq_length=128 model.data.seq_length=256",
        ("model.data.seq_length=256 is longer than model.encoder_seq_length=128",),
    ),
    "no room for prompts": (
        "gpt_ppo_actor", 1, "model.ppo.length_params.max_length=4096",
        ("model.ppo.length_params.max_length=4096 leaves no room for a prompt",),
    ),
    "no room beside BOS": (
        "gpt_ppo_actor", 1, "model.ppo.length_params.max_length=4095 model.ppo.sampling_params.add_BOS=True",
        ("max_length=4095 leaves no room for a BOS token and a prompt",),
    ),
    "BOS alone": (
        "gpt_ppo_actor", 1, "trainer.ppo.trt_llm.max_input_len=1 model.ppo.sampling_params.add_BOS=True",
        ("trainer.ppo.trt_llm.max_input_len=1: must be 2 or more, for a BOS token and",),
    ),
    "prompt and response": (
        "gpt_ppo_actor", 1, "trainer.ppo.trt_llm.max_input_len=4000",
        ("max_input_len=4000 + model.ppo.length_params.max_length=2048 is longer than model.encoder_seq_length=4096",),
    ),
    "KV memory": (
        "gpt_ppo_actor", 1, "trainer.ppo.generation.kv_cache_tokens=2000",
        ("kv_cache_tokens=2000 cannot hold one sequence",),
    ),
    "engine that is not installed": (
        "gpt_ppo_actor", 1, "trainer.ppo.generation.engine=trtllm",
        ("trainer.ppo.generation.engine=trtllm: TensorRT-LLM is not installed in this environment",),
    ),
    "precision": ("gpt_sft", 1, "trainer.precision=16", ("trainer.precision=16: choose bf16 or 32",)),
    "schedule": (
        "gpt_sft", 1, "model.optim.sched.name=Cosine", ("model.optim.sched.name='Cosine': choose CosineAnnealing",),
    ),
    "constant": (  # and no complaint of min_lr, which it does not read
        "gpt_sft", 1, "model.optim.sched.name=constant model.optim.lr=1e-8 model.optim.betas=[0.9]",
        ("model.optim.betas=[0.9]: give two numbers",),
    ),
    "epsilon": (
        "gpt_sft", 1, "model.optim.eps=1e-39", ("model.optim.eps=1e-39: must be 1.1754943508222875e-38 or more",),
    ),
    "learning rates": ("gpt_sft", 1, "model.optim.lr=1e-8", ("model.optim.sched.min_lr=9e-07 is above",)),
    "critic": (
        "gpt_ppo_actor", 1, "remote_critic_rm.trained_critic=keeep model.max_tokens_per_micro_batch=0",
        (
            "remote_critic_rm.trained_critic=keeep: choose refuse or keep", "model.max_tokens_per_micro_batch=0: must",
            "model.ppo.forward_max_tokens_per_micro_batch=0: must be 1",
        ),
    ),
    "optimizer": ("gpt_sft", 1, "model.optim.name=lion", ("model.optim.name=lion: choose distributed_fused_adam",)),
    "betas": ("gpt_sft", 1, "model.optim.betas=[0.9,1.0]", ("model.optim.betas=[0.9, 1.0]: must be in [0, 1)",)),
    "number of betas": ("gpt_sft", 1, "model.optim.betas=[0.9]", ("model.optim.betas=[0.9]: give two numbers",)),
    "sampling": (
        "gpt_ppo_actor", 1, "model.ppo.sampling_params.top_p=0 model.ppo.sampling_params.temperature=-1",
        ("model.ppo.sampling_params.top_p=0: must be in (0, 1]", "sampling_params.temperature=-1: must be above 0"),
    ),
    "least and greatest length": (
        "gpt_ppo_actor", 1, "model.ppo.length_params.min_length=3000", ("min_new_tokens must lie in [0, max",),
    ),
    "PPO's numbers": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.kl_estimator=k4 trainer.ppo.gae_lambda=1.5 model.ppo.ratio_eps=0 trainer.ppo.num_ppo_epochs=0 "
        "trainer.ppo.discount_factor=-1 trainer.ppo.on_nonfinite=ignore trainer.ppo.max_epochs=0",
        (
            "trainer.ppo.kl_estimator=k4: choose abs, k1, k2 or k3",
            "trainer.ppo.gae_lambda=1.5: must be in [0, 1]",
            "model.ppo.ratio_eps=0: must be above 0",
            "trainer.ppo.num_ppo_epochs=0: must be 1 or more",
            "trainer.ppo.discount_factor=-1: must be in [0, 1]",
            "trainer.ppo.on_nonfinite=ignore: choose stop or skip",
            "trainer.ppo.max_epochs=0: must be 1 or more",
        ),
    ),
    "best of n": (
        "gpt_rs_actor", 1, "trainer.ppo.normalize_advantages=True trainer.ppo.top_n_rollouts=4",
        (
            "trainer.ppo.top_n_rollouts=4: all responses would be imitated, bad ones too; lower the last",
            "trainer.ppo.normalize_advantages=True: its advantages are all 1, and whitened 0",
        ),
    ),
    "best step that is not validated": (
        "training_rm", 1,
        f"'model.data.data_prefix={{train: {DATA}, validation: {DATA}}}' trainer.rm.save_interval=5 "
        "trainer.rm.val_check_interval=2 exp_manager.checkpoint_callback_params.save_best_model=True",
        (
            "exp_manager.checkpoint_callback_params.save_best_model=True: trainer.rm.save_interval=5, "
            "val_check_interval=2: of steps 5, 10, ..., which are saved, those that are not validated have no val_loss",
        ),
    ),
    "best step of none": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.save_interval=0 exp_manager.checkpoint_callback_params.save_best_model=True",
        ("save_best_model=True: with trainer.ppo.save_interval=0 only the last step is saved",),
    ),
    "best step without validation": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.val_check_interval=0 trainer.ppo.save_interval=2 "
        "exp_manager.checkpoint_callback_params.save_best_model=True",
        ("save_best_model=True: nothing is validated, so no checkpoint has a val_rewards",),
    ),
    "best step by nothing": (
        "gpt_ppo_actor", 1,
        "exp_manager.checkpoint_callback_params.monitor=null "
        "exp_manager.checkpoint_callback_params.save_best_model=True",
        ("save_best_model=True: with checkpoint_callback_params.monitor=null nothing ranks",),
    ),
    "seed": ("gpt_sft", 1, "model.seed=-1", ("model.seed=-1: must be in [0, 2147483647]",)),
    "intervals": (
        "training_rm", 1, "trainer.rm.save_interval=-1 trainer.rm.val_check_interval=1.5",
        (
            "trainer.rm.save_interval=-1: must be a share from 0 to 1.0, or a whole number",
            "trainer.rm.val_check_interval=1.5: must be a share from 0 to 1.0, or a whole number",
        ),
    ),
    "ports": (
        "gpt_ppo_actor", 1, "remote_critic_rm.critic.port=0 trainer.ppo.batch_iterator.port=70000",
        ("critic.port=0: must be in [1, 65535]", "batch_iterator.port=70000: must be in [0, 65535]"),
    ),
    "one address": (
        "gpt_ppo_actor", 1,
        "remote_critic_rm.combine_rm_and_critic_server=False remote_critic_rm.reward_model.port=5556",
        ("the critic and the reward model cannot share an address",),
    ),
    "monitor": (
        "gpt_ppo_critic", 1, "exp_manager.checkpoint_callback_params.monitor=val_rewards",
        ("monitor=val_rewards: this job measures no such thing; choose one of step",),
    ),
    "truncation": (
        "gpt_sft", 1, "model.data.train_ds.truncation_method=random",
        ("model.data.train_ds.truncation_method=random: choose left or right",),
    ),
    "mode": ("gpt_sft", 1, "exp_manager.checkpoint_callback_params.mode=best", ("mode=best: choose min or max",)),
    "name of a checkpoint": (
        "gpt_sft", 1, "'exp_manager.checkpoint_callback_params.filename=\"{step:q}\"'", ("filename: {step:q}",),
    ),
    "kind of measurement": (
        "training_rm", 1, "'exp_manager.checkpoint_callback_params.filename=\"{val_loss:d}\"'",
        ("exp_manager.checkpoint_callback_params.filename: {val_loss:d} of 0.5",),
    ),
    "measurement of PPO": (
        "gpt_ppo_actor", 1, "'exp_manager.checkpoint_callback_params.filename=\"{val_rewards:q}-{step:04d}\"'",
        ("exp_manager.checkpoint_callback_params.filename: {val_rewards:q} of 0.5",),
    ),
    "name of what is not measured": (
        "gpt_ppo_critic", 1, "'exp_manager.checkpoint_callback_params.filename=\"{step}-{epoch}-{setp}\"'",
        ("filename={step}-{epoch}-{setp}: this job measures no epoch, setp; fields in braces can be step",),
    ),
    "name that is none": (
        "gpt_ppo_critic", 1, "exp_manager.checkpoint_callback_params.filename='\"..\"'",
        ("filename='..': a checkpoint needs a name",),
    ),
    "no name": (
        "gpt_sft", 1, "exp_manager.checkpoint_callback_params.filename='\"\"'", ("filename='': a checkpoint needs",),
    ),
    "name of something unfinished": (
        "gpt_sft", 1, "'exp_manager.checkpoint_callback_params.filename=\"{step}.unfinished\"'",
        ("it must not end with .unfinished, .damaged, -last",),
    ),
    "long name": (
        "gpt_sft", 1, f"exp_manager.checkpoint_callback_params.filename={'x' * 201}", ("names of more than 200 bytes",),
    ),
    "critic's address": (
        "gpt_ppo_actor", 1, "remote_critic_rm.critic.ip=http://node7",
        ("critic.ip=http://node7: give only a host name or address, such as node7; the port goes into remote_critic",),
    ),
    "address with a port": (
        "gpt_ppo_actor", 1, "remote_critic_rm.critic.ip=node7:5556", ("critic.ip=node7:5556: give only a host name",),
    ),
    "address with an empty part": (
        "gpt_ppo_actor", 1, "remote_critic_rm.critic.ip=.svc.cluster.local", ("critic.ip=.svc.cluster.local: give",),
    ),
    "address that is a pattern": (
        "gpt_ppo_actor", 1, "remote_critic_rm.critic.ip='\"*.x\"'", ("critic.ip=*.x: give only a host name",),
    ),
    "reward model's address": (
        "gpt_ppo_actor", 1,
        "remote_critic_rm.combine_rm_and_critic_server=False remote_critic_rm.reward_model.ip='\"a b\"' "
        "remote_critic_rm.critic.ip='\"\"'",
        ("reward_model.ip=a b: give", "remote_critic_rm.critic.ip=: give"),
    ),
    "no secret": ("gpt_ppo_actor", 1, "remote_critic_rm.token='\"\"'", ("remote_critic_rm.token does not hold a",)),
    "no secret of a service": ("inference_rm", 1, "inference.token='a b'", ("inference.token does not hold a secret",)),
    "no steps": (
        "training_rm", 1, "trainer.rm.max_steps=0", ("trainer.rm.max_steps=0: must be -1, or 1 or more",),
    ),
    "no steps of a critic": (
        "gpt_ppo_critic", 1, "trainer.ppo.max_steps=0", ("trainer.ppo.max_steps=0: must be -1, or 1 or more",),
    ),
    "KL": (
        "gpt_ppo_actor", 1, "trainer.ppo.use_absolute_kl=False trainer.ppo.kl_estimator=abs",
        ("trainer.ppo.use_absolute_kl=False, trainer.ppo.kl_estimator=abs contradict each other",),
    ),
    "kept beside swapped weights": (
        "gpt_ppo_actor", 1, "model.ppo.keep_activations=always trainer.ppo.reference_policy_placement=swap",
        ("model.ppo.keep_activations=always: other weights take the place",
         "model.ppo.keep_activations=always: with model.ppo.num_rollout_samples=512, model.global_batch_size=64 a step "
         "makes several updates"),
    ),
    "kept, with nothing to keep": (
        "gpt_ppo_actor", 1, "model.ppo.keep_activations=always trainer.ppo.policy_logprobs=engine "
        "model.ppo.num_rollout_samples=64",
        ("model.ppo.keep_activations=always: with trainer.ppo.policy_logprobs=engine there is no log-prob pass",),
    ),
    "kept by stages": (
        "gpt_ppo_critic", 2, "model.keep_activations=always model.pipeline_model_parallel_size=2",
        ("model.keep_activations=always: with pipeline stages",),
    ),
    "kept with dropout": (
        "gpt_ppo_critic", 1, "model.keep_activations=always model.hidden_dropout=0.1",
        ("model.keep_activations=always: with dropout",),
    ),
    "no preferred batch": (
        "gpt_ppo_critic", 1, "trainer.ppo.inference_micro_batch_size=[]",
        ("trainer.ppo.inference_micro_batch_size=[]: must be a list of whole numbers",),
    ),
    "preferred batches that are no numbers": (
        "inference_rm", 1, "inference.inference_micro_batch_size=[4,many]",
        ("inference.inference_micro_batch_size=[4, 'many']: must be a list of whole numbers",),
    ),
    "no data": (
        "gpt_ppo_actor", 1, "model.data.data_prefix=null", ("model.data.data_prefix should be {train: [FILE, ...",),
    ),
    "template without the response": (
        "gpt_sft", 1, f"model.data.train_ds.prompt_template=5 model.data.validation_ds.file_path={shlex.quote(DATA)}",
        ("model.data.train_ds: prompt_template '5' should end with {output}",
         "model.data.validation_ds: prompt_template '5' should end with {output}"),
    ),
    "template that is none": (
        "gpt_sft", 1, "'model.data.train_ds.prompt_template=\"{input} } {output}\"'",
        ("model.data.train_ds: prompt_template '{input} } {output}' cannot be read (Single '}' encountered in",),
    ),
    "data file alone": (
        "training_rm", 1, f"model.data.data_prefix={shlex.quote(DATA)}",
        ("model.data.data_prefix should be {tra",),
    ),
    "split of another name": (
        "training_rm", 1, f"'model.data.data_prefix={{train: {DATA}, val: {DATA}}}'", ("has the unknown split 'val'",),
    ),
    "nothing to train on": (
        "training_rm", 1, f"'model.data.data_prefix={{validation: [{DATA}]}}'",
        ("model.data.data_prefix names no training data",),
    ),
    "empty split": (
        "gpt_ppo_actor", 1, "'model.data.data_prefix={train: []}'", ("model.data.data_prefix.train names no file",),
    ),
    "data that are not there": (
        "gpt_ppo_actor", 1, "'model.data.data_prefix={train: [/none.jsonl]}'",
        ("model.data.data_prefix.train names /none.jsonl: no such data file",),
    ),
    "no SFT data": (
        "gpt_sft", 1, "model.data.train_ds.file_path=null model.data.validation_ds.file_path=/",
        ("model.data.train_ds.file_path is not set: give a file", "validation_ds.file_path names /: this is a folder"),
    ),
    "log directory that is a file": (
        "gpt_ppo_critic", 1, f"'exp_manager.explicit_log_dir={DATA}/log'",
        (f"exp_manager.explicit_log_dir={DATA}/log: the log directory {DATA}/log cannot be written to ({DATA} is no",),
    ),
    "log directory below a file": (
        "inference_rm", 1, f"exp_manager.explicit_log_dir=null exp_manager.exp_dir={shlex.quote(DATA)}",
        (f"exp_manager.exp_dir={DATA}: the log directory {DATA}/inference_rm cannot be written to",),
    ),
    "checkpoint that is not there": (
        "gpt_sft", 1, "exp_manager.resume_from_checkpoint=/typo",
        ("exp_manager.resume_from_checkpoint=/typo is not a checkpoint: there is no such folder",),
    ),
    "folder that is no checkpoint": (
        "gpt_ppo_critic", 1, f"'exp_manager.resume_from_checkpoint={Path(DATA).parent}'", ("it has no manifest.json",),
    ),
    "archive that is none": (
        "gpt_sft", 1, f"'model.restore_from_path={DATA}'", (f"model.restore_from_path={DATA}: {DATA} is not a read",),
    ),
    "archive without a config": (
        "training_rm", 1, f"'pretrained_checkpoint.restore_from_path={Path(DATA).parent}/data'",
        ("pretrained_checkpoint.restore_from_path=",),
    ),
    "times of which waits are not capable": (
        "gpt_ppo_actor", 1, "remote_critic_rm.timeouts.read_seconds=1e7 trainer.distributed_timeout_minutes=1e20",
        ("timeouts.read_seconds=10000000.0: must be in (0, 2000000]",
         "trainer.distributed_timeout_minutes=1e+20: must be in (0, 33333]"),
    ),
    "archive without a name": ("gpt_sft", 1, "exp_manager.name='\"\"'", ("exp_manager.name='': the archive",)),
    "archive with a long name": (
        "gpt_ppo_actor", 1, f"exp_manager.name={'x' * 201}", ("needs a name, of at most 200 bytes",),
    ),
    "model of no path": ("inference_rm", 1, "inference.model_name=a/b", ("inference.model_name='a/b': the service's",)),
    "model without a name": ("inference_rm", 1, "inference.model_name='\"\"'", ("inference.model_name='': the",)),
    "run time": ("gpt_sft", 1, "exp_manager.max_time_per_run=4h", ("max_time_per_run=4h is not of the form",)),
    "kind of reward model": (
        "gpt_ppo_critic", 1, "model.reward_model_type=pairwise",
        ("model.reward_model_type='pairwise': choose binary_ranking or regression",),
    ),
    "kind of reward model that is empty": (
        "gpt_ppo_critic", 1, "model.reward_model_type='\"\"'", ("model.reward_model_type='': choose binary_ranking",),
    ),
    "dtype of the head": (
        "gpt_ppo_critic", 1, "model.force_head_dtype=0", ("model.force_head_dtype='0': choose float32 or bfloat16",),
    ),
    "choices and ranges that are looked at nowhere else": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.generation.engine=vllm exp_manager.watchdog_minutes=0 "
        "model.activations_checkpoint_granularity=partial",
        (
            "trainer.ppo.generation.engine=vllm: choose embedded or trtllm",
            "exp_manager.watchdog_minutes=0: must be in (0, 33333]",
            "model.activations_checkpoint_granularity=partial: choose selective or full",
        ),
    ),
    "head": (
        "training_rm", 1, "model.reward_model_type=regression model.regression.attribute_weights=[1,2]",
        ("attribute_weights has 2 entries for num_attributes=1",),
    ),
    "numbers that are none": (
        "gpt_ppo_critic", 1,
        "model.reward_standardization.mean=.nan model.regression.attribute_weights=[.inf] "
        "model.reward_standardization.std=.nan",
        (
            "model.reward_standardization.mean=nan: must be a finite number",
            "model.regression.attribute_weights=[inf]: must be a finite number",
            "model.reward_standardization.std=nan: must be above 0",
        ),
    ),
    "attributes of a ranking model": (
        "gpt_ppo_critic", 1, "model.reward_model_type=binary_ranking model.regression.num_attributes=3",
        (
            "model.regression.num_attributes=3, model.reward_model_type=binary_ranking: only a regression model has "
            "several attributes; set model.reward_model_type=regression",
        ),
    ),
    "less precise head": (
        "training_rm", 1, "trainer.precision=32 model.optim.name=fused_adam",
        ("model.force_head_dtype=bfloat16, trainer.precision=32, model.optim.name=fused_adam: this optimizer cannot",),
    ),
    "threads": (
        "gpt_ppo_critic", 1, "trainer.ppo.max_outstanding_requests=1e5",
        ("trainer.ppo.max_outstanding_requests=100000: must be in [1, 10000]",),
    ),
    "length of the schedule": (
        "gpt_ppo_critic", 1, "trainer.ppo.max_steps=-1", ("trainer.ppo.max_steps=-1: the learning rate's schedule",),
    ),
    "recompute": (
        "gpt_sft", 2,
        "model.activations_checkpoint_granularity=full model.activations_checkpoint_num_layers=4 "
        "model.pipeline_model_parallel_size=2",
        ("model.activations_checkpoint_num_layers=4: a pipeline stage has only 3 layers",),
    ),
    "blocks that do not divide the layers": (
        "gpt_sft", 1, "model.activations_checkpoint_granularity=full model.activations_checkpoint_num_layers=4",
        ("model.activations_checkpoint_num_layers=4: the 6 layers of a pipeline stage cannot be divided into blocks",),
    ),
    "end strings that are none": (
        "gpt_ppo_actor", 1, "model.ppo.sampling_params.end_strings=[no]",
        ("end_strings has False in it, which is no text: put it in quotes",),
    ),
    "list of lists of end strings": (
        "gpt_ppo_actor", 1, "model.ppo.sampling_params.end_strings=[[stop]]", ("has ['stop'] in it, which is",),
    ),
    "service": (
        "gpt_ppo_critic", 1,
        "trainer.ppo.inference_micro_batch_size=[4,0] trainer.ppo.strip_sequence_length_to_multiple=0 "
        "trainer.ppo.max_queue_delay_microseconds=-1 model.rm_placement=disk trainer.ppo.connections.idle_seconds=0 "
        "trainer.ppo.connections.max_connections=0 exp_manager.log_format=xml "
        "exp_manager.log_level=verbose",
        (
            "trainer.ppo.connections.idle_seconds=0: must be in (0, 2000000]",
            "trainer.ppo.connections.max_connections=0: must be 1 or more",
            "exp_manager.log_format=xml: choose text or json",
            "exp_manager.log_level=verbose: choose debug, info or warning",
            "inference_micro_batch_size=[4, 0]: must be 1 or more",
            "strip_sequence_length_to_multiple=0: must be 1 or more",
            "max_queue_delay_microseconds=-1: must be in [0, 2000000000000]",
            "model.rm_placement=disk: choose auto, swap or resident",
        ),
    ),
    "no model": (
        "gpt_ppo_critic", 1, "pretrained_checkpoint.restore_from_path=null", ("restore_from_path is not set",),
    ),
    "model that is not there": ("inference_rm", 1, "rm_model_file=/none.nemo", ("rm_model_file=/none.nemo does not",)),
    "log-probs that nothing can be compared with": (
        "gpt_ppo_actor", 1, "trainer.ppo.policy_logprobs=engine trainer.ppo.importance_weight_cap=2",
        ("trainer.ppo.policy_logprobs=engine, trainer.ppo.importance_weight_cap=2: without the trainer's log-probs",),
    ),
    "log-probs of earlier weights": (
        "gpt_ppo_actor", 2, "trainer.ppo.policy_logprobs=engine trainer.ppo.staleness=1 trainer.ppo.rollout_devices=1",
        ("trainer.ppo.importance_weight_cap=2.0: without the trainer's log-probs there are no importance ratios",),
    ),
    "what sampled counted twice": (
        "gpt_ppo_actor", 2, "trainer.ppo.trust_region=sampling trainer.ppo.importance_weight_cap=2",
        ("trainer.ppo.trust_region=sampling, trainer.ppo.importance_weight_cap=2: its ratios are those to the engine",),
    ),
    "nobody to generate beside training": (
        "gpt_ppo_actor", 2, "trainer.ppo.staleness=1",
        ("trainer.ppo.staleness=1 with trainer.ppo.rollout_devices=0: no rank is free to generate while a step",),
    ),
    "younger than rollouts can be": (
        "gpt_ppo_actor", 3, "trainer.ppo.staleness=-1 trainer.ppo.rollout_devices=1",
        ("trainer.ppo.staleness=-1: must be 0 or more",),
    ),
    "episodes that go on with other weights": (
        "gpt_ppo_actor", 3,
        "trainer.ppo.staleness=2 trainer.ppo.rollout_devices=1 trainer.ppo.in_flight=keep trainer.ppo.estimator=grpo "
        "trainer.ppo.num_rollouts_per_prompt=2 trainer.ppo.environment.command=[ls] "
        "'trainer.ppo.rewards=[{source: environment}]'",
        ("trainer.ppo.in_flight=keep, trainer.ppo.environment={'command': ['ls']}: an episode ends with the weights",),
    ),
    "nobody to train": (
        "gpt_ppo_actor", 2, "trainer.ppo.rollout_devices=2",
        ("trainer.ppo.rollout_devices=2: none of the 2 ranks is left to train",),
    ),
    "ranks that train": (
        "gpt_ppo_actor", 4, "trainer.ppo.rollout_devices=1 model.tensor_model_parallel_size=2",
        ("3 ranks (trainer.devices x trainer.num_nodes, less trainer.ppo.rollout_devices=1) are not a multiple of 2",),
    ),
    "ranks that generate": (
        "gpt_ppo_actor", 4,
        "trainer.ppo.rollout_devices=2 trainer.ppo.trt_llm.enable=True "
        "trainer.ppo.trt_llm.unload_engine_train=True trainer.ppo.importance_sequence_bounds=[2,0.5] "
        "trainer.ppo.importance_token_bounds=[1]",
        (
            "ranks that only generate use the embedded engine",
            "trainer.ppo.trt_llm.unload_engine_train=True, trainer.ppo.rollout_devices=2: training shares no memory",
            "trainer.ppo.importance_sequence_bounds=[2, 0.5]: give two numbers",
            "trainer.ppo.importance_token_bounds=[1]: give two numbers",
        ),
    ),
    "engines of ranks that generate": (
        "gpt_ppo_actor", 6, "trainer.ppo.rollout_devices=2 trainer.ppo.generation.tensor_parallel_size=4",
        ("trainer.ppo.generation.tensor_parallel_size=4: 2 ranks cannot be divided into groups of 4",),
    ),
    "groups": (
        "gpt_ppo_actor", 2,
        "trainer.ppo.estimator=grpo trainer.ppo.critic_warmup_steps=2 trainer.ppo.dynamic_sampling.enable=True "
        "remote_critic_rm.critic.ip=of/no/interest",
        (
            "trainer.ppo.estimator=grpo, trainer.ppo.num_rollouts_per_prompt=1: it compares the responses to a prompt",
            "trainer.ppo.critic_warmup_steps=2, trainer.ppo.estimator=grpo: there is no critic to warm up",
            "trainer.ppo.dynamic_sampling.enable=True, trainer.ppo.num_rollouts_per_prompt=1: it compares the rewards",
        ),
    ),
    "responses of a step": (
        "gpt_reinforce_actor", 1, "model.ppo.num_rollout_samples=9 model.ppo.keep_activations=always",
        (
            "model.ppo.num_rollout_samples=9, trainer.ppo.num_rollouts_per_prompt=4: their product, 36, is not a "
            "multiple of model.global_batch_size=64",
            "model.ppo.keep_activations=always: with model.ppo.num_rollout_samples=9",
        ),
    ),
    "no critic": (
        "gpt_reinforce_actor", 1, "trainer.ppo.estimator=gae remote_critic_rm.reward_model.ip=http://a",
        (
            "trainer.ppo.estimator=gae needs a critic, which only train_gpt_ppo_actor.py has; choose one of grpo,",
            "remote_critic_rm.reward_model.ip=http://a: give only a host name",
        ),
    ),
    "losses": (
        "gpt_reinforce_actor", 1,
        "trainer.ppo.dual_clip=3 model.ppo.ratio_eps_high=0.3 trainer.ppo.loss_constant_length=100 "
        "trainer.ppo.kl_in=loss trainer.ppo.initial_policy_kl_penalty=0 trainer.ppo.overlong.buffer_tokens=4000",
        (
            "trainer.ppo.dual_clip=3, trainer.ppo.policy_loss=reinforce: only ppo has this bound",
            "model.ppo.ratio_eps_high=0.3, trainer.ppo.policy_loss=reinforce: only ppo and gspo clip ratios so",
            "trainer.ppo.loss_constant_length=100, trainer.ppo.loss_aggregation=token_mean: only sequence_sum divides",
            "trainer.ppo.kl_in=loss, trainer.ppo.initial_policy_kl_penalty=0: there is no penalty to put there",
            "trainer.ppo.overlong.buffer_tokens=4000 is longer than the longest response, model.ppo.length_params.max_",
        ),
    ),
    "ranges of the algorithm": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.dual_clip=1.0 trainer.ppo.kl_in=both trainer.ppo.loss_aggregation=mean model.ppo.ratio_eps_high=0 "
        "trainer.ppo.reward_functions.threads=0 trainer.ppo.overlong.penalty=-1",
        (
            "trainer.ppo.dual_clip=1.0: must be above 1",
            "trainer.ppo.kl_in=both: choose reward or loss",
            "trainer.ppo.loss_aggregation=mean: choose token_mean, sequence_mean or sequence_sum",
            "model.ppo.ratio_eps_high=0: must be above 0",
            "trainer.ppo.reward_functions.threads=0: must be in [1, 10000]",
            "trainer.ppo.overlong.penalty=-1: must be 0 or more",
        ),
    ),
    "no group at all": (
        "gpt_reinforce_actor", 1, "trainer.ppo.num_rollouts_per_prompt=0",
        ("trainer.ppo.num_rollouts_per_prompt=0: must be 1 or more",),
    ),
    "functions of one's own": (
        "gpt_ppo_actor", 1,
        "trainer.ppo.estimator=/none.py:mine trainer.ppo.policy_loss=mine "
        "'trainer.ppo.rewards=[{name: a, source: /none.py:f}]'",
        (
            "trainer.ppo.estimator=/none.py:mine: /none.py: no such file",
            "trainer.ppo.policy_loss=mine: choose ppo, gspo, cispo, reinforce, or give a file",
            "trainer.ppo.rewards[0].source=/none.py:f: /none.py: no such file",
        ),
    ),
    "sources of rewards": (
        "gpt_reinforce_actor", 1,
        "'trainer.ppo.rewards=[{name: a, source: http://h}, {name: a, source: service, weigth: 2, weight: .nan}, math, "
        "{name: b/c, source: exact_match, only: math}]'",
        (
            "trainer.ppo.rewards[0].source=http://h: choose exact_match, math_verify, service, environment, http:",
            "trainer.ppo.rewards[1] has no weigth: its keys are",
            "trainer.ppo.rewards[1].weight=nan: must be a finite number",
            "trainer.ppo.rewards[2]=math: give {name: NAME, source: SOURCE}",
            "trainer.ppo.rewards[3].name=b/c: give a plain word",
            "trainer.ppo.rewards[3].only=math: give fields",
        ),
    ),
    "no source of rewards": ("gpt_ppo_actor", 1, "trainer.ppo.rewards=[]", ("trainer.ppo.rewards=[]: nothing would",)),
    "a reward model that is not there": (
        "gpt_ppo_actor", 1, "'trainer.ppo.rewards=[{name: rm, source: /none/rm.nemo}]'",
        ("trainer.ppo.rewards[0].source=/none/rm.nemo does not exist",),
    ),
    "no heads": ("gpt_sft", 1, "model.num_attention_heads=0", ("num_attention_heads must be at least 1, got 0",)),
    "heads of no size": ("gpt_sft", 1, "model.kv_channels=-1", ("kv_channels must be at least 1, got -1",)),
    "rotation": ("gpt_sft", 1, "model.rotary_base=.nan", ("rotary_base must be a number above 0, got nan",)),
    "rotated share": (
        "gpt_sft", 1, "model.rotary_percentage=.inf", ("rotary_percentage must be a number above 0, got inf",),
    ),
    "adapters of unknown layers": (
        "gpt_sft", 1, f"{LORA} 'model.peft.lora_tuning.target_modules=[attention_qkv, q_proj]'",
        ("target_modules=['attention_qkv', 'q_proj']: choose among attention_qkv, attention_dense",),
    ),
    "adapters of no layer": ("gpt_sft", 1, f"{LORA} model.peft.lora_tuning.target_modules=[]", ("choose among",)),
    "large adapters": (
        "training_rm", 1, f"{LORA} model.peft.lora_tuning.adapter_dim=33",
        ("adapter_dim=33: a matrix of the model has only 16 rows or columns",),
    ),
    "adapters of layers that are not there": (
        "gpt_ppo_critic", 1, f"{LORA} 'model.peft.lora_tuning.layer_selection=[3, 7]' {SMALL}",
        ("layer_selection=[3, 7]: the model has layers 1 to 6",),
    ),
    "stages without adapters": (
        "gpt_ppo_actor", 3,
        f"{LORA} 'model.peft.lora_tuning.layer_selection=[1, 3, 4]' model.pipeline_model_parallel_size=3 {SMALL}",
        ("every pipeline stage needs a layer with an adapter",),
    ),
    "adapters that never learn": (
        "gpt_sft", 1, f"{LORA} {SMALL} model.peft.lora_tuning.column_init_method=zero", ("this never learns",),
    ),
    "tied adapters": (
        "gpt_sft", 1, f"{LORA} {SMALL} model.peft.lora_tuning.weight_tying=True", ("weight_tying=True: not supported",),
    ),
    "adapters to begin with": (
        "gpt_sft", 1, "model.peft.restore_from_path=/none", ("restore_from_path=/none: needs model.peft",),
    ),
    "adapters that are not there": (
        "gpt_sft", 1, f"{LORA} {SMALL} model.peft.restore_from_path=/none", ("there is no adapter at /none",),
    ),
    "kept passes with dropout of adapters": (
        "gpt_ppo_critic", 1, f"{LORA} {SMALL} model.peft.lora_tuning.adapter_dropout=0.1 model.keep_activations=always",
        ("model.keep_activations=always: with dropout",),
    ),
    "p-tuning": (
        "gpt_sft", 1, "model.peft.peft_scheme=ptuning", ("model.peft.peft_scheme=ptuning: choose none or lora",),
    ),
    "IA3": ("gpt_sft", 1, "model.peft.ia3_tuning.layer_selection=[1]", ("of NeMo's schemes there is lora",)),
    "unknown architecture": ("training_rm", 1, "model.activation=relu", ("model.activation='relu' is not one of",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_work_are_found(model: Path, name: str) -> None:
    job, ranks, line, expected = WRONG[name]
    found = problems(model, job, line, ranks)
    assert len(found) == len(expected), found  # these and nothing else
    assert not any("\n" in problem for problem in found)
    for text in expected:
        assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("job", "ranks", "line"),
    [
        ("gpt_ppo_actor", 3, "model.micro_batch_size=4 model.global_batch_size=64"),
        ("gpt_ppo_critic", 2, "model.global_batch_size=3"),
        ("gpt_sft", 3, "model.data.train_ds.global_batch_size=10 model.data.train_ds.micro_batch_size=4"),
    ],
)
def test_ranks_and_micro_batches_need_not_divide_a_global_batch(model: Path, job: str, ranks: int, line: str) -> None:
    assert problems(model, job, line, ranks) == []


OWN = """
from nemo_style_aligner.trainer.rl.estimators import estimator

@estimator(needs_groups=False)
def mine(step):
    return step.spread(step.rewards), None

def compared(step):
    return step.spread(step.rewards - step.group_mean(step.rewards)), None

def loss(given, settings):
    return -given.advantages * given.logprobs, {}

def reward(prompt, response, line):
    return 1.0
"""


def test_algorithms_and_rewards_that_are_possible(model: Path, tmp_path: Path) -> None:
    """Those of the package, and a user's; without a critic, what is said of one does not count."""
    (own := tmp_path / "own.py").write_text(OWN)
    rewards = f"'trainer.ppo.rewards=[{{name: a, source: {own}:reward, weight: 2, only: {{topic: [x, y]}}}}, "
    rewards += f"{{name: b, source: exact_match}}, {{name: rm, source: {model}}}, {{name: c, source: http://h:1/m}}]'"
    lines = (
        "trainer.ppo.dual_clip=3 model.ppo.ratio_eps_high=0.28 trainer.ppo.kl_in=loss",
        "trainer.ppo.estimator=grpo trainer.ppo.num_rollouts_per_prompt=8 trainer.ppo.dynamic_sampling.enable=True",
        "trainer.ppo.num_rollouts_per_prompt=3 model.ppo.num_rollout_samples=64",
        "trainer.ppo.loss_aggregation=sequence_sum trainer.ppo.loss_constant_length=100",
        f"trainer.ppo.estimator={own}:mine trainer.ppo.policy_loss={own}:loss trainer.ppo.dual_clip=2 {rewards}",
        "trainer.ppo.estimator=reinforce_plus_plus remote_critic_rm.critic.port=5555",
        f"{rewards} remote_critic_rm.combine_rm_and_critic_server=False remote_critic_rm.reward_model.port=5556",
    )
    assert {line: found for line in lines if (found := problems(model, "gpt_ppo_actor", line))} == {}
    (found,) = problems(model, "gpt_ppo_actor", f"trainer.ppo.estimator={own}:compared")
    assert found.endswith("num_rollouts_per_prompt=1: it compares the responses to a prompt; give 2 or more")


def test_a_reward_model_in_the_job_has_the_layout_of_the_policy(model: Path, tmp_path: Path) -> None:
    """Its own shape must allow it; its archive's settings are read."""
    config = yaml.safe_load((model / "model_config.yaml").read_text())
    (other := tmp_path / "other.nemo").mkdir()
    listed, key = f"'trainer.ppo.rewards=[{{source: {other}}}]'", f"trainer.ppo.rewards[0].source={other}: "
    for changed, told in (
        ({"num_layers": 5}, "model.pipeline_model_parallel_size=2: the model's num_layers=5 is not a multiple of it"),
        ({"reward_model_type": "ranking"}, "model.reward_model_type='ranking': choose binary_ranking or regression"),
        ({"num_layers": None}, "num_layers"),
        ({"reward_model_type": "regression", "regression": {"num_attributes": 3}}, None),
    ):
        (other / "model_config.yaml").write_text(yaml.safe_dump(config | changed))
        found = problems(model, "gpt_ppo_actor", f"{listed} model.pipeline_model_parallel_size=2", 2)
        assert [problem.startswith(key) for problem in found] == [True] * (told is not None), found
        assert told is None or told in found[0], found


def test_settings_that_do_nothing_are_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(line: str) -> list[str]:
        caplog.clear()
        given = [f"pretrained_checkpoint.restore_from_path={model}", f"exp_manager.explicit_log_dir={model.parent}"]
        check_job("gpt_ppo_actor", read("gpt_ppo_actor", *given, PREFIX, *line.split()), 1)
        return [record.getMessage() for record in caplog.records]

    assert told("trainer.ppo.gae_lambda=0.9") == []
    assert told("trainer.ppo.estimator=reinforce_plus_plus trainer.ppo.policy_loss=gspo model.ppo.ratio_eps=1e-3") == []
    assert told(
        "trainer.ppo.estimator=reinforce_plus_plus remote_critic_rm.critic.ip=h remote_critic_rm.critic.port=7 "
        "trainer.ppo.gae_lambda=0.9 trainer.ppo.policy_loss=reinforce model.ppo.ratio_eps=0.1 "
        "model.ppo.cispo_ratio_max=9 trainer.ppo.overlong.penalty=2 trainer.ppo.dynamic_sampling.max_rounds=9 "
        "trainer.ppo.reward_functions.seconds=1"
    ) == [
        f"{keys}: no effect with {reason}"
        for keys, reason in (
            (
                "remote_critic_rm.critic.ip=h, remote_critic_rm.critic.port=7",
                "trainer.ppo.estimator=reinforce_plus_plus",
            ),
            ("trainer.ppo.gae_lambda=0.9", "trainer.ppo.estimator=reinforce_plus_plus"),
            ("model.ppo.ratio_eps=0.1", "trainer.ppo.policy_loss=reinforce"),
            ("model.ppo.cispo_ratio_max=9", "trainer.ppo.policy_loss=reinforce"),
            ("trainer.ppo.dynamic_sampling.max_rounds=9", "trainer.ppo.dynamic_sampling.enable=False"),
            ("trainer.ppo.overlong.penalty=2", "trainer.ppo.overlong.buffer_tokens=0"),
            ("trainer.ppo.reward_functions.seconds=1", "trainer.ppo.rewards=None"),
        )
    ]


@pytest.mark.parametrize(
    ("job", "given", "told"),
    [
        ("gpt_ppo_actor", "trainer.ppo.initial_policy_kl_penalty=0 trainer.ppo.kl_clamp=3", "kl_clamp=3"),
        ("gpt_ppo_actor", "trainer.ppo.kl_estimator=k3 trainer.ppo.use_absolute_kl=False", "use_absolute_kl=False"),
        ("gpt_ppo_actor", "model.ppo.sampling_params.use_greedy=True model.ppo.sampling_params.top_p=0.9", "top_p=0.9"),
        ("gpt_ppo_actor", "trainer.ppo.max_consecutive_skips=3", "max_consecutive_skips=3"),
        ("gpt_ppo_actor", "trainer.ppo.serve_policy.port=77", "serve_policy.port=77"),
        ("gpt_ppo_actor", "remote_critic_rm.reward_model.port=77", "reward_model.port=77"),
        ("gpt_ppo_actor", "trainer.ppo.trt_llm.kv_cache_memory_fraction=0.5", "kv_cache_memory_fraction=0.5"),
        ("gpt_reinforce_actor", "trainer.ppo.discount_factor=0.9", "discount_factor=0.9"),
        ("gpt_reinforce_actor", "trainer.ppo.advantage_whitening_unbiased=True", "advantage_whitening_unbiased=True"),
        ("gpt_dpo", "model.dpo.gt_reward_scale=2 model.data.default_chosen_reward=3", "default_chosen_reward=3"),
        ("gpt_dpo", "model.dpo.sft_average_log_probs=True", "sft_average_log_probs=True"),
        ("gpt_dpo", "model.dpo.preference_average_log_probs=True", None),  # what follows from it is not given
        ("gpt_kto", "model.optim.sched.name=constant model.optim.sched.min_lr=1e-9", "min_lr=1e-09"),
        ("gpt_kto", "model.peft.lora_tuning.adapter_dim=8", "adapter_dim=8"),
        ("gpt_kto", "model.peft.peft_scheme=lora model.peft.lora_tuning.adapter_dim=8", None),
        ("gpt_sft", "model.activations_checkpoint_num_layers=1", "activations_checkpoint_num_layers=1"),
        ("gpt_sft", "exp_manager.mlflow_logger_kwargs.run_name=a", "run_name=a"),
        ("training_rm", "model.regression.loss_mask_val=-1", "loss_mask_val=-1"),
    ],
)
def test_a_setting_that_another_one_switches_off_is_told(job: str, given: str, told: str | None) -> None:
    cfg = load_defaults(job)
    for key, _, value in (argument.partition("=") for argument in given.split()):
        OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, merge=False)
    lines = list(settings_in_vain(JobView(job, JOBS[job].sections.read(cfg), 1, None)))
    assert len(lines) == (told is not None) and all(f"{told}: no effect with " in line for line in lines), lines


def test_k1_is_no_penalty_in_the_loss(model: Path) -> None:
    for estimator in ("trainer.ppo.kl_estimator=k1", "trainer.ppo.use_absolute_kl=False"):
        (found,) = problems(model, "gpt_ppo_actor", f"trainer.ppo.kl_in=loss {estimator}")
        assert "the gradient of k1 is 0 on average" in found and "set trainer.ppo.kl_estimator=k3" in found
        assert problems(model, "gpt_ppo_actor", estimator) == []


def test_names_of_checkpoints_and_hosts_that_are_possible(model: Path) -> None:
    filename = "exp_manager.checkpoint_callback_params.filename"
    for name in ("{step:05d}-{epoch}-{val_loss:.3f}", "a/{train_loss:8.2e}", "run.1", "{consumed_samples:,}"):
        assert problems(model, "training_rm", f"'{filename}=\"{name}\"'") == []
    for host in ("localhost", "node-7.cluster", "node_7.", "10.0.0.7", "::1", "[fe80::1]", "7"):
        assert problems(model, "gpt_ppo_actor", f"remote_critic_rm.critic.ip='\"{host}\"'") == []


def test_a_log_directory_that_is_somebody_elses(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def may_only_read(path: Path, mode: int) -> bool:
        if mode & os.W_OK:
            asked.append(str(path))
        return not mode & os.W_OK

    monkeypatch.setattr("os.access", may_only_read)
    (line,) = problems(model, "gpt_sft", f"'exp_manager.explicit_log_dir={tmp_path}/a/b'")
    assert f"(this user may not write in {tmp_path}): give a folder that you may write to" in line
    assert asked == [str(tmp_path)]


def test_what_is_in_the_place_of_checkpoints(model: Path, tmp_path: Path) -> None:
    """Of a disk that is not mounted, say: the job would begin anew, and learn of it at its first save."""
    checkpoints = tmp_path / "checkpoints"
    line = f"'exp_manager.explicit_log_dir={tmp_path}'"
    checkpoints.symlink_to(tmp_path / "disk")
    for job in JOBS:
        found = [problem for problem in problems(model, job, line) if "checkpoints cannot be written to" in problem]
        assert len(found) == (job not in ("inference_rm", "compute_topk_logits")), (job, found)
    assert f"({checkpoints} is not a folder): make it" in problems(model, "gpt_sft", line)[0]
    (tmp_path / "disk").mkdir()
    assert problems(model, "gpt_sft", line) == []


def test_what_is_in_the_place_of_the_watchdogs_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "watchdog").touch()
    (line,) = problems(model, "gpt_sft", f"'exp_manager.explicit_log_dir={tmp_path}'")
    assert line.startswith(f"the watchdog cannot write to {tmp_path / 'watchdog'} (")


def test_a_log_directory_whose_name_is_not_utf8(tmp_path: Path) -> None:
    exp_manager = ExpManager(explicit_log_dir=f"{tmp_path}/\udcff")  # as Python has the byte 0xff
    (line,) = log_directory_problems(exp_manager)
    assert f"TensorBoard cannot write to {tmp_path}/\udcff, whose name is not UTF-8" in line


def test_a_log_directory_that_cannot_be_made_after_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"the log directory {folder} cannot be written to .*explicit_log_dir"):
            hold_log_directory(folder, "job")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_log_directory_without_room_is_no_mistake_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=OSError(number, "no room", "lock")))
        with pytest.raises(NotWrittenError, match=r"cannot be written to \(lock: no room\): make room and start"):
            hold_log_directory(tmp_path, "job")


def test_a_reward_service_without_a_watchdog_needs_no_log_directory(model: Path) -> None:
    line = f"'exp_manager.explicit_log_dir={DATA}'"
    assert len(problems(model, "inference_rm", line)) == 1
    assert problems(model, "inference_rm", f"{line} exp_manager.watchdog_minutes=null") == []


def test_a_checkpoint_to_go_back_to(model: Path, tmp_path: Path) -> None:
    """One that is gone since is none to complain of where the run has gone on from it: that is resumed instead."""
    named = tmp_path / "elsewhere" / "step=3-last"
    line = f"'exp_manager.explicit_log_dir={tmp_path}' 'exp_manager.resume_from_checkpoint={named}'"
    assert "there is no such folder" in problems(model, "gpt_sft", line)[0]
    own = tmp_path / "checkpoints" / "step=7"
    own.mkdir(parents=True)
    Manifest(1, 7, None, {}, None).write(own)
    assert len(problems(model, "gpt_sft", line)) == 1
    Manifest(1, 7, None, {}, str(named)).write(own)
    assert problems(model, "gpt_sft", line) == []
    beside = own.with_name("step=3")  # which manifests name without its folder
    Manifest(1, 7, None, {}, beside.name).write(own)
    assert len(problems(model, "gpt_sft", line)) == 1
    assert problems(model, "gpt_sft", line.replace(str(named), str(beside))) == []
    (own / "manifest.json").write_text("{}")
    assert len(problems(model, "gpt_sft", line)) == 1 and own.exists()
    named.mkdir(parents=True)
    Manifest(1, 3, None, {}).write(named)
    assert problems(model, "gpt_sft", line) == []
    named.rename(named.with_name("step=3"))  # as a newer one's save does
    assert problems(model, "gpt_sft", line) == []


def test_a_checkpoint_that_must_be_there(model: Path, tmp_path: Path) -> None:
    line = f"'exp_manager.explicit_log_dir={tmp_path}' exp_manager.resume_ignore_no_checkpoint=False"
    (problem,) = problems(model, "gpt_sft", line)
    assert problem.startswith(f"{tmp_path / 'checkpoints'} has no checkpoint to resume from")
    assert problems(model, "gpt_sft", f"{line} exp_manager.resume_if_exists=False") == []
    (tmp_path / "checkpoints" / "step=7.damaged").mkdir(parents=True)  # of which resuming has more to say
    assert problems(model, "gpt_sft", line) == []


def test_a_checkpoint_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = {"explicit_log_dir": str(tmp_path), "resume_from_checkpoint": str(tmp_path / "closed" / "step=3-last")}
    with monkeypatch.context() as patch:  # root may look everywhere
        patch.setattr(os, "stat", Mock(side_effect=PermissionError))
        (problem,) = resume_problems(ExpManager(**cfg))
    assert problem == f"exp_manager.resume_from_checkpoint={cfg['resume_from_checkpoint']}: this user may not read it"


def test_a_secret_that_others_may_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    (line,) = problems(model, "gpt_ppo_actor", "")
    assert line.startswith("remote_critic_rm.token=auto: the secret file") and "cannot be read" in line
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o644)
    assert "is open to others (mode 0644)" in problems(model, "gpt_ppo_critic", "")[0]
    assert problems(model, "gpt_ppo_critic", "trainer.ppo.token=none") == []
    (tmp_path / "token").chmod(0o600)
    assert problems(model, "gpt_ppo_actor", "") == []


def test_the_users_own_secret_is_not_made_by_the_checks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert problems(model, "gpt_ppo_actor", "") == []
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_only_generate_need_no_data(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_defaults("gpt_ppo_actor")
    cfg.pretrained_checkpoint.restore_from_path = str(model)
    cfg.exp_manager.explicit_log_dir = str(model.parent)
    cfg.exp_manager.resume_from_checkpoint = "/on_another_machine"
    cfg.trainer.ppo.rollout_devices = 1
    assert [len(find_problems("gpt_ppo_actor", PPOActor.read(cfg), 3, rank)) for rank in range(3)] == [2, 2, 0]


def test_a_batch_size_that_loses_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = (f"model.restore_from_path={model}", *SFT_FILES, f"exp_manager.explicit_log_dir={model.parent / 'sft'}")
    check_job("gpt_sft", read("gpt_sft", *given, "model.data.train_ds.global_batch_size=64"), 1)
    assert not caplog.messages
    check_job("gpt_sft", read("gpt_sft", *given, "model.global_batch_size=64"), 1)
    (message,) = caplog.messages
    assert message == "model.data.train_ds.global_batch_size=128 has no effect: model.global_batch_size=64 wins"


def test_intervals_that_let_the_best_be_known(model: Path) -> None:
    """One is a multiple of the other, or a metric is the steps' own, or it depends on the length of the run."""
    params = "exp_manager.checkpoint_callback_params"
    for flags in (
        "trainer.rm.save_interval=4 trainer.rm.val_check_interval=2",
        "trainer.rm.save_interval=2 trainer.rm.val_check_interval=4",
        "trainer.rm.save_interval=0.1 trainer.rm.val_check_interval=2",
        f"trainer.rm.save_interval=5 trainer.rm.val_check_interval=2 {params}.monitor=train_loss",
    ):
        both = f"'model.data.data_prefix={{train: {DATA}, validation: {DATA}}}' {params}.save_best_model=True"
        assert problems(model, "training_rm", f"{both} {flags}") == [], flags


def test_resharding_without_stages_changes_nothing_and_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the tutorial, whose list of flags for TensorRT-LLM goes with one stage."""
    given = (f"pretrained_checkpoint.restore_from_path={model}", PREFIX, f"exp_manager.explicit_log_dir={model.parent}")
    flags = ("trainer.ppo.trt_llm.reshard=True", "model.tensor_model_parallel_size=2")
    check_job("gpt_ppo_actor", read("gpt_ppo_actor", *given, *flags), 2)
    (message,) = caplog.messages
    assert message.startswith("trainer.ppo.trt_llm.reshard=True has no effect without pipeline stages")
    assert engine_size(None, True, 2, 1) == 1 and engine_size(None, True, 2, 2) == engine_size(2, False, 1, 1) == 2


def test_a_watchdog_that_comes_too_late_is_warned_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = composed("gpt_ppo_critic", f"pretrained_checkpoint.restore_from_path={model}")
    cfg.exp_manager.explicit_log_dir = str(model.parent)
    check_job("gpt_ppo_critic", Critic.read(cfg), 1)
    assert not caplog.messages
    cfg.trainer.distributed_timeout_minutes = 20
    check_job("gpt_ppo_critic", Critic.read(cfg), 1)
    (message,) = caplog.messages
    assert message.startswith("exp_manager.watchdog_minutes=25 is not below trainer.distributed_timeout_minutes=20")


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_found(package: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    key = f"exp_manager.create_{package}_logger"
    (problem,) = problems(model, "training_rm", f"{key}=True")
    assert problem.startswith(f"{key}=True: {package} is not installed; pip install 'nemo_style_aligner[{package}]'")


def test_a_profile_that_cannot_be_is_refused(model: Path) -> None:
    def found(**values: object) -> list[str]:
        return problems(
            model, "training_rm", " ".join(f"trainer.profile.{key}={value}" for key, value in values.items())
        )

    assert found(start_step=2, end_step=3) == []
    assert "needs a trainer.profile.start_step" in found(end_step=3)[0]
    assert "not behind it, not 4" in found(start_step=4, end_step=3)[0]
    assert "the ranks that train are 0 to 0" in found(start_step=4, ranks="[0,1]")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_guides_say_is_possible(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked for by some, an extra.
    wandb = types.SimpleNamespace(init=lambda project=None, name=None, dir=None: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    job, line, _ = COMMANDS[name]
    cfg = composed(job, *shlex.split(line), f"{PATH_KEYS.get(job, 'pretrained_checkpoint.restore_from_path')}={model}")
    check_config(cfg, job)
    for argument in GIVEN.get(job, ()):  # the guides' places are not on this machine
        key, _, value = argument.partition("=")
        OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, merge=False)
    cfg.exp_manager.explicit_log_dir = str(model.parent)
    assert find_problems(job, JOBS[job].sections.read(cfg), cfg.trainer.devices * 2) == []


@pytest.mark.parametrize("job", JOBS)
def test_what_help_says_must_be_given_is_what_jobs_ask_for(job: str, tmp_path: Path) -> None:
    cfg = load_defaults(job)
    cfg.exp_manager.explicit_log_dir = str(tmp_path)
    try:
        check_config(cfg, job)
        said = "\n".join(find_problems(job, JOBS[job].sections.read(cfg), 1))
    except ConfigError as error:
        said = str(error).removeprefix("these keys need a value: ").replace(", ", " is not set\n") + " is not set"
    asked_for = [line.split()[0] for line in said.splitlines() if " is not set" in line or " should be " in line]
    assert sorted(asked_for) == sorted(required_keys(job)), said


def test_a_job_says_all_at_once_and_speaks_of_its_own_keys(model: Path, tmp_path: Path) -> None:
    """In one message, with status 2, from an archive that has no weights to read; and in its log, text or JSON."""
    command = script(
        "train_gpt_reinforce_actor.py",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"exp_manager.explicit_log_dir={tmp_path / 'log'}",
        PREFIX,
    )
    wrong = ("trainer.reinforce.estimator=gae", "model.reinforce.length_params.max_length=9000")
    wrong += ("exp_manager.resume_from_checkpoint=/typo", "model.tensor_model_parallel_size=8")
    job = Job([*command, *wrong], tmp_path / "wrong.log")
    assert job.wait(90) == 2, job.describe()
    lines = [line.strip() for line in job.output().splitlines()]
    start = lines.index("error: these settings cannot work:")
    keys = {line.split("=")[0].split(" ")[0] for line in lines[start + 1 :]}
    assert {word.split("=")[0] for word in wrong} <= keys
    assert not (tmp_path / "log").exists()
    # Far enough to log what keys of NeMo-Aligner's mean: the archive has no weights to read.
    noted = ("trainer.reinforce.flask_server.enable=True", "exp_manager.log_format=json")
    job = Job([*command, *noted], tmp_path / "noted.log")
    assert job.wait(90) not in (0, None), job.describe()
    assert "flask_server.enable=True is taken as trainer.reinforce.batch_iterator.use_flask=True" in job.output()
    for log in ("wrong.log", "noted.log"):
        assert not re.search(r"(trainer|model)\.ppo|remote_critic_rm", (tmp_path / log).read_text())


def test_a_step_ahead_is_corrected_for_unless_told_otherwise(model: Path) -> None:
    line = "trainer.ppo.staleness=1 trainer.ppo.rollout_devices=1"
    assert problems(model, "gpt_ppo_actor", line, ranks=3) == []
    caps = [
        composed("gpt_ppo_actor", *words).trainer.ppo.importance_weight_cap
        for words in ([], line.split(), [*line.split(), "trainer.ppo.importance_weight_cap=null"])
    ]
    assert caps == [None, 2.0, None]
    assert [composed("gpt_ppo_actor", *words).trainer.ppo.trust_region for words in ([], line.split())] == [
        "step",
        "both",
    ]


def test_the_checks_change_nothing(model: Path) -> None:
    cfg = composed("gpt_ppo_actor", f"pretrained_checkpoint.restore_from_path={model}", PREFIX)
    cfg.exp_manager.explicit_log_dir = str(model.parent / "log")
    before = OmegaConf.to_yaml(cfg)
    check_job("gpt_ppo_actor", PPOActor.read(cfg), 2)
    assert OmegaConf.to_yaml(cfg) == before
    cfg.model.ppo.num_rollout_samples = 7
    with pytest.raises(ConfigError, match=r"these settings cannot work:\n  model\.ppo\.num_rollout_samples=7 is not"):
        check_job("gpt_ppo_actor", PPOActor.read(cfg), 2)


# ---- types --------------------------------------------------------------------------------------


def test_wrong_types_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES", "2")
    wrong = {
        "trainer.num_nodes=${oc.env:NODES}": "trainer.num_nodes='2': must be a whole number, this is text; of a "
        "variable of the environment write $NAME, in a file ${oc.decode:${oc.env:NAME}}",
        "model.micro_batch_size=abc": "model.micro_batch_size='abc': must be a whole number, this is text",
        "trainer.ppo.generation.num_slots=1e30": "trainer.ppo.generation.num_slots=1e+30: too large",
        "model.optim.lr=fast": "model.optim.lr='fast': must be a number, this is text",
        "model.optim.betas=0.9": "model.optim.betas=0.9: must be a list, this is a number",
        "trainer.ppo.use_absolute_kl=1": "trainer.ppo.use_absolute_kl=1: must be True or False, this is a whole number",
        "model.num_layers=2.5": "model.num_layers=2.5: must be a whole number, this is a number",
        "model.scale_factor=far": "model.scale_factor='far': must be a number, this is text",
        "trainer.ppo.trt_llm.sidecar_python=[a]": "trt_llm.sidecar_python=['a']: must be text, this is a list",
        "model.add_qkv_bias=2": "model.add_qkv_bias=2: must be True or False",
        "trainer.ppo.kl_clamp=[1]": "trainer.ppo.kl_clamp=[1]: must be a number, this is a list",
        "exp_manager.name=[a]": "exp_manager.name=['a']: must be text, this is a list",
        "trainer.ppo.save_interval=often": "trainer.ppo.save_interval='often': must be a whole number",
        "trainer.ppo.val_check_interval=0.5": "trainer.ppo.val_check_interval=0.5: must be a whole number",
        "model.max_tokens_per_micro_batch=many": "model.max_tokens_per_micro_batch='many': must be a whole number",
        "trainer.ppo.num_ppo_epochs=null": "trainer.ppo.num_ppo_epochs=null: this key needs a value; its default is 1",
        "remote_critic_rm.timeouts.training_seconds=null": "its default is 7800",
        "model.ppo.num_rollout_samples=null": "its default is 512",
        "trainer.ppo.trt_llm.max_input_len=null": "this key needs a value",
        "trainer.ppo.batch_iterator=null": "trainer.ppo.batch_iterator=null: this key needs a value",
        "model.encoder_seq_length=null": "model.encoder_seq_length=null: this key needs a value; its default is 4096",
        "model.tensor_model_parallel_size=null": "model.tensor_model_parallel_size=null: this key needs a value",
        "model.seed=null": "model.seed=null: this key needs a value; its default is 1234",
        "trainer.devices=${oc.env:NOT_SET}": "trainer.devices: cannot be computed from the values it refers to: KeyErr",
        "trainer.max_steps=${model.none}": "trainer.max_steps: cannot be computed from the values it refers to: Interp",
        "trainer.ppo.discount_factor={}": "trainer.ppo.discount_factor={}: must be a number, this is a section",
        "trainer.ppo.importance_sequence_bounds=['${none}',2]": "importance_sequence_bounds: cannot be computed from",
    }
    cfg = composed("gpt_ppo_actor", "model.ppo.entropy_bonsu=1", *wrong)
    with pytest.raises(ConfigError) as error:
        check_config(cfg, "gpt_ppo_actor")
    message = str(error.value)
    for text in wrong.values():
        assert text in message
    assert "\n  model.ppo.entropy_bonsu; did you mean" in message  # with the keys that do not exist, in one message


@pytest.mark.parametrize(
    ("job", "override", "said"),
    [
        ("gpt_ppo_critic", "model.rm_placement=null", "this key needs a value; its default is auto"),
        ("gpt_ppo_critic", "model.keep_activations=null", "this key needs a value; its default is auto"),
        ("gpt_ppo_actor", "trainer.ppo.importance_sequence_bounds=[False,2]", "must be a list of numbers"),
    ],
)
def test_values_of_which_a_job_makes_something_else_are_refused(job: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]}=.*: {said}"):
        check_config(composed(job, override), job)


def test_values_that_only_look_like_another_type_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES", "2")
    cfg = composed(
        "gpt_ppo_actor", "model.optim.lr=1", "trainer.ppo.max_steps=1e3", "exp_manager.name=7", "trainer.precision=32",
        "trainer.ppo.save_interval=null", "trainer.ppo.gradient_clip_val=null", "model.micro_batch_size=null",
        "exp_manager.explicit_log_dir=null", "model.data.data_prefix=[a.jsonl]", "trainer.ppo.kl_clamp=2",
    )  # fmt: skip
    cfg.trainer.num_nodes = "${oc.decode:${oc.env:NODES}}"
    assert check_config(cfg, "gpt_ppo_actor") == []
    assert isinstance(cfg.trainer.ppo.max_steps, int) and cfg.trainer.ppo.max_steps == 1000
    assert cfg.exp_manager.name == "7"
    assert load_defaults("gpt_ppo_critic").model.encoder_seq_length and not check_config(
        composed("gpt_ppo_critic", "model.encoder_seq_length=null"), "gpt_ppo_critic"
    )


# ---- NeMo-Aligner's own files -------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS)
def test_every_key_of_nemo_aligners_yaml_files_is_honoured_or_reported(job: str) -> None:
    """``nemo_aligner_keys.json``: the keys of its files with the values they have there (commit af2b3bd9)."""
    theirs: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "nemo_aligner_keys.json").read_text())[job]
    cfg = OmegaConf.create({})
    for key, value in theirs.items():
        OmegaConf.update(cfg, key, value if value != "???" else "x", force_add=True)
    complete = complete_config(cfg, job)
    notes = check_config(complete, job)
    assert len(theirs) > 20 and all("=" in note for note in notes)
    OmegaConf.to_container(complete, resolve=True, throw_on_missing=True)
    refused = [
        line
        for line in find_problems(job, JOBS[job].sections.read(complete), world_size=8)
        if ": must be " in line or ": choose " in line
    ]
    assert not refused


# ---- what a command line says, word for word ----------------------------------------------------

SURFACE = Path(__file__).parent / "data" / "command_lines.json"


def said(model: Path, line: str) -> str:
    """What a job's command line leads to: its messages, places on this machine left out."""
    job, *arguments = shlex.split(line)
    found = "\n".join(problems(model, job, shlex.join(arguments), 4))
    return names_of(job).translated(found).replace(str(model.parent), "DIR").replace(str(CONFIGS.parent), "REPO")


@pytest.mark.parametrize("job", JOBS)
def test_help_and_composed_configs_are_those_that_users_know(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To change them on purpose, put into the file what this test says is printed now."""
    known = json.loads(SURFACE.read_text())["digests"][job]
    for flags in (["--help"], ["--cfg", "job"]):
        monkeypatch.setattr(sys, "argv", ["job.py", *flags, "exp_manager.name=x"])
        monkeypatch.setattr(signal, "signal", Mock())  # for pipes that end early
        assert command_line.compose(job, "A job.") is None
        text = capsys.readouterr().out.replace(str(CONFIGS.parent), "REPO")
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == known[flags[0]], f"{job} {flags[0]}"


def test_messages_on_wrong_command_lines_are_those_that_users_know(model: Path) -> None:
    known = json.loads(SURFACE.read_text())["messages"]
    assert {line: said(model, line).splitlines() for line in known} == known
