"""Ranks that run one engine together, and each one's share of the model: sizes, and slices of full tensors.

q, k, v, gate and up projections and the vocabulary are cut by rows, the output and down projections by
columns; norms are whole on every rank. With more ranks than key heads, ranks share a key head and each
holds a copy of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import broadcast_object

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The ranks that run one engine together: this one's number, how many, and their process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``tensor`` (equal shapes), in rank order."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def all_agree(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank. For groups that take CPU tensors."""
        votes = torch.tensor(int(value))
        self.all_reduce(votes)
        return int(votes) == self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's ``tensor`` on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0) if self.group else 0, group=self.group)


@dataclasses.dataclass(frozen=True)
class EngineGroup:
    """The ranks that share an engine, and their place among all such groups; by default a single rank.

    `TensorParallel` covers what the computation needs: which rank has which part of the model, and sums. This class
    adds what rollouts need: which share of the work is this group's, and control data from its leader.

    Attributes:
        tensor_parallel: the ranks, and this one's number among them.
        index, count: the group's number among all groups, and how many there are.
        control: `control_group` of the same ranks, for long waits: for a leader that itself waits for work, or for an
            engine that computes on this rank's GPU.
        leader: global rank of the group's first rank.
    """

    tensor_parallel: TensorParallel = dataclasses.field(default_factory=TensorParallel)
    index: int = 0
    count: int = 1
    control: dist.ProcessGroup | None = None
    leader: int = 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank acts for the group: takes the work and hands in the results."""
        return self.tensor_parallel.rank == 0

    def share(self, value: T | None) -> T:
        """The leader's ``value`` on every rank (small control data between this job's own ranks)."""
        return cast(T, value if self.control is None else broadcast_object(value, self.leader, self.control))

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on every rank."""
        if self.control is None:
            return [value]
        box: list[Any] = [None] * self.tensor_parallel.size
        dist.all_gather_object(box, value, group=self.control)
        return box


class ModelShard:
    """One rank's part of ``architecture``.

    Attributes:
        num_heads, num_groups: query heads and key (= value) heads held here.
        first_group: number of the first key head held here.
        ffn_size: this rank's part of the inner dimension of an MLP; of an expert see `expert_size`.
        vocab_start, vocab_rows: first id, and number of ids, whose embedding and output rows are held here;
            ``vocab_rows`` is the same on every rank, so the last ranks' rows may reach beyond the vocabulary.
    """

    def __init__(self, architecture: ModelArchitecture, rank: int = 0, size: int = 1) -> None:
        """Raises ValueError where the heads or the MLP cannot be divided by ``size``."""
        a = architecture
        if problems := a.layout_problems(size, engine_key="tensor_parallel_size"):
            raise ValueError("; ".join(problems))
        self.architecture = a
        self.rank, self.size = rank, size
        self.num_heads = a.num_attention_heads // size
        self.num_groups = max(1, a.num_query_groups // size)
        self.first_group = rank * a.num_query_groups // size
        self.ffn_size = a.ffn_hidden_size // size
        self.vocab_rows = -(-a.vocab_size // size)
        self.vocab_start = rank * self.vocab_rows

    @property
    def held_vocab_rows(self) -> int:
        """Those of the ``vocab_rows`` that lie within the vocabulary: fewer, or none, on the last ranks."""
        return max(0, min(self.vocab_rows, self.architecture.vocab_size - self.vocab_start))

    @property
    def expert_size(self) -> int:
        """This rank's part of the inner dimension of an expert; 0 where there are none."""
        experts = self.architecture.experts
        return experts.ffn_hidden_size // self.size if experts is not None else 0

    @property
    def query_size(self) -> int:
        """Rows of the q projection held here."""
        return self.num_heads * self.architecture.kv_channels

    @property
    def group_size(self) -> int:
        """Rows of the k projection (and of v) held here."""
        return self.num_groups * self.architecture.kv_channels

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Weights held here of a layer's norms of queries and of keys; empty: there are none."""
        a = self.architecture
        return (self.query_size, self.group_size) if a.qk_norm_over_heads else a.qk_norm_sizes

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's view of the full tensor with Hugging Face name ``name``."""
        if self.size == 1:
            return tensor
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        channels = self.architecture.kv_channels
        over_heads = self.architecture.qk_norm_over_heads
        if projection == "q_proj" or (over_heads and projection == "q_norm"):
            return tensor.narrow(0, self.rank * self.query_size, self.query_size)
        if projection in ("k_proj", "v_proj") or (over_heads and projection == "k_norm"):
            return tensor.narrow(0, self.first_group * channels, self.group_size)
        if projection in ("gate_proj", "up_proj"):
            return tensor.chunk(self.size, 0)[self.rank]
        if projection == "o_proj" and kind == "weight":
            return tensor.narrow(1, self.rank * self.query_size, self.query_size)
        if projection == "down_proj" and kind == "weight":
            return tensor.chunk(self.size, 1)[self.rank]
        if kind == "sinks":
            return tensor.narrow(0, self.rank * self.num_heads, self.num_heads)
        if projection in ("embed_tokens", "lm_head"):
            return tensor[self.vocab_start : self.vocab_start + self.vocab_rows]  # the last rank's may be shorter
        return tensor  # norms, and biases added once after the ranks' sum
