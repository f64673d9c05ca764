"""Samples of several replies: what the policy has sampled is learnt, what was inserted between is context."""

from __future__ import annotations

import pytest
import torch

from nemo_style_aligner.models.ragged import RaggedBatch
from nemo_style_aligner.rl.estimators import StepRewards, gae

# ---- the mask -----------------------------------------------------------------------------------


def two_replies() -> RaggedBatch:
    """A prompt of 2 tokens, replies of 2 and 1 with 3 inserted tokens between them, 1 behind; and a single reply."""
    return RaggedBatch(
        tokens=torch.arange(1, 13, dtype=torch.int32),
        lengths=torch.tensor([9, 3]),
        sampled=torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0] + [0, 1, 1]).bool(),
        columns={"x": torch.arange(5.0)},
        wanted=torch.ones(2, dtype=torch.bool),
    )


def test_a_column_has_a_number_for_each_sampled_token() -> None:
    batch = two_replies()
    assert batch.sampled_lengths.tolist() == [3, 2]
    wanted = [row.int().tolist() for row in batch.sequences().wanted]
    assert wanted == [[0, 1, 1, 0, 0, 0, 1], [1, 1]]  # predictions; nothing is computed behind the last sampled token
    turned = batch.rows(torch.tensor([1, 0]))
    assert turned.columns["x"].tolist() == [3.0, 4.0, 0.0, 1.0, 2.0]
    assert turned.sampled.int().tolist() == [0, 1, 1] + [0, 0, 1, 1, 0, 0, 0, 1, 0]


def test_advantages_pass_over_what_was_inserted() -> None:
    """By hand: of values 1, 2, 4 at the sampled tokens, whatever lies between; reward 10, gamma 0.5, lambda 0.5."""
    step = StepRewards.of(
        torch.tensor([10.0], dtype=torch.float64), torch.tensor([0]), two_replies().sampled_lengths[:1],
        values=torch.tensor([1.0, 2.0, 4.0]), gamma=0.5, lam=0.5,
    )  # fmt: skip
    deltas = [0.5 * 2 - 1, 0.5 * 4 - 2, 10 - 4]
    by_hand = [deltas[0] + 0.25 * (deltas[1] + 0.25 * deltas[2]), deltas[1] + 0.25 * deltas[2], deltas[2]]
    advantages, returns = gae(step)
    assert advantages.tolist() == pytest.approx(by_hand)
    assert returns is not None and returns.tolist() == pytest.approx(
        [a + v for a, v in zip(by_hand, (1, 2, 4), strict=True)]
    )
