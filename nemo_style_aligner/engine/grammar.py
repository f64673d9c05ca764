"""Responses held to a grammar: which ids may come next, as a mask over the vocabulary, by `llguidance`.

A grammar is a text in llguidance's own notation, which `json_grammar` and others make: it is sent to other ranks and
compared like any other sampling parameter. What is compiled stays with the vocabulary.
"""

from __future__ import annotations

import collections
import json
import random
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_style_aligner.engine.contract import GrammarError
from nemo_style_aligner.engine.text.tokenizer import PART_OF_A_CHARACTER, Tokenizer, TokenizerError

if TYPE_CHECKING:
    import llguidance  # functions import it when a grammar is asked for

LONGEST_GRAMMAR = 2**16
"""In characters: compiling may take time that grows as the square, here some seconds."""

# A line break with its indentation, or a space: endless white space is within JSON, and weak models fall into it.
_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,40})?",
    "lenient": False,  # what is not built is an error, not ignored
    "coerce_one_of": False,
}
# Where a text is certain, any tokens that spell it are possible: the model chooses, no tokenizer.
_ANY_TOKENS = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @response'}
_KEPT = 16  # compiled grammars; each may grow to some 40 MB, by the states of its lexer
_LEXER_STATES = 20_000
_RUN = 64  # tokens that are decoded together
# Hugging Face's decoders by which a token always adds the same bytes; WordPiece's, for one, rewrites ends of words.
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
_REPLACEMENT = (PART_OF_A_CHARACTER, "ï¿½")  # as a vocabulary may spell it, which most lack
_EXAMPLE = "Größe 数 ☃ 🙂\n\tdef f(x): return {'a': [1, 2.5e-3]}\r\n é́ \u2028 \"quoted\\\" ‏שלום"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that conform to ``schema``; whether it can be compiled is another matter."""
    return json.dumps({"grammars": [{"json_schema": with_options(schema)}]})


def lark_grammar(lark: str) -> str:
    """A grammar in llguidance's variant of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` with the settings of ours; its own, which could have keywords ignored, have no effect."""
    return {**schema, "x-guidance": _JSON_OPTIONS}


class Matcher:
    """One response's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of ids that may come next, in uint8 [num_bytes], the lowest bit first."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that were possible."""
        self._matcher.consume_tokens(list(token_ids))

    @property
    def failure(self) -> str | None:
        """Why nothing can be told about the next token, so that an end alone is possible; None: it can."""
        return self._matcher.get_error() if self._matcher.is_error() else None


class Grammars:
    """Compiles grammars for a vocabulary; in any thread. Nothing is done before one is asked for.

    Args:
        limit: ids at and above it are never sampled.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._lock = threading.Lock()  # of what follows
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: collections.OrderedDict[str, llguidance.LLMatcher] = collections.OrderedDict()

    def matcher(self, grammar: str, token_ids: Sequence[int] = ()) -> Matcher:
        """Where a response stands that begins with ``token_ids``.

        Raises:
            GrammarError: the grammar cannot be compiled.
            TokenizerError: the bytes of the tokenizer's tokens cannot be known.
        """
        with self._lock:
            found = self._compiled.pop(grammar, None)
        found = found or self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            matcher = Matcher(found.deep_copy(), -(-self._limit // 32) * 4)
        matcher.take(token_ids)
        return matcher

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        import llguidance

        with self._lock:
            self._vocabulary = self._vocabulary or _vocabulary(self._tokenizer, self._limit)
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        first, *others = json.loads(grammar)["grammars"]
        whole = json.dumps({"grammars": [_ANY_TOKENS, first | {"name": "response"}, *others]})
        matcher = llguidance.LLMatcher(self._vocabulary, whole, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().removesuffix("<non-verbose/>").strip())
        return matcher


def _vocabulary(tokenizer: Tokenizer, limit: int) -> llguidance.LLTokenizer:
    import llguidance

    ends = [i for i in tokenizer.stop_ids if i < limit]
    spelt = vocabulary_bytes(tokenizer, limit)
    no_text = {*tokenizer.special_ids, *ends, tokenizer.unk_id, *(i for i, token in enumerate(spelt) if not token)}

    class Wrapper:  # what llguidance asks of a tokenizer
        eos_token_id, bos_token_id, tokens = tokenizer.eos_id, tokenizer.bos_id, spelt
        special_token_ids = sorted(i for i in no_text if i is not None and i < limit)

        def __call__(self, text: str | bytes) -> list[int]:
            return []  # nothing asks for it: see `_ANY_TOKENS`

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapper()), n_vocab=limit, eos_token=ends)


def vocabulary_bytes(tokenizer: Tokenizer, limit: int) -> list[bytes]:
    """The UTF-8 bytes that each id below ``limit`` adds to a response, proved on texts of all of them.

    Raises:
        TokenizerError: they cannot be known, or depend on neighbours.
    """
    decoder = json.loads(tokenizer.files.get("tokenizer.json", b"{}")).get("decoder") or {}
    kinds = {str(part["type"]) for part in [decoder, *decoder.get("decoders", ())] if "type" in part}
    if unknown := kinds - _DECODERS:
        raise TokenizerError(
            f"responses cannot be held to a grammar with this tokenizer: its decoder {min(unknown)} may change what "
            "tokens say by what stands beside them"
        )
    spelt = [tokenizer.token_bytes(i) for i in range(limit)]
    for token_id in (i for i, token in enumerate(spelt) if PART_OF_A_CHARACTER.encode() in token):
        if not any(character in tokenizer.piece(token_id) for character in _REPLACEMENT):
            raise _unknown(tokenizer, [token_id])
    start = tokenizer.text_to_ids("a")
    marks = tokenizer.special_ids | {tokenizer.unk_id}
    whole = [i for i, token in enumerate(spelt) if i not in marks and _is_whole(token)]
    shuffled = random.Random(0).sample(whole, len(whole))
    runs = [ids[first : first + _RUN] for ids in (whole, shuffled) for first in range(0, len(ids), _RUN)]
    example = tokenizer.text_to_ids("a" + _EXAMPLE)[len(start) :]
    if not set(example) & marks and max(example, default=0) < limit:
        runs.append(example)
    before = tokenizer.ids_to_text(start, keep_special=True)
    for run in runs:
        text = tokenizer.ids_to_text([*start, *run], keep_special=True)
        if text.encode(errors="surrogateescape") != before.encode() + b"".join(spelt[i] for i in run):
            raise _unknown(tokenizer, run)
    return spelt


def _unknown(tokenizer: Tokenizer, ids: Sequence[int]) -> TokenizerError:
    return TokenizerError(
        f"responses cannot be held to a grammar with this tokenizer ({type(tokenizer).__name__}): the bytes of token "
        f"{ids[0]} ({tokenizer.piece(ids[0])!r}), or of one of the {len(ids) - 1} decoded with it, cannot be known"
    )


def _is_whole(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
