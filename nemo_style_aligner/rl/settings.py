"""The settings of a run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from nemo_style_aligner.config.schema import PPOActor
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.rl.estimators import find_estimator
from nemo_style_aligner.rl.experience import AdvantageSettings
from nemo_style_aligner.training.loop import LoopSettings, limit_of


@dataclasses.dataclass(frozen=True)
class RLSettings(LoopSettings):
    """`LoopSettings` and those of an algorithm's step: keys of ``trainer.ppo`` and ``model`` (``config/schema.py``)."""

    critic_warmup_steps: int
    num_ppo_epochs: int
    global_batch_size: int
    seed: int
    num_table_rows: int
    save_samples: bool
    unload_engine: bool  # trt_llm.unload_engine_train
    staleness: int
    takes_engine_logprobs: bool  # policy_logprobs=engine
    sampling_rounds: int  # dynamic_sampling.max_rounds; 1: prompts are drawn once for a step, whatever the rewards
    top_n_rollouts: int | None
    advantages: AdvantageSettings
    nonfinite: NonFinitePolicy

    @classmethod
    def from_config(cls, config: PPOActor, steps_per_epoch: int) -> RLSettings:
        """Those of a job; ``steps_per_epoch``: steps in one pass over the prompts."""
        ppo, model, drawing = config.trainer.ppo, config.model, config.trainer.ppo.dynamic_sampling
        estimator = find_estimator(ppo.estimator)
        whitens = estimator.whitens if ppo.normalize_advantages is None else ppo.normalize_advantages
        return cls(
            max_steps=min(steps_per_epoch * ppo.max_epochs, limit_of(ppo.max_steps)),
            max_epochs=ppo.max_epochs,
            step_limit=limit_of(ppo.max_steps),
            val_check_interval=ppo.val_check_interval or 0,
            save_interval=ppo.save_interval or 0,
            critic_warmup_steps=ppo.critic_warmup_steps,
            num_ppo_epochs=ppo.num_ppo_epochs,
            global_batch_size=model.global_batch_size,
            seed=model.seed,
            num_table_rows=ppo.num_table_rows,
            save_samples=ppo.save_samples,
            unload_engine=ppo.trt_llm.unload_engine_train,
            staleness=ppo.staleness,
            takes_engine_logprobs=ppo.policy_logprobs == "engine",
            sampling_rounds=drawing.max_rounds if drawing.enable else 1,
            top_n_rollouts=ppo.top_n_rollouts,
            advantages=AdvantageSettings(
                estimator=estimator,
                kl_coef=ppo.initial_policy_kl_penalty if ppo.kl_in == "reward" else 0.0,
                kl_estimator=ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1"),
                kl_clamp=ppo.kl_clamp,
                discount_factor=ppo.discount_factor,
                gae_lambda=1.0 if config.get("trainer.ppo.gae_lambda") is None else ppo.gae_lambda,  # not in every job
                teacher_weight=ppo.teacher.weight,
                normalize_advantages=whitens,
                advantage_whitening_unbiased=ppo.advantage_whitening_unbiased,
                mask_truncated=ppo.mask_truncated,
                importance_weight_cap=ppo.importance_weight_cap,
                importance_sequence_bounds=ppo.importance_sequence_bounds and tuple(ppo.importance_sequence_bounds),
                max_length=model.ppo.length_params.max_length,
                overlong_buffer=ppo.overlong.buffer_tokens,
                overlong_penalty=ppo.overlong.penalty,
            ),
            nonfinite=NonFinitePolicy(ppo.on_nonfinite, ppo.max_consecutive_skips),
        )
