"""Places at which all ranks of a job agree whether to stop."""

from __future__ import annotations

import signal

from nemo_style_aligner.parallel import stop_signals
from nemo_style_aligner.parallel.groups import all_reduce_max


class StopEarlyError(Exception):
    """All ranks have agreed to stop here. What was not finished is not part of the job's state."""


def agree(reason: int = 0) -> int:
    """Agree with all ranks whether to stop. Collective.

    Returns:
        On every rank the largest of all ranks' ``reason`` and of the numbers of the stop signals that any of them got;
        0: go on.
    """
    received = stop_signals.received()
    return all_reduce_max(max(reason, int(received[0]) if received else 0))


def check() -> None:
    """Stop point: raise `StopEarlyError` on every rank if one of them got a stop signal. Collective."""
    if number := agree():
        raise StopEarlyError(f"received {signal.Signals(number).name}")
