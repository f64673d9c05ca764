"""Critic and reward model in one set of ranks: values, rewards, and the value update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from nemo_style_aligner.trainer.models import functional
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.heads import (
    RewardHeadConfig,
    merge_attributes,
    pool_rewards,
    pooled_positions,
    standardize,
)
from nemo_style_aligner.trainer.models.optimizer import Optimizer
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import LossResult, Tokens, forward, rows, train_step
from nemo_style_aligner.trainer.models.ragged import RaggedBatch


@dataclasses.dataclass
class ScoringBatch:
    """Sequences to score: ``tokens`` int64 [n, s], ``lengths`` and, where known, ``prompt_lengths`` int64 [n]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor | None = None


@dataclasses.dataclass
class ValueBatch:
    """What one critic update needs: ``tokens`` int64 [n, s]; the others fp32 [n, s-1]."""

    tokens: torch.Tensor
    returns: torch.Tensor
    prev_values: torch.Tensor
    mask: torch.Tensor


class RewardModel:
    """A frozen model that gives each sequence its reward.

    Weights that take the place of another model's stay there until `leave`: the next request may need them again.

    Args:
        weights: the frozen weights, or a model that is never trained.
        head: how token outputs become rewards.
        batching: micro batches of forward passes.
    """

    def __init__(self, weights: FrozenWeights | MegatronModel, head: RewardHeadConfig, batching: MicroBatching) -> None:
        self._weights = weights
        self.head = head
        self.batching = batching

    @property
    def num_swaps(self) -> int:
        """How often these weights took the place of another model's."""
        return 0 if isinstance(self._weights, MegatronModel) else self._weights.num_swaps

    @property
    def is_in_place(self) -> bool:
        """Whether these weights are now in the place of another model's."""
        return not isinstance(self._weights, MegatronModel) and self._weights.is_in_place

    def leave(self, *, to_change: bool = False) -> None:
        """Give the other model its weights back; see `FrozenWeights.leave`."""
        if not isinstance(self._weights, MegatronModel):
            self._weights.leave(to_change=to_change)

    def rewards(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        prompt_lengths: torch.Tensor | None = None,
        is_whole: bool = True,
    ) -> torch.Tensor:
        """int64 [n, s], int64 [n] -> fp32 [n, `RewardHeadConfig.num_rewards`].

        ``prompt_lengths``: int64 [n], of those parts that sequences share if they are the same; None: unknown.
        ``is_whole``: every rank holds all sequences, and gets all rewards; otherwise, a data-parallel rank its own.
        """
        return forward(
            self._weights if isinstance(self._weights, MegatronModel) else self._weights.enter(),
            ScoringBatch(tokens, lengths, prompt_lengths),
            pooled_positions(lengths, tokens.shape[1], self.head),
            self.batching,
            lambda outputs, batch: pool_rewards(outputs, batch.lengths, self.head),
            (self.head.num_rewards,),
            is_whole=is_whole,
        )


class Critic:
    """The value function and its optimizer.

    Where the model keeps passes, those of `values` are kept for the next training batch, unless the last one took
    several updates; a batch that does uses none.

    Args:
        model: a trainable model with a reward head.
        optimizer: updates the model's parameters.
        head: config of the model's head (attribute weights turn several outputs into one value).
        training_batching: micro batches of an update.
        global_batch_size: sequences per update, over all ranks.
        forward_batching: micro batches of inference.
        loss_clip: clipping range of the value loss; 0 disables it.
    """

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Optimizer,
        head: RewardHeadConfig,
        *,
        training_batching: MicroBatching,
        global_batch_size: int,
        forward_batching: MicroBatching,
        loss_clip: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.head = head
        self.training_batching = training_batching
        self.global_batch_size = global_batch_size
        self.forward_batching = forward_batching
        self.loss_clip = loss_clip
        # With several updates per batch, only the first could use kept passes, and only of the newest sequences. None
        # does, not even of a process's first batch, whose bits would differ from those in a run that was not resumed.
        self._makes_one_update = True

    def values(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [n, s], int64 [n], held by every rank -> fp32 [n, s-1] on every rank.

        Entry t is V(tokens[: t + 1]); zero from a sequence's last token on.
        """
        width = tokens.shape[1] - 1
        wanted = torch.arange(width)[None, :] < lengths.cpu()[:, None] - 1
        values = forward(
            self.model,
            Tokens(tokens),
            wanted,
            self.forward_batching,
            lambda outputs, _: self._values(outputs),
            (width,),
            is_trained=self._makes_one_update,
        )
        return values * wanted.to(values.device)  # unpacking fills with zeros, which `_values` standardises

    def response_values(self, batch: RaggedBatch) -> torch.Tensor:
        """The values of a data-parallel rank's own response tokens, as `values` gives them: fp32 [R]."""
        outputs = forward(
            self.model,
            batch,
            None,
            self.forward_batching,
            lambda outputs, _: self._values(outputs),
            is_trained=self._makes_one_update,
        )
        return outputs.cpu()

    def train(self, batch: ValueBatch, origin: str = "a training batch") -> list[dict[str, float]]:
        """`updates` on a batch that every rank holds whole, one per ``global_batch_size`` sequences; the last may have
        fewer. ``origin`` names the batch in the log or in the error, should an update be skipped or fail.
        """
        n = batch.tokens.shape[0]
        parts = {}
        for start in range(0, n, self.global_batch_size):
            stop = min(start + self.global_batch_size, n)
            parts[f"rows {start} to {stop - 1} of {origin}"] = rows(batch, slice(start, stop))
        return self.updates(parts)

    def updates(self, batches: Mapping[str, ValueBatch | RaggedBatch]) -> list[dict[str, float]]:
        """One update per batch, in their order. Collective.

        Args:
            batches: by their names in the log. Of ragged ones each data-parallel rank has its own rows, with columns
                ``returns`` and ``values``, those that were given before.

        Returns:
            Each update's ``loss``, ``padding_efficiency``, ``dp_balance`` and what `Optimizer.step` returns.
        """
        self.model.module.train()
        self._makes_one_update = len(batches) == 1
        if not self._makes_one_update:
            self.weights_changed()
        reports = []
        for origin, batch in batches.items():
            self.optimizer.zero_grad()
            wanted = None if isinstance(batch, RaggedBatch) else batch.mask != 0
            metrics = train_step(self.model, batch, wanted, self.training_batching, self._loss)
            num_items = metrics.pop("num_items")
            reports.append(metrics | self.optimizer.step(metrics["loss"], origin, num_items))
        return reports

    def weights_changed(self) -> None:
        """Forget passes that were kept with other weights; call it after loading weights."""
        if self.model.kept_passes is not None:
            self.model.kept_passes.clear()

    def _values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Head outputs [..., a] -> [...]."""
        return standardize(merge_attributes(outputs, self.head), self.head)

    def _loss(self, outputs: torch.Tensor, batch: ValueBatch | RaggedBatch) -> LossResult:
        if isinstance(batch, RaggedBatch):
            returns, prev_values = batch.columns["returns"], batch.columns["values"]
            mask = torch.ones_like(returns)
        else:
            returns, prev_values, mask = batch.returns, batch.prev_values, batch.mask
        loss = functional.clipped_value_loss(self._values(outputs), prev_values, returns, mask, self.loss_clip)
        return loss, mask.sum(), {}


def applied_updates(reports: Sequence[Mapping[str, float]]) -> tuple[float, list[Mapping[str, float]]]:
    """The mean loss of the updates that were not skipped for NaN or Inf (0 where all were), and their reports."""
    applied = [report for report in reports if "grad_norm" in report]
    return sum(report["loss"] for report in applied) / max(1, len(applied)), applied
