"""The command line ``nsa``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner
from generation_models import architecture
from job_processes import ROOT
from omegaconf import OmegaConf

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.text.tokenizer import load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import COMMANDS, nsa
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS
from nemo_style_aligner.trainer.config.section_names import speak_as
from nemo_style_aligner.trainer.models.files import convert, tokenizer_of
from nemo_style_aligner.trainer.models.restore import portable_config

PAIR = {"input": "Q\x1b[2J", "output": "A", "source": "web"}
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
    file = tmp_path / "sft.jsonl"
    file.write_text(f"{json.dumps({'messages': chat, 'id': 'x7'})}\n\n{json.dumps(PAIR)}\n")
    out = shown(file, "--model", model, "--count", 5)
    assert "read as examples for fine-tuning (--job sft)" in out
    assert "user: 1+1?<|endoftext|>\nassistant: ⟦2<|endoftext|>⟧" in out
    assert "Q\\x1b[2J⟦ A<|endoftext|>⟧" in out  # nothing of a file reaches a terminal as a command
    assert "--- all of the file: 2 texts" in out and "end where generation stops: 2 of 2" in out
    assert out.count("note: not in the text") == 2 and "1 of 2 examples (line 1): not in the text, or not" in out
    # Keys of the job's config count as in the job; a line has the number that it has in an editor.
    out = shown(file, "--model", model, "model.data.train_ds.add_eos=False", "--line=2", "--tokens", "--color")
    assert "sft.jsonl:3: example" in out and "end where generation stops: 1 of 2" in out
    assert "\x1b[32m\x1b[1m A\x1b[0m" in out and "\x1b[2J" not in out
    tokens = [line.split() for line in out.splitlines() if "learnt " in line and "'" in line]
    assert tokens[-1][2:] == ["learnt", "\x1b[32m\x1b[1m'A'\x1b[0m"]
    # What the job leaves out is said of the line itself.
    out = shown(file, "--model", model, "model.data.train_ds.max_seq_length=8", "--count", 2)
    assert "left out:" in out and "sft.jsonl:1: all 1 samples are shorter" in out and "⟦ A<|endoftext|>⟧" in out


def test_what_is_there_twice_is_said(model: Path, tmp_path: Path) -> None:
    """A template that was applied before, one that repeats a text, and a key that is no part of it."""
    again = {"role": "user", "content": "user: 1+1?<|endoftext|>"}
    record = {"messages": [again, {"role": "assistant", "content": "2"}], "source": "web"}
    write_jsonl(tmp_path / "twice.jsonl", [record])
    out = shown(tmp_path / "twice.jsonl", "--model", model)
    assert "note: messages[0].content has special tokens of its own (<|endoftext|>): was a template applied" in out
    assert "note: <|endoftext|> stands twice in a row" in out and "note: not in the text, or not as it stands" in out
    out = shown(tmp_path / "twice.jsonl", "--model", model, "model.special_tokens_as_text=True")
    assert "stands twice" not in out and "special tokens of its own" not in out
    repeating = tmp_path / "repeating"
    shutil.copytree(model, repeating)
    (repeating / "chat_template.jinja").write_text("{{ messages[0]['content'] }} " + TEMPLATE)
    write_jsonl(
        tmp_path / "twice.jsonl", [{"messages": [{"role": "user", "content": "How much is one and one, please?"}]}]
    )
    out = shown(tmp_path / "twice.jsonl", "--model", repeating)
    assert "(--job ppo)" in out and "note: messages[0].content stands in the text 2 times" in out


def test_comparisons_and_prompts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "it's (1).jsonl"
    write_jsonl(file, [{"prompt": "Q: 1?\nA:", "chosen": " 1", "rejected": " 2"}])
    out = shown(file, "--model", model, "model.data.append_eod=True")
    assert "chosen, 11 tokens" in out and "rejected, 11 tokens" in out and "Q: 1?\nA: 1<|endoftext|>" in out
    assert "note:" not in out
    write_jsonl(file, [{"text": "Q: 1?\nA: 1"}, {"text": "Q: 1?\nA: 2"}])
    out = shown(file, "--model", model, "--job", "rm", "--line", 2)
    assert "(1).jsonl:1-2: chosen" in out and "(1).jsonl:1-2: rejected" in out and "note:" not in out
    write_jsonl(file, [{"text": "Q: 1?\nA: 1", "label": [3, 4]}])
    assert "text labelled 3, 4, 10 tokens" in shown(file, "--model", model)
    write_jsonl(file, [{"text": "Q: 1?\nA:", "answer": "1"}])
    out = shown(file, "--model", model, "model.ppo.sampling_params.end_strings=['\\nQ:']")
    assert "(1).jsonl:1: prompt, 8 tokens" in out and "a response ends with '<|endoftext|>' or '\\nQ:'" in out


def test_mistakes_are_said_in_a_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    write_jsonl(file, [{"text": "a"}])
    for arguments, message in (
        (("--model", model), "text.jsonl:1: 'text' may be one of a pair of a reward model's, or a prompt of PPO's"),
        (("--model", model, "--job", "ppo", "--line", "2"), "--line 2: the last line is 1"),
        (("--model", model, "--job", "ppo", "model.data.seq_lenght=4"), "did you mean model.data.seq_length"),
        (("--model", tmp_path, "--job", "ppo"), "is no model (it has no model_config.yaml"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            shown(file, *arguments)
    for arguments, message in (
        (("--model", "nowhere"), "Path 'nowhere' does not exist"),
        (("--model", model, "--line", "0"), "0 is not in the range x>=1"),
    ):
        assert message in shown(file, *arguments, status=2)


@pytest.mark.slow
def test_as_a_user_starts_it(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sft.jsonl", [{"input": "Q", "output": "A"}])
    result = command("data", "show", tmp_path / "sft.jsonl", "--model", model, PYTHONIOENCODING="utf-8")
    assert result.returncode == 0 and result.stderr.startswith(f"loading torch, then {model}\n"), result.stderr
    assert "Q⟦ A<|endoftext|>⟧" in result.stdout and json.dumps("A") not in result.stdout


@pytest.fixture(scope="module")
def hugging_face(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the tokenizer of `model`, as transformers writes it."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=load_tokenizer(model).vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copytree(model, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("job", [name for name in JOBS if "gradient_clip_val" in str(load_defaults(name).trainer)])
def test_an_archive_says_by_which_method_it_was_trained(job: str) -> None:
    method = {"training_rm": "rm", "gpt_ppo_actor": "ppo", "gpt_ppo_critic": "ppo"}.get(job, job.split("_", 1)[1])
    trainer: Any = OmegaConf.to_container(load_defaults(job).trainer, resolve=False)
    speak_as(job)
    try:
        (line,) = portable_config({}, architecture(), trainer, Path("/base.nemo"))["history"]
    finally:
        speak_as("gpt_sft")
    assert line == f"{method.removesuffix('_actor')} from /base.nemo"


def test_convert_and_inspect(hugging_face: Path, tmp_path: Path) -> None:
    """As a user starts it: there, back, and what is said of both; nothing is overwritten."""
    archive, back = tmp_path / "base.nemo", tmp_path / "back"
    done = command("convert", hugging_face, archive, "--precision", "32")
    assert done.returncode == 0 and f"{archive}: llama, " in done.stdout, done.stderr
    with single_process(1):
        convert(archive, back, False, "32")
    ours, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (back, hugging_face))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)

    described = json.loads(said("inspect", archive, "--json"))
    assert described["kind"] == ".nemo archive" and described["purpose"] == "language model"
    assert described["parameters"] == sum(tensor.numel() for tensor in theirs.values())
    assert described["history"] == [f"converted from {hugging_face}"]
    assert described["architecture"] == json.loads(said("inspect", hugging_face, "--json"))["architecture"]
    out = said("inspect", back)
    assert "kind: Hugging Face directory" in out and "  num_layers: 2\n" in out and "F32: " in out
    assert "  ends_responses:\n  - <|endoftext|>\n" in out and "  chat_template: true\n" in out

    before = archive.read_bytes()
    for source, target, status, message in (
        (hugging_face, archive, 2, "base.nemo is there already"),
        (hugging_face, back, 2, "back is there already"),
        (hugging_face, tmp_path / "x.gguf", 2, "name a .nemo file, or a folder"),
    ):
        done = command("convert", source, target)
        assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr
    assert archive.read_bytes() == before


def test_what_ends_responses_may_be_named_by_the_models_config(hugging_face: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(hugging_face, tmp_path / "old")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    stop_ids = (tokenizer_of(folder).eos_id, 5)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": stop_ids}))
    assert tokenizer_of(folder).stop_ids == stop_ids


def test_what_is_no_model_is_named(hugging_face: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "sft.nemo").touch()
    (tmp_path / "other").mkdir()
    with single_process(1):
        for source, target_is_archive, message in (
            (tmp_path / "nowhere", True, "nowhere does not exist"),
            (tmp_path / "other", True, "other is no model (it has no model_config.yaml"),
            (tmp_path / "run", True, "run holds models: name one, such as"),
            (model, True, "has a tokenizer, but no model"),
            (hugging_face, False, "is a Hugging Face directory already"),
        ):
            with pytest.raises(UserError, match=re.escape(message)):
                convert(source, tmp_path / "out", target_is_archive)
        for option in ("base", "hyperparameters"):  # which would change nothing
            with pytest.raises(UserError, match=f"--{option} is of .*: leave it out"):
                convert(hugging_face, tmp_path / "out.nemo", True, **{option: model})
    for path in (tmp_path / "other", tmp_path / "run" / "checkpoints" / "sft.nemo"):
        with pytest.raises(UserError):
            said("inspect", path)


@pytest.mark.slow
def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler can train; a script that needs one is told so."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = CliRunner(catch_exceptions=False).invoke(
        nsa, ["doctor", "--json", "--need", "compiler"], standalone_mode=False
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.return_value == 1 and found["compiler"]["state"] == "broken"
    assert "no-such-compiler" in found["compiler"]["detail"] and "g++" in found["compiler"]["remedy"]
    assert {found[name]["state"] for name in ("packages", "torch", "megatron-core", "gloo")} == {"ok"}
    assert found["torch"]["detail"].startswith(torch.__version__)
    assert (found["gpu"]["state"] == "ok") == torch.cuda.is_available()
    assert all(finding["cost"] for finding in found.values() if finding["state"] != "ok")


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``nsa`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "nemo_style_aligner", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, text=True, capture_output=True, timeout=120,
    )  # fmt: skip


def test_help_and_completion_import_nothing_heavy() -> None:
    """Of any command: a person who asks how to call it does not wait for torch. Jobs show their config, too."""
    script = """
import sys
from click.testing import CliRunner
from nemo_style_aligner.tools.cli.main import COMMANDS, nsa
for arguments in ([], *([name] for name in COMMANDS if not name.startswith("serve-"))):
    result = CliRunner(catch_exceptions=False).invoke(nsa, [*arguments, "--help"])
    assert result.exit_code == 0 and "Examples:" in result.output or "Commands:" in result.output, result.output
heavy = {"torch", "numpy", "transformers", "hydra", "megatron"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
    done = command(_NSA_COMPLETE="bash_complete", COMP_WORDS="nsa da", COMP_CWORD="1")
    assert done.stdout.split() == ["plain,data"]


def test_an_unknown_command_is_named() -> None:
    assert "Did you mean 'data'" in said("dat", status=2)
    assert all(name in said("--help") for name in COMMANDS)


def test_rewards_are_tried_on_lines_before_a_job(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl", [{"text": f"{n}+1?", "answer": str(n + 1)} for n in range(3)])
    functions = tmp_path / "mine.py"
    functions.write_text("def short(prompt, response, line):\n    return 1 / (len(response) - 2)\n")
    rewards = f"[{{source: exact_match}}, {{source: '{functions}:short', weight: 2}}]"
    arguments = ("data", "show", tmp_path / "p.jsonl", "--model", model, "--count", 2, "--rewards", rewards)
    out = said(*arguments, "--response", "2", "--response", "a\x1bbc")
    assert "p.jsonl:1: reward -2 (exact_match 0, short -1)\n2\n" in out
    assert "p.jsonl:2: reward -1 (exact_match 1, short -1)\n2\n" in out
    assert "p.jsonl:2: reward 1 (exact_match 0, short 0.5)\na\\x1bbc\n" in out
    out = said(*arguments, "--response", "12", status=1)
    assert out.count("reward none: reward short: the reward function") == 2 and "ZeroDivisionError" in out
    assert "--response needs --rewards" in said(*arguments[:-2], "--response", "2", status=2)
    with pytest.raises(UserError, match=r"judge\.nemo is asked within a job"):
        said(*arguments[:-1], "[{source: judge.nemo}]", "--response", "2")
