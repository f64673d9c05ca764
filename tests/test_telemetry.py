"""Metrics, timers and progress."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import io
import json
import logging
import mmap
import os
import re
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from omegaconf import OmegaConf

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.errors import NotWrittenError, UserError
from nemo_style_aligner.log_fields import warn_for_all_ranks, with_fields
from nemo_style_aligner.tools.cli.main import run
from nemo_style_aligner.trainer.config.loading import for_log, load_defaults
from nemo_style_aligner.trainer.config.schema import ExpManager
from nemo_style_aligner.trainer.jobs import job_setup
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE
from nemo_style_aligner.trainer.telemetry.log_lines import configure_logging, warn_plainly
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger, read_metrics, read_tables
from nemo_style_aligner.trainer.telemetry.profiler import profiled
from nemo_style_aligner.trainer.telemetry.progress import Progress, how_far
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer, peak_meter
from nemo_style_aligner.trainer.telemetry.trackers import Tracker, Wandb, start_trackers
from nemo_style_aligner.trainer.training.run_control import RunControl


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- metrics ------------------------------------------------------------------------------------


def test_metrics_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run")
    logger.log_metrics({"loss": 0.5, "grad_norm": torch.tensor([2.0])}, step=3, prefix="train/")
    logger.log_metrics({"loss": 0.25}, step=4, prefix="train/")
    logger.log_metrics({}, step=4, prefix="val/")
    logger.close()

    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert read_metrics(tmp_path / "run") == {"train/loss": [(3, 0.5), (4, 0.25)], "train/grad_norm": [(3, 2.0)]}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.5), (4, 0.25)]


def test_values_that_are_not_finite_survive_as_valid_json(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log_metrics({"loss": float("nan"), "norm": float("inf")}, step=1)
    logger.close()
    strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(c))
    assert strict["step"] == 1
    curves = read_metrics(tmp_path)
    assert curves["loss"][0][1] != curves["loss"][0][1]
    assert curves["norm"] == [(1, float("inf"))]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run", rank=1)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_table("samples", ["a"], [["b"]], step=1)
    logger.log_hyperparameters({"a": 1}, "a: 1\n")
    logger.close()
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_continues_the_file_and_repeated_steps_count_once(tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path)
    first.log_metrics({"loss": 1.0}, step=1)
    first.log_metrics({"loss": 2.0}, step=2)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # killed while writing
    second = MetricsLogger(tmp_path)
    second.log_metrics({"loss": 7.0}, step=2)
    second.close()
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0), (2, 7.0)]}
    for line in ('{"loss": 1.0}', '{"step": 1, "loss": "low"}', "[1]"):  # of another program
        (tmp_path / "metrics.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match="a line that is not a step's numbers"):
            read_metrics(tmp_path)


@pytest.mark.parametrize("half", ["", "x", "x" * 2**17])
def test_resuming_reads_only_the_end_of_long_files(tmp_path: Path, half: str) -> None:
    MetricsLogger(tmp_path).close()  # what that imports does not count below
    line = json.dumps({"step": 1, "key": "x" * 2**23}) + "\n"
    (tmp_path / "tables.jsonl").write_text(line + half)
    tracemalloc.start()
    try:
        MetricsLogger(tmp_path).close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**22
    assert (tmp_path / "tables.jsonl").stat().st_size == len(line)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    with pytest.raises(TypeError, match=r"train/ratios.*\(3,\)"):
        logger.log_metrics({"ratios": torch.ones(3)}, step=1, prefix="train/")
    logger.close()


def test_tables_and_hyperparameters(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log_table("samples", ["prompt", "reward"], [["2 | 3\n", 0.5]], step=2)
    logger.log_hyperparameters(*for_log(OmegaConf.create({"a": 1, "b": "${a}"})))
    logger.close()
    (table,) = read_tables(tmp_path)
    assert table["columns"] == ["prompt", "reward"] and table["rows"] == [["2 | 3\n", 0.5]] and table["step"] == 2
    assert OmegaConf.load(tmp_path / "hyperparameters.yaml") == {"a": 1, "b": 1}


@pytest.mark.parametrize("hangs", [True, False])
def test_a_wandb_server_out_of_reach_does_not_keep_a_job_from_its_end(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run says that it stopped early before it waits, and gives up after a while."""
    is_waiting = []

    def finish() -> None:
        is_waiting.append((tmp_path / "requeue").exists())
        if not hangs:
            raise ConnectionError("no way out")
        time.sleep(300)

    folder = tmp_path / "wandb" / "run-1"
    run = types.SimpleNamespace(id="1", dir=str(folder / "files"), define_metric=lambda *_, **__: None, finish=finish)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))  # type: ignore[arg-type]
    monkeypatch.setattr(job_setup, "_TRACKER_SECONDS_STOPPED", 0.5)
    control, nothing = RunControl(), types.SimpleNamespace(finish=lambda: None)
    control.status = EXIT_REQUEUE
    log = MetricsLogger(tmp_path, 0, [Tracker(Wandb, lambda: Wandb(tmp_path, {}))])
    with single_process() as layout:
        assert Run(tmp_path, layout, log, control, nothing).close() == EXIT_REQUEUE  # type: ignore[arg-type]
    assert is_waiting == [True]
    reason = "takes too long" if hangs else "failed (ConnectionError: no way out)"
    assert f"sending to Weights & Biases {reason}" in caplog.text and f"wandb sync {folder}" in caplog.text


def with_wandb(**kwargs: object) -> ExpManager:
    given = {"create_wandb_logger": True, "wandb_logger_kwargs": kwargs}
    return ExpManager.among({**load_defaults("gpt_sft").exp_manager, **given})


def test_wandb_that_does_not_start_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever kind wandb's is. Nor does wandb print tracebacks of the job's own errors later."""

    def init(**_: Any) -> Any:
        sys.excepthook = lambda *_: pytest.fail("wandb's")
        raise RuntimeError("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "excepthook", hook := sys.excepthook)
    with pytest.raises(UserError, match=r"create_wandb_logger=False.*WANDB_MODE=offline.*No API key configured"):
        start_trackers(with_wandb(), tmp_path)
    assert sys.excepthook is hook


def test_arguments_that_wandb_does_not_take_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = types.SimpleNamespace(id="1", dir="/d/files", define_metric=lambda *_, **__: None)
    fake = types.SimpleNamespace(init=lambda dir=None, project=None: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    start_trackers(with_wandb(project="p", log_model=False, prefix=""), tmp_path)
    (tmp_path / "wandb_run_id").unlink()
    for of_no_use in ("projekt", "log_model"):
        with pytest.raises(UserError, match=rf"does not start.*argument '{of_no_use}'"):
            start_trackers(with_wandb(**{of_no_use: "p"}), tmp_path)


def test_wandb_that_dies_during_the_run_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process may be killed, for want of memory for instance."""
    logged: list[int] = []

    def log(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise ConnectionResetError("Connection lost")
        logged.append(record["step"])

    folder = tmp_path / "wandb" / "run-1"
    run = types.SimpleNamespace(id="1", dir=str(folder / "files"), define_metric=lambda *_, **__: None, log=log)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run, Table=dict))  # type: ignore[arg-type]
    metrics = MetricsLogger(tmp_path, 0, [Tracker(Wandb, lambda: Wandb(tmp_path, {}))])
    for step in (1, 2, 3):
        metrics.log_metrics({"loss": 1.0}, step)
        metrics.log_table("samples", ["prompt"], [["x"]], step)
    metrics.close()
    assert logged == [1, 1] and len(read_metrics(tmp_path)["loss"]) == len(read_tables(tmp_path)) == 3
    (line,) = caplog.messages  # nor is it told that the run ends
    assert "failed (ConnectionResetError: Connection lost)" in line and line.endswith(f"wandb sync {folder}")


def test_a_job_that_is_started_again_goes_on_in_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, Any]] = []

    def init(**settings: Any) -> Any:
        starts.append(settings)
        return types.SimpleNamespace(
            id=settings.get("id", "first"), dir="/d/files", define_metric=lambda *_, **__: None
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    lightnings = {"version": "own", "save_dir": "/there", "offline": True, "log_model": False}
    for kwargs in ({"project": "p"}, {"project": "p", "id": None}, lightnings, {"resume": "never"}):
        Wandb(tmp_path, kwargs)
    (tmp_path / "wandb_run_id").write_text("")  # of a start that met a full disk
    Wandb(tmp_path, {"project": "p"})
    assert (tmp_path / "wandb_run_id").read_text() == "first\n"
    chosen = [(start.get("id"), start.get("resume")) for start in starts]
    assert starts[2] == {"id": "own", "dir": "/there", "mode": "offline"}
    assert chosen == [(None, None), ("first", "allow"), ("own", None), (None, "never"), (None, None)]


# ---- timers -------------------------------------------------------------------------------------


def test_timers_nest_add_up_and_are_consumed() -> None:
    clock = FakeClock()
    timer = ScopedTimer(clock=clock)
    for _ in range(2):
        with timer("rollout"):
            clock.now += 1
            with timer("generate"):
                clock.now += 3
    assert timer.consume_durations() == {"rollout/generate": 6, "rollout": 8}
    assert timer.consume_durations() == {}


def test_a_timer_closes_when_its_body_raises_and_waits_for_its_gpu_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = FakeClock(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append((device, clock.now)))
    timer = ScopedTimer(clock=clock)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in another thread
    with pytest.raises(RuntimeError), timer("train"):
        clock.now = 2
        raise RuntimeError
    with timer("next"):
        pass
    assert timer.consume_durations() == {"train": 2, "next": 0}
    assert calls == [(1, 0), (1, 2), (1, 2), (1, 2)]


needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


@needs_full_disk
def test_metrics_that_cannot_be_written_say_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLogger(tmp_path)
    with pytest.raises(OSError, match=r"make room and start the job again: '.*/metrics.jsonl'"):
        log.log_metrics({"loss": 1.0}, step=1)


@needs_full_disk
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_so_do_tensorboards_curves(tmp_path: Path) -> None:
    """The metrics may still have room in their last block, or the disk is full when the job starts."""
    others = set(threading.enumerate())
    log = MetricsLogger(tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()  # opened anew for each piece
    events.unlink()
    events.symlink_to("/dev/full")
    with pytest.raises(NotWrittenError, match=r"make room and start the job again: '.*/tensorboard'"):
        log.log_metrics({"loss": 1.0}, step=1)
        log.close()
    for thread in set(threading.enumerate()) - others:
        thread.join()  # so that its end is this test's


@needs_full_disk
def test_a_full_disk_leaves_the_hyperparameters_of_the_start_before(tmp_path: Path) -> None:
    log = MetricsLogger(tmp_path)
    log.log_hyperparameters({"a": 1}, "a: 1\n")
    (tmp_path / ".hyperparameters.yaml.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"make room and start the job again: '.*/hyperparameters.yaml'"):
        log.log_hyperparameters({"a": 2}, "a: 2\n")
    log.close()
    assert OmegaConf.load(tmp_path / "hyperparameters.yaml") == {"a": 1}


def test_each_scope_has_its_peak_of_memory() -> None:
    peaks = [9, 1, 5, 2, 3, 1, 2, 7, 4]
    timer = ScopedTimer(take_peak=lambda: peaks.pop(0) << 30)
    with timer("step"):  # 9 was before
        with timer("generate"):  # 1 before it, 5 in it
            pass
        with timer("train"), contextlib.suppress(ValueError):  # 2 before it, 3 in it
            raise ValueError
        with timer("generate"):  # again, with less
            pass
    other = threading.Thread(target=lambda: timer("thread").__enter__())
    other.start()  # takes no reading
    other.join()
    assert timer.consume_peaks() == {"step/generate_peak_gib": 5, "step/train_peak_gib": 3, "step_peak_gib": 7}
    assert timer.consume_peaks() == {}


def test_a_peak_that_is_gone_is_seen_once() -> None:
    take_peak, size = peak_meter(), 200 * 2**20
    if take_peak is None:
        pytest.skip("this system does not count the peak of a process's memory")
    before = take_peak()
    with mmap.mmap(-1, size) as block:  # of its own: the C library may keep what other tests have freed
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1  # untouched memory is not resident
    assert take_peak() > before + 0.8 * size
    assert take_peak() < before + 0.2 * size


def test_timers_of_another_thread_do_not_nest_in_ours() -> None:
    timer = ScopedTimer()

    def critic() -> None:
        with timer("critic"):
            pass

    with timer("actor"):
        thread = threading.Thread(target=critic)
        thread.start()
        thread.join(timeout=10)
    assert set(timer.consume_durations()) == {"critic", "actor"}


def test_a_range_of_steps_is_profiled_with_the_names_of_phases(tmp_path: Path) -> None:
    timer, section = ScopedTimer(), load_defaults("gpt_sft").trainer.profile
    section.start_step, section.end_step, section.ranks = 2, 3, [0, 3]

    def steps(rank: int, first: int, last: int) -> None:
        with profiled(section, tmp_path, rank, done=first - 1) as step_ends:
            for step in range(first, last + 1):
                with timer(f"step_{step}"):
                    torch.ones(4, 4) @ torch.ones(4, 4)
                step_ends()

    steps(0, 1, 5)
    steps(1, 1, 5)
    steps(3, 3, 3)  # begins, and ends, within the range
    found = {}
    for path in (tmp_path / "profile").iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = [event["name"] for event in events if event["ph"] == "X" and event["dur"] >= 0 and event["ts"] > 0]
        found[path.name] = {name for name in spans if name.startswith("step_")}, spans.count("aten::mm")
    assert found == {
        "rank_0_from_step_2.json.gz": ({"step_2", "step_3"}, 2),
        "rank_3_from_step_3.json.gz": ({"step_3"}, 1),
    }


# ---- progress and logging -----------------------------------------------------------------------


def test_progress_is_a_line_per_interval() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Progress(total=10, description="PPO", interval=30, stream=stream, clock=clock) as progress:
        for _ in range(10):
            clock.now += 10
            progress.update(1, {"reward": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "PPO: 3/10 after 30 s, 10 s each, 70 s left, reward 0.5"
    assert lines[-1].startswith("PPO: 10/10")
    assert len(lines) == 4


def test_a_step_that_takes_long_is_not_silent() -> None:
    stream, clock = io.StringIO(), FakeClock()
    with Progress(total=2, description="PPO", interval=30, stream=stream, clock=clock) as progress:
        with activity.phase("step"), activity.phase("generate"):
            for _ in range(7):
                clock.now += 10
                activity.progress()
        progress.update(1)
        with activity.phase("save_time"):
            clock.now += 30
            progress.update(1)
    activity.progress()
    assert stream.getvalue().splitlines() == [
        "PPO: 0/2 after 30 s, in step/generate",
        "PPO: 0/2 after 60 s, in step/generate",
        "PPO: 2/2 after 100 s, 50 s each",
    ]


def test_how_far_a_long_phase_is() -> None:
    stream, clock, done = io.StringIO(), FakeClock(), [0, 0]
    with Progress(total=2, description="PPO", interval=30, stream=stream, clock=clock):
        with (
            activity.phase("generate"),
            activity.counting("responses", lambda: (done[0], 8), lambda: 100 * done[0], lambda: 9 * done[0]),
        ):
            for done[0] in (0, 6):
                clock.now += 30
                activity.progress()
        with activity.counting("updates", lambda: (1, 4)), activity.counting("micro batches", lambda: (5, 10)):
            clock.now += 30
            activity.progress()
            assert [count.what for count in activity.counts()] == ["updates", "micro batches"]
    assert activity.counts() == []
    lines = stream.getvalue().splitlines()
    assert lines[0] == "PPO: 0/2 after 30 s, in generate: 0 of 8 responses, 0 tokens/s"
    assert re.fullmatch(
        r"PPO: 0/2 after 60 s, in generate: 6 of 8 responses, \S+ tokens/s, the longest \S+ has 54 tokens, 0 s left",
        lines[1],
    )
    assert lines[2] == "PPO: 0/2 after 90 s, 1 of 4 updates, 5 of 10 micro batches, 0 s left"

    def left(seconds: float) -> str:
        return how_far([activity.Count("steps", 1, 4, None, seconds)])

    assert left(30) == "1 of 4 steps, 90 s left" and left(60) == "1 of 4 steps, 3 min left"
    assert left(3620) == "1 of 4 steps, 3 h 1 min left" and how_far([activity.Count("steps", 0, 0, None, 1)]) == ""
    within = [activity.Count("updates", 1, 4, None, 60), activity.Count("micro batches", 5, 10, None, 9)]
    assert how_far(within) == "1 of 4 updates, 5 of 10 micro batches, 100 s left".replace("100 s", "2 min")


def test_progress_on_a_terminal_comes_more_often() -> None:
    reading, writing = os.openpty()
    clock = FakeClock()
    with open(writing, "w") as terminal, Progress(total=9, description="PPO", stream=terminal, clock=clock) as progress:
        for _ in range(3):
            clock.now += 4
            progress.update(1)
        terminal.flush()
        assert os.read(reading, 10000) == b"PPO: 2/9 after 8 s, 4 s each, 28 s left\r\n"
    os.close(reading)


def test_progress_that_nobody_reads_stops_no_loop() -> None:
    """As where ``job 2>&1 | tee log`` has lost its terminal: the job shall save."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Progress(total=2, description="PPO", interval=0, stream=Broken()) as progress:
        progress.update(1)


def test_progress_is_silent_on_other_ranks() -> None:
    stream = io.StringIO()
    with Progress(total=1, description="PPO", rank=1, interval=0, stream=stream) as progress:
        progress.update(1)
    assert stream.getvalue() == ""


@pytest.fixture
def logging_set_up() -> Iterator[None]:
    """Puts back what `configure_logging` changes."""
    root, own = logging.getLogger(), logging.getLogger("nemo_style_aligner")
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("logging_set_up")
def test_log_lines_carry_the_rank_and_other_ranks_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=3)
    logging.getLogger("job").info("not shown")
    warn_for_all_ranks(logging.getLogger("job"), "not shown either: rank 0 says it")
    logging.getLogger("job").warning("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"\[rank 3\] WARNING job: shown$", line)


@pytest.mark.usefixtures("logging_set_up")
def test_no_terminal_obeys_what_lines_quote(capsys: pytest.CaptureFixture[str]) -> None:
    """Control sequences of files, models and clients are spelt out in logs, warnings of commands, and errors."""

    def fail() -> None:
        raise UserError("\x1b]52;c;eA==\x07 in\ta\nfile\x9b1m")

    configure_logging()
    logging.getLogger("job").warning("\x1b]0;title\x07")
    logging.getLogger().handlers.clear()
    warn_plainly()
    logging.getLogger("job").warning("\r\x1b[2Jgone")
    commands = [click.Command("fails", callback=fail), click.Command("lacks", params=[click.Argument(["x"])])]
    for command, argument in zip(commands, ([], ["--\x1b[2J"]), strict=True):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(sys, "argv", ["nsa", *argument])
            run(command, "nsa")
    said = capsys.readouterr().err
    assert not set(said) & {"\x1b", "\x07", "\x9b", "\r"}
    assert r"\x1b]0;title\x07" in said and r"WARNING: \x0d\x1b[2Jgone" in said and r"--\x1b[2J" in said
    assert "error: \\x1b]52;c;eA==\\x07 in\ta\nfile\\x9b1m" in said


@pytest.mark.usefixtures("logging_set_up")
def test_debug_lines_are_the_projects_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level=logging.DEBUG)
    logging.getLogger("nemo_style_aligner.guard.request_log").debug("a request")
    logging.getLogger("another_package").debug("not shown")
    configure_logging(rank=1, level=logging.DEBUG)
    logging.getLogger("nemo_style_aligner").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("DEBUG guard.request_log: a request")


@pytest.mark.usefixtures("logging_set_up")
def test_log_lines_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=1, level=logging.WARNING, log_format="json")
    fields = {"request_id": "7", "ms": 1.5, "level": "hides nothing", "path": Path("x")}
    logging.getLogger("job").warning("two\n%s", "lines", extra=with_fields(fields))
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("job").exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert abs(datetime.datetime.fromisoformat(first.pop("time")).timestamp() - time.time()) < 60
    assert first == {"request_id": "7", "ms": 1.5, "path": "x"} | {
        "rank": 1, "level": "WARNING", "logger": "job", "message": "two\nlines",
    }  # fmt: skip
    assert second["exception"].startswith("Traceback") and second["exception"].endswith("ValueError: broken")
