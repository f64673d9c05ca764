"""Policy losses and their aggregation: against TRL's trainers, against plain Python loops, and at their edges."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_style_aligner.trainer.models.functional import kl_penalty
from nemo_style_aligner.trainer.models.policy_losses import (
    LOSSES,
    LossInput,
    LossSettings,
    PolicyLossError,
    policy_objective,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_losses.json").read_text())
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_losses_and_gradients_are_trls(case: str) -> None:
    """In float64, by `data/make_golden_losses.py`; names: the loss, the aggregation or what is beside the default."""
    columns = {name: torch.tensor(x, dtype=torch.float64) for name, x in GOLDEN["inputs"].items()}
    lengths, expected = torch.tensor(GOLDEN["lengths"]), GOLDEN["cases"][case]
    loss, _, how = case.partition(" ")
    settings = LossSettings(
        loss,
        *(GOLDEN["clip_low"], GOLDEN["clip_high"]),
        dual_clip=GOLDEN["dual_clip"] if how == "dual clip" else None,
        ratio_cap=GOLDEN["ratio_cap"],
        aggregation={"kl": "sequence_mean", "dual clip": "token_mean"}.get(how, how),  # type: ignore[arg-type]
        constant_length=1 if loss == "reinforce" else GOLDEN["constant_length"],
        kl_coef=GOLDEN["kl_coef"] if how == "kl" else 0.0,
    )
    if loss == "reinforce":  # its advantages are of sequences; TRL's loss is that of a ratio of 1 instead of a log-prob
        starts = lengths.cumsum(0) - lengths
        columns["advantages"] = columns["advantages"][starts].repeat_interleave(lengths)
        columns["old_logprobs"] = columns["logprobs"]
    logprobs = columns["logprobs"].clone().requires_grad_()
    given = LossInput(logprobs, columns["old_logprobs"], columns["advantages"], lengths)
    total, count, sums = policy_objective(given, settings, reference_logprobs=columns["reference_logprobs"])
    (total / count).backward()
    if loss != "reinforce":
        assert (total / count).item() == pytest.approx(expected["loss"], rel=1e-12)
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.tensor(expected["gradient"], dtype=torch.float64), rtol=1e-10, atol=1e-15
    )
    if "clipped" in expected and how != "dual clip":  # TRL does not count what is bounded there
        assert (sums["clip_fraction"] / sums["num_tokens"]).item() == pytest.approx(expected["clipped"], rel=1e-6)
    if how == "kl":
        assert (sums["kl_loss"] / sums["num_tokens"]).item() == pytest.approx(expected["kl"], rel=1e-6)


# ---- against plain loops ----------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """Random responses of 3, 1, 5 and 2 tokens, in float64."""

    lengths: torch.Tensor
    given: LossInput
    weights: torch.Tensor
    sampling: torch.Tensor
    reference: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def random(cls, seed: int = 0) -> Batch:
        lengths = torch.tensor([3, 1, 5, 2])
        generator = torch.Generator().manual_seed(seed)
        new, old, advantages, weights, sampling, reference, entropy = 0.7 * torch.randn(
            7, int(lengths.sum()), dtype=torch.float64, generator=generator
        )
        given = LossInput(new - 2, old - 2, advantages, lengths)
        return cls(lengths, given, weights.exp(), sampling - 2, reference - 2, entropy.exp())

    def objective(self, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Of all responses, with all that may be in a loss."""
        return policy_objective(
            self.given,
            settings,
            importance_weights=self.weights,
            sampling_logprobs=self.sampling,
            reference_logprobs=self.reference,
            entropy=self.entropy,
        )

    def part(self, begin: int, end: int) -> Batch:
        """Some of the responses."""
        starts = [0, *self.lengths.cumsum(0).tolist()]
        some = slice(starts[begin], starts[end])
        given = LossInput(
            *(x[some] for x in (self.given.logprobs, self.given.old_logprobs, self.given.advantages)),
            self.lengths[begin:end],
        )
        return Batch(
            given.lengths, given, *(x[some] for x in (self.weights, self.sampling, self.reference, self.entropy))
        )


def by_hand(batch: Batch, settings: LossSettings) -> float:
    """The mean loss, number by number."""
    sequences = []
    columns = (batch.given.logprobs, batch.given.old_logprobs, batch.given.advantages)
    columns = tuple(
        x.split(batch.lengths.tolist())
        for x in (*columns, batch.weights, batch.sampling, batch.reference, batch.entropy)
    )
    for new, old, advantages, weights, sampling, reference, entropy in zip(*columns, strict=True):
        if settings.trust_region == "sampling":
            old = sampling
        mean_log_ratio = sum((new - old).tolist()) / len(new)
        tokens = []
        for t in range(len(new)):
            a, rho = advantages[t].item(), math.exp(new[t] - old[t])
            if settings.policy_loss == "gspo":
                rho = math.exp(mean_log_ratio)
            clipped = min(max(rho, 1 - settings.clip_low), 1 + settings.clip_high)
            loss = {
                "ppo": -min(a * rho, a * clipped),
                "gspo": -min(a * rho, a * clipped),
                "cispo": -min(rho, settings.ratio_cap) * a * new[t].item(),
                "reinforce": -a * new[t].item(),
            }[str(settings.policy_loss)]
            if settings.dual_clip is not None and a < 0:
                loss = min(loss, -a * settings.dual_clip)
            has_moved = math.expm1(new[t] - sampling[t])
            if settings.trust_region == "both" and (
                (a > 0 and has_moved > settings.clip_high) or (a < 0 and has_moved < -settings.clip_low)
            ):
                loss = 0.0
            near = has_moved - math.log1p(has_moved)  # KL(what sampled || policy)
            loss = weights[t].item() * loss + settings.sampling_kl * near
            difference = (new[t] - reference[t]).item()
            kl = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) - 1 + difference}
            loss += settings.kl_coef * kl[settings.kl_estimator]
            tokens.append(loss - settings.entropy_bonus * entropy[t].item())
        sequences.append(tokens)
    if settings.aggregation == "token_mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    if settings.aggregation == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in sequences) / len(sequences)
    assert settings.constant_length is not None
    return sum(sum(tokens) / settings.constant_length for tokens in sequences) / len(sequences)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "options",
    [
        *({"policy_loss": name} for name in LOSSES),
        {"dual_clip": 1.3},
        {"kl_coef": 0.3, "kl_estimator": "k1"},
        {"kl_coef": 0.3, "kl_estimator": "k2"},
        {"kl_coef": 0.3, "entropy_bonus": 0.1},
        {"trust_region": "sampling"},
        {"trust_region": "both", "sampling_kl": 0.3},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_objectives_against_a_loop(options: dict[str, Any], aggregation: Any) -> None:
    """With importance weights; the same from any division into micro batches."""
    options = {"clip_low": 0.1, "clip_high": 0.3, "ratio_cap": 1.4, "constant_length": 7} | options
    settings, batch = LossSettings(aggregation=aggregation, **options), Batch.random()
    total, count, sums = batch.objective(settings)
    assert (total / count).item() == pytest.approx(by_hand(batch, settings), rel=1e-12)
    parts = [batch.part(begin, end).objective(settings) for begin, end in ((0, 1), (1, 1), (1, 3), (3, 4))]
    torch.testing.assert_close(sum(part[0] for part in parts), total)
    assert sum(part[1] for part in parts) == count
    for name, value in sums.items():
        torch.testing.assert_close(sum(part[2][name] for part in parts), value, msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_on_policy_is_minus_advantage_times_weight(name: str) -> None:
    """Where the policy is the one that sampled, all are REINFORCE; GSPO, if advantages are sequences'."""
    batch = Batch.random()
    logprobs = batch.given.logprobs.clone().requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64).repeat_interleave(batch.lengths)
    given = LossInput(logprobs, logprobs.detach(), advantages, batch.lengths)
    total, _, sums = policy_objective(given, LossSettings(name))
    total.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert sums["ppo_ratio"] == sums["ppo_ratio_clamped"] == sums["num_tokens"] == 11
    assert sums["clip_fraction"] == sums["approximate_kl"] == 0


def test_statistics() -> None:
    """Of two tokens with an advantage of 1 and three of -1, at ratios that are or are not clipped."""
    ratios = torch.tensor([2.0, 0.5, 0.5, 1.1, 4.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    given = LossInput(ratios.log(), torch.zeros(5), advantages, torch.tensor([2, 3]))
    _, _, sums = policy_objective(given, LossSettings())
    assert sums["ppo_ratio"] == ratios.sum() and sums["clip_fraction"] == 2
    assert sums["ppo_ratio_clamped"].item() == pytest.approx(1.2 + 0.8 + 0.8 + 1.1 + 1.2)
    assert sums["approximate_kl"].item() == pytest.approx((ratios - 1 - ratios.log()).sum().item())
    _, _, sums = policy_objective(given, LossSettings(dual_clip=3.0))
    assert sums["clip_fraction"] == 3  # the last one's loss is bounded
    _, _, sums = policy_objective(given, LossSettings("gspo"))
    means = [math.sqrt(2.0 * 0.5), (0.5 * 1.1 * 4.0) ** (1 / 3)]
    assert sums["ppo_ratio"].item() == pytest.approx(2 * means[0] + 3 * means[1])


def test_the_kl_penalty_has_a_gradient_and_a_bound() -> None:
    """k2's gradient is the difference of the log-probs, within the clamp."""
    batch = Batch.random()
    logprobs = batch.reference.detach() + torch.linspace(-2, 2, 11, dtype=torch.float64)
    logprobs.requires_grad_()
    given = LossInput(logprobs, logprobs.detach(), torch.zeros(11, dtype=torch.float64), batch.lengths)
    settings = LossSettings(kl_coef=0.5, kl_estimator="k2", kl_clamp=1.0)
    total, _, sums = policy_objective(given, settings, reference_logprobs=batch.reference)
    total.backward()
    difference = (logprobs - batch.reference).detach()
    torch.testing.assert_close(logprobs.grad, torch.where(difference.abs() < 1, 0.5 * difference, 0))
    assert sums["kl_loss"] == kl_penalty(logprobs, batch.reference, "k2", 1.0).sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_is_no_trouble(name: str, aggregation: Any) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    given = LossInput(nothing, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    settings = LossSettings(name, aggregation=aggregation, constant_length=3, kl_coef=0.1, entropy_bonus=0.1)
    total, count, sums = policy_objective(given, settings, reference_logprobs=nothing, entropy=nothing)
    total.backward()
    assert total == count == 0 and all(value == 0 for value in sums.values())


def test_a_loss_of_ones_own() -> None:
    def halves(given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = given.spread(given.sequence_mean(given.logprobs))
        return -given.advantages * mean / 2, {"mean_logprob": mean.detach()}

    batch = Batch.random()
    total, _, sums = policy_objective(batch.given, LossSettings(halves))
    means = [x.mean() for x in batch.given.logprobs.split(batch.lengths.tolist())]
    of_sequences = [x.sum() for x in batch.given.advantages.split(batch.lengths.tolist())]
    torch.testing.assert_close(total, -sum(m * a for m, a in zip(means, of_sequences, strict=True)) / 2)
    torch.testing.assert_close(sums["mean_logprob"], batch.given.logprobs.sum())


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda x: x, "mine returned a Tensor, and not .losses, statistics."),
        (lambda x: (x.mean(), {}), r"mine returned losses of shape \[\], and not a number for each of .* 11 response"),
        (lambda x: (x, {"ratio": x.mean()}), r"returned ratio of shape \[\]"),
        (lambda x: (x, {"ratio": 0.5}), "returned ratio of shape float"),
        (lambda x: (x, {"loss": x, "grad_norm": x}), "mine reports grad_norm, loss: choose other names"),
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, message: str) -> None:
    """It would be summed and divided to something else without a word."""

    def mine(given: LossInput, settings: LossSettings) -> Any:
        return returned(-given.advantages * given.logprobs)

    with pytest.raises(PolicyLossError, match=message):
        policy_objective(Batch.random().given, LossSettings(mine))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"policy_loss": "pppo"}, "policy_loss='pppo': choose ppo, gspo, cispo, reinforce"),
        ({"aggregation": "sequence_sum"}, "must be positive"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSettings(**wrong)
