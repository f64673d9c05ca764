"""What the critic and reward service costs in addition to bare forward passes of the same model.

    python benchmarks/service.py [--clients 1 8 64] [--shape 30m] [--length 128] [--batch-rows 16] [--secret]

The service runs in a process of its own, with critic and reward model, over real HTTP; clients are the actor's, in
threads here, each with one connection, and never pause. Bare passes of the same model, in the same process and on the
same threads, are timed before and after: "cost" is what the service takes in addition to these, "pauses" the share of
time without a pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
import numpy as np
import torch
import torch.distributed as dist
from common import (
    PRECISIONS,
    SHAPES,
    at_least,
    available_cores,
    json_path,
    next_answer,
    positive_float,
    positive_int,
    print_table,
    write_json,
)

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.http_client import ClientLimits, HttpClient, server_url
from nemo_style_aligner.guard.protocol import encode_infer_request
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel
from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.endpoints import ModelLimits
from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
from nemo_style_aligner.trainer.services.routes import HttpSettings
from nemo_style_aligner.wording import counted

START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
LIMITS = ClientLimits(read_s=REQUEST_SECONDS, total_s=REQUEST_SECONDS, max_backoff_s=0.2)
SECRET = "of-this-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--clients", type=positive_int, nargs="+", default=(1, 8, 64))
    parser.add_argument("--shape", choices=SHAPES, default="30m")
    parser.add_argument("--precision", choices=PRECISIONS, default="32")
    parser.add_argument("--length", type=positive_int, default=128, help="tokens in a sequence")
    parser.add_argument("--rows", type=positive_int, default=1, help="sequences in a request")
    parser.add_argument("--batch-rows", type=positive_int, default=16, help="inference_micro_batch_size: a full batch")
    parser.add_argument("--delay", type=at_least(0), default=2000, help="max_queue_delay_microseconds")
    parser.add_argument("--seconds", type=positive_float, default=10.0, help="for each number of clients")
    parser.add_argument("--form", choices=("binary", "json"), default="binary", help="encoding of tensors on the wire")
    parser.add_argument("--secret", action="store_true", help="both ends have one, and prove it")
    parser.add_argument("--threads", type=positive_int, default=available_cores(), help="of the model")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    stages, server = run(args)
    results = [summarise(clients, stage, server, args) for clients, stage in zip(args.clients, stages, strict=True)]
    bare = {rows: statistics.median(seconds) for rows, seconds in server["bare"].items()}
    report(results, bare, args)
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(args.json, {"settings": settings, "bare_seconds": bare, "clients": results})


# ---- the service's process ----------------------------------------------------------------------


class Timed:
    """Critic and reward model as the critic job has them, untrained, noting when each pass began and ended."""

    def __init__(self, args: argparse.Namespace) -> None:
        head = RewardHeadConfig()
        model = build_model(SHAPES[args.shape], {}, parse_precision(args.precision), head=head, trainable=False)
        batching = MicroBatching(args.batch_rows)
        self._rewards = RewardModel(model, head, batching)
        self._critic = Critic(
            model,
            cast(Any, None),  # the optimizer of a critic that is not trained here
            head,
            training_batching=MicroBatching(1),
            global_batch_size=1,
            forward_batching=batching,
            loss_clip=0.0,
        )
        self.passes: list[tuple[float, float, int]] = []

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        began = time.monotonic()
        answer = {"rewards": self._rewards.rewards(tokens, lengths), "values": self._critic.values(tokens, lengths)}
        self.passes.append((began, time.monotonic(), len(tokens)))
        return answer


def serve(args: argparse.Namespace, rendezvous: str, answers: Any) -> None:
    """Time bare passes, serve until SIGTERM, time them again."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    initialize_model_parallel(1, 1, seed=1)
    backend = Timed(args)
    bare: dict[int, list[float]] = {rows: [] for rows in bare_sizes(args.rows, args.batch_rows)}
    time_bare(backend, bare, args)
    server = ModelServer(
        critic_endpoints(ModelLimits(args.length, SHAPES[args.shape].vocab_size), combined=True),
        HttpSettings(port=0, token=SECRET if args.secret else None, max_outstanding_requests=2 * max(args.clients)),
        DispatchSettings(args.batch_rows, args.delay),
    )
    answers.put(server.port)
    backend.passes.clear()
    server.run(backend)
    passes = list(backend.passes)
    time_bare(backend, bare, args)
    answers.put({"passes": passes, "bare": bare})
    dist.destroy_process_group()


def bare_sizes(rows: int, batch_rows: int) -> list[int]:
    """Rows of the bare passes, the largest as large as the service's: a request of more rows than a batch is one."""
    return sorted({1, batch_rows // 2 or 1, batch_rows, max(rows, batch_rows)})


def time_bare(backend: Timed, bare: dict[int, list[float]], args: argparse.Namespace, rounds: int = 3) -> None:
    """Append the seconds of ``rounds`` passes, after one to warm up, to the list of each number of rows."""
    for number in range(rounds + 1):
        for rows, seconds in bare.items():
            tokens = torch.randint(SHAPES[args.shape].vocab_size, (rows, args.length))
            started = time.perf_counter()
            backend.infer(tokens, torch.full((rows,), args.length))
            if number:
                seconds.append(time.perf_counter() - started)


# ---- the clients --------------------------------------------------------------------------------

Request = tuple[float, float]  # when it was sent and answered


def run(args: argparse.Namespace) -> tuple[list[list[Request]], dict[str, Any]]:
    """The requests of each stage, and what the service's process has measured."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(args, f"file://{folder}/ranks", answers))
        process.start()
        try:
            port = next_answer(answers, [process], START_SECONDS)
            stages = [load(clients, port, args) for clients in args.clients]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            server = next_answer(answers, [process], START_SECONDS)
            process.join(30)
        finally:
            process.kill()
    return stages, server


def load(clients: int, port: int, args: argparse.Namespace) -> list[Request]:
    """Send requests from ``clients`` threads for ``args.seconds``; returns those that were answered."""
    done: list[Request] = []
    failures: list[str] = []
    stop = threading.Event()

    def client(number: int) -> None:
        body, headers = request_body(np.random.default_rng(number), args)
        service = HttpClient(server_url("127.0.0.1", port), token=SECRET if args.secret else None)
        while not stop.is_set():
            sent = time.monotonic()
            try:
                service.request("POST", "/v2/models/critic_infer/infer", limits=LIMITS, body=body, headers=headers)
            except UserError as error:
                failures.append(str(error))
                return
            done.append((sent, time.monotonic()))
        service.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(args.seconds)
    stop.set()
    for thread in threads:
        thread.join(REQUEST_SECONDS)
    if failures or not done:
        why = failures[0] if failures else "no answer, give more --seconds"
        raise SystemExit(f"{counted(clients, 'clients')}: {why}")
    return done


def request_body(generator: np.random.Generator, args: argparse.Namespace) -> tuple[bytes, dict[str, str]]:
    tokens = generator.integers(0, SHAPES[args.shape].vocab_size, (args.rows, args.length))
    inputs = {"tokens": tokens, "sequence_lengths": np.full((args.rows, 1), args.length)}
    return encode_infer_request(inputs, binary=args.form == "binary")


# ---- what comes out -----------------------------------------------------------------------------


def summarise(clients: int, done: list[Request], server: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one stage, without its first tenth, the warm-up, and its end, when clients stop."""
    first, last = min(sent for sent, _ in done), max(sent for sent, _ in done)
    first += (last - first) / 10
    passes = [entry for entry in server["passes"] if first <= entry[0] and entry[1] <= last]
    if len(passes) < 2:
        raise SystemExit(f"{counted(clients, 'clients')}: too few batches in {args.seconds:g} s, give more --seconds")
    # From the beginning of the first pass to that of the last: there are as many pauses as passes that count.
    wall = passes[-1][0] - passes[0][0]
    rows = sum(entry[2] for entry in passes[:-1])
    sizes = sorted(server["bare"])
    expected = sum(
        float(np.interp(entry[2], sizes, [statistics.median(server["bare"][size]) for size in sizes]))
        for entry in passes[:-1]
    )
    latencies = sorted(answered - sent for sent, answered in done if sent >= first)
    p50, p95, p99 = (float(np.percentile(latencies, percent)) for percent in (50, 95, 99))
    return {
        "clients": clients,
        "requests": len(done),
        "requests_per_second": rows / args.rows / wall,
        "rows_per_batch": rows / (len(passes) - 1),
        "latency_seconds": {"p50": p50, "p95": p95, "p99": p99},
        "bare_rows_per_second": rows / expected,
        "cost": wall / expected - 1,
        "pauses": 1 - sum(entry[1] - entry[0] for entry in passes[:-1]) / wall,
    }


def report(results: Sequence[dict[str, Any]], bare: dict[int, float], args: argparse.Namespace) -> None:
    """Print the table."""
    tokens, sequences = counted(args.length, "tokens"), counted(args.rows, "sequences")
    print(f"\n{args.shape}, {tokens}, {sequences} per request, {args.form}, {counted(args.threads, 'threads')}")
    passes = ", ".join(f"{counted(rows, 'rows')} {1000 * seconds:.1f} ms" for rows, seconds in bare.items())
    print(f"bare passes: {passes}\n")
    rows = [
        [
            str(entry["clients"]),
            f"{entry['requests_per_second']:.1f}",
            *(f"{1000 * entry['latency_seconds'][name]:.0f}" for name in ("p50", "p95", "p99")),
            f"{entry['rows_per_batch']:.1f}",
            f"{entry['bare_rows_per_second'] / args.rows:.1f}",
            f"{entry['cost']:+.1%}",
            f"{entry['pauses']:.1%}",
        ]
        for entry in results
    ]
    header = ["clients", "requests/s", "p50 ms", "p95 ms", "p99 ms", "rows/batch", "bare requests/s", "cost", "pauses"]
    print_table(header, rows)


if __name__ == "__main__":
    main()
