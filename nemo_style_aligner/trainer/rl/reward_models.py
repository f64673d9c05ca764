"""Reward models inside the job: all ranks that train score together what each of them has generated."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.engine.parallel.groups import all_gather_rows, current_layout, device, exchange_rows
from nemo_style_aligner.kinds import Placement
from nemo_style_aligner.trainer.models.critic import RewardModel
from nemo_style_aligner.trainer.models.frozen import FrozenModel
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.packing import MicroBatching, shares
from nemo_style_aligner.trainer.models.restore import BaseModel
from nemo_style_aligner.trainer.rl.rewards import Reward, Rewards, RewardSource
from nemo_style_aligner.trainer.rl.sample import Sample


class ModelRewards(RewardSource):
    """The rewards of a frozen model with the policy's layout.

    Its passes need all ranks, so `score` only collects, and `score_together` computes.

    Args:
        base: the reward model.
        head: of the model; gives one reward.
        batching: micro batches of its passes.
        placement: where its weights are while they are not in use.
    """

    def __init__(self, base: BaseModel, head: RewardHeadConfig, batching: MicroBatching, placement: Placement) -> None:
        self.base = base
        self._head = head
        self._batching = batching
        self.placement = placement
        self._model: FrozenModel | None = None
        self._waiting: list[tuple[Sequence[Sample], Rewards]] = []

    def load(self) -> None:
        """Load the weights. Collective. For the errors see `BaseModel.load`."""
        self._model = FrozenModel(self.base.load(head=self._head, trainable=False, needs_head=True), self.placement)

    def score(self, responses: Sequence[Sample]) -> Rewards:
        """See `RewardSource.score`: done after the next `score_together`."""
        future: Rewards = concurrent.futures.Future()
        self._waiting.append((responses, future))
        return future

    def score_together(self) -> None:
        """Score what was given to `score` on all ranks. Collective."""
        waiting, self._waiting = self._waiting, []
        values = iter(self._values([sample for samples, _ in waiting for sample in samples]))
        for samples, future in waiting:
            future.set_result([self._reward(next(values), sample) for sample in samples])

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        """The rewards of this rank's samples; each data-parallel rank computes a share of about equal work.

        Ordered by their ids, samples are computed in the same micro batches whichever rank has generated them.
        """
        texts = [sample.rows[-1].token_ids for sample in samples]  # where an episode has ended
        numbers = [(sample.sample_id, len(ids)) for sample, ids in zip(samples, texts, strict=True)]
        facts = torch.tensor(numbers, dtype=torch.int64).view(-1, 2)
        every = all_gather_rows(facts.to(device())).cpu()
        if not len(every):
            return []
        ids, lengths = every[every[:, 0].argsort()].t().contiguous()
        places = torch.searchsorted(ids, facts[:, 0].contiguous())
        work = [self.base.architecture.forward_operations(length, 0) for length in lengths.tolist()]
        layout = current_layout()
        share = torch.tensor(sorted(shares(work, layout.dp_size)[layout.dp_rank]), dtype=torch.int64)
        tokens = torch.tensor([token for ids in texts for token in ids], dtype=torch.int32)
        rows = exchange_rows(tokens, facts[:, 1], places, share).split(lengths[share].tolist())
        rewards = torch.zeros(len(ids), dtype=torch.float64, device=device())
        if len(share):
            rewards[share.to(device())] = self._own_rewards(rows, lengths[share]).double()
        dist.all_reduce(rewards, group=parallel_state.get_data_parallel_group())
        return rewards.cpu()[places].tolist()

    def _own_rewards(self, rows: Sequence[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """The rewards fp32 [n] of sequences that the ranks of a model-parallel group share."""
        assert self._model is not None, "`load` comes first"
        padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).long()
        with self._model.active() as model:
            return RewardModel(model, self._head, self._batching).rewards(padded, lengths, is_whole=False)[:, 0]

    def _reward(self, value: float, sample: Sample) -> Reward:
        if math.isfinite(value):
            return Reward(value)
        return Reward.failed(f"the reward model {self.base.path} gave {value} for {sample}")
