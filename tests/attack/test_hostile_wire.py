"""Attacks over the network on the services and the work queue, carried out from this machine.

Strangers in crowds, slow ones, those whose HTTP two programs would read differently; neighbours that listen where a
service might be, relay and replay; servers that fall silent; and a wire that flips bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
import re
import select
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import torch
from served_critic import CountingBackend, client_config, critic_client, infer_body, outputs, post, serve, train_body

from nemo_style_aligner.guard import http_client
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.guard.http_server import ConnectionLimits
from nemo_style_aligner.guard.signing import Signatures, body_digest, prove
from nemo_style_aligner.trainer.rl.rollouts.work_queue import WorkQueueClient, WorkQueueServer
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import ModelLimits

SECRET = "open-sesame"
BEARER = {"Authorization": f"Bearer {SECRET}"}
ONE = infer_body([[1, 2]], [2])
HEAD = "POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: localhost\r\n"
NEIGHBOUR = "127.0.0.2"


def read_all(connection: socket.socket, seconds: float = 20.0) -> bytes:
    """Everything until the server closes the connection."""
    connection.settimeout(seconds)
    answer = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := connection.recv(65536):
            answer += part
    return answer


def score(client: CriticClient) -> list[float]:
    return client.infer_async(torch.tensor([[1, 2]]), torch.tensor([2])).result(30)["rewards"].tolist()


def train(client: CriticClient, value: float) -> float:
    ones = torch.ones(1, 3)
    return client.train_async(torch.ones(1, 4, dtype=torch.int64), ones * value, ones, ones).result(30)


# ------------------------------------------------------------------ crowds of strangers

# A process of its own: threads here would slow down the server that they attack. Connections that the server closes
# are opened again at once.
CROWD = """
    import select, socket, sys, time
    port, count, often = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4] == "True"
    data = sys.argv[3].encode().decode("unicode_escape").encode("latin-1")
    connections, end = {}, time.monotonic() + 60
    print("ready", flush=True)
    while time.monotonic() < end:
        for number in range(count):
            try:
                if number not in connections:
                    connections[number] = socket.create_connection(("127.0.0.1", port), 5)
                    connections[number].settimeout(0)
                    connections[number].send(data)
                elif select.select([connections[number]], [], [], 0)[0] and not connections[number].recv(1, 2):
                    connections.pop(number).close()
                elif often:
                    connections[number].send(data)
            except BlockingIOError:
                pass
            except OSError:
                if number in connections:
                    connections.pop(number).close()
        time.sleep(0.002)
"""


@contextlib.contextmanager
def crowd(port: int, data: str, count: int = 30, *, often: bool = False) -> Iterator[None]:
    """``count`` connections that send ``data`` (again and again if ``often``) and read nothing."""
    command = [sys.executable, "-c", textwrap.dedent(CROWD), str(port), str(count), data, str(often)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            assert process.poll() is None
            yield
            assert process.poll() is None, "the attack has ended by itself"
        finally:
            process.kill()


OPEN_ROUTE = "GET /v2/models/critic_infer/config HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
STRANGERS = {
    "idle": "",
    "unread answers": OPEN_ROUTE * 200,
    "half a header": "GET /v2 HTTP/1.1\\r\\nHost",
    "half a body": "POST /v2/models/critic_infer/infer HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 60000\\r\\n\\r\\n{",
    "a proof, and silence": "HEAD /v2/health/live HTTP/1.1\\r\\nX-Challenge: a 127.0.0.1:1\\r\\n\\r\\n",
    "line ends": "\\r\\n\\r\\n" * 5000,
}


@pytest.mark.parametrize(
    ("kind", "often"),
    [
        *itertools.product(STRANGERS, [False]),
        ("unread answers", True),
        ("a proof, and silence", True),
        ("line ends", True),
    ],
)
def test_a_crowd_of_strangers_locks_nobody_out(kind: str, often: bool) -> None:
    """Of 24 connections they hold some, whatever they do with them; clients come and go, and stay."""
    limits = ConnectionLimits(max_connections=24, receive_seconds=600.0, first_request_seconds=600.0)
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits, "token": SECRET}) as server,
        critic_client(server.number, token=SECRET) as early,
        requests.Session() as other,
    ):
        assert score(early) == [3.0]
        outputs(other.post(f"{server.url}/v2/models/critic_infer/infer", json=ONE, headers=BEARER, timeout=20))
        kept = list(early._http._peer._sockets)
        with crowd(server.number, STRANGERS[kind], often=often):
            for number in range(2):
                with critic_client(server.number, token=SECRET) as late:
                    assert train(late, number) == 3.0 * number
                outputs(post(server, "critic_infer", ONE, headers=BEARER))
                assert score(early) == [3.0]
            outputs(other.post(f"{server.url}/v2/models/critic_infer/infer", json=ONE, headers=BEARER, timeout=20))
            assert server._http.num_connections <= 24
        assert list(early._http._peer._sockets) == kept, "who has shown the secret was cut off"


def test_a_crowd_at_the_work_queue_holds_up_no_worker() -> None:
    """Each of them asks as fast as it can, in bursts; to take ids takes little longer than without them."""
    server = WorkQueueServer(token=SECRET)
    server.queue.start_round(range(1000))

    def leases() -> list[float]:
        worker = WorkQueueClient("127.0.0.1", server.port, token=SECRET)
        seconds = []
        for _ in range(30):
            started = time.monotonic()
            assert worker.take(1)
            seconds.append(time.monotonic() - started)
        worker.close()
        return seconds

    try:
        quiet = leases()
        burst = "PUT /get_idx HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\n\\r\\n{}" * 500
        with crowd(server.port, burst, often=True):
            disturbed = leases()
    finally:
        server.stop()
    assert statistics.median(disturbed) < 20 * statistics.median(quiet) + 0.1, (quiet, disturbed)
    assert max(disturbed[1:]) < 2.0, disturbed


# ------------------------------------------------------------------ slow strangers


@pytest.mark.parametrize("piece", [b"\r\n", b"\r\n\r\n", b"\n", b"G"])
def test_who_sends_only_a_little_at_a_time_is_cut_off(piece: bytes) -> None:
    """Line ends are no request, and no sign of one; what is no line end is a header that never ends."""
    limits = ConnectionLimits(receive_seconds=0.2, first_request_seconds=0.2, idle_seconds=600.0)
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits, "token": SECRET}) as server,
        socket.create_connection(("127.0.0.1", server.number), 20) as connection,
    ):
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 20:
                connection.sendall(piece)
                if select.select([connection], [], [], 0.05)[0] and not connection.recv(65536):
                    break
        assert time.monotonic() - started < 10
        outputs(post(server, "critic_infer", ONE, headers=BEARER))


def test_who_reads_an_answer_by_drops_is_cut_off() -> None:
    limits = ConnectionLimits(receive_seconds=0.5, min_bytes_per_second=2**25)
    body = json.dumps({**ONE, "id": "x" * 2**23})  # the answer repeats it
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits, "token": SECRET}) as server,
        socket.create_connection(("127.0.0.1", server.number), 20) as connection,
    ):
        fields = f"Authorization: Bearer {SECRET}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"{HEAD}{fields}{body}".encode())
        started, received = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while part := connection.recv(2**16):
                received += len(part)
                time.sleep(0.05)
        assert received < len(body) and time.monotonic() - started < 15
        outputs(post(server, "critic_infer", ONE, headers=BEARER))


# ------------------------------------------------------------------ HTTP that can be read in two ways

NEXT = "POST /v2/models/critic_train/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
TRAIN = requests.Request("POST", "http://x", json=train_body()).prepare().body.decode()
AMBIGUOUS = {
    "length and chunks": "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "chunks and length 0": "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
    "two lengths": "Content-Length: 0\r\nContent-Length: 2\r\n\r\n{}",
    "equal lengths": "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": "Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": "Content-Length: +2\r\n\r\n{}",
    "a grouped length": "Content-Length: 1_0\r\n\r\n{}",
    "a negative length": "Content-Length: -2\r\n\r\n{}",
    "a broken length": "Content-Length: 2 0\r\n\r\n{}",
    "a folded field": "Content-Length:\r\n 2\r\n\r\n{}",
    "a folded other field": "X-A: b\r\n\tTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    "a blank before the colon": "Content-Length : 2\r\n\r\n{}",
    "a bare line feed": "X-A: b\nContent-Length: 2\r\n\r\n{}",
    "a bare carriage return": "X-A: b\rContent-Length: 2\r\n\r\n{}",
    "a NUL": "X-A: b\x00\r\nContent-Length: 2\r\n\r\n{}",
    "chunks twice": "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks in two fields": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "another coding": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a vertical tab": "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a size in C": "Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a signed size": "Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "a negative size": "Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    "a blank in a size": "Transfer-Encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n",
    "a chunk too long": "Transfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n",
    "a bad extension": "Transfer-Encoding: chunked\r\n\r\n2;\x01\r\n{}\r\n0\r\n\r\n",
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    """A service without a secret: what it takes for a request, it executes."""
    with serve(CountingBackend(), delay_us=0) as server:
        yield server


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_http_that_can_be_read_in_two_ways_is_refused(kind: str, plain: Any) -> None:
    """Nor is what follows it, on the same connection, taken for a request."""
    with socket.create_connection(("127.0.0.1", plain.number), 20) as connection:
        connection.sendall((HEAD + AMBIGUOUS[kind] + NEXT % (len(TRAIN), TRAIN)).encode("latin-1"))
        answer = read_all(connection)
    assert re.match(rb"HTTP/1\.[01] (400|411) ", answer), answer
    assert answer.count(b"HTTP/1.") == 1 and b'{"error": ' in answer
    assert b"training_steps_total 0.0" in requests.get(f"{plain.url}/metrics", timeout=20).content


# ------------------------------------------------------------------ neighbours that relay


class Relay:
    """Listens on ``host`` and passes on to 127.0.0.1:``target``, both ways, what ``edit`` makes of it.

    Attributes:
        heard: what clients sent, piece by piece.
    """

    def __init__(self, target: int, host: str = NEIGHBOUR, edit: Callable[[bytes, bool], bytes] | None = None) -> None:
        self.heard: list[bytes] = []
        self.servers: list[socket.socket] = []
        self._target = target
        self._edit = edit or (lambda data, is_answer: data)
        self._listener = socket.create_server((host, target))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.servers.append(socket.create_connection(("127.0.0.1", self._target), 20))
                for ends in ((client, self.servers[-1], False), (self.servers[-1], client, True)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not is_answer:
                    self.heard.append(data)
                sink.sendall(self._edit(data, is_answer))
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def lie(data: bytes, is_answer: bool) -> bytes:
    """Tell each side the address that it expects."""
    return data.replace(b"127.0.0.1:", b"127.0.0.2:") if is_answer else data.replace(b"127.0.0.2:", b"127.0.0.1:")


@pytest.mark.parametrize("edit", [None, lie])
@pytest.mark.parametrize("is_queue", [False, True])
def test_a_neighbour_that_relays_the_proof_gets_nothing(edit: Any, is_queue: bool) -> None:
    """Told an address at which the service does not listen, the client ends with an error that names the right one."""
    backend = CountingBackend()
    with contextlib.ExitStack() as stack:
        if is_queue:
            server = WorkQueueServer(token=SECRET)
            stack.callback(server.stop)
            server.queue.start_round([1])
            port, path = server.port, "/get_idx"
        else:
            port, path = stack.enter_context(serve(backend, http={"token": SECRET})).number, "/v2/models/m/infer"
        relay = stack.enter_context(Relay(port, edit=edit))
        client = HttpClient(f"http://{NEIGHBOUR}:{port}", token=SECRET)
        stack.callback(client.close)
        refusal = "has another secret" if edit else rf"listens on 127\.0\.0\.1:{port}: connect to that one"
        with pytest.raises(RequestRefusedError, match=refusal):
            client.request("PUT", path, limits=ClientLimits(total_s=20.0), body=b"prompts")
    heard = b"".join(relay.heard)
    assert heard.startswith(b"HEAD /v2/health/live") and b"X-Challenge" in heard
    assert SECRET.encode() not in heard and b"prompts" not in heard and b"X-Signature" not in heard
    assert backend.batches == [] and (not is_queue or len(server.queue) == 1)


def test_a_place_that_the_service_is_known_as_may_relay_and_still_learns_no_secret() -> None:
    """A tunnel, or a container's port mapping."""
    backend = CountingBackend()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    http = {"token": SECRET, "port": port, "known_as": (f"{NEIGHBOUR}:{port}",)}
    with serve(backend, delay_us=0, http=http), Relay(port) as relay:
        client = client_of(port, BRIEF, SECRET)
        assert train(client, 2.0) == 6.0
        client.close()
        assert b"critic_train" in b"".join(relay.heard) and SECRET.encode() not in b"".join(relay.heard)


BRIEF = ClientLimits(read_s=20.0, total_s=20.0, away_s=20.0, first_backoff_s=0.02, max_backoff_s=0.1)


def client_of(port: int, limits: ClientLimits, token: str | None) -> CriticClient:
    """A client of the service behind a `Relay`."""
    config = client_config(port, ip=NEIGHBOUR)
    return CriticClient(config, infer_limits=limits, train_limits=limits, token=token)


@contextlib.contextmanager
def behind(edit: Callable[[bytes, bool], bytes], token: str | None) -> Iterator[tuple[Any, CountingBackend, Relay]]:
    """A service, its model, and a relay to it that may be used."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    backend = CountingBackend()
    limits = ConnectionLimits(receive_seconds=0.5)
    http = {"token": token, "port": port, "known_as": (f"{NEIGHBOUR}:{port}",), "connections": limits}
    with serve(backend, delay_us=0, http=http) as server, Relay(port, edit=edit) as relay:
        yield server, backend, relay


def test_what_was_sent_once_cannot_be_sent_again() -> None:
    """Neither on a new connection, with all that went before it, nor on the same one, nor changed."""
    with behind(lambda data, is_answer: data, SECRET) as (server, backend, relay):
        client = client_of(server.number, BRIEF, SECRET)
        train(client, 1.0)
        stream = b"".join(relay.heard)
        request = stream[stream.index(b"POST ") :]
        assert backend.trained == [3.0] and b"X-Signature: " in request
        client._http._peer._sockets.clear()  # so that closing the client leaves the recorded connection open
        relay.servers[0].sendall(request)
        with socket.create_connection(("127.0.0.1", server.number), 20) as again:
            again.sendall(stream[: -len(request)])
            assert again.recv(65536).startswith(b"HTTP/1.1 200")  # the proof, which anybody may ask for
            again.sendall(request)
            assert read_all(again).startswith(b"HTTP/1.1 401")
        for changed in (
            request,
            request.replace(b"critic_train", b"critic_save"),
            re.sub(rb"X-S\S+ .*\r\n", b"", request),
        ):
            with socket.create_connection(("127.0.0.1", server.number), 20) as fresh:
                fresh.sendall(changed)
                assert fresh.recv(65536).startswith(b"HTTP/1.1 401")
        time.sleep(0.3)
        assert backend.trained == [3.0] and backend.saves == 0
        client.close()


# ------------------------------------------------------------------ a wire that flips bits


class Flips:
    """Flips one bit of every ``nth`` piece of data that goes one way, anywhere in it."""

    def __init__(self, nth: int, seed: int, *, of_answers: bool) -> None:
        self.count = 0
        self._nth, self._of_answers = nth, of_answers
        self._random = random.Random(seed)
        self._pieces = 0
        self.is_on = False

    def __call__(self, data: bytes, is_answer: bool) -> bytes:
        if not self.is_on or is_answer != self._of_answers:
            return data
        self._pieces += 1
        if self._pieces % self._nth:
            return data
        self.count += 1
        damaged = bytearray(data)
        damaged[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


@pytest.mark.parametrize("token", [SECRET, None])
@pytest.mark.parametrize("of_answers", [False, True])
def test_flipped_bits_change_no_history(of_answers: bool, token: str | None) -> None:
    """Of requests and answers, of headers and bodies: what was damaged is sent again, and trained once, as it was."""
    values = [round(0.1 * number, 1) for number in range(20)]
    flips = Flips(4, seed=1, of_answers=of_answers)
    limits = ClientLimits(
        proof_s=0.5,
        read_s=2.0,
        body_s=0.3,
        total_s=60.0,
        away_s=60.0,
        first_backoff_s=0.01,
        max_backoff_s=0.05,
        internal_errors=3,
    )
    with behind(flips, token) as (server, backend, _):
        client = client_of(server.number, limits, token)
        client.wait_until_ready(20)
        flips.is_on = True
        losses = [train(client, value) for value in values]
        scores = [score(client) for _ in range(5)]
        flips.is_on = False
        client.close()
        history = server.ledger.history
    sums = [float((torch.ones(1, 3) * value).sum()) for value in values]
    assert backend.trained == sums and losses == pytest.approx(sums, abs=0.0) and scores == [[3.0]] * 5
    assert flips.count >= 5
    with serve(CountingBackend()) as other, critic_client(other.number) as client:
        for value in values:
            train(client, value)
        assert other.ledger.history == history


# ------------------------------------------------------------------ servers that fall silent


@contextlib.contextmanager
def silent_after(step: str) -> Iterator[int]:
    """The port of a program that behaves like a service with the secret, until a step of the connection."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                asked = connection.recv(65536)
                if step != "connecting":
                    challenge = re.search(rb"X-Challenge: (.*)\r\n", asked)
                    assert challenge is not None
                    proof = prove(SECRET, challenge[1].decode(), f"127.0.0.1:{port}")
                    assert proof is not None
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Proof: {proof[0]}\r\n\r\n"
                    connection.sendall(head[: len(head) // 2 if step == "half a proof" else None].encode())
                if step == "the answer's head":
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun")
                stop.wait(30)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield port
        stop.set()


SILENT = {  # after which step; the limit that ends the wait; what the error says
    "connecting": ("proof_s", "did not prove in time"),
    "half a proof": ("proof_s", "did not prove in time"),
    "the proof": ("send_s", "the request was taken too slowly"),
    "the request": ("read_s", "the answer did not come in time"),
    "the answer's head": ("body_s", "the answer did not come in time"),
}


@pytest.mark.parametrize("step", SILENT)
def test_no_step_of_a_connection_waits_for_long_or_in_silence(
    step: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even of a training request, whose answer may take an hour: only a whole request is waited for so long."""
    monkeypatch.setattr(http_client, "_WORD_SECONDS", 0.2)
    key, message = SILENT[step]
    limits = ClientLimits(**({"read_s": 3900.0, "total_s": 2.0, "away_s": 2.0} | {key: 0.6}))
    with silent_after(step) as port:
        client = HttpClient(f"http://127.0.0.1:{port}", token=SECRET)
        started = time.monotonic()
        body = bytes(2**26 if step == "the proof" else 1000)
        with pytest.raises(ServerUnavailableError, match=message):
            client.request("POST", "/x", limits=limits, body=body)
        assert time.monotonic() - started < 15
        client.close()
    assert "the server has been silent for 0 s" in caplog.text


def test_the_steps_have_limits_by_default() -> None:
    limits = ClientLimits(read_s=3900.0, total_s=7800.0)
    assert limits.connect_s <= 10 and limits.proof_s <= 30 and limits.send_s <= 60 and limits.body_s <= 120


# ------------------------------------------------------------------ every request gets an answer


def test_a_panic_in_the_tokenizer_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The exceptions of Rust's panics, and of sys.exit(), are no `Exception`."""

    class Panic(BaseException):
        pass

    def tokenize(text: str) -> list[int]:
        if "panic" in text:
            raise Panic("called `Option::unwrap()` on a `None` value")
        if "exit" in text:
            sys.exit(3)
        return [1, 2]

    endpoints = critic_endpoints(ModelLimits(64, 1000), combined=True, tokenize=tokenize)
    with serve(CountingBackend(), endpoints=endpoints, delay_us=0) as server:
        for text, word in (("panic", "Panic: called"), ("exit", "SystemExit: 3")) * 5:
            sentences = {"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            answer = post(server, "critic_infer", {"inputs": [sentences]})
            assert answer.status_code == 500 and word in answer.json()["error"]
        outputs(post(server, "critic_infer", ONE))
    assert "Traceback" in caplog.text


def test_the_digest_of_a_large_body_is_the_standard_librarys() -> None:
    """Third-party clients and services can sign with what every language has; see docs/service.md."""
    assert body_digest(b"abc") == hashlib.sha256(b"abc").hexdigest()
    one, other = Signatures(b"key"), Signatures(b"key")
    fields = [("Content-Type", "a/b"), ("X-B", "1")]
    assert one.of_request("PUT", "/x", fields, "d") == other.of_request("PUT", "/x", [("X_B", "1"), *fields[:1]], "d")
    assert one.of_request("PUT", "/x", fields, "d") != other.of_answer(200, fields, "d")
