"""Every key of the jobs' configs reaches what it is about: each is set away from its default, none is left out."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from small_models import SHAPE, VOCAB

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import current_layout
from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.guard.http_server import ConnectionLimits
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import ConfigError, load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS
from nemo_style_aligner.trainer.jobs import critic_setup, job_setup, scoring_setup, service_setup
from nemo_style_aligner.trainer.jobs.job_setup import Run, register_model, require_shared, start_run
from nemo_style_aligner.trainer.jobs.run_settings import settings_of_run
from nemo_style_aligner.trainer.jobs.service_setup import (
    build_critic_service,
    build_reward_service,
    listen_as_critic,
    listen_as_frozen_model,
)
from nemo_style_aligner.trainer.jobs.supervised_setup import reward_objective
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.supervised_losses import LabelledBatch
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.services.model_server import DispatchSettings
from nemo_style_aligner.trainer.services.routes import HttpSettings
from nemo_style_aligner.trainer.services.scores import Score
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.training.run_control import RunControl

pytestmark = pytest.mark.usefixtures("one_rank")

CONNECTIONS = {
    "receive_seconds": 1.0, "min_bytes_per_second": 2.0, "first_request_seconds": 3.0, "idle_seconds": 4.0,
    "max_connections": 5, "max_body_without_token": 6,
}  # fmt: skip
SERVED = {  # what both services have
    "port": 1234, "host": "10.0.0.7", "token": "s3cret", "known_as": ["10.0.0.8:1234"], "max_body_bytes": 5000,
    "max_outstanding_requests": 7,
    "infer_timeout_seconds": 8, "inference_micro_batch_size": [2, 4], "max_queue_delay_microseconds": 9,
    "strip_sequence_length_to_multiple": 16, "connections": CONNECTIONS,
}  # fmt: skip
HEAD = {
    "reward_standardization": {"enable": True, "mean": 1.0, "std": 2.0},
    "use_avg_pool": True,
    "force_head_dtype": "bfloat16",
    "reward_model_type": "regression",
}
REGRESSION = {"num_attributes": 2, "attribute_weights": [0.25, 0.75]}
OTHER_TESTS = {  # of keys of all jobs: layouts, models, adapters (`test_lora`), the optimizer (`test_supervised_jobs`)
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "encoder_seq_length",
    "max_position_embeddings", "seed", "optim", "activations_checkpoint_granularity", "activations_checkpoint_method",
    "activations_checkpoint_num_layers", "hidden_dropout", "attention_dropout", "peft",
}  # fmt: skip


def change(section: DictConfig, changes: Mapping[str, Any]) -> None:
    """Set keys, all away from their defaults."""
    assert not [key for key, value in changes.items() if section[key] == value], "not away from its default"
    section.merge_with(changes)


def keys_below(section: DictConfig, changes: Mapping[str, Any]) -> None:
    """Raises AssertionError where keys within the sections among ``changes`` are left out."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            assert section[key].keys() == value.keys(), key


@pytest.mark.parametrize(
    ("job", "name", "own"),
    [
        ("gpt_ppo_critic", "trainer.ppo", {"command_timeout_seconds": 11, "combine_rm_and_critic_server": False}),
        ("inference_rm", "inference", {"model_name": "judge"}),
    ],
)
def test_a_service_listens_as_its_config_says(
    job: str, name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_critic, made = job == "gpt_ppo_critic", SimpleNamespace()
    monkeypatch.setattr(
        service_setup,
        "ModelServer",
        lambda endpoints, http, dispatch: made.__dict__.update(endpoints=endpoints, http=http, dispatch=dispatch),
    )
    cfg = load_defaults(job)
    section = OmegaConf.select(cfg, name)
    of_training = {"max_steps", "gradient_clip_val", "on_nonfinite", "max_consecutive_skips"} if is_critic else set()
    assert section.keys() == {*SERVED, *own} | of_training
    keys_below(section, SERVED)
    change(section, SERVED | own)
    cfg.model.merge_with(HEAD | {"regression": REGRESSION})
    tokenizer = SimpleNamespace(fingerprint=lambda: "of the tokenizer", text_as_trained=lambda text: [len(text)])
    base: Any = SimpleNamespace(architecture=ModelArchitecture(**SHAPE), tokenizer=tokenizer, max_sequence_length=99)
    layout: Any = SimpleNamespace(dp_size=3)
    run: Any = SimpleNamespace(layout=layout)
    if is_critic:
        listen_as_critic(schema.Critic.read(cfg).trainer.ppo, run, base)
    else:
        section = schema.RewardService.read(cfg).inference
        listen_as_frozen_model(section, layout, base, [Score("rewards", columns=2)])
    assert made.http == HttpSettings(
        port=1234, host="10.0.0.7", section=name, token="s3cret", known_as=("10.0.0.8:1234",), max_body_bytes=5000,
        max_outstanding_requests=7,
        infer_timeout_s=8.0, command_timeout_s=11.0 if is_critic else 3600.0,
        connections=ConnectionLimits(**CONNECTIONS),  # type: ignore[arg-type]
    )  # fmt: skip
    assert made.dispatch == DispatchSettings(12, 9)
    first = made.endpoints[0]
    assert first.length_multiple == 16
    assert first.name == ("critic_infer" if is_critic else "judge")
    assert {output: list(spec.dims) for output, spec in first.outputs.items()} == (
        {"values": [-1]} if is_critic else {"rewards": [2]}
    )
    assert first.limits.parameters() == {
        "max_sequence_length": 99, "vocab_size": VOCAB, "tokenizer": "of the tokenizer"
    }  # fmt: skip


def test_a_critic_is_trained_as_its_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}  # of the optimizer: on a CPU it offloads nothing
    monkeypatch.setattr(
        critic_setup, "Optimizer", lambda *arguments, **options: asked.update(options) or Optimizer(*arguments)
    )
    cfg = load_defaults("gpt_ppo_critic")
    trainer = {"max_steps": 20, "gradient_clip_val": 0.5, "on_nonfinite": "skip", "max_consecutive_skips": 4}
    model = {
        "micro_batch_size": 3, "max_tokens_per_micro_batch": 50, "global_batch_size": 6,
        "forward_micro_batch_size": 5, "forward_max_tokens_per_micro_batch": 60,
        "offload_adam_states": True, "keep_activations": "never", "loss_clip_val": 0.3, "rm_placement": "swap",
        "share_prompts": False,
    }  # fmt: skip
    assert cfg.trainer.ppo.keys() == {*trainer, *SERVED, "command_timeout_seconds", "combine_rm_and_critic_server"}
    assert cfg.model.keys() == {*model, *HEAD, "regression"} | OTHER_TESTS
    assert cfg.model.regression.keys() == {*REGRESSION, "merge_attributes"}  # which the critic always does
    keys_below(cfg.model, HEAD)
    change(cfg.trainer.ppo, trainer)
    change(cfg.model, model | HEAD)
    change(cfg.model.regression, REGRESSION)
    cfg.model.optim.sched.update(warmup_steps=2, constant_steps=0)
    base = base_model(cfg)
    config = schema.Critic.read(cfg)
    service = build_critic_service(config, run_in(tmp_path / "first"), base, TrainingLedger())
    critic, optimizer = service.critic, service.critic.optimizer
    assert critic.training_batching == MicroBatching(3, 50, shares_prompts=False)
    assert critic.forward_batching == MicroBatching(5, 60, shares_prompts=False)
    assert (critic.global_batch_size, critic.loss_clip) == (6, 0.3)
    policy = optimizer.skips.policy
    assert (optimizer.clip_grad, policy.on_nonfinite, policy.max_consecutive_skips) == (0.5, "skip", 4)
    assert optimizer.schedule == Schedule.from_config(config.model.optim, 20)
    assert asked == {"offload": True} and critic.model.kept_passes is None
    assert critic.head == RewardHeadConfig(2, "average", torch.bfloat16, True, (0.25, 0.75), 1.0, 2.0)
    assert service.reward_model is not None and service.reward_model.head == critic.head
    assert service.reward_model.batching == critic.forward_batching
    service.infer(torch.ones(2, 4, dtype=torch.int64), torch.tensor([4, 3]))
    assert service.reward_model.num_swaps == 1
    cfg.trainer.ppo.combine_rm_and_critic_server, cfg.model.keep_activations = False, "always"
    alone = build_critic_service(schema.Critic.read(cfg), run_in(tmp_path / "second"), base, TrainingLedger())
    assert alone.reward_model is None and alone.critic.model.kept_passes is not None


def test_a_reward_model_scores_as_its_config_says() -> None:
    cfg = load_defaults("inference_rm")
    model = {"forward_micro_batch_size": 5, "forward_max_tokens_per_micro_batch": 60, "share_prompts": False}
    assert cfg.model.keys() - OTHER_TESTS == {*model, *HEAD, "regression"}
    change(cfg.model, model | HEAD)
    change(cfg.model.regression, REGRESSION | {"merge_attributes": True})
    service = build_reward_service(schema.RewardService.read(cfg), base_model(cfg))
    assert service.reward_model.batching == MicroBatching(5, 60, shares_prompts=False)
    assert service.reward_model.head == RewardHeadConfig(
        2, "average", torch.bfloat16, merge_attributes=True, attribute_weights=(0.25, 0.75), mean=1.0, std=2.0
    )


def test_an_actor_waits_for_its_critic_as_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace()
    monkeypatch.setattr(
        scoring_setup, "CriticClient", lambda config, **options: made.__dict__.update(config=config, **options)
    )
    section = load_defaults("gpt_ppo_actor").remote_critic_rm
    timeouts = {
        "connect_seconds": 1,
        "read_seconds": 2,
        "total_seconds": 3,
        "training_seconds": 8,
        "restart_seconds": 5,
    }
    assert section.timeouts.keys() == {*timeouts, "ready_seconds"}  # the latter is of the start alone
    change(section, {"token": "s3cret"})
    change(section.timeouts, timeouts)
    remote = schema.RemoteCritic.among(section)
    scoring_setup.build_critic_client(remote)
    assert made.token == "s3cret" and made.config is remote
    for limits, read, total in ((made.infer_limits, 2.0, 3.0), (made.train_limits, 4.0, 8.0)):
        assert (limits.connect_s, limits.read_s, limits.total_s, limits.away_s) == (1.0, read, total, 5.0)


@pytest.mark.parametrize("job", ["gpt_ppo_actor", "gpt_ppo_critic", "training_rm", "gpt_sft"])
def test_a_run_is_set_up_as_its_config_says(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace()
    replaced: dict[str, Any] = {
        "initialize_model_parallel": lambda *arguments, **options: (*arguments, options),
        "hold_log_directory": lambda log_dir, name: made.__dict__.update(held=(log_dir, name)),
        "RunControl": lambda seconds: seconds,
        "start_watchdog": lambda minutes, log_dir: (minutes, log_dir),
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(job_setup, name, stand_in)
    monkeypatch.setattr(MetricsLogger, "__init__", lambda self, *arguments: made.__dict__.update(logger=arguments))
    monkeypatch.setattr("nemo_style_aligner.trainer.jobs.job_setup.start_trackers", lambda section, _: section)
    cfg = load_defaults(job)
    checkpoints = {
        "monitor": "val_x", "mode": "min" if cfg.exp_manager.checkpoint_callback_params.mode == "max" else "max",
        "save_top_k": 4, "save_last_n": 3, "save_nemo_on_train_end": False, "always_save_nemo": True,
        "async_save": False, "filename": "x-{step}",
    }  # fmt: skip
    if job != "gpt_ppo_critic":  # which does not know the best
        checkpoints["save_best_model"] = True
    wandb = {"project": "p", "name": "n"}
    mlflow = {"experiment_name": "e", "run_name": "r", "tracking_uri": "u", "save_dir": "s", "artifact_location": "a"}
    mlflow |= {"run_id": "i", "tags": {"t": 1}}
    resuming = {"resume_if_exists": False, "resume_ignore_no_checkpoint": False, "resume_from_checkpoint": "/old"}
    manager = {
        "explicit_log_dir": str(tmp_path), "name": "other", "create_wandb_logger": True, "wandb_logger_kwargs": wandb,
        "create_mlflow_logger": True, "mlflow_logger_kwargs": mlflow,
        "max_time_per_run": "00:00:01:30", "watchdog_minutes": 5, "checkpoint_callback_params": checkpoints, **resuming,
    }  # fmt: skip
    # exp_dir: below. The log's keys are read as the job is launched, before there is a run. The page: `test_report`.
    assert cfg.exp_manager.keys() == {*manager, "exp_dir", "log_format", "log_level", "timeline", "dashboard_port"}
    keys_below(cfg.exp_manager, manager)
    change(cfg.exp_manager, manager)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 4}
    sizes |= {"expert_model_parallel_size": 5, "expert_tensor_parallel_size": 6}
    change(cfg.model, sizes | {"seed": 7})
    change(cfg.trainer, {"distributed_timeout_minutes": 9})
    data = tmp_path / "train.jsonl"
    data.write_text("{}")
    if job == "gpt_sft":
        cfg.model.data.train_ds.file_path = str(data)
    elif job != "gpt_ppo_critic":  # which gets its data from the actor
        cfg.model.data.data_prefix = {"train": [str(data)]}
    config = JOBS[job].sections.read(cfg)
    run = start_run(config)
    assert run.layout == (2, 3, 7, 9, {"cp_size": 4, "ep_size": 5, "etp_size": 6}) and run.log_dir == tmp_path
    assert made.held == (tmp_path, "other") and made.logger == (tmp_path, 0, config.exp_manager)
    assert (run.control, run.watchdog) == (90.0, (5, tmp_path))
    assert run.checkpoints.settings == CheckpointSettings(**checkpoints, **resuming, nemo_name="other")
    digests = {} if job == "gpt_ppo_critic" else {f"SHA-256 of {data}": hashlib.sha256(b"{}").hexdigest()[:16]}
    assert run.checkpoints.run_settings == settings_of_run(cfg) | digests
    cfg.exp_manager.update(explicit_log_dir=None, exp_dir=str(tmp_path / "experiments"))
    assert start_run(JOBS[job].sections.read(cfg)).log_dir == tmp_path / "experiments" / "other"


def test_a_disk_without_room_for_a_checkpoint_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SmolLM2's 135 M parameters in bf16 take 14 bytes each."""
    shape: Any = SimpleNamespace(num_parameters=134_515_008, to_nemo_config=dict)
    tokenizer: Any = SimpleNamespace(fingerprint=lambda: "f")
    archive = tmp_path / "base.nemo"
    archive.mkdir()
    base: Any = SimpleNamespace(
        path=archive, config={}, architecture=shape, dtype=torch.bfloat16, tokenizer=tokenizer,
        identity=lambda: "i",
    )  # fmt: skip
    with caplog.at_level("INFO"):
        run = run_in(tmp_path / "run")
        register_model(schema.SFT.read(load_defaults("gpt_sft")), run, base)
        assert "a checkpoint takes about 1.9 GB; " in caplog.text
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000_000))
        with pytest.raises(NotWrittenError, match=r"takes about 1\.9 GB, and 1\.0 GB are free in .*: make room"):
            register_model(schema.SFT.read(load_defaults("gpt_sft")), run, base)


def test_machines_with_log_directories_of_their_own_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("WORLD_SIZE", "2")):  # as the launcher says
        monkeypatch.setenv(name, value)
    require_shared(tmp_path)

    def on_two_machines(look: Callable[[], tuple[str, bool]], group: None) -> list[tuple[str, bool]]:
        return [look(), ("node2", False)]

    monkeypatch.setattr(job_setup, "on_every_rank", on_two_machines)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not the same folder on all machines.* not there on node2"):
        require_shared(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("job", ["gpt_ppo_actor", "gpt_ppo_critic", "training_rm", "gpt_sft"])
def test_a_model_drops_out_and_recomputes_as_its_config_says(job: str) -> None:
    cfg = load_defaults(job)
    change(cfg.model, {"hidden_dropout": 0.1, "attention_dropout": 0.2, "activations_checkpoint_granularity": "full"})
    change(cfg.model, {"activations_checkpoint_method": "block", "activations_checkpoint_num_layers": 2})
    config = build_model(ModelArchitecture(**SHAPE), cfg.model, torch.float32).config
    assert (config.hidden_dropout, config.attention_dropout) == (0.1, 0.2)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "block", 2)


def test_labels_of_the_masked_value_do_not_count() -> None:
    cfg = load_defaults("training_rm")
    change(cfg.model, {"reward_model_type": "regression"})
    change(cfg.model.regression, {"loss_mask_val": -7, "num_attributes": 2})
    labels = torch.tensor([[1.0, -7.0], [-7.0, -7.0]])
    batch = LabelledBatch(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 2]), labels)
    objective = reward_objective(schema.RewardTraining.read(cfg).model, RewardHeadConfig.from_model_config(cfg.model))
    error, count, _ = objective.loss(torch.zeros(2, 3, 2), batch)
    assert (float(error), float(count)) == (1.0, 1.0)
    assert objective.wanted(batch).any(1).tolist() == [True, False]


def base_model(cfg: DictConfig) -> Any:
    """A `BaseModel` whose weights are not read from anywhere."""

    def load(head: RewardHeadConfig | None = None, trainable: bool = True, needs_head: bool = False) -> Any:
        return build_model(ModelArchitecture(**SHAPE), cfg.model, torch.float32, head=head, trainable=trainable)

    config = OmegaConf.to_container(cfg.model, resolve=True)
    return SimpleNamespace(path=Path("model.nemo"), config=config, load=load, build=load)


def run_in(folder: Path) -> Run:
    folder.mkdir()
    checkpoints = CheckpointManager(folder / "checkpoints", CheckpointSettings())
    return Run(folder, current_layout(), MetricsLogger(folder), RunControl(), checkpoints)
