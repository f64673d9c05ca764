"""Estimators: from the rewards of a step to an advantage for each token. Pure functions, without collectives.

An estimator is a function of `StepRewards` that is marked with `estimator`. Every rank calls it with the rewards of all
samples and the tokens of its own. The loop asks the mark what the function needs, and knows no estimator by name. One
in a file of the user's is as good as those here: see docs/extending.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.user_code import load_function, require_arguments
from nemo_style_aligner.trainer.models import functional

Estimate = tuple[torch.Tensor, torch.Tensor | None]
"""Advantages, fp32 [R], and returns, fp32 [R], which train the critic; None where there is none."""

_GRPO_EPSILON = 1e-4  # TRL's


class EstimatorError(UserError, ValueError):
    """There is no such estimator, or it returned what cannot be used; the message says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSamples:
    """N samples in groups. Samples that do not count enter no statistic, even as NaN.

    The methods take one number per sample, fp64 [N], and return one per sample: that of its group. Where all of a
    group's numbers are equal, mean and deviation are exact.

    Attributes:
        groups: int64 [N]; samples of one prompt have the same number, and may stand anywhere.
        counts: bool [N]; False where a sample's reward is missing.
    """

    groups: torch.Tensor
    counts: torch.Tensor

    def group_size(self, where: torch.Tensor | None = None) -> torch.Tensor:
        """How many samples count, fp64 [N]; ``where``, bool [N], narrows them down."""
        return self._sum(self._counting(where).double())

    def group_mean(self, x: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the group's counting samples; 0 where none counts."""
        shifted, least = self._shifted(x, where)
        return least + self._sum(shifted) / self.group_size(where).clamp(min=1)

    def group_std(self, x: torch.Tensor) -> torch.Tensor:
        """The sample standard deviation (divisor: one less than their number); 0 where fewer than two count."""
        deviations = (x - self.group_mean(x)).masked_fill(~self.counts, 0)
        return (self._sum(deviations.square()) / (self.group_size() - 1).clamp(min=1)).sqrt()

    def others_mean(self, x: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the group's other samples ("leave one out"); the sample's own number where no other counts.

        Args:
            where: bool [N], narrows down the samples that others are compared with.
        """
        shifted, least = self._shifted(x, where)
        others = self.group_size(where) - self._counting(where).double()
        mean = least + (self._sum(shifted) - shifted) / others.clamp(min=1)
        return torch.where(others > 0, mean, x)

    def best(self, x: torch.Tensor, count: int) -> list[int]:
        """The ``count`` samples of each group with the largest numbers, in their order; earlier ones where equal.

        Samples that do not count come after all others.
        """
        ranked = x.masked_fill(~self.counts, -torch.inf).sort(descending=True, stable=True).indices
        index = self._index[ranked]
        by_group = index.sort(stable=True)
        place = torch.arange(len(x)) - torch.searchsorted(by_group.values, by_group.values)
        chosen: list[int] = ranked[by_group.indices[place < count]].sort().values.tolist()
        return chosen

    def is_uniform(self, x: torch.Tensor) -> torch.Tensor:
        """Whether all counting samples of the group have the same number, as a single one has: bool [N].

        From such rewards a group estimator learns nothing (DAPO's dynamic sampling, arXiv:2503.14476 section 3.2).
        """
        shifted, _ = self._shifted(x, None)
        return self._sum(shifted) == 0

    def _counting(self, where: torch.Tensor | None) -> torch.Tensor:
        return self.counts if where is None else self.counts & where

    def _shifted(self, x: torch.Tensor, where: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` over its group's least number, at least 0, and 0 where a sample does not count; that number."""
        counting = self._counting(where)
        index = self._index
        least = torch.full_like(x, torch.inf).scatter_reduce(0, index, x.masked_fill(~counting, torch.inf), "amin")
        least = torch.where(least.isfinite(), least, 0.0)[index]
        return (x - least).masked_fill(~counting, 0), least

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, self._index, x)[self._index]

    @property
    def _index(self) -> torch.Tensor:
        """``groups`` numbered from 0, int64 [N]."""
        return self.groups.unique(return_inverse=True)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRewards(GroupedSamples):
    """What an estimator sees of a step: N samples, of which n, with R sampled tokens, are this rank's own.

    Everything is on the CPU. A flat tensor [R] has one number per sampled token, sample after sample: what an
    environment has inserted between two replies has none.

    Attributes:
        rewards: fp64 [N], in the step's order; NaN is possible where a sample does not count.
        ended: bool [N]; False where a response was cut off at the length limit.
        kl: fp64 [N], each sample's KL penalty, times its coefficient and summed over its tokens; 0 where the rewards
            carry no penalty.
        all_lengths: int64 [N], sampled tokens.
        own: int64 [n], which of the N samples are this rank's.
        token_kl: fp32 [R], the penalty of this rank's tokens, times its coefficient.
        values: fp32 [R], the critic's; None where there is none.
        gamma: discount [discount_factor].
        lam: lambda of GAE [gae_lambda].
    """

    rewards: torch.Tensor
    ended: torch.Tensor
    kl: torch.Tensor
    all_lengths: torch.Tensor
    own: torch.Tensor
    token_kl: torch.Tensor
    values: torch.Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0

    @classmethod
    def of(cls, rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor, **known: Any) -> StepRewards:
        """A step of which this rank has all samples, for use as a library: whatever is finite counts, all have ended.

        Args:
            rewards: fp64 [N].
            groups: int64 [N].
            lengths: int64 [N], sampled tokens.
            known: more attributes, in place of these, and of a KL penalty of 0.
        """
        attributes: dict[str, Any] = {
            "counts": rewards.isfinite(),
            "ended": torch.ones(len(rewards), dtype=torch.bool),
            "kl": torch.zeros(len(rewards), dtype=torch.float64),
            "own": torch.arange(len(rewards)),
            "token_kl": torch.zeros(int(lengths.sum())),
        }
        return cls(rewards=rewards, groups=groups, all_lengths=lengths, **(attributes | known))

    @property
    def lengths(self) -> torch.Tensor:
        """Sampled tokens of this rank's samples, int64 [n]."""
        return self.all_lengths[self.own]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``x`` [N], each number repeated over its sample's tokens: fp32 [R].

        0 where a sample does not count.
        """
        own = x.masked_fill(~self.counts, 0)[self.own]
        return functional.spread(own.to(self.token_kl.dtype), self.lengths)

    def token_rewards(self) -> torch.Tensor:
        """The KL penalty, negative, at every token, and the sample's reward at its last one: fp32 [R].

        0 where a sample does not count.
        """
        lasts = self.lengths.cumsum(0) - 1
        rewards = (-self.token_kl).index_add(0, lasts, self.rewards[self.own].to(self.token_kl.dtype))
        return functional.zero_where_masked(rewards, self.spread(self.counts))


# ---- marking a function -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A function from `StepRewards` to `Estimate`, and what the loop must know of it; see `estimator`."""

    function: Callable[[StepRewards], Estimate]
    needs_values: bool = False
    needs_groups: bool = True
    whitens: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, step: StepRewards) -> Estimate:
        """Advantages and returns of this rank's tokens, fp32 [R]; returns exactly where values are needed.

        Raises:
            EstimatorError: the function returned something else.
        """
        estimate = self.function(step)
        if not isinstance(estimate, tuple) or len(estimate) != 2:
            raise self._error(f"{estimate!r:.80}, and not (advantages, returns); returns may be None")
        advantages, returns = estimate
        self._check("advantages", advantages, step)
        if self.needs_values:
            self._check("returns", returns, step)
        elif returns is not None:
            raise self._error("returns, but there is no critic to learn them: mark it @estimator(needs_values=True)")
        return advantages.to(step.token_kl.dtype), None if returns is None else returns.to(step.token_kl.dtype)

    def _check(self, what: str, x: torch.Tensor | None, step: StepRewards) -> None:
        if not isinstance(x, torch.Tensor):
            raise self._error(f"{x!r:.80} as {what}, and not a tensor")
        if x.shape != step.token_kl.shape:
            raise self._error(
                f"{what} of shape {list(x.shape)}, and not a number for each of this rank's {len(step.token_kl)} "
                "sampled tokens: step.spread makes one of a number for each sample"
            )
        if not x.isfinite().all():
            rows = functional.segment_sum((~x.isfinite()).double(), step.lengths).nonzero()[:, 0]
            raise self._error(
                f"{what} that are NaN or infinite for samples {step.own[rows].tolist()[:10]} of the step. "
                "step.group_mean and the like leave out samples without a reward (step.counts), sums do not"
            )

    def _error(self, what: str) -> EstimatorError:
        return EstimatorError(f"the estimator {self.name} returned {what}")


def estimator(
    *, needs_values: bool = False, needs_groups: bool = True, whitens: bool = False
) -> Callable[[Callable[[StepRewards], Estimate]], Estimator]:
    """Mark a function as an estimator. One without a mark is taken as marked with the defaults.

    Args:
        needs_values: it uses ``step.values`` and gives returns, so there must be a critic.
        needs_groups: it compares samples of one prompt, so there must be several [num_rollouts_per_prompt].
        whitens: its advantages are meant to be whitened over all tokens of the step: the loop does that unless
            `normalize_advantages` says otherwise.
    """
    return functools.partial(Estimator, needs_values=needs_values, needs_groups=needs_groups, whitens=whitens)


def find_estimator(named: str, key: str = "trainer.ppo.estimator") -> Estimator:
    """The estimator of this name, or a user's function, ``FILE.py:NAME``; ``key`` is the config's, for messages.

    Raises:
        EstimatorError: there is none of this name.
        UserCodeError: the file or its function cannot be loaded.
    """
    if named in ESTIMATORS:
        return ESTIMATORS[named]
    if ":" not in named:
        raise EstimatorError(
            f"{key}={named}: there is no such estimator: choose one of {', '.join(ESTIMATORS)}, or give a file and a "
            "function of yours, FILE.py:NAME"
        )
    function = load_function(named, key, ["step"])
    found = function if isinstance(function, Estimator) else Estimator(function)
    require_arguments(found.function, ["step"], f"{key}={named}")
    return found


# ---- the estimators -----------------------------------------------------------------------------


@estimator(needs_values=True, needs_groups=False, whitens=True)
def gae(step: StepRewards) -> Estimate:
    """Generalized advantage estimation, arXiv:1506.02438, from a critic's values: PPO's estimator."""
    assert step.values is not None
    counts = step.spread(step.counts)
    values = functional.zero_where_masked(step.values, counts)
    return functional.generalized_advantage_estimation(values, step.token_rewards(), step.lengths, step.gamma, step.lam)


@estimator()
def grpo(step: StepRewards) -> Estimate:
    """Group relative policy optimization, arXiv:2402.03300: how far a reward is from its group's mean, in deviations.

    As TRL computes it (``scale_rewards="group"``): the sample deviation, plus 1e-4. The paper does not say which
    deviation, and adds nothing.
    """
    rewards = step.rewards - step.kl
    return step.spread((rewards - step.group_mean(rewards)) / (step.group_std(rewards) + _GRPO_EPSILON)), None


@estimator()
def dr_grpo(step: StepRewards) -> Estimate:
    """GRPO without the division by the deviation, which favours prompts that are too easy or too hard.

    arXiv:2503.20783. Its other half is a loss that does not divide by the response's length: loss_aggregation=
    sequence_sum.
    """
    rewards = step.rewards - step.kl
    return step.spread(rewards - step.group_mean(rewards)), None


@estimator()
def rloo(step: StepRewards) -> Estimate:
    """REINFORCE leave-one-out, arXiv:2402.14740, as in NeMo-Aligner: the baseline is the mean of the group's others.

    The KL penalty of a sample is its tokens' *mean* (elsewhere mostly their sum). Others that were cut off are no part
    of a baseline. Where at most one sample has ended, the advantages are 0. NeMo-Aligner differs for samples that were
    themselves cut off: it divides the sum over all that ended by one less than their number.
    """
    rewards = step.rewards - step.kl / step.all_lengths
    has_others = step.group_size(where=step.ended) > 1
    advantages = rewards - step.others_mean(rewards, where=step.ended)
    return step.spread(advantages.masked_fill(~has_others, 0)), None


@estimator(needs_groups=False, whitens=True)
def reinforce_plus_plus(step: StepRewards) -> Estimate:
    """REINFORCE++, arXiv:2501.03262: the discounted rewards to come, KL penalty of each token included, whitened."""
    rewards = step.token_rewards()
    rewards_to_go, _ = functional.generalized_advantage_estimation(
        torch.zeros_like(rewards), rewards, step.lengths, step.gamma, lam=1.0
    )
    return rewards_to_go, None


@estimator()
def best_of_n(step: StepRewards) -> Estimate:
    """1, less each token's KL penalty: what was chosen among a prompt's responses is imitated (RAFT, arXiv:2304.06767).

    The loop chooses [top_n_rollouts]. Without a penalty and with the loss of reinforce this is supervised fine-tuning
    on the best responses.
    """
    counts = step.spread(step.counts)
    return functional.zero_where_masked(counts - step.token_kl, counts), None


@estimator(needs_groups=False)
def on_policy_distillation(step: StepRewards) -> Estimate:
    """The KL penalty of each token, negative, and nothing of the rewards: what is learnt is the teacher's to say.

    The loop adds the teacher's part to any estimator's advantages (`experience.toward_teacher`).
    """
    return functional.zero_where_masked(-step.token_kl, step.spread(step.counts)), None


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {each.name: each for each in (gae, grpo, dr_grpo, rloo, reinforce_plus_plus, best_of_n, on_policy_distillation)}
)
"""By the names that ``trainer.ppo.estimator`` takes."""
