"""The policy as an environment sees it: it replies, and all that it has said and been told is recorded as tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.scheduler import ScheduledSequence
from nemo_style_aligner.engine.text.chats import Conversation, Turn
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.rl.episodes.turns import Message, Turns, TurnsError, turns_of

logger = logging.getLogger(__name__)


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


@dataclasses.dataclass(eq=False)
class Row:
    """Tokens that the model sees as one sequence: all of an episode, or a part of one whose history was rewritten.

    Attributes:
        prompt: what came before the first reply.
        tokens: all after it, the response.
        sampled: which of these the policy has sampled.
        logprobs: the engine's, one for each sampled token.
        routes: see `GenerationResult`: of all tokens but the last.
        last: the newest reply.
        said: what prompt and replies say, where that is known as messages.
        is_replying: a reply is under way.
    """

    prompt: list[int]
    said: Conversation | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    routes: str = ""
    last: Reply | None = None
    is_replying: bool = False

    @property
    def ids(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt, *self.tokens]

    def continuation(self, conversation: Conversation) -> Conversation | None:
        """The turns that follow the newest reply, if a conversation is this row's with more turns behind it."""
        if self.said is None or self.last is None or self.is_replying:
            return None
        of_template = [(of.tools or [], of.variables) for of in (self.said, conversation)]
        before, turns = self.said.turns, conversation.turns
        is_same = of_template[0] == of_template[1] and list(map(_spoken, before)) == list(
            map(_spoken, turns[: len(before)])
        )
        return (
            dataclasses.replace(conversation, turns=turns[len(before) :]) if is_same and turns[len(before) :] else None
        )


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How a reply is to be sampled.

    Attributes:
        sampling: as the job samples; what ends a reply may differ.
        max_tokens: of the reply; None: as many as are left.
        num_top: see `Task`.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
    num_top: int | None = None


Ask = Callable[[list[int], int, Wanted], Awaitable[ScheduledSequence]]
"""Has the engine continue ids: (ids, number of the reply, how) -> its sequence."""


class Policy:
    """The policy, in one episode. Its methods are coroutines of the environments' event loop.

    Args:
        ask: see `Ask`.
        prompt: the line's own prompt.
        turns: renders messages.
        decode: gives a reply's text.
        sampling: of replies; its limit is that of a row's response, with what is inserted.
        max_length: of a row, prompt and response.
        max_replies: of the episode.
        name: tells the run's episodes apart; that of one that is run again is the same.

    Attributes:
        rows: see `Row`; the newest last.
        last: the newest reply.
        num_replies: so far.
    """

    def __init__(
        self,
        ask: Ask,
        prompt: Sequence[int],
        turns: Turns,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingParams,
        *,
        max_length: int,
        max_replies: int,
        name: str = "",
    ) -> None:
        self.rows = [Row(list(prompt))]
        self.last: Reply | None = None
        self.num_replies = 0
        self.name = name
        self._num_begun = 0
        self._ask, self._turns, self._decode, self._sampling = ask, turns, decode, sampling
        self._max_length, self._max_replies = max_length, max_replies

    @property
    def sampling(self) -> SamplingParams:
        """How the job samples."""
        return self._sampling

    @property
    def tokens_left(self) -> int:
        """Tokens that the response may still have, sampled and inserted ones together; of several rows, the newest."""
        return self._left(self.rows[-1])

    async def reply(
        self,
        *messages: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Tell the policy something, and let it reply.

        Where the chat template writes something else behind an answer than it would at another place, what was said
        cannot be continued token by token: if it is known as messages, it is rendered again, in a row of its own.

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
        row = self.rows[-1]
        if row.last is None:
            if tools and not messages:
                raise EpisodeError("tools belong to the prompt: give its messages together with them")
            said = Conversation(turns_of(messages), tools) if messages else None
            if said is not None:
                self._require_quiet(row)
                row.prompt = self._turns.prompt(said)
            return await self._continue(row, (), max_tokens, said)
        if tools:
            raise EpisodeError("tools are told in the prompt, together with its messages, in front of the first reply")
        if not messages:
            raise EpisodeError("the policy has replied: give the messages that come next")
        new = dataclasses.replace(row.said or Conversation(()), turns=turns_of(messages))
        said = row.said and dataclasses.replace(row.said, turns=[*row.said.turns, *new.turns])
        try:
            inserted = self._turns.after_reply(new, row.last.token_ids)
        except TurnsError:
            if said is None:
                raise
            return await self._begin(said, max_tokens)
        return await self._continue(row, inserted, max_tokens, said)

    async def fork(
        self, *messages: Message, tools: Sequence[Mapping[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Reply:
        """Go on with another history: let the policy reply to ``messages`` alone. For the errors see `reply`.

        The episode gets a row of its own for what follows, which has its reward and counts with it as one sample.
        """
        if self.rows[-1].last is None:
            return await self.reply(*messages, tools=tools, max_tokens=max_tokens)
        return await self._begin(Conversation(turns_of(messages), tools), max_tokens)

    async def sample(self, insert: str | Sequence[int] = (), max_tokens: int | None = None) -> Reply:
        """Insert a text or token ids as they are, and let the policy continue. For the errors see `reply`."""
        row = self.rows[-1]
        inserted = self._turns.text(insert, row.ids) if isinstance(insert, str) else [*map(int, insert)]
        return await self._continue(row, inserted, max_tokens)

    # ---- for programs -----------------------------------------------------------------------

    async def answer(
        self,
        ids: list[int],
        conversation: Conversation | None,
        wanted: Wanted,
        as_turn: Callable[[ScheduledSequence], Turn],
    ) -> ScheduledSequence:
        """Let the policy reply to a request: in the row that it goes on with, or else in a new one.

        Args:
            ids: the request's prompt.
            conversation: of which the ids are, if they are of one: then what was said before is not rendered again.
            as_turn: the reply as the program is told it.

        Raises:
            EpisodeLimitError: as `reply`.
        """
        row, inserted = self._row_of(ids, conversation)
        sequence = await self._generate(row, inserted, wanted)
        row.said = conversation and dataclasses.replace(conversation, turns=[*conversation.turns, as_turn(sequence)])
        return sequence

    def _row_of(self, ids: list[int], conversation: Conversation | None) -> tuple[Row, list[int]]:
        """The row that a request goes on with, and what it inserts there."""
        if len(self.rows) == 1 and self.rows[0].last is None and not self.rows[0].is_replying:
            self.rows[0].prompt = ids
            return self.rows[0], []
        for row in reversed(self.rows):
            if conversation is not None and (new := row.continuation(conversation)) is not None and row.last:
                try:
                    return row, self._turns.after_reply(new, row.last.token_ids)
                except DataError as error:
                    logger.debug("a reply begins a row of its own: %s", error)
            if row.last is not None and not row.is_replying and ids[: len(row.ids)] == row.ids:
                return row, ids[len(row.ids) :]
        self.rows.append(row := Row(ids))
        return row, []

    # ---- a reply ----------------------------------------------------------------------------

    async def _begin(self, said: Conversation, max_tokens: int | None) -> Reply:
        self._require_quiet(self.rows[-1])
        self.rows.append(row := Row(self._turns.prompt(said)))
        return await self._continue(row, (), max_tokens, said)

    def _require_quiet(self, row: Row) -> None:
        if row.is_replying:
            raise EpisodeError("a reply is under way: await it before the next one; an episode is one conversation")

    def _left(self, row: Row) -> int:
        return min(self._sampling.max_new_tokens, self._max_length - len(row.prompt)) - len(row.tokens)

    async def _continue(
        self, row: Row, inserted: Sequence[int], max_tokens: int | None, said: Conversation | None = None
    ) -> Reply:
        await self._generate(row, inserted, Wanted(self._sampling, max_tokens))
        reply = row.last
        assert reply is not None
        turn = Turn("assistant", "assistant", reply.text, is_target=False)
        row.said = said and dataclasses.replace(said, turns=[*said.turns, turn])
        return reply

    async def _generate(self, row: Row, inserted: Sequence[int], wanted: Wanted) -> ScheduledSequence:
        self._require_quiet(row)
        try:
            return await self._generated(row, inserted, wanted)
        except BaseException:
            if row.last is None and len(self.rows) > 1:
                self.rows.remove(row)
            raise

    async def _generated(self, row: Row, inserted: Sequence[int], wanted: Wanted) -> ScheduledSequence:
        if self._num_begun == self._max_replies:
            raise EpisodeLimitError(f"it has had {self._max_replies} replies (trainer.ppo.episodes.max_replies)")
        left, least = self._left(row) - len(inserted), max(1, wanted.sampling.min_new_tokens)
        if left < least:
            raise EpisodeLimitError(
                f"{len(row.prompt)} tokens of the prompt, {len(row.tokens)} of the response and {len(inserted)} more "
                "leave no room for a reply (model.ppo.length_params.max_length)"
            )
        most = left if wanted.max_tokens is None else max(least, min(wanted.max_tokens, left))
        number, self._num_begun, row.is_replying = self._num_begun, self._num_begun + 1, True
        try:
            sequence = await self._ask([*row.ids, *inserted], number, dataclasses.replace(wanted, max_tokens=most))
        finally:
            row.is_replying = False
        ids = sequence.token_ids
        row.tokens += [*inserted, *ids]
        row.sampled += [False] * len(inserted) + [True] * len(ids)
        row.logprobs += sequence.logprobs
        row.routes = sequence.routes  # of the whole row: its earlier tokens were this reply's prompt
        self.num_replies += 1
        self.last = row.last = Reply(self._decode(ids), ids, sequence.finish_reason == "stop")
        return sequence


def _spoken(turn: Turn) -> tuple[Any, ...]:
    """What a turn says, whatever a client has added to it or left out that is nothing."""
    calls = [call.get("function", call) for call in turn.extras.get("tool_calls") or ()]
    said = (turn.kind, (turn.content or "").strip(), [(call.get("name"), call.get("arguments")) for call in calls])
    return said if turn.kind == "assistant" else (*said, turn.extras.get("name"))
