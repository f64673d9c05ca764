"""Value sources: what gives values, and learns returns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from nemo_style_aligner.checkpoints.training import MayPublish
from nemo_style_aligner.rl.sample import Sample
from nemo_style_aligner.services.reward_client import SequencesToScore


@dataclasses.dataclass(frozen=True)
class ValueBatch:
    """What a value source learns from: N samples, padded to s tokens.

    Attributes:
        tokens: int64 [N, s].
        returns, values: fp32 [N, s-1], targets, and the values that were given before.
        mask: fp32 [N, s-1], 1 at the predictions of response tokens that count.
    """

    tokens: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


class Training(Protocol):
    """Training that is under way."""

    def result(self) -> float:
        """Collective: wait for it; the mean loss, the same on every rank."""
        ...


class Save(Protocol):
    """A save that is under way."""

    @property
    def wait(self) -> MayPublish:
        """Waits some seconds for the save; returns whether it is on disk."""
        ...


class ValueSource(Protocol):
    """Gives values of responses' tokens, and learns the returns. All ranks that train have one."""

    @property
    def last_progress(self) -> float:
        """When it was last seen to have moved while it was being brought up to date, by `time.monotonic()`."""
        ...

    def values(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        """The values of samples' response tokens, fp32 each; asked for on the rank that has the samples."""
        ...

    def begin(self) -> None:
        """Bring it to where this run is. Collective; once, after `load_state_dict` if that is called."""
        ...

    def start_training(self, batch: ValueBatch | None) -> Training:
        """Have it learn from a step's samples, which rank 0 has; returns at once. Collective."""
        ...

    def start_save(self) -> Save:
        """Have it write a checkpoint of its present state; returns at once. No training may be under way."""
        ...

    def confirm_save(self, save: Any) -> None:
        """Note that its checkpoint and this job's, which belong together, are on disk."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to bring it to this point; the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that `state_dict` was taken from."""
        ...

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:
        """Wait until it can be used, and make sure that it fits this job. Raises `UserError`."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...
