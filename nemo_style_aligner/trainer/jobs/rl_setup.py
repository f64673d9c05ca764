"""The actor job, the same for every algorithm: what each of its ranks runs, and how it is built from the config."""

from __future__ import annotations

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.trainer.config.loading import log_directory
from nemo_style_aligner.trainer.config.schema import ActorLoop, Policy, PPOActor
from nemo_style_aligner.trainer.jobs.fitting import fit_prompts
from nemo_style_aligner.trainer.jobs.job_setup import (
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
from nemo_style_aligner.trainer.jobs.placement import has_reference_here
from nemo_style_aligner.trainer.jobs.placement_picture import announce_placement
from nemo_style_aligner.trainer.jobs.run_settings import critic_of_run
from nemo_style_aligner.trainer.jobs.scoring_setup import build_scorer, open_teacher
from nemo_style_aligner.trainer.jobs.service_setup import serve_in_job
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.frozen import FrozenModel
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.policy_losses import LossSettings, find_policy_loss
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model
from nemo_style_aligner.trainer.rl.experience import kl_estimator
from nemo_style_aligner.trainer.rl.local_critic import LocalCritic
from nemo_style_aligner.trainer.rl.loop import RLTrainer
from nemo_style_aligner.trainer.rl.rewards import RewardSum
from nemo_style_aligner.trainer.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.trainer.rl.rollouts.prompts import build_prompt_sources, responses_per_prompt
from nemo_style_aligner.trainer.rl.rollouts.setup import (
    build_generator,
    build_rollout_rank,
    compile_engine_ahead,
    episode_journal,
    open_work_queue,
    require_kv_cache,
    response_text,
    sampling_params,
    shared_token,
)
from nemo_style_aligner.trainer.rl.served_policy import PolicyServer
from nemo_style_aligner.trainer.rl.settings import RLSettings
from nemo_style_aligner.trainer.services.score_client import SequencesToScore
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer, peak_meter


def run_actor(config: PPOActor) -> int:
    """Train a policy, or generate or score for the ranks that do; return the job's exit status. Collective.

    For errors see `build_ppo_trainer`.
    """
    channel = roles.channel()
    if channel is not None and channel.serves:
        return serve_in_job(config, channel)
    if roles.is_rollout_rank():
        return serve_rollouts(config)
    run = start_run(config)
    base, config = open_base_model(config.pretrained_checkpoint.restore_from_path, config)
    compile_engine_ahead(config, base.architecture, base.dtype)
    register_model(config, run, base)
    trainer = build_ppo_trainer(config, run, base)
    trainer.fit()
    trainer.close()
    return run.close()


def build_ppo_trainer(config: PPOActor, run: Run, base: BaseModel) -> RLTrainer:
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
    ppo, seed = config.trainer.ppo, config.trainer.ppo.trt_llm.seed
    sampling = sampling_params(config.model.ppo, seed, base.tokenizer)  # its errors are told before weights are read
    queue = open_work_queue(config)
    train_prompts, val_prompts = build_prompt_sources(config, base.tokenizer)
    config = fit_prompts(config, run, train_prompts.batch_size)
    ppo = config.trainer.ppo
    longest_prompt = max(prompts.longest for prompts in (train_prompts, val_prompts) if prompts is not None)
    longest = sampling.max_new_tokens + longest_prompt
    require_kv_cache(ppo.generation, longest)
    served = ppo.serve_policy
    policy_server = (
        PolicyServer(served, base, longest, shared_token(config.remote_critic_rm)) if served.enable else None
    )
    settings = RLSettings.from_config(config, train_prompts.batches_per_epoch)
    vocab_size = min(base.tokenizer.vocab_size, base.architecture.vocab_size)
    sequences = SequencesToScore(longest, vocab_size, base.tokenizer.fingerprint())
    estimator = settings.advantages.estimator
    scorer = build_scorer(config, run, estimator, base, sequences)  # the secret may be missing: before weights are read
    if isinstance(scorer.rewards, RewardSum):
        scorer.rewards.check(train_prompts.lines() | ({} if val_prompts is None else val_prompts.lines()))
    teacher = open_teacher(config, base, sequences)
    announce_placement(config, base, scorer, teacher)
    if isinstance(scorer.values, LocalCritic):
        announce_checkpoints(run, base, scorer.values.base)
        load_local_critic(run, scorer.values)
    scorer.load_models()  # first: while weights arrive, the policy's optimizer takes no memory
    actor = build_actor(config, base, base.load(), settings, teacher)
    ready_seconds = config.remote_critic_rm.timeouts.ready_seconds
    with activity.phase("waiting for the services"), activity.bounded(ready_seconds):
        scorer.wait_until_ready(ready_seconds, sequences)
    collector = RolloutCollector(
        build_generator(config, actor.model, base.tokenizer, longest, queue),
        scorer,
        base.tokenizer,
        response_text(sampling, base.tokenizer),
        scoring_batch_size=config.model.ppo.rollout_micro_batch_size,
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
    trainer.profile = config.trainer.profile
    trainer.journal = episode_journal(config) if run.metrics.rank == 0 else None
    run.resume(config, actor.model, actor.optimizer, trainer)
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


def serve_rollouts(config: PPOActor) -> int:
    """Run a rank that only generates (``trainer.ppo.rollout_devices``) until the job ends; return its exit status."""
    channel = roles.channel()
    if channel is None or not channel.is_rollout_rank:
        raise RuntimeError("this rank trains: trainer.ppo.rollout_devices does not make it a rollout rank")
    log_dir = log_directory(config.exp_manager)
    watchdog = start_watchdog(config.exp_manager.watchdog_minutes, log_dir)
    start_timeline(config.exp_manager, log_dir)
    base, config = open_base_model(config.pretrained_checkpoint.restore_from_path, config)
    compile_engine_ahead(config, base.architecture, base.dtype)
    status = build_rollout_rank(config, channel, base.architecture, base.dtype, base.tokenizer).serve()
    if watchdog is not None:
        watchdog.stop()
    return status


def build_actor(
    config: PPOActor, base: BaseModel, model: MegatronModel, settings: RLSettings, teacher: BaseModel | None = None
) -> Actor:
    """Build the policy, its optimizer, and if they are on these ranks, the initial policy and the teacher."""
    ppo, policy = config.trainer.ppo, config.model.ppo
    reference, placement = None, ppo.reference_policy_placement
    if has_reference_here(ppo):
        # Frozen before a checkpoint is loaded: the penalty refers to the model that the run started from.
        reference = frozen_policy(model, base, placement)
    samples = policy.num_rollout_samples * responses_per_prompt(config)
    updates_per_step = samples // settings.global_batch_size * ppo.num_ppo_epochs
    optim, clip, offload = config.model.optim, ppo.gradient_clip_val or 0.0, policy.offload_adam_states
    schedule = Schedule.from_config(optim, settings.max_steps * updates_per_step)
    if ppo.teacher.devices:
        teacher = None
    optimizer = Optimizer(model, optim, schedule, clip, ppo, offload=offload)
    keep_passes(model, reference, policy.keep_activations, settings.global_batch_size)
    return Actor(
        model,
        optimizer,
        reference,
        teacher=None if teacher is None else FrozenModel(teacher.load(trainable=False), placement),
        training_batching=training_batching(config.model),
        forward_batching=forward_batching(config.model),
        temperature=sampling_params(policy, ppo.trt_llm.seed).logprob_temperature,
        loss=loss_settings(ppo, policy),
        replays_routes=ppo.replay_routes,
    )


def loss_settings(ppo: ActorLoop, policy: Policy) -> LossSettings:
    """What the policy's updates minimise."""
    return LossSettings(
        policy_loss=find_policy_loss(ppo.policy_loss),
        clip_low=policy.ratio_eps,
        clip_high=policy.ratio_eps if policy.ratio_eps_high is None else policy.ratio_eps_high,
        dual_clip=ppo.dual_clip,
        ratio_cap=policy.cispo_ratio_max,
        aggregation=ppo.loss_aggregation,
        constant_length=ppo.loss_constant_length or policy.length_params.max_length,
        kl_coef=ppo.initial_policy_kl_penalty if ppo.kl_in == "loss" else 0.0,
        kl_estimator=kl_estimator(ppo),
        kl_clamp=ppo.kl_clamp,
        entropy_bonus=policy.entropy_bonus,
        trust_region=ppo.trust_region,
        sampling_kl=ppo.sampling_kl,
    )
