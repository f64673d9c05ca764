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

from nemo_style_aligner.log_fields import with_fields

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
NOTES_KEY = "nemo_style_aligner.notes"
"""In the WSGI environment: a dict to which the application adds what the log is to say of the request."""
_LONGEST = 200  # characters of a value: a path, and an error that repeats part of it, are as long as a client likes
_STRANGERS_SECONDS = 60.0
_PLAIN = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)


class RequestLog:
    """The log of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused = 0  # strangers, since the last line about them
        self._next_line = -math.inf

    def answered(self, details: dict[str, Any], *, is_known: bool, is_handshake: bool = False) -> None:
        """Log an answered request.

        ``is_known``: whether it has shown the token; ``is_handshake``: it had none to show yet, and will be sent again.
        """
        level = logging.DEBUG if is_handshake else _level(details["path"], details["status"])
        is_refused_stranger = not is_known and level > logging.DEBUG
        if is_refused_stranger:
            level = logging.DEBUG
        if not is_refused_stranger and not logger.isEnabledFor(level):
            return
        fields = {name: _cut(value) for name, value in details.items()}
        line = key_values(fields)
        logger.log(level, "%s", line, extra=with_fields(fields))
        if is_refused_stranger:
            self._count_stranger(line)

    def _count_stranger(self, line: str) -> None:
        with self._lock:
            self._refused += 1
            now = time.monotonic()
            if now < self._next_line:
                return
            count, self._refused, self._next_line = self._refused, 0, now + _STRANGERS_SECONDS
        logger.info(
            "requests without this run's token: %d refused since the last such line, the latest: %s", count, line
        )


def request_id(*given: str) -> str:
    """The first of the ``given`` ids that can stand in a log line and a header unchanged, else a new one."""
    return next((text for text in given if _PLAIN.fullmatch(text)), None) or uuid.uuid4().hex[:16]


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}... ({len(value)} characters)"


def _level(path: str, status: int) -> int:
    if status < 400 or status == 429 or path.endswith(("/live", "/ready", "/health")):
        return logging.DEBUG
    return logging.INFO if status < 500 or status == 503 else logging.WARNING


def key_values(fields: dict[str, Any]) -> str:
    """``key=value`` pairs on one line; values that do not match `_PLAIN` are quoted as in JSON."""

    def quoted(value: Any) -> str:
        text = str(value)
        return text if _PLAIN.fullmatch(text) else json.dumps(text)

    return " ".join(f"{name}={quoted(value)}" for name, value in fields.items())
