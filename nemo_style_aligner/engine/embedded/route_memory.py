"""Which experts each token in KV memory was computed by: kept beside its keys and values, for as long as they are.

So the routes of a sequence are there however its tokens were computed: in chunks, for another sequence with the same
prefix, or again after a preemption.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence

import numpy as np

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape, StepInput


def route_dtype(architecture: ModelArchitecture) -> np.dtype:
    """Of an expert's number."""
    assert architecture.experts is not None
    return np.dtype(np.uint8 if architecture.experts.number <= 256 else np.uint16)


class RouteMemory:
    """The routes of all tokens in KV memory: [pages * PAGE_TOKENS, layers with experts, experts per token]."""

    def __init__(self, shape: EngineShape) -> None:
        a = shape.architecture
        assert a.experts is not None
        self._layers = np.flatnonzero(a.expert_layers)
        self._size, self._dtype = (a.num_layers, a.experts.per_token), route_dtype(a)
        places = shape.num_pages * PAGE_TOKENS
        self._routes = np.zeros((places, len(self._layers), a.experts.per_token), self._dtype)  # touched when written

    def wanting(self, step: StepInput) -> StepInput:
        """A pass that says which experts its tokens have."""
        return dataclasses.replace(step, routes=np.zeros((len(step.token_ids), *self._size), self._dtype))

    def note(self, step: StepInput) -> None:
        """Keep the routes of a pass that has been computed."""
        assert step.routes is not None
        pages = step.block_table[step.slots, step.positions // PAGE_TOKENS]
        self._routes[pages * PAGE_TOKENS + step.positions % PAGE_TOKENS] = step.routes[:, self._layers]

    def of(self, pages: np.ndarray, num_tokens: int) -> str:
        """The routes of the first tokens of a slot with these pages, as `GenerationResult.routes` has them."""
        positions = np.arange(num_tokens)
        found = self._routes[pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS]
        return base64.b64encode(found.tobytes()).decode()


def unpacked(routes: str, num_tokens: int) -> np.ndarray:
    """`GenerationResult.routes` of a response of so many tokens, with its prompt: uint8 [tokens, bytes of each].

    The last token's are zeros. Without routes there are no bytes.
    """
    content = np.frombuffer(base64.b64decode(routes), np.uint8)
    size = len(content) // (num_tokens - 1) if num_tokens > 1 else 0
    return np.concatenate([content, np.zeros(size, np.uint8)]).reshape(num_tokens, size)


def joined(rows: Sequence[tuple[str, int]]) -> str:
    """The routes of sequences, with their numbers of tokens, as those of one after the other; "" if some have none."""
    if not all(routes for routes, _ in rows):
        return ""
    whole = np.concatenate([unpacked(*row) for row in rows])
    return base64.b64encode(whole[:-1].tobytes()).decode()
