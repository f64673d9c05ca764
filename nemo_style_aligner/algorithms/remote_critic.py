"""The critic as the PPO loop sees it: training that runs beside the policy's, saving, and its place in a checkpoint."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from nemo_style_aligner.parallel.groups import broadcast_object
from nemo_style_aligner.rollout.batch import Experience
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.telemetry import activity


class CriticTraining:
    """A critic update under way in the critic job."""

    def __init__(self, future: concurrent.futures.Future[float] | None, timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s

    def result(self) -> float:
        """Collective: wait for the update; its mean loss, on every rank."""
        with activity.bounded(self._timeout_s):
            return broadcast_object(None if self._future is None else self._future.result(self._timeout_s))


class RemoteCritic:
    """Rank 0 talks to the critic service for the whole actor job; the other ranks follow.

    Args:
        client: rank 0's client; None on the other ranks.
        timeout_s: longest wait for one update or save.
    """

    def __init__(self, client: CriticClient | None, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def start_training(self, experience: Experience) -> CriticTraining:
        """Send the critic its training batch and return at once."""
        if self._client is None:
            return CriticTraining(None, self._timeout_s)
        future = self._client.train_async(experience.tokens, experience.returns, experience.values, experience.mask)
        return CriticTraining(future, self._timeout_s)

    def save(self) -> None:
        """Collective: have the critic write a checkpoint, and wait until it is on disk."""
        with activity.bounded(self._timeout_s):
            if self._client is not None:
                self._client.save_async().result(self._timeout_s)
            broadcast_object(None)

    def state_dict(self) -> dict[str, Any]:
        """Which run this is to the critic and how many updates it was sent; the same on every rank."""
        state = None
        if self._client is not None:
            state = {"run_id": self._client.run_id, "next_sequence_number": self._client.next_sequence_number}
        return broadcast_object(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that `state_dict` was taken from."""
        if self._client is not None:
            self._client.run_id = str(state["run_id"])
            self._client.resume_training(int(state["next_sequence_number"]))
