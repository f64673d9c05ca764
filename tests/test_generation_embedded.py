"""The embedded engine computes what `transformers` computes, however requests share its slots."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest
import torch
from generation_models import (
    ENGINE_DEFAULTS,
    EOS,
    FAMILIES,
    VOCAB,
    engine_for,
    hf_logits,
    hf_model,
    ragged_requests,
    weights_of,
)

from nemo_style_aligner import activity
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_new_tokens=40, use_greedy=True)


@pytest.fixture(autouse=True, params=["auto", "torch"])
def _step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINE_DEFAULTS, "step", request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_argmax_of_hugging_face(family: str) -> None:
    """More requests than slots, chunked prefill: tokens are HF's argmax, log-probs HF's log-softmax."""
    model = hf_model(family)
    engine = engine_for(family, model, num_slots=5, prefill_chunk_tokens=24)
    requests = ragged_requests(18, longest=70)
    results = list(engine.generate(iter(requests), GREEDY))
    assert sorted(result.request_id for result in results) == list(range(18))
    for result in results:
        assert result.prompt_token_ids == requests[result.request_id].prompt_token_ids
        logits = hf_logits(model, result.prompt_token_ids, result.token_ids)
        assert logits.argmax(-1).tolist() == result.token_ids
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(result.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=2e-5, rtol=0)
        assert (result.finish_reason == "stop") == (result.token_ids[-1] == EOS)
        assert EOS not in result.token_ids[:-1]
        assert result.finish_reason == "stop" or len(result.token_ids) == 40


def test_long_sequences_cross_attention_buckets() -> None:
    model = hf_model()
    engine = engine_for(model=model, num_slots=2, max_sequence_length=300, prefill_chunk_tokens=50)
    params = SamplingParams(max_new_tokens=150, min_new_tokens=150, use_greedy=True)
    for result in engine.generate(ragged_requests(3, longest=140, seed=3), params):
        logits = hf_logits(model, result.prompt_token_ids, result.token_ids)
        logits[:, EOS] = -torch.inf
        assert logits.argmax(-1).tolist() == result.token_ids


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_same_response_whatever_the_batch(family: str) -> None:
    """Sampled tokens depend on request and seeds only: not on slots, order, chunks or neighbours."""
    model = hf_model(family)
    params = SamplingParams(max_new_tokens=30, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
    requests = ragged_requests(14, longest=40)
    many = engine_for(family, model, num_slots=9)
    few = engine_for(family, model, num_slots=2, prefill_chunk_tokens=7)
    together = {result.request_id: result for result in many.generate(requests, params)}
    apart = {result.request_id: result for result in few.generate(reversed(requests), params)}
    alone = next(iter(many.generate([requests[5]], params)))
    assert together.keys() == apart.keys() == set(range(14))
    for index, result in together.items():
        assert result.token_ids == apart[index].token_ids
        torch.testing.assert_close(
            torch.tensor(result.logprobs), torch.tensor(apart[index].logprobs), atol=2e-5, rtol=0
        )
    assert alone.token_ids == together[5].token_ids


@pytest.mark.parametrize("family", ["llama", "mistral-sinks"])
def test_guesses_change_no_bit(family: str, request: pytest.FixtureRequest) -> None:
    """A group's later rounds are guessed by its earlier ones, and checked: the native step's numbers are equal to the
    last bit. A stop string, a minimum length and windows stay what they are; scores of all tokens come with them."""
    model = hf_model(family)
    prompts = [[5, 6, 7] * 9, [11, 12], [13] * 20]
    requests = [GenerationRequest(i, prompts[i % 3], seed=i // 2) for i in range(6)]
    limits = [40, 23, 1, 40, 2, 37]
    requests = [dataclasses.replace(r, max_new_tokens=n) for r, n in zip(requests, limits, strict=True)]
    params = SamplingParams(max_new_tokens=40, min_new_tokens=1, temperature=0.9, top_k=30, seed=3)
    engines = [engine_for(family, model, num_slots=12, lookup_decoding=guesses) for guesses in (False, True)]
    passes, held = [], 0
    for _ in range(2):
        plain, guessed = ({r.request_id: r for r in engine.generate(requests, params)} for engine in engines)
        passes.append([engine.statistics.steps for engine in engines])
        held += engines[1].statistics.guesses_held
        assert engines[0].statistics.guessed_tokens == 0
        for index, expected in plain.items():
            result = guessed[index]
            assert (result.token_ids, result.finish_reason) == (expected.token_ids, expected.finish_reason)
            if request.node.callspec.params["_step"] == "auto":
                assert result.logprobs == expected.logprobs
            torch.testing.assert_close(result.logprobs, expected.logprobs, atol=2e-5, rtol=0)
    assert held > 20 and passes[1][1] < 0.8 * passes[1][0], passes
    scored = []
    for engine in engines:
        *_, last = engine.serve(functools.partial(next, iter([engine.task(requests[0], params, num_top=2)]), None))
        scored.append(last[0])
    assert len(scored[1].scores) == len(scored[1].token_ids) and scored[0].token_ids == scored[1].token_ids
    for score, other in zip(scored[0].scores, scored[1].scores, strict=True):
        assert [token for token, _ in score.top] == [token for token, _ in other.top]
        torch.testing.assert_close([p for _, p in score.top], [p for _, p in other.top], atol=2e-5, rtol=0)


def test_seeds_change_samples() -> None:
    engine = engine_for(model=hf_model())
    prompt = [5, 6, 7]
    params = SamplingParams(max_new_tokens=20)
    by_request = [
        r.token_ids for r in engine.generate([GenerationRequest(i, prompt, seed=i) for i in range(4)], params)
    ]
    other_run = SamplingParams(max_new_tokens=20, seed=1)
    by_run = [r.token_ids for r in engine.generate([GenerationRequest(0, prompt, seed=0)], other_run)]
    assert len({tuple(tokens) for tokens in by_request + by_run}) == 5


def test_logprobs_are_of_the_tempered_unfiltered_distribution() -> None:
    model = hf_model()
    params = SamplingParams(max_new_tokens=25, temperature=1.7, top_k=20, top_p=0.9, repetition_penalty=1.2)
    for result in engine_for(model=model).generate(ragged_requests(6), params):
        expected = (hf_logits(model, result.prompt_token_ids, result.token_ids) / 1.7).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(result.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("penalty, minimum", [(1.3, 0), (1.0, 12), (0.8, 30)])
def test_constraints_equal_hugging_face_generate(penalty: float, minimum: int) -> None:
    model = hf_model(seed=4)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 3  # ends early unless held back
    params = SamplingParams(max_new_tokens=30, min_new_tokens=minimum, use_greedy=True, repetition_penalty=penalty)
    for result in engine_for(model=model).generate(ragged_requests(8), params):
        output = model.generate(
            torch.tensor([result.prompt_token_ids]),
            attention_mask=torch.ones(1, len(result.prompt_token_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            min_new_tokens=minimum or None,
            repetition_penalty=penalty,
        )
        assert output[0, len(result.prompt_token_ids) :].tolist() == result.token_ids


def test_ids_above_the_tokenizer_are_never_sampled_but_count_in_logprobs() -> None:
    model = hf_model()
    engine = engine_for(model=model, vocab_limit=10)
    for params in (SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, top_k=5), GREEDY):
        for result in engine.generate(ragged_requests(6), params):
            assert max(result.token_ids) < 10
            expected = hf_logits(model, result.prompt_token_ids, result.token_ids).log_softmax(-1)
            expected = expected.gather(-1, torch.tensor(result.token_ids)[:, None]).squeeze(-1)
            torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=2e-5, rtol=0)


def test_requests_are_pulled_one_per_free_slot() -> None:
    """A queue behind the iterator keeps its prompts until a slot is free for them."""
    engine = engine_for(model=hf_model(), num_slots=3)
    pulled = 0

    def queue() -> Iterator[GenerationRequest]:
        nonlocal pulled
        for request in ragged_requests(12):
            pulled += 1
            yield request

    for finished, _ in enumerate(engine.generate(queue(), SamplingParams(max_new_tokens=10)), start=1):
        assert pulled <= finished + 3
    assert pulled == finished == 12


def test_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model=hf_model(), num_slots=4)
    requests, passes = ragged_requests(10), []
    monkeypatch.setattr(activity, "progress", lambda: passes.append(engine.statistics.steps))
    results = list(engine.generate(requests, SamplingParams(max_new_tokens=20)))
    statistics = engine.statistics
    assert passes == list(range(statistics.steps))  # the watchdog hears of each
    assert statistics.generated_tokens == sum(len(result.token_ids) for result in results)
    assert statistics.prefill_tokens == sum(len(request.prompt_token_ids) for request in requests)
    assert 0 < statistics.steps <= statistics.active_slot_steps <= 4 * statistics.steps
    assert list(engine.generate([], GREEDY)) == []
    assert engine.statistics.active_slot_steps == engine.statistics.steps == 0


def test_bfloat16_stays_close_to_float32() -> None:
    """The engine's bf16 log-probs err no more than HF's own bf16 forward pass does, give or take."""
    model = hf_model()
    engine = engine_for(model=model, dtype=torch.bfloat16)
    results = list(engine.generate(ragged_requests(12), SamplingParams(max_new_tokens=30)))
    low_precision = hf_model().bfloat16()
    ours, theirs = [], []
    for result in results:
        chosen = torch.tensor(result.token_ids)[:, None]
        exact = hf_logits(model, result.prompt_token_ids, result.token_ids).log_softmax(-1).gather(-1, chosen)[:, 0]
        rounded = (
            hf_logits(low_precision, result.prompt_token_ids, result.token_ids).log_softmax(-1).gather(-1, chosen)[:, 0]
        )
        ours.append((torch.tensor(result.logprobs) - exact).abs())
        theirs.append((rounded - exact).abs())
    assert torch.cat(ours).mean() < 1.5 * torch.cat(theirs).mean()


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "request 7: the prompt is empty"),
        ([3] * 121, "request 7: prompt of 121 tokens plus max_new_tokens=40 is 161"),
        ([3, VOCAB], f"request 7: prompt holds token id {VOCAB}"),
        ([-1, 3], "request 7: prompt holds token id -1"),
    ],
)
def test_request_errors_name_the_request(prompt: list[int], message: str) -> None:
    engine = engine_for(model=hf_model())
    with pytest.raises(ValueError, match=message):
        list(engine.generate([GenerationRequest(7, prompt)], GREEDY))
    assert len(list(engine.generate([GenerationRequest(8, [3] * 120)], GREEDY))) == 1  # the longest that fits


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"max_new_tokens": 4, "temperature": 0.0},
        {"max_new_tokens": 4, "temperature": math.inf},
        {"max_new_tokens": 4, "temperature": 1e-30},
        {"max_new_tokens": 4, "top_k": -1},
        {"max_new_tokens": 4, "top_p": 0.0},
        {"max_new_tokens": 4, "repetition_penalty": 0.0},
        {"max_new_tokens": 4, "stop_strings": ("",)},
    ],
)
def test_senseless_sampling_parameters_are_refused(options: dict) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the engine is NOT tested on CUDA")
def test_cuda_equals_cpu(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["_step"] == "auto":
        pytest.skip("the torch step is what runs on CUDA")
    model = hf_model()
    requests = ragged_requests(12, longest=120)  # several chunks
    for params in (GREEDY, SamplingParams(max_new_tokens=20, top_k=30, top_p=0.9, repetition_penalty=1.1)):
        engine = engine_for(model=model, device="cuda", prefill_chunk_tokens=24)
        on_cpu = {r.request_id: r for r in engine_for(model=model).generate(requests, params)}
        on_gpu = {r.request_id: r for r in engine.generate(requests, params)}
        for index, result in on_cpu.items():
            assert on_gpu[index].token_ids == result.token_ids
            torch.testing.assert_close(
                torch.tensor(on_gpu[index].logprobs), torch.tensor(result.logprobs), atol=1e-4, rtol=0
            )


def test_weights_from_a_generator_of_views() -> None:
    """A stream may hand out temporaries that it reuses at once."""
    model = hf_model()
    weights = weights_of(model)
    scratch = torch.empty(max(tensor.numel() for tensor in weights.values()))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    engine = engine_for()
    engine.refit(stream(), version=1)
    expected = list(engine_for(model=model).generate(ragged_requests(3), GREEDY))
    assert [r.token_ids for r in engine.generate(ragged_requests(3), GREEDY)] == [r.token_ids for r in expected]


def test_requests_may_have_limits_of_their_own() -> None:
    model = hf_model()
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 3  # comes often, and ends nothing
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine = engine_for(model=model)
    lengths = [1, 7, None, 30, 2, 90]
    requests = [
        GenerationRequest(i, request.prompt_token_ids, i, max_new_tokens=length)
        for i, (request, length) in enumerate(zip(ragged_requests(6), lengths, strict=True))
    ]
    results = list(engine.generate(requests, params))
    assert {r.request_id: len(r.token_ids) for r in results} == dict(enumerate([1, 7, 20, 30, 2, 90]))
    assert all(result.finish_reason == "length" for result in results)
    assert any(EOS in result.token_ids[:-1] for result in results)
    for length, named in ((0, "max_new_tokens=0"), (200, "above the engine's")):
        with pytest.raises(ValueError, match=named):
            list(engine.generate([GenerationRequest(0, [5, 6], max_new_tokens=length)], params))
