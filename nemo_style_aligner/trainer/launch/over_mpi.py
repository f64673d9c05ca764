"""Where the ranks of an ``mpirun`` over several machines meet: rank 0 publishes it by MPI, which is not used again.

MPI's own messages are not: they hang where machines have equal addresses, of bridges for containers, say. Names pass
through mpirun's daemons, which have found each other already.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence

import psutil

from nemo_style_aligner.engine.parallel.detection import LOOPBACK, LaunchError
from nemo_style_aligner.engine.parallel.machine import free_port, outgoing_address

Interface = ipaddress.IPv4Interface
"""An address of a machine, with its network."""

_SERVICE = "nemo-style-aligner: rank 0"
_POLL_SECONDS = 0.1
_BY_HAND = "name rank 0's machine in MASTER_ADDR (mpirun -x MASTER_ADDR=HOST)"


def place_to_meet(rank: int, port: int | None, timeout: float) -> tuple[str, int]:
    """Rank 0's address, as this rank reaches it, and its port. Collective over all ranks that mpirun started.

    Args:
        port: what the user has chosen; None: a free one of rank 0's machine.
        timeout: seconds to wait for rank 0.

    Raises:
        LaunchError: mpi4py cannot be used, rank 0 does not come, or no address of rank 0 is in a network of this rank.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise LaunchError(
            "mpirun has started ranks on several machines, which cannot ask it where rank 0 is "
            f"({error}): install mpi4py (pip install 'nemo_style_aligner[mpi]'), or {_BY_HAND}"
        ) from error
    MPI.Init()
    deadline = time.monotonic() + timeout
    if rank == 0:
        MPI.Publish_name(_SERVICE, " ".join([str(port or free_port()), *map(str, own_interfaces())]))
    while True:
        try:
            given, *published = MPI.Lookup_name(_SERVICE).split()
            break
        except MPI.Exception as error:  # not there yet
            if time.monotonic() > deadline:
                raise LaunchError(f"rank 0 has not said within {timeout:.0f} s where it is: {_BY_HAND}") from error
            time.sleep(_POLL_SECONDS)
    MPI.Finalize()
    interfaces = [Interface(interface) for interface in published]
    address = reached(interfaces, own_interfaces())
    if address is None:
        raise LaunchError(
            f"{socket.gethostname()} (rank {rank}) has no route to rank 0, whose addresses are "
            f"{', '.join(published) or 'not known'}: {_BY_HAND}, by a name or address that all machines reach"
        )
    return address, int(given)


def own_interfaces() -> list[Interface]:
    """This machine's IPv4 addresses, loopback aside."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    given = [Interface(f"{e.address}/{e.netmask or 32}") for e in entries if e.family == socket.AF_INET]
    return [interface for interface in given if not interface.is_loopback]


def reached(published: Sequence[Interface], own: Sequence[Interface]) -> str | None:
    """Which of another machine's addresses a machine with addresses of its ``own`` reaches: one of a network in common.

    Else one to which a route leads, and None where there is none. An address that both have is of no use: a bridge for
    containers has the same one on each machine. Ranks on rank 0's own machine have all of its addresses.
    """
    mine = [interface.ip for interface in own]
    if published and all(interface.ip in mine for interface in published):
        return LOOPBACK  # any of its own would do, but says nothing about which of them the other machines reach
    others = [interface for interface in published if interface.ip not in mine]
    near = [interface for interface in others if interface.network in [other.network for other in own]]
    far = (interface for interface in others if outgoing_address(str(interface.ip)))
    found = next(iter(near), None) or next(far, None)
    return None if found is None else str(found.ip)
