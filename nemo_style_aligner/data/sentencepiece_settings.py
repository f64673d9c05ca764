"""What a Hugging Face directory says beside its sentencepiece model: added tokens, roles, spaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import sentencepiece

from nemo_style_aligner.parsing import parse_json

_MAX_ADDED = 1 << 16  # ids beyond those of the model


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
    from sentencepiece import sentencepiece_model_pb2

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
