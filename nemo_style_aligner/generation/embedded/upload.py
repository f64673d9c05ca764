"""Small arrays of the host on their way to the device."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` as a tensor on ``device``. The host does not wait for a GPU that is still at work.

    From memory that is not pinned it would. torch's allocator keeps the pinned copy until the GPU has read it.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host).to(device, non_blocking=True)
