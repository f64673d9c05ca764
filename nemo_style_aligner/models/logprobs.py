"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, vocab_parallel_cross_entropy


def mask_padded_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Push the logits of the rows that only pad the vocabulary to the least finite value, in place.

    Without this the padding would take probability, and how much would depend on the tensor-parallel size.

    Args:
        logits: [..., vocabulary / tp], this rank's slice.
        vocab_size: the true size of the whole vocabulary.
    """
    width = logits.shape[-1]
    valid = vocab_size - parallel_state.get_tensor_model_parallel_rank() * width
    if valid < width:
        logits[..., max(valid, 0) :] = torch.finfo(logits.dtype).min
    return logits


def next_token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, vocab_size: int, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each token given those before it, differentiable.

    Args:
        logits: [b, s, vocabulary / tp], changed in place.
        tokens: int64 [b, s].
        vocab_size: the true size of the vocabulary.
        temperature: the logits are divided by it first, as the sampler does.

    Returns:
        fp32 [b, s - 1]: entry t is log p(tokens[t + 1] | tokens[: t + 1]).
    """
    logits = mask_padded_vocabulary(logits, vocab_size)[:, :-1].float()
    if temperature != 1.0:
        logits = logits / temperature
    return -vocab_parallel_cross_entropy(logits.contiguous(), tokens[:, 1:].contiguous())


def next_token_entropy(logits: torch.Tensor, vocab_size: int, temperature: float = 1.0) -> torch.Tensor:
    """Entropy of the distribution over the next token, differentiable. Arguments as above -> fp32 [b, s - 1].

    H = log Z - E[logit], with Z and the expectation summed over the tensor-parallel group.
    """
    logits = mask_padded_vocabulary(logits, vocab_size)[:, :-1].float()
    if temperature != 1.0:
        logits = logits / temperature
    peak = logits.detach().amax(-1, keepdim=True)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    exp = (logits - peak).exp()
    z = reduce_from_tensor_model_parallel_region(exp.sum(-1))
    # exp is zero in the padding, whose logit would turn the product into -inf * 0.
    weighted = torch.where(exp > 0, exp * (logits - peak), 0.0).sum(-1)
    return z.log() - reduce_from_tensor_model_parallel_region(weighted) / z
