"""Guesses of the next tokens of responses, looked up in other responses to the same prompt ("prompt lookup decoding").

A pass over a few sequences costs little more with a few tokens more. Where slots are free, a pass therefore computes,
behind a sequence's newest token, those that once followed its last ones: in responses to the same prompt, now or in an
earlier round, in its own, or in the prompt. The token that is then chosen behind each of them is the one that would
have been chosen anyway (`sampling` draws by position), and guesses hold as far as they equal the choices: responses are
the same, in fewer passes.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Callable, Sequence

from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence

_CONTEXTS = (6, 4, 2)  # tokens that were once followed by a guess: the more, the likelier it holds
_MOST = 8  # guesses for a sequence in a pass
_KEPT_TOKENS = 1 << 20  # of responses of earlier rounds, prompts included: 8 MB
_PRIOR = (2.0, 4.0)  # guesses that held and were tried, before there are any
_MEMORY = 0.98  # weight of each older guess


class _Texts:
    """A prompt and responses to it, and where each short run of tokens occurred last."""

    def __init__(self, prompt: list[int]) -> None:
        self._tail = prompt[-max(_CONTEXTS) :]
        self._places: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}
        self._read: dict[int, int] = {}  # tokens of each text that are known, by the text's identity
        self._texts: list[Sequence[int]] = []  # which keeps identities alive
        self.read(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Learn what ``tokens``, a text that may grow, has had since the last time."""
        if id(tokens) not in self._read:
            self._texts.append(tokens)
        for end in range(self._read.get(id(tokens), 0), len(tokens)):
            for size in _CONTEXTS:
                self._places[self._context(tokens, end, size)] = tokens, end
        self._read[id(tokens)] = len(tokens)

    def after(self, tokens: list[int], most: dict[int, int]) -> tuple[int, list[int]]:
        """What followed the last tokens of ``tokens``, a response that was read, by the longest context that is found.

        Args:
            tokens: the response so far.
            most: by context, the most tokens to return.

        Returns:
            The context's size, and the tokens.
        """
        for size in _CONTEXTS:
            if place := self._places.get(self._context(tokens, len(tokens), size)):
                found, start = place
                return size, list(found[start : start + most[size]])
        return 0, []

    def _context(self, tokens: Sequence[int], end: int, size: int) -> tuple[int, ...]:
        if end >= size:
            return tuple(tokens[end - size : end])
        return (*self._tail[end - size :], *tokens[:end])


class Lookup:
    """Guesses for an engine, over all of its rounds. Knows no clock: ranks that share a model all guess the same.

    A guess that holds with probability p saves p tokens' share of a pass, and costs a row. With n sequences and rows
    that cost ``row_cost`` of a pass of one row, it pays while p > n row_cost / (1 + (n - 1) row_cost); p is estimated
    from the round's guesses so far by as long a context, and the k-th guess in a row holds only if those before do.

    Attributes:
        num_guessed, num_held: guesses of the round, and those that were right.
    """

    def __init__(self, num_rows: int, row_cost: float) -> None:
        """For passes of at most ``num_rows`` rows that decode."""
        self._num_rows = num_rows
        self._row_cost = row_cost
        self._texts: dict[int, _Texts] = {}  # of the sequences under way, by number
        self._by_prompt: dict[tuple[int, ...], _Texts] = {}
        self._kept: collections.OrderedDict[tuple[int, ...], list[array.array[int]]] = collections.OrderedDict()
        self._num_kept = 0
        self.begin()

    def begin(self) -> None:
        """Begin a round: nothing is under way, and what guesses are worth is to be seen."""
        self._texts.clear()
        self._by_prompt.clear()
        self._asked: dict[int, tuple[int, int]] = {}  # context and number of the pass's guesses, by sequence
        self._rates = dict.fromkeys(_CONTEXTS, _PRIOR)
        self.num_guessed = self.num_held = 0

    def guess(self, sequences: list[ScheduledSequence], room: Callable[[ScheduledSequence], int]) -> list[list[int]]:
        """Guesses for each of the decoding ``sequences``: no more than it has ``room`` for. Nothing where none pays."""
        most = {size: self._most(len(sequences), held / tried) for size, (held, tried) in self._rates.items()}
        if not any(most.values()):
            return []
        for sequence in sequences:
            self._texts_of(sequence).read(sequence.token_ids)
        guesses: list[list[int]] = []
        for sequence in sequences:
            size, tokens = self._texts[sequence.number].after(sequence.token_ids, most)
            guesses.append(tokens[: max(room(sequence), 0)])
            if guesses[-1]:
                self._asked[sequence.number] = size, len(guesses[-1])
        return guesses

    def learn(self, added: dict[int, int]) -> None:
        """What came of the guesses of a pass: how many tokens were ``added`` to each sequence, by its number."""
        for number, (size, num_guesses) in self._asked.items():
            right = added[number] - 1
            held, tried = self._rates[size]
            self._rates[size] = _MEMORY * held + right, _MEMORY * tried + min(right + 1, num_guesses)
            self.num_guessed += num_guesses
            self.num_held += right
        self._asked.clear()

    def finished(self, sequence: ScheduledSequence) -> None:
        """Keep the response of a sequence that is finished, for others to the same prompt."""
        prompt, tokens = tuple(sequence.request.prompt_token_ids), sequence.token_ids
        if (texts := self._by_prompt.get(prompt)) is not None:
            texts.read(tokens)
        self._texts.pop(sequence.number, None)
        if prompt not in self._kept:
            self._num_kept += len(prompt)
        self._kept.setdefault(prompt, []).append(array.array("i", tokens))
        self._kept.move_to_end(prompt)
        self._num_kept += len(tokens)
        while self._num_kept > _KEPT_TOKENS:
            forgotten, responses = self._kept.popitem(last=False)
            self._num_kept -= len(forgotten) + sum(map(len, responses))

    def _most(self, num_sequences: int, rate: float) -> int:
        """Guesses that pay for each of so many sequences, if one holds at this rate."""
        if not 0 < num_sequences <= self._num_rows // 2:
            return 0
        least = num_sequences * self._row_cost / (1 + (num_sequences - 1) * self._row_cost)
        most, p = 0, rate
        while p > least and most < min(_MOST, self._num_rows // num_sequences - 1):
            most, p = most + 1, p * rate
        return most

    def _texts_of(self, sequence: ScheduledSequence) -> _Texts:
        if sequence.number not in self._texts:
            prompt = tuple(sequence.request.prompt_token_ids)
            if prompt not in self._by_prompt:
                self._by_prompt[prompt] = texts = _Texts(sequence.request.prompt_token_ids)
                for tokens in self._kept.get(prompt, ()):
                    texts.read(tokens)
            self._texts[sequence.number] = self._by_prompt[prompt]
        return self._texts[sequence.number]
