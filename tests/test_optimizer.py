"""Precision, learning rate, clipping, and updates that hold no numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from small_models import TensorSource
from trained_models import ARCHITECTURES, OPTIM, make_actor, policy_batch, reference_model, tokens

from nemo_style_aligner.engine.weights.stream import export_weights, import_weights
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.schema import Updates
from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision
from nemo_style_aligner.trainer.models.optimizer import Schedule

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def test_precision() -> None:
    assert parse_precision("bf16") == parse_precision("bf16-mixed") == torch.bfloat16
    assert parse_precision(32) == parse_precision("32-true") == torch.float32
    with pytest.raises(ValueError, match="choose bf16 or 32"):
        parse_precision(16)


@pytest.mark.parametrize(
    "settings, max_steps, expected",
    [
        (  # WarmupAnnealHoldPolicy: (step + 1) / (warm-up + 1), then half a cosine
            {"lr": 8.0, "min_lr": 0.0, "warmup_steps": 3, "constant_steps": 0},
            15,
            {0: 2.0, 1: 4.0, 2: 6.0, 3: 8.0, 7: 6.0, 9: 4.0, 11: 2.0, 15: 0.0, 16: 0.0},
        ),
        (  # _linear_warmup_with_cosine_annealing: step / warm-up
            {"lr": 9e-6, "min_lr": 9e-7, "warmup_steps": 10, "constant_steps": 1000},
            1500,
            {0: 0.0, 1: 9e-7, 2: 1.8e-6, 9: 8.1e-6, 10: 9e-6, 255: 4.95e-6, 500: 9e-7, 501: 9e-7, 1501: 9e-7},
        ),
        (
            {"lr": 1.0, "min_lr": 0.2, "warmup_steps": 2, "constant_steps": 5},
            13,
            {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.8, 5: 0.6, 6: 0.4, 8: 0.2, 12: 0.2, 20: 0.2},
        ),
        ({"lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, "constant_steps": 2}, 8, {0: 1.0, 2: 0.75, 3: 0.5, 6: 0.0}),
        ({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "constant_steps": 1000}, 300, {10: 1.0, 11: 0.1, 299: 0.1}),
    ],
)
def test_schedule_is_nemos(settings: dict[str, Any], max_steps: int, expected: dict[int, float]) -> None:
    """Values by hand from NeMo's formulas (nemo/core/optim/lr_scheduler.py), of updates counted from 0."""
    schedule = Schedule.from_config(schema.Optimizer(lr=settings.pop("lr"), sched=settings), max_steps)
    assert {step: schedule(step) for step in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_constant_schedule_and_errors() -> None:
    schedule = Schedule.from_config(schema.Optimizer(lr=2.0, sched={"name": "constant", "warmup_steps": 3}), 10)
    assert [schedule(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert Schedule.from_config(schema.Optimizer(lr=2.0, sched=None), 10)(0) == 2.0
    given = Schedule.from_config(schema.Optimizer(lr=2.0, sched={"max_steps": 7}), 10)  # NeMo's key
    assert given.max_steps == given.ending_with_run(12).max_steps == 7
    assert Schedule.from_config(schema.Optimizer(lr=2.0), 10).ending_with_run(12).max_steps == 12
    with pytest.raises(ValueError, match="choose CosineAnnealing or constant"):
        Schedule(lr=1.0, name="Polynomial")
    with pytest.raises(ValueError, match=r"min_lr=2.0 is above"):
        Schedule(lr=1.0, min_lr=2.0)
    assert Schedule(lr=1.0, min_lr=2.0, name="constant")(9) == 1.0


@pytest.mark.parametrize(
    ("max_steps", "changes", "expected"),
    [
        (1010, {}, True),
        (12, {}, True),
        (11, {}, False),  # nothing but the warm-up
        (1011, {}, False),
        (1000, {"warmup_steps": 0}, True),
        (1001, {"warmup_steps": 1}, True),
        (1010, {"min_lr": 1.0}, False),
        (1010, {"name": "constant"}, False),
    ],
)
def test_a_run_that_is_too_short_for_its_schedule_says_so(
    max_steps: int, changes: dict[str, Any], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "constant_steps": 1000} | changes
    schedule = Schedule(max_steps=max_steps, **settings)
    schedule.warn_if_nothing_decays()
    assert bool(caplog.records) == expected
    if expected:
        first = {0: 0, 1: 2, 10: 11}[settings["warmup_steps"]]
        assert f"of {max_steps} updates, all after the first {first} run at min_lr=0.1" in caplog.text
        assert all(schedule(step) == 0.1 for step in range(first, max_steps))


def test_a_batch_without_tokens_changes_nothing() -> None:
    """Not by momentum, by decay, or by a step of the schedule."""
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    actor.update(policy_batch(tokens()))
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = actor.update(dataclasses.replace(policy_batch(tokens()), wanted=torch.zeros(5, dtype=torch.bool)))
    assert report.keys() == {"loss", "lr", "skipped_updates"} and report["loss"] == 0.0  # nothing is a mean of nothing
    assert actor.optimizer.step_count == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_gradients_that_are_no_numbers_end_the_job_before_they_do_harm(clip: float) -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None, clip)
    actor.update(policy_batch(tokens()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"update 2: loss nan.*from samples 3 to 8.*not applied"):
        actor.update(policy_batch(tokens(), advantage=math.nan), "samples 3 to 8")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_updates_that_are_no_numbers_are_skipped_if_so_configured(value: float, caplog: Any) -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None, nonfinite=Updates(on_nonfinite="skip", max_consecutive_skips=2))
    actor.update(policy_batch(tokens()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for count in (1, 2):
        report = actor.update(policy_batch(tokens(), advantage=value), "samples [3, 5]")
        assert report["skipped_updates"] == count and "grad_norm" not in report
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert "samples [3, 5]: skipped, 2 so far" in caplog.text
    report = actor.update(policy_batch(tokens()))  # one that is applied starts the count of consecutive ones anew
    assert actor.optimizer.step_count == 2 and report["skipped_updates"] == 2
    for _ in range(2):
        actor.update(policy_batch(tokens(), advantage=value))
    with pytest.raises(NonFiniteError, match="3 updates in a row, more than max_consecutive_skips=2"):
        actor.update(policy_batch(tokens(), advantage=value))


def test_the_gradient_norm_is_reported_without_clipping() -> None:
    norms = []
    for clip in (0.0, 1e-3):
        model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
        import_weights(model, TensorSource(dict(export_weights(reference_model()))))
        actor = make_actor(model, None, clip)
        actor.optimizer.schedule = Schedule(lr=0.4, warmup_steps=3)
        report = actor.update(policy_batch(tokens()))
        norms.append(report["grad_norm"])
        assert {group["lr"] for group in actor.optimizer.megatron.param_groups} == {report["lr"]} == {0.1}
        clipped = torch.cat([p.grad.flatten() for p in actor.optimizer.megatron.get_parameters()]).norm()
        assert clipped.item() == pytest.approx(clip or norms[0], rel=1e-2)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 1e-2


def test_gradients_are_clipped_as_by_megatron() -> None:
    """In place, with the same bits."""
    optimizer = make_actor(build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), None).optimizer
    parameters = optimizer.megatron.get_parameters()
    draw = torch.Generator().manual_seed(3)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    before = [parameter.grad.clone() for parameter in parameters]
    norm = torch.cat([gradient.flatten() for gradient in before]).norm().item()
    optimizer.clip_grad = 0.37
    optimizer._clip(norm)
    clipped = [parameter.grad.clone() for parameter in parameters]
    assert torch.cat([gradient.flatten() for gradient in clipped]).norm() == pytest.approx(0.37, rel=1e-4)
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad.copy_(gradient)
    clip_grad_by_total_norm_fp32(parameters, 0.37, norm)
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(clipped, parameters, strict=True))
    optimizer._clip(0.36)
    optimizer.clip_grad = 0.0  # no limit
    optimizer._clip(norm)
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(clipped, parameters, strict=True))
