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
from nemo_style_aligner.trainer.models.sharing import Costs
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
        lasts = [sample.rows[-1] for sample in samples]  # where an episode has ended
        known = [(s.sample_id, len(s.token_ids), s.prompt_length, s.group) for s in lasts]
        facts = torch.tensor(known, dtype=torch.int64).view(-1, 4)
        every = all_gather_rows(facts.to(device())).cpu()
        if not len(every):
            return []
        ids, lengths, prompts, groups = every[every[:, 0].argsort()].t().contiguous()
        places = torch.searchsorted(ids, facts[:, 0].contiguous())
        whole, common = ([self._operations(size) for size in sizes.tolist()] for sizes in (lengths, prompts))
        work = Costs(whole, common, groups.tolist()) if self._batching.shares_prompts else Costs.apart(whole)
        layout = current_layout()
        share = torch.tensor(sorted(shares(work, layout.dp_size)[layout.dp_rank]), dtype=torch.int64)
        tokens = torch.tensor([token for sample in lasts for token in sample.token_ids], dtype=torch.int32)
        rows = exchange_rows(tokens, facts[:, 1], places, share).split(lengths[share].tolist())
        rewards = torch.zeros(len(ids), dtype=torch.float64, device=device())
        assert self._model is not None, "`load` comes first"
        if len(share) or self._model.computes_together:
            rewards[share.to(device())] = self._own_rewards(rows, lengths[share], prompts[share]).double()
        dist.all_reduce(rewards, group=parallel_state.get_data_parallel_group())
        return rewards.cpu()[places].tolist()

    def _operations(self, num_tokens: int) -> int:
        return self.base.architecture.forward_operations(num_tokens, 0)

    def _own_rewards(self, rows: Sequence[torch.Tensor], lengths: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """The rewards fp32 [n] of sequences that the ranks of a model-parallel group share."""
        assert self._model is not None, "`load` comes first"
        none = torch.empty(0, dtype=torch.int32)  # there may be no rows, which cannot be padded
        padded = torch.nn.utils.rnn.pad_sequence([*rows, none], batch_first=True).long()[: len(rows)]
        with self._model.active() as model:
            ours = RewardModel(model, self._head, self._batching)
            return ours.rewards(padded, lengths, prompt_lengths=prompts, is_whole=False)[:, 0]

    def _reward(self, value: float, sample: Sample) -> Reward:
        if math.isfinite(value):
            return Reward(value)
        return Reward.failed(f"the reward model {self.base.path} gave {value} for {sample}")
