"""The actor job's client of the critic's service.

It knows nothing of process groups: scores are asked for by the ranks that have responses, training and saves by rank 0.
Whoever calls it distributes the results.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    RequestRefusedError,
    ServerUnavailableError,
    server_url,
)
from nemo_style_aligner.trainer.config.schema import RemoteCritic
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition
from nemo_style_aligner.trainer.services.exactly_once.session import (
    CriticWatch,
    SequenceConflictError,
    TrainingSession,
    as_conflict,
)
from nemo_style_aligner.trainer.services.score_client import Ask, ScoreClient, as_array, call_model
from nemo_style_aligner.trainer.services.scores import REWARDS, VALUES, Score

logger = logging.getLogger(__name__)

_LEVEL_POLL_SECONDS = 0.5  # between tries of a scoring request while the critic is being brought level


class CriticClient(ScoreClient):
    """Client of the critic, built from the config section ``remote_critic_rm`` (with NeMo-Aligner's keys).

    To the critic, a client is a new run until `begin` or `follow` says which run it is: keep its `position` in the
    actor's checkpoint. Training requests and saves are sent one at a time, in the order of the calls; inference
    requests up to ``max_parallel`` at once.

    By itself, a client makes sure that nothing is trained twice, and raises an error if the critic has lost training.
    After `begin` (on one rank) and `follow` (on the others) it waits for a lost critic, has it brought level, and
    accepts scores only from a critic that is level. ``on_lost`` is called if that is impossible, see `CriticWatch`.

    Attributes:
        last_progress: when a critic that is being brought level was last seen to have moved, by `time.monotonic()`.
    """

    def __init__(
        self,
        config: RemoteCritic,
        *,
        infer_limits: ClientLimits,
        train_limits: ClientLimits,
        token: str | None = None,
        max_parallel: int = 8,
        on_lost: Callable[[Exception], object] | None = None,
    ) -> None:
        critic, names = config.critic, config.critic.name
        super().__init__(
            server_url(critic.ip, critic.port),
            names.infer,
            [VALUES, REWARDS] if config.combine_rm_and_critic_server else [VALUES],
            limits=infer_limits,
            token=token,
            max_parallel=max_parallel,
            pad_to_length=config.pad_to_length,
            setting="remote_critic_rm.critic.port",
        )
        self._train_model, self._save_model = names.train, names.save
        self._failure: str | None = None  # of training
        self._train_limits = train_limits
        self._session = TrainingSession(
            self._command,
            self._train_model,
            self._save_model,
            CriticPosition(uuid.uuid4().hex, 1),
            self.base_url,
        )
        self._watch: CriticWatch | None = None
        self._on_lost = on_lost
        self._closed = threading.Event()
        self.last_progress = -math.inf
        self._command_thread = concurrent.futures.ThreadPoolExecutor(1, "critic-command")  # one thread keeps the order

    @property
    def position(self) -> CriticPosition:
        """Where the critic must be; read it when no training is under way."""
        return self._session.position

    # -------------------------------------------------------------- the run

    def begin(self, journal: CriticJournal, position: CriticPosition) -> None:
        """Continue the run of ``position``, and bring the critic to that position, now and whenever it is lost.

        ``journal`` holds the batches that the critic may need for that. Raises `SequenceConflictError` when the critic
        cannot be brought there.
        """
        self._session.begin(journal, position)
        self._watch = CriticWatch(self._http, self._session, self._train_limits.away_s or 0.0, self._on_lost)

    def follow(self, position: CriticPosition) -> None:
        """Join the run of ``position`` without bringing the critic there, on a rank that does not train.

        From now on scores are accepted only from a critic at ``position``.
        """
        self._session.position = position

    # -------------------------------------------------------------- requests

    def train_async(
        self, tokens: torch.Tensor, returns: torch.Tensor, prev_values: torch.Tensor, mask: torch.Tensor
    ) -> concurrent.futures.Future[float]:
        """Train the critic on one batch, exactly once. tokens: int64 [b, s]; the others: float32 [b, s-1].

        The future gives the mean loss. It raises `SequenceConflictError` when the critic has lost or
        gained training requests and cannot be brought level, and RuntimeError when training has failed before.
        """
        inputs = {"tokens": as_array(tokens)}
        for name, tensor in (("returns", returns), ("prev_values", prev_values), ("mask", mask)):
            inputs[name] = as_array(tensor, torch.float32)
        return self._command_thread.submit(self._train, inputs)

    def save_async(self, keep_history: str | None = None) -> concurrent.futures.Future[None]:
        """Have the critic write a checkpoint, after all training asked for before.

        ``keep_history``: history of the checkpoint that this save must not prune.
        """
        return self._command_thread.submit(self._session.save, keep_history)

    def _needed(self) -> dict[str, Sequence[Score]]:
        return super()._needed() | {self._train_model: (), self._save_model: ()}

    def close(self) -> None:
        """Abandon pending requests and close the connections."""
        if self._watch is not None:
            self._watch.stop()
        super().close()
        self._closed.set()
        self._command_thread.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------- in the pool's threads

    def _asking(self) -> Ask:
        ask = super()._asking()
        return ask if self.position.history is None else functools.partial(self._ask_level, ask, self.position)

    def _ask_level(self, ask: Ask, position: CriticPosition, *inputs: Any, **needed: Any) -> dict[str, np.ndarray]:
        """The answer of a critic at ``position``; waits while it is being brought there, as long as it progresses."""
        expected, since = None, time.monotonic()
        patience = self._train_limits.total_s + (self._train_limits.away_s or 0.0)
        while True:
            try:
                return ask(*inputs, parameters=position.parameters(), **needed)
            except RequestRefusedError as error:
                conflict = as_conflict(error)
                if conflict is None:
                    raise
                if self._watch is not None:
                    if self._watch.failure is not None:
                        raise self._watch.failure from error
                    self._watch.wake()
                if conflict.expected != expected:
                    expected = conflict.expected
                    self.last_progress = since = time.monotonic()
                elapsed = time.monotonic() - since
                if elapsed > patience:
                    message = (
                        f"the critic has not been brought up to date, and has made no progress, for {elapsed:.0f} s: "
                        f"{conflict}"
                    )
                    raise SequenceConflictError(message, conflict.expected, conflict.history) from error
            if self._closed.wait(_LEVEL_POLL_SECONDS * random.uniform(0.5, 1.5)):
                raise ServerUnavailableError(f"{self.base_url}: the client was closed")

    def _train(self, inputs: dict[str, np.ndarray]) -> float:
        if self._failure is not None:  # this batch would take the failed one's place
            raise RuntimeError(f"critic training has stopped because a request failed: {self._failure}")
        try:
            return self._session.train(inputs)
        except Exception as error:
            self._failure = str(error)
            raise

    def _command(
        self, model: str, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        return call_model(self._http, model, inputs, self._train_limits, parameters)
