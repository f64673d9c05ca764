"""When rollouts are generated and with which weights: in their own step, or while the step before trains."""

from __future__ import annotations

import base64
import logging
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.groups import all_gather_rows, device
from nemo_style_aligner.rl.rollouts.collector import Collected, RolloutCollector
from nemo_style_aligner.rl.rollouts.generator import KeptRound, Round
from nemo_style_aligner.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.rl.rollouts.wire import pack_results, unpack_results
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.telemetry.log_lines import warn_for_all_ranks
from nemo_style_aligner.telemetry.timers import ScopedTimer

logger = logging.getLogger(__name__)


class GenerationSchedule:
    """Starts the generation of rollouts, keeps the rounds that are under way, and refits the engine.

    Every rank that trains calls its methods together.

    Args:
        collector: generates and scores.
        model: the policy.
        timer: times generation and waits.
        seed: the run's, from which the seeds of sampling are derived.
        staleness: 0: the rollouts of a step are generated with the weights it starts from. 1: with those that the step
            before started from, while that one trains; those of the first step as with 0.
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

    def generate(
        self, prompts: PromptSource, start: int, step: int, version: int, *, stream: int = 0, draw: int = 0
    ) -> tuple[Collected, dict[str, float]]:
        """Generate the rollouts of a step, or take those that were started ahead, and have them scored.

        Args:
            start: prompts to skip.
            version: of the policy's present weights.
            stream: of the step's random streams; 0 is for its own rollouts, others for warm-up and validation.
            draw: rounds that were generated before for the same step.

        Returns:
            The samples and, where they were generated now, metrics of the engines.

        Raises:
            StopEarlyError: as `RolloutCollector.collect`.
        """
        generator = self._collector.generator
        if stream == draw == 0 and step in self._rounds:
            with self._timer("rollout_wait"):
                return self._collected(prompts, self._rounds[step])
        self.refit(version)
        with self._timer("generate"):
            round_ = generator.start(prompts.batch(start), self._sampling_seed(step, stream, draw))
            return self._collected(prompts, round_)

    def _collected(self, prompts: PromptSource, generation: Round) -> tuple[Collected, dict[str, float]]:
        return self._collector.collect(generation, prompts.samples_per_prompt), generation.metrics()

    def unload(self) -> None:
        """Give the engine's memory back, if the settings want it; all rounds of the step are complete."""
        if self._unload_engine:
            with self._timer("unload"):
                self._collector.generator.unload()

    def start_ahead(self, prompts: PromptSource, start: int, step: int, version: int) -> None:
        """Start generating the rollouts of a coming step with the present weights, if ``staleness`` allows it."""
        if self._staleness == 0:
            return
        self.refit(version)
        self._rounds[step] = self._collector.generator.start(prompts.batch(start), self._sampling_seed(step, stream=0))

    def refit(self, version: int) -> None:
        """Give the engine the policy's present weights, unless it has them already (after a validation, say)."""
        generator = self._collector.generator
        if generator.weight_version == version:
            return
        for generation in self._rounds.values():  # a round is completed with the weights it was started with
            with self._timer("rollout_wait"):
                generation.wait()
        with self._timer("refit"):
            if self._unload_engine:
                generator.reload()
            generator.refit(self._model, version)

    def drop(self, step: int) -> None:
        """Forget the rollouts of a step that is complete."""
        self._rounds.pop(step, None)

    def _sampling_seed(self, step: int, stream: int, draw: int = 0) -> int:
        return derive_seed(self._seed, "rollouts", step, stream, *((draw,) if draw else ()))

    # ---- state ------------------------------------------------------------------------------

    def state_dict(self, step: int) -> dict[str, Any]:
        """The rollouts kept for ``step``, once complete: they cannot be made again, as their weights are gone."""
        if step not in self._rounds:
            return {"rollouts": None}
        with self._timer("rollout_wait"):
            own = torch.frombuffer(bytearray(pack_results(self._rounds[step].wait())), dtype=torch.uint8).to(device())
        sizes = all_gather_rows(torch.tensor([len(own)], dtype=torch.int64, device=device())).tolist()
        parts = all_gather_rows(own).cpu().split(sizes)
        return {"rollouts": [base64.b64encode(part.numpy().tobytes()).decode() for part in parts]}

    def load_state_dict(self, state: dict[str, Any], step: int, prompts: PromptSource, start: int) -> None:
        """Continue where `state_dict` was taken, with any number of ranks; for ``start`` see `generate`."""
        if state["rollouts"] is None:
            return
        if self._staleness == 0:
            warn_for_all_ranks(
                logger,
                "the rollouts kept for step %d are discarded: with trainer.ppo.staleness=0 new ones are generated",
                step,
            )
            return
        batch = prompts.batch(start)
        results = [result for part in state["rollouts"] for result in unpack_results(base64.b64decode(part))]
        if len(results) != len(batch) or any(r.prompt_token_ids != batch[r.request_id].token_ids for r in results):
            warn_for_all_ranks(logger, "the rollouts kept for step %d are discarded: they answer other prompts", step)
            return
        self._rounds[step] = KeptRound(batch, results[dist.get_rank() :: dist.get_world_size()])
