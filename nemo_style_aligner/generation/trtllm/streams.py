"""Weight streams cut into buckets, and turned into CUDA IPC handles."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nemo_style_aligner.generation.engine import WeightStream

Bucket = list[tuple[str, torch.Tensor]]


def buckets(weights: WeightStream, most_bytes: int) -> Iterator[Bucket]:
    """Runs of tensors of ``most_bytes`` together, or one tensor that is larger. Order and names are kept."""
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
    """What lets another process on this GPU map the bucket's tensors, in the encoding TensorRT-LLM reads.

    That is base64 of a pickled list of (name, (function, arguments)); TensorRT-LLM's workers unpickle it with a
    restricted unpickler. The tensors must stay alive until they have been read there.

    Give copies that are dropped then: torch wraps a tensor's storage once more each time that it is shared, and
    gives the wrappers back with the storage alone, which of a model's parameters is never.
    """
    handles = [(name, reduce_tensor(tensor.detach())) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")
