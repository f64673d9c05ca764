"""Connections of `HttpClient`: they send and receive within limits, notice a dead server, and have it prove itself.

The read timeout of requests holds for each piece of an answer alone: a server that trickles would hold a client up for
ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import socket
import threading
import time
import weakref
from typing import Any

import requests.adapters
import urllib3
import urllib3.connection
import urllib3.exceptions

from nemo_style_aligner.servers.proof import UnprovenServerError, challenge_request, check_proof, unproven

CHUNK_BYTES = 2**16
_MAX_PROOF_BYTES = 2**14  # of the answer whose header holds the proof
# A machine that lost power closes no connection: the kernel probes after a minute of silence and gives up a minute
# later, or when sent data stay unacknowledged for two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 120_000))


def server_url(host: str, port: int) -> str:
    """The URL of a server. An IPv6 address is put in brackets, or its colons would be taken for the port's."""
    is_bare = ":" in host and not host.startswith("[")
    return f"http://[{host}]:{port}" if is_bare else f"http://{host}:{port}"


@dataclasses.dataclass
class TryLimits:
    """Limits of one try: seconds in which the server takes or sends nothing, and the end (monotonic clock)."""

    silence_s: float = math.inf
    deadline: float = math.inf

    def wait_seconds(self) -> float:
        """How long the server may be silent now. Raises TimeoutError once the deadline has passed."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return min(self.silence_s, remaining)


class TooSlowError(urllib3.exceptions.ReadTimeoutError):
    """A limit of `TryLimits` was exceeded."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)  # type: ignore[arg-type]
        self.message = message


class _Socket(socket.socket):
    """Receives within ``limits``: http.client would allow the read timeout for each piece of an answer's head."""

    limits: TryLimits

    def recv_into(self, *args: Any) -> int:
        try:
            self.settimeout(self.limits.wait_seconds())
            return super().recv_into(*args)
        except TimeoutError as error:
            if time.monotonic() < self.limits.deadline:
                raise
            raise TooSlowError("the answer did not come in time") from error


class Peer:
    """The server, for all connections of a client. ``has_proven``: it once proved that it knows the ``secret``."""

    def __init__(self, secret: str | None) -> None:
        self.secret = secret
        self.has_proven = False
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_disconnected = False
        self._lock = threading.Lock()

    def connected(self, connection: socket.socket) -> None:
        """Register a new connection for `disconnect`; if that was called before, the connection ends at once."""
        with self._lock:
            self._sockets.add(connection)
        if self._is_disconnected:
            self.disconnect()

    def disconnect(self) -> None:
        """End all connections, present and future ones: threads that wait for an answer get an error."""
        with self._lock:
            self._is_disconnected = True
            for connection in self._sockets:
                with contextlib.suppress(OSError):  # already closed
                    connection.shutdown(socket.SHUT_RDWR)


class Adapter(requests.adapters.HTTPAdapter):
    """Makes connections that notice a dead peer, send within `TryLimits`, and have the peer prove itself first."""

    def __init__(self, peer: Peer, sending: TryLimits) -> None:
        self._peer = peer
        self._sending = sending
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [
            *urllib3.connection.HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ]
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):  # Linux
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        super().init_poolmanager(*args, socket_options=options, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _pool_class(self._peer, self._sending)}


def _pool_class(peer: Peer, limits: TryLimits) -> type[urllib3.HTTPConnectionPool]:
    class Connection(urllib3.connection.HTTPConnection):
        def connect(self) -> None:
            named = self.host
            self.host = _ipv4_of(named)
            try:
                super().connect()
            finally:
                self.host = named
            self.sock = _Socket(fileno=self.sock.detach())
            self.sock.limits = limits
            peer.connected(self.sock)
            if peer.secret is None:
                return
            try:
                _challenge(self.sock, self.host, self.port, peer.secret, limits)
            except BaseException:
                self.close()  # after some errors urllib3 reads on, and would take what comes for the answer
                raise
            peer.has_proven = True

        def send(self, data: Any) -> None:
            """Send in chunks, each with a timeout: urllib3 would allow the connect timeout for all of ``data``."""
            if self.sock is None:
                self.connect()
            view = memoryview(data)
            try:
                for start in range(0, len(view), CHUNK_BYTES):
                    self.sock.settimeout(limits.wait_seconds())
                    super().send(view[start : start + CHUNK_BYTES])
            except TimeoutError as error:
                raise TooSlowError("the request was taken too slowly") from error

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Connection

    return Pool


def _ipv4_of(host: str) -> str:
    """An IPv4 address of ``host`` if it has one, else ``host``.

    Services listen on IPv4 unless told otherwise. On the IPv6 address of the same machine and port (localhost has both)
    somebody else may listen, and relay the service's proof.
    """
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # the latter: no host can have such a name; connecting says so
        return host


def _challenge(connection: socket.socket, host: str, port: int, secret: str, limits: TryLimits) -> None:
    """Have the peer prove that it knows the secret. Raises `UnprovenServerError`, or urllib3's error for silence."""
    address, challenge, head = server_url(host, port).removeprefix("http://"), secrets.token_hex(16), b""
    try:
        connection.settimeout(limits.wait_seconds())
        connection.sendall(challenge_request(address, challenge))
        while b"\r\n\r\n" not in head and len(head) < _MAX_PROOF_BYTES:
            connection.settimeout(limits.wait_seconds())
            received = connection.recv(_MAX_PROOF_BYTES)
            if not received:
                raise ConnectionResetError("it closed the connection")
            head += received
    except TimeoutError as error:
        raise TooSlowError("the server did not prove in time that it knows the secret") from error
    except OSError as error:
        raise UnprovenServerError(unproven(address, str(error))) from error
    head, _, more = head.partition(b"\r\n\r\n")
    if more:  # our services answer HEAD without a body
        raise UnprovenServerError(unproven(address, "it is another program"))
    check_proof(head, secret, challenge, address, port)
