"""The settings of a run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from nemo_style_aligner.trainer.config.schema import ActorLoop, PPOActor
from nemo_style_aligner.trainer.rl.estimators import find_estimator
from nemo_style_aligner.trainer.rl.experience import AdvantageSettings
from nemo_style_aligner.trainer.training.loop import LoopSettings, limit_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLSettings(LoopSettings):
    """`LoopSettings` and those of an algorithm's step: keys of ``trainer.ppo`` and ``model`` in the schema."""

    ppo: ActorLoop
    global_batch_size: int
    seed: int
    advantages: AdvantageSettings

    @classmethod
    def from_config(cls, config: PPOActor, steps_per_epoch: int) -> RLSettings:
        """Those of a job; ``steps_per_epoch``: steps in one pass over the prompts."""
        ppo, model = config.trainer.ppo, config.model
        if config.get("trainer.ppo.gae_lambda") is None:  # a job without critics
            ppo = ppo.replaced(gae_lambda=1.0)
        return cls(
            max_steps=min(steps_per_epoch * ppo.max_epochs, limit_of(ppo.max_steps)),
            max_epochs=ppo.max_epochs,
            step_limit=limit_of(ppo.max_steps),
            val_check_interval=ppo.val_check_interval or 0,
            val_check_at_start=ppo.val_check_at_start,
            save_interval=ppo.save_interval or 0,
            ppo=ppo,
            global_batch_size=model.global_batch_size,
            seed=model.seed,
            advantages=AdvantageSettings(ppo, find_estimator(ppo.estimator), model.ppo.length_params.max_length),
        )
