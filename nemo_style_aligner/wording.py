"""Text as users type it and as messages show it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ESCAPED = re.compile(r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0-7]{1,3})")


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """The first of ``names``, and how many more there are, so that a message stays readable."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(number: int, plural: str) -> str:
    """``number`` of something: "1 step", "2 steps"."""
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"


def unescaped(text: str) -> str:
    r"""Replace escapes as they are typed on a command line, as NeMo does; other text stays as it is.

    These are ``\n``, ``\r``, ``\t``, ``\\``, ``\xHH``, ``\uHHHH`` and octal ones.
    """
    return _ESCAPED.sub(lambda match: match[0].encode("ascii").decode("unicode_escape"), text)
