"""How a job ends: within a bounded time, on all ranks, with a status that says why."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from omegaconf.errors import MissingMandatoryValue

from nemo_style_aligner.engine.parallel.detection import LaunchError, detect_launch, in_slurm_step
from nemo_style_aligner.errors import OtherRankError, UserError, comes_from
from nemo_style_aligner.guard.masking import masked_text
from nemo_style_aligner.guard.trusted_paths import unless_planted
from nemo_style_aligner.trainer.config.section_names import translated
from nemo_style_aligner.wording import spelt

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a job that Ctrl-C has ended."""

FAILED_FILE = "failed"
"""File in the log directory in which failing ranks leave a line: a SIGTERM to the others is then no request to stop."""

_logger = logging.getLogger(__name__)

# The process must be gone this long after an error or after the last line of `main`, whatever hangs.
_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 60.0
# Delays before an error that several ranks may have is reported by the first rank of a machine, and by any other.
_FIRST_RANK_SECONDS = 3.0
_ANY_RANK_SECONDS = 10.0
_MISTAKES = (UserError, MissingMandatoryValue)


class Failures:
    """Where this job's ranks say that they have failed: for people, for scripts, and for the other ranks.

    Attributes:
        run: names this start of the job, the same on all its ranks and unique to it; empty until they have met. Ranks
            heed lines of their own run: a second job that was started in the directory by mistake, or a late rank of a
            job that was killed, writes there as well.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self.run = ""

    def leave_in(self, log_dir: Path, *, remove: bool) -> None:
        """From now on a rank that fails leaves a line in `FAILED_FILE`; ``remove`` deletes an earlier run's file."""
        self._path = log_dir / FAILED_FILE
        if remove:
            self._path.unlink(missing_ok=True)

    def first(self) -> str | None:
        """The line of the run's first rank that has failed, as far as can be seen; any run's, before it has a name."""
        with contextlib.suppress(OSError):
            if self._path is not None:
                lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
                return next((line for line in lines if self._marker() in line), None)
        return None

    def leave(self, rank: int, error: str) -> bool:
        """Add this rank's line. Returns whether it is, as far as can be seen, the first of the run to fail."""
        if self._path is None:
            return True
        is_first = not self.run or self.first() is None
        with contextlib.suppress(OSError):  # a full disk: the others learn it from the launcher
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Paths may hold any bytes.
            with open(self._path, "a", encoding="utf-8", errors="backslashreplace", opener=unless_planted) as file:
                file.write(masked_text(translated(f"rank {rank} on {socket.gethostname()}{self._marker()}: {error}\n")))
        return is_first

    def _marker(self) -> str:
        return f" in run {self.run}" if self.run else ""


failures = Failures()
"""This process's."""


def shutdown(status: int = 0) -> None:
    """Wait for the other ranks, leave the process group, and see to it that the process then ends.

    Args:
        status: exit status of a process that does not end by itself and is ended here.
    """
    import torch.distributed as dist

    from nemo_style_aligner.trainer.launch import roles

    roles.end(status)
    if dist.is_initialized():
        roles.barrier()
    # NCCL's groups, a forgotten thread or an engine's MPI can hold up a process for ever: show where, and go.
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)  # in C, needs no GIL, but its status is always 1
    _exit_later(_EXIT_SECONDS - 1.0, status)
    if dist.is_initialized():
        dist.destroy_process_group()
    roles.leave()
    # What a loop has frozen (`gc.freeze`) would outlive the interpreter; nanobind, as in Triton, reports it as leaked.
    gc.unfreeze()
    _flush_output()


def install_excepthook() -> None:
    """From now on an uncaught exception ends the whole job, not only this rank.

    So does Ctrl-C, with a line in place of a traceback; a second one ends this process at once, whatever it waits for.
    """
    sys.excepthook = _report_and_abort
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored (``&``)
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if frame is not None and frame.f_code is _report_and_abort.__code__:
        # The end of another rank made this one fail before it handled its own Ctrl-C. Nobody would catch an exception.
        _report_and_abort(KeyboardInterrupt, KeyboardInterrupt(), None)
    raise KeyboardInterrupt


def abort_job(exit_code: int) -> NoReturn:
    """End this process at once and the other ranks within seconds, skipping what could hang on the way.

    torchrun, mpirun and the supervisor end the others when they see this one gone. Under srun, which need not, they end
    by themselves: their watchdogs look for this rank's line in `FAILED_FILE`.
    """
    _exit_later(_ABORT_SECONDS, exit_code)
    _flush_output()
    if exit_code == EXIT_INTERRUPTED and threading.current_thread() is threading.main_thread():
        # Only if it dies of SIGINT itself does a shell end its loops; it reports the status as `EXIT_INTERRUPTED`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(exit_code)


def fail_job(error: BaseException) -> NoReturn:
    """End the whole job, from any thread, as an uncaught error in the main thread does."""
    _report_and_abort(type(error), error, error.__traceback__)


def _report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    status = _status_of(error)
    try:
        rank, size, local_rank = _own_rank()
        is_first = failures.leave(rank, f"{kind.__name__}: {error}")
        may_be_common = isinstance(error, (*_MISTAKES, OtherRankError)) and not isinstance(error, LaunchError)
        is_told_elsewhere = rank > 0 if may_be_common else not is_first
        if is_told_elsewhere and status != EXIT_INTERRUPTED:
            # All ranks find the same mistake, hear of it, or lose contact with the rank that failed. Rank 0, or the
            # first to fail, says it at once. If that does not end the job in time, the first rank of each machine
            # says what it found there, which may differ, and later any other rank.
            time.sleep(_FIRST_RANK_SECONDS if local_rank == 0 else _ANY_RANK_SECONDS)
        if status == EXIT_INTERRUPTED:
            lines = "interrupted\n" if rank == 0 else ""
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
            sys.stderr.write(spelt(masked_text(translated(lines))))  # in one piece: other ranks may be writing too
    finally:
        # Even if reporting fails: an exception from here would leave the process running with its other threads.
        abort_job(status)


def _status_of(error: BaseException) -> int:
    if comes_from(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, UserError):
        return error.exit_status
    return 2 if isinstance(error, _MISTAKES) else 1


def _exit_later(seconds: float, status: int) -> None:
    """End the process after so many seconds, if it is still there."""
    last_resort = threading.Timer(seconds, os._exit, args=(status,))
    last_resort.daemon = True
    last_resort.start()


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
