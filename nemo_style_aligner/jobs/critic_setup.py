"""Builds a critic: for the service in a job of its own, or for the actor's job (``placement=flatten``)."""

from __future__ import annotations

from omegaconf import DictConfig

from nemo_style_aligner.jobs.job_setup import forward_batching, training_batching
from nemo_style_aligner.models.critic import Critic
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.kept_passes import keep_passes
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.models.optimizer import Optimizer, Schedule


def make_critic(cfg: DictConfig, model: MegatronModel, head: RewardHeadConfig, frozen: FrozenWeights | None) -> Critic:
    """The critic whose weights ``model`` has, and its optimizer.

    Args:
        cfg: of the critic's job, or `critic_config`.
        frozen: a reward model's weights that may take the place of the critic's.
    """
    critic = Critic(
        model,
        make_optimizer(cfg, model),
        head,
        training_batching=training_batching(cfg.model),
        global_batch_size=int(cfg.model.global_batch_size),
        forward_batching=forward_batching(cfg.model),
        loss_clip=float(cfg.model.loss_clip_val or 0.0),
    )
    keep_passes(model, frozen, cfg.model.keep_activations, int(cfg.model.global_batch_size))
    return critic


def make_optimizer(cfg: DictConfig, model: MegatronModel) -> Optimizer:
    """A critic's optimizer, which has made no update."""
    ppo = cfg.trainer.ppo
    schedule = Schedule.from_config(cfg.model.optim, int(ppo.max_steps))
    clip, offload = float(ppo.gradient_clip_val or 0.0), bool(cfg.model.offload_adam_states)
    return Optimizer(model, cfg.model.optim, schedule, clip, NonFinitePolicy.from_config(ppo), offload=offload)
