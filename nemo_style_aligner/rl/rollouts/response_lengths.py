"""How long a prompt's next response may be, judged by the responses so far."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

_NEWEST_WEIGHT = 0.5  # of a prompt's newest response against all before: the policy changes between epochs
_MEMORY = 256  # about how many responses a mean over prompts reaches back
_PRIOR = 8  # how many responses to prompts of a length weigh as much as the mean over all prompts


@dataclasses.dataclass
class _Mean:
    """A running mean; exponentially weighted, over about the last `_MEMORY` values, once there are more."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


class ResponseLengths:
    """Expected response lengths in tokens.

    For a prompt that was answered before: a mean over its responses in which the newest counts half. For any other: the
    recent mean over prompts of similar length (the same power of two), drawn towards the mean over all prompts while
    there are few. The same observations in the same order give the same numbers on every rank.
    """

    def __init__(self, max_prompts: int = 100_000) -> None:
        """Remember individual lengths of the ``max_prompts`` prompts that were answered last."""
        self._max_prompts = max_prompts
        self._by_prompt: collections.OrderedDict[int, float] = collections.OrderedDict()  # the oldest first
        self._by_prompt_length: dict[int, _Mean] = {}
        self._all = _Mean()

    def expect(self, prompt_id: int, prompt_length: int) -> float:
        """Expected tokens of the next response; 0 before anything was observed."""
        if prompt_id in self._by_prompt:
            return self._by_prompt[prompt_id]
        like = self._by_prompt_length.get(prompt_length.bit_length(), _Mean())
        return (like.count * like.value + _PRIOR * self._all.value) / (like.count + _PRIOR)

    def observe(
        self, prompt_ids: Sequence[int], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
    ) -> None:
        """Learn from responses, given in sample order."""
        for prompt_id, prompt_length, length in zip(prompt_ids, prompt_lengths, response_lengths, strict=True):
            before = self._by_prompt.pop(prompt_id, float(length))
            self._by_prompt[prompt_id] = before + _NEWEST_WEIGHT * (length - before)
            self._by_prompt_length.setdefault(prompt_length.bit_length(), _Mean()).add(length)
            self._all.add(length)
        while len(self._by_prompt) > self._max_prompts:
            self._by_prompt.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in a form that JSON holds exactly."""
        return {
            "prompts": [list(item) for item in self._by_prompt.items()],
            "prompt_lengths": [[bits, mean.count, mean.value] for bits, mean in self._by_prompt_length.items()],
            "all": [self._all.count, self._all.value],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._by_prompt = collections.OrderedDict((int(prompt), float(length)) for prompt, length in state["prompts"])
        self._by_prompt_length = {int(bits): _Mean(int(n), float(value)) for bits, n, value in state["prompt_lengths"]}
        self._all = _Mean(int(state["all"][0]), float(state["all"][1]))
