"""The fields of a request's JSON object, each read and checked by its name, and errors as OpenAI's clients read them.

A field that is unknown, or whose value would change the answer in a way that is not built, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.guard.protocol import ProtocolError

MOST_STOPS = 64
LONGEST_STOP = 4096  # characters
# Fields of OpenAI's API and of vLLM's, with the values that ask for nothing that is not built.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("priority", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(("tools", "functions", "documents", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("parallel_tool_calls", "spaces_between_special_tokens"), (True, False)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("detokenize", "include_reasoning"), (True,)),
    "echo": (False,),
    "add_special_tokens": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
# Fields that have no effect on an answer: whom it is for, and what is kept of it elsewhere.
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt"),
)


class RequestError(ProtocolError):
    """A request that cannot be answered, as OpenAI's clients read it. ``param``: the field that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_body(error: ProtocolError) -> bytes:
    """An error in OpenAI's format, as JSON."""
    return json.dumps({"error": error_object(error)}).encode()


def error_object(error: ProtocolError) -> dict[str, Any]:
    """What OpenAI's format says about an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    code = code or {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(error.status)
    return {"message": error.message, "type": kind, "param": param, "code": code}


class Fields:
    """The fields of a request's JSON object, null being absent: each is taken once, `finish` refuses what is left."""

    def __init__(self, fields: Mapping[str, Any], without_effect: Sequence[str] = _WITHOUT_EFFECT) -> None:
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._without_effect = without_effect

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """The fields of a body."""
        try:
            fields = parse_json(body.decode(), unique=True)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise RequestError(400, "the body is not a JSON object")
        return cls(fields)

    def take(self, name: str, default: Any, meaning: str, is_right: Callable[[Any], bool]) -> Any:
        """The field ``name``; a `RequestError` unless it ``is_right``, which is what ``meaning`` says."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not is_right(value):
            raise RequestError(400, f"'{name}' should be {meaning}, not {json.dumps(value)[:100]}", name)
        return value

    def whole(self, name: str, default: Any, low: int, high: int) -> Any:
        """A whole number from ``low`` to ``high``; 2.0 is one."""

        def is_right(value: Any) -> bool:
            return (type(value) is int or (type(value) is float and value.is_integer())) and low <= value <= high

        found = self.take(name, None, f"a whole number from {low} to {high}", is_right)
        return default if found is None else int(found)

    def number(self, name: str, default: float) -> float:
        """A number."""
        meaning = "a number of a usual size"
        return float(self.take(name, default, meaning, lambda v: type(v) in (int, float) and abs(v) < 1e30))

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self.take(name, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, name: str, default: str | None = None) -> Any:
        """A string."""
        return self.take(name, default, "a string", lambda value: isinstance(value, str) and is_text(value))

    def strings(self, name: str) -> tuple[str, ...]:
        """A string that is not empty, or a list of some."""

        def is_right(value: Any) -> bool:
            items = [value] if isinstance(value, str) else value
            is_short = isinstance(items, list) and len(items) <= MOST_STOPS  # each is looked for after each token
            return is_short and all(isinstance(i, str) and 0 < len(i) <= LONGEST_STOP and is_text(i) for i in items)

        meaning = f"a string of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} such strings"
        value = self.take(name, [], meaning, is_right)
        return (value,) if isinstance(value, str) else tuple(value)

    def fields(self, name: str, without_effect: Sequence[str]) -> Fields:
        """An object, whose fields are taken in the same way."""
        return Fields(self.take(name, {}, "an object", lambda value: isinstance(value, dict)), without_effect)

    def drop(self, name: str, nothing: Any) -> None:
        """Take a field as absent if it is this."""
        if self._left.get(name) is nothing:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse what is left, unless it asks for nothing."""
        for name, value in self._left.items():
            if name in self._without_effect:
                continue
            if name not in _NEUTRAL:
                raise RequestError(400, f"'{name}' is unknown, or not supported here", name, "unknown_parameter")
            if value not in _NEUTRAL[name] or isinstance(value, bool) != isinstance(_NEUTRAL[name][0], bool):
                raise RequestError(400, f"'{name}' is not supported here: leave it out", name, "unsupported_parameter")


def is_text(text: str) -> bool:
    """Whether it can be encoded: JSON can spell half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
