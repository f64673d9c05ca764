"""Plain ``python script.py trainer.devices=4``: one process that starts the four ranks and watches over them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from nemo_style_aligner.engine.parallel.detection import LOOPBACK, SUPERVISOR_PID, LaunchInfo
from nemo_style_aligner.engine.parallel.machine import available_cores, free_port
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE, taken
from nemo_style_aligner.trainer.telemetry.watchdog import EXIT_STUCK

_logger = logging.getLogger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that are handed on to ranks."""

POLL_SECONDS = 0.1
"""Between two looks at whether processes are still there."""

_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL, for the ranks that outlive a failed one
_REQUEUE_SECONDS = 10.0  # ranks that stop early end together; one that is later than this is ended
_KILL_SECONDS = 30.0  # for the kernel to end killed ranks, unless they are in a system call that it does not interrupt
_OTHER_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "TORCHELASTIC_")


class Ranks:
    """A job's ranks on this machine: processes that are started, watched and ended together.

    Args:
        output: the file that what they print is added to; None: they print where this process does.
    """

    def __init__(self, output: Path | None = None) -> None:
        self._output = output
        self._processes: list[subprocess.Popen[bytes]] = []
        self._names: list[str] = []  # and each one's rank
        self._sent: set[int] = set()
        self._status: int | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str], *, cwd: str | None = None) -> None:
        """Start one more rank."""
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {}
            if self._output is not None:
                options = {"stdout": stack.enter_context(self._output.open("ab")), "stderr": subprocess.STDOUT}
            # Sessions of their own: a Ctrl-C in the terminal reaches the ranks once, through `send_signal`.
            self._processes.append(subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True, **options))
        self._names.append(env["RANK"])

    def poll(self) -> int | None:
        """The job's status as these ranks know it (`status_of`); None while they run.

        Ranks that a signal ended which they were not sent from here are named once: they cannot say it themselves.
        """
        if self._status is None:
            codes = [rank.poll() for rank in self._processes]
            self._status = status_of(codes)
            if self._status is not None:
                self._name_killed(codes)
        return self._status

    def _name_killed(self, codes: Sequence[int | None]) -> None:
        for name, code in zip(self._names, codes, strict=True):
            if code is not None and code < 0 and -code not in self._sent:
                reason = "; if nobody did that, the machine had no memory left" if -code == signal.SIGKILL else ""
                said = f"rank {name} was ended by signal {-code} ({signal.strsignal(-code)}){reason}"
                if self._output is None:
                    _logger.error(said)
                else:
                    with self._output.open("a", encoding="utf-8") as output:
                        output.write(f"{said}\n")

    def send_signal(self, number: int) -> None:
        """Send a signal to the ranks that are there."""
        self._sent.add(number)
        for rank in self._processes:
            if rank.poll() is None:
                rank.send_signal(number)

    def end(self) -> None:
        """End what is left, within seconds; ranks that stop early may end by themselves."""
        if self.poll() == EXIT_REQUEUE:
            self._await(_REQUEUE_SECONDS)
        self.send_signal(signal.SIGTERM)
        self._await(_GRACE_SECONDS)
        self.send_signal(signal.SIGKILL)
        self._await(_KILL_SECONDS)

    def _await(self, seconds: float) -> None:
        """Wait until all ranks have ended, at most so many seconds."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in self._processes:
                rank.wait(max(0.0, deadline - time.monotonic()))


def status_of(codes: Sequence[int | None]) -> int | None:
    """The status of a job whose ranks, or nodes, have ended with these codes; None: it still runs.

    0 if all ended with 0; `EXIT_REQUEUE` or `EXIT_STUCK` if one did with that; else that of the first that failed
    (128 + n for signal n).
    """
    if EXIT_REQUEUE in codes:  # whatever becomes of the others now is a consequence
        return EXIT_REQUEUE
    if EXIT_STUCK in codes:  # whichever rank it was; others may have failed because that one was gone
        return EXIT_STUCK
    if failed := [code for code in codes if code]:
        return failed[0] if failed[0] > 0 else 128 - failed[0]
    return None if None in codes else 0


def supervise(num_ranks: int) -> int:
    """Run this process's own command line as ``num_ranks`` ranks on this machine.

    SIGTERM, SIGINT, SIGUSR1 and, unless it is ignored, SIGHUP are handed on to all ranks. When a rank ends with an
    error the others are ended within seconds.

    Returns:
        The exit status for this process: see `status_of`.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    ranks = Ranks()
    interrupts = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        # A second Ctrl-C: the ranks have not reacted to the first, since they compute in C code.
        ranks.send_signal(signal.SIGKILL if interrupts > 1 else number)

    try:
        port = free_port()
        for rank in range(num_ranks):
            place = LaunchInfo(rank, num_ranks, rank, num_ranks, "supervisor", LOOPBACK, port)
            ranks.start(command, rank_environment(os.environ, place))
        for number in taken(FORWARDED):  # until now they end this process, and with it the ranks
            signal.signal(number, forward)
        while (status := ranks.poll()) is None:
            time.sleep(POLL_SECONDS)
        return status
    finally:
        ranks.end()


def rank_environment(env: Mapping[str, str], place: LaunchInfo) -> dict[str, str]:
    """The environment of one of this process's ranks: torchrun's variables, and nothing that another launcher left."""
    child = {name: value for name, value in env.items() if not name.startswith(_OTHER_LAUNCHERS)}
    child |= place.environment()
    child[SUPERVISOR_PID] = str(os.getpid())
    # Ranks share the cores.
    child.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // place.local_world_size)))
    return child


def end_with_supervisor() -> None:
    """In a rank that a supervisor started: let the kernel kill this process when the supervisor dies.

    In other processes it does nothing.
    """
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is None:
        return
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != int(supervisor):  # it died before the call above
        os._exit(1)


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Let the kernel send this signal when the process that has started this one is gone. Linux only."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)
