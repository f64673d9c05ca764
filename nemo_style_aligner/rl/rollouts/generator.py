"""What generates rounds of responses: the interface, and this rank's own engine (`remote` uses dedicated ranks)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from nemo_style_aligner.generation.engine import GenerationEngine, GenerationResult, SamplingParams
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel import stop_points, stop_signals, worlds
from nemo_style_aligner.rl.rollouts.generation_totals import GenerationTotals
from nemo_style_aligner.rl.rollouts.intake import AcceptedResponses, ResponseSink
from nemo_style_aligner.rl.rollouts.supply import RequestSupply
from nemo_style_aligner.rl.rollouts.work_source import WorkSource
from nemo_style_aligner.rl.sample import Prompt
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.stream import export_weights


class Round(Protocol):
    """A round of generation: one response for each of ``prompts``. All ranks call its methods together."""

    prompts: Sequence[Prompt]

    def run(self, sink: ResponseSink) -> None:
        """Give ``sink`` this rank's share of the responses as they finish, until there are no more.

        Raises:
            StopEarlyError: a rank got a stop signal. Missing responses are lost, unless `wait` can still get them.
        """
        ...

    def wait(self) -> list[GenerationResult]:
        """Wait for this rank's complete share, ignoring stop signals, so that it can be kept."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the complete round (see `GenerationTotals.metrics`), the same on every rank."""
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
        """Take the engine's memory back; `refit` must come next."""
        ...

    def start(self, prompts: Sequence[Prompt], seed: int) -> Round:
        """Begin a round. Sample i's random stream depends on ``seed`` and i alone."""
        ...

    def close(self) -> None:
        """Close connections and servers."""
        ...


class LocalGenerator:
    """Generates with this rank's engine, fed by a work source. Nothing of a round happens before its `run`.

    Args:
        engine: may be shared by several ranks.
        work: where the ids of the samples to generate come from.
        sampling: sampling parameters.
        group: which ranks share the engine.
        meeting: group of all ranks whose timeout bounds the wait for other ranks' shares at the end of a round; None
            if ``work`` makes the ranks wait for each other.
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
        """See `Generator.refit`; weights that the engine reads in the model's own memory are not streamed."""
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
        worlds.barrier()  # closing rank 0's work source stops the queue: no rank may need it any more
        self.work.close()
        self.engine.close()


class LocalRound:
    """A `Round` that this rank's engine generates within `run`."""

    def __init__(self, generator: LocalGenerator, number: int, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self._generator = generator
        self._number = number
        self._seed = seed
        self._totals = GenerationTotals()
        self._is_generating = False

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; responses still missing when it is stopped are lost."""
        generator, prompts = self._generator, self.prompts
        engine, work, group = generator.engine, generator.work, generator.group
        work.start_round(self._number, range(len(prompts)), [prompt.expected_length for prompt in prompts])
        worlds.barrier()  # nobody asks for a round that rank 0 has not begun
        accepted = AcceptedResponses(work, sink)
        supply = RequestSupply(work, group, engine.num_slots, prompts, self._seed)
        # Ranks that share an engine compute together, so a signal interrupts none of them: they only lease no more.
        with (
            activity.counting("responses", work.progress, self._num_tokens),
            stop_signals.interruptible(group.control is None),
        ):
            while supply.wait():  # until the round is complete, ids of lost workers included
                started, self._is_generating = time.monotonic(), True
                for result in engine.generate(supply, generator.sampling):
                    activity.progress()
                    supply.num_running -= 1
                    if group.is_leader:
                        accepted.add(result)
                self._is_generating = False
                self._totals.add(engine, time.monotonic() - started)
                accepted.flush()
        if stop_signals.received() and group.is_leader:
            self._release_others()
        if generator.meeting is not None:
            dist.barrier(group=generator.meeting)  # training's collectives may have too short a limit for this wait
        stop_points.check()

    def _num_tokens(self) -> int:
        """Tokens of this rank's engine so far."""
        under_way = self._generator.engine.statistics.generated_tokens if self._is_generating else 0
        return self._totals.tokens + under_way

    def _release_others(self) -> None:
        """Abandon the round: take and complete all ids, so that no rank waits for this one's or begins more."""
        work, count = self._generator.work, len(self.prompts)
        while work.lease(count):
            pass
        for answer in [work.complete_async([sample_id]) for sample_id in range(count)]:
            answer.result()

    def wait(self) -> list[GenerationResult]:
        """Raise RuntimeError: such a round is generated in `run` alone."""
        raise RuntimeError("a round of this rank's own engine is made in `run`, and cannot be waited for")

    def metrics(self) -> dict[str, float]:
        """See `Round.metrics`."""
        return self._totals.metrics(self._generator.engine, self._generator.group.is_leader)


class KeptRound:
    """A `Round` restored from a checkpoint: an earlier run generated its responses.

    Args:
        results: this rank's share.
    """

    def __init__(self, prompts: Sequence[Prompt], results: list[GenerationResult]) -> None:
        self.prompts = prompts
        self._results = results

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; ignores stop signals."""
        for result in self._results:
            sink.add(result)
        sink.flush()

    def wait(self) -> list[GenerationResult]:
        """See `Round.wait`."""
        return self._results

    def metrics(self) -> dict[str, float]:
        """Empty: this run did not generate the round."""
        return {}
