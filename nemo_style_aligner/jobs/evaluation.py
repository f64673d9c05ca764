"""Offline evaluation of a policy: generate, compare with the right answers, score with a reward model."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_config
from nemo_style_aligner.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.data.answers import ANSWER, EXTRACTION, find_answer, is_right, problem_of
from nemo_style_aligner.data.datasets import PromptDataset, lengths_of, pad_rows
from nemo_style_aligner.data.jsonl import DataError
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams, text_before_end
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.models.critic import RewardModel
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.packing import MicroBatching
from nemo_style_aligner.models.restore import BaseModel, open_base_model
from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.rl.rollouts.setup import vocabulary_options
from nemo_style_aligner.telemetry.progress import Progress
from nemo_style_aligner.weights.stream import export_weights

logger = logging.getLogger(__name__)

_MAX_LENGTH = 128  # tokens of a response
_SCORING_BATCH = 64


@dataclasses.dataclass
class EvaluatedResponse:
    """A prompt's response and what is known of it.

    Attributes:
        prompt, response: text; the response without special tokens and end string.
        tokens: token ids of both.
        num_response_tokens: tokens of the response, the stop token or those of the end string included.
        ended: whether a stop token or stop string ended it.
        line: the prompt's line, with the right answer, if it has one (see `answers`).
        reward: the reward model's, once `score` has run.
    """

    prompt: str
    response: str
    tokens: list[int]
    num_response_tokens: int
    ended: bool
    line: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reward: float | None = None

    @property
    def is_right(self) -> bool | None:
        """Whether the response has the right answer (`answers.is_right`); None where the line has none."""
        return None if self.line.get(ANSWER) is None else is_right(self.response, self.line)


@dataclasses.dataclass
class Responses:
    """All responses of an evaluation."""

    rows: list[EvaluatedResponse]

    def summary(self) -> dict[str, float]:
        """``num_prompts``, and means: ``accuracy`` and ``reward`` (where known), ``length``, ``ended``."""
        result: dict[str, float] = {"num_prompts": len(self.rows)}
        if known := [row.is_right for row in self.rows if row.is_right is not None]:
            result["accuracy"] = sum(known) / len(known)
        if rewards := [row.reward for row in self.rows if row.reward is not None]:
            result["reward"] = sum(rewards) / len(rewards)
        result["length"] = sum(row.num_response_tokens for row in self.rows) / len(self.rows)
        result["ended"] = sum(row.ended for row in self.rows) / len(self.rows)
        return result

    def to_json(self) -> dict[str, Any]:
        """The summary and every response, without token ids."""
        rows = []
        for row in self.rows:
            record = {name: value for name, value in vars(row).items() if name not in ("tokens", "line")}
            if (right := row.line.get(ANSWER)) is not None:
                given = find_answer(row.response, row.line.get(EXTRACTION))
                record |= {ANSWER: right, "given_answer": given, "is_right": row.is_right}
            rows.append(record)
        return {"summary": self.summary(), "responses": rows}


def _open(path: Path, precision: str) -> BaseModel:
    return open_base_model(str(path), OmegaConf.create({"model": {}, "trainer": {"precision": precision}}))


def default_max_length(model_path: Path) -> int:
    """Longest response in tokens: 128, or half of the model's positions where that is less.

    For the errors see `load_nemo_config`.
    """
    architecture = ModelArchitecture.from_nemo_config(load_nemo_config(model_path))
    return min(_MAX_LENGTH, max(1, architecture.max_position_embeddings // 2))


def evaluate(
    model_path: Path,
    prompts_path: Path,
    sampling: SamplingParams,
    precision: str,
    num_slots: int,
    limit: int | None,
    add_bos: bool | None,
) -> Responses:
    """Generate one response per prompt with the embedded engine on this process.

    Args:
        limit: use the first ``limit`` prompts; None: all.
        sampling: responses also end as those that the model has learnt (`Tokenizer.format`).
        add_bos: put the tokenizer's BOS token before each prompt; None: as the model was trained. As in PPO
            (``sampling_params.add_BOS``).

    Raises:
        DataError: there is no prompt that leaves room for a response.
        TokenizerError: there is no BOS token, or an end string could never be found.
    """
    base = _open(model_path, precision)
    sampling = dataclasses.replace(sampling, stop_strings=base.tokenizer.end_strings(sampling.stop_strings))
    room = base.architecture.max_position_embeddings - sampling.max_new_tokens
    if room < 1:
        raise DataError(
            f"{model_path} has {base.architecture.max_position_embeddings} positions, which leaves no room for a "
            f"prompt beside responses of {sampling.max_new_tokens} tokens; lower --max-length"
        )
    limited_by, key = "the model's positions less --max-length", f"{model_path}: add_bos"
    dataset = PromptDataset([prompts_path], base.tokenizer, room, limited_by, add_bos, key)
    items = [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]
    for index, item in enumerate(items):
        if item.line.get(ANSWER) is not None and (problem := problem_of(item.line)) is not None:
            dataset.record(index).fail(problem)
    if not items:
        raise DataError(f"{prompts_path} has no prompt of at most {room} tokens")
    engine = EmbeddedEngine(
        base.architecture,
        dtype=base.dtype,
        num_slots=min(num_slots, len(items)),
        max_sequence_length=max(len(item.token_ids) for item in items) + sampling.max_new_tokens,
        **vocabulary_options(base.architecture, base.tokenizer),
        device=device(),
    )
    engine.build()
    engine.refit(export_weights(base.load(trainable=False)), 0)
    rows: list[EvaluatedResponse | None] = [None] * len(items)
    requests = (GenerationRequest(i, item.token_ids, seed=i) for i, item in enumerate(items))
    started = time.monotonic()
    with Progress(len(items), "Generating") as progress:
        for result in engine.generate(requests, sampling):
            item = items[result.request_id]
            rows[result.request_id] = EvaluatedResponse(
                prompt=item.line["text"],
                response=text_before_end(
                    base.tokenizer.without_end(result.token_ids),
                    base.tokenizer.ids_to_text,
                    sampling.stop_strings,
                    sampling.min_new_tokens,
                ),
                tokens=result.prompt_token_ids + result.token_ids,
                num_response_tokens=len(result.token_ids),
                ended=result.finish_reason == "stop",
                line=item.line,
            )
            made, seconds = engine.statistics.generated_tokens, time.monotonic() - started
            progress.update(1, {"tokens/s": made / max(seconds, 1e-9)})
    return Responses([row for row in rows if row is not None])


def score(responses: Responses, reward_model_path: Path, precision: str) -> None:
    """Fill in every response's reward, in place. Call `models.restore.require_same_tokenizer` first.

    Raises:
        CheckpointMismatchError: the reward model has fewer positions than a response takes, or no head.
    """
    base = _open(reward_model_path, precision)
    longest, positions = max(len(row.tokens) for row in responses.rows), base.architecture.max_position_embeddings
    if longest > positions:
        raise CheckpointMismatchError(
            f"{reward_model_path} takes {positions} tokens at most, but the longest prompt and response have "
            f"{longest}; lower --max-length"
        )
    head = RewardHeadConfig.from_model_config(base.config, merge_attributes=True)
    model = base.load(head=head, trainable=False, needs_head=True)
    reward_model = RewardModel(model, head, MicroBatching(num_rows=16))
    with Progress(len(responses.rows), "Scoring") as progress:
        for start in range(0, len(responses.rows), _SCORING_BATCH):
            batch = responses.rows[start : start + _SCORING_BATCH]
            sequences = [row.tokens for row in batch]
            rewards = reward_model.rewards(pad_rows(sequences, 0), lengths_of(sequences))
            for row, reward in zip(batch, rewards[:, 0].tolist(), strict=True):
                row.reward = reward
            progress.update(len(batch))
