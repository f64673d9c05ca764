"""The loop around every kind of training step: validations, checkpoints, stops, and the archive at the end."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.checkpoints.background import OnEnd, WorkTimes
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager, MayPublish
from nemo_style_aligner.trainer.config.schema import ProfiledSteps
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.optimizer import Optimizer
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.profiler import profiled
from nemo_style_aligner.trainer.telemetry.progress import Progress
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer
from nemo_style_aligner.trainer.training.run_control import STATE, RunControl
from nemo_style_aligner.wording import counted

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What every trainer's section says about its loop.

    Attributes:
        max_steps: steps of the whole run, over all restarts: those of ``max_epochs``, but at most ``step_limit``.
        max_epochs: passes over the training data.
        step_limit: the section's ``max_steps``; see `limit_of`.
        val_check_interval, save_interval: steps between validations and checkpoints; 0 turns them off.
        val_check_at_start: validate before the first step, too.
    """

    max_steps: int
    max_epochs: int
    step_limit: int
    val_check_interval: int
    val_check_at_start: bool = False
    save_interval: int


def limit_of(max_steps: int) -> int:
    """``max_steps`` of a trainer's section; `sys.maxsize` if it is -1, so that only epochs count."""
    return sys.maxsize if max_steps < 0 else max_steps


class TrainingLoop(abc.ABC):
    """Training from where the run was resumed to its last step. Every rank that trains runs it in step.

    Subclasses bring their step and validation (`make_step`, `validate`), and what they log.

    Args:
        model, optimizer: what is trained, and saved.

    Attributes:
        step: steps made.
        profile: ``trainer.profile``, the steps that are profiled; None: none are.
    """

    settings: LoopSettings
    title: str
    """What the progress lines begin with."""
    samples_name: ClassVar[str]
    """What the log calls the training samples."""

    def __init__(
        self,
        settings: LoopSettings,
        model: MegatronModel,
        optimizer: Optimizer,
        checkpoints: CheckpointManager,
        metrics: MetricsLogger,
        run_control: RunControl,
        timer: ScopedTimer,
    ) -> None:
        self.settings = settings
        self.model = model
        self.optimizer = optimizer
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.run_control = run_control
        self.timer = timer
        self.profile: ProfiledSteps | None = None
        self.step = 0
        self._is_validation_due = False
        self._is_saved = True
        self._has_warned_of_monitor = False
        self._last_metrics: dict[str, float] = {}  # of the present step only: they rank its checkpoint

    def fit(self) -> None:
        """Train from the present step to ``max_steps``, or until the run is stopped.

        First completes what an earlier start left open: rounds of a warm-up, a validation that it abandoned. An
        archive that is still missing is written even if no step is left.
        """
        self.run_control.begin()
        total, rank = self.settings.max_steps, self.metrics.rank
        if self.step == 0 or not self.is_finished:
            logger.info("%s", self.describe_length())
        elif rank == 0:
            logger.warning(
                "all %d steps of this run are already done: nothing is trained. For a new run give another "
                "exp_manager.explicit_log_dir; to continue this one raise max_epochs or max_steps",
                self.step,
            )
        self.metrics.log_length(total)
        progress = Progress(total, self.title, rank, initial=self.step)
        profile = profiled(self.profile, self.metrics.log_dir, rank, self.step)
        with self._telling_who_interrupts(), self.checkpoints.last_chance(), progress, profile as step_ends:
            try:
                self.warm_up()
                self.validate_before_steps()
                while not self.is_finished:
                    self.checkpoints.poll()
                    self.run_control.check(ahead="step")
                    with self.run_control.section("step"):
                        self.make_step()
                        self.validate_if_due()
                    self.save_if_due()
                    self.log_phases()
                    progress.update(1, self.shown_metrics())
                    step_ends()
                self.save_unless_saved()
                self.finish_save()
                if self.checkpoints.exports_at_end:  # without one the run is done, even if asked to stop
                    self.run_control.check()
            except StopEarlyError as reason:
                self.save_unless_saved()
                self.finish_save()
                self.run_control.stop_early(self.step, reason)
            else:
                self.export()
        self.log_phases()

    def describe_length(self) -> str:
        """How many samples a step and an epoch take, and which setting ends the run."""
        place, settings = self.place, self.settings
        text = f"{counted(place.num_samples, self.samples_name)}, {place.global_batch_size} per step: "
        text += f"{counted(place.batches_per_epoch, 'steps')} per epoch"
        left = place.num_samples - place.samples_per_epoch
        text += f", {left} left over" if left else ""
        if settings.max_steps >= settings.step_limit:
            return f"{text}; max_steps={settings.step_limit} ends the run"
        text += f"; max_epochs={settings.max_epochs} ends the run after {counted(settings.max_steps, 'steps')}"
        return text if settings.step_limit == sys.maxsize else f"{text}, before max_steps={settings.step_limit}"

    @contextlib.contextmanager
    def _telling_who_interrupts(self) -> Iterator[None]:
        """Log what is done, and what of it is on disk, when Ctrl-C ends the body."""
        try:
            yield
        except KeyboardInterrupt:
            newest = self.checkpoints.newest()
            saved = f"the newest checkpoint is {newest}" if newest is not None else "there is no checkpoint yet"
            done = f"{counted(self.step, 'steps')}; {saved}. SIGUSR1 in place of Ctrl-C saves before the job ends"
            warn_for_all_ranks(logger, "interrupted after %s", done)
            raise

    # ---- what a subclass brings -------------------------------------------------------------

    @abc.abstractmethod
    def make_step(self) -> None:
        """Make one step, which ends with `count_step`.

        Raises:
            StopEarlyError: the step is abandoned; the state is that before the step.
        """

    @abc.abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Validate, log and return the metrics; empty if there is nothing to validate on.

        Raises:
            StopEarlyError: the validation is abandoned.
        """

    def warm_up(self) -> None:  # noqa: B027  (most have none)
        """Do what comes before the first step.

        Raises:
            StopEarlyError: it stops before its end.
        """

    @property
    @abc.abstractmethod
    def place(self) -> EpochSampler:
        """The sampler of the training data, at the next sample."""

    @property
    def epoch(self) -> int:
        """Completed passes over the training data."""
        return self.place.epoch

    @abc.abstractmethod
    def log_phases(self) -> None:
        """Log the durations that the timer has gathered."""

    @abc.abstractmethod
    def shown_metrics(self) -> dict[str, float]:
        """What the progress lines show of `_last_metrics`."""

    # ---- steps ------------------------------------------------------------------------------

    def count_step(self, metrics: Mapping[str, float]) -> None:
        """Count a step that is made; checkpoints know its ``metrics`` as ``train_*``."""
        self.step += 1
        self._is_validation_due = self.is_due(self.settings.val_check_interval)
        self._is_saved = False
        self._last_metrics = self._ranking("train_", metrics)

    def validate_before_steps(self) -> None:
        """Validate if an earlier start of the run left that open, or if it is to be known what the run begins with."""
        if self.step > 0:
            if self._is_validation_due:
                self.validate_if_due()
                self.save_if_due()
        elif self.settings.val_check_at_start and self.settings.val_check_interval > 0 and not self.is_finished:
            self.validate()  # ranks no checkpoint: there is nothing to save yet
            self.log_phases()

    def validate_if_due(self) -> None:
        """Validate if the last step, or an earlier start of the run, asked for it."""
        if self._is_validation_due:
            self._last_metrics |= self._ranking("val_", self.validate())
            self._is_validation_due = False
            self._is_saved = False

    def _ranking(self, prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """``metrics`` under the names that rank checkpoints; warns once if ``monitor`` should be one but is not."""
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        monitor = self.checkpoints.settings.monitor or ""
        if named and monitor.startswith(prefix) and monitor not in named and not self._has_warned_of_monitor:
            self._has_warned_of_monitor = True
            if self.metrics.rank == 0:
                logger.warning(
                    "exp_manager.checkpoint_callback_params.monitor=%s is not measured, so no checkpoint counts as "
                    "the best: choose one of %s, and restart",
                    monitor,
                    ", ".join(sorted(named)),
                )
        return named

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run are made."""
        return self.step >= self.settings.max_steps

    def is_due(self, interval: int) -> bool:
        """Whether an action with this interval is due: at its multiples and at the run's last step; with 0 never."""
        return interval > 0 and (self.step % interval == 0 or self.is_finished)

    # ---- checkpoints ------------------------------------------------------------------------

    def save(self) -> None:
        """Save a copy of the state; it is written while the next steps are made."""
        with self.timer("save_time"):
            self.finish_save()  # of the save before this one
            self.run_control.save_began()
            before_publishing, on_end = self.begin_save()
            with self.run_control.section(STATE):  # may wait: rollouts under way are part of it
                state = self.state_dict()
            self.checkpoints.save(
                self.model,
                self.optimizer,
                state,
                self._last_metrics | {"step": self.step, "epoch": self.epoch},
                before_publishing=before_publishing,
                on_end=on_end,
            )
        self._is_saved = True

    def begin_save(self) -> tuple[MayPublish | None, OnEnd]:
        """Do what must come before the state is copied; return ``before_publishing`` and ``on_end`` of the save.

        See `CheckpointManager.save`.
        """
        return None, self.save_ended

    def save_ended(self, times: WorkTimes) -> None:
        """Note that the checkpoint is whole on disk."""
        self.run_control.save_ended(times.total)
        self.timer.record("save_background_time", times.background)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        with self.timer("save_wait"):
            self.checkpoints.finish()

    def save_if_due(self) -> None:
        """Save if ``save_interval`` says so at the present step."""
        if self.is_due(self.settings.save_interval):
            self.save_unless_saved()

    def save_unless_saved(self) -> None:
        """Save if anything was done since the last save, or since the start."""
        if not self._is_saved:
            self.save()

    def export(self) -> None:
        """Write the archive at the end of training, if the settings want one."""
        with self.timer("save_time"):
            self.checkpoints.export_at_end(self.model)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights, optimizer and random states; JSON values. Collective."""
        return {"step": self.step, "is_validation_due": self._is_validation_due, "metrics": self._last_metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step = int(state["step"])
        self._is_validation_due = bool(state["is_validation_due"])
        self._last_metrics = dict(state["metrics"])
        self._is_saved = True

    def bound_steps(self, steps_left: int, updates_made: int, updates_per_step: int) -> None:
        """Set the run's last step and the end of the learning rate's schedule anew, after loading.

        If batch sizes have changed since the run began, both differ from those of a run with one size throughout.

        Args:
            steps_left: until ``max_epochs`` are complete.
            updates_made: up to the present step.
            updates_per_step: in the steps that are left.
        """
        max_steps = min(self.step + steps_left, self.settings.step_limit)
        updates = updates_made + (max_steps - self.step) * updates_per_step
        self.settings = dataclasses.replace(self.settings, max_steps=max_steps)
        self.optimizer.schedule = self.optimizer.schedule.ending_with_run(updates)
