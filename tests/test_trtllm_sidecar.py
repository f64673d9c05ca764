"""The sidecar: a real process around stand-ins of TensorRT-LLM's PyTorch backend; killed, hung and refused for real."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from generation_models import EOS, VOCAB, architecture
from trtllm_fake_sidecar import (
    DIE,
    FALL_SHORT,
    HANG,
    INVALID,
    REFUSE,
    encode_bucket,
    make_package,
)

from nemo_style_aligner import activity
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams, WeightStream
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.engine.shard import EngineGroup, TensorParallel
from nemo_style_aligner.engine.trtllm import sidecar_engine
from nemo_style_aligner.engine.trtllm.sidecar.process import Sidecar, SidecarError, sidecar_environment
from nemo_style_aligner.engine.trtllm.sidecar_engine import SidecarEngine, SidecarSettings
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout

TESTS = Path(__file__).parent
GREEDY = SamplingParams(max_new_tokens=5, use_greedy=True)


def weights(step: int) -> WeightStream:
    """Whole weights that make the fake model count in steps of ``step``."""
    for name, tensor in hf_tensors(weight_layout(architecture())).items():
        yield name, torch.full(tensor.shape, float(step))


def settings_for(folder: Path, version: str = "1.3.0rc24", **changes: Any) -> SidecarSettings:
    """A sidecar with the fake package of this version; everything it does is noted in ``folder``."""
    package = folder / f"package-{version}"
    if not package.exists():
        make_package(package, version)
    environment = sidecar_environment(os.environ, ["0"])
    environment |= {
        "PYTHONPATH": f"{package}:{TESTS}",
        "STANDIN_DIR": str(folder),
        "STANDIN_DEVICES": "GPU-a",
        "OMP_NUM_THREADS": "1",
    }
    settings = SidecarSettings(
        python=sys.executable,
        environment=environment,
        device_uuids=("GPU-a",),
        sleep=False,
        kv_cache_memory_fraction=0.3,
        bucket_bytes=20_000,
        start_seconds=60,
        refit_seconds=30,
        request_seconds=30,
    )
    return dataclasses.replace(settings, **changes)


def engine_for(settings: SidecarSettings, **options: Any) -> SidecarEngine:
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS} | options
    engine = SidecarEngine(architecture(), settings, dtype=torch.bfloat16, make_handles=encode_bucket, **options)
    engine.build()
    return engine


def calls(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [arguments for name, arguments in lines if name == what]


def generate(engine: SidecarEngine, *prompts: list[int], params: SamplingParams = GREEDY) -> list[GenerationResult]:
    requests = [GenerationRequest(i, prompt, seed=i) for i, prompt in enumerate(prompts)]
    return sorted(engine.generate(iter(requests), params), key=lambda result: result.request_id)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SidecarEngine, Path]]:
    """One sidecar for the tests that leave it alive."""
    folder = tmp_path_factory.mktemp("sidecar")
    engine = engine_for(settings_for(folder), detokenize=lambda ids: "".join(f"<{i}>" for i in ids), vocab_limit=80)
    engine.refit(weights(3), version=1)
    yield engine, folder
    engine.close()


# ---- what is asked of TensorRT-LLM ----------------------------------------------------------------


def test_start_loads_a_config_without_weights(shared: tuple[SidecarEngine, Path]) -> None:
    engine, folder = shared
    (options,) = calls(folder, "AsyncLLM")
    assert options["load_format"] == "dummy" and options["skip_tokenizer_init"] and options["dtype"] == "bfloat16"
    assert options["allreduce_strategy"] == "NCCL" and options["max_batch_size"] == 4 and options["max_seq_len"] == 64
    assert options["max_num_tokens"] == 8192 and options["tensor_parallel_size"] == 1
    assert options["kv_cache_config"]["free_gpu_memory_fraction"] == 0.3
    assert "sleep_config" not in options and "enable_sleep" not in options
    assert engine.num_compilations == 1
    assert engine._sidecar is not None
    config = json.loads((engine._sidecar.folder / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 3
    assert (engine._sidecar.folder.stat().st_mode & 0o777) == 0o700


def test_a_refit_hands_over_every_tensor_once_in_buckets(shared: tuple[SidecarEngine, Path]) -> None:
    engine, folder = shared
    before = len(calls(folder, "bucket"))
    engine.refit(weights(3), version=2)
    buckets = [bucket["names"] for bucket in calls(folder, "bucket")[before:]]
    expected = list(hf_tensors(weight_layout(architecture())))
    assert len(buckets) > 3 and [name for bucket in buckets for name in bucket] == expected
    assert calls(folder, "finish")[-1]["names"] == sorted(expected)
    assert engine.weight_version == 2 and engine.num_compilations == 1


def test_responses_and_their_sampling_parameters(shared: tuple[SidecarEngine, Path]) -> None:
    engine, folder = shared
    params = SamplingParams(max_new_tokens=5, temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.1, seed=3)
    results = generate(engine, [10, 20], [11, 30], [12, 40], [13, 50], [14, 60], [15, 61], params=params)
    assert [r.token_ids for r in results][:2] == [[23, 26, 29, 32, 35], [33, 36, 39, 42, 45]]
    assert results[0].logprobs == [-0.23, -0.26, -0.29, -0.32, -0.35]
    assert {r.weight_version for r in results} == {engine.weight_version}
    assert {r.finish_reason for r in results} == {"length"}
    assert engine.statistics.generated_tokens == 30
    sampling = calls(folder, "generate")[-1]["sampling"]
    assert sampling["end_id"] == sampling["pad_id"] == -1 and sampling["stop_token_ids"] == [EOS]
    assert sampling["include_stop_str_in_output"] and not sampling["detokenize"] and sampling["logprobs"] == 1
    wanted = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.1, "max_tokens": 5}
    assert {key: sampling[key] for key in wanted} == wanted
    assert len({call["sampling"]["seed"] for call in calls(folder, "generate")[-6:]}) == 6


def test_what_the_other_engine_does_not_do_is_named(shared: tuple[SidecarEngine, Path]) -> None:
    params = SamplingParams(max_new_tokens=5, min_p=0.1, logit_bias=((3, 1.0),), top_k=4)
    with pytest.raises(ValueError, match="logit_bias, min_p: not with TensorRT-LLM"):
        generate(shared[0], [10, 20], params=params)


def test_the_stop_token_counts_and_is_held_back_below_the_minimum(shared: tuple[SidecarEngine, Path]) -> None:
    engine, folder = shared
    engine.refit(weights(1), version=3)
    (short,) = generate(engine, [10, 0])
    assert (short.token_ids, short.finish_reason, len(short.logprobs)) == ([EOS], "stop", 1)
    early = SamplingParams(max_new_tokens=4, min_new_tokens=2, use_greedy=True)
    (long,) = generate(engine, [10, 0], params=early)
    assert long.token_ids == [2, 3, 4, 5] and long.finish_reason == "length" and len(long.logprobs) == 4
    first, second = calls(folder, "generate")[-2:]
    assert first["sampling"]["max_tokens"] == 2 and first["sampling"]["stop_token_ids"] is None
    assert second["sampling"]["max_tokens"] == 2 and second["inputs"] == [10, 0, 2, 3]
    engine.refit(weights(3), version=4)


def test_requests_with_limits_of_their_own_and_no_end_of_sequence(shared: tuple[SidecarEngine, Path]) -> None:
    engine, folder = shared
    engine.refit(weights(1), version=5)
    requests = [GenerationRequest(0, [10, 0], max_new_tokens=3), GenerationRequest(1, [17, 0])]
    forced = SamplingParams(max_new_tokens=4, use_greedy=True, ignore_eos=True)
    found = {r.request_id: r.token_ids for r in engine.generate(requests, forced)}
    assert found == {0: [1, 2, 3], 1: [1, 2, 3, 4]}
    assert {call["sampling"]["stop_token_ids"] for call in calls(folder, "generate")[-2:]} == {None}
    engine.refit(weights(3), version=6)


def test_ids_the_tokenizer_does_not_know_are_held_back(shared: tuple[SidecarEngine, Path]) -> None:
    """The engine's vocab_limit is 80: after 77 comes no 80, but the first id that is allowed."""
    (result,) = generate(shared[0], [10, 77])
    assert result.token_ids == [0, 3, 6, 9, 12]


def test_a_stop_string_cuts_the_response(shared: tuple[SidecarEngine, Path]) -> None:
    engine, _ = shared
    params = SamplingParams(max_new_tokens=5, use_greedy=True, stop_strings=("<26>",))
    (result,) = generate(engine, [10, 20], params=params)
    assert result.token_ids == [23, 26] and result.finish_reason == "stop" and len(result.logprobs) == 2


@pytest.mark.parametrize(
    "first, error, text",
    [
        (INVALID, RuntimeError, "token id 5000, outside the vocabulary of 80"),
        (FALL_SHORT, RuntimeError, "stopped after 1 of max_new_tokens=5 tokens"),
        (REFUSE, SidecarError, "ValueError: no such prompt, please"),
    ],
)
def test_what_is_wrong_is_an_error_and_the_sidecar_lives(
    first: int, error: type[Exception], text: str, shared: tuple[SidecarEngine, Path]
) -> None:
    engine, _ = shared
    with pytest.raises(error, match=text):
        generate(engine, [first, 5])
    assert generate(engine, [10, 20])[0].token_ids == [23, 26, 29, 32, 35]
    assert engine.num_compilations == 1


def test_requests_and_streams_that_do_not_fit(shared: tuple[SidecarEngine, Path]) -> None:
    engine, _ = shared
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        generate(engine, [VOCAB])
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        engine.refit([(name, t) for name, t in weights(3) if name != "lm_head.weight"], version=5)
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="without complete weights"):
        engine.generate([], GREEDY)
    engine.refit(weights(3), version=6)


def test_an_abandoned_generation_leaves_nothing_behind(shared: tuple[SidecarEngine, Path]) -> None:
    engine, _ = shared
    stream = engine.generate((GenerationRequest(i, [10 + i, 20]) for i in range(4)), GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert [r.token_ids[0] for r in generate(engine, [10, 20], [11, 30])] == [23, 33]


@pytest.mark.parametrize(
    "version, module, switch, weight_tags",
    [
        ("1.2.1", "tensorrt_llm._torch.async_llm", "enable_sleep", ["model"]),
        ("1.3.0rc5", "tensorrt_llm._torch.async_llm", "enable_sleep", ["model"]),
        ("1.3.0rc24", "tensorrt_llm._torch.async_llm", "sleep_config", ["model", "model_weights"]),
        ("1.4.0rc1", "tensorrt_llm.llmapi", "sleep_config", ["model", "model_weights"]),
    ],
)
def test_sleep_and_wake_up(version: str, module: str, switch: str, weight_tags: list[str], tmp_path: Path) -> None:
    engine = engine_for(settings_for(tmp_path, version, sleep=True))
    try:
        engine.refit(weights(3), version=0)
        engine.unload()
        engine.unload()
        with pytest.raises(RuntimeError, match="reload"):
            engine.refit(weights(3), version=1)
        engine.reload()
        with pytest.raises(RuntimeError, match="without complete weights"):
            engine.generate([], GREEDY)
        engine.refit(weights(5), version=1)
        assert generate(engine, [10, 20])[0].token_ids == [25, 30, 35, 40, 45]
    finally:
        engine.close()
    (options,) = calls(tmp_path, "AsyncLLM")
    assert switch in options and options["class"] == f"{module}:AsyncLLM"
    assert options.get("cuda_graph_config", "default") == ("default" if switch == "sleep_config" else None)
    assert calls(tmp_path, "release") == [{"tags": [*weight_tags, "kv_cache"]}]
    assert calls(tmp_path, "resume") == [{"tags": weight_tags}, {"tags": ["kv_cache"]}]
    names = [json.loads(line)[0] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert names.index("release") < names.index("resume")
    ends = [name for name in names if name in ("finish", "resume")]
    assert ends[-2:] == ["finish", "resume"]  # the cache wakes up after the refit
    assert names[-1] == "shutdown"
    # What still runs is ended before weights change or go, where the version can do that.
    pauses = [name for name in names if name in ("pause", "resume_generation")]
    assert pauses == ([] if switch == "enable_sleep" else ["pause", "resume_generation"] * 2)
    if pauses:
        assert names.index("pause") < names.index("bucket") < names.index("resume_generation")
        assert names.index("release") - 1 == len(names) - 1 - names[::-1].index("pause")


@pytest.mark.parametrize("version", ["1.3.0rc24", "1.4.0rc1"])
def test_a_version_without_what_will_be_called_is_refused_at_the_start(version: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, version, sleep=True)
    changed = {**settings.environment, "STANDIN_LACKS": "release,resume"}
    with pytest.raises(SidecarError, match=rf"AsyncLLM of TensorRT-LLM {version} has no release, resume: install"):
        engine_for(dataclasses.replace(settings, environment=changed))


def test_memory_that_is_not_released_is_an_error(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "1.4.0rc1", sleep=True)
    engine = engine_for(dataclasses.replace(settings, environment={**settings.environment, "STANDIN_RELEASES": "0"}))
    try:
        engine.refit(weights(3), version=0)
        with pytest.raises(SidecarError, match=r"was to release the memory of .*'running' with \[\] released"):
            engine.unload()
    finally:
        engine.close()


# ---- death, hanging, orphans -----------------------------------------------------------------------


def test_a_death_is_an_error_in_time_that_shows_the_log(tmp_path: Path) -> None:
    engine = engine_for(settings_for(tmp_path))
    try:
        engine.refit(weights(3), version=0)
        begin = time.monotonic()
        with pytest.raises(SidecarError, match=r"(?s)is gone; it ended with status -9.*about to die"):
            generate(engine, [DIE, 20])
        assert time.monotonic() - begin < 10
    finally:
        engine.close()


def test_every_wait_has_a_limit_that_the_watchdog_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    receive = Sidecar._receive

    def noted(sidecar: Sidecar, seconds: float) -> None:
        bounds.append(activity.current().bound)
        receive(sidecar, seconds)

    monkeypatch.setattr(Sidecar, "_receive", noted)
    engine = engine_for(settings_for(tmp_path, start_seconds=70, request_seconds=1.0))
    assert engine._sidecar is not None
    pid = engine._sidecar.pid
    try:
        assert set(bounds) == {70}
        engine.refit(weights(3), version=0)
        bounds.clear()
        with pytest.raises(SidecarError, match="gave no answer within 1 s; it still runs"):
            generate(engine, [HANG, 20])
        assert set(bounds) == {1.0}
    finally:
        engine.close()
    assert not psutil.pid_exists(pid)


def test_a_sidecar_ends_with_its_parent_even_with_a_blocked_loop(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import json, sys, time
        from nemo_style_aligner.engine.trtllm.sidecar.process import Sidecar
        sidecar = Sidecar(sys.executable, json.loads(sys.argv[1]))
        sidecar.call("start", 60, model="", dtype="bfloat16", tensor_parallel_size=1, max_batch_size=1, max_seq_len=9,
                     vocab_size=96, vocab_limit=96, kv_cache_memory_fraction=0.1, sleep=False)
        sidecar.send("generate", prompt_token_ids=[90], max_new_tokens=1, min_new_tokens=0, stop_ids=[1],
                     greedy=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=0)
        time.sleep(0.5)
        print(sidecar.pid, flush=True)
        time.sleep(600)
        """
    )
    environment = json.dumps(dict(settings_for(tmp_path).environment))
    parent = subprocess.Popen(
        [sys.executable, "-c", program, environment], stdout=subprocess.PIPE, text=True, cwd=TESTS.parent
    )
    assert parent.stdout is not None
    sidecar = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([sidecar], timeout=10)
    assert gone or sidecar.status() == psutil.STATUS_ZOMBIE


def test_a_python_or_a_package_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match="cannot be started with /nowhere/python"):
        Sidecar("/nowhere/python", {})
    settings = settings_for(tmp_path)
    bare = {name: value for name, value in settings.environment.items() if name != "PYTHONPATH"}
    with pytest.raises(SidecarError, match="No module named 'tensorrt_llm'"):
        engine_for(dataclasses.replace(settings, environment=bare))


def test_what_goes_wrong_on_the_leader_reaches_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Group(EngineGroup):
        def share(self, value: Any = None) -> Any:
            told.append(value)
            return value

    def full(*_: Any) -> Sidecar:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar_engine, "Sidecar", full)
    with pytest.raises(SidecarError, match="No space left"):
        engine_for(settings_for(tmp_path), group=Group())
    assert told == [(None, "TensorRT-LLM sidecar: [Errno 28] No space left on device")]


@pytest.mark.parametrize(
    "odd, text",
    [
        (dataclasses.replace(architecture(), normalization="layernorm1p"), "Hugging Face"),
        (dataclasses.replace(architecture(), rope_scaling=RopeScaling("yarn", 2.0, 64)), "rope_type=yarn.*embedded"),
        (architecture("smollm3"), "no_rope.*embedded"),
        (architecture("granite"), "softmax_scale and residual_multiplier and embedding_multiplier.*embedded"),
        (architecture("gemma2"), "layer_norms.*attn_logit_softcapping.*embedded"),
    ],
)
def test_a_model_that_tensorrt_llm_lacks_is_an_error_of_every_rank(
    odd: ModelArchitecture, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        SidecarEngine(odd, settings_for(tmp_path), dtype=torch.bfloat16, num_slots=1, max_sequence_length=9, eos_id=EOS)


def test_a_group_speaks_over_gloo() -> None:
    """A wait in NCCL would keep the GPU busy, where the sidecar computes."""
    nccl: Any = object()
    with single_process():
        group = EngineGroup(TensorParallel(group=nccl), control=torch.distributed.new_group(backend="gloo"))
        assert group.share({"a": 1}) == {"a": 1} and group.gather(5) == [5]


def test_other_gpus_than_the_trainers_are_an_error(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, device_uuids=("GPU-b",))
    with pytest.raises(RuntimeError, match=r"\['GPU-a'\].*\['GPU-b'\].*same GPUs"):
        engine_for(settings)


def test_the_environment_hides_launcher_and_trainer() -> None:
    inherited = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "SLURM_PROCID": "1",
        "RANK": "1",
        "MASTER_ADDR": "h",
        "PYTHONPATH": "/trainer",
        "VIRTUAL_ENV": "/trainer",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "RAY_ADDRESS": "other:6379",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PATH": "/bin",
        "HOME": "/root",
    }
    child, other = sidecar_environment(inherited, ["2", "3"]), sidecar_environment(inherited, ["2", "3"])
    tokens = [environment.pop("RAY_AUTH_TOKEN") for environment in (child, other)]
    assert len(set(tokens)) == 2 and all(len(token) == 64 for token in tokens)
    assert child == {
        "PATH": "/bin",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "RAY_AUTH_MODE": "token",
        "PYTHONUNBUFFERED": "1",
    }


# ---- a tensor-parallel group -----------------------------------------------------------------------


class ThreadGroup(EngineGroup):
    """Two ranks as threads of this process."""

    def __init__(self, rank: int, boxes: list[queue.Queue[Any]]) -> None:
        super().__init__(TensorParallel(rank, 2))
        object.__setattr__(self, "boxes", boxes)

    def share(self, value: Any = None) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        boxes: list[queue.Queue[Any]] = self.boxes  # type: ignore[attr-defined]
        rank = self.tensor_parallel.rank
        boxes[rank].put(value)
        other = boxes[2 + 1 - rank].get(timeout=60) if rank else None
        if rank == 0:
            values = [boxes[0].get(timeout=60), boxes[1].get(timeout=60)]
            boxes[2].put(values)
            return values
        return list(other)


def test_the_ranks_of_a_group_stay_in_step(tmp_path: Path) -> None:
    """Both ranks pull the same requests, give handles of their own GPU and see the same responses."""
    settings = settings_for(tmp_path, device_uuids=("GPU-a", "GPU-b"))
    settings = dataclasses.replace(settings, environment={**settings.environment, "STANDIN_DEVICES": "GPU-a,GPU-b"})
    boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(3)]
    found: dict[int, list[list[int]]] = {}
    pulled: dict[int, int] = {0: 0, 1: 0}
    errors: list[Exception] = []

    def requests(rank: int) -> Iterator[GenerationRequest]:
        for i, first in enumerate((10, 11, 12, 13, 14, 15, 16)):
            pulled[rank] += 1
            yield GenerationRequest(i, [first, 20])

    def run(rank: int) -> None:
        engine = None
        try:
            group = ThreadGroup(rank, boxes)
            engine = engine_for(settings, group=group, num_slots=2)
            engine.refit(weights(3), version=0)
            found[rank] = [[r.request_id, *r.token_ids] for r in engine.generate(requests(rank), GREEDY)]
        except Exception as error:  # noqa: BLE001 (of a thread: the test shows it)
            errors.append(error)
        finally:
            if engine is not None:
                engine.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    assert not errors
    assert found[0] == found[1] and len(found[0]) == 7
    assert pulled == {0: 7, 1: 7}
    assert {tuple(tokens[1:]) for tokens in found[0]} == {(23, 26, 29, 32, 35)}
