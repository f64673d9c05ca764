"""A plan's jobs on a Ray cluster: an agent on each node, in a placement group, starts the node's ranks as processes.

Ray finds the nodes and starts the agents. Ranks know nothing of it: they are the same processes as under any launcher,
and talk to each other by torch.distributed and HTTP alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before Ray is loaded: lines that ranks have in common are not dropped, and nobody is told of this run.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None  # which `_join` reports

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.placement.node import Share, start_ranks
from nemo_style_aligner.tools.placement.plan import Address, Plan, PlannedJob
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE
from nemo_style_aligner.trainer.launch.supervisor import POLL_SECONDS, Ranks, status_of
from nemo_style_aligner.wording import counted

_logger = logging.getLogger(__name__)

_START_SECONDS = 300.0  # for an agent to start: it imports Ray and this package
_SIGNAL_SECONDS = 30.0  # for ranks that are being started, before they can be sent a signal
_END_SECONDS = 45.0  # for an agent to end its ranks; it kills those that do not end
_REQUEUE_SECONDS = 15.0  # for the other nodes' ranks to end, after some have stopped early
_SAY_SECONDS = 30.0  # between two lines about what is missing
_GONE = 1  # status of a node whose agent is gone
# What a cluster that srun or mpirun started hands on to its workers: ranks would take themselves for theirs. Ray sets
# the number of threads by the CPUs of the agent.
_NOT_HANDED_ON = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "OMP_NUM_THREADS")


class NoRoomError(UserError):
    """The cluster does not have what the plan needs, or not in time; the message says what is missing."""

    exit_status = 1


class _Agent:
    """Starts a node's ranks of a job, and ends them. In a process of its own on that node, with which they die."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._is_started, self._is_ending = threading.Event(), threading.Event()

    def place(self) -> tuple[str, int]:
        """This node's address, and a port that is free."""
        return ray.util.get_node_ip_address(), free_port()

    def run(self, arguments: Sequence[str], variables: Mapping[str, str], share: Share, cwd: str) -> int:
        """Run the ranks; their status."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_HANDED_ON)}
        if not share.log_dir.parent.is_dir():
            raise NoRoomError(f"there is no {share.log_dir.parent} here: results_dir must be one folder on all nodes")
        self._ranks = start_ranks(arguments, env | dict(variables), share, cwd)
        self._is_started.set()
        try:
            while (status := self._ranks.poll()) is None and not self._is_ending.wait(POLL_SECONDS):
                pass
        finally:
            self._ranks.end()
        return 143 if status is None else status

    def send_signal(self, number: int) -> None:
        self._is_started.wait(_SIGNAL_SECONDS)
        self._ranks.send_signal(number)

    def end(self) -> None:
        self._is_ending.set()


class _Nodes:
    """A job that runs on the nodes of a placement group."""

    def __init__(self, name: str, group: PlacementGroup, bundle: Mapping[str, float]) -> None:
        self.name = name
        resources = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        self._agents = [
            ray.remote(_Agent)
            .options(
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                **resources,
            )
            .remote()
            for number in range(group.bundle_count)
        ]
        try:
            self.host, self._port = ray.get(self._agents[0].place.remote(), timeout=_START_SECONDS)
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise NoRoomError(f"{name}: no agent starts on the first of its nodes: {reason}") from error
        self._runs: dict[Any, int] = {}  # and each one's node
        self._codes: list[int | None] = [None] * len(self._agents)

    def free_port(self) -> int:
        """Of the first node."""
        return int(ray.get(self._agents[0].place.remote(), timeout=_START_SECONDS)[1])

    def start(self, job: PlannedJob, arguments: Sequence[str], variables: Mapping[str, str], log_dir: Path) -> None:
        """Start the ranks on all nodes."""
        for number, agent in enumerate(self._agents):
            share = Share(log_dir, number, len(self._agents), job.devices, self.host, self._port)
            self._runs[agent.run.remote(arguments, variables, share, os.getcwd())] = number

    def poll(self) -> int | None:
        """The job's status; None while it runs."""
        self._collect(0)
        return status_of(self._codes)

    def send_signal(self, number: int) -> None:
        for agent in self._agents:
            agent.send_signal.remote(number)

    def end(self) -> None:
        """End all ranks, within seconds; the agents end with their placement group."""
        if self.poll() == EXIT_REQUEUE:
            self._collect(_REQUEUE_SECONDS)
        for agent in self._agents:
            agent.end.remote()
        self._collect(_END_SECONDS)

    def _collect(self, seconds: float) -> None:
        """Note how nodes have ended; wait until all have, for so long."""
        if not self._runs:
            return
        done, _ = ray.wait([*self._runs], num_returns=len(self._runs), timeout=seconds)
        for run in done:
            node = self._runs.pop(run)
            try:
                self._codes[node] = ray.get(run)
            except RayActorError as error:
                _logger.error("%s: node %d is lost: %s", self.name, node, str(error).splitlines()[0])
                self._codes[node] = _GONE
            except RayTaskError as error:
                raise error.cause from None


@contextlib.contextmanager
def on_ray(plan: Plan, wait_seconds: float) -> Iterator[Any]:
    """All jobs of a plan on a Ray cluster: that of RAY_ADDRESS, else the one that this machine belongs to.

    Raises:
        NoRoomError: there is none, or within ``wait_seconds`` it does not have what the plan needs.
    """
    _join()
    groups: dict[str, PlacementGroup] = {}
    try:
        bundles = {name: _bundle(job) for name, job in plan.jobs.items()}
        for name, job in plan.jobs.items():
            groups[name] = placement_group([bundles[name]] * job.nodes, strategy="STRICT_SPREAD")
        _wait_for(plan, groups, bundles, wait_seconds)
        nodes = {name: _Nodes(name, groups[name], bundles[name]) for name in plan.jobs}
        addresses = {n: Address(nodes[n].host, nodes[n].free_port(), nodes[n].host) for n in plan.services()}

        def start(name: str) -> _Nodes:
            command, variables = plan.command(name, addresses), plan.environment(name)
            nodes[name].start(plan.jobs[name], command, variables, plan.log_dir(name))
            return nodes[name]

        yield start
    finally:
        for group in groups.values():
            remove_placement_group(group)


@functools.cache
def _join() -> None:
    if ray is None:
        raise UserError("`--with ray` needs Ray: pip install 'nemo_style_aligner[ray]'")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise NoRoomError(
            "no Ray cluster is found: start one (`ray start --head`, on other nodes `ray start --address=HOST:6379`), "
            "name one in RAY_ADDRESS, or in a Slurm allocation use `ray symmetric-run` (docs/launching.md)"
        ) from error
    for number, handler in handlers.items():  # Ray has taken SIGTERM, which is to stop the jobs
        if callable(handler):
            signal.signal(number, handler)


def _bundle(job: PlannedJob) -> dict[str, float]:
    """What a job takes of each node: GPUs where the cluster has any, unless its ranks may see none; else CPUs."""
    on_gpus = job.env.get("CUDA_VISIBLE_DEVICES") != "" and ray.cluster_resources().get("GPU", 0) > 0
    return {"GPU" if on_gpus else "CPU": float(job.devices)}


def _wait_for(
    plan: Plan, groups: Mapping[str, PlacementGroup], bundles: Mapping[str, Mapping[str, float]], seconds: float
) -> None:
    """Wait until the cluster has given all groups, and say what is missing meanwhile."""
    deadline, said = time.monotonic() + seconds, time.monotonic() - _SAY_SECONDS + 5.0
    while waiting := [name for name, group in groups.items() if not group.wait(0.5)]:
        if time.monotonic() > deadline:
            raise NoRoomError(f"given up after {seconds / 60:g} minutes: {_missing(plan, waiting, bundles)}")
        if time.monotonic() > said + _SAY_SECONDS:
            said = time.monotonic()
            _logger.warning("waiting for the cluster: %s", _missing(plan, waiting, bundles))


def _missing(plan: Plan, waiting: Sequence[str], bundles: Mapping[str, Mapping[str, float]]) -> str:
    """Which jobs wait for what, and what the cluster has of it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    lines = []
    for name in waiting:
        (kind, count), number = next(iter(bundles[name].items())), plan.jobs[name].nodes
        fitting = sum(node.get(kind, 0) >= count for node in nodes)
        has = "are taken by others"
        if fitting < number:
            has = f"are missing: the cluster has {counted(fitting, 'nodes')} of that size"
        lines.append(f"{name} needs {counted(number, 'nodes')} with {count:g} {kind}s each, which {has}")
    free = ray.available_resources()
    kinds = sorted({kind for name in waiting for kind in bundles[name]})
    lines.append("free are " + ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in kinds))
    return "; ".join(lines)
