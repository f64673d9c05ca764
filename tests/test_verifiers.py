"""A taskset of verifiers, which is installed from the index in an environment of its own, learnt by GRPO on a CPU."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job_processes import ROOT, Job, environment, run, script

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.tokenizer import load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

PYTHON = os.environ.get("VERIFIERS_PYTHON")
EXAMPLES = ROOT / "examples" / "environments"
TEMPLATE = "{% for m in messages %}{{ m['content'] + ('=' if m['role'] == 'user' else eos_token) }}{% endfor %}"
TIMEOUT = 900.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(PYTHON is None, reason="NOT TESTED: needs verifiers; make test-verifiers installs it"),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model of random weights whose tokens are characters."""
    folder = tmp_path / "tokenizer"
    train_character_tokenizer("1234=", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    shape = ModelArchitecture(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=32,
    )
    with single_process(seed=1):
        model = build_model(shape, {}, torch.float32)
        save_nemo(tmp_path / "base.nemo", model, shape.to_nemo_config() | {"encoder_seq_length": 32}, tokenizer)
    return tmp_path / "base.nemo"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The adapter, with the taskset beside it."""
    port, others = free_port(), {"PYTHONPATH": str(EXAMPLES)}
    command = [str(PYTHON), str(EXAMPLES / "verifiers_server.py"), "cards"]
    clean = {name: value for name, value in environment().items() if not name.startswith("PYTHON")} | others
    subprocess.run([*command, "--write", tmp_path / "prompts.jsonl"], check=True, env=clean)
    with (tmp_path / "server.txt").open("wb") as log:
        serving = subprocess.Popen([*command, "--port", str(port)], env=clean, stdout=log, stderr=log)
    try:
        url, deadline = f"http://127.0.0.1:{port}/run", time.monotonic() + 120
        while time.monotonic() < deadline and serving.poll() is None:
            try:
                urllib.request.urlopen(url)
            except urllib.error.HTTPError:  # it is there
                break
            except OSError:
                time.sleep(0.3)
        yield url
    finally:
        serving.terminate()
        serving.wait(60)


def test_a_policy_learns_a_taskset(base: Path, server: str, tmp_path: Path) -> None:
    """From chance; in the middle the job is stopped and goes on. Two replies an episode, which are one row."""
    prompts = tmp_path / "prompts.jsonl"

    def job(steps: int) -> list[str]:
        return script(
            "train_gpt_ppo_actor.py",
            f"pretrained_checkpoint.restore_from_path={base}",
            f"model.data.data_prefix={{train: [{prompts}], validation: [{prompts}], test: [{prompts}]}}",
            f"exp_manager.explicit_log_dir={tmp_path / 'log'}",
            f"trainer.ppo.environment={{url: {server}}}",
            *("trainer.ppo.rewards=[{source: environment}]", "trainer.ppo.estimator=grpo"),
            *("trainer.precision=32", f"trainer.ppo.max_steps={steps}", "trainer.ppo.max_epochs=9"),
            *("trainer.ppo.val_check_interval=0", "trainer.ppo.save_interval=10", "trainer.ppo.mask_truncated=False"),
            *("trainer.ppo.num_rollouts_per_prompt=8", "model.ppo.num_rollout_samples=4", "model.ppo.ratio_eps=0.2"),
            *("model.global_batch_size=32", "model.micro_batch_size=32", "model.ppo.rollout_micro_batch_size=32"),
            *("model.encoder_seq_length=32", "model.ppo.length_params.max_length=16", "model.ppo.entropy_bonus=0.02"),
            *("model.optim.lr=3e-3", "model.optim.sched.warmup_steps=1", "model.optim.sched.name=constant"),
            *("trainer.ppo.initial_policy_kl_penalty=0", "trainer.ppo.episodes.max_running=32"),
        )

    assert Job(job(10), tmp_path / "first.txt").wait(TIMEOUT) == 0, (tmp_path / "first.txt").read_text()[-3000:]
    run(job(40), tmp_path / "second.txt", TIMEOUT)
    metrics = read_metrics(tmp_path / "log")
    rewards = [value for _, value in metrics["train_rollouts/rewards"]]
    print([round(value, 3) for value in rewards])
    assert len(rewards) == 40 and statistics.mean(rewards[:5]) < 0.4 < 0.65 < statistics.mean(rewards[-5:])
    for name, expected in {"replies": 2.0, "rows": 1.0, "failed_episodes": 0.0}.items():
        assert {value for _, value in metrics[f"generation/{name}"]} == {expected}, name
    assert set(read_metrics(tmp_path / "log")) >= {"train_rollouts/rewards/environment/right"}
