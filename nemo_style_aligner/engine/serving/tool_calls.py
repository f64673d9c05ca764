"""Calls of tools, in the forms in which families of models write them into their responses.

The library `renderers` has more forms, but renders conversations itself instead of by the model's chat template, and
reads whole responses: streams would need these readers all the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_style_aligner.engine.grammar import with_options
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError

_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_JSON = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_PROBE = ("probe_of_calls", {"key": "a 1"})
_QUESTION = "Does it answer?"


@dataclass(frozen=True)
class Call:
    """A call of a tool: its name, and its arguments as a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """How calls are written: JSON objects with name and arguments, or a list of some, after ``start``.

    Attributes:
        end: what follows the JSON.
        behind_name: what stands between a call's name and its arguments, where the JSON is of these alone.
        is_whole: calls, with semicolons between them, are all of a response, with ``start`` or without.
        is_list: the template shows the JSON as a list.
        key: of the arguments, as the template shows them.
    """

    start: str
    end: str = ""
    behind_name: str = ""
    is_whole: bool = False
    is_list: bool = False
    key: str = "arguments"

    def begins_at(self, text: str, may_be_whole: bool) -> int:
        """Where calls may begin, or -1."""
        if not self.is_whole:
            return text.find(self.start)
        return 0 if may_be_whole and text.lstrip().startswith(("{", self.start)) else -1

    def read(self, text: str) -> tuple[list[Call], int] | None:
        """The calls with which ``text`` begins, and where they end; None: there are none, or not all of one yet."""
        if (self.end or "}") not in text:
            return None
        try:
            at = _after_space(text, 0)
            calls, at = self._read_block(text, at + len(self.start) * text.startswith(self.start, at))
            while self.is_whole and text.startswith(";", at):
                more, at = self._read_block(text, at + 1)
                calls += more
            return None if self.is_whole and at < len(text) else (calls, at)
        except (ValueError, RecursionError):
            return None

    def lark(
        self, schemas: Mapping[str, Mapping[str, Any]], marker: Callable[[str], str], *, several: bool, thinks: bool
    ) -> str:
        """How calls of functions are written, as rules in Lark, of which ``calls`` is that of one or more.

        Args:
            schemas: of the arguments, by the functions' names.
            marker: says ``start`` or another mark in Lark: as text or as a token.
            several: there may be more than one.
            thinks: they stand behind the rest of a thought.
        """
        rules = [r"space: /[ \n]{0,4}/", "call: " + " | ".join(f"call_{number}" for number in range(len(schemas)))]
        for number, (name, schema) in enumerate(schemas.items()):
            rules.append(f"call_{number}: {self._lark_of_call(name, f'arguments_{number}', marker)}")
            rules.append(f"arguments_{number}: %json {json.dumps(with_options({'type': 'object', **schema}))}")
        held = f"{quoted('[')} space {_many('call', several, quoted(','))} space {quoted(']')}"
        body = [marker(self.start), "" if self.behind_name else "space", held if self.is_list else "call"]
        rules.append(" ".join(["block:", *body, f"space {marker(self.end)}" if self.end else ""]))
        end = marker(_END_OF_THOUGHT)
        rules.append(f"thought[suffix={end}]: /(.|\\n)*/" if end.startswith('"') else f"thought: /(.|\\n)*/ {end}")
        calls = _many("call", several, quoted(";")) if self.is_whole else _many("block", several and not self.is_list)
        return "\n".join([*rules, f"calls: {'thought space ' * thinks}{calls}"])

    def _lark_of_call(self, name: str, arguments: str, marker: Callable[[str], str]) -> str:
        if self.behind_name:
            return f"{quoted(name)} {marker(self.behind_name)} {arguments}"
        parts = ("{", '"name"', ":", json.dumps(name, ensure_ascii=False), ",", f'"{self.key}"', ":")
        return " space ".join([*map(quoted, parts), arguments, quoted("}")])

    def _read_block(self, text: str, at: int) -> tuple[list[Call], int]:
        name = None
        if self.behind_name:
            start, at = at, text.index(self.behind_name, at) + len(self.behind_name)
            name = text[start : at - len(self.behind_name)].strip()
        found, at = _JSON.raw_decode(text, _after_space(text, at))
        given = found if isinstance(found, list) else [found]
        calls = [_call(item if name is None else {"name": name, "arguments": item}) for item in given]
        at = _after_space(text, at)
        if not calls or not text.startswith(self.end, at):
            raise ValueError("no call, or one without an end")
        return calls, at + len(self.end)


_FORMS = (
    CallForm("<tool_call>", "</tool_call>"),  # Hermes, Qwen
    CallForm("[TOOL_CALLS]"),  # Mistral
    CallForm("[TOOL_CALLS]", behind_name="[ARGS]"),  # Mistral since 2025
    CallForm("<|python_tag|>", is_whole=True),  # Llama 3
)


def _many(rule: str, several: bool, between: str = "") -> str:
    """One ``rule`` in Lark, or one or more of it."""
    return f"{rule} ({between} space {rule})*" if several else rule


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def thinks(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of a thought."""
    return prompt.rstrip().endswith(_THOUGHT)


def find_form(tokenizer: Tokenizer) -> CallForm | None:
    """The form in which the chat template shows calls; None: it shows none, or in another form."""
    name, arguments = _PROBE
    call = {"type": "function", "id": "probe0001", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": _QUESTION}
    schema = {"type": "object", "properties": {key: {"type": "string", "description": key} for key in arguments}}
    tools = [{"type": "function", "function": {"name": name, "description": name, "parameters": schema}}]
    try:
        prompt = tokenizer.apply_chat_template([asked], tools=tools)
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = tokenizer.apply_chat_template([asked, called], False, tools=tools)
    except TokenizerError:
        return None
    answer = whole[len(prompt) :] if whole.startswith(prompt) else whole.rpartition(_QUESTION)[2]
    found = next((form for form in _FORMS if _reads_probe(form, answer)), None)
    if found is None:
        return None
    is_list = not found.behind_name and answer.partition(found.start)[2].lstrip().startswith("[")
    return dataclasses.replace(found, is_list=is_list, key="parameters" if '"parameters"' in answer else "arguments")


def _reads_probe(form: CallForm, answer: str) -> bool:
    """Whether the call of the probe is read from ``answer``, in which the end of its turn follows it."""
    at = form.begins_at(answer, may_be_whole=True)
    ends = range(len(answer), at, -1) if at >= 0 else ()
    found = next((found for end in ends if (found := form.read(answer[at:end].rstrip())) is not None), ([], 0))
    return [(call.name, json.loads(call.arguments)) for call in found[0]] == [_PROBE]


class CallReader:
    """Tells the calls of a response from its text, as that comes. What cannot be read as a call is text.

    Args:
        names: of the tools that there are: other calls are text.
        begun: the prompt's end, which may have begun a thought. Calls within thoughts are text.
        reads_one: the response ends with its first call.
    """

    def __init__(self, form: CallForm, names: Collection[str], begun: str, *, reads_one: bool) -> None:
        self._form, self._names, self._reads_one = form, names, reads_one
        self._held = ""
        self._thinks = thinks(begun)
        self._is_begun = self._is_over = self._follows_call = False
        self.num_calls = 0

    def add(self, text: str, is_ended: bool) -> tuple[str, list[Call]]:
        """Take the text that is new; return what is certainly text, and the calls that are complete."""
        self._held += text
        if self._follows_call:
            self._held = self._held.lstrip()
            self._follows_call = not self._held
        said, calls = "", list[Call]()
        while self._held and not self._is_over:
            before = len(self._held)
            found = self._next(is_ended)
            if isinstance(found, str):
                said += found
            else:
                calls += found
            if len(self._held) == before:
                break
        self.num_calls += len(calls)
        return said, calls

    def _next(self, is_ended: bool) -> str | list[Call]:
        """The text or the calls with which `_held` begins; an empty text if that is not certain."""
        held, end = self._held, len(self._held)
        if self._thinks:
            at = held.find(_END_OF_THOUGHT)
            self._thinks = at < 0
            return self._take(
                end - _partly(held, _END_OF_THOUGHT) * (not is_ended) if at < 0 else at + len(_END_OF_THOUGHT)
            )
        if not self._is_begun and held.lstrip().startswith(_THOUGHT):
            self._thinks = True
            return self._take(held.index(_THOUGHT) + len(_THOUGHT))
        at = self._form.begins_at(held, not self._is_begun)
        if at > 0 and held[:at].strip():
            return self._take(len(held[:at].rstrip()))
        if at >= 0:
            return self._read(is_ended, at)
        markers = (self._form.start,) if self._is_begun else (self._form.start, _THOUGHT)
        certain = end - max(_partly(held, marker) for marker in markers)
        return self._take(end if is_ended else len(held[:certain].rstrip()))

    def _read(self, is_ended: bool, at: int) -> str | list[Call]:
        """The calls that begin at the place ``at`` of `_held`, behind white space alone."""
        found = None if self._form.is_whole and not is_ended else self._form.read(self._held[at:])
        if found is None:
            return self._take(max(at + len(self._form.start), 1)) if is_ended else ""
        calls, length = found
        if not {call.name for call in calls} <= set(self._names):
            return self._take(at + length)
        self._held = self._held[at + length :].lstrip()
        self._is_begun, self._follows_call, self._is_over = True, not self._held, self._reads_one
        return calls[:1] if self._reads_one else calls

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self._is_begun |= bool(taken.strip()) and not self._thinks
        return taken


def _call(item: Any) -> Call:
    """A call from its JSON; ValueError if it is none."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError("a call should be an object with a name")
    arguments = item.get("arguments", item.get("parameters"))
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments should be an object")
    return Call(item["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _partly(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
