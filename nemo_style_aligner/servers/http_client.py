"""An HTTP client with bounded waits: connect, read and total limits, and jittered back-off between tries."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping

import requests

logger = logging.getLogger(__name__)

# Answers that say "not now": too many requests, gateway trouble, not ready, outwaited its limit.
RETRY_STATUSES = frozenset({429, 502, 503, 504})


class ServerUnavailableError(RuntimeError):
    """The server gave no usable answer within the total limit. The message names server, request and time."""


class RequestRefusedError(RuntimeError):
    """The server answered with an error that trying again does not cure. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """How long a request may take, in seconds."""

    connect_s: float = 5.0
    read_s: float = 660.0  # silence of the server in one try: more than the time it may take to answer
    total_s: float = 1800.0  # over all tries
    first_backoff_s: float = 0.1
    max_backoff_s: float = 10.0


class HttpClient:
    """Sends requests to one server, safe to use from many threads (each has its own keep-alive session).

    Only for requests that may be repeated: a try whose connection broke is sent again, though the server
    may have seen it.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, error_text: Callable[[bytes], str] | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._error_text = error_text or (lambda body: body[:200].decode("utf-8", "replace"))
        self._local = threading.local()
        self._sessions: list[requests.Session] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def request(
        self,
        method: str,
        path: str,
        *,
        limits: ClientLimits,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Send until there is an answer; returns a 200 response.

        Raises `RequestRefusedError` for an error answer that is not worth repeating and
        `ServerUnavailableError` when ``limits.total_s`` is used up or the client was closed.
        """
        what = f"{method} {self.base_url}{path}"
        started = time.monotonic()
        backoff = limits.first_backoff_s
        tries = 0
        while True:
            tries += 1
            remaining = limits.total_s - (time.monotonic() - started)
            retry_after = 0.0
            try:
                response = self._session().request(
                    method,
                    self.base_url + path,
                    data=body,
                    headers=headers,
                    timeout=(min(limits.connect_s, max(remaining, 0.1)), min(limits.read_s, max(remaining, 0.1))),
                    allow_redirects=False,
                )
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
                trouble = _reason(error)
            else:
                if response.status_code == 200:
                    return response
                text = self._error_text(response.content)
                trouble = f"status {response.status_code}: {text}"
                if response.status_code not in RETRY_STATUSES:
                    elapsed = time.monotonic() - started
                    raise RequestRefusedError(
                        f"{what} was refused after {elapsed:.1f} s with {trouble}",
                        response.status_code,
                        response.headers,
                    )
                retry_after = _seconds(response.headers.get("Retry-After"))
            wait = max(retry_after, backoff) * random.uniform(0.5, 1.5)
            elapsed = time.monotonic() - started
            if elapsed + wait >= limits.total_s or self._closed.wait(wait):
                why = "the client was closed" if self._closed.is_set() else f"limit {limits.total_s:g} s"
                raise ServerUnavailableError(
                    f"{what}: no answer after {elapsed:.1f} s and {tries} tries ({why}); last: {trouble}. "
                    "Check that the server runs, and its host and port"
                )
            logger.debug("%s: %s; next try in %.2f s", what, trouble, wait)
            backoff = min(2 * backoff, limits.max_backoff_s)

    def close(self) -> None:
        """End waiting for another try, and close all connections."""
        self._closed.set()
        with self._lock:
            sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    def _session(self) -> requests.Session:
        session = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            session.trust_env = False  # no proxies between the nodes of a job, no ~/.netrc overriding the token
            session.headers.update(self._headers)
            self._local.session = session
            with self._lock:
                self._sessions.append(session)
        return session


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return "connecting took too long"
    if isinstance(error, requests.Timeout):
        return "the server was silent for too long"
    text = str(error)
    return "connection refused" if "refused" in text else f"connection failed ({text[:200]})"


def _seconds(text: str | None) -> float:
    """A Retry-After header in seconds (dates, which our servers do not send, count as 0)."""
    return min(float(text), 60.0) if text and text.isdigit() else 0.0
