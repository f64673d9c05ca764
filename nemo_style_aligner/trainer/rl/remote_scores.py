"""Scores of responses by a service: a reward model's or a function's, a reference's or a teacher's, the critic's."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Sequence

import torch

from nemo_style_aligner.guard.http_client import RequestRefusedError
from nemo_style_aligner.guard.protocol import ProtocolError
from nemo_style_aligner.trainer.data.datasets import lengths_of, pad_rows
from nemo_style_aligner.trainer.rl.rewards import Reward, RewardError, Rewards, RewardSource, when_all
from nemo_style_aligner.trainer.rl.sample import Sample, of_sampled
from nemo_style_aligner.trainer.services.score_client import PromptsOfSequences, ScoreClient, Scores, SequencesToScore
from nemo_style_aligner.trainer.services.scores import REWARDS


class RemoteScores(RewardSource):
    """What a service says of responses, asked for as they end: rewards, numbers of their tokens, or both.

    Args:
        client: of the service; `close` closes it.
    """

    def __init__(self, client: ScoreClient) -> None:
        self.client = client
        self._asked: Sequence[Sample] = ()  # whose scores the newest request asks for
        self._answer: concurrent.futures.Future[Scores] = concurrent.futures.Future()

    @property
    def columns(self) -> list[str]:
        """Names of the scores that are per token."""
        return [score.name for score in self.client.scores if score.per_token]

    def column(self, name: str, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        """Scores of samples' response tokens, fp32 each; returns at once."""
        places, answer = self._ask(samples)
        rows = [row for of_sample in places for row in of_sample]
        return when_all([answer], lambda: of_sampled(answer.result()[name][rows], samples))

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`."""
        places, answer = self._ask(responses)
        lasts = [of_sample[-1] for of_sample in places]  # where an episode has ended
        return when_all([answer], lambda: self._rewards(answer, lasts, responses))

    def _ask(self, samples: Sequence[Sample]) -> tuple[list[range], concurrent.futures.Future[Scores]]:
        """One request for all scores, some of which may be wanted of some samples alone; the samples' rows in it."""
        if not {id(sample) for sample in samples} <= {id(sample) for sample in self._asked}:
            rows = [row for sample in samples for row in sample.rows]
            sequences = [row.token_ids for row in rows]
            prompt_lengths, steps = torch.tensor([(row.prompt_length, row.step) for row in rows]).unbind(1)
            prompts = PromptsOfSequences([row.line for row in rows], prompt_lengths, steps)
            self._answer = self.client.infer_async(pad_rows(sequences, 0), lengths_of(sequences), prompts)
            self._asked = samples
        ends = itertools.accumulate(len(sample.rows) for sample in self._asked)
        places = {id(sample): range(end - len(sample.rows), end) for sample, end in zip(self._asked, ends, strict=True)}
        return [places[id(sample)] for sample in samples], self._answer

    def _rewards(
        self, answer: concurrent.futures.Future[Scores], rows: Sequence[int], responses: Sequence[Sample]
    ) -> list[Reward]:
        try:
            values = answer.result()[REWARDS.name][rows].tolist()
        except RequestRefusedError as error:
            if error.status != 500:  # any other is about the request itself, and would be the same for all
                raise
            return [Reward.failed(str(error))] * len(responses)
        except ProtocolError as error:
            raise RewardError(str(error)) from error
        return [self._reward(value, response) for value, response in zip(values, responses, strict=True)]

    def _reward(self, value: float, response: Sample) -> Reward:
        if math.isfinite(value):
            return Reward(value)
        return Reward.failed(f"the reward service at {self.client.base_url} gave {value} for {response}")

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:
        """See `RewardSource.wait_until_ready`."""
        self.client.wait_until_ready(timeout_s, sequences)

    def close(self) -> None:
        """See `RewardSource.close`."""
        self.client.close()
