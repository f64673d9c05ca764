"""SFT and reward model training: exact resuming, batches that count the same however they are cut, regression."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import threading
import time
import types
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Artefacts
from job_processes import Job, mpirun, run, script, stored_weights, wait_until_ready
from omegaconf import DictConfig, OmegaConf
from small_models import SHAPE, VOCAB

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import ParallelLayout, single_process
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.guard.secret import find_secret
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_config, load_nemo_tokenizer, load_nemo_weights
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager, NemoExport
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS, SFT, RewardTraining, SupervisedLoop
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.log_lock import LOCK_FILE
from nemo_style_aligner.trainer.jobs.supervised_setup import (
    SupervisedTask,
    build_supervised_trainer,
    reward_objective,
    reward_task,
    sft_task,
)
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError, stops
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.models.supervised_losses import LanguageModelBatch, language_model_objective
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger, read_metrics
from nemo_style_aligner.trainer.training import run_control
from nemo_style_aligner.trainer.training.run_control import RunControl, parse_duration
from nemo_style_aligner.trainer.training.supervised import SupervisedSettings, SupervisedTrainer

TIMEOUT = 240.0
OPTIM = {"name": "distributed_fused_adam", "weight_decay": 0.0}
ADAM = schema.Optimizer(**OPTIM)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["train_gpt_sft.py", "train_reward_model.py"])
def test_the_last_line_of_a_job_is_its_own(artefacts: Artefacts, name: str) -> None:
    """megatron-core imports Triton, whose bindings report what outlives the interpreter, as it ends."""
    pytest.importorskip("triton")
    assert artefacts.outputs[name].splitlines()[-1].startswith("Training: "), artefacts.outputs[name]


# ---- resuming -----------------------------------------------------------------------------------


def long_sft(artefacts: Artefacts, log_dir: Path) -> Job:
    return Job(
        script(
            "train_gpt_sft.py",
            f"model.restore_from_path={artefacts.base}",
            f"exp_manager.explicit_log_dir={log_dir}",
            f"model.data.train_ds.file_path={artefacts.data('train_sft')}",
            f"model.data.validation_ds.file_path={artefacts.data('test_sft')}",
            "trainer.precision=32",
            "trainer.sft.max_epochs=30",
            "trainer.sft.max_steps=72",
            "trainer.sft.val_check_interval=24",
            "model.encoder_seq_length=64",
            "model.data.train_ds.global_batch_size=16",
            "model.data.train_ds.micro_batch_size=4",
            "model.hidden_dropout=0.1",
            "model.optim.lr=1e-3",
            "model.optim.sched.constant_steps=4",
        ),
        log_dir.with_suffix(".log"),
    )


@pytest.mark.long
def test_stopped_and_resumed_is_as_if_never_stopped(artefacts: Artefacts, tmp_path: Path) -> None:
    """SIGTERM in the middle: a checkpoint after the present step, status 75; then the same numbers to the last bit."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    undisturbed, first = long_sft(artefacts, straight), long_sft(artefacts, stopped)
    try:
        deadline = time.monotonic() + TIMEOUT
        while "train/loss" not in read_metrics(stopped) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(TIMEOUT) == 75, first.describe()
        assert "received SIGTERM" in first.output()
        done = read_metrics(stopped)["train/loss"][-1][0]
        assert done < 72, "the run was over before it was stopped: make it longer"
        assert not (stopped / "checkpoints" / "megatron_gpt_sft.nemo").exists()
        long_sft(artefacts, stopped).check(TIMEOUT)
        undisturbed.check(TIMEOUT)
    finally:
        undisturbed.kill()
        first.kill()
    archive = Path("checkpoints") / "megatron_gpt_sft.nemo"
    expected, resumed = stored_weights(straight / archive), stored_weights(stopped / archive)
    assert expected.keys() == resumed.keys() and len(expected) > 5
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []
    curves, resumed_curves = read_metrics(straight), read_metrics(stopped)
    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert resumed_curves[name] == curves[name], name
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 73))


def test_a_finished_run_started_again_with_other_settings_says_that_it_trains_nothing(
    artefacts: Artefacts, tmp_path: Path
) -> None:
    """What it would train with, and that it is of the old run that the model is."""
    log_dir, moved = tmp_path / "sft", shutil.copy(artefacts.base, tmp_path / "moved.nemo")
    shutil.copytree(artefacts.sft_log, log_dir)
    others = (
        f"model.restore_from_path={moved}",  # the same archive
        "model.optim.lr=1e-3",
        "model.data.train_ds.global_batch_size=8",
        "trainer.sft.save_interval=1",
    )
    flags = [*artefacts.sft_flags(log_dir), *others]
    output = run(script("train_gpt_sft.py", *flags), tmp_path / "again.log", TIMEOUT)
    assert (
        "with settings that differ from those of its checkpoint: model.data.train_ds.global_batch_size=8 (before: 16)"
        ", model.optim.lr=0.001 (before: 0.01). To start a new run with them, give another exp_manager.explicit_log_dir"
    ) in output
    assert "WARNING" in output and "all 4 steps of this run are already done: nothing is trained" in output
    assert "settings that differ" not in artefacts.outputs["train_gpt_sft.py"]
    first = artefacts.outputs["train_gpt_sft.py"]
    assert "steps of this run are already done" not in first
    # What takes long at the start is said before it begins, and how large checkpoints will be.
    steps = (
        "starting gpt_sft: loading",
        "a checkpoint takes about",
        "reading and tokenizing",
        "loading the weights of",
    )
    places = [first.index(text) for text in (*steps, "saved ")]
    assert places == sorted(places)


@pytest.mark.long
def test_a_run_is_not_continued_with_another_archive(artefacts: Artefacts, tmp_path: Path) -> None:
    """Old weights with another tokenizer, initial policy or reward model would go on without a word."""
    log_dir = tmp_path / "sft"
    shutil.copytree(artefacts.sft_log, log_dir)
    before = sorted(log_dir.rglob("*.json*"))
    flags = [*artefacts.sft_flags(log_dir), f"model.restore_from_path={artefacts.sft}", "trainer.sft.max_steps=6"]
    job = Job(script("train_gpt_sft.py", *flags), tmp_path / "other.log")
    assert job.wait(TIMEOUT) == 2, job.describe()
    last = job.output().splitlines()[-1]
    assert last.startswith("error: ") and f"this run began with {artefacts.base} (fingerprint " in last
    assert f"; {artefacts.sft} (fingerprint " in last and "has other contents. Put the former back" in last
    assert sorted(log_dir.rglob("*.json*")) == before  # nothing was trained


# ---- regression, two attributes, over the wire --------------------------------------------------


@pytest.mark.long
def test_regression_reward_model(artefacts: Artefacts, tmp_path: Path) -> None:
    """Trained with TP 2 and sequence parallelism under mpirun, average pooling; served on one rank."""
    lines = []
    for line in artefacts.data("train_sft").read_text().splitlines():
        record = json.loads(line)
        text = f"{record['input']} {record['output']}"
        # The first attribute is the text's length, to be learnt; the second is missing in every third line.
        lines.append({"text": text, "label": [float(len(text) - 32), -100 if len(lines) % 3 == 0 else 1.0]})
    data = tmp_path / "labelled.jsonl"
    write_jsonl(data, lines)
    log_dir = tmp_path / "rm"
    command = script(
        "train_reward_model.py",
        "trainer.devices=2",
        "trainer.precision=32",
        f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
        f"model.data.data_prefix={{train: [{data}], validation: [{data}], test: [{data}]}}",
        # as in NeMo-Aligner's tests/functional/rm.sh
        *("++model.data.train_ds.shuffle=False", "++model.data.validation_ds.shuffle=False"),
        *("++model.data.shuffle_documents=False", "++model.dist_ckpt_load_strictness=log_all"),
        f"exp_manager.explicit_log_dir={log_dir}",
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=True",
        "model.reward_model_type=regression",
        "model.data.append_eod=True",
        "model.regression.num_attributes=2",
        "model.use_avg_pool=True",
        "model.force_head_dtype=float32",
        "model.encoder_seq_length=64",
        "model.micro_batch_size=8",
        "model.global_batch_size=16",
        "trainer.rm.max_epochs=5",
        "trainer.rm.max_steps=30",
        "trainer.rm.val_check_interval=15",
        "trainer.rm.save_interval=0",
        "trainer.rm.limit_val_batches=2",
        "model.optim.lr=1e-2",
        "model.optim.sched.warmup_steps=2",
        "model.optim.sched.constant_steps=0",
        "exp_manager.checkpoint_callback_params.monitor=val_lss",
    )
    run(mpirun(2, command), tmp_path / "rm.log", TIMEOUT)
    said = (tmp_path / "rm.log").read_text()
    assert re.search(r"monitor=val_lss is not measured, .* choose one of (val_\w+, )*val_loss", said)
    assert said.count("is not measured") == 1
    curves = read_metrics(log_dir)
    losses = [loss for _, loss in curves["train/loss"]]
    # Of one batch alone it depends on which texts are in it; of the last half it is 0.55 to 0.72 with other seeds.
    assert statistics.mean(losses[15:]) < 0.85 * statistics.mean(losses[:3])
    assert [step for step, _ in curves["val/loss"]] == [15, 30]

    port = free_port()
    archive = log_dir / "checkpoints" / "megatron_gpt.nemo"
    model = (f"rm_model_file={archive}", "trainer.precision=32", f"inference.port={port}")
    service = Job(script("serve_reward_model.py", *model), tmp_path / "service.log")
    try:
        wait_until_ready(service, port, TIMEOUT)
        texts = [lines[0]["text"], lines[1]["text"]]

        def ask(*inputs: dict[str, Any]) -> dict[str, Any]:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v2/models/reward_model/infer",
                json.dumps({"inputs": inputs}).encode(),
                {"Authorization": f"Bearer {find_secret().value}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["outputs"][0]

        output = ask({"name": "sentences", "shape": [2, 1], "datatype": "BYTES", "data": texts})
        # Sentences end with EOS, as the texts that the model was trained on: the archive says so.
        tokenizer = load_nemo_tokenizer(archive)
        assert tokenizer.format.append_eod and load_nemo_config(archive)["text_format"]["add_bos"] is False
        ids = [*tokenizer.text_to_ids(texts[0]), tokenizer.eos_id]
        ended = ask(
            {"name": "tokens", "shape": [1, len(ids)], "datatype": "INT64", "data": ids},
            {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [len(ids)]},
        )
        assert ended["data"] == pytest.approx(output["data"][:2], rel=1e-5)
        assert output["name"] == "rewards" and output["shape"] == [2, 2]
        assert all(abs(value - 1.0) < 1.0 for value in output["data"][1::2])  # the second attribute is always 1
        # Another one, from the same folder and so in the same log directory, would be refused.
        lock = tmp_path / "nemo_experiments" / "inference_rm" / LOCK_FILE
        assert lock.read_text().startswith("inference_rm on host ")
        assert service.stop() == 0, service.describe()
    finally:
        service.kill()


# ---- batches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layout() -> Iterator[ParallelLayout]:
    with single_process(seed=1) as layout:
        yield layout


def trainer_for(
    kind: str,
    artefacts: Artefacts,
    layout: ParallelLayout,
    folder: Path,
    global_batch: int,
    micro_batch: int,
    validation: Mapping[str, int] | None = None,
) -> SupervisedTrainer:
    """A supervised trainer, as the scripts build it, on this process."""
    job = "gpt_sft" if kind in ("sft", "chat") else "training_rm"
    cfg = OmegaConf.merge(
        load_defaults(job),
        {
            "trainer": {"precision": "32"},
            "exp_manager": {"explicit_log_dir": str(folder)},
            "model": {"encoder_seq_length": 64, "optim": {"lr": 1e-3, "sched": {"warmup_steps": 0}}},
        },
    )
    assert isinstance(cfg, DictConfig)
    control, metrics = RunControl(), MetricsLogger(folder)
    checkpoints = CheckpointManager(folder / "checkpoints", CheckpointSettings())
    surroundings = Run(folder, layout, metrics, control, checkpoints)
    if job == "gpt_sft":
        files = {"train": artefacts.data("train_sft"), "validation": artefacts.data("test_sft")}
        if kind == "chat":
            files = {name: _as_chat(path, folder / f"{name}_chat.jsonl") for name, path in files.items()}
        cfg.model.data.chat = kind == "chat"
        cfg.model.data.train_ds.update(
            file_path=str(files["train"]), global_batch_size=global_batch, micro_batch_size=micro_batch
        )
        cfg.model.data.validation_ds.update(file_path=str(files["validation"]), **(validation or {}))
        cfg.model.restore_from_path = str(artefacts.sft)
        base, config = open_base_model(cfg.model.restore_from_path, SFT.read(cfg))
        model = base.load()
        task = sft_task(config, base.tokenizer)
        return build_supervised_trainer(
            config, config.trainer.sft, surroundings, model, task, language_model_objective()
        )
    cfg.model.global_batch_size, cfg.model.micro_batch_size = global_batch, micro_batch
    files = {
        "train": [str(artefacts.data("train_comparisons"))],
        "validation": [str(artefacts.data("test_comparisons"))],
    }
    cfg.model.data.data_prefix = files
    cfg.model.force_head_dtype = "float32"  # in bf16 one rounding of a reward is more than the sums' order
    base, config = open_base_model(str(artefacts.rm), RewardTraining.read(cfg))
    head = RewardHeadConfig.from_model_config(base.config)
    task = reward_task(config, base.tokenizer, head)
    return build_supervised_trainer(
        config, config.trainer.rm, surroundings, base.load(head=head), task, reward_objective(config.model, head)
    )


def _as_chat(source: Path, target: Path) -> Path:
    records = [json.loads(line) for line in source.read_text().splitlines()]
    chats = [
        {
            "system": "",
            "mask": "User",
            "conversations": [{"from": "User", "value": r["input"][6:24]}, {"from": "Assistant", "value": r["output"]}],
        }
        for r in records
    ]
    write_jsonl(target, chats)
    return target


@pytest.mark.parametrize("kind", ["sft", "chat", "ranking"])
def test_batch_sizes_do_not_show(kind: str, artefacts: Artefacts, layout: ParallelLayout, tmp_path: Path) -> None:
    """Validation covers every example once, a last partial batch too; no update depends on the micro batch."""
    results: list[dict[str, Any]] = []
    for number, (global_batch, micro_batch) in enumerate([(16, 16), (16, 5), (6, 4), (7, 7)]):
        trainer = trainer_for(kind, artefacts, layout, tmp_path / str(number), global_batch, micro_batch)
        report = {"val": trainer.validate(), "size": global_batch}
        if global_batch == 16:
            report["train"] = trainer.update(range(16))
            report["weights"] = {name: tensor.clone() for name, tensor in export_weights(trainer.model)}
        results.append(report)
    first, second = results[:2]
    for other in results[1:]:
        assert other["val"] == pytest.approx(first["val"], rel=1e-5)
    assert second["train"] == pytest.approx(first["train"], rel=1e-5)
    for name, tensor in first["weights"].items():
        torch.testing.assert_close(second["weights"][name], tensor, atol=2e-5, rtol=0)
    assert first["val"]["loss"] > 0 and first["train"]["grad_norm"] > 0
    if kind == "ranking":
        assert 0 <= first["val"]["accuracy"] <= 1


def test_validation_has_batch_sizes_of_its_own(artefacts: Artefacts, layout: ParallelLayout, tmp_path: Path) -> None:
    plain = trainer_for("sft", artefacts, layout, tmp_path / "plain", 16, 8)
    assert plain.val_sampler is not None and plain.val_sampler.global_batch_size == 16
    assert plain.val_batching.num_rows == plain.batching.num_rows == 8
    sizes = {"global_batch_size": 7, "micro_batch_size": 2}
    trainer = trainer_for("sft", artefacts, layout, tmp_path / "own", 16, 8, sizes)
    assert trainer.train_sampler.global_batch_size == 16 and trainer.batching.num_rows == 8
    collate, rows = trainer.collate, []

    def collate_and_count(examples: Sequence[Any], present: torch.Tensor) -> Any:
        rows.append(len(examples))
        return collate(examples, present)

    trainer.collate = collate_and_count
    assert trainer.validate() == pytest.approx(plain.validate(), rel=1e-5)
    assert rows[0] == 8 and trainer.val_batching.num_rows == 2  # 7, filled up to whole micro batches


def test_each_validation_is_on_the_same_examples(artefacts: Artefacts, layout: ParallelLayout, tmp_path: Path) -> None:
    """Else checkpoints would be ranked by losses of different data."""
    trainer = trainer_for("sft", artefacts, layout, tmp_path, 16, 8)
    whole = trainer.validate()
    trainer.settings = dataclasses.replace(trainer.settings, limit_val_batches=1)
    first = trainer.validate()
    assert first == trainer.validate() and first["loss"] != whole["loss"]


@pytest.mark.parametrize(("job", "name"), [("gpt_sft", "sft"), ("training_rm", "rm")])
def test_every_key_of_a_supervised_trainer_is_heeded(
    job: str, name: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    cfg = load_defaults(job)
    section, optim, model_cfg = cfg.trainer[name], cfg.model.optim, cfg.model
    loop = {
        "max_epochs": 3, "max_steps": 20, "val_check_interval": 0.25, "save_interval": 7, "limit_val_batches": 2,
        "gradient_clip_val": 0.5, "on_nonfinite": "skip", "max_consecutive_skips": 4, "val_check_at_start": True,
    }  # fmt: skip
    adam = {
        "name": "fused_adam", "lr": 0.5, "weight_decay": 0.2, "betas": [0.8, 0.9], "eps": 1e-3,
        "overlap_grad_sync": True,  # of several ranks
    }  # fmt: skip
    sched = {"name": "constant", "max_steps": 99, "warmup_steps": 3, "constant_steps": 2, "min_lr": 0.25}
    batches = {"global_batch_size": 4, "micro_batch_size": 3, "max_tokens_per_micro_batch": 50, "seed": 7}
    elsewhere = {"train_random_sampler", "val_random_sampler"}  # see `test_data`: they come with the task
    assert section.keys() - elsewhere == loop.keys()
    assert optim.keys() - {"sched"} == adam.keys() and optim.sched.keys() == sched.keys()
    for part, changes in ((section, loop), (optim, adam), (optim.sched, sched), (model_cfg, batches)):
        assert not [key for key, value in changes.items() if part[key] == value], "not away from its default"
        part.update(changes)
    model = build_model(ModelArchitecture(**SHAPE), {"optim": optim}, torch.float32)
    control, metrics = RunControl(), MetricsLogger(tmp_path)
    run = Run(tmp_path, layout, metrics, control, CheckpointManager(tmp_path / "checkpoints", CheckpointSettings()))
    examples: Any = range(23)
    task = SupervisedTask(examples, examples[:9], lambda examples, present: None, 2, False, True, None, 1)
    config: Any = JOBS[job].sections.read(cfg)
    own = vars(config.trainer)[name]
    trainer = build_supervised_trainer(config, own, run, model, task, language_model_objective())
    assert trainer.settings == SupervisedSettings(
        max_steps=3 * (23 // 4), max_epochs=3, step_limit=20, save_interval=7, limit_val_batches=2,
        val_check_interval=4, val_check_at_start=True,
    )  # fmt: skip
    assert (trainer.batching, trainer.val_batching) == (MicroBatching(6, 50, 2), MicroBatching(2, 50, 2))
    samplers = [
        (sampler.num_samples, sampler.global_batch_size, sampler.seed, sampler.shuffle)
        for sampler in (trainer.train_sampler, trainer.val_sampler)
        if sampler is not None
    ]
    assert samplers == [(23, 4, 7, False), (9, 4, 7, True)]
    optimizer = trainer.optimizer
    policy = optimizer.skips.policy
    assert (optimizer.clip_grad, policy.on_nonfinite, policy.max_consecutive_skips) == (0.5, "skip", 4)
    assert optimizer.schedule == Schedule(**sched | {"lr": 0.5, "is_given_length": True})
    assert not optimizer.megatron.config.use_distributed_optimizer
    groups = optimizer.megatron.param_groups
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-3)}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}  # norms do not decay
    section.max_steps, optim.sched.max_steps = 10, None
    config = JOBS[job].sections.read(cfg)
    own = vars(config.trainer)[name]
    shorter = build_supervised_trainer(config, own, run, model, task, language_model_objective())
    assert shorter.settings.max_steps == shorter.optimizer.schedule.max_steps == 10


# ---- stopping early -----------------------------------------------------------------------------


@pytest.fixture
def stop_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes stop signals as a job does, and has got none."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(stops, "received", [])
    monkeypatch.setattr(stops, "_is_starting", True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, by which a job leaves it ignored
    stops.install()
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def short_trainer(artefacts: Artefacts, layout: ParallelLayout, folder: Path) -> SupervisedTrainer:
    trainer = trainer_for("sft", artefacts, layout, folder, 16, 8)
    changes = {"max_steps": 3, "val_check_interval": 2, "save_interval": 0, "limit_val_batches": 2}
    trainer.settings = dataclasses.replace(trainer.settings, **changes)
    return trainer


@pytest.mark.parametrize(("limit", "batches"), [(0.1, 1), (0.5, 2), (1.0, 4), (0.0, 0), (1, 1), (9, 4)])
def test_a_fraction_of_batches_or_updates_is_at_least_one(limit: float, batches: int) -> None:
    loop = SupervisedLoop(val_check_interval=1, save_interval=0, limit_val_batches=limit)
    assert SupervisedSettings.from_config(loop, 10, 4).limit_val_batches == batches
    loop = loop.replaced(val_check_interval=0.01, save_interval=0.01)  # of ten updates: after each one, and not never
    settings = SupervisedSettings.from_config(loop, 10, 4)
    assert (settings.val_check_interval, settings.save_interval) == (1, 1)


def test_a_validation_that_was_abandoned_is_made_up_for(
    artefacts: Artefacts, layout: ParallelLayout, tmp_path: Path, stop_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 and SIGTERM twice in a validation: saved at once; the next run has an undisturbed one's numbers."""
    short_trainer(artefacts, layout, tmp_path / "straight").fit()
    stopped = short_trainer(artefacts, layout, tmp_path / "stopped")
    collate, made = stopped.collate, []

    def collate_and_signal(examples: Sequence[Any], present: torch.Tensor) -> Any:
        if not stopped.model.module.training:
            made.append(examples)
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                os.kill(os.getpid(), number)
        return collate(examples, present)

    stopped.collate = collate_and_signal
    stopped.fit()
    assert stopped.step == 2 and stopped.run_control.status == 75 and len(made) == 1
    monkeypatch.setattr(stops, "received", [])
    resumed = short_trainer(artefacts, layout, tmp_path / "stopped")
    assert resumed.step == 2
    resumed.fit()
    assert resumed.is_finished and resumed.run_control.status == 0
    expected, got = (read_metrics(tmp_path / name) for name in ("straight", "stopped"))
    assert [step for step, _ in got["val/loss"]] == [2, 3]
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert got[name] == expected[name], name


# ---- the loop and its checkpoints ---------------------------------------------------------------


class TinyRun:
    """A run that validates after steps 2, 4 and 6, with these losses, and saves after steps 3 and 6; started anew."""

    def __init__(
        self,
        layout: ParallelLayout,
        folder: Path,
        losses: Sequence[float] = (0.1, 0.5, 0.4),
        batch: int = 4,
        step_limit: int = 6,
    ):
        model = build_model(ModelArchitecture(**SHAPE), {"optim": OPTIM}, torch.float32)
        optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0)
        self.losses = dict(zip((2, 4, 6), losses, strict=True))
        self.archive = folder / "checkpoints" / "megatron_gpt.nemo"
        settings = CheckpointSettings(monitor="val_loss", save_best_model=True, filename="{step}-{val_loss:.1f}")
        self.checkpoints = CheckpointManager(folder / "checkpoints", settings, NemoExport({"num_layers": 2}, None))
        self.seen: list[int] = []
        self.validated: list[int] = []
        self.weights: dict[int, torch.Tensor] = {}
        self.stop_in_step = self.stop_in_validation = -1
        self.trainer = SupervisedTrainer(
            SupervisedSettings(
                max_steps=min(2 * 24 // batch, step_limit),
                max_epochs=2,
                step_limit=step_limit,
                val_check_interval=2,
                save_interval=3,
                limit_val_batches=1,
            ),
            model,
            optimizer,
            language_model_objective(),
            range(24),
            EpochSampler(24, batch, seed=3, shuffle=True, drop_last=True),
            None,
            None,
            self._batch,
            self.checkpoints,
            MetricsLogger(folder),
            RunControl(),
            batching=MicroBatching(2),
            val_batching=MicroBatching(2),
        )
        self.trainer.validate = self._validate  # type: ignore[method-assign]
        state = self.checkpoints.resume(model, optimizer)
        if state is not None:
            self.trainer.load_state_dict(state)

    def _batch(self, indices: Sequence[int], present: torch.Tensor) -> LanguageModelBatch:
        self.seen += indices
        if self.trainer.step + 1 == self.stop_in_step:
            os.kill(os.getpid(), signal.SIGUSR1)
        return LanguageModelBatch(
            torch.tensor([[(i + n) % VOCAB for n in range(6)] for i in indices]), torch.ones(len(indices), 5)
        )

    def _validate(self) -> dict[str, float]:
        step = self.trainer.step
        if step == self.stop_in_validation:
            os.kill(os.getpid(), signal.SIGUSR1)
            self.trainer.run_control.check()
        self.weights[step] = self._norm().clone()
        self.validated.append(step)
        return {"loss": self.losses[step]}

    def _norm(self) -> torch.Tensor:
        return dict(self.trainer.model.gpt.named_parameters())["decoder.final_layernorm.weight"].detach()

    def fit(self) -> int:
        """To the end, or to the stop; the exit status."""
        self.trainer.fit()
        stops.received.clear()
        return self.trainer.run_control.status

    def names(self) -> list[str]:
        return sorted(path.name for path in self.archive.parent.iterdir())

    def archived_step(self) -> int:
        """After which validated step the weights were those of the archive."""
        load_nemo_weights(self.archive, self.trainer.model)
        return next(step for step, norm in self.weights.items() if torch.equal(norm, self._norm()))


def test_who_interrupts_a_run_is_told_what_is_on_disk(
    layout: ParallelLayout,
    tmp_path: Path,
    stop_handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = TinyRun(layout, tmp_path)
    make_step = run.trainer.make_step

    def make_or_interrupt() -> None:
        if run.trainer.step == 4:
            raise KeyboardInterrupt
        make_step()

    monkeypatch.setattr(run.trainer, "make_step", make_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.fit()
    assert f"interrupted after 4 steps; the newest checkpoint is {tmp_path}/checkpoints/step=3" in caplog.text


def test_an_archive_that_a_killed_run_has_not_written_is_made_up_for(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    run = TinyRun(layout, tmp_path)
    assert run.fit() == 0
    expected = run.names()
    run.archive.unlink()  # as if killed between the last checkpoint and the archive
    again = TinyRun(layout, tmp_path)
    assert again.fit() == 0
    assert again.names() == expected and not again.validated and not again.seen
    again.weights = run.weights
    assert again.archived_step() == 6  # the only one that was saved with a validation


def test_the_best_of_nothing_is_told(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert TinyRun(layout, tmp_path / "measured").fit() == 0 and "save_best_model" not in caplog.text
    run = TinyRun(layout, tmp_path / "not")
    run.trainer.settings = dataclasses.replace(run.trainer.settings, val_check_interval=0)
    assert run.fit() == 0 and run.archive.exists()
    assert "save_best_model=True, but no checkpoint has a value of monitor=val_loss" in caplog.text


def test_a_run_that_has_saved_nothing_archives_its_own_weights(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """As with ``resume_if_exists=False`` and no step to make: the best checkpoint is another run's."""
    run = TinyRun(layout, tmp_path)
    assert run.fit() == 0
    run._norm().fill_(7)
    CheckpointManager(run.archive.parent, run.checkpoints.settings, run.checkpoints.nemo).export_at_end(
        run.trainer.model
    )
    assert (run._norm() == 7).all()
    load_nemo_weights(run.archive, run.trainer.model)
    assert (run._norm() == 7).all()


@pytest.mark.parametrize("back", [{"resume_if_exists": False}, {"resume_from_checkpoint": "step=3-val_loss=none"}])
def test_checkpoints_that_are_not_of_the_runs_past_are_named(
    layout: ParallelLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture, back: dict[str, Any]
) -> None:
    """That of step 6 may be better than what this run will have."""
    run = TinyRun(layout, tmp_path)
    assert run.fit() == 0
    folder = run.archive.parent
    if "resume_from_checkpoint" in back:
        back = {"resume_from_checkpoint": str(folder / back["resume_from_checkpoint"])}
    for settings, named in ({}, None), (back, "step=6-val_loss=0.4-last. They"), (back | {"monitor": None}, None):
        caplog.clear()
        settings = dataclasses.replace(run.checkpoints.settings, **settings)
        CheckpointManager(folder, settings).resume(run.trainer.model, run.trainer.optimizer)
        assert ("ranked by monitor=val_loss" in caplog.text) == (named is not None)
        assert named is None or f"{folder} has checkpoints of another run, or another course of this one: {named}" in (
            caplog.text
        )


def test_a_stop_in_the_last_step_puts_off_the_archive(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """Writing it may take longer than whoever asks to stop will wait. Without one to write, the run is done."""
    run = TinyRun(layout, tmp_path)
    run.stop_in_step = 6
    assert run.fit() == 75 and run.trainer.is_finished
    assert "step=6-val_loss=0.4-last" in run.names() and not run.archive.exists()
    again = TinyRun(layout, tmp_path)
    assert again.fit() == 0 and again.archive.exists() and not again.seen
    without = TinyRun(layout, tmp_path / "without")
    without.checkpoints.settings = dataclasses.replace(without.checkpoints.settings, save_nemo_on_train_end=False)
    without.stop_in_step = 6
    assert without.fit() == 0


def test_a_checkpoint_is_ranked_by_a_validation_of_its_own_weights(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """The loss of step 2, the best, is not that of steps 3 and 5, which are saved without a validation."""
    run = TinyRun(layout, tmp_path)
    run.stop_in_step = 5
    assert run.fit() == 75
    assert run.names() == ["step=3-val_loss=none", "step=5-val_loss=none-last"]
    again = TinyRun(layout, tmp_path)
    assert again.fit() == 0
    assert again.names() == ["megatron_gpt.nemo", "step=5-val_loss=none", "step=6-val_loss=0.4-last"]
    assert again.archived_step() == 6


def test_a_validation_that_is_made_up_for_gets_into_the_last_checkpoint(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    losses = 0.5, 0.4, 0.3
    run = TinyRun(layout, tmp_path, losses)
    run.stop_in_validation = 6
    assert run.fit() == 75
    assert run.names() == ["step=3-val_loss=none", "step=6-val_loss=none-last"]
    again = TinyRun(layout, tmp_path, losses)
    assert again.fit() == 0 and again.validated == [6]
    assert again.names() == ["megatron_gpt.nemo", "step=6-val_loss=0.3-last", "step=6-val_loss=none"]
    third = TinyRun(layout, tmp_path)
    assert third.fit() == 0 and not third.validated and third.names() == again.names()


def test_a_validation_before_the_first_step_ranks_no_checkpoint_and_saves_none(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """One that is stopped is made by the next start, which has nothing to go on from."""
    plain = TinyRun(layout, tmp_path / "plain")
    assert plain.fit() == 0

    def with_start(stop_in_validation: int) -> TinyRun:
        run = TinyRun(layout, tmp_path / "start")
        run.trainer.settings = dataclasses.replace(run.trainer.settings, val_check_at_start=True)
        run.losses[0], run.stop_in_validation = 0.0, stop_in_validation
        return run

    run = with_start(stop_in_validation=0)
    assert run.fit() == 75 and not run.archive.parent.exists()
    run = with_start(stop_in_validation=-1)
    assert run.fit() == 0 and run.validated == [0, 2, 4, 6]
    assert run.names() == plain.names() and run.archived_step() == 6
    again = with_start(stop_in_validation=-1)
    assert again.fit() == 0 and not again.validated


def test_a_run_with_another_batch_size_goes_on_with_the_next_example(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """24 examples: the run has seen 3 batches of 4, and has 3 batches of 6 to make: the rest, then the second epoch."""
    run = TinyRun(layout, tmp_path)
    run.stop_in_step = 3
    assert run.fit() == 75
    again = TinyRun(layout, tmp_path, batch=6)
    assert again.fit() == 0
    order = EpochSampler(24, 4, seed=3, shuffle=True, drop_last=True).order
    assert run.seen == order(0)[:12].tolist()
    assert again.seen == [*order(0)[12:], *order(1)[:6]]


def test_a_run_with_another_batch_size_ends_with_its_epochs(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None
) -> None:
    """Two epochs of 24 examples: 3 batches of 4, then 3 of 12; the learning rate's schedule ends with them."""
    run = TinyRun(layout, tmp_path, step_limit=99)
    run.stop_in_step = 3
    assert run.fit() == 75
    again = TinyRun(layout, tmp_path, batch=12, step_limit=99)
    assert again.trainer.settings.max_steps == again.trainer.optimizer.schedule.max_steps == 3 + 3
    assert again.fit() == 0 and again.trainer.step == 6
    order = EpochSampler(24, 4, seed=3, shuffle=True, drop_last=True).order
    assert again.seen == [*order(0)[12:], *order(1)]


def test_a_run_says_what_ends_it(
    layout: ParallelLayout, tmp_path: Path, stop_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """24 examples. Batches of 5 are 4 steps and 4 examples that no step gets; 2 epochs."""
    caplog.set_level("INFO")
    run = TinyRun(layout, tmp_path / "steps", batch=5)
    assert run.fit() == 0
    assert "24 examples, 5 per step: 4 steps per epoch, 4 left over; max_steps=6 ends the run" in caplog.text
    run = TinyRun(layout, tmp_path / "epochs", batch=8, step_limit=99)
    assert run.fit() == 0
    said = "24 examples, 8 per step: 3 steps per epoch; max_epochs=2 ends the run after 6 steps, before max_steps=99"
    assert said in caplog.text
    one = TinyRun(layout, tmp_path / "one", batch=24).trainer
    assert (
        one.describe_length()
        == "24 examples, 24 per step: 1 step per epoch; max_epochs=2 ends the run after 2 steps, before max_steps=6"
    )


def test_a_time_limit_is_days_hours_minutes_and_seconds() -> None:
    assert parse_duration("1:02:03:04") == ((1 * 24 + 2) * 60 + 3) * 60 + 4
    assert parse_duration("00:04:00:00") == 4 * 3600 and parse_duration(None) is None
    with pytest.raises(ValueError, match="=223384 is not of the form DD:HH:MM:SS; in a YAML file it needs quotes"):
        parse_duration(OmegaConf.create("limit: 1:02:03:04").limit)
    with pytest.raises(ValueError, match="every start would end before its first step"):
        parse_duration("00:00:00:00")


def test_a_time_limit_leaves_room_for_what_comes_next(layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run_control, "time", types.SimpleNamespace(monotonic=lambda: now))
    control = RunControl(max_seconds=100.0)
    for name, seconds in (("step", 10.0), ("step", 30.0), ("step", 20.0)):
        with control.section(name):
            now += seconds
    control.save_began()
    control.save_ended(5.0)
    control.check()  # 60 of 100
    now = 66.0
    control.check()
    with pytest.raises(StopEarlyError, match="max_time_per_run"):
        control.check(ahead="step")  # 66 + 30 + 5
    now = 64.0
    control.check(ahead="step")
    control.save_began()
    with pytest.raises(StopEarlyError, match="max_time_per_run"):
        control.check(ahead="step")  # 64 + 30 + what is left of a save + 5
    control.save_ended(1.0)
    with control.section(run_control.STATE):  # of a save: waiting for rollouts
        now += 20.0
    now = 74.0
    control.check()
    now = 75.0
    with pytest.raises(StopEarlyError):
        control.check()  # 75 + 20 + 5
    RunControl().check(ahead="step")


def test_a_services_status_says_whether_it_is_to_be_started_again(
    layout: ParallelLayout, stop_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "_callbacks", [])
    stops.hold()
    stopped = threading.Event()
    for limit, number, status in (
        (None, signal.SIGTERM, 0),
        (1e6, signal.SIGUSR1, 75),
        (None, signal.SIGHUP, 75),
        (0.0, None, 75),
    ):
        stopped.clear()
        stops.received.clear()
        control = RunControl(limit)
        control.watch_service(stopped.set)
        if number is not None:
            os.kill(os.getpid(), number)
        assert stopped.wait(60)
        assert control.service_status() == control.status == status
