"""Prompts and responses without padding: what a data-parallel rank holds of a step, and passes compute.

What a model says of a sequence is wanted of the tokens that the policy has sampled, and of no others: not of the prompt
and not of what an environment has inserted between two replies. Everything per token has one number for each of these,
so a mean, a sum, or what follows a token is over sampled tokens, whatever lies between them.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.trainer.models.functional import segment_sum, spread
from nemo_style_aligner.trainer.models.packing import Sequences


@dataclasses.dataclass
class RaggedBatch:
    """n sequences, prompt and response, without padding: a data-parallel rank's own share.

    Every rank of its model-parallel group holds the same rows. Everything per token is per *sampled* token, row after
    row: position j of a row's segment belongs to its j-th sampled token (its log-prob, value, advantage).

    Attributes:
        tokens: int32 [T], all sequences one after the other; T is the sum of ``lengths``.
        lengths: int64 [n], tokens of prompt and response.
        sampled: bool [T], the tokens that the policy has sampled; never a sequence's first.
        columns: by name, fp32 [R], R the number of sampled tokens.
        wanted: bool [n], rows that count. The others are not computed, and what stands in their columns has no effect.
        routes: uint8 [T, bytes], of the experts that the engine has chosen (`routes`); None: they are not known.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    sampled: torch.Tensor
    columns: dict[str, torch.Tensor]
    wanted: torch.Tensor
    routes: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def sampled_lengths(self) -> torch.Tensor:
        """Sampled tokens of each sequence, int64 [n]: the segments of a column."""
        return segment_sum(self.sampled.long(), self.lengths)

    def rows(self, index: torch.Tensor) -> RaggedBatch:
        """The rows of ``index`` int64 [m], in that order."""
        places, chosen = self.sampled_places(index), _places(self.lengths, index)
        return RaggedBatch(
            tokens=self.tokens[chosen],
            lengths=self.lengths[index],
            sampled=self.sampled[chosen],
            columns={name: column[places] for name, column in self.columns.items()},
            wanted=self.wanted[index],
            routes=None if self.routes is None else self.routes[chosen],
        )

    def sampled_places(self, index: torch.Tensor) -> torch.Tensor:
        """Where the sampled tokens of some rows lie in a column: ``index`` int64 [m] -> int64."""
        return _places(self.sampled_lengths, index)

    def on(self, target: torch.device) -> RaggedBatch:
        """The same with its columns on a device.

        Tokens and lengths stay where they are: reading a length from a GPU would make the CPU wait for all queued work.
        """
        return dataclasses.replace(self, columns={name: moved(column, target) for name, column in self.columns.items()})

    def sequences(self) -> Sequences:
        """The predictions of the sampled tokens of the rows that count; what follows the last one is not computed."""
        lengths = self.lengths.tolist()
        rows = zip(self.sampled.split(lengths), self.wanted.tolist(), strict=True)
        wanted = [row[1 : 1 + int(row.nonzero().max())] if counts and row.any() else row[:0] for row, counts in rows]
        routes = None if self.routes is None else self.routes.split(lengths)
        return Sequences(self.tokens.split(lengths), wanted, routes=routes)


def after_prompts(lengths: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
    """`RaggedBatch.sampled` of responses that are one reply: all after the prompts. int64 [n] each -> bool [T]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) >= spread(starts + prompt_lengths, lengths)


def _places(lengths: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Where the segments ``index`` [m] of a flat tensor with segments of ``lengths`` [n] lie: int64."""
    starts, chosen = (lengths.cumsum(0) - lengths)[index], lengths[index]
    moves = starts - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + spread(moves, chosen)
