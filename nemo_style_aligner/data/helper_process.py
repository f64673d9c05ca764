"""Processes of this package that work for this one, see none of its secrets, and end with it, in whatever way."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys

_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH")  # of the variables, those that a process gets
_START = "import sys; sys.path[:] = {path!r}; from {here} import _serve; _serve({module!r})"


class HelperProcess:
    """A process that calls ``serve(stream)`` of a module of this package.

    Args:
        seconds: that are waited for it at most. What takes longer raises TimeoutError, which is an OSError.

    Attributes:
        stream: reads what it writes, and writes what it reads.
        owner: id of the process that started it; a fork of that one cannot use it.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self.owner = os.getpid()
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(seconds)
        # -I and the path: nothing is imported from the folder that the job was started in.
        start = _START.format(path=sys.path, here=__name__, module=module)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", start],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the job
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        self.stream = self._connection.makefile("rwb")

    def wait_at_most(self, seconds: float) -> None:
        """From now on."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self.stream.close()
        self._connection.close()


def _serve(module: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the job decides what they mean
    with socket.socket(fileno=sys.stdin.fileno()) as connection, connection.makefile("rwb") as stream:
        with contextlib.suppress(Exception):  # its end tells the job enough
            importlib.import_module(module).serve(stream)
        os._exit(0)
