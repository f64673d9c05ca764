"""What becomes of finished responses: reported to the work source, then sent to be scored."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.rl.rewards import Reward
from nemo_style_aligner.rl.rollouts.work_source import WorkSource
from nemo_style_aligner.rl.sample import Sample
from nemo_style_aligner.rl.scoring import ScoredBatch, Scorer


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


class ScoredResponses:
    """Has responses scored, in batches as they come.

    Args:
        scorer: scores them.
        batch_size: responses that are scored together, at most.
        as_sample: what the scorer gets of a response.

    Attributes:
        results: the responses, in the order in which they were added.
    """

    def __init__(self, scorer: Scorer, batch_size: int, as_sample: Callable[[GenerationResult], Sample]) -> None:
        self.results: list[GenerationResult] = []
        self._scorer = scorer
        self._batch_size = batch_size
        self._as_sample = as_sample
        self._unsent: list[Sample] = []
        self._batches: list[ScoredBatch] = []
        self._num_scored = 0  # of `_batches`
        self._last_heard = time.monotonic()

    def add(self, result: GenerationResult) -> None:
        """Take a response; a full batch is sent."""
        self.results.append(result)
        self._unsent.append(self._as_sample(result))
        if len(self._unsent) == self._batch_size:
            self.flush()

    def flush(self) -> None:
        """Send the unsent responses, a full batch or not."""
        if self._unsent:
            self._batches.append(self._scorer.score(self._unsent))
            self._unsent = []
            self._last_heard = time.monotonic()

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

    def scores(self) -> Iterator[tuple[int, Reward, torch.Tensor | None]]:
        """Each response's id, its reward and its values fp32 [response tokens]; once all `are_scored`."""
        for batch in self._batches:
            yield from batch.result()
