"""When rollouts are generated and with which weights: in their own step, or while the step before trains."""

from __future__ import annotations

import base64
import logging
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import all_gather_rows, device
from nemo_style_aligner.rollout.collector import PendingRollouts, RolloutCollector
from nemo_style_aligner.rollout.generator import KeptRound, Round
from nemo_style_aligner.rollout.prompts import PromptSource
from nemo_style_aligner.rollout.wire import pack_results, unpack_results
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.telemetry.timers import ScopedTimer

logger = logging.getLogger(__name__)


class GenerationSchedule:
    """Starts the generation of rollouts, keeps what is under way, and sees to the engine's weights.

    Every rank that trains calls its methods together.

    Args:
        collector: generates and scores.
        model: the policy.
        timer: names the time that generation and waiting take.
        seed: of sampling.
        staleness: 0: the rollouts of a step are made with the weights it starts from. 1: with those that the step
            before started from, while that one trains; of the first step as with 0.
        unload_engine: give the engine's memory back when a round is complete.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        model: MegatronModel,
        timer: ScopedTimer,
        seed: int,
        *,
        staleness: int,
        unload_engine: bool,
    ) -> None:
        self._collector = collector
        self._model = model
        self._timer = timer
        self._seed = seed
        self._staleness = staleness
        self._unload_engine = unload_engine
        self._rounds: dict[int, Round] = {}  # by the step that trains on them

    def generate(self, prompts: PromptSource, start: int, step: int, stream: int, version: int) -> PendingRollouts:
        """The rollouts of a step, or of another ``stream`` of random numbers that belongs to it.

        Args:
            start: samples of ``prompts`` to skip.
            version: of the policy's weights.

        Raises:
            StopEarlyError: as `RolloutCollector.finish`.
        """
        generator = self._collector.generator
        if stream == 0 and step in self._rounds:
            with self._timer("rollout_wait"):
                return self._collector.finish(self._rounds[step])
        self.refit(version)
        with self._timer("generate"):
            pending = self._collector.collect(prompts.batch(start), self._sampling_seed(step, stream))
        if self._unload_engine:
            with self._timer("unload"):
                generator.unload()
        return pending

    def start_ahead(self, prompts: PromptSource, start: int, step: int, version: int) -> None:
        """Begin with the rollouts of a step to come, where ``staleness`` allows, with the present weights."""
        if self._staleness == 0:
            return
        self.refit(version)
        self._rounds[step] = self._collector.generator.start(prompts.batch(start), self._sampling_seed(step, 0))

    def refit(self, version: int) -> None:
        """Give the engine the policy's newest weights, unless it has them (validation follows training)."""
        generator = self._collector.generator
        if generator.weight_version == version:
            return
        for generation in self._rounds.values():  # made with the weights it was started with
            with self._timer("rollout_wait"):
                generation.wait()
        with self._timer("refit"):
            if self._unload_engine:
                generator.reload()
            generator.refit(self._model, version)

    def drop(self, step: int) -> None:
        """A step is made: its rollouts are not needed any more."""
        self._rounds.pop(step, None)

    def _sampling_seed(self, step: int, stream: int) -> int:
        return derive_seed(self._seed, "rollouts", step, stream)

    # ---- state ------------------------------------------------------------------------------

    def state_dict(self, step: int) -> dict[str, Any]:
        """What cannot be made again: rollouts kept for ``step``, whose weights are gone. Waits for what is missing."""
        if step not in self._rounds:
            return {"rollouts": None}
        with self._timer("rollout_wait"):
            own = torch.frombuffer(bytearray(pack_results(self._rounds[step].wait())), dtype=torch.uint8).to(device())
        sizes = all_gather_rows(torch.tensor([len(own)], dtype=torch.int64, device=device())).tolist()
        parts = all_gather_rows(own).cpu().split(sizes)
        return {"rollouts": [base64.b64encode(part.numpy().tobytes()).decode() for part in parts]}

    def load_state_dict(self, state: dict[str, Any], step: int, prompts: PromptSource, start: int) -> None:
        """Continue where `state_dict` was taken, with any number of ranks."""
        if state["rollouts"] is None:
            return
        if self._staleness == 0:
            warn_for_all_ranks(
                logger, "the rollouts kept for step %d are left out: trainer.ppo.staleness=0 makes new ones", step
            )
            return
        batch = prompts.batch(start)
        results = [result for part in state["rollouts"] for result in unpack_results(base64.b64decode(part))]
        if len(results) != len(batch) or any(r.prompt_token_ids != batch[r.request_id].token_ids for r in results):
            warn_for_all_ranks(logger, "the rollouts kept for step %d are left out: they answer other prompts", step)
            return
        self._rounds[step] = KeptRound(batch, results[dist.get_rank() :: dist.get_world_size()])
