"""Experts' MLPs: four Triton kernels, for NVIDIA GPUs.

The first chooses each token's experts. The second sorts the pairs of tokens and experts by expert, on the device, and
cuts each expert's into blocks. A program of the third, which is called twice, multiplies a block by some columns of its
expert's matrix: a matrix is read for those alone that have the expert, and for all of them at once. The last adds up
what a token's experts have computed, in the order in which they were chosen.

Blocks are so many that every choice has enough, and those left over do nothing: shapes depend on the number of tokens
alone, as CUDA graphs demand, and no number on who else is in the pass.

Import this module where Triton is installed only; `choose_operations` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemo_style_aligner.engine.architecture import GATE_LIMIT, GATE_SLOPE, Experts, LayerFeatures
from nemo_style_aligner.engine.embedded.torch_operations import LOADED_BYTES, ExpertMatrices

_ACTIVATIONS = {"silu": 0, "gelu": 1, "squared-relu": 2, "gelu-tanh": 3}
_CLAMPED_SWIGLU = tl.constexpr(4)
_SLOPE, _LIMIT = tl.constexpr(GATE_SLOPE), tl.constexpr(GATE_LIMIT)

FEW_ROWS, MANY_ROWS = 16, 64
"""Pairs in a block: the least of a product on tensor cores where experts have few each, else more."""

# Results of a program for each pair, and blocks in flight: few pairs read memory, which takes many programs and loads.
_COLUMNS, _STAGES = {FEW_ROWS: 32, MANY_ROWS: 64}, {FEW_ROWS: 5, MANY_ROWS: 3}
_BLOCK = 64  # of the dimension that is summed over: loaded at a time
_PAIRS = 1024  # read at a time when they are sorted
_LEAST_BINS = 32  # of a histogram: Triton divides them over a warp
_ADDED = 1024  # results per program of `add_experts_kernel`


def activation_number(features: LayerFeatures) -> int:
    """The number by which `activated` and `gated` know the activation of MLPs."""
    return _CLAMPED_SWIGLU.value if features.clamped_swiglu else _ACTIVATIONS[features.activation]


class TritonExperts:
    """The kernels for one shape of experts; each is compiled at its first call, for passes of all sizes.

    Each way of cutting pairs into blocks has kernels of its own (`rows`).
    """

    def __init__(self, experts: Experts, activation: int, adds_bias: bool = True) -> None:
        """Of a model's experts.

        Args:
            activation: `activation_number` of their gates.
            adds_bias: where second matrices have biases, these: one of the ranks that share experts does.
        """
        self._kind = experts
        self._number = experts.number
        self._per_token = experts.per_token
        self._bins = max(_LEAST_BINS, triton.next_power_of_2(experts.number + 1))
        self._activation = activation
        self._adds_bias = adds_bias

    def rows(self, num_tokens: int) -> int:
        """Pairs in a block of a pass over so many tokens."""
        return MANY_ROWS if num_tokens * self._per_token > FEW_ROWS * self._number else FEW_ROWS

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that suffice, whatever is chosen: each expert's last one may have a single pair."""
        pairs = num_tokens * self._per_token
        experts = min(pairs, self._number)
        return experts + (pairs - experts) // self.rows(num_tokens)

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchOperations.route`."""
        size = (len(logits), self._per_token)
        chosen = torch.empty(size, dtype=torch.int64, device=logits.device)
        weights = torch.empty(size, dtype=torch.float32, device=logits.device)
        choose_experts_kernel[(len(logits),)](
            *(logits, logits if bias is None else bias, chosen, weights),
            NUMBER=self._number,
            PER_TOKEN=self._per_token,
            BINS=self._bins,
            IS_SIGMOID=self._kind.scores == "sigmoid",
            IS_NORMALIZED=self._kind.normalized and self._per_token > 1,
            HAS_BIAS=bias is not None,
            SCALING=self._kind.scaling,
            num_warps=1,
        )
        return chosen, weights

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, matrices: ExpertMatrices
    ) -> torch.Tensor:
        """See `TorchOperations.experts`; products are rounded to the dtype of ``x``, their sum is float32."""
        (tokens, hidden), device = x.shape, x.device
        pairs, rows, num_blocks = tokens * self._per_token, self.rows(tokens), self.num_blocks(tokens)
        inner = matrices.fc2[0].shape[1]
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
        sort_by_expert_kernel[(self._number,)](
            *(chosen.contiguous(), order, blocks, pairs, num_blocks),
            ROWS=rows,
            BINS=self._bins,
            PAIRS=_PAIRS,
        )
        active = x.new_empty(pairs, inner)
        products = x.new_empty(pairs, hidden)
        of_fc1, of_fc2, of_fc1_bias, of_fc2_bias = matrices.places
        for source, kind, place, biases, bias_place, out, is_first in (
            (x, matrices.fc1, of_fc1, matrices.fc1_bias, of_fc1_bias, active, True),
            (active, matrices.fc2, of_fc2, matrices.fc2_bias, of_fc2_bias, products, False),
        ):
            has_bias = bool(biases) and (is_first or self._adds_bias)
            multiply_by_experts_kernel[num_blocks, triton.cdiv(out.shape[1], _COLUMNS[rows])](
                *(source, kind[0], place, biases[0] if has_bias else source, bias_place, order, blocks, out),
                SIZE=source.shape[1],
                RESULTS=out.shape[1],
                PER_TOKEN=self._per_token,
                UNIT=LOADED_BYTES // x.element_size(),
                ROWS=rows,
                COLUMNS=_COLUMNS[rows],
                BLOCK=_BLOCK,
                ACTIVATION=self._activation,
                IS_FIRST=is_first,
                HAS_BIAS=has_bias,
                num_warps=4,
                num_stages=_STAGES[rows],
                enable_fp_fusion=True,
            )
        out = torch.empty_like(x)
        add_experts_kernel[tokens, triton.cdiv(hidden, _ADDED)](
            *(products, weights.contiguous(), out),
            SIZE=hidden,
            PER_TOKEN=self._per_token,
            BLOCK=_ADDED,
            enable_fp_fusion=True,
        )
        return out


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton looks annotations up
    """An activation that is known by its number; in float32."""
    if ACTIVATION == 0:
        active = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        active = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        active = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return active


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a gate lets through, in float32."""
    if ACTIVATION == _CLAMPED_SWIGLU:  # what is not a number stays so
        gate, up = tl.where(gate > _LIMIT, _LIMIT, gate), tl.where(up > _LIMIT, _LIMIT, up)
        through = gate * tl.sigmoid(gate * _SLOPE) * (tl.where(up < -_LIMIT, -_LIMIT, up) + 1.0)
    else:
        through = activated(gate, ACTIVATION) * up
    return through


@triton.jit
def choose_experts_kernel(  # type: ignore[no-untyped-def]
    logits,
    bias,
    chosen,
    weights,
    NUMBER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BINS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALING: tl.constexpr,
):
    """`routing.routed` of one token, the program's place in the grid: its ``PER_TOKEN`` best of ``NUMBER`` experts.

    Whatever the logits are, these are as many different experts: what is not a number is the least, and a weight.
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BINS)
    is_expert = experts < NUMBER
    scores = tl.load(logits + token * NUMBER + experts, mask=is_expert, other=float("-inf"))
    if IS_SIGMOID:
        scores = tl.sigmoid(scores)
    left = scores
    if HAS_BIAS:
        left += tl.load(bias + experts, mask=is_expert, other=0.0)
    left = tl.where((left == left) & (left > -3e38), left, -3e38)
    left = tl.where(is_expert, left, float("-inf"))
    ranks = tl.full([BINS], PER_TOKEN, tl.int32)
    for rank in range(PER_TOKEN):
        is_best = experts == tl.argmax(left, 0)
        ranks = tl.where(is_best, rank, ranks)
        left = tl.where(is_best, float("-inf"), left)
    is_chosen = ranks < PER_TOKEN
    among = is_chosen if IS_NORMALIZED else is_expert
    if not IS_SIGMOID:
        scores = tl.exp(scores - tl.max(tl.where(among, scores, float("-inf")), 0))
    scores = tl.where(among, scores, 0.0)
    if IS_NORMALIZED or not IS_SIGMOID:
        scores = scores / (tl.sum(scores, 0) + 1e-20)
    tl.store(chosen + token * PER_TOKEN + ranks, experts.to(tl.int64), mask=is_chosen)
    tl.store(weights + token * PER_TOKEN + ranks, scores * SCALING, mask=is_chosen)


# What differs between calls must not make Triton compile anew: neither values nor the alignment of views.
@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_by_expert_kernel(  # type: ignore[no-untyped-def]
    chosen,
    order,
    blocks,
    num_pairs,
    num_blocks,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Put the pairs of one expert, the program's place in the grid, into ``order``, behind those of the experts before.

    Pair i is token i // k with its expert ``chosen[i]``; pairs of an expert stay in their order. Blocks [n, 3] of up to
    ``ROWS`` pairs are the first pair's place in ``order``, the number of pairs, and the expert.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        experts = tl.load(chosen + pairs, mask=pairs < num_pairs, other=BINS - 1).to(tl.int32)
        counts += tl.histogram(experts, BINS)
    is_before = bins < expert
    place = tl.sum(tl.where(is_before, counts, 0), 0)
    block = tl.sum(tl.where(is_before, tl.cdiv(counts, ROWS), 0), 0)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    for done in range(0, own, ROWS):
        tl.store(blocks + 3 * block, place + done)
        tl.store(blocks + 3 * block + 1, tl.minimum(own - done, ROWS))
        tl.store(blocks + 3 * block + 2, expert)
        block += 1
    if expert == tl.num_programs(0) - 1:
        for rest in range(block, num_blocks):
            tl.store(blocks + 3 * rest + 1, 0)
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        is_own = tl.load(chosen + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32) == expert
        tl.store(order + place + tl.cumsum(is_own.to(tl.int32), 0) - 1, pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=["places", "bias_places"])
def multiply_by_experts_kernel(  # type: ignore[no-untyped-def]
    x,
    matrix,
    places,
    bias,
    bias_places,
    order,
    blocks,
    out,
    SIZE: tl.constexpr,
    RESULTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiply one block of pairs by ``COLUMNS`` rows of its expert's matrix; both are the program's place in the grid.

    ``matrix`` is the first expert's, [2 * RESULTS, SIZE] or [RESULTS, SIZE]; others begin ``places`` units of ``UNIT``
    numbers behind it; biases likewise. First matrices take rows of tokens, ``x`` [t, SIZE], and give what gates let
    through in the pairs' sorted order, ``out`` [t * k, RESULTS]; second ones take that, and give rows in the order of
    pairs.
    """
    block = tl.program_id(0)
    number = tl.load(blocks + 3 * block + 1)
    if number == 0:
        return
    sorted_places = tl.load(blocks + 3 * block) + tl.arange(0, ROWS)
    expert = tl.load(blocks + 3 * block + 2)
    is_row = tl.arange(0, ROWS) < number
    pairs = tl.load(order + sorted_places, mask=is_row, other=0)
    if IS_FIRST:
        sources, results = pairs // PER_TOKEN, sorted_places
    else:
        sources, results = sorted_places, pairs
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < RESULTS
    own = matrix + tl.load(places + expert) * UNIT
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        is_inner = inner < SIZE
        read = x + sources.to(tl.int64)[:, None] * SIZE + inner[None, :]
        rows = tl.load(read, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        weights = own + columns[:, None] * SIZE + inner[None, :]
        is_there = is_column[:, None] & is_inner[None, :]
        part = tl.load(weights, mask=is_there, other=0.0)
        product = tl.dot(rows, tl.trans(part), product, input_precision="ieee")
        if IS_FIRST:
            part = tl.load(weights + RESULTS * SIZE, mask=is_there, other=0.0)
            up = tl.dot(rows, tl.trans(part), up, input_precision="ieee")
    if HAS_BIAS:
        own_bias = bias + tl.load(bias_places + expert) * UNIT + columns
        product += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_FIRST:
            up += tl.load(own_bias + RESULTS, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_FIRST:
        product = gated(product, up, ACTIVATION)
    write = out + results.to(tl.int64)[:, None] * RESULTS + columns[None, :]
    tl.store(write, product.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_experts_kernel(  # type: ignore[no-untyped-def]
    products, weights, out, SIZE: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """The weighted sum of one token's products and some of its columns, the program's place in the grid."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        product = tl.load(products + pair * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total += product * tl.load(weights + pair)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=is_column)
