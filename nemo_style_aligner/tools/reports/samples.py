"""Samples for people: those that a job has kept, and the responses of two models to the same prompts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.reports.run_view import RunView, number
from nemo_style_aligner.trainer.telemetry.log_files import SAMPLES_FILE, TABLES_FILE, newest_lines

T = TypeVar("T")

_SHOWN = 12  # prompts side by side
_VALIDATIONS = 4  # beside each other
_SHOWN_TOKENS = 64  # samples with their tokens
_WORST = -1e30  # finite, so that differences are numbers
_FOUND, _SEARCHED_BYTES = 30, 2**24  # in one search
_READ_BYTES = 2**25  # from the end of the file of samples


class ComparisonError(UserError):
    """A file is not what ``evaluate_gpt.py`` writes."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a response: text, how strongly advantage and KL colour it (-1 to 1), and its numbers in words."""

    text: str
    advantage: float
    kl: float
    numbers: str


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy has said without a break, or (``is_told``) what an environment has told it."""

    is_told: bool
    tokens: Sequence[Token]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response: who gave it, its text, or its turns, and what is known of it.

    Attributes:
        parts: of the reward, by name.
        problem: why there is no reward.
        has_colours: the turns' tokens have numbers.
    """

    label: str
    text: str
    note: str = ""
    reward: float | None = None
    turns: Sequence[Turn] = ()
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    has_colours: bool = False


@dataclasses.dataclass(frozen=True)
class Shown:
    """A prompt and answers to it, side by side."""

    prompt: str
    answers: Sequence[Answer]


Section: TypeAlias = tuple[str, str, Sequence[Shown]]
"""Heading, a sentence, samples."""
_ByModel: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Responses to the same prompts, as ``evaluate_gpt.py`` writes them, by the model's name."""


def compared(files: Mapping[str, Path]) -> list[Shown]:
    """The responses of several models to the same prompts: those that changed most, for better and for worse, and some.

    Args:
        files: by the model's name, what ``evaluate_gpt.py`` has written.

    Raises:
        ComparisonError: a file is something else, or of other prompts.
    """
    by_model = {name: _responses(path) for name, path in files.items()}
    first = next(iter(by_model.values()))
    for name, responses in by_model.items():
        if [r["prompt"] for r in responses] != [r["prompt"] for r in first]:
            raise ComparisonError(f"{files[name]} has other prompts than {next(iter(files.values()))}")
    return _changed(by_model)


def _changed(by_model: _ByModel) -> list[Shown]:
    """See `compared`: from the first model to the last."""
    models = list(by_model.values())
    gains = [_worth(after) - _worth(before) for before, after in zip(models[0], models[-1], strict=True)]
    order = sorted(range(len(gains)), key=lambda row: -gains[row])
    count = _SHOWN // 3
    some = spread([row for row in range(len(gains)) if gains[row] == 0] or order, count)
    by_turns = itertools.zip_longest(order[:count], order[: -count - 1 : -1], some)
    return _side_by_side(by_model, list(dict.fromkeys(row for turn in by_turns for row in turn if row is not None)))


def _side_by_side(by_model: _ByModel, rows: Sequence[int]) -> list[Shown]:
    prompts = next(iter(by_model.values()))
    return [
        Shown(prompts[row]["prompt"], [_evaluated(name, responses[row]) for name, responses in by_model.items()])
        for row in rows
    ]


def sheet(by_model: _ByModel) -> list[Section]:
    """What a person should read of an evaluation (`jobs.evaluation`): the worst, and what changed most.

    Args:
        by_model: responses of a model and, if there is one, of the one before it; or pairs of a reward model.
    """
    ours = next(iter(by_model.values()))
    if "chosen" in ours[0]:
        worst = sorted(ours, key=lambda row: float(row["reward_chosen"] - row["reward_rejected"]))[:_SHOWN]
        pairs = [Shown(row["prompt"], [_of_pair(row, name) for name in ("chosen", "rejected")]) for row in worst]
        return [("Worst judged", "Pairs whose rejected text gets the most above the chosen one.", pairs)]
    order = sorted(range(len(ours)), key=lambda row: (_worth(ours[row]), ours[row]["ended"]))
    worst_first = "Wrong answers first, then the lowest rewards, then what was cut off."
    sections: list[Section] = [("Worst", worst_first, _side_by_side(by_model, order[:_SHOWN]))]
    if len(by_model) > 1:
        before_after = dict(reversed(list(by_model.items())))
        by_turns = "What gained most, what lost most, and some that stayed, by turns."
        sections.append(("Most changed", by_turns, _changed(before_after)))
    if "kl" in ours[0]:
        order = sorted(range(len(ours)), key=lambda row: -float(ours[row]["kl"]))
        furthest = "Responses that the model before finds least likely, relative to the one that gave them."
        sections.append(("Furthest away", furthest, _side_by_side(by_model, order[:_SHOWN])))
    return sections


def _of_pair(row: Mapping[str, Any], name: str) -> Answer:
    return Answer(name, row[name], row["category"], row[f"reward_{name}"])


def _responses(path: Path) -> list[dict[str, Any]]:
    try:
        responses = json.loads(path.read_text(encoding="utf-8"))["responses"]
        if all(isinstance(r["prompt"], str) and isinstance(r["response"], str) for r in responses) and responses:
            return list(responses)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(f"{path} is not what evaluate_gpt.py --output writes: {error}") from error
    raise ComparisonError(f"{path} is not what evaluate_gpt.py --output writes: it has no responses")


def _worth(response: Mapping[str, Any]) -> float:
    """What makes a response better: right before wrong, then its reward."""
    return 1e6 * bool(response.get("is_right")) + float(response.get("reward") or 0.0)


def _evaluated(name: str, response: Mapping[str, Any]) -> Answer:
    is_right = response.get("is_right")
    note = "" if is_right is None else "right" if is_right else "wrong"
    turns = [Turn(who != "policy", [Token(text, 0.0, 0.0, "")]) for who, text in response.get("turns") or ()]
    parts, problem = response.get("parts") or {}, response.get("problem")
    return Answer(name, response["response"], note, response.get("reward"), turns, parts, problem)


def validated(tables: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """The responses to the same validation prompts, in the first, the last and some validations between."""
    logged = [table for table in tables if table["key"] == "table/val_rollouts"]
    if len(logged) < 2:
        return []
    chosen = spread(logged, _VALIDATIONS)
    answers = [{row[0]: _logged(table, row) for row in table["rows"]} for table in chosen]
    prompts = [row[0] for row in chosen[-1]["rows"] if all(row[0] in of_step for of_step in answers)]
    return [Shown(prompt, [of_step[prompt] for of_step in answers]) for prompt in dict.fromkeys(prompts[:_SHOWN])]


def _logged(table: Mapping[str, Any], row: Sequence[Any]) -> Answer:
    return Answer(f"step {table['step']}", str(row[1]), reward=_number(row[2]))


def recorded(log_dir: Path) -> list[Shown]:
    """Of a run with ``save_samples``: the best and the worst samples of the last step, token by token."""
    newest: dict[int, dict[str, Any]] = {}
    path = log_dir / SAMPLES_FILE
    step: int | None = None
    for start, record in newest_lines(path):
        step = record["step"] if step is None else step
        if record["step"] != step or start < path.stat().st_size - _READ_BYTES:
            break
        newest.setdefault(record["sample"], record)  # a resumed run repeats steps: the last counts
    ranked = sorted(newest.values(), key=lambda record: (-_reward(record), record["sample"]))
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in ranked:
        groups.setdefault(record["group"], []).append(record)
    if len(groups) < len(ranked):  # several responses to a prompt: the best and the worst, where they differ most
        chosen = sorted(
            ([group[0], group[-1]] for group in groups.values()), key=lambda pair: _reward(pair[1]) - _reward(pair[0])
        )
    else:
        pairs = zip(ranked, reversed(ranked), strict=True)
        chosen = [[record] for pair in pairs for record in pair][: len(ranked)]
    return [Shown(of_prompt[0]["prompt"], list(map(_recorded, of_prompt))) for of_prompt in chosen[:_SHOWN_TOKENS]]


def _reward(record: Mapping[str, Any]) -> float:
    """The reward, the worst of all where it is not finite."""
    reward = _number(record["reward"])
    return _WORST if reward is None else reward


def _recorded(record: Mapping[str, Any]) -> Answer:
    advantages = _numbers(record["advantages"])
    logprobs = _numbers(record["old_logprobs"])
    kls = [p - q for p, q in zip(logprobs, _numbers(record.get("reference_logprobs", logprobs)), strict=True)]
    scales = [max(map(abs, values), default=0.0) or 1.0 for values in (advantages, kls)]
    tokens = [
        Token(piece, a / scales[0], k / scales[1], f"advantage {number(a)}, KL {number(k)}, log-prob {number(p)}")
        for piece, a, k, p in zip(record["pieces"], advantages, kls, logprobs, strict=True)
    ]
    sampled = record.get("sampled") or [1] * len(tokens)  # files of earlier versions have none
    runs = itertools.groupby(zip(sampled, tokens, strict=True), lambda of: of[0])
    parts = {name: part for name, value in record.get("rewards", {}).items() if (part := _number(value)) is not None}
    return Answer(
        f"step {record['step']}",
        record["response"],
        "" if record["ended"] else "cut off",
        _number(record["reward"]),
        [Turn(not is_sampled, [token for _, token in run]) for is_sampled, run in runs],
        parts if len(parts) > 1 else {},  # one is the reward itself
        record.get("problem"),
        has_colours=True,
    )


def _numbers(values: Sequence[Any]) -> list[float]:
    return [_number(value) or 0.0 for value in values]


def _number(value: Any) -> float | None:
    """A number, also of those that JSON cannot spell and strings stand for; None for what is none, or not finite."""
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


def spread(items: Sequence[T], count: int) -> Sequence[T]:
    """At most ``count`` (2 or more) of ``items``, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def find_samples(
    log_dir: Path,
    text: str = "",
    step: int | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    before: int | None = None,
) -> tuple[list[Shown], int | None]:
    """Samples of the whole run, the newest first: all, if the job keeps them (``save_samples``), or those in tables.

    Those with ``text`` in prompt or response, of ``step``, and with a reward from ``low`` to ``high``. A call reads
    some 16 MiB at most, and also returns the ``before`` with which the next call goes on; None if nothing is left.
    """
    path = log_dir / SAMPLES_FILE
    found: list[Shown] = []
    first = None
    for start, line in newest_lines(path if path.exists() else log_dir / TABLES_FILE, before):
        first = start if first is None else first
        for shown in _shown(line) if step in (None, line["step"]) else ():
            (answer,) = shown.answers
            in_range = (low, high) == (-math.inf, math.inf) if answer.reward is None else low <= answer.reward <= high
            if in_range and text.lower() in f"{shown.prompt}\n{answer.text}".lower():
                found.append(shown)
        if len(found) >= _FOUND or first - start > _SEARCHED_BYTES:
            return found, start or None
    return found, None


def _shown(line: Mapping[str, Any]) -> list[Shown]:
    """The samples of a line of either file."""
    if "key" not in line:
        return [Shown(line["prompt"], [_recorded(line)])]
    return [Shown(row[0], [_logged(line, row)]) for row in line["rows"]]


def samples_of(run: RunView, comparison: Sequence[Shown]) -> Iterator[Section]:
    """What a run's section shows: heading, a sentence, samples; ``comparison`` is what `compared` returned."""
    yield (
        "Side by side",
        "The same prompts, answered by each model: what gained most, what lost most, and some that stayed, by turns.",
        comparison,
    )
    tokens = recorded(run.log_dir)
    yield (
        "Token by token",
        f"Best and worst samples of the last step, as far as they are in the last {_READ_BYTES >> 20} MiB of the file. "
        "Colours are relative to a sample's strongest token.",
        tokens,
    )
    side_by_side = comparison or validated(run.tables)
    if not comparison:
        yield "Side by side", "The same prompts in validations from the first to the last.", side_by_side
    if not side_by_side and not tokens:
        yield "Samples", "The newest.", find_samples(run.log_dir)[0][:_SHOWN]
