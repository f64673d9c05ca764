"""Training and whole jobs on real GPUs, against the same on this machine's CPU: ``make test-gpu``.

Numbers of jobs are compared by the jobs' own logs; those of a PPO step by what `multirank_ppo.py` leaves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Artefacts
from job_processes import ROOT, critic_service, run, script, stored_weights
from multirank_ppo import LAYOUTS
from safetensors.torch import load_file
from test_jobs import actor_flags, check_actor_log, check_exact_log, ppo_jobs

from nemo_style_aligner.trainer.models.attention import CausalAttention
from nemo_style_aligner.trainer.models.packing import Sequences, pack_row
from nemo_style_aligner.trainer.models.pipeline import to_device
from nemo_style_aligner.trainer.models.spans import PackedSequences
from nemo_style_aligner.trainer.models.varlen_attention import has_varlen_attention
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

NUM_GPUS = torch.cuda.device_count()
TIMEOUT = 300.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not NUM_GPUS,
        reason="no GPU, or hidden from the tests (make test-gpu shows it): training and jobs are NOT tested on one",
    ),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs: jobs of two ranks over NCCL are NOT tested")

Result = tuple[dict[str, torch.Tensor], dict[str, float]]


# ---- one PPO step -------------------------------------------------------------------------------

ON_GPUS = [layout for layout in LAYOUTS if layout.world_size <= NUM_GPUS]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Result]:
    """Results by device ("cpu", "cuda") and layout; on a CPU only those that others are compared with."""
    folder = tmp_path_factory.mktemp("ppo")
    program = [sys.executable, str(ROOT / "tests" / "multirank_ppo.py"), str(folder)]
    references = ("reference", "tied_reference", "one_update", "bf16_reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        run([*program, *references], folder / "cpu.log", TIMEOUT)
    for name in references:
        for ending in ("safetensors", "json"):
            (folder / f"{name}.{ending}").rename(folder / f"cpu_{name}.{ending}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ranks are forks
        run([*program, *(layout.name for layout in ON_GPUS)], folder / "cuda.log", TIMEOUT)

    def load(device: str, name: str) -> Result:
        path = folder / f"{'cpu_' if device == 'cpu' else ''}{name}"
        return load_file(path.with_suffix(".safetensors")), json.loads(path.with_suffix(".json").read_text())

    return load


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest absolute difference of the policy's weights, of the critic's, and of all else."""
    found = {"policy.": 0.0, "critic.": 0.0, "experience": 0.0}
    assert a.keys() == b.keys()
    for name in a:
        part = next((prefix for prefix in found if name.startswith(prefix)), "experience")
        found[part] = max(found[part], (a[name].float() - b[name].float()).abs().max().item())
    return found


@pytest.mark.parametrize("layout", [c for c in ON_GPUS if c.precision == "32"], ids=lambda layout: layout.name)
def test_a_step_in_fp32_has_the_numbers_of_a_cpu(steps: Callable[[str, str], Result], layout: Any) -> None:
    """Log-probs, values, rewards, advantages, losses, gradient norms, and the weights after the updates."""
    tensors, metrics = steps("cuda", layout.name)
    reference = "tied_reference" if layout.tied else "reference" if layout.updates == 2 else "one_update"
    expected_tensors, expected_metrics = steps("cpu", reference)
    found = differences(tensors, expected_tensors)
    assert found["experience"] < 2e-5 and found["policy."] < 5e-5 and found["critic."] < 5e-5, found
    for name in ("actor/train_optim/grad_norm/0", "critic/train/grad_norm/0", "critic_loss", "init_policy_kl"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), name


@pytest.mark.parametrize("layout", [c for c in ON_GPUS if c.precision == "bf16"], ids=lambda layout: layout.name)
def test_a_step_in_bf16_is_near_to_one_in_fp32(steps: Callable[[str, str], Result], layout: Any) -> None:
    """As near as on a CPU. With Transformer Engine these are its layers."""
    tensors, metrics = steps("cuda", layout.name)
    on_cpu, _ = steps("cpu", "bf16_reference")
    exact, expected_metrics = steps("cpu", "reference")
    for name in ("logprobs", "init_logprobs", "values", "rewards"):
        error, theirs = ((found[name] - exact[name]).abs().mean() for found in (tensors, on_cpu))
        assert error < 2 * theirs, (name, error, theirs)
    for name in ("actor/train_optim/grad_norm/0", "critic/train/grad_norm/0", "critic_loss"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=0.1), name


# ---- attention in training ----------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "groups", "channels"), [(32, 8, 64), (16, 2, 128), (9, 3, 64), (4, 4, 256)])
def test_attention_of_packed_rows(heads: int, groups: int, channels: int) -> None:
    """In one call of torch's varlen attention: outputs and gradients are those of fp32 on a CPU, up to rounding."""
    lengths = (5, 1, 700, 130)
    wanted = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    packed = pack_row(Sequences.padded(torch.zeros(wanted.shape, dtype=torch.int64), wanted), 1).sequences
    attention = CausalAttention.__new__(CausalAttention)
    torch.nn.Module.__init__(attention)
    attention.dropout = 0.0

    def results(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        row = to_device(packed, torch.device(device))
        assert isinstance(row, PackedSequences)
        draw = torch.Generator().manual_seed(1)
        sizes = (heads, groups, groups)
        parts = [torch.randn(sum(lengths), n, channels, generator=draw).bfloat16() for n in sizes]
        inputs = [part.to(device, dtype).requires_grad_() for part in parts]
        if device == "cuda" and dtype == torch.bfloat16:
            assert has_varlen_attention(inputs[0], inputs[1])
        out = attention(*inputs, packed_seq_params=row)
        weight = torch.randn(out.shape, generator=draw).bfloat16().to(device, dtype)
        gradients = torch.autograd.grad((out * weight).sum(), inputs)
        return [x.detach().float().cpu() for x in (out, *gradients)]

    expected = results("cpu", torch.float32)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        for computed, exact in zip(results("cuda", dtype), expected, strict=True):
            assert (computed - exact).norm() / exact.norm() < tolerance, dtype


# ---- whole jobs ---------------------------------------------------------------------------------


def test_sft(artefacts: Artefacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 a GPU's curves are a CPU's, and so are the weights in the archive."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log_dir = tmp_path / "sft"
    output = run(script("train_gpt_sft.py", *artefacts.sft_flags(log_dir)), log_dir.with_suffix(".log"), TIMEOUT)
    assert "gloo" in output and "nccl" in artefacts.outputs["train_gpt_sft.py"]
    curves, on_gpu = read_metrics(log_dir), read_metrics(artefacts.sft_log)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert on_gpu[name] == [(step, pytest.approx(value, rel=1e-3)) for step, value in curves[name]], name
    weights, expected = (
        stored_weights(path) for path in (artefacts.sft, log_dir / "checkpoints" / "megatron_gpt_sft.nemo")
    )
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-3, rtol=1e-2)


def test_adapters_in_bf16(artefacts: Artefacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to those of a CPU in fp32. With Transformer Engine they are beside its layers, whose norms are apart."""
    curves = []
    for name, devices, precision in (("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), "bf16"), ("cpu", "", "32")):
        if devices is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        tuning = "model.peft.lora_tuning"
        adapters = ("model.peft.peft_scheme=lora", f"{tuning}.target_modules=[all]", f"{tuning}.adapter_dim=8")
        flags = artefacts.sft_flags(tmp_path / name)
        run(
            script("train_gpt_sft.py", *flags, f"trainer.precision={precision}", *adapters),
            tmp_path / f"{name}.log",
            TIMEOUT,
        )
        curves.append(read_metrics(tmp_path / name))
    for name in ("train/loss", "val/loss"):
        assert curves[0][name] == [(step, pytest.approx(value, rel=0.02)) for step, value in curves[1][name]], name
    losses = [value for _, value in curves[1]["val/loss"]]
    assert losses[-1] < 0.99 * losses[0], "the adapters learn"


SMALL = ("model.ppo.num_rollout_samples=16", "trainer.ppo.max_steps=2", "trainer.ppo.val_check_interval=2")


def test_ppo_in_fp32(artefacts: Artefacts, tmp_path: Path) -> None:
    """Engine and training agree on log-probs; states offloaded, the engine unloaded, weights swapped, in both jobs."""
    critic = ("model.offload_adam_states=True", "model.rm_placement=swap")
    actor = (
        "trainer.precision=32",
        *SMALL,
        "trainer.ppo.trt_llm.unload_engine_train=True",
        "trainer.ppo.reference_policy_placement=swap",
        "model.ppo.offload_adam_states=True",
    )
    output, critic_output = ppo_jobs(artefacts, tmp_path, actor, critic, devices=1, timeout=TIMEOUT)
    assert "nccl" in critic_output
    assert "torch on cuda:0" in output and "decode graphs, torch's functions" in output
    assert "without Triton's kernels" not in output
    check_exact_log(tmp_path / "actor")


def test_ppo_in_bf16_with_defaults(artefacts: Artefacts, tmp_path: Path) -> None:
    """The tutorial's precision: engine and training differ by rounding alone; a save, and a job that resumes."""
    log_dir = tmp_path / "actor"
    critic = ("trainer.precision=bf16", "model.global_batch_size=8")
    with critic_service(artefacts.rm, tmp_path / "critic", *critic) as (job, port):
        flags = [*actor_flags(artefacts, log_dir, port, devices=1), *SMALL, "trainer.ppo.save_interval=1"]
        output = run(script("train_gpt_ppo_actor.py", *flags), log_dir.with_suffix(".log"), TIMEOUT)
        assert "decode graphs, Triton's kernels" in output
        assert "without Triton's kernels" not in output + job.output()
        curves = check_actor_log(log_dir, steps=2)
        assert max(value for _, value in curves["train_rollouts/engine_logprob_gap_max"]) < 0.2
        flags += ["trainer.ppo.max_steps=3"]
        run(script("train_gpt_ppo_actor.py", *flags), tmp_path / "resumed.log", TIMEOUT)
    assert [step for step, _ in read_metrics(log_dir)["train_rollouts/rewards"]] == [1, 2, 3]


@needs_two
def test_ppo_on_two_gpus(artefacts: Artefacts, tmp_path: Path) -> None:
    """PP 2 in training, TP 2 in generation."""
    actor = (
        "trainer.precision=32",
        *SMALL,
        "model.pipeline_model_parallel_size=2",
        "trainer.ppo.trt_llm.reshard=True",
        "trainer.ppo.generation.tensor_parallel_size=2",
    )
    ppo_jobs(artefacts, tmp_path, actor, timeout=TIMEOUT)
    curves = check_actor_log(tmp_path / "actor", steps=2)
    assert max(value for _, value in curves["train_rollouts/engine_logprob_gap_max"]) < 1e-4


@needs_two
def test_rollouts_on_a_gpu_of_their_own(artefacts: Artefacts, tmp_path: Path) -> None:
    """Weights are pushed from one GPU to the other."""
    staleness = ("trainer.ppo.rollout_devices=1", "trainer.ppo.staleness=1")
    ppo_jobs(artefacts, tmp_path, [*SMALL, *staleness], timeout=TIMEOUT)
    assert [step for step, _ in read_metrics(tmp_path / "actor")["train_rollouts/rewards"]] == [1, 2]
