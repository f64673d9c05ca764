"""A job that hangs is ended, and the report says what it hangs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_processes import Job, ranks_of

from nemo_style_aligner import activity
from nemo_style_aligner.trainer.launch.ending import Failures
from nemo_style_aligner.trainer.telemetry import watchdog
from nemo_style_aligner.trainer.telemetry.watchdog import EXIT_STUCK, Watchdog, describe

SCRIPT = """
import ctypes, sys, time
from nemo_style_aligner.trainer.config.loading import log_directory
from nemo_style_aligner.trainer.launch.start import job

@job("gpt_ppo_critic", check=None)
def main(cfg) -> int:
    import torch
    import torch.distributed as dist
    from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer

    timer, mode = ScopedTimer(), cfg.exp_manager.name
    if mode == "sleeping":
        from nemo_style_aligner.trainer.jobs.job_setup import start_run

        run = start_run(cfg)
    else:  # the same without what takes seconds to import
        from nemo_style_aligner.trainer.launch.ending import abort_job, failures
        from nemo_style_aligner.trainer.telemetry.watchdog import Watchdog

        rank, size, limit = dist.get_rank(), dist.get_world_size(), 60.0 * cfg.exp_manager.watchdog_minutes
        Watchdog(log_directory(cfg.exp_manager), rank, size, limit, failures.run, abort_job, failures.first).start()
    with timer("step"):
        while True:
            with timer("generate"):
                if mode == "sleeping" and dist.get_rank() == 1:
                    time.sleep(300)
                if mode == "holding the lock":
                    ctypes.PyDLL(None).sleep(300)
            with timer("logprobs"):
                dist.all_reduce(torch.ones(1))
            print("on", flush=True)
            time.sleep(0.05)

if __name__ == "__main__":
    main()
"""
LIMIT_SECONDS = 3.0

# Collections that end a thread's state become due while frames of new threads are listed, wherever in it that is.
COLLECTED_MEANWHILE = """
import faulthandler, gc, threading
from nemo_style_aligner.trainer.telemetry.watchdog import main_thread_location

def leave_garbage():
    local = threading.local()
    local.value = 1
    cycle = [local]
    cycle.append(cycle)

def wait():
    started.release()
    end.wait()

faulthandler.dump_traceback_later(60, exit=True)
end, started = threading.Event(), threading.Semaphore(0)
for due_after in range(12):
    for _ in range(8):  # a frame is an object, and counts, once it has been asked for
        threading.Thread(target=wait, daemon=True).start()
        started.acquire()
    gc.disable()
    gc.collect()
    for _ in range(20):
        leave_garbage()
    gc.set_threshold(gc.get_count()[0] + due_after)
    gc.enable()
    main_thread_location()
    gc.set_threshold(700)
"""


@pytest.fixture(scope="module")
def stuck_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Job, Path]]]:
    """Three jobs side by side: a rank that sleeps, one that is stopped, one that holds Python's lock."""
    folder = tmp_path_factory.mktemp("watchdog")
    (folder / "script.py").write_text(SCRIPT)
    jobs: dict[str, tuple[Job, Path]] = {}
    for mode, ranks in (("sleeping", 2), ("stopped", 2), ("holding the lock", 1)):
        log_dir = folder / mode
        command = [
            *(sys.executable, "-u", str(folder / "script.py"), f"trainer.devices={ranks}"),
            f"exp_manager.name={mode}",
            f"exp_manager.explicit_log_dir={log_dir}",
            f"exp_manager.watchdog_minutes={LIMIT_SECONDS / 60}",
        ]
        jobs[mode] = Job(command, log_dir.with_suffix(".log")), log_dir
    try:
        stopped, _ = jobs["stopped"]
        deadline = time.monotonic() + 120
        while "on" not in stopped.output().splitlines():
            assert stopped.process.poll() is None and time.monotonic() < deadline, stopped.describe()
            time.sleep(0.1)
        os.kill(ranks_of(stopped)[1], signal.SIGSTOP)
        yield jobs
    finally:
        for job, _ in jobs.values():
            job.kill()


def test_a_rank_that_sleeps(stuck_jobs: dict[str, tuple[Job, Path]]) -> None:
    """Rank, phase, place and collective are named, every rank leaves its stacks, all within seconds of the limit."""
    job, log_dir = stuck_jobs["sleeping"]
    assert job.wait(120) == EXIT_STUCK, job.describe()
    report = (log_dir / "watchdog" / "report.txt").read_text()
    waits, behind = report.splitlines()[1:3]
    assert behind.startswith("rank 1 (host ") and "is stuck in phase step/generate, at " in behind
    assert "script.py:27 in main: time.sleep(300)" in behind
    assert waits.startswith("rank 0 (host ") and "waits in all_reduce of the default group: in phase step/logp" in waits
    assert report.splitlines()[1] in job.output()
    assert (log_dir / "lock").read_text().startswith("sleeping on host ")  # no other job may have used the directory
    for rank in (0, 1):
        assert "script.py" in (log_dir / "watchdog" / f"stacks_rank_{rank}.txt").read_text()


def test_a_rank_that_is_stopped(stuck_jobs: dict[str, tuple[Job, Path]]) -> None:
    job, log_dir = stuck_jobs["stopped"]
    assert job.wait(120) == EXIT_STUCK, job.describe()
    lines = (log_dir / "watchdog" / "report.txt").read_text().splitlines()
    assert any(line.startswith("rank 1 (host ") and "has written no stacks: it is stopped" in line for line in lines)
    assert (log_dir / "watchdog" / "stacks_rank_0.txt").exists()


def test_a_rank_that_holds_the_lock(stuck_jobs: dict[str, tuple[Job, Path]]) -> None:
    """No thread of Python can run: the backstop writes the stacks and ends the process."""
    job, log_dir = stuck_jobs["holding the lock"]
    assert job.wait(120) == 1, job.describe()
    assert "script.py" in (log_dir / "watchdog" / "backstop_rank_0.txt").read_text()


def test_the_report_groups_the_ranks() -> None:
    waits, names = (
        "waits in all_reduce of the default group: in phase step, at a.py:1",
        [f"rank {n} (h)" for n in range(5)],
    )
    lines = describe([waits, waits, waits, "is stuck in phase step, at b.py:2", None], names, 60).splitlines()
    assert lines[1:] == [
        "rank 3 (h) is stuck in phase step, at b.py:2",
        "rank 4 (h) has written no stacks: it is stopped, starved or gone",
        f"each of the ranks 0, 1, 2 {waits}",
    ]


class Clocks:
    """What the watchdog takes for the time."""

    def __init__(self) -> None:
        self.wall, self.now = 1e9, 0.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    for module in (activity, watchdog):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(activity, "_progress", 0.0)
    return found


def test_a_rank_ends_when_another_has_failed(clocks: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher leaves it running, as srun does of itself."""
    monkeypatch.setattr(watchdog, "_GATHER_SECONDS", 0.01)
    (tmp_path / "watchdog").mkdir()
    ended: list[int] = []
    own, other = Failures(), Failures()
    for run, failures in (("own", own), ("other", other)):  # the second was started here by mistake
        failures.leave_in(tmp_path, remove=True)
        failures.run = run
    dog = Watchdog(tmp_path, 0, 2, 100.0, "own", ended.append, own.first)
    dog._tick()
    assert other.leave(0, "ConfigError: another job is using it")
    dog._tick()
    assert not ended
    assert own.leave(1, "RuntimeError: broken") and not own.leave(0, "DistError: connection lost")
    dog._tick()
    assert ended == [1]


def test_the_watch_goes_on_after_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[int] = []

    def tick(dog: Watchdog) -> None:
        ticks.append(1)
        if len(ticks) == 1:
            raise RuntimeError("cannot look at this")
        dog._stop.set()

    monkeypatch.setattr(Watchdog, "_tick", tick)
    Watchdog(tmp_path, 0, 1, 1.0, "job", lambda status: None)._watch()
    assert len(ticks) == 2


def test_a_job_ends_when_none_of_its_ranks_gets_on(
    clocks: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; the second makes progress until 150 s. The limit is 100 s."""
    (tmp_path / "watchdog").mkdir()
    ended: list[int] = []
    first, second = (Watchdog(tmp_path, rank, 2, 100.0, "job", ended.append) for rank in (0, 1))
    for clocks.now in range(0, 250, 10):
        if clocks.now <= 150:
            monkeypatch.setattr(activity, "_progress", clocks.now)
            second._tick()
            monkeypatch.setattr(activity, "_progress", 0.0)
        first._tick()
    assert not ended
    clocks.now = 260.0
    first._tick()
    assert ended == [EXIT_STUCK]
    report = (tmp_path / "watchdog" / "report.txt").read_text()
    assert "rank 1 has written no stacks" in report  # nor its name, as it was not started


def test_a_job_that_hangs_on_a_full_disk_is_ended(
    clocks: Clocks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be written: here for want of the folder."""
    ended: list[int] = []
    dog = Watchdog(tmp_path / "nowhere", 0, 1, 100.0, "job", ended.append)
    clocks.now = 99.0
    dog._tick()
    assert not ended
    clocks.now = 101.0
    dog._tick()
    assert ended == [EXIT_STUCK] and "is stuck in phase starting" in capsys.readouterr().err


def test_a_wait_with_its_own_limit_may_take_as_long(clocks: Clocks, tmp_path: Path) -> None:
    (tmp_path / "watchdog").mkdir()
    ended: list[int] = []
    dog = Watchdog(tmp_path, 0, 1, 100.0, "job", ended.append)
    with activity.phase("outer"), activity.bounded(500.0), activity.phase("inner"):
        now = activity.current()
        assert now.phase.endswith("outer/inner") and now.bound == 500.0
        for clocks.now in (10.0, 400.0, 490.0):
            dog._tick()
        assert not ended
    assert activity.current().bound == 0.0
    clocks.now = 585.0
    dog._tick()
    assert not ended
    clocks.now = 700.0
    dog._tick()
    assert ended == [EXIT_STUCK]


def test_looking_at_a_thread_does_not_wait_for_the_collector() -> None:
    """CPython 3.11 holds a lock while it lists frames that a thread's end, in a collection meanwhile, waits for."""
    subprocess.run([sys.executable, "-c", COLLECTED_MEANWHILE], check=True, timeout=120)
