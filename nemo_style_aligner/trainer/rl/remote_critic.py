"""The critic in a job of its own, behind HTTP: a value source, and a reward source where its job has a reward model.

Training, saves and what recovers from a loss of either job are rank 0's; scores are asked for by every rank.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import result_on_every_rank
from nemo_style_aligner.engine.parallel.groups import broadcast_object
from nemo_style_aligner.kinds import TrainedCritic
from nemo_style_aligner.trainer.rl.experience import Experience
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.rl.values import Save, Training, ValueBatch, ValueSource
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.trainer.services.exactly_once.ledger import INITIAL_HISTORY, CriticPosition
from nemo_style_aligner.trainer.services.exactly_once.session import SequenceConflictError, what_to_do
from nemo_style_aligner.trainer.services.scores import VALUES

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The critic keeps what belongs to the actor's newest two checkpoints, and goes back to an earlier one if it is damaged.
_KEPT_SAVES = 3


def _is_saved(future: concurrent.futures.Future[None] | None, seconds: float) -> bool:
    """Wait at most ``seconds`` for a save; whether it is on disk. Only rank 0 knows: True on all others.

    Raises:
        Exception: the error of a save that failed.
    """
    if future is None or concurrent.futures.wait([future], seconds).not_done:
        return future is None
    future.result()
    return True


def _wait_for(future: concurrent.futures.Future[T] | None) -> T:
    """Collective: the result of what rank 0 has asked of the critic, which the client's limits end (None elsewhere)."""
    # For the watchdog the wait is progress, but only for as long as all ranks take part in it.
    return result_on_every_rank(future, met=activity.progress)


class RemoteCritic(RemoteScores, ValueSource):
    """The critic service, and the rewards that its answers have if there is a reward model in its job.

    It is trained and saved by rank 0; the other ranks follow its position and request scores only.

    Nothing here waits longer than the client's limits, which come from ``remote_critic_rm.timeouts``.

    Args:
        client: this rank's client.
        journal: rank 0's journal; None on the other ranks.
        trained_critic: what a new run does with a critic that has been trained before
            (``remote_critic_rm.trained_critic``): refuse it, or keep its weights.
    """

    def __init__(self, client: CriticClient, journal: CriticJournal | None, trained_critic: TrainedCritic) -> None:
        super().__init__(client)
        self.client: CriticClient = client
        self._journal = journal
        self._trained_critic = trained_critic
        self._resumed: CriticPosition | None = None
        self._saved_numbers: list[int] = []  # next_number at the last saves of both jobs
        self._published_history: str | None = None  # the critic's, at this job's newest checkpoint

    # ---- scores -----------------------------------------------------------------------------

    @property
    def last_progress(self) -> float:
        """See `ValueSource`."""
        return self.client.last_progress

    def values(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        """See `ValueSource.values`."""
        return self.column(VALUES.name, samples)

    # ---- the run ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring the critic to where this run is. Collective; call it once, after `load_state_dict` if that is called.

        Raises:
            SequenceConflictError: the critic cannot go there.
        """
        with activity.phase("bringing the critic up to date"):
            thread = concurrent.futures.ThreadPoolExecutor(1, "critic-begin")
            future = None if self._journal is None else thread.submit(self._bring_level, self._journal)
            self.client.follow(_wait_for(future))

    def _bring_level(self, journal: CriticJournal) -> CriticPosition:
        position = self._resumed or journal.run_start()
        if position is None:
            self._begin_new_run(journal)
        else:
            self.client.begin(journal, position)
            self._published_history = position.history
        return self.client.position

    def _begin_new_run(self, journal: CriticJournal) -> None:
        position = CriticPosition(uuid.uuid4().hex, 1, INITIAL_HISTORY)
        try:
            self.client.begin(journal, position)
        except SequenceConflictError as conflict:
            if conflict.history is None or self._trained_critic == "refuse":
                advice = what_to_do(
                    "start the critic in a new log directory (its exp_manager.explicit_log_dir)",
                    "keep the critic's weights: remote_critic_rm.trained_critic=keep",
                    "to continue an earlier run, start this job in that run's log directory",
                )
                # The conflict's own advice is left out: it is for runs that are not new.
                raise SequenceConflictError(
                    f"this run is new, but the critic has been trained before. {advice}\n"
                    f"The critic's answer: {conflict.__cause__}",
                    conflict.expected,
                    conflict.history,
                ) from None
            position = CriticPosition(position.run_id, 1, conflict.history)
            self.client.begin(journal, position)
            # The state that the run begins with may be in the critic's memory alone.
            self.client.save_async(position.history).result()
        journal.begin_run(position)
        self._published_history = position.history

    def start_training(self, experience: Experience) -> Training:
        """Send the critic its training batch, and return at once. Collective."""
        return self.start_training_on(experience.value_batch())

    def start_training_on(self, batch: ValueBatch | None) -> Training:
        """Send the critic this batch, which rank 0 has, and return at once."""
        future = None
        if self._journal is not None:
            assert batch is not None
            future = self.client.train_async(batch.tokens, batch.returns, batch.values, batch.mask)
        return Training(functools.partial(self.trained, future))

    def trained(self, future: concurrent.futures.Future[float] | None) -> dict[str, float]:
        """Wait for a training whose loss rank 0 gets; its mean loss, the same on every rank. Collective."""
        loss = _wait_for(future)
        self.client.follow(broadcast_object(self.client.position))
        return {"critic_loss": loss}

    def start_save(self) -> Save:
        """Have the critic write a checkpoint of its present state, and return at once. No training may be under way.

        The critic keeps its checkpoint that belongs to this job's newest one. Training that is started meanwhile waits
        until the critic's checkpoint is on disk; scoring does not.
        """
        future = None if self._journal is None else self.client.save_async(self._published_history)
        return Save(self.client.position, functools.partial(_is_saved, future))

    def confirm_save(self, save: Save) -> None:
        """Note that both jobs' checkpoints are on disk; delete the batches that no kept critic checkpoint needs."""
        self._saved_numbers = [*self._saved_numbers, save.position.next_number][-_KEPT_SAVES:]
        self._published_history = save.position.history
        if self._journal is not None and len(self._saved_numbers) == _KEPT_SAVES:
            self._journal.prune(self._saved_numbers[0])

    def state_dict(self) -> dict[str, Any]:
        """The run's id, and where the critic must be; the same on every rank."""
        position = self.client.position
        return {
            "run_id": position.run_id,
            "next_sequence_number": position.next_number,
            "history": position.history,
            "saved_numbers": [*self._saved_numbers, position.next_number][-_KEPT_SAVES:],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that `state_dict` was taken from; `begin` then brings the critic there."""
        self._resumed = CriticPosition(str(state["run_id"]), int(state["next_sequence_number"]), str(state["history"]))
        self._saved_numbers = [int(number) for number in state["saved_numbers"]]
        self._published_history = self._resumed.history
