"""The torch step: padded buckets, compilations that stay constant, memory that does not grow."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import psutil
import pytest
import torch
from generation_models import (
    VOCAB,
    architecture,
    engine_for,
    have_graphs,
    hf_logits,
    hf_model,
    ragged_requests,
    weights_of,
)
from torch import Tensor
from transformers import PreTrainedModel

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.decode_graphs import row_buckets
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine

GREEDY = SamplingParams(max_new_tokens=30, use_greedy=True)
SAMPLED = SamplingParams(max_new_tokens=30, top_k=30, top_p=0.9, repetition_penalty=1.1, seed=2)


def by_id(engine: EmbeddedEngine, params: SamplingParams, count: int = 12) -> dict[int, GenerationResult]:
    return {result.request_id: result for result in engine.generate(ragged_requests(count), params)}


def assert_same(results: dict[int, GenerationResult], expected: dict[int, GenerationResult], atol: float) -> None:
    assert results.keys() == expected.keys()
    for index, result in results.items():
        assert result.token_ids == expected[index].token_ids
        torch.testing.assert_close(
            torch.tensor(result.logprobs), torch.tensor(expected[index].logprobs), atol=atol, rtol=0
        )


def test_buckets() -> None:
    assert row_buckets(1) == [1] and row_buckets(6) == [1, 2, 4, 6]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(128)[-4:] == [56, 64, 96, 128]


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines decode in padded buckets, as on a GPU, only not from graphs."""
    have_graphs(monkeypatch, True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "nemotron"])
def test_padded_buckets_change_nothing(family: str, request: pytest.FixtureRequest) -> None:
    """Through refits, ragged batches, lost memory and unloading; nothing is captured after `build`."""
    model, other = hf_model(family), hf_model(family, seed=5)
    options: dict[str, Any] = {"num_slots": 11, "max_sequence_length": 300, "kv_cache_tokens": 640}
    eager = engine_for(family, model, step="torch", **options)
    expected = [by_id(eager, params) for params in (GREEDY, SAMPLED)]
    eager.refit(weights_of(other).items(), 1)
    expected_of_other = by_id(eager, SAMPLED)
    request.getfixturevalue("padded")
    engine = engine_for(family, model, **options)
    captures = engine.num_compilations
    assert captures == 1 + 5  # rows 1, 2, 4, 8, 11
    for params, results in zip((GREEDY, SAMPLED), expected, strict=True):
        assert_same(by_id(engine, params), results, 2e-5)
    engine.refit(weights_of(other).items(), 1)
    assert_same(by_id(engine, SAMPLED), expected_of_other, 2e-5)
    engine.unload()
    engine.reload()
    engine.refit(weights_of(model).items(), 2)
    assert_same(by_id(engine, SAMPLED), expected[1], 2e-5)
    for count in (1, 3, 9):
        by_id(engine, SAMPLED, count)
    assert engine.num_compilations == captures


@pytest.mark.usefixtures("padded")
def test_padded_rows_of_diverged_weights_leave_no_trace() -> None:
    model = hf_model()
    engine = engine_for(model=model)
    before = by_id(engine, GREEDY)
    engine.refit(((name, tensor * torch.nan) for name, tensor in weights_of(model).items()), 1)
    with pytest.raises(FloatingPointError, match="version 1"):
        by_id(engine, GREEDY)
    engine.refit(weights_of(model).items(), 2)
    assert_same(by_id(engine, GREEDY), before, 0)


@pytest.mark.parametrize("step", ["torch", "auto"])
def test_a_thousand_refits_and_reloads_leak_nothing(step: Any) -> None:
    a = ModelArchitecture(
        num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=2, num_query_groups=1, vocab_size=1000
    )
    engine = EmbeddedEngine(
        a,
        dtype=torch.float32,
        num_slots=2,
        max_sequence_length=32,
        eos_id=0,
        step=step,
    )
    engine.build()
    compilations = engine.num_compilations
    weights = {name: torch.randn(shape) * 0.1 for name, shape in engine._step.weights.shapes.items()}
    process = psutil.Process()

    def cycle(version: int) -> None:
        engine.refit(weights.items(), version)
        if version % 20 == 0:
            list(engine.generate(ragged_requests(3, longest=20), SamplingParams(max_new_tokens=4)))
        if version % 50 == 0:
            engine.unload()
            engine.reload()

    for version in range(100):
        cycle(version)
    before = process.memory_info().rss
    for version in range(100, 1100):
        cycle(version)
    assert process.memory_info().rss - before < 4 * 2**20  # 4 KiB per refit, of weights of 600
    assert engine.num_compilations == compilations


@pytest.mark.parametrize("step", ["torch", "auto"])
def test_memory_is_touched_as_far_as_it_is_used(step: Any) -> None:
    """Room for 400,000 tokens is 150 MB; requests in four slots touch next to nothing of it."""
    model = hf_model()
    process = psutil.Process()
    by_id(engine_for(model=model, step=step), SAMPLED)  # what is allocated once per process
    before = process.memory_info().rss
    engine = engine_for(model=model, step=step, kv_cache_tokens=400_000)
    assert len(by_id(engine, SAMPLED)) == 12
    assert engine.statistics.peak_pages <= 4 * 10
    assert process.memory_info().rss - before < 16 * 2**20


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 0},
        {"kv_cache_tokens": 16},
    ],
)
def test_senseless_options_are_refused(options: dict) -> None:
    """By the engine's own names: it knows nothing of the trainer's keys."""
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        engine_for(**options)


def test_what_cannot_be_divided_says_by_how_many() -> None:
    from nemo_style_aligner.engine.shard import TensorParallel

    a = dataclasses.replace(architecture(), num_query_groups=3)
    for size in (4, 2):
        with pytest.raises(ValueError, match=r"^tensor_parallel_size="):
            EmbeddedEngine(
                a,
                dtype=torch.float32,
                num_slots=1,
                max_sequence_length=16,
                eos_id=0,
                tensor_parallel=TensorParallel(0, size),
            )


# ---- on a GPU ----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: CUDA graphs are NOT tested, only the buckets they replay"
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "nemotron"])
def test_graphs_equal_eager_on_cuda(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = hf_model(family), hf_model(family, seed=5)
    options: dict[str, Any] = {"num_slots": 11, "max_sequence_length": 300, "kv_cache_tokens": 640, "device": "cuda"}
    have_graphs(monkeypatch, True)
    graphs = engine_for(family, model, **options)
    captures = graphs.num_compilations
    assert captures > 1
    have_graphs(monkeypatch, False)
    eager = engine_for(family, model, **options)
    for version, weights in enumerate((model, other, model), start=1):
        for engine in (graphs, eager):
            if version == 3:
                engine.unload()
                engine.reload()
            engine.refit(weights_of(weights).items(), version)
        for params in (GREEDY, SAMPLED):
            for count in (1, 3, 12):
                assert_same(by_id(graphs, params, count), by_id(eager, params, count), 1e-4)
    assert graphs.num_compilations == captures


def long_requests() -> list[GenerationRequest]:
    """Prompts of several chunks and pages; eight of fourteen begin alike."""
    generator = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(2, VOCAB) for _ in range(count)]

    beginning = tokens(70)
    prompts = [beginning + tokens(1 + 7 * i) for i in range(8)] + [tokens(66 + 13 * i) for i in range(6)]
    return [GenerationRequest(i, prompt, seed=i) for i, prompt in enumerate(prompts)]


def errors(results: list[GenerationResult], model: PreTrainedModel, exact: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """How far the results' log-probs are from those of ``exact``, and how far those of ``model`` are."""
    ours, models = [], []
    for result in results:
        chosen = torch.tensor(result.token_ids)[:, None]
        expected, rounded = (
            hf_logits(each, result.prompt_token_ids, result.token_ids).log_softmax(-1).gather(-1, chosen)[:, 0]
            for each in (exact, model)
        )
        ours.append((torch.tensor(result.logprobs) - expected).abs())
        models.append((rounded - expected).abs())
    return torch.cat(ours), torch.cat(models)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3", "nemotron", "glm4-moe"))]
)
def test_long_prompts_in_bf16_by_graphs_and_eagerly(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in chunks beside decoding, shared pages, grouped-query heads: both err no more than HF's own bf16.

    Graphs and eager passes round differently, so their tokens may differ. On a CPU the buckets only, without graphs. On
    a GPU Triton's kernels compute, or this fails.
    """
    caplog.set_level(logging.INFO)
    operations = "Triton's kernels" if device == "cuda" else "torch's functions"
    options: dict[str, Any] = {"num_slots": 6, "max_sequence_length": 300, "prefill_chunk_tokens": 24}
    options |= {"device": device, "dtype": torch.bfloat16}
    for graphs in (True, False):
        have_graphs(monkeypatch, graphs)
        engine = engine_for(family, **options)
        assert operations in caplog.messages[-1]
        captures = engine.num_compilations
        assert (captures > 1) == graphs
        for version, seed in enumerate((0, 5, 0)):
            if version == 2:
                engine.unload()
                engine.reload()
            model = hf_model(family, seed)
            engine.refit(weights_of(model).items(), version)
            for params in (GREEDY, SamplingParams(max_new_tokens=30, seed=2)):
                results = list(engine.generate(long_requests(), params))
                assert engine.statistics.shared_prefix_tokens >= 7 * 64
                ours, theirs = errors(results, hf_model(family, seed).bfloat16(), model)
                assert ours.mean() < 1.5 * theirs.mean() and ours.max() < 4 * theirs.max()
        assert engine.num_compilations == captures
