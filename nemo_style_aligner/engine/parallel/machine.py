"""Facts about the machine this process runs on: cores, memory, addresses, free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from nemo_style_aligner.engine.parallel.detection import LaunchError

_SERVER_PORTS = range(10000, 32000)
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's
# Of memory control groups: the files of the limit and the usage, and the prefix of statistics that include subgroups.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = ("memory.max", "memory.current", "")
_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, within its control group's quota. At least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_quotas()]))


def machine_cores() -> int:
    """Cores that the processes of this control group may use together, however each of them is bound. At least 1."""
    return max(1, min([os.cpu_count() or 1, *_cgroup_quotas(), *_cgroup_cpusets()]))


def raise_limit_of_open_files() -> None:
    """Raise this process's limit of open files and sockets to its hard limit.

    Shells often allow 1,024, which the sockets between the ranks of a large job exceed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit beyond what the kernel takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping, within the limits of our control groups."""
    return max(0, min([int(psutil.virtual_memory().available), *_cgroup_rooms()]))


def computes_in_bf16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether the processor has bf16 arithmetic, which torch emulates elsewhere. False where nothing is known of it."""
    return not _BF16_FEATURES.isdisjoint(processor_features(cpu_info))


def processor_features(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """The processor's features by Linux's names; none where nothing is known of it."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    features = next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(features.split())


def processor_model() -> str:
    """The processor's name, family and stepping, as far as Linux tells."""
    wanted = ("vendor_id", "cpu family", "model", "stepping")  # "model name" begins with "model"
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(wanted))


def free_port() -> int:
    """A TCP port that nothing listens on now. Another process may take it before the caller does.

    Ports that the system gives to outgoing connections (32768 and up on Linux) are the last resort: any such connection
    could take one.
    """
    for port in [*random.SystemRandom().sample(_SERVER_PORTS, 100), 0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free TCP port")


def is_on_one_machine() -> bool:
    """Whether all ranks of this job are on this machine, by the environment that `launch.initialize` sets."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def ranks_on_this_machine() -> int:
    """How many of this job's ranks this machine has, by the environment that `launch.initialize` sets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_address() -> str:
    """The address under which other machines reach this one: gloo's, so that there is one to get right.

    That of the interface in ``GLOO_SOCKET_IFNAME``, which `launch.initialize` sets, else that of the default route.

    Raises:
        LaunchError: there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if address := _address_of_interface(interface) or outgoing_address():
        return address
    raise LaunchError(
        f"{socket.gethostname()} has no default route: set GLOO_SOCKET_IFNAME to the network interface that other "
        "machines reach, or an address in trainer.ppo.batch_iterator.host"
    )


def outgoing_address(target: str = "10.255.255.255") -> str | None:
    """This machine's address on the route to ``target`` (default: the default route); None if no route leads away."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: a datagram socket only looks up the route
                return _unless_loopback(probe.getsockname()[0])
    return None


def _address_of_interface(name: str) -> str | None:
    entries = psutil.net_if_addrs().get(name, [])
    found = [e.address for family in (socket.AF_INET, socket.AF_INET6) for e in entries if e.family == family]
    return _unless_loopback(found[0]) if found else None


def _unless_loopback(address: str) -> str | None:
    return None if ipaddress.ip_address(address).is_loopback else address


def interface_of(address: str) -> str | None:
    """The network interface that has ``address``, one of this machine's; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return name
    return None


def _cgroup_quotas(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> list[int]:
    """Whole cores, at least 1, of each of our control groups with a CPU quota: our own and all above it."""
    quotas = []
    for folder, is_version_2 in _own_groups("cpu", groups, mounted):
        with contextlib.suppress(OSError, ValueError):
            if is_version_2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                quotas.append(max(1, int(quota) // int(period)))
    return quotas


def _cgroup_cpusets(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> list[int]:
    """Cores of each of our control groups that has a set of them."""
    sizes = []
    for folder, is_version_2 in _own_groups("cpuset", groups, mounted):
        with contextlib.suppress(OSError, ValueError):
            name = "cpuset.cpus.effective" if is_version_2 else "cpuset.effective_cpus"
            ranges = [part.split("-") for part in (folder / name).read_text().strip().split(",")]  # 0-3,8
            sizes.append(sum(int(bounds[-1]) - int(bounds[0]) + 1 for bounds in ranges))
    return sizes


def _cgroup_rooms(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> list[int]:
    """Bytes that each of our memory control groups with a limit has left: our own and all above it."""
    found = _own_groups("memory", groups, mounted)
    rooms = [_room(folder, *(_VERSION_2 if is_version_2 else _VERSION_1)) for folder, is_version_2 in found]
    return [room for room in rooms if room is not None]


def _own_groups(controller: str, groups: Path, mounted: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's groups with a controller, from our own upwards, and whether they are of version 2."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0"
        if not is_version_2 and controller not in controllers.split(","):
            continue
        root = mounted if is_version_2 else mounted / controller
        own = root / path.lstrip("/")  # not there where a container sees its own group as the root
        yield from ((folder, is_version_2) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _room(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    """Bytes that a group's limit leaves; None without a limit, or without the group."""
    try:
        if (allowed := (folder / limit).read_text().strip()) == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but is freed when memory is short.
        cache = int(statistics[f"{prefix}inactive_file"]) + int(statistics[f"{prefix}active_file"])
        return int(allowed) - int((folder / usage).read_text()) + cache
    except (OSError, KeyError, ValueError):
        return None
