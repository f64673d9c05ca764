"""Which data-parallel rank computes which rows of a batch, in which micro batches, and which passes were kept."""

from __future__ import annotations

import dataclasses

from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.kept_passes import KeptMicroBatch, KeptPasses
from nemo_style_aligner.models.packing import MicroBatching, Sequences, micro_batches, shares


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What this data-parallel rank computes of a training batch.

    Attributes:
        asked: the batch's sequences.
        parts: this rank's micro batches, sorted by first row: gradients are summed in this order, whichever were kept.
        num_used: tokens of its rows that the loss depends on.
        work: floating-point operations of its rows.
    """

    asked: Sequences
    parts: list[list[int] | KeptMicroBatch]
    num_used: int
    work: int


def plan_step(
    model: MegatronModel,
    asked: Sequences,
    batching: MicroBatching,
    *,
    predicts: bool,
    is_whole: bool,
    kept_passes: KeptPasses | None,
) -> StepPlan:
    """Choose this rank's rows, and use kept passes for those that have one. See `pipeline.train_step`.

    Args:
        predicts: the model predicts tokens (it has an output layer).
    """
    work = _work(model, asked, predicts)
    kept = kept_passes.take(asked) if kept_passes is not None else []
    computed = {row for micro_batch in kept for row in micro_batch.rows}
    mine = [row for row in range(len(asked)) if row not in computed]
    if is_whole:
        to_compute = [0 if row in computed else operations for row, operations in enumerate(work)]
        mine = shares(to_compute, model.layout.dp_size, batching.group)[model.layout.dp_rank]
    own_kept = [micro_batch for micro_batch in kept if micro_batch.rank == model.layout.dp_rank]
    new = _micro_batches_of(mine, asked, batching) if any(asked.used[row] for row in mine) or not own_kept else []
    mine += [row for micro_batch in own_kept for row in micro_batch.rows]
    return StepPlan(
        asked=asked,
        parts=sorted([*new, *own_kept], key=lambda part: rows_of(part)[:1]),
        num_used=sum(asked.used[row] for row in mine),
        work=sum(work[row] for row in mine),
    )


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Which data-parallel rank computes what of a batch.

    Attributes:
        own: this rank's micro batches, as lists of rows.
        parts: the micro batches of all ranks, rank after rank; of a ragged batch this rank's alone.
        notes: the kept micro batch for each of ``parts``; empty where passes are not kept.
    """

    own: list[list[int]]
    parts: list[list[int]]
    notes: list[KeptMicroBatch]


def plan_forward(
    model: MegatronModel,
    asked: Sequences,
    batching: MicroBatching,
    *,
    predicts: bool,
    is_whole: bool,
    keep: KeptPasses | None,
) -> ForwardPlan:
    """Choose each rank's rows, and note them where they are kept. See `pipeline.forward` and `plan_step`."""
    rank = model.layout.dp_rank
    by_rank = {rank: list(range(len(asked)))}
    if is_whole:
        work = _work(model, asked, predicts)
        dealt = shares(work, model.layout.dp_size, batching.group)
        by_rank = dict(enumerate(dealt if keep is None else keep.dealt(dealt, work)))
    parts = {r: _micro_batches_of(rows, asked, batching) for r, rows in by_rank.items()}
    notes: list[KeptMicroBatch] = []
    if keep is not None:
        notes = [keep.add(r, asked.rows(part)) for r, of_rank in parts.items() for part in of_rank]
        keep.begin()
    return ForwardPlan(parts[rank], [part for of_rank in parts.values() for part in of_rank], notes)


def rows_of(part: list[int] | KeptMicroBatch) -> list[int]:
    """The rows of a micro batch."""
    return part.rows if isinstance(part, KeptMicroBatch) else part


def _work(model: MegatronModel, asked: Sequences, predicts: bool) -> list[int]:
    """Floating-point operations of each row's forward pass. A backward pass takes twice as many."""
    outputs = asked.num_outputs if predicts else [0] * len(asked)
    return [model.architecture.forward_operations(*row) for row in zip(asked.used, outputs, strict=True)]


def _micro_batches_of(chosen: list[int], asked: Sequences, batching: MicroBatching) -> list[list[int]]:
    """Divide the rows ``chosen`` from a batch into micro batches."""
    return [[chosen[i] for i in part] for part in micro_batches([asked.used[i] for i in chosen], batching)]
