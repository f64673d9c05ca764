"""Weights & Biases and MLflow as they are installed, without a server: what a job logs can be read back from them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_style_aligner.trainer.config.loading import for_log, load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.telemetry.metric_table import METRICS, find_metric
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger, read_metrics
from nemo_style_aligner.trainer.telemetry.trackers import start_trackers

NAMES = [metric.name.replace("*", "train") for metric in METRICS]


def installed(package: str) -> pytest.MarkDecorator:
    """Skips a test where a package is missing."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"NOT TESTED: needs {package} (pip install -e '.[{package}]')")


def log(tmp_path: Path, first_step: int, **exp_manager: object) -> None:
    """A start of a job with two steps."""
    cfg = load_defaults("gpt_ppo_actor")
    for name, value in exp_manager.items():
        cfg.exp_manager[name] = value
    cfg.pretrained_checkpoint.restore_from_path = f"of start {first_step}"
    cfg.remote_critic_rm.token = "hush"
    metrics = MetricsLogger(tmp_path, 0, start_trackers(PPOActor.read(cfg).exp_manager, tmp_path))
    metrics.log_hyperparameters(*for_log(cfg))
    for step in (first_step, first_step + 1):
        metrics.log_metrics({name: step + place / 64 for place, name in enumerate(NAMES)}, step)
        metrics.log_metrics({"rewards/mine.py:f(x)": math.nan}, step, "train_rollouts/")
        metrics.log_table("table/train_rollouts", ("prompt", "reward"), [[f"prompt {step}", 0.5]], step)
    metrics.close()


def logged_records(content: bytes) -> Iterator[bytes]:
    """The records of a wandb file: after 7 bytes, LevelDB's log format, in blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@installed("mlflow")
@pytest.mark.timeout(300)
def test_mlflow_has_metrics_config_and_tables_and_a_second_start_goes_on(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    for first_step in (1, 3):
        log(tmp_path, first_step, create_mlflow_logger=True, mlflow_logger_kwargs={"tags": {"who": "me"}})
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("megatron_gpt_ppo_actor")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_run_id").read_text().strip()
    assert run.info.status == "FINISHED" and run.data.tags["who"] == "me"
    for place, name in enumerate(NAMES):
        points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        assert points == [(step, step + place / 64) for step in (1, 2, 3, 4)] and find_metric(name), name
    assert len(client.get_metric_history(run.info.run_id, "train_rollouts/rewards/mine.py:f_x_")) == 4
    params = run.data.params
    assert params["model.optim.lr"] == "9e-07" and params["remote_critic_rm.token"] == "(secret)"
    assert params["pretrained_checkpoint.restore_from_path"] == "of start 1"  # MLflow's cannot change

    def artifact(name: str) -> str:
        return Path(client.download_artifacts(run.info.run_id, name)).read_text(encoding="utf-8")

    assert "of start 3" in artifact("hyperparameters.yaml") and "hush" not in artifact("hyperparameters.yaml")
    table = json.loads(artifact("table/train_rollouts/step_4.json"))
    assert table == {"columns": ["prompt", "reward"], "data": [["prompt 4", 0.5]]}


@installed("mlflow")
@pytest.mark.timeout(300)
def test_a_server_that_is_down_ends_the_first_start_of_a_run_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line and at once; later it costs a warning, and the run keeps its files."""
    from nemo_style_aligner.trainer.telemetry.trackers import TrackerError

    nobody = {"create_mlflow_logger": True, "mlflow_logger_kwargs": {"tracking_uri": "http://me:PASSWORD@127.0.0.1:9"}}
    importlib.import_module("mlflow")
    began = time.monotonic()
    with pytest.raises(TrackerError, match=r"MLflow does not start.*create_mlflow_logger=False.*127\.0\.0\.1"):
        log(tmp_path, 1, **nobody)
    assert time.monotonic() - began < 20
    log(tmp_path, 1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # asking again would hold nothing but this test
    log(tmp_path, 3, **nobody)
    (warning,) = [record.getMessage() for record in caplog.records if record.name.endswith("trackers")]
    assert warning.startswith("sending to MLflow does not start")
    assert [step for step, _ in read_metrics(tmp_path)[NAMES[0]]] == [1, 2, 3, 4]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_tracker_that_never_answers_holds_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_begun: bool
) -> None:
    from nemo_style_aligner.trainer.telemetry import trackers

    released = threading.Event()
    answers = types.SimpleNamespace(init=lambda **_: released.wait(60))
    monkeypatch.setitem(sys.modules, "wandb", answers)
    monkeypatch.setattr(trackers, "_START_SECONDS", 0.2)
    if has_begun:
        log(tmp_path, 1)
    cfg = load_defaults("gpt_ppo_actor")
    cfg.exp_manager.create_wandb_logger = True
    began = time.monotonic()
    if not has_begun:
        with pytest.raises(trackers.TrackerError, match=r"Weights & Biases does not start.*no answer within"):
            MetricsLogger(tmp_path, 0, start_trackers(PPOActor.read(cfg).exp_manager, tmp_path))
    else:
        metrics = MetricsLogger(tmp_path, 0, start_trackers(PPOActor.read(cfg).exp_manager, tmp_path))
        metrics.log_metrics({"loss": 1.0}, 3)
        metrics.close(seconds=0.2)
        assert "takes too long" in caplog.text
    released.set()
    assert time.monotonic() - began < 20


@installed("wandb")
@pytest.mark.timeout(300)
def test_wandb_has_metrics_config_and_tables_and_a_second_start_goes_on(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    for first_step in (1, 3):
        offline = {"project": "p", "name": "n", "offline": True}  # as Lightning's logger is told
        log(tmp_path, first_step, create_wandb_logger=True, wandb_logger_kwargs=offline)
    points: dict[str, list[tuple[int, float]]] = {}
    told = ""
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 2 and {path.stem for path in files} == {
        f"run-{(tmp_path / 'wandb_run_id').read_text().strip()}"
    }
    for path in files:
        for data in logged_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                points.setdefault(name, []).append((row["step"], value))
            told += str(record.run.config) + str(record.config)
    for place, name in enumerate(NAMES):
        assert points[name] == [(step, step + place / 64) for step in (1, 2, 3, 4)], name
    assert len(points["table/train_rollouts"]) == 4 and "(secret)" in told and "hush" not in told
    assert "of start 1" in told and "of start 3" in told
