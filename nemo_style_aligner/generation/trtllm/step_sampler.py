"""Our own sampling inside TensorRT-LLM's decoding loop.

TensorRT-LLM lets a logits processor see each step's logits. This one samples with `sampling.sample` and leaves only
the chosen token possible, so TensorRT-LLM's greedy choice takes it. Random numbers, stop conditions, log-probs and
possible ids are therefore those of the embedded engine, and the log-probs cost no copy of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.generation.engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    SamplingParams,
)
from nemo_style_aligner.generation.sampling import SamplingRows, request_key, sample
from nemo_style_aligner.generation.stopping import StopCondition
from nemo_style_aligner.telemetry import activity

Agree = Callable[[torch.Tensor], torch.Tensor]


class StepSampler:
    """Logits processor for one static batch: call number n chooses the n-th token of every response."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        stop: StopCondition,
        *,
        vocab_size: int,
        vocab_limit: int,
        statistics: GenerationStatistics,
        agree: Agree,
    ) -> None:
        """
        Args:
            requests: row i of the logits belongs to request i.
            sampling, stop: how to choose and when a response ends.
            vocab_size: columns of the logits that are tokens; the rest is padding.
            vocab_limit: ids at and above it are never chosen.
            statistics: counters to add to.
            agree: gives every rank of a shared engine the tokens of one of them.
        """
        self._requests = requests
        self._sampling = sampling
        self._stop = stop
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        self._statistics = statistics
        self._agree = agree
        self._keys = torch.tensor([request_key(sampling.seed, r.seed) for r in requests], dtype=torch.int64)
        self._stop_ids = torch.tensor(stop.stop_ids, dtype=torch.int64)
        self._seen: torch.Tensor | None = None
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._reasons: list[FinishReason | None] = [None for _ in requests]

    def __call__(self, step: int, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Choose the next token of each row. Called by TensorRT-LLM.

        Args:
            step: number of tokens chosen before.
            input_ids: unused; the sampler keeps the responses itself.
            scores: logits [batch, vocabulary with padding], any float dtype.

        Returns:
            ``scores`` itself, changed so that one token is possible in each row. TensorRT-LLM has bound this tensor as
            the output of the next step, and then passes the processor what it returned now.

        Raises:
            NonFiniteError: the logits of a response are not finite.
        """
        chosen = self._choose(scores.reshape(len(self._requests), -1)[:, : self._vocab_size], step)
        scores.fill_(torch.finfo(scores.dtype).min)
        return scores.scatter_(-1, chosen.to(scores.device).view(*scores.shape[:-1], 1), 0.0)

    def results(self, weight_version: int) -> list[GenerationResult]:
        """All responses, after decoding has ended.

        Raises:
            RuntimeError: decoding ended before a response did.
        """
        found = []
        for request, tokens, logprobs, reason in zip(
            self._requests, self._tokens, self._logprobs, self._reasons, strict=True
        ):
            if reason is None:
                raise RuntimeError(
                    f"request {request.request_id}: TensorRT-LLM stopped after {len(tokens)} tokens, before the "
                    "response was complete"
                )
            found.append(
                GenerationResult(
                    request.request_id,
                    request.prompt_token_ids,
                    tokens,
                    logprobs,
                    reason,
                    weight_version=weight_version,
                )
            )
        return found

    def _choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The next token of each row, int64 [batch]; a response that has ended gets a stop token, if there is one."""
        where = logits.device
        alive = [row for row, reason in enumerate(self._reasons) if reason is None]
        if not bool(logits[alive].isfinite().all()):
            broken = [self._requests[row].request_id for row in alive if not bool(logits[row].isfinite().all())]
            raise NonFiniteError(f"the logits of requests {broken} are not finite at token {step}")
        made = torch.full((len(self._requests),), step, dtype=torch.int64, device=where)
        rows = SamplingRows(
            self._keys.to(where), made, made < self._sampling.min_new_tokens, self._seen_ids(logits)
        )  # fmt: skip
        tokens, logprobs = sample(logits, self._sampling, rows, self._stop_ids.to(where), self._vocab_limit)
        tokens = self._agree(tokens)
        activity.progress()
        self._statistics.steps += 1
        self._statistics.active_slot_steps += len(alive)
        self._statistics.generated_tokens += len(alive)
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        chosen = [self._stop.stop_ids[0] if self._stop.stop_ids else 0] * len(self._requests)
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            if self._reasons[row] is None:
                chosen[row] = token
                self._tokens[row].append(token)
                self._logprobs[row].append(logprob)
                self._reasons[row] = self._stop.check(self._tokens[row], self._requests[row].limit(self._sampling))
        return torch.tensor(chosen, dtype=torch.int64)

    def _seen_ids(self, logits: torch.Tensor) -> torch.Tensor | None:
        """bool [batch, vocabulary]: ids of prompt and response; None without a repetition penalty."""
        if self._sampling.repetition_penalty == 1.0:
            return None
        if self._seen is None:
            self._seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            for row, request in enumerate(self._requests):
                self._seen[row, torch.tensor(request.prompt_token_ids, device=logits.device)] = True
        return self._seen
