"""Prompts in, scored rollouts out: responses are scored while others are generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nemo_style_aligner.data.datasets import pad_rows
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.parallel import stop_points, stop_signals
from nemo_style_aligner.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.parallel.groups import all_gather_rows, all_reduce_max, device
from nemo_style_aligner.rl.rollouts.batch import RolloutBatch
from nemo_style_aligner.rl.rollouts.generator import Generator, Round
from nemo_style_aligner.rl.rollouts.intake import ScoredResponses
from nemo_style_aligner.rl.rollouts.prompts import Prompt
from nemo_style_aligner.servers.client import CriticClient, Scores
from nemo_style_aligner.telemetry import activity


@dataclasses.dataclass(frozen=True)
class PendingRollouts:
    """Rollouts whose scores may still be on their way.

    Attributes:
        rollouts: complete, the same on every rank.
        generation_metrics: see `Round.metrics`.
    """

    rollouts: RolloutBatch
    generation_metrics: dict[str, float]
    _responses: ScoredResponses  # this rank's
    _order: torch.Tensor  # places of the samples among the responses of all ranks

    def wait_for_scores(self) -> Scores:
        """Wait for the rewards and values of all rollouts, in their order, on every rank. Collective.

        Raises:
            StopEarlyError: as `RolloutCollector.finish`.
        """
        width, where = self.rollouts.tokens.shape[1], device()
        rewards, values = [torch.empty(0)], [torch.empty(0, width - 1)]
        with activity.counting("responses scored", self._responses.progress):
            self._await_scores()
        for served in self._responses.scores():
            rewards.append(served.rewards)
            values.append(torch.nn.functional.pad(served.values, (0, width - 1 - served.values.shape[1])))
        return Scores(
            rewards=all_gather_rows(torch.cat(rewards).to(where)).cpu()[self._order],
            values=all_gather_rows(torch.cat(values).to(where)).cpu()[self._order],
        )

    def _await_scores(self) -> None:
        is_missing = True
        while is_missing:  # scoring may outlast a collective's timeout: no rank waits for it in one
            activity.progress()  # for the watchdog: `are_scored` has a limit of its own
            with stop_signals.interruptible():
                is_missing = not self._responses.are_scored(PATIENCE_SECONDS)
            stop_points.check()
            is_missing = bool(all_reduce_max(int(is_missing)))


class RolloutCollector:
    """Runs the rollout phase on all ranks that train.

    Args:
        generator: makes the responses.
        scorer: client of the critic and reward service.
        tokenizer: decodes the texts of `sample_table`.
        scoring_batch_size: responses per scoring request, at most.
        scoring_seconds: time limit of a scoring request, over all tries.
    """

    def __init__(
        self,
        generator: Generator,
        scorer: CriticClient,
        tokenizer: Tokenizer,
        *,
        scoring_batch_size: int,
        scoring_seconds: float,
    ) -> None:
        self.generator = generator
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.scoring_batch_size = scoring_batch_size
        self.scoring_seconds = scoring_seconds

    def finish(self, generation: Round) -> PendingRollouts:
        """Run a round, send its responses to be scored in batches as they finish, and gather the rollouts. Collective.

        Raises:
            StopEarlyError: a rank got a stop signal; the rollouts are abandoned on all of them.
        """
        responses = ScoredResponses(self.scorer, self.scoring_batch_size, self.scoring_seconds)
        generation.run(responses)
        rollouts, order = self._gather(responses.results, generation.prompts)
        return PendingRollouts(rollouts, generation.metrics(), responses, order)

    def _gather(self, results: list[GenerationResult], prompts: Sequence[Prompt]) -> tuple[RolloutBatch, torch.Tensor]:
        """Gather all ranks' results on every rank, in sample order; also return which place each sample had."""
        where = device()
        sequences = [r.prompt_token_ids + r.token_ids for r in results]
        s = all_reduce_max(max(map(len, sequences), default=0))
        # Log-probs belong to the response only: zeros stand at the prompt's positions.
        logprobs = [[0.0] * (len(r.prompt_token_ids) - 1) + r.logprobs for r in results]

        def column(values: list[int]) -> torch.Tensor:
            return all_gather_rows(torch.tensor(values, dtype=torch.int64, device=where)).cpu()

        sample_ids = column([r.request_id for r in results])
        order = sample_ids.argsort()
        if sample_ids[order].tolist() != list(range(len(prompts))):
            missing = sorted(set(range(len(prompts))) - set(sample_ids.tolist()))
            raise RuntimeError(
                f"the rollouts are not one per sample: {len(sample_ids)} results, missing {missing[:20]}"
            )
        rollouts = RolloutBatch(
            sample_ids=sample_ids[order],
            prompt_ids=torch.tensor([p.prompt_id for p in prompts], dtype=torch.int64),
            tokens=all_gather_rows(pad_rows(sequences, 0, s).to(where)).cpu()[order],
            prompt_lengths=column([len(r.prompt_token_ids) for r in results])[order],
            lengths=column([len(sequence) for sequence in sequences])[order],
            is_end=column([int(r.finish_reason == "stop") for r in results])[order].bool(),
            engine_logprobs=all_gather_rows(pad_rows(logprobs, 0, s - 1, torch.float32).to(where)).cpu()[order],
            weight_versions=column([r.weight_version for r in results])[order],
            is_valid=torch.ones(len(prompts), dtype=torch.bool),
        )
        return rollouts, order

    def close(self) -> None:
        """Close the connections to the service and to the work queue; call it on all ranks together."""
        self.scorer.close()
        self.generator.close()

    def sample_table(self, rollouts: RolloutBatch, scores: Scores, num_rows: int) -> list[tuple[str, str, float]]:
        """(prompt, response, reward) of the first ``num_rows`` samples, decoded."""
        table = []
        for i in range(min(num_rows, len(rollouts))):
            start, end = int(rollouts.prompt_lengths[i]), int(rollouts.lengths[i])
            tokens = rollouts.tokens[i].tolist()
            prompt, response = (self.tokenizer.ids_to_text(part) for part in (tokens[:start], tokens[start:end]))
            table.append((prompt, response, float(scores.rewards[i])))
        return table
