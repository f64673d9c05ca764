"""The settings of a run, read from the actor job's config."""

from __future__ import annotations

import dataclasses

from omegaconf import DictConfig

from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.rl.estimators import find_estimator
from nemo_style_aligner.rl.experience import AdvantageSettings
from nemo_style_aligner.training.loop import LoopSettings, step_limit


@dataclasses.dataclass(frozen=True)
class RLSettings(LoopSettings):
    """`LoopSettings` and those of an algorithm's step (config keys of ``trainer.ppo``, other ones in brackets).

    Attributes:
        critic_warmup_steps: rounds in which only the critic learns, before the first step.
        num_ppo_epochs: passes of the policy over the rollouts in each step; the critic makes one.
        global_batch_size: sequences per policy update [model.global_batch_size].
        seed: of the order of samples in updates, and of sampling [model.seed].
        num_table_rows: sample responses logged per step.
        saves_samples: keep every training sample whole [save_samples].
        unload_engine: give the engine's memory back while training [trt_llm.unload_engine_train].
        staleness: steps by which the weights that generate rollouts are behind those that train on them.
        takes_engine_logprobs: the policy's log-probs are those that the engine reported [policy_logprobs].
        sampling_rounds: how often prompts are drawn for a step, at most, until enough groups have rewards that differ
            [dynamic_sampling]; 1: once, whatever the rewards.
        top_rollouts: of each prompt's responses, train on so many, those with the largest rewards; None: on all of them
            [top_n_rollouts].
        advantages: how rewards become advantages.
        nonfinite: what to do about NaN and Inf [on_nonfinite].
    """

    critic_warmup_steps: int
    num_ppo_epochs: int
    global_batch_size: int
    seed: int
    num_table_rows: int
    saves_samples: bool
    unload_engine: bool
    staleness: int
    takes_engine_logprobs: bool
    sampling_rounds: int
    top_rollouts: int | None
    advantages: AdvantageSettings
    nonfinite: NonFinitePolicy

    @classmethod
    def from_config(cls, cfg: DictConfig, steps_per_epoch: int) -> RLSettings:
        """Read a job's config; ``steps_per_epoch``: steps in one pass over the prompts."""
        ppo = cfg.trainer.ppo
        bounds, drawing = ppo.importance_sequence_bounds, ppo.dynamic_sampling
        estimator = find_estimator(ppo.estimator)
        normalize = estimator.whitens if ppo.normalize_advantages is None else bool(ppo.normalize_advantages)
        max_epochs, last_step = int(ppo.max_epochs), step_limit(ppo)
        return cls(
            max_steps=min(steps_per_epoch * max_epochs, last_step),
            max_epochs=max_epochs,
            step_limit=last_step,
            val_check_interval=int(ppo.val_check_interval or 0),
            save_interval=int(ppo.save_interval or 0),
            critic_warmup_steps=int(ppo.get("critic_warmup_steps") or 0),  # not in jobs without critics
            num_ppo_epochs=int(ppo.num_ppo_epochs),
            global_batch_size=int(cfg.model.global_batch_size),
            seed=int(cfg.model.seed),
            num_table_rows=int(ppo.num_table_rows),
            saves_samples=bool(ppo.save_samples),
            unload_engine=bool(ppo.trt_llm.unload_engine_train),
            staleness=int(ppo.staleness),
            takes_engine_logprobs=ppo.policy_logprobs == "engine",
            sampling_rounds=int(drawing.max_rounds) if drawing.enable else 1,
            top_rollouts=ppo.top_n_rollouts,
            advantages=AdvantageSettings(
                estimator=estimator,
                kl_coef=float(ppo.initial_policy_kl_penalty) if ppo.kl_in == "reward" else 0.0,
                kl_estimator=ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1"),
                kl_clamp=ppo.kl_clamp,
                gamma=float(ppo.discount_factor),
                lam=float(ppo.get("gae_lambda", 1.0)),  # of gae alone, which needs a critic
                normalize=normalize,
                unbiased=bool(ppo.advantage_whitening_unbiased),
                mask_truncated=bool(ppo.mask_truncated),
                importance_weight_cap=ppo.importance_weight_cap,
                importance_sequence_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
                max_length=int(cfg.model.ppo.length_params.max_length),
                overlong_buffer=int(ppo.overlong.buffer_tokens),
                overlong_penalty=float(ppo.overlong.penalty),
            ),
            nonfinite=NonFinitePolicy.from_config(ppo),
        )
