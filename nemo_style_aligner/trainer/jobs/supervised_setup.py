"""The supervised jobs: what they all do, and SFT's and the reward model's datasets, batches and loss."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.data.datasets import (
    ComparisonDataset,
    ComparisonItem,
    Dataset,
    DataSource,
    RegressionDataset,
    RegressionItem,
    data_source,
    lengths_of,
    load_data_prefix,
    pad_rows,
)
from nemo_style_aligner.trainer.data.examples import FIRST_EXAMPLE, for_log
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.data.sft import SFTDataset, SFTFormat, SFTItem
from nemo_style_aligner.trainer.jobs.fitting import fit_batch, fitting_batch
from nemo_style_aligner.trainer.jobs.job_setup import Run, register_model, start_run, training_batching
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.restore import ARCHIVE, BaseModel, open_base_model
from nemo_style_aligner.trainer.models.routes import Balance
from nemo_style_aligner.trainer.models.supervised_losses import (
    LabelledBatch,
    LanguageModelBatch,
    Objective,
    PairBatch,
    attribute_regression_objective,
    language_model_objective,
    ranking_objective,
)
from nemo_style_aligner.trainer.training.supervised import Collate, SupervisedSettings, SupervisedTrainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SupervisedTask:
    """What distinguishes one supervised job from another.

    Attributes:
        train, validation: datasets; no validation when None.
        collate: turns examples into a batch.
        rows_per_example: rows of a batch per example.
        shuffle_train, shuffle_validation: order of the examples.
        val_global_batch_size, val_micro_batch_size: of validation; None: the model's.
        written: how the texts of the training data are written.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | None
    collate: Collate
    rows_per_example: int
    shuffle_train: bool
    shuffle_validation: bool
    val_global_batch_size: int | None = None
    val_micro_batch_size: int | None = None
    written: TextFormat = dataclasses.field(default_factory=TextFormat)


Config = TypeVar("Config", schema.SFT, schema.SupervisedJob)

BuildTrainer = Callable[[Config, Run, BaseModel], SupervisedTrainer]
"""A method: builds its trainer from a job's config, surroundings and base model. Collective.

It looks at its data before it loads any weight."""


def run_supervised(config: Config, build: BuildTrainer[Config], base_key: str = ARCHIVE) -> int:
    """Train a model on examples; return the job's exit status. Collective.

    ``base_key`` names the archive to start from.
    """
    run = start_run(config)
    base, config = open_base_model(config.get(base_key), config, key=base_key)
    register_model(config, run, base)
    trainer = build(config, run, base)
    trainer.fit()
    return run.close()


def build_supervised_trainer(
    config: schema.SFT | schema.SupervisedJob,
    loop: schema.SupervisedLoop,
    run: Run,
    model: MegatronModel,
    task: SupervisedTask,
    objective: Objective,
) -> SupervisedTrainer:
    """Build the trainer of a job, resumed if there is a checkpoint.

    Args:
        loop: ``trainer.sft``, ``trainer.rm`` or the like.
        model: trainable, with its starting weights.
        task, objective: the data, and the loss on them.

    Raises:
        ValueError: too few examples.
    """
    config = fit_batch(config, run, fitting_batch(config, len(task.train)), len(task.train))
    own = config.model
    val_batch = own.global_batch_size if task.val_global_batch_size is None else task.val_global_batch_size
    train_sampler = training_sampler(config, task)
    validation = task.validation if task.validation is not None and len(task.validation) else None
    val_sampler = None
    if validation is not None:
        val_sampler = EpochSampler(len(validation), val_batch, own.seed, task.shuffle_validation, drop_last=False)
    settings = SupervisedSettings.from_config(
        loop, train_sampler.batches_per_epoch, val_sampler.batches_per_epoch if val_sampler else 0
    )
    if validation is None and settings.val_check_interval:
        warn_for_all_ranks(
            logger, "there is no validation data: nothing is validated (val_check_interval has no effect)"
        )
    _require_known_best(settings, run, val_sampler is not None)
    schedule = Schedule.from_config(own.optim, settings.max_steps)
    optimizer = Optimizer(model, own.optim, schedule, loop.gradient_clip_val or 0.0, loop)
    trainer = SupervisedTrainer(
        settings,
        model,
        optimizer,
        objective,
        task.train,
        train_sampler,
        validation,
        val_sampler,
        task.collate,
        run.checkpoints,
        run.metrics,
        run.control,
        batching=training_batching(own, task.rows_per_example),
        val_batching=training_batching(own, task.rows_per_example, task.val_micro_batch_size),
    )
    run.note_format(task.written)
    trainer.profile = config.trainer.profile
    run.resume(config, model, optimizer, trainer)
    optimizer.schedule.warn_if_nothing_decays()
    return trainer


PrefixJob = schema.RewardTraining | schema.DPOTraining | schema.KTOTraining | schema.DistillationTraining
"""A job with ``model.data.data_prefix``."""

BuildDataset = Callable[[DataSource], tuple[Dataset[Any], TextFormat]]
"""Makes the dataset of a part of ``model.data.data_prefix``, and says how its texts are written."""


def prefix_task(
    config: PrefixJob, loop: schema.RewardLoop, tokenizer: Tokenizer, build: BuildDataset, collate: Collate, rows: int
) -> SupervisedTask:
    """The task of a job with ``model.data.data_prefix``; ``loop``: its section in ``trainer``; ``rows``: per example.

    Raises:
        DataError: the data are not as they should be, or do not fill a global batch.
    """
    prefix = load_data_prefix(config.model.data.data_prefix)
    train, written = build(prefix.train)
    logger.info(FIRST_EXAMPLE, for_log(train[0], tokenizer))
    validation = None if prefix.validation is None else build(prefix.validation)[0]
    shuffled = loop.train_random_sampler, loop.val_random_sampler
    task = SupervisedTask(train, validation, collate, rows, *shuffled, written=written)
    training_sampler(config, task)
    return task


def training_sampler(config: schema.SFT | schema.SupervisedJob, task: SupervisedTask) -> EpochSampler:
    """The order of the training examples. Raises DataError if they do not fill a global batch that was chosen."""
    size = fitting_batch(config, len(task.train))
    return EpochSampler(len(task.train), size, config.model.seed, task.shuffle_train, drop_last=True)


def _require_known_best(settings: SupervisedSettings, run: Run, has_validation: bool) -> None:
    """Raise ConfigError if ``save_best_model`` asks for what intervals that are fractions of the run leave unknown."""
    checkpoints, validated = run.checkpoints.settings, settings.val_check_interval if has_validation else 0
    reason = checkpoints.why_best_is_unknown("trainer", settings.save_interval, validated)
    if checkpoints.save_best_model and reason is not None:
        raise ConfigError(f"exp_manager.checkpoint_callback_params.save_best_model=True: {reason}")


# ---- SFT ----------------------------------------------------------------------------------------


def build_sft_trainer(config: schema.SFT, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Supervised fine-tuning; see `BuildTrainer`."""
    task = sft_task(config, base.tokenizer)
    training_sampler(config, task)  # too few examples are an error before any weight is read
    own, model = config.model, base.load()
    model.balance = Balance.of(base.architecture, own.moe_aux_loss_coeff, own.moe_router_bias_update_rate)
    return build_supervised_trainer(config, config.trainer.sft, run, model, task, language_model_objective())


def sft_dataset(
    config: schema.SFT, part: Literal["train_ds", "validation_ds"], tokenizer: Tokenizer
) -> tuple[Dataset[SFTItem], TextFormat]:
    """The samples of ``model.data.<part>``, and how their texts are written."""
    data = config.model.data
    files = data.train_ds if part == "train_ds" else data.validation_ds
    has_template = bool(tokenizer.chat_template)
    options = SFTFormat.from_config(files, data, config.model.answer_only_loss, has_template=has_template)
    source = data_source(files.file_path, f"model.data.{part}.file_path")
    return source.build(lambda paths: SFTDataset(paths, tokenizer, options))


def sft_task(config: schema.SFT, tokenizer: Tokenizer) -> SupervisedTask:
    """Prompt-response pairs or conversations, from ``model.data.train_ds`` and ``validation_ds``."""
    data = config.model.data

    def collate(items: Sequence[SFTItem], present: torch.Tensor) -> LanguageModelBatch:
        tokens = pad_rows([item.token_ids for item in items], tokenizer.pad_id)
        mask = pad_rows([item.targets for item in items], 0)[:, 1:].float()
        return LanguageModelBatch(tokens, mask * present[:, None])

    if tokenizer.chat_template and vars(data.chat_prompt_tokens) != vars(schema.ChatTokens()):
        warn_for_all_ranks(
            logger,
            "model.data.chat_prompt_tokens have no effect: the tokenizer's chat template renders conversations",
        )
    train, written = sft_dataset(config, "train_ds", tokenizer)
    logger.info(FIRST_EXAMPLE, for_log(train[0], tokenizer))
    return SupervisedTask(
        train,
        sft_dataset(config, "validation_ds", tokenizer)[0] if data.validation_ds.file_path else None,
        collate,
        1,
        data.train_ds.shuffle,
        data.validation_ds.shuffle,
        data.validation_ds.global_batch_size,
        data.validation_ds.micro_batch_size,
        written=written,
    )


# ---- reward models ------------------------------------------------------------------------------


def build_reward_trainer(config: schema.RewardTraining, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Reward model training; see `BuildTrainer`."""
    head = RewardHeadConfig.from_model_config(base.config)
    task = reward_task(config, base.tokenizer, head)
    model = base.load(head=head)
    return build_supervised_trainer(config, config.trainer.rm, run, model, task, reward_objective(config.model, head))


def reward_dataset(
    config: schema.RewardTraining, source: DataSource, tokenizer: Tokenizer, num_attributes: int | None = None
) -> tuple[Dataset[Any], TextFormat]:
    """The pairs or labelled texts of a part of ``model.data.data_prefix``, and how their texts are written."""
    data = config.model.data
    length, append_eod, add_bos = data.seq_length, data.append_eod, data.add_bos
    if config.model.reward_model_type == "regression":
        ignored = config.model.regression.loss_mask_val
        return source.build(
            lambda paths: RegressionDataset(paths, tokenizer, length, append_eod, num_attributes, add_bos, ignored)
        )
    return source.build(lambda paths: ComparisonDataset(paths, tokenizer, length, append_eod, add_bos))


def reward_task(config: schema.RewardTraining, tokenizer: Tokenizer, head: RewardHeadConfig) -> SupervisedTask:
    """Comparisons or labelled texts, from ``model.data.data_prefix``."""

    def build(source: DataSource) -> tuple[Dataset[Any], TextFormat]:
        return reward_dataset(config, source, tokenizer, head.num_attributes)

    model, loop = config.model, config.trainer.rm
    if model.reward_model_type == "regression":
        collate = _labelled_collate(tokenizer, model.regression.loss_mask_val)
        return prefix_task(config, loop, tokenizer, build, collate, 1)
    return prefix_task(config, loop, tokenizer, build, _pair_collate(tokenizer), 2)


def reward_objective(model: schema.RewardModel, head: RewardHeadConfig) -> Objective:
    """Bradley-Terry loss for comparisons, squared error for labels."""
    if model.reward_model_type == "regression":
        return attribute_regression_objective(head, model.regression.loss_mask_val)
    return ranking_objective(head)


def _pair_collate(tokenizer: Tokenizer) -> Collate:
    def collate(pairs: Sequence[ComparisonItem], present: torch.Tensor) -> PairBatch:
        sequences = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
        return PairBatch(
            tokens=pad_rows(sequences, tokenizer.pad_id),
            lengths=lengths_of(sequences),
            weights=present.repeat_interleave(2),
        )

    return collate


def _labelled_collate(tokenizer: Tokenizer, ignore_value: float) -> Collate:
    def collate(items: Sequence[RegressionItem], present: torch.Tensor) -> LabelledBatch:
        sequences = [item.token_ids for item in items]
        labels = torch.tensor([item.labels for item in items], dtype=torch.float32)
        labels[present == 0] = ignore_value
        return LabelledBatch(tokens=pad_rows(sequences, tokenizer.pad_id), lengths=lengths_of(sequences), labels=labels)

    return collate
