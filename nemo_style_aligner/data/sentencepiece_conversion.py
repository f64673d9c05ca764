"""Convert sentencepiece models to Hugging Face's `tokenizers`, for programs that read nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nemo_style_aligner.data.sentencepiece_settings import SentencePieceSettings, token_of

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
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    return frozenset(i for i, piece in enumerate(proto.pieces) if piece.type == piece.USER_DEFINED)


def _convert(model: sentencepiece.SentencePieceProcessor, settings: SentencePieceSettings) -> Tokenizer | None:
    from sentencepiece import sentencepiece_model_pb2

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
