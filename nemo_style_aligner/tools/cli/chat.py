"""``nsa chat``: talk to a checkpoint, or to a server with an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import secrets
import sys
import urllib.parse
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import announce
from nemo_style_aligner.wording import spelt

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
@click.option("--name", help="What the server at URL calls the model.  [default: the first that it lists]")
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
    name: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    precision: str,
    api_key_file: Path | None,
) -> None:
    """Talk to CHECKPOINT (as for nsa serve) or to the server at URL, in the model's chat template.

    /reset forgets the conversation, /system TEXT begins one with another system prompt. Lines may come from a pipe.
    """
    from nemo_style_aligner.guard.secret import read_secret

    options = {"temperature": temperature} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    with contextlib.ExitStack() as stack:
        if model.startswith(("http://", "https://")):
            key = read_secret(api_key_file).value if api_key_file else os.environ.get("OPENAI_API_KEY")
            server = Server(model, key, name)
        else:
            server = stack.enter_context(_served_here(Path(model), precision))
        failed = Chat(server, options, system).run()
    if failed:
        click.get_current_context().exit(1)


class Server:
    """A server with an OpenAI-compatible API.

    Args:
        url: ends with ``/v1``, or lacks it.
        name: of the model; None: the first that the server lists.
    """

    def __init__(self, url: str, key: str | None, name: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = f"{parts.scheme}://{self._place}{self._path}"
        self._fields = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model: str = name or self._first_model()

    def _first_model(self) -> str:
        with self._ask("GET", "/models") as answer:
            try:
                return str(json.loads(answer.read())["data"][0]["id"])
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise UserError(f"{self._url}/models lists no model: say its name with --name") from error

    def respond(self, messages: list[dict[str, str]], options: dict[str, Any]) -> Generator[str, None, None]:
        """The response, piece by piece. Closing the iterator ends it. Raises `UserError`."""
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        with self._ask("POST", "/chat/completions", json.dumps(body)) as answer:
            is_whole = "json" in (answer.getheader("Content-Type") or "")
            for event in [answer.read().decode(errors="replace")] if is_whole else _events(answer):
                if event.strip() == "[DONE]":
                    return
                text, is_end = _news(_object(event))
                yield text
                if is_end or is_whole:
                    return
        raise UserError("the server has broken off its answer")

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        try:
            with contextlib.closing(self._make(self._place, timeout=_SECONDS)) as connection:
                connection.request(method, self._path + path, body, self._fields)
                answer = connection.getresponse()
                if answer.status != 200:
                    text = answer.read().decode(errors="replace")
                    with contextlib.suppress(UserError):
                        text = _error_in(_object(text)) or text
                    hint = " (the key: OPENAI_API_KEY, or --api-key-file)" if answer.status == 401 else ""
                    raise UserError(f"the server answers {answer.status}: {text[:1000]}{hint}")
                yield answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"{self._url} cannot be talked to: {error or type(error).__name__}") from error


def _events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events; of the last one also where no empty line ends it."""
    data: list[str] = []
    for line in itertools.chain(lines, [b""]):
        text = line.decode(errors="replace").rstrip("\r\n")
        name, _, value = text.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []


def _object(text: str) -> dict[str, Any]:
    """A JSON object. Raises `UserError`."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise UserError(f"the server says: {text[:1000]}")


def _error_in(content: dict[str, Any]) -> str | None:
    """The message of an error, in the forms that servers have for it; None: it is none."""
    found = content.get("error") or content.get("detail") or (content if content.get("object") == "error" else None)
    if isinstance(found, dict):
        found = found.get("message") or found
    return None if found is None else str(found)[:1000]


def _news(content: dict[str, Any]) -> tuple[str, bool]:
    """The text in a chunk of a stream, or in an answer; and whether it ends there. Raises `UserError`."""
    if (message := _error_in(content)) is not None:
        raise UserError(f"the server says: {message}")
    try:
        choices = content.get("choices") or []
        return "".join(map(_text_of, choices)), any(choice.get("finish_reason") for choice in choices)
    except (AttributeError, TypeError) as error:
        raise UserError(f"the server's answer is none of a chat: {json.dumps(content)[:300]}") from error


def _text_of(choice: Any) -> str:
    """The text of a choice: whole, or news of it; as text or in parts."""
    said = choice.get("delta") or choice.get("message") or {}
    content = said.get("content") or choice.get("text") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


class Chat:
    """A conversation on the terminal."""

    def __init__(self, server: Server, options: dict[str, Any], system: str | None) -> None:
        self._server, self._options = server, options
        self._begin(system)

    def run(self) -> bool:
        """Read lines and answer them until the input ends. Whether a request from a pipe has failed."""
        failed = False
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited from now on
            click.secho(f"{spelt(self._server.model)}: /help lists commands, Ctrl-D ends", dim=True)
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                return failed
            except UnicodeDecodeError as error:
                raise UserError(f"what is said is not in UTF-8: {error}") from error
            except KeyboardInterrupt:
                click.echo()
                continue
            if line in ("/quit", "/exit"):
                return failed
            if line.startswith("/"):
                self._obey(line)
            elif line:
                failed |= not self._say(line) and not is_terminal

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

    def _say(self, line: str) -> bool:
        """Add ``line`` and its response to the conversation; neither, if there is none. Whether nothing failed."""
        error: UserError | None = None
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        try:
            with contextlib.closing(self._server.respond(messages, self._options)) as response:
                for piece in response:
                    pieces.append(piece)
                    click.echo(spelt(piece), nl=False)
        except KeyboardInterrupt:
            pass
        except UserError as failure:
            error = failure
            click.secho(f"\nerror: {spelt(str(error))}", fg="red", err=True)
        click.echo()
        if "".join(pieces):
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return error is None


@contextlib.contextmanager
def _served_here(checkpoint: Path, precision: str) -> Iterator[Server]:
    """The checkpoint behind an API of this process, for this process alone."""
    if not checkpoint.exists():
        raise click.BadParameter(f"{checkpoint} does not exist", param_hint="CHECKPOINT")
    announce(f"torch, then {checkpoint}")
    from nemo_style_aligner.engine.parallel.groups import single_process
    from nemo_style_aligner.engine.serving.app import ServedModel
    from nemo_style_aligner.tools.cli.serve import model_name
    from nemo_style_aligner.tools.serving.checkpoint import load_model

    key = secrets.token_urlsafe()
    with single_process():
        engine, tokenizer = load_model(checkpoint, precision=precision, num_slots=1)
        served = ServedModel(engine, tokenizer, model_name(checkpoint), host="127.0.0.1", port=0, token=key)
        try:
            yield Server(f"http://127.0.0.1:{served.server.port}/v1", key)
        finally:
            served.close(1)
