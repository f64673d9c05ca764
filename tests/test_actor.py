"""The policy: frozen weights, log-probs, the entropy bonus."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trained_models import ARCHITECTURES, OPTIM, logprobs, make_actor, policy_batch, score, tokens

from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import build_model
from nemo_style_aligner.models.pipeline import Scoring
from nemo_style_aligner.models.policy_losses import LossSettings

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


@pytest.mark.parametrize("placement", ["auto", "swap", "resident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_come_and_go_without_a_trace(placement: Any, dtype: torch.dtype) -> None:
    model = build_model(ARCHITECTURES["tied"], {"optim": OPTIM}, dtype)
    ids = tokens()
    first = logprobs(model, ids)
    frozen = FrozenWeights(model, placement, lambda: build_model(ARCHITECTURES["tied"], {}, dtype, trainable=False))
    actor = make_actor(model, frozen)
    actor.update(policy_batch(ids))
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = logprobs(model, ids)
    assert not torch.equal(moved, first)
    for _ in range(2):
        assert torch.equal(actor.reference_logprobs(policy_batch(ids)), first.flatten())
        assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
        assert torch.equal(actor.logprobs(policy_batch(ids)), moved.flatten())
    with pytest.raises(KeyboardInterrupt), frozen.active():
        raise KeyboardInterrupt
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert frozen.num_swaps == (3 if placement == "swap" else 0)
    actor.update(policy_batch(ids))  # and training goes on


def test_no_initial_policy() -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    with pytest.raises(RuntimeError, match="initial_policy_kl_penalty is 0"):
        make_actor(model, None).reference_logprobs(policy_batch(tokens()))


def test_log_probs_and_ratios_are_of_the_distribution_sampled_from() -> None:
    """At the sampling temperature, with and without an entropy bonus."""
    model, ids = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), tokens()
    actor = make_actor(model, None)
    actor.temperature = 0.5
    for bonus in (0.0, 0.01):
        actor.loss, batch = LossSettings(entropy_bonus=bonus), policy_batch(ids)
        own = batch.columns["old_logprobs"] = actor.logprobs(batch)
        torch.testing.assert_close(own, logprobs(model, ids, 0.5).flatten())
        assert actor.update(batch)["ppo_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_an_entropy_bonus_flattens_the_distribution() -> None:
    model, ids = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), tokens()
    actor = make_actor(model, None)
    actor.loss = LossSettings(entropy_bonus=1.0)

    def entropy() -> torch.Tensor:
        return score(model, ids, Scoring(entropy=True))[..., 1].mean()

    before = entropy()
    for _ in range(3):
        actor.update(policy_batch(ids, advantage=0.0))
    assert entropy() > before
