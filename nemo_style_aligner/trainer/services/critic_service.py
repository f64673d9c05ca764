"""The critic job: what the service calls on every rank to score, to train and to save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel, ValueBatch, applied_updates
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward
from nemo_style_aligner.trainer.services.exactly_once.ledger import INITIAL_HISTORY, TrainingLedger
from nemo_style_aligner.trainer.services.scores import LOGPROBS, Score
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer, peak_meter

logger = logging.getLogger(__name__)


class CriticService:
    """A `services.critic_endpoints.CriticBackend`: critic and, in the same ranks, reward model.

    Args:
        critic: the value function.
        reward_model: gives ``rewards`` beside ``values``; None where another service does.
        ledger: which training requests were applied; kept in the checkpoints.
        checkpoints: where `save` writes.
        metrics: rank 0's log.
        reset: gives the critic the weights, optimizer and random states it had before any training.
    """

    def __init__(
        self,
        critic: Critic,
        reward_model: RewardModel | None,
        ledger: TrainingLedger,
        checkpoints: CheckpointManager,
        metrics: MetricsLogger,
        reset: Callable[[], None],
    ) -> None:
        self.critic = critic
        self.reward_model = reward_model
        self.ledger = ledger
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.reset = reset
        # At the actor's newest two checkpoints, as far as it has told, and at the one it is writing.
        self._needed_histories: list[str] = []
        self.timer = ScopedTimer(take_peak=peak_meter())

    @property
    def step(self) -> int:
        """Critic updates made."""
        return self.critic.optimizer.step_count

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rewards (if the reward model is here) and values; see `CriticBackend.infer`."""
        self.critic.optimizer.offload_states()
        with self.timer("infer_time"):
            if self.reward_model is None:
                return {"values": self.critic.values(tokens, lengths)}
            if not self.reward_model.is_in_place:
                values = self.critic.values(tokens, lengths)
                return {"rewards": self.reward_model.rewards(tokens, lengths), "values": values}
            # The model whose weights are on the device goes first, so that a request exchanges them only once.
            rewards = self.reward_model.rewards(tokens, lengths)
            self._bring_critic_back()
            return {"rewards": rewards, "values": self.critic.values(tokens, lengths)}

    def _bring_critic_back(self, *, to_change: bool = False) -> None:
        """Give the model back the critic's own weights, before anything reads or (``to_change``) changes them."""
        if self.reward_model is not None:
            self.reward_model.leave(to_change=to_change)

    def train(
        self, tokens: torch.Tensor, returns: torch.Tensor, prev_values: torch.Tensor, mask: torch.Tensor
    ) -> float:
        """Make one update per global batch; return the mean of their losses. See `ModelBackend.train`.

        Updates that were skipped for NaN or Inf are not in the mean; it is 0.0 where all were: the answer is a number
        in any case, the request counts as applied, and the log and ``train/skipped_updates`` say what happened.

        Raises:
            OSError: a checkpoint or archive could not be written in the background.
            NonFiniteError: ``on_nonfinite`` says to stop. The service ends; when started again it
                goes on from its last checkpoint, which was written before this request.
        """
        self.checkpoints.poll()  # a finished save releases its pinned memory now, not only at the next save
        before = self.step
        with self.timer("train_time"):
            self._bring_critic_back(to_change=True)
            origin = f"training request {self.ledger.steps + 1} (its rows are in the order of the sender's samples)"
            reports = self.critic.train(ValueBatch(tokens, returns, prev_values, mask), origin)
        loss, applied = applied_updates(reports)
        for offset, report in enumerate(applied):
            self.metrics.log_metrics(report, before + offset, "train/")
        self.metrics.log_metrics(self.timer.consume_durations(), self.step, "timers/")
        self.metrics.log_metrics(self.timer.consume_peaks(), self.step, "memory/")
        if len(applied) < len(reports):
            self.metrics.log_metrics({"skipped_updates": reports[-1]["skipped_updates"]}, self.step, "train/")
        logger.info("critic step %d: loss %.4g, %d of %d updates applied", self.step, loss, len(applied), len(reports))
        return loss

    def save(self, keep_history: str | None = None) -> Future[None]:
        """Copy weights, optimizer and ledger, and write the copies as a checkpoint while the service goes on.

        The newest checkpoint with ``keep_history`` is not pruned, nor that with the one of the run's save before: the
        actor falls back on an earlier checkpoint if its newest is damaged. Without ``keep_history`` no run has asked
        for this save: it prunes nothing that the last run may need. The future is done when the checkpoint is whole.
        """
        needed = self._needed_histories
        if keep_history is not None:
            before = [history for history in self._needed_histories[:-1] if history != keep_history]
            needed = [*before, keep_history][-2:]
            self._needed_histories = [*needed, self.ledger.history]
        newest: dict[str, Path] = {}
        with self.timer("save_wait"):
            self.checkpoints.finish()
        for path, state in self.checkpoints.trainer_states().items():
            newest.setdefault(state["ledger"]["history"], path)
        with self.timer("save_time"):
            self._bring_critic_back()
            return self.checkpoints.save(
                self.critic.model,
                self.critic.optimizer,
                self.state_dict(),
                {"step": self.step},
                protected=[newest[history] for history in needed if history in newest],
                on_end=lambda times: self.timer.record("save_background_time", times.background),
            )

    def restore(self, run_id: str, histories: Sequence[str]) -> int | None:
        """Go to one of ``histories``; see `CriticBackend.restore`."""
        wanted = {history: index for index, history in enumerate(histories)}
        if self.ledger.history in wanted:
            return wanted[self.ledger.history]
        self._bring_critic_back(to_change=True)
        self.critic.weights_changed()
        states = self.checkpoints.trainer_states()
        reachable = {
            path: wanted[state["ledger"]["history"]]
            for path, state in states.items()
            if state["ledger"]["history"] in wanted and self.ledger.is_ahead_by_run_alone(state["ledger"], run_id)
        }
        # sorted is stable: the newest of those that hold the same history comes first
        for path in sorted(reachable, key=lambda path: -reachable[path]):
            if self.checkpoints.is_whole(path):
                logger.warning("going back from step %d to %s, as requested by run '%s'", self.step, path, run_id)
                self.load_state_dict(self.checkpoints.load(path, self.critic.model, self.critic.optimizer))
                return reachable[path]
        start = TrainingLedger().state_dict()
        if INITIAL_HISTORY in wanted and self.ledger.is_ahead_by_run_alone(start, run_id):
            logger.warning(
                "going back from step %d to the initial weights, as requested by run '%s'", self.step, run_id
            )
            self.reset()
            self.ledger.load_state_dict(start)
            return wanted[INITIAL_HISTORY]
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a restarted service needs beside weights, optimizer and random states."""
        ledger = self.ledger.state_dict()
        return {"step": self.step, "ledger": ledger, "needed_histories": self._needed_histories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.ledger.load_state_dict(state["ledger"])
        self._needed_histories = [str(history) for history in state["needed_histories"]]


class RewardService:
    """A `services.scores.ScoringBackend`: nothing but a reward model."""

    def __init__(self, reward_model: RewardModel) -> None:
        self.reward_model = reward_model

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rewards; see `ScoringBackend.infer`."""
        return {"rewards": self.reward_model.rewards(tokens, lengths)}


class LogprobService:
    """A `services.scores.ScoringBackend`: nothing but a frozen language model, a reference or a teacher.

    Attributes:
        scores: what it gives; the endpoint offers it, and the job that has such a model asks for it.

    Args:
        temperature: divides the logits.
        batching: micro batches of its passes.
    """

    scores: ClassVar[Sequence[Score]] = (LOGPROBS,)

    def __init__(self, model: MegatronModel, temperature: float, batching: MicroBatching) -> None:
        self._model = model
        self._scoring = Scoring(temperature)
        self._batching = batching

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Log-probs [b, s-1], of token t + 1 at t; see `ScoringBackend.infer`."""
        width = tokens.shape[1] - 1
        wanted = torch.arange(width) < lengths[:, None] - 1
        logprobs = forward(
            self._model, Tokens(tokens), wanted, self._batching, lambda x, _: x, (width,), scoring=self._scoring
        )
        return {LOGPROBS.name: logprobs}
