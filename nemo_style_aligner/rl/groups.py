"""Statistics over groups of samples. A group is the samples of one prompt in one step."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSamples:
    """N samples in groups. Samples that do not count enter no statistic, even as NaN.

    The methods take one number per sample, fp64 [N], and return one per sample: that of its group. Where all of a
    group's numbers are equal, mean and deviation are exact.

    Attributes:
        groups: int64 [N]; samples of one prompt have the same number, and may stand anywhere.
        counts: bool [N]; False where a sample's reward is missing.
    """

    groups: torch.Tensor
    counts: torch.Tensor

    def group_size(self, where: torch.Tensor | None = None) -> torch.Tensor:
        """How many samples count, fp64 [N]; ``where``, bool [N], narrows them down."""
        return self._sum(self._counting(where).double())

    def group_mean(self, x: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the group's counting samples; 0 where none counts."""
        shifted, least = self._shifted(x, where)
        return least + self._sum(shifted) / self.group_size(where).clamp(min=1)

    def group_std(self, x: torch.Tensor) -> torch.Tensor:
        """The sample standard deviation (divisor: one less than their number); 0 where fewer than two count."""
        deviations = (x - self.group_mean(x)).masked_fill(~self.counts, 0)
        return (self._sum(deviations.square()) / (self.group_size() - 1).clamp(min=1)).sqrt()

    def others_mean(self, x: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the group's other samples ("leave one out"); the sample's own number where no other counts.

        Args:
            where: bool [N], narrows down the samples that others are compared with.
        """
        shifted, least = self._shifted(x, where)
        others = self.group_size(where) - self._counting(where).double()
        mean = least + (self._sum(shifted) - shifted) / others.clamp(min=1)
        return torch.where(others > 0, mean, x)

    def is_uniform(self, x: torch.Tensor) -> torch.Tensor:
        """Whether all counting samples of the group have the same number, as a single one has: bool [N].

        From such rewards a group estimator learns nothing (DAPO's dynamic sampling, arXiv:2503.14476 section 3.2).
        """
        shifted, _ = self._shifted(x, None)
        return self._sum(shifted) == 0

    def _counting(self, where: torch.Tensor | None) -> torch.Tensor:
        return self.counts if where is None else self.counts & where

    def _shifted(self, x: torch.Tensor, where: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` over its group's least number, at least 0, and 0 where a sample does not count; that number."""
        counting = self._counting(where)
        index = self._index
        least = torch.full_like(x, torch.inf).scatter_reduce(0, index, x.masked_fill(~counting, torch.inf), "amin")
        least = torch.where(least.isfinite(), least, 0.0)[index]
        return (x - least).masked_fill(~counting, 0), least

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, self._index, x)[self._index]

    @property
    def _index(self) -> torch.Tensor:
        """``groups`` numbered from 0, int64 [N]."""
        return self.groups.unique(return_inverse=True)[1]
