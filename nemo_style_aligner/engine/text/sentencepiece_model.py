"""Sentencepiece models in the form that programs read which know nothing but Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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


def to_fast_tokenizer(
    model: sentencepiece.SentencePieceProcessor, adds_bos: bool, encode: Callable[[str], list[int]]
) -> Tokenizer | None:
    """The same tokenizer, with its special tokens marked as such; None if none gives the same ids for `_EXAMPLES`.

    Args:
        adds_bos: whether it puts BOS before texts.
        encode: a text's ids, as they should be.
    """
    fast = _convert(model)
    if fast is None or any(fast.encode(t, add_special_tokens=False).ids != encode(t) for t in _EXAMPLES):
        return None
    put_around_texts(fast, model.bos_id() if adds_bos else None, None)
    return fast


def put_around_texts(fast: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Have a tokenizer put BOS before and EOS behind each text that it is given; None: not."""
    special = {i: fast.id_to_token(i) for i in (bos, eos) if i is not None}
    before, after = ([special[i]] if i is not None else [] for i in (bos, eos))
    if special:
        fast.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, i) for i, token in special.items()],
        )


def user_defined_ids(model: sentencepiece.SentencePieceProcessor) -> frozenset[int]:
    """Ids of the pieces that are never divided (``<extra_id_1>``)."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    return frozenset(i for i, piece in enumerate(proto.pieces) if piece.type == piece.USER_DEFINED)


def _convert(model: sentencepiece.SentencePieceProcessor) -> Tokenizer | None:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    kind, mark = proto.trainer_spec.model_type, sentencepiece_model_pb2.ModelProto.SentencePiece
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
    _add_text_handling(fast, proto.normalizer_spec)
    for kinds, is_special in (((mark.CONTROL, mark.UNKNOWN), True), ((mark.USER_DEFINED,), False)):
        found = [piece.piece for piece in proto.pieces if piece.type in kinds]
        fast.add_tokens([AddedToken(piece, normalized=False, special=is_special) for piece in found])
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


def _add_text_handling(fast: Tokenizer, spec: Any) -> None:
    """Add normalization and the treatment of spaces, and the decoder that undoes it."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        fast.normalizer = normalizers.Sequence(steps)
    scheme = "first" if spec.add_dummy_prefix else "never"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(back)
