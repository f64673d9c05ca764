"""Chat templates: a model's own programs, rendered in a process that can take little time and memory.

jinja2's sandbox keeps a template from reaching anything but its arguments, not from an endless loop or from a text that
fills the machine. The kernel's limits do, whatever the template is made of; and that process has no secret to tell.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_CPU_SECONDS = 5  # for each text; the longest real ones take hundredths
_MEMORY_BYTES = 512 << 20
_TEXT_LENGTH = 64 << 20  # characters
_WAIT_SECONDS = 60.0  # for a text, on a machine that has hardly time for it
_START_SECONDS = 300.0
_PROCESSES = 4  # templates that have one at a time
_TOO_MUCH = f"it takes more than {_CPU_SECONDS} s of computing or {_MEMORY_BYTES >> 20} MiB of memory"
_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH")  # of the variables, those that the process gets
_START = "import sys; sys.path[:] = {path!r}; from {module} import _fork_all; _fork_all()"


class TemplateError(ValueError):
    """A template refuses its arguments, or cannot be rendered within the limits."""


def render(template: str, texts: Sequence[Mapping[str, Any]]) -> list[str | TemplateError]:
    """Render texts in a template, as transformers does; thread-safe.

    Args:
        template: jinja2 source.
        texts: of each, the arguments of transformers' ``render_jinja_template``, as JSON has them.

    Returns:
        The texts. In place of one there is an error if the template raises one; or if it takes too much time or
        memory, which is not tried again.

    Raises:
        TemplateError: the template is too long to be read within the limits.
        TypeError: a variable that JSON does not have.
    """
    with _lock:
        if (renderer := _renderers.get((os.getpid(), template))) is None:
            for old in [key for key in _renderers if key[0] == os.getpid()][: 1 - _PROCESSES]:
                _renderers.pop(old).close()
            renderer = _renderers[os.getpid(), template] = _Renderer(template)
        was_well = renderer.has_answered and renderer.failure is None
        answers = renderer.render(texts)
        if was_well and renderer.failure is not None:  # it may have been killed from outside: once more, in a new one
            renderer = _renderers[os.getpid(), template] = _Renderer(template)
            answers = renderer.render(texts)
        return answers


class _Renderer:
    """A process that renders one template, and what is heard of it.

    Attributes:
        has_answered: whether it has rendered a text.
        failure: why it renders no more.
    """

    def __init__(self, template: str) -> None:
        self._connection = fork_process(__name__, is_trusted=False)
        self._lines = self._connection.makefile("rb")
        self.has_answered = False
        self.failure: str | None = None
        self._send([json.dumps(template)], _START_SECONDS)
        self._reply()

    def render(self, texts: Sequence[Mapping[str, Any]]) -> list[str | TemplateError]:
        questions = [json.dumps(dict(variables)) for variables in texts]
        self._send([str(len(questions)), *questions], _WAIT_SECONDS)
        answers = [self._reply() for _ in questions]
        self.has_answered |= self.failure is None
        return answers

    def _send(self, lines: Sequence[str], seconds: float) -> None:
        if self.failure is None:
            self._connection.settimeout(seconds)
            with contextlib.suppress(OSError):  # it has ended, which the reply will show
                self._connection.sendall("".join(f"{line}\n" for line in lines).encode())

    def _reply(self) -> str | TemplateError:
        if self.failure is None:
            with contextlib.suppress(OSError):  # it has ended, or is silent
                if (answer := self._lines.readline()).endswith(b"\n"):
                    reply: dict[str, str] = json.loads(answer)
                    return TemplateError(reply["error"]) if "error" in reply else reply["text"]
            self.failure = _TOO_MUCH
            self.close()
        return TemplateError(self.failure)

    def close(self) -> None:
        """End the process: it ends with its connection, or when it has computed for too long."""
        self._lines.close()
        self._connection.close()


_renderers: dict[tuple[int, str], _Renderer] = {}  # by process, as a fork cannot use its parent's, and by template
_parents: dict[
    int, tuple[socket.socket, subprocess.Popen[bytes] | None]
] = {}  # by process: what renderers are forked from
_lock = threading.Lock()


def fork_process(module: str, *, is_trusted: bool = True) -> socket.socket:
    """A connection to a new process, which calls ``serve(connection)`` of a module of this package.

    All are forked from one process that has no threads and no secrets, since importing transformers takes seconds. One
    that is trusted may have others forked from it, and so render templates itself.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        for is_new in (False, True):
            if is_new or os.getpid() not in _parents:
                _parents[os.getpid()] = _start_parent()
            with contextlib.suppress(OSError):  # it has been killed, as by a machine without memory
                parent = _parents[os.getpid()][0]
                given = [theirs.fileno(), parent.fileno()] if is_trusted else [theirs.fileno()]
                socket.send_fds(parent, [module.encode()], given)
                break
    return ours


def _start_parent() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    # -I and the path: nothing is imported from the folder that the job was started in.
    start = _START.format(path=sys.path, module=__name__)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the job
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    return ours, process


# ---- in the process of its own ------------------------------------------------------------------


def _fork_all() -> None:
    """Fork a process for each connection that arrives, until the job has ended, in whatever way."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)

    job = socket.socket(fileno=sys.stdin.fileno())
    while (received := socket.recv_fds(job, 200, 2))[0]:
        connection, *parent = [socket.socket(fileno=descriptor) for descriptor in received[1]]
        if os.fork() == 0:
            try:
                job.close()
                if parent:
                    _parents[os.getpid()] = parent[0], None
                importlib.import_module(received[0].decode()).serve(connection)
            finally:
                os._exit(0)
        for opened in (connection, *parent):
            opened.close()


def serve(connection: socket.socket) -> None:
    """Render one template, until the other end is closed."""
    from transformers.utils.chat_template_utils import render_jinja_template

    lines = connection.makefile("rb")
    template = json.loads(lines.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY_BYTES,) * 2)
    connection.sendall(b'{"text": ""}\n')
    while number := lines.readline():
        for line in [lines.readline() for _ in range(int(number))]:
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = math.ceil(used.ru_utime + used.ru_stime) + _CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            reply = _rendered(render_jinja_template, template, line)
            connection.sendall(json.dumps(reply).encode() + b"\n")


def _rendered(render_jinja_template: Any, template: str, line: bytes) -> dict[str, str]:
    from jinja2 import TemplateError as JinjaError

    try:
        (text,), _ = render_jinja_template(chat_template=template, **json.loads(line))
    except MemoryError:
        return {"error": _TOO_MUCH}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        kind = "" if isinstance(error, JinjaError | TypeError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{error}"[:1000]}
    return {"text": text} if len(text) <= _TEXT_LENGTH else {"error": f"its text has {len(text):,} characters"}
