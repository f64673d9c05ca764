"""Scores of sequences, what a service gives most often: rewards, values, log-probs, and kinds of your own.

A kind of scores is a `Score`: its name, and whether it is per sequence or per token. Server (`ScoreEndpoint`) and
client (`score_client.ScoreClient`) ask it for everything else. What gives it is a `ScoringBackend`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.guard.protocol import InferRequest
from nemo_style_aligner.trainer.services.endpoints import Endpoint, ModelLimits, QueuedRequest, Service, TensorSpec


@dataclasses.dataclass(frozen=True)
class Score:
    """A kind of scores, and its shape for tokens [b, s].

    Attributes:
        per_token: FP32 [b, s-1]: column t belongs to the step that chooses token t+1, and is zero where there is none.
        columns: otherwise FP32 [b, columns].
    """

    name: str
    per_token: bool = False
    columns: int = 1

    @property
    def spec(self) -> TensorSpec:
        """The output on the wire."""
        return TensorSpec(self.name, "FP32", (-1 if self.per_token else self.columns,))

    def shape(self, rows: int, width: int) -> list[int]:
        """Of the scores of tokens [rows, width]."""
        return [rows, width - 1 if self.per_token else self.columns]

    def of_rows(self, scores: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
        """The scores of sequences of these lengths, computed with any padding, as those of tokens [b, width].

        Per token: zero from position (length - 1) on, so that they do not depend on what they were computed with.
        """
        if not self.per_token:
            return scores
        fitted = _with_width(scores, width - 1)
        fitted[np.arange(width - 1) >= lengths[:, None] - 1] = 0.0
        return fitted


REWARDS = Score("rewards")  # more columns where a regression model's attributes are kept apart
VALUES = Score("values", per_token=True)
LOGPROBS = Score("logprobs", per_token=True)

LINES = TensorSpec("lines", "BYTES", (1,))
PROMPT_LENGTHS = TensorSpec("prompt_lengths", "INT64", (1,))
STEPS = TensorSpec("steps", "INT64", (1,), optional=True)


class ScoringBackend(Protocol):
    """The models behind a service. Collective: called on every rank, in the same order, with equal arguments."""

    def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Score a batch.

        ``tokens`` int64 [b, s] and ``lengths`` int64 [b] are on the CPU. Returns the endpoint's scores, by name, each
        of its `Score.shape`; only rank 0's answer is used.
        """
        ...


class ScoreEndpoint(Endpoint):
    """Scores of one or more kinds for a batch of sequences, given as token ids or as text.

    Its jobs' arguments are ``tokens``, int64 [b, s], and ``lengths``, int64 [b], the true length of each row,
    1 <= length <= s. With ``takes_prompts`` a request must also say what each sequence is a response to: ``lines``,
    each row's prompt with all keys of its line, and ``prompt_lengths`` and the run's ``steps``, int64 [b].

    Args:
        scores: what it gives.
        tokenize: of sequences that are given as text; None: they cannot be.
        length_multiple: to which the width of a merged batch is rounded up, within the model's limit.
    """

    method = "infer"
    merges = True

    def __init__(
        self,
        name: str,
        scores: Sequence[Score],
        limits: ModelLimits | None = None,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        *,
        takes_prompts: bool = False,
        length_multiple: int = 1,
    ) -> None:
        inputs = [
            TensorSpec("tokens", "INT64", (-1,), optional=True),
            TensorSpec("sequence_lengths", "INT64", (1,), optional=True),
        ]
        if tokenize is not None:
            inputs.insert(0, TensorSpec("sentences", "BYTES", (1,), optional=True))
        if takes_prompts:
            inputs += [LINES, PROMPT_LENGTHS, STEPS]
        super().__init__(name, inputs, [score.spec for score in scores], batched=True, limits=limits)
        self.length_multiple = length_multiple
        self._scores = scores
        self._tokenize = tokenize

    def make_job(self, request: InferRequest) -> QueuedRequest:
        """See `Endpoint.make_job`."""
        arrays = self._arrays(request)
        if "sentences" in arrays:
            if "tokens" in arrays or "sequence_lengths" in arrays:
                raise self._refuse("give either 'sentences', or 'tokens' and 'sequence_lengths'")
            tokens, lengths = self._from_sentences(arrays["sentences"])
        elif "tokens" in arrays and "sequence_lengths" in arrays:
            tokens, lengths = arrays["tokens"], arrays["sequence_lengths"][:, 0]
        else:
            raise self._refuse(
                "both 'tokens' and 'sequence_lengths' are needed" + (" (or 'sentences')" if self._tokenize else "")
            )
        rows, width = tokens.shape
        if len(lengths) != rows:
            raise self._refuse(f"{rows} rows of 'tokens', but {len(lengths)} of 'sequence_lengths'")
        if lengths.min() < 1 or lengths.max() > width:
            raise self._refuse(f"'sequence_lengths' must be from 1 to {width}, the width of 'tokens'")
        self._check_length(int(lengths.max()))
        # What lies behind a row's true length is padding of the caller's choice and never reaches the model.
        self._check_tokens(np.where(np.arange(width) < lengths[:, None], tokens, 0))
        arguments = {"tokens": tokens, "lengths": lengths}
        if LINES.name in arrays:
            arguments |= self._prompts(lengths, arrays)
        return QueuedRequest(self, arguments, self._position(request.parameters), rows)

    def _prompts(self, lengths: np.ndarray, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        lines, prompt_lengths = arrays[LINES.name][:, 0], arrays[PROMPT_LENGTHS.name][:, 0]
        if not len(lines) == len(prompt_lengths) == len(lengths):
            raise self._refuse(f"{len(lengths)} rows of 'tokens', but not as many of 'lines' and 'prompt_lengths'")
        if (prompt_lengths < 1).any() or (prompt_lengths > lengths).any():
            raise self._refuse("'prompt_lengths' must be from 1 to the row's 'sequence_lengths'")
        steps = arrays[STEPS.name][:, 0] if STEPS.name in arrays else np.zeros(len(lengths), dtype=np.int64)
        if len(steps) != len(lengths):
            raise self._refuse(f"{len(lengths)} rows of 'tokens', but {len(steps)} of 'steps'")
        parsed = [self._line(row, text) for row, text in enumerate(lines)]
        return {"lines": parsed, "prompt_lengths": prompt_lengths, "steps": steps}

    def _line(self, row: int, text: bytes) -> dict[str, Any]:
        try:
            line = parse_json(text.decode())
        except ValueError as error:
            raise self._refuse(f"'lines' row {row} is not JSON: {error}") from error
        if not isinstance(line, dict) or not isinstance(line.get("text"), str):
            raise self._refuse(f"'lines' row {row} must be an object whose 'text' is the prompt")
        return line

    def _from_sentences(self, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._tokenize is not None  # the input exists only with a tokenizer
        rows: list[Sequence[int]] = []
        for index, item in enumerate(sentences[:, 0]):
            try:
                text = item.decode()
            except UnicodeDecodeError as error:
                raise self._refuse(f"'sentences' row {index} is not UTF-8") from error
            rows.append(self._tokenize(text))
            if not rows[-1]:
                raise self._refuse(f"'sentences' row {index} has no tokens")
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return tokens, lengths

    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """See `Endpoint.answer`: one batch for all jobs, whose rows are those of one job after the other."""
        lengths = np.concatenate([job.arguments["lengths"] for job in jobs]).astype(np.int64)
        tokens = self._merged([job.arguments["tokens"] for job in jobs], lengths)
        rows, width = tokens.shape
        service.metrics.batch_rows.observe(rows)
        outputs = service.command(self, tokens=torch.tensor(tokens), lengths=torch.tensor(lengths))
        found = [(score, self._output(outputs, score, score.shape(rows, width))) for score in self._scores]
        first = 0
        for job in jobs:
            part, own = slice(first, first + job.rows), job.arguments["tokens"].shape[1]
            first += job.rows
            job.batch_rows = rows
            job.future.set_result({s.name: s.of_rows(array[part], lengths[part], own) for s, array in found})

    def _merged(self, rows: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
        """Tokens of several requests, int64 [b, width]: the longest true length, rounded up within the model's limit.

        At least 2, so that there is a value to compute. Tokens beyond a row's true length are set to 0: they cannot
        affect the answer, and the batch must not depend on what a caller left there.
        """
        width = -(-max(2, int(lengths.max())) // self.length_multiple) * self.length_multiple
        if self.limits.max_sequence_length is not None:
            width = min(width, self.limits.max_sequence_length)
        tokens = np.concatenate([_with_width(part, width) for part in rows])
        tokens[np.arange(width) >= lengths[:, None]] = 0
        return tokens

    def _output(self, outputs: Mapping[str, torch.Tensor], score: Score, shape: list[int]) -> np.ndarray:
        given = outputs.get(score.name)
        if given is None or list(given.shape) != shape:
            found = f"no '{score.name}'" if given is None else f"'{score.name}' of shape {list(given.shape)}"
            raise ValueError(f"{self.name}: the model returned {found}, expected {shape}")
        return given.detach().to("cpu", torch.float32).numpy()


def _with_width(rows: np.ndarray, width: int) -> np.ndarray:
    """A copy of ``rows`` [n, any], cut or padded with zeros to ``width`` columns."""
    fitted = np.zeros((len(rows), width), dtype=rows.dtype)  # np.pad takes six times as long
    columns = min(width, rows.shape[1])
    fitted[:, :columns] = rows[:, :columns]
    return fitted
