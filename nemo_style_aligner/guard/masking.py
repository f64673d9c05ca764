"""Passwords and other secrets in configs and texts, masked wherever they are shown or kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "(secret)"
"""What stands in a secret's place."""

# A name with such a part is a secret's; of tokens, which are mostly a tokenizer's, only some are.
_NAME = (
    r"(?:passw|passphrase|(?<![a-z])(?:pass|pwd)(?![a-z])|secret|credential|authorization|"
    r"(?:api|access|private|signing|encryption)[-_]?key|"
    r"(?:(?<![\w-])|(?:access|api|auth|bearer|refresh|session|hf|hub|wandb|user|id|x)[-_]?)token(?![\w-]))"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_NO_SECRETS = frozenset({"", "auto", "none", "null", "true", "false", MASK})
# Who calls, in a URL; a password may have characters that should have been escaped.
_URL = re.compile(r"(://)(?:[^/?#\s\"'<>]*@|[^/\s:@\"'<>\[]*:(?!\d+(?:[/?#\s]|$))[^\s@\"'<>]{0,256}@)")
_ASSIGNED = re.compile(
    rf"({_NAME}[\w-]{{0,40}}(?:=|[\"']\s*[:=]\s*(?=[\"'])))(\"[^\"]*\"|'[^']*'|[^\s&,;\"'$()\]}}]+)", re.IGNORECASE
)


def masked_text(text: str) -> str:
    """A text without users and passwords in URLs, and without values of secrets (``password=...``)."""
    return _ASSIGNED.sub(_assigned, _URL.sub(rf"\1{MASK}@", text))


def _assigned(found: re.Match[str]) -> str:
    return found[0] if found[2].strip("\"'").lower() in _NO_SECRETS else found[1] + MASK


def masked(value: Any, name: str = "") -> Any:
    """A config's value without secrets, containers throughout; of dotted names the last part counts."""
    is_secret = _SECRET_NAME.search(name.rpartition(".")[2]) is not None
    if isinstance(value, Mapping):
        return {masked(key): masked(item, name if is_secret else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if isinstance(value, bool) or value is None or not isinstance(value, str | int | float):
        return value
    if is_secret:
        return value if str(value).lower() in _NO_SECRETS else MASK
    return masked_text(value) if isinstance(value, str) else value
