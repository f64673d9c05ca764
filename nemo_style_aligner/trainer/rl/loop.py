"""Reinforcement learning of a language model: one step of any algorithm.

A step generates samples, has them scored, makes advantages of the scores, and trains the policy (and the critic, where
there is one) on them. What differs between algorithms is not here: from scores to advantages is the estimator's
(`estimators`), from advantages to gradients the policy loss's (`models.policy_losses`), and where rewards and values
come from is the scorer's (`scoring`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_style_aligner import activity
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.checkpoints.background import OnEnd, WorkTimes
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager, MayPublish
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.rl.episodes.journal import EpisodeJournal
from nemo_style_aligner.trainer.rl.estimators import GroupedSamples
from nemo_style_aligner.trainer.rl.experience import (
    Experience,
    leave_out_nonfinite,
    make_experience,
    report_missing_rewards,
    rollout_metrics,
    why_nothing_is_learnt,
)
from nemo_style_aligner.trainer.rl.rollouts.collector import Collected, RolloutCollector, SampleSizes, deal
from nemo_style_aligner.trainer.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.trainer.rl.rollouts.schedule import TRAINING, VALIDATION, GenerationSchedule
from nemo_style_aligner.trainer.rl.sample import Rollouts
from nemo_style_aligner.trainer.rl.scoring import Scores
from nemo_style_aligner.trainer.rl.settings import RLSettings
from nemo_style_aligner.trainer.rl.values import Save, Training
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer
from nemo_style_aligner.trainer.training.loop import TrainingLoop
from nemo_style_aligner.trainer.training.run_control import RunControl

logger = logging.getLogger(__name__)

# Metrics that compare the engine's log-probs with the trainer's; left out where the trainer computes none.
_KEPT_SAVES = 1  # checkpoints beside the newest whose journalled episodes are kept, should that be damaged
_OF_TWO_POLICIES = ("engine_", "importance_")


class RLTrainer(TrainingLoop):
    """Trains a policy on scored samples of its own. Every rank of the actor job that trains runs `fit`.

    Attributes:
        consumed_samples: training prompts used.
        redrawn_samples: those of them that dynamic sampling has drawn beside the first round of each step.
        ppo_optimization_step: policy updates made, those skipped for NaN or Inf included.
        warm_up_rounds: rounds of the critic's warm-up made.
        history: of all updates so far, a digest: equal weights have equal ones, in the run and its other starts.
    """

    samples_name = "prompts"
    settings: RLSettings

    def __init__(
        self,
        settings: RLSettings,
        actor: Actor,
        collector: RolloutCollector,
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
        self.critic = collector.scorer.values  # None where the estimator needs no values
        self.train_prompts = train_prompts
        self.val_prompts = val_prompts
        self.schedule = GenerationSchedule(
            collector,
            actor.model,
            timer,
            settings.seed,
            settings.ppo,
            last_step=lambda: self.settings.max_steps - 1,
            history=lambda: self.history,
        )
        self.history = ""
        self.journal: EpisodeJournal | None = None  # on rank 0, where episodes are journalled
        self._forget: list[Callable[[], None]] = []  # episodes that older checkpoints needed
        self.title = "PPO" if settings.advantages.estimator.needs_values else settings.advantages.estimator.name
        self.consumed_samples = 0
        self.redrawn_samples = 0
        self.ppo_optimization_step = 0
        self.warm_up_rounds = 0
        self._last_loss = math.nan  # of the newest update

    # ---- a step -----------------------------------------------------------------------------

    def make_step(self) -> None:
        """Make and count one step. Until its samples are scored it can be abandoned: the state has none of it."""
        with self.timer("step"):
            experience, metrics = self.generate_experience()
            with self.run_control.section("training"):  # once a critic has its batch the step must be completed
                critic_training = self.start_critic(experience)
                self.train_policy(experience)
                self.wait_for_critic(critic_training)
        self.schedule.drop(self.step)
        self.count_step(metrics)

    def generate_experience(
        self, offset: int | None = None, stream: int = TRAINING
    ) -> tuple[Experience, dict[str, float]]:
        """Generate (or take what was generated beside training), score, compute log-probs and advantages.

        Args:
            offset: training prompts to skip; by default those consumed so far.
            stream: distinguishes random streams of rounds that belong to the same step.

        Returns:
            The experience, and the metrics that were logged about it.
        """
        start = self.consumed_samples if offset is None else offset
        epoch = self.epoch
        with self.timer("rollout_time"):
            collected, end, drawn = self.collect(start, stream)
            rollouts = self.deal(collected)
            columns = self.logprobs(rollouts, is_trained=stream == TRAINING)
            with self.timer("critic_wait"):
                scores = collected.wait_for_rewards()
            columns |= {name: collected.column(name, rollouts) for name in self.collector.scorer.columns}
            columns |= self.values(collected, rollouts)
        self.run_control.check(ahead="training")
        self.train_prompts.observe(rollouts)  # changes the state, so after the last point that can abandon the step
        self.consumed_samples = end
        self.redrawn_samples += end - self.train_prompts.after(start)
        rollouts, columns = leave_out_nonfinite(rollouts, scores, columns, self.settings.ppo)
        advantages, version = self.settings.advantages, self.ppo_optimization_step
        experience, metrics = make_experience(rollouts, scores, columns, advantages, version)
        metrics |= self.actor.routing
        if self.settings.ppo.policy_logprobs == "engine":
            metrics = _without(metrics, _OF_TWO_POLICIES)
        if self.metrics.rank == 0 and (reason := why_nothing_is_learnt(experience, advantages)):
            logger.warning("step %d: %s", self.step + 1, reason)
        metrics |= drawn | {"consumed_samples": self.consumed_samples, "epoch": epoch + 1}
        self._log(metrics, "train_rollouts/")
        prefix, number = self._where_to_log()
        self._log_samples(f"{prefix}table/train_rollouts", rollouts, scores, number)
        if self.settings.ppo.save_samples and stream == TRAINING:
            records = self.collector.sample_records(rollouts, scores, experience.columns)
            self.metrics.log_samples([{"step": self.step + 1, **record} for record in records])
        return experience, metrics

    def collect(self, start: int, stream: int) -> tuple[Collected, int, dict[str, float]]:
        """A step's samples, without groups that teach nothing if there is dynamic sampling.

        Args:
            start: training prompts to skip.
            stream: see `generate_experience`.

        Returns:
            The samples, how many prompts to skip after them, and metrics of what was drawn.
        """
        prompts, version, settings = self.train_prompts, self.ppo_optimization_step, self.settings
        self.make_room()
        collected, of_generation = self.schedule.generate(prompts, start, self.step, version, stream=stream)
        end, metrics = prompts.after(start), dict[str, float]()
        drawing = settings.ppo.dynamic_sampling
        if drawing.enable and drawing.max_rounds > 1:
            collected, end, metrics = self._with_useful_groups(collected, start, stream)
        if settings.ppo.top_n_rollouts is not None:
            collected, of_all = self._best(collected, settings.ppo.top_n_rollouts)
            metrics |= of_all
        self.schedule.unload()
        self._log(of_generation, "generation/")
        if stream == TRAINING:
            self.schedule.begin_ahead(prompts, end, self.step, version)
        self.run_control.check()
        return collected, end, metrics

    def make_room(self) -> None:
        """Leave the device to the engine and to scoring: what only training needs moves to host memory."""
        with self.timer("offload"):
            self.actor.optimizer.offload_states()
            if self.critic is not None:
                self.critic.give_back_memory()

    def _with_useful_groups(self, first: Collected, start: int, stream: int) -> tuple[Collected, int, dict[str, float]]:
        """`collect`'s dynamic sampling: more prompts are drawn in place of groups whose rewards are all equal.

        Where the last round leaves some missing, such groups of the first round take their places.
        """
        prompts, version = self.train_prompts, self.ppo_optimization_step
        end = prompts.after(start)
        useful, spare = self._useful(first)
        kept, rounds, dropped = first.only(useful), 1, len(spare)
        while len(kept) < len(first) and rounds < self.settings.ppo.dynamic_sampling.max_rounds:
            more, _ = self.schedule.generate(prompts, end, self.step, version, stream=stream, draw=rounds)
            end = prompts.after(end)
            useful, useless = self._useful(more)
            kept, rounds, dropped = kept.followed_by(more.only(useful)), rounds + 1, dropped + len(useless)
        missing = max(0, len(first) - len(kept))
        kept = kept.only(range(len(first) - missing)).followed_by(first.only(spare[:missing]))
        metrics = {"sampling_rounds": rounds, "dropped_samples": dropped - missing, "uninformative_samples": missing}
        return kept, end, {name: float(number) for name, number in metrics.items()}

    def _best(self, collected: Collected, count: int) -> tuple[Collected, dict[str, float]]:
        """The samples with the largest rewards of each group; the mean of all rewards, and of theirs. Collective."""
        with self.timer("critic_wait"):
            scores = collected.wait_for_rewards()
        rewards = scores.rewards
        best = GroupedSamples(groups=collected.groups, counts=rewards.isfinite()).best(rewards, count)
        dropped = torch.ones(len(rewards), dtype=torch.bool).index_fill(0, torch.tensor(best), False)
        self._report_missing(collected, scores, dropped)
        means = {"rewards": rewards.nanmean().item(), "best_rewards": rewards[best].nanmean().item()}
        return collected.only(best), means

    def _useful(self, collected: Collected) -> tuple[list[int], list[int]]:
        """Samples of groups whose rewards differ, and those of the other groups. Collective."""
        with self.timer("critic_wait"):
            scores = collected.wait_for_rewards()
        grouped = GroupedSamples(groups=collected.groups, counts=scores.rewards.isfinite())
        is_uniform = grouped.is_uniform(scores.rewards)
        self._report_missing(collected, scores, is_uniform)
        return (~is_uniform).nonzero()[:, 0].tolist(), is_uniform.nonzero()[:, 0].tolist()

    def _report_missing(self, collected: Collected, scores: Scores, dropped: torch.Tensor) -> None:
        prompt_ids = torch.tensor([prompt.prompt_id for prompt in collected.prompts])
        report_missing_rewards(scores, prompt_ids, dropped, self.settings.ppo)

    def deal(self, collected: Collected) -> Rollouts:
        """Give each data-parallel rank its share, even in every update of the first pass over the samples."""
        minibatches = [minibatch.tolist() for minibatch in self._minibatches(collected.groups, epoch=0)]
        return collected.dealt(minibatches, self._work)

    def _work(self, sizes: SampleSizes) -> Costs:
        operations = self.actor.model.architecture.forward_operations
        return sizes.costs(operations, self.actor.training_batching.shares_prompts)

    def logprobs(self, rollouts: Rollouts, *, is_trained: bool) -> dict[str, torch.Tensor]:
        """Log-probs of the share's sampled tokens, fp32 [R] each: ``old_logprobs``, and where these ranks have such
        models, ``reference_logprobs`` and ``teacher_logprobs``.

        Rewards and values are computed elsewhere meanwhile.
        """
        if self.settings.ppo.replay_routes and rollouts.routes is None:
            raise UserError(
                f"step {self.step + 1}: trainer.ppo.replay_routes=True, but its rollouts came without routes, as those "
                "that an older version has kept in a checkpoint: set it to False for this start, or begin a new run"
            )
        columns = {"old_logprobs": rollouts.engine_logprobs}
        batch = rollouts.batch(rollouts.counts, {})
        if self.settings.ppo.policy_logprobs != "engine":
            with self.timer("logprobs"):
                is_one_update = is_trained and len(rollouts) == self.settings.global_batch_size
                columns["old_logprobs"] = self.actor.logprobs(batch, is_trained=is_one_update)
        self.run_control.check()
        if self.actor.reference is not None:
            with self.timer("init_logprobs"):
                columns["reference_logprobs"] = self.actor.reference_logprobs(batch)
        if self.actor.teacher is not None:
            with self.timer("teacher_logprobs"):
                columns["teacher_logprobs"] = self.actor.teacher_logprobs(batch)
        return columns

    def train_policy(self, experience: Experience) -> None:
        """Minibatch updates over the experience, in an order that depends on seed, step and epoch alone."""
        first, size, epochs = (
            self.ppo_optimization_step,
            self.settings.global_batch_size,
            self.settings.ppo.num_ppo_epochs,
        )
        updates = -(-len(experience) // size) * epochs
        prompt_ids = experience.rollouts.prompt_ids
        counting = activity.counting("updates", lambda: (self.ppo_optimization_step - first, updates))
        with self.timer("train_time"), counting:
            for epoch in range(epochs):
                minibatches = [minibatch.tolist() for minibatch in self._minibatches(experience.rollouts.groups, epoch)]
                if epoch:  # its minibatches are others than those that the samples were dealt for
                    work = self._work(SampleSizes.of(experience.rollouts))
                    experience = experience.dealt(deal(work, minibatches))
                for minibatch in minibatches:
                    origin = f"samples {minibatch} (prompts {prompt_ids[minibatch].tolist()})"
                    metrics = self.actor.update(experience.minibatch(minibatch), origin)
                    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
                    metrics["optim_step"] = self.ppo_optimization_step
                    self.metrics.log_metrics(metrics, self.ppo_optimization_step, "train_optim/")
                    self._last_loss = metrics.get("loss", math.nan)
                    made = f"{self.history} {self._last_loss!r} {metrics.get('grad_norm')!r}"
                    self.history = hashlib.sha256(made.encode()).hexdigest()
                    self.ppo_optimization_step += 1

    def _minibatches(self, groups: torch.Tensor, epoch: int) -> Iterator[torch.Tensor]:
        """The samples of each global minibatch, int64 [global_batch_size]. Those of a group follow one another."""
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "minibatches", self.step, epoch))
        numbers, group_of = groups.unique(return_inverse=True)
        turns = torch.randperm(len(numbers), generator=generator).argsort()
        yield from turns[group_of].argsort(stable=True).split(self.settings.global_batch_size)

    # ---- the critic -------------------------------------------------------------------------

    def values(self, collected: Collected, rollouts: Rollouts) -> dict[str, torch.Tensor]:
        """The values of the share's response tokens, fp32 [R], as the column ``values``, if there is a critic."""
        if self.critic is None:
            return {}
        with self.timer("values"):
            values = self.critic.values_of(rollouts)
        return {"values": collected.column("values", rollouts) if values is None else values}

    def start_critic(self, experience: Experience) -> Training | None:
        """Have the critic learn the returns, if there is one; one in another job does while the policy is trained."""
        if self.critic is None:
            return None
        with self.timer("critic_train"):
            return self.critic.start_training(experience)

    def wait_for_critic(self, training: Training | None) -> None:
        """Wait for the critic to finish its update, log its loss."""
        if training is None:
            return
        with self.timer("critic_train_wait"):
            metrics = training.result()
        self._log(metrics, "train_critic/")

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
                self.wait_for_critic(self.start_critic(experience))
            self.warm_up_rounds += 1
            self._is_saved = False
            self.checkpoints.poll()
            if self.settings.save_interval and self.warm_up_rounds % self.settings.save_interval == 0:
                self.save_unless_saved()
        self.consumed_samples = self.redrawn_samples = 0

    # ---- validations and saves --------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Generate and score responses to the validation prompts; return the metrics that were logged about them."""
        if self.val_prompts is None:
            return {}
        version = self.ppo_optimization_step
        with self.timer("validation_time"):
            self.make_room()
            collected, _ = self.schedule.generate(self.val_prompts, 0, self.step, version, stream=VALIDATION)
            self.schedule.unload()
            rollouts = self.deal(collected)
            with self.timer("critic_wait"):
                scores = collected.wait_for_rewards()
        self.run_control.check()
        self.val_prompts.observe(rollouts)
        columns = self.values(collected, rollouts)
        rollouts, columns = leave_out_nonfinite(rollouts, scores, columns, self.settings.ppo)
        metrics = rollout_metrics(rollouts, scores, columns.get("values"), version)
        self.metrics.log_metrics(metrics, self.step, "val_rollouts/")
        for prompt, response, reward in self._log_samples("table/val_rollouts", rollouts, scores, self.step)[:2]:
            texts = (f"{text:.300}" for text in (prompt, response))
            logger.info("validation at step %d, reward %.4g: %r -> %r", self.step, reward, *texts)
        return metrics

    def begin_save(self) -> tuple[MayPublish | None, OnEnd]:
        """Save a critic in another job, then this one. If only the former succeeds, the critic goes back on resuming.

        Copies of both states are taken now; they are written while the next steps are made (`save_pair_ended`).
        """
        if self.journal is not None:
            self._forget.append(self.journal.of_now())
        critic_save = None if self.critic is None else self.critic.start_save()
        if critic_save is None:
            return super().begin_save()
        return critic_save.wait, functools.partial(self.save_pair_ended, critic_save)

    def save_pair_ended(self, critic_save: Save, times: WorkTimes) -> None:
        """Note that the critic's checkpoint and this job's are both whole on disk."""
        assert self.critic is not None
        self.critic.confirm_save(critic_save)
        self.save_ended(times)

    def save_ended(self, times: WorkTimes) -> None:
        """Note that a checkpoint is whole on disk: the one before is now the oldest that may be resumed from."""
        super().save_ended(times)
        while len(self._forget) > _KEPT_SAVES:
            self._forget.pop(0)()

    def close(self) -> None:
        """Close the connections to services and to the work queue."""
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
        """Prefix of the metrics' names, and the step being made, from 1: in the warm-up, ``warm_up/`` and the round."""
        return ("warm_up/", self.warm_up_rounds + 1) if self._is_warming_up else ("", self.step + 1)

    @property
    def _is_warming_up(self) -> bool:
        return self.step == 0 and self.warm_up_rounds < self.settings.ppo.critic_warmup_steps

    def log_phases(self) -> None:
        """Log the step's durations and peaks of memory."""
        self.metrics.log_metrics(self.timer.consume_durations(), self.step, "timers/")
        self.metrics.log_metrics(self.timer.consume_peaks(), self.step, "memory/")

    def shown_metrics(self) -> dict[str, float]:
        """What the progress lines show."""
        shown = ("train_rewards", "train_init_policy_kl", "train_generation_length", "val_rewards")
        rewards = {name: self._last_metrics[name] for name in shown if name in self._last_metrics}
        return {"loss": self._last_loss, **rewards}

    def _log_samples(self, key: str, rollouts: Rollouts, scores: Scores, number: int) -> list[tuple[str, str, float]]:
        table = self.collector.sample_table(rollouts, scores, self.settings.ppo.num_table_rows)
        self.metrics.log_table(key, ("prompt", "response", "reward"), table, number)
        return table

    def state_dict(self) -> dict[str, Any]:
        """Everything beside weights, optimizer and random states that a resumed run needs. Collective."""
        return super().state_dict() | {
            **self.train_prompts.sampler(self.consumed_samples).state_dict(),
            "ppo_optimization_step": self.ppo_optimization_step,
            "reinforce_optimization_step": self.ppo_optimization_step,  # its name in REINFORCE's checkpoints' names
            "rs_optimization_step": self.ppo_optimization_step,  # and in those of best of n
            "redrawn_samples": self.redrawn_samples,
            "warm_up_rounds": self.warm_up_rounds,
            "history": self.history,
            "generation": self.schedule.state_dict(self.ppo_optimization_step),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "train_prompts": self.train_prompts.state_dict(),
            "val_prompts": None if self.val_prompts is None else self.val_prompts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the prompts that follow, whatever the batch size is now."""
        super().load_state_dict(state)
        place = self.train_prompts.sampler(0)
        place.load_state_dict(state)
        self.consumed_samples = place.consumed_samples
        self.redrawn_samples = int(state.get("redrawn_samples", 0))
        self.ppo_optimization_step = int(state["ppo_optimization_step"])
        if self.step > 0:  # before that, consumed_samples counts the warm-up's prompts
            prompts = self.train_prompts
            of_prompt = self.settings.ppo.top_n_rollouts or prompts.samples_per_prompt
            minibatches = prompts.batch_size * of_prompt // self.settings.global_batch_size
            in_first_rounds = prompts.sampler(max(0, self.consumed_samples - self.redrawn_samples))
            steps_left = in_first_rounds.batches_until(self.settings.max_epochs)
            self.bound_steps(steps_left, self.ppo_optimization_step, minibatches * self.settings.ppo.num_ppo_epochs)
        self.warm_up_rounds = int(state["warm_up_rounds"])
        self.history = str(state.get("history", ""))
        if self.critic is not None and state["critic"] is not None:
            self.critic.load_state_dict(state["critic"])
        self.train_prompts.load_state_dict(state["train_prompts"])
        if self.val_prompts is not None and state["val_prompts"] is not None:
            self.val_prompts.load_state_dict(state["val_prompts"])
        self.schedule.load_state_dict(state["generation"], self.train_prompts)


def _without(metrics: dict[str, float], beginnings: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(beginnings)}
