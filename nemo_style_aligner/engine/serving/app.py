"""The OpenAI-compatible API: routes, streams, and the server that has them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any

from flask import Flask, Response, request
from flask.typing import ResponseReturnValue

from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.serving.answers import Answer, Endpoint
from nemo_style_aligner.engine.serving.bodies import Asked, BodyReader
from nemo_style_aligner.engine.serving.fields import RequestError, error_body, error_object
from nemo_style_aligner.engine.serving.generation import Generates, Generation, Metrics, Ticket
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.guard.flask_app import service_app
from nemo_style_aligner.guard.http_server import CLIENT_IS_THERE_KEY, EVENT_STREAM, WsgiServer
from nemo_style_aligner.guard.request_log import NOTES_KEY
from nemo_style_aligner.guard.wanted import CHECK_SECONDS, wanted

logger = logging.getLogger(__name__)

_HEALTH_PATH = "/health"
_MAX_BODY_BYTES = 2**25


class ServedModel:
    """A model behind the API, in threads of this process.

    Args:
        engine: nobody else may use it until `close`; with a ``generation`` of the caller's, that may.
        name: what requests call the model.
        host, port: where to listen; port 0 is a free one.
        token: clients' API key; None: whoever reaches the port is answered.
        section: of the config that host and port are from, for errors.
        allowed_origins: whose pages may ask, see `WsgiServer`.
        request_seconds: for a request to be answered whole.
        max_outstanding: responses that wait or are made.
        group: the ranks that share the engine; see `Generation`.
        generation: makes the responses; None: a `Generation` with the engine.
        is_key: tells clients' API keys, in place of ``token``.
        defaults: of sampling parameters; see `BodyReader`.

    Raises:
        PlaceTakenError: nothing can listen there.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        tokenizer: Tokenizer,
        name: str,
        *,
        host: str,
        port: int,
        token: str | None,
        section: str | None = None,
        allowed_origins: Collection[str] = (),
        request_seconds: float = 600.0,
        max_outstanding: int = 1024,
        group: EngineGroup | None = None,
        generation: Generates | None = None,
        is_key: Callable[[str], bool] | None = None,
        defaults: SamplingParams | None = None,
    ) -> None:
        self._name, self._request_seconds = name, request_seconds
        self._tokenizer, self._max_length = tokenizer, engine.max_sequence_length
        self._metrics, self._created = Metrics(), int(time.time())
        assert engine.grammars is not None, "an engine with the tokenizer's `vocabulary_options`"
        self._bodies = BodyReader(
            tokenizer, name, self._max_length, engine.vocab_size, max_outstanding, engine.grammars, defaults
        )
        self.generation = generation or Generation(engine, max_outstanding, self._metrics, group)
        self.server = WsgiServer(
            self._app(),
            host,
            port,
            max_body_bytes=_MAX_BODY_BYTES,
            name="the API",
            section=section,
            token=token,
            is_key=is_key,
            is_open=lambda path: path in (_HEALTH_PATH, "/"),
            allowed_origins=allowed_origins,
            error_body=error_body,
        )

    def close(self, seconds: float) -> None:
        """Refuse new requests, answer those that are there within ``seconds``, and end."""
        deadline = time.monotonic() + seconds
        if not self.generation.close(seconds):
            logger.warning("requests were still being answered after %g s: they are cut off", seconds)
        self.server.stop(max(0.0, deadline - time.monotonic()))

    def _app(self) -> Flask:
        app = service_app("nemo_style_aligner.engine.serving", self._metrics.registry, error_body)
        app.before_request(self._begin)
        app.after_request(self._count)
        app.url_map.strict_slashes = False  # /v1/models/, too
        posts = {"/v1/completions": self._completion, "/v1/chat/completions": self._chat}
        posts["/inference/v1/generate"] = self._generate
        for path, view in (posts | {"/tokenize": self._tokenize, "/detokenize": self._detokenize}).items():
            app.add_url_rule(path, view_func=view, methods=["POST"])
        app.add_url_rule("/", view_func=_page)
        app.add_url_rule("/v1/models", view_func=self._models)
        app.add_url_rule("/v1/models/<path:name>", view_func=self._model)
        app.add_url_rule("/tokenizer_info", view_func=self._tokenizer_info)
        app.add_url_rule(_HEALTH_PATH, view_func=lambda: Response(""), endpoint="health")
        return app

    def _begin(self) -> None:
        """Tell what takes long when it need not go on: the request's client is gone, or its time is over."""
        arrived, client_is_there = time.monotonic(), request.environ[CLIENT_IS_THERE_KEY]

        def check() -> None:
            if not client_is_there():
                raise RequestError(408, "the client is gone")
            if time.monotonic() - arrived > self._request_seconds:
                raise RequestError(504, f"no answer within {self._request_seconds:g} s", code="timeout")

        wanted.set(check)

    # ---- completions ----------------------------------------------------------------------------

    def _completion(self) -> ResponseReturnValue:
        return self._answer(self._bodies.completion(_body()), Endpoint.COMPLETIONS)

    def _chat(self) -> ResponseReturnValue:
        return self._answer(self._bodies.chat(_body()), Endpoint.CHAT)

    def _generate(self) -> ResponseReturnValue:
        return self._answer(self._bodies.generate(_body()), Endpoint.GENERATE)

    def _answer(self, asked: Asked, endpoint: Endpoint) -> ResponseReturnValue:
        ticket = self.generation.submit(asked)
        answer = Answer(asked, ticket, self._name, self._tokenizer, endpoint)
        news = self._news(ticket, wanted.get(), request.environ[NOTES_KEY])
        next(news)  # an error that comes before the first token has a status of its own, in a stream, too
        if asked.streams:
            return Response(_events(asked, answer, news), content_type=EVENT_STREAM)
        news.close()
        return answer.whole()

    def _news(self, ticket: Ticket, check: Callable[[], None], notes: dict[str, Any]) -> Generator[None, None, None]:
        """Yield when all responses are finished; in streams, whenever there is news of one. No end of its own.

        Whatever ends it, slots that are still in use are freed.

        Raises:
            RequestError: generation has failed, or what ``check`` raises.
        """
        try:
            while True:
                if ticket.wait(CHECK_SECONDS):
                    yield
                check()
        finally:
            notes["responses"] = len(ticket.choices)
            self._metrics.request_seconds.observe(time.monotonic() - ticket.arrived)
            if ticket.unfinished:
                self.generation.abandon(ticket)

    # ---- the rest -------------------------------------------------------------------------------

    def _tokenize(self) -> dict[str, Any]:
        ids = self._bodies.to_tokenize(_body())
        return {"count": len(ids), "max_model_len": self._max_length, "tokens": ids}

    def _detokenize(self) -> dict[str, Any]:
        return {"prompt": self._tokenizer.ids_to_text(self._bodies.to_detokenize(_body()), keep_special=True)}

    def _tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self._tokenizer
        tokens = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id, "pad_token": tokenizer.pad_id}
        spelt = {n: None if i is None else tokenizer.ids_to_text([i], keep_special=True) for n, i in tokens.items()}
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self._max_length,
            **spelt,
        }

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described()]}

    def _model(self, name: str) -> dict[str, Any]:
        if name != self._name:
            raise RequestError(404, f"the model '{name}' is not served here", "model", "model_not_found")
        return self._described()

    def _described(self) -> dict[str, Any]:
        owner = {"created": self._created, "owned_by": "nemo_style_aligner"}
        return {"id": self._name, "object": "model", **owner, "max_model_len": self._max_length}

    def _count(self, response: Response) -> Response:
        path = request.url_rule.rule if request.url_rule is not None else "other"
        self._metrics.requests.labels(path, str(response.status_code)).inc()
        return response


def _page() -> Response:
    """A page to talk to the model, for whoever comes: the page itself asks for the key."""
    page = Path(__file__).with_name("chat.html").read_text("utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Response(page, headers={"Content-Security-Policy": policy}, content_type="text/html; charset=utf-8")


def _events(asked: Asked, answer: Answer, news: Generator[None, None, None]) -> Iterator[bytes]:
    """The server-sent events of a stream. Its status is sent by then: an error is an event, too."""
    with contextlib.closing(news):
        try:
            while True:
                yield from map(_event, answer.news())
                if answer.is_complete:
                    break
                next(news)
            if asked.includes_usage:
                yield _event(answer.last_chunk())
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield _event({"error": error_object(error)})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _body() -> bytes:
    """The request's body. Pages of other sites cannot send this content type without asking, which nobody answers."""
    if request.mimetype != "application/json":
        raise RequestError(415, "the body should be JSON: send 'Content-Type: application/json'")
    return request.get_data(cache=False)
