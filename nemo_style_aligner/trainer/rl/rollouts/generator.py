"""Rounds of responses from this rank's own engine (`disaggregated` has those of ranks set apart for it)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.engine.contract import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.lockstep import Lockstep
from nemo_style_aligner.engine.parallel.groups import all_reduce_sums, device
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.stop_signals import stops
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.rl.episodes.runner import SUMS, Environment
from nemo_style_aligner.trainer.rl.rollouts.in_flight import EngineShare, Hand, Order
from nemo_style_aligner.trainer.rl.rollouts.work_queue import WorkSource
from nemo_style_aligner.trainer.rl.sample import Prompt

Take = Callable[[GenerationResult], None]
"""Takes a finished response; does not keep the engine waiting."""


class LocalGenerator:
    """Generates with this rank's engine, fed by a work source.

    Args:
        engine: may be shared by several ranks.
        work: where the ids of the samples to generate come from.
        sampling: sampling parameters.
        group: which ranks share the engine.
        environment: runs an episode for each prompt; None: a response is one reply.
        meeting: group of all ranks, whose timeout bounds the wait for the others' responses at the end of a round;
            None: there are no others.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        work: WorkSource,
        sampling: SamplingParams,
        group: EngineGroup,
        meeting: dist.ProcessGroup | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.engine = engine
        self.environment = environment
        self.work = work
        self.sampling = sampling
        self.group = group
        self.meeting = meeting

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engine has; -1 while it has none."""
        return self.engine.weight_version

    def refit(self, model: MegatronModel, version: int, history: str = "") -> None:
        """Take over the weights of the policy, and the engine's memory where it was unloaded. Collective.

        ``history`` tells the weights from all others; see `RLTrainer`.
        """
        engine = self.engine
        self.note_weights(history)
        engine.reload()
        # Weights that the engine reads in the model's own memory are not streamed.
        weights = export_weights(model, without=engine.viewed_weights, transient=True)
        engine.refit(weights, version)

    def note_weights(self, history: str) -> None:
        """Note what weights the engine gets: kept episodes of a program are those of the same ones."""
        if self.environment is not None:
            self.environment.weights = history

    def unload(self) -> None:
        """Lend the engine's memory to training, on the same device, until the next `refit`."""
        self.engine.unload()

    def generate(self, prompts: Sequence[Prompt], seed: int, take: Take) -> dict[str, float]:
        """Generate a round: a response to each prompt. Collective.

        Args:
            prompts: of each sample.
            seed: sample i's random stream depends on this and i alone.
            take: gets this rank's share of the responses as they finish.

        Returns:
            `generation_metrics`.

        Raises:
            StopEarlyError: a rank got a stop signal. The round is lost.
        """
        self.work.start_round(range(len(prompts)), [prompt.expected_length for prompt in prompts])
        roles.barrier()  # nobody asks for a round that rank 0 has not begun
        # Of an engine's ranks all take their requests alike; episodes are the leader's, which tells them of each reply.
        takers = self.group if self.environment is None else EngineGroup()
        supply = RequestSupply(self.work, takers, self.engine.num_slots, prompts, seed)
        of_episodes: dict[str, float] | None = None

        def respond() -> None:
            nonlocal of_episodes
            of_episodes = self._respond(supply, prompts, take)

        metrics = self._round("responses", supply.progress, respond)
        return metrics | _episode_metrics(of_episodes, len(prompts))

    def go_on(self, share: EngineShare, order: Order, hand: Hand) -> dict[str, float]:
        """Generate a round of responses of which others stay under way; as `generate`. Collective.

        Args:
            share: this engine's.
            order: what is to be done.
            hand: gets this rank's share of the responses as their groups finish.
        """
        roles.barrier()
        is_leader = self.group.is_leader
        metrics = self._round(
            "groups", share.progress, lambda: share.run(order, hand if is_leader else lambda *_: None)
        )
        begun = [len(sample.token_ids) for sample in share.carried.values() if sample.token_ids]
        own = {"carried_responses": len(begun) * is_leader, "carried_tokens": sum(begun) * is_leader}
        return metrics | all_reduce_sums({name: float(number) for name, number in own.items()})

    def _round(
        self, what: str, progress: Callable[[], tuple[int, int]], respond: Callable[[], None]
    ) -> dict[str, float]:
        """Have ``respond`` generate; ``what`` is done, ``progress`` tells how much of it. Collective."""
        engine, work, group, started = self.engine, self.work, self.group, time.monotonic()
        counting = activity.counting(
            what if self.meeting is None else f"{what} of this rank",
            progress,
            lambda: engine.statistics.generated_tokens,
            lambda: engine.statistics.longest_running,
        )
        # Ranks that share an engine compute together, so a signal interrupts none of them: they only take no more.
        with (
            counting,
            stops.interruptible(group.control is None),
        ):
            respond()
        seconds = time.monotonic() - started
        if stops.received and group.is_leader:
            while work.take(engine.num_slots):  # no rank begins more of a round that is given up
                pass
        if self.meeting is not None:
            dist.barrier(group=self.meeting)  # training's collectives may have too short a limit for this wait
        stops.check()
        return generation_metrics(engine, seconds, group.is_leader)

    def _respond(self, supply: RequestSupply, prompts: Sequence[Prompt], take: Take) -> dict[str, float] | None:
        """Generate what is supplied; returns sums over this rank's episodes, None without environments."""

        def done(result: GenerationResult) -> None:
            activity.progress()
            supply.num_done += 1
            if self.group.is_leader:
                take(result)

        if self.environment is None:
            for result in self.engine.generate(supply, self.sampling):
                done(result)
            return None
        assert isinstance(self.engine, EmbeddedEngine)  # the config's checks have seen to it
        if not self.group.is_leader:
            Lockstep(self.engine, self.group).follow()
            return {}
        return self.environment.generate(self.engine, self.group, iter(supply), self.sampling, prompts, done)

    def close(self) -> None:
        """Close connections and servers. Collective."""
        roles.barrier()  # closing rank 0's work source stops the queue: no rank may need it any more
        self.work.close()
        if self.environment is not None:
            self.environment.close()
        self.engine.close()


class RequestSupply:
    """Requests for an engine's `generate`, which pulls one whenever a slot is free, until the work source has no more.

    Attributes:
        num_done: requests whose results have come; the caller counts them.
    """

    def __init__(
        self, work: WorkSource, group: EngineGroup, num_slots: int, prompts: Sequence[Prompt], seed: int
    ) -> None:
        self.num_done = 0
        self._work = work
        self._group = group
        self._num_slots = num_slots
        self._prompts = prompts
        self._seed = seed
        self._num_taken = self._num_begun = 0

    def __iter__(self) -> Iterator[GenerationRequest]:
        while ids := self._take():
            for sample_id in ids:
                self._num_begun += 1
                prompt = self._prompts[sample_id]
                yield GenerationRequest(sample_id, prompt.token_ids, derive_seed(self._seed, sample_id))

    def progress(self) -> tuple[int, int]:
        """How many of this engine's responses are done, and of about how many; for any thread."""
        return self.num_done, self._num_taken + self._work.left()

    def _take(self) -> list[int]:
        """Take as many ids as there are free slots, on all ranks of the group alike."""
        free = max(1, self._num_slots - (self._num_begun - self.num_done))
        # A stop signal interrupts a round, but not if it came before the round, nor if several ranks share the engine:
        # then nothing more is taken.
        is_asking = self._group.is_leader and not stops.received
        ids = self._group.share(self._work.take(free) if is_asking else [])
        self._num_taken += len(ids)
        return ids


def _episode_metrics(own: dict[str, float] | None, num_episodes: int) -> dict[str, float]:
    """Means over the episodes of a round; of failures their share. Collective.

    Args:
        own: sums of this rank's; None: there are no episodes.
    """
    names = SUMS if own is not None else ()
    sums = all_reduce_sums({name: (own or {}).get(name, 0.0) for name in names}) if names else {}
    return {name: total / num_episodes for name, total in sums.items()}


_SUMMED = (
    *("generated_tokens", "prefill_tokens", "shared_prefix_tokens", "steps", "active_slot_steps", "preemptions"),
    *("guessed_tokens", "guesses_held"),
)


def generation_metrics(engine: GenerationEngine, seconds: float, is_leader: bool) -> dict[str, float]:
    """Metrics of a round over all engines, the same on every rank. Collective.

    ``tokens_per_second`` is new tokens over the time of the slowest engine; ``balance`` is the engines' mean time
    over the slowest's, 1 if all took equally long; ``active_slots`` is the mean over all engines' forward passes;
    ``peak_kv_share`` is the mean of the engines' peak shares of KV memory; ``compilations`` counts since the start.

    Args:
        engine: has the statistics of its latest `generate`.
        seconds: that this took.
        is_leader: whether this rank speaks for its engine (ranks may share one).
    """
    statistics, weight = engine.statistics, 1.0 if is_leader else 0.0
    own = {name: weight * getattr(statistics, name) for name in _SUMMED}
    own |= {"engines": weight, "seconds": weight * seconds, "compilations": weight * engine.num_compilations}
    own["peak_kv_share"] = weight * statistics.peak_pages / max(statistics.num_pages, 1)
    sums = all_reduce_sums(own)
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device())
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
        "guessed_tokens": sums["guessed_tokens"],
        "guesses_held": sums["guesses_held"],
        "peak_kv_share": sums["peak_kv_share"] / sums["engines"],
        "balance": sums["seconds"] / (sums["engines"] * longest),
        "compilations": sums["compilations"],
    }
