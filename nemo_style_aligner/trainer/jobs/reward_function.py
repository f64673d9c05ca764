"""A service that answers as a reward model does, with the rewards of a Python function of the user's.

The function gets the prompt's whole line, with the right answer, say, which the actor's job sends with each sequence
(`PROMPT_LENGTHS`, `LINES` of `services.scores`).
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Sequence

import numpy as np

from nemo_style_aligner.engine.contract import text_before_end
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.guard.protocol import ProtocolError
from nemo_style_aligner.trainer.rl.reward_functions import FunctionRewards
from nemo_style_aligner.trainer.rl.rewards import Reward
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.services.endpoints import ModelLimits, QueuedRequest, Service
from nemo_style_aligner.trainer.services.scores import REWARDS, ScoreEndpoint

_MIN_LENGTH = 1  # model.ppo.length_params.min_length by default: so many tokens do not end a response


class FunctionEndpoint(ScoreEndpoint):
    """A function as the reward model ``reward_model``. Each request is computed by itself, beside the others.

    If the function raises, or returns anything but finite numbers, the answer is 500: the actor's job repeats such a
    request a few times, then ends with an error that names function and sample.

    Args:
        rewards: calls the function.
        tokenizer: the policy's.
        end_strings: a response's text ends before the first of them, unless its first token completes it; so do those
            that the policy has learnt (`Tokenizer.format`).
    """

    def __init__(self, rewards: FunctionRewards, tokenizer: Tokenizer, end_strings: Sequence[str] = ()) -> None:
        limits = ModelLimits(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint())
        super().__init__("reward_model", [REWARDS], limits, takes_prompts=True)
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._end_strings = tokenizer.end_strings(end_strings)

    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """See `Endpoint.answer`: later, in the thread that has called the function last."""
        for job in jobs:
            job.batch_rows = job.rows
            service.metrics.batch_rows.observe(job.rows)
            rewards = self._rewards.score([self._sample(job, row) for row in range(job.rows)])
            rewards.add_done_callback(functools.partial(self._end, job))

    def _end(self, job: QueuedRequest, scored: concurrent.futures.Future[list[Reward]]) -> None:
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
            job.future.set_result({REWARDS.name: values.reshape(-1, 1)})

    def _sample(self, job: QueuedRequest, row: int) -> Sample:
        given = job.arguments
        tokens = given["tokens"][row, : given["lengths"][row]].tolist()
        prompt_length, step = (int(given[name][row]) for name in ("prompt_lengths", "steps"))
        return Sample(row, row, given["lines"][row], tokens, prompt_length, True, self._decode, "", step)

    def _decode(self, token_ids: Sequence[int]) -> str:
        response_ids = self._tokenizer.without_end(list(token_ids))
        return text_before_end(response_ids, self._tokenizer.ids_to_text, self._end_strings, _MIN_LENGTH)
