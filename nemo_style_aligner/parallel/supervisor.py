"""Plain ``python script.py trainer.devices=4``: one process that starts the four ranks and watches over them."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from nemo_style_aligner.parallel.detection import SUPERVISOR_PID, LaunchInfo
from nemo_style_aligner.parallel.machine import LOOPBACK, available_cores, free_port
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE, taken
from nemo_style_aligner.telemetry.watchdog import EXIT_STUCK

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL, for the ranks that outlive a failed one
_KILL_SECONDS = 30.0  # for the kernel to end killed ranks
_REQUEUE_SECONDS = 10.0  # ranks that stop early end together; one that is later than this is ended
_OTHER_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "TORCHELASTIC_")


def supervise(num_ranks: int) -> int:
    """Run this process's own command line as ``num_ranks`` ranks on this machine.

    SIGTERM, SIGINT, SIGUSR1 and, unless it is ignored, SIGHUP are handed on to all ranks. When a rank ends with an
    error the others are ended within seconds.

    Returns:
        The exit status for this process: 0 if all ranks ended with 0; `EXIT_REQUEUE` or `EXIT_STUCK` if one did with
        that; else the status of the first that failed (128 + n for signal n).
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []
    num_told = 0  # ranks that were there when the first signal came

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal num_told
        if not received:
            num_told = len(children)
        received.append(number)
        # A second Ctrl-C: the ranks have not reacted to the first, since they compute in C code.
        is_repeated = received.count(signal.SIGINT) > 1
        _signal_all(children, signal.SIGKILL if is_repeated else number)

    previous = {number: signal.signal(number, forward) for number in taken(_FORWARDED)}
    try:
        port = free_port()
        for rank in range(num_ranks):
            # Sessions of their own: a Ctrl-C in the terminal reaches the ranks once, through `forward`.
            env = rank_environment(os.environ, rank, num_ranks, port)
            children.append(subprocess.Popen(command, env=env, start_new_session=True))
        for number in received[:1]:  # it may have come before the last rank was started
            _signal_all(children[num_told:], number)
        return _wait(children)
    finally:
        _end(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def rank_environment(env: Mapping[str, str], rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, and nothing that another launcher left behind."""
    child = {name: value for name, value in env.items() if not name.startswith(_OTHER_LAUNCHERS)}
    child |= LaunchInfo(rank, num_ranks, rank, num_ranks, "supervisor", LOOPBACK, port).environment()
    child[SUPERVISOR_PID] = str(os.getpid())
    # Ranks share the cores; threads that spin while they wait would take them from the ranks that work.
    child.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // num_ranks)))
    child.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have ended with 0, or one with another status; return the status for `supervise`."""
    requeue_deadline = math.inf
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code and code != EXIT_REQUEUE]
        if EXIT_REQUEUE in codes:
            # Whatever becomes of the others now is a consequence.
            requeue_deadline = min(requeue_deadline, time.monotonic() + _REQUEUE_SECONDS)
            if None not in codes or time.monotonic() > requeue_deadline:
                return EXIT_REQUEUE
        elif EXIT_STUCK in failed:
            return EXIT_STUCK  # whichever rank it was; others may have failed because that one was gone
        elif failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        elif None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _signal_all(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is still running: SIGTERM, a few seconds, SIGKILL."""
    _signal_all(children, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _signal_all(children, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # in the middle of a system call that the kernel does not interrupt
            print(f"process {child.pid} does not end; leaving it behind", file=sys.stderr, flush=True)
