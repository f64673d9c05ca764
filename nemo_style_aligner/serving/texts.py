"""Token ids of a response as text, whole or as they come."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.engine.contract import FinishReason, SamplingParams, text_before_end
from nemo_style_aligner.wording import common_start

_CONTEXT_TOKENS = 8  # of the prompt: how a token is written depends on those before it
_PART_OF_A_CHARACTER = "\ufffd"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as log-probs show it: ``token_id:N`` where it has no text of its own, as a part of a character."""
    text = tokenizer.token_text(token_id)
    return text if text and _PART_OF_A_CHARACTER not in text else f"token_id:{token_id}"


class ResponseText:
    """The text of one response, which ends before what ended it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._num_context = len(self._ids)
        # What comes before `_known` is in `_text`; from `_window` on, tokens are decoded again with those that follow.
        self._window, self._known = 0, len(self._ids)
        self._text = ""
        self._num_sent = 0  # characters

    def add(self, token_ids: Sequence[int], reason: FinishReason | None) -> str:
        """Take the tokens that have come; return the text that is certain now, and has not been returned before."""
        self._ids += token_ids
        if reason is not None:
            self._text = self._whole()
            certain = len(self._text)
        else:
            self._decode()
            certain = len(self._text) - self._held_back()
        self._num_sent, first = max(self._num_sent, certain), self._num_sent
        return self._text[first:certain]

    def _decode(self) -> None:
        decode = self._tokenizer.ids_to_text
        before, now = decode(self._ids[self._window : self._known]), decode(self._ids[self._window :])
        if len(now) > len(before) and not now.endswith(_PART_OF_A_CHARACTER):
            self._text += now[len(before) :]
            self._window, self._known = self._known, len(self._ids)

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a string that ends the response."""
        longest = max(map(len, self._sampling.stop_strings), default=1) - 1
        tails = (self._text[-size:] for size in range(min(longest, len(self._text)), 0, -1))
        return next((len(t) for t in tails if any(s.startswith(t) for s in self._sampling.stop_strings)), 0)

    def _whole(self) -> str:
        """The text of the finished response."""
        context, ids = self._ids[: self._num_context], self._ids[self._num_context :]
        start = self._tokenizer.ids_to_text(context)

        def decode(ids: Sequence[int]) -> str:
            text = self._tokenizer.ids_to_text([*context, *ids])
            return text[len(common_start(start, text)) :]

        kept = ids if self._sampling.ignore_eos else self._tokenizer.without_end(ids)
        return text_before_end(kept, decode, self._sampling.stop_strings, self._sampling.min_new_tokens)
