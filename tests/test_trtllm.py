"""Choosing TensorRT-LLM, weight streams, and the record of signatures itself."""

from __future__ import annotations

import ast
import base64
import inspect
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_standins
from generation_models import architecture, hf_model, weights_of
from omegaconf import OmegaConf
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM
from trtllm_standins import Standins, differences, signature_of

import nemo_style_aligner
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.trtllm import sidecar_engine
from nemo_style_aligner.engine.trtllm.sidecar_engine import buckets
from nemo_style_aligner.engine.weights.huggingface import write_checkpoint
from nemo_style_aligner.engine.weights.layout import checked_stream, hf_tensors, weight_layout
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.rl.rollouts import trtllm as construct
from nemo_style_aligner.trainer.rl.rollouts.setup import choose_engine
from nemo_style_aligner.trainer.rl.rollouts.trtllm import (
    PIN,
    Installation,
    TensorRTLLMMismatch,
    TensorRTLLMUnavailable,
    find_trtllm,
)

# ---- which TensorRT-LLM ---------------------------------------------------------------------------


def _config(**changes: Any) -> PPOActor:
    cfg = load_defaults("gpt_ppo_actor")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return PPOActor.read(cfg)


def _installed(monkeypatch: pytest.MonkeyPatch, own: str | None, elsewhere: str | None = None) -> None:
    monkeypatch.setattr(construct, "installed_version", lambda python=None: elsewhere if python else own)
    monkeypatch.setattr(construct.torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    "sidecar, found",
    [(None, Installation("1.2.1+cu13", sys.executable)), ("/env/python", Installation("1.4.0rc1", "/env/python"))],
)
def test_the_sidecars_python_is_looked_at(
    sidecar: str | None, found: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, "1.2.1+cu13", "1.4.0rc1")
    assert find_trtllm(sidecar) == found


@pytest.mark.parametrize(
    "own, error, text",
    [
        (None, TensorRTLLMUnavailable, r"not installed.*python -m pip install --pre .*tensorrt-llm==1\.3\.0rc24"),
        ("1.1.0", TensorRTLLMMismatch, r"1\.1\.0 is installed.*from 1\.2\.0 on.*tensorrt-llm==1\.3\.0rc24"),
        ("unknown", TensorRTLLMMismatch, "'unknown', which is not a valid one"),
    ],
)
def test_a_missing_or_wrong_version_names_the_command(
    own: str | None, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, own)
    with pytest.raises(error, match=text):
        find_trtllm(None)


def test_another_python_is_asked_for_its_version(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    assert construct.installed_version(str(python)) is None
    metadata = tmp_path / "tensorrt_llm-1.3.0rc24.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.3.0rc24\n")
    assert construct.installed_version(str(python)) == "1.3.0rc24"
    with pytest.raises(TensorRTLLMUnavailable, match=r"sidecar_python=/nowhere/python cannot be run"):
        construct.installed_version("/nowhere/python")
    python.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(TensorRTLLMUnavailable, match=r"status 3.*broken"):
        construct.installed_version(str(python))


def test_enable_means_the_embedded_engine_where_there_is_no_tensorrt_llm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_engine(_config(trainer__ppo__trt_llm__enable=True).trainer.ppo) == "embedded"
    assert "TensorRT-LLM is not installed" in caplog.text and "embedded engine is used" in caplog.text
    assert choose_engine(_config().trainer.ppo) == "embedded"


def test_asking_for_it_by_name_is_an_error_without_it() -> None:
    with pytest.raises(RuntimeError, match=r"pip install .*tensorrt-llm==1\.3\.0rc24"):
        choose_engine(_config(trainer__ppo__generation__engine="trtllm").trainer.ppo)


def test_where_it_is_installed_enable_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = _config(trainer__ppo__trt_llm__enable=True).trainer.ppo
    with monkeypatch.context() as without_gpu:
        _installed(without_gpu, PIN)
        without_gpu.setattr(construct.torch.cuda, "is_available", lambda: False)
        assert choose_engine(enabled) == "embedded"
    _installed(monkeypatch, PIN)
    assert choose_engine(enabled) == "trtllm"
    _installed(monkeypatch, "0.13.0")
    with pytest.raises(TensorRTLLMMismatch):
        choose_engine(enabled)


def test_an_engine_comes_out_of_the_actors_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(trainer__ppo__trt_llm__unload_engine_train=True)
    with single_process():
        model = build_model(architecture(), {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)

        def engine(config: PPOActor = config) -> sidecar_engine.SidecarEngine:
            options = {"num_slots": 3, "max_sequence_length": 160, "eos_id": 1}
            penalty = config.model.ppo.sampling_params.repetition_penalty
            return construct.trtllm_engine(config.trainer.ppo, penalty, model, EngineGroup(), **options)

        _installed(monkeypatch, "1.2.1")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for key, value in (
            ("trainer.ppo.policy_logprobs", "engine"),
            ("trainer.ppo.importance_weight_cap", 2.0),
            ("model.ppo.sampling_params.repetition_penalty", 1.2),
        ):
            with pytest.raises(ValueError, match=key.rpartition(".")[2]):
                engine(config.changed({key: value}))
        with monkeypatch.context() as allocator, pytest.raises(ValueError, match="expandable segments"):
            allocator.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            engine()
        with monkeypatch.context() as two, pytest.raises(ValueError, match=r"see their GPUs as 0, 0.*srun"):
            two.setattr(
                EngineGroup,
                "gather",
                lambda self, own: [own, (own[0], "another")] if isinstance(own, tuple) else [own],
            )
            engine()
        settings = engine()._settings
    assert settings.device_uuids == ("GPU-12-34",) and settings.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert settings.sleep and settings.bucket_bytes == 512 * 2**20 and settings.start_seconds == 1800
    assert settings.python == sys.executable


def test_nothing_of_tensorrt_llm_is_imported_before_an_engine_is_made() -> None:
    """It takes minutes, and may start MPI: only functions of the sidecar's program import it."""
    for path in Path(nemo_style_aligner.__file__).parent.rglob("*.py"):
        if "import tensorrt" not in (text := path.read_text()) and "from tensorrt" not in text:
            continue
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {inner for function in functions for inner in ast.walk(function)}
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("tensorrt") for name in names):
                assert node in inside and path.name == "trtllm_sidecar.py", path


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
    for _, tensor in stream:  # what a transient stream does next
        tensor.fill_(1.0)
    assert not any(tensor.any() for bucket in found for _, tensor in bucket)


def test_handles_are_those_that_every_version_of_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch of TensorRT-LLM refuses a later version than its own, but takes a handle without a version."""
    plain = bytes(range(64))
    given = {64: plain, 65: b"\x02c" + plain, 66: b"\x03c" + plain, 67: b"\x03e" + plain}

    def reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = given[len(tensor)]
        middle = (torch.storage.TypedStorage, tensor.dtype, 0, handle, 256, 512, False, b"counter", 0, b"event", True)
        return rebuild_cuda_tensor, (torch.Tensor, tensor.size(), tensor.stride(), 0, *middle)

    monkeypatch.setattr(sidecar_engine, "reduce_tensor", reduced)
    encoded = sidecar_engine.ipc_handles([(str(size), torch.zeros(size)) for size in given])
    found = pickle.loads(base64.b64decode(encoded))
    assert [(name, function) for name, (function, _) in found] == [(str(size), rebuild_cuda_tensor) for size in given]
    assert [arguments[7] for _, (_, arguments) in found] == [plain, plain, plain, given[67]]
    assert all(arguments[8:] == reduced(torch.zeros(64))[1][8:] for _, (_, arguments) in found)
    assert inspect.getfullargspec(rebuild_cuda_tensor).args[7] == "storage_handle"


def test_a_checked_stream_is_lazy_and_complete() -> None:
    expected = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(architecture())).items()}
    weights = weights_of(hf_model())
    assert [name for name, _ in checked_stream(weights.items(), expected)] == list(weights)
    missing = [(name, tensor) for name, tensor in weights.items() if "mlp" not in name]
    with pytest.raises(ValueError, match=r"lacks .*mlp.* and 4 more"):
        list(checked_stream(missing, expected))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "nemotron"])
def test_what_the_sidecar_gets_is_a_hugging_face_model(family: str, tmp_path: Path) -> None:
    """config.json as the sidecar reads it, and the tensors it is given: the same logits as the reference."""
    a, model = architecture(family), hf_model(family)
    handed_over: dict[str, torch.Tensor] = {}
    shapes = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(a)).items()}
    for bucket in buckets(checked_stream(weights_of(model).items(), shapes), most_bytes=20_000):
        handed_over |= dict(bucket)
    write_checkpoint(tmp_path / "model", a, handed_over.items())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model").float().eval()
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


# ---- the record -----------------------------------------------------------------------------------


def test_every_recorded_signature_has_a_source_and_parses() -> None:
    for symbol, entry in trtllm_standins.load_symbols().items():
        source = entry["source"]
        assert "url" in source or "repository" in source, symbol
        assert "url" in source or "commit" in source or "note" in source or "note" in entry, symbol
        if "def" in entry:
            signature_of(entry["def"])


def test_standins_refuse_what_the_signatures_refuse() -> None:
    standins = Standins()
    asynchronous: Any = standins.modules["tensorrt_llm._torch.async_llm"]
    asynchronous.AsyncLLM(model="m", dtype="bfloat16")
    (call,) = standins.named("tensorrt_llm._torch.async_llm:AsyncLLM")
    assert call["model"] == "m" and call["dtype"] == "bfloat16"
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        asynchronous.AsyncLLM(model="m", gpu_memory_utilization=0.5)


def test_the_record_can_be_compared_with_a_wheel(tmp_path: Path) -> None:
    folder = tmp_path / "tensorrt_llm" / "llmapi"
    folder.mkdir(parents=True)
    (folder / "rlhf_utils.py").write_text("class WorkerExtension:\n def update_weights(self, buckets): ...\n")
    found = differences(tmp_path)
    assert any("WorkerExtension.update_weights" in line and "buckets" in line for line in found)
    assert any("AsyncLLM" in line and "not found" in line for line in found)
