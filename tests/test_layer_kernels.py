"""The compiled parts of layers compute what torch computes, in fp32 and bf16, with every width of vector."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.native.compilation import AMX, FMA, KERNELS, NativeUnavailable, usable_kernels
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.trainer.models import layer_kernels
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.layer_kernels import AttentionRow, LayerKernels, best_kernels, load
from nemo_style_aligner.trainer.models.logprobs import Prediction
from nemo_style_aligner.trainer.models.packing import Sequences, pack_row
from nemo_style_aligner.trainer.models.spans import Run, Span, Spans, gathered, taken

pytestmark = pytest.mark.skipif(
    not usable_kernels(torch.float32), reason="compiled kernels need an x86-64 processor with AVX2 and FMA"
)

REPOSITORY = Path(__file__).resolve().parents[1]
# The emulated ones have vectors of 16 numbers and products of pairs or tiles on any processor. They compile for long.
HERE = {KERNELS[name].number for name in usable_kernels(torch.bfloat16)}
NAMES = [
    pytest.param(name, marks=[pytest.mark.long] * (kernel.emulated and kernel.number in HERE | {AMX}))
    for name, kernel in KERNELS.items()
]
MULTIPLYING = [name for name in NAMES if KERNELS[str(name.values[0])].number != FMA]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # relative; bf16 results are rounded to 8 bits


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    name = request.param
    if not KERNELS[name].emulated and name not in usable_kernels(torch.bfloat16):
        pytest.skip(f"this processor has no {name}")
    return load(name)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to the size of the whole tensor."""
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[found.dtype], error


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [t, heads, d] as complex numbers, component i with i + r / 2, times e^(i angle); angles [t, r / 2]."""
    half = angles.shape[1]
    pairs = (
        torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def reference(
    qkv: torch.Tensor,
    angles: torch.Tensor | None,
    spans: Spans,
    softcap: float | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with explicit scores, span by span: [t, groups, heads per group + 2, d] -> [t, heads, d]."""
    per_group, d = qkv.shape[2] - 2, qkv.shape[3]
    query = qkv[:, :, :per_group].flatten(1, 2)
    key, value = (qkv[:, :, per_group + i].repeat_interleave(per_group, 1) for i in (0, 1))
    if angles is not None:
        query, key = turned(query, angles), turned(key, angles)
    out = []
    for span in spans:
        q, k, v = taken(query, [span.queries]), taken(key, span.keys), taken(value, span.keys)
        scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        hidden |= torch.ones_like(hidden).tril(len(k) - len(q) - (window or len(k)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        out.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(out)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "groups", "per_group", "d", "rotary", "softcap", "window"),
    [
        ([150, 1, 33, 16, 70], 3, 3, 64, 64, None, None),
        ([5, 2, 49], 4, 1, 20, 12, None, None),  # neither rows of whole vectors nor all channels turned
        ([61], 1, 8, 128, None, None, None),
        ([1, 1], 2, 2, 8, 8, None, None),
        ([77, 1, 18], 2, 3, 24, 24, 0.5, None),
        ([40], 1, 1, 64, None, 50.0, None),
        ([150, 1, 33, 300], 2, 3, 64, 64, None, 45),
        ([77, 30], 2, 1, 20, 12, 0.5, 8),
        ([97], 1, 2, 24, None, None, 1),
    ],
)
def test_attention(
    kernels: LayerKernels,
    lengths: list[int],
    groups: int,
    per_group: int,
    d: int,
    rotary: int | None,
    softcap: float | None,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    qkv, grad = (
        numbers(sum(lengths), groups, per_group + 2, d, dtype=dtype),
        numbers(sum(lengths), groups * per_group, d),
    )
    grad = grad.to(dtype)
    angles = None if rotary is None else 3 * numbers(sum(lengths), rotary // 2, seed=2)
    both = None if angles is None else torch.cat([angles, angles], 1)
    tables = None if both is None else (both.cos(), both.sin())
    row = AttentionRow(tables, Spans.whole(lengths), d**-0.5, softcap, window)

    exact = qkv.double().requires_grad_()
    expected = reference(exact, None if angles is None else angles.double(), row.spans, softcap, window)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    out, lse = kernels.attention(qkv, row)
    found = kernels.attention_backward(grad, lse, qkv, row)
    assert_near(out, expected)
    assert_near(found, expected_grad)

    torch.set_num_threads(1)
    again, lse = kernels.attention(qkv, row)
    assert torch.equal(out, again), "it depends on the number of threads"
    assert torch.equal(found, kernels.attention_backward(grad, lse, qkv, row))
    first = tables and (tables[0][: lengths[0]].contiguous(), tables[1][: lengths[0]].contiguous())
    first_alone = row._replace(rotary=first, spans=Spans.whole(lengths[:1]))
    alone, _ = kernels.attention(qkv[: lengths[0]].contiguous(), first_alone)
    assert torch.equal(out[: lengths[0]], alone), "it depends on what else is in the row"
    for threads in (1, 16):  # with many, heads are tasks of their own
        torch.set_num_threads(threads)
        place = qkv.clone()
        assert torch.equal(found, kernels.attention_backward(grad, lse, place, row, out=place))


def random_spans(seed: int) -> Spans:
    """Sequences that begin alike, on up to three levels, beside some by themselves."""
    draw = random.Random(seed)
    spans: list[Span] = []

    def branch(depth: int, *seen: Run) -> None:
        begin = spans[-1].queries.end if spans else 0
        own = Run(begin, begin + draw.choice((1, 5, 16, 33, 70)))
        spans.append(Span(own, (*seen, own)))
        for _ in range(draw.randrange(4) if depth else 0):
            branch(depth - 1, *seen, own)

    for _ in range(3):
        branch(3)
    return Spans(tuple(spans))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_sequences_that_begin_alike(kernels: LayerKernels, seed: int, dtype: torch.dtype) -> None:
    """As explicit scores have it, forward and backward, whatever the number of threads."""
    spans, (groups, per_group, d) = random_spans(seed), ((2, 3, 24), (1, 4, 64), (3, 1, 20))[seed]
    t, softcap, window = spans.num_queries, (None, None, 2.0)[seed], (None, 37, 11)[seed]
    qkv, grad = numbers(t, groups, per_group + 2, d, dtype=dtype), numbers(t, groups * per_group, d, dtype=dtype)
    angles = 3 * numbers(t, d // 2, seed=2)
    both = torch.cat([angles, angles], 1)
    sinks = None if seed == 0 else 2 * numbers(groups * per_group, seed=3)
    row = AttentionRow((both.cos(), both.sin()), spans, d**-0.5, softcap, window, sinks)
    exact, exact_sinks = qkv.double().requires_grad_(), None if sinks is None else sinks.double()
    expected = reference(exact, angles.double(), spans, softcap, window, exact_sinks)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    out, lse = kernels.attention(qkv, row)
    products = torch.empty(t, groups * per_group)
    found = kernels.attention_backward(grad, lse, qkv, row, products=products)
    assert_near(out, expected)
    assert_near(found, expected_grad)
    assert_near(products.to(dtype), (expected.detach() * grad.double()).sum(-1))
    for threads in (1, 16):  # with many, heads are tasks of their own
        torch.set_num_threads(threads)
        place = qkv.clone()
        assert torch.equal(out, kernels.attention(qkv, row)[0])
        assert torch.equal(found, kernels.attention_backward(grad, lse, place, row, out=place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_rows_that_are_there_several_times_are_added(dtype: torch.dtype) -> None:
    x, index = numbers(5, 3, dtype=dtype).requires_grad_(), torch.tensor([0, 2, 2, 4, 2])
    grad = numbers(5, 3, seed=1, dtype=dtype)
    (found,) = torch.autograd.grad(gathered(x, index), x, grad)
    expected = torch.zeros(5, 3).index_add(0, index, grad.float())
    assert torch.equal(found, expected.to(dtype)), "bf16 is rounded once"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kernels", MULTIPLYING, indirect=True)
@pytest.mark.parametrize(("tokens", "n", "k"), [(301, 200, 96), (1, 7, 13), (38, 12, 45), (64, 97, 32)])
def test_gradients_of_weights_are_added_in_fp32(kernels: LayerKernels, tokens: int, n: int, k: int) -> None:
    columns, rows, start = numbers(tokens, n), numbers(tokens, k, seed=1), numbers(n, k, seed=2)
    columns, rows = columns.bfloat16(), rows.bfloat16()
    total = start.clone()
    kernels.add_product(total, columns, rows)
    expected = start.double() + columns.double().t() @ rows.double()
    assert_near(total, expected)

    torch.set_num_threads(1)
    again = start.clone()
    kernels.add_product(again, columns, rows)
    assert torch.equal(total, again), "it depends on the number of threads"
    with pytest.raises(TypeError, match="add_product does fp32"):
        kernels.add_product(total, columns.float(), rows)
    with pytest.raises(ValueError, match="cannot be added to"):
        kernels.add_product(total[1:], columns, rows)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kernels", MULTIPLYING, indirect=True)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("rows", "steps", "columns"), [(301, 48, 200), (1, 1, 7), (45, 19, 64), (24, 700, 33)])
def test_products_with_packed_weights(
    kernels: LayerKernels, rows: int, steps: int, columns: int, transposed: bool
) -> None:
    depth = steps * kernels.depth_step
    a, matrix = numbers(rows, depth).bfloat16(), numbers(depth, columns, seed=1).bfloat16()
    weight = matrix.t().contiguous() if transposed else matrix
    packed = kernels.packed(weight, transposed)
    found = kernels.multiply_packed(a[:, None], packed, columns)
    assert found.shape == (rows, 1, columns)
    assert_near(found[:, 0], a.double() @ matrix.double())

    torch.set_num_threads(1)
    again = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16)
    assert kernels.multiply_packed(a, kernels.packed(weight, transposed), columns, again) is again
    assert torch.equal(found[:, 0], again), "it depends on the number of threads"
    some = kernels.multiply_packed(a[rows // 3 :], packed, columns)
    assert torch.equal(some, again[rows // 3 :]), "it depends on the other rows"
    with pytest.raises(ValueError, match=f"with a depth of {depth - 1}"):
        kernels.packed(numbers(depth - 1, depth - 1).bfloat16(), transposed)
    with pytest.raises(ValueError, match=f"times a matrix of {columns + 64} columns"):
        kernels.multiply_packed(a, packed, columns + 64)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(37, 48), (1, 7), (5, 93)])
def test_swiglu_and_rms_norm(kernels: LayerKernels, rows: int, width: int, dtype: torch.dtype) -> None:
    x, grad = 3 * numbers(rows, 2 * width, dtype=dtype), numbers(rows, width, seed=1, dtype=dtype)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = F.silu(gate) * up
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    assert_near(kernels.swiglu(x), expected)
    found = kernels.swiglu_backward(x, grad)
    assert_near(found, expected_grad)
    assert torch.equal(kernels.swiglu_backward(place := x.clone(), grad, out=place), found)

    weight, x = numbers(width, seed=2), x[:, :width].contiguous()
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.rms_norm(exact, (width,), exact_weight, 1e-5)
    expected_grads = torch.autograd.grad(expected, (exact, exact_weight), grad.double())
    out, scale = kernels.rms_norm(x, weight, 1e-5)
    assert_near(out, expected)
    grads = kernels.rms_norm_backward(x, weight, scale, grad)
    assert grads[1].dtype == torch.float32
    for found, expected_grad in zip(grads, expected_grads, strict=True):
        assert_near(found, expected_grad)

    other = numbers(rows, width, seed=3, dtype=dtype)
    total, *rest = kernels.add_and_rms_norm(x, other.clone(), weight, 1e-5)
    assert torch.equal(total, x + other)
    assert all(map(torch.equal, rest, kernels.rms_norm(total, weight, 1e-5)))
    for out in (None, grad):
        added = kernels.rms_norm_backward(x, weight, scale, grad, added=other, out=out)
        assert torch.equal(added[0], grads[0] + other) and torch.equal(added[1], grads[1])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("rows", "width", "size"), [(37, 48, 3.0), (1, 7, 1.0), (5, 3093, 40.0)])
def test_softmax_of_logits(
    kernels: LayerKernels, rows: int, width: int, size: float, entropy: bool, dtype: torch.dtype
) -> None:
    """Log-probs, entropies and their gradients; of targets that are not in the row only the rest."""
    logits = (size * numbers(rows, width)).to(dtype)
    logits[0, 1:3] = -torch.inf  # as a mask makes them
    targets = 3 + torch.arange(rows) * 7 % (width - 3)
    grad, grad_entropy = numbers(rows, seed=1), numbers(rows, seed=2)
    logprobs = F.log_softmax(0.7 * logits.double(), -1)
    p = logprobs.exp()
    expected = logprobs[torch.arange(rows), targets]
    information = p * logprobs.clamp(min=-1000)  # what is impossible adds nothing
    expected_entropy = -information.sum(-1)
    expected_grad = (F.one_hot(targets, width) - p) * grad[:, None]
    if entropy:
        expected_grad -= (information + p * expected_entropy[:, None]) * grad_entropy[:, None]
    normalizer, at_target, found = kernels.measure_logits(logits, targets, 0.7, entropy)
    assert_near(at_target - normalizer, expected)
    assert_near(normalizer, torch.logsumexp(0.7 * logits.double(), -1))
    if entropy:
        assert found is not None
        torch.testing.assert_close(found.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    of_entropy = (found, grad_entropy) if found is not None else None
    elsewhere = torch.full_like(targets, -1)
    assert torch.equal(kernels.measure_logits(logits, elsewhere, 0.7, entropy)[1], torch.zeros(rows))
    there, place = torch.empty_like(logits), logits.clone()
    kernels.logits_gradient(logits, targets, 0.7, normalizer, grad, of_entropy, there)
    kernels.logits_gradient(place, targets, 0.7, normalizer, grad, of_entropy, place)
    assert torch.equal(there, place)
    assert_near(there, expected_grad)
    kernels.logits_gradient(logits, elsewhere, 0.7, normalizer, grad, of_entropy, place)
    different = (there != place).nonzero().tolist()
    assert different == [[row, target] for row, target in enumerate(targets.tolist())]


def test_what_is_no_number_stays_visible(kernels: LayerKernels) -> None:
    """The optimizer has to see it."""
    qkv = numbers(9, 1, 3, 8)
    qkv[4, 0, 1, 2] = torch.nan
    row = AttentionRow(None, Spans.whole([9]), 1.0)
    out, lse = kernels.attention(qkv, row)
    assert out[4:].isnan().any(-1).all() and not out[:4].isnan().any()
    assert kernels.attention_backward(numbers(9, 1, 8), lse, qkv, row).isnan().any()
    x = numbers(3, 32)
    x[1, 5] = torch.nan
    assert kernels.swiglu(x).isnan().any() and kernels.swiglu_backward(x, numbers(3, 16)).isnan().any()
    out, _ = kernels.rms_norm(x, torch.ones(32), 1e-5)
    assert out[1].isnan().all() and not out[0].isnan().any()
    targets = torch.tensor([3, 4, 6])
    normalizer, at_target, _ = kernels.measure_logits(x, targets, 1.0, entropy=False)
    assert (at_target - normalizer).isnan().tolist() == [False, True, False]
    kernels.logits_gradient(x, targets, 1.0, normalizer, torch.ones(3), None, x)
    assert x.isnan().all(1).tolist() == [False, True, False]


def test_what_is_no_number_stays_that_when_rounded(kernels: LayerKernels) -> None:
    """NaN with any bits: rounding carries into those above, which made zeros and infinities of some."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).repeat(12)
    out, _ = kernels.rms_norm(torch.ones(3, 48, dtype=torch.bfloat16), bits.view(torch.float32), 1e-5)
    assert out.isnan().all()


SHORT_OF_MEMORY = """
import os, resource, torch
from nemo_style_aligner.trainer.models.layer_kernels import AttentionRow, load
from nemo_style_aligner.trainer.models.spans import Spans

kernels = load("avx2")
t, heads, d = 512, 256, 128  # the backward pass wants 128 MiB
qkv, grad = torch.zeros(t, 1, heads + 2, d, dtype=torch.bfloat16), torch.zeros(t, heads, d, dtype=torch.bfloat16)
arguments = grad, torch.zeros(t, heads), qkv, AttentionRow(None, Spans.whole([t]), 1.0)
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, resource.RLIM_INFINITY))
try:
    kernels.attention_backward(*arguments)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(kernels.attention_backward(*arguments).shape)
"""

BOUND_THREADS = """
import os, torch
from nemo_style_aligner.trainer.models.layer_kernels import load

load("avx2").swiglu(torch.zeros(64, 96))
print(len(os.sched_getaffinity(0)), max(len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")))
"""


def run_alone(program: str, **environment: str) -> list[str]:
    """The lines that a Python program of its own prints, with two threads."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(REPOSITORY)} | environment
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_too_little_memory_is_an_error_and_no_end() -> None:
    message, shape = run_alone(SHORT_OF_MEMORY)
    assert "ran out of memory: use smaller micro batches" in message
    assert shape == "torch.Size([512, 1, 258, 128])"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_do_not_share_the_core_that_openmp_binds_the_first_one_to() -> None:
    bound, freest = map(int, run_alone(BOUND_THREADS, OMP_PROC_BIND="close")[0].split())
    assert bound == 1 and freest >= 2


def test_sequences_that_do_not_fill_their_row_are_refused(kernels: LayerKernels) -> None:
    with pytest.raises(ValueError, match="spans of 8 tokens in a row of 9"):
        kernels.attention(numbers(9, 1, 3, 8), AttentionRow(None, Spans.whole([8]), 1.0))


@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_has_threads_of_its_own() -> None:
    kernels = load("avx2")
    x = numbers(64, 96)
    expected = kernels.swiglu(x)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it whatever it waits for: as long as it lives it holds the pipes of the test's worker
        os._exit(0 if torch.equal(kernels.swiglu(x), expected) else 3)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("two_threads")
def test_callers_on_several_threads() -> None:
    kernels, inputs = load("avx2"), [numbers(64, 96, seed=i) for i in range(4)]
    expected = [kernels.swiglu(x) for x in inputs]

    def call_often(i: int) -> bool:
        return all(torch.equal(kernels.swiglu(inputs[i]), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(call_often, range(len(inputs)), timeout=60))


SHAPE = {"num_layers": 2, "hidden_size": 40, "ffn_hidden_size": 56, "num_attention_heads": 4, "vocab_size": 50}
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_query_groups": 2},
    "norms of heads": {"num_query_groups": 2, "qk_layernorm": True, "kv_channels": 16},
    "part of the channels turned": {"num_query_groups": 4, "rotary_percentage": 0.5, "bias": True},
    "norms and soft caps": {
        "num_query_groups": 2, "layer_norms": "both", "normalization": "rmsnorm1p", "attn_logit_softcapping": 0.05,
        "final_logit_softcapping": 1.0,
    },
    "norms over heads": {
        "num_query_groups": 2, "layer_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True
    },
    "windows": {
        "num_query_groups": 2, "sliding_window": 7, "windowed_layers": (0,), "local_rotary_base": 50.0,
    },
    "windows and sinks": {
        "num_query_groups": 2, "sliding_window": 9, "windowed_layers": (0, 1), "attention_sinks": True, "bias": True,
    },
    "another activation": {"num_query_groups": 1, "activation": "gelu", "normalization": "layernorm"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same_with_and_without(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of packed rows and the gradients of all weights."""
    tokens = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(5))
    wanted = torch.arange(24) < torch.tensor([[24], [9], [17]])
    packed = pack_row(Sequences.padded(tokens, wanted), 1)
    targets = packed.tokens[0].roll(-1)[packed.outputs]
    found = []
    with single_process():
        for kernels in (best_kernels(), None):
            monkeypatch.setattr(layer_kernels, "best_kernels", lambda kernels=kernels: kernels)
            torch.manual_seed(1)
            model = build_model(ModelArchitecture(**SHAPE, **MODELS[name]), {}, dtype, trainable=False)
            model.gpt.requires_grad_(True)
            for parameter_name, parameter in model.gpt.named_parameters():
                if "softmax_offset" in parameter_name:
                    parameter.data.normal_()
            packed.sequences.rotary = packed.sequences.local_rotary = None
            with torch.enable_grad():
                logprobs = model.gpt(
                    packed.tokens,
                    packed.sequences.positions[None],
                    None,
                    labels=Prediction(packed.outputs, targets),
                    packed_seq_params=packed.sequences,
                )
                gradients = torch.autograd.grad(logprobs.sum(), list(model.gpt.parameters()))
            found.append((logprobs.detach(), torch.cat([g.flatten().float() for g in gradients])))
    (logprobs, gradient), (expected, expected_gradient) = found
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logprobs, expected, atol=tolerance, rtol=tolerance)
    assert (gradient - expected_gradient).norm() < tolerance * expected_gradient.norm()


def test_what_the_compiler_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one knows no dot products of bf16, and the processor may have a hypervisor that hides them."""
    tried = []

    def load_avx2(name: str) -> LayerKernels:
        tried.append(name)
        if name != "avx2":
            raise NativeUnavailable(f"no {name}")
        return load(name)

    monkeypatch.setattr(layer_kernels, "load", load_avx2)
    monkeypatch.setattr(layer_kernels, "usable_kernels", lambda _: ["amx", "avx512-bf16", "avx512", "avx2"])
    found = best_kernels.__wrapped__()
    assert found is not None and found.kernel == "avx2" and not found.multiplies
    assert tried == ["amx", "avx512-bf16", "avx512", "avx2"]


def test_without_them_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert best_kernels.__wrapped__() is None
    assert "run without compiled layer kernels" in caplog.text and "install g++" in caplog.text
    assert layer_kernels.kernels_for(torch.zeros(1, dtype=torch.float64)) is None


@pytest.mark.parametrize("name", ["swiglu", "swiglu_backward", "attention_backward"])
def test_wrong_ones_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(LayerKernels, name)
    for wrong, factor in ((torch.float32, 1.001), (torch.bfloat16, 1.05)):

        def err(self: Any, x: torch.Tensor, *rest: Any, wrong: Any = wrong, factor: float = factor) -> torch.Tensor:
            return right(self, x, *rest) * (factor if x.dtype == wrong else 1)

        monkeypatch.setattr(LayerKernels, name, err)
        with pytest.raises(NativeUnavailable, match=f"the avx2 kernels differ from torch by .* in {wrong}"):
            load("avx2")
