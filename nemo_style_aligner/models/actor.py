"""The policy: its log-probs, those of the initial policy, and its PPO update."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner import functional
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.kept_passes import KeptPasses
from nemo_style_aligner.models.optimizer import Optimizer
from nemo_style_aligner.models.packing import MicroBatching
from nemo_style_aligner.models.pipeline import LossResult, Scoring, Tokens, forward, train_step


@dataclasses.dataclass
class PolicyBatch:
    """What one PPO update of the policy needs; n sequences of s tokens.

    Attributes:
        tokens: int64 [n, s].
        mask: fp32 [n, s-1], 1 where the token enters the loss.
        old_logprobs: fp32 [n, s-1], the policy's log-probs in the denominator of PPO's ratio [policy_logprobs].
        advantages: fp32 [n, s-1].
        importance_weights: fp32 [n, s-1]; all ones unless [importance_weight_cap] is set.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    importance_weights: torch.Tensor


class Actor:
    """A trainable policy with its frozen initial policy.

    Args:
        model: the policy.
        optimizer: updates the policy's parameters.
        initial_policy: the reference of the KL penalty; None where there is no penalty.
        training_batching: micro batches of the update.
        forward_batching: micro batches of log-prob passes.
        temperature: the sampling temperature; log-probs are of the distribution sampled from.
        ratio_eps: PPO's clipping range.
        entropy_bonus: coefficient of the entropy added to the objective.
        kept_passes: keeps the forward passes of `logprobs` for the next `update`; None: passes are not kept.
    """

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Optimizer,
        initial_policy: FrozenWeights | None,
        *,
        training_batching: MicroBatching,
        forward_batching: MicroBatching,
        temperature: float,
        ratio_eps: float,
        entropy_bonus: float,
        kept_passes: KeptPasses | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.initial_policy = initial_policy
        self.training_batching = training_batching
        self.forward_batching = forward_batching
        self.temperature = temperature
        self.ratio_eps = ratio_eps
        self.entropy_bonus = entropy_bonus
        self.kept_passes = kept_passes

    def logprobs(self, tokens: torch.Tensor, mask: torch.Tensor, *, is_trained: bool = False) -> torch.Tensor:
        """The policy's log-probs of tokens; every rank passes the same tokens and gets the same result.

        Args:
            tokens: int64 [n, s].
            mask: [n, s-1], nonzero at the predictions that are wanted.
            is_trained: the next `update` trains on these sequences, so this pass may serve as its forward pass.

        Returns:
            fp32 [n, s-1] on the CPU, like all data of a step's samples; zero where masked.
        """
        if self.kept_passes is None or not is_trained:
            return self._logprobs(self.model, tokens, mask)
        self.kept_passes.clear()  # what an abandoned step left behind
        return self._logprobs(self.model, tokens, mask, self.kept_passes)

    def initial_logprobs(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The initial policy's log-probs; see `logprobs`."""
        if self.initial_policy is None:
            raise RuntimeError("this job keeps no initial policy: trainer.ppo.initial_policy_kl_penalty is 0")
        with self.initial_policy.active() as model:
            return self._logprobs(model, tokens, mask)

    def _logprobs(
        self, model: MegatronModel, tokens: torch.Tensor, mask: torch.Tensor, keep: KeptPasses | None = None
    ) -> torch.Tensor:
        scoring = Scoring(self.temperature) if keep is None else self._scoring
        logprobs = forward(
            model,
            Tokens(tokens),
            mask != 0,
            self.forward_batching if keep is None else self.training_batching,
            lambda outputs, _: outputs[..., 0] if scoring.entropy else outputs,
            (tokens.shape[1] - 1,),
            scoring,
            keep,
        )
        return logprobs.cpu()

    @property
    def _scoring(self) -> Scoring:
        """What the model reports for each token in an update."""
        return Scoring(self.temperature, entropy=self.entropy_bonus > 0)

    def update(self, batch: PolicyBatch, origin: str = "a batch") -> dict[str, float]:
        """One optimizer update from a global batch, which every rank passes whole.

        Returns global means over the tokens of the loss: ``loss``, ``ppo_ratio``, ``ppo_ratio_clamped``,
        ``clip_fraction``, ``approximate_kl``, ``scaled_entropy``; ``padding_efficiency`` and ``dp_balance`` (see
        `train_step`); and what `Optimizer.step` returns. ``origin`` names the samples in the log or in the error,
        should the update be skipped or fail.
        """
        self.model.module.train()
        self.optimizer.zero_grad()
        metrics = train_step(
            self.model,
            batch,
            batch.mask != 0,
            self.training_batching,
            self._loss,
            scoring=self._scoring,
            kept_passes=self.kept_passes,
        )
        num_items = metrics.pop("num_items")
        return metrics | self.optimizer.step(metrics["loss"], origin, num_items)

    def _loss(self, outputs: torch.Tensor, batch: PolicyBatch) -> LossResult:
        entropy = torch.zeros((), device=outputs.device)
        logprobs = outputs
        if self.entropy_bonus > 0:
            logprobs, per_token = outputs.unbind(-1)
            entropy = self.entropy_bonus * (per_token * batch.mask).sum()
        loss, sums = functional.clipped_policy_loss(
            logprobs, batch.old_logprobs, batch.advantages, batch.mask, self.ratio_eps, batch.importance_weights
        )
        report = {
            "ppo_ratio": sums.ratio,
            "ppo_ratio_clamped": sums.clipped_ratio,
            "clip_fraction": sums.clipped,
            "approximate_kl": sums.approximate_kl,
            "scaled_entropy": entropy,
        }
        return loss - entropy, batch.mask.sum(), report
