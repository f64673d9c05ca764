"""Data of supervised fine-tuning: prompt and response pairs, and chats; by default, loss on the responses only.

Three kinds of line, told apart by their keys:

    {"input": "...", "output": "..."}                                       filled into a prompt template
    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}      OpenAI's chat format
    {"system": "", "mask": "User", "conversations": [{"from": "User", "value": "..."}, ...]}    NeMo's, ShareGPT's
"""

from __future__ import annotations

import dataclasses
import logging
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_style_aligner.engine.text.chat_rendering import Segment
from nemo_style_aligner.engine.text.chats import is_conversation, is_instruction, meant_for, read_conversation
from nemo_style_aligner.engine.text.encoding import Lines, Ragged, Samples
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record
from nemo_style_aligner.engine.text.text_format import ChatPromptTokens
from nemo_style_aligner.engine.text.texts import CONTEXT_KEYS, TextDataset, TextEncoder, report_dropped, report_unused
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.kinds import TruncationMethod
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.config.schema import ChatData, SFTFiles
from nemo_style_aligner.wording import unescaped

logger = logging.getLogger(__name__)

_TEMPLATE = "{input} {output}"  # the default
_SEPARATOR = 0  # as in NeMo-Aligner, whichever token that is


@dataclass(frozen=True, kw_only=True)
class SFTFormat:
    """How lines become tokens: the keys of ``model.data.train_ds`` and ``validation_ds`` that say so.

    Defaults are in the configuration; here only what may be absent has one.
    """

    max_seq_length: int
    min_seq_length: int
    prompt_template: str  # "{input} {output}": the response's placeholder comes last
    label_key: str  # "output", the response's key
    truncation_field: str  # keys to shorten when a sample is too long, "a,b" in that order; "" for none
    truncation_method: TruncationMethod
    add_bos: bool | None  # None: as the model was trained, else as tokenizer or chat template have it
    add_eos: bool
    add_sep: bool  # put token `_SEPARATOR` between prompt and response
    answer_only_loss: bool  # False: loss on prompts too
    chats_only: bool  # False: pairs are accepted, too
    chat_prompt_tokens: ChatPromptTokens | None = None  # None: the tokenizer's chat template renders chats

    def __post_init__(self) -> None:
        placeholder = "{" + self.label_key + "}"
        if not self.prompt_template.endswith(placeholder) or self.prompt_template.count(placeholder) != 1:
            raise DataError(
                f"prompt_template {self.prompt_template!r} should end with {placeholder}, the place of the "
                f"response (label_key is {self.label_key!r})"
            )
        try:
            unknown = set(self.truncation_keys) - set(self.template_keys)
        except ValueError as error:  # of string.Formatter
            raise DataError(
                f"prompt_template {self.prompt_template!r} cannot be read ({error}): write {{{{ and }}}} for braces of "
                "the text"
            ) from error
        if unknown:
            raise DataError(
                f"truncation_field {sorted(unknown)[0]!r} is not in prompt_template {self.prompt_template!r}"
            )

    @classmethod
    def from_config(cls, files: SFTFiles, data: ChatData, answer_only_loss: bool, *, has_template: bool) -> SFTFormat:
        """That of some of the files of ``data``.

        Args:
            has_template: a tokenizer's chat template renders chats, whatever marks ``data`` has for them.

        Raises:
            DataError: options that do not fit together.
        """
        given = {field.name: vars(files)[field.name] for field in dataclasses.fields(cls) if field.name in vars(files)}
        return cls(
            **given
            | {"prompt_template": unescaped(files.prompt_template), "truncation_field": files.truncation_field or ""},
            answer_only_loss=answer_only_loss,
            chats_only=data.chat,
            chat_prompt_tokens=None if has_template else ChatPromptTokens(**vars(data.chat_prompt_tokens)),
        )

    @property
    def template_keys(self) -> list[str]:
        """Keys of a record, in the order of their places in ``prompt_template``."""
        return [key for _, key, _, _ in string.Formatter().parse(self.prompt_template) if key is not None]

    @property
    def truncation_keys(self) -> list[str]:
        """Keys whose texts are shortened where a sample is too long."""
        return [key.strip() for key in self.truncation_field.split(",") if key.strip()]


@dataclass(frozen=True)
class SFTItem:
    """One sample. ``targets[i]`` is 1 where token i is to be learnt."""

    token_ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class EncodedSample(SFTItem):
    """A sample, and how many tokens were cut off to make it fit: of prompts, and of responses."""

    lost_of_prompts: int = 0
    lost_of_responses: int = 0


class SFTDataset(TextDataset[SFTItem]):
    """Supervised fine-tuning samples. See the module for the kinds of line, `SFTFormat` for the options.

    Overlong pairs are shortened in their truncation fields, then at the end of the response; overlong chats at the
    end. Samples with no response left, or shorter than ``min_seq_length``, are dropped. The log counts both.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: Tokenizer, options: SFTFormat) -> None:
        super().__init__(paths, SFTEncoder(tokenizer, options), SFTItem)


class SFTEncoder(TextEncoder):
    """Samples as columns ``tokens`` and ``targets``, without those that are dropped.

    Its settings are those of `SFTFormat`. ``counts``: samples, those "dropped", and those "shortened", "without prompt"
    or "without response" in part; pairs with a key of `CONTEXT_KEYS` that the template does not name.
    """

    def __init__(self, tokenizer: Tokenizer, options: SFTFormat) -> None:
        settings = dataclasses.asdict(options)
        super().__init__(tokenizer, settings, options.chat_prompt_tokens, "model.data.*.add_bos")
        self._options = options

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        options, limit, records = self._options, self._options.max_seq_length, lines.records()
        columns = {"tokens": Ragged(), "targets": Ragged("b")}
        counts: Counts = Counter()
        for record in records:
            for item in self._samples(record):
                counts["samples"] += 1
                token_ids, targets = item.token_ids[:limit], item.targets[:limit]
                if any(targets) and not options.answer_only_loss:
                    targets = [1] * len(targets)
                if len(token_ids) < options.min_seq_length or not any(targets[1:]):
                    counts["dropped"] += 1
                    continue
                columns["tokens"].append(token_ids)
                columns["targets"].append(targets)
                lost_of_responses = item.lost_of_responses + sum(item.targets[limit:])
                counts["shortened"] += item.lost_of_prompts + lost_of_responses > 0
                counts["without prompt"] += item.lost_of_prompts > 0
                counts["without response"] += lost_of_responses > 0
            if not self._is_chat(record):
                unused = set(CONTEXT_KEYS) - set(options.template_keys)
                counts.update(f"unused {key}" for key in unused if record.fields.get(key))
        first = "" if self._is_chat(records[0]) else self._prompt_and_response(self._fields(records[0]))[0]
        return Samples(columns, self.take_counts(lines, first) + counts)

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        options, files = self._options, ", ".join(map(str, paths))
        report_unused(counts, paths, "prompt_template does not name")
        limit = f"shorter than {options.min_seq_length} tokens or without a response within {options.max_seq_length}"
        report_dropped(counts["dropped"], counts["samples"], "samples", limit, paths)
        if counts["shortened"]:
            warn_for_all_ranks(
                logger,
                "%s: shortened %d of %d samples to %d tokens (max_seq_length, model.encoder_seq_length), cutting "
                "pairs in truncation_field=%s first: %d of them lost a part of a response, %d the %s of the prompt "
                "(truncation_method=%s)",
                files,
                counts["shortened"],
                counts["samples"],
                options.max_seq_length,
                options.truncation_field or "null",
                counts["without response"],
                counts["without prompt"],
                "end, where most questions stand," if options.truncation_method == "right" else "beginning",
                options.truncation_method,
            )

    def _samples(self, record: Record) -> list[EncodedSample]:
        """The samples of a line at any length: one, or several of a chat (`ChatRenderer.examples`)."""
        if self._is_chat(record):
            return [self._encode_chat(text) for text in self.chats.examples(record, read_conversation(record))]
        if self._options.chats_only:
            record.fail(
                "this is a prompt and response pair, but data.chat is on; chats have 'messages' or 'conversations'"
            )
        return [self._encode_pair(record)]

    def _is_chat(self, record: Record) -> bool:
        """Whether a line is a conversation; a template of the user's says itself where an instruction goes."""
        is_pair = is_instruction(record) and self._options.prompt_template != _TEMPLATE
        return is_conversation(record) and not is_pair

    # ---- pairs ----

    def _encode_pair(self, record: Record) -> EncodedSample:
        options, tokenizer = self._options, self.tokenizer
        missing = [key for key in options.template_keys if key not in record.fields]
        if missing:
            record.fail(
                f"key {missing[0]!r} is missing, but prompt_template {options.prompt_template!r} needs it; the keys "
                f"present are: {', '.join(map(repr, record.fields)) or 'none'}. If prompt and response have other "
                "names, give these: 'model.data.train_ds.prompt_template={prompt} {completion}' "
                "model.data.train_ds.label_key=completion model.data.train_ds.truncation_field=prompt"
                f"{meant_for(record)}"
            )
        fields = self._fields(record)
        self.chats.counts["blank"] += not fields[options.label_key].strip()
        between = [_SEPARATOR] if options.add_sep else []
        room = options.max_seq_length - self.begin_with_bos[False] - len(between) - options.add_eos
        whole_prompt, whole_response = self._tokenize_pair(fields)
        prompt, response, is_lost = self._fit(fields, whole_prompt, whole_response, room)
        lost = max(0, len(whole_response) - len(response))
        response = tokenizer.with_end(response) if options.add_eos else response
        token_ids = tokenizer.with_bos(prompt + between + response, self.begin_with_bos[False])
        num_context = len(token_ids) - (0 if is_lost else len(response))
        targets = [0] * num_context + [1] * (len(token_ids) - num_context)
        return EncodedSample(token_ids, targets, max(0, len(whole_prompt) - len(prompt)), lost)

    def _fields(self, record: Record) -> dict[str, str]:
        """The fields of a pair, stripped as in NeMo: beside a space of the template there would be two."""
        return {key: record.text(key).strip(" ") for key in self._options.template_keys}

    def _fit(
        self, fields: dict[str, str], prompt: list[int], response: list[int], room: int
    ) -> tuple[list[int], list[int], bool]:
        """Ids of prompt and response, truncation fields shortened in turn until both fit into ``room``, if they can.

        Also returns whether nothing is left of a response that was not empty: then there is nothing to learn, not even
        to end. ``prompt`` and ``response`` are the ids before shortening.
        """
        label = self._options.label_key
        had_response = bool(fields[label].strip())
        for key in self._options.truncation_keys:
            while (excess := len(prompt) + len(response) - room) > 0 and fields[key]:
                fields = fields | {key: self._shorten(fields[key], excess)}
                prompt, response = self._tokenize_pair(fields)
        return prompt, response, had_response and not fields[label].strip()

    def _shorten(self, text: str, num_tokens: int) -> str:
        """``text`` without about ``num_tokens`` tokens at one end, and at least one character shorter."""
        ids = self.tokenizer.text_to_ids(text)
        left = self._options.truncation_method == "left"
        kept = ids[num_tokens:] if left else ids[: max(0, len(ids) - num_tokens)]
        # A cut inside a character of several tokens leaves a replacement character at the edge.
        shorter = self.tokenizer.ids_to_text(kept, keep_special=True).strip("\ufffd") if kept else ""
        # Without spaces at its edges, as the whole field.
        return (shorter if len(shorter) < len(text) else (text[1:] if left else text[:-1])).strip(" ")

    def _tokenize_pair(self, fields: Mapping[str, str]) -> tuple[list[int], list[int]]:
        """Prompt and response, tokenized so that the prompt's ids are those it has at generation."""
        prompt_token_ids, response_ids = self.tokenizer.parts_to_ids(self._prompt_and_response(fields))
        return prompt_token_ids, response_ids

    def _prompt_and_response(self, fields: Mapping[str, str]) -> tuple[str, str]:
        """Their texts. The template's spaces before the response belong to the response, as in NeMo.

        In most vocabularies, words include the space in front.
        """
        placeholder = "{" + self._options.label_key + "}"
        template = self._options.prompt_template.removesuffix(placeholder)
        prompt_template = template.rstrip(" ")
        prompt = prompt_template.format_map(fields)
        response = template[len(prompt_template) :] + fields[self._options.label_key]
        return prompt, response

    # ---- chats ----

    def _encode_chat(self, segments: Sequence[Segment]) -> EncodedSample:
        token_ids: list[int] = []
        targets: list[int] = []
        encoded = self.tokenizer.parts_to_ids([segment.text for segment in segments])
        for segment, ids in zip(segments, encoded, strict=True):
            token_ids += ids
            targets += [int(segment.is_target)] * len(ids)
        with_bos = self.tokenizer.with_bos(token_ids, self.begin_with_bos[True])
        more = len(with_bos) - len(token_ids)
        return EncodedSample(with_bos, [0] * more + targets[max(0, -more) :])
