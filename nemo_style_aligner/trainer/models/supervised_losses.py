"""What the supervised jobs minimise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from nemo_style_aligner.trainer.models import functional
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig, pool_rewards, pooled_positions
from nemo_style_aligner.trainer.models.pipeline import LossFunction, LossResult, Scoring


@dataclasses.dataclass
class LanguageModelBatch:
    """``tokens`` int64 [n, s]; ``loss_mask`` fp32 [n, s-1], 1 where predicting the next token counts."""

    tokens: torch.Tensor
    loss_mask: torch.Tensor


@dataclasses.dataclass
class PairBatch:
    """Pairs to rank: row 2i is the better, row 2i + 1 the worse of pair i.

    ``tokens`` int64 [2n, s], ``lengths`` int64 [2n], ``weights`` fp32 [2n] (0 leaves a pair out).
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass
class LabelledBatch:
    """Sequences with attribute labels: ``tokens`` int64 [n, s], ``lengths`` int64 [n], ``labels`` fp32 [n, a]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor


MEAN_SQUARE = "_mean_square"


def with_deviations(metrics: dict[str, float]) -> dict[str, float]:
    """Replace each ``NAME_mean_square`` by ``NAME_std``, the standard deviation, by means of ``NAME_mean``."""
    squares = {name.removesuffix(MEAN_SQUARE) for name in metrics if name.endswith(MEAN_SQUARE)}
    deviations = {
        f"{name}_std": math.sqrt(max(0.0, metrics[name + MEAN_SQUARE] - metrics[f"{name}_mean"] ** 2))
        for name in squares
        if math.isfinite(metrics[name + MEAN_SQUARE])
    }
    return {name: value for name, value in metrics.items() if not name.endswith(MEAN_SQUARE)} | deviations


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a supervised job minimises.

    Attributes:
        loss: the loss of a batch.
        wanted: batch -> bool [n, w], the positions whose outputs the loss depends on.
        scoring: what a language model reports; None for a reward head.
        prepare: puts into a global batch, of which each data-parallel rank has its own rows, what the loss needs of
            other passes, such as a reference's. Collective. None: nothing.
        report: makes metrics of the means of the named sums over a batch, or over a validation.
    """

    loss: LossFunction
    wanted: Callable[[Any], torch.Tensor]
    scoring: Scoring | None = None
    prepare: Callable[[Any], Any] | None = None
    report: Callable[[dict[str, float]], dict[str, float]] = with_deviations


def language_model_objective() -> Objective:
    """Cross-entropy of the tokens that count; items are tokens."""
    return Objective(_language_model_loss, lambda batch: batch.loss_mask != 0, Scoring())


def _language_model_loss(logprobs: torch.Tensor, batch: LanguageModelBatch) -> LossResult:
    return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}


def ranking_objective(head: RewardHeadConfig) -> Objective:
    """Bradley-Terry loss; items are pairs. Reports ``accuracy`` and the rewards, not standardised."""
    head = dataclasses.replace(head, std=None)

    def loss(outputs: torch.Tensor, batch: PairBatch) -> LossResult:
        rewards = pool_rewards(outputs, batch.lengths, head)[:, 0]
        chosen, rejected, weights = rewards[0::2], rewards[1::2], batch.weights[0::2]
        per_pair, correct = functional.bradley_terry_loss(chosen, rejected)
        sums = {
            "accuracy": (correct * weights).sum(),
            "rewards_chosen_mean": (chosen * weights).sum(),
            "rewards_rejected_mean": (rejected * weights).sum(),
            "rewards_all_mean": ((chosen + rejected) / 2 * weights).sum(),
            f"rewards_all{MEAN_SQUARE}": ((chosen.square() + rejected.square()) / 2 * weights).sum(),
        }
        return (per_pair * weights).sum(), weights.sum(), sums

    def wanted(batch: PairBatch) -> torch.Tensor:
        return pooled_positions(batch.lengths, batch.tokens.shape[1], head) & (batch.weights != 0)[:, None]

    return Objective(loss, wanted)


def attribute_regression_objective(head: RewardHeadConfig, ignore_value: float) -> Objective:
    """Squared error of the labelled attributes, not standardised; items are labels."""
    unmerged = dataclasses.replace(head, merge_attributes=False, std=None)

    def loss(outputs: torch.Tensor, batch: LabelledBatch) -> LossResult:
        predictions = pool_rewards(outputs, batch.lengths, unmerged)
        error, count = functional.regression_loss(predictions, batch.labels, ignore_value)
        return error, count, {}

    def wanted(batch: LabelledBatch) -> torch.Tensor:
        is_labelled = (batch.labels != ignore_value).any(1)
        return pooled_positions(batch.lengths, batch.tokens.shape[1], head) & is_labelled[:, None]

    return Objective(loss, wanted)
