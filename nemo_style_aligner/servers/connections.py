"""Limits on what a connection may cost a WSGI server before its request reaches the application.

waitress receives a whole request before a thread works on it, which protects the threads. This module deals with the
rest: clients that send too slowly, that never send anything, that open more connections than there are file
descriptors, or that make the server buffer a large body without having the token.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.utilities import Error, RequestEntityTooLarge

from nemo_style_aligner.servers.protocol import JSON_TYPE

_NEW_SECONDS = 0.5
_RESERVED_DESCRIPTORS = 128  # log files, sockets of process groups, checkpoints being written


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections. Times in seconds."""

    # For a request to arrive, plus the time that its size takes at the rate below. Also the longest time in which a
    # client reads nothing of its answer.
    receive_seconds: float = 30.0
    min_bytes_per_second: float = 65536.0
    first_request_seconds: float = 30.0  # for a new connection to send anything at all
    idle_seconds: float = 600.0  # between two requests
    max_connections: int = 4096  # at most; fewer where the process may open fewer files
    max_body_without_token: int = 65536  # bytes

    def connections(self) -> int:
        """How many connections can be open at once; `ConnectionWatch` makes room before they are that many."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed == resource.RLIM_INFINITY:
            return self.max_connections
        return max(16, min(self.max_connections, allowed - _RESERVED_DESCRIPTORS))


class RefusedRequest(Error):
    """An error that waitress answers without the application, in the form of the application's errors."""

    def __init__(self, code: int, reason: str, message: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason
        self._headers = list(headers)

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:
        body = json.dumps({"error": f"{self.reason}: {self.body}"}).encode()
        headers = [("Content-Length", str(len(body))), ("Content-Type", JSON_TYPE), ("Connection", "close")]
        return f"{self.code} {self.reason}", [*headers, *self._headers], body


# Takes a request's header fields (names as in WSGI, without HTTP_); returns whether it may send a large body.
HeaderCheck = Callable[[Mapping[str, str]], bool]


def channel_class(may_send_body: HeaderCheck, limits: ConnectionLimits, max_body_bytes: int) -> type[HTTPChannel]:
    """A waitress channel class with errors in JSON, which checks the token before it accepts a large body."""

    class Parser(HTTPRequestParser):
        error: Error | None
        expect_continue: bool

        def parse_header(self, header_plus: bytes) -> None:
            try:
                super().parse_header(header_plus)
            except ValueError as error:  # more digits than int() takes
                raise ParsingError("Content-Length is invalid") from error

        def received(self, data: bytes) -> int:
            consumed: int = super().received(data)
            size = max(self.content_length, self.body_bytes_received)
            if (
                self.error is None
                and self.headers_finished
                and size > limits.max_body_without_token
                and not may_send_body(self.headers)
            ):
                self.error = RefusedRequest(
                    401, "Unauthorized",
                    "a body of this size is read only with the header 'Authorization: Bearer <token of this run>'",
                    [("WWW-Authenticate", "Bearer")],
                )  # fmt: skip
            if self.error is not None:
                if not isinstance(self.error, RefusedRequest):
                    is_large = isinstance(self.error, RequestEntityTooLarge)
                    message = f"the body is larger than {max_body_bytes} bytes" if is_large else str(self.error.body)
                    self.error = RefusedRequest(self.error.code, self.error.reason, message)
                self.completed = True
                self.expect_continue = False  # else waitress sends "100 Continue", and reads the body
            return consumed

    class Channel(HTTPChannel):
        parser_class = Parser

    return Channel


def is_busy(channel: HTTPChannel) -> bool:
    """Whether a request is being received or answered, or the connection is so new that one is likely to come."""
    if channel.requests or channel.total_outbufs_len or channel.request is not None:
        return True
    silent = channel.last_activity <= channel.creation_time
    return bool(silent and time.time() - channel.creation_time < _NEW_SECONDS)


class ConnectionWatch:
    """Closes connections that exceed the limits. Called from the server's own thread.

    When most connections are in use, it makes room for new ones: it closes those idle for longest, then those that
    have been sending a request for longest without showing the token (on a server without a token: without a complete
    header).

    Durations are measured by the monotonic clock, so that setting the wall clock cuts off no upload. Only for idle
    connections, which lose nothing when they are closed, does waitress's ``last_activity`` count, a wall-clock time.
    """

    def __init__(self, limits: ConnectionLimits, max_connections: int, may_send_body: HeaderCheck) -> None:
        self._limits = limits
        self._max_connections = max_connections
        self._may_send_body = may_send_body
        self._receiving: dict[int, tuple[Any, float]] = {}  # by channel id: the unfinished request, since when
        self._unsent: dict[int, tuple[int, float]] = {}  # by channel id: unsent bytes, since when unchanged

    def sweep(self, channels: Iterable[Any]) -> None:
        """Close those of waitress's ``channels`` that exceed the limits, and make room if many are open."""
        now, wall_clock = time.monotonic(), time.time()
        channels = list(channels)
        is_crowded = len(channels) > self._max_connections * 3 // 4
        receiving: dict[int, tuple[Any, float]] = {}
        unsent: dict[int, tuple[int, float]] = {}
        idle: list[Any] = []
        strangers: list[Any] = []
        for channel in channels:
            request = channel.request
            if size := channel.total_outbufs_len:
                known, since = self._unsent.get(id(channel), (size, now))
                unsent[id(channel)] = (size, since if known == size else now)
                if known == size and now - since > self._limits.receive_seconds:
                    channel.handle_close()  # the client reads nothing: the rest can never be sent
                continue
            if channel.requests:
                continue  # its answer is being computed
            if request is not None:
                known, since = self._receiving.get(id(channel), (None, now))
                since = since if known is request else now
                receiving[id(channel)] = (request, since)
                size = request.header_bytes_received + request.body_bytes_received
                if now - since > self._limits.receive_seconds + size / self._limits.min_bytes_per_second:
                    channel.will_close = True
                elif is_crowded and known is request and not self._is_trusted(request):
                    strangers.append(channel)
            else:
                # `last_activity` is later than the creation once anything was received or sent.
                silent = channel.last_activity <= channel.creation_time
                allowed = self._limits.first_request_seconds if silent else self._limits.idle_seconds
                if wall_clock - channel.last_activity > allowed:
                    channel.will_close = True
                else:
                    idle.append(channel)
        self._receiving, self._unsent = receiving, unsent
        if is_crowded:
            excess = len(channels) - self._max_connections // 2
            idle.sort(key=lambda channel: channel.last_activity)
            strangers.sort(key=lambda channel: receiving[id(channel)][1])
            for channel in (*idle, *strangers)[:excess]:
                channel.will_close = True

    def _is_trusted(self, request: HTTPRequestParser) -> bool:
        return request.headers_finished and self._may_send_body(request.headers)
