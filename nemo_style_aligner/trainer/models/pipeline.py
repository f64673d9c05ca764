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
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.groups import (
    all_gather_rows,
    all_reduce_sums,
    broadcast_from_last_stage,
    broadcast_object,
    device,
)
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.trainer.models.context import all_outputs, part_of_row
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.kept_passes import KeptPasses, Part
from nemo_style_aligner.trainer.models.logprobs import Prediction
from nemo_style_aligner.trainer.models.packed_weights import constant_weights
from nemo_style_aligner.trainer.models.packing import (
    MicroBatching,
    PackedRow,
    Padding,
    Sequences,
    micro_batches,
    pack_row,
    shares,
)
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.models.routes import RowExperts, load_metrics, seen_by_all
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.models.spans import gathered

B = TypeVar("B", bound=Any)

_CPU = torch.device("cpu")

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Loss summed over items, number of items, named sums to report."""

LossFunction = Callable[[torch.Tensor, Any], LossResult]
"""(outputs, micro batch) -> loss, items and sums."""

OutputFunction = Callable[[torch.Tensor, Any], torch.Tensor]
"""(outputs, micro batch) -> one row of results per sequence; of a ragged batch, per response token.

Outputs, here and in `LossFunction`: log-probs [b, s-1] of a language model (or [b, s-1, columns], see `predict`), or a
reward head's outputs [b, w, attributes]; zero where they were not wanted. Of a ragged batch, log-probs [k] (with
entropies [k, 2]) of the k response tokens of the micro batch, which holds none but rows that count.
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
    """What a language model reports for each token: log-probs at a temperature and, if wanted, entropies.

    Attributes:
        candidates: of the tokens in the batch's field of this name (integers [n, s-1, c]), log-probs, too.
        top_k: instead, the most likely tokens, so many; see `Prediction`.
        replays: of a batch with the engine's routes: its tokens are computed with these experts.
    """

    temperature: float = 1.0
    entropy: bool = False
    candidates: bool = False
    top_k: int = 0
    replays: bool = False


class _Asked:
    """A batch and what is wanted of it; for the arguments see `train_step`.

    Attributes:
        width: of padded outputs; None where they stay flat.
    """

    def __init__(
        self,
        model: MegatronModel,
        batch: Any,
        wanted: torch.Tensor | None,
        batching: MicroBatching,
        scoring: Scoring | None,
        is_whole: bool,
    ) -> None:
        self.model, self.batching, self.scoring = model, batching, scoring
        self.batch: Any = batch
        self.width: int | None = None
        self.is_whole = is_whole and not isinstance(batch, RaggedBatch)
        if isinstance(batch, RaggedBatch):
            self.sequences = batch.sequences()
        else:
            assert wanted is not None, "a padded batch does not say which of its outputs are wanted"
            self.batch, self.width = to_device(batch, _CPU), wanted.shape[1]
            candidates = self.batch.candidates if scoring is not None and scoring.candidates else None
            self.sequences = Sequences.padded(self.batch.tokens, wanted, candidates)
        if batching.shares_prompts:
            self.sequences = self.sequences.sharing(self._prompt_lengths())

    def _prompt_lengths(self) -> list[int] | None:
        """Tokens of each row's prompt, if somebody knows: what is before the first token that something is asked of."""
        lengths = getattr(self.batch, "prompt_lengths", None)
        if lengths is not None:
            return [int(length) for length in lengths]
        is_known = self.scoring is not None or isinstance(self.batch, RaggedBatch)
        return self.sequences.prompt_lengths() if is_known else None

    @functools.cached_property
    def work(self) -> Costs:
        """Floating-point operations of each row's forward pass. A backward pass takes twice as many."""
        operations = self.model.architecture.forward_operations
        if self.scoring is None:
            return self.sequences.costs(lambda tokens, _: operations(tokens, 0))
        return self.sequences.costs(operations)

    def parts(self, rows: list[int], rank: int) -> list[Part]:
        """Divide rows that a rank computes into micro batches."""
        divided = micro_batches(self.sequences.rows(rows).costs(), self.batching)
        chosen = [[rows[i] for i in part] for part in divided]
        return [Part(part, rank, self.sequences.rows(part)) for part in chosen]

    def parts_of_step(self, kept: KeptPasses | None) -> list[Part]:
        """Choose this rank's rows, and use kept passes for those that have one.

        In the order of the first rows: gradients are summed in this order, whichever were kept.
        """
        used, rank = self.sequences.used, self.model.layout.dp_rank
        taken = kept.take(self.sequences) if kept is not None else []
        computed = {row for part in taken for row in part.rows}
        mine = [row for row in range(len(used)) if row not in computed]
        if self.is_whole:
            mine = shares(self.work.without(computed), self.model.layout.dp_size, self.batching.group)[rank]
        own = [part for part in taken if part.rank == rank]
        if any(used[row] for row in mine) or not own:
            own += self.parts(mine, rank)
        return self._as_many_as_others(sorted(own, key=lambda part: part.rows[:1]))

    def parts_of_pass(self, kept: KeptPasses | None) -> list[Part]:
        """Choose each rank's rows, rank after rank (of a ragged batch this rank's alone), and note them if kept."""
        by_rank = {self.model.layout.dp_rank: list(range(len(self.sequences)))}
        if self.is_whole:
            dealt = shares(self.work, self.model.layout.dp_size, self.batching.group)
            by_rank = dict(enumerate(dealt if kept is None else kept.dealt(dealt, self.work)))
        parts = [part for rank, rows in by_rank.items() for part in self.parts(rows, rank)]
        if kept is not None:
            for part in parts:
                kept.add(part)
            kept.begin()
        return self._as_many_as_others(parts)

    def _as_many_as_others(self, parts: list[Part]) -> list[Part]:
        """The parts, and as many empty ones as this rank lacks to what any data-parallel rank computes.

        Ranks that share experts compute only together. A part without rows is a pass of a token that nothing counts.
        """
        if not self.model.computes_together:
            return parts
        rank, group = self.model.layout.dp_rank, parallel_state.get_data_parallel_group()
        own = sum(part.rank == rank for part in parts)
        most = torch.tensor([own], dtype=torch.int64, device=device())
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
        return parts + [Part([], rank, self.sequences.rows([])) for _ in range(int(most) - own)]


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


def _packed(asked: _Asked, parts: Sequence[Part]) -> Iterator[_MicroBatch]:
    """Pack the rows of each part on the CPU and move what the model needs to this rank's device.

    Sizes and positions depend on the data. Reading them from a GPU would make the CPU wait for all queued work, so that
    the GPU would idle while the next micro batch is packed.
    """
    for part in parts:
        sequences, padding = asked.sequences.rows(part.rows), None
        if asked.width is not None:
            batch, padding = (
                rows(asked.batch, torch.tensor(part.rows, dtype=torch.int64)),
                Padding.of(sequences, asked.width),
            )
        else:  # without rows that do not count
            counting = [row for row in part.rows if asked.sequences.used[row]]
            batch = asked.batch.rows(torch.tensor(counting, dtype=torch.int64))
        batch, padding = to_device(batch, device()), to_device(padding, device())
        if part.packed is None:
            packed, prediction = _model_input(asked, sequences)
            yield _MicroBatch(batch, packed, prediction, padding)
            continue
        # It is packed already and gives up its output. It may have more outputs than training wants.
        wanted = [
            torch.nn.functional.pad(now, (0, len(then) - len(now)))[then]
            for now, then in zip(sequences.wanted, part.sequences.wanted, strict=True)
        ]
        chosen = torch.cat(wanted).nonzero()[:, 0] if not all(row.all() for row in wanted) else None
        output, part.output = part.output, None
        yield _MicroBatch(batch, part.packed, part.prediction, padding, to_device(chosen, device()), output)


def _model_input(asked: _Asked, sequences: Sequences) -> tuple[PackedRow, Prediction | None]:
    """Sequences as the model takes them, on this rank's device."""
    model, scoring = asked.model, asked.scoring
    layout, multiple = model.layout, model.layout.tp_size if model.config.sequence_parallel else 1
    packed, own = pack_row(sequences, multiple if layout.cp_size == 1 else 1), None
    ids = packed.tokens.flatten()
    if layout.cp_size > 1:
        packed, own = part_of_row(packed, layout.cp_size, layout.cp_rank, multiple)
    experts = _row_experts(asked, packed) if model.architecture.experts is not None else None
    # Under sequence parallelism each rank has only some of the positions, so the last layer computes all it has.
    # Without wanted outputs it computes the token that fills the row: its kernels need at least one.
    if not model.config.sequence_parallel and len(packed.outputs):
        packed.compute_outputs_alone()
    packed.sequences.experts = experts
    prediction = None
    if scoring is not None:
        targets, candidates = sequences.targets(), sequences.wanted_candidates()
        ids = torch.cat([ids, targets])  # the last target of a sequence is not among the inputs
        if own is not None:
            targets, candidates = targets[own], None if candidates is None else candidates[own]
        prediction = Prediction(
            packed.chosen, targets, scoring.temperature, scoring.entropy, candidates=candidates, top_k=scoring.top_k
        )
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < model.architecture.vocab_size:
            raise DataError(
                f"token {token} is not in the model's vocabulary of {model.architecture.vocab_size}: model and "
                "tokenizer do not belong together (were tokens added to it?)"
            )
    return to_device(packed, device()), to_device(prediction, device())


def _row_experts(asked: _Asked, packed: PackedRow) -> RowExperts:
    """What the routers are to know of a row, on the CPU."""
    layout = asked.model.layout
    return RowExperts(
        weights=torch.bincount(packed.outputs, minlength=packed.tokens.shape[1]).float(),
        given=packed.routes if asked.scoring is not None else None,  # a critic has other experts than the policy
        are_known=packed.are_known,
        replays=asked.scoring is not None and asked.scoring.replays,
        part=(layout.tp_rank, layout.tp_size) if asked.model.config.sequence_parallel else (0, 1),
        balance=asked.model.balance if torch.is_grad_enabled() else None,
    )


def _call_model(
    model: MegatronModel, module: torch.nn.Module, packed: PackedRow, prediction: Prediction | None
) -> torch.Tensor:
    """The output of the stage's module; on the last stage, at the wanted positions [k, ...]."""
    positions = packed.sequences.positions
    assert positions is not None
    output: torch.Tensor
    output = module(packed.tokens, positions[None], None, labels=prediction, packed_seq_params=packed.sequences)
    if not model.layout.is_last_stage:
        return output
    if prediction is None:
        output = output[0] if packed.chosen is None else gathered(output[0], packed.chosen)
    context = packed.sequences.context
    return output if context is None else all_outputs(output, context)


def _run_schedule(
    model: MegatronModel,
    packed: Iterator[_MicroBatch],
    count: int,
    forward_step: Callable[..., Any],
    **options: Any,
) -> list[Any]:
    begun = 0

    def counted(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        nonlocal begun
        activity.progress()
        begun += 1
        return forward_step(next(iterator), module)

    # Where activations are recomputed to save memory, none is spent on weights either.
    weights = constant_weights(count if model.config.recompute_granularity is None else 1)
    with weights, activity.counting("micro batches", lambda: (max(0, begun - 1), count)):
        return get_forward_backward_func()(
            forward_step_func=counted,
            data_iterator=packed,
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
    is_training: bool = True,
) -> dict[str, float]:
    """Forward and backward of a batch; gradients are left finalised in the buffers.

    The gradient is that of (sum of losses over all ranks) / (number of items over all ranks), whatever the
    micro batch and data-parallel sizes. Passes that `forward` has kept of these sequences are used, and all forgotten.

    Args:
        batch: the rows.
        wanted: bool [n, w], positions whose outputs the loss depends on: predictions of the token after them [n, s-1]
            for a language model, else [n, s]. Rows without any are left out. None for a ragged batch.
        batching: how rows are divided into micro batches.
        loss_function: see `LossFunction`; called on the last stage only.
        scoring: what a language model reports; None for a model with a reward head.
        is_whole: every rank passes the same batch, of which each data-parallel rank takes a share of about equal work;
            otherwise, and in a ragged batch, these are this rank's rows.
        is_training: False: the loss alone, without gradients.

    Returns:
        ``loss`` and each named sum, divided by the global number of items; ``num_items``; ``padding_efficiency``, the
        share of the computed tokens that the loss depends on; ``dp_balance``, the mean of the data-parallel ranks'
        floating-point operations over the largest; and, in training, `load_metrics`. The same on every rank. Without
        items: only ``loss`` and ``num_items``, both 0.
    """
    asked = _Asked(model, batch, wanted, batching, scoring, is_whole)
    parts = asked.parts_of_step(model.kept_passes if is_training else None)
    num_computed, experts = 0, list[RowExperts | None]()

    def forward_step(
        micro_batch: _MicroBatch, module: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
        nonlocal num_computed
        num_computed += micro_batch.packed.tokens.shape[1] * model.layout.cp_size
        experts.append(micro_batch.packed.sequences.experts)
        output = micro_batch.output
        if output is None:
            output = _call_model(model, module, micro_batch.packed, micro_batch.prediction)

        def loss(output: torch.Tensor) -> LossResult:
            loss_sum, count, sums = loss_function(micro_batch.outputs(output), micro_batch.batch)
            # A copy: the schedule changes the loss in place.
            report = {"loss": loss_sum.detach().clone(), "num_items": count.detach().clone()}
            report |= {name: value.detach() for name, value in sums.items()}
            # Ranks that compute a row together all have its loss, and its items count once.
            return loss_sum, count.to(torch.int) * (model.layout.cp_rank == 0), report

        return output, loss

    # Megatron's schedules do not turn autograd off in a forward-only pass.
    with torch.set_grad_enabled(is_training):
        packed = _packed(asked, parts)
        reports = _run_schedule(model, packed, len(parts), forward_step, forward_only=not is_training)
    totals: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    means = _global_means(totals)
    loads: dict[str, float] = {}
    if is_training and model.architecture.experts is not None:
        seen = seen_by_all(experts, model.architecture)
        loads = load_metrics(seen)
        if model.balance is not None and loads:
            model.balance.learn(seen)
    if not means["num_items"]:  # a mean over nothing should not appear in a log
        return {"loss": 0.0, "num_items": 0.0}
    num_used = sum(asked.sequences.rows(part.rows).num_tokens for part in parts)
    work = sum(asked.work.of(part.rows) for part in parts)
    return means | _packing_metrics(model, num_used, num_computed, work) | loads


evaluate_step = functools.partial(train_step, is_training=False)


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
    *,
    is_whole: bool = True,
    is_trained: bool = False,
    experts: list[RowExperts | None] | None = None,
) -> torch.Tensor:
    """Forward pass, without gradients. Data-parallel ranks share the work on a padded batch, which all of them hold.

    Args:
        batch: any number of rows.
        wanted, batching, scoring, is_whole: see `train_step`.
        output_function: called on the last stage; returns fp32 [micro batch, *row_shape].
        row_shape: shape of one row of results.
        is_trained: the next `train_step` trains on these sequences: where the model keeps passes, keep the micro
            batches for it, with their activations as far as memory has room.
        experts: gets what this rank's rows have seen of experts.

    Returns:
        fp32 [n, *row_shape], zero in rows where nothing is wanted; the same on every rank if the batch is whole. Of a
        ragged batch fp32 [R], of this rank's own sampled tokens.
    """
    asked = _Asked(model, batch, wanted, batching, scoring, is_whole)
    is_ragged, kept = asked.width is None, model.kept_passes if is_trained else None
    size = int(batch.sampled_lengths.sum()) if is_ragged else len(asked.sequences)
    results = torch.zeros(size, *row_shape, dtype=torch.float32, device=device())
    if not any(asked.sequences.used) and not model.computes_together:
        return results
    parts = asked.parts_of_pass(kept)
    local = _outputs(
        asked, [part for part in parts if part.rank == model.layout.dp_rank], output_function, kept, experts
    )
    own = [row for part in parts if part.rank == model.layout.dp_rank for row in part.rows]
    num_results = sum(asked.sequences.num_outputs[row] for row in own) if is_ragged else len(own)
    local = broadcast_from_last_stage(local, (num_results, *row_shape), torch.float32)
    if asked.is_whole:
        local = all_gather_rows(local, parallel_state.get_data_parallel_group())
    chosen = torch.tensor([row for part in parts for row in part.rows], dtype=torch.int64)
    results[moved(batch.sampled_places(chosen) if is_ragged else chosen, results.device)] = local
    if kept is not None:
        # Training leaves out rows with NaN or Inf, but a backward pass through them gives NaN even from zero gradients.
        finite = results.isfinite()
        of_rows = finite.cpu().split(batch.sampled_lengths.tolist()) if is_ragged else finite.flatten(1).cpu()
        is_finite = [bool(row.all()) for row in of_rows]
        for part in parts:
            if not all(is_finite[row] for row in part.rows):
                kept.forget(part)
    return results


def _outputs(
    asked: _Asked,
    own: list[Part],
    output_function: OutputFunction,
    kept: KeptPasses | None,
    experts: list[RowExperts | None] | None,
) -> torch.Tensor | None:
    """Run this rank's passes: on the last stage the results of its micro batches, one after the other."""
    model, parts = asked.model, iter(own)

    def forward_step(micro_batch: _MicroBatch, module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        if experts is not None:
            experts.append(micro_batch.packed.sequences.experts)
        call = functools.partial(_call_model, model, module, micro_batch.packed)
        if kept is None:
            output = call(micro_batch.prediction)
        else:
            output = kept.compute(next(parts), micro_batch.packed, micro_batch.prediction, call)
        return output.detach(), lambda output, non_loss_data: output_function(
            micro_batch.outputs(output), micro_batch.batch
        )

    was_training = model.module.training
    model.module.train(kept is not None)  # activations are recomputed in training mode only
    try:
        packed = _packed(asked, own)
        outputs = _run_schedule(model, packed, len(own), forward_step, forward_only=True, collect_non_loss_data=True)
    finally:
        model.module.train(was_training)
    return torch.cat(outputs).float() if outputs else None
