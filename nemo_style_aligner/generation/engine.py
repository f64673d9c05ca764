"""The contract between rollout generation and the engines that carry it out.

An engine is built once, then refitted with new weights and asked to generate in every step. The contract
knows no trainers, process groups or tokenizers, only token ids, a stream of named weights and sampling
parameters. `GenerationEngine` states what each engine promises; the dataclasses are its inputs and outputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

FinishReason = Literal["stop", "length"]

WeightStream = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face name, full unsharded tensor), in a fixed order, each name once."""

_DIVISORS = (1e-20, 1e20)  # logits that are divided by others may leave the range of float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a response ends; one set for all requests of a `generate` call.

    Filters act in the order and with the meaning of `transformers`' logits processors: repetition
    penalty, minimum length, temperature, top-k, top-p. Greedy decoding ignores the last three.
    """

    max_new_tokens: int
    min_new_tokens: int = 0  # minimum length, the stop token not counted
    use_greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and response
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # sample end-of-sequence tokens like any other: forced lengths, for benchmarks
    seed: int = 0  # of the run; combined with each request's own seed

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie in [0, max_new_tokens={self.max_new_tokens}], got {self.min_new_tokens}"
            )
        if not self.use_greedy and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; for argmax set use_greedy=True")
        if not self.use_greedy and not _DIVISORS[0] <= self.temperature <= _DIVISORS[1]:
            raise ValueError(f"temperature must lie in {list(_DIVISORS)}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; 1 turns it off")
        if not _DIVISORS[0] <= self.repetition_penalty <= _DIVISORS[1]:
            raise ValueError(
                f"repetition_penalty must lie in {list(_DIVISORS)}, got {self.repetition_penalty}; 1 turns it off"
            )
        if any(not string for string in self.stop_strings):
            raise ValueError("stop_strings holds an empty string, which would end every response at once")

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the distribution whose log-probs are reported: 1 when greedy."""
        return 1.0 if self.use_greedy else self.temperature


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt. The same ``prompt_token_ids``, ``seed``, weights and sampling parameters give the same
    response, whatever else is in the batch and whichever rank serves it (up to float rounding)."""

    request_id: int
    prompt_token_ids: list[int]
    seed: int = 0
    max_new_tokens: int | None = None  # of this response; None: the sampling parameters' limit

    def limit(self, sampling: SamplingParams) -> int:
        """The most tokens that the response may have."""
        return sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens

    def check(self, sampling: SamplingParams, max_sequence_length: int, vocab_size: int) -> None:
        """Raise ValueError naming this request if an engine of these limits cannot serve it."""
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id}: the prompt is empty; give it at least one token")
        max_new_tokens = self.limit(sampling)
        if not max(1, sampling.min_new_tokens) <= max_new_tokens:
            raise ValueError(
                f"request {self.request_id}: max_new_tokens={max_new_tokens} must be at least 1 and at least "
                f"min_new_tokens={sampling.min_new_tokens}"
            )
        total = len(self.prompt_token_ids) + max_new_tokens
        if total > max_sequence_length:
            raise ValueError(
                f"request {self.request_id}: prompt of {len(self.prompt_token_ids)} tokens plus max_new_tokens="
                f"{max_new_tokens} is {total}, above the engine's max_sequence_length={max_sequence_length}; "
                "drop or shorten the prompt, lower length_params.max_length or build a longer engine"
            )
        low, high = min(self.prompt_token_ids), max(self.prompt_token_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"request {self.request_id}: prompt holds token id {low if low < 0 else high}, outside the model's "
                f"vocabulary of {vocab_size}; the tokenizer does not belong to this model"
            )


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One response.

    ``token_ids`` is the response without the prompt, *with* the stop token (or all tokens of the
    stop string). ``logprobs``, one per token, is log-softmax(logits / temperature) over the model's
    whole vocabulary at the token chosen, *before* repetition penalty, minimum length, top-k and
    top-p (temperature 1 when greedy): the quantity the trainer computes for the same tokens, so
    the two can be compared. ``finish_reason`` is "stop" exactly if the end-of-sequence token or a
    stop string ended the response.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int


@dataclasses.dataclass
class GenerationStatistics:
    """Counters of one `generate` call, complete once its iterator is exhausted."""

    generated_tokens: int = 0  # sampled, prompts not included
    prefill_tokens: int = 0  # prompt tokens computed, and tokens computed again after preemptions
    shared_prefix_tokens: int = 0  # prompt tokens that were in KV memory already
    steps: int = 0  # forward passes
    active_slot_steps: int = 0  # occupied slots, summed over steps
    preemptions: int = 0  # sequences that lost their KV memory and were computed again
    peak_pages: int = 0  # the most pages of KV memory that sequences held at once
    num_pages: int = 0  # pages of KV memory in total


class GenerationEngine(abc.ABC):
    """Generates responses with weights that somebody else trains.

    Life cycle: `build` once; then, as often as wanted, `refit`, `generate`, and `unload` / `reload`
    in between to lend the memory to training.
    """

    @abc.abstractmethod
    def build(self) -> None:
        """Compile and allocate for the shapes given to the constructor. Called once, before all else."""

    @abc.abstractmethod
    def refit(self, weights: WeightStream, version: int) -> None:
        """Replace all weights; neither recompiles nor allocates lasting memory.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or misshapen; the message names it.
                The engine then refuses to generate until a refit has succeeded.
        """

    @abc.abstractmethod
    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        """Yield each response as it finishes, in order of finishing.

        ``requests`` is pulled lazily, one request whenever a slot is free, so a shared work queue
        can stand behind it. The engine reports each forward pass, or another sign of life, to
        `activity.progress`: the watchdog and the work queue rely on it while long responses are generated.

        Raises:
            ValueError: a request is empty, too long or holds ids outside the vocabulary.
            RuntimeError: the engine is unloaded or has no complete weights, or weights that it views have changed
                since the refit.
            NonFiniteError: the model's logits are not finite.
        """

    @abc.abstractmethod
    def unload(self) -> None:
        """Release the memory of weights and KV cache; keep what was compiled."""

    @abc.abstractmethod
    def reload(self) -> None:
        """Allocate the memory again. The weights are lost: `refit` before the next `generate`."""

    def close(self) -> None:  # noqa: B027 (most engines end with their process)
        """End what would outlive the engine: processes, captured collectives. No method may be called afterwards."""

    @property
    @abc.abstractmethod
    def weight_version(self) -> int:
        """Version of the last complete refit; -1 while the engine has no complete weights."""

    @property
    def viewed_weights(self) -> frozenset[str]:
        """Names of the tensors that the engine reads from the trainer's own memory: a refit's stream leaves them out.

        Some of them it copies at each refit. With the others it computes in place, so training changes them at once:
        to `generate` after that without a refit is an error.
        """
        return frozenset()

    @property
    def takes_transient_weights(self) -> bool:
        """Whether `refit` has finished with each tensor when it asks for the next one, and accepts any order.

        See ``transient`` of `weights.stream.export_weights`.
        """
        return False

    @property
    @abc.abstractmethod
    def num_compilations(self) -> int:
        """How often anything was compiled or captured; constant after `build`.

        What `reload` captures again, because its memory has new addresses, is not counted.
        """

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """The most sequences that are generated at the same time."""

    @property
    @abc.abstractmethod
    def statistics(self) -> GenerationStatistics:
        """Counters of the latest `generate`."""
