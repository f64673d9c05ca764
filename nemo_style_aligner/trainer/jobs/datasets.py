"""The dataset that each job makes of its files."""

from __future__ import annotations

from typing import Any

from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.data.datasets import Dataset, DataSource, load_data_prefix
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.jobs.distillation_setup import distillation_dataset, teacher_texts
from nemo_style_aligner.trainer.jobs.fitting import fitting_batch
from nemo_style_aligner.trainer.jobs.preference_setup import judged_dataset, pair_dataset
from nemo_style_aligner.trainer.jobs.supervised_setup import reward_dataset, sft_dataset
from nemo_style_aligner.trainer.rl.rollouts.prompts import build_prompt_sources, prompt_dataset

_OF_PREFIX: dict[type[JobConfig], Any] = {
    schema.RewardTraining: reward_dataset,
    schema.DPOTraining: pair_dataset,
    schema.KTOTraining: judged_dataset,
    schema.DistillationTraining: distillation_dataset,
    schema.PPOActor: prompt_dataset,
}


def dataset_of(config: JobConfig, source: DataSource, tokenizer: Tokenizer) -> tuple[Dataset[Any], TextFormat]:
    """What a job with ``model.data.data_prefix`` makes of a part of it, and how its texts are written."""
    made: tuple[Dataset[Any], TextFormat] = _OF_PREFIX[type(config)](config, source, tokenizer)
    return made


def read_data(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Read a job's data as the job will: what is wrong with them is an error now.

    Raises:
        DataError: a line that is not as it should be, or fewer than a batch that was chosen.
    """
    if isinstance(config, schema.PPOActor):
        build_prompt_sources(config, tokenizer)
    elif isinstance(config, schema.TeacherLogits):
        teacher_texts(config.data, tokenizer)
    elif isinstance(config, schema.SFT):
        _require_batch(config, sft_dataset(config, "train_ds", tokenizer)[0])
        if config.model.data.validation_ds.file_path:
            sft_dataset(config, "validation_ds", tokenizer)
    elif isinstance(config, schema.SupervisedJob):
        prefix = load_data_prefix(config.model.data.data_prefix)  # type: ignore[attr-defined]  # all of them have it
        _require_batch(config, dataset_of(config, prefix.train, tokenizer)[0])
        if prefix.validation is not None:
            dataset_of(config, prefix.validation, tokenizer)


def _require_batch(config: schema.SFT | schema.SupervisedJob, train: Dataset[Any]) -> None:
    EpochSampler(len(train), fitting_batch(config, len(train)), seed=0, shuffle=False, drop_last=True)
