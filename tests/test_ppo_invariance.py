"""One step, of PPO or a group estimator, is the same at every layout, and rollouts are the same whoever makes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from job_processes import ROOT, critic_service, run
from multirank_ppo import LAYOUTS, Layout
from multirank_rollouts import MAX_NEW_TOKENS, NUM_SAMPLES, WAYS
from safetensors.torch import load_file

Result = tuple[dict[str, torch.Tensor], dict[str, float]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OURS = "critic in the job: "


def each(wanted: Callable[[Layout], bool]) -> pytest.MarkDecorator:
    """Have a test made for each of these layouts."""
    long = {layout.name: [pytest.mark.long] if layout.is_long else [] for layout in LAYOUTS}
    chosen = [pytest.param(each, id=each.name, marks=long[each.name]) for each in LAYOUTS if wanted(each)]
    return pytest.mark.parametrize("layout", chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts' results, and the archives they were made from."""
    folder = tmp_path_factory.mktemp("ppo")
    run([sys.executable, str(ROOT / "tests" / "multirank_ppo.py"), str(folder)], folder / "layouts.log", 560)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> Callable[[str], Result]:
    def load(name: str) -> Result:
        tensors = load_file(folder / f"{name}.safetensors")
        shared = {key: tensor for key, tensor in tensors.items() if not key.startswith(OURS)}
        return shared, json.loads((folder / f"{name}.json").read_text())

    return load


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], prefix: str = "") -> float:
    assert a.keys() == b.keys()
    return max((a[k].float() - b[k].float()).abs().max().item() for k in a if k.startswith(prefix))


def test_the_step_is_one_that_could_differ(result: Callable[[str], Result]) -> None:
    """Every term of the loss is at work, and both models move by far more than the tolerance below."""
    tensors, metrics = result("reference")
    assert metrics["init_policy_kl"] > 0.05
    # Log-probs and updates divide the samples into other micro batches: the first ratio is 1 up to rounding.
    first, second = (metrics[f"actor/train_optim/ppo_ratio/{update}"] for update in (0, 1))
    assert abs(first - 1) < 1e-6 < abs(second - 1)
    assert metrics["actor/train_optim/clip_fraction/1"] > 0
    assert metrics["actor/train_optim/scaled_entropy/0"] > 0
    assert metrics["actor/train_optim/grad_norm/0"] > 1.0  # it is clipped
    assert 0 < metrics["importance_weights"] < 2
    assert metrics["fraction_of_samples_properly_ended"] == 0.875
    assert tensors["learns"].eq(False).sum() == 2
    assert not torch.equal(tensors["old_logprobs"], tensors["reference_logprobs"])
    assert tensors["rewards"].std() > 0.1 and tensors["values"].std() > 0.1
    gspo, of_gspo = result("gspo_reference")
    assert of_gspo["actor/train_optim/clip_fraction/3"] > 0 and of_gspo["actor/train_optim/kl_loss/3"] > 0
    assert gspo["learns"].eq(False).sum() == 3 and of_gspo["nonfinite_samples"] == 1
    rloo, _ = result("rloo_reference")
    assert rloo["learns"].eq(False).sum() == 1 and rloo["advantages"].std() > 0.1
    distilled, of_distillation = result("distillation_reference")
    gap = distilled["teacher_logprobs"] - distilled["old_logprobs"]
    penalty = 0.1 * (distilled["old_logprobs"] - distilled["reference_logprobs"]).abs()
    expected = 0.5 * gap - penalty  # the reward of sample 5 is missing, and it does not count
    assert of_distillation["teacher_kl"] > 0.05 and distilled["learns"].eq(False).sum() == 1
    torch.testing.assert_close(distilled["advantages"], expected, rtol=0, atol=1e-6)
    tied, _ = result("tied_reference")
    assert "policy.lm_head.weight" in tensors and "policy.lm_head.weight" not in tied


@each(lambda layout: layout.algorithm == "ppo")
def test_a_reward_model_gives_the_same_rewards_in_the_job(result: Callable[[str], Result], layout: Any) -> None:
    """As the service of the critic's job, whichever ranks have the samples."""
    tensors, _ = result(layout.name)
    tolerance = 2e-2 if layout.precision == "bf16" else 5e-6
    torch.testing.assert_close(tensors["rewards in the job"], tensors["rewards"], rtol=0, atol=tolerance)


@each(lambda layout: layout.precision == "32" and layout.has_critic_in_job)
def test_a_critic_in_the_job_gives_and_learns_the_same(
    folder: Path, result: Callable[[str], Result], layout: Any
) -> None:
    """As the critic's job does: values, loss and weights, whether or not its weights leave the device between turns."""
    tensors, metrics = result(layout.name)
    everything = load_file(folder / f"{layout.name}.safetensors")
    here = {name.removeprefix(OURS): x for name, x in everything.items() if name.startswith(OURS)}
    torch.testing.assert_close(here.pop("values"), tensors["values"], rtol=0, atol=5e-6)
    assert abs(here.pop("loss").item() - metrics["critic_loss"]) < 1e-5
    there = {name: x for name, x in tensors.items() if name.startswith("critic.")}
    assert len(there) > 5 and largest_difference(here, there) < 2e-5


@each(lambda layout: layout.precision == "32")
def test_fp32_layouts_agree(result: Callable[[str], Result], layout: Any) -> None:
    """Log-probs, values, rewards, advantages, losses, gradient norms, new weights of policy and critic."""
    tensors, metrics = result(layout.name)
    expected_tensors, expected_metrics = result(layout.reference)
    models = ("policy.", "critic.") if layout.algorithm == "ppo" else ("policy.",)
    experience = {k: v for k, v in tensors.items() if not k.startswith(models)}
    assert largest_difference(experience, {k: expected_tensors[k] for k in experience}) < 5e-6
    for prefix in models:
        # 1% of the learning rate, at those few weights whose gradient is next to nothing.
        assert largest_difference(tensors, expected_tensors, prefix) < 2e-5
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        if "padding_efficiency" in name or "dp_balance" in name:
            assert 0.65 < value <= 1.0, name
            continue
        assert value == pytest.approx(expected_metrics[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        pytest.param("resident", "reference", marks=pytest.mark.long),
        ("selective", "reference"),
        ("kept_first_update", "reference"),
        pytest.param("kept_where_there_is_room", "kept", marks=pytest.mark.long),
        ("kept_in_part", "kept"),
        pytest.param("kept_without_room", "kept", marks=pytest.mark.long),
        pytest.param("kept_tp2_in_part", "kept_tp2", marks=pytest.mark.long),
        pytest.param("kept_selective", "kept", marks=pytest.mark.long),
    ],
)
def test_what_changes_no_arithmetic_changes_no_bit(result: Callable[[str], Result], name: str, reference: str) -> None:
    """Where the frozen weights are, what is recomputed, what is kept for training."""
    tensors, metrics = result(name)
    expected_tensors, expected_metrics = result(reference)
    assert largest_difference(tensors, expected_tensors) == 0.0
    assert metrics == expected_metrics


@pytest.mark.long
def test_what_is_kept_of_the_policy_changes_no_bit(result: Callable[[str], Result]) -> None:
    """Where micro batches are the same. A critic gives values of prompts, too, which its training does not ask for."""
    tensors, metrics = result("kept_micro1")
    expected_tensors, expected_metrics = result("one_update_micro1")
    others = {k: v for k, v in tensors.items() if not k.startswith("critic")}
    assert any(k.startswith("policy.") for k in others)
    assert largest_difference(others, {k: expected_tensors[k] for k in others}) == 0.0
    assert {k: v for k, v in metrics.items() if not k.startswith("critic")}.items() <= expected_metrics.items()


@each(lambda layout: layout.precision == "bf16")
def test_bf16_layouts_agree_roughly(result: Callable[[str], Result], layout: Any) -> None:
    tensors, metrics = result(layout.name)
    expected_tensors, expected_metrics = result("bf16_reference")
    assert largest_difference(tensors, expected_tensors) < 0.1
    for name in ("actor/train_optim/grad_norm/0", "critic/train/grad_norm/0", "critic_loss", "init_policy_kl"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=0.05), name
    in_fp32, metrics_fp32 = result("reference")
    for name in ("old_logprobs", "values", "rewards"):
        assert (tensors[name] - in_fp32[name]).abs().mean() < 0.05, name
    assert metrics["critic_loss"] == pytest.approx(metrics_fp32["critic_loss"], rel=0.1)


# ---- rollouts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(folder: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    """Rollouts of two rounds in every way, scored by a critic service."""
    with critic_service(folder / "rm.nemo", folder / "critic", "model.forward_micro_batch_size=4") as (_, port):
        program = str(ROOT / "tests" / "multirank_rollouts.py")
        run([sys.executable, program, str(folder), str(port)], folder / "rollouts.log", 180)
    return lambda name: load_file(folder / f"rollouts_{name}.safetensors")


@pytest.mark.long
def test_rollouts_are_worth_comparing(rollouts: Callable[[str], dict[str, torch.Tensor]]) -> None:
    batch = rollouts("static")
    assert len(batch["lengths"]) == NUM_SAMPLES
    generated = batch["lengths"] - batch["prompt_lengths"]
    assert batch["ended"].any() and not batch["ended"].all()
    assert (generated[~batch["ended"]] == MAX_NEW_TOKENS).all() and (generated[batch["ended"]] < MAX_NEW_TOKENS).any()
    assert batch["weight_versions"].eq(3).all()
    assert len(set(batch["prompt_lengths"].tolist())) > 1
    assert batch["rewards"].std() > 0.05


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.name)
def test_rollouts_are_the_same(rollouts: Callable[[str], dict[str, torch.Tensor]], way: Any) -> None:
    """With and without the queue, on one rank or more, whatever the batches, the engine, its memory and its layout."""
    batch, expected = rollouts(way.name), rollouts("static")
    assert batch.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(batch[name], tensor, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(batch[name], tensor), name
