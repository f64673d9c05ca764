"""Prompts in, scored rollouts out: every rank generates what the work source gives it and has it scored meanwhile."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.generation.engine import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.parallel.groups import all_gather_rows, device
from nemo_style_aligner.rollout.batch import RolloutBatch, Scores
from nemo_style_aligner.rollout.prompts import Prompt
from nemo_style_aligner.rollout.work_queue import WorkSource
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.servers.client import CriticClient
from nemo_style_aligner.servers.client import Scores as ServedScores

_SCORE_WAIT_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class GenerationGroup:
    """The ranks that run one engine together, and which of all such groups this one is.

    Attributes:
        index, count: this group's number and how many there are.
        is_leader: whether this rank takes the work and hands in the results.
        group: the process group of a shared engine; None where each rank has an engine of its own.
        leader: global rank of the leader.
    """

    index: int
    count: int
    is_leader: bool = True
    group: dist.ProcessGroup | None = None
    leader: int = 0

    def share(self, ids: list[int]) -> list[int]:
        """The leader's ids on every rank of the group."""
        if self.group is None:
            return ids
        box = [ids]
        dist.broadcast_object_list(box, src=self.leader, group=self.group, device=device())
        return box[0]


class PendingRollouts:
    """Rollouts whose scores may still be on their way.

    Attributes:
        rollouts: complete, the same on every rank.
    """

    def __init__(self, rollouts: RolloutBatch, wait: Callable[[int], Scores]) -> None:
        self.rollouts = rollouts
        self._wait = wait

    def wait_for_scores(self) -> Scores:
        """Collective: rewards and values in the rollouts' order, on every rank."""
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
        scoring_batch_size: responses per scoring request.
        lease_size: samples leased at a time.
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
        lease_size: int = 1,
    ) -> None:
        self.engine = engine
        self.work = work
        self.scorer = scorer
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.group = group
        self.scoring_batch_size = scoring_batch_size
        self.lease_size = lease_size
        self._round = 0

    def collect(self, prompts: Sequence[Prompt], seed: int) -> PendingRollouts:
        """Generate one response per prompt on all ranks together, sending each to be scored as batches fill up.

        Collective. Sample i's random stream depends on ``seed`` and i alone, so the rollouts are the same
        whichever rank makes them.
        """
        self._round += 1
        self.work.start_round(self._round, list(range(len(prompts))))
        dist.barrier()  # nobody asks for a round that rank 0 has not begun
        results: list[GenerationResult] = []
        scores: list[concurrent.futures.Future[ServedScores]] = []
        unscored: list[GenerationResult] = []
        for result in self._generate(prompts, seed):
            if not self.group.is_leader or not self.work.complete([result.request_id]):
                continue
            results.append(result)
            unscored.append(result)
            if len(unscored) == self.scoring_batch_size:
                scores.append(self._score(unscored))
                unscored = []
        if unscored:
            scores.append(self._score(unscored))
        rollouts = self._gather(results, prompts)
        return PendingRollouts(rollouts, lambda width: _gather_scores(results, scores, rollouts, width))

    def _generate(self, prompts: Sequence[Prompt], seed: int) -> Iterator[GenerationResult]:
        """Keep the engine supplied until the round is complete, ids of lost workers included."""
        while first := self._lease(wait=True):
            yield from self.engine.generate(self._requests(first, prompts, seed), self.sampling)

    def _requests(self, first: list[int], prompts: Sequence[Prompt], seed: int) -> Iterator[GenerationRequest]:
        """Requests for as long as there are ids to lease; the engine asks whenever a slot is free."""
        ids = first
        while ids:
            for sample_id in ids:
                yield GenerationRequest(sample_id, prompts[sample_id].token_ids, derive_seed(seed, sample_id))
            ids = self._lease()

    def _lease(self, wait: bool = False) -> list[int]:
        return self.group.share(self.work.lease(self.lease_size, wait=wait) if self.group.is_leader else [])

    def _score(self, results: Sequence[GenerationResult]) -> concurrent.futures.Future[ServedScores]:
        sequences = [result.prompt_ids + result.token_ids for result in results]
        lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64)
        return self.scorer.infer_async(_pad(sequences, int(lengths.max()), torch.int64), lengths)

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
            tokens=all_gather_rows(_pad(sequences, s, torch.int64).to(where)).cpu()[order],
            prompt_lengths=column([len(r.prompt_ids) for r in results])[order],
            lengths=column([len(sequence) for sequence in sequences])[order],
            is_end=column([int(r.finish_reason == "stop") for r in results])[order].bool(),
            engine_logprobs=all_gather_rows(_pad(logprobs, s - 1, torch.float32).to(where)).cpu()[order],
            weight_versions=column([r.weight_version for r in results])[order],
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


def _gather_scores(
    results: list[GenerationResult],
    futures: list[concurrent.futures.Future[ServedScores]],
    rollouts: RolloutBatch,
    width: int,
) -> Scores:
    """Wait for this rank's scores, put all ranks' in the order of the samples. Collective."""
    where = device()
    rewards, values = [torch.empty(0)], [torch.empty(0, width - 1)]
    for future in futures:
        served = future.result(timeout=_SCORE_WAIT_SECONDS)
        rewards.append(served.rewards)
        values.append(torch.nn.functional.pad(served.values, (0, width - 1 - served.values.shape[1])))
    ids = all_gather_rows(torch.tensor([r.request_id for r in results], dtype=torch.int64, device=where)).cpu()
    order = ids.argsort()
    gathered = Scores(
        rewards=all_gather_rows(torch.cat(rewards).to(where)).cpu()[order],
        values=all_gather_rows(torch.cat(values).to(where)).cpu()[order],
    )
    broken = ~(gathered.rewards.isfinite() & gathered.values.isfinite().all(1))
    if broken.any():
        raise FloatingPointError(
            f"the critic or reward model gave NaN or Inf for samples {rollouts.sample_ids[broken].tolist()[:20]}"
        )
    return gathered


def _pad(sequences: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, width], zeros after each sequence's end."""
    padded = torch.zeros(len(sequences), width, dtype=dtype)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.tensor(sequence, dtype=dtype)
    return padded
