"""The policy: its log-probs, those of the initial policy, and its PPO update."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner import functional
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.logprobs import next_token_entropy, next_token_logprobs
from nemo_style_aligner.models.optimizer import Optimizer
from nemo_style_aligner.models.pipeline import Tokens, forward_global, train_step


@dataclasses.dataclass
class PolicyBatch:
    """What one PPO update of the policy needs; n sequences of s tokens.

    Attributes:
        tokens: int64 [n, s].
        mask: fp32 [n, s-1], 1 where the token enters the loss.
        old_logprobs: fp32 [n, s-1], of the policy that made the rollouts, computed by the trainer.
        advantages: fp32 [n, s-1].
        importance_weights: fp32 [n, s-1]; all ones unless the engine's sampling is corrected for.
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
        optimizer: of its parameters.
        initial_policy: the weights the KL penalty refers to; None where there is no penalty.
        micro_batch_size: sequences per forward-backward pass.
        forward_micro_batch_size: sequences per log-prob pass.
        temperature: the sampling temperature; log-probs are of the distribution sampled from.
        ratio_eps: PPO's clipping range.
        entropy_bonus: coefficient of the entropy added to the objective.
    """

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Optimizer,
        initial_policy: FrozenWeights | None,
        *,
        micro_batch_size: int,
        forward_micro_batch_size: int,
        temperature: float,
        ratio_eps: float,
        entropy_bonus: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.initial_policy = initial_policy
        self.micro_batch_size = micro_batch_size
        self.forward_micro_batch_size = forward_micro_batch_size
        self.temperature = temperature
        self.ratio_eps = ratio_eps
        self.entropy_bonus = entropy_bonus

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """The policy's log-probs of int64 [n, s] tokens, held by every rank -> fp32 [n, s-1], on every rank."""
        return self._logprobs(self.model, tokens)

    def initial_logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """The initial policy's log-probs; see `logprobs`."""
        if self.initial_policy is None:
            raise RuntimeError("this job keeps no initial policy: trainer.ppo.initial_policy_kl_penalty is 0")
        with self.initial_policy.active() as model:
            return self._logprobs(model, tokens)

    def _logprobs(self, model: MegatronModel, tokens: torch.Tensor) -> torch.Tensor:
        vocab_size = model.architecture.vocab_size
        return forward_global(
            model,
            Tokens(tokens),
            self.forward_micro_batch_size,
            lambda logits, batch: next_token_logprobs(logits, batch.tokens, vocab_size, self.temperature),
            (tokens.shape[1] - 1,),
        )

    def update(self, batch: PolicyBatch, origin: str = "a batch") -> dict[str, float]:
        """One optimizer update from this data-parallel rank's share of a global batch.

        Returns global means over the tokens of the loss: ``loss``, ``ppo_ratio``, ``ppo_ratio_clamped``,
        ``clip_fraction``, ``approximate_kl``, ``scaled_entropy``, and what `Optimizer.step` returns. ``origin`` says
        which samples these are, should the update be skipped or refused.
        """
        self.model.module.train()
        self.optimizer.zero_grad()
        metrics = train_step(self.model, batch, self.micro_batch_size, self._loss)
        metrics.pop("num_items")
        return metrics | self.optimizer.step(metrics["loss"], origin)

    def _loss(
        self, logits: torch.Tensor, batch: PolicyBatch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        vocab_size = self.model.architecture.vocab_size
        entropy = torch.zeros((), device=logits.device)
        if self.entropy_bonus > 0:
            per_token = next_token_entropy(logits, vocab_size, self.temperature)
            entropy = self.entropy_bonus * (per_token * batch.mask).sum()
        logprobs = next_token_logprobs(logits, batch.tokens, vocab_size, self.temperature)
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
