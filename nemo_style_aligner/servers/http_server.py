"""What every HTTP service of the project shares: the secret's check and proof, and a WSGI server in a thread."""

from __future__ import annotations

import collections
import errno
import hmac
import http
import logging
import math
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import waitress.adjustments
import waitress.server
import waitress.task
import waitress.wasyncore
from flask import Flask, Response, request

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.parallel.detection import LARGEST_PORT
from nemo_style_aligner.parallel.ending import fail_job
from nemo_style_aligner.servers.connections import (
    REQUEST_KEY,
    Channel,
    ConnectionLimits,
    ConnectionWatch,
    HeaderCheck,
    Parser,
    channel_class,
    wrong_signature,
)
from nemo_style_aligner.servers.protocol import JSON_TYPE, ProtocolError
from nemo_style_aligner.servers.request_log import mark_stranger
from nemo_style_aligner.servers.signing import PROOF_HEADER, SIGNATURE_HEADER, body_digest, prove

logger = logging.getLogger(__name__)
# One warning per request that waits for a thread would drown the log; the queues have metrics of their own.
logging.getLogger("waitress.queue").setLevel(logging.ERROR)

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
    """Refuse requests that do not show the token, by a signature or as it is (`token_check`), with 401.

    ``is_open(path)`` says which routes need none (health). Without a token everything is open.
    """
    if token is None:
        return

    def check() -> Response | None:
        if request.environ[REQUEST_KEY].is_known:
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
    that show the ``token`` (the application checks all other requests itself, see `require_token`). To clients that
    ask, the server proves that it knows the token, see `signing`; ``known_as`` lists further addresses at which they
    may reach it. ``threads`` work on requests that show the token; 0, for an application that never waits: the server's
    own thread does, which saves handing requests over.
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
        known_as: Collection[str] = (),
    ) -> None:
        limits = limits or ConnectionLimits()
        connections = limits.connections()
        self._socket = _bind(host, port, name, section)
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        self._map: dict[int, Any] = {}
        self._app = _Application(app, token, known_as)
        self._watch = ConnectionWatch(connections)
        self._tasks = _Tasks(threads)
        adjustments = waitress.adjustments.Adjustments(
            sockets=[self._socket],
            max_request_body_size=max_body_bytes + _BODY_MARGIN,
            connection_limit=connections + 3,  # with the listener; `ConnectionWatch` makes room for one more
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
        if not threads:
            adjustments.send_bytes = _TOGETHER_BYTES
        self._server = _Server(self._app, self._map, self._tasks, self._watch, adjustments, self._socket, name)
        self._server.channel_class = channel_class(
            token_check(token), limits, max_body_bytes, self._watch, has_secret=token is not None
        )
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
        except BaseException as error:
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
        self._tasks.shutdown(timeout=1)
        waitress.wasyncore.close_all(self._map)

    def _flush(self, deadline: float, quiet_seconds: float = 0.0) -> None:
        """Answer requests until none is open and the last answer is ``quiet_seconds`` ago, or the deadline passes."""
        while (now := time.monotonic()) < deadline and (self._busy() or now - self._app.last_answer < quiet_seconds):
            self._turn(0.05)

    def _turn(self, timeout: float) -> None:
        """Wait for events of the sockets, at most ``timeout`` seconds, and handle them."""
        timeout = 0.0 if self._tasks.has_strangers else timeout
        waitress.wasyncore.loop(timeout=timeout, map=self._map, use_poll=True, count=1)
        self._tasks.work()

    def _accept_waiting(self) -> None:
        before = -1
        while len(self._server.active_channels) != before:
            before = len(self._server.active_channels)
            self._server.handle_accept()

    def _busy(self) -> bool:
        return any(channel.is_busy for channel in list(self._server.active_channels.values()))


class _Server(waitress.server.TcpWSGIServer):  # type: ignore[misc]
    """A waitress server that pauses when it cannot accept a connection for lack of descriptors or memory.

    waitress itself tries again at once, with a traceback each time, for as long as a connection waits to be accepted:
    it would occupy a core and log megabytes per second. Open connections are served meanwhile.
    """

    def __init__(
        self, app: Any, map: Any, tasks: _Tasks, watch: ConnectionWatch, adj: Any, listener: socket.socket, name: str
    ) -> None:
        self._name = name
        self._watch = watch
        self._next_try = -math.inf
        self._next_word = -math.inf
        self._is_own_thread = not tasks.has_pool
        place = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(app, map, True, listener, dispatcher=tasks, adj=adj, bind_socket=False, sockinfo=place)

    def readable(self) -> bool:
        """Whether the loop is to poll for connections that wait to be accepted."""
        return bool(super().readable()) and time.monotonic() >= self._next_try and self._watch.has_room()

    def pull_trigger(self) -> None:
        """Wake the server's own thread, unless that is the one that calls."""
        if not self._is_own_thread:
            super().pull_trigger()

    def accept(self) -> Any:
        """The next connection, as waitress wants it; None if there is none, or no room for it."""
        try:
            return super().accept()
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
                    len(self.active_channels),
                    _EXHAUSTED[error.errno].format(limit=limit),
                )
            return None


class _Tasks:
    """Who works on which request: takes the place of waitress's thread pool.

    The pool's threads, or the server's own where there is no pool, work on requests that show the secret. All others
    can only be refused, told something open to all, or given a proof: the server's own thread does that, for one in
    each turn, so that no crowd of strangers keeps the others waiting.
    """

    def __init__(self, threads: int) -> None:
        self._pool = waitress.task.ThreadedTaskDispatcher() if threads else None
        if self._pool is not None:
            self._pool.set_thread_count(threads)
        self._known: collections.deque[Channel] = collections.deque()
        self._strangers: collections.deque[Channel] = collections.deque()

    @property
    def has_pool(self) -> bool:
        """Whether there are threads beside the server's own."""
        return self._pool is not None

    @property
    def has_strangers(self) -> bool:
        """Whether requests of strangers wait."""
        return bool(self._strangers)

    def add_task(self, task: Channel) -> None:
        """Queue a channel with a complete request. It holds a lock of its own here, so it cannot be served yet."""
        if not task.requests[0].is_known:
            self._strangers.append(task)
        elif self._pool is not None:
            self._pool.add_task(task)
        else:
            self._known.append(task)

    def work(self) -> None:
        """Answer the queued requests that are the server's own thread's: one stranger's, and all others."""
        while self._known:
            _answer(self._known.popleft())
        if self._strangers:
            _answer(self._strangers.popleft())

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> None:
        """Cancel the queued requests. The signature is that of waitress's pool."""
        for task in (*self._known, *self._strangers):
            task.cancel()
        if self._pool is not None:
            self._pool.shutdown(cancel_pending, timeout)


def _answer(channel: Channel) -> None:
    channel.service()
    if channel.connected:
        channel.handle_write()


class _Application:
    """``app`` as waitress calls it: whatever happens in it, each request gets an answer, signed if the request is.

    Attributes:
        last_answer: when a request was last answered, by the monotonic clock.
    """

    def __init__(self, app: Any, token: str | None, known_as: Collection[str]) -> None:
        self._app = app
        self._token = token
        self._known_as = known_as
        self.last_answer = -math.inf

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        parser: Parser = environ[REQUEST_KEY]
        channel, challenge = parser.channel, environ.get("HTTP_X_CHALLENGE")
        status, fields, body = self._checked_answer(environ, parser)
        if parser.digest is not None and channel.signatures is not None:
            signature = channel.signatures.of_answer(int(status[:3]), fields, body_digest(body))
            fields = [*fields, (SIGNATURE_HEADER, signature)]
        elif challenge is not None and (proof := prove(self._token, challenge, channel.place, self._known_as)):
            fields = [*fields, (PROOF_HEADER, proof[0])]
            channel.signatures = proof[1]
        start_response(status, fields)
        self.last_answer = time.monotonic()
        return [body]

    def _checked_answer(self, environ: dict[str, Any], parser: Parser) -> tuple[str, list[tuple[str, str]], bytes]:
        # The whole body, in memory; read by the application only.
        if parser.digest is not None and body_digest(environ["wsgi.input"].getbuffer()) != parser.digest:
            parser.digest = None  # nothing that was sent can be relied on: the answer is not signed
            status, _, message = wrong_signature(parser.channel.has_secret)
            return _refusal(ProtocolError(status, message))
        answer: list[Any] = []
        try:
            parts = self._app(environ, lambda status, fields, exc_info=None: answer.extend((status, fields)))
            try:
                body = b"".join(parts)
                return answer[0], answer[1], body
            finally:
                getattr(parts, "close", lambda: None)()
        except BaseException as error:  # as a panic in a tokenizer's Rust code, or a user's sys.exit()
            logger.exception("the service failed while it worked on %s %s", parser.command, parser.path)
            return _refusal(ProtocolError(500, f"the service failed: {type(error).__name__}: {error}"))


def _refusal(error: ProtocolError) -> tuple[str, list[tuple[str, str]], bytes]:
    body = error.body()
    name = http.HTTPStatus(error.status).phrase
    return f"{error.status} {name}", [("Content-Type", JSON_TYPE), ("Content-Length", str(len(body)))], body


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
