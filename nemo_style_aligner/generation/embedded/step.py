"""The seam between scheduling and arithmetic: what one forward pass is asked for, and who can compute it.

The scheduler decides which tokens of which sequences enter a pass and which pages of KV memory they own; a
`ModelStep` computes the logits. Scheduler, block table and sampling are the same above every step.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

import numpy as np
import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.embedded.weight_table import WeightTable
from nemo_style_aligner.generation.engine import SamplingParams
from nemo_style_aligner.generation.sampling import SamplingRows, sample
from nemo_style_aligner.generation.shard import ModelShard, TensorParallel

PAGE_TOKENS = 16  # positions per page of the KV cache

WeightFormat = Literal["dtype", "int8"]
"""How projections and output layer are held: in the engine's dtype, or as int8 with one fp32 scale per output row."""


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """All that a step is compiled for; nothing else may make it compile.

    Attributes:
        architecture: of the whole model.
        dtype: of KV cache and matrix products, float32 or bfloat16.
        weight_format: see `WeightFormat`.
        num_slots: sequences in flight, at most: rows of the block table.
        max_sequence_length: prompt plus response, at most.
        num_pages: pages of KV memory per layer.
        max_step_tokens: tokens of one pass, at most.
        tensor_parallel: the ranks that share the model.
    """

    architecture: ModelArchitecture
    dtype: torch.dtype
    num_slots: int
    max_sequence_length: int
    num_pages: int
    max_step_tokens: int
    weight_format: WeightFormat = "dtype"
    tensor_parallel: TensorParallel = dataclasses.field(default_factory=TensorParallel)

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the block table."""
        return -(-self.max_sequence_length // PAGE_TOKENS)

    @property
    def shard(self) -> ModelShard:
        """This rank's share of the model."""
        return ModelShard(self.architecture, self.tensor_parallel.rank, self.tensor_parallel.size)


@dataclasses.dataclass(frozen=True)
class StepInput:
    """The tokens of one pass: segments of neighbouring tokens, each of one sequence; C-contiguous int32 on the host.

    A decoding sequence is a segment of one token; those come first. A token attends to its own and all earlier
    positions of its slot; keys and values of every token of the pass are written before any token attends.
    """

    token_ids: np.ndarray  # [t]
    positions: np.ndarray  # [t], in the sequence
    slots: np.ndarray  # [t], row of the block table
    segments: np.ndarray  # [s, 2]: first token, number of tokens
    num_decode: int  # leading segments of one token
    output_rows: np.ndarray  # [o], ascending: tokens whose logits are wanted
    # [num_slots, pages_per_sequence]: page of each 16 positions; unused entries are the slot's first page
    block_table: np.ndarray


class ModelStep(abc.ABC):
    """Weights, KV pages and a compiled forward pass.

    Life: `build` once, then fill ``weights``, then `forward` as often as wanted. `release` gives the memory of
    weights and pages back, `acquire` takes it again: weights with undefined content, pages zeroed.
    """

    weights: WeightTable

    @abc.abstractmethod
    def build(self) -> None:
        """Compile, and allocate weights and pages."""

    @abc.abstractmethod
    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [o, vocab_size] on the step's device, valid until the next call. Collective over the ranks."""

    def sample(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        rows: SamplingRows,
        stop_ids: torch.Tensor | None,
        vocab_limit: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sampling.sample`, or something faster that gives the same."""
        return sample(logits, params, rows, stop_ids, vocab_limit)

    @abc.abstractmethod
    def clear_pages(self) -> None:
        """Zero the KV pages: after non-finite numbers were in them."""

    @abc.abstractmethod
    def release(self) -> None:
        """Free the memory of weights and pages."""

    @abc.abstractmethod
    def acquire(self) -> None:
        """Allocate what `release` freed; pages are zero."""

    @property
    @abc.abstractmethod
    def num_compilations(self) -> int:
        """Times anything was compiled, captured or loaded ready-made; constant after `build`."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """For the log: which step, on what."""
