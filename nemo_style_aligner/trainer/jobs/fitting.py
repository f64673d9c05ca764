"""Sizes of batches that nobody has chosen, made to fit the data: the first try of a job runs, and says what it took.

A size that the user has given (`JobConfig.is_chosen`) stays as it is, and what is too large is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.job_view import GLOBAL_BATCH, PROMPTS
from nemo_style_aligner.trainer.rl.rollouts.prompts import responses_per_prompt

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=JobConfig)

OF_TRAINING = "model.data.train_ds.global_batch_size"
"""SFT's key of the batch, which `GLOBAL_BATCH` follows."""


def fitting_batch(config: schema.SFT | schema.SupervisedJob, num_examples: int) -> int:
    """Examples per update: as many as there are, at most, where nobody has chosen a number."""
    size = config.model.global_batch_size
    return size if config.is_chosen(GLOBAL_BATCH, OF_TRAINING) else max(1, min(size, num_examples))


def fit_batch(config: Config, run: Run, size: int, num_examples: int) -> Config:
    """The config with `fitting_batch`, which the log and the run's checkpoints say, too."""
    key = OF_TRAINING if isinstance(config, schema.SFT) else GLOBAL_BATCH
    if size == config.get(GLOBAL_BATCH):
        return config
    logger.info(
        "%s=%s: there are %d training examples, so it is %d in this run, and a pass over them is one update; set it "
        "lower for more",
        *(key, config.get(GLOBAL_BATCH), num_examples, size),
    )
    return _fitted(config, run, {key: size, GLOBAL_BATCH: size})


def fit_prompts(config: schema.PPOActor, run: Run, prompts: int) -> schema.PPOActor:
    """The config with `fitting_prompts`, and a batch that a step's responses fill; log and checkpoints say so."""
    responses, batch = prompts * responses_per_prompt(config), config.model.global_batch_size
    fitted = {PROMPTS: prompts} if prompts != config.model.ppo.num_rollout_samples else {}
    if responses % batch and not config.is_chosen(GLOBAL_BATCH):
        fitted[GLOBAL_BATCH] = responses
    for key, size in fitted.items():
        why = "there are fewer prompts" if key == PROMPTS else f"a step has {responses} responses"
        logger.info("%s=%s: %s, so it is %d in this run", key, config.get(key), why, size)
    return _fitted(config, run, fitted) if fitted else config


def _fitted(config: Config, run: Run, sizes: Mapping[str, int]) -> Config:
    kept = dict(run.checkpoints.run_settings or {})
    known = {key: str(size) for key, size in sizes.items() if "${" not in kept.get(key, "${")}
    run.checkpoints.run_settings = kept | known
    return config.changed(sizes)
