"""Samples: a prompt with one response, and all that is known of it; the samples of a step, each rank with its share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.engine.parallel.groups import current_layout, device, exchange_rows
from nemo_style_aligner.trainer.models import functional
from nemo_style_aligner.trainer.models.ragged import RaggedBatch

Rows = Sequence[torch.Tensor]

_EXCERPT = 80  # characters of a text in messages


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    Attributes:
        prompt_id: its index in the dataset.
        expected_length: expected tokens of a response; 0 if nothing is known. Only orders the work.
        line: its whole line in the data file, with a right answer, say.
        place: where that is, for messages.
    """

    prompt_id: int
    token_ids: list[int]
    expected_length: float = 0.0
    line: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished response, on the rank that generated it: what reward and value sources get.

    Attributes:
        sample_id: its place in the step.
        group: samples of one prompt have the same number.
        line: the prompt's whole line in the data file; ``text`` is the prompt.
        token_ids: prompt and response, stop token included.
        prompt_length: how many of these are the prompt's.
        ended: a stop token or stop string ended the response, not the length limit.
        decode: gives the response's text, without special tokens and without what ended it.
        place: where the line is, such as ``train.jsonl:7``; "": not known.
        step: the run's that it was made in, from 1; in a validation the last one before it.
        sampled: which tokens of the response the policy has sampled; None: all.
        outcome: what the environment of an episode has returned.
        problem: why an episode has failed.
        row_lengths: tokens of the sequences that prompt and response are, of an episode of several; (): they are one.
    """

    sample_id: int
    group: int
    line: Mapping[str, Any]
    token_ids: list[int]
    prompt_length: int
    ended: bool
    decode: Callable[[Sequence[int]], str]
    place: str = ""
    step: int = 0
    sampled: Sequence[bool] | None = None
    outcome: Any = None
    problem: str | None = None
    row_lengths: Sequence[int] = ()

    @functools.cached_property
    def rows(self) -> Sequence[Sample]:
        """What models see: the sample itself, or the rows of an episode of several, each as a sample."""
        if len(self.row_lengths) < 2:
            return [self]
        sampled, rows, start = [False] * self.prompt_length + [*map(bool, self.sampled or ())], list[Sample](), 0
        for length in self.row_lengths:
            ids, own = self.token_ids[start : start + length], sampled[start : start + length]
            prompt_length = own.index(True) if start else self.prompt_length
            of_row: dict[str, Any] = {"token_ids": ids, "prompt_length": prompt_length, "sampled": own[prompt_length:]}
            rows.append(dataclasses.replace(self, row_lengths=(), **of_row))
            start += length
        return rows

    @property
    def prompt(self) -> str:
        """The prompt's text, to which conversations are rendered."""
        return str(self.line.get("text", ""))

    @functools.cached_property
    def response(self) -> str:
        """The response's text; of an episode that of the last reply, where its answer is."""
        tokens, sampled = self.token_ids[self.prompt_length :], self.sampled
        if sampled is None:
            return self.decode(tokens)
        end = max((place + 1 for place, is_sampled in enumerate(sampled) if is_sampled), default=0)
        start = max((place + 1 for place, is_sampled in enumerate(sampled[:end]) if not is_sampled), default=0)
        return self.decode(tokens[start:end])

    def __str__(self) -> str:
        """The sample in messages: "the prompt of train.jsonl:7 with the response '4'"."""
        prompt = f"the prompt of {self.place}" if self.place else f"the prompt {_excerpt(self.prompt)}"
        return f"{prompt} with the response {_excerpt(self.response)}"


def of_sampled(x: torch.Tensor, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """The sampled tokens' part of the samples' rows of ``x`` [n, s-1], whose column t is of token t + 1."""
    rows = iter(x)
    return [torch.cat([_of_sampled(next(rows), row) for row in sample.rows]) for sample in samples]


def _of_sampled(x: torch.Tensor, row: Sample) -> torch.Tensor:
    of_response = x[row.prompt_length - 1 : len(row.token_ids) - 1]
    return of_response if row.sampled is None else of_response[torch.tensor(row.sampled)]


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[: _EXCERPT - 3] + "...")


@dataclasses.dataclass
class Rollouts:
    """The N samples of a step: a few numbers of each on every rank, tokens only of the n samples of a rank's share.

    Data-parallel ranks have different shares; the ranks of a model-parallel group have the same one.

    Attributes:
        prompt_ids: int64 [N], the prompt's index in its dataset.
        groups: int64 [N]; samples of one prompt have the same number.
        prompt_lengths, lengths: int64 [N], tokens of the prompt, and of prompt and response, stop token included.
        sampled_lengths: int64 [N], tokens of the response that the policy has sampled: all but what was inserted.
        ended: bool [N], whether a stop token or stop string ended the response (not the length limit).
        counts: bool [N], False if rewards, values or log-probs are NaN or Inf: left out of losses and statistics.
        own: int64 [n], ascending: the samples of this rank's share.
        tokens: int32 [T], prompts and responses of the share, one after the other.
        sampled: bool [T], those that the policy has sampled.
        engine_logprobs: fp32 [R], the engine's log-probs of the share's sampled tokens.
        weight_versions: int32 [R], version of the weights that each of them was sampled with.
        routes: uint8 [T, bytes], of the experts that the engine has computed each token of the share with (see
            `trainer.models.routes`), a sequence's last one apart; None: there are none, or nobody has recorded them.
        num_rows: int64 [N], sequences that each sample is to the models: an episode whose history was rewritten has
            several, one after the other among its tokens; None: each sample is one.
        row_lengths: int64, tokens of each row of all samples; with ``num_rows``.
    """

    prompt_ids: torch.Tensor
    groups: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    sampled_lengths: torch.Tensor
    ended: torch.Tensor
    counts: torch.Tensor
    own: torch.Tensor
    tokens: torch.Tensor
    sampled: torch.Tensor
    engine_logprobs: torch.Tensor
    weight_versions: torch.Tensor
    routes: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    row_lengths: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def own_sampled(self) -> torch.Tensor:
        """int64 [n], sampled tokens of the samples of this rank's share: the segments of a column."""
        return self.sampled_lengths[self.own]

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of each sample, fp64 [N] on every rank. Collective. ``x``: [R], of the share."""
        return self.everywhere(functional.segment_sum(x.double(), self.own_sampled))

    def everywhere(self, own: torch.Tensor) -> torch.Tensor:
        """Numbers of the share's samples [n, ...] as those of all samples [N, ...], fp64, on every rank. Collective.

        What is summed up from these does not depend on who has which sample.
        """
        every = torch.zeros(len(self), *own.shape[1:], dtype=torch.float64)
        every[self.own] = own.double()
        if parallel_state.get_data_parallel_world_size() == 1:
            return every
        every = every.to(device())
        dist.all_reduce(every, group=parallel_state.get_data_parallel_group())
        return every.cpu()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """A number of each of the N samples, repeated for the sampled tokens of the share: [R]."""
        return functional.spread(x[self.own], self.own_sampled)

    def batch(self, wanted: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> RaggedBatch:
        """The share as the models take it, row by row. ``wanted``: bool [N], samples that are computed."""
        own = self.own
        lengths = self.lengths[own]
        if self.num_rows is not None:
            of_samples = self.lengths_by_row()
            lengths = torch.tensor([length for sample in own.tolist() for length in of_samples[sample]])
        return RaggedBatch(self.tokens, lengths.long(), self.sampled, dict(columns), self.of_rows(wanted), self.routes)

    def lengths_by_row(self) -> list[list[int]]:
        """Tokens of the rows of each of the N samples."""
        if self.num_rows is None or self.row_lengths is None:
            return [[length] for length in self.lengths.tolist()]
        return [part.tolist() for part in self.row_lengths.split(self.num_rows.tolist())]

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """What is known of each of the N samples, for the rows of the share."""
        return x[self.own] if self.num_rows is None else x[self.own].repeat_interleave(self.num_rows[self.own])

    # ---- to other ranks ---------------------------------------------------------------------

    def dealt_routes(self, share: torch.Tensor) -> torch.Tensor | None:
        """`dealt` of the routes."""
        if self.routes is None:
            return None
        size = self.routes.shape[1]
        return self.dealt(share, self.routes.flatten(), self.lengths * size).view(-1, size)

    def dealt(self, share: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The rows of ``x`` for another share of the samples on each rank. Collective.

        Args:
            share: int64 [m], the samples that this rank wants; may be none.
            x: this rank's rows, one after the other.
            lengths: int64 [N], of all samples' rows.
        """
        layout = current_layout()
        is_first = layout.tp_rank == layout.cp_rank == layout.pp_rank == 0  # of equal ranks, one sends
        has = self.own if is_first else self.own[:0]
        return exchange_rows(x if len(has) else x[:0], lengths[has], has, share.tolist())

    def on_first_rank(self, x: torch.Tensor, lengths: torch.Tensor, num_samples: int | None = None) -> Rows | None:
        """The rows of the first samples (of all by default) on rank 0; None elsewhere. Collective; see `dealt`."""
        is_first = dist.get_rank() == 0
        count = (len(self) if num_samples is None else min(num_samples, len(self))) if is_first else 0
        rows = self.dealt(torch.arange(count), x, lengths).split(lengths[:count].tolist())
        return rows if is_first else None
