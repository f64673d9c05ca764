"""A penalty for responses that come near the length limit."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer_tokens: int, penalty: float) -> torch.Tensor:
    """What a response's length adds to its reward: DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13.

    0 up to ``max_length - buffer_tokens``, from there on a straight line down to ``-penalty`` at ``max_length``.

    Args:
        lengths: int64 [N], response tokens.
        max_length: the most tokens that a response may have.
        buffer_tokens: how many of them are penalised; 0: none.
        penalty: at the limit (1 in the paper).

    Returns:
        fp64 [N].
    """
    if buffer_tokens == 0:
        return torch.zeros(len(lengths), dtype=torch.float64)
    excess = (lengths.double() - (max_length - buffer_tokens)) / buffer_tokens
    return -penalty * excess.clamp(0, 1)
