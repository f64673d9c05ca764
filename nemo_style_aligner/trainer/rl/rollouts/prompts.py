"""Which prompts a rollout phase gets."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.data.datasets import Dataset, DataSource, PromptDataset, PromptItem, load_data_prefix
from nemo_style_aligner.trainer.data.examples import for_log
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.rl.sample import Prompt, Rollouts

logger = logging.getLogger(__name__)


class PromptSource:
    """Batches of prompts for rollouts, the same on every rank, addressed by the number of prompts consumed before.

    Args:
        dataset: the prompts.
        batch_size: prompts per step.
        seed: of the shuffling; each epoch has an order of its own.
        shuffle: for training; validation takes the prompts in the dataset's order.
        written: how the prompts' texts are written.
        samples_per_prompt: responses to each prompt in a step.

    Attributes:
        response_lengths: expected lengths of responses; `observe` updates them.
    """

    def __init__(
        self,
        dataset: Dataset[PromptItem],
        batch_size: int,
        seed: int,
        shuffle: bool,
        written: TextFormat | None = None,
        samples_per_prompt: int = 1,
    ) -> None:
        self.samples_per_prompt = samples_per_prompt
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self.batch_size = batch_size
        self.written = written or TextFormat()
        self.response_lengths = ResponseLengths()

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the dataset."""
        return len(self._dataset) // self.batch_size

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, BOS included."""
        return max(len(self._dataset[i].token_ids) for i in range(len(self._dataset)))

    def lines(self) -> dict[str, Mapping[str, Any]]:
        """Each prompt's line, by the place where it is."""
        items = (self._dataset[index] for index in range(len(self._dataset)))
        return {item.place: item.line for item in items}

    def batch(self, consumed_samples: int) -> list[Prompt]:
        """The prompts after ``consumed_samples`` and before `after` it, each as often as it has samples."""
        prompts = map(self.prompt, next(iter(self.sampler(consumed_samples))))
        return [prompt for prompt in prompts for _ in range(self.samples_per_prompt)]

    def after(self, consumed_samples: int) -> int:
        """``consumed_samples`` after the next `batch`: an epoch's last one is smaller if ``batch_size`` has changed."""
        return self.sampler(consumed_samples).after_batch

    def sampler(self, consumed_samples: int) -> EpochSampler:
        """A sampler of prompt indices that continues after ``consumed_samples``."""
        size = len(self._dataset)
        return EpochSampler(size, self.batch_size, self._seed, self._shuffle, True, consumed_samples)

    def observe(self, rollouts: Rollouts) -> None:
        """Learn how long the responses are, for the order of work in later steps."""
        self.response_lengths.observe(rollouts.prompt_ids.tolist(), rollouts.sampled_lengths.tolist())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to order its work the same way; which prompts it gets depends on no state."""
        return {"response_lengths": self.response_lengths.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.response_lengths.load_state_dict(state["response_lengths"])

    def known(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices, as far as the dataset has them."""
        return [self.prompt(index) for index in indices if index < len(self._dataset)]

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index of the dataset."""
        item = self._dataset[index]
        return Prompt(index, item.token_ids, self.response_lengths.expect(index), item.line, item.place)


def prompt_dataset(
    config: PPOActor, source: DataSource, tokenizer: Tokenizer
) -> tuple[Dataset[PromptItem], TextFormat]:
    """The prompts of a part of ``model.data.data_prefix``, and how their texts are written.

    Prompts that leave no room for a response are dropped, with a count in the log.
    """
    ppo = config.model.ppo
    room = config.model.data.seq_length - ppo.length_params.max_length
    longest = config.trainer.ppo.trt_llm.max_input_len
    limited_by = "trainer.ppo.trt_llm.max_input_len"
    if room <= longest:
        limited_by = "model.data.seq_length less model.ppo.length_params.max_length"
    add_bos, key = ppo.sampling_params.add_BOS, "model.ppo.sampling_params.add_BOS"
    return source.build(lambda paths: PromptDataset(paths, tokenizer, min(room, longest), limited_by, add_bos, key))


def build_prompt_sources(config: PPOActor, tokenizer: Tokenizer) -> tuple[PromptSource, PromptSource | None]:
    """Training and validation prompts of the actor job, from ``model.data.data_prefix``.

    Validation uses ``model.ppo.num_val_samples`` prompts, or all where there are fewer.

    Raises:
        DataError: too few training prompts for one step.
        ValueError: no training prompts, or a BOS token is asked for and the tokenizer has none.
    """
    ppo = config.model.ppo
    prefix = load_data_prefix(config.model.data.data_prefix)
    train, written = prompt_dataset(config, prefix.train, tokenizer)
    logger.info("the first training prompt:\n%s", for_log(train[0], tokenizer))
    size = fitting_prompts(config, len(train))
    if len(train) < size:
        raise DataError(
            f"of the training prompts {len(train)} can be used, fewer than model.ppo.num_rollout_samples={size}, which "
            "one PPO step needs: lower it or add prompts"
        )

    def source(split: Dataset[PromptItem], batch_size: int, shuffle: bool) -> PromptSource:
        several = config.trainer.ppo.num_rollouts_per_prompt if shuffle else 1  # validation compares policies
        return PromptSource(split, batch_size, config.model.seed, shuffle, written, several)

    validation = None
    if prefix.validation is not None:
        held_out, _ = prompt_dataset(config, prefix.validation, tokenizer)
        if len(held_out):
            validation = source(held_out, min(ppo.num_val_samples, len(held_out)), False)
    elif config.trainer.ppo.val_check_interval:
        warn_for_all_ranks(logger, "model.data.data_prefix names no validation prompts: nothing is validated")
    return source(train, size, True), validation


def fitting_prompts(config: PPOActor, num_prompts: int) -> int:
    """Prompts per step: where nobody has chosen a number, at most as many as there are, and as make whole batches."""
    wanted, batch = config.model.ppo.num_rollout_samples, config.model.global_batch_size
    if num_prompts >= wanted or config.is_chosen("model.ppo.num_rollout_samples"):
        return wanted
    whole = batch // math.gcd(batch, responses_per_prompt(config))  # prompts, of whole batches
    fitting = num_prompts - num_prompts % whole
    return fitting or (wanted if config.is_chosen("model.global_batch_size") else num_prompts)


def responses_per_prompt(config: PPOActor) -> int:
    """Responses to each prompt that a step trains on."""
    ppo = config.trainer.ppo
    return ppo.num_rollouts_per_prompt if ppo.top_n_rollouts is None else ppo.top_n_rollouts


# ---- how long a prompt's next response may be ----------------------------------------------------

_NEWEST_WEIGHT = 0.5  # of a prompt's newest response against all before: the policy changes between epochs
_MEMORY = 256  # about how many responses the mean over all prompts reaches back


class ResponseLengths:
    """Expected response lengths in tokens.

    For a prompt that was answered before: a mean over its responses in which the newest counts half. For any other: the
    recent mean over all. The same observations in the same order give the same numbers on every rank.
    """

    def __init__(self, max_prompts: int = 100_000) -> None:
        """Remember individual lengths of the ``max_prompts`` prompts that were answered last."""
        self._max_prompts = max_prompts
        self._by_prompt: collections.OrderedDict[int, float] = collections.OrderedDict()  # the oldest first
        self._count, self._mean = 0, 0.0

    def expect(self, prompt_id: int) -> float:
        """Expected tokens of the next response; 0 before anything was observed."""
        return self._by_prompt.get(prompt_id, self._mean)

    def observe(self, prompt_ids: Sequence[int], response_lengths: Sequence[int]) -> None:
        """Learn from responses, given in sample order."""
        for prompt_id, length in zip(prompt_ids, response_lengths, strict=True):
            before = self._by_prompt.pop(prompt_id, float(length))
            self._by_prompt[prompt_id] = before + _NEWEST_WEIGHT * (length - before)
            self._count = min(self._count + 1, _MEMORY)
            self._mean += (length - self._mean) / self._count
        while len(self._by_prompt) > self._max_prompts:
            self._by_prompt.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in a form that JSON holds exactly."""
        return {"prompts": [list(item) for item in self._by_prompt.items()], "all": [self._count, self._mean]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._by_prompt = collections.OrderedDict((int(prompt), float(length)) for prompt, length in state["prompts"])
        self._count, self._mean = int(state["all"][0]), float(state["all"][1])
