"""The training ledger: which training request of which run was applied last, and what it answered.

A client numbers its training requests 1, 2, 3, ... within a run id of its own. A repeat of the last
one (a retry after a lost answer: same number, same batch) is answered from the ledger without training again; any other
number but the next is refused. The ledger's state belongs in the critic's checkpoint, so that critic
weights and ledger are restored together.

Beside the numbers it keeps the critic's *history*: a hash over the contents of all batches in order. Critics that
started from the same weights and have the same history have the same weights, so a client that knows which history it
relies on notices every other one, be it older, newer, or of the same length with other batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_style_aligner.guard.protocol import ProtocolError

EXPECTED_SEQUENCE_HEADER = "X-Expected-Sequence-Number"
HISTORY_HEADER = "X-Critic-History"
INSTANCE_HEADER = "X-Instance-Id"  # in answers of the readiness routes: names the process that serves
INITIAL_HISTORY = "initial"
MAX_RUNS = 64
BATCH_ARRAYS = ("tokens", "returns", "prev_values", "mask")
_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class CriticPosition:
    """Where in its training a run believes the critic to be.

    Attributes:
        run_id: the run that counts the requests.
        next_number: the sequence number of the run's next training request.
        history: the critic's history, None if the client does not follow it.
    """

    run_id: str
    next_number: int
    history: str | None = None

    def parameters(self) -> dict[str, Any]:
        """The request parameters that state this position."""
        named: dict[str, Any] = {"run_id": self.run_id, "sequence_number": self.next_number}
        return named if self.history is None else named | {"history": self.history}

    def after(self, digest: str) -> CriticPosition:
        """The position after training on the batch with this `batch_digest`."""
        history = None if self.history is None else extend_history(self.history, digest)
        return CriticPosition(self.run_id, self.next_number + 1, history)


def batch_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """A hash of a training batch: names, dtypes, shapes and contents of its four arrays."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in BATCH_ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


def extend_history(history: str, digest: str) -> str:
    """The history after one more batch."""
    return hashlib.blake2b(f"{history} {digest}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Applied:
    """A run's last training request: its number, its loss, the critic's history after it, its batch's digest."""

    sequence_number: int
    loss: float
    history: str
    digest: str


class TrainingLedger:
    """Last applied sequence number and its loss, per run id. The same on every rank.

    Attributes:
        steps: training requests applied in all, numbered or not.
        history: hash over all of them, in order.
    """

    def __init__(self) -> None:
        self._applied: dict[str, _Applied] = {}
        self.steps = 0
        self.history = INITIAL_HISTORY

    def where(self, run_id: str) -> dict[str, str]:
        """The headers of a refusal: where the critic is, as run ``run_id`` sees it."""
        return {EXPECTED_SEQUENCE_HEADER: str(self.expected(run_id)), HISTORY_HEADER: self.history}

    def expected(self, run_id: str) -> int:
        """The sequence number that the next training request of ``run_id`` must carry."""
        return self._applied[run_id].sequence_number + 1 if run_id in self._applied else 1

    def check(self, position: CriticPosition, what: str) -> None:
        """Raise `ProtocolError` (409, saying where the critic is) unless it is at ``position``."""
        expected = self.expected(position.run_id)
        if position.next_number != expected:
            kind = "stale" if position.next_number < expected else "ahead of its predecessors"
            reason = f"sequence_number {position.next_number} of run '{position.run_id}' is {kind}: expected {expected}"
        elif position.history not in (None, self.history):
            reason = (
                f"the critic has the history {self.history} ({self.steps} training requests), not {position.history} "
                f"of run '{position.run_id}': it was trained on other batches"
            )
        else:
            return
        raise ProtocolError(
            409,
            f"{what}: {reason}. Send the training batches from number {expected} on, in order, or have the critic go "
            "back with critic_restore",
            self.where(position.run_id),
        )

    def stored_answer(self, position: CriticPosition, digest: str) -> float | None:
        """The loss to answer a repeat with; None when the request is the next one and has to be applied.

        Args:
            position: where the request needs the critic to be; ``next_number`` is the request's own number.
            digest: the `batch_digest` of its batch.

        Raises:
            ProtocolError: (409) a gap, a stale number, the last one with another batch, or another history; says what
                is expected.
        """
        last = self._applied.get(position.run_id)
        if (
            last is not None
            and position.next_number == last.sequence_number
            and last.digest == digest
            and position.after(digest).history in (None, last.history)
        ):
            return last.loss
        self.check(position, "critic_train")
        return None

    def record(self, run_id: str | None, sequence_number: int, loss: float, digest: str) -> None:
        """Note that a training request was applied. ``run_id`` None: the request was not numbered."""
        self.steps += 1
        self.history = extend_history(self.history, digest)
        if run_id is None:
            return
        self._applied.pop(run_id, None)  # re-inserted last: the dict is ordered by latest use
        self._applied[run_id] = _Applied(sequence_number, loss, self.history, digest)
        while len(self._applied) > MAX_RUNS:
            del self._applied[next(iter(self._applied))]

    def is_ahead_by_run_alone(self, state: Mapping[str, Any], run_id: str) -> bool:
        """Whether all requests applied since ``state`` (a `state_dict`) were of ``run_id``, which may undo its own."""
        before = state["runs"].get(run_id)
        number = int(before["sequence_number"]) if before else 0
        return self.steps - int(state["steps"]) == self.expected(run_id) - 1 - number

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for the checkpoint."""
        runs = {run: dataclasses.asdict(applied) for run, applied in self._applied.items()}
        return {"steps": self.steps, "history": self.history, "runs": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.steps = int(state["steps"])
        self.history = str(state["history"])
        self._applied = {
            str(run): _Applied(
                int(entry["sequence_number"]), float(entry["loss"]), str(entry["history"]), str(entry["digest"])
            )
            for run, entry in state["runs"].items()
        }
