"""The scripts that make data: what they write is what the datasets read, and test data is held out."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.text.jsonl import DataError, read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.trainer.data.answers import is_right
from nemo_style_aligner.trainer.data.datasets import ComparisonDataset, PromptDataset
from nemo_style_aligner.trainer.data.sft import SFTDataset, SFTFormat

SCRIPTS = Path(__file__).parent.parent / "examples" / "nlp" / "data"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SFT_FORMAT = SFTFormat(
    max_seq_length=600, min_seq_length=1, prompt_template="{input} {output}", label_key="output",
    truncation_field="input", truncation_method="right", add_bos=False, add_eos=True, add_sep=False,
    answer_only_loss=True, chats_only=False,
)  # fmt: skip


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    if str(SCRIPTS) not in sys.path:  # as where it is started
        sys.path.insert(0, str(SCRIPTS))
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict[str, Any]]:
    return [dict(record.fields) for record in read_jsonl(path)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_character_tokenizer([chr(c) for c in range(32, 127)] + ["\n"], directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


def check_datasets_can_read(folder: Path, tokenizer: Tokenizer) -> None:
    for split in ("train", "test"):
        assert len(PromptDataset([folder / f"{split}_prompts.jsonl"], tokenizer, 500)) > 0
        assert ComparisonDataset([folder / f"{split}_comparisons.jsonl"], tokenizer, 600).counts["long"] == 0
        if (folder / f"{split}_sft.jsonl").exists():
            assert SFTDataset([folder / f"{split}_sft.jsonl"], tokenizer, SFT_FORMAT).counts["dropped"] == 0


# ---- make_arithmetic --------------------------------------------------------------------------

SUM = re.compile(r"User: What is (\d+)([-+*])(\d+)\?\nAssistant:(?: (-?\d+))?")


def parsed(text: str) -> tuple[int, int, int, int | None]:
    """(a, b, the right answer, the given one)."""
    found = SUM.fullmatch(text)
    assert found, text
    a, b = int(found[1]), int(found[3])
    right = {"+": a + b, "-": a - b, "*": a * b}[found[2]]
    return a, b, right, None if found[4] is None else int(found[4])


@pytest.mark.parametrize("operation", ["add", "subtract", "multiply"])
def test_arithmetic(tmp_path: Path, tokenizer: Tokenizer, operation: str) -> None:
    make = script("make_arithmetic").main
    operands = ["--min-operand", "2", "--max-operand", "14"]
    make(["--output", str(tmp_path), "--operation", operation, *operands, "--test-questions", "30"])
    check_datasets_can_read(tmp_path, tokenizer)
    questions: dict[str, set[frozenset[int]]] = {"train": set(), "test": set()}
    for split, kept in questions.items():
        for row in rows(tmp_path / f"{split}_prompts.jsonl"):
            a, b, right, _ = parsed(row["text"])
            kept.add(frozenset((a, b)))
            assert row["answer"] == str(right)
        for row in rows(tmp_path / f"{split}_sft.jsonl"):
            a, b, right, given = parsed(f"{row['input']} {row['output']}")
            kept.add(frozenset((a, b)))
            assert given == right
        texts = [row["text"] for row in rows(tmp_path / f"{split}_comparisons.jsonl")]
        for good, bad in zip(texts[::2], texts[1::2], strict=True):
            a, b, right, given = parsed(good)
            kept.add(frozenset((a, b)))
            assert given == right and parsed(bad)[:3] == (a, b, right) and parsed(bad)[3] != right
    assert len(rows(tmp_path / "test_prompts.jsonl")) in (30, 31)
    assert len(rows(tmp_path / "train_prompts.jsonl")) + len(rows(tmp_path / "test_prompts.jsonl")) == 13**2
    assert not questions["train"] & questions["test"]
    assert set().union(*questions["train"], *questions["test"]) == set(range(2, 15))


@pytest.mark.parametrize("options", [[], ["--sft-errors", "1"]])
def test_no_answer_is_clearly_wrong(tmp_path: Path, options: list[str]) -> None:
    small = ["--output", str(tmp_path), "--max-operand", "2", "--test-questions", "2", "--mistakes", "guesses"]
    with pytest.raises(SystemExit, match="raise --max-operand"):
        script("make_arithmetic").main([*small, *options])


def test_arithmetic_options(tmp_path: Path) -> None:
    make = script("make_arithmetic").main
    common = ["--max-operand", "20", "--test-questions", "50"]
    make(["--output", str(tmp_path / "a"), *common])
    make(["--output", str(tmp_path / "b"), *common, "--sft-fraction", "0.5", "--sft-errors", "0.4"])
    make(["--output", str(tmp_path / "c"), *common, "--seed", "9"])
    a, b, c = (tmp_path / name for name in "abc")
    for name in ("train_prompts", "test_prompts", "train_comparisons", "test_comparisons"):
        assert rows(a / f"{name}.jsonl") == rows(b / f"{name}.jsonl") != rows(c / f"{name}.jsonl")
    demonstrations = [parsed(f"{row['input']} {row['output']}") for row in rows(b / "train_sft.jsonl")]
    assert len(demonstrations) == round(0.5 * len(rows(a / "train_sft.jsonl")))
    assert 0.25 < sum(given != right for _, _, right, given in demonstrations) / len(demonstrations) < 0.55
    with pytest.raises(SystemExit, match="none for training"):
        make(["--output", str(tmp_path), "--max-operand", "2"])
    with pytest.raises(SystemExit):
        make(["--output", str(tmp_path), "--sft-errors", "1.5"])


def test_arithmetic_mistakes(tmp_path: Path) -> None:
    make = script("make_arithmetic").main
    common = ["--max-operand", "30", "--sft-errors", "1.0", "--wrong-per-question", "3"]
    make(["--output", str(tmp_path / "guesses"), *common, "--mistakes", "guesses"])
    texts = [row["text"] for row in rows(tmp_path / "guesses" / "train_comparisons.jsonl")]
    for bad in texts[1::2]:
        _, _, right, given = parsed(bad)
        assert given is not None and 0 <= given <= 60 and abs(given - right) >= 5
    make(["--output", str(tmp_path / "refusals"), *common, "--mistakes", "refusals"])
    outputs = {row["output"] for row in rows(tmp_path / "refusals" / "train_sft.jsonl")}
    assert outputs == {"I refuse to answer this question."}
    bad_ones = [row["text"] for row in rows(tmp_path / "refusals" / "train_comparisons.jsonl")][1::2]
    assert sum("refuse" in text for text in bad_ones) * 3 == len(bad_ones)


# ---- process_gsm8k ----------------------------------------------------------------------------


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A folder of GSM8K's format: 12 test questions, of which 10 have right and wrong model answers."""
    source = tmp_path / "source"
    qa = [
        {"question": f"Q{i}?", "answer": f"{i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1:,}"} for i in range(2000, 2020)
    ]
    write_jsonl(source / "gsm_train.jsonl", qa[:8])
    write_jsonl(source / "gsm_test.jsonl", qa[8:])
    solutions = []
    for i, row in enumerate(qa[8:]):
        right = {"solution": f"so <<1+1=2>>{i}\nA: {i}", "is_correct": True}
        wrong = {"solution": f"so {i + 1}\nA: {i + 1}", "is_correct": False}
        cut_off = {"solution": "so 0.33333", "is_correct": False}
        marked = {"m1": right, "m2": right, "m3": wrong, "m4": cut_off} if i < 10 else {"m1": right}
        solutions.append({"question": row["question"], "ground_truth": row["answer"], **marked})
    write_jsonl(source / "gsm_example_model_solutions.jsonl", solutions)
    return source


def test_gsm8k(gsm8k: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tmp_path / "out"
    script("process_gsm8k").main(["--source", str(gsm8k), "--output", str(out), "--test-fraction", "0.3"])
    check_datasets_can_read(out, tokenizer)
    prompt, demonstration = rows(out / "train_prompts.jsonl")[0], rows(out / "train_sft.jsonl")[0]
    assert prompt == {"text": "User: Q2000?\nAssistant:", "answer": "2001", "answer_extraction": "after ####"}
    assert is_right(demonstration["output"], prompt) and not is_right(demonstration["output"].replace("#", ""), prompt)
    assert rows(out / "train_sft.jsonl")[0] == {
        "input": "User: Q2000?\nAssistant:", "output": "2000+1 = 2001\n#### 2,001"
    }  # fmt: skip
    train = [row["text"] for row in rows(out / "train_comparisons.jsonl")]
    test = [row["text"] for row in rows(out / "test_comparisons.jsonl")]
    assert len(train) == 7 * 2 * 2 and len(test) == 3 * 2 * 2  # a right answer given twice counts once
    for good, bad in zip(train[::2], train[1::2], strict=True):
        question = good.split("\n")[0]
        assert bad.startswith(question + "\nAssistant: so ") and good != bad and "<<" not in good
        assert re.search(r"\n#### \d+$", good)
    asked = {text.split("\n")[0] for text in train}
    held_out = {text.split("\n")[0] for text in test}
    prompts = {row["text"].split("\n")[0] for row in rows(out / "test_prompts.jsonl")}
    assert not asked & held_out and not asked & prompts and held_out <= prompts and len(prompts) == 5


def test_gsm8k_with_a_chat_template(gsm8k: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    out = tmp_path / "out"
    arguments = ["--source", str(gsm8k), "--output", str(out), "--keep-calculator", "--max-pairs-per-question", "1"]
    script("process_gsm8k").main([*arguments, "--tokenizer", str(tmp_path / "tokenizer")])
    assert rows(out / "train_prompts.jsonl")[0]["text"] == "user: Q2000?<|endoftext|>\nassistant: "
    texts = [row["text"] for row in rows(out / "train_comparisons.jsonl")]
    assert len(texts) == 9 * 2 and all(text.endswith("<|endoftext|>") for text in texts)
    assert "<<1+1=2>>" in texts[0]
    assert rows(out / "train_sft.jsonl")[0]["messages"][0] == {"role": "user", "content": "Q2000?"}
    check_datasets_can_read(out, tokenizer)


def test_gsm8k_complaints(gsm8k: Path, tmp_path: Path) -> None:
    main = script("process_gsm8k").main
    with pytest.raises(DataError, match=r"neither train\.jsonl nor gsm_train\.jsonl"):
        main(["--source", str(tmp_path), "--output", str(tmp_path)])
    with (gsm8k / "gsm_train.jsonl").open("a") as file:
        file.write('{"question": "Q?", "answer": "no number"}\n')
    for pairs in ("0", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main(["--source", str(gsm8k), "--output", str(tmp_path), f"--max-pairs-per-question={pairs}"])
    with pytest.raises(DataError, match=r"gsm_train\.jsonl:9: 'answer' does not end"):
        main(["--source", str(gsm8k), "--output", str(tmp_path)])


# ---- download_and_process ---------------------------------------------------------------------


def write_gzip(path: Path, *lines: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


def pair(prompt: str, good: str, bad: str) -> dict[str, str]:
    return {"chosen": f"{prompt}\n\nAssistant: {good}", "rejected": f"{prompt}\n\nAssistant: {bad}"}


def test_anthropic_hh_from_a_folder(tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    one = "\n\nHuman: When did it start?"
    two = f"{one}\n\nAssistant: In 2000.\nIndeed.\n\nHuman: And 6*10?"
    source, out = tmp_path / "hh", tmp_path / "out"
    odd = [
        pair("\n\nAssistant: Hello", "a", "b"),  # the assistant speaks first
        {"chosen": f"{one}\n\nAssistant: a", "rejected": f"{two}\n\nAssistant: a"},
        pair(one, "same", "same "),
        pair(one, "", "b"),
    ]
    write_gzip(source / "helpful-base" / "train.jsonl.gz", pair(one, "31 August", "I refuse."), *odd)
    write_gzip(source / "harmless-base" / "train.jsonl.gz", pair(two, "60", "90"), pair(one, "In 2000", "No"))
    write_gzip(source / "helpful-base" / "test.jsonl.gz", pair(two, "60", "90"))
    write_gzip(source / "red-team-attempts" / "train.jsonl.gz", {"transcript": "x"})
    script("download_and_process").main(["--source", str(source), "--output", str(out)])

    comparisons = [row["text"] for row in rows(out / "train_comparisons.jsonl")]
    user = "User: When did it start?\n\nAssistant:"
    assert comparisons[2:] == [f"{user} In 2000", f"{user} No", f"{user} 31 August", f"{user} I refuse."]
    talk = f"{user} In 2000.\nIndeed.\n\nUser: And 6*10?\n\nAssistant:"
    assert comparisons[:2] == [f"{talk} 60", f"{talk} 90"]
    assert rows(out / "train_prompts.jsonl") == [{"text": talk}, {"text": user}]
    assert rows(out / "test_prompts.jsonl") == [{"text": talk}]
    demonstrations = [{"input": talk, "output": "60"}]
    assert rows(out / "test_sft.jsonl") == demonstrations
    demonstrations += [{"input": user, "output": "In 2000"}, {"input": user, "output": "31 August"}]
    assert rows(out / "train_sft.jsonl") == demonstrations
    check_datasets_can_read(out, tokenizer)
    said = capsys.readouterr().out
    assert "train_comparisons.jsonl: 6 lines" in said and "train_prompts.jsonl: 2 lines" in said
    assert "'turns out of order or empty': 2, 'different prompts': 1, 'equal answers': 1" in said
    assert "test: pairs left out: none" in said


def test_anthropic_hh_in_a_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One split alone, unzipped; only the chosen answer of a dialogue is learnt."""
    two = "\n\nHuman: When?\n\nAssistant: In 2000.\n\nHuman: And 6*10?"
    folder, out = tmp_path / "harmless-base", tmp_path / "out"
    write_jsonl(folder / "train.jsonl", [pair(two, "60", "90")])
    write_gzip(folder / "train.jsonl.gz", pair(two, "60", "90"))  # the same once more, as downloaded
    tokenizer.save(tmp_path / "tokenizer")
    style = ["--tokenizer", str(tmp_path / "tokenizer")]
    script("download_and_process").main(["--source", str(tmp_path), "--output", str(out), *style])
    talk = "user: When?<|endoftext|>\nassistant: In 2000.<|endoftext|>\nuser: And 6*10?<|endoftext|>\nassistant: "
    assert rows(out / "train_prompts.jsonl") == [{"text": talk}]
    texts = [row["text"] for row in rows(out / "train_comparisons.jsonl")]
    assert texts == [f"{talk}60<|endoftext|>", f"{talk}90<|endoftext|>"]
    (example,) = SFTDataset([out / "train_sft.jsonl"], tokenizer, SFT_FORMAT)
    learnt = [token for token, target in zip(example.token_ids, example.targets, strict=True) if target]
    assert tokenizer.ids_to_text(learnt, keep_special=True).startswith("60<|endoftext|>")
    assert not list(out.glob("test_*"))


def test_a_pointer_of_git_lfs_is_named_before_anything_is_written(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 13\n"
    write_gzip(tmp_path / "a" / "train.jsonl.gz", pair("\n\nHuman: x", "a", "b"))
    (tmp_path / "a" / "test.jsonl.gz").write_text(pointer)
    with pytest.raises(DataError, match=r"test\.jsonl\.gz is only Git LFS's pointer to the file: .*git lfs pull"):
        script("download_and_process").main(["--source", str(tmp_path), "--output", str(tmp_path / "out")])
    assert not list((tmp_path / "out").glob("*"))
    (tmp_path / "train.jsonl").write_text(pointer)
    with pytest.raises(DataError, match=r"train\.jsonl is only Git LFS's pointer"):
        script("process_gsm8k").main(["--source", str(tmp_path), "--output", str(tmp_path / "out")])


def test_anthropic_hh_complaints(tmp_path: Path) -> None:
    module = script("download_and_process")
    with pytest.raises(DataError, match=r"no train\.jsonl\.gz, test\.jsonl\.gz, train\.jsonl or test"):
        module.main(["--source", str(tmp_path)])
    file = tmp_path / "a" / "train.jsonl.gz"
    write_gzip(file, pair("\n\nHuman: x", "a", "b"), "{oops")
    with pytest.raises(DataError, match=r"train\.jsonl\.gz:2: not valid JSON"):
        module.main(["--source", str(tmp_path), "--output", str(tmp_path)])
    write_gzip(file, {"chosen": "x"})
    with pytest.raises(DataError, match=r"train\.jsonl\.gz:1: key 'rejected' is missing"):
        module.main(["--source", str(tmp_path), "--output", str(tmp_path)])
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"train\.jsonl\.gz: damaged"):
        module.main(["--source", str(tmp_path), "--output", str(tmp_path)])


@pytest.mark.parametrize("name", ["make_arithmetic", "process_gsm8k", "download_and_process"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="2"):
        script(name).main([f"--source={tmp_path}", "--output", str(file)])
    assert f"argument --output: {file} cannot be written to: {file} is not a folder" in capsys.readouterr().err


def test_help_shows_defaults() -> None:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    parser.add_argument("--rounds", default=3)
    parser.add_argument("--seeds", nargs="+", default=(1, 2), help="of PPO")
    parser.add_argument("--batch", help="rows (default: all)")
    parser.add_argument("--more", nargs="*", default=(), help="overrides")
    parser.add_argument("--strings", nargs="*", default=[], help="ends")
    parser.add_argument("--busy", action="store_true")
    text = parser.format_help()
    assert "--rounds ROUNDS       default: 3\n" in text and "of PPO (default: 1 2)\n" in text
    assert text.count("default") == 3


def test_anthropic_hh_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(DataError, match=r"(?s)cannot download Anthropic/hh-rlhf.*--source"):
        script("download_and_process").main(["--output", str(tmp_path)])
