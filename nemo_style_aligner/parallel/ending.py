"""How a job ends: within a bounded time, on all ranks, with a status that says why."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import MissingMandatoryValue

from nemo_style_aligner.config import ConfigError
from nemo_style_aligner.parallel.detection import LaunchError, detect_launch, in_slurm_step, slurm_step
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE

# The process must be gone this long after an error or after the last line of `main`, whatever hangs.
_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 60.0


def shutdown(status: int = 0) -> None:
    """Wait for the other ranks, leave the process group, and see to it that the process then ends.

    Args:
        status: with which it ends where it does not end by itself.
    """
    import torch.distributed as dist

    from nemo_style_aligner.parallel import worlds

    worlds.end(status)
    if dist.is_initialized():
        worlds.barrier()
    # NCCL's groups, a forgotten thread or MPI_Finalize can hold up a process for ever: show where, and go.
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)  # in C; it knows no status but 1
    last_resort = threading.Timer(_EXIT_SECONDS - 1.0, os._exit, args=(status,))
    last_resort.daemon = True
    last_resort.start()
    if dist.is_initialized():
        dist.destroy_process_group()
    worlds.leave()
    sys.stdout.flush()
    sys.stderr.flush()


def install_excepthook() -> None:
    """From now on an exception that nobody catches ends the whole job, not only this rank."""
    sys.excepthook = _report_and_abort


def abort_job(exit_code: int = 1) -> NoReturn:
    """End this process at once and the other ranks within seconds, skipping what could hang on the way.

    Under MPI by ``MPI_Abort``; under srun by cancelling the step, as srun does of itself only with
    ``--kill-on-bad-exit``; torchrun, mpirun and the supervisor end the others when they see this one gone.
    A step that is to be started again (`EXIT_REQUEUE`) is not cancelled: that would change its status.
    """
    last_resort = threading.Timer(_ABORT_SECONDS, os._exit, args=(exit_code,))
    last_resort.daemon = True
    last_resort.start()
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(exit_code)
    if exit_code != EXIT_REQUEUE and in_slurm_step(os.environ) and shutil.which("scancel"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", slurm_step(os.environ)], timeout=_ABORT_SECONDS / 2, check=False)
    os._exit(exit_code)


def fail_job(error: BaseException) -> NoReturn:
    """End the whole job, from any thread, as an error does that nobody catches in the main thread."""
    _report_and_abort(type(error), error, error.__traceback__)


def _report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    rank, size = _own_rank()
    if issubclass(kind, (ConfigError, HydraException, MissingMandatoryValue)):
        # All ranks find the same mistake in the config: rank 0 says it, the others only if rank 0 has not
        # ended the job by then.
        if rank > 0:
            time.sleep(3.0)
        print(f"error: {error}", file=sys.stderr, flush=True)
        abort_job(2)
    if issubclass(kind, LaunchError):
        text = f"{kind.__name__}: {error}"
    else:
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    header = f"rank {rank} of {size} on {socket.gethostname()} (process {os.getpid()}) failed; ending the job"
    lines = "".join(f"[rank {rank}] {line}\n" for line in [header, *text.splitlines()])
    sys.stderr.write(lines)  # in one piece: other ranks may be writing too
    abort_job(1)


def _own_rank() -> tuple[int, int]:
    try:
        info = detect_launch(os.environ)
    except LaunchError:
        return 0, 1
    return info.rank, info.world_size
