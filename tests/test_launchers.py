"""Plans that are started: on this machine, by mpirun's printed lines, and on a Ray cluster of three nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Artefacts
from job_processes import Job, run, script, stored_weights

try:
    from ray.cluster_utils import Cluster
except ImportError:
    Cluster = None

MPIRUN = Path(sys.executable).with_name("mpirun")
TIMEOUT = 240.0

# Ranks and services that say who they are, and then do as they are told: what a launcher sees of jobs.
TOLD = """
import json, os, signal, socket, sys, time
from pathlib import Path
from nemo_style_aligner.trainer.launch.supervisor import end_with_supervisor

end_with_supervisor()
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder, rank = Path(given["exp_manager.explicit_log_dir"].strip("'")), int(os.environ["RANK"])
starts = len(list(folder.glob(f"rank-{rank}-*")))
stops = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: stops.append(signal.Signals(number).name))
if "listen" in given:
    host, port = given["listen"].split(":")
    listener = socket.create_server((host, int(port)))
if "ask" in given:
    for attempt in range(100):
        try:
            socket.create_connection(tuple(given["ask"].split(":")), 5).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    else:
        sys.exit(9)
seen = {"env": dict(os.environ), "given": given, "pid": os.getpid(), "cwd": os.getcwd()}
draft = folder / f"draft-{rank}"
draft.write_text(json.dumps(seen))
draft.rename(folder / f"rank-{rank}-{starts}")
print(f"rank {rank} is here", flush=True)
modes = given["mode"].split(",")
mode = modes[min(starts, len(modes) - 1)]
last = int(os.environ["WORLD_SIZE"]) - 1
if mode in ("fail", "killed") and rank == last:
    while not all((folder / f"rank-{other}-{starts}").exists() for other in range(last)):
        time.sleep(0.02)
    if mode == "fail":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + (0.5 if mode == "well" else 100)
while not stops and time.monotonic() < deadline:
    time.sleep(0.02)
(folder / f"stopped-{rank}").write_text(" ".join(stops))
sys.exit({"well": 0, "serve": 0, "stop": 75}.get(mode, 1))
"""


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., Path]:
    """Makes a plan of a trainer and a service that do as they are told; its file."""
    source = tmp_path / "told.py"
    source.write_text(TOLD)

    def make(mode: str, **trainer: Any) -> Path:
        listen = "listen={service.listen}:{service.port}"
        service = {"script": str(source), "serves": "trainer", "arguments": ["mode=serve", listen]}
        trainer = {"script": str(source), "arguments": [f"mode={mode}", "ask={service.host}:{service.port}"], **trainer}
        path = tmp_path / "plan.yaml"
        jobs = {"service": service, "trainer": trainer}
        path.write_text(yaml.safe_dump({"results_dir": str(tmp_path / "results"), "jobs": jobs}))
        return path

    return make


def launch(plan: Path, *options: str, env: Mapping[str, str] | None = None) -> Job:
    """The launcher, started as users do."""
    command = [sys.executable, "-m", "nemo_style_aligner", "launch", str(plan), *options]
    given = [f"{name}={value}" for name, value in (env or {}).items()]
    return Job(["env", *given, *command], plan.with_suffix(".out"))


def seen(plan: Path, job: str, rank: int = 0, start: int = 0, seconds: float = 60.0) -> dict[str, Any]:
    """What a rank was started with; waits for it."""
    path = plan.parent / "results" / job / f"rank-{rank}-{start}"
    wait_for(path.exists, f"rank {rank} of {job}", plan, seconds)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def wait_for(condition: Callable[[], bool], what: str, plan: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what}: {plan.with_suffix('.out').read_text()}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def all_end(plan: Path, pids: list[int]) -> None:
    wait_for(lambda: not any(map(is_alive, pids)), f"end of {pids}", plan, 20)


# ---- on this machine ----------------------------------------------------------------------------


def test_a_plan_on_this_machine(told: Callable[..., Path]) -> None:
    """Ranks get torchrun's variables, the service's address and the secret; the service ends after the trainer."""
    plan = told("well", devices=2, env={"COLOUR": "blue"})
    assert launch(plan).check(60)
    first, second, service = seen(plan, "trainer"), seen(plan, "trainer", 1), seen(plan, "service")
    assert [second["env"][name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == list("1212")
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"] != service["env"]["MASTER_PORT"]
    assert first["given"]["ask"] == service["given"]["listen"] and first["given"]["ask"].startswith("127.0.0.1:")
    assert first["env"]["COLOUR"] == "blue" and "COLOUR" not in service["env"]
    results = plan.parent / "results"
    secret = Path(first["env"]["NEMO_STYLE_ALIGNER_TOKEN_FILE"])
    assert secret == results / "secret" and secret.stat().st_mode & 0o777 == 0o600
    printed = (results / "trainer" / "output-0.log").read_text().splitlines()
    assert sorted(printed) == ["rank 0 is here", "rank 1 is here"]
    assert (results / "service" / "stopped-0").read_text() == "SIGTERM"


def test_one_failure_ends_all_and_all_start_again(told: Callable[..., Path]) -> None:
    plan = told("fail,well", devices=2)
    job = launch(plan)
    assert job.wait(60) == 3, job.describe()
    assert "trainer ended with status 3; ending the plan's other jobs" in job.output()
    assert "rank 1 is here" in job.output()  # the end of what it printed
    pids = [seen(plan, name, rank)["pid"] for name, rank in (("trainer", 0), ("trainer", 1), ("service", 0))]
    assert not any(map(is_alive, pids))
    assert "restart" not in job.output()
    second = told("fail,killed,well", devices=2)
    output = launch(second, "--restarts", "1").check(60)
    assert "restart 1 of at most 1" in output and "rank 1 was ended by signal 9 (Killed)" in output
    assert seen(second, "trainer", 1, start=2)["pid"] != pids[1]


def test_a_stop_reaches_the_trainer_and_its_status_is_kept(told: Callable[..., Path]) -> None:
    """The service stays until the trainer has saved."""
    plan = told("stop", devices=2)
    job = launch(plan, "--restarts", "3")
    seen(plan, "trainer", 0), seen(plan, "trainer", 1), seen(plan, "service")
    assert job.stop(number=signal.SIGUSR1) == 75, job.describe()
    results = plan.parent / "results"
    assert [(results / "trainer" / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1"] * 2
    assert (results / "service" / "stopped-0").read_text() == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(told: Callable[..., Path], number: signal.Signals) -> None:
    plan = told("wait", devices=2)
    job = launch(plan)
    pids = [seen(plan, name, rank)["pid"] for name, rank in (("trainer", 0), ("trainer", 1), ("service", 0))]
    with open(plan.parent / "results" / "trainer" / "output-0.log", "a") as output:
        output.write("some line\nPPO: 3/9 after 12 s, 4 s each, 24 s left, reward 0.5\nanother: 1/2\n")
    told_line = "trainer: PPO: 3/9 after 12 s, 4 s each, 24 s left, reward 0.5\n"
    wait_for(lambda: told_line in plan.with_suffix(".out").read_text(), "progress of the trainer", plan)
    assert job.stop(number=number) == (130 if number == signal.SIGINT else -number), job.describe()
    all_end(plan, pids)


def test_gpus_that_the_plan_names_are_not_given_to_another_job(told: Callable[..., Path]) -> None:
    plan = told("well", env={"CUDA_VISIBLE_DEVICES": "0"})
    launch(plan, env={"CUDA_VISIBLE_DEVICES": "0,1"}).check(60)
    assert [seen(plan, job)["env"]["CUDA_VISIBLE_DEVICES"] for job in ("trainer", "service")] == ["0", "1"]


def test_what_one_machine_cannot_do_is_refused(told: Callable[..., Path]) -> None:
    job = launch(told("well", nodes=2))
    assert job.wait(30) == 2 and "jobs.trainer.nodes: 2: `--with local` has one node" in job.output()


@pytest.mark.long
@pytest.mark.skipif(not MPIRUN.exists(), reason="Open MPI is not installed: pip install -e '.[mpi]'")
def test_printed_lines_run(artefacts: Artefacts, tmp_path: Path) -> None:
    """An SFT job of two ranks learns the same under mpirun's lines as under the launcher."""
    losses = []
    for name in ("mpirun", "local"):
        plan = tmp_path / f"{name}.yaml"
        plan.write_text(yaml.safe_dump(sft_plan(artefacts, tmp_path / name, devices=2)))
        done = launch(plan, "--with", name)
        lines = done.check(TIMEOUT)
        if name == "mpirun":
            run(["bash", "-c", lines], tmp_path / "lines.out", TIMEOUT)
        losses.append(curves(tmp_path / name / "sft"))
    assert losses[0] == losses[1] and len(losses[0]["train/loss"]) == 4


# ---- real jobs ----------------------------------------------------------------------------------


def settings(flags: list[str]) -> dict[str, Any]:
    """Overrides of a command line as a plan has them, without what the plan itself says."""
    pairs = (flag.split("=", 1) for flag in flags)
    own = ("trainer.num_nodes", "trainer.devices", "exp_manager.explicit_log_dir", "remote_critic_rm.critic.port")
    return {key: yaml.safe_load(value) for key, value in pairs if key not in own}


def sft_plan(artefacts: Artefacts, results: Path, **size: int) -> dict[str, Any]:
    overrides = settings(artefacts.sft_flags(results)) | {"model.optim.lr": 1e-2, "model.optim.sched.min_lr": 1e-3}
    job = {"script": "train_gpt_sft.py", "overrides": overrides, "env": {"OMP_NUM_THREADS": "1"}, **size}
    return {"results_dir": str(results), "jobs": {"sft": job}}


def ppo_plan(artefacts: Artefacts, results: Path, **size: int) -> dict[str, Any]:
    """Critic and actor in fp32, with the settings in which a resumed pair equals an undisturbed one to the last bit."""
    common = {"trainer.precision": 32, "model.encoder_seq_length": 64, "model.global_batch_size": 8}
    critic = common | {
        "pretrained_checkpoint.restore_from_path": str(artefacts.rm),
        "model.micro_batch_size": 4,
        "model.forward_micro_batch_size": 1,
        "trainer.ppo.inference_micro_batch_size": 8,
        "model.optim.lr": 1e-3,
        "model.optim.sched.warmup_steps": 2,
        "model.hidden_dropout": 0.1,
    }
    prompts = [str(artefacts.data(f"{kind}_prompts")) for kind in ("train", "test")]
    actor = common | {
        "pretrained_checkpoint.restore_from_path": str(artefacts.sft),
        "model.data.data_prefix": {"train": prompts[:1], "validation": prompts[1:], "test": prompts[1:]},
        "remote_critic_rm.timeouts.ready_seconds": 120,
        "trainer.ppo.max_steps": 6,
        "trainer.ppo.val_check_interval": 3,
        "trainer.ppo.save_interval": 2,
        "model.micro_batch_size": 2,
        "model.ppo.num_rollout_samples": 16,
        "model.ppo.num_val_samples": 8,
        "model.ppo.rollout_micro_batch_size": 8,
        "model.ppo.length_params.max_length": 8,
        "model.optim.lr": 1e-3,
        "model.optim.sched.min_lr": 1e-4,
        "model.optim.sched.warmup_steps": 2,
        "model.hidden_dropout": 0.1,
    }
    env = {"OMP_NUM_THREADS": "1"}
    jobs = {
        "critic": {"script": "serve_ppo_critic.py", "serves": "actor", "overrides": critic, "env": env},
        "actor": {"script": "train_gpt_ppo_actor.py", "overrides": actor, "env": env, **size},
    }
    return {"results_dir": str(results), "jobs": jobs}


def curves(log_dir: Path) -> dict[str, dict[int, float]]:
    """A job's metrics by step, the last of each; without times, memory, and who generated what."""
    found: dict[str, dict[int, float]] = {}
    for line in (log_dir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if not name.startswith(("timers/", "memory/", "generation/", "step", "time")) and not any(
                part in name for part in ("_time", "_wait")
            ):
                found.setdefault(name, {})[values["step"]] = value
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics of both jobs, and the trained policy, to the last bit."""
    for job in ("critic", "actor"):
        first, second = curves(one / job), curves(other / job)
        assert {name for name in first if first[name] != second.get(name)} == set(), job
    policies = [stored_weights(run / "actor" / "checkpoints" / "megatron_gpt_ppo_actor.nemo") for run in (one, other)]
    assert [name for name, tensor in policies[0].items() if not torch.equal(tensor, policies[1][name])] == []


@pytest.fixture(scope="module")
def undisturbed(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO pair on this machine from start to end; its results."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "plan.yaml").write_text(yaml.safe_dump(ppo_plan(artefacts, folder / "results", devices=2)))
    launch(folder / "plan.yaml").check(TIMEOUT)
    return folder / "results"


def kill_a_rank(job: Job, results: Path, checkpoint: int) -> None:
    """The actor's second rank, once a checkpoint is there."""
    actor = results / "actor"
    deadline = time.monotonic() + TIMEOUT
    while not list(actor.glob(f"checkpoints/*step={checkpoint}-*-last")):
        assert job.process.poll() is None and time.monotonic() < deadline, job.describe()
        time.sleep(0.02)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command, env = ((entry / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if any(str(actor).encode() in part for part in command) and b"RANK=1" in env:
                os.kill(int(entry.name), signal.SIGKILL)
                return
    raise AssertionError("rank 1 is not there")


def goes_on_without_a_rank(job: Job, results: Path, undisturbed: Path) -> None:
    """Kill a rank of the pair: it starts again, and ends as the undisturbed one did."""
    try:
        kill_a_rank(job, results, 2)
        assert "restart 1 of at most 1" in job.check(TIMEOUT)
    finally:
        job.kill()
    assert_same_run(undisturbed, results)


@pytest.mark.long
def test_a_killed_pair_goes_on_as_if_nothing_had_happened(
    undisturbed: Path, artefacts: Artefacts, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(ppo_plan(artefacts, tmp_path / "results", devices=2)))
    goes_on_without_a_rank(launch(tmp_path / "plan.yaml", "--restarts", "1"), tmp_path / "results", undisturbed)


# ---- on Ray -------------------------------------------------------------------------------------

on_ray = pytest.mark.skipif(Cluster is None, reason="NOT TESTED: Ray is not installed: pip install -e '.[ray]'")
QUIET = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that computes nothing, and two nodes of two CPUs."""
    os.environ.update(QUIET)
    small = {"object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True, **small})
    for _ in range(2):
        found.add_node(num_cpus=2, **small)
    found.wait_for_nodes()
    yield found
    found.shutdown()


def launch_on(cluster: Any, plan: Path, *options: str) -> Job:
    return launch(plan, "--with", "ray", *options, env={"RAY_ADDRESS": cluster.address})


@on_ray
@pytest.mark.long
def test_ranks_over_two_nodes(cluster: Any, told: Callable[..., Path]) -> None:
    """The ranks' environment is torchrun's, whatever started the cluster; each node's output is a file of its own."""
    plan = told("well", nodes=2)
    assert launch_on(cluster, plan).check(120)
    ranks = [seen(plan, "trainer", rank) for rank in (0, 1)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [[rank["env"][name] for name in names] for rank in ranks] == [list("0201"), list("1201")]
    assert ranks[0]["env"]["MASTER_PORT"] == ranks[1]["env"]["MASTER_PORT"]
    assert not [name for name in ranks[0]["env"] if name.startswith(("SLURM_", "OMPI_"))]
    outputs = [plan.parent / "results" / "trainer" / f"output-{node}.log" for node in (0, 1)]
    assert [output.read_text() for output in outputs] == ["rank 0 is here\n", "rank 1 is here\n"]
    assert (plan.parent / "results" / "service" / "stopped-0").read_text() == "SIGTERM"


@on_ray
@pytest.mark.long
def test_statuses_and_signals_pass_through(cluster: Any, told: Callable[..., Path]) -> None:
    plan = told("fail,stop", nodes=2)
    job = launch_on(cluster, plan, "--restarts", "1")
    seen(plan, "trainer", 1, start=1), seen(plan, "trainer", 0, start=1)
    assert "trainer ended with status 3" in job.output()
    assert job.stop(number=signal.SIGTERM) == 75, job.describe()
    assert (plan.parent / "results" / "trainer" / "stopped-1").read_text() == "SIGTERM"
    all_end(plan, [seen(plan, "trainer", rank, start)["pid"] for rank in (0, 1) for start in (0, 1)])


@on_ray
@pytest.mark.long
@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_nothing_outlives_an_agent_or_the_launcher(cluster: Any, told: Callable[..., Path], victim: str) -> None:
    plan = told("wait,well", nodes=2)
    job = launch_on(cluster, plan, "--restarts", "1")
    ranks = [seen(plan, "trainer", rank) for rank in (0, 1)]
    pids = [rank["pid"] for rank in ranks] + [seen(plan, "service")["pid"]]
    if victim == "agent":
        os.kill(int(ranks[1]["env"]["NEMO_STYLE_ALIGNER_SUPERVISOR_PID"]), signal.SIGKILL)
        assert "node 1 is lost" in job.check(120)
    else:
        job.kill()
    all_end(plan, pids)


@on_ray
@pytest.mark.long
def test_what_is_missing_is_said_and_waited_for_not_for_ever(cluster: Any, told: Callable[..., Path]) -> None:
    """Nodes that are too small, and a node that is lost and comes back while the plan waits for it."""
    job = launch_on(cluster, told("well", nodes=2, devices=4), "--wait-minutes", "0.05")
    assert job.wait(60) == 1, job.describe()
    assert "given up after 0.05 minutes: trainer needs 2 nodes with 4 CPUs each, which are missing: " in job.output()
    plan = told("wait,well", nodes=2, devices=2)
    lost = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    job = launch_on(cluster, plan, "--restarts", "1")
    ranks = [seen(plan, "trainer", rank) for rank in (0, 3)]
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: "is lost" in job.output(), "loss of a node", plan)
    wait_for(lambda: "waiting for the cluster: " in job.output(), "word of what is missing", plan)
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    job.check(120)
    all_end(plan, [rank["pid"] for rank in ranks])


@on_ray
@pytest.mark.long
def test_a_job_that_is_submitted(cluster: Any, told: Callable[..., Path]) -> None:
    """``ray job submit``: the launcher runs on the cluster, and finds it by itself."""
    plan = told("well", nodes=2)
    command = [sys.executable, "-m", "nemo_style_aligner", "launch", str(plan), "--with", "ray"]
    ray = str(Path(sys.executable).with_name("ray"))
    address = f"http://{cluster.head_node.webui_url}"
    output = run([ray, "job", "submit", "--address", address, "--", *command], plan.with_suffix(".out"), 150)
    assert "trainer started" in output and seen(plan, "trainer", 1)["env"]["WORLD_SIZE"] == "2"


@on_ray
@pytest.mark.long
def test_sft_over_two_nodes_is_the_same_as_on_one(cluster: Any, artefacts: Artefacts, tmp_path: Path) -> None:
    run(script("train_gpt_sft.py", *artefacts.sft_flags(tmp_path / "alone", 2)), tmp_path / "alone.out", TIMEOUT)
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(sft_plan(artefacts, tmp_path / "results", nodes=2)))
    launch_on(cluster, plan).check(TIMEOUT)
    assert curves(tmp_path / "alone") == curves(tmp_path / "results" / "sft")


@on_ray
@pytest.mark.long
def test_a_pair_over_two_nodes_that_loses_a_rank(
    cluster: Any, undisturbed: Path, artefacts: Artefacts, tmp_path: Path
) -> None:
    """Critic, and actor over two nodes with the work queue: the run goes on as if nothing had happened."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(ppo_plan(artefacts, tmp_path / "results", nodes=2)))
    goes_on_without_a_rank(launch_on(cluster, plan, "--restarts", "1"), tmp_path / "results", undisturbed)
