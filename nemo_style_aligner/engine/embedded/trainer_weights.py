"""Weights that a step reads in the trainer's own memory, where both divide them alike over ranks.

A step views the parameters that it can compute with as they are. Nothing is copied then, so only the version stamp
would tell that training has changed them: a sample of their values is therefore compared, before and after each
generation, with that of the latest refit. Parameters that the step lays out differently it copies at each refit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Offer = Callable[[], Mapping[tuple[str, ...], torch.Tensor]]
"""Returns this rank's live parameters by the names of the Hugging Face tensors in each; see
`weights.stream.lendable_weights`."""

_SAMPLED_VALUES = 64  # of each parameter, about; a training step changes nearly all values


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
        self._sample: torch.Tensor | None = None

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
        if not self.viewed:
            return None
        flat = (tensor.reshape(-1) for tensor in self.viewed.values())
        values = torch.cat([values[:: max(1, len(values) // _SAMPLED_VALUES)] for values in flat])
        return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
