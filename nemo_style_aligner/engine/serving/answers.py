"""Answers in OpenAI's format, whole or as chunks of a stream."""

from __future__ import annotations

import abc
import codecs
import dataclasses
import enum
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from nemo_style_aligner.engine.contract import FinishReason, SamplingParams, text_before_end
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence, TokenScores
from nemo_style_aligner.engine.serving.bodies import Asked, Prompt
from nemo_style_aligner.engine.serving.generation import Response, Ticket
from nemo_style_aligner.engine.serving.tool_calls import Call
from nemo_style_aligner.engine.text.tokenizer import PART_OF_A_CHARACTER, Tokenizer
from nemo_style_aligner.wording import common_start

_CALL_ID = 9  # characters of a call's id: Mistral's templates take no others
_CONTEXT_TOKENS = 8  # of the prompt: how a token is written depends on those before it


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as log-probs show it: ``token_id:N`` where it has no text of its own, as a part of a character."""
    text = tokenizer.token_text(token_id)
    return text if text and PART_OF_A_CHARACTER not in text else f"token_id:{token_id}"


class ResponseText:
    """The text of one response, which ends before what ended it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: SamplingParams, keeps_special: bool = False
    ) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._text_of = partial(tokenizer.ids_to_text, keep_special=keeps_special)
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
        before, now = (self._text_of(self._ids[self._window : end]) for end in (self._known, None))
        if len(now) > len(before) and not now.endswith(PART_OF_A_CHARACTER):
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
        start = self._text_of(context)

        def decode(ids: Sequence[int]) -> str:
            text = self._text_of([*context, *ids])
            return text[len(common_start(start, text)) :]

        kept = ids if self._sampling.ignore_eos else self._tokenizer.without_end(ids)
        kept = kept[:-1] if kept and kept[-1] in self._sampling.stop_token_ids else kept
        return text_before_end(kept, decode, self._sampling.stop_strings, self._sampling.min_new_tokens)


class _ChoiceAnswer(abc.ABC):
    """What is said about one response; a subclass knows the endpoint's format."""

    def __init__(self, choice: Response, index: int, asked: Asked, tokenizer: Tokenizer) -> None:
        self._choice, self._index, self._asked, self._tokenizer = choice, index, asked, tokenizer
        self._prompt: Prompt = asked.prompts[index // asked.num_choices]
        self._text = ResponseText(tokenizer, self._prompt.token_ids, asked.sampling, asked.keeps_special)
        self.num_told = 0  # tokens
        self.is_ended = False

    def news(self) -> list[dict[str, Any]]:
        """What has become known since the last call, if anything: in a stream, the end is said by itself."""
        (ready, reason), sequence, first = self._choice.ready, self._choice.sequence, self.num_told
        if sequence is None or self.is_ended or (ready == first and reason is None):
            return []
        text = self._text.add(sequence.token_ids[first:ready], reason)
        if self._asked.echoes_alone:
            text, ready = "", 0
        self.num_told, self.is_ended = ready, reason is not None
        said = self._said(text)
        if not first or any(said.values()) or (self._wants_tokens and ready > first):
            found = [self._named(self._told(sequence, said, first, ready)) | self._ids(sequence, first, ready)]
        else:
            found = []
        if self.is_ended and self._asked.streams:
            found.append(self._named(self._end()))
        if self.is_ended:
            found[-1]["finish_reason"] = self._reason(reason)
        return found

    @property
    def prompt_ids(self) -> list[int]:
        """What the model has seen; of an episode, all that was said in it and the new messages."""
        sequence = self._choice.sequence
        return self._prompt.token_ids if sequence is None else sequence.request.prompt_token_ids

    @property
    def _wants_tokens(self) -> bool:
        return self._asked.num_top is not None or self._asked.returns_ids

    def _reason(self, reason: FinishReason | None) -> str | None:
        """Why the response has ended."""
        return reason

    def _said(self, text: str) -> dict[str, Any]:
        """What the ``text`` that is new says, in the endpoint's own fields."""
        return {"text": text}

    def _named(self, told: dict[str, Any]) -> dict[str, Any]:
        version = self._choice.weight_version
        return {"index": self._index, **told, "finish_reason": None, "weight_version": version}

    def _ids(self, sequence: ScheduledSequence, first: int, ready: int) -> dict[str, Any]:
        if not self._asked.returns_ids:
            return {}
        prompt = {} if first else {"prompt_token_ids": self.prompt_ids}
        ids, logprobs = sequence.token_ids[first:ready], sequence.logprobs[first:ready]
        return {**prompt, "token_ids": ids, "sampling_logprobs": logprobs}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._asked.spells_ids else token_text(self._tokenizer, token_id)

    @abc.abstractmethod
    def _told(self, sequence: ScheduledSequence, said: dict[str, Any], first: int, ready: int) -> dict[str, Any]:
        """The endpoint's own fields about the tokens from number ``first`` to ``ready``, and what is ``said`` anew."""

    @abc.abstractmethod
    def _end(self) -> dict[str, Any]:
        """The endpoint's own fields where a stream ends, with nothing new."""


class _Places:
    """Where tokens begin in a text, in characters; one that is a part of a character, where that begins.

    ``echoed`` is the text of the first of them, a prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, echoed: str) -> None:
        self._tokenizer, self._echoed = tokenizer, echoed.encode()
        self._at = self._place = 0  # bytes, characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int) -> int:
        """The place of the next token."""
        token = self._tokenizer.token_bytes(token_id)
        if not self._echoed.startswith(token, self._at):  # BOS, a space in front of a prompt; or of a response
            is_first = self._at == 0 and self._echoed
            token = token.removeprefix(b" ") if is_first else token
            token = b"" if token_id in self._tokenizer.special_ids else token
        goes_on = token != b"" and 0x80 <= token[0] < 0xC0  # with the character before; else that remains a part
        self._place += 0 if goes_on else len(self._decoder.decode(b"", final=True))
        place = self._place
        self._at += len(token)
        self._place += len(self._decoder.decode(token))
        return place


class _CompletionChoice(_ChoiceAnswer):
    def __init__(self, choice: Response, index: int, asked: Asked, tokenizer: Tokenizer) -> None:
        super().__init__(choice, index, asked, tokenizer)
        self._places = _Places(tokenizer, self._prompt.text if asked.echo else "")

    def _told(self, sequence: ScheduledSequence, said: dict[str, Any], first: int, ready: int) -> dict[str, Any]:
        text: str = said["text"]
        ids, scores = sequence.token_ids[first:ready], list[TokenScores | None](sequence.scores[first:ready])
        if self._asked.echo and not first:
            text, ids = self._prompt.text + text, [*self._prompt.token_ids, *ids]
            scores = [None, *sequence.prompt_scores, *scores]  # nothing predicts the first token
        return {"text": text, "logprobs": None if self._asked.num_top is None else self._logprobs(ids, scores)}

    def _end(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, ids: Sequence[int], scores: Sequence[TokenScores | None]) -> dict[str, Any]:
        tokens = [self._token(token_id) for token_id in ids]
        return {
            "tokens": tokens,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [
                None if score is None else self._top(score) | {token: score.logprob}
                for token, score in zip(tokens, scores, strict=True)
            ],
            "text_offset": [self._places.next(token_id) for token_id in ids],
        }

    def _top(self, score: TokenScores) -> dict[str, float]:
        return {self._token(token_id): logprob for token_id, logprob in score.top[: self._asked.num_top]}


class _ChatChoice(_ChoiceAnswer):
    def __init__(self, choice: Response, index: int, asked: Asked, tokenizer: Tokenizer) -> None:
        super().__init__(choice, index, asked, tokenizer)
        self._calls = None if asked.reads_calls is None else asked.reads_calls()

    def _said(self, text: str) -> dict[str, Any]:
        if self._calls is None:
            return {"content": text}
        first = self._calls.num_calls
        content, calls = self._calls.add(text, self.is_ended)
        if not calls:
            return {"content": content}
        told = [_call(call, first + n if self._asked.streams else None) for n, call in enumerate(calls)]
        return {"content": content or None, "tool_calls": told}

    def _reason(self, reason: FinishReason | None) -> str | None:
        has_called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" else reason

    def _told(self, sequence: ScheduledSequence, said: dict[str, Any], first: int, ready: int) -> dict[str, Any]:
        message = said if first else {"role": "assistant", **said}
        logprobs = None
        if self._asked.num_top is not None:
            pairs = zip(sequence.token_ids[first:ready], sequence.scores[first:ready], strict=True)
            content = [self._score(i, s.logprob) | {"top_logprobs": self._top(s)} for i, s in pairs]
            logprobs = {"content": content, "refusal": None}
        return {"delta" if self._asked.streams else "message": message, "logprobs": logprobs}

    def _end(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _top(self, score: TokenScores) -> list[dict[str, Any]]:
        return [self._score(token_id, logprob) for token_id, logprob in score.top[: self._asked.num_top]]

    def _score(self, token_id: int, logprob: float) -> dict[str, Any]:
        token, spelt = self._token(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(spelt)}


class _IdsChoice(_ChoiceAnswer):
    """vLLM's answer to token ids: token ids, without a text."""

    @property
    def _wants_tokens(self) -> bool:
        return True

    def _ids(self, sequence: ScheduledSequence, first: int, ready: int) -> dict[str, Any]:
        return {}

    def _told(self, sequence: ScheduledSequence, said: dict[str, Any], first: int, ready: int) -> dict[str, Any]:
        ids, content = sequence.token_ids[first:ready], None
        if self._asked.returns_ids:  # of the distribution that they are from, as whoever trains on them wants it
            scores = zip(ids, sequence.logprobs[first:ready], strict=True)
            nothing: dict[str, Any] = {"bytes": None, "top_logprobs": []}
            content = [{"token": f"token_id:{i}", "logprob": score, **nothing} for i, score in scores]
        return {"token_ids": ids, "logprobs": None if content is None else {"content": content}}

    def _end(self) -> dict[str, Any]:
        return {"token_ids": [], "logprobs": None}


def _call(call: Call, number: int | None) -> dict[str, Any]:
    """A call in OpenAI's format; in a stream it has its ``number``."""
    call_id = uuid.uuid4().hex[:_CALL_ID]
    told = {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return told if number is None else {"index": number, **told}


class Endpoint(enum.Enum):
    """Whose format an answer has."""

    COMPLETIONS = _CompletionChoice
    CHAT = _ChatChoice
    GENERATE = _IdsChoice


def message_of(asked: Asked, response: Response, tokenizer: Tokenizer) -> dict[str, Any]:
    """The message that a finished response to a conversation is, as its client is told it."""
    (news,) = _ChatChoice(response, 0, dataclasses.replace(asked, streams=False), tokenizer).news()
    message: dict[str, Any] = news["message"]
    return message


class Answer:
    """What is said about one request."""

    def __init__(self, asked: Asked, ticket: Ticket, model: str, tokenizer: Tokenizer, endpoint: Endpoint) -> None:
        self._choices = [endpoint.value(choice, n, asked, tokenizer) for n, choice in enumerate(ticket.choices)]
        self._asked, self._is_chat = asked, endpoint is Endpoint.CHAT
        number = uuid.uuid4().hex
        if endpoint is Endpoint.GENERATE:
            self._head: dict[str, Any] = {"request_id": number, "model": model}
            return
        name = "text_completion"
        if self._is_chat:
            name = "chat.completion.chunk" if asked.streams else "chat.completion"
        request_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{number}"
        self._head = {"id": request_id, "object": name, "created": int(time.time()), "model": model}

    @property
    def is_complete(self) -> bool:
        """Whether `news` has told how all choices end."""
        return all(choice.is_ended for choice in self._choices)

    def news(self) -> list[dict[str, Any]]:
        """What has become known since the last call: chunks of a stream, each of one choice."""
        return [self._object([news]) for choice in self._choices for news in choice.news()]

    def whole(self) -> dict[str, Any]:
        """The answer, with its usage, once all choices are finished."""
        found = [news for choice in self._choices for news in choice.news()]
        return self._object(found) | {"usage": self._usage()}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk of a stream that tells its usage."""
        return self._object([]) | {"usage": self._usage()}

    def _object(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        key = "prompt_token_ids"  # of a conversation, beside its choices, as vLLM has them
        prompts = [choice.pop(key) for choice in choices if self._is_chat and key in choice]
        return self._head | {"choices": choices} | ({key: prompts[0]} if prompts else {})

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(len(choice.prompt_ids) for choice in self._choices[:: self._asked.num_choices])
        num_made = sum(choice.num_told for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_made,
            "total_tokens": num_prompt + num_made,
        }
