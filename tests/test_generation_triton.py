"""The engine's kernels for GPUs, without one: interpreted, and compiled for the GPUs there are."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_models import architecture
from triton_without_gpu import check_machine_code, compiled_kernels

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.embedded import choose_operations
from nemo_style_aligner.engine.embedded.decode_graphs import _batch as inputs_of_graph
from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.torch_operations import Batch, ExpertMatrices, HeadWeights, TorchOperations
from nemo_style_aligner.engine.native import with_triton

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NOT TESTED: kernels for GPUs need Triton (pip install triton)"
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["experts", pytest.param("kernels", marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_interpreted_kernels_are_right(name: str, tmp_path: Path) -> None:
    """Those of experts; all, and engines with them."""
    script = Path(__file__).with_name(f"interpreted_{name}.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert output.stdout.endswith("equal\n"), output.stdout + output.stderr


def architecture_of(hidden: int, heads: int, groups: int, channels: int, **features: Any) -> ModelArchitecture:
    return ModelArchitecture(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        vocab_size=8,
        **features,
    )


LLAMA = architecture_of(4096, 32, 8, 128)
BIASED = architecture_of(1152, 16, 1, 256, normalization="layernorm", activation="gelu", bias=True)
NORMED_HEADS = architecture_of(2048, 16, 8, 64, qk_layernorm=True, rotary_percentage=0.5)
OLMO = architecture_of(4096, 32, 32, 128, qk_layernorm=True, qk_norm_over_heads=True, layer_norms="after")
GEMMA = architecture_of(2304, 8, 4, 192, normalization="rmsnorm1p", layer_norms="both", attn_logit_softcapping=50.0)
GPT_OSS = architecture_of(2880, 64, 8, 64, bias=True, clamped_swiglu=True,
                          experts=Experts(number=8, per_token=2, ffn_hidden_size=2880))  # fmt: skip
MIXTURE = architecture_of(3072, 32, 4, 96, experts=Experts(number=8, per_token=2, ffn_hidden_size=768))


def compute(operations: TorchOperations, rows: int, batches: list[Batch]) -> None:
    """Call all of ``operations``, as models do."""
    a = operations.architecture
    weight = torch.empty(a.hidden_size)
    product_bias, bias = (weight.bfloat16(), weight) if a.bias else (None, None)
    hidden = torch.empty(rows, a.hidden_size)
    product_norm = (weight, bias) if a.layer_norms == "both" else None
    operations.add_and_norm(hidden, None, None, None, (weight, bias))
    operations.add_and_norm(hidden, hidden.bfloat16(), product_bias, product_norm, (weight, bias))
    operations.activate(torch.empty(rows, a.ffn_hidden_size * (2 if a.gated else 1), dtype=torch.bfloat16))
    if a.experts is not None:
        fc1, fc2 = ((torch.empty(a.hidden_size, n * a.experts.ffn_hidden_size).bfloat16(),) * 8 for n in (2, 1))
        matrices = ExpertMatrices(fc1, fc2)
        if a.bias:
            matrices = ExpertMatrices(fc1, fc2, (hidden[0].bfloat16(),) * 8, (hidden[0].bfloat16(),) * 8)
        for tokens in (rows, 40 * rows):
            chosen = torch.zeros(tokens, a.experts.per_token, dtype=torch.int64)
            operations.route(torch.empty(tokens, 8), None)
            operations.experts(hidden.bfloat16().repeat(tokens // rows, 1), chosen, chosen.float(), matrices)
    norms = (torch.empty(a.qk_norm_sizes[0]), torch.empty(a.qk_norm_sizes[1])) if a.qk_layernorm else None
    for batch in batches:
        size = (len(batch.positions), operations.groups * (operations.heads + 2) * a.kv_channels)
        qkv = torch.empty(size, dtype=torch.bfloat16)
        operations.attention_of(batch)(qkv, HeadWeights(norms), qkv, a.layers[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "architectures"),
    [(80, [MIXTURE, OLMO]), (90, [LLAMA, BIASED, NORMED_HEADS, GEMMA, MIXTURE]), (100, [LLAMA, GPT_OSS])],
)
def test_kernels_compile(
    capability: int, architectures: list[ModelArchitecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code; once for a model and no more, whatever the sizes of passes and the places of inputs."""
    from nemo_style_aligner.engine.embedded import paged_attention, triton_experts, triton_operations

    names = {
        paged_attention: ("attend", "add_parts"),
        triton_operations: ("add_and_norm", "activate", "rotate_and_store"),
        triton_experts: ("choose_experts", "sort_by_expert", "multiply_by_experts", "add_experts"),
    }
    kernels = compiled_kernels(monkeypatch, capability, tmp_path, names)
    for a in architectures:
        shape = EngineShape(a, torch.bfloat16, num_slots=4, max_sequence_length=64, num_pages=8, max_step_tokens=8)
        operations = triton_operations.TritonOperations(shape, CPU, num_processors=108)
        before = {name: len(kernel.variants()) for name, kernel in kernels.items()}
        compute(
            operations, 5, [choose_operations.example(num_pages, 120, CPU) for num_pages in (4, 80)]
        )  # as when it is built
        made = {name: len(kernel.variants()) - before[name] for name, kernel in kernels.items()}
        expected = {"attend": 3, "add_parts": 1, "add_and_norm": 2, "activate": 1, "rotate_and_store": 1}
        of_experts = {"choose_experts": 1, "sort_by_expert": 2, "multiply_by_experts": 4, "add_experts": 1}
        assert made == expected | (of_experts if a.experts is not None else dict.fromkeys(of_experts, 0))
        for rows in (1, 16, 131):
            graphs = [inputs_of_graph(torch.zeros(rows, 2 + pages, dtype=torch.int32)) for pages in (1, 5, 16, 300)]
            compute(operations, rows, graphs)
        assert made == {name: len(kernel.variants()) - before[name] for name, kernel in kernels.items()}

    for name, kernel in kernels.items():
        for compiled in kernel.variants():
            check_machine_code(compiled, tmp_path)
            if name in ("attend", "multiply_by_experts"):  # on tensor cores
                assert re.search(r"\b(wg)?mma|tcgen05\.mma", compiled.asm["ptx"])


@pytest.mark.parametrize("installed", [True, False])
def test_without_the_kernels_torch_computes(
    installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason; the log has it. In fp32 they are not asked for."""
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def broken(device: Any) -> Any:
        raise RuntimeError("no driver")

    made: list[TorchOperations] = []

    def of_torch(shape: EngineShape, device: torch.device) -> TorchOperations:
        assert device.type == "cuda"
        made.append(TorchOperations(shape, CPU))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    monkeypatch.setattr(choose_operations, "TorchOperations", of_torch)
    with_triton._warn.cache_clear()
    size = {"num_slots": 2, "max_sequence_length": 32, "num_pages": 4, "max_step_tokens": 8}
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.float32, torch.bfloat16):
            shape = EngineShape(architecture(), dtype, **size)
            assert choose_operations.choose_operations(shape, torch.device("cuda", 0)) is made[-1]
        monkeypatch.setattr(choose_operations, "_KNOWN", choose_operations._KNOWN - {"qk_norm_over_heads"})
        unknown = dataclasses.replace(shape, architecture=architecture("olmo2"))
        assert choose_operations.choose_operations(unknown, torch.device("cuda", 0)) is made[-1]
    record, other = caplog.records
    assert "they have no qk_norm_over_heads" in other.getMessage()
    assert ("no driver" if installed else "Triton is not installed") in record.getMessage()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("broken")])
def test_errors_of_the_gpu_are_not_taken_for_errors_of_the_kernels(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choose_operations, "check", failing)
    monkeypatch.setattr(choose_operations, "TorchOperations", None)
    monkeypatch.setattr("nemo_style_aligner.engine.embedded.triton_operations.TritonOperations", failing)
    shape = EngineShape(
        architecture(), torch.bfloat16, num_slots=2, max_sequence_length=32, num_pages=4, max_step_tokens=8
    )
    with pytest.raises(type(error)):
        choose_operations.choose_operations(shape, torch.device("cuda", 0))
    assert not caplog.records
