"""What a policy's update minimises: losses per token, how they are weighed, the KL penalty and the entropy bonus.

Everything per token is flat, fp32 [k]: the tokens of b responses, one response after the other. Nothing here reduces
over micro batches or ranks: losses are sums, which the caller divides by the count of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.user_code import load_function
from nemo_style_aligner.kinds import KLEstimator
from nemo_style_aligner.trainer.models.functional import kl_penalty, segment_mean, sequence_ratios, spread

_TAKEN = {
    *("loss", "num_items", "num_tokens", "approximate_kl", "kl_loss", "scaled_entropy", "padding_efficiency"),
    *("sampling_kl_loss", "beyond_sampling"),
    *("dp_balance", "grad_norm", "lr", "skipped_updates", "optim_step"),
}
"""Names of what is logged with any policy loss."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
TrustRegion = Literal["step", "sampling", "both"]


class PolicyLossError(UserError, ValueError):
    """A policy loss returned something that is no loss. The message says which, what, and what was expected."""


@dataclasses.dataclass(frozen=True)
class LossInput:
    """What a policy loss gets. A rank without rows of a batch gets no tokens: k and b are 0.

    Attributes:
        logprobs: fp32 [k], of the policy in training, the only ones with a gradient.
        old_logprobs: fp32 [k], those that ratios start from.
        advantages: fp32 [k].
        lengths: int64 [b], tokens of each sequence, on the CPU.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        """The logarithm of each token's probability ratio, new policy to old; [k]."""
        return self.logprobs - self.old_logprobs

    def sequence_mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over each sequence's tokens: [k] to [b]."""
        return segment_mean(x, self.lengths)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Each sequence's number, repeated over its tokens: [b] to [k]."""
        return spread(x, self.lengths)


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What is minimised (config keys in brackets, of ``trainer.ppo`` unless they say another section).

    Attributes:
        policy_loss: a name in `LOSSES`, or a function like those [policy_loss].
        clip_low, clip_high: ratios of ppo and gspo are clipped to [1 - clip_low, 1 + clip_high] [model.ppo.ratio_eps,
            ratio_eps_high].
        dual_clip: ppo's bound on the loss where an advantage is negative, in multiples of the advantage, above 1; None:
            no bound [dual_clip].
        ratio_cap: cispo's upper bound of ratios.
        aggregation: ``token_mean``: the mean over all tokens. ``sequence_mean``: the mean over sequences of the means
            over their tokens. ``sequence_sum``: that of their sums divided by ``constant_length`` [loss_aggregation].
        constant_length: what divides the sums of ``sequence_sum``; the same for all sequences (arXiv:2503.20783).
        kl_coef: weight of the KL penalty in the loss; 0: none [initial_policy_kl_penalty, with kl_in=loss].
        kl_estimator, kl_clamp: see `functional.kl_penalty` [kl_estimator, kl_clamp].
        entropy_bonus: weight of the entropy, which the loss is lowered by [model.ppo.entropy_bonus].
        trust_region: the weights that the clip range is around: those that the step starts from, those that sampled
            each token, or both [trust_region].
        sampling_kl: weight of a penalty, KL(what sampled || policy); 0: none [sampling_kl].

    Raises:
        ValueError: a name is not known, or a number out of range.
    """

    policy_loss: str | PolicyLoss = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_cap: float = 5.0
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = None
    entropy_bonus: float = 0.0
    trust_region: TrustRegion = "step"
    sampling_kl: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.policy_loss, str) and self.policy_loss not in LOSSES:
            raise ValueError(
                f"policy_loss={self.policy_loss!r}: choose {', '.join(LOSSES)}, or name a FILE.py:FUNCTION"
            )
        if self.aggregation == "sequence_sum" and not (self.constant_length or 0) > 0:
            raise ValueError("loss_aggregation=sequence_sum divides by a length, which must be positive")

    @property
    def needs_sampling(self) -> bool:
        """Whether the loss depends on the log-probs of the weights that sampled."""
        return self.trust_region != "step" or self.sampling_kl != 0

    @property
    def function(self) -> PolicyLoss:
        """The policy loss."""
        return LOSSES[self.policy_loss] if isinstance(self.policy_loss, str) else self.policy_loss


Statistics = dict[str, torch.Tensor]
"""Per token [k], without gradient; the package's: ``ppo_ratio``, ``ppo_ratio_clamped``, ``clip_fraction``."""

PolicyLoss = Callable[[LossInput, LossSettings], tuple[torch.Tensor, Statistics]]
"""(input, settings) -> the loss of each token [k], and what to report the means of."""


def ppo(given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, Statistics]:
    """PPO's clipped surrogate, arXiv:1707.06347 eq. 7; with ``dual_clip`` c also arXiv:1912.09729 eq. 5.

    ``max(-A rho, -A clip(rho, 1 - low, 1 + high))``, ``rho = exp(new - old)``; where A < 0, at most ``-A c``. Ranges
    that differ upwards and downwards are DAPO's (arXiv:2503.14476).
    """
    return _clipped(given.log_ratio.exp(), given.advantages, settings, settings.dual_clip)


def gspo(given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, Statistics]:
    """PPO's surrogate of the sequences' length-normalised ratios, arXiv:2507.18071 eq. 5 to 7.

    Each token of a sequence has the same ratio, the geometric mean of the tokens' own.
    """
    ratios = sequence_ratios(given.logprobs, given.old_logprobs, given.lengths)
    return _clipped(given.spread(ratios), given.advantages, settings, None)


def cispo(given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, Statistics]:
    """REINFORCE weighted by ratios without gradient, which are capped, arXiv:2506.13585 eq. 4 and 5.

    ``-min(rho, ratio_cap) A log p``: no token loses its gradient. Like the paper's runs, without a lower bound.
    """
    ratio = given.log_ratio.detach().exp()
    capped = ratio.clamp(max=settings.ratio_cap)
    statistics = _statistics(ratio, capped, ratio > settings.ratio_cap)
    return -capped * given.advantages * given.logprobs, statistics


def reinforce(given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, Statistics]:
    """``-A log p``: REINFORCE, for updates with the weights that the log-probs of the responses are from."""
    ratio = given.log_ratio.detach().exp()
    return -given.advantages * given.logprobs, _statistics(ratio, ratio, torch.zeros_like(ratio))


LOSSES: dict[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}


def find_policy_loss(named: str, key: str = "trainer.ppo.policy_loss") -> PolicyLoss | str:
    """A name in `LOSSES`, or a user's function, ``FILE.py:NAME``; ``key`` is the config's, for messages.

    Raises:
        PolicyLossError: there is none of this name.
        UserCodeError: the file or its function cannot be loaded.
    """
    if named in LOSSES:
        return named
    if ":" not in named:
        raise PolicyLossError(
            f"{key}={named}: choose {', '.join(LOSSES)}, or give a file and a function of yours, FILE.py:NAME"
        )
    return load_function(named, key, ["given", "settings"])


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings, dual_clip: float | None
) -> tuple[torch.Tensor, Statistics]:
    clipped_ratio = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    unclipped_loss, clipped_loss = -advantages * ratio, -advantages * clipped_ratio
    loss = torch.maximum(unclipped_loss, clipped_loss)
    is_clipped = clipped_loss > unclipped_loss
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
        is_clipped = is_clipped | is_bounded
    return loss, _statistics(ratio, clipped_ratio, is_clipped)


def _statistics(ratio: torch.Tensor, clipped_ratio: torch.Tensor, is_clipped: torch.Tensor) -> Statistics:
    return {
        "ppo_ratio": ratio.detach(),
        "ppo_ratio_clamped": clipped_ratio.detach(),
        "clip_fraction": is_clipped.to(ratio.dtype),
    }


def policy_objective(
    given: LossInput,
    settings: LossSettings,
    *,
    importance_weights: torch.Tensor | None = None,
    sampling_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    responses: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of some responses, summed: policy loss, KL penalty and entropy bonus.

    Args:
        given: at least one token for each sequence.
        importance_weights: fp32 [k], of the tokens' policy loss; None: all 1.
        sampling_logprobs: fp32 [k], of the weights that sampled each token; where the settings `needs_sampling`.
        reference_logprobs: fp32 [k], where ``settings.kl_coef`` is not 0.
        entropy: fp32 [k], where ``settings.entropy_bonus`` is not 0.
        responses: where some responses are several sequences: fp32 [k] each, how many tokens the response of each
            token has, and 1 at its last one, else 0; None: each is one sequence.

    Returns:
        The weighted sum of the tokens' losses; what it is to be divided by, summed over all micro batches and ranks
        (tokens, or sequences); and sums over tokens: ``num_tokens``, ``approximate_kl`` (the k3 estimate of KL(old
        policy || new policy)), ``scaled_entropy`` (0 without a bonus), ``kl_loss`` and ``sampling_kl_loss`` (KL
        penalties before their coefficients, where there are any), ``beyond_sampling`` (tokens without gradient, as they
        are out of the trust region of the weights that sampled, where ``both`` count), and the policy loss's
        statistics.

    Raises:
        PolicyLossError: the policy loss, one of the user's, returned something else than a loss for each token.
    """
    if settings.trust_region == "sampling":
        assert sampling_logprobs is not None
        given = dataclasses.replace(given, old_logprobs=sampling_logprobs)
    losses, statistics = _checked(settings.function(given, settings), given, settings)
    if importance_weights is not None:
        losses = losses * importance_weights
    if settings.trust_region == "both":
        assert sampling_logprobs is not None
        beyond = _is_beyond(given, sampling_logprobs, settings)
        losses = losses.masked_fill(beyond, 0.0)
        statistics = statistics | {"beyond_sampling": beyond.to(losses.dtype)}
    log_ratio = given.log_ratio.detach()
    statistics = statistics | {"approximate_kl": torch.expm1(log_ratio) - log_ratio}
    if settings.kl_coef:
        assert reference_logprobs is not None
        kl = kl_penalty(given.logprobs, reference_logprobs, settings.kl_estimator, settings.kl_clamp)
        losses = losses + settings.kl_coef * kl
        statistics["kl_loss"] = kl.detach()
    if settings.sampling_kl:
        assert sampling_logprobs is not None
        # That of what sampled to the policy, as its tokens are those at hand: no token's gradient exceeds |ratio - 1|.
        kl = kl_penalty(sampling_logprobs, given.logprobs, "k3")
        losses = losses + settings.sampling_kl * kl
        statistics["sampling_kl_loss"] = kl.detach()
    statistics["scaled_entropy"] = torch.zeros_like(log_ratio)
    if settings.entropy_bonus:
        assert entropy is not None
        bonus = settings.entropy_bonus * entropy
        losses = losses - bonus
        statistics["scaled_entropy"] = bonus.detach()
    num_tokens, num_sequences = torch.ones_like(log_ratio).sum(), log_ratio.new_full((), len(given.lengths))
    sums = {name: values.sum() for name, values in statistics.items()} | {"num_tokens": num_tokens}
    if settings.aggregation == "token_mean":
        return losses.sum(), num_tokens, sums
    of_sequences = _weights(given.lengths, settings)
    if responses is not None:  # means are over these
        lengths, ends = responses
        num_sequences = ends.sum()
        if settings.aggregation == "sequence_mean":
            of_sequences = 1.0 / lengths.double()
    weights = moved(of_sequences.to(losses.dtype), losses.device)
    return (losses * weights).sum(), num_sequences, sums


def _is_beyond(given: LossInput, sampling_logprobs: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Which tokens have left the clip range around the weights that sampled them, in the way their advantage pulls."""
    ratio = (given.logprobs.detach() - sampling_logprobs).exp()
    high, low = ratio > 1.0 + settings.clip_high, ratio < 1.0 - settings.clip_low
    return torch.where(given.advantages > 0, high, low)


def _checked(returned: Any, given: LossInput, settings: LossSettings) -> tuple[torch.Tensor, Statistics]:
    """What a policy loss returned, if it is a loss for each token: another shape would be summed to something else."""
    name = getattr(settings.function, "__name__", repr(settings.function))
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise PolicyLossError(
            f"the policy loss {name} returned a {type(returned).__name__}, and not (losses, statistics)"
        )
    losses, statistics = returned
    if taken := statistics.keys() & _TAKEN:
        raise PolicyLossError(f"the policy loss {name} reports {', '.join(sorted(taken))}: choose other names")
    for what, x in {"losses": losses, **statistics}.items():
        if not isinstance(x, torch.Tensor) or x.shape != given.logprobs.shape:
            shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise PolicyLossError(
                f"the policy loss {name} returned {what} of shape {shape}, and not a number for each of the micro "
                f"batch's {len(given.logprobs)} response tokens: the trainer sums and divides them"
            )
    return losses, {what: x.detach() for what, x in statistics.items()}


def _weights(lengths: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """What each token's loss is multiplied with where the mean is over sequences: fp64 [k] on the CPU."""
    divisors = lengths.double()
    if settings.aggregation == "sequence_sum":
        divisors = torch.full_like(divisors, settings.constant_length or 1)
    return spread(1.0 / divisors, lengths)
