"""Start the jobs of a plan, watch over them, and end them together (docs/launching.md): ``nsa launch``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Protocol

from nemo_style_aligner.engine.parallel.detection import LOOPBACK
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.tools.placement.node import Share, start_ranks, visible_gpus
from nemo_style_aligner.tools.placement.plan import Address, FindProblems, Plan, PlanError, check_configs, read_plan
from nemo_style_aligner.tools.placement.printers import mpirun_script, slurm_script, submit
from nemo_style_aligner.trainer.launch.ending import EXIT_INTERRUPTED
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE, ignore, taken
from nemo_style_aligner.trainer.launch.supervisor import FORWARDED, POLL_SECONDS, Ranks
from nemo_style_aligner.trainer.telemetry.log_lines import configure_logging
from nemo_style_aligner.trainer.telemetry.progress import newest_line
from nemo_style_aligner.wording import counted, spelt

_logger = logging.getLogger(__name__)

_SERVICE_SECONDS = 90.0  # for a service's last requests, after its clients have ended; it takes up to 60 for them
_SHOWN_LINES = 25  # of the output of a job that failed
_LOOK_SECONDS = 2.0  # for how far the jobs are
_FINAL = (0, 2, EXIT_REQUEUE, EXIT_INTERRUPTED)  # statuses that another start would not mend, or must not follow


class Running(Protocol):
    """A job that has been started; `Ranks` are one."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def send_signal(self, number: int) -> None:
        """To all its processes."""

    def end(self) -> None:
        """Kill what is left of it."""


Start = Callable[[str], Running]
Place = Callable[[Plan], AbstractContextManager[Start]]


def run_plan(plan: Plan, place: Place, restarts: int = 0) -> int:
    """Start a plan's jobs, wait for their end, and start them all again when one has failed: they resume by themselves.

    Args:
        place: finds devices for all jobs, for as long as its context lasts, and gives what starts a job there.
        restarts: how often at most.

    Returns:
        The status that tells most: 0 when all is done, 75 when the plan can be continued, else that of the job that
        failed first.
    """
    watch = _Watch(plan)
    for attempt in itertools.count(1):
        with place(plan) as start:
            status = watch.run(start)
        if status in _FINAL or attempt > restarts or watch.received:
            break
        _logger.warning("restart %d of at most %d: the jobs go on from their checkpoints", attempt, restarts)
    return status


class _Watch:
    """Watches over a plan's jobs, and hands signals on to them. Main thread only.

    Attributes:
        received: signals, since there were jobs.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: dict[str, Running] = {}
        self.received: list[int] = []
        self._shown: dict[str, str] = {}  # how far each job was
        self._look_again = 0.0
        self._is_waiting = True  # for devices: no job is there yet
        for number in taken(FORWARDED):
            signal.signal(number, self._on_signal)

    def run(self, start: Start) -> int:
        """Start the jobs and wait for their end; the plan's status."""
        self._is_waiting, self._running = False, {}
        try:
            for name in [*self._plan.services(), *self._plan.trainers()]:
                self._running[name] = start(name)
                _logger.info("%s started, it writes to %s", name, self._plan.log_dir(name))
            for number in self.received:  # what came meanwhile
                self._forward(number)
            status = self._wait_for_trainers()
            if status in (0, EXIT_REQUEUE):
                self._dismiss_services()
            return status
        finally:
            with ThreadPoolExecutor() as at_once:  # their limits do not add up
                list(at_once.map(lambda job: job.end(), self._running.values()))
            self._is_waiting = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_waiting:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_REQUEUE)
        self.received.append(number)
        self._forward(number)

    def _forward(self, number: int) -> None:
        """Ask the trainers to stop: the services follow when those have saved with their help. Ctrl-C ends all."""
        interrupts = self.received.count(signal.SIGINT)
        for name, job in self._running.items():
            if interrupts or name in self._plan.trainers():
                job.send_signal(signal.SIGKILL if interrupts > 1 else number)

    def _wait_for_trainers(self) -> int:
        """Until all trainers have ended well, or a job has not; the plan's status."""
        services = self._plan.services()
        while True:
            states = {name: job.poll() for name, job in self._running.items()}
            trainers = [states[name] for name in self._plan.trainers()]
            if set(trainers) <= {0, EXIT_REQUEUE}:
                return max(filter(None, trainers), default=0)
            for name, status in states.items():
                if status is not None and (name in services or status not in (0, EXIT_REQUEUE)):
                    return self._status_of_failed(name, status)
            self._show_progress()
            time.sleep(POLL_SECONDS)

    def _show_progress(self) -> None:
        """Log what is new of how far each job is."""
        if time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + _LOOK_SECONDS
        for name in self._running:
            lines = filter(None, map(newest_line, sorted(self._plan.log_dir(name).glob("output-*.log"))))
            line = next(lines, self._shown.get(name, ""))
            if line != self._shown.get(name, ""):
                self._shown[name] = line
                _logger.info("%s: %s", name, spelt(line))

    def _status_of_failed(self, name: str, status: int) -> int:
        if signal.SIGINT in self.received:
            return EXIT_INTERRUPTED
        if self.received and status > 128:  # it was starting, and had nothing to save
            return EXIT_REQUEUE
        _logger.error("%s ended with status %d; ending the plan's other jobs", name, status)
        for output in sorted(self._plan.log_dir(name).glob("output-*.log")):
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
            _logger.error("the end of %s:\n%s", output, "\n".join(lines))
        return status or 1

    def _dismiss_services(self) -> None:
        """Ask the services to finish and wait for them, not for ever."""
        services = [self._running[name] for name in self._plan.services()]
        for service in services:
            service.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _SERVICE_SECONDS
        while None in [service.poll() for service in services] and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def on_this_machine(plan: Plan) -> Iterator[Start]:
    """All jobs of a plan on this machine; jobs on GPUs get their own, if there are enough of them."""
    if large := [f"jobs.{name}.nodes: {job.nodes}" for name, job in plan.jobs.items() if job.nodes > 1]:
        raise PlanError(f"{', '.join(large)}: `--with local` has one node; give all ranks as its devices, or use ray")
    addresses = {name: Address(LOOPBACK, free_port(), LOOPBACK) for name in plan.services()}
    gpus = _dealt_gpus(plan)

    def start(name: str) -> Ranks:
        job = plan.jobs[name]
        env = {**os.environ, **gpus.get(name, {})}
        share = Share(plan.log_dir(name), 0, 1, job.devices, LOOPBACK, free_port())
        return start_ranks(plan.command(name, addresses), env | plan.environment(name), share, os.getcwd())

    yield start


def _dealt_gpus(plan: Plan) -> dict[str, dict[str, str]]:
    """The variable that says which GPUs of this machine are a job's, where the jobs together need no more than all."""
    named = {
        n: j.env["CUDA_VISIBLE_DEVICES"].split(",") for n, j in plan.jobs.items() if "CUDA_VISIBLE_DEVICES" in j.env
    }
    gpus = [gpu for gpu in visible_gpus() if not any(gpu in given for given in named.values())]
    wanting = {name: job.devices for name, job in plan.jobs.items() if name not in named}
    if sum(wanting.values()) > len(gpus):
        if gpus and len(wanting) > 1:
            ranks = counted(sum(wanting.values()), "ranks")
            _logger.warning("the jobs share this machine's %s: they have %s", counted(len(gpus), "GPUs"), ranks)
        return {}
    dealt = iter(gpus)
    return {n: {"CUDA_VISIBLE_DEVICES": ",".join(itertools.islice(dealt, count))} for n, count in wanting.items()}


def launch_plan(
    file: Path,
    launcher: str,
    *,
    dry_run: bool,
    restarts: int | None,
    wait_minutes: float | None,
    hosts: str | None,
    sbatch: str | None,
    find_problems: FindProblems | None = None,
) -> int:
    """Do what ``nsa launch`` has been asked for; the exit status. ``find_problems``: see `check_configs`.

    For errors see `read_plan`, `check_configs` and the launchers.
    """
    configure_logging()
    plan = read_plan(file)
    check_configs(plan, find_problems)
    if launcher == "mpirun":
        print(mpirun_script(plan, hosts.split(",") if hosts else ()), end="")
        return 0
    if launcher == "slurm":
        script = slurm_script(plan, file.absolute(), sbatch or "", 2 if restarts is None else restarts)
        if dry_run:
            print(script, end="")
        return 0 if dry_run else submit(plan, script)
    if dry_run:
        for name, job in plan.jobs.items():
            command = shlex.join([job.script, *plan.arguments(name)])
            print(spelt(f"{name}: {counted(job.nodes, 'nodes')} of {counted(job.devices, 'ranks')}: {command}"))
        return 0
    plan.make_secret()
    place: Place = on_this_machine
    if launcher == "ray":
        from nemo_style_aligner.tools.placement.on_ray import on_ray

        minutes = 30.0 if wait_minutes is None else wait_minutes
        place = functools.partial(on_ray, wait_seconds=60.0 * minutes)
    status = run_plan(plan, place, restarts or 0)
    ignore()
    return status
