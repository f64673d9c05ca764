"""Which TensorRT-LLM is installed and what it can do, found out without importing it.

TensorRT-LLM has two generations of its API. Versions up to 1.2.1 build TensorRT engines (`Backend` ``engine``);
versions from 1.2 on have the PyTorch backend with weight updates (``pytorch``), and later ones nothing else.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from typing import Literal

from packaging.version import InvalidVersion, Version

from nemo_style_aligner.errors import UserError

Backend = Literal["engine", "pytorch"]

DISTRIBUTION = "tensorrt-llm"
ENGINE_PIN = "1.2.1"  # the last release with TensorRT engines
PYTORCH_PIN = "1.3.0rc24"  # a release of the PyTorch backend that goes with torch 2.11
OLDEST_ENGINE = "1.0.0"
OLDEST_PYTORCH = "1.2.0"

_INDEX = "--extra-index-url https://pypi.nvidia.com"
_QUERY_SECONDS = 120.0  # for an interpreter that starts from a cold network file system
_QUERY = (
    f"import importlib.metadata as m\ntry: print(m.version('{DISTRIBUTION}'))\nexcept m.PackageNotFoundError: print('')"
)


class TensorRTLLMUnavailable(UserError, RuntimeError):
    """TensorRT-LLM is not installed, or there is no GPU for it."""


class TensorRTLLMMismatch(UserError, RuntimeError):
    """TensorRT-LLM is installed in a version that the wanted backend cannot use."""


@dataclasses.dataclass(frozen=True)
class Installation:
    """A usable TensorRT-LLM.

    Attributes:
        backend: which of its APIs is used.
        version: of the distribution.
        python: the interpreter that has it.
    """

    backend: Backend
    version: str
    python: str


def install_command(backend: Backend, python: str) -> str:
    """The command that installs the pinned version for ``backend`` into the environment of ``python``."""
    pin = ENGINE_PIN if backend == "engine" else PYTORCH_PIN
    pre = " --pre" if backend == "pytorch" else ""
    return f"{python} -m pip install{pre} {_INDEX} {DISTRIBUTION}=={pin} (see docs/tensorrt_llm.md)"


def installed_version(python: str | None = None) -> str | None:
    """The TensorRT-LLM version in ``python``'s environment (default: this process's); None if it has none.

    Raises:
        TensorRTLLMUnavailable: ``python`` cannot be run.
    """
    if python is None or python == sys.executable:
        try:
            return importlib.metadata.version(DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            return None
    try:
        done = subprocess.run([python, "-c", _QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TensorRTLLMUnavailable(
            f"trainer.ppo.trt_llm.sidecar_python={python} cannot be run ({error}): give the python of the environment "
            f"that has TensorRT-LLM ({install_command('pytorch', python)})"
        ) from error
    if done.returncode:
        raise TensorRTLLMUnavailable(
            f"trainer.ppo.trt_llm.sidecar_python={python} ended with status {done.returncode} when asked for its "
            f"version of {DISTRIBUTION}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout.strip() or None


def find_installation(backend: Backend | None, sidecar_python: str | None) -> Installation:
    """The TensorRT-LLM to use.

    Args:
        backend: ``engine`` or ``pytorch``; None chooses by what is installed: the PyTorch backend where a
            ``sidecar_python`` is given or this environment's version has nothing else, else TensorRT engines.
        sidecar_python: interpreter of the PyTorch backend's own environment; None: this process's.

    Raises:
        TensorRTLLMUnavailable: it is not installed. The message names the command that installs it.
        TensorRTLLMMismatch: the installed version does not fit. The message names the command, too.
    """
    if backend is None and sidecar_python is None:
        own = installed_version()
        backend = "engine" if own is None or _version(own) <= Version(ENGINE_PIN) else "pytorch"
    if backend == "engine":
        return _checked("engine", None, f"from {OLDEST_ENGINE} to {ENGINE_PIN}")
    return _checked("pytorch", sidecar_python, f"from {OLDEST_PYTORCH} on")


def _checked(backend: Backend, python: str | None, wanted: str) -> Installation:
    version = installed_version(python)
    command = install_command(backend, python or "python")
    if version is None:
        where = f"the environment of {python}" if python else "this environment"
        raise TensorRTLLMUnavailable(f"TensorRT-LLM is not installed in {where}. To install it: {command}")
    found = _version(version)
    fits = (
        Version(OLDEST_ENGINE) <= found <= Version(ENGINE_PIN)
        if backend == "engine"
        else found >= Version(OLDEST_PYTORCH)
    )
    if not fits:
        raise TensorRTLLMMismatch(
            f"TensorRT-LLM {version} is installed, but trainer.ppo.trt_llm.backend={backend} needs a version {wanted}. "
            f"To install one: {command}"
        )
    return Installation(backend, version, python or sys.executable)


def _version(text: str) -> Version:
    """Parse a version without its local label: 1.2.1+cu13 is a build of 1.2.1."""
    try:
        return Version(Version(text).public)
    except InvalidVersion as error:
        raise TensorRTLLMMismatch(f"{DISTRIBUTION} reports the version {text!r}, which is not a valid one") from error
