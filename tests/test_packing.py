"""Packed rows: what is computed together, by whom, and how much memory and work it takes."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from small_models import SHAPE, VOCAB
from torch.utils.flop_counter import FlopCounterMode
from trained_models import ARCHITECTURES, OPTIM, tokens

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.trainer.models import layer_kernels, pipeline
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.layers import uses_torch_attention
from nemo_style_aligner.trainer.models.packing import (
    MicroBatching,
    Padding,
    Sequences,
    micro_batches,
    pack_row,
    shares,
    used_lengths,
)
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward
from nemo_style_aligner.trainer.models.sharing import Beginnings, Costs
from nemo_style_aligner.trainer.models.spans import Run, Span, Spans

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


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


EXPERTS = Experts(number=4, per_token=3, ffn_hidden_size=80)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "whole", "selective"),  # numbers per token and layer, beside those of attention
    [
        ({}, 4 * 64 + 3 * 96, 2 * 64 + 2 * 96),
        ({"normalization": "layernorm"}, 4 * 64 + 3 * 96, 4 * 64 + 2 * 96),
        ({"activation": "gelu"}, 4 * 64 + 5 * 96, 2 * 64 + 5 * 96),
        ({"activation": "squared-relu", "gated": False, "normalization": "layernorm1p"}, 4 * 64 + 2 * 96, None),
        ({"experts": EXPERTS}, *([4 * 64 + 3 * (64 + 4 * 80)] * 2)),
        ({"experts": EXPERTS, "bias": True, "clamped_swiglu": True}, *([4 * 64 + 3 * (64 + 4 * 80)] * 2)),
    ],
    ids=["RMSNorm and SwiGLU", "LayerNorm", "gated GELU", "Nemotron", "experts", "experts with biases"],
)
def test_activations_need_the_memory_that_the_documentation_says(
    shape: dict[str, Any], whole: int, selective: int | None, dtype: torch.dtype
) -> None:
    """Bytes saved for the backward pass, per token and layer: docs/architecture.md, "Training passes"."""
    architecture = ModelArchitecture(**(SHAPE | {"hidden_size": 64, "ffn_hidden_size": 96} | shape))
    a, g, d = 4, 2, 16
    for granularity, numbers in ((None, whole), ("selective", whole if selective is None else selective)):
        expected = dtype.itemsize * (numbers + 2 * (a + g) * d)
        if architecture.experts is not None:
            expected += 24 * 3 + 5 * 4 + 28 - dtype.itemsize * 64 * (granularity is not None)
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
    """With norms of queries and keys; torch's attention also keeps what it joins of several sequences."""
    if not compiled:
        monkeypatch.setattr(layer_kernels, "best_kernels", lambda: None)
    shape = SHAPE | {"kv_channels": 64, "num_query_groups": num_groups, "qk_layernorm": normed}
    architecture, dtype = ModelArchitecture(**shape), torch.float32
    assert uses_torch_attention(dtype) is not compiled
    counted = activation_bytes(architecture, dtype.itemsize, torch_attention=not compiled) / architecture.num_layers
    # Beside what is counted: statistics of norms and softmaxes, a number or two per head.
    most = 1.03 if compiled or num_sequences == 1 else 1.25
    assert 0.7 * counted < saved_bytes(architecture, dtype, None, num_sequences) < most * counted


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
    parts = micro_batches(Costs.apart(lengths), MicroBatching(4, max_tokens, group))
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
    assert micro_batches(Costs.apart([0, 0]), MicroBatching(4, max_tokens, group)) == [[]]


def test_micro_batches_and_shares_of_a_few_rows() -> None:
    assert micro_batches(Costs.apart([3, 0, 2, 5, 1, 1]), MicroBatching(4)) == [[0, 2, 3, 4], [5]]
    assert micro_batches(Costs.apart([2, 5, 3, 4, 6]), MicroBatching(1, max_tokens=8)) == [[0, 4], [1, 2], [3]]
    assert micro_batches(Costs.apart([1, 1, 1, 1]), MicroBatching(1, group=2)) == [[0, 1], [2, 3]]
    assert shares(Costs.apart([3, 3, 9, 1, 0, 0, 2, 2]), 2, group=2) == [[0, 1, 6, 7], [2, 3]]
    with pytest.raises(ValueError, match="3 rows cannot be divided into groups of 2"):
        shares(Costs.apart([1, 1, 1]), 2, group=2)


def test_a_packed_row_has_what_is_needed_and_is_filled_up() -> None:
    ids = torch.arange(1, 13).view(3, 4)
    wanted = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    asked = Sequences.padded(ids, wanted)
    packed = pack_row(asked, multiple=4)
    assert packed.tokens.tolist() == [[1, 2, 9, 10, 11, 0, 0, 0]] and packed.sequences.spans == Spans.whole([2, 3, 3])
    assert packed.sequences.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert packed.sequences.cu_seqlens_q.tolist() == packed.sequences.cu_seqlens_kv.tolist() == [0, 2, 5, 8]
    assert packed.sequences.max_seqlen_q == packed.sequences.max_seqlen_kv == 3
    assert packed.sequences.qkv_format == "thd"
    assert packed.outputs.tolist() == [1, 2, 4]
    assert asked.targets().tolist() == [3, 10, 12]
    assert Padding.of(asked, 3).pad(torch.tensor([7, 8, 9])).tolist() == [[0, 7, 0], [0, 0, 0], [8, 0, 9]]
    assert pack_row(asked, multiple=5).sequences.spans == Spans.whole([2, 3])
    nothing = pack_row(Sequences.padded(ids, torch.zeros_like(wanted)), multiple=2)
    assert nothing.tokens.tolist() == [[0, 0]] and not len(nothing.outputs)
    assert nothing.sequences.spans == Spans.whole([2])
    assert used_lengths(torch.ones(3, 0)) == [0, 0, 0]


ALIKE = [[1, 2, 3, 4, 5], [9, 8, 7], [1, 2, 3, 6], [1, 2, 3, 7, 8, 9]]


def asked_of(rows: list[list[int]], prompt: int) -> Sequences:
    """Of all tokens behind a prompt."""
    tokens = [torch.tensor(row) for row in rows]
    return Sequences(tokens, [torch.arange(1, len(row)) >= prompt for row in rows])


def test_a_prompt_is_once_in_a_packed_row() -> None:
    """And its last token's output is wanted of each response, at the place of the sequence in the batch."""
    asked = asked_of(ALIKE, 3).sharing(None)
    assert asked.beginnings == Beginnings.apart(4), "these few are not worth it"
    asked = asked_of(ALIKE, 3)
    asked = asked.sharing(asked.prompt_lengths())
    packed = pack_row(asked, multiple=5)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 7, 8, 9, 8, 0, 0]] and asked.num_tokens == 8
    prompt, others = Run(0, 3), (Run(3, 4), Run(4, 6))
    by_itself = [Span(run, (run,)) for run in (Run(6, 8), Run(8, 10))]
    assert packed.sequences.spans == Spans(
        (Span(prompt, (prompt,)), *(Span(run, (prompt, run)) for run in others), *by_itself)
    )
    assert packed.sequences.positions.tolist() == [0, 1, 2, 3, 3, 4, 0, 1, 0, 1]
    assert packed.sequences.cu_seqlens_kv.tolist() == [0, 3, 7, 12, 14, 16]
    assert packed.sequences.key_index.tolist()[3:12] == [0, 1, 2, 3, 0, 1, 2, 4, 5]
    assert packed.outputs.tolist() == [2, 3, 2, 2, 4, 5]
    assert asked.targets().tolist() == [4, 5, 6, 7, 8, 9]
    packed.compute_outputs_alone()
    assert packed.sequences.outputs.tolist() == [2, 3, 4, 5] and packed.repeats.tolist() == [0, 1, 0, 0, 2, 3]


def test_what_sequences_begin_with_is_found() -> None:
    """Where nobody knows their prompts: in families that save most, and not for less than 16 tokens."""
    start, one, other = list(range(20)), list(range(100, 130)), list(range(200, 217))
    rows = [start + one + [1], start + other, start + one + [2, 3], start, start[:15], start + other]
    found = Beginnings.found_in([torch.tensor(row) for row in rows])
    families = found.members()
    assert sorted(families) == [[0, 2], [1, 5], [3], [4]]
    assert found.sizes == (50, 37, 50, 0, 0, 37)
    assert Beginnings.found_in([]).members() == []


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_packed_and_dealt_together(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((1, 4, 16)) for _ in range(6)]
    families = [family for family, size in enumerate(sizes) for _ in range(size)]
    prompts = [draw.randrange(1, 60) for _ in sizes]
    whole = [prompts[family] + draw.randrange(40) for family in families]
    costs = Costs(whole, [prompts[family] for family in families], families)
    for max_tokens in (None, 50, 400):
        parts = micro_batches(costs, MicroBatching(8, max_tokens))
        assert sorted(row for part in parts for row in part) == list(range(len(whole)))
        for part in parts:
            assert len(part) <= 8 if max_tokens is None else costs.of(part) <= max_tokens or len(part) == 1
        computed = sum(map(costs.of, parts))
        apart = micro_batches(Costs.apart(whole), MicroBatching(8, max_tokens))
        assert costs.of(range(len(whole))) <= computed <= sum(map(Costs.apart(whole).of, apart))
    for num_ranks in (1, 2, 3, 8):
        parts = shares(costs, num_ranks)
        assert sorted(row for part in parts for row in part) == list(range(len(whole)))
        sums = [costs.of(part) for part in parts]
        by_itself = [sum(whole[row] for row in part) for part in shares(Costs.apart(whole), num_ranks)]
        assert max(sums) <= max(by_itself)
        assert num_ranks > 1 or sums == [costs.of(range(len(whole)))]


def test_pairs_that_share_prompts_stay_pairs() -> None:
    """Also where a pair's answers are to different prompts, of which other pairs have one."""
    costs = Costs([5, 6, 5, 5, 7, 7, 3, 3], [4, 4, 4, 2, 2, 2, 0, 0], [0, 0, 0, 1, 1, 1, 2, 3])
    assert costs.units(2) == [[[0, 1], [2, 3], [4, 5]], [[6, 7]]]
    assert costs.of([0, 1, 2, 3]) == 21 - 8 and costs.without({0, 1}).of([0, 1, 2, 3]) == 10
    assert micro_batches(costs, MicroBatching(1, 24, 2)) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert micro_batches(costs, MicroBatching(4, None, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_data_parallel_ranks_get_equal_work() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (50 * torch.randn(64, generator=generator).mul(0.9).exp()).long().clamp(8, 500).tolist()
    shorter = [min(length, 200) for length in lengths]  # the longest is less than a sixteenth of the sum
    for num_ranks, work in ((1, lengths), (2, lengths), (3, lengths), (8, lengths), (16, shorter)):
        parts = shares(Costs.apart(work), num_ranks)
        assert sorted(row for part in parts for row in part) == list(range(64))
        sums = [sum(work[row] for row in part) for part in parts]
        assert sum(sums) / num_ranks / max(sums) > 0.99
    in_order = [sum(lengths[start::8]) for start in range(8)]
    assert sum(in_order) / 8 / max(in_order) < 0.9  # it takes more than a round robin
    assert shares(Costs.apart([5, 5]), 4).count([]) == 2


@pytest.mark.parametrize("seed", range(8))
def test_few_sequences_are_divided_almost_as_evenly_as_they_can_be(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (50 * torch.randn(9, generator=generator).mul(0.9).exp()).long().clamp(8, 500).tolist()

    def largest(ranks: Sequence[int]) -> int:
        return max(sum(n for n, rank in zip(lengths, ranks, strict=True) if rank == r) for r in range(3))

    best = min(largest(ranks) for ranks in itertools.product(range(3), repeat=9))
    parts = shares(Costs.apart(lengths), 3)
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

    assert balance(shares(Costs.apart(work), 8)) > 0.98 > 0.95 > balance(shares(Costs.apart(lengths), 8))


def test_packing_is_measured_over_all_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_the_other_ranks(by_rank: torch.Tensor, group: Any) -> None:
        by_rank[:, 1] = torch.tensor([10.0, 30.0, 30.0], dtype=torch.float64)

    monkeypatch.setattr(pipeline.torch.distributed, "all_reduce", add_the_other_ranks)
    model: Any = SimpleNamespace(layout=SimpleNamespace(dp_size=2, dp_rank=0))
    measured = pipeline._packing_metrics(model, num_used=10, num_computed=10, work=10)
    assert measured == {"padding_efficiency": 0.5, "dp_balance": pytest.approx(20 / 30)}  # the mean over the most
