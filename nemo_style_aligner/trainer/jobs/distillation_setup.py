"""Distillation: the job that learns from a teacher's stored logits, and the one that stores them."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.engine.text.jsonl import DataError, parse_line
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.config.schema import DistillationTraining, TeacherData, TeacherLogits
from nemo_style_aligner.trainer.data.datasets import Dataset, DataSource, data_source, pad_rows
from nemo_style_aligner.trainer.data.distillation import DistillationDataset, DistillationItem
from nemo_style_aligner.trainer.data.examples import FIRST_EXAMPLE, for_log
from nemo_style_aligner.trainer.data.sft import SFTDataset, SFTFormat, SFTItem
from nemo_style_aligner.trainer.jobs.job_setup import Run, lay_out, start_service_watchdog
from nemo_style_aligner.trainer.jobs.supervised_setup import build_supervised_trainer, prefix_task
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError
from nemo_style_aligner.trainer.models.distillation_losses import DistillationBatch, distillation_objective
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model
from nemo_style_aligner.trainer.models.supervised_losses import LanguageModelBatch
from nemo_style_aligner.trainer.training.run_control import RunControl, parse_duration
from nemo_style_aligner.trainer.training.supervised import Collate, SupervisedTrainer

logger = logging.getLogger(__name__)

# ---- the student --------------------------------------------------------------------------------


def build_distillation_trainer(config: DistillationTraining, run: Run, base: BaseModel) -> SupervisedTrainer:
    """Knowledge distillation from stored logits; see `supervised_setup.BuildTrainer`."""
    loop, model, tokenizer = config.trainer.knowledge_distillation, config.model, base.tokenizer
    build = functools.partial(
        distillation_dataset, config, tokenizer=tokenizer, vocab_size=base.architecture.vocab_size
    )
    task = prefix_task(config, loop, tokenizer, build, distillation_collate(tokenizer), 1)
    objective = distillation_objective(**vars(model.knowledge_distillation))
    return build_supervised_trainer(config, loop, run, base.load(), task, objective)


def distillation_dataset(
    config: DistillationTraining, source: DataSource, tokenizer: Tokenizer, vocab_size: int | None = None
) -> tuple[Dataset[DistillationItem], TextFormat]:
    """The texts of a part of ``model.data.data_prefix``, and how they are written.

    ``vocab_size``: the student's; None: the tokenizer's.
    """
    data, found = config.model.data, set[int]()
    settings = {"vocab_size": vocab_size or tokenizer.vocab_size, "seq_length": data.seq_length, "top_k": data.top_k}

    def make(paths: Sequence[Path]) -> DistillationDataset:
        dataset = DistillationDataset(paths, tokenizer, settings)
        found.add(dataset.top_k)
        return dataset

    made = source.build(make)
    if len(found) > 1:  # of a blend
        raise DataError(f"files have {sorted(found)} logits at a position: set model.data.top_k={min(found)}")
    return made


def distillation_collate(tokenizer: Tokenizer) -> Collate:
    """What turns items into a batch."""

    def collate(items: Sequence[DistillationItem], present: torch.Tensor) -> DistillationBatch:
        tokens = pad_rows([item.token_ids for item in items], tokenizer.pad_id)
        mask = pad_rows([item.targets for item in items], 0)[:, 1:].float()
        learnt = mask != 0
        shape = *mask.shape, len(items[0].logits) // sum(items[0].targets)
        candidates, logits = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        for column, values in ((candidates, "candidates"), (logits, "logits")):
            of_all = torch.tensor([x for item in items for x in getattr(item, values)], dtype=column.dtype)
            column[learnt] = of_all.view(-1, shape[-1])
        return DistillationBatch(tokens, mask * present[:, None], candidates, logits)

    return collate


# ---- the teacher --------------------------------------------------------------------------------


def store_teacher_logits(config: TeacherLogits) -> int:
    """Write the top-k logits of ``pretrained_checkpoint`` for a file; return the job's exit status. Collective.

    Examples whose lines are in ``output_path`` already are not computed again: a job that was stopped goes on.

    Raises:
        DataError: the file lacks examples that are asked for, or the lines that are there are of something else.
    """
    lay_out(config.model, config.trainer.distributed_timeout_minutes)
    control = RunControl(parse_duration(config.exp_manager.max_time_per_run))
    watchdog = start_service_watchdog(config.exp_manager)
    base, config = open_base_model(config.pretrained_checkpoint.restore_from_path, config)
    dataset = teacher_texts(config.data, base.tokenizer)
    first, last = config.start_from_idx or 0, len(dataset) - 1 if config.end_at_idx is None else config.end_at_idx
    if not first <= last < len(dataset):
        raise DataError(f"start_from_idx={first}, end_at_idx={last}: the file has {len(dataset)} examples, from 0 on")
    made_by = {"tokenizer": base.tokenizer.fingerprint(), "teacher": on_first_rank(base.identity), "k": config.top_k}
    path = Path(config.output_path).expanduser()
    known = on_first_rank(lambda: _indices_in(path, made_by, dataset))
    missing = [index for index in range(first, last + 1) if index not in known]
    logger.info("%s: %d examples to compute, %d are there", path, len(missing), last + 1 - first - len(missing))
    model = base.load(trainable=False)
    own = config.model
    batching = MicroBatching(own.micro_batch_size, own.max_tokens_per_micro_batch, shares_prompts=own.share_prompts)
    control.begin()
    done, size = 0, config.model.global_batch_size
    try:
        with activity.phase("teacher"), activity.counting("examples", lambda: (done, len(missing))):
            for start in range(0, len(missing), size):
                control.check()
                items = {index: dataset[index] for index in missing[start : start + size]}
                lines = teacher_lines(model, items, batching, config.top_k)
                on_first_rank(lambda: _append(path, [line | made_by for line in lines]))  # noqa: B023
                done += len(items)
    except StopEarlyError as reason:
        control.stop_early(done, reason)
    if watchdog is not None:
        watchdog.stop()
    return control.status


def teacher_texts(data: TeacherData, tokenizer: Tokenizer) -> SFTDataset:
    """The texts that the teacher reads; the log shows the first."""
    options = SFTFormat.from_config(data.data, data, True, has_template=bool(tokenizer.chat_template))
    dataset = SFTDataset(data_source(data.data.file_path, "data.data.file_path").paths, tokenizer, options)
    logger.info(FIRST_EXAMPLE, for_log(dataset[0], tokenizer))
    return dataset


def teacher_lines(
    model: MegatronModel, items: Mapping[int, SFTItem], batching: MicroBatching, top_k: int
) -> list[dict[str, Any]]:
    """A line of data for each example (see `data.distillation`), named by its index. Collective.

    As in NeMo-Aligner, the largest logit of a position is 0, and ``log_sum_exp_logits`` counts all of the vocabulary;
    but where nothing is learnt, zeros stand.
    """
    tokens = pad_rows([item.token_ids for item in items.values()], 0)
    mask = pad_rows([item.targets for item in items.values()], 0)[:, 1:].float()
    batch, row_shape = LanguageModelBatch(tokens, mask), (mask.shape[1], 2 * top_k)
    scoring, wanted = Scoring(top_k=top_k), mask != 0
    outputs = forward(model, batch, wanted, batching, lambda outputs, _: outputs, row_shape, scoring).cpu()
    lines = []
    for (index, item), (ids, logprobs) in zip(items.items(), (row.chunk(2, -1) for row in outputs), strict=True):
        n = len(item.token_ids) - 1
        logits = (logprobs - logprobs[:, :1])[:n].double()
        lines.append(
            {
                "tokens": item.token_ids[:-1],
                "labels": item.token_ids[1:],
                "loss_mask": item.targets[1:],
                "topk_logits": [[round(x, 4) for x in row] for row in logits.tolist()],
                "topk_token_ids": ids[:n].long().tolist(),
                "log_sum_exp_logits": [round(-x, 4) for x in logprobs[:n, 0].tolist()],
                "index": index,
            }
        )
    return lines


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _indices_in(path: Path, made_by: Mapping[str, Any], dataset: SFTDataset) -> set[int]:
    """The examples whose lines are in a file; one that was not written to its end is cut off.

    Raises:
        DataError: a line is of another teacher, tokenizer or text, or has another number of logits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found, size = set[int](), 0
    if not path.exists():
        return found
    with path.open("r+b") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                file.truncate(size)
                break
            size += len(raw)
            record = parse_line(path, number, raw)
            index = record.require("index", int, "an integer")
            expected = {**made_by, "tokens": dataset[index].token_ids[:-1] if index < len(dataset) else None}
            if others := [key for key, value in expected.items() if record.fields.get(key) != value]:
                record.fail(f"{others[0]!r} is another than this job's: give another output_path, or remove the file")
            found.add(index)
    return found
