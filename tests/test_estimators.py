"""Estimators: against figures by hand and by TRL, and what holds whatever the rewards, the order and the ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_style_aligner.guard.user_code import UserCodeError
from nemo_style_aligner.trainer.models import functional
from nemo_style_aligner.trainer.rl.estimators import (
    ESTIMATORS,
    Estimator,
    EstimatorError,
    GroupedSamples,
    StepRewards,
    estimator,
    find_estimator,
)
from nemo_style_aligner.trainer.rl.experience import overlong_penalty

DATA = Path(__file__).parent / "data"
TRL = json.loads((DATA / "golden_estimators.json").read_text())
ALL = list(ESTIMATORS)
OF_GROUPS = ["grpo", "dr_grpo", "rloo"]
NAN = math.nan


def fp64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def make_step(rewards: torch.Tensor, groups: list[int], lengths: list[int] | None = None, **known: Any) -> StepRewards:
    """One rank's step in fp64; a token's penalty is an equal share of its sample's ``kl``."""
    all_lengths = torch.tensor(lengths or [1] * len(groups))
    kl = known.get("kl", torch.zeros_like(rewards))
    known = {"token_kl": functional.spread(kl / all_lengths, all_lengths)} | known
    return StepRewards.of(rewards, torch.tensor(groups), all_lengths, **known)


def some_step(seed: int, *, is_missing: bool = True, num_groups: int = 5, of: int = 4) -> StepRewards:
    """Groups that stand in any order, some with missing rewards, one with a single reward, one with none."""
    random = torch.Generator().manual_seed(seed)
    n = num_groups * of
    groups = torch.arange(num_groups).repeat_interleave(of) * 7 + 3
    rewards = torch.randn(n, generator=random, dtype=torch.float64) * 3
    if is_missing:
        rewards[[0, 1, 2, 4, 5, 6, 7, 9]] = NAN
    order = torch.randperm(n, generator=random)
    lengths = torch.randint(1, 6, (n,), generator=random)
    return make_step(
        rewards[order],
        groups[order].tolist(),
        lengths.tolist(),
        kl=torch.rand(n, generator=random, dtype=torch.float64),
        ended=torch.rand(n, generator=random) < 0.7,
        values=torch.randn(int(lengths.sum()), generator=random, dtype=torch.float64),
        gamma=0.9,
        lam=0.8,
    )


def rows_of(step: StepRewards, own: torch.Tensor) -> StepRewards:
    """The step as a rank sees it whose samples are ``own``."""
    token = torch.arange(len(step.token_kl)).split(step.all_lengths.tolist())
    tokens = torch.cat([token[i] for i in own.tolist()]) if len(own) else torch.zeros(0, dtype=torch.int64)
    values = None if step.values is None else step.values[tokens]
    return dataclasses.replace(step, own=own, token_kl=step.token_kl[tokens], values=values)


def reordered(step: StepRewards, order: torch.Tensor) -> StepRewards:
    """The same samples in another order."""
    mine = rows_of(step, order)
    fields = ("rewards", "groups", "counts", "ended", "kl", "all_lengths")
    return dataclasses.replace(
        mine, own=torch.arange(len(order)), **{name: getattr(step, name)[order] for name in fields}
    )


def per_sample(flat: torch.Tensor, step: StepRewards) -> list[list[float]]:
    return [part.tolist() for part in flat.split(step.lengths.tolist())]


# ---- figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_GROUPS)
def test_as_trl(name: str) -> None:
    rewards = fp64(*(NAN if reward is None else reward for reward in TRL["rewards"]))
    groups = [index // TRL["group"] for index in range(len(rewards))]
    advantages, _ = ESTIMATORS[name](make_step(rewards, groups))
    torch.testing.assert_close(advantages, fp64(*TRL[name]), rtol=3e-5, atol=1e-6)  # TRL's are in fp32


def test_grpo_by_hand() -> None:
    step = make_step(fp64(1.5, 2, 6, 8), [0, 0, 0, 1], [2, 1, 1, 1], kl=fp64(0.5, 0, 0, 0))
    advantages, returns = ESTIMATORS["grpo"](step)  # 1, 2, 6: mean 3, deviation sqrt((4 + 1 + 9) / 2); 8 is alone
    expected = [numerator / (math.sqrt(7) + 1e-4) for numerator in (-2, -2, -1, 3, 0)]
    torch.testing.assert_close(advantages, fp64(*expected), rtol=0, atol=1e-12)
    assert returns is None


def test_dr_grpo_by_hand() -> None:
    step = make_step(fp64(1.5, 2, 6), [0, 0, 0], [2, 1, 1], kl=fp64(0.5, 0, 0))
    torch.testing.assert_close(ESTIMATORS["dr_grpo"](step)[0], fp64(-2, -2, -1, 3), rtol=0, atol=1e-12)


def test_rloo_by_hand() -> None:
    """The mean of a sample's KL counts, not the sum, and only others that ended are compared with."""
    step = make_step(
        fp64(4, 2, 9, 5, 7, 1),
        [0, 0, 0, 0, 1, 1],
        [2, 4, 1, 1, 1, 1],
        kl=fp64(0.4, 0.8, 0, 0, 0, 0),
        ended=torch.tensor([True, True, True, False, True, False]),
    )
    # 3.8, 1.8, 9 have ended, 5 has not; in the second group a single one has.
    expected = [3.8 - 5.4] * 2 + [1.8 - 6.4] * 4 + [9 - 2.8, 5 - (3.8 + 1.8 + 9) / 3, 0, 0]
    torch.testing.assert_close(ESTIMATORS["rloo"](step)[0], fp64(*expected), rtol=0, atol=1e-12)


def test_rloo_as_nemo_aligner() -> None:
    """NeMo-Aligner's formula, sample by sample, for the samples that have ended."""
    step = some_step(0, is_missing=False)
    rewards = (step.rewards - step.kl / step.all_lengths).tolist()
    groups, ended = step.groups.tolist(), step.ended.tolist()
    for i, advantages in enumerate(per_sample(ESTIMATORS["rloo"](step)[0], step)):
        group = [j for j in range(len(groups)) if groups[j] == groups[i]]
        num_ended = sum(ended[j] for j in group)
        if num_ended <= 1:
            assert advantages == [0] * len(advantages)
        elif ended[i]:
            baseline = sum(rewards[j] * ended[j] for j in group if j != i) / (num_ended - 1)
            assert advantages == pytest.approx([rewards[i] - baseline] * len(advantages), abs=1e-12)


def test_reinforce_plus_plus_by_hand() -> None:
    step = make_step(fp64(1, 3), [0, 1], [3, 1], token_kl=fp64(0.1, 0.2, 0.3, 0.5), gamma=0.5)
    advantages, returns = ESTIMATORS["reinforce_plus_plus"](step)  # rewards: -0.1, -0.2, 0.7; 2.5
    torch.testing.assert_close(advantages, fp64(-0.1 + 0.5 * 0.15, -0.2 + 0.35, 0.7, 2.5), rtol=0, atol=1e-12)
    assert returns is None


def test_gae_golden() -> None:
    """golden_ppo.json: rewards, advantages and returns of three responses' tokens before a whitening."""
    golden = json.loads((DATA / "golden_ppo.json").read_text())
    spec = golden["inputs"]
    lengths = spec["lens"]
    grid = torch.arange(spec["B"] * spec["T"], dtype=torch.float64).reshape(spec["B"], spec["T"])
    real = torch.arange(spec["T"])[None, :] < torch.tensor(lengths)[:, None]
    kl = (torch.cos(grid + 1) - torch.cos(grid)) / 2
    step = make_step(
        fp64(1, -0.5, 2),
        [0, 1, 2],
        lengths,
        token_kl=(spec["beta"] * kl)[real],
        values=torch.sin(grid)[real],
        gamma=spec["gamma"],
        lam=spec["lam"],
    )
    advantages, returns = ESTIMATORS["gae"](step)
    rewards = step.token_rewards()
    for found, name in ((rewards, "token_rewards"), (advantages, "advantages_raw"), (returns, "returns")):
        torch.testing.assert_close(found, torch.tensor(golden[name], dtype=torch.float64)[real], rtol=0, atol=1e-12)


# ---- what always holds --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_samples_that_do_not_count(name: str, seed: int) -> None:
    """They get 0 and change nothing: the others get what they get where the former do not exist."""
    step = some_step(seed)
    kept = reordered(step, step.counts.nonzero()[:, 0])
    advantages = per_sample(ESTIMATORS[name](step)[0], step)
    without = per_sample(ESTIMATORS[name](kept)[0], kept)
    for i, count in enumerate(step.counts.tolist()):
        expected = without.pop(0) if count else [0.0] * len(advantages[i])
        assert advantages[i] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_values_of_samples_that_do_not_count(name: str) -> None:
    step = make_step(fp64(1, NAN), [0, 0], [2, 2], values=fp64(0.5, 0.5, NAN, math.inf), kl=fp64(0.1, NAN))
    for part in ESTIMATORS[name](step):
        assert part is None or (part.isfinite().all() and part[2:].tolist() == [0, 0])


@pytest.mark.parametrize("name", ALL)
def test_ranks(name: str) -> None:
    """However samples are divided over ranks, also with none on one, each gets the same number, to the last bit."""
    step = some_step(1)
    whole = per_sample(ESTIMATORS[name](step)[0], step)
    for parts in (2, 3, 25):
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(parts))
        for own in order.tensor_split(parts):
            rank = rows_of(step, own)
            assert per_sample(ESTIMATORS[name](rank)[0], rank) == [whole[i] for i in own.tolist()]


@pytest.mark.parametrize("name", ALL)
def test_order_and_names_of_groups(name: str) -> None:
    step = some_step(2)
    whole = per_sample(ESTIMATORS[name](step)[0], step)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(5))
    other = reordered(step, order)
    names = torch.tensor([{3: -4, 10: 2**40, 17: 0, 24: 5, 31: 1}[group] for group in other.groups.tolist()])
    object.__setattr__(other, "groups", names)
    for i, advantages in zip(order.tolist(), per_sample(ESTIMATORS[name](other)[0], other), strict=True):
        assert advantages == pytest.approx(whole[i], abs=1e-12)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_advantages_of_a_group_add_up_to_nothing(name: str) -> None:
    step = some_step(3)
    step = make_step(step.rewards, step.groups.tolist(), kl=step.kl)  # each sample is one token, and has ended
    sums = torch.zeros(40, dtype=torch.float64).index_add(0, step.groups, ESTIMATORS[name](step)[0])
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, -1e6, 1 / 3])
@pytest.mark.parametrize("name", [*OF_GROUPS, "reinforce_plus_plus"])
def test_equal_rewards(name: str, reward: float) -> None:
    """Nothing at all, not even a rounding error, which Adam might enlarge."""
    step = make_step(torch.full((7,), reward, dtype=torch.float64), [0, 1, 1, 1, 0, 1, 1], [3, 1, 2, 1, 1, 4, 1])
    advantages, _ = ESTIMATORS[name](step)
    if ESTIMATORS[name].whitens:
        advantages = functional.whiten(advantages, torch.ones_like(advantages), unbiased=False)
        torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0, atol=1e-5)
    else:
        assert not advantages.any()


def test_uniform_groups() -> None:
    rewards = fp64(0.1, 0.1, 1, 1, 2, 0.1, NAN, 5, NAN, NAN)
    groups = torch.tensor([0, 0, 1, 1, 1, 0, 0, 2, 2, 3])
    uniform = GroupedSamples(groups=groups, counts=rewards.isfinite()).is_uniform(rewards)
    assert uniform.tolist() == [True, True, False, False, False, True, True, True, True, True]


def test_best_of_groups() -> None:
    """The earlier of equal ones; those without a reward only where there are no others."""
    rewards = fp64(1, 2, 5, NAN, 2, 2, NAN, NAN, 4)
    groups = torch.tensor([9, 9, 4, 9, 9, 4, 4, 0, 0])
    best = GroupedSamples(groups=groups, counts=rewards.isfinite()).best
    assert best(rewards, 1) == [1, 2, 8]
    assert best(rewards, 2) == [1, 2, 4, 5, 7, 8]
    assert best(rewards, 9) == list(range(9))


def test_best_of_n_imitates() -> None:
    step = some_step(4)
    without = dataclasses.replace(step, token_kl=torch.zeros_like(step.token_kl))
    assert ESTIMATORS["best_of_n"](without)[0].tolist() == step.spread(step.counts).tolist()
    expected = (1 - step.token_kl) * step.spread(step.counts)  # the KL penalty of each token counts
    assert ESTIMATORS["best_of_n"](step)[0].tolist() == expected.tolist() and step.token_kl.any()


def test_overlong_penalty() -> None:
    lengths = torch.tensor([1, 80, 81, 90, 100])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 1.0), fp64(0, 0, -0.05, -0.5, -1))
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 0.5), fp64(0, 0, -0.025, -0.25, -0.5))
    assert not overlong_penalty(lengths, 100, 0, 1.0).any()


# ---- a user's own -------------------------------------------------------------------------------


def test_one_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from nemo_style_aligner.trainer.rl.estimators import estimator\n"
        "def plain(step):\n"
        "    return step.spread(step.rewards), None\n"
        "@estimator(needs_groups=False, whitens=True)\n"
        "def marked(step):\n"
        "    return step.spread(2 * step.rewards), None\n"
        "@estimator()\n"
        "def mark(step, gamma):\n"
        "    return step.spread(step.rewards), None\n"
    )
    plain, marked = find_estimator(f"{file}:plain"), find_estimator(f"{file}:marked")
    assert (plain.name, plain.needs_values, plain.needs_groups, plain.whitens) == ("plain", False, True, False)
    assert (marked.name, marked.needs_values, marked.needs_groups, marked.whitens) == ("marked", False, False, True)
    step = make_step(fp64(1, NAN, 3), [0, 0, 1], [2, 1, 1])
    assert plain(step)[0].tolist() == [1, 1, 0, 3]
    assert marked(step)[0].tolist() == [2, 2, 0, 6]
    with pytest.raises(UserCodeError, match=r"mine.py has no function marke; it has marked, mark, plain$"):
        find_estimator(f"{file}:marke")
    with pytest.raises(
        UserCodeError, match=r"estimator=.*mine.py:mark takes \(step, gamma\), but is called with \(step"
    ):
        find_estimator(f"{file}:mark")


def test_names() -> None:
    assert find_estimator("rloo") is ESTIMATORS["rloo"]
    with pytest.raises(EstimatorError, match="estimator=gea: there is no such estimator: choose one of gae, grpo"):
        find_estimator("gea")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: step.spread(step.rewards), r"tensor.* and not \(advantages, returns\)"),
        (lambda step: (step.rewards, None), r"advantages of shape \[3\], and not a number for each .* 4 sampled"),
        (lambda step: ([0.0] * 4, None), "as advantages, and not a tensor"),
        (lambda step: (step.spread(step.rewards - step.rewards.mean()), None), r"NaN or infinite for samples \[0, 2\]"),
        (lambda step: (step.spread(step.rewards), step.spread(step.rewards)), "no critic to learn them"),
    ],
)
def test_what_an_estimator_must_not_return(function: Callable[[StepRewards], Any], message: str) -> None:
    with pytest.raises(EstimatorError, match=message):
        Estimator(function)(make_step(fp64(1, NAN, 3), [0, 0, 1], [2, 1, 1]))


def test_one_that_needs_values_must_give_returns() -> None:
    marked = estimator(needs_values=True)(lambda step: (step.spread(step.rewards), None))
    with pytest.raises(EstimatorError, match="None as returns, and not a tensor"):
        marked(make_step(fp64(1), [0]))
