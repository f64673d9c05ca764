"""Proximal policy optimisation (arXiv:1707.06347) of a language model, against a critic in another job."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig

from nemo_style_aligner.algorithms.experience import AdvantageSettings, leave_out_nonfinite, make_experience
from nemo_style_aligner.algorithms.generation_schedule import GenerationSchedule
from nemo_style_aligner.algorithms.remote_critic import CriticSave, CriticTraining, RemoteCritic
from nemo_style_aligner.algorithms.run_control import RunControl
from nemo_style_aligner.checkpoints.background import WorkTimes
from nemo_style_aligner.checkpoints.training import CheckpointManager
from nemo_style_aligner.models.actor import Actor, PolicyBatch
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.models.pipeline import rows
from nemo_style_aligner.parallel.stop_points import StopEarlyError
from nemo_style_aligner.rollout.batch import Experience, RolloutBatch, Scores
from nemo_style_aligner.rollout.collector import RolloutCollector
from nemo_style_aligner.rollout.prompts import PromptSource
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.logger import MetricsLogger
from nemo_style_aligner.telemetry.progress import ProgressBar
from nemo_style_aligner.telemetry.timers import ScopedTimer


@dataclasses.dataclass(frozen=True)
class PPOSettings:
    """The loop's settings (config keys of ``trainer.ppo`` unless said otherwise).

    Attributes:
        max_steps: PPO steps of the whole run, over all restarts.
        val_check_interval, save_interval: steps between validations and checkpoints; 0 turns them off.
        critic_warmup_steps: rounds in which only the critic learns, before the first step.
        num_ppo_epochs: passes over the rollouts in each step.
        global_batch_size: sequences per policy update [model.global_batch_size].
        seed: of the order of updates and of sampling [model.seed].
        num_table_rows: sample responses logged per step.
        unload_engine: give the engine's memory back while training [trt_llm.unload_engine_train].
        staleness: steps by which rollouts may be behind the weights that train on them.
        takes_engine_logprobs: the policy's log-probs are those that the engine reported [policy_logprobs].
        advantages: how rewards become advantages.
        nonfinite: what to do about NaN and Inf [on_nonfinite].
    """

    max_steps: int
    val_check_interval: int
    save_interval: int
    critic_warmup_steps: int
    num_ppo_epochs: int
    global_batch_size: int
    seed: int
    num_table_rows: int
    unload_engine: bool
    staleness: int
    takes_engine_logprobs: bool
    advantages: AdvantageSettings
    nonfinite: NonFinitePolicy

    @classmethod
    def from_config(cls, cfg: DictConfig, steps_per_epoch: int) -> PPOSettings:
        """Read a job's config; ``steps_per_epoch`` PPO steps see every prompt once.

        Raises:
            ValueError: too few prompts for one step.
        """
        ppo = cfg.trainer.ppo
        if steps_per_epoch < 1:
            raise ValueError(
                "there are fewer training prompts than model.ppo.num_rollout_samples="
                f"{cfg.model.ppo.num_rollout_samples}, which one PPO step needs: lower it or add prompts"
            )
        bounds = ppo.importance_sequence_bounds
        max_steps = steps_per_epoch * int(ppo.max_epochs)
        if ppo.max_steps is not None and ppo.max_steps >= 0:
            max_steps = min(max_steps, int(ppo.max_steps))
        return cls(
            max_steps=max_steps,
            val_check_interval=int(ppo.val_check_interval or 0),
            save_interval=int(ppo.save_interval or 0),
            critic_warmup_steps=int(ppo.critic_warmup_steps or 0),
            num_ppo_epochs=int(ppo.num_ppo_epochs),
            global_batch_size=int(cfg.model.global_batch_size),
            seed=int(cfg.model.seed),
            num_table_rows=int(ppo.num_table_rows),
            unload_engine=bool(ppo.trt_llm.unload_engine_train),
            staleness=int(ppo.staleness),
            takes_engine_logprobs=ppo.policy_logprobs == "engine",
            advantages=AdvantageSettings(
                kl_coef=float(ppo.initial_policy_kl_penalty),
                kl_estimator=ppo.kl_estimator or ("abs" if ppo.use_absolute_kl else "k1"),
                kl_clamp=ppo.kl_clamp,
                gamma=float(ppo.discount_factor),
                lam=float(ppo.gae_lambda),
                normalize=bool(ppo.normalize_advantages),
                unbiased=bool(ppo.advantage_whitening_unbiased),
                mask_truncated=bool(ppo.mask_truncated),
                importance_weight_cap=ppo.importance_weight_cap,
                importance_sequence_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            ),
            nonfinite=NonFinitePolicy.from_config(ppo),
        )


class PPOTrainer:
    """The PPO loop. Every rank of the actor job runs it in step.

    Attributes:
        step: PPO steps made.
        consumed_samples: training prompts used.
        ppo_optimization_step: policy updates made.
        warm_up_rounds: rounds of the critic's warm-up made.
    """

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
        self.settings = settings
        self.actor = actor
        self.collector = collector
        self.critic = critic
        self.train_prompts = train_prompts
        self.val_prompts = val_prompts
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.run_control = run_control
        self.timer = timer
        self.schedule = GenerationSchedule(
            collector,
            actor.model,
            timer,
            settings.seed,
            staleness=settings.staleness,
            unload_engine=settings.unload_engine,
        )
        self.step = 0
        self.consumed_samples = 0
        self.ppo_optimization_step = 0
        self.warm_up_rounds = 0
        self._is_validation_due = False
        self._last_metrics: dict[str, float] = {}
        self._saved = self._progress

    def fit(self) -> None:
        """Run PPO from the present step to ``max_steps``, or until the run is stopped.

        A step may be abandoned until the critic gets its batch: nothing of it is part of the state before.
        """
        self.run_control.begin()
        was_finished = self.is_finished
        total, rank = self.settings.max_steps, self.metrics.rank
        with self.checkpoints.last_chance(), ProgressBar(total, "PPO", rank, initial=self.step) as progress:
            try:
                self.warm_up_critic()
                self.validate_if_due()  # put off by a run that was stopped
                while not self.is_finished:
                    self.checkpoints.poll()
                    self.run_control.check(ahead="step")
                    with self.run_control.section("step"):
                        self.make_step()
                        self.validate_if_due()
                    if self.is_due(self.settings.save_interval):
                        self.save()
                    self.log_step(progress)
            except StopEarlyError as reason:
                self.save_unless_saved()
                self.finish_save()
                self.run_control.stop_early(self.step, reason)
            else:
                self.save_unless_saved()
                if was_finished:  # by a run that may have been killed between its last checkpoint and its archive
                    self._write_checkpoint()
                self.finish_save()
        self._log_phases()

    def make_step(self) -> None:
        """One PPO step, counted."""
        with self.timer("step"):
            self.train(self.generate_experience())
        self.schedule.drop(self.step)
        self.step += 1
        self._is_validation_due = self.is_due(self.settings.val_check_interval)

    # ---- the phases -------------------------------------------------------------------------

    def warm_up_critic(self) -> None:
        """Let the critic learn the policy's returns before the policy moves.

        The rounds use the first prompts of the training set; training starts over with them.
        """
        if self.step > 0:
            return
        while self.warm_up_rounds < self.settings.critic_warmup_steps:
            self.run_control.check(ahead="warm-up")
            with self.run_control.section("warm-up"):
                offset = self.warm_up_rounds * self.train_prompts.batch_size
                experience = self.generate_experience(offset=offset, stream=self.warm_up_rounds + 1)
                self.wait_for_critic(self.critic.start_training(experience))
            self.warm_up_rounds += 1
        self.consumed_samples = 0

    def generate_experience(self, offset: int | None = None, stream: int = 0) -> Experience:
        """Refit, generate (or take what was generated meanwhile), score, log-probs, advantages.

        Args:
            offset: training samples to skip; as many as were consumed unless given.
            stream: distinguishes random streams of rounds that belong to the same step.
        """
        start = self.consumed_samples if offset is None else offset
        with self.timer("rollout_time"):
            rollouts, scores, logprobs, init_logprobs = self._rollouts(self.train_prompts, start, stream, True)
        self.consumed_samples = start + len(rollouts)
        experience, metrics = make_experience(
            rollouts, scores, logprobs, init_logprobs, self.settings.advantages, self.ppo_optimization_step
        )
        metrics |= {"consumed_samples": self.consumed_samples, "epoch": self.epoch + 1}
        self.metrics.log_metrics(metrics, self.step, "train_rollouts/")
        self._log_samples("table/train_rollouts", rollouts, scores)
        self._last_metrics = {f"train_{name}": value for name, value in metrics.items()}
        return experience

    def _rollouts(
        self, prompts: PromptSource, start: int, stream: int, is_training: bool
    ) -> tuple[RolloutBatch, Scores, torch.Tensor, torch.Tensor | None]:
        with self.timer("offload"):
            self.actor.optimizer.offload_states()
        version = self.ppo_optimization_step
        pending = self.schedule.generate(prompts, start, self.step, stream, version)
        if is_training:
            self.metrics.log_metrics(pending.generation_metrics, self.step, "generation/")
        if is_training and stream == 0 and self.step + 1 < self.settings.max_steps:
            self.schedule.start_ahead(prompts, start + len(pending.rollouts), self.step + 1, version)
        tokens, mask = pending.rollouts.tokens, pending.rollouts.response_mask()
        # Scoring goes on in the critic job while these run.
        self.run_control.check()
        logprobs = pending.rollouts.engine_logprobs
        if not self.settings.takes_engine_logprobs:
            with self.timer("logprobs"):
                logprobs = self.actor.logprobs(tokens, mask)
        self.run_control.check()
        init_logprobs = None
        if is_training and self.actor.initial_policy is not None:
            with self.timer("init_logprobs"):
                init_logprobs = self.actor.initial_logprobs(tokens, mask)
        with self.timer("critic_wait"):
            scores = pending.wait_for_scores()
        self.run_control.check(ahead="training" if is_training else None)
        prompts.observe(pending.rollouts)  # part of the state: not before the last chance to abandon the step
        return leave_out_nonfinite(pending.rollouts, scores, logprobs, init_logprobs, self.settings.nonfinite)

    def train(self, experience: Experience) -> None:
        """Train policy and critic, side by side. Once the critic has its batch the step must be completed."""
        with self.run_control.section("training"):
            critic_training = self.critic.start_training(experience)
            self.train_policy(experience)
            self.wait_for_critic(critic_training)

    def train_policy(self, experience: Experience) -> None:
        """Minibatch updates over the experience, in an order that depends on seed, step and epoch alone."""
        with self.timer("train_time"):
            for epoch in range(self.settings.num_ppo_epochs):
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
        self.metrics.log_metrics({"critic_loss": loss}, self.step, "train_critic/")

    def validate_if_due(self) -> None:
        """Validate after the steps that ask for it."""
        if self._is_validation_due:
            self.validate()
            self._is_validation_due = False

    def validate(self) -> None:
        """Generate and score responses to the validation prompts."""
        if self.val_prompts is None:
            return
        with self.timer("validation_time"):
            rollouts, scores, logprobs, _ = self._rollouts(self.val_prompts, 0, -1, False)
        version = self.ppo_optimization_step
        _, metrics = make_experience(rollouts, scores, logprobs, None, self.settings.advantages, version)
        metrics = {k: v for k, v in metrics.items() if not k.startswith(("advantages", "returns", "init_policy"))}
        self.metrics.log_metrics(metrics, self.step, "val_rollouts/")
        self._log_samples("table/val_rollouts", rollouts, scores)
        self._last_metrics |= {f"val_{name}": value for name, value in metrics.items()}

    def save(self) -> None:
        """Save the critic, then this job. Should only the first come off, the critic goes back on resuming.

        Copies of both states are taken now; they are written while the next steps are made (`_save_ended`).
        """
        with self.timer("save_time"):
            self.finish_save()  # the one before
            self.run_control.save_began()
            critic_save = self.critic.start_save()
            self._write_checkpoint(critic_save)
        self._saved = self._progress

    def _save_ended(self, critic_save: CriticSave, times: WorkTimes) -> None:
        """Both checkpoints are whole on disk."""
        self.critic.confirm_save(critic_save)
        self.run_control.save_ended(times.total)
        self.timer.record("save_background_time", times.background)

    def finish_save(self) -> None:
        """Wait for the save that is under way, if there is one."""
        with self.timer("save_wait"), activity.bounded(self.critic.timeout_s):
            self.checkpoints.finish()

    def save_unless_saved(self) -> None:
        """Save if anything has been done since the last time, or since the start."""
        if self._progress != self._saved:
            self.save()

    def _write_checkpoint(self, critic_save: CriticSave | None = None) -> None:
        with activity.bounded(self.critic.timeout_s):
            self.checkpoints.save(
                self.actor.model,
                self.actor.optimizer,
                self.state_dict(),
                self._last_metrics | {"step": self.step, "epoch": self.epoch},
                is_train_end=self.is_finished and not self._is_validation_due,
                before_publishing=critic_save.wait if critic_save else None,
                on_end=functools.partial(self._save_ended, critic_save) if critic_save else None,
            )

    def close(self) -> None:
        """Close the connections to the critic and to the work queue."""
        self.collector.close()

    # ---- counters, logs, state --------------------------------------------------------------

    @property
    def _progress(self) -> tuple[int, int, bool]:
        """Changes with everything that a checkpoint would keep."""
        return self.step, self.warm_up_rounds, self._is_validation_due

    @property
    def epoch(self) -> int:
        """Passes over the training prompts completed."""
        return self.step // self.train_prompts.batches_per_epoch

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run are made."""
        return self.step >= self.settings.max_steps

    def is_due(self, interval: int) -> bool:
        """Whether an action with this interval falls on the present step; with an interval, the last step counts."""
        return interval > 0 and (self.step % interval == 0 or self.is_finished)

    def log_step(self, progress: ProgressBar) -> None:
        """Log the step's durations and peaks of memory, and move the progress bar."""
        self._log_phases()
        shown = ("train_rewards", "train_init_policy_kl", "train_generation_length", "val_rewards")
        progress.update(1, {name: self._last_metrics[name] for name in shown if name in self._last_metrics})

    def _log_phases(self) -> None:
        self.metrics.log_metrics(self.timer.consume_durations(), self.step, "timers/")
        self.metrics.log_metrics(self.timer.consume_peaks(), self.step, "memory/")

    def _log_samples(self, key: str, rollouts: RolloutBatch, scores: Scores) -> None:
        table = self.collector.sample_table(rollouts, scores, self.settings.num_table_rows)
        self.metrics.log_table(key, ("prompt", "response", "reward"), table, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Everything beside weights, optimizer and random states that a resumed run needs. Collective."""
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "ppo_optimization_step": self.ppo_optimization_step,
            "warm_up_rounds": self.warm_up_rounds,
            "is_validation_due": self._is_validation_due,
            "generation": self.schedule.state_dict(self.step),
            "critic": self.critic.state_dict(),
            "train_prompts": self.train_prompts.state_dict(),
            "val_prompts": None if self.val_prompts is None else self.val_prompts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step = int(state["step"])
        self.consumed_samples = int(state["consumed_samples"])
        self.ppo_optimization_step = int(state["ppo_optimization_step"])
        self.warm_up_rounds = int(state["warm_up_rounds"])
        self._is_validation_due = bool(state["is_validation_due"])
        self._saved = self._progress
        self.critic.load_state_dict(state["critic"])
        self.train_prompts.load_state_dict(state["train_prompts"])
        if self.val_prompts is not None and state["val_prompts"] is not None:
            self.val_prompts.load_state_dict(state["val_prompts"])
        generation = state.get("generation", {"rollouts": None})  # older checkpoints have none
        self.schedule.load_state_dict(generation, self.step, self.train_prompts, self.consumed_samples)
