"""Check a weight stream against the tensors that its receiver expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from nemo_style_aligner.wording import some_of


def checked(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    why_unexpected: Callable[[str], str] = lambda name: "the model does not have it",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream of (Hugging Face name, full tensor) through, and check it.

    Args:
        weights: the stream.
        shapes: of every tensor that is expected.
        why_unexpected: says, for the error, why a name is not among them.

    Raises:
        ValueError: a tensor is unknown, given twice or misshapen, or, at the end, missing; the message names it.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"the weight stream has {name}: {why_unexpected(name)}")
        if name in seen:
            raise ValueError(f"the weight stream has {name} twice")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"the weight stream has {name} of shape {tuple(tensor.shape)}, expected {tuple(shape)}: give full, "
                "unsharded and unpadded tensors of the same model"
            )
        seen.add(name)
        yield name, tensor
    missing = [name for name in shapes if name not in seen]
    if missing:
        raise ValueError(f"the weight stream lacks {some_of(missing)}")
