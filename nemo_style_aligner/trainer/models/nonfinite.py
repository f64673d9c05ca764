"""What happens when a loss, a gradient, a reward or a value is NaN or Inf: the run stops, or goes on without it."""

from __future__ import annotations

import logging

from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.config.schema import Updates

logger = logging.getLogger(__name__)


STOP = Updates(on_nonfinite="stop")


class SkipCounter:
    """Counts updates that were not applied, and raises where the policy does not allow another.

    Attributes:
        total: updates skipped in the whole run.
        consecutive: updates skipped since the last one that was applied.
    """

    def __init__(self, policy: Updates) -> None:
        self.policy = policy
        self.total = 0
        self.consecutive = 0

    def applied(self) -> None:
        """Note an update that was applied."""
        self.consecutive = 0

    def skip(self, what: str, origin: str) -> None:
        """Note an update that must not be applied.

        Args:
            what: the update and what is wrong with it.
            origin: the samples it was computed from.

        Raises:
            NonFiniteError: the run has to stop.
        """
        trouble = f"{what}; from {origin}"
        if self.policy.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{trouble}. The update was not applied, the last checkpoint is unaffected. Look at these samples, "
                "lower model.optim.lr, or set on_nonfinite=skip in the job's section of trainer to continue without "
                "such updates"
            )
        self.total += 1
        self.consecutive += 1
        if self.consecutive > self.policy.max_consecutive_skips:
            raise NonFiniteError(
                f"{trouble}. That is {self.consecutive} updates in a row, more than max_consecutive_skips="
                f"{self.policy.max_consecutive_skips}: something other than these samples is wrong. The last "
                "checkpoint is unaffected; resume from it with a lower model.optim.lr"
            )
        warn_for_all_ranks(logger, "%s: skipped, %d so far", trouble, self.total)
