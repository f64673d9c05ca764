"""When a response is complete: end-of-sequence and stop tokens by id, stop strings by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_style_aligner.generation.engine import FinishReason, SamplingParams

Detokenize = Callable[[Sequence[int]], str]
TokenToId = Callable[[str], int | None]

_CONTEXT_TOKENS = 4  # decoded in front of the tokens that may hold a stop string


def text_before_end(
    token_ids: Sequence[int], detokenize: Detokenize, end_strings: Sequence[str], min_new_tokens: int
) -> str:
    """A response's text up to the first end string, without those that its first ``min_new_tokens`` tokens complete."""
    text, early = detokenize(token_ids), detokenize(token_ids[:min_new_tokens])
    ends = [text.find(string, early.rfind(string) + 1) for string in end_strings]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


class StopCondition:
    """Decides after each token whether a response ends.

    A stop string that is one token of the vocabulary (``<|im_end|>``, ``<extra_id_1>``) is matched
    by its id: special tokens leave no text. Every stop string is also looked for in the text: only a
    tail long enough to hold it is decoded, and only after a token that may complete a stop string.

    Attributes:
        stop_ids: ids that end a response: those of end of sequence, unless ignored, then those of stop strings.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_id: int,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
        vocab_limit: int | None = None,
        more_eos_ids: Sequence[int] = (),
    ) -> None:
        """Collect the stop ids, without those at and above ``vocab_limit``, which are never sampled.

        ``more_eos_ids`` end a sequence as ``eos_id`` does.

        Raises:
            ValueError: a stop string can be matched neither by id nor by text.
        """
        known = [i for i in more_eos_ids if i >= 0 and (vocab_limit is None or i < vocab_limit)]
        stop_ids = [] if params.ignore_eos else [eos_id, *known]
        for string in params.stop_strings:
            token = token_to_id(string) if token_to_id is not None else None
            if token is not None:
                if vocab_limit is None or token < vocab_limit:
                    stop_ids.append(token)
            elif detokenize is None:
                raise ValueError(
                    f"stop string {string!r} is not a single token, and the engine was built without `detokenize`; "
                    "give it the tokenizer's ids_to_text"
                )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_ids))
        self._stop_id_set = frozenset(self.stop_ids)
        self._strings = params.stop_strings if detokenize is not None else ()
        self._detokenize = detokenize
        # Every token but a special one adds at least one byte of text, so this many tokens hold any stop string.
        longest = max((len(string.encode()) for string in self._strings), default=0)
        self._tail_tokens = longest + _CONTEXT_TOKENS
        self._last_characters = {string[-1] for string in self._strings}
        self._may_complete: dict[int, bool] = {}
        self._min_new_tokens = params.min_new_tokens

    def check(self, token_ids: list[int], limit: int) -> FinishReason | None:
        """Why the response ``token_ids`` (1 to ``limit`` of them) ends at its last token; None: it goes on."""
        may_stop = len(token_ids) > self._min_new_tokens
        if may_stop and (token_ids[-1] in self._stop_id_set or (self._strings and self._text_stops(token_ids))):
            return "stop"
        return "length" if len(token_ids) >= limit else None

    def _text_stops(self, token_ids: list[int]) -> bool:
        """Whether the last token completes a stop string."""
        assert self._detokenize is not None, "there are no stop strings without it"
        last = token_ids[-1]
        if last not in self._may_complete:
            self._may_complete[last] = self._may_end_a_string(self._detokenize([last]))
        if not self._may_complete[last]:
            return False
        tail = token_ids[-self._tail_tokens :]
        text = self._detokenize(tail)
        found = [string for string in self._strings if string in text]
        if not found:
            return False
        # A stop string may have appeared below the minimum length; only one that ends in the last token counts.
        before = self._detokenize(tail[:-1]) if len(tail) > 1 else ""
        return any(text.rfind(string) > before.rfind(string) for string in found)

    def _may_end_a_string(self, text: str) -> bool:
        """Whether a token that decodes to ``text`` on its own may complete a stop string."""
        # Decoded alone, a token may lack a space that it has within a text, or be only part of a character.
        is_whole = text != "" and "\ufffd" not in text
        return not is_whole or any(end in text or end.isspace() for end in self._last_characters)
