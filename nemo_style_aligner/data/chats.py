"""Chats of supervised fine-tuning: from a line's conversation to pieces of text, each of which is learnt or not.

A conversation is in OpenAI's form (``messages``) or NeMo's (``conversations``), and is rendered by the tokenizer's chat
template or in NeMo's markup.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nemo_style_aligner.data.jsonl import Record
from nemo_style_aligner.data.tokenizer import Message, Tokenizer, TokenizerError
from nemo_style_aligner.parsing import parse_json
from nemo_style_aligner.wording import common_start

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OLD_KEYS = {"function_call": "tool_calls", "functions": "tools"}
_ENTRIES = {"tool_calls": "calls", "tools": "tools"}  # what the entries of a list are called; other lists have turns


@dataclass(frozen=True)
class ChatPromptTokens:
    """NeMo's chat markup (``model.data.chat_prompt_tokens``): strings around the parts of a conversation."""

    system_turn_start: str
    turn_start: str
    label_start: str
    end_of_turn: str
    end_of_name: str


@dataclass(frozen=True)
class Segment:
    """A piece of a chat. ``is_target``: it is to be learnt."""

    text: str
    is_target: bool


def chat_segments(record: Record, tokenizer: Tokenizer, markup: ChatPromptTokens | None) -> list[Segment]:
    """A line's conversation in segments, none of them empty.

    Args:
        record: a line with ``messages`` or ``conversations``.
        tokenizer: its chat template renders the conversation.
        markup: NeMo's, in place of the template.

    Raises:
        DataError: the line is no conversation, or rendering would leave out a part of it.
    """
    turns = _openai_turns(record) if "messages" in record.fields else _nemo_turns(record)
    if markup is not None:
        _refuse_beyond_markup(record, turns)
        segments = _render_markup(turns, markup)
    else:
        segments = _TemplateRendering(record, turns, tokenizer).segments()
    return [segment for segment in segments if segment.text]


@dataclass(frozen=True)
class _Turn:
    role: str  # as the file has it
    content: str | None  # None: tool calls alone
    is_target: bool
    label: str | None = None  # NeMo's attribute string of a turn
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else a chat template may read: "tool_calls", ...

    @property
    def message(self) -> dict[str, Any]:
        """The turn in the form that chat templates take."""
        return {"role": self.role.lower(), "content": self.content, **self.extras}


def _openai_turns(record: Record) -> list[_Turn]:
    _refuse_old_key(record, "functions")
    return [_openai_turn(message) for message in _list_of_objects(record, "messages")]


def _openai_turn(message: Record) -> _Turn:
    """Read a message with all its keys, since a chat template may use any of them."""
    _refuse_old_key(message, "function_call")
    # Data from tables have every key in every line: null counts as absent.
    extras = {key: value for key, value in message.fields.items() if value is not None}
    if extras.get("tool_calls") == []:
        del extras["tool_calls"]
    for key in _REASONING_KEYS:
        if key in extras:
            message.text(key)
    if "tool_calls" in extras:
        extras["tool_calls"] = [_tool_call(call) for call in _list_of_objects(message, "tool_calls")]
    weight = extras.pop("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        message.fail(f"'weight' should be 0 (not learnt) or 1, not {weight!r}")
    content = extras.pop("content", None)
    if content is not None or "tool_calls" not in extras:
        content = message.text("content")
    role = message.text("role")
    del extras["role"]
    for key, value in extras.items():
        message.check_characters(key, json.dumps(value, ensure_ascii=False))
    return _Turn(role, content, is_target=role == "assistant" and weight == 1, extras=extras)


def _tool_call(call: Record) -> dict[str, Any]:
    """A call as chat templates take it: with its arguments as an object, which OpenAI's format has as JSON text."""
    if "function" in call.fields:
        call.require("function", dict, "an object with 'name' and 'arguments'")
        function = Record(call.path, call.line, call.fields["function"])
        return {**call.fields, "function": _tool_call(function)}
    call.text("name")
    arguments = call.fields.get("arguments")
    if not isinstance(arguments, str):
        return dict(call.fields)
    try:
        return {**call.fields, "arguments": parse_json(arguments)}
    except ValueError:
        call.fail(f"'arguments' of the call of {call.fields['name']!r} should be an object, or one in JSON")


def _refuse_old_key(record: Record, key: str) -> None:
    if record.fields.get(key) is not None:
        record.fail(f"{key!r} is OpenAI's old form of {_OLD_KEYS[key]!r}, which chat templates do not know: rename it")


def _tools(record: Record) -> list[Mapping[str, Any]] | None:
    """The record's ``tools``; None where it has none."""
    if not record.fields.get("tools"):
        return None
    record.check_characters("tools", json.dumps(record.fields["tools"], ensure_ascii=False))
    return [tool.fields for tool in _list_of_objects(record, "tools")]


def _refuse_beyond_markup(record: Record, turns: Sequence[_Turn]) -> None:
    """Refuse what markup, which has places for texts only, would leave out: the model would learn to do without it."""
    found = {key for turn in turns for key in ("tool_calls", *_REASONING_KEYS) if turn.extras.get(key)}
    if _tools(record):
        found.add("tools")
    if found:
        record.fail(
            f"model.data.chat_prompt_tokens have no place for {', '.join(map(repr, sorted(found)))}: leave the line "
            "out, or use a tokenizer whose chat template has one, without chat_prompt_tokens"
        )


def _nemo_turns(record: Record) -> list[_Turn]:
    masked = record.text("mask") if "mask" in record.fields else "User"
    system = record.text("system") if record.fields.get("system") else ""
    turns = []
    for turn in _list_of_objects(record, "conversations"):
        label = turn.fields.get("label")
        if isinstance(label, str):
            label = turn.text("label")
        role = turn.text("from")
        is_target = role.lower() not in (masked.lower(), "system")  # rendered, they are the same
        turns.append(_Turn(role, turn.text("value"), is_target, None if label is None else str(label)))
    if not any(turn.role.lower() == masked.lower() for turn in turns):
        speakers = ", ".join(dict.fromkeys(turn.role for turn in turns))
        record.fail(f'no turn is from {masked!r}, whose turns are not learnt: set "mask" to one of {speakers}')
    return [_Turn("System", system, is_target=False), *turns] if system else turns


def _list_of_objects(record: Record, key: str) -> list[Record]:
    """The objects of a list, as records, so that errors about them name the line."""
    entries: list[Any] = record.require(key, list, f"a list of {_ENTRIES.get(key, 'turns')}")
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        record.fail(f"{key!r} should be a list of objects, one per {_ENTRIES.get(key, 'turns')[:-1]}")
    return [Record(record.path, record.line, entry) for entry in entries]


def _render_markup(turns: Sequence[_Turn], tokens: ChatPromptTokens) -> list[Segment]:
    """Render turns in NeMo's markup. Targets are a response's text, the end of its turn and the start of the next one.

    Generation stops at the start of the next turn, which is therefore learnt, and added after a last response, too.
    """
    system = ""
    if turns[0].role.lower() == "system":
        system, turns = turns[0].content or "", turns[1:]
    segments = [Segment(f"{tokens.system_turn_start}System{tokens.end_of_name}{system}{tokens.end_of_turn}", False)]
    after_response = False
    for turn in turns:
        # OpenAI's role names are lower case, NeMo's are capitalised.
        name = turn.role.capitalize() if turn.role.islower() else turn.role
        segments.append(Segment(tokens.turn_start, after_response))
        label = "" if turn.label is None else f"{tokens.label_start}{turn.label}{tokens.end_of_name}"
        segments.append(Segment(f"{name}{tokens.end_of_name}{label}", False))
        segments.append(Segment(f"{turn.content}{tokens.end_of_turn}", turn.is_target))
        after_response = turn.is_target
    if after_response:
        segments.append(Segment(tokens.turn_start, True))
    # Neighbours of one kind are joined, so that each prompt is tokenized in one piece.
    kinds = itertools.groupby(segments, lambda segment: segment.is_target)
    return [Segment("".join(segment.text for segment in group), is_target) for is_target, group in kinds]


class _TemplateRendering:
    """A chat in the tokenizer's chat template. A response's text is what the template adds to its generation prompt.

    Templates silently leave out what they have no place for, and the model would learn to answer without it. Therefore
    tools, tool calls, responses and their reasoning are looked for in what was rendered.
    """

    def __init__(self, record: Record, turns: Sequence[_Turn], tokenizer: Tokenizer) -> None:
        self._record, self._tokenizer = record, tokenizer
        self._turns = [turn for turn in turns if turn.content or turn.role.lower() != "system"]
        self._messages = [turn.message for turn in self._turns]
        self._tools = _tools(record)

    def segments(self) -> list[Segment]:
        """The chat in segments, each of which is learnt or not."""
        if any(message["content"] is None for message in self._messages):
            with contextlib.suppress(TokenizerError):
                return self._segments()
            # Beside tool calls, some templates accept null, others only "".
            self._messages = [message | {"content": message["content"] or ""} for message in self._messages]
        try:
            return self._segments()
        except TokenizerError as error:
            self._record.fail(str(error))

    def _segments(self) -> list[Segment]:
        whole = self._render(self._messages)
        if self._tools and self._is_rendered(self._messages, None, whole):
            self._fail_of_key("tools")
        segments, position = [], 0
        for i, turn in enumerate(self._turns):
            if "tool_calls" in turn.extras:
                self._find_key(i, ("tool_calls",), len(self._turns), whole)
            if not turn.is_target:
                continue
            prompt = self._render(self._messages[:i], add_generation_prompt=True)
            answered = self._render(self._messages[: i + 1])
            if not whole.startswith(answered):
                self._record.fail(
                    f"the tokenizer's chat template renders turn {i + 1} differently when it is not the last, so "
                    'its place cannot be found: cut the conversation after one response, give the others "weight": 0 '
                    "(of 'messages'), or change the template"
                )
            if not answered.startswith(prompt):
                end = prompt[len(common_start(prompt, answered)) :]
                self._record.fail(
                    f"the generation prompt of the tokenizer's chat template ends in {end!r}, but turn {i + 1}, "
                    "rendered as an answer, does not have it: responses would be generated from prompts never trained "
                    "on. Change the template (chat_template.jinja beside the tokenizer) so that answers have it, or "
                    "prompts do not"
                )
            self._find_response(i, prompt, answered)
            segments += [
                Segment(whole[position : len(prompt)], False),
                Segment(whole[len(prompt) : len(answered)], True),
            ]
            position = len(answered)
        return [*segments, Segment(whole[position:], False)]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, self._tools)

    def _find_response(self, i: int, prompt: str, answered: str) -> None:
        """Raise if the template leaves out content or reasoning of turn ``i``, a target."""
        content = _without_spaces(self._turns[i].content or "")
        if content not in _without_spaces(answered[len(prompt) :]):
            # The generation prompt may include the response's first characters, such as "<think>".
            before = common_start(self._render(self._messages[:i]), prompt)
            if content not in _without_spaces(answered[len(before) :]):
                self._record.fail(
                    f"the tokenizer's chat template leaves out part of the response, turn {i + 1} (some do so with "
                    "what is before </think>): put reasoning under the key 'reasoning_content' if the template reads "
                    "that, or change the template (chat_template.jinja beside the tokenizer)"
                )
        self._find_key(i, _REASONING_KEYS, i + 1, answered)

    def _find_key(self, i: int, keys: tuple[str, ...], length: int, rendered: str) -> None:
        """Raise if ``rendered``, the first ``length`` turns, is the same without these keys of turn ``i``."""
        present = [key for key in keys if self._messages[i].get(key)]
        if not present:
            return
        without = {key: value for key, value in self._messages[i].items() if key not in present}
        messages = self._messages[:length]
        messages[i] = without
        if self._is_rendered(messages, self._tools, rendered):
            self._fail_of_key(present[0], f" of turn {i + 1}")

    def _is_rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, rendered: str
    ) -> bool:
        """Whether ``messages`` and ``tools``, with something removed, still give ``rendered``."""
        try:
            return self._tokenizer.apply_chat_template(messages, False, tools) == rendered
        except TokenizerError:
            return False  # the template needs what was removed

    def _fail_of_key(self, key: str, where: str = "") -> NoReturn:
        self._record.fail(
            f"the tokenizer's chat template leaves out {key!r}{where}: change the template (chat_template.jinja beside "
            "the tokenizer), or the data"
        )


def _without_spaces(text: str) -> str:
    """``text`` without white space, which templates change around the parts of a response."""
    return "".join(text.split())
