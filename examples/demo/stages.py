"""Runs the stages of a demo: each is one of the project's own scripts, started as a user starts it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_style_aligner.tools.reports.report import write_report
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics
from nemo_style_aligner.trainer.telemetry.progress import SECONDS_VARIABLE, newest_line

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "examples" / "nlp" / "gpt"
DATA_SCRIPTS = REPOSITORY / "examples" / "nlp" / "data"
STAGE_LIMIT_SECONDS = 3600
READY_LIMIT_SECONDS = 300
STOP_LIMIT_SECONDS = 60
_MARKER = ".made_by_demo"
_LIVE_SECONDS, _SAID_SECONDS = 1.0, 30.0  # between looks at how far a job is: on a terminal, elsewhere


_CLEAR = "\033[K"  # the rest of a terminal's line


class StageFailed(SystemExit):
    """A stage's command failed; the message says which and where its log is."""


class Demo:
    """Stages with their logs and times. ``seconds`` maps each stage to its wall-clock time.

    What an earlier demo left in ``directory`` is deleted unless ``keep`` is set.

    Raises:
        StageFailed: ``directory`` holds files that no demo has made.
    """

    def __init__(self, directory: Path, num_stages: int, keep: bool = False) -> None:
        if not keep and directory.exists():
            if any(directory.iterdir()) and not (directory / _MARKER).exists():
                raise StageFailed(
                    f"{directory} is not empty and was not made by a demo: give another --output, or delete it"
                )
            shutil.rmtree(directory, ignore_errors=True)  # errors: it may be a mount point, which stays
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        (directory / _MARKER).touch()
        self.directory = directory
        self.seconds: dict[str, float] = {}
        self._num_stages = num_stages
        self._number = 0
        self._prefix = "demo"

    @contextlib.contextmanager
    def stage(self, name: str, what: str) -> Iterator[list[str]]:
        """Time a stage and print a line about it, which ends with what is appended to the yielded list.

        Meanwhile the line says how far the stage's job is; where standard output is not a terminal, lines below it.
        """
        self._number += 1
        started = time.monotonic()
        self._prefix = f"[{self._number}/{self._num_stages}] {what}"
        self._say("...")
        results: list[str] = []
        yield results
        self.seconds[name] = time.monotonic() - started
        ending = f": {', '.join(results)}" if results else ""
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{self._prefix}{ending} ({self.seconds[name]:.0f} s)", flush=True)

    def _say(self, how_far: str) -> None:
        """On a terminal in the place of what was said before."""
        if sys.stdout.isatty():
            line = f"{self._prefix} {how_far}"[: shutil.get_terminal_size().columns - 1]
            print(f"{_CLEAR}{line}", end="\r", flush=True)
        else:
            print(f"{self._prefix} {how_far}", flush=True)

    def run(self, name: str, *command: object) -> None:
        """Run a command to its end, its output in ``logs/<name>.log``.

        Raises:
            StageFailed: it ended with an error or took longer than an hour.
        """
        log = self._log(name)
        with _running(command, log) as process:
            status = self._watch(process, log)
        if status is None:
            raise StageFailed(f"{name} took longer than {STAGE_LIMIT_SECONDS} s; its log is {log}")
        if status != 0:
            raise StageFailed(_failure(name, status, log))

    def _watch(self, process: subprocess.Popen, log: Path) -> int | None:
        """Say how far a job is until it ends; its exit status, None if it takes too long."""
        deadline, shown = time.monotonic() + STAGE_LIMIT_SECONDS, None
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LIVE_SECONDS)
            if (line := newest_line(log)) not in (None, shown):
                shown = line
                self._say(f"| {line}")
        return None

    @contextlib.contextmanager
    def service(self, name: str, port: int, *command: object) -> Iterator[None]:
        """Run a service while the body of the ``with`` statement runs; the body begins once it is ready."""
        log = self._log(name)
        with _running(command, log) as process:
            _wait_until_ready(process, name, port, log)
            yield

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"


def require_at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str) -> None:
    """End with a message unless each of these options is at least ``least``."""
    for name in names:
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least {least}")


def python(script: str | Path) -> list[str]:
    """The beginning of a command that runs a script: a name in examples/nlp/gpt, or an absolute path."""
    return [sys.executable, "-u", str(SCRIPTS / script)]


def mpirun(num_ranks: int) -> list[str]:
    """The beginning of a command that starts ranks with the environment's own Open MPI, or the system's.

    Raises:
        StageFailed: there is none.
    """
    own = Path(sys.executable).with_name("mpirun")
    command = str(own) if own.exists() else shutil.which("mpirun")
    if command is None:
        raise StageFailed("mpirun is missing; install it: pip install -e '.[mpi]'")
    return [command, "-n", str(num_ranks), "--allow-run-as-root"]


def data_prefix(train: Path, validation: Path) -> str:
    """The override that names a job's data files."""
    first, second = (str(path).replace("'", r"\'") for path in (train, validation))
    return f"++model.data.data_prefix={{train: ['{first}'], validation: ['{second}'], test: ['{second}']}}"


def last(log_dir: Path, name: str) -> float:
    """The latest value of a logged metric."""
    return read_metrics(log_dir)[name][-1][1]


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    """Print two columns with a line above and below."""
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    line = f"+{'-' * (left + 2)}+{'-' * (right + 2)}+"
    print(line)
    for name, value in rows:
        print(f"| {name:<{left}} | {value:>{right}} |")
    print(line, flush=True)


def write_results(
    demo: Demo,
    report: dict[str, float],
    rows: Sequence[tuple[str, str]],
    title: str,
    runs: dict[str, str],
    compare: dict[str, str],
) -> None:
    """Write ``report.json`` and ``report.html``, print a table.

    Args:
        report: the figures.
        rows: of the table; the seconds are added.
        title: of the page.
        runs: log directories in the demo's, by the names of their sections.
        compare: files of the evaluations in the demo's directory, by the names of the models.
    """
    seconds = {**demo.seconds, "total": sum(demo.seconds.values())}
    (demo.directory / "report.json").write_text(json.dumps({**report, "seconds": seconds}, indent=1) + "\n")
    rows = [*rows, ("seconds", f"{seconds['total']:.0f}")]
    print_table(rows)
    write_report(
        demo.directory / "report.html",
        title,
        {name: demo.directory / folder for name, folder in runs.items()},
        summary=rows,
        note="Accuracy is the share of held-out questions whose sampled answer (temperature 1) is exactly right.",
        compare={name: demo.directory / file for name, file in compare.items()},
    )
    print(f"report: {demo.directory / 'report.json'} and {demo.directory / 'report.html'}")


@contextlib.contextmanager
def _running(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen]:
    """A process with its output in ``log``; if it still runs when the body of the ``with`` statement ends, it is ended.

    By SIGTERM first: killed at once, mpirun would leave its ranks running.
    """
    process = None
    try:
        with log.open("a") as output:
            process = subprocess.Popen(_words(command), stdout=output, stderr=subprocess.STDOUT, env=_environment(log))
        yield process
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _words(command: Sequence[object]) -> list[str]:
    words: list[str] = []
    for part in command:
        words += [str(p) for p in part] if isinstance(part, list) else [str(part)]
    return words


def _environment(log: Path) -> dict[str, str]:
    # Open MPI refuses to start without HOME. A user who has none, not even in the password database, gets the demo's.
    home = os.path.expanduser("~")
    return {
        "HOME": home if os.path.isabs(home) else str(log.parent),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **_progress(),
    }


def _progress() -> dict[str, str]:
    return {SECONDS_VARIABLE: str(_LIVE_SECONDS if sys.stdout.isatty() else _SAID_SECONDS)}


def _failure(name: str, status: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"{name} failed with status {status}; the end of {log}:", *(f"  {line}" for line in lines[-25:])])


def _wait_until_ready(process: subprocess.Popen, name: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_LIMIT_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
    while True:
        if process.poll() is not None:
            raise StageFailed(_failure(name, process.returncode, log))
        try:
            with direct.open(f"http://127.0.0.1:{port}/v2/health/ready", timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise StageFailed(f"{name} was not ready within {READY_LIMIT_SECONDS} s; its log is {log}") from None
            time.sleep(0.2)
