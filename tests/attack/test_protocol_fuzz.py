"""Tens of thousands of malformed requests: to the decoder, to the whole application, and over real sockets."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
from served_critic import VOCAB, CountingBackend, get, infer_body, outputs, post, serve

from attack.conftest import ROUNDS
from attack.fuzz_requests import LENGTH_FIELD, fuzzed_requests, good_request
from nemo_style_aligner.guard.protocol import ProtocolError, decode_infer_request, decode_infer_response
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import ModelLimits
from nemo_style_aligner.trainer.services.routes import HttpSettings, create_app

SECONDS_PER_REQUEST = 20.0  # a request that takes longer hangs


def test_the_decoder_reads_or_refuses(attack_count: Callable[..., None]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for number, (_, body, headers) in enumerate(fuzzed_requests(1, 20000 * ROUNDS)):
        if number % 4 == 0:  # the client's half of the codec
            body = body.replace(b'"inputs"', b'"outputs"', 1)
            if LENGTH_FIELD in headers and headers[LENGTH_FIELD].isdigit():
                headers = {LENGTH_FIELD: str(int(headers[LENGTH_FIELD]) + 1)}
        for decode in (decode_infer_response,) if number % 4 == 0 else (decode_infer_request,):
            try:
                decoded = decode(body, headers.get(LENGTH_FIELD))
            except ProtocolError as error:
                assert error.status == 400
                counts["refused"] += 1
                continue
            counts["read"] += 1
            for tensor in (decoded if decode is decode_infer_response else decoded.inputs).values():
                assert tensor.array.nbytes <= 64 * len(body) + 64, "a small body became a large array"
    attack_count("requests to the decoder", tried=counts.total(), refused=counts["refused"])
    assert counts["refused"] > 10000 and counts["read"] > 1000


@contextlib.contextmanager
def application() -> Iterator[tuple]:
    """The app in this process, without sockets, with the model server behind it."""
    endpoints = critic_endpoints(ModelLimits(64, VOCAB), combined=True, tokenize=lambda text: [*text.encode()][:60])
    with serve(CountingBackend(), endpoints=endpoints, delay_us=0) as server:
        app = create_app(endpoints, server.queue, HttpSettings(port=0), server.metrics)
        yield app.test_client(), server.thread


def test_the_application_answers_every_request(attack_count: Callable[..., None]) -> None:
    counts: collections.Counter[int] = collections.Counter()
    generator = random.Random(2)
    with application() as (client, dispatcher):
        for kind, body, headers in fuzzed_requests(2, 4000 * ROUNDS):
            model = generator.choice(["critic_infer"] * 4 + ["critic_train", "critic_save"])
            started = time.monotonic()
            answer = client.post(f"/v2/models/{model}/infer", data=body, headers=headers)
            assert answer.status_code < 500, (kind, body[:300], headers, answer.data)
            assert time.monotonic() - started < SECONDS_PER_REQUEST, (kind, body[:300])
            if answer.status_code != 200:
                assert isinstance(answer.json["error"], str), answer.data
            counts[answer.status_code] += 1
        assert dispatcher.is_alive()
        body, headers = good_request(generator)
        assert client.post("/v2/models/critic_infer/infer", data=body, headers=headers).status_code == 200
    attack_count("requests to the application", tried=counts.total(), refused=counts.total() - counts[200])
    assert set(counts) <= {200, 400}
    assert counts[400] > counts[200] > 100


def http_request(model: str, body: bytes, headers: dict[str, str], length: int | None = None) -> bytes:
    fields = {"Host": "test", "Content-Length": str(len(body) if length is None else length), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v2/models/{model}/infer HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def sent_over_a_socket(port: int, data: bytes, give_up: bool) -> bytes:
    """What the server says to these bytes; with ``give_up`` the client is gone after it has sent them."""
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS_PER_REQUEST) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),  # it may answer before it has read all
    ):
        connection.sendall(data)
        if not give_up:
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
    return answer


def test_the_server_survives_what_comes_over_sockets(attack_count: Callable[..., None]) -> None:
    """Damaged requests, damaged HTTP, bodies cut off, clients that go away; then it still answers."""
    generator = random.Random(3)
    counts: collections.Counter[str] = collections.Counter()
    with serve(CountingBackend(), delay_us=0, http={"max_body_bytes": 500000}) as server:
        for number, (_, body, headers) in enumerate(fuzzed_requests(3, 400 * ROUNDS)):
            headers = {name: value for name, value in headers.items() if value == value.strip()}
            data = http_request("critic_infer", body, headers)
            way = number % 4
            if way == 1:  # truncated: the length promises more than comes
                data = http_request("critic_infer", body, headers, length=len(body) + generator.randint(1, 10**6))
            elif way == 2:  # the HTTP head itself is damaged
                head = bytearray(data[: data.index(b"\r\n\r\n") + 4])
                for _ in range(3):
                    head[generator.randrange(len(head))] = generator.randrange(256)
                data = bytes(head) + body
            elif way == 3:
                data = data[: generator.randrange(1, len(data))]
            answer = sent_over_a_socket(server.number, data, give_up=way == 3)
            status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "none"
            assert status[0] in "n24", (data[:300], answer[:300])
            counts[status] += 1
        assert get(server, "/v2/health/ready").status_code == 200
        np.testing.assert_array_equal(
            outputs(post(server, "critic_infer", infer_body([[1, 2]], [2])))["rewards"], [[3]]
        )
    attack_count("requests over sockets", tried=counts.total(), refused=counts.total() - counts["200"])
    assert counts["400"] > 50 and counts["none"] > 50
