"""Merging inference requests into one batch, and cutting the answers back to each caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from nemo_style_aligner.servers.jobs import InferJob


@dataclasses.dataclass(frozen=True)
class MergedBatch:
    """tokens: int64 [rows, length]; lengths: int64 [rows]. The rows of the jobs, one job after the other."""

    tokens: torch.Tensor
    lengths: torch.Tensor


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def merge(jobs: Sequence[InferJob], *, length_multiple: int, max_length: int | None = None) -> MergedBatch:
    """Put the rows of all jobs into one batch, no wider than the longest row needs.

    The width is the longest true length (at least 2, so that there is a value to compute), rounded up to
    ``length_multiple`` but not beyond ``max_length``. Tokens beyond a row's true length are set to 0: they cannot
    affect the answer, and the batch must not depend on what a caller left there.
    """
    lengths = np.concatenate([job.lengths for job in jobs])
    width = round_up(max(2, int(lengths.max())), length_multiple)
    if max_length is not None:
        width = min(width, max_length)
    tokens = np.zeros((len(lengths), width), dtype=np.int64)
    row = 0
    for job in jobs:
        columns = min(width, job.tokens.shape[1])
        tokens[row : row + job.rows, :columns] = job.tokens[:, :columns]
        row += job.rows
    tokens[np.arange(width) >= lengths[:, None]] = 0
    return MergedBatch(torch.from_numpy(tokens), torch.from_numpy(lengths.astype(np.int64)))


def split(
    jobs: Sequence[InferJob], batch: MergedBatch, outputs: Mapping[str, torch.Tensor]
) -> list[dict[str, np.ndarray]]:
    """Split the batch's outputs into those of each job, as float32.

    ``values`` [rows, length-1] come back as [b, s-1] for the caller's own s, zero from position
    (true length - 1) on: column t belongs to the step that chooses token t+1, and the last true token
    is followed by none. So the answer does not depend on what the request was merged with. Other
    outputs keep their columns. Raises ValueError when an output has another shape.
    """
    arrays = {name: tensor.detach().to("cpu", torch.float32).numpy() for name, tensor in outputs.items()}
    rows, width = batch.tokens.shape
    for name, array in arrays.items():
        expected = f"[{rows}, {width - 1}]" if name == "values" else f"[{rows}, n]"
        fits = array.ndim == 2 and len(array) == rows and (name != "values" or array.shape[1] == width - 1)
        if not fits:
            raise ValueError(f"the model returned '{name}' of shape {list(array.shape)}, expected {expected}")
    results: list[dict[str, np.ndarray]] = []
    row = 0
    for job in jobs:
        part = {name: array[row : row + job.rows] for name, array in arrays.items()}
        if "values" in part:
            part["values"] = _fit_values(part["values"], job)
        results.append(part)
        row += job.rows
    return results


def _fit_values(values: np.ndarray, job: InferJob) -> np.ndarray:
    width = job.tokens.shape[1] - 1
    fitted = np.zeros((job.rows, width), dtype=np.float32)
    columns = min(width, values.shape[1])
    fitted[:, :columns] = values[:, :columns]
    fitted[np.arange(width) >= job.lengths[:, None] - 1] = 0.0
    return fitted
