"""The training ledger: which training request of which run was applied last, and what it answered.

A client numbers its training requests 1, 2, 3, ... within a run id of its own. A repeat of the last
number (a retry after a lost answer) is answered from the ledger without training again; any other
number but the next is refused. The ledger's state belongs in the critic's checkpoint, so that critic
weights and ledger are restored together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_style_aligner.servers.protocol import ProtocolError

EXPECTED_SEQUENCE_HEADER = "X-Expected-Sequence-Number"
MAX_RUNS = 64


class TrainingLedger:
    """Last applied sequence number and its loss, per run id. The same on every rank."""

    def __init__(self) -> None:
        self._applied: dict[str, tuple[int, float]] = {}
        self.steps = 0  # training requests applied in all, numbered or not

    def expected(self, run_id: str) -> int:
        """The sequence number that the next training request of ``run_id`` must carry."""
        return self._applied.get(run_id, (0, 0.0))[0] + 1

    def stored_answer(self, run_id: str, sequence_number: int) -> float | None:
        """The loss to answer a repeat with; None when the request is the next one and has to be applied.

        Raises `ProtocolError` (409, naming the expected number) for a gap or a stale number.
        """
        expected = self.expected(run_id)
        if sequence_number == expected:
            return None
        if sequence_number == expected - 1 and run_id in self._applied:
            return self._applied[run_id][1]
        kind = "stale" if sequence_number < expected else "ahead of its predecessors"
        raise ProtocolError(
            409,
            f"critic_train: sequence_number {sequence_number} of run '{run_id}' is {kind}: expected {expected}. "
            "Send the training batches from that number on, in order",
            {EXPECTED_SEQUENCE_HEADER: str(expected)},
        )

    def record(self, run_id: str | None, sequence_number: int, loss: float) -> None:
        """Note that a training request was applied. ``run_id`` None: the request was not numbered."""
        self.steps += 1
        if run_id is None:
            return
        self._applied.pop(run_id, None)  # re-inserted last: the dict is ordered by latest use
        self._applied[run_id] = (sequence_number, loss)
        while len(self._applied) > MAX_RUNS:
            del self._applied[next(iter(self._applied))]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for the checkpoint."""
        runs = {run: {"sequence_number": number, "loss": loss} for run, (number, loss) in self._applied.items()}
        return {"steps": self.steps, "runs": runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.steps = int(state["steps"])
        self._applied = {
            str(run): (int(entry["sequence_number"]), float(entry["loss"])) for run, entry in state["runs"].items()
        }
