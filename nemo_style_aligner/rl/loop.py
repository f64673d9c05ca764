"""Proximal policy optimisation (arXiv:1707.06347) of a language model, against a critic in another job."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from nemo_style_aligner.checkpoints.background import OnEnd, WorkTimes
from nemo_style_aligner.checkpoints.training import CheckpointManager, MayPublish
from nemo_style_aligner.data.samplers import EpochSampler
from nemo_style_aligner.jobs.run_control import RunControl
from nemo_style_aligner.jobs.training_loop import TrainingLoop
from nemo_style_aligner.models.actor import Actor, PolicyBatch
from nemo_style_aligner.models.pipeline import rows
from nemo_style_aligner.rl.experience import leave_out_nonfinite, make_experience, why_nothing_is_learnt
from nemo_style_aligner.rl.remote_critic import CriticSave, CriticTraining, RemoteCritic
from nemo_style_aligner.rl.rollouts.batch import Experience, RolloutBatch
from nemo_style_aligner.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.rl.rollouts.schedule import GenerationSchedule
from nemo_style_aligner.rl.settings import PPOSettings
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.servers.client import Scores
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.metrics import MetricsLogger
from nemo_style_aligner.telemetry.timers import ScopedTimer

logger = logging.getLogger(__name__)

# Metrics that compare the engine's log-probs with the trainer's; left out where the trainer computes none.
_OF_TWO_POLICIES = ("engine_", "importance_")


class PPOTrainer(TrainingLoop):
    """Trains a policy with PPO. Every rank of the actor job that trains runs `fit`.

    Args:
    Attributes:
        consumed_samples: training prompts used.
        ppo_optimization_step: policy updates made, those skipped for NaN or Inf included.
        warm_up_rounds: rounds of the critic's warm-up made.
    """

    title = "PPO"
    samples_name = "prompts"
    settings: PPOSettings

    def __init__(
        self,
        settings: PPOSettings,
        actor: Actor,
        collector: RolloutCollector,
        critic: RemoteCritic,
        train_prompts: PromptSource,
        val_prompts: PromptSource | None,
        checkpoints: CheckpointManager,
        metrics: MetricsLogger,
        run_control: RunControl,
        timer: ScopedTimer,
    ) -> None:
        super().__init__(settings, actor.model, actor.optimizer, checkpoints, metrics, run_control, timer)
        self.actor = actor
        self.collector = collector
        self.critic = critic
        self.train_prompts = train_prompts
        self.val_prompts = val_prompts
        self.schedule = GenerationSchedule(
            collector,
            actor.model,
            timer,
            settings.seed,
            staleness=settings.staleness,
            unload_engine=settings.unload_engine,
        )
        self.consumed_samples = 0
        self.ppo_optimization_step = 0
        self.warm_up_rounds = 0

    def make_step(self) -> None:
        """Make and count one PPO step. Until its rollouts are scored it can be abandoned: the state has none of it."""
        with self.timer("step"):
            experience, metrics = self.generate_experience()
            self.train(experience)
        self.schedule.drop(self.step)
        self.count_step(metrics)

    # ---- the phases -------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Let the critic learn the policy's returns before the policy moves.

        The rounds take the first prompts of the training order, and training starts over with the same ones. Rounds
        are saved at ``save_interval``, as steps are.
        """
        if self.step > 0:
            return
        while self._is_warming_up:
            self.run_control.check(ahead="warm-up")
            with self.run_control.section("warm-up"):
                offset = self.warm_up_rounds * self.train_prompts.batch_size
                experience, _ = self.generate_experience(offset=offset, stream=self.warm_up_rounds + 1)
                self.wait_for_critic(self.critic.start_training(experience))
            self.warm_up_rounds += 1
            self._is_saved = False
            self.checkpoints.poll()
            if self.settings.save_interval and self.warm_up_rounds % self.settings.save_interval == 0:
                self.save_unless_saved()
        self.consumed_samples = 0

    def generate_experience(self, offset: int | None = None, stream: int = 0) -> tuple[Experience, dict[str, float]]:
        """Refit, generate (or take what was generated beside training), score, compute log-probs and advantages.

        Args:
            offset: training samples to skip; by default those consumed so far.
            stream: distinguishes random streams of rounds that belong to the same step.

        Returns:
            The experience, and the metrics that were logged about it.
        """
        start = self.consumed_samples if offset is None else offset
        epoch = self.epoch
        with self.timer("rollout_time"):
            rollouts, scores, logprobs, init_logprobs = self._rollouts(self.train_prompts, start, stream, True)
        self.consumed_samples = start + len(rollouts)
        experience, metrics = make_experience(
            rollouts, scores, logprobs, init_logprobs, self.settings.advantages, self.ppo_optimization_step
        )
        if self.settings.takes_engine_logprobs:
            metrics = _without(metrics, _OF_TWO_POLICIES)
        if self.metrics.rank == 0 and (reason := why_nothing_is_learnt(rollouts, experience, self.settings.advantages)):
            logger.warning("step %d: %s", self.step + 1, reason)
        metrics |= {"consumed_samples": self.consumed_samples, "epoch": epoch + 1}
        self._log(metrics, "train_rollouts/")
        self._log_samples("table/train_rollouts", rollouts, scores)
        return experience, metrics

    def _rollouts(
        self, prompts: PromptSource, start: int, stream: int, is_training: bool
    ) -> tuple[RolloutBatch, Scores, torch.Tensor, torch.Tensor | None]:
        with self.timer("offload"):
            self.actor.optimizer.offload_states()
        version = self.ppo_optimization_step
        pending = self.schedule.generate(prompts, start, self.step, stream, version)
        if is_training:
            self._log(pending.generation_metrics, "generation/")
        if is_training and stream == 0 and self.step + 1 < self.settings.max_steps:
            self.schedule.start_ahead(prompts, start + len(pending.rollouts), self.step + 1, version)
        tokens, mask = pending.rollouts.tokens, pending.rollouts.response_mask()
        # The critic job scores while this one computes log-probs.
        self.run_control.check()
        logprobs = pending.rollouts.engine_logprobs
        if is_training and not self.settings.takes_engine_logprobs:
            with self.timer("logprobs"):
                is_one_update = stream == 0 and len(tokens) == self.settings.global_batch_size
                logprobs = self.actor.logprobs(tokens, mask, is_trained=is_one_update)
        self.run_control.check()
        init_logprobs = None
        if is_training and self.actor.initial_policy is not None:
            with self.timer("init_logprobs"):
                init_logprobs = self.actor.initial_logprobs(tokens, mask)
        with self.timer("critic_wait"):
            scores = pending.wait_for_scores()
        self.run_control.check(ahead="training" if is_training else None)
        prompts.observe(pending.rollouts)  # changes the state, so after the last point that can abandon the step
        return leave_out_nonfinite(pending.rollouts, scores, logprobs, init_logprobs, self.settings.nonfinite)

    def train(self, experience: Experience) -> None:
        """Train policy and critic, side by side. Once the critic has its batch the step must be completed."""
        with self.run_control.section("training"):
            critic_training = self.critic.start_training(experience)
            self.train_policy(experience)
            self.wait_for_critic(critic_training)

    def train_policy(self, experience: Experience) -> None:
        """Minibatch updates over the experience, in an order that depends on seed, step and epoch alone."""
        first, size, epochs = self.ppo_optimization_step, self.settings.global_batch_size, self.settings.num_ppo_epochs
        updates = -(-len(experience) // size) * epochs
        counting = activity.counting("updates", lambda: (self.ppo_optimization_step - first, updates))
        with self.timer("train_time"), counting:
            for epoch in range(epochs):
                for minibatch in self._minibatches(len(experience), epoch):
                    origin = f"samples {minibatch.tolist()} (prompts {experience.prompt_ids[minibatch].tolist()})"
                    metrics = self.actor.update(self._policy_batch(experience, minibatch), origin)
                    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
                    metrics["optim_step"] = self.ppo_optimization_step
                    self.metrics.log_metrics(metrics, self.ppo_optimization_step, "train_optim/")
                    self.ppo_optimization_step += 1

    def _minibatches(self, num_samples: int, epoch: int) -> Iterator[torch.Tensor]:
        """The samples of each global minibatch, int64 [global_batch_size]."""
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "minibatches", self.step, epoch))
        order = torch.randperm(num_samples, generator=generator)
        yield from order.split(self.settings.global_batch_size)

    @staticmethod
    def _policy_batch(experience: Experience, index: torch.Tensor) -> PolicyBatch:
        chosen = rows(experience, index)
        return PolicyBatch(
            tokens=chosen.tokens,
            mask=chosen.policy_mask,
            old_logprobs=chosen.logprobs,
            advantages=chosen.advantages,
            importance_weights=chosen.importance_weights,
        )

    def wait_for_critic(self, training: CriticTraining) -> None:
        """Wait for the critic to finish its update, log its loss."""
        with self.timer("critic_train_wait"):
            loss = training.result()
        self._log({"critic_loss": loss}, "train_critic/")

    def validate(self) -> dict[str, float]:
        """Generate and score responses to the validation prompts; return the metrics that were logged about them."""
        if self.val_prompts is None:
            return {}
        with self.timer("validation_time"):
            rollouts, scores, logprobs, _ = self._rollouts(self.val_prompts, 0, -1, False)
        version = self.ppo_optimization_step
        _, metrics = make_experience(rollouts, scores, logprobs, None, self.settings.advantages, version)
        # Without the initial policy's log-probs these lack the KL penalty.
        metrics = _without(metrics, ("advantages", "returns", "init_policy", "rewards_with_kl", *_OF_TWO_POLICIES))
        self.metrics.log_metrics(metrics, self.step, "val_rollouts/")
        self._log_samples("table/val_rollouts", rollouts, scores)
        return metrics

    def begin_save(self) -> tuple[MayPublish | None, OnEnd]:
        """Save the critic, then this job. If only the critic's save succeeds, the critic goes back on resuming.

        Copies of both states are taken now; they are written while the next steps are made (`save_pair_ended`).
        """
        critic_save = self.critic.start_save()
        return critic_save.wait, functools.partial(self.save_pair_ended, critic_save)

    def save_pair_ended(self, critic_save: CriticSave, times: WorkTimes) -> None:
        """Note that the critic's checkpoint and this job's are both whole on disk."""
        self.critic.confirm_save(critic_save)
        self.save_ended(times)

    def close(self) -> None:
        """Close the connections to the critic and to the work queue."""
        self.collector.close()

    # ---- counters, logs, state --------------------------------------------------------------

    @property
    def place(self) -> EpochSampler:
        """The order of the prompts, at the next one."""
        return self.train_prompts.sampler(self.consumed_samples)

    def _log(self, metrics: dict[str, Any], group: str) -> None:
        prefix, number = self._where_to_log()
        self.metrics.log_metrics(metrics, number, prefix + group)

    def _where_to_log(self) -> tuple[str, int]:
        """Prefix of the metrics' names, and their step: in the critic's warm-up, ``warm_up/`` and the round."""
        return ("warm_up/", self.warm_up_rounds) if self._is_warming_up else ("", self.step)

    @property
    def _is_warming_up(self) -> bool:
        return self.step == 0 and self.warm_up_rounds < self.settings.critic_warmup_steps

    def log_phases(self) -> None:
        """Log the step's durations and peaks of memory."""
        self.metrics.log_metrics(self.timer.consume_durations(), self.step, "timers/")
        self.metrics.log_metrics(self.timer.consume_peaks(), self.step, "memory/")

    def shown_metrics(self) -> dict[str, float]:
        """What the progress bar shows."""
        shown = ("train_rewards", "train_init_policy_kl", "train_generation_length", "val_rewards")
        return {name: self._last_metrics[name] for name in shown if name in self._last_metrics}

    def _log_samples(self, key: str, rollouts: RolloutBatch, scores: Scores) -> None:
        table = self.collector.sample_table(rollouts, scores, self.settings.num_table_rows)
        prefix, number = self._where_to_log()
        self.metrics.log_table(prefix + key, ("prompt", "response", "reward"), table, number)

    def state_dict(self) -> dict[str, Any]:
        """Everything beside weights, optimizer and random states that a resumed run needs. Collective."""
        return super().state_dict() | {
            **self.train_prompts.sampler(self.consumed_samples).state_dict(),
            "ppo_optimization_step": self.ppo_optimization_step,
            "warm_up_rounds": self.warm_up_rounds,
            "generation": self.schedule.state_dict(self.step),
            "critic": self.critic.state_dict(),
            "train_prompts": self.train_prompts.state_dict(),
            "val_prompts": None if self.val_prompts is None else self.val_prompts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the prompts that follow, whatever the batch size is now."""
        super().load_state_dict(state)
        place = self.train_prompts.sampler(0)
        place.load_state_dict(state)
        self.consumed_samples = place.consumed_samples
        self.ppo_optimization_step = int(state["ppo_optimization_step"])
        if self.step > 0:  # before that, consumed_samples counts the warm-up's prompts
            minibatches = self.train_prompts.batch_size // self.settings.global_batch_size
            steps_left = place.batches_until(self.settings.max_epochs)
            self.bound_steps(steps_left, self.ppo_optimization_step, minibatches * self.settings.num_ppo_epochs)
        self.warm_up_rounds = int(state["warm_up_rounds"])
        self.critic.load_state_dict(state["critic"])
        self.train_prompts.load_state_dict(state["train_prompts"])
        if self.val_prompts is not None and state["val_prompts"] is not None:
            self.val_prompts.load_state_dict(state["val_prompts"])
        self.schedule.load_state_dict(state["generation"], self.step, self.train_prompts, self.consumed_samples)


def _without(metrics: dict[str, float], beginnings: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(beginnings)}
