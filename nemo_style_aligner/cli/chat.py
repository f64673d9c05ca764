"""``nsa chat``: talk to a checkpoint, or to a server with an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import sys
import urllib.parse
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import click

from nemo_style_aligner.errors import UserError

_EXAMPLES = """\b
Examples:
  nsa chat policy.nemo
  nsa chat policy.nemo --system "You answer in one word." --temperature 0
  OPENAI_API_KEY=$(cat ~/.nemo_style_aligner/token) nsa chat http://127.0.0.1:8000/v1
"""
_HELP = """/reset       forget the conversation
/system TEXT begin again with this system prompt; without TEXT: with none
/help        this list
/quit        end, as Ctrl-D does; Ctrl-C ends a response"""
_SECONDS = 600.0  # for the next part of a response


@click.command(epilog=_EXAMPLES)
@click.argument("model", metavar="CHECKPOINT|URL")
@click.option("--system", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, help="0: the likeliest tokens.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of a response.  [default: all that there is room for]")
@click.option("--precision", type=click.Choice(["bf16", "32"]), default="bf16", help="Of a checkpoint.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Of a URL.  [default: $OPENAI_API_KEY]",
)
def command(
    model: str,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    precision: str,
    api_key_file: Path | None,
) -> None:
    """Talk to CHECKPOINT (as for nsa serve) or to the server at URL, in the model's chat template.

    /reset forgets the conversation, /system TEXT begins one with another system prompt. Lines may come from a pipe.
    """
    from nemo_style_aligner.services.secret import read_secret

    options = {"temperature": temperature} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    with contextlib.ExitStack() as stack:
        if model.startswith(("http://", "https://")):
            server = Server(
                model, read_secret(api_key_file).value if api_key_file else os.environ.get("OPENAI_API_KEY")
            )
        else:
            server = stack.enter_context(_served_here(Path(model), precision))
        Chat(server, options, system).run()


class Server:
    """A server with an OpenAI-compatible API. ``url`` ends with ``/v1``, or lacks it."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = f"{parts.scheme}://{self._place}{self._path}"
        self._fields = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        with self._ask("GET", "/models") as answer:
            self.model: str = json.loads(answer.read())["data"][0]["id"]

    def respond(self, messages: list[dict[str, str]], options: dict[str, Any]) -> Generator[str, None, None]:
        """The response, piece by piece. Closing the iterator ends it. Raises `UserError`."""
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        with self._ask("POST", "/chat/completions", json.dumps(body)) as answer:
            for line in answer:
                kind, _, event = line.decode().strip().partition(": ")
                if kind != "data":
                    continue
                if event == "[DONE]":
                    return
                content = json.loads(event)
                if "error" in content:
                    raise UserError(f"the server says: {content['error']['message']}")
                for choice in content["choices"]:
                    yield choice["delta"].get("content") or ""
        raise UserError("the server has broken off its answer")

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        try:
            with contextlib.closing(self._make(self._place, timeout=_SECONDS)) as connection:
                connection.request(method, self._path + path, body, self._fields)
                answer = connection.getresponse()
                if answer.status != 200:
                    text = answer.read().decode(errors="replace")
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        text = json.loads(text)["error"]["message"]
                    hint = " (the key: OPENAI_API_KEY, or --api-key-file)" if answer.status == 401 else ""
                    raise UserError(f"the server answers {answer.status}: {text[:1000]}{hint}")
                yield answer
        except (OSError, http.client.HTTPException, KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self._url} cannot be talked to: {error or type(error).__name__}") from error


class Chat:
    """A conversation on the terminal."""

    def __init__(self, server: Server, options: dict[str, Any], system: str | None) -> None:
        self._server, self._options = server, options
        self._begin(system)

    def run(self) -> None:
        """Read lines and answer them until the input ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited from now on
            click.secho(f"{self._server.model}: /help lists commands, Ctrl-D ends", dim=True)
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise UserError(f"what is said is not in UTF-8: {error}") from error
            except KeyboardInterrupt:
                click.echo()
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._say(line)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if not system else [{"role": "system", "content": system}]

    def _obey(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._begin(self._system)
        elif name == "/system":
            self._begin(text.strip() or None)
        else:
            click.echo(_HELP if name == "/help" else f"{name} is no command\n{_HELP}")

    def _say(self, line: str) -> None:
        """Add ``line`` and its response to the conversation; neither, if there is no response."""
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        try:
            with contextlib.closing(self._server.respond(messages, self._options)) as response:
                for piece in response:
                    pieces.append(piece)
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            pass
        except UserError as error:
            click.secho(f"\nerror: {error}", fg="red", err=True)
        click.echo()
        if "".join(pieces):
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


@contextlib.contextmanager
def _served_here(checkpoint: Path, precision: str) -> Iterator[Server]:
    """The checkpoint behind an API of this process, for this process alone."""
    if not checkpoint.exists():
        raise click.BadParameter(f"{checkpoint} does not exist", param_hint="CHECKPOINT")
    from nemo_style_aligner.cli.serve import model_name
    from nemo_style_aligner.parallel.groups import single_process
    from nemo_style_aligner.serving.app import ServedModel
    from nemo_style_aligner.serving.checkpoint import load_model

    key = secrets.token_urlsafe()
    with single_process():
        engine, tokenizer = load_model(checkpoint, precision=precision, num_slots=1)
        served = ServedModel(engine, tokenizer, model_name(checkpoint), host="127.0.0.1", port=0, token=key)
        try:
            yield Server(f"http://127.0.0.1:{served.server.port}/v1", key)
        finally:
            served.close(1)
