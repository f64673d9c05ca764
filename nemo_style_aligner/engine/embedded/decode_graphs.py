"""Decode passes as CUDA graphs of fixed shapes: buckets of rows, whose attention finds out how long sequences are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape, StepInput
from nemo_style_aligner.engine.embedded.torch_model import logits_dtype
from nemo_style_aligner.engine.embedded.torch_operations import Batch


def row_buckets(limit: int) -> list[int]:
    """1, 2, 4, 8, multiples of 8 up to 64, then of 32, the last being ``limit``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, limit, 32)]
    return [size for size in sizes if size < limit] + [limit]


class DecodeGraphs:
    """One graph per bucket of rows, all reading the same input buffer.

    Padding rows write to the scratch page and attend to its first position. Without CUDA the same
    computation runs on the same padded inputs, just not from a graph.
    """

    def __init__(self, shape: EngineShape, device: torch.device, compute: Callable[[Batch], torch.Tensor]) -> None:
        """``compute`` must read and write memory at fixed addresses only."""
        self._device = device
        self._compute = compute
        self._scratch_page = shape.num_pages
        self._row_buckets = row_buckets(shape.num_slots)
        # Columns: token, position, pages. One buffer, so that one copy brings all inputs of a pass.
        size = (shape.num_slots, 2 + shape.pages_per_sequence)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._inputs = self._host.to(device)  # the same tensor on a CPU
        # One buffer for all results: a graph with an output of its own would hold the memory of its logits for good.
        dtype = logits_dtype(shape.dtype, device)
        self._logits = torch.empty(0, shape.architecture.vocab_size, dtype=dtype, device=device)
        experts = shape.architecture.experts
        size = (sum(shape.architecture.expert_layers), 0 if experts is None else experts.per_token)
        self._routes = torch.empty(0, *size, dtype=torch.int16, device=device)
        # One for all captures: libraries keep a workspace for each stream.
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[int, Callable[[], None]] = {}

    @property
    def num_graphs(self) -> int:
        """Number of graphs: one for each bucket."""
        return len(self._row_buckets)

    def capture(self) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory."""
        self._logits = self._logits.new_empty(len(self._host), self._logits.shape[1])
        self._routes = self._routes.new_empty(len(self._host), *self._routes.shape[1:])
        self._host[:, :2] = 0
        self._host[:, 2:] = self._scratch_page
        self._inputs.copy_(self._host)
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for rows in reversed(self._row_buckets):
            self._graphs[rows] = self._capture_one(rows, pool)

    def release(self) -> None:
        """Drop the graphs and the memory of their results."""
        self._graphs.clear()
        self._logits = self._logits.new_empty(0, self._logits.shape[1])

    def run(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of a pass that only decodes, and its `Batch.stacked_routes`, valid until the next one."""
        rows = step.num_decode
        padded_rows = next(size for size in self._row_buckets if size >= rows)
        host = self._host.numpy()
        host[:rows, 0] = step.token_ids
        host[:rows, 1] = step.positions
        np.take(step.block_table, step.slots, axis=0, out=host[:rows, 2:])
        host[rows:padded_rows, :2] = 0
        host[rows:padded_rows, 2:] = self._scratch_page
        if self._inputs is not self._host:
            # Safe although asynchronous: the host buffer is next written once this pass's tokens have been waited for.
            self._inputs[:padded_rows].copy_(self._host[:padded_rows], non_blocking=True)
        self._graphs[padded_rows]()
        return self._logits[:rows], self._routes[:rows]

    def _capture_one(self, rows: int, pool: Any) -> Callable[[], None]:
        """A function that computes the bucket's results from the input buffer into their buffers."""

        def compute() -> None:
            batch = _batch(self._inputs[:rows])
            self._logits[:rows] = self._compute(batch)
            if batch.routes:
                self._routes[:rows] = batch.stacked_routes()

        if self._device.type != "cuda":
            return compute
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()  # libraries initialise themselves outside of the capture
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of other threads must not invalidate the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay


def _batch(inputs: torch.Tensor) -> Batch:
    """The batch of int32 ``inputs`` [rows, 2 + pages]: tokens, positions, pages."""
    inputs = inputs.long()
    positions, tables = inputs[:, 1], inputs[:, 2:]
    pages = tables.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
    return Batch(inputs[:, 0], positions, pages * PAGE_TOKENS + positions % PAGE_TOKENS, tables)
