"""Distillation: losses and gradients against plain torch, a teacher's lines, the same at every layout, bad lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from job_processes import ROOT, Job, run
from multirank_preferences import KD, LAYOUTS, make_files, report, trainer_for, weights_of
from test_preferences import assert_same, at_layouts, hugging_face, straight_and_resumed  # noqa: F401

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.jsonl import DataError, write_jsonl
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_tokenizer, save_nemo
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.data.distillation import DistillationDataset, DistillationItem
from nemo_style_aligner.trainer.jobs.distillation_setup import teacher_lines
from nemo_style_aligner.trainer.jobs.scoring_setup import open_teacher
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.services.score_client import SequencesToScore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of `make_files`, and process groups of this process."""
    folder = tmp_path_factory.mktemp("distillation")
    with single_process(seed=3):
        make_files(folder)
        yield folder


# ---- numbers ------------------------------------------------------------------------------------


def expected_loss(items: list[DistillationItem], student: Any, kind: str) -> torch.Tensor:
    """With weights 0.7 and 0.2, logits scaled by 0.8 (the student's) and 1.5 (the teacher's)."""
    losses = []
    for item in items:
        logits = 0.8 * student(torch.tensor([item.token_ids])).logits[0]
        places = [place for place, learnt in enumerate(item.targets) if learnt]
        for n, place in enumerate(places):
            k = len(item.logits) // len(places)
            ids, of_teacher = item.candidates[n * k : (n + 1) * k], torch.tensor(item.logits[n * k : (n + 1) * k])
            own, given = logits[place - 1], (1.5 * of_teacher).softmax(0)
            p = own[ids].softmax(0)
            divergence = given * (given / p).log() if kind == "fwd_kl" else p * (p / given).log()
            losses.append(0.7 * divergence.sum() - 0.2 * own.log_softmax(0)[item.token_ids[place]])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["fwd_kl", "bwd_kl"])
def test_losses_and_gradients_are_those_of_plain_torch(kind: str, files: Path, tmp_path: Path) -> None:
    """Plain SGD shows the gradients."""
    settings = {"kd_loss": kind, "kd_loss_weight": 0.7, "sft_loss_weight": 0.2}
    settings |= {"logits_scale": 0.8, "target_logits_scale": 1.5}
    keys = [f"model.{KD}.{name}={value}" for name, value in settings.items()]
    trainer = trainer_for(KD, files, tmp_path / "log", *keys, "model.micro_batch_size=2", "model.data.top_k=4")
    before, student = weights_of(trainer), hugging_face(trainer, tmp_path / "student")
    items = [trainer.train_data[index] for index in range(6)]
    expected = expected_loss(items, student, kind)
    expected.backward()
    metrics = trainer.update(range(6))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.7 * metrics["kd_loss"] + 0.2 * metrics["sft_loss"])
    assert 0 <= metrics["agreement"] <= 1
    after = weights_of(trainer)
    for name, parameter in student.named_parameters():
        gradient = (before[name] - after[name]) / 0.1
        assert (gradient - parameter.grad).abs().max() < 2e-4 * parameter.grad.abs().max() + 2e-5, name


def test_a_teachers_lines_are_its_logits(files: Path, tmp_path: Path) -> None:
    trainer = trainer_for(KD, files, tmp_path / "log")
    teacher = hugging_face(trainer, tmp_path / "teacher")
    items = {index: trainer.train_data[index] for index in (4, 7)}
    for line in teacher_lines(trainer.model, items, MicroBatching(2), top_k=5):
        item = items[line["index"]]
        assert line["tokens"] + line["labels"][-1:] == item.token_ids and line["loss_mask"] == item.targets[1:]
        with torch.no_grad():
            logits = teacher(torch.tensor([item.token_ids])).logits[0, :-1]
        best, ids = logits.topk(5)
        for place in torch.tensor(line["loss_mask"]).nonzero()[:, 0].tolist():
            assert line["topk_token_ids"][place] == ids[place].tolist()
            assert line["topk_logits"][place] == pytest.approx((best - best[:, :1])[place].tolist(), abs=2e-4)
            rest = logits[place].logsumexp(0) - best[place, 0]
            assert line["log_sum_exp_logits"][place] == pytest.approx(rest.item(), abs=2e-4)
        assert line["topk_logits"][0] == [0.0] * 5 and not line["loss_mask"][0]


@pytest.mark.long
def test_numbers_are_the_same_at_every_layout(at_layouts: Path) -> None:  # noqa: F811
    results = {name: torch.load(at_layouts / f"{KD}_{name}.pt") for name in LAYOUTS}
    for result in results.values():
        assert_same(result, results["one"])
        for line, other in zip(result["lines"], results["one"]["lines"], strict=True):
            logits, expected = (torch.tensor(given["topk_logits"]) for given in (line, other))
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
            assert line["topk_token_ids"] == other["topk_token_ids"]
    first, second = results["one"]["updates"]
    assert results["one"]["validation"]["kd_loss"] < min(first["kd_loss"], second["kd_loss"])


def test_numbers_do_not_depend_on_micro_batches(files: Path, tmp_path: Path) -> None:
    given = {"one": [], "four": ["model.micro_batch_size=4"], "tokens": ["model.max_tokens_per_micro_batch=40"]}
    results = {name: report(trainer_for(KD, files, tmp_path / name, *keys)) for name, keys in given.items()}
    for result in results.values():
        assert_same(result, results["one"])


@pytest.mark.long
def test_a_resumed_run_is_as_if_never_stopped(files: Path, tmp_path: Path) -> None:
    straight, resumed = straight_and_resumed(KD, files, tmp_path)
    assert [name for name, tensor in resumed.items() if not torch.equal(tensor, straight[name])] == []


# ---- lines --------------------------------------------------------------------------------------


GOOD = {
    "tokens": [3, 4, 5, 6],
    "labels": [4, 5, 6, 7],
    "loss_mask": [0, 1, 1, 0],
    "topk_token_ids": [[0, 0], [5, 6], [7, 6], [0, 0]],
    "topk_logits": [[0, 0], [-1.5, 0], [0, -2], [0, 0]],
}


def read(folder: Path, files: Path, *lines: dict[str, Any], top_k: int | None = None) -> list[DistillationItem]:
    write_jsonl(folder / "lines.jsonl", lines)
    tokenizer = load_nemo_tokenizer(files / "base.nemo")
    settings = {"vocab_size": tokenizer.vocab_size, "seq_length": 6, "top_k": top_k}
    dataset = DistillationDataset([folder / "lines.jsonl"], tokenizer, settings)
    return [dataset[index] for index in range(len(dataset))]


def test_lines_are_read_up_to_what_is_learnt_and_the_most_likely_tokens_first(files: Path, tmp_path: Path) -> None:
    long = {"tokens": [3] * 8, "labels": [3] * 8, "loss_mask": [1] * 8}
    long |= {"topk_token_ids": [[5, 6]] * 8, "topk_logits": [[0, -1]] * 8}
    nothing = GOOD | {"loss_mask": [0] * 4}
    (item,) = read(tmp_path, files, GOOD, long, nothing)
    assert item == DistillationItem([3, 4, 5, 6], [0, 0, 1, 1], [6, 5, 7, 6], [0.0, -1.5, 0.0, -2.0])
    (first,) = read(tmp_path, files, GOOD, top_k=1)
    assert (first.candidates, first.logits) == ([6, 7], [0.0, 0.0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"topk_token_ids": [[0, 0], [5, 99], [7, 6], [0, 0]]}, "has 99, which is not in the student's vocabulary"),
        ({"tokens": [3, 4, 5, -6], "labels": [4, 5, -6, 7]}, "'tokens' has -6, which is not in"),
        ({"topk_token_ids": [[5, 6]] * 3}, "'topk_token_ids' is of 3 positions, and 'tokens' of 4"),
        ({"loss_mask": [0, 1]}, "'loss_mask' is of 2 positions"),
        ({"topk_logits": [[0], [0, 1], [0], [0]]}, "'topk_logits' should be a list of lists of numbers, as long as"),
        ({"topk_logits": [[0]] * 4}, "'topk_token_ids' and 'topk_logits' have 2 and 1 at a position"),
        ({"topk_logits": [[0, float("nan")]] * 4}, "NaN|finite numbers"),
        ({"topk_token_ids": [[5, 5]] * 4}, "has a token twice"),
        ({"topk_token_ids": [["a", "b"]] * 4}, "'topk_token_ids' should be a list of lists of integers"),
        ({"labels": [4, 4, 6, 7]}, r"labels\[1\] is 4 and tokens\[2\] 5: they should be the same token"),
        ({"loss_mask": [0, 2, 1, 0]}, "'loss_mask' should be made of zeros and ones"),
        ({"tokenizer": "0123456789abcdef"}, "'tokenizer' is another than the student's"),
        ({"labels": None}, "'labels' should be a list of integers"),
    ],
)
def test_bad_lines_are_named(changed: dict[str, Any], said: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"lines.jsonl:2: .*({said})"):
        read(tmp_path, files, GOOD, GOOD | changed)


def test_lines_with_different_numbers_of_logits_need_a_top_k(files: Path, tmp_path: Path) -> None:
    wider = GOOD | {"topk_token_ids": [[5, 6, 8]] * 4, "topk_logits": [[0, -1, -2]] * 4}
    with pytest.raises(DataError, match=r"lines have 2 to 3 logits at a position: set model\.data\.top_k=2"):
        read(tmp_path, files, GOOD, wider)
    assert len(read(tmp_path, files, GOOD, wider, top_k=2)) == 2
    with pytest.raises(DataError, match=r"lines.jsonl:1: 'topk_logits' has 2 at a position, fewer than .*top_k=3"):
        read(tmp_path, files, GOOD, wider, top_k=3)


# ---- jobs ---------------------------------------------------------------------------------------


def test_a_teacher_that_does_not_fit_is_refused_before_weights_are_loaded(files: Path, tmp_path: Path) -> None:
    cfg = load_defaults("gpt_ppo_actor")
    policy, job = open_base_model(str(files / "base.nemo"), PPOActor.read(cfg))
    sequences = SequencesToScore(20, policy.architecture.vocab_size, policy.tokenizer.fingerprint())
    assert open_teacher(job, policy, sequences) is None
    train_character_tokenizer("xyz", tmp_path / "tokenizer")
    model = build_model(policy.architecture, {}, torch.float32, trainable=False)
    config = policy.architecture.to_nemo_config() | {"encoder_seq_length": 16}
    save_nemo(tmp_path / "other.nemo", model, config, tmp_path / "tokenizer")
    save_nemo(tmp_path / "short.nemo", model, config, files / "tokenizer")
    for name, said in (("other", "different tokenizer from .* Give a teacher"), ("short", "at most 16 tokens")):
        key, path = "trainer.ppo.teacher.restore_from_path", str(tmp_path / f"{name}.nemo")
        with pytest.raises(UserError, match=said):
            open_teacher(job.changed({key: path}), policy, sequences)


@pytest.mark.long
def test_stored_logits_go_on_where_they_were_and_are_of_one_teacher(files: Path, tmp_path: Path) -> None:
    """The script; a line that was not written to its end is written again."""
    write_jsonl(tmp_path / "texts.jsonl", [{"input": f"Qab{letter}:", "output": f"{letter}a"} for letter in "abcde"])
    output = tmp_path / "logits" / "lines.jsonl"
    script = ROOT / "examples" / "nlp" / "synthetic_data_gen" / "compute_topk_logits.py"
    command = [sys.executable, str(script), "trainer.precision=32", "top_k=3", f"output_path={output}"]
    command += [f"pretrained_checkpoint.restore_from_path={files / 'base.nemo'}", "model.encoder_seq_length=64"]
    command += [f"data.data.file_path={tmp_path / 'texts.jsonl'}", f"exp_manager.explicit_log_dir={tmp_path / 'log'}"]
    run([*command, "end_at_idx=2"], tmp_path / "first.log")
    whole = output.read_text()
    assert [json.loads(line)["index"] for line in whole.splitlines()] == [0, 1, 2]
    output.write_text(whole[: len(whole) - 40])
    run([*command, "trainer.devices=2"], tmp_path / "second.log")
    lines = output.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2, 3, 4]
    again, first = json.loads(lines[2]), json.loads(whole.splitlines()[2])
    logits, expected = (torch.tensor(line.pop("topk_logits")) for line in (again, first))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    assert again["topk_token_ids"] == first["topk_token_ids"] and again["teacher"] == first["teacher"]
    job = Job([*command, "top_k=2"], tmp_path / "third.log")
    assert job.wait(120) == 2 and "lines.jsonl:1: 'k' is another than this job's" in job.describe()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_student_learns_sums(tmp_path: Path) -> None:
    """In both ways, from a teacher that answers, after SFT that has taught it to refuse often."""
    script = ROOT / "examples" / "demo" / "run_demo_distillation.py"
    run([sys.executable, str(script), "--output", str(tmp_path / "demo")], tmp_path / "demo.log", 2900)
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    for student in ("kd", "opd"):
        assert report[f"accuracy_{student}"] > report["accuracy_sft"] + 0.1
        assert report[f"accuracy_{student}"] > 0.85 * report["accuracy_teacher"]
