"""Hides the GPUs from this process and from those that it starts: import this before anything that imports torch.

For benchmarks of the host, and for `ppo_step.py`, in which only the contenders may see a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

_visible = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def environment_with_gpus() -> dict[str, str]:
    """This process's environment with the GPUs visible again."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return environment if _visible is None else environment | {"CUDA_VISIBLE_DEVICES": _visible}


def is_gpu_hidden() -> bool:
    """Whether torch would see a GPU if none were hidden; asks in a process of its own."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", script], env=environment_with_gpus()).returncode == 0
