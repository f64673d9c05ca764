"""The jobs that learn from preferences, DPO and KTO: their datasets, batches, reference and objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.data.datasets import (
    Dataset,
    DataSource,
    JudgedDataset,
    JudgedItem,
    MismatchedDataset,
    PreferenceDataset,
    PreferenceItem,
    pad_rows,
)
from nemo_style_aligner.trainer.jobs.job_setup import Run, frozen_policy
from nemo_style_aligner.trainer.jobs.supervised_setup import (
    BuildDataset,
    SupervisedTask,
    build_supervised_trainer,
    prefix_task,
)
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.preference_losses import PreferenceBatch, dpo_objective, kto_objective, with_kl
from nemo_style_aligner.trainer.models.restore import BaseModel
from nemo_style_aligner.trainer.training.reference import Reference, keep_reference, with_reference
from nemo_style_aligner.trainer.training.supervised import SupervisedTrainer


def build_dpo_trainer(config: schema.DPOTraining, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Direct preference optimization; see `supervised_setup.BuildTrainer`."""
    loop, method = config.trainer.dpo, config.model.dpo
    build = partial(pair_dataset, config, tokenizer=base.tokenizer)
    task, model, reference, batching = _starting_point(config, method, loop, base, build)
    objective = dpo_objective(method, partial(with_reference, reference=reference, batching=batching))
    return build_supervised_trainer(config, loop, run, model, task, objective)


def build_kto_trainer(config: schema.KTOTraining, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Kahneman-Tversky optimization; see `supervised_setup.BuildTrainer`."""
    loop, method = config.trainer.kto, config.model.kto
    build = partial(mismatched_dataset, config, tokenizer=base.tokenizer)
    task, model, reference, batching = _starting_point(config, method, loop, base, build)

    def prepare(batch: PreferenceBatch) -> PreferenceBatch:
        return with_kl(model, with_reference(batch, reference, batching), method, batching)

    objective = kto_objective(method, prepare)
    return build_supervised_trainer(config, loop, run, model, task, objective)


def _starting_point(
    config: schema.DPOTraining | schema.KTOTraining,
    method: schema.Preferences,
    loop: schema.RewardLoop,
    base: BaseModel,
    build: BuildDataset,
) -> tuple[SupervisedTask, MegatronModel, Reference | None, MicroBatching]:
    """The task, the model to train, the reference (None if the task's items know its log-probs) and its micro batches.

    The reference is the model that the run began with: this is before a checkpoint is loaded.
    """
    collate = preference_collate(base.tokenizer)
    task = prefix_task(config, loop, base.tokenizer, build, collate, 2)
    # It says how a reward model's texts end.
    task = dataclasses.replace(task, written=dataclasses.replace(task.written, append_eod=None))
    model = base.load()
    own, pairs = config.model, method.log_prob_forward_micro_batch_size
    batching = MicroBatching(2 * pairs, own.max_tokens_per_micro_batch, 2, own.share_prompts)
    if method.reference_logprobs_dir is None:
        return task, model, frozen_policy(model, base, method.reference_policy_placement), batching
    described = {"model": on_first_rank(base.identity), "shape": str(base.architecture), "dtype": str(base.dtype)}
    if model.adapters:
        described["adapters"] = str(LoraSettings.from_config(base.config))
    folder = Path(method.reference_logprobs_dir).expanduser()
    keep = partial(keep_reference, model=model, collate=collate, batching=batching, folder=folder, described=described)
    kept_validation = None if task.validation is None else keep(task.validation)
    return dataclasses.replace(task, train=keep(task.train), validation=kept_validation), model, None, batching


def _encoder_settings(data: schema.RewardData) -> dict[str, Any]:
    return {"add_bos": data.add_bos, "append_eod": data.append_eod, "seq_length": data.seq_length}


def pair_dataset(
    config: schema.DPOTraining, source: DataSource, tokenizer: Tokenizer
) -> tuple[Dataset[PreferenceItem], TextFormat]:
    """The pairs of a part of ``model.data.data_prefix``, and how their texts are written."""
    data = config.model.data
    rewards = data.default_chosen_reward, data.default_rejected_reward
    return source.build(lambda paths: PreferenceDataset(paths, tokenizer, _encoder_settings(data), rewards))


def judged_dataset(
    config: schema.KTOTraining, source: DataSource, tokenizer: Tokenizer
) -> tuple[Dataset[JudgedItem], TextFormat]:
    """The judged responses of a part of ``model.data.data_prefix``, and how their texts are written."""
    return source.build(lambda paths: JudgedDataset(paths, tokenizer, _encoder_settings(config.model.data)))


def mismatched_dataset(
    config: schema.KTOTraining, source: DataSource, tokenizer: Tokenizer
) -> tuple[Dataset[PreferenceItem], TextFormat]:
    """`judged_dataset`, each response with a mismatched one beside it."""
    judged, written = judged_dataset(config, source, tokenizer)
    return MismatchedDataset(judged, config.model.seed, config.model.data.seq_length), written


def preference_collate(tokenizer: Tokenizer) -> Callable[[Sequence[PreferenceItem], torch.Tensor], PreferenceBatch]:
    """What turns items into a batch."""

    def collate(items: Sequence[PreferenceItem], present: torch.Tensor) -> PreferenceBatch:
        sequences = [ids for item in items for ids in item.token_ids]
        prompts = [length for item in items for length in item.prompt_lengths]
        masks = [[0] * prompt + [1] * (len(ids) - prompt) for ids, prompt in zip(sequences, prompts, strict=True)]
        known = [value for item in items for value in item.reference or (float("nan"),) * 2]
        return PreferenceBatch(
            tokens=pad_rows(sequences, tokenizer.pad_id),
            loss_mask=pad_rows(masks, 0)[:, 1:].float(),
            labels=torch.tensor([label for item in items for label in item.labels]),
            weights=present.repeat_interleave(2),
            reference=torch.tensor(known),
            kl=torch.zeros(len(sequences)),
        )

    return collate
