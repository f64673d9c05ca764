"""The engine's kernels for GPUs, without one: interpreted, and compiled for the GPUs there are."""

from __future__ import annotations

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

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.embedded import choose_operations
from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.embedded.torch_operations import TorchOperations

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NOT TESTED: kernels for GPUs need Triton (pip install triton)"
)
SHARED_MEMORY = 101_376
"""Bytes that a block of threads may have on GPUs of compute capability 8.6, 8.9 and 12.0; others have more."""
FLOATS = ("scale", "epsilon")


def test_interpreted_kernels_equal_torch(tmp_path: Path) -> None:
    """Kernels, and engines with them."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
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


@pytest.mark.parametrize(
    ("capability", "architectures"), [(80, [LLAMA]), (90, [LLAMA, BIASED, NORMED_HEADS]), (100, [LLAMA])]
)
def test_kernels_compile(
    capability: int, architectures: list[ModelArchitecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, with the options that calls have, for models of usual and of unusual shapes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from nemo_style_aligner.generation.embedded import paged_attention, triton_operations

    calls: list[tuple[Any, list[Any], dict[str, Any]]] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: calls.append((self.kernel, list(args), options))

    kernels = {paged_attention: ["attend", "add_parts"], triton_operations: ["add_and_norm", "activate"]}
    kernels[triton_operations].append("rotate_and_store")
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, f"{name}_kernel", Noted(getattr(module, f"{name}_kernel")))
    for a in architectures:
        shape = EngineShape(a, torch.bfloat16, num_slots=4, max_sequence_length=64, num_pages=8, max_step_tokens=8)
        operations = triton_operations.TritonOperations(shape, torch.device("cpu"), num_processors=108)
        hidden, weight = torch.empty(5, a.hidden_size), torch.empty(a.hidden_size)
        biases = (weight.bfloat16(), weight) if a.bias else (None, None)
        operations.add_and_norm(hidden, None, None, weight, biases[1])
        operations.add_and_norm(hidden, hidden.bfloat16(), biases[0], weight, biases[1])
        operations.activate(hidden.bfloat16())
        for num_pages in (4, 80):
            batch = choose_operations.example(num_pages, 120, torch.device("cpu"))
            size = (len(batch.positions), operations.groups * (operations.heads + 2) * a.kv_channels)
            qkv = torch.empty(size, dtype=torch.bfloat16)
            norms = (torch.empty(a.kv_channels), torch.empty(a.kv_channels)) if a.qk_layernorm else None
            operations.attention_of(batch)(qkv, norms, qkv)
    assert len(calls) == len(architectures) * (
        3 + 7
    )  # attention: one part, several and their sum, chunks and rotations of each batch

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
    for kernel, args, options in calls:
        values = dict(zip(kernel.arg_names, args, strict=False))
        signature = {
            name: types[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if name in FLOATS else "i32"
            for name, value in values.items()
        }
        constants = {name: value for name, value in options.items() if not name.startswith("num_")}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        launch = {name: value for name, value in options.items() if name.startswith("num_")}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY
        if kernel.__name__ == "attend_kernel":  # on tensor cores
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
        made.append(TorchOperations(shape, torch.device("cpu")))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(choose_operations, "TorchOperations", of_torch)
    size = {"num_slots": 2, "max_sequence_length": 32, "num_pages": 4, "max_step_tokens": 8}
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.float32, torch.bfloat16):
            shape = EngineShape(architecture(), dtype, **size)
            assert choose_operations.choose_operations(shape, torch.device("cuda", 0)) is made[-1]
    (record,) = caplog.records
    assert ("no driver" if installed else "Triton is not installed") in record.getMessage()
