"""docs/extending.md: its examples, as they stand on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_style_aligner.trainer.models.policy_losses import LossInput, LossSettings, find_policy_loss, policy_objective
from nemo_style_aligner.trainer.rl.estimators import StepRewards, find_estimator
from nemo_style_aligner.trainer.rl.reward_functions import FunctionRewards, load_reward_function
from nemo_style_aligner.trainer.rl.sample import Sample

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's examples in one file."""
    file = tmp_path_factory.mktemp("mine") / "my_rl.py"
    file.write_text("\n\n".join(EXAMPLES))
    return file


def test_they_are_short() -> None:
    assert len(EXAMPLES) == 3
    assert all(example.count("\n") < 20 for example in EXAMPLES)


def test_estimator(file: Path) -> None:
    """It is TRL's `scale_rewards="batch"`."""
    golden = json.loads((Path(__file__).parent / "data" / "golden_estimators.json").read_text())
    rewards = torch.tensor([torch.nan if reward is None else reward for reward in golden["rewards"]]).double()
    groups = torch.arange(len(rewards)) // golden["group"]
    step = StepRewards.of(rewards, groups, torch.ones(len(rewards), dtype=torch.int64))
    advantages, _ = find_estimator(f"{file}:step_scaled")(step)
    torch.testing.assert_close(advantages, torch.tensor(golden["step_scaled"]), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_loss(file: Path, advantage: float) -> None:
    """Its gradient is PPO's where the policy has not moved, and 0 where the ratio is at the bound."""
    loss: Callable[..., Any] = find_policy_loss(f"{file}:simple_policy_optimization")
    settings = LossSettings(policy_loss=loss, clip_high=0.25)
    bound = 1.25 if advantage > 0 else 0.75
    logprobs = torch.tensor([1.0, bound]).log().requires_grad_()
    given = LossInput(logprobs, torch.zeros(2), torch.full((2,), advantage), torch.tensor([2]))
    total, _, sums = policy_objective(given, settings)
    total.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-advantage, 0.0]), rtol=0, atol=1e-6)
    assert sums["ratio"].item() == pytest.approx(1 + bound)


def test_reward_function(file: Path) -> None:
    source = FunctionRewards(load_reward_function(f"{file}:reward", "trainer.ppo.rewards"), "reward")
    line = {"text": "2+2=", "answer": "4"}
    samples = [Sample(i, 0, line, [0, answer], 1, True, lambda ids: str(ids[0])) for i, answer in enumerate((4, 5))]
    right, wrong = source.score(samples).result(10)
    source.close()
    assert (right.value, wrong.value) == (pytest.approx(0.999), pytest.approx(-0.001))
    assert right.parts == {"right": 1.0, "length": -0.001}
