"""Mixtures of experts: numbers that no layout changes, and what cannot be had is refused by name."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job_processes import ROOT, run
from multirank_experts import KINDS, LAYOUTS, Layout, architecture, kinds_of
from multirank_ragged import LOSSES, LR
from small_models import SHAPE

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.embedded.routing import routed
from nemo_style_aligner.trainer.models.lora import LoraSettings

Result = dict[str, Any]
CASES = [
    (layout, kind)
    for layout in LAYOUTS
    if not layout.is_long or os.environ.get("TEST_LONG")
    for kind in kinds_of(layout)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    script = Path(__file__).with_name("multirank_experts.py")
    run([sys.executable, str(script), str(folder)], ROOT / "results" / "test-logs" / "experts.log", 500.0)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "kind"), CASES, ids=[f"{layout.name}, {kind}" for layout, kind in CASES])
def test_experts_give_the_same_numbers_in_any_layout(layout: Layout, kind: str, results: Path) -> None:
    """Log-probs, losses, gradients, weights after three updates, and responses of engines with the first weights.

    The ranks themselves compare exported weights, and checkpoints that they and another layout wrote.
    """
    expected: Result = torch.load(results / f"{kind}, reference.pt")
    found: Result = torch.load(results / f"{kind}, {layout.name}.pt")
    for (ids, logprobs), (same_ids, same) in zip(found["responses"], expected["responses"], strict=True):
        assert ids == same_ids and logprobs == pytest.approx(same, abs=1e-5)
    for number in range(len(LOSSES)):
        assert torch.allclose(found[f"logprobs {number}"], expected[f"logprobs {number}"], atol=1e-5, rtol=0)
        metrics = expected[f"metrics {number}"]
        for name in metrics.keys() - {"padding_efficiency", "dp_balance"}:
            assert found[f"metrics {number}"][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-8), name
    for name, tensor in expected["weights"].items():
        assert torch.allclose(found["weights"][name], tensor, atol=0.02 * LR, rtol=0), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_nemo_describes_the_experts(kind: str) -> None:
    a = architecture(kind)
    assert ModelArchitecture.from_nemo_config(a.to_nemo_config()) == a
    every_third = a.to_nemo_config() | {"moe_layer_freq": 3}
    assert ModelArchitecture.from_nemo_config(every_third).dense_layers == (1, 2)
    unnamed = {key: value for key, value in a.to_nemo_config().items() if key != "moe_ffn_hidden_size"}
    experts = ModelArchitecture.from_nemo_config(unnamed).experts
    assert experts is not None and experts.ffn_hidden_size == a.ffn_hidden_size  # as megatron-core takes it


def test_active_parameters_are_those_that_a_token_has() -> None:
    dense = ModelArchitecture(**SHAPE | {"ffn_hidden_size": 2 * 24})
    experts = dataclasses.replace(dense, experts=KINDS["softmax"])
    router, one = SHAPE["hidden_size"] * 4, 3 * SHAPE["hidden_size"] * 24
    assert experts.active_layer_parameters - dense.active_layer_parameters == dense.num_layers * router
    assert experts.num_parameters - dense.num_parameters == dense.num_layers * (router + 2 * one)
    assert experts.forward_operations(7, 0) - dense.forward_operations(7, 0) == 2 * 7 * dense.num_layers * router


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"per_token": 5}, "5 of 4 experts"),
        ({"per_token": 1}, "its router could not learn"),
        ({"scores": "sigmoid", "normalized": False}, "sigmoid scores that are not normalized"),
        ({"has_bias": True}, "a bias and softmax"),
        ({"number": 10**6}, "number must be in"),
        ({"scaling": 0.0}, "scaling must be above 0"),
        ({"scores": "max"}, "scores='max'"),
    ],
)
def test_experts_that_cannot_be_built_are_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Experts(**{"number": 4, "per_token": 2, "ffn_hidden_size": 8, **change})


@pytest.mark.parametrize(
    "key", ["moe_router_num_groups", "moe_shared_expert_gate", "moe_expert_capacity_factor", "moe_apply_probs_on_input"]
)
def test_other_kinds_of_experts_are_refused_by_name(key: str) -> None:
    config = architecture("softmax").to_nemo_config() | {key: 4}
    with pytest.raises(ValueError, match=f"model.{key}=4.*not supported"):
        ModelArchitecture.from_nemo_config(config)


def test_what_experts_cannot_be_divided_by_is_named() -> None:
    a = architecture("sigmoid")
    assert not a.expert_layout_problems(2, 2)
    problems = a.expert_layout_problems(3, 5)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.expert_model_parallel_size=3",
        "model.expert_tensor_parallel_size=5",
    ]
    assert not ModelArchitecture(**SHAPE).expert_layout_problems(3, 5)
    assert any("moe_ffn_hidden_size=16" in line for line in a.layout_problems(32, engine_key="tensor_parallel_size"))


def test_adapters_of_experts_are_refused_by_name() -> None:
    a = architecture("softmax")
    (problem,) = LoraSettings(("all",), rank=2, alpha=2).problems(a, 1)
    assert "experts have no adapters" in problem
    assert not list(LoraSettings(("attention",), rank=2, alpha=2).problems(a, 1))


def test_a_bias_changes_the_choice_of_experts_and_not_their_weights() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0]])
    chosen, weights = routed(logits, KINDS["sigmoid"], torch.tensor([0.0, 0.0, 0.0, 5.0]))
    scores = logits[0, [3, 2]].sigmoid()
    assert chosen.tolist() == [[3, 2]]
    assert torch.allclose(weights[0], 1.5 * scores / scores.sum())
