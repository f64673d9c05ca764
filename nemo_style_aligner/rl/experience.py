"""From scored rollouts to training data: the formulas of PPO in the order in which they apply."""

from __future__ import annotations

import dataclasses
import logging
import math

import torch

from nemo_style_aligner import functional
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.functional import KLEstimator, masked_mean
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.rl.rollouts.batch import Experience, RolloutBatch
from nemo_style_aligner.servers.client import Scores
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages (config keys of ``trainer.ppo`` in brackets).

    Attributes:
        kl_coef: weight of the KL penalty [initial_policy_kl_penalty].
        kl_estimator: see `functional.kl_penalty` [kl_estimator, or use_absolute_kl].
        kl_clamp: bound of the per-token penalty; None for none [kl_clamp].
        gamma: discount [discount_factor].
        lam: lambda of GAE [gae_lambda].
        normalize: whiten advantages over all tokens of the loss [normalize_advantages].
        unbiased: sample variance in the whitening [advantage_whitening_unbiased].
        mask_truncated: keep responses cut off at the length limit out of the policy's loss [mask_truncated].
        importance_weight_cap: cap of truncated importance sampling; None turns it off [importance_weight_cap].
        importance_sequence_bounds: sequences whose `functional.sequence_ratios` are outside of these are left out of
            the policy's loss; None for no bounds [importance_sequence_bounds].
    """

    kl_coef: float
    kl_estimator: KLEstimator
    kl_clamp: float | None
    gamma: float
    lam: float
    normalize: bool
    unbiased: bool
    mask_truncated: bool
    importance_weight_cap: float | None
    importance_sequence_bounds: tuple[float, float] | None


def leave_out_nonfinite(
    rollouts: RolloutBatch,
    scores: Scores,
    logprobs: torch.Tensor,
    init_logprobs: torch.Tensor | None,
    policy: NonFinitePolicy,
) -> tuple[RolloutBatch, Scores, torch.Tensor, torch.Tensor | None]:
    """Mark samples whose reward, values or log-probs hold NaN or Inf as invalid, and put zeros in their place.

    All ranks hold all samples, so all come to the same result.

    Args:
        rollouts, scores: n sequences of s tokens.
        logprobs, init_logprobs: fp32 [n, s-1], of the policy and, if there is one, of the initial policy.
        policy: what to do about such samples; ``skip`` leaves them out.

    Raises:
        NonFiniteError: there are such samples, and the policy is ``stop`` or no other samples are left.
    """
    mask = rollouts.response_mask()
    parts = {"reward": scores.rewards[:, None], "values": scores.values}
    parts["log-probs"] = functional.zero_where_masked(logprobs, mask)
    if logprobs is not rollouts.engine_logprobs:
        parts["the engine's log-probs"] = functional.zero_where_masked(rollouts.engine_logprobs, mask)
    if init_logprobs is not None:
        parts["the initial policy's log-probs"] = functional.zero_where_masked(init_logprobs, mask)
    valid = torch.ones(len(rollouts), dtype=torch.bool)
    troubles = []
    for name, tensor in parts.items():
        bad = ~tensor.isfinite().all(dim=1)
        valid &= ~bad
        if bad.any():
            samples, prompts = rollouts.sample_ids[bad].tolist(), rollouts.prompt_ids[bad].tolist()
            troubles.append(f"{name} of samples {samples} (prompts {prompts})")
    if not troubles:
        return rollouts, scores, logprobs, init_logprobs
    trouble = "NaN or Inf in " + "; in ".join(troubles)
    if policy.action == "stop" or not valid.any():
        raise NonFiniteError(
            f"{trouble}. These samples were not trained on. Check their prompts, the critic and the reward service, or "
            "set trainer.ppo.on_nonfinite=skip to leave such samples out as long as others remain"
        )
    warn_for_all_ranks(logger, "%s: these samples are left out", trouble)

    def cleared(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.masked_fill(~valid if tensor.ndim == 1 else ~valid[:, None], 0)

    return (
        dataclasses.replace(rollouts, is_valid=valid, engine_logprobs=cleared(rollouts.engine_logprobs)),
        Scores(rewards=cleared(scores.rewards), values=cleared(scores.values)),
        cleared(logprobs),
        None if init_logprobs is None else cleared(init_logprobs),
    )


def make_experience(
    rollouts: RolloutBatch,
    scores: Scores,
    logprobs: torch.Tensor,
    init_logprobs: torch.Tensor | None,
    settings: AdvantageSettings,
    version: int,
) -> tuple[Experience, dict[str, float]]:
    """Compute KL-penalised token rewards, advantages and returns by GAE, whitening, and importance weights.

    Args:
        rollouts, scores: n sequences of s tokens.
        logprobs: fp32 [n, s-1], of the policy: those that PPO's ratio starts from [policy_logprobs].
        init_logprobs: fp32 [n, s-1], of the initial policy; None where there is no KL penalty.
        version: of the policy's present weights, from which staleness is counted.

    Returns:
        The experience, and the step's metrics under NeMo-Aligner's names.
    """
    mask = rollouts.response_mask() * rollouts.is_valid[:, None]
    policy_mask = mask * rollouts.is_end[:, None] if settings.mask_truncated else mask

    if init_logprobs is None:
        init_logprobs = logprobs
    kl = functional.kl_penalty(logprobs, init_logprobs, settings.kl_estimator, settings.kl_clamp) * mask
    rewards = functional.token_rewards(scores.rewards, kl, rollouts.lengths, settings.kl_coef)
    advantages, returns = functional.generalized_advantage_estimation(
        scores.values, rewards, mask, settings.gamma, settings.lam
    )
    importance_weights, trusted = _importance(logprobs, rollouts.engine_logprobs, mask, settings)
    policy_mask = policy_mask * trusted[:, None]
    staleness = version - rollouts.weight_versions
    metrics = {
        **_rollout_metrics(rollouts, scores, kl, rewards, mask),
        **_moments("advantages", advantages, mask),
        **_moments("returns", returns, mask),
        **_moments("values", scores.values, mask),
        **engine_gap(logprobs, rollouts.engine_logprobs, mask),
        "staleness_mean": staleness.float().mean().item(),
        "staleness_max": float(staleness.max()),
        **_importance_metrics(importance_weights, trusted, logprobs - rollouts.engine_logprobs, policy_mask, settings),
    }
    if settings.normalize:
        # Every rank holds all samples, so this is the whitening over all data-parallel ranks.
        advantages = functional.whiten(advantages, policy_mask, settings.unbiased)
    experience = Experience(
        prompt_ids=rollouts.prompt_ids,
        tokens=rollouts.tokens,
        mask=mask,
        policy_mask=policy_mask,
        logprobs=logprobs,
        values=scores.values,
        advantages=advantages,
        returns=returns,
        importance_weights=importance_weights,
    )
    return experience, metrics


def why_nothing_is_learnt(rollouts: RolloutBatch, experience: Experience, settings: AdvantageSettings) -> str | None:
    """Why no response is left for the policy's loss, and what to check; None if any is left."""
    if experience.policy_mask.any():
        return None
    if settings.mask_truncated and not rollouts.is_end.any():
        return (
            f"none of {len(rollouts)} responses has ended by itself, so there is nothing for the policy to learn "
            "(trainer.ppo.mask_truncated): does the model know what ends a response "
            "(model.ppo.sampling_params.end_strings), and is model.ppo.length_params.max_length enough?"
        )
    reasons = {"without an end (mask_truncated)": ~rollouts.is_end} if settings.mask_truncated else {}
    reasons["with NaN or Inf (on_nonfinite=skip)"] = ~rollouts.is_valid
    named = ", ".join(f"{int(left_out.sum())} {reason}" for reason, left_out in reasons.items())
    others = "" if settings.importance_sequence_bounds is None else ", the others outside importance_sequence_bounds"
    return (
        f"all {len(rollouts)} responses are left out of the policy's loss, so there is nothing for it to learn: "
        f"{named}{others}"
    )


def _rollout_metrics(
    rollouts: RolloutBatch, scores: Scores, kl: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """Metrics of lengths, endings, rewards and KL; ``kl``, ``rewards``, ``mask`` fp32 [n, s-1]."""
    valid = rollouts.is_valid
    return {
        "rollout_size": len(rollouts),
        "prompt_lengths": rollouts.prompt_lengths.float().mean().item(),
        "response_lengths": rollouts.lengths.float().mean().item(),
        "generation_length": (rollouts.lengths - rollouts.prompt_lengths).float().mean().item(),
        "fraction_of_samples_properly_ended": rollouts.is_end.float().mean().item(),
        "rewards": scores.rewards[valid].mean().item(),
        "rewards_with_kl": masked_mean(rewards, mask, dim=-1)[valid].mean().item(),
        "init_policy_kl": masked_mean(kl, mask, dim=-1)[valid].mean().item(),
        "nonfinite_samples": float((~valid).sum()),
    }


def _moments(name: str, values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Mean and standard deviation over the tokens of ``mask``."""
    mean = masked_mean(values, mask)
    deviation = masked_mean((values - mean).square(), mask).sqrt()
    return {f"{name}_mean": mean.item(), f"{name}_std": deviation.item()}


def _importance(
    logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor, settings: AdvantageSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights of tokens, [n, s-1]; whether each sequence's ratio is within the bounds (1 or 0), [n].

    The engine's log-probs are of the weights that generated, the trainer's of the present ones: their ratio corrects
    for the engine's numerics and for stale weights alike. PPO's own ratio starts from the present policy
    (arXiv:2110.00641).
    """
    weights, trusted = torch.ones_like(mask), torch.ones_like(mask[:, 0])
    if settings.importance_weight_cap is not None:
        weights = functional.truncated_importance_weights(
            logprobs, engine_logprobs, mask, settings.importance_weight_cap
        )
    if settings.importance_sequence_bounds is not None:
        low, high = settings.importance_sequence_bounds
        ratios = functional.sequence_ratios(logprobs, engine_logprobs, mask)
        trusted = ((ratios >= low) & (ratios <= high)).to(mask.dtype)
    return weights, trusted


def _importance_metrics(
    weights: torch.Tensor,
    trusted: torch.Tensor,
    log_ratios: torch.Tensor,
    policy_mask: torch.Tensor,
    settings: AdvantageSettings,
) -> dict[str, float]:
    """Metrics of what `_importance` returned; weights count over the tokens of the policy's loss."""
    metrics: dict[str, float] = {}
    if settings.importance_weight_cap is not None and policy_mask.any():
        is_cut = log_ratios >= math.log(settings.importance_weight_cap)  # exp may round a weight to below the cap
        metrics["importance_weights"] = masked_mean(weights, policy_mask).item()
        metrics["importance_truncated"] = masked_mean(is_cut.to(policy_mask.dtype), policy_mask).item()
        metrics["importance_effective_share"] = functional.effective_sample_share(weights, policy_mask).item()
    if settings.importance_sequence_bounds is not None:
        metrics["importance_masked_sequences"] = 1.0 - trusted.mean().item()
    return metrics


def engine_gap(trainer_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far the generation engine's log-probs are from the trainer's, over response tokens.

    ``engine_kl`` is the k3 estimate of KL(engine || trainer).
    """
    difference = functional.zero_where_masked(engine_logprobs - trainer_logprobs, mask)
    return {
        "engine_logprob_gap_mean": masked_mean(difference.abs(), mask).item(),
        "engine_logprob_gap_max": difference.abs().max().item(),
        "engine_kl": masked_mean(functional.kl_penalty(engine_logprobs, trainer_logprobs, "k3"), mask).item(),
    }
