"""The critic in this job, on all ranks that train: a value source without a service, a journal or a ledger.

Its weights and optimizer are saved in this job's checkpoints, so there is only one state to resume from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nemo_style_aligner.kinds import Placement
from nemo_style_aligner.trainer.models.critic import Critic, applied_updates
from nemo_style_aligner.trainer.models.frozen import choose_placement
from nemo_style_aligner.trainer.models.offload import WeightOffload
from nemo_style_aligner.trainer.models.restore import BaseModel
from nemo_style_aligner.trainer.rl.experience import Experience
from nemo_style_aligner.trainer.rl.rollouts.collector import SampleSizes, deal
from nemo_style_aligner.trainer.rl.sample import Rollouts
from nemo_style_aligner.trainer.rl.values import Training, ValueSource


class LocalCritic(ValueSource):
    """A critic with the policy's layout.

    From a step's values to its update its weights are on the device; while rollouts are generated and the policy is
    trained, they may be in host memory.

    Args:
        base: the archive that it begins with.
        build: loads it. Collective.
        placement: ``swap``: its weights leave the device between its turns; ``auto``: see `choose_placement`.
    """

    def __init__(self, base: BaseModel, build: Callable[[], Critic], placement: Placement) -> None:
        self.base = base
        self.placement = placement
        self._build = build
        self._weights: WeightOffload | None = None

    def load(self) -> Critic:
        """Load the critic. Collective."""
        self.critic = self._build()
        placement = choose_placement(self.critic.model) if self.placement == "auto" else self.placement
        if placement == "swap":
            self._weights = WeightOffload(self.critic.model.module)
        return self.critic

    def values_of(self, share: Rollouts) -> torch.Tensor:
        """See `ValueSource.values_of`."""
        self._take_turn()
        return self.critic.response_values(share.batch(share.counts, {}))

    def start_training(self, experience: Experience) -> Training:
        """See `ValueSource.start_training`: done when this returns, as the policy is next on the same ranks."""
        self._take_turn()
        samples, size = range(len(experience)), self.critic.global_batch_size
        minibatches = [list(samples[start : start + size]) for start in samples[::size]]
        if len(minibatches) > 1:  # others than those that the samples were dealt for
            sizes, operations = SampleSizes.of(experience.rollouts), self.critic.model.architecture.forward_operations
            shares_prompts = self.critic.training_batching.shares_prompts
            work = sizes.costs(lambda tokens, _: operations(tokens, 0), shares_prompts)
            experience = experience.dealt(deal(work, minibatches))
        ids = experience.rollouts.prompt_ids
        origins = [f"the critic's samples {part} (prompts {ids[part].tolist()})" for part in minibatches]
        batches = map(experience.value_minibatch, minibatches)
        reports = self.critic.updates(dict(zip(origins, batches, strict=True)))
        self.give_back_memory()
        loss, _ = applied_updates(reports)
        last = {name: value for name, value in reports[-1].items() if name != "loss"}
        return Training(lambda: last | {"critic_loss": loss})

    def _take_turn(self) -> None:
        if self._weights is not None:
            self._weights.bring_back()

    def give_back_memory(self) -> None:
        """See `ValueSource.give_back_memory`: of activations, Adam's states, gradients and weights."""
        self.critic.weights_changed()
        self.critic.optimizer.offload_states()
        if self._weights is not None:
            self._weights.offload()

    # ---- the run ----------------------------------------------------------------------------

    def start_save(self) -> None:
        """See `ValueSource.start_save`; the copy for the checkpoint that follows is made of weights on the device."""
        self._take_turn()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ValueSource.load_state_dict`."""
        self.critic.weights_changed()
