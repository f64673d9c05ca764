"""Weights that a step reads in the trainer's own memory, where both divide them alike over ranks.

A step views the parameters that it can compute with as they are. Nothing is copied then, so only the version stamp
would tell that training has changed them: a sample of their values is therefore compared, before and after each
generation, with that of the latest refit. Parameters that the step lays out differently it copies at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Offer = Callable[[], Mapping[tuple[str, ...], torch.Tensor]]

_SAMPLED_VALUES = 64  # of each parameter, about; a training step changes nearly all values


class LentWeights:
    """The parameters that a trainer offers, and those of them that a step has taken.

    Args:
        offer: returns this rank's live parameters, keyed by the names of the Hugging Face tensors in each, see
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
        """The parameter of ``names``, to compute with in place; None unless it has this shape, dtype and device."""
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
        """Forget everything that was taken."""
        self._viewed.clear()
        self._copied.clear()

    @property
    def names(self) -> frozenset[str]:
        """Tensors that were taken, to view or to copy."""
        return frozenset(name for names in (*self._viewed, *self._copied) for name in names)

    @property
    def num_viewed_bytes(self) -> int:
        """Size of all viewed parameters."""
        return sum(tensor.nbytes for tensor in self._viewed.values())

    def require_in_place(self) -> None:
        """Raise RuntimeError if a parameter lies elsewhere than when the engine was built."""
        taken = self._viewed | self._copied
        present = self._offer() if taken else {}
        for names, tensor in taken.items():
            if present[names].data_ptr() != tensor.data_ptr():
                raise RuntimeError(
                    f"refit: the trainer's {names[0]} has moved in memory since the engine was built, and the engine "
                    "reads it in place; build the engine after everything that moves parameters"
                )

    def remember(self) -> None:
        """Keep a sample of the viewed parameters' present values."""
        self._sample = self._take_sample()

    def require_unchanged(self, version: int) -> None:
        """Raise RuntimeError if values differ from those that `remember` kept, at the refit of ``version``."""
        sample = self._take_sample()
        if sample is not None and (self._sample is None or not torch.equal(sample, self._sample)):
            raise RuntimeError(
                f"the weights have changed since the refit that brought version {version}: the engine reads the "
                "trainer's own memory, so refit after training and before generating"
            )

    @torch.no_grad()
    def _take_sample(self) -> torch.Tensor | None:
        """Bits of some values of each viewed parameter, int16 or int32 [n]; None if nothing is viewed."""
        if not self._viewed:
            return None
        flat = (tensor.reshape(-1) for tensor in self._viewed.values())
        values = torch.cat([values[:: max(1, len(values) // _SAMPLED_VALUES)] for values in flat])
        return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
