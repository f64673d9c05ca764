"""Make SFT, reward model and PPO data from GSM8K (github.com/openai/grade-school-math).

    python process_gsm8k.py --source FOLDER --output data [--tokenizer HF_DIRECTORY]

reads from FOLDER (names with or without the prefix "gsm_"):

    train.jsonl, test.jsonl              {"question", "answer"}: worked answers that end with "#### 72"
    example_model_solutions.jsonl        {"question", MODEL: {"solution", "is_correct"}, ...}

and writes into --output:

    train_sft.jsonl          test_sft.jsonl           the worked answers
    train_comparisons.jsonl  test_comparisons.jsonl   {"text"} twice: a right model answer, then a wrong one
    train_prompts.jsonl      test_prompts.jsonl       {"text", "answer", "answer_extraction"}: the question, the number
                                                      to find, and where responses have it ("after ####")

Comparisons are split by question, and a question with training comparisons is left out of all test
files, so that no model has seen anything in them. Texts are "User: ...\\nAssistant: ...", or what the
chat template of --tokenizer makes of question and answer, up to the token that ends the answer.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dialogues import DialogueStyle

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.engine.text.jsonl import DataError, Record, read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import TokenizerError, tokenizer_argument

CALCULATOR = re.compile(r"<<[^<>]*>>")  # "3+4 = <<3+4=7>>7"
FINAL_ANSWER = re.compile(r"\n(?:####|A:) *([^\n]*)\s*$")


def tidy(answer: str, keep_calculator: bool) -> str:
    """Bring an answer into the common form: no calculator annotations, "#### 72" at the end if a number is given."""
    answer = answer.strip()
    if not keep_calculator:
        answer = CALCULATOR.sub("", answer)
    return FINAL_ANSWER.sub(r"\n#### \1", answer)


def final_answer(record: Record) -> str:
    """The number after "####", thousands separators removed."""
    found = FINAL_ANSWER.search(record.text("answer"))
    if found is None or not found.group(1):
        record.fail("'answer' does not end with a line '#### NUMBER'")
    return found.group(1).replace(",", "").strip()


def marked_pairs(record: Record, keep_calculator: bool, limit: int | None, rng: random.Random) -> list[tuple[str, str]]:
    """Distinct (right, wrong) answers to a question, in random order."""
    right: dict[str, None] = {}  # as ordered sets: the same answer from two models counts once
    wrong: dict[str, None] = {}
    for solution in record.fields.values():
        if not isinstance(solution, dict):
            continue
        marked = Record(record.path, record.line, solution)
        if not isinstance(solution.get("is_correct"), bool):
            marked.fail("a model's answer lacks 'is_correct': true or false")
        text = tidy(marked.text("solution"), keep_calculator)
        if text:
            (right if solution["is_correct"] else wrong)[text] = None
    pairs = [(good, bad) for good in right for bad in wrong if good != bad]
    rng.shuffle(pairs)
    return pairs[:limit]


def find(source: Path, name: str) -> list[Record]:
    for candidate in (source / name, source / f"gsm_{name}"):
        if candidate.is_file():
            return read_jsonl(candidate)
    raise DataError(
        f"{source}: neither {name} nor gsm_{name} is there; get them from github.com/openai/grade-school-math"
    )


def comparison_lines(style: DialogueStyle, pairs: Sequence[tuple[str, str, str]]) -> Iterator[dict]:
    for question, good, bad in pairs:
        yield {"text": style.text([question], good)}
        yield {"text": style.text([question], bad)}


def sft_lines(style: DialogueStyle, records: Sequence[Record], keep_calculator: bool) -> Iterator[dict]:
    for record in records:
        yield style.demonstration([record.text("question")], tidy(record.text("answer"), keep_calculator))


def prompt_lines(style: DialogueStyle, records: Sequence[Record]) -> Iterator[dict]:
    for record in records:
        yield {
            "text": style.prompt([record.text("question")]),
            "answer": final_answer(record),
            "answer_extraction": "after ####",
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with the GSM8K files")
    parser.add_argument(
        "--output", type=output_folder_argument, default=Path("."), help="folder to write into (default: here)"
    )
    parser.add_argument(
        "--tokenizer", type=tokenizer_argument, metavar="DIR", help="use this tokenizer's chat template"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.1, help="share of the questions whose comparisons are for test"
    )
    parser.add_argument("--max-pairs-per-question", type=int, help="default: all")
    parser.add_argument("--keep-calculator", action="store_true", help="keep annotations such as <<3+4=7>>")
    parser.add_argument("--seed", type=seed_argument, default=1234)
    options = parser.parse_args(arguments)
    if not 0 < options.test_fraction < 1:
        parser.error("--test-fraction must be between 0 and 1")
    if options.max_pairs_per_question is not None and options.max_pairs_per_question < 1:
        parser.error("--max-pairs-per-question must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    rng = random.Random(options.seed)
    style = DialogueStyle(options.tokenizer, separator="\n")
    train, test = find(options.source, "train.jsonl"), find(options.source, "test.jsonl")

    by_question: dict[str, list[tuple[str, str, str]]] = {}
    for record in find(options.source, "example_model_solutions.jsonl"):
        question = record.text("question")
        for good, bad in marked_pairs(record, options.keep_calculator, options.max_pairs_per_question, rng):
            by_question.setdefault(question, []).append((question, good, bad))
    questions = sorted(by_question)
    rng.shuffle(questions)
    num_test = min(len(questions) - 1, max(1, round(options.test_fraction * len(questions))))
    if num_test < 1:
        raise DataError(f"{options.source}: fewer than two questions have both a right and a wrong model answer")
    test_pairs = [pair for question in questions[:num_test] for pair in by_question[question]]
    train_pairs = [pair for question in questions[num_test:] for pair in by_question[question]]
    rng.shuffle(train_pairs)
    seen = set(questions[num_test:])
    test = [record for record in test if record.text("question") not in seen]

    files = {
        "train_sft": sft_lines(style, train, options.keep_calculator),
        "test_sft": sft_lines(style, test, options.keep_calculator),
        "train_comparisons": comparison_lines(style, train_pairs),
        "test_comparisons": comparison_lines(style, test_pairs),
        "train_prompts": prompt_lines(style, train),
        "test_prompts": prompt_lines(style, test),
    }
    for name, rows in files.items():
        print(f"{name}.jsonl: {write_jsonl(options.output / f'{name}.jsonl', rows)} lines")


if __name__ == "__main__":
    try:
        main()
    except (DataError, TokenizerError) as error:
        raise SystemExit(f"error: {error}") from error
