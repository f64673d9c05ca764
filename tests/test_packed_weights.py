"""Products of linear layers in bf16: the same bits with rearranged weights, whoever rearranges them and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packaging.version import Version

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.models import packed_weights, products
from nemo_style_aligner.models.gpt import build_model
from nemo_style_aligner.models.layer_kernels import LayerKernels, load
from nemo_style_aligner.models.packed_weights import PackedWeight, constant_weights, weight_product
from nemo_style_aligner.models.packing import MicroBatching
from nemo_style_aligner.models.pipeline import LossResult, Scoring, Tokens, train_step
from nemo_style_aligner.native.compilation import DOT, KERNELS, usable_kernels
from nemo_style_aligner.parallel.groups import single_process

OURS, OF_TORCH = "our kernels", "torch's library"
EMULATED = next(name for name, kernel in KERNELS.items() if kernel.number == DOT and kernel.emulated)


@pytest.fixture(params=[OURS, OF_TORCH])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who multiplies; our kernels on any processor, if need be in plain C++."""
    monkeypatch.setattr(packed_weights, "_room_for_packed", 2.0**30)
    own = None
    if request.param == OURS:
        if not usable_kernels(torch.float32):
            pytest.skip("compiled kernels need an x86-64 processor with AVX2 and FMA")
        own = load(EMULATED)
        monkeypatch.setattr(products, "_has_bf16_arithmetic", lambda: True)  # else layers multiply in fp32
    monkeypatch.setattr(packed_weights, "own_kernels", lambda: own)
    if own is None and not packed_weights._can_pack():
        pytest.skip("torch packs no weights here: the processor has no bf16 arithmetic")
    return str(request.param)


@pytest.fixture
def packed(library: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, bool]]:
    """Shapes of the weights that were rearranged, and whether for products with their transposes."""
    noted: list[tuple[torch.Size, bool]] = []
    by_us, for_torch = LayerKernels.packed, packed_weights._packed_for_torch

    def note(kernels: LayerKernels, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        noted.append((weight.shape, transposed))
        return by_us(kernels, weight, transposed)

    def note_for_torch(weight: torch.Tensor) -> torch.Tensor:
        noted.append((weight.shape, True))
        return for_torch(weight)

    monkeypatch.setattr(LayerKernels, "packed", note)
    monkeypatch.setattr(packed_weights, "_packed_for_torch", note_for_torch)
    return noted


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.usefixtures("threads")
def test_packed_weights_change_no_bit(library: str) -> None:
    """Whatever the number of rows; also after the weight was changed in place, or replaced. Older torch, 2.9 at least,
    sums many rows in another order, so that some results are rounded otherwise."""
    tolerance = 2.0**-7 if library == OF_TORCH and Version(torch.__version__) < Version("2.13") else 0.0
    weight = random(96, 40)
    frozen = PackedWeight()
    for rows in (1, 7, 300, 1025):
        a = random(rows, 1, 40)
        changes: list[Callable[[], object]] = [
            lambda: None,
            lambda: weight.mul_(-3),
            lambda: weight.set_(random(96, 40)),
        ]
        for change in changes:
            change()
            expected = weight_product(a, weight, transposed=True)
            torch.testing.assert_close(frozen.multiply(a, weight), expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(expected.float(), a.float() @ weight.float().t(), rtol=2.0**-7, atol=2.0**-4)
    wide = weight.float()
    assert torch.equal(frozen.multiply(wide, wide), wide @ wide.t())
    assert frozen.multiply(a[:0], weight).shape == (0, 1, 96)


def test_weights_are_packed_where_memory_has_room(
    packed: list[tuple[torch.Size, bool]], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    first, second, weight, a = PackedWeight(), PackedWeight(), random(8, 16), random(40, 16)
    monkeypatch.setattr(packed_weights, "_room_for_packed", 1.5 * weight.nbytes)
    expected = weight_product(a, weight, transposed=True)
    packed.clear()
    for _ in range(3):
        assert torch.equal(first.multiply(a, weight), expected)
    assert len(packed) == 1
    for _ in range(3):
        assert torch.equal(second.multiply(a, weight), expected)
    assert len(packed) == (4 if library == OURS else 1), "ours rearrange it for each product, as torch's library does"
    weight.add_(1)
    assert torch.equal(first.multiply(a, weight), second.multiply(a, weight))


def test_layers_keep_frozen_weights_packed(packed: list[tuple[torch.Size, bool]], library: str) -> None:
    """Those of a model that is trained are packed for each pass, or not at all."""
    shape = ModelArchitecture(2, 32, 64, 2, 2, vocab_size=50)
    with single_process():
        for trainable in (True, False):
            model = build_model(shape, {}, torch.bfloat16, trainable=trainable)
            packed.clear()  # building it checks the kernels
            tokens, places = torch.arange(40)[None], torch.arange(40)[None]
            with torch.no_grad():
                for _ in range(3):
                    model.gpt(tokens, places, None)
            often = 3 * 8 if library == OURS else 0
            assert len(packed) == (often if trainable else 8), trainable
        layer = model.gpt.decoder.layers[0].mlp.linear_fc1
        x = random(33, 1, 32).requires_grad_()
        layer(x)[0].sum().backward()
        assert x.grad is not None and x.grad.abs().sum() > 0
        assert layer(x.detach()[:0])[0].shape == (0, 1, 128)  # the library takes no empty matrices


def negative_logprobs(outputs: torch.Tensor, _: Tokens) -> LossResult:
    return -outputs.sum(), torch.tensor(outputs.numel()), {}


@pytest.mark.parametrize("library", [OURS], indirect=True)
def test_a_pass_packs_each_weight_once(packed: list[tuple[torch.Size, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all its micro batches and in both directions; the next pass, after an update, takes the new weights."""
    shape = ModelArchitecture(2, 32, 64, 2, 2, vocab_size=50)
    tokens = torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(1))
    wanted = torch.ones(4, 39, dtype=torch.bool)
    with single_process():
        model = build_model(shape, {}, torch.bfloat16)
        start = {name: parameter.detach().clone() for name, parameter in model.gpt.named_parameters()}

        def losses(sequences: int) -> list[float]:
            """Of two passes; in between, weights change in place and unseen by autograd, as by an optimizer."""
            packed.clear()
            batching, found = MicroBatching(sequences), []
            for factor in (1.0, 1.5):
                for name, parameter in model.gpt.named_parameters():
                    parameter.data.copy_(start[name] * factor)
                step = train_step(model, Tokens(tokens), wanted, batching, negative_logprobs, scoring=Scoring())
                found.append(step["loss"])
            return found

        expected = losses(4)  # in one micro batch
        assert len(packed) == 2 * 16
        found = losses(1)
        assert len(packed) == 2 * 16 and len(set(packed)) == 8, "four matrices, in both directions"
        assert found == pytest.approx(expected, rel=1e-3) and found[0] != pytest.approx(found[1], rel=1e-3)
        monkeypatch.setattr(packed_weights, "_PACKED_SHARE", 0)
        assert losses(1) == found
        assert len(packed) == 4 * 2 * 16, "without room they are packed for each product"


def test_passes_may_be_nested_and_may_fail(library: str) -> None:
    weight, a = random(96, 40), random(50, 40)
    with constant_weights(2):
        before = weight_product(a, weight, transposed=True)
        with pytest.raises(RuntimeError, match="on purpose"), constant_weights(2):
            raise RuntimeError("on purpose")
        assert torch.equal(weight_product(a, weight, transposed=True), before)
    weight.mul_(-1)
    assert torch.equal(weight_product(a, weight, transposed=True), -before)
    with pytest.raises(RuntimeError, match="on purpose"), constant_weights(2):
        weight_product(a, weight, transposed=True)
        raise RuntimeError("on purpose")
    weight.mul_(-1)
    assert torch.equal(weight_product(a, weight, transposed=True), before), library


@pytest.mark.parametrize("library", [OURS], indirect=True)
def test_a_pass_that_recomputes_keeps_no_weights_packed(packed: list[tuple[torch.Size, bool]]) -> None:
    tokens = torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(1))
    with single_process():
        model = build_model(
            ModelArchitecture(2, 32, 64, 2, 2, vocab_size=50),
            {"activations_checkpoint_granularity": "selective"},
            torch.bfloat16,
        )
        packed.clear()
        wanted = torch.ones(4, 39, dtype=torch.bool)
        train_step(model, Tokens(tokens), wanted, MicroBatching(1), negative_logprobs, scoring=Scoring())
        assert len(packed) == 4 * 16, "four micro batches, two layers of four matrices, in both directions"
