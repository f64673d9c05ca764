"""What becomes of finished responses: reported to the work source, then sent to be scored."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Iterator
from typing import Protocol

from nemo_style_aligner.data.datasets import lengths_of, pad_rows
from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.rl.rollouts.work_source import WorkSource
from nemo_style_aligner.servers.client import CriticClient, Scores


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
    """Sends responses to be scored, in batches as they come.

    Attributes:
        results: the responses, in the order in which they were added.
        silence_limit: seconds without any new scores after which `are_scored` gives up.
    """

    def __init__(self, scorer: CriticClient, batch_size: int, scoring_seconds: float) -> None:
        self.results: list[GenerationResult] = []
        self._scorer = scorer
        self._batch_size = batch_size
        self.silence_limit = 2 * scoring_seconds
        self._unsent = 0  # how many of `results`, at its end
        self._requests: list[tuple[list[int], concurrent.futures.Future[Scores]]] = []
        self._num_scored = 0  # how many of `_requests`
        self._last_heard = time.monotonic()

    def add(self, result: GenerationResult) -> None:
        """Take a response; a full batch is sent."""
        self.results.append(result)
        self._unsent += 1
        if self._unsent == self._batch_size:
            self.flush()

    def flush(self) -> None:
        """Send the unsent responses, a full batch or not."""
        if not self._unsent:
            return
        batch = self.results[-self._unsent :]
        self._unsent = 0
        sequences = [result.prompt_token_ids + result.token_ids for result in batch]
        scores = self._scorer.infer_async(pad_rows(sequences, 0), lengths_of(sequences))
        self._requests.append(([r.request_id for r in batch], scores))
        self._last_heard = time.monotonic()

    def are_scored(self, seconds: float) -> bool:
        """Wait for the scores of `results`, at most ``seconds``; return whether all have come.

        Raises:
            TimeoutError: no scores have come, and no lost critic has got on with catching up, for `silence_limit`.
            Exception: the error of a request that failed.
        """
        done, missing = concurrent.futures.wait(
            [scores for _, scores in self._requests], seconds, concurrent.futures.FIRST_EXCEPTION
        )
        for scores in done:
            scores.result()
        if len(done) > self._num_scored:
            self._num_scored, self._last_heard = len(done), time.monotonic()
        # Usually the client gives up on a request first, with a more telling error, but the request may have to wait
        # for a connection before that. A lost critic gives no scores while it trains again on the batches that it lost,
        # however long that takes; each batch counts as progress.
        if missing and time.monotonic() - max(self._last_heard, self._scorer.last_progress) > self.silence_limit:
            late = next(sample_ids for sample_ids, scores in self._requests if scores in missing)
            raise TimeoutError(
                f"no scores arrived for {self.silence_limit:g} s (twice the sum of total_seconds and restart_seconds "
                f"of remote_critic_rm.timeouts); those of samples {late[:20]} are missing: check the critic and the "
                "reward service"
            )
        return not missing

    def progress(self) -> tuple[int, int]:
        """How many responses are scored, and of how many."""
        return sum(len(ids) for ids, scores in self._requests if scores.done()), len(self.results)

    def scores(self) -> Iterator[Scores]:
        """The scores of `results`, batch by batch in their order, once they `are_scored`."""
        return (scores.result() for _, scores in self._requests)
