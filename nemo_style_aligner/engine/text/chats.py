"""Conversations as data have them: OpenAI's and Anthropic's ``messages``, NeMo's and ShareGPT's ``conversations``.

And Alpaca's ``instruction``, ``input``, ``output`` (with LLaMA-Factory's ``system`` and ``history``), or a ``question``
and its ``answer``.

`chat_rendering` turns them into text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_style_aligner.engine.text.jsonl import Record
from nemo_style_aligner.engine.text.text_format import ChatPromptTokens as ChatPromptTokens
from nemo_style_aligner.guard.parsing import parse_json

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CONVERSATION_KEYS = ("messages", "conversations")
_ANSWERS = {"instruction": "output", "question": "answer"}
"""Keys of what is asked, and of what is said to it."""
_OF_PAIRS = frozenset(("text", "input", "output"))
_BESIDE_QUESTIONS = ("context", "passage", "history", "choices", "options")
_OTHER_FORMS = frozenset(("prompt", "query", "response", "completion", "chosen", "rejected"))

# Names of speakers in well-known data, and the roles that they have in chat templates.
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "chatbot", "bot", "bard", "bing", "claude", "model", "ai"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
_ROLES = ("system", "user", "assistant", "tool")
_OLD_KEYS = {"function_call": "tool_calls", "functions": "tools"}
_ENTRIES = {"tool_calls": "calls", "tools": "tools"}  # what the entries of a list are called; other lists have turns


@dataclass(frozen=True)
class Turn:
    """What one speaker says.

    Attributes:
        role: the speaker's name as the file has it.
        kind: system, user, assistant or tool, if the name means one of these; else the name in lower case.
        content: None where there are tool calls alone.
        is_target: it is to be learnt.
        label: NeMo's attribute string of a turn.
        extras: what else a chat template may read: "tool_calls", ...
    """

    role: str
    kind: str
    content: str | None
    is_target: bool
    label: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_blank(self) -> bool:
        """Whether nothing is said."""
        return not (self.content or "").strip() and not any(map(self.extras.get, ("tool_calls", *REASONING_KEYS)))


@dataclass(frozen=True)
class Conversation:
    """Turns, JSON schemas of the ``tools`` that the assistant may call, and further ``variables`` of the template."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def kind_of(role: str) -> str:
    """See `Turn`."""
    return _KINDS.get(role.lower(), role.lower())


def is_conversation(record: Record) -> bool:
    """Whether a line is a conversation."""
    return any(key in record.fields for key in CONVERSATION_KEYS) or is_instruction(record)


def is_instruction(record: Record) -> bool:
    """Whether a line is of Alpaca's form, with an ``output`` or without, or a ``question``."""
    return _asking_key(record) is not None


def _asking_key(record: Record) -> str | None:
    """The key of a line that asks without being a list of turns; None if there is none, or another form's key."""
    given = {key for key, value in record.fields.items() if value}  # data from tables have every key in every line
    if given & {*CONVERSATION_KEYS, *_OTHER_FORMS}:
        return None
    if "instruction" in given:
        return None if "question" in given else "instruction"
    return "question" if "question" in given and not given & _OF_PAIRS else None


_CHAT_JOBS, _PAIR_JOBS = "SFT, and as prompts PPO or GRPO", "DPO and reward models"


def form_of(record: Record) -> str:
    """The form of a line, in words for people."""
    return _form_and_jobs(record)[0]


def meant_for(record: Record) -> str:
    """What to add to a message that a job cannot read a line: which jobs could; nothing if none could."""
    form, jobs = _form_and_jobs(record)
    return f"; lines like this ({form}) are for {jobs}" if jobs else ""


def _form_and_jobs(record: Record) -> tuple[str, str]:
    keys = {key for key, value in record.fields.items() if value is not None}
    if "messages" in keys:
        return "OpenAI's messages", _CHAT_JOBS
    if "conversations" in keys:
        turns = record.fields["conversations"]
        names = {turn.get("from") for turn in turns if isinstance(turn, dict)} if isinstance(turns, list) else set()
        return "ShareGPT's conversations" if {"human", "gpt"} & names else "NeMo's conversations", _CHAT_JOBS
    if (asking := _asking_key(record)) is not None:
        form = "Alpaca's instruction, input and output" if asking == "instruction" else "question and answer"
        return form, _CHAT_JOBS
    known = (
        (("chosen", "rejected"), "prompt, chosen and rejected, as TRL has them", _PAIR_JOBS),
        (("chosen_response", "rejected_response"), "NeMo-Aligner's chosen_response and rejected_response", _PAIR_JOBS),
        (("completion", "label"), "TRL's prompt, completion and label", "KTO"),
        (("response", "preference"), "NeMo-Aligner's prompt, response and preference", "KTO"),
        (("text", "label"), "texts with labels", "reward models with model.reward_model_type=regression"),
        (("text",), "texts", "prompts, or two by two reward models"),
        (("input", "output"), "pairs of input and output", "SFT"),
    )
    unknown = f"keys {', '.join(sorted(keys))}", ""
    return next(((form, jobs) for needed, form, jobs in known if keys.issuperset(needed)), unknown)


def read_conversation(record: Record, *, as_prompt: bool = False) -> Conversation:
    """A line's conversation; ``as_prompt`` without the answer to a question, which then is the right one.

    Raises:
        DataError: the line is none.
    """
    system = system_turn(record)
    if is_instruction(record):
        return Conversation([*system, *_instruction_turns(record, as_prompt)])
    turns = read_messages(record, "messages") if "messages" in record.fields else _nemo_turns(record)
    return Conversation([*system, *turns], read_tools(record))


def read_messages(record: Record, key: str) -> list[Turn]:
    """The turns of a list of messages in OpenAI's form."""
    return [read_turn(message) for message in _list_of_objects(record, key)]


def system_turn(record: Record) -> list[Turn]:
    """The system prompt that a line has beside its turns, as in NeMo's and Anthropic's forms; empty without one."""
    system = record.text("system") if record.fields.get("system") else ""
    return [Turn("System", "system", system, is_target=False)] if system else []


def read_tools(record: Record) -> list[Mapping[str, Any]] | None:
    """The record's ``tools``; None where it has none."""
    _refuse_old_key(record, "functions")
    if not record.fields.get("tools"):
        return None
    record.check_characters("tools", json.dumps(record.fields["tools"], ensure_ascii=False))
    return [tool.fields for tool in _list_of_objects(record, "tools")]


def read_turn(message: Record) -> Turn:
    """A message of OpenAI's form, with all its keys, since a chat template may use any of them."""
    _refuse_old_key(message, "function_call")
    # Data from tables have every key in every line: null counts as absent.
    extras = {key: value for key, value in message.fields.items() if value is not None}
    if extras.get("tool_calls") == []:
        del extras["tool_calls"]
    for key in REASONING_KEYS:
        if key in extras:
            message.text(key)
    if "tool_calls" in extras:
        extras["tool_calls"] = [_tool_call(call) for call in _list_of_objects(message, "tool_calls")]
    is_learnt = _is_learnt(message)
    extras.pop("weight", None)
    content = extras.pop("content", None)
    if isinstance(content, list):
        content = _joined_parts(message, content)
    elif content is not None or "tool_calls" not in extras:
        content = message.text("content")
    role = message.text("role")
    del extras["role"]
    kind = kind_of(role)
    for key, value in extras.items():
        message.check_characters(key, json.dumps(value, ensure_ascii=False))
    return Turn(role, kind, content, kind == "assistant" and is_learnt, extras=extras)


def _joined_parts(message: Record, parts: list[Any]) -> str:
    """The text of a message that OpenAI's API has in parts, which are of text alone."""
    given = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(given) != len(parts) or not all(isinstance(part, str) for part in given):
        kinds = dict.fromkeys(str(part.get("type")) if isinstance(part, dict) else "no object" for part in parts)
        message.fail(f"'content' has parts of the types {', '.join(kinds)}: only parts of the type text are read")
    text = "".join(map(str, given))
    message.check_characters("content", text)
    return text


def _is_learnt(turn: Record) -> bool:
    weight = turn.fields.get("weight")
    if isinstance(weight, bool) or weight not in (None, 0, 1):
        turn.fail(f"'weight' should be 0 (not learnt) or 1, not {weight!r}")
    return weight != 0


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
        return {**call.fields, "arguments": parse_json(arguments, unique=True)}
    except ValueError:
        call.fail(f"'arguments' of the call of {call.fields['name']!r} should be an object, or one in JSON")


def _refuse_old_key(record: Record, key: str) -> None:
    if record.fields.get(key) is not None:
        record.fail(f"{key!r} is OpenAI's old form of {_OLD_KEYS[key]!r}, which chat templates do not know: rename it")


def _instruction_turns(record: Record, as_prompt: bool) -> list[Turn]:
    """The turns of Alpaca's form: instruction and input are one message; earlier ones are pairs in ``history``.

    Or of a question and its answer, which is left out ``as_prompt``.
    """
    asking = _asking_key(record) or "instruction"
    if asking == "question":
        for key in filter(record.fields.get, _BESIDE_QUESTIONS):
            record.fail(f"{key!r} would not be asked: put it into 'question', or give 'messages'")
    asked = "\n".join(record.text(key) for key in (asking, "input") if record.fields.get(key))
    history = record.fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        record.fail("'history' should be a list of pairs, of an instruction and its output")
    said = [*(text for pair in history for text in pair), asked]
    is_told = asking == "instruction" or not as_prompt
    if is_told and record.fields.get(_ANSWERS[asking]) is not None:
        said.append(record.text(_ANSWERS[asking]))
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return [read_turn(Record(record.path, record.line, message)) for message in messages]


def _nemo_turns(record: Record) -> list[Turn]:
    """The turns of NeMo's form, and of ShareGPT's, which differs in the speakers' names."""
    if record.fields.get("type") not in (None, "VALUE_TO_TEXT"):
        record.fail("'type' should be VALUE_TO_TEXT, where labels stand before the texts: no other is supported")
    masked = record.text("mask") if "mask" in record.fields else "User"
    entries = _list_of_objects(record, "conversations")
    names = [turn.text("from") for turn in entries]
    is_masked = {name: name.lower() == masked.lower() for name in names}
    if not any(is_masked.values()):
        is_masked = {name: kind_of(name) == kind_of(masked) for name in names}
    if not any(is_masked.values()):
        speakers = ", ".join(dict.fromkeys(names))
        record.fail(f'no turn is from {masked!r}, whose turns are not learnt: set "mask" to one of {speakers}')
    turns = []
    for name, turn in zip(names, entries, strict=True):
        label = turn.fields.get("label")
        if isinstance(label, str):
            label = turn.text("label")
        kind = kind_of(name)
        if is_masked[name] and kind not in _ROLES:
            kind = "user"
        is_target = not is_masked[name] and kind not in ("system", "tool") and _is_learnt(turn)
        turns.append(Turn(name, kind, turn.text("value"), is_target, None if label is None else str(label)))
    return turns


def _list_of_objects(record: Record, key: str) -> list[Record]:
    """The objects of a list, as records, so that errors about them name the line."""
    entries: list[Any] = record.require(key, list, f"a list of {_ENTRIES.get(key, 'turns')}")
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        record.fail(f"{key!r} should be a list of objects, one per {_ENTRIES.get(key, 'turns')[:-1]}")
    return [Record(record.path, record.line, entry) for entry in entries]
