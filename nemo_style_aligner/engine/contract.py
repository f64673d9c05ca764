"""The contract between rollout generation and the engines that carry it out.

An engine is built once, then refitted with new weights and asked to generate in every step. The contract
knows no trainers, process groups or tokenizers, only token ids, a stream of named weights and sampling
parameters. `GenerationEngine` states what each engine promises and checks how it is called; the dataclasses are its
inputs and outputs, and `StopCondition` says when a response is complete.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from nemo_style_aligner.errors import NonFiniteError

if TYPE_CHECKING:
    from nemo_style_aligner.engine.grammar import Grammars  # which knows tokenizers

T = TypeVar("T")

FinishReason = Literal["stop", "length"]

WeightStream = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face name, full unsharded tensor), in a fixed order, each name once."""

Detokenize = Callable[[Sequence[int]], str]
TokenToId = Callable[[str], int | None]

NO_WEIGHTS = -1  # the version of an engine without complete weights

_DIVISORS = (1e-20, 1e20)  # logits that are divided by others may leave the range of float32
_PENALTIES = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "grammar")
_FILTERS = ("top_k", "top_p", "min_p")
_PENALTY, _BIAS = 2.0, 100.0  # OpenAI's limits
_CONTEXT_TOKENS = 4  # decoded in front of the tokens that may hold a stop string; more than a cut character leaves
_PART_OF_A_CHARACTER = "\ufffd"


class GrammarError(ValueError):
    """A grammar cannot be compiled, or not be followed any further."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a response ends; one set for all requests of a `generate` call.

    Filters act in the order and with the meaning of `transformers`' logits processors: logit bias, repetition penalty,
    minimum length, temperature, top-k, top-p, min-p. Greedy decoding ignores the last four. The penalties by frequency
    and presence are OpenAI's and vLLM's, and follow that for repetition. What the grammar excludes has no part in the
    last four.
    """

    max_new_tokens: int
    min_new_tokens: int = 0  # minimum length, the stop token not counted
    use_greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; the least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0  # 1: off; over prompt and response
    presence_penalty: float = 0.0  # taken from the logits of ids in the response
    frequency_penalty: float = 0.0  # the same, as often as they are there
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit)
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # they end a response even where ``ignore_eos``
    ignore_eos: bool = False  # sample end-of-sequence tokens like any other: forced lengths, for benchmarks
    grammar: str | None = None  # that a response has, to its end or as far as it goes; see `engine/grammar.py`
    seed: int = 0  # of the run; combined with each request's own seed

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie in [0, max_new_tokens={self.max_new_tokens}], got {self.min_new_tokens}"
            )
        if not self.use_greedy and not self.temperature > 0:
            hint = "; for argmax set use_greedy=True" if self.temperature == 0 else ""
            raise ValueError(f"temperature must be above 0, got {self.temperature}{hint}")
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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}; 0 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -_PENALTY <= getattr(self, name) <= _PENALTY:
                raise ValueError(f"{name} must lie in {[-_PENALTY, _PENALTY]}, got {getattr(self, name)}")
        for token, bias in self.logit_bias:
            if not -_BIAS <= bias <= _BIAS:
                raise ValueError(f"logit_bias must lie in {[-_BIAS, _BIAS]}, got {bias} for id {token}")
        if self.grammar is not None and (self.ignore_eos or self.min_new_tokens):
            raise ValueError("grammar says where a response ends: leave out ignore_eos and min_new_tokens")
        if any(not string for string in self.stop_strings):
            raise ValueError("stop_strings holds an empty string, which would end every response at once")

    @property
    def counts_tokens(self) -> bool:
        """Whether the choice depends on how often an id is in the response."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @functools.cached_property
    def chooses_alone(self) -> bool:
        """Whether the choice of a token depends on its logits and its position alone, not on the tokens before it."""
        return not self.counts_tokens and self.repetition_penalty == 1.0 and self.grammar is None

    @functools.cached_property
    def filters(self) -> tuple[tuple[str, object], ...]:
        """What acts on the choice of tokens beside temperature and minimum length, by name, and how."""
        names = [*_PENALTIES, *(() if self.use_greedy else _FILTERS)]
        return tuple((name, value) for name in names if (value := getattr(self, name)) != getattr(type(self), name))

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

    def check(self, sampling: SamplingParams, max_sequence_length: int, vocab_size: int, least: int = 1) -> None:
        """Raise ValueError naming this request if an engine of these limits cannot serve it.

        ``least`` is how few tokens it may ask for.
        """
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id}: the prompt is empty; give it at least one token")
        max_new_tokens = self.limit(sampling)
        if not max(least, sampling.min_new_tokens) <= max_new_tokens:
            raise ValueError(
                f"request {self.request_id}: max_new_tokens={max_new_tokens} must be at least {least} and at least "
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
    whole vocabulary at the token chosen, *before* biases, penalties, minimum length, top-k,
    top-p and min-p (temperature 1 when greedy): the quantity the trainer computes for the same tokens, so
    the two can be compared. ``finish_reason`` is "stop" exactly if the end-of-sequence token or a
    stop string ended the response. ``weight_version`` is that of the weights that sampled the last token; where others
    sampled earlier ones, ``versions`` has [version, how many tokens] of each, in the tokens' order.

    ``routes``, where an engine was asked to record them: the experts of each token but the last, which was no input, in
    each layer that has any; base64 of unsigned integers [tokens - 1, layers, experts per token] of one byte each, or
    of two where there are more than 256 experts.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    routes: str = ""
    versions: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def token_versions(self) -> list[int]:
        """Version of the weights that sampled each token that has one of ``logprobs``."""
        runs = self.versions or [[self.weight_version, len(self.logprobs)]]
        return [version for version, count in runs for _ in range(count)]

    @property
    def sampled(self) -> list[bool]:
        """Which of ``token_ids`` were sampled: all, of a response that is one reply."""
        return [True] * len(self.token_ids)

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of the sequences that prompt and response are: one, of a response that is one reply."""
        return [len(self.prompt_token_ids) + len(self.token_ids)]


@dataclasses.dataclass
class GenerationStatistics:
    """Counters of one `generate` call, complete once its iterator is exhausted."""

    generated_tokens: int = 0  # sampled, prompts not included
    prefill_tokens: int = 0  # prompt tokens computed, and tokens computed again after preemptions
    shared_prefix_tokens: int = 0  # prompt tokens that were in KV memory already
    longest_running: int = 0  # sampled tokens of the response that has been in a slot longest
    steps: int = 0  # forward passes
    active_slot_steps: int = 0  # occupied slots, summed over steps
    guessed_tokens: int = 0  # computed on a guess, behind the newest token of a response
    guesses_held: int = 0  # of these, the ones that the response had
    preemptions: int = 0  # sequences that lost their KV memory and were computed again
    peak_pages: int = 0  # the most pages of KV memory that sequences held at once
    num_pages: int = 0  # pages of KV memory in total


# ---- the engine ---------------------------------------------------------------------------------


class GenerationEngine(abc.ABC):
    """Generates responses with weights that somebody else trains.

    Life cycle: `build` once; then, as often as wanted, `refit`, `generate`, and `unload` / `reload` in between to lend
    the memory to training. Calls in another order raise RuntimeError. Subclasses do the work, in the methods that begin
    with an underscore.

    Attributes:
        vocab_size: of the model.
        max_sequence_length: the most tokens of a prompt plus its response.
        grammars: compiles them; None: the engine was built without.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_slots: int,
        max_sequence_length: int,
        eos_id: int,
        more_eos_ids: Sequence[int] = (),
        vocab_limit: int | None = None,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Take the options common to all engines.

        Args:
            vocab_size: size of the model's vocabulary.
            num_slots: the most sequences generated at the same time.
            max_sequence_length: the most tokens of a prompt plus its response.
            eos_id: token that ends a response.
            more_eos_ids: further tokens that end a response, as chat models have them.
            vocab_limit: ids at and above it are never sampled: the tokenizer's size, where the model's vocabulary
                is larger. None: ``vocab_size``.
            detokenize: ids to text, special tokens left out; needed for textual stop strings.
            token_to_id: id of a string that is one token, else None; needed for stop strings that are special tokens.
            grammars: of the tokenizer; needed for responses that are held to one.

        Raises:
            ValueError: a value is out of its range.
        """
        limit = vocab_size if vocab_limit is None else vocab_limit
        if num_slots < 1 or max_sequence_length < 2:
            raise ValueError(
                f"num_slots={num_slots} must be at least 1 and max_sequence_length={max_sequence_length} at least 2"
            )
        if not 0 < limit <= vocab_size:
            raise ValueError(f"vocab_limit={limit} must lie in [1, {vocab_size}], the model's vocabulary")
        if not 0 <= eos_id < limit:
            raise ValueError(f"eos_id={eos_id} is outside the vocabulary of {limit}")
        self.vocab_size = vocab_size
        self._vocab_limit = limit
        self._num_slots = num_slots
        self.max_sequence_length = max_sequence_length
        self._eos_id, self._more_eos_ids = eos_id, tuple(more_eos_ids)
        self._detokenize = detokenize
        self._token_to_id = token_to_id
        self.grammars = grammars
        self._num_compilations = 0
        self._statistics = GenerationStatistics()
        self._weight_version = NO_WEIGHTS
        self._built = False
        self._loaded = False
        self._generating = False

    def build(self) -> None:
        """Compile and allocate for the shapes given to the constructor. Called once, before all else."""
        if self._built:
            raise RuntimeError("the engine is already built; call build() only once, and reload() to take memory back")
        self._build()
        self._built = self._loaded = True

    def refit(self, weights: WeightStream, version: int) -> None:
        """Replace all weights; neither recompiles nor allocates lasting memory.

        Tensors may come in any order, and need not outlive the step of the iterator that brings them: see ``transient``
        of `weights.stream.export_weights`.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or misshapen; the message names it.
                The engine then refuses to generate until a refit has succeeded.
        """
        self._require_ready("refit")
        if version < 0:
            raise ValueError(f"weight version must not be negative, got {version}")
        self._weight_version = NO_WEIGHTS  # until the whole stream is in
        self._refit(weights)
        self._weight_version = version

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        """Yield each response as it finishes, in order of finishing. One call at a time; closing the iterator abandons
        the rest.

        ``requests`` is pulled lazily, one request whenever a slot is free, so a shared work queue
        can stand behind it. The engine reports each forward pass, or another sign of life, to
        `activity.progress`: the watchdog relies on it while long responses are generated.

        Raises:
            ValueError: a request is empty, too long or holds ids outside the vocabulary.
            RuntimeError: the engine is unloaded or has no complete weights.
            NonFiniteError: the model's logits are not finite.
        """
        self._require_weights()
        stop = self._stop_condition(sampling)
        return self._run(lambda: self._generate(iter(requests), sampling, stop))

    def _run(self, start: Callable[[], Iterator[T]]) -> Generator[T, None, None]:
        self._require_weights()  # when it begins: time may have passed since it was asked for
        self._statistics = GenerationStatistics()
        self._generating = True
        try:
            yield from start()
        finally:
            self._generating = False

    def unload(self) -> None:
        """Release the memory of weights and KV cache; keep what was compiled. A second call does nothing."""
        if not self._loaded:
            return
        self._require_ready("unload")
        self._weight_version = NO_WEIGHTS
        self._unload()
        self._loaded = False

    def reload(self) -> None:
        """Allocate the memory again. The weights are lost: `refit` before the next `generate`. Where nothing was
        unloaded, this does nothing."""
        if self._loaded:
            return
        if not self._built:
            raise RuntimeError("reload() before build(): call build() once at start")
        self._reload()
        self._loaded = True

    def close(self) -> None:  # noqa: B027 (most engines end with their process)
        """End what would outlive the engine: processes, captured collectives. No method may be called afterwards."""

    @property
    def weight_version(self) -> int:
        """Version of the last complete refit; -1 while the engine has no complete weights."""
        return self._weight_version

    @property
    def viewed_weights(self) -> frozenset[str]:
        """Names of the tensors that the engine reads from the trainer's own memory: a refit's stream leaves them out.

        Some of them it copies at each refit. With the others it computes in place, so training changes them at once:
        a refit must come before the next `generate`, since keys and values in memory are of the weights before.
        """
        return frozenset()

    @property
    def num_compilations(self) -> int:
        """How often anything was compiled or captured; constant after `build`.

        What `reload` captures again, because its memory has new addresses, is not counted.
        """
        return self._num_compilations

    @property
    def num_slots(self) -> int:
        """The most sequences that are generated at the same time."""
        return self._num_slots

    @property
    def statistics(self) -> GenerationStatistics:
        """Counters of the latest `generate`."""
        return self._statistics

    # ---- for subclasses ---------------------------------------------------------------------

    @abc.abstractmethod
    def _build(self) -> None:
        """Compile and allocate."""

    @abc.abstractmethod
    def _refit(self, weights: WeightStream) -> None:
        """Load the whole stream, or raise."""

    @abc.abstractmethod
    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        """Yield the responses; counts in ``self._statistics``, which is fresh."""

    def _unload(self) -> None:  # noqa: B027 (an engine may have no memory of its own)
        """Release the memory."""

    def _reload(self) -> None:  # noqa: B027 (likewise)
        """Allocate the memory again."""

    def _stop_condition(self, sampling: SamplingParams) -> StopCondition:
        if sampling.grammar is not None and self.grammars is None:
            raise ValueError("grammar: the engine was built without `grammars`; give it those of the tokenizer")
        return StopCondition(
            sampling, self._eos_id, self._detokenize, self._token_to_id, self._vocab_limit, self._more_eos_ids
        )

    def _check(self, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Raise ValueError if this engine cannot serve the request."""
        request.check(sampling, self.max_sequence_length, self.vocab_size)

    def _diverged(self, request: GenerationRequest, num_tokens: int) -> NonFiniteError:
        """The error to raise when the logits after ``num_tokens`` response tokens are NaN or infinite."""
        return NonFiniteError(
            f"request {request.request_id}: logits at response token {num_tokens} are not finite with weights of "
            f"version {self._weight_version}: the weights have diverged. Go back to an earlier checkpoint, and train "
            "with a lower model.optim.lr"
        )

    def _require_weights(self) -> None:
        """Raise RuntimeError if nothing can be generated now."""
        self._require_ready("generate")
        if self._weight_version == NO_WEIGHTS:
            raise RuntimeError(
                "generate() without complete weights: a refit must succeed after build, reload or a failed refit"
            )

    def _require_ready(self, action: str) -> None:
        if not self._built:
            raise RuntimeError(f"{action} before build(): call build() once at start")
        if not self._loaded:
            raise RuntimeError(f"{action} while the engine is unloaded: call reload() and refit() first")
        if self._generating:
            raise RuntimeError(f"{action} while a generate() is under way: exhaust or close its iterator first")


# ---- when a response is complete -----------------------------------------------------------------


def text_before_end(
    token_ids: Sequence[int], detokenize: Detokenize, end_strings: Sequence[str], min_new_tokens: int
) -> str:
    """A response's text up to the first end string, without those that its first ``min_new_tokens`` tokens complete."""
    text, early = detokenize(token_ids), detokenize(token_ids[:min_new_tokens])
    ends = [text.find(string, early.rfind(string) + 1) for string in end_strings]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


class StopCondition:
    """Decides after each token whether a response ends.

    A stop string that is one token of the vocabulary (``<|im_end|>``, ``<extra_id_1>``) is matched
    by its id: special tokens leave no text. Every stop string is also looked for in the text: only a
    tail long enough to hold it is decoded, and only after a token that may complete a stop string.

    Attributes:
        stop_ids: ids that end a response: those of end of sequence, unless ignored, those asked for, those of stop
            strings.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_id: int,
        detokenize: Detokenize | None = None,
        token_to_id: TokenToId | None = None,
        vocab_limit: int | None = None,
        more_eos_ids: Sequence[int] = (),
    ) -> None:
        """Collect the stop ids, without those at and above ``vocab_limit``, which are never sampled.

        ``more_eos_ids`` end a sequence as ``eos_id`` does.

        Raises:
            ValueError: a stop string can be matched neither by id nor by text.
        """
        more = [*(() if params.ignore_eos else more_eos_ids), *params.stop_token_ids]
        known = [i for i in more if i >= 0 and (vocab_limit is None or i < vocab_limit)]
        stop_ids = known if params.ignore_eos else [eos_id, *known]
        for string in params.stop_strings:
            token = token_to_id(string) if token_to_id is not None else None
            if token is not None:
                if vocab_limit is None or token < vocab_limit:
                    stop_ids.append(token)
            elif detokenize is None:
                raise ValueError(
                    f"stop string {string!r} is not a single token, and the engine was built without `detokenize`; "
                    "give it the tokenizer's ids_to_text"
                )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_ids))
        self._stop_id_set = frozenset(self.stop_ids)
        self._strings = params.stop_strings if detokenize is not None else ()
        self._detokenize = detokenize
        # Every token but a special one adds at least one byte of text, so this many tokens hold any stop string.
        longest = max((len(string.encode()) for string in self._strings), default=0)
        self._tail_tokens = longest + _CONTEXT_TOKENS
        self._last_characters = {string[-1] for string in self._strings}
        self._may_complete: dict[int, bool] = {}
        self._min_new_tokens = params.min_new_tokens

    def check(self, token_ids: list[int], limit: int) -> FinishReason | None:
        """Why the response ``token_ids`` (1 to ``limit`` of them) ends at its last token; None: it goes on."""
        may_stop = len(token_ids) > self._min_new_tokens
        if may_stop and (token_ids[-1] in self._stop_id_set or (self._strings and self._text_stops(token_ids))):
            return "stop"
        return "length" if len(token_ids) >= limit else None

    def _text_stops(self, token_ids: list[int]) -> bool:
        """Whether the last token completes a stop string."""
        assert self._detokenize is not None, "there are no stop strings without it"
        last = token_ids[-1]
        if last not in self._may_complete:
            self._may_complete[last] = self._may_end_a_string(self._detokenize([last]))
        if not self._may_complete[last]:
            return False
        tail = token_ids[-self._tail_tokens :]
        text = self._detokenize(tail)
        for _ in range(_CONTEXT_TOKENS - 1):
            if not text.startswith(_PART_OF_A_CHARACTER):
                break
            # A character that the tail cuts spoils all bytes beside it, where a tokenizer decodes these together.
            tail = tail[1:]
            text = self._detokenize(tail)
        found = [string for string in self._strings if string in text]
        if not found:
            return False
        # A stop string may have appeared below the minimum length; only one that ends in the last token counts.
        before = self._detokenize(tail[:-1]) if len(tail) > 1 else ""
        return any(text.rfind(string) > before.rfind(string) for string in found)

    def _may_end_a_string(self, text: str) -> bool:
        """Whether a token that decodes to ``text`` on its own may complete a stop string."""
        # Decoded alone, a token may lack a space that it has within a text, or be only part of a character.
        is_whole = text != "" and _PART_OF_A_CHARACTER not in text
        return not is_whole or any(end in text or end.isspace() for end in self._last_characters)
