"""The rollout work queue: order, shares, lost answers, over HTTP and beneath it; the rounds that it feeds; scores."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import math
import os
import random
import signal
import socket
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import requests
import torch
from listeners import listeners
from served_critic import TEST_LIMITS, client_config

from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, GenerationStatistics
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.parallel.machine import outgoing_address, own_address
from nemo_style_aligner.engine.shard import EngineGroup, TensorParallel
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    RequestRefusedError,
    ServerUnavailableError,
    server_url,
)
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError, stops
from nemo_style_aligner.trainer.rl.rewards import Reward
from nemo_style_aligner.trainer.rl.rollouts import collector, generator, setup
from nemo_style_aligner.trainer.rl.rollouts.collector import ScoredResponses
from nemo_style_aligner.trainer.rl.rollouts.disaggregated import RemoteRound
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator, RequestSupply
from nemo_style_aligner.trainer.rl.rollouts.prompts import ResponseLengths
from nemo_style_aligner.trainer.rl.rollouts.setup import build_work_source, open_work_queue
from nemo_style_aligner.trainer.rl.rollouts.work_queue import (
    StaticPartition,
    WorkQueue,
    WorkQueueClient,
    WorkQueueServer,
)
from nemo_style_aligner.trainer.rl.sample import Prompt, Sample
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.services.client import CriticClient

pytestmark = pytest.mark.timeout(240)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def serve(ids: Sequence[int] = (), *, workers: int = 1, token: str | None = None) -> Iterator[WorkQueueServer]:
    server = WorkQueueServer(token=token)
    server.queue.workers = workers
    server.queue.start_round(ids)
    try:
        yield server
    finally:
        server.stop()


def client(to: WorkQueueServer, /, **options: Any) -> WorkQueueClient:
    return WorkQueueClient("127.0.0.1", to.port, **options)


def put(server: WorkQueueServer, path: str, body: Any, **options: Any) -> requests.Response:
    return requests.put(f"http://127.0.0.1:{server.port}{path}", json=body, timeout=10, **options)


# ------------------------------------------------------------------ the queue itself


def test_ids_come_in_the_given_order_or_longest_expected_first() -> None:
    queue = WorkQueue()
    queue.start_round([5, 3, 9, 1])
    assert queue.take(3, "a", 1) == [5, 3, 9]
    queue.start_round([5, 3, 9, 1], [10.0, 30.0, 10.0, 20.0])  # what was left is forgotten
    assert queue.take(9, "a", 2) == [3, 1, 5, 9] and len(queue) == 0


def test_a_repeated_request_gets_the_same_ids() -> None:
    queue = WorkQueue()
    queue.start_round(list(range(10)))
    for _ in range(2):
        assert queue.take(3, "a", 1) == [0, 1, 2]
    assert queue.take(3, "a", 2) == [3, 4, 5]
    queue.take(3, "a", 1)  # a try that the network has held up: nobody waits for its answer any more
    assert queue.take(3, "b", 1) == [6, 7, 8]


def test_what_a_worker_gets_shrinks_towards_the_end_of_a_round() -> None:
    queue, sizes = WorkQueue(workers=4), []
    queue.start_round(list(range(100)))
    while ids := queue.take(10, f"w{len(sizes) % 4}", len(sizes)):
        sizes.append(len(ids))
    assert sum(sizes) == 100 and sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 10 and sizes[-8:] == [1] * 8  # twice as many single ids as workers, or more
    queue.start_round(list(range(100)))
    assert len(queue.take(60)) == 60 and queue.share() == 10  # NeMo-Aligner's request names no worker


# ------------------------------------------------------------------ over HTTP


def test_nemo_aligners_own_request_is_answered_with_a_list() -> None:
    with serve([7, 8, 9]) as server:
        assert put(server, "/get_idx", {"batch_size": 2}).json() == [7, 8]
        assert requests.get(f"http://127.0.0.1:{server.port}/status", timeout=10).json() == {"left": 1}
        assert put(server, "/get_idx", {"batch_size": 2}).json() == [9]
        assert put(server, "/get_idx", {"batch_size": 2}).json() == []


def test_a_client_takes_round_after_round() -> None:
    server = WorkQueueServer()
    worker = client(server, server=server)
    for ids in ([4, 5, 6], [1, 2]):
        worker.start_round(ids)
        assert worker.take(2) == ids[:2] and worker.left() == len(ids) - 2
        assert worker.take(2) == ids[2:] and worker.take(2) == []
    worker.close()
    with pytest.raises(requests.ConnectionError):
        put(server, "/get_idx", {"batch_size": 1})


def test_many_clients_at_once_get_each_id_once() -> None:
    taken: collections.Counter[int] = collections.Counter()
    lock = threading.Lock()
    with serve(range(1000), workers=24) as server:

        def work() -> None:
            worker = client(server, slots=4)
            while ids := worker.take(3):
                with lock:
                    taken.update(ids)
            worker.close()

        threads = [threading.Thread(target=work) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert sorted(taken) == list(range(1000)) and set(taken.values()) == {1}


def test_nothing_is_taken_ahead_that_others_have_slots_for() -> None:
    with serve(range(24), workers=2) as server:
        worker = client(server, slots=8)
        assert worker.take(4) == [0, 1, 2, 3] and len(server.queue) == 20
        assert worker.take(1) == [4] and len(server.queue) == 17  # two ahead, as all slots can be filled
        assert worker.take(2) == [5, 6] and len(server.queue) == 17
        assert worker.take(1) == [7] and worker.take(2) == [8, 9] and len(server.queue) == 14
        for first in range(10, 24):
            assert worker.take(1) == [first] and len(server.queue) == 23 - first
        worker.close()


def test_the_token_is_needed() -> None:
    with serve([1, 2], token="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert put(server, "/get_idx", {"batch_size": 1}, headers=headers).status_code == 401
        with pytest.raises(RequestRefusedError, match="401"):
            client(server, token="wrong").take(1)
        assert client(server, token="s3cret").take(1) == [1]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
            stranger.sendall(b"PUT /get_idx HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 401")  # the body is not waited for, nor stored
        assert requests.get(f"http://127.0.0.1:{server.port}/health", timeout=10).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 1, "worker": 7},
        {"batch_size": 1, "worker": "w"},
        {"batch_size": 1, "worker": "w", "request": "x"},
    ],
)
def test_malformed_requests_are_refused(body: Any) -> None:
    with serve([1]) as server:
        response = put(server, "/get_idx", body)
        assert response.status_code == 400 and "error" in response.json()
        assert len(server.queue) == 1


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    with serve(range(10**15, 10**15 + 60000)) as server, socket.create_connection(("127.0.0.1", server.port)) as deaf:
        body = json.dumps({"batch_size": 60000, "worker": "deaf", "request": 1}).encode()
        head = f"PUT /get_idx HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall((head.encode() + body) * 40)  # 40 MiB of answers
        assert put(server, "/get_idx", {"batch_size": 1}).json() == []


def test_stop_frees_the_port_and_ends_the_client() -> None:
    server = WorkQueueServer()
    worker = client(server, limits=ClientLimits(total_s=0.5))
    server.stop()
    with pytest.raises(ServerUnavailableError, match=f":{server.port}/get_idx.*after"):
        worker.take(1)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


# ------------------------------------------------------------------ rounds


def respond(request: GenerationRequest) -> GenerationResult:
    return GenerationResult(request.request_id, request.prompt_token_ids, [3], [0.0], "stop", 0)


class Engine:
    """Answers each request at once."""

    num_slots = 4
    statistics = GenerationStatistics()
    num_compilations = 0

    def __init__(self) -> None:
        self.begun: list[int] = []

    def generate(self, source: Iterable[GenerationRequest], sampling: Any) -> Iterator[GenerationResult]:
        for request in source:
            self.begun.append(request.request_id)
            yield respond(request)


def test_an_engine_takes_ids_for_its_free_slots_when_it_has_begun_what_it_had() -> None:
    class Work(StaticPartition):
        def take(self, n: int) -> list[int]:
            asked.append(n)
            return super().take(n)

    asked: list[int] = []
    work = Work(0, 1)
    work.start_round(list(range(8)))
    supply = RequestSupply(work, EngineGroup(), 4, [Prompt(i, [i]) for i in range(8)], seed=7)
    source = iter(supply)
    begun = [next(source) for _ in range(4)]
    assert asked == [4] and supply.progress() == (0, 8)
    supply.num_done += 3
    begun += source
    assert asked == [4, 3, 1, 1] and supply.progress() == (3, 8)
    assert [(r.request_id, r.prompt_token_ids, r.seed) for r in begun] == [
        (i, [i], derive_seed(7, i)) for i in range(8)
    ]


def test_only_the_leader_of_an_engines_ranks_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(EngineGroup):
        def share(self, value: Any) -> Any:
            told.append(value)
            return value if self.is_leader else answers.pop(0)

    told: list[Any] = []
    answers: list[list[int]] = [[1, 2], []]
    work = StaticPartition(0, 1)
    work.start_round([1, 2])
    prompts = [Prompt(i, [1]) for i in range(4)]
    followed = RequestSupply(work, Group(TensorParallel(1, 2)), 4, prompts, seed=7)
    assert [request.request_id for request in followed] == [1, 2] and told == [[], []] and work.left() == 2
    monkeypatch.setattr(stops, "received", [signal.SIGUSR1])
    assert not list(RequestSupply(work, Group(TensorParallel(0, 2)), 4, prompts, seed=7)) and work.left() == 2


@pytest.mark.parametrize("use_flask", [False, True])
def test_ranks_wait_for_each_other_with_the_rounds_limit(use_flask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose responses take long must not end the others, which would wait in one of training's collectives."""

    def group_of(size: int, minutes: float) -> Any:
        groups.append((size, minutes))
        return "meeting" if size > 1 else None

    groups: list[Any] = []
    order: list[Any] = []
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.batch_iterator.merge_with({"wait_seconds": 7200, "use_flask": use_flask, "port": 0})
    monkeypatch.setattr(setup, "control_group", group_of)
    engine, no_tokenizer, got = Engine(), None, list[GenerationResult]()
    with single_process():
        config = PPOActor.read(cfg)
        queue = open_work_queue(config)
        made: Any = (config, no_tokenizer, engine, EngineGroup(), queue)
        assert setup._local_generator(*made).meeting is None
        monkeypatch.setattr(setup.dist, "get_world_size", lambda: 2)
        local = setup._local_generator(*made)
        monkeypatch.undo()
        monkeypatch.setattr(generator.dist, "barrier", lambda **where: order.append(where["group"]))
        monkeypatch.setattr(generator.roles, "barrier", lambda: order.append("round"))
        monkeypatch.setattr(generator.stops, "check", lambda: order.append("check"))
        local.generate([Prompt(i, [1]) for i in range(8)], 1, got.append)
        local.work.close()
    assert groups == [(1, 120.0), (2, 120.0)]
    assert order == ["round", "meeting", "check"]
    assert engine.begun == [result.request_id for result in got] == list(range(8))


def test_a_port_that_is_taken_is_named() -> None:
    cfg = load_defaults("gpt_ppo_actor")
    with single_process(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cfg.trainer.ppo.batch_iterator.merge_with({"use_flask": True, "port": port})
        keys = r"choose a free port with trainer\.ppo\.batch_iterator\.port"
        with pytest.raises(OSError, match=rf"rollout work queue cannot listen on 127.0.0.1:{port} .*: {keys}"):
            open_work_queue(PPOActor.read(cfg))


def test_a_stop_signal_before_a_round_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came in the refit, where nothing is interrupted: nothing is generated any more, nor waited for."""

    class Silent:
        """A link to rollout ranks that have nothing to say."""

        rank = 1

        def count(self, name: str) -> int:
            return 0

    link: Any = Silent()
    engine: Any = Engine()
    sampling: Any = None
    got: list[GenerationResult] = []
    prompts = [Prompt(i, [1]) for i in range(8)]
    monkeypatch.setattr(stops, "received", [signal.SIGUSR1])
    with single_process():
        with serve(workers=2) as server:
            worker = client(server, server=server)
            with pytest.raises(StopEarlyError):
                LocalGenerator(engine, worker, sampling, EngineGroup()).generate(prompts, 1, got.append)
            assert len(server.queue) == 0  # no other rank begins any
            worker.close()
        with pytest.raises(StopEarlyError):
            RemoteRound(link, "round/1", prompts, wait_seconds=5.0).run(got.append)
    assert engine.begun == got == []


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
        config = PPOActor.read(cfg)
        source = build_work_source(config, engine, EngineGroup(), open_work_queue(config))
    source.start_round([5])
    assert isinstance(source, WorkQueueClient) and source.take(1) == [5]
    told, port = source._http.base_url.removeprefix("http://").split(":")
    assert told == address
    assert [listener.address for listener in listeners(os.getpid()) if listener.port == int(port)] == [host or address]
    source.close()


def test_addresses_of_ipv6() -> None:
    """The critic's and the queue's."""
    assert server_url("fd00::5", 5555) == server_url("[fd00::5]", 5555) == "http://[fd00::5]:5555"
    config = client_config(5555)
    config = config.replaced(critic=config.critic.replaced(ip="fd00::5"))
    critic = CriticClient(config, infer_limits=TEST_LIMITS, train_limits=TEST_LIMITS)
    assert critic.base_url == "http://[fd00::5]:5555"
    try:
        server = WorkQueueServer(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    worker = WorkQueueClient("::1", server.port, server=server)
    worker.start_round([5])
    assert worker.take(1) == [5]
    worker.close()


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
    found = [(sample_id, reward.value, float(columns["values"])) for sample_id, reward, columns in responses.scores()]
    assert found == [(i, 7.0, float(i)) for i in range(5)]


def test_a_request_for_scores_that_fails_is_not_waited_for() -> None:
    critic = LateScores()
    responses = critic.scored(batch_size=1, seconds=120)
    for request_id in range(2):
        responses.add(GenerationResult(request_id, [1], [2], [0.0], "stop", 0))
    critic.answers[1].set_exception(RuntimeError("refused"))
    with pytest.raises(RuntimeError, match="refused"):
        responses.are_scored(60.0)


# ------------------------------------------------------------------ expected lengths


def test_expected_lengths_come_from_the_prompt_then_from_all() -> None:
    lengths = ResponseLengths(max_prompts=50)
    assert lengths.expect(1) == 0
    for prompt in range(40):
        lengths.observe([prompt], [300 if prompt % 2 else 20])
    assert lengths.expect(1) == 300 and lengths.expect(2) == 20
    assert lengths.expect(1000) == pytest.approx(160)
    lengths.observe([1], [100])
    assert lengths.expect(1) == 200  # the newest counts half
    lengths.observe(list(range(100, 149)), [7] * 49)
    assert lengths.expect(148) == 7 and lengths.expect(1) == 200  # the last 50 are remembered
    assert lengths.expect(2) == lengths.expect(1000) < 160


def test_expected_lengths_are_the_same_after_a_checkpoint() -> None:
    draw, before, after = random.Random(1), ResponseLengths(30), ResponseLengths(30)
    for step in range(60):
        prompts = [draw.randrange(80) for _ in range(8)]
        observed = [prompts, [draw.randrange(1, 400) for _ in prompts]]
        before.observe(*observed)
        if step < 30:
            after = ResponseLengths(30)
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        else:
            after.observe(*observed)
    assert [after.expect(i) for i in range(200)] == [before.expect(i) for i in range(200)]


# ------------------------------------------------------------------ static partition


def test_static_partition_deals_out_everything_once() -> None:
    seen: list[int] = []
    for rank in range(3):
        part = StaticPartition(rank, 3)
        for _ in range(2):
            part.start_round(list(range(100, 110)))
            mine = []
            while ids := part.take(2):
                mine += ids
        assert mine == list(range(100 + rank, 110, 3))
        seen += mine
    assert sorted(seen) == list(range(100, 110))


def test_static_partition_by_expected_length_gives_every_rank_a_like_mixture() -> None:
    parts = [StaticPartition(rank, 2) for rank in range(2)]
    for part in parts:
        part.start_round([10, 11, 12, 13], [5.0, 9.0, 7.0, 8.0])
    assert [part.take(4) for part in parts] == [[11, 12], [13, 10]]
