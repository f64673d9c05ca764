"""What episodes cost the engine: tokens a second beside those of single replies that are as long.

    python benchmarks/episodes.py [--model 30m] [--episodes 64] [--replies 4] [--slots 16] [--rounds 3] [--json FILE]

An episode is so many replies of random lengths; behind each but the last its environment waits for a random time (0 to
--seconds) and inserts tokens. A single reply has as many tokens as an episode has sampled; its prompt is the episode's
and all that is inserted there. Both take turns in one engine with random weights, and lengths are forced. "busy": until
the last one has begun, from when on slots stay empty whatever is done. "again": prompt tokens that were computed though
they had been before, or had been sampled: a reply's end fills no page of KV memory. Where others use the machine, too,
tokens per CPU second of this process ("computed") say more; what is waited for does not count in them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import SHAPES, json_path, machine, positive_int, print_table, work_folder, write_json

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.rl.episodes.policy import Policy
from nemo_style_aligner.trainer.rl.episodes.runner import Environment, EpisodeLimits
from nemo_style_aligner.trainer.rl.sample import Prompt

PARTS = ("busy", "whole", "computed")
Marks = dict[str, tuple[float, float, float]]
"""Tokens, seconds and CPU seconds until the last episode has begun, and of all."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """An episode: its prompt, lengths of its replies, and between them what is inserted after how many seconds."""

    prompt: list[int]
    replies: list[int]
    inserted: list[list[int]]
    seconds: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--episodes", type=positive_int, default=64)
    parser.add_argument("--replies", type=positive_int, default=4)
    parser.add_argument("--slots", type=positive_int, default=16)
    parser.add_argument("--prompt-tokens", type=positive_int, default=64)
    parser.add_argument("--reply-tokens", type=positive_int, nargs=2, default=[16, 64], metavar=("LEAST", "MOST"))
    parser.add_argument("--inserted-tokens", type=positive_int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="most that an environment waits")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    with single_process(args.seed), work_folder(None) as folder:
        tokenizer = train_bpe_tokenizer(["benchmark"], 257, folder / "tokenizer")
        results = measure(args, tokenizer)
    names = {"single": "single replies", "episodes": "episodes"}
    rows = [
        (name, *(f"{results[way][part]['tokens_per_second']:.0f}" for part in PARTS)) for way, name in names.items()
    ]
    print(
        f"{args.model}: {args.episodes} episodes of {args.replies} replies, {args.slots} slots; medians of the rounds"
    )
    print_table(("what", "tokens/s, busy", "tokens/s, whole", "tokens/CPU second, busy"), rows)
    for part in PARTS:
        ratios = results[f"ratios_{part}"]
        median = results[f"ratio_{part}"]
        print(f"episodes over single replies, {part}: {median:.1%} ({min(ratios):.1%} to {max(ratios):.1%})")
    print(
        f"prompt tokens: {results['needed']} had to be computed, {results['again']} were again "
        f"({results['again_per_reply']:.1f} of each reply; its context has {results['context_per_reply']:.0f})"
    )
    write_json(args.json, {"settings": {k: str(v) for k, v in vars(args).items()}, **results, "machine": machine()})


def plans(args: argparse.Namespace, seed: int) -> list[Plan]:
    """The same for the same seed. No two prompts share a page."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(2, 250) for _ in range(count)]

    return [
        Plan(
            ids(args.prompt_tokens),
            [draw.randint(*args.reply_tokens) for _ in range(args.replies)],
            [ids(args.inserted_tokens) for _ in range(args.replies - 1)],
            [draw.uniform(0.0, args.seconds) for _ in range(args.replies - 1)],
        )
        for _ in range(args.episodes)
    ]


class Contest:
    """An engine that runs episodes, and single replies."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer) -> None:
        shape = SHAPES[args.model]
        self.most = args.replies * args.reply_tokens[1] + (args.replies - 1) * args.inserted_tokens
        self.engine = EmbeddedEngine(
            shape,
            dtype=torch.float32,
            eos_id=tokenizer.eos_id,
            num_slots=args.slots,
            max_sequence_length=args.prompt_tokens + self.most,
            # Of all episodes, as in a job whose KV memory is not short.
            kv_cache_tokens=args.episodes * (args.prompt_tokens + self.most + 16),
        )
        self.engine.build()
        self.model = build_model(shape, {}, torch.float32, trainable=False)
        self.version, self.args, self.tokenizer = 0, args, tokenizer

    def timed(
        self,
        requests: Sequence[GenerationRequest],
        run: Callable[[Iterator[GenerationRequest], Callable[[GenerationResult], None]], object],
    ) -> Marks:
        """See `Marks`; nothing is cached from before."""
        self.version += 1
        self.engine.refit(export_weights(self.model), self.version)
        marks, done = Marks(), list[GenerationResult]()

        def mark() -> tuple[float, float, float]:
            seconds = time.monotonic() - started
            return self.engine.statistics.generated_tokens, seconds, time.process_time() - worked

        def supply() -> Iterator[GenerationRequest]:
            yield from requests
            marks["busy"] = mark()

        started, worked = time.monotonic(), time.process_time()
        run(supply(), done.append)
        marks["whole"] = mark()
        assert len(done) == len(requests)
        return marks

    def episodes(self, plans: Sequence[Plan]) -> Marks:
        async def episode(policy: Policy, line: dict[str, Any]) -> float:
            plan = plans[line["n"]]
            await policy.sample(max_tokens=plan.replies[0])
            for count, inserted, seconds in zip(plan.replies[1:], plan.inserted, plan.seconds, strict=True):
                await asyncio.sleep(seconds)
                await policy.sample(inserted, max_tokens=count)
            return 1.0

        limits = EpisodeLimits(max_replies=self.args.replies, seconds=3600.0)
        environment = Environment(episode, "episode", self.tokenizer, self.tokenizer.ids_to_text, limits)
        prompts = [Prompt(n, plan.prompt, line={"n": n}) for n, plan in enumerate(plans)]
        sampling = SamplingParams(max_new_tokens=self.most, ignore_eos=True)
        return self.timed(
            [GenerationRequest(n, plan.prompt, n) for n, plan in enumerate(plans)],
            lambda requests, take: environment.generate(self.engine, EngineGroup(), requests, sampling, prompts, take),
        )

    def single(self, plans: Sequence[Plan]) -> Marks:
        sampling = SamplingParams(max_new_tokens=self.most, ignore_eos=True)

        def run(requests: Iterator[GenerationRequest], take: Callable[[GenerationResult], None]) -> None:
            for result in self.engine.generate(requests, sampling):
                take(result)

        prompts = [sum(plan.inserted, plan.prompt) for plan in plans]
        lengths = [sum(plan.replies) for plan in plans]
        both = enumerate(zip(prompts, lengths, strict=True))
        return self.timed([GenerationRequest(n, prompt, n, length) for n, (prompt, length) in both], run)


def measure(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    contest = Contest(args, tokenizer)
    rates: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in ("single", "episodes")}
    needed = again = 0
    for number in range(args.rounds):
        chosen = plans(args, args.seed * 1000 + number)
        for way in rates:
            marks = getattr(contest, way)(chosen)
            for part, (tokens, seconds, _) in marks.items():
                rates[way][part].append(tokens / seconds)
            tokens, _, computed = marks["busy"]
            rates[way]["computed"].append(tokens / computed)
        needed = sum(len(plan.prompt) + sum(map(len, plan.inserted)) for plan in chosen)
        # The last token of a reply has been sampled, but never put in: that of each but the last has to be.
        needed += args.episodes * (args.replies - 1)
        again = contest.engine.statistics.prefill_tokens - needed
    results: dict[str, Any] = {
        way: {part: {"tokens_per_second": statistics.median(values)} for part, values in parts.items()}
        for way, parts in rates.items()
    }
    for part in PARTS:
        pairs = zip(rates["episodes"][part], rates["single"][part], strict=True)
        results[f"ratios_{part}"] = [ours / theirs for ours, theirs in pairs]
        results[f"ratio_{part}"] = statistics.median(results[f"ratios_{part}"])
    later = args.episodes * max(1, args.replies - 1)
    contexts = sum(
        len(plan.prompt) + sum(plan.replies[:n]) + args.inserted_tokens * n
        for plan in chosen
        for n in range(1, args.replies)
    )
    return results | {
        "needed": needed,
        "again": again,
        "again_per_reply": again / later,
        "context_per_reply": contexts / later,
    }


if __name__ == "__main__":
    main()
