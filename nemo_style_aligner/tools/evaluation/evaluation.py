"""Offline evaluation: a policy's responses, alone and beside another's; perplexity; a reward model's judgement."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.jsonl import DataError, read_jsonl
from nemo_style_aligner.engine.text.texts import PlainEncoder, TextDataset
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.errors import NonFiniteError, UserError
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.tools.evaluation import measures
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.data.answers import ANSWER, given_answer, is_right, problem_of
from nemo_style_aligner.trainer.data.datasets import PromptDataset, PromptItem, lengths_of, pad_rows
from nemo_style_aligner.trainer.data.preferences import ComparisonEncoder
from nemo_style_aligner.trainer.models.critic import RewardModel
from nemo_style_aligner.trainer.models.files import config_of, open_model
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts
from nemo_style_aligner.trainer.models.restore import BaseModel, require_same_tokenizer
from nemo_style_aligner.trainer.rl.episodes.runner import (
    Episode,
    build_environment,
    check_environment,
    named_environment,
)
from nemo_style_aligner.trainer.rl.math_verifier import MathVerifier
from nemo_style_aligner.trainer.rl.reward_functions import as_reward
from nemo_style_aligner.trainer.rl.rollouts.collector import as_sample
from nemo_style_aligner.trainer.rl.rollouts.setup import response_text
from nemo_style_aligner.trainer.rl.sample import Prompt, Sample
from nemo_style_aligner.trainer.telemetry.progress import Progress

_MAX_LENGTH = 128  # tokens of a response
_SCORING_BATCH = 64
_BATCHING = MicroBatching(num_rows=16)

Measures: TypeAlias = dict[str, measures.Measure | int]
Grader: TypeAlias = Callable[[str, Mapping[str, Any]], bool]
"""(response, the prompt's line) -> whether it is right."""
Text: TypeAlias = tuple[list[int], int]
"""Token ids, and how many of them, from the first on, are given."""
Results: TypeAlias = dict[str, dict[str, Any]]
"""By what was measured (a model's path; "change", from the second model to the first; "all" pairs, or a category):
``summary`` and ``intervals`` (`evaluation_measures.as_json`), and ``responses``. As JSON has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is measured, and how: the options of ``nsa eval``, which describe each."""

    model: Path
    against: Path | None = None
    prompts: Path | None = None
    texts: Path | None = None
    comparisons: Path | None = None
    category: str | None = None
    reward_model: Path | None = None
    environment: str | None = None
    samples: int = 1
    k: tuple[int, ...] = ()
    math: bool = False
    greedy: bool = False
    temperature: float = 1.0
    max_length: int | None = None
    end_strings: tuple[str, ...] = ()
    add_bos: bool | None = None
    limit: int | None = None
    num_slots: int = 32
    precision: str = "bf16"
    seed: int = 1234

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """How responses are made; the model's files are asked once. Raises UserError."""
        try:
            return SamplingParams(
                max_new_tokens=self.max_length or default_max_length(self.model),
                use_greedy=self.greedy,
                temperature=self.temperature,
                stop_strings=self.end_strings,
                seed=self.seed,
            )
        except ValueError as error:
            raise UserError(str(error)) from error


@dataclasses.dataclass
class EvaluatedResponse:
    """A prompt's response and what is known of it.

    Attributes:
        prompt, response: text; the response without special tokens and end string.
        tokens: token ids of both.
        num_response_tokens: tokens of the response, the stop token or those of the end string included.
        ended: whether a stop token or stop string ended it.
        line: the prompt's line, with the right answer, if it has one (see `answers`).
        number: the prompt's.
        is_right, reward: None: not known.
        kl: its log-prob under the model that gave it less that under the other one, in nats; None: not known.
        parts: of an environment's reward, by name.
        replies: of the policy in an episode; None: it is none.
        problem: why an episode has failed.
        turns: of an episode: who has said what after the prompt ("policy" or "environment").
    """

    prompt: str
    response: str
    tokens: list[int]
    num_response_tokens: int
    ended: bool
    line: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    is_right: bool | None = None
    reward: float | None = None
    kl: float | None = None
    parts: Mapping[str, float] | None = None
    replies: int | None = None
    problem: str | None = None
    turns: Sequence[tuple[str, str]] | None = None

    @property
    def has_failed(self) -> bool | None:
        """Whether an episode has; None: it is none."""
        return None if self.replies is None else self.problem is not None

    def to_json(self) -> dict[str, Any]:
        """What is known, without token ids."""
        record = {k: v for k, v in vars(self).items() if k not in ("tokens", "line", "number") and v is not None}
        if self.is_right is not None:
            record |= {ANSWER: self.line[ANSWER], "given_answer": given_answer(self.response, self.line)}
        return record


_Measured: TypeAlias = tuple[Callable[[EvaluatedResponse], float | None], Callable[[Any], measures.Measure]]
_OF_RESPONSES: dict[str, _Measured] = {
    "accuracy": (lambda row: row.is_right, measures.share),
    "reward": (lambda row: row.reward, measures.mean),
    "length": (lambda row: row.num_response_tokens, measures.mean),
    "ended": (lambda row: row.ended, measures.share),
    "replies": (lambda row: row.replies, measures.mean),
    "failed": (lambda row: row.has_failed, measures.share),
}


def _part(name: str, row: EvaluatedResponse) -> float | None:
    return (row.parts or {}).get(name)


@dataclasses.dataclass
class Responses:
    """All responses of a model, those to a prompt one after the other."""

    rows: list[EvaluatedResponse]

    def by_prompt(self) -> list[list[EvaluatedResponse]]:
        """The responses to each prompt."""
        groups: dict[int, list[EvaluatedResponse]] = {}
        for row in self.rows:
            groups.setdefault(row.number, []).append(row)
        return list(groups.values())

    @property
    def measured(self) -> Mapping[str, _Measured]:
        """What may be measured of a response, and what over them."""
        parts = sorted({part for row in self.rows for part in row.parts or ()})
        return _OF_RESPONSES | {f"reward/{part}": (functools.partial(_part, part), measures.mean) for part in parts}

    def values(self, name: str) -> NDArray[Any]:
        """Of what is `measured` the mean of each prompt's responses, NaN where it is not known."""
        of = self.measured[name][0]
        return np.array([np.mean(np.array([of(row) for row in rows], np.float64)) for rows in self.by_prompt()])

    def summary(self, k: Sequence[int]) -> Measures:
        """Counts, means over prompts of what `values` knows, and ``pass@K`` of prompts that have an answer."""
        result: Measures = {"num_prompts": len(self.by_prompt()), "num_responses": len(self.rows)}
        for name, (_, measure) in self.measured.items():
            values = self.values(name)
            if len(known := values[~np.isnan(values)]):
                result[name] = measure(known)
        answered = [[row.is_right for row in rows] for rows in self.by_prompt() if rows[0].is_right is not None]
        if answered:
            result["num_with_answer"] = len(answered)
            result |= {
                f"pass@{n}": measures.share([measures.pass_at_k(len(r), r.count(True), n) for r in answered]) for n in k
            }
        return result


def default_max_length(model_path: Path) -> int:
    """Longest response in tokens: 128, or half of the model's positions where that is less.

    For the errors see `files.open_model`.
    """
    architecture = ModelArchitecture.from_nemo_config(config_of(model_path))
    return min(_MAX_LENGTH, max(1, architecture.max_position_embeddings // 2))


# ---- language models ----------------------------------------------------------------------------


@dataclasses.dataclass
class _Policy:
    """What a language model gave: responses, and its log-probs of those of the first model and of texts."""

    responses: Responses
    of_first: list[float]
    of_texts: list[float]


def evaluate_policies(settings: EvaluationSettings, tell: Callable[[Results], None]) -> None:
    """Measure a language model, and another one on the same prompts and texts. Needs `groups.single_process`.

    What can be told from files alone is told before a model is loaded. ``tell`` gets what is known before rewards are,
    and all.

    Raises:
        UserError: a model or a line cannot be used; the message says why.
    """
    s = settings
    if s.prompts is not None:
        _ = s.sampling  # refuses what is out of range
    if s.environment is not None:
        check_environment(named_environment(s.environment), "--environment")
    bases = [open_policy(path, s.precision) for path in (s.model, s.against) if path is not None]
    if s.against is not None:
        require_same_tokenizer(bases[0], bases[1], "a model")
    reward_model = open_model(s.reward_model, s.precision) if s.reward_model is not None else None
    if reward_model is not None:
        require_same_tokenizer(bases[0], reward_model)
        reward_model.require_rewards()
    prompts = read_prompts(bases, s) if s.prompts is not None else []
    texts = _read_texts(bases, s) if s.texts is not None else []
    grade = _grader(s.math, prompts)
    policies: list[_Policy] = []
    for base in bases:
        policies.append(_measure(base, prompts, texts, policies[0].responses if policies else None, s))
        _grade(policies[-1].responses, grade)
    for row, own, other in zip(policies[0].responses.rows, policies[0].of_first, policies[-1].of_first, strict=False):
        row.kl = own - other
    tell(_results(policies, texts, s))
    if reward_model is not None:
        score(Responses([row for policy in policies for row in policy.responses.rows]), reward_model)
        tell(_results(policies, texts, s))


def open_policy(path: Path, precision: str) -> BaseModel:
    """A language model. Raises UserError, also if it is another model."""
    base = open_model(path, precision)
    if "reward_model_type" in base.config:
        raise UserError(f"{path} is a reward model or critic, which generates no text: give a language model")
    return base


def read_prompts(bases: Sequence[BaseModel], settings: EvaluationSettings) -> list[PromptItem]:
    """The prompts, as the first model reads them, that leave each model room for a response.

    Raises:
        DataError: there is none; or right answers are asked for, and a line has none.
        TokenizerError: there is no BOS token, or an end string could never be found.
    """
    sampling, tokenizer, path = settings.sampling, bases[0].tokenizer, bases[0].path
    tokenizer.end_strings(sampling.stop_strings)
    positions = _positions(bases)
    room = positions - sampling.max_new_tokens
    if room < 1:
        raise DataError(
            f"{path} has {positions} positions, which leaves no room for a "
            f"prompt beside responses of {sampling.max_new_tokens} tokens; lower --max-length"
        )
    assert settings.prompts is not None
    limited_by, key = "the model's positions less --max-length", f"{path}: add_bos"
    dataset = PromptDataset([settings.prompts], tokenizer, room, limited_by, settings.add_bos, key)
    items = _first(dataset, settings.limit)
    for index, item in enumerate(items):
        is_graded = settings.math or settings.k or item.line.get(ANSWER) is not None
        if is_graded and (problem := problem_of(item.line)) is not None:
            dataset.record(index).fail(problem)
    return items


def _read_texts(bases: Sequence[BaseModel], settings: EvaluationSettings) -> list[Text]:
    """Given are of a text the first token, of a conversation all before its last answer."""
    how = {"add_bos": settings.add_bos, "seq_length": _positions(bases)}
    encoder = PlainEncoder(bases[0].tokenizer, how, bos_key="--add-bos")
    return _first(
        TextDataset([str(settings.texts)], encoder, lambda ids, prompt: (ids, max(1, prompt[0]))), settings.limit
    )


def _positions(bases: Sequence[BaseModel]) -> int:
    return min(base.architecture.max_position_embeddings for base in bases)


def _first(dataset: TextDataset[Any], limit: int | None) -> list[Any]:
    return [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]


def _measure(
    base: BaseModel,
    prompts: Sequence[PromptItem],
    texts: Sequence[Text],
    first: Responses | None,
    settings: EvaluationSettings,
) -> _Policy:
    """Load a model and ask it all that is wanted of it. ``first``: the first model's responses, unless this is it.

    Greedy responses are no samples of the model's distribution: they say nothing of a KL. Of episodes it is not taken.
    """
    model = base.load(trainable=False)
    responses = Responses(_responses(base, model, prompts, settings) if prompts else [])
    takes_kl = not settings.greedy and settings.environment is None
    rows = (first or responses).rows if settings.against is not None and takes_kl else []
    of_first = [(row.tokens, len(row.tokens) - row.num_response_tokens) for row in rows]
    return _Policy(responses, _logprobs(model, of_first, settings.temperature), _logprobs(model, texts, 1.0))


def _responses(
    base: BaseModel, model: MegatronModel, items: Sequence[PromptItem], settings: EvaluationSettings
) -> list[EvaluatedResponse]:
    environment = None if settings.environment is None else (settings.environment, schema.Episodes())
    how = {"samples": settings.samples, "num_slots": settings.num_slots}
    made = generate(base, model, items, settings.sampling, environment=environment, **how)
    return [_evaluated(sample, result, base.tokenizer) for sample, result in made]


def generate(
    base: BaseModel,
    model: MegatronModel,
    items: Sequence[PromptItem],
    sampling: SamplingParams,
    *,
    samples: int = 1,
    num_slots: int = 1,
    environment: tuple[str, schema.Episodes] | None = None,
) -> list[tuple[Sample, GenerationResult]]:
    """Responses, or episodes, with the embedded engine on this process; ``samples`` to each prompt, one after another.

    They also end as those that the model has learnt (`Tokenizer.format`).

    Args:
        environment: see `named_environment`; None: a response is one reply.
    """
    tokenizer = base.tokenizer
    sampling = dataclasses.replace(sampling, stop_strings=tokenizer.end_strings(sampling.stop_strings))
    engine = EmbeddedEngine(
        base.architecture,
        dtype=base.dtype,
        num_slots=min(num_slots, len(items) * samples),
        max_sequence_length=max(len(item.token_ids) for item in items) + sampling.max_new_tokens,
        **vocabulary_options(base.architecture, tokenizer),
        device=device(),
    )
    engine.build()
    engine.refit(export_weights(model), 0)
    made: dict[int, tuple[Sample, GenerationResult]] = {}
    decode = response_text(sampling, tokenizer)

    def take(result: GenerationResult) -> None:
        number = result.request_id
        made[number] = as_sample(result, prompts[number], number // samples, decode), result
        seconds = max(time.monotonic() - started, 1e-9)
        progress.update(1, {"tokens/s": engine.statistics.generated_tokens / seconds})

    prompts = [Prompt(i, x.token_ids, line=x.line, place=x.place) for i, x in enumerate(items) for _ in range(samples)]
    requests = (
        GenerationRequest(i * samples + n, item.token_ids, seed=derive_seed(i, n) if n else i)
        for i, item in enumerate(items)
        for n in range(samples)
    )
    started = time.monotonic()
    with Progress(len(items) * samples, "Generating") as progress:
        if environment is None:
            for result in engine.generate(requests, sampling):
                take(result)
        else:
            named, section = named_environment(environment[0]), environment[1]
            of = build_environment(named, "--environment", engine, tokenizer, sampling, decode, section)
            with contextlib.closing(of) as episodes:
                episodes.generate(engine, EngineGroup(), requests, sampling, prompts, take)
    return [made[number] for number in sorted(made)]


def _evaluated(sample: Sample, result: GenerationResult, tokenizer: Tokenizer) -> EvaluatedResponse:
    row = EvaluatedResponse(
        prompt=sample.prompt,
        response=sample.response,
        tokens=sample.token_ids,
        num_response_tokens=len(result.logprobs),
        ended=sample.ended,
        line=sample.line,
        number=sample.group,
    )
    if isinstance(result, Episode):
        row.turns = [
            ("policy" if is_sampled else "environment", tokenizer.ids_to_text([t for t, _ in run], keep_special=True))
            for is_sampled, run in itertools.groupby(zip(result.token_ids, result.mask, strict=True), lambda of: of[1])
        ]
        row.replies, row.problem = result.num_replies, result.problem
        if result.outcome is not None:
            reward = as_reward(result.outcome, "the environment", sample)
            row.problem, row.parts = reward.problem, reward.parts
            row.reward = reward.value if reward.problem is None else None
    return row


def _logprobs(model: MegatronModel, texts: Sequence[Text], temperature: float) -> list[float]:
    """Of each text, summed over the tokens that are not given, in fp64."""
    sums: list[float] = []
    for start in range(0, len(texts), _SCORING_BATCH):
        batch = texts[start : start + _SCORING_BATCH]
        lengths = lengths_of([ids for ids, _ in batch])
        ragged = RaggedBatch(
            tokens=torch.tensor([token for ids, _ in batch for token in ids], dtype=torch.int32),
            lengths=lengths,
            sampled=after_prompts(lengths, torch.tensor([given for _, given in batch])),
            columns={},
            wanted=torch.ones(len(batch), dtype=torch.bool),
        )
        logprobs = forward(model, ragged, None, _BATCHING, lambda outputs, _: outputs, scoring=Scoring(temperature))
        sums += [float(part.double().sum()) for part in logprobs.cpu().split(ragged.sampled_lengths.tolist())]
    return sums


def _grader(uses_math: bool, prompts: Sequence[PromptItem]) -> Grader:
    """Exact match, or ``math-verify``, which is shown each right answer first. Raises UserError."""
    if not uses_math:
        return is_right
    verifier = MathVerifier()
    for item in prompts:
        if (problem := verifier.problem_of(item.line)) is not None:
            raise DataError(f"{item.place}: {problem}")
    return lambda response, line: verifier("", response, line)["reward"] == 1.0


def _grade(responses: Responses, grade: Grader) -> None:
    rows = [row for row in responses.rows if row.line.get(ANSWER) is not None]
    with ThreadPoolExecutor(4) as pool:
        for row, right in zip(rows, pool.map(lambda row: grade(row.response, row.line), rows), strict=True):
            row.is_right = right


def _results(policies: Sequence[_Policy], texts: Sequence[Text], settings: EvaluationSettings) -> Results:
    sizes = np.array([len(ids) - given for ids, given in texts])
    k = settings.k or ((settings.samples,) if settings.samples > 1 else ())
    results: Results = {}
    for path, policy in zip((settings.model, settings.against), policies, strict=False):
        found = policy.responses.summary(k) if policy.responses.rows else {}
        if texts:
            perplexity = measures.exponential(measures.mean(-np.array(policy.of_texts), sizes))
            found |= {"num_texts": len(sizes), "perplexity": perplexity}
        results[str(path)] = measures.as_json(found)
        if policy.responses.rows:
            results[str(path)]["responses"] = [row.to_json() for row in policy.responses.rows]
    if len(policies) > 1:
        change = _changes(*(policy.responses for policy in policies))
        if texts:
            losses = np.subtract(policies[1].of_texts, policies[0].of_texts)
            change["perplexity_ratio"] = measures.exponential(measures.mean(losses, sizes))
        results["change"] = measures.as_json(change)
    return results


def _changes(ours: Responses, theirs: Responses) -> Measures:
    """From their responses to ours, prompt by prompt: differences of what both have, win rate, KL."""
    result: Measures = {}
    pairs = list(zip(ours.by_prompt(), theirs.by_prompt(), strict=True))
    for name in (name for name in ours.measured if name in theirs.measured):
        differences = ours.values(name) - theirs.values(name)
        if len(known := differences[~np.isnan(differences)]):
            result[name] = measures.mean(known)
    if "reward" in result:
        scored = [pair for pair in pairs if all(row.reward is not None for rows in pair for row in rows)]
        rewards = [[[row.reward or 0.0 for row in rows] for rows in pair] for pair in scored]
        result["win_rate"] = measures.share([measures.win_rate(*pair) for pair in rewards])
    if any(row.kl is not None for row in ours.rows):
        kl = [sum(row.kl or 0.0 for row in rows) for rows, _ in pairs]
        result["kl_per_response"] = measures.mean(kl, [len(rows) for rows, _ in pairs])
        result["kl_per_token"] = measures.mean(kl, [sum(row.num_response_tokens for row in rows) for rows, _ in pairs])
    return result


# ---- reward models ------------------------------------------------------------------------------


def score(responses: Responses, base: BaseModel) -> None:
    """Fill in every response's reward by a reward model, in place. Call `models.restore.require_same_tokenizer` first.

    Raises:
        CheckpointMismatchError: the reward model has fewer positions than a response takes, or no head.
    """
    longest, positions = max(len(row.tokens) for row in responses.rows), base.architecture.max_position_embeddings
    if longest > positions:
        raise CheckpointMismatchError(
            f"{base.path} takes {positions} tokens at most, but the longest prompt and response have "
            f"{longest}; lower --max-length"
        )
    # Each once, whoever gave it: rounding, which depends on the batch, would make a difference of a tie.
    sequences = list(dict.fromkeys(tuple(row.tokens) for row in responses.rows))
    rewards = dict(zip(sequences, _rewards(base, sequences), strict=True))
    for row in responses.rows:
        row.reward = rewards[tuple(row.tokens)]


def _rewards(base: BaseModel, sequences: Sequence[Sequence[int]]) -> list[float]:
    """A reward model's reward of each sequence of token ids."""
    head = RewardHeadConfig.from_model_config(base.config, merge_attributes=True)
    reward_model = RewardModel(base.load(head=head, trainable=False, needs_head=True), head, _BATCHING)
    rewards: list[float] = []
    with Progress(len(sequences), "Scoring") as progress:
        for start in range(0, len(sequences), _SCORING_BATCH):
            batch = sequences[start : start + _SCORING_BATCH]
            rewards += reward_model.rewards(pad_rows(batch, 0), lengths_of(batch))[:, 0].tolist()
            progress.update(len(batch))
    if not np.isfinite(rewards).all():
        raise NonFiniteError(f"{base.path} gives rewards that are NaN or infinite: its weights have diverged")
    return rewards


def evaluate_reward_model(settings: EvaluationSettings, tell: Callable[[Results], None]) -> None:
    """Whether a reward model prefers the chosen text, over all pairs and in each category; see `evaluate_policies`.

    A pair's category is in the line of its chosen text.
    """
    path, key = settings.comparisons, settings.category
    assert path is not None
    base = open_model(settings.model, settings.precision)
    base.require_rewards()
    ends = bool(base.tokenizer.format.append_eod)
    how = {"add_bos": settings.add_bos, "append_eod": ends, "seq_length": _positions([base])}
    encoder = ComparisonEncoder(base.tokenizer, how, bos_key="--add-bos")
    pairs = _first(TextDataset([path], encoder, lambda *columns: columns), settings.limit)
    lines = {record.line: record for record in read_jsonl(path)}
    kind, meaning = (str, int, float), "a category, a text or a number"
    categories = [lines[line].require(key, kind, meaning) if key else None for *_, (line,) in pairs]
    rewards = _rewards(base, [ids for chosen, rejected, *_ in pairs for ids in (chosen, rejected)])
    text = base.tokenizer.ids_to_text
    rows = [
        {
            "line": line,
            "category": category,
            "prompt": text(chosen[: prompts[0]]),
            "chosen": text(chosen[prompts[0] :]),
            "rejected": text(rejected[prompts[1] :]),
            "reward_chosen": good,
            "reward_rejected": bad,
        }
        for (chosen, rejected, prompts, _, (line,)), category, good, bad in zip(
            pairs, categories, rewards[::2], rewards[1::2], strict=True
        )
    ]
    results = {"all": _judgement(rows) | {"responses": rows}}
    for name in dict.fromkeys(categories) if key else ():
        results[f"{key}={name}"] = _judgement([row for row in rows if row["category"] == name])
    tell(results)


def _judgement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    margins = np.array([row["reward_chosen"] - row["reward_rejected"] for row in rows])
    return measures.as_json(
        {"num_pairs": len(rows), "accuracy": measures.share((margins > 0).tolist()), "margin": measures.mean(margins)}
    )
