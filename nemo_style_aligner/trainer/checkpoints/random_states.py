"""Save and restore the states of a rank's random number generators."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_style_aligner.guard.file_source import DamagedCheckpointError
from nemo_style_aligner.guard.parsing import read_json
from nemo_style_aligner.trainer.checkpoints.manifest import read_patiently
from nemo_style_aligner.trainer.checkpoints.sharded_index import one_line

_NUMPY_WORDS = 624  # of its Mersenne twister


def random_states() -> dict[str, Any]:
    """This rank's generator states: Python, NumPy, torch, its GPU, and megatron-core's tensor-parallel tracker.

    All of it is JSON.
    """
    numpy: Any = np.random.get_state()
    _, words, position, has_gauss, gauss = numpy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [words.tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().tolist(),
        "tensor_parallel": {name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def encoded_random_states() -> str:
    """This rank's `random_states` now, as the contents of a file."""
    return json.dumps(random_states())


def load_random_states(path: Path) -> None:
    """Set this rank's generators to the states saved in a file.

    Raises:
        DamagedCheckpointError: it holds something else.
        UnreadableError: it cannot be read now.
    """
    try:
        set_random_states(read_patiently(path, lambda: read_json(path)))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} holds no states of random generators: {one_line(error)}") from error


def set_random_states(state: dict[str, Any]) -> None:
    """Set this rank's generators to what `random_states` returned: of known types and ranges, which not all check."""
    (version, words, next_gauss), (key, position, has_gauss, gauss) = state["python"], state["numpy"]
    if not all(type(number) is int for number in (version, *words, *key, position, has_gauss)):
        raise ValueError("a whole number is expected")
    if len(key) != _NUMPY_WORDS or not 0 <= position <= _NUMPY_WORDS:
        raise ValueError("NumPy's state is none")
    tensors = {name: torch.tensor(state[name], dtype=torch.uint8) for name in ("torch", "cuda") if name in state}
    tracked = {name: torch.tensor(own, dtype=torch.uint8) for name, own in state["tensor_parallel"].items()}
    random.setstate((version, tuple(words), None if next_gauss is None else float(next_gauss)))
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, float(gauss)))
    torch.set_rng_state(tensors["torch"])
    get_cuda_rng_tracker().set_states(tracked)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
