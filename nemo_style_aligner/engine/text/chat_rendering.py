"""Conversations as text: in the tokenizer's chat template, or in NeMo's markers; for every job in the same way.

Templates silently leave out what they have no place for, and the model would learn to answer without it. Therefore each
rendering is proved: the conversation is rendered once more with a mark behind every part, and each part must be there,
whole, in front of its mark. Where white space is concerned, templates are free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from nemo_style_aligner.engine.text.chat_marks import MarkedText, mark, marked, without_spaces, without_thoughts
from nemo_style_aligner.engine.text.chats import REASONING_KEYS, Conversation, Turn
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record, seen
from nemo_style_aligner.engine.text.text_format import ChatPromptTokens
from nemo_style_aligner.engine.text.tokenizer import BREAK, Message, Tokenizer, TokenizerError
from nemo_style_aligner.wording import common_start

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHANGE = "change the template (chat_template.jinja beside the tokenizer)"
_MOST_ANSWERS = 1000
_SPELT_BREAK = ascii(BREAK)[1:-1]
_PROBED_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Segment:
    """A piece of a text. ``is_target``: it is to be learnt."""

    text: str
    is_target: bool


class ChatRenderer:
    """Renders the conversations of data files.

    Args:
        tokenizer: its chat template renders them.
        markers: NeMo's, in place of the template; None: those that the model was trained with, without a template.

    Attributes:
        counts: "conversations", and those "divided" into several examples; "blank" answers; ("end", text) of an answer,
            if it is no stop token of the tokenizer; ("read as", role, other role).
    """

    def __init__(self, tokenizer: Tokenizer, markers: ChatPromptTokens | None = None) -> None:
        self.tokenizer = tokenizer
        self.markers = markers
        if markers is None and tokenizer.chat_template is None:
            self.markers = tokenizer.format.chat_prompt_tokens
        self.counts: Counts = Counter()
        self._openings: dict[str, str | None] = {}
        self._markers_end = None if self.markers is None else self._end_of_markers(self.markers)

    def examples(self, record: Record, conversation: Conversation) -> list[list[Segment]]:
        """A conversation as texts to learn, mostly one, each in segments of which none is empty.

        Each answer is learnt as it is rendered when it is the newest turn. Where a template renders it otherwise once
        others follow, as Qwen3's does with thoughts, the answers before and after are in different texts.

        Raises:
            DataError: a part of the conversation would be left out, or it cannot be rendered.
        """
        self.counts["conversations"] += 1
        self.counts["blank"] += sum(turn.is_target and turn.is_blank for turn in conversation.turns)
        if self.markers is not None:
            texts = [self._in_markers(record, conversation, self.markers)]
        else:
            texts = _InTemplate(record, conversation, self).examples()
        self.counts["divided"] += len(texts) > 1
        return [[segment for segment in segments if segment.text] for segments in texts]

    def prompt_and_answer(self, record: Record, conversation: Conversation) -> tuple[str, str]:
        """A conversation that ends with an answer: the text to be answered, and the answer with its end.

        Raises:
            DataError: as `examples`.
        """
        last = len(conversation.turns) - 1
        turns = [dataclasses.replace(turn, is_target=i == last) for i, turn in enumerate(conversation.turns)]
        (segments,) = self.examples(record, dataclasses.replace(conversation, turns=turns))
        (at,) = (i for i, segment in enumerate(segments) if segment.is_target)
        return "".join(segment.text for segment in segments[:at]), segments[at].text

    def prompt(self, record: Record, conversation: Conversation) -> str:
        """A conversation that waits for an answer, up to where the answer begins.

        Raises:
            DataError: it ends with the assistant; or as `examples`.
        """
        if conversation.turns[-1].kind == "assistant":
            record.fail("the conversation ends with the assistant: a prompt should end with the turn to be answered")
        self.counts["conversations"] += 1
        if self.markers is None:
            return _InTemplate(record, conversation, self).prompt()
        segments = self._in_markers(record, conversation, self.markers)
        text = "".join(segment.text for segment in segments)
        return f"{text}{self.markers.turn_start}Assistant{self.markers.end_of_name}"

    def as_text(self, conversation: Conversation) -> Conversation:
        """The conversation; where its messages name special tokens that are to be text, with `BREAK` in the names."""
        if not self.tokenizer.format.special_tokens_as_text:
            return conversation
        turns = []
        for turn in conversation.turns:
            texts = {key: self._without_markup(getattr(turn, key)) for key in ("content", "label", "extras")}
            turns.append(dataclasses.replace(turn, **texts))
        others = {key: self._without_markup(getattr(conversation, key)) for key in ("tools", "variables")}
        return dataclasses.replace(conversation, turns=turns, **others)

    def _without_markup(self, value: Any) -> Any:
        """A value of JSON, with `BREAK` in its texts."""
        if isinstance(value, list):
            return [self._without_markup(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._without_markup(item) for key, item in value.items()}
        if isinstance(value, str):
            for name in self._markup:
                while name in value:  # again where a name overlaps itself
                    value = value.replace(name, name[0] + BREAK + name[1:])
        return value

    @functools.cached_property
    def _markup(self) -> list[str]:
        """Special tokens, and what else begins or ends turns."""
        markers = () if self.markers is None else dataclasses.astuple(self.markers)
        others = [i for i in map(self.tokenizer.token_to_id, markers) if i is not None]
        ids = self.tokenizer.markup_ids.union(self.tokenizer.stop_ids, others)
        names = [self.tokenizer.ids_to_text([i], keep_special=True) for i in sorted(ids)]
        return [name for name in names if len(name) > 1]

    def continued(self, record: Record, conversation: Conversation) -> str:
        """A conversation that ends within an answer, up to there.

        Raises:
            DataError: its last turn is no answer's text; or as `examples`.
        """
        *before, last = conversation.turns
        if last.kind != "assistant" or last.content is None or last.extras.get("tool_calls"):
            record.fail("what is continued should be a text of the assistant's")
        if self.markers is None:
            return _InTemplate(record, conversation, self).continued()
        begun = self.as_text(dataclasses.replace(conversation, turns=[last])).turns[0].content
        return self.prompt(record, dataclasses.replace(conversation, turns=before)) + str(begun)

    def begins_with_bos(self, asked: bool | None) -> bool:
        """Whether conversations begin with BOS: in markers as texts do; a template decides, if nothing else does."""
        if self.markers is None and asked is None and self.tokenizer.format.add_bos is None:
            return False
        return self.tokenizer.begins_with_bos(asked, "add_bos")

    def log(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """Tell which roles were read as others, how many conversations were divided, and of markers."""
        if self.markers is not None and counts["conversations"]:
            logger.info(
                "the tokenizer has no chat template: conversations are rendered with model.data.chat_prompt_tokens, %s",
                json.dumps(dataclasses.asdict(self.markers)),
            )
        if roles := seen(counts, "read as"):
            read = ", ".join(f"{role!r} as {other!r}" for role, other in roles)
            files = ", ".join(map(str, paths))
            logger.info("%s: the turns' roles are read as the chat format's: %s", files, read)
        if counts["divided"]:
            logger.info(
                "the chat template renders answers otherwise once other turns follow: each is learnt as it is when it "
                "is the newest, so that %d conversations are several examples each",
                counts["divided"],
            )

    def role(self, turn: Turn) -> str:
        """The role of a turn in the chat template: its own if the template names it, else what it means."""
        role = turn.role.lower()
        if role == turn.kind or role in self._named_roles:
            return role
        self.counts["read as", turn.role, turn.kind] += 1
        return turn.kind

    @functools.cached_property
    def _named_roles(self) -> frozenset[str]:
        """What the template compares roles with, and other texts."""
        compared = re.findall(r"(?:==|!=|\bin\b)[^%}]*", self.tokenizer.chat_template or "")
        return frozenset(text for part in compared for text in re.findall(r"""["'](?=([^"']*)["'])""", part))

    def opening(self, role: str) -> str | None:
        """What ends an answer where the template leaves that to the next turn, of this role: up to its first token.

        None if that turn does not begin with a token of its own kind (GLM's ``<|user|>``, NeMo's ``<extra_id_1>``).
        """
        if role not in self._openings:
            self._openings[role] = self._find_opening(role)
        return self._openings[role]

    def _find_opening(self, role: str) -> str | None:
        asked, answered, follows = (
            {"role": role, "content": mark(i)} for i, role in enumerate(("user", "assistant", role))
        )
        try:
            before = self.tokenizer.apply_chat_template([asked, answered], False)
            after = self.tokenizer.apply_chat_template([asked, answered, follows], False)
        except TokenizerError:
            return None
        text = after[len(before) :].split(follows["content"])[0]
        if not after.startswith(before) or not text.strip():
            return None
        space, marker = text[: -len(text.lstrip())], text.lstrip()
        first = self.tokenizer.parts_to_ids(["x", marker])[1][0]
        token = self.tokenizer.ids_to_text([first], keep_special=True)
        is_marker = first in self.tokenizer.added_ids - {self.tokenizer.bos_id, self.tokenizer.unk_id}
        return space + token if is_marker and marker.startswith(token) else None

    def roles_known(self) -> list[str]:
        """Roles whose turns the template renders."""
        around = [[], ["user"], ["user", "assistant"]]
        return [role for role in _PROBED_ROLES if any(self._renders(role, before) for before in around)]

    def _renders(self, role: str, before: Sequence[str]) -> bool:
        messages = [{"role": name, "content": mark(i)} for i, name in enumerate([*before, role])]
        with contextlib.suppress(TokenizerError):
            return mark(len(before)) in self.tokenizer.apply_chat_template(messages, False)
        return False

    # ---- markers ----

    def _in_markers(self, record: Record, conversation: Conversation, tokens: ChatPromptTokens) -> list[Segment]:
        """Segments in NeMo's markers. Targets are an answer's text, the end of its turn and the start of the next one.

        Generation stops at the start of the next turn, which is therefore learnt, and added after a last answer, too.
        """
        _refuse_beyond_markers(record, conversation)
        conversation = self.as_text(conversation)
        turns, system = conversation.turns, ""
        if turns[0].kind == "system":
            system, turns = turns[0].content or "", turns[1:]
        segments = [Segment(f"{tokens.system_turn_start}System{tokens.end_of_name}{system}{tokens.end_of_turn}", False)]
        after_response = False
        for turn in turns:
            segments.append(Segment(tokens.turn_start, after_response))
            label = "" if turn.label is None else f"{tokens.label_start}{turn.label}{tokens.end_of_name}"
            segments.append(Segment(f"{self._name(turn)}{tokens.end_of_name}{label}", False))
            segments.append(Segment(f"{turn.content}{tokens.end_of_turn}", turn.is_target))
            after_response = turn.is_target
        if after_response:
            segments.append(Segment(tokens.turn_start, True))
        if self._markers_end is not None and any(segment.is_target for segment in segments):
            self.note_end(self._markers_end)
        # Neighbours of one kind are joined, so that each prompt is tokenized in one piece.
        kinds = itertools.groupby(segments, lambda segment: segment.is_target)
        return [Segment("".join(segment.text for segment in group), is_target) for is_target, group in kinds]

    def _name(self, turn: Turn) -> str:
        """A speaker's name: names in lower case are roles, others are the data's own, as NeMo's ``Guest``."""
        if not turn.role.islower():
            return turn.role
        if turn.role != turn.kind:
            self.counts["read as", turn.role, turn.kind.capitalize()] += 1
        return turn.kind.capitalize()

    def _end_of_markers(self, tokens: ChatPromptTokens) -> str:
        """What generation stops at: a special token, which leaves no text, or else the start of the next turn.

        Raises:
            DataError: an answer has no end.
        """
        special = self.tokenizer.markup_ids
        for text in (tokens.end_of_turn, tokens.turn_start):
            for i in self.tokenizer.text_to_ids(text):
                if i in special:
                    return self.tokenizer.ids_to_text([i], keep_special=True)
        if not tokens.turn_start.strip():
            raise DataError(
                "model.data.chat_prompt_tokens have nothing at which an answer ends: turn_start should be a text that "
                "answers do not have in them, such as NeMo's <extra_id_1>"
            )
        return tokens.turn_start

    def note_end(self, end: str) -> None:
        """Note what ends an answer."""
        if self.tokenizer.token_to_id(end) not in self.tokenizer.stop_ids:
            self.counts["end", end] += 1


def _refuse_beyond_markers(record: Record, conversation: Conversation) -> None:
    """Refuse what markers, which have places for texts only, would leave out."""
    found = {key for turn in conversation.turns for key in ("tool_calls", *REASONING_KEYS) if turn.extras.get(key)}
    if conversation.tools:
        found.add("tools")
    if found:
        record.fail(
            f"model.data.chat_prompt_tokens have no place for {', '.join(map(repr, sorted(found)))}: leave the line "
            "out, or use a tokenizer whose chat template has one, without chat_prompt_tokens"
        )


@dataclass
class _Text:
    """A text to learn, and the answers in it that are learnt: their turns, and from where to where."""

    text: str
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)


_Form = Literal["prompt", "whole", "continued", "marked", "without tools"]
"""With the generation prompt at the end; as they are; up to the last one's text; with marks, for the proof; as if there
were no tools."""


class _InTemplate:
    """A conversation in the tokenizer's chat template. An answer is what the template adds to its generation prompt."""

    def __init__(self, record: Record, conversation: Conversation, renderer: ChatRenderer) -> None:
        self._record, self._renderer, self._tokenizer = record, renderer, renderer.tokenizer
        conversation = renderer.as_text(conversation)
        self._turns = [turn for turn in conversation.turns if turn.content or turn.kind != "system"]
        self._messages = [_message(turn, renderer.role(turn)) for turn in self._turns]
        self._tools, self._variables = conversation.tools, conversation.variables
        self._rendered: dict[tuple[_Form, int], str] = {}  # by form, and how many of the first turns

    def examples(self) -> list[list[Segment]]:
        """See `ChatRenderer.examples`."""
        return [_segments(text) for text in self._try(self._texts)]

    def prompt(self) -> str:
        """See `ChatRenderer.prompt`."""
        return self._try(self._prompt)

    def continued(self) -> str:
        """See `ChatRenderer.continued`."""
        return self._try(self._continued)

    def _continued(self) -> str:
        last = len(self._turns) - 1
        self._prove(last + 1, {last: None})
        return self._text("continued", last + 1)

    def _prompt(self) -> str:
        self._prove(len(self._turns))
        return self._text("prompt", len(self._turns))

    def _try(self, render: Callable[[], T]) -> T:
        """What ``render`` returns; a template's refusal becomes a `DataError`."""
        try:
            return render()
        except TokenizerError as error:
            if any(message["content"] is None for message in self._messages):
                # Beside tool calls, some templates accept null, others only "".
                self._messages = [message | {"content": message["content"] or ""} for message in self._messages]
                self._rendered.clear()
                return self._try(render)
            first = next((turn for turn in self._turns if turn.kind != "system"), None)
            if first is not None and first.kind == "assistant":
                self._record.fail(
                    "the conversation opens with the assistant, and the chat template has no prompt for that: put a "
                    f"user's turn before it, or leave that turn out ({error})"
                )
            self._record.fail(str(error))

    def _texts(self) -> list[_Text]:
        targets = [i for i, turn in enumerate(self._turns) if turn.is_target]
        if len(targets) > _MOST_ANSWERS:  # before each, the conversation up to there is rendered
            self._record.fail(f"{len(targets):,} answers in one conversation are more than {_MOST_ANSWERS}: divide it")
        texts: list[_Text] = []
        for i in reversed(targets):
            start, answered = self._answer(i)
            if not texts or not texts[-1].text.startswith(answered):
                texts.append(_Text(answered))
            texts[-1].answers[i] = (start, len(answered))
        length = targets[-1] + 1 if targets else len(self._turns)
        # What follows the last answer is not learnt, but shown.
        whole = self._text("whole", len(self._turns))
        if not texts:
            texts.append(_Text(whole))
        elif whole.startswith(texts[0].text):
            texts[0].text, length = whole, len(self._turns)
        for text in texts:
            self._prove(length if text is texts[0] else max(text.answers) + 1, text.answers)
        return texts[::-1]

    def _answer(self, i: int) -> tuple[int, str]:
        """Where the answer of turn ``i`` begins, and the text up to its end."""
        turn = self._turns[i]
        if turn.kind != "assistant":
            self._record.fail(
                f"turn {i + 1} is from {turn.role!r} and is to be learnt, but the chat template prompts for the "
                'assistant\'s turns only: rename the speaker, or set its "weight" to 0'
            )
        prompt = self._text("prompt", i)
        answered = self._text("whole", i + 1)
        if not answered.startswith(prompt):
            same = len(common_start(prompt, answered))
            self._record.fail(
                f"the generation prompt of the tokenizer's chat template ends in {prompt[same:]!r}, but turn {i + 1}, "
                "rendered as an answer, does not have it: responses would be generated from prompts never trained "
                f"on. {_CHANGE.capitalize()} so that answers have it, or prompts do not"
            )
        text, end = self._ended(i, prompt, answered)
        self._renderer.note_end(end)
        return len(prompt), text

    def _ended(self, i: int, prompt: str, answered: str) -> tuple[str, str]:
        """The text up to the answer's end, and what ends it: the template's token, the next turn's first, or EOS."""
        tokenizer, text = self._tokenizer, answered.rstrip()
        is_call = "tool_calls" in self._messages[i]
        content = without_spaces(self._turns[i].content or "")
        if len(text) > len(prompt.rstrip()) and not (content and without_spaces(text).endswith(content)):
            last = tokenizer.last_id(text)
            if last in tokenizer.markup_ids or (content and last in tokenizer.added_ids and not is_call):
                return text, tokenizer.ids_to_text([last], keep_special=True)
        to_tool = is_call or (i + 1 < len(self._turns) and self._turns[i + 1].kind == "tool")
        opening = (self._renderer.opening("tool") if to_tool else None) or self._renderer.opening("user")
        if opening is not None:
            return answered + opening, opening.lstrip()
        eos = tokenizer.ids_to_text([tokenizer.eos_id], keep_special=True)
        return answered + eos, eos

    def _text(self, form: _Form, number: int) -> str:
        """The first turns, rendered. Raises TokenizerError, and DataError where the template spells `BREAK`."""
        if (form, number) not in self._rendered:
            messages: Sequence[Message] = self._messages[:number]
            if form == "marked":
                messages = [marked(message, i)[0] for i, message in enumerate(messages)]
            tools = None if form == "without tools" else self._tools
            self._rendered[form, number] = self._tokenizer.apply_chat_template(
                messages, form == "prompt", tools, self._variables, form == "continued"
            )
            if self._tokenizer.format.special_tokens_as_text and _SPELT_BREAK in self._rendered[form, number]:
                self._record.fail("names of special tokens cannot be text in what the chat template writes as ASCII")
        return self._rendered[form, number]

    # ---- the proof ----

    def _prove(self, length: int, answers: Mapping[int, Any] = types.MappingProxyType({})) -> None:
        """Raise unless the first ``length`` turns are rendered whole; of other answers, thoughts may be missing."""
        if self._tools and self._is_rendered_without_tools(length):
            self._fail_of_key("tools")
        rendered = MarkedText(self._text("marked", length))
        for i, turn in enumerate(self._turns[:length]):
            is_answer = i in answers
            visible = turn.content if is_answer or turn.kind != "assistant" else without_thoughts(turn.content)
            if visible is not None and not rendered.holds(visible, mark(i)):
                self._fail_of_content(i, rendered.holds(without_thoughts(turn.content) or "", mark(i)))
            parts = marked(self._messages[i], i)[1]
            lost = [key for key, value, mark in parts if not rendered.holds(value, mark)]
            thoughts = [key for key in REASONING_KEYS if self._messages[i].get(key)]
            if not is_answer or not set(thoughts) <= set(lost):  # of several names for thoughts one is enough
                lost = [key for key in lost if key not in thoughts]
            if lost:
                self._fail_of_key(lost[0], f" of turn {i + 1}")

    def _is_rendered_without_tools(self, length: int) -> bool:
        try:
            return self._text("without tools", length) == self._text("whole", length)
        except TokenizerError:
            return False  # the template needs them

    def _fail_of_content(self, i: int, is_partly_there: bool) -> NoReturn:
        if is_partly_there and self._turns[i].kind == "assistant":
            self._record.fail(
                f"the tokenizer's chat template leaves out part of the response, turn {i + 1} (some do so with "
                "what is before </think>): put reasoning under the key 'reasoning_content' if the template reads "
                f"that, or {_CHANGE}"
            )
        known, role = self._renderer.roles_known(), self._messages[i]["role"]
        places = "it knows the role, but not there" if role in known else f"it knows {', '.join(known) or 'no role'}"
        self._record.fail(
            f"the tokenizer's chat template leaves out the text of turn {i + 1}, whose role is "
            f"{self._turns[i].role!r}: {places}. Rename the role, put the text into another turn, or {_CHANGE}"
        )

    def _fail_of_key(self, key: str, where: str = "") -> NoReturn:
        self._record.fail(
            f"the tokenizer's chat template leaves out {key!r}{where}: change the template (chat_template.jinja beside "
            "the tokenizer), or the data"
        )


def _segments(text: _Text) -> list[Segment]:
    segments, position = [], 0
    for start, end in sorted(text.answers.values()):
        segments += [Segment(text.text[position:start], False), Segment(text.text[start:end], True)]
        position = end
    return [*segments, Segment(text.text[position:], False)]


def _message(turn: Turn, role: str) -> dict[str, Any]:
    """A turn in the form that chat templates take."""
    label = {} if turn.label is None else {"label": turn.label}
    return {"role": role, "content": turn.content, **label, **turn.extras}


def is_in_chat_template(prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether a prompt's text ends as the tokenizer's chat template ends prompts."""
    question = mark(0)
    try:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    except TokenizerError:
        return False
    ending = rendered.split(question)[-1].strip()
    return ending != "" and prompt.rstrip().endswith(ending)
