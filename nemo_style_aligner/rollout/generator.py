"""Who makes the responses of a round: this rank's engine, or ranks set apart for it (`rollout_ranks`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from nemo_style_aligner.generation.engine import GenerationEngine, GenerationResult, SamplingParams
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel import stop_points, stop_signals, worlds
from nemo_style_aligner.rollout.generation_totals import GenerationTotals
from nemo_style_aligner.rollout.intake import AcceptedResponses, ResponseSink
from nemo_style_aligner.rollout.prompts import Prompt
from nemo_style_aligner.rollout.supply import RequestSupply
from nemo_style_aligner.rollout.work_source import WorkSource
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.stream import export_weights


class Round(Protocol):
    """One response for each of ``prompts``, on its way. Ranks call its methods together."""

    prompts: Sequence[Prompt]

    def run(self, sink: ResponseSink) -> None:
        """Give ``sink`` this rank's share of the responses as they finish, until there are no more.

        Raises:
            StopEarlyError: a rank got a stop signal. What is missing is lost, unless `wait` can still get it.
        """
        ...

    def wait(self) -> list[GenerationResult]:
        """This rank's share, complete, without minding stop signals, so that it can be kept."""
        ...

    def metrics(self) -> dict[str, float]:
        """What `GenerationTotals.metrics` says of the round, once it is complete; the same on every rank."""
        ...


class Generator(Protocol):
    """Generates rounds with the weights it was last given."""

    @property
    def weight_version(self) -> int:
        """Version of the weights; -1 while there are none."""
        ...

    def refit(self, model: MegatronModel, version: int) -> None:
        """Take over the weights of the policy. Collective; no round may be under way."""
        ...

    def unload(self) -> None:
        """Lend the engine's memory to training, where they share a device."""
        ...

    def reload(self) -> None:
        """Take it back; `refit` comes next."""
        ...

    def start(self, prompts: Sequence[Prompt], seed: int) -> Round:
        """Begin a round. Sample i's random stream depends on ``seed`` and i alone."""
        ...

    def close(self) -> None:
        """Give up connections and servers."""
        ...


class LocalGenerator:
    """This rank's engine, fed by a work source. Nothing of a round happens before its `run`.

    Args:
        engine: may be shared by several ranks.
        work: where the ids of the samples to generate come from.
        sampling: sampling parameters.
        group: which ranks share the engine.
        meeting: of all ranks, with a limit for how long one may wait there for the others' shares of a round; None
            where ``work`` keeps them together.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        work: WorkSource,
        sampling: SamplingParams,
        group: EngineGroup,
        meeting: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine = engine
        self.work = work
        self.sampling = sampling
        self.group = group
        self.meeting = meeting
        self._num_rounds = 0

    @property
    def weight_version(self) -> int:
        """See `Generator.weight_version`."""
        return self.engine.weight_version

    def refit(self, model: MegatronModel, version: int) -> None:
        """See `Generator.refit`; what the engine views in the model is left out of the stream."""
        engine = self.engine
        weights = export_weights(model, without=engine.viewed_weights, transient=engine.takes_transient_weights)
        engine.refit(weights, version)

    def unload(self) -> None:
        """See `Generator.unload`."""
        self.engine.unload()

    def reload(self) -> None:
        """See `Generator.reload`."""
        self.engine.reload()

    def start(self, prompts: Sequence[Prompt], seed: int) -> LocalRound:
        """See `Generator.start`."""
        self._num_rounds += 1
        return LocalRound(self, self._num_rounds, prompts, seed)

    def close(self) -> None:
        """See `Generator.close`. Collective."""
        worlds.barrier()  # rank 0's queue stops with its work source: nobody may need it any more
        self.work.close()
        self.engine.close()


class LocalRound:
    """A `Round` that this rank's engine makes while `run` is under way."""

    def __init__(self, generator: LocalGenerator, number: int, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self._generator = generator
        self._number = number
        self._seed = seed
        self._totals = GenerationTotals()

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; what is missing when it is stopped is lost."""
        generator, prompts = self._generator, self.prompts
        engine, work, group = generator.engine, generator.work, generator.group
        work.start_round(self._number, range(len(prompts)), [prompt.expected_length for prompt in prompts])
        worlds.barrier()  # nobody asks for a round that rank 0 has not begun
        accepted = AcceptedResponses(work, sink)
        supply = RequestSupply(work, group, engine.num_slots, prompts, self._seed)
        # Ranks that share an engine compute together: they can only take no more.
        with stop_signals.interruptible(group.control is None):
            while supply.wait():  # until the round is complete, ids of lost workers included
                started = time.monotonic()
                for result in engine.generate(supply, generator.sampling):
                    activity.progress()
                    supply.num_running -= 1
                    if group.is_leader:
                        accepted.add(result)
                self._totals.add(engine, time.monotonic() - started)
                accepted.flush()
        if stop_signals.received() and group.is_leader:
            self._release_others()
        if generator.meeting is not None:
            dist.barrier(group=generator.meeting)  # training's collectives may have too short a limit for this wait
        stop_points.check()

    def _release_others(self) -> None:
        """The round is abandoned: let no rank wait for this one's samples, or begin others."""
        work = self._generator.work
        while work.lease(len(self.prompts)):
            pass
        work.complete(range(len(self.prompts)))

    def wait(self) -> list[GenerationResult]:
        """Raises RuntimeError: such a round is made in `run` alone."""
        raise RuntimeError("a round of this rank's own engine is made in `run`, and cannot be waited for")

    def metrics(self) -> dict[str, float]:
        """See `Round.metrics`."""
        return self._totals.metrics(self._generator.engine, self._generator.group.is_leader)


class KeptRound:
    """A `Round` whose responses were made before, by a run that was stopped.

    Args:
        results: this rank's share.
    """

    def __init__(self, prompts: Sequence[Prompt], results: list[GenerationResult]) -> None:
        self.prompts = prompts
        self._results = results

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; never stopped."""
        for result in self._results:
            sink.add(result)
        sink.flush()

    def wait(self) -> list[GenerationResult]:
        """See `Round.wait`."""
        return self._results

    def metrics(self) -> dict[str, float]:
        """Empty: this run has not made the round."""
        return {}
