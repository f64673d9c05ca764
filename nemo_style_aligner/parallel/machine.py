"""Facts about the machine this process runs on: cores, memory, addresses, free ports."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import psutil

_SERVER_PORTS = range(10000, 32000)
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's
# Of control groups: the files with the limit and what is used, and the prefix of the numbers that include groups below.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = ("memory.max", "memory.current", "")


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, within its control group's quota. At least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, quota) if quota is not None else cores)


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, within the limits of the control groups around us."""
    return max(0, min([int(psutil.virtual_memory().available), *_cgroup_rooms()]))


def computes_in_bf16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bf16 arithmetic, which torch emulates elsewhere. False where nothing is known of it."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    features = next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BF16_FEATURES.isdisjoint(features.split())


def processor_model(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, family and stepping, as far as Linux tells."""
    wanted = ("vendor_id", "cpu family", "model", "stepping")  # "model name" begins with "model"
    try:
        lines = cpu_info.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(wanted))


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


def _cgroup_rooms(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that each of our memory control groups with a limit has left: our own and all above it."""
    rooms = []
    with contextlib.suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                root, names = mounted, _VERSION_2
            elif "memory" in controllers.split(","):
                root, names = mounted / "memory", _VERSION_1
            else:
                continue
            own = root / path.lstrip("/")  # not there where a container sees its own group as the root
            folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
            rooms += [room for folder in folders if (room := _room(folder, *names)) is not None]
    return rooms


def _room(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    """What a group's limit leaves; None without a limit, or without the group."""
    try:
        if (allowed := (folder / limit).read_text().strip()) == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but goes when it has to.
        cache = int(statistics[f"{prefix}inactive_file"]) + int(statistics[f"{prefix}active_file"])
        return int(allowed) - int((folder / usage).read_text()) + cache
    except (OSError, KeyError, ValueError):
        return None
