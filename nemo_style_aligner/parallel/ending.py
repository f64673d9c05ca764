"""How a job ends: within a bounded time, on all ranks, with a status that says why."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from omegaconf.errors import MissingMandatoryValue

from nemo_style_aligner.errors import OtherRankError, UserError, comes_from
from nemo_style_aligner.parallel.detection import LaunchError, detect_launch, in_slurm_step, slurm_step
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE, is_importing_at_start
from nemo_style_aligner.section_names import said
from nemo_style_aligner.telemetry.watchdog import EXIT_STUCK, FAILED_FILE, failed_file_of
from nemo_style_aligner.trusted_paths import unless_planted

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a job that Ctrl-C has ended."""

_logger = logging.getLogger(__name__)

# The process must be gone this long after an error or after the last line of `main`, whatever hangs.
_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 60.0
# Statuses with which every rank ends by itself: each finds a mistake in the config, or learns that the job hangs.
_ENDED_BY_ALL = (2, EXIT_STUCK)
_ALL_SECONDS = 30.0  # until all ranks have ended with such a status
# Delays before an error that several ranks may have is reported by the first rank of a machine, and by any other.
_FIRST_RANK_SECONDS = 3.0
_ANY_RANK_SECONDS = 10.0

_log_dir: Path | None = None
_run: str | None = None
_where_interrupted: Callable[[], str] | None = None
_is_interrupted = False


def shutdown(status: int = 0) -> None:
    """Wait for the other ranks, leave the process group, and see to it that the process then ends.

    Args:
        status: exit status of a process that does not end by itself and is ended here.
    """
    import torch.distributed as dist

    from nemo_style_aligner.parallel import worlds

    worlds.end(status)
    if dist.is_initialized():
        worlds.barrier()
    # NCCL's groups, a forgotten thread or MPI_Finalize can hold up a process for ever: show where, and go.
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)  # in C, needs no GIL, but its status is always 1
    last_resort = threading.Timer(_EXIT_SECONDS - 1.0, os._exit, args=(status,))
    last_resort.daemon = True
    last_resort.start()
    if dist.is_initialized():
        dist.destroy_process_group()
    worlds.leave()
    # What a loop has frozen (`gc.freeze`) would outlive the interpreter; nanobind, as in Triton, reports it as leaked.
    gc.unfreeze()
    _flush_output()


def leave_failures_in(log_dir: Path, *, remove: bool) -> None:
    """From now on a rank that fails leaves a line in `FAILED_FILE`; ``remove`` deletes an earlier run's file."""
    global _log_dir
    _log_dir = log_dir
    if remove:
        (log_dir / FAILED_FILE).unlink(missing_ok=True)


def name_run(run: str) -> None:
    """From now on a rank that fails also leaves its line in a file of this run alone, which makes the others end.

    They cannot go by `FAILED_FILE`: a second job that was started in the directory by mistake, or a late rank of
    a job that was killed, writes there as well.

    Args:
        run: name of this start of the job, the same on all its ranks and unique to it.
    """
    global _run
    _run = run


def run_name() -> str | None:
    """The run's name, as given to `name_run`; None before."""
    return _run


def has_failed(log_dir: Path, patience: float) -> bool:
    """Whether a rank of this run has failed, or does so within ``patience`` seconds, as far as can be seen.

    For jobs that are starting: `FAILED_FILE` also names ranks that fail before the run has its name.
    """
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):
            if (log_dir / FAILED_FILE).exists():
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream with which the job was started closed (``>&-``), where Python has None.

    Libraries count on the streams; faulthandler and child processes count on their descriptors, which would otherwise
    be taken by whatever is opened next.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, descriptor == number)
            setattr(sys, name, open(descriptor, "w" if number else "r"))  # noqa: SIM115  # for as long as the job lives


def install_excepthook() -> None:
    """From now on an uncaught exception ends the whole job, not only this rank.

    So does Ctrl-C, with a line in place of a traceback; a second one ends this process at once, whatever it waits for.
    """
    sys.excepthook = _report_and_abort
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored (``&``)
        signal.signal(signal.SIGINT, _on_interrupt)


def tell_when_interrupted(where: Callable[[], str]) -> None:
    """From now on a job that Ctrl-C ends prints ``where()``: what it has done, and what of that is on disk."""
    global _where_interrupted
    _where_interrupted = where


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _is_interrupted
    if _is_interrupted:
        _die_interrupted()
    _is_interrupted = True
    if is_importing_at_start(frame):
        _report_and_abort(KeyboardInterrupt, KeyboardInterrupt(), None)
    while frame is not None:
        # The rank is reporting an error already: the end of another rank made it fail before it handled its own Ctrl-C.
        # Nobody would catch an exception here.
        if frame.f_code is _report_and_abort.__code__:
            _report_and_abort(KeyboardInterrupt, KeyboardInterrupt(), None)
        frame = frame.f_back
    raise KeyboardInterrupt


def _die_interrupted() -> NoReturn:
    """Die of SIGINT itself: only then does a shell end its loops; it reports the status as `EXIT_INTERRUPTED`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(EXIT_INTERRUPTED)  # a container's first process does not die of signals by default


def abort_job(exit_code: int) -> NoReturn:
    """End this process at once and the other ranks within seconds, skipping what could hang on the way.

    Under MPI by ``MPI_Abort``; under srun by cancelling the step, as srun does of itself only with
    ``--kill-on-bad-exit``; torchrun, mpirun and the supervisor end the others when they see this one gone.
    A step whose ranks all end by themselves (`_ENDED_BY_ALL`) is cancelled only `_ALL_SECONDS` later: that would change
    its status.
    """
    last_resort = threading.Timer(_ABORT_SECONDS, os._exit, args=(exit_code,))
    last_resort.daemon = True
    last_resort.start()
    _flush_output()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(exit_code)
    if exit_code not in (0, EXIT_REQUEUE) and in_slurm_step(os.environ) and shutil.which("scancel"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            cancel = ["scancel", slurm_step(os.environ)]
            if exit_code in _ENDED_BY_ALL:
                # If the step ends before that, Slurm ends this child with it.
                later = ["sh", "-c", f"sleep {_ALL_SECONDS:g}; exec {shlex.join(cancel)}"]
                subprocess.Popen(later, start_new_session=True, stdin=subprocess.DEVNULL, close_fds=True)
            else:
                subprocess.run(cancel, timeout=_ABORT_SECONDS / 2, check=False)
    if exit_code == EXIT_INTERRUPTED and threading.current_thread() is threading.main_thread():
        _die_interrupted()
    os._exit(exit_code)


def fail_job(error: BaseException) -> NoReturn:
    """End the whole job, from any thread, as an uncaught error in the main thread does."""
    _report_and_abort(type(error), error, error.__traceback__)


def _report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    status = _status_of(error)
    try:
        rank, size, local_rank = _own_rank()
        is_first = _leave_failure(said(f"rank {rank} on {socket.gethostname()}: {kind.__name__}: {error}\n"))
        may_be_common = isinstance(error, (*_MISTAKES, OtherRankError)) and not isinstance(error, LaunchError)
        is_told_elsewhere = rank > 0 if may_be_common else not is_first
        if is_told_elsewhere and status != EXIT_INTERRUPTED:
            # All ranks find the same mistake, hear of it, or lose contact with the rank that failed. Rank 0, or the
            # first to fail, says it at once. If that does not end the job in time, the first rank of each machine
            # says what it found there, which may differ, and later any other rank.
            time.sleep(_FIRST_RANK_SECONDS if local_rank == 0 else _ANY_RANK_SECONDS)
        if status == EXIT_INTERRUPTED:
            lines = _interruption() if rank == 0 else ""
        elif status == 2:
            # Under srun the end of one rank does not end the others, so all would say it.
            is_told = local_rank == 0 or not in_slurm_step(os.environ)
            lines = f"error: {error}\n" if is_told else ""
        else:
            is_known = isinstance(error, (UserError, OtherRankError))
            trace_lines = [f"{kind.__name__}: {error}"] if is_known else traceback.format_exception(kind, error, trace)
            text = "".join(trace_lines).rstrip()
            header = f"rank {rank} of {size} on {socket.gethostname()} (process {os.getpid()}) failed; ending the job"
            lines = "".join(f"[rank {rank}] {line}\n" for line in [header, *text.splitlines()])
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone
            _logger.debug("the traceback:", exc_info=(kind, error, trace))
            sys.stderr.write(said(lines))  # in one piece: other ranks may be writing too
    finally:
        # Even if reporting fails: an exception from here would leave the process running with its other threads.
        abort_job(status)


_MISTAKES = (UserError, MissingMandatoryValue)


def _status_of(error: BaseException) -> int:
    if comes_from(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, UserError):
        return error.exit_status
    return 2 if isinstance(error, _MISTAKES) else 1


def _interruption() -> str:
    """What a job prints that Ctrl-C has ended."""
    where = ""
    if _where_interrupted is not None:
        with contextlib.suppress(Exception):  # the job was interrupted in the middle of something
            where = f" {_where_interrupted()}"
    return f"interrupted{where}\n"


def _leave_failure(line: str) -> bool:
    """Add a line to the files in which ranks say that they failed: for people and scripts, and for the other ranks.

    Returns:
        Whether this rank is, as far as can be seen, the first of the run to fail.
    """
    if _log_dir is None:
        return True
    is_first = True
    for path in [_log_dir / FAILED_FILE, *([] if _run is None else [failed_file_of(_log_dir, _run)])]:
        with contextlib.suppress(OSError):  # a full disk: the others learn it from the launcher
            path.parent.mkdir(parents=True, exist_ok=True)
            # Paths may hold any bytes.
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=unless_planted) as file:
                is_first = file.tell() == 0 or path.name == FAILED_FILE  # that may be another run's
                file.write(line)
    return is_first


def _flush_output() -> None:
    """Flush the standard streams; what cannot be written (a full disk, a reader that is gone) is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _own_rank() -> tuple[int, int, int]:
    """Rank, number of ranks, rank on this machine."""
    try:
        info = detect_launch(os.environ)
    except LaunchError:
        return 0, 1, 0
    return info.rank, info.world_size, info.local_rank
