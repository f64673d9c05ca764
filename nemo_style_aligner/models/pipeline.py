"""Runs batches through megatron-core's pipeline schedules: one training step, or a forward pass.

A batch is a dataclass of tensors that share their first dimension (one row per sequence), with a field
``tokens`` int64 [n, s]. Every rank of a model-parallel group passes the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import (
    all_gather_rows,
    all_reduce_sums,
    broadcast_from_last_stage,
    data_parallel_group,
    device,
)

B = TypeVar("B", bound=Any)

LossFunction = Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""(model output, micro batch) -> (loss summed over items, number of items, named sums to report)."""

OutputFunction = Callable[[torch.Tensor, Any], torch.Tensor]
"""(model output, micro batch) -> one row of results per sequence."""


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


def to_device(batch: B, target: torch.device) -> B:
    """The batch with its tensors on ``target``."""
    fields = {
        f.name: value.to(target) if isinstance(value := getattr(batch, f.name), torch.Tensor) else value
        for f in dataclasses.fields(batch)
    }
    return type(batch)(**fields)


def _pad_rows(batch: B, count: int) -> B:
    """Append ``count`` copies of the last row, so that micro batches are of equal size."""
    if count == 0:
        return batch
    n = batch.tokens.shape[0]
    return rows(batch, torch.cat([torch.arange(n), torch.full((count,), n - 1)]))


def _micro_batches(batch: B, size: int) -> Iterator[B]:
    for start in range(0, batch.tokens.shape[0], size):
        yield rows(batch, slice(start, start + size))


def pad_sequence_length(tokens: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zeros appended to int64 [n, s] until s is a multiple; causal models never look at them."""
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % multiple))


def _call_model(model: MegatronModel, module: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Call the stage's module; its output on the last stage is cut back to the tokens' true length."""
    length = tokens.shape[1]
    padded = pad_sequence_length(tokens, _sequence_multiple(model))
    positions = torch.arange(padded.shape[1], device=tokens.device).expand_as(padded)
    output = module(padded, positions, None)
    return output[:, :length] if model.layout.is_last_stage else output


def _sequence_multiple(model: MegatronModel) -> int:
    return model.layout.tp_size if model.config.sequence_parallel else 1


def _run_schedule(
    model: MegatronModel, batch: Any, micro_batch_size: int, forward_step: Callable[..., Any], **options: Any
) -> list[Any]:
    n, length = batch.tokens.shape
    length += -length % _sequence_multiple(model)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_micro_batches(batch, micro_batch_size),
        model=[model.module],
        num_microbatches=n // micro_batch_size,
        seq_length=length,
        micro_batch_size=micro_batch_size,
        **options,
    )


def train_step(
    model: MegatronModel, batch: Any, micro_batch_size: int, loss_function: LossFunction, *, forward_only: bool = False
) -> dict[str, float]:
    """Forward and backward of this data-parallel rank's rows; gradients are left finalised in the buffers.

    The gradient is that of (sum of losses over all ranks) / (number of items over all ranks), whatever the
    micro batch and data-parallel sizes.

    Args:
        batch: this rank's rows; the number of rows must be a multiple of ``micro_batch_size``.
        loss_function: see `LossFunction`; called on the last stage only.
        forward_only: evaluate without gradients.

    Returns:
        ``loss`` and each named sum, divided by the global number of items, plus ``num_items``; the same on
        every rank. All zero when there is no item.
    """
    n = batch.tokens.shape[0]
    if n % micro_batch_size:
        raise ValueError(f"{n} sequences on this rank are not a multiple of micro_batch_size={micro_batch_size}")
    batch = to_device(batch, device())
    totals: dict[str, float] = {}

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        output = _call_model(model, module, micro_batch.tokens)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            loss_sum, count, sums = loss_function(output, micro_batch)
            # A copy: the schedule changes the loss in place.
            report = {"loss": loss_sum.detach().clone(), "num_items": count.detach().clone()}
            report |= {name: value.detach() for name, value in sums.items()}
            return loss_sum, count.to(torch.int), report

        return output, loss

    reports = _run_schedule(model, batch, micro_batch_size, forward_step, forward_only=forward_only)
    for report in reports:
        for name, value in report.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return _global_means(totals)


def _global_means(totals: dict[str, float]) -> dict[str, float]:
    """Sums of this rank (empty unless it is on the last stage) -> global means on every rank."""
    if parallel_state.is_pipeline_last_stage():
        totals = all_reduce_sums(totals, data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        box = [totals]
        torch.distributed.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
            device=device(),
        )
        totals = box[0]
    count = totals.pop("num_items")
    return {name: value / count if count else 0.0 for name, value in totals.items()} | {"num_items": count}


@torch.no_grad()
def forward(
    model: MegatronModel,
    batch: Any,
    micro_batch_size: int,
    output_function: OutputFunction,
    row_shape: tuple[int, ...],
) -> torch.Tensor:
    """Forward pass of this data-parallel rank's rows, without gradients.

    Args:
        batch: any number of rows.
        output_function: called on the last stage; returns fp32 [micro batch, *row_shape].
        row_shape: shape of one row of results.

    Returns:
        fp32 [n, *row_shape], the same on every rank of the model-parallel group.
    """
    n = batch.tokens.shape[0]
    if n == 0:
        return torch.empty((0, *row_shape), dtype=torch.float32, device=device())
    micro_batch_size = min(micro_batch_size, n)
    padded = _pad_rows(to_device(batch, device()), -n % micro_batch_size)

    def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        output = _call_model(model, module, micro_batch.tokens)
        return output, lambda output, non_loss_data: output_function(output, micro_batch)

    was_training = model.module.training
    model.module.eval()
    results = _run_schedule(
        model, padded, micro_batch_size, forward_step, forward_only=True, collect_non_loss_data=True
    )
    model.module.train(was_training)
    local = torch.cat(results).float() if results else None
    return broadcast_from_last_stage(local, (padded.tokens.shape[0], *row_shape), torch.float32)[:n]


def forward_global(
    model: MegatronModel,
    batch: Any,
    micro_batch_size: int,
    output_function: OutputFunction,
    row_shape: tuple[int, ...],
) -> torch.Tensor:
    """As `forward`, of a batch that every rank holds whole: each data-parallel rank computes a share.

    Returns:
        fp32 [n, *row_shape], all rows, the same on every rank.
    """
    n = batch.tokens.shape[0]
    dp_size, dp_rank = model.layout.dp_size, model.layout.dp_rank
    bounds = [n * r // dp_size for r in range(dp_size + 1)]
    # Every rank must run the same number of pipeline passes, so give each the same number of rows.
    longest = max(bounds[r + 1] - bounds[r] for r in range(dp_size))
    share = torch.arange(bounds[dp_rank], bounds[dp_rank + 1])
    index = torch.cat([share, torch.zeros(longest - len(share), dtype=torch.int64)])
    local = forward(model, rows(batch, index), micro_batch_size, output_function, row_shape)[: len(share)]
    return all_gather_rows(local, data_parallel_group())
