"""A WSGI server for the services and the work queue: a thread for each connection, and a limit for each of its steps.

Whoever shows the secret is served as it comes. Strangers cost little: they share a part of the connections, are served
one at a time and once each, and no large body is read from them. HTTP that two programs might read differently is
refused. To clients that ask, the server proves that it knows the secret, and it signs what it answers to them, see
`signing`.

An answer of the type `EVENT_STREAM` is sent part by part, as the application makes it. Strangers, and clients that want
a signature, get it whole.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import email.utils
import errno
import hmac
import http
import io
import ipaddress
import logging
import math
import re
import resource
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from nemo_style_aligner.errors import UserError, end_process
from nemo_style_aligner.guard.protocol import JSON_TYPE, ProtocolError
from nemo_style_aligner.guard.request_log import NOTES_KEY, REQUEST_ID_HEADER, RequestLog, request_id
from nemo_style_aligner.guard.signing import (
    PROOF_HEADER,
    SIGNATURE_HEADER,
    Signatures,
    body_digest,
    place_of,
    prove,
)
from nemo_style_aligner.kinds import LARGEST_PORT

logger = logging.getLogger(__name__)

_TOKEN_FIELDS = ("API_KEY", "X_API_KEY", "TRITON_ACCESS_TOKEN")
_RECEIVE_BYTES, _SEND_BYTES = 2**18, 2**20  # at a time
_MAX_HEAD_BYTES = 2**16
_RESERVED_DESCRIPTORS = 128  # log files, sockets of process groups, checkpoints being written
# Connections of those who have not shown the secret: half of all, and not more than this. Each has a moment in which to
# show it; if all of them are that new, others wait.
_MOST_STRANGERS = 128
_STRANGER_SECONDS = 0.1
_NEW_SECONDS = 0.5  # in which the first request of a connection is likely to come
_POLL_SECONDS = 0.1  # how soon `WsgiServer.stop` is noticed
_QUIET_SECONDS = 0.1  # since the last answer, before the port closes: its client may send a request again at once
_LINGER_SECONDS = 1.0  # limit of that wait, if requests keep coming; and for reading what a refused client still sends
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_SECONDS = 0.5  # until the next try to accept a connection
_EXHAUSTED_LOG_SECONDS = 60.0

_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")  # a WSGI name cannot hold "_" as well
_BARE_LINE_END = re.compile(rb"(?<!\r)\n")
_UNASKED_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")  # extensions are refused
_ONCE = ("CONTENT_LENGTH", "TRANSFER_ENCODING", "HOST")

EVENT_STREAM = "text/event-stream"
CLIENT_IS_THERE_KEY = "nemo_style_aligner.client_is_there"
"""In the WSGI environment: a function without arguments, for the request's thread: whether the client still waits."""

Answer = tuple[str, list[tuple[str, str]], bytes | Iterable[bytes]]
"""Status line, header fields, body; the body of a stream in parts, to be closed."""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections. Times in seconds."""

    # For a request to arrive, or an answer to be read, plus the time that its size takes at the rate below.
    receive_seconds: float = 30.0
    min_bytes_per_second: float = 65536.0
    first_request_seconds: float = 30.0  # for a new connection to send anything at all
    idle_seconds: float = 600.0  # between two requests
    max_connections: int = 4096  # at most; fewer where the process may open fewer files
    max_body_without_token: int = 65536  # bytes

    def connections(self) -> int:
        """How many connections can be open at once."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed == resource.RLIM_INFINITY:
            return self.max_connections
        return max(16, min(self.max_connections, allowed - _RESERVED_DESCRIPTORS))


def token_check(token: str | None) -> Callable[[Mapping[str, str]], bool]:
    """A check whether a request's header fields (see `shown_token`) carry ``token``; None: always.

    The comparison takes the same time whatever is wrong.
    """
    if token is None:
        return lambda fields: True
    if not token:
        raise ValueError("the token is empty: give a secret, or None for no authentication")
    expected = token.encode()
    return lambda fields: hmac.compare_digest(shown_token(fields).encode(), expected)


def shown_token(fields: Mapping[str, str]) -> str:
    """The token in a request's header fields (names as in WSGI, without ``HTTP_``); "" if there is none.

    It comes as ``Authorization: Bearer <token>``, as the password of ``Authorization: Basic`` from browsers, or as
    ``api-key``, ``x-api-key`` or ``triton-access-token: <token>`` from Azure's, Anthropic's and Triton's clients.
    """
    scheme, _, given = fields.get("AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "basic":
        return _password(given)
    if scheme.lower() == "bearer":
        return given
    return next((fields[name] for name in _TOKEN_FIELDS if name in fields), "")


def _password(credentials: str) -> str:
    """The password in the credentials of HTTP's Basic authentication (RFC 7617); "" if they are none."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no text in it
        return ""


class WsgiServer:
    """A WSGI server in daemon threads. The constructor binds the port and starts to accept.

    Args:
        app: the application; whatever it raises, its client gets an answer.
        port: 0 takes a free one; `port` then tells which.
        max_body_bytes: of a request; more is answered 413.
        name: in messages.
        section: of the config that host and port are from, for errors.
        port_key: the config key that the port is from, where only that can be chosen.
        limits: of connections.
        token: the shared secret; who does not show it is answered 401, without reaching the application. None: anybody.
        is_key: tells keys of clients, any of which is shown in place of a token; it should not tell by its time.
        is_open: whether a path needs no token.
        known_as: further addresses at which clients may reach the server.
        allowed_origins: whose pages' scripts may read answers: "https://host:port", or "*" for any.
        error_body: the body of a refusal.

    Raises:
        PlaceTakenError: nothing can listen there.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        max_body_bytes: int,
        name: str,
        section: str | None = None,
        port_key: str | None = None,
        limits: ConnectionLimits | None = None,
        token: str | None = None,
        is_key: Callable[[str], bool] | None = None,
        is_open: Callable[[str], bool] = lambda path: False,
        known_as: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        error_body: Callable[[ProtocolError], bytes] = ProtocolError.body,
    ) -> None:
        self.app, self.error_body = app, error_body
        self.limits = limits or ConnectionLimits()
        self.max_body_bytes = max_body_bytes
        self.token, self.is_open, self.known_as = token, is_open, known_as
        self.shows_token = token_check(token) if is_key is None else lambda fields: is_key(shown_token(fields))
        self.allowed_origins = allowed_origins
        self.log = RequestLog()
        self.stranger_turn = threading.Lock()
        self.last_answer = -math.inf
        self._most = self.limits.connections()
        self._most_strangers = min(self._most // 2, _MOST_STRANGERS)
        self._lock = threading.Lock()
        self._connections: dict[_Connection, None] = {}  # in the order of their age, as the next one
        self._strangers: dict[_Connection, None] = {}
        self._name = name
        self._next_word = -math.inf
        self._listener = _bind(host, port, name, section, port_key)
        self.host: str = host
        self.port: int = self._listener.getsockname()[1]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    def stop(self, flush_seconds: float = 5.0) -> None:
        """Wait up to ``flush_seconds`` for requests in progress to be answered, stop accepting, close everything.

        Clients that connect meanwhile, or just after the last answer, are still told by the application that it is too
        late: a connection that waits to be accepted when the port is closed would be cut off without an answer.
        """
        deadline = time.monotonic() + flush_seconds
        self._flush(deadline)
        self._flush(time.monotonic() + _LINGER_SECONDS, _QUIET_SECONDS)
        self._stopping.set()
        self._thread.join()
        self._flush(max(deadline, time.monotonic() + _LINGER_SECONDS))
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()

    def _flush(self, deadline: float, quiet_seconds: float = 0.0) -> None:
        """Wait until no request is open and the last answer is ``quiet_seconds`` ago, or the deadline passes."""
        while (now := time.monotonic()) < deadline:
            with self._lock:
                is_busy = any(connection.is_busy for connection in self._connections)
            if not is_busy and now - self.last_answer >= quiet_seconds:
                return
            time.sleep(0.01)

    # ---- the accepting thread ---------------------------------------------------------------

    def _run(self) -> None:
        """The thread's body. If it fails, so does the job, whose port would be open without anybody answering."""
        try:
            while not self._stopping.is_set():
                if self._has_room():
                    self._accept()
                else:
                    time.sleep(_STRANGER_SECONDS / 10)
            self._listener.settimeout(0)
            while self._accept():
                pass
        except BaseException as error:
            if not self._stopping.is_set():
                end_process(error)
            logger.exception("%s: error while accepting connections", self._name)
        finally:
            self._listener.close()

    def _has_room(self) -> bool:
        """Whether one more stranger may come."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            is_crowded = len(self._strangers) >= self._most_strangers
        return oldest is None or not is_crowded or oldest.age >= _STRANGER_SECONDS

    def _accept(self) -> bool:
        """Take the next connection; whether there was one. Without descriptors, memory or threads others go on."""
        try:
            accepted, address = self._listener.accept()
        except (TimeoutError, BlockingIOError):
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause(str(error.strerror))
                return False
            if error.errno == errno.ECONNABORTED:  # the client is gone
                return True
            raise
        connection = _Connection(self, accepted, str(address[0]))
        self._make_room(connection)
        try:
            threading.Thread(target=connection.serve, name=f"{self._name}: a connection", daemon=True).start()
        except RuntimeError as error:
            self.forget(connection)
            accepted.close()
            self._pause(str(error))
        return True

    def _make_room(self, new: _Connection) -> None:
        """Note a new connection, and close another one if there are too many.

        A stranger too many takes the place of the oldest, whatever that is doing. When all connections are in use the
        oldest stranger goes as well, and if there is none, the connection idle for longest.
        """
        with self._lock:
            self._connections[new] = self._strangers[new] = None
            oldest = next(iter(self._strangers))
            is_full = len(self._connections) >= self._most
            gone: _Connection | None = None
            is_old = oldest.age >= _STRANGER_SECONDS
            if len(self._strangers) > self._most_strangers or (is_full and is_old):
                gone = oldest
            elif is_full:
                idle = [connection for connection in self._connections if not connection.is_busy]
                gone = min(idle, key=lambda connection: connection.idle_since or math.inf, default=None)
        if gone is not None:
            self.forget(gone)
            gone.cut()

    def _pause(self, reason: str) -> None:
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + _EXHAUSTED_LOG_SECONDS
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "%s cannot accept connections (%s), %d are open; new ones wait: the machine is short of memory, or the "
                "limit of open files (`ulimit -n`, now %d) or of threads (`ulimit -u`) is too low",
                *(self._name, reason, self.num_connections, limit),
            )
        time.sleep(_EXHAUSTED_SECONDS)

    # ---- called by connections --------------------------------------------------------------

    def note_known(self, connection: _Connection) -> None:
        """This one has shown the secret."""
        with self._lock:
            self._strangers.pop(connection, None)

    def forget(self, connection: _Connection) -> None:
        """This one is closed."""
        with self._lock:
            self._connections.pop(connection, None)
            self._strangers.pop(connection, None)


@dataclasses.dataclass
class _Request:
    """A request as far as it has come.

    Attributes:
        fields: of its header; names as in WSGI, without ``HTTP_``.
        is_complete: whether its body has come, too.
        is_known: whether it shows the secret, by a signature or as it is; always, if the server has none.
        digest: `body_digest` of its body, as its signature has it; None: it is not signed.
        is_last: whether the connection ends with its answer.
        is_old: whether it is of HTTP/1.0.
        notes: what the application has to say about it to the log.
    """

    method: str = "?"
    target: str = "?"
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False
    is_known: bool = False
    digest: str | None = None
    is_last: bool = True
    is_old: bool = True
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read_head(self, head: bytes) -> None:
        """Take over what ``head`` says. Raises `ProtocolError` for what another program might read differently."""
        first, *lines = head.split(b"\r\n")
        begin = _REQUEST_LINE.fullmatch(first)
        if begin is None:
            raise ProtocolError(400, "the request line is not that of HTTP/1.1 for a path on this server")
        self.method, self.target = begin[1].decode(), begin[2].decode()
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise ProtocolError(400, "a header field is malformed")
            name, value = field[1].decode().upper().replace("-", "_"), field[2].decode("latin-1").strip(" \t")
            if name in self.fields and name in _ONCE:
                raise ProtocolError(400, f"the header has {field[1].decode()} more than once")
            self.fields[name] = f"{self.fields[name]}, {value}" if name in self.fields else value
        if not re.fullmatch("[0-9]{1,20}", self.fields.get("CONTENT_LENGTH", "0")):
            raise ProtocolError(400, "Content-Length is not a whole number")
        if self.is_chunked and (begin[3] == b"0" or "CONTENT_LENGTH" in self.fields):
            raise ProtocolError(400, "a body comes with its Content-Length or, unless HTTP is 1.0, in chunks")
        if self.fields.get("TRANSFER_ENCODING", "chunked").lower() != "chunked":
            raise ProtocolError(400, "of transfer encodings, 'chunked' alone is read")
        self.is_old = begin[3] == b"0"
        self.is_last = self.is_old or "close" in self.fields.get("CONNECTION", "").lower()

    @property
    def is_chunked(self) -> bool:
        """Whether the body's size shows at its end alone."""
        return "TRANSFER_ENCODING" in self.fields

    @property
    def path(self) -> str:
        """Without the query; as WSGI has it."""
        return urllib.parse.unquote_to_bytes(self.target.partition("?")[0]).decode("latin-1")


class _Connection:
    """One client's connection, served by a thread of its own.

    Attributes:
        idle_since: since when no request is under way, by the monotonic clock; None: one is.
    """

    def __init__(self, server: WsgiServer, connection: socket.socket, client: str) -> None:
        self._client = client
        self.idle_since: float | None = time.monotonic()
        self._opened = time.monotonic()
        self._server = server
        self._socket = connection
        self._place = ""  # the address that the client has reached
        # Of its requests and answers; None if the server has a secret and has not proven it here.
        self._signatures = None if server.token is not None else Signatures()
        self._num_requests = 0
        self._buffer = b""  # received, and not part of a request yet
        self._doing = ""  # what the client is to do in the present step
        self._deadline = 0.0

    @property
    def age(self) -> float:
        """In seconds."""
        return time.monotonic() - self._opened

    @property
    def is_busy(self) -> bool:
        """Whether a request is received or answered, or the connection is so new that one is likely to come."""
        return self.idle_since is None or (not self._num_requests and self.age < _NEW_SECONDS)

    def cut(self) -> None:
        """End it, from any thread."""
        with contextlib.suppress(OSError):  # the client was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """The thread's body: a request and its answer, again and again, until an end closes or exceeds a limit."""
        request = _Request()
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._place = place_of(self._socket.getsockname())
            while True:
                request = _Request()
                self._serve(request)
                if request.is_last:
                    return
        except TimeoutError:
            if request.is_known and self._doing:
                logger.warning("cut off %s, which was too slow while it was %s", self._client, self._doing)
        except OSError:
            pass  # the client is gone
        finally:
            self._server.forget(self)
            self._socket.close()

    def _serve(self, request: _Request) -> None:
        self._wait_for_request()
        started = time.monotonic()
        try:
            request.read_head(self._receive_head())
            self._look_for_secret(request)
            self._receive_body(request)
            status, fields, body = self._answer(request)
        except ProtocolError as error:
            request.notes["error"] = error.message
            request.is_last = True
            status, fields, body = self._refusal(error)
        name = request.notes.pop("request_id", None) or request_id(request.fields.get("X_REQUEST_ID", ""))
        details = {"request_id": name, "method": request.method, "path": request.path, "status": int(status[:3])}
        fields = [*fields, (REQUEST_ID_HEADER, name)]
        try:
            if not isinstance(body, bytes):
                self._send_stream(request, status, fields, body)
        finally:
            details |= {"ms": round(1000 * (time.monotonic() - started), 1), "client": self._client, **request.notes}
            self._server.log.answered(details, is_known=request.is_known, is_handshake=_is_handshake(request, status))
        if isinstance(body, bytes):
            self._send_answer(request, status, fields, body)
        if not request.is_complete:
            self._linger()

    # ---- receiving --------------------------------------------------------------------------

    def _begin_step(self, doing: str, seconds: float) -> None:
        self._doing, self._deadline = doing, time.monotonic() + seconds

    def _wait_at_most(self) -> None:
        """Let the next call of the socket wait until the step's deadline. Raises TimeoutError if that is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _receive(self) -> bytes:
        self._wait_at_most()
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("closed by the client")
        if self._doing:
            self._deadline += len(data) / self._server.limits.min_bytes_per_second
        return data

    def _begin_receiving(self, so_far: int) -> None:
        limits = self._server.limits
        self._begin_step("sending a request", limits.receive_seconds + so_far / limits.min_bytes_per_second)

    def _wait_for_request(self) -> None:
        """Wait until a request begins, whose first bytes are in the buffer then."""
        limits = self._server.limits
        self.idle_since = time.monotonic()
        self._begin_step("", limits.idle_seconds if self._num_requests else limits.first_request_seconds)
        while not self._buffer:
            self._buffer = self._receive().lstrip(b"\r\n")  # line ends before a request are no request
        self.idle_since = None
        self._num_requests += 1

    def _receive_head(self) -> bytes:
        """The request's header, without the empty line at its end; what has come of its body is in the buffer then."""
        self._begin_receiving(len(self._buffer))
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if len(head) > _MAX_HEAD_BYTES:
                raise ProtocolError(431, f"the header is larger than {_MAX_HEAD_BYTES} bytes")
            if end:
                self._buffer = rest
                return head
            if _BARE_LINE_END.search(head):
                raise ProtocolError(400, "a line of the header does not end with CR LF")
            self._buffer += self._receive()

    def _look_for_secret(self, request: _Request) -> None:
        """Raises `ProtocolError` if the request is not what was signed."""
        given, signatures = request.fields.get("X_SIGNATURE"), self._signatures
        if given is None or signatures is None:
            request.is_known = self._server.shows_token(request.fields)
            if not request.is_known and (signatures is not None or "X_CHALLENGE" not in request.fields):
                request.is_last = True  # a stranger is answered once, after a proof once more
        else:
            digest = given.partition(" ")[0]
            due = signatures.of_request(request.method, request.target, request.fields.items(), digest)
            if not hmac.compare_digest(given.encode(), due.encode()):
                raise self._wrong_signature()
            request.is_known, request.digest = True, digest
        if request.is_known:
            self._server.note_known(self)

    def _wrong_signature(self) -> ProtocolError:
        message = "the request's signature is wrong: it was damaged on its way, or not made for here and now"
        return ProtocolError(503 if self._server.token is None else 401, message)  # without a secret: only damaged

    def _receive_body(self, request: _Request) -> None:
        """Receive what belongs to the request, and drop what follows it: nobody asks again before the answer."""
        size = int(request.fields.get("CONTENT_LENGTH", 0))
        self._check_size(request, size)
        if "CONTENT_ENCODING" in request.fields:
            raise ProtocolError(415, "a body with a Content-Encoding is not read: send it as it is")
        is_awaited = len(self._buffer) < max(size, request.is_chunked)
        if is_awaited and request.fields.get("EXPECT", "").lower() == "100-continue":
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._begin_receiving(0)
        if request.is_chunked:
            size = self._unchunk(request)
        parts, missing = [self._buffer], size - len(self._buffer)
        while missing > 0:
            parts.append(self._receive())
            missing -= len(parts[-1])
        received = b"".join(parts)
        request.body, self._buffer, request.is_complete = received[:size], b"", True
        if received[size:].strip(b"\r\n"):
            request.is_last = True  # the answer says that what follows must be sent again
        if request.digest is not None and body_digest(request.body) != request.digest:
            request.digest = None  # nothing that was sent can be relied on: the answer is not signed
            raise self._wrong_signature()

    def _check_size(self, request: _Request, size: int) -> None:
        if not request.is_known and size > self._server.limits.max_body_without_token:
            raise _without_token("a body of this size is read only with")
        if size > self._server.max_body_bytes:
            raise ProtocolError(413, f"the body is larger than {self._server.max_body_bytes} bytes")

    def _unchunk(self, request: _Request) -> int:
        """Put a body that comes in chunks into the buffer, in front of what follows it; its size."""
        chunks, body = _Chunks(self._buffer, self._receive), bytearray()
        while size := chunks.next_size():
            self._check_size(request, len(body) + size)
            body += chunks.take(size)
            chunks.end_line()
        chunks.end_line()
        self._buffer = bytes(body) + chunks.rest
        del request.fields["TRANSFER_ENCODING"]  # the application gets it as it would without
        request.fields["CONTENT_LENGTH"] = str(len(body))
        return len(body)

    # ---- answering --------------------------------------------------------------------------

    def _answer(self, request: _Request) -> Answer:
        """The application's answer, or 500: whatever happens in it, each request gets one."""
        if request.method == "OPTIONS" and self._may_read(request):
            wanted = request.fields.get("ACCESS_CONTROL_REQUEST_HEADERS", "")
            allowed = {"Allow-Methods": "GET, POST", "Allow-Headers": wanted, "Max-Age": "600"}
            return "204 No Content", [(f"Access-Control-{name}", value) for name, value in allowed.items()], b""
        if not request.is_known and not self._server.is_open(request.path):
            raise _without_token("authorization is needed: send")
        server, name = self._server, re.sub(r":\d*$", "", request.fields.get("HOST", "")).strip("[]")
        own = _address(server.host)
        if server.token is None and own is not None and own.is_loopback and name and _address(name) is None:
            # A page of another site may have a name that leads here ("DNS rebinding"), but none of these.
            raise ProtocolError(403, f"without a secret, localhost and addresses are answered, not {name[:100]}")
        if not self._may_read(request):
            _refuse_other_sites(request)
        answer: list[Any] = []
        try:
            # Strangers wait for each other, so that no crowd of them keeps the others waiting.
            with contextlib.nullcontext() if request.is_known else self._server.stranger_turn:
                parts = self._server.app(
                    self._environment(request), lambda status, fields, exc_info=None: answer.extend((status, fields))
                )
            if _is_stream(request, answer):
                return answer[0], answer[1], parts
            try:
                return answer[0], answer[1], b"".join(parts)
            finally:
                _close(parts)
        except BaseException as error:  # as a panic in a tokenizer's Rust code, or a user's sys.exit()
            logger.exception("the service failed while it worked on %s %s", request.method, request.path)
            return self._refusal(ProtocolError(500, f"the service failed: {type(error).__name__}: {error}"))

    def _may_read(self, request: _Request) -> bool:
        """Whether the request is of a page that may read answers."""
        origin, allowed = request.fields.get("ORIGIN"), self._server.allowed_origins
        return origin is not None and (origin in allowed or "*" in allowed)

    def _refusal(self, error: ProtocolError) -> tuple[str, list[tuple[str, str]], bytes]:
        status = f"{error.status} {http.HTTPStatus(error.status).phrase}"
        return status, [("Content-Type", JSON_TYPE), *error.headers.items()], self._server.error_body(error)

    def _client_is_there(self) -> bool:
        """Whether the client still waits for the answer, as far as is known; also if it has sent something more."""
        self._socket.settimeout(0)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _environment(self, request: _Request) -> dict[str, Any]:
        fields = dict(request.fields)
        own = {name: fields.pop(name) for name in ("CONTENT_LENGTH", "CONTENT_TYPE") if name in fields}
        return own | {
            "REQUEST_METHOD": request.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.target.partition("?")[2],
            "SERVER_NAME": self._server.host,
            "SERVER_PORT": str(self._server.port),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": self._client,
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(request.body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
            NOTES_KEY: request.notes,
            CLIENT_IS_THERE_KEY: self._client_is_there,
            **{f"HTTP_{name}": value for name, value in fields.items()},
        }

    def _send_answer(self, request: _Request, status: str, fields: list[tuple[str, str]], body: bytes) -> None:
        if not any(name.lower() == "content-length" for name, _ in fields):
            fields.append(("Content-Length", str(len(body))))
        if request.method == "HEAD":
            body = b""
        challenge = request.fields.get("X_CHALLENGE")
        if request.digest is not None and self._signatures is not None:
            signature = self._signatures.of_answer(int(status[:3]), fields, body_digest(body))
            fields.append((SIGNATURE_HEADER, signature))
        elif challenge is not None and (
            proof := prove(self._server.token, challenge, self._place, self._server.known_as)
        ):
            fields.append((PROOF_HEADER, proof[0]))
            self._signatures = proof[1]
        self._send(self._head(request, status, fields) + body)

    def _head(self, request: _Request, status: str, fields: list[tuple[str, str]]) -> bytes:
        if self._may_read(request):
            fields += [("Access-Control-Allow-Origin", request.fields["ORIGIN"]), ("Vary", "Origin")]
        fields.append(("Date", email.utils.formatdate(usegmt=True)))
        fields.append(("Connection", "close" if request.is_last else "keep-alive"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        self._server.last_answer = time.monotonic()
        return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1")

    def _send_stream(
        self, request: _Request, status: str, fields: list[tuple[str, str]], parts: Iterable[bytes]
    ) -> None:
        """Send what the application makes. An answer that breaks off has no last chunk: its client notices."""
        if not request.is_old:  # else it ends with the connection
            fields.append(("Transfer-Encoding", "chunked"))
        try:
            self._send(self._head(request, status, fields))
            for part in _unless_it_fails(parts, request.path) if request.method != "HEAD" else ():
                self._send(part if request.is_old else b"%x\r\n%s\r\n" % (len(part), part))
            if not request.is_old and request.method != "HEAD":
                self._send(b"0\r\n\r\n")
        finally:
            _close(parts)
        self._server.last_answer = time.monotonic()

    def _send(self, data: bytes) -> None:
        limits = self._server.limits
        self._begin_step("reading an answer", limits.receive_seconds + len(data) / limits.min_bytes_per_second)
        view, sent = memoryview(data), 0
        while sent < len(data):
            self._wait_at_most()
            sent += self._socket.send(view[sent : sent + _SEND_BYTES])

    def _linger(self) -> None:
        """Read on for a moment: if this end closed while the client sends, its system would drop the answer."""
        self._socket.shutdown(socket.SHUT_WR)
        self._begin_step("", _LINGER_SECONDS)
        while True:
            self._receive()


class _Chunks:
    """Takes apart a body of "Transfer-Encoding: chunked".

    Args:
        buffer: what of it has come.
        receive: returns more of it.
    """

    def __init__(self, buffer: bytes, receive: Callable[[], bytes]) -> None:
        self._buffer, self._at, self._receive = buffer, 0, receive

    @property
    def rest(self) -> bytes:
        """What has come, and is not taken yet."""
        return self._buffer[self._at :]

    def take(self, size: int) -> bytes:
        """The next bytes, as many as this."""
        parts, missing = [self._buffer[self._at : self._at + size]], size - (len(self._buffer) - self._at)
        self._at += size
        while missing > 0:
            self._buffer, self._at = self._receive(), missing
            parts.append(self._buffer[:missing])
            missing -= len(self._buffer)
        return b"".join(parts)

    def next_size(self) -> int:
        """The size of the next chunk, from the line before it; 0 after the last. Raises `ProtocolError`."""
        line = b""
        while not line.endswith(b"\r\n") and len(line) < 10:
            line += self.take(1)
        if (size := _CHUNK_SIZE.fullmatch(line[:-2])) is None or not line.endswith(b"\r\n"):
            raise ProtocolError(400, "the size of a chunk is not a hexadecimal number on a line of its own")
        return int(size[0], 16)

    def end_line(self) -> None:
        """Take the end of a line. Raises `ProtocolError`."""
        if self.take(2) != b"\r\n":
            raise ProtocolError(400, "a chunk is not of the size that is said, or fields follow the last")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, or ``localhost``; None of names that anybody may give to a machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    return None


def _refuse_other_sites(request: _Request) -> None:
    """Raise `ProtocolError` for what a page of another site asks, for which browsers show their user's password, too.

    Following a link is the user's doing. What asks for something to be done must also be of a type that such pages
    cannot send unasked.
    """
    site, origin = request.fields.get("SEC_FETCH_SITE"), request.fields.get("ORIGIN")
    is_link = request.method == "GET" and request.fields.get("SEC_FETCH_MODE") == "navigate" and origin is None
    if site is None and origin is not None:  # of an older browser, or one that does not trust this address
        site = "same-origin" if origin.partition("://")[2] == request.fields.get("HOST") else "cross-site"
    if site not in (None, "none", "same-origin") and not is_link:
        raise ProtocolError(403, f"pages of other sites are not answered, such as {(origin or site)[:100]}")
    kind = request.fields.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind in _UNASKED_TYPES:
        raise ProtocolError(
            415, f"a body of the type {kind} is not read: send 'Content-Type: {JSON_TYPE}', or what it is"
        )


def _without_token(what: str) -> ProtocolError:
    message = f"{what} the header 'Authorization: Bearer <this server's secret or key>'"
    # The scheme for browsers alone: Chromium asks nobody for a password where another stands in the same field.
    return ProtocolError(401, message, {"WWW-Authenticate": 'Basic realm="nemo_style_aligner"'})


def _is_handshake(request: _Request, status: str) -> bool:
    """Whether a browser has learnt that there is a password to ask its user for."""
    fields = request.fields
    return status.startswith("401") and "AUTHORIZATION" not in fields and "text/html" in fields.get("ACCEPT", "")


def _is_stream(request: _Request, answer: list[Any]) -> bool:
    """Whether what the application has begun to say is sent in parts."""
    wants_signature = request.digest is not None or "X_CHALLENGE" in request.fields
    kind = next((value for name, value in answer[1] if name.lower() == "content-type"), "") if answer else ""
    return kind.startswith(EVENT_STREAM) and request.is_known and not wants_signature


def _unless_it_fails(parts: Iterable[bytes], path: str) -> Iterator[bytes]:
    """The parts that are not empty. Raises ConnectionError after an error of the application, which is logged."""
    try:
        yield from filter(None, parts)
    except Exception as error:
        logger.exception("the service failed in the middle of its answer to %s", path)
        raise ConnectionError("the answer breaks off") from error


def _close(parts: Iterable[bytes]) -> None:
    getattr(parts, "close", lambda: None)()


class PlaceTakenError(UserError, OSError):
    """A service cannot listen where it should."""

    def __str__(self) -> str:
        return str(self.strerror)


def require_free(host: str, port: int, name: str, section: str | None = None, port_key: str | None = None) -> None:
    """Find out whether a `WsgiServer` could listen there, before what takes long.

    Raises:
        PlaceTakenError: it could not.
    """
    _bind(host, port, name, section, port_key).close()


def _bind(host: str, port: int, name: str, section: str | None, port_key: str | None) -> socket.socket:
    if host == "localhost":  # clients resolve this name to its IPv4 address, see `http_client`
        host = "127.0.0.1"
    try:
        if not 0 <= port <= LARGEST_PORT:  # getaddrinfo would take its last 16 bits
            raise OSError(errno.EINVAL, f"ports are numbers up to {LARGEST_PORT}")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(_POLL_SECONDS)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EINVAL, "no host name")
        where = f" with {section}.port, or another address of this machine with {section}.host" if section else ""
        where = f" with {port_key}" if port_key else where
        raise PlaceTakenError(
            number, f"{name} cannot listen on {host}:{port} ({reason}): choose a free port{where}"
        ) from error
    return listener
