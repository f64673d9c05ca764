"""From scored samples to training data: the formulas of a step in the order in which they apply."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

import torch

from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.kinds import KLEstimator
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.config.schema import ActorLoop, Updates
from nemo_style_aligner.trainer.data.datasets import pad_rows
from nemo_style_aligner.trainer.models import functional
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.rl.estimators import Estimator, StepRewards
from nemo_style_aligner.trainer.rl.sample import Rollouts
from nemo_style_aligner.trainer.rl.scoring import Scores
from nemo_style_aligner.trainer.rl.values import ValueBatch
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages: what ``trainer.ppo`` says of it, with the estimator that it names.

    ``max_length``: tokens of the longest response.
    """

    ppo: ActorLoop
    estimator: Estimator
    max_length: int

    @property
    def kl_coef(self) -> float:
        """Of the penalty in the reward; 0 where it is a term of the loss."""
        return self.ppo.initial_policy_kl_penalty if self.ppo.kl_in == "reward" else 0.0

    @property
    def whitens(self) -> bool:
        """As asked for, else as the estimator is defined."""
        asked = self.ppo.normalize_advantages
        return self.estimator.whitens if asked is None else asked


def kl_estimator(ppo: ActorLoop) -> KLEstimator:
    """How the KL divergence from the initial policy is estimated: as one key or the other says."""
    return ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1")


_TOLD = 3  # failed rewards of a step whose reasons are told


@dataclasses.dataclass
class Experience:
    """Scored rollouts, ready to train on. Flat tensors [R] have one number per sampled token of this rank's share.

    Attributes:
        rollouts: the N samples.
        learns: bool [N], samples of the policy's loss: those that count, without truncated responses
            (`mask_truncated`) and sequences outside `importance_sequence_bounds`.
        columns: fp32 [R] each. ``old_logprobs``: the policy's, the trainer's or the engine's (`policy_logprobs`);
            ``advantages``; ``importance_weights``; ``engine_logprobs`` where the loss needs them;
            ``reference_logprobs`` where there is a KL penalty,
            ``teacher_logprobs`` where there is a teacher; ``values`` and ``returns`` where the estimator needs values.
    """

    rollouts: Rollouts
    learns: torch.Tensor
    columns: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.rollouts)

    def minibatch(self, samples: Sequence[int]) -> RaggedBatch:
        """This rank's rows of the samples that the policy is trained on together."""
        return self._rows(samples, self.learns)

    def value_minibatch(self, samples: Sequence[int]) -> RaggedBatch:
        """This rank's rows of the samples that a critic in this job is trained on together."""
        return self._rows(samples, self.rollouts.counts)

    def _rows(self, samples: Sequence[int], wanted: torch.Tensor) -> RaggedBatch:
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[list(samples)] = True
        rollouts, columns = self.rollouts, self.columns
        if rollouts.num_rows is not None:  # means over responses are not means over rows
            lengths = rollouts.own_sampled
            ends = torch.zeros(int(lengths.sum())).index_fill(0, lengths.cumsum(0) - 1, 1.0)
            columns = columns | {"response_lengths": functional.spread(lengths.float(), lengths), "response_ends": ends}
        return rollouts.batch(wanted, columns).rows(rollouts.of_rows(chosen).nonzero()[:, 0])

    def dealt(self, share: torch.Tensor) -> Experience:
        """The same with another share of the samples on each rank, int64 [n]. Collective."""
        rollouts = self.rollouts
        sampled = rollouts.sampled_lengths
        return Experience(
            dataclasses.replace(
                rollouts,
                own=share,
                tokens=rollouts.dealt(share, rollouts.tokens, rollouts.lengths),
                sampled=rollouts.dealt(share, rollouts.sampled, rollouts.lengths),
                engine_logprobs=rollouts.dealt(share, rollouts.engine_logprobs, sampled),
                weight_versions=rollouts.dealt(share, rollouts.weight_versions, sampled),
                routes=rollouts.dealt_routes(share),
            ),
            self.learns,
            {name: rollouts.dealt(share, column, sampled) for name, column in self.columns.items()},
        )

    def value_batch(self) -> ValueBatch | None:
        """What a critic in another job learns: all samples' rows on rank 0, None elsewhere. Collective."""
        rollouts = self.rollouts
        tokens = rollouts.on_first_rank(rollouts.tokens, rollouts.lengths)
        sampled = rollouts.on_first_rank(rollouts.sampled, rollouts.lengths)
        parts = [rollouts.on_first_rank(self.columns[name], rollouts.sampled_lengths) for name in ("returns", "values")]
        if tokens is None or sampled is None:
            return None
        counts = rollouts.counts
        if rollouts.num_rows is not None and rollouts.row_lengths is not None:
            counts, lengths = counts.repeat_interleave(rollouts.num_rows), rollouts.row_lengths.tolist()
            tokens, sampled = torch.cat(list(tokens)).split(lengths), torch.cat(list(sampled)).split(lengths)
        where = torch.nn.utils.rnn.pad_sequence([row[1:] for row in sampled], batch_first=True)
        returns, values = (torch.zeros(where.shape).masked_scatter(where, torch.cat(list(x or ()))) for x in parts)
        mask = (where & counts[:, None]).float()
        return ValueBatch(pad_rows([row.tolist() for row in tokens], 0), returns, values, mask)


_CALLED = {
    "old_logprobs": "log-probs",
    "reference_logprobs": "the initial policy's log-probs",
    "teacher_logprobs": "the teacher's log-probs",
    "values": "values",
}
"""Columns in messages."""


def leave_out_nonfinite(
    rollouts: Rollouts, scores: Scores, columns: Mapping[str, torch.Tensor], policy: Updates
) -> tuple[Rollouts, dict[str, torch.Tensor]]:
    """Have samples whose reward or tokens hold NaN or Inf not count, with zeros in place of their tokens. Collective.

    Args:
        columns: fp32 [R] each; see `make_experience`.
        policy: what to do about such samples; ``skip`` leaves them out.

    Raises:
        NonFiniteError: there are such samples, and the policy is ``stop`` or no other samples are left.
    """
    of_tokens = {_CALLED.get(name, name): column for name, column in columns.items()}
    if columns.get("old_logprobs") is not rollouts.engine_logprobs:
        of_tokens["the engine's log-probs"] = rollouts.engine_logprobs
    bad = {"reward": ~scores.rewards.isfinite()}
    bad |= {name: rollouts.sums(~column.isfinite()) > 0 for name, column in of_tokens.items()}
    troubles = [_named(name, rows, rollouts.prompt_ids) for name, rows in bad.items() if rows.any()]
    if not troubles:
        return rollouts, dict(columns)
    counts = ~torch.stack(list(bad.values())).any(0)
    _report("; in ".join(troubles), scores, policy if counts.any() else STOP)
    left_out = rollouts.spread(~counts)
    cleared = {name: column.masked_fill(left_out, 0) for name, column in columns.items()}
    engine_logprobs = rollouts.engine_logprobs.masked_fill(left_out, 0)
    return dataclasses.replace(rollouts, counts=counts, engine_logprobs=engine_logprobs), cleared


def report_missing_rewards(scores: Scores, prompt_ids: torch.Tensor, dropped: torch.Tensor, policy: Updates) -> None:
    """Report NaN and Inf in rewards of samples that are not trained on: `leave_out_nonfinite` never sees them.

    Args:
        prompt_ids: int64 [N].
        dropped: bool [N].
        policy: with ``stop`` those of the other samples end the run as well.

    Raises:
        NonFiniteError: there are such samples, and the policy is ``stop``.
    """
    missing = ~scores.rewards.isfinite()
    if policy.on_nonfinite == "skip":
        missing &= dropped
    if missing.any():
        _report(_named("reward", missing, prompt_ids), scores, policy)


def _named(what: str, rows: torch.Tensor, prompt_ids: torch.Tensor) -> str:
    """What is wrong, and where: ``rows`` is bool [N]. The first of many, or the reason would be lost behind them."""
    samples, prompts = rows.nonzero()[:, 0].tolist(), dict.fromkeys(prompt_ids[rows].tolist())
    of_samples, of_prompts = (some_of([str(number) for number in numbers], 8) for numbers in (samples, prompts))
    return f"{what} of samples [{of_samples}] (prompts [{of_prompts}])"


def _report(troubles: str, scores: Scores, policy: Updates) -> None:
    told = [f"sample {sample}: {problem}" for sample, problem in scores.problems.items()][:_TOLD]
    trouble = "; ".join([f"NaN or Inf in {troubles}", *told])
    if policy.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{trouble}. These samples were not trained on. Check their prompts, the critic and the rewards, or "
            "set trainer.ppo.on_nonfinite=skip to leave such samples out as long as others remain"
        )
    warn_for_all_ranks(logger, "%s: these samples are left out", trouble)


def make_experience(
    rollouts: Rollouts,
    scores: Scores,
    columns: Mapping[str, torch.Tensor],
    settings: AdvantageSettings,
    version: int,
) -> tuple[Experience, dict[str, float]]:
    """Advantages, returns and importance weights, and the step's metrics. Collective over the data-parallel ranks.

    Args:
        columns: fp32 [R] each: ``old_logprobs``, and where there are any, ``reference_logprobs``,
            ``teacher_logprobs`` and ``values``.
        version: of the policy's present weights, from which staleness is counted.

    Returns:
        The experience, and the step's metrics under NeMo-Aligner's names, the same on every rank.
    """
    ppo, logprobs, values = settings.ppo, columns["old_logprobs"], columns.get("values")
    counts, every_length = rollouts.counts, rollouts.sampled_lengths
    kl = torch.zeros_like(logprobs)
    if "reference_logprobs" in columns:
        kl = functional.kl_penalty(
            logprobs, columns["reference_logprobs"], kl_estimator(ppo), ppo.kl_clamp
        ).masked_fill(~rollouts.spread(counts), 0)
    overlong = overlong_penalty(every_length, settings.max_length, ppo.overlong.buffer_tokens, ppo.overlong.penalty)
    penalty = rollouts.sums(settings.kl_coef * kl)
    advantages, returns = settings.estimator(
        StepRewards(
            groups=rollouts.groups,
            counts=counts,
            rewards=scores.rewards + overlong,
            ended=rollouts.ended,
            kl=penalty,
            all_lengths=every_length,
            own=rollouts.own,
            token_kl=settings.kl_coef * kl,
            values=values,
            gamma=ppo.discount_factor,
            lam=ppo.gae_lambda,
        )
    )
    weights, trusted = _importance(rollouts, logprobs, settings)
    learns = counts & trusted & (rollouts.ended if settings.ppo.mask_truncated else counts)
    lengths = every_length.double()
    metrics = {
        **rollout_metrics(rollouts, scores, values, version),
        "rewards_with_kl": ((scores.rewards + overlong - penalty) / lengths)[counts].mean().item(),
        "init_policy_kl": (rollouts.sums(kl) / lengths)[counts].mean().item(),
        **_moments("advantages", advantages, rollouts),
        **({} if returns is None else _moments("returns", returns, rollouts)),
        **engine_gap(rollouts, logprobs),
        **_importance_metrics(rollouts, weights, trusted, logprobs, learns, settings),
    }
    if ppo.overlong.buffer_tokens:
        metrics["overlong_penalty"] = overlong[counts].mean().item()
    if settings.whitens:
        in_loss = rollouts.spread(learns)
        is_unbiased = ppo.advantage_whitening_unbiased
        advantages = functional.whiten(advantages, in_loss, is_unbiased, lambda x: rollouts.sums(x).sum())
    if "teacher_logprobs" in columns:
        advantages, of_teacher = toward_teacher(rollouts, advantages, columns, ppo.teacher.weight)
        metrics |= of_teacher
    made = {**columns, "advantages": advantages, "importance_weights": weights}
    if ppo.trust_region != "step" or ppo.sampling_kl:
        made["engine_logprobs"] = rollouts.engine_logprobs
    return Experience(rollouts, learns, made if returns is None else made | {"returns": returns}), metrics


def why_nothing_is_learnt(experience: Experience, settings: AdvantageSettings) -> str | None:
    """Why no response is left for the policy's loss, and what to check; None if any is left."""
    rollouts = experience.rollouts
    if experience.learns.any():
        return None
    if settings.ppo.mask_truncated and not rollouts.ended.any():
        return (
            f"none of {len(rollouts)} responses has ended by itself, so there is nothing for the policy to learn "
            "(trainer.ppo.mask_truncated): does the model know what ends a response "
            "(model.ppo.sampling_params.end_strings), and is model.ppo.length_params.max_length enough?"
        )
    reasons = {"without an end (mask_truncated)": ~rollouts.ended} if settings.ppo.mask_truncated else {}
    reasons["with NaN or Inf (on_nonfinite=skip)"] = ~rollouts.counts
    named = ", ".join(f"{int(left_out.sum())} {reason}" for reason, left_out in reasons.items())
    others = (
        "" if settings.ppo.importance_sequence_bounds is None else ", the others outside importance_sequence_bounds"
    )
    return (
        f"all {len(rollouts)} responses are left out of the policy's loss, so there is nothing for it to learn: "
        f"{named}{others}"
    )


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer_tokens: int, penalty: float) -> torch.Tensor:
    """What a response's length adds to its reward: DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13.

    0 up to ``max_length - buffer_tokens``, from there on a straight line down to ``-penalty`` at ``max_length``.

    Args:
        lengths: int64 [N], sampled tokens.
        max_length: the most tokens that a response may have.
        buffer_tokens: how many of them are penalised; 0: none.
        penalty: at the limit (1 in the paper).

    Returns:
        fp64 [N].
    """
    if buffer_tokens == 0:
        return torch.zeros(len(lengths), dtype=torch.float64)
    excess = (lengths.double() - (max_length - buffer_tokens)) / buffer_tokens
    return -penalty * excess.clamp(0, 1)


def toward_teacher(
    rollouts: Rollouts, advantages: torch.Tensor, columns: Mapping[str, torch.Tensor], weight: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages with the teacher's part, and how far the policy is from the teacher. Collective.

    On-policy distillation: ``weight * (log p_teacher - log p_policy)`` of each token that the policy has sampled, an
    estimate of minus the reverse KL divergence there, without what follows it (Thinking Machines Lab, "On-Policy
    Distillation", 2025; after GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543).

    Args:
        advantages: fp32 [R]; whitened before, if at all.
        columns: see `make_experience`.
    """
    gap = columns["teacher_logprobs"] - columns["old_logprobs"]
    gap = gap.masked_fill(~rollouts.spread(rollouts.counts), 0)
    kl = _token_mean(rollouts, -gap, rollouts.counts).item()
    return advantages + weight * gap, {"teacher_kl": kl}


# ---- over the tokens of all ranks ---------------------------------------------------------------


def _token_mean(rollouts: Rollouts, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The mean over the sampled tokens of some samples, fp64; 0 where there are none. ``rows``: bool [N]."""
    return rollouts.sums(x)[rows].sum() / rollouts.sampled_lengths[rows].sum().clamp(min=1)


def _largest(rollouts: Rollouts, x: torch.Tensor) -> torch.Tensor:
    """The largest of each sample's sampled tokens, at least 0: fp64 [N]. Collective. ``x``: fp32 [R]."""
    # Torch's check of the lengths, which fit, would refuse a share without samples.
    own = torch.segment_reduce(x, "max", lengths=rollouts.own_sampled, initial=0.0, unsafe=True)
    return rollouts.everywhere(own)


def _moments(name: str, x: torch.Tensor, rollouts: Rollouts) -> dict[str, float]:
    """Mean and standard deviation over the sampled tokens of samples that count."""
    mean = _token_mean(rollouts, x, rollouts.counts)
    variance = _token_mean(rollouts, (x.double() - mean).square(), rollouts.counts)
    return {f"{name}_mean": mean.item(), f"{name}_std": variance.sqrt().item()}


# ---- importance ---------------------------------------------------------------------------------


def _importance(
    rollouts: Rollouts, logprobs: torch.Tensor, settings: AdvantageSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights of tokens, fp32 [R]; whether each sequence's ratio is within the bounds, bool [N].

    The engine's log-probs are of the weights that generated, the trainer's of the present ones: their ratio corrects
    for the engine's numerics and for stale weights alike. PPO's own ratio starts from the present policy
    (arXiv:2110.00641). A weight is ``min(p_trainer / p_engine, cap)``: truncation bounds the variance (Ionides 2008,
    "Truncated Importance Sampling"). A sequence's ratio is ``exp(mean_t log(p_trainer / p_engine))``, the geometric
    mean of its tokens' ratios, as in GSPO (arXiv:2507.18071): sequences of different lengths are comparable.
    """
    log_ratios = logprobs - rollouts.engine_logprobs
    weights, trusted = torch.ones_like(logprobs), torch.ones(len(rollouts), dtype=torch.bool)
    if settings.ppo.importance_weight_cap is not None:
        # The cap is applied before the exponential, which therefore cannot overflow.
        weights = log_ratios.clamp(max=math.log(settings.ppo.importance_weight_cap)).exp()
    if settings.ppo.importance_token_bounds is not None:
        weights = weights.masked_fill(_is_outside(log_ratios, settings.ppo.importance_token_bounds), 0.0)
    if settings.ppo.importance_sequence_bounds is not None:
        low, high = settings.ppo.importance_sequence_bounds
        ratios = (rollouts.sums(log_ratios) / rollouts.sampled_lengths).exp()
        trusted = (ratios >= low) & (ratios <= high)
    return weights, trusted


def _is_outside(log_ratios: torch.Tensor, bounds: Sequence[float]) -> torch.Tensor:
    """Which tokens' ratios are outside of ``[low, high]``; bool [R]."""
    ratios, (low, high) = log_ratios.exp(), bounds
    return (ratios < low) | (ratios > high)


def _importance_metrics(
    rollouts: Rollouts,
    weights: torch.Tensor,
    trusted: torch.Tensor,
    logprobs: torch.Tensor,
    learns: torch.Tensor,
    settings: AdvantageSettings,
) -> dict[str, float]:
    """Metrics of what `_importance` returned; weights count over the tokens of the policy's loss."""
    metrics: dict[str, float] = {}
    if settings.ppo.importance_weight_cap is not None and learns.any():
        # exp may round a weight to below the cap
        is_cut = logprobs - rollouts.engine_logprobs >= math.log(settings.ppo.importance_weight_cap)
        mean, square = (_token_mean(rollouts, x, learns) for x in (weights, weights.double().square()))
        metrics["importance_weights"] = mean.item()
        metrics["importance_truncated"] = _token_mean(rollouts, is_cut, learns).item()
        # Kish's effective sample size over the number of tokens, 1 for equal weights.
        metrics["importance_effective_share"] = (
            mean.square() / square.clamp(min=torch.finfo(torch.float64).tiny)
        ).item()
    if settings.ppo.importance_sequence_bounds is not None:
        metrics["importance_masked_sequences"] = 1.0 - trusted.double().mean().item()
    if settings.ppo.importance_token_bounds is not None:
        outside = _is_outside(logprobs - rollouts.engine_logprobs, settings.ppo.importance_token_bounds)
        metrics["importance_masked_tokens"] = _token_mean(rollouts, outside, learns).item()
    return metrics


# ---- metrics ------------------------------------------------------------------------------------


def rollout_metrics(rollouts: Rollouts, scores: Scores, values: torch.Tensor | None, version: int) -> dict[str, float]:
    """Metrics of lengths, endings, rewards, values and staleness; see `make_experience`."""
    counts, ages = rollouts.counts, (version - rollouts.weight_versions).float()
    parts = {f"rewards/{name}": part[counts & part.isfinite()] for name, part in scores.parts.items()}
    return {
        "rollout_size": len(rollouts),
        "prompt_lengths": rollouts.prompt_lengths.float().mean().item(),
        "response_lengths": rollouts.lengths.float().mean().item(),
        "generation_length": rollouts.sampled_lengths.float().mean().item(),
        "fraction_of_samples_properly_ended": rollouts.ended.float().mean().item(),
        "rewards": scores.rewards[counts].mean().item(),
        **{name: part.mean().item() for name, part in parts.items() if len(part)},
        "nonfinite_samples": float((~counts).sum()),
        **({} if values is None else _moments("values", values, rollouts)),
        "staleness_mean": _token_mean(rollouts, ages, torch.ones_like(counts)).item(),
        "staleness_max": _largest(rollouts, ages).max().item(),
    }


def engine_gap(rollouts: Rollouts, logprobs: torch.Tensor) -> dict[str, float]:
    """How far the generation engine's log-probs are from the trainer's, over sampled tokens. Collective.

    ``engine_kl`` is the k3 estimate of KL(engine || trainer).
    """
    gap = (rollouts.engine_logprobs - logprobs).abs()
    largest = _largest(rollouts, gap)
    kl = functional.kl_penalty(rollouts.engine_logprobs, logprobs, "k3")
    return {
        "engine_logprob_gap_mean": _token_mean(rollouts, gap, rollouts.counts).item(),
        "engine_logprob_gap_max": largest[rollouts.counts].max().item(),
        "engine_kl": _token_mean(rollouts, kl, rollouts.counts).item(),
    }
