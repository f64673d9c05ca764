"""The supervised jobs: what they all do, and SFT's and the reward model's datasets, batches and loss."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.config.loading import ConfigError, load_defaults
from nemo_style_aligner.data.datasets import (
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
from nemo_style_aligner.data.examples import FIRST_EXAMPLE, for_log
from nemo_style_aligner.data.samplers import EpochSampler
from nemo_style_aligner.data.sft import SFTDataset, SFTFormat, SFTItem
from nemo_style_aligner.data.text_format import ChatPromptTokens, TextFormat
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.jobs.job_setup import Run, register_model, start_run, training_batching
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.nonfinite import NonFinitePolicy
from nemo_style_aligner.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.models.restore import BaseModel, open_base_model
from nemo_style_aligner.models.supervised_losses import (
    LabelledBatch,
    LanguageModelBatch,
    Objective,
    PairBatch,
    attribute_regression_objective,
    language_model_objective,
    ranking_objective,
)
from nemo_style_aligner.training.supervised import Collate, SupervisedSettings, SupervisedTrainer

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


BuildTrainer = Callable[[DictConfig, Run, BaseModel], SupervisedTrainer]
"""A method: builds its trainer from a job's config, surroundings and base model. Collective.

It looks at its data before it loads any weight."""


def run_supervised(
    cfg: DictConfig, build: BuildTrainer, base_key: str = "pretrained_checkpoint.restore_from_path"
) -> int:
    """Train a model on examples; return the job's exit status. Collective.

    ``base_key`` names the archive to start from.
    """
    run = start_run(cfg)
    base = open_base_model(OmegaConf.select(cfg, base_key), cfg, key=base_key)
    register_model(cfg, run, base)
    trainer = build(cfg, run, base)
    trainer.fit()
    return run.close()


def build_supervised_trainer(
    cfg: DictConfig,
    section: DictConfig,
    run: Run,
    model: MegatronModel,
    task: SupervisedTask,
    objective: Objective,
) -> SupervisedTrainer:
    """Build the trainer of a job, resumed if there is a checkpoint.

    Args:
        cfg: the whole config.
        section: ``cfg.trainer.sft``, ``cfg.trainer.rm`` or the like.
        model: trainable, with its starting weights.
        task, objective: the data, and the loss on them.

    Raises:
        ValueError: too few examples.
    """
    global_batch = int(cfg.model.global_batch_size)
    val_batch = global_batch if task.val_global_batch_size is None else task.val_global_batch_size
    seed = int(cfg.model.seed)
    train_sampler = training_sampler(cfg, task)
    validation = task.validation if task.validation is not None and len(task.validation) else None
    val_sampler = None
    if validation is not None:
        val_sampler = EpochSampler(len(validation), val_batch, seed, task.shuffle_validation, drop_last=False)
    settings = SupervisedSettings.from_config(
        section, train_sampler.batches_per_epoch, val_sampler.batches_per_epoch if val_sampler else 0
    )
    if validation is None and settings.val_check_interval:
        warn_for_all_ranks(
            logger, "there is no validation data: nothing is validated (val_check_interval has no effect)"
        )
    _require_known_best(settings, run, val_sampler is not None)
    schedule = Schedule.from_config(cfg.model.optim, settings.max_steps)
    nonfinite = NonFinitePolicy.from_config(section)
    optimizer = Optimizer(model, cfg.model.optim, schedule, float(section.gradient_clip_val or 0.0), nonfinite)
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
        batching=training_batching(cfg.model, task.rows_per_example),
        val_batching=training_batching(cfg.model, task.rows_per_example, task.val_micro_batch_size),
    )
    run.note_format(task.written)
    trainer.profile = cfg.trainer.profile
    run.resume(cfg, model, optimizer, trainer)
    optimizer.schedule.warn_if_nothing_decays()
    return trainer


BuildDataset = Callable[[DataSource], tuple[Dataset[Any], TextFormat]]
"""Makes the dataset of a part of ``model.data.data_prefix``, and says how its texts are written."""


def prefix_task(
    cfg: DictConfig, loop: DictConfig, tokenizer: Tokenizer, build: BuildDataset, collate: Collate, rows: int
) -> SupervisedTask:
    """The task of a job with ``model.data.data_prefix``; ``loop``: its section in ``trainer``; ``rows``: per example.

    Raises:
        DataError: the data are not as they should be, or do not fill a global batch.
    """
    prefix = load_data_prefix(cfg.model.data.data_prefix)
    train, written = build(prefix.train)
    logger.info(FIRST_EXAMPLE, for_log(train[0], tokenizer))
    validation = None if prefix.validation is None else build(prefix.validation)[0]
    shuffled = bool(loop.train_random_sampler), bool(loop.val_random_sampler)
    task = SupervisedTask(train, validation, collate, rows, *shuffled, written=written)
    training_sampler(cfg, task)
    return task


def training_sampler(cfg: DictConfig, task: SupervisedTask) -> EpochSampler:
    """The order of the training examples. Raises DataError if they do not fill a global batch."""
    batch, seed = int(cfg.model.global_batch_size), int(cfg.model.seed)
    return EpochSampler(len(task.train), batch, seed, task.shuffle_train, drop_last=True)


def _require_known_best(settings: SupervisedSettings, run: Run, has_validation: bool) -> None:
    """Raise ConfigError if ``save_best_model`` asks for what intervals that are fractions of the run leave unknown."""
    checkpoints, validated = run.checkpoints.settings, settings.val_check_interval if has_validation else 0
    reason = checkpoints.why_best_is_unknown("trainer", settings.save_interval, validated)
    if checkpoints.save_best_model and reason is not None:
        raise ConfigError(f"exp_manager.checkpoint_callback_params.save_best_model=True: {reason}")


# ---- SFT ----------------------------------------------------------------------------------------


def build_sft_trainer(cfg: DictConfig, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Supervised fine-tuning; see `BuildTrainer`."""
    task = sft_task(cfg, base.tokenizer)
    training_sampler(cfg, task)  # too few examples are an error before any weight is read
    return build_supervised_trainer(cfg, cfg.trainer.sft, run, base.load(), task, language_model_objective())


def sft_dataset(cfg: DictConfig, part: str, tokenizer: Tokenizer) -> tuple[Dataset[SFTItem], TextFormat]:
    """The samples of ``model.data.<part>``, and how their texts are written."""
    data = cfg.model.data
    markup = None if tokenizer.chat_template else ChatPromptTokens(**data.chat_prompt_tokens)
    options = SFTFormat.from_config(cfg.model, part, markup)
    source = data_source(data[part].file_path, f"model.data.{part}.file_path")
    return source.build(lambda paths: SFTDataset(paths, tokenizer, options))


def sft_task(cfg: DictConfig, tokenizer: Tokenizer) -> SupervisedTask:
    """Prompt-response pairs or conversations, from ``model.data.train_ds`` and ``validation_ds``."""
    data = cfg.model.data

    def collate(items: Sequence[SFTItem], present: torch.Tensor) -> LanguageModelBatch:
        tokens = pad_rows([item.token_ids for item in items], tokenizer.pad_id)
        mask = pad_rows([item.targets for item in items], 0)[:, 1:].float()
        return LanguageModelBatch(tokens, mask * present[:, None])

    if tokenizer.chat_template and data.chat_prompt_tokens != load_defaults("gpt_sft").model.data.chat_prompt_tokens:
        warn_for_all_ranks(
            logger,
            "model.data.chat_prompt_tokens have no effect: the tokenizer's chat template renders conversations",
        )
    train, written = sft_dataset(cfg, "train_ds", tokenizer)
    logger.info(FIRST_EXAMPLE, for_log(train[0], tokenizer))
    return SupervisedTask(
        train,
        sft_dataset(cfg, "validation_ds", tokenizer)[0] if data.validation_ds.file_path else None,
        collate,
        1,
        bool(data.train_ds.shuffle),
        bool(data.validation_ds.shuffle),
        int(data.validation_ds.global_batch_size),
        int(data.validation_ds.micro_batch_size),
        written=written,
    )


# ---- reward models ------------------------------------------------------------------------------


def build_reward_trainer(cfg: DictConfig, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Reward model training; see `BuildTrainer`."""
    head = RewardHeadConfig.from_model_config(cfg.model)
    task = reward_task(cfg, base.tokenizer, head)
    model = base.load(head=head)
    return build_supervised_trainer(cfg, cfg.trainer.rm, run, model, task, reward_objective(cfg, head))


def reward_dataset(
    cfg: DictConfig, source: DataSource, tokenizer: Tokenizer, num_attributes: int | None = None
) -> tuple[Dataset[Any], TextFormat]:
    """The pairs or labelled texts of a part of ``model.data.data_prefix``, and how their texts are written."""
    data = cfg.model.data
    length, append_eod, add_bos = int(data.seq_length), bool(data.append_eod), data.add_bos
    if cfg.model.reward_model_type == "regression":
        ignored = float(cfg.model.regression.loss_mask_val)
        return source.build(
            lambda paths: RegressionDataset(paths, tokenizer, length, append_eod, num_attributes, add_bos, ignored)
        )
    return source.build(lambda paths: ComparisonDataset(paths, tokenizer, length, append_eod, add_bos))


def reward_task(cfg: DictConfig, tokenizer: Tokenizer, head: RewardHeadConfig) -> SupervisedTask:
    """Comparisons or labelled texts, from ``model.data.data_prefix``."""

    def build(source: DataSource) -> tuple[Dataset[Any], TextFormat]:
        return reward_dataset(cfg, source, tokenizer, head.num_attributes)

    if cfg.model.reward_model_type == "regression":
        collate = _labelled_collate(tokenizer, float(cfg.model.regression.loss_mask_val))
        return prefix_task(cfg, cfg.trainer.rm, tokenizer, build, collate, 1)
    return prefix_task(cfg, cfg.trainer.rm, tokenizer, build, _pair_collate(tokenizer), 2)


def reward_objective(cfg: DictConfig, head: RewardHeadConfig) -> Objective:
    """Bradley-Terry loss for comparisons, squared error for labels."""
    if cfg.model.reward_model_type == "regression":
        return attribute_regression_objective(head, float(cfg.model.regression.loss_mask_val))
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
