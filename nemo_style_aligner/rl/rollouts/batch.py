"""What flows between the phases of a PPO step."""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner import functional


@dataclasses.dataclass
class RolloutBatch:
    """Prompts with their responses: n sequences padded to s tokens, in sample order; every rank holds all of them.

    Attributes:
        sample_ids: int64 [n], 0 .. n-1: the sample's place in the step.
        prompt_ids: int64 [n], the prompt's index in its dataset.
        tokens: int64 [n, s], prompt and response, zeros after ``lengths``.
        prompt_lengths: int64 [n].
        lengths: int64 [n], of prompt and response together, stop token included.
        is_end: bool [n], whether a stop token or stop string ended the response (not the length limit).
        engine_logprobs: fp32 [n, s-1], the engine's log-probs of the response's tokens, zero elsewhere.
        weight_versions: int64 [n], version of the weights each response was made with.
        is_valid: bool [n], False if rewards, values or log-probs are NaN or Inf: left out of losses and statistics.
    """

    sample_ids: torch.Tensor
    prompt_ids: torch.Tensor
    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    is_end: torch.Tensor
    engine_logprobs: torch.Tensor
    weight_versions: torch.Tensor
    is_valid: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def response_mask(self) -> torch.Tensor:
        """fp32 [n, s-1], 1 at the predictions of the responses' tokens."""
        return functional.response_mask(self.prompt_lengths, self.lengths, self.tokens.shape[1] - 1)


@dataclasses.dataclass
class Experience:
    """Scored rollouts, ready to train on; n sequences of s tokens, every rank holds all of them.

    Attributes:
        prompt_ids: int64 [n], the prompt's index in its dataset.
        tokens: int64 [n, s].
        mask: fp32 [n, s-1], 1 at the predictions of response tokens (the critic trains on these);
            zero throughout samples that are not valid.
        policy_mask: fp32 [n, s-1], tokens of the policy's loss: ``mask`` without truncated responses
            (`mask_truncated`) and sequences outside `importance_sequence_bounds`.
        logprobs: fp32 [n, s-1], the policy's: the old log-probs of PPO's ratio, the trainer's or the engine's
            (`policy_logprobs`).
        values, advantages, returns: fp32 [n, s-1].
        importance_weights: fp32 [n, s-1].
    """

    prompt_ids: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    policy_mask: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    importance_weights: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]
