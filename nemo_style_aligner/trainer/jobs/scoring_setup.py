"""Builds what scores samples from the actor job's config: reward sources, and the critic where one is needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import torch.distributed as dist

from nemo_style_aligner.guard.http_client import ClientLimits, server_url
from nemo_style_aligner.trainer.checkpoints.nemo_archive import require_weights
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import ListedReward, PPOActor, RemoteTimeouts
from nemo_style_aligner.trainer.config.schema import RemoteCritic as RemoteCriticKeys
from nemo_style_aligner.trainer.jobs.critic_setup import make_critic
from nemo_style_aligner.trainer.jobs.job_setup import Run, forward_batching
from nemo_style_aligner.trainer.jobs.job_view import TEACHER_ARCHIVE, as_served
from nemo_style_aligner.trainer.jobs.placement import (
    CRITIC_ARCHIVE,
    critic_config,
    frozen_spec,
    has_critic_apart,
    has_critic_here,
    has_reward_model_here,
)
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.ending import fail_job
from nemo_style_aligner.trainer.launch.roles import CRITIC, REFERENCE, TEACHER
from nemo_style_aligner.trainer.models.critic import Critic
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model, require_same_tokenizer
from nemo_style_aligner.trainer.rl.estimators import Estimator
from nemo_style_aligner.trainer.rl.local_critic import LocalCritic
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.reward_config import build_reward_source, kind_of
from nemo_style_aligner.trainer.rl.reward_models import ModelRewards
from nemo_style_aligner.trainer.rl.rewards import RewardSource, RewardSum
from nemo_style_aligner.trainer.rl.rollouts.setup import shared_token
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.critic_service import LogprobService
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.trainer.services.score_client import ScoreClient, SequencesToScore
from nemo_style_aligner.trainer.services.scores import REWARDS, Score

_INTERNAL_ERRORS = 3  # that are borne: a service that lost a rank answers 500 before it ends, and may be restarted


def build_scorer(
    config: PPOActor, run: Run, estimator: Estimator, policy: BaseModel, sequences: SequencesToScore
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
    remote, ppo = _as_placed(config), config.trainer.ppo
    if estimator.needs_values and has_critic_here(config) and not has_critic_apart(config):
        critic, beside_critic = build_local_critic(config, policy, sequences)
    elif estimator.needs_values:
        critic = build_remote_critic(remote, run)

    def service() -> RewardSource:
        if isinstance(critic, RemoteCritic) and remote.combine_rm_and_critic_server:
            return critic
        if beside_critic is None:
            return _reward_service(config.remote_critic_rm)
        models.append(beside_critic)
        return beside_critic

    def reward_model(spec: ListedReward, entry: str) -> RewardSource:
        if spec.devices:
            return _apart(config, entry, [REWARDS])
        models.append(_reward_model(config, policy, sequences, spec.source, f"{entry}.source"))
        return models[-1]

    rewards = service() if ppo.rewards is None else build_listed_rewards(config, ppo.rewards, service, reward_model)
    silence = 2 * (remote.timeouts.total_seconds + remote.timeouts.restart_seconds)
    others = {frozen_spec(config, role).name: role for role in (REFERENCE, TEACHER) if role in roles.ranks_apart(ppo)}
    asked = ("critic", *others, "rewards") if isinstance(critic, RemoteCritic) else (*others, "rewards")
    apart = {name: _apart(config, role, LogprobService.scores) for name, role in others.items()}
    return Scorer(rewards, critic, silence, " and ".join(f"the {name}" for name in asked), models, apart)


def _apart(config: PPOActor, role: str, scores: Sequence[Score]) -> RemoteScores:
    """What a frozen model on ranks of its own gives."""
    client = ScoreClient(
        server_url(*_address(role)),
        frozen_spec(config, role).name,
        scores,
        limits=_limits(config.remote_critic_rm.timeouts),
        token=shared_token(config.remote_critic_rm),
        setting=roles.devices_key(role),
    )
    return RemoteScores(client)


def build_listed_rewards(
    config: PPOActor,
    listed: Sequence[ListedReward],
    service: Callable[[], RewardSource],
    reward_model: Callable[[ListedReward, str], RewardSource],
) -> RewardSum:
    """The sources that an actor's ``trainer.ppo.rewards`` lists; for the others see `build_reward_source`."""
    functions, remote = config.trainer.ppo.reward_functions, config.remote_critic_rm
    asks_others = any(kind_of(reward.source) == "url" for reward in listed)
    return build_reward_source(
        listed,
        service=service,
        reward_model=reward_model,
        limits=_limits(remote.timeouts),
        token=shared_token(remote) if asks_others else None,  # what asks nobody needs no secret
        threads=functions.threads,
        seconds=functions.seconds,
    )


def _reward_model(
    config: PPOActor, policy: BaseModel, sequences: SequencesToScore, path: str, key: str
) -> ModelRewards:
    """A reward model in this job, if it can score the sequences."""
    base, _ = open_base_model(path, as_served(config), key=key)
    base.require_rewards()
    _require_fit(policy, base, sequences, f"{key}={path}")
    head = RewardHeadConfig.from_model_config(base.config)
    return ModelRewards(base, head, forward_batching(config.model), config.trainer.ppo.reference_policy_placement)


def open_teacher(config: PPOActor, policy: BaseModel, sequences: SequencesToScore) -> BaseModel | None:
    """The teacher of on-policy distillation, if there is one and it fits the policy; no weights are read."""
    if not (path := config.trainer.ppo.teacher.restore_from_path):
        return None
    base, _ = open_base_model(path, as_served(config), key=TEACHER_ARCHIVE)
    _require_fit(policy, base, sequences, f"{TEACHER_ARCHIVE}={path}", "a teacher")
    return base


def _require_fit(
    policy: BaseModel, base: BaseModel, sequences: SequencesToScore, given: str, role: str = "a reward model"
) -> None:
    """Make sure that a model in this job can score the sequences; ``given`` is the setting that names it."""
    require_same_tokenizer(policy, base, role)
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
    config: PPOActor, policy: BaseModel, sequences: SequencesToScore
) -> tuple[LocalCritic, ModelRewards | None]:
    """The critic in this job and, if they are combined, its reward model; no weights are read."""
    own = critic_config(config)
    path = own.pretrained_checkpoint.restore_from_path
    base, own = open_base_model(path, own, key=CRITIC_ARCHIVE)
    is_combined = own.trainer.ppo.combine_rm_and_critic_server
    if is_combined:
        base.require_rewards()
    _require_fit(policy, base, sequences, f"{CRITIC_ARCHIVE}={path}")
    head = RewardHeadConfig.from_model_config(base.config, merge_attributes=True)

    def build() -> Critic:
        return make_critic(own, base.load(head=head, needs_head=is_combined), head, None)

    critic = LocalCritic(base, build, config.trainer.ppo.reference_policy_placement)
    if not is_combined:
        return critic, None
    return critic, ModelRewards(base, head, forward_batching(own.model), own.model.rm_placement)


def _reward_service(remote: RemoteCriticKeys) -> RewardSource:
    """The reward model's service, where the critic's job does not have it."""
    section = remote.reward_model
    client = ScoreClient(
        server_url(section.ip, section.port),
        section.name,
        limits=_limits(remote.timeouts),
        token=shared_token(remote),
        pad_to_length=remote.pad_to_length,
    )
    return RemoteScores(client)


def build_remote_critic(remote: RemoteCriticKeys, run: Run) -> RemoteCritic:
    """The critic in its own job or on ranks of its own, as ``remote`` says."""
    journal = CriticJournal(run.log_dir / "critic_journal")
    client = build_critic_client(remote)
    return RemoteCritic(client, journal if dist.get_rank() == 0 else None, remote.trained_critic)


def _as_placed(config: PPOActor) -> RemoteCriticKeys:
    """``remote_critic_rm``; of a critic on ranks of its own, with the address that they have told."""
    remote = config.remote_critic_rm
    if not has_critic_apart(config):
        return remote
    host, port = _address(CRITIC)
    critic = remote.critic.replaced(ip=host, port=port)
    return remote.replaced(critic=critic, combine_rm_and_critic_server=has_reward_model_here(config))


def _address(role: str) -> tuple[str, int]:
    """Where ranks of this job that are set apart serve; waits for them to say it."""
    channel = roles.channel()
    assert channel is not None
    host, port = json.loads(channel.read(f"{role}/address"))
    return host, port


def _limits(timeouts: RemoteTimeouts) -> ClientLimits:
    """Of requests for scores."""
    return ClientLimits(
        connect_s=timeouts.connect_seconds,
        read_s=timeouts.read_seconds,
        total_s=timeouts.total_seconds,
        away_s=timeouts.restart_seconds,
        internal_errors=_INTERNAL_ERRORS,
    )


def build_critic_client(remote: RemoteCriticKeys) -> CriticClient:
    """This rank's client of the critic and reward service at ``remote``'s address."""
    limits, training = _limits(remote.timeouts), remote.timeouts.training_seconds
    train_limits = dataclasses.replace(
        limits,
        read_s=training / 2,
        total_s=training,
        too_slow="give it more ranks, or both sides more time for training and saving (the service's "
        "command_timeout_seconds, and remote_critic_rm.timeouts.training_seconds here)",
    )
    return CriticClient(
        remote,
        token=shared_token(remote),
        infer_limits=limits,
        train_limits=train_limits,
        on_lost=fail_job,
    )
