"""What the service does to clients that are slow, silent, many or strange, and to neighbours of bad rows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from served_critic import VOCAB, CountingBackend, critic_client, get, infer_body, outputs, post, serve, wait_for

from nemo_style_aligner.guard import http_server
from nemo_style_aligner.guard.http_server import ConnectionLimits
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import ModelLimits

ROOT = Path(__file__).resolve().parents[1]
ONE = infer_body([[1, 2]], [2])
HEAD = b"POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def answer_ok(environ: Any, start_response: Any) -> list[bytes]:
    """An application that always says the same."""
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            answer += part
    return answer


# ------------------------------------------------------------------ connections


def test_slow_and_silent_clients_are_cut_off_and_others_served() -> None:
    """A header that never ends, a body that never comes, a byte now and then, and nothing at all."""
    limits = ConnectionLimits(receive_seconds=1.0, first_request_seconds=1.0, min_bytes_per_second=1e6)
    with serve(CountingBackend(), delay_us=0, http={"connections": limits}) as server:
        started = time.monotonic()
        beginnings = [b"", b"POST /v2", HEAD % 100, HEAD % 100 + b"\r\n", HEAD % 100 + b"\r\n{"]
        silent = [connect(server.number) for _ in range(4 * len(beginnings))]
        for connection, beginning in zip(silent, 4 * beginnings, strict=True):
            connection.sendall(beginning)
        dripping = connect(server.number)
        dripping.sendall(HEAD % 10**6 + b"\r\n")

        def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    dripping.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        outputs(post(server, "critic_infer", ONE))
        with concurrent.futures.ThreadPoolExecutor(len(silent) + 1) as pool:
            assert set(pool.map(read_all, [*silent, dripping])) == {b""}  # returns when the server has closed them
        assert time.monotonic() - started >= 1.0
        outputs(post(server, "critic_infer", ONE))


def test_a_client_within_the_rate_may_take_its_time() -> None:
    limits = ConnectionLimits(receive_seconds=0.7, min_bytes_per_second=10.0)
    body = json.dumps(ONE).encode()
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits}) as server,
        connect(server.number) as connection,
    ):
        connection.sendall(HEAD % len(body) + b"\r\n" + body[:100])
        time.sleep(2.0)  # 100 bytes and the head at 10 bytes/s allow 20 s
        connection.sendall(body[100:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answers_is_cut_off() -> None:
    """Nor does one that has stopped reading keep its connection."""
    limits = ConnectionLimits(receive_seconds=0.5)
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits}) as server,
        connect(server.number) as connection,
    ):
        connection.settimeout(60)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                connection.sendall(b"GET /v2/models/critic_infer/config HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        outputs(post(server, "critic_infer", ONE))


def test_idle_connections_make_room_for_new_ones() -> None:
    limits = ConnectionLimits(max_connections=20)
    with serve(CountingBackend(), delay_us=0, http={"connections": limits}) as server:
        idle = [connect(server.number) for _ in range(40)]
        try:
            assert limits.connections() == 20
            outputs(post(server, "critic_infer", ONE))
        finally:
            for connection in idle:
                connection.close()


def test_requests_half_sent_by_strangers_make_room_for_new_ones() -> None:
    """Not one that began before them and showed the token: it goes on when they are gone."""
    limits = ConnectionLimits(max_connections=20, receive_seconds=600.0)
    body, shown = json.dumps(ONE).encode(), {"Authorization": "Bearer open sesame"}
    with (
        serve(CountingBackend(), delay_us=0, http={"connections": limits, "token": "open sesame"}) as server,
        connect(server.number) as known,
    ):
        known.sendall(HEAD % len(body) + b"Authorization: Bearer open sesame\r\n\r\n" + body[:100])
        strangers = [connect(server.number) for _ in range(40)]
        try:
            for number, connection in enumerate(strangers):
                connection.sendall(HEAD % 1000 + (b"\r\n" if number % 2 else b""))
            outputs(post(server, "critic_infer", ONE, headers=shown))
            known.sendall(body[100:])
            assert known.recv(100).startswith(b"HTTP/1.1 200")
        finally:
            for connection in strangers:
                connection.close()


def test_without_descriptors_new_connections_wait_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    """One line says what to do; as soon as there are descriptors again, who waited is answered."""
    server = http_server.WsgiServer(answer_ok, "127.0.0.1", 0, max_body_bytes=1000, name="the test")
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def is_answered(connection: socket.socket) -> bool:
        answer = b""
        while not answer.endswith(b"ok") and (part := connection.recv(1000)):
            answer += part
        return answer.startswith(b"HTTP/1.1 200")

    with connect(server.port) as known, socket.socket() as late:
        known.sendall(request)
        assert is_answered(known)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 10, limits[1]))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            late.settimeout(30)
            late.connect(("127.0.0.1", server.port))
            late.sendall(request)
            wait_for(lambda: "cannot accept" in caplog.text)
            began = time.process_time()
            for _ in range(10):
                known.sendall(request)
                assert is_answered(known)
                time.sleep(0.1)
            assert time.process_time() - began < 0.5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in taken:
                os.close(descriptor)
        assert is_answered(late)
    server.stop()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "the test cannot accept connections (Too many open files), 1 are open" in lines[0]
    assert "ulimit -n" in lines[0]


def test_large_requests_and_answers() -> None:
    rows, width = 1000, 2500  # 20 MB of tokens in binary form, and 10 MB of values; with JSON more of both
    limits = ModelLimits(width, VOCAB)
    with (
        serve(CountingBackend(), endpoints=critic_endpoints(limits, combined=True), max_rows=rows) as server,
        critic_client(server.number) as client,
    ):
        tokens = torch.ones(rows, width, dtype=torch.int64)
        assert client.infer_async(tokens, torch.full((rows,), width)).result(60)["values"].shape == (rows, width - 1)
        long = {**ONE, "id": "x" * 2**25}  # the answer repeats it
        assert len(post(server, "critic_infer", long).content) > 2**25


def test_a_large_body_is_not_taken_from_strangers() -> None:
    """Answered from the header: the body need not be sent, and is not stored."""
    with serve(CountingBackend(), http={"token": "s3cret"}) as server:
        for field in (b"", b"Authorization: Bearer wrong\r\n", b"Expect: 100-continue\r\n"):
            with connect(server.number) as connection:
                connection.sendall(HEAD % 10**8 + field + b"\r\n")
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 401") and b"application/json" in answer
                assert "Authorization: Bearer" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        body = infer_body(np.ones((400, 60), dtype=np.int64), np.full(400, 60))
        answer = post(server, "critic_infer", body, headers={"Authorization": "Bearer s3cret"})
        assert outputs(answer)["rewards"].tolist() == [[60.0]] * 400
        assert int(answer.request.headers["Content-Length"]) > ConnectionLimits().max_body_without_token


def test_http_that_cannot_be_read_is_refused_in_json() -> None:
    with serve(CountingBackend()) as server:
        for request, status, word in (
            (b"nonsense\r\n\r\n", b"400", b"error"),
            (b"GET / HTTP/1.1\r\nBad Header\r\n\r\n", b"400", b"header"),
            (b"GET / HTTP/1.1\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n", b"400", b"Content-Length"),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 300000 + b"\r\n\r\n", b"431", b"header"),
            (HEAD % 2**60 + b"\r\n", b"413", b"larger than 1073741824 bytes"),
            (HEAD % 2**60 + b"Expect: 100-continue\r\n\r\n", b"413", b"larger than 1073741824 bytes"),
        ):
            with connect(server.number) as connection:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    connection.sendall(request)
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1."), answer
                assert answer[9:12] == status and b'{"error": ' in answer and word in answer, answer


# ------------------------------------------------------------------ batches


def test_a_row_of_nan_spoils_no_other_request() -> None:
    class Sick(CountingBackend):
        def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
            answer = {name: output.double() for name, output in super().infer(tokens, lengths).items()}
            answer["rewards"][tokens[:, 0] == 7] = float("nan")
            return answer

    backend = Sick()
    with serve(backend, max_rows=8, delay_us=200000) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [infer_body([[7 if k == 3 else 1, 2]], [2]) for k in range(8)]
        answers = list(pool.map(lambda body: post(server, "critic_infer", body), bodies))
        assert answers[3].status_code == 500 and "NaN" in answers[3].json()["error"]
        for k in {*range(8)} - {3}:
            assert outputs(answers[k])["rewards"] == [[3.0]]
        assert server.thread.is_alive()
        assert len(backend.batches) < 8, "nothing was merged"


def test_a_request_given_up_in_the_batch_or_in_the_queue_spoils_no_other() -> None:
    backend = CountingBackend()
    # Long enough for a busy machine to see the first one in its batch.
    impatient = infer_body([[1, 2]], [2], parameters={"timeout": 3_000_000})
    with serve(backend, max_rows=4, delay_us=1000) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        backend.gate.clear()
        first = pool.submit(post, server, "critic_infer", impatient)
        wait_for(lambda: "outstanding_requests 1.0" in get(server, "/metrics").text)
        others = [pool.submit(post, server, "critic_infer", body) for body in (ONE, impatient, ONE, ONE)]
        assert first.result(20).status_code == others[1].result(20).status_code == 504
        backend.gate.set()
        for k in (0, 2, 3):
            assert outputs(others[k].result(20))["rewards"] == [[3.0]]
    assert sum(rows for rows, _ in backend.batches) == 4  # the one given up in the queue was not computed


def test_a_full_batch_does_not_wait_and_the_largest_is_not_exceeded() -> None:
    """With a delay of a minute, only full batches leave at once."""
    backend = CountingBackend()
    settings = {"max_rows": 4, "delay_us": 60_000_000}
    with serve(backend, **settings) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        outputs(post(server, "critic_infer", infer_body([[1, 2]] * 4, [2] * 4)))
        outputs(post(server, "critic_infer", infer_body([[1, 2]] * 9, [2] * 9)))  # larger than any: taken alone
        backend.gate.clear()
        held = pool.submit(post, server, "critic_infer", infer_body([[1, 2]] * 4, [2] * 4))
        wait_for(lambda: "outstanding_requests 1.0" in get(server, "/metrics").text)
        rest = [pool.submit(post, server, "critic_infer", ONE) for _ in range(8)]
        wait_for(lambda: "outstanding_requests 9.0" in get(server, "/metrics").text)
        backend.gate.set()
        for future in [held, *rest]:
            outputs(future.result(20))
    assert [rows for rows, _ in backend.batches] == [4, 9, 4, 4, 4]


# ------------------------------------------------------------------ shutdown


SERVICE = """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from served_critic import CountingBackend, DispatchSettings, HttpSettings, ModelLimits, ModelServer
    from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints

    class Slow(CountingBackend):
        def infer(self, tokens, lengths):
            time.sleep(0.05)
            return super().infer(tokens, lengths)

    server = ModelServer(critic_endpoints(combined=True), HttpSettings(port=0), DispatchSettings(2))
    print(f"port {server.port}", flush=True)
    server.run(Slow())
"""


def test_who_comes_again_after_the_last_answer_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server stops; but those who come all the time do not keep it open."""
    monkeypatch.setattr(http_server, "_QUIET_SECONDS", 5.0)
    monkeypatch.setattr(http_server, "_LINGER_SECONDS", 6.0)

    server = http_server.WsgiServer(answer_ok, "127.0.0.1", 0, max_body_bytes=1000, name="test")
    url = f"http://127.0.0.1:{server.port}"
    assert requests.get(url, timeout=20).text == "ok"
    stopping = threading.Thread(target=server.stop)
    started = time.monotonic()
    stopping.start()
    assert requests.get(url, timeout=20).text == "ok", "the port was closed at once"
    with pytest.raises(requests.ConnectionError):
        while time.monotonic() - started < 60:
            requests.get(url, timeout=20)
    stopping.join(20)
    assert not stopping.is_alive()


def test_streams_go_out_as_they_are_made_and_show_when_they_break_off() -> None:
    """In chunks to HTTP/1.1, unframed to 1.0, whole to strangers; whoever leaves or does not read ends the stream."""
    closed: list[str] = []
    go_on = threading.Event()

    def app(environ: Any, start_response: Any) -> Any:
        def parts() -> Any:
            try:
                yield b"data: 1\n\n"
                if environ["PATH_INFO"] == "/endless":
                    while environ[http_server.CLIENT_IS_THERE_KEY]():
                        yield b"x" * 65536
                elif environ["PATH_INFO"] == "/broken":
                    raise ValueError("a mistake")
                assert go_on.wait(20)
                yield b"data: 2\n\n"
            finally:
                closed.append(environ["PATH_INFO"])

        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return parts()

    limits = ConnectionLimits(receive_seconds=1.0)
    server = http_server.WsgiServer(app, "127.0.0.1", 0, max_body_bytes=1000, name="test", limits=limits)
    guarded = http_server.WsgiServer(
        app, "127.0.0.1", 0, max_body_bytes=1000, name="test", token="secret", is_open=lambda path: True
    )
    ask = "GET /{} HTTP/1.{}\r\nHost: localhost\r\n\r\n"
    with connect(server.port) as new, connect(server.port) as old, connect(guarded.port) as stranger:
        for connection, version in ((new, 1), (old, 0), (stranger, 1)):
            connection.sendall(ask.format("good", version).encode())
        first = b""
        while b"data: 1" not in first:
            first += new.recv(65536)
        go_on.set()
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest += new.recv(65536)
        assert b"transfer-encoding: chunked" in first.lower() and rest == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
        new.sendall(ask.format("broken", 1).encode())  # on the same connection
        assert read_all(new).endswith(b"9\r\ndata: 1\n\n\r\n"), "without a last chunk, it is not complete"
        assert read_all(old).endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n")
        whole = read_all(stranger)
        assert b"Content-Length: 18" in whole and whole.endswith(b"data: 1\n\ndata: 2\n\n")
    with connect(server.port) as slow:
        slow.sendall(ask.format("endless", 1).encode())
        wait_for(lambda: closed.count("/endless") == 1)  # nobody reads
    with connect(server.port) as gone:
        gone.sendall(ask.format("endless", 1).encode())
        gone.recv(100)
    wait_for(lambda: closed.count("/endless") == 2)
    assert closed.count("/good") == 3 and closed.count("/broken") == 1


def test_a_server_that_breaks_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep its port, and answer nobody. With the work queue's it is the same."""
    errors: list[BaseException] = []

    monkeypatch.setattr(http_server, "end_process", errors.append)
    server = http_server.WsgiServer(answer_ok, "127.0.0.1", 0, max_body_bytes=1000, name="test")
    monkeypatch.setattr(server, "_has_room", lambda: 1 / 0)
    wait_for(lambda: bool(errors))
    assert isinstance(errors[0], ZeroDivisionError)


def test_sigterm_under_load_finishes_what_was_taken(tmp_path: Path) -> None:
    """16 clients that never pause: each request gets its answer, a 503, or finds the port closed; none is cut off."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(SERVICE), str(Path(__file__).parent)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().split()[1]}"
            wait_for(lambda: requests.get(f"{url}/v2/health/ready", timeout=20).status_code == 200)
            outcomes: list[str] = []

            def ask_on() -> None:
                while True:
                    # A connection of its own: one kept open may be closed between two requests, by right.
                    try:
                        answer = requests.post(f"{url}/v2/models/critic_infer/infer", json=ONE, timeout=30)
                    except requests.ConnectionError as error:
                        outcomes.append("refused" if "refused" in str(error) else f"cut off: {error}")
                        return
                    outcomes.append(str(answer.status_code))
                    if answer.status_code != 200:
                        return

            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                asking = [pool.submit(ask_on) for _ in range(16)]
                wait_for(lambda: len(outcomes) >= 20)
                process.send_signal(signal.SIGTERM)
                for future in asking:
                    future.result(60)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert outcomes.count("200") >= 20
    assert set(outcomes) <= {"200", "503", "refused"}, set(outcomes)


def test_without_a_secret_names_of_other_sites_are_not_answered() -> None:
    """A page of such a site reaches the port, as the browser takes it for the site's own."""
    server = http_server.WsgiServer(answer_ok, "127.0.0.1", 0, max_body_bytes=1000, name="test")
    names = {"localhost:1": 200, "127.0.0.1": 200, "[::1]:9": 200, "evil.example:80": 403, "localhost.evil.ex": 403}
    for name, status in names.items():
        reply = requests.get(f"http://127.0.0.1:{server.port}", headers={"Host": name}, timeout=20)
        assert reply.status_code == status, name
    server.stop()


PAGE = "http://page.example"
OF_OTHER_SITES: dict[str, tuple[str, dict[str, str], int]] = {
    "a form": ("POST", {"Content-Type": "application/x-www-form-urlencoded", "Origin": PAGE}, 403),
    "a form of an old browser": ("POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "a form with a file": ("POST", {"Content-Type": 'Multipart/Form-Data; boundary="a"'}, 415),
    "a text": ("POST", {"Content-Type": "text/plain;charset=UTF-8"}, 415),
    "a text without a type": ("POST", {"Origin": PAGE}, 403),
    "a page from a file": ("POST", {"Content-Type": "application/json", "Origin": "null"}, 403),
    "another port": ("POST", {"Content-Type": "application/json", "Origin": "http://127.0.0.1:1"}, 403),
    "another port, as browsers say": ("POST", {"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"}, 403),
    "an image": ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    "a script": ("GET", {"Origin": PAGE}, 403),
    "a form as a page": ("POST", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
    "a link": ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
    "the address bar": ("GET", {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),
    "its own page": ("POST", {"Content-Type": "application/json", "Origin": "http://{own}"}, 200),
    "its own page behind a proxy": ("POST", {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}, 200),
    "a client": ("POST", {"Content-Type": "application/octet-stream"}, 200),
    "a client that names no type": ("POST", {}, 200),
}


@pytest.mark.parametrize("token", [None, "s3cret"])
def test_no_page_of_another_site_uses_a_browsers_password(token: str | None) -> None:
    server = http_server.WsgiServer(answer_ok, "127.0.0.1", 0, max_body_bytes=1000, name="test", token=token)
    own = f"127.0.0.1:{server.port}"
    for case, (method, fields, status) in OF_OTHER_SITES.items():
        sent = {name: value.format(own=own) for name, value in fields.items()}
        reply = requests.request(method, f"http://{own}", headers=sent, data=b"{}", auth=("me", "s3cret"), timeout=20)
        assert reply.status_code == status, (case, reply.text)
    server.stop()


def test_no_page_trains_or_saves_the_critic() -> None:
    with serve(CountingBackend(), http={"token": "s3cret"}) as server:
        for model in ("critic_train", "critic_save", "critic_infer"):
            for fields in ({"Content-Type": "text/plain"}, {"Origin": PAGE}):
                url = f"{server.url}/v2/models/{model}/infer"
                reply = requests.post(url, json.dumps(ONE), headers=fields, auth=("me", "s3cret"), timeout=20)
                assert reply.status_code in (403, 415), (model, fields)
