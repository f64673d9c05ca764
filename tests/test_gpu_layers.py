"""Which layers GPUs compute with, and what selective recomputation means with Transformer Engine's: without either."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.trainer.models import gpt, layers
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.kept_passes import KeptPasses
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, train_step

ARCHITECTURE = ModelArchitecture(
    num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=53
)


@pytest.fixture
def uncached() -> Iterator[None]:
    layers.uses_transformer_engine.cache_clear()
    yield
    layers.uses_transformer_engine.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "capability", "installed", "why_not"),
    [
        (torch.bfloat16, (9, 0), {"transformer_engine"}, None),
        (torch.bfloat16, (10, 3), {"transformer_engine"}, None),
        (torch.bfloat16, (8, 0), {"transformer_engine"}, "compute capability 8.0 it needs flash-attn"),
        (torch.bfloat16, (12, 0), {"transformer_engine"}, "compute capability 12.0 it needs flash-attn"),
        (torch.bfloat16, (8, 0), {"transformer_engine", "flash_attn"}, None),
        (torch.float32, (9, 0), {"transformer_engine", "flash_attn"}, "in fp32"),
        (torch.bfloat16, (9, 0), {"transformer_engine", "broken"}, "cannot be imported"),
        (torch.bfloat16, (9, 0), {"flash_attn"}, ""),
        (torch.bfloat16, None, {"transformer_engine", "flash_attn"}, ""),
    ],
)
@pytest.mark.usefixtures("uncached")
def test_transformer_engine_is_used_where_it_can_compute(
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    installed: set[str],
    why_not: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else our own layers are, and where it is installed one line says why."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in ("transformer_engine", "flash_attn"):
            return find_spec(name, package)
        return importlib.machinery.ModuleSpec(name, None) if name in installed else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", "broken" not in installed)
    with caplog.at_level(logging.INFO):
        assert {layers.uses_transformer_engine(dtype) for _ in range(3)} == {why_not is None}
    assert len(caplog.records) == bool(why_not)
    assert (why_not or "") in caplog.text


def saved_bytes(model: gpt.MegatronModel, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
    """What a forward pass keeps for its backward pass, weights and logits' part apart; and the gradients."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.gpt.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    is_backward = False

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()  # held, so that no address is used twice
        if not is_backward and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    def give(x: torch.Tensor) -> torch.Tensor:
        nonlocal is_backward
        is_backward = True  # what is computed again from here on is kept for a moment only
        return x

    wanted = torch.ones(len(ids), ids.shape[1] - 1, dtype=torch.bool)

    def loss(output: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return -output.sum(), (output != 0).sum(), {}

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        train_step(model, Tokens(ids), wanted, MicroBatching(len(ids)), loss, scoring=Scoring())
    gradients = torch.cat([parameter.main_grad.flatten().clone() for parameter in model.gpt.parameters()])
    return sum(storage.nbytes() for storage in kept.values()), gradients


@pytest.mark.parametrize("bias", [False, True])
def test_with_transformer_engine_selective_recomputation_is_of_the_mlp(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's, here with our own layers: the same gradients, and the bytes that are counted."""
    architecture = dataclasses.replace(ARCHITECTURE, bias=bias)
    configure = gpt.transformer_config

    def as_with_transformer_engine(*args: Any) -> TransformerConfig:
        config = configure(*args)
        assert config.recompute_modules == ([] if config.recompute_granularity else ["core_attn"])
        return dataclasses.replace(config, recompute_modules=["mlp"])

    ids = torch.randint(0, 53, (2, 40), generator=torch.Generator().manual_seed(1))
    results: dict[str | None, tuple[int, torch.Tensor]] = {}
    counted: dict[str | None, int] = {}
    with single_process():
        monkeypatch.setattr(gpt, "transformer_config", as_with_transformer_engine)
        for granularity in (None, "selective"):
            torch.manual_seed(2)
            config = {"optim": {"name": "fused_adam"}, "activations_checkpoint_granularity": granularity}
            model = build_model(architecture, config, torch.float32)
            assert all(parameter.is_leaf for parameter in model.gpt.parameters())
            results[granularity] = saved_bytes(model, ids)
            counted[granularity] = KeptPasses(model, "auto", 2)._bytes_per_token()
    (kept, gradients), (kept_less, others) = results.values()
    assert torch.equal(gradients, others) and gradients.abs().max() > 0
    assert counted["selective"] == activation_bytes(ARCHITECTURE, 4, "selective", recomputes_mlp=True)
    # Our norms come before the MLP, Transformer Engine's are part of it: here what they compute is kept all the same.
    norms = 4 * ARCHITECTURE.num_layers * ARCHITECTURE.hidden_size
    if not bias:
        assert kept - kept_less == 2 * 39 * (counted[None] - counted["selective"] - norms)


@pytest.mark.usefixtures("uncached")
def test_what_is_recomputed_depends_on_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(gpt, "LayerConfig", lambda **options: asked.append(options))
    with single_process() as layout:
        for is_te in (False, True):
            monkeypatch.setattr(gpt, "uses_transformer_engine", lambda *_, is_te=is_te: is_te)
            model_cfg = {"activations_checkpoint_granularity": "selective"}
            gpt.transformer_config(ARCHITECTURE, model_cfg, torch.bfloat16, layout)
    assert [options["recompute_modules"] for options in asked] == [[], ["mlp"]]
    assert [options["apply_rope_fusion"] for options in asked] == [False, True]
