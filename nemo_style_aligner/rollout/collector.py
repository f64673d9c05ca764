"""Prompts in, scored rollouts out: every rank generates what the work source gives it and has it scored meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.generation.engine import GenerationEngine, GenerationResult, SamplingParams
from nemo_style_aligner.parallel import stop_points, stop_signals
from nemo_style_aligner.parallel.groups import all_gather_rows, device
from nemo_style_aligner.rollout.batch import RolloutBatch, Scores
from nemo_style_aligner.rollout.generation_totals import GenerationTotals
from nemo_style_aligner.rollout.intake import ResponseIntake, pad_rows
from nemo_style_aligner.rollout.prompts import Prompt
from nemo_style_aligner.rollout.supply import GenerationGroup, RequestSupply, neighbours
from nemo_style_aligner.rollout.work_source import WorkSource
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.telemetry import activity


class PendingRollouts:
    """Rollouts whose scores may still be on their way.

    Attributes:
        rollouts: complete, the same on every rank.
        generation_metrics: see `GenerationTotals.metrics`.
    """

    def __init__(
        self, rollouts: RolloutBatch, generation_metrics: dict[str, float], wait: Callable[[int], Scores]
    ) -> None:
        self.rollouts = rollouts
        self.generation_metrics = generation_metrics
        self._wait = wait

    def wait_for_scores(self) -> Scores:
        """Collective: rewards and values in the rollouts' order, on every rank. Raises StopEarlyError as `collect`."""
        return self._wait(self.rollouts.tokens.shape[1])


class RolloutCollector:
    """Runs the rollout phase on all ranks.

    Args:
        engine: this rank's generation engine.
        work: where the ids of the samples to generate come from.
        scorer: client of the critic and reward service.
        sampling: sampling parameters.
        tokenizer: for the tables of samples.
        group: which ranks share an engine.
        scoring_batch_size: responses per scoring request, at most.
        scoring_seconds: time limit of a scoring request, over all tries.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        work: WorkSource,
        scorer: CriticClient,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        group: GenerationGroup,
        *,
        scoring_batch_size: int,
        scoring_seconds: float,
    ) -> None:
        self.engine = engine
        self.work = work
        self.scorer = scorer
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.group = group
        self.scoring_batch_size = scoring_batch_size
        self.scoring_seconds = scoring_seconds
        self._round = 0

    def collect(self, prompts: Sequence[Prompt], seed: int) -> PendingRollouts:
        """Generate one response per prompt on all ranks together, sending each to be scored as batches fill up.

        Collective. Sample i's random stream depends on ``seed`` and i alone, so the rollouts are the same
        whichever rank makes them.

        Raises:
            StopEarlyError: a rank got a stop signal; the rollouts are abandoned on all of them.
        """
        self._round += 1
        ids = neighbours(prompts)
        self.work.start_round(self._round, ids, [prompts[sample_id].expected_length for sample_id in ids])
        dist.barrier()  # nobody asks for a round that rank 0 has not begun
        intake = ResponseIntake(self.work, self.scorer, self.scoring_batch_size, self.scoring_seconds)
        supply = RequestSupply(self.work, self.group, self.engine.num_slots, prompts, seed)
        totals = GenerationTotals()
        # Ranks that share an engine compute together: they can only take no more.
        with stop_signals.interruptible(self.group.group is None):
            while supply.wait():  # until the round is complete, ids of lost workers included
                started = time.monotonic()
                for result in self.engine.generate(supply, self.sampling):
                    activity.progress()
                    supply.num_running -= 1
                    if self.group.is_leader:
                        intake.add(result)
                totals.add(self.engine, time.monotonic() - started)
                intake.flush()
        if stop_signals.received() and self.group.is_leader:
            self._release_others(len(prompts))
        stop_points.check()
        rollouts = self._gather(intake.results, prompts)
        metrics = totals.metrics(self.engine, self.group.is_leader)
        return PendingRollouts(rollouts, metrics, lambda width: _gather_scores(intake, width))

    def _release_others(self, num_samples: int) -> None:
        """The round is abandoned: let no rank wait for this one's samples, or begin others."""
        while self.work.lease(num_samples):
            pass
        self.work.complete(range(num_samples))

    def _gather(self, results: list[GenerationResult], prompts: Sequence[Prompt]) -> RolloutBatch:
        """All ranks' results on every rank, in the order of the samples."""
        where = device()
        sequences = [r.prompt_ids + r.token_ids for r in results]
        width = torch.tensor([max(map(len, sequences), default=0)], device=where)
        dist.all_reduce(width, dist.ReduceOp.MAX)
        s = int(width)
        # Log-probs belong to the response only: zeros stand at the prompt's positions.
        logprobs = [[0.0] * (len(r.prompt_ids) - 1) + r.logprobs for r in results]

        def column(values: list[int]) -> torch.Tensor:
            return all_gather_rows(torch.tensor(values, dtype=torch.int64, device=where)).cpu()

        sample_ids = column([r.request_id for r in results])
        order = sample_ids.argsort()
        if sample_ids[order].tolist() != list(range(len(prompts))):
            missing = sorted(set(range(len(prompts))) - set(sample_ids.tolist()))
            raise RuntimeError(
                f"the rollouts are not one per sample: {len(sample_ids)} results, missing {missing[:20]}"
            )
        return RolloutBatch(
            sample_ids=sample_ids[order],
            prompt_ids=torch.tensor([p.prompt_id for p in prompts], dtype=torch.int64),
            tokens=all_gather_rows(pad_rows(sequences, s, torch.int64).to(where)).cpu()[order],
            prompt_lengths=column([len(r.prompt_ids) for r in results])[order],
            lengths=column([len(sequence) for sequence in sequences])[order],
            is_end=column([int(r.finish_reason == "stop") for r in results])[order].bool(),
            engine_logprobs=all_gather_rows(pad_rows(logprobs, s - 1, torch.float32).to(where)).cpu()[order],
            weight_versions=column([r.weight_version for r in results])[order],
            is_valid=torch.ones(len(prompts), dtype=torch.bool),
        )

    def close(self) -> None:
        """Close the connections to the service and to the work queue; call it on all ranks together."""
        dist.barrier()  # rank 0's queue stops with its work source: nobody may need it any more
        self.scorer.close()
        self.work.close()

    def sample_table(self, rollouts: RolloutBatch, scores: Scores, num_rows: int) -> list[tuple[str, str, float]]:
        """(prompt, response, reward) of the first samples, as text."""
        table = []
        for i in range(min(num_rows, len(rollouts))):
            start, end = int(rollouts.prompt_lengths[i]), int(rollouts.lengths[i])
            tokens = rollouts.tokens[i].tolist()
            prompt, response = (self.tokenizer.ids_to_text(part) for part in (tokens[:start], tokens[start:end]))
            table.append((prompt, response, float(scores.rewards[i])))
        return table


def _gather_scores(intake: ResponseIntake, width: int) -> Scores:
    """Wait for this rank's scores, put all ranks' in the order of the samples. Collective."""
    where = device()
    rewards, values = [torch.empty(0)], [torch.empty(0, width - 1)]
    with stop_points.local_work():
        for served in intake.scores():
            activity.progress()
            rewards.append(served.rewards)
            values.append(torch.nn.functional.pad(served.values, (0, width - 1 - served.values.shape[1])))
    ids = all_gather_rows(torch.tensor([r.request_id for r in intake.results], dtype=torch.int64, device=where)).cpu()
    order = ids.argsort()
    return Scores(
        rewards=all_gather_rows(torch.cat(rewards).to(where)).cpu()[order],
        values=all_gather_rows(torch.cat(values).to(where)).cpu()[order],
    )
