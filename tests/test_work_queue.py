"""The rollout work queue: order, leases, rounds, exactly-once completion, over HTTP and beneath it."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from job_processes import ROOT
from listeners import listeners
from served_critic import TEST_LIMITS, client_config, wait_for

from nemo_style_aligner.config import load_defaults
from nemo_style_aligner.generation.engine import GenerationRequest, GenerationResult, GenerationStatistics
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.generation.shard import TensorParallel
from nemo_style_aligner.parallel import agreement
from nemo_style_aligner.parallel.groups import single_process
from nemo_style_aligner.parallel.machine import outgoing_address, own_address
from nemo_style_aligner.parallel.stop_signals import StopEarlyError, stops
from nemo_style_aligner.rl.rewards import Reward
from nemo_style_aligner.rl.rollouts import collector, generator, setup, work_client, work_server
from nemo_style_aligner.rl.rollouts.collector import ScoredResponses
from nemo_style_aligner.rl.rollouts.generator import AcceptedResponses, LocalGenerator, RequestSupply
from nemo_style_aligner.rl.rollouts.prompts import ResponseLengths
from nemo_style_aligner.rl.rollouts.remote import RemoteRound
from nemo_style_aligner.rl.rollouts.setup import build_work_source, open_work_queue
from nemo_style_aligner.rl.rollouts.work_client import WorkerLimits, WorkQueueClient
from nemo_style_aligner.rl.rollouts.work_queue import (
    DRAINED,
    SERVING,
    WAITING,
    RoundMismatchError,
    SampleLostError,
    WorkQueue,
)
from nemo_style_aligner.rl.rollouts.work_server import WorkQueueServer
from nemo_style_aligner.rl.rollouts.work_source import StaticPartition
from nemo_style_aligner.rl.sample import Prompt, Sample
from nemo_style_aligner.rl.scoring import Scorer
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.servers.http_client import (
    ClientLimits,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.servers.http_connection import server_url
from nemo_style_aligner.telemetry import activity

pytestmark = pytest.mark.timeout(240)

LEASE_SECONDS = 600.0
LIMITS = WorkerLimits(LEASE_SECONDS, stall_seconds=600, wait_seconds=3600)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pass_time(queue: WorkQueue, clock: Clock, until: float) -> None:
    """The clock goes on, and the queue is asked now and then, as it is by workers that live."""
    while clock.now < until:
        clock.now = min(until, clock.now + queue.lease_seconds / 4)
        queue.status()


@pytest.fixture
def clock_of_all(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of a queue and its workers, which say several times in a tenth of a second that they live, whatever it shows."""
    clock = Clock()
    monkeypatch.setattr(work_client, "time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setattr(work_client, "_BEATS_PER_LEASE", 500)
    return clock


def get_on(queue: WorkQueue, clock: Clock, until: float, make_progress: Callable[[], None]) -> None:
    """The clock goes on, and so do the workers: their signs of life arrive."""

    def are_heard_of() -> bool:
        return all(holder["silent_seconds"] == 0 for holder in queue.status()["holders"].values())

    while clock.now < until:
        make_progress()
        clock.now += queue.lease_seconds / 4
        wait_for(are_heard_of)


@contextlib.contextmanager
def serve(queue: WorkQueue, token: str | None = None):
    server = WorkQueueServer(queue, token=token)
    try:
        yield server
    finally:
        for made in _clients.pop(server.port, ()):
            made.close()  # none shall say in another test that its server is gone
        server.stop()


_clients: dict[int, list[WorkQueueClient]] = {}  # by their server's port


def client(server: WorkQueueServer, round_number: int = 0, limits: WorkerLimits = LIMITS, **options) -> WorkQueueClient:
    made = WorkQueueClient("127.0.0.1", server.port, limits, poll_seconds=0.02, **options)
    made.start_round(round_number, [])
    _clients.setdefault(server.port, []).append(made)
    return made


def put(server: WorkQueueServer, path: str, body, **options) -> requests.Response:
    return requests.put(f"http://127.0.0.1:{server.port}{path}", json=body, timeout=10, **options)


# ------------------------------------------------------------------ the queue itself


def test_ids_come_in_the_given_order_or_longest_expected_first() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    queue.start_round(0, [5, 3, 9, 1])
    assert queue.lease(3, "a")[:2] == ([5, 3, 9], SERVING)
    queue.start_round(1, [5, 3, 9, 1], [10.0, 30.0, 10.0, 20.0])
    assert queue.lease(9, "a")[0] == [3, 1, 5, 9]


def test_a_round_is_complete_when_every_id_is() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    assert queue.status()["state"] == DRAINED and queue.status()["done"] == 0
    queue.start_round(0, [1, 2])
    assert queue.lease(5, "a")[:2] == ([1, 2], WAITING)
    assert queue.complete([1], "a") == ([1], [])
    assert queue.lease(5, "b")[:2] == ([], WAITING)
    assert queue.status()["done"] == 1 and queue.status()["holders"].keys() == {"a"}
    assert queue.complete([1, 2], "a") == ([1, 2], [])  # a repeated report is accepted again
    assert queue.lease(5, "b")[:2] == ([], DRAINED)
    assert queue.status()["done"] == 2 and queue.status()["total"]["completed"] == 2


def test_an_expired_lease_is_served_again_and_late_answers_are_refused() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    queue.start_round(0, [1, 2, 3])
    assert queue.lease(2, "slow")[0] == [1, 2]
    pass_time(queue, clock, 9)
    assert queue.complete([1], "slow") == ([1], [])  # any sign of life prolongs the lease
    pass_time(queue, clock, 18)
    assert queue.lease(1, "fast")[0] == [3]
    pass_time(queue, clock, 19)
    assert queue.lease(5, "fast")[0] == [2]
    assert queue.complete([2], "slow") == ([], [2])
    assert queue.complete([2, 3], "fast") == ([2, 3], [])
    assert queue.complete([1, 2], "slow") == ([1], [2])
    assert queue.status()["state"] == DRAINED
    assert queue.status()["total"] == {"served": 4, "expired": 1, "completed": 3, "refused": 2}


def test_a_lease_runs_out_whatever_is_asked() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    for round_number, ask in enumerate((
        lambda: queue.lease(1, "b").ids == [1],
        lambda: queue.complete([1], "a") == ([], [1]),
        lambda: queue.renew("a") == [],
        lambda: queue.status()["pending"] == 1,
    )):  # fmt: skip
        queue.start_round(round_number, [1])
        assert queue.lease(1, "a").ids == [1]
        for _ in range(2):
            clock.now += 4
            assert queue.lease(1, "b").ids == []
        clock.now += 2
        assert ask(), round_number


def test_renewing_keeps_a_lease() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    queue.start_round(0, [1])
    queue.lease(1, "a")
    for seconds in (8, 16, 24):
        pass_time(queue, clock, seconds)
        assert queue.status()["holders"] == {"a": {"count": 1, "ids": [1], "silent_seconds": 8.0}}
        assert queue.renew("a") == [1]
    pass_time(queue, clock, 34)
    assert queue.renew("a") == []
    assert queue.lease(1, "b")[0] == [1]


def test_a_queue_that_stood_still_takes_no_ids_from_workers_that_live() -> None:
    """Its process was stopped: signs of life of all wait in its backlog. Who is silent then is given up as ever."""
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, workers=2, clock=clock)
    queue.start_round(0, [1, 2, 3, 4, 5])
    assert queue.lease(1, "a")[0] == [1] and queue.lease(1, "b")[0] == [2] and queue.lease(1, "dead")[0] == [3]
    clock.now += 4
    assert queue.lease(1, "dead later")[0] == [4]
    for seconds in (12, 100, 100, 100, 100, 100):  # an id that is lost five times ends the job
        clock.now += seconds
        assert queue.renew("a") == [1] and queue.complete([2], "b") == ([2], [])
    for seconds, expired in ((5, 0), (1, 1), (3, 1), (1, 2)):
        pass_time(queue, clock, clock.now + seconds)
        assert queue.renew("a") == [1] and queue.status()["total"]["expired"] == expired
    assert queue.lease(1, "b")[0] == [3]


def test_a_repeated_lease_request_gets_the_same_ids() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    queue.start_round(0, list(range(10)))
    first = queue.lease(3, "a", request_number=1)
    assert queue.lease(3, "a", request_number=1) == first
    queue.complete([1], "a")
    assert queue.lease(3, "a", request_number=1).ids == [0, 2]  # what is done is not begun anew
    assert queue.lease(3, "a", request_number=2)[0] == [3, 4, 5]
    assert queue.lease(3, "b", request_number=1)[0] == [6, 7, 8]


def test_a_straggler_cannot_touch_the_next_round() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    queue.start_round(4, [1, 2])
    assert queue.lease(1, "late", round_number=4)[0] == [1]
    queue.start_round(5, [1, 2])
    assert queue.status()["holders"] == {}
    assert queue.lease(9, "late", round_number=4) == ([], DRAINED, 0, 0)
    assert queue.complete([1], "late", round_number=4) == ([], [1])
    assert queue.status()["total"]["refused"] == 1
    assert queue.renew("late", round_number=4) == []
    assert queue.lease(9, "a", round_number=5)[0] == [1, 2]
    assert queue.renew("a", round_number=4) == [] and queue.renew("a", round_number=5) == [1, 2]
    with pytest.raises(RoundMismatchError, match="round 6 has not begun"):
        queue.lease(1, "a", round_number=6)
    with pytest.raises(RoundMismatchError, match="round 6 has not begun"):
        queue.complete([1], "a", round_number=6)


def test_wrong_rounds_are_named() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with pytest.raises(ValueError, match="must differ"):
        queue.start_round(0, [1, 1])
    with pytest.raises(ValueError, match="expected lengths"):
        queue.start_round(0, [1, 2], [1.0])
    queue.start_round(0, [1])
    with pytest.raises(ValueError, match="round 0"):
        queue.start_round(0, [1])


def test_hundreds_of_workers_some_of_them_dying_complete_each_id_once() -> None:
    """300 workers on a simulated clock; a third die or fall asleep while holding ids."""
    generator, clock = random.Random(0), Clock()
    queue = WorkQueue(lease_seconds=20, clock=clock)
    ids = list(range(20000))
    queue.start_round(0, ids, [generator.random() for _ in ids])
    completed: collections.Counter[int] = collections.Counter()
    workers: dict[str, tuple[float, list[int]]] = {f"w{i}": (0.0, []) for i in range(300)}
    state = SERVING
    while state != DRAINED:
        name = min(workers, key=lambda worker: workers[worker][0])
        clock.now, held = workers.pop(name)
        accepted, _ = queue.complete(held, name)
        completed.update(accepted)
        taken, state, _, _ = queue.lease(generator.randint(1, 8), name)
        fate = generator.random()
        if fate < 0.01 and len(workers) > 50:
            continue  # dies
        pause = 25.0 if fate < 0.03 else generator.uniform(0.5, 5.0)
        workers[name] = (clock.now + pause, taken)
    assert sorted(completed) == ids
    assert set(completed.values()) == {1}
    counts = queue.status()["total"]
    assert counts["expired"] > 50 and counts["refused"] > 50


# ------------------------------------------------------------------ over HTTP


def test_nemo_aligners_own_request_is_answered_with_a_list() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue) as server:
        queue.start_round(0, [7, 8, 9])
        assert put(server, "/get_idx", {"batch_size": 2}).json() == [7, 8]
        assert put(server, "/get_idx", {"batch_size": 2}).json() == [9]
        response = put(server, "/get_idx", {"batch_size": 2})
        assert response.json() == [] and response.headers["X-Work-Queue-State"] == DRAINED


def test_client_leases_completes_and_ends() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue) as server:
        worker = WorkQueueClient("127.0.0.1", server.port, LIMITS, server=server)
        for round_number in range(3):
            worker.start_round(round_number, [4, 5, 6])
            seen = []
            while ids := worker.lease(2, wait=True):
                seen += worker.complete_async(ids).result()
            assert seen == [4, 5, 6] and queue.status()["state"] == DRAINED
        worker.close()


def test_waiting_worker_gets_the_ids_of_a_dead_one() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    with serve(queue) as server:
        queue.start_round(0, [1, 2])
        dead, alive = client(server, worker="dead"), client(server, worker="alive")
        assert dead.lease(1) == [1]
        assert alive.lease(5) == [2]
        assert alive.lease(5) == [] and queue.status()["leased"] == 2  # does not wait unless asked to
        assert alive.complete_async([2]).result() == [2]
        pass_time(queue, clock, 11)
        assert alive.lease(5, wait=True) == [1]
        assert alive.complete_async([1]).result() == [1]
        assert dead.complete_async([1]).result() == []
        assert alive.lease(5, wait=True) == [] and queue.status()["state"] == DRAINED


def test_waiting_has_a_limit() -> None:
    queue = WorkQueue(lease_seconds=60)
    with serve(queue) as server:
        queue.start_round(0, [1])
        assert client(server, worker="slow").lease(1) == [1]
        with pytest.raises(TimeoutError, match=r"waits for 1 ids.*for 0\.2 s: ids 1 are held by slow, last heard from"):
            client(server, limits=dataclasses.replace(LIMITS, wait_seconds=0.2)).lease(1, wait=True)


def test_a_wait_begins_anew_with_every_id_that_others_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, clock, left = WorkQueue(lease_seconds=60), Clock(), [1, 2, 3]

    def sleep(seconds: float) -> None:
        clock.now += 0.4
        queue.complete([left.pop(0)], "slow")

    with serve(queue) as server:
        queue.start_round(0, left)
        assert queue.lease(3, "slow").ids == left
        worker = client(server, limits=dataclasses.replace(LIMITS, wait_seconds=0.5))
        monkeypatch.setattr(work_client, "time", types.SimpleNamespace(monotonic=clock, sleep=sleep))
        assert worker.lease(1, wait=True) == [] and not left


def test_many_clients_at_once_complete_each_id_once() -> None:
    queue, lock = WorkQueue(LEASE_SECONDS), threading.Lock()
    completed: collections.Counter[int] = collections.Counter()
    with serve(queue) as server:
        queue.start_round(0, list(range(1000)))

        def work() -> None:
            worker = client(server)
            while ids := worker.lease(8, wait=True):
                accepted = worker.complete_async(ids).result()
                with lock:
                    completed.update(accepted)
            worker.close()

        threads = [threading.Thread(target=work) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert sorted(completed) == list(range(1000))
    assert set(completed.values()) == {1}


def test_the_token_is_needed() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue, token="s3cret") as server:
        queue.start_round(0, [1, 2])
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/get_idx", "/complete", "/renew"):
                assert (
                    put(server, path, {"batch_size": 1, "ids": [], "worker": "w"}, headers=headers).status_code == 401
                )
        with pytest.raises(RequestRefusedError, match="401"):
            client(server, token="wrong").lease(1)
        assert client(server, token="s3cret").lease(1) == [1]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
            stranger.sendall(b"PUT /get_idx HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 401")  # the body is not waited for, nor stored
        assert requests.get(f"http://127.0.0.1:{server.port}/health", timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/get_idx", {}),
        ("/get_idx", []),
        ("/get_idx", {"batch_size": 0}),
        ("/get_idx", {"batch_size": True}),
        ("/get_idx", {"batch_size": 10**9}),
        ("/get_idx", {"batch_size": 1, "worker": 7}),
        ("/get_idx", {"batch_size": 1, "round": "x"}),
        ("/get_idx", {"batch_size": 1, "completed": [1]}),
        ("/get_idx", {"batch_size": 1, "worker": "w", "completed": [True]}),
        ("/get_idx", {"batch_size": 1, "worker": "w", "completed": list(range(513))}),
        ("/complete", {"ids": [1]}),
        ("/complete", {"ids": ["1"], "worker": "w"}),
        ("/complete", {"ids": 1, "worker": "w"}),
        ("/renew", {}),
    ],
)
def test_malformed_requests_are_refused(path: str, body) -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue) as server:
        queue.start_round(0, [1])
        response = put(server, path, body)
        assert response.status_code == 400 and "error" in response.json()
        assert queue.status()["pending"] == 1


def test_a_lease_takes_completions_along() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    with serve(queue) as server:
        queue.start_round(0, list(range(4)))
        assert put(server, "/get_idx", {"batch_size": 2, "worker": "slow", "round": 0}).json() == [0, 1]
        pass_time(queue, clock, 11.0)
        body = {"batch_size": 2, "worker": "fast", "round": 0}
        assert put(server, "/get_idx", body).json() == [0, 1]
        response = put(server, "/get_idx", {**body, "worker": "slow", "completed": [0, 1], "request": 1})
        assert response.json() == [2, 3] and response.headers["X-Work-Queue-Refused"] == "0,1"
        for _ in range(2):  # an answer that was lost on its way
            response = put(server, "/get_idx", {**body, "completed": [0, 1], "request": 1})
            assert response.json() == [] and "X-Work-Queue-Refused" not in response.headers
        assert queue.status()["total"]["completed"] == 2
        assert put(server, "/get_idx", {**body, "worker": "slow", "completed": [2, 3]}).json() == []
        assert queue.status()["state"] == DRAINED


def test_a_busy_client_reports_what_is_done_with_its_next_lease() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue) as server:
        queue.start_round(0, list(range(8)))
        worker = client(server)
        ids = worker.lease(4)
        answered, hold = threading.Event(), threading.Event()
        worker._sender.submit(lambda: (answered.set(), hold.wait(10)))  # the thread that sends is at work
        answered.wait(10)
        lease = worker._sender.submit(worker._ask, 0, 4)
        done = [worker.complete_async([item_id]) for item_id in ids]
        sent = server.queue.status()["total"]["completed"]
        hold.set()
        assert sent == 0 and lease.result(10) == [4, 5, 6, 7]
        assert [future.result(10) for future in done] == [[item_id] for item_id in ids]
        assert queue.status()["total"]["completed"] == 4
        worker.close()


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    queue = WorkQueue(LEASE_SECONDS)
    with serve(queue) as server, socket.create_connection(("127.0.0.1", server.port)) as deaf:
        queue.start_round(0, list(range(10**15, 10**15 + 60000)))
        body = json.dumps({"batch_size": 60000, "worker": "deaf", "request": 1}).encode()
        head = f"PUT /get_idx HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall((head.encode() + body) * 40)  # 40 MiB of answers
        assert put(server, "/get_idx", {"batch_size": 1, "worker": "w"}).json() == []


class Sink:
    def __init__(self) -> None:
        self.got: list[int] = []

    def add(self, result: GenerationResult) -> None:
        self.got.append(result.request_id)

    def flush(self) -> None:
        pass


def respond(request: GenerationRequest) -> GenerationResult:
    return GenerationResult(request.request_id, request.prompt_token_ids, [3], [0.0], "stop", 0)


def test_a_worker_silent_for_longer_than_its_lease_gets_on_with_its_own_ids() -> None:
    """Nobody else took them: they are its own again, it does not begin them anew, and completes each once."""
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    with serve(queue) as server:
        worker, sink, begun = WorkQueueClient("127.0.0.1", server.port, LIMITS, server=server), Sink(), []
        worker.start_round(2, list(range(8)))
        accepted = AcceptedResponses(worker, sink)
        supply = RequestSupply(worker, EngineGroup(), 4, [Prompt(i, [1, 2]) for i in range(8)], seed=7)
        while supply.wait():
            requests_, running = iter(supply), []
            while running or not begun:
                while len(running) < 4 and (request := next(requests_, None)) is not None:
                    running.append(request)
                    begun.append(request.request_id)
                if len(begun) == 4:
                    pass_time(queue, clock, 11.0)
                supply.num_running -= 1
                accepted.add(respond(running.pop()))  # the newest: the others are under way when ids are leased again
            accepted.flush()
        worker.close()
    assert sorted(sink.got) == list(range(8))
    assert queue.status()["total"]["expired"] > 0 and queue.status()["total"]["completed"] == 8
    assert len(begun) < 8 + queue.status()["total"]["expired"]


def test_an_engine_leases_for_its_free_slots_when_it_has_begun_what_it_had() -> None:
    class Work(StaticPartition):
        def lease(self, n: int, wait: bool = False) -> list[int]:
            asked.append(n)
            return super().lease(n)

    asked: list[int] = []
    work = Work(0, 1)
    work.start_round(1, list(range(8)))
    supply = RequestSupply(work, EngineGroup(), 4, [Prompt(i, [i]) for i in range(8)], seed=7)
    assert supply.wait() and asked == [4]
    source = iter(supply)
    begun = [next(source) for _ in range(4)]
    assert asked == [4] and supply.num_running == 4
    supply.num_running -= 3
    begun += source
    assert asked == [4, 3, 1, 1] and supply.num_running == 5
    assert [(r.request_id, r.prompt_token_ids, r.seed) for r in begun] == [
        (i, [i], derive_seed(7, i)) for i in range(8)
    ]


def test_the_ranks_of_an_engine_hear_of_their_leader_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for as long as others complete something; their collective has a limit that does not begin anew."""

    def broadcast(value: Any, *_: Any) -> Any:
        told.append(value)
        if len(told) == 3:
            enough.set()
        return answers.pop(0) if answers else value

    class Work(StaticPartition):
        def lease(self, n: int, wait: bool = False) -> list[int]:
            assert wait and enough.wait(300)
            return super().lease(n)

    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "broadcast_object", broadcast)
    prompts = [Prompt(i, [1]) for i in range(4)]
    enough, told, control = threading.Event(), [], object()
    answers: list[Any] = []
    work = Work(0, 1)
    work.start_round(1, [0, 1])
    leader = EngineGroup(TensorParallel(0, 2), control=control)  # type: ignore[arg-type]
    supply = RequestSupply(work, leader, 4, prompts, seed=7)
    assert supply.wait()
    assert told[:3] == [None] * 3 and told[-1] == ([0, 1], None) and set(map(str, told[3:-1])) <= {"None"}
    monkeypatch.setattr(stops, "received", [signal.SIGUSR1])
    assert not RequestSupply(work, leader, 4, prompts, seed=7).wait()
    answers = [None, None, ([0, 1], None)]
    follower = EngineGroup(TensorParallel(1, 2), control=control)  # type: ignore[arg-type]
    assert RequestSupply(work, follower, 4, prompts, seed=7).wait() and answers == []


def test_ranks_with_shares_of_their_own_wait_for_each_other_with_the_rounds_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose share takes long must not end the others, which would wait in one of training's collectives."""

    class Engine:
        num_slots = 4
        statistics = GenerationStatistics()

        def generate(self, source: Iterable[GenerationRequest], sampling: Any) -> Iterator[GenerationResult]:
            yield from map(respond, source)

    def group_of(size: int, minutes: float) -> Any:
        groups.append((size, minutes))
        return "meeting" if size > 1 else None

    groups: list[Any] = []
    order: list[Any] = []
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.batch_iterator.wait_seconds = 7200
    monkeypatch.setattr(setup, "control_group", group_of)
    engine: Any = Engine()
    no_tokenizer: Any = None
    with single_process():
        assert setup._local_generator(cfg, no_tokenizer, engine, EngineGroup(), None).meeting is None
        monkeypatch.setattr(setup.dist, "get_world_size", lambda: 2)
        local = setup._local_generator(cfg, no_tokenizer, engine, EngineGroup(), None)
        monkeypatch.undo()
        monkeypatch.setattr(generator.dist, "barrier", lambda **where: order.append(where["group"]))
        monkeypatch.setattr(generator.worlds, "barrier", lambda: order.append("round"))
        monkeypatch.setattr(generator.stops, "check", lambda: order.append("check"))
        local.start([Prompt(i, [1]) for i in range(8)], 1).run(Sink())
    assert groups == [(1, 120.0), (2, 120.0)]
    assert order == ["round", "meeting", "check"]


def test_requests_for_very_many_ids_are_cut_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (work_client, work_server):
        monkeypatch.setattr(module, "MAX_IDS_PER_REQUEST", 100)
    queue, count = WorkQueue(LEASE_SECONDS), 250
    with serve(queue) as server:
        worker = WorkQueueClient("127.0.0.1", server.port, LIMITS, server=server)
        worker.start_round(2, range(count))
        taken: list[int] = []
        while ids := worker.lease(count):
            taken += ids
        answers = [worker.complete_async([item_id]) for item_id in taken]
        assert [item_id for answer in answers for item_id in answer.result()] == list(range(count))
        assert queue.status()["state"] == DRAINED
        worker.close()


def test_a_stop_signal_before_a_round_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came in the refit, where nothing is interrupted: nothing is generated any more, nor waited for."""
    begun: list[int] = []

    class Engine:
        num_slots = 4
        statistics = GenerationStatistics()
        num_compilations = 0

        def generate(self, source: Iterable[GenerationRequest], sampling: Any) -> Iterator[GenerationResult]:
            for request in source:
                begun.append(request.request_id)
                yield respond(request)

    class Silent:
        """A link to rollout ranks that have nothing to say."""

        rank = 1

        def count(self, name: str) -> int:
            return 0

    engine, link, sampling, sink = Engine(), Silent(), None, Sink()
    prompts = [Prompt(i, [1]) for i in range(8)]
    monkeypatch.setattr(stops, "received", [signal.SIGUSR1])
    with single_process():
        queue = WorkQueue(LEASE_SECONDS)
        with serve(queue) as server:
            worker = WorkQueueClient("127.0.0.1", server.port, LIMITS, server=server)
            local = LocalGenerator(engine, worker, sampling, EngineGroup())  # type: ignore[arg-type]
            with pytest.raises(StopEarlyError):
                local.start(prompts, 1).run(sink)
            assert queue.status()["state"] == DRAINED  # no other rank waits
            worker.close()
        with pytest.raises(StopEarlyError):
            RemoteRound(link, "round/1", prompts, wait_seconds=5.0).run(sink)  # type: ignore[arg-type]
    assert begun == sink.got == []


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
def test_over_several_machines_the_queue_has_an_address_that_others_reach(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if outgoing_address() is None:
        pytest.skip("this machine has no route to others")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")  # as Debian resolves a host's own name: 127.0.1.1
    address = own_address()
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("WORLD_SIZE", "2")):  # as the launcher says
        monkeypatch.setenv(name, value)
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.batch_iterator.merge_with({"use_flask": True, "host": host, "port": 0})
    engine: Any = types.SimpleNamespace(num_slots=1, statistics=GenerationStatistics())
    with single_process():
        source = build_work_source(cfg, engine, EngineGroup(), open_work_queue(cfg))
    source.start_round(1, [5])
    assert isinstance(source, WorkQueueClient) and source.lease(1) == [5]
    told, port = source._http.base_url.removeprefix("http://").split(":")
    assert told == address
    assert [listener.address for listener in listeners(os.getpid()) if listener.port == int(port)] == [host or address]
    source.close()


def test_addresses_of_ipv6() -> None:
    """The critic's and the queue's."""
    assert server_url("fd00::5", 5555) == server_url("[fd00::5]", 5555) == "http://[fd00::5]:5555"
    config = client_config(5555)
    config["critic"]["ip"] = "fd00::5"
    critic = CriticClient(config, infer_limits=TEST_LIMITS, train_limits=TEST_LIMITS)
    assert critic._critic.base_url == "http://[fd00::5]:5555"
    try:
        server = WorkQueueServer(WorkQueue(LEASE_SECONDS), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    worker = WorkQueueClient("::1", server.port, LIMITS)
    server.queue.start_round(1, [5])
    worker.start_round(1, [])
    assert worker.lease(1) == [5]
    worker.close()
    server.stop()


def test_stop_frees_the_port_and_ends_the_client() -> None:
    server = WorkQueueServer(WorkQueue(LEASE_SECONDS))
    worker = client(server, http_limits=ClientLimits(total_s=0.5))
    server.stop()
    with pytest.raises(ServerUnavailableError, match=f":{server.port}/get_idx.*after"):
        worker.lease(1)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def test_clients_of_a_future_round_are_told() -> None:
    with serve(WorkQueue(LEASE_SECONDS)) as server, pytest.raises(RequestRefusedError, match="has not begun"):
        client(server, 3).lease(1)


# ------------------------------------------------------------------ scores


class LateScores:
    """A critic whose values come when the test says so."""

    def __init__(self) -> None:
        self.answers: list[concurrent.futures.Future[list[torch.Tensor]]] = []
        self.last_progress = -math.inf

    def values(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        self.answers.append(concurrent.futures.Future())
        return self.answers[-1]

    def scored(self, batch_size: int, seconds: float) -> ScoredResponses:
        """What has responses scored by it, with a reward of 7.0 for each that is known at once."""
        rewards: Any = types.SimpleNamespace(score=known_rewards, part_names=())
        critic: Any = self

        def sample(result: GenerationResult) -> Sample:
            ids = result.prompt_token_ids + result.token_ids
            return Sample(result.request_id, 0, {}, ids, len(result.prompt_token_ids), True, str)

        return ScoredResponses(Scorer(rewards, critic, seconds, "the critic"), batch_size, sample)


def known_rewards(samples: Sequence[Sample]) -> concurrent.futures.Future[list[Reward]]:
    answer: concurrent.futures.Future[list[Reward]] = concurrent.futures.Future()
    answer.set_result([Reward(7.0) for _ in samples])
    return answer


def test_scores_are_given_up_when_none_comes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(collector, "time", types.SimpleNamespace(monotonic=clock))
    critic = LateScores()
    responses = critic.scored(batch_size=2, seconds=0.4)
    for request_id in range(5):
        responses.add(GenerationResult(request_id, [1], [2], [0.0], "stop", 0))
    responses.flush()
    assert len(critic.answers) == 3 and not responses.are_scored(0.0)
    values = [
        [torch.tensor([float(i)]) for i in (2 * number, 2 * number + 1)][: 2 - number // 2] for number in range(3)
    ]
    for number in (1, 0):  # each one starts the time anew
        clock.now += 0.3
        critic.answers[number].set_result(values[number])
        assert not responses.are_scored(0.0)
    for _ in range(2):  # and so does each step of a critic that is brought level
        clock.now += 0.3
        critic.last_progress = clock.now
        assert not responses.are_scored(0.0)
    assert responses.progress() == (4, 5)
    clock.now += 0.3
    assert not responses.are_scored(0.0)
    clock.now += 0.2
    with pytest.raises(
        TimeoutError, match=r"no scores arrived for 0\.4 s.*samples \[4\] are missing: check the critic"
    ):
        responses.are_scored(0.0)
    critic.answers[2].set_result(values[2])
    assert responses.are_scored(5.0)
    found = [
        (sample_id, reward.value, float(value)) for sample_id, reward, value in responses.scores() if value is not None
    ]
    assert found == [(i, 7.0, float(i)) for i in range(5)]


def test_a_request_for_scores_that_fails_is_not_waited_for() -> None:
    critic = LateScores()
    responses = critic.scored(batch_size=1, seconds=120)
    for request_id in range(2):
        responses.add(GenerationResult(request_id, [1], [2], [0.0], "stop", 0))
    critic.answers[1].set_exception(RuntimeError("refused"))
    with pytest.raises(RuntimeError, match="refused"):
        responses.are_scored(60.0)


# ------------------------------------------------------------------ heartbeats, look-ahead, lease sizes


def test_a_worker_keeps_its_ids_while_it_gets_on_and_no_longer(clock_of_all: Clock) -> None:
    queue, steps = WorkQueue(lease_seconds=10, clock=clock_of_all), []
    limits = WorkerLimits(lease_seconds=10, stall_seconds=5, wait_seconds=30)
    others = set(threading.enumerate())
    with serve(queue) as server:
        queue.start_round(0, [1, 2])
        worker = client(server, worker="w", limits=limits, progress=lambda: len(steps))
        assert worker.lease(2) == [1, 2]
        get_on(queue, clock_of_all, 20.0, lambda: steps.append(1))  # longer than stall and lease together
        assert queue.status()["leased"] == 2
        while queue.status()["leased"] and clock_of_all.now < 100.0:
            clock_of_all.now += 2.5
            time.sleep(0.1)  # for several beats
        assert queue.status()["pending"] == 2 and queue.status()["total"]["expired"] == 2
        assert worker.complete_async([1]).result() == []
        worker.close()
    assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("work-queue")]


def test_what_keeps_the_watchdog_quiet_keeps_the_leases(clock_of_all: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an engine's statistics: in a sidecar they stand still until a response is there."""
    cfg = load_defaults("gpt_ppo_actor")
    settings = {"use_flask": True, "port": 0, "lease_seconds": 10, "stall_seconds": 5}
    monkeypatch.setattr(setup, "WorkQueue", functools.partial(WorkQueue, clock=clock_of_all))
    cfg.trainer.ppo.batch_iterator.merge_with(settings)
    engine: Any = types.SimpleNamespace(num_slots=0, statistics=GenerationStatistics())
    with single_process():
        server = open_work_queue(cfg)
        worker = build_work_source(cfg, engine, EngineGroup(), server)
    assert server is not None and isinstance(worker, WorkQueueClient)
    worker.start_round(1, [7])
    assert worker.lease(1) == [7]
    get_on(server.queue, clock_of_all, 20.0, activity.progress)  # longer than stall and lease together
    assert worker.complete_async([7]).result() == [7]
    worker.close()


def test_a_sample_that_everybody_loses_ends_the_round() -> None:
    clock = Clock()
    queue = WorkQueue(lease_seconds=10, clock=clock)
    with serve(queue) as server:
        queue.start_round(1, [1, 2])
        for number in range(5):
            assert queue.lease(1, f"w{number}").ids == [1]
            pass_time(queue, clock, clock.now + 11)
            assert queue.complete([1], f"w{number}") == ([], [1])
        with pytest.raises(SampleLostError, match="id 1 of round 1 was lost 5 times"):
            queue.lease(1, "w5")
        worker = client(server, 1)
        with pytest.raises(RequestRefusedError, match=r"id 1 of round 1.*raise .*stall_seconds"):
            worker.lease(1)
        worker.close()
        queue.start_round(2, [1])
        assert queue.lease(1, "w6").ids == [1]


def test_leases_shrink_towards_the_end_of_a_round() -> None:
    queue = WorkQueue(LEASE_SECONDS, workers=4)
    queue.start_round(0, list(range(100)))
    sizes = []
    while ids := queue.lease(10, f"w{len(sizes) % 4}").ids:
        sizes.append(len(ids))
    assert sum(sizes) == 100 and sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 10 and sizes[-8:] == [1] * 8  # twice as many single ids as workers, or more
    queue.start_round(1, list(range(100)))
    assert len(queue.lease(60).ids) == 60  # NeMo-Aligner's request names no worker: as many as it asks for


def test_more_workers_than_expected_get_less() -> None:
    queue = WorkQueue(LEASE_SECONDS, workers=2)
    queue.start_round(0, list(range(24)))
    leases = [queue.lease(99, worker) for worker in "abc"]
    assert [(len(lease.ids), lease.share, lease.unfinished) for lease in leases] == [(6, 9, 24), (5, 6, 24), (3, 3, 24)]
    for workers in (1, None):  # alone, or nobody knows
        queue = WorkQueue(LEASE_SECONDS, workers=workers)
        queue.start_round(0, list(range(24)))
        assert queue.complete([0, 99], "stranger") == ([], [0, 99]) and queue.renew("stranger") == []
        assert queue.lease(4, "a").share == 20 and len(queue.lease(99, "a").ids) == 20
        holder = queue.status()["holders"]["a"]  # names some, not hundreds
        assert holder["count"] == 24 and holder["ids"] == list(range(20))
    for wrong in ({"lease_seconds": 0}, {"lease_seconds": 1, "workers": 0}):
        with pytest.raises(ValueError, match="must be"):
            WorkQueue(**wrong)


def test_nothing_is_leased_ahead_that_others_have_slots_for() -> None:
    queue = WorkQueue(LEASE_SECONDS, workers=2)
    with serve(queue) as server:
        worker = client(server, slots=4)
        queue.start_round(0, list(range(16)))
        assert worker.lease(4) == [0, 1, 2, 3]
        assert worker.lease(1) == [4]  # leased ahead while the first four were worked on
        assert worker.lease(1) == [5]
        taken = 6
        for _ in range(4):
            taken += len(worker.lease(1))
        worker._sender.submit(lambda: None).result()  # what it has asked for has come
        assert queue.status()["leased"] == taken == 10  # no look-ahead: what is left would not fill everybody's slots
        seen: list[int] = []
        while ids := worker.lease(4):
            seen += ids
        assert seen == sorted(seen) and seen[-1] == 15
        worker.close()


# ------------------------------------------------------------------ ranks in trouble


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Rounds of two processes: rank 1 is healthy, slower than its lease, hung for a while, stopped by a signal."""
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "ranks.log"
    program = [sys.executable, str(ROOT / "tests" / "queue_ranks.py"), str(folder)]
    with log.open("w") as output, subprocess.Popen(program, stdout=output, stderr=output) as process:
        try:
            _wake_when_the_others_are_done(folder, process)
            assert process.wait(200) == 0, log.read_text()
        finally:
            process.kill()
    names = ("healthy", "slow", "hung", "stopped")
    return dict(zip(names, json.loads((folder / "rounds.json").read_text()), strict=True))


def _wake_when_the_others_are_done(folder: Path, process: subprocess.Popen) -> None:
    """Rank 1 stops itself in round 4, and goes on when rank 0 has finished the round."""
    while process.poll() is None:
        time.sleep(0.1)
        with contextlib.suppress(FileNotFoundError, ValueError, requests.ConnectionError):
            port = int((folder / "port").read_text())
            status = requests.get(f"http://127.0.0.1:{port}/status", timeout=10).json()
            if status["round"] == 4 and status["state"] == DRAINED:
                os.kill(int((folder / "rank1.pid").read_text()), signal.SIGCONT)
                return


def test_every_sample_is_there_once_and_the_same_whatever_happens(rounds: dict[str, dict[str, Any]]) -> None:
    expected = rounds["healthy"]
    assert len(expected["lengths"]) == 16 and len({tuple(row) for row in expected["tokens"]}) == 16
    for name, found in rounds.items():  # the order of serving differs from round to round as well
        assert {**found, "total": None} == {**expected, "total": None}, name


@pytest.mark.parametrize(("name", "loses"), [("healthy", False), ("slow", False), ("hung", True), ("stopped", True)])
def test_who_gets_on_keeps_its_samples_and_who_does_not_loses_them(
    rounds: dict[str, dict[str, Any]], name: str, loses: bool
) -> None:
    names = list(rounds)
    before = rounds[names[names.index(name) - 1]]["total"] if name != "healthy" else collections.Counter()
    counts = {key: value - before[key] for key, value in rounds[name]["total"].items()}
    assert counts["completed"] == 16
    assert (counts["expired"] > 0) == loses
    assert counts["served"] == 16 + counts["expired"]
    if loses:
        assert counts["refused"] > 0  # the late answers


# ------------------------------------------------------------------ expected lengths


def test_expected_lengths_come_from_the_prompt_then_from_prompts_like_it() -> None:
    lengths = ResponseLengths(max_prompts=50)
    assert lengths.expect(1, 10) == 0
    for prompt in range(40):  # short prompts have long responses
        lengths.observe([prompt], [10 if prompt % 2 else 100], [300 if prompt % 2 else 20])
    assert lengths.expect(1, 10) == 300 and lengths.expect(2, 100) == 20
    assert lengths.expect(1000, 11) > 200 and lengths.expect(1000, 101) < 100
    assert 20 < lengths.expect(1000, 3) < 300  # no prompt was like that: the mean over all
    lengths.observe([1], [10], [100])
    assert lengths.expect(1, 10) == 200  # the newest counts half
    lengths.observe(list(range(100, 149)), [10] * 49, [7] * 49)
    assert lengths.expect(148, 10) == 7 and lengths.expect(1, 10) == 200  # the last 50 are remembered
    assert lengths.expect(2, 100) != 20


def test_expected_lengths_are_the_same_after_a_checkpoint() -> None:
    draw, before, after = random.Random(1), ResponseLengths(30), ResponseLengths(30)
    for step in range(60):
        prompts = [draw.randrange(80) for _ in range(8)]
        observed = [prompts, [3 + prompt for prompt in prompts], [draw.randrange(1, 400) for _ in prompts]]
        before.observe(*observed)
        if step < 30:
            after = ResponseLengths(30)
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        else:
            after.observe(*observed)
    assert [after.expect(i, 3 + i) for i in range(200)] == [before.expect(i, 3 + i) for i in range(200)]


# ------------------------------------------------------------------ static partition


def test_static_partition_deals_out_everything_once() -> None:
    seen: list[int] = []
    for rank in range(3):
        part = StaticPartition(rank, 3)
        for round_number in range(2):
            part.start_round(round_number, list(range(100, 110)))
            mine = []
            while ids := part.lease(2, wait=True):
                mine += part.complete_async(ids).result()
        assert mine == list(range(100 + rank, 110, 3))
        seen += mine
    assert sorted(seen) == list(range(100, 110))


def test_static_partition_by_expected_length_gives_every_rank_a_like_mixture() -> None:
    parts = [StaticPartition(rank, 2) for rank in range(2)]
    for part in parts:
        part.start_round(0, [10, 11, 12, 13], [5.0, 9.0, 7.0, 8.0])
    assert [part.lease(4) for part in parts] == [[11, 12], [13, 10]]
