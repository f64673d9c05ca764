"""How jobs start and end: detection, the supervisor, mpirun, torchrun, and what happens when a rank fails."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from nemo_style_aligner.engine.parallel import groups, machine
from nemo_style_aligner.engine.parallel.detection import (
    SUPERVISOR_PID,
    LaunchError,
    LaunchInfo,
    detect_launch,
    first_host,
    tasks_per_node,
)
from nemo_style_aligner.engine.parallel.groups import meet_over_gloo
from nemo_style_aligner.engine.parallel.machine import (
    _cgroup_cpusets,
    _cgroup_quotas,
    _cgroup_rooms,
    available_cores,
    computes_in_bf16,
    free_port,
    interface_of,
    machine_cores,
    outgoing_address,
    own_address,
)
from nemo_style_aligner.places import CONFIGS
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.jobs.log_lock import LOCK_FILE, hold_log_directory
from nemo_style_aligner.trainer.launch import initialization, meeting
from nemo_style_aligner.trainer.launch.initialization import _stay_on_loopback, bind_address
from nemo_style_aligner.trainer.launch.meeting import meet
from nemo_style_aligner.trainer.launch.over_mpi import Interface, place_to_meet, reached
from nemo_style_aligner.trainer.launch.start import check_world_size
from nemo_style_aligner.trainer.launch.stop_signals import REQUEUE_FILE, write_requeue_file
from nemo_style_aligner.trainer.launch.supervisor import rank_environment

# ---- detection ----------------------------------------------------------------------------------

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
BATCH_SCRIPT = {  # what sbatch gives to the script itself
    "SLURM_JOB_ID": "100",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
BY_HAND = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}

MPIRUN_INFO = LaunchInfo(3, 4, 1, 2, "mpirun", "host", 29500)
SLURM_INFO = LaunchInfo(2, 3, 0, 1, "slurm", "node2", 15000 + (100 * 131 + 2) % 15000)
TORCHRUN_INFO = LaunchInfo(1, 2, 1, 2, "torchrun", "host", 29500)
ALONE = LaunchInfo(0, 1, 0, 1, "python")

DETECTION = {
    "nothing": ({}, ALONE),
    "mpirun": (OMPI, MPIRUN_INFO),
    "mpirun inside an sbatch script": (BATCH_SCRIPT | OMPI, MPIRUN_INFO),
    "mpirun whose daemons srun started": (STEP | OMPI, MPIRUN_INFO),
    "srun --mpi=pmi2": (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}, SLURM_INFO),
    "srun": (STEP, SLURM_INFO),
    "srun, port chosen by the user": (
        STEP | {"MASTER_PORT": "4444"},
        LaunchInfo(2, 3, 0, 1, "slurm", "node2", 4444),
    ),
    "srun on all of the job's nodes, rank 0's address by its other name": (
        STEP | {"SLURM_JOB_NODELIST": "node[2-3]", "MASTER_ADDR": "node2i"},
        dataclasses.replace(SLURM_INFO, master_addr="node2i"),
    ),
    "srun on some of the job's nodes, which rank 0 of another step may have set": (
        STEP | {"MASTER_ADDR": "node1"},
        SLURM_INFO,
    ),
    "the sbatch script itself": (BATCH_SCRIPT, ALONE),
    "the sbatch script, as the special step": (STEP | {"SLURM_STEP_ID": "4294967291"}, ALONE),
    "srun --pty bash": (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ALONE),
    "torchrun": (TORCHRUN, TORCHRUN_INFO),
    "torchrun inside a Slurm step": (STEP | TORCHRUN, TORCHRUN_INFO),
    "torchrun inside mpirun": (OMPI | TORCHRUN, TORCHRUN_INFO),
    "torchrun's variables by hand": (BY_HAND, dataclasses.replace(TORCHRUN_INFO, launcher="environment")),
    "old torchrun variables inside mpirun": (OMPI | BY_HAND, MPIRUN_INFO),
    "a supervisor's rank inside an sbatch script": (
        BATCH_SCRIPT | BY_HAND | {SUPERVISOR_PID: "1"},
        LaunchInfo(1, 2, 1, 2, "supervisor", "host", 29500),
    ),
}


@pytest.mark.parametrize("case", DETECTION)
def test_detection(case: str) -> None:
    env, expected = DETECTION[case]
    assert detect_launch(env) == expected


def test_incomplete_variables_are_named() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        detect_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(LaunchError, match="not LOCAL_WORLD_SIZE: set"):  # these may be two machines
        detect_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_SIZE"):
        detect_launch({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(LaunchError, match="another MPI: use Open MPI's mpirun, torchrun or srun"):
        detect_launch({"PMI_RANK": "1", "PMI_SIZE": "2"})


@pytest.mark.parametrize(
    ("launcher", "given", "bound_to", "expected"),
    [
        ("torchrun", "1", 8, 4), ("torchrun", "2", 8, 2), ("torchrun", None, 4, 2),
        ("mpirun", "1", 8, 1), ("mpirun", None, 8, 4), ("mpirun", None, 4, 4), ("mpirun", None, 1, 1),
    ],
)  # fmt: skip
def test_threads_of_a_rank(
    launcher: Any, given: str | None, bound_to: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two on a machine of 8 cores. MPI's launchers may have bound each to its own."""
    monkeypatch.setattr(initialization, "machine_cores", lambda: 8)
    monkeypatch.setattr(initialization, "available_cores", lambda: bound_to)
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    initialization._share_cores(LaunchInfo(0, 2, 0, 2, launcher))
    assert os.environ["OMP_NUM_THREADS"] == str(expected)


@pytest.mark.long
def test_products_of_fp32_are_computed_in_fp32() -> None:
    """In NVIDIA's images, too; and torch has no word to say about the names that this goes by."""
    code = (
        "import torch; before = torch.backends.cuda.matmul.fp32_precision\n"
        "from nemo_style_aligner.engine.parallel.groups import set_up_cuda_arithmetic\n"
        "import warnings; warnings.simplefilter('error'); set_up_cuda_arithmetic()\n"
        "warnings.simplefilter('ignore')  # torch 2.9 warns of this question\n"
        "print(before, torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision())"
    )
    env = CLEAN | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, check=True)
    assert run.stdout.split() == ["tf32", "ieee", "highest"]


def test_ranks_of_mpirun_know_where_to_meet() -> None:
    alone = OMPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-1@1"}
    del alone["MASTER_PORT"]
    infos = [detect_launch(alone), detect_launch(alone | {"PMIX_NAMESPACE": "prterun-vm-2@1"})]
    assert [info.master_addr for info in infos] == ["127.0.0.1"] * 2  # of one machine: whatever MASTER_ADDR says
    assert infos[0].master_port != infos[1].master_port  # two may run side by side
    over_two = {name: value for name, value in OMPI.items() if not name.startswith("MASTER_")}
    assert detect_launch(BATCH_SCRIPT | over_two).master_addr == "node1"
    asked = detect_launch(over_two)  # of MPI, once the ranks know that they have to meet
    assert (asked.master_addr, asked.master_port, asked.world_size) == (None, None, 4)
    assert detect_launch(over_two | {"MASTER_PORT": "29500"}).master_port == 29500


def test_components_of_a_heterogeneous_job_get_different_ports() -> None:
    other = detect_launch(STEP | {"SLURM_JOB_ID": "101"})
    assert other.master_port != SLURM_INFO.master_port


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node[03-05,9],login", "node03"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]node[7,9]", "rack2node7"),
        ("gpu-a[1]", "gpu-a1"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node("two")


def test_world_size_check() -> None:
    check_world_size(MPIRUN_INFO, devices=2, num_nodes=2)
    check_world_size(ALONE, devices=4, num_nodes=1)  # the supervisor's case
    with pytest.raises(ConfigError, match=r"4 ranks were started \(mpirun\).*trainer.devices=8 x trainer.num_nodes=1"):
        check_world_size(MPIRUN_INFO, devices=8, num_nodes=1)
    with pytest.raises(ConfigError, match="needs a launcher"):
        check_world_size(ALONE, devices=4, num_nodes=2)


def test_bind_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert bind_address(None) == "127.0.0.1"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert bind_address(None) == "0.0.0.0"
    monkeypatch.delenv("SLURM_JOB_ID")
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert bind_address(None) == "0.0.0.0"
    assert bind_address("10.0.0.1") == "10.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert bind_address(None) == "127.0.0.1"


def test_ranks_of_the_supervisor_know_nothing_of_an_outer_launcher() -> None:
    place = LaunchInfo(1, 2, 1, 2, "supervisor", "127.0.0.1", 29500)
    child = rank_environment(OMPI | {"PMIX_RANK": "0", "HOME": "/h", "OMP_NUM_THREADS": "3"}, place)
    assert detect_launch(child) == place
    assert "PMIX_RANK" not in child and child["HOME"] == "/h" and child["OMP_NUM_THREADS"] == "3"


def test_ranks_of_one_machine_talk_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes: jobs on GPUs have gloo groups, too."""

    def interfaces(info: LaunchInfo, **given: str) -> list[str | None]:
        environment = dict(given)
        monkeypatch.setattr(os, "environ", environment)
        _stay_on_loopback(info)
        return [environment.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")]

    assert interfaces(ALONE) == ["lo", "lo"]
    assert interfaces(TORCHRUN_INFO, NCCL_SOCKET_IFNAME="eth1") == ["lo", "eth1"]
    assert interfaces(MPIRUN_INFO) == [None, None]


def test_over_several_machines_gloo_listens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the machine's own name, by which gloo goes. So does the work queue."""

    def interface(info: LaunchInfo, **given: str) -> str | None:
        environment = dict(given)
        monkeypatch.setattr(os, "environ", environment)
        store = HashStore()
        store.set(f"address/{1 - info.rank}", address)
        initialization._name_interface_for_gloo(info, store)
        assert own_address() == address
        return environment.get("GLOO_SOCKET_IFNAME")

    address = outgoing_address()
    if address is None:
        pytest.skip("this machine has no route to others")
    own = interface_of(address)
    over_two = LaunchInfo(0, 2, 0, 1, "environment", address, 1)
    assert own is not None and interface(over_two) == own
    assert interface(dataclasses.replace(over_two, master_addr="127.0.1.1")) == own  # as rank 0 sees its own name
    assert interface(over_two, GLOO_SOCKET_IFNAME="ib0") == "ib0"
    assert interface(ALONE) is None
    monkeypatch.setattr(machine, "outgoing_address", lambda *_: "192.0.2.1")  # the default route's
    assert interface(over_two) == own
    monkeypatch.setattr(initialization, "outgoing_address", lambda *_: None)
    with pytest.raises(LaunchError, match="correct /etc/hosts, or set GLOO_SOCKET_IFNAME"):
        interface(over_two)
    monkeypatch.setattr(machine, "outgoing_address", lambda *_: None)
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME.*trainer\.ppo\.batch_iterator\.host"):
        own_address()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f\nflags\t\t: fpu avx2 avx512f", False),
        ("model name\t: x\nflags\t\t: avx512_bf16 fpu", True),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("cpu\t\t: POWER9", False),
        (None, False),
    ],
)
def test_which_processors_compute_in_bf16(tmp_path: Path, lines: str | None, expected: bool) -> None:
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(lines)
    assert computes_in_bf16(tmp_path / "cpuinfo") == expected


def test_memory_is_what_the_narrowest_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2: a job's group has no limit, the one above it has. Version 1: as Slurm sets them. Else: none."""

    def group(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / folder / f"memory.{name}").write_text(f"{content}\n")

    group("pod", max=1000, current=700, stat="active_file 10\ninactive_file 30\nanon 500")
    group("pod/job", max="max", current=600, stat="active_file 0\ninactive_file 0")
    statistics = "inactive_file 1\nactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30"
    group("memory/slurm/step_0", limit_in_bytes=500, usage_in_bytes=400, stat=statistics)
    group("memory/slurm/step_1", limit_in_bytes=1, usage_in_bytes=1, stat=statistics)
    listed = tmp_path / "cgroup"
    for lines, rooms in {
        "0::/pod/job": [340],
        "0::/": [],
        "5:cpu,memory:/slurm/step_0\n1:name=systemd:/x:y\n0::/": [150],
        "5:memory:/of/the/host": [],
    }.items():
        listed.write_text(f"{lines}\n")
        assert _cgroup_rooms(listed, tmp_path) == rooms, lines
    assert _cgroup_rooms(tmp_path / "nowhere", tmp_path) == []
    monkeypatch.setattr(machine, "_cgroup_rooms", lambda: [7000, 5000])
    assert machine.available_memory() == 5000


def test_cores_are_what_the_narrowest_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2, nested; version 1; a container that sees its own group as the root; no limits."""
    listed = tmp_path / "cgroup"
    for path, text in {
        "a/cpu.max": "max 100000", "a/b/cpu.max": "350000 100000", "cpu.max": "800000 100000",
        "cpu/pod/cpu.cfs_quota_us": "50000", "cpu/pod/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    for lines, quotas in (
        ("0::/a/b", [3, 8]), ("4:cpu,cpuacct:/pod\n5:memory:/pod", [1]), ("0::/elsewhere", [8]), ("5:memory:/pod", []),
    ):  # fmt: skip
        listed.write_text(lines + "\n")
        assert _cgroup_quotas(listed, tmp_path) == quotas, lines
    assert _cgroup_quotas(tmp_path / "nowhere", tmp_path) == []
    (tmp_path / "a" / "cpuset.cpus.effective").write_text("0-3,8\n")
    listed.write_text("0::/a/b\n")
    assert _cgroup_cpusets(listed, tmp_path) == [5]
    assert 1 <= machine_cores() <= (os.cpu_count() or 1)
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(machine, "_cgroup_cpusets", lambda: [32, 48])
    for quotas, of_the_process, of_the_machine in (([], 16, 32), ([8, 40], 8, 8), ([20], 16, 20)):
        monkeypatch.setattr(machine, "_cgroup_quotas", lambda quotas=quotas: quotas)
        assert (available_cores(), machine_cores()) == (of_the_process, of_the_machine), quotas


# ---- meeting -------------------------------------------------------------------------------------


def _meet(rank: int, port: int, seconds: float, backend: str = "gloo") -> str:
    """A rank of two; what becomes of it."""
    info = LaunchInfo(rank, 2, 0, 1, "environment", "127.0.0.1", port)
    try:
        meet(info, backend, datetime.timedelta(seconds=seconds))
    except LaunchError as error:
        return str(error)
    return "met"


def test_ranks_that_do_not_find_each_other_say_where_they_waited_and_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "_QUIET_SECONDS", 0.2)
    port = free_port()
    assert re.match(rf"not all ranks .* 127.0.0.1:{port} within .*: 1 of 2 .*missing: 1$", _meet(0, port, 3.0))
    assert f"waiting at 127.0.0.1:{port}: 1 of 2 ranks are there; missing: 1" in caplog.text
    assert re.match(rf"rank 1 has not found rank 0 at 127.0.0.1:{port} within", _meet(1, port, 3.0))
    assert f"waiting for rank 0 at 127.0.0.1:{port}" in caplog.text
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert f"port {port}, on which the ranks were to meet, cannot be used" in _meet(0, port, 0.5)


@pytest.mark.parametrize("backends", [("gloo", "gloo"), ("nccl", "gloo")])
def test_ranks_that_meet_compare_what_they_compute_with(backends: tuple[str, str]) -> None:
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = [pool.submit(_meet, rank, port, 20.0, backend) for rank, backend in enumerate(backends)]
        first, second = (found.result() for found in started)
    if len(set(backends)) == 1:
        assert (first, second) == ("met", "met")
    else:
        assert first.startswith(f"of 2 ranks these have no GPU that torch can use: 1 ({socket.gethostname()})")
        assert second.startswith(f"rank 0, at 127.0.0.1:{port}, has ended")


def test_ranks_that_do_not_reach_each_other_over_gloo_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit of their collectives, which may be half an hour."""
    monkeypatch.setattr(groups, "_MEETING_TIMEOUT", datetime.timedelta(seconds=0.2))
    with pytest.raises(LaunchError, match=r"cannot reach each other over gloo.*set GLOO_SOCKET_IFNAME"):
        meet_over_gloo(HashStore(), 0, 2)


# ---- the log directory's lock ------------------------------------------------------------------

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from nemo_style_aligner.trainer.jobs.log_lock import hold_log_directory

hold_log_directory(Path(sys.argv[1]), "first")
child = subprocess.Popen(["sleep", "60"], close_fds=False)  # inherits what can be inherited, and outlives its parent
print(child.pid, flush=True)
time.sleep(60)
"""


def test_one_job_at_a_time_in_a_log_directory(tmp_path: Path) -> None:
    """The second is told who is there. Whatever a job has started, the next one comes in when it is killed."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "log")]
    holder = subprocess.Popen(command, env=CLEAN, text=True, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        told = rf"is using {tmp_path}/log \(first on host .*, process {holder.pid}\).* one a directory of its own with "
        with pytest.raises(ConfigError, match=told):
            hold_log_directory(tmp_path / "log", "second", wait_seconds=0.5)
        write_requeue_file(tmp_path / "log", "the first is stopped early while the second waits")
        killer = threading.Timer(0.5, holder.kill)
        killer.start()
        hold_log_directory(tmp_path / "log", "second")
        assert not (tmp_path / "log" / REQUEUE_FILE).exists()
        assert (tmp_path / "log" / LOCK_FILE).read_text().endswith(f"process {os.getpid()}\n")
    finally:
        holder.kill()
        holder.wait()
        os.kill(child, signal.SIGKILL)


def test_where_the_file_system_has_no_locks_jobs_start_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    hold_log_directory(tmp_path, "job")
    assert "cannot be locked (No locks available)" in caplog.text


# ---- whole jobs ---------------------------------------------------------------------------------

REPOSITORY = Path(__file__).resolve().parents[1]

SCRIPT = """
import os, sys, time
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.trainer.launch.start import job
from nemo_style_aligner.guard.http_client import ServerUnavailableError

@job("gpt_ppo_critic", check=None)
def main(cfg) -> None:
    import torch
    import torch.distributed as dist
    from listeners import listeners

    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print(f"sum {total.item():g} on rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)
    dist.barrier()
    others = [listener for listener in listeners(os.getpid()) if not listener.is_local]
    print(f"reachable from other machines: {others}\\n", end="", flush=True)
    dist.barrier()
    mode = cfg.exp_manager.name
    if mode == "raise" and dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("this rank is broken")
    if mode == "exit" and dist.get_rank() == dist.get_world_size() - 1:
        sys.exit(7)
    if mode == "DataError":
        raise DataError("prompts.jsonl:3: wrong")
    if mode == "ServerUnavailableError":
        if dist.get_rank() == 0:
            raise ServerUnavailableError("the critic is gone")
        dist.barrier()  # which rank 0's end fails
    if mode != "well":
        time.sleep(300)  # the others wait, as if in a collective

if __name__ == "__main__":
    main()
"""

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_", "TORCHELASTIC_", "NEMO_STYLE_"))
    and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}

MPIRUN = Path(sys.executable).parent / "mpirun"
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="Open MPI is not installed: pip install -e '.[mpi]'")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def launcher(name: str, ranks: int) -> list[str]:
    if name == "mpirun":
        return [str(MPIRUN), "-n", str(ranks), "--allow-run-as-root", sys.executable, "-u"]
    if name == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, *run]
    return [sys.executable, "-u"]


def run(
    script: Path, *arguments: str, by: str = "python", env: dict[str, str] = CLEAN
) -> subprocess.CompletedProcess[str]:
    log_dir = f"exp_manager.explicit_log_dir={script.parents[1] / 'log'}"  # not the default, /results
    return subprocess.run(
        [*launcher(by, 2), str(script), "trainer.num_nodes=1", log_dir, *arguments],
        env=env,
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )


MPIRUN_LONG = pytest.param("mpirun", marks=[needs_mpi, pytest.mark.long])
PYTHON_LONG, TORCHRUN_LONG = (pytest.param(by, marks=pytest.mark.long) for by in ("python", "torchrun"))


@pytest.mark.parametrize(("tp_size", "given", "expected"), [(2, None, "1"), (2, "8", "8"), (1, None, None)])
def test_cuda_is_told_of_tensor_parallelism_before_anything_imports_torch(
    script: Path, tp_size: int, given: str | None, expected: str | None
) -> None:
    script.write_text(SCRIPT.replace("check=None", 'check="seen.check"'))
    (script.parent / "seen.py").write_text(
        "import logging, os, sys\n"
        "def check(*_):\n"
        "    logging.warning('a doubt')\n"
        "    print('seen', os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'), 'torch' in sys.modules, flush=True)\n"
        "    sys.exit(3)\n"
    )
    env = CLEAN if given is None else CLEAN | {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    size = f"model.tensor_model_parallel_size={tp_size}"
    result = run(script, size, "trainer.devices=1", "exp_manager.log_format=json", env=env)
    assert result.stdout.split() == ["seen", str(expected), "False"] and result.returncode == 3, result.stderr
    assert '"message": "a doubt"' in result.stderr  # what the checks say has the format that is asked for


TWO_MACHINES = """
set -eu
for n in 1 2; do
    ip netns add "$NAME$n"
    ip -n "$NAME$n" link set lo up
    ip -n "$NAME$n" link add outward type veth peer name elsewhere
    ip -n "$NAME$n" addr add 10.0.2.15/24 dev outward
    ip -n "$NAME$n" link set elsewhere up
    ip -n "$NAME$n" link set outward up
    ip -n "$NAME$n" route add default via 10.0.2.2
    printf '127.0.0.1 localhost\\n127.0.1.1 node%s\\n10.77.0.%s node%s\\n' $n $((3 - n)) $((3 - n)) >"hosts$n"
done
ip link add link1 netns "${NAME}1" type veth peer name link2 netns "${NAME}2"
for n in 1 2; do
    ip -n "$NAME$n" addr add "10.77.0.$n/24" dev "link$n"
    ip -n "$NAME$n" link set "link$n" up
done
on() {
    n=$1
    shift
    RANK=$((n - 1)) ip netns exec "$NAME$n" unshare -u -m sh -c \
        'hostname "node$0"; mount --bind "hosts$0" /etc/hosts; exec "$@"' "$n" "$@"
}
"""
"""Networks and host names of two machines, on this one, whose default routes lead to other networks; ``on N COMMAND``.

Both call themselves 127.0.1.1, and both have an address in a network of the same numbers, where the other is not.
"""


def run_on_two_machines(script: str, *command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash that knows ``on`` and ``"$@"``, which is a command."""
    name = f"nsa{os.getpid()}_"
    if subprocess.run(["ip", "netns", "add", f"{name}0"], capture_output=True, check=False).returncode:
        pytest.skip("no network can be made here")
    try:
        return subprocess.run(
            ["bash", "-c", TWO_MACHINES + script, "bash", *command],
            env=CLEAN | {"NAME": name} | env,
            cwd=folder,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )
    finally:
        for number in range(3):
            subprocess.run(["ip", "netns", "delete", f"{name}{number}"], capture_output=True, check=False)


needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2, for networks of its own"
)
OF_TWO = ("trainer.devices=1", "trainer.num_nodes=2", "exp_manager.name=well")


@pytest.mark.long
@needs_machines
def test_ranks_of_two_machines_that_call_themselves_loopback(script: Path) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node1"}
    command = [sys.executable, "-u", str(script), *OF_TWO]
    both = 'on 1 "$@" & on 2 "$@" & wait'
    result = run_on_two_machines(both, *command, folder=script.parent, MASTER_PORT="15555", **place)
    for number in (1, 2):
        assert f"sum 3 on rank {number - 1} of 2" in result.stdout, result.stderr


@needs_mpi
@needs_machines
def test_ranks_of_mpirun_over_two_machines_ask_it_where_to_meet(script: Path) -> None:
    """The second machine's ranks are started as by ssh. Nobody names rank 0's machine."""
    remote = script.parent / "ssh"
    known = TWO_MACHINES[TWO_MACHINES.index("on() {") :]
    remote.write_text(
        f'#!/bin/bash\n{known}\nwhile [[ $1 == -* ]]; do shift; done\non "${{1#node}}" bash -c "${{*:2}}"\n'
    )
    remote.chmod(0o755)
    mpirun = [str(MPIRUN), "-n", "2", "--allow-run-as-root", "--prtemca", "plm_ssh_agent", str(remote)]
    mpirun += ["--host", "node1:1,node2:1", "-x", "PYTHONPATH", sys.executable, "-u", str(script), *OF_TWO]
    result = run_on_two_machines(
        'on 1 "$@"', *mpirun, f"exp_manager.explicit_log_dir={script.parents[1]}/log", folder=script.parent
    )
    for number in (0, 1):
        assert f"sum 3 on rank {number} of 2" in result.stdout, result.stderr


def test_without_mpi4py_ranks_of_several_machines_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"install mpi4py.*mpirun -x MASTER_ADDR=HOST"):
        place_to_meet(0, None, 1.0)


def test_an_address_is_chosen_that_the_others_reach() -> None:
    def of(*addresses: str) -> list[Interface]:
        return list(map(Interface, addresses))

    first = of("172.17.0.1/16", "10.1.0.1/24", "10.2.0.1/24")
    assert reached(first, of("172.17.0.1/16", "10.2.0.7/24")) == "10.2.0.1"
    assert reached(first, first) == "127.0.0.1"  # ranks on rank 0's machine
    assert reached([], of("10.2.0.7/24")) is None


@pytest.mark.parametrize("by", [PYTHON_LONG, "torchrun", MPIRUN_LONG])
def test_the_same_script_runs_under_every_launcher(script: Path, by: str) -> None:
    result = run(script, "trainer.devices=2", "exp_manager.name=well", "model.mcore_gpt=True", by=by)
    assert result.returncode == 0, result.stderr
    assert "sum 3 on rank 0 of 2" in result.stdout and "sum 3 on rank 1 of 2" in result.stdout
    assert result.stderr.count("model.mcore_gpt=True: has no effect") == 1  # rank 0 says it, once
    # torchrun's agent listens as well, but is no rank
    assert result.stdout.count("reachable from other machines: []") == 2, result.stdout
    assert [path.name for path in script.parent.iterdir() if path.name != "__pycache__"] == ["script.py"]


@pytest.mark.long
def test_a_single_rank_needs_no_launcher(script: Path) -> None:
    result = run(script, "trainer.devices=1", "exp_manager.name=well", "trainer.precision=32")
    assert result.returncode == 0, result.stderr
    assert "sum 1 on rank 0 of 1" in result.stdout
    assert "reachable from other machines: []" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(("error", "status"), [("RuntimeError", 1), ("ConfigError", 2)])
def test_a_rank_that_cannot_say_why_it_failed_ends_all_the_same(error: str, status: int) -> None:
    """Standard error goes to a full disk, and a thread is at work for which Python would wait."""
    code = (
        "import threading, time\n"
        "from nemo_style_aligner.trainer.config.loading import ConfigError\n"
        "from nemo_style_aligner.trainer.launch.ending import install_excepthook\n"
        "install_excepthook()\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"raise {error}('broken')\n"
    )
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code], env=CLEAN, stderr=full, timeout=300, check=False)
    assert result.returncode == status


def test_a_log_of_everything_has_the_traceback_of_a_mistake() -> None:
    code = (
        "import logging\n"
        "from nemo_style_aligner.trainer.config.loading import ConfigError\n"
        "from nemo_style_aligner.trainer.launch.ending import install_excepthook\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "install_excepthook()\n"
        "raise ConfigError('broken')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=CLEAN, text=True, capture_output=True, timeout=60)
    assert result.returncode == 2 and "Traceback" in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1] == "error: broken"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_mistake_is_told_where_the_first_rank_is_late(is_told: bool, tmp_path: Path) -> None:
    """The second rank of a machine, whose launcher ends the job with it; under srun every rank ends by itself.

    The message names a file whose name is not UTF-8.
    """
    code = (
        "from pathlib import Path\n"
        "from nemo_style_aligner.trainer.config.loading import ConfigError\n"
        "from nemo_style_aligner.trainer.launch import ending\n"
        f"ending.in_slurm_step = lambda _: {not is_told}\n"
        "ending._ANY_RANK_SECONDS = 0.1\n"
        "ending.install_excepthook()\n"
        f"ending.failures.leave_in(Path({str(tmp_path)!r}), remove=False)\n"
        "raise ConfigError('wrong: \\udcff.jsonl')\n"
    )
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    meeting_place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=CLEAN | ranks | meeting_place, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert (r"error: wrong: \udcff.jsonl" in result.stderr) == is_told, result.stderr
    assert (tmp_path / "failed").read_text().endswith("ConfigError: wrong: \\udcff.jsonl\n")


@pytest.mark.parametrize("by", ["python", TORCHRUN_LONG, pytest.param("mpirun", marks=needs_mpi)])
def test_a_rank_that_raises_ends_the_job(script: Path, by: str) -> None:
    started = time.monotonic()
    log_dir = script.parent / "log"
    options = ("exp_manager.name=raise", f"exp_manager.explicit_log_dir={log_dir}")
    result = run(script, "trainer.devices=2", *options, by=by)
    assert result.returncode not in (0, 75)
    assert "sum 3 on rank 0 of 2" in result.stdout and "sum 3 on rank 1 of 2" in result.stdout
    assert by != "python" or result.stdout.count("reachable from other machines: []") == 2, result.stdout
    # The launcher's SIGTERM to the other rank, which is still loading, is no wish to stop and to start again.
    assert [path.name for path in log_dir.iterdir()] == ["failed"]
    line = (log_dir / "failed").read_text().splitlines()[0]  # for people, and for the run's other ranks
    assert re.fullmatch(r"rank 1 on \S+ in run \w+: RuntimeError: this rank is broken", line)
    assert "[rank 1] RuntimeError: this rank is broken" in result.stderr
    assert "[rank 1] Traceback" in result.stderr
    assert time.monotonic() - started < 150  # most of it the start; the others would sleep for 300 s


@pytest.mark.long
def test_a_rank_that_exits_with_an_error_ends_the_job_with_its_status(script: Path) -> None:
    assert run(script, "trainer.devices=2", "exp_manager.name=exit").returncode == 7


def test_mistakes_in_the_config_are_one_message_and_no_traceback(script: Path) -> None:
    result = run(script, "trainer.devices=2", "trainer.ppo.prot=1")
    assert result.returncode == 2
    assert result.stderr.count("trainer.ppo.prot; did you mean trainer.ppo.port") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("DataError", 2, "error: prompts.jsonl:3: wrong"),
        pytest.param("ServerUnavailableError", 1, "the critic is gone", marks=pytest.mark.long),
    ],
)
def test_what_the_user_can_mend_is_one_message_and_no_traceback(
    script: Path, error: str, status: int, message: str
) -> None:
    log = f"exp_manager.explicit_log_dir={script.parent / 'log'}"
    result = run(script, "trainer.devices=2", f"exp_manager.name={error}", log)
    assert result.returncode == status, result.stderr
    assert result.stderr.count(message) == 1 and "Traceback" not in result.stderr, result.stderr


def test_the_number_of_ranks_must_be_what_the_config_says(script: Path) -> None:
    result = run(script, "trainer.devices=4", env=CLEAN | BY_HAND | {"RANK": "0", "LOCAL_RANK": "0"})
    assert result.returncode == 2
    assert "2 ranks were started (environment), but trainer.devices=4 x trainer.num_nodes=1 asks for 4" in result.stderr


def test_a_value_that_hydra_cannot_read_is_named_with_what_to_do(script: Path) -> None:
    result = run(script, "exp_manager.name={step} b", "trainer.devices=1")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: exp_manager.name={step} b cannot be read (no viable alternative"), (
        result.stderr
    )
    assert "in quotes, inside those of the shell" in result.stderr and "hydra.cc" not in result.stderr
    result = run(script, "trainer.devices", "=", "1")
    assert result.stderr.startswith("error: trainer.devices is not a setting: write KEY=VALUE"), result.stderr
    (script.parent / "own.yaml").write_text("model:\n  seed: 1\n  seed: 2\n")
    command = [sys.executable, str(script), f"--config-path={script.parent}", "--config-name=own"]
    result = subprocess.run(command, env=CLEAN, text=True, capture_output=True, timeout=150, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: a config file cannot be read:") and 'own.yaml", line 3' in result.stderr
    result = run(script, "~model.optim.sched", "trainer.devices=1")
    assert result.returncode == 2 and "it cannot be deleted; to turn off" in result.stderr, result.stderr
    result = run(script, "model.optim.lr=1e-6,2e-6", "trainer.devices=1")
    assert result.returncode == 2 and "multirun" not in result.stderr
    assert result.stderr.startswith("error: model.optim.lr=1e-6,2e-6 gives several values: write a list"), result.stderr


def test_asking_for_the_config_shows_it_and_runs_nothing(script: Path) -> None:
    result = run(script, "trainer.devices=2", "--cfg", "job")
    assert result.returncode == 0 and "max_queue_delay_microseconds: 2000" in result.stdout
    assert "sum 3" not in result.stdout


def test_help_says_what_the_script_is(script: Path) -> None:
    script.write_text('"""It\'s a job: {ranks}, a=b"""\n' + script.read_text())
    result = run(script, "trainer.devices=2", "--help")
    assert result.returncode == 0 and "sum 3" not in result.stdout, result.stderr
    assert result.stdout.startswith("It's a job: {ranks}, a=b\n\nAny key of the config can be set"), result.stdout
    must_be = result.stdout.partition("These must be:\n\n")[2].partition("\n\n")[0].split()
    assert must_be == ["pretrained_checkpoint.restore_from_path"]
    file = CONFIGS / "gpt_ppo_critic.yaml"
    assert result.stdout.endswith(f"{file}:\n\n{file.read_text()}\n")  # with the comments
    unread = f"'{sys.executable}' '{script}' -h | true; exit ${{PIPESTATUS[0]}}"  # as with `| head`
    result = subprocess.run(["bash", "-c", unread], env=CLEAN, text=True, capture_output=True, check=False)
    assert result.returncode in (0, 128 + signal.SIGPIPE) and not result.stderr, result.stderr  # as other programs end


def _ranks_of(supervisor: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(supervisor)], text=True, capture_output=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


def _says(process: subprocess.Popen[str], text: str, times: int = 1) -> bool:
    """Wait until ``text`` was printed so often; False if the output ends before. torch 2.9 prints things between."""
    assert process.stdout is not None
    while times > 0 and (line := process.stdout.readline()):
        times -= line.count(text)
    return times <= 0


def _own_words(errors: str) -> str:
    """``errors`` without the line that torch adds where there is nvcc and no GPU."""
    return "".join(line for line in errors.splitlines(keepends=True) if "No CUDA runtime is found" not in line)


def _wait_until(condition: object, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_supervisor(script: Path, number: signal.Signals) -> None:
    command = [*launcher("python", 2), str(script), "trainer.devices=2", "exp_manager.name=sleep"]
    command.append(f"exp_manager.explicit_log_dir={script.parent / 'log'}")
    process = subprocess.Popen(command, env=CLEAN, cwd=script.parent, text=True, stdout=subprocess.PIPE)
    try:
        assert _says(process, "sum 3", 2)
        ranks = _ranks_of(process.pid)
        assert len(ranks) == 2
        process.send_signal(number)
        process.wait(timeout=20)
        assert process.returncode != 0
        _wait_until(lambda: not any(_alive(pid) for pid in ranks), 10)
    finally:
        process.kill()
        process.stdout.close()


# ---- stopping early -----------------------------------------------------------------------------

STOP_SCRIPT = """
import contextlib, os, signal, time
from nemo_style_aligner.trainer.launch.start import job

class Late:
    def __del__(self):  # when Python takes modules apart
        os.kill(os.getpid(), signal.SIGTERM)

late = Late()

@job("gpt_ppo_critic", check=None)
def main(cfg) -> int:
    from nemo_style_aligner.trainer.training.run_control import RunControl
    from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError

    control = RunControl()
    if cfg.exp_manager.name == "waiting for others":
        import torch.distributed as dist

        print("waiting\\n", end="", flush=True)
        dist.TCPStore("127.0.0.1", 0, 2, True)  # outside of Python, where no handler runs
    if cfg.exp_manager.name == "importing":
        import swallowing
    control.begin()
    print("waiting\\n", end="", flush=True)
    try:
        while True:
            control.check()
            time.sleep(0.05)
    except StopEarlyError as reason:
        with contextlib.suppress(OSError):  # its reader, a launcher, may be gone
            print(f"saved because {reason}\\n", end="", flush=True)
        control.stop_early(1, reason)
    return control.status

if __name__ == "__main__":
    main()
"""


# A module that is loaded in the phase "importing", and swallows what a handler raises meanwhile.
SWALLOWING = """
import time
try:
    print("waiting\\n", end="", flush=True)
    time.sleep(300)
except BaseException:
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "phase"),
    [
        ("python", "running"),
        ("python", "importing"),
        ("python", "waiting for others"),
        ("torchrun", "running"),
        pytest.param("mpirun", "running", marks=needs_mpi),
    ],
)
def test_a_stopped_job_asks_to_be_started_again(tmp_path: Path, by: str, phase: str) -> None:
    """SIGUSR1 (under torchrun SIGTERM): status 75 where the launcher lets it through, and a file everywhere."""
    ranks = 2 if phase == "running" else 1
    path, marker = tmp_path / "script.py", tmp_path / "log" / "requeue"
    path.write_text(STOP_SCRIPT)
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    marker.parent.mkdir()
    marker.write_text("from an earlier run")
    command = [
        *launcher(by, ranks),
        str(path),
        f"trainer.devices={ranks}",
        "trainer.num_nodes=1",
        f"exp_manager.name={phase}",
    ]
    process = subprocess.Popen(
        [*command, f"exp_manager.explicit_log_dir={marker.parent}"],
        env=CLEAN, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert _says(process, "waiting", ranks)
        assert not marker.exists()
        if by == "python" and ranks > 1 and shutil.which("ps"):
            os.kill(max(_ranks_of(process.pid)), signal.SIGUSR1)  # one rank is enough
        else:
            process.send_signal(signal.SIGTERM if by == "torchrun" else signal.SIGUSR1)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    if by == "torchrun":
        assert process.returncode not in (0, None)
    else:
        assert process.returncode == 75
    assert marker.read_text().startswith("stopped")
    if phase == "running":
        assert output.count("saved because received SIG") == 2


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed")
@pytest.mark.parametrize("by", ["torchrun", pytest.param("mpirun", marks=needs_mpi)])
def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path, by: str) -> None:
    path, marker = tmp_path / "script.py", tmp_path / "log" / "requeue"
    path.write_text(STOP_SCRIPT)
    command = [*launcher(by, 2), str(path), "trainer.devices=2", "trainer.num_nodes=1", "exp_manager.name=running"]
    process = subprocess.Popen(
        [*command, f"exp_manager.explicit_log_dir={marker.parent}"],
        env=CLEAN, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    ranks: list[int] = []
    try:
        assert _says(process, "waiting", 2)
        ranks = _ranks_of(process.pid)
        assert len(ranks) == 2
        process.kill()
        _wait_until(lambda: not any(_alive(pid) for pid in ranks), 90)
        assert marker.read_text().startswith("stopped early")
    finally:
        process.kill()
        process.communicate()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("by", ["python", "nohup"])
def test_a_job_whose_terminal_is_closed_saves_and_ends_unless_nohup_keeps_it(tmp_path: Path, by: str) -> None:
    path, log_dir = tmp_path / "script.py", tmp_path / "log"
    path.write_text(STOP_SCRIPT)
    command = ["nohup"] if by == "nohup" else []
    command += [*launcher("python", 2), str(path), "trainer.devices=2", "exp_manager.name=running"]
    terminal, end = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests themselves were started by

    process = subprocess.Popen(
        [*command, f"exp_manager.explicit_log_dir={log_dir}"],
        env=CLEAN, cwd=tmp_path, text=True, stdin=end, stdout=subprocess.PIPE, stderr=end, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        os.close(end)
        assert _says(process, "waiting\n", 2)  # nohup sends standard error there as well
        os.close(terminal)  # and with it standard error: what is logged from now on is lost
        if by == "nohup":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output.count(f"saved because received {'SIGUSR1' if by == 'nohup' else 'SIGHUP'}") == 2
    assert process.returncode == 75 and (log_dir / "requeue").exists()


def test_ctrl_c_ends_a_job_with_a_line(tmp_path: Path) -> None:
    """Two ranks, going on from collective to collective."""
    path = tmp_path / "script.py"
    path.write_text(STOP_SCRIPT)
    command = [*launcher("python", 2), str(path), "trainer.devices=2", "exp_manager.name=running"]
    process = subprocess.Popen(
        [*command, f"exp_manager.explicit_log_dir={tmp_path / 'log'}"],
        env=CLEAN, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # which ``&`` would ignore
    )  # fmt: skip
    try:
        are_waiting = _says(process, "waiting\n", 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert are_waiting, errors
    assert process.returncode == -signal.SIGINT  # 130 for shells, whose loops it ends
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors, errors
    assert not (tmp_path / "log" / "requeue").exists()


TOOLS: dict[str, list[str]] = {
    "convert_checkpoint_to_nemo.py": ["--input=/", "--output=x.nemo"],
    "convert_gguf_to_nemo.py": ["--input=/", "--output=x.nemo"],
    "convert_hf_to_nemo.py": ["--input-dir=/", "--output=x.nemo"],
    "convert_nemo_to_hf.py": ["--input=/", "--output-dir=x"],
    "evaluate_gpt.py": ["--model=/", f"--prompts={__file__}", "--output=results.json"],
    "init_gpt.py": ["--tokenizer=tokenizer", "--output=x.nemo"],
    "serve_reward_function.py": ["--function=f.py:f", "--tokenizer=/"],
}


def test_a_script_outside_its_environment_says_what_to_do() -> None:
    root = Path(__file__).parents[1]
    scripts = [path for path in sorted(root.glob("examples/nlp/*/*.py")) if "__main__" in path.read_text()]
    for script in scripts:
        done = subprocess.run(
            [sys.executable, "-IS", script], capture_output=True, text=True, timeout=60
        )  # no packages
        assert done.returncode == 1 and not done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: No module named 'nemo_style_aligner'") and f".venv/bin/python {script}" in line


@pytest.mark.parametrize("name", TOOLS)
def test_the_help_of_a_tool_does_not_wait_for_what_takes_seconds_to_import(tmp_path: Path, name: str) -> None:
    for library in ("torch", "transformers"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit(f'{__name__} is imported')")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, root / "examples" / "nlp" / "gpt" / name, "--help"],
        env=CLEAN | {"PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and f"usage: {name}" in done.stdout.lower(), done.stderr


def test_ctrl_c_ends_a_tool_that_computes_with_a_line() -> None:
    code = (
        "import os, signal\n"
        "from nemo_style_aligner.trainer.launch.ending import install_excepthook\n"
        "from nemo_style_aligner.engine.parallel.groups import single_process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "install_excepthook()\n"
        "with single_process():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=CLEAN, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT and _own_words(done.stderr) == "interrupted\n"


def test_a_second_ctrl_c_ends_a_rank_that_is_still_on_its_way_out(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from nemo_style_aligner.trainer.launch.ending import install_excepthook\n"
        "install_excepthook()\n"
        "try:\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(300)\n"
        "finally:\n"
        "    print('ending', flush=True)\n"
        "    time.sleep(300)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=CLEAN, text=True, stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        for line in ("waiting", "ending"):
            assert _says(process, line)
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
    finally:
        process.kill()
        process.stdout.close()


def test_a_job_that_cannot_write_its_requeue_file_keeps_its_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_text("no directory")
    write_requeue_file(tmp_path / "log", "stopped early")
    assert "requeue cannot be written" in caplog.text


def test_a_service_that_is_ended_while_it_starts_asks_for_nothing(tmp_path: Path) -> None:
    """SIGTERM is its regular end: status 0, and no file that says otherwise."""
    path, log_dir = tmp_path / "script.py", tmp_path / "log"
    path.write_text(STOP_SCRIPT.replace("check=None", "check=None, is_service=True"))
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    process = subprocess.Popen(
        [sys.executable, "-u", str(path), "exp_manager.name=importing", f"exp_manager.explicit_log_dir={log_dir}"],
        env=CLEAN, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert _says(process, "waiting")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and not (log_dir / "requeue").exists()
