"""Where a thread is: the line of this project's code it executes, and the collective it waits for."""

from __future__ import annotations

import dataclasses
import gc
import linecache
import sys
import threading
from types import FrameType

_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen")
_COLLECTIVES = "torch.distributed.distributed_c10d"


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a thread is.

    Attributes:
        line: ``file:number in function: source``, the innermost line outside of libraries.
        collective: ``all_reduce of the default group (4 ranks)``; None outside of torch.distributed's collectives.
            A wait for a transfer begun earlier shows in ``line`` only.
    """

    line: str
    collective: str | None


def main_thread_location() -> Location:
    """Where the main thread is now; to be called from another thread."""
    identifier = threading.main_thread().ident
    # CPython 3.11 deadlocks if the garbage collector runs in this call and frees a threading.local (gh-106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    return locate(frames.get(identifier) if identifier is not None else None)


def locate(frame: FrameType | None) -> Location:
    """Where a thread is whose innermost frame is ``frame``."""
    collective: FrameType | None = None
    ours: FrameType | None = None
    innermost = frame
    while frame is not None and ours is None:
        if frame.f_globals.get("__name__") == _COLLECTIVES:
            collective = frame  # the outermost: broadcast_object_list rather than the broadcast in it
        elif not any(part in frame.f_code.co_filename for part in _LIBRARIES):
            ours = frame
        frame = frame.f_back
    return Location(_line(ours or innermost), _describe(collective) if collective is not None else None)


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "nowhere"
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number} in {frame.f_code.co_name}: {linecache.getline(name, number).strip()}"


def _describe(frame: FrameType) -> str:
    import torch.distributed as dist

    group = frame.f_locals.get("group")
    where = "the default group"
    if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
        where = f"the group of ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"
    return f"{frame.f_code.co_name} of {where}"
