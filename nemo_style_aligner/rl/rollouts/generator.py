"""What generates rounds of responses: the interface, and this rank's own engine (`remote` uses dedicated ranks)."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from nemo_style_aligner.generation.engine import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel import worlds
from nemo_style_aligner.parallel.agreement import result_on_every_rank
from nemo_style_aligner.parallel.groups import all_reduce_sums, device
from nemo_style_aligner.parallel.stop_signals import stops
from nemo_style_aligner.rl.rollouts.work_source import WorkSource
from nemo_style_aligner.rl.sample import Prompt
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.stream import export_weights


class ResponseSink(Protocol):
    """Takes finished responses."""

    def add(self, result: GenerationResult) -> None:
        """Take a response; does not keep the engine waiting."""
        ...

    def flush(self) -> None:
        """Process what was taken so far: no more responses come for now."""
        ...


class AcceptedResponses:
    """Reports responses to the work source, and hands on those that it accepts.

    The engine is not kept waiting: a response waits for the work source's answer while others are generated.
    A response that came too late, because its sample went to another rank, is dropped.
    """

    def __init__(self, work: WorkSource, sink: ResponseSink) -> None:
        self._work = work
        self._sink = sink
        self._reported: collections.deque[tuple[GenerationResult, concurrent.futures.Future[list[int]]]] = (
            collections.deque()
        )

    def add(self, result: GenerationResult) -> None:
        """Report a response, and hand on earlier ones whose answers have come."""
        self._reported.append((result, self._work.complete_async([result.request_id])))
        while self._reported and self._reported[0][1].done():
            self._accept()

    def flush(self) -> None:
        """Wait for all answers of the work source, and flush the sink."""
        while self._reported:
            self._accept()
        self._sink.flush()

    def _accept(self) -> None:
        result, answer = self._reported.popleft()
        if answer.result():
            self._sink.add(result)


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
            stops.interruptible(group.control is None),
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
        if stops.received and group.is_leader:
            self._release_others()
        if generator.meeting is not None:
            dist.barrier(group=generator.meeting)  # training's collectives may have too short a limit for this wait
        stops.check()

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


# ---- what an engine works on next, and what it did -----------------------------------------------


class RequestSupply:
    """Requests for an engine's `generate`, an iterable that can be iterated again after each `wait`.

    Attributes:
        num_running: requests handed out whose results have not come; the caller decrements it for each result.
    """

    def __init__(
        self, work: WorkSource, group: EngineGroup, num_slots: int, prompts: Sequence[Prompt], seed: int
    ) -> None:
        self.num_running = 0
        self._work = work
        self._group = group
        self._num_slots = num_slots
        self._prompts = prompts
        self._seed = seed
        self._ids: collections.deque[int] = collections.deque()

    def wait(self) -> bool:
        """Wait for work; False if the round is complete, or after a stop signal. Call it when nothing is running."""
        self._lease(wait=True)
        return bool(self._ids)

    def __iter__(self) -> Iterator[GenerationRequest]:
        """Yield requests as long as there are ids to lease; the engine pulls one whenever a slot is free."""
        while self._ids:
            sample_id = self._ids.popleft()
            self.num_running += 1
            yield GenerationRequest(sample_id, self._prompts[sample_id].token_ids, derive_seed(self._seed, sample_id))
            if not self._ids:
                self._lease()

    def _lease(self, wait: bool = False) -> None:
        """Lease as many ids as there are free slots, and share them with all ranks of the group."""
        n = max(1, self._num_slots - self.num_running)
        # A stop signal interrupts a round, but not if it came before the round, nor if several ranks share the engine:
        # then nothing more is leased.
        is_asking = self._group.is_leader and not stops.received
        if wait and self._group.control is not None:
            self._ids.extend(self._wait_together(n, is_asking))
        else:
            self._ids.extend(self._group.share(self._work.lease(n, wait=wait) if is_asking else []))

    def _wait_together(self, n: int, is_asking: bool) -> list[int]:
        """Have the leader wait for ids, as long as others complete some; its group hears from it every few seconds."""
        group, lease = self._group, None
        thread = concurrent.futures.ThreadPoolExecutor(1, "lease")
        try:
            if group.is_leader:
                lease = thread.submit(self._work.lease, n, wait=True) if is_asking else thread.submit(list)
            return result_on_every_rank(lease, group.control, group.leader)
        finally:
            thread.shutdown(wait=False)  # an error must not wait for other workers' completions


_SUMMED = ("generated_tokens", "prefill_tokens", "shared_prefix_tokens", "steps", "active_slot_steps", "preemptions")


class GenerationTotals:
    """Sums over the calls of `GenerationEngine.generate` in one phase on this rank."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMMED, 0)
        self._peak_kv_share = 0.0
        self._seconds = 0.0

    def add(self, engine: GenerationEngine, seconds: float) -> None:
        """Add the counters of a finished ``engine.generate`` call that took ``seconds``."""
        statistics = engine.statistics
        for name in _SUMMED:
            self._sums[name] += getattr(statistics, name)
        if statistics.num_pages:
            self._peak_kv_share = max(self._peak_kv_share, statistics.peak_pages / statistics.num_pages)
        self._seconds += seconds

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self._sums["generated_tokens"]

    def metrics(self, engine: GenerationEngine, is_leader: bool) -> dict[str, float]:
        """The metrics over all engines, the same on every rank. Collective.

        ``tokens_per_second`` is new tokens over the time of the slowest engine; ``balance`` is the engines' mean time
        over the slowest's, 1 if all took equally long; ``active_slots`` is the mean over all engines' forward passes;
        ``peak_kv_share`` is the mean of the engines' peak shares of KV memory; ``compilations`` counts since the start.

        Args:
            is_leader: whether this rank speaks for its engine (ranks may share one).
        """
        weight = 1.0 if is_leader else 0.0
        own = {name: weight * value for name, value in self._sums.items()}
        own |= {"engines": weight, "seconds": weight * self._seconds, "peak_kv_share": weight * self._peak_kv_share}
        sums = all_reduce_sums(own | {"compilations": weight * engine.num_compilations})
        slowest = torch.tensor([self._seconds], dtype=torch.float64, device=device())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        longest = max(float(slowest), 1e-9)
        return {
            "tokens": sums["generated_tokens"],
            "tokens_per_second": sums["generated_tokens"] / longest,
            "prompt_tokens_computed": sums["prefill_tokens"],
            "prompt_tokens_shared": sums["shared_prefix_tokens"],
            "passes": sums["steps"],
            "active_slots": sums["active_slot_steps"] / max(sums["steps"], 1.0),
            "preemptions": sums["preemptions"],
            "peak_kv_share": sums["peak_kv_share"] / sums["engines"],
            "balance": sums["seconds"] / (sums["engines"] * longest),
            "compilations": sums["compilations"],
        }
