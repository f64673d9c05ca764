"""Actions of one rank, or of every rank, whose results and errors all ranks learn.

So no rank waits for an answer that never comes because another rank has failed.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import broadcast_object
from nemo_style_aligner.errors import OtherRankError

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How long a rank at most keeps the others waiting in one collective while something slow is under way."""


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 and give every rank its result, or an error if it failed. Collective.

    Args:
        group: of all ranks; the default group unless given.

    Raises:
        OSError, ValueError, TypeError: what ``action`` raised, on rank 0; `OtherRankError` on the others.
    """
    result, failure = _attempt(action) if dist.get_rank() == 0 else (None, None)
    result, message = broadcast_object((result, str(failure) if failure else None), group=group)
    if failure is not None:
        raise failure
    if message is not None:
        raise OtherRankError(f"rank 0: {message}")
    return result  # type: ignore[return-value]


def result_on_every_rank(
    future: concurrent.futures.Future[T] | None,
    group: dist.ProcessGroup | None = None,
    met: Callable[[], object] = lambda: None,
) -> T:
    """The result of rank 0's ``future`` (None on the others) on every rank. Collective.

    However long it takes, no rank waits in one collective for more than seconds: collectives have a time limit.

    Args:
        group: the default group unless given.
        met: called on every rank each time that all have met and go on waiting.

    Raises:
        Exception: what the future raised, on rank 0; `OtherRankError` on the others.
    """
    answer: tuple[T | None, str | None] | None = None
    while answer is None:
        failure = None
        if future is not None and not concurrent.futures.wait([future], PATIENCE_SECONDS).not_done:
            failure = future.exception()
            answer = (None, str(failure) or repr(failure)) if failure else (future.result(), None)
        answer = broadcast_object(answer, group=group)
        if failure is not None:
            raise failure
        met()
    result, message = answer
    if message is not None:
        raise OtherRankError(f"rank 0: {message}")
    return result  # type: ignore[return-value]


def patiently_on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """`on_first_rank` for an ``action`` that may take long. Collective; see `result_on_every_rank`.

    ``action`` runs in a thread of its own and must take part in no collective.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "first-rank") as thread:
        return result_on_every_rank(thread.submit(action) if dist.get_rank() == 0 else None, group)


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run ``action`` on every rank and give every rank all results, or an error if one failed. Collective.

    Args:
        group: of all ranks; None: the default group.

    Raises:
        OSError, ValueError, TypeError: what ``action`` raised on this rank; `OtherRankError` on the others.
    """
    result, failure = _attempt(action)
    gathered: list[tuple[T | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, str(failure) if failure else None), group=group)
    if failure is not None:
        raise failure
    messages = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(gathered) if message is not None]
    if messages:
        raise OtherRankError("; ".join(messages))
    return [value for value, _ in gathered]  # type: ignore[misc]


def patiently_on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """`on_every_rank` for an ``action`` that may take long, on some ranks longer; see `patiently_on_first_rank`."""
    thread = concurrent.futures.ThreadPoolExecutor(1, "every-rank")
    try:
        future = thread.submit(action)
        while not all(on_every_rank(lambda: not concurrent.futures.wait([future], PATIENCE_SECONDS).not_done, group)):
            pass
        return on_every_rank(future.result, group)
    finally:
        thread.shutdown(wait=False)  # an error of another rank need not wait for this one's action


def _attempt(action: Callable[[], T]) -> tuple[T | None, OSError | ValueError | TypeError | None]:
    """Return the result, or an error that files and their contents can cause; any other is a bug and propagates."""
    try:
        return action(), None
    except (OSError, ValueError, TypeError) as error:
        return None, error
