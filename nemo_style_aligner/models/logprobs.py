"""Log-probabilities and entropy of tokens from hidden states, in chunks, with the vocabulary split over ranks.

The logits of one chunk of positions exist at a time, in the forward and in the backward pass, which computes them
again: there is no tensor of all positions times the vocabulary, unless it is asked for, in the weights' dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from nemo_style_aligner.models.main_grads import main_grad_of
from nemo_style_aligner.models.products import add_product, product, widened

_CHUNK_BYTES = 64 * 2**20
"""Of fp32 logits. Large enough for matrix products to run at full speed with vocabularies up to 128k on a CPU."""
_GPU_CHUNK_BYTES = 512 * 2**20
"""A chunk's backward pass reads and writes the whole gradient, which takes a GPU as long as hundreds of rows do."""
_GPU_ROWS = 256  # of a tile in matrix products


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is asked of a language model about some positions of a packed row.

    Attributes:
        outputs: int64 [k], places in the row; None: the k rows that there are.
        targets: int64 [k], the token that follows each place.
        temperature: the logits are divided by it first, as the sampler does.
        entropy: the entropy of the distribution is wanted too.
        keeps_logits: the backward pass finds the logits instead of computing them again: k times the vocabulary, in the
            dtype of the weights (fp32 where products are: `widened`).
    """

    outputs: torch.Tensor | None
    targets: torch.Tensor
    temperature: float = 1.0
    entropy: bool = False
    keeps_logits: bool = False


def predict(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    vocab_size: int,
    wanted: Prediction,
    *,
    sequence_parallel: bool,
) -> torch.Tensor:
    """Log-probs of tokens given those before them, differentiable in the first two arguments. Collective.

    Args:
        hidden_states: [t, 1, h], or [t / tp, 1, h] under sequence parallelism.
        weight: [vocabulary / tp, h], this rank's slice of the (padded) output layer.
        vocab_size: the true size of the vocabulary; rows of the weight beyond it take no probability.

    Returns:
        fp32 [k]; [k, 2], log-probs and entropies, if entropies are wanted.
    """
    if sequence_parallel:
        # Each rank's gradient is of its slice of the vocabulary: the way back sums them.
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
    rows = hidden_states[:, 0]
    if wanted.outputs is not None:
        rows = rows.index_select(0, wanted.outputs)
    if not sequence_parallel:
        rows = copy_to_tensor_model_parallel_region(rows)
    return _Predictions.apply(rows, weight, vocab_size, wanted)


class _Predictions(torch.autograd.Function):
    """Rows [k, h], weight [v, h] -> fp32 [k] or [k, 2]; see `predict`.

    With p the softmax of x = rows @ weight.T / temperature and H its entropy:
    d logprob / d x = onehot(target) - p; d H / d x = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, vocab_size: int, wanted: Prediction
    ) -> torch.Tensor:
        vocabulary = _Slice(weight, vocab_size)
        k = rows.shape[0]
        # Of this rank's slice alone: log of the sum of exponentials, the target's logit, the entropy.
        normalizer, target_logit, entropy = rows.new_zeros(3, k, dtype=torch.float32)
        kept: list[torch.Tensor] = []
        if vocabulary.size == 0:
            normalizer.fill_(torch.finfo(torch.float32).min)
        else:
            for part, logits in vocabulary.logits(widened(rows), wanted, keep=kept if wanted.keeps_logits else None):
                ids, here = vocabulary.local(wanted.targets[part])
                picked = logits.gather(1, ids[:, None])[:, 0]
                target_logit[part] = picked * here
                torch.log_softmax(logits, -1, out=logits)
                normalizer[part] = picked - logits.gather(1, ids[:, None])[:, 0]
                if wanted.entropy:
                    entropy[part] = logits.exp().mul_(logits).sum(-1).neg()
        if vocabulary.is_split:
            own, normalizer = normalizer, _logsumexp_over_ranks(normalizer)
            # A slice with the share q of the probability and the entropy H adds q (H - log q).
            log_share = own - normalizer
            sums = torch.stack([target_logit, log_share.exp() * (entropy - log_share)])
            dist.all_reduce(sums, group=parallel_state.get_tensor_model_parallel_group())
            target_logit, entropy = sums
        ctx.save_for_backward(rows, weight, normalizer, entropy, *kept)
        ctx.vocab_size, ctx.wanted, ctx.main_grad = vocab_size, wanted, main_grad_of(weight)
        logprobs = target_logit - normalizer
        return torch.stack([logprobs, entropy], -1) if wanted.entropy else logprobs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        rows, weight, normalizer, entropy, *kept = ctx.saved_tensors
        rows = widened(rows)
        wanted: Prediction = ctx.wanted
        vocabulary = _Slice(weight, ctx.vocab_size)
        grad = grad / wanted.temperature
        grad_logprob, grad_entropy = grad.unbind(-1) if wanted.entropy else (grad, None)
        grad_rows = torch.zeros_like(rows)
        # Summed over chunks in fp32, whatever the dtype of the weights.
        grad_weight = ctx.main_grad
        if grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        mine = grad_weight[: vocabulary.size]
        for part, logits in vocabulary.logits(rows, wanted, kept) if vocabulary.size else ():
            logits -= normalizer[part, None]
            if grad_entropy is None:
                grad_logits = logits.exp_().mul_(-grad_logprob[part, None])
            else:
                probabilities = logits.exp()
                grad_logits = logits.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                grad_logits.add_(grad_logprob[part, None]).mul_(probabilities).neg_()
            ids, here = vocabulary.local(wanted.targets[part])
            grad_logits.scatter_add_(1, ids[:, None], (grad_logprob[part] * here)[:, None])
            grad_logits = grad_logits.to(rows.dtype)
            product(grad_logits, vocabulary.weight, out=grad_rows[part])
            add_product(mine, grad_logits, rows[part])
        return grad_rows.to(weight.dtype), grad_weight.to(weight.dtype) if ctx.main_grad is None else None, None, None


class _Slice:
    """This rank's rows of the output layer, without those that pad the vocabulary."""

    def __init__(self, weight: torch.Tensor, vocab_size: int) -> None:
        self.is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
        self.first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
        self.size = min(max(vocab_size - self.first, 0), weight.shape[0])
        self.weight = widened(weight.detach()[: self.size])

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [n] -> (ids in this slice, 0 for those outside; fp32, 1 for those inside)."""
        ids = ids - self.first
        here = (ids >= 0) & (ids < self.size)
        return ids * here, here.float()

    def logits(
        self,
        rows: torch.Tensor,
        wanted: Prediction,
        kept: Sequence[torch.Tensor] = (),
        keep: list[torch.Tensor] | None = None,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """fp32 logits of chunks of rows (`widened`) over the temperature, each valid until the next.

        There must be at least one row of weights.

        Args:
            kept: what an earlier call has appended to its ``keep``; nothing: they are computed.
        """
        step = max(1, chunk_bytes(rows.device) // (4 * self.size))
        if rows.is_cuda:
            step = max(step // _GPU_ROWS * _GPU_ROWS, _GPU_ROWS)
        # GPUs add up in fp32 and can leave it at that; CPUs round to the inputs' dtype.
        dtype = torch.float32 if rows.is_cuda else rows.dtype
        chunks = iter(kept)
        for start in range(0, rows.shape[0], step):
            part = slice(start, min(start + step, rows.shape[0]))
            shape = (part.stop - part.start, self.size)
            logits = next(chunks, None)
            if logits is None:
                out = _buffer(shape, dtype, rows.device) if keep is None else rows.new_empty(shape, dtype=dtype)
                logits = product(rows[part], self.weight.t(), out=out)
                if keep is not None:
                    keep.append(logits)
            if logits.dtype != torch.float32 or kept or keep is not None:  # what follows is done in place
                logits = _buffer(shape, torch.float32, rows.device).copy_(logits)
            yield part, logits if wanted.temperature == 1.0 else logits.div_(wanted.temperature)


_buffers: dict[torch.dtype, torch.Tensor] = {}


def _buffer(shape: tuple[int, int], dtype: torch.dtype, target: torch.device) -> torch.Tensor:
    """Memory with whatever is in it; on a CPU the same as the last time.

    The C library would give 64 MiB back and fetch new pages for each chunk, which takes as long as a softmax.
    """
    if target.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=target)
    size = shape[0] * shape[1]
    kept = _buffers.get(dtype)
    if kept is None or kept.numel() < size:
        kept = _buffers[dtype] = torch.empty(size, dtype=dtype)
    return kept[:size].view(shape)


def chunk_bytes(device: torch.device) -> int:
    """Memory of the fp32 logits of one chunk, of many positions."""
    return _GPU_CHUNK_BYTES if device.type == "cuda" else _CHUNK_BYTES


def _logsumexp_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Elementwise log of the sum of exponentials over the tensor-parallel group."""
    group = parallel_state.get_tensor_model_parallel_group()
    peak = values.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    total = (values - peak).exp_()
    dist.all_reduce(total, group=group)
    return peak + total.log_()
