"""TensorRT-LLM itself, on a GPU. Skipped, with the reason, wherever something of that is missing.

Nobody has run these tests yet (docs/tensorrt_llm.md). They need a machine with a GPU and TRTLLM_SIDECAR_PYTHON, the
python of an environment with tensorrt-llm 1.2 or later.

    pytest tests/test_trtllm_hardware.py -rs
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_models import EOS, architecture, hf_logits, hf_model, ragged_requests, weights_of

from nemo_style_aligner.engine.contract import GenerationEngine, SamplingParams
from nemo_style_aligner.engine.trtllm.sidecar.process import sidecar_environment
from nemo_style_aligner.engine.trtllm.sidecar_engine import SidecarEngine, SidecarSettings, ipc_handles
from nemo_style_aligner.trainer.rl.rollouts.trtllm import TensorRTLLMMismatch, TensorRTLLMUnavailable, find_trtllm

pytestmark = pytest.mark.gpu

SIDECAR_PYTHON = os.environ.get("TRTLLM_SIDECAR_PYTHON")


def _missing() -> str | None:
    """Why TensorRT-LLM cannot be tested here."""
    if SIDECAR_PYTHON is None:
        return "NOT TESTED: TensorRT-LLM needs TRTLLM_SIDECAR_PYTHON, the python that has it"
    try:
        find_trtllm(SIDECAR_PYTHON)
    except (TensorRTLLMUnavailable, TensorRTLLMMismatch) as reason:
        return f"NOT TESTED: {reason}"
    return None


def _cuda_weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda", dtype) for name, tensor in weights_of(hf_model(seed=seed)).items()}


def _check(engine: GenerationEngine, steps: int = 3) -> None:
    """Refit with several models: greedy tokens and log-probs are those of the model (bf16: nearly)."""
    greedy = SamplingParams(max_new_tokens=12, use_greedy=True)
    for version in range(steps):
        model = hf_model(seed=version)
        engine.refit(_cuda_weights(version).items(), version)
        for result in engine.generate(ragged_requests(8, longest=40), greedy):
            logits = hf_logits(model, result.prompt_token_ids, result.token_ids)
            chosen = torch.tensor(result.token_ids)
            gap = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
            assert gap.max() < 0.25  # a near tie may fall the other way in bf16
            expected = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
            assert torch.tensor(result.logprobs) == pytest.approx(expected, abs=0.15)
            assert result.finish_reason == ("stop" if result.token_ids[-1] == EOS else "length")
            assert result.weight_version == version
    hot = SamplingParams(max_new_tokens=12, temperature=1.3, min_new_tokens=2)
    model = hf_model(seed=steps - 1)
    for result in engine.generate(ragged_requests(8, longest=40), hot):
        logits = hf_logits(model, result.prompt_token_ids, result.token_ids) / 1.3
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert torch.tensor(result.logprobs) == pytest.approx(expected, abs=0.15)
        assert EOS not in result.token_ids[:2]


# ---- with TensorRT-LLM ----------------------------------------------------------------------------


@pytest.fixture
def sidecar_engine() -> Iterator[SidecarEngine]:
    settings = SidecarSettings(
        python=SIDECAR_PYTHON or sys.executable,
        environment=sidecar_environment(os.environ, ["0"]),
        device_uuids=(f"GPU-{torch.cuda.get_device_properties(0).uuid}",),
        sleep=True,
        kv_cache_memory_fraction=0.2,
        bucket_bytes=100_000,
        start_seconds=900,
        refit_seconds=120,
        request_seconds=120,
    )
    engine = SidecarEngine(
        architecture(),
        settings,
        dtype=torch.bfloat16,
        num_slots=4,
        max_sequence_length=160,
        eos_id=EOS,
    )
    engine.build()
    yield engine
    engine.close()


@pytest.mark.trtllm
@pytest.mark.skipif(_missing() is not None, reason=_missing() or "")
def test_sidecar_refits_and_sleeps(sidecar_engine: SidecarEngine) -> None:
    _check(sidecar_engine)
    awake = torch.cuda.mem_get_info()[0]
    sidecar_engine.unload()
    assert torch.cuda.mem_get_info()[0] > awake
    sidecar_engine.reload()
    _check(sidecar_engine, steps=1)


# ---- CUDA IPC, without TensorRT-LLM ----------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: CUDA IPC needs a CUDA device")
def test_another_process_reads_a_bucket_through_its_handles() -> None:
    """What TensorRT-LLM's worker does with `ipc_handles`, in a plain process."""
    flat = torch.arange(1000, dtype=torch.float32, device="cuda")
    bucket = [("a", flat[10:20].view(2, 5)), ("b", flat[500:])]
    torch.cuda.synchronize()
    program = textwrap.dedent(
        """
        import base64, pickle, sys, torch
        torch.cuda.init()
        for name, (function, arguments) in pickle.loads(base64.b64decode(sys.stdin.read())):
            arguments = list(arguments)
            arguments[6] = 0
            print(name, function(*arguments).sum().item())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=ipc_handles(bucket), capture_output=True, text=True, timeout=120
    )
    values: dict[str, Any] = dict(line.split() for line in done.stdout.splitlines())
    assert {name: float(value) for name, value in values.items()} == {
        name: tensor.sum().item() for name, tensor in bucket
    }, done.stderr
