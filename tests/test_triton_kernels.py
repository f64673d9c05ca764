"""The kernels of training passes for GPUs, without one: interpreted, and compiled for the GPUs there are."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_without_gpu import check_machine_code, compiled_kernels

from nemo_style_aligner.engine.native import with_triton
from nemo_style_aligner.trainer.models import gpu_kernels

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="NOT TESTED: kernels for GPUs need Triton (pip install triton)"
)

INTERPRETED = """
import os, pytest, torch
from nemo_style_aligner.trainer.models.gpu_kernels import check
from nemo_style_aligner.trainer.models.triton_kernels import TritonKernels

cpu = torch.device("cpu")
is_long = bool(os.environ.get("TEST_LONG"))
for dtype in (torch.float32, torch.bfloat16, *[torch.float16] * is_long):
    with torch.inference_mode(dtype == torch.float32):
        check(TritonKernels(), dtype, cpu)

wrong = {
    "swiglu": lambda self, x: x[:, : x.shape[1] // 2],
    "swiglu_backward": lambda self, x, grad: x,
    "rotate": lambda self, x, cos, sin, direction: x,
    "measure_logits": lambda self, logits, *_: (logits[:, 0], logits[:, 0], None),
    "logits_gradient": lambda self, *arguments: arguments[-1].zero_(),
}
for name, function in wrong.items() if is_long else [*wrong.items()][:3]:  # those found out at once
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError, match="by Triton in torch.float32"):
        patch.setattr(TritonKernels, name, function)
        check(TritonKernels(), torch.float32, cpu)

# What is not a number reaches its own row and no other.
logits = torch.randn(3, 5000)
logits[1, 4321] = torch.nan
normalizer, _, entropies = TritonKernels().measure_logits(logits, torch.zeros(3, dtype=torch.int64), 1.0, True)
assert normalizer.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
# Logits far from 0, and a row whose entropy is next to nothing.
logits = torch.full((2, 5000), -3e4)
logits[0] += torch.linspace(0, 3, 5000)
logits[1, 7] = 3e4
normalizer, at_target, entropies = TritonKernels().measure_logits(logits, torch.tensor([7, 7]), 1.0, True)
expected = torch.distributions.Categorical(logits=logits.double())
torch.testing.assert_close(normalizer.double(), logits.double().logsumexp(-1), atol=1e-3, rtol=1e-6)
torch.testing.assert_close(entropies.double(), expected.entropy(), atol=1e-3, rtol=1e-3)
print("equal")
"""


def test_interpreted_kernels_equal_torch(tmp_path: Path) -> None:
    """And a kernel that errs is found out."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert output.stdout.endswith("equal\n"), output.stdout + output.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile(capability: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to machine code; once for a model and no more, whatever the number of tokens."""
    from nemo_style_aligner.trainer.models import triton_kernels

    names = ("swiglu", "swiglu_backward", "rotate", "measure_logits", "logits_gradient")
    kernels = compiled_kernels(monkeypatch, capability, tmp_path, {triton_kernels: names})
    functions = triton_kernels.TritonKernels()
    before = {name: kernel.variants() for name, kernel in kernels.items()}  # of other dtypes
    for tokens in (1, 16, 1000, 1031):
        x = torch.empty(tokens, 2 * 8192, dtype=dtype)
        functions.swiglu_backward(x, functions.swiglu(x))
        for heads in (32, 8):
            tables = torch.empty(2, tokens, 1, 64)
            for direction in (1.0, -1.0):
                functions.rotate(torch.empty(tokens, heads, 64, dtype=dtype), *tables, direction)
        logits, numbers = torch.empty(tokens, 128256), torch.empty(tokens + 1)[1:]
        targets = torch.empty(tokens, dtype=torch.int64)
        for entropy in (False, True):
            functions.measure_logits(logits, targets, 1.0, entropy)
            functions.measure_logits(logits, targets, 0.7, entropy)
            of_entropy = (numbers, numbers) if entropy else None
            functions.logits_gradient(logits, targets, 0.7, numbers, numbers, of_entropy, logits.to(dtype))
    made = {name: [v for v in kernel.variants() if v not in before[name]] for name, kernel in kernels.items()}
    counts = {name: len(variants) for name, variants in made.items()}
    assert counts.pop("measure_logits") in (0, 2)  # logits are in fp32 anyway
    assert counts == {"swiglu": 1, "swiglu_backward": 1, "rotate": 2, "logits_gradient": 2}
    for compiled in itertools.chain(*made.values()):
        check_machine_code(compiled, tmp_path)
        assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", compiled.asm["ptx"])  # 16 bytes at a time


def test_without_the_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the reason; the log has it, once for all dtypes."""

    def broken(device: Any) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    gpu_kernels.gpu_kernels.cache_clear()
    with_triton._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            assert gpu_kernels.gpu_kernels(dtype, torch.device("cuda", 0)) is None
    gpu_kernels.gpu_kernels.cache_clear()
    (record,) = caplog.records
    assert "no driver" in record.getMessage()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), torch.AcceleratorError("broken")])
def test_errors_of_the_gpu_are_not_taken_for_errors_of_the_kernels(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", failing)
    with pytest.raises(type(error)):
        gpu_kernels.gpu_kernels(torch.bfloat16, torch.device("cuda", 0))
