"""A plan as a shell script: for Open MPI's ``mpirun``, and for Slurm, as a batch script of a component for each job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_style_aligner.engine.parallel.detection import LOOPBACK
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.places import REPOSITORY
from nemo_style_aligner.tools.placement.plan import Address, Plan, PlanError
from nemo_style_aligner.wording import counted

_EVERYWHERE = "0.0.0.0"  # a service in a cluster listens on all addresses of its node, and asks for the secret
_SERVICE_SECONDS = 90  # for a service's last requests, after the trainers have ended
_SERVICE_PORTS = 2700  # from 30000 on, by the number of the Slurm job: jobs may share a node


class SubmitError(UserError):
    """The batch script could not be submitted; the message says why."""

    exit_status = 1


def mpirun_script(plan: Plan, hosts: Sequence[str] = ()) -> str:
    """The lines that start a plan's jobs with ``mpirun``, end the services after the trainers, and keep the status.

    Args:
        hosts: one for each node of each job, in the plan's order; none: this machine for all.

    Raises:
        PlanError: there are too few hosts, or too many.
    """
    needed = sum(job.nodes for job in plan.jobs.values())
    if len(hosts) != needed and (hosts or needed > len(plan.jobs)):
        raise PlanError(f"the plan has {counted(needed, 'nodes')} and --hosts has {counted(len(hosts), 'hosts')}")
    rest = iter(hosts)
    placed = {name: [next(rest) for _ in range(job.nodes if hosts else 0)] for name, job in plan.jobs.items()}
    addresses = {
        name: Address(placed[name][0], free_port(), _EVERYWHERE) if hosts else Address(LOOPBACK, free_port(), LOOPBACK)
        for name in plan.services()
    }
    make_secret = [sys.executable, "-m", "nemo_style_aligner.guard.secret", str(plan.secret)]
    lines = [
        "#!/bin/bash",
        *(f"mkdir -p {shlex.quote(str(plan.log_dir(name)))}" for name in plan.jobs),
        f"{shlex.join(make_secret)} >/dev/null || exit",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
    ]
    lines += [_mpirun_line(plan, name, placed[name], addresses) for name in [*plan.services(), *plan.trainers()]]
    lines += ["STATUS=0", *(f'wait "${name}" || STATUS=$?' for name in plan.trainers())]
    # To mpirun SIGTERM means to kill the ranks, at the end; SIGUSR1 is handed on.
    lines += [f'kill -USR1 "${name}"' for name in plan.services()]
    lines += [f'timeout {_SERVICE_SECONDS} tail --pid "${name}" -f /dev/null' for name in plan.services()]
    return "\n".join([*lines, "exit $STATUS", ""])


def _mpirun_line(plan: Plan, name: str, hosts: Sequence[str], addresses: Mapping[str, Address]) -> str:
    job = plan.jobs[name]
    command = [shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") or "mpirun"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command += ["-n", str(job.nodes * job.devices)]
    command += ["--host", ",".join(f"{host}:{job.devices}" for host in hosts)] if hosts else []
    variables = plan.environment(name) | ({"MASTER_ADDR": hosts[0]} if len(hosts) > 1 else {})
    command += [part for key, value in variables.items() for part in ("-x", f"{key}={value}")]
    command += [sys.executable, *plan.command(name, addresses)]
    return f"{shlex.join(command)} >>{shlex.quote(str(plan.log_dir(name) / 'output-0.log'))} 2>&1 & {name}=$!"


def slurm_script(plan: Plan, source: Path, options: str = "", restarts: int = 2) -> str:
    """A batch script with a component for each job of a plan, which `slurm/functions.sh` looks after.

    Args:
        source: the plan's file, for the comment.
        options: sbatch's, for all components.
        restarts: of a service that dies after it was ready.

    Raises:
        PlanError: the plan has several trainers.
    """
    if len(plan.trainers()) > 1:
        raise PlanError(f"`--with slurm` starts one trainer in a job, and the plan has {', '.join(plan.trainers())}")
    made_from = repr(str(source))[1:-1]  # on one line
    groups = {name: str(number) if len(plan.jobs) > 1 else "" for number, name in enumerate(plan.jobs)}
    lines = [
        "#!/bin/bash",
        f"# Made from {made_from}. Submitted again, it goes on where the run was; docs/slurm.md has the variables.",
        "\n#SBATCH hetjob\n".join(_sbatch_lines(plan, name, options) for name in plan.jobs),
        "",
        "set -euo pipefail",
        *(f"{name}={value}" for name, value in _settings(plan, restarts).items()),
        "export NCCL_ALGO=${NCCL_ALGO:-allreduce:tree} # sums in a fixed order",
        '. "$REPO/slurm/functions.sh"',
        "prepare",
        "make_secret",
    ]
    for number, name in enumerate(plan.services()):
        lines.append(f"{name}_host=$(first_host {groups[name]})")
        lines.append(f"{name}_port=$((30000 + (SLURM_JOB_ID + {number}) % {_SERVICE_PORTS}))")
        lines.append(f"start_{name}() {{ {_step_line(plan, name, groups[name])}; }}")
        lines.append(f'serve {name} "${name}_host" "${name}_port"')
    trainer = plan.trainers()[0]
    lines += [_step_line(plan, trainer, groups[trainer]), f'train_beside_services {trainer} "$STARTED"', ""]
    return "\n".join(lines)


def submit(plan: Plan, script: str) -> int:
    """Write a batch script and submit it; sbatch's status.

    Raises:
        SubmitError: there is no sbatch.
    """
    plan.results_dir.mkdir(parents=True, exist_ok=True)
    file = plan.results_dir / "job.sbatch"
    file.write_text(script, encoding="utf-8")
    if shutil.which("sbatch") is None:
        raise SubmitError(f"there is no sbatch on this machine: submit {file} where there is one")
    return subprocess.run(["sbatch", str(file)], check=False).returncode


def _sbatch_lines(plan: Plan, name: str, options: str) -> str:
    job, number = plan.jobs[name], [*plan.jobs].index(name)
    lines = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.devices}", "--exclusive"]
    if number == 0:  # the other components have these of the first
        lines += [
            f"--job-name={shlex.quote(plan.results_dir.name)}",
            f"--output={shlex.quote(str(plan.results_dir))}/slurm-%j.log",
            "--requeue",
        ]
        lines += ["--time=04:00:00", "--signal=B:USR1@120", "--open-mode=append"]
    return "\n".join(f"#SBATCH {option}" for option in [*lines, *([options] if options else [])])


def _settings(plan: Plan, restarts: int) -> dict[str, str]:
    return {
        "REPO": shlex.quote(str(REPOSITORY)),
        "RESULTS_DIR": shlex.quote(str(plan.results_dir)),
        "PYTHON": f"${{PYTHON:-{shlex.quote(sys.executable)}}}",
        "CONTAINER_IMAGE": "${CONTAINER_IMAGE:-}",
        "CONTAINER_MOUNTS": "${CONTAINER_MOUNTS:-}",
        "MPI_TYPE": "${MPI_TYPE-}",
        "CRITIC_RESTARTS": f"${{CRITIC_RESTARTS:-{restarts}}}",
        "CRITIC_STOP_SECONDS": "${CRITIC_STOP_SECONDS:-120}",
    }


def _step_line(plan: Plan, name: str, group: str) -> str:
    """The call of functions.sh's ``step`` for a job; addresses are the script's variables."""
    variables = [f"{key}={value}" for key, value in plan.jobs[name].env.items()]
    command = shlex.join(["-u", str(plan.jobs[name].path), *plan.arguments(name)])
    # In single quotes, as all that has braces.
    command = re.sub(r"\{(\w+)\.(host|port)\}", r"""'"$\1_\2"'""", command)
    command = re.sub(r"\{\w+\.listen\}", _EVERYWHERE, command)
    return f"step {name} '{group}' env {shlex.join(variables)} \"$PYTHON\" {command}"
