"""The models' parts on one process: schedule, vocabulary padding, heads, frozen weights; engines against trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from job_processes import ROOT, run
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from small_models import SHAPE, VOCAB, TensorSource
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nemo_style_aligner.algorithms.critic_service import CriticService
from nemo_style_aligner.algorithms.job_setup import Run
from nemo_style_aligner.algorithms.service_setup import build_critic_service
from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.checkpoints.training import CheckpointManager
from nemo_style_aligner.config import load_defaults
from nemo_style_aligner.data.jsonl import DataError
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.generation.embedded.engine import EmbeddedEngine
from nemo_style_aligner.generation.engine import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.generation.megatron import MegatronEngine
from nemo_style_aligner.jobs.run_control import RunControl
from nemo_style_aligner.models import kept_passes as kept_passes_module
from nemo_style_aligner.models import layer_kernels, layers, linear, pipeline, products
from nemo_style_aligner.models import logprobs as logprobs_module
from nemo_style_aligner.models.actor import Actor
from nemo_style_aligner.models.critic import Critic, RewardModel, ValueBatch
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel, build_model, parse_precision, transformer_config
from nemo_style_aligner.models.heads import RewardHeadConfig, merge_attributes, pool_rewards
from nemo_style_aligner.models.kept_passes import KeepChoice, Part, activation_bytes, keep_passes
from nemo_style_aligner.models.layer_kernels import best_kernels
from nemo_style_aligner.models.layers import uses_torch_attention
from nemo_style_aligner.models.linear import ColumnLinear, RowLinear
from nemo_style_aligner.models.logprobs import Prediction, predict
from nemo_style_aligner.models.nonfinite import STOP, NonFinitePolicy
from nemo_style_aligner.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.models.packing import (
    MicroBatching,
    Padding,
    Sequences,
    micro_batches,
    pack_row,
    shares,
    used_lengths,
)
from nemo_style_aligner.models.pipeline import Scoring, Tokens, forward, train_step
from nemo_style_aligner.models.policy_losses import LossSettings
from nemo_style_aligner.models.ragged import RaggedBatch
from nemo_style_aligner.models.recompute import computed_again, not_keeping
from nemo_style_aligner.models.restore import lay_over, open_base_model
from nemo_style_aligner.models.supervised_losses import (
    LabelledBatch,
    PairBatch,
    attribute_regression_objective,
    ranking_objective,
    with_deviations,
)
from nemo_style_aligner.models.whole_layer import whole_layer
from nemo_style_aligner.parallel.groups import current_layout
from nemo_style_aligner.rope import RopeScaling
from nemo_style_aligner.servers.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.telemetry.metrics import MetricsLogger, read_metrics
from nemo_style_aligner.weights.stream import export_weights, import_weights

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

EOS = 1
ARCHITECTURES = {
    "llama": ModelArchitecture(**SHAPE),
    "tied": ModelArchitecture(**SHAPE, tied_embeddings=True, qkv_bias=True),
    "qk-norm": ModelArchitecture(**SHAPE, qk_layernorm=True, kv_channels=16, rope_scaling=RopeScaling("yarn", 8.0, 64)),
    "scaled": ModelArchitecture(
        **SHAPE, no_rope_layers=(1,), rope_scaling=RopeScaling("linear", 2.0), softmax_scale=0.5, tied_embeddings=True,
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.5,
    ),
    "layernorm1p": ModelArchitecture(
        **SHAPE, normalization="layernorm1p", activation="squared-relu", gated=False, bias=True, rotary_percentage=0.5
    ),
}  # fmt: skip
OPTIM = {"name": "distributed_fused_adam", "lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("settings", [{"kv_channels": 11}, {"kv_channels": 8, "rotary_percentage": 1.5}])
def test_heads_that_are_turned_further_than_they_reach_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="12 channels of each head would be rotated"):
        ModelArchitecture(**SHAPE | settings)


def tokens(rows: int = 5, width: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def logprobs(model: MegatronModel, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return score(model, ids, Scoring(temperature))


def score(model: MegatronModel, ids: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    shape = (ids.shape[1] - 1, 2) if scoring.entropy else (ids.shape[1] - 1,)
    wanted = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    return forward(model, Tokens(ids), wanted, MicroBatching(2), lambda outputs, _: outputs, shape, scoring)


@dataclasses.dataclass
class Weighted:
    """A batch whose loss is the sum of its outputs, weighted."""

    tokens: torch.Tensor
    weights: torch.Tensor


def weighted_sum(outputs: torch.Tensor, batch: Weighted) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a `Weighted` batch."""
    return (outputs.flatten(1) * batch.weights).sum(), torch.tensor(len(batch.weights)), {}


# ---- precision and schedule ---------------------------------------------------------------------


def test_precision() -> None:
    assert parse_precision("bf16") == parse_precision("bf16-mixed") == torch.bfloat16
    assert parse_precision(32) == parse_precision("32-true") == torch.float32
    with pytest.raises(ValueError, match="choose bf16 or 32"):
        parse_precision(16)


def nemo_cosine_annealing(step: int, lr: float, min_lr: float, warmup: int, constant: int, max_steps: int) -> float:
    """NeMo's ``CosineAnnealing`` (nemo/core/optim/lr_scheduler.py), told again, one span of time after the other."""
    decay_steps = max_steps - warmup - constant
    if warmup > 0 and step <= warmup:  # the warm-up ends one step after `warmup`
        return (step + 1) / (warmup + 1) * lr
    if constant > 0 and warmup + decay_steps < step <= max_steps:
        return min_lr
    if step > max_steps:
        return min_lr
    fraction = (step - warmup) / decay_steps
    return (lr - min_lr) * (math.cos(math.pi * fraction) + 1) / 2 + min_lr


@pytest.mark.parametrize(
    "lr, min_lr, warmup, constant, max_steps",
    [
        (9e-7, 9e-8, 10, 0, 50),
        (1e-3, 0.0, 0, 0, 7),
        (1e-3, 0.0, 1, 0, 7),
        (1e-3, 1e-4, 3, 5, 20),
        (9e-6, 9e-7, 10, 1000, 300),
    ],
)
def test_schedule_is_nemos(lr: float, min_lr: float, warmup: int, constant: int, max_steps: int) -> None:
    sched = {"name": "CosineAnnealing", "warmup_steps": warmup, "constant_steps": constant, "min_lr": min_lr}
    schedule = Schedule.from_config({"lr": lr, "sched": sched}, max_steps)
    for step in range(max_steps + 5):
        expected = nemo_cosine_annealing(step, lr, min_lr, warmup, constant, max_steps)
        assert schedule(step) == pytest.approx(expected, rel=1e-12, abs=1e-20), step
    assert max(schedule(step) for step in range(max_steps)) == pytest.approx(lr)


def test_constant_schedule_and_errors() -> None:
    schedule = Schedule.from_config({"lr": 2.0, "sched": {"name": "constant", "warmup_steps": 3}}, 10)
    assert [schedule(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert Schedule.from_config({"lr": 2.0}, 10)(0) == 2.0
    given = Schedule.from_config({"lr": 2.0, "sched": {"max_steps": 7}}, 10)  # NeMo's key
    assert given.max_steps == given.ending_with_run(12).max_steps == 7
    assert Schedule.from_config({"lr": 2.0, "sched": {"max_steps": None}}, 10).ending_with_run(12).max_steps == 12
    with pytest.raises(ValueError, match="choose CosineAnnealing or constant"):
        Schedule(lr=1.0, name="Polynomial")
    with pytest.raises(ValueError, match=r"min_lr=2.0 is above"):
        Schedule(lr=1.0, min_lr=2.0)
    assert Schedule(lr=1.0, min_lr=2.0, name="constant")(9) == 1.0


@pytest.mark.parametrize(
    ("max_steps", "changes", "expected"),
    [
        (1010, {}, True),
        (12, {}, True),
        (11, {}, False),  # nothing but the warm-up
        (1011, {}, False),
        (1000, {"warmup_steps": 0}, True),
        (1001, {"warmup_steps": 1}, True),
        (1010, {"min_lr": 1.0}, False),
        (1010, {"name": "constant"}, False),
    ],
)
def test_a_run_that_is_too_short_for_its_schedule_says_so(
    max_steps: int, changes: dict[str, Any], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "constant_steps": 1000} | changes
    schedule = Schedule(max_steps=max_steps, **settings)
    schedule.warn_if_nothing_decays()
    assert bool(caplog.records) == expected
    if expected:
        first = {0: 0, 1: 2, 10: 11}[settings["warmup_steps"]]
        assert f"of {max_steps} updates, all after the first {first} run at min_lr=0.1" in caplog.text
        assert all(schedule(step) == 0.1 for step in range(first, max_steps))


# ---- vocabulary ---------------------------------------------------------------------------------


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


def dense_reference(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The inputs of multirank_models.py through the dense formulas."""
    from multirank_models import TEMPERATURE, inputs
    from multirank_models import VOCAB as SPLIT_VOCAB

    hidden, weight, wanted, loss_weights = inputs()
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    true = (hidden[:, 0] @ weight.T).float()[wanted.outputs, :SPLIT_VOCAB]
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
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_chunks_of_logits_equal_dense(
    dtype: torch.dtype, has_bf16: bool, tolerance: float, rows: int, monkeypatch: pytest.MonkeyPatch
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
        values = predict(hidden, weight, SPLIT_VOCAB, wanted, sequence_parallel=False)
    with factors:
        (values * loss_weights).sum().backward()
    assert factors.seen == {torch.bfloat16 if has_bf16 else torch.float32}
    assert hidden.grad is not None and weight.grad is not None
    found = {"values": values.detach(), "hidden gradient": hidden.grad, "weight gradient": weight.grad}
    assert found["values"].dtype == torch.float32 and hidden.grad.dtype == dtype
    for name, expected in dense_reference(dtype).items():
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


@pytest.mark.parametrize("name", ["tied", "qk-norm", "layernorm1p", "scaled"])
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


# ---- packed rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("max_tokens", [None, 1, 20, 1000])
def test_packed_sequences_do_not_see_each_other(name: str, max_tokens: int | None) -> None:
    """Log-probs of sequences in packed rows are those of each sequence alone, in a plain forward pass with logits."""
    torch.manual_seed(5)
    model = build_model(ARCHITECTURES[name], {}, torch.float32, trainable=False)
    ids, lengths = tokens(), torch.tensor([3, 12, 1, 7, 9])
    mask = torch.arange(11)[None, :] < lengths[:, None] - 1
    mask[1, :5] = False  # a prompt
    found = forward(
        model, Tokens(ids), mask, MicroBatching(2, max_tokens), lambda outputs, _: outputs, (11,), Scoring(0.7)
    )
    for row, length in enumerate(lengths.tolist()):
        alone = ids[row : row + 1, :length]
        with torch.no_grad():
            logits = model.gpt(alone, torch.arange(length)[None], None)
        expected = (logits[0, :-1, :VOCAB] / 0.7).log_softmax(-1).gather(-1, alone[0, 1:, None])[:, 0]
        expected = torch.nn.functional.pad(expected, (0, 12 - length)) * mask[row]
        torch.testing.assert_close(found[row], expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("place", "token"), [(2, VOCAB), (11, VOCAB), (11, -1)])
def test_tokens_beyond_the_vocabulary_are_an_error(place: int, token: int) -> None:
    """The padding rows of the embedding would take them, and their log-probs would be numbers.

    The last one of a sequence, as an EOS token that was added to the tokenizer, is no input.
    """
    model = build_model(ARCHITECTURES["llama"], {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
    ids, mask = tokens(), torch.ones(5, 11, dtype=torch.bool)
    ids[3, place] = token
    with pytest.raises(DataError, match=rf"token {token} is not in the model's vocabulary of {VOCAB}"):
        forward(model, Tokens(ids), mask, MicroBatching(5), lambda outputs, _: outputs, (11,), Scoring())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "whole", "selective"),  # numbers per token and layer, beside those of attention
    [
        ({}, 4 * 64 + 3 * 96, 2 * 64 + 2 * 96),
        ({"normalization": "layernorm"}, 4 * 64 + 3 * 96, 4 * 64 + 2 * 96),
        ({"activation": "gelu"}, 4 * 64 + 5 * 96, 2 * 64 + 5 * 96),
        ({"activation": "squared-relu", "gated": False, "normalization": "layernorm1p"}, 4 * 64 + 2 * 96, None),
    ],
    ids=["RMSNorm and SwiGLU", "LayerNorm", "gated GELU", "Nemotron"],
)
def test_activations_need_the_memory_that_the_documentation_says(
    shape: dict[str, Any], whole: int, selective: int | None, dtype: torch.dtype
) -> None:
    """Bytes saved for the backward pass, per token and layer: docs/architecture.md, "Training passes"."""
    architecture = ModelArchitecture(**(SHAPE | {"hidden_size": 64, "ffn_hidden_size": 96} | shape))
    a, g, d = 4, 2, 16
    for granularity, numbers in ((None, whole), ("selective", whole if selective is None else selective)):
        expected = dtype.itemsize * (numbers + 2 * (a + g) * d)
        if architecture.normalization != "rmsnorm" and dtype == torch.bfloat16:
            expected += dtype.itemsize * 2 * 64  # our LayerNorm keeps its input in fp32
        assert saved_bytes(architecture, dtype, granularity) == pytest.approx(expected, rel=0.05)
        assert activation_bytes(architecture, dtype.itemsize, granularity) == 2 * expected


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize(("compiled", "normed"), [(True, True), (False, False), (False, True)])
def test_attention_keeps_what_is_counted(
    compiled: bool, normed: bool, num_groups: int, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms of queries and keys, and with torch's attention, which keeps less of a row of one sequence."""
    if not compiled:
        monkeypatch.setattr(layer_kernels, "best_kernels", lambda: None)
    shape = SHAPE | {"kv_channels": 64, "num_query_groups": num_groups, "qk_layernorm": normed}
    architecture, dtype = ModelArchitecture(**shape), torch.float32
    assert uses_torch_attention(dtype) is not compiled
    counted = activation_bytes(architecture, dtype.itemsize, torch_attention=not compiled) / architecture.num_layers
    # Beside what is counted: statistics of norms and softmaxes, a number or two per head.
    assert 0.7 * counted < saved_bytes(architecture, dtype, None, num_sequences) < 1.03 * counted


def saved_bytes(
    architecture: ModelArchitecture, dtype: torch.dtype, granularity: str | None, num_sequences: int = 1
) -> float:
    """Bytes that autograd saves of a forward pass, per token and layer."""
    sizes = []
    for num_layers in (1, 3):
        config = {"optim": OPTIM, "activations_checkpoint_granularity": granularity}
        model = build_model(dataclasses.replace(architecture, num_layers=num_layers), config, dtype)
        model.module.train()
        weights = {p.untyped_storage().data_ptr() for p in model.gpt.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(x: torch.Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> torch.Tensor:
            storage = x.untyped_storage()  # held, so that no address is used twice
            saved[storage.data_ptr()] = storage
            return x

        ids = tokens(rows=num_sequences, width=64)
        packed = pack_row(Sequences.padded(ids, torch.ones_like(ids, dtype=torch.bool)), 1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model.gpt(packed.tokens, packed.sequences.positions, None, packed_seq_params=packed.sequences)
        sizes.append(sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in weights))
    return (sizes[1] - sizes[0]) / 2 / 64 / num_sequences


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_every_sequence_is_computed_once_within_the_budget(group: int, max_tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 200, (64,), generator=generator).tolist()
    lengths[:4] = [500, 3, 0, 0]
    parts = micro_batches(lengths, MicroBatching(4, max_tokens, group))
    rows = sorted(row for part in parts for row in part)
    computed = [row for row in range(64) if any(lengths[row // group * group : row // group * group + group])]
    assert rows == computed and len(rows) < 64
    for part in parts:
        assert all(row ^ 1 in part for row in part) or group == 1
        if max_tokens is None:
            assert len(part) <= 4
        else:
            assert sum(lengths[row] for row in part) <= max_tokens or len(part) == group
    if max_tokens is not None and group == 1:  # rows are nearly full
        assert sum(lengths) / (len(parts) * max_tokens) > 0.9
    assert micro_batches([0, 0], MicroBatching(4, max_tokens, group)) == [[]]


def test_micro_batches_and_shares_of_a_few_rows() -> None:
    assert micro_batches([3, 0, 2, 5, 1, 1], MicroBatching(4)) == [[0, 2, 3, 4], [5]]
    assert micro_batches([2, 5, 3, 4, 6], MicroBatching(1, max_tokens=8)) == [[0, 4], [1, 2], [3]]
    assert micro_batches([1, 1, 1, 1], MicroBatching(1, group=2)) == [[0, 1], [2, 3]]
    assert shares([3, 3, 9, 1, 0, 0, 2, 2], 2, group=2) == [[0, 1, 6, 7], [2, 3]]
    with pytest.raises(ValueError, match="3 rows cannot be divided into groups of 2"):
        shares([1, 1, 1], 2, group=2)


def test_a_packed_row_has_what_is_needed_and_is_filled_up() -> None:
    ids = torch.arange(1, 13).view(3, 4)
    wanted = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    asked = Sequences.padded(ids, wanted)
    packed = pack_row(asked, multiple=4)
    assert packed.tokens.tolist() == [[1, 2, 9, 10, 11, 0, 0, 0]] and packed.sequences.lengths == (2, 3, 3)
    assert packed.sequences.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert packed.sequences.cu_seqlens_q.tolist() == packed.sequences.cu_seqlens_kv.tolist() == [0, 2, 5, 8]
    assert packed.sequences.max_seqlen_q == packed.sequences.max_seqlen_kv == 3
    assert packed.sequences.qkv_format == "thd"
    assert packed.outputs.tolist() == [1, 2, 4]
    assert asked.targets().tolist() == [3, 10, 12]
    assert Padding.of(asked, 3).pad(torch.tensor([7, 8, 9])).tolist() == [[0, 7, 0], [0, 0, 0], [8, 0, 9]]
    assert pack_row(asked, multiple=5).sequences.lengths == (2, 3)
    nothing = pack_row(Sequences.padded(ids, torch.zeros_like(wanted)), multiple=2)
    assert nothing.tokens.tolist() == [[0, 0]] and nothing.sequences.lengths == (2,) and not len(nothing.outputs)
    assert used_lengths(torch.ones(3, 0)) == [0, 0, 0]


@pytest.mark.parametrize("num_rows, max_tokens", [(0, None), (0, 8), (1, 0)])
def test_micro_batches_hold_something(num_rows: int, max_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        MicroBatching(num_rows, max_tokens)
    assert MicroBatching(1, 1).num_rows == 1


def test_data_parallel_ranks_get_equal_work() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (50 * torch.randn(64, generator=generator).mul(0.9).exp()).long().clamp(8, 500).tolist()
    shorter = [min(length, 200) for length in lengths]  # the longest is less than a sixteenth of the sum
    for num_ranks, work in ((1, lengths), (2, lengths), (3, lengths), (8, lengths), (16, shorter)):
        parts = shares(work, num_ranks)
        assert sorted(row for part in parts for row in part) == list(range(64))
        sums = [sum(work[row] for row in part) for part in parts]
        assert sum(sums) / num_ranks / max(sums) > 0.99
    in_order = [sum(lengths[start::8]) for start in range(8)]
    assert sum(in_order) / 8 / max(in_order) < 0.9  # it takes more than a round robin
    assert shares([5, 5], 4).count([]) == 2


@pytest.mark.parametrize("seed", range(8))
def test_few_sequences_are_divided_almost_as_evenly_as_they_can_be(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (50 * torch.randn(9, generator=generator).mul(0.9).exp()).long().clamp(8, 500).tolist()

    def largest(ranks: Sequence[int]) -> int:
        return max(sum(n for n, rank in zip(lengths, ranks, strict=True) if rank == r) for r in range(3))

    best = min(largest(ranks) for ranks in itertools.product(range(3), repeat=9))
    parts = shares(lengths, 3)
    assert best <= max(sum(lengths[row] for row in part) for part in parts) <= 1.02 * best


def test_operations_are_those_that_torch_counts() -> None:
    """Of Hugging Face's model, which computes attention to what comes later, too, and logits everywhere."""
    shape = ModelArchitecture(**SHAPE)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        attn_implementation="eager",
    )
    n, model = 48, transformers.LlamaForCausalLM(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n, dtype=torch.int64))
    later = 4 * shape.num_layers * shape.num_attention_heads * shape.kv_channels * (n * n - n * (n + 1) // 2)
    # Weights of norms are in no product, and the angles of the rotation are one here.
    assert shape.forward_operations(n, n) + later == pytest.approx(counter.get_total_flops(), rel=0.02)
    without = shape.forward_operations(n, n) - shape.forward_operations(n, 0)
    assert without == 2 * n * shape.vocab_size * shape.hidden_size and shape.forward_operations(0, 0) == 0


def test_ranks_are_balanced_by_work_and_not_by_tokens() -> None:
    """Few long sequences of a model of 1B: the square of attention counts."""
    shape = ModelArchitecture(
        num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8,
        vocab_size=128256,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    lengths = (600 * torch.randn(64, generator=generator).mul(0.9).exp()).long().clamp(32, 5000).tolist()
    work = [shape.forward_operations(length, length // 2) for length in lengths]

    def balance(parts: list[list[int]]) -> float:
        sums = [sum(work[row] for row in part) for part in parts]
        return sum(sums) / len(sums) / max(sums)

    assert balance(shares(work, 8)) > 0.98 > 0.95 > balance(shares(lengths, 8))


def test_packing_is_measured_over_all_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_the_other_ranks(by_rank: torch.Tensor, group: Any) -> None:
        by_rank[:, 1] = torch.tensor([10.0, 30.0, 30.0], dtype=torch.float64)

    monkeypatch.setattr(pipeline.torch.distributed, "all_reduce", add_the_other_ranks)
    model: Any = SimpleNamespace(layout=SimpleNamespace(dp_size=2, dp_rank=0))
    measured = pipeline._packing_metrics(model, num_used=10, num_computed=10, work=10)
    assert measured == {"padding_efficiency": 0.5, "dp_balance": pytest.approx(20 / 30)}  # the mean over the most


# ---- reward heads -------------------------------------------------------------------------------


def test_pooling() -> None:
    outputs = torch.arange(24.0).reshape(2, 4, 3)
    lengths = torch.tensor([2, 4])
    last = pool_rewards(outputs, lengths, RewardHeadConfig(num_attributes=3))
    assert last.tolist() == [[3, 4, 5], [21, 22, 23]]
    average = pool_rewards(outputs, lengths, RewardHeadConfig(num_attributes=3, pooling="average"))
    assert average.tolist() == [[1.5, 2.5, 3.5], [16.5, 17.5, 18.5]]
    merged = RewardHeadConfig(num_attributes=3, merge_attributes=True, attribute_weights=(1.0, 0.0, -2.0))
    assert pool_rewards(outputs, lengths, merged).tolist() == [[3 - 10.0], [21 - 46.0]]
    equal = RewardHeadConfig(num_attributes=3, merge_attributes=True)
    torch.testing.assert_close(pool_rewards(outputs, lengths, equal), torch.tensor([[4.0], [22.0]]))
    assert merge_attributes(outputs, merged).shape == (2, 4)
    scaled = RewardHeadConfig(merge_attributes=True, attribute_weights=(2.0,))  # rewards as values are
    assert pool_rewards(outputs[..., :1], lengths, scaled).flatten().tolist() == [6, 42]
    assert merge_attributes(outputs[..., :1], scaled)[:, 3].tolist() == [18, 42]
    standardised = RewardHeadConfig(num_attributes=3, mean=1.0, std=2.0)
    assert pool_rewards(outputs, lengths, standardised).tolist() == [[1, 1.5, 2], [10, 10.5, 11]]


def test_head_config_reads_nemo_aligners_keys() -> None:
    config: dict[str, Any] = {
        "reward_model_type": "regression",
        "regression": {"num_attributes": 2, "merge_attributes": True, "attribute_weights": [0.25, 0.75]},
        "use_avg_pool": True,
        "force_head_dtype": "torch.bfloat16",
        "reward_standardization": {"enable": True, "mean": 0.5, "std": 2},
    }
    assert RewardHeadConfig.from_model_config(config) == RewardHeadConfig(
        2, "average", torch.bfloat16, True, (0.25, 0.75), 0.5, 2.0
    )
    config["regression"]["merge_attributes"] = False
    assert RewardHeadConfig.from_model_config(config, merge_attributes=True).merge_attributes
    # A ranking model has one output, whatever the regression section says.
    ranking = {"reward_model_type": "binary_ranking", "regression": {"num_attributes": 2}}
    assert RewardHeadConfig.from_model_config(ranking) == RewardHeadConfig()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"reward_model_type": "pairwise"}, "binary_ranking or regression"),
        ({"reward_model_type": "regression", "regression": {"attribute_weights": [1, 2]}}, "2 entries"),
        ({"force_head_dtype": "float16"}, "float32 or bfloat16"),
        ({"reward_standardization": {"enable": True, "mean": 1.0, "std": 0}}, "needs both mean and std"),
    ],
)
def test_head_config_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardHeadConfig.from_model_config(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_ignore_what_follows_the_sequence(dtype: torch.dtype) -> None:
    """The reward at a sequence's end is that of the sequence alone, unpadded; the head keeps its own dtype."""
    head = RewardHeadConfig(num_attributes=2, dtype=torch.float32)
    model = build_model(ARCHITECTURES["llama"], {}, dtype, head=head, trainable=False)
    assert model.gpt.rm_head.weight.dtype == torch.float32
    reward_model = RewardModel(model, head, MicroBatching(2))
    ids, lengths = tokens(), torch.tensor([3, 12, 1, 7, 9])
    together = reward_model.rewards(ids, lengths)
    assert together.shape == (5, 2) and together.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for row, length in enumerate(lengths.tolist()):
        alone = reward_model.rewards(ids[row : row + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(together[row : row + 1], alone, atol=tolerance, rtol=0)


# ---- frozen weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["auto", "swap", "resident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_come_and_go_without_a_trace(placement: Any, dtype: torch.dtype) -> None:
    model = build_model(ARCHITECTURES["tied"], {"optim": OPTIM}, dtype)
    ids = tokens()
    first = logprobs(model, ids)
    frozen = FrozenWeights(model, placement, lambda: build_model(ARCHITECTURES["tied"], {}, dtype, trainable=False))
    actor = make_actor(model, frozen)
    actor.update(policy_batch(ids))
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = logprobs(model, ids)
    assert not torch.equal(moved, first)
    for _ in range(2):
        assert torch.equal(actor.reference_logprobs(policy_batch(ids)), first.flatten())
        assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
        assert torch.equal(actor.logprobs(policy_batch(ids)), moved.flatten())
    with pytest.raises(KeyboardInterrupt), frozen.active():
        raise KeyboardInterrupt
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert frozen.num_swaps == (3 if placement == "swap" else 0)
    actor.update(policy_batch(ids))  # and training goes on


def test_no_initial_policy() -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    with pytest.raises(RuntimeError, match="initial_policy_kl_penalty is 0"):
        make_actor(model, None).reference_logprobs(policy_batch(tokens()))


# ---- updates ------------------------------------------------------------------------------------


def make_actor(
    model: MegatronModel, frozen: FrozenWeights | None, clip: float = 1.0, nonfinite: NonFinitePolicy = STOP
) -> Actor:
    optimizer = Optimizer(model, OPTIM, Schedule(lr=1e-2, name="constant"), clip, nonfinite)
    return Actor(
        model, optimizer, frozen, training_batching=MicroBatching(5), forward_batching=MicroBatching(2),
        temperature=1.0, loss=LossSettings(entropy_bonus=0.01),
    )  # fmt: skip


def policy_batch(ids: torch.Tensor, advantage: float = 1.0) -> RaggedBatch:
    """Prompts of one token, responses of all others."""
    n, s = ids.shape
    advantages = advantage * torch.randn(n * (s - 1), generator=torch.Generator().manual_seed(9))
    return RaggedBatch(
        ids.flatten().int(), torch.full((n,), s), torch.ones(n, dtype=torch.int64),
        {"old_logprobs": torch.full_like(advantages, -4.0), "advantages": advantages},
        torch.ones(n, dtype=torch.bool),
    )  # fmt: skip


def test_a_batch_without_tokens_changes_nothing() -> None:
    """Not by momentum, by decay, or by a step of the schedule."""
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    actor.update(policy_batch(tokens()))
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = actor.update(dataclasses.replace(policy_batch(tokens()), wanted=torch.zeros(5, dtype=torch.bool)))
    assert report.keys() == {"loss", "lr", "skipped_updates"} and report["loss"] == 0.0  # nothing is a mean of nothing
    assert actor.optimizer.step_count == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_log_probs_and_ratios_are_of_the_distribution_sampled_from() -> None:
    """At the sampling temperature, with and without an entropy bonus."""
    model, ids = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), tokens()
    actor = make_actor(model, None)
    actor.temperature = 0.5
    for bonus in (0.0, 0.01):
        actor.loss, batch = LossSettings(entropy_bonus=bonus), policy_batch(ids)
        own = batch.columns["old_logprobs"] = actor.logprobs(batch)
        torch.testing.assert_close(own, logprobs(model, ids, 0.5).flatten())
        assert actor.update(batch)["ppo_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_an_entropy_bonus_flattens_the_distribution() -> None:
    model, ids = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), tokens()
    actor = make_actor(model, None)
    actor.loss = LossSettings(entropy_bonus=1.0)

    def entropy() -> torch.Tensor:
        return score(model, ids, Scoring(entropy=True))[..., 1].mean()

    before = entropy()
    for _ in range(3):
        actor.update(policy_batch(ids, advantage=0.0))
    assert entropy() > before


# ---- passes that are kept for the update --------------------------------------------------------


def keeping_actor(choice: KeepChoice, update_size: int = 5, dtype: torch.dtype = torch.float32) -> Actor:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, dtype)
    actor = make_actor(model, None)
    keep_passes(model, None, choice, update_size)
    return actor


def keeping_critic(choice: KeepChoice, update_size: int, nonfinite: NonFinitePolicy = STOP) -> Critic:
    head = RewardHeadConfig()
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=head)
    optimizer = Optimizer(model, OPTIM, Schedule(lr=1e-2, name="constant"), 1.0, nonfinite)
    keep_passes(model, None, choice, update_size)
    return Critic(
        model, optimizer, head, training_batching=MicroBatching(2), global_batch_size=update_size,
        forward_batching=MicroBatching(2), loss_clip=0.2,
    )  # fmt: skip


def weights_of(model: MegatronModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@contextlib.contextmanager
def counted_passes(model: MegatronModel) -> Iterator[list[int]]:
    """Tokens of each forward pass."""
    passes: list[int] = []
    hook = model.gpt.register_forward_pre_hook(lambda _, arguments: passes.append(arguments[0].shape[1]))
    yield passes
    hook.remove()


def same_start(*models: MegatronModel) -> None:
    first, *others = (dict(model.named_parameters()) for model in models)
    with torch.no_grad():
        for other in others:
            for name, parameter in other.items():
                parameter.copy_(first[name])


def test_a_step_that_was_abandoned_leaves_nothing_to_the_next() -> None:
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    kept.logprobs(policy_batch(tokens(seed=1)), is_trained=True)
    batch = policy_batch(tokens(seed=2))
    torch.testing.assert_close(kept.logprobs(batch, is_trained=True), kept.logprobs(batch))
    with counted_passes(kept.model) as passes:
        reports = [actor.update(batch) for actor in (kept, fresh)]
        assert passes == [] and reports[0] == reports[1]
        assert all(torch.equal(p, weights_of(fresh.model)[name]) for name, p in weights_of(kept.model).items())
        kept.update(batch)  # with other weights, nothing is known of it
        assert sum(passes) == 5 * 11


def test_outputs_that_were_not_wanted_are_computed_for_training() -> None:
    """The same tokens, but the pass was asked for fewer of their log-probs."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    batch = policy_batch(tokens())
    asked = dataclasses.replace(batch, prompt_lengths=torch.tensor([1, 1, 1, 5, 1]), columns={})
    kept.logprobs(asked, is_trained=True)
    reports = [actor.update(batch) for actor in (kept, fresh)]
    assert reports[0] == reports[1]


def test_logits_of_kept_passes_are_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer multiplies once per token for them, then twice for their gradients."""
    made: list[tuple[int, int]] = []
    product = logprobs_module.product

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        made.append((a.shape[0], b.shape[1]))
        return product(a, b, out)

    monkeypatch.setattr(logprobs_module, "product", counted)
    monkeypatch.setattr(products, "_has_bf16_arithmetic", lambda: True)
    actor = keeping_actor("auto", dtype=torch.bfloat16)
    assert actor.model.kept_passes is not None
    actor.model.kept_passes._free_bytes = lambda: 1e9  # type: ignore[method-assign]
    ids, (_, h) = tokens(), actor.model.gpt.shared_embedding_or_output_weight().shape
    actor.logprobs(policy_batch(ids), is_trained=True)
    per_token = activation_bytes(ARCHITECTURES["llama"], 2) + 2 * VOCAB
    assert actor.model.kept_passes._held() == 5 * 11 * per_token
    assert sum(rows for rows, width in made if width == VOCAB) == 5 * 11
    made.clear()
    fresh = keeping_actor("never", dtype=torch.bfloat16)
    same_start(actor.model, fresh.model)
    reports = [actor.update(policy_batch(ids))]
    assert sum(rows for rows, width in made if width == h) == 5 * 11
    assert not [rows for rows, width in made if width == VOCAB]
    reports.append(fresh.update(policy_batch(ids)))
    assert reports[0] == reports[1]  # with the norm of the gradients


@pytest.mark.parametrize(
    ("free", "unused", "is_kept"),  # bytes beside the reserve, and bytes of the process, in activations of the batch
    [
        (2.0, 0.0, True),
        (0.5, 0.0, False),  # half of 1.5 is too little
        (0.5, 1.0, True),  # but what the process has nobody else gets
        (-3.0, 1.0, True),
        (-3.0, 0.9, False),  # a save is using some of it, say
    ],
)
def test_passes_are_kept_in_memory_that_the_process_has_anyway(
    free: float, unused: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_passes_module, "keep_freed_memory", lambda: True)
    actor = keeping_actor("auto")
    passes, ids = actor.model.kept_passes, tokens()
    assert passes is not None
    of_all = 5 * 11 * activation_bytes(ARCHITECTURES["llama"], 4)
    monkeypatch.setattr(kept_passes_module, "unused_memory", lambda: int(unused * of_all))
    for at_hand in (2.0, free):
        passes._free_bytes = lambda at_hand=at_hand: at_hand * of_all  # type: ignore[method-assign,misc]
        actor.logprobs(policy_batch(ids), is_trained=True)
        held = passes._held()
        actor.update(policy_batch(ids))
    assert held == of_all * is_kept


def test_sequences_that_differ_in_their_last_token_alone_are_told_apart() -> None:
    """It is no input of the model, but a target: answers of one token to the same prompt, say."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    ids, order = tokens().clone(), torch.tensor([3, 0, 4, 1, 2])
    ids[3, :-1] = ids[1, :-1]
    ids[3, -1] = (ids[1, -1] + 1) % VOCAB
    batch = policy_batch(ids)
    kept.logprobs(batch, is_trained=True)
    batch.columns["advantages"].view(5, 11)[3] *= -2.0
    batch = batch.rows(order)
    with counted_passes(kept.model) as passes:
        reports = [kept.update(batch), fresh.update(batch)]
        assert passes == []
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-5)
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-4)


def test_equal_sequences_are_told_apart_by_what_was_wanted_of_them() -> None:
    """A prompt and a response may read as another's longer prompt and shorter response."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    ids = tokens().clone()
    ids[3] = ids[1]
    batch = policy_batch(ids)
    batch.prompt_lengths[1] += 6
    batch.columns = {name: torch.cat([x[:11], x[17:]]) for name, x in batch.columns.items()}
    kept.logprobs(batch, is_trained=True)
    with counted_passes(kept.model) as passes:
        assert kept.update(batch) == fresh.update(batch)
        assert passes == []


def test_a_validation_makes_room_for_the_next_rollouts() -> None:
    critic = keeping_critic("always", 5)
    model, passes_kept = critic.model, critic.model.kept_passes
    lengths = torch.tensor([12, 5, 9, 12, 7])
    critic.values(tokens(seed=1), lengths)
    critic.values(tokens(seed=2)[:2], lengths[:2])
    critic.values(tokens(seed=2)[2:], lengths[2:])
    assert passes_kept is not None
    assert passes_kept._held() <= (int((lengths - 1).sum()) + 2 * 11) * passes_kept._bytes_per_token()
    mask = (torch.arange(11)[None] < lengths[:, None] - 1).float()
    batch = ValueBatch(tokens(seed=2), torch.randn(5, 11), torch.zeros(5, 11), mask)
    with counted_passes(model) as passes:
        critic.train(batch)
        assert passes == [] and passes_kept._held() == 0
        critic.values(tokens(seed=2), lengths)
        critic.weights_changed()
        passes.clear()
        critic.train(batch)
        assert sum(passes) == int((lengths - 1).sum())


@pytest.mark.parametrize("choice", ["always", "never"])
def test_kept_passes_of_a_sequence_that_is_left_out_spoil_no_update(choice: KeepChoice) -> None:
    """Two sequences in a pass; the gradient of the one that is left out would be 0 times NaN."""
    critic = keeping_critic(choice, 4, NonFinitePolicy("skip", max_consecutive_skips=2))
    model = critic.model
    embedding = model.gpt.embedding.word_embeddings.weight
    ids, lengths = tokens(4), torch.tensor([12, 12, 9, 11])
    ids[ids == 7] = 8
    ids[1, 4] = 7
    with torch.no_grad():
        embedding[7] = math.nan
    values = critic.values(ids, lengths)
    is_bad = ~values.isfinite().all(1)
    assert is_bad.tolist() == [False, True, False, False]
    mask = (torch.arange(11)[None] < lengths[:, None] - 1).float() * ~is_bad[:, None]
    batch = ValueBatch(ids, torch.randn(4, 11), values.masked_fill(is_bad[:, None], 0), mask)
    with counted_passes(model) as passes:
        (report,) = critic.train(batch)
        assert sum(passes) == (11 if choice == "always" else 11 + 8 + 10)  # the first again, which shared a pass
    assert report["skipped_updates"] == 0 and math.isfinite(report["grad_norm"])


def test_a_critic_of_several_updates_keeps_nothing() -> None:
    """It uses nothing either, not even in its first batch: one that is resumed later rounds as one that is not."""
    critic = keeping_critic("always", 2)
    kept = critic.model.kept_passes
    lengths, ones = torch.full((4,), 12), torch.ones(4, 11)
    assert kept is not None
    for held in (True, False):
        critic.values(tokens(4), lengths)
        assert (kept._held() > 0) == held
        with counted_passes(critic.model) as passes:
            # The newest sequences first, which the first update could take.
            critic.train(ValueBatch(tokens(4).flip(0), torch.randn(4, 11), torch.zeros(4, 11), ones))
        assert sum(passes) == 4 * 11 and kept._held() == 0
    critic.train(ValueBatch(tokens(2), torch.randn(2, 11), torch.zeros(2, 11), ones[:2]))
    critic.values(tokens(2), lengths[:2])
    assert kept._held() > 0


def test_finding_kept_passes_takes_little_memory() -> None:
    """Half of the responses were cut off and are not trained on: any of their beginnings might have been computed."""
    kept = keeping_actor("always", update_size=256).model.kept_passes
    assert kept is not None
    ids = torch.randint(0, 10**6, (256, 1024), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(300, 1024, 256).long()
    wanted = torch.arange(1023)[None] < lengths[:, None] - 1
    for row in range(0, 256, 2):
        kept.add(Part([], 0, Sequences.padded(ids[row : row + 2], wanted[row : row + 2])))
    wanted[1::2] = False
    asked = Sequences.padded(ids, wanted)
    tracemalloc.start()
    try:
        taken = kept.take(asked)
        assert tracemalloc.get_traced_memory()[1] < ids.nbytes
    finally:
        tracemalloc.stop()
    assert [part.rows for part in taken] == [[row, row + 1] for row in range(0, 256, 2)]


def test_passes_that_cannot_be_kept() -> None:
    llama = ARCHITECTURES["llama"]
    model = build_model(llama, {"optim": OPTIM, "hidden_dropout": 0.1}, torch.float32)
    keep_passes(model, None, "auto", 5)
    assert model.kept_passes is None
    with pytest.raises(ValueError, match=r"keep_activations=always: with dropout"):
        keep_passes(model, None, "always", 5)
    model = build_model(llama, {"optim": OPTIM}, torch.float32)
    swapped = FrozenWeights(model, "swap", lambda: model)
    keep_passes(model, swapped, "auto", 5)
    keep_passes(model, None, "never", 5)
    assert model.kept_passes is None
    with pytest.raises(ValueError, match="other weights take the place of the trained ones"):
        keep_passes(model, swapped, "always", 5)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_gradients_that_are_no_numbers_end_the_job_before_they_do_harm(clip: float) -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None, clip)
    actor.update(policy_batch(tokens()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"update 2: loss nan.*from samples 3 to 8.*not applied"):
        actor.update(policy_batch(tokens(), advantage=math.nan), "samples 3 to 8")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_updates_that_are_no_numbers_are_skipped_if_so_configured(value: float, caplog: Any) -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    actor = make_actor(model, None, nonfinite=NonFinitePolicy("skip", max_consecutive_skips=2))
    actor.update(policy_batch(tokens()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for count in (1, 2):
        report = actor.update(policy_batch(tokens(), advantage=value), "samples [3, 5]")
        assert report["skipped_updates"] == count and "grad_norm" not in report
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert "samples [3, 5]: skipped, 2 so far" in caplog.text
    report = actor.update(policy_batch(tokens()))  # one that is applied starts the count of consecutive ones anew
    assert actor.optimizer.step_count == 2 and report["skipped_updates"] == 2
    for _ in range(2):
        actor.update(policy_batch(tokens(), advantage=value))
    with pytest.raises(NonFiniteError, match="3 updates in a row, more than max_consecutive_skips=2"):
        actor.update(policy_batch(tokens(), advantage=value))


def test_the_critic_answers_a_request_whose_updates_were_skipped(tmp_path: Path) -> None:
    """With a number, and the next request is applied as if this one had not been; under `stop` it answers nothing."""
    head = RewardHeadConfig()
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=head)
    optimizer = Optimizer(model, OPTIM, Schedule(lr=1e-2, name="constant"), 1.0, NonFinitePolicy("skip", 9))
    batching = MicroBatching(2)
    critic = Critic(
        model,
        optimizer,
        head,
        training_batching=batching,
        global_batch_size=2,
        forward_batching=batching,
        loss_clip=0.2,
    )
    polls: list[int] = []
    checkpoints: Any = SimpleNamespace(poll=lambda: polls.append(service.step))
    service = CriticService(critic, None, TrainingLedger(), checkpoints, MetricsLogger(tmp_path, 0), reset=lambda: None)

    def train(first: float, second: float) -> float:
        """Two updates of two rows each."""
        returns = torch.tensor([first, first, second, second])[:, None].expand(4, 11).contiguous()
        return service.train(tokens(4), returns, torch.zeros(4, 11), torch.ones(4, 11))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    too_large = 1e30  # its square is infinite
    assert train(too_large, too_large) == 0.0
    assert service.step == 0 and all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    loss = train(too_large, 1.0)  # the mean of the updates that were applied, which is one
    assert service.step == 1 and optimizer.skips.total == 3
    optimizer.skips.policy = STOP
    with pytest.raises(NonFiniteError, match=r"rows 2 to 3 of training request 1 "):
        train(1.0, too_large)
    assert polls == [0, 0, 1]  # a checkpoint that has been written is noticed before the updates, not at the next save
    service.metrics.close()
    logged = read_metrics(tmp_path)
    assert logged["train/skipped_updates"][-1][1] == 3.0
    assert 0.0 < loss < 10.0 and [value for _, value in logged["train/loss"]] == pytest.approx([loss])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_critic_and_reward_model_exchange_weights_once_per_request(dtype: torch.dtype, tmp_path: Path) -> None:
    """The service's answers, training, saves and restores are those of two models that are there side by side."""
    head, batching, architecture = RewardHeadConfig(), MicroBatching(2), ARCHITECTURES["llama"]
    ids, lengths, ones = tokens(4), torch.tensor([12, 5, 9, 12]), torch.ones(4, 11)
    start: list[dict[str, torch.Tensor]] = []

    def serve(placement: Any) -> tuple[list[torch.Tensor], list[int]]:
        """Everything that can be seen of a service, and how many swaps there were after each inference."""
        model = build_model(architecture, {"optim": OPTIM}, dtype, head=head)
        if start:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(start[0][name])
        else:
            start.append(weights(model))
        frozen = FrozenWeights(
            model, placement, lambda: build_model(architecture, {}, dtype, head=head, trainable=False)
        )
        optimizer = Optimizer(model, OPTIM, Schedule(lr=1e-2, name="constant"), 1.0)
        critic = Critic(
            model, optimizer, head,
            training_batching=batching, global_batch_size=2, forward_batching=batching, loss_clip=0.2,
        )  # fmt: skip
        checkpoints = CheckpointManager(tmp_path / placement, CheckpointSettings())
        metrics = MetricsLogger(tmp_path, 1)

        def reset() -> None:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(start[0][name])
            critic.optimizer = Optimizer(model, OPTIM, Schedule(lr=1e-2, name="constant"), 1.0)

        ledger = TrainingLedger()
        service = CriticService(critic, RewardModel(frozen, head, batching), ledger, checkpoints, metrics, reset)
        seen: list[torch.Tensor] = []
        swaps = []

        def infer(times: int) -> None:
            for _ in range(times):
                answer = service.infer(ids, lengths)
                seen.extend([answer["rewards"], answer["values"]])
                swaps.append(service.reward_model.num_swaps)

        infer(3)
        for _ in range(2):
            service.train(ids, ones, 0 * ones, ones)
            seen.extend(weights(model).values())
            infer(2)
        infer(1)  # the reward model's weights are in place
        service.save("a run's").result()
        seen.extend(weights(model).values())
        (path,) = checkpoints.trainer_states()
        infer(1)
        service.train(ids, -ones, ones, ones)
        infer(1)
        service.ledger.history = "elsewhere"
        assert service.restore("a run", [checkpoints.trainer_states()[path]["ledger"]["history"]]) == 0
        seen.extend(weights(model).values())
        infer(3)
        service.train(ids, -ones, ones, ones)
        seen.extend(weights(model).values())
        return seen, swaps

    def weights(model: MegatronModel) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (beside, none), (exchanged, swaps) = serve("resident"), serve("swap")
    assert len(beside) == len(exchanged) and all(map(torch.equal, beside, exchanged))
    assert set(none) == {0} and swaps[:3] == [1, 1, 2]


def test_an_error_while_weights_are_exchanged_leaves_the_model_right() -> None:
    model = build_model(ARCHITECTURES["tied"], {}, torch.float32, trainable=False)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = FrozenWeights(model, "swap", lambda: model)
    own = {name: p.data.add_(1.0).clone() for name, p in model.named_parameters()}

    def has(expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(p, expected[name]) for name, p in model.named_parameters())

    broken = list(own)[3]  # some parameters are exchanged before it, some are not
    kept, frozen._frozen[broken] = frozen._frozen[broken], torch.ones(7, 7, 7)
    with pytest.raises(RuntimeError, match="size"), frozen.active():
        pytest.fail("these weights should not be in use")
    assert has(own) and not frozen.is_in_place
    frozen._frozen[broken] = kept
    with frozen.active():
        assert has(first)
    assert has(own)


def test_values_are_standardised_as_rewards_are() -> None:
    """The critic's, in answers and in its loss; NeMo-Aligner's critic does so. Reward models learn without."""
    plain = RewardHeadConfig()
    head = dataclasses.replace(plain, mean=5.0, std=2.0)
    torch.manual_seed(3)
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=plain)
    optimizer = Optimizer(model, OPTIM, Schedule(lr=0.0, name="constant"), 1.0, STOP)
    settings: dict[str, Any] = {"training_batching": MicroBatching(2), "forward_batching": MicroBatching(2)}
    critics = {
        h.std: Critic(model, optimizer, h, global_batch_size=4, loss_clip=0.2, **settings) for h in (plain, head)
    }
    ids, lengths = tokens(4), torch.tensor([12, 5, 9, 12])
    values = critics[None].values(ids, lengths)
    mask = torch.arange(11)[None, :] < lengths[:, None] - 1
    standardised = critics[2.0].values(ids, lengths)
    torch.testing.assert_close(standardised, (values - 5.0) / 2.0 * mask)
    batch = ValueBatch(ids, standardised + 0.5, standardised, mask.float())
    (report,) = critics[2.0].train(batch)
    assert report["loss"] == pytest.approx(0.5**2 / 2, rel=1e-4)  # nothing has moved, so nothing is clipped
    for objective, batch in (
        (ranking_objective, PairBatch(ids, lengths, torch.ones(4))),
        (lambda h: attribute_regression_objective(h, -100.0), LabelledBatch(ids, lengths, torch.ones(4, 1))),
    ):
        outputs = torch.randn(4, 12, 1)
        losses = [objective(h).loss(outputs, batch)[0] for h in (plain, head)]
        assert losses[0] == losses[1]


def test_a_critic_made_of_a_language_model_goes_back_to_its_first_head(tmp_path: Path) -> None:
    """The archive has no head; training from the start again, as the recovery of a run asks, gives the same weights."""
    save_nemo(
        tmp_path / "sft.nemo",
        build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=False),
        ARCHITECTURES["llama"].to_nemo_config(),
        _saved_tokenizer(tmp_path / "tokenizer"),
    )
    changes = {
        "pretrained_checkpoint": {"restore_from_path": str(tmp_path / "sft.nemo")},
        "trainer": {"ppo": {"combine_rm_and_critic_server": False}},
        "model": {"global_batch_size": 4, "optim": {"lr": 1e-2, "sched": {"name": "constant", "warmup_steps": 0}}},
    }
    cfg = OmegaConf.merge(load_defaults("gpt_ppo_critic"), changes)
    assert isinstance(cfg, DictConfig)
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    checkpoints, metrics = CheckpointManager(tmp_path / "checkpoints", CheckpointSettings()), MetricsLogger(tmp_path, 0)
    run = Run(tmp_path, current_layout(), metrics, RunControl(), checkpoints)
    service = build_critic_service(cfg, run, base, TrainingLedger())

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in service.critic.model.named_parameters()}

    stages = [weights()]
    for _ in range(2):
        for seed in range(3):
            service.train(tokens(4, seed=seed), torch.ones(4, 11), torch.zeros(4, 11), torch.ones(4, 11))
        stages.append(weights())
        service.reset()
        stages.append(weights())
    first, trained, back, trained_again, back_again = stages
    assert "rm_head.weight" in first and not torch.equal(trained["rm_head.weight"], first["rm_head.weight"])
    for name, values in first.items():
        assert torch.equal(back[name], values) and torch.equal(back_again[name], values), name
        assert torch.equal(trained_again[name], trained[name]), name


def test_settings_of_a_job_do_not_come_with_the_model() -> None:
    """null turns recomputation and token budgets off; where it is about the model, it leaves what the archive says."""
    archive = {
        "activations_checkpoint_granularity": "full",
        "max_tokens_per_micro_batch": 512,
        "optim": {"lr": 1.0, "eps": 1.0},
        "hidden_size": 64,
        "regression": {"attribute_weights": [1.0], "num_attributes": 1},
    }
    job = {
        "activations_checkpoint_granularity": None,
        "max_tokens_per_micro_batch": None,
        "optim": {"lr": 0.5},
        "hidden_size": None,
        "regression": {"attribute_weights": None, "num_attributes": 2},
    }
    assert lay_over(archive, job) == {
        "activations_checkpoint_granularity": None,
        "max_tokens_per_micro_batch": None,
        "optim": {"lr": 0.5},
        "hidden_size": 64,
        "regression": {"attribute_weights": [1.0], "num_attributes": 2},
    }


def test_rewards_of_pairs_have_their_mean_and_deviation() -> None:
    head = RewardHeadConfig()
    outputs, lengths = torch.randn(6, 5, 1), torch.tensor([5, 2, 3, 4, 1, 1])
    batch = PairBatch(torch.zeros(6, 5, dtype=torch.long), lengths, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    _, count, sums = ranking_objective(head).loss(outputs, batch)
    metrics = with_deviations({name: float(value / count) for name, value in sums.items()})
    rewards = outputs[torch.arange(4), lengths[:4] - 1, 0]
    assert metrics["rewards_all_mean"] == pytest.approx(rewards.mean().item())
    assert metrics["rewards_all_std"] == pytest.approx(rewards.std(unbiased=False).item())
    assert with_deviations({"loss": 1.0, "x_mean": math.nan, "x_mean_square": math.nan}).keys() == {"loss", "x_mean"}


@pytest.mark.parametrize("job", ["gpt_ppo_critic", "inference_rm"])
def test_rewards_are_read_as_the_reward_model_was_trained(job: str) -> None:
    """What shapes the head comes with the archive, unless the job's config says otherwise."""
    archive = {
        "reward_model_type": "regression",
        "regression": {"num_attributes": 2, "attribute_weights": [0.25, 0.75]},
        "use_avg_pool": True,
    }
    cfg = load_defaults(job)
    head = RewardHeadConfig.from_model_config(lay_over(archive, OmegaConf.to_container(cfg.model)))
    assert (head.num_attributes, head.attribute_weights, head.pooling) == (2, (0.25, 0.75), "average")
    cfg.model.use_avg_pool = False
    head = RewardHeadConfig.from_model_config(lay_over(archive, OmegaConf.to_container(cfg.model)))
    assert head.pooling == "last"


@pytest.mark.parametrize(
    ("archive", "job", "expected"),
    [
        ({"max_position_embeddings": 131072}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 131072),
        ({"max_position_embeddings": 2048}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 4096),
        ({"max_position_embeddings": 2048}, {"encoder_seq_length": None, "max_position_embeddings": None}, 2048),
        ({"encoder_seq_length": 8192}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 8192),
        ({"max_position_embeddings": 131072}, {"encoder_seq_length": 4096, "max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 131072}, {}, 131072),
    ],
)
def test_positions_are_the_archives_unless_the_job_says_otherwise(
    archive: dict[str, Any], job: dict[str, Any], expected: int
) -> None:
    assert lay_over(archive, job)["max_position_embeddings"] == expected


def test_a_job_that_extends_a_models_positions_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And one whose sequences are shorter leaves them as they are."""
    architecture = dataclasses.replace(ARCHITECTURES["llama"], max_position_embeddings=2048)
    save_nemo(
        tmp_path / "sft.nemo",
        build_model(architecture, {}, torch.float32, trainable=False),
        architecture.to_nemo_config(),
        _saved_tokenizer(tmp_path / "tokenizer"),
    )
    for length, expected in ((1024, 2048), (4096, 4096)):
        assert "this job allows" not in caplog.text
        cfg = OmegaConf.merge(load_defaults("gpt_ppo_critic"), {"model": {"encoder_seq_length": length}})
        assert isinstance(cfg, DictConfig)
        base = open_base_model(str(tmp_path / "sft.nemo"), cfg)
        assert base.architecture.max_position_embeddings == cfg.model.max_position_embeddings == expected
    assert "was made for 2048 positions; this job allows 4096" in caplog.text
    assert "set model.encoder_seq_length=2048" in caplog.text


def _saved_tokenizer(folder: Path) -> Path:
    train_character_tokenizer(["abc"], folder)
    return folder


def test_the_gradient_norm_is_reported_without_clipping() -> None:
    norms = []
    for clip in (0.0, 1e-3):
        model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
        import_weights(model, TensorSource(dict(export_weights(reference_model()))))
        actor = make_actor(model, None, clip)
        actor.optimizer.schedule = Schedule(lr=0.4, warmup_steps=3)
        report = actor.update(policy_batch(tokens()))
        norms.append(report["grad_norm"])
        assert {group["lr"] for group in actor.optimizer.megatron.param_groups} == {report["lr"]} == {0.1}
        clipped = torch.cat([p.grad.flatten() for p in actor.optimizer.megatron.get_parameters()]).norm()
        assert clipped.item() == pytest.approx(clip or norms[0], rel=1e-2)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 1e-2


def test_gradients_are_clipped_as_by_megatron() -> None:
    """In place, with the same bits."""
    optimizer = make_actor(build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32), None).optimizer
    parameters = optimizer.megatron.get_parameters()
    draw = torch.Generator().manual_seed(3)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    before = [parameter.grad.clone() for parameter in parameters]
    norm = torch.cat([gradient.flatten() for gradient in before]).norm().item()
    optimizer.clip_grad = 0.37
    optimizer._clip(norm)
    clipped = [parameter.grad.clone() for parameter in parameters]
    assert torch.cat([gradient.flatten() for gradient in clipped]).norm() == pytest.approx(0.37, rel=1e-4)
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad.copy_(gradient)
    clip_grad_by_total_norm_fp32(parameters, 0.37, norm)
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(clipped, parameters, strict=True))
    optimizer._clip(0.36)
    optimizer.clip_grad = 0.0  # no limit
    optimizer._clip(norm)
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(clipped, parameters, strict=True))


def reference_model() -> MegatronModel:
    torch.manual_seed(4)
    return build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=False)


# ---- generation against the trainer -------------------------------------------------------------


def prompts(count: int = 9) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(6)
    return [
        GenerationRequest(i, torch.randint(2, VOCAB, (1 + 3 * (i % 5),), generator=generator).tolist(), seed=i)
        for i in range(count)
    ]


def generate(engine: EmbeddedEngine | MegatronEngine, model: MegatronModel, sampling: SamplingParams) -> dict[int, Any]:
    engine.build()
    engine.refit(export_weights(model), 0)
    return {result.request_id: result for result in engine.generate(prompts(), sampling)}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize(
    "sampling", [{"use_greedy": True}, {"temperature": 0.7, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_engines_agree_with_each_other_and_with_the_trainer(name: str, sampling: dict[str, Any]) -> None:
    """Same tokens from both engines; log-probs within fp32 rounding of those that enter the loss."""
    params = SamplingParams(max_new_tokens=24, seed=3, **sampling)
    torch.manual_seed(11)
    model = build_model(ARCHITECTURES[name], {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS, "vocab_limit": VOCAB - 2}
    embedded = generate(EmbeddedEngine(ARCHITECTURES[name], dtype=torch.float32, **options), model, params)
    baseline = generate(MegatronEngine(model, **options), model, params)
    assert embedded.keys() == baseline.keys() == set(range(9))
    for request_id, result in embedded.items():
        other: GenerationResult = baseline[request_id]
        assert result.token_ids == other.token_ids and result.finish_reason == other.finish_reason
        torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        trainers = logprobs(model, ids, params.logprob_temperature)[0, len(result.prompt_token_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(result.logprobs), trainers, atol=1e-5, rtol=0)
        assert max(result.token_ids) < VOCAB - 2


def test_the_baseline_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts what it computes, and says that a model has diverged, as every engine."""
    model, passes = reference_model(), []
    monkeypatch.setattr(activity, "progress", lambda: passes.append(1))
    beyond = model.architecture.vocab_size + 5  # a stop token that the model does not know is no trouble
    words: dict[str, Any] = {"detokenize": str, "token_to_id": {"<|new|>": beyond}.get}
    engine = MegatronEngine(model, num_slots=4, max_sequence_length=64, eos_id=EOS, **words)
    with pytest.raises(RuntimeError, match="build"):
        engine.generate([], SamplingParams(max_new_tokens=1))
    generate(engine, model, SamplingParams(max_new_tokens=5, min_new_tokens=5, stop_strings=("<|new|>",)))
    counted = engine.statistics
    assert counted.prefill_tokens == sum(len(request.prompt_token_ids) for request in prompts())
    assert counted.generated_tokens == 5 * 9 and counted.steps >= 3 * 5  # batches of four, four and one
    assert len(passes) == counted.steps
    with torch.no_grad():
        next(iter(model.gpt.decoder.layers[1].mlp.linear_fc1.parameters())).fill_(torch.nan)
    engine.refit([], version=3)
    with pytest.raises(FloatingPointError, match=r"request 0: logits at response token 0 .* version 3"):
        list(engine.generate(prompts(), SamplingParams(max_new_tokens=5)))
    assert not model.module.training


def test_bf16_engine_stays_near_the_bf16_trainer() -> None:
    torch.manual_seed(11)
    model = build_model(ARCHITECTURES["llama"], {}, torch.bfloat16, trainable=False)
    options = {"num_slots": 4, "max_sequence_length": 64, "eos_id": EOS}
    engine = EmbeddedEngine(ARCHITECTURES["llama"], dtype=torch.bfloat16, **options)
    gaps = []
    for result in generate(engine, model, SamplingParams(max_new_tokens=24)).values():
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        gaps.append((torch.tensor(result.logprobs) - logprobs(model, ids)[0, len(result.prompt_token_ids) - 1 :]).abs())
    assert torch.cat(gaps).mean() < 0.03
