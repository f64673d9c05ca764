"""What people prefer: comparisons of two responses to a prompt, and single responses that are good or bad.

A comparison is a good text and a bad one on consecutive lines, or both responses on one: ``chosen`` and ``rejected``,
as in TRL, OpenRLHF and NeMo-RL, or ``chosen_response`` and ``rejected_response``, as in NeMo-Aligner. The prompt may
have a key of its own, ``prompt``. Prompt and responses are texts, which are joined as they are, or conversations in
OpenAI's form, which `chat_rendering` renders.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_style_aligner.engine.text.chat_rendering import ChatRenderer
from nemo_style_aligner.engine.text.chats import (
    Conversation,
    Turn,
    meant_for,
    read_messages,
    read_tools,
    read_turn,
    system_turn,
)
from nemo_style_aligner.engine.text.encoding import Lines, Ragged, Samples
from nemo_style_aligner.engine.text.jsonl import Counts, DataError, Record
from nemo_style_aligner.engine.text.texts import (
    CONTEXT_KEYS,
    ScoredText,
    TextEncoder,
    longer_than,
    rendered_text,
    report_dropped,
    report_unused,
    scored_text,
)
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.wording import common_start

logger = logging.getLogger(__name__)

_KEYS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))  # the latter are NeMo-Aligner's
_REWARDS = (("chosen_reward", "score_chosen"), ("rejected_reward", "score_rejected"))  # NeMo-Aligner's, UltraFeedback's
_KINDS = "a string, or a list of messages"
_EMPTY = "with an empty response (model.data.append_eod=True gives it an end)"
_LARGEST, _SHOWN = 1e30, 40  # of rewards, and digits of them in messages
_NO_PAIRS = (
    "no two lines have the same prompt, so nothing can be compared. A line should be {'prompt', 'chosen', 'rejected'}; "
    "or of two lines with the same question, the first has the better answer. Lines with one answer each are for "
    "fine-tuning"
)
_FEWEST_PAIRS = 8  # of a batch: with fewer, it would be left to chance whether they look like pairs


class ComparisonEncoder(TextEncoder):
    """Pairs as columns ``chosen``, ``rejected``, ``prompts`` (tokens of each one's prompt), ``rewards`` (NaN: none) and
    ``line``, the number of the chosen text's.

    Where a line does not tell where the responses begin, what both texts share is the prompt, but for the last token.

    Its settings are those of `TextEncoder`, ``append_eod`` and ``seq_length``. ``counts``: pairs, of which "equal", or
    "empty" (a response has no token) or too "long", "without prompt", with "other prompts" for either response (on two
    lines also "strange neighbours"), or with one that both have "repeated"; pairs "looked at" and "strangers"
    (`_count_strangers`); pairs "rewarded", at least in part, "without reward", or "against rewards".
    """

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        pairs = _read_pairs(lines, self.chats)
        texts = [text for pair in pairs for text in pair]
        columns = {name: Ragged() for name in ("chosen", "rejected", "prompts")}
        columns |= {"rewards": Ragged("d"), "line": Ragged("q")}
        samples = Samples(columns, self.take_counts(lines, texts[0].prompt))
        counts = samples.counts
        if len(pairs) >= _FEWEST_PAIRS:
            counts["looked at"] += len(pairs)
            counts["strangers"] += _count_strangers([(chosen.text, rejected.text) for chosen, rejected in pairs])
        tokens = self.tokenize_apart(texts)
        for (chosen, prompt), (rejected, other_prompt), pair in zip(tokens, tokens, pairs, strict=True):
            counts["pairs"] += 1
            if chosen == rejected:
                counts["equal"] += 1
            elif len(chosen) <= prompt or len(rejected) <= other_prompt:
                counts["empty"] += 1
            elif max(len(chosen), len(rejected)) > self.settings["seq_length"]:
                counts["long"] += 1
            else:
                is_other = chosen[:prompt] != rejected[:other_prompt]
                counts["other prompts"] += is_other
                counts["strange neighbours"] += is_other and pair[0].record.line != pair[1].record.line
                counts["repeated"] += _repeats(pair[0]) and _repeats(pair[1])
                if not (prompt and other_prompt):
                    counts["without prompt"] += 1
                    alike = itertools.takewhile(lambda ids: ids[0] == ids[1], zip(chosen, rejected, strict=False))
                    prompt = other_prompt = min(len(list(alike)), len(chosen) - 1, len(rejected) - 1)
                columns["chosen"].append(chosen)
                columns["rejected"].append(rejected)
                columns["prompts"].append((prompt, other_prompt))
                rewards = [_given_reward(pair[0].record, keys) for keys in _REWARDS]
                missing = [math.isnan(reward) for reward in rewards]
                counts.update({"rewarded": not all(missing), "without reward": any(missing)})
                counts["against rewards"] += rewards[0] < rewards[1]
                columns["rewards"].append(rewards)
                columns["line"].append([pair[0].record.line])
        return samples

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        if counts["strangers"] > counts["looked at"] / 4:
            warn_for_all_ranks(
                logger,
                "%s: in %d of %d pairs, the two texts share no longer a prefix than texts of different pairs do. Both "
                "should begin with the same prompt, the good response on one line and the bad one on the next: are "
                "these comparisons, and is no line missing?",
                ", ".join(map(str, paths)),
                counts["strangers"],
                counts["looked at"],
            )
        report_dropped(counts["equal"], counts["pairs"], "pairs", "of two texts that are the same", paths)
        used = counts["pairs"] - counts["equal"] - counts["empty"] - counts["long"]
        if used and counts["strange neighbours"] == used:
            raise DataError(f"{', '.join(map(str, paths))}: {_NO_PAIRS}")
        left = counts["pairs"] - counts["equal"]
        report_dropped(counts["empty"], left, "pairs", _EMPTY, paths)
        limit = longer_than(self.settings["seq_length"])
        report_dropped(counts["long"], left - counts["empty"], "pairs", limit, paths)
        report_unused(counts, paths, "the text does not have")


class PreferenceEncoder(ComparisonEncoder):
    """A `ComparisonEncoder` for those who learn the responses alone."""

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        super().report(counts, paths)
        files = ", ".join(map(str, paths))
        used = counts["pairs"] - counts["equal"] - counts["empty"] - counts["long"]
        if counts["without prompt"]:
            (logger.info if counts["without prompt"] == used else partial(warn_for_all_ranks, logger))(
                "%s: %d of %d pairs do not say where their responses begin (no 'prompt'): what both texts share, from "
                "their beginning, is taken as the prompt, and not learnt",
                files,
                counts["without prompt"],
                used,
            )
        for what, said in (
            ("other prompts", "the chosen and the rejected response are to different prompts, which are not compared"),
            ("repeated", "both responses begin with the 'prompt', which is then in the text twice"),
            ("without reward", "a reward is missing, in whose place model.data.default_*_reward stands"),
            ("against rewards", "the rejected response has the larger reward"),
        ):
            if counts[what] and (what != "without reward" or counts["rewarded"]):
                warn_for_all_ranks(logger, "%s: in %d of %d pairs, %s", files, counts[what], counts["pairs"], said)


def _repeats(text: ScoredText) -> bool:
    """Whether a response begins with its prompt."""
    return not text.is_chat and len(text.prompt) > 1 and text.response.startswith(text.prompt)


def _given_reward(record: Record, keys: Sequence[str]) -> float:
    """What the line says a response is worth, under one of the keys; NaN if it does not."""
    key, *others = [key for key in keys if record.fields.get(key) is not None] or [""]
    if others:
        record.fail(f"{key!r} and {others[0]!r} may be different: remove one of them")
    if not key:
        return math.nan
    value = record.require(key, (int, float), "a number")
    if not -_LARGEST < value < _LARGEST:  # an integer may have hundreds of digits
        record.fail(f"{key!r} should be a finite number, not {str(value)[:_SHOWN]}")
    return float(value)


class JudgedEncoder(TextEncoder):
    """Single responses as columns ``tokens``, ``prompt`` (how many of them are the prompt's) and ``good`` (1 or 0).

    Lines are NeMo-Aligner's, ``response`` and ``preference`` ("chosen" or "rejected"), or TRL's, ``completion`` and
    ``label`` (true or false), each with a ``prompt``. Its settings are those of `TextEncoder`, ``append_eod`` and
    ``seq_length``. ``counts``: responses, of which "good", or "empty" (without a token) or too "long".
    """

    def encode(self, lines: Lines) -> Samples:
        """See `TextEncoder`."""
        read = [_read_judged(record, self.chats) for record in lines.records()]
        columns = {"tokens": Ragged(), "prompt": Ragged(), "good": Ragged("b")}
        samples = Samples(columns, self.take_counts(lines, read[0][0].prompt))
        tokens = self.tokenize_apart([text for text, _ in read])
        for (ids, prompt), (_, is_good) in zip(tokens, read, strict=True):
            samples.counts["responses"] += 1
            if len(ids) <= prompt:
                samples.counts["empty"] += 1
                continue
            if len(ids) > self.settings["seq_length"]:
                samples.counts["long"] += 1
                continue
            samples.counts["good"] += is_good
            columns["tokens"].append(ids)
            columns["prompt"].append([prompt])
            columns["good"].append([is_good])
        return samples

    def report(self, counts: Counts, paths: Sequence[str | Path]) -> None:
        """See `TextEncoder`."""
        left = counts["responses"] - counts["empty"]
        report_dropped(counts["empty"], counts["responses"], "responses", _EMPTY, paths)
        report_dropped(counts["long"], left, "responses", longer_than(self.settings["seq_length"]), paths)
        report_unused(counts, paths, "the text does not have")
        used = left - counts["long"]
        if used > 1 and counts["good"] in (0, used):
            said = "good" if counts["good"] else "bad"
            warn_for_all_ranks(logger, "%s: all responses are %s ones", ", ".join(map(str, paths)), said)


def _read_judged(record: Record, chats: ChatRenderer) -> tuple[ScoredText, bool]:
    """The response of a line, and whether it is a good one."""
    if {"response", "completion"} <= record.fields.keys():
        record.fail("'response' and 'completion' may be different ones: remove one of them")
    key, verdict = ("response", "preference") if "response" in record.fields else ("completion", "label")
    said = record.fields.get(verdict)
    is_good = {"chosen": True, "rejected": False}.get(said) if isinstance(said, str) else said
    if not isinstance(is_good, bool):
        record.fail(
            "a line should be {'prompt', 'response', 'preference': 'chosen' or 'rejected'} or {'prompt', 'completion', "
            f"'label': true or false}}; {verdict!r} is {said!r}{meant_for(record)}"
        )
    given = _read(record, key)
    text = _as_text(record, key, given, chats)
    if not text.prompt:
        record.fail("'prompt' is missing or empty: what is learnt is a response to it")
    _require_question(record, given, text, chats.counts)
    return text, is_good


def _count_strangers(pairs: Sequence[tuple[str, str]]) -> int:
    """How many pairs do not look like a good and a bad response to the same prompt.

    Since all texts may begin alike, the common start of a pair's texts is compared with that of its first text and one
    of another pair. For texts that are not pairs, it is no longer in about half of the comparisons.
    """
    others = [pairs[(n + len(pairs) // 2) % len(pairs)][0] for n in range(len(pairs))]
    return sum(
        len(common_start(good, bad)) <= len(common_start(good, other))
        for (good, bad), other in zip(pairs, others, strict=True)
    )


def _read_pairs(lines: Lines, chats: ChatRenderer) -> list[tuple[ScoredText, ScoredText]]:
    """The pairs of lines, the good text first. Raises DataError."""
    records = lines.records()
    if any(key in lines.first_record().fields for keys in _KEYS for key in keys):
        return [_read_pair(record, chats) for record in records]
    texts = [scored_text(record, chats) for record in records]
    if len(records) % 2:
        records[-1].fail(
            f"the file holds {lines.start + len(records)} texts, an odd number; each good response needs "
            f"its bad one on the next line, and this last one has none"
        )
    return list(zip(texts[::2], texts[1::2], strict=True))


def _read_pair(record: Record, chats: ChatRenderer) -> tuple[ScoredText, ScoredText]:
    """The chosen and the rejected text of a line, each with its prompt.

    Raises:
        DataError: the line has neither texts nor conversations, or conversations that cannot be rendered whole.
    """
    found = [keys for keys in _KEYS if any(key in record.fields for key in keys)]
    if len(found) > 1:
        record.fail(f"{found[0][0]!r} and {found[1][0]!r} may be different pairs: remove one of them")
    keys = found[0] if found else _KEYS[0]
    given = [_read(record, key) for key in keys]
    if type(given[0]) is not type(given[1]):
        record.fail(f"{keys[0]!r} and {keys[1]!r} should both be texts, or both lists of messages")
    chosen, rejected = (_as_text(record, key, text, chats) for key, text in zip(keys, given, strict=True))
    _require_question(record, given[0], chosen, chats.counts)
    _require_question(record, given[1], rejected, Counts())
    return chosen, rejected


def _read(record: Record, key: str) -> ScoredText | Conversation:
    if isinstance(record.fields.get(key), dict):  # NeMo-Aligner's: one message
        record = dataclasses.replace(record, fields={**record.fields, key: [record.fields[key]]})
    response = record.require(key, (str, list), _KINDS)
    prompt = "" if record.fields.get("prompt") is None else record.require("prompt", (str, list), _KINDS)
    if isinstance(response, str):
        if not isinstance(prompt, str):
            record.fail(f"'prompt' is a list of messages, but {key!r} is a string: give both in the same form")
        return ScoredText(record, record.text("prompt") if prompt else "", record.text(key))
    turns = _with_prompt(record, key, prompt, read_messages(record, key))
    return Conversation([*system_turn(record), *turns], read_tools(record))


def _with_prompt(record: Record, key: str, prompt: str | list[Any], turns: list[Turn]) -> list[Turn]:
    """Prompt and response, the prompt once if the response repeats it. A prompt of text is the user's."""
    if isinstance(prompt, list):
        asked = read_messages(record, "prompt")
        if turns[: len(asked)] == asked:
            return turns
        if asked[-1].kind == turns[0].kind == "assistant":
            record.fail(f"'prompt' ends with the assistant, and so {key!r} would be a second answer: join both")
        return asked + turns
    # What the assistant says may equal the prompt: it is no repetition of it.
    if not prompt or prompt in [turn.content for turn in turns if turn.kind != "assistant"]:
        return turns
    if turns[0].kind != "assistant":
        record.fail(f"'prompt' is none of the messages of {key!r}: remove it, or the messages before the response")
    return [read_turn(Record(record.path, record.line, {"role": "user", "content": record.text("prompt")})), *turns]


def _as_text(record: Record, what: str, given: ScoredText | Conversation, chats: ChatRenderer) -> ScoredText:
    if isinstance(given, Conversation):
        return rendered_text(record, repr(what), given, chats)
    chats.counts["blank"] += not given.response.strip()
    return given


def _require_question(record: Record, given: ScoredText | Conversation, text: ScoredText, counts: Counts) -> None:
    """Refuse lines of which a part of the question would be left out; count what may be one beside a question."""
    asks = isinstance(given, Conversation) and any(turn.kind in ("user", "tool") for turn in given.turns)
    has_question = bool(asks or record.fields.get("prompt"))
    for key in CONTEXT_KEYS:
        value = record.fields.get(key)
        if not value or key == "prompt" or (isinstance(value, str) and value.strip() in text.text):
            continue
        if key == "system" or not has_question:
            record.fail(f"{key!r} is no part of the text that is scored: put it into 'prompt', or remove it")
        counts[f"unused {key}"] += 1
