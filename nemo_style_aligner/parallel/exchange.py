"""Rows of different lengths, from the ranks that made them to those that work on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner.parallel.groups import all_gather_rows, device


def exchange_rows(
    values: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, wanted: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Give each rank the rows that it wants, whichever rank has them. Collective over all ranks of the job.

    One rank after the other sends all it has, and the others keep what they want: no rank ever holds more than its own
    rows, those that it wants, and those of one sender.

    Args:
        values: [t], this rank's rows one after the other.
        lengths: int64 [k], of its rows.
        ids: int64 [k], which rows these are; no row may be with two ranks.
        wanted: ids of the rows that this rank wants, in any order.

    Returns:
        The wanted rows, in their order, one after the other, on the CPU.

    Raises:
        RuntimeError: nobody has a row that is wanted.
    """
    where = device()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = torch.stack([torch.full_like(ids, rank), ids, lengths], dim=1)
    senders, all_ids, all_lengths = all_gather_rows(table.to(where)).cpu().unbind(1)
    places = {int(row): place for place, row in enumerate(wanted)}
    rows: dict[int, torch.Tensor] = {}
    for sender in range(world_size):
        sent = senders == sender
        sizes = all_lengths[sent].tolist()
        if not sum(sizes):
            content = values.new_empty(0)
        elif world_size == 1:
            content = values
        else:
            buffer = values.to(where) if sender == rank else torch.empty(sum(sizes), dtype=values.dtype, device=where)
            dist.broadcast(buffer.contiguous(), src=sender)
            content = buffer.cpu()
        for row, part in zip(all_ids[sent].tolist(), content.split(sizes), strict=True):
            if row in places:
                rows[places[row]] = part.clone() if world_size > 1 else part
    if len(rows) < len(places):
        missing = [row for row, place in places.items() if place not in rows]
        raise RuntimeError(f"no rank has rows {missing[:20]}")
    return torch.cat([values.new_empty(0).cpu(), *(rows[place] for place in range(len(places)))])
