"""What sentencepiece itself leaves open: the settings that Hugging Face's directories have beside a model, and the form
that programs read which know nothing but Hugging Face's `tokenizers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nemo_style_aligner.parsing import parse_json

_MAX_ADDED = 1 << 16  # ids beyond those of the model
_SPACE = "▁"
_LONGEST = 1000  # characters of a piece: finding its merges takes time that grows as the square

# None begins with a space, to which only sentencepiece adds another one. None has carriage returns, which `tokenizers`
# normalizes differently if the model has rules for them.
_EXAMPLES = (
    "User: What is 3*(17-4)?\nAssistant: It is 39, naturally.  \tdef f(x): return x**2 # Größe, 数, été\n",
    "two  spaces,   three    and four\n\n  a line with an indent, 12345.67 and\ntrailing spaces   ",
    "Ünïcödé ﬁ ½ ① \u3000 ８ e\u0301 \u200b😀 naïve _ __ and _under_",
    "The quick brown fox jumps over 1,000,000 lazy dogs; whether they were there, others'd know.",
)


class AddedPiece(NamedTuple):
    """A token that texts are split at: ``lstrip`` and ``rstrip`` take the white space on that side with it."""

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclasses.dataclass(frozen=True)
class SentencePieceSettings:
    """What a Hugging Face directory says beside its sentencepiece model.

    Attributes:
        special: tokens by their roles, "bos_token" and so on; None: there is none. A missing role is the model's own.
        added: tokens that are found in texts, those that the model lacks in the order of their ids.
        ids: of tokens that the model lacks, where the directory says them.
        legacy: every part of a text between special tokens begins with a space, and not the first one alone.
        add_prefix_space: whether there is such a space at all, if the model has one.
        add_bos, add_eos: whether servers put these around each text; of no meaning for training data.
    """

    special: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    added: tuple[AddedPiece, ...] = ()
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    legacy: bool = False
    add_prefix_space: bool = True
    add_bos: bool = True
    add_eos: bool = False


_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_settings(files: Mapping[str, bytes]) -> SentencePieceSettings:
    """The settings in a directory's files, by name: ``tokenizer_config.json``, and two older ones beside it.

    Raises:
        ValueError: they are not what transformers writes.
    """
    read = [name for name in _FILES if name in files]
    if _FILES[0] not in read:
        return SentencePieceSettings()
    try:
        return _settings_in({name: parse_json(files[name].decode()) for name in read})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{', '.join(read)} cannot be read: {error}") from error


def _settings_in(files: Mapping[str, Any]) -> SentencePieceSettings:
    config = files["tokenizer_config.json"]
    kept = files.get("special_tokens_map.json", {}) | config
    tokens: dict[str, AddedPiece] = {}
    ids = {str(token): int(i) for token, i in files.get("added_tokens.json", {}).items()}
    for i, token in config.get("added_tokens_decoder", {}).items():
        tokens[token["content"]] = _piece(token)
        ids[token["content"]] = int(i)
    special = {role: None if kept[role] is None else _piece(kept[role]) for role in _ROLES if role in kept}
    others = (*special.values(), *map(_piece, kept.get("additional_special_tokens") or ()))
    for token in filter(None, others):
        tokens[token.content] = tokens.get(token.content, token)._replace(special=True)
    for name in ids:
        tokens.setdefault(name, AddedPiece(name, special=False))
    if (unknown := special.get("unk_token")) is not None:
        tokens.pop(unknown.content, None)  # it stands for text, and no text is read as it
    return SentencePieceSettings(
        special={role: token and token.content for role, token in special.items()},
        added=tuple(sorted(tokens.values(), key=lambda token: ids.get(token.content, len(ids) << 32))),
        ids=ids,
        legacy=bool(config.get("legacy")),
        add_prefix_space=config.get("add_prefix_space") is not False,
        add_bos=config.get("add_bos_token") is not False,
        add_eos=bool(config.get("add_eos_token")),
    )


def _piece(token: Any) -> AddedPiece:
    if isinstance(token, str):
        return AddedPiece(token, special=True)
    if token.get("single_word"):
        raise ValueError(f"the added token {token['content']!r} is single_word, which is not supported")
    flags = {name: bool(token.get(name)) for name in ("lstrip", "rstrip")}
    return AddedPiece(str(token["content"]), bool(token.get("special", True)), **flags)


def token_of(model: sentencepiece.SentencePieceProcessor, settings: SentencePieceSettings, role: str) -> str | None:
    """The token in a role: what the directory says, else the model's own; None if there is none."""
    if role in settings.special:
        return settings.special[role]
    index = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id}[role]()
    return model.id_to_piece(index) if index >= 0 else None


def with_added_tokens(content: bytes, settings: SentencePieceSettings) -> bytes:
    """A sentencepiece model that has the directory's added tokens, which it lacks, behind its own pieces.

    Raises:
        ValueError: the ids of added tokens are taken, or far away.
    """
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    model_piece = sentencepiece_model_pb2.ModelProto.SentencePiece
    more = sentencepiece_model_pb2.ModelProto()  # appended to a model: protobuf joins lists of messages
    size = model.get_piece_size()
    for token in settings.added:
        own, wanted = model.piece_to_id(token.content), settings.ids.get(token.content)
        if model.id_to_piece(own) == token.content and wanted in (own, None):
            continue
        place = size + len(more.pieces)
        if wanted is not None and not place <= wanted < size + _MAX_ADDED:
            raise ValueError(f"the added token {token.content!r} has the id {wanted}, but {place} is the next free one")
        for i in range(place, place if wanted is None else wanted):
            more.pieces.add(piece=f"[UNUSED_{i}]", type=model_piece.UNUSED)
        more.pieces.add(piece=token.content, type=model_piece.CONTROL if token.special else model_piece.USER_DEFINED)
    return content + more.SerializeToString()


# ---- as a tokenizer of Hugging Face ----


def to_fast_tokenizer(
    model: sentencepiece.SentencePieceProcessor, settings: SentencePieceSettings, encode: Callable[[str], list[int]]
) -> Tokenizer | None:
    """The same tokenizer, with its special tokens marked as such; None if none gives the same ids for `_EXAMPLES`.

    Args:
        model: with the added tokens among its pieces.
        settings: how texts around special tokens are treated.
        encode: a text's ids, as they should be.
    """
    fast = _convert(model, settings)
    examples = [*_EXAMPLES, *(f"It is{token.content}39{token.content} naturally" for token in settings.added[:16])]
    if fast is None or any(fast.encode(t, add_special_tokens=False).ids != encode(t) for t in examples):
        return None
    return fast


def user_defined_ids(model: sentencepiece.SentencePieceProcessor) -> frozenset[int]:
    """Ids of the pieces that are never divided (``<extra_id_1>``)."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    return frozenset(i for i, piece in enumerate(proto.pieces) if piece.type == piece.USER_DEFINED)


def _convert(model: sentencepiece.SentencePieceProcessor, settings: SentencePieceSettings) -> Tokenizer | None:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    kind = proto.trainer_spec.model_type
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if any(len(piece) > _LONGEST for piece, _ in pieces):
        return None
    has_bytes = any(piece.type == piece.BYTE for piece in proto.pieces)
    if kind == proto.trainer_spec.BPE:
        unknown = pieces[model.unk_id()][0]
        vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
        merges = _merges([(piece.piece, piece.score) for piece in proto.pieces if piece.type == piece.NORMAL])
        fast = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    elif kind == proto.trainer_spec.UNIGRAM:
        fast = Tokenizer(models.Unigram(pieces, model.unk_id(), has_bytes))
    else:
        return None
    _add_text_handling(fast, proto.normalizer_spec, settings)
    marks = (proto.pieces[0].CONTROL, proto.pieces[0].UNKNOWN)
    given = {token.content for token in settings.added}
    marked = [p.piece for p in proto.pieces if p.type in marks and p.piece not in given]
    fast.add_tokens([AddedToken(piece, normalized=False, special=True) for piece in marked])
    defined = [p.piece for p in proto.pieces if p.type == p.USER_DEFINED and p.piece not in given]
    fast.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in defined])
    fast.add_tokens(
        [AddedToken(t.content, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False, special=t.special)
         for t in settings.added]
    )  # fmt: skip
    begin, end = token_of(model, settings, "bos_token"), token_of(model, settings, "eos_token")
    bos, eos = [begin] if begin and settings.add_bos else [], [end] if end and settings.add_eos else []
    if bos or eos:
        ids = [(piece, model.piece_to_id(piece)) for piece in (*bos, *eos)]
        pair = [*bos, "$A", *eos, *(f"{piece}:1" for piece in bos), "$B:1", *(f"{piece}:1" for piece in eos)]
        fast.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], pair=pair, special_tokens=ids)
    return fast


def _merges(scored: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """The pairs that make each piece, best piece first: a sentencepiece model has scores of pieces, but no merges."""
    known = {piece for piece, _ in scored}
    result = []
    for piece, score in scored:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        result += [(score, cut) for cut in cuts if cut[0] in known and cut[1] in known]
    result.sort(key=lambda entry: -entry[0])
    return [cut for _, cut in result]


def _add_text_handling(fast: Tokenizer, spec: Any, settings: SentencePieceSettings) -> None:
    """Add normalization and the treatment of spaces, and the decoder that undoes it."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    has_prefix = spec.add_dummy_prefix and settings.add_prefix_space
    if has_prefix and settings.legacy:
        steps += [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    else:
        scheme = "first" if has_prefix else "never"
        fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    if steps:
        fast.normalizer = normalizers.Sequence(steps)
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(back)
