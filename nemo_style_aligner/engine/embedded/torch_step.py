"""`TorchStep`: the model step that runs wherever torch does; CUDA graphs for decoding on a GPU."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.engine.embedded.arena import Arena
from nemo_style_aligner.engine.embedded.choose_operations import choose_operations
from nemo_style_aligner.engine.embedded.decode_graphs import DecodeGraphs
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape, ModelStep, StepInput
from nemo_style_aligner.engine.embedded.torch_model import TorchModel, TorchWeights
from nemo_style_aligner.engine.embedded.torch_operations import Batch, ChunkSegment, TorchOperations
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.embedded.weight_table import WeightTable
from nemo_style_aligner.engine.transfers import moved

logger = logging.getLogger(__name__)

_LENGTH_BUCKET_PAGES = 4  # without graphs, decoding attends to a multiple of 64 positions


class _Pages:
    """KV memory of a rank; on a CPU pages take physical memory only once sequences write to them.

    Attributes:
        layers: per layer [num_pages + 1, PAGE_TOKENS, 2 * groups, kv_channels], keys and then values; the last
            page, which the block table does not know, is the scratch page of `DecodeGraphs`.
    """

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        a = shape.architecture
        size = (shape.num_pages + 1, PAGE_TOKENS, 2 * shape.shard.num_groups, a.kv_channels)
        on_cpu = {str(layer): (size, shape.dtype) for layer in range(a.num_layers)} if device.type == "cpu" else {}
        self._arena = Arena(on_cpu)
        self._tensors: list[torch.Tensor] = []
        if not on_cpu:
            self._tensors = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(a.num_layers)]
        self.layers = self._tensors or [self._arena[str(layer)] for layer in range(a.num_layers)]

    def clear(self) -> None:
        """Zero everything."""
        self._arena.release()
        for pages in self._tensors:
            pages.zero_()

    def release(self) -> None:
        """Give the memory back."""
        self._arena.release()
        for pages in self._tensors:
            pages.untyped_storage().resize_(0)

    def acquire(self) -> None:
        """Allocate the memory again, zeroed."""
        for pages in self._tensors:
            pages.untyped_storage().resize_(pages.nbytes)
            pages.zero_()


class TorchStep(ModelStep):
    """Weights, pages and forward pass in torch.

    With ``graphs``, passes that only decode run from graphs, all others eagerly, with the same functions. Graphs
    hold addresses, and memory that comes back after `release` may lie elsewhere: `acquire` captures the graphs again.
    """

    def __init__(
        self,
        shape: EngineShape,
        device: torch.device,
        trainer: TrainerWeights,
        graphs: bool | None = None,
        use_kernels: bool = True,
    ) -> None:
        """Describe the step; `build` compiles and allocates.

        Args:
            trainer: its weights, to compute with in place where possible.
            graphs: decode in padded buckets of fixed shape; None: with Triton's kernels only, whose attention does not
                compute the padding.
            use_kernels: use Triton's kernels where the GPU runs them; False: torch's functions alone.
        """
        self._shape = shape
        self._device = device
        self._trainer = trainer
        self._use_kernels = use_kernels
        self._use_graphs = graphs
        self._expert_layers = np.flatnonzero(shape.architecture.expert_layers)
        self._graphs: DecodeGraphs | None = None

    def build(self) -> None:
        """See `ModelStep.build`."""
        shape, trainer = self._shape, self._trainer
        weights = TorchWeights(shape, self._device, trainer)
        self.weights = WeightTable(shape.shard, weights.writes, viewed=trainer.names)
        self._weights = weights
        logger.info(
            "generation weights: %.1f MB viewed in the trainer's memory, %.1f MB copied by every refit",
            sum(tensor.nbytes for tensor in trainer.viewed.values()) / 1e6,
            sum(buffer.nbytes for buffer in weights.buffers) / 1e6,
        )
        self._pages = _Pages(shape, self._device)
        choose = choose_operations if self._use_kernels else TorchOperations
        operations = choose(shape, self._device)
        self._operations_name = operations.name
        self._model = TorchModel(shape, weights, self._pages.layers, operations)
        if self._use_graphs or (self._use_graphs is None and type(operations) is not TorchOperations):
            self._graphs = DecodeGraphs(shape, self._device, self._model.forward)
            with torch.inference_mode(), self._on_device():  # as in `forward`
                self._graphs.capture()

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """See `ModelStep.forward`; logits are float32 on a GPU, else in the engine's dtype."""
        with self._on_device():
            if self._graphs is not None and len(step.segments) == step.num_decode:
                logits, routes = self._graphs.run(step)
            else:
                batch = self._batch(step)
                logits, routes = self._model.forward(batch), batch.stacked_routes()
            if step.routes is not None:
                step.routes[:, self._expert_layers] = routes.cpu().numpy()
            return logits

    def clear_pages(self) -> None:
        """See `ModelStep.clear_pages`."""
        self._pages.clear()

    def release(self) -> None:
        """See `ModelStep.release`."""
        if self._graphs is not None:
            self._graphs.release()
        for buffer in self._weights.buffers:  # which stay valid objects, as do their views
            buffer.untyped_storage().resize_(0)
        self._pages.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # only this frees the memory of dropped graphs

    @torch.inference_mode()
    def acquire(self) -> None:
        """See `ModelStep.acquire`."""
        for buffer in self._weights.buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
        self._weights.locate()
        self._pages.acquire()
        if self._graphs is not None:
            with self._on_device():
                self._graphs.capture()

    @property
    def num_compilations(self) -> int:
        """1 plus the graphs; that `acquire` captures them again does not count."""
        return 1 + (self._graphs.num_graphs if self._graphs is not None else 0)

    @property
    def description(self) -> str:
        """See `ModelStep.description`."""
        graphs = f", {self._graphs.num_graphs} decode graphs" if self._graphs is not None else ""
        return f"torch on {self._device}{graphs}, {self._operations_name}"

    def _batch(self, step: StepInput) -> Batch:
        """``step`` on the device."""
        tables, positions, num_decode = step.block_table, step.positions, step.num_decode
        places = tables[step.slots, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        packed = self._to_device(np.stack((step.token_ids, positions, places)))
        num_pages = 0
        if num_decode:
            pages = int(positions[:num_decode].max()) // PAGE_TOKENS + 1
            num_pages = min(tables.shape[1], -(-pages // _LENGTH_BUCKET_PAGES) * _LENGTH_BUCKET_PAGES)
        all_wanted = len(step.output_rows) == len(step.token_ids)
        return Batch(
            token_ids=packed[0],
            positions=packed[1],
            places=packed[2],
            tables=self._to_device(tables[step.slots[:num_decode], :num_pages]),
            segments=tuple(_chunk(step, first, length) for first, length in step.segments[num_decode:].tolist()),
            output_rows=None if all_wanted else self._to_device(step.output_rows),
        )

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the step's device current: Triton's kernels and graphs run on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """int64 tensor of ``array``."""
        return moved(torch.from_numpy(array.astype(np.int64)), self._device)


def _chunk(step: StepInput, first: int, length: int) -> ChunkSegment:
    start = int(step.positions[first])
    num_pages = -(-(start + length) // PAGE_TOKENS)
    return ChunkSegment(first, length, start, step.block_table[step.slots[first], :num_pages])
