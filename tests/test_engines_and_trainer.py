"""Both engines against each other and against the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import VOCAB
from trained_models import ARCHITECTURES, EOS, logprobs, reference_model

from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.megatron import MegatronEngine
from nemo_style_aligner.models.gpt import MegatronModel, build_model
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.stream import export_weights

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def prompts(count: int = 9) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(6)
    return [
        GenerationRequest(i, torch.randint(2, VOCAB, (1 + 3 * (i % 5),), generator=generator).tolist(), seed=i)
        for i in range(count)
    ]


def generate(engine: EmbeddedEngine | MegatronEngine, model: MegatronModel, sampling: SamplingParams) -> dict[int, Any]:
    engine.build()
    engine.refit(export_weights(model), 0)
    return {result.request_id: result for result in engine.generate(prompts(), sampling)}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize(
    "sampling", [{"use_greedy": True}, {"temperature": 0.7, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_engines_agree_with_each_other_and_with_the_trainer(name: str, sampling: dict[str, Any]) -> None:
    """Same tokens from both engines; log-probs within fp32 rounding of those that enter the loss."""
    params = SamplingParams(max_new_tokens=24, seed=3, **sampling)
    torch.manual_seed(11)
    model = build_model(ARCHITECTURES[name], {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS, "vocab_limit": VOCAB - 2}
    embedded = generate(EmbeddedEngine(ARCHITECTURES[name], dtype=torch.float32, **options), model, params)
    baseline = generate(MegatronEngine(model, **options), model, params)
    assert embedded.keys() == baseline.keys() == set(range(9))
    for request_id, result in embedded.items():
        other: GenerationResult = baseline[request_id]
        assert result.token_ids == other.token_ids and result.finish_reason == other.finish_reason
        torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        trainers = logprobs(model, ids, params.logprob_temperature)[0, len(result.prompt_token_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs), trainers, atol=1e-5, rtol=0)
        assert max(result.token_ids) < VOCAB - 2


def test_the_baseline_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts what it computes, and says that a model has diverged, as every engine."""
    model, passes = reference_model(), []
    monkeypatch.setattr(activity, "progress", lambda: passes.append(1))
    beyond = model.architecture.vocab_size + 5  # a stop token that the model does not know is no trouble
    words: dict[str, Any] = {"detokenize": str, "token_to_id": {"<|new|>": beyond}.get}
    engine = MegatronEngine(model, num_slots=4, max_sequence_length=64, eos_id=EOS, **words)
    with pytest.raises(RuntimeError, match="build"):
        engine.generate([], SamplingParams(max_new_tokens=1))
    generate(engine, model, SamplingParams(max_new_tokens=5, min_new_tokens=5, stop_strings=("<|new|>",)))
    counted = engine.statistics
    assert counted.prefill_tokens == sum(len(request.prompt_token_ids) for request in prompts())
    assert counted.generated_tokens == 5 * 9 and counted.steps >= 3 * 5  # batches of four, four and one
    assert len(passes) == counted.steps
    with torch.no_grad():
        next(iter(model.gpt.decoder.layers[1].mlp.linear_fc1.parameters())).fill_(torch.nan)
    engine.refit([], version=3)
    with pytest.raises(FloatingPointError, match=r"request 0: logits at response token 0 .* version 3"):
        list(engine.generate(prompts(), SamplingParams(max_new_tokens=5)))
    assert not model.module.training


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
