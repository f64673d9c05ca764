"""Weights from the training ranks to ranks that only generate, in buckets of bounded size.

Both sides know the layout table, so nothing but the tensors' bytes goes over the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.weights.layout import HFTensor, hf_tensors, weight_layout
from nemo_style_aligner.weights.stream import DEFAULT_BUCKET_BYTES

Broadcast = Callable[[torch.Tensor], None]


def send_weights(
    stream: Iterable[tuple[str, torch.Tensor]],
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    broadcast: Broadcast,
) -> None:
    """Send the stream of `export_weights` to the ranks that call `receive_weights`.

    Args:
        dtype: of the tensors.
        broadcast: sends a tensor.

    Raises:
        ValueError: the stream is not the architecture's.
    """
    tensors = iter(stream)
    for bucket in _buckets(architecture, dtype):
        flat = torch.empty(_numel(bucket), dtype=dtype, device=device())
        offset = 0
        for expected in bucket:
            name, tensor = next(tensors, ("nothing", torch.empty(0)))
            if (name, tuple(tensor.shape)) != expected:
                raise ValueError(f"the weights have {name} {list(tensor.shape)} in the place of {expected.name}")
            flat[offset : offset + tensor.numel()] = tensor.reshape(-1)
            offset += tensor.numel()
        broadcast(flat)
    if (extra := next(tensors, None)) is not None:
        raise ValueError(f"the weights have {extra[0]}, which the model has no place for")


def receive_weights(
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    broadcast: Broadcast,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_weights` sends, as the stream that an engine's `refit` takes; tensors on this rank's device."""
    for bucket in _buckets(architecture, dtype):
        flat = torch.empty(_numel(bucket), dtype=dtype, device=device())
        broadcast(flat)
        offset = 0
        for tensor in bucket:
            end = offset + math.prod(tensor.shape)
            yield tensor.name, flat[offset:end].view(tensor.shape)
            offset = end


def _buckets(architecture: ModelArchitecture, dtype: torch.dtype) -> Iterator[list[HFTensor]]:
    """Runs of tensors of at most `DEFAULT_BUCKET_BYTES`; a larger tensor gets a bucket of its own."""
    bucket: list[HFTensor] = []
    for tensor in hf_tensors(weight_layout(architecture)).values():
        if bucket and _numel([*bucket, tensor]) * dtype.itemsize > DEFAULT_BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def _numel(bucket: list[HFTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in bucket)
