"""How much longer a tokenizer's normalizers and decoders can make a text, by what its ``tokenizer.json`` says.

Each takes the other's result: 22 that double a letter fill the memory, and the library has no limit.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

_MOST = 64  # times as long; known tokenizers put a character before a text, or two for one
_LONGEST_COMPATIBLE = (
    18  # characters that Unicode's compatibility forms, which sentencepiece's tables hold, have for one
)
_PARSER = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PROPERTY = re.compile(r"\\[pP]\{\^?\w+\}|\[\[:\^?\w+:\]\]")  # of Oniguruma's syntax, for one character


def check_growth(content: Mapping[str, Any]) -> None:
    """Refuse a ``tokenizer.json`` that may make texts much longer.

    Raises:
        ValueError: it may.
    """
    for section in ("normalizer", "decoder"):
        if (factor := _growth(content.get(section))) > _MOST:
            times = f"{factor:,.0f}" if factor < 1e6 else "millions of"
            raise ValueError(f"its {section} may make a text {times} times as long, {_MOST} times is the most")


def _growth(step: Any) -> float:
    """Times that a step, or a sequence of steps, may lengthen a text; what is malformed is the library's to refuse."""
    if not isinstance(step, Mapping):
        return 1.0
    if step.get("type") == "Sequence":
        steps = step.get("normalizers") or step.get("decoders")
        return math.prod(map(_growth, steps)) if isinstance(steps, list) else 1.0
    if isinstance(text := step.get("prepend"), str):
        return 1.0 + len(text)
    if isinstance(text := step.get("content"), str):
        return max(1.0, _of_replacement(step.get("pattern"), len(text)))
    if isinstance(table := step.get("precompiled_charsmap"), str):
        return max(1.0, _longest_in(table) / _LONGEST_COMPATIBLE)
    return 1.0


def _of_replacement(pattern: Any, length: int) -> float:
    if not isinstance(pattern, Mapping):
        return 1.0
    if isinstance(text := pattern.get("String"), str):
        return length / len(text) if text else 1.0 + length
    return length + float(_may_be_empty(str(pattern.get("Regex"))))


def _may_be_empty(pattern: str) -> bool:
    """Whether a regular expression may match between characters, where what it puts there is added."""
    try:
        return int(_PARSER.parse(_PROPERTY.sub("x", pattern)).getwidth()[0]) == 0
    except (re.error, RecursionError, OverflowError):
        return False


def _longest_in(table: str) -> int:
    """Characters of the longest text in a sentencepiece table: the size of a trie, the trie, texts that end with 0."""
    try:
        blob = base64.b64decode(table)
    except ValueError:
        return 0
    texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
    return max(len(text.decode("utf-8", "replace")) for text in texts)
