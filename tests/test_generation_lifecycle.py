"""Build, refit, unload, reload: the engine never answers with weights it should not have."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from generation_models import ENGINE_DEFAULTS, engine_for, hf_logits, hf_model, ragged_requests, weights_of

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine

GREEDY = SamplingParams(max_new_tokens=12, use_greedy=True)
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, params=["auto", "torch"])
def _step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINE_DEFAULTS, "step", request.param)


def _generate(engine: GenerationEngine, params: SamplingParams = GREEDY) -> list[GenerationResult]:
    return sorted(engine.generate(ragged_requests(6, longest=30), params), key=lambda result: result.request_id)


def _tokens(engine: GenerationEngine) -> list[list[int]]:
    return [result.token_ids for result in _generate(engine)]


def test_refit_changes_weights_and_version() -> None:
    engine = engine_for()
    assert engine.weight_version == -1
    for version, seed in enumerate((0, 5, 0)):
        model = hf_model(seed=seed)
        engine.refit(iter(weights_of(model).items()), version=version)
        assert engine.weight_version == version
        for result in _generate(engine):
            assert result.weight_version == version
            assert hf_logits(model, result.prompt_token_ids, result.token_ids).argmax(-1).tolist() == result.token_ids
    assert engine.num_compilations == 1


def test_refit_copies() -> None:
    """Training on goes unnoticed until the next refit."""
    model = hf_model()
    engine = engine_for(model=model)
    before = _tokens(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    assert _tokens(engine) == before


def _without(weights: Weights, name: str) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in weights.items() if key != name]


_NAME = "model.layers.1.self_attn.k_proj.weight"


def _broken(weights: Weights, how: str) -> Any:
    if how == "missing":
        return _without(weights, _NAME)
    if how == "unknown":
        return [*weights.items(), ("model.layers.3.mlp.up_proj.weight", torch.zeros(2))]
    if how == "misshapen":
        return [(name, value[:-1] if name == _NAME else value) for name, value in weights.items()]
    if how == "transposed":
        return [(name, value.T if name == _NAME else value) for name, value in weights.items()]
    if how == "twice":
        return [*weights.items(), (_NAME, weights[_NAME])]
    if how == "bias":
        return [*weights.items(), (_NAME.replace("weight", "bias"), torch.zeros(16))]
    raise KeyError(how)


@pytest.mark.parametrize(
    "how, named",
    [
        ("missing", _NAME),
        ("unknown", "model.layers.3.mlp.up_proj.weight"),
        ("misshapen", _NAME),
        ("transposed", _NAME),
        ("twice", _NAME),
        ("bias", _NAME.replace("weight", "bias")),
    ],
)
def test_a_broken_stream_is_an_error_that_names_the_tensor(how: str, named: str) -> None:
    model = hf_model()
    engine = engine_for(model=model)
    before = _tokens(engine)
    not_begun = engine.generate(ragged_requests(1), GREEDY)
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        engine.refit(_broken(weights_of(model), how), version=1)
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="refit"):
        engine.generate([], GREEDY)
    with pytest.raises(RuntimeError, match="refit"):
        next(not_begun)
    engine.refit(weights_of(model).items(), version=2)
    assert _tokens(engine) == before


def test_tied_engine_refuses_an_output_layer() -> None:
    model = hf_model("llama-tied")
    engine = engine_for("llama-tied")
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tied"):
        engine.refit(model.state_dict().items(), version=0)


def test_a_stream_that_raises_leaves_no_half_weights() -> None:
    model = hf_model()
    engine = engine_for(model=model)

    def stream() -> Any:
        yield next(iter(weights_of(model).items()))
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        engine.refit(stream(), version=1)
    with pytest.raises(RuntimeError, match="refit"):
        engine.generate([], GREEDY)


def test_unload_and_reload() -> None:
    model = hf_model()
    engine = engine_for(model=model)
    before = _generate(engine)
    for _ in range(2):
        engine.unload()
        engine.unload()
        with pytest.raises(RuntimeError, match="unloaded"):
            engine.generate([], GREEDY)
        with pytest.raises(RuntimeError, match="unloaded"):
            engine.refit(weights_of(model).items(), version=1)
        engine.reload()
        engine.reload()
        with pytest.raises(RuntimeError, match="refit"):
            engine.generate([], GREEDY)
        engine.refit(weights_of(model).items(), version=0)
        assert _generate(engine) == before
    assert engine.num_compilations == 1


def test_unload_gives_memory_back() -> None:
    architecture = ModelArchitecture(
        num_layers=2, hidden_size=512, ffn_hidden_size=4096, num_attention_heads=8, num_query_groups=8, vocab_size=32000
    )
    engine = EmbeddedEngine(architecture, dtype=torch.float32, num_slots=16, max_sequence_length=512, eos_id=0)
    process = psutil.Process()
    engine.build()
    engine.refit(((name, torch.ones(shape)) for name, shape in engine._step.weights.shapes.items()), version=0)
    loaded = process.memory_info().rss
    engine.unload()
    weights = 4 * architecture.num_parameters
    assert loaded - process.memory_info().rss > 0.8 * weights
    engine.reload()


def test_order_of_calls() -> None:
    engine = EmbeddedEngine(
        ModelArchitecture(
            num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, num_query_groups=1, vocab_size=8
        ),
        dtype=torch.float32,
        num_slots=1,
        max_sequence_length=8,
        eos_id=0,
    )
    for call in (lambda: engine.generate([], GREEDY), lambda: engine.refit([], 0), engine.reload):
        with pytest.raises(RuntimeError, match="build"):
            call()
    engine.build()
    with pytest.raises(RuntimeError, match="already built"):
        engine.build()


def test_no_refit_under_a_running_generation() -> None:
    model = hf_model()
    engine = engine_for(model=model, num_slots=2)
    results = engine.generate(ragged_requests(6), GREEDY)
    next(results)
    for call in (lambda: engine.refit(weights_of(model).items(), 1), engine.unload, lambda: _generate(engine)):
        with pytest.raises(RuntimeError, match="under way"):
            call()
    results.close()  # type: ignore[attr-defined]
    before = _tokens(engine_for(model=model))
    assert _tokens(engine) == before  # an abandoned generation leaves nothing behind


def test_diverged_weights_are_an_error_and_leave_no_trace() -> None:
    model = hf_model()
    engine = engine_for(model=model)
    before = _generate(engine)
    weights = weights_of(model)
    broken = weights | {_NAME: torch.full_like(weights[_NAME], torch.nan)}
    engine.refit(broken.items(), version=9)
    with pytest.raises(FloatingPointError, match="version 9"):
        _generate(engine)
    engine.refit(weights.items(), version=0)
    assert _generate(engine) == before


def test_what_an_abandoned_generation_computed_with_diverged_weights_is_gone() -> None:
    """Values that are not finite stay in memory when the requests end before any token is sampled."""
    model = hf_model()
    engine = engine_for(model=model, prefill_chunk_tokens=4, num_slots=2)
    short = [GenerationRequest(0, [3, 4, 5])]
    before = [result.token_ids for result in engine.generate(short, GREEDY)]
    values = "model.layers.0.self_attn.v_proj.weight"
    weights = weights_of(model)
    engine.refit((weights | {values: torch.full_like(weights[values], torch.inf)}).items(), version=1)

    class LostSource:
        """One prompt of several chunks, then nothing yet; lost when it is asked again after the first pass."""

        asked = 0

        def __iter__(self) -> LostSource:
            return self

        def __next__(self) -> GenerationRequest:
            self.asked += 1
            if self.asked == 1:
                return GenerationRequest(0, list(range(2, 60)))
            raise StopIteration if self.asked == 2 else ConnectionError("the queue is gone")

    with pytest.raises(ConnectionError):
        list(engine.generate(LostSource(), GREEDY))
    engine.refit(weights.items(), version=2)
    assert [result.token_ids for result in engine.generate(short, GREEDY)] == before


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"num_slots": 0},
        {"prefill_chunk_tokens": 0},
        {"eos_id": 96},
        {"vocab_limit": 97},
    ],
)
def test_senseless_engines_are_refused(options: dict) -> None:
    with pytest.raises(ValueError):
        engine_for(**options)
