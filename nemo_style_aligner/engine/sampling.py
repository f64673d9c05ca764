"""Choosing the next token, for any engine: pure, batched, on the device of the logits.

Random numbers are counter-based: row i's draw is a hash of its request's key and of the position
in the response, nothing else. So a request gets the same draws whatever else is in the batch, in
whichever slot and on whichever rank it runs, and there is no generator state to save.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from nemo_style_aligner.engine.contract import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1

_CDF_BLOCK = 128  # vocabulary entries summed together in the first level of the inverse CDF
_TOP_P_CANDIDATES = 1024  # best scores, tried before a full sort: nearly always their probability reaches top_p


@dataclasses.dataclass
class SamplingRows:
    """Inputs of `sample` that differ between the ``b`` rows of logits; all on the logits' device."""

    keys: torch.Tensor  # int64 [b], `request_key` of each row's request
    positions: torch.Tensor  # int64 [b], number of tokens the response has already
    suppress_stop: torch.Tensor | None = None  # bool [b]: rows below the minimum length
    seen: torch.Tensor | None = None  # bool [b, vocab]: ids in prompt or response; for the repetition penalty
    counts: torch.Tensor | None = None  # float [b, vocab]: how often an id is in the response; for the other penalties
    allowed: torch.Tensor | None = None  # uint8 [b, bytes]: ids that the grammar allows, as bits, the lowest first


def request_key(run_seed: int, request_seed: int) -> int:
    """Combine the run's and the request's seeds (any integers) into a signed 64-bit key."""
    mixed = _splitmix64_int((_splitmix64_int(run_seed & _MASK_64) + request_seed) & _MASK_64)
    return _signed(mixed)


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [b], from int64 ``keys`` and ``positions`` of shape [b].

    Output number ``position`` of a splitmix64 generator whose state starts at ``key``.
    """
    x = keys + (positions + 1) * _signed(_GOLDEN)  # int64 arithmetic wraps, as splitmix64 wants
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    rows: SamplingRows,
    stop_ids: torch.Tensor | None = None,
    vocab_limit: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Args:
        logits: [b, vocab], any float dtype, the model's true vocabulary (no padding columns).
        params: how to choose; the same for all rows.
        rows: what differs between rows.
        stop_ids: int64 [n], ids held back in the rows of ``rows.suppress_stop``.
        vocab_limit: ids at and above it, which the tokenizer does not know, are never chosen.

    Returns:
        tokens int64 [b], and logprobs float32 [b]: log-softmax(logits / temperature) over the whole
        of ``vocab`` at those tokens, before every filter (temperature 1 when greedy).
    """
    logits = logits.float()
    scaled = logits if params.logprob_temperature == 1.0 else logits / params.logprob_temperature
    scores = _apply_constraints(logits, params, rows, stop_ids)
    if params.use_greedy:
        tokens = scores[:, :vocab_limit].argmax(dim=-1)
        normalizer = _logsumexp(scaled)
    else:
        # Without constraints, tokens are sampled from the logits whose log-probs are reported: divide them only once.
        unconstrained = scores is logits
        scores = scaled if unconstrained else scores / params.temperature
        possible = filter_min_p(filter_top_k_top_p(scores[:, :vocab_limit], params.top_k, params.top_p), params.min_p)
        # The peak of the possible ids only: relative to a far likelier id that is excluded, all weights could be 0.
        peak = possible.amax(dim=-1, keepdim=True)
        weights = (possible - peak).exp_()
        if unconstrained and not params.filters:
            normalizer = weights.sum(dim=-1).log() + peak.squeeze(-1)  # no second pass of exponentials
            if possible.shape != scaled.shape:
                normalizer = torch.logaddexp(normalizer, scaled[:, vocab_limit:].logsumexp(dim=-1))
        else:
            normalizer = _logsumexp(scaled)
        tokens = _inverse_cdf(weights, uniform(rows.keys, rows.positions))
    chosen = scaled.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, chosen - normalizer


def filter_top_k_top_p(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Replace the ``scores`` [b, v] that top-k, then top-p, leave out by -inf.

    As in `transformers`, top-k keeps the ``top_k`` best tokens and those that tie with the last of them;
    top-p then keeps the smallest set of best tokens whose probability reaches ``top_p``, never empty. Here, too,
    tokens that tie with the last one are kept, so the outcome does not depend on a sort's order.
    """
    if top_k > 0:
        kth = torch.topk(scores, min(top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        scores = scores.masked_fill(scores < _top_p_threshold(scores, top_p), -torch.inf)
    return scores


def filter_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Replace the ``scores`` [b, v] of ids less likely than ``min_p`` times the likeliest one by -inf."""
    if min_p == 0.0:
        return scores
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + math.log(min_p), -torch.inf)


def apply_repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make ids marked in ``seen`` (bool, shape of ``logits``) less likely when ``penalty`` > 1."""
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def apply_mask(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Replace the ``logits`` [b, v] of ids whose bit in ``allowed`` (see `SamplingRows`) is 0, or missing, by -inf."""
    bits = (allowed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=allowed.device)) & 1
    kept = bits.flatten(1)[:, : logits.shape[1]].bool()
    kept = torch.nn.functional.pad(kept, (0, logits.shape[1] - kept.shape[1]))
    return logits.masked_fill(~kept, -torch.inf)


def _apply_constraints(
    logits: torch.Tensor, params: SamplingParams, rows: SamplingRows, stop_ids: torch.Tensor | None
) -> torch.Tensor:
    """Bias, penalties, grammar and minimum length; ``logits`` itself when none acts."""
    scores = logits
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        added = torch.tensor(biases, dtype=scores.dtype, device=scores.device).expand(len(scores), -1)
        scores = scores.index_add(-1, torch.tensor(ids, device=scores.device), added)
    if params.repetition_penalty != 1.0:
        if rows.seen is None:
            raise ValueError("repetition_penalty needs SamplingRows.seen, the ids already in prompt and response")
        scores = apply_repetition_penalty(scores, rows.seen, params.repetition_penalty)
    if params.counts_tokens:
        if rows.counts is None:
            raise ValueError("penalties need SamplingRows.counts, how often an id is in the response")
        penalties = params.frequency_penalty * rows.counts + params.presence_penalty * (rows.counts > 0)
        scores = scores - penalties
    if params.grammar is not None:
        if rows.allowed is None:
            raise ValueError("a grammar needs SamplingRows.allowed, the ids that it allows")
        scores = apply_mask(scores, rows.allowed)
    if rows.suppress_stop is not None and stop_ids is not None and stop_ids.numel():
        held_back = scores.index_select(-1, stop_ids).masked_fill(rows.suppress_stop[:, None], -torch.inf)
        scores = scores.index_copy(-1, stop_ids, held_back)
    return scores


def _top_p_threshold(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest score, [b, 1], that top-p keeps in each row of ``scores`` [b, v]."""
    vocab = scores.shape[-1]
    normalizer = _logsumexp(scores)[:, None]
    values = torch.topk(scores, min(_TOP_P_CANDIDATES, vocab), dim=-1).values
    lowest, mass = _lowest_kept(values, normalizer, top_p)
    is_flat = mass < top_p
    if values.shape[-1] < vocab and bool(is_flat.any()):  # these rows need the whole vocabulary
        values = torch.sort(scores[is_flat], dim=-1, descending=True).values
        lowest[is_flat] = _lowest_kept(values, normalizer[is_flat], top_p)[0]
    return lowest


def _logsumexp(scores: torch.Tensor) -> torch.Tensor:
    """Of each row of ``scores`` [b, v]: [b], with the same bits whatever the other rows are."""
    if len(scores) > 1:
        return torch.logsumexp(scores, dim=-1)
    # A row alone would be summed in pieces, one for each of torch's threads, and so be rounded otherwise.
    return torch.logsumexp(scores.expand(2, -1), dim=-1)[:1]


def _lowest_kept(values: torch.Tensor, normalizer: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scores [b, n] in descending order: the lowest that top-p keeps, [b, 1], and the probability of all, [b]."""
    probabilities = (values - normalizer).exp()
    cumulative = probabilities.cumsum(dim=-1)
    mass_before = cumulative - probabilities  # exactly 0 for the best token, which therefore always stays
    return values.masked_fill(mass_before >= top_p, torch.inf).amin(dim=-1, keepdim=True), cumulative[:, -1]


def _inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Sample ids, int64 [b], in proportion to ``weights`` [b, v] >= 0 with ``draws`` [b] in [0, 1).

    In two levels, first a block of the vocabulary and then an id in it: the cumulative sums are then
    short enough for float64, in which an id of tiny probability keeps its true share.
    """
    batch, vocab = weights.shape
    blocks = -(-vocab // _CDF_BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * _CDF_BLOCK - vocab)).reshape(batch, blocks, _CDF_BLOCK)
    block_edges = padded.sum(dim=-1).double().cumsum(dim=-1)
    target = draws[:, None] * block_edges[:, -1:]
    block = _first_above(block_edges, target)
    below = torch.where(block > 0, block_edges.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = padded.gather(1, block[:, :, None].expand(-1, -1, _CDF_BLOCK)).squeeze(1).double()
    inner_edges = inner.cumsum(dim=-1)
    within = _first_above(inner_edges, target - below)
    return (block * _CDF_BLOCK + within).squeeze(-1).clamp(max=vocab - 1)


def _first_above(edges: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index, [b, 1], whose edge exceeds ``target`` [b, 1]; rounding never leads past the last
    edge or to an entry without weight."""
    target = torch.minimum(target, edges[:, -1:] * (1.0 - 2.0**-50))
    return torch.searchsorted(edges.contiguous(), target.contiguous(), right=True).clamp(max=edges.shape[-1] - 1)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (unsigned) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _splitmix64_int(x: int) -> int:
    """First output of splitmix64 from state ``x``, as an unsigned Python int."""
    x = (x + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK_64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK_64
    return x ^ (x >> 31)
