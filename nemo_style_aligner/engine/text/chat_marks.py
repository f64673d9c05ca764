"""Marks behind the parts of a conversation, by which one sees in a rendering whether all parts are there, and whole."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from typing import Any

from nemo_style_aligner.engine.text.chats import REASONING_KEYS
from nemo_style_aligner.engine.text.tokenizer import Message

_MARK = re.compile("Qz7[a-z_0-9]*x[0-9]+k9Wv")


def mark(i: int, part: str = "") -> str:
    """A word that no data have, which stands behind a part of turn ``i``."""
    return f"Qz7{part}x{i}k9Wv"


def marked(message: Message, i: int) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """A message with marks behind its parts; and key, text and mark of each part beside its content."""
    result: dict[str, Any] = copy.deepcopy(dict(message))
    parts: list[tuple[str, str, str]] = []
    if result["content"] is not None:
        result["content"] += mark(i)

    def put(owner: dict[str, Any], key: str, name: str, part: str) -> None:
        parts.append((name, owner[key], mark(i, part)))
        owner[key] += mark(i, part)

    for key in ("label", *REASONING_KEYS):
        if isinstance(result.get(key), str) and result[key]:
            put(result, key, key, key)
    for n, call in enumerate(result.get("tool_calls") or ()):
        function = call.get("function", call)
        put(function, "name", "tool_calls", f"call{n}")
        if isinstance(function.get("arguments"), dict):
            function["arguments"]["more"] = ""
            put(function["arguments"], "more", "tool_calls", f"argument{n}")
    return result, parts


class MarkedText:
    """A rendering with marks, each of which is found at once: a conversation may have many turns."""

    def __init__(self, rendered: str) -> None:
        self._flat = without_spaces(rendered)
        self._places: dict[str, list[int]] = defaultdict(list)
        for found in _MARK.finditer(self._flat):
            self._places[found[0]].append(found.start())

    def holds(self, text: str, mark: str) -> bool:
        """Whether ``text`` stands before its mark, as it is or as JSON, but for white space."""
        forms = [without_spaces(form) for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])]
        return any(
            end >= len(form) and self._flat.startswith(form, end - len(form))
            for end in self._places.get(mark, ())
            for form in forms
        )


def without_thoughts(content: str | None) -> str | None:
    """What a template shows of an earlier answer: it may leave out what is before ``</think>``."""
    return None if content is None else content.rsplit("</think>", 1)[-1]


def without_spaces(text: str) -> str:
    """``text`` without white space, which templates change around its parts."""
    return "".join(text.split())
