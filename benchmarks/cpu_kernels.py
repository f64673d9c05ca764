"""The parts of a training pass on a CPU, one by one: compiled layers against torch's, and products of matrices.

    python benchmarks/cpu_kernels.py [--shape smollm2-135m] [--precision bf16] [--sequences 8] [--json FILE]

Every part is computed for several layers in turn, as in a pass, so that the caches hold what other layers left there.
docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import as_in_jobs  # noqa: F401 (before torch)
import cpu_only  # noqa: F401 (hides GPUs: these parts are computed on CPUs only)
import torch
from common import (
    SHAPES,
    available_cores,
    default_precision,
    json_path,
    measure_gemm,
    positive_int,
    print_table,
    spread,
    write_json,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from training_pass import add_workload_arguments, make_workload

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.native.compilation import NativeUnavailable, usable_kernels
from nemo_style_aligner.trainer.models import attention, fused, layer_kernels, logprobs, packed_weights, products
from nemo_style_aligner.trainer.models.gpt import parse_precision
from nemo_style_aligner.trainer.models.layer_kernels import LayerKernels
from nemo_style_aligner.trainer.models.spans import PackedSequences, Spans
from nemo_style_aligner.wording import counted

CPU = torch.device("cpu")
CHUNK = 256  # rows of logits
TORCH = "torch"
OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Part:
    """A differentiable function of a layer.

    Attributes:
        compute: the function, of one layer's inputs.
        inputs: those of each layer.
    """

    compute: Callable[..., torch.Tensor]
    inputs: list[tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of matrices, computed for each layer in turn.

    Attributes:
        compute: the product of one layer's factors.
        factors: those of each layer; a third one is the sum that the product is added to.
        operations: floating-point operations of one layer.
    """

    compute: Callable[..., Any]
    factors: list[tuple[torch.Tensor, ...]]
    operations: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_workload_arguments(parser)
    parser.set_defaults(sequences=8)
    parser.add_argument("--layers", type=positive_int, default=8, help="computed in turn")
    parser.add_argument("--rounds", type=positive_int, default=9)
    parser.add_argument("--threads", type=positive_int, default=available_cores())
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    precision = args.precision or default_precision()
    dtype, architecture = parse_precision(precision), SHAPES[args.shape]
    workload = make_workload(args, architecture)
    lengths = tuple(workload.lengths.tolist())
    libraries = load_libraries()
    parts = {
        name: measure_part(part, libraries, args.rounds)
        for name, part in make_parts(architecture, lengths, dtype, args.layers).items()
    }
    with packed_weights.constant_weights(args.rounds):
        found = measure_products(make_products(architecture, sum(lengths), dtype, args.layers), dtype, args.rounds)
    report(parts, found, lengths, precision, args.threads)
    write_json(
        args.json,
        {
            "settings": {key: str(value) for key, value in vars(args).items()} | {"precision": precision},
            "lengths": lengths,
            "parts": parts,
            "products": found,
        },
    )


def load_libraries() -> dict[str, LayerKernels | None]:
    """The compiled functions for each set of instructions that this processor has, best first, and torch's own."""
    found: dict[str, LayerKernels | None] = {}
    for name in usable_kernels(torch.bfloat16):
        if name != "amx":  # the layers' functions use no tiles
            with contextlib.suppress(NativeUnavailable):
                found[name] = layer_kernels.load(name)
    return {**found, TORCH: None}


# ---- parts of a layer ---------------------------------------------------------------------------


def make_parts(a: ModelArchitecture, lengths: Sequence[int], dtype: torch.dtype, layers: int) -> dict[str, Part]:
    """Attention with rotary embeddings, SwiGLU and RMSNorm of one packed row, and the softmax of a chunk of logits."""
    draw, t = torch.Generator().manual_seed(1), sum(lengths)

    def inputs(*shape: int) -> list[tuple[torch.Tensor, ...]]:
        return [(torch.randn(t, *shape, generator=draw).to(dtype).requires_grad_(),) for _ in range(layers)]

    per_group = a.num_attention_heads // a.num_query_groups
    scores = torch.ones(a.hidden_size).requires_grad_()
    targets = torch.randint(0, a.vocab_size, (CHUNK,), generator=draw)
    logits = [torch.randn(CHUNK, a.vocab_size, generator=draw).to(dtype).requires_grad_() for _ in range(layers)]
    return {
        "attention": Part(packed_attention(a, lengths), inputs(a.num_query_groups, per_group + 2, a.kv_channels)),
        "SwiGLU": Part(fused._SwiGLU.apply, inputs(2 * a.ffn_hidden_size)),
        "RMSNorm": Part(lambda x: fused.RMSNorm.apply(x, scores, a.layernorm_epsilon), inputs(a.hidden_size)),
        "softmax of logits": Part(lambda x: LogProbs.apply(x, targets), [(x,) for x in logits]),
    }


class LogProbs(torch.autograd.Function):
    """Logits [k, v], targets [k] -> log-probs fp32 [k], as `logprobs` computes them where logits are kept."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.wanted = logprobs.Prediction(None, targets, keeps_logits=True)
        normalizer, at_target, _ = logprobs._measure(logits, targets, ctx.wanted)
        ctx.save_for_backward(logits, normalizer)
        return at_target - normalizer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        logits, normalizer = ctx.saved_tensors
        targets = ctx.wanted.targets
        return logprobs._gradient(logits, targets, ctx.wanted, normalizer, grad.float(), None, logits.dtype), None


def packed_attention(a: ModelArchitecture, lengths: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `attention.LocalSelfAttention` does between its products, with compiled kernels or without."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=a.hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.num_query_groups,
        kv_channels=a.kv_channels,
        attention_dropout=0.0,
    )
    core = attention.CausalAttention(config)
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = PackedSequences.of(Spans.whole(lengths), positions)
    channels = torch.arange(0, a.kv_channels, 2) / a.kv_channels
    angles = (positions[:, None] / a.rotary_base**channels).repeat(1, 2)[:, None]

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        if kernels := layer_kernels.best_kernels():
            rotary = angles.cos(), angles.sin()
            return attention._Attention.apply(qkv, rotary, packed.sizes, a.kv_channels**-0.5, kernels)
        rotary = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
        query = attention._Rotation.apply(qkv[:, :, :-2].flatten(1, 2), *rotary)
        key = attention._Rotation.apply(qkv[:, :, -2], *rotary)
        return core(query, key, qkv[:, :, -1], packed_seq_params=packed).view(len(qkv), -1, a.kv_channels)

    return attend


def measure_part(part: Part, libraries: dict[str, LayerKernels | None], rounds: int) -> dict[str, Any]:
    """Seconds of a layer's forward and backward pass, and relative errors against torch in fp32, by library."""
    layers = len(part.inputs)
    with computing_with(None):
        exact = [x.detach().float().requires_grad_() for x in part.inputs[-1]]  # others' gradients may be overwritten
        expected = part.compute(*exact)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(part.inputs[0][0].dtype)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.float())
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in libraries}
    errors: dict[str, dict[str, float]] = {}
    for round_ in range(rounds + 1):  # the first warms up
        for name, library in libraries.items():
            with computing_with(library):
                started = time.perf_counter()
                outputs = [part.compute(*inputs) for inputs in part.inputs]
                between = time.perf_counter()
                grads = [torch.autograd.grad(out, x, grad) for out, x in zip(outputs, part.inputs, strict=True)]
                ended = time.perf_counter()
            if round_:
                seconds[name]["forward"].append((between - started) / layers)
                seconds[name]["backward"].append((ended - between) / layers)
            errors[name] = {
                "forward": relative_error(outputs[-1], expected),
                "backward": relative_error(grads[-1][0], expected_grad),
            }
    return {
        name: {
            kind: {"seconds": spread(seconds[name][kind]), "error": errors[name][kind]}
            for kind in ("forward", "backward")
        }
        for name in libraries
    }


@contextlib.contextmanager
def computing_with(library: LayerKernels | None) -> Iterator[None]:
    """Have layers compute with these functions; None: with torch's."""
    with unittest.mock.patch.object(layer_kernels, "best_kernels", lambda: library):
        yield


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.detach().float() - exact.detach()).norm() / exact.detach().norm())


# ---- products of matrices -----------------------------------------------------------------------


def make_products(a: ModelArchitecture, tokens: int, dtype: torch.dtype, layers: int) -> dict[str, Product]:
    """The products of linear layers, over a layer's four matrices in turn, and those of a chunk of logits."""
    query = a.num_attention_heads * a.kv_channels
    key = a.num_query_groups * a.kv_channels
    up = (2 if a.gated else 1) * a.ffn_hidden_size
    shapes = [(query + 2 * key, a.hidden_size), (a.hidden_size, query), (up, a.hidden_size)]
    shapes.append((a.hidden_size, a.ffn_hidden_size))
    found: dict[str, Product] = {}
    for where, rows, matrices in (
        ("layer", tokens, shapes * layers),
        ("output layer", CHUNK, [(a.vocab_size, a.hidden_size)]),
    ):
        sets = [
            (torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype), torch.randn(n, k).to(dtype))
            for n, k in matrices
        ]
        operations = sum(2 * rows * n * k for n, k in matrices) // len(matrices)
        factors = [(x, w) for x, _, w in sets]
        forward = multiply_layer if where == "layer" else multiply_chunk
        found[f"{where}: forward"] = Product(forward, factors, operations)
        if where == "layer":
            found["layer: forward, of frozen weights"] = Product(frozen_product(), factors, operations)
        backward = multiply_layer_backward if where == "layer" else multiply_chunk_backward
        found[f"{where}: gradient of its input"] = Product(backward, [(g, w) for _, g, w in sets], operations)
        found[f"{where}: gradient of its weights, added in fp32"] = Product(
            lambda g, x, total: products.add_product(total, products.widened(g), products.widened(x)),
            [(g, x, torch.zeros(w.shape)) for x, g, w in sets],
            operations,
        )
    return found


def multiply_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply as linear layers do."""
    return packed_weights.weight_product(products.widened(x), products.widened(weight), transposed=True)


def multiply_layer_backward(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return packed_weights.weight_product(products.widened(grad), products.widened(weight), transposed=False)


def multiply_chunk_backward(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return products.product(products.widened(grad), products.widened(weight))


def multiply_chunk(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply as the output layer does, whose chunks of logits use the same memory in turn."""
    rows, weight = products.widened(x), products.widened(weight)
    out = logprobs._buffer((len(rows), len(weight)), rows.dtype, CPU)
    return products.product(rows, weight.t(), out=out)


def frozen_product() -> Callable[..., torch.Tensor]:
    """A function that multiplies as linear layers do with weights that need no gradient."""
    weights: dict[int, packed_weights.PackedWeight] = {}  # by address

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if products.widened(x) is not x or x.dtype != torch.bfloat16:
            return multiply_layer(x, weight)
        return weights.setdefault(weight.data_ptr(), packed_weights.PackedWeight()).multiply(x, weight)

    return compute


def measure_products(todo: dict[str, Product], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Share of the rate of square products, measured in each round: as layers choose, and by torch alone.

    Weights stay packed from round to round, as from micro batch to micro batch of a pass.
    """
    fractions: dict[str, dict[str, list[float]]] = {name: {OURS: [], TORCH: []} for name in todo}
    for round_ in range(rounds + 1):  # the first warms up
        rate = max(measure_gemm(CPU, kind) for kind in {dtype, torch.float32})
        for name, product in todo.items():
            for by, taken in fractions[name].items():
                with only_torch() if by == TORCH else contextlib.nullcontext():
                    started = time.perf_counter()
                    for factors in product.factors:
                        product.compute(*factors)
                    seconds = time.perf_counter() - started
                if round_:
                    taken.append(product.operations * len(product.factors) / seconds / rate)
    return {
        name: {by: {"fraction_of_gemm_rate": spread(taken)} for by, taken in by_library.items()}
        for name, by_library in fractions.items()
    }


@contextlib.contextmanager
def only_torch() -> Iterator[None]:
    """Leave everything to torch's library."""
    with (
        unittest.mock.patch.object(products, "own_kernels", lambda: None),
        unittest.mock.patch.object(packed_weights, "own_kernels", lambda: None),
        unittest.mock.patch.object(products, "_prefers_openblas", lambda: False),
    ):
        yield


def report(parts: dict[str, Any], found: dict[str, Any], lengths: Sequence[int], precision: str, threads: int) -> None:
    print(
        f"{counted(len(lengths), 'sequences')} of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} together; "
        f"precision {precision}, {counted(threads, 'threads')}\n"
    )
    rows = []
    for part, by_library in parts.items():
        for kind in ("forward", "backward"):
            reference = by_library[TORCH][kind]["seconds"]["median"]
            for name, measured in by_library.items():
                seconds = measured[kind]["seconds"]
                rows.append(
                    (
                        f"{part}, {kind}",
                        name,
                        f"{1e3 * seconds['median']:.2f}",
                        f"{1e3 * seconds['min']:.2f}-{1e3 * seconds['max']:.2f}",
                        f"{reference / seconds['median']:.1f} x",
                        f"{measured[kind]['error']:.1e}",
                    )
                )
    print_table(("part of a layer", "by", "ms", "rounds", "torch takes", "error"), rows)
    print_table(
        ("product", "of GEMM rate", "rounds", "by torch alone", "rounds"),
        [
            (name, *(cell for by in (OURS, TORCH) for cell in share(measured[by]["fraction_of_gemm_rate"])))
            for name, measured in found.items()
        ],
    )


def share(fraction: dict[str, float]) -> tuple[str, str]:
    """Median and range."""
    return f"{fraction['median']:.0%}", f"{fraction['min']:.0%}-{fraction['max']:.0%}"


if __name__ == "__main__":
    main()
