"""The interface between scheduling and computation: the input of one forward pass, and the class that computes it.

The scheduler decides which tokens of which sequences enter a pass and which KV pages they own; a `ModelStep` computes
the logits. Scheduler and block table are the same for every step.
"""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import torch

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.weight_table import WeightTable
from nemo_style_aligner.engine.sampling import SamplingRows, sample
from nemo_style_aligner.engine.shard import ModelShard, TensorParallel

PAGE_TOKENS = 16  # positions per page of the KV cache
SCORED_ROWS = 256  # the most tokens of prompts in a pass whose logits are wanted, in order to score the prompts


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Everything that a step is compiled for; nothing else may trigger a compilation.

    Attributes:
        architecture: of the whole model.
        dtype: of weights, KV cache and matrix products, float32 or bfloat16.
        num_slots: the most sequences in flight; the rows of the block table.
        max_sequence_length: the most tokens of a prompt plus its response.
        num_pages: pages of KV memory per layer.
        max_step_tokens: the most tokens of one pass.
        tensor_parallel: the ranks that share the model.
    """

    architecture: ModelArchitecture
    dtype: torch.dtype
    num_slots: int
    max_sequence_length: int
    num_pages: int
    max_step_tokens: int
    tensor_parallel: TensorParallel = dataclasses.field(default_factory=TensorParallel)

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the block table."""
        return -(-self.max_sequence_length // PAGE_TOKENS)

    @property
    def shard(self) -> ModelShard:
        """This rank's share of the model."""
        return ModelShard(self.architecture, self.tensor_parallel.rank, self.tensor_parallel.size)

    def rotary_tables(self, local: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [max_sequence_length, turned channels / 2], times the scaling's factor.

        ``local``: of layers with a rotary embedding of their own, if there are any.
        """
        frequencies, factor = self.architecture.frequencies()
        own = self.architecture.local_frequencies()
        if local and own is not None:
            frequencies, factor = own, 1.0
        angles = torch.outer(torch.arange(self.max_sequence_length).float(), frequencies)
        return angles.cos() * factor, angles.sin() * factor


@dataclasses.dataclass(frozen=True)
class StepInput:
    """The tokens of one pass, as C-contiguous int32 arrays on the host.

    A segment is a run of neighbouring tokens of one sequence. Decoding sequences have segments of one token, which come
    first. A token attends to its own and all earlier positions of its slot; keys and values of every token of the pass
    are written before any token attends.
    """

    token_ids: np.ndarray  # [t]
    positions: np.ndarray  # [t], in the sequence
    slots: np.ndarray  # [t], row of the block table
    segments: np.ndarray  # [s, 2]: first token, number of tokens
    num_decode: int  # leading segments of one token
    output_rows: np.ndarray  # [o], ascending: tokens whose logits are wanted
    # [num_slots, pages_per_sequence]: page of every 16 positions; unused entries repeat the slot's first page
    block_table: np.ndarray
    # [t, layers, experts per token], to be filled: the experts of each token, in layers that have any; None: not wanted
    routes: np.ndarray | None = None


class ModelStep(abc.ABC):
    """Weights, KV pages and a compiled forward pass.

    Life cycle: `build` once, then fill ``weights``, then call `forward` as often as wanted. `release` frees the memory
    of weights and pages; `acquire` allocates it again, with undefined weights and zeroed pages.
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
        stop_ids: torch.Tensor,
        vocab_limit: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample as `sampling.sample` does; a subclass may compute the same faster."""
        return sample(logits, params, rows, stop_ids, vocab_limit)

    @abc.abstractmethod
    def clear_pages(self) -> None:
        """Zero the KV pages, as is needed once they may hold non-finite numbers."""

    @abc.abstractmethod
    def release(self) -> None:
        """Free the memory of weights and pages."""

    @abc.abstractmethod
    def acquire(self) -> None:
        """Allocate what `release` freed; pages are zero."""

    @property
    @abc.abstractmethod
    def num_compilations(self) -> int:
        """How often anything was compiled, captured or loaded precompiled; constant after `build`."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Which step this is and what it runs on, for the log."""
