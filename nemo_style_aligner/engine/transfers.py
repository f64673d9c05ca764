"""Moving tensors to a GPU."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """``tensor`` on ``target``; itself if it is there already.

    From the CPU to a GPU the copy is made from pinned memory and queued behind the GPU's work, for which the CPU would
    have to wait if it copied pageable memory.
    """
    if tensor.device.type == "cpu" and target.type == "cuda":
        return tensor.pin_memory().to(target, non_blocking=True)
    return tensor.to(target)
