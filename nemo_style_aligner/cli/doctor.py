"""``nsa doctor``: what of a machine is usable, what a missing part costs, and the command that adds it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import click

State = Literal["ok", "missing", "broken"]

_EXAMPLES = """\b
Examples:
  nsa doctor
  nsa doctor --need gpu --need mpi && mpirun -np 8 python examples/nlp/gpt/train_gpt_sft.py ...
  nsa doctor --json | jq '.[] | select(.state != "ok")'
"""
_ASYNC_API = """
import importlib
for module in ("tensorrt_llm.llmapi", "tensorrt_llm._torch.async_llm"):
    try:
        importlib.import_module(module).AsyncLLM
    except (ImportError, AttributeError):
        continue
    print(f"{module}.AsyncLLM")
    break
else:
    raise SystemExit("it has no AsyncLLM")
"""
_SECONDS = 120.0  # for a program that is asked for its version
_MARKS = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "broken": ("!!", "red")}


@dataclass(frozen=True)
class Finding:
    """What was found of a part.

    Attributes:
        name: of the part, for ``--need``.
        detail: its version, or what is wrong.
        cost: what is lost without it; empty where nothing is.
        remedy: the command that adds it; empty where there is none.
        is_required: nothing can be trained without it.
    """

    name: str
    state: State
    detail: str
    cost: str = ""
    remedy: str = ""
    is_required: bool = False


@click.command(epilog=_EXAMPLES)
@click.option("--need", multiple=True, metavar="PART", help="Fail unless this part is usable; may be given repeatedly.")
@click.option(
    "--trtllm-python",
    default=sys.executable,
    help="Of the environment that has TensorRT-LLM.  [default: this]",
    show_default=False,
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(need: tuple[str, ...], trtllm_python: str, as_json: bool) -> int:
    """Say what of this machine training can use, what each missing part costs, and the command that adds it.

    Exit status: 0 if what every job needs is there, and what --need names; 1 if not; 2 for an unknown part.
    """
    findings = [*examine(), _tensorrt_llm(trtllm_python)]
    if unknown := [name for name in need if name not in [finding.name for finding in findings]]:
        names = ", ".join(finding.name for finding in findings)
        raise click.BadParameter(f"{unknown[0]}: the parts are {names}", param_hint="--need")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _show(finding)
    lacking = [f for f in findings if f.state != "ok" and (f.is_required or f.name in need)]
    if lacking and not as_json:
        click.echo(f"not usable, but needed: {', '.join(finding.name for finding in lacking)}")
    return 1 if lacking else 0


def _show(finding: Finding) -> None:
    mark, color = _MARKS[finding.state]
    click.echo(f"{click.style(mark, fg=color)}  {click.style(f'{finding.name:20}', bold=True)} {finding.detail}")
    if finding.state != "ok" and finding.cost:
        click.echo(f"{'':24} without it: {finding.cost}")
    if finding.state != "ok" and finding.remedy:
        click.echo(f"{'':24} to add it:  {finding.remedy}")


def examine() -> Iterator[Finding]:
    """Each part of the machine and the environment, one after the other."""
    yield from _libraries()
    yield from _accelerator()
    yield from _launchers()
    yield from _processor()
    yield from _extras()


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _tried(name: str, work: Callable[[], str], cost: str, remedy: str, is_required: bool = False) -> Finding:
    """A part that is usable if ``work`` returns, what it says of it; else broken, whatever it raises."""
    try:
        return Finding(name, "ok", work(), cost, remedy, is_required)
    except Exception as error:  # noqa: BLE001 - libraries that do not fit each other raise anything
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, "broken", detail, cost, remedy, is_required)


# ---- what every job needs -----------------------------------------------------------------------


def _libraries() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}", is_required=True)
    again = "make install"
    yield _tried("packages", _requirements, "what they do fails or computes otherwise", again, is_required=True)
    yield _tried("torch", _torch, "nothing can be trained", again, is_required=True)
    yield _tried("megatron-core", _megatron, "nothing can be trained", again, is_required=True)
    yield _tried("gloo", _gloo, "ranks cannot talk to each other", again, is_required=True)


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _megatron() -> str:
    import megatron.core
    from megatron.core.models.gpt import GPTModel  # noqa: F401 - imports what training does

    return str(megatron.core.__version__)


def _gloo() -> str:
    import torch
    import torch.distributed as dist

    from nemo_style_aligner.parallel.groups import single_process

    with single_process():
        number = torch.ones(1)
        dist.all_reduce(number, group=dist.new_group(backend="gloo"))
    return "a collective of one rank went through"


# ---- GPUs ---------------------------------------------------------------------------------------


def _accelerator() -> Iterator[Finding]:
    import torch

    slow = "training and generation run on the CPU"
    if torch.cuda.is_available():
        yield _tried("gpu", _gpus, slow, "")
    else:
        built = torch.version.cuda
        has_driver = shutil.which("nvidia-smi") is not None
        why = "this torch is built without CUDA" if built is None else f"torch has CUDA {built}, but no GPU is seen"
        remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        yield Finding("gpu", "broken" if has_driver else "missing", why, slow, remedy if has_driver else "")
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "no GPU, or a torch without NCCL"
    yield Finding("nccl", "ok" if nccl else "missing", version, "ranks talk by gloo, through host memory")
    cost, remedy = "our own layers compute on GPUs", "pip install --no-build-isolation 'nemo_style_aligner[gpu]'"
    yield _package("transformer-engine", cost, remedy, "transformer_engine.pytorch")
    yield _package("triton", "the engine and layers use torch's functions on GPUs", "pip install triton")


def _gpus() -> str:
    import torch

    some = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
    (some @ some).sum().item()  # raises if this torch has no code for the GPU
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{p.name} {p.total_memory / 2**30:.0f} GiB, {p.major}.{p.minor}" for p in properties)


def _package(name: str, cost: str, remedy: str, module: str | None = None) -> Finding:
    """A package that is optional; ``module`` must be importable for it to be of use."""
    if (version := _version(name)) is None:
        return Finding(name, "missing", "not installed", cost, remedy)
    return _tried(name, lambda: (module and importlib.import_module(module), version)[1], cost, remedy)


def _tensorrt_llm(python: str) -> Finding:
    from nemo_style_aligner.engine.trtllm.construct import DISTRIBUTION, PIN, installed_version

    cost = "the embedded engine generates, also where a config asks for TensorRT-LLM"
    remedy = f"{python} -m pip install --pre --extra-index-url https://pypi.nvidia.com {DISTRIBUTION}=={PIN} ray"
    if (version := installed_version(python)) is None:
        return Finding("tensorrt-llm", "missing", f"not in the environment of {python}", cost, remedy)
    return _tried("tensorrt-llm", lambda: f"{version}, {_output([python, '-c', _ASYNC_API])}", cost, remedy)


def _output(command: list[str], given: str | None = None) -> str:
    """What a program prints last. Raises if it fails, or takes too long."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise OSError(f"{command[0]} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


# ---- launchers, processor -----------------------------------------------------------------------


def _launchers() -> Iterator[Finding]:
    for name, program, remedy in (
        ("mpi", "mpirun", "pip install 'nemo_style_aligner[mpi]'"),
        ("slurm", "srun", "run it where the cluster's Slurm is installed"),
    ):
        path = shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
        cost = f"jobs are not started by {program}; python, torchrun and trainer.devices do"
        if path is None:
            yield Finding(name, "missing", f"{program} is not on the PATH", cost, remedy)
        else:
            yield _tried(name, partial(_first_line, [path, "--version"]), cost, remedy)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return f"{done.stdout.splitlines()[0]}, {command[0]}"


def _processor() -> Iterator[Finding]:
    import torch

    from nemo_style_aligner.native.compilation import find_compiler, usable_kernels
    from nemo_style_aligner.parallel.machine import available_cores, available_memory, computes_in_bf16
    from nemo_style_aligner.wording import size_of

    def compiler() -> str:
        command = find_compiler()
        _output([*command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], "#include <vector>\nint main() {}\n")
        return _first_line([*command, "--version"])

    slower = "generation and training on CPUs use torch's functions, which are several times slower"
    yield _tried("compiler", compiler, slower, "apt-get install g++, or set CXX")
    kernels = usable_kernels(torch.bfloat16)
    told = (
        f"{kernels[0]}{'' if computes_in_bf16() else ' (no bf16 arithmetic: fp32 is as fast)'}"
        if kernels
        else "no AVX2"
    )
    yield Finding("instruction-sets", "ok" if kernels else "missing", told, slower)
    yield Finding("memory", "ok", f"{size_of(available_memory())} free, {available_cores()} cores")


# ---- packages -----------------------------------------------------------------------------------


def _requirements() -> str:
    """Compare what is installed with what this package requires."""
    from packaging.requirements import Requirement

    required = map(Requirement, importlib.metadata.requires("nemo_style_aligner") or ())
    wanted = [part for part in required if part.marker is None or part.marker.evaluate({"extra": ""})]
    wrong = [
        f"{part} (here: {_version(part.name) or 'not installed'})"
        for part in wanted
        if not part.specifier.contains(_version(part.name) or "0", prereleases=True)
    ]
    if wrong:
        raise ImportError("; ".join(wrong))
    return f"all {len(wanted)} that are required, in versions that fit"


def _extras() -> Iterator[Finding]:
    for name, extra, cost in (
        ("math-verify", "math", "the reward math_verify cannot be used"),
        ("ray", "ray", "jobs are not started by Ray"),
        ("wandb", "wandb", "exp_manager.create_wandb_logger=True is refused"),
    ):
        yield _package(name, cost, f"pip install 'nemo_style_aligner[{extra}]'")
