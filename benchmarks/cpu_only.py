"""Hides the GPUs from this process and from those that it starts: import it before anything that imports torch.

For benchmarks that are of the host, and for `ppo_step.py`, whose contenders alone may see a GPU.
"""

from __future__ import annotations

import os

_visible = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def environment_with_gpus() -> dict[str, str]:
    """This process's environment as it would be had nothing been hidden."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return environment if _visible is None else environment | {"CUDA_VISIBLE_DEVICES": _visible}
