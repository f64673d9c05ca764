"""The jobs of the RLHF road, started as users start them: plain python and mpirun, tiny models, CPU.

The flags are those of NeMo-Aligner's RLHF tutorial; sizes and paths are adapted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import Artefacts
from job_processes import (
    SCRIPTS,
    Job,
    critic_service,
    mpirun,
    ranks_of,
    run,
    script,
    stored_weights,
    wait_until_ready,
)
from omegaconf import OmegaConf

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.tools.cli.inspect import describe
from nemo_style_aligner.tools.evaluation import evaluation
from nemo_style_aligner.tools.evaluation.evaluation import (
    EvaluatedResponse,
    EvaluationSettings,
    Responses,
    open_policy,
    read_prompts,
    score,
)
from nemo_style_aligner.trainer.checkpoints.nemo_archive import IS_CRITIC, load_nemo_config
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import Critic
from nemo_style_aligner.trainer.data.answers import is_right
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.service_setup import build_critic_service
from nemo_style_aligner.trainer.models import conversion
from nemo_style_aligner.trainer.models.conversion import checkpoint_to_nemo
from nemo_style_aligner.trainer.models.files import open_model
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model, require_same_tokenizer
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.telemetry.log_files import HYPERPARAMETERS_FILE
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics, read_tables

TIMEOUT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOGGED_PER_STEP = {
    "train_rollouts/rewards",
    "train_rollouts/init_policy_kl",
    "train_rollouts/response_lengths",
    "train_rollouts/generation_length",
    "train_rollouts/fraction_of_samples_properly_ended",
    "train_rollouts/advantages_mean",
    "train_rollouts/returns_mean",
    "train_rollouts/values_mean",
    "train_rollouts/engine_logprob_gap_max",
    "train_optim/loss",
    "train_optim/ppo_ratio",
    "train_optim/clip_fraction",
    "train_optim/grad_norm",
    "train_optim/lr",
    "train_critic/critic_loss",
    "generation/tokens_per_second",
    "generation/balance",
    "timers/step/rollout_time/generate",
    "timers/step/rollout_time/refit",
    "timers/step/rollout_time/logprobs",
    "timers/step/rollout_time/init_logprobs",
    "timers/step/rollout_time/critic_wait",
    "timers/step/train_time",
    "timers/step/critic_train_wait",
    "timers/step",
    "memory/step/rollout_time/generate_peak_gib",
    "memory/step/rollout_time/logprobs_peak_gib",
    "memory/step/train_time_peak_gib",
    "memory/save_time_peak_gib",
}

SIZES = (
    "model.encoder_seq_length=64",
    "model.global_batch_size=8",
    "model.micro_batch_size=2",
    "model.ppo.num_rollout_samples=16",
    "model.ppo.num_val_samples=8",
    "model.ppo.rollout_micro_batch_size=4",
    "model.ppo.length_params.max_length=8",
    "trainer.ppo.num_table_rows=3",
)


def actor_flags(artefacts: Artefacts, log_dir: Path, port: int, devices: int = 2) -> list[str]:
    """What every actor job here needs to be told."""
    return [
        f"trainer.devices={devices}",
        f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
        artefacts.data_prefix("prompts"),
        f"exp_manager.explicit_log_dir={log_dir}",
        f"remote_critic_rm.critic.port={port}",
        "remote_critic_rm.timeouts.ready_seconds=120",
        *SIZES,
    ]


def ppo_jobs(
    artefacts: Artefacts,
    folder: Path,
    actor: Sequence[str],
    critic: Sequence[str] = (),
    *,
    devices: int = 2,
    timeout: float,
) -> tuple[str, str]:
    """A critic service, and an actor job to the end, which must be a success; the outputs of actor and critic.

    The actor's log directory is ``folder / "actor"``.
    """
    log_dir = folder / "actor"
    with critic_service(artefacts.rm, folder / "critic", "model.global_batch_size=8", *critic) as (service, port):
        command = script("train_gpt_ppo_actor.py", *actor_flags(artefacts, log_dir, port, devices), *actor)
        return run(command, log_dir.with_suffix(".log"), timeout), service.output()


def check_exact_log(log_dir: Path) -> None:
    """Two steps in fp32: engine and training agree on log-probs, and the first leaves the initial policy."""
    curves = check_actor_log(log_dir, steps=2)
    assert max(value for _, value in curves["train_rollouts/engine_logprob_gap_max"]) < 1e-4
    first, second = (value for _, value in curves["train_rollouts/init_policy_kl"])
    assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-6


def check_actor_log(log_dir: Path, steps: int) -> dict[str, list[tuple[int, float]]]:
    """The job's curves, once the per-step metrics are known to be there for ``steps`` steps and finite."""
    curves = read_metrics(log_dir)
    missing = LOGGED_PER_STEP - curves.keys()
    assert not missing, missing
    for name in ("train_rollouts/rewards", "train_rollouts/init_policy_kl", "train_critic/critic_loss"):
        assert [step for step, _ in curves[name]] == list(range(1, steps + 1)), name
    for name, points in curves.items():
        assert all(torch.isfinite(torch.tensor(value)) for _, value in points), name
    assert len({value for _, value in curves["generation/compilations"]}) == 1, "compiled during the run"
    rows = [table for table in read_tables(log_dir) if table["key"] == "table/train_rollouts"][-1]["rows"]
    assert len(rows) == 3 and rows[0][0].startswith("User: What is ")
    assert list((log_dir / "tensorboard").iterdir())
    return curves


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an entry script in this process, which has imported what takes seconds."""

    def run_here(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise

    return run_here


@pytest.fixture
def last_words(run_here: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The last line of a script that refuses its command line with status 2."""

    def last_words(name: str, *arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            run_here(name, *arguments)
        return capsys.readouterr().err.splitlines()[-1]

    return last_words


# ---- the supervised half ------------------------------------------------------------------------


def test_supervised_jobs(artefacts: Artefacts) -> None:
    """SFT and reward model: curves, checkpoints, archives, and a line for each flag without effect."""
    assert artefacts.base.is_file() and artefacts.sft.is_file() and artefacts.rm.is_file()
    sft = read_metrics(artefacts.sft_log)
    assert [step for step, _ in sft["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in sft["val/loss"]] == [2, 4]
    assert sft["train/loss"][-1][1] < sft["train/loss"][0][1]
    names = {path.name for path in (artefacts.sft_log / "checkpoints").iterdir()}
    assert any(name.endswith("-last") and "step=4" in name for name in names), names
    rm = read_metrics(artefacts.rm_log)
    assert [step for step, _ in rm["train/loss"]] == [1, 2, 3]
    assert rm["train/loss"][0][1] == pytest.approx(0.69, abs=0.1)
    assert all(0.0 <= value <= 1.0 for _, value in rm["val/accuracy"])
    for part in ("train", "val"):
        chosen, rejected, mean, std = (
            np.array([value for _, value in rm[f"{part}/rewards_{name}"]])
            for name in ("chosen_mean", "rejected_mean", "all_mean", "all_std")
        )
        assert mean == pytest.approx((chosen + rejected) / 2, abs=1e-6)
        assert (std >= abs(chosen - rejected) / 2 - 1e-6).all() and not any("square" in name for name in rm)


# ---- the tutorial's commands --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tutorial_critic(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, int, Path]]:
    """The tutorial's critic command, on two ranks started by plain python. Other tests use the service, too."""
    log_dir, port = tmp_path_factory.mktemp("critic") / "critic_results_dir", free_port()
    job = Job(
        script(
            "serve_ppo_critic.py",
            "trainer.devices=2",
            "trainer.num_nodes=1",
            "++model.tensor_model_parallel_size=1",
            "++model.pipeline_model_parallel_size=1",
            "exp_manager.create_wandb_logger=False",
            "exp_manager.wandb_logger_kwargs.name=critic_training",
            "exp_manager.wandb_logger_kwargs.project=nemo_aligner_ppo",
            f"exp_manager.explicit_log_dir={log_dir}",
            "trainer.ppo.inference_micro_batch_size=4",
            f"++pretrained_checkpoint.restore_from_path={artefacts.rm}",
            "++model.megatron_amp_O2=True",
            "++model.activations_checkpoint_granularity=null",
            "++trainer.ppo.combine_rm_and_critic_server=True",
            "++model.offload_adam_states=True",
            "++model.mcore_gpt=True",
            # sizes
            f"trainer.ppo.port={port}",
            "model.encoder_seq_length=64",
            "model.global_batch_size=8",
        ),
        log_dir.with_suffix(".log"),
    )
    try:
        wait_until_ready(job, port, TIMEOUT)
        yield job, port, log_dir
    finally:
        job.kill()


@pytest.fixture(scope="module")
def tutorial_actor(
    artefacts: Artefacts, tutorial_critic: tuple[Job, int, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The tutorial's actor command on two data-parallel ranks under plain python; log directory and output."""
    log_dir = tmp_path_factory.mktemp("actor") / "actor_test"
    command = script(
        "train_gpt_ppo_actor.py",
        "++" + artefacts.data_prefix("prompts"),
        "++model.data.data_impl=jsonl",
        f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
        "trainer.num_nodes=1",
        "trainer.devices=2",
        "++model.pipeline_model_parallel_size=1",
        "++model.tensor_model_parallel_size=1",
        "++model.ppo.combine_rm_and_critic_server=True",
        "++model.ppo.offload_adam_states=True",
        "++model.megatron_amp_O2=True",
        "++trainer.ppo.normalize_advantages=True",
        "++model.mcore_gpt=True",
        "exp_manager.create_wandb_logger=False",
        "exp_manager.wandb_logger_kwargs.name=ppo_actor_training",
        "exp_manager.wandb_logger_kwargs.project=nemo_aligner_ppo",
        f"exp_manager.explicit_log_dir={log_dir}",
        "++model.ppo.entropy_bonus=0.0",
        "remote_critic_rm.pad_to_length=48",
        # sizes
        f"remote_critic_rm.critic.port={tutorial_critic[1]}",
        "trainer.ppo.max_steps=2",
        "trainer.ppo.val_check_interval=2",
        *SIZES,
    )
    return log_dir, run(command, log_dir.with_suffix(".log"), TIMEOUT)


def test_tutorial_pair(tutorial_actor: tuple[Path, str], tutorial_critic: tuple[Job, int, Path]) -> None:
    """bf16, two ranks each, static partition, validation, an archive at the end; each flag reported or at work."""
    log_dir, output = tutorial_actor
    curves = check_actor_log(log_dir, steps=2)
    assert [step for step, _ in curves["val_rollouts/rewards"]] == [0, 2]
    assert [table["step"] for table in read_tables(log_dir) if table["key"] == "table/val_rollouts"] == [0, 2]
    names = sorted(path.name for path in (log_dir / "checkpoints").iterdir())
    assert names[0].startswith("megatron_gpt-step=2-consumed_samples=32-ppo_optimization_step=4-epoch=0-val_rewards=")
    assert names[1:] == ["megatron_gpt_ppo_actor.nemo"]
    for flag in ("model.megatron_amp_O2", "model.mcore_gpt"):
        assert flag in output, f"{flag} has no effect, and nobody says so"
    assert re.search(r"\d+ prompts, 16 per step: \d+ steps per epoch.*; max_steps=2 ends the run", output)
    _, _, critic_log = tutorial_critic
    assert (critic_log / "checkpoints").is_dir()  # the actor's save had the critic save first
    assert len(read_metrics(critic_log)["train/loss"]) >= 4  # two updates per step


@pytest.mark.long
def test_tutorial_slurm_pair_under_mpirun(artefacts: Artefacts, tmp_path: Path) -> None:
    """The flags of the tutorial's Slurm script and its TensorRT-LLM section; tensor parallel, with the queue."""
    critic_flags = (
        "trainer.ppo.inference_micro_batch_size=4",
        "trainer.devices=1",
        "trainer.num_nodes=1",
        "exp_manager.create_wandb_logger=False",
        "exp_manager.wandb_logger_kwargs.name=2p_ppo_critic",
        "exp_manager.wandb_logger_kwargs.project=ppo_run",
        "++model.offload_adam_states=True",
        "++model.micro_batch_size=1",
        "++model.global_batch_size=8",
    )
    actor_log = tmp_path / "actor_results"
    with critic_service(artefacts.rm, tmp_path / "critic_results", *critic_flags) as (critic, port):
        command = script(
            "train_gpt_ppo_actor.py",
            "trainer.devices=2",
            "trainer.num_nodes=1",
            "trainer.ppo.max_steps=2",
            "++model.data.data_impl=jsonl",
            "++" + artefacts.data_prefix("prompts"),
            f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
            f"exp_manager.explicit_log_dir={actor_log}",
            "exp_manager.create_wandb_logger=False",
            "exp_manager.wandb_logger_kwargs.name=2p_ppo_actor",
            "exp_manager.wandb_logger_kwargs.project=ppo_run",
            "++model.micro_batch_size=1",
            "++model.global_batch_size=8",
            "++model.activations_checkpoint_granularity=selective",
            "++model.activations_checkpoint_method=uniform",
            "++model.optim.lr=9e-4",
            "trainer.ppo.val_check_interval=3",
            "++model.optim.sched.min_lr=9e-5",
            "++model.ppo.entropy_bonus=0.0",
            "++model.ppo.ratio_eps=0.2",
            "++model.ppo.num_rollout_samples=16",
            "++model.ppo.rollout_micro_batch_size=8",
            "++model.ppo.length_params.max_length=8",
            "trainer.ppo.initial_policy_kl_penalty=0.02",
            "remote_critic_rm.critic.ip=127.0.0.1",
            f"remote_critic_rm.critic.port={port}",
            # the TensorRT-LLM section
            "trainer.ppo.trt_llm.enable=True",
            "trainer.ppo.generation.tensor_parallel_size=2",  # what reshard=True means under pipeline parallelism
            "trainer.ppo.trt_llm.unload_engine_train=True",
            "trainer.trt_llm.model_type=llama",
            "trainer.ppo.batch_iterator.use_flask=True",
            # sizes, and what this test is about beside the flags
            "trainer.ppo.batch_iterator.port=0",
            "trainer.precision=32",
            "model.encoder_seq_length=64",
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=True",
            "model.ppo.num_val_samples=8",
            "trainer.ppo.num_table_rows=3",
        )
        output = run(mpirun(2, command), actor_log.with_suffix(".log"), TIMEOUT)
        assert critic.stop(number=signal.SIGUSR1) == 75, critic.describe()
    curves = check_actor_log(actor_log, steps=2)
    assert max(value for _, value in curves["train_rollouts/engine_logprob_gap_max"]) < 1e-4
    assert [step for step, _ in curves["val_rollouts/rewards"]] == [0, 2]
    assert "TensorRT-LLM is not installed" in output and "the embedded engine is used" in output
    assert "timers/step/rollout_time/unload" in curves
    (progress,) = re.findall(r"^PPO: 2/2 after .*$", output, re.MULTILINE)  # of one rank of two
    assert re.search(r"s each, loss \S+, train_rewards \S+, .*val_rewards \S+$", progress)
    first, second = (value for _, value in curves["train_rollouts/init_policy_kl"])
    assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-5
    check_converted_checkpoint(actor_log, tmp_path)  # by one process what two tensor-parallel ranks have written


# ---- other layouts and services -----------------------------------------------------------------


@pytest.mark.long
def test_pipeline_parallel_actor_with_a_separate_reward_model(artefacts: Artefacts, tmp_path: Path) -> None:
    """serve_reward_model.py beside the critic; PP 2, critic warm-up, two PPO epochs; int8 rollouts, corrected for.

    With the flags of NeMo-Aligner's tests/functional/ppo.sh that are nobody's but NeMo's, and the logs it looks into.
    """
    rm_port, actor_log = free_port(), tmp_path / "actor"
    reward_model = Job(
        script(
            "serve_reward_model.py",
            f"rm_model_file={artefacts.rm}",
            f"inference.port={rm_port}",
            "trainer.precision=32",
            "model.reward_standardization.enable=True",
            "model.reward_standardization.mean=100",
            "model.reward_standardization.std=2",
        ),
        tmp_path / "reward_model.log",
    )
    with contextlib.ExitStack() as stack:
        stack.callback(reward_model.kill)
        separate = ("trainer.ppo.combine_rm_and_critic_server=False", "model.global_batch_size=8")
        nemo = ("++model.forward_mbs=1", "exp_manager.create_checkpoint_callback=False")
        critic, port = stack.enter_context(critic_service(artefacts.rm, tmp_path / "critic", *separate, *nemo))
        wait_until_ready(reward_model, rm_port, TIMEOUT)
        output = run(
            script(
                "train_gpt_ppo_actor.py",
                f"--config-path={SCRIPTS}/conf/",
                "--config-name=gpt_ppo_actor",
                *actor_flags(artefacts, actor_log, port),
                "remote_critic_rm.combine_rm_and_critic_server=False",
                f"remote_critic_rm.reward_model.port={rm_port}",
                "trainer.precision=32",
                "model.pipeline_model_parallel_size=2",
                "trainer.ppo.max_steps=2",
                "trainer.ppo.val_check_interval=0",
                "trainer.ppo.critic_warmup_steps=1",
                "trainer.ppo.num_ppo_epochs=2",
                "trainer.ppo.importance_weight_cap=1.5",
                "trainer.ppo.kl_estimator=k3",
                "trainer.ppo.reference_policy_placement=resident",
                "model.activations_checkpoint_granularity=full",
                *("++model.optim.lr=1e-3", "~model.optim", "++model.optim={name:sgd}"),
                *("++model.enable_nge=True", "++model.offload_adam_states=False", "++exp_manager=null"),
            ),
            actor_log.with_suffix(".log"),
            TIMEOUT,
        )
        assert reward_model.stop() == 0, reward_model.describe()
        process = re.search(r"kill -SIGINT (\d+)", critic.output())
        assert process is not None and "Cleaning up communicator" in output
        os.kill(int(process[1]), signal.SIGINT)
        assert critic.wait(TIMEOUT) == 0, critic.describe()
    hyperparameters = OmegaConf.load(actor_log / HYPERPARAMETERS_FILE)
    assert (hyperparameters.model.optim.name, hyperparameters.model.optim.lr) == ("sgd", 9e-7)
    assert hyperparameters.trainer.ppo.save_interval == 0 and not hyperparameters.model.ppo.offload_adam_states
    curves = check_actor_log(actor_log, steps=2)
    assert [step for step, _ in curves["warm_up/train_critic/critic_loss"]] == [1]
    tables = [(table["key"], table["step"]) for table in read_tables(actor_log) if "train_rollouts" in table["key"]]
    assert tables[:2] == [("warm_up/table/train_rollouts", 1), ("table/train_rollouts", 1)]
    # The reward model of this service alone standardises: (r - 100) / 2.
    assert all(-60 < value < -40 for _, value in curves["train_rollouts/rewards"])
    assert [step for step, _ in curves["train_optim/loss"]] == list(range(8))  # 2 steps x 2 epochs x 2 minibatches
    assert "val_rollouts/rewards" not in curves
    # What is sampled from is what is trained, up to rounding.
    assert all(gap < 1e-4 for _, gap in curves["train_rollouts/engine_logprob_gap_mean"])
    assert all(abs(weight - 1) < 1e-4 for _, weight in curves["train_rollouts/importance_weights"])
    assert len(read_metrics(tmp_path / "critic")["train/loss"]) == 6  # a warm-up round and two steps, 16 / 8 each
    check_converted_checkpoint(actor_log, tmp_path)  # by one process what two pipeline stages have written


def test_evaluation(
    artefacts: Artefacts,
    tutorial_actor: tuple[Path, str],
    tmp_path: Path,
    run_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The archive that PPO leaves, greedy and scored."""
    output = tmp_path / "evaluation" / "results.json"
    run_here(
        "evaluate_gpt.py",
        *("--model", str(tutorial_actor[0] / "checkpoints" / "megatron_gpt_ppo_actor.nemo")),
        *("--prompts", str(artefacts.data("test_prompts")), "--output", str(output)),
        *("--reward-model", str(artefacts.rm), "--greedy", "--max-length", "8", "--limit", "10"),
        *("--precision", "32", "--num-slots", "4"),
    )
    progress = "".join(capsys.readouterr())
    assert "Generating: 10/10" in progress and "Scoring: 10/10" in progress
    results = json.loads(output.read_text())
    assert results["summary"].keys() >= {"accuracy", "reward", "length", "ended"}
    assert results["summary"]["num_prompts"] == 10 == len(results["responses"])
    assert '"num_prompts": 10,' in output.read_text()  # a count
    row = results["responses"][0]
    assert row["is_right"] == is_right(row["response"], row)
    assert row["given_answer"] == row["response"].strip()
    assert isinstance(row["reward"], float) and row["num_response_tokens"] <= 8


def check_converted_checkpoint(log_dir: Path, folder: Path, method: str) -> Path:
    """The archive made of a job's newest checkpoint is the one that the job wrote of the same weights; its path."""
    (written,) = (log_dir / "checkpoints").glob("*.nemo")
    (checkpoint,) = (log_dir / "checkpoints").glob("*-last")
    converted = folder / f"{log_dir.name}.nemo"
    with single_process(1):
        checkpoint_to_nemo(checkpoint, converted)
        require_same_tokenizer(*(open_model(path, "32") for path in (converted, written)))
    ours, theirs = stored_weights(converted), stored_weights(written)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        rows = len(ours[name])  # without what pads the vocabulary for tensor-parallel ranks
        assert ours[name].dtype == tensor.dtype and ours[name].equal(tensor[:rows]), name
        assert name.endswith(("word_embeddings.weight", "output_layer.weight")) or len(tensor) == rows, name
    assert load_nemo_config(converted) == load_nemo_config(written)
    described, archived = describe(checkpoint), describe(written)
    assert described["step"] > 0 and described["metrics"] and described["layout"]["tp_size"] >= 1
    assert described["history"] == archived["history"] and described["history"][-1].startswith(f"{method} from /")
    assert described["tokenizer"] == archived["tokenizer"] and described["parameters"] == archived["parameters"]
    return converted


def test_a_training_checkpoint_becomes_the_archive_of_its_job(
    artefacts: Artefacts,
    tutorial_actor: tuple[Path, str],
    tutorial_critic: tuple[Job, int, Path],
    tmp_path: Path,
) -> None:
    """Of SFT, a reward model, an actor on two ranks and its critic, which has written no archive."""
    for method, log_dir in (("sft", artefacts.sft_log), ("rm", artefacts.rm_log), ("ppo", tutorial_actor[0])):
        check_converted_checkpoint(log_dir, tmp_path, method)
    (newest,) = (tutorial_critic[2] / "checkpoints").glob("*-last")
    critic = tmp_path / "critic.nemo"
    output = run(
        script("convert_checkpoint_to_nemo.py", "--input", str(newest), "--output", str(critic)),
        tmp_path / "convert.log",
        TIMEOUT,
    )
    assert f"{critic}: llama" in output
    weights, reward_model = stored_weights(critic), stored_weights(artefacts.rm)
    assert weights.keys() == reward_model.keys()
    assert not weights["model.rm_head.weight"].equal(reward_model["model.rm_head.weight"])
    row = EvaluatedResponse("", "", [1, 2, 3], 1, True)
    with single_process(1), pytest.raises(CheckpointMismatchError, match="is a critic's, whose values are"):
        score(Responses([row]), open_model(critic, "32"))


def test_a_checkpoint_of_another_job_is_not_converted(
    artefacts: Artefacts, tmp_path: Path, run_here: Callable[..., None]
) -> None:
    (checkpoint,) = (artefacts.sft_log / "checkpoints").glob("*-last")
    others, moved, output = tmp_path / "others.yaml", tmp_path / "moved", tmp_path / "out" / "model.nemo"
    hyperparameters = artefacts.sft_log / HYPERPARAMETERS_FILE
    untied = hyperparameters.read_text()
    others.write_text(untied.replace("embeddings_and_output_weights: false", "embeddings_and_output_weights: true"))
    shutil.copytree(checkpoint, moved)
    no_hyperparameters = [b"model: []", untied.replace("num_layers: 2", "num_layers: two").encode(), b"\xff"]
    train_character_tokenizer("abc", tmp_path / "tokenizer")
    base = tmp_path / "base.nemo"
    shape = ("--num-layers", "1", "--hidden-size", "32", "--num-heads", "2")
    run_here("init_gpt.py", "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(base), *shape)

    def refused(match: str, path: Path = checkpoint, **options: Path) -> None:
        with pytest.raises((ValueError, OSError), match=match):
            checkpoint_to_nemo(path, output, **options)
        assert not output.exists()

    with single_process(1):
        refused(
            "base.nemo is not what the job started from: num_layers: base 1, checkpoint 2; .* vocab_size", base=base
        )
        refused("nowhere.nemo, which the job started from, does not exist: say where", base=tmp_path / "nowhere.nemo")
        refused("holds a language model, but .* a reward", hyperparameters=artefacts.rm_log / HYPERPARAMETERS_FILE)
        refused("in the checkpoint, but not in the model: model.output_layer.weight", hyperparameters=others)
        for content in no_hyperparameters:
            (tmp_path / "no.yaml").write_bytes(content)
            refused("no.yaml is not a hyperparameters file written by a job", hyperparameters=tmp_path / "no.yaml")
        refused("hyperparameters.yaml, .* does not exist: .* from the log directory", moved)
        refused("is not a training checkpoint: name a folder in", artefacts.sft)
        refused("there is no checkpoint at", tmp_path / "none")
        with next((moved / "state").glob("*.distcp")).open("ab") as stream:
            stream.write(b"x")
        refused("moved is damaged: .* bytes instead of", moved, hyperparameters=hyperparameters)
        refused("is being written or deleted", moved.rename(tmp_path / "moved.unfinished"))


def test_a_checkpoint_may_lose_its_last_before_or_while_it_is_converted(
    artefacts: Artefacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may be running. It is not damaged."""
    (newest,) = (artefacts.sft_log / "checkpoints").glob("*-last")
    options = {"hyperparameters": artefacts.sft_log / HYPERPARAMETERS_FILE}
    last, output = tmp_path / "step=4-last", tmp_path / "model.nemo"
    shutil.copytree(newest, last)
    with single_process(1):
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "make_place", lambda _: last.rename(tmp_path / "step=4"))
            with pytest.raises(FileNotFoundError, match="step=4-last was renamed or deleted by its job while"):
                conversion.checkpoint_to_nemo(last, output, **options)
        assert not output.exists()
        conversion.checkpoint_to_nemo(last, output, **options)
    assert output.exists()


@pytest.mark.parametrize(
    "mistake", ["--num-heads 3", "--num-layers 0", "--tokenizer /nowhere", "--output /dev/null/x", "--output tokenizer"]
)
def test_a_model_that_cannot_be_is_refused_in_a_line(
    tmp_path: Path, mistake: str, last_words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_character_tokenizer("abc", tmp_path / "tokenizer")
    command = ("--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "base.nemo"))
    assert "init_gpt.py: error: " in last_words("init_gpt.py", *command, *mistake.split())
    assert not (tmp_path / "base.nemo").exists()


@pytest.mark.parametrize(
    ("name", "mistake", "message"),
    [
        (
            "init_gpt.py",
            "--seed=-1",
            "error: argument --seed: -1 is not a whole number in [0, 2147483647]",
        ),
        ("init_gpt.py", "--max-length=0", "init_gpt.py: error: --max-length 0: give at least 1"),
        ("init_gpt.py", "--ffn-hidden-size=0", "init_gpt.py: error: --ffn-hidden-size 0: give at least 1"),
        ("init_gpt.py", "--family=gpt_oss", "init_gpt.py: error: --family gpt_oss: give --num-experts, too"),
        ("init_gpt.py", "--num-query-groups=-1", "init_gpt.py: error: --num-query-groups -1: give at least 1"),
        ("evaluate_gpt.py", "--seed=-1", "Error: Invalid value for '--seed': -1 is not in the range 0<=x<=2147483647"),
        ("evaluate_gpt.py", "--temperature=inf", "Error: temperature must lie in [1e-20, 1e+20], got inf"),
        ("evaluate_gpt.py", "--end-strings=", "Error: stop_strings holds an empty string"),
    ],
)
def test_options_out_of_range_are_refused_in_a_line(
    name: str, mistake: str, message: str, tmp_path: Path, last_words: Callable[..., str]
) -> None:
    train_character_tokenizer("abc", tmp_path)
    given = {
        "init_gpt.py": [f"--tokenizer={tmp_path}"],
        "evaluate_gpt.py": [f"--model={tmp_path}", f"--prompts={__file__}", "--max-length=8"],
    }
    assert message in last_words(name, *given[name], f"--output={tmp_path / 'output'}", mistake)


def test_what_cannot_be_evaluated_is_told_in_a_line(
    artefacts: Artefacts, tmp_path: Path, last_words: Callable[..., str]
) -> None:
    hugging_face, gguf, prompts = tmp_path / "llama", tmp_path / "llama.gguf", tmp_path / "prompts.jsonl"
    hugging_face.mkdir()
    (hugging_face / "config.json").write_text("{}")
    gguf.write_bytes(b"GGUF" + bytes(2000))
    adapter = tmp_path / "peft"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    checkpoint = next((artefacts.sft_log / "checkpoints").glob("*-last"))
    prompts.write_text('{"text": "User: 1+1=", "answer": "2", "answer_extraction": "regex"}\n')
    for model, told in (
        (checkpoint, "is a training checkpoint, not an archive: convert it with nsa convert"),
        (hugging_face, f"{hugging_face} lacks model.safetensors"),
        (gguf, f"{gguf}"),
        (adapter, "is PEFT's adapter: merge it into its base's archive with nsa convert --base"),
        ("org/name", "org/name does not exist; nothing is downloaded: if this is a name on the Hugging Face Hub, run"),
        (artefacts.sft, f"{prompts}:1: 'answer_extraction' should be 'whole', 'after MARKER', 'boxed'"),
    ):
        flags = (f"--model={model}", f"--prompts={prompts}", f"--output={tmp_path / 'results.json'}", "--max-length=8")
        assert told in last_words("evaluate_gpt.py", *flags)


def test_rewards_are_not_of_a_head_that_nobody_trained(
    artefacts: Artefacts, tmp_path: Path, last_words: Callable[..., str], run_here: Callable[..., None]
) -> None:
    """A language model's archive in the place of the reward model's; another tokenizer's reward model."""
    wrong, no_run = str(artefacts.sft), cast(Run, None)
    cfg, row = load_defaults("gpt_ppo_critic"), EvaluatedResponse("", "", [1, 2, 3], 1, True)
    cfg.model.encoder_seq_length = 64
    with single_process(1):
        with pytest.raises(CheckpointMismatchError, match=r"has no reward head.* \(train_reward_model.py makes one\)"):
            base, config = open_base_model(wrong, Critic.read(cfg))
            build_critic_service(config, no_run, base, TrainingLedger())
        with pytest.raises(CheckpointMismatchError, match="has no reward head"):
            score(Responses([row]), open_model(artefacts.sft, "32"))
        row.tokens = [1] * 10_000
        with pytest.raises(ValueError, match=r"takes \d+ tokens at most, .* prompt and response have 10000"):
            score(Responses([row]), open_model(artefacts.rm, "32"))
        require_same_tokenizer(*(open_model(path, "32") for path in (artefacts.sft, artefacts.rm)))
    prompts, output = artefacts.data("test_prompts"), tmp_path / "evaluation.json"
    command = ("evaluate_gpt.py", f"--model={wrong}", f"--prompts={prompts}", f"--output={output}")
    assert f"{wrong} has no reward head" in last_words(*command, f"--reward-model={wrong}")
    assert not output.exists()  # it is known before anything is generated
    other, base = tmp_path / "other", tmp_path / "other.nemo"
    train_character_tokenizer("abc", other)
    shape = ("--num-layers=1", "--hidden-size=32", "--num-heads=2", "--ffn-hidden-size=64")
    run_here("init_gpt.py", f"--tokenizer={other}", f"--output={base}", *shape)
    assert "has a different tokenizer from" in last_words(*command, f"--reward-model={base}")
    assert not output.exists()


def test_responses_fit_into_the_model_unless_told_otherwise(
    artefacts: Artefacts, tmp_path: Path, last_words: Callable[..., str]
) -> None:
    """64 positions: half of them; where no prompt has room, a line says what to lower."""
    assert evaluation.default_max_length(artefacts.sft) == 32
    command = ("--model", str(artefacts.sft), "--prompts", str(artefacts.data("test_prompts")), "--max-length", "64")
    last = last_words("evaluate_gpt.py", *command, "--output", str(tmp_path / "results.json"))
    assert last.startswith("Error: ") and last.endswith("lower --max-length")
    last = last_words("evaluate_gpt.py", *command, "--output", "/dev/null/results.json")
    assert last.endswith("cannot be written: /dev/null is not a folder")


def test_evaluation_asks_and_compares_as_ppo_does(artefacts: Artefacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """End strings are not part of responses, and prompts begin with BOS if asked for."""

    def responses(end_strings: tuple[str, ...] = (), add_bos: bool = False) -> list[EvaluatedResponse]:
        settings = EvaluationSettings(
            model=artefacts.base, prompts=artefacts.data("test_prompts"), max_length=8, end_strings=end_strings,
            add_bos=add_bos, limit=4, num_slots=4, precision="32",
        )  # fmt: skip
        base = open_policy(artefacts.base, "32")
        return evaluation._responses(base, base.load(trainable=False), read_prompts([base], settings), settings)

    with single_process(1):
        whole = responses()
        end = whole[0].response[2:4]
        for row, cut in zip(whole, responses((end,)), strict=True):
            assert cut.response == row.response.split(end)[0] and cut.ended == (row.ended or end in row.response)
        with pytest.raises(ValueError, match="add_bos=True, but the tokenizer has no BOS"):
            responses(add_bos=True)
        opened = evaluation.open_model

        def open_with_bos(path: Path, precision: str) -> BaseModel:
            base = opened(path, precision)
            base.tokenizer.bos_id = 5
            return base

        monkeypatch.setattr(evaluation, "open_model", open_with_bos)
        marked = responses(add_bos=True)
        assert [row.tokens[0] for row in marked] == [5] * 4
        assert [row.prompt for row in marked] == [row.prompt for row in whole]


# ---- generation beside training -----------------------------------------------------------------


@pytest.mark.long
def test_rollouts_a_step_ahead(artefacts: Artefacts, tmp_path: Path) -> None:
    """Two ranks train, one generates. When that one is killed the job ends; started again it trains on the responses
    that the checkpoint has, made with weights that are gone, and goes on with those that had begun."""
    log_dir = tmp_path / "actor"
    with critic_service(artefacts.rm, tmp_path / "critic", "model.global_batch_size=8") as (_, port):
        command = script(
            "train_gpt_ppo_actor.py",
            *actor_flags(artefacts, log_dir, port, devices=3),
            "trainer.ppo.rollout_devices=1",
            "trainer.ppo.staleness=1",
            "trainer.ppo.max_steps=8",
            "trainer.ppo.val_check_interval=4",
            "trainer.ppo.save_interval=2",
        )
        victim = Job(command, tmp_path / "actor_first.log")
        kill_a_rank(victim, 2, log_dir)
        assert max(step for step, _ in read_metrics(log_dir)["train_rollouts/rewards"]) < 8, "over before it was killed"
        run(command, tmp_path / "actor_second.log", TIMEOUT)
    curves = check_actor_log(log_dir, steps=8)
    ages = [value for _, value in curves["train_rollouts/staleness_mean"]]
    assert ages[:2] == [0.0, 2.0] and all(2.0 <= age <= 6.0 for age in ages[2:])
    assert [step for step, _ in curves["timers/step/rollout_time/rollout_wait"]] == list(range(2, 9))
    assert [step for step, _ in curves["val_rollouts/rewards"]] == [0, 4, 8]


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_critic_that_never_comes_up(artefacts: Artefacts, tmp_path: Path) -> None:
    port = free_port()
    flags = [*actor_flags(artefacts, tmp_path / "log", port, devices=1), "remote_critic_rm.timeouts.ready_seconds=2"]
    job = Job(script("train_gpt_ppo_actor.py", *flags), tmp_path / "actor.log")
    try:
        assert job.wait(TIMEOUT) == 1, job.describe()
    finally:
        job.kill()
    assert f"the server at http://localhost:{port} was not ready within 2 s" in job.output()


@pytest.mark.long
def test_a_work_queue_whose_port_is_taken(artefacts: Artefacts, tmp_path: Path) -> None:
    """Known before the weights are read and the critic is waited for, and the error says which key."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = actor_flags(artefacts, tmp_path / "log", free_port(), devices=1)
        queue = ["trainer.ppo.batch_iterator.use_flask=True", f"trainer.ppo.batch_iterator.port={port}"]
        job = Job(script("train_gpt_ppo_actor.py", *flags, *queue), tmp_path / "actor.log")
        try:
            assert job.wait(TIMEOUT) == 2, job.describe()
        finally:
            job.kill()
    assert "Traceback" not in job.output()
    assert f"rollout work queue cannot listen on 127.0.0.1:{port} (Address already in use)" in job.output()
    assert "choose a free port with trainer.ppo.batch_iterator.port" in job.output()
    assert "waiting for the server" not in job.output()


# ---- resuming -----------------------------------------------------------------------------------


def exact_actor(artefacts: Artefacts, log_dir: Path, port: int) -> Job:
    """Two ranks, fp32."""
    return Job(
        script(
            "train_gpt_ppo_actor.py",
            *actor_flags(artefacts, log_dir, port),
            "trainer.precision=32",
            "trainer.ppo.max_steps=8",
            "trainer.ppo.val_check_interval=3",
            "trainer.ppo.save_interval=2",
            "model.ppo.rollout_micro_batch_size=8",
            "model.optim.lr=1e-3",
            "model.optim.sched.min_lr=1e-4",
            "model.optim.sched.warmup_steps=2",
            "model.optim.sched.constant_steps=3",
            "model.hidden_dropout=0.1",  # random streams matter, too
        ),
        log_dir.with_suffix(".log"),
    )


def exact_critic(artefacts: Artefacts, log_dir: Path) -> Any:
    return critic_service(
        artefacts.rm,
        log_dir,
        "model.global_batch_size=8",
        "model.micro_batch_size=4",
        "model.forward_micro_batch_size=1",  # what a sequence is computed with depends on timing otherwise
        "trainer.ppo.inference_micro_batch_size=8",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "exp_manager.checkpoint_callback_params.always_save_nemo=True",
        "model.hidden_dropout=0.1",
    )


def wait_for_checkpoint(actor: Job, log_dir: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not list(log_dir.glob(f"checkpoints/*step={step}-*-last")):
        assert actor.process.poll() is None, f"ended with status {actor.process.returncode}: {actor.describe()}"
        assert time.monotonic() < deadline, f"no checkpoint: {actor.describe()}"
        time.sleep(0.02)


def kill_a_rank(actor: Job, rank: int, log_dir: Path) -> None:
    """After the second step's checkpoint; the job ends within seconds."""
    try:
        wait_for_checkpoint(actor, log_dir, 2)
        os.kill(ranks_of(actor)[rank], signal.SIGKILL)
        killed = time.monotonic()
        # The supervisor reports whoever it sees end first: the killed rank, or another one, which misses it.
        assert actor.wait(30) in (128 + signal.SIGKILL, 1), actor.describe()
        assert time.monotonic() - killed < 15
    finally:
        actor.kill()


@pytest.mark.long
def test_killed_and_resumed_is_as_if_never_killed(artefacts: Artefacts, tmp_path: Path) -> None:
    """One rank of the actor is killed: the job ends within seconds. Critic and actor, started again, go on from their
    checkpoints. The actor is asked to stop, between two saves or in the middle of a step, and started again. They end
    with the weights and numbers of a run that nobody disturbed, bit for bit."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with exact_critic(artefacts, straight / "critic") as (critic, port):
        undisturbed = exact_actor(artefacts, straight / "actor", port)
        with exact_critic(artefacts, broken / "critic") as (_, other_port):
            victim = exact_actor(artefacts, broken / "actor", other_port)
            kill_a_rank(victim, 1, broken / "actor")
        undisturbed.check(TIMEOUT)
    done = max(step for step, _ in read_metrics(broken / "actor")["train_rollouts/rewards"])
    assert done < 8, "the run was over before it was killed: make it longer"
    (broken / "critic.log").rename(broken / "critic_first.log")
    (broken / "actor.log").rename(broken / "actor_first.log")
    with exact_critic(artefacts, broken / "critic") as (critic, port):
        assert "resumed from" in critic.output()
        preempted = exact_actor(artefacts, broken / "actor", port)
        deadline = time.monotonic() + TIMEOUT
        while " saved " not in preempted.output():
            assert preempted.process.poll() is None and time.monotonic() < deadline, preempted.describe()
            time.sleep(0.02)
        preempted.process.send_signal(signal.SIGUSR1)
        assert preempted.wait(60) == 75, preempted.describe()
        assert (broken / "actor" / "requeue").exists()
        stopped_at = re.search(r"stopping at step (\d): received SIGUSR1", preempted.output())
        assert stopped_at is not None and int(stopped_at[1]) < 8, preempted.describe()
        (broken / "actor.log").rename(broken / "actor_second.log")
        exact_actor(artefacts, broken / "actor", port).check(TIMEOUT)
        assert not (broken / "actor" / "requeue").exists()
    assert f"step={stopped_at[1]}-" in (broken / "actor.log").read_text().split("resumed from")[1].splitlines()[0]

    for job, archive in (("actor", "megatron_gpt_ppo_actor.nemo"), ("critic", "megatron_gpt_critic.nemo")):
        expected, resumed = (stored_weights(run / job / "checkpoints" / archive) for run in (straight, broken))
        assert expected.keys() == resumed.keys() and len(expected) > 5
        assert (IS_CRITIC in load_nemo_config(straight / job / "checkpoints" / archive)) == (job == "critic")
        assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == [], job
        curves, resumed_curves = (read_metrics(run / job) for run in (straight, broken))
        for name, points in curves.items():
            if not name.startswith(("timers/", "memory/", "generation/")):  # who generates what depends on timing
                assert resumed_curves[name] == points, name
