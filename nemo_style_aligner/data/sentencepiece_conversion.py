"""Convert sentencepiece models to Hugging Face's `tokenizers`, for programs that read nothing else."""

from __future__ import annotations

from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE = "▁"

# None begins with a space, to which only sentencepiece adds another one. None has carriage returns, which `tokenizers`
# normalizes differently if the model has rules for them.
_EXAMPLES = (
    "User: What is 3*(17-4)?\nAssistant: It is 39, naturally.  \tdef f(x): return x**2 # Größe, 数, été\n",
    "two  spaces,   three    and four\n\n  a line with an indent, 12345.67 and\ntrailing spaces   ",
    "Ünïcödé ﬁ ½ ① \u3000 ８ e\u0301 \u200b😀 naïve _ __ and _under_",
    "The quick brown fox jumps over 1,000,000 lazy dogs; whether they were there, others'd know.",
)


def to_fast_tokenizer(model: sentencepiece.SentencePieceProcessor) -> Tokenizer | None:
    """The same tokenizer, with its special tokens marked as such; None if none gives the same ids for `_EXAMPLES`."""
    try:
        fast = _convert(model)
    except ImportError:  # no protobuf, which parses the model
        return None
    if fast is None or any(fast.encode(t, add_special_tokens=False).ids != model.encode(t) for t in _EXAMPLES):
        return None
    return fast


def user_defined_ids(model: sentencepiece.SentencePieceProcessor) -> frozenset[int]:
    """Ids of the pieces that are never divided (``<extra_id_1>``); none without protobuf, which parses the model."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        return frozenset()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    return frozenset(i for i, piece in enumerate(proto.pieces) if piece.type == piece.USER_DEFINED)


def _convert(model: sentencepiece.SentencePieceProcessor) -> Tokenizer | None:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    kind = proto.trainer_spec.model_type
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
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
    marks = (proto.pieces[0].CONTROL, proto.pieces[0].UNKNOWN)
    fast.add_special_tokens(
        [AddedToken(p.piece, normalized=False, special=True) for p in proto.pieces if p.type in marks]
    )
    defined = [p.piece for p in proto.pieces if p.type == p.USER_DEFINED]
    fast.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in defined])
    if model.bos_id() >= 0:
        bos = model.id_to_piece(model.bos_id())
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, model.bos_id())]
        )
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
