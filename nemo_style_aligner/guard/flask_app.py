"""The Flask app of a service: its errors have the form of the service's protocol, and the log tells of them."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client as prometheus
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from nemo_style_aligner.guard.protocol import JSON_TYPE, ProtocolError
from nemo_style_aligner.guard.request_log import NOTES_KEY


def service_app(
    name: str, registry: prometheus.CollectorRegistry, error_body: Callable[[ProtocolError], bytes] = ProtocolError.body
) -> Flask:
    """An app that has ``/metrics``, and answers errors with ``error_body``. A dict that a view returns is JSON."""
    app = Flask(name, static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]

    def refuse(error: ProtocolError) -> Response:
        note(error=error.message)
        return Response(error_body(error), error.status, error.headers, content_type=JSON_TYPE)

    def refuse_route(error: HTTPException) -> Response:
        """Flask's own errors: an unknown path or method, and 500 for a bug here, which Flask logs."""
        allowed = {name: value for name, value in error.get_headers() if name == "Allow"}
        return refuse(ProtocolError(error.code or 500, f"{error.name}: {error.description}", allowed))

    def metrics() -> Response:
        return Response(prometheus.generate_latest(registry), content_type=prometheus.CONTENT_TYPE_LATEST)

    app.add_url_rule("/metrics", view_func=metrics)
    app.register_error_handler(ProtocolError, refuse)
    app.register_error_handler(HTTPException, refuse_route)
    return app


def note(**details: object) -> None:
    """Add to the present request's line in the log."""
    request.environ.setdefault(NOTES_KEY, {}).update(details)
