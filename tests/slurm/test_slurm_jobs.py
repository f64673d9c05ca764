"""The batch scripts of slurm/ on a real Slurm: three nodes on this machine, tiny models, CPU.

``make test-slurm`` installs Slurm's packages if they are missing and runs them: minutes on 2 cores, root only.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import requests
import torch
import yaml
from cluster import TESTBED, Cluster, SlurmJob
from conftest import Artefacts
from job_processes import ROOT, stored_weights
from listeners import Listener, listeners

from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

TIMEOUT = 600.0


def why_not() -> str | None:
    """The reason for which there can be no cluster here; None when it can be tried."""
    if not os.environ.get("TEST_SLURM"):
        return "it installs Slurm and takes minutes: run make test-slurm"
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root"
    if shutil.which("apt-get") is None:
        return "Slurm's packages are installed with apt-get, which this system has not"
    return None


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=f"NOT TESTED: the scripts in slurm/ on a real Slurm: {why_not()}"),
]

SFT_STEPS = 30  # over the four passes through 144 samples in batches of 16
# The critic has a node and a rank, the actor two nodes with a rank each.
PPO_OPTIONS = ("--nodes=1", "--ntasks-per-node=1", ":", "--nodes=2", "--ntasks-per-node=1")
PPO_STEPS = 27  # three passes through 148 prompts: seconds, so that Slurm can interrupt them in the middle
# fp32, requests of one width and rows that divide evenly: no batch depends on timing, every run has the same numbers.
PPO_OVERRIDES = (
    *("trainer.ppo.max_epochs=3", f"trainer.ppo.max_steps={PPO_STEPS}"),
    "trainer.ppo.val_check_interval=0",
    "trainer.ppo.save_interval=3",
    "remote_critic_rm.timeouts.ready_seconds=600",
    "model.micro_batch_size=2",
    "model.ppo.num_rollout_samples=16",
    "model.ppo.num_val_samples=8",
    "model.ppo.rollout_micro_batch_size=8",
    "model.ppo.length_params.max_length=8",
    "model.optim.lr=1e-3",
    "model.optim.sched.min_lr=1e-4",
    "model.optim.sched.warmup_steps=2",
    "--critic",
    "model.micro_batch_size=4",
    "model.forward_micro_batch_size=8",
    "trainer.ppo.strip_sequence_length_to_multiple=48",
    "model.optim.lr=1e-3",
    "model.optim.sched.warmup_steps=2",
    "--both",
    "trainer.precision=32",
    "model.encoder_seq_length=64",
    "model.global_batch_size=8",
    "model.hidden_dropout=0.1",
)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes, for all tests here. Slurm's logs stay in its folder when a test has failed."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # UNIX sockets in it: a short name
    try:
        subprocess.run(["bash", str(TESTBED), "up", str(folder), "3", "4", str(os.getpid())], check=True, timeout=600)
        yield Cluster(folder)
    finally:
        subprocess.run(["bash", str(TESTBED), "down", str(folder)], check=True, timeout=60)
        if not request.session.testsfailed:
            shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_jobs_left(cluster: Cluster) -> Iterator[None]:
    """A failed test's job must not keep the nodes from the next one."""
    yield
    cluster.call("scancel", "--user=root", check=False)


def submit_ppo(
    cluster: Cluster, artefacts: Artefacts, results: Path, overrides: Sequence[str] = (), **variables: str
) -> SlurmJob:
    """slurm/ppo.sbatch with the settings that all runs here share, and further overrides of the actor."""
    return cluster.submit(
        PPO_OPTIONS,
        "ppo.sbatch",
        [*PPO_OVERRIDES, "--actor", *overrides],
        results,
        RM_NEMO_FILE=str(artefacts.rm),
        ACTOR_NEMO_FILE=str(artefacts.sft),
        TRAIN_DATA_PATH=str(artefacts.data("train_prompts")),
        VALID_DATA_PATH=str(artefacts.data("test_prompts")),
        **variables,
    )


def steps_made(job: SlurmJob) -> int:
    """PPO steps whose numbers are in the actor's log."""
    curves = read_metrics(job.results / "actor") if (job.results / "actor").exists() else {}
    points = curves.get("train_critic/critic_loss", [])
    return 1 + max(step for step, _ in points) if points else 0


def checkpoints(results: Path) -> list[str]:
    """Names of the actor's checkpoints."""
    folder = results / "actor" / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def final_weights(results: Path) -> dict[str, torch.Tensor]:
    """The policy that a finished run leaves."""
    return stored_weights(results / "actor" / "checkpoints" / "megatron_gpt_ppo_actor.nemo")


def node_address(node: str) -> str:
    """testbed.sh gives it to ``n1``, ``n2``, ..."""
    return f"10.213.9.{node.removeprefix('n')}"


def check_equal(results: Path, undisturbed: Path) -> None:
    """The final weights are the same to the last bit."""
    ours, theirs = final_weights(results), final_weights(undisturbed)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """A PPO job that nobody disturbs, ended."""
    job = submit_ppo(cluster, artefacts, tmp_path_factory.mktemp("ppo") / "results with a space")
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code, state.restarts) == ("COMPLETED", 0, 0), job.describe()
    return job


# ---- the supervised jobs ------------------------------------------------------------------------


def submit_supervised(
    cluster: Cluster, artefacts: Artefacts, options: Sequence[str], name: str, overrides: Sequence[str], results: Path
) -> SlurmJob:
    """slurm/``name``.sbatch, "sft" or "reward_model", with the model and the data that it starts from."""
    model, data = {"sft": (artefacts.base, "sft"), "reward_model": (artefacts.sft, "comparisons")}[name]
    return cluster.submit(
        options,
        f"{name}.sbatch",
        ["trainer.precision=32", "model.encoder_seq_length=64", *overrides],
        results,
        PRETRAINED_CHECKPOINT_NEMO_FILE=str(model),
        TRAIN_DATA_PATH=str(artefacts.data(f"train_{data}")),
        VALID_DATA_PATH=str(artefacts.data(f"test_{data}")),
    )


def test_sft(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """Two nodes with two ranks each; SIGUSR1 to the batch script, as the time limit sends it, then to the end."""
    overrides = [
        *("trainer.sft.max_epochs=4", f"trainer.sft.max_steps={SFT_STEPS}"),
        *("trainer.sft.val_check_interval=0", "trainer.sft.save_interval=0"),
        *("model.data.train_ds.global_batch_size=16", "model.data.train_ds.micro_batch_size=4"),
        "model.data.chat=False",
    ]
    job = submit_supervised(
        cluster, artefacts, ("--nodes=2", "--ntasks-per-node=2"), "sft", overrides, tmp_path / "sft"
    )
    log = job.results / "sft"
    job.wait_for(lambda: log.exists() and "train/loss" in read_metrics(log), TIMEOUT, "the first step")
    cluster.call("scancel", "--batch", "--signal=USR1", str(job.id))
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code, state.restarts) == ("COMPLETED", 0, 1), job.describe()
    assert [step for step, _ in read_metrics(log)["train/loss"]] == list(range(1, SFT_STEPS + 1))
    assert (log / "checkpoints" / "megatron_gpt_sft.nemo").is_file()
    assert "4 ranks, started by slurm" in job.output("sft")


def test_reward_model(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """One node with two ranks, to the end."""
    overrides = [
        *("trainer.rm.max_steps=3", "trainer.rm.val_check_interval=3", "trainer.rm.limit_val_batches=2"),
        "model.global_batch_size=8",
    ]
    job = submit_supervised(
        cluster, artefacts, ("--nodes=1", "--ntasks-per-node=2"), "reward_model", overrides, tmp_path / "rm"
    )
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code) == ("COMPLETED", 0), job.describe()
    curves = read_metrics(job.results / "reward_model")
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3] and "val/accuracy" in curves
    assert (job.results / "reward_model" / "checkpoints" / "megatron_gpt.nemo").is_file()


def test_the_command_line_under_srun(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """``srun nsa train sft``: its tasks are the job's ranks, on two nodes."""
    tasks = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "nemo_style_aligner", "train", "sft")
    command = [*tasks, *artefacts.sft_flags(tmp_path / "sft"), "trainer.num_nodes=2"]
    done = subprocess.run(command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 ranks, started by slurm" in done.stderr
    assert (tmp_path / "sft" / "checkpoints" / "megatron_gpt_sft.nemo").exists()


def test_a_mistake_in_an_override(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """The job's own output says what is wrong, and the job fails with the script's status."""
    job = cluster.submit(
        ("--nodes=1", "--ntasks-per-node=2"), "sft.sbatch", ["trainer.sft.max_stps=1"], tmp_path / "sft"
    )
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code) == ("FAILED", 2), job.describe()
    assert "max_stps" in job.output() and "max_steps" in job.output()
    assert "Killed" not in job.output() and job.output().count("did you mean trainer.sft.max_steps") == 1


def test_mpi_between_nodes(cluster: Cluster) -> None:
    """What TensorRT-LLM's engines need of ``srun --mpi=pmix``: messages between the ranks, with the pip Open MPI."""
    program = "from mpi4py import MPI; world = MPI.COMM_WORLD; print(world.size, world.allreduce(world.rank + 1))"
    command = ("srun", "--mpi=pmix", "--nodes=2", "--ntasks=4", sys.executable, "-c", program)
    assert cluster.call(*command).splitlines() == ["4 10"] * 4


# ---- PPO ----------------------------------------------------------------------------------------


def test_ppo(undisturbed: SlurmJob) -> None:
    """Critic on one node, actor on two: all steps, the archive, a secret that nobody else reads, both ended well."""
    results = undisturbed.results
    curves = read_metrics(results / "actor")
    assert [step for step, _ in curves["train_critic/critic_loss"]] == list(range(1, PPO_STEPS + 1))
    assert final_weights(results)
    assert len(read_metrics(results / "critic")["train/loss"]) == 2 * PPO_STEPS  # 16 samples in batches of 8
    assert stat.S_IMODE((results / "secret").stat().st_mode) == 0o600
    assert "2 ranks, started by slurm" in undisturbed.output("actor")
    output = undisturbed.output()
    assert "the critic is ready at n1:" in output and "the actor has finished" in output
    assert "the critic ended with status" not in output


@pytest.mark.parametrize("how", ["urgent job", "requeue", "time limit"])
def test_interrupted_ppo(
    how: str, cluster: Cluster, artefacts: Artefacts, undisturbed: SlurmJob, tmp_path: Path
) -> None:
    """Interrupted in the middle, started again by Slurm, and finished with an undisturbed run's weights.

    An urgent job preempts it with a grace time, as the cluster is set up: SIGUSR1 first. A requeue from outside is
    SIGTERM to everything, then SIGKILL. Before the time limit Slurm sends SIGUSR1 to the batch script, as here.
    """
    job = submit_ppo(cluster, artefacts, tmp_path / "results")
    job.wait_for(lambda: steps_made(job) >= 4, TIMEOUT, "step 4")
    assert steps_made(job) < PPO_STEPS
    urgent = None
    if how == "urgent job":
        wrap = ("--nodes=3", "--exclusive", "--partition=urgent", "--output=/dev/null", "--wrap=sleep 2")
        urgent = int(cluster.call("sbatch", "--parsable", *wrap))
    elif how == "requeue":
        cluster.call("scontrol", "requeue", str(job.id))
    else:
        cluster.call("scancel", "--batch", "--signal=USR1", str(job.id))
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code, state.restarts) == ("COMPLETED", 0, 1), job.describe()
    assert ("got SIGTERM" if how == "requeue" else "got SIGUSR1") in job.output(), job.describe()
    if urgent is not None:
        assert "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", str(urgent))
    check_equal(job.results, undisturbed.results)


def test_a_plan(cluster: Cluster, undisturbed: SlurmJob, artefacts: Artefacts, tmp_path: Path) -> None:
    """The batch script that the launcher makes of a plan and submits: the same numbers as ppo.sbatch's."""
    prompts = [str(artefacts.data(f"{kind}_prompts")) for kind in ("train", "test")]
    own: dict[str, dict[str, object]] = {
        "critic": {"pretrained_checkpoint.restore_from_path": str(artefacts.rm)},
        "actor": {
            "pretrained_checkpoint.restore_from_path": str(artefacts.sft),
            "model.data.data_prefix": {"train": prompts[:1], "validation": prompts[1:], "test": prompts[1:]},
        },
    }
    targets = ["actor"]
    for override in PPO_OVERRIDES:
        if override.startswith("--"):
            targets = ["actor", "critic"] if override == "--both" else [override[2:]]
            continue
        key, value = override.split("=", 1)
        for target in targets:
            own[target][key] = yaml.safe_load(value.replace("1e-", "1.0e-"))
    jobs = {
        "critic": {"script": "serve_ppo_critic.py", "serves": "actor", "overrides": own["critic"]},
        "actor": {"script": "train_gpt_ppo_actor.py", "nodes": 2, "overrides": own["actor"]},
    }
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"results_dir": str(tmp_path / "ppo"), "jobs": jobs}))
    command = ["-m", "nemo_style_aligner", "launch", str(plan), "--with", "slurm", "--sbatch=--time=60"]
    number = int(cluster.call(sys.executable, *command).split()[-1])
    job = SlurmJob(cluster, number, tmp_path / "ppo", tmp_path / "ppo" / f"slurm-{number}.log")
    assert job.wait(TIMEOUT).name == "COMPLETED", job.describe()
    assert "the critic is ready at n" in job.output() and "the actor has finished" in job.output()
    check_equal(job.results, undisturbed.results)


def open_ports(job: SlurmJob) -> dict[Listener, int | None]:
    """What a running PPO job's ranks listen on beyond loopback, and how each answers a request without the secret.

    None: not at all, or not in HTTP.
    """
    addresses: dict[Listener, str] = {}
    for script, nodes in (("serve_ppo_critic.py", ("n1",)), ("train_gpt_ppo_actor.py", ("n2", "n3"))):
        ranks = job.ranks(script)
        assert len(ranks) == len(nodes), job.describe()
        for rank, node in enumerate(nodes):
            found = {listener for listener in listeners(ranks[rank]) if not listener.is_local}
            assert {listener.address for listener in found} <= {"0.0.0.0", node_address(node)}, found
            addresses |= {Listener(node, listener.port): node_address(node) for listener in found}

    def ask(listener: Listener) -> int | None:
        try:
            return requests.get(f"http://{addresses[listener]}:{listener.port}/status", timeout=5).status_code
        except requests.RequestException:
            return None

    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        return dict(zip(addresses, pool.map(ask, addresses), strict=True))


def check_open_ports(job: SlurmJob) -> None:
    """From another machine nothing answers without the secret: neither the critic's service nor the work queue.

    torch.distributed's own ports are open as well (docs/service.md); they speak no HTTP.
    """
    found = open_ports(job)
    critic_port = 30000 + job.id % 2700
    assert found[Listener("n1", critic_port)] == 401, found
    assert sorted(listener.address for listener, status in found.items() if status == 401) == ["n1", "n2"], found
    assert set(found.values()) <= {401, None}, found


@pytest.mark.parametrize("script", ["serve_ppo_critic.py", "train_gpt_ppo_actor.py"])
def test_a_component_that_dies_takes_the_job_with_it(
    script: str, cluster: Cluster, artefacts: Artefacts, tmp_path: Path
) -> None:
    """SIGKILL to the critic, which may not be restarted, or to one of the actor's ranks. Before, knock at its ports."""
    overrides = (
        *("trainer.ppo.max_epochs=100", "trainer.ppo.max_steps=900"),  # it goes on while the ports are asked
        "trainer.ppo.batch_iterator.use_flask=True",
    )
    job = submit_ppo(cluster, artefacts, tmp_path / "results", overrides, CRITIC_RESTARTS="0")
    job.wait_for(lambda: steps_made(job) >= 1, TIMEOUT, "the first step")
    check_open_ports(job)
    job.kill_rank(script, 0 if "critic" in script else 1)
    state = job.wait(TIMEOUT)
    assert state.name == "FAILED" and state.exit_code not in (0, 75) and state.restarts == 0, job.describe()
    died = "critic" if "critic" in script else "actor"
    assert f"the {died} ended with status" in job.output() and not cluster.call("squeue", "--noheader")


def test_a_critic_that_dies_is_started_again(
    cluster: Cluster, artefacts: Artefacts, undisturbed: SlurmJob, tmp_path: Path
) -> None:
    """SIGKILL to the critic; the actor waits, replays, and ends with an undisturbed run's weights."""
    job = submit_ppo(cluster, artefacts, tmp_path / "results")
    job.wait_for(lambda: steps_made(job) >= 4, TIMEOUT, "step 4")
    job.kill_rank("serve_ppo_critic.py", 0)
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code, state.restarts) == ("COMPLETED", 0, 0), job.describe()
    assert "restart 1 of the critic" in job.output()
    check_equal(job.results, undisturbed.results)


def test_a_wrong_port(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """The actor gives up after ready_seconds and names the address; the critic goes down with it."""
    overrides = ["remote_critic_rm.critic.port=9", "remote_critic_rm.timeouts.ready_seconds=5"]
    job = submit_ppo(cluster, artefacts, tmp_path / "results", overrides)
    state = job.wait(TIMEOUT)
    assert state.name == "FAILED" and state.exit_code not in (0, 75), job.describe()
    assert "http://n1:9 was not ready within 5 s" in job.output("actor")
    assert "http://n1:9 was not ready within 5 s" in job.output()  # the end of the log, where the user looks first
    assert not cluster.call("squeue", "--noheader")


def test_a_critic_that_never_starts(cluster: Cluster, artefacts: Artefacts, tmp_path: Path) -> None:
    """A reward model that is not there: the job ends long before the actor would give up waiting."""
    job = submit_ppo(
        cluster,
        artefacts,
        tmp_path / "results",
        [
            "remote_critic_rm.timeouts.ready_seconds=1800",
            "--critic",
            "pretrained_checkpoint.restore_from_path=/none.nemo",
        ],
    )
    state = job.wait(TIMEOUT)
    assert state.name == "FAILED" and state.exit_code not in (0, 75), job.describe()
    assert "it was never ready" in job.output() and "/none.nemo" in job.output()


# ---- the script alone, with stand-ins for its components ----------------------------------------


def submit_standins(
    cluster: Cluster, folder: Path, options: Sequence[str], seconds: int, end_seconds: int, **variables: str
) -> SlurmJob:
    """slurm/ppo.sbatch with scripts that need no time to start: tests/slurm/standins says what the numbers mean."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "slurm").symlink_to(ROOT / "slurm")
    (repository / "nemo_style_aligner").symlink_to(ROOT / "nemo_style_aligner")
    (repository / "examples").symlink_to(TESTBED.parent / "standins")
    return cluster.submit(
        [*options, *PPO_OPTIONS],
        "ppo.sbatch",
        [f"seconds={seconds}", "--critic", f"end_seconds={end_seconds}"],
        folder / "results",
        REPO=str(repository),
        CRITIC_STOP_SECONDS="20",
        **variables,
    )


def test_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's own signal before the limit, some time in the job's only minute; the rest in a second run."""
    job = submit_standins(cluster, tmp_path, ("--time=1", "--signal=B:USR1@30"), seconds=600, end_seconds=0)
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code, state.restarts) == ("COMPLETED", 0, 1), job.describe()
    assert "got SIGUSR1" in job.output() and "got SIGTERM" not in job.output(), job.describe()


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Although its actor has ended with 75."""
    job = submit_standins(cluster, tmp_path, (), seconds=600, end_seconds=0)
    job.wait_for(lambda: job.output("actor").count("the actor works") == 2, TIMEOUT, "both of the actor's ranks")
    job.cancel()
    job.wait_for(lambda: "stopped early" in job.output(), 60, "the script's end", while_running=False)
    job.wait_for(lambda: not cluster.call("squeue", "--noheader"), 60, "an empty queue", while_running=False)
    assert job.state().name == "CANCELLED" and job.state().restarts == 0, job.describe()


@pytest.mark.parametrize("end_seconds", [13, 600])
def test_a_critic_that_takes_its_time_to_end(end_seconds: int, cluster: Cluster, tmp_path: Path) -> None:
    """It has CRITIC_STOP_SECONDS, also where that is longer than Slurm's KillWait (10 s here), and no more."""
    job = submit_standins(cluster, tmp_path, (), seconds=5, end_seconds=end_seconds)
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code) == ("COMPLETED", 0), job.describe()
    assert ("the critic's last words" in job.output("critic")) == (end_seconds == 13), job.describe()
    assert ("ending the critic" in job.output()) == (end_seconds == 600), job.describe()


# Writes its arguments down, one a line, and does what Slurm's own srun does with those that are not Pyxis's.
SRUN_WITHOUT_PYXIS = r"""#!/bin/bash
printf '%s\n' "$*" >>"$(dirname "$0")/calls"
for argument; do
    shift
    case $argument in
    --container-* | --no-container-*) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec SRUN "$@"
"""


def test_containers(cluster: Cluster, tmp_path: Path) -> None:
    """Pyxis is not there: every srun of the job has its flags, which a script takes away; the rest runs as ever."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN_WITHOUT_PYXIS.replace("SRUN", str(shutil.which("srun"))))
    (programs / "srun").chmod(0o755)
    job = submit_standins(
        cluster,
        tmp_path,
        (),
        seconds=1,
        end_seconds=0,
        CONTAINER_IMAGE="nvcr.io#nvidia/nemo:1",
        CONTAINER_MOUNTS="/data:/data:ro",
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    state = job.wait(TIMEOUT)
    assert (state.name, state.exit_code) == ("COMPLETED", 0), job.describe()
    repository, results = tmp_path / "repository", tmp_path / "results"
    flags = (
        "--container-image=nvcr.io#nvidia/nemo:1 "
        f"--container-mounts={repository}:{repository},{results}:{results},/data:/data:ro "
        f"--container-workdir={repository} --no-container-mount-home env PYTHONPATH={repository}"
    )
    listing, *calls = (programs / "calls").read_text().splitlines()
    assert listing == "--mpi=list"
    assert len(calls) == 2 and all(flags in call for call in calls), calls  # the critic, the actor
    assert sum("--mpi=pmix" in call and "train_gpt_ppo_actor.py" in call for call in calls) == 1, calls
