"""The report of the run that this process leads, live: a page on loopback that asks for what is new."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

from flask import Flask, Response, abort, request

from nemo_style_aligner import activity
from nemo_style_aligner.guard.http_server import WsgiServer
from nemo_style_aligner.tools.reports.report import render, render_samples
from nemo_style_aligner.tools.reports.run_view import RunView
from nemo_style_aligner.tools.reports.samples import find_samples
from nemo_style_aligner.trainer.launch.stop_signals import stops
from nemo_style_aligner.trainer.telemetry.log_files import METRICS_FILE, NoRunError
from nemo_style_aligner.trainer.telemetry.metric_table import phase_title
from nemo_style_aligner.trainer.telemetry.progress import how_far
from nemo_style_aligner.trainer.telemetry.timeline import last_phases

logger = logging.getLogger(__name__)

_LOG_LINES = 300
_SHARE_OF_TIME = 0.05  # of the run's, for pages of what is new
_KEY = "exp_manager.dashboard_port"


class Dashboard:
    """Serves the page in daemon threads of rank 0.

    Args:
        log_dir: of the run.
        port: 0 takes a free one.
        token: the shared secret, which a browser sends as the password (HTTP's Basic authentication); None: whoever has
            an account on this machine may look.

    Raises:
        PlaceTakenError: the port is taken.
    """

    def __init__(self, log_dir: Path, port: int, token: str | None) -> None:
        self.log_dir = log_dir
        self._lines = _Lines()
        logging.getLogger().addHandler(self._lines)
        self._lock = threading.Lock()  # a page is made once, however many look
        self._page: tuple[str, bytes] = ("", b"")
        self._known, self._look_again = "0", -math.inf  # the version, and when it may change
        self._timeline: tuple[str, dict[int, list[tuple[str, float, float]]]] = ("", {})
        app = Flask("nemo_style_aligner.dashboard", static_folder=None)
        app.add_url_rule("/", view_func=self._whole_page)
        app.add_url_rule("/state", view_func=self._state)
        app.add_url_rule("/rollouts", view_func=self._rollouts)
        app.after_request(_with_fields)
        self._server = WsgiServer(
            app, "127.0.0.1", port, max_body_bytes=0, name="dashboard", port_key=_KEY, token=token
        )
        self.port = self._server.port
        logger.info("dashboard on http://127.0.0.1:%d, password: the shared secret", self.port)

    def close(self) -> None:
        """Stop listening."""
        logging.getLogger().removeHandler(self._lines)
        self._server.stop(flush_seconds=1.0)

    def _version(self) -> str:
        """Changes when the run has logged something; less often where a page takes long: the run needs the time."""
        path = self.log_dir / METRICS_FILE
        if time.monotonic() >= self._look_again and path.exists():
            self._known = str(path.stat().st_size)
        return self._known

    def _whole_page(self) -> bytes:
        with self._lock:
            version = self._version()
            if self._page[0] != version:
                began = time.monotonic()
                try:
                    runs = [RunView(self.log_dir.name, self.log_dir)]
                except NoRunError:  # the first step is under way
                    runs = []
                page = render(self.log_dir.name, runs, live=True)
                self._page = (version, page.encode("utf-8", "xmlcharrefreplace"))
                now = time.monotonic()
                self._look_again = now + (now - began) / _SHARE_OF_TIME
            return self._page[1]

    def _state(self) -> dict[str, Any]:
        """What goes on now."""
        now, version = activity.current(), self._version()
        if self._timeline[0] != version:
            self._timeline = version, last_phases(self.log_dir)
        return {
            "version": version,
            "phase": " › ".join(map(phase_title, now.phase.split("/"))),
            "counts": how_far(activity.counts()),
            "quiet": round(time.monotonic() - now.progress, 1),
            "stopping": bool(stops.received),
            "log": list(self._lines.last),
            "timeline": self._timeline[1],
        }

    def _rollouts(self) -> dict[str, Any]:
        """Samples of any step: those that ``text``, ``step``, ``low`` and ``high`` want; see `find_samples`."""
        query = request.args
        try:
            low, high = (float(query.get(name, bound)) for name, bound in (("low", "-inf"), ("high", "inf")))
            step, before = (int(query[name]) if name in query else None for name in ("step", "before"))
        except ValueError as error:
            abort(400, str(error))
        found, older = find_samples(self.log_dir, query.get("text", ""), step, low, high, before)
        return {"html": render_samples(found), "older": older}


def _with_fields(response: Response) -> Response:
    response.headers |= {"Cache-Control": "no-store", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"}
    return response


class _Lines(logging.Handler):
    """Keeps the last lines of the log, as this process writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.setFormatter(next((h.formatter for h in logging.getLogger().handlers if h.formatter), None))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; other handlers tell of one that cannot be formatted."""
        with contextlib.suppress(Exception):
            self.last.append(self.format(record))
