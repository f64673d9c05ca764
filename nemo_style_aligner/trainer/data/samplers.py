"""Which samples a step gets: one global order, whatever the number of ranks, resumable at any sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.log_fields import warn_for_all_ranks

logger = logging.getLogger(__name__)


class EpochSampler:
    """Yields global batches of dataset indices, epoch after epoch.

    The order depends on the seed and the epoch only, so every rank computes the same one. ``for batch in sampler``
    yields what is left of the current epoch; iterating again gives the next one. The position is one number,
    ``consumed_samples``: a sampler built with it continues where the old one stopped. A batch counts as consumed when
    it is handed out, so save the state after the batch's step and before the next batch is taken.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        consumed_samples: int = 0,
    ) -> None:
        """
        Args:
            num_samples: size of the dataset.
            drop_last: leave out a last batch of an epoch that is smaller than ``global_batch_size``. With ``shuffle``,
                each epoch leaves out other samples. A sampler that continues with another batch size still hands out
                what is left of its epoch, even if the last batch is smaller.
            consumed_samples: how many samples were handed out before, over all epochs.
        """
        if num_samples < (global_batch_size if drop_last else 1):
            raise DataError(
                f"{num_samples} samples do not fill one global batch of {global_batch_size}: lower the global batch "
                "size (model.global_batch_size; SFT: model.data.train_ds.global_batch_size) or give more data"
            )
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.samples_per_epoch = num_samples - num_samples % global_batch_size if drop_last else num_samples
        self.consumed_samples = consumed_samples

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, counted from 0."""
        return self.consumed_samples // self.samples_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, including a smaller last one unless it is left out."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    @property
    def after_batch(self) -> int:
        """``consumed_samples`` once the next batch is handed out, of which the epoch's end may leave fewer samples."""
        return min(self.consumed_samples + self.global_batch_size, (self.epoch + 1) * self.samples_per_epoch)

    def batches_until(self, epoch: int) -> int:
        """Batches that are left before ``epoch`` (counted from 0) begins. For a sampler with ``drop_last``."""
        return -(-max(0, epoch * self.samples_per_epoch - self.consumed_samples) // self.global_batch_size)

    def state_dict(self) -> dict[str, int]:
        """The position, and the length of the epochs in which it is counted."""
        return {
            "consumed_samples": self.consumed_samples,
            "samples_per_epoch": self.samples_per_epoch,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the same position in the same epoch.

        With another batch size, which may leave out another number of samples at an epoch's end, ``consumed_samples``
        becomes what it would be if all epochs had had the present length.
        """
        if (before := int(state["num_samples"])) != self.num_samples:
            warn_for_all_ranks(
                logger,
                "the checkpoint was written by a run on %d samples, but there are %d now: their order has changed, so "
                "that some samples of this epoch may be repeated or skipped",
                before,
                self.num_samples,
            )
        epoch, position = divmod(int(state["consumed_samples"]), int(state["samples_per_epoch"]))
        self.consumed_samples = epoch * self.samples_per_epoch + min(position, self.samples_per_epoch)

    def order(self, epoch: int) -> np.ndarray:
        """int64 indices of an epoch, in the order they are handed out."""
        if not self.shuffle:
            return np.arange(self.samples_per_epoch)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)[: self.samples_per_epoch]

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        order = self.order(epoch)
        while self.epoch == epoch:
            start, self.consumed_samples = self.consumed_samples, self.after_batch
            before = epoch * self.samples_per_epoch
            yield order[start - before : self.consumed_samples - before].tolist()
