"""CUDA code paths on machines without a GPU: jobs, started as users start them, on software devices (software_cuda/).

What this shows: which tensors are where, what graphs hold, what is waited for, which collectives run on which device,
and that the numbers are the CPU's. What it cannot show is in `software_cuda/software_device.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Artefacts
from job_processes import ROOT, run, script
from test_jobs import check_exact_log, ppo_jobs

from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

TIMEOUT = 240.0
# Every operation takes its time here: few graphs, few samples.
SMALL = ("trainer.ppo.generation.num_slots=4", "model.ppo.num_rollout_samples=8", "trainer.ppo.val_check_interval=0")
SOFTWARE = ROOT / "tests" / "software_cuda"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: the software devices are NOT tested"),
    pytest.mark.skipif(
        torch.backends.cuda.is_built(),
        reason="NOT TESTED: CUDA code paths in software need torch built for the CPU, without hooks of its own",
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="NOT TESTED: CUDA code paths in software need g++"),
]


@pytest.fixture(scope="module", autouse=True)
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every process that a test starts has two devices."""
    backend = tmp_path_factory.mktemp("software_cuda") / "backend.so"
    torch_root = Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(SOFTWARE / "backend.cpp"), "-o", str(backend)),
            *(f"-I{torch_root / 'include'}", f"-L{torch_root / 'lib'}", f"-Wl,-rpath,{torch_root / 'lib'}"),
            *("-lc10", "-ltorch_cpu"),
        ],
        check=True,
        timeout=120,
    )
    patch = pytest.MonkeyPatch()
    patch.setenv("SOFTWARE_CUDA_BACKEND", str(backend))
    patch.setenv("SOFTWARE_CUDA_DEVICES", "2")
    patch.setattr("job_processes.PYTHONPATH", f"{SOFTWARE}:{ROOT}")
    yield
    patch.undo()


def test_rules(tmp_path: Path) -> None:
    """The software devices refuse what a GPU refuses: else nothing below means anything."""
    assert "kept" in run([sys.executable, str(SOFTWARE / "rules.py")], tmp_path / "rules.log")


def test_gradients_are_added_whatever_torch_can(tmp_path: Path) -> None:
    """torch 2.9, which TensorRT-LLM's newest release asks for, adds no product of bf16 to a sum in fp32."""
    assert "added" in run([sys.executable, str(SOFTWARE / "gradients.py")], tmp_path / "gradients.log")


def test_attention_in_training(tmp_path: Path) -> None:
    """Grouped queries in fp32 have a kernel, rows of sequences one call. Which of torch's, a GPU alone can show."""
    assert "reached" in run([sys.executable, str(SOFTWARE / "attention.py")], tmp_path / "attention.log")


def test_micro_batches_wait_for_nothing(tmp_path: Path) -> None:
    """Batches are packed on the CPU and moved without waiting: the GPU has work while the next one is packed."""
    assert "never" in run([sys.executable, str(SOFTWARE / "waits.py")], tmp_path / "waits.log")


def test_marked_tests(tmp_path: Path) -> None:
    """Of the tests for GPUs those of the engine that take seconds here; against the CPU, and graphs that replay."""
    files = [str(ROOT / "tests" / f"test_generation_{name}.py") for name in ("embedded", "torch_step", "views")]
    chosen = ["-m", "gpu", "-k", "equals_cpu or replay", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *chosen, *files]
    output = run(command, tmp_path / "marked.log", TIMEOUT)
    assert " passed" in output and "NOT tested" not in output, output


def test_sft(artefacts: Artefacts, tmp_path: Path) -> None:
    """On two devices the numbers of one CPU rank; checkpoints and an archive come back from the devices."""
    log_dir = tmp_path / "sft"
    run(script("train_gpt_sft.py", *artefacts.sft_flags(log_dir, devices=2)), log_dir.with_suffix(".log"), TIMEOUT)
    curves, expected = read_metrics(log_dir), read_metrics(artefacts.sft_log)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert curves[name] == [(step, pytest.approx(value, rel=1e-5)) for step, value in expected[name]], name
    assert (log_dir / "checkpoints" / "megatron_gpt_sft.nemo").is_file()


def test_ppo(artefacts: Artefacts, tmp_path: Path) -> None:
    """PP 2 in training, TP 2 in generation; states offloaded, the engine unloaded, weights swapped, in both jobs."""
    critic = (
        *("trainer.devices=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"),
        *("model.offload_adam_states=True", "model.rm_placement=swap"),
    )
    actor = (
        "trainer.precision=32",
        *SMALL,
        "trainer.ppo.max_steps=2",
        "model.pipeline_model_parallel_size=2",
        "trainer.ppo.trt_llm.reshard=True",
        "trainer.ppo.generation.tensor_parallel_size=2",
        "trainer.ppo.trt_llm.unload_engine_train=True",
        "trainer.ppo.reference_policy_placement=swap",
        "model.ppo.offload_adam_states=True",
    )
    output, critic_output = ppo_jobs(artefacts, tmp_path, actor, critic, timeout=TIMEOUT)
    assert "nccl" in critic_output
    assert "nccl" in output and "torch on cuda:0" in output
    check_exact_log(tmp_path / "actor")


def test_rollouts_on_a_device_of_their_own(artefacts: Artefacts, tmp_path: Path) -> None:
    """bf16; weights pushed from one device to the other through a group made by hand."""
    apart = ("trainer.ppo.max_steps=2", "trainer.ppo.rollout_devices=1", "trainer.ppo.staleness=1")
    output, _ = ppo_jobs(artefacts, tmp_path, [*SMALL, *apart], timeout=TIMEOUT)
    # Triton has no driver for these devices: what it cannot do, torch does.
    assert output.count("generation runs without Triton's kernels") == 1
    assert [step for step, _ in read_metrics(tmp_path / "actor")["train_rollouts/rewards"]] == [1, 2]
