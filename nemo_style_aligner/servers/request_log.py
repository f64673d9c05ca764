"""One log line per request, as ``key=value`` pairs, and the id that names the request in every line about it.

The id is the caller's ``X-Request-Id``, else the protocol's ``id``, else one made here; the answer carries
it in ``X-Request-Id``.

Refusals are logged at INFO, answers that say the service is in trouble (5xx) at WARNING, everything else at DEBUG: what
trains, saves or restores says so itself. A 503 counts as a refusal: it only says that the service starts or
ends, which the service logs itself. Also at DEBUG are all answers to probes (health, readiness), because every rank of
a job asks again and again while a model loads, and 429, which clients wait out and metrics count.

Requests without the token are logged at DEBUG whatever the answer; a line at INFO, at most once a minute, counts those
that were refused. Otherwise whoever reaches the port could fill the disk with lines.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import uuid
from typing import Any

from flask import Flask, Response, g, request

from nemo_style_aligner.telemetry.log_lines import with_fields

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_LONGEST = 200  # characters of a value: a path, and an error that repeats part of it, are as long as a client likes
_STRANGERS_SECONDS = 60.0
_PLAIN = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)


class _Strangers:
    """Counts refused requests that did not show the token, and says now and then how many there were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._next_line = -math.inf

    def refused(self, line: str) -> None:
        """Count one more. ``line``: its log line."""
        with self._lock:
            self._count += 1
            now = time.monotonic()
            if now < self._next_line:
                return
            count, self._count, self._next_line = self._count, 0, now + _STRANGERS_SECONDS
        logger.info(
            "requests without this run's token: %d refused since the last such line, the latest: %s", count, line
        )


def log_requests(app: Flask) -> None:
    """Give every request of ``app`` an id and a line in the log. Call it before other hooks are registered."""
    strangers = _Strangers()

    def begin() -> None:
        g.started = time.monotonic()
        g.details = {}
        given = usable_id(request.headers.get(REQUEST_ID_HEADER, ""))
        g.request_id, g.is_own_id = given or uuid.uuid4().hex[:16], not given
        g.is_probe = False
        g.is_stranger = False

    def end(response: Response) -> Response:
        response.headers[REQUEST_ID_HEADER] = g.request_id
        level = logging.DEBUG if g.is_probe else _level(response.status_code)
        is_refused_stranger = g.is_stranger and level > logging.DEBUG
        if is_refused_stranger:
            level = logging.DEBUG
        if is_refused_stranger or logger.isEnabledFor(level):
            details = {
                "request_id": g.request_id,
                "method": request.method,
                "path": request.path,
                "status": response.status_code,
                "ms": round(1000 * (time.monotonic() - g.started), 1),
                "client": request.remote_addr,
                **g.details,
            }
            fields = {name: _cut(value) for name, value in details.items()}
            line = key_values(fields)
            logger.log(level, "%s", line, extra=with_fields(fields))
            if is_refused_stranger:
                strangers.refused(line)
        return response

    app.before_request(begin)
    app.after_request(end)


def adopt_id(protocol_id: str) -> str:
    """Use the protocol's id as the request's, unless the request has an id header; returns the id in use."""
    if g.is_own_id and usable_id(protocol_id):
        g.request_id = protocol_id
    return str(g.request_id)


def note(**details: Any) -> None:
    """Add to the current request's log line."""
    g.details.update(details)


def mark_probe() -> None:
    """Mark the current request as a health probe: it is logged at DEBUG, whatever the answer."""
    g.is_probe = True


def mark_stranger() -> None:
    """Mark the current request as one without the token."""
    g.is_stranger = True


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}... ({len(value)} characters)"


def _level(status: int) -> int:
    if status < 400 or status == 429:
        return logging.DEBUG
    return logging.INFO if status < 500 or status == 503 else logging.WARNING


def usable_id(text: str) -> str:
    """``text`` if it can stand in a log line and a header unchanged, else an empty string."""
    return text if _PLAIN.fullmatch(text) else ""


def key_values(fields: dict[str, Any]) -> str:
    """``key=value`` pairs on one line; values that do not match `_PLAIN` are quoted as in JSON."""

    def quoted(value: Any) -> str:
        text = str(value)
        return text if _PLAIN.fullmatch(text) else json.dumps(text)

    return " ".join(f"{name}={quoted(value)}" for name, value in fields.items())
