"""The tokens of one pass as the torch step's model takes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class ChunkSegment:
    """A prompt chunk: ``length`` tokens of one sequence, from token ``first`` of the pass on, at position ``start``."""

    first: int
    length: int
    start: int
    pages: np.ndarray  # int32, on the host: of all positions that the chunk attends to


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of one pass on the device: one decoding token for each row of ``tables``, then the segments."""

    token_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t]
    places: torch.Tensor  # int64 [t]: page * PAGE_TOKENS + offset, where keys and values go
    tables: torch.Tensor  # int64 [n, p]: pages that each decoding token attends to
    segments: tuple[ChunkSegment, ...] = ()
    output_rows: torch.Tensor | None = None  # int64 [o]: tokens whose logits are wanted; None: all
