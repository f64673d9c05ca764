"""When rollouts are generated, and with which weights: in their step, or in rounds that begin steps ahead."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import all_reduce_max
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config.schema import ActorLoop
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.rl.rollouts.collector import Collected, RolloutCollector
from nemo_style_aligner.trainer.rl.rollouts.disaggregated import (
    KeptRound,
    RemoteGenerator,
    RemoteRound,
    pack_results,
    unpack_results,
)
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator
from nemo_style_aligner.trainer.rl.rollouts.in_flight import Admissions, Carried, in_flight
from nemo_style_aligner.trainer.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.trainer.rl.sample import Prompt
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer

logger = logging.getLogger(__name__)

TRAINING, VALIDATION = 0, -1
"""A step's random streams: of its own rollouts and of a validation. The others, from 1 on, are rounds of warm-up."""


class GenerationSchedule:
    """Starts the generation of rollouts, keeps the rounds that are under way, and refits the engine.

    Every rank that trains calls its methods together.

    Args:
        collector: generates and scores.
        model: the policy.
        timer: times generation and waits.
        seed: the run's, from which the seeds of sampling are derived.
        ppo: says how far ahead, and what becomes of responses under way when weights are replaced.
        last_step: of the run, as it is known now; nothing is generated beyond.
        history: tells the model's present weights from all others; see `RLTrainer`.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        model: MegatronModel,
        timer: ScopedTimer,
        seed: int,
        ppo: ActorLoop,
        *,
        last_step: Callable[[], int],
        history: Callable[[], str] = str,
    ) -> None:
        self._collector = collector
        self._history = history
        self._model = model
        self._timer = timer
        self._seed = seed
        self._staleness = ppo.staleness
        self._unload_engine = ppo.trt_llm.unload_engine_train
        self._last_step = last_step
        # Rounds ahead are numbered: each step takes the next one, and more of them where groups were dropped.
        self._rounds: dict[int, RemoteRound | KeptRound] = {}  # begun
        self._versions: dict[int, int] = {}  # of the weights with which each of them was begun
        self._redrawn = 0  # rounds that steps before this one have taken beside their first
        self._draw = 0  # of this step's rounds, the newest; the first is 0
        self._admissions: Admissions | None = None  # where responses outlive rounds
        if ppo.staleness and in_flight(ppo) != "wait":
            self._admissions = Admissions(ppo.num_rollouts_per_prompt, restarts=in_flight(ppo) == "restart")

    def generate(
        self, prompts: PromptSource, start: int, step: int, version: int, *, stream: int = TRAINING, draw: int = 0
    ) -> tuple[Collected, dict[str, float]]:
        """Generate the rollouts of a step, or take those that were begun ahead, and have them scored.

        Args:
            start: prompts to skip.
            version: of the policy's present weights.
            stream: of the step's random streams.
            draw: rounds that were generated before for the same step. Where rounds are begun ahead, the step takes the
                one that follows: others begin in its place.

        Returns:
            The samples and, where they were generated now, metrics of the engines.

        Raises:
            StopEarlyError: as `RolloutCollector.collect`.
        """
        is_trained = stream != VALIDATION
        collect = functools.partial(self._collector.collect, step=step + is_trained, are_trained=is_trained)
        group_size = prompts.samples_per_prompt
        if stream == TRAINING and self._staleness:
            self._draw, number = draw, step + self._redrawn + draw
            wait = self._timer("rollout_wait" if number in self._rounds else "generate")
            self._begin_rounds(prompts, start, range(number, number + self._staleness), version)
            ahead = self._rounds[number]
            with wait:
                collected, metrics = collect(ahead.prompts, group_size, ahead.run)
            others = [round_.is_complete() for other, round_ in self._rounds.items() if other > number]
            return collected, metrics | {"buffered_steps": float(all_reduce_max(sum(others)))}
        self.refit(version)
        with self._timer("generate"):
            batch, seed = prompts.batch(start), self._sampling_seed(step, stream, draw)
            generate = functools.partial(self._collector.generator.generate, batch, seed)
            return collect(batch, group_size, generate)

    def unload(self) -> None:
        """Give the engine's memory back, if the settings want it; all rounds of the step are complete."""
        generator = self._collector.generator
        if self._unload_engine and isinstance(generator, LocalGenerator):
            with self._timer("unload"):
                generator.unload()

    def begin_ahead(self, prompts: PromptSource, start: int, step: int, version: int) -> None:
        """Begin to generate rollouts with the present weights, as far ahead of a step as ``staleness`` allows.

        Args:
            start: prompts to skip, for the step after this one.
        """
        number = step + self._redrawn + self._draw + 1
        self._begin_rounds(prompts, start, range(number, number + self._staleness), version)

    def _begin_rounds(self, prompts: PromptSource, start: int, numbers: range, version: int) -> None:
        """Begin those of these rounds that have not begun, and that steps will take; ``start`` is of the first."""
        last = self._last_step() + self._redrawn + self._draw  # each step takes one round at least
        for number in numbers:
            if number not in self._rounds and number <= last:
                self.refit(version, is_ahead=True)
                self._rounds[number] = self._begin(prompts, start, number, last)
                self._versions[number] = version
            start = prompts.after(start)

    def _begin(self, prompts: PromptSource, start: int, number: int, last: int) -> RemoteRound:
        generator, seed = self._collector.generator, functools.partial(self._sampling_seed, stream=TRAINING)
        assert isinstance(generator, RemoteGenerator)  # the config's checks have seen to it
        if self._admissions is None:
            return generator.start(prompts.batch(start), seed(number))
        batches = {}
        for admitted in range(number, min(number + self._staleness, last) + 1):
            if not self._admissions.has(admitted):
                batches[admitted] = seed(admitted), prompts.batch(start)
            start = prompts.after(start)
        return generator.go_on(self._admissions.order(number, batches), self._admissions.prompts)

    def refit(self, version: int, *, is_ahead: bool = False) -> None:
        """Give the engine the policy's present weights, unless it has them already (after a validation, say).

        ``is_ahead``: for a round that may begin later.
        """
        generator = self._collector.generator
        if generator.weight_version == version:
            return
        if not (is_ahead and isinstance(generator, RemoteGenerator) and generator.is_ahead):
            for round_ in self._rounds.values():  # it is completed with the weights it was begun with
                with self._timer("rollout_wait"):
                    round_.wait()
        with self._timer("refit"):
            generator.refit(self._model, version, self._history())
            if self._collector.follower is not None:
                self._collector.follower.refit(self._model, version)

    def drop(self, step: int) -> None:
        """Forget the rollouts of a step that is complete."""
        self._redrawn, self._draw = self._redrawn + self._draw, 0
        for number in [number for number in self._rounds if number <= step + self._redrawn]:
            del self._rounds[number], self._versions[number]

    def _sampling_seed(self, step: int, stream: int, draw: int = 0) -> int:
        return derive_seed(self._seed, "rollouts", step, stream, *((draw,) if draw else ()))

    # ---- state ------------------------------------------------------------------------------

    def state_dict(self, version: int) -> dict[str, Any]:
        """The rollouts that have begun, once they are complete, and what is under way beside them.

        They cannot be made again, as their weights are gone; but for rounds by themselves with the present ones, of
        this ``version``. Nothing depends on when this is asked for: a round ends by itself, and the next begins with
        weights of a later step.
        """
        is_kept = {number: self._admissions is not None or of != version for number, of in self._versions.items()}
        rounds = [self._kept(number, round_) for number, round_ in sorted(self._rounds.items()) if is_kept[number]]
        state: dict[str, Any] = {"rounds": rounds, "redrawn": self._redrawn, "under_way": None}
        if rounds and self._admissions is not None:
            assert isinstance(self._collector.generator, RemoteGenerator)
            samples = [vars(sample) for sample in self._collector.generator.carried()]
            state["under_way"] = {"samples": samples, "admissions": self._admissions.state_dict()}
        return state

    def _kept(self, number: int, round_: RemoteRound | KeptRound) -> dict[str, Any]:
        with self._timer("rollout_wait"):
            own = pack_results(round_.wait()).decode()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        prompt_ids = [prompt.prompt_id for prompt in round_.prompts]
        facts = {"step": number, "version": self._versions[number], "prompts": _digest(round_.prompts)}
        return facts | {"prompt_ids": prompt_ids, "rollouts": parts}

    def load_state_dict(self, state: dict[str, Any], prompts: PromptSource) -> None:
        """Continue where `state_dict` was taken, with any number of ranks."""
        self._redrawn = int(state.get("redrawn", 0))
        if not (rounds := state.get("rounds")):
            return
        if (reason := self._why_discarded(rounds, prompts)) is not None:
            steps = ", ".join(str(kept["step"]) for kept in rounds)
            warn_for_all_ranks(logger, "the rollouts kept for steps %s are discarded: %s", steps, reason)
            return
        for kept in rounds:
            results = [result for part in kept["rollouts"] for result in unpack_results(part)]
            own = results[dist.get_rank() :: dist.get_world_size()]
            self._versions[kept["step"]] = kept["version"]
            self._rounds[kept["step"]] = KeptRound(list(map(prompts.prompt, kept["prompt_ids"])), own)
        self._load_under_way(state["under_way"], prompts)

    def _why_discarded(self, rounds: Sequence[dict[str, Any]], prompts: PromptSource) -> str | None:
        if not self._staleness:
            return "with trainer.ppo.staleness=0 new ones are generated"
        group = prompts.samples_per_prompt
        per_step = prompts.batch_size * group
        if any(len(kept["prompt_ids"]) != per_step for kept in rounds):
            return f"they are not {per_step} for each step, as it takes now"
        if any(
            len({*kept["prompt_ids"][start : start + group]}) > 1
            for kept in rounds
            for start in range(0, per_step, group)
        ):
            return f"they are not in groups of {group}, as they are now"
        if any(kept["prompts"] != _digest(prompts.known(kept["prompt_ids"])) for kept in rounds):
            return "they answer other prompts"
        return None

    def _load_under_way(self, state: dict[str, Any] | None, prompts: PromptSource) -> None:
        if state is None:
            return
        generator, samples = self._collector.generator, [Carried(**fields) for fields in state["samples"]]
        if self._admissions is None or not isinstance(generator, RemoteGenerator):
            warn_for_all_ranks(
                logger,
                "%d samples that were under way are discarded: with trainer.ppo.in_flight=wait a step takes its own",
                len(samples),
            )
            return
        self._admissions.load_state_dict(state["admissions"], prompts.prompt)
        generator.restore(samples, self._admissions.group_size, self._admissions.due)


def _digest(prompts: Sequence[Prompt]) -> str:
    """Equal where the prompts are: responses do not tell, since an environment may have asked something else."""
    return hashlib.sha256(repr([prompt.token_ids for prompt in prompts]).encode()).hexdigest()
