"""Runs batches through megatron-core's pipeline schedules: a training step, its loss alone, or a forward pass.

A batch belongs on the CPU, where it is packed, and moves to the device micro batch by micro batch. Models compute
packed rows without padding (`models.packing`). There are two kinds:

- A padded batch is a dataclass of tensors that share their first dimension (one row per sequence), with a field
  ``tokens`` int64 [n, s]. Every rank of a model-parallel group passes the same rows. Outputs have the shapes of the
  batch again, zero where nothing was wanted.
- A `RaggedBatch` is a data-parallel rank's own share. Outputs are flat: of its response tokens, row after row.
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
from nemo_style_aligner.models.packing import MicroBatching, PackedRow, Padding, Sequences, pack_row
from nemo_style_aligner.models.pass_plans import ForwardPlan, plan_forward, plan_step, rows_of
from nemo_style_aligner.models.ragged import RaggedBatch
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
"""(outputs, micro batch) -> one row of results per sequence; of a ragged batch, per response token.

Outputs, here and in `LossFunction`: log-probs [b, s-1] of a language model (with entropies [b, s-1, 2]), or a reward
head's outputs [b, w, attributes]; zero where they were not wanted. Of a ragged batch, log-probs [k] (with entropies
[k, 2]) of the k response tokens of the micro batch, which holds none but rows that count.
"""


@dataclasses.dataclass
class Tokens:
    """A batch of nothing but tokens."""

    tokens: torch.Tensor


def rows(batch: B, index: slice | torch.Tensor) -> B:
    """The padded batch restricted to some rows; fields that are not tensors are kept."""
    fields = {
        f.name: value[index] if isinstance(value := getattr(batch, f.name), torch.Tensor) else value
        for f in dataclasses.fields(batch)
    }
    return type(batch)(**fields)


def to_device(value: Any, target: torch.device) -> Any:
    """A dataclass with its tensors, and those of dataclasses in it, on ``target``; other values are kept.

    Of a ragged batch, see `RaggedBatch.on`.
    """
    if isinstance(value, RaggedBatch):
        return value.on(target)
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
    """Some rows of a batch, packed for the model, and its output if it has been computed already.

    Attributes:
        chosen: int64, those of the model's outputs that are wanted; None: all of them.
        padding: how they become the rows of a padded batch again; None: they stay flat.
    """

    batch: Any
    packed: PackedRow
    prediction: Prediction | None
    padding: Padding | None
    chosen: torch.Tensor | None = None
    output: torch.Tensor | None = None

    def outputs(self, computed: torch.Tensor) -> torch.Tensor:
        """What the model computed, [k, ...], as loss and output functions get it. Differentiable."""
        outputs = computed if self.chosen is None else computed.index_select(0, self.chosen)
        return outputs if self.padding is None else self.padding.pad(outputs)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A batch and what is wanted of it; ``width``: of padded outputs, None where they stay flat."""

    batch: Any
    sequences: Sequences
    width: int | None

    @classmethod
    def of(cls, batch: Any, wanted: torch.Tensor | None) -> _Asked:
        if isinstance(batch, RaggedBatch):
            return cls(batch, batch.sequences(), None)
        assert wanted is not None, "a padded batch does not say which of its outputs are wanted"
        batch = to_device(batch, _CPU)
        return cls(batch, Sequences.padded(batch.tokens, wanted), wanted.shape[1])

    def micro_batch(self, part: list[int]) -> tuple[Any, Sequences, Padding | None]:
        """Rows of the batch, without those of a ragged batch that do not count."""
        sequences = self.sequences.rows(part)
        if self.width is not None:
            return rows(self.batch, torch.tensor(part, dtype=torch.int64)), sequences, Padding.of(sequences, self.width)
        counting = [row for row in part if self.sequences.used[row]]
        return self.batch.rows(torch.tensor(counting, dtype=torch.int64)), sequences, None


def _micro_batches(
    model: MegatronModel, asked: _Asked, parts: Sequence[list[int] | KeptMicroBatch], scoring: Scoring | None
) -> Iterator[_MicroBatch]:
    """Pack the rows of each part on the CPU and move what the model needs to this rank's device.

    Sizes and positions depend on the data. Reading them from a GPU would make the CPU wait for all queued work, so that
    the GPU would idle while the next micro batch is packed.
    """
    multiple = model.layout.tp_size if model.config.sequence_parallel else 1
    for part in parts:
        batch, sequences, padding = asked.micro_batch(rows_of(part))
        if isinstance(part, KeptMicroBatch):
            yield _kept_micro_batch(part, batch, sequences, padding)
            continue
        packed = pack_row(sequences, multiple)
        # Under sequence parallelism each rank has only some of the positions, so the last layer computes all it has.
        # Without wanted outputs it computes the token that fills the row: its kernels need at least one.
        if not model.config.sequence_parallel and len(packed.outputs):
            packed.sequences.outputs = packed.outputs
        prediction, ids = None, packed.tokens.flatten()
        if scoring is not None:
            targets = sequences.targets()
            outputs = None if packed.sequences.outputs is not None else packed.outputs
            prediction = Prediction(outputs, targets, scoring.temperature, scoring.entropy)
            ids = torch.cat([ids, targets])  # the last target of a sequence is not among the inputs
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < model.architecture.vocab_size:
                raise DataError(
                    f"token {token} is not in the model's vocabulary of {model.architecture.vocab_size}: model and "
                    "tokenizer do not belong together (were tokens added to it?)"
                )
        yield to_device(_MicroBatch(batch, packed, prediction, padding), device())


def _kept_micro_batch(kept: KeptMicroBatch, batch: Any, sequences: Sequences, padding: Padding | None) -> _MicroBatch:
    """A micro batch that is packed already and gives up its output. It may have more outputs than training wants."""
    assert kept.packed is not None
    wanted = [
        torch.nn.functional.pad(now, (0, len(then) - len(now)))[then]
        for now, then in zip(sequences.wanted, kept.sequences.wanted, strict=True)
    ]
    chosen = torch.cat(wanted).nonzero()[:, 0] if not all(row.all() for row in wanted) else None
    output, kept.output = kept.output, None
    batch, padding, chosen = (to_device(value, device()) for value in (batch, padding, chosen))
    return _MicroBatch(batch, kept.packed, kept.prediction, padding, chosen, output)


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
    wanted: torch.Tensor | None,
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
            for a language model, else [n, s]. Rows without any are left out. None for a ragged batch.
        batching: how rows are divided into micro batches.
        loss_function: see `LossFunction`; called on the last stage only.
        scoring: what a language model reports; None for a model with a reward head.
        is_whole: every rank passes the same batch, of which each data-parallel rank takes a share of about equal work;
            otherwise, and in a ragged batch, these are this rank's rows.
        kept_passes: passes that `forward` has kept of such a batch, with the same weights; emptied.

    Returns:
        ``loss`` and each named sum, divided by the global number of items; ``num_items``; ``padding_efficiency``, the
        share of the computed tokens that the loss depends on; and ``dp_balance``, the mean of the data-parallel ranks'
        floating-point operations over the largest. The same on every rank. Without items: only ``loss`` and
        ``num_items``, both 0.
    """
    return _run_step(
        model, _Asked.of(batch, wanted), batching, loss_function, scoring, is_whole, kept_passes, is_training=True
    )


def evaluate_step(
    model: MegatronModel,
    batch: Any,
    wanted: torch.Tensor | None,
    batching: MicroBatching,
    loss_function: LossFunction,
    *,
    scoring: Scoring | None = None,
    is_whole: bool = True,
) -> dict[str, float]:
    """What `train_step` returns, without gradients."""
    return _run_step(
        model, _Asked.of(batch, wanted), batching, loss_function, scoring, is_whole, None, is_training=False
    )


def _run_step(
    model: MegatronModel,
    asked: _Asked,
    batching: MicroBatching,
    loss_function: LossFunction,
    scoring: Scoring | None,
    is_whole: bool,
    kept_passes: KeptPasses | None,
    *,
    is_training: bool,
) -> dict[str, float]:
    """Plan and run the passes of a step, and combine the results of all ranks. See `train_step`."""
    is_whole = is_whole and asked.width is not None
    plan = plan_step(
        model, asked.sequences, batching, predicts=scoring is not None, is_whole=is_whole, kept_passes=kept_passes
    )
    num_computed = 0

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        nonlocal num_computed
        micro_batch = next(iterator)
        num_computed += micro_batch.packed.tokens.shape[1]
        output = _call_model(model, module, micro_batch)

        def loss(output: torch.Tensor) -> LossResult:
            loss_sum, count, sums = loss_function(micro_batch.outputs(output), micro_batch.batch)
            # A copy: the schedule changes the loss in place.
            report = {"loss": loss_sum.detach().clone(), "num_items": count.detach().clone()}
            report |= {name: value.detach() for name, value in sums.items()}
            return loss_sum, count.to(torch.int), report

        return output, loss

    packed = _micro_batches(model, asked, plan.parts, scoring)
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
    wanted: torch.Tensor | None,
    batching: MicroBatching,
    output_function: OutputFunction,
    row_shape: tuple[int, ...] = (),
    scoring: Scoring | None = None,
    keep: KeptPasses | None = None,
    is_whole: bool = True,
) -> torch.Tensor:
    """Forward pass, without gradients. Data-parallel ranks share the work on a padded batch, which all of them hold.

    Args:
        batch: any number of rows.
        wanted, batching, scoring, is_whole: see `train_step`.
        output_function: called on the last stage; returns fp32 [micro batch, *row_shape].
        row_shape: shape of one row of results.
        keep: keeps the micro batches for training, with their activations as far as memory has room.

    Returns:
        fp32 [n, *row_shape], zero in rows where nothing is wanted; the same on every rank if the batch is whole. Of a
        ragged batch fp32 [R], of this rank's own response tokens.
    """
    asked = _Asked.of(batch, wanted)
    is_ragged, sequences = asked.width is None, asked.sequences
    is_whole = is_whole and not is_ragged
    size = int(batch.response_lengths.sum()) if is_ragged else len(sequences)
    results = torch.zeros(size, *row_shape, dtype=torch.float32, device=device())
    if not any(sequences.used):
        return results
    plan = plan_forward(model, sequences, batching, predicts=scoring is not None, is_whole=is_whole, keep=keep)
    local = _outputs(model, asked, plan, output_function, scoring, keep, row_shape)
    if is_whole:
        local = all_gather_rows(local, parallel_state.get_data_parallel_group())
    chosen = torch.tensor([row for part in plan.parts for row in part])
    results[moved(batch.response_places(chosen) if is_ragged else chosen, results.device)] = local
    if keep is not None:
        # Training leaves out rows with NaN or Inf, but a backward pass through them gives NaN even from zero gradients.
        finite = results.isfinite()
        of_rows = finite.cpu().split(batch.response_lengths.tolist()) if is_ragged else finite.flatten(1).cpu()
        is_finite = [bool(row.all()) for row in of_rows]
        for note, part in zip(plan.notes, plan.parts, strict=True):
            if not all(is_finite[row] for row in part):
                keep.forget(note)
    return results


def _outputs(
    model: MegatronModel,
    asked: _Asked,
    plan: ForwardPlan,
    output_function: OutputFunction,
    scoring: Scoring | None,
    keep: KeptPasses | None,
    row_shape: tuple[int, ...],
) -> torch.Tensor:
    """Run this rank's passes of a plan: the results of its micro batches, one after the other, on every stage."""
    notes = iter([note for note in plan.notes if note.rank == model.layout.dp_rank])

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        output = _call_and_keep(model, module, micro_batch, keep, next(notes, None))
        return output.detach(), lambda output, non_loss_data: output_function(
            micro_batch.outputs(output), micro_batch.batch
        )

    was_training = model.module.training
    model.module.train(keep is not None)  # activations are recomputed in training mode only
    packed = _micro_batches(model, asked, plan.own, scoring)
    try:
        outputs = _run_schedule(
            model, packed, len(plan.own), forward_step, forward_only=True, collect_non_loss_data=True
        )
    finally:
        model.module.train(was_training)
    own = [row for part in plan.own for row in part]
    size = len(own) if asked.width is not None else sum(asked.sequences.num_outputs[row] for row in own)
    return broadcast_from_last_stage(torch.cat(outputs).float() if outputs else None, (size, *row_shape), torch.float32)


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
