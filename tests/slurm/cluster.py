"""The Slurm cluster of testbed.sh and jobs on it, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from job_processes import ROOT, environment

TESTBED = Path(__file__).with_name("testbed.sh")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED")


@dataclasses.dataclass(frozen=True)
class JobState:
    """What ``scontrol show job`` says of a job's first component.

    Attributes:
        name: RUNNING, COMPLETED, FAILED, ...
        exit_code: of the batch script.
        restarts: how often it was requeued.
    """

    name: str
    exit_code: int
    restarts: int


class Cluster:
    """A running cluster; ``folder`` is testbed.sh's directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment() | {"SLURM_CONF": str(folder / "etc" / "slurm.conf")}

    def call(self, *command: str, check: bool = True) -> str:
        """A Slurm command's output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self, options: Sequence[str], script: str, overrides: Sequence[str], results: Path, **variables: str
    ) -> SlurmJob:
        """``sbatch`` a script of slurm/ as a user does: from the repository's folder, settings in the environment."""
        results.mkdir(parents=True, exist_ok=True)
        log = results / "job.log"
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={log}", *options, f"slurm/{script}", *overrides],
            env=self.env | {"RESULTS_DIR": str(results), "PYTHON": sys.executable} | variables,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return SlurmJob(self, int(done.stdout), results, log)


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A submitted job."""

    cluster: Cluster
    id: int
    results: Path
    log: Path

    def state(self) -> JobState:
        """Its present state."""
        text = self.cluster.call("scontrol", "show", "job", str(self.id))
        found = [re.search(pattern, text) for pattern in (r"JobState=(\w+)", r"ExitCode=(\d+):", r"Restarts=(\d+)")]
        name, exit_code, restarts = (match[1] for match in found if match)
        return JobState(name, int(exit_code), int(restarts))

    def wait(self, timeout: float) -> JobState:
        """Until it has ended, for good."""

        def ended() -> bool:
            # A requeued heterogeneous job waits for a scheduling event, of which a busy cluster has many.
            self.cluster.call("scontrol", "update", "PartitionName=urgent", "State=UP")
            return self.state().name in ENDED

        self.wait_for(ended, timeout, "its end", while_running=False)
        return self.state()

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str, while_running: bool = True) -> None:
        """Until ``condition``; AssertionError with all logs after ``timeout`` seconds or when the job ends before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"no sign of {what} after {timeout} s: {self.describe()}"
            assert not while_running or self.state().name not in ENDED, f"ended before {what}: {self.describe()}"
            time.sleep(0.5)

    def output(self, component: str = "") -> str:
        """What the batch script, or a component, has written."""
        path = self.results / component / f"output-{self.id}.log" if component else self.log
        return path.read_text(errors="replace") if path.exists() else ""

    def describe(self) -> str:
        """State and the ends of all logs, for failures."""
        parts = [f"job {self.id}: {self.state()}", f"---- {self.log}", self.output()[-6000:]]
        for path in sorted(self.results.glob("*/output-*.log")):
            parts += [f"---- {path}", path.read_text(errors="replace")[-4000:]]
        return "\n".join(parts)

    def ranks(self, script: str) -> dict[int, int]:
        """Process ids of the ranks that run ``script``, by rank, in whichever namespace they are."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it may be gone
                arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                variables = dict(line.split("=", 1) for line in lines if "=" in line)
                is_rank = arguments[0] == sys.executable and any(a.endswith(script) for a in arguments)
                if is_rank and variables.get("SLURM_JOB_ID") == str(self.id):
                    found[int(variables["SLURM_PROCID"])] = int(folder.name)
        return found

    def kill_rank(self, script: str, rank: int) -> None:
        """SIGKILL to a rank."""
        ranks = self.ranks(script)
        assert rank in ranks, f"rank {rank} of {script} does not run: {self.describe()}"
        os.kill(ranks[rank], signal.SIGKILL)

    def cancel(self) -> None:
        """End it, whatever it does."""
        self.cluster.call("scancel", str(self.id), check=False)
