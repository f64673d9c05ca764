"""The key-value cache: preallocated, one row per slot."""

from __future__ import annotations

import torch

from nemo_style_aligner.architecture import ModelArchitecture


class KVCache:
    """Keys and values of ``num_slots`` sequences of up to ``max_length`` positions, in every layer.

    ``keys[layer]`` and ``values[layer]`` are [num_slots, num_query_groups, max_length, kv_channels].
    A sequence's positions are contiguous per head, so the first n slots at the first L positions
    are a view, and attention over them copies nothing. Content past a sequence's length is finite
    leftover: masked attention gives it weight zero, which only works on finite numbers.
    """

    def __init__(
        self, architecture: ModelArchitecture, num_slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        shape = (num_slots, architecture.num_query_groups, max_length, architecture.kv_channels)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(architecture.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(architecture.num_layers)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All tensors the cache owns."""
        return [*self.keys, *self.values]

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [t, groups, kv_channels] at int64 ``slots``, ``positions`` [t]."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of slot ``source`` to slot ``target``."""
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self) -> None:
        """Zero everything: needed when a model that overflowed may have left non-finite numbers."""
        for buffer in self.buffers:
            buffer.zero_()
