"""An HTTP client with bounded waits: connect, read and total limits, and jittered back-off between tries.

Each request has an id (``X-Request-Id``), the same in all its tries, which the errors here and the server's log name.
A client with a secret sends its requests only to a server that has proven that it knows the secret: see `signing`.
"""

from __future__ import annotations

import http.client
import logging
import math
import random
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.services.http_connection import (
    ClientLimits,
    Connection,
    HttpAnswer,
    Peer,
    Request,
    TooSlowError,
    body_digest,
)
from nemo_style_aligner.services.protocol import decode_error
from nemo_style_aligner.services.request_log import REQUEST_ID_HEADER
from nemo_style_aligner.services.signing import UnprovenServerError

__all__ = ["ClientLimits", "HttpAnswer", "HttpClient", "RequestRefusedError", "ServerUnavailableError"]

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
