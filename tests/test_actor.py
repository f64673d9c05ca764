"""The policy: frozen weights, log-probs, the entropy bonus."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from served_critic import TEST_LIMITS, serve
from trained_models import ARCHITECTURES, OPTIM, logprobs, make_actor, policy_batch, score, tokens

from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.services.critic_service import LogprobService
from nemo_style_aligner.trainer.services.endpoints import ModelLimits
from nemo_style_aligner.trainer.services.score_client import ScoreClient, SequencesToScore, UnfitServiceError
from nemo_style_aligner.trainer.services.scores import ScoreEndpoint

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
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    with frozen.active():
        pass
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters()), "older weights came back"


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


def test_log_probs_are_the_same_from_a_model_elsewhere() -> None:
    """Of responses of several lengths, several to a request, several requests to a pass."""
    model, rows = build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=False), tokens(6).tolist()
    lengths, prompts = (12, 5, 2, 9, 12, 7), (3, 4, 1, 2, 11, 6)
    samples = [
        Sample(n, n, {}, row[:length], prompt, True, str)
        for n, (row, length, prompt) in enumerate(zip(rows, lengths, prompts, strict=True))
    ]
    service: Any = LogprobService(model, 0.5, MicroBatching(2))
    service.gate = threading.Event()
    endpoints = [ScoreEndpoint("reference", LogprobService.scores, ModelLimits(max_sequence_length=12))]
    with serve(service, endpoints=endpoints, delay_us=200_000) as server:
        source = RemoteScores(ScoreClient(server.url, "reference", LogprobService.scores, limits=TEST_LIMITS))
        source.wait_until_ready(20, SequencesToScore(12, 1, ""))
        with pytest.raises(UnfitServiceError, match="at most 12 tokens"):
            source.wait_until_ready(20, SequencesToScore(13, 1, ""))
        asked = [source.column("logprobs", samples[:4]), source.column("logprobs", samples[4:])]
        found = [row for answer in asked for row in answer.result(20)]
        source.close()
    for sample, logprobs_of_response in zip(samples, found, strict=True):
        alone = logprobs(model, torch.tensor([sample.token_ids]), 0.5)[0, sample.prompt_length - 1 :]
        torch.testing.assert_close(logprobs_of_response, alone)


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
