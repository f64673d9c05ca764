"""A group of ranks that run one engine together, one of several such groups, and its exchange of control data."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nemo_style_aligner.generation.shard import TensorParallel
from nemo_style_aligner.parallel.groups import broadcast_object

T = TypeVar("T")


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

    def agree(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's ``tensor`` on every rank; shapes and dtypes are the same everywhere."""
        self.tensor_parallel.broadcast(tensor)
        return tensor
