"""How many ids the work queue serves in a second when hundreds of workers ask at once.

    python benchmarks/work_queue.py [--workers 256] [--ids 16384] [--batches 1 8] [--rounds 3] [--json FILE]

Simulated workers, each with a connection of its own, take ids as fast as the queue answers, all beginning at the same
moment. They send what a rank sends, from a few processes on the same cores. Each batch size, the
ids that a worker asks for at a time, has rounds of its own. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import json_path, next_answer, positive_int, print_table, spread, write_json

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.rl.rollouts.work_queue import WorkQueueServer
from nemo_style_aligner.wording import counted

LIMIT_SECONDS = 300.0
TOKEN = "benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--workers", type=positive_int, default=256)
    parser.add_argument("--ids", type=positive_int, default=16384, help="in a round")
    parser.add_argument(
        "--batches", type=positive_int, nargs="+", default=[1, 8], help="ids that a worker asks for at a time"
    )
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--processes", type=positive_int, default=2, help="over which the workers are divided")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    results = {
        str(batch): summarise([run_round(args.workers, args.ids, batch, args.processes) for _ in range(args.rounds)])
        for batch in args.batches
    }
    rows = [
        (
            counted(int(batch), "ids"),
            *(f"{row[key]['median']:.0f}" for key in ("ids_per_second", "requests_per_second")),
            *(f"{row['latency_seconds'][key]['median'] * 1e3:.1f} ms" for key in ("p50", "p99")),
            f"{row['burst_seconds']['median'] * 1e3:.0f} ms",
        )
        for batch, row in results.items()
    ]
    workers, ids, rounds = (counted(getattr(args, name), name) for name in ("workers", "ids", "rounds"))
    print(f"{workers}, {ids}; medians of {rounds}")
    print_table(("asked for", "ids/s", "requests/s", "p50", "p99", "first answers"), rows)
    write_json(args.json, {"settings": {key: str(value) for key, value in vars(args).items()}, "batches": results})


def run_round(num_workers: int, num_ids: int, batch: int, processes: int) -> dict[str, Any]:
    """Run one round with a queue of its own; returns its rates and latencies."""
    context = multiprocessing.get_context("spawn")
    processes = min(processes, num_workers)
    shares = [num_workers // processes + (i < num_workers % processes) for i in range(processes)]
    barrier, answers = context.Barrier(processes), context.Queue()
    server = WorkQueueServer(token=TOKEN)
    server.queue.workers = num_workers
    server.queue.start_round(range(num_ids))
    loads = [
        context.Process(target=run_load, args=(server.port, process, count, batch, barrier, answers))
        for process, count in enumerate(shares)
    ]
    for load in loads:
        load.start()
    try:
        found = [next_answer(answers, loads, 2 * LIMIT_SECONDS) for _ in loads]
        taken = sum(worker["ids"] for worker in found)
    finally:
        for load in loads:
            load.join(10)
            load.kill()
        server.stop()
    if taken != num_ids:
        raise SystemExit(f"{taken} ids were taken instead of {num_ids}")
    seconds = max(worker["ended"] for worker in found) - min(worker["started"] for worker in found)
    latencies = sorted(latency for worker in found for latency in worker["latencies"])
    return {
        "requests": len(latencies),
        "ids_per_second": num_ids / seconds,
        "requests_per_second": len(latencies) / seconds,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[int(len(latencies) * 0.99)],
        "burst_seconds": max(first for worker in found for first in worker["first_answers"]),
    }


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, smallest and largest of the rounds."""
    rows = {key: spread([row[key] for row in rounds]) for key in rounds[0] if key != "requests"}
    return {
        "requests": rounds[0]["requests"],
        "latency_seconds": {key: rows.pop(key) for key in ("p50", "p99")},
        **rows,
    }


# ---- the load -----------------------------------------------------------------------------------


def run_load(port: int, process: int, num_workers: int, batch: int, barrier: Any, answers: Any) -> None:
    """Simulate some of the workers in this process, each with a connection of its own."""

    async def everybody() -> dict[str, Any]:
        workers = [Worker(f"{process}-{i}", batch) for i in range(num_workers)]
        await asyncio.gather(*(worker.connect(port) for worker in workers))
        barrier.wait(LIMIT_SECONDS)
        started = time.monotonic()  # the same clock in all processes
        await asyncio.gather(*(worker.run() for worker in workers))
        return {
            "started": started,
            "ended": time.monotonic(),
            "ids": sum(worker.num_ids for worker in workers),
            "latencies": [latency for worker in workers for latency in worker.latencies],
            "first_answers": [worker.latencies[0] for worker in workers],
        }

    answers.put(asyncio.run(everybody()))


class Worker:
    """Takes ids over a bare connection: a library's client would be busier than the queue."""

    def __init__(self, name: str, batch: int) -> None:
        self.latencies: list[float] = []
        self.num_ids = 0
        self._name = name
        self._batch = batch

    async def connect(self, port: int) -> None:
        """Open the connection."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)

    async def run(self) -> None:
        """Take ids until there are none left."""
        number = 0
        while ids := await self._put("/get_idx", {"batch_size": self._batch, "request": number}):
            self.num_ids, number = self.num_ids + len(ids), number + 1
        self._writer.close()

    async def _put(self, path: str, content: dict[str, Any]) -> Any:
        body = json.dumps({**content, "worker": self._name}).encode()
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
        answer = await self._reader.readexactly(length)
        self.latencies.append(time.perf_counter() - started)
        if " 200 " not in lines[0]:
            raise SystemExit(f"{path}: {lines}: {answer.decode()}")
        return json.loads(answer)


if __name__ == "__main__":
    main()
