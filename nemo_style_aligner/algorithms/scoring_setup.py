"""Builds what scores samples from the actor job's config: reward sources, and the critic where one is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.algorithms.job_setup import Run
from nemo_style_aligner.parallel.ending import fail_job
from nemo_style_aligner.rl.estimators import Estimator
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.reward_config import build_reward_source, reward_specs
from nemo_style_aligner.rl.rewards import RemoteRewards, RewardSource
from nemo_style_aligner.rl.rollouts.setup import shared_token
from nemo_style_aligner.rl.scoring import Scorer
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.servers.exactly_once.journal import CriticJournal
from nemo_style_aligner.servers.http_client import ClientLimits
from nemo_style_aligner.servers.http_connection import server_url
from nemo_style_aligner.servers.reward_client import RewardClient

_INTERNAL_ERRORS = 3  # that are borne: a service that lost a rank answers 500 before it ends, and may be restarted


def build_scorer(cfg: DictConfig, run: Run, estimator: Estimator) -> Scorer:
    """The reward source of the job, and its critic if the estimator needs values."""
    critic = build_remote_critic(cfg, run) if estimator.needs_values else None
    service: Callable[[], RewardSource] = lambda: _reward_service(cfg) if critic is None else critic  # noqa: E731
    rewards = service() if cfg.trainer.ppo.rewards is None else _listed_rewards(cfg, service)
    timeouts = cfg.remote_critic_rm.timeouts
    silence = 2 * sum(float(timeouts[key]) for key in ("total_seconds", "restart_seconds"))
    described = "the rewards" if critic is None else "the critic and the rewards"
    return Scorer(rewards, critic, silence, described)


def _listed_rewards(cfg: DictConfig, service: Callable[[], RewardSource]) -> RewardSource:
    listed: Any = OmegaConf.to_container(cfg.trainer.ppo.rewards, resolve=True)
    functions = cfg.trainer.ppo.reward_functions
    asks_others = any(spec.kind == "url" for spec in reward_specs(listed))
    return build_reward_source(
        listed,
        service=service,
        limits=_limits(cfg),
        token=shared_token(cfg) if asks_others else None,  # what asks nobody needs no secret
        threads=functions.threads,
        seconds=float(functions.seconds),
    )


def _reward_service(cfg: DictConfig) -> RewardSource:
    """The reward model's service, where there is no critic."""
    section = cfg.remote_critic_rm.reward_model
    client = RewardClient(
        server_url(section.ip, section.port),
        section.name,
        limits=_limits(cfg),
        token=shared_token(cfg),
        pad_to_length=cfg.remote_critic_rm.pad_to_length,
    )
    return RemoteRewards(client)


def build_remote_critic(cfg: DictConfig, run: Run) -> RemoteCritic:
    """The critic in its own job."""
    section = cfg.remote_critic_rm
    journal = CriticJournal(run.log_dir / "critic_journal", int(section.journal_max_gibibytes * 2**30))
    client = build_critic_client(cfg)
    return RemoteCritic(client, journal if dist.get_rank() == 0 else None, section.trained_critic)


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


def build_critic_client(cfg: DictConfig) -> CriticClient:
    """This rank's client of the critic and reward service."""
    limits, training = _limits(cfg), float(cfg.remote_critic_rm.timeouts.training_seconds)
    train_limits = dataclasses.replace(
        limits,
        read_s=training / 2,
        total_s=training,
        too_slow="give it more ranks, or both sides more time for training and saving (the service's "
        "command_timeout_seconds, and remote_critic_rm.timeouts.training_seconds here)",
    )
    return CriticClient(
        cfg.remote_critic_rm,
        token=shared_token(cfg),
        infer_limits=limits,
        train_limits=train_limits,
        on_lost=fail_job,
    )
