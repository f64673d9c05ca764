"""NaN and Inf in what comes back from the critic job, and what the jobs do about them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from nemo_style_aligner.errors import NonFiniteError, UserError
from nemo_style_aligner.trainer.config.schema import ActorLoop, Updates
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.ragged import after_prompts
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS
from nemo_style_aligner.trainer.rl.experience import (
    AdvantageSettings,
    Experience,
    leave_out_nonfinite,
    make_experience,
    report_missing_rewards,
    why_nothing_is_learnt,
)
from nemo_style_aligner.trainer.rl.sample import Rollouts
from nemo_style_aligner.trainer.rl.scoring import Scores

pytestmark = pytest.mark.usefixtures("one_rank")

N = 6
SKIP = Updates(on_nonfinite="skip", max_consecutive_skips=10)
FORMULAS = ActorLoop(
    initial_policy_kl_penalty=0.1, kl_estimator="k1", discount_factor=0.9, gae_lambda=0.8, importance_weight_cap=2.0
)
SETTINGS = AdvantageSettings(FORMULAS, ESTIMATORS["gae"], max_length=8)


def settings_with(**changes: Any) -> AdvantageSettings:
    return dataclasses.replace(SETTINGS, ppo=FORMULAS.replaced(**changes))


@dataclasses.dataclass
class Step:
    """Everything a step gathers before its formulas: N samples, all of them this rank's."""

    rollouts: Rollouts
    scores: Scores
    columns: dict[str, torch.Tensor]

    def row(self, name: str, sample: int) -> torch.Tensor:
        """A sample's part of a column, which can be changed."""
        return self.columns[name].split(self.rollouts.sampled_lengths.tolist())[sample]

    def only(self, keep: torch.Tensor) -> Step:
        """The same of some samples."""
        one_by_one, chosen = self.rollouts, keep.tolist()

        def flat(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            parts = x.split(lengths.tolist())
            return torch.cat([parts[sample] for sample in chosen])

        of_samples = (
            "prompt_ids",
            "groups",
            "prompt_lengths",
            "lengths",
            "sampled_lengths",
            "ended",
            "counts",
        )
        rollouts = Rollouts(
            **{name: getattr(one_by_one, name)[keep] for name in (*of_samples, "counts")},
            own=torch.arange(len(keep)),
            tokens=flat(one_by_one.tokens, one_by_one.lengths),
            sampled=flat(one_by_one.sampled, one_by_one.lengths),
            engine_logprobs=flat(one_by_one.engine_logprobs, one_by_one.sampled_lengths),
            weight_versions=flat(one_by_one.weight_versions, one_by_one.sampled_lengths),
        )
        columns = {name: flat(column, one_by_one.sampled_lengths) for name, column in self.columns.items()}
        return Step(rollouts, Scores(self.scores.rewards[keep], {}, {}), columns)

    def screened(self, policy: Updates) -> Step:
        rollouts, columns = leave_out_nonfinite(self.rollouts, self.scores, self.columns, policy)
        return Step(rollouts, self.scores, columns)

    def experience(self, settings: AdvantageSettings = SETTINGS) -> tuple[Experience, dict[str, float]]:
        return make_experience(self.rollouts, self.scores, self.columns, settings, version=0)


def step() -> Step:
    generator = torch.Generator().manual_seed(3)
    prompt_lengths = torch.tensor([2, 3, 1, 2, 2, 4])
    lengths = torch.tensor([9, 7, 5, 6, 9, 8])
    num_tokens = int((lengths - prompt_lengths).sum())

    def numbers() -> torch.Tensor:
        return -torch.rand(num_tokens, generator=generator)

    rollouts = Rollouts(
        prompt_ids=torch.arange(N) + 40,
        groups=torch.arange(N) // 2,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        sampled_lengths=lengths - prompt_lengths,
        ended=torch.tensor([True, True, False, True, True, True]),
        counts=torch.ones(N, dtype=torch.bool),
        own=torch.arange(N),
        tokens=torch.randint(0, 9, (int(lengths.sum()),), generator=generator, dtype=torch.int32),
        sampled=after_prompts(lengths, prompt_lengths),
        engine_logprobs=numbers(),
        weight_versions=torch.zeros(num_tokens, dtype=torch.int32),
    )
    scores = Scores(torch.randn(N, generator=generator).double(), {}, {})
    columns = {"old_logprobs": numbers(), "reference_logprobs": numbers(), "values": 2 * numbers() + 1}
    return Step(rollouts, scores, columns)


def test_the_penalty_of_overlong_responses_enters_their_rewards() -> None:
    """Responses of 7, 4, 4, 4, 7 and 4 tokens; from 3 to 7 on a line down to -1."""
    penalised = dataclasses.replace(settings_with(overlong={"buffer_tokens": 4}), max_length=7)
    by_hand, plain = step(), step()
    by_hand.scores.rewards += torch.tensor([-1, -0.25, -0.25, -0.25, -1, -0.25], dtype=torch.float64)
    (found, metrics), (expected, more) = plain.experience(penalised), by_hand.experience()
    torch.testing.assert_close(found.columns["advantages"], expected.columns["advantages"])
    assert not torch.allclose(found.columns["advantages"], plain.experience()[0].columns["advantages"])
    assert metrics["rewards_with_kl"] == pytest.approx(more["rewards_with_kl"])


def spoil(what: Step) -> None:
    what.scores.rewards[1] = math.nan
    what.row("values", 3)[2] = math.inf
    what.row("reference_logprobs", 4)[5] = -math.inf


def test_samples_with_nan_change_nothing_for_the_others() -> None:
    whole = step()
    spoil(whole)
    experience, metrics = whole.screened(SKIP).experience()
    good, bad = torch.tensor([0, 2, 5]), [1, 3, 4]
    expected, expected_metrics = step().only(good).experience()
    lengths = whole.rollouts.sampled_lengths.tolist()
    for name, column in experience.columns.items():
        parts = column.split(lengths)
        torch.testing.assert_close(torch.cat([parts[sample] for sample in good.tolist()]), expected.columns[name])
        assert column.isfinite().all(), name  # the service refuses a training batch with NaN anywhere
    assert not experience.learns[bad].any() and torch.equal(experience.learns[good], expected.learns)
    batch = experience.value_batch()
    assert batch is not None and not batch.mask[bad].any() and batch.mask[good].any(1).all()
    assert metrics["nonfinite_samples"] == 3
    statistics = {
        name for name in metrics if name.startswith(("rewards", "advantages", "returns", "values", "init", "imp"))
    }
    assert len(statistics) > 8
    for name in statistics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name


def test_stop_names_the_samples_and_their_prompts() -> None:
    whole = step()
    spoil(whole)
    with pytest.raises(NonFiniteError) as error:
        whole.screened(STOP)
    message = str(error.value)
    assert "reward of samples [1] (prompts [41])" in message
    assert "values of samples [3] (prompts [43])" in message
    assert "initial policy's log-probs of samples [4] (prompts [44])" in message
    assert "on_nonfinite=skip" in message
    assert isinstance(error.value, UserError) and error.value.exit_status == 1  # the job prints no traceback


def test_a_missing_reward_is_never_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """By dynamic sampling, where the other rewards of its group are equal."""
    whole, dropped = step(), torch.tensor([True, True, False, False, False, False])
    whole.scores.rewards[1] = math.nan
    prompt_ids = whole.rollouts.prompt_ids
    with pytest.raises(NonFiniteError, match=r"reward of samples \[1\] \(prompts \[41\]\).*on_nonfinite=skip"):
        report_missing_rewards(whole.scores, prompt_ids, ~dropped, STOP)
    report_missing_rewards(whole.scores, prompt_ids, ~dropped, SKIP)
    assert not caplog.messages  # it is among those that are trained on, and will be left out there
    report_missing_rewards(whole.scores, prompt_ids, dropped, SKIP)
    assert "reward of samples [1] (prompts [41]): these samples are left out" in caplog.text
    scores = dataclasses.replace(whole.scores, rewards=torch.full((1000,), math.nan), problems={0: "why"})
    with pytest.raises(NonFiniteError, match=r"7 and 992 more.*sample 0: why") as error:
        report_missing_rewards(scores, torch.arange(1000) // 4, torch.ones(1000, dtype=torch.bool), STOP)
    assert len(str(error.value)) < 500, "the reason is lost behind numbers"


def test_a_step_of_nothing_but_nan_ends_the_job_in_any_case() -> None:
    nothing = step()
    nothing.scores.rewards[:] = math.nan
    with pytest.raises(NonFiniteError, match=r"samples \[0, 1, 2, 3, 4, 5\]"):
        nothing.screened(SKIP)


@pytest.mark.parametrize("num_ended, is_masked", [(0, True), (1, True), (0, False)])
def test_responses_that_never_end_are_reported(num_ended: int, is_masked: bool) -> None:
    """They are no part of the policy's loss, and nothing else would show that it learns nothing."""
    made, settings = step(), settings_with(mask_truncated=is_masked)
    made.rollouts.ended[:] = torch.arange(N) < num_ended
    experience, _ = made.experience(settings)
    reason = why_nothing_is_learnt(experience, settings)
    assert bool(experience.learns.any()) == (reason is None) == (num_ended > 0 or not is_masked)
    assert reason is None or "none of 6 responses has ended by itself" in reason


def test_what_leaves_every_response_out_is_named() -> None:
    """Each of the three ways leaves out a part."""
    made, settings = step(), settings_with(importance_sequence_bounds=[0.99, 1.01])
    made.rollouts.ended[:] = torch.arange(N) >= 2
    made.scores.rewards[2] = math.nan
    made.rollouts.engine_logprobs[:] = made.columns["old_logprobs"] - 1.0
    made = made.screened(SKIP)
    experience, _ = made.experience(settings)
    reason = why_nothing_is_learnt(experience, settings)
    assert reason is not None and "2 without an end" in reason and "1 with NaN or Inf" in reason
    assert "the others outside importance_sequence_bounds" in reason
    # Truncated responses count only where they are masked, bounds only where there are any.
    made.rollouts.ended[:], experience.learns[:] = False, False
    settings = settings_with(mask_truncated=False)
    reason = why_nothing_is_learnt(experience, settings)
    assert reason is not None and reason.endswith(": 1 with NaN or Inf (on_nonfinite=skip)")


@pytest.mark.parametrize("whose", ["", "the engine's "])
@pytest.mark.parametrize("has_penalty", [True, False])
def test_log_probs_that_are_nan_leave_a_sample_out(whose: str, has_penalty: bool) -> None:
    """Importance weights are made of them: one NaN would cost the whole update."""
    made = step()
    if not has_penalty:
        del made.columns["reference_logprobs"]
    logprobs = made.rollouts.engine_logprobs if whose else made.columns["old_logprobs"]
    logprobs.split(made.rollouts.sampled_lengths.tolist())[3][-1] = math.nan
    with pytest.raises(NonFiniteError, match=rf"in {whose}log-probs of samples \[3\]"):
        made.screened(STOP)
    screened = made.screened(SKIP)
    assert screened.rollouts.counts.tolist() == [True, True, True, False, True, True]
    assert screened.columns["old_logprobs"].isfinite().all() and screened.rollouts.engine_logprobs.isfinite().all()
    experience, metrics = screened.experience()
    assert experience.columns["importance_weights"].isfinite().all() and all(map(math.isfinite, metrics.values()))
    assert (metrics["init_policy_kl"] != 0) == has_penalty
