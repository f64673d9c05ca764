"""Tokenized data that are kept: the same samples, format, warnings and errors, whoever makes them, and when."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Artefacts
from job_processes import environment, run, script
from test_chats import QWEN2, QWEN3, SPECIAL

from nemo_style_aligner.data import tokenized
from nemo_style_aligner.data.datasets import ComparisonDataset, PromptDataset, RegressionDataset
from nemo_style_aligner.data.jsonl import DataError, write_jsonl
from nemo_style_aligner.data.sft import SFTDataset, SFTFormat
from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.telemetry.metrics import read_metrics

LINES = 520  # three batches: of two processes, one makes two
FORMAT = SFTFormat(
    max_seq_length=500, min_seq_length=1, prompt_template="{input} {output}", label_key="output",
    truncation_field="input", truncation_method="right", add_bos=None, add_eos=True, add_sep=False,
    answer_only_loss=True, chats_only=False,
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the samples of this test are kept; small files count as large ones, which two processes make."""
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenized, "available_cores", lambda: 2)
    monkeypatch.setattr(tokenized, "LARGE", 10_000)
    return tmp_path / "cache" / "nemo_style_aligner" / "tokens"


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
            pair = {"instruction": "add", "input": f"{i}+1" + "y" * length, "output": str(i + 1)}
            rows.append(pair if i % 50 == 7 else {"messages": chat(i, length, good)})
        elif kind == "comparisons":
            rows.append({"chosen": chat(i, length, good), "rejected": chat(i, length, bad if i % 9 else good)})
        elif kind == "labelled":
            rows.append({"messages": chat(i, length, good), "label": [i / 7, -100.0] if i % 9 else [-100, -100]})
        else:
            rows.append({"messages": chat(i, length if i % 9 else 500), "answer": str(i)})
    return rows


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


def is_of_the_cache(message: str) -> bool:
    return "tokenized before" in message or message.startswith("tokenizing ")


@pytest.mark.parametrize("kind", ["sft", "comparisons", "labelled", "prompts"])
def test_what_is_kept_is_what_would_be_made(
    kind: str, cache: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    write_jsonl(path, rows_of(kind))
    found = []
    for size in ("0", "", ""):  # GB: nothing is kept, and then it is
        monkeypatch.setenv(tokenized.SIZE_VARIABLE, size)
        monkeypatch.setattr(tokenized, "available_cores", lambda cores=2 if size == "" else 1: cores)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data = build(kind, path, tokenizer)
        found.append((items_of(data), data.written, [m for m in caplog.messages if not is_of_the_cache(m)]))
        read = "tokenized before" in caplog.text
        assert read == (len(found) == 3) and len(list(cache.glob("*"))) == (len(found) > 1)
    alone, together, kept = found
    assert alone == together == kept
    assert "'human' as 'user', 'gpt' as 'assistant'" in "".join(alone[2])
    expected = {
        "sft": "data.jsonl: lines have 'instruction' (11 of them)",
        "comparisons": "dropped 58 of 520 pairs: of two texts that are the same",
        "labelled": "dropped 58 of 520 texts: without any label",
        "prompts": "dropped 58 of 520 prompts: longer than 400",
    }
    assert expected[kind] in "".join(alone[2])


def test_whatever_samples_depend_on_makes_them_anew(
    cache: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized, "available_cores", lambda: 1)
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    rows = rows_of("sft", 80)
    write_jsonl(path, rows)
    first = items_of(build("sft", path, tokenizer))
    moved = path.rename(tmp_path / "moved.jsonl")
    assert items_of(build("sft", moved, tokenizer)) == first and len(list(cache.iterdir())) == 1
    rows[-1]["messages"][0]["content"] += "z"
    write_jsonl(path, rows)
    changed = items_of(build("sft", path, tokenizer))
    assert changed[:-2] == first[:-2] and changed[-1] != first[-1]  # the last line makes two
    tokenizer.chat_template = QWEN2
    assert items_of(build("sft", path, tokenizer)) != changed and len(list(cache.iterdir())) == 3
    shorter = SFTFormat(**{**vars(FORMAT), "max_seq_length": 60})
    assert max(len(item.token_ids) for item in items_of(SFTDataset([path], tokenizer, shorter))) <= 60
    assert len(list(cache.iterdir())) == 4


def test_a_damaged_file_is_made_anew(
    cache: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenized, "available_cores", lambda: 1)
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    write_jsonl(path, rows_of("prompts", 100))
    first = items_of(build("prompts", path, tokenizer))
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    assert entry.stat().st_mode & 0o077 == 0
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    for content in (whole[:-100], bytes(flipped), whole.replace(b'"counts"', b'"c"')[:200], b"", b"\x80\x04."):
        caplog.clear()
        entry.write_bytes(content)
        assert items_of(build("prompts", path, tokenizer)) == first
        assert f"{entry} is made anew" in caplog.text and entry.read_bytes() == whole


@pytest.mark.parametrize("fault", ['{"messages": [{"role": "critic", "content": "hm"}]}', "["])
def test_errors_are_those_of_one_process(
    fault: str, cache: Path, folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Also if lines that others make are before or behind it, with errors of their own; and nothing is kept."""
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) for row in rows_of("sft")]
    lines[298], lines[515] = fault, '{"input": "a"}'
    path.write_text("\n".join(lines))
    said = []
    for cores in (1, 2):
        monkeypatch.setattr(tokenized, "available_cores", lambda cores=cores: cores)
        with pytest.raises(DataError, match=r"data\.jsonl:299: ") as raised:
            build("sft", path, load_tokenizer(folder))
        said.append(str(raised.value))
    assert said[0] == said[1] and not [entry for entry in cache.iterdir() if entry.suffix == ""]


@pytest.mark.long
def test_processes_that_die_leave_their_part_to_this_one(cache: Path, folder: Path, tmp_path: Path) -> None:
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
    (entry,) = cache.iterdir()
    entry.unlink()
    assert items_of(build("comparisons", path, tokenizer)) == items_of(data)


def test_a_cache_that_cannot_be_costs_only_the_cache(
    cache: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    path, tokenizer = tmp_path / "data.jsonl", load_tokenizer(folder)
    write_jsonl(path, rows_of("labelled", 100))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tokenized, "available_cores", lambda: 1)
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path / "file"))
    first = items_of(build("labelled", path, tokenizer))
    assert "not kept for the next start" in caplog.text and "set NEMO_STYLE_ALIGNER_CACHE" in caplog.text
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(tokenized.SIZE_VARIABLE, "0.00008")  # GB: one of these, but not two
    for number in range(3):
        write_jsonl(path, rows_of("labelled", 100 + number))
        assert items_of(build("labelled", path, tokenizer))[:80] == first[:80]
        os.utime(max(cache.iterdir(), key=os.path.getmtime), (number, number))
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setenv(tokenized.SIZE_VARIABLE, "much")
    with pytest.raises(Exception, match=rf"{tokenized.SIZE_VARIABLE}=much: give a number of GB"):
        build("labelled", path, tokenizer)


def show(path: Path, folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "nemo_style_aligner.cli",
        "data",
        "show",
        str(path),
        "--model",
        str(folder),
        "--job=sft",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


@pytest.mark.long
def test_one_process_of_a_machine_tokenizes_and_the_others_wait(cache: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    write_jsonl(path, rows_of("sft", 300, 3700))  # large for processes that nothing has been changed in
    dying = show(path, folder)
    while not list(cache.glob("*")):  # it has begun
        assert dying.poll() is None
        time.sleep(0.01)
    others = [show(path, folder) for _ in range(2)]
    time.sleep(0.5)
    dying.kill()  # one of the others takes its place
    dying.communicate()
    outputs, logs = zip(*(other.communicate(timeout=240) for other in others), strict=True)
    assert outputs[0] == outputs[1] and "in all: 594 texts" in outputs[0], logs
    assert sorted("tokenized before" in log for log in logs) == [False, True]
    assert [entry.suffix for entry in cache.iterdir()] == [""]


@pytest.mark.long
def test_a_job_that_is_started_again_learns_the_same(cache: Path, artefacts: Artefacts, tmp_path: Path) -> None:
    """On two ranks, with the same losses and warnings."""
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [{"input": f"{i}+1 " + "9" * 200, "output": f" {i + 1}"} for i in range(5000)])
    found = []
    for name in ("first", "second"):
        flags = [*artefacts.sft_flags(tmp_path / name, 2), f"model.data.train_ds.file_path={path}"]
        output = run(script("train_gpt_sft.py", *flags), tmp_path / f"{name}.log")
        warnings = [line.split(" ", 1)[1] for line in output.splitlines() if "shortened" in line]
        found.append((read_metrics(tmp_path / name)["train/loss"], warnings))
        assert len(list(cache.iterdir())) == 1
    assert "tokenized before" in output
    assert found[0] == found[1] and "shortened 5000 of 5000 samples" in found[0][1][0]
