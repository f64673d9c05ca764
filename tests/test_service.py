"""The critic and reward service over real HTTP: batching, training once, faults, shutdown, several ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.server
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from served_critic import (
    TEST_LIMITS,
    VOCAB,
    CountingBackend,
    critic_client,
    expected,
    get,
    infer_body,
    outputs,
    post,
    reward_client,
    serve,
    tensor,
    train_body,
    wait_for,
)

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.guard.http_client import ClientLimits, RequestRefusedError, ServerUnavailableError
from nemo_style_aligner.guard.http_server import PlaceTakenError
from nemo_style_aligner.guard.protocol import InferRequest, ProtocolError
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.rewards import RewardSum
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import Endpoint, ModelLimits, QueuedRequest, Service, TensorSpec
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition, TrainingLedger
from nemo_style_aligner.trainer.services.exactly_once.session import SequenceConflictError
from nemo_style_aligner.trainer.services.jobs import QueueState, RequestQueue
from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
from nemo_style_aligner.trainer.services.routes import HttpSettings, create_app
from nemo_style_aligner.trainer.services.score_client import ScoreClient, SequencesToScore
from nemo_style_aligner.trainer.services.scores import REWARDS, Score, ScoreEndpoint
from nemo_style_aligner.trainer.services.service_metrics import ServiceMetrics

pytestmark = pytest.mark.timeout(120)


# ------------------------------------------------------------------ protocol and clients


def test_json_request_gets_values_and_rewards() -> None:
    tokens, lengths = np.array([[1, 2, 3, 999], [5, 6, 7, 8]]), np.array([2, 4])
    with serve(CountingBackend()) as server:
        answer = outputs(post(server, "critic_infer", infer_body(tokens, lengths, id="abc")))
    rewards, values = expected(tokens, lengths)
    np.testing.assert_array_equal(answer["values"], values)
    np.testing.assert_array_equal(answer["rewards"], rewards[:, None])


def test_sentences_are_tokenized() -> None:
    body = {"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [2, 1], "data": ["ab", "é"]}]}
    with serve(CountingBackend()) as server:
        answer = outputs(post(server, "critic_infer", body))
    np.testing.assert_array_equal(answer["rewards"], [[97 + 98], [0xC3 + 0xA9]])


def test_only_chosen_outputs_are_sent() -> None:
    with serve(CountingBackend()) as server:
        answer = outputs(post(server, "critic_infer", infer_body([[1, 2]], [2], outputs=[{"name": "rewards"}])))
    assert list(answer) == ["rewards"]


def test_metadata_health_config_and_metrics() -> None:
    with serve(CountingBackend()) as server:
        assert get(server, "/v2/health/live").status_code == 200
        assert "binary_tensor_data" in get(server, "/v2").json()["extensions"]
        metadata = get(server, "/v2/models/critic_infer").json()
        assert {entry["name"]: entry["shape"] for entry in metadata["inputs"]} == {
            "sentences": [-1, 1],
            "tokens": [-1, -1],
            "sequence_lengths": [-1, 1],
        }
        assert metadata["parameters"] == {"max_sequence_length": 64, "vocab_size": VOCAB}
        assert get(server, "/v2/models/critic_infer/versions/1/ready").status_code == 200
        assert get(server, "/v2/models/critic_infer/config").json()["max_batch_size"] > 0
        assert get(server, "/v2/models/critic_train/config").json()["max_batch_size"] == 0
        outputs(post(server, "critic_infer", infer_body([[1, 2]], [2])))
        assert 'aligner_server_requests_total{model="critic_infer",status="200"} 1.0' in get(server, "/metrics").text


def test_tritonclient_sync_async_binary_and_json() -> None:
    triton = pytest.importorskip("tritonclient.http", reason="the tritonclient package is not installed")
    tokens, lengths = np.array([[1, 2, 3]]), np.array([[3]])
    with serve(CountingBackend()) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.number}", concurrency=4)
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("critic_infer")
        assert client.get_model_metadata("critic_infer")["name"] == "critic_infer"
        assert client.get_model_config("critic_save")["name"] == "critic_save"

        def inputs(binary: bool):
            made = [
                triton.InferInput("tokens", tokens.shape, "INT64"),
                triton.InferInput("sequence_lengths", (1, 1), "INT64"),
            ]
            made[0].set_data_from_numpy(tokens, binary_data=binary)
            made[1].set_data_from_numpy(lengths, binary_data=binary)
            return made

        for binary in (True, False):
            chosen = [triton.InferRequestedOutput(name, binary_data=not binary) for name in ("values", "rewards")]
            for wanted in (None, chosen):
                result = client.infer("critic_infer", inputs(binary), outputs=wanted, request_id="7")
                np.testing.assert_array_equal(result.as_numpy("values"), [[1.0, 3.0]])
                np.testing.assert_array_equal(result.as_numpy("rewards"), [[6.0]])
                assert result.get_response()["id"] == "7"
        pending = [client.async_infer("critic_infer", inputs(True)) for _ in range(8)]
        for request in pending:
            np.testing.assert_array_equal(request.get_result(timeout=20).as_numpy("rewards"), [[6.0]])
        with pytest.raises(triton.InferenceServerException, match="sequence_lengths"):
            client.infer("critic_infer", inputs(True)[:1])
        client.close()


# ------------------------------------------------------------------ batching


def test_concurrent_clients_of_different_lengths_get_their_own_answers() -> None:
    backend = CountingBackend()
    generator = np.random.default_rng(0)
    cases = []
    for _ in range(60):
        rows, width = int(generator.integers(1, 5)), int(generator.integers(1, 30))
        cases.append((generator.integers(0, VOCAB, (rows, width)), generator.integers(1, width + 1, rows)))
    settings = {"max_rows": 16, "multiple": 4}
    with serve(backend, **settings) as server, critic_client(server.number, max_parallel=16) as client:
        futures = [client.infer_async(torch.tensor(tokens), torch.tensor(lengths)) for tokens, lengths in cases]
        for future, (tokens, lengths) in zip(futures, cases, strict=True):
            scores = future.result(30)
            wanted_rewards, wanted_values = expected(tokens, lengths)
            np.testing.assert_array_equal(scores["rewards"].numpy(), wanted_rewards)
            np.testing.assert_array_equal(scores["values"].numpy(), wanted_values)
            assert scores["rewards"].dtype == scores["values"].dtype == torch.float32
    assert len(backend.batches) < len(cases), "no requests were merged"
    assert all(rows <= 16 and width % 4 == 0 for rows, width in backend.batches)


def test_batches_are_stripped_to_the_longest_true_length() -> None:
    backend = CountingBackend()
    with serve(backend, multiple=8, max_length=20, delay_us=0) as server:
        for length in (3, 9, 19):
            answer = outputs(post(server, "critic_infer", infer_body(np.ones((1, 50), dtype=np.int64), [length])))
            assert answer["values"].shape == (1, 49)
            assert answer["values"].max() == length - 1
    assert backend.batches == [(1, 8), (1, 16), (1, 20)]


def test_padding_does_not_reach_the_model() -> None:
    backend, seen = CountingBackend(), []
    infer = backend.infer
    backend.infer = lambda tokens, lengths: seen.append(tokens.tolist()) or infer(tokens, lengths)
    with serve(backend) as server:
        rows = [[4, 1, 7, -1, 10**12], [1, 2, 3, 4, 0]]
        answer = outputs(post(server, "critic_infer", infer_body(rows, [3, 4])))
    np.testing.assert_array_equal(answer["values"], [[4.0, 5.0, 0.0, 0.0], [1.0, 3.0, 6.0, 0.0]])
    assert seen == [[[4, 1, 7, 0], [1, 2, 3, 4]]]


def test_client_pads_to_length_and_cuts_back() -> None:
    backend = CountingBackend()
    with serve(backend, delay_us=0) as server, critic_client(server.number, pad_to_length=32) as client:
        scores = client.infer_async(torch.ones(1, 5, dtype=torch.int64), torch.tensor([5])).result(20)
        assert scores["values"].shape == (1, 4)
        scores = client.infer_async(torch.ones(1, 33, dtype=torch.int64), torch.tensor([33])).result(20)
        assert scores["values"].shape == (1, 32)  # longer than what shorter ones are padded to


# ------------------------------------------------------------------ bad requests and limits


BAD_REQUESTS = {
    "no lengths": ({"inputs": [tensor("tokens", [[1]])]}, "sequence_lengths"),
    "unknown input": ({"inputs": [tensor("tokenz", [[1]])]}, "tokenz"),
    "wrong dtype": ({"inputs": [tensor("tokens", [[1]], "INT32"), tensor("sequence_lengths", [[1]])]}, "INT64"),
    "wrong rank": (infer_body([1, 2], [2]), "shape"),
    "too few lengths": (infer_body([[1], [2]], [1]), "rows"),
    "length of zero": (infer_body([[1]], [0]), "sequence_lengths"),
    "length beyond the width": (infer_body([[1]], [2]), "sequence_lengths"),
    "token out of the vocabulary": (infer_body([[VOCAB]], [1]), "vocabulary"),
    "negative token": (infer_body([[-1]], [1]), "vocabulary"),
    "too long": (infer_body(np.ones((1, 65), dtype=np.int64), [65]), "longer"),
    "no rows": (infer_body(np.ones((0, 3), dtype=np.int64), []), "no rows"),
    "no columns": (infer_body(np.ones((1, 0), dtype=np.int64), [1]), "sequence_lengths"),
    "unknown output": (infer_body([[1]], [1], outputs=[{"name": "nothing"}]), "nothing"),
    "bad timeout": (infer_body([[1]], [1], parameters={"timeout": "soon"}), "timeout"),
}


def test_bad_requests_are_refused_and_neighbours_are_served() -> None:
    good = infer_body([[1, 2, 3]], [3])
    with serve(CountingBackend()) as server, concurrent.futures.ThreadPoolExecutor(32) as pool:
        bad = {name: pool.submit(post, server, "critic_infer", body) for name, (body, _) in BAD_REQUESTS.items()}
        neighbours = [pool.submit(post, server, "critic_infer", good) for _ in range(16)]
        for name, (_, word) in BAD_REQUESTS.items():
            response = bad[name].result(30)
            assert response.status_code == 400, (name, response.text)
            assert word in response.json()["error"], (name, response.text)
        for future in neighbours:
            assert outputs(future.result(30))["rewards"] == [[6.0]]


def test_errors_have_the_protocols_form() -> None:
    with serve(CountingBackend(), http={"max_body_bytes": 5000}) as server:
        cases = [
            (post(server, "nothing", {}), 404),
            (get(server, "/v2/models/critic_infer/versions/9"), 404),
            (get(server, "/elsewhere"), 404),
            (get(server, "/v2/models/critic_infer/infer"), 405),
            (post(server, "critic_infer", {"inputs": "x" * 6000}), 413),
            (requests.post(f"{server.url}/v2/models/critic_infer/infer", data=b"{", timeout=20), 400),
            (post(server, "critic_infer", {}, headers={"Inference-Header-Content-Length": "99999"}), 400),
            (post(server, "critic_infer", {}, headers={"Content-Encoding": "gzip"}), 415),
        ]
        for response, status in cases:
            assert response.status_code == status, response.text
            assert isinstance(response.json()["error"], str)
        outputs(post(server, "critic_infer", infer_body([[1, 2]], [2])))


def test_a_full_queue_answers_429_and_health_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo_style_aligner.guard.request_log")
    backend = CountingBackend()
    body = infer_body([[1, 2]], [2])
    with (
        serve(backend, http={"max_outstanding_requests": 3}) as server,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        backend.gate.clear()
        held = [pool.submit(post, server, "critic_infer", body) for _ in range(3)]
        wait_for(lambda: "outstanding_requests 3.0" in get(server, "/metrics").text)
        response = post(server, "critic_infer", body)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert get(server, "/v2/health/ready").status_code == 200
        with critic_client(server.number) as client:  # the client tries again until there is room
            later = client.infer_async(torch.tensor([[1, 2]]), torch.tensor([2]))
            time.sleep(0.3)
            backend.gate.set()
            assert later.result(20)["rewards"].tolist() == [3.0]
        for future in held:
            outputs(future.result(20))
    assert "status=429" not in caplog.text  # clients come again and again; metrics count them


def test_a_request_that_outwaits_its_limit_gets_504() -> None:
    backend = CountingBackend()
    with serve(backend, http={"infer_timeout_s": 0.3}) as server:
        backend.gate.clear()
        response = post(server, "critic_infer", infer_body([[1, 2]], [2]))
        assert response.status_code == 504
        for _ in range(3):  # who gives up leaves nothing behind in the queue
            given_up = post(server, "critic_infer", infer_body([[1, 2]], [2], parameters={"timeout": 1000}))
            assert given_up.status_code == 504 and "within 0.001 s, 0 jobs are waiting" in given_up.json()["error"]
        backend.gate.set()
        outputs(post(server, "critic_infer", infer_body([[1, 2]], [2])))


def test_504_names_the_time_that_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the limit for what is being computed."""
    endpoint = critic_endpoints(ModelLimits(64, VOCAB), combined=True)[0]
    make_job = endpoint.make_job

    def make_running_job(request: InferRequest) -> QueuedRequest:
        job = make_job(request)
        job.future.set_running_or_notify_cancel()
        return job

    monkeypatch.setattr(endpoint, "make_job", make_running_job)
    queue = RequestQueue(4)
    queue.set_state(QueueState.SERVING)
    settings = HttpSettings(port=0, infer_timeout_s=0.05)
    client = create_app([endpoint], queue, settings, ServiceMetrics()).test_client()
    answer = client.post("/v2/models/critic_infer/infer", json=infer_body([[1, 2]], [2]))
    assert answer.status_code == 504 and "no answer within 0.1 s" in answer.json["error"]


def test_what_is_being_computed_at_its_limit_is_waited_for() -> None:
    """But not by clients with a limit of their own, and not what waits behind it."""
    backend = CountingBackend()
    with serve(backend, http={"infer_timeout_s": 1.0}) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        backend.gate.clear()
        computed = pool.submit(post, server, "critic_infer", infer_body([[1, 2]] * 8, [2] * 8))
        wait_for(lambda: "outstanding_requests 1.0" in get(server, "/metrics").text)
        waiting = pool.submit(post, server, "critic_infer", infer_body([[1, 2]], [2]))
        assert waiting.result(20).status_code == 504
        assert not computed.done()
        backend.gate.set()
        assert outputs(computed.result(20))["rewards"].tolist() == [[3.0]] * 8
        assert backend.batches == [(8, 2)]
        backend.gate.clear()
        hasty = infer_body([[1, 2]], [2], parameters={"timeout": 200_000})
        assert post(server, "critic_infer", hasty).status_code == 504
        backend.gate.set()


def test_a_slow_service_that_gets_on_is_not_given_up() -> None:
    """Twelve requests at once, of which each takes a quarter of a second: all take longer than one may by itself."""
    backend = CountingBackend()
    infer = backend.infer
    backend.infer = lambda **batch: (time.sleep(0.25), infer(**batch))[1]  # type: ignore[method-assign]
    limits = ClientLimits(total_s=2.0, read_s=20.0, first_backoff_s=0.01, max_backoff_s=0.05)
    with serve(backend, http={"infer_timeout_s": 0.5}) as server, critic_client(server.number, limits=limits) as client:
        tokens, lengths = torch.ones(8, 3, dtype=torch.int64), torch.full((8,), 3)
        answers = [client.infer_async(tokens, lengths) for _ in range(12)]
        assert all(answer.result(20)["rewards"].tolist() == [3.0] * 8 for answer in answers)
        assert len(backend.batches) == 12  # none was computed twice
        backend.gate.clear()
        stuck = client.infer_async(tokens, lengths)
        wait_for(lambda: "outstanding_requests 1.0" in get(server, "/metrics").text)
        late = client.infer_async(tokens, lengths)
        with pytest.raises(ServerUnavailableError, match=r"limit 2 s.*The server is running, but busy"):
            late.result(20)
        backend.gate.set()
        stuck.exception(20)


def test_token_is_needed_everywhere_but_for_health() -> None:
    body = infer_body([[1, 2]], [2])
    with serve(CountingBackend(), http={"token": "s3cret"}) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "é"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            response = post(server, "critic_infer", body, headers=encoded)
            assert response.status_code == 401
            assert "error" in response.json()
        assert get(server, "/metrics").status_code == get(server, "/v2").status_code == 401
        assert get(server, "/v2/health/live").status_code == get(server, "/v2/health/ready").status_code == 200
        outputs(post(server, "critic_infer", body, headers={"Authorization": "Bearer s3cret"}))
        with critic_client(server.number, token="s3cret") as client:
            client.wait_until_ready(10)
        with critic_client(server.number, token="wrong") as client:
            with pytest.raises(ValueError, match="another secret than this job") as told:
                client.wait_until_ready(10)
            assert told.value.exit_status == 2  # type: ignore[attr-defined]  # no other start would mend it
            with pytest.raises(RequestRefusedError, match="401"):
                client.infer_async(torch.tensor([[1, 2]]), torch.tensor([2])).result(20)


# ------------------------------------------------------------------ training


def test_training_is_applied_exactly_once() -> None:
    backend = CountingBackend()
    with serve(backend) as server:

        def train(value: float, number: int, run: str = "a"):
            return post(server, "critic_train", train_body(value, run_id=run, sequence_number=number))

        first = outputs(train(1.0, 1))["loss_mean"]
        for _ in range(3):
            np.testing.assert_array_equal(outputs(train(1.0, 1))["loss_mean"], first)
        outputs(train(2.0, 2))
        for number in (1, 2, 4):  # 2 was another batch
            refused = train(3.0, number)
            assert refused.status_code == 409
            assert "expected 3" in refused.json()["error"]
            assert refused.headers["X-Expected-Sequence-Number"] == "3"
        outputs(train(5.0, 1, run="b"))
        outputs(train(6.0, 3))
        outputs(post(server, "critic_train", train_body(7.0)))
    assert backend.trained == [6.0 * value for value in (1, 2, 5, 6, 7)]

    restored = TrainingLedger()
    restored.load_state_dict(json.loads(json.dumps(server.ledger.state_dict())))
    assert restored.expected("a") == 4 and restored.expected("b") == 2 and restored.steps == 5


def test_repeats_sent_at_once_train_once() -> None:
    backend = CountingBackend()
    body = train_body(1.0, run_id="a", sequence_number=1)
    with serve(backend) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [outputs(f.result(20)) for f in [pool.submit(post, server, "critic_train", body) for _ in range(8)]]
    assert len(backend.trained) == 1
    assert {float(answer["loss_mean"][0]) for answer in answers} == {6.0}


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {"run_id": "a"}},
        {"parameters": {"run_id": "a", "sequence_number": 0}},
        {"parameters": {"run_id": "a", "sequence_number": True}},
        {"parameters": {"run_id": 3, "sequence_number": 1}},
        {"drop": "mask"},
        {"replace": tensor("mask", np.ones((2, 4), dtype=np.float32))},
        {"replace": tensor("mask", np.full((2, 3), 0.5, dtype=np.float32))},
        {"replace": tensor("mask", np.array([[1, -1, 1]] * 2, dtype=np.float32))},
        {"replace": tensor("tokens", np.full((2, 4), VOCAB))},
    ],
)
def test_malformed_training_is_refused(change) -> None:
    backend = CountingBackend()
    body = train_body()
    body["parameters"] = change.get("parameters", {})
    if "drop" in change:
        body["inputs"] = [entry for entry in body["inputs"] if entry["name"] != change["drop"]]
    if "replace" in change:
        body["inputs"] = [change["replace"] if e["name"] == change["replace"]["name"] else e for e in body["inputs"]]
    with serve(backend) as server:
        assert post(server, "critic_train", body).status_code == 400
    assert backend.trained == []


def test_non_finite_training_data_is_refused() -> None:
    backend = CountingBackend()
    with serve(backend) as server, critic_client(server.number) as client:
        bad = torch.full((1, 3), float("nan"))
        good = torch.ones(1, 3)
        with pytest.raises(RequestRefusedError, match=r"critic_train/infer \(request_id=\w{16}\).*NaN"):
            client.train_async(torch.ones(1, 4, dtype=torch.int64), bad, good, good).result(20)
        with pytest.raises(RuntimeError, match=r"because a request failed.*NaN"):  # it would have the bad one's number
            client.train_async(torch.ones(1, 4, dtype=torch.int64), good, good, good).result(20)
    assert backend.trained == []


def test_training_keeps_its_place_among_inference() -> None:
    order: list[str] = []

    class Ordered(CountingBackend):
        def infer(self, tokens, lengths):
            order.append(f"infer {tokens.shape[0]}")
            return super().infer(tokens, lengths)

        def train(self, **batch) -> float:
            order.append("train")
            return super().train(**batch)

        def save(self, keep_history: str | None = None) -> concurrent.futures.Future[None]:
            order.append("save")
            return super().save(keep_history)

    backend = Ordered()
    one = infer_body([[1, 2]], [2])
    save = {"inputs": [tensor("dummy_var", [0])]}
    steps = [("critic_infer", one)] * 3 + [("critic_train", train_body())] + [("critic_infer", one)] * 2
    steps += [("critic_save", save), ("critic_infer", one)]
    with serve(backend, max_rows=8, delay_us=1000) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        backend.gate.clear()
        held = [pool.submit(post, server, "critic_infer", one)]
        wait_for(lambda: order == ["infer 1"])
        for count, (model, body) in enumerate(steps, start=2):
            held.append(pool.submit(post, server, model, body))
            wait_for(lambda count=count: f"outstanding_requests {count}.0" in get(server, "/metrics").text)
        backend.gate.set()
        for future in held:
            outputs(future.result(20))
    assert order == ["infer 1", "infer 3", "train", "infer 2", "save", "infer 1"]


def test_a_save_that_is_asked_for_again_is_waited_for_and_not_made_again() -> None:
    """Of a checkpoint that takes longer than the service waits to answer."""
    written: concurrent.futures.Future[None] = concurrent.futures.Future()

    class Slow(CountingBackend):
        def save(self, keep_history: str | None = None) -> object:
            super().save(keep_history)
            return written

    backend, start = Slow(), CriticPosition("run", 1)
    save = {"inputs": [tensor("dummy_var", [0])]}
    numbered = save | {"parameters": start.parameters()}
    other = save | {"parameters": start.parameters() | {"keep_history": "0123"}}
    with serve(backend, delay_us=0, http={"command_timeout_s": 0.3}) as server:
        for _ in range(3):
            assert post(server, "critic_save", numbered).status_code == 504
        assert backend.saves == 1
        assert post(server, "critic_save", other).status_code == 504  # which prunes other checkpoints
        assert backend.saves == 2
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, server, "critic_save", other)
            written.set_result(None)
            assert waiting.result(20).status_code in (200, 504)
        outputs(post(server, "critic_save", other))  # whole by now, and nothing has changed since
        assert backend.saves == 2
        outputs(post(server, "critic_train", train_body()))
        outputs(post(server, "critic_save", other))  # the critic is elsewhere by now
        assert backend.saves == 3


def test_client_trains_in_order_saves_and_notices_a_conflict() -> None:
    backend = CountingBackend()
    tokens, ones = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 3)
    with serve(backend) as server:
        with critic_client(server.number) as client:
            run = client.position.run_id
            futures = [client.train_async(tokens, ones * k, ones, ones) for k in range(1, 6)]
            assert [future.result(20) for future in futures] == [3.0 * k for k in range(1, 6)]
            client.save_async().result(20)
            assert client.position == CriticPosition(run, 6)
        assert backend.saves == 1
        with critic_client(server.number) as client:
            client.follow(CriticPosition(run, 9))
            with pytest.raises(SequenceConflictError) as conflict:
                client.train_async(tokens, ones, ones, ones).result(20)
            assert conflict.value.expected == 6
        with critic_client(server.number) as client:
            client.follow(CriticPosition(run, 6))
            client.train_async(tokens, ones * 6, ones, ones).result(20)
    assert backend.trained == [3.0 * k for k in range(1, 7)]


def test_lost_answers_are_retried_without_training_twice(caplog: pytest.LogCaptureFixture) -> None:
    """A proxy that cuts the connection after the server has worked, on every second request; tries share an id."""
    caplog.set_level(logging.DEBUG, "nemo_style_aligner.guard.request_log")
    backend = CountingBackend()
    tokens, ones = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 3)
    with serve(backend) as server, cutting_proxy(server.number) as (port, cuts), critic_client(port) as client:
        futures = [client.train_async(tokens, ones * k, ones, ones) for k in range(1, 9)]
        assert [future.result(20) for future in futures] == [3.0 * k for k in range(1, 9)]
        scores = [client.infer_async(tokens, torch.tensor([4])) for _ in range(6)]
        assert all(future.result(20)["rewards"].tolist() == [4.0] for future in scores)
    assert backend.trained == [3.0 * k for k in range(1, 9)]
    assert cuts[0] >= 6
    requests_seen = [record.fields for record in caplog.records if "fields" in record.__dict__]
    ids = [fields["request_id"] for fields in requests_seen if fields["path"].endswith("/infer")]
    assert len(set(ids)) == 8 + 6 < len(ids)


@contextlib.contextmanager
def cutting_proxy(target: int):
    listener = socket.create_server(("127.0.0.1", 0))
    cuts, connections, stop = [0], [0], threading.Event()

    def handle(client: socket.socket, cut: bool) -> None:
        with client, socket.create_connection(("127.0.0.1", target)) as upstream:
            client.settimeout(20)
            upstream.settimeout(20)
            with contextlib.suppress(OSError):
                data = b""
                while b"\r\n\r\n" not in data:
                    data += client.recv(65536)
                size = int(re.search(rb"(?i)content-length: (\d+)", data)[1])
                while len(data) < data.index(b"\r\n\r\n") + 4 + size:
                    data += client.recv(65536)
                upstream.sendall(data.replace(b"keep-alive", b"close"))
                answer = b""
                while part := upstream.recv(65536):
                    answer += part
                if cut:
                    cuts[0] += 1
                    client.sendall(answer[: len(answer) // 2])
                else:
                    client.sendall(answer)

    def accept() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            connections[0] += 1
            threading.Thread(target=handle, args=(client, connections[0] % 2 == 1), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], cuts
    finally:
        stop.set()
        listener.close()


# ------------------------------------------------------------------ readiness and failure


def test_separate_reward_server() -> None:
    critic = critic_endpoints(combined=False)
    with (
        serve(CountingBackend(), endpoints=critic) as server,
        serve(CountingBackend(), endpoints=[ScoreEndpoint("reward_model", [REWARDS])]) as reward,
        critic_client(server.number, combined=False) as client,
        reward_client(reward.number) as judge,
    ):
        client.wait_until_ready(10)
        judge.wait_until_ready(10)
        tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
        scores = client.infer_async(tokens, lengths).result(20)
        assert "rewards" not in scores and scores["values"].tolist() == [[1.0, 3.0]]
        assert judge.infer_async(tokens, lengths).result(20)["rewards"].tolist() == [6.0]
        with critic_client(server.number) as wrong, pytest.raises(ValueError, match="combine_rm_and_critic_server"):
            wrong.wait_until_ready(10)


@contextlib.contextmanager
def foreign_reward_service(answers: dict[str, str]) -> Iterator[int]:
    """The port of a service of somebody else's, which says what ``answers`` say: by path, JSON."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = answers.get(self.path, "").encode()
            self.send_response(200)
            if "gzip" in self.headers.get("Accept-Encoding", ""):  # as Triton does, and many a proxy
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)


def reward_answer(rewards: object, shape: list[int], name: str = "rewards", datatype: str = "FP32") -> str:
    return json.dumps({"outputs": [{"name": name, "datatype": datatype, "shape": shape, "data": rewards}]})


MALFORMED_REWARDS = {
    "a row too many": (reward_answer([99.0, 1.0, 2.0], [3, 1]), r"shape \[3, 1\], .* \[2, 1\] for 2 sequences"),
    "a row too few": (reward_answer([1.0], [1, 1]), r"shape \[1, 1\], .* \[2, 1\] for 2 sequences"),
    "no second dimension": (reward_answer([1.0, 2.0], [2]), r"shape \[2\], and should have \[2, 1\]"),
    "several attributes": (reward_answer([1.0, 2.0, 3.0, 4.0], [2, 2]), r"shape \[2, 2\], and should have \[2, 1\]"),
    "NaN": (reward_answer([1.0, math.nan], [2, 1]), "NaN is not JSON"),
    "strings": (reward_answer(["1", "2"], [2, 1], datatype="BYTES"), "'rewards' holds strings"),
    "another name": (reward_answer([1.0, 2.0], [2, 1], name="scores"), "no output 'rewards', only scores"),
    "no JSON": ("<html>", "JSON part cannot be read"),
}


def test_a_malformed_answer_of_a_reward_service_is_an_error_that_names_the_request() -> None:
    """None of it may be trained on: with a row too many, all rewards behind it would be other samples'."""
    answers: dict[str, str] = {}
    path = "/v2/models/reward_model"
    with foreign_reward_service(answers) as port, reward_client(port) as client:

        def score() -> list[float]:
            scores = client.infer_async(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])).result(20)
            return scores["rewards"].tolist()

        for what, metadata in ("no JSON", "<html>"), ("no shape", '{"outputs": [{"name": "rewards"}]}'):
            answers[path] = metadata
            with pytest.raises(ValueError, match=rf"GET http://127.0.0.1:{port}{path} \(request_id=.*metadata"):
                pytest.fail(f"{what}: {client.wait_until_ready(10)}")
        answers[path] = '{"outputs": [{"name": "rewards", "shape": [-1, 1]}]}'  # all that is read
        client.wait_until_ready(10)
        for what, (answer, message) in MALFORMED_REWARDS.items():
            answers[f"{path}/infer"] = answer
            where = rf"POST http://127.0.0.1:{port}{path}/infer \(request_id=\w+\) cannot be used: .*"
            with pytest.raises(ProtocolError, match=where + message):
                pytest.fail(f"{what}: {score()}")
        for datatype in ("FP32", "FP64", "INT64"):
            answers[f"{path}/infer"] = reward_answer([5, 7], [2, 1], datatype=datatype)
            assert score() == [5.0, 7.0]


def test_a_critics_answer_of_another_shape_is_an_error() -> None:
    answers = {"/v2/models/critic_infer/infer": reward_answer([1.0, 2.0], [2, 1], name="values")}
    with foreign_reward_service(answers) as port, critic_client(port) as client:
        for tokens, message in (
            ([[1, 2, 3], [4, 5, 6]], r"'values' has the shape \[2, 1\], and should have \[2, 2\]"),
            ([[1, 2]], r"'values' has the shape \[2, 1\], and should have \[1, 1\]"),
            ([[1, 2], [3, 4]], "has no output 'rewards'"),
        ):
            with pytest.raises(ProtocolError, match=rf"{port}/v2/models/critic_infer/infer .*{message}"):
                client.infer_async(torch.tensor(tokens), torch.tensor([2] * len(tokens))).result(20)


def test_a_server_that_cannot_take_the_jobs_sequences_is_refused() -> None:
    endpoints = critic_endpoints(ModelLimits(64, VOCAB, tokenizer="a"), combined=True)
    with serve(CountingBackend(), endpoints=endpoints) as server, critic_client(server.number) as client:
        client.wait_until_ready(10, sequences=SequencesToScore(64, VOCAB, "a"))
        with pytest.raises(ValueError, match=r"at most 64 tokens.* 65 together.*; its token ids end at 999.* at 1000"):
            client.wait_until_ready(10, sequences=SequencesToScore(65, VOCAB + 1, "b"))
        with pytest.raises(ValueError, match=r"'critic_infer' at .* does not fit this job: its tokenizer gives other"):
            client.wait_until_ready(10, sequences=SequencesToScore(64, VOCAB, "b"))
    silent = critic_endpoints(combined=True)  # a server that tells no limits
    with serve(CountingBackend(), endpoints=silent) as server, critic_client(server.number) as client:
        client.wait_until_ready(10, sequences=SequencesToScore(10**6, 10**6, "b"))


def test_a_kind_of_scores_of_ones_own_costs_its_name_and_what_computes_it() -> None:
    """From the model to the column of each response's tokens that a step gets."""
    entropies = Score("entropies", per_token=True)

    class Entropies(CountingBackend):
        def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
            self.batches.append(tuple(tokens.shape))
            return {"entropies": tokens[:, 1:] / 2}

    backend = Entropies()
    samples = [Sample(n, n, {}, list(range(n, 2 * n)), 1, True, str) for n in (3, 5, 4)]
    with serve(backend, endpoints=[ScoreEndpoint("observer", [entropies])], delay_us=200_000) as server:
        source = RemoteScores(ScoreClient(server.url, "observer", [entropies], limits=TEST_LIMITS))
        scorer = Scorer(RewardSum([]), None, 60, "the observer", apart={"observer": source})
        scorer.wait_until_ready(10, SequencesToScore(10, 100, ""))
        batches = [scorer.score(samples[:2]), scorer.score(samples[2:])]
        found = {id_: columns for batch in batches for id_, _, columns in batch.result()}
        assert get(server, "/v2/models/observer").json()["outputs"] == [
            {"name": "entropies", "datatype": "FP32", "shape": [-1, -1]}
        ]
        scorer.close()
    assert backend.batches == [(3, 5)], "requests were not merged"
    assert scorer.columns == ["observer_entropies"]
    for id_, columns in found.items():
        assert columns["observer_entropies"].tolist() == [token / 2 for token in range(id_ + 1, 2 * id_)]


def test_a_kind_of_request_of_ones_own_says_what_it_carries_and_what_answers_it() -> None:
    class Distance(Endpoint):
        method = "distance"

        def __init__(self) -> None:
            super().__init__("distance", [TensorSpec("points", "FP32", (2,))], [TensorSpec("distance", "FP32", (1,))])

        def make_job(self, request: InferRequest) -> QueuedRequest:
            first, last = self._arrays(request)["points"].tolist()
            if last < first:
                raise self._refuse("the last point lies before the first")
            return QueuedRequest(self, {"first": first, "last": last}, self._position(request.parameters))

        def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
            (job,) = jobs
            job.future.set_result({"distance": np.array([service.command(self, **job.arguments)], np.float32)})

    class Measure(CountingBackend):
        def distance(self, first: float, last: float) -> float:
            return last - first

    with serve(Measure(), endpoints=[*critic_endpoints(combined=True), Distance()]) as server:

        def ask(*points: float, **parameters: object) -> requests.Response:
            return post(server, "distance", {"inputs": [tensor("points", points)], "parameters": parameters})

        assert outputs(ask(1.0, 3.5))["distance"].tolist() == [2.5]
        assert outputs(post(server, "critic_infer", infer_body([[1, 2]], [2])))["rewards"].tolist() == [[3.0]]
        for answer, status, message in (
            (ask(2.0, 1.0), 400, "distance: the last point lies before the first"),
            (ask(1.0, 2.0, 3.0), 400, r"'points' must be of shape \[2\], got \[3\]"),
            (ask(1.0, 2.0, run_id="a", sequence_number=7), 409, "distance: sequence_number 7 .* expected 1"),
        ):
            assert answer.status_code == status and re.search(message, answer.json()["error"]), answer.text
        assert 'command_seconds_count{command="distance"} 1.0' in get(server, "/metrics").text


def test_several_attributes() -> None:
    class Attributes(CountingBackend):
        def infer(self, tokens, lengths):
            return {"rewards": torch.stack([lengths, -lengths, 2 * lengths], 1)}

    endpoints = [ScoreEndpoint("reward_model", [Score("rewards", columns=3)])]
    with serve(Attributes(), endpoints=endpoints) as server:
        answer = outputs(post(server, "reward_model", infer_body([[1, 2]], [2])))
        with (
            reward_client(server.number) as client,
            pytest.raises(ValueError, match=r"rewards of shape \[-1, 3\].*model\.regression\.merge_attributes=True"),
        ):
            client.wait_until_ready(10)  # a job that needs one reward is told at its start
    np.testing.assert_array_equal(answer["rewards"], [[2, -2, 4]])


def test_listens_before_the_model_is_there_and_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nemo_style_aligner.guard.request_log")
    server = ModelServer(critic_endpoints(combined=True), HttpSettings(port=0), DispatchSettings(8))
    server.url = f"http://127.0.0.1:{server.port}"
    try:
        assert get(server, "/v2/health/live").status_code == 200
        assert get(server, "/v2/health/ready").status_code == 503
        assert get(server, "/v2/models/critic_infer/ready").status_code == 503
        refused = post(server, "critic_infer", infer_body([[1, 2]], [2]))
        assert refused.status_code == 503 and "loaded" in refused.json()["error"]
    finally:
        server.close()
    # All ranks of a job ask for minutes: real warnings would drown among the answers.
    levels = [record.levelno for record in caplog.records if "status=503" in record.message]
    assert levels == [logging.DEBUG, logging.DEBUG, logging.INFO]


def test_the_log_says_when_the_service_listens_and_when_it_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo_style_aligner.trainer.services")
    with serve(CountingBackend()) as server:
        lines = [record.getMessage() for record in caplog.records if "ready" in record.message]
        assert lines == [
            f"listening on {server.url}, not ready yet: critic_infer, critic_train, critic_save, critic_restore",
            f"ready: requests are answered from now on; to end, kill -SIGINT {os.getpid()}",
        ]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http = HttpSettings(port=port, section="trainer.ppo")
        keys = r"with trainer\.ppo\.port, or .* with trainer\.ppo\.host"
        with pytest.raises(OSError, match=rf"{port}.*choose a free port {keys}"):
            ModelServer(critic_endpoints(combined=True), http, DispatchSettings(8))


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [("127.0.0.1", 70000, r"127.0.0.1:70000 \(ports are numbers up to"), ("node..7", 0, r"node\.\.7:0 \(no host name")],
)
def test_a_place_where_nothing_can_listen_is_an_error(host: str, port: int, message: str) -> None:
    with pytest.raises(PlaceTakenError, match=message):
        ModelServer(critic_endpoints(combined=True), HttpSettings(port, host), DispatchSettings(8))


def test_an_absent_server_is_named_with_the_elapsed_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with critic_client(1, limits=ClientLimits(total_s=0.5)) as client:
        with pytest.raises(ServerUnavailableError, match=r"127.0.0.1:1/v2/models/critic_infer/infer.*after \d+\.\d s"):
            client.infer_async(torch.tensor([[1, 2]]), torch.tensor([2])).result(20)
        with pytest.raises(ServerUnavailableError, match="not ready within"):
            client.wait_until_ready(0.5)
    assert "waiting for the server at http://127.0.0.1:1" in caplog.text


def test_a_failing_model_answers_500_and_ends_the_service() -> None:
    backend = CountingBackend()
    with serve(backend) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        backend.gate.clear()
        backend.fail = True
        held = [pool.submit(post, server, "critic_infer", infer_body([[1, 2]], [2])) for _ in range(3)]
        wait_for(lambda: "outstanding_requests 3.0" in get(server, "/metrics").text)
        backend.gate.set()
        for future in held:
            response = future.result(20)
            assert response.status_code == 500
            assert "the model broke" in response.json()["error"]
        server.thread.join(20)
        assert isinstance(server.outcome, RuntimeError)


def test_stop_finishes_what_was_taken() -> None:
    backend = CountingBackend()
    with serve(backend, max_rows=1) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        backend.gate.clear()
        held = [pool.submit(post, server, "critic_infer", infer_body([[1, 2]], [2])) for _ in range(5)]
        wait_for(lambda: "outstanding_requests 5.0" in get(server, "/metrics").text)
        server.request_stop()
        backend.gate.set()
        for future in held:
            assert outputs(future.result(20))["rewards"] == [[3.0]]
        server.thread.join(20)
        assert server.outcome == "ended"


CRITIC = critic_endpoints(combined=True)
INFER, TRAIN, SAVE, _ = CRITIC


def server_with(*jobs: QueuedRequest, **settings: float) -> ModelServer:
    """A server, not begun, for which these jobs wait."""
    server = ModelServer(CRITIC, HttpSettings(port=0), DispatchSettings(8, 0, **settings))
    server.queue.set_state(QueueState.SERVING)
    for job in jobs:
        server.queue.put(job)
        job.future.add_done_callback(lambda _: server.queue.release())
    return server


def infer_job(position: CriticPosition | None = None) -> QueuedRequest:
    return QueuedRequest(INFER, {"tokens": np.ones((1, 3), np.int64), "lengths": np.array([3])}, position)


def save_job() -> QueuedRequest:
    return QueuedRequest(SAVE, {"keep_history": None})


def test_metrics_and_jobs_tell_what_was_done() -> None:
    def train_job() -> QueuedRequest:
        batch = dict.fromkeys(("returns", "prev_values", "mask"), np.ones((1, 2), np.float32))
        batch["tokens"] = np.ones((1, 3), np.int64)
        return QueuedRequest(TRAIN, {"batch": batch, "digest": "0123", "position": CriticPosition("run", 1)})

    jobs = infer_job(), infer_job(), train_job(), train_job(), infer_job()
    server = server_with(*jobs)
    server.request_stop()
    server.run(CountingBackend())
    expected = {"training_steps_total": 1, "training_repeats_total": 1}
    expected |= {"queue_seconds_count": 5, "batch_rows_count": 2, "batch_rows_sum": 3}
    read = server.metrics.registry.get_sample_value
    assert {name: read(f"aligner_server_{name}") for name in expected} == expected
    first, second, *_, last = jobs
    assert [job.batch_rows for job in (first, second, last)] == [2, 2, 1]
    assert all(job.arrived <= job.taken for job in (first, second, last))


def test_jobs_not_begun_when_the_time_to_stop_is_up_are_refused() -> None:
    job = infer_job()
    server = server_with(job, drain_seconds=0.0)
    server.request_stop()
    server.run(CountingBackend())
    refusal = job.future.exception(0)
    assert isinstance(refusal, ProtocolError) and (refusal.status, refusal.headers["Retry-After"]) == (503, "5")
    with pytest.raises(ProtocolError, match="shutting down"):
        server.queue.put(infer_job())


def test_a_service_that_fails_answers_whoever_waits() -> None:
    """For a checkpoint that is being written, for what has failed, or in the queue."""
    backend, saves = CountingBackend(), []
    backend.fail = True
    backend.save = lambda keep_history=None: saves.append(concurrent.futures.Future()) or saves[-1]
    jobs, refused = (save_job(), save_job(), infer_job(), save_job()), infer_job(CriticPosition("run", 7))
    server = server_with(*jobs[:2], refused, *jobs[2:])
    with pytest.raises(RuntimeError, match="the model broke"):
        server.run(backend)
    for job in jobs:
        refusal = job.future.exception(0)
        assert isinstance(refusal, ProtocolError) and refusal.status == 500
        assert "the service failed: RuntimeError: the model broke" in str(refusal)
    assert refused.future.exception(0).status == 409  # in the batch that failed
    assert len(saves) == 1  # the second asks for the same
    with pytest.raises(ProtocolError, match="has failed"):
        server.queue.put(infer_job())


def test_a_checkpoint_that_is_not_written_ends_the_service_with_the_reason() -> None:
    backend, failed, job = CountingBackend(), concurrent.futures.Future(), save_job()
    failed.set_exception(OSError("No space left on device"))
    backend.save = lambda keep_history=None: failed  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left on device"):
        server_with(job).run(backend)
    assert "No space left on device" in str(job.future.exception(0))


# ------------------------------------------------------------------ several ranks


RANK_SCRIPT = """
    import concurrent.futures, datetime, os, sys, threading, time
    import torch, torch.distributed as dist
    from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
    from nemo_style_aligner.trainer.services.endpoints import ModelLimits
    from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
    from nemo_style_aligner.trainer.services.routes import HttpSettings

    rank, fault, patience = int(os.environ["RANK"]), os.environ.get("FAULT", ""), datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, patience)  # waits for both ranks
    limit = datetime.timedelta(seconds=float(os.environ["GROUP_TIMEOUT"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    group = dist.new_group(timeout=patience)  # as models have groups of their own

    class Backend:
        def infer(self, tokens, lengths):
            if fault == f"infer{rank}":
                raise ValueError("rank is broken")
            if fault == "slow":
                time.sleep(1.0)
            rows, half = len(lengths), (len(lengths) + 1) // 2
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 2 * half - rows))
            part = (tokens[rank * half : (rank + 1) * half]).float().contiguous()
            parts = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(parts, part, group=group)
            sums = torch.cat(parts)[:rows].cumsum(1)
            return {"values": sums[:, :-1], "rewards": sums.gather(1, lengths[:, None] - 1)}

        def train(self, tokens, returns, prev_values, mask):
            total = returns.sum() * (rank + 1)
            dist.all_reduce(total, group=group)
            return float(total)

        def save(self, keep_history=None):
            written = concurrent.futures.Future()

            def write():
                open(f"{os.environ['OUT']}/saved{rank}", "w").write(str(server.ledger.state_dict()))
                written.set_result(None)

            threading.Timer(4.0 if os.environ["FAULT"] == "slow" else 0.0, write).start()
            return written

    server = ModelServer(
        critic_endpoints(ModelLimits(64, 1000), combined=True), HttpSettings(port=0),
        DispatchSettings(8, heartbeat_seconds=0.5))
    if rank == 0:
        print(f"port {server.port}", flush=True)
    server.run(Backend())
    print(f"rank {rank} ended", flush=True)
    dist.destroy_process_group()
"""


@contextlib.contextmanager
def two_ranks(tmp_path: Path, group_timeout: float = 60, fault: str = ""):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK_SCRIPT))
    master_port = free_port()
    root = Path(__file__).resolve().parent.parent
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "MASTER_PORT": str(master_port),
            "OMP_NUM_THREADS": "1",
            "GROUP_TIMEOUT": str(group_timeout),
            "OUT": str(tmp_path),
            "FAULT": fault,
            "PYTHONPATH": str(root),
        }
        with (tmp_path / f"log{rank}").open("w") as log:
            processes.append(subprocess.Popen([sys.executable, str(script)], env=environment, stdout=log, stderr=log))
    try:
        log = tmp_path / "log0"
        wait_for(lambda: "port " in log.read_text() or processes[0].poll() is not None, 60)
        port = int(re.search(r"port (\d+)", log.read_text())[1])
        with critic_client(port) as client:
            client.wait_until_ready(30)
            yield processes, client
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def metrics_text(client: CriticClient) -> str:
    return requests.get(f"{client.base_url}/metrics", timeout=20).text


def test_two_ranks_serve_train_save_and_end_on_sigterm(tmp_path: Path) -> None:
    # The group's timeout is far below the idle time: only heartbeats keep the waiting rank alive.
    with two_ranks(tmp_path, group_timeout=3, fault="slow") as (processes, client):
        time.sleep(4.0)
        url = f"{client.base_url}/v2/models/critic_save/infer"
        elsewhere = {"run_id": "another", "sequence_number": 7, "history": "lost"}
        refused = {"inputs": [tensor("dummy_var", [0])], "parameters": elsewhere}
        for _ in range(80):  # what rank 0 refuses by itself does not keep it from saying that it lives
            assert requests.post(url, json=refused, timeout=20).status_code == 409
            time.sleep(0.05)
        tokens, lengths = torch.arange(15).reshape(3, 5), torch.tensor([5, 2, 4])
        scores = client.infer_async(tokens, lengths).result(20)
        wanted_rewards, wanted_values = expected(tokens.numpy(), lengths.numpy())
        np.testing.assert_array_equal(scores["rewards"].numpy(), wanted_rewards)
        np.testing.assert_array_equal(scores["values"].numpy(), wanted_values)
        ones = torch.ones(3, 4)
        assert client.train_async(tokens, ones, ones, ones).result(20) == 36.0
        saving = client.save_async()  # takes longer than the group's timeout, too
        taken = client.infer_async(tokens, lengths)  # takes a second
        wait_for(lambda: "outstanding_requests 2.0" in metrics_text(client))
        for process in reversed(processes):  # a launcher signals all ranks, in any order
            process.send_signal(signal.SIGTERM)
        assert taken.result(20)["rewards"].tolist() == scores["rewards"].tolist()
        saving.result(20)
        assert [process.wait(20) for process in processes] == [0, 0]
        saved = [(tmp_path / f"saved{rank}").read_text() for rank in range(2)]
        assert saved[0] == saved[1] and "'sequence_number': 1" in saved[0]


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_failing_rank_ends_all_ranks(tmp_path: Path, broken: int) -> None:
    with two_ranks(tmp_path, group_timeout=4, fault=f"infer{broken}") as (processes, client):
        future = client.infer_async(torch.ones(2, 4, dtype=torch.int64), torch.tensor([4, 4]))
        with pytest.raises((RequestRefusedError, ServerUnavailableError)):
            future.result(30)
        assert all(process.wait(30) != 0 for process in processes)


@pytest.mark.long
def test_a_stop_signal_to_any_rank_finishes_what_was_taken(tmp_path: Path) -> None:
    with two_ranks(tmp_path, fault="slow") as (processes, client):
        taken = client.infer_async(torch.ones(2, 4, dtype=torch.int64), torch.tensor([4, 4]))  # takes a second
        wait_for(lambda: "outstanding_requests 1.0" in metrics_text(client))
        processes[1].send_signal(signal.SIGTERM)
        assert taken.result(20)["rewards"].tolist() == [4.0, 4.0]
        assert [process.wait(20) for process in processes] == [0, 0]


@pytest.mark.long
def test_a_killed_rank_ends_the_other(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (processes, _):
        processes[1].kill()
        assert processes[0].wait(20) != 0
