"""``nsa doctor``: what of a machine is usable, what a missing part costs, and the command that adds it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import click

from nemo_style_aligner.places import IS_CHECKOUT, REPOSITORY

_EXAMPLES = """\b
Examples:
  nsa doctor
  nsa doctor --need gpu --need mpi && mpirun -np 8 python examples/nlp/gpt/train_gpt_sft.py ...
  nsa doctor --json | jq '.[] | select(.state != "ok")'
"""
_SECONDS = 120.0  # for a program that is asked for its version
_MARKS = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "broken": ("!!", "red")}


class _Missing(Exception):
    """A part is not there."""


class _Part(NamedTuple):
    """A part of a machine or an environment.

    Attributes:
        check: returns what there is to tell of it; raises `_Missing`, or anything if it cannot be used.
        cost: what is lost without it.
        remedy: the command that adds it.
        is_required: nothing can be trained without it.
    """

    check: Callable[[], str]
    cost: str
    remedy: str = ""
    is_required: bool = False


@click.command(epilog=_EXAMPLES)
@click.option("--need", multiple=True, metavar="PART", help="Fail unless this part is usable; may be given repeatedly.")
@click.option("--trtllm-python", metavar="PYTHON", help="Of the environment that has TensorRT-LLM.  [default: this]")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(need: tuple[str, ...], trtllm_python: str | None, as_json: bool) -> int:
    """Say what of this machine training can use, what each missing part costs, and the command that adds it.

    Exit status: 0 if what every job needs is usable, and what --need names; 1 if not; 2 for an unknown part.
    """
    parts = _parts(trtllm_python or sys.executable)
    if unknown := [name for name in need if name not in parts]:
        raise click.BadParameter(f"{unknown[0]}: the parts are {', '.join(parts)}", param_hint="--need")
    findings = []
    for name, part in parts.items():
        state, detail = _examine(part)
        described = {"cost": part.cost, "remedy": part.remedy, "is_required": part.is_required}
        findings.append({"name": name, "state": state, "detail": detail, **described})
        if not as_json:
            _show(name, part, state, detail)
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    lacking = [str(f["name"]) for f in findings if f["state"] != "ok" and (f["is_required"] or f["name"] in need)]
    if lacking and not as_json:
        click.echo(f"needed, but not usable: {', '.join(lacking)}")
    return 1 if lacking else 0


def _examine(part: _Part) -> tuple[str, str]:
    """Whether a part is "ok", "missing" or "broken", and its version, or what is wrong."""
    try:
        return "ok", part.check()
    except _Missing as error:
        return "missing", str(error)
    except Exception as error:  # noqa: BLE001 - libraries that do not fit each other raise anything
        return "broken", f"{type(error).__name__}: {error}".splitlines()[0]


def _show(name: str, part: _Part, state: str, detail: str) -> None:
    mark, color = _MARKS[state]
    click.echo(f"{click.style(mark, fg=color)}  {click.style(f'{name:18}', bold=True)} {detail}")
    if state != "ok":
        click.echo(f"{'':22} without it: {part.cost}")
        if part.remedy:
            click.echo(f"{'':22} to add it:  {part.remedy}")


def _parts(trtllm_python: str) -> dict[str, _Part]:
    """All parts, in the order in which they are shown."""
    nothing, slower = "nothing can be trained", "generation and training on CPUs are several times slower"
    trtllm = f"{trtllm_python} -m pip install --pre --extra-index-url https://pypi.nvidia.com tensorrt-llm"
    started = "jobs are not started by {}; python, torchrun and trainer.devices do"

    where = f"-e '{REPOSITORY}'" if IS_CHECKOUT else "'nemo_style_aligner'"
    again = "make install" if IS_CHECKOUT else f"pip install --force-reinstall {where}"

    def extra(name: str) -> str:
        return f"pip install {where[:-1]}[{name}]'"  # which has the versions that fit

    return {
        "python": _Part(lambda: f"{platform.python_version()}, {sys.executable}", nothing, is_required=True),
        "packages": _Part(_packages, "what they do fails, or computes something else", again, True),
        "torch": _Part(_torch, nothing, again, True),
        "megatron-core": _Part(partial(_package, "megatron-core", "megatron.core.models.gpt"), nothing, again, True),
        "gloo": _Part(_gloo, "ranks cannot talk to each other", again, True),
        "gpu": _Part(_gpus, "training and generation run on the CPU"),
        "nccl": _Part(_nccl, "ranks talk by gloo, through host memory"),
        "transformer-engine": _Part(
            partial(_package, "transformer-engine", "transformer_engine.pytorch"),
            "on GPUs, our own layers compute in its place",
            f"{extra('gpu')} --no-build-isolation",
        ),
        "triton": _Part(partial(_package, "triton"), "on GPUs, torch's functions compute", "pip install triton"),
        "tensorrt-llm": _Part(
            partial(_tensorrt_llm, trtllm_python), "the embedded engine generates, whatever a config asks for", trtllm
        ),
        "mpi": _Part(partial(_launcher, "mpirun"), started.format("mpirun"), extra("mpi")),
        "slurm": _Part(partial(_launcher, "srun"), started.format("srun")),
        "ray": _Part(partial(_package, "ray"), started.format("Ray"), extra("ray")),
        "compiler": _Part(_compiler, slower, "apt-get install g++, or set CXX"),
        "instruction-sets": _Part(_instructions, slower),
        "memory": _Part(_memory, nothing),
        "math-verify": _Part(partial(_package, "math-verify"), "the reward math_verify cannot be used", extra("math")),
        "wandb": _Part(partial(_package, "wandb"), "create_wandb_logger=True is refused", extra("wandb")),
        "mlflow": _Part(partial(_package, "mlflow"), "create_mlflow_logger=True is refused", extra("mlflow")),
    }


# ---- what every job needs -----------------------------------------------------------------------


def _packages() -> str:
    from packaging.requirements import Requirement

    required = map(Requirement, importlib.metadata.requires("nemo_style_aligner") or ())
    wanted = [part for part in required if part.marker is None or part.marker.evaluate({"extra": ""})]
    installed = {part.name: _version(part.name) for part in wanted}
    wrong = [part for part in wanted if not part.specifier.contains(installed[part.name] or "", prereleases=True)]
    if wrong:
        raise ImportError("; ".join(f"{part} (here: {installed[part.name] or 'not installed'})" for part in wrong))
    return f"all {len(wanted)} that are required, in versions that fit"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, module: str | None = None) -> str:
    """The version of a package, of which ``module`` must be importable."""
    if (version := _version(name)) is None:
        raise _Missing("not installed")
    if module is not None:
        importlib.import_module(module)
    return version


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gloo() -> str:
    import torch
    import torch.distributed as dist

    from nemo_style_aligner.engine.parallel.groups import single_process

    with single_process():
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    return "a collective of one rank went through"


# ---- GPUs ---------------------------------------------------------------------------------------


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"torch {torch.__version__} {f'has CUDA {built}, but sees no GPU' if built else 'has no CUDA'}"
        raise OSError(reason) if shutil.which("nvidia-smi") else _Missing(reason)
    some = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
    (some @ some).sum().item()  # raises if this torch has no code for the GPU
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in found)


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise _Missing("no GPU, or a torch without it")
    return ".".join(map(str, torch.cuda.nccl.version()))


def _tensorrt_llm(python: str) -> str:
    from nemo_style_aligner.engine.trtllm.sidecar.process import PROGRAM
    from nemo_style_aligner.trainer.rl.rollouts.trtllm import PIN, installed_version

    if (version := installed_version(python)) is None:
        raise _Missing(f"not in the environment of {python}; {PIN} is the version to take")
    find = "import runpy, sys; print(runpy.run_path(sys.argv[1])['async_llm']())"
    return f"{version}, {_said([python, '-c', find, str(PROGRAM)])}"


# ---- programs, processor ------------------------------------------------------------------------


def _said(command: list[str], given: str | None = None) -> str:
    """The first line that a program prints. Raises if it fails, or takes too long."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise OSError(f"{command[0]} ended with status {done.returncode}: {' '.join(done.stderr.split())[-200:]}")
    return done.stdout.partition("\n")[0]


def _launcher(program: str) -> str:
    path = shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
    if path is None:
        raise _Missing(f"{program} is not on the PATH")
    return f"{_said([path, '--version'])}, {path}"


def _compiler() -> str:
    from nemo_style_aligner.engine.native.compilation import find_compiler

    compiler = find_compiler()
    _said([*compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], "#include <vector>\nint main() {}\n")
    return _said([*compiler, "--version"])


def _instructions() -> str:
    import torch

    from nemo_style_aligner.engine.native.compilation import usable_kernels
    from nemo_style_aligner.engine.parallel.machine import computes_in_bf16

    if not (kernels := usable_kernels(torch.bfloat16)):
        raise _Missing("no AVX2")
    return f"{', '.join(kernels)}; {'bf16 arithmetic' if computes_in_bf16() else 'no bf16 arithmetic: fp32 is faster'}"


def _memory() -> str:
    from nemo_style_aligner.engine.parallel.machine import available_cores, available_memory
    from nemo_style_aligner.wording import size_of

    return f"{size_of(available_memory())} free, {available_cores()} cores"
