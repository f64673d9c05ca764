"""Builds the actor job from its config."""

from __future__ import annotations

import torch.distributed as dist
from omegaconf import DictConfig

from nemo_style_aligner.algorithms.job_setup import Run, forward_batching, start_watchdog, training_batching
from nemo_style_aligner.config import log_directory
from nemo_style_aligner.models.actor import Actor
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.kept_passes import keep_passes
from nemo_style_aligner.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.models.restore import BaseModel, open_base_model
from nemo_style_aligner.parallel import worlds
from nemo_style_aligner.rl.loop import PPOTrainer
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.rollouts.engine_setup import require_kv_cache
from nemo_style_aligner.rl.rollouts.prompts import build_prompt_sources
from nemo_style_aligner.rl.rollouts.setup import (
    build_collector,
    build_rollout_rank,
    build_scorer,
    open_work_queue,
    sampling_params,
)
from nemo_style_aligner.rl.settings import PPOSettings
from nemo_style_aligner.servers.client import SequencesToScore
from nemo_style_aligner.servers.exactly_once.journal import CriticJournal
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.memory import peak_meter
from nemo_style_aligner.telemetry.timers import ScopedTimer


def build_ppo_trainer(cfg: DictConfig, run: Run, base: BaseModel) -> PPOTrainer:
    """Build the PPO trainer with everything it needs, resumed if there is a checkpoint. Collective.

    Waits for the critic and reward service, ``remote_critic_rm.timeouts.ready_seconds`` at most.

    Raises:
        ValueError: settings that do not fit together (found before any weight is read), or servers that do not fit
            this job.
        TokenizerError: an end string could never be found.
        OSError: the work queue's port is taken (before any weight is read, too).
        SecretError: the shared secret cannot be used.
        ServerUnavailableError: the service is not there in time.
        SequenceConflictError: the critic cannot be brought to where this run is.
    """
    sampling_params(cfg, base.tokenizer)  # its errors are told before any weight is read
    queue = open_work_queue(cfg)
    train_prompts, val_prompts = build_prompt_sources(cfg, base.tokenizer)
    longest_response = int(cfg.model.ppo.length_params.max_length)
    longest_trained = train_prompts.longest + longest_response
    longest = longest_trained if val_prompts is None else max(longest_trained, val_prompts.longest + longest_response)
    require_kv_cache(cfg, longest)
    settings = PPOSettings.from_config(cfg, train_prompts.batches_per_epoch)
    scorer = build_scorer(cfg)  # before any weight is read: the secret may be missing
    actor = build_actor(cfg, base, base.load(), settings)
    ready_seconds = float(cfg.remote_critic_rm.timeouts.ready_seconds)
    with activity.phase("waiting for the critic"), activity.bounded(ready_seconds):
        num_rollouts = int(cfg.model.ppo.num_rollout_samples)
        vocab_size = min(base.tokenizer.vocab_size, base.architecture.vocab_size)
        sequences = SequencesToScore(longest, vocab_size, base.tokenizer.fingerprint(), longest_trained * num_rollouts)
        scorer.wait_until_ready(ready_seconds, sequences=sequences)
    collector = build_collector(cfg, actor.model, base.tokenizer, scorer, longest, queue)
    journal = CriticJournal(run.log_dir / "critic_journal", int(cfg.remote_critic_rm.journal_max_gibibytes * 2**30))
    critic = RemoteCritic(
        scorer,
        journal if dist.get_rank() == 0 else None,
        cfg.remote_critic_rm.trained_critic,
    )
    trainer = PPOTrainer(
        settings,
        actor,
        collector,
        critic,
        train_prompts,
        val_prompts,
        run.checkpoints,
        run.metrics,
        run.control,
        ScopedTimer(memory=peak_meter(), on_close=run.metrics.log_scope),
    )
    run.note_format(train_prompts.written)
    run.resume(cfg, actor.model, actor.optimizer, trainer)
    actor.optimizer.schedule.announce()
    critic.begin()
    return trainer


def serve_rollouts(cfg: DictConfig) -> int:
    """Run a rank that only generates (``trainer.ppo.rollout_devices``) until the job ends; return its exit status."""
    link = worlds.link()
    if link is None or not link.is_rollout_rank:
        raise RuntimeError("this rank trains: trainer.ppo.rollout_devices does not make it a rollout rank")
    watchdog = start_watchdog(cfg.exp_manager.watchdog_minutes, log_directory(cfg.exp_manager))
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    status = build_rollout_rank(cfg, link, base.architecture, base.dtype, base.tokenizer).serve()
    if watchdog is not None:
        watchdog.stop()
    return status


def build_actor(cfg: DictConfig, base: BaseModel, model: MegatronModel, settings: PPOSettings) -> Actor:
    """Build the policy, its optimizer, and the initial policy if there is a KL penalty."""
    initial_policy = None
    if settings.advantages.kl_coef > 0:
        # Frozen before a checkpoint is loaded: the penalty refers to the model that PPO started from.
        initial_policy = FrozenWeights(
            model, cfg.trainer.ppo.reference_policy_placement, lambda: base.build(trainable=False)
        )
    updates_per_step = cfg.model.ppo.num_rollout_samples // settings.global_batch_size * settings.num_ppo_epochs
    schedule = Schedule.from_config(cfg.model.optim, settings.max_steps * updates_per_step)
    clip, offload = float(cfg.trainer.ppo.gradient_clip_val or 0.0), bool(cfg.model.ppo.offload_adam_states)
    optimizer = Optimizer(model, cfg.model.optim, schedule, clip, settings.nonfinite, offload=offload)
    return Actor(
        model,
        optimizer,
        initial_policy,
        training_batching=training_batching(cfg.model),
        forward_batching=forward_batching(cfg.model.ppo),
        temperature=sampling_params(cfg).logprob_temperature,
        ratio_eps=float(cfg.model.ppo.ratio_eps),
        entropy_bonus=float(cfg.model.ppo.entropy_bonus),
        kept_passes=keep_passes(model, initial_policy, cfg.model.ppo.keep_activations, settings.global_batch_size),
    )
