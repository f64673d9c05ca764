"""What is minimised where responses are preferred to others: DPO and its relatives, and KTO.

The policy is compared with a frozen reference by log ratios: of a response y to a prompt x,
``log pi(y|x) - log pi_ref(y|x)``, the sum over y's tokens, or their mean where log-probs are averaged. The implicit
reward of a response is ``beta`` times its log ratio (arXiv:2305.18290).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from torch.nn.functional import logsigmoid

from nemo_style_aligner.engine.parallel.groups import all_reduce_sums
from nemo_style_aligner.trainer.config.schema import DPO, KTO
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import LossResult, Scoring, forward
from nemo_style_aligner.trainer.models.supervised_losses import MEAN_SQUARE, Objective, with_deviations


@dataclasses.dataclass
class PreferenceBatch:
    """Two responses for each example, rows 2i and 2i + 1: the chosen and the rejected one.

    Of KTO the second one is a response to another prompt, of which only the KL divergence is estimated.

    Attributes:
        tokens: int64 [2n, s].
        loss_mask: fp32 [2n, s-1], 1 where the next token is the response's.
        labels: fp32 [2n], what the responses are worth.
        weights: fp32 [2n]; 0 leaves an example out.
        reference: fp32 [2n], the reference's log-probs of the responses, summed; NaN while they are not known.
        kl: fp32 [2n], in KTO the estimate of the KL divergence, the same in all rows; else 0.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    reference: torch.Tensor
    kl: torch.Tensor

    @property
    def wanted(self) -> torch.Tensor:
        """The predictions of the response tokens of examples that count, bool [2n, s-1]."""
        return (self.loss_mask != 0) & (self.weights != 0)[:, None]


# ---- formulas -----------------------------------------------------------------------------------


def preference_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, reward_gap: torch.Tensor, settings: DPO
) -> torch.Tensor:
    """The loss of each pair, fp32 [n].

    With d the difference of the pair's log ratios and g that of its labels, times ``reward_scale``: dpo
    ``-log sigmoid(beta d)`` (arXiv:2305.18290 eq. 7); ipo ``(d - 1 / (2 beta))^2`` (arXiv:2310.12036 eq. 17); and of
    RPO (arXiv:2406.11704 section 3.3.2) rpo_sq ``(beta d - g)^2``, rpo_bwd_kl ``KL(sigmoid(g) || sigmoid(beta d))`` and
    rpo_fwd_kl, which is the same with its sides exchanged, as NeMo-Aligner names them.

    Args:
        chosen, rejected: fp32 [n], log ratios of policy and reference.
        reward_gap: fp32 [n], difference of the labels.
    """
    difference, gap = settings.ref_policy_kl_penalty * (chosen - rejected), settings.gt_reward_scale * reward_gap
    if settings.preference_loss == "dpo":
        return -logsigmoid(difference)
    if settings.preference_loss == "ipo":
        return (chosen - rejected - 1 / (2 * settings.ref_policy_kl_penalty)).square()
    if settings.preference_loss == "rpo_sq":
        return (difference - gap).square()
    sides = (gap, difference) if settings.preference_loss == "rpo_bwd_kl" else (difference, gap)
    return _bernoulli_kl(*sides)


def _bernoulli_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(sigmoid(p) || sigmoid(q)), from the logits."""
    of_true = logsigmoid(p).exp() * (logsigmoid(p) - logsigmoid(q))
    return of_true + logsigmoid(-p).exp() * (logsigmoid(-p) - logsigmoid(-q))


def kto_loss(ratios: torch.Tensor, is_good: torch.Tensor, kl: torch.Tensor, settings: KTO) -> torch.Tensor:
    """KTO's loss of each response, fp32 [n]; arXiv:2402.01306 eq. 8.

    ``w (1 - sigmoid(beta (ratio - kl)))`` of a good one, ``w (1 - sigmoid(beta (kl - ratio)))`` of a bad one.

    Args:
        ratios: fp32 [n], log ratios of policy and reference.
        is_good: bool [n].
        kl: fp32 [n] or scalar, without gradient.
    """
    margin = settings.ref_policy_kl_penalty * (ratios - kl)
    weights = torch.where(is_good, settings.desirable_loss_weight, settings.undesirable_loss_weight)
    return weights * torch.sigmoid(torch.where(is_good, -margin, margin))


# ---- log-probs of responses ---------------------------------------------------------------------


def summed(logprobs: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The log-prob of each response: [n, s-1] to fp32 [n]. Added in fp64: both models' sums are rounded once."""
    return (logprobs.double() * loss_mask).sum(1).float()


def response_logprobs(
    model: MegatronModel,
    batch: PreferenceBatch,
    wanted: torch.Tensor,
    batching: MicroBatching,
    *,
    is_whole: bool = False,
) -> torch.Tensor:
    """The summed log-probs of some rows' responses under a model, without gradient. Collective.

    Args:
        batch: this data-parallel rank's rows, or all ranks' if ``is_whole``.
        wanted: bool [n, s-1].

    Returns:
        fp32 [n] on the CPU; 0 in rows where nothing is wanted.
    """
    function = lambda outputs, rows: summed(outputs, rows.loss_mask)  # noqa: E731
    return forward(model, batch, wanted, batching, function, scoring=Scoring(), is_whole=is_whole).cpu()


# ---- objectives ---------------------------------------------------------------------------------


def dpo_objective(settings: DPO, prepare: Callable[[PreferenceBatch], PreferenceBatch]) -> Objective:
    """A preference loss of pairs, which are the items. ``prepare`` fills in the reference's log-probs.

    Reports ``preference_loss``, ``sft_loss``, ``accuracy``, and of the implicit rewards ``rewards_chosen_mean``,
    ``rewards_rejected_mean``, ``rewards_margin``, ``rewards_all_mean`` and ``rewards_all_std``.
    """

    def loss(logprobs: torch.Tensor, batch: PreferenceBatch) -> LossResult:
        sums, counts = summed(logprobs, batch.loss_mask), batch.loss_mask.sum(1).clamp(min=1)
        ratios, weights = sums - batch.reference, batch.weights[0::2]
        ratios = ratios / counts if settings.preference_average_log_probs else ratios
        chosen, rejected = ratios[0::2], ratios[1::2]
        of_pairs = preference_loss(chosen, rejected, batch.labels[0::2] - batch.labels[1::2], settings)
        sft = -(sums / counts if settings.sft_average_log_probs else sums)[0::2]
        good, bad = settings.ref_policy_kl_penalty * chosen, settings.ref_policy_kl_penalty * rejected
        sums_of = {
            "preference_loss": of_pairs,
            "sft_loss": sft,
            "accuracy": good > bad,
            "rewards_chosen_mean": good,
            "rewards_rejected_mean": bad,
            "rewards_margin": good - bad,
            "rewards_all_mean": (good + bad) / 2,
            f"rewards_all{MEAN_SQUARE}": (good.square() + bad.square()) / 2,
        }
        total = settings.preference_loss_weight * of_pairs + settings.sft_loss_weight * sft
        return (total * weights).sum(), weights.sum(), {name: (x * weights).sum() for name, x in sums_of.items()}

    return Objective(loss, lambda batch: batch.wanted, Scoring(), prepare)


def kto_objective(settings: KTO, prepare: Callable[[PreferenceBatch], PreferenceBatch]) -> Objective:
    """KTO's loss of responses, which are the items. ``prepare`` fills in the reference's log-probs and the KL estimate.

    Reports ``preference_loss``, ``sft_loss`` of the good ones, ``kl``, and implicit rewards as `dpo_objective` does.
    """

    def loss(logprobs: torch.Tensor, batch: PreferenceBatch) -> LossResult:
        sums = summed(logprobs, batch.loss_mask)[0::2]
        counts, weights = batch.loss_mask.sum(1)[0::2].clamp(min=1), batch.weights[0::2]
        ratios, is_good = sums - batch.reference[0::2], batch.labels[0::2] > 0
        ratios = ratios / counts if settings.preference_average_log_probs else ratios
        of_each = kto_loss(ratios, is_good, batch.kl[0::2], settings)
        sft = -(sums / counts if settings.sft_average_log_probs else sums) * is_good
        rewards = settings.ref_policy_kl_penalty * ratios
        sums_of = {
            "preference_loss": of_each,
            "sft_loss": sft,
            "kl": batch.kl[0::2],
            "good": is_good,
            "rewards_chosen_mean": rewards * is_good,
            "rewards_rejected_mean": rewards * ~is_good,
            "rewards_all_mean": rewards,
            f"rewards_all{MEAN_SQUARE}": rewards.square(),
        }
        total = settings.preference_loss_weight * of_each + settings.sft_loss_weight * sft
        return (total * weights).sum(), weights.sum(), {name: (x * weights).sum() for name, x in sums_of.items()}

    def wanted(batch: PreferenceBatch) -> torch.Tensor:
        return batch.wanted & first_rows(batch)[:, None]

    return Objective(loss, wanted, Scoring(), prepare, _of_good_and_bad)


def first_rows(batch: PreferenceBatch) -> torch.Tensor:
    """Which rows are the first of their example: bool [2n]."""
    return torch.arange(len(batch.tokens)) % 2 == 0


def _of_good_and_bad(metrics: dict[str, float]) -> dict[str, float]:
    """Means over the good responses and over the bad ones; without those of which there are none."""
    metrics = with_deviations(metrics)
    share = metrics.pop("good", 0.0)
    for name, part in (("chosen", share), ("rejected", 1 - share)):
        mean = metrics.pop(f"rewards_{name}_mean", 0.0)
        if part > 0:
            metrics[f"rewards_{name}_mean"] = mean / part
    if 0 < share < 1:
        metrics["rewards_margin"] = metrics["rewards_chosen_mean"] - metrics["rewards_rejected_mean"]
    return metrics


def with_kl(model: MegatronModel, batch: PreferenceBatch, settings: KTO, batching: MicroBatching) -> PreferenceBatch:
    """The batch with KTO's estimate of KL(policy || reference) in the whole global batch. Collective.

    The mean of the second rows' log ratios, at least 0. The rows' reference log-probs must be known.
    """
    wanted = batch.wanted & ~first_rows(batch)[:, None]
    ratios = response_logprobs(model, batch, wanted, batching) - batch.reference
    if settings.preference_average_log_probs:
        ratios = ratios / batch.loss_mask.sum(1).clamp(min=1)
    weights = batch.weights[1::2].double()
    own = {"ratios": float((ratios[1::2] * weights).sum()), "count": float(weights.sum())}
    total = all_reduce_sums(own, parallel_state.get_data_parallel_group())
    return dataclasses.replace(
        batch, kl=torch.full_like(batch.kl, max(0.0, total["ratios"] / max(1.0, total["count"])))
    )
