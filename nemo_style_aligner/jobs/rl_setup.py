"""The actor job, the same for every algorithm: what each of its ranks runs, and how it is built from the config."""

from __future__ import annotations

from omegaconf import DictConfig

from nemo_style_aligner.config.loading import log_directory
from nemo_style_aligner.jobs.job_setup import (
    Run,
    announce_checkpoints,
    forward_batching,
    frozen_policy,
    register_model,
    start_run,
    start_timeline,
    start_watchdog,
    training_batching,
)
from nemo_style_aligner.jobs.placement import has_reference_here
from nemo_style_aligner.jobs.placement_picture import announce_placement
from nemo_style_aligner.jobs.run_settings import critic_of_run
from nemo_style_aligner.jobs.scoring_setup import build_scorer, open_teacher
from nemo_style_aligner.jobs.service_setup import serve_in_job
from nemo_style_aligner.launch import roles
from nemo_style_aligner.models.actor import Actor
from nemo_style_aligner.models.frozen import FrozenModel
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.kept_passes import keep_passes
from nemo_style_aligner.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.models.policy_losses import LossSettings, find_policy_loss
from nemo_style_aligner.models.restore import BaseModel, open_base_model
from nemo_style_aligner.parallel.agreement import on_first_rank
from nemo_style_aligner.rl.experience import AdvantageSettings
from nemo_style_aligner.rl.local_critic import LocalCritic
from nemo_style_aligner.rl.loop import RLTrainer
from nemo_style_aligner.rl.rewards import RewardSum
from nemo_style_aligner.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.rl.rollouts.prompts import build_prompt_sources
from nemo_style_aligner.rl.rollouts.setup import (
    build_generator,
    build_rollout_rank,
    open_work_queue,
    require_kv_cache,
    response_text,
    sampling_params,
)
from nemo_style_aligner.rl.settings import RLSettings
from nemo_style_aligner.services.score_client import SequencesToScore
from nemo_style_aligner.serving.policy import PolicyServer
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.timers import ScopedTimer, peak_meter


def run_actor(cfg: DictConfig) -> int:
    """Train a policy, or generate or score for the ranks that do; return the job's exit status. Collective.

    For errors see `build_ppo_trainer`.
    """
    channel = roles.channel()
    if channel is not None and channel.serves:
        return serve_in_job(cfg, channel)
    if roles.is_rollout_rank():
        return serve_rollouts(cfg)
    run = start_run(cfg)
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    register_model(cfg, run, base)
    trainer = build_ppo_trainer(cfg, run, base)
    trainer.fit()
    trainer.close()
    return run.close()


def build_ppo_trainer(cfg: DictConfig, run: Run, base: BaseModel) -> RLTrainer:
    """Build the trainer with everything it needs, resumed if there is a checkpoint. Collective.

    Waits for the services that it needs, ``remote_critic_rm.timeouts.ready_seconds`` at most.

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
    longest = longest_response + max(prompts.longest for prompts in (train_prompts, val_prompts) if prompts is not None)
    require_kv_cache(cfg, longest)
    policy_server = PolicyServer(cfg, base, longest) if cfg.trainer.ppo.serve_policy.enable else None
    settings = RLSettings.from_config(cfg, train_prompts.batches_per_epoch)
    vocab_size = min(base.tokenizer.vocab_size, base.architecture.vocab_size)
    sequences = SequencesToScore(longest, vocab_size, base.tokenizer.fingerprint())
    estimator = settings.advantages.estimator
    scorer = build_scorer(cfg, run, estimator, base, sequences)  # the secret may be missing: before weights are read
    if isinstance(scorer.rewards, RewardSum):
        scorer.rewards.check(train_prompts.lines() | ({} if val_prompts is None else val_prompts.lines()))
    teacher = open_teacher(cfg, base, sequences)
    announce_placement(cfg, base, scorer, teacher)
    if isinstance(scorer.values, LocalCritic):
        announce_checkpoints(run, base, scorer.values.base)
        load_local_critic(run, scorer.values)
    scorer.load_models()  # first: while weights arrive, the policy's optimizer takes no memory
    actor = build_actor(cfg, base, base.load(), settings, teacher)
    ready_seconds = float(cfg.remote_critic_rm.timeouts.ready_seconds)
    with activity.phase("waiting for the services"), activity.bounded(ready_seconds):
        scorer.wait_until_ready(ready_seconds, sequences)
    collector = RolloutCollector(
        build_generator(cfg, actor.model, base.tokenizer, longest, queue),
        scorer,
        base.tokenizer,
        response_text(cfg, base.tokenizer),
        scoring_batch_size=int(cfg.model.ppo.rollout_micro_batch_size),
        follower=policy_server,
    )
    trainer = RLTrainer(
        settings,
        actor,
        collector,
        train_prompts,
        val_prompts,
        run.checkpoints,
        run.metrics,
        run.control,
        ScopedTimer(take_peak=peak_meter()),
    )
    run.note_format(train_prompts.written)
    trainer.profile = cfg.trainer.profile
    run.resume(cfg, actor.model, actor.optimizer, trainer)
    actor.optimizer.schedule.warn_if_nothing_decays()
    if trainer.critic is not None:
        trainer.critic.begin()
    return trainer


def load_local_critic(run: Run, local: LocalCritic) -> None:
    """Load the critic in this job, and have the checkpoints keep it. Collective."""
    critic = local.load()
    run.checkpoints.beside = {"critic": (critic.model, critic.optimizer)}
    began_with = on_first_rank(lambda: critic_of_run(local.base.path, local.base.identity()))
    run.checkpoints.run_settings = {**(run.checkpoints.run_settings or {}), **began_with}
    critic.optimizer.schedule.warn_if_nothing_decays()


def serve_rollouts(cfg: DictConfig) -> int:
    """Run a rank that only generates (``trainer.ppo.rollout_devices``) until the job ends; return its exit status."""
    channel = roles.channel()
    if channel is None or not channel.is_rollout_rank:
        raise RuntimeError("this rank trains: trainer.ppo.rollout_devices does not make it a rollout rank")
    watchdog = start_watchdog(cfg.exp_manager.watchdog_minutes, log_directory(cfg.exp_manager))
    start_timeline(cfg.exp_manager, log_directory(cfg.exp_manager))
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    status = build_rollout_rank(cfg, channel, base.architecture, base.dtype, base.tokenizer).serve()
    if watchdog is not None:
        watchdog.stop()
    return status


def build_actor(
    cfg: DictConfig, base: BaseModel, model: MegatronModel, settings: RLSettings, teacher: BaseModel | None = None
) -> Actor:
    """Build the policy, its optimizer, and if they are on these ranks, the initial policy and the teacher."""
    reference, placement = None, cfg.trainer.ppo.reference_policy_placement
    if has_reference_here(cfg):
        # Frozen before a checkpoint is loaded: the penalty refers to the model that the run started from.
        reference = frozen_policy(model, base, placement)
    per_prompt = settings.top_n_rollouts or cfg.trainer.ppo.num_rollouts_per_prompt
    samples = cfg.model.ppo.num_rollout_samples * per_prompt
    updates_per_step = samples // settings.global_batch_size * settings.num_ppo_epochs
    schedule = Schedule.from_config(cfg.model.optim, settings.max_steps * updates_per_step)
    clip, offload = float(cfg.trainer.ppo.gradient_clip_val or 0.0), bool(cfg.model.ppo.offload_adam_states)
    if cfg.trainer.ppo.teacher.devices:
        teacher = None
    optimizer = Optimizer(model, cfg.model.optim, schedule, clip, settings.nonfinite, offload=offload)
    keep_passes(model, reference, cfg.model.ppo.keep_activations, settings.global_batch_size)
    return Actor(
        model,
        optimizer,
        reference,
        teacher=None if teacher is None else FrozenModel(teacher.load(trainable=False), placement),
        training_batching=training_batching(cfg.model),
        forward_batching=forward_batching(cfg.model.ppo),
        temperature=sampling_params(cfg).logprob_temperature,
        loss=loss_settings(cfg, settings.advantages),
    )


def loss_settings(cfg: DictConfig, advantages: AdvantageSettings) -> LossSettings:
    """What the policy's updates minimise."""
    trainer, model = cfg.trainer.ppo, cfg.model.ppo
    low = float(model.ratio_eps)
    constant = trainer.loss_constant_length or model.length_params.max_length
    return LossSettings(
        policy_loss=find_policy_loss(trainer.policy_loss),
        clip_low=low,
        clip_high=low if model.ratio_eps_high is None else float(model.ratio_eps_high),
        dual_clip=trainer.dual_clip,
        ratio_cap=float(model.cispo_ratio_max),
        aggregation=trainer.loss_aggregation,
        constant_length=int(constant),
        kl_coef=float(trainer.initial_policy_kl_penalty) if trainer.kl_in == "loss" else 0.0,
        kl_estimator=advantages.kl_estimator,
        kl_clamp=advantages.kl_clamp,
        entropy_bonus=float(model.entropy_bonus),
    )
