"""Weight streams cut into buckets, and buckets encoded as CUDA IPC handles."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nemo_style_aligner.generation.engine import WeightStream

Bucket = list[tuple[str, torch.Tensor]]

_HANDLE = 7  # which of the arguments of torch's `rebuild_cuda_tensor` is the memory's handle
_HANDLE_BYTES = 64  # of CUDA's own handle


def buckets(weights: WeightStream, most_bytes: int) -> Iterator[Bucket]:
    """Split a stream, in order, into runs of at most ``most_bytes``; a larger tensor gets a bucket of its own."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def ipc_handles(bucket: Bucket) -> str:
    """Encode, as TensorRT-LLM reads them, the handles by which another process on this GPU maps the bucket's tensors.

    The encoding is base64 of a pickled list of (name, (function, arguments)); TensorRT-LLM's workers unpickle it with
    a restricted unpickler. The tensors must stay alive until they have been read there.

    Pass copies, and drop them afterwards: each time a tensor is shared, torch wraps its storage once more, and it
    frees the wrappers only with the storage itself, which for a model's parameters is never.
    """
    handles = [(name, _of_any_version(*reduce_tensor(tensor.detach()))) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def _of_any_version(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A tensor's handle in the form that all versions of torch read: CUDA's own, without torch's two bytes before it.

    The first of these is a version, the second the kind of memory. torch refuses versions that it does not know: the
    torch 2.11 of TensorRT-LLM 1.3 refuses torch 2.13's, whose handles are the same otherwise.
    """
    handle = arguments[_HANDLE]
    if len(handle) == 2 + _HANDLE_BYTES and handle[1:2] == b"c":  # by cudaMalloc
        arguments = (*arguments[:_HANDLE], handle[2:], *arguments[_HANDLE + 1 :])
    return function, arguments
