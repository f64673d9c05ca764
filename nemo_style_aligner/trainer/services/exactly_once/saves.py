"""The critic's checkpoints that are being written, and who waits for them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

Asked = tuple[str, str | None]
"""The critic's history and ``keep_history``, by which a repeat of a request is recognised."""

Answer = concurrent.futures.Future[dict[str, np.ndarray]]
"""Of a request: the outputs by name."""


@dataclasses.dataclass
class OpenSave:
    """A checkpoint that is being written; on rank 0 with what was asked, and the answers that wait for it."""

    written: concurrent.futures.Future[Any]
    asked: Asked | None = None
    waiting: list[Answer] = dataclasses.field(default_factory=list)


class Saves:
    """The saves of one rank, in their order.

    On rank 0 a client that got no answer in time sends its request again: that joins the save which the first has
    begun, for another would take longer.
    """

    def __init__(self) -> None:
        self._saves: list[OpenSave] = []
        self._newest: Asked | None = None  # of the complete ones

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def waiting(self) -> list[Answer]:
        """All answers that wait."""
        return [answer for save in self._saves for answer in save.waiting]

    def add(self, written: concurrent.futures.Future[Any]) -> OpenSave:
        """Note a save that has begun; ``written`` is done when it is complete."""
        self._saves.append(OpenSave(written))
        return self._saves[-1]

    def join(self, asked: Asked, answer: Answer) -> bool:
        """Have a repeat of a request answered with its save, if that is being written or the newest complete one."""
        save = next((save for save in self._saves if save.asked == asked), None)
        if save is not None:
            save.waiting.append(answer)
        elif asked == self._newest:
            _answer(answer)
        return save is not None or asked == self._newest

    def forget_newest(self) -> None:
        """Answer no repeat with a complete save: its checkpoint may be put aside."""
        self._newest = None

    def poll(self) -> None:
        """Answer the requests whose checkpoints are complete. Raises the error if one could not be written."""
        while self._saves and self._saves[0].written.done():
            self._saves[0].written.result()
            save = self._saves.pop(0)
            self._newest = save.asked
            for answer in save.waiting:
                _answer(answer)

    def wait(self) -> None:
        """Wait until all are written, or have failed."""
        concurrent.futures.wait([save.written for save in self._saves])


def _answer(answer: Answer) -> None:
    answer.set_result({"status": np.zeros(1, dtype=np.int64)})
