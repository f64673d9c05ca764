"""Weights that a step reads in the trainer's own memory, where both divide them alike over ranks.

A step views the parameters that it can compute with as they are, so training changes them at once. Parameters that the
step lays out differently it copies at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Offer = Callable[[], Mapping[tuple[str, ...], torch.Tensor]]
"""Returns this rank's live parameters by the names of the Hugging Face tensors in each; see
`weights.stream.lendable_weights`."""


class TrainerWeights:
    """The parameters that a trainer offers, and those of them that a step uses.

    Args:
        offer: its parameters are changed in place by training, and never moved.
    """

    def __init__(self, offer: Offer | None = None) -> None:
        self._offer: Offer = offer or dict
        self._offered = self._offer()
        self.viewed: dict[tuple[str, ...], torch.Tensor] = {}
        self.copied: dict[tuple[str, ...], torch.Tensor] = {}

    def find(
        self, names: tuple[str, ...], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
    ) -> torch.Tensor | None:
        """The parameter of ``names``; None unless it has this shape and device, and one of ``dtypes``.

        Who uses it notes it in ``viewed`` (computed with in place) or ``copied`` (at each refit).
        """
        tensor = self._offered.get(names)
        if tensor is None or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            return None
        return tensor if tensor.dtype in dtypes and tensor.device.type == device.type else None

    @property
    def names(self) -> frozenset[str]:
        """Tensors that are used, viewed or copied."""
        return frozenset(name for names in (*self.viewed, *self.copied) for name in names)

    def require_in_place(self) -> None:
        """Raise RuntimeError if a parameter lies elsewhere than when the engine was built."""
        used = self.viewed | self.copied
        present = self._offer() if used else {}
        for names, tensor in used.items():
            if present[names].data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"refit: the trainer's {names[0]} has moved in memory since the engine was built, and the engine "
                    "reads it in place; build the engine after everything that moves parameters"
                )
