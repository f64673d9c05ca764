"""Plain ``python script.py trainer.devices=4``: one process that starts the four ranks and watches over them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from nemo_style_aligner.launch.stop_signals import EXIT_REQUEUE, taken
from nemo_style_aligner.parallel.detection import LOOPBACK, SUPERVISOR_PID, LaunchInfo
from nemo_style_aligner.parallel.machine import available_cores, free_port
from nemo_style_aligner.telemetry.watchdog import EXIT_STUCK

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL, for the ranks that outlive a failed one
_REQUEUE_SECONDS = 10.0  # ranks that stop early end together; one that is later than this is ended
_KILL_SECONDS = 30.0  # for the kernel to end killed ranks, unless they are in a system call that it does not interrupt
_OTHER_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "TORCHELASTIC_")


def supervise(num_ranks: int) -> int:
    """Run this process's own command line as ``num_ranks`` ranks on this machine.

    SIGTERM, SIGINT, SIGUSR1 and, unless it is ignored, SIGHUP are handed on to all ranks. When a rank ends with an
    error the others are ended within seconds.

    Returns:
        The exit status for this process: 0 if all ranks ended with 0; `EXIT_REQUEUE` or `EXIT_STUCK` if one did with
        that; else the status of the first that failed (128 + n for signal n).
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    ranks: list[subprocess.Popen[bytes]] = []
    interrupts = 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        # A second Ctrl-C: the ranks have not reacted to the first, since they compute in C code.
        _signal_all(ranks, signal.SIGKILL if interrupts > 1 else number)

    try:
        port = free_port()
        for rank in range(num_ranks):
            # Sessions of their own: a Ctrl-C in the terminal reaches the ranks once, through `forward`.
            env = rank_environment(os.environ, rank, num_ranks, port)
            ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
        for number in taken(_FORWARDED):  # until now they end this process, and with it the ranks
            signal.signal(number, forward)
        return _wait(ranks)
    finally:
        _signal_all(ranks, signal.SIGTERM)
        _await_all(ranks, _GRACE_SECONDS)
        _signal_all(ranks, signal.SIGKILL)
        _await_all(ranks, _KILL_SECONDS)


def rank_environment(env: Mapping[str, str], rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, and nothing that another launcher left behind."""
    child = {name: value for name, value in env.items() if not name.startswith(_OTHER_LAUNCHERS)}
    child |= LaunchInfo(rank, num_ranks, rank, num_ranks, "supervisor", LOOPBACK, port).environment()
    child[SUPERVISOR_PID] = str(os.getpid())
    # Ranks share the cores.
    child.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // num_ranks)))
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


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have ended with 0, or one with another status; return the status for `supervise`."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if EXIT_REQUEUE in codes:  # whatever becomes of the others now is a consequence
            _await_all(ranks, _REQUEUE_SECONDS)
            return EXIT_REQUEUE
        if EXIT_STUCK in codes:  # whichever rank it was; others may have failed because that one was gone
            return EXIT_STUCK
        if failed := [code for code in codes if code]:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _await_all(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all ranks have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        for rank in ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
