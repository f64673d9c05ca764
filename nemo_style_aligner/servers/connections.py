"""Connections of a WSGI server, and limits on what one may cost before its request reaches the application.

waitress receives a whole request before a thread works on it, which protects the threads. This module deals with the
rest: clients that send too slowly, that never send or read anything, that open more connections than there are file
descriptors, or that make the server buffer a large body without knowing the secret; and HTTP of which two programs
might think differently. It checks the secret as soon as a request's header is there.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import math
import re
import resource
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.task import WSGITask
from waitress.utilities import Error, RequestEntityTooLarge

from nemo_style_aligner.servers.protocol import JSON_TYPE
from nemo_style_aligner.servers.signing import SIGNATURE_HEADER, Signatures, body_digest, place_of

logger = logging.getLogger(__name__)

_NEW_SECONDS = 0.5
_RESERVED_DESCRIPTORS = 128  # log files, sockets of process groups, checkpoints being written
# Connections of those who have not shown the secret: half of all, but not more than the server's own thread can look
# after beside its work. Each has a moment in which to show it; if all of them are that new, others wait.
_MOST_STRANGERS = 128
_STRANGER_SECONDS = 0.1
_LENGTH_FIELD = re.compile(rb"(?i)\n(?:content-length|transfer-encoding)[ \t]*:([^\r\n]*)")
_TOO_SLOW = {"receiving": "sending a request", "sending": "reading an answer"}  # by what the server did meanwhile
REQUEST_KEY = "nemo_style_aligner.request"  # in the WSGI environment: the `Parser`


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


class RefusedRequest(Error):
    """An error that waitress answers without the application, in the form of the application's errors.

    ``signatures``: of the connection, if the request was signed.
    """

    signatures: Signatures | None = None

    def __init__(self, code: int, reason: str, message: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason
        self._headers = list(headers)

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:
        body = json.dumps({"error": f"{self.reason}: {self.body}"}).encode()
        headers = [("Content-Length", str(len(body))), ("Content-Type", JSON_TYPE), ("Connection", "close")]
        headers += self._headers
        if self.signatures is not None:
            headers.append((SIGNATURE_HEADER, self.signatures.of_answer(self.code, headers, body_digest(body))))
        return f"{self.code} {self.reason}", headers, body


def wrong_signature(has_secret: bool) -> tuple[int, str, str]:
    """Status, reason and message for a request that is not what was signed; without a secret it can only be damaged."""
    message = "the request's signature is wrong: it was damaged on its way, or not made for here and now"
    return (401, "Unauthorized", message) if has_secret else (503, "Service Unavailable", message)


# Takes a request's header fields (names as in WSGI, without HTTP_); returns whether they show the secret.
HeaderCheck = Callable[[Mapping[str, str]], bool]


class Parser(HTTPRequestParser):
    """A request as it is received.

    Attributes:
        channel: its connection.
        is_known: whether it shows the secret, by a signature or as it is; always, if the server has none.
        digest: `body_digest` of its body, as its signature has it; None: it is not signed.
    """

    error: Error | None
    expect_continue: bool
    is_known = False
    digest: str | None = None

    def __init__(self, adj: Any, channel: Channel) -> None:
        super().__init__(adj)
        self.channel = channel

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has come."""
        return bool(self.header_bytes_received)

    def parse_header(self, header_plus: bytes) -> None:
        """Refuse what another program might read differently, and look for the secret."""
        if b"\n " in header_plus or b"\n\t" in header_plus:
            raise ParsingError("a header field is folded over several lines")
        lengths = _LENGTH_FIELD.findall(header_plus)
        if len(lengths) > 1 or b"," in b"".join(lengths):
            raise ParsingError("the length of the body is given more than once (Content-Length, Transfer-Encoding)")
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # more digits than int() takes
            raise ParsingError("Content-Length is invalid") from error
        if "TRANSFER_ENCODING" in self.headers:  # HTTP/1.1's was taken out
            raise ParsingError("Transfer-Encoding needs HTTP/1.1")
        self._look_for_secret()

    def _look_for_secret(self) -> None:
        given, signatures = self.headers.get("X_SIGNATURE"), self.channel.signatures
        if given is None or signatures is None:
            self.is_known = self.channel.shows_token(self.headers)
            if not self.is_known and (signatures is not None or "X_CHALLENGE" not in self.headers):
                self.headers["CONNECTION"] = "close"  # a stranger is answered once, after a proof once more
        else:
            digest = given.partition(" ")[0]
            due = signatures.of_request(self.command, self.request_uri, self.headers.items(), digest)
            self.is_known = hmac.compare_digest(given.encode(), due.encode())
            if not self.is_known:
                self.error = RefusedRequest(*wrong_signature(self.channel.has_secret))
                return
            self.digest = digest
        if self.is_known:
            self.channel.watch.strangers.pop(self.channel, None)

    def received(self, data: bytes) -> int:
        """Take what belongs to this request, and drop what follows it: nobody asks again before the answer."""
        if not self.has_begun:
            rest = data.lstrip(b"\r\n")  # line ends before a request are no request
            if not rest:
                return len(data)
            data, skipped = rest, len(data) - len(rest)
        else:
            skipped = 0
        consumed: int = super().received(data)
        size = max(self.content_length, self.body_bytes_received)
        if self.error is None and size > self.channel.limits.max_body_without_token and not self.is_known:
            self.error = RefusedRequest(
                401, "Unauthorized",
                "a body of this size is read only with the header 'Authorization: Bearer <token of this run>'",
                [("WWW-Authenticate", "Bearer")],
            )  # fmt: skip
        if self.error is not None:
            if not isinstance(self.error, RefusedRequest):
                message = str(self.error.body)
                if isinstance(self.error, RequestEntityTooLarge):
                    message = f"the body is larger than {self.channel.max_body_bytes} bytes"
                self.error = RefusedRequest(self.error.code, self.error.reason, message)
            self.error.signatures = self.channel.signatures if self.digest is not None else None
            self.completed = True
            self.expect_continue = False  # else waitress sends "100 Continue", and reads the body
        if self.completed and data[consumed:].strip(b"\r\n"):
            self.headers["CONNECTION"] = "close"  # the answer says that what follows must be sent again
            consumed = len(data)
        return skipped + consumed


class _Task(WSGITask):
    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        environ[REQUEST_KEY] = self.request
        return environ


class Channel(HTTPChannel):
    """A connection. Made by waitress; `channel_class` gives it the attributes that all connections of a server share.

    Attributes:
        place: the address that its client has reached.
        signatures: of its requests and answers; None if the server has a secret and has not proven it here.
        phase, since: what it is doing (see `ConnectionWatch`), and since when, by the monotonic clock.
        opened: when, by the same clock.
    """

    task_class = _Task
    limits: ConnectionLimits
    max_body_bytes: int
    shows_token: HeaderCheck
    has_secret: bool
    watch: ConnectionWatch

    def __init__(self, server: Any, sock: Any, addr: Any, adj: Any, map: Any = None) -> None:
        self.place = place_of(sock.getsockname())
        self.signatures = None if self.has_secret else Signatures()
        self.phase: tuple[Any, ...] = ()
        self.opened = self.since = time.monotonic()
        self.most_unsent = 0
        self.requests_begun = 0
        super().__init__(server, sock, addr, adj, map=map)
        self.watch.admit(self, server.active_channels.values())

    def del_channel(self, map: Any = None) -> None:
        """Called when it is closed."""
        self.watch.strangers.pop(self, None)
        super().del_channel(map)

    def parser_class(self, adj: Any) -> Parser:
        """A new request's parser."""
        self.requests_begun += 1
        return Parser(adj, self)

    @property
    def is_busy(self) -> bool:
        """Whether a request is received or answered, or the connection is so new that one is likely to come."""
        if self.requests or self.total_outbufs_len or (self.request is not None and self.request.has_begun):
            return True
        return not self.requests_begun and time.monotonic() - self.since < _NEW_SECONDS

    def present_phase(self) -> tuple[tuple[Any, ...], float]:
        """What the connection is doing, which differs from request to request; and for how many seconds it may."""
        limits, number = self.limits, self.requests_begun
        if self.total_outbufs_len:
            self.most_unsent = max(self.total_outbufs_len, self.most_unsent if self.phase[:1] == ("sending",) else 0)
            return ("sending", number), limits.receive_seconds + self.most_unsent / limits.min_bytes_per_second
        if self.requests:
            return ("working", number), math.inf
        if self.request is not None and self.request.has_begun:
            size = self.request.header_bytes_received + self.request.body_bytes_received
            return ("receiving", number), limits.receive_seconds + size / limits.min_bytes_per_second
        number -= self.request is not None  # of which nothing but line ends has come
        return ("idle", number), limits.idle_seconds if number else limits.first_request_seconds


def channel_class(
    shows_token: HeaderCheck, limits: ConnectionLimits, max_body_bytes: int, watch: ConnectionWatch, *, has_secret: bool
) -> type[Channel]:
    """The class of a server's connections."""
    shared = {"limits": limits, "max_body_bytes": max_body_bytes, "watch": watch, "has_secret": has_secret}
    return type("Channel", (Channel,), {**shared, "shows_token": staticmethod(shows_token)})


class ConnectionWatch:
    """Closes connections that exceed the limits. Called from the server's own thread.

    Strangers, who have not shown the secret (have not sent a header, on a server without one), share a part of the
    connections: a new one above that takes the place of the oldest, whatever that is doing. When all connections are in
    use the oldest stranger makes room as well, and if there is none, the connection idle for longest.

    Attributes:
        strangers: in the order of their age; the values are nothing.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._max_strangers = min(max_connections // 2, _MOST_STRANGERS)
        self.strangers: dict[Channel, None] = {}

    def has_room(self) -> bool:
        """Whether one more stranger may come."""
        if len(self.strangers) < self._max_strangers:
            return True
        return time.monotonic() - next(iter(self.strangers)).opened >= _STRANGER_SECONDS

    def admit(self, new: Channel, channels: Collection[Channel]) -> None:
        """Note a new connection, one of ``channels``, and make room for the next."""
        self.strangers[new] = None
        is_full, oldest = len(channels) >= self._max_connections, next(iter(self.strangers))
        is_old = time.monotonic() - oldest.opened >= _STRANGER_SECONDS
        if len(self.strangers) > self._max_strangers or (is_full and is_old):
            oldest.handle_close()
        elif is_full:
            idle = [channel for channel in channels if not channel.is_busy]
            if idle:
                min(idle, key=lambda channel: channel.since).handle_close()

    def sweep(self, channels: Iterable[Channel]) -> None:
        """Close those of ``channels`` that exceed the limits."""
        now = time.monotonic()
        for channel in list(channels):
            phase, seconds = channel.present_phase()
            if phase != channel.phase:
                channel.phase, channel.since = phase, now
            elif now - channel.since > seconds:
                if phase[0] != "idle" and channel not in self.strangers:
                    logger.warning(
                        "cut off %s, which was too slow while it was %s", channel.addr[0], _TOO_SLOW[phase[0]]
                    )
                channel.handle_close()
