"""The engine's attention on GPUs, without one: interpreted, and compiled for the GPUs there are."""

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

from nemo_style_aligner.generation.embedded import choose_attention
from nemo_style_aligner.generation.embedded.gathered_attention import GatheredAttention
from nemo_style_aligner.generation.embedded.step import EngineShape

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NOT TESTED: attention on GPUs needs Triton (pip install triton)"
)
SHARED_MEMORY = 101_376
"""Bytes that a block of threads may have on GPUs of compute capability 8.6, 8.9 and 12.0; others have more."""


def test_interpreted_kernels_equal_torch(tmp_path: Path) -> None:
    """Kernels, and engines with them."""
    script = Path(__file__).with_name("interpreted_attention.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert output.stdout.endswith("equal\n"), output.stdout + output.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to machine code, with the options that calls have, for heads of usual and of large size."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from nemo_style_aligner.generation.embedded import paged_attention

    calls: list[tuple[Any, list[Any], dict[str, Any]]] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: calls.append((self.kernel, list(args), options))

    for name in ("attend_kernel", "add_parts_kernel"):
        monkeypatch.setattr(paged_attention, name, Noted(getattr(paged_attention, name)))
    for groups, heads, channels in ((8, 4, 128), (1, 16, 256)):
        attention = paged_attention.PagedAttention(groups, heads, channels, num_processors=108)
        for num_pages in (4, 80):
            batch = choose_attention.example(num_pages, 120, torch.device("cpu"))
            query = torch.empty(len(batch.positions), groups, heads, channels, dtype=torch.bfloat16)
            attention.of_pass(batch)(query, query, query)
    assert len(calls) == 2 * 5  # one part, several and their sum, chunks of each batch

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
    for kernel, args, options in calls:
        values = dict(zip(kernel.arg_names, args, strict=False))
        signature = {
            name: types[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if name == "scale" else "i32"
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


class Device:
    """Says that it is a GPU."""

    type = "cuda"


@pytest.mark.parametrize("installed", [True, False])
def test_without_the_kernels_torch_attends(
    installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason; the log has it. In fp32 they are not asked for."""
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def broken(device: Any) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    size = {"num_slots": 2, "max_sequence_length": 32, "num_pages": 4, "max_step_tokens": 8}
    device: Any = Device()
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.float32, torch.bfloat16):
            shape = EngineShape(architecture(), dtype, **size)
            assert isinstance(choose_attention.choose_attention(shape, device), GatheredAttention)
    (record,) = caplog.records
    assert ("no driver" if installed else "Triton is not installed") in record.getMessage()
