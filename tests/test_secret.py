"""The shared secret: where it comes from, who can read it, and that it stays out of logs.

What another user of the machine can do without it: `attack/test_second_user.py`.
"""

from __future__ import annotations

import base64
import concurrent.futures
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_style_aligner.guard import secret
from nemo_style_aligner.guard.http_server import token_check
from nemo_style_aligner.guard.masking import masked, masked_text
from nemo_style_aligner.guard.secret import SecretError, find_secret, make_secret, read_secret, resolve_token
from nemo_style_aligner.tools.reports.report import write_report
from nemo_style_aligner.trainer.config.loading import for_log, load_defaults
from nemo_style_aligner.trainer.config.schema import Service
from nemo_style_aligner.trainer.jobs import service_setup
from nemo_style_aligner.trainer.jobs.path_checks import secret_problems
from nemo_style_aligner.trainer.jobs.run_settings import changed_settings, settings_of_run
from nemo_style_aligner.trainer.telemetry.log_lines import JsonFormatter, TextFormatter
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "nemo_style_aligner.guard.secret"]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and no secret in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NEMO_STYLE_ALIGNER_TOKEN", raising=False)
    monkeypatch.delenv("NEMO_STYLE_ALIGNER_TOKEN_FILE", raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_without_configuration_all_jobs_of_a_user_find_the_same_secret(home: Path) -> None:
    first = resolve_token("auto", "token")
    path = home / ".nemo_style_aligner" / "token"
    assert first == resolve_token("auto", "token") == path.read_text().strip()
    assert len(first) >= 32
    assert mode(path) == 0o600 and mode(path.parent) == 0o700
    assert os.listdir(path.parent) == ["token"]


def test_the_most_specific_secret_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_secret(home / "run" / "token")
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_TOKEN_FILE", file.source)
    assert find_secret() == file
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_TOKEN", "from-the-environment")
    assert resolve_token("auto", "token") == "from-the-environment"
    assert resolve_token("from-the-config", "token") == "from-the-config"
    assert resolve_token(12345, "token") == "12345"  # YAML reads digits as a number
    assert not (home / ".nemo_style_aligner").exists()


@pytest.mark.parametrize("value", [None, "none", "None"])
def test_authentication_is_turned_off_with_a_warning(value, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_token(value, "trainer.ppo.token") is None
    assert "trainer.ppo.token=none" in caplog.text


@pytest.mark.parametrize(("job", "section"), [("gpt_ppo_critic", "trainer.ppo"), ("inference_rm", "inference")])
def test_a_service_names_its_key_in_full(job: str, section: str, caplog: pytest.LogCaptureFixture) -> None:
    cfg = OmegaConf.select(load_defaults(job), section)
    cfg.merge_with({"token": "none", "host": "127.0.0.1"})
    service_setup._http_settings(Service.among(cfg), section)
    assert f"{section}.token=none: no authentication" in caplog.text


def test_nothing_but_the_whole_secret_opens_a_service() -> None:
    has_token = token_check("s3cret")
    for given in ("", "s", "s3cre", "s3cretX", "S3CRET"):
        assert not has_token({"AUTHORIZATION": f"Bearer {given}"}) and not has_token({"TRITON_ACCESS_TOKEN": given})
    assert not has_token({}) and not has_token({"AUTHORIZATION": "Basic s3cret"})
    for wrong in (b"s3cret", b"s3cret:", b":s3cre", b"\xff:s3cret"):
        assert not has_token({"AUTHORIZATION": f"Basic {base64.b64encode(wrong).decode()}"})
    assert has_token({"AUTHORIZATION": f"Basic {base64.b64encode(b'me:s3cret').decode()}"})
    assert has_token({"AUTHORIZATION": "Bearer s3cret"}) and has_token({"TRITON_ACCESS_TOKEN": "s3cret"})


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    """The window between two jobs is widened: every process waits until all are about to make the file."""
    program = (
        "import os, sys, time\n"
        "from nemo_style_aligner.guard import secret\n"
        "link = os.link\n"
        "def late(source, target):\n"
        "    open(sys.argv[2], 'x').close()\n"
        "    while len(os.listdir(os.path.dirname(sys.argv[2]))) < 4: time.sleep(0.01)\n"
        "    link(source, target)\n"
        "os.link = late\n"
        "print(secret.make_secret(sys.argv[1]).value)\n"
    )
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    path = tmp_path / "run" / "token"

    def start(number: int) -> str:
        command = [sys.executable, "-c", program, str(path), str(meeting / str(number))]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        values = set(pool.map(start, range(4)))
    assert values == {path.read_text()}
    assert os.listdir(path.parent) == ["token"]


def test_the_command_makes_a_file_for_one_run_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.token"
    command = [*COMMAND, str(path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    content = path.read_text()
    assert first.stdout == f"{path}\n" and content.strip() not in first.stdout + first.stderr
    assert mode(path) == 0o600
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)  # a requeued job
    assert path.read_text() == content
    path.chmod(0o644)
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and "chmod 600" in refused.stderr and content.strip() not in refused.stderr


def test_files_that_cannot_be_trusted_are_refused(tmp_path: Path) -> None:
    good = Path(make_secret(tmp_path / "token").source)
    good.chmod(0o640)
    with pytest.raises(SecretError, match=r"open to others.*0640.*chmod 600"):
        read_secret(good)
    with pytest.raises(SecretError, match="NEMO_STYLE_ALIGNER_TOKEN_FILE"):
        read_secret(tmp_path / "missing")
    for name, content in (("empty", ""), ("two", "a b"), ("bytes", "é"), ("long", "x" * 5000)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
        with pytest.raises(SecretError, match=name):
            read_secret(tmp_path / name)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SecretError, match="regular"):
            read_secret(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretError, match=r"cannot be made.*NEMO_STYLE_ALIGNER_TOKEN"):
        make_secret(tmp_path / "file" / "token")


@needs_root
def test_a_home_that_cannot_be_entered_is_a_problem_before_the_start(home: Path) -> None:
    """As in a container that runs with another user's number; the folders of tests are root's alone."""
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        with pytest.raises(SecretError, match=r"cannot be made \(Permission denied\).*NEMO_STYLE_ALIGNER_TOKEN_FILE"):
            find_secret()
        (problem,) = secret_problems("auto", "trainer.ppo.token")
    finally:
        os.setresuid(0, 0, 0)
    assert problem.startswith("trainer.ppo.token=auto: the secret file") and "may not write in" in problem
    assert "NEMO_STYLE_ALIGNER_TOKEN_FILE" in problem
    assert list(secret_problems("auto", "trainer.ppo.token")) == [] and not list(home.iterdir())


@needs_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = Path(make_secret(tmp_path / "token").source)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(SecretError, match=f"belongs to user {NOBODY}"):
        read_secret(path)


def test_the_secret_is_in_no_log(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    value = resolve_token("auto", "token")
    assert ".nemo_style_aligner/token" in caplog.text
    config = OmegaConf.create(
        {"trainer": {"ppo": {"token": value}}, "remote_critic_rm": {"token": "${trainer.ppo.token}"}}
    )
    metrics = MetricsLogger(home / "log")
    metrics.log_hyperparameters(*for_log(config))
    metrics.close()
    written = b"".join(path.read_bytes() for path in (home / "log").rglob("*") if path.is_file())
    assert written.count(b"(secret)") >= 2
    assert value.encode() not in written and value not in caplog.text
    assert value not in repr(secret.find_secret(value))
    assert config.trainer.ppo.token == value


def test_passwords_are_in_nothing_that_a_job_writes_or_says(tmp_path: Path) -> None:
    """In URLs, of keys by any usual name, in sections and lists; in texts of libraries, too."""
    config = load_defaults("gpt_ppo_actor")
    config.exp_manager.mlflow_logger_kwargs.tracking_uri = "http://me:PASSWORD@server:5000/x"
    config.exp_manager.mlflow_logger_kwargs.artifact_location = "s3://PASSWORD@bucket"
    tags = {"db_password": "PASSWORD", "api-key": "PASSWORD", "aws": {"secretAccessKey": "PASSWORD"}, "pwd": 4711}
    config.exp_manager.mlflow_logger_kwargs.tags = tags
    config.trainer.ppo.rewards = [{"source": "http://me:PASS/WORD@host:1/judge?api_key=PASSWORD", "token": "PASSWORD"}]
    config.model.data.data_prefix = {"train": ["postgresql://me:PASS@WORD@host/db"]}
    metrics = MetricsLogger(tmp_path)
    metrics.log_metrics({"loss": 1.0}, 1)
    metrics.log_hyperparameters(*for_log(config))
    metrics.close()
    write_report(tmp_path / "report.html", "run", {"run": tmp_path})
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    kept.append(str(settings_of_run(config)).encode())
    record = logging.makeLogRecord({"name": "urllib3", "msg": "retrying http://me:PASSWORD@server, password=PASSWORD"})
    kept += [formatter.format(record).encode() for formatter in (TextFormatter(), JsonFormatter(0))]
    for part in (b"PASS", b"WORD", b"4711"):
        assert not [content for content in kept if part in content]
    for known in ("server:5000/x", "@bucket", "host:1/judge", "@host/db"):
        assert known in (tmp_path / "hyperparameters.yaml").read_text()
    before = {"model.data.data_prefix.train": "['postgresql://me:PASS@WORD@host/db']"}  # as older versions kept it
    assert changed_settings(before, settings_of_run(config)) == []


def test_what_is_no_secret_is_not_masked() -> None:
    known = {"eos_token": "</s>", "max_tokens": 5, "use_auth_token": True, "token": "auto", "num_passes": "3"}
    known |= {"url": "http://host:8080/a@b", "path": "/data/me@home", "secret": None}
    assert masked(known) == known
    for text in (
        "http://127.0.0.1:5000/x of me@x.org",
        "token=auto",
        "eos_token=</s>",
        "api_key=$KEY",
        "the secret: /a",
    ):
        assert masked_text(text) == text
