"""The command line ``nsa``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from job_processes import ROOT

from nemo_style_aligner.cli.main import COMMANDS, nsa
from nemo_style_aligner.data.jsonl import write_jsonl
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError

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


def said(*arguments: object, status: int = 0) -> str:
    """What the command prints. An error that `main` would say is raised."""
    result = CliRunner(catch_exceptions=False).invoke(nsa, list(map(str, arguments)))
    assert result.exit_code == status, result.output
    return result.output


def shown(*arguments: object, status: int = 0) -> str:
    return said("data", "show", *arguments, status=status)


def test_what_is_learnt_is_marked(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "human", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    write_jsonl(tmp_path / "sft.jsonl", [{"messages": chat}, {"input": "Q\x1b[2J", "output": "A"}])
    out = shown(tmp_path / "sft.jsonl", "--model", model, "--count", 5)
    assert "user: 1+1?<|endoftext|>\nassistant: ⟦2<|endoftext|>⟧" in out
    assert "Q\\x1b[2J⟦ A<|endoftext|>⟧" in out  # nothing of a file reaches a terminal as a command
    assert "--- in all: 2 texts" in out and "texts whose end generation knows: 2 of 2" in out
    # Keys of the job's config count as in the job.
    out = said(
        "data", "show", tmp_path / "sft.jsonl", "--model", model, "model.data.train_ds.add_eos=False", "--example=2"
    )
    assert "⟦ A⟧" in out and "texts whose end generation knows: 1 of 2" in out
    out = shown(tmp_path / "sft.jsonl", "--model", model, "--example=2", "--tokens")
    assert [line.split() for line in out.splitlines() if "learnt '" in line][-1][2:] == ["learnt", "'<|endoftext|>'"]


def test_comparisons_and_prompts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "it's (1).jsonl"
    write_jsonl(file, [{"prompt": "Q: 1?\nA:", "chosen": " 1", "rejected": " 2"}])
    out = shown(file, "--model", model, "model.data.append_eod=True")
    assert "chosen, 11 tokens" in out and "rejected, 11 tokens" in out and "Q: 1?\nA: 1<|endoftext|>" in out
    write_jsonl(file, [{"text": "Q: 1?\nA:", "answer": "1"}])
    out = said(
        "data", "show", file, "--model", model, "--job", "ppo", "model.ppo.sampling_params.end_strings=['\\nQ:']"
    )
    assert "1: prompt, 8 tokens" in out and "a response ends with '<|endoftext|>' or '\\nQ:'" in out


def test_mistakes_are_said_in_a_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    write_jsonl(file, [{"text": "a"}])
    for arguments, message in (
        ((), "text.jsonl:1: 'text' may be one of a pair of a reward model's, or a prompt of PPO's: say --job"),
        (("--job", "ppo", "--example", "2"), "--example 2: there are 1 examples"),
        (("--job", "ppo", "model.data.seq_lenght=4"), "model.data.seq_lenght; did you mean model.data.seq_length"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            shown(file, "--model", model, *arguments)
    for arguments, message in (
        (("--model", "nowhere"), "Path 'nowhere' does not exist"),
        (("--model", model, "--example", "0"), "0 is not in the range x>=1"),
    ):
        assert message in shown(file, *arguments, status=2)


def test_as_a_user_starts_it(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sft.jsonl", [{"input": "Q", "output": "A"}])
    command = [sys.executable, "-m", "nemo_style_aligner.cli", "data", "show", "sft.jsonl", "--model", str(model)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Q⟦ A<|endoftext|>⟧" in result.stdout and json.dumps("A") not in result.stdout


def test_help_and_completion_import_nothing_heavy() -> None:
    """Of any command: a person who asks how to call it does not wait for torch."""
    script = """
import sys
from click.testing import CliRunner
from nemo_style_aligner.cli.main import COMMANDS, nsa
for arguments in ([], *([name] for name in COMMANDS)):
    result = CliRunner(catch_exceptions=False).invoke(nsa, [*arguments, "--help"])
    assert result.exit_code == 0 and "Examples:" in result.output or "Commands:" in result.output, result.output
heavy = {"torch", "numpy", "transformers", "hydra", "megatron"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
    environment = os.environ | {"_NSA_COMPLETE": "bash_complete", "COMP_WORDS": "nsa da", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "nemo_style_aligner.cli"]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
    assert result.stdout.split() == ["plain,data"]


def test_an_unknown_command_is_named() -> None:
    assert "Did you mean 'data'" in said("dat", status=2)
    assert all(name in said("--help") for name in COMMANDS)
