"""Processes of this package that work for this one, see none of its secrets, and end with it, in whatever way."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from nemo_style_aligner.guard.wanted import CHECK_SECONDS, wanted

_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH")  # of the variables, those that a process gets
_START = "import sys; sys.path[:] = {path!r}; from {here} import _serve; _serve({descriptor}, {module!r})"


class HelperProcess:
    """A process that answers questions, one after the other, by what ``answerer(*arguments)`` of a module returns.

    Attributes:
        owner: id of the process that started it; a fork of that one cannot use it.
    """

    def __init__(self, module: str, *arguments: Any) -> None:
        self.owner = os.getpid()
        self._connection, theirs = multiprocessing.Pipe()
        # -I and the path: nothing is imported from the folder that the job was started in.
        start = _START.format(path=sys.path, here=__name__, descriptor=theirs.fileno(), module=module)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", start],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the job
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                pass_fds=[theirs.fileno()],
            )
        self.send(arguments)

    def send(self, question: Any) -> None:
        """Ask a question, once the one before is answered. Whether the process has ended, `answer` will show."""
        with contextlib.suppress(OSError):
            self._connection.send(question)

    def answer(self, seconds: float) -> Any | None:
        """The answer; None if the process has ended or is silent for so long, or nobody waits. Then it is closed."""
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as unless_answered:
            unless_answered.callback(self.close)
            while True:
                try:
                    if self._connection.poll(min(seconds, CHECK_SECONDS)):
                        reply = self._connection.recv()
                        unless_answered.pop_all()
                        return reply
                except (OSError, EOFError, pickle.UnpicklingError):
                    return None
                wanted.get()()
                if time.monotonic() >= deadline:
                    return None

    def close(self) -> int:
        """End it; returns its exit status, or minus the signal that has ended it."""
        self._process.kill()
        self._connection.close()
        return self._process.wait()


def _serve(descriptor: int, module: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the job decides what they mean
    with contextlib.suppress(Exception):  # its end tells the job enough
        connection = Connection(descriptor)
        answer = importlib.import_module(module).answerer(*connection.recv())
        while True:
            connection.send(answer(connection.recv()))
    os._exit(0)
