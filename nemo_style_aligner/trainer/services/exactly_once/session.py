"""A run's training of the critic, exactly once across restarts of either side. On rank 0 of the actor job.

The run knows at which `CriticPosition` the critic must be. Whenever the critic turns out to be elsewhere (because it or
the actor job was killed and has resumed from a checkpoint), it is *brought level*: unless it is at a point of the run's
past, it goes back to one that it still has; then it is sent the journal's batches from there on.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nemo_style_aligner import activity
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.guard.protocol import READY_PATH, ProtocolError
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal, JournalError
from nemo_style_aligner.trainer.services.exactly_once.ledger import (
    EXPECTED_SEQUENCE_HEADER,
    HISTORY_HEADER,
    INSTANCE_HEADER,
    CriticPosition,
    batch_digest,
)
from nemo_style_aligner.trainer.services.score_client import PROGRESS_SECONDS, output

logger = logging.getLogger(__name__)

Call = Callable[[str, Mapping[str, np.ndarray], Mapping[str, Any]], dict[str, np.ndarray]]

RESTORE_MODEL = "critic_restore"
MAX_ATTEMPTS = 10
_WATCH_SECONDS = 1.0
# For the main thread to fail by itself, which gives a checkpoint that is being written a minute to complete.
_GIVE_UP_SECONDS = 65.0
_WATCH_LIMITS = ClientLimits(connect_s=3.0, read_s=3.0, total_s=3.0)


class SequenceConflictError(UserError, RuntimeError):
    """The critic is not where this run believes it to be, and cannot be brought there.

    ``expected``: the number of the run's next training request as the critic sees it; ``history``: the critic's.
    """

    exit_status = 1

    def __init__(self, message: str, expected: int, history: str | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.history = history


def what_to_do(*actions: str) -> str:
    """Advice for such an error, as a list."""
    others = (
        "if another actor trains this critic, give this one a critic of its own: in another log directory, on another "
        "port (its trainer.ppo.port, and remote_critic_rm.critic.port here)"
    )
    return "\n".join(["Do one of these:", *(f"  - {action}" for action in (*actions, others))])


def as_conflict(error: RequestRefusedError) -> SequenceConflictError | None:
    """The conflict that a refusal reports, None if it reports something else."""
    expected = error.headers.get(EXPECTED_SEQUENCE_HEADER)
    if error.status != 409 or expected is None:
        return None
    return SequenceConflictError(str(error), int(expected), error.headers.get(HISTORY_HEADER))


class TrainingSession:
    """Sends training batches and saves, one at a time. Thread-safe.

    Args:
        call: sends a request (model, inputs, parameters) and returns the outputs.
        train_model, save_model: names on the wire.
        position: where the critic must be.
        server: how errors name the critic.
    """

    def __init__(self, call: Call, train_model: str, save_model: str, position: CriticPosition, server: str) -> None:
        self._call = call
        self._train_model = train_model
        self._save_model = save_model
        self._server = server
        self._lock = threading.Lock()
        self._journal: CriticJournal | None = None
        self._attempts: dict[int, int] = {}
        self.position = position

    @property
    def recovers(self) -> bool:
        """Whether a critic that is elsewhere is brought level; if not, it is an error."""
        return self._journal is not None

    def begin(self, journal: CriticJournal, position: CriticPosition) -> None:
        """Continue at ``position``, and bring the critic there.

        Raises:
            SequenceConflictError: the critic cannot be brought there.
            JournalError: a batch of the journal cannot be read.
        """
        with self._lock:
            journal.scan()
            self._journal, self.position = journal, position
            self._bring_level(position)
            journal.rewind(position)  # not before: a run whose critic cannot go there may have to continue elsewhere

    def train(self, arrays: Mapping[str, np.ndarray]) -> float:
        """Train the critic on the next batch; returns the mean loss."""
        with self._lock:
            position, digest = self.position, batch_digest(arrays)
            if self._journal is not None:
                self._journal.write(position, arrays, digest)
            loss = self._train(position, arrays)
            self.position = position.after(digest)
            return loss

    def save(self, keep_history: str | None) -> None:
        """Have the critic write a checkpoint, brought level before if need be."""
        inputs = {"dummy_var": np.zeros(1, dtype=np.int64)}
        with self._lock:
            parameters = self.position.parameters() if self.recovers else {}
            if keep_history is not None:
                parameters["keep_history"] = keep_history
            self._level_call(self.position, self._save_model, inputs, parameters)

    def try_bring_level(self) -> bool:
        """Bring the critic level, unless a request is under way, which does so itself. Returns whether it was done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._bring_level(self.position)
        finally:
            self._lock.release()
        return True

    # ---- with the lock held -----------------------------------------------------------------

    def _train(self, position: CriticPosition, arrays: Mapping[str, np.ndarray]) -> float:
        answer = self._level_call(position, self._train_model, arrays, position.parameters())
        return float(output(answer, "loss_mean", self._train_model)[0])

    def _level_call(
        self, position: CriticPosition, model: str, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Send a request that needs the critic at ``position``, bringing it there whenever it turns out not to be."""
        while True:
            try:
                answer = self._call(model, inputs, parameters)
            except RequestRefusedError as error:
                conflict = as_conflict(error)
                if conflict is None:
                    raise
                if not self.recovers:
                    raise conflict from error
                self._count_attempt(position.next_number, error)
                self._bring_level(position)
            else:
                self._attempts.pop(position.next_number, None)
                return answer

    def _count_attempt(self, number: int, error: RequestRefusedError) -> None:
        self._attempts[number] = self._attempts.get(number, 0) + 1
        if self._attempts[number] > MAX_ATTEMPTS:
            raise SequenceConflictError(
                f"the critic at {self._server} was lost more than {MAX_ATTEMPTS} times at training batch {number}, "
                f"see its log: {error}",
                number,
            ) from error

    def _bring_level(self, position: CriticPosition) -> None:
        if self._journal is None:
            raise RuntimeError("the session has no journal: call begin() first")
        points = self._journal.positions(position)
        histories = np.array([str(point.history).encode() for point in points], dtype=object)
        try:
            answer = self._call(RESTORE_MODEL, {"histories": histories}, {"run_id": position.run_id})
        except RequestRefusedError as error:
            conflict = as_conflict(error)
            if conflict is None:
                raise
            raise SequenceConflictError(
                f"the critic at {self._server} cannot continue this run, which is at training batch "
                f"{position.next_number} and whose journal has the batches from {points[0].next_number} on "
                f"({self._journal.directory}). "
                + what_to_do(
                    "start the critic in the log directory in which it was trained for this run (its "
                    "exp_manager.explicit_log_dir)",
                    "start both jobs anew in new log directories",
                    "see docs/recovery.md for the other cases",
                )
                + f"\nThe critic's answer: {error}",
                conflict.expected,
                conflict.history,
            ) from error
        reached = int(output(answer, "position", RESTORE_MODEL)[0])
        missing = points[reached:-1]
        if not missing:
            return
        logger.warning(
            "the critic at %s expects training batch %d, this run is at %d: sending again what it lacks (%d)",
            self._server,
            missing[0].next_number,
            position.next_number,
            len(missing),
        )
        for point in missing:
            started = time.monotonic()
            loss = self._train(point, self._journal.read(point.next_number))
            seconds = time.monotonic() - started
            activity.progress()
            logger.warning("training batch %d sent again: loss %.4g, %.1f s", point.next_number, loss, seconds)


class CriticWatch:
    """A thread that notices when the critic is away or was started again, logs it, and has the critic brought level.

    Args:
        http: client of the critic.
        session: of this run.
        away_s: how long requests wait for a critic that is away; for so long the watchdog sees progress.
        on_lost: called with the error when the critic can never be brought level and the job has not ended by itself:
            the main thread may be waiting for other ranks, which wait for scores, and would not learn of the error.
    """

    def __init__(
        self,
        http: HttpClient,
        session: TrainingSession,
        away_s: float,
        on_lost: Callable[[Exception], object] | None,
    ) -> None:
        self.failure: Exception | None = None  # why the critic could not be brought level, the last time
        self._http = http
        self._session = session
        self._away_s = away_s
        self._on_lost = on_lost
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._instance = self._ask()
        self._thread = threading.Thread(target=self._run, name="critic-watch", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that the critic is not level."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()
        self._wake.set()

    def _ask(self) -> str | None:
        """The id of the process that serves; None if none does, and ``_reason`` says why."""
        try:
            return self._http.request("GET", READY_PATH, limits=_WATCH_LIMITS).headers.get(INSTANCE_HEADER, "")
        except (ServerUnavailableError, RequestRefusedError) as error:
            self._reason = error
            return None

    def _run(self) -> None:
        away_since: float | None = None
        last_line = 0.0
        while not self._stopped.is_set():
            self._wake.wait(_WATCH_SECONDS * random.uniform(0.5, 1.5))
            if is_woken := self._wake.is_set():  # a call of `wake` after this line is for the next round
                self._wake.clear()
            if self._stopped.is_set():
                return
            instance = self._ask()
            now = time.monotonic()
            if instance is None:
                away_since = now if away_since is None else away_since
                if now - away_since < self._away_s:
                    activity.progress()
                if now - last_line >= PROGRESS_SECONDS and not self._stopped.is_set():
                    logger.warning("waiting for the critic, away for %.0f s: %s", now - away_since, self._reason)
                    last_line = now
                continue
            if away_since is not None:
                logger.warning("the critic at %s is back after %.0f s", self._http.base_url, now - away_since)
                away_since, last_line = None, 0.0
            if (instance != self._instance or is_woken) and self._is_brought_level():
                self._instance = instance
            if self._on_lost is not None and self.failure is not None and _is_final(self.failure):
                if not self._stopped.wait(_GIVE_UP_SECONDS):
                    self._on_lost(self.failure)
                return

    def _is_brought_level(self) -> bool:
        try:
            is_level = self._session.try_bring_level()
            self.failure = None
            return is_level
        except ServerUnavailableError as error:  # away again
            logger.warning("lost the critic while bringing it up to date: %s", error)
        except (ProtocolError, OSError) as error:  # a malformed answer, no descriptors: may pass
            logger.warning("could not bring the critic up to date, trying again: %s", error)
        except (SequenceConflictError, RequestRefusedError, JournalError) as error:
            if not self._stopped.is_set():
                logger.error("the critic cannot be brought up to date: %s", error)
                self.failure = error
        return False


def _is_final(failure: Exception) -> bool:
    """Whether trying again would not bring the critic level."""
    return not isinstance(failure, RequestRefusedError) or failure.status < 500
