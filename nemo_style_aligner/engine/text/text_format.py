"""How the texts were written that a model was trained on: kept in its archive, and the default of what starts from it.

`TextFormat` is the section ``text_format`` of an archive's ``model_config.yaml``. It belongs to the archive's tokenizer
(`Tokenizer.format`), so that whatever reads a model's texts knows how they begin and end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.log_fields import warn_for_all_ranks

logger = logging.getLogger(__name__)

TEXT_FORMAT = "text_format"
"""Its key in ``model_config.yaml``."""

ChatForm = Literal["template", "markers", "text"]
"""Conversations in the tokenizer's chat template or in NeMo's markers; or none, but texts as the data have them."""

_NAMES = {"chat": "conversations", "chat_prompt_tokens": "their markers", "end_strings": "responses end with"}
_NAMES |= {"special_tokens_as_text": "special tokens that messages name are text"}


class TextFormatError(UserError, ValueError):
    """An archive's ``text_format`` cannot be read."""


@dataclass(frozen=True)
class ChatPromptTokens:
    """NeMo's chat markers (``model.data.chat_prompt_tokens``): strings around the parts of a conversation."""

    system_turn_start: str
    turn_start: str
    label_start: str
    end_of_turn: str
    end_of_name: str


@dataclass(frozen=True)
class TextFormat:
    """What is known of the texts that a model was trained on; None where nothing is.

    Attributes:
        chat: how conversations were rendered.
        chat_prompt_tokens: the markers that rendered them.
        end_strings: what ends a response, besides the tokenizer's own stop tokens.
        add_bos: whether texts began with the BOS token.
        append_eod: whether texts that a reward model scored ended with the EOS token.
        special_tokens_as_text: whether the name of a special token in a message is its letters; else it is the token.
    """

    chat: ChatForm | None = None
    chat_prompt_tokens: ChatPromptTokens | None = None
    end_strings: tuple[str, ...] = ()
    add_bos: bool | None = None
    append_eod: bool | None = None
    special_tokens_as_text: bool | None = None

    @classmethod
    def from_config(cls, section: Mapping[str, Any] | None, source: str) -> TextFormat:
        """Read an archive's section; None is one where nothing is known. ``source`` is named in errors.

        Raises:
            TextFormatError: it is not one that `to_config` made.
        """
        try:
            given = dict(section or {})
            markers = given.pop("chat_prompt_tokens", None)
            ends = tuple(map(str, given.pop("end_strings", ())))
            read = cls(**given, chat_prompt_tokens=markers and ChatPromptTokens(**markers), end_strings=ends)
        except (TypeError, ValueError) as error:
            raise TextFormatError(f"{source}: {TEXT_FORMAT}={section} cannot be read: {error}") from error
        if read.chat not in (None, *get_args(ChatForm)):
            forms = ", ".join(get_args(ChatForm))
            raise TextFormatError(f"{source}: {TEXT_FORMAT}.chat={read.chat!r}: must be one of {forms}")
        return read

    def to_config(self) -> dict[str, Any]:
        """The section, without what is not known."""
        fields = dataclasses.asdict(self) | {"end_strings": list(self.end_strings)}
        return {key: value for key, value in fields.items() if value not in (None, [])}

    def with_special_tokens(self, as_text: bool | None) -> TextFormat:
        """This format, except for names of special tokens in messages; None changes nothing."""
        return self if as_text is None else dataclasses.replace(self, special_tokens_as_text=as_text)

    def followed_by(self, written: TextFormat) -> TextFormat:
        """What a model was trained on that had this format, and then texts that were ``written``.

        A model still knows the ends that it has learnt before. Logs what is new, and warns if anything changes.
        """
        known = {key: getattr(written, key) for key in written.to_config()}
        ends = tuple(dict.fromkeys([*self.end_strings, *written.end_strings]))
        both = dataclasses.replace(self, **known | {"end_strings": ends})
        before, after = self.to_config(), both.to_config()
        new = [key for key, value in after.items() if value != before.get(key)]
        said = "; ".join(
            f"{_NAMES.get(key, key)} {json.dumps(before.get(key))} -> {json.dumps(after[key])}" for key in new
        )
        if any(key in before and key != "end_strings" for key in new):
            warn_for_all_ranks(
                logger, "the texts are written otherwise than those that the model was trained on: %s", said
            )
        elif new:
            logger.info("the archive records how its texts are written (%s): %s", TEXT_FORMAT, said)
        return both


def joined(formats: Sequence[TextFormat], source: str) -> TextFormat:
    """The format of samples that come from several files; ``source`` names them in the warning that they differ."""
    known = [written.add_bos for written in formats if written.add_bos is not None]
    if len(set(known)) > 1:
        warn_for_all_ranks(logger, "%s: some files' texts begin with the BOS token, others do not", source)
    chats = [written.chat for written in formats if written.chat is not None]
    eods = [written.append_eod for written in formats if written.append_eod is not None]
    return TextFormat(
        next((form for form in get_args(ChatForm) if form in chats), None),
        next((written.chat_prompt_tokens for written in formats if written.chat_prompt_tokens), None),
        tuple(dict.fromkeys(end for written in formats for end in written.end_strings)),
        known[0] if known else None,
        eods[0] if eods else None,
    )
