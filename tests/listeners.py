"""Where processes can be reached: the TCP sockets on which they wait for connections, from /proc."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import sys
from pathlib import Path

_TCP_LISTEN = "0A"
_ANY6 = ipaddress.ip_address("::")


@dataclasses.dataclass(frozen=True)
class Listener:
    """A TCP socket on which a process waits for connections; address 0.0.0.0 is every interface of its node."""

    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Only processes of the same machine reach it."""
        return self.address.startswith("127.")


def listeners(process: int) -> set[Listener]:
    """Where ``process`` can be reached from other processes."""
    folder = Path("/proc") / str(process)
    own = set()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since; also the one that lists the folder
            own.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                found.add(Listener(_ip_address(address), int(port, 16)))
    return found


def _ip_address(text: str) -> str:
    """/proc/net/tcp's form, words of 4 bytes in the machine's order; an IPv4 address in IPv6 as IPv4."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or (ipaddress.ip_address("0.0.0.0") if address == _ANY6 else address)
    return str(address)
