"""Weights that a step reads in the trainer's own memory, where both lay them out alike.

Nothing is copied for them, so nothing but the version stamp would tell that training has changed them: hence a
sample of their values is compared before and after each generation with that of the latest refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Offer = Callable[[], Mapping[tuple[str, ...], torch.Tensor]]

_SAMPLED_VALUES = 64  # of each parameter, about; a training step changes nearly all


class LentWeights:
    """What a trainer offers, and what a step has taken of it.

    Args:
        offer: returns this rank's live parameters by the Hugging Face tensors they are made of, see
            `weights.stream.lendable_weights`. Training changes them in place and never moves them.
    """

    def __init__(self, offer: Offer | None = None) -> None:
        self._offer: Offer = offer or dict
        self._offered = self._offer()
        self._taken: dict[tuple[str, ...], torch.Tensor] = {}
        self._sample: torch.Tensor | None = None

    def take(
        self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """The parameter of ``names``, to be read and never written; None unless it is just what is wanted."""
        tensor = self._offered.get(names)
        if tensor is None or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            return None
        if tensor.dtype != dtype or tensor.device.type != device.type:
            return None
        self._taken[names] = tensor
        return tensor

    @property
    def names(self) -> frozenset[str]:
        """Tensors that were taken."""
        return frozenset(name for names in self._taken for name in names)

    @property
    def num_bytes(self) -> int:
        """Of all that was taken."""
        return sum(tensor.nbytes for tensor in self._taken.values())

    def remember(self) -> None:
        """Note a sample of the present values.

        Raises:
            RuntimeError: a parameter lies elsewhere than when the engine was built.
        """
        present = self._offer() if self._taken else {}
        for names, tensor in self._taken.items():
            if present[names].data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"refit: the trainer's {names[0]} has moved in memory since the engine was built, which reads it "
                    "in place; build the engine after everything that moves parameters"
                )
        self._sample = self._take_sample()

    def require_unchanged(self, version: int) -> None:
        """Raise RuntimeError if values are others than those that `remember` noted for weights of ``version``."""
        sample = self._take_sample()
        if sample is not None and (self._sample is None or not torch.equal(sample, self._sample)):
            raise RuntimeError(
                f"the weights have changed since the refit that brought version {version}: the engine reads the "
                "trainer's own memory, so refit after training and before generating"
            )

    @torch.no_grad()
    def _take_sample(self) -> torch.Tensor | None:
        """Bits of some values of all that was taken, int16 or int32 [n]; None if that is nothing."""
        if not self._taken:
            return None
        flat = (tensor.reshape(-1) for tensor in self._taken.values())
        values = torch.cat([values[:: max(1, len(values) // _SAMPLED_VALUES)] for values in flat])
        return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
