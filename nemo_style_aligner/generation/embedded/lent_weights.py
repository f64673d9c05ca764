"""Weights that a step reads in the trainer's own memory, where both divide them alike over ranks.

What it can compute with as it is it views: nothing is copied, so nothing but the version stamp would tell that training
has changed it. Hence a sample of these values is compared before and after each generation with that of the latest
refit. What it lays out in another way it copies at each refit.
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
        self._viewed: dict[tuple[str, ...], torch.Tensor] = {}
        self._copied: dict[tuple[str, ...], torch.Tensor] = {}
        self._sample: torch.Tensor | None = None

    def view(
        self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        """The parameter of ``names``, to compute with; None unless it is just what is wanted."""
        return self._take(self._viewed, names, shape, (dtype,), device)

    def source(
        self, names: tuple[str, ...], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
    ) -> torch.Tensor | None:
        """The parameter of ``names``, to copy from at each refit; None unless of this shape and one of ``dtypes``."""
        return self._take(self._copied, names, shape, dtypes, device)

    def _take(
        self,
        taken: dict[tuple[str, ...], torch.Tensor],
        names: tuple[str, ...],
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> torch.Tensor | None:
        tensor = self._offered.get(names)
        if tensor is None or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            return None
        if tensor.dtype not in dtypes or tensor.device.type != device.type:
            return None
        taken[names] = tensor
        return tensor

    def give_back(self) -> None:
        """Have nothing taken."""
        self._viewed.clear()
        self._copied.clear()

    @property
    def names(self) -> frozenset[str]:
        """Tensors that were taken, to view or to copy."""
        return frozenset(name for names in (*self._viewed, *self._copied) for name in names)

    @property
    def num_viewed_bytes(self) -> int:
        """Of all that is viewed."""
        return sum(tensor.nbytes for tensor in self._viewed.values())

    def require_in_place(self) -> None:
        """Raise RuntimeError if a parameter lies elsewhere than when the engine was built."""
        taken = self._viewed | self._copied
        present = self._offer() if taken else {}
        for names, tensor in taken.items():
            if present[names].data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"refit: the trainer's {names[0]} has moved in memory since the engine was built, which reads it "
                    "there; build the engine after everything that moves parameters"
                )

    def remember(self) -> None:
        """Note a sample of the present values of what is viewed."""
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
        """Bits of some values of all that is viewed, int16 or int32 [n]; None if that is nothing."""
        if not self._viewed:
            return None
        flat = (tensor.reshape(-1) for tensor in self._viewed.values())
        values = torch.cat([values[:: max(1, len(values) // _SAMPLED_VALUES)] for values in flat])
        return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
