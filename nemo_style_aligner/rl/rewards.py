"""Reward sources (placeholder of the interface)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_style_aligner.rl.sample import Sample
from nemo_style_aligner.servers.client import SequencesToScore


@dataclasses.dataclass(frozen=True)
class Reward:
    """A sample's reward. ``value`` is NaN where the source failed, and ``problem`` says why."""

    value: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None


class RewardSource(Protocol):
    """Scores finished samples."""

    @property
    def part_names(self) -> Sequence[str]: ...

    def score(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[Reward]]: ...

    def wait_until_ready(self, sequences: SequencesToScore) -> None:
        """Wait until it can be used, and check that it fits this job.

        Raises:
            ServerUnavailableError: it is not there in time.
            UnfitServiceError: it does not fit.
        """
        ...

    def close(self) -> None: ...
