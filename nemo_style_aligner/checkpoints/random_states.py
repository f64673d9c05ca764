"""Save and restore the states of a rank's random number generators."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.checkpoints.inert_pickle import items, one_line
from nemo_style_aligner.checkpoints.manifest import read_patiently
from nemo_style_aligner.checkpoints.torch_file import TorchFile
from nemo_style_aligner.errors import UserError

_NUMPY_WORDS = 624  # of its Mersenne twister


def random_states() -> dict[str, Any]:
    """This rank's generator states: Python, NumPy, torch, its GPU, and megatron-core's tensor-parallel tracker."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": (version, list(words), gauss),
        "numpy": legacy | {"state": {"key": legacy["state"]["key"].tolist(), "pos": int(legacy["state"]["pos"])}},
        "torch": torch.get_rng_state(),
        "tensor_parallel": dict(get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def encoded_random_states() -> bytes:
    """This rank's `random_states` now, as the contents of a file."""
    buffer = io.BytesIO()
    torch.save(random_states(), buffer)
    return buffer.getvalue()


def load_random_states(path: Path) -> None:
    """Set this rank's generators to the states saved in a file.

    Raises:
        DamagedCheckpointError, UnsafeCheckpointError: it holds something else.
        UnreadableError: it cannot be read now.
    """
    content = read_patiently(path, path.read_bytes)
    file = TorchFile(io.BytesIO(content), 0, len(content), str(path))
    try:
        set_random_states(_states(file))
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise DamagedCheckpointError(f"{path} holds no states of random generators: {one_line(error)}") from error


def _states(file: TorchFile) -> dict[str, Any]:
    """What `random_states` returned, of known types and ranges: the generators do not check all of it."""
    state = items(file.value)
    numpy = items(state["numpy"])
    numpy["state"] = items(numpy["state"])
    version, words, gauss = state["python"]
    key, position = numpy["state"]["key"], numpy["state"]["pos"]
    if not all(type(number) is int for number in (version, *words, *key, position, numpy["has_gauss"])):
        raise ValueError("a number is expected")
    if not {type(gauss), type(numpy["gauss"])} <= {float, type(None)}:
        raise ValueError("a number is expected")
    if len(key) != _NUMPY_WORDS or not 0 <= position <= _NUMPY_WORDS:
        raise ValueError("NumPy's state is none")
    states = {"torch": state["torch"]} | ({"cuda": state["cuda"]} if "cuda" in state else {})
    tensors = {name: file.tensor(value) for name, value in states.items()}
    trackers = {name: file.tensor(value) for name, value in items(state["tensor_parallel"]).items()}
    return {"python": (version, words, gauss), "numpy": numpy, "tensor_parallel": trackers, **tensors}


def set_random_states(state: dict[str, Any]) -> None:
    """Set this rank's generators to what `random_states` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    inner = state["numpy"]["state"]
    np.random.set_state(state["numpy"] | {"state": inner | {"key": np.array(inner["key"], dtype=np.uint32)}})
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
