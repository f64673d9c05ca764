"""What every HTTP service of the project shares: the secret's check and proof, and a WSGI server in a thread."""

from __future__ import annotations

import collections
import errno
import hmac
import logging
import math
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import waitress
import waitress.wasyncore
from flask import Flask, Response, request

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.parallel.detection import LARGEST_PORT
from nemo_style_aligner.parallel.ending import fail_job
from nemo_style_aligner.servers.connections import (
    ConnectionLimits,
    ConnectionWatch,
    HeaderCheck,
    channel_class,
    is_busy,
)
from nemo_style_aligner.servers.proof import CHALLENGE_HEADER, PROOF_HEADER, prove
from nemo_style_aligner.servers.protocol import JSON_TYPE, ProtocolError
from nemo_style_aligner.servers.request_log import mark_stranger

logger = logging.getLogger(__name__)
# One warning per request that waits for a thread would drown the log; the queues have metrics of their own.
logging.getLogger("waitress.queue").setLevel(logging.ERROR)

_TOKEN_FIELDS = ("AUTHORIZATION", "TRITON_ACCESS_TOKEN")
_SWEEP_SECONDS = 0.5
_RECEIVE_BYTES = 2**18  # at a time: waitress's 8 KiB make large bodies slow
_ANSWER_BYTES = 2**24  # unsent, per connection: a thread that produces more waits for the client
# No temporary files: bodies and answers are held in memory anyway, and on a full disk a request could not be received,
# which would leave the client without an answer.
_TEMPORARY_FILE_BYTES = 2**62
_TOGETHER_BYTES = 2**16  # collected before the server's own thread sends: header and body leave in one packet
_BODY_MARGIN = 2**20  # a body that is little too large is received and left to the application, not cut off midway
_NEVER_SECONDS = 2**31
_QUIET_SECONDS = 0.1  # since the last answer, before the port closes: its client may send a request again at once
_LINGER_SECONDS = 1.0  # limit of that wait, if requests keep coming
_EXHAUSTED = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`, now {limit}) before starting the job",
    errno.ENFILE: "the processes of this machine have reached its limit of open files: raise it (`sysctl fs.file-max`)",
    errno.ENOBUFS: "this machine is short of memory",
    errno.ENOMEM: "this machine is short of memory",
}
_EXHAUSTED_SECONDS = 0.5  # until the next try to accept a connection
_EXHAUSTED_LOG_SECONDS = 60.0
_POLL_SECONDS = 0.1  # how soon `WsgiServer.stop` is noticed; sockets wake the loop at once


def token_check(token: str | None) -> HeaderCheck:
    """A check whether a request's header fields (names as in WSGI, without ``HTTP_``) carry ``token``; None: always.

    The token comes as ``Authorization: Bearer <token>``, or as ``triton-access-token: <token>`` from Triton's clients.
    The comparison takes the same time whatever is wrong.
    """
    if token is None:
        return lambda fields: True
    if not token:
        raise ValueError("the token is empty: give a secret, or None for no authentication")
    expected = token.encode()

    def check(fields: Mapping[str, str]) -> bool:
        scheme, _, given = fields.get("AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            given = fields.get("TRITON_ACCESS_TOKEN", "")
        return hmac.compare_digest(given.encode(), expected)

    return check


def require_token(app: Flask, token: str | None, is_open: Callable[[str], bool]) -> None:
    """Refuse requests without the token (see `token_check`) with 401.

    ``is_open(path)`` says which routes need none (health). Without a token everything is open.
    """
    if token is None:
        return
    has_token = token_check(token)

    def check() -> Response | None:
        fields = {name: request.environ.get(f"HTTP_{name}", "") for name in _TOKEN_FIELDS}
        if has_token(fields):
            return None
        mark_stranger()
        if is_open(request.path):
            return None
        error = ProtocolError(
            401, "authorization is needed: send the header 'Authorization: Bearer <token of this run>'"
        )
        return Response(error.body(), error.status, {"WWW-Authenticate": "Bearer"}, content_type=JSON_TYPE)

    app.before_request(check)


class WsgiServer:
    """A waitress server in a daemon thread. The constructor binds the port and starts the thread.

    ``port`` 0 takes a free one; `port` then tells which. Raises OSError if the address cannot be bound, naming host and
    port, and their config keys if they are from a ``section`` of the config. Large bodies are read only from clients
    that send the ``token`` (the application checks all other requests itself, see `require_token`). To clients that
    ask, the server proves that it knows the token, see `proof`. ``threads`` work on requests; 0, for an application
    that never waits: the server's own thread does, which saves handing requests over.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        threads: int,
        max_body_bytes: int,
        name: str,
        section: str | None = None,
        limits: ConnectionLimits | None = None,
        token: str | None = None,
    ) -> None:
        may_send_body = token_check(token)
        limits = limits or ConnectionLimits()
        connections = limits.connections()
        self._socket = _bind(host, port, name, section)
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        self._map: dict[int, Any] = {}
        self._last_answer = -math.inf
        self._own_thread = None if threads else _OwnThread()

        def noting_answers(environ: Any, start_response: Any) -> Any:
            try:
                return app(environ, _proving(environ, start_response, token, self.port))
            finally:
                self._last_answer = time.monotonic()

        self._server = waitress.create_server(
            noting_answers,
            map=self._map,
            _dispatcher=self._own_thread,
            sockets=[self._socket],
            threads=threads or 1,
            max_request_body_size=max_body_bytes + _BODY_MARGIN,
            connection_limit=connections,
            # waitress's own timeout goes by the wall clock and also ends connections that are sending a request: see
            # `ConnectionWatch`.
            channel_timeout=_NEVER_SECONDS,
            recv_bytes=_RECEIVE_BYTES,
            inbuf_overflow=_TEMPORARY_FILE_BYTES,
            outbuf_overflow=_TEMPORARY_FILE_BYTES,
            # A thread with more to send waits for its client to read. The server's own thread must not.
            outbuf_high_watermark=_ANSWER_BYTES if threads else 2**40,
            asyncore_use_poll=True,
            ident=None,
        )
        if self._own_thread is not None:
            self._server.adj.send_bytes = _TOGETHER_BYTES
            self._server.pull_trigger = lambda: None  # the thread that it would wake is the one that calls it
        self._server.channel_class = channel_class(may_send_body, limits, max_body_bytes)
        _PatientAccept(self._server, name)
        self._watch = ConnectionWatch(limits, connections, may_send_body)
        self._next_sweep = 0.0
        self._stopping = threading.Event()
        self._flush_deadline = 0.0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stop(self, flush_seconds: float = 5.0) -> None:
        """Wait up to ``flush_seconds`` for requests in progress to be answered, stop accepting, close everything."""
        self._flush_deadline = time.monotonic() + flush_seconds
        self._stopping.set()
        self._thread.join(flush_seconds + 10.0)

    def _serve(self) -> None:
        """The thread's body. If it fails, so does the job, whose port would be open without anybody answering."""
        try:
            self._run()
        except Exception as error:
            if not self._stopping.is_set():
                fail_job(error)
            logger.exception("%s: error while stopping", self._thread.name)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._turn(_POLL_SECONDS)
            if time.monotonic() >= self._next_sweep:
                self._watch.sweep(self._server.active_channels.values())
                self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        # Clients that connect while open answers are sent, or just after the last, are still accepted, and told by
        # the application that it is too late: a connection that waits to be accepted when the socket is closed would
        # be cut off without an answer.
        self._flush(self._flush_deadline)
        self._flush(time.monotonic() + _LINGER_SECONDS, _QUIET_SECONDS)
        self._accept_waiting()
        self._server.accepting = False
        self._server.del_channel(self._map)
        self._socket.close()
        self._flush(max(self._flush_deadline, time.monotonic() + _LINGER_SECONDS))
        self._server.task_dispatcher.shutdown(timeout=1)
        waitress.wasyncore.close_all(self._map)

    def _flush(self, deadline: float, quiet_seconds: float = 0.0) -> None:
        """Answer requests until none is open and the last answer is ``quiet_seconds`` ago, or the deadline passes."""
        while (now := time.monotonic()) < deadline and (self._busy() or now - self._last_answer < quiet_seconds):
            self._turn(0.05)

    def _turn(self, timeout: float) -> None:
        """Wait for events of the sockets, at most ``timeout`` seconds, and handle them."""
        waitress.wasyncore.loop(timeout=timeout, map=self._map, use_poll=True, count=1)
        if self._own_thread is not None:
            self._own_thread.work()

    def _accept_waiting(self) -> None:
        before = -1
        while len(self._server.active_channels) != before:
            before = len(self._server.active_channels)
            self._server.handle_accept()

    def _busy(self) -> bool:
        return any(map(is_busy, list(self._server.active_channels.values())))


class _PatientAccept:
    """Makes a waitress server pause when it cannot accept a connection for lack of descriptors or memory.

    waitress itself tries again at once, with a traceback each time, for as long as a connection waits to be accepted:
    it would occupy a core and log megabytes per second. Open connections are served meanwhile.
    """

    def __init__(self, server: Any, name: str) -> None:
        self._server = server
        self._name = name
        self._plain_accept: Callable[[], Any] = server.accept
        self._plain_readable: Callable[[], bool] = server.readable
        self._next_try = -math.inf
        self._next_word = -math.inf
        server.accept, server.readable = self._accept, self._readable

    def _readable(self) -> bool:
        """Whether the loop is to poll for connections that wait to be accepted."""
        return self._plain_readable() and time.monotonic() >= self._next_try

    def _accept(self) -> Any:
        try:
            return self._plain_accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            now = time.monotonic()
            self._next_try = now + _EXHAUSTED_SECONDS
            if now >= self._next_word:
                self._next_word = now + _EXHAUSTED_LOG_SECONDS
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                logger.error(
                    "%s cannot accept connections (%s), %d are open; new ones wait: %s",
                    self._name,
                    error.strerror,
                    len(self._server.active_channels),
                    _EXHAUSTED[error.errno].format(limit=limit),
                )
            return None


class _OwnThread:
    """Replaces waitress's thread pool: requests wait here until the server's own thread works on them."""

    def __init__(self) -> None:
        self._tasks: collections.deque[Any] = collections.deque()

    def add_task(self, task: Any) -> None:
        """Queue a channel with a complete request. It holds a lock of its own here, so it cannot be served yet."""
        self._tasks.append(task)

    def work(self) -> None:
        """Answer all queued requests."""
        while self._tasks:
            channel = self._tasks.popleft()
            channel.service()
            channel.handle_write()

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> None:
        """Cancel the queued requests. The signature is that of waitress's pool."""
        while self._tasks:
            self._tasks.popleft().cancel()


def _proving(environ: Mapping[str, Any], start_response: Any, token: str | None, port: int) -> Any:
    """A ``start_response`` that adds the proof, if the request asks for one, whatever the answer is."""
    challenge = environ.get(f"HTTP_{CHALLENGE_HEADER.upper().replace('-', '_')}")
    proof = None if challenge is None else prove(token, challenge, port)
    if proof is None:
        return start_response

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        return start_response(status, [*headers, (PROOF_HEADER, proof)], exc_info)

    return start


class PlaceTakenError(UserError, OSError):
    """A service cannot listen where it should."""

    def __str__(self) -> str:
        return str(self.strerror)


def _bind(host: str, port: int, name: str, section: str | None) -> socket.socket:
    if host == "localhost":  # clients resolve this name to its IPv4 address, see `http_connection`
        host = "127.0.0.1"
    try:
        if not 0 <= port <= LARGEST_PORT:  # getaddrinfo would take its last 16 bits
            raise OSError(errno.EINVAL, f"ports are numbers up to {LARGEST_PORT}")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EINVAL, "no host name")
        where = f" with {section}.port, or another address of this machine with {section}.host" if section else ""
        raise PlaceTakenError(
            number, f"{name} cannot listen on {host}:{port} ({reason}): choose a free port{where}"
        ) from error
    return listener
