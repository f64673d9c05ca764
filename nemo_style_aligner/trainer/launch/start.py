"""How a job starts and how it ends, whatever started it.

The same script runs under ``mpirun``, ``srun``, ``torchrun`` and plain ``python``. `detect_launch` reads
from the environment which of them started this process, `initialize` sets up torch.distributed
accordingly, and `job` wraps an entry script's ``main(config)`` in all of it. A rank that raises ends the whole
job within seconds (`install_excepthook`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra.utils

from nemo_style_aligner.engine.parallel.detection import LaunchInfo, detect_launch
from nemo_style_aligner.trainer.config.command_line import Composed, compose
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import ConfigError, check_config, log_directory, make_paths_absolute
from nemo_style_aligner.trainer.config.schema import JOBS, PPOActor
from nemo_style_aligner.trainer.config.section_names import speak_as
from nemo_style_aligner.trainer.launch.ending import FAILED_FILE, abort_job, failures, install_excepthook, shutdown
from nemo_style_aligner.trainer.launch.initialization import initialize
from nemo_style_aligner.trainer.launch.stop_signals import (
    EXIT_REQUEUE,
    REQUEUE_FILE,
    STOPPED_EARLY,
    ignore,
    stops,
    write_requeue_file,
)
from nemo_style_aligner.trainer.launch.supervisor import end_with_supervisor, signal_when_parent_dies, supervise
from nemo_style_aligner.trainer.telemetry.log_lines import configure_logging
from nemo_style_aligner.wording import spelt

_logger = logging.getLogger(__name__)

_WITH_ARCHIVES = "nemo_style_aligner.trainer.jobs.first_archives.with_archives"  # by name, as ``check`` of `job`
_FAILURE_SECONDS = 1.0  # until a rank's failure can be seen by the others, on a shared file system


def check_world_size(info: LaunchInfo, devices: int, num_nodes: int) -> None:
    """Compare what the launcher started with ``trainer.devices`` x ``trainer.num_nodes``.

    Raises:
        ConfigError: they differ. A single rank counts as started without a launcher:
            the supervisor then starts this machine's ranks, but it cannot start those of several nodes.
    """
    wanted = devices * num_nodes
    asked = f"trainer.devices={devices} x trainer.num_nodes={num_nodes}"
    if info.world_size > 1 and info.world_size != wanted:
        raise ConfigError(
            f"{info.world_size} ranks were started ({info.launcher}), but {asked} asks for {wanted}: start as many, "
            f"or set trainer.devices to the number of ranks per node and trainer.num_nodes to that of nodes"
        )
    if info.world_size == 1 and num_nodes > 1:
        raise ConfigError(
            f"{asked} needs a launcher that starts {wanted} ranks over {num_nodes} nodes (srun, mpirun or torchrun); "
            f"this process was started alone. On one machine set trainer.num_nodes=1"
        )


def job(
    name: str, *, check: str | None, is_service: bool = False
) -> Callable[[Callable[[Any], int | None]], Callable[[], None]]:
    """Make ``main(config)`` of an entry script the job whose config is ``conf/<name>.yaml``::

        @job("gpt_ppo_critic", check="nemo_style_aligner.trainer.jobs.config_checks.check_job", is_service=True)
        def main(config: Critic) -> None:
            ...

        if __name__ == "__main__":
            main()

    Reads and checks the config and the command line's overrides, starts this machine's ranks when nobody
    else did, sets up torch.distributed in them, runs ``main`` on every rank, and ends the job with the status that
    ``main`` returns (None is 0; the same on every rank), with 2 for a mistake in the config, with
    `EXIT_REQUEUE` when it was stopped before it had begun, and with 1 for other errors (docs/jobs.md has them all).
    Writes nothing but the files for an early stop and a failed rank, and does not change the working directory
    (as hydra would).

    Args:
        name: of the config.
        check: dotted name of a function of (``name``, config, number of ranks) that raises `ConfigError` for settings
            that cannot work; None for no checks. Ranks call it before they look for each other. A name, because its
            module takes seconds to import, and the process that only starts ranks does not need it.
        is_service: SIGTERM is this job's regular end, with status 0 even while the job is starting.
    """

    def decorate(main: Callable[[Any], int | None]) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            install_excepthook()
            end_with_supervisor()
            try:
                composed = compose(name, sys.modules[main.__module__].__doc__ or "")
                status = _run_job(name, check, main, composed, is_service) if composed is not None else 0
            except SystemExit as end:
                if end.code not in (None, 0):
                    if isinstance(end.code, str):
                        with contextlib.suppress(OSError, ValueError):
                            print(spelt(end.code), file=sys.stderr)
                    abort_job(end.code if isinstance(end.code, int) else 1)
                raise
            if status:
                sys.exit(status)

        return run

    return decorate


def _end_start(info: LaunchInfo, log_dir: Path, is_service: bool, number: signal.Signals) -> NoReturn:
    """End a rank that got a stop signal before there was anything to save."""
    if info.world_size > 1:
        time.sleep(_FAILURE_SECONDS)
        if (log_dir / FAILED_FILE).exists():
            abort_job(1)  # the launcher ends this rank because another has failed
    _logger.warning("stopped by %s before there was anything to save", number.name)
    if is_service and number == signal.SIGTERM:  # its regular end
        abort_job(0)
    if info.rank == 0:
        write_requeue_file(log_dir, "stopped before there was anything to save")
    abort_job(EXIT_REQUEUE)


def _run_job(
    name: str, check: str | None, main: Callable[[Any], int | None], composed: Composed, is_service: bool
) -> int:
    speak_as(name)
    info = detect_launch(os.environ)
    configure_logging(info.rank)
    notes = [*composed.notes, *check_config(composed.cfg, name)]
    make_paths_absolute(composed.cfg)
    config = JOBS[name].sections.read(composed.cfg, composed.chosen)
    trainer, exp_manager = config.trainer, config.exp_manager
    _use_one_queue(config)
    check_world_size(info, trainer.devices, trainer.num_nodes)
    configure_logging(info.rank, getattr(logging, exp_manager.log_level.upper()), exp_manager.log_format)
    if info.world_size == 1 and trainer.devices > 1:
        status = supervise(trainer.devices)
        ignore()
        if status != EXIT_REQUEUE:
            sys.exit(status)
        return status
    _logger.info("starting %s: loading torch and megatron-core", name)
    if check is not None:
        # This imports nearly all that a rank needs. It stays, and Python's garbage collector would scan it again and
        # again: a fifth of the time until the job begins.
        gc.disable()
        check_job = hydra.utils.get_method(check)
        gc.freeze()
        gc.enable()
        check_job(name, config, trainer.devices * trainer.num_nodes)
    for note in notes:
        _logger.info(note)
    log_dir = log_directory(exp_manager)
    failures.leave_in(log_dir, remove=info.rank == 0)
    if info.rank == 0:
        (log_dir / REQUEUE_FILE).unlink(missing_ok=True)
    stops.install(functools.partial(_end_start, info, log_dir, is_service))
    if info.launcher in ("mpirun", "torchrun"):  # killed, they leave their ranks, which nobody would end then
        signal_when_parent_dies(signal.SIGTERM)
    from nemo_style_aligner.trainer.launch.roles import ranks_apart  # not before: it imports torch

    apart = ranks_apart(config.trainer.ppo) if isinstance(config, PPOActor) else {}
    initialize(info, trainer.distributed_timeout_minutes, apart)
    if check is not None:
        config = hydra.utils.get_method(_WITH_ARCHIVES)(name, config)
    status = main(config) or 0
    if status == EXIT_REQUEUE and info.rank == 0:
        write_requeue_file(log_dir, STOPPED_EARLY)
    shutdown(status)
    ignore()
    return status


def _use_one_queue(config: JobConfig) -> None:
    """Set what megatron-core's overlap of tensor-parallel communication with GEMMs relies on, before CUDA starts."""
    sizes = (config.get(f"{part}model.tensor_model_parallel_size") for part in ("", "critic."))
    if any(isinstance(size, int) and size > 1 for size in sizes):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
