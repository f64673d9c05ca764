"""A service that answers as a reward model does, with the rewards of a Python function of the user's.

The function gets the prompt's whole line, with the right answer, say, which the actor's job sends with each sequence
(`PROMPT_LENGTHS`, `LINES` of `services.scores`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Sequence

import numpy as np

from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.engine.contract import text_before_end
from nemo_style_aligner.rl.reward_functions import FunctionRewards
from nemo_style_aligner.rl.rewards import Reward
from nemo_style_aligner.rl.sample import Sample
from nemo_style_aligner.services.endpoints import Job, ModelLimits
from nemo_style_aligner.services.jobs import JobQueue, QueueState
from nemo_style_aligner.services.protocol import ProtocolError
from nemo_style_aligner.services.routes import HttpSettings, start_http_server
from nemo_style_aligner.services.scores import REWARDS, ScoreEndpoint
from nemo_style_aligner.services.service_metrics import ServiceMetrics

_POLL_SECONDS = 0.25  # how soon a stop request is noticed
_DRAIN_SECONDS = 60.0  # after a stop request
_MIN_LENGTH = 1  # model.ppo.length_params.min_length by default: so many tokens do not end a response


class RewardFunctionService:
    """Serves a function as the reward model ``reward_model``. Listens once it is made, and answers during `run`.

    If the function raises, or returns anything but finite numbers, the answer is 500: the actor's job repeats such a
    request a few times, then ends with an error that names function and sample.

    Args:
        rewards: calls the function; `run` closes it.
        tokenizer: the policy's.
        http: where to listen.
        end_strings: a response's text ends before the first of them, unless its first token completes it; so do those
            that the policy has learnt (`Tokenizer.format`).
    """

    def __init__(
        self,
        rewards: FunctionRewards,
        tokenizer: Tokenizer,
        http: HttpSettings,
        *,
        end_strings: Sequence[str] = (),
    ) -> None:
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._end_strings = tokenizer.end_strings(end_strings)
        self._stop_requested = False  # a plain bool: set from a signal handler, where no lock may be taken
        self._queue = JobQueue(http.max_outstanding_requests)
        self._metrics = ServiceMetrics()
        limits = ModelLimits(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint())
        endpoints = [ScoreEndpoint("reward_model", [REWARDS], limits, takes_prompts=True)]
        self._http = start_http_server(endpoints, self._queue, http, self._metrics)

    def request_stop(self) -> None:
        """Let `run` finish the accepted requests, then return. Call it from any thread or a signal handler."""
        self._stop_requested = True

    def run(self) -> None:
        """Serve until `request_stop`."""
        self._queue.set_state(QueueState.SERVING)
        while not self._stop_requested:
            self._begin_next()
        self._queue.set_state(QueueState.DRAINING)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._queue.outstanding and time.monotonic() < deadline:
            self._begin_next()
        self._rewards.close()
        self._http.stop()

    def _begin_next(self) -> None:
        """Have the next request scored, if one comes soon."""
        for job in self._queue.take(_POLL_SECONDS, 1, 0.0):  # one row: an error fails one request only
            job.taken, job.batch_rows = time.monotonic(), job.rows
            self._metrics.queue_time.observe(job.taken - job.arrived)
            self._metrics.batch_rows.observe(job.rows)
            rewards = self._rewards.score([self._sample(job, row) for row in range(job.rows)])
            rewards.add_done_callback(functools.partial(self._answer, job))

    def _answer(self, job: Job, scored: concurrent.futures.Future[list[Reward]]) -> None:
        try:
            rewards = scored.result()
        except Exception as error:  # noqa: BLE001 - the service ends; the client hears of anything else, too
            job.future.set_exception(ProtocolError(500, f"the service failed: {error!r}"))
            return
        problems = (f"sequence {row} of the request: {r.problem}" for row, r in enumerate(rewards) if r.problem)
        if problem := next(problems, None):
            job.future.set_exception(ProtocolError(500, problem))
        else:
            values = np.array([reward.value for reward in rewards], dtype=np.float32)
            job.future.set_result({"rewards": values.reshape(-1, 1)})

    def _sample(self, job: Job, row: int) -> Sample:
        given = job.arguments
        tokens = given["tokens"][row, : given["lengths"][row]].tolist()
        prompt_length = int(given["prompt_lengths"][row])
        return Sample(row, row, given["lines"][row], tokens, prompt_length, True, self._decode, "")

    def _decode(self, token_ids: Sequence[int]) -> str:
        response_ids = self._tokenizer.without_end(list(token_ids))
        return text_before_end(response_ids, self._tokenizer.ids_to_text, self._end_strings, _MIN_LENGTH)
