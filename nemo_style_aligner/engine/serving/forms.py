"""What requests say about the form of an answer, as a grammar: JSON schemas, choices, regular expressions, calls."""

from __future__ import annotations

import bisect
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nemo_style_aligner.engine.contract import GrammarError
from nemo_style_aligner.engine.grammar import (
    LONGEST_GRAMMAR,
    Grammars,
    json_grammar,
    lark_grammar,
)
from nemo_style_aligner.engine.serving.fields import Fields, RequestError
from nemo_style_aligner.engine.text.tokenizer import TokenizerError
from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.guard.wanted import wanted

Schema = dict[str, Any]
_ANY_OBJECT: Schema = {"type": "object"}
# Where schemas stand in a schema. Those that others refer to come last.
_OF_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_OF_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


class FormReader:
    """Reads the fields that say what form an answer has.

    Args:
        grammars: of the engine that answers.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def grammar(self, fields: Fields) -> tuple[str, str | None]:
        """The field that asks for a form, and the grammar that it asks for; None: any answer will do."""
        found = [*self._response_format(fields), *self._vllms(fields)]
        if len(found) > 1:
            names = " and ".join(f"'{name}'" for name, _ in found)
            raise RequestError(400, f"{names} both say what form the answer has: leave one out", found[0][0])
        return found[0] if found else ("", None)

    def with_calls(self, calls: str, answer: str | None, schemas: Mapping[int, Schema]) -> str:
        """The grammar of responses that are calls or, if it is not None, an answer.

        Args:
            calls: rules in Lark, of which ``calls`` is theirs.
            answer: a grammar.
            schemas: of the tools that they have, by their numbers; see which fails, if one does.
        """
        lark = f"start: calls\n{calls}" if answer is None else f"start: calls | @answer\n{calls}"
        try:
            return self._checked(lark_grammar(lark) if answer is None else joined(lark, answer), "tools")
        except RequestError:
            for number, schema in schemas.items():
                self._checked_schema(schema, f"tools/{number}/function/parameters", "tools")
            raise

    def _response_format(self, fields: Fields) -> Iterator[tuple[str, str]]:
        name = "response_format"
        given = fields.take(name, {"type": "text"}, "an object with a type", _has_type)
        kind, more = given["type"], given.keys() - {"type"}
        if kind == "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise RequestError(400, f"'{name}/json_schema/schema' should be an object", name)
            unknown = (more - {"json_schema"}) | (inner.keys() - {"name", "description", "schema", "strict"})
            schema = inner["schema"]
        elif kind in ("json_object", "text"):
            unknown, schema = more, _ANY_OBJECT
        else:
            message = f"'{name}' has the types text, json_object and json_schema, not {json.dumps(kind)[:100]}"
            raise RequestError(400, message, name)
        if unknown:
            raise RequestError(400, f"'{name}' has fields that are unknown here: {sorted(unknown)}"[:300], name)
        if kind != "text":
            yield name, self._checked_schema(schema, f"{name}/json_schema/schema", name)

    def _vllms(self, fields: Fields) -> Iterator[tuple[str, str]]:
        """``structured_outputs``, and the fields that had its contents formerly."""
        name, kinds = "structured_outputs", ("json", "regex", "choice", "grammar", "json_object")
        given = fields.take(name, {}, "an object", lambda value: isinstance(value, dict))
        asked = {kind: value for kind, value in given.items() if value not in (None, False)}
        if unknown := asked.keys() - set(kinds):
            raise RequestError(400, f"'{name}/{min(unknown)}' is unknown, or not supported here", name)
        for kind, value in asked.items():
            yield name, self._of_kind(kind, value, name)
        for kind in kinds[:-1]:
            old = f"guided_{kind}"
            if (value := fields.take(old, None, "", lambda _: True)) is not None:
                yield old, self._of_kind(kind, value, old)

    def _of_kind(self, kind: str, value: Any, name: str) -> str:
        """The grammar of what vLLM's field ``kind`` asks for by ``value``, which is in the field ``name``."""
        from llguidance import grammar_from

        if kind == "json_object":
            value, kind = _ANY_OBJECT, "json"
        if kind == "json":
            value = _parsed(value, name) if isinstance(value, str) else value
            return self._checked_schema(value, name, name)
        if kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(i, str) and i for i in value):
                raise RequestError(400, f"'{name}' should have a list of texts to choose from", name)
            value = json.dumps(value)
        if not isinstance(value, str) or not value:
            raise RequestError(400, f"'{name}' should have a text that is not empty", name)
        _check_length(value, name)
        try:
            grammar = grammar_from(kind, value)  # type: ignore[arg-type]  # a part of those kinds
            return self._checked(grammar if grammar.startswith("{") else lark_grammar(grammar), name)
        except ValueError as error:
            raise RequestError(400, f"'{name}': {error}", name) from error

    def _checked(self, grammar: str, name: str) -> str:
        """``grammar``, which can be compiled; a `RequestError` about the field ``name`` if not."""
        _check_length(grammar, name)
        wanted.get()()
        try:
            self._grammars.matcher(grammar)
        except (GrammarError, TokenizerError) as error:
            raise RequestError(400, f"'{name}' cannot be used: {error}", name) from error
        return grammar

    def _checked_schema(self, schema: Any, place: str, name: str) -> str:
        """The grammar of a schema, which stands at ``place``; a `RequestError` that says where it fails."""
        if not isinstance(schema, dict):
            raise RequestError(400, f"'{place}' should be a JSON schema, an object", name)
        _check_length(json.dumps(schema), name)
        if "x-guidance" in schema:
            raise RequestError(400, f"'{place}/x-guidance' is not supported here: leave it out", name)

        def error_of(candidate: Schema) -> str | None:
            wanted.get()()
            try:
                self._grammars.matcher(json_grammar(candidate))
            except (GrammarError, TokenizerError) as error:
                return str(error)
            return None

        if error_of(schema) is not None:
            pointer, error = failing_place(schema, error_of)
            raise RequestError(400, f"'{place}{pointer}' cannot be used: {error}", name)
        return json_grammar(schema)


def joined(lark: str, grammar: str) -> str:
    """The grammar of responses that are as ``lark`` says or, where it says ``@answer``, as ``grammar`` does."""
    (answer,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, answer | {"name": "answer"}]})


def failing_place(schema: Schema, error_of: Callable[[Schema], str | None]) -> tuple[str, str | None]:
    """The JSON pointer of the innermost schema within ``schema`` that has an error, and which.

    Schemas beside it are replaced by one to which anything conforms; a few tries find it among many.
    """
    schema = copy.deepcopy(schema)
    pointer, inner = "", schema
    while places := list(_inner_places(inner)):
        schemas = [holder[key] for _, holder, key in places]

        def fails_with(number: int, places: Any = places, schemas: Any = schemas) -> bool:
            """Whether there is an error with the first so many of the schemas, and others empty."""
            for n, (_, holder, key) in enumerate(places):
                holder[key] = schemas[n] if n < number else {}
            return error_of(schema) is not None

        number = bisect.bisect_left(range(len(places) + 1), True, key=fails_with)
        if not fails_with(number) or number == 0:
            break
        path, holder, key = places[number - 1]
        pointer, inner = pointer + path, holder[key]
    return pointer, error_of(schema)


def _inner_places(schema: Schema) -> Iterator[tuple[str, Any, Any]]:
    """The schemas right within a schema: pointer, what holds it, and its key there."""
    for name in (*_OF_ONE, *_OF_LISTS, *_OF_NAMES):
        holder: Any = schema.get(name)
        if name in _OF_ONE and isinstance(holder, dict):
            yield f"/{name}", schema, name
        keys: Iterable[Any] = ()
        if name in _OF_LISTS and isinstance(holder, list):
            keys = range(len(holder))
        elif name in _OF_NAMES and isinstance(holder, dict):
            keys = holder
        for key in keys:
            if isinstance(holder[key], dict):
                yield f"/{name}/{str(key).replace('~', '~0').replace('/', '~1')}", holder, key


def _check_length(text: str, name: str) -> None:
    if len(text) > LONGEST_GRAMMAR:
        raise RequestError(400, f"'{name}' has {len(text):,} characters, more than {LONGEST_GRAMMAR:,}", name)


def _has_type(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _parsed(text: str, name: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"'{name}' is not JSON: {error}", name) from error
