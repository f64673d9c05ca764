"""Configs: the tutorial's command lines compose and pass; mistakes are named."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.places import CONFIGS
from nemo_style_aligner.trainer.config import command_line, section_names
from nemo_style_aligner.trainer.config.fields import values
from nemo_style_aligner.trainer.config.foreign_keys import FOREIGN_KEYS
from nemo_style_aligner.trainer.config.loading import (
    ConfigError,
    check_config,
    complete_config,
    for_log,
    load_defaults,
    log_directory,
    make_paths_absolute,
)
from nemo_style_aligner.trainer.config.schema import JOBS, ExpManager, PPOActor, fields_of_job, may_change
from nemo_style_aligner.trainer.config.section_names import names_of
from nemo_style_aligner.trainer.jobs.run_settings import changed_settings, settings_of_run
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger

# The flags of NeMo-Aligner's RLHF tutorial, as typed there; of its SFT guide; and of its TensorRT-LLM section.
COMMANDS = {
    "reward model, terminal": (
        "training_rm",
        """trainer.num_nodes=1 trainer.devices=8 ++model.micro_batch_size=1 ++model.global_batch_size=512
        ++model.data.data_impl=jsonl pretrained_checkpoint.restore_from_path=/path/to/megatron_gpt_sft.nemo
        "model.data.data_prefix={train: [/a/train.jsonl], validation: [/a/test.jsonl], test: [/a/test.jsonl]}"
        exp_manager.create_wandb_logger=False exp_manager.wandb_logger_kwargs.project=rm_training
        exp_manager.wandb_logger_kwargs.name=rm_training exp_manager.explicit_log_dir=/results""",
        {"model.global_batch_size": 512, "model.data.data_prefix.train": ["/a/train.jsonl"]},
    ),
    "reward model, Slurm": (
        "training_rm",
        """trainer.num_nodes=4 trainer.devices=8 pretrained_checkpoint.restore_from_path='/path/sft.nemo'
        "++model.data.data_prefix={train: [/a/train.jsonl], validation: [/a/test.jsonl], test: [/a/test.jsonl]}"
        ++model.micro_batch_size=1 ++model.global_batch_size=512 ++model.data.data_impl=jsonl
        exp_manager.explicit_log_dir=/results exp_manager.create_wandb_logger=True
        exp_manager.wandb_logger_kwargs.name=name trainer.rm.save_interval=500 trainer.rm.val_check_interval=100
        trainer.rm.limit_val_batches=100000 exp_manager.wandb_logger_kwargs.project=project""",
        {"trainer.rm.save_interval": 500, "trainer.rm.limit_val_batches": 100000},
    ),
    "critic, terminal": (
        "gpt_ppo_critic",
        """trainer.devices=8 trainer.num_nodes=1 ++model.tensor_model_parallel_size=1
        ++model.pipeline_model_parallel_size=1 exp_manager.create_wandb_logger=False
        exp_manager.wandb_logger_kwargs.name=critic_training exp_manager.wandb_logger_kwargs.project=nemo_aligner_ppo
        exp_manager.explicit_log_dir=critic_results_dir trainer.ppo.inference_micro_batch_size=4
        ++pretrained_checkpoint.restore_from_path=/path/to/trained_rm.nemo ++model.megatron_amp_O2=True
        ++model.activations_checkpoint_granularity=null ++trainer.ppo.combine_rm_and_critic_server=True
        ++model.offload_adam_states=True ++model.mcore_gpt=True""",
        {"trainer.ppo.inference_micro_batch_size": 4, "trainer.ppo.combine_rm_and_critic_server": True},
    ),
    "critic, Slurm": (
        "gpt_ppo_critic",
        """trainer.ppo.inference_micro_batch_size=4 trainer.devices=8 trainer.num_nodes=1
        exp_manager.explicit_log_dir=/r exp_manager.create_wandb_logger=True
        exp_manager.wandb_logger_kwargs.name=n exp_manager.wandb_logger_kwargs.project=p trainer.ppo.port=5567
        ++model.offload_adam_states=True ++model.micro_batch_size=1 ++model.global_batch_size=64
        pretrained_checkpoint.restore_from_path=/path/to/trained_rm.nemo""",
        {"trainer.ppo.port": 5567},
    ),
    "actor, terminal": (
        "gpt_ppo_actor",
        """"++model.data.data_prefix={train: [/a/train.jsonl], validation: [/a/test.jsonl], test: [/a/test.jsonl]}"
        ++model.data.data_impl=jsonl pretrained_checkpoint.restore_from_path=/path/to/sft_checkpoint.nemo
        trainer.num_nodes=1 trainer.devices=8 ++model.pipeline_model_parallel_size=1
        ++model.tensor_model_parallel_size=1 ++model.ppo.combine_rm_and_critic_server=True
        ++model.ppo.offload_adam_states=True ++model.megatron_amp_O2=True ++trainer.ppo.normalize_advantages=True
        ++model.mcore_gpt=True exp_manager.create_wandb_logger=False
        exp_manager.wandb_logger_kwargs.name=ppo_actor_training
        exp_manager.wandb_logger_kwargs.project=nemo_aligner_ppo exp_manager.explicit_log_dir=/rlhf/actor_test
        ++model.ppo.entropy_bonus=0.0 remote_critic_rm.pad_to_length=2048""",
        {"remote_critic_rm.pad_to_length": 2048, "remote_critic_rm.combine_rm_and_critic_server": True},
    ),
    "actor, Slurm": (
        "gpt_ppo_actor",
        """trainer.devices=8 trainer.num_nodes=1 trainer.ppo.max_steps=15 ++model.data.data_impl=jsonl
        "++model.data.data_prefix={train: [/a/train.jsonl], validation: [/a/test.jsonl], test: [/a/test.jsonl]}"
        pretrained_checkpoint.restore_from_path=/path/sft.nemo exp_manager.explicit_log_dir=/r
        exp_manager.create_wandb_logger=True exp_manager.wandb_logger_kwargs.name=n
        exp_manager.wandb_logger_kwargs.project=p ++model.micro_batch_size=1 ++model.global_batch_size=64
        ++model.activations_checkpoint_granularity=selective ++model.activations_checkpoint_method=uniform
        ++model.optim.lr=9e-7 trainer.ppo.val_check_interval=3 ++model.optim.sched.min_lr=9e-8
        ++model.ppo.entropy_bonus=0.0 ++model.ppo.ratio_eps=0.2 ++model.ppo.num_rollout_samples=512
        ++model.ppo.rollout_micro_batch_size=8 ++model.ppo.length_params.max_length=1024
        trainer.ppo.initial_policy_kl_penalty=0.02 remote_critic_rm.critic.ip=host7
        remote_critic_rm.critic.port=5567""",
        {
            "model.ppo.length_params.max_length": 1024,
            "trainer.ppo.trt_llm.max_input_len": 3072,
            "trainer.ppo.save_interval": 3,
            "model.optim.lr": 9e-7,
            "remote_critic_rm.critic.ip": "host7",
        },
    ),
    "actor, TensorRT-LLM": (
        "gpt_ppo_actor",
        """trainer.ppo.trt_llm.enable=True trainer.ppo.trt_llm.reshard=True
        trainer.ppo.trt_llm.unload_engine_train=False trainer.trt_llm.model_type=gptnext
        trainer.ppo.batch_iterator.use_flask=True""",
        {"trainer.ppo.trt_llm.enable": True, "trainer.ppo.trt_llm.model_type": "gptnext"},
    ),
    "actor, older key": (
        "gpt_ppo_actor",
        "trainer.flask_server.enable=True",
        {"trainer.ppo.batch_iterator.use_flask": True},
    ),
    "REINFORCE, terminal": (  # as the shell leaves it; in the Slurm script the learning rate has no backslash
        "gpt_reinforce_actor",
        r"""'model.data.data_prefix={train: [/a/train.jsonl], validation: [/a/val.jsonl], test: [/a/val.jsonl]}'
        'pretrained_checkpoint.restore_from_path="/path/to/sft_checkpoint.nemo"'
        exp_manager.checkpoint_callback_params.save_top_k=1 'exp_manager.explicit_log_dir="/path/to/results"'
        trainer.reinforce.max_epochs=1 trainer.reinforce.max_steps=313 trainer.reinforce.val_check_interval=4
        trainer.num_nodes=1 trainer.devices=8 trainer.reinforce.trt_llm.enable=True
        trainer.reinforce.trt_llm.reshard=True trainer.reinforce.trt_llm.unload_engine_train=False
        ++model.tensor_model_parallel_size=4 ++model.reinforce.num_rollout_samples=32 model.global_batch_size=32
        model.micro_batch_size=1 'model.optim.lr="\${multiply:1e-6,1.001}"' model.optim.sched.warmup_steps=0
        model.optim.sched.constant_steps=312 model.optim.sched.min_lr=1e-6 model.optim.weight_decay=0.01
        model.reinforce.rollout_micro_batch_size=16 model.reinforce.forward_micro_batch_size=16
        model.reinforce.val_rollout_micro_batch_size=8 model.data.data_impl=jsonl remote_rm.reward_model.ip=localhost
        remote_rm.reward_model.port=5555 ++model.reinforce.length_params.max_length=2048
        trainer.reinforce.initial_policy_kl_penalty=0.01 ++model.optim.bucket_cap_mb=200
        ++model.dist_ckpt_format=zarr ++model.optim.overlap_grad_sync=False ++model.optim.contiguous_grad_buffer=True
        ++model.enable_nge=True trainer.reinforce.batch_iterator.use_flask=False
        trainer.reinforce.rollout_batch_seq_length=4096""",
        {
            "trainer.ppo.max_steps": 313,
            "trainer.ppo.save_interval": 4,
            "trainer.ppo.trt_llm.max_input_len": 2048,
            "trainer.ppo.num_rollouts_per_prompt": 4,
            "model.ppo.num_val_samples": 32,
            "model.optim.lr": 1e-6 * 1.001,
            "remote_critic_rm.reward_model.port": 5555,
        },
    ),
    "REINFORCE, functional test": (  # without what it removes: `test_what_removes_a_section_in_nemos_scripts`
        "gpt_reinforce_actor",
        """"++model.data.data_prefix={train: [/a/s.jsonl], validation: [/a/s.jsonl], test: [/a/s.jsonl]}"
        pretrained_checkpoint.restore_from_path=/path/to/actor.nemo exp_manager.explicit_log_dir=/tmp/actor_results
        exp_manager.create_wandb_logger=True exp_manager.wandb_logger_kwargs.name=reinforce_test_actor
        exp_manager.wandb_logger_kwargs.project=reinforce_test exp_manager.create_checkpoint_callback=True
        trainer.num_nodes=1 trainer.devices=2 trainer.reinforce.trt_llm.enable=True ++model.offload_adam_states=False
        trainer.reinforce.trt_llm.reshard=True trainer.reinforce.val_check_interval=2
        ++trainer.reinforce.save_interval=2 ++model.micro_batch_size=1 ++model.global_batch_size=2
        ++model.tensor_model_parallel_size=1 ++model.pipeline_model_parallel_size=2 ++model.reinforce.entropy_bonus=0.0
        ++model.reinforce.ratio_eps=0.2 ++model.encoder_seq_length=64
        ++exp_manager.checkpoint_callback_params.save_top_k=10 ++model.reinforce.num_rollout_samples=2
        ++model.reinforce.rollout_micro_batch_size=1 ++model.reinforce.length_params.max_length=32
        ++model.reinforce.forward_micro_batch_size=1 trainer.reinforce.initial_policy_kl_penalty=0.03
        trainer.reinforce.rollout_batch_seq_length=32 ++trainer.reinforce.flask_server.enable=True
        ++model.optim.lr=9e-7 ++model.optim.sched.min_lr=8.9999e-07 ++model.activations_checkpoint_granularity=full
        ++model.activations_checkpoint_method=uniform ++model.activations_checkpoint_num_layers=1
        ++model.optim.bucket_cap_mb=200 ++model.optim.overlap_grad_sync=False ++model.optim.contiguous_grad_buffer=True
        ++model.enable_nge=True remote_rm.reward_model.ip=localhost remote_rm.reward_model.port=5555
        +model.overwrite_base_config.optim=True model.reinforce.sampling_params.use_greedy=True
        trainer.reinforce.save_interval=0 trainer.reinforce.max_steps=3 trainer.reinforce.trt_llm.model_type=llama
        ++model.dist_ckpt_load_strictness=log_all""",
        {
            "trainer.ppo.save_interval": 0,
            "trainer.ppo.batch_iterator.use_flask": True,
            "model.ppo.offload_adam_states": False,
            "model.ppo.sampling_params.use_greedy": True,
            "trainer.ppo.trt_llm.max_input_len": 32,
        },
    ),
    "SFT": (
        "gpt_sft",
        """trainer.precision=bf16 trainer.num_nodes=1 trainer.devices=8 trainer.sft.max_steps=-1
        trainer.sft.limit_val_batches=40 trainer.sft.val_check_interval=1000 model.megatron_amp_O2=True
        model.restore_from_path=/path/to/base.nemo model.optim.lr=5e-6 model.answer_only_loss=True
        model.data.num_workers=0 model.data.train_ds.micro_batch_size=1 model.data.train_ds.global_batch_size=128
        model.data.train_ds.file_path=/a/train.jsonl model.data.validation_ds.micro_batch_size=1
        model.data.validation_ds.global_batch_size=128 model.data.validation_ds.file_path=/a/val.jsonl
        model.data.train_ds.index_mapping_dir=/a model.data.train_ds.hf_dataset=True model.data.chat=True
        exp_manager.create_wandb_logger=False exp_manager.explicit_log_dir=/results
        exp_manager.wandb_logger_kwargs.project=sft_run exp_manager.wandb_logger_kwargs.name=chat_sft_run
        exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True exp_manager.resume_if_exists=True
        exp_manager.resume_ignore_no_checkpoint=True exp_manager.create_checkpoint_callback=True
        exp_manager.checkpoint_callback_params.monitor=val_loss""",
        {"model.global_batch_size": 128, "model.optim.lr": 5e-6},
    ),
    "reward model service": (
        "inference_rm",
        "rm_model_file=/path/rm.nemo trainer.num_nodes=1 trainer.devices=8 ++model.tensor_model_parallel_size=4 "
        "++model.pipeline_model_parallel_size=1 inference.inference_micro_batch_size=2 inference.port=1424",
        {"inference.port": 1424},
    ),
}


def composed(job: str, *arguments: str) -> DictConfig:
    """The config as a job gets it."""
    return command_line.config_with(job, arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_the_guides_work_as_typed(name: str) -> None:
    job, line, expected = COMMANDS[name]
    cfg = composed(job, *shlex.split(line))
    check_config(cfg, job)
    values: dict[str, Any] = {key: OmegaConf.select(cfg, key) for key in expected}
    assert values == expected


# Keys of NeMo-Aligner's guides and functional tests (commit af2b3bd9) that its YAML files do not have, with the values
# that they have there. The keys of its YAML files: test_config_checks.py.
GIVEN_ELSEWHERE = {
    "gpt_sft": "model.dist_ckpt_load_strictness=log_all model.mcore_gpt=True",
    "training_rm": """model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform
        model.activations_checkpoint_num_layers=1 model.data.shuffle_documents=False model.data.train_ds.shuffle=False
        model.data.validation_ds.shuffle=False model.dist_ckpt_load_strictness=log_all model.sequence_parallel=False
        model.pipeline_model_parallel_size=1 model.tensor_model_parallel_size=1 model.data.data_prefix={train:[/a]}""",
    "gpt_ppo_critic": """model.activations_checkpoint_granularity=null model.forward_mbs=1 model.mcore_gpt=True
        model.pipeline_model_parallel_size=1 model.tensor_model_parallel_size=1
        trainer.ppo.pad_sequence_length_to_multiple=32 exp_manager.create_checkpoint_callback=False""",
    "gpt_ppo_actor": """model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform
        model.activations_checkpoint_num_layers=1 model.enable_nge=True model.offload_adam_states=False
        model.overwrite_base_config.optim=True model.pipeline_model_parallel_size=1 model.tensor_model_parallel_size=1
        model.ppo.combine_rm_and_critic_server=True trainer.ppo.flask_server.enable=True
        exp_manager.create_checkpoint_callback=True""",
    "gpt_reinforce_actor": """model.activations_checkpoint_granularity=full model.activations_checkpoint_num_layers=1
        model.activations_checkpoint_method=uniform model.enable_nge=True model.offload_adam_states=False
        model.overwrite_base_config.optim=True model.pipeline_model_parallel_size=2 model.tensor_model_parallel_size=1
        model.dist_ckpt_format=zarr model.dist_ckpt_load_strictness=log_all model.reinforce.entropy_bonus=0.0
        model.reinforce.ratio_eps=0.2 trainer.reinforce.flask_server.enable=True trainer.reinforce.save_interval=2
        exp_manager.create_checkpoint_callback=True""",
    "gpt_dpo": """model.mcore_gpt=true model.megatron_amp_O2=true model.dpo.average_log_probs=true
        model.data.num_workers=2 model.data.pad_length_to_multiple_of=null
        model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform
        model.activations_checkpoint_num_layers=1 model.dist_ckpt_load_strictness=log_all model.data.seq_length=128
        model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1 trainer.dpo.limit_val_batches=8
        model.data.data_prefix={train:[/a]}
        exp_manager.create_checkpoint_callback=False""",
    "gpt_kto": """model.mcore_gpt=true model.data.dataloader_type=single
        model.kto.preference_average_log_probs=false model.data.data_prefix={train:[/a]}""",
    "gpt_knowledge_distillation": """model.data.n_chunks=1 model.data.seq_length=128
        model.data.n_examples_per_chunk.train=50 model.mcore_gpt=true
        "model.data.data_prefix={train: [a_CHUNK_ID.jsonl], validation: [a_CHUNK_ID.jsonl], test: [a_CHUNK_ID.jsonl]}"
        model.megatron_amp_O2=true model.data.num_workers=2 "model.data.splits_string='98,1,1'"
        model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=2
        model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform
        model.activations_checkpoint_num_layers=1 model.dist_ckpt_load_strictness=log_all
        model.knowledge_distillation.kd_loss=bwd_kl exp_manager.create_checkpoint_callback=False""",
    "compute_topk_logits": """model.megatron_amp_O2=True data.sample=True data.num_workers=0 data.data.add_eos=False
        data.data.hf_dataset=True output_path=/a data.data.file_path=/b""",
    "gpt_rs_actor": """model.rs.num_rollouts_per_prompt=8 model.rs.top_n_rollouts=2 trainer.rs.val_check_interval=3
        remote_rm.reward_model.port=5567 exp_manager.create_checkpoint_callback=True""",
    "inference_rm": """inference.micro_batch_size=2 model.dist_ckpt_load_strictness=log_all
        model.pipeline_model_parallel_size=1 model.tensor_model_parallel_size=1""",
}


@pytest.mark.parametrize("job", JOBS)
def test_keys_of_the_guides_and_functional_tests_are_honoured_or_reported(job: str) -> None:
    needed = [f"{key}=x" for key in OmegaConf.missing_keys(load_defaults(job)) if key.startswith("model.")]
    cfg = composed(job, *needed, *shlex.split(GIVEN_ELSEWHERE[job]))
    notes = names_of(job).translated("\n".join(check_config(cfg, job)))
    for given in shlex.split(GIVEN_ELSEWHERE[job]):
        key = given.partition("=")[0]
        default = OmegaConf.select(names_of(job).written(load_defaults(job)), key, default=sys)
        assert default is not sys or f"{key}=" in notes or key == "exp_manager.create_checkpoint_callback", key


def test_a_jobs_config_is_read_into_the_types_that_the_schema_annotates() -> None:
    given = ("model.optim.lr=1", "model.optim.betas=[0,0.5]", "trainer.ppo.staleness=1", "exp_manager.name=7")
    rewards = "trainer.ppo.rewards=[{source: exact_match, weight: 2},{source: a.nemo, devices: 2}]"
    wandb = "exp_manager.wandb_logger_kwargs.tags=[a]"  # a section whose keys are the user's
    cfg = composed("gpt_ppo_actor", *given, rewards, wandb, "model.num_layers=3")
    check_config(cfg, "gpt_ppo_actor")
    config = PPOActor.read(cfg)
    optim, ppo = config.model.optim, config.trainer.ppo
    assert [repr(value) for value in (optim.lr, optim.betas, ppo.staleness)] == ["1.0", "[0.0, 0.5]", "1"]
    assert (config.exp_manager.name, ppo.importance_weight_cap, ppo.trt_llm.seed) == ("7", 2.0, config.model.seed)
    assert [repr(reward.weight) for reward in ppo.rewards or ()] == ["2.0", "1.0"]
    assert vars(config.exp_manager.wandb_logger_kwargs)["tags"] == ["a"] and config.model_given()["num_layers"] == 3
    assert config.changed({"model.seed": 9}).trainer.ppo.trt_llm.seed == 9 != config.model.seed
    with pytest.raises(AttributeError, match=r"Optimizer.lr: a config does not change"):
        optim.lr = 2.0
    with pytest.raises(TypeError, match="Optimizer has no learning_rate"):
        optim.replaced(learning_rate=2.0)


def test_packed_files_of_nemos_are_refused() -> None:
    cfg = composed("gpt_sft", "model.data.train_ds.packed_sequence=True", "model.restore_from_path=/b")
    with pytest.raises(ConfigError, match=r"train_ds.packed_sequence=True: files of packed sequences \(.npy\) cannot"):
        check_config(cfg, "gpt_sft")


def test_a_run_without_checkpoints_of_nemos_saves_at_its_end() -> None:
    cfg = composed("gpt_ppo_actor", "exp_manager.create_checkpoint_callback=False")
    (note,) = check_config(cfg, "gpt_ppo_actor")
    assert note.endswith("is taken as trainer.ppo.save_interval=0; the state at the end is saved all the same")
    assert cfg.trainer.ppo.save_interval == 0
    off, interval = "exp_manager.create_checkpoint_callback=False", "trainer.ppo.val_check_interval=3"
    follows = composed("gpt_ppo_actor", off, interval)
    assert check_config(follows, "gpt_ppo_actor") and follows.trainer.ppo.save_interval == 0
    (note,) = check_config(composed("gpt_ppo_critic", "exp_manager.create_checkpoint_callback=False"), "gpt_ppo_critic")
    assert note == (
        "exp_manager.create_checkpoint_callback=False has no effect: this job does not have trainer.ppo.save_interval"
    )


def test_what_removes_a_section_in_nemos_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in hydra, what is given before a deletion goes with it; what is not given after it has its default."""
    arguments = ["model.optim.lr=1e-3", "model.optim.sched.min_lr=0", "~model.optim", "++model.optim={name: sgd}"]
    arguments += ["exp_manager.name=mine", "exp_manager.create_wandb_logger=True", "++exp_manager=null"]
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    cfg, notes, _ = command_line.compose("gpt_ppo_actor", "") or pytest.fail("no config")
    assert (cfg.model.optim.name, cfg.model.optim.lr, cfg.model.optim.sched.min_lr) == ("sgd", 9e-7, 9e-8)
    assert cfg.exp_manager.name == "mine" and not cfg.exp_manager.create_wandb_logger
    assert [note.partition(":")[0] for note in notes] == ["~model.optim", "++exp_manager=null"]
    check_config(cfg, "gpt_ppo_actor")
    assert cfg.trainer.ppo.save_interval == 0
    file = complete_config(OmegaConf.create({"exp_manager": None}), "gpt_ppo_actor")
    check_config(file, "gpt_ppo_actor")
    assert file.exp_manager.explicit_log_dir == "/results" and file.trainer.ppo.save_interval == 0


@pytest.mark.parametrize("job", JOBS)
def test_the_defaults_pass_their_own_check(job: str) -> None:
    needed = [f"{key}=x" for key in OmegaConf.missing_keys(load_defaults(job)) if key.startswith("model.")]
    cfg = composed(job, *needed)
    assert check_config(cfg, job) == []
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """``conf/make.py``"""
    spec = importlib.util.spec_from_file_location("make", CONFIGS / "make.py")
    assert spec is not None and spec.loader is not None
    sys.modules["make"] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_keys_is_made_from_the_schema(make: ModuleType) -> None:
    """If not: ``python conf/make.py``. It has every key of every YAML file."""
    text = (CONFIGS.parent / "docs" / "config.md").read_text()
    assert text == make.reference()
    named = {
        f"{section}.{key}"
        for section, rows in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        for key in re.findall(r"^\| `(\w+)`", rows, re.M)
    }
    for job in JOBS:
        assert {key for key, _ in values(load_defaults(job)) if "." in key} <= named, job


@pytest.mark.parametrize("job", JOBS)
def test_yaml_files_are_made_from_the_schema(job: str, make: ModuleType) -> None:
    """If not: ``python conf/make.py``. Every key has a comment, on its line or above it."""
    text = (CONFIGS / f"{job}.yaml").read_text()
    assert text == make.yaml_of(job)
    above, unexplained = "", []
    for line in text.splitlines():
        has_value = re.match(r"\s*\w+:\s*[^\s#]", line)  # sections have none
        if has_value and " # " not in line and not above.lstrip().startswith("#"):
            unexplained.append(line.strip())
        above = line
    assert unexplained == []


def test_a_field_says_what_is_wrong_with_a_value() -> None:
    fields = fields_of_job("gpt_ppo_actor")
    assert fields["trainer.ppo.staleness"].problem("K", -1) == "K=-1: must be 0 or more"
    assert fields["trainer.ppo.dual_clip"].problem("K", 1.0) == "K=1.0: must be above 1"
    assert fields["trainer.ppo.dual_clip"].is_nullable and fields["trainer.ppo.dual_clip"].problem("K", 3) is None
    assert fields["model.optim.betas"].problem("K", [0.5, 1.0]) == "K=[0.5, 1.0]: must be in [0, 1)"
    assert fields["trainer.precision"].problem("K", [1]) == "K=[1]: must be text or a whole number, this is a list"
    assert fields["trainer.ppo.max_steps"].typed(1e3) == 1000


def test_a_reinforce_user_reads_the_names_of_the_jobs_own_file() -> None:
    job = "gpt_reinforce_actor"
    said = names_of(job).translated
    cfg = composed(job, "trainer.reinforce.gradient_clip=1", "remote_rm.pad_to_lenght=1", "model.reinforce=null")
    with pytest.raises(ConfigError) as error:
        check_config(cfg, job)
    assert said(str(error.value)).splitlines()[:3] == [
        "conf/gpt_reinforce_actor.yaml has no such keys:",
        "  trainer.reinforce.gradient_clip; did you mean trainer.reinforce.gradient_clip_val or "
        "trainer.reinforce.dual_clip?",
        "  remote_rm.pad_to_lenght; did you mean remote_rm.pad_to_length or remote_rm.token?",
    ]
    assert "model.reinforce=null: this key needs a value" in said(str(error.value))
    text = "/trainer.ppo/model.ppo x.trainer.ppo trainer.ppo_x: no keys; trainer.ppo.x, (model.ppo) `remote_critic_rm`"
    assert said(text) == text.partition(";")[0] + "; trainer.reinforce.x, (model.reinforce) `remote_rm`"
    assert names_of("gpt_ppo_actor").translated(text) == text


@pytest.mark.parametrize("key", ["trainer.ppo.max_steps=1", "model.ppo={ratio_eps: 0.1}", "remote_critic_rm.token=x"])
def test_the_ppo_jobs_sections_are_refused_in_the_reinforce_job(key: str) -> None:
    with pytest.raises(ConfigError, match=r"this section of conf/gpt_reinforce_actor.yaml is (trainer|model|remote)"):
        composed("gpt_reinforce_actor", key)


def test_renamed_sections_keep_their_interpolations() -> None:
    names = names_of("gpt_reinforce_actor")
    given = OmegaConf.create(
        {
            "trainer": {
                "reinforce": {"max_steps": 3, "of": "${trainer.reinforce.max_steps}", "beside": "${.max_steps}"},
                "max_steps": "${.reinforce.max_steps}",
                "x": {"z": "${..reinforce.of}"},
            },
            "model": {"reinforce": {"trt_llm": "${trainer.reinforce}", "list": ["${model.reinforce.trt_llm.of}", "a"]}},
            "remote_rm": {"reinforce": "/remote_rm/trainer.reinforce"},
        }
    )
    read = names.read(given)
    values = (read.trainer.max_steps, read.trainer.ppo.of, read.trainer.ppo.beside, read.trainer.x.z)
    assert values == (3, 3, 3, 3) and read.model.ppo.list == [3, "a"] and read.model.ppo.trt_llm.max_steps == 3
    assert read.remote_critic_rm.reinforce == "/remote_rm/trainer.reinforce"  # no section, and no interpolation
    assert "reinforce" not in read.trainer and names.written(read) == given


def test_actors_have_the_same_defaults_but_for_their_algorithm() -> None:
    ppo, other = load_defaults("gpt_ppo_actor"), load_defaults("gpt_reinforce_actor")
    keys, others = fields_of_job("gpt_ppo_actor").keys(), fields_of_job("gpt_reinforce_actor").keys()
    assert others <= keys
    of_critic = ("critic", "trainer.ppo.critic_", "trainer.ppo.gae_lambda", "remote_critic_rm.")
    assert all(key.startswith(of_critic) for key in keys - others)
    given = dict(values(other))
    differing = {key for key, value in values(ppo) if key in given and value != given[key]}
    assert differing == {
        *(f"trainer.ppo.{name}" for name in ("estimator", "num_rollouts_per_prompt", "policy_loss")),
        *(f"exp_manager.{name}" for name in ("name", "wandb_logger_kwargs.project", "wandb_logger_kwargs.name")),
        "exp_manager.checkpoint_callback_params.filename",
    }


def test_hyperparameters_are_kept_by_the_names_of_the_jobs_file(tmp_path: Path) -> None:
    cfg = composed("gpt_reinforce_actor", "trainer.reinforce.max_steps=7", "remote_rm.token=s3cret")
    section_names.speak_as("gpt_reinforce_actor")
    try:
        metrics = MetricsLogger(tmp_path, 0)
        metrics.log_hyperparameters(*for_log(cfg))
        metrics.close()
    finally:
        section_names.speak_as("gpt_ppo_actor")
    kept = OmegaConf.load(tmp_path / "hyperparameters.yaml")
    assert kept.trainer.reinforce.max_steps == 7 and kept.remote_rm.token == "(secret)"
    assert kept.trainer.reinforce.trt_llm.max_input_len == 2048
    assert not {"ppo", "remote_critic_rm"} & {*kept, *kept.trainer, *kept.model}


def test_unknown_keys_are_all_named_with_their_nearest() -> None:
    recompute = "model.activations_checkpoint_granularty=full"
    cfg = composed("gpt_ppo_actor", "model.ppo.entropy_bonsu=1", "trainer.ppo.gradient_clip=1", recompute, "zzz=1")
    with pytest.raises(ConfigError) as error:
        check_config(cfg, "gpt_ppo_actor")
    message = str(error.value)
    assert "model.ppo.entropy_bonsu; did you mean model.ppo.entropy_bonus" in message
    assert "trainer.ppo.gradient_clip; did you mean trainer.ppo.gradient_clip_val" in message
    assert "granularty; did you mean model.activations_checkpoint_granularity" in message
    assert "\n  zzz\n" in message


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("gpt_sft", "model.data.chat_prompt_tokens.turn_strat"),
        ("inference_rm", "exp_manager.wandb_logger_kwargs.project"),
        ("gpt_ppo_critic", "model.data.data_prefix.train"),
    ],
)
def test_keys_of_the_users_own_are_unknown_where_there_is_no_place_for_them(job: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"conf/{job}.yaml has no such key:\n  {key}"):
        check_config(composed(job, f"{key}=x"), job)


def test_a_key_in_the_wrong_section_is_found_by_its_name() -> None:
    cfg = composed("gpt_ppo_actor", "model.port=1", "trainer.ratio_eps=0.1")
    with pytest.raises(ConfigError, match=r"trainer.ratio_eps; did you mean model.ppo.ratio_eps"):
        check_config(cfg, "gpt_ppo_actor")


def test_keys_of_other_projects_are_known_by_what_they_mean_here() -> None:
    cfg = composed("gpt_ppo_actor", "trainer.ppo.num_generations=8", "algorithm.adv_estimator=grpo")
    with pytest.raises(ConfigError) as error:
        check_config(cfg, "gpt_ppo_actor")
    assert "num_generations; did you mean trainer.ppo.num_rollouts_per_prompt?" in str(error.value)
    assert "adv_estimator; did you mean trainer.ppo.estimator?" in str(error.value)


def test_architecture_keys_are_accepted_in_every_job() -> None:
    cfg = composed("training_rm", "model.num_layers=2", "++model.rotary_base=1e6", "model.activation=swiglu")
    assert check_config(cfg, "training_rm") == []


def test_keys_without_effect_are_reported_with_one_line_each() -> None:
    cfg = composed("gpt_ppo_critic", "model.mcore_gpt=False", "++model.optim.bucket_cap_mb=200")
    notes = check_config(cfg, "gpt_ppo_critic")
    assert len(notes) == 2
    assert notes[0].startswith("model.mcore_gpt=False: has no effect") or notes[1].startswith("model.mcore_gpt=False")


@pytest.mark.parametrize(
    "override",
    ["model.peft.peft_scheme=ptuning", "model.data.data_impl=mmap", "model.virtual_pipeline_model_parallel_size=2"],
)
def test_legacy_values_that_would_mean_something_else_are_errors(override: str) -> None:
    cfg = composed("gpt_ppo_actor", override)
    with pytest.raises(ConfigError, match=override.replace(".", r"\.")):
        check_config(cfg, "gpt_ppo_actor")


def test_a_count_of_batches_is_not_the_share_that_equals_it() -> None:
    with pytest.raises(ConfigError, match=r"limit_train_batches=1: not supported, see max_steps"):
        check_config(composed("gpt_sft", "+trainer.sft.limit_train_batches=1"), "gpt_sft")
    with pytest.raises(ConfigError) as error:  # files are not given
        check_config(composed("gpt_sft", "+trainer.sft.limit_train_batches=1.0"), "gpt_sft")
    assert "limit_train_batches" not in str(error.value)


def test_a_service_exports_no_best_model() -> None:
    key = "exp_manager.checkpoint_callback_params.save_best_model"
    assert check_config(composed("gpt_ppo_critic", f"++{key}=False"), "gpt_ppo_critic") == []
    with pytest.raises(ConfigError, match=r"save_best_model=True: a service does not know .*; leave the key out"):
        check_config(composed("gpt_ppo_critic", f"++{key}=True"), "gpt_ppo_critic")


def test_moved_keys_take_effect_and_contradictions_are_errors() -> None:
    cfg = composed("gpt_ppo_actor", "++model.ppo.combine_rm_and_critic_server=False", "trainer.max_steps=7")
    notes = check_config(cfg, "gpt_ppo_actor")
    assert cfg.remote_critic_rm.combine_rm_and_critic_server is False and cfg.trainer.ppo.max_steps == 7
    assert len(notes) == 2
    both = composed("gpt_ppo_actor", "trainer.trt_llm.model_type=gptnext", "trainer.ppo.trt_llm.model_type=gemma")
    with pytest.raises(ConfigError, match="give one of them"):
        check_config(both, "gpt_ppo_actor")
    with pytest.raises(ConfigError, match="this job does not have"):
        cfg = composed("training_rm", "trainer.trt_llm.model_type=llama")
        check_config(cfg, "training_rm")


def test_values_that_must_be_given_are_named() -> None:
    cfg = composed("gpt_sft", "model.restore_from_path=/base.nemo")
    with pytest.raises(ConfigError, match=r"model\.data\.train_ds\.file_path"):
        check_config(cfg, "gpt_sft")


def test_a_config_file_of_ones_own_may_leave_keys_out() -> None:
    cfg = complete_config(OmegaConf.create({"trainer": {"devices": 2}}), "gpt_ppo_critic")
    assert cfg.trainer.devices == 2 and cfg.trainer.ppo.port == 5556


def test_a_config_file_of_ones_own_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; paths are those of the folder in which the job is started."""
    (tmp_path / "own.yaml").write_text("trainer: {devices: 2}\nmodel: {optim: {lr: 1}}")
    monkeypatch.chdir(tmp_path)
    for flags in (["-cn", "own", "-cp", "."], ["--config-path=.", "--config-name=own"]):
        monkeypatch.setattr(sys, "argv", ["script.py", "trainer.num_nodes=3", *flags, "+model.optim.lr=2", "hydra.x=1"])
        cfg, notes, _ = command_line.compose("gpt_ppo_critic", "") or pytest.fail("no config")
        assert (cfg.trainer.devices, cfg.trainer.num_nodes, cfg.model.optim.lr) == (2, 3, 2)
        assert cfg.trainer.ppo.port == 5556 and [note.partition(" ")[0] for note in notes] == ["hydra.x=1"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("=1", "hydra cannot make a config of this command line: Config group override must be"),
        ("exp_manager=[1]", "exp_manager=[1]: Cannot merge DictConfig with ListConfig"),
        ("trainer.devices=choice(1,2)", "trainer.devices=choice(1,2) gives several values: write a list as"),
    ],
)
def test_what_hydra_refuses_is_a_mistake_with_its_cause(
    argument: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", argument])
    with pytest.raises(ConfigError, match=re.escape(said)):
        command_line.compose("gpt_sft", "")


@pytest.mark.parametrize(
    "path",
    [
        "/r/megatron_gpt-step=30-last",
        "~/model.nemo",
        "./a (1)/{b},c.nemo",
        "../x=y",
        "'/in=quotes'",
        "/plain",
        "/a b/c",
        "/home/josé/a#b&c",
        "/o'neil/ü (1)",
    ],
)
def test_paths_are_taken_as_typed(path: str) -> None:
    """Checkpoints have ``=`` in their names, which hydra's grammar knows another use for."""
    cfg = composed("gpt_ppo_critic", f"exp_manager.resume_from_checkpoint={path}")
    assert cfg.exp_manager.resume_from_checkpoint == path.strip("'")


@pytest.mark.parametrize(
    "template", ["{question} {output}", "User: {input}\\nA: {output}", "It's {a}: {output}", '"{a} {output}"', "'{a}'"]
)
def test_templates_are_taken_as_typed(template: str) -> None:
    """Braces are a mapping in hydra's grammar; who puts quotes around them means the same."""
    cfg = composed("gpt_sft", f"model.data.train_ds.prompt_template={template}")
    assert cfg.model.data.train_ds.prompt_template == template.strip("'\"")
    cfg = composed("gpt_sft", "exp_manager.checkpoint_callback_params.filename=x-{step}-{${.monitor}:.2f}")
    assert cfg.exp_manager.checkpoint_callback_params.filename == "x-{step}-{val_loss:.2f}"


def test_interpolations_in_paths_stay_so() -> None:
    cfg = composed("gpt_ppo_critic", "exp_manager.explicit_log_dir=/r/${exp_manager.name}", "exp_manager.name=x")
    assert cfg.exp_manager.explicit_log_dir == "/r/x"


def test_log_directory() -> None:
    section = ExpManager(explicit_log_dir=None, name="n")
    assert log_directory(section) == Path("nemo_experiments/n")
    assert log_directory(section.replaced(exp_dir="/e")) == Path("/e/n")
    assert log_directory(section.replaced(exp_dir="/e", explicit_log_dir="/l")) == Path("/l")
    assert log_directory(section.replaced(explicit_log_dir="~/runs")) == Path.home() / "runs"


def test_exp_dir_beside_an_explicit_log_dir() -> None:
    """The latter wins, as in NeMo: with a note where it was asked for, and an error where it is a default."""
    cfg = composed("training_rm", "exp_manager.exp_dir=/mine")
    with pytest.raises(ConfigError, match=r"exp_dir=/mine: .*explicit_log_dir=/results, the default.* set .*=null"):
        check_config(cfg, "training_rm")
    cfg.exp_manager.explicit_log_dir = "/r"
    (note,) = check_config(cfg, "training_rm")
    assert note == "exp_manager.exp_dir=/mine has no effect: exp_manager.explicit_log_dir=/r wins"
    cfg.exp_manager.explicit_log_dir = None
    assert check_config(cfg, "training_rm") == [] and log_directory(cfg.exp_manager) == Path("/mine/megatron_gpt")
    assert check_config(composed("inference_rm", "exp_manager.exp_dir=/mine"), "inference_rm") == []


def test_targets_of_moved_keys_exist() -> None:
    configs = [load_defaults(job) for job in JOBS]
    for foreign in FOREIGN_KEYS:
        if foreign.moved_to and "*" not in foreign.moved_to and "{" not in foreign.moved_to:
            found = [OmegaConf.select(config, foreign.moved_to, default=sys) for config in configs]
            assert any(value is not sys for value in found), foreign.moved_to


@pytest.mark.parametrize("job", [job for job in JOBS if job not in ("inference_rm", "compute_topk_logits")])
def test_what_may_differ_between_starts_of_a_run_is_not_remembered(job: str) -> None:
    first, second = load_defaults(job), load_defaults(job)
    second.trainer.devices, second.exp_manager.max_time_per_run = 8, "00:00:10:00"
    second.model.micro_batch_size, second.model.tensor_model_parallel_size = 7, 2
    assert changed_settings(settings_of_run(first), settings_of_run(second)) == []
    second.model.optim.lr = 0.5
    second.model.seed = 4
    changed = changed_settings(settings_of_run(first), settings_of_run(second))
    assert changed == ["model.seed=4 (before: 1234)", f"model.optim.lr=0.5 (before: {first.model.optim.lr})"]
    assert changed_settings({}, settings_of_run(second)) == []  # of a version that remembered nothing
    assert not [key for key in settings_of_run(first) if key.endswith("token")]


def test_a_setting_that_follows_another_is_not_named_beside_it() -> None:
    first, second = load_defaults("gpt_sft"), load_defaults("gpt_sft")
    second.model.data.train_ds.global_batch_size = 32  # which model.global_batch_size and the validation's follow
    changed = changed_settings(settings_of_run(first), settings_of_run(second))
    assert changed == ["model.data.train_ds.global_batch_size=32 (before: 128)"]


def test_what_is_validated_on_and_logged_may_change() -> None:
    free = ("model.data.validation_ds.shuffle", "exp_manager.wandb_logger_kwargs.id", "trainer.ppo.token")
    assert all(map(may_change, free))
    assert not any(map(may_change, ("model.data.data_prefix.train", "model.num_layers", "trainer.ppo.staleness")))


def test_paths_are_absolute_before_code_of_the_users_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_defaults("gpt_ppo_actor")
    cfg.pretrained_checkpoint.restore_from_path = "sft.nemo"
    cfg.model.data.data_prefix = {"train": [0.3, "a.jsonl", "0.7", "/b.jsonl"], "validation": "v.jsonl"}
    cfg.trainer.ppo.estimator = "own.py:mine"
    rewards = ["own.py:reward", "rm.nemo", "exact_match", "http://h:1/rm"]
    cfg.trainer.ppo.rewards = [{"source": source} for source in rewards]
    cfg.exp_manager.explicit_log_dir = None
    make_paths_absolute(cfg)
    assert cfg.pretrained_checkpoint.restore_from_path == f"{tmp_path}/sft.nemo"
    assert cfg.model.data.data_prefix.train == [0.3, f"{tmp_path}/a.jsonl", "0.7", "/b.jsonl"]
    assert cfg.model.data.data_prefix.validation == f"{tmp_path}/v.jsonl"
    assert cfg.trainer.ppo.estimator == f"{tmp_path}/own.py:mine" and cfg.trainer.ppo.policy_loss == "ppo"
    expected = [f"{tmp_path}/own.py:reward", f"{tmp_path}/rm.nemo", "exact_match", "http://h:1/rm"]
    assert [reward.source for reward in cfg.trainer.ppo.rewards] == expected
    assert log_directory(cfg.exp_manager) == tmp_path / "nemo_experiments" / "megatron_gpt_ppo_actor"
    for job in JOBS:
        make_paths_absolute(load_defaults(job))  # what is not given is left alone
