"""Two ranks of an actor job with stand-ins for engine and critic: ``python queue_ranks.py <folder>``.

In each round rank 1 is in trouble of its own kind. Leaves ``<folder>/rounds.json``; ``<folder>/rank1.pid`` and
``<folder>/port`` are for the test, which wakes rank 1 up.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_ranks

from nemo_style_aligner.generation.engine import (
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    SamplingParams,
)
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.parallel.groups import broadcast_object, initialize_model_parallel
from nemo_style_aligner.rl.rewards import Reward
from nemo_style_aligner.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.rl.rollouts.generator import LocalGenerator
from nemo_style_aligner.rl.rollouts.work_client import WorkerLimits, WorkQueueClient
from nemo_style_aligner.rl.rollouts.work_queue import WorkQueue
from nemo_style_aligner.rl.rollouts.work_server import WorkQueueServer
from nemo_style_aligner.rl.sample import Prompt, Sample
from nemo_style_aligner.rl.scoring import Scorer

NUM_SAMPLES, SLOTS = 16, 4
LEASE_SECONDS, STALL_SECONDS = 3.0, 2.0
ROUNDS = ("healthy", "slow", "hung", "stopped")


class Engine:
    """Makes 3 to 8 tokens from a request's seed, one in each pass."""

    num_slots = SLOTS
    num_compilations = 0
    closed = False

    def __init__(self) -> None:
        self.statistics = GenerationStatistics()
        self.trouble = "healthy"

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        source, running = iter(requests), []
        while True:
            while len(running) < SLOTS and (request := next(source, None)) is not None:
                draw = torch.Generator().manual_seed(request.seed)
                length = int(torch.randint(3, 9, (), generator=draw))
                running.append((request, torch.randint(0, 100, (length,), generator=draw).tolist(), []))
            if not running:
                return
            self.forward()
            self.statistics.steps += 1
            for entry in list(running):
                request, tokens, made = entry
                made.append(tokens[len(made)])
                if len(made) == len(tokens):
                    running.remove(entry)
                    yield GenerationResult(
                        request.request_id, request.prompt_token_ids, made, [-1.0] * len(made), "stop", 0
                    )

    def close(self) -> None:
        self.closed = True

    def forward(self) -> None:
        time.sleep(0.02)
        if self.trouble == "slow" and self.statistics.steps < 6:  # the first responses take longer than a lease
            time.sleep(0.8)
        elif self.trouble == "hung" and self.statistics.steps % 100 == 2:
            self.statistics.steps += 1  # once
            time.sleep(8.0)  # more than both limits together, and beats between
        elif self.trouble == "stopped" and self.statistics.steps % 100 == 2:
            self.statistics.steps += 1
            os.kill(os.getpid(), signal.SIGSTOP)


class Sums:
    """The reward is the sum of a sequence's tokens."""

    part_names = ()

    def score(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[Reward]]:
        answer: concurrent.futures.Future[list[Reward]] = concurrent.futures.Future()
        answer.set_result([Reward(float(sum(sample.token_ids))) for sample in samples])
        return answer

    def close(self) -> None:
        pass


def rank_main(folder: Path) -> None:
    initialize_model_parallel(1, 1, seed=1)
    rank = dist.get_rank()
    server = WorkQueueServer(WorkQueue(LEASE_SECONDS, workers=2)) if rank == 0 else None
    port = broadcast_object(server.port if server is not None else None)
    engine: Any = Engine()
    work = WorkQueueClient(
        "127.0.0.1",
        port,
        worker=f"rank-{rank}",
        server=server,
        slots=SLOTS,
        progress=lambda: engine.statistics.steps,
        limits=WorkerLimits(LEASE_SECONDS, STALL_SECONDS, wait_seconds=30),
    )
    rewards: Any = Sums()
    tokenizer: Any = None
    collector = RolloutCollector(
        LocalGenerator(engine, work, SamplingParams(max_new_tokens=8), EngineGroup(index=rank, count=2)),
        Scorer(rewards, None, 60, "the rewards"),
        tokenizer,
        str,
        scoring_batch_size=3,
    )
    (folder / "rank1.pid" if rank else folder / "port").write_text(str(os.getpid() if rank else port))
    rounds = []
    for number, trouble in enumerate(ROUNDS):
        engine.statistics.steps = 0
        engine.trouble = trouble if rank == 1 else "healthy"
        # Another order in every round, as the lengths become known.
        prompts = [Prompt(i // 2, [i // 2 + 1], float(i // 2 * number % 5)) for i in range(NUM_SAMPLES)]
        collected = collector.collect(collector.generator.start(prompts, seed=3), group_size=1)
        scores = collected.wait_for_rewards()
        rollouts = collected.dealt([range(NUM_SAMPLES)], lambda length, _: length)
        tokens = rollouts.on_first_rank(rollouts.tokens, rollouts.lengths)
        fields = {name: tensor.tolist() for name, tensor in vars(rollouts).items()}
        fields["tokens"] = None if tokens is None else [row.tolist() for row in tokens]
        status = server.queue.status() if server is not None else {}
        rounds.append(fields | {"rewards": scores.rewards.tolist(), "total": status.get("total")})
    collector.close()
    assert engine.closed
    if rank == 0:
        (folder / "rounds.json").write_text(json.dumps(rounds))


if __name__ == "__main__":
    fork_ranks(2, lambda: rank_main(Path(sys.argv[1])), seconds=140.0)
