"""The embedded engine against the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import VOCAB
from trained_models import ARCHITECTURES, EOS, logprobs

from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def prompts(count: int = 9) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(6)
    return [
        GenerationRequest(i, torch.randint(2, VOCAB, (1 + 3 * (i % 5),), generator=generator).tolist(), seed=i)
        for i in range(count)
    ]


def generate(engine: EmbeddedEngine, model: MegatronModel, sampling: SamplingParams) -> dict[int, Any]:
    engine.build()
    engine.refit(export_weights(model), 0)
    return {result.request_id: result for result in engine.generate(prompts(), sampling)}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize(
    "sampling", [{"use_greedy": True}, {"temperature": 0.7, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_the_engine_agrees_with_the_trainer(name: str, sampling: dict[str, Any]) -> None:
    """Log-probs within fp32 rounding of those that enter the loss; greedy, no other token is likelier."""
    params = SamplingParams(max_new_tokens=24, seed=3, **sampling)
    torch.manual_seed(11)
    model = build_model(ARCHITECTURES[name], {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS, "vocab_limit": VOCAB - 2}
    results = generate(EmbeddedEngine(ARCHITECTURES[name], dtype=torch.float32, **options), model, params)
    assert results.keys() == set(range(9))
    for result in results.values():
        first, ids = len(result.prompt_token_ids), torch.tensor([result.prompt_token_ids + result.token_ids])
        trainers = logprobs(model, ids, params.logprob_temperature)[0, first - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs), trainers, atol=1e-5, rtol=0)
        assert max(result.token_ids) < VOCAB - 2
        if params.use_greedy:
            with torch.no_grad():
                logits = model.gpt(ids, torch.arange(ids.shape[1])[None], None)[0, first - 1 : -1, : VOCAB - 2]
            best, chosen = logits.max(-1).values, logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(chosen, best, atol=1e-5, rtol=0)


def test_bf16_engine_stays_near_the_bf16_trainer() -> None:
    torch.manual_seed(11)
    model = build_model(ARCHITECTURES["llama"], {}, torch.bfloat16, trainable=False)
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS}
    engine = EmbeddedEngine(ARCHITECTURES["llama"], dtype=torch.bfloat16, **options)
    gaps = []
    for result in generate(engine, model, SamplingParams(max_new_tokens=24)).values():
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        gaps.append((torch.tensor(result.logprobs) - logprobs(model, ids)[0, len(result.prompt_token_ids) - 1 :]).abs())
    assert torch.cat(gaps).mean() < 0.03
