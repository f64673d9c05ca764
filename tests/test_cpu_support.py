"""megatron-core on the CPU: an upgrade that moves a patch point must fail here, by name, and not in a job."""

from __future__ import annotations

import ast
import builtins
import copy
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import nemo_style_aligner
from nemo_style_aligner.engine.parallel import cpu
from nemo_style_aligner.trainer.models import fused_adam
from nemo_style_aligner.trainer.models.fused_adam import FusedAdam, use_fused_adam_where_megatron_has_none

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="engine/parallel/cpu.py does nothing where there is CUDA"
)

# What the jobs run through in megatron-core, whatever else they import.
USED = [
    "parallel_state",
    "utils",
    "tensor_parallel.cross_entropy",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.utils",
    "transformer.attention",
    "transformer.mlp",
    "transformer.moe.experts",
    "transformer.moe.moe_layer",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
    "transformer.module",
    "transformer.transformer_block",
    "transformer.transformer_config",
    "transformer.transformer_layer",
    "transformer.utils",
    "models.gpt.gpt_model",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.rope_utils",
    "models.common.embeddings.language_model_embedding",
    "models.common.language_module.language_module",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.optimizer",
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "distributed.finalize_model_grads",
    "dist_checkpointing.serialization",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.common",
    "dist_checkpointing.mapping",
    "inference.contexts.static_context",
]

# Calls of torch.cuda that may stay in these modules: they are guarded, or belong to what jobs leave off on a CPU.
ALLOWED_CALLS = {
    "torch.cuda.is_available",
    "torch.cuda.Stream",
    "torch.cuda.Stream.priority_range",
    "torch.cuda.stream",
    "torch.cuda.current_stream",
    "torch.cuda.default_stream",
    "torch.cuda.Event",
    "torch.cuda.nvtx.range_push",
    "torch.cuda.nvtx.range_pop",
    "torch.cuda.random.get_rng_state",  # in the function that cpu.py replaces
    "torch.cuda.clock_rate",
    "torch.cuda.power_draw",
    "torch.cuda.temperature",
    "torch.cuda.utilization",
}


@pytest.fixture(scope="module", autouse=True)
def _everything_imported() -> None:
    for module in pkgutil.walk_packages(nemo_style_aligner.__path__, "nemo_style_aligner."):
        importlib.import_module(module.name)
    for name in USED:
        importlib.import_module(f"megatron.core.{name}")


def test_a_rank_alone_has_few_groups() -> None:
    """Each group of gloo's has a thread that polls: with one for each purpose a job lost a hundredth of its time."""
    script = """if True:
        import pathlib
        from nemo_style_aligner.engine.parallel.groups import single_process
        for _ in range(2):  # groups belong to their meeting
            with single_process():
                import torch, torch.distributed as dist
                from megatron.core import parallel_state
                for name in ("tensor_model", "pipeline_model", "data"):
                    group = getattr(parallel_state, f"get_{name}_parallel_group")()
                    number = torch.ones(1)
                    dist.all_reduce(number, group=group)
                    assert group.size() == 1 and number == 1, name
                threads = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
                print(sum("gloo_tcp_loop" in name for name in threads))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    if Version(torch.__version__) < Version("2.10"):
        pytest.skip("torch 2.9 does not name gloo's threads: they cannot be counted")
    assert len(counts) == 2 and all(0 < count <= 6 for count in counts), counts


@pytest.mark.parametrize("rule", [name for name, _, _ in cpu.SOURCE_RULES])
def test_every_rule_still_finds_something(rule: str) -> None:
    assert cpu.rule_hits[rule] > 0, f"megatron-core has nothing left for the rule '{rule}': drop it, or follow the move"


def rewritten(name: str) -> str:
    """A megatron.core module's source as it was executed."""
    path = sys.modules[f"megatron.core.{name}"].__file__
    assert path is not None
    source = Path(path).read_text()
    for _, pattern, replacement in cpu.SOURCE_RULES:
        source = pattern.sub(replacement, source)
    return source


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names of what is called, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts, function = [], node.func
            while isinstance(function, ast.Attribute):
                parts.append(function.attr)
                function = function.value
            parts.append(function.id if isinstance(function, ast.Name) else "(...)")
            yield ".".join(reversed(parts)), node.lineno


@pytest.mark.parametrize("name", USED)
def test_no_call_of_cuda_is_left_where_jobs_pass(name: str) -> None:
    tree = ast.parse(rewritten(name))
    left = {
        f"{call} (line {line})"
        for call, line in calls(tree)
        if (call.startswith("torch.cuda.") and call not in ALLOWED_CALLS) or call.endswith(".cuda")
    }
    left |= {
        f"device='cuda' (line {node.value.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "device" and isinstance(node.value, ast.Constant)
        if node.value.value == "cuda"
    }
    assert not left, left


def test_only_megatron_core_is_rewritten() -> None:
    """Neither torch nor any other package is patched, and megatron.core's modules say where they come from."""
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    assert torch.cuda.get_rng_state.__module__ == "torch.cuda.random"
    from megatron.core import parallel_state

    assert type(parallel_state.__spec__.loader).__name__ == "_RewritingLoader"
    assert type(torch.__spec__.loader) is importlib.machinery.SourceFileLoader
    finder = next(finder for finder in sys.meta_path if isinstance(finder, cpu._Finder))
    for other in ("torch.nn", "transformers", "megatron", "nemo_style_aligner.trainer.models.gpt"):
        assert finder.find_spec(other) is None, other
    cpu.install_import_hook()  # a second time: nothing changes
    assert sum(isinstance(finder, cpu._Finder) for finder in sys.meta_path) == 1


def test_megatron_imported_first_is_an_error_with_the_remedy() -> None:
    code = "import sys, types\nsys.modules['megatron.core'] = types.ModuleType('imported')\nimport nemo_style_aligner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ImportError: import nemo_style_aligner before megatron.core" in done.stderr


def test_random_states_are_those_of_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """The tracker's streams (dropout under tensor parallelism) work, without a warning for each use, and leave torch's
    own stream alone."""
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    tracker = tensor_parallel_random.CudaRNGStatesTracker()
    tracker.add("test", 123)
    before = torch.get_rng_state()
    with tracker.fork("test"):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("test"):
        second = torch.rand(4)
    again = tensor_parallel_random.CudaRNGStatesTracker()
    again.add("test", 123)
    with again.fork("test"):
        assert torch.equal(torch.rand(4), first)
        assert torch.equal(torch.rand(4), second)
    assert not caplog.records


def test_a_moved_random_state_is_an_error() -> None:
    with pytest.raises(ImportError, match="_get_cuda_rng_state"):
        cpu._use_cpu_random_states(importlib.util.module_from_spec(importlib.machinery.ModuleSpec("empty", None)))


# ---- Adam ---------------------------------------------------------------------------------------


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (3,), (33,))]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        # The second gets no gradient now and then.
        p.grad = None if number == 1 and step % 3 == 2 else torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_equals_torch_step_for_step(adam_w_mode: bool) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, **options)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, foreach=False, **options)
    for step in range(8):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, step)
            if step % 3 == 2:  # one step counter per group: give the reference the same gradients' presence
                params[1].grad = torch.zeros_like(params[1])
            opt.param_groups[0]["lr"] = 1e-2 / (step + 1)
            opt.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_fused_adam_resumes_exactly() -> None:
    straight, first = parameters(), parameters()
    optimizer, interrupted = FusedAdam(straight, lr=1e-2), FusedAdam(first, lr=1e-2)
    for step in range(6):
        set_gradients(straight, step)
        optimizer.step()
    for step in range(3):
        set_gradients(first, step)
        interrupted.step()
    state = copy.deepcopy(interrupted.state_dict())
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    resumed = FusedAdam(second, lr=5.0)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["step"] == 3 and resumed.param_groups[0]["lr"] == 1e-2
    for step in range(3, 6):
        set_gradients(second, step)
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, second, strict=True))


def test_fused_adam_refuses_what_it_does_not_do() -> None:
    with pytest.raises(ValueError, match="bias correction"):
        FusedAdam(parameters(), bias_correction=False)


def test_megatron_uses_it() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    use_fused_adam_where_megatron_has_none()
    assert optimizer.Adam is FusedAdam and distributed.Adam is FusedAdam
    assert not optimizer.USING_PYTORCH_OPTIMIZER and distributed.HAVE_APEX_OR_TE


@pytest.mark.parametrize("name", ["Adam", "USING_PYTORCH_OPTIMIZER"])
def test_a_moved_optimizer_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core.optimizer as optimizer

    monkeypatch.delattr(optimizer, name)
    with pytest.raises(ImportError, match=f"has no {name}: install megatron-core==0.16.1"):
        fused_adam.use_fused_adam_where_megatron_has_none()


def test_rewritten_code_is_kept_and_never_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "part.py"
    compiled: list[str] = []

    def counting(text: str, *args: object, **options: object) -> types.CodeType:
        compiled.append(text)
        return builtins.compile(text, *args, **options)

    def value_of(text: str) -> int:
        names: dict[str, int] = {}
        exec(cpu._compiled(text, str(source)), names)
        return names["x"]

    monkeypatch.setattr(cpu, "compile", counting, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert [value_of("x = 1"), value_of("x = 1"), value_of("x = 2"), value_of("x = 2")] == [1, 1, 2, 2]
    assert compiled == ["x = 1", "x = 2"]
    (kept,) = (tmp_path / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:-3])
    assert value_of("x = 2") == 2
    assert len(compiled) == 3


# ---- memory -------------------------------------------------------------------------------------

FAULTS = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault per page
from nemo_style_aligner.engine.parallel.allocator import keep_freed_memory
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(5 * 2**20) for _ in range(20)]  # 20 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(5):  # the first times, small allocations beside the tensors leave gaps that are too small for others
    faults()
print(faults() * resource.getpagesize() / 2**20)
"""


HUGE_PAGES = """
import ctypes, resource, sys, torch
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
from nemo_style_aligner.engine.parallel.allocator import keep_freed_memory, unused_memory
assert keep_freed_memory()
assert keep_freed_memory()  # once is enough
tensors = [torch.ones(5 * 2**20) for _ in range(20)]  # 20 MiB each
lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
print(int(lines["AnonHugePages"].split()[0]) / 1024)
before = unused_memory()
del tensors
if before or hasattr(ctypes.CDLL(None), "mallinfo2"):
    assert 390 < (unused_memory() - before) / 2**20 < 410
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system has no glibc")
@pytest.mark.parametrize("limit", [0, pytest.param(2**36, marks=pytest.mark.long)])
def test_tensors_lie_in_huge_pages(limit: int) -> None:
    """But where the system has none, or limits what a process may reserve."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text() or "[always]" in enabled.read_text():
        pytest.skip("huge pages are not to be had by asking (/sys/kernel/mm/transparent_hugepage/enabled)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", HUGE_PAGES, str(limit)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    mebibytes = float(found.stdout)
    assert mebibytes < 100 if limit else mebibytes > 300, found.stdout


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system has no glibc")
@pytest.mark.parametrize("variable", [None, pytest.param("MALLOC_TRIM_THRESHOLD_", marks=pytest.mark.long)])
def test_freed_memory_is_used_again(variable: str | None) -> None:
    """400 MiB of tensors again and again: mebibytes of new pages. Users may decide otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    if variable:
        environment[variable] = "131072"
    found = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    mebibytes = float(found.stdout)
    assert mebibytes > 300 if variable else mebibytes < 50, found.stdout
