"""One step of PPO, or of a group estimator, at many layouts, for test_ppo_invariance.py:
``python multirank_ppo.py <folder> [name ...]``.

Imports torch and megatron-core once and forks the ranks of every layout. The same rollouts go through the real
parts: archives, log-probs, critic service, advantages, policy and critic updates. Each layout leaves
``<folder>/<name>.safetensors`` and ``<name>.json``. Archives that are in the folder already are used as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.tensorboard  # slow: imported here once, for all ranks
from omegaconf import DictConfig, OmegaConf
from ranks import fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import ParallelLayout, broadcast_object, initialize_model_parallel
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_weights, save_nemo
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import Critic, PPOActor, Updates
from nemo_style_aligner.trainer.jobs.job_setup import Run, forward_batching
from nemo_style_aligner.trainer.jobs.job_view import as_served
from nemo_style_aligner.trainer.jobs.rl_setup import build_actor
from nemo_style_aligner.trainer.jobs.scoring_setup import build_local_critic, open_teacher
from nemo_style_aligner.trainer.jobs.service_setup import build_critic_service
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import KeptPasses
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model
from nemo_style_aligner.trainer.rl.experience import Experience, leave_out_nonfinite, make_experience
from nemo_style_aligner.trainer.rl.loop import RLTrainer
from nemo_style_aligner.trainer.rl.reward_models import ModelRewards
from nemo_style_aligner.trainer.rl.rollouts.collector import SampleSizes, deal
from nemo_style_aligner.trainer.rl.sample import Rollouts, Sample
from nemo_style_aligner.trainer.rl.scoring import Scores
from nemo_style_aligner.trainer.rl.settings import RLSettings
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.services.score_client import SequencesToScore
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger, read_metrics
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer
from nemo_style_aligner.trainer.training.run_control import RunControl

CORPUS = "User: What is 6*10?\nAssistant: 60 " + "0123456789+-*/="
NUM_SAMPLES, WIDTH = 16, 23
"""An odd width, which sequence parallelism must pad."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one step is computed. All but ``tied``, ``precision``, ``updates`` and ``algorithm`` must leave the result as
    it is."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    micro: int = 4
    max_tokens: int | None = None
    sequence_parallel: bool = False
    optimizer: str = "distributed_fused_adam"
    overlap: bool = False
    placement: str = "swap"
    recompute: str | None = None
    tied: bool = False
    precision: str = "32"
    vocab_divisor: int = 1
    updates: int = 2
    keep: str = "never"
    room: int | None = None  # tokens whose activations the memory holds
    algorithm: str = "ppo"
    shares: bool = True  # prompts
    is_long: bool = False  # computed with TEST_LONG alone

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def reference(self) -> str:
        """The layout on one rank that has the same result."""
        if self.algorithm != "ppo":
            return f"{self.algorithm}_reference"
        return "tied_reference" if self.tied else "reference" if self.updates == 2 else "one_update"

    @property
    def has_critic_in_job(self) -> bool:
        """Whether the same is also computed by a critic in the actor's job."""
        return self.name in OF_CRITIC_IN_JOB


OF_CRITIC_IN_JOB = (
    *(
        "reference",
        "tokens",
        "full_recompute",
        "kept_first_update",
        "tp2",
        "tp2_sp",
        "pp2_tokens",
        "dp2",
        "dp2_overlap",
        "cp2",
    ),
    *("tp2_dp2_sp", "pp2_dp2"),
)
OF_CRITIC = (
    *("micro_batch_size", "max_tokens_per_micro_batch", "global_batch_size", "make_vocab_size_divisible_by"),
    *("activations_checkpoint_granularity", "optim", "keep_activations"),
)

GROUP = 4
GROUP_ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {  # a loss over whole sequences, a KL term in it, and samples that are dealt anew for the second epoch
        "trainer.ppo.estimator": "grpo",
        "trainer.ppo.policy_loss": "gspo",
        "trainer.ppo.loss_aggregation": "sequence_mean",
        "trainer.ppo.kl_in": "loss",
        "trainer.ppo.kl_estimator": "k3",
        "trainer.ppo.num_ppo_epochs": 2,
        "model.ppo.ratio_eps": 0.1,
    },
    "rloo": {
        "trainer.ppo.estimator": "rloo",
        "trainer.ppo.policy_loss": "reinforce",
        "trainer.ppo.loss_aggregation": "sequence_sum",
        "trainer.ppo.mask_truncated": False,
    },
    "distillation": {
        "trainer.ppo.estimator": "on_policy_distillation",
        "trainer.ppo.policy_loss": "reinforce",
        "trainer.ppo.teacher.weight": 0.5,
        "trainer.ppo.mask_truncated": False,
    },
}
"""Keys of the actor job that make a group estimator's step of it."""

LAYOUTS = (
    # one rank
    Layout("reference"),
    Layout("micro1", micro=1),
    Layout("tokens", max_tokens=40),
    Layout("one_pass", max_tokens=1000, is_long=True),
    Layout("plain_optimizer", optimizer="fused_adam", is_long=True),
    Layout("resident", placement="resident", is_long=True),
    Layout("selective", recompute="selective"),
    Layout("full_recompute", recompute="full", micro=2),
    Layout("padded_vocabulary", vocab_divisor=128),
    Layout("tied_reference", tied=True),
    Layout("bf16_reference", precision="bf16"),
    Layout("one_update", updates=1, placement="resident"),
    Layout("kept", updates=1, placement="resident", keep="always"),
    Layout("kept_where_there_is_room", updates=1, placement="resident", keep="auto", is_long=True),
    Layout("kept_in_part", updates=1, placement="resident", keep="auto", room=60),
    Layout("kept_without_room", updates=1, placement="resident", keep="auto", room=0, is_long=True),
    Layout("one_update_micro1", updates=1, micro=1, placement="resident", is_long=True),
    Layout("kept_micro1", updates=1, micro=1, placement="resident", keep="always", is_long=True),
    Layout("kept_selective", updates=1, placement="resident", keep="always", recompute="selective", is_long=True),
    Layout("kept_full_recompute", updates=1, placement="resident", keep="always", recompute="full", is_long=True),
    Layout("kept_tokens", updates=1, placement="resident", keep="always", max_tokens=40, is_long=True),
    Layout("kept_first_update", placement="resident", keep="always"),
    Layout("gspo_reference", algorithm="gspo", shares=False),
    Layout("gspo_tokens", algorithm="gspo", max_tokens=60),
    Layout("gspo_micro1", algorithm="gspo", micro=1, placement="resident", is_long=True),
    Layout("rloo_reference", algorithm="rloo", shares=False),
    Layout("distillation_reference", algorithm="distillation", shares=False),
    Layout("distillation_micro1", algorithm="distillation", micro=1, placement="resident", is_long=True),
    # two
    Layout("tp2", tp=2, is_long=True),
    Layout("tp2_micro1", tp=2, micro=1, optimizer="fused_adam", placement="resident", is_long=True),
    Layout("tp2_sp", tp=2, sequence_parallel=True),
    Layout("tp2_sp_tokens", tp=2, sequence_parallel=True, max_tokens=30, is_long=True),
    Layout("pp2_tokens", pp=2, max_tokens=30),
    Layout("dp2_tokens", dp=2, max_tokens=30, is_long=True),
    Layout("tp2_sp_full", tp=2, sequence_parallel=True, micro=2, recompute="full", is_long=True),
    Layout("pp2", pp=2, is_long=True),
    Layout("pp2_micro1", pp=2, micro=1, placement="resident", optimizer="fused_adam", recompute="selective"),
    Layout("dp2", dp=2, is_long=True),
    Layout("dp2_micro1", dp=2, micro=1, optimizer="fused_adam", is_long=True),
    Layout("dp2_overlap", dp=2, micro=3, overlap=True),
    Layout("tied_tp2", tp=2, tied=True, is_long=True),
    Layout("tied_pp2", pp=2, tied=True, is_long=True),
    Layout("kept_tp2_sp", tp=2, sequence_parallel=True, updates=1, placement="resident", keep="always", max_tokens=30),
    Layout("kept_tp2", tp=2, updates=1, placement="resident", keep="auto", is_long=True),
    Layout("kept_tp2_in_part", tp=2, updates=1, placement="resident", keep="auto", room=60, is_long=True),
    Layout("kept_dp2", dp=2, updates=1, placement="resident", keep="always", overlap=True),
    Layout("kept_dp2_tokens", dp=2, updates=1, placement="resident", keep="auto", max_tokens=30, is_long=True),
    Layout("cp2", cp=2),
    Layout("cp2_full", cp=2, micro=2, recompute="full", optimizer="fused_adam", is_long=True),
    Layout("kept_cp2", cp=2, updates=1, placement="resident", keep="always", max_tokens=30, is_long=True),
    Layout("tied_cp2", cp=2, tied=True, overlap=True, is_long=True),
    Layout("gspo_cp2", algorithm="gspo", cp=2, max_tokens=60, is_long=True),
    Layout("distillation_cp2", algorithm="distillation", cp=2, is_long=True),
    Layout("gspo_tp2_sp", algorithm="gspo", tp=2, sequence_parallel=True, is_long=True),
    Layout("gspo_pp2", algorithm="gspo", pp=2, micro=3, is_long=True),
    Layout("gspo_dp2", algorithm="gspo", dp=2, is_long=True),
    Layout("gspo_dp2_tokens", algorithm="gspo", dp=2, max_tokens=30, overlap=True),
    Layout("rloo_dp2", algorithm="rloo", dp=2, micro=1),
    Layout("distillation_tp2", algorithm="distillation", tp=2),
    Layout("distillation_pp2", algorithm="distillation", pp=2),
    Layout("distillation_dp2", algorithm="distillation", dp=2, is_long=True),
    Layout("bf16_tp2_sp", tp=2, sequence_parallel=True, precision="bf16"),
    Layout("bf16_pp2", pp=2, precision="bf16", is_long=True),
    Layout("bf16_dp2", dp=2, precision="bf16", is_long=True),
    # four
    Layout("tp2_cp2_sp", tp=2, cp=2, sequence_parallel=True),
    Layout("pp2_cp2", pp=2, cp=2, max_tokens=50, is_long=True),
    Layout("cp2_dp2", cp=2, dp=2, overlap=True, is_long=True),
    Layout("gspo_cp4", algorithm="gspo", cp=4, is_long=True),
    Layout("tp2_dp2_sp", tp=2, dp=2, sequence_parallel=True, micro=3),
    Layout("pp2_dp2_tokens", pp=2, dp=2, max_tokens=50),
    Layout("pp2_dp2", pp=2, dp=2, micro=1, is_long=True),
    Layout("gspo_pp2_dp2", algorithm="gspo", pp=2, dp=2, micro=1, is_long=True),
    Layout("rloo_tp2_dp2", algorithm="rloo", tp=2, dp=2, is_long=True),
    Layout("tied_tp2_pp2_sp", tp=2, pp=2, sequence_parallel=True, micro=2, recompute="full", tied=True),
)


# ---- what goes in -------------------------------------------------------------------------------


def architecture(tied: bool, vocab_size: int) -> ModelArchitecture:
    return ModelArchitecture(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
        vocab_size=vocab_size, max_position_embeddings=64, tied_embeddings=tied, qkv_bias=tied, init_method_std=0.15,
    )  # fmt: skip


def make_archives(folder: Path) -> None:
    """sft (the initial policy), policy (moved a little from it) and rm (critic and reward model)."""
    tokenizer = train_character_tokenizer(CORPUS, folder / "tokenizer")
    initialize_model_parallel(1, 1, seed=3)
    for tied in (False, True):
        shape = architecture(tied, tokenizer.vocab_size)
        config = shape.to_nemo_config() | {"encoder_seq_length": 64}
        model = build_model(shape, {}, torch.float32, trainable=False)
        save_nemo(folder / _file("sft", tied), model, config, folder / "tokenizer")
        with torch.no_grad():
            for parameter in model.gpt.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        save_nemo(folder / _file("policy", tied), model, config, folder / "tokenizer")
        critic = build_model(shape, {}, torch.float32, head=RewardHeadConfig(), trainable=False)
        save_nemo(folder / _file("rm", tied), critic, config | {"force_head_dtype": "float32"}, folder / "tokenizer")

    teacher = build_model(dataclasses.replace(shape, num_layers=4), {}, torch.float32, trainable=False)
    config = teacher.architecture.to_nemo_config() | {"encoder_seq_length": 64}
    save_nemo(folder / "teacher.nemo", teacher, config, folder / "tokenizer")


def _file(name: str, tied: bool) -> str:
    return f"{name}{'_tied' if tied else ''}.nemo"


@dataclasses.dataclass
class Sequences:
    """All samples, as a service gets them: tokens int64 [N, WIDTH], and what is known of each.

    ``sampled``: bool [N, WIDTH]. Longer responses are two replies, with something inserted between them.
    """

    tokens: torch.Tensor
    sampled: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    ended: torch.Tensor
    engine_logprobs: torch.Tensor

    def share(self, own: torch.Tensor, group: int, has_rows: bool) -> Rollouts:
        """Of a data-parallel rank with these samples. ``group``: samples to a prompt."""
        ids = torch.arange(NUM_SAMPLES)
        position = torch.arange(WIDTH)
        return Rollouts(
            prompt_ids=ids // group,
            groups=ids // group,
            prompt_lengths=self.prompt_lengths,
            lengths=self.lengths,
            sampled_lengths=self.sampled.sum(1),
            ended=self.ended,
            counts=torch.ones_like(self.ended),
            own=own,
            tokens=self.tokens[own][position < self.lengths[own, None]].int(),
            sampled=self.sampled[own][position < self.lengths[own, None]],
            engine_logprobs=self.engine_logprobs[own][self.responses(own)],
            weight_versions=torch.zeros_like(self.engine_logprobs[own][self.responses(own)], dtype=torch.int32),
            **(self.rows() if has_rows else {}),
        )

    def rows(self) -> dict[str, torch.Tensor]:
        """Responses of two replies as two sequences: the second begins with what was inserted last."""
        first = self.prompt_lengths + 3
        has_two = self.sampled.sum(1) < self.lengths - self.prompt_lengths
        lengths = torch.stack([first, self.lengths - first], 1)
        lengths[~has_two] = torch.stack([self.lengths, torch.zeros_like(first)], 1)[~has_two]
        return {"num_rows": 1 + has_two.long(), "row_lengths": lengths[lengths > 0]}

    def responses(self, own: torch.Tensor) -> torch.Tensor:
        """The predictions of sampled tokens, bool [n, WIDTH - 1]."""
        return self.sampled[own, 1:]


def sequences(vocab_size: int, group: int = 1) -> Sequences:
    """Of all lengths; two responses are truncated, one prompt is a single token. ``group``: samples to a prompt."""
    generator = torch.Generator().manual_seed(5)
    prompt_lengths = torch.randint(1, 10, (NUM_SAMPLES,), generator=generator)
    response_lengths = torch.randint(1, 14, (NUM_SAMPLES,), generator=generator)
    prompt_lengths[0], response_lengths[0] = 9, WIDTH - 9
    first = torch.arange(NUM_SAMPLES) // group * group
    prompt_lengths = prompt_lengths[first]
    lengths = prompt_lengths + response_lengths
    tokens = torch.randint(3, vocab_size, (NUM_SAMPLES, WIDTH), generator=generator)
    tokens = tokens[first].where(torch.arange(WIDTH) < prompt_lengths[:, None], tokens)
    tokens[torch.arange(WIDTH)[None, :] >= lengths[:, None]] = 0
    ended = torch.ones(NUM_SAMPLES, dtype=torch.bool)
    ended[[0, 7]] = False
    engine_logprobs = -4.0 * torch.rand(NUM_SAMPLES, WIDTH - 1, generator=generator)
    place = torch.arange(WIDTH) - prompt_lengths[:, None]
    is_response = (place >= 0) & (torch.arange(WIDTH) < lengths[:, None])
    is_inserted = (place >= 2) & (place < 5) & (lengths - prompt_lengths > 6)[:, None]
    return Sequences(tokens, is_response & ~is_inserted, prompt_lengths, lengths, ended, engine_logprobs)


def config(job: str, layout: Layout, archive: Path, log_dir: Path) -> DictConfig:
    cfg = OmegaConf.merge(
        load_defaults(job),
        {
            "trainer": {"precision": layout.precision},
            "pretrained_checkpoint": {"restore_from_path": str(archive)},
            "exp_manager": {"explicit_log_dir": str(log_dir)},
            "model": {
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "context_parallel_size": layout.cp,
                "sequence_parallel": layout.sequence_parallel,
                "micro_batch_size": layout.micro,
                "max_tokens_per_micro_batch": layout.max_tokens,
                "share_prompts": layout.shares,
                "global_batch_size": NUM_SAMPLES // layout.updates,
                "encoder_seq_length": 64,
                "make_vocab_size_divisible_by": layout.vocab_divisor,
                "activations_checkpoint_granularity": layout.recompute,
                "optim": {
                    "name": layout.optimizer,
                    "overlap_grad_sync": layout.overlap,
                    "lr": 2e-3,
                    # Adam divides by the gradient's size: where that is rounding noise, so would be the update.
                    "eps": 1e-5,
                    "sched": {"name": "constant", "warmup_steps": 0, "min_lr": 0.0},
                },
            },
        },
    )
    assert isinstance(cfg, DictConfig)
    if job == "gpt_ppo_actor":
        ppo = {"num_rollout_samples": NUM_SAMPLES, "entropy_bonus": 0.01, "forward_micro_batch_size": layout.micro}
        ppo["keep_activations"] = layout.keep
        OmegaConf.update(cfg, "model.ppo", ppo)
        OmegaConf.update(
            cfg,
            "trainer.ppo",
            {
                "reference_policy_placement": layout.placement,
                "initial_policy_kl_penalty": 0.1,
                "importance_weight_cap": 2.0,
                "num_ppo_epochs": 1,
                "max_steps": 4,
            },
        )
        if layout.algorithm == "distillation":
            cfg.trainer.ppo.teacher.restore_from_path = str(archive.with_name("teacher.nemo"))
        for key, value in GROUP_ALGORITHMS.get(layout.algorithm, {}).items():
            OmegaConf.update(cfg, key, value)
    else:
        cfg.model.rm_placement = layout.placement
        cfg.model.keep_activations = layout.keep
    return cfg


# ---- the step -----------------------------------------------------------------------------------


def ppo_step(folder: Path, layout: Layout) -> None:
    """What `RLTrainer.make_step` does from the rollouts on, and what the critic job does meanwhile."""
    groups = initialize_model_parallel(layout.tp, layout.pp, seed=1, cp_size=layout.cp)
    log_dir = folder / "logs" / layout.name
    actor_cfg = PPOActor.read(config("gpt_ppo_actor", layout, folder / _file("sft", layout.tied), log_dir / "actor"))
    base, actor_cfg = open_base_model(actor_cfg.pretrained_checkpoint.restore_from_path, actor_cfg)
    batch = sequences(base.architecture.vocab_size)
    trainer = _trainer(folder, layout, actor_cfg, base, log_dir)
    critic_cfg = Critic.read(config("gpt_ppo_critic", layout, folder / _file("rm", layout.tied), log_dir / "critic"))
    critic_base, critic_cfg = open_base_model(critic_cfg.pretrained_checkpoint.restore_from_path, critic_cfg)
    service = build_critic_service(critic_cfg, _run(critic_cfg, groups), critic_base, TrainingLedger())

    if layout.room is not None:
        _give_room(layout.room, trainer.actor.model.kept_passes, service.critic.model.kept_passes)
    # In two requests, of different widths.
    halves = [service.infer(batch.tokens[part, :width], batch.lengths[part]) for part, width in _requests(batch)]
    rewards = torch.cat([half["rewards"] for half in halves]).cpu()[:, 0]
    values = torch.cat([_wider(half["values"], WIDTH - 1) for half in halves]).cpu()
    ours = _rewards_in_job(actor_cfg, folder / _file("rm", layout.tied), batch)
    rollouts = _dealt(trainer, batch, group=1)
    columns = trainer.logprobs(rollouts, is_trained=True)
    columns["values"] = values[rollouts.own][batch.responses(rollouts.own)]
    scores = Scores(rewards.double(), {}, {})
    experience, metrics = make_experience(rollouts, scores, columns, trainer.settings.advantages, version=0)
    with _counting_passes(trainer.actor.model, service.critic.model) as passes:
        trainer.train_policy(experience)
        learnt = broadcast_object(experience.value_batch())
        critic_loss = service.train(learnt.tokens, learnt.returns, learnt.values, learnt.mask)
    ours_of_critic = {}
    if layout.has_critic_in_job:
        ours_of_critic = _critic_in_job(actor_cfg, critic_cfg, base, rollouts, experience)
    if layout.keep != "never" and layout.updates == 1 and layout.recompute != "full":
        is_all_kept = layout.room is None
        told = f"{layout.name}: training has computed {passes} forward passes of policy and critic"
        assert all((count == 0) == is_all_kept for count in passes), told

    tensors = _tensors(experience) | {"rewards": rewards, "rewards in the job": ours} | ours_of_critic
    for prefix, model in (("policy.", trainer.actor.model), ("critic.", service.critic.model)):
        tensors |= {prefix + name: tensor.clone() for name, tensor in export_weights(model)}
    trainer.metrics.close()
    service.metrics.close()
    _write(
        folder,
        layout,
        tensors,
        metrics | {"critic_loss": critic_loss},
        actor=log_dir / "actor",
        critic=log_dir / "critic",
    )


def group_step(folder: Path, layout: Layout) -> None:
    """The same of a group estimator: no critic, groups of samples, rewards from somewhere, of which one is missing."""
    initialize_model_parallel(layout.tp, layout.pp, seed=1, cp_size=layout.cp)
    log_dir = folder / "logs" / layout.name
    cfg = PPOActor.read(config("gpt_ppo_actor", layout, folder / _file("sft", layout.tied), log_dir / "actor"))
    base, cfg = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    trainer = _trainer(folder, layout, cfg, base, log_dir)
    batch, has_rows = sequences(base.architecture.vocab_size, GROUP), layout.algorithm != "distillation"
    rollouts = _dealt(trainer, batch, GROUP, has_rows)
    rewards = torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rewards[5] = torch.nan
    scores = Scores(rewards, {}, {5: "it has no reward"})
    columns = trainer.logprobs(rollouts, is_trained=True)
    rollouts, columns = leave_out_nonfinite(
        rollouts, scores, columns, Updates(on_nonfinite="skip", max_consecutive_skips=10)
    )
    experience, metrics = make_experience(rollouts, scores, columns, trainer.settings.advantages, version=0)
    trainer.train_policy(experience)
    tensors = _tensors(experience)
    tensors |= {f"policy.{name}": tensor.clone() for name, tensor in export_weights(trainer.actor.model)}
    trainer.metrics.close()
    _write(folder, layout, tensors, metrics, actor=log_dir / "actor")


def _dealt(trainer: RLTrainer, batch: Sequences, group: int, has_rows: bool = False) -> Rollouts:
    """This rank's share, as `RLTrainer.deal` makes it."""
    groups = torch.arange(NUM_SAMPLES) // group
    minibatches = [minibatch.tolist() for minibatch in trainer._minibatches(groups, 0)]
    work = trainer._work(SampleSizes(batch.lengths, batch.sampled.sum(1), batch.prompt_lengths, groups))
    return batch.share(deal(work, minibatches), group, has_rows)


def _write(
    folder: Path, layout: Layout, tensors: dict[str, torch.Tensor], metrics: dict[str, float], **logs: Path
) -> None:
    """What a layout leaves, with the numbers that its jobs have logged."""
    if dist.get_rank() != 0:
        return
    for job, log_dir in logs.items():
        curves = read_metrics(log_dir)
        metrics |= {f"{job}/{k}/{step}": v for k, points in curves.items() for step, v in points}
    metrics = {k: v for k, v in metrics.items() if "timers/" not in k and "memory/" not in k}
    save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, folder / f"{layout.name}.safetensors")
    (folder / f"{layout.name}.json").write_text(json.dumps(metrics))


def _rewards_in_job(cfg: PPOActor, archive: Path, batch: Sequences) -> torch.Tensor:
    """What the reward model gives inside the actor's job, fp32 [N] on rank 0: only some ranks have samples."""
    base, _ = open_base_model(str(archive), as_served(cfg), key="trainer.ppo.rewards")
    head = RewardHeadConfig.from_model_config(base.config)
    source = ModelRewards(base, head, forward_batching(cfg.model), cfg.trainer.ppo.reference_policy_placement)
    source.load()
    lengths = zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True)
    samples = [
        Sample(place, 0, {}, batch.tokens[place, :length].tolist(), prompt, True, str)
        for place, (length, prompt) in enumerate(lengths)
    ]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    own = samples[:3] * (rank == last) + samples[:2:-1] * (rank == 0)  # the others have none
    future = source.score(own)
    source.score_together()
    scored = [(sample.sample_id, reward) for sample, reward in zip(own, future.result(0), strict=True)]
    return Scores.gathered(NUM_SAMPLES, scored).rewards.float()


def _critic_in_job(
    cfg: PPOActor, critic_cfg: Critic, policy: BaseModel, rollouts: Rollouts, experience: Experience
) -> dict[str, torch.Tensor]:
    """What a critic in the actor's job, with the settings of the service, makes of the same samples; on rank 0."""
    section = {
        "pretrained_checkpoint": {"restore_from_path": critic_cfg.pretrained_checkpoint.restore_from_path},
        "model": {key: critic_cfg.model_given()[key] for key in OF_CRITIC},
    }
    sequences = SequencesToScore(WIDTH, policy.architecture.vocab_size, policy.tokenizer.fingerprint())
    critic, _ = build_local_critic(cfg.changed({"critic": section}), policy, sequences)
    trained = critic.load()
    rows = rollouts.on_first_rank(critic.values_of(rollouts), rollouts.sampled_lengths)
    critic.give_back_memory()  # as where something comes between
    values = critic.values_of(rollouts)
    metrics = critic.start_training(experience).result()
    critic.start_save()  # whose weights are read after it
    weights = {f"critic.{name}": tensor.clone() for name, tensor in export_weights(trained.model)}
    again = rollouts.on_first_rank(values, rollouts.sampled_lengths)
    if rows is None or again is None:
        return {}
    assert all(map(torch.equal, rows, again))
    found = weights | {"values": torch.cat(list(rows)), "loss": torch.tensor(metrics["critic_loss"])}
    return {f"critic in the job: {name}": tensor for name, tensor in found.items()}


def _requests(batch: Sequences) -> list[tuple[slice, int]]:
    parts = (slice(0, 12), slice(12, NUM_SAMPLES))
    return [(part, int(batch.lengths[part].max())) for part in parts]


def _wider(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _give_room(tokens: int, *all_passes: KeptPasses | None) -> None:
    """Memory for so many tokens; a second rank has less, and the first must keep no more than it."""
    for passes in all_passes:
        assert passes is not None
        has = tokens if dist.get_rank() == 0 else tokens // 2
        passes._free_bytes = lambda has=has, passes=passes: 2.0 * has * passes._bytes_per_token()  # type: ignore[method-assign,misc]


@contextlib.contextmanager
def _counting_passes(*models: MegatronModel) -> Iterator[list[int]]:
    """How often each model's first layer was called."""
    passes = [0] * len(models)

    def count(place: int) -> Callable[..., None]:
        def called(*_: Any) -> None:
            passes[place] += 1

        return called

    hooks = [model.gpt.decoder.layers[0].register_forward_pre_hook(count(i)) for i, model in enumerate(models)]
    yield passes
    for hook in hooks:
        hook.remove()


def _tensors(experience: Experience) -> dict[str, torch.Tensor]:
    """All samples' columns, on rank 0. Collective."""
    rollouts = experience.rollouts
    rows = {
        name: rollouts.on_first_rank(column, rollouts.sampled_lengths) for name, column in experience.columns.items()
    }
    return {"learns": experience.learns} | {name: torch.cat(list(row)) for name, row in rows.items() if row is not None}


def _trainer(folder: Path, layout: Layout, cfg: PPOActor, base: BaseModel, log_dir: Path) -> RLTrainer:
    """The trainer around the policy, without the parts that make rollouts."""
    settings = RLSettings.from_config(cfg, steps_per_epoch=4)
    sequences = SequencesToScore(WIDTH, base.architecture.vocab_size, base.tokenizer.fingerprint())
    actor = build_actor(cfg, base, base.load(), settings, open_teacher(cfg, base, sequences))
    load_nemo_weights(folder / _file("policy", layout.tied), actor.model)  # as if it had been trained for a while
    actor.optimizer.megatron.reload_model_params()
    missing: Any = None
    collector: Any = SimpleNamespace(scorer=SimpleNamespace(values=None))
    return RLTrainer(
        settings, actor, collector, missing, missing, missing,
        MetricsLogger(log_dir / "actor", dist.get_rank()), RunControl(), ScopedTimer(),
    )  # fmt: skip


def _run(cfg: Critic, groups: ParallelLayout) -> Run:
    log_dir = Path(cfg.exp_manager.explicit_log_dir)
    checkpoints = CheckpointManager(log_dir / "checkpoints", CheckpointSettings.from_config(cfg.exp_manager))
    return Run(log_dir, groups, MetricsLogger(log_dir, dist.get_rank()), RunControl(), checkpoints)


# ---- processes ----------------------------------------------------------------------------------


def run_layouts(folder: Path, layouts: Sequence[Layout]) -> None:
    from megatron.core import parallel_state

    for layout in layouts:
        (group_step if layout.algorithm in GROUP_ALGORITHMS else ppo_step)(folder, layout)
        parallel_state.destroy_model_parallel()
    if not torch.cuda.is_available():
        assert "torch._dynamo" not in sys.modules, "training loads torch's compiler, which takes a second or two"


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if not (folder / _file("rm", tied=True)).exists():
        fork_ranks(1, lambda: make_archives(folder))
    for world_size in (1, 2, 4):
        wanted = [c for c in LAYOUTS if (c.name in names if names else not c.is_long or os.environ.get("TEST_LONG"))]
        chosen = [c for c in wanted if c.world_size == world_size]
        if chosen:
            fork_ranks(world_size, lambda chosen=chosen: run_layouts(folder, chosen))  # type: ignore[misc]


if __name__ == "__main__":
    main()
