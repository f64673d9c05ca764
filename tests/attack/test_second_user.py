"""Another user of the same machine: a process with another uid knocks at a run's services and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import Artefacts
from served_critic import CountingBackend, critic_client, infer_body, serve, train_body

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.guard.secret import make_secret
from nemo_style_aligner.trainer.rl.rollouts.work_queue import WorkQueueClient, WorkQueueServer
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition, batch_digest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: what another user of this machine can do; only root can become one"
)

NOBODY = 65534

# Becomes the other user once it runs: the interpreter itself may be where only root can read.
STRANGER = """
import json, os, sys, urllib.error, urllib.request
user, asked = int(sys.argv[1]), json.load(sys.stdin)
for url in asked["alive"]:
    assert urllib.request.urlopen(url).status == 200  # open to all; and imports the rest of what a request needs
os.setgroups([])
os.setgid(user)
os.setuid(user)
found = {}
for path, mode in asked["files"]:
    try:
        os.close(os.open(os.path.join(path, "new") if mode == "create" else path,
                         {"read": os.O_RDONLY, "write": os.O_WRONLY, "create": os.O_WRONLY | os.O_CREAT}[mode]))
        found[f"{mode} {path}"] = "done"
    except OSError as error:
        found[f"{mode} {path}"] = type(error).__name__
for method, url, body in asked["requests"]:
    data = None if body is None else json.dumps(body).encode()
    for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer guess"}):
        fields = header | {"Content-Type": "application/json"}
        try:
            status = urllib.request.urlopen(urllib.request.Request(url, data, fields, method=method)).status
        except urllib.error.HTTPError as error:
            status = error.code
        found[f"{method} {url} {header}"] = status
json.dump(found, sys.stdout)
"""


def as_stranger(folder: Path, **asked: list) -> dict[str, str | int]:
    """What came of reading, writing and creating ``files`` and of ``requests``, tried by the user nobody.

    Paths are relative to ``folder``: pytest closes the folders above, but here only the files' own locks shall count.
    """
    everything = {"alive": [], "files": [], "requests": []} | asked
    command = [sys.executable, "-I", "-c", STRANGER, str(NOBODY)]
    question = json.dumps(everything)
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Becomes the other user, listens where a service was, and says what it was sent.
IMPOSTOR = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
for _ in range(3):
    connection, _ = listener.accept()
    print(repr(connection.recv(65536)), flush=True)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    connection.settimeout(5)
    print(repr(connection.recv(65536)), flush=True)
    connection.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that everybody may enter, and the umask of most systems."""
    before = os.umask(0o022)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "open").touch(0o666)
    (tmp_path / "results" / "open").chmod(0o666)
    yield tmp_path / "results"
    os.umask(before)


def test_the_services_of_a_run_are_closed(folder: Path, attack_count: Callable[..., None]) -> None:
    """No values and rewards, no training, no save, no metrics; no work from the queue, and none taken off it."""
    secret = make_secret(folder / "secret")
    backend = CountingBackend()
    bodies = {
        "critic_infer": infer_body([[1, 2]], [2]),
        "critic_train": train_body(rows=1, width=2),
        "critic_save": {"inputs": [{"name": "dummy_var", "datatype": "INT64", "shape": [1], "data": [0]}]},
    }
    work = {"batch_size": 1}
    work_server = WorkQueueServer(token=secret.value)
    work_server.queue.start_round([1, 2])
    try:
        with serve(backend, http={"token": secret.value}) as server:
            work_url = f"http://127.0.0.1:{work_server.port}"
            found = as_stranger(
                folder,
                alive=[f"{server.url}/v2/health/live", f"{work_url}/health"],
                files=[["open", "write"], ["secret", "read"], ["secret", "write"]],
                requests=[
                    *(["POST", f"{server.url}/v2/models/{name}/infer", body] for name, body in bodies.items()),
                    *(["GET", f"{server.url}{path}", None] for path in ("/metrics", "/v2", "/v2/models/critic_infer")),
                    ["PUT", f"{work_url}/get_idx", work],
                    ["GET", f"{work_url}/status", None],
                ],
            )
            assert backend.batches == backend.trained == [] and backend.saves == 0
            with critic_client(server.number, token=secret.value) as client:  # the owner's requests go through
                client.save_async().result(20)
        worker = WorkQueueClient("127.0.0.1", work_server.port, token=secret.value)
        assert worker.take(2) == [1, 2]
        worker.close()
    finally:
        work_server.stop()
    assert found.pop("write open") == "done"  # the stranger does try
    assert found.pop("read secret") == found.pop("write secret") == "PermissionError"
    assert set(found.values()) == {401} and len(found) == 3 * 8, found
    assert secret.value not in json.dumps(found)
    attack_count("requests without the secret", tried=len(found), refused=len(found))


def test_who_takes_the_port_of_a_critic_that_is_away_learns_nothing(folder: Path) -> None:
    """Neither the secret nor what is asked; and the run goes on as soon as its critic is there."""
    secret, port = make_secret(folder / "secret").value, free_port()
    command = [sys.executable, "-I", "-c", IMPOSTOR, str(NOBODY), str(port)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as impostor,
        critic_client(port, token=secret) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.wait_until_ready, 60)
        assert impostor.stdout is not None
        heard = impostor.stdout.read()
        assert impostor.wait(20) == 0
        with serve(CountingBackend(), http={"token": secret, "port": port}):
            waiting.result(60)
    assert heard.count("X-Challenge") == 3 and secret not in heard and "Authorization" not in heard


def test_the_journal_is_closed(folder: Path, attack_count: Callable[..., None]) -> None:
    """It holds prompts and responses, and what a critic is trained on again."""
    journal = CriticJournal(folder / "log" / "critic_journal")
    position = CriticPosition("run", 1, "initial")
    batch = {name: np.ones((2, 4)) for name in ("tokens", "returns", "prev_values", "mask")}
    journal.begin_run(position)
    journal.write(position, batch, batch_digest(batch))
    paths = [str(path.relative_to(folder)) for path in journal.directory.iterdir()]
    assert len(paths) == 2
    files = [[path, mode] for path in paths for mode in ("read", "write")]
    found = as_stranger(folder, files=[*files, ["log/critic_journal", "create"], ["open", "read"]])
    assert found.pop("read open") == "done"
    assert set(found.values()) == {"PermissionError"} and len(found) == 5, found
    attack_count("files opened by another user", tried=len(found), refused=len(found))


def test_nobody_else_writes_to_checkpoints(artefacts: Artefacts, attack_count: Callable[..., None]) -> None:
    """What finished jobs left: checkpoints, archives, metrics, logs. Who may read them, the user's umask says."""
    paths = [path for path in artefacts.folder.rglob("*") if path.is_dir() or path.is_file()]
    assert any(path.suffix == ".distcp" for path in paths) and artefacts.sft in paths
    files = [[str(path.relative_to(artefacts.folder)), "create" if path.is_dir() else "write"] for path in paths]
    found = as_stranger(artefacts.folder, files=files)
    assert len(found) == len(paths) and set(found.values()) == {"PermissionError"}, found
    attack_count("files opened by another user", tried=len(found), refused=len(found))
