"""The settings of a run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from nemo_style_aligner.config.schema import ActorLoop, PPOActor
from nemo_style_aligner.rl.estimators import find_estimator
from nemo_style_aligner.rl.experience import AdvantageSettings
from nemo_style_aligner.training.loop import LoopSettings, limit_of


@dataclasses.dataclass(frozen=True)
class RLSettings(LoopSettings):
    """`LoopSettings` and those of an algorithm's step: keys of ``trainer.ppo`` and ``model`` (``config/schema.py``)."""

    ppo: ActorLoop
    global_batch_size: int
    seed: int
    advantages: AdvantageSettings

    @classmethod
    def from_config(cls, config: PPOActor, steps_per_epoch: int) -> RLSettings:
        """Those of a job; ``steps_per_epoch``: steps in one pass over the prompts."""
        ppo, model = config.trainer.ppo, config.model
        estimator = find_estimator(ppo.estimator)
        whitens = estimator.whitens if ppo.normalize_advantages is None else ppo.normalize_advantages
        return cls(
            max_steps=min(steps_per_epoch * ppo.max_epochs, limit_of(ppo.max_steps)),
            max_epochs=ppo.max_epochs,
            step_limit=limit_of(ppo.max_steps),
            val_check_interval=ppo.val_check_interval or 0,
            save_interval=ppo.save_interval or 0,
            ppo=ppo,
            global_batch_size=model.global_batch_size,
            seed=model.seed,
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
        )
