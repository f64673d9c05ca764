"""A critic service in this process over real HTTP, with a model whose answers are known, and requests to it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import requests
import torch

from nemo_style_aligner.guard.http_client import ClientLimits
from nemo_style_aligner.trainer.config.schema import RemoteCritic
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import ModelLimits
from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
from nemo_style_aligner.trainer.services.routes import HttpSettings
from nemo_style_aligner.trainer.services.score_client import ScoreClient

VOCAB = 1000


class CountingBackend:
    """values[i, t] = sum of tokens[i, :t+1]; reward = sum of the row's true tokens. Causal, like a model."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.trained: list[float] = []
        self.saves = 0
        self.gate = threading.Event()
        self.gate.set()
        self.fail = False

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.gate.wait(30)
        if self.fail:
            raise RuntimeError("the model broke")
        self.batches.append(tuple(tokens.shape))
        sums = tokens.cumsum(1)
        rewards = sums.gather(1, lengths[:, None] - 1)
        return {"values": sums[:, :-1].double(), "rewards": rewards}

    def train(self, tokens, returns, prev_values, mask) -> float:
        assert self.gate.wait(30)
        self.trained.append(float(returns.sum()))
        return float((returns * mask).sum())

    def save(self, keep_history: str | None = None) -> concurrent.futures.Future[None]:
        self.saves += 1
        written: concurrent.futures.Future[None] = concurrent.futures.Future()
        written.set_result(None)
        return written

    def restore(self, run_id: str, histories: list[str]) -> int | None:
        return histories.index("initial") if "initial" in histories else None


@contextlib.contextmanager
def serve(backend, *, endpoints=None, max_rows=8, delay_us=20000, http=None, multiple=1, max_length=64, **dispatch):
    endpoints = endpoints or critic_endpoints(
        ModelLimits(max_length, VOCAB),
        combined=True,
        tokenize=lambda text: [*text.encode()],
        length_multiple=multiple,
    )
    server = ModelServer(
        endpoints,
        HttpSettings(**({"port": 0} | (http or {}))),
        DispatchSettings(max_rows, delay_us, **dispatch),
    )
    server.outcome = None

    def run() -> None:
        try:
            server.run(backend)
            server.outcome = "ended"
        except RuntimeError as error:
            server.outcome = error

    port = server.port
    thread = threading.Thread(target=run)
    thread.start()
    server.url, server.thread, server.number = f"http://127.0.0.1:{port}", thread, port
    try:
        wait_for(lambda: get(server, "/v2/health/ready").status_code == 200)
        yield server
    finally:
        backend.gate.set()
        server.request_stop()
        thread.join(30)
        assert not thread.is_alive()


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def get(server, path, **options):
    return requests.get(server.url + path, timeout=20, **options)


def post(server, model, body, **options):
    return requests.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=30, **options)


def tensor(name, array, datatype=None) -> dict:
    array = np.asarray(array)
    datatype = datatype or {"i": "INT64", "f": "FP32"}[array.dtype.kind]
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def infer_body(tokens, lengths, **more) -> dict:
    return {"inputs": [tensor("tokens", tokens), tensor("sequence_lengths", np.reshape(lengths, (-1, 1)))], **more}


def train_body(value=1.0, rows=2, width=4, **parameters) -> dict:
    tokens = np.ones((rows, width), dtype=np.int64)
    rest = np.full((rows, width - 1), value, dtype=np.float32)
    inputs = [tensor("tokens", tokens), tensor("returns", rest), tensor("prev_values", rest)]
    return {"inputs": [*inputs, tensor("mask", np.ones_like(rest))], "parameters": parameters}


def outputs(response) -> dict[str, np.ndarray]:
    assert response.status_code == 200, response.text
    return {o["name"]: np.reshape(o["data"], o["shape"]) for o in response.json()["outputs"]}


def client_config(port: int, combined: bool = True, pad_to_length=None, ip: str = "127.0.0.1") -> RemoteCritic:
    return RemoteCritic(
        pad_to_length=pad_to_length,
        combine_rm_and_critic_server=combined,
        critic={
            "name": {"train": "critic_train", "infer": "critic_infer", "save": "critic_save"},
            "ip": ip,
            "port": port,
        },
    )


TEST_LIMITS = ClientLimits(total_s=20.0, read_s=20.0)


@contextlib.contextmanager
def critic_client(*args, limits=TEST_LIMITS, **options) -> Iterator[CriticClient]:
    config = {name: options.pop(name) for name in ("combined", "pad_to_length") if name in options}
    client = CriticClient(client_config(*args, **config), infer_limits=limits, train_limits=limits, **options)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def reward_client(port: int, limits=TEST_LIMITS, **options) -> Iterator[ScoreClient]:
    client = ScoreClient(f"http://127.0.0.1:{port}", "reward_model", limits=limits, **options)
    try:
        yield client
    finally:
        client.close()


def expected(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `CountingBackend` answers: rewards [b] and values [b, s-1], zero where no token follows."""
    steps, lengths = np.arange(tokens.shape[1]), np.asarray(lengths)[:, None]
    sums = np.where(steps < lengths, tokens, 0).cumsum(1)
    return sums[:, -1], np.where(steps < lengths - 1, sums, 0)[:, :-1]
