"""Which launcher started this process, and its place in the job: read from the environment."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Literal

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.kinds import LARGEST_PORT

Launcher = Literal["mpirun", "slurm", "torchrun", "environment", "supervisor", "python"]

SUPERVISOR_PID = "NEMO_STYLE_ALIGNER_SUPERVISOR_PID"
"""Environment variable of a rank that a supervisor started: the supervisor's process id."""

# What launchers tell ranks: what names begin with, and torchrun's whole names.
_OF_LAUNCHERS = ("OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_")
_OF_RANKS = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    )
)

# Step ids from here on are Slurm's own: the batch script, an interactive shell.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

LOOPBACK = "127.0.0.1"

# Where ranks meet if the launcher chooses no port: below the range from which the system takes its own.
_FIRST_PORT, _PORTS = 15000, 15000


class LaunchError(UserError, RuntimeError):
    """The environment in which the job was started does not fit; the message says what to change."""

    exit_status = 1


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
    """This process's place in the job.

    ``master_addr`` and ``master_port`` say where rank 0 waits for the others; they are ``None`` for a process that was
    started alone, and where mpirun has started ranks on several machines and nobody has said which has rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: Launcher
    master_addr: str | None = None
    master_port: int | None = None

    def environment(self) -> dict[str, str]:
        """The same as torchrun's environment variables, once it is known where rank 0 waits."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": str(self.master_addr),
            "MASTER_PORT": str(self.master_port),
        }


def outside_of_job(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank, for a process that is none: without what would make it join the job."""
    hidden = {SUPERVISOR_PID, *_OF_RANKS}
    return {name: value for name, value in env.items() if name not in hidden and not name.startswith(_OF_LAUNCHERS)}


def detect_launch(env: Mapping[str, str]) -> LaunchInfo:
    """Find out from the environment how this process was started.

    Launchers can be nested, and each leaves its variables to its children. torchrun (which
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
        return _from_mpirun(env)
    if in_slurm_step(env):
        return _from_slurm(env)
    if "PMI_RANK" in env:  # `srun --mpi=pmi2` sets it as well
        raise LaunchError("started by the launcher of another MPI: use Open MPI's mpirun, torchrun or srun")
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env, "environment")
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


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one of several tasks.

    A batch script and the shell of ``salloc`` have most of Slurm's variables too, but are no such task. Neither is a
    command typed into a shell that ``srun`` started as a step of one task (``srun --pty bash``).
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return False
    return integer(env, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP and integer(env, "SLURM_STEP_NUM_TASKS") > 1


def _from_mpirun(env: Mapping[str, str]) -> LaunchInfo:
    rank, size, local_rank, local_size = (
        integer(env, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # Each mpirun has a name of its own, as jobs may run side by side: in containers of one machine that share a network
    # and a host name, too, where its server's port differs.
    servers = [value for name, value in env.items() if name.startswith("PMIX_SERVER_URI")]
    address, name = LOOPBACK, max(servers, default=env.get("PMIX_NAMESPACE", ""))
    if local_size < size:
        nodelist = env.get("SLURM_JOB_NODELIST")  # of the allocation; mpirun fills its nodes in their order
        named = env.get("MASTER_ADDR") or (first_host(nodelist) if nodelist else None)
        if named is None:  # `launch.over_mpi` asks
            port = master_port(env) if "MASTER_PORT" in env else None
            return LaunchInfo(rank, size, local_rank, local_size, "mpirun", None, port)
        address, name = named, env.get("PMIX_NAMESPACE", "")
    port = _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS
    return LaunchInfo(rank, size, local_rank, local_size, "mpirun", address, master_port(env, port))


def _from_slurm(env: Mapping[str, str]) -> LaunchInfo:
    size = integer(env, "SLURM_STEP_NUM_TASKS")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise LaunchError("SLURM_STEP_NODELIST is not set: start the job with srun")
    local_counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = integer(env, "SLURM_NODEID", 0)
    # Steps of one job may run side by side on the same hosts, so the port depends on job and step.
    job, step = integer(env, "SLURM_JOB_ID"), integer(env, "SLURM_STEP_ID")
    port = _FIRST_PORT + (job * 131 + step) % _PORTS
    # Clusters may set it to a name in their fast network. A step on some of the job's nodes inherits it, but has
    # another rank 0.
    is_whole_job = "SLURM_HET_SIZE" not in env and nodelist == env.get("SLURM_JOB_NODELIST")
    named = env.get("MASTER_ADDR") if is_whole_job else None
    local_size = local_counts[node] if node < len(local_counts) else local_counts[-1]
    return LaunchInfo(
        rank=integer(env, "SLURM_PROCID"),
        world_size=size,
        local_rank=integer(env, "SLURM_LOCALID", 0),
        local_world_size=local_size,
        launcher="slurm",
        master_addr=LOOPBACK if local_size == size else named or first_host(nodelist),
        master_port=master_port(env, port),
    )


def _from_torchrun(env: Mapping[str, str], launcher: Launcher) -> LaunchInfo:
    world_size = integer(env, "WORLD_SIZE")
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in env]
    if world_size > 1 and missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE={world_size} are set, but not {' and '.join(missing)}: set LOCAL_RANK to the "
            "rank's number on its machine, and LOCAL_WORLD_SIZE to the number of ranks on it"
        )
    if world_size > 1 and not env.get("MASTER_ADDR"):
        raise LaunchError(f"RANK and WORLD_SIZE={world_size} are set, but not MASTER_ADDR and MASTER_PORT: set them")
    return LaunchInfo(
        rank=integer(env, "RANK"),
        world_size=world_size,
        local_rank=integer(env, "LOCAL_RANK", 0),
        local_world_size=integer(env, "LOCAL_WORLD_SIZE", world_size),
        launcher=launcher,
        master_addr=env.get("MASTER_ADDR"),
        master_port=master_port(env) if env.get("MASTER_ADDR") else None,
    )


def master_port(env: Mapping[str, str], default: int | None = None) -> int:
    """The port in ``MASTER_PORT``; LaunchError if it is none, or missing without a ``default``."""
    port = integer(env, "MASTER_PORT", default)
    if port > LARGEST_PORT:
        raise LaunchError(f"the environment variable MASTER_PORT is {port}: ports go up to {LARGEST_PORT}")
    return port


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in variable ``name``; LaunchError if it is not a number, or missing without a ``default``."""
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise LaunchError(f"the environment variable {name} is {value!r}, expected a number")
    return int(value)
