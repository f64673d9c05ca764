"""The settings of a PPO run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from omegaconf import DictConfig

from nemo_style_aligner.jobs.training_loop import LoopSettings, step_limit
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.rl.experience import AdvantageSettings


@dataclasses.dataclass(frozen=True)
class PPOSettings(LoopSettings):
    """`LoopSettings` and those of PPO (config keys of ``trainer.ppo``, other ones in brackets).

    Attributes:
        critic_warmup_steps: rounds in which only the critic learns, before the first step.
        num_ppo_epochs: passes of the policy over the rollouts in each step; the critic makes one.
        global_batch_size: sequences per policy update [model.global_batch_size].
        seed: of the order of samples in updates, and of sampling [model.seed].
        num_table_rows: sample responses logged per step.
        unload_engine: give the engine's memory back while training [trt_llm.unload_engine_train].
        staleness: steps by which the weights that generate rollouts are behind those that train on them.
        takes_engine_logprobs: the policy's log-probs are those that the engine reported [policy_logprobs].
        advantages: how rewards become advantages.
        nonfinite: what to do about NaN and Inf [on_nonfinite].
    """

    critic_warmup_steps: int
    num_ppo_epochs: int
    global_batch_size: int
    seed: int
    num_table_rows: int
    unload_engine: bool
    staleness: int
    takes_engine_logprobs: bool
    advantages: AdvantageSettings
    nonfinite: NonFinitePolicy

    @classmethod
    def from_config(cls, cfg: DictConfig, steps_per_epoch: int) -> PPOSettings:
        """Read a job's config; ``steps_per_epoch``: PPO steps in one pass over the prompts."""
        ppo = cfg.trainer.ppo
        bounds = ppo.importance_sequence_bounds
        max_epochs, last_step = int(ppo.max_epochs), step_limit(ppo)
        return cls(
            max_steps=min(steps_per_epoch * max_epochs, last_step),
            max_epochs=max_epochs,
            step_limit=last_step,
            val_check_interval=int(ppo.val_check_interval or 0),
            save_interval=int(ppo.save_interval or 0),
            critic_warmup_steps=int(ppo.critic_warmup_steps or 0),
            num_ppo_epochs=int(ppo.num_ppo_epochs),
            global_batch_size=int(cfg.model.global_batch_size),
            seed=int(cfg.model.seed),
            num_table_rows=int(ppo.num_table_rows),
            unload_engine=bool(ppo.trt_llm.unload_engine_train),
            staleness=int(ppo.staleness),
            takes_engine_logprobs=ppo.policy_logprobs == "engine",
            advantages=AdvantageSettings(
                kl_coef=float(ppo.initial_policy_kl_penalty),
                kl_estimator=ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1"),
                kl_clamp=ppo.kl_clamp,
                gamma=float(ppo.discount_factor),
                lam=float(ppo.gae_lambda),
                normalize=bool(ppo.normalize_advantages),
                unbiased=bool(ppo.advantage_whitening_unbiased),
                mask_truncated=bool(ppo.mask_truncated),
                importance_weight_cap=ppo.importance_weight_cap,
                importance_sequence_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            ),
            nonfinite=NonFinitePolicy.from_config(ppo),
        )
