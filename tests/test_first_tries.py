"""The first start of a job: a Hugging Face folder, data, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Artefacts
from job_processes import environment
from omegaconf import OmegaConf

from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.trainer.config.command_line import compose
from nemo_style_aligner.trainer.config.loading import ConfigError, load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS, SFT, PPOActor
from nemo_style_aligner.trainer.jobs.config_checks import find_problems
from nemo_style_aligner.trainer.jobs.fitting import fitting_batch
from nemo_style_aligner.trainer.models.foreign_models import state_of
from nemo_style_aligner.trainer.rl.rollouts.prompts import fitting_prompts
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

pytestmark = pytest.mark.timeout(600)
SIZES = ("trainer.precision=32", "model.encoder_seq_length=64")
GRPO = (
    "trainer.ppo.rewards=[{source: exact_match}]",
    "model.ppo.length_params.max_length=8",
    "trainer.ppo.max_steps=1",
)


def nsa(*arguments: object, cwd: Path, status: int = 0) -> str:
    command = [sys.executable, "-m", "nemo_style_aligner", *map(str, arguments)]
    done = subprocess.run(command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def user(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Hugging Face model, and 40 lines for each job."""
    folder = tmp_path_factory.mktemp("user")
    nsa("convert", artefacts.base, "hf", "--precision", "32", cwd=folder)
    asked = [(f"User: What is {n}+1?\nAssistant:", f" {n + 1}") for n in range(40)]
    write_jsonl(folder / "sft.jsonl", [{"input": prompt, "output": right} for prompt, right in asked])
    write_jsonl(folder / "prompts.jsonl", [{"text": prompt, "answer": right} for prompt, right in asked])
    pairs = [{"prompt": prompt, "chosen": right, "rejected": " no"} for prompt, right in asked]
    write_jsonl(folder / "pairs.jsonl", pairs)
    judged = [
        {"prompt": p, "completion": text, "label": text != " no"} for p, right in asked for text in (right, " no")
    ]
    (folder / "judged.json").write_text(json.dumps(judged[:40]))
    return folder


def test_a_hugging_face_folder_and_data_are_enough(user: Path) -> None:
    """The archive is made once, after what is wrong with the data has been said."""
    write_jsonl(user / "strange.jsonl", [{"sentence": "hello"}] * 40)
    start = ("train", "sft", "--model", "hf", "--output", "first", *SIZES)
    refused = nsa(*start, "--data", "strange.jsonl", cwd=user, status=2)
    assert "strange.jsonl:1" in refused and "'sentence'" in refused
    assert not list((user / "first" / "base").glob("*.nemo"))
    chosen = "model.data.train_ds.global_batch_size=64"
    too_few = nsa(*start, "--data", "sft.jsonl", chosen, cwd=user, status=2)
    assert "40 samples do not fill one global batch of 64" in too_few
    assert not list((user / "first" / "base").glob("*.nemo"))

    said = nsa(*start, "--data", "sft.jsonl", cwd=user)
    [archive] = (user / "first" / "base").glob("*")
    assert re.search(rf"hf is no archive: making {archive} of it", said), said
    assert "train_ds.global_batch_size=128: there are 40 training examples, so it is 40 in this run" in said
    assert (user / "first" / "checkpoints" / "megatron_gpt_sft.nemo").exists()
    kept = OmegaConf.load(user / "first" / "hyperparameters.yaml")
    assert kept.model.global_batch_size == kept.model.data.train_ds.global_batch_size == 40

    again = nsa(*start, "--data", "sft.jsonl", "trainer.sft.max_epochs=2", cwd=user)
    assert f"using {archive}, which an earlier start has made of it" in again
    assert "settings that differ from those of its checkpoint: trainer.sft.max_epochs=2 (before: 1). " in again
    assert [step for step, _ in read_metrics(user / "first")["train/loss"]] == [1, 2]

    before = state_of(user / "hf")
    assert archive.name == f"hf-32-{before[:8]}.nemo"  # another one when the folder has changed
    os.utime(user / "hf" / "config.json", ns=(1, 1))
    assert state_of(user / "hf") != before


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "data", "more"),
    [
        ("rm", "pairs.jsonl", ("trainer.devices=2",)),
        ("dpo", "pairs.jsonl", ()),
        ("kto", "judged.json", ()),
        ("grpo", "prompts.jsonl", GRPO),
    ],
)
def test_they_are_enough_for_every_job(user: Path, job: str, data: str, more: tuple[str, ...]) -> None:
    said = nsa("train", job, "--model", "hf", "--data", data, "--output", job, *SIZES, *more, cwd=user)
    assert "so it is 40 in this run" in said
    assert len([*(user / job / "checkpoints").glob("*.nemo")]) == 1
    assert len([*(user / job / "base").glob("*.nemo")]) == 1


# ---- the command line ---------------------------------------------------------------------------


def test_options_stand_for_keys() -> None:
    """Of each kind of job; what is given twice, or of no use, is refused."""

    def composed(name: str, *arguments: str) -> tuple[object, frozenset[str]]:
        found = compose(name, arguments=arguments)
        assert found is not None
        return OmegaConf.to_container(found.cfg, resolve=False), found.chosen

    options = ("--model", "m", "--data", "a=b.jsonl", "--output", "out")
    cfg, chosen = composed("gpt_sft", *options, "--validation", "v", "trainer.sft.max_steps=3")
    assert cfg["model"]["restore_from_path"] == "m" and cfg["exp_manager"]["explicit_log_dir"] == "out"
    assert cfg["model"]["data"]["train_ds"]["file_path"] == "a=b.jsonl"
    assert cfg["model"]["data"]["validation_ds"]["file_path"] == "v"
    assert "trainer.sft.max_steps" in chosen and "model.data.train_ds.file_path" in chosen
    cfg, _ = composed("gpt_dpo", *options, "--data", "c.jsonl")
    assert cfg["model"]["data"]["data_prefix"] == {"train": ["a=b.jsonl", "c.jsonl"]}
    cfg, chosen = composed("gpt_reinforce_actor", *options, "model.reinforce.num_rollout_samples=4")
    assert cfg["pretrained_checkpoint"]["restore_from_path"] == "m" and "model.ppo.num_rollout_samples" in chosen
    cfg, _ = composed("inference_rm", "--model", "m")
    assert cfg["rm_model_file"] == "m"
    for arguments, folder in (
        (("--model", "m"), None),
        (("--model", "m", "--output", "o"), "o"),
        (("--model", "m", "exp_manager.explicit_log_dir=here"), "here"),
        ((), "/results"),  # NeMo-Aligner's
    ):
        assert composed("gpt_dpo", *arguments)[0]["exp_manager"]["explicit_log_dir"] == folder
    for arguments, said in (
        (("gpt_sft", "--model", "m", "model.restore_from_path=n"), "model.restore_from_path=n: an option gives"),
        (("gpt_dpo", "--data", "d", "model.data.data_prefix={train: [e]}"), "model.data.data_prefix={train: .e.}: an"),
        (("gpt_dpo", "--data", "d", "model.data.data_prefix.train=[e]"), "model.data.data_prefix.train=.e.: an option"),
        (("gpt_ppo_critic", "--data", "d"), "this job reads no data"),
        (("gpt_sft", "--validation", "v"), "--validation goes with --data"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose(arguments[0], arguments=arguments[1:])


def test_a_file_of_the_users_chooses_its_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {global_batch_size: 64}\n")
    own = compose("gpt_dpo", arguments=["--config-path", str(tmp_path), "--config-name", "mine", "model.seed=2"])
    shipped = compose("gpt_dpo", arguments=["model.seed=2"])
    assert own is not None and own.chosen == {"model.global_batch_size", "model.seed"}
    assert shipped is not None and shipped.chosen == {"model.seed"}


# ---- sizes --------------------------------------------------------------------------------------


def test_a_batch_that_nobody_has_chosen_fits_the_examples() -> None:
    cfg = load_defaults("gpt_sft")
    cfg.model.data.train_ds.file_path = "unused"
    free, bound = SFT.read(cfg, frozenset()), SFT.read(cfg, frozenset({"model.data.train_ds"}))
    assert [fitting_batch(free, n) for n in (0, 1, 40, 128, 1000)] == [1, 1, 40, 128, 128]
    assert fitting_batch(bound, 40) == fitting_batch(SFT.read(cfg), 40) == 128


@pytest.mark.parametrize(
    ("prompts", "chosen", "group", "fitting"),
    [
        (1000, (), 1, 512),
        (100, (), 1, 64),  # as many as whole batches of 64 need
        (40, (), 1, 40),  # fewer than one: the batch fits, too
        (100, (), 8, 96),
        (5, (), 8, 5),
        (40, ("model.global_batch_size",), 1, 512),  # which is refused
        (40, ("model.ppo.num_rollout_samples",), 1, 512),
    ],
)
def test_prompts_that_nobody_has_chosen_fit_those_that_there_are(
    prompts: int, chosen: tuple[str, ...], group: int, fitting: int
) -> None:
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.num_rollouts_per_prompt = group
    assert fitting_prompts(PPOActor.read(cfg, frozenset(chosen)), prompts) == fitting


@pytest.mark.parametrize(
    ("chosen", "is_refused"), [(frozenset(), False), (frozenset({"model.global_batch_size"}), True)]
)
def test_a_batch_that_a_step_cannot_fill_is_refused_only_where_somebody_chose_it(
    artefacts: Artefacts, tmp_path: Path, chosen: tuple[str, ...], is_refused: bool
) -> None:
    cfg = load_defaults("gpt_ppo_actor")
    cfg.pretrained_checkpoint.restore_from_path = str(artefacts.base)
    cfg.model.data.data_prefix = {"train": [str(artefacts.data("train_prompts"))]}
    cfg.model.update(encoder_seq_length=64)
    cfg.model.ppo.num_rollout_samples = 16
    cfg.model.ppo.length_params.max_length = 8
    cfg.exp_manager.explicit_log_dir = str(tmp_path / "log")
    problems = find_problems("gpt_ppo_actor", JOBS["gpt_ppo_actor"].sections.read(cfg, frozenset(chosen)), 1)
    assert any("is not a multiple of model.global_batch_size=64" in problem for problem in problems) == is_refused
