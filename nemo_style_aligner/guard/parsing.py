"""JSON and YAML of files that may be anybody's: bounded in size, depth and what aliases expand to; plain data only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import IO, Any

import yaml

MAX_BYTES = 64 << 20
"""Of a file of JSON; the largest tokenizers have half of it."""

_MAX_DEPTH = 100  # of lists and objects within each other: Python's own recursion ends at 1000 calls
_MAX_DIGITS = 100  # of YAML's numbers, some of which (1:59:59) take time that grows as the square
_MAX_YAML = 256 << 10  # characters, which take two seconds; a model's config has some thousands
_MAX_YAML_NODES = 20_000
_MAX_MESSAGE = 300  # characters of PyYAML's errors, which quote the text
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NO_PLAIN_DATA = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("binary", "omap", "pairs", "set", "timestamp"))


def read_bytes(stream: IO[bytes], what: str, limit: int = MAX_BYTES) -> bytes:
    """The rest of a stream.

    Args:
        what: the file's name, for the message.
        limit: bytes that it may have.

    Raises:
        ValueError: it has more.
    """
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{what} has more than the {limit:,} bytes that such a file may have")
    return content


def parse_json(text: str, *, unique: bool = False) -> Any:
    """As `json.loads`, within limits.

    Args:
        unique: refuse objects with a key twice, of which `json.loads` silently keeps the last.

    Raises:
        ValueError: not JSON (`json.JSONDecodeError`); more than 100 levels of lists and objects; a number of thousands
            of digits.
    """
    try:
        # Python itself refuses numbers of more than 4300 digits.
        content = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deeper(content, _MAX_DEPTH):
        raise _too_deep()
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice[:_MAX_MESSAGE]!r} twice")
    return content


def read_json(path: Path) -> Any:
    """`parse_json` of a file in UTF-8 of at most `MAX_BYTES`; its ValueError does not name the file."""
    with path.open("rb") as stream:
        return parse_json(read_bytes(stream, "the file").decode("utf-8"))


def _too_deep() -> ValueError:
    return ValueError(f"more than {_MAX_DEPTH} lists and objects within each other")


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(_is_deeper(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))


def parse_yaml(text: str) -> Any:
    """Plain YAML: mappings with simple keys, lists, texts, numbers, booleans and null; dates are texts.

    Raises:
        ValueError: not such YAML; more than 256 Ki characters, 100 levels or 20,000 values, where each alias counts as
            all that it stands for.
    """
    if len(text) > _MAX_YAML:
        raise ValueError(f"more than {_MAX_YAML:,} characters")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error)[:_MAX_MESSAGE].split())) from error


class _Loader(yaml.SafeLoader):
    """Counts nodes while they are composed, before anything is made of them."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._size_of: dict[int, int] = {}  # nodes below each finished one, by its identity

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        before, self._depth = self._nodes, self._depth + 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} lists and mappings within each other")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            if id(node) not in self._size_of:
                raise ValueError("an alias stands for something that it is in itself")
            self._nodes += self._size_of[id(node)]
        else:
            self._nodes += 1
            self._size_of[id(node)] = self._nodes - before
        if self._nodes > _MAX_YAML_NODES:
            raise ValueError(f"more than {_MAX_YAML_NODES:,} values, with those that aliases stand for")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(node.value)} characters")
        if node.tag in _NO_PLAIN_DATA:
            raise ValueError(f"{node.tag.rpartition(':')[2]} is no kind of plain data")
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if others := [key for key in mapping if not isinstance(key, str | int)]:
            raise ValueError(f"the key {others[0]!r} is neither text nor a whole number")
        return mapping
