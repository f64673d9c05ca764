"""Commands from rank 0 to all other ranks of a service: an op code, plain metadata and tensors.

Works on any `torch.distributed` backend (what is sent is moved to ``device`` for the wire), and without
torch.distributed at all in a world of one.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

ERROR_EXCHANGE_SECONDS = 3.0
_FAILED, _STOP = 1, 2


class OpCode(enum.IntEnum):
    """What all ranks are to do next."""

    NOOP = 0  # heartbeat: the collective in which idle ranks wait must not time out
    INFER = 1
    TRAIN = 2
    SAVE = 3
    SHUTDOWN = 4  # end in good order
    ABORT = 5  # rank 0 has failed outside of a command: end with an error
    RESTORE = 6


@dataclasses.dataclass(frozen=True)
class Command:
    """``tensors``: on the CPU; the same on every rank after `CommandChannel.receive`."""

    op: OpCode
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Standing:
    """All ranks' state after a command: which ``failed``, and whether any was asked to ``stop`` the service."""

    failed: list[int]
    stop: bool


class CommandChannel:
    """Broadcasts commands from rank 0 of the default group; afterwards the ranks exchange whether they succeeded.

    Without an initialised torch.distributed there is one rank. The group's timeout must exceed the time by which ranks
    may differ in finishing one command (a long save).
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if distributed else 1
        self.rank = dist.get_rank() if distributed else 0

    def send(self, command: Command) -> None:
        """Rank 0: hand the command to all other ranks."""
        if self.world_size > 1:
            dist.broadcast_object_list([command], src=0, device=self._device)

    def receive(self) -> Command:
        """Other ranks: wait for the next command. Raises RuntimeError when rank 0 is gone."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, device=self._device)
        command: Command = box[0]
        return command

    def compare(self, *, stop: bool = False) -> Standing:
        """Learn how a command that succeeded on this rank went on the others. Collective, after each command.

        ``stop``: this rank was asked to stop the service.
        """
        if self.world_size == 1:
            return Standing([], stop)
        flags = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        flags[self.rank] = _STOP if stop else 0
        dist.all_reduce(flags)
        flags = flags.cpu()
        return Standing(torch.nonzero(flags == _FAILED).flatten().tolist(), bool((flags == _STOP).any()))

    def report_failure(self) -> None:
        """Join the other ranks' `compare`, to tell them that the command failed here.

        Waits a few seconds only: the others may be stuck in the command itself, and then learn of the failure when
        this process ends.
        """
        if self.world_size == 1:
            return
        flags = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        flags[self.rank] = _FAILED
        try:
            work = dist.all_reduce(flags, async_op=True)
            work.wait(timeout=datetime.timedelta(seconds=ERROR_EXCHANGE_SECONDS))
        except RuntimeError as error:
            logger.warning("rank %d could not tell the other ranks of its failure: %s", self.rank, error)


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copy numpy arrays (which may be read-only views of a request body) to tensors."""
    return {name: torch.tensor(array) for name, array in arrays.items()}
