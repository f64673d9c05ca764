"""The formulas of RLHF as pure tensor functions: no process groups, no configuration, no state.

Shapes: ``b`` sequences, ``s`` tokens, ``v`` vocabulary entries. What is per token has one of two shapes. Padded,
``[b, s-1]``: **position t belongs to the prediction of token t+1**, so the log-prob, value, KL and advantage of token
t+1 sit at index t; a mask is 1 (or True) where a position counts and 0 elsewhere, and the value at a masked position,
even inf or NaN, never reaches a result or a gradient. Flat, ``[R]``: the tokens of all responses, one response after
the other, whose lengths ``[n]`` say where each ends.

Losses are *sums*. The caller divides by the count over all micro batches and ranks, which makes the loss the same
whatever the micro batch or the data-parallel size. No function returns NaN for a batch in which everything is masked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.kinds import KLEstimator


def zero_where_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``x`` with exact zeros where ``mask`` is 0; unlike ``x * mask`` this also stops inf and NaN."""
    if x.shape != mask.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the tensor it masks {tuple(x.shape)}")
    return x.masked_fill(mask == 0, 0)


# ---- whitening --------------------------------------------------------------------------------


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    unbiased: bool,
    total: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over the mask, two passes; zeros where masked.

    The variance is summed around the mean in a second pass, because ``E[x^2] - E[x]^2`` loses all
    its digits in fp32 when the mean is large.

    Args:
        x, mask: of any shape.
        unbiased: divide the variance by n-1 (as TRL does) instead of n (as NeMo-Aligner does).
        total: sums a tensor of x's shape in fp64, over all ranks where x is a part.
    """
    # In fp64, so that the order of the rows does not change the result, to fp32 rounding.
    values = zero_where_masked(x, mask).double()
    count = total((mask != 0).double())
    mean = total(values) / count.clamp(min=1)
    variance = total(zero_where_masked(values - mean, mask).square()) / (count - int(unbiased)).clamp(min=1)
    return zero_where_masked((values - mean) * torch.rsqrt(variance + 1e-8), mask).to(x.dtype)


# ---- segments: flat tensors of one number per token, sequence after sequence ---------------------


def segment_sum(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum over each sequence's tokens, added in fp64; 0 where a sequence has none.

    Args:
        x: [R], the sequences' tokens one after the other.
        lengths: int64 [n], tokens of each sequence; their sum is R.

    Returns:
        [n] in x's dtype.
    """
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=x.device)
    return sums.index_add(0, _segments(lengths, x.device), x.double()).to(x.dtype)


def segment_mean(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mean over each sequence's tokens; see `segment_sum`."""
    return (segment_sum(x.double(), lengths) / moved(lengths, x.device).clamp(min=1)).to(x.dtype)


def spread(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each sequence's number, repeated over its tokens: [n] and lengths int64 [n] to [R]."""
    return x[_segments(lengths, x.device)]


def _segments(lengths: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sequence that each token belongs to, int64 [R] on ``device``."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), device)


# ---- KL penalty, rewards, advantages ----------------------------------------------------------


def kl_penalty(
    logprobs: torch.Tensor, init_logprobs: torch.Tensor, estimator: KLEstimator, clamp: float | None = None
) -> torch.Tensor:
    """Per-token estimate of KL(policy || initial policy) from tokens the policy sampled.

    With ``d = logprobs - init_logprobs`` (Schulman, "Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html): ``k1 = d`` (unbiased, can be negative), ``k2 = d^2 / 2``,
    ``k3 = exp(-d) - 1 + d`` (unbiased, never negative), and ``abs = |d|`` (NeMo-Aligner's
    ``use_absolute_kl``).

    Args:
        logprobs, init_logprobs: [b, s-1].
        clamp: limits ``d`` (so that the exponential cannot overflow) and the estimate to [-clamp, clamp].

    Returns:
        [b, s-1], not masked.
    """
    difference = logprobs - init_logprobs
    if clamp is not None:
        difference = difference.clamp(-clamp, clamp)
    if estimator == "k1":
        kl = difference
    elif estimator == "abs":
        kl = difference.abs()
    elif estimator == "k2":
        kl = 0.5 * difference.square()
    elif estimator == "k3":
        kl = torch.expm1(-difference) + difference
    else:
        raise ValueError(f"KL estimator {estimator!r} is not one of 'abs', 'k1', 'k2', 'k3'")
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def generalized_advantage_estimation(
    values: torch.Tensor, rewards: torch.Tensor, lengths: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE(gamma, lambda), arXiv:1506.02438 eq. 16, with V = 0 after the last token.

    ``delta_t = r_t + gamma * V_{t+1} - V_t``; ``A_t = delta_t + gamma * lam * A_{t+1}``;
    ``returns_t = A_t + V_t``.

    Args:
        values, rewards: [R], sequence after sequence.
        lengths: int64 [n], tokens of each sequence.

    Returns:
        (advantages, returns), each [R].
    """
    ends = lengths.cumsum(0)
    following = torch.nn.functional.pad(values[1:], (0, 1))
    following[ends[lengths > 0] - 1] = 0
    deltas = rewards + gamma * following - values
    advantages = torch.empty_like(deltas)
    # From all sequences' last tokens backwards, the longest sequences first: the others end one after the other.
    ends = ends[lengths.argsort(descending=True)]
    longer_than = len(lengths) - torch.bincount(lengths).cumsum(0)[:-1]
    running = torch.zeros(len(lengths), dtype=deltas.dtype)
    for back, count in enumerate(longer_than.tolist(), start=1):
        tokens = ends[:count] - back
        running = deltas[tokens] + gamma * lam * running[:count]
        advantages[tokens] = running
    return advantages, advantages + values


# ---- ratios of sequences, the critic's loss -----------------------------------------------------


def sequence_ratios(logprobs: torch.Tensor, old_logprobs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``exp(mean_t log(p / p_old))``, the geometric mean of each sequence's token ratios.

    That is the sequence's probability ratio to the power of one over its length, as in GSPO (arXiv:2507.18071):
    ratios of sequences of different lengths are comparable.

    Args:
        logprobs, old_logprobs: [R], sequence after sequence.
        lengths: int64 [n], tokens of each sequence.

    Returns:
        [n], 1 for a sequence without tokens.
    """
    return segment_mean(logprobs - old_logprobs, lengths).exp()


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> torch.Tensor:
    """``sum_t 0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``; clip 0 disables.

    The clipping is that of OpenAI's PPO code (see arXiv:2005.12729); all inputs [b, s-1], result scalar.
    """
    values, old_values, returns = (zero_where_masked(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    if clip > 0:
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near_old - returns).square())
    return 0.5 * error.sum()


# ---- reward model losses ----------------------------------------------------------------------


def bradley_terry_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``-log sigmoid(r_chosen - r_rejected)`` per pair (arXiv:2203.02155 eq. 1 for K = 2).

    Args:
        chosen, rejected: [b] or [b, 1] rewards.

    Returns:
        (per-pair loss, whether the chosen one scored higher), each of the input's shape; the second is bool.
    """
    margin = chosen - rejected
    return -torch.nn.functional.logsigmoid(margin), margin > 0


def regression_loss(
    prediction: torch.Tensor, target: torch.Tensor, ignore_value: float = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error summed over the attributes that have a label.

    Args:
        prediction, target: [b, a]; a label equal to ``ignore_value`` is missing and does not count.

    Returns:
        (scalar sum, scalar count of labels); the caller divides, after summing both over ranks.
    """
    labelled = target != ignore_value
    error = zero_where_masked(prediction - target.to(prediction), labelled)
    return error.square().sum(), labelled.sum().to(error.dtype)
