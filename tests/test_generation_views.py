"""An engine that reads the trainer's own weights, where they are or to pack them: the same responses, never with
weights of a later step."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from generation_models import have_graphs
from small_models import SHAPE, VOCAB

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.weights.stream import export_weights, lendable_weights
from nemo_style_aligner.kinds import StepChoice
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch

pytestmark = pytest.mark.usefixtures("one_rank")

ARCHITECTURES = {
    "llama": ModelArchitecture(**SHAPE),
    "tied": ModelArchitecture(**SHAPE, tied_embeddings=True, qkv_bias=True),
    "qk-norm": ModelArchitecture(**SHAPE, qk_layernorm=True, kv_channels=16),
    "layernorm1p": ModelArchitecture(
        **SHAPE, normalization="layernorm1p", activation="squared-relu", gated=False, bias=True
    ),
}
OPTIM = {"name": "distributed_fused_adam", "lr": 1e-2, "weight_decay": 0.0}
SAMPLED = SamplingParams(max_new_tokens=12, seed=3)


def trained_model(name: str, dtype: torch.dtype, optim: str = "distributed_fused_adam") -> tuple[MegatronModel, Actor]:
    """A policy in a vocabulary padded to 64 rows, and what updates it."""
    torch.manual_seed(11)
    cfg = {"make_vocab_size_divisible_by": 64, "optim": OPTIM | {"name": optim}}
    model = build_model(ARCHITECTURES[name], cfg, dtype)
    optimizer = Optimizer(model, schema.Optimizer(**cfg["optim"]), Schedule(lr=1e-2, name="constant"), clip_grad=1.0)
    batching = MicroBatching(num_rows=4)
    actor = Actor(model, optimizer, None, training_batching=batching, forward_batching=batching,
                  temperature=1.0, loss=LossSettings())  # fmt: skip
    return model, actor


def update(actor: Actor) -> None:
    tokens = torch.arange(4 * 10, dtype=torch.int32) * 7 % VOCAB
    columns = {"old_logprobs": torch.full((36,), -3.0), "advantages": torch.linspace(-1, 1, 36)}
    rows = torch.ones(4, dtype=torch.int64)
    actor.update(RaggedBatch(tokens, 10 * rows, torch.arange(40) % 10 > 0, columns, rows.bool()))


def engine_of(model: MegatronModel, *, lends: bool, step: StepChoice = "torch", **options: Any) -> EmbeddedEngine:
    """Built; `refit` it."""
    engine = EmbeddedEngine(
        model.architecture,
        dtype=model.config.params_dtype,
        num_slots=3,
        max_sequence_length=48,
        eos_id=1,
        step=step,
        trainer_weights=functools.partial(lendable_weights, model, 0, 1) if lends else None,
        **options,
    )
    engine.build()
    return engine


def refit(engine: EmbeddedEngine, model: MegatronModel, version: int) -> None:
    engine.refit(export_weights(model, without=engine.viewed_weights), version)


def responses(engine: EmbeddedEngine) -> list[GenerationResult]:
    requests = [GenerationRequest(i, [(7 * i + 3 * j) % VOCAB for j in range(1 + 9 * (i % 3))], i) for i in range(6)]
    return sorted(engine.generate(requests, SAMPLED), key=lambda result: result.request_id)


def own_bytes(engine: EmbeddedEngine) -> int:
    return sum(buffer.nbytes for buffer in engine._step._weights.buffers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_tensor_is_viewed_and_every_update_seen(name: str) -> None:
    """Responses equal, through updates and unloading, those of an engine with copies; to the last bit."""
    model, actor = trained_model(name, torch.float32)
    viewing, copying = engine_of(model, lends=True), engine_of(model, lends=False)
    assert viewing._step.weights.shapes == {} and own_bytes(viewing) == 0
    assert viewing.viewed_weights == copying._step.weights.shapes.keys()
    for version in range(3):
        if version == 1:
            viewing.unload()
            viewing.reload()
        for engine in (viewing, copying):
            refit(engine, model, version)
        assert responses(viewing) == responses(copying)
        update(actor)
    assert viewing.num_compilations == 1


def gaps(results: list[GenerationResult], expected: list[GenerationResult]) -> list[torch.Tensor]:
    """Of each response: how far its log-probs are from the expected ones, as far as its tokens are the same."""
    found = []
    for ours, theirs in zip(results, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append((torch.tensor(ours.logprobs[:same]) - torch.tensor(theirs.logprobs[:same])).abs())
    return found


ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the policy is on the GPU")
ON_A_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU: graphs with the trainer's weights are NOT tested, only the buckets they replay",
)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_A_CPU), pytest.param("cuda", marks=[pytest.mark.gpu, ON_A_GPU])]
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_graphs_replay_with_what_training_changed_in_place(
    dtype: torch.dtype, atol: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured before any update, and again after unloading. In bf16 passes of other shapes may round otherwise."""
    model, actor = trained_model("llama", dtype)
    have_graphs(monkeypatch, True)
    viewing = engine_of(model, lends=True, device=device)
    have_graphs(monkeypatch, False)
    copying = engine_of(model, lends=False, device=device)
    captures = viewing.num_compilations
    assert captures > 1 and "model.layers.1.mlp.up_proj.weight" in viewing.viewed_weights and not copying.viewed_weights
    before: list[GenerationResult] = []
    for version in range(4):
        if version == 2:
            viewing.unload()
            viewing.reload()
        for engine in (viewing, copying):
            refit(engine, model, version)
        results, expected = responses(viewing), responses(copying)
        length = sum(len(result.token_ids) for result in expected)
        found = torch.cat(gaps(results, expected))
        assert found.max() < atol and len(found) > length / 2
        if dtype == torch.float32:
            assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        if before:
            assert len(torch.cat(gaps(results, before))) < length / 2  # other weights choose other tokens
        before = results
        update(actor)
    assert viewing.num_compilations == captures


def test_what_differs_is_copied() -> None:
    """bf16 norms, which the engine keeps in fp32."""
    model, _ = trained_model("llama", torch.bfloat16)
    engine = engine_of(model, lends=True)
    assert {name.split(".")[-2] for name in engine._step.weights.shapes} == {
        "input_layernorm", "post_attention_layernorm", "norm",
    }  # fmt: skip
    refit(engine, model, 0)
    copying = engine_of(model, lends=False)
    refit(copying, model, 0)
    assert responses(engine) == responses(copying)


def test_what_is_viewed_is_neither_brought_nor_moved() -> None:
    model, _ = trained_model("llama", torch.float32)
    engine = engine_of(model, lends=True)
    with pytest.raises(ValueError, match=r"embed_tokens.*viewed_weights"):
        engine.refit(export_weights(model), 0)
    refit(engine, model, 0)
    parameter = model.gpt.decoder.layers[1].mlp.linear_fc2.weight
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.down_proj.* has moved"):
        refit(engine, model, 1)
    with pytest.raises(RuntimeError, match="refit"):
        responses(engine)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_native_step_packs_from_the_trainers_memory(name: str) -> None:
    """All matrices; the same bits as from a stream; training shows at the next refit, not before."""
    model, actor = trained_model(name, torch.bfloat16)
    packing, copying = (engine_of(model, lends=lends, step="native") for lends in (True, False))
    brought = {key for key in copying._step.weights.shapes if key.endswith(("norm.weight", ".bias"))}
    if name != "tied":  # a table that is looked up
        brought.add("model.embed_tokens.weight")
    assert packing._step.weights.shapes.keys() == brought
    assert packing.viewed_weights == copying._step.weights.shapes.keys() - brought
    for version in range(2):
        for engine in (packing, copying):
            refit(engine, model, version)
        before = responses(packing)
        assert before == responses(copying)
        packing.unload()
        packing.reload()
        refit(packing, model, version)
        update(actor)
        assert responses(packing) == before
    parameter = model.gpt.decoder.layers[0].self_attention.linear_qkv.weight
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.q_proj.* has moved"):
        refit(packing, model, 9)
