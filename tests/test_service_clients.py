"""Clients of the service: tritonclient, PyTriton, plain requests; our own on bad links."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_critic import (
    CountingBackend,
    critic_client,
    get,
    infer_body,
    post,
    serve,
    tensor,
    train_body,
    wait_for,
)

from nemo_style_aligner.guard import http_client, request_log
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
    server_url,
)
from nemo_style_aligner.trainer.rl.rollouts.work_queue import WorkQueueServer
from nemo_style_aligner.trainer.telemetry.log_lines import JsonFormatter

TOKENS, LENGTHS = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3], [2]])
VALUES, REWARDS = [[1.0, 3.0], [4.0, 0.0]], [[6.0], [9.0]]


def test_tritonclient_asyncio_and_extensions() -> None:
    aio = pytest.importorskip("tritonclient.http.aio", reason="the tritonclient package is not installed")

    def inputs(binary: bool) -> list:
        made = [aio.InferInput("tokens", TOKENS.shape, "INT64"), aio.InferInput("sequence_lengths", (2, 1), "INT64")]
        made[0].set_data_from_numpy(TOKENS, binary_data=binary)
        made[1].set_data_from_numpy(LENGTHS, binary_data=binary)
        return made

    async def talk(port: int, token: dict[str, str]) -> None:
        # The client writes into the dictionary of headers that it is given: each call gets its own.
        async with aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("critic_infer")
            metadata = await client.get_server_metadata(headers=dict(token))
            assert metadata["extensions"] == ["binary_tensor_data", "model_configuration"]
            assert (await client.get_model_metadata("critic_infer", "1", headers=dict(token)))["versions"] == ["1"]
            assert (await client.get_model_config("critic_infer", headers=dict(token)))["max_batch_size"] > 0
            for binary in (True, False):
                wanted = [aio.InferRequestedOutput(name, binary_data=binary) for name in ("values", "rewards")]
                calls = [
                    client.infer("critic_infer", inputs(binary), outputs=wanted, request_id=str(k), headers=dict(token))
                    for k in range(8)
                ]
                for k, result in enumerate(await asyncio.gather(*calls)):
                    assert result.as_numpy("values").tolist() == VALUES
                    assert result.as_numpy("rewards").tolist() == REWARDS
                    assert result.get_response()["id"] == str(k)
            with pytest.raises(aio.InferenceServerException, match="authorization"):
                await client.infer("critic_infer", inputs(True))

    with serve(CountingBackend(), delay_us=0, http={"token": "s3cret"}) as server:
        asyncio.run(talk(server.number, {"Authorization": "Bearer s3cret"}))


PYTRITON = """
    import asyncio, sys
    import numpy as np
    from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient

    url, token = sys.argv[1:]
    tokens, lengths = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3], [2]])
    batch = {"tokens": tokens, "sequence_lengths": lengths}
    with ModelClient(url, "critic_infer", access_token=token or None) as client:
        print(client.infer_batch(**batch)["rewards"].tolist())
        print(client.infer_sample(tokens=tokens[0], sequence_lengths=lengths[0])["values"].tolist())
    with ModelClient(url, "critic_train", access_token=token or None) as client:
        ones = np.ones((2, 2), np.float32)
        print(client.infer_sample(tokens=tokens, returns=ones, prev_values=ones, mask=ones)["loss_mean"].tolist())
    with ModelClient(url, "critic_save", access_token=token or None) as client:
        print(client.infer_sample(dummy_var=np.zeros(1, np.int64))["status"].tolist())
    headers = {"Authorization": f"Bearer {token}"} if token else None

    async def talk():
        async with AsyncioModelClient(url, "critic_infer") as client:
            return await asyncio.gather(*[client.infer_batch(headers=headers, **batch) for _ in range(4)])

    print([answer["rewards"].tolist() for answer in asyncio.run(talk())][3])
    if not token:  # this client has no way to send one
        with FuturesModelClient(url, "critic_infer") as client:
            print(client.infer_batch(**batch).result(20)["rewards"].tolist())
"""


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_pytriton_clients(token: str, tmp_path: Path) -> None:
    """PyTriton needs numpy 1, so it lives in an environment of its own: ``PYTRITON_PYTHON`` names its interpreter."""
    python = os.environ.get("PYTRITON_PYTHON")
    if python is None and importlib.util.find_spec("pytriton") is None:
        pytest.skip("PYTRITON_PYTHON, an environment with nvidia-pytriton, is not set")
    script = tmp_path / "talk.py"
    script.write_text(textwrap.dedent(PYTRITON))
    backend = CountingBackend()
    with serve(backend, http={"token": token or None}) as server:
        command = [python or sys.executable, str(script), server.url, token]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    expected = [REWARDS, [1.0, 3.0], [4.0], [0], REWARDS] + ([] if token else [REWARDS])
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert backend.saves == 1


# ------------------------------------------------------------------ request ids and logs


def test_every_request_has_an_id_in_answer_and_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nemo_style_aligner.guard.request_log")
    with serve(CountingBackend(), delay_us=0, http={"token": "s3cret"}) as server:
        token = {"Authorization": "Bearer s3cret"}

        def ask(model: str, body: dict, **headers: str) -> str:
            return post(server, model, body, headers={**token, **headers}).headers["X-Request-Id"]

        body = infer_body([[1, 2]], [2])
        assert ask("critic_infer", {**body, "id": "from-the-protocol"}) == "from-the-protocol"
        assert ask("critic_infer", {**body, "id": "hidden"}, **{"X-Request-Id": "from-the-header"}) == "from-the-header"
        made = {ask("critic_infer", {**body, "id": "two words\nand a forged line"}), ask("critic_infer", body)}
        assert len(made) == 2 and all(re.fullmatch("[0-9a-f]{16}", name) for name in made)
        ask("critic_train", train_body(), **{"X-Request-Id": "training"})
        ask("critic_save", {"inputs": [tensor("dummy_var", [0])]}, **{"X-Request-Id": "saving"})
        ask("critic_infer", {}, **{"X-Request-Id": "bad"})
        assert post(server, "critic_infer", body, headers={"X-Request-Id": "stranger"}).status_code == 401
        ask("x" * 20000, body, **{"X-Request-Id": "long"})  # the error repeats it
    lines = {re.search(r"request_id=(\S+)", r.message)[1]: r for r in caplog.records if "request_id=" in r.message}
    good = lines["from-the-header"]
    assert good.levelno == logging.DEBUG
    for part in ("path=/v2/models/critic_infer/infer", "status=200", "rows=1", "batch_rows=1", "queue_ms=", "ms="):
        assert part in good.message
    assert lines["training"].levelno == lines["saving"].levelno == logging.DEBUG  # the critic has lines of its own
    assert lines["bad"].levelno == logging.INFO and "status=400" in lines["bad"].message
    assert "error=\"'inputs' must be a list" in lines["bad"].message
    assert "status=401" in lines["stranger"].message
    assert "status=404" in lines["long"].message and "unknown model 'xxx" in lines["long"].message
    assert len(lines["long"].message) < 1000 and len(JsonFormatter(0).format(lines["long"])) < 2000
    assert not any("\n" in record.message or "s3cret" in record.message for record in caplog.records)


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with refusals for want of the token nor with those of routes that need none."""
    caplog.set_level(logging.INFO, "nemo_style_aligner.guard.request_log")
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(request_log, "time", clock)
    with serve(CountingBackend(), http={"token": "s3cret"}) as server:
        for number in range(10):
            get(server, f"/v2/{number}", headers={"Authorization": "Bearer guess"})
            get(server, "/v2/models/none/config")
        assert post(server, "critic_infer", {}, headers={"Authorization": "Bearer s3cret"}).status_code == 400
        clock.monotonic = lambda: 61.0
        get(server, "/last")
    first, known, last = (r.getMessage() for r in caplog.records if r.name == request_log.logger.name)
    assert (
        "token: 1 refused since the last such line" in first and "path=/v2/0" in first and "client=127.0.0.1" in first
    )
    assert "status=400" in known
    assert "token: 20 refused" in last and "path=/last" in last


def test_a_failure_of_the_model_names_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    backend = CountingBackend()
    with serve(backend) as server:
        backend.fail = True
        answer = post(server, "critic_infer", infer_body([[1, 2]], [2]), headers={"X-Request-Id": "the-one"})
        assert answer.status_code == 500 and answer.headers["X-Request-Id"] == "the-one"
        server.thread.join(20)
    failures = [record for record in caplog.records if "the-one" in record.message]
    assert {record.levelname for record in failures} == {"ERROR", "WARNING"}  # the dispatcher's and the answer's


# ------------------------------------------------------------------ our own client


@contextlib.contextmanager
def listening(
    answer: Callable[[socket.socket], None], token: str | None = None
) -> Iterator[tuple[HttpClient, list[socket.socket]]]:
    """A client of a server that does ``answer`` with each connection; the connections that it got."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    answer(connections[-1])

        threading.Thread(target=accept, daemon=True).start()
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", token=token)
        try:
            yield client, connections
        finally:
            client.close()
            for connection in connections:
                connection.close()


def reply(connection: socket.socket, status: bytes = b"200 OK", fields: bytes = b"") -> None:
    connection.sendall(b"HTTP/1.1 %s\r\n%sContent-Length: 0\r\nConnection: close\r\n\r\n" % (status, fields))


def test_sending_may_take_longer_than_connecting() -> None:
    """A slow link: the first try gets through, though it takes several times the limit for connecting."""
    size = 12 * 2**20  # more than the system takes off the client's hands

    def read_slowly(connection: socket.socket) -> None:
        received = 0
        time.sleep(3 * limits.connect_s)
        while received < size:
            received += len(connection.recv(2**18))
        reply(connection)

    limits = ClientLimits(connect_s=0.3, read_s=30.0, total_s=60.0, away_s=1.0)
    with listening(read_slowly) as (client, connections):
        started = time.monotonic()
        assert client.request("POST", "/x", limits=limits, body=bytes(size)).status_code == 200
        assert time.monotonic() - started > 2 * limits.connect_s and len(connections) == 1


def test_a_server_that_does_not_take_a_request_is_silent_and_not_away() -> None:
    with listening(lambda connection: None) as (client, connections):
        limits = ClientLimits(connect_s=5.0, read_s=0.2, total_s=3.0, away_s=3600.0, first_backoff_s=0.01)
        with pytest.raises(ServerUnavailableError, match=r"limit 3 s.*last: the request was taken too slowly"):
            client.request("POST", "/x", limits=limits, body=bytes(2**25))
        assert len(connections) > 1


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"])
def test_an_answer_that_trickles_is_given_up_in_time(begun: bytes) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(begun)
        with contextlib.suppress(OSError):
            for _ in range(200):
                time.sleep(0.05)
                connection.sendall(b".")

    started = time.monotonic()
    with (
        listening(trickle) as (client, _),
        pytest.raises(ServerUnavailableError, match="last: the answer did not come in time"),
    ):
        client.request("GET", "/x", limits=ClientLimits(connect_s=5.0, read_s=5.0, total_s=0.4))
    assert time.monotonic() - started < 8.0


def test_why_there_is_no_connection_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is not lost behind long names."""

    def unknown(*_args: Any, **_options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    client = HttpClient(server_url("critic." + "very-long-name." * 10 + "invalid", 5556))
    with pytest.raises(ServerUnavailableError, match=r"last: connection failed \(.*Name or service not known\)"):
        client.request("GET", "/v2/health/ready", limits=ClientLimits(connect_s=5.0, total_s=0.4))


@pytest.mark.parametrize("host", ["critic..node", "%"])
def test_a_host_that_cannot_be_is_one_without_a_connection(host: str) -> None:
    with pytest.raises(ServerUnavailableError, match=r"last: connection failed \(.*Check .* its host and port"):
        HttpClient(server_url(host, 5556)).request("GET", "/v2", limits=ClientLimits(connect_s=5.0, total_s=0.2))


def test_a_busy_server_is_not_away(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the patience with a server that is away, one that says "later" is asked later.

    That many ask it at once is nothing for the log.
    """
    monkeypatch.setattr(http_client, "_SILENT_SECONDS", 0.0)
    answers = [b"429 Too Many Requests", b"504 Gateway Timeout", b"200 OK"]
    with listening(lambda connection: reply(connection, answers.pop(0))) as (client, _):
        limits = ClientLimits(total_s=20.0, away_s=0.01, first_backoff_s=0.1)
        assert client.request("GET", "/x", limits=limits).status_code == 200
    assert "status 504" in caplog.text and "status 429" not in caplog.text


def test_the_log_hears_of_a_server_that_breaks_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then, and once for all requests that wait for it; and when it answers again."""
    monkeypatch.setattr(http_client, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(http_client, "_LINE_SECONDS", 0.6)
    started = time.monotonic()

    def answer(connection: socket.socket) -> None:
        if time.monotonic() - started > 1.3:
            reply(connection)
        connection.close()

    limits = ClientLimits(total_s=20.0, away_s=40.0, first_backoff_s=0.02, max_backoff_s=0.1)
    with listening(answer) as (client, _), concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(client.request, "GET", "/x", limits=limits) for _ in range(6)]
        assert all(request.result().status_code == 200 for request in asked)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    waiting = [line for line in lines if "no answer after" in line]
    assert 1 <= len(waiting) <= 2 and len(lines) <= 4
    where = rf"GET {client.base_url}/x \(request_id=\w+\)"
    assert re.match(rf"{where}: no answer after \d+ s and \d+ tries, .* (39|40) s more.*connection failed", waiting[0])
    assert re.match(rf"{where} was answered after", lines[-1])


def test_a_server_that_breaks_every_time_is_not_asked_for_ever() -> None:
    with listening(lambda connection: reply(connection, b"500 Internal Server Error")) as (client, connections):
        limits = ClientLimits(total_s=5.0, internal_errors=2, first_backoff_s=0.01, max_backoff_s=0.01)
        with pytest.raises(RequestRefusedError, match="status 500"):
            client.request("GET", "/x", limits=limits)
        assert len(connections) == 3


def test_readiness_is_asked_for_now_and_then_and_not_of_strangers() -> None:
    with listening(lambda connection: reply(connection, b"400 Bad Request")) as (http, connections):  # Triton's "no"
        with critic_client(int(http.base_url.rpartition(":")[2])) as client, pytest.raises(ServerUnavailableError):
            client.wait_until_ready(1.5)
        assert len(connections) <= 3
    with listening(lambda connection: reply(connection, b"404 Not Found")) as (http, connections):
        with (
            critic_client(int(http.base_url.rpartition(":")[2])) as client,
            pytest.raises(ValueError, match=r"is not a critic or reward service.*remote_critic_rm\.critic\.port"),
        ):
            client.wait_until_ready(60)
        assert len(connections) == 1


# ------------------------------------------------------------------ our own client, and who does not know the secret

BRIEF = ClientLimits(connect_s=5.0, read_s=5.0, total_s=20.0, away_s=0.5, first_backoff_s=0.05, max_backoff_s=0.1)
NO_PROOF = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n%s\r\n"


@pytest.mark.parametrize(
    "answer", [b"", b"220 mail\r\n\r\n", NO_PROOF % b"", NO_PROOF % b"X-Proof: 1 yes\r\n", b"x" * 20000]
)
@pytest.mark.parametrize("is_early", [True, False])
def test_the_secret_is_not_sent_to_who_does_not_know_it(answer: bytes, is_early: bool) -> None:
    """The client says so, and asks again: it may be there only until the service starts."""
    received: list[bytes] = []

    def pose(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            if not is_early:  # what came before could be taken for the answer to what the client sends next
                received.append(connection.recv(2**16))
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(2**16):
                received.append(data)
        connection.close()

    with listening(pose, token="s3cret") as (client, connections):
        with pytest.raises(ServerUnavailableError, match="does not prove that it knows the secret, so the secret is"):
            client.request("GET", "/v2/health/ready", limits=BRIEF, body=b"prompts")
        assert len(connections) > 1
    everything = b"".join(received)
    assert everything.startswith(b"HEAD /v2/health/live") and b"X-Challenge" in everything
    assert b"s3cret" not in everything and b"prompts" not in everything and b"Authorization" not in everything


def test_what_was_answered_in_the_place_of_a_proof_is_said() -> None:
    """A server that knows no HEAD, as Python's own until one writes it."""
    with (
        listening(lambda connection: reply(connection, b"501 Unsupported method"), token="s3cret") as (client, _),
        pytest.raises(ServerUnavailableError, match=r"HEAD /v2/health/live was answered 'HTTP/1.1 501 Unsupp"),
    ):
        client.request("GET", "/v2/health/ready", limits=BRIEF)


def test_who_only_listens_gets_no_secret() -> None:
    received: list[bytes] = []
    with listening(lambda connection: received.append(connection.recv(2**16)), token="s3cret") as (client, _):
        limits = ClientLimits(read_s=0.2, total_s=1.0, first_backoff_s=0.01)
        with pytest.raises(ServerUnavailableError, match="last: the server did not prove in time that it knows"):
            client.request("GET", "/v2/health/ready", limits=limits)
    assert received and not any(b"s3cret" in data for data in received)


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_proof_cannot_be_had_from_a_service_on_another_port(is_edited: bool) -> None:
    """Nor by who passes it on with a port of its own."""
    server = WorkQueueServer(token="s3cret")
    received: list[bytes] = []

    def relay(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as target:
            received.append(connection.recv(2**16))
            target.sendall(received[-1])
            answer = target.recv(2**16)
            place = b"127.0.0.1:%d" % connection.getsockname()[1]
            connection.sendall(re.sub(rb"(?i)(X-Proof: )\S+", rb"\g<1>%s" % place, answer) if is_edited else answer)

    refusal = "has another secret" if is_edited else rf"listens on 127\.0\.0\.1:{server.port}: connect to that one"
    try:
        with listening(relay, token="s3cret") as (client, connections):
            with pytest.raises(RequestRefusedError, match=refusal):
                client.request("GET", "/health", limits=BRIEF)
            assert len(connections) == 1
    finally:
        server.stop()
    assert received and not any(b"s3cret" in data for data in received)


@pytest.mark.parametrize(("theirs", "message"), [(None, "has no secret"), ("other", "has another secret")])
def test_a_service_with_another_secret_is_an_error_at_once(theirs: str | None, message: str) -> None:
    with (
        serve(CountingBackend(), http={"token": theirs}) as server,
        critic_client(server.number, token="mine") as client,
        pytest.raises(ValueError, match=rf"{message}"),
    ):
        client.wait_until_ready(60)


def test_once_the_secret_is_known_to_be_right_a_wrong_proof_is_waited_out() -> None:
    """Else whoever takes the port of a critic that is started again could end the actor's job with one answer."""
    limits = ClientLimits(total_s=20.0, away_s=20.0, first_backoff_s=0.05, max_backoff_s=0.1)
    server = WorkQueueServer(token="s3cret")
    client = HttpClient(f"http://127.0.0.1:{server.port}", token="s3cret")
    assert client.request("GET", "/status", limits=limits).status_code == 200
    server.stop()
    impostor = WorkQueueServer(port=server.port, token="guess")
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(client.request("GET", "/status", limits=limits).status_code)
    )
    asking.start()
    asking.join(0.5)
    assert asking.is_alive()
    impostor.stop()
    server = WorkQueueServer(port=server.port, token="s3cret")
    asking.join(20)
    client.close()
    server.stop()
    assert answers == [200]


def test_each_connection_is_proven_and_then_kept() -> None:
    """In every state of a service, on every route, to challenges that a client may send."""
    with serve(CountingBackend(), http={"token": "s3cret"}) as server:
        challenge = {"X-Challenge": f"{'a' * 128} 127.0.0.1:{server.number}"}
        wanted = re.compile(rf"127\.0\.0\.1:{server.number} [0-9a-f]{{32}} [0-9a-f]{{64}}")
        proofs = set()
        for path, status in (
            ("/v2/health/live", 200),
            ("/metrics", 401),
            ("/nothing", 401),
            ("/v2/models/x/ready", 404),
        ):
            answer = get(server, path, headers=challenge)
            proofs.add(answer.headers["X-Proof"])
            assert answer.status_code == status and wanted.fullmatch(answer.headers["X-Proof"])
            assert "X-Proof" not in get(server, path).headers
        assert len(proofs) == 4, "the service repeats itself"
        for unusable in ("a" * 129 + " x:1", "", "a|5556", "a", "a b c"):
            assert "X-Proof" not in get(server, "/v2/health/live", headers={"X-Challenge": unusable}).headers
        with critic_client(server.number, token="s3cret") as client:
            client.wait_until_ready(20)
            connections = client._http._peer._sockets
            assert len([s for s in connections if s.fileno() >= 0]) == 1


def test_a_service_proves_itself_by_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("NOT TESTED: this machine has no IPv6")
    server = WorkQueueServer(host="::1", token="s3cret")
    client = HttpClient(f"http://[::1]:{server.port}", token="s3cret")
    try:
        assert client.request("GET", "/status", limits=BRIEF).status_code == 200
    finally:
        client.close()
        server.stop()


def test_localhost_is_where_the_services_are() -> None:
    """It stands for ::1 as well, where another user could listen and have the service's own proof passed on."""
    server = WorkQueueServer(host="localhost", token="s3cret")
    client = HttpClient(f"http://localhost:{server.port}", token="s3cret")
    try:
        with contextlib.ExitStack() as stack:
            if Path("/proc/net/if_inet6").exists():
                stack.enter_context(socket.create_server(("::1", server.port), family=socket.AF_INET6))
            assert client.request("GET", "/status", limits=BRIEF).status_code == 200
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize("token", [None, "s3cret"])
def test_closing_a_client_ends_requests_that_wait_for_an_answer(token: str | None) -> None:
    """Within a moment: at the end of a job Python waits for the threads that have sent them."""
    limits = ClientLimits(read_s=60.0, total_s=60.0)
    ended: list[str] = []

    def ask(client: HttpClient) -> None:
        with pytest.raises(ServerUnavailableError) as error:
            client.request("POST", "/x", limits=limits, body=b"x")
        ended.append(str(error.value))

    with listening(lambda connection: None, token) as (client, connections):
        asking = [threading.Thread(target=ask, args=(client,)) for _ in range(3)]
        for thread in asking:
            thread.start()
        while len(connections) < 3:
            time.sleep(0.01)
        time.sleep(0.1)
        client.close()
        for thread in asking:
            thread.join(5)
        ask(client)  # nor does a later one wait
    assert len(ended) == 4 and all("the client was closed" in message for message in ended)


def test_closing_a_client_gives_up_scores_that_are_being_computed() -> None:
    backend = CountingBackend()
    with serve(backend, http={"token": "s3cret"}) as server, critic_client(server.number, token="s3cret") as client:
        backend.gate.clear()
        scores = [client.infer_async(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])) for _ in range(3)]
        wait_for(lambda: len(client._http._peer._sockets) == 3 and not backend.gate.is_set())
        started = time.monotonic()
        client.close()
        for score in scores:
            with pytest.raises((ServerUnavailableError, concurrent.futures.CancelledError)):
                score.result(20)
        client._threads.shutdown()  # as Python does when it ends
        assert time.monotonic() - started < 10
        backend.gate.set()
