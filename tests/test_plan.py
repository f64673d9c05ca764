"""The plan's file: what it says of jobs, and what is refused before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_processes import environment

from nemo_style_aligner.tools.placement.plan import Address, Plan, PlanError, check_configs, fill, plan_of, read_plan
from nemo_style_aligner.tools.placement.printers import mpirun_script, slurm_script
from nemo_style_aligner.trainer.config.command_line import config_with

PAIR: dict[str, Any] = {
    "critic": {"script": "serve_ppo_critic.py", "serves": "actor", "devices": 2},
    "actor": {
        "script": "train_gpt_ppo_actor.py",
        "nodes": 2,
        "devices": 4,
        "overrides": {"model.optim.lr": 1e-5, "pretrained_checkpoint.restore_from_path": "/models/a b's {x}=1.nemo"},
    },
}
AT = {"critic": Address("node1", 4711, "0.0.0.0")}


def plan(**jobs: Any) -> Plan:
    return plan_of({"results_dir": "/results/run", "jobs": jobs})


def test_what_a_plan_makes_of_a_pair() -> None:
    """Sizes, log directories and the critic's address reach both jobs; the user's overrides come last."""
    pair = plan(**PAIR)
    commands = {name: [fill(argument, AT) for argument in pair.arguments(name)] for name in pair.jobs}
    assert (pair.services(), pair.trainers()) == (["critic"], ["actor"])
    critic, actor = (config_with(f"gpt_ppo_{name}", commands[name]) for name in ("critic", "actor"))
    assert (critic.trainer.devices, critic.trainer.ppo.port, critic.trainer.ppo.host) == (2, 4711, "0.0.0.0")
    assert (actor.trainer.num_nodes, actor.trainer.devices) == (2, 4)
    assert (actor.remote_critic_rm.critic.ip, actor.remote_critic_rm.critic.port) == ("node1", 4711)
    assert actor.exp_manager.explicit_log_dir == "/results/run/actor"
    assert actor.pretrained_checkpoint.restore_from_path == "/models/a b's {x}=1.nemo"
    assert commands["actor"][-1].startswith("pretrained_checkpoint") and actor.model.optim.lr == 1e-5


@pytest.mark.parametrize(
    "value",
    ["a'b", "x\\", "a\\'b", "{a} {b.c}", "a,b=c", "", "null", "1", "on top", "/a/b-c.d", 1e-5, -3, True, None,
     [1, "a b"], {"train": ["/x=1.jsonl"], "test": []}],
)  # fmt: skip
def test_values_reach_the_config_as_they_are(value: Any) -> None:
    arguments = plan(a={"script": "train_gpt_sft.py", "overrides": {"model.data.x": value}}).arguments("a")
    found = config_with("gpt_sft", arguments).model.data.x
    assert found == value and type(found) is type(found if isinstance(value, (list, dict)) else value)


def test_sections_have_the_names_of_the_clients_config() -> None:
    reward = {"script": "serve_reward_function.py", "serves": "actor", "arguments": ["--function", "x.py:f"]}
    found = plan(rewards=reward, actor={"script": "train_gpt_reinforce_actor.py"})
    assert "remote_rm.reward_model.ip={rewards.host}" in found.arguments("actor")
    assert "trainer.reinforce.batch_iterator.port=0" in found.arguments("actor")
    assert found.arguments("rewards") == [
        "--port",
        "{rewards.port}",
        "--host",
        "{rewards.listen}",
        "--function",
        "x.py:f",
    ]


def test_several_rewards_are_told_apart_by_references() -> None:
    model = {"script": "serve_reward_model.py", "serves": "actor"}
    actor: dict[str, Any] = {"script": "train_gpt_reinforce_actor.py"}
    with pytest.raises(PlanError, match=r"helpful and safe would both be its remote_critic_rm.reward_model.ip"):
        plan(helpful=model, safe=model, actor=actor)
    urls = [{"source": f"http://{{{name}.host}}:{{{name}.port}}/reward_model"} for name in ("helpful", "safe")]
    found = plan(helpful=model, safe=model, actor={**actor, "overrides": {"trainer.reinforce.rewards": urls}})
    at = {name: Address(name, port, name) for port, name in enumerate(("helpful", "safe"))}
    cfg = config_with("gpt_reinforce_actor", [fill(argument, at) for argument in found.arguments("actor")])
    assert [part.source for part in cfg.trainer.ppo.rewards] == [
        "http://helpful:0/reward_model", "http://safe:1/reward_model",
    ]  # fmt: skip


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PlanError) as told:
        plan(
            critic={"script": "serve_ppo_critc.py", "serves": ["actr"]},
            rewards={"script": "serve_reward_function.py", "overrides": {"trainer.devices": 3, "a": "{actr.port}"}},
        )
    for part in (
        "jobs.critic.script: ", "no such file; did you mean serve_ppo_critic.py?",
        "jobs.critic.serves: actr is none of the jobs that serve nobody: rewards",
        "jobs.critic: serve_ppo_critc.py must be told its port: put {critic.port} in",
        "jobs.rewards: serve_reward_function.py is one process and has no config: give its options in",
        "jobs.rewards.overrides.trainer.devices: the plan's devices says it",
        "jobs.rewards: serve_reward_function.py is a service: say in jobs.rewards.serves whom it serves",
        "{actr.host} or {actr.port}: no job actr of this plan",
    ):  # fmt: skip
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("jobs", "reason"),
    [
        ({"A": {"script": "train_gpt_sft.py"}}, "jobs.A: name a job by lower-case letters"),
        ({"secret": {"script": "train_gpt_sft.py"}}, "jobs.secret: name a job by"),
        ({"a": {"script": "train_gpt_sft.py", "device": 1}}, "jobs.a.device: no such key; did you mean devices?"),
        ({"a": {"script": "train_gpt_sft.py", "nodes": 0}}, "jobs.a.nodes=0: must be 1 or more"),
        ({"a": {"script": "train_gpt_sft.py", "nodes": True}}, "jobs.a.nodes=True: must be a whole number"),
        ({"a": {"script": "train_gpt_sft.py", "env": {"X": 1}}}, "jobs.a.env: all in it must be texts"),
        ({"a": {"script": "train_gpt_sft.py", "arguments": [1]}}, "jobs.a.arguments: all in it must be texts"),
        ({"a": ["train_gpt_sft.py"]}, "jobs.a: ['train_gpt_sft.py'] is no mapping with script, nodes"),
        ({"a": {"nodes": 1}}, "jobs.a.script: missing"),
        ({"a": {"script": "serve_ppo_critic.py", "serves": "a"}}, "jobs: one must serve nobody"),
        ({"a": {"script": "train_gpt_sft.py", "overrides": {"x": "{Word.host}"}}}, "{Word.port}: no job Word"),
        ({"a": {"script": "train_gpt_sft.py", "arguments": ["{my-word.port}"]}}, "{my-word.port}: no job my-word"),
    ],
)  # fmt: skip
def test_what_a_job_cannot_be(jobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError) as told:
        plan(**jobs)
    assert reason in str(told.value)


def test_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    """A plan that is written is the plan that is read; a file with a mistake is named, without a traceback."""
    path = tmp_path / "plan.yaml"
    plan(**PAIR).write(path, "Recommended for\n12 nodes")
    assert path.read_text().startswith("# Recommended for\n# 12 nodes\nresults_dir: /results/run\n")
    assert read_plan(path) == plan(**PAIR)
    for text, reason in (
        ("results_dir: /x\njobs: {a: {script: x}, a: {script: y}}", "found duplicate key a"),
        ("jobs: [", "is not YAML"),
        ("[]", "is no mapping with results_dir, jobs"),
        (
            "results_dir: /x\njobs: {a: &a [1], b: &b [*a, *a]"
            + "".join(f", {chr(c + 1)}: &{chr(c + 1)} [*{chr(c)}, *{chr(c)}]" for c in range(98, 115))
            + "}",
            "more than 20,000 values, with those that aliases stand for",
        ),
        ("results_dir: /x\n" + "#" * (1 << 20), "more than the 1,048,576 bytes"),
        ("jobs: " + "[" * 500, "more than 100 lists and mappings"),
        ('results_dir: "/x\\ny"\njobs: {a: {script: train_gpt_sft.py}}', "has a character that cannot be printed"),
        ("3", "cannot be read: Invalid loaded object type: int"),
        (None, "cannot be read: No such file"),
    ):
        path.write_text(text) if text else path.unlink()
        with pytest.raises(PlanError, match=reason):
            read_plan(path)
    done = subprocess.run(
        [sys.executable, "-m", "nemo_style_aligner", "launch", str(path)],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith(f"error: the plan {path} cannot be read")


def test_settings_are_checked_as_the_jobs_would() -> None:
    with pytest.raises(PlanError) as told:
        check_configs(plan(**PAIR, sft={"script": "train_gpt_sft.py", "overrides": {"model.optim.lrr": 1}}))
    assert "jobs.sft:   model.optim.lrr; did you mean model.optim.lr" in str(told.value)
    assert "jobs.sft: these keys need a value: model.restore_from_path" in str(told.value)
    assert "jobs.actor" not in str(told.value)


# ---- printed plans ------------------------------------------------------------------------------


def test_mpirun_lines_name_hosts_and_addresses() -> None:
    lines = mpirun_script(plan(**PAIR), ["n1", "n2", "n3"]).splitlines()
    critic, actor = (next(line for line in lines if line.endswith(f"& {name}=$!")) for name in ("critic", "actor"))
    port = re.search(r"trainer.ppo.port=(\d+) trainer.ppo.host=0.0.0.0", critic)
    assert port is not None and "-n 2 --host n1:2 -x" in critic and "MASTER_ADDR" not in critic
    assert f"remote_critic_rm.critic.ip=n1 remote_critic_rm.critic.port={port[1]} " in actor
    assert "-n 8 --host n2:4,n3:4 " in actor and "-x MASTER_ADDR=n2 " in actor
    for hosts in ([], ["n1", "n2"]):
        with pytest.raises(PlanError, match=f"the plan has 3 nodes and --hosts has {len(hosts)} hosts"):
            mpirun_script(plan(**PAIR), hosts)


def test_mpiruns_lines_end_services_after_the_trainer_whatever_their_names(tmp_path: Path) -> None:
    """In mpirun's place: a trainer that fails, and a service that ends when it is asked to."""
    jobs = {"status": PAIR["critic"], "actor": {**PAIR["actor"], "nodes": 1}}
    pair = plan_of({"results_dir": str(tmp_path / "run"), "jobs": jobs})
    lines = re.sub(r"^\S*mpirun ", f"{tmp_path}/mpirun ", mpirun_script(pair), flags=re.MULTILINE)
    serve = f"trap 'touch {tmp_path}/asked; exit 0' USR1; sleep 60 & wait"
    (tmp_path / "mpirun").write_text(f'#!/bin/bash\nif [[ "$*" == *serve* ]]; then {serve}; fi\nsleep 1; exit 3\n')
    (tmp_path / "mpirun").chmod(0o755)
    done = subprocess.run(["bash", "-c", lines], env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 3 and (tmp_path / "asked").exists(), done.stderr


def test_no_name_becomes_a_line_or_an_option_of_the_batch_script(tmp_path: Path) -> None:
    run = plan_of({"results_dir": "/results/my run --uid=0", "jobs": {"actor": PAIR["actor"]}})
    script = slurm_script(run, Path("/plans/p\ntouch /tmp/pwned\r#SBATCH --uid=0.yaml"))
    assert not any(line.startswith(("touch", "#SBATCH --uid")) for line in script.splitlines())
    assert "#SBATCH --job-name='my run --uid=0'" in script


def test_what_is_no_file_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="is no file"):
        read_plan(tmp_path / "plan.yaml")


def test_the_batch_script_has_a_component_for_each_job(tmp_path: Path) -> None:
    """In a cluster's place: an srun and a scontrol that say what they were asked. Any name will do for a service."""
    jobs = {"service": PAIR["critic"], "actor": PAIR["actor"]}
    pair = plan_of({"results_dir": str(tmp_path / "run"), "jobs": jobs})
    script = tmp_path / "job.sbatch"
    script.write_text(slurm_script(pair, Path("/plans/p.yaml"), "-A me --gpus-per-node=8"))
    headers = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    first, second = headers[: headers.index("#SBATCH hetjob")], headers[headers.index("#SBATCH hetjob") + 1 :]
    for group, size in ((first, ("1", "2")), (second, ("2", "4"))):
        assert {f"#SBATCH --nodes={size[0]}", f"#SBATCH --ntasks-per-node={size[1]}"} < {*group}
        assert "#SBATCH -A me --gpus-per-node=8" in group
    for name, code in {
        "srun": 'printf "%s\\n" "$@" >"$RESULTS/$NAME"; [[ $NAME == actor ]] || { sleep 60 >/dev/null 2>&1 & wait; }',
        "scontrol": 'if [[ $2 == hostnames ]]; then echo "$3"; fi',
        "squeue": 'echo "7.0 service"',
        "scancel": 'kill "$(pgrep -f "[s]run --job-name=service")"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nRESULTS={tmp_path}/run\nNAME=${{1#*=}}\n{code}\n")
        (tmp_path / name).chmod(0o755)
    env = environment() | {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "run"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2", "SLURM_SUBMIT_DIR": "/"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "the actor has finished" in done.stdout, done.stdout + done.stderr
