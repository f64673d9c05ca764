"""The formulas: against golden figures in float64, against plain Python loops, and at their edges."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from nemo_style_aligner.trainer.models import functional as F
from nemo_style_aligner.trainer.models.policy_losses import LossInput, LossSettings, policy_objective

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_ppo.json").read_text())
TOLERANCE = {"rtol": 0, "atol": 1e-12}


class Golden:
    """The inputs of golden_ppo.json, made as its note says: B rows of T response tokens, no prompt."""

    def __init__(self) -> None:
        spec = GOLDEN["inputs"]
        self.gamma, self.lam = spec["gamma"], spec["lam"]
        self.clip, self.vclip = spec["clip"], spec["vclip"]
        ar = torch.arange(spec["B"] * spec["T"], dtype=torch.float64).reshape(spec["B"], spec["T"])
        self.values = torch.sin(ar)
        self.logprobs = -(1 + torch.cos(ar)) / 2 - 0.1
        self.init_logprobs = -(1 + torch.cos(ar + 1)) / 2 - 0.1
        self.new_logprobs = self.logprobs + 0.2 * torch.sin(3 * ar)
        self.predicted_values = self.values + 0.3 * torch.cos(2 * ar)
        # T positions predict T response tokens after a prompt of one token.
        self.lengths = torch.tensor(spec["lens"]) + 1
        self.mask = (torch.arange(spec["T"]) < self.lengths[:, None] - 1).double()

    def kl(self, estimator: F.KLEstimator) -> torch.Tensor:
        return F.zero_where_masked(F.kl_penalty(self.logprobs, self.init_logprobs, estimator, clamp=10.0), self.mask)

    def advantages_and_returns(self) -> tuple[torch.Tensor, torch.Tensor]:
        values, rewards = self.flat(self.values), self.flat(expected("token_rewards"))
        flat = F.generalized_advantage_estimation(values, rewards, self.lengths - 1, self.gamma, self.lam)
        advantages, returns = (torch.zeros_like(self.mask).masked_scatter(self.mask != 0, x) for x in flat)
        return advantages, returns

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T] to one number per response token."""
        return x[self.mask != 0]


@pytest.fixture
def golden() -> Golden:
    return Golden()


def expected(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_golden_kl(golden: Golden, estimator: F.KLEstimator) -> None:
    torch.testing.assert_close(golden.kl(estimator), expected(estimator), **TOLERANCE)


def test_golden_advantages_and_returns(golden: Golden) -> None:
    advantages, returns = golden.advantages_and_returns()
    torch.testing.assert_close(advantages, expected("advantages_raw"), **TOLERANCE)
    torch.testing.assert_close(returns, expected("returns"), **TOLERANCE)


@pytest.mark.parametrize(
    "unbiased, name", [(True, "adv_whitened_trl_unbiased"), (False, "adv_whitened_nemo_aligner_biased")]
)
def test_golden_whitening(golden: Golden, unbiased: bool, name: str) -> None:
    advantages, _ = golden.advantages_and_returns()
    torch.testing.assert_close(F.whiten(advantages, golden.mask, unbiased), expected(name), **TOLERANCE)


def test_golden_policy_loss(golden: Golden) -> None:
    advantages = F.whiten(golden.advantages_and_returns()[0], golden.mask, unbiased=True)
    new, old, advantages = (golden.flat(x) for x in (golden.new_logprobs, golden.logprobs, advantages))
    given = LossInput(new, old, advantages, golden.lengths - 1)
    loss, count, _ = policy_objective(given, LossSettings(clip_low=golden.clip, clip_high=golden.clip))
    assert (loss / count).item() == pytest.approx(GOLDEN["pg_loss_token_mean"], abs=1e-12)


def test_golden_value_loss(golden: Golden) -> None:
    _, returns = golden.advantages_and_returns()
    loss = F.clipped_value_loss(golden.predicted_values, golden.values, returns, golden.mask, golden.vclip)
    assert (loss / golden.mask.sum()).item() == pytest.approx(GOLDEN["value_loss_half_max_token_mean"], abs=1e-12)


def test_golden_file_is_covered() -> None:
    """A figure added to the file must get a test here."""
    assert set(GOLDEN) == {
        "inputs", "token_rewards", "advantages_raw", "returns", "adv_whitened_trl_unbiased",
        "adv_whitened_nemo_aligner_biased", "pg_loss_token_mean", "value_loss_half_max_token_mean",
        "k1", "k2", "k3",
    }  # fmt: skip


# ---- against plain loops ----------------------------------------------------------------------


def random_batch(seed: int = 0, b: int = 5, s: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(prompt lengths, sequence lengths, mask) with ragged prompts and responses."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 4, (b,), generator=generator)
    lengths = prompts + torch.randint(1, s - 3, (b,), generator=generator)
    positions = torch.arange(s - 1)
    mask = (positions >= prompts[:, None] - 1) & (positions < lengths[:, None] - 1)
    return prompts, lengths, mask.float()


def random_segments(seed: int = 0, n: int = 5) -> torch.Tensor:
    """Lengths of responses, int64 [n], one of them empty."""
    lengths = torch.randint(1, 7, (n,), generator=torch.Generator().manual_seed(seed))
    lengths[seed % n] = 0
    return lengths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_is_the_sum_of_discounted_deltas(seed: int, gamma: float, lam: float) -> None:
    lengths = random_segments(seed)
    values, rewards = torch.randn(2, int(lengths.sum()), dtype=torch.float64)
    advantages, returns = F.generalized_advantage_estimation(values, rewards, lengths, gamma, lam)
    parts = [x.split(lengths.tolist()) for x in (values, rewards, advantages, returns)]
    for v, r, got, got_returns in zip(*parts, strict=True):
        following = [*v.tolist()[1:], 0.0]
        deltas = [r[t].item() + gamma * following[t] - v[t].item() for t in range(len(r))]
        for t in range(len(r)):
            want = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert got[t].item() == pytest.approx(want, abs=1e-12)
            assert got_returns[t].item() == pytest.approx(want + v[t].item(), abs=1e-12)


def test_gae_of_a_sequence_does_not_depend_on_the_others() -> None:
    """Neither on their lengths nor on values that are no numbers, and to the bit."""
    lengths = random_segments()
    values, rewards = torch.randn(2, int(lengths.sum()))
    together = F.generalized_advantage_estimation(values, rewards, lengths, 0.99, 0.95)
    others = torch.full((9,), math.nan)
    pieces = [x.split(lengths.tolist()) for x in (values, rewards, *together)]
    for v, r, *expected in zip(*pieces, strict=True):
        more = torch.tensor([2, len(v), 7])
        longer = [torch.cat([others[:2], x, others[2:]]) for x in (v, r)]
        alone = F.generalized_advantage_estimation(*longer, more, 0.99, 0.95)
        for got, want in zip(alone, expected, strict=True):
            assert torch.equal(got.split(more.tolist())[1], want)
    nothing = torch.zeros(0)
    assert F.generalized_advantage_estimation(nothing, nothing, torch.zeros(0).long(), 1.0, 1.0)[0].shape == (0,)
    assert F.generalized_advantage_estimation(nothing, nothing, torch.zeros(3).long(), 1.0, 1.0)[0].shape == (0,)


def test_sums_and_means_of_segments() -> None:
    """Of fp32 as exact as fp32 is, however long a segment; one's NaN is not another's."""
    x, lengths = torch.tensor([1.0, 2.0, 4.0, math.nan]), torch.tensor([2, 0, 1, 1])
    assert F.segment_sum(x, lengths).tolist()[:3] == [3.0, 0.0, 4.0]
    assert F.segment_mean(x, lengths).tolist()[:3] == [1.5, 0.0, 4.0]
    assert F.spread(torch.tensor([5, 6, 7, 8]), lengths).tolist() == [5, 5, 7, 8]
    many = torch.full((2**18,), 0.1)
    mean = F.segment_mean(many.requires_grad_(), torch.tensor([2**18]))
    assert mean.dtype == torch.float32 and mean.item() == many[0].item()
    mean.sum().backward()
    torch.testing.assert_close(many.grad, torch.full_like(many, 2**-18))


@pytest.mark.parametrize("unbiased", [True, False])
def test_whitening_equals_torch_var_and_survives_a_large_mean(unbiased: bool) -> None:
    _, _, mask = random_batch()
    x = torch.randn(mask.shape) + 1e4
    got = F.whiten(x, mask, unbiased)
    kept = x[mask == 1].double()
    want = (kept - kept.mean()) / torch.sqrt(kept.var(unbiased=unbiased) + 1e-8)
    torch.testing.assert_close(got[mask == 1].double(), want, rtol=1e-6, atol=1e-6)


def test_value_loss_against_a_loop_and_clip_zero_disables() -> None:
    _, _, mask = random_batch()
    values, old, returns = torch.randn(3, *mask.shape, dtype=torch.float64)
    for clip in (0.0, 0.3):
        want = 0.0
        for i, t in mask.nonzero().tolist():
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            near = min(max(v, o - clip), o + clip) if clip else v
            want += 0.5 * max((v - r) ** 2, (near - r) ** 2)
        assert F.clipped_value_loss(values, old, returns, mask, clip).item() == pytest.approx(want, abs=1e-10)


# ---- KL estimators ----------------------------------------------------------------------------


def test_k1_and_k3_have_the_expectation_of_the_kl() -> None:
    p, q = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * F.kl_penalty(p, q, estimator)).sum(), kl)
    assert torch.all(F.kl_penalty(p, q, "k3") >= 0) and torch.all(F.kl_penalty(p, q, "k2") >= 0)
    torch.testing.assert_close(F.kl_penalty(p, q, "abs"), (p - q).abs())


def test_kl_is_clamped_and_finite_for_wild_log_probs() -> None:
    wild = torch.tensor([[-1000.0, 0.0, -3.0]])
    for estimator in ("abs", "k1", "k2", "k3"):
        kl = F.kl_penalty(wild, torch.tensor([[0.0, -1000.0, -3.0]]), estimator, clamp=10.0)
        assert torch.isfinite(kl).all() and kl.abs().max() <= 10 and kl[0, 2] == 0
    # The log ratio is clamped, and then the estimate.
    assert F.kl_penalty(torch.tensor([-9.0, 9.0]), torch.zeros(2), "k2", clamp=0.5).tolist() == [0.125, 0.125]
    with pytest.raises(ValueError, match="k4"):
        F.kl_penalty(wild, wild, "k4")  # type: ignore[arg-type]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="mask has shape"):
        F.zero_where_masked(torch.zeros(2, 3), torch.zeros(2, 4))


# ---- masks keep everything out ----------------------------------------------------------------


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("all_masked", [False, True])
def test_masked_positions_reach_neither_loss_nor_gradient(junk: float, all_masked: bool) -> None:
    _, _, mask = random_batch()
    if all_masked:
        mask = torch.zeros_like(mask)
    clean = torch.randn(4, *mask.shape).masked_fill(mask == 0, 0.0)
    dirty = clean.masked_fill(mask == 0, junk)

    def everything(x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        new = x[0].clone().requires_grad_()
        value = F.clipped_value_loss(new, x[1], x[2], mask, 0.2)
        outputs = [value, *(F.whiten(x[3], mask, unbiased) for unbiased in (True, False))]
        value.backward()
        return outputs, new.grad

    (got, got_grad), (want, want_grad) = everything(dirty), everything(clean)
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)
    assert torch.isfinite(got_grad).all()
    torch.testing.assert_close(got_grad, want_grad)
    if all_masked:
        assert all(torch.all(a == 0) for a in got) and torch.all(got_grad == 0)


def test_whitening_one_token_is_finite_and_two_are_whitened() -> None:
    mask = torch.tensor([[0.0, 1.0]])
    for unbiased in (True, False):
        assert torch.equal(F.whiten(torch.tensor([[3.0, 4.0]]), mask, unbiased), torch.zeros(1, 2))
        two = F.whiten(torch.tensor([[3.0, 4.0]]), torch.ones(1, 2), unbiased)
        assert two.tolist()[0] == pytest.approx([-(0.5**0.5), 0.5**0.5] if unbiased else [-1, 1])


def test_sequences_of_all_lengths_are_measured_by_one_rule() -> None:
    trainer = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    engine = torch.tensor([-2.0, -3.0, -1.0, -0.5])
    ratios = F.sequence_ratios(trainer, engine, torch.tensor([3, 1, 0]))
    # The geometric mean of e, e^2 and 1 is e; of one token it is its own ratio; nothing says nothing.
    assert ratios.tolist() == pytest.approx([math.e, math.exp(-0.5), 1.0], rel=1e-6)


# ---- reward model losses ----------------------------------------------------------------------


def test_bradley_terry() -> None:
    chosen = torch.tensor([1.0, 0.0, 0.0, 100.0], requires_grad=True)
    rejected = torch.tensor([0.0, 1.0, 0.0, -100.0])
    loss, correct = F.bradley_terry_loss(chosen, rejected)
    want = [math.log1p(math.exp(-1)), math.log1p(math.exp(1)), math.log(2), 0.0]
    assert loss.tolist() == pytest.approx(want, abs=1e-6)
    assert correct.tolist() == [True, False, False, True]
    loss.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.26894, -0.73106, -0.5, 0.0], abs=1e-4)


def test_regression_ignores_missing_labels() -> None:
    prediction = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    total, count = F.regression_loss(prediction, torch.tensor([[0.0, -100.0], [1.0, 4.0]]))
    assert (total.item(), count.item()) == (5.0, 3.0)
    total.backward()
    assert prediction.grad.tolist() == [[2.0, 0.0], [4.0, 0.0]]
    total, count = F.regression_loss(prediction, torch.full((2, 2), -100.0))
    assert (total.item(), count.item()) == (0.0, 0.0)
