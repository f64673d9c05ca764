"""How a rank joins its job: torch.distributed, whatever launcher started it, and its threads, device and network."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_style_aligner.engine.parallel.allocator import keep_freed_memory
from nemo_style_aligner.engine.parallel.detection import LOOPBACK, LaunchError, LaunchInfo, integer
from nemo_style_aligner.engine.parallel.machine import (
    available_cores,
    free_port,
    interface_of,
    is_on_one_machine,
    machine_cores,
    outgoing_address,
    raise_limit_of_open_files,
)
from nemo_style_aligner.errors import excepthook_kept
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, cache_folder, own_folder, temporary_base
from nemo_style_aligner.trainer.launch.ending import failures
from nemo_style_aligner.trainer.launch.over_mpi import place_to_meet
from nemo_style_aligner.wording import counted

if TYPE_CHECKING:
    from torch.distributed import Store

_logger = logging.getLogger(__name__)


def initialize(info: LaunchInfo, timeout_minutes: float, apart: Mapping[str, int] | None = None) -> None:
    """Set up this process: torch.distributed (NCCL on GPUs, gloo on CPUs), its threads and its memory.

    Afterwards the environment holds torchrun's variables, whatever the launcher was, for libraries that read them.

    Args:
        info: see `detect_launch`.
        timeout_minutes: ``trainer.distributed_timeout_minutes``.
        apart: ranks that have one thing to do (`roles.ranks_apart`).

    Raises:
        LaunchError: the ranks cannot find each other, or have no device.
    """
    raise_limit_of_open_files()
    if info.master_addr is None:
        alone, seconds = info.world_size == 1, 60 * timeout_minutes
        address, port = (LOOPBACK, free_port()) if alone else place_to_meet(info.rank, info.master_port, seconds)
        info = dataclasses.replace(info, master_addr=address, master_port=port)
    if info.launcher == "mpirun":
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # an engine's ranks that wait in MPI would spin
    os.environ.update(info.environment())
    _share_cores(info)

    import torch
    import torch.distributed as dist

    from nemo_style_aligner.engine.parallel.groups import meet_over_gloo, set_up_cuda_arithmetic
    from nemo_style_aligner.trainer.launch import roles
    from nemo_style_aligner.trainer.launch.meeting import meet

    if torch.cuda.is_available():
        torch.cuda.set_device(_device_index(info, torch.cuda.device_count()))
        backend = "nccl"
        _use_trees_for_sums_only()
        set_up_cuda_arithmetic()
        _keep_torchs_compiled_code()
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
    failures.run = store.get("run").decode()
    meet_over_gloo(store, info.rank, info.world_size)
    with excepthook_kept():
        if apart:
            roles.initialize(store, info.rank, info.world_size, apart, backend, timeout)
        else:
            dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    _logger.info(
        "%s, started by %s, %s, %s each",
        counted(info.world_size, "ranks"),
        info.launcher,
        backend,
        counted(torch.get_num_threads(), "threads"),
    )


_own_folders: list[object] = []  # removed when this process ends


def _keep_torchs_compiled_code() -> None:
    """Choose where torch's compiler, which functions of Megatron and Transformer Engine may call, keeps what it runs.

    Anybody can make its default, ``/tmp/torchinductor_<user>``, beforehand.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    try:
        folder = os.environ.setdefault(variable, str(cache_folder("torch")))
        own_folder(folder, strict=True, make=0o700)
    except (UntrustedPathError, RuntimeError, OSError) as error:
        _logger.warning("torch's compiled code is kept for this start only: %s (%s)", error, variable)
        _own_folders.append(own := tempfile.TemporaryDirectory(prefix="torch_", dir=temporary_base()))
        os.environ[variable] = own.name


def bind_address(host: str | None) -> str:
    """The address on which a service of this job listens: ``host`` if given (keys ``host`` of the configs).

    Otherwise 127.0.0.1, which only this machine reaches, unless the job runs in a cluster, where its clients
    are on other machines.
    """
    if host is not None:
        return host
    in_cluster = "SLURM_JOB_ID" in os.environ or not is_on_one_machine()
    return "0.0.0.0" if in_cluster else LOOPBACK


def _share_cores(info: LaunchInfo) -> None:
    """Divide this machine's cores among its ranks, unless the user has set OMP_NUM_THREADS."""
    given = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 of its own accord where there are several ranks and the variable is not set.
    if given is not None and not (info.launcher == "torchrun" and given == "1" and info.local_world_size > 1):
        return
    if info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in os.environ:
        threads = integer(os.environ, "SLURM_CPUS_PER_TASK")
    elif info.launcher in ("mpirun", "slurm"):  # these may have bound each rank to its share already
        threads = min(available_cores(), max(1, machine_cores() // info.local_world_size))
    else:
        threads = max(1, available_cores() // info.local_world_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that load their thread pool later

    import torch

    torch.set_num_threads(threads)


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
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if address is None:  # On rank 0's own machine its name may mean loopback, too: the way back from the others counts.
        others = (store.get(f"address/{rank}").decode() for rank in range(info.world_size))
        address = next(filter(None, map(outgoing_address, filter(None, others))), None)
    interface = interface_of(address) if address is not None else None
    if interface is None:
        raise LaunchError(
            f"{socket.gethostname()} has no route to the other machines: correct /etc/hosts, or set GLOO_SOCKET_IFNAME "
            "to the network interface that the ranks are to use"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    _logger.info("gloo uses %s", interface)


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
