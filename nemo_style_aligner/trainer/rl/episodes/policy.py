"""The policy as an environment sees it: it replies, and all that it has said and been told is recorded as tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.rl.episodes.turns import Message, Turns


class EpisodeLimitError(UserError, RuntimeError):
    """An episode may not go on: it has no room for another reply, or has had all that it may have."""


class EpisodeError(UserError, ValueError):
    """An environment asks for what cannot be; the message says why."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the policy has said.

    Attributes:
        text: without special tokens, and without what ended it.
        token_ids: as they were sampled.
        ended: a stop token or stop string ended it, not the length limit.
    """

    text: str
    token_ids: list[int]
    ended: bool

    def __str__(self) -> str:
        """The text."""
        return self.text


@dataclasses.dataclass
class Transcript:
    """An episode as tokens.

    Attributes:
        prompt: what came before the first reply.
        tokens: all after it, the response.
        sampled: which of these the policy has sampled.
        logprobs: the engine's, one for each sampled token.
        num_replies: so far.
        last: the newest reply.
    """

    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    num_replies: int = 0
    last: Reply | None = None


Ask = Callable[[list[int], int, int], Awaitable[tuple[list[int], list[float], bool]]]
"""Has the engine continue ids: (ids, number of the reply, most tokens) -> (ids, log-probs, whether it ended)."""


class Policy:
    """The policy, in one episode. Its methods are coroutines of the environments' event loop.

    Args:
        ask: see `Ask`.
        prompt: the line's own prompt.
        turns: renders messages.
        decode: gives a reply's text.
        max_tokens: of the response, with what is inserted.
        max_length: of prompt and response.
        max_replies: of the episode.
        least_tokens: of a reply that may begin.
    """

    def __init__(
        self,
        ask: Ask,
        prompt: Sequence[int],
        turns: Turns,
        decode: Callable[[Sequence[int]], str],
        *,
        max_tokens: int,
        max_length: int,
        max_replies: int,
        least_tokens: int = 1,
    ) -> None:
        self.transcript = Transcript(list(prompt))
        self._is_replying = False
        self._ask, self._turns, self._decode = ask, turns, decode
        self._max_tokens, self._max_length = max_tokens, max_length
        self._max_replies, self._least_tokens = max_replies, least_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that the response may still have, sampled and inserted ones together."""
        said = self.transcript
        return min(self._max_tokens, self._max_length - len(said.prompt)) - len(said.tokens)

    async def reply(
        self,
        *messages: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Tell the policy something, and let it reply.

        Args:
            messages: in OpenAI's form. In front of the first reply: the whole prompt; none: that of the line.
            tools: JSON schemas of what the policy may call, for the prompt's messages.
            max_tokens: of the reply; None: as many as are left.

        Raises:
            EpisodeLimitError: there is no room for another reply, or there have been all that there may be. Where the
                environment does not catch it, the episode ends as one that was cut off.
            EpisodeError: the messages or tools have no place here, or a reply is under way.
            DataError: the messages cannot be rendered as they are.
        """
        said = self.transcript
        if said.last is None:
            if tools and not messages:
                raise EpisodeError("tools belong to the prompt: give its messages together with them")
            if messages:
                said.prompt = self._turns.prompt(messages, tools)
            return await self.sample(max_tokens=max_tokens)
        if tools:
            raise EpisodeError("tools are told in the prompt, together with its messages, in front of the first reply")
        if not messages:
            raise EpisodeError("the policy has replied: give the messages that come next")
        return await self.sample(self._turns.after_reply(messages, said.last.token_ids), max_tokens=max_tokens)

    async def sample(self, insert: str | Sequence[int] = (), max_tokens: int | None = None) -> Reply:
        """Insert a text or token ids as they are, and let the policy continue. For the errors see `reply`."""
        said = self.transcript
        inserted = (
            self._turns.text(insert, [*said.prompt, *said.tokens]) if isinstance(insert, str) else [*map(int, insert)]
        )
        if self._is_replying:
            raise EpisodeError("a reply is under way: await it before the next one; an episode is one conversation")
        if said.num_replies == self._max_replies:
            raise EpisodeLimitError(f"it has had {self._max_replies} replies (trainer.ppo.episodes.max_replies)")
        left = self.tokens_left - len(inserted)
        if left < self._least_tokens:
            raise EpisodeLimitError(
                f"{len(said.prompt)} tokens of the prompt, {len(said.tokens)} of the response and {len(inserted)} more "
                "leave no room for a reply (model.ppo.length_params.max_length)"
            )
        most = left if max_tokens is None else max(self._least_tokens, min(max_tokens, left))
        context = [*said.prompt, *said.tokens, *inserted]
        self._is_replying = True
        try:
            ids, logprobs, ended = await self._ask(context, said.num_replies, most)
        finally:
            self._is_replying = False
        said.tokens += [*inserted, *ids]
        said.sampled += [False] * len(inserted) + [True] * len(ids)
        said.logprobs += logprobs
        said.num_replies += 1
        said.last = Reply(self._decode(ids), ids, ended)
        return said.last
