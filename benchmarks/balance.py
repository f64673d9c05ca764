"""The rollout work queue against shards dealt out beforehand, in real processes, on responses of long-tailed lengths.

    python benchmarks/balance.py [--workers 2] [--requests 128] [--rounds 5] [--json FILE]

Each worker is a process with a generation engine and one thread. Worker 0 serves the queue, as rank 0 does in training.
With --sleep the engines are replaced by sleeping in proportion to a response's length: for more workers than cores.
Then the queue alone: how many requests it serves in a second. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, available_cores, long_tailed, print_table, spread, write_json
from model_files import random_weights

from nemo_style_aligner.generation.embedded.engine import EmbeddedEngine
from nemo_style_aligner.generation.engine import GenerationRequest, SamplingParams
from nemo_style_aligner.rollout.work_client import WorkQueueClient
from nemo_style_aligner.rollout.work_queue import WorkQueue
from nemo_style_aligner.rollout.work_server import WorkQueueServer
from nemo_style_aligner.rollout.work_source import StaticPartition, WorkSource

START_SECONDS = 300.0
ROUND_SECONDS = 1800.0
LOAD_PROCESSES = 2
MODES = ("work queue", "static shards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=max(2, available_cores()))
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 512), metavar=("LOW", "HIGH"))
    parser.add_argument("--shape", choices=SHAPES, default="30m")
    parser.add_argument("--slots", type=int, default=8, help="sequences that a worker generates at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--sleep", type=float, metavar="SECONDS", help="sleep so long for each token, generate nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulated-workers", type=int, default=256, help="that ask the queue at the same time")
    parser.add_argument("--simulated-requests", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Other lengths in every round, the same for both modes: one draw may happen to suit the shards.
    draws = [long_tailed(args.requests, args.lengths, random.Random(number)) for number in range(args.rounds + 1)]
    results = summarise(run_rounds(args, draws), draws)
    report(results, args)
    served = measure_queue(args.simulated_workers, args.simulated_requests)
    latency = served["latency_seconds"]
    print(
        f"the queue alone, {served['workers']} workers: {served['requests_per_second']:.0f} requests/s, "
        f"{served['samples_per_second']:.0f} samples/s leased and completed, "
        f"latency median {latency['median'] * 1e3:.1f} ms, 99% within {latency['p99'] * 1e3:.1f} ms"
    )
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(args.json, {"settings": settings, "modes": results, "queue": served})


# ---- queue against shards -----------------------------------------------------------------------


def run_rounds(args: argparse.Namespace, draws: list[list[int]]) -> list[dict[str, Any]]:
    """Every worker's answer for every round: when it was done, how many samples and tokens it made."""
    context = multiprocessing.get_context("spawn")
    barrier, answers, address = context.Barrier(args.workers), context.Queue(), context.Queue()
    # Workers share the cores: threads that spin while they wait would keep them from one another.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    workers = [
        context.Process(target=run_worker, args=(rank, args, draws, barrier, answers, address))
        for rank in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + START_SECONDS + 2 * (args.rounds + 1) * ROUND_SECONDS
    try:
        while len(found) < args.workers * len(MODES) * args.rounds:
            with contextlib.suppress(queue.Empty):
                found.append(answers.get(timeout=1))
            if any(worker.exitcode for worker in workers) or time.monotonic() > deadline:
                raise SystemExit("a worker failed or took too long")
        for worker in workers:
            worker.join(30)
    finally:
        for worker in workers:
            worker.kill()
    return found


def run_worker(
    rank: int, args: argparse.Namespace, draws: list[list[int]], barrier: Any, answers: Any, address: Any
) -> None:
    """A worker's process: the rounds of both modes in turn, the first of each to warm up."""
    torch.set_num_threads(1)
    generate = Sleeping(args.sleep) if args.sleep else Generating(args)
    server = None
    if rank == 0:
        server = WorkQueueServer(WorkQueue())
        for _ in range(args.workers):
            address.put(server.port)
    port = address.get(timeout=START_SECONDS)
    sources: dict[str, WorkSource] = {
        "work queue": WorkQueueClient("127.0.0.1", port, server=server, poll_seconds=0.02),
        "static shards": StaticPartition(rank, args.workers),
    }
    for number, lengths in enumerate(draws):
        for mode, source in sources.items():
            generate.begin(lengths)
            source.start_round(number, range(args.requests))
            barrier.wait(START_SECONDS + ROUND_SECONDS)
            started = time.perf_counter()
            done, finished = run_round(source, generate)
            barrier.wait(ROUND_SECONDS)
            wall = time.perf_counter() - started
            if number:
                busy = (finished or started) - started
                answers.put(
                    {
                        "mode": mode,
                        "round": number,
                        "worker": rank,
                        "wall_seconds": wall,
                        "busy_seconds": busy,
                        "tokens": sum(lengths[i] for i in done),
                    }
                )
    barrier.wait(60)  # nobody needs the queue any more
    for source in sources.values():
        source.close()


def run_round(source: WorkSource, generate: Generating | Sleeping) -> tuple[list[int], float | None]:
    """Work until the round is complete, as `RolloutCollector` does; the samples made, and when the last was."""
    done: list[int] = []
    finished = None
    while first := source.lease(1, wait=True):
        for sample in generate(leased(first, source)):
            done += source.complete([sample])
            finished = time.perf_counter()
    return done, finished


def leased(first: list[int], source: WorkSource) -> Iterator[int]:
    """Samples for as long as there are any to lease; the engine asks whenever a slot is free."""
    ids = first
    while ids:
        yield from ids
        ids = source.lease(1)


class Generating:
    """Generation by an engine of this worker's own, every response as long as `begin` was told."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._architecture = SHAPES[args.shape]
        self._lengths: list[int] = []
        self._engine = EmbeddedEngine(
            self._architecture,
            dtype=torch.bfloat16,
            num_slots=args.slots,
            max_sequence_length=args.prompt_tokens + args.lengths[1],
            eos_id=0,
        )
        self._engine.build()
        self._sampling = SamplingParams(max_new_tokens=args.lengths[1], ignore_eos=True)
        draw = random.Random(1)
        self._prompts = [
            [draw.randrange(1, self._architecture.vocab_size) for _ in range(args.prompt_tokens)]
            for _ in range(args.requests)
        ]

    def begin(self, lengths: list[int]) -> None:
        """Refit, as before every rollout phase: nothing remembered of the prompts of the round before is used again."""
        self._lengths = lengths
        self._engine.refit(random_weights(self._architecture), self._engine.weight_version + 1)

    def __call__(self, samples: Iterator[int]) -> Iterator[int]:
        """Samples as they are leased -> samples as they are finished."""
        requests = (GenerationRequest(i, self._prompts[i], i, self._lengths[i]) for i in samples)
        for result in self._engine.generate(requests, self._sampling):
            if len(result.token_ids) != self._lengths[result.request_id]:
                raise RuntimeError(f"sample {result.request_id} has {len(result.token_ids)} tokens")
            yield result.request_id


class Sleeping:
    """One sample after the other, each by sleeping in proportion to its length."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lengths: list[int] = []

    def begin(self, lengths: list[int]) -> None:
        """Take the round's lengths."""
        self._lengths = lengths

    def __call__(self, samples: Iterator[int]) -> Iterator[int]:
        """See `Generating`."""
        for sample in samples:
            time.sleep(self._seconds * self._lengths[sample])
            yield sample


def summarise(found: Sequence[dict[str, Any]], draws: list[list[int]]) -> dict[str, Any]:
    """By mode: wall time, tokens per second, and the share of the time that workers had nothing to do."""
    results: dict[str, Any] = {}
    for mode in MODES:
        walls, rates, idle = [], [], []
        for number, lengths in enumerate(draws[1:], start=1):
            answers = [answer for answer in found if (answer["mode"], answer["round"]) == (mode, number)]
            answers.sort(key=lambda answer: answer["worker"])
            made = sum(answer["tokens"] for answer in answers)
            if made != sum(lengths):
                raise SystemExit(f"{mode}, round {number}: {made} tokens were made instead of {sum(lengths)}")
            walls.append(max(answer["wall_seconds"] for answer in answers))
            rates.append(made / walls[-1])
            idle.append([1 - answer["busy_seconds"] / walls[-1] for answer in answers])
        by_worker = [statistics.median(shares) for shares in zip(*idle, strict=True)]
        results[mode] = {
            "wall_seconds": spread(walls),
            "tokens_per_second": spread(rates),
            "tokens": sum(map(sum, draws[1:])),
            "idle_share_by_worker": by_worker,
            "idle_share": statistics.fmean(map(statistics.fmean, idle)),
        }
    queue_rate, static_rate = (results[mode]["tokens_per_second"]["median"] for mode in MODES)
    results["queue_is_times_faster"] = queue_rate / static_rate
    return results


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    what = f"{args.sleep:g} s of sleep per token" if args.sleep else f"engines of {args.shape}, {args.slots} slots"
    print(f"{args.workers} workers, {args.requests} responses of {args.lengths[0]} to {args.lengths[1]} tokens; {what}")
    rows = []
    for mode in MODES:
        wall = results[mode]["wall_seconds"]
        rows.append(
            (
                mode,
                f"{wall['median']:.2f} s",
                f"{wall['min']:.2f}-{wall['max']:.2f}",
                f"{results[mode]['tokens_per_second']['median']:.0f}",
                f"{results[mode]['idle_share']:.1%}",
                " ".join(f"{share:.0%}" for share in results[mode]["idle_share_by_worker"]),
            )
        )
    print_table(("", "wall time", "rounds", "tokens/s", "idle", "by worker"), rows)
    print(f"the queue is {results['queue_is_times_faster']:.2f} x as fast\n")


# ---- the queue alone ----------------------------------------------------------------------------


def measure_queue(num_workers: int, num_samples: int) -> dict[str, Any]:
    """Let simulated workers lease and complete samples one by one, as fast as the queue answers."""
    context = multiprocessing.get_context("spawn")
    processes = min(LOAD_PROCESSES, num_workers)
    shares = [num_workers // processes + (i < num_workers % processes) for i in range(processes)]
    barrier, answers = context.Barrier(processes + 1), context.Queue()
    work = WorkQueue()
    server = WorkQueueServer(work)
    work.start_round(0, range(num_samples))
    loads = [context.Process(target=run_load, args=(server.port, n, barrier, answers)) for n in shares]
    for load in loads:
        load.start()
    try:
        barrier.wait(START_SECONDS)
        started = time.perf_counter()
        latencies = [latency for _ in loads for latency in answers.get(timeout=ROUND_SECONDS)]
        seconds = time.perf_counter() - started
        completed = work.status()["total"]["completed"]
    finally:
        for load in loads:
            load.join(10)
            load.kill()
        server.stop()
    if completed != num_samples:
        raise SystemExit(f"{completed} samples were completed instead of {num_samples}")
    latencies.sort()
    return {
        "workers": num_workers,
        "samples": num_samples,
        "requests": len(latencies),
        "seconds": seconds,
        "requests_per_second": len(latencies) / seconds,
        "samples_per_second": num_samples / seconds,
        "latency_seconds": {
            "median": statistics.median(latencies),
            "p99": latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))],
        },
    }


def run_load(port: int, num_workers: int, barrier: Any, answers: Any) -> None:
    """A process of simulated workers, each a thread with a connection of its own."""
    latencies: list[float] = []

    def work() -> None:
        client = WorkQueueClient("127.0.0.1", port)
        client.start_round(0, [])
        client.complete([-1])  # opens the connection
        connected.wait(START_SECONDS)
        begin.wait()
        mine = []
        while True:
            started = time.perf_counter()
            ids = client.lease(1)
            mine.append(time.perf_counter() - started)
            if not ids:
                break
            started = time.perf_counter()
            client.complete(ids)
            mine.append(time.perf_counter() - started)
        latencies.extend(mine)
        client.close()

    connected, begin = threading.Barrier(num_workers + 1), threading.Event()
    threads = [threading.Thread(target=work) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    connected.wait(START_SECONDS)
    barrier.wait(START_SECONDS)
    begin.set()
    for thread in threads:
        thread.join()
    answers.put(latencies)


if __name__ == "__main__":
    main()
