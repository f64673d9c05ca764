"""The project's entry scripts as processes, for tests that start them as users do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.trainer.telemetry.metric_table import find_metric
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "nlp" / "gpt"
PYTHONPATH = str(ROOT)
"""Of every process here; tests may put folders of their own before it."""

_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "TORCHELASTIC_", "SLURM_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """This process's environment without what a launcher put there; one thread per process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) and k not in _TORCHRUN}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "TOKENIZERS_PARALLELISM": "false"}


class Job:
    """A running process with its output in a file.

    Args:
        command: what to run.
        log: where standard output and error go, together.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            # A session of its own: whatever a failed test leaves behind is ended with the group.
            self.process = subprocess.Popen(
                self.command, stdout=file, stderr=subprocess.STDOUT, env=environment(), cwd=log.parent,
                start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        """Everything written so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit status; AssertionError with the output when it takes longer than ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done after {timeout} s: {self.describe()}") from None

    def check(self, timeout: float) -> str:
        """Wait for success; the output. What the job has logged must be in the table of metrics."""
        status = self.wait(timeout)
        assert status == 0, f"status {status}: {self.describe()}"
        require_known_metrics(self.command)
        return self.output()

    def describe(self) -> str:
        """Command line and the end of the output, for failures."""
        return f"{' '.join(self.command)}\n{self.output()[-6000:]}"

    def stop(self, timeout: float = 30.0, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, as a user or Slurm ends a service, or another signal; its exit status."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def kill(self) -> None:
        """End the process and all that it started and that is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)  # a process in the middle of writing to disk goes when that is done
        # What an mpirun has left would end a later one that gets the same process number.
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self.process.pid}", ignore_errors=True)


def script(name: str, *arguments: str) -> list[str]:
    """The command line of an entry script under plain python."""
    return [sys.executable, "-u", str(SCRIPTS / name), *arguments]


def mpirun(ranks: int, command: Sequence[str]) -> list[str]:
    """The command under the mpirun of this environment."""
    return [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), "--allow-run-as-root", *command]


def run(command: Sequence[str], log: Path, timeout: float = 120.0) -> str:
    """Run to the end, which must be a success; the output."""
    job = Job(command, log)
    try:
        return job.check(timeout)
    finally:
        job.kill()


def require_known_metrics(command: Sequence[str]) -> None:
    """Whatever a job has logged is a row of the metrics' table, apart from the statistics of a user's own loss."""
    folders = [Path(word.partition("=")[2]) for word in command if word.startswith("exp_manager.explicit_log_dir=")]
    is_own_loss = any("policy_loss=" in word and ".py:" in word for word in command)
    names = {name for folder in folders for name in read_metrics(folder)}
    unknown = {name for name in names if find_metric(name) is None}
    if is_own_loss:
        unknown = {name for name in unknown if not name.startswith("train_optim/")}
    assert not unknown, f"not in trainer/telemetry/metric_table.py: {sorted(unknown)}"


def wait_until_ready(job: Job, port: int, timeout: float = 90.0) -> None:
    """Until the service answers 200 on ``/v2/health/ready``; AssertionError when it ends or takes too long."""
    deadline = time.monotonic() + timeout
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        assert job.process.poll() is None, f"ended with status {job.process.returncode}: {job.describe()}"
        with contextlib.suppress(OSError):  # urllib.error.URLError is one: not there yet, or not ready
            direct.open(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"not ready after {timeout} s: {job.describe()}")


@contextlib.contextmanager
def critic_service(rm: Path, log_dir: Path, *arguments: str, port: int | None = None) -> Iterator[tuple[Job, int]]:
    """``serve_ppo_critic.py`` on one rank in fp32, ready; the job and its port."""
    port = port or free_port()
    job = Job(
        script(
            "serve_ppo_critic.py",
            f"pretrained_checkpoint.restore_from_path={rm}",
            f"exp_manager.explicit_log_dir={log_dir}",
            f"trainer.ppo.port={port}",
            "trainer.precision=32",
            "model.encoder_seq_length=64",
            *arguments,
        ),
        log_dir.with_suffix(".log"),
    )
    try:
        wait_until_ready(job, port)
        yield job, port
    finally:
        job.kill()


def stored_weights(archive: Path) -> dict[str, torch.Tensor]:
    """All tensors of a .nemo archive, by stored name."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 has none
            tar.extractall(folder, **safely)
        return stored_tensors(next(Path(folder).rglob("model_weights")))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a distributed checkpoint, by stored name."""
    reader = FileSystemReader(folder)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def ranks_of(supervisor: Job) -> list[int]:
    """Process ids of a plain-python job's ranks, in rank order."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != supervisor.process.pid:
                continue
            env = dict(line.split("=", 1) for line in (entry / "environ").read_text().split("\0") if "=" in line)
            found[int(env["RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]
