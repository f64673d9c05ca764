"""Prompts and responses without padding: what a data-parallel rank holds of a step, and passes compute."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.models.functional import spread
from nemo_style_aligner.models.packing import Sequences
from nemo_style_aligner.transfers import moved


@dataclasses.dataclass
class RaggedBatch:
    """n sequences, prompt and response, without padding: a data-parallel rank's own share.

    Every rank of its model-parallel group holds the same rows. Everything per token is per *response* token, row after
    row: position j of a row's segment belongs to its j-th response token (its log-prob, value, advantage).

    Attributes:
        tokens: int32 [T], all sequences one after the other; T is the sum of ``lengths``.
        lengths: int64 [n], tokens of prompt and response.
        prompt_lengths: int64 [n], at least 1.
        columns: by name, fp32 [R], R the number of response tokens.
        wanted: bool [n], rows that count. The others are not computed, and what stands in their columns has no effect.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    columns: dict[str, torch.Tensor]
    wanted: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def response_lengths(self) -> torch.Tensor:
        """Tokens of each response, int64 [n]: the segments of a column."""
        return self.lengths - self.prompt_lengths

    def rows(self, index: torch.Tensor) -> RaggedBatch:
        """The rows of ``index`` int64 [m], in that order."""
        places = self.response_places(index)
        return RaggedBatch(
            tokens=self.tokens[_places(self.lengths, index)],
            lengths=self.lengths[index],
            prompt_lengths=self.prompt_lengths[index],
            columns={name: column[places] for name, column in self.columns.items()},
            wanted=self.wanted[index],
        )

    def response_places(self, index: torch.Tensor) -> torch.Tensor:
        """Where the response tokens of some rows lie in a column: ``index`` int64 [m] -> int64."""
        return _places(self.response_lengths, index)

    def on(self, target: torch.device) -> RaggedBatch:
        """The same with its columns on a device.

        Tokens and lengths stay where they are: reading a length from a GPU would make the CPU wait for all queued work.
        """
        return dataclasses.replace(self, columns={name: moved(column, target) for name, column in self.columns.items()})

    def sequences(self) -> Sequences:
        """The predictions of the response tokens of the rows that count."""
        wanted = [
            torch.arange(length - 1) >= prompt - 1
            if is_wanted and length > prompt
            else torch.empty(0, dtype=torch.bool)
            for length, prompt, is_wanted in zip(
                self.lengths.tolist(), self.prompt_lengths.tolist(), self.wanted.tolist(), strict=True
            )
        ]
        return Sequences(self.tokens.split(self.lengths.tolist()), wanted)


def _places(lengths: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Where the segments ``index`` [m] of a flat tensor with segments of ``lengths`` [n] lie: int64."""
    starts, chosen = (lengths.cumsum(0) - lengths)[index], lengths[index]
    moves = starts - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + spread(moves, chosen)
