"""An HTTP client with bounded waits: each step of a try has a limit, so have all tries, with jittered back-off between.

Each request has an id (``X-Request-Id``), the same in all its tries, which the errors here and the server's log name.
A client with a secret sends its requests only to a server that has proven that it knows the secret: see `signing`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import json
import logging
import math
import random
import socket
import threading
import time
import urllib.parse
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.protocol import LIVE_PATH, decode_error
from nemo_style_aligner.guard.request_log import REQUEST_ID_HEADER
from nemo_style_aligner.guard.signing import (
    CHALLENGE_HEADER,
    PROOF_HEADER,
    SIGNATURE_HEADER,
    Signatures,
    UnprovenServerError,
    body_digest,
    challenge,
    check_proof,
    place_of,
)

logger = logging.getLogger(__name__)

# Answers that say "not now": too many requests, gateway trouble, not ready, timed out.
RETRY_STATUSES = frozenset({429, 502, 503, 504})
# Those of a server that is starting or shutting down.
AWAY_STATUSES = frozenset({502, 503})
# Those of a server that is busy.
_BUSY_STATUSES = frozenset({429, 504})
_FULL_STATUS = 429  # many clients at once: not worth a line in the log as long as the server makes progress
# How long a request is tried before the log mentions it; time between two such lines about the same server.
_SILENT_SECONDS, _LINE_SECONDS = 10.0, 30.0

_CHUNK_BYTES = 2**20
_WORD_SECONDS = 60.0  # of silence, before the log mentions it; then after twice as long
_STATUS_CHARACTERS = 60  # of an answer's status line, in messages
# A machine that lost power closes no connection: the kernel probes after a minute of silence and gives up a minute
# later, or when sent data stay unacknowledged for two minutes.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 120_000))


def server_url(host: str, port: int) -> str:
    """The URL of a server. An IPv6 address is put in brackets, or its colons would be taken for the port's."""
    is_bare = ":" in host and not host.startswith("[")
    return f"http://[{host}]:{port}" if is_bare else f"http://{host}:{port}"


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """How long a request may take, in seconds."""

    # The longest silences of the server in one try: until it takes the connection, has proven itself, takes more of
    # the request, begins to answer (more than answering may take; it limits all these steps), sends more of the answer.
    connect_s: float = 5.0
    proof_s: float = 10.0
    send_s: float = 30.0
    read_s: float = 1260.0
    body_s: float = 60.0
    # Over all tries, but counted from the server's last answer to any request of the same path: slow is not stuck.
    total_s: float = 1800.0
    # How long the server may be away meanwhile (no connection, or one that breaks; starting; shutting down). This time
    # does not count towards total_s. None: it does, and has no limit of its own.
    away_s: float | None = None
    internal_errors: int = 0  # retries after status 500, before the request counts as refused
    too_slow: str = (  # advice in errors, for a server that is up but takes longer
        "give it more ranks, or both sides more time (its infer_timeout_seconds, and timeouts.read_seconds and "
        "total_seconds here)"
    )
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0


class TooSlowError(Exception):
    """The server was silent in a step of a request for longer than the step's limit; the message names it."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request, the same in all its tries. ``what``: how messages name it; ``digest``: `body_digest` of its body."""

    what: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    digest: str


@dataclasses.dataclass(frozen=True)
class HttpAnswer:
    """A complete response. Names of ``headers`` are case-insensitive; ``request``: how errors name its request."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    request: str

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.content)


class Peer:
    """The server, for all connections of a client.

    Attributes:
        secret: that the server must know; None: nothing is proven.
        has_proven: it once has. From then on it must sign its answers, if only as a checksum.
    """

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
                _shut(connection)


class _Socket(socket.socket):
    """Waits for the server for ``silence_s`` at a time, and for ``rest_s`` after what comes first; to the deadline."""

    silence_s: float
    rest_s: float
    deadline: float  # monotonic
    request: str  # for the log

    def wait_for(self, call: Callable[[], int]) -> int:
        """``call()``, which waits for the server once. Long waits are logged. Raises TimeoutError."""
        began, word_s = time.monotonic(), _WORD_SECONDS
        end = min(began + self.silence_s, self.deadline)
        while (now := time.monotonic()) < end:
            self.settimeout(max(min(end, began + word_s) - now, 0.001))
            try:
                return call()
            except TimeoutError:
                if (now := time.monotonic()) < end:
                    waits = self.request, now - began, end - now
                    logger.warning("%s: the server has been silent for %.0f s; %.0f s more are allowed", *waits)
                word_s *= 2
        raise TimeoutError

    def recv_into(self, *args: Any) -> int:
        received = self.wait_for(lambda: super(_Socket, self).recv_into(*args))
        self.silence_s = self.rest_s
        return received


class Connection(http.client.HTTPConnection):
    """A connection that is kept, and opened again when it was lost. For one thread."""

    sock: _Socket | None

    def __init__(self, host: str, port: int, peer: Peer) -> None:
        super().__init__(host, port)
        self._peer = peer
        self._signatures = Signatures()

    def exchange(self, request: Request, limits: ClientLimits, seconds: float) -> HttpAnswer:
        """Send a request and return the answer; it takes ``seconds`` at most, however slowly either of them trickles.

        Raises:
            OSError, HTTPException: there is no connection, or it broke.
            UnprovenServerError: whoever answers does not know the secret, or the answer is not what the server sent.
            TooSlowError: a limit was exceeded.
        """
        began = time.monotonic()
        late = ""

        def begin_step(silence_s: float, trouble: str, rest_s: float | None = None) -> None:
            nonlocal late
            assert self.sock is not None
            late, self.sock.deadline, self.sock.request = trouble, began + seconds, request.what
            self.sock.silence_s = min(silence_s, limits.read_s)
            self.sock.rest_s = self.sock.silence_s if rest_s is None else min(rest_s, limits.read_s)

        try:
            if self.sock is None or _is_stale(self.sock):
                self._open(min(limits.connect_s, seconds))
                begin_step(limits.proof_s, "the server did not prove in time that it knows the secret")
                self._have_proven()
            begin_step(limits.send_s, "the request was taken too slowly")
            self._send(request)
            begin_step(limits.read_s, "the answer did not come in time", limits.body_s)
            with self.getresponse() as response:
                content = _content(response)
            self._check(response, content)
        except TimeoutError as error:
            self.close()
            raise TooSlowError(f"{late} ({time.monotonic() - began:.3g} s)") from error
        except BaseException:
            self.close()
            raise
        return HttpAnswer(response.status, cast(Mapping[str, str], response.headers), content, request.what)

    def _send(self, request: Request) -> None:
        signature = self._signatures.of_request(request.method, request.path, request.headers.items(), request.digest)
        headers = {**request.headers, SIGNATURE_HEADER: signature, "Connection": "keep-alive"}
        with contextlib.suppress(BrokenPipeError):  # it may have answered before it had read everything
            self.request(request.method, request.path, request.body or None, headers)

    def send(self, data: Any) -> None:
        """Send within the limits of the present step. ``data``: bytes, part of a request."""
        connection, view, sent = self.sock, memoryview(data), 0
        assert connection is not None
        while sent < len(view):
            sent += connection.wait_for(functools.partial(connection.send, view[sent : sent + _CHUNK_BYTES]))

    def _open(self, seconds: float) -> None:
        self.close()
        try:
            plain = socket.create_connection((_ipv4_of(self.host), self.port), seconds)
        except TimeoutError as error:
            raise ConnectionError("connecting took too long") from error
        except UnicodeError as error:
            raise ConnectionError(f"no host can have this name: {error}") from error
        self.sock = _Socket(fileno=plain.detach())
        self._peer.connected(self.sock)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):  # Linux
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _have_proven(self) -> None:
        """Have the server prove that it knows the secret, and agree on this connection's signatures."""
        self._signatures = Signatures()
        if self._peer.secret is None:
            return
        assert self.sock is not None
        asked = challenge(place_of(self.sock.getpeername()))
        answer = "nothing"
        try:
            self.request("HEAD", LIVE_PATH, headers={CHALLENGE_HEADER: asked})
            with self.getresponse() as response:
                answer = repr(f"HTTP/1.1 {response.status} {response.reason}"[:_STATUS_CHARACTERS])
                self._signatures = check_proof(response.headers.get(PROOF_HEADER, ""), self._peer.secret, asked)
        except UnprovenServerError as error:
            if error.is_final:
                raise
            raise self._unproven(f"HEAD {LIVE_PATH} was answered {answer}; {error}") from error
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._unproven(f"HEAD {LIVE_PATH} was answered {answer} ({error})") from error
        if self.sock is None:
            raise self._unproven("it closes the connection after its proof")
        self._peer.has_proven = True

    def _unproven(self, reason: str) -> UnprovenServerError:
        address = server_url(self.host, self.port).removeprefix("http://")
        return UnprovenServerError(
            f"the program listening at {address} does not prove that it knows the secret, so the secret is not used "
            f"and nothing is sent: {reason}. It is another program, or a server without authentication: see "
            "remote_critic_rm.token"
        )

    def _check(self, response: http.client.HTTPResponse, content: bytes) -> None:
        """Raise `UnprovenServerError` unless the answer is what the server has sent."""
        given = response.headers.get(SIGNATURE_HEADER)
        if given is None and not self._peer.has_proven:
            return  # another server, and no secret
        if given != self._signatures.of_answer(response.status, response.headers.items(), body_digest(content)):
            raise UnprovenServerError(
                f"the answer ({response.status}: {decode_error(content)}) does not have the server's signature: it or "
                "the request was damaged on its way, or another program answers"
            )
        self._peer.has_proven = True


def _shut(connection: socket.socket) -> None:
    """End a connection, from any thread."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _content(response: http.client.HTTPResponse) -> bytes:
    if response.length is None and not response.chunked:
        # Else a lost connection would look like the end of the header, or of an answer without a length.
        raise ConnectionError("the answer's head is cut off: it does not say how long the answer is")
    chunks = []
    while chunk := response.read1(_CHUNK_BYTES):  # what has arrived; `read` would wait for more
        chunks.append(chunk)
    if response.length:
        raise ConnectionError(f"the answer's last {response.length} bytes are missing")
    return b"".join(chunks)


def _is_stale(connection: socket.socket) -> bool:
    """Whether the server has closed a kept connection, or said something unasked."""
    connection.settimeout(0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _ipv4_of(host: str) -> str:
    """An IPv4 address of ``host`` if it has one, else ``host``.

    Services listen on IPv4 unless told otherwise. On the IPv6 address of the same machine and port (localhost has both)
    somebody else may listen.
    """
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # the latter: no host can have such a name; connecting says so
        return host


class ServerUnavailableError(UserError, RuntimeError):
    """The server gave no usable answer within the limits. The message names server, request and time."""

    exit_status = 1


class RequestRefusedError(UserError, RuntimeError):
    """The server answered with an error that trying again does not cure. ``status`` is the HTTP status."""

    exit_status = 1

    def __init__(self, message: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class _Patience:
    """How long a request may still wait; what a server was away for counts apart, where the limits have it so."""

    def __init__(self, limits: ClientLimits, last_answer: Callable[[], float]) -> None:
        self._limits, self._last_answer = limits, last_answer  # the latter: to any request of this path, monotonic
        self._began = self._counts_from = time.monotonic()
        self._away_since: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the request's first try."""
        return time.monotonic() - self._began

    def note(self, *, is_away: bool) -> None:
        """Record whether the last try found the server away."""
        now = time.monotonic()
        if is_away and self._limits.away_s is not None:
            self._away_since = self._away_since or now
        elif self._away_since is not None:
            self._counts_from += now - self._away_since
            self._away_since = None

    @property
    def for_try(self) -> float:
        """Seconds for the next try."""
        now = time.monotonic()
        away = 0.0 if self._away_since is None else now - self._away_since
        left = max(self._counts_from, self._last_answer()) + away + self._limits.total_s - now
        return min(left, self._limits.total_s)  # `away` may be from before the last answer

    @property
    def left(self) -> float:
        """Seconds until the request is given up, if nothing changes."""
        if self._away_since is not None and self._limits.away_s is not None:
            return self._away_since + self._limits.away_s - time.monotonic()
        return self.for_try

    @property
    def limit(self) -> str:
        """The limit that `left` counts to, in words."""
        if self._away_since is None:
            return f"limit {self._limits.total_s:g} s"
        away = time.monotonic() - self._away_since
        return f"the server was away for {away:.1f} s, limit {self._limits.away_s:g} s"


class HttpClient:
    """Sends requests to one server, safe to use from many threads (each has a connection of its own).

    With a ``token`` the server must prove on each connection that it knows the token, see `signing`. A server that
    gives no proof counts as away: the real one may be about to start. A proof with another secret is an error at once,
    until the server has proven itself for the first time: from then on the client's secret is known to be right, and
    such a server counts as away, too.

    Only for requests that may be repeated: a try whose connection broke is sent again, though the server
    may have seen it.
    """

    def __init__(self, base_url: str, *, token: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._peer = Peer(token)
        self._local = threading.local()
        self._answered: dict[str, float] = {}  # when a request of each path was last answered
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._next_line = -math.inf  # when the next line about waiting may be logged, monotonic

    def request(
        self,
        method: str,
        path: str,
        *,
        limits: ClientLimits,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """Send until the answer has status 200, and return it. Long waits are logged.

        Raises `RequestRefusedError` for an error answer that is not worth repeating and
        `ServerUnavailableError` when ``limits`` are used up or the client was closed.
        """
        request_id = uuid.uuid4().hex[:16]
        what = f"{method} {self.base_url}{path} (request_id={request_id})"
        headers = {**(headers or {}), REQUEST_ID_HEADER: request_id}
        body = body or b""
        request = Request(what, method, path, headers, body, body_digest(body))
        patience = _Patience(limits, lambda: self._answered.get(path, 0.0))
        backoff = limits.first_backoff_s
        tries = internal_errors = 0
        is_busy = is_announced = False
        while True:
            tries += 1
            retry_after, is_full, is_away = 0.0, False, True
            try:
                answer = self._connection().exchange(request, limits, max(patience.for_try, 0.1))
            except TooSlowError as error:
                trouble, is_away = str(error), False
            except (OSError, http.client.HTTPException) as error:
                trouble, is_busy = _reason(error), False
            except UnprovenServerError as error:
                if error.is_final and not self._peer.has_proven:
                    message = f"{what} was not sent because it would be refused (401): {error}"
                    raise RequestRefusedError(message, 401, {}) from error
                trouble, is_busy = str(error), False
            else:
                status = answer.status_code
                if status == 200:
                    self._answered[path] = time.monotonic()
                    if is_announced:
                        logger.warning("%s was answered after %.0f s and %d tries", what, patience.elapsed, tries)
                    return answer
                trouble = f"status {status}: {decode_error(answer.content)}"
                is_away, is_full = status in AWAY_STATUSES, status == _FULL_STATUS
                is_busy = status in _BUSY_STATUSES or (is_busy and status == 500)
                internal_errors += status == 500
                is_borne = status == 500 and internal_errors <= limits.internal_errors
                if status not in RETRY_STATUSES and not is_borne:
                    message = f"{what} was refused after {patience.elapsed:.1f} s with {trouble}"
                    raise RequestRefusedError(message, status, answer.headers)
                if is_borne:
                    logger.warning("%s: %s; sending it again", what, trouble)
                retry_after = _seconds(answer.headers.get("Retry-After"))
            patience.note(is_away=is_away)
            wait = max(retry_after, backoff) * random.uniform(0.5, 1.5)
            is_over = patience.left <= wait
            if is_over or self._closed.wait(wait):
                remedy = "Check that the server is running, and its host and port"
                if is_busy:
                    remedy = f"The server is running, but busy: {limits.too_slow}"
                raise ServerUnavailableError(
                    f"{what}: no answer after {patience.elapsed:.1f} s and {tries} tries "
                    f"({patience.limit if is_over else 'the client was closed'}); last: {trouble}. {remedy}"
                )
            logger.debug("%s: %s; next try in %.2f s", what, trouble, wait)
            if patience.elapsed >= _SILENT_SECONDS and not is_full and self._may_log():
                is_announced = True
                logger.warning(
                    "%s: no answer after %.0f s and %d tries, retrying for at most %.0f s more; last: %s",
                    *(what, patience.elapsed, tries, patience.left, trouble),
                )
            backoff = min(2 * backoff, limits.max_backoff_s)

    def _may_log(self) -> bool:
        """Whether a request may log that it waits: many threads wait for one server, and one line is enough."""
        with self._lock:
            now = time.monotonic()
            is_time = now >= self._next_line
            if is_time:
                self._next_line = now + _LINE_SECONDS
            return is_time

    def close(self) -> None:
        """End all requests, including those that wait for an answer, and close all connections."""
        self._closed.set()
        self._peer.disconnect()

    def _connection(self) -> Connection:
        """This thread's connection."""
        if not hasattr(self._local, "connection"):
            url = urllib.parse.urlsplit(self.base_url)
            self._local.connection = Connection(url.hostname or "", url.port or 80, self._peer)
        connection: Connection = self._local.connection
        return connection


def _reason(error: OSError | http.client.HTTPException) -> str:
    text = str(error) or type(error).__name__
    return "connection refused" if isinstance(error, ConnectionRefusedError) else f"connection failed ({text[:200]})"


def _seconds(text: str | None) -> float:
    """A Retry-After header in seconds (dates, which our servers do not send, count as 0)."""
    return min(float(text), 60.0) if text and text.isascii() and text.isdecimal() else 0.0
