"""Prompts in, scored samples out: responses are scored while others are generated, then dealt to those that train.

`schedule.GenerationSchedule` says when they are generated and with which weights.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nemo_style_aligner import activity
from nemo_style_aligner.engine.contract import GenerationResult
from nemo_style_aligner.engine.embedded.route_memory import unpacked
from nemo_style_aligner.engine.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.engine.parallel.groups import (
    all_gather_rows,
    all_reduce_max,
    all_reduce_sums,
    current_layout,
    device,
    exchange_rows,
)
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.launch.stop_signals import stops
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.packing import shares
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.rl.episodes.runner import Episode
from nemo_style_aligner.trainer.rl.rewards import Reward
from nemo_style_aligner.trainer.rl.rollouts.disaggregated import (
    RemoteGenerator,
)
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator, Take
from nemo_style_aligner.trainer.rl.sample import Prompt, Rollouts, Sample
from nemo_style_aligner.trainer.rl.scoring import ScoredBatch, Scorer, Scores
from nemo_style_aligner.trainer.telemetry.log_files import json_numbers

logger = logging.getLogger(__name__)

Generator = LocalGenerator | RemoteGenerator


class WeightFollower(Protocol):
    """Something beside the generator that works with the policy's weights."""

    def refit(self, model: MegatronModel, version: int) -> None:
        """Take over the weights. Called on all training ranks together."""

    def close(self) -> None:
        """The run ends."""


Minibatches = Sequence[Sequence[int]]
"""The samples of each update, in order."""


def as_sample(
    result: GenerationResult, prompt: Prompt, group: int, decode: Callable[[Sequence[int]], str], step: int = 0
) -> Sample:
    """A response as reward and value sources get it; see `Sample`."""
    of_episode: dict[str, Any] = {}
    if isinstance(result, Episode):
        of_episode = {"sampled": result.mask, "outcome": result.outcome, "problem": result.problem}
        of_episode["row_lengths"] = result.row_lengths
    return Sample(
        sample_id=result.request_id,
        group=group,
        line=prompt.line,
        place=prompt.place,
        token_ids=result.prompt_token_ids + result.token_ids,
        prompt_length=len(result.prompt_token_ids),
        ended=result.finish_reason == "stop",
        decode=decode,
        **of_episode,
        step=step,
    )


class ScoredResponses:
    """Has responses scored, in batches as they come.

    Args:
        scorer: scores them.
        batch_size: responses that are scored together, at most.
        as_sample: what the scorer gets of a response.
        are_trained: whether the responses are trained on.

    Attributes:
        results: the responses, in the order in which they were added.
        num_empty: how many of them have no text.
    """

    def __init__(
        self,
        scorer: Scorer,
        batch_size: int,
        as_sample: Callable[[GenerationResult], Sample],
        *,
        are_trained: bool = True,
    ) -> None:
        self.results: list[GenerationResult] = []
        self.num_empty = 0
        self._scorer = scorer
        self._are_trained = are_trained
        self._batch_size = batch_size
        self._as_sample = as_sample
        self._unsent: list[Sample] = []
        self._batches: list[ScoredBatch] = []
        self._num_scored = 0  # of `_batches`
        self._last_heard = time.monotonic()

    def add(self, result: GenerationResult) -> None:
        """Take a response; a full batch is sent."""
        self.results.append(result)
        self._unsent.append(sample := self._as_sample(result))
        self.num_empty += not sample.response.strip()
        if len(self._unsent) == self._batch_size:
            self.flush()

    def flush(self) -> None:
        """Send the unsent responses, a full batch or not."""
        if self._unsent:
            self._batches.append(self._scorer.score(self._unsent, are_trained=self._are_trained))
            self._unsent = []
            self._last_heard = time.monotonic()

    def score_together(self) -> None:
        """Have those scored that ranks score together. Collective; once they have all that there is to score."""
        self._scorer.score_together()

    def are_scored(self, seconds: float) -> bool:
        """Wait for the scores of `results`, at most ``seconds``; return whether all have come.

        Raises:
            TimeoutError: no scores have come, and no lost critic has got on with catching up, for the scorer's
                `silence_seconds`.
            Exception: the error of a request that failed.
        """
        futures = [future for batch in self._batches for future in batch.futures]
        done, missing = concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION)
        for scores in done:
            scores.result()
        if len(done) > self._num_scored:
            self._num_scored, self._last_heard = len(done), time.monotonic()
        # Usually a source gives up on a request first, with a more telling error, but the request may have to wait for
        # a connection before that. A lost critic gives no scores while it trains again on the batches that it lost,
        # however long that takes; each batch counts as progress.
        limit = self._scorer.silence_seconds
        if missing and time.monotonic() - max(self._last_heard, self._scorer.last_progress) > limit:
            late = next(batch for batch in self._batches if not batch.done())
            raise TimeoutError(
                f"no scores arrived for {limit:g} s; those of samples {late.sample_ids[:20]} are missing: check "
                f"{self._scorer.described}"
            )
        return not missing

    def progress(self) -> tuple[int, int]:
        """How many responses are scored, and of how many."""
        return sum(len(batch.sample_ids) for batch in self._batches if batch.done()), len(self.results)

    def scores(self) -> Iterator[tuple[int, Reward, dict[str, torch.Tensor]]]:
        """Each response's id, its reward and its columns (`ScoredBatch`); once all `are_scored`."""
        for batch in self._batches:
            yield from batch.result()


@dataclasses.dataclass(frozen=True)
class _Part:
    """A round's responses on this rank, and the places of those that are kept among the step's samples."""

    responses: ScoredResponses
    places: Mapping[int, int]


class Collected:
    """The samples of one or several rounds, on the ranks that generated them. Their scores may be on their way.

    Attributes:
        prompts: of each of the N samples; the same on every rank.
        groups: int64 [N].
    """

    def __init__(self, prompts: Sequence[Prompt], groups: torch.Tensor, parts: Sequence[_Part]) -> None:
        self.prompts = prompts
        self.groups = groups
        self._parts = parts

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, samples: Sequence[int]) -> Collected:
        """Of these samples alone, in their order."""
        chosen = {sample: place for place, sample in enumerate(samples)}
        parts = [
            _Part(part.responses, {id_: chosen[place] for id_, place in part.places.items() if place in chosen})
            for part in self._parts
        ]
        return Collected([self.prompts[sample] for sample in samples], self.groups[list(samples)], parts)

    def followed_by(self, other: Collected) -> Collected:
        """Both together; the groups of ``other`` get numbers of their own."""
        first = 1 + int(self.groups.max()) if len(self) else 0
        groups = torch.cat([self.groups, other.groups + first])
        moved = [
            _Part(part.responses, {id_: place + len(self) for id_, place in part.places.items()})
            for part in other._parts
        ]
        return Collected([*self.prompts, *other.prompts], groups, [*self._parts, *moved])

    def _own(self) -> list[tuple[int, GenerationResult]]:
        """This rank's responses, with their places."""
        return [
            (part.places[result.request_id], result)
            for part in self._parts
            for result in part.responses.results
            if result.request_id in part.places
        ]

    # ---- scores -----------------------------------------------------------------------------

    def wait_for_rewards(self) -> Scores:
        """Wait for the scores of all samples; return the rewards. Collective.

        Raises:
            StopEarlyError: as `RolloutCollector.collect`.
        """
        for part in self._parts:
            with activity.counting("responses scored", part.responses.progress):
                _await_scores(part.responses)
        own = [
            (part.places[id_], reward)
            for part in self._parts
            for id_, reward, _ in part.responses.scores()
            if id_ in part.places
        ]
        return Scores.gathered(len(self), own)

    def column(self, name: str, samples: Rollouts) -> torch.Tensor:
        """A column (`ScoredBatch`) of a share's response tokens, fp32 [R]; once the scores are there. Collective."""
        own = [
            (part.places[id_], columns[name])
            for part in self._parts
            for id_, _, columns in part.responses.scores()
            if id_ in part.places
        ]
        return _exchanged([place for place, _ in own], [row for _, row in own], torch.float32, samples.own)

    # ---- shares -----------------------------------------------------------------------------

    def dealt(self, minibatches: Minibatches, work: Callable[[SampleSizes], Costs]) -> Rollouts:
        """Give each data-parallel rank its share of the samples. Collective.

        Args:
            minibatches: samples that are trained on together: each is divided evenly.
            work: of the samples, in any unit.
        """
        own = self._own()
        places, results = [place for place, _ in own], [result for _, result in own]
        routes = [torch.from_numpy(unpacked(r.routes, len(r.prompt_token_ids) + len(r.token_ids))) for r in results]
        facts = torch.zeros(len(own), 7, dtype=torch.int64)
        for row, (place, r) in enumerate(own):
            counts = len(r.prompt_token_ids), len(r.token_ids), len(r.logprobs)
            size = -1 if isinstance(r, Episode) and not r.num_replies else routes[row].shape[1]
            others = r.finish_reason == "stop", len(r.row_lengths), size
            facts[row] = torch.tensor([place, *counts, *others])
        facts = all_gather_rows(facts.to(device())).cpu()
        facts = facts[facts[:, 0].argsort()]
        if facts[:, 0].tolist() != list(range(len(self))):
            missing = sorted(set(range(len(self))) - set(facts[:, 0].tolist()))
            raise RuntimeError(f"the rollouts are not one per sample: {len(facts)} results, missing {missing[:20]}")
        _, prompt_lengths, responses, sampled_lengths, ended, num_rows, route_bytes = facts.unbind(1)
        lengths = prompt_lengths + responses
        share = deal(work(SampleSizes(lengths, sampled_lengths, prompt_lengths, self.groups)), minibatches)
        tokens = [torch.tensor(r.prompt_token_ids + r.token_ids, dtype=torch.int32) for r in results]
        sampled = [torch.tensor([False] * len(r.prompt_token_ids) + r.sampled) for r in results]
        logprobs = [torch.tensor(r.logprobs, dtype=torch.float32) for r in results]
        versions = [torch.tensor(r.token_versions, dtype=torch.int32) for r in results]
        return Rollouts(
            prompt_ids=torch.tensor([prompt.prompt_id for prompt in self.prompts], dtype=torch.int64),
            groups=self.groups,
            prompt_lengths=prompt_lengths,
            lengths=lengths,
            sampled_lengths=sampled_lengths,
            ended=ended.bool(),
            counts=torch.ones(len(self), dtype=torch.bool),
            own=share,
            tokens=_exchanged(places, tokens, torch.int32, share),
            sampled=_exchanged(places, sampled, torch.bool, share),
            engine_logprobs=_exchanged(places, logprobs, torch.float32, share),
            weight_versions=_exchanged(places, versions, torch.int32, share),
            routes=_exchanged_routes(places, routes, route_bytes, share),
            **_rows(own, num_rows),
        )


def _exchanged_routes(
    places: Sequence[int], own: Sequence[torch.Tensor], sizes: torch.Tensor, share: torch.Tensor
) -> torch.Tensor | None:
    """`Rollouts.routes`; None if some sample has none, as of an engine that does not tell. Collective.

    Args:
        own: of this rank's samples, uint8 [tokens, bytes] each.
        sizes: int64 [N], bytes of a token of each sample; below 0: of an episode without a reply, which counts nowhere.
    """
    size = max(0, int(sizes.max()))
    if not size or ((sizes >= 0) & (sizes != size)).any():
        return None
    rows = [each.flatten() if each.shape[1] else each.new_zeros(len(each) * size) for each in own]
    return _exchanged(places, rows, torch.uint8, share).view(-1, size)


def _rows(own: Sequence[tuple[int, GenerationResult]], num_rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """`Rollouts.num_rows` and ``row_lengths``, where a sample has several rows. Collective."""
    if not (num_rows > 1).any():
        return {}
    table = [(place, row, length) for place, of in own for row, length in enumerate(of.row_lengths)]
    every = all_gather_rows(torch.tensor(table, dtype=torch.int64).view(-1, 3).to(device())).cpu().tolist()
    return {"num_rows": num_rows, "row_lengths": torch.tensor([length for _, _, length in sorted(every)])}


def _exchanged(
    places: Sequence[int], rows: Sequence[torch.Tensor], dtype: torch.dtype, wanted: torch.Tensor
) -> torch.Tensor:
    """This rank's rows, each with its place among the samples, for those at the places that it wants."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.cat([torch.empty(0, dtype=dtype), *rows])
    return exchange_rows(values, lengths, torch.tensor(places, dtype=torch.int64), wanted.tolist())


def _await_scores(responses: ScoredResponses) -> None:
    responses.score_together()
    is_missing = True
    while is_missing:  # scoring may outlast a collective's timeout: no rank waits for it in one
        activity.progress()  # for the watchdog: `are_scored` has a limit of its own
        with stops.interruptible():
            is_missing = not responses.are_scored(PATIENCE_SECONDS)
        stops.check()
        is_missing = bool(all_reduce_max(int(is_missing)))


class SampleSizes(NamedTuple):
    """What the work of samples depends on: int64 [N] each.

    Attributes:
        lengths: tokens of prompt and response.
        sampled_lengths: those of them that are sampled.
        prompt_lengths: those of the prompt.
        groups: samples of one prompt have the same number.
    """

    lengths: torch.Tensor
    sampled_lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def of(cls, rollouts: Rollouts) -> SampleSizes:
        """Those of a step's samples."""
        return cls(rollouts.lengths, rollouts.sampled_lengths, rollouts.prompt_lengths, rollouts.groups)

    def costs(self, of: Callable[[int, int], int], shares_prompts: bool) -> Costs:
        """What passes over the samples cost.

        Args:
            of: so many tokens with so many outputs.
            shares_prompts: a group's prompt is computed once.
        """
        whole = [of(length - 1, outputs) for length, outputs in zip(*map(torch.Tensor.tolist, self[:2]), strict=True)]
        if not shares_prompts:
            return Costs.apart(whole)
        return Costs(whole, [of(length, 0) for length in self.prompt_lengths.tolist()], self.groups.tolist())


def deal(work: Costs, minibatches: Minibatches) -> torch.Tensor:
    """The samples of this rank's share, int64 [n], ascending.

    Each minibatch is divided evenly, groups as a whole where they can be, and its largest part goes to the rank that
    has had the least work so far: otherwise the small differences of many updates would add up.
    """
    layout = current_layout()
    loads = [0] * layout.dp_size
    mine: list[int] = []
    for minibatch in minibatches:
        parts = shares(work.rows(minibatch), layout.dp_size)
        parts = [[minibatch[row] for row in part] for part in parts]
        sums = [work.of(part) for part in parts]
        largest_first = sorted(range(len(parts)), key=lambda part: -sums[part])
        for rank, part in zip(sorted(range(len(loads)), key=loads.__getitem__), largest_first, strict=True):
            loads[rank] += sums[part]
            mine += parts[part] if rank == layout.dp_rank else []
    return torch.tensor(sorted(mine), dtype=torch.int64)


class RolloutCollector:
    """Runs the rollout phase on all ranks that train.

    Args:
        generator: makes the responses.
        scorer: gives rewards, values and log-probs.
        tokenizer: decodes the texts of `sample_table`.
        decode: a response's text from its tokens, without what ended it.
        scoring_batch_size: responses that are given to the scorer together, at most.
        follower: gets the policy's weights whenever the generator does.
    """

    def __init__(
        self,
        generator: Generator,
        scorer: Scorer,
        tokenizer: Tokenizer,
        decode: Callable[[Sequence[int]], str],
        *,
        scoring_batch_size: int,
        follower: WeightFollower | None = None,
    ) -> None:
        self.generator = generator
        self.follower = follower
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.decode = decode
        self.scoring_batch_size = scoring_batch_size

    def collect(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        generate: Callable[[Take], dict[str, float]],
        *,
        step: int = 0,
        are_trained: bool = True,
    ) -> tuple[Collected, dict[str, float]]:
        """Generate a round and have its responses scored, in batches as they finish. Collective.

        Args:
            prompts: of each sample.
            group_size: of each prompt, so many samples follow each other.
            generate: hands out this rank's responses; returns metrics of the engines.
            step: see `Sample`.
            are_trained: whether the responses are trained on.

        Returns:
            The samples and the metrics, with the share of ``empty_responses``.

        Raises:
            StopEarlyError: a rank got a stop signal; the rollouts are abandoned on all of them.
        """

        def sample(result: GenerationResult) -> Sample:
            number = result.request_id
            return as_sample(result, prompts[number], number // group_size, self.decode, step)

        responses = ScoredResponses(self.scorer, self.scoring_batch_size, sample, are_trained=are_trained)
        metrics = generate(responses.add)
        responses.flush()
        metrics["empty_responses"] = all_reduce_sums({"empty": responses.num_empty})["empty"] / len(prompts)
        groups = torch.arange(len(prompts)) // group_size
        return Collected(prompts, groups, [_Part(responses, {i: i for i in range(len(prompts))})]), metrics

    def sample_table(self, rollouts: Rollouts, scores: Scores, num_rows: int) -> list[tuple[str, str, float]]:
        """(prompt, response, reward) of the first samples, decoded, on rank 0; empty elsewhere. Collective."""
        rows = rollouts.on_first_rank(rollouts.tokens, rollouts.lengths, num_rows)
        if rows is None:
            return []
        starts = rollouts.prompt_lengths.tolist()
        texts = [
            (self.tokenizer.ids_to_text(row[:start].tolist()), self.tokenizer.ids_to_text(row[start:].tolist()))
            for row, start in zip(rows, starts, strict=False)
        ]
        return [(*text, reward) for text, reward in zip(texts, scores.rewards.tolist(), strict=False)]

    def sample_records(
        self, rollouts: Rollouts, scores: Scores, columns: Mapping[str, torch.Tensor]
    ) -> list[dict[str, Any]]:
        """Everything about every sample, as ``samples.jsonl`` has it, on rank 0; empty elsewhere. Collective.

        One whose reward is missing has the key ``problem``, if it is known why; an episode of several rows has their
        lengths as ``rows``; a response whose weights were replaced while it was under way has ``weight_versions``.

        Args:
            columns: fp32 [R] each, by name; lists with a number for each token of the response, null where it was
                inserted.
        """
        tokens = rollouts.on_first_rank(rollouts.tokens, rollouts.lengths)
        per_token = {n: rollouts.on_first_rank(x, rollouts.sampled_lengths) for n, x in columns.items()}
        sampled = rollouts.on_first_rank(rollouts.sampled, rollouts.lengths)
        versions = rollouts.on_first_rank(rollouts.weight_versions, rollouts.sampled_lengths)
        if tokens is None or sampled is None or versions is None:
            return []
        rows = rollouts.lengths_by_row()
        records, parts = [], {name: json_numbers(part.tolist()) for name, part in scores.parts.items()}
        rewards, starts = json_numbers(scores.rewards.tolist()), rollouts.prompt_lengths.tolist()
        for sample, (row, start) in enumerate(zip(tokens, starts, strict=True)):
            prompt, response, is_sampled = row[:start].tolist(), row[start:].tolist(), sampled[sample][start:].tolist()
            numbers = {
                n: iter(json_numbers(rows[sample].tolist())) for n, rows in per_token.items() if rows is not None
            }
            own_versions = versions[sample].tolist()
            if len({*own_versions}) > 1:
                numbers["weight_versions"] = iter(own_versions)
            records.append({
                "sample": sample,
                "group": int(rollouts.groups[sample]),
                "prompt_id": int(rollouts.prompt_ids[sample]),
                "prompt": self.tokenizer.ids_to_text(prompt, keep_special=True),
                "response": self.decode(response),
                "reward": rewards[sample],
                "rewards": {name: part[sample] for name, part in parts.items()},
                "ended": bool(rollouts.ended[sample]),
                "weight_version": max(own_versions),
                "tokens": response,
                "sampled": [*map(int, is_sampled)],
                "pieces": [self.tokenizer.token_text(token) for token in response],
                **{n: [next(of) if own else None for own in is_sampled] for n, of in numbers.items()},
                **({"problem": scores.problems[sample]} if sample in scores.problems else {}),
                **({"rows": rows[sample]} if len(rows[sample]) > 1 else {}),
            })  # fmt: skip
        return records

    def close(self) -> None:
        """Close the connections to the services and to the work queue; call it on all ranks together."""
        self.scorer.close()
        if isinstance(self.generator, LocalGenerator):  # rollout ranks end with the job
            self.generator.close()
        if self.follower is not None:
            self.follower.close()
