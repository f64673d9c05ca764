"""What all engines share: checks of the order in which they are called, and their common options."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence

from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.generation.engine import (
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    GenerationStatistics,
    SamplingParams,
    WeightStream,
)
from nemo_style_aligner.generation.stopping import Detokenize, StopCondition, TokenToId

NO_WEIGHTS = -1  # the version of an engine without complete weights


class EngineLifecycle(GenerationEngine):
    """Checks the calls of an engine; subclasses do the work, in the methods that begin with an underscore."""

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
        self._vocab_size = vocab_size
        self._vocab_limit = limit
        self._num_slots = num_slots
        self._max_sequence_length = max_sequence_length
        self._eos_id, self._more_eos_ids = eos_id, tuple(more_eos_ids)
        self._detokenize = detokenize
        self._token_to_id = token_to_id
        self._num_compilations = 0
        self._statistics = GenerationStatistics()
        self._weight_version = NO_WEIGHTS
        self._built = False
        self._loaded = False
        self._generating = False

    # ---- the contract -----------------------------------------------------------------------

    def build(self) -> None:
        """See `GenerationEngine.build`."""
        if self._built:
            raise RuntimeError("the engine is already built; call build() only once, and reload() to take memory back")
        self._build()
        self._built = self._loaded = True

    def refit(self, weights: WeightStream, version: int) -> None:
        """See `GenerationEngine.refit`."""
        self._require_ready("refit")
        if version < 0:
            raise ValueError(f"weight version must not be negative, got {version}")
        self._weight_version = NO_WEIGHTS  # until the whole stream is in
        self._refit(weights)
        self._weight_version = version

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        """See `GenerationEngine.generate`. One call at a time; closing the iterator abandons the rest."""
        self._require_weights()
        stop = StopCondition(
            sampling, self._eos_id, self._detokenize, self._token_to_id, self._vocab_limit, self._more_eos_ids
        )
        return self._run(requests, sampling, stop)

    def _run(
        self, requests: Iterable[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        self._require_weights()  # again: time may have passed since generate() was called
        self._statistics = GenerationStatistics()
        self._generating = True
        try:
            yield from self._generate(iter(requests), sampling, stop)
        finally:
            self._generating = False

    def unload(self) -> None:
        """See `GenerationEngine.unload`; a second call does nothing."""
        if not self._loaded:
            return
        self._require_ready("unload")
        self._weight_version = NO_WEIGHTS
        self._unload()
        self._loaded = False

    def reload(self) -> None:
        """See `GenerationEngine.reload`; a second call does nothing."""
        if self._loaded:
            return
        if not self._built:
            raise RuntimeError("reload() before build(): call build() once at start")
        self._reload()
        self._loaded = True

    @property
    def weight_version(self) -> int:
        """See `GenerationEngine.weight_version`."""
        return self._weight_version

    @property
    def num_compilations(self) -> int:
        """See `GenerationEngine.num_compilations`."""
        return self._num_compilations

    @property
    def num_slots(self) -> int:
        """See `GenerationEngine.num_slots`."""
        return self._num_slots

    @property
    def statistics(self) -> GenerationStatistics:
        """See `GenerationEngine.statistics`."""
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

    def _unload(self) -> None:
        """Release the memory."""

    def _reload(self) -> None:
        """Allocate the memory again."""

    def _check(self, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Raise ValueError if this engine cannot serve the request."""
        request.check(sampling, self._max_sequence_length, self._vocab_size)

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
