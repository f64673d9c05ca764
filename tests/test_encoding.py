"""Data files that several processes make samples of: the same samples, format, warnings and errors as one makes."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_chats import QWEN3, SPECIAL

from nemo_style_aligner.engine.text import encoding
from nemo_style_aligner.engine.text.jsonl import DataError, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.trainer.data.datasets import ComparisonDataset, PromptDataset, RegressionDataset
from nemo_style_aligner.trainer.data.sft import SFTDataset, SFTFormat

LINES = 520  # three batches: of two processes, one makes two
FORMAT = SFTFormat(
    max_seq_length=500, min_seq_length=1, prompt_template="{input} {output}", label_key="output",
    truncation_field="input", truncation_method="right", add_bos=None, add_eos=True, add_sep=False,
    answer_only_loss=True, chats_only=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes encode them, unless a test says otherwise."""
    monkeypatch.setattr(encoding, "available_cores", lambda: 2)
    monkeypatch.setattr(encoding, "LARGE", 10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_character_tokenizer([chr(c) for c in range(32, 127)] + ["\n"], folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in SPECIAL:
        entry = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": token}
        content["model"]["vocab"][token] = entry["id"]
        content["added_tokens"].append(entry)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(QWEN3)
    return folder


def chat(i: int, length: int, *more: dict[str, str]) -> list[dict[str, str]]:
    """Of three turns, or more; the first one's role is another's word for it."""
    text = f"number {i}: " + "x" * length
    answers = [{"role": "gpt", "content": f"<think>\nhm {i}\n</think>\n\n{i}"}, {"role": "user", "content": "again"}]
    return [{"role": "human", "content": text}, *answers, *more]


def rows_of(kind: str, count: int = LINES, length: int = 30) -> list[dict[str, Any]]:
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    rows: list[dict[str, Any]] = []
    for i in range(count):
        if kind == "sft":
            pair = {"context": "add", "input": f"{i}+1" + "y" * length, "output": str(i + 1)}
            rows.append(pair if i % 50 == 7 else {"messages": chat(i, length, good)})
        elif kind == "comparisons":
            rows.append({"chosen": chat(i, length, good), "rejected": chat(i, length, bad if i % 9 else good)})
        elif kind == "labelled":
            rows.append({"messages": chat(i, length, good), "label": [i / 7, -100.0] if i % 9 else [-100, -100]})
        else:
            rows.append({"messages": chat(i, length if i % 9 else 500), "answer": str(i)})
    return rows


def long(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.long)


def build(kind: str, path: Path, tokenizer: Tokenizer) -> Any:
    if kind == "sft":
        return SFTDataset([path], tokenizer, FORMAT)
    if kind == "comparisons":
        return ComparisonDataset([path], tokenizer, 500, append_eod=True)
    if kind == "labelled":
        return RegressionDataset([path], tokenizer, 500)
    return PromptDataset([path], tokenizer, 400)


def items_of(data: Any) -> list[Any]:
    return [data[i] for i in range(len(data))]


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("comparisons", "labelled", "prompts"))]
)
def test_two_processes_make_what_one_makes(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    write_jsonl(path, rows_of(kind))
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(encoding, "available_cores", lambda cores=cores: cores)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data = build(kind, path, tokenizer)
        found.append((items_of(data), data.written, caplog.messages))
    alone, together = found
    assert alone == together
    assert "'human' as 'user', 'gpt' as 'assistant'" in "".join(alone[2])
    expected = {
        "sft": "data.jsonl: lines have 'context' (11 of them)",
        "comparisons": "dropped 58 of 520 pairs: of two texts that are the same",
        "labelled": "dropped 58 of 520 texts: without any label",
        "prompts": "dropped 58 of 520 prompts: longer than 400",
    }
    assert expected[kind] in "".join(alone[2])


@pytest.mark.parametrize(
    "fault", ['{"messages": [{"role": "critic", "content": "hm"}]}', pytest.param("[", marks=pytest.mark.long)]
)
def test_errors_are_those_of_one_process(fault: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Also if lines that others make are before or behind it, with errors of their own."""
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) for row in rows_of("sft")]
    lines[298], lines[515] = fault, '{"input": "a"}'
    path.write_text("\n".join(lines))
    said = []
    for cores in (1, 2):
        monkeypatch.setattr(encoding, "available_cores", lambda cores=cores: cores)
        with pytest.raises(DataError, match=r"data\.jsonl:299: ") as raised:
            build("sft", path, load_tokenizer(folder))
        said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.long
def test_processes_that_die_leave_their_part_to_this_one(folder: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    write_jsonl(path, rows_of("comparisons"))
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            encoding = [p for p in psutil.Process().children() if p.children()]
            if len(encoding) >= 2:  # each has a renderer of its own
                for process in (*encoding, *(renderer for p in encoding for renderer in p.children())):
                    process.kill()
                    killed.append(process.pid)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    data = build("comparisons", path, tokenizer)
    thread.join()
    assert killed and len(data) == LINES - 58
    assert items_of(build("comparisons", path, tokenizer)) == items_of(data)
