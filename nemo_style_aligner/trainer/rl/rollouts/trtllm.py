"""TensorRT-LLM from the actor's config: which one is installed, found out without importing it, and an engine with it.

TensorRT-LLM runs in a process and, usually, in an environment of its own: it pins other versions of torch and
transformers than training has. Versions with the PyTorch backend and weight updates are needed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import socket
import subprocess
import sys
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.trtllm.sidecar.process import sidecar_environment
from nemo_style_aligner.engine.trtllm.sidecar_engine import SidecarEngine, SidecarSettings
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.config.schema import ActorLoop
from nemo_style_aligner.trainer.models.gpt import MegatronModel

logger = logging.getLogger(__name__)

DISTRIBUTION = "tensorrt-llm"
PIN = "1.3.0rc24"  # goes with torch 2.11
OLDEST = "1.2.0"

_INDEX = "--extra-index-url https://pypi.nvidia.com"
_QUERY_SECONDS = 120.0  # for an interpreter that starts from a cold network file system
_QUERY = (
    f"import importlib.metadata as m\ntry: print(m.version('{DISTRIBUTION}'))\nexcept m.PackageNotFoundError: print('')"
)
_MEBIBYTE = 2**20
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


# ---- what is installed ---------------------------------------------------------------------------


class TensorRTLLMUnavailable(UserError, RuntimeError):
    """TensorRT-LLM is not installed, or there is no GPU for it."""


class TensorRTLLMMismatch(UserError, RuntimeError):
    """TensorRT-LLM is installed in a version that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Installation:
    """A usable TensorRT-LLM: its version, and the interpreter that has it."""

    version: str
    python: str


def find_trtllm(given: str | None) -> Installation:
    """The TensorRT-LLM of ``trainer.ppo.trt_llm.sidecar_python``; None: of this environment.

    Raises:
        TensorRTLLMUnavailable: it is not installed, or there is no GPU for it.
        TensorRTLLMMismatch: the installed version does not fit. Both messages name the command that installs it.
    """
    version = installed_version(given)
    install = (
        f"To install one: {given or 'python'} -m pip install --pre {_INDEX} {DISTRIBUTION}=={PIN} (see "
        "docs/tensorrt_llm.md)"
    )
    if version is None:
        where = f"the environment of {given}" if given else "this environment"
        raise TensorRTLLMUnavailable(f"TensorRT-LLM is not installed in {where}. {install}")
    if _version(version) < Version(OLDEST):
        raise TensorRTLLMMismatch(
            f"TensorRT-LLM {version} is installed, but a version from {OLDEST} on is needed. {install}"
        )
    if not torch.cuda.is_available():
        raise TensorRTLLMUnavailable(f"TensorRT-LLM {version} is installed, but there is no CUDA device for it")
    return Installation(version, given or sys.executable)


def installed_version(python: str | None = None) -> str | None:
    """The TensorRT-LLM version in ``python``'s environment (default: this process's); None if it has none.

    Raises:
        TensorRTLLMUnavailable: ``python`` cannot be run.
    """
    if python is None:
        try:
            return importlib.metadata.version(DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            return None
    key = f"trainer.ppo.trt_llm.sidecar_python={python}"
    try:
        done = subprocess.run([python, "-c", _QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TensorRTLLMUnavailable(
            f"{key} cannot be run ({error}): give the python of the environment that has TensorRT-LLM"
        ) from error
    if done.returncode:
        raise TensorRTLLMUnavailable(
            f"{key} ended with status {done.returncode} when asked for its version of {DISTRIBUTION}: "
            f"{done.stderr.strip()[-500:]}"
        )
    return done.stdout.strip() or None


def _version(text: str) -> Version:
    """Parse a version without its local label: 1.2.1+cu13 is a build of 1.2.1."""
    try:
        return Version(Version(text).public)
    except InvalidVersion as error:
        raise TensorRTLLMMismatch(f"{DISTRIBUTION} reports the version {text!r}, which is not a valid one") from error


# ---- an engine -----------------------------------------------------------------------------------


def trtllm_engine(
    ppo: ActorLoop, repetition_penalty: float, model: MegatronModel, group: EngineGroup, **options: Any
) -> SidecarEngine:
    """The engine of this rank's tensor-parallel group, not built yet. Collective.

    Args:
        ppo: ``trainer.ppo``.
        repetition_penalty: of sampling.
        model: the policy.
        group: the tensor-parallel group.
        options: those common to all engines, see `GenerationEngine`.

    Raises:
        TensorRTLLMUnavailable, TensorRTLLMMismatch: see `find_trtllm`.
        ValueError: the model, the layout or a setting is not supported; the message says what to change.
    """
    section, layout = ppo.trt_llm, model.layout
    found = find_trtllm(section.sidecar_python)
    _check_settings(ppo, repetition_penalty, found.version)
    if layout.pp_size > 1:
        logger.warning(
            "TensorRT-LLM runs without pipeline parallelism here: each of the %d tensor-parallel groups generates with "
            "all layers, whether trainer.ppo.trt_llm.reshard is set or not; a GPU holds %d times the weights of its "
            "stage",
            layout.num_replicas * layout.pp_size,
            layout.pp_size,
        )
    hosts = set(group.gather(socket.gethostname()))
    if len(hosts) > 1:
        raise ValueError(
            f"a tensor-parallel group is on {sorted(hosts)}: TensorRT-LLM needs each group on one machine; "
            "lower model.tensor_model_parallel_size or set trainer.ppo.generation.engine=embedded"
        )
    device = torch.cuda.current_device()
    devices = group.gather((_visible_device(device), f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
    entries = [entry for entry, _ in devices]
    if len(set(entries)) < len({uuid for _, uuid in devices}):
        raise ValueError(
            f"the ranks of an engine see their GPUs as {', '.join(entries)}, each in a numbering of its own, by which "
            "the sidecar cannot find them: have each rank see all GPUs of the node (srun without --gpus-per-task)"
        )
    settings = SidecarSettings(
        python=found.python,
        environment=sidecar_environment(os.environ, entries),
        device_uuids=tuple(uuid for _, uuid in devices),
        sleep=section.unload_engine_train,
        kv_cache_memory_fraction=section.kv_cache_memory_fraction,
        bucket_bytes=section.refit_bucket_mebibytes * _MEBIBYTE,
        **vars(section.timeouts),
    )
    return SidecarEngine(model.architecture, settings, dtype=model.config.params_dtype, group=group, **options)


def _check_settings(ppo: ActorLoop, repetition_penalty: float, version: str) -> None:
    """Refuse what TensorRT-LLM cannot honour.

    Its log-probs are of the logits at temperature 1, after the bias that holds stop tokens back at first.

    Raises:
        ValueError: settings that need other log-probs, a repetition penalty, which this version silently ignores, or
            memory that cannot be shared.
    """
    asked = [key for key in ("importance_weight_cap", "importance_sequence_bounds") if getattr(ppo, key) is not None]
    if ppo.policy_logprobs == "engine":
        asked.append("policy_logprobs=engine")
    if asked:
        names = ", ".join(f"trainer.ppo.{name}" for name in asked)
        raise ValueError(
            f"{names} cannot be used with TensorRT-LLM: its log-probs are not those of the policy as it samples"
        )
    if repetition_penalty != 1.0 and _version(version) < Version(PIN):
        raise ValueError(
            f"model.ppo.sampling_params.repetition_penalty: TensorRT-LLM {version} ignores it; install {PIN} or newer"
        )
    for variable in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(variable, "").replace(" ", "").lower():
            raise ValueError(
                f"{variable} turns expandable segments on, whose memory cannot be shared with another process: remove "
                "expandable_segments from it to generate with TensorRT-LLM"
            )


def _visible_device(index: int) -> str:
    """This process's device number ``index`` as an entry of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    entry = visible.split(",")[index].strip() if visible else str(index)
    if not entry.isdigit():
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible} names devices by {entry}: TensorRT-LLM's workers need numbers there"
        )
    return entry
