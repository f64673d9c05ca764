"""NaN and Inf in what comes back from the critic job, and what the jobs do about them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from nemo_style_aligner.errors import NonFiniteError, UserError
from nemo_style_aligner.models.nonfinite import STOP, NonFinitePolicy
from nemo_style_aligner.rl.experience import (
    AdvantageSettings,
    leave_out_nonfinite,
    make_experience,
    why_nothing_is_learnt,
)
from nemo_style_aligner.rl.rollouts.batch import RolloutBatch
from nemo_style_aligner.servers.client import Scores

N, S = 6, 9
SKIP = NonFinitePolicy("skip", 10)
SETTINGS = AdvantageSettings(
    kl_coef=0.1,
    kl_estimator="k1",
    kl_clamp=None,
    gamma=0.9,
    lam=0.8,
    normalize=True,
    unbiased=False,
    mask_truncated=True,
    importance_weight_cap=2.0,
    importance_sequence_bounds=None,
)


@dataclasses.dataclass
class Step:
    """Everything a step gathers before its formulas."""

    rollouts: RolloutBatch
    scores: Scores
    logprobs: torch.Tensor
    init_logprobs: torch.Tensor

    def only(self, keep: torch.Tensor) -> Step:
        """The same of some samples."""
        fields = {f.name: getattr(self.rollouts, f.name)[keep] for f in dataclasses.fields(self.rollouts)}
        return Step(
            RolloutBatch(**fields),
            Scores(self.scores.rewards[keep], self.scores.values[keep]),
            self.logprobs[keep],
            self.init_logprobs[keep],
        )

    def screened(self, policy: NonFinitePolicy) -> Step:
        return Step(*leave_out_nonfinite(self.rollouts, self.scores, self.logprobs, self.init_logprobs, policy))

    def experience(self) -> tuple[Any, dict[str, float]]:
        return make_experience(self.rollouts, self.scores, self.logprobs, self.init_logprobs, SETTINGS, version=0)


def step() -> Step:
    generator = torch.Generator().manual_seed(3)
    prompt_lengths = torch.tensor([2, 3, 1, 2, 2, 4])
    lengths = torch.tensor([9, 7, 5, 6, 9, 8])
    is_end = torch.tensor([True, True, False, True, True, True])
    rollouts = RolloutBatch(
        sample_ids=torch.arange(N),
        prompt_ids=torch.arange(N) + 40,
        tokens=torch.randint(0, 9, (N, S), generator=generator),
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        is_end=is_end,
        engine_logprobs=-torch.rand(N, S - 1, generator=generator),
        weight_versions=torch.zeros(N, dtype=torch.int64),
        is_valid=torch.ones(N, dtype=torch.bool),
    )
    scores = Scores(torch.randn(N, generator=generator), torch.randn(N, S - 1, generator=generator))
    return Step(
        rollouts, scores, -torch.rand(N, S - 1, generator=generator), -torch.rand(N, S - 1, generator=generator)
    )


def spoil(what: Step) -> None:
    what.scores.rewards[1] = math.nan
    what.scores.values[3, 4] = math.inf
    what.init_logprobs[4, 5] = -math.inf


def test_samples_with_nan_change_nothing_for_the_others() -> None:
    whole = step()
    spoil(whole)
    experience, metrics = whole.screened(SKIP).experience()
    good = torch.tensor([0, 2, 5])
    expected, expected_metrics = step().only(good).experience()
    for name in ("mask", "policy_mask", "advantages", "returns", "values", "importance_weights"):
        torch.testing.assert_close(getattr(experience, name)[good], getattr(expected, name))
    bad = torch.tensor([1, 3, 4])
    assert not experience.mask[bad].any() and not experience.policy_mask[bad].any()
    for field in dataclasses.fields(experience):  # the service refuses a training batch with NaN anywhere
        assert getattr(experience, field.name).isfinite().all(), field.name
    assert metrics["nonfinite_samples"] == 3
    statistics = {
        name for name in metrics if name.startswith(("rewards", "advantages", "returns", "values", "init", "imp"))
    }
    assert len(statistics) > 8
    for name in statistics:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name


def test_nan_where_nobody_looks_is_nobodys_business() -> None:
    padded = step()
    padded.logprobs[1, 7] = math.nan  # after the end of sample 1
    assert padded.screened(STOP).rollouts.is_valid.all()
    assert padded.experience()[1]["nonfinite_samples"] == 0


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


def test_a_step_of_nothing_but_nan_ends_the_job_in_any_case() -> None:
    nothing = step()
    nothing.scores.rewards[:] = math.nan
    with pytest.raises(NonFiniteError, match=r"samples \[0, 1, 2, 3, 4, 5\]"):
        nothing.screened(SKIP)


def test_there_are_two_things_to_do() -> None:
    with pytest.raises(ValueError, match="on_nonfinite='ignore': choose stop or skip"):
        NonFinitePolicy.from_config({"on_nonfinite": "ignore", "max_consecutive_skips": 3})


@pytest.mark.parametrize("num_ended, is_masked", [(0, True), (1, True), (0, False)])
def test_responses_that_never_end_are_reported(num_ended: int, is_masked: bool) -> None:
    """They are no part of the policy's loss, and nothing else would show that it learns nothing."""
    made, settings = step(), dataclasses.replace(SETTINGS, mask_truncated=is_masked)
    made.rollouts.is_end[:] = torch.arange(N) < num_ended
    experience, _ = make_experience(made.rollouts, made.scores, made.logprobs, made.init_logprobs, settings, version=0)
    reason = why_nothing_is_learnt(made.rollouts, experience, settings)
    assert bool(experience.policy_mask.any()) == (reason is None) == (num_ended > 0 or not is_masked)
    assert reason is None or "none of 6 responses has ended by itself" in reason


def test_what_leaves_every_response_out_is_named() -> None:
    """Each of the three ways leaves out a part."""
    made, settings = step(), dataclasses.replace(SETTINGS, importance_sequence_bounds=(0.99, 1.01))
    made.rollouts.is_end[:] = torch.arange(N) >= 2
    made.scores.rewards[2] = math.nan
    made.rollouts.engine_logprobs[:] = made.logprobs - 1.0
    made = made.screened(SKIP)
    experience, _ = make_experience(made.rollouts, made.scores, made.logprobs, made.init_logprobs, settings, version=0)
    reason = why_nothing_is_learnt(made.rollouts, experience, settings)
    assert reason is not None and "2 without an end" in reason and "1 with NaN or Inf" in reason
    assert "the others outside importance_sequence_bounds" in reason
    # Truncated responses count only where they are masked, bounds only where there are any.
    made.rollouts.is_end[:], experience.policy_mask[:] = False, 0
    settings = dataclasses.replace(SETTINGS, mask_truncated=False)
    reason = why_nothing_is_learnt(made.rollouts, experience, settings)
    assert reason is not None and reason.endswith(": 1 with NaN or Inf (on_nonfinite=skip)")


@pytest.mark.parametrize("whose", ["", "the engine's "])
@pytest.mark.parametrize("has_penalty", [True, False])
def test_log_probs_that_are_nan_leave_a_sample_out(whose: str, has_penalty: bool) -> None:
    """Importance weights are made of them: one NaN would cost the whole update."""
    made = step()
    made.init_logprobs = made.init_logprobs if has_penalty else None  # type: ignore[assignment]
    logprobs = made.rollouts.engine_logprobs if whose else made.logprobs
    logprobs[3, int(made.rollouts.lengths[3]) - 2] = math.nan
    with pytest.raises(NonFiniteError, match=rf"in {whose}log-probs of samples \[3\]"):
        made.screened(STOP)
    screened = made.screened(SKIP)
    assert screened.rollouts.is_valid.tolist() == [True, True, True, False, True, True]
    assert screened.logprobs.isfinite().all() and screened.rollouts.engine_logprobs.isfinite().all()
    experience, metrics = screened.experience()
    assert experience.importance_weights.isfinite().all() and all(map(math.isfinite, metrics.values()))
    assert (metrics["init_policy_kl"] != 0) == has_penalty
