"""Run with TRITON_INTERPRET=1: kernels of experts for GPUs, as Triton's interpreter computes them on the CPU.

In fp32 and bf16. Prints ``equal`` at the end.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from interpreted_bf16 import multiply_bf16

from nemo_style_aligner.engine.architecture import Experts
from nemo_style_aligner.engine.embedded.routing import routed
from nemo_style_aligner.engine.embedded.torch_operations import ExpertMatrices
from nemo_style_aligner.engine.embedded.triton_experts import FEW_ROWS, MANY_ROWS, TritonExperts

NUMBER, PER_TOKEN, HIDDEN, INNER = 6, 2, 72, 88
ONE = torch.tensor([[4, 2]])  # chosen by all: experts 0, 1, 3 and 5 have nobody
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 0.02}  # of the largest result; the interpreter cuts bits off


def matrices_of(dtype: torch.dtype, has_bias: bool) -> ExpertMatrices:
    """Random ones, in no order in memory."""
    draw = torch.Generator().manual_seed(2)
    sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER), *([(2 * INNER,), (HIDDEN,)] * has_bias))
    kinds: list[list[torch.Tensor]] = [[] for _ in sizes]
    for _ in range(NUMBER):
        for kind, size in zip(kinds, sizes, strict=True):
            kind.insert(len(kind) // 2, (torch.randn(size, generator=draw) / size[-1] ** 0.5).to(dtype))
    return ExpertMatrices(*map(tuple, kinds))


def part_of(matrices: ExpertMatrices, rank: int) -> ExpertMatrices:
    """What one of two ranks has of the experts."""
    halves = ([part.unflatten(0, (2, 2, -1))[:, rank].flatten(0, 1) for part in kind]
              for kind in (matrices.fc1, matrices.fc1_bias))  # fmt: skip
    fc1, fc1_bias = map(tuple, halves)
    fc2 = tuple(matrix.chunk(2, 1)[rank].contiguous() for matrix in matrices.fc2)
    return ExpertMatrices(fc1, fc2, fc1_bias, matrices.fc2_bias)


def exact(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, matrices: ExpertMatrices) -> torch.Tensor:
    """The sums in fp64, pair by pair."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, place in ((t, k) for t in range(len(x)) for k in range(PER_TOKEN)):
        expert = int(chosen[token, place])
        biases = [kind[expert].double() if kind else 0.0 for kind in (matrices.fc1_bias, matrices.fc2_bias)]
        gate, up = (matrices.fc1[expert].double() @ x[token].double() + biases[0]).chunk(2)
        product = matrices.fc2[expert].double() @ (F.silu(gate) * up) + biases[1]
        out[token] += weights[token, place].double() * product
    return out


multiply_bf16()
SILU = 0
KIND = Experts(number=NUMBER, per_token=PER_TOKEN, ffn_hidden_size=INNER)
SIGMOIDS = dataclasses.replace(KIND, scores="sigmoid", scaling=1.5, has_bias=True)
experts, second = (TritonExperts(KIND, SILU, adds_bias=rank == 0) for rank in range(2))
for kind in (KIND, dataclasses.replace(KIND, normalized=False), SIGMOIDS, dataclasses.replace(SIGMOIDS, per_token=1)):
    draw = torch.Generator().manual_seed(9)
    logits, bias = 3 * torch.randn(8, NUMBER, generator=draw), torch.randn(NUMBER, generator=draw)
    bias_of = bias if kind.has_bias else None
    chosen, weights = TritonExperts(kind, SILU).route(logits, bias_of)
    expected_choice, expected_weights = routed(logits.double(), kind, bias_of)
    assert torch.equal(chosen, expected_choice)
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)
    logits[0], logits[1, 2], logits[2] = torch.nan, torch.nan, -torch.inf
    chosen, weights = TritonExperts(kind, SILU).route(logits, bias_of)
    assert ((chosen >= 0) & (chosen < NUMBER)).all() and all(len({*row}) == len(row) for row in chosen.tolist())
    assert weights[0].isnan().all() and torch.equal(chosen[3:], expected_choice[3:])
assert [experts.rows(count) for count in (1, 40, 70)] == [FEW_ROWS, FEW_ROWS, MANY_ROWS]
for dtype, tolerance in TOLERANCES.items():
    matrices = matrices_of(dtype, has_bias=dtype == torch.float32)
    for count, is_one in ((1, False), (40, False), (70, False)) if dtype == torch.float32 else ((19, True),):
        draw = torch.Generator().manual_seed(count)
        x = torch.randn(count, HIDDEN, generator=draw).to(dtype)
        weights, chosen = torch.randn(count, NUMBER, generator=draw).softmax(-1).topk(PER_TOKEN, -1)
        chosen = ONE.expand(count, -1) if is_one else chosen
        found, expected = experts(x, chosen, weights, matrices), exact(x, chosen, weights, matrices)
        assert found.dtype == dtype
        assert (found - expected).abs().max() < tolerance * expected.abs().max(), (dtype, count)
        if count == 40:  # whoever else is in the pass
            few = torch.cat(
                [experts(x[rows], chosen[rows], weights[rows], matrices) for rows in (range(3), range(3, 40))]
            )
            assert torch.equal(few, found)
            shared = ((experts, part_of(matrices, 0)), (second, part_of(matrices, 1)))
            parts = [rank(x, chosen, weights, part).double() for rank, part in shared]
            assert (sum(parts) - expected).abs().max() < tolerance * expected.abs().max()
            x[3, 5] = torch.nan
            assert experts(x, chosen, weights, matrices).isnan().any(1).nonzero().tolist() == [[3]]
print("equal", flush=True)
