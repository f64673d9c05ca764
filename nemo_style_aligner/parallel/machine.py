"""Facts about the machine this process runs on: cores, memory, addresses, free ports."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import psutil

_SERVER_PORTS = range(10000, 32000)


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, within its control group's quota. At least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, quota) if quota is not None else cores)


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, within the control group's limit (version 2)."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but goes when it has to.
        cache = int(statistics["inactive_file"]) + int(statistics["active_file"])
        available = min(available, int(limit) - int((group / "memory.current").read_text()) + cache)
    return max(0, available)


def free_port() -> int:
    """A TCP port that nothing listens on now. Another process may take it before the caller does.

    Not one of those that the system gives to outgoing connections (32768 and up on Linux), or any of them could.
    """
    for port in [*random.SystemRandom().sample(_SERVER_PORTS, 100), 0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free TCP port")


def own_address() -> str:
    """The address under which other machines reach this one: that of the default route, else the host name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))  # sends nothing: a datagram socket only looks up the route
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _cgroup_quota() -> int | None:
    """Whole cores of the control group's CPU quota (version 2), or ``None`` without one."""
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        return None
    quota, period = path.read_text().split()
    return None if quota == "max" else max(1, int(quota) // int(period))
