"""The demo deletes nothing but what a demo has made, and leaves nothing running."""

from __future__ import annotations

import json
import pwd
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from job_processes import ROOT, Job, run
from stages import Demo, StageFailed, data_prefix, mpirun


def test_an_output_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "results" / "model.nemo"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(StageFailed, match="is not empty and was not made by a demo"):
        Demo(tmp_path / "results", num_stages=1)
    assert precious.exists()


def test_a_stage_says_when_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo(tmp_path / "demo", num_stages=2)
    with demo.stage("sft", "SFT") as results:
        assert capsys.readouterr().out == "[1/2] SFT ...\n"
        results.append("loss 1")
    assert capsys.readouterr().out == "[1/2] SFT: loss 1 (0 s)\n"


def test_a_stage_says_how_far_its_job_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = """import time
from nemo_style_aligner.trainer.telemetry.progress import Progress
with Progress(2, "SFT", interval=0) as progress:
    progress.update(1, {"loss": 0.5})
    print("a line of the log", flush=True)
    time.sleep(3)
    progress.update()
"""
    demo = Demo(tmp_path / "demo", num_stages=1)
    with demo.stage("sft", "Fine-tuning"):
        demo.run("sft", sys.executable, "-c", job)
    begins, one, *_, ended = capsys.readouterr().out.splitlines()
    assert begins == "[1/1] Fine-tuning ..." and re.fullmatch(r"\[1/1\] Fine-tuning \(\d+ s\)", ended)
    assert re.fullmatch(r"\[1/1\] Fine-tuning \| SFT: 1/2 after \d+ s, .* left, loss 0.5", one)


def test_a_user_without_a_home_directory_has_the_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose user is a number alone. Open MPI would not start, nor would jobs find a shared secret."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    demo = Demo(tmp_path / "demo", num_stages=1)
    demo.run("home", "sh", "-c", "cd && pwd")
    assert (demo.directory / "logs" / "home.log").read_text() == f"{demo.directory / 'logs'}\n"


def test_a_missing_mpirun_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageFailed, match=r"mpirun is missing; install it: pip install -e '.\[mpi\]'"):
        mpirun(2)


def test_a_demo_begins_anew_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    demo = Demo(tmp_path / "demo", num_stages=1)
    (demo.directory / "sft").mkdir()
    assert (Demo(tmp_path / "demo", num_stages=1, keep=True).directory / "sft").exists()
    assert not (Demo(tmp_path / "demo", num_stages=1).directory / "sft").exists()


def test_a_model_learns_on_one_page() -> None:
    page = ROOT / "examples" / "rl_on_one_page.py"
    assert page.read_text().count("\n") <= 150
    command = [sys.executable, str(page), "--steps", "20"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rewards = [float(reward) for reward in re.findall(r"^step +\d+  mean reward ([\d.]+)$", shown, re.MULTILINE)]
    assert len(rewards) == 3  # steps 1, 10, 20
    assert rewards[-1] > 0.05 > 4 * rewards[0]
    assert rewards == sorted(rewards)
    assert re.search(r"^right: \d+ of 55$", shown, re.MULTILINE)


def test_an_agent_learns_on_one_page() -> None:
    page = ROOT / "examples" / "agent_on_one_page.py"
    assert page.read_text().count("\n") <= 150
    command = [sys.executable, str(page), "--steps", "30"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    steps = re.findall(r"^step +\d+  right ([\d.]+)  looked ([\d.]+)$", shown, re.MULTILINE)
    (first, looked_first), *_, (last, looked_last) = [tuple(map(float, step)) for step in steps]
    assert len(steps) == 4 and last > 2 * first and looked_last > 1.5 * looked_first
    assert len(re.findall(r"^'=.*'$", shown, re.MULTILINE)) == 5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_learns_to_use_a_calculator(tmp_path: Path) -> None:
    demo = ROOT / "examples" / "demo" / "run_demo_agent.py"
    run([sys.executable, str(demo), "--output", str(tmp_path / "demo")], tmp_path / "demo.log", 1700)
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["accuracy_sft"] < 0.3 < 0.8 < report["accuracy_grpo"]
    assert report["tool_sft"] < 0.4 < 0.8 < report["tool_grpo"]
    assert report["alone_sft"] < 0.1  # it cannot do the sums itself
    assert 'class="told"' in (tmp_path / "demo" / "report.html").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """``false`` fails as an old one does. Without this, pip would say that torch has conflicting dependencies."""
    command = ["make", "install", "PYTHON=false", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode and "needs Python 3.10 or newer" in result.stderr, result
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running(number: signal.Signals, tmp_path: Path) -> None:
    """Interrupted or told to end, a demo ends what it started by SIGTERM: killed at once, mpirun leaves its ranks.

    The job sends the signal itself.
    """
    loop = "while :; do sleep 0.1; done"
    demo = f"""
import re
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
sys.path.insert(0, {str(ROOT / "examples" / "demo")!r})
import stages
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
stages._wait_until_ready = lambda *_: None
exit_on_sigterm()
demo = stages.Demo(stages.Path({str(tmp_path / "demo")!r}), num_stages=1)
def command(path, first):
    return ["sh", "-c", f'''trap "touch '{{path}}.ended'; exit" TERM; {{first}}; {loop}''']
with demo.service("service", 1, *command({str(tmp_path / "service")!r}, "touch '{tmp_path / "service"}'")):
    while not stages.Path({str(tmp_path / "service")!r}).exists():
        time.sleep(0.01)
    demo.run("job", *command({str(tmp_path / "job")!r}, "sleep 1; kill -{number.value} $PPID"))
"""
    job = Job([sys.executable, "-c", demo], tmp_path / "demo.log")
    try:
        assert job.wait(60) != 0
        assert (tmp_path / "job.ended").exists() and (tmp_path / "service.ended").exists(), job.describe()
    finally:
        job.kill()


def test_data_paths_are_taken_as_they_are() -> None:
    path = "/it's here/a=1, (b).jsonl"
    override = OverridesParser.create().parse_override(data_prefix(Path(path), Path("/c.jsonl")))
    assert override.value() == {"train": [path], "validation": ["/c.jsonl"], "test": ["/c.jsonl"]}
