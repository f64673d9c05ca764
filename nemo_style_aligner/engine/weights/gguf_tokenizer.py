"""The tokenizer in a GGUF file, as a directory that `load_tokenizer` reads: sentencepiece's, or byte-level BPE."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nemo_style_aligner.engine.text.sentencepiece_model import put_around_texts
from nemo_style_aligner.engine.text.tokenizer import GENERATION_CONFIG, save_made, save_sentencepiece
from nemo_style_aligner.engine.weights.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # transformers' names, and this format's keys
_ENDS = ("eot_token_id", "eom_token_id")
_USED = (
    *("model", "pre", "tokens", "token_type", "scores", "merges", "precompiled_charsmap", "remove_extra_whitespaces"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", *_IDS.values(), *_ENDS),
)
_FOR_PROMPTS = ("fim_*_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id")  # of code with a gap in it
_IRRELEVANT = ("token_type_count", "seperator_token_id", "mask_token_id", "cls_token_id", *_FOR_PROMPTS)
TOKENIZER_KEYS = (
    *(_KEY + name for name in (*_USED, *_IRRELEVANT)),
    *(_TEMPLATE, f"{_TEMPLATE}.*", "tokenizer.chat_templates", "tokenizer.huggingface.json"),
)
"""Patterns of the keys that are read, or known to change nothing."""

# Types of tokens: sentencepiece's numbers.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # where keys are missing

# Texts of tokens that end a turn. llama.cpp stops at them in every file; here, where the chat template writes them.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>", "<｜end▁of▁sentence｜>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}|{digits}|"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.format(upper=_UPPER, lower=_LOWER, end="", digits=r"\p{N}") + _CASED_REST
_GPT4O = _CASED.format(upper=_UPPER, lower=_LOWER, end=f"{_CONTRACTIONS}?", digits=r"\p{N}{1,3}") + _CASED_REST


@dataclasses.dataclass(frozen=True)
class Splitting:
    """What is done to a text before merges, as ``tokenizer.ggml.pre`` names it.

    Attributes:
        pattern: each match is a word of its own; None: GPT-2's.
        digits: each digit is split off first.
        ignore_merges: a word that is a token is that token, whatever the merges make of it.
        nfc: the text is brought into Unicode's form NFC.
        add_bos: where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_GPT2 = Splitting()
_SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder"), Splitting(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        Splitting(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4"), Splitting(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting(_QWEN2, nfc=True)),
    "tekken": Splitting(_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Splitting(_GPT4O)),
}


def write_tokenizer(file: GGUFFile, vocab_size: int, directory: Path) -> None:
    """Write the file's tokenizer, chat templates and stop tokens into a directory.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        ValueError: the vocabulary is incomplete, contradicts itself or is of a kind that cannot be built.
    """
    _Vocabulary(file, vocab_size).write(directory)


class _Vocabulary:
    """What all vocabularies have: tokens with types, special ids, templates."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self._file = file
        self.model = file.value(f"{_KEY}model", str)
        tokens = file.values_of(f"{_KEY}tokens", str)
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.types = file.values_of(f"{_KEY}token_type", int) or [_NORMAL] * len(tokens)
        if not 0 < len(tokens) <= vocab_size or len(self.types) != len(tokens):
            raise self._wrong(
                f"{len(tokens)} tokens with {len(self.types)} types, for an embedding of {vocab_size} rows"
            )
        (token, count), *_ = Counter(self.tokens).most_common(1)
        if count > 1:
            raise self._wrong(f"the token {token!r} {count} times")
        defaults = _SENTENCEPIECE_IDS if self.model == "llama" else {}
        ids = {name: self._id(key, defaults.get(name)) for name, key in _IDS.items()}
        self.special = {name: i for name, i in ids.items() if i is not None}
        for i in (i for name, i in self.special.items() if name != "unk_token"):
            self.types[i] = _CONTROL
        template = file.metadata.get(_TEMPLATE)
        self.template = None if template is None else file.value(_TEMPLATE, str)

    def write(self, directory: Path) -> None:
        """Write all files."""
        if "eos_token" not in self.special:
            raise self._wrong(f"no {_KEY}eos_token_id, without which no response can end")
        if self.model == "llama":
            self._write_sentencepiece(directory)
        elif self.model == "gpt2":
            self._write_bpe(directory)
        else:
            raise self._wrong(f"{_KEY}model={self.model!r}; only 'llama' (sentencepiece) and 'gpt2' are supported")
        for key in self._file.metadata:
            if key.startswith(f"{_TEMPLATE}."):
                other = (
                    directory / "additional_chat_templates" / f"{Path(key.removeprefix(f'{_TEMPLATE}.')).name}.jinja"
                )
                other.parent.mkdir(exist_ok=True)
                other.write_text(self._file.value(key, str), encoding="utf-8")
        if (ends := self._ends())[1:]:
            (directory / GENERATION_CONFIG).write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")

    def _ends(self) -> list[int]:
        """Ids that end a response: EOS first, then those of ends of turns and messages."""
        named = [self.special["eos_token"], *map(self._id, _ENDS)]
        written = [text for text in _TURN_ENDS if text in (self.template or "") and text in self.tokens]
        turns = [i for i in map(self.tokens.index, written) if self.types[i] == _CONTROL]
        return list(dict.fromkeys(i for i in (*named, *turns) if i is not None))

    def _id(self, key: str, default: int | None = None) -> int | None:
        if _KEY + key not in self._file.metadata:
            return default if default is not None and default < len(self.tokens) else None
        index = self._file.value(_KEY + key, int)
        if not 0 <= index < len(self.tokens):
            raise self._wrong(f"{_KEY}{key}={index}, but {len(self.tokens)} tokens")
        return index

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self._file.path}: its tokenizer has {what}")

    # ---- byte-level BPE --------------------------------------------------------------------------

    def _write_bpe(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        splitting = self._splitting()
        merges = [merge.partition(" ") if merge[:1] != " " else ("", "", "") for merge in self._merges()]
        try:
            bpe = models.BPE(
                {token: i for i, token in enumerate(self.tokens)},
                [(left, right) for left, _, right in merges],
                ignore_merges=splitting.ignore_merges,
            )
        except Exception as error:  # tokenizers' own
            raise self._wrong(f"{_KEY}merges that its tokens do not fit: {error}") from error
        fast = Tokenizer(bpe)
        if splitting.nfc:
            fast.normalizer = normalizers.NFC()
        fast.pre_tokenizer = _pre_tokenizer(splitting)
        fast.decoder = decoders.ByteLevel()
        for kind, is_special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
            texts = [token for token, of in zip(self.tokens, self.types, strict=True) if of in kind]
            fast.add_tokens([AddedToken(text, normalized=False, special=is_special) for text in texts])
        names = {name: self.tokens[i] for name, i in self.special.items()}
        adds = {"bos": self._adds("bos", splitting.add_bos), "eos": self._adds("eos", False)}
        put_around_texts(fast, *(self.special[f"{name}_token"] if added else None for name, added in adds.items()))
        made = PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=self.template, **names)
        save_made(made, directory)

    def _merges(self) -> list[str]:
        merges = self._file.values_of(f"{_KEY}merges", str)
        if not merges:
            raise self._wrong(f"no {_KEY}merges, without which BPE splits every word into bytes")
        return merges

    def _splitting(self) -> Splitting:
        name = self._file.value(f"{_KEY}pre", str, "default")
        if name == "default":
            logger.warning("%s does not name its pre-tokenizer (%spre): assuming GPT-2's", self._file.path, _KEY)
            return _GPT2
        if name not in _SPLITTINGS:
            raise ValueError(
                f"{self._file.path}: its pre-tokenizer, {_KEY}pre={name!r}, is not supported: "
                "convert the model's Hugging Face directory instead"
            )
        return _SPLITTINGS[name]

    def _adds(self, token: str, default: bool) -> bool:
        """Whether BOS or EOS is put around each text; by default only where there is one."""
        adds = self._file.value(f"{_KEY}add_{token}_token", bool, default and f"{token}_token" in self.special)
        if adds and f"{token}_token" not in self.special:
            raise self._wrong(f"{_KEY}add_{token}_token=true, but no {_KEY}{token}_token_id")
        return adds

    # ---- sentencepiece ---------------------------------------------------------------------------

    def _write_sentencepiece(self, directory: Path) -> None:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        scores = self._file.values_of(f"{_KEY}scores", float)
        if len(scores) != len(self.tokens) or f"{_KEY}token_type" not in self._file.metadata:
            raise self._wrong(f"{len(self.tokens)} tokens, but not as many {_KEY}scores and {_KEY}token_type")
        model = ModelProto()
        for token, score, kind in zip(self.tokens, scores, self.types, strict=True):
            text = token.replace(" ", "▁") if kind == _USER_DEFINED else token
            model.pieces.add(piece=text, score=score, type=kind or _NORMAL)
        for name, i in self.special.items():
            if name != "unk_token":
                model.pieces[i].type = _CONTROL
        pieces = {name: model.pieces[i].piece for name, i in self.special.items()}
        model.trainer_spec.model_type = model.trainer_spec.BPE
        model.trainer_spec.byte_fallback = _BYTE in self.types
        for name in ("bos", "eos", "unk", "pad"):
            setattr(model.trainer_spec, f"{name}_piece", pieces.get(f"{name}_token", ""))
        normalizer = model.normalizer_spec
        normalizer.name = "identity"
        normalizer.add_dummy_prefix = self._file.value(f"{_KEY}add_space_prefix", bool, True)
        normalizer.remove_extra_whitespaces = self._file.value(f"{_KEY}remove_extra_whitespaces", bool, False)
        normalizer.precompiled_charsmap = bytes(self._file.values_of(f"{_KEY}precompiled_charsmap", int))
        save_sentencepiece(model.SerializeToString(), directory, self._adds("bos", True), self.template)


def _pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    if splitting.pattern is not None:
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated")
    elif splitting.digits:
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        return by_gpt2
    return pre_tokenizers.Sequence([first, by_gpt2])
