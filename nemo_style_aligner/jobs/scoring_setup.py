"""Builds what scores samples from the actor job's config: reward sources, and the critic where one is needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.checkpoints.nemo_archive import require_reward_head, require_weights
from nemo_style_aligner.config.loading import ConfigError
from nemo_style_aligner.jobs.critic_setup import make_critic
from nemo_style_aligner.jobs.job_setup import Run, forward_batching
from nemo_style_aligner.jobs.job_view import TEACHER_ARCHIVE, as_served
from nemo_style_aligner.jobs.placement import (
    CRITIC_ARCHIVE,
    critic_config,
    frozen_spec,
    has_critic_apart,
    has_critic_here,
    has_reward_model_here,
)
from nemo_style_aligner.launch import roles
from nemo_style_aligner.launch.ending import fail_job
from nemo_style_aligner.launch.roles import CRITIC, REFERENCE, TEACHER
from nemo_style_aligner.models.critic import Critic
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.restore import BaseModel, open_base_model, require_same_tokenizer
from nemo_style_aligner.rl.estimators import Estimator
from nemo_style_aligner.rl.local_critic import LocalCritic
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.remote_logprobs import RemoteLogprobs
from nemo_style_aligner.rl.reward_config import RewardSpec, build_reward_source, reward_specs
from nemo_style_aligner.rl.reward_models import ModelRewards
from nemo_style_aligner.rl.rewards import RemoteRewards, RewardSource, RewardSum
from nemo_style_aligner.rl.rollouts.setup import shared_token
from nemo_style_aligner.rl.scoring import Scorer
from nemo_style_aligner.services.client import CriticClient
from nemo_style_aligner.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.services.http_client import ClientLimits, server_url
from nemo_style_aligner.services.reward_client import RewardClient, SequencesToScore

_INTERNAL_ERRORS = 3  # that are borne: a service that lost a rank answers 500 before it ends, and may be restarted


def build_scorer(
    cfg: DictConfig, run: Run, estimator: Estimator, policy: BaseModel, sequences: SequencesToScore
) -> Scorer:
    """What scores the job's samples: rewards, a critic if the estimator needs values, frozen models on ranks of their
    own; no weights are read.

    Args:
        policy: whose responses are scored.
        sequences: what they are.

    Raises:
        ConfigError, CheckpointMismatchError: a reward model in this job does not fit.
    """
    critic: RemoteCritic | LocalCritic | None = None
    beside_critic: ModelRewards | None = None
    models: list[ModelRewards] = []
    remote = _as_placed(cfg)
    if estimator.needs_values and has_critic_here(cfg) and not has_critic_apart(cfg):
        critic, beside_critic = build_local_critic(cfg, policy, sequences)
    elif estimator.needs_values:
        critic = build_remote_critic(cfg, remote, run)

    def service() -> RewardSource:
        if isinstance(critic, RemoteCritic) and remote.combine_rm_and_critic_server:
            return critic
        if beside_critic is None:
            return _reward_service(cfg)
        models.append(beside_critic)
        return beside_critic

    def reward_model(spec: RewardSpec, entry: str) -> RewardSource:
        if spec.devices:
            return RemoteRewards(_client(cfg, entry, "rewards"))
        models.append(_reward_model(cfg, policy, sequences, spec.source, f"{entry}.source"))
        return models[-1]

    rewards = service() if cfg.trainer.ppo.rewards is None else build_listed_rewards(cfg, service, reward_model)
    timeouts = cfg.remote_critic_rm.timeouts
    silence = 2 * sum(float(timeouts[key]) for key in ("total_seconds", "restart_seconds"))
    others = {frozen_spec(cfg, role).name: role for role in (REFERENCE, TEACHER) if role in roles.ranks_apart(cfg)}
    asked = ("critic", *others, "rewards") if isinstance(critic, RemoteCritic) else (*others, "rewards")
    logprobs = {f"{name}_logprobs": RemoteLogprobs(_client(cfg, role, "logprobs")) for name, role in others.items()}
    return Scorer(rewards, critic, silence, " and ".join(f"the {name}" for name in asked), models, logprobs)


def _client(cfg: DictConfig, role: str, output: Literal["rewards", "logprobs"]) -> RewardClient:
    """Of a frozen model on ranks of its own."""
    url, name = server_url(*_address(role)), frozen_spec(cfg, role).name
    return RewardClient(
        url, name, limits=_limits(cfg), token=shared_token(cfg), setting=roles.devices_key(role), output=output
    )


def build_listed_rewards(
    cfg: DictConfig, service: Callable[[], RewardSource], reward_model: Callable[[RewardSpec, str], RewardSource]
) -> RewardSum:
    """The sources that an actor's ``trainer.ppo.rewards`` lists; for the others see `build_reward_source`."""
    listed: Any = OmegaConf.to_container(cfg.trainer.ppo.rewards, resolve=True)
    functions = cfg.trainer.ppo.reward_functions
    asks_others = any(spec.kind == "url" for spec in reward_specs(listed))
    return build_reward_source(
        listed,
        service=service,
        reward_model=reward_model,
        limits=_limits(cfg),
        token=shared_token(cfg) if asks_others else None,  # what asks nobody needs no secret
        threads=functions.threads,
        seconds=float(functions.seconds),
    )


def _reward_model(cfg: DictConfig, policy: BaseModel, sequences: SequencesToScore, path: str, key: str) -> ModelRewards:
    """A reward model in this job, if it can score the sequences."""
    base = open_base_model(path, as_served(cfg), key=key)
    require_reward_head(base.path)
    _require_fit(policy, base, sequences, f"{key}={path}")
    head = RewardHeadConfig.from_model_config(base.config)
    return ModelRewards(base, head, forward_batching(cfg.model.ppo), cfg.trainer.ppo.reference_policy_placement)


def open_teacher(cfg: DictConfig, policy: BaseModel, sequences: SequencesToScore) -> BaseModel | None:
    """The teacher of on-policy distillation, if there is one and it fits the policy; no weights are read."""
    if not (path := cfg.trainer.ppo.teacher.restore_from_path):
        return None
    base = open_base_model(path, as_served(cfg), key=TEACHER_ARCHIVE)
    _require_fit(policy, base, sequences, f"{TEACHER_ARCHIVE}={path}", "a teacher")
    return base


def _require_fit(
    policy: BaseModel, base: BaseModel, sequences: SequencesToScore, given: str, role: str = "a reward model"
) -> None:
    """Make sure that a model in this job can score the sequences; ``given`` is the setting that names it."""
    require_same_tokenizer(policy.path, base.path, role)
    require_weights(base.path, base.architecture)
    length = base.max_sequence_length
    if sequences.max_length > length:
        raise ConfigError(
            f"{given} takes sequences of at most {length} tokens, but this job's longest prompt and response may "
            f"have {sequences.max_length} together: lower model.ppo.length_params.max_length or "
            "trainer.ppo.trt_llm.max_input_len"
        )
    if sequences.vocab_size > base.architecture.vocab_size:
        raise ConfigError(
            f"{given}: its token ids end at {base.architecture.vocab_size - 1}, those of this job at "
            f"{sequences.vocab_size - 1}: give {role} that was trained from the policy's base model"
        )


def build_local_critic(
    cfg: DictConfig, policy: BaseModel, sequences: SequencesToScore
) -> tuple[LocalCritic, ModelRewards | None]:
    """The critic in this job and, if they are combined, its reward model; no weights are read."""
    critic_cfg = critic_config(cfg)
    path = critic_cfg.pretrained_checkpoint.restore_from_path
    base = open_base_model(path, critic_cfg, key=CRITIC_ARCHIVE)
    is_combined = bool(critic_cfg.trainer.ppo.combine_rm_and_critic_server)
    if is_combined:
        require_reward_head(base.path)
    _require_fit(policy, base, sequences, f"{CRITIC_ARCHIVE}={path}")
    head = RewardHeadConfig.from_model_config(base.config, merge_attributes=True)

    def build() -> Critic:
        return make_critic(critic_cfg, base.load(head=head, needs_head=is_combined), head, None)

    critic = LocalCritic(base, build, cfg.trainer.ppo.reference_policy_placement)
    if not is_combined:
        return critic, None
    return critic, ModelRewards(base, head, forward_batching(critic_cfg.model), critic_cfg.model.rm_placement)


def _reward_service(cfg: DictConfig) -> RewardSource:
    """The reward model's service, where the critic's job does not have it."""
    section = cfg.remote_critic_rm.reward_model
    client = RewardClient(
        server_url(section.ip, section.port),
        section.name,
        limits=_limits(cfg),
        token=shared_token(cfg),
        pad_to_length=cfg.remote_critic_rm.pad_to_length,
    )
    return RemoteRewards(client)


def build_remote_critic(cfg: DictConfig, remote: DictConfig, run: Run) -> RemoteCritic:
    """The critic in its own job or on ranks of its own, as ``remote`` says."""
    journal = CriticJournal(run.log_dir / "critic_journal")
    client = build_critic_client(cfg, remote)
    return RemoteCritic(client, journal if dist.get_rank() == 0 else None, remote.trained_critic)


def _as_placed(cfg: DictConfig) -> DictConfig:
    """``remote_critic_rm``; of a critic on ranks of its own, with the address that they have told."""
    remote: DictConfig = cfg.remote_critic_rm.copy()
    if has_critic_apart(cfg):
        remote.critic.ip, remote.critic.port = _address(CRITIC)
        remote.combine_rm_and_critic_server = has_reward_model_here(cfg)
    return remote


def _address(role: str) -> tuple[str, int]:
    """Where ranks of this job that are set apart serve; waits for them to say it."""
    channel = roles.channel()
    assert channel is not None
    host, port = json.loads(channel.read(f"{role}/address"))
    return host, port


def _limits(cfg: DictConfig) -> ClientLimits:
    """Of requests for scores."""
    timeouts = cfg.remote_critic_rm.timeouts
    return ClientLimits(
        connect_s=float(timeouts.connect_seconds),
        read_s=float(timeouts.read_seconds),
        total_s=float(timeouts.total_seconds),
        away_s=float(timeouts.restart_seconds),
        internal_errors=_INTERNAL_ERRORS,
    )


def build_critic_client(cfg: DictConfig, remote: DictConfig) -> CriticClient:
    """This rank's client of the critic and reward service at ``remote``'s address."""
    limits, training = _limits(cfg), float(cfg.remote_critic_rm.timeouts.training_seconds)
    train_limits = dataclasses.replace(
        limits,
        read_s=training / 2,
        total_s=training,
        too_slow="give it more ranks, or both sides more time for training and saving (the service's "
        "command_timeout_seconds, and remote_critic_rm.timeouts.training_seconds here)",
    )
    return CriticClient(
        remote,
        token=shared_token(cfg),
        infer_limits=limits,
        train_limits=train_limits,
        on_lost=fail_job,
    )
