"""Data of supervised fine-tuning: prompt and response pairs, and chats; loss on the responses only.

Three kinds of line, told apart by their keys:

    {"input": "...", "output": "..."}                                       filled into a prompt template
    {"messages": [{"role": "user", "content": "..."}, ...]}                 OpenAI's chat format
    {"system": "", "mask": "User", "conversations": [{"from": "User", "value": "..."}, ...]}    NeMo's
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_style_aligner.data.datasets import RaggedInts, read_records, report_dropped
from nemo_style_aligner.data.jsonl import DataError, Record
from nemo_style_aligner.data.tokenizer import Tokenizer, TokenizerError
from nemo_style_aligner.telemetry import activity

_SEPARATOR = 0  # NeMo-Aligner's, whichever token that is


@dataclass(frozen=True)
class ChatPromptTokens:
    """NeMo's chat markup (``model.data.chat_prompt_tokens``): strings around the parts of a conversation."""

    system_turn_start: str
    turn_start: str
    label_start: str
    end_of_turn: str
    end_of_name: str


@dataclass(frozen=True, kw_only=True)
class SFTFormat:
    """How lines become tokens: the keys of ``model.data.train_ds`` and ``validation_ds`` that say so.

    Their defaults are the configuration's; here only what may be absent has one.
    """

    max_seq_length: int
    min_seq_length: int
    prompt_template: str  # "{input} {output}": the response's placeholder comes last
    label_key: str  # "output", the response's key
    truncation_field: str  # keys to shorten when a sample is too long, "a,b" in that order; "" for none
    truncation_method: Literal["left", "right"]  # the end that is cut off
    add_bos: bool
    add_eos: bool
    add_sep: bool  # put token `_SEPARATOR` between prompt and response
    answer_only_loss: bool  # False: loss on prompts too
    chats_only: bool  # False: pairs, too
    chat_prompt_tokens: ChatPromptTokens | None = None  # None: the tokenizer's chat template renders chats

    def __post_init__(self) -> None:
        placeholder = "{" + self.label_key + "}"
        if not self.prompt_template.endswith(placeholder) or self.prompt_template.count(placeholder) != 1:
            raise DataError(
                f"prompt_template {self.prompt_template!r} should end with {placeholder}, the place of the "
                f"response (label_key is {self.label_key!r})"
            )
        if self.truncation_method not in ("left", "right"):
            raise DataError(f"truncation_method should be 'left' or 'right', not {self.truncation_method!r}")
        unknown = set(self.truncation_keys) - set(self.template_keys)
        if unknown:
            raise DataError(
                f"truncation_field {sorted(unknown)[0]!r} is not in prompt_template {self.prompt_template!r}"
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
class _Segment:
    text: str
    is_target: bool


class SFTDataset:
    """Supervised fine-tuning samples. See the module for the kinds of line, `SFTFormat` for the options.

    Overlong pairs are shortened in their truncation fields, then at the end of the response; overlong
    chats at the end. What has no response left, or is shorter than ``min_seq_length``, is dropped with
    a count in the log.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: Tokenizer, options: SFTFormat) -> None:
        self._bos = tokenizer.bos_ids(options.add_bos, "model.data.*.add_bos")
        self._tokenizer, self._options = tokenizer, options
        self._tokens, self._targets = RaggedInts(), RaggedInts("b")
        records = read_records(paths)
        for record in records:
            activity.progress()
            item = self._encode(record)
            if len(item.token_ids) >= options.min_seq_length and any(item.targets[1:]):
                self._tokens.append(item.token_ids)
                self._targets.append(item.targets)
        self.num_dropped = len(records) - len(self._tokens)
        limit = f"shorter than {options.min_seq_length} tokens or without a response within {options.max_seq_length}"
        report_dropped(self.num_dropped, len(records), "samples", limit, paths)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> SFTItem:
        return SFTItem(self._tokens[index], self._targets[index])

    def _encode(self, record: Record) -> SFTItem:
        is_chat = "messages" in record.fields or "conversations" in record.fields
        if self._options.chats_only and not is_chat:
            record.fail(
                "this is a prompt and response pair, but data.chat is on; chats have 'messages' or 'conversations'"
            )
        item = self._encode_chat(record) if is_chat else self._encode_pair(record)
        limit = self._options.max_seq_length
        targets = item.targets if self._options.answer_only_loss else [1] * len(item.targets)
        return SFTItem(item.token_ids[:limit], targets[:limit])

    # ---- pairs ----

    def _encode_pair(self, record: Record) -> SFTItem:
        options, tokenizer = self._options, self._tokenizer
        # Spaces around a field are not the template's, as in NeMo: two in a row would be other tokens.
        fields = {key: record.text(key).strip(" ") for key in options.template_keys}
        between = [_SEPARATOR] if options.add_sep else []
        after = [tokenizer.eos_id] if options.add_eos else []
        room = options.max_seq_length - len(self._bos) - len(between) - len(after)
        prompt, response, is_lost = self._fit(fields, room)
        token_ids = self._bos + prompt + between + response + after
        num_context = len(token_ids) if is_lost else len(self._bos) + len(prompt) + len(between)
        return SFTItem(token_ids, [0] * num_context + [1] * (len(token_ids) - num_context))

    def _fit(self, fields: dict[str, str], room: int) -> tuple[list[int], list[int], bool]:
        """Ids of prompt and response, fields shortened one after the other until both fit into ``room``.

        And whether nothing is left of a response that there was: there is nothing to learn then, not even to end.
        """
        label = self._options.label_key
        had_response = bool(fields[label].strip())
        prompt, response = self._tokenize_pair(fields)
        for key in self._options.truncation_keys:
            while (excess := len(prompt) + len(response) - room) > 0 and fields[key]:
                fields = fields | {key: self._shorten(fields[key], excess)}
                prompt, response = self._tokenize_pair(fields)
        return prompt, response, had_response and not fields[label].strip()

    def _shorten(self, text: str, num_tokens: int) -> str:
        """``text`` with at least one character and about ``num_tokens`` tokens less."""
        ids = self._tokenizer.text_to_ids(text)
        left = self._options.truncation_method == "left"
        kept = ids[num_tokens:] if left else ids[: max(0, len(ids) - num_tokens)]
        # A cut inside a character of several tokens leaves a replacement sign at the edge.
        shorter = self._tokenizer.ids_to_text(kept, keep_special=True).strip("\ufffd") if kept else ""
        return shorter if len(shorter) < len(text) else (text[1:] if left else text[:-1])

    def _tokenize_pair(self, fields: Mapping[str, str]) -> tuple[list[int], list[int]]:
        """Prompt and response, tokenized so that the prompt's ids are those it has at generation.

        Spaces before the response belong to it, as in NeMo: most vocabularies hold words with the
        space in front.
        """
        placeholder = "{" + self._options.label_key + "}"
        template = self._options.prompt_template.removesuffix(placeholder)
        prompt_template = template.rstrip(" ")
        prompt = prompt_template.format_map(fields)
        response = template[len(prompt_template) :] + fields[self._options.label_key]
        prompt_token_ids, response_ids = self._tokenizer.parts_to_ids([prompt, response])
        return prompt_token_ids, response_ids

    # ---- chats ----

    def _encode_chat(self, record: Record) -> SFTItem:
        turns = _openai_turns(record) if "messages" in record.fields else _nemo_turns(record)
        if self._options.chat_prompt_tokens is not None:
            segments = _render_markup(turns, self._options.chat_prompt_tokens)
        else:
            segments = _render_template(record, turns, self._tokenizer)
        segments = [segment for segment in segments if segment.text]
        token_ids: list[int] = []
        targets: list[int] = []
        encoded = self._tokenizer.parts_to_ids([segment.text for segment in segments])
        for segment, ids in zip(segments, encoded, strict=True):
            token_ids += ids
            targets += self._response_targets(ids) if segment.is_target else [0] * len(ids)
        return SFTItem(token_ids, targets)

    def _response_targets(self, ids: Sequence[int]) -> list[int]:
        """Ones up to the response's end token; templates write a line break after it that nobody generates."""
        ends = [i for i, token in enumerate(ids) if token in self._tokenizer.special_ids]
        count = ends[-1] + 1 if ends and self._options.chat_prompt_tokens is None else len(ids)
        return [1] * count + [0] * (len(ids) - count)


@dataclass(frozen=True)
class _Turn:
    role: str  # as the file has it
    content: str
    is_target: bool
    label: str | None = None  # NeMo's attribute string of a turn


def _openai_turns(record: Record) -> list[_Turn]:
    messages = _list_of_objects(record, "messages")
    return [
        _Turn(message.text("role"), message.text("content"), message.text("role") == "assistant")
        for message in messages
    ]


def _nemo_turns(record: Record) -> list[_Turn]:
    masked = record.text("mask") if "mask" in record.fields else "User"
    system = record.text("system") if record.fields.get("system") else ""
    turns = []
    for turn in _list_of_objects(record, "conversations"):
        label = turn.fields.get("label")
        if isinstance(label, str):
            label = turn.text("label")
        role = turn.text("from")
        is_target = role.lower() not in (masked.lower(), "system")  # rendered, they are the same
        turns.append(_Turn(role, turn.text("value"), is_target, None if label is None else str(label)))
    if not any(turn.role.lower() == masked.lower() for turn in turns):
        speakers = ", ".join(dict.fromkeys(turn.role for turn in turns))
        record.fail(f'no turn is from {masked!r}, whose turns are not learnt: set "mask" to one of {speakers}')
    return [_Turn("System", system, is_target=False), *turns] if system else turns


def _list_of_objects(record: Record, key: str) -> list[Record]:
    """The objects of a list, as records so that complaints about them name the line."""
    entries: list[Any] = record.require(key, list, "a list of turns")
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        record.fail(f"{key!r} should be a list of objects, one per turn")
    return [Record(record.path, record.line, entry) for entry in entries]


def _render_markup(turns: Sequence[_Turn], tokens: ChatPromptTokens) -> list[_Segment]:
    """NeMo's markup. A response's targets are its text, the end of its turn and the start of the next one.

    Generation stops at the start of the next turn, which is therefore learnt, and which follows the
    last response for that reason.
    """
    system = ""
    if turns[0].role.lower() == "system":
        system, turns = turns[0].content, turns[1:]
    segments = [_Segment(f"{tokens.system_turn_start}System{tokens.end_of_name}{system}{tokens.end_of_turn}", False)]
    after_response = False
    for turn in turns:
        # OpenAI's role names are lower case, NeMo's are capitalised.
        name = turn.role.capitalize() if turn.role.islower() else turn.role
        segments.append(_Segment(tokens.turn_start, after_response))
        label = "" if turn.label is None else f"{tokens.label_start}{turn.label}{tokens.end_of_name}"
        segments.append(_Segment(f"{name}{tokens.end_of_name}{label}", False))
        segments.append(_Segment(f"{turn.content}{tokens.end_of_turn}", turn.is_target))
        after_response = turn.is_target
    if after_response:
        segments.append(_Segment(tokens.turn_start, True))
    # What nobody generates is a prompt, tokenized in one piece.
    kinds = itertools.groupby(segments, lambda segment: segment.is_target)
    return [_Segment("".join(segment.text for segment in group), is_target) for is_target, group in kinds]


def _render_template(record: Record, turns: Sequence[_Turn], tokenizer: Tokenizer) -> list[_Segment]:
    """The tokenizer's chat template. A response's text is what the template adds to its generation prompt."""
    messages = [
        {"role": turn.role.lower(), "content": turn.content}
        for turn in turns
        if turn.content or turn.role.lower() != "system"
    ]
    is_target = [turn.is_target for turn in turns if turn.content or turn.role.lower() != "system"]
    try:
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        segments, position = [], 0
        for i in (i for i, learnt in enumerate(is_target) if learnt):
            prompt = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
            answered = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
            if not (whole.startswith(answered) and answered.startswith(prompt)):
                record.fail(
                    f"the tokenizer's chat template renders turn {i + 1} in another way when it is not the last, so "
                    f"its place cannot be found: cut the conversation after one response, or change the template"
                )
            segments += [
                _Segment(whole[position : len(prompt)], False),
                _Segment(whole[len(prompt) : len(answered)], True),
            ]
            position = len(answered)
    except TokenizerError as error:
        record.fail(str(error))
    return [*segments, _Segment(whole[position:], False)]
