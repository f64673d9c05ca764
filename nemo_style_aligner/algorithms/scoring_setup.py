"""Builds what scores samples from the actor job's config: reward sources, and the critic where one is needed."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from omegaconf import DictConfig

from nemo_style_aligner.algorithms.job_setup import Run
from nemo_style_aligner.parallel.ending import fail_job
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.rollouts.setup import shared_token
from nemo_style_aligner.rl.scoring import Scorer
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.servers.exactly_once.journal import CriticJournal
from nemo_style_aligner.servers.http_client import ClientLimits

_INTERNAL_ERRORS = 3  # that are borne: a service that lost a rank answers 500 before it ends, and may be restarted


def build_critic_client(cfg: DictConfig) -> CriticClient:
    """This rank's client of the critic and reward service."""
    section = cfg.remote_critic_rm
    timeouts = section.timeouts
    limits = ClientLimits(
        connect_s=float(timeouts.connect_seconds),
        read_s=float(timeouts.read_seconds),
        total_s=float(timeouts.total_seconds),
        away_s=float(timeouts.restart_seconds),
        internal_errors=_INTERNAL_ERRORS,
    )
    training = float(timeouts.training_seconds)
    train_limits = dataclasses.replace(
        limits,
        read_s=training / 2,
        total_s=training,
        too_slow="give it more ranks, or both sides more time for training and saving (the service's "
        "command_timeout_seconds, and remote_critic_rm.timeouts.training_seconds here)",
    )
    return CriticClient(
        section, token=shared_token(cfg), infer_limits=limits, train_limits=train_limits, on_lost=fail_job
    )


def _ready_seconds(cfg: DictConfig) -> float:
    return float(cfg.remote_critic_rm.timeouts.ready_seconds)


def build_remote_critic(cfg: DictConfig, run: Run) -> RemoteCritic:
    """The critic in its own job."""
    section = cfg.remote_critic_rm
    journal = CriticJournal(run.log_dir / "critic_journal", int(section.journal_max_gibibytes * 2**30))
    client = build_critic_client(cfg)
    return RemoteCritic(client, journal if dist.get_rank() == 0 else None, section.trained_critic, _ready_seconds(cfg))


def build_scorer(cfg: DictConfig, run: Run) -> Scorer:
    """The reward source of the job, and its critic if the estimator needs values."""
    critic = build_remote_critic(cfg, run)
    timeouts = cfg.remote_critic_rm.timeouts
    silence = 2 * sum(float(timeouts[key]) for key in ("total_seconds", "restart_seconds"))
    return Scorer(critic, critic, silence, "the critic and the reward service")
