"""Builds a critic: for the service in a job of its own, or for the actor's job (``placement=flatten``)."""

from __future__ import annotations

from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.jobs.job_setup import forward_batching, training_batching
from nemo_style_aligner.trainer.models.critic import Critic
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule


def make_critic(
    config: schema.Critic, model: MegatronModel, head: RewardHeadConfig, frozen: FrozenWeights | None
) -> Critic:
    """The critic whose weights ``model`` has, and its optimizer.

    Args:
        config: of the critic's job, or `critic_config`.
        frozen: a reward model's weights that may take the place of the critic's.
    """
    batch = config.model.global_batch_size
    critic = Critic(
        model,
        make_optimizer(config, model),
        head,
        training_batching=training_batching(config.model),
        global_batch_size=batch,
        forward_batching=forward_batching(config.model),
        loss_clip=config.model.loss_clip_val or 0.0,
    )
    keep_passes(model, frozen, config.model.keep_activations, batch)
    return critic


def make_optimizer(config: schema.Critic, model: MegatronModel) -> Optimizer:
    """A critic's optimizer, which has made no update."""
    ppo, optim = config.trainer.ppo, config.model.optim
    clip, offload = ppo.gradient_clip_val or 0.0, bool(config.model.offload_adam_states)
    return Optimizer(model, optim, Schedule.from_config(optim, ppo.max_steps), clip, ppo, offload=offload)
