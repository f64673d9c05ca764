"""Marks behind the parts of a conversation, by which one sees in a rendering whether all parts are there, and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_style_aligner.data.chats import REASONING_KEYS
from nemo_style_aligner.data.tokenizer import Message


def mark(i: int, part: str = "") -> str:
    """A word that no data have, which stands behind a part of turn ``i``."""
    return f"Qz7{part}x{i}k9Wv"


def marked_parts(message: Message, i: int) -> Iterator[tuple[str, str, str]]:
    """Key, text and mark of each part of a message beside its content."""
    for key in ("label", *REASONING_KEYS):
        if isinstance(message.get(key), str) and message[key]:
            yield key, message[key], mark(i, key)
    for n, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        yield "tool_calls", function["name"], mark(i, f"call{n}")
        if isinstance(function.get("arguments"), dict):
            yield "tool_calls", "", mark(i, f"argument{n}")


def marked(message: Message, i: int) -> dict[str, Any]:
    """A message with marks behind its parts."""
    marked = dict(message)
    if message["content"] is not None:
        marked["content"] = message["content"] + mark(i)
    for key in ("label", *REASONING_KEYS):
        if isinstance(message.get(key), str) and message[key]:
            marked[key] = message[key] + mark(i, key)
    if message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, i, n) for n, call in enumerate(message["tool_calls"])]
    return marked


def _marked_call(call: Mapping[str, Any], i: int, n: int) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _marked_call(call["function"], i, n)}
    marked = {**call, "name": call["name"] + mark(i, f"call{n}")}
    if isinstance(call.get("arguments"), dict):
        marked["arguments"] = {**call["arguments"], "more": mark(i, f"argument{n}")}
    return marked


def holds(flat: str, text: str, mark: str) -> bool:
    """Whether ``text`` stands before its mark, as it is or as JSON, in ``flat``, which has no white space."""
    return any(without_spaces(form) + mark in flat for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))


def without_thoughts(content: str | None) -> str | None:
    """What a template shows of an earlier answer: it may leave out what is before ``</think>``."""
    return None if content is None else content.rsplit("</think>", 1)[-1]


def without_spaces(text: str) -> str:
    """``text`` without white space, which templates change around its parts."""
    return "".join(text.split())
