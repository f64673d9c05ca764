"""The policy: its log-probs, those of the reference and of a teacher, and its update."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.trainer.models.frozen import FrozenModel, FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.optimizer import Optimizer
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import LossResult, Scoring, forward, train_step
from nemo_style_aligner.trainer.models.policy_losses import LossInput, LossSettings, policy_objective
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.models.routes import LOADS, RowExperts, disagreement, seen_by_all


class Actor:
    """A trainable policy with the frozen policy that it is compared with. Batches are a data-parallel rank's own rows.

    Args:
        model: the policy.
        optimizer: updates the policy's parameters.
        reference: the policy that the KL penalty refers to; None where there is no penalty.
        teacher: the model whose log-probs the policy learns from; None where there is none.
        training_batching: micro batches of the update.
        forward_batching: micro batches of log-prob passes.
        temperature: the sampling temperature; log-probs are of the distribution sampled from.
        loss: what an update minimises.
        replays_routes: compute the policy with the experts that the engine has chosen, where a batch has them.

    Attributes:
        routing: `disagreement` with the engine's routes in the last `logprobs`.
    """

    def __init__(
        self,
        model: MegatronModel,
        optimizer: Optimizer,
        reference: FrozenWeights | None,
        *,
        teacher: FrozenModel | None = None,
        training_batching: MicroBatching,
        forward_batching: MicroBatching,
        temperature: float,
        loss: LossSettings,
        replays_routes: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.reference = reference
        self.teacher = teacher
        self.training_batching = training_batching
        self.forward_batching = forward_batching
        self.temperature = temperature
        self.loss = loss
        self.replays_routes = replays_routes
        self.routing: dict[str, float] = {}

    def logprobs(self, batch: RaggedBatch, *, is_trained: bool = False) -> torch.Tensor:
        """The policy's log-probs of the response tokens.

        Args:
            batch: its columns are not used.
            is_trained: the next `update` trains on these sequences, so this pass may serve as its forward pass.

        Returns:
            fp32 [R] on the CPU; zero in rows that do not count.
        """
        kept, experts = self.model.kept_passes if is_trained else None, list[RowExperts | None]()
        if kept is not None:
            kept.clear()  # what an abandoned step left behind
        logprobs = self._logprobs(self.model, batch, is_trained=kept is not None, experts=experts)
        if self.model.architecture.experts is not None:
            self.routing = disagreement(seen_by_all(experts, self.model.architecture))
        return logprobs

    def reference_logprobs(self, batch: RaggedBatch) -> torch.Tensor:
        """The reference's log-probs; see `logprobs`."""
        if self.reference is None:
            raise RuntimeError("this job keeps no initial policy: trainer.ppo.initial_policy_kl_penalty is 0")
        with self.reference.active() as model:
            return self._logprobs(model, dataclasses.replace(batch, routes=None))

    def teacher_logprobs(self, batch: RaggedBatch) -> torch.Tensor:
        """The teacher's log-probs, at the policy's temperature; see `logprobs`."""
        assert self.teacher is not None
        with self.teacher.active() as model:
            return self._logprobs(model, dataclasses.replace(batch, routes=None))

    def _logprobs(
        self,
        model: MegatronModel,
        batch: RaggedBatch,
        *,
        is_trained: bool = False,
        experts: list[RowExperts | None] | None = None,
    ) -> torch.Tensor:
        scoring = self._scoring if is_trained else Scoring(self.temperature, replays=self.replays_routes)
        logprobs = forward(
            model,
            batch,
            None,
            self.training_batching if is_trained else self.forward_batching,
            lambda outputs, _: outputs[..., 0] if scoring.entropy else outputs,
            scoring=scoring,
            is_trained=is_trained,
            experts=experts,
        )
        return logprobs.cpu()

    @property
    def _scoring(self) -> Scoring:
        """What the model reports for each token in an update."""
        return Scoring(self.temperature, entropy=self.loss.entropy_bonus > 0, replays=self.replays_routes)

    def update(self, batch: RaggedBatch, origin: str = "a batch") -> dict[str, float]:
        """One optimizer update from a global batch, of which every data-parallel rank passes its own rows. Collective.

        Args:
            batch: with columns ``old_logprobs``, ``advantages``; ``importance_weights`` unless all are 1;
                ``engine_logprobs`` where the loss `needs_sampling`; ``reference_logprobs`` where the KL penalty is in
                the loss; ``response_lengths`` and ``response_ends`` where some responses are several rows
                (`policy_objective`).
            origin: names the samples in the log or in the error, should the update be skipped or fail.

        Returns:
            ``loss``; global means over tokens: ``ppo_ratio``, ``ppo_ratio_clamped``, ``clip_fraction``,
            ``approximate_kl``, ``scaled_entropy``, what `policy_objective` names beside them, and what a user's
            own loss reports; ``padding_efficiency``, ``dp_balance`` and `load_metrics` (see `train_step`); and what
            `Optimizer.step` returns.
        """
        self.model.module.train()
        self.optimizer.zero_grad()
        metrics = train_step(self.model, batch, None, self.training_batching, self._loss, scoring=self._scoring)
        num_items = metrics.pop("num_items")
        tokens_per_item = metrics.pop("num_tokens", 1.0)
        for name in metrics.keys() - {"loss", "padding_efficiency", "dp_balance", *LOADS}:
            metrics[name] /= tokens_per_item
        return metrics | self.optimizer.step(metrics["loss"], origin, num_items)

    def _loss(self, outputs: torch.Tensor, batch: RaggedBatch) -> LossResult:
        columns = batch.columns
        logprobs, entropy = outputs.unbind(-1) if self._scoring.entropy else (outputs, None)
        return policy_objective(
            LossInput(logprobs, columns["old_logprobs"], columns["advantages"], batch.sampled_lengths),
            self.loss,
            importance_weights=columns.get("importance_weights"),
            sampling_logprobs=columns.get("engine_logprobs"),
            reference_logprobs=columns.get("reference_logprobs"),
            entropy=entropy,
            responses=(columns["response_lengths"], columns["response_ends"]) if "response_ends" in columns else None,
        )
