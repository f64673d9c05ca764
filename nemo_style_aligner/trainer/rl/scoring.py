"""Rewards, values and log-probs of finished samples: asked for on the rank that generated them, known on every rank."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import all_gather_rows, all_reduce_max, device
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.reward_models import ModelRewards
from nemo_style_aligner.trainer.rl.rewards import Reward, RewardSource
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.rl.values import ValueSource
from nemo_style_aligner.trainer.services.score_client import SequencesToScore

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Samples whose scores are on their way.

    Attributes:
        columns: what is per response token, by name: ``values``, ``reference_logprobs``, ``teacher_logprobs``.
    """

    samples: Sequence[Sample]
    rewards: concurrent.futures.Future[list[Reward]]
    columns: Mapping[str, concurrent.futures.Future[list[torch.Tensor]]]

    @property
    def sample_ids(self) -> list[int]:
        """Ids of the samples, in order."""
        return [sample.sample_id for sample in self.samples]

    @property
    def futures(self) -> list[concurrent.futures.Future[Any]]:
        """What is waited for."""
        return [self.rewards, *self.columns.values()]

    def done(self) -> bool:
        """Whether all scores are there."""
        return all(future.done() for future in self.futures)

    def result(self) -> Iterator[tuple[int, Reward, dict[str, torch.Tensor]]]:
        """Each sample's id, its reward and its columns, fp32 [response tokens] each."""
        columns = {name: column.result() for name, column in self.columns.items()}
        for row, (sample, reward) in enumerate(zip(self.samples, self.rewards.result(), strict=True)):
            given = reward if sample.problem is None else Reward.failed(sample.problem)
            yield sample.sample_id, given, {name: column[row] for name, column in columns.items()}


class Scorer:
    """The reward source of a job and, if the estimator needs values, its value source; frozen models apart.

    Args:
        rewards: gives rewards.
        values: gives values; None where no values are needed.
        silence_seconds: after so long without any score a rank gives up.
        described: names what to check then.
        models: the reward models of this job, which are among ``rewards``.
        apart: by their names, frozen models on ranks of their own: ``reference`` gives ``reference_logprobs``.
    """

    def __init__(
        self,
        rewards: RewardSource,
        values: ValueSource | None,
        silence_seconds: float,
        described: str,
        models: Sequence[ModelRewards] = (),
        apart: Mapping[str, RemoteScores] | None = None,
    ) -> None:
        self.rewards = rewards
        self.values = values
        self.silence_seconds = silence_seconds
        self.described = described
        self.models = models
        self.apart = apart or {}

    @property
    def columns(self) -> list[str]:
        """Names of the columns that frozen models apart give."""
        return [f"{name}_{column}" for name, model in self.apart.items() for column in model.columns]

    @property
    def last_progress(self) -> float:
        """When a source that is being brought up to date was last seen to have moved, by `time.monotonic()`."""
        return -math.inf if self.values is None else self.values.last_progress

    def score(self, samples: Sequence[Sample], *, are_trained: bool = True) -> ScoredBatch:
        """Have samples scored; returns at once. Models apart are asked about those alone that ``are_trained`` on."""
        columns: dict[str, concurrent.futures.Future[list[torch.Tensor]]] = {}
        for name, model in self.apart.items() if are_trained else ():
            columns |= {f"{name}_{column}": model.column(column, samples) for column in model.columns}
        if self.values is not None and (values := self.values.values(samples)) is not None:
            columns["values"] = values
        return ScoredBatch(samples, self.rewards.score(samples), columns)

    def load_models(self) -> None:
        """Load the weights of this job's reward models. Collective."""
        for model in self.models:
            model.load()

    def score_together(self) -> None:
        """Have this job's reward models score what they were given. Collective."""
        for model in self.models:
            model.score_together()

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore) -> None:
        """Wait until the services that are used are there, and fit this job. Collective.

        Raises:
            ServerUnavailableError: one is not there after ``timeout_s``.
            UnfitServiceError: one does not fit.
        """
        for source in dict.fromkeys((self.rewards, self.values, *self.apart.values())):
            if source is not None:
                source.wait_until_ready(timeout_s, sequences)

    def close(self) -> None:
        """Close connections, abandon what is under way."""
        self.rewards.close()
        if self.values is not None:
            self.values.close()
        for model in self.apart.values():
            model.close()


@dataclasses.dataclass
class Scores:
    """The rewards of a step's N samples, on every rank.

    Attributes:
        rewards: fp64 [N]; NaN where a source failed.
        parts: of each reward, by name, fp64 [N]; NaN in samples that have no such part.
        problems: why rewards that are NaN are, by sample, as far as that is known.
    """

    rewards: torch.Tensor
    parts: dict[str, torch.Tensor]
    problems: Mapping[int, str]

    @classmethod
    def gathered(cls, num_samples: int, own: Sequence[tuple[int, Reward]]) -> Scores:
        """From the places and rewards of this rank's samples. Collective."""
        part_names = sorted(set(_everyones(sorted({name for _, reward in own for name in reward.parts}))))
        table = torch.full((len(own), 2 + len(part_names)), math.nan, dtype=torch.float64)
        for row, (place, reward) in enumerate(own):
            numbers = [reward.parts.get(name, math.nan) for name in part_names]
            table[row] = torch.tensor([place, reward.value, *numbers], dtype=torch.float64)
        table = all_gather_rows(table.to(device())).cpu()
        columns = torch.full((num_samples, 1 + len(part_names)), math.nan, dtype=torch.float64)
        columns[table[:, 0].long()] = table[:, 1:]
        problems = [(place, reward.problem) for place, reward in own if reward.problem is not None]
        return cls(
            columns[:, 0],
            dict(zip(part_names, columns[:, 1:].unbind(1), strict=True)),
            dict(sorted(_everyones(problems))),
        )


def _everyones(things: list[T]) -> list[T]:
    """The things of all ranks. Collective."""
    if not all_reduce_max(len(things)) or dist.get_world_size() == 1:
        return things
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, things)
    return [thing for part in gathered for thing in part]
