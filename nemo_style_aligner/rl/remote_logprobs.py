"""Log-probs of responses by a frozen model on ranks of its own: the reference, the teacher."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import torch

from nemo_style_aligner.data.datasets import lengths_of, pad_rows
from nemo_style_aligner.rl.rewards import when_all
from nemo_style_aligner.rl.sample import Sample, of_sampled
from nemo_style_aligner.services.reward_client import RewardClient, SequencesToScore


class RemoteLogprobs:
    """What the model says of responses, asked for as they end.

    Args:
        client: of its service; `close` closes it.
    """

    def __init__(self, client: RewardClient) -> None:
        self._client = client

    def of(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        """The log-probs of samples' response tokens, fp32 each; returns at once."""
        sequences = [sample.token_ids for sample in samples]
        answer = self._client.infer_async(pad_rows(sequences, 0), lengths_of(sequences))
        return when_all([answer], lambda: of_sampled(answer.result(), samples))

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:
        """Wait until it answers, and make sure that it takes these ``sequences``. Raises `UserError`."""
        self._client.wait_until_ready(timeout_s, sequences)

    def close(self) -> None:
        """Abandon what is under way."""
        self._client.close()
