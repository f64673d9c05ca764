"""Supervised training: the loop that SFT, reward models, preferences, distillation share, each with its objective."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_style_aligner import activity
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config.schema import SupervisedLoop
from nemo_style_aligner.trainer.data.datasets import Dataset
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.optimizer import Optimizer
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import evaluate_step, train_step
from nemo_style_aligner.trainer.models.supervised_losses import Objective
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer, peak_meter
from nemo_style_aligner.trainer.training.loop import LoopSettings, TrainingLoop, limit_of
from nemo_style_aligner.trainer.training.run_control import RunControl


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedSettings(LoopSettings):
    """`LoopSettings` and those of supervised jobs (config keys of ``trainer.sft``, ``trainer.rm`` and the like).

    Attributes:
        limit_val_batches: global batches per validation.
    """

    limit_val_batches: int

    @classmethod
    def from_config(cls, loop: SupervisedLoop, steps_per_epoch: int, num_val_batches: int) -> SupervisedSettings:
        """Those of a trainer's section. ``limit_val_batches`` may be a number or a fraction (float up to 1.0)."""
        max_steps = min(steps_per_epoch * loop.max_epochs, limit_of(loop.max_steps))
        limit = loop.limit_val_batches
        if isinstance(limit, float) and 0.0 <= limit <= 1.0:
            limit = max(1, round(limit * num_val_batches)) if limit else 0
        return cls(
            max_steps=max_steps,
            max_epochs=loop.max_epochs,
            step_limit=limit_of(loop.max_steps),
            val_check_interval=_interval(loop.val_check_interval, max_steps),
            val_check_at_start=loop.val_check_at_start,
            save_interval=_interval(loop.save_interval, max_steps),
            limit_val_batches=min(int(limit), num_val_batches),
        )


def _interval(value: float | None, max_steps: int) -> int:
    """An interval in updates; a float up to 1.0 is a fraction of the run, null or 0 means never."""
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return max(1, round(value * max_steps))
    return int(value or 0)


Collate = Callable[[Sequence[Any], torch.Tensor], Any]
"""Examples, and fp32 [n], 0 for those without a part in the loss -> a batch for the pipeline (one row per sequence)."""


class SupervisedTrainer(TrainingLoop):
    """Trains a model on examples, one update per step. Every rank runs `fit`.

    Args:
        settings: see `SupervisedSettings`.
        model, optimizer: what is trained.
        objective: what is minimised; the named sums of its loss become metrics.
        train_data, val_data: the examples.
        train_sampler, val_sampler: yield global batches of example indices; training drops a last, smaller one.
        collate: turns a rank's examples into a batch.
        batching, val_batching: micro batches of the rows, in training and in validation.
    """

    title = "Training"
    samples_name = "examples"
    settings: SupervisedSettings

    def __init__(
        self,
        settings: SupervisedSettings,
        model: MegatronModel,
        optimizer: Optimizer,
        objective: Objective,
        train_data: Dataset[Any],
        train_sampler: EpochSampler,
        val_data: Dataset[Any] | None,
        val_sampler: EpochSampler | None,
        collate: Collate,
        checkpoints: CheckpointManager,
        metrics: MetricsLogger,
        run_control: RunControl,
        *,
        batching: MicroBatching,
        val_batching: MicroBatching,
    ) -> None:
        timer = ScopedTimer(take_peak=peak_meter())
        super().__init__(settings, model, optimizer, checkpoints, metrics, run_control, timer)
        self.objective = objective
        self.train_data = train_data
        self.train_sampler = train_sampler
        self.val_data = val_data
        self.val_sampler = val_sampler
        self.collate = collate
        self.batching = batching
        self.val_batching = val_batching
        self._batches = itertools.chain.from_iterable(itertools.repeat(train_sampler))  # epoch after epoch

    def make_step(self) -> None:
        """One update, logged and counted."""
        with self.timer("train_step_time"):
            metrics = self.update(next(self._batches))
        self.count_step(metrics)
        self.metrics.log_metrics(metrics | self.timer.consume_durations(), self.step, "train/")
        self.metrics.log_metrics(self.timer.consume_peaks(), self.step, "memory/")

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Make one optimizer update from a global batch of example indices; return the metrics that are finite."""
        self.model.module.train()
        self.optimizer.zero_grad()
        metrics = self._run(train_step, self.train_data, indices, self.batching)
        num_items, origin = metrics.pop("num_items"), f"examples {list(indices)} of the training data"
        metrics |= self.optimizer.step(metrics["loss"], origin, num_items)
        if self.model.balance is not None and "grad_norm" in metrics:
            self.model.balance.move_biases(self.model.gpt.decoder.layers)
        return {name: value for name, value in self.objective.report(metrics).items() if math.isfinite(value)}

    def validate(self) -> dict[str, float]:
        """Mean loss and metrics over the first ``limit_val_batches`` global batches of the validation set.

        Raises:
            StopEarlyError: between two batches.
        """
        if self.val_sampler is None or self.val_data is None:
            return {}
        self.model.module.eval()
        totals: dict[str, float] = {}
        done, limit = 0, self.settings.limit_val_batches
        with self.timer("validation_time"), activity.counting("batches", lambda: (done, limit)):
            self.val_sampler.consumed_samples = 0
            for indices in itertools.islice(self.val_sampler, limit):
                activity.progress()
                self.run_control.check()
                means = self._run(evaluate_step, self.val_data, indices, self.val_batching)
                count = means.pop("num_items")
                for name, mean in {**means, "num_items": 1.0}.items():
                    totals[name] = totals.get(name, 0.0) + mean * count
                done += 1
        count = totals.pop("num_items", 0.0)
        metrics = self.objective.report({name: total / count for name, total in totals.items()}) if count else {}
        self.metrics.log_metrics(metrics | self.timer.consume_durations(), self.step, "val/")
        return metrics

    def _run(
        self,
        step: Callable[..., dict[str, float]],
        data: Dataset[Any],
        indices: Sequence[int],
        batching: MicroBatching,
    ) -> dict[str, float]:
        """Run ``step`` on this data-parallel rank's part of a global batch.

        The batch is filled up to whole micro batches with examples that have no part in the loss.
        """
        layout, objective = self.model.layout, self.objective
        missing = -len(indices) % (batching.num_rows // batching.group * layout.dp_size)
        filled, present = [*indices, *[0] * missing], [1.0] * len(indices) + [0.0] * missing
        size = len(filled) // layout.dp_size
        own = slice(layout.dp_rank * size, (layout.dp_rank + 1) * size)
        batch = self.collate([data[index] for index in filled[own]], torch.tensor(present[own]))
        if objective.prepare is not None:
            with self.timer("prepare_time"):
                batch = objective.prepare(batch)
        return step(
            self.model,
            batch,
            objective.wanted(batch),
            batching,
            objective.loss,
            scoring=objective.scoring,
            is_whole=False,
        )

    @property
    def place(self) -> EpochSampler:
        """The order of the examples, at the next one."""
        return self.train_sampler

    def log_phases(self) -> None:
        """Log the durations of what belongs to no update and no validation: saves."""
        self.metrics.log_metrics(self.timer.consume_durations(), self.step, "train/")

    def shown_metrics(self) -> dict[str, float]:
        """What the progress lines show."""
        return {name: value for name, value in self._last_metrics.items() if name.endswith(("loss", "accuracy"))}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights, optimizer and random states."""
        balance = {} if self.model.balance is None else self.model.balance.state_dict()
        return super().state_dict() | self.train_sampler.state_dict() | balance

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the examples that follow, whatever the batch size is now."""
        super().load_state_dict(state)
        if self.model.balance is not None:
            self.model.balance.load_state_dict(state)
        self.train_sampler.load_state_dict(state)
        steps_left = self.train_sampler.batches_until(self.settings.max_epochs)
        self.bound_steps(steps_left, updates_made=self.step, updates_per_step=1)
