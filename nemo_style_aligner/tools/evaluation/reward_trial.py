"""Rewards tried on lines of a prompt file before a job: ``nsa data show --rewards``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.tools.evaluation.evaluation import EvaluationSettings, generate, open_policy
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import ListedReward, PPOActor
from nemo_style_aligner.trainer.data.datasets import PromptItem
from nemo_style_aligner.trainer.jobs.scoring_setup import build_listed_rewards
from nemo_style_aligner.trainer.rl.reward_config import reward_problems
from nemo_style_aligner.trainer.rl.rewards import Reward, RewardSource
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.services.score_client import SequencesToScore

_READY_SECONDS = 10.0  # for services


@dataclasses.dataclass(frozen=True)
class Tried:
    """A response to a prompt, and its reward."""

    prompt: PromptItem
    response: str
    reward: Reward


def try_rewards(
    config: PPOActor, prompts: Sequence[PromptItem], tokenizer: Tokenizer, given: Sequence[str], model: Path
) -> list[Tried]:
    """The rewards of an actor's config for responses to each prompt: those given, or one that ``model`` gives.

    Raises:
        UserError: the rewards are not as they should be, a line lacks what they need, or nothing can be generated.
    """
    listed: Any = OmegaConf.to_container(config.given.trainer.ppo.rewards, resolve=True)
    if problems := [*reward_problems(listed)]:
        raise ConfigError("\n".join(problems))
    rewards = config.trainer.ppo.rewards or ()
    source = build_listed_rewards(config, rewards, _needs_job, lambda spec, entry: _needs_job(spec))
    try:
        source.check({prompt.place: prompt.line for prompt in prompts})
        samples = _given(prompts, tokenizer, given) if given else _generated(config, prompts, model)
        longest = max(len(sample.token_ids) for sample in samples)
        source.wait_until_ready(
            _READY_SECONDS, SequencesToScore(longest, tokenizer.vocab_size, tokenizer.fingerprint())
        )
        scores = source.score(samples).result()
    finally:
        source.close()
    by_place = {prompt.place: prompt for prompt in prompts}
    return [Tried(by_place[s.place], s.response, reward) for s, reward in zip(samples, scores, strict=True)]


def _needs_job(spec: ListedReward | None = None) -> RewardSource:
    what = "the service of remote_critic_rm" if spec is None else f"the reward model {spec.source}"
    raise ConfigError(
        f"--rewards: {what} is asked within a job; here functions, built-in sources and http://HOST:PORT/NAME can be "
        "tried. `nsa eval --reward-model` scores with a reward model"
    )


def _given(prompts: Sequence[PromptItem], tokenizer: Tokenizer, given: Sequence[str]) -> list[Sample]:
    pairs = [(prompt, response) for prompt in prompts for response in given]
    return [
        _sample(number, prompt, [*prompt.token_ids, *tokenizer.text_to_ids(response)], response)
        for number, (prompt, response) in enumerate(pairs)
    ]


def _generated(config: PPOActor, prompts: Sequence[PromptItem], model: Path) -> list[Sample]:
    how = EvaluationSettings(model=model, max_length=config.model.ppo.length_params.max_length, precision="32")
    with single_process(how.seed):
        base = open_policy(model, how.precision)
        made = generate(base, base.load(trainable=False), prompts, how.sampling, num_slots=len(prompts))
    return [sample for sample, _ in made]


def _sample(number: int, prompt: PromptItem, token_ids: list[int], response: str) -> Sample:
    return Sample(number, number, prompt.line, token_ids, len(prompt.token_ids), True, lambda _: response, prompt.place)
