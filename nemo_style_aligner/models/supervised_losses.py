"""Losses of the supervised jobs, as `LossFunction`s for the pipeline."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner import functional
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.heads import RewardHeadConfig, pool_rewards
from nemo_style_aligner.models.logprobs import next_token_logprobs
from nemo_style_aligner.models.pipeline import LossFunction

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


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


def language_model_loss(model: MegatronModel) -> LossFunction:
    """Cross-entropy of the tokens that count; items are tokens."""
    vocab_size = model.architecture.vocab_size

    def loss(logits: torch.Tensor, batch: LanguageModelBatch) -> LossResult:
        logprobs = next_token_logprobs(logits, batch.tokens, vocab_size)
        return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}

    return loss


def ranking_loss(head: RewardHeadConfig) -> LossFunction:
    """Bradley-Terry loss; items are pairs. Reports ``accuracy`` and the two rewards."""

    def loss(outputs: torch.Tensor, batch: PairBatch) -> LossResult:
        rewards = pool_rewards(outputs, batch.lengths, head)[:, 0]
        chosen, rejected, weights = rewards[0::2], rewards[1::2], batch.weights[0::2]
        per_pair, correct = functional.bradley_terry_loss(chosen, rejected)
        sums = {
            "accuracy": (correct * weights).sum(),
            "rewards_chosen_mean": (chosen * weights).sum(),
            "rewards_rejected_mean": (rejected * weights).sum(),
        }
        return (per_pair * weights).sum(), weights.sum(), sums

    return loss


def attribute_regression_loss(head: RewardHeadConfig, ignore_value: float) -> LossFunction:
    """Squared error of the labelled attributes; items are labels."""
    unmerged = dataclasses.replace(head, merge_attributes=False)

    def loss(outputs: torch.Tensor, batch: LabelledBatch) -> LossResult:
        predictions = pool_rewards(outputs, batch.lengths, unmerged)
        error, count = functional.regression_loss(predictions, batch.labels, ignore_value)
        return error, count, {}

    return loss
