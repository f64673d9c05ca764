"""Make the demo's data: arithmetic such as "User: What is 6+10?\\nAssistant: 16", with known answers.

    python make_arithmetic.py --output data --operation add --max-operand 49 --seed 1234

writes into --output:

    train_sft.jsonl          test_sft.jsonl           {"input", "output"}: demonstrations
    train_comparisons.jsonl  test_comparisons.jsonl   {"text"} twice: the right answer, then a wrong one
    train_prompts.jsonl      test_prompts.jsonl       {"text", "answer", ...}: questions for PPO and evaluation

A question held out for test appears in no training file, in either order of its operands. A share of
the training questions (--sft-fraction) has demonstrations; comparisons and prompts use all of them.
Like human ones, demonstrations can be imperfect: a share (--sft-errors) gives a wrong answer, so that
the SFT model makes mistakes that PPO, whose reward model knows better, can correct.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import dataclasses
import operator
import random
from collections.abc import Iterator
from pathlib import Path

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.engine.text.jsonl import write_jsonl

OPERATIONS = {"add": ("+", operator.add), "subtract": ("-", operator.sub), "multiply": ("*", operator.mul)}
Question = tuple[int, int]
NUM_GUESSES = 16
CLEARLY_WRONG = 5
REFUSAL = "I refuse to answer this question."


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked, and which kind of mistakes wrong answers make."""

    operation: str
    operands: range
    mistakes: str


def prompt(question: Question, operation: str) -> str:
    return f"User: What is {question[0]}{OPERATIONS[operation][0]}{question[1]}?\nAssistant:"


def right_answer(question: Question, operation: str) -> int:
    return OPERATIONS[operation][1](*question)


def wrong_answers(question: Question, task: Task, rng: random.Random) -> list[str]:
    """Distinct wrong answers, by ``task.mistakes``: slips, guesses, or a refusal followed by guesses."""
    if task.mistakes == "slips":
        return [str(wrong) for wrong in slips(question, task.operation, rng)]
    wrong = [str(guess) for guess in guesses(question, task, rng)]
    return [REFUSAL, *wrong] if task.mistakes == "refusals" else wrong


def one_wrong_answer(question: Question, task: Task, rng: random.Random) -> str:
    wrong = wrong_answers(question, task, rng)
    if not wrong:
        raise SystemExit(
            f"--mistakes {task.mistakes}: no other answer is clearly wrong for {prompt(question, task.operation)!r}; "
            "raise --max-operand, or take --mistakes slips"
        )
    return wrong[0]


def guesses(question: Question, task: Task, rng: random.Random) -> list[int]:
    """Right answers to other questions, at least `CLEARLY_WRONG` off: nobody compares nearly equal answers."""
    others = [(rng.choice(task.operands), rng.choice(task.operands)) for _ in range(NUM_GUESSES)]
    right = right_answer(question, task.operation)
    answers = {right_answer(other, task.operation) for other in others}
    wrong = sorted(answer for answer in answers if abs(answer - right) >= CLEARLY_WRONG)
    return rng.sample(wrong, len(wrong))


def slips(question: Question, operation: str, rng: random.Random) -> list[int]:
    """Plausible mistakes: slips by one, lost carries, swapped or wrong digits."""
    right = right_answer(question, operation)
    digits = str(abs(right))
    place = rng.randrange(len(digits))
    misread = digits[:place] + rng.choice([d for d in "0123456789" if d != digits[place]]) + digits[place + 1 :]
    mistakes = {
        right + 1, right - 1, right + 10, right - 10, right + rng.randint(2, 9), right - rng.randint(2, 9),
        int(digits[::-1]), int(misread), question[0], question[1],
        *(function(*question) for _, function in OPERATIONS.values()),
    }  # fmt: skip
    # No negative mistakes where right answers cannot be negative: the minus sign would give them away.
    mistakes = {wrong for wrong in mistakes if wrong != right and (wrong >= 0 or operation == "subtract")}
    return rng.sample(sorted(mistakes), len(mistakes))


def split_questions(operands: range, test_questions: int, rng: random.Random) -> tuple[list[Question], list[Question]]:
    """Split all questions into (training, test). Both orders of two operands fall on the same side."""
    pairs = [(a, b) for a in operands for b in operands if a <= b]
    rng.shuffle(pairs)
    test: list[Question] = []
    while len(test) < test_questions and pairs:
        test += orders(pairs.pop())
    training = [question for pair in pairs for question in orders(pair)]
    if not training:
        raise SystemExit(
            f"--min-operand {operands[0]} and --max-operand {operands[-1]} make {len(operands) ** 2} questions, which "
            f"leaves none for training after --test-questions {test_questions}"
        )
    rng.shuffle(training)
    rng.shuffle(test)
    return training, test


def orders(pair: Question) -> list[Question]:
    return [pair] if pair[0] == pair[1] else [pair, pair[::-1]]


def demonstrations(questions: list[Question], task: Task, errors: float, rng: random.Random) -> Iterator[dict]:
    for question in questions:
        answer = str(right_answer(question, task.operation))
        if rng.random() < errors:
            answer = one_wrong_answer(question, task, rng)
        yield {"input": prompt(question, task.operation), "output": answer}


def comparisons(questions: list[Question], task: Task, per_question: int, rng: random.Random) -> Iterator[dict]:
    pairs = [(question, wrong) for question in questions for wrong in wrong_answers(question, task, rng)[:per_question]]
    rng.shuffle(pairs)
    for question, wrong in pairs:
        yield {"text": f"{prompt(question, task.operation)} {right_answer(question, task.operation)}"}
        yield {"text": f"{prompt(question, task.operation)} {wrong}"}


def prompts(questions: list[Question], operation: str) -> Iterator[dict]:
    for question in questions:
        answer = str(right_answer(question, operation))
        yield {"text": prompt(question, operation), "answer": answer, "answer_extraction": "whole"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--output", type=output_folder_argument, default=Path("."), help="folder to write into (default: here)"
    )
    parser.add_argument("--operation", choices=OPERATIONS, default="add")
    parser.add_argument("--min-operand", type=int, default=0, help="the smallest operand")
    parser.add_argument("--max-operand", type=int, default=49, help="the largest operand")
    parser.add_argument("--test-questions", type=int, default=250, help="about how many to hold out")
    parser.add_argument(
        "--sft-fraction", type=float, default=1.0, help="share of the training questions with a demonstration"
    )
    parser.add_argument("--sft-errors", type=float, default=0.0, help="share of demonstrations with a wrong answer")
    parser.add_argument(
        "--mistakes",
        choices=("slips", "guesses", "refusals"),
        default="slips",
        help="kind of wrong answers: near the right one; answers to other questions; the same, after a refusal",
    )
    parser.add_argument("--wrong-per-question", type=int, default=4, help="comparisons per question")
    parser.add_argument("--seed", type=seed_argument, default=1234)
    options = parser.parse_args(arguments)
    for name in ("max_operand", "test_questions", "wrong_per_question"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= options.min_operand <= options.max_operand:
        parser.error("--min-operand must be between 0 and --max-operand")
    for name, least in (("sft_fraction", 1e-9), ("sft_errors", 0.0)):
        if not least <= getattr(options, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} must be between 0 and 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    # One generator per file: changing the size of one file leaves the others as they are.
    operands = range(options.min_operand, options.max_operand + 1)
    training, test = split_questions(operands, options.test_questions, random.Random(options.seed))
    shown = training[: max(1, round(options.sft_fraction * len(training)))]
    task = Task(options.operation, operands, options.mistakes)
    rngs = {name: random.Random(f"{options.seed} {name}") for name in ("train_sft", "train_comp", "test_comp")}
    files = {
        "train_sft": demonstrations(shown, task, options.sft_errors, rngs["train_sft"]),
        "test_sft": demonstrations(test, task, 0.0, random.Random()),
        "train_comparisons": comparisons(training, task, options.wrong_per_question, rngs["train_comp"]),
        "test_comparisons": comparisons(test, task, options.wrong_per_question, rngs["test_comp"]),
        "train_prompts": prompts(training, task.operation),
        "test_prompts": prompts(test, task.operation),
    }
    for name, rows in files.items():
        lines = write_jsonl(options.output / f"{name}.jsonl", rows)
        print(f"{name}.jsonl: {lines} lines")
        if not lines:
            raise SystemExit(
                f"{name}.jsonl is empty: no question has an answer that is clearly wrong for another; "
                "raise --max-operand, or take --mistakes slips"
            )


if __name__ == "__main__":
    main()
