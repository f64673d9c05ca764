"""Adam's states in host memory between updates (``offload_adam_states``): fp32 main weights and both moments.

While rollouts are generated or a service scores, nobody needs them, and they are the largest part of a trainer's device
memory: 12 of the 18 bytes per parameter of bf16 training without data-parallel shards. The gradients, 4 bytes more, are
freed meanwhile, too (`Optimizer.offload_states`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from nemo_style_aligner.parallel.groups import device

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


class AdamOffload:
    """Moves an optimizer's states to host memory and back, bit for bit.

    The tensors stay the same objects; their contents are what moves. So whoever reads them (a checkpoint, say) may do
    so wherever they are. On a GPU the host memory is pinned, allocated once, and copies run beside the host's work.

    Args:
        optimizers: megatron-core's, each around a `torch.optim.Optimizer` (not its chain of them).
        model: whose parameters stay where they are, also where they are their own main weights (fp32).
    """

    def __init__(self, optimizers: list[MegatronOptimizer], model: torch.nn.Module) -> None:
        self._optimizers = optimizers
        self._model = model
        self._home = device()
        self._resting: dict[torch.Tensor, torch.Tensor] = {}
        self.is_away = False

    def offload(self) -> None:
        """Move the states to host memory, unless they are there."""
        if self.is_away:
            return
        for tensor in self._states():
            if tensor not in self._resting:
                self._resting[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            tensor.data = self._resting[tensor].copy_(tensor.detach(), non_blocking=True)
        self.is_away = True
        if self._home.type == "cuda":
            torch.cuda.current_stream().synchronize()  # before anybody reads them here
            torch.cuda.empty_cache()  # an engine in another process wants the memory too

    def bring_back(self) -> None:
        """Move the states to the device again, unless they are there.

        Those that the optimizer has now: loading a checkpoint, or writing the first one, makes moments anew.
        """
        if not self.is_away:
            return
        states = list(self._states())
        for tensor in states:
            if tensor in self._resting or tensor.device.type != self._home.type:
                # In the order of the stream: what is queued after it finds it complete.
                at_home = torch.empty_like(tensor, device=self._home)
                tensor.data = at_home.copy_(tensor.detach(), non_blocking=True)
        self._resting = {tensor: self._resting[tensor] for tensor in states if tensor in self._resting}
        self.is_away = False

    def _states(self) -> Iterator[torch.Tensor]:
        """Moments, and main weights that are not the model's own."""
        shared = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.untyped_storage().data_ptr() not in shared:
                        yield parameter
                    moments = optimizer.optimizer.state.get(parameter, {})
                    yield from (moment for moment in moments.values() if torch.is_tensor(moment))
