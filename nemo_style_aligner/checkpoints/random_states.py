"""Save and restore the states of a rank's random number generators."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_style_aligner.checkpoints.manifest import read_patiently


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
    """Set this rank's generators to the states saved in a file."""
    content = io.BytesIO(read_patiently(path, path.read_bytes))
    set_random_states(torch.load(content, map_location="cpu", weights_only=True))


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
