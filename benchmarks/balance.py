"""The rollout work queue against shards dealt out beforehand, in real processes, on responses of long-tailed lengths.

    python benchmarks/balance.py [--workers 2] [--requests 128] [--rounds 5] [--json FILE]

Each worker is a process with a generation engine and one thread. Worker 0 serves the queue, as rank 0 does in training.
With --sleep the engines are replaced by sleeping in proportion to a response's length: for more workers than cores.
"longest first" is the queue when it knows how long the responses will be. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
import torch
from common import (
    SHAPES,
    Bounds,
    available_cores,
    json_path,
    long_tailed,
    next_answer,
    positive_float,
    positive_int,
    print_table,
    spread,
    write_json,
)
from model_files import random_weights

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.rl.rollouts.work_queue import (
    StaticPartition,
    WorkQueueClient,
    WorkQueueServer,
    WorkSource,
)
from nemo_style_aligner.wording import counted

START_SECONDS = 300.0
ROUND_SECONDS = 1800.0
MODES = ("work queue", "longest first", "static shards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--workers", type=positive_int, default=max(2, available_cores()))
    parser.add_argument("--requests", type=positive_int, default=128)
    parser.add_argument("--lengths", action=Bounds, default=(8, 512), metavar=("LOW", "HIGH"))
    parser.add_argument("--shape", choices=SHAPES, default="30m")
    parser.add_argument(
        "--slots", type=positive_int, default=8, help="sequences that a worker generates at the same time"
    )
    parser.add_argument("--prompt-tokens", type=positive_int, default=32)
    parser.add_argument(
        "--sleep", type=positive_float, metavar="SECONDS", help="sleep this long for each token instead of generating"
    )
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    # Other lengths in every round, the same for all modes: a single draw might happen to suit the shards.
    draws = [long_tailed(args.requests, args.lengths, random.Random(number)) for number in range(args.rounds + 1)]
    results = summarise(run_rounds(args, draws), draws)
    report(results, args)
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(args.json, {"settings": settings, "modes": results})


# ---- queue against shards -----------------------------------------------------------------------


def run_rounds(args: argparse.Namespace, draws: list[list[int]]) -> list[dict[str, Any]]:
    """Every worker's answer for every round and mode: wall time, busy time, and how many tokens it made."""
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
    seconds = START_SECONDS + 2 * (1 + len(MODES)) * ROUND_SECONDS  # the first answer comes after a round to warm up
    try:
        found = [next_answer(answers, workers, seconds) for _ in range(args.workers * len(MODES) * args.rounds)]
        for worker in workers:
            worker.join(30)
    finally:
        for worker in workers:
            worker.kill()
    return found


def run_worker(
    rank: int, args: argparse.Namespace, draws: list[list[int]], barrier: Any, answers: Any, address: Any
) -> None:
    """A worker's process: the rounds of all modes in turn, the first of each to warm up."""
    torch.set_num_threads(1)
    generate = Sleeping(args.sleep) if args.sleep else Generating(args)
    server = None
    if rank == 0:
        server = WorkQueueServer()
        server.queue.workers = args.workers
        for _ in range(args.workers):
            address.put(server.port)
    port = address.get(timeout=START_SECONDS)
    queue_client = WorkQueueClient("127.0.0.1", port, server=server, slots=generate.num_slots)
    sources: dict[str, WorkSource] = {
        "work queue": queue_client,
        "longest first": queue_client,
        "static shards": StaticPartition(rank, args.workers),
    }
    for number, lengths in enumerate(draws):
        for mode, source in sources.items():
            generate.begin(lengths)
            expected = lengths if mode == "longest first" else None
            source.start_round(range(args.requests), expected)
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
    barrier.wait(60)  # until nobody needs the queue any more
    queue_client.close()


def run_round(source: WorkSource, generate: Generating | Sleeping) -> tuple[list[int], float | None]:
    """Work until there is no more, as `LocalGenerator.generate` does; returns the samples made, when the last was."""
    done: list[int] = []
    finished = None
    running = 0

    def supply() -> Iterator[int]:
        """Yield samples as long as there are any; the engine asks whenever a slot is free."""
        nonlocal running
        while ids := source.take(max(1, generate.num_slots - running)):
            for sample in ids:
                running += 1
                yield sample

    for sample in generate(supply()):
        running -= 1
        done.append(sample)
        finished = time.perf_counter()
    return done, finished


class Generating:
    """Generation by an engine of this worker's own, with the response lengths given to `begin`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.num_slots = args.slots
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
        """Refit, as before every rollout phase: nothing is reused of what was computed for the same prompts before."""
        self._lengths = lengths
        self._engine.refit(random_weights(self._architecture), self._engine.weight_version + 1)

    def __call__(self, samples: Iterator[int]) -> Iterator[int]:
        """Samples as they are taken -> samples as they are finished."""
        requests = (GenerationRequest(i, self._prompts[i], i, self._lengths[i]) for i in samples)
        for result in self._engine.generate(requests, self._sampling):
            if len(result.token_ids) != self._lengths[result.request_id]:
                raise RuntimeError(f"sample {result.request_id} has {len(result.token_ids)} tokens")
            yield result.request_id


class Sleeping:
    """In place of generation, sleep for each sample in proportion to its length, one after the other."""

    num_slots = 1

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
    walls_by_mode: dict[str, list[float]] = {}
    for mode in MODES:
        walls, rates, idle = walls_by_mode.setdefault(mode, []), [], []
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
            "idle_share": statistics.median(map(statistics.fmean, idle)),
        }
    for mode, name in (("work queue", "queue"), ("longest first", "longest_first")):
        # Round by round: each has other lengths.
        pairs = zip(walls_by_mode["static shards"], walls_by_mode[mode], strict=True)
        results[f"{name}_is_times_faster"] = spread([shards / seconds for shards, seconds in pairs])
    return results


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    slots = f"engines of {args.shape}, {counted(args.slots, 'slots')}"
    what = f"{args.sleep:g} s of sleep per token" if args.sleep else slots
    workers, responses = counted(args.workers, "workers"), counted(args.requests, "responses")
    print(f"{workers}, {responses} of {args.lengths[0]} to {args.lengths[1]} tokens; {what}")
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
    times = [
        f"{ratio['median']:.2f} x ({ratio['min']:.2f}-{ratio['max']:.2f})"
        for ratio in (results["queue_is_times_faster"], results["longest_first_is_times_faster"])
    ]
    print(f"the queue is {times[0]} as fast as static shards, longest first {times[1]}\n")


if __name__ == "__main__":
    main()
