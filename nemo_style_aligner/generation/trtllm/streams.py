"""Weight streams: checked against what a model must have, cut into buckets, turned into CUDA IPC handles."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nemo_style_aligner.generation.engine import WeightStream
from nemo_style_aligner.weights.layout import HFTensor

Bucket = list[tuple[str, torch.Tensor]]


def checked(weights: WeightStream, expected: Mapping[str, HFTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream through.

    Raises:
        ValueError: a tensor is unknown, given twice or misshapen, or, at the end, missing; the message names it.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(f"the weight stream has {name}, which the model does not have")
        if name in seen:
            raise ValueError(f"the weight stream has {name} twice")
        if tuple(tensor.shape) != expected[name].shape:
            raise ValueError(
                f"the weight stream has {name} of shape {tuple(tensor.shape)}, expected {expected[name].shape}"
            )
        seen.add(name)
        yield name, tensor
    missing = sorted(expected.keys() - seen)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"the weight stream lacks {', '.join(missing[:5])}{more}")


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
    """
    handles = [(name, reduce_tensor(tensor.detach())) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")
