"""Runs batches through megatron-core's pipeline schedules: a training step, its loss alone, or a forward pass.

A batch is a dataclass of tensors that share their first dimension (one row per sequence), with a field
``tokens`` int64 [n, s]. It belongs on the CPU, where it is packed, and moves to the device micro batch by micro batch.
Every rank of a model-parallel group passes the same rows. Models compute packed rows without padding
(`models.packing`); losses and results have the shapes of the batch again, zero where nothing was wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_style_aligner.data.jsonl import DataError
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.kept_passes import KeptMicroBatch, KeptPasses
from nemo_style_aligner.models.logprobs import Prediction
from nemo_style_aligner.models.packed_weights import constant_weights
from nemo_style_aligner.models.packing import (
    MicroBatching,
    PackedRow,
    micro_batches,
    pack_row,
    shares,
    used_lengths,
)
from nemo_style_aligner.parallel.groups import (
    all_gather_rows,
    all_reduce_sums,
    broadcast_from_last_stage,
    broadcast_object,
    device,
)
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.transfers import moved

B = TypeVar("B", bound=Any)

_CPU = torch.device("cpu")

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Loss summed over items, number of items, named sums to report."""

LossFunction = Callable[[torch.Tensor, Any], LossResult]
"""(outputs, micro batch) -> loss, items and sums."""

OutputFunction = Callable[[torch.Tensor, Any], torch.Tensor]
"""(outputs, micro batch) -> one row of results per sequence.

Outputs, here and in `LossFunction`: log-probs [b, s-1] of a language model (with entropies [b, s-1, 2]), or a reward
head's outputs [b, w, attributes]; zero where they were not wanted.
"""


@dataclasses.dataclass
class Tokens:
    """A batch of nothing but tokens."""

    tokens: torch.Tensor


def rows(batch: B, index: slice | torch.Tensor) -> B:
    """The batch restricted to some rows; fields that are not tensors are kept."""
    fields = {
        f.name: value[index] if isinstance(value := getattr(batch, f.name), torch.Tensor) else value
        for f in dataclasses.fields(batch)
    }
    return type(batch)(**fields)


def to_device(value: Any, target: torch.device) -> Any:
    """A dataclass with its tensors, and those of dataclasses in it, on ``target``; other values are kept."""
    if isinstance(value, torch.Tensor):
        return moved(value, target)
    if not dataclasses.is_dataclass(value):
        return value
    fields = {f.name: to_device(getattr(value, f.name), target) for f in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a language model reports for each token: log-probs at a temperature and, if wanted, entropies."""

    temperature: float = 1.0
    entropy: bool = False


@dataclasses.dataclass
class _MicroBatch:
    """Some rows of a batch, packed for the model, and its output if it has been computed already."""

    batch: Any
    packed: PackedRow
    prediction: Prediction | None
    output: torch.Tensor | None = None


def _micro_batches(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    parts: Sequence[list[int] | KeptMicroBatch],
    scoring: Scoring | None,
) -> Iterator[_MicroBatch]:
    """Pack the rows of each part on the CPU and move what the model needs to this rank's device.

    Kept micro batches are packed already; each gives up its output in its turn.

    Sizes and positions depend on the data. Reading them from a GPU would make the CPU wait for all queued work, so that
    the GPU would idle while the next micro batch is packed.
    """
    batch = to_device(batch, _CPU)
    multiple = model.layout.tp_size if model.config.sequence_parallel else 1
    for part in parts:
        index = torch.tensor(_rows_of(part), dtype=torch.int64)
        chosen, where = rows(batch, index), wanted[index]
        if isinstance(part, KeptMicroBatch):
            assert part.packed is not None
            chosen, output, part.output = to_device(chosen, device()), part.output, None
            yield _MicroBatch(chosen, part.packed, part.prediction, output)
            continue
        packed = pack_row(chosen.tokens, where, multiple)
        # Under sequence parallelism each rank has only some of the positions, so the last layer computes all it has.
        # Without wanted outputs it computes the token that fills the row: its kernels need at least one.
        if not model.config.sequence_parallel and len(packed.outputs):
            packed.sequences.outputs = packed.outputs
        prediction, ids = None, packed.tokens.flatten()
        if scoring is not None:
            targets = chosen.tokens[:, 1:][where]
            outputs = None if packed.sequences.outputs is not None else packed.outputs
            prediction = Prediction(outputs, targets, scoring.temperature, scoring.entropy)
            ids = torch.cat([ids, targets])  # the last target of a sequence is not among the inputs
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < model.architecture.vocab_size:
                raise DataError(
                    f"token {token} is not in the model's vocabulary of {model.architecture.vocab_size}: model and "
                    "tokenizer do not belong together (were tokens added to it?)"
                )
        yield to_device(_MicroBatch(chosen, packed, prediction), device())


def _rows_of(part: list[int] | KeptMicroBatch) -> list[int]:
    return part.rows if isinstance(part, KeptMicroBatch) else part


def _call_model(model: MegatronModel, module: torch.nn.Module, micro_batch: _MicroBatch) -> torch.Tensor:
    """The output of the stage's module, or the kept one; on the last stage, at the wanted positions [k, ...]."""
    packed, prediction = micro_batch.packed, micro_batch.prediction
    if micro_batch.output is not None:
        return micro_batch.output
    positions = packed.sequences.positions
    assert positions is not None
    output = module(packed.tokens, positions[None], None, labels=prediction, packed_seq_params=packed.sequences)
    if not model.layout.is_last_stage or prediction is not None:
        return output
    return output[0] if packed.sequences.outputs is not None else output[0].index_select(0, packed.outputs)


def _run_schedule(
    model: MegatronModel,
    micro_batches: Iterator[_MicroBatch],
    count: int,
    forward_step: Callable[..., Any],
    **options: Any,
) -> list[Any]:
    begun = 0

    def counted(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        nonlocal begun
        activity.progress()
        begun += 1
        return forward_step(iterator, module)

    # Where activations are recomputed to save memory, none is spent on weights either.
    weights = constant_weights(count if model.config.recompute_granularity is None else 1)
    with weights, activity.counting("micro batches", lambda: (max(0, begun - 1), count)):
        return get_forward_backward_func()(
            forward_step_func=counted,
            data_iterator=micro_batches,
            model=[model.module],
            num_microbatches=count,
            seq_length=1,  # rows differ in length: pipeline stages tell each other (variable_seq_lengths)
            micro_batch_size=1,
            **options,
        )


def train_step(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    batching: MicroBatching,
    loss_function: LossFunction,
    *,
    scoring: Scoring | None = None,
    is_whole: bool = True,
    kept_passes: KeptPasses | None = None,
) -> dict[str, float]:
    """Forward and backward of a batch; gradients are left finalised in the buffers.

    The gradient is that of (sum of losses over all ranks) / (number of items over all ranks), whatever the
    micro batch and data-parallel sizes.

    Args:
        batch: the rows.
        wanted: bool [n, w], positions whose outputs the loss depends on: predictions of the token after them [n, s-1]
            for a language model, else [n, s]. Rows without any are left out.
        batching: how rows are divided into micro batches.
        loss_function: see `LossFunction`; called on the last stage only.
        scoring: what a language model reports; None for a model with a reward head.
        is_whole: every rank passes the same batch, of which each data-parallel rank takes a share of about equal work;
            otherwise these are this rank's rows.
        kept_passes: passes that `forward` has kept of a whole batch, with the same weights; emptied.

    Returns:
        ``loss`` and each named sum, divided by the global number of items; ``num_items``; ``padding_efficiency``, the
        share of the computed tokens that the loss depends on; and ``dp_balance``, the mean of the data-parallel ranks'
        floating-point operations over the largest. The same on every rank. Without items: only ``loss`` and
        ``num_items``, both 0.
    """
    plan = _plan_step(model, batch, wanted, batching, scoring, is_whole, kept_passes)
    return _run_step(model, batch, plan, loss_function, scoring, is_training=True)


def evaluate_step(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    batching: MicroBatching,
    loss_function: LossFunction,
    *,
    scoring: Scoring | None = None,
    is_whole: bool = True,
) -> dict[str, float]:
    """What `train_step` returns, without gradients."""
    plan = _plan_step(model, batch, wanted, batching, scoring, is_whole, None)
    return _run_step(model, batch, plan, loss_function, scoring, is_training=False)


@dataclasses.dataclass(frozen=True)
class _StepPlan:
    """What this data-parallel rank computes of a batch.

    Attributes:
        wanted: bool [n, w], on the CPU.
        parts: its micro batches, sorted by first row: gradients are summed in this order, whichever were kept.
        num_used: tokens of its rows that the loss depends on.
        work: floating-point operations of its rows.
    """

    wanted: torch.Tensor
    parts: list[list[int] | KeptMicroBatch]
    num_used: int
    work: int


def _plan_step(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    batching: MicroBatching,
    scoring: Scoring | None,
    is_whole: bool,
    kept_passes: KeptPasses | None,
) -> _StepPlan:
    """Choose this rank's rows, and use kept passes for those that have one. See `train_step`."""
    wanted = wanted.cpu()
    used = used_lengths(wanted)
    work = _work(model, used, wanted, scoring)
    mine = list(range(len(used)))
    kept = kept_passes.take(batch.tokens.cpu(), wanted) if kept_passes is not None else []
    computed = {row for micro_batch in kept for row in micro_batch.rows}
    if is_whole:
        to_compute = [0 if row in computed else operations for row, operations in enumerate(work)]
        mine = shares(to_compute, model.layout.dp_size, batching.group)[model.layout.dp_rank]
    own_kept = [micro_batch for micro_batch in kept if micro_batch.rank == model.layout.dp_rank]
    new = _micro_batches_of(mine, used, batching) if mine or not own_kept else []
    mine += [row for micro_batch in own_kept for row in micro_batch.rows]
    return _StepPlan(
        wanted=wanted,
        parts=sorted([*new, *own_kept], key=lambda part: _rows_of(part)[:1]),
        num_used=sum(used[row] for row in mine),
        work=sum(work[row] for row in mine),
    )


def _run_step(
    model: MegatronModel,
    batch: Any,
    plan: _StepPlan,
    loss_function: LossFunction,
    scoring: Scoring | None,
    *,
    is_training: bool,
) -> dict[str, float]:
    """Run the passes of a plan and combine the results of all ranks. See `train_step`."""
    num_computed = 0

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        nonlocal num_computed
        micro_batch = next(iterator)
        num_computed += micro_batch.packed.tokens.shape[1]
        output = _call_model(model, module, micro_batch)

        def loss(output: torch.Tensor) -> LossResult:
            unpacked = _of_width(micro_batch.packed.unpack(output), plan.wanted.shape[1])
            loss_sum, count, sums = loss_function(unpacked, micro_batch.batch)
            # A copy: the schedule changes the loss in place.
            report = {"loss": loss_sum.detach().clone(), "num_items": count.detach().clone()}
            report |= {name: value.detach() for name, value in sums.items()}
            return loss_sum, count.to(torch.int), report

        return output, loss

    packed = _micro_batches(model, batch, plan.wanted, plan.parts, scoring)
    # Megatron's schedules do not turn autograd off in a forward-only pass.
    with torch.set_grad_enabled(is_training):
        reports = _run_schedule(model, packed, len(plan.parts), forward_step, forward_only=not is_training)
    totals: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    means = _global_means(totals)
    if not means["num_items"]:  # a mean over nothing should not appear in a log
        return {"loss": 0.0, "num_items": 0.0}
    return means | _packing_metrics(model, plan.num_used, num_computed, plan.work)


def _of_width(unpacked: torch.Tensor, width: int) -> torch.Tensor:
    """[b, w, ...] -> [b, width, ...]: cut or zero-pad the end, where nothing is wanted. Differentiable."""
    return torch.nn.functional.pad(unpacked, (0, 0) * (unpacked.ndim - 2) + (0, width - unpacked.shape[1]))


def _work(model: MegatronModel, used: list[int], wanted: torch.Tensor, scoring: Scoring | None) -> list[int]:
    """Floating-point operations of each row's forward pass. A backward pass takes twice as many."""
    outputs = [0] * len(used) if scoring is None else wanted.sum(1).tolist()
    return [model.architecture.forward_operations(*row) for row in zip(used, outputs, strict=True)]


def _packing_metrics(model: MegatronModel, num_used: int, num_computed: int, work: int) -> dict[str, float]:
    """``padding_efficiency`` and ``dp_balance`` from this data-parallel rank's tokens and operations. Collective."""
    by_rank = torch.zeros(3, model.layout.dp_size, dtype=torch.float64, device=device())
    by_rank[:, model.layout.dp_rank] = torch.tensor([num_used, num_computed, work], dtype=torch.float64)
    if model.layout.dp_size > 1:
        torch.distributed.all_reduce(by_rank, group=parallel_state.get_data_parallel_group())
    total_used, total_computed = by_rank[:2].sum(1)
    return {
        "padding_efficiency": (total_used / total_computed.clamp(min=1)).item(),
        "dp_balance": (by_rank[2].mean() / by_rank[2].max().clamp(min=1)).item(),
    }


def _global_means(totals: dict[str, float]) -> dict[str, float]:
    """Sums of this rank (empty unless it is on the last stage) -> global means on every rank."""
    if parallel_state.is_pipeline_last_stage():
        totals = all_reduce_sums(totals, parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        totals = broadcast_object(totals, last, parallel_state.get_pipeline_model_parallel_group())
    count = totals.pop("num_items")
    return {name: value / count if count else 0.0 for name, value in totals.items()} | {"num_items": count}


@torch.no_grad()
def forward(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    batching: MicroBatching,
    output_function: OutputFunction,
    row_shape: tuple[int, ...],
    scoring: Scoring | None = None,
    keep: KeptPasses | None = None,
) -> torch.Tensor:
    """Forward pass, without gradients, of a batch that every rank holds whole; data-parallel ranks share the work.

    Args:
        batch: any number of rows.
        wanted, batching, scoring: see `train_step`.
        output_function: called on the last stage; returns fp32 [micro batch, *row_shape].
        row_shape: shape of one row of results.
        keep: keeps the micro batches for training, with their activations as far as memory has room.

    Returns:
        fp32 [n, *row_shape], the same on every rank; zero in rows where nothing is wanted.
    """
    wanted = wanted.cpu()
    results = torch.zeros(len(wanted), *row_shape, dtype=torch.float32, device=device())
    if not wanted.any():
        return results
    plan = _plan_forward(model, batch, wanted, batching, scoring, keep)
    notes = iter([note for note in plan.notes if note.rank == model.layout.dp_rank])

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        output = _call_and_keep(model, module, micro_batch, keep, next(notes, None))
        return output.detach(), lambda output, non_loss_data: output_function(
            micro_batch.packed.unpack(output), micro_batch.batch
        )

    was_training = model.module.training
    model.module.train(keep is not None)  # activations are recomputed in training mode only
    own = plan.by_rank[model.layout.dp_rank]
    packed = _micro_batches(model, batch, wanted, own, scoring)
    try:
        outputs = _run_schedule(model, packed, len(own), forward_step, forward_only=True, collect_non_loss_data=True)
    finally:
        model.module.train(was_training)
    local = torch.cat(outputs).float() if outputs else None
    local = broadcast_from_last_stage(local, (sum(map(len, own)), *row_shape), torch.float32)
    gathered = all_gather_rows(local, parallel_state.get_data_parallel_group())
    parts = [part for rank in plan.by_rank for part in rank]
    results[torch.tensor([row for part in parts for row in part], device=results.device)] = gathered
    if keep is not None:
        # Training leaves out rows with NaN or Inf, but a backward pass through them gives NaN even from zero gradients.
        is_finite = results.flatten(1).isfinite().all(1).tolist()
        for note, part in zip(plan.notes, parts, strict=True):
            if not all(is_finite[row] for row in part):
                keep.forget(note)
    return results


@dataclasses.dataclass(frozen=True)
class _ForwardPlan:
    """Which data-parallel rank computes what of a batch.

    Attributes:
        by_rank: each rank's micro batches, as lists of rows.
        notes: the kept micro batch for each of these, in the same order; empty where passes are not kept.
    """

    by_rank: list[list[list[int]]]
    notes: list[KeptMicroBatch]


def _plan_forward(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor,
    batching: MicroBatching,
    scoring: Scoring | None,
    keep: KeptPasses | None,
) -> _ForwardPlan:
    """Choose each rank's rows, and note them where they are kept. See `forward`; ``wanted`` is on the CPU."""
    used = used_lengths(wanted)
    work = _work(model, used, wanted, scoring)
    by_rank = shares(work, model.layout.dp_size, batching.group)
    if keep is not None:
        by_rank = keep.dealt(by_rank, work)
    parts_by_rank = [_micro_batches_of(rank, used, batching) for rank in by_rank]
    notes: list[KeptMicroBatch] = []
    if keep is not None:
        tokens = batch.tokens.cpu()
        notes = [
            keep.add(rank, tokens[part], wanted[part]) for rank, parts in enumerate(parts_by_rank) for part in parts
        ]
        keep.begin()
    return _ForwardPlan(parts_by_rank, notes)


def _call_and_keep(
    model: MegatronModel,
    module: torch.nn.Module,
    micro_batch: _MicroBatch,
    keep: KeptPasses | None,
    note: KeptMicroBatch | None,
) -> torch.Tensor:
    """`_call_model`, filling in ``note`` for training; where memory has room, with the autograd graph."""
    if keep is None or note is None:
        return _call_model(model, module, micro_batch)
    note.packed, note.prediction = micro_batch.packed, micro_batch.prediction
    is_kept = keep.has_room(note)
    if is_kept and keep.keeps_logits and micro_batch.prediction is not None:
        micro_batch.prediction = dataclasses.replace(micro_batch.prediction, keeps_logits=True)
    with torch.set_grad_enabled(is_kept):
        output = _call_model(model, module, micro_batch)
    if is_kept:
        note.output = output
    return output


def _micro_batches_of(chosen: list[int], used: list[int], batching: MicroBatching) -> list[list[int]]:
    """Divide the rows ``chosen`` from a batch into micro batches; ``used`` is of all rows of the batch."""
    return [[chosen[i] for i in part] for part in micro_batches([used[i] for i in chosen], batching)]
