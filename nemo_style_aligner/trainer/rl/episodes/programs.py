"""A program as the environment of an episode: it is told of a line, talks to the policy's endpoint, says the reward.

Either way it gets one JSON object: ``episode`` (its name, the same when it is run again), ``line``, ``base_url``,
``api_key`` and ``model``; and says a number, or an object with named parts of one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from nemo_style_aligner.engine.parallel.detection import outside_of_job
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.secret import TOKEN_VARIABLE
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.rl.episodes.policy import EpisodeError, Policy

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.rl.episodes.endpoint import EpisodeEndpoint

MODEL = "policy"
"""What requests to the endpoint call the model."""

_TAIL_BYTES = 2**16  # of what a program prints
_TOLD_CHARACTERS = 600


class ProgramError(UserError, ValueError):
    """What is configured is no program that can be used; the message says why."""


class Told(Protocol):
    """Runs a program for one episode, in a thread of its own; ``close`` ends it."""

    def run(self) -> Any:
        """What the program says. Raises EpisodeError."""
        ...

    def close(self) -> None:
        """End it, from any thread."""
        ...


class Program:
    """An `EpisodeFunction`: a program has the episode.

    Args:
        tell: begins to tell it of an episode.
        endpoint: where it reaches the policy.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], Told], endpoint: EpisodeEndpoint) -> None:
        self._tell, self._endpoint = tell, endpoint

    async def __call__(self, policy: Policy, line: dict[str, Any]) -> Any:
        """Run an episode. Raises EpisodeError where the program fails, or EpisodeLimitError if it did at a limit."""
        with self._endpoint.open(policy) as access:
            asked = {"episode": policy.name, "line": line, "base_url": access.url, "api_key": access.key}
            told = self._tell(asked | {"model": MODEL})
            try:
                return await _in_thread(told.run)
            except EpisodeError:
                if access.limit is not None:
                    raise access.limit from None
                raise
            finally:
                told.close()

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.stop()


class Command:
    """A command that is started for an episode, which reads the object from its standard input.

    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` are in its environment. The last line that it prints is what it says, in
    JSON; nothing: it leaves the reward to other sources. It ends with what it has started.
    """

    def __init__(self, command: Sequence[str], asked: dict[str, Any]) -> None:
        self._command, self._asked = command, asked
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def run(self) -> Any:
        """See `Told`."""
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            told.write(json.dumps(self._asked).encode())
            told.seek(0)
            status = self._start(told, said, errors).wait()
            self.close()
            if status:
                ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise EpisodeError(f"the program {ended}: {_short(_tail(errors) or _tail(said)) or 'silent'}")
            lines = _tail(said).splitlines()
            return _read(lines[-1]) if lines else None

    def _start(self, told: IO[bytes], said: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        # A program may start ranks of its own; the shared secret, or the file that has it, is none of its business.
        outside = outside_of_job(os.environ)
        kept = {name: value for name, value in outside.items() if not name.startswith(TOKEN_VARIABLE)}
        access = {"OPENAI_BASE_URL": self._asked["base_url"], "OPENAI_API_KEY": self._asked["api_key"]}
        with self._lock:
            if self._is_closed:
                raise EpisodeError("it has ended")
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=told, stdout=said, stderr=errors, env=kept | access, start_new_session=True
                )
            except OSError as error:
                raise EpisodeError(f"{self._command[0]} cannot be started: {error.strerror}") from error
            return self._process

    def close(self) -> None:
        """See `Told`: the program, and what it has started and left behind."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)


class Posted:
    """A server that is sent the object, and says in its answer what a command prints."""

    def __init__(self, url: str, seconds: float, asked: dict[str, Any]) -> None:
        self._url, self._seconds, self._asked = url, seconds, asked

    def run(self) -> Any:
        """See `Told`. A request is sent once: what a broken one has done is not known."""
        body, headers = json.dumps(self._asked).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._seconds) as answer:
                said = answer.read(_TAIL_BYTES).decode(errors="replace").strip()
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(_TAIL_BYTES).decode(errors="replace")
            raise EpisodeError(f"{self._url} answered {error.code}: {_short(told)}") from error
        except OSError as error:
            raise EpisodeError(f"{self._url} does not answer: {getattr(error, 'reason', error)}") from error
        return _read(said) if said else None

    def close(self) -> None:
        """See `Told`: it finds its key closed; the thread ends with the answer, or the episode's limit."""


def program_of(section: schema.Program, key: str, seconds: float) -> Callable[[dict[str, Any]], Told]:
    """What begins to tell the program that a config names of an episode; ``key`` is its, for messages.

    Args:
        seconds: for which a server may be silent.

    Raises:
        ProgramError: it names none, or both; or what it names cannot be.
    """
    command, url = section.command, section.url
    if (command is None) == (url is None):
        raise ProgramError(f"{key}: give one of {{command: [...]}} and {{url: http://HOST:PORT/PATH}}")
    if url is not None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProgramError(f"{key}.url={url}: give http://HOST:PORT/PATH")
        return functools.partial(Posted, url, seconds)
    if not command or not all(isinstance(word, str) for word in command):
        raise ProgramError(f"{key}.command={command}: give a program and its arguments, as texts")
    if shutil.which(command[0]) is None:
        raise ProgramError(f"{key}.command={command}: there is no program {command[0]} that can be run")
    return functools.partial(Command, command)


def _read(said: str) -> Any:
    """What a program has said: JSON, or else a text, which is no reward."""
    try:
        return json.loads(said)
    except ValueError:
        return _short(said)


def _tail(file: IO[bytes]) -> str:
    """The end of what was written."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
    return file.read().decode(errors="replace").strip()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TOLD_CHARACTERS else "..." + text[-_TOLD_CHARACTERS:]


async def _in_thread(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, which may take long, in a thread that nothing waits for when the process ends."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="a program", daemon=True).start()
    return await asyncio.wrap_future(result)
