"""Choosing TensorRT-LLM, weight streams, and the record of signatures itself."""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trtllm_standins
from generation_models import architecture, hf_model, weights_of
from omegaconf import DictConfig, OmegaConf
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM
from trtllm_standins import MANIFEST, Standins, differences, signature_of

from nemo_style_aligner.config import load_defaults
from nemo_style_aligner.generation.trtllm import construct, streams, versions
from nemo_style_aligner.generation.trtllm.streams import buckets
from nemo_style_aligner.generation.trtllm.versions import (
    Backend,
    Installation,
    TensorRTLLMMismatch,
    TensorRTLLMUnavailable,
    find_installation,
)
from nemo_style_aligner.rl.rollouts.engine_setup import choose_engine
from nemo_style_aligner.weights.checked import checked
from nemo_style_aligner.weights.huggingface import write_checkpoint
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

# ---- which TensorRT-LLM ---------------------------------------------------------------------------


def _installed(monkeypatch: pytest.MonkeyPatch, own: str | None, elsewhere: str | None = None) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda python=None: elsewhere if python else own)


@pytest.mark.parametrize(
    "own, backend, sidecar, found",
    [
        ("1.2.1", None, None, ("engine", "1.2.1")),
        ("1.0.0", "engine", None, ("engine", "1.0.0")),
        ("1.2.1+cu13", None, None, ("engine", "1.2.1+cu13")),
        ("1.2.1+cu13", "engine", None, ("engine", "1.2.1+cu13")),
        ("1.2.1", "pytorch", None, ("pytorch", "1.2.1")),
        ("1.3.0rc24", None, None, ("pytorch", "1.3.0rc24")),
        ("1.2.1", None, "/env/python", ("pytorch", "1.4.0rc1")),
        (None, None, "/env/python", ("pytorch", "1.4.0rc1")),
        ("1.2.1", "engine", "/env/python", ("engine", "1.2.1")),
    ],
)
def test_the_backend_follows_what_is_installed(
    own: str | None,
    backend: Backend | None,
    sidecar: str | None,
    found: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _installed(monkeypatch, own, "1.4.0rc1")
    installation = find_installation(backend, sidecar)
    assert (installation.backend, installation.version) == found
    assert installation.python == (sidecar if sidecar and found[0] == "pytorch" else sys.executable)


@pytest.mark.parametrize(
    "own, backend, error, text",
    [
        (None, None, TensorRTLLMUnavailable, r"pip install .*tensorrt-llm==1\.2\.1"),
        (None, "pytorch", TensorRTLLMUnavailable, r"pip install --pre .*tensorrt-llm==1\.3\.0rc24"),
        ("1.3.0rc24", "engine", TensorRTLLMMismatch, r"1\.3\.0rc24 is installed.*to 1\.2\.1.*tensorrt-llm==1\.2\.1"),
        ("0.13.0", None, TensorRTLLMMismatch, r"0\.13\.0 is installed.*from 1\.0\.0.*tensorrt-llm==1\.2\.1"),
        ("1.1.0", "pytorch", TensorRTLLMMismatch, r"1\.1\.0 is installed.*from 1\.2\.0 on.*tensorrt-llm==1\.3\.0rc24"),
        ("unknown", None, TensorRTLLMMismatch, "'unknown', which is not a valid one"),
    ],
)
def test_a_missing_or_wrong_version_names_the_command(
    own: str | None, backend: Backend | None, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, own)
    with pytest.raises(error, match=text):
        find_installation(backend, None)


def test_another_python_is_asked_for_its_version(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    assert versions.installed_version(str(python)) is None
    metadata = tmp_path / "tensorrt_llm-1.3.0rc24.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.3.0rc24\n")
    assert versions.installed_version(str(python)) == "1.3.0rc24"
    with pytest.raises(TensorRTLLMUnavailable, match=r"sidecar_python=/nowhere/python cannot be run"):
        versions.installed_version("/nowhere/python")
    python.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(TensorRTLLMUnavailable, match=r"status 3.*broken"):
        versions.installed_version(str(python))


def _config(**changes: Any) -> DictConfig:
    cfg = load_defaults("gpt_ppo_actor")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


def test_enable_means_the_embedded_engine_where_there_is_no_tensorrt_llm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_engine(_config(trainer__ppo__trt_llm__enable=True)) == "embedded"
    assert "TensorRT-LLM is not installed" in caplog.text and "embedded engine is used" in caplog.text
    assert choose_engine(_config()) == "embedded"
    assert choose_engine(_config(trainer__ppo__generation__engine="megatron")) == "megatron"


def test_asking_for_it_by_name_is_an_error_without_it() -> None:
    with pytest.raises(RuntimeError, match=r"pip install .*tensorrt-llm==1\.2\.1"):
        choose_engine(_config(trainer__ppo__generation__engine="trtllm"))


def test_where_it_is_installed_enable_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "1.2.1")
    enabled = _config(trainer__ppo__trt_llm__enable=True)
    assert choose_engine(enabled) == "embedded"  # installed, but there is no GPU here
    monkeypatch.setattr(construct.torch.cuda, "is_available", lambda: True)
    assert choose_engine(enabled) == "trtllm"
    assert construct.find_trtllm(enabled) == Installation("engine", "1.2.1", sys.executable)
    _installed(monkeypatch, "0.13.0")
    with pytest.raises(TensorRTLLMMismatch):
        choose_engine(enabled)


def test_nothing_of_tensorrt_llm_is_imported_before_an_engine_is_made(tmp_path: Path) -> None:
    """It takes minutes, and may start MPI: scripts and their modules do without."""
    for name in ("tensorrt", "tensorrt_llm", "tensorrt_bindings"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    code = """
import importlib, pkgutil, nemo_style_aligner
for module in pkgutil.walk_packages(nemo_style_aligner.__path__, "nemo_style_aligner."):
    importlib.import_module(module.name)
print("done")
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert out.stdout.split() == ["done"], out.stderr


def test_devices_must_be_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert construct._visible_device(1) == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert construct._visible_device(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    with pytest.raises(ValueError, match="need numbers"):
        construct._visible_device(0)


# ---- weight streams -------------------------------------------------------------------------------


def test_buckets_keep_order_and_bounds() -> None:
    stream = [(str(i), torch.zeros(size)) for i, size in enumerate((3, 4, 1, 20, 2, 2))]
    found = list(buckets(stream, most_bytes=32))
    assert [[name for name, _ in bucket] for bucket in found] == [["0", "1", "2"], ["3"], ["4", "5"]]
    assert list(buckets(iter(()), 32)) == []
    assert all(tensor is stream[int(name)][1] for bucket in found for name, tensor in bucket)  # no copies


def test_handles_are_those_that_every_version_of_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch of TensorRT-LLM refuses a later version than its own, but takes a handle without a version."""
    plain = bytes(range(64))
    given = {64: plain, 65: b"\x02c" + plain, 66: b"\x03c" + plain, 67: b"\x03e" + plain}

    def reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = given[len(tensor)]
        middle = (torch.storage.TypedStorage, tensor.dtype, 0, handle, 256, 512, False, b"counter", 0, b"event", True)
        return rebuild_cuda_tensor, (torch.Tensor, tensor.size(), tensor.stride(), 0, *middle)

    monkeypatch.setattr(streams, "reduce_tensor", reduced)
    encoded = streams.ipc_handles([(str(size), torch.zeros(size)) for size in given])
    found = pickle.loads(base64.b64decode(encoded))
    assert [(name, function) for name, (function, _) in found] == [(str(size), rebuild_cuda_tensor) for size in given]
    assert [arguments[7] for _, (_, arguments) in found] == [plain, plain, plain, given[67]]
    assert all(arguments[8:] == reduced(torch.zeros(64))[1][8:] for _, (_, arguments) in found)
    assert inspect.getfullargspec(rebuild_cuda_tensor).args[7] == "storage_handle"


def test_a_checked_stream_is_lazy_and_complete() -> None:
    expected = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(architecture())).items()}
    weights = weights_of(hf_model())
    assert [name for name, _ in checked(weights.items(), expected)] == list(weights)
    missing = [(name, tensor) for name, tensor in weights.items() if "mlp" not in name]
    with pytest.raises(ValueError, match=r"lacks .*mlp.* and 4 more"):
        list(checked(missing, expected))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "nemotron"])
def test_what_the_sidecar_gets_is_a_hugging_face_model(family: str, tmp_path: Path) -> None:
    """config.json as the sidecar reads it, and the tensors it is given: the same logits as the reference."""
    a, model = architecture(family), hf_model(family)
    handed_over: dict[str, torch.Tensor] = {}
    shapes = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(a)).items()}
    for bucket in buckets(checked(weights_of(model).items(), shapes), most_bytes=20_000):
        handed_over |= dict(bucket)
    write_checkpoint(tmp_path / "model", a, handed_over.items())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model").float().eval()
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


# ---- the record -----------------------------------------------------------------------------------


def test_every_recorded_signature_has_a_source_and_parses() -> None:
    for profile in json.loads(MANIFEST.read_text())["profiles"].values():
        for symbol, entry in profile["symbols"].items():
            source = entry["source"]
            assert "url" in source or "repository" in source, symbol
            assert "url" in source or "commit" in source or "note" in source or "note" in entry, symbol
            if "def" in entry:
                signature_of(entry["def"])


def test_standins_refuse_what_the_signatures_refuse() -> None:
    standins = Standins("engine", {"tensorrt_llm.builder:build": lambda model, build_config: "engine"})
    builder: Any = standins.modules["tensorrt_llm.builder"]
    assert builder.build(1, build_config=2) == "engine"
    assert standins.named("tensorrt_llm.builder:build") == [{"model": 1, "build_config": 2}]
    with pytest.raises(TypeError):
        builder.build(1, config=2)
    with pytest.raises(TypeError):
        builder.BuildConfig(max_output_len=3)
    with pytest.raises(AttributeError, match="no field 'gemm'"):
        standins.modules["tensorrt_llm.plugin"].PluginConfig().gemm = "auto"  # type: ignore[attr-defined]
    models: Any = standins.modules["tensorrt_llm.models"]
    with pytest.raises(TypeError, match="moe_top"):
        models.LLaMAConfig(
            architecture="x", dtype="y", hidden_size=1, num_hidden_layers=1, num_attention_heads=1, moe_top=1
        )
    with pytest.raises(TypeError, match=r"missing.*num_attention_heads"):
        models.LLaMAConfig(architecture="x", dtype="y", hidden_size=1, num_hidden_layers=1)
    asynchronous: Any = Standins("pytorch").modules["tensorrt_llm._torch.async_llm"]
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        asynchronous.AsyncLLM(model="m", gpu_memory_utilization=0.5)


def test_the_record_can_be_compared_with_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "builder.py").write_text(
        "class Engine:\n def save(self, engine_dir): ...\n @classmethod\n def from_dir(cls, folder): ...\n"
        "def build(model, build_config): ...\n"
    )
    found = differences(tmp_path)
    assert any("Engine.from_dir" in line and "folder" in line for line in found)
    assert not any("Engine.save" in line or "builder:build:" in line for line in found)
    assert trtllm_standins.load_symbols("engine").keys() >= {"tensorrt_llm.builder:build"}
