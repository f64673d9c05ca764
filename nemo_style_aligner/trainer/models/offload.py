"""Adam's states in host memory between updates (``offload_adam_states``): fp32 main weights and both moments.

While rollouts are generated or a service scores, nobody needs them, and they are the largest part of a trainer's device
memory: 12 of the 18 bytes per parameter of bf16 training without data-parallel shards. The gradients, 4 bytes more, are
freed meanwhile, too (`Optimizer.offload_states`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from nemo_style_aligner.engine.parallel.groups import device

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


class AdamOffload:
    """Moves an optimizer's states to host memory and back, bit for bit.

    The tensors stay the same objects, only their memory moves. So code that reads them (to save a checkpoint, for
    example) works wherever they are. With a GPU, host memory is pinned and allocated once, and copies are asynchronous.

    Args:
        optimizers: megatron-core's, each around one `torch.optim.Optimizer` (not a `ChainedOptimizer`).
        model: its parameters are not moved, even where they are the main weights themselves (fp32).
    """

    def __init__(self, optimizers: list[MegatronOptimizer], model: torch.nn.Module) -> None:
        self._optimizers = optimizers
        self._model = model
        self._home = device()
        self._resting: dict[torch.Tensor, torch.Tensor] = {}
        self.is_away = False

    def offload(self) -> None:
        """Move the states from the device to host memory."""
        for tensor in self._states():
            if tensor not in self._resting:
                self._resting[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            tensor.data = self._resting[tensor].copy_(tensor.detach(), non_blocking=True)
        self.is_away = True
        if self._home.type == "cuda":
            torch.cuda.current_stream().synchronize()  # before anything reads the copies
            torch.cuda.empty_cache()  # an engine in another process wants the memory too

    def bring_back(self) -> None:
        """Move the states to the device again, unless they are there.

        These are the states that the optimizer has now: loading a checkpoint, or writing the first one, may have
        created new moments.
        """
        if not self.is_away:
            return
        states = list(self._states())
        for tensor in states:
            if tensor in self._resting or tensor.device.type != self._home.type:
                # Asynchronous: work queued on the stream afterwards finds the copy complete.
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


class WeightOffload:
    """Moves a model's weights to host memory and back, bit for bit.

    Only the storages lose their memory: parameters, and megatron-core's buffers and shards that are views of them, stay
    what they are. Nothing may read or change them meanwhile.

    Args:
        module: whose parameters these are.
        is_frozen: they never change, so they are copied to host memory once.
    """

    def __init__(self, module: torch.nn.Module, *, is_frozen: bool = False) -> None:
        storages = (parameter.untyped_storage() for parameter in module.parameters())
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._resting: list[torch.UntypedStorage] = []
        self._is_frozen = is_frozen
        self.is_away = False

    def offload(self) -> None:
        """Move the weights to host memory, unless they are there."""
        if self.is_away:
            return
        is_copied = bool(self._resting) and self._is_frozen
        if not self._resting:
            pins = self._storages[0].is_cuda
            self._resting = [
                torch.empty(len(s), dtype=torch.uint8, pin_memory=pins).untyped_storage() for s in self._storages
            ]
        for there, here in zip(self._resting, self._storages, strict=True) if not is_copied else ():
            there.copy_(here, non_blocking=True)
        if self._storages[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        for storage in self._storages:
            storage.resize_(0)
        if self._storages[0].is_cuda:
            torch.cuda.empty_cache()  # an engine in another process wants the memory too
        self.is_away = True

    def bring_back(self) -> None:
        """Move the weights to where they were, unless they are there."""
        if not self.is_away:
            return
        for there, here in zip(self._resting, self._storages, strict=True):
            here.resize_(len(there))
            here.copy_(there, non_blocking=True)
        self.is_away = False
