"""How `ppo_step.py` lets its contenders take turns: each waits for its turn, makes one step and reports it.

Imports nothing of this project: TRL may live in an environment of its own.
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import Any


class Turns:
    """A contender's end of the connection; the other listens at the Unix socket ``address``."""

    def __init__(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX) as connecting:
            connecting.connect(address)
            self._connection = Connection(connecting.detach())

    def wait(self) -> None:
        """Sleep until the next step is wanted; SystemExit when there is none."""
        try:
            if self._connection.recv() is None:
                raise SystemExit(0)
        except EOFError:
            raise SystemExit(0) from None

    def report(self, answer: Any) -> None:
        """Say that a step is made (or, the first time, that the first one may be asked for)."""
        self._connection.send(answer)
