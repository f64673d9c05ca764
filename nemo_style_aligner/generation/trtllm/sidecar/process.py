"""The parent's side of the sidecar: start it, talk to it, notice when it is gone."""

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

from nemo_style_aligner.generation.trtllm.sidecar import trtllm_sidecar
from nemo_style_aligner.generation.trtllm.sidecar.trtllm_sidecar import LENGTH, encode, frame_length
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.trusted_paths import temporary_base

PROGRAM = Path(trtllm_sidecar.__file__)

_GRACE_SECONDS = 5.0  # between closing the connection and SIGKILL
_KILL_SECONDS = 30.0  # for a killed process to be gone
_LOG_TAIL_BYTES = 3000
# Launchers' variables would make TensorRT-LLM (or its MPI) join the trainer's job; Ray must find no other cluster;
# the rest belongs to the trainer's Python environment.
_REMOVED_PREFIXES = (
    *("OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "MPI_", "SLURM_", "TORCHELASTIC_", "RAY_"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    # What the launcher sets for training.
    *("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
)


class SidecarLost(RuntimeError):
    """The sidecar died, hung or broke the connection; another one must be started."""


class SidecarError(RuntimeError):
    """The sidecar is alive and has reported an error."""


def sidecar_environment(env: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """The environment of a sidecar on ``devices`` (entries of CUDA_VISIBLE_DEVICES), with a secret of its own."""
    child = {name: value for name, value in env.items() if not name.startswith(_REMOVED_PREFIXES)}
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
        ping_seconds: a sidecar that does not answer a health check within this time counts as hung.
    """

    def __init__(self, python: str, environment: Mapping[str, str], ping_seconds: float) -> None:
        self._ping_seconds = ping_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="trtllm_sidecar_", dir=temporary_base())  # mode 0700
        self._log = Path(self._folder.name) / "log"
        self._replies: dict[int, dict[str, Any]] = {}
        self._abandoned: set[int] = set()
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
                raise SidecarLost(f"the TensorRT-LLM sidecar cannot be started with {python}: {error}") from error
        self._socket = ours
        self._last_heard = time.monotonic()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        """A directory that only this user can read and that lives as long as the sidecar."""
        return Path(self._folder.name)

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request without waiting; the number identifies its reply.

        Raises:
            SidecarLost: the sidecar is gone, or does not read.
        """
        number = self._next_id
        self._next_id += 1
        self._socket.settimeout(self._ping_seconds)
        try:
            self._socket.sendall(encode({"id": number, "do": command, **arguments}))
        except OSError as error:  # a timeout is one
            raise self._lost(f"does not accept {command!r} ({error or type(error).__name__})") from error
        return number

    def wait(self, numbers: Sequence[int], seconds: float, *, check_health: bool = True) -> tuple[int, dict[str, Any]]:
        """Wait for the first reply to any of ``numbers``. Whatever arrives meanwhile counts as progress.

        Args:
            numbers: from `send`.
            seconds: how long to wait.
            check_health: whether the sidecar must answer pings meanwhile. While it starts it may be unable to.

        Returns:
            the number and the content of the reply.

        Raises:
            SidecarLost: the sidecar is gone, hangs, or has not replied in time.
            SidecarError: the sidecar reports an error.
        """
        with activity.bounded(seconds):  # the watchdog must not end the job before the sidecar is given up
            return self._wait(numbers, seconds, check_health)

    def _wait(self, numbers: Sequence[int], seconds: float, check_health: bool) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + seconds
        self._last_heard = time.monotonic()
        ping: int | None = None
        while True:
            for number in numbers:
                if number in self._replies:
                    self.forget([] if ping is None else [ping])
                    reply = self._replies.pop(number)
                    if "error" in reply:
                        raise SidecarError(f"TensorRT-LLM sidecar: {reply['error']}")
                    return number, reply["ok"]
            now = time.monotonic()
            if now >= deadline:
                raise self._lost(f"gave no answer within {seconds:g} s")
            if check_health:
                quiet = now - self._last_heard
                if quiet >= self._ping_seconds:
                    raise self._lost(f"does not answer a health check within {self._ping_seconds:g} s")
                if ping is None and quiet >= self._ping_seconds / 2:
                    ping = self.send("ping")
                elif ping in self._replies:
                    del self._replies[ping]
                    ping = None
            self._receive(min(deadline - now, self._ping_seconds / 4))

    def call(self, command: str, seconds: float, *, check_health: bool = True, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply; raises as `send` and `wait` do."""
        return self.wait([self.send(command, **arguments)], seconds, check_health=check_health)[1]

    def is_alive(self) -> bool:
        """Whether the sidecar answers a ping in time."""
        try:
            self.call("ping", self._ping_seconds)
        except SidecarLost:
            return False
        return True

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop the replies to ``numbers``, including those still to come."""
        for number in numbers:
            if self._replies.pop(number, None) is None:
                self._abandoned.add(number)

    def stop(self, grace_seconds: float = _GRACE_SECONDS) -> None:
        """End the sidecar: close the connection, wait ``grace_seconds``, kill the whole process group."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_seconds)
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
            raise self._lost(f"broke the connection ({error})") from error
        if not data:
            raise self._lost("is gone")
        self._last_heard = time.monotonic()
        activity.progress()  # for a ping's answer, too: a response may take longer than a lease of the work queue
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + frame_length(bytes(self._buffer[: LENGTH.size]))
            if len(self._buffer) < end:
                break
            reply = json.loads(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
            if reply["id"] in self._abandoned:
                self._abandoned.discard(reply["id"])
            else:
                self._replies[reply["id"]] = reply

    def _lost(self, what: str) -> SidecarLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)  # so that a process that is dying has its exit status
        code = self._process.poll()
        state = "it still runs" if code is None else f"it ended with status {code}"
        tail = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() if self._log.exists() else ""
        return SidecarLost(
            f"the TensorRT-LLM sidecar (process {self._process.pid}) {what}; {state}. The end of its log:\n{tail}"
        )
