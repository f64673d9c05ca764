"""Layers and the output layer: vocabularies padded and split, recomputation, products, gradients where they belong."""

from __future__ import annotations

import math
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from job_processes import ROOT, run
from safetensors.torch import load_file
from small_models import SHAPE, VOCAB, TensorSource
from torch.utils._python_dispatch import TorchDispatchMode
from trained_models import ARCHITECTURES, OPTIM, Weighted, logprobs, score, tokens, weighted_sum

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import current_layout
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights
from nemo_style_aligner.trainer.models import layers, linear, products
from nemo_style_aligner.trainer.models import logprobs as logprobs_module
from nemo_style_aligner.trainer.models.gpt import build_model, transformer_config
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.layer_kernels import best_kernels
from nemo_style_aligner.trainer.models.linear import ColumnLinear, RowLinear
from nemo_style_aligner.trainer.models.logprobs import Prediction, predict
from nemo_style_aligner.trainer.models.packing import MicroBatching, Sequences, pack_row
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward, train_step
from nemo_style_aligner.trainer.models.recompute import computed_again, not_keeping
from nemo_style_aligner.trainer.models.whole_layer import whole_layer

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


@pytest.mark.parametrize("settings", [{"kv_channels": 11}, {"kv_channels": 8, "rotary_percentage": 1.5}])
def test_heads_that_are_turned_further_than_they_reach_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="12 channels of each head would be rotated"):
        ModelArchitecture(**SHAPE | settings)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_padding_of_the_vocabulary_takes_no_probability(name: str) -> None:
    architecture, ids = ARCHITECTURES[name], tokens()
    plain = build_model(architecture, {"make_vocab_size_divisible_by": 1}, torch.float32, trainable=False)
    padded = build_model(architecture, {"make_vocab_size_divisible_by": 128}, torch.float32, trainable=False)
    import_weights(padded, TensorSource(dict(export_weights(plain))))
    with torch.no_grad():  # whatever stands in the padding
        for parameter in padded.gpt.parameters():
            if parameter.shape[0] == 128:
                parameter[VOCAB:] = 100.0
    torch.testing.assert_close(logprobs(padded, ids), logprobs(plain, ids), atol=2e-6, rtol=0)
    torch.testing.assert_close(logprobs(padded, ids, 0.5), logprobs(plain, ids, 0.5), atol=5e-6, rtol=0)
    entropies = [score(m, ids, Scoring(entropy=True))[..., 1] for m in (plain, padded)]
    torch.testing.assert_close(*entropies, atol=2e-6, rtol=0)
    assert [key for key, _ in export_weights(padded)] == [key for key, _ in export_weights(plain)]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(export_weights(padded), export_weights(plain), strict=True))


def dense_reference(dtype: torch.dtype, softcap: float | None = None) -> dict[str, torch.Tensor]:
    """The inputs of multirank_models.py through the dense formulas."""
    from multirank_models import TEMPERATURE, inputs
    from multirank_models import VOCAB as SPLIT_VOCAB

    hidden, weight, wanted, loss_weights = inputs()
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    true = (hidden[:, 0] @ weight.T).float()[wanted.outputs, :SPLIT_VOCAB]
    true = true if softcap is None else softcap * torch.tanh(true / softcap)
    values = torch.stack(
        [
            (true / TEMPERATURE).log_softmax(-1).gather(-1, wanted.targets[:, None])[:, 0],
            torch.distributions.Categorical(logits=true / TEMPERATURE).entropy(),
        ],
        -1,
    )
    (values * loss_weights).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {"values": values.detach(), "hidden gradient": hidden.grad, "weight gradient": weight.grad}


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What multirank_models.py leaves."""
    folder = tmp_path_factory.mktemp("three_ranks")
    run([sys.executable, str(ROOT / "tests" / "multirank_models.py"), str(folder)], folder / "ranks.log", 120)
    return folder


def test_recomputation_and_sequence_parallelism_save_memory_and_change_nothing(three_ranks: Path) -> None:
    """Packed rows at TP 3: ``activations_checkpoint_granularity`` and ``sequence_parallel`` do what they say."""
    results = torch.load(three_ranks / "recompute.pt", weights_only=True)
    loss, gradients, *_ = results["None, whole"]
    assert loss > 0 and gradients.abs().max() > 0.01
    for case, (other_loss, other_gradients, _, saved_in_validation) in results.items():
        assert other_loss == pytest.approx(loss, rel=1e-6), case
        torch.testing.assert_close(other_gradients, gradients, atol=1e-6, rtol=1e-5, msg=lambda m, c=case: f"{c}: {m}")
        assert saved_in_validation == 0, case
    saved = {case: size for case, (_, _, size, _) in results.items()}
    for way in ("whole", "sharded"):
        assert saved[f"full, {way}"] < 0.6 * saved[f"selective, {way}"] < 0.54 * saved[f"None, {way}"], saved
        # Computed again with the same numbers in the same order: the same bits.
        assert all(torch.equal(results[f"{g}, {way}"][1], results[f"None, {way}"][1]) for g in ("selective", "full"))
    for granularity in ("None", "selective", "full"):
        assert saved[f"{granularity}, sharded"] < 0.8 * saved[f"{granularity}, whole"], saved


@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_each_rank_drops_out_attention_weights_of_its_own(three_ranks: Path, way: str) -> None:
    """With the random numbers of another rank, its heads would lose the same weights as that rank's."""
    results = torch.load(three_ranks / "dropout.pt", weights_only=True)
    first, second, third = results[way]
    assert not any(torch.equal(a, b) for a, b in ((first, second), (second, third), (first, third)))
    assert results[f"{way}, next number"].unique().numel() == 1  # dropout of hidden states is the same on all of them


@pytest.mark.parametrize("granularity", [None, "selective", "full"])
@pytest.mark.parametrize("head", [None, RewardHeadConfig()], ids=["log-probs", "values"])
def test_the_last_layer_goes_on_with_what_is_asked_for(head: RewardHeadConfig | None, granularity: str | None) -> None:
    """The same results and gradients as of all positions, those of no interest with a weight of 0."""
    config = {"optim": OPTIM, "activations_checkpoint_granularity": granularity}
    model = build_model(ARCHITECTURES["llama"], config, torch.float32, head=head)
    ids, width, scoring = tokens(), 12 if head else 11, None if head else Scoring()
    asked = torch.zeros(5, width, dtype=torch.bool)
    asked[:, 7:] = True
    asked[2] = False
    weights = torch.randn(5, width, generator=torch.Generator().manual_seed(2)) * asked
    rows: list[list[int]] = [[] for _ in model.gpt.decoder.layers]
    for layer, seen in zip(model.gpt.decoder.layers, rows, strict=True):
        layer.register_forward_hook(lambda _, inputs, outputs, seen=seen: seen.append(len(outputs[0])))

    found = []
    for wanted in (torch.ones_like(asked), asked):
        wanted = wanted & (torch.arange(5) != 2)[:, None]
        for parameter in model.gpt.parameters():
            parameter.main_grad.zero_()
        for seen in rows:
            seen.clear()
        train_step(model, Weighted(ids, weights), wanted, MicroBatching(4), weighted_sum, scoring=scoring)
        shape = (width, 1) if head else (width,)
        outputs = forward(model, Tokens(ids), wanted, MicroBatching(4), lambda x, _: x, shape, scoring)
        found.append([outputs.view(5, width) * asked, *(p.main_grad.clone() for p in model.gpt.parameters())])
        assert set(rows[0]) == {4 * width} and set(rows[-1]) == {int(wanted.sum())}
    for whole, part in zip(*found, strict=True):
        assert (part - whole).norm() <= 1e-5 * whole.norm() > 0
    rows[-1].clear()
    train_step(model, Weighted(ids, weights), torch.zeros_like(asked), MicroBatching(4), weighted_sum, scoring=scoring)
    assert set(rows[-1]) == {1}  # kernels of GPUs refuse matrices without rows


def test_what_is_computed_again_is_not_held() -> None:
    """Neither by autograd nor by what tells it how to compute it."""
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    doubled = computed_again(x * 2, lambda: x * 2)
    expected, held = 2 * x.sum(0).expand(6, 8), weakref.ref(doubled)
    with not_keeping(doubled):
        out = torch.nn.functional.linear(doubled, weight)
    del doubled
    assert held() is None
    out.sum().backward()
    torch.testing.assert_close(weight.grad, expected)


def test_split_vocabulary_equals_dense(three_ranks: Path) -> None:
    """Log-probs, entropy and both gradients at TP 3, in chunks, with padding, against the dense formulas."""
    split = load_file(three_ranks / "split.safetensors")
    for name, expected in dense_reference(torch.float32).items():
        for way in ("whole", "sequence parallel"):
            # Logits are as large as 50 here.
            torch.testing.assert_close(
                split[f"{way} {name}"], expected, atol=2e-5, rtol=1e-5, msg=lambda m, n=name, w=way: f"{w} {n}: {m}"
            )


@pytest.mark.parametrize(
    "dtype, has_bf16, tolerance",
    [(torch.float32, False, 5e-6), (torch.bfloat16, False, 0.05), (torch.bfloat16, True, 0.05)],
    ids=["fp32", "bf16 widened", "bf16"],
)
@pytest.mark.parametrize(("rows", "softcap"), [(1, None), (3, None), (100, None), (3, 4.0)])
def test_chunks_of_logits_equal_dense(
    dtype: torch.dtype,
    has_bf16: bool,
    tolerance: float,
    rows: int,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank, some rows at a time; nothing of the size of all positions times the vocabulary is kept for backward."""
    from multirank_models import VOCAB as SPLIT_VOCAB
    from multirank_models import inputs

    multiply(monkeypatch, has_bf16)
    monkeypatch.setattr(logprobs_module, "_CHUNK_BYTES", 4 * SPLIT_VOCAB * rows)
    hidden, weight, wanted, loss_weights = inputs()
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    saved: list[tuple[int, ...]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x)
    with hooks, FactorTypes() as factors:
        values = predict(hidden, weight, SPLIT_VOCAB, wanted, sequence_parallel=False, softcap=softcap)
    with factors:
        (values * loss_weights).sum().backward()
    assert factors.seen == {torch.bfloat16 if has_bf16 else torch.float32}
    assert hidden.grad is not None and weight.grad is not None
    found = {"values": values.detach(), "hidden gradient": hidden.grad, "weight gradient": weight.grad}
    assert found["values"].dtype == torch.float32 and hidden.grad.dtype == dtype
    for name, expected in dense_reference(dtype, softcap).items():
        torch.testing.assert_close(found[name], expected, atol=tolerance, rtol=tolerance, msg=name)
    assert saved and max(math.prod(shape) for shape in saved if shape != weight.shape) <= hidden.numel()


@pytest.mark.parametrize("between", ["nothing", "another row", "the same gradients"])
def test_logits_still_in_memory_are_not_computed_again(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk's, unless something else was computed meanwhile; the gradients have the same bits either way."""
    from multirank_models import VOCAB as SPLIT_VOCAB
    from multirank_models import inputs

    if best_kernels() is None:
        pytest.skip("without compiled kernels, torch overwrites the logits")
    monkeypatch.setattr(logprobs_module, "_CHUNK_BYTES", 4 * SPLIT_VOCAB * 3)
    computed: list[int] = []
    compute = logprobs_module._Slice.logits

    def counted(self: Any, rows: torch.Tensor, is_kept: bool = False) -> torch.Tensor:
        computed.append(len(rows))
        return compute(self, rows, is_kept)

    monkeypatch.setattr(logprobs_module._Slice, "logits", counted)
    hidden, weight, wanted, loss_weights = inputs()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def loss() -> torch.Tensor:
        return (predict(hidden, weight, SPLIT_VOCAB, wanted, sequence_parallel=False) * loss_weights).sum()

    with monkeypatch.context() as patch:
        patch.setattr(logprobs_module, "_is_in_buffer", lambda logits: False)
        expected = torch.autograd.grad(loss(), (hidden, weight))
    chunks = len(computed) // 2
    assert chunks > 1 and sum(computed) == 2 * len(wanted.targets)
    value = loss()
    if between == "another row":
        predict(hidden.detach().flip(0), weight, SPLIT_VOCAB, wanted, sequence_parallel=False)
    elif between == "the same gradients":
        torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    computed.clear()
    found = torch.autograd.grad(value, (hidden, weight))
    assert len(computed) == (chunks - 1 if between == "nothing" else chunks)
    for gradient, exact in zip(found, expected, strict=True):
        assert torch.equal(gradient, exact)


def multiply(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """As on a processor with or without bf16 arithmetic, by torch, so that `FactorTypes` sees it."""
    best_kernels()  # checked before their first use, by products that `FactorTypes` must not see
    monkeypatch.setattr(products, "_has_bf16_arithmetic", lambda: has_bf16)
    monkeypatch.setattr(products, "_prefers_openblas", lambda: False)


class FactorTypes(TorchDispatchMode):
    """The dtypes of all matrices that are multiplied meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {x.dtype for x in args[-2:]}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "dtype, has_bf16", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
def test_linear_layers_equal_exact_products(
    dtype: torch.dtype, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed in bf16 only where the processor does, rounded to the dtype of the weights."""
    multiply(monkeypatch, has_bf16)
    config = transformer_config(ARCHITECTURES["tied"], {}, dtype, current_layout())
    draw = torch.Generator().manual_seed(3)
    for layer_type, skipped in ((ColumnLinear, {"gather_output": False}), (RowLinear, {"input_is_parallel": True})):
        layer = layer_type(
            20, 36, config=config, init_method=torch.nn.init.normal_, bias=True, skip_bias_add=False, **skipped
        )
        torch.nn.init.normal_(layer.bias)
        x = torch.randn(7, 2, 20, generator=draw).to(dtype).requires_grad_()
        grad = torch.randn(7, 2, 36, generator=draw).to(dtype)
        with FactorTypes() as factors:
            out, _ = layer(x)
            out.backward(grad)
        assert factors.seen == {torch.bfloat16 if has_bf16 else torch.float32}
        exact = torch.nn.functional.linear(x.double(), layer.weight.double())
        wanted = {
            "out": (out, exact.to(dtype) + layer.bias),
            "x": (x.grad, grad.double() @ layer.weight.double()),
            "weight": (layer.weight.grad, grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)),
            "bias": (layer.bias.grad, grad.double().sum((0, 1))),
        }
        for name, (found, expected) in wanted.items():
            assert found is not None and found.dtype == dtype, name
            torch.testing.assert_close(found, expected.to(dtype), msg=lambda m, n=name: f"{n}: {m}")
        with pytest.raises(TypeError, match="cannot take"):
            layer(x.half())


@pytest.mark.parametrize("granularity", [None, "full"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_as_one_function_changes_no_bit(
    dtype: torch.dtype, in_place: bool, granularity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of log-probs and gradients, against the same layers module by module."""
    config = {"optim": OPTIM, "activations_checkpoint_granularity": granularity}
    model = build_model(ARCHITECTURES["llama"], config, dtype)
    if not in_place:
        for parameter in model.gpt.parameters():
            setattr(parameter, linear._IN_PLACE, False)
    ids, wanted = tokens(), torch.ones(5, 11, dtype=torch.bool)
    weights = torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    computed: list[bool] = []

    def as_one(*args: Any) -> torch.Tensor | None:
        out = whole_layer(*args)
        computed.append(out is not None and out._base is None)  # pipeline stages free their outputs: no views
        return out

    found = []
    for function in (as_one, lambda *_: None):
        monkeypatch.setattr(layers, "whole_layer", function)
        for parameter in model.gpt.parameters():
            parameter.main_grad.zero_()
        train_step(model, Weighted(ids, weights), wanted, MicroBatching(2), weighted_sum, scoring=Scoring())
        found.append([logprobs(model, ids), *(p.main_grad.clone() for p in model.gpt.parameters())])
    assert computed and all(computed)
    assert all(torch.equal(one, several) and one.norm() > 0 for one, several in zip(*found, strict=True))


def test_a_layer_as_one_function_has_gradients_only_once() -> None:
    """It keeps no second copy of what it overwrites, and says so."""
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    packed = pack_row(Sequences.padded(tokens(), torch.ones(5, 12, dtype=torch.bool)), 1)
    out = whole_layer(model.gpt.decoder.layers[0], torch.ones(60, 1, 32), torch.ones(128, 1, 1, 8), packed.sequences)
    assert out is not None
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["tied", "qk-norm", "layernorm1p", "scaled", "norms after", "norms both", "sinks"])
def test_other_layers_are_computed_module_by_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, norms of queries and keys, other norms and activations; with dropout, while training; on GPUs."""

    def refuse(*_: Any) -> None:
        raise AssertionError("it has no room for that")

    model = build_model(ARCHITECTURES[name], {"optim": OPTIM}, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "whole_layer", refuse)
        logprobs(model, tokens())
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM, "hidden_dropout": 0.5}, torch.float32)
    packed = pack_row(Sequences.padded(tokens(), torch.ones(5, 12, dtype=torch.bool)), 1)
    hidden, angles = torch.ones(60, 1, 32), torch.ones(128, 1, 1, 8)
    layer = model.gpt.decoder.layers[0]
    assert whole_layer(layer.train(), hidden, angles, packed.sequences) is None
    assert whole_layer(layer.eval(), hidden, angles, packed.sequences) is not None
    assert whole_layer(layer, hidden.bfloat16(), angles, packed.sequences) is None  # and the products say what is wrong
    elsewhere: Any = SimpleNamespace(config=layer.config, training=False)  # Transformer Engine's has no norms to read
    assert whole_layer(elsewhere, hidden.to("meta"), angles, packed.sequences) is None


@pytest.mark.parametrize("trainable", [True, False])
def test_one_row_reaches_matrices_as_one_product(trainable: bool) -> None:
    """[s, 1, h] with the strides of a new tensor: with the embedding's own, torch.matmul takes each token for a batch,
    which megatron-core's functions for frozen weights call on GPUs."""
    model = build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=trainable)
    strides = []
    for module in model.gpt.decoder.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module.register_forward_pre_hook(lambda _, given: strides.append((given[0].shape, given[0].stride())))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        model.gpt(ids, ids, None)
    assert strides
    for shape, found in strides:
        assert shape[:2] == (12, 1) and found == torch.empty(shape).stride()


@pytest.mark.parametrize("head", [None, RewardHeadConfig()], ids=["language", "reward"])
@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize(
    "dtype, has_bf16, tolerance",
    [(torch.float32, False, 1e-5), (torch.bfloat16, False, 0.02), (torch.bfloat16, True, 0.02)],
    ids=["fp32", "bf16 widened", "bf16"],
)
def test_gradients_of_matrices_are_added_where_they_belong(
    dtype: torch.dtype,
    has_bf16: bool,
    tolerance: float,
    name: str,
    head: RewardHeadConfig | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over micro batches, as autograd's own from a model without DDP; none of them comes by as a tensor of its own."""
    multiply(monkeypatch, has_bf16)
    ids, config = tokens(), {"make_vocab_size_divisible_by": 64, "optim": OPTIM}
    packed = pack_row(Sequences.padded(ids, torch.ones(5, 12, dtype=torch.bool)), 1)
    model = build_model(ARCHITECTURES[name], config, dtype, head=head)
    plain = build_model(ARCHITECTURES[name], config, dtype, head=head, trainable=False)
    import_weights(plain, TensorSource(dict(export_weights(model))))
    plain.gpt.requires_grad_(True)
    scoring = None if head else Scoring()
    labels = None if head else Prediction(packed.outputs, packed.tokens[0].roll(-1)[packed.outputs])
    with torch.enable_grad():
        outputs = plain.module(
            packed.tokens, packed.sequences.positions[None], None, labels=labels, packed_seq_params=packed.sequences
        )
        weights = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
        if head is None:
            weights[:, -1] = 0  # a language model says nothing of what follows the last token
        expected = torch.autograd.grad((outputs.flatten() * weights.flatten()).sum(), list(plain.gpt.parameters()))

    width = 12 if head else 11
    arrived: list[torch.Tensor | None] = []
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "rm_head" not in parameter_name:
            parameter.register_hook(arrived.append)
    batch = Weighted(ids, weights[:, :width])
    train_step(model, batch, torch.ones(5, width, dtype=torch.bool), MicroBatching(2), weighted_sum, scoring=scoring)
    assert not any(gradient is not None for gradient in arrived), "a gradient went through autograd"
    for (parameter_name, parameter), exact in zip(model.named_parameters(), expected, strict=True):
        error = 5 * parameter.main_grad - exact.float()
        assert error.norm() <= tolerance * exact.float().norm() > 0, parameter_name
