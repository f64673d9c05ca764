"""The parent's side of the sidecar: start it, talk to it, notice when it is gone or silent."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.detection import outside_of_job
from nemo_style_aligner.engine.trtllm.sidecar import trtllm_sidecar
from nemo_style_aligner.engine.trtllm.sidecar.trtllm_sidecar import LENGTH, encode, frame_length
from nemo_style_aligner.guard.trusted_paths import temporary_base

PROGRAM = Path(trtllm_sidecar.__file__)

_GRACE_SECONDS = 5.0  # between closing the connection and SIGKILL
_SEND_SECONDS = 60.0  # for a request to be taken
_KILL_SECONDS = 30.0  # for a killed process to be gone
_LOG_TAIL_BYTES = 3000
# Ray must find no other cluster, MPI no launcher; the rest belongs to the trainer's Python environment.
_REMOVED_PREFIXES = (
    *("MPI_", "RAY_"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    # What the launcher sets for training.
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
)


class SidecarError(RuntimeError):
    """The sidecar has reported an error, died, hung or broken the connection."""


def sidecar_environment(env: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """The environment of a sidecar on ``devices`` (entries of CUDA_VISIBLE_DEVICES), with a secret of its own."""
    child = {name: value for name, value in outside_of_job(env).items() if not name.startswith(_REMOVED_PREFIXES)}
    child["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    child["TLLM_RAY_FORCE_LOCAL_CLUSTER"] = "1"  # one Ray cluster per sidecar: they must not share GPUs
    # Whoever reaches Ray's ports could run code here. Ray before 2.52 knows no authentication and ignores both.
    child["RAY_AUTH_MODE"] = "token"
    child["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    child["PYTHONUNBUFFERED"] = "1"
    return child


class Sidecar:
    """One sidecar process. Not thread-safe.

    Args:
        python: interpreter of the environment that has TensorRT-LLM.
        environment: of the process, see `sidecar_environment`.

    Raises:
        SidecarError: it cannot be started; so do all methods that talk to one that is gone.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trtllm_sidecar_", dir=temporary_base())  # mode 0700
        self._log = Path(self._folder.name) / "log"
        self._replies: dict[int, dict[str, Any]] = {}
        self._buffer = bytearray()
        self._next_id = 0
        ours, theirs = socket.socketpair()
        # Nobody else holds the other end: that is the channel's authentication.
        with theirs, self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python, str(PROGRAM), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=dict(environment),
                    cwd=self._folder.name,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SidecarError(f"the TensorRT-LLM sidecar cannot be started with {python}: {error}") from error
        self._socket = ours

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        """A directory that only this user can read and that lives as long as the sidecar."""
        return Path(self._folder.name)

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request without waiting; the number identifies its reply."""
        number = self._next_id
        self._next_id += 1
        self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(encode({"id": number, "do": command, **arguments}))
        except OSError as error:  # a timeout is one
            raise self._gone(f"does not accept {command!r} ({error or type(error).__name__})") from error
        return number

    def wait(self, numbers: Sequence[int], seconds: float) -> tuple[int, dict[str, Any]]:
        """Wait at most ``seconds`` for the first reply to any of ``numbers`` (from `send`); return both.

        Raises:
            SidecarError: it reports an error, is gone, or has not replied in time.
        """
        deadline = time.monotonic() + seconds
        with activity.bounded(seconds):  # the watchdog must not end the job before the sidecar is given up
            while True:
                for number in numbers:
                    if number in self._replies:
                        reply = self._replies.pop(number)
                        if "error" in reply:
                            raise SidecarError(f"TensorRT-LLM sidecar: {reply['error']}")
                        return number, reply["ok"]
                if time.monotonic() >= deadline:
                    raise self._gone(f"gave no answer within {seconds:g} s")
                self._receive(deadline - time.monotonic())

    def call(self, command: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        return self.wait([self.send(command, **arguments)], seconds)[1]

    def stop(self) -> None:
        """End the sidecar: close the connection, wait a moment, kill the whole process group."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the GPU's driver may hold the process for longer
            self._process.wait(timeout=_KILL_SECONDS)
        self._folder.cleanup()

    def _receive(self, seconds: float) -> None:
        """Read what arrives within ``seconds``, if anything does."""
        ready = select.poll()  # unlike select, takes file descriptors of any number
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(1000 * max(seconds, 0.0)):
            return
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise self._gone(f"broke the connection ({error})") from error
        if not data:
            raise self._gone("is gone")
        activity.progress()
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + frame_length(bytes(self._buffer[: LENGTH.size]))
            if len(self._buffer) < end:
                break
            reply = json.loads(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
            self._replies[reply["id"]] = reply

    def _gone(self, what: str) -> SidecarError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)  # so that a process that is dying has its exit status
        code = self._process.poll()
        state = "it still runs" if code is None else f"it ended with status {code}"
        tail = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() if self._log.exists() else ""
        return SidecarError(
            f"the TensorRT-LLM sidecar (process {self._process.pid}) {what}; {state}. The end of its log:\n{tail}"
        )
