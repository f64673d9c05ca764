"""Tokenizers: text to token ids and back, behind one small interface.

Two backends: a Hugging Face directory (``tokenizer.json`` and friends) through transformers, and a
sentencepiece ``.model`` file through sentencepiece itself. Everything is read from local files; the
network is never touched. A directory's files are kept as they are: what is saved is what was loaded, byte by byte.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece

from nemo_style_aligner.engine.text import chat_templates
from nemo_style_aligner.engine.text.sentencepiece_model import to_fast_tokenizer, user_defined_ids
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer_growth import check_growth
from nemo_style_aligner.errors import LFS_POINTER, UserError, is_lfs_pointer
from nemo_style_aligner.guard.parsing import parse_json
from nemo_style_aligner.wording import download_hint

if TYPE_CHECKING:
    import transformers  # functions import it when they need it: it takes half a second

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

BREAK = "\udcff"
"""In a text where the name of a special token is to be letters: half of a surrogate pair, which no other text has."""

# Written into tokenizer_config.json beside a sentencepiece model, so that a saved directory is read
# back by the same backend and gives the same ids.
_BACKEND_KEY = "nemo_style_aligner_backend"
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_PORTABLE_CLASS = "PreTrainedTokenizerFast"  # which takes a tokenizer.json as it is, in every version of transformers

# `normalizer_spec { add_dummy_prefix: false }` of a sentencepiece model as protobuf writes it (field 3 of field 3).
# Appended to a model, it overrides the model's own setting: protobuf merges messages that follow each other.
_NO_DUMMY_PREFIX = bytes([3 << 3 | 2, 2, 3 << 3, 0])

# Words, digits, signs, spaces and letters beyond ASCII: whatever tokenizers differ in.
_EXAMPLE = "User: What is 3*(17-4)?\nAssistant: It is 39, naturally.  \tdef f(x): return x**2 # Größe, 数, été\n"

# Many tokenizers encode the start of a text differently when it follows a special token.
_BEHIND_SPECIAL = ("It is 39", " naturally")
_SPECIALS_IN_EXAMPLE = 16
_LONGEST_PANIC = 200  # characters
PART_OF_A_CHARACTER = "\ufffd"
"""What a text has in the place of bytes that are no whole character."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_LAST = 64  # characters at a text's end that hold its last token

# Chat templates that state today's date (Llama 3.1 and later, GPT-OSS) get this one: data must not depend on the day.
_DATE = "26 Jul 2024"
_DAY = datetime.date(2024, 7, 26)
# Replaced in the template's source, because transformers passes no functions of ours to templates.
_TODAY = re.compile(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""")

GENERATION_CONFIG = "generation_config.json"
# Files of a model directory that belong to its tokenizer and its use, not to its weights.
TOKENIZER_FILES = (
    "*.model",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*token*.json",
    "tekken.json",
    GENERATION_CONFIG,
)


os.environ["RUST_BACKTRACE"] = "0"  # a panic's message says as much about a tokenizer as its hundred lines of frames


class TokenizerError(UserError, ValueError):
    """A tokenizer cannot be loaded, or lacks what is asked of it."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        eos_id: the stop token, which ends a response; see also `stop_ids`.
        bos_id: None where the tokenizer has none.
        pad_id: falls back to ``eos_id``.
        unk_id: stands for what the vocabulary lacks; None where the tokenizer has none.
        vocab_size: one more than the largest id; the model's embedding may have more rows.
        longest_token: in characters; a few may seem longer than their text is.
        special_ids: ids that are markup rather than text; left out by `ids_to_text`.
        added_ids: these, and other tokens that were added to the vocabulary, such as ``<tool_call>``.
        named_tokens: special tokens by the names that chat templates use for them, such as ``bos_token``.
        adds_bos: whether it is set up to put BOS before texts, as servers of its model then do.
        chat_template: Jinja source, or None.
        files: those that it was loaded from, by name, without the generation config.
        generation_config: the text of the ``generation_config.json`` beside it, or None. Only `stop_ids` reads it; it
            is passed on with the tokenizer from archive to archive, and to exported models.
        format: how the texts were written that its model was trained on.
    """

    generation_config: str | None = None
    format: TextFormat = TextFormat()
    adds_bos: bool = False
    eos_id: int
    bos_id: int | None
    pad_id: int
    unk_id: int | None
    vocab_size: int
    longest_token: int
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    named_tokens: Mapping[str, str]
    chat_template: str | None
    files: Mapping[str, bytes]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response: ``eos_id``, then those that the generation config and `format` name besides.

        Chat models have more than one: Llama 3's ``<|eot_id|>``, Qwen's ``<|im_end|>`` beside ``<|endoftext|>``.

        Raises:
            TokenizerError: the generation config cannot be read.
        """
        learnt = [i for i in map(self.token_to_id, self.format.end_strings) if i is not None]
        if self.generation_config is None:
            return tuple(dict.fromkeys([self.eos_id, *learnt]))
        try:
            named = parse_json(self.generation_config).get("eos_token_id")
            named = [] if named is None else named if isinstance(named, list) else [named]
            return tuple(dict.fromkeys([self.eos_id, *map(int, named), *learnt]))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise TokenizerError(f"the tokenizer's {GENERATION_CONFIG} cannot be read: {error}") from error

    @property
    def markup_ids(self) -> frozenset[int]:
        """`special_ids` without the unknown token, which stands for text."""
        return self.special_ids - {self.unk_id}

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of ``text``, with no special tokens added. Special tokens spelt out in the text count as such."""
        return self.texts_to_ids([text])[0]

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts without `BREAK`."""

    def texts_to_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """`text_to_ids` of many texts, faster than one by one. No token spans a `BREAK`, which is no text itself."""
        cut = [text.split(BREAK) for text in texts]
        encoded = self._encode([parts[0] for parts in cut])
        return [
            ids + [i for part in rest for i in self._continuation_ids(part)]
            for ids, (_, *rest) in zip(encoded, cut, strict=True)
        ]

    def parts_to_ids(self, parts: Sequence[str]) -> list[list[int]]:
        """Ids of each part of one text: those of the whole text, except that no token spans two parts.

        Each part is tokenized after the one before it, unless that is empty, rather than as a text of its own: many
        tokenizers put a space before every text, which only the first part should have.
        """
        encoded = self.texts_to_ids([*parts, *(before + part for before, part in itertools.pairwise(parts))])
        result = encoded[:1]
        for part, before_ids, both_ids in zip(parts[1:], encoded, encoded[len(parts) :], strict=False):
            ids = _behind(before_ids, both_ids)
            result.append(self._continuation_ids(part) if ids is None else ids)
        return result

    def last_id(self, text: str) -> int:
        """The last token of ``text``."""
        return self.text_to_ids(text[-_LAST:])[-1]

    def _continuation_ids(self, text: str) -> list[int]:
        """Ids of ``text`` after another text with which it shares no token."""
        for before in ("x", "\n"):  # in most vocabularies, neither merges with what follows
            ids = _behind(*self.texts_to_ids([before, before + text]))
            if ids is not None:
                return ids
        return self.text_to_ids(text)

    @abstractmethod
    def ids_to_text(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Text of ``ids``, without special tokens unless they are to be kept."""

    @functools.cached_property
    def token_text(self) -> Callable[[int], str]:
        """The text of a token, special or not, behind others: many tokenizers drop the space of a text's first."""
        before = self.text_to_ids("a")
        start = len(self.ids_to_text(before, keep_special=True))
        return functools.cache(lambda token_id: self.ids_to_text([*before, token_id], keep_special=True)[start:])

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of `token_text`: of a token that is a part of a character, that part's own."""
        text = self.token_text(token_id)
        if PART_OF_A_CHARACTER not in text:
            return text.encode()
        piece = self.piece(token_id)
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        spelt_as = _spelt_bytes()
        return bytes(map(spelt_as.__getitem__, piece)) if set(piece) <= spelt_as.keys() else text.encode()

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """A token as the vocabulary spells it."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Id of exactly this token, or None."""

    def begins_with_bos(self, asked: bool | None, key: str) -> bool:
        """Whether texts begin with the BOS token.

        Args:
            asked: the setting that says so; None: as the model was trained, else as the tokenizer is set up.
            key: its name, for the message.

        Raises:
            TokenizerError: it is asked for and there is none.
        """
        if asked and self.bos_id is None:
            raise TokenizerError(f"{key}=True, but the tokenizer has no BOS (beginning-of-sequence) token")
        trained = self.format.add_bos
        return asked if asked is not None else self.adds_bos if trained is None else trained

    def with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        """``ids`` with exactly one BOS token at the beginning if it is ``wanted``; never with more than one."""
        count = next((n for n, i in enumerate(ids) if i != self.bos_id), len(ids))
        bos = [self.bos_id] if self.bos_id is not None and (count or wanted) else []
        return bos + ids[count:]

    def with_end(self, ids: list[int]) -> list[int]:
        """``ids`` with exactly one token at the end that ends a response: their own, else EOS.

        White space after their own is left out: templates write it, and it is never generated.
        """
        stop_ids = frozenset(self.stop_ids)
        at = next((n for n in range(len(ids) - 1, -1, -1) if ids[n] in stop_ids), None)
        if at is None or self.ids_to_text(ids[at + 1 :], keep_special=True).strip():
            return [*ids, self.eos_id]
        while at > 0 and ids[at - 1] == ids[at]:
            at -= 1
        return ids[: at + 1]

    def text_as_trained(self, text: str) -> list[int]:
        """Ids of prompt and response in one text, with BOS and EOS as in the texts that the model was trained on."""
        ids = self.with_bos(self.text_to_ids(text), self.begins_with_bos(None, "add_bos"))
        return self.with_end(ids) if ids and self.format.append_eod else ids

    def without_end(self, response: Sequence[int]) -> Sequence[int]:
        """``response`` without the token that ended it: not all of these are special tokens, which leave no text."""
        return response[:-1] if response and response[-1] in self.stop_ids else response

    def end_strings(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Strings that end responses: those asked for, and those that the model has learnt (`format`).

        Raises:
            TokenizerError: see `check_end_strings`.
        """
        strings = tuple(dict.fromkeys([*asked, *self.format.end_strings]))
        self.check_end_strings(strings)
        return strings

    def check_end_strings(self, strings: Sequence[str]) -> None:
        """Check that each string that ends responses can be found: by its id if it is a token, else in the text.

        Raises:
            TokenizerError: special tokens stand beside other text, and leave no text themselves.
        """
        for string in strings:
            special = [
                self.ids_to_text([i], keep_special=True) for i in self.text_to_ids(string) if i in self.special_ids
            ]
            token = next((text for text in special if text in string), None)  # not that of unknown text
            if token is not None and self.token_to_id(string) is None:
                raise TokenizerError(
                    f"the end string {string!r} would never be found: {token!r} is a special token, which is matched "
                    f"by its id and leaves no text. Give {token!r} alone"
                )

    def fingerprint(self) -> str:
        """Hash of the ids of example texts, to tell whether tokenizers encode text alike; 16 hex digits."""
        special = sorted(self.special_ids - {self.eos_id, self.bos_id, self.unk_id})[:_SPECIALS_IN_EXAMPLE]
        known = [self.eos_id] if self.bos_id is None else [self.bos_id, self.eos_id]
        tokens = [self.ids_to_text([i], keep_special=True) for i in known + special]
        ids = self.texts_to_ids([_EXAMPLE, *(token + text for token in tokens for text in _BEHIND_SPECIAL)])
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]

    def save(self, directory: Path) -> None:
        """Write a directory that `load_tokenizer` (and transformers) can load."""
        files = dict(self._saved_files())
        if self.generation_config is not None:
            files[GENERATION_CONFIG] = self.generation_config.encode()
        write_files(directory, files)

    def _saved_files(self) -> Mapping[str, bytes]:
        return self.files

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation as text; with ``add_generation_prompt`` it ends where the assistant's answer begins.

        Args:
            tools: JSON schemas of what the assistant may call.
            variables: further ones that the template may read, such as ``enable_thinking``.
            continue_final_message: end where the last message's content does, as transformers does.

        Raises:
            TokenizerError: no chat template, or one that refuses these messages.
        """
        if self.chat_template is None:
            raise TokenizerError(
                "this tokenizer has no chat template: put a `chat_template.jinja` into its directory, "
                "or use data whose prompts and responses are text"
            )
        arguments = {
            "conversations": [[dict(message) for message in messages]],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
            "date_string": _DATE,
            **self.named_tokens,
            **(variables or {}),
        }
        if continue_final_message:
            arguments["continue_final_message"] = True
        try:
            template = _TODAY.sub(lambda call: repr(_DAY.strftime(call[1][1:-1])), self.chat_template)
            return chat_templates.render(template, arguments)
        except (ValueError, TypeError) as error:  # TypeError: a field of a type that JSON does not have
            raise TokenizerError(f"the tokenizer's chat template refuses the conversation: {error}") from error


def _behind(before: list[int], both: list[int]) -> list[int] | None:
    """What ``both`` adds to ``before``; None if it does not begin with ``before``."""
    return both[len(before) :] if both[: len(before)] == before else None


@contextlib.contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Panics of the tokenizers library, which are no `Exception`, become errors: its regular expressions give up so."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        message = " ".join(str(error)[:_LONGEST_PANIC].split())
        raise TokenizerError(f"the tokenizer cannot encode or decode a text: {message}") from None


class HuggingFaceTokenizer(Tokenizer):
    """Wraps a fast tokenizer of transformers."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, files: Mapping[str, bytes]) -> None:
        """``files`` are those that the tokenizer was loaded from, by name; `save` writes them.

        What transformers would write is not the same tokenizer (``legacy`` is lost), and other versions cannot read it.
        """
        if tokenizer.eos_token_id is None:
            raise TokenizerError(
                "the tokenizer has no end-of-sequence token, without which no response can end: "
                'set "eos_token" in its tokenizer_config.json'
            )
        self._tokenizer = tokenizer
        self.files = files
        self.unk_id = tokenizer.unk_token_id
        self.eos_id = tokenizer.eos_token_id
        self.bos_id = tokenizer.bos_token_id
        self.pad_id = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # Ids may have gaps, so the number of tokens may be too small.
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        self.longest_token = max(map(len, vocabulary))
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
        self.added_ids = self.special_ids | {i for i, token in added if token.content.strip()}
        self.adds_bos = self.bos_id is not None and tokenizer("a")["input_ids"][:1] == [self.bos_id]
        self.named_tokens = {n: token for n, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = tokenizer.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template

    @_panics_are_errors()
    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # verbose=False: no warning about a model_max_length that says nothing about our models.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False
        )
        return encoded["input_ids"]

    @_panics_are_errors()
    def ids_to_text(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """See `Tokenizer.ids_to_text`."""
        kept = [int(i) for i in ids if keep_special or int(i) not in self.special_ids]
        return self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        found = self._tokenizer.convert_tokens_to_ids(token)  # the unknown token's id if the vocabulary lacks ``token``
        # In byte-level vocabularies, single bytes are spelt as characters: "»" is the byte 0xBB.
        return found if found is not None and self.ids_to_text([found], keep_special=True) == token else None


class SentencePieceTokenizer(Tokenizer):
    """Wraps a sentencepiece model, as NeMo archives carry one."""

    def __init__(self, model_file: Path, files: Mapping[str, bytes]) -> None:
        """``files`` are those beside the model, by name; `save` writes them."""
        self._model_file = model_file
        content = model_file.read_bytes()
        self.files = {"tokenizer.model": content, **files}  # to be saved again, when these may be gone
        self.chat_template = _chat_template(self.files)
        try:
            model = self._model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"{model_file} is not a sentencepiece model: {error}") from error
        self._later_parts = sentencepiece.SentencePieceProcessor(model_proto=content + _NO_DUMMY_PREFIX)
        self.unk_id = model.unk_id()
        self.eos_id, bos_id, pad_id = model.eos_id(), model.bos_id(), model.pad_id()
        if self.eos_id < 0:
            raise TokenizerError(f"{model_file} has no end-of-sequence token, without which no response can end")
        self.bos_id = None if bos_id < 0 else bos_id
        self.pad_id = self.eos_id if pad_id < 0 else pad_id
        self.adds_bos = self.bos_id is not None and bool(_config_in(self.files).get("add_bos_token"))
        self.vocab_size = model.get_piece_size()
        self.longest_token = max(len(model.id_to_piece(i)) for i in range(self.vocab_size))
        self.special_ids = frozenset(i for i in range(self.vocab_size) if model.is_control(i))
        self.added_ids = self.special_ids | {i for i in user_defined_ids(model) if model.id_to_piece(i).strip(" ▁\n\t")}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self.named_tokens = {name: model.id_to_piece(i) for name, i in ids.items() if i is not None}
        # sentencepiece itself never encodes text as control pieces, so texts are split at them. It also puts a space
        # before every text, which only the first part should have.
        longest_first = sorted((model.id_to_piece(i) for i in self.special_ids), key=len, reverse=True)
        self._split_at = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [self._split_at.split(text) for text in texts]  # each text: part, special token, part, ...
        encoded: list[list[int]] = self._model.encode([parts[0] for parts in cut], out_type=int)
        for ids, parts in zip(encoded, cut, strict=True):
            for piece, part in zip(parts[1::2], parts[2::2], strict=True):
                ids.append(self._model.piece_to_id(piece))
                ids += self._later_parts.encode(part, out_type=int)
        return encoded

    def ids_to_text(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """See `Tokenizer.ids_to_text`."""
        if not keep_special:
            return self._model.decode([int(i) for i in ids if int(i) not in self.special_ids])
        text = ""  # sentencepiece leaves control pieces out
        for is_special, group in itertools.groupby(map(int, ids), self.special_ids.__contains__):
            part = list(group)
            model = self._later_parts if text else self._model
            text += "".join(map(self._model.id_to_piece, part)) if is_special else model.decode(part)
        return text

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`."""
        return str(self._model.id_to_piece(token_id))

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        index = self._model.piece_to_id(token)
        return index if self._model.id_to_piece(index) == token else None

    def _saved_files(self) -> Mapping[str, bytes]:
        """The model, and for transformers a ``tokenizer.json`` that gives the same ids, if there can be one."""
        config = {_BACKEND_KEY: "sentencepiece", "add_bos_token": self.adds_bos, "tokenizer_class": _PORTABLE_CLASS}
        config |= {**self.named_tokens, "unk_token": self._model.id_to_piece(self._model.unk_id())}
        files = {**self.files, **_template_file(self.chat_template), _CONFIG: _json_bytes(config)}
        fast = to_fast_tokenizer(self._model, self.adds_bos, self.text_to_ids)
        if fast is None:
            logger.warning(
                "%s has no exact equivalent among Hugging Face's tokenizers: it is saved for sentencepiece only",
                self._model_file,
            )
            return files
        return files | {"tokenizer.json": fast.to_str(pretty=True).encode()}


@functools.cache
def _spelt_bytes() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _config_in(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The tokenizer_config.json among a directory's files; empty without one. ValueError: it cannot be read."""
    config: dict[str, Any] = parse_json(files.get(_CONFIG, b"{}").decode())
    return config


def _chat_template(files: Mapping[str, bytes]) -> str | None:
    if _TEMPLATE in files:
        return files[_TEMPLATE].decode()
    try:
        given = _config_in(files).get("chat_template")
        if isinstance(given, list):  # of named ones
            given = {template["name"]: template["template"] for template in given}.get("default")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise TokenizerError(f"chat_template in {_CONFIG} cannot be read: {error!r}") from error
    return given


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a Hugging Face directory, a directory with a sentencepiece model, or a ``.model`` file.

    A ``chat_template.jinja`` in the directory is the chat template.

    Raises:
        TokenizerError: nothing there, or nothing that can be read.
    """
    tokenizer = _load(Path(path))
    config = Path(path) / GENERATION_CONFIG
    tokenizer.generation_config = config.read_text(encoding="utf-8") if config.is_file() else None
    return tokenizer


def tokenizer_argument(path: str) -> Tokenizer:
    """`load_tokenizer` as an argparse type: a path that cannot be loaded is an error of the command line."""
    try:
        return load_tokenizer(path)
    except TokenizerError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def save_made(tokenizer: transformers.PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Write a tokenizer that was made here in a form that transformers 4 and 5 both read.

    ``save_pretrained`` of transformers 5 writes class names and types of values that 4 does not know.
    """
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    config = {"tokenizer_class": _PORTABLE_CLASS, "clean_up_tokenization_spaces": False, **special}
    files = {"tokenizer.json": tokenizer.backend_tokenizer.to_str(pretty=False).encode(), _CONFIG: _json_bytes(config)}
    write_files(Path(directory), files | _template_file(tokenizer.chat_template))


def save_sentencepiece(model: bytes, directory: Path, adds_bos: bool, chat_template: str | None) -> None:
    """Write a sentencepiece model as a directory that `load_tokenizer` reads."""
    config = _json_bytes({_BACKEND_KEY: "sentencepiece", "add_bos_token": adds_bos})
    write_files(directory, {"tokenizer.model": model, _CONFIG: config, **_template_file(chat_template)})


def _template_file(chat_template: str | None) -> dict[str, bytes]:
    return {} if chat_template is None else {_TEMPLATE: chat_template.encode()}


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their names within a directory."""
    for name, content in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def tokenizer_files(directory: Path) -> dict[str, Path]:
    """A directory's `TOKENIZER_FILES` by their names within it."""
    files = sorted(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file())
    return {file.relative_to(directory).as_posix(): file for file in files}


def _load(path: Path) -> Tokenizer:
    found = {path.name: path} if path.is_file() else tokenizer_files(path)
    for file in found.values():
        if is_lfs_pointer(file):
            raise TokenizerError(f"{file} {LFS_POINTER}")
    if path.is_file():
        if path.suffix != ".model":
            raise TokenizerError(f"{path}: give a Hugging Face directory or a sentencepiece file ending in .model")
        return SentencePieceTokenizer(path, {})
    if not path.is_dir():
        hint = download_hint(str(path)) or " (nothing is downloaded)"
        raise TokenizerError(f"{path}: no such tokenizer directory or .model file{hint}")
    files = {name: file.read_bytes() for name, file in found.items() if name != GENERATION_CONFIG}
    try:
        config = _config_in(files)
        backend = config.get(_BACKEND_KEY, "huggingface") if _CONFIG in files else None
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{path / _CONFIG} cannot be read: {error}") from error
    _refuse_two_templates(path, files)
    models = sorted(path.glob("*.model"))
    if backend != "sentencepiece" and ("tokenizer.json" in files or (backend and not models)):
        tokenizer = _load_hugging_face(path, files)
        for model in models:
            _refuse_another_vocabulary(model, tokenizer)
        return tokenizer
    if len(models) != 1:
        names = ", ".join(model.name for model in models) or "neither"
        raise TokenizerError(f"{path}: expected tokenizer.json or one sentencepiece .model file, found {names}")
    if backend == "huggingface":
        raise TokenizerError(
            f"{path}: a sentencepiece model with Hugging Face's settings and no tokenizer.json, as of older models: "
            "make one with transformers 4 (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    others = {name: content for name, content in files.items() if not name.endswith(".model")}
    return SentencePieceTokenizer(models[0], others)


def _refuse_two_templates(directory: Path, files: Mapping[str, bytes]) -> None:
    within = _chat_template({name: content for name, content in files.items() if name != _TEMPLATE})
    if (
        _TEMPLATE in files
        and within is not None
        and within.strip() != files[_TEMPLATE].decode(errors="replace").strip()
    ):
        raise TokenizerError(
            f"{directory} has two chat templates, which differ: {_TEMPLATE}, and chat_template in {_CONFIG}: remove one"
        )


def _refuse_another_vocabulary(model: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Refuse a sentencepiece model that lies beside a tokenizer.json and is none of the same tokenizer.

    Their ids may differ in special tokens and in those that were added. One that cannot be read is not heeded.
    """
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError):
        return
    ids = range(pieces.get_piece_size())
    same = sum(pieces.id_to_piece(i) == tokenizer.piece(i) for i in ids if i < tokenizer.vocab_size)
    if same < len(ids) / 2:
        raise TokenizerError(
            f"{model.parent} has two tokenizers: {same} of the {len(ids)} pieces of {model.name} have the same ids in "
            "tokenizer.json. Remove that which is not the model's"
        )


def load_for_transformers(directory: Path) -> transformers.PreTrainedTokenizerBase:
    """Load a ``tokenizer.json`` as it is: the classes of transformers 5 keep only its vocabulary and merges.

    Code in the directory (``auto_map``) is not executed.

    Raises:
        TokenizerError: transformers cannot load it.
    """
    import transformers

    as_it_is = transformers.PreTrainedTokenizerFast
    whole = (directory / "tokenizer.json").is_file()
    options = {"local_files_only": True, "trust_remote_code": False}  # unset, the latter asks on the terminal
    try:
        with _panics_are_errors():
            loaded = (as_it_is if whole else transformers.AutoTokenizer).from_pretrained(str(directory), **options)
            if loaded.eos_token is None:  # old files leave special tokens to the class that they name
                named = transformers.AutoTokenizer.from_pretrained(str(directory), **options)
                for name in ("eos_token", "bos_token", "pad_token", "unk_token"):
                    token = getattr(named, name)
                    if token in loaded.get_vocab() and getattr(loaded, name) is None:
                        setattr(loaded, name, token)
    except Exception as error:
        raise TokenizerError(f"{directory}: transformers cannot load this tokenizer: {error}") from error
    return loaded


def _load_hugging_face(directory: Path, files: Mapping[str, bytes]) -> HuggingFaceTokenizer:
    try:
        check_growth(parse_json(files.get("tokenizer.json", b"{}").decode()))
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{directory / 'tokenizer.json'} cannot be used: {error}") from error
    loaded = load_for_transformers(directory)
    try:
        tokenizer = HuggingFaceTokenizer(loaded, files)
        tokenizer.text_to_ids(_EXAMPLE)  # some of what may be wrong with it shows only now
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{directory}: this tokenizer cannot be used: {error}") from error
    return tokenizer
