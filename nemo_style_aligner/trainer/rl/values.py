"""Value sources: what gives values, and learns returns."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nemo_style_aligner.trainer.checkpoints.training import MayPublish
from nemo_style_aligner.trainer.rl.sample import Rollouts, Sample
from nemo_style_aligner.trainer.services.score_client import SequencesToScore

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.rl.experience import Experience


@dataclasses.dataclass(frozen=True)
class ValueBatch:
    """What a critic in another job learns from: N samples, padded to s tokens.

    Attributes:
        tokens: int64 [N, s].
        returns, values: fp32 [N, s-1], targets, and the values that were given before.
        mask: fp32 [N, s-1], 1 at the predictions of response tokens that count.
    """

    tokens: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Training:
    """Training that is under way, or done.

    Attributes:
        result: collective: waits for it; metrics, the same on every rank: ``critic_loss``, the mean over its updates.
    """

    result: Callable[[], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that is under way.

    Attributes:
        position: what is saved, for `ValueSource.confirm_save`.
        wait: waits some seconds for the save; returns whether it is on disk.
    """

    position: Any
    wait: MayPublish


class ValueSource(abc.ABC):
    """Gives values of responses' tokens, and learns the returns. All ranks that train have one."""

    @property
    def last_progress(self) -> float:
        """When it was last seen to have moved while it was being brought up to date, by `time.monotonic()`."""
        return -math.inf

    def values(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]] | None:
        """The values of samples' response tokens, fp32 each; asked for on the rank that has the samples, as they end.

        None: it gives those of all samples together, by `values_of`.
        """
        return None

    def values_of(self, share: Rollouts) -> torch.Tensor | None:
        """The values of a share's response tokens, fp32 [R], if `values` gives none. Collective."""
        return None

    @abc.abstractmethod
    def start_training(self, experience: Experience) -> Training:
        """Have it learn from a step's samples, beside this job's ranks or by them. Collective."""

    def give_back_memory(self) -> None:  # noqa: B027  (one in another job has none of this one's)
        """Leave the device to others until values are wanted again. Collective."""

    def begin(self) -> None:  # noqa: B027  (loading this job's checkpoint may have been enough)
        """Bring it to where this run is. Collective; once, after `load_state_dict` if that is called."""

    def start_save(self) -> Save | None:
        """Have it write a checkpoint of its present state; returns at once. No training may be under way.

        None: its state is part of this job's checkpoint.
        """
        return None

    def confirm_save(self, save: Save) -> None:  # noqa: B027  (only of what `start_save` returned)
        """Note that its checkpoint and this job's, which belong together, are on disk."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to bring it to this point; the same on every rank."""
        return {}

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that `state_dict` was taken from."""

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:  # noqa: B027
        """Wait until it can be used, and make sure that it fits this job. Raises `UserError`."""

    def close(self) -> None:  # noqa: B027
        """Close connections."""
