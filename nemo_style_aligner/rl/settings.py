"""The settings of a run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from omegaconf import DictConfig

from nemo_style_aligner.config.schema import KLEstimator
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.rl.estimators import find_estimator
from nemo_style_aligner.rl.experience import AdvantageSettings
from nemo_style_aligner.training.loop import LoopSettings, step_limit


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    def from_config(cls, cfg: DictConfig, steps_per_epoch: int) -> RLSettings:
        """Read a job's config; ``steps_per_epoch``: steps in one pass over the prompts."""
        ppo = cfg.trainer.ppo
        drawing = ppo.dynamic_sampling
        estimator = find_estimator(ppo.estimator)
        whitens = estimator.whitens if ppo.normalize_advantages is None else ppo.normalize_advantages
        max_epochs, last_step = int(ppo.max_epochs), step_limit(ppo)
        return cls(
            max_steps=min(steps_per_epoch * max_epochs, last_step),
            max_epochs=max_epochs,
            step_limit=last_step,
            val_check_interval=int(ppo.val_check_interval or 0),
            val_check_at_start=bool(ppo.val_check_at_start),
            save_interval=int(ppo.save_interval or 0),
            critic_warmup_steps=int(ppo.get("critic_warmup_steps") or 0),  # not in jobs without critics
            num_ppo_epochs=int(ppo.num_ppo_epochs),
            global_batch_size=int(cfg.model.global_batch_size),
            seed=int(cfg.model.seed),
            num_table_rows=int(ppo.num_table_rows),
            save_samples=bool(ppo.save_samples),
            unload_engine=bool(ppo.trt_llm.unload_engine_train),
            staleness=int(ppo.staleness),
            takes_engine_logprobs=ppo.policy_logprobs == "engine",
            sampling_rounds=int(drawing.max_rounds) if drawing.enable else 1,
            top_n_rollouts=ppo.top_n_rollouts,
            advantages=AdvantageSettings(
                estimator=estimator,
                kl_coef=float(ppo.initial_policy_kl_penalty) if ppo.kl_in == "reward" else 0.0,
                kl_estimator=kl_estimator(ppo),
                kl_clamp=ppo.kl_clamp,
                discount_factor=float(ppo.discount_factor),
                gae_lambda=float(ppo.get("gae_lambda", 1.0)),  # of gae alone, which needs a critic
                teacher_weight=float(ppo.teacher.weight),
                normalize_advantages=whitens,
                advantage_whitening_unbiased=bool(ppo.advantage_whitening_unbiased),
                mask_truncated=bool(ppo.mask_truncated),
                importance_weight_cap=ppo.importance_weight_cap,
                importance_sequence_bounds=ppo.importance_sequence_bounds and tuple(ppo.importance_sequence_bounds),
                max_length=int(cfg.model.ppo.length_params.max_length),
                overlong_buffer=int(ppo.overlong.buffer_tokens),
                overlong_penalty=float(ppo.overlong.penalty),
            ),
            nonfinite=NonFinitePolicy.from_config(ppo),
        )


def kl_estimator(ppo: DictConfig) -> KLEstimator:
    """How the KL divergence from the initial policy is estimated; ``ppo``: the section ``trainer.ppo``."""
    chosen: KLEstimator = ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1")
    return chosen
