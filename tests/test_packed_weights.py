"""Products of linear layers in bf16: the same bits with rearranged weights, whoever rearranges them and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.native.compilation import DOT, KERNELS, usable_kernels
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.trainer.models import packed_weights, products
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.layer_kernels import LayerKernels, load
from nemo_style_aligner.trainer.models.packed_weights import PackedWeight, constant_weights, weight_product
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import LossResult, Scoring, Tokens, train_step

HERE = usable_kernels(torch.bfloat16)
NAME = next(name for name, kernel in KERNELS.items() if kernel.number == DOT and (kernel.emulated or name in HERE))

pytestmark = [
    pytest.mark.usefixtures("own_kernels"),
    pytest.mark.skipif(not usable_kernels(torch.float32), reason="compiled kernels need AVX2 and FMA"),
]


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels multiply, on any processor, if need be in plain C++."""
    own = load(NAME)
    monkeypatch.setattr(packed_weights, "_room_for_packed", 2.0**30)
    monkeypatch.setattr(products, "_has_bf16_arithmetic", lambda: True)  # else layers multiply in fp32
    monkeypatch.setattr(packed_weights, "own_kernels", lambda: own)


@pytest.fixture
def packed(own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, bool]]:
    """Shapes of the weights that were rearranged, and whether for products with their transposes."""
    noted: list[tuple[torch.Size, bool]] = []
    pack = LayerKernels.packed

    def note(kernels: LayerKernels, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        noted.append((weight.shape, transposed))
        return pack(kernels, weight, transposed)

    monkeypatch.setattr(LayerKernels, "packed", note)
    return noted


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.usefixtures("threads")
def test_packed_weights_change_no_bit() -> None:
    """Whatever the number of rows; also after the weight was changed in place, or replaced."""
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
            assert torch.equal(frozen.multiply(a, weight), expected)
            torch.testing.assert_close(expected.float(), a.float() @ weight.float().t(), rtol=2.0**-7, atol=2.0**-4)
    wide = weight.float()
    assert torch.equal(frozen.multiply(wide, wide), wide @ wide.t())
    assert frozen.multiply(a[:0], weight).shape == (0, 1, 96)


def test_weights_are_packed_where_memory_has_room(
    packed: list[tuple[torch.Size, bool]], monkeypatch: pytest.MonkeyPatch
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
    assert len(packed) == 4, "without room it is rearranged for each product"
    weight.add_(1)
    assert torch.equal(first.multiply(a, weight), second.multiply(a, weight))


def test_layers_keep_frozen_weights_packed(packed: list[tuple[torch.Size, bool]]) -> None:
    """Those of a model that is trained are packed for each pass."""
    shape = ModelArchitecture(2, 32, 64, 2, 2, vocab_size=50)
    with single_process():
        for trainable in (True, False):
            model = build_model(shape, {}, torch.bfloat16, trainable=trainable)
            packed.clear()  # building it checks the kernels
            tokens, places = torch.arange(40)[None], torch.arange(40)[None]
            with torch.no_grad():
                for _ in range(3):
                    model.gpt(tokens, places, None)
            assert len(packed) == (3 * 8 if trainable else 8), trainable
        layer = model.gpt.decoder.layers[0].mlp.linear_fc1
        x = random(33, 1, 32).requires_grad_()
        layer(x)[0].sum().backward()
        assert x.grad is not None and x.grad.abs().sum() > 0
        assert layer(x.detach()[:0])[0].shape == (0, 1, 128)


def negative_logprobs(outputs: torch.Tensor, _: Tokens) -> LossResult:
    return -outputs.sum(), torch.tensor(outputs.numel()), {}


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


def test_passes_may_be_nested_and_may_fail() -> None:
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
    assert torch.equal(weight_product(a, weight, transposed=True), before)


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
