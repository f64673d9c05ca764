"""Text as users type it and as messages show it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

_ESCAPED = re.compile(r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0-7]{1,3})")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_FILE = re.compile(r"\.(nemo|gguf|model|jsonl?|py|yaml)$")


def some_of(names: Sequence[str], shown: int = 5) -> str:
    """The first of ``names``, and how many more there are, so that a message stays readable."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(number: int, plural: str) -> str:
    """``number`` of something: "1 step", "2 steps"."""
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Short names of models, or other files: of each path the last part in which all differ, without ``.nemo``."""
    for parts in zip(*(path.absolute().parts[::-1] for path in paths), strict=False):
        if len(set(parts)) == len(paths):
            return [part.removesuffix(".nemo") for part in parts]
    return [str(path) for path in paths]


def download_hint(path: str) -> str:
    """What to add to a message that nothing is at ``path``: how to get it, if that is a model's name on the Hub."""
    path = path.removeprefix(f"{os.getcwd()}/")  # a job's paths are absolute
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) or _FILE.search(path):
        return ""
    return (
        "; nothing is downloaded: if this is a name on the Hugging Face Hub, run "
        f"`hf download {path} --local-dir {path.split('/')[1]}` first"
    )


def size_of(num_bytes: float) -> str:
    """A number of bytes for people: "1.8 GB", "25 MB"."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 0.5e9 else f"{num_bytes / 1e6:,.3g} MB"


def duration(seconds: float) -> str:
    """Seconds for people: "90 s", "3 min", "3 h 1 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def common_start(one: str, other: str) -> str:
    """The longest common prefix of two texts."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in pairs)


def spelt(text: str) -> str:
    """Text with its control characters, which a terminal would obey, spelt out; tabs and line feeds stay."""
    return _CONTROL.sub(lambda character: f"\\x{ord(character[0]):02x}", text)


def unescaped(text: str) -> str:
    r"""Replace escapes as they are typed on a command line, as NeMo does; other text stays as it is.

    These are ``\n``, ``\r``, ``\t``, ``\\``, ``\xHH``, ``\uHHHH`` and octal ones.
    """
    return _ESCAPED.sub(lambda match: match[0].encode("ascii").decode("unicode_escape"), text)
