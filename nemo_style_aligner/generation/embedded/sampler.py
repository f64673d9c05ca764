"""Sampling for the sequences in slots: keeps the values that sampling needs of each slot, and gathers them by row."""

from __future__ import annotations

import numpy as np
import torch

from nemo_style_aligner.generation.embedded.scheduler import ScheduledSequence
from nemo_style_aligner.generation.embedded.step import EngineShape, ModelStep
from nemo_style_aligner.generation.engine import SamplingParams
from nemo_style_aligner.generation.sampling import SamplingRows
from nemo_style_aligner.transfers import moved


class SlotSampler:
    """Chooses tokens for slots; ranks that share a model all get those that the first one chooses."""

    def __init__(
        self,
        step: ModelStep,
        shape: EngineShape,
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        vocab_limit: int,
        device: torch.device,
    ) -> None:
        self._step = step
        self._params = params
        self._device = device
        self._vocab_limit = vocab_limit
        self._tensor_parallel = shape.tensor_parallel
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self._keys = np.zeros(shape.num_slots, dtype=np.int64)
        self._lengths = np.zeros(shape.num_slots, dtype=np.int64)  # of the responses
        self._seen: torch.Tensor | None = None  # bool [num_slots, vocab]: ids in each slot's prompt and response
        if params.repetition_penalty != 1.0:
            size = (shape.num_slots, shape.architecture.vocab_size)
            self._seen = torch.zeros(size, dtype=torch.bool, device=device)

    def enter(self, sequence: ScheduledSequence) -> None:
        """Take over a sequence that is new to its slot."""
        self._keys[sequence.slot] = sequence.key
        self._lengths[sequence.slot] = len(sequence.token_ids)
        if self._seen is not None:
            self._seen[sequence.slot] = False
            self._seen[sequence.slot, torch.tensor(sequence.prefill_ids, device=self._device)] = True

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: np.ndarray) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each of ``slots``, from ``logits`` [len(slots), vocab]. Collective."""
        if self._tensor_parallel.size == 1:
            tokens, logprobs = self._sample(logits, slots)
        else:
            # One message; float64 holds every token id exactly.
            message = torch.empty(2, len(slots), dtype=torch.float64, device=self._device)
            if self._tensor_parallel.rank == 0:
                torch.stack([part.double() for part in self._sample(logits, slots)], out=message)
            self._tensor_parallel.broadcast(message)
            tokens, logprobs = message[0].long(), message[1]
        self._lengths[slots] += 1
        if self._seen is not None:
            self._seen[moved(torch.from_numpy(slots), self._device), tokens] = True
        if self._device.type == "cuda":  # one copy back, one wait; float64 holds every token id exactly
            tokens, logprobs = torch.stack((tokens.double(), logprobs.double())).cpu()
        return tokens.long().tolist(), logprobs.tolist()

    def _sample(self, logits: torch.Tensor, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self._lengths[slots]
        suppress = lengths < self._params.min_new_tokens
        rows = SamplingRows(
            keys=moved(torch.from_numpy(self._keys[slots]), self._device),
            positions=moved(torch.from_numpy(lengths), self._device),
            suppress_stop=moved(torch.from_numpy(suppress), self._device) if suppress.any() else None,
            seen=None if self._seen is None else self._seen[moved(torch.from_numpy(slots), self._device)],
        )
        return self._step.sample(logits, self._params, rows, self._stop_ids, self._vocab_limit)
