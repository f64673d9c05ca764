"""Chooses the operations of `TorchModel`: Triton kernels on GPUs that can run them, else torch's functions."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import torch

from nemo_style_aligner.engine.architecture import ENDS, EVERY_FEATURE
from nemo_style_aligner.engine.embedded.routing import routed
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape
from nemo_style_aligner.engine.embedded.torch_operations import (
    Batch,
    ChunkSegment,
    ExpertMatrices,
    HeadWeights,
    TorchOperations,
)
from nemo_style_aligner.engine.native.with_triton import with_triton
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.weights.layout import LAYER_NORMS

logger = logging.getLogger(__name__)

# Largest error, relative to the largest magnitude of the exact result.
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 2e-5}
_KNOWN = EVERY_FEATURE | {*ENDS}
_POSITIONS = 1280  # of the longest sequence in the check
_MANY_PROCESSORS = 2**16  # so many that the check divides attention into parts, whatever the number of heads


class _Alone(TensorParallel):
    """One of several ranks, without the others: a check that fails on some of them must not keep the rest waiting."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing is added."""


def choose_operations(shape: EngineShape, device: torch.device) -> TorchOperations:
    """Triton's kernels, if this is a GPU on which they compile and pass `check`; else torch's. A failure is logged."""

    def make() -> TorchOperations:
        from nemo_style_aligner.engine.embedded.triton_operations import TritonOperations

        alone = _Alone(shape.tensor_parallel.rank, shape.tensor_parallel.size)
        tried = dataclasses.replace(shape, max_sequence_length=_POSITIONS, tensor_parallel=alone)
        check(TritonOperations(tried, device, num_processors=_MANY_PROCESSORS), tried, device)
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonOperations(shape, device, num_processors)

    if device.type != "cuda" or shape.dtype == torch.float32:  # without tensor cores their attention is slow
        return TorchOperations(shape, device)
    if unknown := shape.architecture.unknown(_KNOWN):
        logger.warning("generation runs without Triton's kernels: they have no %s", ", ".join(unknown))
        return TorchOperations(shape, device)
    return with_triton(make, device, "generation runs") or TorchOperations(shape, device)


@torch.inference_mode()
def check(operations: TorchOperations, shape: EngineShape, device: torch.device) -> None:
    """Compile all kernels that passes need, and compare their results with those of torch's functions in fp32.

    Raises:
        ArithmeticError: the results differ by more than the dtype explains.
    """
    expected = TorchOperations(dataclasses.replace(shape, dtype=torch.float32), device)
    a, groups, heads, dtype = shape.architecture, expected.groups, expected.heads, shape.dtype
    draw = torch.Generator().manual_seed(1)

    def random(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(device, of)

    def compare(name: str, computed: torch.Tensor, exact: torch.Tensor) -> None:
        error = ((computed.float() - exact.float()).abs().max() / exact.abs().max()).item()
        if not error < _TOLERANCES[dtype]:
            raise ArithmeticError(f"{name} by Triton in {dtype}: relative error {error:.2g}")

    def wide(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.float()

    weight, has_norms = random(a.hidden_size, of=torch.float32), LAYER_NORMS[a.layer_norms]
    norm = weight, random(a.hidden_size, of=torch.float32) if a.norm_has_bias else None
    before, after = (norm if name in has_norms else None for name in ("mlp_norm", "mlp_out_norm"))
    for has_product, then in ((False, before), (True, before), (True, norm)):  # a pass's first norm, others, its last
        hidden = random(5, a.hidden_size, of=torch.float32)
        product = random(5, a.hidden_size) if has_product else None
        bias = random(a.hidden_size) if has_product and a.bias else None
        exact_hidden, product_norm = hidden.clone(), after if has_product else None
        normed = operations.add_and_norm(hidden, product, bias, product_norm, then)
        exact = expected.add_and_norm(exact_hidden, wide(product), wide(bias), product_norm, then)
        compare("norm", normed, exact)
        compare("residual stream", hidden, exact_hidden)

    x = random(5, shape.shard.ffn_size * (2 if a.gated else 1))
    compare("activation", operations.activate(x), expected.activate(x.float()))

    if a.experts is not None:
        kinds: list[tuple[torch.Tensor, ...]] = []  # of few, which experts share: to draw all would take seconds
        sizes: list[tuple[int, ...]] = [
            (2 * shape.shard.expert_size, a.hidden_size),
            (a.hidden_size, shape.shard.expert_size),
        ]
        sizes += [size[:1] for size in sizes] if a.bias else []
        for size in sizes:
            few = [random(*size) / size[-1] ** 0.5 for _ in range(min(a.experts.number, 3))]
            kinds.append(tuple(few[n % len(few)] for n in range(a.experts.number)))
        matrices = ExpertMatrices(*kinds)
        exact_matrices = ExpertMatrices(*(tuple(matrix.float() for matrix in kind) for kind in kinds))
        for tokens in (5, 1 + 32 * a.experts.number // a.experts.per_token):  # few and many pairs of an expert
            x = random(tokens, a.hidden_size)
            logits = random(tokens, a.experts.number, of=torch.float32)
            choice_bias = random(a.experts.number, of=torch.float32) if a.experts.has_bias else None
            keys = logits if choice_bias is None else logits.sigmoid() + choice_bias
            chosen, top = operations.route(logits, choice_bias)
            compare("choice of experts", keys.gather(1, chosen), keys.topk(a.experts.per_token, 1).values)
            compare("weights of experts", top, routed(logits, a.experts, choice_bias, chosen)[1])
            exact = expected.experts(x.float(), chosen, top, exact_matrices)
            compare("experts", operations.experts(x, chosen, top, matrices), exact)

    pages = random(120, PAGE_TOKENS, 2 * groups, a.kv_channels)
    head_norms, sinks = None, random(groups * heads, of=torch.float32) if a.attention_sinks else None
    if a.qk_layernorm:
        query_size, key_size = shape.shard.qk_norm_sizes
        head_norms = random(query_size, of=torch.float32), random(key_size, of=torch.float32)
    heads_of = HeadWeights(head_norms, sinks)
    cases = [(pages, layer) for layer in dict.fromkeys(a.layers) for pages in (4, 80)]
    for num_pages, layer in cases:  # pages of decoding tokens: attended to in one part, and in several
        batch = example(num_pages, len(pages), device)
        qkv = random(len(batch.positions), groups * (heads + 2) * a.kv_channels)
        exact_qkv, exact_pages = (x.to(torch.float32, copy=True) for x in (qkv, pages))  # both are written to
        exact = expected.attention_of(batch)(exact_qkv, heads_of, exact_pages, layer)
        attended = operations.attention_of(batch)(qkv, heads_of, pages, layer)
        compare("attention", attended, exact)
        compare("keys and values", pages, exact_pages)


def example(num_pages: int, num_all_pages: int, device: torch.device) -> Batch:
    """A pass of three decoding tokens, a chunk that starts its sequence and one that continues another."""
    order = np.random.default_rng(1).permutation(num_all_pages)
    last = PAGE_TOKENS * num_pages - 1
    tables = np.stack([order[:num_pages] for _ in range(3)])  # shared, but for pages that the tokens write to
    tables[0, 0], tables[2, 37 // PAGE_TOKENS] = order[num_pages : num_pages + 2]
    rows = [(tables[0], range(1)), (tables[1], range(last, last + 1)), (tables[2], range(37, 38))]
    chunk_pages = order[num_pages + 2 :]
    rows += [(chunk_pages[:4], range(50)), (chunk_pages[4:16], range(21, 100))]
    positions = np.concatenate([np.array(places) for _, places in rows])
    places = np.concatenate(
        [pages[np.array(seen) // PAGE_TOKENS] * PAGE_TOKENS + np.array(seen) % PAGE_TOKENS for pages, seen in rows]
    )
    return Batch(
        token_ids=torch.empty(0, device=device),  # never read
        positions=torch.from_numpy(positions).to(device),
        places=torch.from_numpy(places).to(device),
        tables=torch.from_numpy(tables).to(device),
        segments=(
            ChunkSegment(3, 50, 0, chunk_pages[:4].astype(np.int32)),
            ChunkSegment(53, 79, 21, chunk_pages[4:16].astype(np.int32)),
        ),
    )
