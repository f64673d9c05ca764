"""Log-probabilities and entropy of tokens from hidden states, in chunks, with the vocabulary split over ranks.

Only one chunk of positions has its logits in memory at a time, in the forward pass and in the backward pass, which
computes them again, but for the chunk that is still there. There is no tensor of all positions times the vocabulary,
unless `Prediction.keeps_logits` is set.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from nemo_style_aligner.engine.softcaps import capped
from nemo_style_aligner.trainer.models.gpu_kernels import elementwise_kernels_for
from nemo_style_aligner.trainer.models.linear import main_grad_of
from nemo_style_aligner.trainer.models.products import add_product, product, widened
from nemo_style_aligner.trainer.models.spans import gathered

_CHUNK_BYTES = 64 * 2**20
"""Of logits, per chunk: large enough for products at full speed with vocabularies up to 128k on a CPU."""
_GPU_CHUNK_BYTES = 512 * 2**20
"""Larger: each chunk reads and writes the weight's whole gradient, which takes a GPU as long as hundreds of rows."""
_ROWS = 256
"""Chunks of more rows (on GPUs, all chunks) have a multiple of this: it is a GPU's tile, and other numbers may cost
CPUs a third of their speed."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is asked of a language model about some positions of a packed row.

    Attributes:
        outputs: int64 [k], places among what the model has computed; None: it has computed only these k positions.
        targets: int64 [k], the token that follows each position.
        temperature: the logits are divided by it first, as the sampler does.
        entropy: the entropy of the distribution is wanted too.
        candidates: int64 [k, c], more tokens at each position whose log-probs are wanted too.
        top_k: not these log-probs but the most likely tokens are wanted, so many at each position.
        keeps_logits: keep the logits for the backward pass instead of computing them again: k times the vocabulary, in
            the dtype of the weights (fp32 where these are `widened`, and on GPUs).
    """

    outputs: torch.Tensor | None
    targets: torch.Tensor
    temperature: float = 1.0
    entropy: bool = False
    keeps_logits: bool = False
    candidates: torch.Tensor | None = None
    top_k: int = 0


def predict(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    vocab_size: int,
    wanted: Prediction,
    *,
    sequence_parallel: bool,
    softcap: float | None = None,
) -> torch.Tensor:
    """Log-probs of tokens given those before them, differentiable in the first two arguments. Collective.

    Args:
        hidden_states: [t, 1, h], or [t / tp, 1, h] under sequence parallelism.
        weight: [vocabulary / tp, h], this rank's slice of the (padded) output layer.
        vocab_size: the true size of the vocabulary; rows of the weight beyond it take no probability.
        softcap: of the logits, before the temperature; see `softcaps`.

    Returns:
        fp32 [k]; [k, 2], log-probs and entropies, if entropies are wanted; with candidates, c more columns. With
        ``top_k``, without gradients, [k, 2 top_k]: ids of tokens, the most likely ones first, and their log-probs.
    """
    if sequence_parallel:
        # Each rank's gradient comes from its slice of the vocabulary: the backward pass sums them.
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
    rows = hidden_states[:, 0]
    if wanted.outputs is not None:
        rows = gathered(rows, wanted.outputs)
    if wanted.top_k:
        return _top_tokens(rows, _Slice(weight, vocab_size, softcap), wanted)
    if not sequence_parallel:
        rows = copy_to_tensor_model_parallel_region(rows)
    return _Predictions.apply(rows, weight, vocab_size, softcap, wanted)


class _Predictions(torch.autograd.Function):
    """Rows [k, h], weight [v, h] -> fp32 [k] or [k, columns]; see `predict`.

    With p the softmax of x = rows @ weight.T / temperature and H its entropy:
    d logprob / d x = onehot(target) - p, of candidates, too; d H / d x = -p (log p + H). Of logits with a soft cap c
    the derivative with respect to what they were is 1 - (logit / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, vocab_size: int, softcap: float | None, wanted: Prediction
    ) -> torch.Tensor:
        vocabulary = _Slice(weight, vocab_size, softcap)
        k = rows.shape[0]
        # Of this rank's slice alone: the log-sum-exp, the target's logit, the entropy.
        normalizer, target_logit, entropy = rows.new_zeros(3, k, dtype=torch.float32)
        candidates = wanted.candidates if wanted.candidates is not None else wanted.targets.new_zeros(k, 0)
        others = rows.new_zeros(candidates.shape, dtype=torch.float32)
        kept: list[torch.Tensor] = []
        ctx.last_logits = None
        if vocabulary.size == 0:
            normalizer.fill_(torch.finfo(torch.float32).min)
        wide = widened(rows)
        for part in vocabulary.chunks(wide, wanted.keeps_logits):
            logits = vocabulary.logits(wide[part], wanted.keeps_logits)
            if others.shape[1]:  # before they are overwritten
                others[part] = _picked(logits, vocabulary.local(candidates[part]), wanted)
            measured = _measure(logits, vocabulary.local(wanted.targets[part]), wanted)
            normalizer[part], target_logit[part] = measured[:2]
            if wanted.entropy:
                entropy[part] = measured[2]
            if wanted.keeps_logits:
                kept.append(logits)
            elif _stay_in_buffer(logits):
                ctx.last_logits = logits
        if vocabulary.is_split:
            own, normalizer = normalizer, _logsumexp_over_ranks(normalizer)
            # A slice with total probability q and entropy H contributes q (H - log q).
            log_share = own - normalizer
            sums = torch.stack([target_logit, log_share.exp() * (entropy - log_share), *others.unbind(1)])
            dist.all_reduce(sums, group=parallel_state.get_tensor_model_parallel_group())
            target_logit, entropy, others = sums[0], sums[1], sums[2:].t()
        ctx.save_for_backward(rows, weight, normalizer, entropy, *kept)
        ctx.vocabulary, ctx.wanted, ctx.main_grad = (vocab_size, softcap), wanted, main_grad_of(weight)
        logprobs = target_logit - normalizer
        if not wanted.entropy and wanted.candidates is None:
            return logprobs
        columns = [logprobs, entropy] if wanted.entropy else [logprobs]
        return torch.cat([torch.stack(columns, 1), others - normalizer[:, None]], 1)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        is_frozen = not ctx.needs_input_grad[1]
        rows, weight, normalizer, entropy, *kept = ctx.saved_tensors
        rows = widened(rows)
        wanted: Prediction = ctx.wanted
        vocabulary = _Slice(weight, *ctx.vocabulary)
        grad = grad / wanted.temperature
        columns = grad[:, None] if grad.ndim == 1 else grad
        grad_logprob, grad_entropy = columns[:, 0].contiguous(), None
        if wanted.entropy:
            grad_entropy = columns[:, 1].contiguous()
        of_others = columns[:, 1 + wanted.entropy :]
        grad_sum = grad_logprob + of_others.sum(1) if of_others.shape[1] else grad_logprob
        grad_rows = torch.zeros_like(rows)
        # Summed over chunks in fp32, whatever the dtype of the weights.
        grad_weight = ctx.main_grad
        if grad_weight is None:
            rows_of_weight = 0 if is_frozen else len(weight)
            grad_weight = torch.zeros(rows_of_weight, weight.shape[1], dtype=torch.float32, device=weight.device)
        mine = grad_weight[: vocabulary.size]
        for part in reversed(vocabulary.chunks(rows, wanted.keeps_logits)):
            if wanted.keeps_logits:
                logits = kept.pop()
            elif part.stop == len(rows) and _is_in_buffer(ctx.last_logits):
                logits, ctx.last_logits = ctx.last_logits, None  # soon overwritten
            else:
                logits = vocabulary.logits(rows[part])
            slopes = vocabulary.slopes(logits)
            targets = vocabulary.local(wanted.targets[part])
            of_entropy = None if grad_entropy is None else (entropy[part], grad_entropy[part])
            grad_logits = _gradient(logits, targets, wanted, normalizer[part], grad_sum[part], of_entropy, rows.dtype)
            if wanted.candidates is not None:  # the sum is the target's so far
                ids = torch.cat([targets[:, None], vocabulary.local(wanted.candidates[part])], 1)
                shares = torch.cat([(grad_logprob - grad_sum)[part, None], of_others[part]], 1)
                grad_logits.scatter_add_(1, ids.clamp(min=0), (shares * (ids >= 0)).to(grad_logits.dtype))
            if slopes is not None:
                grad_logits.mul_(slopes)
            product(grad_logits, vocabulary.weight, out=grad_rows[part])
            if not is_frozen:
                add_product(mine, grad_logits, rows[part])
        is_returned = ctx.main_grad is None and not is_frozen
        return grad_rows.to(weight.dtype), grad_weight.to(weight.dtype) if is_returned else None, None, None, None


@torch.no_grad()
def _top_tokens(rows: torch.Tensor, vocabulary: _Slice, wanted: Prediction) -> torch.Tensor:
    """`predict` with ``top_k``: of each slice of the vocabulary, and of these the whole's. Ids are exact in fp32."""
    k = len(rows)
    normalizer = rows.new_full((k,), torch.finfo(torch.float32).min, dtype=torch.float32)
    best = rows.new_full((k, wanted.top_k), -torch.inf, dtype=torch.float32)
    ids = torch.zeros_like(best)
    wide, count = widened(rows), min(wanted.top_k, vocabulary.size)
    for part in vocabulary.chunks(wide, keeps_logits=False):
        logits = _scaled(vocabulary.logits(wide[part]), wanted)
        normalizer[part] = logits.logsumexp(-1)
        best[part, :count], chosen = logits.topk(count)
        ids[part, :count] = (chosen + vocabulary.first).float()
    if vocabulary.is_split:
        normalizer = _logsumexp_over_ranks(normalizer)
        best, places = gather_from_tensor_model_parallel_region(best).topk(wanted.top_k)
        ids = gather_from_tensor_model_parallel_region(ids).gather(1, places)
    return torch.cat([ids, best - normalizer[:, None]], 1)


class _Slice:
    """This rank's rows of the output layer, without those that pad the vocabulary."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, softcap: float | None = None) -> None:
        self.softcap = softcap
        self.is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
        self.first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
        self.size = min(max(vocab_size - self.first, 0), weight.shape[0])
        self.weight = widened(weight.detach()[: self.size])

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [n] -> ids in this slice, -1 for those outside."""
        ids = ids - self.first
        return ids.where((ids >= 0) & (ids < self.size), -1)

    def chunks(self, rows: torch.Tensor, keeps_logits: bool) -> list[slice]:
        """Rows (`widened`) whose logits are in memory together. All but the first chunk are of the same size."""
        if self.size == 0:
            return []
        # Torch's functions make an fp32 copy. Kept logits (bf16) fill half a chunk, memory that the allocator reuses.
        itemsize = 4 if keeps_logits or elementwise_kernels_for(rows) is None else _logits_dtype(rows).itemsize
        step = max(1, chunk_bytes(rows.device) // (itemsize * self.size))
        if rows.is_cuda or step > _ROWS:
            step = max(step // _ROWS * _ROWS, _ROWS)
        bounds = [0, *range(len(rows) % step or step, len(rows) + 1, step)]
        return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def logits(self, rows: torch.Tensor, is_kept: bool = False) -> torch.Tensor:
        """Logits of a chunk of rows (`widened`), valid until the next call unless they are kept."""
        shape, dtype = (len(rows), self.size), _logits_dtype(rows)
        out = rows.new_empty(shape, dtype=dtype) if is_kept else _buffer(shape, dtype, rows.device)
        return capped(product(rows, self.weight.t(), out=out), self.softcap, in_place=True)

    def slopes(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The derivatives of capped logits with respect to uncapped ones; None: they have no cap."""
        return None if self.softcap is None else 1 - (logits.float() / self.softcap).square()


def _logits_dtype(rows: torch.Tensor) -> torch.dtype:
    """GPUs accumulate in fp32 and can return that; CPUs round to the inputs' dtype."""
    return torch.float32 if rows.is_cuda else rows.dtype


def _measure(
    logits: torch.Tensor, targets: torch.Tensor, wanted: Prediction
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`LayerKernels.measure_logits`, or the same in torch, which overwrites fp32 logits unless they are kept."""
    if kernels := elementwise_kernels_for(logits):
        return kernels.measure_logits(logits, targets, 1 / wanted.temperature, wanted.entropy)
    logits = _scaled(logits, wanted)
    ids, here = targets.clamp(min=0)[:, None], targets >= 0
    picked = logits.gather(1, ids)[:, 0]
    torch.log_softmax(logits, -1, out=logits)
    entropy = logits.exp().mul_(logits).sum(-1).neg() if wanted.entropy else None
    return picked - logits.gather(1, ids)[:, 0], picked * here, entropy


def _picked(logits: torch.Tensor, ids: torch.Tensor, wanted: Prediction) -> torch.Tensor:
    """Logits divided by the temperature, fp32, of the tokens ``ids`` (as `_Slice.local` has them) [k, c]; else 0."""
    return logits.gather(1, ids.clamp(min=0)).float() / wanted.temperature * (ids >= 0)


def _gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    wanted: Prediction,
    normalizer: torch.Tensor,
    grad: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`LayerKernels.logits_gradient`, or the same in torch: [k, v], of ``dtype``, the one of the weights.

    May overwrite the logits unless they are kept.
    """
    if kernels := elementwise_kernels_for(logits):
        is_apart = wanted.keeps_logits or logits.dtype != dtype
        out = _buffer(logits.shape, dtype, logits.device) if is_apart else logits
        kernels.logits_gradient(logits, targets, 1 / wanted.temperature, normalizer, grad, entropy, out)
        return out
    logprobs = _scaled(logits, wanted).sub_(normalizer[:, None])
    if entropy is None:
        out = logprobs.exp_().mul_(-grad[:, None])
    else:
        probabilities = logprobs.exp()
        out = logprobs.add_(entropy[0][:, None]).mul_(entropy[1][:, None])
        out.add_(grad[:, None]).mul_(probabilities).neg_()
    out.scatter_add_(1, targets.clamp(min=0)[:, None], (grad * (targets >= 0))[:, None])
    return out.to(dtype)


def _scaled(logits: torch.Tensor, wanted: Prediction) -> torch.Tensor:
    """Logits divided by the temperature, in fp32; overwrites fp32 logits unless they are kept."""
    if logits.dtype != torch.float32 or wanted.keeps_logits:
        logits = _buffer(logits.shape, torch.float32, logits.device).copy_(logits)
    return logits if wanted.temperature == 1.0 else logits.div_(wanted.temperature)


_buffers: dict[torch.dtype, torch.Tensor] = {}
_last_handed_out: dict[torch.dtype, torch.Tensor] = {}


def _buffer(shape: Sequence[int], dtype: torch.dtype, target: torch.device) -> torch.Tensor:
    """Uninitialised memory; on a CPU the same in each call for a dtype.

    Otherwise the C library would give 64 MiB back and get new pages for each chunk, which takes as long as a softmax.
    """
    if target.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=target)
    size = shape[0] * shape[1]
    kept = _buffers.get(dtype)
    if kept is None or kept.numel() < size:
        kept = _buffers[dtype] = torch.empty(size, dtype=dtype)
    out = _last_handed_out[dtype] = kept[:size].view(*shape)
    return out


def _stay_in_buffer(logits: torch.Tensor) -> bool:
    """Whether these logits, which lie in the buffer, are still there after `_measure`, and cost no memory."""
    return logits.device.type == "cpu" and elementwise_kernels_for(logits) is not None


def _is_in_buffer(logits: torch.Tensor | None) -> bool:
    """Whether nothing else has been put into the buffer since."""
    return logits is not None and logits is _last_handed_out.get(logits.dtype)


def chunk_bytes(device: torch.device) -> int:
    """Bytes that the logits of one chunk may take."""
    return _GPU_CHUNK_BYTES if device.type == "cuda" else _CHUNK_BYTES


def _logsumexp_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Elementwise log of the sum of exponentials over the tensor-parallel group."""
    group = parallel_state.get_tensor_model_parallel_group()
    peak = values.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    total = (values - peak).exp_()
    dist.all_reduce(total, group=group)
    return peak + total.log_()
