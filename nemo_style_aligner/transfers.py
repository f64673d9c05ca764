"""Tensors on their way to a GPU."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """``tensor`` on ``target``; itself where it is there.

    From the CPU to a GPU by way of pinned memory, in the order of the GPU's work: the CPU does not wait until that is
    done, as it would for a copy of pageable memory.
    """
    if tensor.device.type == "cpu" and target.type == "cuda":
        return tensor.pin_memory().to(target, non_blocking=True)
    return tensor.to(target)
