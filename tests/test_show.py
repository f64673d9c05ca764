"""``python -m nemo_style_aligner.data.show``: examples as a job sees them, through the job's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_processes import ROOT

from nemo_style_aligner.data import show
from nemo_style_aligner.data.jsonl import write_jsonl
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_character_tokenizer([chr(c) for c in range(32, 127)] + ["\n", "\x1b"], directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    show.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_what_is_learnt_is_marked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "human", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "sft.jsonl", [{"messages": chat}, {"input": "Q\x1b[2J", "output": "A"}])
    out = said(capsys, tmp_path / "sft.jsonl", "--model", model, "--count", 5)
    assert "user: 1+1?<|endoftext|>\nassistant: ⟦2<|endoftext|>⟧" in out
    assert "Q\\x1b[2J⟦ A<|endoftext|>⟧" in out  # nothing of a file reaches a terminal as a command
    assert "--- in all: 2 texts" in out and "texts whose end generation knows: 2 of 2" in out
    # Keys of the job's config count as in the job.
    out = said(capsys, tmp_path / "sft.jsonl", "--model", model, "model.data.train_ds.add_eos=False", "--example=2")
    assert "⟦ A⟧" in out and "texts whose end generation knows: 1 of 2" in out
    out = said(capsys, tmp_path / "sft.jsonl", "--model", model, "--example=2", "--tokens")
    assert [line.split() for line in out.splitlines() if "learnt '" in line][-1][2:] == ["learnt", "'<|endoftext|>'"]


def test_comparisons_and_prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "it's (1).jsonl"
    write_jsonl(file, [{"prompt": "Q: 1?\nA:", "chosen": " 1", "rejected": " 2"}])
    out = said(capsys, file, "--model", model, "model.data.append_eod=True")
    assert "chosen, 11 tokens" in out and "rejected, 11 tokens" in out and "Q: 1?\nA: 1<|endoftext|>" in out
    write_jsonl(file, [{"text": "Q: 1?\nA:", "answer": "1"}])
    out = said(capsys, file, "--model", model, "--job", "ppo", "model.ppo.sampling_params.end_strings=['\\nQ:']")
    assert "1: prompt, 8 tokens" in out and "a response ends with '<|endoftext|>' or '\\nQ:'" in out


def test_mistakes_are_said_in_a_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    write_jsonl(file, [{"text": "a"}])
    for arguments, message in (
        ((), "text.jsonl:1: 'text' may be one of a pair of a reward model's, or a prompt of PPO's: say --job"),
        (("--job", "ppo", "--example", "2"), "--example 2: there are 1 examples"),
        (("--job", "ppo", "model.data.seq_lenght=4"), "model.data.seq_lenght; did you mean model.data.seq_length"),
    ):
        with pytest.raises(SystemExit) as refused:
            show.main([str(file), "--model", str(model), *arguments])
        assert message in str(refused.value) and "Traceback" not in str(refused.value)


def test_as_a_user_starts_it(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sft.jsonl", [{"input": "Q", "output": "A"}])
    command = [sys.executable, "-m", "nemo_style_aligner.data.show", "sft.jsonl", "--model", str(model)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Q⟦ A<|endoftext|>⟧" in result.stdout and json.dumps("A") not in result.stdout
